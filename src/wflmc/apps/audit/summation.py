"""The summation attack: neighbours whose float32 sums part by more than is claimed.

A sum of many terms, each within its clipping threshold, need not change by as little as
its terms do (Casacuberta et al., 2022). The neighbours here put the running sum on
either side of a power of two. Small terms that follow are rounded away on one side and
not on the other; large ones then bring both sums back, so that a device's clipping does
not hide the difference.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.apps.audit.attack import Target, transmitted
from wflmc.dynamics import Array, overdamped
from wflmc.planning.plan import Rounds
from wflmc.posterior import (
    GaussianPosterior,
    Regression,
    gaussian_regression,
    softmax_regression,
)
from wflmc.sampling.kernel import KernelConstants, KernelRounds

MOST_RECORDS = 100_000
"""Records of a device that are tried at most."""
MOST_DEVICES = 40_000
"""Devices that are tried at most."""
SHORTEST = 16
"""Terms of the shortest sums that are tried."""
LANES = (1, 8)
"""Sums that a processor may keep side by side: terms are repeated so often."""
CHAINS = (1, 2)
"""Chains that are computed together."""
FEATURE = 2.0**-10
"""Of a linear model, whose targets make the terms."""
ROUNDING = 1e-9
"""Relative, of what a sum may be off before it is a finding."""
MEMORY = 2.0**30
"""Limit of the sums, in bytes."""


@dataclass(frozen=True)
class Summation:
    """The largest change of a sum without noise, over all pairs that were tried."""

    name: str
    terms: int
    """Records of a device, or devices."""
    tried: int
    """Pairs of neighbours, each with some numbers of chains."""
    ratio: float
    """Largest change of what arrives, over twice the sensitivity at that amplitude."""

    @property
    def flagged(self) -> bool:
        """Whether the sum changes by more than is claimed."""
        return not self.ratio <= 1 + ROUNDING

    def __str__(self) -> str:
        tried = f"{self.tried} pairs of neighbours tried"
        mark = "  <-- more than claimed" if self.flagged else ""
        change = f"largest change / claimed = {self.ratio:.6g}"
        return f"{self.name}, {self.terms:,} terms in float32, {tried}: {change}{mark}"


class AttackedSum(NamedTuple):
    """A sum that is attacked."""

    name: str
    terms: int
    """Records of a device, or devices."""
    size: float
    """The largest norm of a term."""
    devices: int
    """How many devices hold the terms."""


def neighbours(
    count: int,
    size: float,
    neighbour: float = -1.0,
    lanes: int = 1,
) -> tuple[Array, Array]:
    """Return terms of two neighbouring sums, which differ in the first one.

    Args:
        count: at least 16 for every lane.
        size: the largest magnitude of a term.
        neighbour: the first term of the second sum, over that of the first: −1, or 0
            where neighbours are empty.
        lanes: how often every term but the first is repeated, for sums that are kept
            side by side.

    Returns:
        Two arrays [count] of numbers of at most `size` in magnitude.
    """
    length = count // lanes
    unit = 2.0 ** (np.floor(np.log2(size)) - 7)
    large = np.floor(size / unit) * unit  # of few digits, so that sums of it are exact
    peak = 2.0 ** np.floor(np.log2(large * length / 3))
    # From here the first terms lead to either side of the peak.
    before = peak - large * (1 + neighbour) / 2
    count_up = int(before // large)
    spacing = peak * 2.0**-24  # of floats below the peak
    head = [*[large] * count_up, before - count_up * large]
    drift = (length - 2 * len(head)) * spacing
    # The way down leaves both sums on either side of zero.
    down = np.floor(max(before - drift / 2, 0.0) / unit) * unit
    tail = [-(down % large), *[-large] * int(down // large)]
    small = [-0.9 * spacing] * (length - 1 - len(head) - len(tail))
    terms = np.zeros((2, count))
    terms[:, 0] = large, neighbour * large
    terms[:, lanes : lanes * length] = np.repeat([*head, *small, *tail], lanes)
    return terms[0], terms[1]


def linear_terms(terms: Array, devices: int = 1) -> Regression:
    """Return a linear model of one feature whose gradients at θ = 0 are these terms.

    Args:
        terms: [n].
        devices: that hold them, in their order.
    """
    feature = np.full((terms.size, 1), FEATURE)
    return gaussian_regression(
        jax.random.key(0),
        devices,
        X=feature,
        y=-terms / FEATURE,
        partition="blocks",
    )


def softmax_terms(terms: Array, devices: int = 1) -> Regression:
    """Return a softmax model of two classes, whose gradients have these terms.

    A term is in the gradient of both classes, with opposite signs.

    Args:
        terms: [n].
        devices: that hold them, in their order.
    """
    return softmax_regression(
        jax.random.key(0),
        devices,
        classes=2,
        X=2 * np.abs(terms)[:, None],
        y=(terms > 0).astype(int),
        partition="blocks",
    )


def change(
    pair: list[Regression],
    clip: float,
    example_clip: float = np.inf,
    gain: float = 1,
    chains: int = 1,
    rounding: float = 0,
) -> float:
    """Return how far apart what arrives of two posteriors is, without noise.

    All devices send at θ = 0.

    Args:
        pair: neighbouring posteriors.
        clip: ℓ of all devices.
        example_clip: c of all devices; infinite: records are not clipped.
        gain: α.
        chains: how many are computed together, on which the order of a sum may depend.
        rounding: how much less clipping acts at, `Plan.rounding`.

    Returns:
        The largest distance over chains.
    """
    by_example = bool(np.isfinite(example_clip))
    all_devices = np.ones(pair[0].devices)
    example_clips = np.float32(example_clip * all_devices / (1 + rounding))
    constants = KernelConstants(
        clip=np.float32(clip * all_devices / (1 + rounding)),
        noise_power=np.float32(1),
        dynamics=overdamped(),
        example_clip=example_clips if by_example else None,
    )
    of_round = np.ones(chains, np.float32)
    rounds = Rounds(
        of_round,
        np.float32(gain) * of_round,
        of_round[:, None] * np.float32(all_devices),
        None,
    )
    start = jnp.zeros((chains, pair[0].dim))

    def signal(side: Regression) -> Array:
        ready = side.on_accelerator(chains, MEMORY, by_example)
        return transmitted(ready, KernelRounds(rounds, constants), start).double

    distance = signal(pair[0]) - signal(pair[1])
    return float(np.linalg.norm(distance, axis=1).max())


def pairs(count: int, size: float, neighbour: float) -> Iterator[list[Array]]:
    """Yield neighbours of all lengths up to count, filled up with zeros.

    Each length is a quarter of the one before.
    """
    length = count
    while length >= SHORTEST:
        for lanes in LANES:
            if length >= SHORTEST * lanes:
                sides = neighbours(length, size, neighbour, lanes)
                yield [np.pad(side, (0, count - length)) for side in sides]
        length //= 4


def attack_sums(target: Target, posterior: Regression) -> Iterator[Summation]:
    """Search for neighbours whose sums part by more than the plan claims.

    Args:
        target: the plan and the device that is attacked.
        posterior: says which kind of model, how many devices, and how many records the
            largest of them has.

    Yields:
        What was found for sums over devices, and over records if they are protected.
    """
    plan = target.plan
    device = target.device
    clip = float(plan.clip[device])
    example_clip = float(plan.example_clip[device])
    strongest_round = int(np.argmax(target.signal[:, device]))
    half_change = float(
        plan.privacy.half_change(plan.clip[device], plan.example_clip[device]),
    )
    gain = float(target.signal[strongest_round, device]) / half_change
    make: Callable[[Array, int], Regression] = linear_terms
    norm_of_unit = 1.0
    if not isinstance(posterior, GaussianPosterior):
        make = softmax_terms
        norm_of_unit = 2**0.5  # a term is in the gradients of two classes
    for attacked in _attacked_sums(target, posterior):
        changes: list[float] = []
        for terms in pairs(
            attacked.terms,
            attacked.size / norm_of_unit,
            target.neighbour,
        ):
            sides = [make(side, attacked.devices) for side in terms]
            for chains in CHAINS:
                largest = change(sides, clip, example_clip, gain, chains, plan.rounding)
                changes.append(largest)
        if changes:
            ratio = max(changes) / (2 * half_change * gain)
            yield Summation(attacked.name, attacked.terms, len(changes), ratio)


def _attacked_sums(target: Target, posterior: Regression) -> list[AttackedSum]:
    """Return the sums whose terms the plan protects."""
    plan = target.plan
    clip = float(plan.clip[target.device])
    example_clip = float(plan.example_clip[target.device])
    devices = min(plan.devices, MOST_DEVICES)
    smaller_clip = min(clip, example_clip)
    sums = [AttackedSum("sum over devices", devices, smaller_clip, devices)]
    if plan.privacy.unit == "record":
        records = min(int(posterior.sizes.max()), MOST_RECORDS)
        sums.append(AttackedSum("sum over records", records, example_clip, 1))
    return sums
