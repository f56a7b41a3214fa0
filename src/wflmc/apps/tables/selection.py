"""Private selection: the best of a random number of runs (Papernot & Steinke 2022).

A repeat draws one of a few candidates, runs it on the data and scores it under noise.
The number of repeats is geometric, and only the run of the best score is seen. The cost
is that of one repeat and a little more, by Rényi differential privacy.
"""

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from wflmc.privacy import Privacy
from wflmc.support.errors import InputError

RunT = TypeVar("RunT")

REPEATS = 4.0
"""The mean of the number of repeats."""
SCORE_FRACTION = 0.1
"""A score's part of the loss of a repeat."""
BISECTIONS = 30
"""Halvings of the budget by which the loss of a repeat is found."""


class Selected(NamedTuple, Generic[RunT]):
    """The best run.

    How many runs there were is not kept: the cost is that of a number nobody knows.

    Args:
        run: what it returned; None once it is stored elsewhere.
        candidate: index of the candidate.
        score: its noisy score.
    """

    run: RunT | None
    candidate: int
    score: float


def loss_of_repeat(privacy: Privacy, spent: float) -> float:
    """Return the largest loss of one repeat with which all of them keep to (ε, δ).

    Args:
        privacy: the promise, one ε and one δ for all devices.
        spent: the loss that was spent before, by Gaussian mechanisms.

    Returns:
        The loss, found by bisection from below: the promise holds for it exactly.

    Raises:
        InputError: the promise differs by device, or leaves nothing for a repeat; or
            dp-accounting is not installed.
    """
    if privacy.epsilon is None or privacy.delta is None:
        raise _several_promises(privacy)
    if np.ndim(privacy.epsilon) or np.ndim(privacy.delta):
        raise _several_promises(privacy)
    epsilon = float(np.asarray(privacy.epsilon, dtype=float))
    delta = float(np.asarray(privacy.delta, dtype=float))
    low = 0.0
    high = float(privacy.budget(1)[0])
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if epsilon_of(middle, spent, delta) <= epsilon:
            low = middle
        else:
            high = middle
    if low == 0:
        requirement = "larger, for private selection: nothing is left for a repeat"
        raise InputError("epsilon", epsilon, requirement)
    return low


def _several_promises(privacy: Privacy) -> InputError:
    """Return the error for a promise that is not one ε and one δ."""
    return InputError("epsilon", privacy.epsilon, "one number, for private selection")


@functools.cache
def epsilon_of(
    loss: float, spent: float, delta: float, repeats: float = REPEATS
) -> float:
    """Compute ε of a selection and of what was spent before it, by dp-accounting.

    A mechanism of loss l is a Gaussian one of noise multiplier (2 l)^−1/2. Repeats are
    composed by theorem 2 of Papernot & Steinke (2022) with a geometric number of them,
    everything by Rényi differential privacy.

    Args:
        loss: of each repeat, above 0.
        spent: before the first one; 0 for nothing.
        delta: δ.
        repeats: the mean of their number.

    Returns:
        The smallest ε that the accountant proves.

    Raises:
        InputError: dp-accounting is not installed.
    """
    try:
        from dp_accounting.dp_event import GaussianDpEvent, RepeatAndSelectDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        reason = "without dp-accounting, which counts its cost"
        requirement = f"left out {reason}: pip install 'wflmc[tables]'"
        raise InputError("settings", "private", requirement) from None
    accountant = RdpAccountant()
    if spent > 0:
        accountant.compose(GaussianDpEvent((2 * spent) ** -0.5))
    repeat = GaussianDpEvent((2 * loss) ** -0.5)
    accountant.compose(RepeatAndSelectDpEvent(repeat, repeats, 1.0))
    return float(accountant.get_epsilon(delta))


def select(
    generator: np.random.Generator,
    candidates: int,
    run: Callable[[int, int], tuple[RunT, float]],
) -> Selected[RunT]:
    """Run candidates a geometric number of times, and return the best run.

    The guarantee needs that nothing of other runs is seen, their number included, and
    that `run` draws new noise for every repeat.

    Args:
        generator: draws the number of repeats and the candidate of each.
        candidates: how many there are; each is as likely.
        run: from the number of a repeat and the index of a candidate to its result and
            its noisy score, the higher the better.

    Returns:
        The run with the highest score; the first of equal ones.
    """
    best = Selected[RunT](run=None, candidate=-1, score=-np.inf)
    for repeat in range(int(generator.geometric(1 / REPEATS))):
        candidate = int(generator.integers(candidates))
        result, score = run(repeat, candidate)
        if score > best.score:
            best = Selected(result, candidate, score)
    return best
