"""The inverse questions: the smallest SNR, ε or number of burn-in rounds with which a plan reaches a target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from wflmc.errors import InputError
from wflmc.evaluation import exact_w2_sq, has_law
from wflmc.planning import Plan
from wflmc.runs.planning import make_plan, settle_burn_in
from wflmc.scenario.build import Inputs, build, build_privacy
from wflmc.scenario.schema import Scenario, irrelevant

METRICS = ("bound", "exact")


class Unknown(NamedTuple):
    """A key to solve for: where to look, how finely, and whether it is a whole number."""

    low: float
    high: float
    logarithmic: bool = False
    whole: bool = False


UNKNOWNS: dict[str, Unknown] = {
    "link.snr_db": Unknown(-100.0, 300.0),
    "privacy.epsilon": Unknown(1e-4, 1e6, logarithmic=True),
    "sampler.burn_in": Unknown(0, 5000, whole=True),
}


class Answer(NamedTuple):
    """The smallest value that reaches the target (None if none does), the scenario with it, and its plan."""

    key: str
    metric: str
    target: float
    value: float | int | None
    reached: float
    """The metric at the answer; where the target is out of reach, the best that was seen."""
    best_at: float | int
    """The value of the key at which `reached` was seen."""
    scenario: Scenario
    """The scenario with that value."""


def solve_for(
    scenario: Scenario,
    key: str,
    target: float,
    metric: str = "bound",
    solver: str = "own",
    tried: Callable[[int], None] = lambda count: None,
) -> Answer:
    """Search a key of the scenario for the smallest value whose plan is at least as good as the target.

    For SNR and ε more is never worse at fixed active sets, and bisection finds the edge to 1e-6 of the value. More
    rounds help until privacy, spread over them, costs more than they gain, and each has its own channel: they are
    tried one by one up to 128, then in steps of 2 %, and one by one again where the steps find or nearly find it.

    Args:
        tried: called with the number of plans made so far.
    """
    unknown = _checked(scenario, key, target, metric)
    inputs = build(scenario)
    if metric == "exact" and not has_law(inputs.posterior):
        raise InputError("--metric", metric, f"'bound' with posterior.model = {scenario.posterior.model!r}")
    if key != "sampler.burn_in":
        scenario = settle_burn_in(scenario, inputs)
    seen: dict[float, float] = {}
    errors: list[InputError] = []

    def measure(value: float) -> float:
        if value not in seen:
            try:
                seen[value] = _metric(*_changed(scenario, inputs, key, value), metric, solver)
            except InputError as error:
                # A noise limit or a table of gains may rule this value out, and not the next.
                if error.key not in ("policy.max_round_noise", "link.gains"):
                    raise
                errors.append(error)
                seen[value] = math.inf
            tried(len(seen))
        return seen[value]

    def answer(value: float, reached: bool) -> Answer:
        found = value if reached else None
        return Answer(key, metric, target, found, measure(value), value, with_value(scenario, key, value))

    if measure(unknown.low) <= target:
        return answer(unknown.low, reached=True)
    high = _first_whole(unknown, measure, target) if unknown.whole else unknown.high
    if measure(high) > target:
        best = min(seen, key=lambda value: (seen[value], value))
        if math.isinf(seen[best]):
            raise errors[0]
        return answer(best, reached=False)
    low = high - 1 if unknown.whole else unknown.low
    while not _close(unknown, low, high):
        middle = (low * high) ** 0.5 if unknown.logarithmic else 0.5 * (low + high)
        low, high = (low, middle) if measure(middle) <= target else (middle, high)
    return answer(high, reached=True)


def _checked(scenario: Scenario, key: str, target: float, metric: str) -> Unknown:
    if key not in UNKNOWNS:
        raise InputError("--solve-for", key, f"one of {', '.join(UNKNOWNS)}")
    power = scenario.policy.power
    if key in irrelevant(scenario) or (key == "privacy.epsilon" and power in ("no-dp", "noiseless")):
        raise InputError("--solve-for", key, f"a key that matters with policy.power = {power!r}")
    if metric not in METRICS:
        raise InputError("--metric", metric, f"one of {', '.join(METRICS)}")
    if metric == "bound" and scenario.sampler.dynamics == "kinetic":
        raise InputError("--metric", metric, "'exact' with sampler.dynamics = 'kinetic', for which no bound is known")
    if not 0 < target < math.inf:
        raise InputError("--target", target, "a finite number above 0")
    return UNKNOWNS[key]


def with_value(scenario: Scenario, key: str, value: Any) -> Scenario:
    """The scenario with one key changed."""
    section, _, name = key.partition(".")
    changed = getattr(scenario, section).model_copy(update={name: value})
    return scenario.model_copy(update={section: changed})


def _changed(scenario: Scenario, inputs: Inputs, key: str, value: float) -> tuple[Scenario, Inputs]:
    """Scenario and inputs with one key changed; data and model stay as they are."""
    scenario = with_value(scenario, key, value)
    if inputs.release is not None and key in ("link.snr_db", "privacy.epsilon"):  # what it released depends on both
        return scenario, build(scenario)
    if key == "link.snr_db":
        return scenario, inputs._replace(link=dataclasses.replace(inputs.link, snr_db=value))
    if key == "privacy.epsilon":
        return scenario, inputs._replace(privacy=build_privacy(scenario))
    return scenario, inputs


def _metric(scenario: Scenario, inputs: Inputs, metric: str, solver: str) -> float:
    plan = make_plan(scenario, inputs, solver=solver)
    if metric == "bound":
        if plan.bound is None:
            raise InputError("--metric", metric, "exact: no bound is known for kinetic dynamics")
        return plan.objective if plan.objective_name != "exact" else float(plan.bound[plan.burn_in :].max())
    return _exact(inputs.posterior, plan)


def _exact(posterior: object, plan: Plan) -> float:
    kept = exact_w2_sq(posterior, plan)[plan.burn_in :]
    return float(kept.mean() if plan.objective_name == "average" else kept.max())


def _first_whole(unknown: Unknown, measure: Callable[[float], float], target: float) -> int:
    """The first whole number that meets the target, or the best one seen."""
    tried = [int(unknown.low)]
    while tried[-1] < unknown.high and measure(tried[-1]) > target:
        tried.append(min(tried[-1] + max(1, tried[-1] // 50 if tried[-1] >= 128 else 1), int(unknown.high)))
    best = tried[-1] if measure(tried[-1]) <= target else min(tried, key=measure)
    at = tried.index(best)
    around = range(tried[max(at - 1, 0)] + 1, tried[min(at + 1, len(tried) - 1)] + 1)
    return next((value for value in around if measure(value) <= target), min(around, key=measure, default=best))


def _close(unknown: Unknown, low: float, high: float) -> bool:
    if unknown.whole:
        return True
    return high / low < 1 + 1e-6 if unknown.logarithmic else high - low < 1e-6 * max(1.0, abs(high))
