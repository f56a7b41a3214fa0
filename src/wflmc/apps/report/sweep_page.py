"""The page of a sweep: every number of its grid points, as a curve or a map."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from wflmc.apps.report.figure import Axis, Figure, Line, Panel
from wflmc.apps.report.plotly_figures import (
    UPLOAD_AND_SELECT_BUTTONS,
    PlotlyObject,
    axis_layout,
    draw,
    embed_drawing,
)
from wflmc.apps.report.tables import as_number, read_columns
from wflmc.apps.report.templates import PageSection, render, render_page
from wflmc.scenario import Scenario
from wflmc.scenario.coverage import SELECTED
from wflmc.support.errors import InputError

MAX_ROWS = 500
"""Points that the table on the page has at most."""
MAX_POINTS_DRAWN = 20_000
"""Points of a sweep that is drawn: each of its columns is on the page."""
MAX_ROWS_UNFOLDED = 12
"""Rows of a table that is shown at once."""
LOGARITHMIC_RATIO = 30.0
"""The largest number over the smallest from which on a scale is logarithmic."""
FIRST_COLUMNS = ("nll", "accuracy")
"""What is drawn first of classifiers, whose bound says little; other columns come in
the order of the table."""
MAP_HEIGHT = 420
"""In pixels."""
MAP_HEIGHT_WITH_SLIDER = 520
"""In pixels."""
FINE_TICK_DECADES = 3
"""Decades of a colour scale below which it has ticks at 1, 2 and 5."""

HEATMAP_LOOK: Mapping[str, object] = {
    "type": "heatmap",
    "colorscale": "Viridis",
    "xgap": 1,
    "ygap": 1,
}
"""What all maps have in common, as Plotly takes it."""
HOVER_TEMPLATE = "%{x}, %{y}: %{customdata:.6g}"
"""What a map shows under the pointer, in Plotly's notation."""

Cell = float | str | None
"""Of a sweep's table: a number, or a text; None where a number is missing."""


class GridKey(NamedTuple):
    """A key that varies over a sweep, with its value at every point."""

    name: str
    values: Sequence[Cell]


def render_sweep(folder: Path) -> str:
    """Render the page of a sweep over a grid of scenarios.

    Every column of numbers is a curve over the only key, or a map over the first two;
    the values of further keys have a slider. The table follows. Up to 20,000 points are
    drawn, and the first 500 are listed.

    Args:
        folder: as `wflmc sweep` has written it, with sweep.csv.

    Returns:
        One HTML file.

    Raises:
        InputError: sweep.csv is damaged, or has no grid keys or no points.
    """
    path = folder / "sweep.csv"
    columns = read_columns(path)
    keys = [name for name in columns if name.partition(".")[0] in Scenario.model_fields]
    if not keys or not columns[keys[0]]:
        requirement = (
            "a table of points whose first columns are keys such as link.snr_db"
        )
        raise InputError("report", str(path), requirement)
    points = len(columns[keys[0]])
    rows = list(zip(*columns.values(), strict=True))
    table = render(
        "sweep_points.html",
        head=list(columns),
        rows=rows[:MAX_ROWS],
        points=points,
        is_folded=points > MAX_ROWS_UNFOLDED,
    )
    sections = [
        PageSection("grid", "Over the grid", _figures(columns, keys)),
        PageSection("points", "All points", table),
    ]
    title = f"Sweep {folder.resolve().name}"
    return render_page(title, _lead(columns, keys), sections)


def _lead(columns: Mapping[str, Sequence[str]], keys: Sequence[str]) -> str:
    """Return the sentences below the title."""
    points = len(columns[keys[0]])
    lead = (
        f"Results of wflmc sweep in this folder: {points:,} grid points over "
        f"{', '.join(keys)}."
    )
    adjacencies = sorted(set(columns.get("adjacency", [])))
    if not adjacencies:
        return lead
    lead += f" The adjacency of ε is {' or '.join(adjacencies)}."
    has_sampled = "ess_min" in columns
    if has_sampled and any(columns.get("epsilon_spent", [])):
        lead += f" {SELECTED}"
    return lead


def _figures(columns: Mapping[str, Sequence[str]], keys: Sequence[str]) -> Markup:
    """Render a figure for every column of numbers, or why there are none."""
    if len(columns[keys[0]]) > MAX_POINTS_DRAWN:
        return render("sweep_figures.html", limit=MAX_POINTS_DRAWN, figures=[])
    numbers = {
        name: [as_number(cell) for cell in cells] for name, cells in columns.items()
    }
    grid_keys = [
        _grid_key(name, columns[name], numbers[name], has_slider=rank >= 2)
        for rank, name in enumerate(keys)
    ]
    drawn = _drawn_columns(numbers, keys)
    if len(grid_keys) > 1:
        figures = [_map(name, numbers[name], grid_keys) for name in drawn]
    else:
        figures = [_curve(name, numbers, grid_keys[0]) for name in drawn]
    return render("sweep_figures.html", limit=None, figures=figures)


def _grid_key(
    name: str,
    cells: Sequence[str],
    numbers: Sequence[float | None],
    *,
    has_slider: bool,
) -> GridKey:
    """Return a key with numbers along an axis; other values stand as they are."""
    is_named = has_slider or None in numbers
    return GridKey(name, cells if is_named else numbers)


def _drawn_columns(
    numbers: Mapping[str, Sequence[float | None]], keys: Sequence[str]
) -> list[str]:
    """Return the columns that are drawn, in their order on the page."""
    errors = {f"{name}_se" for name in numbers}
    drawn = []
    for name, values in numbers.items():
        has_numbers = any(value is not None for value in values)
        if has_numbers and name not in keys and name not in errors:
            drawn.append(name)
    first = [name for name in FIRST_COLUMNS if name in drawn]
    later = [name for name in drawn if name not in first]
    return [*first, *later]


def _spans_decades(values: Sequence[Cell]) -> bool:
    """Return whether values are positive and differ by a large factor."""
    present = [
        value for value in values if value is not None and not isinstance(value, str)
    ]
    if not present or min(present) <= 0:
        return False
    return max(present) >= LOGARITHMIC_RATIO * min(present)


def _curve(
    name: str, numbers: Mapping[str, Sequence[float | None]], key: GridKey
) -> Markup:
    """Draw a column over the only key."""
    is_named = any(isinstance(value, str) for value in key.values)
    no_errors: Sequence[float | None] = [None] * len(key.values)
    errors = numbers.get(f"{name}_se", no_errors)
    points = list(zip(key.values, numbers[name], errors, strict=True))
    if not is_named:
        points.sort(key=lambda point: float(point[0] or 0.0))
    x, y, sorted_errors = zip(*points, strict=True)
    shown_errors = sorted_errors if any(errors) else None
    line = Line(x, y, name, marker="o", error=shown_errors)
    panel = Panel([line], Axis(name, log=_spans_decades(y)))
    kind = "category" if is_named else None
    axis = Axis(key.name, log=_spans_decades(x), kind=kind)
    caption = (
        f"{name} over {key.name}; bars are two standard errors where there are any."
    )
    return draw(f"sweep-{name}", Figure([panel], axis, caption=caption))


def _map(name: str, values: Sequence[Cell], keys: Sequence[GridKey]) -> Markup:
    """Draw a column as a map over the first two keys, with a slider for the others.

    All cells have one size, whatever the distance of their values.
    """
    first, second, *further_keys = keys
    columns = _in_order(first.values)
    rows = _in_order(second.values)
    # One map, or slice, for each combination of the further keys.
    slice_of_point: list[tuple[Cell, ...]] = [()] * len(values)
    if further_keys:
        slice_of_point = list(zip(*(key.values for key in further_keys), strict=True))
    slices = list(dict.fromkeys(slice_of_point))
    points = zip(slice_of_point, second.values, first.values, strict=True)
    value_at = dict(zip(points, values, strict=True))
    cells = np.array(
        [_cells(value_at, shown, rows, columns) for shown in slices], dtype=float
    )
    traces = _map_traces(name, cells, is_logarithmic=_spans_decades(values))
    for trace in traces:
        trace |= {"x": columns, "y": rows}
    layout: PlotlyObject = {
        "xaxis": axis_layout(Axis(first.name, kind="category")),
        "yaxis": axis_layout(Axis(second.name, kind="category")),
        "height": MAP_HEIGHT,
        "modebar": {"remove": UPLOAD_AND_SELECT_BUTTONS},
    }
    if len(slices) > 1:
        names = [key.name for key in further_keys]
        layout["sliders"] = [_slider(names, slices)]
        layout["height"] = MAP_HEIGHT_WITH_SLIDER
    caption = (
        f"{name} over {first.name} and {second.name}; a gap is a point without this "
        "number."
    )
    return embed_drawing(f"figure-sweep-{name}", traces, layout, caption=caption)


def _map_traces(
    name: str, cells: NDArray[np.float64], *, is_logarithmic: bool
) -> list[PlotlyObject]:
    """Return a map for each slice of cells[slice, row, column]; the first is shown."""
    heights = np.log10(cells) if is_logarithmic else cells
    look: PlotlyObject = {**HEATMAP_LOOK, **_color_scale(name, cells)}
    look["hovertemplate"] = f"{HOVER_TEMPLATE}<extra>{name}</extra>"
    traces = list[PlotlyObject]()
    for index, slice_cells in enumerate(cells):
        trace: PlotlyObject = {**look, "z": heights[index], "customdata": slice_cells}
        trace["visible"] = index == 0
        traces.append(trace)
    return traces


def _cells(
    value_at: Mapping[tuple[tuple[Cell, ...], Cell, Cell], Cell],
    shown: tuple[Cell, ...],
    rows: Sequence[Cell],
    columns: Sequence[Cell],
) -> list[list[Cell]]:
    """Return the rows of the map that is shown; None at points outside the grid."""
    return [[value_at.get((shown, row, column)) for column in columns] for row in rows]


def _slider(names: Sequence[str], slices: Sequence[tuple[Cell, ...]]) -> PlotlyObject:
    """Return a slider over the values of further keys: it shows one map at a time."""
    steps = []
    for shown in slices:
        settings = zip(names, shown, strict=True)
        visible = [part == shown for part in slices]
        step = {
            "label": ", ".join(f"{name}={value}" for name, value in settings),
            "method": "restyle",
            "args": [{"visible": visible}],
        }
        steps.append(step)
    return {"steps": steps, "pad": {"t": 60}, "currentvalue": {"prefix": ""}}


def _in_order(values: Sequence[Cell]) -> list[Cell]:
    """Return the values of a key once each: numbers by size, names as they come."""
    distinct = list(dict.fromkeys(values))
    if any(isinstance(value, str) for value in distinct):
        return distinct
    return sorted(distinct, key=lambda value: float(value or 0.0))


def _color_scale(name: str, cells: NDArray[np.float64]) -> PlotlyObject:
    """Return a scale of colours that mean the same in all maps of a column."""
    finite = cells[np.isfinite(cells)]
    bar: PlotlyObject = {
        "title": {"text": name, "side": "right"},
        "exponentformat": "power",
    }
    if _spans_decades(finite.tolist()):
        finite = np.log10(finite)
        ticks = _decade_ticks(finite)
        bar["tickvals"] = np.log10(ticks)
        bar["ticktext"] = [f"{tick:g}" for tick in ticks]
    return {"zmin": finite.min(), "zmax": finite.max(), "colorbar": bar}


def _decade_ticks(exponents: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ticks of a logarithmic scale over powers of ten."""
    first = np.floor(exponents.min())
    last = np.ceil(exponents.max())
    powers = 10 ** np.arange(first, last + 1)
    multiples = (1, 2, 5) if np.ptp(exponents) < FINE_TICK_DECADES else (1,)
    return np.outer(powers, multiples).ravel()
