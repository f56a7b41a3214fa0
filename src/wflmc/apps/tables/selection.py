"""Private selection among few candidates: the best of a random number of runs (Papernot & Steinke 2022).

A repeat draws one of the candidates, runs it on the data and scores it under noise. Their number is geometric, and only
the run of the best score is seen. The cost is that of one repeat and a little more, by Rényi differential privacy.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from wflmc.privacy import Privacy
from wflmc.support.errors import InputError

REPEATS = 4.0
"""The mean of their number."""
SCORED = 0.1
"""A score's part of the loss of a repeat."""


class Selected(NamedTuple):
    """The best run. How many there were is not told: the cost is that of a number that nobody knows."""

    run: Any
    candidate: int
    score: float


def loss_of_repeat(privacy: Privacy, spent: float) -> float:
    """Return the largest loss of one repeat with which all of them keep to (ε, δ), after a loss that was spent before.

    Raises:
        InputError: the promise differs by device, or leaves nothing for a repeat.
    """
    given = [
        np.asarray(value, dtype=float)
        for value in (privacy.epsilon, privacy.delta)
        if value is not None
    ]
    if len(given) < 2 or any(value.ndim for value in given):
        raise InputError(
            "epsilon", privacy.epsilon, "one number, for private selection"
        )
    epsilon, delta = map(float, given)
    low, high = 0.0, float(privacy.budget(1)[0])
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if epsilon_of(middle, spent, delta) <= epsilon
            else (low, middle)
        )
    if low == 0:
        raise InputError(
            "epsilon",
            epsilon,
            "larger, for private selection: nothing is left for a repeat",
        )
    return low


@functools.cache
def epsilon_of(
    loss: float, spent: float, delta: float, repeats: float = REPEATS
) -> float:
    """Return ε of a selection whose repeats cost `loss` each, and of what was spent before, by dp-accounting."""
    try:
        from dp_accounting.dp_event import GaussianDpEvent, RepeatAndSelectDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        allowed = "left out without dp-accounting, which counts its cost: pip install 'wflmc[tables]'"
        raise InputError("settings", "private", allowed) from None
    accountant = RdpAccountant()
    if spent > 0:
        accountant.compose(GaussianDpEvent((2 * spent) ** -0.5))
    accountant.compose(
        RepeatAndSelectDpEvent(GaussianDpEvent((2 * loss) ** -0.5), repeats, 1.0)
    )
    return float(accountant.get_epsilon(delta))


def select(
    generator: np.random.Generator,
    candidates: int,
    run: Callable[[int, int], tuple[Any, float]],
) -> Selected:
    """Return the best of a geometric number of repeats.

    Args:
        run: from the number of a repeat and of a candidate to its result and its noisy score, the higher the better.
    """
    best = Selected(None, -1, -np.inf)
    for repeat in range(int(generator.geometric(1 / REPEATS))):
        candidate = int(generator.integers(candidates))
        result, score = run(repeat, candidate)
        if score > best.score:
            best = Selected(result, candidate, score)
    return best
