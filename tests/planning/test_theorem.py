"""Theorem 1: against a convex solver, its own conditions as printed, and very long runs."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given

from wflmc.planning import POLICIES
from wflmc.planning.solvers import closed_form

from ..conftest import count
from .scenarios import Target, check_limits, make_plan, static_cases


def solve_with_cvxpy(problem):
    """The single-sample problem as a generic convex program; returns its optimal a.

    Scaled so that the largest cap is 1: a solver needs that, the answer does not change.
    """
    s = np.arange(1, problem.rounds + 1)
    weight = problem.cost * np.exp(
        2 * (problem.rounds - s) * problem.contraction.log_rho
    )
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
            mu,
            mu * 10 ** generator.uniform(0, 1.5),
            int(generator.integers(1, 30)),
            int(generator.integers(1, 10)),
        )
        rounds = int(generator.integers(1, 60))
        h = np.broadcast_to(
            0.01 * np.exp(generator.normal(0, 0.5, target.devices)),
            (rounds, target.devices),
        )
        captured = []

        def optimal(problem, captured=captured):
            captured.append(problem)
            return POLICIES["optimized"].allocate(problem)

        clip = 10 ** generator.uniform(-1, 2)
        snr_db = generator.uniform(0, 50)
        step = generator.uniform(0.02, 1.0) * min(
            2 / (target.mu + target.L), 1.9 / target.L
        )
        plan = make_plan(
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
    plan = make_plan(target, h, **keywords)
    check_limits(plan, h, keywords["snr_db"], keywords["clip"])
    assert 0 <= plan.gap <= 1e-9
    assert plan.lower_bound <= plan.objective * (1 + 1e-12)
    assert np.all(plan.server_noise == 0)
    assert plan.epsilon_spent <= keywords["epsilon"] * (1 + 1e-9)
    assert plan.regime == theorem_regime(plan, h, keywords)


def theorem_regime(plan, h, keywords):
    """Theorem 1's conditions as printed, in η and P."""
    active = plan.weight[0] > 0
    devices = plan.devices
    sending = active.sum()
    rounds = len(plan.rounds)
    budget = plan.privacy.budget(1)[0]
    power = plan.dim * 10 ** (keywords["snr_db"] / 10)
    weakest = np.min(np.abs(h[0][active]) ** 2)
    eta = plan.step_size[0]
    clip = keywords["clip"]
    if eta <= sending**2 / (clip * devices) ** 2 * min(
        budget / rounds, 2 * power * weakest
    ):
        return "lmc-limited"
    if power <= min(budget / rounds, (clip * devices / sending) ** 2 * eta) / (
        2 * weakest
    ):
        return "power-limited"
    return "dp-limited"


@pytest.mark.parametrize("rounds", [51, 2000, 100_000])
def test_long_runs_stay_finite_and_certified(rounds):
    """ρ^{2S} is far below the smallest float."""
    target = Target(1000.0, 1300.0, 5, 3)
    plan = make_plan(target, np.full((rounds, 3), 0.1), snr_db=30, epsilon=8.0)
    assert plan.regime == "dp-limited"
    assert np.all(np.isfinite(plan.bound))
    assert plan.gap <= 1e-9
    assert np.all(plan.gain > 0)
    assert plan.spent.max() <= plan.privacy.budget(1)[0]


def test_regimes_broadcast():
    names = closed_form.regime(
        np.array([1.0, 3.0, 3.0]), np.array([2.0, 1.0, 2.5]), 2.0
    )
    assert names.tolist() == ["lmc-limited", "power-limited", "dp-limited"]
