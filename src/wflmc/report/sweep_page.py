"""The page of a sweep: one number of every grid point, chosen from a menu, as a curve or a map over the grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wflmc.errors import InputError
from wflmc.report.blocks import Html, Section, fold, join, missing, page, paragraph, plot, table
from wflmc.report.figure import Axis
from wflmc.report.plotly_figures import UNWANTED, axis_layout
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


def render_sweep(folder: Path) -> str:
    """Return the page of the sweep in a folder."""
    path = folder / "sweep.csv"
    columns = read_columns(path)
    keys = [name for name in columns if name.partition(".")[0] in Scenario.model_fields]
    if not keys or not columns[keys[0]]:
        raise InputError("report", str(path), "a table of points whose first columns are keys such as link.snr_db")
    points = len(columns[keys[0]])
    lead = f"Results of wflmc sweep in this folder: {points:,} grid points over {', '.join(keys)}."
    if adjacencies := sorted(set(columns.get("adjacency", []))):
        lead += f" The adjacency of ε is {' or '.join(adjacencies)}."
    every = table(list(zip(*columns.values(), strict=True))[:MOST_ROWS], list(columns))
    if points > 12:
        every = fold(f"{'' if points <= MOST_ROWS else f'The first {MOST_ROWS} of '}{points:,} points", every)
    sections = [Section("grid", "Over the grid", _figure(columns, keys)), Section("points", "All points", every)]
    return page(f"Sweep {folder.resolve().name}", lead, sections)


def _figure(columns: Columns, keys: list[str]) -> Html:
    hidden = {*keys, *(f"{name}_se" for name in columns)}
    numbers = {name: [as_number(cell) for cell in cells] for name, cells in columns.items()}
    chosen = [name for name in columns if name not in hidden and any(cell is not None for cell in numbers[name])]
    chosen.sort(key=lambda name: OPENS_ON.index(name) if name in OPENS_ON else len(OPENS_ON))
    if not chosen:
        return missing("No column has a number to draw.")
    if len(columns[keys[0]]) > MOST_DRAWN:
        return missing("More than {n} points are not drawn; sweep.csv has them all.", n=f"{MOST_DRAWN:,}")
    # Values of the keys of an axis are numbers; others, and those that are no numbers, stand as they are.
    places = {key: columns[key] if key in keys[2:] or None in numbers[key] else numbers[key] for key in keys}
    draw = _curve if len(keys) == 1 else _map
    traces, layout, caption = draw(numbers, places, chosen)
    common = {"height": 480, "margin": {"l": 70, "r": 20, "t": 60, "b": 55}, "modebar": {"remove": UNWANTED}}
    note = "The menu above the figure chooses what is shown; a scale is logarithmic where numbers span decades."
    return join([paragraph(note), plot("figure-sweep", traces, {**common, **layout}, caption)])


def _menu(buttons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    place = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "direction": "down"}
    return [{"buttons": buttons, **place, "bgcolor": "#f4f6f9", "bordercolor": "#d8dce2"}]


def _spans_decades(values: Sequence[Any]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and min(present) > 0 and max(present) >= DECADES * min(present)


def _axis(label: str, values: Sequence[Any]) -> dict[str, Any]:
    if any(isinstance(value, str) for value in values):
        return axis_layout(Axis(label, kind="category"))
    return {**axis_layout(Axis(label, log=_spans_decades(values))), "autorange": True}


def _curve(numbers: dict[str, Any], places: dict[str, Any], chosen: list[str]) -> tuple[list[Any], dict[str, Any], str]:
    """Return a curve over one key, with a menu of columns."""
    ((key, x),) = places.items()
    order = sorted(range(len(x)), key=lambda i: i if isinstance(x[i], str) else x[i])

    def shown(name: str) -> dict[str, Any]:
        errors = numbers.get(f"{name}_se", [0.0] * len(x))
        bars = {"type": "data", "visible": any(errors), "array": [2 * (errors[i] or 0.0) for i in order]}
        return {"y": [numbers[name][i] for i in order], "error_y": bars}

    def button(name: str) -> dict[str, Any]:
        change = {part: [value] for part, value in shown(name).items()}
        return {"label": name, "method": "update", "args": [change, {"yaxis": _axis(name, numbers[name])}]}

    buttons = [button(name) for name in chosen]
    traces = [{"x": [x[i] for i in order], "mode": "lines+markers", **shown(chosen[0])}]
    layout = {"xaxis": _axis(key, x), "yaxis": _axis(chosen[0], numbers[chosen[0]]), "updatemenus": _menu(buttons)}
    return traces, layout, f"Over {key}; bars are two standard errors where there are any."


def _map(numbers: dict[str, Any], places: dict[str, Any], chosen: list[str]) -> tuple[list[Any], dict[str, Any], str]:
    """Return a map over the first two keys, all cells of one size; a slider has the values of other keys."""
    (first, x), (second, y), *others = places.items()
    slices = list(zip(*(values for _, values in others), strict=True)) or [()] * len(x)
    across, up, parts = _in_order(x), _in_order(y), list(dict.fromkeys(slices))

    def cells(name: str) -> Any:
        at = dict(zip(zip(slices, y, x, strict=True), numbers[name], strict=True))
        return [[[at.get((part, b, a)) for a in across] for b in up] for part in parts]

    shown = [_colours(name, cells(name)) for name in chosen]
    look = {"type": "heatmap", "x": across, "y": up, "colorscale": "Viridis", "xgap": 1, "ygap": 1}
    slices_of = [{part: values[i] for part, values in shown[0].items()} for i in range(len(parts))]
    traces = [{**look, **one, "visible": one is slices_of[0]} for one in slices_of]
    buttons = [{"label": n, "method": "restyle", "args": [change]} for n, change in zip(chosen, shown, strict=True)]
    horizontal, vertical = (axis_layout(Axis(key, kind="category")) for key in (first, second))
    layout: dict[str, Any] = {"xaxis": horizontal, "yaxis": vertical, "updatemenus": _menu(buttons)}
    if len(parts) > 1:
        steps = []
        for chosen_part in parts:
            label = ", ".join(f"{key}={value}" for (key, _), value in zip(others, chosen_part, strict=True))
            visible = {"visible": [part == chosen_part for part in parts]}
            steps.append({"label": label, "method": "restyle", "args": [visible]})
        layout |= {"sliders": [{"steps": steps, "pad": {"t": 60}, "currentvalue": {"prefix": ""}}], "height": 580}
    return traces, layout, f"Over {first} and {second}; a gap is a point without this number."


def _in_order(values: list[Any]) -> list[Any]:
    """Return the values of a key once each: numbers by size, names as they come."""
    once = list(dict.fromkeys(values))
    return once if any(isinstance(value, str) for value in once) else sorted(once)


def _colours(name: str, slices: Any) -> dict[str, list[Any]]:
    """Return what Plotly needs of every map, whose colours mean the same in all of them."""
    z = np.array(slices, dtype=float)
    flat = z[np.isfinite(z)]
    bar: dict[str, Any] = {"title": {"text": name, "side": "right"}, "exponentformat": "power"}
    if _spans_decades(flat.tolist()):
        z, flat = np.log10(z), np.log10(flat)
        powers = 10 ** np.arange(np.floor(flat.min()), np.ceil(flat.max()) + 1)
        ticks = np.outer(powers, (1, 2, 5) if np.ptp(flat) < 3 else (1,)).ravel()
        bar |= {"tickvals": np.log10(ticks), "ticktext": [f"{tick:g}" for tick in ticks]}
    low, high = (flat.min(), flat.max()) if flat.size else (0.0, 1.0)
    hover = f"%{{x}}, %{{y}}: %{{customdata:.6g}}<extra>{name}</extra>"
    common = {"zmin": low, "zmax": high, "colorbar": bar, "hovertemplate": hover}
    return {"z": list(z), "customdata": slices, **{part: [value] * len(slices) for part, value in common.items()}}
