"""The page of a sweep: one number of every point over its grid, with a choice of the number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wflmc.errors import InputError
from wflmc.report.page import Section, page
from wflmc.report.parts import Html, axis, figure, fold, join, missing, paragraph, table
from wflmc.report.tables import as_number, read_columns
from wflmc.scenario import Scenario

MOST_ROWS = 500
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
    if not chosen:
        return missing("No column has a number to draw.")
    if len(keys) > 2:
        return missing("The grid has {n} keys: too many to draw; all points are below.", n=len(keys))
    said = paragraph("The menu above the figure chooses what is shown.")
    drawn = _lines(columns, keys[0], chosen) if len(keys) == 1 else _map(columns, keys, chosen)
    return join([said, drawn])


def _menu(buttons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    place = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "direction": "down"}
    return [{"buttons": buttons, **place, "bgcolor": "#f4f6f9", "bordercolor": "#d8dce2"}]


def _grid(cells: list[str]) -> tuple[list[float | str], str]:
    """The values of a key and the kind of their axis: numbers, or names as they stand."""
    numbers = [as_number(cell) for cell in cells]
    if None in numbers:
        return list(cells), "category"
    return [found for found in numbers if found is not None], "linear"


def _lines(columns: Columns, key: str, chosen: list[str]) -> Html:
    x, kind = _grid(columns[key])
    order = sorted(range(len(x)), key=lambda i: x[i]) if kind == "linear" else list(range(len(x)))

    def curve(name: str) -> dict[str, Any]:
        return {"y": [as_number(columns[name][i]) for i in order], "error_y": _error(columns, name, order)}

    first = {"x": [x[i] for i in order], "mode": "lines+markers", **curve(chosen[0])}
    buttons = [
        {
            "label": name,
            "method": "update",
            "args": [
                {"y": [curve(name)["y"]], "error_y": [curve(name)["error_y"]]},
                {"yaxis.title.text": name},
            ],
        }
        for name in chosen
    ]
    layout = _layout(axis(key, type=kind), axis(chosen[0]), buttons)
    return figure("sweep", [first], layout, f"Over {key}; bars are two standard errors where there are any.")


def _error(columns: Columns, name: str, order: list[int]) -> dict[str, Any]:
    cells = columns.get(f"{name}_se")
    if cells is None:
        return {"visible": False}
    return {"type": "data", "visible": True, "array": [2 * (as_number(cells[i]) or 0.0) for i in order]}


def _map(columns: Columns, keys: list[str], chosen: list[str]) -> Html:
    (x, x_kind), (y, y_kind) = (_grid(columns[key]) for key in keys)
    across, up = (
        sorted(set(v), key=v.index) if k == "category" else sorted(set(v), key=float)
        for v, k in ((x, x_kind), (y, y_kind))
    )

    def cells(name: str) -> list[list[float | None]]:
        found = {(x[i], y[i]): as_number(cell) for i, cell in enumerate(columns[name])}
        return [[found.get((a, b)) for a in across] for b in up]

    first = {"type": "heatmap", "x": across, "y": up, "z": cells(chosen[0]), "colorscale": "Viridis"}
    buttons = [{"label": name, "method": "restyle", "args": [{"z": [cells(name)]}]} for name in chosen]
    layout = _layout(axis(keys[0], type=x_kind), axis(keys[1], type=y_kind), buttons)
    return figure("sweep", [first], layout, f"Over {keys[0]} and {keys[1]}; a gap is a point without this number.")


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
