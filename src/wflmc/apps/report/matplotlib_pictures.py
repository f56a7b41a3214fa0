"""Figures drawn by Matplotlib into PNG, SVG and PDF files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from wflmc.apps.report.figure import Axis, Band, Bars, Figure, Line, Panel, Shade
from wflmc.support.storage import replacing

if TYPE_CHECKING:  # it takes a second to import
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

METADATA: dict[str, dict[str, None]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""Dates would make equal pictures differ."""
BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}


def draw_picture(figure: Figure, *paths: Path) -> list[Path]:
    """Draw a figure into files, each in the format of its suffix; equal figures give equal bytes.

    Returns:
        The files.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "wflmc"}):  # else ids are random
        canvas = _canvas(figure)
        for path in paths:
            suffix = path.suffix.lower()
            with replacing(path) as file:
                canvas.savefig(
                    file, format=suffix[1:], dpi=150, metadata=METADATA.get(suffix)
                )
    return list(paths)


def _canvas(figure: Figure) -> "Canvas":
    from matplotlib.figure import Figure as Canvas

    count, heights = len(figure.panels), [panel.height for panel in figure.panels]
    alone = count == 1 or figure.stacked
    size = (
        (figure.width, 1.2 + (2 if count > 1 else 3.2) * sum(heights))
        if alone
        else (1.2 + 4.6 * count, 4.8)
    )
    canvas = Canvas(figsize=size, layout="constrained")
    canvas.suptitle(figure.title, fontsize=11, parse_math=False)
    shape = (
        {"nrows": count, "height_ratios": heights, "sharex": True}
        if figure.stacked
        else {"ncols": count}
    )
    every = canvas.subplots(**shape, sharey=figure.same_y, squeeze=False).ravel()
    for axes, panel in zip(every, figure.panels, strict=True):
        _draw_panel(axes, panel, figure)
        if figure.legend and panel.needs_legend and not figure.shared_legend:
            place = (
                {}
                if alone
                else {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "ncols": 2}
            )
            axes.legend(fontsize=8, handlelength=3.5, **place)
    for axes in every[-1:] if figure.stacked else every:
        _scale(axes, "x", figure.x)
    if figure.shared_legend:
        canvas.legend(
            *every[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            fontsize=8,
        )
    if figure.shades:
        patches = [
            [*_draw_shades(axes, figure.shades, hatched=axes is every[-1])]
            for axes in every
        ]
        canvas.legend(
            handles=patches[-1], loc="outside lower center", ncols=3, fontsize=9
        )
    if figure.burn_in:
        place = {
            "transform": every[0].get_xaxis_transform(),
            "va": "bottom",
            "ha": "left",
            "fontsize": 8,
        }
        every[0].text(figure.burn_in + 0.5, 1.0, " draws are kept from here", **place)
    return canvas


def _draw_panel(axes: "Axes", panel: Panel, figure: Figure) -> None:
    for rank, item in enumerate(panel.items):
        if isinstance(item, Line):
            _draw_line(axes, item, rank / len(panel.items))
        elif isinstance(item, Band):
            axes.fill_between(
                np.asarray(item.x),
                np.array(item.low, dtype=float),
                np.array(item.high, dtype=float),
                step="mid" if item.step else None,
                facecolor=item.color,
                edgecolor="black",
                alpha=item.opacity,
                hatch=item.hatch,
                linewidth=0,
                label=item.name,
            )
        elif isinstance(item, Bars):
            axes.bar(
                np.asarray(item.x),
                np.array(item.y, dtype=float),
                width=item.width,
                color=item.color,
                edgecolor="white",
                label=item.name,
            )
    for note in panel.notes:
        axes.text(*note, ha="center", va="center", fontsize=9, bbox=BOX)
    if figure.burn_in:
        axes.axvline(figure.burn_in + 0.5, color="black", linewidth=1)
    axes.set_title(
        panel.title,
        fontsize=10,
        parse_math=False,
        loc="left" if figure.stacked else "center",
    )
    axes.tick_params(labelleft=True)
    axes.grid(alpha=0.3, which="both")
    _scale(axes, "y", panel.y)


def _draw_shades(
    axes: "Axes", shades: Sequence[Shade], hatched: bool
) -> Iterator["Artist"]:
    for shade in shades:
        widths = [(start, end - start) for start, end in shade.ranges]
        yield axes.broken_barh(
            widths,
            (0, 1),
            transform=axes.get_xaxis_transform(),
            facecolor=shade.color,
            edgecolor="grey",
            hatch=shade.hatch if hatched else None,
            alpha=0.25,
            linewidth=0,
            zorder=0,
            label=shade.name,
        )


def _draw_line(axes: "Axes", line: Line, offset: float) -> None:
    """Draw a curve with hollow markers, ten at most and staggered, as curves coincide in places."""
    x = np.asarray(line.x)
    y = np.array(line.y, dtype=float)
    every = max(1, len(y) // 10)
    axes.plot(
        x,
        y,
        drawstyle="steps-mid" if line.step else "default",
        marker=line.marker,
        markevery=(int(offset * every), every),
        markersize=5.5,
        fillstyle="none",
        color=line.color,
        linestyle=line.dash or "none",
        linewidth=line.width,
        label=line.name,
    )
    if line.error is not None:
        down, up = line.reach
        axes.fill_between(
            x, y - down, y + up, color=line.color, alpha=0.12, linewidth=0
        )


def _scale(axes: "Axes", which: Literal["x", "y"], axis: Axis) -> None:
    axes.set(**{f"{which}label": axis.label})
    if axis.log:
        axes.set(**{f"{which}scale": "log"})
    elif axis.kind is None:
        axes.ticklabel_format(axis=which, scilimits=(-3, 5))
    if axis.range is not None or axis.zero:
        axes.set(**{f"{which}lim": axis.range or (0, None)})
