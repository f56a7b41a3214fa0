"""The general power problem: against Clarabel, the closed form, invariances, and extreme inputs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import cycle, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.planning import POLICIES
from wflmc.planning.solvers import closed_form
from wflmc.planning.solvers.allocation import allocate
from wflmc.planning.solvers.program import PowerProgram, round_bounds, solve_by_cvxpy

from ..conftest import FULL, count
from ..error_tools import raises_input_error
from .problems import activity, check, kept_value, random_program

seeds = st.integers(0, 2**32 - 1)


def simple(rounds, devices=1, **changes):
    """Constant caps and costs, everyone active."""
    fields = {
        "active": np.ones((rounds, devices), dtype=bool),
        "budget": np.full(devices, 0.3 * rounds),
        "cap": np.ones(rounds),
        "cost": np.full(rounds, 1e-3),
        "rho": 0.99,
        "burn_in": 0,
        "base": np.zeros(rounds),
        "floor": np.zeros(rounds),
    }
    fields |= changes
    return PowerProgram(**fields | {"rho": np.broadcast_to(fields["rho"], (rounds,))})


def reference(program):
    """The objective of Clarabel's plan, made feasible; it knows nothing of our solver."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Clarabel's own doubts about its accuracy
        a = np.clip(
            solve_by_cvxpy(program), np.maximum(program.floor, 1e-300), program.cap
        )
    over = float(np.max(a @ program.active / program.budget))
    return kept_value(program, round_bounds(program, a / max(1.0, over)))


def test_never_worse_than_clarabel():
    rng = np.random.default_rng(0)
    agree = 0
    instances = count(100, 300)
    for _ in range(instances):
        p = random_program(rng)
        x = allocate(p)
        check(p, x)
        value = reference(p)
        assert x.objective <= value * (1 + 1e-6)
        assert value >= x.lower_bound * (1 - 1e-9)
        agree += abs(value - x.objective) <= 1e-5 * abs(x.objective)
    # The comparison means something only where the reference is accurate.
    assert agree >= 0.7 * instances


def test_whole_plans_agree_with_the_reference(posterior):
    """Through the planner: real channels and thresholds, both objectives, bounds and accountants."""
    rng = np.random.default_rng(4)
    for index in range(count(12, 100)):
        link = wflmc.Link(
            channel.rayleigh(0.01, correlation=float(rng.choice([0.0, 0.9]))),
            snr_db=rng.uniform(0, 40),
            seed=index,
        )
        promise = wflmc.Privacy(
            10 ** rng.uniform(0, 2), 0.01, 30, str(rng.choice(["paper", "exact"]))
        )
        keywords = {
            "step_size": rng.uniform(0.1, 1.0) / (posterior.mu + posterior.L),
            "burn_in": int(rng.integers(0, 60)),
            "samples": int(rng.integers(1, 60)),
            "objective": str(rng.choice(["worst", "average"])),
            "bound": str(rng.choice(["paper", "corrected"])),
            "power": str(rng.choice(["optimized", "noiseless-dp"])),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = (
                wflmc.plan(posterior, link, promise, **grouped(solver=name, **keywords))
                for name in ("own", "cvxpy")
            )
        assert ours.objective <= theirs.objective * (1 + 1e-6)
        assert 0 <= ours.gap <= 1e-6
        assert np.all(ours.spent <= promise.budget(30))
        assert np.all(theirs.spent <= promise.budget(30))


def test_both_objectives_are_certified():
    rng = np.random.default_rng(6)
    for p in (random_program(rng) for _ in range(count(60, 400))):
        for objective in ("worst", "average"):
            problem = replace(p, objective=objective)
            check(problem, allocate(problem))


@pytest.mark.parametrize("objective", ["worst", "average"])
@pytest.mark.parametrize("snr_db", [10, 20, 30])
def test_the_papers_study_is_certified(posterior, objective, snr_db):
    """100 rounds, 30 devices."""
    plan = wflmc.plan(
        posterior, wflmc.Link(channel.rayleigh(0.01), snr_db), wflmc.Privacy(15, 0.01, 30, "paper"),
        step_size=0.4 / (posterior.mu + posterior.L), burn_in=50, samples=50, policy=wflmc.Policy(objective=objective),
    )  # fmt: skip
    assert 0 <= plan.gap <= 1e-9


def test_lower_bound_holds_for_random_plans():
    rng = np.random.default_rng(1)
    for _ in range(30):
        p = random_program(rng)
        x = allocate(p)
        for _ in range(30):
            a = p.cap * rng.random(p.cap.size) ** rng.uniform(0, 4)
            a = a / max(1.0, float(np.max(a @ p.active / p.budget)))
            assert kept_value(p, round_bounds(p, a)) >= x.lower_bound


@pytest.mark.parametrize("objective", ["worst", "average"])
@pytest.mark.parametrize(
    ("rounds", "rho", "cap"),
    [(10, 0.9, 1.0), (100, 0.95, 3.0), (100, 0.99, 1e3), (1000, 0.99, 2.0)],
)
def test_closed_form(rounds, rho, cap, objective):
    budget = 0.3 * rounds
    s = np.arange(1, rounds + 1)

    def plan(u):
        return np.minimum(cap, np.exp(np.minimum(u - s * np.log(rho), 700.0)))

    exact = plan(brentq(lambda u: plan(u).sum() - budget, -2000, 2000, xtol=1e-14))
    p = simple(
        rounds,
        cap=np.full(rounds, cap),
        rho=rho,
        burn_in=rounds - 1,
        budget=np.array([budget]),
        objective=objective,
    )
    x = allocate(p)
    check(p, x)
    seen = exact > 1e-9 * budget
    np.testing.assert_allclose(x.a[seen], exact[seen], rtol=1e-9)


def test_reduces_to_theorem_1(posterior):
    """On a static channel with one sample the general solver finds what the theorem says, to 1e-9."""
    general = POLICIES["optimized"]._replace(
        allocate=lambda problem: wflmc.planning.Allocation(
            allocate(problem.program()).a
        )
    )
    for snr_db in (5, 18, 21, 40):
        for factor in (0.1, 0.4, 1.5):
            link = wflmc.Link(channel.static(1e-4), snr_db=snr_db)
            keywords = {
                "step_size": factor / (posterior.mu + posterior.L),
                "burn_in": 50,
                "samples": 1,
                "schedule": "all",
            }
            promise = wflmc.Privacy(8, 0.01, 30)
            first = wflmc.plan(posterior, link, promise, **grouped(**keywords))
            second = wflmc.plan(
                posterior, link, promise, **grouped(power=general, **keywords)
            )
            assert second.objective == pytest.approx(first.objective, rel=1e-9)


@given(seeds)
def test_device_order_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    p = random_program(rng)
    order = rng.permutation(p.budget.size)
    x = allocate(p)
    y = allocate(replace(p, active=p.active[:, order], budget=p.budget[order]))
    assert y.objective == pytest.approx(x.objective, rel=2e-9)


@given(seeds)
def test_dominated_device_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    p = random_program(rng)
    k = int(rng.integers(p.budget.size))
    extra = p.active[:, k] & (rng.random(p.cap.size) < rng.choice([0.0, 0.5, 1.0]))
    budget = np.r_[p.budget[k] * rng.choice([1, 3]), p.budget]
    y = allocate(replace(p, active=np.column_stack([extra, p.active]), budget=budget))
    assert y.objective == pytest.approx(allocate(p).objective, rel=2e-9)


@given(seeds, st.floats(-6, 6), st.floats(-6, 6))
def test_units_do_not_matter(seed, power, value):
    p = random_program(np.random.default_rng(seed))
    u, v = 10**power, 10**value
    y = allocate(
        replace(
            p, budget=p.budget * u, cap=p.cap * u, cost=p.cost * u * v, base=p.base * v
        )
    )
    assert y.objective == pytest.approx(allocate(p).objective * v, rel=2e-9)


@given(seeds)
def test_more_budget_or_power_never_hurts(seed):
    rng = np.random.default_rng(seed)
    p = random_program(rng)
    x = allocate(p)
    budget, cap = (
        p.budget * rng.uniform(1, 2, p.budget.size),
        p.cap * rng.uniform(1, 2, p.cap.size),
    )
    assert allocate(replace(p, budget=budget)).objective <= x.objective * (1 + 1e-9)
    assert allocate(replace(p, cap=cap)).objective <= x.objective * (1 + 1e-9)


@given(seeds)
def test_floors(seed):
    rng = np.random.default_rng(seed)
    p = random_program(rng)
    budget_share = float(np.min(p.budget / (p.cap @ p.active + 1e-300)))
    floor = (
        p.cap
        * min(1.0, budget_share)
        * rng.random(p.cap.size)
        * (rng.random(p.cap.size) < 0.5)
    )
    x = allocate(replace(p, floor=floor))
    check(replace(p, floor=floor), x, gap=1e-8)
    assert x.objective >= allocate(p).lower_bound


def test_floors_against_clarabel():
    rng = np.random.default_rng(5)
    for _ in range(20):
        on = rng.random((40, 8)) > 0.3
        on[~on.any(1), 0] = True
        cap = rng.exponential(0.3, 40)
        p = simple(
            40,
            8,
            active=on,
            cap=cap,
            budget=np.full(8, 0.3 * cap.sum()),
            rho=0.9,
            burn_in=20,
        )
        p = replace(
            p,
            floor=np.minimum(cap, rng.random(40) * p.budget[0] / 40),
            objective=str(rng.choice(["worst", "average"])),
        )
        x = allocate(p)
        check(p, x)
        assert x.objective == pytest.approx(reference(p), rel=1e-5)


ODD = np.arange(50) % 2 == 1
EARLY = np.arange(50) < 25
BURSTY = activity(np.random.default_rng(0), 300, 30, "correlated")
EXTREMES = {
    "one round": simple(1, 3, budget=np.array([0.5, 0.2, 3.0])),
    "two rounds": simple(2, 3, budget=np.array([0.5, 0.2, 3.0]), burn_in=1),
    "caps over 8 decades": simple(500, cap=np.logspace(-7, 1, 500)[::-1], burn_in=9),
    "budgets over 12 decades": simple(
        300, 30, active=BURSTY, budget=np.logspace(-6, 6, 30)
    ),
    "costs over 8 decades": simple(
        500, cost=np.logspace(-7, 1, 500), rho=0.8, burn_in=99
    ),
    "tiny budget": simple(300, 2, budget=np.array([1e-30, 1.0])),
    "barely binding": simple(300, budget=np.array([300 * (1 - 1e-9)])),
    "one sender per round": simple(
        200, 10, active=np.eye(10, dtype=bool)[np.arange(200) * 7 % 10]
    ),
    "a device that never sends": simple(
        50, 3, active=np.stack([EARLY | True, ODD, ODD & ~ODD], 1)
    ),
    "infinite and finite budgets": simple(
        50, 2, active=np.stack([ODD, ~ODD], 1), budget=np.array([np.inf, 1.0])
    ),
    "floor = cap": simple(
        50, 2, budget=np.array([10.0, 20.0]), floor=1.0 * (np.arange(50) < 5)
    ),
    "floors use up one budget": simple(
        50,
        2,
        active=np.stack([EARLY | True, EARLY], 1),
        budget=np.array([20.0, 5.0]),
        floor=0.2 * EARLY,
    ),
    "floors use up all budgets": simple(
        50, 2, budget=np.full(2, 10.0), floor=np.full(50, 0.2)
    ),
}
OFTEN = np.random.default_rng(0).random((100_000, 2)) < [1.0, 0.6]
for rho in (1e-5, 0.5, 0.99, 1 - 1e-6, 1 - 1e-9):
    for burn_in in (0, 50_000, 99_999):
        EXTREMES[f"100,000 rounds, 1-rho={1 - rho:.0e}, burn-in {burn_in}"] = simple(
            100_000,
            2,
            active=OFTEN,
            budget=np.array([1e3, 5e2]),
            rho=rho,
            burn_in=burn_in,
        )
OBJECTIVES = ("worst", "average")
EXTREMES_AND_OBJECTIVES = (
    list(product(EXTREMES, OBJECTIVES))
    if FULL
    else list(zip(EXTREMES, cycle(OBJECTIVES), strict=False))
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "objective"), EXTREMES_AND_OBJECTIVES)
def test_extremes(name, objective):
    p = replace(EXTREMES[name], objective=objective)
    check(p, allocate(p), gap=1e-8)


@pytest.mark.parametrize("budget", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("objective", ["worst", "average"])
def test_extreme_budgets_through_the_planner(posterior, budget, objective):
    """R from 1e-6 to 1e6: the ε that belongs to it, gains over 8 decades, every device kept within it."""
    epsilon = float(wflmc.privacy.epsilon_spent(budget, 1e-5))
    gains = (
        np.random.default_rng(0).permuted(np.logspace(-6, 2, 60 * 30)).reshape(60, 30)
    )
    plan = wflmc.plan(
        posterior, wflmc.Link(channel.from_array(gains), snr_db=30), wflmc.Privacy(epsilon, 1e-5, 30), step_size=1e-4,
        burn_in=30, samples=30, policy=wflmc.Policy(objective=objective),
    )  # fmt: skip
    assert plan.gap <= 1e-6
    assert np.all(np.isfinite(plan.bound))
    assert np.all(plan.spent <= budget * (1 + 1e-9))


@pytest.mark.parametrize("start", [1e3, 1e6, 1e10])
@pytest.mark.parametrize("burn_in", [0, 10])
def test_a_start_far_away_is_certified_too(posterior, start, burn_in):
    """The first kept round towers over all others, and is the proof on its own."""
    plan = wflmc.plan(
        posterior, wflmc.Link(channel.rayleigh(0.01), snr_db=20), wflmc.Privacy(15, 0.01, 30), step_size=1.5e-4,
        burn_in=burn_in, samples=50, initial_w2_sq=start,
    )  # fmt: skip
    assert plan.gap <= 1e-6


def test_infinite_budgets_mean_all_caps():
    p = simple(50, 4, budget=np.full(4, np.inf))
    x = allocate(p)
    check(p, x)
    assert x.gap <= 1e-15
    assert np.array_equal(x.a, p.cap)


def test_closed_form_is_used_where_there_is_one(posterior, monkeypatch):
    called = []
    solve = closed_form.solve
    monkeypatch.setattr(
        closed_form, "solve", lambda problem: called.append(1) or solve(problem)
    )
    keywords = {"step_size": 1e-4, "burn_in": 50, "schedule": "all"}
    for samples in (1, 2):
        link = wflmc.Link(channel.static(1e-4), snr_db=30)
        assert (
            wflmc.plan(
                posterior,
                link,
                wflmc.Privacy(4, 0.01, 30),
                **grouped(samples=samples, **keywords),
            ).gap
            <= 1e-9
        )
    assert called == [1]


def test_many_plans_are_the_same_plans(posterior):
    """Each plan is what it would be alone, in the order of the links."""
    links = [
        wflmc.Link(channel.rayleigh(0.01), snr_db=20 + seed, seed=seed)
        for seed in range(3)
    ]
    promise = wflmc.Privacy(15, 0.01, 30)
    keywords = {"step_size": 1e-4, "burn_in": 20, "samples": 20}
    alone = [wflmc.plan(posterior, link, promise, **keywords) for link in links]
    for single, batched in zip(
        alone, wflmc.plan_many(posterior, links, promise, **keywords), strict=True
    ):
        np.testing.assert_array_equal(single.gain, batched.gain)
        assert single.objective == batched.objective
        assert single.gap == batched.gap
    assert wflmc.plan_many(posterior, [], promise, **keywords) == []
    with raises_input_error("max_round_noise", section="policy"):
        wflmc.plan_many(
            posterior,
            links,
            promise,
            policy=wflmc.Policy(max_round_noise=1e-9),
            **keywords,
        )
