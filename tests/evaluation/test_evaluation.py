"""Distance estimates, their standard errors, diagnostics, and the choice of burn-in."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.evaluation import (
    burn_in,
    choose_burn_in,
    diagnose,
    diagnostics,
    estimate_w2_sq,
    exact_w2_sq,
)
from wflmc.evaluation.wasserstein import FLOOR_REPLICAS, with_floor
from wflmc.posterior import Gaussian, w2_squared

from ..error_tools import codes_of, missing_facts, raises_input_error, text_of
from ..plan_tools import with_context

TARGET = Gaussian(np.array([1.0, -2.0]), np.array([[1.0, 0.3], [0.3, 0.5]]))


def draws(chains, rounds, seed, shift=0.0):
    generator = np.random.default_rng(seed)
    return generator.multivariate_normal(
        TARGET.mean + shift, TARGET.covariance, (chains, rounds)
    )


def test_estimate_is_the_plug_in_distance():
    theta = draws(50, 7, 0, shift=1.0)
    estimate = estimate_w2_sq(theta, TARGET)
    for s in range(7):
        law = Gaussian(theta[:, s].mean(0), np.cov(theta[:, s].T))
        assert estimate.per_round[s] == pytest.approx(
            float(w2_squared(law, TARGET)), rel=1e-9
        )
    assert estimate.worst == estimate.per_round.max()


def test_estimate_of_a_known_shift():
    """W2² of a pure shift by (1, 1) is 2; the estimate's error is that of the mean, 2·√(sum of C)/√n."""
    estimate = estimate_w2_sq(draws(40_000, 1, 1, shift=1.0), TARGET)
    assert estimate.worst == pytest.approx(
        2.0, abs=4 * 2 * np.sqrt(TARGET.covariance.sum() / 40_000)
    )


def test_bootstrap_standard_error_matches_repeated_experiments():
    """For one round, where the bootstrap is consistent; over many independent rounds it errs on the large side."""
    worst = [
        estimate_w2_sq(draws(100, 1, seed, shift=0.5), TARGET, resamples=2).worst
        for seed in range(400)
    ]
    claimed = [
        estimate_w2_sq(draws(100, 1, seed, shift=0.5), TARGET, resamples=200).worst_se
        for seed in range(40)
    ]
    assert np.mean(claimed) == pytest.approx(np.std(worst), rel=0.15)


def test_exact_law_agrees_with_the_estimate(posterior):
    """The plug-in estimate from many chains approaches the exact distance of a partial schedule."""
    path_loss = np.geomspace(1e-2, 1e-6, 30)
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(path_loss), snr_db=20),
        wflmc.Privacy(15, 0.01, 30),
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=20,
        samples=3,
        policy=wflmc.Policy(power="no-dp"),
    )
    assert plan.active_devices.max() < 30
    plan = with_context(plan, clip=np.full(30, np.inf))
    trace = wflmc.sample(jax.random.key(0), posterior, plan, chains=20_000)
    estimate = estimate_w2_sq(trace.theta, posterior.exact)
    exact = exact_w2_sq(posterior, plan)[20:]
    np.testing.assert_allclose(
        estimate.per_round, exact, atol=5 * estimate.worst_se, rtol=0.01
    )
    assert np.all(trace.clip_rate == 0)


def test_exact_law_over_several_channels_is_that_of_the_mixture(posterior):
    plans = [
        wflmc.plan(
            posterior,
            wflmc.Link(channel.rayleigh(0.01), snr_db=5, seed=seed),
            wflmc.Privacy(),
            step_size=1e-4,
            burn_in=0,
            samples=5,
            policy=wflmc.Policy(power="no-dp"),
        )
        for seed in range(3)
    ]
    means = []
    second = []
    for plan in plans:
        law = posterior.law(plan.step_size, plan.weight, plan.noise_variance)
        means.append(law.mean)
        second.append(law.covariance + np.einsum("si,sj->sij", law.mean, law.mean))
    mean = np.mean(means, axis=0)
    covariance = np.mean(second, axis=0) - np.einsum("si,sj->sij", mean, mean)
    expected = w2_squared(Gaussian(mean, covariance), posterior.exact)
    np.testing.assert_allclose(exact_w2_sq(posterior, plans), expected, rtol=1e-9)


def test_diagnostics_are_those_of_arviz():
    import arviz
    import xarray as xr

    theta = draws(4, 200, 0)
    data = xr.Dataset({"x": (("chain", "draw", "dim"), theta)})
    ours = diagnose(theta)
    assert ours.rhat_max == pytest.approx(float(arviz.rhat(data)["x"].max()))
    assert ours.ess_min == pytest.approx(float(arviz.ess(data)["x"].min()))
    assert ours.ess_tail_min == pytest.approx(
        float(arviz.ess(data, method="tail")["x"].min())
    )
    assert 0.99 < ours.rhat_max < 1.02
    assert ours.ess_min > 500
    assert diagnose(theta[:, :3]).rhat_max is None


def test_parameters_that_are_not_finite_leave_no_diagnostics(monkeypatch):
    """Also where ArviZ is given a few parameters at a time."""
    theta = draws(4, 200, 0)
    monkeypatch.setattr(diagnostics, "CHUNK_BYTES", 8 * 4 * 200)
    assert diagnose(theta).rhat_max is not None
    for parameter in (0, theta.shape[2] - 1):
        diverged = theta.copy()
        diverged[1, 100:, parameter] = np.nan
        of_diverged = diagnose(diverged)
        assert (
            of_diverged.rhat_max,
            of_diverged.ess_min,
            of_diverged.ess_tail_min,
        ) == (None, None, None)


@pytest.mark.parametrize("frozen", [[0], [1], [0, 1]])
@pytest.mark.parametrize("everywhere", [True, False])
def test_parameters_that_never_move_have_not_converged(frozen, everywhere):
    """ArviZ counts all of their draws as effective, and has no R-hat for them."""
    theta = draws(4, 200, 0)
    others = diagnose(np.delete(theta, frozen, axis=2)) if len(frozen) < 2 else None
    for parameter in frozen:
        theta[slice(None) if everywhere else 2, :, parameter] = 0.25
    of_frozen = diagnose(theta)
    assert (of_frozen.frozen, of_frozen.ess_min, of_frozen.ess_tail_min) == (
        tuple(frozen),
        0.0,
        0.0,
    )
    assert of_frozen.rhat_max == (None if others is None else others.rhat_max)
    assert diagnose(draws(4, 200, 0)).frozen == ()


def test_frozen_parameters_are_warned_of(posterior):
    link = wflmc.Link(channel.static(0.1), snr_db=20)
    plan = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(),
        step_size=1e-4,
        burn_in=0,
        samples=6,
        policy=wflmc.Policy(power="noiseless"),
    )
    trace = wflmc.sample(jax.random.key(0), posterior, plan, chains=3)
    theta = np.array(trace.theta)
    theta[1, :, 3] = theta[1, 0, 3]
    evaluation = wflmc.evaluate(dataclasses.replace(trace, theta=theta), posterior)
    assert (evaluation.frozen, evaluation.ess_min, evaluation.ess_tail_min) == (
        (3,),
        0.0,
        0.0,
    )
    assert not missing_facts(text_of(evaluation, "frozen-parameters"), (1, 3))


@pytest.mark.parametrize(("chains", "memory"), [(3, 0.0), (20, 0.9)])
def test_the_floor_is_what_perfect_chains_show(chains, memory):
    generator = np.random.default_rng(0)
    root = np.linalg.cholesky(TARGET.covariance)
    worst, floors, spreads = [], [], []
    for _ in range(25):
        shocks = generator.standard_normal((chains, 30, 2))
        shocks[:, 1:] *= np.sqrt(1 - memory**2)
        for round_index in range(1, 30):
            shocks[:, round_index] += memory * shocks[:, round_index - 1]
        theta = TARGET.mean + shocks @ root.T
        estimate = with_floor(estimate_w2_sq(theta, TARGET, resamples=2), theta, TARGET)
        worst.append(estimate.worst)
        floors.append(estimate.floor)
        spreads.append(estimate.floor_sd)
    error = np.hypot(np.std(worst) / 25**0.5, np.mean(spreads) / FLOOR_REPLICAS**0.5)
    assert abs(np.mean(worst) - np.mean(floors)) < 4 * error
    assert 0.4 < np.mean(spreads) / np.std(worst) < 2.5


def test_two_chains_are_not_said_to_be_kept_away_by_clipping(posterior):
    """They show W2² far above the exact law whatever they sample; chains that clipping does keep away still do."""
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=30)
    step_size = 0.4 / (posterior.mu + posterior.L)

    def warned(clip, chains, runs, **others):
        plan = wflmc.plan(
            posterior,
            link,
            wflmc.Privacy(15, 0.01, clip),
            **grouped(step_size=step_size, burn_in=50, samples=50, **others),
        )
        warnings_given = []
        for seed in range(runs):
            trace = wflmc.sample(jax.random.key(seed), posterior, plan, chains=chains)
            warnings_given.append(
                "clipping-keeps-away" in codes_of(wflmc.evaluate(trace, posterior))
            )
        return warnings_given

    assert not any(warned(30, 2, 8))
    assert all(warned(1.0, 20, 2, power="no-dp"))


@pytest.mark.parametrize("factor", [0.1, 0.4, 1.0])
def test_burn_in_is_where_the_exact_law_forgets_its_start(posterior, factor):
    """Between-group variance is Aˢ C₀ Aˢ and within-group variance the rest; R-hat = 1.01 fixes their ratio."""
    step_size = factor / (posterior.mu + posterior.L)
    chosen = choose_burn_in(jax.random.key(0), posterior, step_size, 5000)
    step = np.eye(5) - step_size * posterior.hessian.sum(0)
    rounds = np.full(500, step_size)
    from_zero = posterior.law(rounds, np.ones((500, 30)), 2 * rounds, init="zero")
    matrix = np.eye(5)
    exact = []
    for within in from_zero.covariance:
        matrix = step @ matrix
        between = matrix @ matrix.T
        exact.append(
            np.sqrt(
                1 + np.max(np.diag(between) / np.diag(within)) + 1 / burn_in.MEMBERS
            )
        )
    expected = int(np.flatnonzero(np.array(exact) >= burn_in.RHAT_LIMIT)[-1]) + 1
    # 16 groups estimate a variance to about ± 35 %; one round changes it by 1 − (1 − ημ)².
    slack = 3 * 0.35 / (1 - (1 - step_size * posterior.mu) ** 2) + 1
    assert abs(chosen - expected) <= slack
    assert chosen > 5


def test_burn_in_is_reproducible_and_limited(posterior):
    step_size = 0.4 / (posterior.mu + posterior.L)
    first, again = (
        choose_burn_in(jax.random.key(0), posterior, step_size, 5000) for _ in range(2)
    )
    assert first == again
    assert choose_burn_in(jax.random.key(0), posterior, step_size, 2 * first) == first
    with raises_input_error("max_burn_in", value=20):
        choose_burn_in(jax.random.key(0), posterior, step_size, 20)


def test_burn_in_is_the_first_round_after_which_rhat_stays_low(monkeypatch, posterior):
    """A scripted R-hat: low at first, high up to round 30, low again from round 31 on."""
    script = np.full(200, 1.001)
    script[10:30] = 1.5
    blocks = iter(np.split(script, [64, 128, 192]))
    monkeypatch.setattr(
        burn_in,
        "_run_block",
        lambda posterior, rounds, state, keys: (state, next(blocks)),
    )
    assert choose_burn_in(jax.random.key(0), posterior, 1e-4, 200) == 30


def test_nested_rhat_by_hand():
    """Two groups of means 0 and 2, each of variance 2: √((2 + 2)/2)."""
    theta = np.array([[[-1.0], [1.0]], [[1.0], [3.0]]])
    assert float(burn_in.nested_rhat(theta)[0]) == pytest.approx(np.sqrt(2))


def test_evaluation_reads_well(posterior):
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(1e-4), snr_db=20),
        wflmc.Privacy(15, 0.01, 30),
        step_size=1e-4,
        burn_in=10,
        samples=10,
        policy=wflmc.Policy(power="equal"),
    )
    trace = wflmc.sample(jax.random.key(0), posterior, plan, chains=20)
    result = wflmc.evaluate(trace, posterior)
    assert len(result.exact_w2_sq) == 20
    assert result.epsilon_spent == pytest.approx(plan.epsilon_spent)
    assert 0 <= result.clip_rate["samples"] <= result.clip_rate["burn_in"] <= 1
    for word in ("W2²", "R-hat", "ESS", "clipped", "ε spent"):
        assert word in str(result)
    noiseless = wflmc.plan(
        posterior,
        wflmc.Link(channel.static()),
        wflmc.Privacy(15, 0.01, 30),
        step_size=1e-4,
        burn_in=0,
        samples=5,
        policy=wflmc.Policy(power="noiseless"),
    )
    bare = wflmc.evaluate(
        wflmc.sample(jax.random.key(0), posterior, noiseless, chains=1), posterior
    )
    assert bare.w2_sq is None
    assert bare.epsilon_spent is None
    assert bare.clip_rate == {"burn_in": None, "samples": 0.0}
    assert "none stated" in str(bare)
