"""A figure as a value: panels of lines, bands and bars.

Matplotlib draws it into a picture, Plotly on a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

INK = "#1a1a1a"
"""The colour of lines that belong to no curve in particular."""
# Okabe & Ito's palette, which colour-blind people can tell apart; markers and dashes
# carry the same information.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
BLUE, RED, GREEN, PURPLE, ORANGE, SKY, YELLOW = COLORS
Dash = Literal["-", "--", "-.", ":", ""] | tuple[float, tuple[float, ...]]
"""The name of a dash, or an offset and lengths, as Matplotlib takes them; empty: no
line."""
Values = Sequence[float | str | None] | np.ndarray
"""Numbers or names along an axis; None leaves a gap."""
ERROR_BAR_FACTOR = 2
"""Standard errors that an error bar reaches to each side."""
MAX_ERROR_BELOW = 0.7
"""The part of y that an error bar covers below y at most: a logarithmic scale can show
what is left."""


class CurveLook(NamedTuple):
    """How a curve is told from the others of its panel."""

    color: str
    marker: str
    """By Matplotlib's letter."""
    dash: Dash


class LimitLook(NamedTuple):
    """How the limit that a round sits at is shown."""

    color: str
    hatch: str
    """In Matplotlib's notation; empty: none."""


CURVE_LOOKS = (
    CurveLook(RED, "o", "-"),
    CurveLook(BLUE, "s", "--"),
    CurveLook(GREEN, "^", "-."),
    CurveLook(PURPLE, "D", ":"),
    CurveLook("#000000", "x", (0, (5, 1))),
    CurveLook(ORANGE, "v", (0, (3, 1, 1, 1))),
    CurveLook(SKY, "P", (0, (4, 1, 1, 1))),
    CurveLook("#7f6000", "*", (0, (2, 1))),
)
"""The looks of the curves of a panel, in their order."""
LIMIT_LOOKS = {
    "lmc-limited": LimitLook(YELLOW, ""),
    "power-limited": LimitLook(SKY, "//"),
    "dp-limited": LimitLook(ORANGE, "\\\\"),
    "policy-limited": LimitLook(PURPLE, ".."),
}
"""The look of every limit, by its name in a plan."""


class ErrorReach(NamedTuple):
    """How far the error bars of a curve reach from y, both positive."""

    below: NDArray[np.float64]
    above: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """A curve; None and nan leave gaps in it."""

    x: Values
    y: Values
    name: str = ""
    color: str = INK
    dash: Dash = "-"
    """Empty: markers only."""
    marker: str = ""
    """By Matplotlib's letter; empty: none."""
    width: float = 1.5
    step: bool = False
    """Whether a value holds for the whole round around its x."""
    error: Values | None = None
    """Standard errors of y; None where y is exact."""

    @property
    def reach(self) -> ErrorReach:
        """Compute how far error bars reach: two standard errors to both sides.

        Below a positive y a bar covers 70 % of y at most, so that a logarithmic scale
        can show its end. A missing standard error counts as zero. Only a curve with an
        `error` has a reach for each of its points.
        """
        y = np.array(self.y, dtype=float)
        errors = np.nan_to_num(np.array(self.error, dtype=float))
        above = ERROR_BAR_FACTOR * errors
        below = np.where(y > 0, np.minimum(above, MAX_ERROR_BELOW * y), above)
        return ErrorReach(below, above)


@dataclass(frozen=True, eq=False)
class Band:
    """The area between two curves."""

    x: Values
    low: Values
    high: Values
    name: str
    color: str
    opacity: float = 0.4
    step: bool = False
    """Whether values hold for the whole round around their x."""
    hatch: str = ""
    """In Matplotlib's notation; empty: none. Pages leave it out."""


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars around their x, which are numbers, or names."""

    x: Values
    y: Values
    name: str
    color: str = BLUE
    width: float = 0.8
    """In units of x; names are one apart."""
    hover: Sequence[str] | None = None
    """What a page shows of each bar under the pointer."""


Item = Line | Band | Bars


class Axis(NamedTuple):
    """Label and scale."""

    label: str = ""
    log: bool = False
    range: tuple[float, float] | None = None
    kind: str | None = None
    """category: values are names."""
    zero: bool = False
    """Whether the scale has to begin at zero."""


NO_LABEL = Axis()


class Note(NamedTuple):
    """Words at a point of a panel."""

    x: float
    y: float
    text: str


class Shade(NamedTuple):
    """A background for ranges of x."""

    name: str
    look: LimitLook
    ranges: Sequence[tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Panel:
    """One set of axes."""

    items: Sequence[Item]
    y: Axis = NO_LABEL
    title: str = ""
    key: str = ""
    """Names the panel on a page."""
    height: float = 1.0
    """Relative to other panels."""
    notes: Sequence[Note] = ()

    @property
    def needs_legend(self) -> bool:
        """Return whether the title leaves open what the panel shows.

        A panel with a title and a single curve needs no legend: the title is the name
        of the curve.
        """
        return not self.title or len(self.items) > 1


@dataclass(frozen=True, eq=False)
class Figure:
    """Panels with one x axis: side by side, or stacked."""

    panels: Sequence[Panel]
    x: Axis = NO_LABEL
    title: str = ""
    caption: str = ""
    """Below the figure on a page."""
    stacked: bool = False
    same_y: bool = False
    """Whether panels that stand side by side share the scale of y."""
    shared_legend: bool = False
    """Whether all panels have the same curves."""
    width: float = 6.4
    """Of the picture, in inches, where panels are stacked or alone."""
    small: bool = False
    """On a page, without legend and buttons."""
    legend: bool = True
    burn_in: int = 0
    """Rounds to the left of a vertical line, where x are rounds."""
    shades: Sequence[Shade] = ()
