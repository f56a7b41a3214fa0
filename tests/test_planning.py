"""Bound, thresholds, policies: against the formulas written out, brute force, and cvxpy."""

from __future__ import annotations

import dataclasses

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import wflmc
from wflmc import channel
from wflmc.planning import POLICIES, single_sample
from wflmc.planning.bound import contraction
from wflmc.planning.schedule import participation_error, threshold_schedule

from .conftest import count


@dataclasses.dataclass(frozen=True)
class Target:
    """A posterior as planning sees it, with constants of one's choice."""

    mu: float
    L: float
    dim: int
    devices: int
    distance: float = 5.0

    def initial_w2_sq(self, init: str = "prior") -> float:
        return self.distance


def make(target, h, snr_db=20.0, epsilon=8.0, delta=0.01, clip=30.0, **keywords):
    defaults = {"step_size": 0.4 / (target.mu + target.L), "burn_in": len(h) - 1, "samples": 1, "schedule": "all"}
    link = wflmc.Link(channel.from_array(np.asarray(h)), snr_db, noise_power=keywords.pop("noise_power", 1.0))
    promise = wflmc.Privacy(epsilon, delta, clip, keywords.pop("accountant", "exact"))
    return wflmc.plan(target, link, promise, **{**defaults, **keywords})


@st.composite
def static_cases(draw):
    """Random static scenarios that reach all three regimes."""
    mu = draw(st.floats(0.5, 2000))
    target = Target(mu, mu * draw(st.floats(1, 30)), draw(st.integers(1, 40)), draw(st.integers(1, 12)))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    h = np.broadcast_to(
        0.01 * np.exp(generator.normal(0, 0.7, target.devices)), (draw(st.integers(1, 80)), target.devices)
    )
    step = draw(st.floats(0.02, 1.98)) / (target.mu + target.L)
    assume(step < 2 / target.L)
    return (
        target,
        h,
        {
            "step_size": step,
            "snr_db": draw(st.floats(-10, 60)),
            "epsilon": draw(st.floats(0.05, 100)),
            "delta": draw(st.floats(1e-9, 0.3)),
            "clip": draw(st.floats(0.5, 100)),
            "bound": draw(st.sampled_from(["paper", "corrected"])),
            "accountant": draw(st.sampled_from(["paper", "exact"])),
            "schedule": draw(st.sampled_from(["all", "threshold"])),
        },
    )


@st.composite
def fading_cases(draw):
    """Random scenarios over fading channels, several samples."""
    mu = draw(st.floats(0.5, 2000))
    target = Target(mu, mu * draw(st.floats(1, 30)), draw(st.integers(1, 40)), draw(st.integers(1, 12)))
    rounds = draw(st.integers(1, 60))
    law = draw(st.sampled_from([channel.rayleigh, channel.rician]))(power=0.01, correlation=draw(st.floats(0, 1)))
    h = law.draw(np.random.default_rng(draw(st.integers(0, 2**31))), rounds, target.devices)
    return (
        target,
        h,
        {
            "snr_db": draw(st.floats(-10, 60)),
            "epsilon": draw(st.floats(0.05, 100)),
            "clip": draw(st.floats(0.5, 100)),
            "burn_in": (burn_in := draw(st.integers(0, rounds - 1))),
            "samples": rounds - burn_in,
            "schedule": draw(st.sampled_from(["all", "threshold"])),
        },
    )


def check_limits(plan, h, snr_db, clip):
    """Power of every sending device, and privacy of every device."""
    sends = plan.weight > 0
    power = (plan.gain[:, None] * clip / np.abs(h)) ** 2
    assert np.all(power[sends] <= plan.dim * plan.noise_power * 10 ** (snr_db / 10) * (1 + 1e-9))
    assert np.all(plan.spent <= plan.privacy.budget(plan.devices))


def written_out_bound(plan, target, which):
    """Proposition 1 as printed: a double sum, nothing recursive."""
    eta, m, devices = plan.step_size[0], target.dim, target.devices
    gamma = 1 - eta * target.mu if eta <= 2 / (target.mu + target.L) else eta * target.L - 1
    silent = devices - plan.active_devices
    clip = plan.clip[0]
    excess = np.maximum(0, plan.noise_power * devices**2 / (plan.gain * plan.active_devices) ** 2 - 2 / eta)
    excess *= m if which == "corrected" else 1
    inside = eta**4 * target.L**3 * m / 3 + eta**3 * target.L**2 * m + eta**2 * excess
    inside = inside + np.where(silent > 0, 4 * eta**2 * np.where(silent > 0, clip, 0) ** 2 * silent**2, 0)
    rho = (1 + gamma) / 2
    return np.array(
        [
            rho ** (2 * s) * plan.initial_w2_sq
            + sum(rho ** (2 * (s - i)) * 2 * (1 + gamma) / (1 - gamma) * inside[i - 1] for i in range(1, s + 1))
            for s in range(1, plan.rounds + 1)
        ]
    )


@pytest.mark.parametrize("which", ["paper", "corrected"])
@pytest.mark.parametrize("power", ["equal", "no-dp", "noiseless"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.05])
def test_bound_against_the_printed_double_sum(which, power, factor):
    target = Target(3.0, 20.0, 7, 6)
    h = channel.rayleigh(0.01).draw(np.random.default_rng(2), 25, 6)
    plan = make(
        target, h, power=power, schedule="threshold", step_size=2 * factor / 23, bound=which, clip=2.0, snr_db=5
    )
    if power != "noiseless":
        assert plan.active_devices.min() < 6
    np.testing.assert_allclose(plan.bound, written_out_bound(plan, target, which), rtol=1e-10)


def test_contraction_on_both_branches():
    assert contraction(0.1, 1.0, 3.0).gamma == pytest.approx(0.9)
    assert contraction(0.6, 1.0, 3.0).gamma == pytest.approx(0.8)
    assert contraction(0.5, 1.0, 3.0).kappa == pytest.approx(2 * 1.5 / 0.5)
    for step in (0.0, -1.0, 2 / 3, 1.0, np.nan):
        with pytest.raises(wflmc.InputError, match="2/L"):
            contraction(step, 1.0, 3.0)


def brute_threshold(gains, clip, power, step_size, weight):
    """The threshold rule of Sec. V-D for one round, threshold by threshold."""
    best = None
    for threshold in sorted(set(gains)):
        active = gains >= threshold
        a = np.min(power * gains[active] ** 2 / clip**2)
        error = 4 * clip**2 * np.sum(~active) ** 2
        error += weight * max(0.0, gains.size**2 / np.sum(active) ** 2 / a - 2 / step_size)
        if best is None or error < best[0] * (1 - 1e-12):
            best = (error, threshold)
    return best


@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.floats(0, 50),
    st.floats(0.1, 50),
    st.floats(1e-5, 1),
    st.sampled_from([1.0, 5.0]),
)
def test_thresholds_against_brute_force(seed, devices, snr_db, clip, step_size, weight):
    generator = np.random.default_rng(seed)
    gains = np.abs(generator.standard_normal((4, devices))) * 0.1
    gains[2:] = np.round(gains[2:], 1) + 0.1  # ties
    power = 5 * 10 ** (snr_db / 10)
    made = threshold_schedule(gains, np.full(devices, clip), power * gains**2 / clip**2, step_size, weight)
    for row, threshold, active in zip(gains, made.threshold, made.active, strict=True):
        error, _ = brute_threshold(row, clip, power, step_size, weight)
        a = np.min(power * row[active] ** 2 / clip**2)
        ours = 4 * clip**2 * np.sum(~active) ** 2 + weight * max(
            0.0, (devices / np.sum(active)) ** 2 / a - 2 / step_size
        )
        assert ours <= error * (1 + 1e-9)
        assert np.array_equal(active, row >= threshold)


def test_of_equally_good_thresholds_the_one_with_more_devices():
    """Silence costs 4 here, and so does the excess noise of the second device: both send."""
    made = threshold_schedule(np.array([[1.0, 0.5]]), np.ones(2), np.array([[1.0, 0.125]]), 0.5, 1.0)
    assert made.active.tolist() == [[True, True]]


def test_equal_gains_mean_everyone():
    made = threshold_schedule(np.full((1, 4), 0.1), np.ones(4), np.full((1, 4), 1e-9), 0.1, 1.0)
    assert made.active.all()


def test_participation_error_reduces_to_lemma_1():
    active = np.array([[True, True, False, False], [True, True, True, True], [True, False, False, False]])
    np.testing.assert_allclose(participation_error(np.full(4, 3.0), active), [4 * 9 * 4, 0, 4 * 9 * 9])
    # Unequal bounds: silent ones are missed, active ones are overweighted by (K − K_a)/K_a.
    assert participation_error(np.array([1.0, 2.0, 3.0, 4.0]), active)[0] == pytest.approx((7 + 3) ** 2)


def solve_with_cvxpy(problem):
    """The single-sample problem as a generic convex program; returns its optimal a.

    Scaled so that the largest cap is 1: a solver needs that, the answer does not change.
    """
    s = np.arange(1, problem.rounds + 1)
    weight = problem.cost * np.exp(2 * (problem.rounds - s) * problem.contraction.log_rho)
    unit = problem.cap.max()
    x = cp.Variable(problem.rounds)
    objective = cp.sum(cp.multiply(weight / weight.max(), cp.inv_pos(x)))
    rows = problem.active.T.astype(float)
    finite = np.isfinite(problem.budget)
    limits = (
        [x <= problem.cap / unit, rows[finite] @ x <= problem.budget[finite] / unit]
        if finite.any()
        else [x <= problem.cap / unit]
    )
    cp.Problem(cp.Minimize(objective), limits).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12
    )
    a = np.clip(x.value * unit, 1e-300, problem.cap)
    spent = a @ problem.active
    return a * min(1.0, float(np.min(problem.budget / np.maximum(spent, 1e-300))))


def test_theorem_1_is_never_worse_than_a_convex_solver():
    """Hundreds of random static scenarios in all three regimes, by a solver that knows nothing of the theorem."""
    seen = {"lmc-limited": 0, "power-limited": 0, "dp-limited": 0}
    generator = np.random.default_rng(7)
    for _ in range(count(120, 600)):
        mu = 10 ** generator.uniform(-1, 3)
        target = Target(
            mu, mu * 10 ** generator.uniform(0, 1.5), int(generator.integers(1, 30)), int(generator.integers(1, 10))
        )
        rounds = int(generator.integers(1, 60))
        h = np.broadcast_to(0.01 * np.exp(generator.normal(0, 0.5, target.devices)), (rounds, target.devices))
        captured = []

        def optimal(problem, captured=captured):
            captured.append(problem)
            return POLICIES["optimized"].allocate(problem)

        clip = 10 ** generator.uniform(-1, 2)
        snr_db = generator.uniform(0, 50)
        step = generator.uniform(0.02, 1.0) * min(2 / (target.mu + target.L), 1.9 / target.L)
        plan = make(
            target,
            h,
            snr_db=snr_db,
            epsilon=10 ** generator.uniform(-0.5, 2),
            clip=clip,
            step_size=step,
            bound=str(generator.choice(["paper", "corrected"])),
            schedule=str(generator.choice(["all", "threshold"])),
            power=POLICIES["optimized"]._replace(allocate=optimal),
        )
        problem = captured[0]
        seen[plan.regime] += 1
        theirs = problem.value(problem.bound(solve_with_cvxpy(problem)))
        assert plan.objective <= theirs * (1 + 1e-9)
        assert 0 <= plan.gap <= 1e-9
        check_limits(plan, h, snr_db, clip)
    assert min(seen.values()) >= 15, seen


@given(static_cases())
def test_static_plans_keep_every_limit_and_their_certificate(case):
    target, h, keywords = case
    plan = make(target, h, **keywords)
    check_limits(plan, h, keywords["snr_db"], keywords["clip"])
    assert 0 <= plan.gap <= 1e-9
    assert plan.lower_bound <= plan.objective * (1 + 1e-12)
    assert np.all(plan.server_noise == 0)
    assert plan.epsilon_spent <= keywords["epsilon"] * (1 + 1e-9)
    assert plan.regime == theorem_regime(plan, h, keywords)


def theorem_regime(plan, h, keywords):
    """Theorem 1's conditions as printed, in η and P."""
    active = plan.weight[0] > 0
    devices, sending, rounds = plan.devices, active.sum(), plan.rounds
    budget = plan.privacy.budget(1)[0]
    power = plan.dim * 10 ** (keywords["snr_db"] / 10)
    weakest = np.min(np.abs(h[0][active]) ** 2)
    eta, clip = plan.step_size[0], keywords["clip"]
    if eta <= sending**2 / (clip * devices) ** 2 * min(budget / rounds, 2 * power * weakest):
        return "lmc-limited"
    if power <= min(budget / rounds, (clip * devices / sending) ** 2 * eta) / (2 * weakest):
        return "power-limited"
    return "dp-limited"


@given(fading_cases(), st.sampled_from(["equal", "no-dp", "noiseless"]))
def test_benchmarks_keep_their_limits_on_any_channel(case, power):
    target, h, keywords = case
    plan = make(target, h, power=power, **keywords)
    assert plan.regime is None or plan.rounds == 1 or np.ptp(np.abs(h), axis=0).max() < 1e-9 or power == "noiseless"
    assert sum(plan.regime_share.values()) == pytest.approx(1)
    if power == "equal":
        check_limits(plan, h, keywords["snr_db"], keywords["clip"])
        # No round may stay below every limit: caps, or the equal share of one of its devices.
        share = plan.privacy.budget(1)[0] / np.maximum((plan.weight > 0).sum(0), 1)
        limit = np.where(plan.weight > 0, share, np.inf).min(-1)
        at_dp = plan.loss.max(-1) >= limit * (1 - 1e-9)
        assert np.all(at_dp | (plan.noise_variance <= 2 * plan.step_size * (1 + 1e-9)) | at_power(plan, h, keywords))
    if power == "noiseless":
        assert np.all(plan.active_devices == target.devices)
        assert np.all(plan.threshold == 0)
        np.testing.assert_allclose(plan.noise_variance, 2 * plan.step_size, rtol=1e-12)
        assert not plan.clips
        assert plan.epsilon_spent is None


def at_power(plan, h, keywords):
    sends = plan.weight > 0
    power = np.where(sends, (plan.gain[:, None] * keywords["clip"] / np.abs(h)) ** 2, 0).max(-1)
    return power >= plan.dim * 10 ** (keywords["snr_db"] / 10) * (1 - 1e-9)


@given(static_cases(), st.floats(1, 3), st.floats(0, 20))
def test_more_privacy_budget_or_power_never_hurts(case, more, decibels):
    target, h, keywords = case
    keywords["schedule"] = "all"
    base = make(target, h, **keywords).objective
    assert make(target, h, **{**keywords, "epsilon": keywords["epsilon"] * more}).objective <= base * (1 + 1e-9)
    assert make(target, h, **{**keywords, "snr_db": keywords["snr_db"] + decibels}).objective <= base * (1 + 1e-9)
    assert make(target, h, power="noiseless-dp", **keywords).objective <= base * (1 + 1e-9)
    assert base <= make(target, h, power="equal", **keywords).objective * (1 + 1e-9)


@given(static_cases(), st.sampled_from(["optimized", "equal"]), st.randoms(use_true_random=False))
def test_permuting_devices_changes_nothing(case, power, random):
    target, h, keywords = case
    order = list(range(target.devices))
    random.shuffle(order)
    first, second = make(target, h, power=power, **keywords), make(target, h[:, order], power=power, **keywords)
    np.testing.assert_allclose(first.gain, second.gain, rtol=1e-12)
    np.testing.assert_allclose(first.bound, second.bound, rtol=1e-12)
    np.testing.assert_array_equal(first.weight[:, order], second.weight)


@given(static_cases(), st.floats(1e-3, 1e3))
def test_noise_power_and_transmit_power_scale_together(case, noise_power):
    target, h, keywords = case
    first, second = make(target, h, **keywords), make(target, h, noise_power=noise_power, **keywords)
    np.testing.assert_allclose(second.gain, first.gain * np.sqrt(noise_power), rtol=1e-9)
    np.testing.assert_allclose(second.bound, first.bound, rtol=1e-9)
    np.testing.assert_allclose(second.spent, first.spent, rtol=1e-9)


@pytest.mark.parametrize("power", ["optimized", "equal", "no-dp", "noiseless-dp", "noiseless"])
def test_objective_is_what_it_says(power):
    target = Target(3.0, 20.0, 7, 6)
    h = channel.rayleigh(0.01).draw(np.random.default_rng(2), 25, 6)
    for objective, value in (("worst", np.max), ("average", np.mean)):
        plan = make(target, h, power=power, objective=objective, burn_in=10, samples=15, clip=2.0)
        assert plan.objective == pytest.approx(value(plan.bound[10:]), rel=1e-12)


@pytest.mark.parametrize("rounds", [51, 2000, 100_000])
def test_long_runs_stay_finite_and_certified(rounds):
    """ρ^{2S} is far below the smallest float."""
    target = Target(1000.0, 1300.0, 5, 3)
    plan = make(target, np.full((rounds, 3), 0.1), snr_db=30, epsilon=8.0)
    assert plan.regime == "dp-limited"
    assert np.all(np.isfinite(plan.bound))
    assert plan.gap <= 1e-9
    assert np.all(plan.gain > 0)
    assert plan.spent.max() <= plan.privacy.budget(1)[0]


def test_the_printed_bound_fails_and_the_corrected_one_holds(paper_posterior):
    """Lemma 1 lacks a factor m: at η = 2/(μ+L) and 10 dB the true distance exceeds the paper's bound."""
    post = paper_posterior
    plans = {
        which: wflmc.plan(
            post,
            wflmc.Link(channel.static(1e-4), snr_db=10),
            wflmc.Privacy(8, 0.01, 30, "paper"),
            step_size=2 / (post.mu + post.L),
            burn_in=50,
            samples=1,
            schedule="all",
            bound=which,
        )
        for which in ("paper", "corrected")
    }
    exact = wflmc.exact_w2_sq(post, plans["paper"])[-1]
    np.testing.assert_array_equal(plans["paper"].gain, plans["corrected"].gain)
    assert exact == pytest.approx(0.482, abs=5e-4)
    assert plans["paper"].bound[-1] == pytest.approx(0.401, abs=5e-4)
    assert plans["corrected"].bound[-1] == pytest.approx(1.918, abs=5e-4)


@pytest.mark.parametrize("power", ["optimized", "equal", "no-dp", "noiseless"])
@pytest.mark.parametrize("snr_db", [5, 15, 25, 40])
@pytest.mark.parametrize("factor", [0.1, 0.4, 1.0, 2.0])
def test_corrected_bound_lies_above_the_exact_law(posterior, power, snr_db, factor):
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(1e-4), snr_db=snr_db),
        wflmc.Privacy(8, 0.01, 30),
        step_size=factor / (posterior.mu + posterior.L),
        burn_in=50,
        samples=1,
        power=power,
        schedule="all",
    )
    assert np.all(wflmc.exact_w2_sq(posterior, plan) <= plan.bound * (1 + 1e-9))


def test_corrected_thresholds_weigh_noise_m_times():
    """The correction is in the threshold rule too: it silences weak devices earlier."""
    generator = np.random.default_rng(0)
    gains = np.abs(generator.standard_normal((50, 20))) * 0.1
    cap = 100 * gains**2
    few, many = (threshold_schedule(gains, np.ones(20), cap, 0.1, weight).active.sum() for weight in (50.0, 1.0))
    assert few < many


def test_equal_uses_the_largest_count_among_the_devices_of_a_round():
    """Device 0 is active in 4 rounds, device 1 in 1: rounds with device 0 get R/4, whoever else sends."""
    h = np.array([[1, 1e-4], [1, 1e-4], [1, 1e-4], [1, 1]])
    target = Target(1.0, 2.0, 3, 2)
    plan = make(
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
    alone = make(
        target, np.array([[1, 1e-4], [1, 1e-4], [1, 1e-4], [1e-4, 1]]), snr_db=50, power="equal", schedule="threshold",
        burn_in=0, samples=4, clip=1.0, step_size=0.3, epsilon=0.1,
    )  # fmt: skip
    np.testing.assert_allclose(alone.loss.max(-1), budget / np.array([3, 3, 3, 1]), rtol=1e-9)


def test_unequal_budgets_and_clips():
    """The tightest device decides, in its own units: B_k = R_k/(2 ℓ_k²)."""
    target = Target(1.0, 2.0, 3, 3)
    link = wflmc.Link(channel.static(1.0), snr_db=60)
    promise = wflmc.Privacy(epsilon=[1.0, 2.0, 4.0], delta=1e-5, clip=[1.0, 5.0, 20.0])
    for power in ("optimized", "equal"):
        plan = wflmc.plan(target, link, promise, step_size=0.3, burn_in=9, samples=1, power=power)
        budget = promise.budget(3)
        assert np.all(plan.spent <= budget)
        tightest = np.argmin(budget / np.array([1.0, 5.0, 20.0]) ** 2)
        assert plan.spent[tightest] == pytest.approx(budget[tightest], rel=1e-9)
    with pytest.raises(wflmc.InputError, match="for each of the 4 devices"):
        wflmc.plan(dataclasses.replace(target, devices=4), link, promise, step_size=0.3, burn_in=9, samples=1)


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
    careless = wflmc.plan(target, link, promise, ledger=0.9 * promise.budget(4), power="no-dp", **keywords)
    assert any("more than the privacy budget" in warning for warning in careless.warnings)
    for bad in (-before, before[:3], np.full(4, np.nan)):
        with pytest.raises(wflmc.InputError, match="one per device"):
            wflmc.plan(target, link, promise, ledger=bad, **keywords)
    with pytest.raises(wflmc.InputError, match="ledger"):
        wflmc.plan(target, link, promise, ledger=promise.budget(4), **keywords)


def test_without_a_promise_privacy_costs_nothing(posterior):
    link = wflmc.Link(channel.static(1e-4), snr_db=20)
    keywords = {"step_size": 0.4 / (posterior.mu + posterior.L), "burn_in": 10, "samples": 5}
    free = wflmc.plan(posterior, link, wflmc.Privacy(), **keywords)
    np.testing.assert_array_equal(
        free.gain, wflmc.plan(posterior, link, wflmc.Privacy(), power="no-dp", **keywords).gain
    )
    assert free.gap == 0
    assert free.epsilon_spent is None
    assert free.spent.max() > 0


def test_early_noise_is_warned_of(posterior):
    link = wflmc.Link(channel.static(0.01), snr_db=30)
    total = posterior.mu + posterior.L
    keywords = {"burn_in": 99, "samples": 1}
    loud = wflmc.plan(posterior, link, wflmc.Privacy(15, 0.01, 30), step_size=1 / total, **keywords)
    quiet = wflmc.plan(posterior, link, wflmc.Privacy(15, 0.01, 30), step_size=0.05 / total, **keywords)
    assert any("clipped gradients" in warning for warning in loud.warnings)
    assert quiet.warnings == ()
    # The edge itself: √m σ against η Σ ℓ, one round at a time.
    count_loud = np.sum(np.sqrt(5 * loud.noise_variance) > loud.step_size * 30 * 30)
    assert f"In {count_loud} of 100 rounds" in loud.warnings[0]
    careless = wflmc.plan(posterior, link, wflmc.Privacy(1, 1e-5, 30), step_size=1 / total, power="no-dp", **keywords)
    assert any("more than the privacy budget" in warning for warning in careless.warnings)


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
        make(Target(1.0, 2.0, 3, 2), np.ones((4, 2)), **keywords)
    assert caught.value.key == key


def test_regimes_broadcast():
    names = single_sample.regime(np.array([1.0, 3.0, 3.0]), np.array([2.0, 1.0, 2.5]), 2.0)
    assert names.tolist() == ["lmc-limited", "power-limited", "dp-limited"]


def test_a_policy_of_ones_own(posterior):
    half = POLICIES["no-dp"]._replace(allocate=lambda problem: wflmc.planning.Allocation(problem.cap / 2))
    link = wflmc.Link(channel.static(1e-4), snr_db=20)
    keywords = {"step_size": 1e-4, "burn_in": 3, "samples": 2}
    plan = wflmc.plan(posterior, link, wflmc.Privacy(), power=half, **keywords)
    full = wflmc.plan(posterior, link, wflmc.Privacy(), power="no-dp", **keywords)
    np.testing.assert_allclose(plan.gain, full.gain / np.sqrt(2))


def test_plans_do_not_need_jax_arrays(posterior):
    """Planning is NumPy in float64 on the host."""
    plan = wflmc.plan(posterior, wflmc.Link(channel.rayleigh()), wflmc.Privacy(), step_size=1e-4, burn_in=1, samples=1)
    for name in ("gain", "weight", "bound", "threshold"):
        value = getattr(plan, name)
        assert isinstance(value, np.ndarray), name
        assert value.dtype == np.float64, name
