"""Figures drawn by Plotly on a page, where they can be zoomed and legends clicked."""

from collections.abc import Iterator

import numpy as np

from wflmc.apps.report.blocks import Html, PlotlyObject, plot
from wflmc.apps.report.figure import INK, Axis, Band, Bars, Figure, Item, Values

MOST_POINTS = 1500
"""Of one curve: more are neither seen nor worth their bytes."""
UNWANTED = ["sendcharttocloud", "select", "lasso"]
"""Buttons of a figure: the first would upload it."""
IN_THE_WAY = [
    *UNWANTED,
    "toimage",
    "zoom",
    "pan",
    "zoomin",
    "zoomout",
    "autoscale",
    "resetscale",
]
"""Those that would cover a small figure."""
PANEL, GAP = 140, 42
"""Height of one of several panels and of the space above it, in pixels."""
SYMBOLS = {
    **{"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond"},
    **{"x": "x-thin", "v": "triangle-down", "P": "cross", "*": "star", "_": "line-ew"},
}
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}


def draw(name: str, figure: Figure) -> Html:
    """Return a figure as a part of a page, in the place `figure-NAME`."""
    count, total = len(figure.panels), sum(panel.height for panel in figure.panels)
    inner = 320 + 20 * len(
        figure.panels[0].items
    )  # with room for a legend of as many lines
    inner = int((GAP + PANEL) * total) if count > 1 else inner
    annotations: list[PlotlyObject] = []
    shapes: list[PlotlyObject] = []
    layout: PlotlyObject = {
        "height": 190 if figure.small else inner + 110,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 30}
        if figure.small
        else {"l": 70, "r": 15, "t": 30, "b": 60},
        "xaxis": {**axis_layout(figure.x), "anchor": f"y{count}" if count > 1 else "y"},
        "hovermode": "x unified" if count > 1 else "closest",
        "showlegend": figure.legend and not figure.small,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": -60 / inner,
            "yanchor": "top",
            "traceorder": "normal",
        },
        "modebar": {"remove": IN_THE_WAY if figure.small else UNWANTED},
        "annotations": annotations,
        "shapes": shapes,
    }
    traces: list[PlotlyObject] = []
    top = 1.0
    for index, panel in enumerate(figure.panels):
        y = f"y{index + 1}" if index else "y"
        bottom = max(0.0, top - panel.height / total)
        end = top - GAP / inner if count > 1 else top
        ticks = {
            "nticks": 3 if panel.y.log and count > 1 else 5,
            "showticklabels": not figure.small,
        }
        layout[y.replace("y", "yaxis")] = {
            **axis_layout(panel.y),
            "domain": [bottom, end],
            **ticks,
        }
        for item in panel.items:
            place = {"yaxis": y, "showlegend": panel.needs_legend and bool(item.name)}
            traces += [{**place, **trace} for trace in _traces(item)]
        if count > 1:
            corner = {
                "xref": "paper",
                "x": 0,
                "xanchor": "left",
                "yref": "paper",
                "y": end,
                "yanchor": "bottom",
            }
            annotations.append({**corner, "text": panel.title, "showarrow": False})
        for x_note, y_note, note in panel.notes:
            annotations.append(
                {"x": x_note, "y": y_note, "text": note, "yref": y, "showarrow": False}
            )
        shapes += _background(figure, y)
        top = bottom
    longest = max(
        (len(item.x) for panel in figure.panels for item in panel.items), default=0
    )
    thinned = (
        f" {MOST_POINTS:,} of {longest:,} points are drawn."
        if longest > MOST_POINTS
        else ""
    )
    return plot(f"figure-{name}", traces, layout, figure.caption + thinned)


def axis_layout(axis: Axis) -> PlotlyObject:
    """Return an axis as Plotly takes it; all that differs between kinds of scale is said in each."""
    look = {
        "automargin": True,
        "gridcolor": "#e6e9ee",
        "zeroline": False,
        "title": {"text": axis.label, "standoff": 8},
    }
    kind = axis.kind or ("log" if axis.log else "linear")
    numbers = {
        "exponentformat": "power",
        "separatethousands": True,
        "rangemode": "tozero" if axis.zero else "normal",
    }
    ends = (
        {}
        if axis.range is None
        else {"range": np.log10(axis.range) if axis.log else axis.range}
    )
    return {**look, "type": kind, **numbers, **ends}


def thin(count: int, most: int = MOST_POINTS) -> list[int]:
    """Return the indices of a curve of `count` points that are drawn: all, or a useful number with both ends."""
    return np.unique(
        np.linspace(0, count - 1, min(count, most)).round().astype(int)
    ).tolist()


def _thinned(values: Values) -> list[float | str | None]:
    return [values[index] for index in thin(len(values))]


def _traces(item: Item) -> list[PlotlyObject]:
    if isinstance(item, Bars):
        look = {
            "marker": {"color": item.color, "line": {"width": 0}},
            "width": item.width,
        }
        hover = (
            {} if item.hover is None else {"hovertext": item.hover, "hoverinfo": "text"}
        )
        return [
            {
                "type": "bar",
                "x": item.x,
                "y": item.y,
                "name": item.name,
                **look,
                **hover,
            }
        ]
    x, shape = _thinned(item.x), "hvh" if item.step else "linear"
    if isinstance(item, Band):
        edge = {
            "x": x,
            "mode": "lines",
            "line": {"width": 0, "color": item.color, "shape": shape},
        }
        red, green, blue = (int(item.color[i : i + 2], 16) for i in (1, 3, 5))
        fill = {
            "fill": "tonexty",
            "fillcolor": f"rgba({red},{green},{blue},{item.opacity})",
            "name": item.name,
        }
        low = {
            **edge,
            "y": _thinned(item.low),
            "showlegend": False,
            "hoverinfo": "skip",
        }
        return [low, {**edge, "y": _thinned(item.high), **fill}]
    modes = ["lines"] * bool(item.dash) + ["markers"] * (
        bool(item.marker) and (not item.dash or len(x) <= 25)
    )
    dash = (
        DASHES.get(item.dash)
        if isinstance(item.dash, str)
        else ",".join(f"{3 * part}px" for part in item.dash[1])
    )
    line = {
        "color": item.color,
        "dash": dash or "solid",
        "width": item.width,
        "shape": shape,
    }
    trace: PlotlyObject = {
        "x": x,
        "y": _thinned(item.y),
        "name": item.name,
        "mode": "+".join(modes),
        "line": line,
    }
    if item.marker:
        trace["marker"] = {
            "symbol": f"{SYMBOLS[item.marker]}-open",
            "size": 7,
            "color": item.color,
        }
    if item.error is not None:
        down, up = item.reach
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": up,
            "arrayminus": down,
            "thickness": 1,
        }
    return [trace]


def _background(figure: Figure, y: str) -> Iterator[PlotlyObject]:
    """Yield the shades and the vertical line of a panel, as shapes."""
    place: PlotlyObject = {"xref": "x", "yref": f"{y} domain", "showlegend": y == "y"}
    look = {"type": "path", "opacity": 0.25, "line": {"width": 0}, "layer": "below"}
    for shade in figure.shades:
        path = " ".join(f"M{start},0V1H{end}V0Z" for start, end in shade.ranges)
        yield {
            **place,
            **look,
            "path": path,
            "fillcolor": shade.color,
            "name": shade.name,
        }
    if figure.burn_in:
        ends = {
            "x0": figure.burn_in + 0.5,
            "x1": figure.burn_in + 0.5,
            "y0": 0,
            "y1": 1,
            "showlegend": False,
        }
        yield {**place, "type": "line", **ends, "line": {"color": INK, "width": 1}}
