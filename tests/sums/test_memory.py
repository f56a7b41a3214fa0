"""Layouts of the softmax model: the gradients of all devices are never held at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.sums.blocks import block_size
from wflmc.sums.constants import DEVICES_PER_LATTICE

from ..conftest import FULL

FEATURES = 784
CLASSES = 10
LIMIT = 2.0**24
"""Bytes that a block may use."""
UNKNOWN_COPIES = 2.5
"""How often a compiler may hold what a block uses."""


def zeros_of(devices, rows):
    """A model of devices whose data are zero: only shapes matter."""
    small = wflmc.softmax_regression(
        jax.random.key(0), 1, X=np.ones((2, 1)), y=[0, 1], classes=CLASSES
    )
    return replace(
        small,
        features=np.zeros((devices, rows, FEATURES), np.float32),
        labels=np.zeros((devices, rows), int),
        sizes=np.full(devices, rows),
    )


def working_bytes(posterior, chains, by_example, own_theta=False):
    """What the compiled sum of some chains needs beside its arguments and its result."""
    devices = posterior.devices
    shape = (chains, devices, posterior.dim) if own_theta else (chains, posterior.dim)
    ones = np.ones(devices, np.float32)

    @jax.jit
    def chain_sums(model, places):
        def of_chain(theta):
            limit = ones if by_example else None
            return model.unrounded_sum(theta, ones, ones, example_clip=limit).total

        return jax.vmap(of_chain)(places)

    ready = posterior.on_accelerator(chains, LIMIT, by_example)
    places = jax.ShapeDtypeStruct(shape, jnp.float32)
    compiled = chain_sums.lower(ready, places).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("devices", "rows", "by_example"),
    [(100, 10, True), (40, 100, False)]
    + ([(100, 10, False), (40, 100, True)] if FULL else []),
)
def test_devices_of_few_rows_keep_to_the_limit(devices, rows, by_example):
    chains = 60
    posterior = zeros_of(devices, rows)
    gradients = 4 * chains * devices * posterior.dim
    used = working_bytes(posterior, chains, by_example)
    assert used < UNKNOWN_COPIES * LIMIT < gradients


@pytest.mark.parametrize(
    ("rows", "by_example"),
    list(product([1, 8], [False, True])) if FULL else [(1, False), (8, True)],
)
def test_so_do_short_devices_that_receive_unlike_broadcasts(rows, by_example):
    """What they receive has the size of all gradients, and is not copied either."""
    chains, devices = 8, 512
    posterior = zeros_of(devices, rows)
    broadcasts = 4 * chains * devices * posterior.dim
    used = working_bytes(posterior, chains, by_example, own_theta=True)
    assert used < UNKNOWN_COPIES * LIMIT < broadcasts


def test_a_block_has_no_more_devices_than_there_are_and_no_more_than_are_allowed():
    for devices in range(1, 4500, 7):
        for affordable in (devices, 100, 129, 131, 1000):
            size = block_size(
                devices, bytes_per_device=1.0, theta_bytes=np.inf, limit=affordable
            )
            assert 1 <= size <= min(devices, affordable)
    # These have no parts of at most 128 devices that divide them.
    for devices in (131, 259, 4091):
        size = block_size(devices, bytes_per_device=1.0, theta_bytes=np.inf, limit=1e9)
        assert size <= devices


def test_blocks_of_unlike_broadcasts_fit_on_one_lattice(monkeypatch):
    """Blocks of rows may have more devices on an accelerator, as rows are added before."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 8192, examples=8192, dim=1, classes=2
    )
    ready = posterior.on_accelerator(1, 2.0**34, by_example=True)
    assert ready.block > DEVICES_PER_LATTICE
    assert 1 < ready.own_theta_block <= DEVICES_PER_LATTICE
    assert ready.block % ready.own_theta_block == 0


@pytest.mark.parametrize("backends", [("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")])
@pytest.mark.parametrize("rows", [8, 9])
def test_a_posterior_may_be_laid_out_again(rows, backends, monkeypatch):
    """Rows of 513 features are filled up on accelerators, once."""
    dim = 513
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 2, examples=2 * rows, dim=dim, classes=2
    )
    once, again = posterior, posterior
    for backend in backends:
        monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
        once = posterior.on_accelerator(1, 2.0**28, by_example=True)
        again = again.on_accelerator(1, 2.0**28, by_example=True)
    assert (again.dim, again.feature_padding) == (posterior.dim, once.feature_padding)
    layout = ("block", "example_block", "devices_together", "chains_last")
    for name in layout:
        assert getattr(once, name) == getattr(again, name)
    np.testing.assert_array_equal(once.features, again.features)
    # Norms are those of rows in float64 the first time.
    np.testing.assert_allclose(once.norms, again.norms, rtol=1e-6)
