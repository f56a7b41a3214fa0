"""Figures of studies as drawings one can zoom, with the axes, labels and colours of the printed ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wflmc.planning.solvers.single_sample import DP, LMC, POWER
from wflmc.report.figures import STYLES
from wflmc.report.panels import _LOOKS, _PARTITION_LABELS, Layout
from wflmc.report.parts import LEGEND_BELOW, Html, axis, figure, grid, join, log_axis, paragraph, table, value
from wflmc.report.plan_picture import COLORS
from wflmc.report.record_picture import LINES
from wflmc.studies import FIGURES, Row

SYMBOLS = {
    "o": "circle-open",
    "s": "square-open",
    "^": "triangle-up-open",
    "D": "diamond-open",
    "x": "x-thin-open",
    "v": "triangle-down-open",
    "P": "cross-open",
    "*": "star-open",
}
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
SCORES = {
    "accuracy": "accuracy",
    "brier": "Brier score",
    "nll": "NLL (nats)",
    "ece": "ECE (20 disjoint bins)",
    "paired": "difference of ECE",
    "clip_rate": "share of gradients clipped",
    "epsilon": "ε spent (replace)",
    "ess": "effective sample size of one chain",
    "chains": "W2² of clipped chains",
    "ablation": "ECE (20 disjoint bins)",
}
BARS = " Bars are two standard errors."


def _dash(style: Any) -> str:
    """Plotly's name of a line style of matplotlib, or its lengths in pixels."""
    return DASHES[style] if isinstance(style, str) else ",".join(f"{3 * length}px" for length in style[1])


def _look(scheme: str, rank: int, styles: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Colour, marker and dashes of a curve, as in the printed figures."""
    style = styles.get(scheme) or {**_LOOKS[rank % len(_LOOKS)], "label": _PARTITION_LABELS.get(scheme, scheme)}
    return {
        "name": style["label"],
        "mode": "lines+markers",
        "line": {"color": style["color"], "dash": _dash(style["linestyle"]), "width": max(1.2, 3 - 0.4 * rank)},
        "marker": {"symbol": SYMBOLS[style["marker"]], "size": 7, "color": style["color"]},
    }


def _curves(rows: Sequence[Row], styles: Mapping[str, dict[str, Any]] = STYLES) -> list[dict[str, Any]]:
    """One curve per scheme with bars of two standard errors."""
    traces = []
    for rank, scheme in enumerate(dict.fromkeys(row.scheme for row in rows)):
        own = [row for row in rows if row.scheme == scheme and row.y is not None]
        trace: dict[str, Any] = {"x": [r.x for r in own], "y": [r.y for r in own], **_look(scheme, rank, styles)}
        if any(row.y_se for row in own):
            # A bar that reaches zero would have no end on a logarithmic scale.
            down = [
                min(2 * (r.y_se or 0.0), 0.7 * (r.y or 0.0)) if (r.y or 0.0) > 0 else 2 * (r.y_se or 0) for r in own
            ]
            up = [2 * (row.y_se or 0.0) for row in own]
            trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1}
        if len(own) > 25:
            trace["mode"] = "lines"
        traces.append(trace)
    return traces


def _heights(traces: Sequence[dict[str, Any]]) -> list[float]:
    """Everything that an axis must reach: curves and the ends of their bars."""
    return [end for trace in traces for y, up in zip(trace["y"], _tops(trace), strict=True) for end in (y, y + up)]


def _tops(trace: dict[str, Any]) -> list[float]:
    return list(trace.get("error_y", {}).get("array") or [0.0] * len(trace["y"]))


def _layout(x: dict[str, Any], y: dict[str, Any], curves: int = 5) -> dict[str, Any]:
    """Axes, and a legend below with room for so many curves."""
    room = 22 * curves
    return {
        "height": 370 + room,
        "margin": {"l": 70, "r": 15, "t": 30, "b": 60 + room},
        "xaxis": x,
        "yaxis": y,
        "legend": {**LEGEND_BELOW, "orientation": "v", "y": -0.21, "font": {"size": 12}},
    }


def curves_figure(name: str, rows: Sequence[Row]) -> Html:
    """Figures 3 to 5: the bound of every scheme."""
    study = FIGURES[name]
    traces = _curves(rows)
    layout = _layout(axis(study.x_label), log_axis("bound on W2²", [row.y for row in rows]), curves=len(traces))
    return figure(name, traces, layout, f"{study.title}; the bound is the one printed in the paper.")


def regimes_figure(rows: Sequence[Row]) -> Html:
    """Figure 2: which limit rules, over SNR and step size."""
    edges = {
        name: {row.x: row.y for row in rows if row.scheme == name and row.y is not None} for name in (LMC, POWER, DP)
    }
    meet = _meeting(edges[POWER], edges[DP])
    if meet is not None:
        edges = {name: dict(sorted([*edge.items(), meet])) for name, edge in edges.items()}
    top = 1.3 * max(edges[LMC].values(), default=1.0)
    below = {"x": list(edges[LMC]), "y": list(edges[LMC].values())}
    traces: list[dict[str, Any]] = [{**below, "name": LMC, "fill": "tozeroy", **_area(LMC)}]
    for name in (POWER, DP):
        if edges[name]:
            x, y = list(edges[name]), list(edges[name].values())
            traces.append(
                {"x": [*x, *reversed(x)], "y": [*y, *[top] * len(x)], "name": name, "fill": "toself", **_area(name)}
            )
    layout = _layout(axis("SNR = P/(m N0) (dB)"), axis("step size η", range=[0, top]), curves=3)
    return figure(
        "fig2",
        traces,
        layout,
        "Below the edge noise is free: sampling wants it anyway. Above it power or privacy rules.",
    )


def _meeting(power: Mapping[float, float], privacy: Mapping[float, float]) -> tuple[float, float] | None:
    """SNR and step size, between two rows, where power gives way to privacy.

    The edge of power is proportional to the SNR, that of privacy does not depend on it.
    """
    if not power or not privacy:
        return None
    last, first = max(power), min(privacy)
    return min(max(last + 10 * math.log10(privacy[first] / power[last]), last), first), privacy[first]


def _area(name: str) -> dict[str, Any]:
    red, green, blue = (int(COLORS[name][i : i + 2], 16) for i in (1, 3, 5))
    return {
        "mode": "lines",
        "line": {"color": COLORS[name], "width": 2},
        "fillcolor": f"rgba({red},{green},{blue},0.45)",
    }


def panel_figures(layout: Layout, tables: Mapping[str, list[Row]]) -> tuple[list[Html], set[str]]:
    """The panels of a measured figure that are there, and the tables they show."""
    drawn, used = [], set()
    label = next((panel.y_label for panel in layout.panels if panel.y_label), "")
    for panel in layout.panels:
        if panel.table not in tables:
            continue
        used.add(panel.table)
        traces = _curves(tables[panel.table])
        floor = tables.get(f"{panel.table}_floor")
        if floor is not None:
            used.add(f"{panel.table}_floor")
            line = {"color": "#555555", "dash": "dot", "width": 2}
            points = {"x": [row.x for row in floor], "y": [row.y for row in floor]}
            traces.append({**points, "name": "floor of the estimator (perfect samples)", "mode": "lines", "line": line})
        ticks: dict[str, Any] = {"type": "log", "tickvals": sorted({row.x for row in tables[panel.table]})}
        x = axis(layout.x_label, **(ticks if layout.log_x else {}))
        said = panel.y_label or label
        y = log_axis(said, _heights(traces)) if panel.log_y else axis(said)
        bars = BARS if any(row.y_se for row in tables[panel.table]) else ""
        said = f"{panel.title[:1].upper()}{panel.title[1:]}.{bars}"
        drawn.append(figure(panel.table, traces, _layout(x, y, len(traces)), said))
    return drawn, used


def record_figures(tables: Mapping[str, list[Row]]) -> tuple[list[Html], set[str]]:
    """What is promised against what it buys."""
    drawn = []
    labels = {"record_budget": "budget for Σ 2(αℓ)²/N0", "record": "exact W2², worst after burn-in"}
    for name, label in labels.items():
        if name in tables:
            traces = _curves(tables[name], LINES)
            layout = _layout(axis("ε (δ = 0.01, replace)"), log_axis(label, _heights(traces)), len(traces))
            drawn.append(figure(name, traces, layout, "One curve for each of what is hidden, and by which accountant."))
    return drawn, set(labels)


def rest_figures(tables: Mapping[str, list[Row]], x_label: str) -> list[Html]:
    """Curves of the tables that no printed figure shows."""
    drawn = []
    for name, rows in tables.items():
        traces = _curves(rows)
        layout = _layout(axis(x_label), axis(score_of(name)), len(traces))
        drawn.append(figure(name, traces, layout, f"{name}.csv.{BARS}"))
    return drawn


def score_of(table: str) -> str:
    """What a table measures, by its name."""
    return SCORES.get(table.split("_", 1)[-1].removeprefix("ablation_"), table)


def one_x_table(tables: Mapping[str, list[Row]], x_label: str) -> Html:
    """Tables of one x only, side by side: a row for each scheme, a column for each table."""
    schemes = dict.fromkeys(row.scheme for rows in tables.values() for row in rows)
    found = {(name, row.scheme): row for name, rows in tables.items() for row in rows}
    at = next(row.x for rows in tables.values() for row in rows)
    rows = [(scheme, *(_measured(name, found.get((name, scheme))) for name in tables)) for scheme in schemes]
    head = (f"at {x_label} = {at:g}", *(score_of(name) for name in tables))
    return join([grid([table(rows, head)], "numbers"), paragraph("Means with their standard errors.")])


def _measured(name: str, row: Row | None) -> object:
    if row is None or row.y is None:
        return "–"
    error = f" ± {row.y_se:.1g}" if row.y_se and row.y_se > 1e-6 * abs(row.y) else ""
    return join([value(f"{name}.{row.scheme}", row.y, 3), error])
