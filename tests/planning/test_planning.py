"""Policies and plans: limits, invariances, ledgers, warnings and refusals."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import wflmc
from wflmc import channel
from wflmc.planning import POLICIES
from wflmc.planning.solvers.closed_form import REGIMES

from ..error_tools import codes_of, missing_facts, raises_input_error
from .scenarios import Target, check_limits, fading_cases, make_plan, static_cases


@given(fading_cases(), st.sampled_from(["equal", "no-dp", "noiseless"]))
def test_benchmarks_keep_their_limits_on_any_channel(case, power):
    target, h, keywords = case
    plan = make_plan(target, h, power=power, **keywords)
    assert (
        plan.regime is None
        or len(plan.rounds) == 1
        or np.ptp(np.abs(h), axis=0).max() < 1e-9
        or power == "noiseless"
    )
    assert sum(plan.regime_share.values()) == pytest.approx(1)
    if power == "equal":
        check_limits(plan, h, keywords["snr_db"], keywords["clip"])
        # No round may stay below every limit: caps, or the equal share of one of its devices.
        round_budget = plan.privacy.budget(1)[0] / np.maximum(
            (plan.weight > 0).sum(0), 1
        )
        limit = np.where(plan.weight > 0, round_budget, np.inf).min(-1)
        at_dp = plan.loss.max(-1) >= limit * (1 - 1e-9)
        assert np.all(
            at_dp
            | (plan.noise_variance <= 2 * plan.step_size * (1 + 1e-9))
            | at_power(plan, h, keywords)
        )
    if power == "noiseless":
        assert np.all(plan.active_devices == target.devices)
        assert np.all(plan.threshold == 0)
        np.testing.assert_allclose(plan.noise_variance, 2 * plan.step_size, rtol=1e-12)
        assert not plan.clips
        assert plan.epsilon_spent is None


def test_a_plan_has_three_parts():
    plan = make_plan(Target(1.0, 3.0, 4, 3), np.full((8, 3), 0.1))
    assert (
        plan.rounds.gain is plan.gain,
        plan.certificate.bound is plan.bound,
        plan.context.mu,
    ) == (True, True, 1.0)


@given(
    st.tuples(*[st.floats(0.1, 60)] * 2), st.tuples(*[st.floats(-20, 40)] * 2), st.floats(1, 90), st.integers(0, 3),
    st.integers(2, 8), st.floats(0.03, 0.8),
)  # fmt: skip
# 42 % and 0.1 % of the budgets are spent.
@example((11.85, 54.82), (29.0, -9.0), 31.4, 3, 2, 0.125)
@example((0.62, 31.05), (-10.0, 15.0), 82.6, 2, 7, 0.746)
def test_privacy_limits_no_round_whose_devices_have_budget_left(
    epsilon, snr_db, clip, burn_in, samples, step
):
    """The worst bound does not depend on rounds after it: the optimum may leave their power below every limit."""
    target = wflmc.gaussian_regression(jax.random.key(0), devices=2, examples=40)
    promise = wflmc.Privacy(epsilon, 0.01, clip)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=snr_db)
    eta = step / (target.mu + target.L)
    plan = wflmc.plan(
        target, link, promise, step_size=eta, burn_in=burn_in, samples=samples
    )
    spent = plan.spent >= (1 - 1e-5) * promise.budget(2)
    limited = plan.limit == REGIMES.index("dp-limited")
    assert not np.any(limited & ~((plan.weight > 0) & spent).any(-1))


def at_power(plan, h, keywords):
    sends = plan.weight > 0
    power = np.where(
        sends, (plan.gain[:, None] * keywords["clip"] / np.abs(h)) ** 2, 0
    ).max(-1)
    return power >= plan.dim * 10 ** (keywords["snr_db"] / 10) * (1 - 1e-9)


@given(static_cases(), st.floats(1, 3), st.floats(0, 20))
def test_more_privacy_budget_or_power_never_hurts(case, more, decibels):
    target, h, keywords = case
    keywords["schedule"] = "all"
    base = make_plan(target, h, **keywords).objective
    assert make_plan(
        target, h, **{**keywords, "epsilon": keywords["epsilon"] * more}
    ).objective <= base * (1 + 1e-9)
    assert make_plan(
        target, h, **{**keywords, "snr_db": keywords["snr_db"] + decibels}
    ).objective <= base * (1 + 1e-9)
    assert make_plan(target, h, power="noiseless-dp", **keywords).objective <= base * (
        1 + 1e-9
    )
    assert base <= make_plan(target, h, power="equal", **keywords).objective * (
        1 + 1e-9
    )


@given(
    static_cases(),
    st.sampled_from(["optimized", "equal"]),
    st.randoms(use_true_random=False),
)
def test_permuting_devices_changes_nothing(case, power, random):
    target, h, keywords = case
    order = list(range(target.devices))
    random.shuffle(order)
    first = make_plan(target, h, power=power, **keywords)
    second = make_plan(target, h[:, order], power=power, **keywords)
    np.testing.assert_allclose(first.gain, second.gain, rtol=1e-12)
    np.testing.assert_allclose(first.bound, second.bound, rtol=1e-12)
    np.testing.assert_array_equal(first.weight[:, order], second.weight)


@given(static_cases(), st.floats(1e-3, 1e3))
def test_noise_power_and_transmit_power_scale_together(case, noise_power):
    target, h, keywords = case
    first = make_plan(target, h, **keywords)
    second = make_plan(target, h, noise_power=noise_power, **keywords)
    np.testing.assert_allclose(
        second.gain, first.gain * np.sqrt(noise_power), rtol=1e-9
    )
    np.testing.assert_allclose(second.bound, first.bound, rtol=1e-9)
    np.testing.assert_allclose(second.spent, first.spent, rtol=1e-9)


@pytest.mark.parametrize(
    "power", ["optimized", "equal", "no-dp", "noiseless-dp", "noiseless"]
)
def test_objective_is_what_it_says(power):
    target = Target(3.0, 20.0, 7, 6)
    h = channel.rayleigh(0.01).draw(np.random.default_rng(2), 25, 6)
    for objective, value in (("worst", np.max), ("average", np.mean)):
        plan = make_plan(
            target,
            h,
            power=power,
            objective=objective,
            burn_in=10,
            samples=15,
            clip=2.0,
        )
        assert plan.objective == pytest.approx(value(plan.bound[10:]), rel=1e-12)


def test_equal_uses_the_largest_count_among_the_devices_of_a_round():
    """Device 0 is active in 4 rounds, device 1 in 1: rounds with device 0 get R/4, whoever else sends."""
    h = np.array([[1, 1e-4], [1, 1e-4], [1, 1e-4], [1, 1]])
    target = Target(1.0, 2.0, 3, 2)
    plan = make_plan(
        target,
        h,
        snr_db=50,
        power="equal",
        schedule="threshold",
        burn_in=0,
        samples=4,
        clip=1.0,
        step_size=0.3,
        epsilon=0.1,
    )
    assert plan.active_devices.tolist() == [1, 1, 1, 2]
    budget = plan.privacy.budget(1)[0]
    np.testing.assert_allclose(plan.loss.max(-1), budget / 4, rtol=1e-9)
    np.testing.assert_allclose(plan.spent, [budget, budget / 4], rtol=1e-9)
    # A round without the busy device need not be as careful as if it were there.
    alone = make_plan(
        target, np.array([[1, 1e-4], [1, 1e-4], [1, 1e-4], [1e-4, 1]]), snr_db=50, power="equal", schedule="threshold",
        burn_in=0, samples=4, clip=1.0, step_size=0.3, epsilon=0.1,
    )  # fmt: skip
    np.testing.assert_allclose(
        alone.loss.max(-1), budget / np.array([3, 3, 3, 1]), rtol=1e-9
    )


def test_unequal_budgets_and_clips():
    """The tightest device decides, in its own units: B_k = R_k/(2 ℓ_k²)."""
    target = Target(1.0, 2.0, 3, 3)
    link = wflmc.Link(channel.static(1.0), snr_db=60)
    promise = wflmc.Privacy(epsilon=[1.0, 2.0, 4.0], delta=1e-5, clip=[1.0, 5.0, 20.0])
    for power in ("optimized", "equal"):
        plan = wflmc.plan(
            target,
            link,
            promise,
            step_size=0.3,
            burn_in=9,
            samples=1,
            policy=wflmc.Policy(power=power),
        )
        budget = promise.budget(3)
        assert np.all(plan.spent <= budget)
        tightest = np.argmin(budget / np.array([1.0, 5.0, 20.0]) ** 2)
        assert plan.spent[tightest] == pytest.approx(budget[tightest], rel=1e-9)
    with raises_input_error("clip", "4 devices", section="privacy"):
        wflmc.plan(
            dataclasses.replace(target, devices=4),
            link,
            promise,
            step_size=0.3,
            burn_in=9,
            samples=1,
        )


def test_ledger_leaves_only_what_is_left():
    target = Target(1000.0, 1300.0, 5, 4)
    h = np.full((20, 4), 0.1)
    promise = wflmc.Privacy(8.0, 0.01, 30.0)
    link = wflmc.Link(channel.from_array(h), 30.0)
    keywords = {"step_size": 0.4 / 2300, "burn_in": 19, "samples": 1}
    before = 0.25 * promise.budget(4)
    plan = wflmc.plan(target, link, promise, ledger=before, **keywords)
    assert plan.spent.max() == pytest.approx(0.75 * promise.budget(4)[0], rel=1e-9)
    assert plan.epsilon_spent == pytest.approx(8.0, rel=1e-9)
    uneven = wflmc.plan(target, link, promise, ledger=before * [1, 2, 3, 1], **keywords)
    assert uneven.spent.max() == pytest.approx(0.25 * promise.budget(4)[0], rel=1e-9)
    careless = wflmc.plan(
        target,
        link,
        promise,
        ledger=0.9 * promise.budget(4),
        policy=wflmc.Policy(power="no-dp"),
        **keywords,
    )
    assert "budget-exceeded" in codes_of(careless)
    for bad in (-before, before[:3], np.full(4, np.nan)):
        with raises_input_error("ledger", "4 finite losses"):
            wflmc.plan(target, link, promise, ledger=bad, **keywords)
    with raises_input_error("ledger", "device 0", "budget"):
        wflmc.plan(target, link, promise, ledger=promise.budget(4), **keywords)


def test_without_a_promise_privacy_costs_nothing(posterior):
    link = wflmc.Link(channel.static(1e-4), snr_db=20)
    keywords = {
        "step_size": 0.4 / (posterior.mu + posterior.L),
        "burn_in": 10,
        "samples": 5,
    }
    free = wflmc.plan(posterior, link, wflmc.Privacy(), **keywords)
    np.testing.assert_array_equal(
        free.gain,
        wflmc.plan(
            posterior,
            link,
            wflmc.Privacy(),
            policy=wflmc.Policy(power="no-dp"),
            **keywords,
        ).gain,
    )
    assert free.gap <= 1e-15
    assert free.epsilon_spent is None
    assert free.spent.max() > 0


def test_early_noise_is_warned_of(posterior):
    link = wflmc.Link(channel.static(0.01), snr_db=30)
    total = posterior.mu + posterior.L
    keywords = {"burn_in": 99, "samples": 1}
    loud = wflmc.plan(
        posterior, link, wflmc.Privacy(15, 0.01, 30), step_size=1 / total, **keywords
    )
    quiet = wflmc.plan(
        posterior, link, wflmc.Privacy(15, 0.01, 30), step_size=0.05 / total, **keywords
    )
    assert "chains-may-be-lost" in codes_of(loud)
    assert quiet.warnings == ()
    # The edge itself: √m σ against η Σ ℓ, one round at a time.
    count_loud = np.sum(np.sqrt(5 * loud.noise_variance) > loud.step_size * 30 * 30)
    assert not missing_facts(loud.warnings[0], (f"{count_loud} of 100",))
    careless = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(1, 1e-5, 30),
        step_size=1 / total,
        policy=wflmc.Policy(power="no-dp"),
        **keywords,
    )
    assert "budget-exceeded" in codes_of(careless)


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"step_size": 2.0}, "step_size"),
        ({"burn_in": -1}, "burn_in"),
        ({"samples": 0}, "samples"),
        ({"power": "best"}, "power"),
        ({"schedule": "some"}, "schedule"),
        ({"objective": "median"}, "objective"),
        ({"bound": "tight"}, "bound"),
        ({"initial_w2_sq": -1.0}, "initial_w2_sq"),
        ({"max_round_noise": 0.0}, "max_round_noise"),
        ({"solver": "best"}, "solver"),
    ],
)
def test_bad_plans_are_refused_by_name(keywords, key):
    with pytest.raises(wflmc.InputError) as caught:
        make_plan(Target(1.0, 2.0, 3, 2), np.ones((4, 2)), **keywords)
    assert caught.value.key == key


def test_a_policy_of_ones_own(posterior):
    half = POLICIES["no-dp"]._replace(
        allocate=lambda problem: wflmc.planning.Allocation(problem.cap / 2)
    )
    link = wflmc.Link(channel.static(1e-4), snr_db=20)
    keywords = {"step_size": 1e-4, "burn_in": 3, "samples": 2}
    plan = wflmc.plan(
        posterior, link, wflmc.Privacy(), policy=wflmc.Policy(power=half), **keywords
    )
    full = wflmc.plan(
        posterior, link, wflmc.Privacy(), policy=wflmc.Policy(power="no-dp"), **keywords
    )
    np.testing.assert_allclose(plan.gain, full.gain / np.sqrt(2))


def spend_half(problem):
    return wflmc.planning.Allocation(POLICIES["equal"].allocate(problem).a / 2)


def spend_all_at_once(problem):
    """Everything in the first round, and next to nothing later."""
    a = np.append(
        problem.budget.min() * (1 - 1e-7),
        np.full(problem.rounds - 1, 1e-9 * problem.budget.min()),
    )
    return wflmc.planning.Allocation(problem.within_budget(a))


def alternate(problem):
    """Every other round at the caps."""
    return wflmc.planning.Allocation(
        problem.cap * np.where(np.arange(problem.rounds) % 2, 1.0, 0.1)
    )


LINKS = {
    "static": wflmc.Link(channel.static(1e-4), snr_db=30),
    "weak": wflmc.Link(channel.static(1e-4), snr_db=-10),
    "fading": wflmc.Link(channel.rayleigh(0.01), snr_db=50),
}


@pytest.mark.parametrize(
    ("power", "link", "regime", "limits"),
    [
        (spend_half, "static", "policy-limited", {"policy-limited": 1}),
        (spend_half, "fading", None, {"policy-limited": 1}),
        (spend_half, "weak", "policy-limited", {"policy-limited": 1}),
        (POLICIES["equal"].allocate, "fading", None, {"dp-limited": 1}),
        (POLICIES["equal"].allocate, "static", "dp-limited", {"dp-limited": 1}),
        (POLICIES["no-dp"].allocate, "weak", "power-limited", {"power-limited": 1}),
        (POLICIES["no-dp"], "static", "lmc-limited", {"lmc-limited": 1}),
        (
            POLICIES["no-dp"]._replace(allocate=alternate),
            "static",
            None,
            {"lmc-limited": 0.5, "policy-limited": 0.5},
        ),
        (
            POLICIES["no-dp"]._replace(allocate=alternate),
            "weak",
            None,
            {"power-limited": 0.5, "policy-limited": 0.5},
        ),
        (
            spend_all_at_once,
            "static",
            "dp-limited",
            {"lmc-limited": 0.05, "dp-limited": 0.95},
        ),
    ],
)
def test_the_regime_of_a_custom_policy_follows_from_the_constraints_that_bind(
    posterior, power, link, regime, limits
):
    step_size = 0.4 / (posterior.mu + posterior.L)
    policy = wflmc.Policy(power=power, schedule="all")
    promise = wflmc.Privacy(4, 0.01, clip=30)
    plan = wflmc.plan(
        posterior,
        LINKS[link],
        promise,
        step_size=step_size,
        burn_in=10,
        samples=10,
        policy=policy,
    )
    none = dict.fromkeys(("lmc-limited", "power-limited", "dp-limited"), 0.0)
    assert plan.regime_share == pytest.approx(none | limits)
    assert plan.regime == regime


@pytest.mark.parametrize("power", POLICIES)
@pytest.mark.parametrize("csi", ["full", "causal"])
@pytest.mark.parametrize("link", LINKS)
def test_built_in_policies_sit_at_a_limit(posterior, power, csi, link):
    step_size = 0.4 / (posterior.mu + posterior.L)
    policy = wflmc.Policy(power=power, csi=csi)
    promise = wflmc.Privacy(8, 0.01, clip=30)
    plan = wflmc.plan(
        posterior,
        LINKS[link],
        promise,
        step_size=step_size,
        burn_in=6,
        samples=4,
        policy=policy,
    )
    assert set(plan.regime_share) == {"lmc-limited", "power-limited", "dp-limited"}
    assert plan.regime != "policy-limited"


def test_kinetic_rounds_below_their_cap_take_what_others_leave(posterior):
    """Short steps are at the Langevin cap, and leave budget to the long ones."""
    longest = posterior.L**-0.5
    plan = wflmc.plan(
        posterior,
        privacy=wflmc.Privacy(2, 0.01, clip=30),
        step_size=np.repeat([0.02 * longest, longest], 10),
        burn_in=10,
        samples=10,
        sampler=wflmc.Sampler(dynamics="kinetic", friction=2 * posterior.mu**0.5),
        policy=wflmc.Policy(power="noiseless-dp"),
    )
    budget = plan.privacy.budget(plan.devices).min()
    assert plan.spent.max() == pytest.approx(budget, rel=1e-6)
    assert plan.regime_share["lmc-limited"] == 0.5
    assert plan.regime_share["dp-limited"] == 0.5


def test_a_posterior_alone_is_planned_for_an_ideal_link_without_a_promise(posterior):
    plan = wflmc.plan(posterior)
    assert plan.privacy == wflmc.Privacy()
    assert not plan.clips
    assert plan.epsilon_spent is None
    assert plan.regime == "lmc-limited"
    np.testing.assert_array_equal(plan.active_devices, posterior.devices)
    np.testing.assert_allclose(plan.noise_variance, plan.langevin_noise, rtol=1e-9)


@pytest.mark.parametrize("dynamics", ["overdamped", "kinetic"])
def test_usual_rounds_spend_a_budget_at_the_noise_of_their_dynamics(
    posterior, dynamics
):
    friction = 2 * posterior.mu**0.5
    plan = wflmc.plan(
        posterior,
        privacy=wflmc.Privacy(4, 0.01, clip=10),
        sampler=wflmc.Sampler(dynamics=dynamics, friction=friction),
        policy=wflmc.Policy(power="no-dp"),
    )
    budget = plan.privacy.budget(plan.devices)
    one_round = plan.spent / len(plan.rounds)
    np.testing.assert_array_less(plan.spent, budget * (1 + 1e-9))
    np.testing.assert_array_less(budget, plan.spent + one_round)


def test_samples_of_a_posterior_alone_are_from_it(posterior):
    trace = wflmc.sample(jax.random.key(1), posterior, wflmc.plan(posterior), chains=40)
    spread = np.sqrt(np.diagonal(posterior.covariance))
    theta = np.asarray(trace.theta, dtype=float).reshape(-1, posterior.dim)
    assert trace.clip_rate.max() == 0
    # 40 chains with some hundred independent draws each.
    np.testing.assert_allclose(
        (theta.mean(0) - posterior.mean) / spread, 0, atol=5 / np.sqrt(4000)
    )
    np.testing.assert_allclose(theta.std(0) / spread, 1, atol=0.06)


def test_a_link_or_a_promise_may_be_left_out(posterior):
    rounds = {
        "step_size": 0.4 / (posterior.mu + posterior.L),
        "burn_in": 4,
        "samples": 4,
    }
    promise = wflmc.Privacy(4, 0.01, clip=30)
    private = wflmc.plan(posterior, privacy=promise, **rounds)
    assert private.epsilon_spent == pytest.approx(4)
    assert private.power_share.max() < 1e-6
    radio = wflmc.plan(posterior, LINKS["weak"], **rounds)
    assert (
        radio.digest
        == wflmc.plan(posterior, LINKS["weak"], wflmc.Privacy(), **rounds).digest
    )
    assert radio.regime == "power-limited"
    clipped = wflmc.plan(posterior, policy=wflmc.Policy(power="no-dp"), **rounds)
    np.testing.assert_array_equal(clipped.clip, 30)
    for wrong in ({"link": promise}, {"privacy": LINKS["weak"]}):
        with pytest.raises(wflmc.InputError) as caught:
            wflmc.plan(posterior, **wrong)
        assert caught.value.key == next(iter(wrong))


def test_plans_do_not_need_jax_arrays(posterior):
    """Planning is NumPy in float64 on the host."""
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.rayleigh()),
        wflmc.Privacy(),
        step_size=1e-4,
        burn_in=1,
        samples=1,
    )
    for name in ("gain", "weight", "bound", "threshold"):
        value = getattr(plan, name)
        assert isinstance(value, np.ndarray), name
        assert value.dtype == np.float64, name


def test_settings_of_the_chain_and_the_policy_are_values_and_no_keywords():
    target = Target(1.0, 2.0, 3, 2)
    link = wflmc.Link(wflmc.channel.static(0.01), snr_db=20)
    rounds = {"step_size": 0.1, "burn_in": 3, "samples": 2}
    for name, value in (("power", "equal"), ("init", "zero"), ("strength", 2)):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            wflmc.plan(
                target, link, wflmc.Privacy(5, 0.01, 3), **rounds, **{name: value}
            )
