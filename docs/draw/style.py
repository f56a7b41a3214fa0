"""The folder, the colours and the saving that all pictures of the documentation share."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

FIGURES = Path(__file__).parents[1] / "figures"

BLACK = "#222222"
GREY = "#999999"
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
YELLOW = "#F0E442"

SAVED_COLOURS = 128
"""Enough for lines and areas, at a third of the bytes of full colour."""
DOTS_PER_INCH = 110


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, name: str) -> None:
    """Write docs/figures/NAME.png with few colours."""
    path = FIGURES / f"{name}.png"
    figure.savefig(path, dpi=DOTS_PER_INCH)
    picture = Image.open(path).convert("RGB").quantize(SAVED_COLOURS)
    picture.save(path, optimize=True)
