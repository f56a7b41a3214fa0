"""Distance estimates, their standard errors, diagnostics, and the choice of burn-in."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.evaluation import choose_burn_in, diagnose, estimate_w2_sq, exact_w2_sq
from wflmc.posterior import Gaussian, w2_squared

TARGET = Gaussian(np.array([1.0, -2.0]), np.array([[1.0, 0.3], [0.3, 0.5]]))


def draws(chains, rounds, seed, shift=0.0):
    generator = np.random.default_rng(seed)
    return generator.multivariate_normal(TARGET.mean + shift, TARGET.covariance, (chains, rounds))


def test_estimate_is_the_plug_in_distance():
    theta = draws(50, 7, 0, shift=1.0)
    estimate = estimate_w2_sq(theta, TARGET)
    for s in range(7):
        law = Gaussian(theta[:, s].mean(0), np.cov(theta[:, s].T))
        assert estimate.per_round[s] == pytest.approx(float(w2_squared(law, TARGET)), rel=1e-9)
    assert estimate.worst == estimate.per_round.max()


def test_estimate_of_a_known_shift():
    """W2² of a pure shift by (1, 1) is 2; the estimate's error is that of the mean, 2·√(sum of C)/√n."""
    estimate = estimate_w2_sq(draws(40_000, 1, 1, shift=1.0), TARGET)
    assert estimate.worst == pytest.approx(2.0, abs=4 * 2 * np.sqrt(TARGET.covariance.sum() / 40_000))


def test_bootstrap_standard_error_matches_repeated_experiments():
    """For one round, where the bootstrap is consistent; over many independent rounds it errs on the large side."""
    worst = [estimate_w2_sq(draws(100, 1, seed, shift=0.5), TARGET, resamples=2).worst for seed in range(400)]
    claimed = [estimate_w2_sq(draws(100, 1, seed, shift=0.5), TARGET, resamples=200).worst_se for seed in range(40)]
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
        power="no-dp",
    )
    assert plan.active_devices.max() < 30
    plan = dataclasses.replace(plan, clip=np.full(30, np.inf))
    trace = wflmc.sample(jax.random.key(0), posterior, plan, chains=20_000)
    estimate = estimate_w2_sq(trace.theta, posterior.exact)
    exact = exact_w2_sq(posterior, plan)[20:]
    np.testing.assert_allclose(estimate.per_round, exact, atol=5 * estimate.worst_se, rtol=0.01)
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
            power="no-dp",
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
    found = diagnose(theta)
    assert found.rhat_max == pytest.approx(float(arviz.rhat(data)["x"].max()))
    assert found.ess_min == pytest.approx(float(arviz.ess(data)["x"].min()))
    assert found.ess_tail_min == pytest.approx(float(arviz.ess(data, method="tail")["x"].min()))
    assert 0.99 < found.rhat_max < 1.02
    assert found.ess_min > 500
    assert diagnose(theta[:, :3]).rhat_max is None


def transient(chains, rounds, length, seed=0):
    """White noise, after a common drift of `length` rounds."""
    theta = np.random.default_rng(seed).standard_normal((chains, rounds, 2))
    theta[:, :length] += np.linspace(12, 4, length)[None, :, None] if length else 0
    return theta


@pytest.mark.parametrize("length", [0, 7, 60, 180])
def test_burn_in_finds_where_a_transient_ends(length):
    """From its answer to the middle of the pilot R-hat stays below 1.01; one round earlier it is not."""
    theta, asked = transient(50, 2000, length), []

    def pilot(rounds):
        asked.append(rounds)
        return theta[:, :rounds]

    chosen = choose_burn_in(pilot, 2000)
    rounds = asked[-1]
    assert chosen <= length + 5
    for start in np.linspace(chosen, rounds // 2, 8).astype(int):
        assert diagnose(theta[:, start:rounds]).rhat_max < 1.01
    if length:
        assert diagnose(theta[:, chosen - 1 : rounds]).rhat_max >= 1.01
    else:
        assert chosen == 0


def test_burn_in_that_never_settles_is_an_error():
    stuck = np.random.default_rng(0).standard_normal((10, 400, 1)) + np.arange(10)[:, None, None]
    with pytest.raises(wflmc.InputError, match="max_burn_in"):
        choose_burn_in(lambda rounds: stuck[:, :rounds], 400)


def test_evaluation_reads_well(posterior):
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(1e-4), snr_db=20),
        wflmc.Privacy(15, 0.01, 30),
        step_size=1e-4,
        burn_in=10,
        samples=10,
        power="equal",
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
        power="noiseless",
    )
    bare = wflmc.evaluate(wflmc.sample(jax.random.key(0), posterior, noiseless, chains=1), posterior)
    assert bare.w2_sq is None
    assert bare.epsilon_spent is None
    assert bare.clip_rate == {"burn_in": None, "samples": 0.0}
    assert "none stated" in str(bare)
