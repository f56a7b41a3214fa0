"""Plans for transcripts: a linear program, against cvxpy and against what no plan can beat."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import wflmc
from wflmc.dynamics import OVERDAMPED
from wflmc.planning.bound import Problem
from wflmc.planning.transcript import information, most_information

from ..error_tools import raises_input_error

PRIVACY = wflmc.Privacy(epsilon=4, delta=0.01, clip=30)


@pytest.fixture(scope="module")
def posterior():
    return wflmc.gaussian_regression(jax.random.key(0), devices=8, examples=160)


def make_plan(
    posterior, snr_db=20.0, privacy=PRIVACY, seed=0, burn_in=6, samples=9, **policy
):
    link = wflmc.Link(wflmc.channel.rayleigh(0.01), snr_db=snr_db, seed=seed)
    step = 0.4 / (posterior.mu + posterior.L)
    policy = wflmc.Policy(**{"objective": "transcript", **policy})
    return wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=step,
        burn_in=burn_in,
        samples=samples,
        policy=policy,
    )


def variance(plan, a=None):
    """V of the kept rounds."""
    a = plan.gain**2 / plan.noise_power if a is None else a
    return 1 / np.sum((a / plan.scale**2)[plan.burn_in :])


@pytest.mark.parametrize("snr_db", [0.0, 12.0, 20.0, 35.0])
@pytest.mark.parametrize("seed", range(3))
def test_no_solver_finds_a_smaller_noise(posterior, snr_db, seed):
    cp = pytest.importorskip("cvxpy")
    plan = make_plan(posterior, snr_db, seed=seed, max_round_noise=6.0)
    active = plan.weight > 0
    power = plan.gain**2 / plan.noise_power / plan.power_share
    budget = PRIVACY.budget(8) / (2 * 30.0**2)
    floor = 5 * (plan.scale / (6.0 * 8 * 30)) ** 2
    unit = budget.min()
    a = cp.Variable(15)
    limits = [
        a >= floor / unit,
        a <= power / unit,
        active.T.astype(float) @ a <= budget / unit,
    ]
    goal = cp.Maximize((plan.scale**-2.0)[6:] @ a[6:])
    cp.Problem(goal, limits).solve(solver=cp.CLARABEL)
    best = 1 / (goal.value * unit)
    assert plan.objective == pytest.approx(variance(plan))
    assert plan.objective == pytest.approx(best, rel=1e-5)
    assert plan.lower_bound <= plan.objective * (1 + 1e-12)
    assert plan.gap < 1e-6
    assert np.all(plan.spent <= PRIVACY.budget(8))
    assert np.all(plan.power_share <= 1 + 1e-9)
    spent = plan.gain**2 / plan.noise_power
    # Burn-in has the noise it needs and no more.
    np.testing.assert_allclose(spent[:6], floor[:6], rtol=1e-6)


def test_the_bound_holds_for_every_feasible_plan(posterior):
    plan = make_plan(posterior)
    rng = np.random.default_rng(0)
    active = plan.weight > 0
    budget = PRIVACY.budget(8) / (2 * 30.0**2)
    power = plan.gain**2 / plan.noise_power / plan.power_share
    floor = 5 * (plan.scale / (plan.certificate.noise_limit * 8 * 30)) ** 2
    for _ in range(200):
        more = (power - floor) * rng.random(15) ** rng.integers(1, 9)
        a = floor + more * min(1.0, np.min((budget - floor @ active) / (more @ active)))
        assert variance(plan, a) >= plan.lower_bound * (1 - 1e-9)


def test_equal_powers_are_taken_where_all_are_as_good(posterior):
    plan = make_plan(posterior, 40.0, schedule="all")
    assert np.ptp(plan.gain[6:]) < 1e-4 * plan.gain[-1]
    assert (
        plan.objective
        < make_plan(posterior, 40.0, schedule="all", power="equal").objective
    )
    assert make_plan(posterior, power="equal").gap is None


def test_power_alone_limits_where_nothing_is_promised(posterior):
    plan = make_plan(posterior, privacy=wflmc.Privacy(clip=30))
    np.testing.assert_allclose(plan.power_share[6:], 1.0)
    assert plan.gap == 0


def small_problem(budget, power_cap):
    """Device 0 is silent in the last two of four rounds, the first of which is burn-in."""
    step_size = np.full(4, 0.01)
    active = np.array([[1, 1], [1, 1], [0, 1], [0, 1]], dtype=bool)
    return Problem(
        contraction=OVERDAMPED.contraction(step_size, 1.0, 2.0),
        step_size=step_size,
        burn_in=1,
        objective="transcript",
        initial_bound=1.0,
        error=np.zeros(4),
        noise_weight=1.0,
        scale=2 / active.sum(1),
        active=active,
        budget=np.array(budget),
        power_cap=np.full(4, power_cap),
        floor=np.full(4, 1e-6),
        dim=1,
        temperature=np.ones(4),
    )


def test_rounds_without_the_tightest_device_may_take_more_than_its_budget():
    problem = small_problem(budget=[1.0, 100.0], power_cap=40.0)
    allocation = most_information(problem)
    np.testing.assert_allclose(allocation.a, [1e-6, 1.0, 40.0, 40.0], rtol=1e-5)
    noise = 1 / information(problem, allocation.a)
    assert noise == pytest.approx(allocation.lower_bound, rel=1e-6)
    feasible = np.array([1e-6, 0.99, 39.0, 40.0])
    assert 1 / information(problem, feasible) > allocation.lower_bound


def test_nothing_is_proven_where_nothing_limits_power():
    problem = small_problem(budget=[np.inf, np.inf], power_cap=np.inf)
    allocation = most_information(problem)
    np.testing.assert_array_equal(allocation.a, problem.lmc_cap)
    assert allocation.lower_bound is None


def test_a_small_budget_leaves_burn_in_its_half(posterior):
    tight = make_plan(posterior, 30.0, wflmc.Privacy(epsilon=0.5, delta=0.01, clip=30))
    assert tight.certificate.noise_limit > 1
    assert np.max(tight.loss[:6].sum(0)) <= 0.5 * tight.privacy.budget(8)[0] * (
        1 + 1e-9
    )
    with raises_input_error("max_round_noise", section="policy"):
        make_plan(
            posterior,
            30.0,
            wflmc.Privacy(epsilon=0.5, delta=0.01, clip=30),
            max_round_noise=0.1,
        )


def test_what_does_not_go_with_it_is_refused(posterior):
    with raises_input_error("objective", "causal", section="policy"):
        make_plan(posterior, csi="causal")
    with raises_input_error("solver", "own", "transcript"):
        make_plan(posterior, solver="cvxpy")
    link = wflmc.Link(wflmc.channel.static())
    sampler = wflmc.Sampler(step_schedule="planned")
    policy = wflmc.Policy(objective="transcript")
    with raises_input_error("step_schedule", section="sampler"):
        wflmc.plan(
            posterior,
            link,
            PRIVACY,
            step_size=1e-4,
            burn_in=5,
            samples=5,
            sampler=sampler,
            policy=policy,
        )
