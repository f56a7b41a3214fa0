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

from wflmc.apps.audit.attack import SUM_MEMORY, transmitted
from wflmc.apps.audit.target import Target
from wflmc.dynamics import Array, overdamped
from wflmc.planning.plan import Rounds
from wflmc.posterior import (
    GaussianPosterior,
    Regression,
    gaussian_regression,
    softmax_regression,
)
from wflmc.sampling.kernel import KernelConstants, KernelRounds

MAX_RECORDS = 100_000
"""Records of a device that are tried at most."""
MAX_DEVICES = 40_000
"""Devices that are tried at most."""
SHORTEST = 16
"""Terms of the shortest sums that are tried."""
LANES = (1, 8)
"""Sums that a processor may keep side by side: terms are repeated so often."""
CHAINS = (1, 2)
"""Numbers of chains that are computed together."""
FEATURE = 2.0**-10
"""The feature of a linear model, whose targets make the terms; a power of two, so that
products with it are exact."""
ROUNDING = 1e-9
"""Relative, of what a sum may be off before it is a finding."""
FLOAT32_SPACING = 2.0**-24
"""Distance of float32 numbers just below a power of two, relative to it."""
LARGE_TERM_BITS = 7
"""Binary digits after the first one of the large terms: few, so that sums of them are
exact in float32."""


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
        """Return whether the sum changes by more than is claimed.

        A sum is also flagged if its change cannot be compared with the claim because it
        is not a number. Noise is scaled to the claimed change, so that a flagged sum
        breaks the promise whatever the error rates of the other attacks are.
        """
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

    Large terms lead the running sums to either side of a power of two, the peak. Terms
    of 0.9 of the distance of floats below the peak follow: above it, where floats are
    twice as far apart, each is rounded away; below it each is rounded to the whole
    distance. Large terms then lead both sums back to about zero.

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
    unit = 2.0 ** (np.floor(np.log2(size)) - LARGE_TERM_BITS)
    large = np.floor(size / unit) * unit
    peak = 2.0 ** np.floor(np.log2(large * length / 3))
    # From here the first terms lead to either side of the peak.
    before_peak = peak - large * (1 + neighbour) / 2
    count_up = int(before_peak // large)
    remainder_up = before_peak - count_up * large
    head = [*[large] * count_up, remainder_up]
    spacing = peak * FLOAT32_SPACING
    drift = (length - 2 * len(head)) * spacing
    # The way down leaves both sums on either side of zero.
    way_down = max(before_peak - drift / 2, 0.0)
    down = np.floor(way_down / unit) * unit
    count_down = int(down // large)
    tail = [-(down % large), *[-large] * count_down]
    count_small = length - 1 - len(head) - len(tail)
    small = [-0.9 * spacing] * count_small
    terms = np.zeros((2, count))
    terms[0, 0] = large
    terms[1, 0] = neighbour * large
    terms[:, lanes : lanes * length] = np.repeat([*head, *small, *tail], lanes)
    return terms[0], terms[1]


def linear_terms(terms: Array, devices: int = 1) -> Regression:
    """Return a linear model of one feature whose gradients at θ = 0 are these terms.

    The gradient of a record with feature u and target v is −u v there, so that the
    targets are −term/u; u is a power of two, and the products are exact.

    Args:
        terms: [n].
        devices: number of devices that hold them, in their order.
    """
    return gaussian_regression(
        jax.random.key(0),
        devices,
        X=np.full((terms.size, 1), FEATURE),
        y=-terms / FEATURE,
        partition="blocks",
    )


def softmax_terms(terms: Array, devices: int = 1) -> Regression:
    """Return a softmax model of two classes, whose gradients have these terms.

    At θ = 0 both classes have probability 1/2, so that the gradient of a record with
    feature 2|t| is ±|t| for the one class and ∓|t| for the other; the label decides the
    signs. A term is therefore in the gradient twice, with opposite signs.

    Args:
        terms: [n].
        devices: number of devices that hold them, in their order.
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

    All devices transmit at θ = 0, with the same thresholds and as strongly as the
    strongest one.

    Args:
        pair: neighbouring posteriors.
        clip: ℓ of all devices.
        example_clip: c of all devices; infinite where records are not clipped.
        gain: α.
        chains: number of chains that are computed together, on which the order of a sum
            may depend.
        rounding: relative margin by which clipping acts below ℓ and c, `Plan.rounding`.

    Returns:
        The largest distance over chains.
    """
    by_example = bool(np.isfinite(example_clip))
    all_devices = np.ones(pair[0].devices)
    clips = np.float32(clip * all_devices / (1 + rounding))
    example_clips = np.float32(example_clip * all_devices / (1 + rounding))
    constants = KernelConstants(
        clip=clips,
        noise_power=np.float32(1),
        dynamics=overdamped(),
        example_clip=example_clips if by_example else None,
    )
    # One round for each chain: they are computed together.
    of_round = np.ones(chains, np.float32)
    gains = np.float32(gain) * of_round
    weights = of_round[:, None] * np.float32(all_devices)
    rounds = Rounds(of_round, gains, weights, None)
    kernel_rounds = KernelRounds(rounds, constants)
    start = jnp.zeros((chains, pair[0].dim))
    signals = []
    for posterior in pair:
        ready = posterior.on_accelerator(chains, SUM_MEMORY, by_example)
        signals.append(transmitted(ready, kernel_rounds, start).double)
    plus, minus = signals
    distances = np.linalg.norm(plus - minus, axis=1)
    return float(distances.max())


def padded_neighbours(
    count: int, size: float, neighbour: float
) -> Iterator[list[Array]]:
    """Yield neighbours of several lengths up to a number of terms, padded with zeros.

    Each length is a quarter of the one before, down to 16 terms for every lane; all
    pairs have the same shape, so that the same compiled sums serve them.

    Args:
        count: number of terms, zeros included.
        size: the largest magnitude of a term.
        neighbour: the first term of the second sum, over that of the first.

    Yields:
        Two arrays [count].
    """
    length = count
    while length >= SHORTEST:
        for lanes in LANES:
            if length >= SHORTEST * lanes:
                sides = neighbours(length, size, neighbour, lanes)
                yield [np.pad(terms, (0, count - length)) for terms in sides]
        length //= 4


def attack_sums(target: Target, posterior: Regression) -> Iterator[Summation]:
    """Search for neighbours whose sums part by more than the plan claims.

    The gain is that of the round in which the device arrives most strongly. There is no
    randomness in it, and no error probability: a change beyond the claimed sensitivity
    is a counterexample.

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
    largest_signal = float(target.signal[:, device].max())
    half_change = float(plan.privacy.half_change(clip, example_clip))
    gain = largest_signal / half_change
    build: Callable[[Array, int], Regression] = linear_terms
    norm_of_term = 1.0
    if not isinstance(posterior, GaussianPosterior):
        build = softmax_terms
        norm_of_term = 2**0.5  # a term is in the gradients of two classes
    for attacked in _attacked_sums(target, posterior):
        size = attacked.size / norm_of_term
        changes: list[float] = []
        for terms in padded_neighbours(attacked.terms, size, target.neighbour):
            sides = [build(side, attacked.devices) for side in terms]
            for chains in CHAINS:
                largest = change(
                    sides,
                    clip,
                    example_clip,
                    gain=gain,
                    chains=chains,
                    rounding=plan.rounding,
                )
                changes.append(largest)
        if changes:
            ratio = max(changes) / (2 * half_change * gain)
            yield Summation(attacked.name, attacked.terms, len(changes), ratio)


def _attacked_sums(target: Target, posterior: Regression) -> list[AttackedSum]:
    """Return the sums whose terms the plan protects."""
    plan = target.plan
    clip = float(plan.clip[target.device])
    example_clip = float(plan.example_clip[target.device])
    devices = min(plan.devices, MAX_DEVICES)
    smaller_clip = min(clip, example_clip)
    sums = [AttackedSum("sum over devices", devices, smaller_clip, devices)]
    if plan.privacy.unit == "record":
        records = min(int(posterior.sizes.max()), MAX_RECORDS)
        sums.append(AttackedSum("sum over records", records, example_clip, 1))
    return sums
