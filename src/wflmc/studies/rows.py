"""The tidy rows that every study gives."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One value of one scheme at one x; y_se is the standard error of y, None where y is exact."""

    figure: str
    scheme: str
    x: float
    y: float | None
    y_se: float | None = None
