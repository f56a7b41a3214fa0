"""A stated outcome of the paper, with its number and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.studies.study import Row

Array = NDArray[np.float64]


class Claim(NamedTuple):
    """A stated outcome, the paper's number, ours, and whether it holds."""

    figure: str
    statement: str
    paper: float | str
    ours: float | str | None
    """None where our data show no such boundary in the range of the figure."""
    holds: bool
    contradiction: bool = False
    """The statement contradicts the paper's own theorem or numbers."""
    note: str = ""


def boundary(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """Where a condition that holds at `low` and not at `high` changes, to 1e-9 of the range; None if it does not."""
    if not holds(low) or holds(high):
        return None
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return 0.5 * (low + high)


def near(ours: float | None, paper: float, tolerance: float) -> bool:
    return ours is not None and abs(ours - paper) <= tolerance


def like_the_paper(posterior: Any) -> bool:
    """Whether the data are of the paper's kind: five parameters, and μ + L near its 2508."""
    total = posterior.mu + posterior.L
    return posterior.dim == 5 and abs(total / 2508 - 1) < 0.15


class Curves:
    """The curves of a table: y and its standard error by scheme, on the common grid x."""

    def __init__(self, rows: list[Row]) -> None:
        self.x = np.array(sorted({row.x for row in rows}))
        self.y = {name: self._column(rows, name, "y") for name in dict.fromkeys(row.scheme for row in rows)}
        self.error = {name: self._column(rows, name, "y_se") for name in self.y}

    def _column(self, rows: list[Row], scheme: str, field: str) -> Array:
        return np.array([getattr(row, field) or 0.0 for row in rows if row.scheme == scheme], dtype=float)

    def ratio(self, above: str, below: str, at: NDArray[np.bool_]) -> float:
        """The geometric mean of one curve over another."""
        return float(np.exp(np.mean(np.log(self.y[above][at] / self.y[below][at]))))
