"""Share the folder, the colours and the saving of the documentation's pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "figures"

BLACK, GREY = "#222222", "#999999"
BLUE, ORANGE, GREEN, RED, PURPLE, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#F0E442",
)


def new_figure(width: float, height: float) -> Any:
    """Return a figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, name: str) -> None:
    """Write docs/figures/NAME.png, small."""
    from PIL import Image

    path = FIGURES / f"{name}.png"
    figure.savefig(path, dpi=110)
    # 128 colours are enough for lines and areas, and a third of the bytes.
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
