"""The inverse questions: the smallest SNR, ε or number of burn-in rounds with which a plan reaches a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from wflmc.errors import InputError
from wflmc.evaluation import exact_w2_sq
from wflmc.planning import Plan
from wflmc.scenario.build import build, make_plan
from wflmc.scenario.schema import Scenario

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


def solve_for(scenario: Scenario, key: str, target: float, metric: str = "bound") -> Answer:
    """Search a key of the scenario for the smallest value whose plan is at least as good as the target.

    For SNR and ε more is never worse at fixed active sets, and bisection finds the edge to 1e-6 of the value. More
    rounds help until privacy, spread over them, costs more than they gain; there the search doubles the number of
    rounds until the target is met and bisects within the last doubling.
    """
    if key not in UNKNOWNS:
        raise InputError("--solve-for", key, f"one of {', '.join(UNKNOWNS)}")
    if metric not in METRICS:
        raise InputError("--metric", metric, f"one of {', '.join(METRICS)}")
    if not 0 < target < float("inf"):
        raise InputError("--target", target, "a finite number above 0")
    unknown = UNKNOWNS[key]
    seen: dict[float, float] = {}

    def measure(value: float) -> float:
        if value not in seen:
            seen[value] = _metric(with_value(scenario, key, value), metric)
        return seen[value]

    low, high = _bracket(unknown, lambda value: measure(value) <= target)
    if high is None:
        best = min(seen, key=lambda value: (seen[value], value))
        return Answer(key, metric, target, None, seen[best], best, with_value(scenario, key, best))
    while low is not None and not _close(unknown, low, high):
        middle = _middle(unknown, low, high)
        low, high = (low, middle) if measure(middle) <= target else (middle, high)
    return Answer(key, metric, target, high, measure(high), high, with_value(scenario, key, high))


def with_value(scenario: Scenario, key: str, value: float) -> Scenario:
    """The scenario with one key changed."""
    section, _, name = key.partition(".")
    changed = getattr(scenario, section).model_copy(update={name: value})
    return scenario.model_copy(update={section: changed})


def _metric(scenario: Scenario, metric: str) -> float:
    inputs = build(scenario)
    plan = make_plan(scenario, inputs)
    return plan.objective if metric == "bound" else _exact(inputs.posterior, plan)


def _exact(posterior: object, plan: Plan) -> float:
    kept = exact_w2_sq(posterior, plan)[plan.burn_in :]
    return float(kept.max() if plan.objective_name == "worst" else kept.mean())


def _bracket(unknown: Unknown, good: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """Two values between which the target is first met: (None, x) if already the lowest meets it, (x, None) if none."""
    if good(unknown.low):
        return None, unknown.low
    if not unknown.whole:
        return (unknown.low, unknown.high) if good(unknown.high) else (unknown.low, None)
    low, high = unknown.low, 1
    while high <= unknown.high:
        if good(high):
            return low, high
        low, high = high, 2 * high
    return low, None


def _middle(unknown: Unknown, low: float, high: float) -> float:
    if unknown.whole:
        return (int(low) + int(high)) // 2
    return (low * high) ** 0.5 if unknown.logarithmic else 0.5 * (low + high)


def _close(unknown: Unknown, low: float, high: float) -> bool:
    if unknown.whole:
        return high - low <= 1
    return high / low < 1 + 1e-6 if unknown.logarithmic else high - low < 1e-6 * max(1.0, abs(high))
