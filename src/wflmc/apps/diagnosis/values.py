"""The values of a diagnosis: causes of error, changes of settings, what chains show."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from wflmc.evaluation.summary import Evaluation

SettingValue = float | int | str
"""Value of a scenario key."""

TOO_FEW_DRAWS = "too few draws"
"""Name of the cause whose cost is 1/ESS instead of W2²."""
COST_TO_THE_PROMISE = {
    "privacy.epsilon": " (a weaker promise)",
    "privacy.unit": " (a weaker promise: it hides an example, not a device)",
}
"""What advice adds to a change that costs privacy."""
CAUSES_SHOWN = 2
"""Causes for which changes are searched, and that tables show; lists have all."""


class Expectation(NamedTuple):
    """What a forecast expects of a change.

    Numbers are W2² in posterior variances, or 1/ESS of one chain for too few draws.
    """

    before: float
    after: float
    is_exact: bool
    """Whether both are numbers to rely on: where no gradient is clipped, they are the
    law of the chains; else they tell better plans from worse ones."""

    @property
    def document(self) -> dict[str, object]:
        """The content of `expected` in JSON: keys before, after and exact.

        `exact` says whether the numbers are those of the law of the chains, or only
        tell better plans from worse ones.
        """
        return {"before": self.before, "after": self.after, "exact": self.is_exact}


class Change(NamedTuple):
    """A setting to try."""

    key: str
    """Of a scenario, such as `privacy.clip`."""
    value: SettingValue
    direction: str
    """up or down; to, where the value is not a number."""
    accompanying: Mapping[str, SettingValue] = {}
    """Values of other keys that must be set with it."""
    expected: Expectation | None = None
    """None where it cannot be forecast."""
    follows_another: bool = False
    """Whether it was tried together with the change of the cause before."""

    @property
    def values(self) -> dict[str, SettingValue]:
        """The new value of every key, those that must be set with it included.

        They are what a plan is made again with, and what is written into a scenario.
        """
        return {self.key: self.value, **self.accompanying}

    @property
    def cost_after(self) -> float:
        """The cost that a forecast expects after the change.

        W2² in posterior variances, or 1/ESS of one chain for too few draws; infinite
        where the change cannot be forecast, so that it loses against any other that
        can.
        """
        return math.inf if self.expected is None else self.expected.after

    @property
    def document(self) -> dict[str, object]:
        """The content of `change` in JSON.

        It has the key, its value, the direction (up, down or to), under `with` the
        values of other keys that must be set as well, and under `expected` what a
        forecast expects; None where there is no forecast.
        """
        return {
            "key": self.key,
            "value": self.value,
            "direction": self.direction,
            "with": dict(self.accompanying),
            "expected": None if self.expected is None else self.expected.document,
        }

    def __str__(self) -> str:
        assignments = []
        for key, value in self.values.items():
            shown = value if isinstance(value, str) else f"{value:g}"
            assignments.append(f"{key} = {shown}")
        return " with ".join(assignments)


class Cause(NamedTuple):
    """One reason why samples are not those of the posterior."""

    cause: str
    evidence: str
    cost: float
    """W2² in posterior variances that it accounts for; 1/ESS for too few draws.

    For a prior that is too narrow, how many times as far from 0 as it expects the data
    put parameters; 0 for a plan that is not diagnosed.
    """
    change: Change | None
    """The change that helps most against it; None where there is none."""
    instead: Change | None = None
    """Where that one costs privacy or power, the best that does not."""

    def __str__(self) -> str:
        text = f"{self.cause[:1].upper()}{self.cause[1:]}: {self.evidence}."
        if self.change is None:
            return text
        text += f" {self._recommendation(self.change)}."
        if self.instead is not None:
            text += f" Without it, {self.instead} helps."
        return text

    def _recommendation(self, change: Change) -> str:
        verb = "Then try" if change.follows_another else "Try"
        text = f"{verb} {change}{COST_TO_THE_PROMISE.get(change.key, '')}"
        expected = change.expected
        if expected is None:
            return text
        if not expected.is_exact:
            return f"{text}: better samples in a forecast"
        quantity = "W2² in posterior variances"
        if self.cause == TOO_FEW_DRAWS:
            quantity = "1/ESS of a chain"
        numbers = f"from {expected.before:.2g} to {expected.after:.2g}"
        return f"{text}: expected {quantity} falls {numbers}"

    @property
    def document(self) -> dict[str, object]:
        """The content of one entry of `diagnosis` in JSON.

        It has the cause, its evidence and cost, the changes as `Change.document` has
        them or None, and the text that people read, which says all of it in sentences.
        """
        return {
            "cause": self.cause,
            "evidence": self.evidence,
            "cost": self.cost,
            "change": None if self.change is None else self.change.document,
            "instead": None if self.instead is None else self.instead.document,
            "text": str(self),
        }


class Measured(NamedTuple):
    """What chains show of their plan; None where it was not measured.

    Scores on test sets are not here: settings chosen by them would be fitted to the
    test set.
    """

    rhat_max: float | None
    clip_rate: float | None
    """Share of the devices' gradients that were clipped after burn-in."""
    example_clip_rate: float | None
    """Share of the examples' gradients that were clipped."""

    @classmethod
    def from_evaluation(cls, evaluation: Evaluation) -> "Measured":
        """Return what an evaluation of a trace has measured.

        The clip rate is that of kept rounds, None where it was not measured. Scores on
        test sets are left out, since settings that are chosen by them would be fitted
        to the test set.

        Args:
            evaluation: of a trace of the plan.

        Returns:
            The largest R-hat and the clip rates.
        """
        clip_rate = evaluation.clip_rate["samples"]
        is_known = clip_rate is not None and not math.isnan(clip_rate)
        return cls(
            rhat_max=evaluation.rhat_max,
            clip_rate=clip_rate if is_known else None,
            example_clip_rate=evaluation.example_clip_rate,
        )


NOTHING_MEASURED = Measured(rhat_max=None, clip_rate=None, example_clip_rate=None)
"""Of a plan without chains."""
