"""The exact effective sample size: against the AR(1) formula, all pairs written out, simulation, and frozen chains."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.evaluation import exact_ess, exact_spread, exact_w2_sq
from wflmc.evaluation.clipped_law import forecast, model_of

from ..plan_tools import with_context

CHAINS = 8000


def varied(posterior, rounds=24, power="optimized", **keywords):
    """A plan over a fading channel whose step size changes with every round."""
    steps = np.random.default_rng(0).uniform(0.1, 1.2, rounds) / (
        posterior.mu + posterior.L
    )
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=15)
    return wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(8, 0.01, 30),
        **grouped(
            power=power,
            **{
                "step_size": steps,
                "burn_in": rounds // 2,
                "samples": rounds - rounds // 2,
            }
            | keywords,
        ),
    )


def all_pairs(posterior, plan):
    """Variance of the mean of the kept samples and its bias, from Cov(θ_t, θ_s) = A[t]…A[s+1] C[s] pair by pair."""
    law = posterior.law(
        plan.step_size, plan.weight_received, plan.noise_variance, plan.init
    )
    total = np.zeros(posterior.dim)
    kept_rounds = range(plan.burn_in, len(plan.rounds))
    for s in kept_rounds:
        lagged = law.covariance[s]
        total += np.diagonal(lagged)
        for t in range(s + 1, len(plan.rounds)):
            step = np.eye(posterior.dim) - plan.step_size[t] * np.tensordot(
                plan.weight_received[t], posterior.hessian, 1
            )
            lagged = step @ lagged
            total += 2 * np.diagonal(lagged)
    return total / len(kept_rounds) ** 2, law.mean[plan.burn_in :].mean(
        0
    ) - posterior.exact.mean


@pytest.mark.parametrize("init", ["prior", "zero"])
def test_all_pairs(posterior, init):
    plan = varied(posterior, init=init)
    variance, bias = all_pairs(posterior, plan)
    target = np.diagonal(posterior.exact.covariance)
    np.testing.assert_allclose(
        exact_ess(posterior, plan), target / variance, rtol=1e-10
    )
    np.testing.assert_allclose(
        exact_ess(posterior, plan, bias=True), target / (variance + bias**2), rtol=1e-10
    )
    other = plan.with_rounds(gain=plan.gain / 2)
    both = 0.5 * (variance + all_pairs(posterior, other)[0])
    np.testing.assert_allclose(
        exact_ess(posterior, [plan, other]), target / both, rtol=1e-10
    )


def test_ar1():
    """One parameter, constant step, start forgotten: v/n (1 + 2 Σ_k (1 − k/n) φ^k)."""
    posterior = wflmc.gaussian_regression(
        jax.random.key(5), devices=4, examples=40, dim=1
    )
    eta = 0.2 / posterior.L
    n = 60
    plan = wflmc.plan(
        posterior, wflmc.Link(channel.static()), wflmc.Privacy(), step_size=eta, burn_in=400, samples=n,
        policy=wflmc.Policy(power="noiseless"),
    )  # fmt: skip
    phi = 1 - eta * posterior.L
    k = np.arange(1, n)
    variance = 2 * eta / (1 - phi**2) / n * (1 + 2 * np.sum((1 - k / n) * phi**k))
    assert exact_ess(posterior, plan) == pytest.approx(
        [1 / posterior.L / variance], rel=1e-9
    )


def cold_plan(
    posterior, temperature, step, samples, dynamics="overdamped", friction=3.0
):
    """A plan of full noise after a burn-in of a temperature that forgets the start."""
    step_size = step / posterior.L
    if dynamics == "kinetic":
        step_size = step / posterior.L**0.5
    return wflmc.plan(
        posterior,
        wflmc.Link(channel.static()),
        wflmc.Privacy(),
        step_size=step_size,
        burn_in=600,
        samples=samples,
        sampler=wflmc.Sampler(
            burn_in_temperature=temperature,
            dynamics=dynamics,
            friction=friction * posterior.L**0.5,
        ),
        policy=wflmc.Policy(power="noiseless"),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("samples", [1, 8])
def test_ar1_that_warms_up(temperature, samples):
    """Draws narrower than the posterior are compared with draws of their own law."""
    posterior = wflmc.gaussian_regression(
        jax.random.key(5), devices=4, examples=40, dim=1
    )
    step = 0.1
    plan = cold_plan(posterior, temperature, step, samples)
    eta = step / posterior.L
    phi = 1 - step
    lags = np.arange(1, samples + 1)
    warm = 2 * eta / (1 - phi**2)
    variances = warm * (1 - (1 - temperature) * phi ** (2 * lags))
    correlation = phi ** np.abs(np.subtract.outer(lags, lags))
    earlier = np.minimum.outer(lags, lags) - 1
    covariance = correlation * variances[earlier]
    reference = min(1 / posterior.L, variances.mean())
    assert (reference < 1 / posterior.L) == (temperature < 1)
    assert exact_ess(posterior, plan) == pytest.approx(
        [reference / covariance.mean()], rel=1e-6
    )


@pytest.mark.parametrize("dynamics", ["overdamped", "kinetic"])
@pytest.mark.parametrize("step", [0.05, 0.4, 1.0])
def test_draws_count_for_no_more_than_there_are(posterior, step, dynamics):
    """However narrow cold burn-in makes them, where they are not antithetic."""
    for samples in (1, 2, 7):
        for temperature in (0.0, 0.1, 1.0):
            plan = cold_plan(posterior, temperature, step, samples, dynamics)
            ess = exact_ess(posterior, plan)
            assert np.all(ess <= samples * (1 + 1e-12))
            of_all = forecast(plan, model_of(plan, posterior))
            assert of_all.inverse_ess * samples >= 1 - 1e-12


def test_a_narrow_draw_counts_as_one(posterior):
    plan = cold_plan(posterior, 0.0, 0.05, 1)
    assert exact_spread(posterior, plan).variance_ratio[0] < 0.2
    assert exact_ess(posterior, plan) == pytest.approx(np.ones(5), rel=1e-12)
    of_all = forecast(plan, model_of(plan, posterior))
    assert of_all.inverse_ess == pytest.approx(1.0, rel=1e-9)


def test_antithetic_draws_are_worth_more_than_there_are(posterior):
    """A velocity of little friction swings over to the other side of the mode."""
    plan = cold_plan(posterior, 1.0, 1.0, 7, dynamics="kinetic", friction=0.3)
    assert exact_ess(posterior, plan).min() > 8


def test_simulated_chains_have_it_and_follow_the_exact_law(posterior):
    """Steps, senders and noise of every round differ: means over the kept samples spread as they should."""
    plan = with_context(varied(posterior), clip=np.full(30, np.inf))
    theta = np.asarray(
        wflmc.sample(jax.random.key(7), posterior, plan, chains=CHAINS).theta,
        dtype=float,
    )
    seen = np.diagonal(posterior.exact.covariance) / theta.mean(1).var(0, ddof=1)
    exact = exact_ess(posterior, plan)
    assert np.all(np.abs(seen / exact - 1) < 4 * np.sqrt(2 / CHAINS)), seen / exact
    law = posterior.law(
        plan.step_size, plan.weight_received, plan.noise_variance, plan.init
    )
    for draw, s in ((0, plan.burn_in), (-1, len(plan.rounds) - 1)):
        spread = np.sqrt(np.diagonal(law.covariance[s]))
        assert np.all(
            np.abs(theta[:, draw].mean(0) - law.mean[s]) < 4 * spread / np.sqrt(CHAINS)
        )
        assert np.all(
            np.abs(theta[:, draw].var(0, ddof=1) / spread**2 - 1)
            < 4 * np.sqrt(2 / CHAINS)
        )


def test_a_frozen_chain_has_good_marginals_and_no_samples(posterior):
    """Kept rounds that hardly move repeat one draw: W2² of each is as good as ever, and all are worth one."""
    step = 0.4 / (posterior.mu + posterior.L)
    steps = np.full(100, step)
    steps[50:] *= 1e-4
    keywords = {"burn_in": 50, "samples": 50, "power": "noiseless"}
    moving, frozen = (
        varied(posterior, step_size=eta, **keywords) for eta in (step, steps)
    )
    worst = [exact_w2_sq(posterior, plan)[50:].max() for plan in (moving, frozen)]
    assert worst[1] <= worst[0] * 1.01
    assert exact_ess(posterior, frozen) == pytest.approx(np.ones(5), rel=0.15)
    assert exact_ess(posterior, moving).min() > 4


def test_it_is_shown_beside_the_distance(call, plan_of, scenario, tmp_path):
    extra = ("--set", "sampler.samples=20")
    document = plan_of(scenario, *extra)
    assert 0 < document["exact_ess_min"] < 20
    _, text, _ = call("plan", scenario, *extra)
    assert "W2² (no clipping)" in text
    assert "ESS (no clipping)" in text
    softmax = (
        "--set",
        "posterior.model=softmax",
        "--set",
        "sampler.step_size=1/(mu+L)",
    )
    assert plan_of(scenario, *extra, *softmax)["exact_ess_min"] is None


def test_a_chain_that_diverges_has_none(posterior):
    plan = varied(posterior, rounds=900, power="no-dp", step_size=1e-4)
    wild = plan.with_rounds(step_size=plan.step_size * 40)
    assert np.all(exact_ess(posterior, wild) == 0)
