"""Chunks of chains, devices and rounds, files and several accelerators: they change results by rounding alone."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.posterior import softmax
from wflmc.sampling import Execution, chunks
from wflmc.sums.blocks import block_size

from ..conftest import FULL
from ..error_tools import raises_input_error
from .compile_tools import clipped_sum, clipped_sums, count_compilations, gradients


@pytest.fixture(scope="module")
def cases():
    """A Gaussian and two softmax posteriors (few rows a device, and many), each with plans on three channels."""
    posteriors = {
        "gaussian": wflmc.gaussian_regression(
            jax.random.key(0), devices=7, examples=90
        ),
        "few rows": wflmc.softmax_regression(
            jax.random.key(0), 7, examples=40, dim=3, classes=4
        ),
        "many rows": wflmc.softmax_regression(
            jax.random.key(0),
            7,
            examples=200,
            dim=3,
            classes=4,
            partition="dirichlet:1",
        ),
    }
    return {
        name: (posterior, plans_of(posterior)) for name, posterior in posteriors.items()
    }


def plans_of(posterior):
    links = [
        wflmc.Link(wflmc.channel.rayleigh(1.0), snr_db=20, seed=seed)
        for seed in range(7)
    ]
    return wflmc.plan_many(
        posterior, links, wflmc.Privacy(50, 0.1, 30), step_size=0.5 / (posterior.mu + posterior.L), burn_in=11,
        samples=9, initial_w2_sq=1.0,
    )  # fmt: skip


KINDS = ["gaussian", "few rows", "many rows"]


def assert_same_traces(first, second, exactly=False):
    tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 2e-3, "atol": 2e-4}
    np.testing.assert_allclose(first.theta, second.theta, **tolerance)
    np.testing.assert_allclose(first.clip_rate, second.clip_rate, atol=1e-6)
    np.testing.assert_allclose(
        first.burn_in_clip_rate, second.burn_in_clip_rate, atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS if FULL else ["gaussian"])
@pytest.mark.parametrize("zipped", [False, True] if FULL else [True])
def test_a_memory_limit_changes_rounding_alone(cases, kind, zipped):
    posterior, plans = cases[kind]
    plan, chains = (plans, None) if zipped else (plans[0], 7)
    whole = wflmc.sample(jax.random.key(0), posterior, plan, chains)
    chain_bytes = posterior.working_bytes(1) + 16 * posterior.dim
    parts = []
    for limit in (
        (1.01 * chain_bytes, 4.2 * chain_bytes, 12 * chain_bytes)
        if FULL
        else (4.2 * chain_bytes,)
    ):
        small = wflmc.sample(
            jax.random.key(0),
            posterior,
            plan,
            chains,
            execution=Execution(
                memory=limit, progress=lambda done, of: parts.append(done < of)
            ),
        )
        assert any(parts)
        assert_same_traces(small, whole)
        again = wflmc.sample(
            jax.random.key(0),
            posterior,
            plan,
            chains,
            execution=Execution(memory=limit),
        )
        assert_same_traces(again, small, exactly=True)
    with raises_input_error("memory", "one chain"):
        wflmc.sample(
            jax.random.key(0),
            posterior,
            plan,
            chains,
            execution=Execution(memory=0.5 * chain_bytes),
        )


@pytest.mark.parametrize("kind", KINDS if FULL else ["gaussian"])
def test_samples_in_a_file(cases, kind, tmp_path):
    posterior, plans = cases[kind]
    whole = wflmc.sample(jax.random.key(0), posterior, plans, keep_burn_in=True)
    in_file = Execution(store=tmp_path / "theta.npy")
    stored = wflmc.sample(
        jax.random.key(0), posterior, plans, keep_burn_in=True, execution=in_file
    )
    assert_same_traces(stored, whole, exactly=True)
    np.testing.assert_array_equal(stored.warmup, whole.warmup)
    np.testing.assert_array_equal(
        np.load(tmp_path / "theta.npy").swapaxes(0, 1)[:, 11:], whole.theta
    )


def test_rounds_in_blocks_with_and_without_burn_in(cases, monkeypatch):
    posterior, plans = cases["gaussian"]
    whole = wflmc.sample(jax.random.key(0), posterior, plans)
    with_burn_in = wflmc.sample(jax.random.key(0), posterior, plans, keep_burn_in=True)
    for block in (1, 3, 7, 12, 19) if FULL else (1, 12):
        monkeypatch.setattr(chunks, "BLOCK_WORK", block * 7 * posterior.work())
        assert_same_traces(wflmc.sample(jax.random.key(0), posterior, plans), whole)
        again = wflmc.sample(jax.random.key(0), posterior, plans, keep_burn_in=True)
        np.testing.assert_allclose(
            again.warmup, with_burn_in.warmup, rtol=1e-4, atol=1e-5
        )


def test_a_last_block_that_is_not_full_is_not_compiled_anew(cases, monkeypatch):
    posterior, plans = cases["gaussian"]
    monkeypatch.setattr(chunks, "BLOCK_WORK", 3 * 7 * posterior.work())
    compilations = count_compilations(monkeypatch)
    blocks = []
    counting = Execution(progress=lambda done, _: blocks.append(done))
    wflmc.sample(jax.random.key(0), posterior, plans[0], 7, execution=counting)
    assert len(plans[0].rounds) % 3
    assert len(blocks) == 7
    assert len(compilations) == 1


# Many rows of a device go through the loop over blocks that a Gaussian model has.
@pytest.mark.parametrize("kind", KINDS if FULL else ["gaussian", "few rows"])
def test_blocks_of_devices_give_the_same_sums(cases, kind, monkeypatch):
    """Whatever the block, also one that does not divide the number of devices, and both ways for few rows."""
    posterior, _ = cases[kind]
    theta = jax.random.normal(jax.random.key(1), (5, posterior.dim))
    weight = jax.random.uniform(jax.random.key(2), (5, 7)).at[:, 3].set(0.0)
    clip = jnp.full((5, 7), 4.0)
    expected = clipped_sums(posterior, theta, weight, clip)
    unclipped = gradients(posterior, theta[0])
    if kind == "few rows":
        monkeypatch.setattr(softmax, "MAX_ROWS_OF_SHORT_DEVICE", 0)
        by_device = jax.jit(lambda p, *a: jax.vmap(p.clipped_sum)(*a))(
            posterior, theta, weight, clip
        )
        for actual, sums in zip(by_device, expected, strict=True):
            np.testing.assert_allclose(actual, sums, rtol=1e-4, atol=1e-4)
        monkeypatch.undo()
    for block in (1, 2, 3, 4, 7) if FULL else (3,):
        module = sys.modules[type(posterior).__module__]
        monkeypatch.setattr(module, "block_size", lambda *_, b=block, **__: b)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        ready = posterior.on_accelerator(5, 1e9)
        monkeypatch.undo()
        assert (ready.block, ready.devices) == (block, 7)
        for actual, sums in zip(
            clipped_sums(ready, theta, weight, clip), expected, strict=True
        ):
            assert actual.shape == sums.shape
            np.testing.assert_allclose(actual, sums, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            gradients(ready, theta[0]), unclipped, rtol=1e-4, atol=1e-4
        )


def test_block_sizes(monkeypatch):
    assert block_size(30, bytes_per_device=1e3, theta_bytes=0, limit=1e9) == 30
    # On a CPU, as many devices as its cache holds.
    assert block_size(10_000, bytes_per_device=1e6, theta_bytes=0, limit=1e9) == 4
    # Or as many as take the memory of θ.
    assert block_size(10_000, bytes_per_device=1e6, theta_bytes=1e8, limit=1e9) == 100
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert block_size(10_000, bytes_per_device=1e6, theta_bytes=0, limit=1e9) == 1000
    assert block_size(30, bytes_per_device=1e12, theta_bytes=0, limit=1e9) == 1
    assert block_size(31, bytes_per_device=1.0, theta_bytes=0, limit=16) == 16


def test_a_device_without_gradient_is_no_trouble():
    """Features of zero and a start at zero: the norm is 0, or nearly, and 0/0 must not spread."""
    for rows in (2, 40):
        posterior = wflmc.softmax_regression(
            jax.random.key(0), 1, X=np.zeros((rows, 2)), y=np.arange(rows) % 2
        )
        total, norm = clipped_sum(posterior, jnp.zeros(4), jnp.ones(1), jnp.ones(1))
        assert not np.isnan(total).any()
        assert norm[0] < 1e-17


SHARDED = """
import jax, numpy as np, wflmc, sys
assert len(jax.devices()) == 4
out = {}
for name, posterior in {
    "gaussian": wflmc.gaussian_regression(jax.random.key(0), devices=7, examples=90),
    "softmax": wflmc.softmax_regression(jax.random.key(0), 7, examples=200, dim=3, classes=4),
}.items():
    if name not in sys.argv[2:]:
        continue
    links = [wflmc.Link(wflmc.channel.rayleigh(1.0), snr_db=20, seed=seed) for seed in range(6)]
    plans = wflmc.plan_many(
        posterior, links, wflmc.Privacy(50, 0.1, 30), step_size=0.5 / (posterior.mu + posterior.L), burn_in=11,
        samples=9, initial_w2_sq=1.0,
    )
    for label, plan, chains in (("zipped", plans, None), ("shared", plans[0], 6)):
        for count in map(int, filter(str.isdigit, sys.argv[2:])):
            on_some = wflmc.sampling.Execution(accelerators=jax.devices()[:count])
            trace = wflmc.sample(jax.random.key(0), posterior, plan, chains, execution=on_some)
            out[f"{name} {label} {count}"] = trace.theta
            out[f"{name} {label} {count} clipped"] = trace.burn_in_clip_rate
        default = wflmc.sample(jax.random.key(0), posterior, plan, chains)
        np.testing.assert_array_equal(default.theta, out[f"{name} {label} 4"])
from wflmc.sampling import chunks, simulation
chunks.BLOCK_WORK = 7 * 6 * posterior.work()
loop, compiled = simulation.advance_block, []
def counted(*arguments, **keywords):
    compiled.append(None)
    return loop(*arguments, **keywords)
simulation.advance_block = jax.jit(counted, static_argnames=("program", "mesh"))
parts = wflmc.sample(jax.random.key(0), posterior, plans[0], 6)
np.testing.assert_allclose(parts.theta, default.theta, rtol=1e-4, atol=1e-5)
assert len(compiled) == 1, "blocks of rounds, the last not full, over several accelerators"
np.savez(sys.argv[1], **out)
"""


def test_chains_over_several_accelerators(tmp_path):
    flags = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    )
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    counts = [1, 2, 4] if FULL else [1, 4]
    names = ["gaussian", "softmax"] if FULL else ["softmax"]
    arguments = [str(tmp_path / "o.npz"), *map(str, counts), *names]
    subprocess.run(
        [sys.executable, "-c", SHARDED, *arguments], env=environment, check=True
    )
    arrays = np.load(tmp_path / "o.npz")
    for name in names:
        for label in ("zipped", "shared"):
            for count in counts[1:]:
                for part in ("", " clipped"):
                    np.testing.assert_allclose(
                        arrays[f"{name} {label} {count}{part}"],
                        arrays[f"{name} {label} 1{part}"],
                        rtol=2e-3,
                        atol=2e-4,
                    )
