"""Figures drawn by Matplotlib into PNG, SVG and PDF files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from wflmc.apps.report.figure import Axis, Band, Bars, Figure, Line, Panel, Shade
from wflmc.support.storage import replacing

if TYPE_CHECKING:  # Matplotlib takes a second to import.
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

METADATA_WITHOUT_DATE: dict[str, dict[str, None]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""Metadata by suffix of the file: dates would make equal pictures differ."""
DOTS_PER_INCH = 150
"""The resolution of PNG files."""
NOTE_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
"""The background of words within a panel."""
MAX_MARKERS = 10
"""The number of markers of one curve that are drawn, about."""


def draw_picture(figure: Figure, *paths: Path) -> list[Path]:
    """Draw a figure into files, each in the format of its suffix.

    Equal figures give equal bytes on one machine: files carry no date, and the
    identifiers within an SVG are hashes with a fixed salt. A file takes the place of an
    older one only when it is complete.

    Args:
        figure: what to draw.
        paths: files that end in .png, .svg or .pdf, in folders that exist.

    Returns:
        The files, in the order of `paths`.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "wflmc"}):
        canvas = _canvas(figure)
        for path in paths:
            suffix = path.suffix.lower()
            metadata = METADATA_WITHOUT_DATE.get(suffix)
            with replacing(path) as file:
                canvas.savefig(
                    file, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=metadata
                )
    return list(paths)


def _canvas(figure: Figure) -> "Canvas":
    """Return the figure as Matplotlib's."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=_size(figure), layout="constrained")
    canvas.suptitle(figure.title, fontsize=11, parse_math=False)
    all_axes = _subplots(canvas, figure)
    for axes, panel in zip(all_axes, figure.panels, strict=True):
        _draw_panel(axes, panel, figure)
        if figure.legend and panel.needs_legend and not figure.shared_legend:
            _draw_legend(axes, figure)
    for axes in all_axes[-1:] if figure.stacked else all_axes:
        _set_scale(axes, "x", figure.x)
    if figure.shared_legend:
        handles, labels = all_axes[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    if figure.shades:
        _draw_shades(canvas, all_axes, figure.shades)
    if figure.burn_in:
        _label_burn_in(all_axes[0], figure.burn_in)
    return canvas


def _stands_alone(figure: Figure) -> bool:
    """Return whether no panel stands beside another one."""
    return figure.stacked or len(figure.panels) == 1


def _size(figure: Figure) -> tuple[float, float]:
    """Return width and height in inches."""
    count = len(figure.panels)
    if not _stands_alone(figure):
        return 1.2 + 4.6 * count, 4.8
    panel_height = 2 if count > 1 else 3.2
    total_height = panel_height * sum(panel.height for panel in figure.panels)
    return figure.width, 1.2 + total_height


def _subplots(canvas: "Canvas", figure: Figure) -> "Sequence[Axes]":
    """Return the axes of all panels, in their order."""
    count = len(figure.panels)
    if figure.stacked:
        axes = canvas.subplots(
            nrows=count,
            height_ratios=[panel.height for panel in figure.panels],
            sharex=True,
            sharey=figure.same_y,
            squeeze=False,
        )
    else:
        axes = canvas.subplots(ncols=count, sharey=figure.same_y, squeeze=False)
    return list(axes.ravel())


def _draw_legend(axes: "Axes", figure: Figure) -> None:
    """Draw the legend of one panel: within it, or below where others are beside it."""
    if _stands_alone(figure):
        axes.legend(fontsize=8, handlelength=3.5)
    else:
        axes.legend(
            fontsize=8,
            handlelength=3.5,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.17),
            ncols=2,
        )


def _label_burn_in(axes: "Axes", burn_in: int) -> None:
    """Write beside the vertical line what it means."""
    axes.text(
        burn_in + 0.5,
        1.0,
        " draws are kept from here",
        transform=axes.get_xaxis_transform(),
        va="bottom",
        ha="left",
        fontsize=8,
    )


def _draw_panel(axes: "Axes", panel: Panel, figure: Figure) -> None:
    """Draw what a panel shows, its title and the scale of y."""
    for rank, item in enumerate(panel.items):
        if isinstance(item, Line):
            _draw_line(axes, item, rank / len(panel.items))
        elif isinstance(item, Band):
            _draw_band(axes, item)
        else:
            _draw_bars(axes, item)
    for note in panel.notes:
        axes.text(
            note.x,
            note.y,
            note.text,
            ha="center",
            va="center",
            fontsize=9,
            bbox=NOTE_BOX,
        )
    if figure.burn_in:
        axes.axvline(figure.burn_in + 0.5, color="black", linewidth=1)
    side: Literal["left", "center"] = "left" if figure.stacked else "center"
    axes.set_title(panel.title, fontsize=10, parse_math=False, loc=side)
    axes.tick_params(labelleft=True)
    axes.grid(alpha=0.3, which="both")
    _set_scale(axes, "y", panel.y)


def _draw_band(axes: "Axes", band: Band) -> None:
    """Fill the area between two curves."""
    axes.fill_between(
        np.asarray(band.x),
        np.array(band.low, dtype=float),
        np.array(band.high, dtype=float),
        step="mid" if band.step else None,
        facecolor=band.color,
        edgecolor="black",
        alpha=band.opacity,
        hatch=band.hatch,
        linewidth=0,
        label=band.name,
    )


def _draw_bars(axes: "Axes", bars: Bars) -> None:
    """Draw bars with a white edge between neighbours."""
    axes.bar(
        np.asarray(bars.x),
        np.array(bars.y, dtype=float),
        width=bars.width,
        color=bars.color,
        edgecolor="white",
        label=bars.name,
    )


def _draw_shades(
    canvas: "Canvas", all_axes: "Sequence[Axes]", shades: Sequence[Shade]
) -> None:
    """Draw the background of all panels, hatched in the last, and its legend."""
    handles: list[Artist] = []
    for axes in all_axes:
        handles = _panel_shades(axes, shades, hatched=axes is all_axes[-1])
    canvas.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)


def _panel_shades(
    axes: "Axes", shades: Sequence[Shade], *, hatched: bool
) -> "list[Artist]":
    """Draw the background of one panel; return what a legend shows."""
    drawn: list[Artist] = []
    for shade in shades:
        widths = [(start, end - start) for start, end in shade.ranges]
        bars = axes.broken_barh(
            widths,
            (0, 1),
            transform=axes.get_xaxis_transform(),
            facecolor=shade.look.color,
            edgecolor="grey",
            hatch=shade.look.hatch if hatched else None,
            alpha=0.25,
            linewidth=0,
            zorder=0,
            label=shade.name,
        )
        drawn.append(bars)
    return drawn


def _draw_line(axes: "Axes", line: Line, offset: float) -> None:
    """Draw a curve with hollow, staggered markers, as curves coincide in places.

    Args:
        axes: of the panel.
        line: the curve.
        offset: of the first marker, as a fraction of the distance between two.
    """
    x = np.asarray(line.x)
    y = np.array(line.y, dtype=float)
    marker_distance = max(1, len(y) // MAX_MARKERS)
    first_marker = int(offset * marker_distance)
    (curve,) = axes.plot(x, y, color=line.color, linewidth=line.width, label=line.name)
    curve.set_drawstyle("steps-mid" if line.step else "default")
    curve.set_linestyle(line.dash or "none")
    curve.set_marker(line.marker)
    curve.set_markevery((first_marker, marker_distance))
    curve.set_markersize(5.5)
    curve.set_fillstyle("none")
    if line.error is not None:
        reach = line.reach
        low = y - reach.below
        high = y + reach.above
        axes.fill_between(x, low, high, color=line.color, alpha=0.12, linewidth=0)


def _set_scale(axes: "Axes", which: Literal["x", "y"], axis: Axis) -> None:
    """Set label, kind and ends of the scale along x or y."""
    axes.set(**{f"{which}label": axis.label})
    if axis.log:
        axes.set(**{f"{which}scale": "log"})
    elif axis.kind is None:
        axes.ticklabel_format(axis=which, scilimits=(-3, 5))
    if axis.range is not None or axis.zero:
        axes.set(**{f"{which}lim": axis.range or (0, None)})
