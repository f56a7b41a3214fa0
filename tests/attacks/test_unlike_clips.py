"""Plans of unlike clips that are sampled together: no chain is rounded by another's clip.

What chains add up is rounded to a lattice, whose step follows from a public bound. The attacker knows that one chain
is clipped far more than the others of its call; on a lattice as coarse as the others need, a device of clip 1e-4 moves
its chain's sum by 27 times what is paid for, beside a chain of clip 1e4.
"""

from __future__ import annotations

import dataclasses
from itertools import cycle, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc

from ..conftest import FULL

SMALL = 1e-4
LARGE = 1e4
DEVICES = 32_768
"""256 float32 sums of 128 devices of one row: as many as share a lattice."""


@jax.jit
def chain_sums(posterior, clips, example_clips):
    """The sum of each of some chains that run together, by their clips."""
    theta = jnp.zeros(posterior.dim)
    weight = jnp.ones(posterior.devices)

    def chain(clip, example_clip):
        every_clip = jnp.full(posterior.devices, clip)
        every_example_clip = None
        if example_clip is not None:
            every_example_clip = jnp.full(posterior.devices, example_clip)
        return posterior.unrounded_sum(
            theta, weight, every_clip, None, every_example_clip
        ).total

    return jax.vmap(chain)(clips, example_clips)


def test_a_device_moves_its_chain_by_no_more_than_is_paid_for():
    """Half of the sums of 128 devices are near the middle between two points of the coarse lattice."""
    worst = 0.0
    labels = np.arange(DEVICES) % 2
    for heads in range(30, 128, 1 if FULL else 30):
        labels[1:128] = np.arange(127) < heads
        received = []
        for own_label in (0, 1):
            labels[0] = own_label
            posterior = wflmc.softmax_regression(
                jax.random.key(0),
                DEVICES,
                classes=2,
                X=np.ones((DEVICES, 1)),
                y=labels,
                partition="blocks",
                prior_std=1e9,
            )
            clips = jnp.array([SMALL, LARGE], jnp.float32)
            total = chain_sums(posterior.on_accelerator(2, 2.0**30), clips, None)
            received.append(total.double[0])
        change = np.linalg.norm(received[1] - received[0])
        worst = max(worst, float(change) / (2 * SMALL))
    rounding = posterior.rounding(np.array([SMALL]), np.array([np.inf])).total
    assert 0.99 < worst <= 1 + rounding


def linear(rows):
    return _rows_of(wflmc.gaussian_regression, rows)


def classes(rows):
    return _rows_of(wflmc.softmax_regression, rows, classes=3)


def _rows_of(model, rows, **options):
    devices = 300
    rng = np.random.default_rng(rows)
    features = rng.normal(size=(devices * rows, 2))
    targets = rng.integers(3, size=devices * rows)
    return model(jax.random.key(0), devices, X=features, y=targets, **options)


def _likelihood(theta, record):
    return -theta @ record


def _prior(theta):
    return -0.5 * theta @ theta


def own(rows):
    devices = 300
    data = np.random.default_rng(rows).normal(size=(devices * rows, 2))
    return wflmc.posterior_from(
        _likelihood,
        _prior,
        data.astype(np.float32),
        initial=jnp.zeros(2),
        devices=devices,
        mu=1.0,
        L=1.0,
    )


PATHS = {
    "few rows": (classes, 3, {}),
    "by class": (classes, 9, {}),
    "chains last": (classes, 9, {"chains_last": True, "example_block": 0}),
    "linear": (linear, 9, {}),
    "custom": (own, 9, {}),
}
"""Models, records of a device and what is changed of their layout. With more than
1,024 records, devices are clipped in pairs, on the same lattices."""


@pytest.mark.parametrize(
    ("path", "by_record"),
    list(product(PATHS, [False, True]))
    if FULL
    else list(zip(PATHS, cycle([True, False]), strict=False)),
)
def test_a_chain_is_the_same_beside_any_other(path, by_record):
    make, rows, layout = PATHS[path]
    posterior = make(rows).on_accelerator(2, 2.0**30, by_record)
    posterior = dataclasses.replace(posterior, **layout)

    def beside(clip):
        clips = jnp.array([SMALL, clip], jnp.float32)
        example_clips = clips / 2 if by_record else None
        return chain_sums(posterior, clips, example_clips).double

    together = beside(LARGE)
    np.testing.assert_array_equal(together[0], beside(SMALL)[0])
    assert np.linalg.norm(together[1]) > 100 * np.linalg.norm(together[0]) > 0
