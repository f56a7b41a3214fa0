"""A figure as a value: panels of lines, bands, bars and text, for Matplotlib (pictures) and Plotly (pages) to draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

INK = "#1a1a1a"
# Okabe & Ito's palette, which colour-blind people can tell apart; markers and dashes carry the same information.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
BLUE, RED, GREEN, PURPLE, ORANGE, SKY, YELLOW = COLORS
Dash = str | tuple[float, tuple[float, ...]]
"""-, --, -. or :, or an offset and lengths, as Matplotlib takes them."""
LOOKS: list[tuple[str, str, Dash]] = [
    (RED, "o", "-"),
    (BLUE, "s", "--"),
    (GREEN, "^", "-."),
    (PURPLE, "D", ":"),
    ("#000000", "x", (0, (5, 1))),
    (ORANGE, "v", (0, (3, 1, 1, 1))),
    (SKY, "P", (0, (4, 1, 1, 1))),
    ("#7f6000", "*", (0, (2, 1))),
]
"""Colour, marker and dashes of the curves of a panel, in their order."""
LIMIT_LOOKS = {
    "lmc-limited": (YELLOW, ""),
    "power-limited": (SKY, "//"),
    "dp-limited": (ORANGE, "\\\\"),
    "policy-limited": (PURPLE, ".."),
}
"""Colour and hatching of the limit that a round sits at."""
Values = Sequence[float | str | None] | np.ndarray
"""Numbers or names along an axis; None leaves a gap."""


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
    """Standard errors: two of them are drawn on both sides."""

    @property
    def reach(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How far errors reach down and up; down to 0.3 of y at most, which a logarithmic scale can show."""
        y, two = (
            np.array(self.y, dtype=float),
            2 * np.nan_to_num(np.array(self.error, dtype=float)),
        )
        return np.where(y > 0, np.minimum(two, 0.7 * y), two), two


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
    hatch: str = ""


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars around their x, which are numbers, or names."""

    x: Values
    y: Values
    name: str
    color: str = BLUE
    width: float = 0.8
    hover: Sequence[str] | None = None
    """What a page says of each."""


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


class Shade(NamedTuple):
    """A background for ranges of x."""

    name: str
    color: str
    hatch: str
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
    notes: Sequence[tuple[float, float, str]] = ()
    """Words at a point x, y."""

    @property
    def needs_legend(self) -> bool:
        """Whether the title does not say already what the panel shows."""
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
