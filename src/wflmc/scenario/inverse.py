"""The inverse questions: the smallest SNR, ε or number of burn-in rounds with which a plan reaches a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from wflmc.errors import InputError
from wflmc.evaluation import exact_w2_sq
from wflmc.planning import Plan
from wflmc.scenario.build import build, make_plan
from wflmc.scenario.schema import Scenario, irrelevant

METRICS = ("bound", "exact")


class Unknown(NamedTuple):
    """A key to solve for: where to look, how finely, and whether it is a whole number."""

    low: float
    high: float
    logarithmic: bool = False
    whole: bool = False


UNKNOWNS: dict[str, Unknown] = {
    "link.snr_db": Unknown(-40.0, 100.0),
    "privacy.epsilon": Unknown(1e-3, 1e4, logarithmic=True),
    "sampler.burn_in": Unknown(0, 4096, whole=True),
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


def solve_for(scenario: Scenario, key: str, target: float, metric: str = "bound", solver: str = "own") -> Answer:
    """Search a key of the scenario for the smallest value whose plan is at least as good as the target.

    For SNR and ε more is never worse at fixed active sets, and bisection finds the edge to 1e-6 of the value. More
    rounds help until privacy, spread over them, costs more than they gain: there the search doubles the number of
    rounds until the target is met or the best of them is found between two doublings, and then bisects.
    """
    unknown = _checked(scenario, key, target, metric)
    seen: dict[float, float] = {}
    errors: list[InputError] = []

    def measure(value: float) -> float:
        if value not in seen:
            try:
                seen[value] = _metric(with_value(scenario, key, value), metric, solver)
            except InputError as error:
                # A noise limit or a table of gains may rule this value out, and not the next.
                if error.key not in ("policy.max_round_noise", "link.gains"):
                    raise
                errors.append(error)
                seen[value] = math.inf
        return seen[value]

    def answer(value: float, reached: bool) -> Answer:
        found = value if reached else None
        return Answer(key, metric, target, found, measure(value), value, with_value(scenario, key, value))

    if measure(unknown.low) <= target:
        return answer(unknown.low, reached=True)
    low, high = _bracket(unknown, measure, target)
    if measure(high) > target:
        best = min(seen, key=lambda value: (seen[value], value))
        if math.isinf(seen[best]):
            raise errors[0]
        return answer(best, reached=False)
    while not _close(unknown, low, high):
        middle = _middle(unknown, low, high)
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
    if not 0 < target < math.inf:
        raise InputError("--target", target, "a finite number above 0")
    return UNKNOWNS[key]


def with_value(scenario: Scenario, key: str, value: float) -> Scenario:
    """The scenario with one key changed."""
    section, _, name = key.partition(".")
    changed = getattr(scenario, section).model_copy(update={name: value})
    return scenario.model_copy(update={section: changed})


def _metric(scenario: Scenario, metric: str, solver: str) -> float:
    inputs = build(scenario)
    plan = make_plan(scenario, inputs, solver=solver)
    return plan.objective if metric == "bound" else _exact(inputs.posterior, plan)


def _exact(posterior: object, plan: Plan) -> float:
    kept = exact_w2_sq(posterior, plan)[plan.burn_in :]
    return float(kept.max() if plan.objective_name == "worst" else kept.mean())


def _bracket(unknown: Unknown, measure: Callable[[float], float], target: float) -> tuple[float, float]:
    """Two values between which the target is first met, if it is met at all: then the second meets it."""
    if not unknown.whole:
        return unknown.low, unknown.high
    tried = [0]
    while tried[-1] < unknown.high:
        tried.append(max(1, 2 * tried[-1]))
        if measure(tried[-1]) <= target:
            return tried[-2], tried[-1]
    # One valley: its floor lies between the neighbours of the best number so far.
    best = min(range(len(tried)), key=lambda at: measure(tried[at]))
    low, high = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
    start = low
    while high - low > 2:
        one, two = low + (high - low) // 3, high - (high - low) // 3
        low, high = (low, two) if measure(one) <= measure(two) else (one, high)
    return start, min(range(low, high + 1), key=measure)


def _middle(unknown: Unknown, low: float, high: float) -> float:
    if unknown.whole:
        return (int(low) + int(high)) // 2
    return (low * high) ** 0.5 if unknown.logarithmic else 0.5 * (low + high)


def _close(unknown: Unknown, low: float, high: float) -> bool:
    if unknown.whole:
        return high - low <= 1
    return high / low < 1 + 1e-6 if unknown.logarithmic else high - low < 1e-6 * max(1.0, abs(high))
