"""Rendered digits, some of each."""

from __future__ import annotations

import numpy as np
from docs.draw.style import new_figure, save

from wflmc.data.rendered import DIGITS, SIDE, render_digits

COLUMNS = 20


def draw_digits() -> None:
    """Draw twenty rendered images of every digit, one row for each."""
    digits = render_digits(COLUMNS * DIGITS, seed=0)
    order = np.argsort(digits.labels, kind="stable")
    images = digits.images[order].reshape(DIGITS, COLUMNS, SIDE, SIDE)
    sheet = images.transpose(0, 2, 1, 3).reshape(DIGITS * SIDE, COLUMNS * SIDE)
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    axes.imshow(255 - sheet, cmap="gray", vmin=0, vmax=255)
    axes.axis("off")
    save(figure, "rendered_digits")
