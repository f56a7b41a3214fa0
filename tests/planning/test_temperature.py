"""Burn-in at a temperature below 1: caps, noise, bound, exact law, and its notices."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import wflmc
from tests.error_tools import raises_input_error
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.evaluation import exact_spread, exact_w2_sq
from wflmc.evaluation.wasserstein import exact_law
from wflmc.planning import PowerPolicy
from wflmc.planning.bound import MIN_TEMPERATURE, Allocation
from wflmc.planning.notices import joined_notices
from wflmc.planning.plan import join_plans
from wflmc.support.notices import NoticeCode

TEMPERATURES = (0.0, 0.05, 0.3, 1.0)
BURN_IN = 30
SAMPLES = 20


@pytest.fixture(scope="module")
def posterior():
    return wflmc.gaussian_regression(jax.random.key(0), devices=10, examples=400)


def make_plan(posterior, temperature, relative_step=0.4, **settings):
    """Plan with equal powers and a promise that leaves budget, so that burn-in can use
    more power.
    """
    settings.setdefault("power", "equal")
    privacy = wflmc.Privacy(epsilon=5000, delta=0.01, clip=400)
    link = settings.pop("link", wflmc.Link(channel.rayleigh(0.01), snr_db=45))
    step_size = relative_step / (posterior.mu + posterior.L)
    if settings.get("dynamics") == "kinetic":
        step_size = 0.3 / posterior.L**0.5
    return wflmc.plan(
        posterior,
        link,
        settings.pop("privacy", privacy),
        step_size=step_size,
        burn_in=BURN_IN,
        samples=settings.pop("samples", SAMPLES),
        **grouped(burn_in_temperature=temperature, **settings),
    )


def cold_plan(posterior, temperature, dynamics):
    """Plan over a link so good that only the Langevin cap decides."""
    return make_plan(
        posterior,
        temperature,
        dynamics=dynamics,
        friction=30.0,
        power="no-dp",
        link=wflmc.Link(channel.rayleigh(1.0), snr_db=200),
    )


def codes(plan):
    return {notice.code for notice in plan.notices}


@pytest.mark.parametrize("dynamics", ["overdamped", "kinetic"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rounds_of_burn_in_are_filled_up_to_the_temperature(
    posterior, temperature, dynamics
):
    plan = cold_plan(posterior, temperature, dynamics)
    ratio = plan.noise_variance / plan.langevin_noise
    np.testing.assert_allclose(ratio[:BURN_IN], temperature, atol=2 * MIN_TEMPERATURE)
    np.testing.assert_allclose(ratio[BURN_IN:], 1.0, rtol=1e-6)


def test_the_cap_of_a_cold_round_is_higher_by_the_temperature(posterior):
    link = wflmc.Link(channel.static(1.0), snr_db=200)
    powers = {
        temperature: make_plan(posterior, temperature, power="no-dp", link=link).gain
        ** 2
        for temperature in TEMPERATURES
    }
    for temperature, power in powers.items():
        ratio = power / powers[1.0]
        expected = 1 / max(temperature, MIN_TEMPERATURE)
        np.testing.assert_allclose(ratio[:BURN_IN], expected)
        np.testing.assert_allclose(ratio[BURN_IN:], 1.0)


def test_the_server_fills_up_to_the_temperature_and_no_further(posterior):
    """A policy that transmits beyond all caps leaves the noise to the server."""

    def twice_the_cap(problem):
        return Allocation(2 * problem.lmc_cap)

    policy = PowerPolicy(twice_the_cap, private=False)
    plan = make_plan(
        posterior, 0.3, power=policy, link=wflmc.Link(channel.static(1.0), snr_db=200)
    )
    required = plan.langevin_noise * np.where(np.arange(50) < BURN_IN, 0.3, 1.0)
    np.testing.assert_allclose(plan.noise_variance, required)
    np.testing.assert_allclose(plan.server_noise, required / 2)


@pytest.mark.parametrize("bound", ["corrected", "paper"])
@pytest.mark.parametrize("relative_step", [0.02, 0.4])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_bound_holds_for_cold_burn_in(posterior, temperature, relative_step, bound):
    plan = make_plan(posterior, temperature, relative_step, bound=bound)
    assert plan.bound is not None
    assert np.all(exact_w2_sq(posterior, plan) <= plan.bound)


def test_the_bound_has_the_coupling_error_of_cold_rounds(posterior):
    """B[s] = ρ² B[s−1] + κ(η⁴L³m/3 + η³L²m + m(√(2η) − √v)²), round by round."""
    link = wflmc.Link(channel.static(1.0), snr_db=60)
    plan = make_plan(posterior, 0.05, link=link)
    eta = plan.step_size[0]
    mu, L, m = plan.mu, plan.L, plan.dim
    rho = 1 - eta * mu / 2
    kappa = 2 * (2 - eta * mu) / (eta * mu)
    value = plan.initial_w2_sq
    for noise, bound in zip(plan.noise_variance, plan.bound, strict=True):
        discretization = eta**4 * L**3 * m / 3 + eta**3 * L**2 * m
        coupling = m * (np.sqrt(2 * eta) - np.sqrt(min(noise, 2 * eta))) ** 2
        value = rho**2 * value + kappa * (discretization + coupling)
        assert bound == pytest.approx(value, rel=1e-9)
    warm = make_plan(posterior, 1.0, link=link)
    assert np.all(plan.bound[:BURN_IN] > warm.bound[:BURN_IN])


def test_without_its_cold_error_the_bound_would_be_broken(posterior):
    """With small steps hardly anything else is in the bound of a chain without noise."""
    cold = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(1.0), snr_db=200),
        step_size=0.05 / (posterior.mu + posterior.L),
        burn_in=2000,
        samples=1,
        sampler=wflmc.Sampler(burn_in_temperature=0.0),
        policy=wflmc.Policy(power="no-dp"),
    )
    distance = exact_w2_sq(posterior, cold)[1999]
    spread = np.trace(posterior.exact.covariance)
    assert distance == pytest.approx(spread, rel=0.1)
    eta = cold.step_size[0]
    kappa = 2 * (2 - eta * cold.mu) / (eta * cold.mu)
    rho = 1 - eta * cold.mu / 2
    discretization = eta**4 * cold.L**3 / 3 + eta**3 * cold.L**2
    assert kappa * cold.dim * discretization / (1 - rho**2) < distance
    assert cold.bound[1999] >= distance


@pytest.mark.parametrize("power", ["optimized", "noiseless-dp"])
@pytest.mark.parametrize("objective", ["worst", "average", "exact"])
def test_plans_that_choose_their_noise_do_not_change(posterior, power, objective):
    plans = [
        make_plan(posterior, temperature, power=power, objective=objective)
        for temperature in (1.0, 0.1)
    ]
    np.testing.assert_array_equal(plans[0].gain, plans[1].gain)
    np.testing.assert_array_equal(plans[0].server_noise, plans[1].server_noise)
    assert plans[0].objective == plans[1].objective
    assert plans[0].lower_bound == plans[1].lower_bound
    assert NoticeCode.NO_EFFECT in codes(plans[1])
    assert not {NoticeCode.NO_EFFECT, NoticeCode.COLD_DRAWS} & codes(plans[0])


@pytest.mark.parametrize(
    ("dynamics", "friction", "relative_step", "init"),
    [
        ("overdamped", 30.0, 0.4, "prior"),
        ("overdamped", 30.0, 0.05, "zero"),
        ("kinetic", 50.0, 1.3, "prior"),
        ("kinetic", 50.0, 1.6, "prior"),
        ("kinetic", 10.0, 0.05, "zero"),
    ],
)
def test_what_is_missing_of_the_variance_is_that_of_the_exact_law(
    posterior, dynamics, friction, relative_step, init
):
    """Steps, velocities and a start at one point all enter as they do in the law."""
    unit = posterior.mu + posterior.L if dynamics == "overdamped" else posterior.L**0.5
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(1.0), snr_db=200),
        step_size=relative_step / unit,
        burn_in=200,
        samples=10,
        sampler=wflmc.Sampler(
            burn_in_temperature=0.0, dynamics=dynamics, friction=friction, init=init
        ),
        policy=wflmc.Policy(power="no-dp"),
    )
    notice = next(n for n in plan.notices if n.code == NoticeCode.COLD_DRAWS)
    for round_index, missing in zip(
        (plan.burn_in, -1), percentages(notice.text), strict=True
    ):
        ratio = smallest_variance_ratio(posterior, plan, round_index)
        assert missing == pytest.approx(max(0, 1 - ratio), abs=0.03)


def smallest_variance_ratio(posterior, plan, round_index):
    """Compute the least variance of a draw over the posterior's, in any direction."""
    deviation = np.linalg.cholesky(posterior.exact.covariance)
    law = posterior.chain(plan.motion).law(plan.noise_variance)
    whitened = np.linalg.solve(deviation, law.covariance[round_index])
    return np.linalg.eigvalsh(np.linalg.solve(deviation, whitened.T)).min()


def test_rounds_that_are_added_change_what_is_missing_at_the_last(posterior):
    link = wflmc.Link(channel.rayleigh(1.0), snr_db=200)
    first = make_plan(posterior, 0.0, relative_step=0.02, power="no-dp", link=link)
    added = wflmc.plan(
        posterior,
        link,
        first.privacy,
        step_size=first.step_size[-1],
        burn_in=0,
        samples=100,
        initial_w2_sq=float(first.bound[-1]),
        **grouped(burn_in_temperature=0.0, start=len(first.rounds), power="no-dp"),
    )
    assert NoticeCode.NO_EFFECT not in codes(added)
    joined = join_plans(first, added)
    notices = [
        next(notice for notice in candidates if notice.code == NoticeCode.COLD_DRAWS)
        for candidates in (first.notices, joined_notices(joined, [first, added]))
    ]
    before, after = (percentages(notice.text) for notice in notices)
    assert before[0] == after[0]
    assert before[1] > 0.3 > 0.1 > after[1]


def test_without_burn_in_its_temperature_has_no_effect(posterior):
    plan = wflmc.plan(
        posterior,
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=0,
        samples=5,
        sampler=wflmc.Sampler(burn_in_temperature=0.1),
    )
    assert NoticeCode.NO_EFFECT in codes(plan)


def test_excess_at_the_last_round_is_not_told_as_missing(posterior):
    """Kept rounds in a deep fade have more noise than they need."""
    plan = make_plan(
        posterior, 0.05, link=wflmc.Link(channel.rayleigh(0.01), snr_db=48), samples=5
    )
    assert plan.noise_variance[-1] > 1.2 * plan.langevin_noise[-1]
    notice = next(n for n in plan.notices if n.code == NoticeCode.COLD_DRAWS)
    assert not re.search(r"-\d", notice.text)
    assert percentages(notice.text)[1] == 0


def percentages(text):
    return [int(number) / 100 for number in re.findall(r"(\d+)%", text)]


@pytest.mark.parametrize("init", ["prior", "zero"])
def test_burn_in_that_privacy_keeps_warm_is_not_told(posterior, init):
    """Also where short steps from one point leave variance missing, as at τ = 1."""
    plan = make_plan(
        posterior,
        0.05,
        privacy=wflmc.Privacy(epsilon=4, delta=0.01, clip=400),
        relative_step=0.01,
        init=init,
    )
    assert np.all(plan.noise_variance >= plan.langevin_noise)
    assert NoticeCode.COLD_DRAWS not in codes(plan)


def test_causal_plans_and_transcripts_follow(posterior):
    causal = make_plan(posterior, 0.1, csi="causal")
    ratio = causal.noise_variance / causal.langevin_noise
    assert np.median(ratio[:BURN_IN]) < 0.9
    transcript = make_plan(posterior, 0.1, power="optimized", objective="transcript")
    assert np.all(transcript.noise_variance >= 0.1 * transcript.langevin_noise - 1e-12)


@pytest.mark.parametrize("dynamics", ["overdamped", "kinetic"])
@pytest.mark.parametrize("temperature", [0.05, 0.3])
def test_chains_have_the_exact_law(posterior, temperature, dynamics):
    """Mean and covariance of 4,000 chains at the first and the last kept round."""
    plan = cold_plan(posterior, temperature, dynamics)
    chains = 4000
    trace = wflmc.sample(jax.random.key(7), posterior, plan, chains)
    draws = np.asarray(trace.theta, dtype=float)
    assert float(np.mean(trace.clip_rate)) == 0
    law = posterior.chain(plan.motion).law(plan.noise_variance)
    for draw, round_index in ((0, BURN_IN), (-1, -1)):
        mean = law.mean[round_index]
        covariance = law.covariance[round_index]
        variance = np.diagonal(covariance)
        error = draws[:, draw].mean(0) - mean
        assert np.all(np.abs(error) < 4.5 * np.sqrt(variance / chains))
        estimate = np.cov(draws[:, draw].T)
        # Wishart: Var(C_ij) = (C_ij² + C_ii C_jj)/n.
        deviation = np.sqrt((covariance**2 + np.outer(variance, variance)) / chains)
        assert np.all(np.abs(estimate - covariance) < 4.5 * deviation)
    # The test can tell the temperatures apart.
    warm = cold_plan(posterior, 1.0, dynamics)
    warm_law = posterior.chain(warm.motion).law(warm.noise_variance)
    warm_variance = np.diagonal(warm_law.covariance[BURN_IN])
    cold_variance = np.diagonal(law.covariance[BURN_IN])
    assert np.all(warm_variance / cold_variance > 1 + 9 * np.sqrt(2 / chains))


def test_the_spread_is_that_of_chains(posterior):
    plan = make_plan(posterior, 0.05)
    spread = exact_spread(posterior, plan)
    assert exact_law(posterior, plan).spread == spread
    chains = 4000
    trace = wflmc.sample(jax.random.key(8), posterior, plan, chains)
    draws = np.asarray(trace.theta, dtype=float)
    exact = posterior.exact
    references = np.random.default_rng(0).multivariate_normal(
        exact.mean, exact.covariance, size=20_000
    )
    for index, draw in enumerate((0, -1)):
        precision = np.linalg.inv(exact.covariance)
        ratio = np.trace(precision @ np.cov(draws[:, draw].T)) / posterior.dim
        tolerance = 4 * np.sqrt(2 / (chains * posterior.dim))
        assert spread.variance_ratio[index] == pytest.approx(ratio, rel=tolerance)
        lower, upper = np.quantile(draws[:, draw], [0.05, 0.95], axis=0)
        inside = np.mean((references > lower) & (references < upper))
        assert spread.coverage_90[index] == pytest.approx(inside, abs=0.012)
    warm = exact_spread(posterior, make_plan(posterior, 1.0))
    assert spread.variance_ratio[0] < warm.variance_ratio[0] - 0.05


def test_a_chain_that_is_the_posterior_has_a_spread_of_one():
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=60)
    plan = wflmc.plan(
        posterior,
        step_size=1e-3 / posterior.L,
        burn_in=60_000,
        samples=1,
        policy=wflmc.Policy(power="noiseless"),
    )
    spread = exact_spread(posterior, plan)
    np.testing.assert_allclose(spread.variance_ratio, 1.0, rtol=2e-3)
    np.testing.assert_allclose(spread.coverage_90, 0.9, atol=1e-3)
    assert not spread.is_narrow


def test_the_budget_is_kept_and_used(posterior):
    for temperature in TEMPERATURES:
        plan = make_plan(
            posterior,
            temperature,
            privacy=wflmc.Privacy(epsilon=15, delta=0.01, clip=1000),
        )
        assert plan.epsilon_spent <= 15 * (1 + 1e-9)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_other_temperatures_are_refused(value):
    with raises_input_error("burn_in_temperature"):
        wflmc.Sampler(burn_in_temperature=value)


def test_a_scenario_and_its_files_have_the_temperature(tmp_path, plan_of):
    scenario = tmp_path / "s.toml"
    scenario.write_text(
        """
[posterior]
model = "gaussian"
devices = 10
[link]
fading = "static"
snr_db = 60
[privacy]
epsilon = 5000
delta = 0.01
clip = 300
[sampler]
burn_in = 20
samples = 10
step_size = "0.4/(mu+L)"
burn_in_temperature = 0.1
[policy]
power = "equal"
"""
    )
    document = plan_of(scenario)
    assert "cold-draws" in document["warning_codes"]
    first, last = document["spread"]["variance_ratio"]
    assert first < last
    assert document["spread"]["coverage_90"][0] < 0.9
    warm = plan_of(scenario, "--set", "sampler.burn_in_temperature=1")
    assert warm["spread"]["variance_ratio"][0] > first


def test_plans_made_again_from_their_file_are_the_same(posterior, tmp_path):
    plan = make_plan(posterior, 0.1)
    path = tmp_path / "plan.npz"
    plan.save(path)
    loaded = wflmc.Plan.load(path)
    np.testing.assert_array_equal(loaded.server_noise, plan.server_noise)
    assert loaded.digest == plan.digest
    assert dataclasses.asdict(wflmc.Sampler())["burn_in_temperature"] == 1.0
