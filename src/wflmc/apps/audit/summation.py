"""The summation attack: neighbours whose float32 sums part by more than the record or device that differs.

A sum of many terms, each within its clip, need not change by as little as its terms do (Casacuberta et al., 2022). The
neighbours here put the running sum on either side of a power of two. Small terms that follow are rounded away on one
side and not on the other; large ones then bring both sums back, so that a device's clip does not hide the difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.apps.audit.attack import Target, transmitted
from wflmc.dynamics import Array, overdamped
from wflmc.planning.plan import Rounds
from wflmc.posterior import GaussianPosterior, Regression, gaussian_regression, softmax_regression
from wflmc.sampling.kernel import KernelConstants

MOST_RECORDS = 100_000
MOST_DEVICES = 40_000
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


@dataclass(frozen=True)
class Summation:
    """The largest change of a sum without noise that one of the tried pairs of neighbours made."""

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
        tried = f"{self.terms:,} terms in float32, {self.tried} pairs of neighbours tried"
        mark = "  <-- more than claimed" if self.flagged else ""
        return f"{self.name}, {tried}: largest change / claimed = {self.ratio:.6g}{mark}"


def neighbours(count: int, size: float, neighbour: float = -1.0, lanes: int = 1) -> tuple[Array, Array]:
    """Return terms of two neighbouring sums, [count], none above `size` in magnitude; they differ in the first one.

    Args:
        count: at least 16 for every lane.
        size: the largest magnitude of a term.
        neighbour: the first term of the second sum, over that of the first: −1, or 0 where neighbours are empty.
        lanes: how often every term but the first is repeated, for sums that are kept side by side.
    """
    length = count // lanes
    unit = 2.0 ** (np.floor(np.log2(size)) - 7)
    large = np.floor(size / unit) * unit  # of few digits, so that sums of it are exact
    peak = 2.0 ** np.floor(np.log2(large * length / 3))
    before = peak - large * (1 + neighbour) / 2  # from here the first terms lead to either side of the peak
    ones, step = int(before // large), peak * 2.0**-24  # the spacing of floats below the peak
    head = [*[large] * ones, before - ones * large]
    drift = (length - 2 * len(head)) * step
    down = np.floor(max(before - drift / 2, 0.0) / unit) * unit  # leaves both sums on either side of zero
    tail = [-(down % large), *[-large] * int(down // large)]
    many = [-0.9 * step] * (length - 1 - len(head) - len(tail))
    terms = np.zeros((2, count))
    terms[:, 0] = large, neighbour * large
    terms[:, lanes : lanes * length] = np.repeat([*head, *many, *tail], lanes)
    return terms[0], terms[1]


def linear_terms(terms: Array, devices: int = 1) -> Any:
    """Return a linear model of one feature whose gradients at θ = 0 are these terms, over devices in their order."""
    feature = np.full((terms.size, 1), FEATURE)
    return gaussian_regression(jax.random.key(0), devices, X=feature, y=-terms / FEATURE, partition="blocks")


def softmax_terms(terms: Array, devices: int = 1) -> Any:
    """Return the same of a softmax model of two classes: a term is in the gradient of both, with opposite signs."""
    size, label = 2 * np.abs(terms)[:, None], (terms > 0).astype(int)
    return softmax_regression(jax.random.key(0), devices, classes=2, X=size, y=label, partition="blocks")


def change(
    pair: list[Any], clip: float, example_clip: float = np.inf, gain: float = 1, chains: int = 1, rounding: float = 0
) -> float:
    """Return how far apart what arrives of two posteriors is, without noise, where all devices send at θ = 0.

    Args:
        chains: how many are computed together, on which the order of a sum may depend.
        rounding: how much less clips act at, `Plan.rounding`.
    """
    by_example, full = bool(np.isfinite(example_clip)), np.ones(pair[0].devices)
    each = np.ones(chains, np.float32)
    limit = np.float32(example_clip * full / (1 + rounding)) if by_example else None
    constants = KernelConstants(np.float32(clip * full / (1 + rounding)), each[0], overdamped(), limit)
    rounds = Rounds(each, np.float32(gain) * each, each[:, None] * np.float32(full), None, constants=constants)
    start = jnp.zeros((chains, pair[0].dim))
    sent = [transmitted(side.on_accelerator(chains, 2.0**30, by_example), rounds, start).double for side in pair]
    return float(np.linalg.norm(sent[0] - sent[1], axis=1).max())


def pairs(count: int, size: float, neighbour: float) -> Iterator[list[Array]]:
    """Yield neighbours of all lengths up to count, each a quarter of the one before, filled up with zeros."""
    length = count
    while length >= SHORTEST:
        for lanes in (lanes for lanes in LANES if length >= SHORTEST * lanes):
            yield [np.pad(side, (0, count - length)) for side in neighbours(length, size, neighbour, lanes)]
        length //= 4


def attack_sums(target: Target, posterior: Regression) -> Iterator[Summation]:
    """Search for neighbours whose sums part by more than the plan claims: records of a device, and devices.

    Args:
        posterior: says which kind of model, how many devices, and how many records the largest of them has.
    """
    plan, k = target.plan, target.device
    at = int(np.argmax(target.signal[:, k]))
    half = float(plan.privacy.half_change(plan.clip[k], plan.example_clip[k]))
    gain, clips = float(target.signal[at, k]) / half, (float(plan.clip[k]), float(plan.example_clip[k]))
    # A term of a softmax model is in the gradients of two classes.
    make, norm = (linear_terms, 1.0) if isinstance(posterior, GaussianPosterior) else (softmax_terms, 2**0.5)
    sums = {"sum over devices": (min(plan.devices, MOST_DEVICES), min(clips), True)}
    if plan.privacy.unit == "record":
        sums["sum over records"] = (min(int(posterior.sizes.max()), MOST_RECORDS), clips[1], False)
    for name, (count, size, alone) in sums.items():
        changes: list[float] = []
        for terms in pairs(count, size / norm, target.neighbour):
            pair = [make(side, count if alone else 1) for side in terms]
            changes += [change(pair, *clips, gain, chains, plan.rounding) for chains in CHAINS]
        if changes:
            yield Summation(name, count, len(changes), max(changes) / (2 * half * gain))
