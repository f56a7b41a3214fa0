"""The page of a sweep: every number of its grid points, as a curve or a map over the grid."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wflmc.apps.report.blocks import (
    Html,
    PageSection,
    PlotlyObject,
    fold,
    grid,
    missing,
    page,
    plot,
    table,
)
from wflmc.apps.report.figure import Axis, Figure, Line, Panel
from wflmc.apps.report.plotly_figures import UNWANTED, axis_layout, draw
from wflmc.apps.report.tables import as_number, read_columns
from wflmc.scenario import Scenario
from wflmc.scenario.coverage import SELECTED
from wflmc.support.errors import InputError

MOST_ROWS = 500
MOST_DRAWN = 20_000
"""Points of a figure: each of its columns is on the page."""
DECADES = 30.0
"""The largest number over the smallest from which on a scale is logarithmic."""
FIRST = ("nll", "accuracy")
"""What is drawn first of classifiers, whose bound says little; other columns come in the order of the table."""


def render_sweep(folder: Path) -> str:
    """Return the page of the sweep in a folder."""
    path = folder / "sweep.csv"
    columns = read_columns(path)
    keys = [name for name in columns if name.partition(".")[0] in Scenario.model_fields]
    if not keys or not columns[keys[0]]:
        raise InputError(
            "report",
            str(path),
            "a table of points whose first columns are keys such as link.snr_db",
        )
    points = len(columns[keys[0]])
    lead = f"Results of wflmc sweep in this folder: {points:,} grid points over {', '.join(keys)}."
    if adjacencies := sorted(set(columns.get("adjacency", []))):
        lead += f" The adjacency of ε is {' or '.join(adjacencies)}."
        lead += (
            f" {SELECTED}"
            if any(columns.get("epsilon_spent", [])) and "ess_min" in columns
            else ""
        )
    every = table(list(zip(*columns.values(), strict=True))[:MOST_ROWS], list(columns))
    if points > 12:
        every = fold(
            f"{'' if points <= MOST_ROWS else f'The first {MOST_ROWS} of '}{points:,} points",
            every,
        )
    sections = [
        PageSection("grid", "Over the grid", _figures(columns, keys)),
        PageSection("points", "All points", every),
    ]
    return page(f"Sweep {folder.resolve().name}", lead, sections)


Cell = float | str | None
"""Of a sweep's table: a number, or a text; None where a number is missing."""


def _figures(columns: dict[str, list[str]], keys: list[str]) -> Html:
    """Return a figure for every column of numbers."""
    if len(columns[keys[0]]) > MOST_DRAWN:
        return missing(
            "More than {n} points are not drawn; sweep.csv has them all.",
            n=f"{MOST_DRAWN:,}",
        )
    numbers = {
        name: [as_number(cell) for cell in cells] for name, cells in columns.items()
    }
    hidden = {*keys, *(f"{name}_se" for name in columns)}
    shown = [
        name
        for name in columns
        if name not in hidden and any(cell is not None for cell in numbers[name])
    ]
    shown.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    # Values of the keys of an axis are numbers; others, and those that are no numbers, stand as they are.
    places: dict[str, Sequence[Cell]] = {}
    for key in keys:
        is_named = key in keys[2:] or None in numbers[key]
        places[key] = columns[key] if is_named else numbers[key]
    if len(keys) > 1:
        return grid(_map(name, numbers[name], places) for name in shown)
    return grid(_curve(name, numbers, places[keys[0]], keys[0]) for name in shown)


def _spans_decades(values: Sequence[Cell]) -> bool:
    present = [
        value for value in values if value is not None and not isinstance(value, str)
    ]
    return bool(present) and min(present) > 0 and max(present) >= DECADES * min(present)


def _curve(
    name: str, numbers: dict[str, list[float | None]], x: Sequence[Cell], key: str
) -> Html:
    """Return a column over the only key."""
    names = any(isinstance(value, str) for value in x)
    points = list(
        zip(x, numbers[name], numbers.get(f"{name}_se", [None] * len(x)), strict=True)
    )
    at, y, errors = zip(
        *(
            points
            if names
            else sorted(points, key=lambda point: float(point[0] or 0.0))
        ),
        strict=True,
    )
    line = Line(at, y, name, marker="o", error=errors if any(errors) else None)
    across = Axis(key, log=_spans_decades(at), kind="category" if names else None)
    caption = f"{name} over {key}; bars are two standard errors where there are any."
    return draw(
        f"sweep-{name}",
        Figure(
            [Panel([line], Axis(name, log=_spans_decades(y)))], across, caption=caption
        ),
    )


def _map(
    name: str, values: Sequence[Cell], places: Mapping[str, Sequence[Cell]]
) -> Html:
    """Return a column as a map over the first two keys, all cells of one size; a slider has the values of others."""
    (first, x), (second, y), *others = places.items()
    slices = list(zip(*(values for _, values in others), strict=True)) or [()] * len(x)
    across, up, parts = _in_order(x), _in_order(y), list(dict.fromkeys(slices))
    at = dict(zip(zip(slices, y, x, strict=True), values, strict=True))
    cells = np.array(
        [[[at.get((part, b, a)) for a in across] for b in up] for part in parts],
        dtype=float,
    )
    look = {
        "type": "heatmap",
        "x": across,
        "y": up,
        "colorscale": "Viridis",
        "xgap": 1,
        "ygap": 1,
    }
    look |= {
        "hovertemplate": f"%{{x}}, %{{y}}: %{{customdata:.6g}}<extra>{name}</extra>",
        **_colours(name, cells),
    }
    z = np.log10(cells) if _spans_decades(values) else cells
    traces = [
        {**look, "z": z[i], "customdata": cells[i], "visible": i == 0}
        for i in range(len(parts))
    ]
    sides = [axis_layout(Axis(key, kind="category")) for key in (first, second)]
    layout: PlotlyObject = {
        "xaxis": sides[0],
        "yaxis": sides[1],
        "height": 420,
        "modebar": {"remove": UNWANTED},
    }
    if len(parts) > 1:
        steps = []
        for part in parts:
            label = ", ".join(
                f"{key}={value}" for (key, _), value in zip(others, part, strict=True)
            )
            visible = {"visible": [part == other for other in parts]}
            steps.append({"label": label, "method": "restyle", "args": [visible]})
        layout |= {
            "sliders": [
                {"steps": steps, "pad": {"t": 60}, "currentvalue": {"prefix": ""}}
            ],
            "height": 520,
        }
    caption = f"{name} over {first} and {second}; a gap is a point without this number."
    return plot(f"figure-sweep-{name}", traces, layout, caption)


def _in_order(values: Sequence[Cell]) -> list[Cell]:
    """Return the values of a key once each: numbers by size, names as they come."""
    once = list(dict.fromkeys(values))
    if any(isinstance(value, str) for value in once):
        return once
    return sorted(once, key=lambda value: float(value or 0.0))


def _colours(name: str, cells: NDArray[np.float64]) -> PlotlyObject:
    """Return a scale of colours that mean the same in all maps of a column."""
    flat = cells[np.isfinite(cells)]
    bar: PlotlyObject = {
        "title": {"text": name, "side": "right"},
        "exponentformat": "power",
    }
    if _spans_decades(flat.tolist()):
        flat = np.log10(flat)
        powers = 10 ** np.arange(np.floor(flat.min()), np.ceil(flat.max()) + 1)
        ticks = np.outer(powers, (1, 2, 5) if np.ptp(flat) < 3 else (1,)).ravel()
        bar |= {
            "tickvals": np.log10(ticks),
            "ticktext": [f"{tick:g}" for tick in ticks],
        }
    return {"zmin": flat.min(), "zmax": flat.max(), "colorbar": bar}
