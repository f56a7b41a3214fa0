"""The choice among changes of several keys, with as few plans as it takes.

Of one key the smallest change is preferred that is nearly as good as the best; and the
first key whose change is nearly as good as that of the best key. Every change has a
lower bound on its cost, by which the most promising ones are tried first. A change is
not tried once its bound shows that it can neither be chosen nor decide which other one
is.
"""

import heapq
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from wflmc.apps.diagnosis.values import Change

GOOD_W2_SQ = 0.05
"""W2² in posterior variances below which samples count as good."""
SLACK_OF_VALUES = 1.25
"""Of one key, the smallest change whose cost is within this factor of the best wins."""
SLACK_OF_KEYS = 2.0
"""The first key is taken whose best change is within this factor of the best of all."""


class ChangeTrial:
    """A change that is tried in steps, the cheap ones first.

    Args:
        change: of a key, without what is expected of it.
        bound: on what it costs, from below.
        steps: yield better such bounds, and return the change with what is expected of
            it; None where it does not help.
    """

    def __init__(
        self,
        change: Change,
        bound: float,
        steps: Generator[float, None, Change | None],
    ) -> None:
        self.change = change
        self.bound = bound
        self.is_tried = False
        self.outcome: Change | None = None
        self._steps = steps

    def advance(self) -> None:
        """Take the next step: a better bound, or the outcome.

        The steps are those of `ChangeTrial`, the cheap ones first. After the last one
        the change is tried, and `outcome` is the change with what is expected of it;
        None where it does not help. Bounds never fall.
        """
        try:
            self.bound = max(self.bound, next(self._steps))
        except StopIteration as end:
            self.outcome = end.value
            self.is_tried = True

    @property
    def cost(self) -> float:
        """The cost of a change that helps, in posterior variances or as 1/ESS.

        It is infinite where the change does not help, and before it is tried, so that
        the lowest cost of several changes is that of one that helps.
        """
        return np.inf if self.outcome is None else self.outcome.cost_after

    @property
    def is_good(self) -> bool:
        """Whether the change was tried and reaches GOOD_W2_SQ.

        Nothing better is searched for then, as samples count as good.
        """
        return self.cost <= GOOD_W2_SQ


@dataclass(eq=False)
class BestFirst:
    """A search among the changes of several keys, which are added one after the other.

    Args:
        ceiling: a change of this cost or above does not help, so that its steps end in
            None; one whose bound reaches it is not tried.
        highest: the result is None if the change to choose costs this or more. Changes
            are tried a little beyond it, as they may decide which one is chosen.
    """

    ceiling: float = np.inf
    highest: float = np.inf
    trials_by_key: list[Sequence[ChangeTrial]] = field(default_factory=list)
    """The changes of every key, the smallest first."""
    is_over: bool = False
    """Whether keys that come later cannot be chosen any more."""

    def add_key(self, trials: Sequence[ChangeTrial]) -> None:
        """Add the changes of the next key, and try the most promising of them.

        Where that one is good, the others of its key that may matter are tried as well,
        and the search may be over.

        Args:
            trials: of one key, the smallest changes first.
        """
        self.trials_by_key.append(trials)
        if not trials:
            return
        first = min(trials, key=lambda trial: trial.bound)
        while not self._need_not_be_tried(first, trials):
            first.advance()
        if first.is_good:
            self._try_all([trials])
            chosen = _chosen(trials)
            self.is_over = chosen is not None and chosen.cost_after <= GOOD_W2_SQ

    def result(self) -> Change | None:
        """Return the change to choose; None where none helps.

        All changes that may matter are tried first, the most promising ones at the
        beginning. The first key wins whose choice costs at most SLACK_OF_KEYS times
        what the best key's costs, or is good. If that choice costs `highest` or more,
        none is returned, also where another key's would cost less.
        """
        self._try_all(self.trials_by_key)
        by_key = (_chosen(trials) for trials in self.trials_by_key)
        chosen = nearly_best(
            (change for change in by_key if change is not None), SLACK_OF_KEYS
        )
        if chosen is None or chosen.cost_after >= self.highest:
            return None
        return chosen

    def _try_all(self, keys: Sequence[Sequence[ChangeTrial]]) -> None:
        """Try all changes of some keys that may matter, the most promising first."""
        numbered = enumerate((trial, trials) for trials in keys for trial in trials)
        # The number decides between equal bounds.
        queue = [
            (trial.bound, number, trial, trials) for number, (trial, trials) in numbered
        ]
        heapq.heapify(queue)
        while queue:
            _, number, trial, trials = heapq.heappop(queue)
            if not self._need_not_be_tried(trial, trials):
                trial.advance()
                heapq.heappush(queue, (trial.bound, number, trial, trials))

    def _need_not_be_tried(
        self, trial: ChangeTrial, trials: Sequence[ChangeTrial]
    ) -> bool:
        """Return whether a change need not be tried any further.

        It was tried, or its bound shows that it makes no difference. If a change of
        cost x helps, what its key chooses costs at most SLACK_OF_VALUES max(x,
        GOOD_W2_SQ), and the result at most SLACK_OF_KEYS times that. A change may also
        matter by what its key chooses in its place, if that costs up to SLACK_OF_VALUES
        times less.

        Args:
            trial: the change.
            trials: all changes of its key.
        """
        if trial.is_tried or trial.bound >= self.ceiling:
            return True
        before = trials[: trials.index(trial)]
        if any(smaller_change.is_good for smaller_change in before):
            return True
        lowest_of_key = max(GOOD_W2_SQ, min(sibling.cost for sibling in trials))
        if trial.bound > SLACK_OF_VALUES * lowest_of_key:
            return True
        costs = [
            candidate.cost
            for candidates in self.trials_by_key
            for candidate in candidates
        ]
        lowest = max(GOOD_W2_SQ, min(costs))
        if trial.bound > SLACK_OF_VALUES**2 * SLACK_OF_KEYS * lowest:
            return True
        return trial.bound > SLACK_OF_VALUES * SLACK_OF_KEYS * self.highest


def nearly_best(changes: Iterable[Change], slack: float) -> Change | None:
    """Return the first change that brings nearly as much as the best.

    Args:
        changes: that help, in order of preference. One that is good enough ends the
            search: those after it are not evaluated.
        slack: the factor on the best cost up to which another one is as good.

    Returns:
        The change; None where there is none.
    """
    helpful: list[Change] = []
    for change in changes:
        helpful.append(change)
        if change.cost_after <= GOOD_W2_SQ:
            break
    lowest = min((change.cost_after for change in helpful), default=0.0)
    limit = max(GOOD_W2_SQ, slack * lowest)
    return next((change for change in helpful if change.cost_after <= limit), None)


def _chosen(trials: Sequence[ChangeTrial]) -> Change | None:
    """Return what a key chooses, of the changes that were tried and help."""
    outcomes = (trial.outcome for trial in trials)
    return nearly_best(
        (change for change in outcomes if change is not None), SLACK_OF_VALUES
    )
