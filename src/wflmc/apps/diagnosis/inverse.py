"""Inverse questions: the smallest SNR, ε or burn-in whose plan reaches a target."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.evaluation import exact_w2_sq
from wflmc.planning import policy_named
from wflmc.posterior.base import HasLaw
from wflmc.runs.planning import make_plan, settle_burn_in
from wflmc.scenario import (
    Inputs,
    Scenario,
    build,
    build_link,
    build_privacy,
    irrelevant,
    with_values,
)
from wflmc.support.errors import InputError, refuse

METRICS = ("bound", "exact")
SEARCH_RANGES = {
    "link.snr_db": (-100.0, 300.0),
    "privacy.epsilon": (1e-4, 1e6),
    "sampler.burn_in": (0, 5000),
}
"""Keys to solve for, and where to search."""
SEARCH_TOLERANCE = 1e-6
"""Relative, of an SNR or ε that was searched for."""
SCAN_COUNTS = (101, 11, 11, 11)
"""How many values of an SNR or ε are tried where more may be worse: every 4 dB or 26 %,
and then three times around the best so far, down to 0.03 dB or 0.2 %."""
MAX_ROUNDS_ONE_BY_ONE = 128
"""Rounds of burn-in up to which every number is tried; beyond, in steps of 2 %."""
KEYS_THAT_MAY_RULE_OUT = ("policy.max_round_noise", "link.gains")
"""A noise limit or a table of gains may rule one value out, and not the next."""

Metric = Callable[[float], float]
"""W2² of the plan with a value of the key; infinite where there is no such plan."""
Grid = Callable[[float, float, int], NDArray[np.float64]]
"""`np.linspace` or `np.geomspace`."""


class InverseQuestion(NamedTuple):
    """What is asked for."""

    key: str
    """Of SEARCH_RANGES."""
    target: float
    """W2² to reach after burn-in."""
    metric: str
    """bound, or exact for the true W2²."""
    solver: str
    """own or cvxpy."""


class InverseAnswer(NamedTuple):
    """The answer to an inverse question."""

    key: str
    metric: str
    target: float
    value: float | int | None
    """The smallest value found that reaches the target; None where none was found."""
    reached: float
    """The metric at `best_at`."""
    best_at: float | int
    """`value`, or the value that came nearest to the target."""
    reachable: bool

    @property
    def document(self) -> dict[str, Any]:
        """The content of `solve_for` in JSON, without the sentence `answer`.

        Its keys are key, metric, target, value, reached, best_at and reachable; `value`
        is None where no value reaches the target.
        """
        return self._asdict()


class Solved(NamedTuple):
    """The scenario with the answer in it, and the answer."""

    scenario: Scenario
    answer: InverseAnswer


class _PlanMetric:
    """The metric of a scenario's plan as a function of one key, each value once."""

    def __init__(
        self,
        scenario: Scenario,
        inputs: Inputs,
        question: InverseQuestion,
        progress: Callable[[int], None],
    ) -> None:
        self.scenario = scenario
        self.inputs = inputs
        self.question = question
        self.progress = progress
        self.values: dict[float, float] = {}
        self.errors: list[InputError] = []

    def __call__(self, value: float) -> float:
        if value not in self.values:
            try:
                self.values[value] = self._measure(value)
            except InputError as error:
                if error.scenario_key not in KEYS_THAT_MAY_RULE_OUT:
                    raise
                self.errors.append(error)
                self.values[value] = math.inf
            self.progress(len(self.values))
        return self.values[value]

    def _measure(self, value: float) -> float:
        """Return the bound or the exact W2² of the plan with a value.

        It is the worst of the kept rounds, or their mean where the plan's objective is
        the average.

        Raises:
            InputError: the plan has no bound.
        """
        key = self.question.key
        scenario = with_values(self.scenario, {key: value})
        inputs = self.inputs
        # A release that whitens depends on SNR and ε.
        if inputs.release is not None and key != "sampler.burn_in":
            inputs = build(scenario)
        link = build_link(scenario)
        inputs = inputs._replace(link=link, privacy=build_privacy(scenario))
        plan = make_plan(scenario, inputs, solver=self.question.solver)
        by_bound = self.question.metric == "bound"
        if by_bound and plan.bound is None:
            expected = "of a plan that has one: overdamped steps below 2/L"
            raise InputError("--metric", "bound", expected)
        if by_bound and plan.certificate.objective_name in ("worst", "average"):
            return plan.objective
        rounds = plan.bound if by_bound else exact_w2_sq(inputs.posterior, plan)
        assert rounds is not None
        kept_rounds = rounds[plan.burn_in :]
        is_average = plan.certificate.objective_name == "average"
        return float(kept_rounds.mean() if is_average else kept_rounds.max())

    def best_value(self) -> float:
        """Return the value that came nearest to the target, the smallest of equals.

        Raises:
            InputError: no value had a plan; the error is that of the first one.
        """
        best = min(self.values, key=lambda value: (self.values[value], value))
        if math.isinf(self.values[best]):
            raise self.errors[0]
        return best


def solve_for(
    scenario: Scenario,
    question: InverseQuestion,
    progress: Callable[[int], None],
) -> Solved:
    """Search the smallest value of a key whose plan is as good as the target.

    The edge of an SNR or ε is bisected to 1e-6 of the value. Where more of it may be
    worse (`_may_rise`), as with cold burn-in, SNRs are first tried every 4 dB and ε
    every 26 %, upwards, until one reaches the target. A smaller value is missed where
    the metric reaches the target between two that were tried, and at neither.

    More rounds help until privacy, spread over them, costs more than they gain, and
    each has its own channel: they are tried one by one up to 128, then in steps of 2 %,
    and one by one again where the steps find or nearly find it.

    Args:
        scenario: to plan.
        question: the key, the target and how it is measured.
        progress: called with the number of plans made so far.

    Returns:
        The scenario with the answer, or with the best value where nothing reaches the
        target; and the answer.

    Raises:
        InputError: the key, the target or the metric is not one to ask for, or no value
            has a plan.
    """
    _check(scenario, question)
    key = question.key
    target = question.target
    inputs = build(scenario)
    if question.metric == "exact" and not isinstance(inputs.posterior, HasLaw):
        requirement = f"'bound' with posterior.model = {scenario.posterior.model!r}"
        raise InputError("--metric", question.metric, requirement)
    if key != "sampler.burn_in":
        scenario = settle_burn_in(scenario, inputs)
    metric = _PlanMetric(scenario, inputs, question, progress)
    low, high = SEARCH_RANGES[key]
    is_ratio = key == "privacy.epsilon"
    best: float
    if metric(low) <= target:
        best = low
    elif key == "sampler.burn_in":
        best = _first_count(int(low), int(high), metric=metric, target=target)
    else:
        if _may_rise(scenario, question):
            grid = np.geomspace if is_ratio else np.linspace
            low, high = _first_interval(
                low, high, metric=metric, target=target, grid=grid
            )
        bisect = _bisect_ratio if is_ratio else _bisect
        best = bisect(low, high, metric=metric, target=target)
    if metric(best) > target:
        best = metric.best_value()
    is_reachable = metric(best) <= target
    answer = InverseAnswer(
        key=key,
        metric=question.metric,
        target=target,
        value=best if is_reachable else None,
        reached=metric(best),
        best_at=best,
        reachable=is_reachable,
    )
    return Solved(with_values(scenario, {key: best}), answer)


def _check(scenario: Scenario, question: InverseQuestion) -> None:
    """Refuse a question that has no answer."""
    key = question.key
    metric = question.metric
    power = scenario.policy.power
    is_kinetic = scenario.sampler.dynamics == "kinetic"
    is_ignored = key == "privacy.epsilon" and not policy_named(power).private
    is_useless = key in irrelevant(scenario) or is_ignored
    matters = f"a key that matters with policy.power = {power!r}"
    law_alone = "'exact' with kinetic dynamics, which have no bound"
    is_positive = 0 < question.target < math.inf
    known_keys = f"one of {', '.join(SEARCH_RANGES)}"
    known_metrics = f"one of {', '.join(METRICS)}"
    refuse(
        (key not in SEARCH_RANGES, "--solve-for", key, known_keys),
        (is_useless, "--solve-for", key, matters),
        (metric not in METRICS, "--metric", metric, known_metrics),
        (metric == "bound" and is_kinetic, "--metric", metric, law_alone),
        (not is_positive, "--target", question.target, "a finite number above 0"),
    )


def _may_rise(scenario: Scenario, question: InverseQuestion) -> bool:
    """Return whether more SNR or ε may be worse, even at fixed active sets.

    It is never worse where the plan minimizes the metric. Nor is it for the bound of
    other policies at temperature 1, to which excess noise only adds. Cold burn-in adds
    to the bound as well, the more the less noise it has. The exact law has a price of
    too little noise at every temperature: noise helps a chain that starts too narrow.
    """
    policy = scenario.policy
    is_optimal = policy_named(policy.power).optimal
    if question.metric == "exact":
        return not (is_optimal and policy.objective == "exact")
    if is_optimal:
        return policy.objective not in ("worst", "average")
    return scenario.sampler.burn_in_temperature < 1


def _first_interval(
    low: float, high: float, *, metric: Metric, target: float, grid: Grid
) -> tuple[float, float]:
    """Return two neighbours, of which the second is the first to reach the target.

    Values between `low`, where the target is missed, and `high` are tried upwards.
    Where none reaches the target, values between the neighbours of the best are tried
    in the same way, again and again; in the end the second neighbour may miss it too.
    """
    for count in SCAN_COUNTS:
        values = [float(value) for value in grid(low, high, count)]
        for before, value in pairwise(values):
            if metric(value) <= target:
                return before, value
        best = values.index(min(values, key=metric))
        low = values[max(best - 1, 0)]
        high = values[min(best + 1, count - 1)]
    return low, high


def _bisect(low: float, high: float, *, metric: Metric, target: float) -> float:
    """Return the smallest value that reaches the target, or `high`.

    At `low` it is not reached.
    """
    if metric(high) > target:
        return high
    while (high - low) / max(1.0, abs(high)) >= SEARCH_TOLERANCE:
        middle = 0.5 * (low + high)
        if metric(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def _bisect_ratio(low: float, high: float, *, metric: Metric, target: float) -> float:
    """Return the same as `_bisect`, halving the logarithm of the ratio."""
    if metric(high) > target:
        return high
    while high / low - 1 >= SEARCH_TOLERANCE:
        middle = (low * high) ** 0.5
        if metric(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def _first_count(low: int, high: int, *, metric: Metric, target: float) -> int:
    """Return a number that reaches the target, or one near the best that was tried.

    Numbers are tried upwards, one by one up to MAX_ROUNDS_ONE_BY_ONE and then in steps
    of 2 %, until one reaches the target. What its step left out is then tried, upwards;
    where none reaches the target, what the steps on both sides of the best number left
    out. A smaller number between other steps may be missed.

    At `low` the target is not reached. `low` is not returned, even where it is the best
    of all: `solve_for` takes `metric.best_value()` where the target is missed.
    """
    tried = [low]
    while tried[-1] < high and metric(tried[-1]) > target:
        last = tried[-1]
        step = last // 50 if last >= MAX_ROUNDS_ONE_BY_ONE else 1
        tried.append(min(last + step, high))
    best = tried[-1]
    if metric(best) > target:
        best = min(tried, key=metric)
    index = tried.index(best)
    before = tried[max(index - 1, 0)]
    after = tried[min(index + 1, len(tried) - 1)]
    around = range(before + 1, after + 1)
    for value in around:
        if metric(value) <= target:
            return value
    return min(around, key=metric, default=best)
