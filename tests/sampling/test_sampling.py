"""The kernel and the runner: against the exact law, against each other, and their key discipline."""

from __future__ import annotations

import itertools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.planning import POLICIES
from wflmc.sampling import Execution, chunks, kernel, kernel_rounds
from wflmc.support.errors import OverspendError
from wflmc.support.keys import named

from ..conftest import FULL
from ..error_tools import raises_input_error
from ..plan_tools import with_context
from .compile_tools import count_compilations

CHAINS = 20_000
ROUNDS = 12
LIMIT = 3.7
"""Largest |z| allowed: of the 160 values here, a correct sampler exceeds it in about one seed of 40."""


def make_plan(posterior, power, schedule, noise_power=1.0, **keywords):
    """A static channel with path loss, so that thresholds silence the same devices in every round."""
    path_loss = np.geomspace(1e-3, 1e-6, posterior.devices)
    link = wflmc.Link(channel.static(path_loss), snr_db=20, noise_power=noise_power)
    defaults = {
        "step_size": 0.4 / (posterior.mu + posterior.L),
        "burn_in": ROUNDS - 1,
        "samples": 1,
    }
    return wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(15, 0.01, 30),
        **grouped(power=power, schedule=schedule, **{**defaults, **keywords}),
    )


def unclipped(plan):
    return with_context(plan, clip=np.full(plan.devices, np.inf))


def z_scores(theta, mean, covariance):
    """Two numbers per round: tr(C⁻¹Ĉ)/m, and the Mahalanobis distance of the mean as a normal score."""
    chains, size = theta.shape
    away = np.asarray(theta, dtype=float) - mean
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), away.T)
    spread = np.sum(whitened**2) / (chains * size)
    shift = chains * np.sum(whitened.mean(1) ** 2)
    return (spread - 1) / np.sqrt(2 / (chains * size)), stats.norm.isf(
        stats.chi2.sf(shift, size)
    )


def law_scores(posterior, plan, sampled_with=None, seed=3):
    """z scores of simulated chains against the exact law of `plan` at several rounds."""
    trace = wflmc.sample(
        jax.random.key(seed),
        posterior,
        unclipped(sampled_with or plan),
        CHAINS,
        keep_burn_in=True,
    )
    theta = np.concatenate([trace.warmup, trace.theta], axis=1)
    law = posterior.law(plan.step_size, plan.weight, plan.noise_variance, plan.init)
    return np.array(
        [
            z_scores(theta[:, s - 1], law.mean[s - 1], law.covariance[s - 1])
            for s in (1, 2, 5, ROUNDS)
        ]
    )


@pytest.mark.parametrize(
    ("power", "schedule", "init"),
    list(product(POLICIES, ["all", "threshold"], ["prior", "zero"]))[
        :: 1 if FULL else 3
    ],
)
def test_chains_follow_the_exact_law(posterior, power, schedule, init):
    plan = make_plan(posterior, power, schedule, init=init)
    if schedule == "threshold" and POLICIES[power].wireless:
        assert 0 < plan.active_devices.min() < posterior.devices
    scores = law_scores(posterior, plan)
    assert np.all(np.abs(scores[:, 0]) < LIMIT), scores
    assert np.all(scores[:, 1] < LIMIT), scores


@pytest.mark.parametrize(("noise_power", "prior_std"), [(3.7e-9, 0.2), (250.0, 3.0)])
def test_other_units_follow_the_exact_law_too(noise_power, prior_std):
    posterior = wflmc.gaussian_regression(
        jax.random.key(2), devices=6, examples=60, dim=3, prior_std=prior_std
    )
    plan = make_plan(posterior, "no-dp", "threshold", noise_power=noise_power)
    assert 0 < plan.active_devices.min() < 6
    scores = law_scores(posterior, plan)
    assert np.all(np.abs(scores) < LIMIT), scores


@pytest.mark.parametrize("power", POLICIES)
def test_one_percent_too_much_noise_is_noticed(posterior, power):
    """The test above would fail. From a start at zero all variance is noise: 1 % in σ is 4.5 standard errors."""
    plan = make_plan(posterior, power, "all", init="zero")
    broken = plan.with_rounds(gain=plan.gain / 1.01)
    scores = law_scores(posterior, plan, sampled_with=broken)
    assert np.abs(scores[:, 0]).max() > LIMIT, scores
    assert scores[:, 0].mean() > 3, scores


def test_server_noise_makes_up_for_too_strong_a_signal(posterior):
    """Above the Langevin cap the channel gives less than 2η, and the server adds the rest."""
    loud = POLICIES["no-dp"]._replace(
        allocate=lambda problem: wflmc.planning.Allocation(2 * problem.lmc_cap)
    )
    plan = make_plan(posterior, loud, "all")
    np.testing.assert_allclose(plan.server_noise, plan.step_size, rtol=1e-9)
    np.testing.assert_allclose(plan.noise_variance, 2 * plan.step_size, rtol=1e-9)
    scores = law_scores(posterior, plan)
    assert np.all(np.abs(scores) < LIMIT), scores


def test_update_written_out(small):
    """One round by hand from the received signal: θ − η K/(α K_a) y, with clipping."""
    link = wflmc.Link(channel.static([1.0, 1.0, 1.0, 1e-8, 1e-8]), snr_db=0)
    plan = wflmc.plan(
        small,
        link,
        wflmc.Privacy(clip=5.0),
        step_size=0.01,
        burn_in=0,
        samples=3,
        policy=wflmc.Policy(power="no-dp"),
    )
    assert plan.active_devices.tolist() == [3, 3, 3]
    run = kernel(small, plan)
    state = run.init(jax.random.key(4))
    after, info = jax.jit(run.step)(jax.random.key(5), state)
    theta = np.asarray(state.position, dtype=float)
    gradients = small.hessian @ theta - small.linear
    norms = np.linalg.norm(gradients, axis=1)
    clipped = gradients * np.minimum(1, 5.0 / norms)[:, None]
    expected = theta - 0.01 * 5 / (plan.gain[0] * 3) * np.asarray(
        info.received, dtype=float
    )
    np.testing.assert_allclose(after.position, expected, rtol=1e-4)
    noise = np.asarray(info.received) - plan.gain[0] * clipped[:3].sum(0)
    draw = np.asarray(jax.random.normal(named(jax.random.key(5), "noise"), (3,)))
    np.testing.assert_allclose(noise, draw, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(info.norm, norms, rtol=1e-4)
    assert info.clip_rate == pytest.approx(np.mean(norms[:3] > 5.0))


def test_clipping_bounds_what_is_sent(posterior):
    """Whatever θ, what reaches the server is at most α Σ ℓ of the active devices."""
    plan = make_plan(posterior, "no-dp", "threshold")
    now = kernel_rounds(plan)[0]
    for scale in (0.0, 1.0, 1e3, 1e6):
        signal, _ = wflmc.sampling.transmit(posterior, jnp.full(5, scale), now)
        assert np.linalg.norm(signal.double) <= plan.gain[0] * 30 * plan.active_devices[
            0
        ] * (1 + 1e-5)


def test_runner_is_the_kernel_in_a_loop(small):
    plan = wflmc.plan(
        small,
        wflmc.Link(channel.rayleigh(), snr_db=30),
        wflmc.Privacy(clip=5.0),
        step_size=0.01,
        burn_in=4,
        samples=6,
        policy=wflmc.Policy(power="equal"),
    )
    key = jax.random.key(9)
    trace = wflmc.sample(key, small, plan, chains=3)
    run = kernel(small, plan)
    for chain in range(3):
        position = small.draw_initial(
            jax.random.fold_in(named(key, "init"), chain), "prior"
        )
        state = run.init(key)._replace(position=position)
        noise = jax.random.fold_in(named(key, "noise"), chain)
        for s in range(10):
            state, info = jax.jit(run.step)(jax.random.fold_in(noise, s), state)
            if s >= 4:
                np.testing.assert_allclose(
                    trace.theta[chain, s - 4], state.position, rtol=1e-4, atol=1e-5
                )
                assert trace.clip_rate[chain, s - 4] == pytest.approx(
                    float(info.clip_rate)
                )


def short_plans(posterior, power, rounds=20, **keywords):
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=20)
    return wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(15, 0.01, 30),
        **grouped(
            step_size=0.4 / (posterior.mu + posterior.L),
            burn_in=10,
            samples=rounds - 10,
            power=power,
            **keywords,
        ),
    )


def test_same_key_same_chain_and_seeds_matter(posterior):
    plan = short_plans(posterior, "equal")
    first, again, other = (
        wflmc.sample(jax.random.key(k), posterior, plan, 4).theta for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_extending_a_run_changes_no_earlier_draw(posterior):
    short, long = (
        wflmc.sample(
            jax.random.key(0),
            posterior,
            short_plans(posterior, "no-dp", rounds),
            4,
            keep_burn_in=True,
        )
        for rounds in (20, 35)
    )
    np.testing.assert_allclose(long.theta[:, :10], short.theta, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(long.warmup, short.warmup, rtol=1e-4, atol=1e-5)


def test_more_chains_begin_with_the_same_ones(posterior):
    plan = short_plans(posterior, "equal")
    three_chains, eight_chains = (
        wflmc.sample(jax.random.key(0), posterior, plan, n).theta for n in (3, 8)
    )
    np.testing.assert_allclose(eight_chains[:3], three_chains, rtol=1e-4, atol=1e-5)


def test_schemes_share_starts_and_noise(posterior):
    """With one step from a common start, two schemes differ by their gain alone: θ' = θ − ηg − (η/α) z."""
    key = jax.random.key(0)
    link = wflmc.Link(channel.static(1e-4), snr_db=20)
    traces = {}
    for power in ("equal", "noiseless"):
        plan = wflmc.plan(
            posterior,
            link,
            wflmc.Privacy(0.1, 0.01, 1e6),
            step_size=1e-4,
            burn_in=0,
            samples=1,
            policy=wflmc.Policy(power=power, schedule="all"),
        )
        traces[power] = (
            plan,
            wflmc.sample(key, posterior, plan, 5).theta[:, 0].astype(float),
        )
    starts = np.stack(
        [
            posterior.draw_initial(
                jax.random.fold_in(named(key, "init"), chain), "prior"
            )
            for chain in range(5)
        ]
    ).astype(float)
    gradient = starts @ posterior.hessian.sum(0) - posterior.linear.sum(0)
    noise = [
        (starts - 1e-4 * gradient - theta) * plan.gain[0] / 1e-4
        for plan, theta in traces.values()
    ]
    np.testing.assert_allclose(noise[0], noise[1], rtol=2e-3, atol=2e-3)


def test_plans_zipped_with_chains(posterior):
    """A batch of plans gives chain i what plan i alone would give it."""
    plans = [
        short_plans(posterior, power).with_rounds(
            gain=short_plans(posterior, power).gain * scale
        )
        for power, scale in [("equal", 1.0), ("no-dp", 0.7), ("noiseless", 1.0)]
    ]
    together = wflmc.sample(jax.random.key(2), posterior, plans)
    for index, plan in enumerate(plans):
        alone = wflmc.sample(jax.random.key(2), posterior, plan, chains=3)
        np.testing.assert_allclose(
            together.theta[index], alone.theta[index], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            together.clip_rate[index], alone.clip_rate[index], atol=1e-6
        )


def test_one_compilation_serves_all_policies_channels_and_data(posterior, monkeypatch):
    compilations = count_compilations(monkeypatch)
    other = wflmc.gaussian_regression(jax.random.key(8), devices=30)
    for power, seed, post in itertools.product(
        ["equal", "no-dp", "noiseless"], range(2), (posterior, other)
    ):
        link = wflmc.Link(channel.rayleigh(0.01), snr_db=20 + seed, seed=seed)
        plan = wflmc.plan(
            post,
            link,
            wflmc.Privacy(15, 0.01, 30),
            step_size=1e-4,
            burn_in=5 + seed,
            samples=6 - seed,
            policy=wflmc.Policy(power=power),
        )
        wflmc.sample(jax.random.key(seed), post, with_context(plan, burn_in=5), 4)
    assert len(compilations) == 1


def test_blocks_change_nothing(posterior, monkeypatch):
    plan = short_plans(posterior, "equal")
    whole = wflmc.sample(jax.random.key(0), posterior, plan, 4, keep_burn_in=True)
    monkeypatch.setattr(chunks, "BLOCK_WORK", 7 * 4 * posterior.work())
    seen = []
    parts = wflmc.sample(
        jax.random.key(0),
        posterior,
        plan,
        4,
        keep_burn_in=True,
        execution=Execution(progress=lambda done, of: seen.append((done, of))),
    )
    assert seen == [(7, 20), (14, 20), (20, 20)]
    for name in ("theta", "warmup", "clip_rate", "burn_in_clip_rate"):
        np.testing.assert_allclose(
            getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=1e-5
        )


def test_only_what_is_kept_is_kept(posterior):
    plan = short_plans(posterior, "equal")
    trace = wflmc.sample(jax.random.key(0), posterior, plan, 4)
    full = wflmc.sample(jax.random.key(0), posterior, plan, 4, keep_burn_in=True)
    assert trace.theta.shape == (4, 10, 5)
    assert trace.warmup is None
    assert full.warmup.shape == (4, 10, 5)
    np.testing.assert_allclose(full.theta, trace.theta, rtol=1e-4, atol=1e-5)
    assert trace.theta.dtype == np.float32
    assert trace.burn_in_clip_rate.shape == (10,)


def test_clip_rates_by_hand(small):
    """Of the devices that send, round by round: recomputed from the kept samples, burn-in included."""
    link = wflmc.Link(channel.rayleigh(1.0), snr_db=0)
    plan = wflmc.plan(
        small,
        link,
        wflmc.Privacy(clip=6.0),
        step_size=0.02,
        burn_in=5,
        samples=6,
        policy=wflmc.Policy(power="no-dp"),
    )
    assert plan.active_devices.min() < 5
    trace = wflmc.sample(jax.random.key(3), small, plan, chains=50, keep_burn_in=True)
    theta = np.concatenate([trace.warmup, trace.theta], axis=1).astype(float)
    norms = np.linalg.norm(
        np.einsum("kij,csj->cski", small.hessian, theta) - small.linear, axis=-1
    )
    sends = plan.weight > 0
    # The gradients of round s + 1 are taken at the samples of round s.
    rate = ((norms[:, :-1] > 6.0) & sends[1:]).sum(-1) / sends[1:].sum(-1)
    np.testing.assert_allclose(
        trace.burn_in_clip_rate[1:], rate[:, :4].mean(0), atol=0.011
    )
    np.testing.assert_allclose(trace.clip_rate, rate[:, 4:], atol=0.21)
    np.testing.assert_allclose(trace.clip_rate.mean(), rate[:, 4:].mean(), atol=2e-3)
    assert 0.05 < rate.mean() < 0.95


def test_start_at_zero(posterior):
    plan = make_plan(posterior, "noiseless", "all", init="zero")
    assert plan.initial_w2_sq == pytest.approx(
        np.sum(posterior.mean**2) + np.trace(posterior.covariance), rel=1e-9
    )


def test_a_lost_chain_is_an_error(posterior):
    plan = short_plans(posterior, "equal")
    gain = plan.gain.copy()
    gain[13] = 1e-38
    with pytest.raises(wflmc.SamplingError, match="round 14"):
        wflmc.sample(jax.random.key(0), posterior, plan.with_rounds(gain=gain), 4)


def test_mismatches_are_refused(posterior, small):
    plan = short_plans(posterior, "equal")
    with raises_input_error("plan", "30 devices", "5 devices"):
        wflmc.sample(jax.random.key(0), small, plan)
    with raises_input_error("chains", 2, value=3):
        wflmc.sample(jax.random.key(0), posterior, [plan, plan], chains=3)
    with raises_input_error("plan", "2 plans", "rounds"):
        wflmc.sample(
            jax.random.key(0), posterior, [plan, short_plans(posterior, "equal", 30)]
        )
    with raises_input_error("chains", 1, value=0):
        wflmc.sample(jax.random.key(0), posterior, plan, chains=0)


def test_trace_for_arviz(posterior, tmp_path):
    import arviz

    plan = short_plans(posterior, "equal")
    trace = wflmc.sample(jax.random.key(0), posterior, plan, 4, keep_burn_in=True)
    trace.save(tmp_path / "trace.nc")
    for data in (trace.to_arviz(), arviz.from_netcdf(tmp_path / "trace.nc")):
        np.testing.assert_array_equal(data.posterior["theta"].values, trace.theta)
        np.testing.assert_array_equal(
            data.warmup_posterior["theta"].values, trace.warmup
        )
        np.testing.assert_allclose(data.sample_stats["gain"].values[2], plan.gain[10:])
        np.testing.assert_allclose(
            data.sample_stats["loss"].values[0], plan.loss.max(-1)[10:]
        )
        np.testing.assert_array_equal(
            data.sample_stats["active_devices"].values[0], plan.active_devices[10:]
        )
        assert data.posterior.attrs["inference_library"] == "wflmc"


def test_a_plan_that_was_changed_in_place_is_refused_by_what_it_spends_now(small):
    step = 0.4 / (small.mu + small.L)
    link = wflmc.Link(channel.static(0.1), snr_db=60)
    plan = wflmc.plan(
        small, link, wflmc.Privacy(5, 0.1, 30), step_size=step, burn_in=3, samples=2
    )
    wflmc.sample(jax.random.key(0), small, plan, 2)
    assert plan.epsilon_spent <= 5 * (1 + 1e-9)
    plan.gain[:] *= 10
    with pytest.raises(OverspendError):
        wflmc.sample(jax.random.key(0), small, plan, 2)
