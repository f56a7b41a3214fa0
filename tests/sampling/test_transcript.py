"""Transcripts: what the server has received in every round, against the kernel itself; merged, stopped and resumed."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import wflmc
from wflmc.sampling import Execution, chain_keys, chunks, initial_states
from wflmc.sampling.kernel import kernel
from wflmc.sampling.transcript import ReceptionNoise, Transcript, merge_rounds

from ..cli_tools import strict
from ..conftest import FULL
from ..error_tools import names_key, raises_input_error

LINK = wflmc.Link(wflmc.channel.rayleigh(0.01), snr_db=25)
PRIVACY = wflmc.Privacy(epsilon=8, delta=0.01, clip=30)


@pytest.fixture(scope="module")
def posterior():
    return wflmc.gaussian_regression(jax.random.key(0), devices=6, examples=120)


def make_plan(posterior, dynamics="overdamped"):
    step = (
        0.5 / posterior.L**0.5
        if dynamics == "kinetic"
        else 0.4 / (posterior.mu + posterior.L)
    )
    power = "noiseless-dp" if dynamics == "kinetic" else "optimized"
    sampler = wflmc.Sampler(dynamics=dynamics)
    policy = wflmc.Policy(power=power)
    return wflmc.plan(
        posterior,
        LINK,
        PRIVACY,
        step_size=step,
        burn_in=5,
        samples=7,
        sampler=sampler,
        policy=policy,
    )


@pytest.mark.parametrize("dynamics", ["overdamped", "kinetic"] if FULL else ["kinetic"])
def test_it_is_what_the_kernel_reports_round_by_round(posterior, dynamics):
    plan = make_plan(posterior, dynamics)
    key = jax.random.key(3)
    trace = wflmc.sample(key, posterior, plan, 2, transcript=True)
    transcript = trace.transcript
    step = jax.jit(kernel(posterior, plan).step)
    chain = jax.numpy.arange(2)
    state = initial_states(key, posterior, plan, chain)
    keys = chain_keys(key, chain)
    for s in range(12):
        chain_state = jax.tree.map(
            lambda values: values[1] if values.ndim else values, state
        )
        following, info = step(jax.random.fold_in(keys[1], s), chain_state)
        place = (
            chain_state.position
            if chain_state.velocity is None
            else chain_state.position + plan.step_size[s] / 2 * chain_state.velocity
        )
        np.testing.assert_allclose(
            transcript.position[s, 1], place, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            transcript.received(plan.noise_power)[s, 1],
            info.received,
            rtol=1e-4,
            atol=1e-4,
        )
        np.testing.assert_allclose(
            transcript.noise[s],
            plan.noise_power * (plan.scale[s] / plan.gain[s]) ** 2,
            rtol=1e-6,
        )
        state = jax.tree.map(
            lambda old, new: old.at[1].set(new) if old.ndim else new, state, following
        )
    np.testing.assert_allclose(
        trace.theta[1, -1], state.position[1], rtol=1e-5, atol=1e-6
    )


@pytest.mark.skipif(not FULL, reason="make test-full runs the large counts")
def test_nobody_else_pays_for_it(posterior):
    plan = make_plan(posterior)
    key = jax.random.key(3)
    with_it, without = (
        wflmc.sample(key, posterior, plan, 3, transcript=with_transcript)
        for with_transcript in (True, False)
    )
    np.testing.assert_array_equal(with_it.theta, without.theta)
    assert without.transcript is None


def test_a_stopped_run_ends_with_the_same_transcript(posterior, tmp_path, monkeypatch):
    plan = make_plan(posterior)
    key = jax.random.key(3)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    # Blocks of four rounds.
    monkeypatch.setattr(chunks, "BLOCK_WORK", 4 * posterior.work() * 3)
    first, second = (
        Execution(checkpoint=tmp_path / "one"),
        Execution(checkpoint=tmp_path / "two"),
    )
    whole = wflmc.sample(
        key, posterior, plan, 3, transcript=True, execution=first
    ).transcript

    def stop(done, _):
        if done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wflmc.sample(
            key,
            posterior,
            plan,
            3,
            transcript=True,
            execution=replace(second, progress=stop),
        )
    resumed = wflmc.sample(
        key, posterior, plan, 3, transcript=True, execution=second
    ).transcript
    for name in ("position", "gradient", "noise"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(resumed, name))
    with raises_input_error("checkpoint"):  # without a transcript it is another run
        wflmc.sample(key, posterior, plan, 3, execution=second)


def test_merged_rounds_say_the_same_of_affine_gradients():
    rng = np.random.default_rng(0)
    hessian, linear = np.diag([2.0, 3.0]), np.array([1.0, -1.0])
    position = rng.standard_normal((10, 4, 2))
    noise = rng.uniform(1, 3, (10, 1))
    scale = rng.uniform(1, 2, (10, 1))
    gradient = position @ hessian - linear
    starts = np.array([0, 3, 5, 8])
    merged = merge_rounds(
        position, gradient / scale[..., None], ReceptionNoise(scale, noise), starts
    )
    transcript = Transcript(*merged, start=starts, rounds=10)
    np.testing.assert_allclose(
        transcript.position @ hessian - linear, transcript.gradient
    )
    np.testing.assert_allclose((1 / transcript.noise).sum(0), (1 / noise).sum())
    weight = 1 / noise[..., None]
    mean = (position * weight).sum(0) / weight.sum(0)
    np.testing.assert_allclose(
        (transcript.position / transcript.noise[..., None]).sum(0)
        / (1 / transcript.noise).sum(0)[:, None],
        mean,
    )
    np.testing.assert_allclose(transcript.group_means(np.arange(10.0))[:2], [1.0, 3.5])


@pytest.mark.skipif(not FULL, reason="make test-full runs the large counts")
def test_a_small_memory_merges_rounds(posterior):
    plan = make_plan(posterior)
    key = jax.random.key(3)
    full = wflmc.sample(key, posterior, plan, 40, transcript=True)
    small = wflmc.sample(
        key, posterior, plan, 40, transcript=True, execution=Execution(memory=32_000)
    )
    assert small.transcript.position.shape[0] < 12 == full.transcript.position.shape[0]
    np.testing.assert_allclose(
        (1 / small.transcript.noise).sum(0),
        (1 / full.transcript.noise).sum(0),
        rtol=1e-5,
    )


def test_a_run_keeps_it_where_it_is_asked_for(call, scenario, tmp_path):
    h5netcdf = pytest.importorskip("h5netcdf")
    keys = (
        "sampler.transcript=true",
        "sampler.chains=3",
        "sampler.burn_in=4",
        "sampler.samples=6",
    )
    options = [
        part
        for key in (*keys, "privacy.epsilon=8", "privacy.delta=0.01")
        for part in ("--set", key)
    ]
    code, out, err = call(
        "run", scenario, *options, "--out", tmp_path / "run", "--json"
    )
    assert code == 0, err
    summary = strict(out)
    assert (
        0
        < summary["coverage"]["noise_aware_50"]
        < summary["coverage"]["noise_aware_90"]
        <= 1
    )
    with h5netcdf.File(tmp_path / "run" / "trace.nc") as file:
        assert file["transcript/gradient"].shape == (10, 3, 5)
    target = tmp_path / "public.nc"
    publish = (
        "publish",
        tmp_path / "run",
        "--what",
        "noise-aware",
        "--accept-not-covered",
        "--out",
        target,
    )
    code, _, err = call(*publish)
    assert code == 2  # moments of the private data are refused
    assert names_key(err, "--features", "--what noise-aware", "public")
    np.savez(
        tmp_path / "moments.npz", gram=1200 * np.eye(5), prior=np.eye(5), examples=1200
    )
    assert call(*publish, "--features", tmp_path / "moments.npz")[0] == 0
    with h5netcdf.File(target) as file:
        assert file["posterior/theta"].shape == (1, 1000, 5)


@pytest.mark.skipif(not FULL, reason="make test-full runs the large counts")
def test_the_server_of_a_federation_has_it_anyway(tmp_path):
    tools = pytest.importorskip("tests.federation_tools")
    from wflmc.apps.federation.server import run_in_process, trace_of

    federation = tools.make_federation(tmp_path)
    server = federation.server()
    run_in_process(server, federation.devices())
    trace = trace_of(server)
    transcript = trace.transcript
    plan = federation.job.plan
    assert transcript.position.shape == (7, 2, 5)
    np.testing.assert_allclose(
        transcript.noise[:, 0],
        plan.noise_power * (plan.scale / plan.gain) ** 2,
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        transcript.position[4:], trace.theta.swapaxes(0, 1)[:-1], rtol=1e-6
    )
