"""Figures drawn by Plotly on a page, where they can be zoomed and legends clicked."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from wflmc.apps.report.figure import (
    INK,
    Axis,
    Band,
    Bars,
    Figure,
    Item,
    Line,
    Panel,
    Values,
)
from wflmc.apps.report.templates import render
from wflmc.scenario.files import plain

PlotlyObject = dict[str, object]
"""A trace, a layout or a part of one, as Plotly names its attributes; arrays become
lists on the page."""
MAX_CURVE_POINTS = 1500
"""Points of one curve that are drawn: more are neither seen nor worth their bytes."""
MAX_LINE_MARKERS = 25
"""The longest curve, in points, whose markers are drawn beside its line."""
UPLOAD_AND_SELECT_BUTTONS = ("sendcharttocloud", "select", "lasso")
"""Buttons that no figure has: the first would upload it."""
ALL_BUTTONS = (
    *UPLOAD_AND_SELECT_BUTTONS,
    "toimage",
    "zoom",
    "pan",
    "zoomin",
    "zoomout",
    "autoscale",
    "resetscale",
)
"""Buttons that a small figure does not have either: they would cover it."""
PANEL_HEIGHT = 140
"""Of one of several panels, in pixels."""
PANEL_GAP = 42
"""The space above each of several panels, in pixels."""
SINGLE_PANEL_HEIGHT = 320
"""Of the only panel of a figure, without its legend, in pixels."""
LEGEND_LINE_HEIGHT = 20
"""Of one curve in the legend, in pixels."""
SMALL_FIGURE_HEIGHT = 190
"""In pixels."""
AXIS_LOOK: Mapping[str, object] = {
    "automargin": True,
    "gridcolor": "#e6e9ee",
    "zeroline": False,
    "exponentformat": "power",
    "separatethousands": True,
}
"""What all axes have in common, as Plotly takes it."""
SHADE_LOOK: Mapping[str, object] = {
    "type": "path",
    "opacity": 0.25,
    "line": {"width": 0},
    "layer": "below",
}
"""What all backgrounds of rounds have in common, as Plotly takes it."""
SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "x": "x-thin",
    "v": "triangle-down",
    "P": "cross",
    "*": "star",
    "_": "line-ew",
}
"""Plotly's names of markers, by Matplotlib's letter."""
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
"""Plotly's names of dashes, by Matplotlib's."""
DASH_UNIT = 3
"""Pixels of a dash of length one."""


def draw(name: str, figure: Figure) -> Markup:
    """Draw a figure on a page.

    Panels of a stacked figure share the scale of x; the limits of rounds are coloured
    behind the curves. Curves of more than `MAX_CURVE_POINTS` points are thinned, and
    the caption then says so.

    Args:
        name: the element that it is drawn in is `figure-NAME`.
        figure: what to draw; its title is left out.

    Returns:
        The element with the drawing as JSON beside it, and the caption.
    """
    traces = list[PlotlyObject]()
    annotations = list[PlotlyObject]()
    shapes = list[PlotlyObject]()
    layout = _page_layout(figure)
    top = 1.0
    total_height = sum(panel.height for panel in figure.panels)
    for index, panel in enumerate(figure.panels):
        bottom = max(0.0, top - panel.height / total_height)
        end = top - PANEL_GAP / _inner_height(figure) if _is_divided(figure) else top
        suffix = str(index + 1) if index else ""
        axis_name = f"y{suffix}"
        layout[f"yaxis{suffix}"] = _panel_axis(figure, panel, (bottom, end))
        traces += _panel_traces(panel, axis_name)
        if _is_divided(figure):
            annotations.append(_panel_title(panel.title, end))
        annotations += _panel_notes(panel, axis_name)
        shapes += _background(figure, axis_name)
        top = bottom
    layout["annotations"] = annotations
    layout["shapes"] = shapes
    caption = figure.caption + _thinning_sentence(figure)
    return embed_drawing(f"figure-{name}", traces, layout, caption=caption)


def embed_drawing(
    name: str,
    traces: Sequence[PlotlyObject],
    layout: PlotlyObject,
    *,
    caption: str,
) -> Markup:
    """Return an element in which the page's script draws with Plotly.

    The drawing stands as JSON beside the element. The caption below it is also its
    label for screen readers.

    Args:
        name: the id of the element.
        traces: curves, bars and maps; NaN and infinities in them become gaps.
        layout: axes, margins and buttons.
        caption: in one or more sentences, as plain text.

    Returns:
        A ``<figure>``.
    """
    drawing = plain({"data": list(traces), "layout": layout})
    return render("figure.html", name=name, caption=caption, drawing=drawing)


def axis_layout(axis: Axis) -> PlotlyObject:
    """Describe an axis as Plotly takes it.

    Kind of scale, exponents and the value that a scale begins at are always explicit:
    Plotly would else guess them from the data. A range of a logarithmic scale is in
    powers of ten.

    Args:
        axis: label and scale.

    Returns:
        The attributes of `xaxis` or `yaxis`.
    """
    numeric_kind = "log" if axis.log else "linear"
    layout: PlotlyObject = dict(AXIS_LOOK)
    layout["title"] = {"text": axis.label, "standoff": 8}
    layout["type"] = axis.kind or numeric_kind
    layout["rangemode"] = "tozero" if axis.zero else "normal"
    if axis.range is not None:
        layout["range"] = np.log10(axis.range) if axis.log else axis.range
    return layout


def thin(count: int, limit: int = MAX_CURVE_POINTS) -> list[int]:
    """Choose the points of a long curve that are drawn.

    Args:
        count: the number of points.
        limit: the number that are drawn at most.

    Returns:
        Their indices in ascending order: all, or about `limit` at equal distances, with
        both ends.
    """
    positions = np.linspace(0, count - 1, min(count, limit))
    return np.unique(positions.round().astype(int)).tolist()


def _is_divided(figure: Figure) -> bool:
    """Return whether several panels share the height of the figure."""
    return len(figure.panels) > 1


def _inner_height(figure: Figure) -> int:
    """Return the height of all panels in pixels, with space for a legend."""
    if _is_divided(figure):
        total_height = sum(panel.height for panel in figure.panels)
        return int((PANEL_GAP + PANEL_HEIGHT) * total_height)
    curves = len(figure.panels[0].items)
    return SINGLE_PANEL_HEIGHT + LEGEND_LINE_HEIGHT * curves


def _page_layout(figure: Figure) -> PlotlyObject:
    """Return the layout without the axes of the panels."""
    divided = _is_divided(figure)
    inner_height = _inner_height(figure)
    # The axis of x stands below the last panel.
    x_axis = axis_layout(figure.x)
    x_axis["anchor"] = f"y{len(figure.panels)}" if divided else "y"
    if figure.small:
        height = SMALL_FIGURE_HEIGHT
        margin = {"l": 10, "r": 10, "t": 10, "b": 30}
        removed_buttons: tuple[str, ...] = ALL_BUTTONS
    else:
        height = inner_height + 110
        margin = {"l": 70, "r": 15, "t": 30, "b": 60}
        removed_buttons = UPLOAD_AND_SELECT_BUTTONS
    legend = {
        "orientation": "h",
        "x": 0,
        "y": -60 / inner_height,
        "yanchor": "top",
        "traceorder": "normal",
    }
    return {
        "height": height,
        "margin": margin,
        "xaxis": x_axis,
        "hovermode": "x unified" if divided else "closest",
        "showlegend": figure.legend and not figure.small,
        "legend": legend,
        "modebar": {"remove": removed_buttons},
    }


def _panel_axis(
    figure: Figure, panel: Panel, domain: tuple[float, float]
) -> PlotlyObject:
    """Return the axis of y of a panel, which fills a part of the figure's height."""
    layout = axis_layout(panel.y)
    layout["domain"] = domain
    layout["nticks"] = 3 if panel.y.log and _is_divided(figure) else 5
    layout["showticklabels"] = not figure.small
    return layout


def _panel_traces(panel: Panel, axis_name: str) -> Iterator[PlotlyObject]:
    """Yield the traces of a panel, on its own axis of y."""
    for item in panel.items:
        in_legend = panel.needs_legend and bool(item.name)
        for trace in _item_traces(item):
            yield {"yaxis": axis_name, "showlegend": in_legend, **trace}


def _panel_title(title: str, height: float) -> PlotlyObject:
    """Return the title of one of several panels, above its upper left corner."""
    return {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": "paper",
        "y": height,
        "yanchor": "bottom",
        "text": title,
        "showarrow": False,
    }


def _panel_notes(panel: Panel, axis_name: str) -> Iterator[PlotlyObject]:
    """Yield the words within a panel."""
    for note in panel.notes:
        yield {
            "x": note.x,
            "y": note.y,
            "text": note.text,
            "yref": axis_name,
            "showarrow": False,
        }


def _thinning_sentence(figure: Figure) -> str:
    """Return the end of a caption that says how many points are drawn; empty if all."""
    lengths = [len(item.x) for panel in figure.panels for item in panel.items]
    longest = max(lengths, default=0)
    if longest <= MAX_CURVE_POINTS:
        return ""
    return f" {MAX_CURVE_POINTS:,} of {longest:,} points are drawn."


def _thinned(values: Values) -> list[float | str | None]:
    """Return the values that are drawn."""
    return [values[index] for index in thin(len(values))]


def _item_traces(item: Item) -> list[PlotlyObject]:
    """Return the traces of a curve, a band or bars."""
    if isinstance(item, Bars):
        return [_bars_trace(item)]
    if isinstance(item, Band):
        return _band_traces(item)
    return [_line_trace(item)]


def _bars_trace(bars: Bars) -> PlotlyObject:
    """Return bars, with what is shown of each under the pointer."""
    trace: PlotlyObject = {
        "type": "bar",
        "x": bars.x,
        "y": bars.y,
        "name": bars.name,
        "marker": {"color": bars.color, "line": {"width": 0}},
        "width": bars.width,
    }
    if bars.hover is not None:
        trace["hovertext"] = bars.hover
        trace["hoverinfo"] = "text"
    return trace


def _band_traces(band: Band) -> list[PlotlyObject]:
    """Return the edges of a band; the upper one fills the area down to the lower."""
    line = {"width": 0, "color": band.color, "shape": _line_shape(band.step)}
    edge: Mapping[str, object] = {"x": _thinned(band.x), "mode": "lines", "line": line}
    low: PlotlyObject = {**edge, "y": _thinned(band.low)}
    low["showlegend"] = False
    low["hoverinfo"] = "skip"
    high: PlotlyObject = {**edge, "y": _thinned(band.high)}
    high["fill"] = "tonexty"
    high["fillcolor"] = _transparent(band.color, band.opacity)
    high["name"] = band.name
    return [low, high]


def _transparent(color: str, opacity: float) -> str:
    """Return a colour such as #0072b2 with an opacity, as Plotly takes it."""
    red = int(color[1:3], 16)
    green = int(color[3:5], 16)
    blue = int(color[5:7], 16)
    return f"rgba({red},{green},{blue},{opacity})"


def _line_trace(line: Line) -> PlotlyObject:
    """Return a curve with its markers and error bars."""
    x = _thinned(line.x)
    modes = []
    if line.dash:
        modes.append("lines")
    if line.marker and (not line.dash or len(x) <= MAX_LINE_MARKERS):
        modes.append("markers")
    trace: PlotlyObject = {
        "x": x,
        "y": _thinned(line.y),
        "name": line.name,
        "mode": "+".join(modes),
        "line": {
            "color": line.color,
            "dash": _dash_name(line),
            "width": line.width,
            "shape": _line_shape(line.step),
        },
    }
    if line.marker:
        trace["marker"] = {
            "symbol": f"{SYMBOLS[line.marker]}-open",
            "size": 7,
            "color": line.color,
        }
    if line.error is not None:
        reach = line.reach
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": _thinned(reach.above),
            "arrayminus": _thinned(reach.below),
            "thickness": 1,
        }
    return trace


def _dash_name(line: Line) -> str:
    """Return Plotly's name of a curve's dashes, or their lengths in pixels."""
    if isinstance(line.dash, str):
        return DASHES.get(line.dash, "solid")
    _, lengths = line.dash
    return ",".join(f"{DASH_UNIT * length}px" for length in lengths)


def _line_shape(step: bool) -> str:
    """Return Plotly's name of a curve's shape: steps around x, or straight lines."""
    return "hvh" if step else "linear"


def _background(figure: Figure, axis_name: str) -> Iterator[PlotlyObject]:
    """Yield the shades and the vertical line of a panel, as shapes."""
    reference: Mapping[str, object] = {"xref": "x", "yref": f"{axis_name} domain"}
    is_first_panel = axis_name == "y"
    for shade in figure.shades:
        boxes = [f"M{start},0V1H{end}V0Z" for start, end in shade.ranges]
        box: PlotlyObject = {**reference, **SHADE_LOOK}
        box["name"] = shade.name
        box["showlegend"] = is_first_panel
        box["path"] = " ".join(boxes)
        box["fillcolor"] = shade.look.color
        yield box
    if figure.burn_in:
        position = figure.burn_in + 0.5
        line: PlotlyObject = {**reference, "type": "line", "showlegend": False}
        line |= {"x0": position, "x1": position, "y0": 0, "y1": 1}
        line["line"] = {"color": INK, "width": 1}
        yield line
