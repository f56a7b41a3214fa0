"""Power by a water level, where no bound says which power is best."""

import jax
import numpy as np
import pytest

import wflmc
from tests.conftest import FULL
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.dynamics import OVERDAMPED
from wflmc.planning.bound import Problem
from wflmc.planning.policies import equal, water_level


def problem_of(floor, cap, active, budget):
    """Return a power problem with these limits; all else has no effect on the level."""
    rounds = len(cap)
    step_size = np.full(rounds, 0.01)
    return Problem(
        contraction=OVERDAMPED.contraction(step_size, 1.0, 2.0),
        step_size=step_size,
        burn_in=0,
        objective="worst",
        initial_bound=1.0,
        error=np.zeros(rounds),
        noise_weight=1.0,
        scale=np.full(rounds, 1e6),
        active=np.asarray(active, dtype=bool),
        budget=np.asarray(budget, dtype=float),
        power_cap=np.asarray(cap, dtype=float),
        floor=np.asarray(floor, dtype=float),
        dim=1,
        temperature=np.ones(rounds),
    )


def filled_slowly(problem, steps=4000):
    """Raise all rounds together in small steps, and stop those that can rise no more."""
    floor = np.minimum(problem.floor, problem.cap)
    a = floor.copy()
    is_rising = np.ones(problem.rounds, dtype=bool)
    finite = problem.budget[np.isfinite(problem.budget)]
    highest = max(problem.cap.max(), finite.max(initial=0.0))
    for level in np.linspace(0, highest, steps):
        raised = np.where(is_rising, np.clip(level, floor, problem.cap), a)
        is_over = raised @ problem.active > problem.budget
        is_rising &= ~problem.active[:, is_over].any(-1)
        a = np.where(is_rising, raised, a)
    return a, highest / steps


def random_problem(generator):
    """Return limits with a feasible floor, some of them infinite."""
    while True:
        rounds = generator.integers(1, 9)
        devices = generator.integers(1, 5)
        active = generator.random((rounds, devices)) < 0.6
        active[np.arange(rounds), generator.integers(devices, size=rounds)] = True
        has_floor = generator.random(rounds) < 0.3
        floor = has_floor * 0.05 * generator.random(rounds)
        budget = 2 * generator.exponential(size=devices) + 0.4
        if generator.random() < 0.3:
            budget[generator.integers(devices)] = np.inf
        cap = generator.exponential(size=rounds) + 0.1
        if np.all(floor @ active <= budget):
            return problem_of(floor, cap, active, budget)


@pytest.mark.parametrize("seed", range(200 if FULL else 25))
def test_the_level_is_that_of_raising_all_rounds_slowly(seed):
    problem = random_problem(np.random.default_rng(seed))
    a = water_level(problem).a
    expected, step = filled_slowly(problem)
    np.testing.assert_allclose(a, expected, atol=3 * problem.rounds * step)


@pytest.mark.parametrize("seed", range(200 if FULL else 25))
def test_every_round_is_at_its_cap_or_has_a_device_without_budget(seed):
    problem = random_problem(np.random.default_rng(1000 + seed))
    a = water_level(problem).a
    spent = a @ problem.active
    assert np.all(spent <= problem.budget)
    assert np.all(a >= np.minimum(problem.floor, problem.cap))
    is_exhausted = spent >= problem.budget * (1 - 1e-6)
    at_cap = a >= problem.cap * (1 - 1e-9)
    assert np.all(at_cap | problem.active[:, is_exhausted].any(-1))
    # No round has less than in equal parts where there is no floor.
    if not problem.floor.any():
        assert a.min() >= equal(problem).a.min() * (1 - 1e-9)


def test_a_known_case():
    """Device 0 has 3 in rounds 0 to 2, whose last is capped at 0.5: 1.25 each.

    Device 1 is in rounds 2 and 3 and has 2: round 3 gets what round 2 leaves.
    """
    active = [[1, 0], [1, 0], [1, 1], [0, 1]]
    problem = problem_of(np.zeros(4), [9, 9, 0.5, 9], active, [3.0, 2.0])
    np.testing.assert_allclose(water_level(problem).a, [1.25, 1.25, 0.5, 1.5])


def test_floors_that_take_a_whole_budget_stay():
    """Device 1 can afford its floors and nothing above them."""
    active = [[1, 0], [0, 1], [0, 1]]
    problem = problem_of([0.0, 1.0, 1.0], [9, 2, 2], active, [3.0, 2.0])
    np.testing.assert_allclose(water_level(problem).a, [3, 1, 1])


def test_many_rounds_and_devices_take_few_passes():
    generator = np.random.default_rng(0)
    active = generator.random((2000, 50)) < 0.5
    active[:, 0] = True
    cap = generator.exponential(size=2000)
    problem = problem_of(np.zeros(2000), cap, active, generator.random(50) * 300 + 50)
    spent = water_level(problem).a @ active
    assert np.max(spent / problem.budget) == pytest.approx(1, abs=1e-9)


@pytest.fixture(scope="module")
def images():
    """A softmax model, whose L is known to be loose."""
    return wflmc.softmax_regression(
        jax.random.key(0), devices=6, examples=300, dim=8, classes=3
    )


def long_step_plan(images, power, **settings):
    """Plan steps above 2/L over a fading link on which power and privacy bind.

    Half of the steps of burn-in are shorter, so that rounds reach different caps.
    """
    return wflmc.plan(
        images,
        wflmc.Link(channel.rayleigh(0.01), snr_db=settings.pop("snr_db", -10)),
        wflmc.Privacy(epsilon=settings.pop("epsilon", 4), delta=1e-3, clip=10),
        step_size=np.repeat([2.5, 1.0, 2.5], 20) / images.L,
        burn_in=40,
        samples=20,
        **grouped(power=power, **settings),
    )


@pytest.mark.parametrize("power", ["optimized", "noiseless-dp"])
@pytest.mark.parametrize(("temperature", "epsilon"), [(1.0, 4), (0.1, 4), (0.1, 500)])
def test_steps_above_the_limit_leave_no_budget_unused(
    images, power, temperature, epsilon
):
    """At ε = 500 rounds of full temperature are at their caps, others are not."""
    plan = long_step_plan(
        images, power, burn_in_temperature=temperature, epsilon=epsilon, snr_db=30
    )
    assert plan.bound is None
    budget = plan.privacy.budget(plan.devices)
    assert np.all(plan.spent <= budget * (1 + 1e-9))
    is_exhausted = plan.spent >= budget * (1 - 1e-6)
    active = plan.weight > 0
    has_exhausted = active[:, is_exhausted].any(-1)
    temperatures = np.where(np.arange(60) < 40, temperature, 1.0)
    needed = temperatures * plan.langevin_noise
    at_langevin_cap = plan.noise_variance <= needed * (1 + 1e-6)
    at_power_cap = plan.power_share >= 1 - 1e-6
    assert np.all(at_langevin_cap | at_power_cap | has_exhausted)


def test_a_level_spends_what_equal_parts_leave(images):
    """Rounds in a deep fade leave budget, which the level gives to the others."""
    level = long_step_plan(images, "optimized")
    parts = long_step_plan(images, "equal")
    assert level.spent.max() > 1.01 * parts.spent.max()
    assert np.all(level.gain >= parts.gain * (1 - 1e-9))


def test_cold_burn_in_spends_what_warm_burn_in_leaves(images):
    link = {"epsilon": 500, "snr_db": 30}
    warm = long_step_plan(images, "optimized", **link)
    cold = long_step_plan(images, "optimized", burn_in_temperature=0.05, **link)
    assert cold.spent.max() > 1.2 * warm.spent.max()
    assert np.all(cold.noise_variance[:40] <= warm.noise_variance[:40] * (1 + 1e-9))
    np.testing.assert_allclose(cold.noise_variance[40:], warm.noise_variance[40:])
