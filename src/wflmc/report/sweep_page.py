"""The page of a sweep: one number of every point over its grid, with a choice of the number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from wflmc.errors import InputError
from wflmc.report.page import Section, page
from wflmc.report.parts import Html, axis, figure, fold, join, log_axis, missing, paragraph, table
from wflmc.report.tables import as_number, read_columns
from wflmc.scenario import Scenario

MOST_ROWS = 500
MOST_DRAWN = 20_000
"""Points of a figure: each of its columns is on the page."""
DECADES = 30.0
"""The largest number over the smallest from which on a scale is logarithmic."""
OPENS_ON = ("nll", "accuracy")
"""Of classifiers, whose bound says little; other tables are shown from their first number on."""
Columns = dict[str, list[str]]


def sweep_page(folder: Path) -> str:
    """The whole page of the sweep in a folder."""
    path = folder / "sweep.csv"
    columns = read_columns(path)
    keys = [name for name in columns if name.partition(".")[0] in Scenario.model_fields]
    if not keys or not columns[keys[0]]:
        raise InputError("report", str(path), "a table of points whose first columns are keys such as link.snr_db")
    points = len(columns[keys[0]])
    lead = f"What wflmc sweep has left in this folder: {points:,} points over {', '.join(keys)}."
    if adjacencies := sorted(set(columns.get("adjacency", []))):
        lead += f" ε is that of neighbours by {' or '.join(adjacencies)}."
    drawn = _drawn(columns, keys)
    every = Section("points", "All points", _table(columns, points))
    return page(f"Sweep {folder.resolve().name}", lead, [Section("grid", "Over the grid", drawn), every])


def _drawn(columns: Columns, keys: list[str]) -> Html:
    errors = {f"{name}_se" for name in columns}
    chosen = [
        name
        for name, cells in columns.items()
        if name not in keys and name not in errors and any(as_number(cell) is not None for cell in cells)
    ]
    chosen.sort(key=lambda name: OPENS_ON.index(name) if name in OPENS_ON else len(OPENS_ON))
    if not chosen:
        return missing("No column has a number to draw.")
    if len(columns[keys[0]]) > MOST_DRAWN:
        return missing("More than {n} points are not drawn; sweep.csv has them all.", n=f"{MOST_DRAWN:,}")
    said = paragraph(
        "The menu above the figure chooses what is shown; a scale is logarithmic where numbers span decades."
    )
    drawn = _lines(columns, keys[0], chosen) if len(keys) == 1 else _map(columns, keys, chosen)
    return join([said, drawn])


def _menu(buttons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    place = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "direction": "down"}
    return [{"buttons": buttons, **place, "bgcolor": "#f4f6f9", "bordercolor": "#d8dce2"}]


def _grid(cells: list[str]) -> tuple[list[float | str], bool]:
    """The values of a key, and whether they are numbers, or names as they stand."""
    numbers = [found for cell in cells if (found := as_number(cell)) is not None]
    return (list(numbers), True) if len(numbers) == len(cells) else (list(cells), False)


def _spans_decades(values: Iterable[float | None]) -> bool:
    found = [value for value in values if value is not None]
    return bool(found) and min(found) > 0 and max(found) >= DECADES * min(found)


def _axis(title: str, values: Sequence[float | None]) -> dict[str, Any]:
    """For numbers: by decades where they span some. All that differs between the two kinds is said in both."""
    if _spans_decades(values):
        return log_axis(title, values, autorange=True)
    return axis(title, type="linear", autorange=True, tickmode="auto")


def _lines(columns: Columns, key: str, chosen: list[str]) -> Html:
    x, numeric = _grid(columns[key])
    order = sorted(range(len(x)), key=lambda i: x[i]) if numeric else list(range(len(x)))

    def curve(name: str) -> dict[str, Any]:
        return {"y": [as_number(columns[name][i]) for i in order], "error_y": _error(columns, name, order)}

    def button(name: str) -> dict[str, Any]:
        found = curve(name)
        shown = {part: [value] for part, value in found.items()}
        return {"label": name, "method": "update", "args": [shown, {"yaxis": _axis(name, found["y"])}]}

    first = {"x": [x[i] for i in order], "mode": "lines+markers", **curve(chosen[0])}
    along = _axis(key, [as_number(cell) for cell in columns[key]]) if numeric else axis(key, type="category")
    layout = _layout(along, _axis(chosen[0], first["y"]), [button(name) for name in chosen])
    return figure("sweep", [first], layout, f"Over {key}; bars are two standard errors where there are any.")


def _error(columns: Columns, name: str, order: list[int]) -> dict[str, Any]:
    cells = columns.get(f"{name}_se")
    if cells is None:
        return {"visible": False}
    return {"type": "data", "visible": True, "array": [2 * (as_number(cells[i]) or 0.0) for i in order]}


def _map(columns: Columns, keys: list[str], chosen: list[str]) -> Html:
    """A map over the first two keys, all cells of one size; a slider has the values of other keys."""
    x, y = (_grid(columns[key])[0] for key in keys[:2])
    across, up = (_in_order(columns[key]) for key in keys[:2])
    others = list(zip(*(columns[key] for key in keys[2:]), strict=True)) or [()] * len(x)
    slices = list(dict.fromkeys(others))

    def cells(name: str) -> list[list[list[float | None]]]:
        found = {(o, a, b): as_number(cell) for o, a, b, cell in zip(others, x, y, columns[name], strict=True)}
        return [[[found.get((part, a, b)) for a in across] for b in up] for part in slices]

    shown = [_colours(name, cells(name)) for name in chosen]
    look = {"type": "heatmap", "x": across, "y": up, "colorscale": "Viridis", "xgap": 1, "ygap": 1}
    traces = [
        {**look, **{part: values[i] for part, values in shown[0].items()}, "visible": i == 0}
        for i in range(len(slices))
    ]
    buttons = [{"label": n, "method": "restyle", "args": [parts]} for n, parts in zip(chosen, shown, strict=True)]
    layout = _layout(axis(keys[0], type="category"), axis(keys[1], type="category"), buttons)
    if len(slices) > 1:
        layout |= _slider([", ".join(f"{k}={v}" for k, v in zip(keys[2:], part, strict=True)) for part in slices])
    return figure("sweep", traces, layout, f"Over {keys[0]} and {keys[1]}; a gap is a point without this number.")


def _in_order(cells: list[str]) -> list[Any]:
    """The values of a key once each: numbers by size, names as they come."""
    values, numeric = _grid(cells)
    return sorted(set(values), key=float) if numeric else list(dict.fromkeys(values))


def _colours(name: str, slices: list[list[list[float | None]]]) -> dict[str, list[Any]]:
    """What Plotly needs of every map, whose colours mean the same in all of them."""
    flat = [value for cells in slices for row in cells for value in row if value is not None]
    ends = (min(flat), max(flat)) if flat else (0.0, 1.0)
    bar: dict[str, Any] = {"title": {"text": name, "side": "right"}, "exponentformat": "power"}
    z: list[Any] = slices
    if _spans_decades(flat):
        z = [[[None if v is None else math.log10(v) for v in row] for row in cells] for cells in slices]
        low, high = map(math.log10, ends)
        digits = (1, 2, 5) if high - low < 3 else (1,)
        ticks = [float(f"{d}e{p}") for p in range(math.floor(low), math.ceil(high) + 1) for d in digits]
        ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
        bar |= {"tickvals": [math.log10(tick) for tick in ticks], "ticktext": [f"{tick:g}" for tick in ticks]}
        ends = (low, high)
    said = f"%{{x}}, %{{y}}: %{{customdata:.6g}}<extra>{name}</extra>"
    common = {"zmin": ends[0], "zmax": ends[1], "colorbar": bar, "hovertemplate": said}
    return {"z": z, "customdata": slices, **{part: [value] * len(slices) for part, value in common.items()}}


def _slider(labels: list[str]) -> dict[str, Any]:
    """One map at a time; the menu changes them all."""
    steps = [
        {"label": label, "method": "restyle", "args": [{"visible": [i == at for i in range(len(labels))]}]}
        for at, label in enumerate(labels)
    ]
    return {"sliders": [{"steps": steps, "pad": {"t": 60}, "currentvalue": {"prefix": ""}}], "height": 580}


def _layout(x: dict[str, Any], y: dict[str, Any], buttons: list[dict[str, Any]]) -> dict[str, Any]:
    margin = {"l": 70, "r": 20, "t": 60, "b": 55}
    return {"height": 480, "margin": margin, "xaxis": x, "yaxis": y, "updatemenus": _menu(buttons)}


def _table(columns: Columns, points: int) -> Html:
    rows = list(zip(*columns.values(), strict=True))[:MOST_ROWS]
    shown = table(rows, list(columns))
    if points <= 12:
        return shown
    more = "" if points <= MOST_ROWS else f"The first {MOST_ROWS} of "
    return fold(f"{more}{points:,} points", shown)
