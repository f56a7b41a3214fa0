"""Inverse questions: the smallest SNR, ε or burn-in with which a plan reaches a target."""

import math
from collections.abc import Callable
from typing import Any

from wflmc.evaluation import exact_w2_sq
from wflmc.planning import policy_named
from wflmc.posterior.base import HasLaw
from wflmc.runs.planning import make_plan, settle_burn_in
from wflmc.scenario import Inputs, Scenario, build, build_link, build_privacy, irrelevant, with_values
from wflmc.support.errors import InputError, refuse

METRICS = ("bound", "exact")
RANGES = {"link.snr_db": (-100.0, 300.0), "privacy.epsilon": (1e-4, 1e6), "sampler.burn_in": (0, 5000)}
"""Keys to solve for, and where to search."""
TOLERANCE = 1e-6
"""Relative, of an SNR or ε that was searched for."""


def solve_for(
    scenario: Scenario, key: str, target: float, metric: str, solver: str, progress: Callable[[int], None]
) -> tuple[Scenario, dict[str, Any]]:
    """Search a key of the scenario for the smallest value whose plan is at least as good as the target.

    For SNR and ε more is never worse at fixed active sets, and bisection finds the edge to 1e-6 of the value. More
    rounds help until privacy, spread over them, costs more than they gain, and each has its own channel: they are
    tried one by one up to 128, then in steps of 2 %, and one by one again where the steps find or nearly find it.

    Args:
        progress: called with the number of plans made so far.

    Returns:
        The scenario with the answer; and that as plain data: `value`, None where nothing reaches the target, `reached`,
        the metric there or the best of all that were tried, and `best_at`, the value that gave it.
    """
    _check(scenario, key, target, metric)
    inputs = build(scenario)
    if metric == "exact" and not isinstance(inputs.posterior, HasLaw):
        raise InputError("--metric", metric, f"'bound' with posterior.model = {scenario.posterior.model!r}")
    if key != "sampler.burn_in":
        scenario = settle_burn_in(scenario, inputs)
    values: dict[float, float] = {}
    errors: list[InputError] = []

    def measure(value: float) -> float:
        if value not in values:
            other = with_values(scenario, {key: value})
            try:
                released = inputs.release is not None and key != "sampler.burn_in"  # which depends on SNR and ε
                given = build(other) if released else inputs
                given = given._replace(link=build_link(other), privacy=build_privacy(other))
                values[value] = _metric(other, given, metric, solver)
            except InputError as error:
                # A noise limit or a table of gains may rule this value out, and not the next.
                if error.key not in ("policy.max_round_noise", "link.gains"):
                    raise
                errors.append(error)
                values[value] = math.inf
            progress(len(values))
        return values[value]

    low, high = RANGES[key]
    if measure(low) <= target:
        best = low
    elif key == "sampler.burn_in":
        best = _first_count(int(low), int(high), measure, target)
    else:
        best = _bisect(low, high, measure, target, logarithmic=key == "privacy.epsilon")
    if measure(best) > target:
        best = min(values, key=lambda value: (values[value], value))
        if math.isinf(values[best]):
            raise errors[0]
    reachable, asked = measure(best) <= target, {"key": key, "metric": metric, "target": target}
    found = {"value": best if reachable else None, "reached": measure(best), "best_at": best, "reachable": reachable}
    return with_values(scenario, {key: best}), {**asked, **found}


def _check(scenario: Scenario, key: str, target: float, metric: str) -> None:
    power, kinetic = scenario.policy.power, scenario.sampler.dynamics == "kinetic"
    useless = key in irrelevant(scenario) or (key == "privacy.epsilon" and not policy_named(power).private)
    refuse(
        (key not in RANGES, "--solve-for", key, f"one of {', '.join(RANGES)}"),
        (useless, "--solve-for", key, f"a key that matters with policy.power = {power!r}"),
        (metric not in METRICS, "--metric", metric, f"one of {', '.join(METRICS)}"),
        (metric == "bound" and kinetic, "--metric", metric, "'exact' with kinetic dynamics, which have no bound"),
        (not 0 < target < math.inf, "--target", target, "a finite number above 0"),
    )


def _metric(scenario: Scenario, inputs: Inputs, metric: str, solver: str) -> float:
    """Return the metric of a scenario's plan, over the kept rounds."""
    plan = make_plan(scenario, inputs, solver=solver)
    if metric == "bound" and plan.certificate.objective_name in ("worst", "average"):
        return plan.objective
    rounds = exact_w2_sq(inputs.posterior, plan) if metric == "exact" else plan.bound
    assert rounds is not None  # kinetic dynamics alone have no bound
    kept = rounds[plan.burn_in :]
    return float(kept.mean() if plan.certificate.objective_name == "average" else kept.max())


def _bisect(low: float, high: float, measure: Callable[[float], float], target: float, *, logarithmic: bool) -> float:
    """Return the smallest value up to `high` that reaches the target, or `high`; at `low` it is not reached."""
    if measure(high) > target:
        return high
    while (high / low - 1 if logarithmic else (high - low) / max(1.0, abs(high))) >= TOLERANCE:
        middle = (low * high) ** 0.5 if logarithmic else 0.5 * (low + high)
        low, high = (low, middle) if measure(middle) <= target else (middle, high)
    return high


def _first_count(low: int, high: int, measure: Callable[[float], float], target: float) -> int:
    """Return the first whole number that reaches the target, or the best of those that were tried."""
    tried = [low]
    while tried[-1] < high and measure(tried[-1]) > target:
        tried.append(min(tried[-1] + max(1, tried[-1] // 50 if tried[-1] >= 128 else 1), high))
    best = tried[-1] if measure(tried[-1]) <= target else min(tried, key=measure)
    at = tried.index(best)
    around = range(tried[max(at - 1, 0)] + 1, tried[min(at + 1, len(tried) - 1)] + 1)
    return next((value for value in around if measure(value) <= target), min(around, key=measure, default=best))
