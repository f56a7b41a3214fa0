"""What the figures of the paper share: stated outcomes, curves of a table, and plans by scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.channel import Link
from wflmc.planning import POLICIES, Plan, plan_many
from wflmc.planning.options import plan_arguments
from wflmc.posterior import Posterior
from wflmc.privacy import Privacy
from wflmc.studies.study import Row, Tables

SCHEMES = tuple(POLICIES)
SNR_GRID = tuple(float(x) for x in range(5, 45, 5))
"""In dB, of figures 6 and 8."""


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
    data: str = ""
    """What ours is from."""


def on_data(posterior: Posterior | None, claims: list[Claim]) -> list[Claim]:
    """Return claims as they are for data of the paper's kind: five parameters, and μ + L near its 2508.

    On other data its statements need not hold, and that they do not says nothing about the paper.
    """
    if posterior is None or (posterior.dim == 5 and abs((posterior.mu + posterior.L) / 2508 - 1) < 0.15):
        return claims
    other = "other data than the paper's"
    return [claim._replace(contradiction=False, note=claim.note if claim.holds else other) for claim in claims]


def boundary(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """Find where a condition that holds at `low` and not at `high` changes, to 1e-9 of the range; None if nowhere."""
    if not holds(low) or holds(high):
        return None
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return 0.5 * (low + high)


class Curves:
    """The curves of a table: y and its standard error by scheme, on the common grid x."""

    def __init__(self, rows: list[Row]) -> None:
        self.x = np.unique([row.x for row in rows])
        by_scheme = {row.scheme: [other for other in rows if other.scheme == row.scheme] for row in rows}
        self.y = {name: np.array([row.y or 0.0 for row in curve]) for name, curve in by_scheme.items()}
        self.error = {name: np.array([row.y_se or 0.0 for row in curve]) for name, curve in by_scheme.items()}

    def ratio(self, above: str, below: str, start: float) -> NDArray[np.float64]:
        """Return the ratio of two curves at the points from x = start on."""
        return self.y[above][self.x >= start] / self.y[below][self.x >= start]

    def mean_ratio(self, above: str, below: str, start: float) -> float:
        """Return the geometric mean of the ratio."""
        return float(np.exp(np.mean(np.log(self.ratio(above, below, start)))))


Measured = tuple[str, float | str, Callable[[Curves], float], tuple[float, float], str]
"""A statement, the paper's number, how it is measured, the open interval in which it holds, and a note."""


def measured(figure: str, tables: Tables, rows: Sequence[Measured]) -> list[Claim]:
    """Return the claims on a measured figure; their notes have the same number by the exact laws."""
    curves, exact = Curves(tables[figure]), Curves(tables[f"{figure}_exact"])
    claims = []
    for statement, paper, number, (low, high), note in rows:
        ours = number(curves)
        claims.append(Claim(figure, statement, paper, ours, low < ours < high, note=note.format(number(exact))))
    return claims


def plans_of(scheme: str, posterior: Posterior, links: Sequence[Link], privacy: Privacy, **options: Any) -> list[Plan]:
    """Return one plan of a scheme for each link."""
    wireless = POLICIES[scheme].wireless  # on an ideal link all experiments have the same plan
    seen = links if wireless else links[:1]
    plans = plan_many(posterior, seen, privacy, **plan_arguments({"power": scheme, **options}))
    return plans if wireless else plans * len(links)
