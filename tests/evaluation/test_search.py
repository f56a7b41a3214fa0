"""The search for changes: it tries fewer plans, and finds what trying all of them would."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

import jax
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps.diagnosis.best_first import (
    GOOD_W2_SQ,
    SLACK_OF_KEYS,
    SLACK_OF_VALUES,
    BestFirst,
    ChangeTrial,
    nearly_best,
)
from wflmc.apps.diagnosis.least_distance import least_distance, unclipped_distance
from wflmc.apps.diagnosis.replanning import Replanner
from wflmc.apps.diagnosis.values import Change, Expectation
from wflmc.channel import drawn_once
from wflmc.evaluation.clipped_law import forecast, model_of
from wflmc.planning import Policy, plan_from
from wflmc.planning.build import TrialPlan, complete_request
from wflmc.support.keys import host_generator, seeded, seeded_generator

from .test_clipped_law import POSTERIORS

BEFORE = 100.0
CEILING = 0.8 * BEFORE


def with_cost(key, value, cost):
    return Change(key, value, "up", expected=Expectation(BEFORE, cost, True))


def steps_of(change, bounds, log) -> Generator[float, None, Change | None]:
    yield from bounds
    log.append(change)
    return change if change.cost_after < CEILING else None


def random_table(seed):
    """Costs of the changes of some keys, [key][value], from good to useless."""
    rng = np.random.default_rng(seed)
    spread = rng.uniform(0.5, 4)
    sizes = rng.integers(0, 7, rng.integers(1, 6))
    return [GOOD_W2_SQ * 10 ** rng.uniform(-0.3, spread, size) for size in sizes]


def trying_all(table):
    """What is chosen when all changes are tried."""
    chosen = []
    for key, costs in enumerate(table):
        helpful = [
            with_cost(str(key), float(i), cost)
            for i, cost in enumerate(costs)
            if cost < CEILING
        ]
        chosen.append(nearly_best(helpful, SLACK_OF_VALUES))
    return nearly_best(
        [change for change in chosen if change is not None], SLACK_OF_KEYS
    )


def best_first(table, seed, tightness, highest=np.inf):
    """What is chosen best first, with bounds between a fraction of the cost and all of it; and what was tried."""
    rng = np.random.default_rng(seed)
    tried = []
    search = BestFirst(ceiling=CEILING, highest=highest)
    for key, costs in enumerate(table):
        trials = []
        for i, cost in enumerate(costs):
            change = with_cost(str(key), float(i), cost)
            first, second = np.sort(rng.uniform(tightness, 1, 2)) * cost
            trials.append(ChangeTrial(change, first, steps_of(change, [second], tried)))
        search.add_key(trials)
        if search.is_over:
            break
    return search.result(), tried


@pytest.mark.parametrize("tightness", [0.0, 0.5, 0.99])
def test_the_best_change_is_that_of_trying_all(tightness):
    for seed in range(400):
        table = random_table(seed)
        change, _ = best_first(table, seed, tightness)
        assert change == trying_all(table), seed


def test_a_result_brings_the_cost_below_the_highest():
    """What trying all would choose, if it costs less than `highest`; else nothing."""
    for seed in range(400):
        table = random_table(seed)
        expected = trying_all(table)
        highest = float(np.random.default_rng(seed).uniform(0.1, 30))
        change, _ = best_first(table, seed, 0.5, highest)
        if expected is not None and expected.cost_after >= highest:
            expected = None
        assert change == expected, seed


def test_good_bounds_save_most_trials():
    tables = [random_table(seed) for seed in range(200)]
    tried = sum(
        len(best_first(table, seed, 0.9)[1]) for seed, table in enumerate(tables)
    )
    assert tried < 0.5 * sum(len(costs) for table in tables for costs in table)


def test_later_keys_are_not_asked_for_after_a_good_change():
    search = BestFirst(ceiling=CEILING)
    change = with_cost("first", 1.0, GOOD_W2_SQ / 2)
    search.add_key([ChangeTrial(change, 0.0, steps_of(change, [], []))])
    assert search.is_over
    assert search.result() == change


def request_of(posterior, seed):
    rng = np.random.default_rng(seed)
    privacy = wflmc.Privacy(
        float(10 ** rng.uniform(-0.5, 2)), 0.01, float(10 ** rng.uniform(0, 2.5))
    )
    if rng.random() < 0.3:
        privacy = dataclasses.replace(
            privacy, unit="record", example_clip=float(10 ** rng.uniform(-0.3, 0.8))
        )
    link = wflmc.Link(
        channel.rayleigh(0.01),
        snr_db=float(rng.uniform(0, 40)),
        csi_error=float(rng.choice([0.0, 0.2])),
        downlink_snr_db=float(rng.choice([np.inf, 20.0])),
    )
    return complete_request(
        posterior,
        link,
        privacy,
        step_size=float(rng.uniform(0.02, 1.5)) / (posterior.mu + posterior.L),
        burn_in=int(rng.choice([0, 40])),
        samples=int(rng.integers(1, 60)),
        policy=Policy(
            power=str(rng.choice(["optimized", "equal", "no-dp"])),
            objective=str(rng.choice(["worst", "average"])),
        ),
    )


@pytest.mark.parametrize("name", POSTERIORS)
def test_no_forecast_is_below_its_bounds(name):
    """One bound knows the plan, the other only its limits; where noise is all that matters they are near."""
    posterior = POSTERIORS[name]
    ratios = []
    for seed in range(25):
        trial = TrialPlan(posterior, request_of(posterior, seed))
        plan = trial.plan()
        model = model_of(plan, posterior)
        before = least_distance(trial, model)
        after = unclipped_distance(plan, model)
        alike = forecast(plan, model).scaled_w2_sq
        assert before <= after * (1 + 1e-5)
        assert after <= alike
        ratios.append(before / alike)
    assert max(ratios) > 0.2


def test_bounds_of_many_precisions_are_bounds_of_groups_of_them():
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=4, examples=80, dim=20
    )
    for seed in range(8):
        trial = TrialPlan(posterior, request_of(posterior, seed))
        plan = trial.plan()
        model = model_of(plan, posterior)
        assert least_distance(trial, model) <= unclipped_distance(plan, model) * (
            1 + 1e-5
        )
        assert unclipped_distance(plan, model) <= forecast(plan, model).scaled_w2_sq


def test_kinetic_chains_and_custom_policies_have_no_bound(posterior):
    request = request_of(posterior, 0)
    custom = dataclasses.replace(
        request,
        policy=Policy(power=lambda problem: wflmc.planning.Allocation(problem.cap)),
    )
    trial = TrialPlan(posterior, custom)
    assert least_distance(trial, model_of(trial.plan(), posterior)) == 0


@pytest.mark.parametrize("seed", range(6))
def test_trial_plans_are_plans_without_notices(seed):
    """Also with gains that were drawn once, for a longer run or a shorter one."""
    posterior = POSTERIORS["gaussian"]
    request = request_of(posterior, seed)
    plan = plan_from(posterior, request)
    replanner = Replanner(posterior, request).settled_by(plan)
    for values in (
        {},
        {"sampler.burn_in": 70},
        {"link.snr_db": 35.0},
        {"sampler.burn_in": 3},
        {},
    ):
        expected = plan_from(posterior, request.with_values(values))
        trial = replanner.trial(values).plan()
        assert trial.digest == expected.digest
        assert trial.notices == ()


def test_gains_that_are_drawn_once_are_those_of_the_link():
    link = wflmc.Link(channel.rayleigh(0.01, correlation=0.7), seed=3)
    drawn_link = dataclasses.replace(link, fading=drawn_once(link.fading))
    for rounds, seed in ((20, 3), (50, 3), (10, 3), (10, 4)):
        expected = dataclasses.replace(link, seed=seed).gains(rounds, 4)
        gains = dataclasses.replace(drawn_link, seed=seed).gains(rounds, 4)
        np.testing.assert_allclose(gains, expected, rtol=1e-13)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_a_seed_gives_the_same_draws_on_the_host_as_by_its_key(seed):
    expected = host_generator(seeded(seed), "channel", "more").random(5)
    np.testing.assert_array_equal(
        seeded_generator(seed, "channel", "more").random(5), expected
    )
