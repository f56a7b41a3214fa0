"""A search for worse neighbours than those of the summation attack, on every path that adds clipped gradients.

The attacker knows all records (or devices) but one and may choose them, their sizes and their order; a small evolution
looks for the choice whose sums, without noise, part the most. However long it looks, they may not part by more than the
plan pays for: the largest change over 2 min(c, ℓ) is at most 1.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.apps.audit.summation import SHORTEST, neighbours
from wflmc.sums.devices import Sum

from ..conftest import FULL, count

FEATURE = 2.0**-10


class Choice(NamedTuple):
    """What the attacker chooses."""

    heads: float
    """Share of the terms that bring the sum up."""
    tails: float
    """Share of those that bring it down again."""
    drift: float
    """Size of all others, over half the spacing of floats at the top."""
    at: float
    """Where among them the unknown one is."""
    lanes: int
    """How often each is repeated, for sums that are kept side by side."""
    chance: int
    """Seed of an order, 0: as they are; and of sizes, where it is odd."""

    def terms(self, length: int) -> np.ndarray:
        """Terms of at most 1 of both sums, [2, length], which differ in one place."""
        heads, tails = int(self.heads * length), int(self.tails * length)
        half_spacing = 2.0 ** np.floor(np.log2(max(heads, 1))) * 2.0**-24
        known = np.concatenate(
            [
                np.ones(heads),
                np.full(length - heads - tails, -self.drift * half_spacing),
                -np.ones(tails),
            ]
        )
        rng = np.random.default_rng(self.chance)
        if self.chance % 2:
            known *= rng.uniform(0.5, 1, length) * 10.0 ** rng.uniform(-3, 0, length)
        if self.chance:
            known = rng.permutation(known)
        known = np.repeat(known[:: self.lanes], self.lanes)[:length]
        pair = np.stack([known, known])
        pair[:, int(self.at * (length - 1))] = 1, -1
        return pair

    def changed(self, rng: np.random.Generator) -> Choice:
        """One near to it."""
        fresh = random_choice(rng)
        keep = rng.random(len(self)) < 0.6
        return Choice(
            *(
                old if keeps_old else new
                for old, new, keeps_old in zip(self, fresh, keep, strict=True)
            )
        )


def random_choice(rng: np.random.Generator) -> Choice:
    heads = rng.choice([1 / 3, rng.uniform(0.05, 0.5)])
    return Choice(
        heads,
        rng.uniform(0, heads),
        rng.uniform(0.2, 2.2),
        rng.choice([0.0, rng.random()]),
        int(rng.choice([1, 8])),
        int(rng.choice([0, 0, rng.integers(1, 1000)])),
    )


def linear(terms, devices):
    rows = np.full((terms.size, 1), FEATURE)
    return wflmc.gaussian_regression(
        jax.random.key(0), devices, X=rows, y=-terms / FEATURE, partition="blocks"
    )


def classes(terms, devices):
    size = 2**0.5 * np.abs(terms)[:, None]
    label = (terms > 0).astype(int)
    return wflmc.softmax_regression(
        jax.random.key(0), devices, classes=2, X=size, y=label, partition="blocks"
    )


def _likelihood(theta, term):
    return -theta @ jnp.stack([0.6 * term, 0.8 * term])


def _prior(theta):
    return -0.5 * theta @ theta


def own(terms, devices, batch=None):
    data = np.asarray(terms, np.float32)
    settings = {
        "initial": jnp.zeros(2),
        "devices": devices,
        "partition": "blocks",
        "mu": 1.0,
        "L": 1.0,
        "batch": batch,
    }
    return wflmc.posterior_from(_likelihood, _prior, data, **settings)


def batches(terms, devices):
    return own(terms, devices, batch=max(1, terms.size // devices))


@jax.jit
def added(posterior, theta, weight, clip, example_clip, key) -> Sum:
    return posterior.unrounded_sum(
        theta, weight, clip, key=key, example_clip=example_clip
    ).total


def largest(make, length, devices, clip, example_clip, tries, own_theta=False):
    """Return the largest change that the search finds, over what is paid for."""
    rng = np.random.default_rng(length)
    best = random_choice(np.random.default_rng(0))
    largest_ratio = -1.0
    paid = 2 * min(clip, example_clip)
    known = [
        neighbours(length, 1.0, -1.0, lanes)
        for lanes in (1, 8)
        if length >= SHORTEST * lanes
    ]
    for turn in range(len(known), len(known) + tries):
        choice = best.changed(rng) if turn % 3 else random_choice(rng)
        sides = known.pop() if known else choice.terms(length)
        pair = [make(side * min(clip, example_clip), devices) for side in sides]
        clips = np.full(devices, clip), np.full(devices, example_clip)
        less = 1 + pair[0].rounding(*clips).total
        limit = None if np.isinf(example_clip) else np.float32(clips[1] / less)
        theta = np.zeros(
            (devices, pair[0].dim) if own_theta else pair[0].dim, np.float32
        )
        key = jax.random.key(0) if getattr(pair[0], "batch", None) else None
        weight = np.ones(devices, np.float32)
        sums = [
            added(
                side.on_accelerator(1, 2.0**30, limit is not None),
                theta,
                weight,
                np.float32(clips[0] / less),
                limit,
                key,
            )
            for side in pair
        ]
        first, second = (total.double for total in sums)
        ratio = float(np.linalg.norm(first - second)) / paid
        if ratio > largest_ratio:
            best, largest_ratio = choice, ratio
    return largest_ratio


CLOSE = 0.8
"""Of what is paid for: all searches come closer, so no sum is lost."""
CLOSE_WITH_MANY_RECORDS = 0.3
"""The same for 100,000 records, whose device is clipped itself by far."""
RECORDS = (2, 300, 3000, 100_000) if FULL else (2, 3000)


@pytest.mark.parametrize(
    ("make", "length"),
    list(product([linear, classes, own, batches], RECORDS))
    if FULL
    else [(linear, 2), (classes, 3000), (batches, 2)],
)
def test_records_of_a_device(make, length):
    for clip in (1e5, 3.0):
        ratio = largest(make, length, 1, clip, 1.0, count(3, 100))
        close = CLOSE if length < 100_000 else CLOSE_WITH_MANY_RECORDS
        assert close < ratio <= 1


@pytest.mark.parametrize("devices", [30, 40_000] if FULL else [2000])
@pytest.mark.parametrize("make", [linear, classes, own])
def test_devices(make, devices):
    ratio = largest(make, devices, devices, 2.0, np.inf, count(3, 60))
    assert CLOSE < ratio <= 1


@pytest.mark.parametrize("rows", [1, 3, 8] if FULL else [3])
def test_devices_of_few_rows(rows):
    devices = count(300, 5000)
    for clip, example_clip in ((5.0, np.inf), (5.0, 1.0), (0.5, 1.0)):
        ratio = largest(
            classes, rows * devices, devices, clip, example_clip, count(2, 60)
        )
        assert CLOSE < ratio <= 1


def test_devices_that_hear_unlike_broadcasts():
    for make in (linear, classes, own):
        ratio = largest(make, 400, 200, 3.0, 1.0, count(2, 60), own_theta=True)
        assert CLOSE < ratio <= 1


@pytest.mark.parametrize("make", [linear, classes, own])
@pytest.mark.parametrize("ratio", [3.0, 30.0] if FULL else [30.0])
def test_devices_of_unlike_clips(make, ratio):
    """The one that changes has the smallest clip, and is added to others that send up to `ratio` times as much."""
    devices = 60
    clips = np.full(devices, ratio)
    clips[7] = 1.0
    worst = 0.0
    for seed in range(count(4, 200)):
        terms = np.random.default_rng(seed).uniform(-ratio, ratio, devices)
        pair = []
        for own_term in (1.0, -1.0):
            terms[7] = own_term
            pair.append(make(terms.copy(), devices))
        less = 1 + pair[0].rounding(clips, np.full(devices, np.inf)).total
        arguments = np.ones(devices, np.float32), np.float32(clips / less), None, None
        first, second = (
            added(
                side.on_accelerator(1, 2.0**30),
                np.zeros(side.dim, np.float32),
                *arguments,
            ).double
            for side in pair
        )
        worst = max(worst, float(np.linalg.norm(first - second)) / 2)
    assert CLOSE < worst <= 1
