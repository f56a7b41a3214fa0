"""The plan in pictures: gain, noise, privacy, senders, threshold and step size over the rounds, and the distance."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from wflmc.planning import Plan
from wflmc.planning.solvers.single_sample import REGIMES
from wflmc.report.parts import (
    COLORS,
    LEGEND_BELOW,
    Html,
    axis,
    figure,
    join,
    log_axis,
    missing,
    paragraph,
    percent,
    picked,
    text,
)
from wflmc.report.plan_picture import COLORS as LIMIT_COLORS
from wflmc.runs.documents import PlanFile
from wflmc.runs.folder import Run

LIMITS = {
    "lmc-limited": "noise that sampling wants anyway (lmc-limited)",
    "power-limited": "transmit power (power-limited)",
    "dp-limited": "privacy (dp-limited)",
}
PANEL, GAP = 140, 42
"""Height of one panel and of the space above it, in pixels."""
FLOOR = " The estimate from chains cannot fall below a floor that their number sets; the exact law can."


class Panel(NamedTuple):
    """One set of axes over the rounds: curves without their x, and the scale."""

    title: str
    curves: list[dict[str, Any]]
    log: bool = False


def plan_section(run: Run) -> Html:
    """Panels over the rounds with the limits behind them, then the distance over the rounds."""
    if run.plan is None:
        return missing("plan.json is missing: there is no plan to show.")
    plan, rebuilt = run.plan, None if run.rebuilt is None else run.rebuilt.plan
    at = picked(plan.constants.rounds)
    parts = [_limits_in_words(plan, run.ideal)]
    if rebuilt is None:
        parts.append(missing("Noise and limits of each round need the data again: {why}", why=run.not_rebuilt))
    parts.append(_panels(plan, rebuilt, at))
    parts.append(_distance(run, plan))
    return join(parts)


def _limits_in_words(plan: PlanFile, ideal: bool) -> Html:
    if ideal:
        return paragraph("The link is ideal: no channel limits what devices send.")
    shares = {name: part for name, part in plan.regime_share.items() if part}
    held = ", ".join(f"{LIMITS.get(name, name)} in {percent(part)} of the rounds" for name, part in shares.items())
    proof = ""
    if plan.gap is not None:
        proof = f" The powers are within {plan.gap:.1g} of the best possible, relative to the bound, with proof."
    return paragraph("What keeps devices from sending more strongly: {held}.{proof}", held=held, proof=proof)


def _panels(plan: PlanFile, rebuilt: Plan | None, at: list[int]) -> Html:
    every = [
        _gain(plan, at),
        *([] if rebuilt is None else [_noise(rebuilt, at), *_spent(rebuilt, at)]),
        _senders(plan, at),
        *_threshold(plan, at),
        *_steps(plan, at),
    ]
    rounds = [i + 1 for i in at]
    height = len(every) * (PANEL + GAP)
    traces: list[dict[str, Any]] = [] if rebuilt is None else _patches(rebuilt)
    layout: dict[str, Any] = {
        "height": height + 150,
        "margin": {"l": 60, "r": 15, "t": 10, "b": 130},
        "xaxis": axis("round", range=[0.5, plan.constants.rounds + 0.5], anchor=f"y{2 * len(every)}"),
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "legend": {**LEGEND_BELOW, "y": -55 / height},
        "annotations": [],
        "shapes": [],
    }
    for index, panel in enumerate(every):
        # Axes in pairs: the curves lie over a strip that is as high as they are, coloured by the limits.
        strip, name = "" if index == 0 else str(2 * index + 1), str(2 * index + 2)
        top = 1 - (index * (PANEL + GAP) + GAP) / height
        domain = [max(0.0, top - PANEL / height), top]
        layout[f"yaxis{strip}"] = {"visible": False, "range": [0, 1], "fixedrange": True, "domain": domain}
        layout[f"yaxis{name}"] = _scale(panel, overlaying=f"y{strip}")
        layout["annotations"].append(_title(panel.title, top))
        traces += [] if rebuilt is None else [{**_strip(rebuilt, at), "yaxis": f"y{strip}"}]
        traces += [{"x": rounds, "yaxis": f"y{name}", "mode": "lines", **curve} for curve in panel.curves]
        if plan.constants.burn_in:
            layout["shapes"].append(_burn_in(plan, f"y{name} domain"))
    caption = "Round by round, as planned before anything was sent." + _thinned(plan, at)
    if plan.constants.burn_in:
        caption += f" Samples are kept from the vertical line on, round {plan.constants.burn_in + 1:,}."
    if rebuilt is not None:
        caption += " Background colours say which limit a round sits at."
    return figure("plan", traces, layout, caption)


def _scale(panel: Panel, **others: Any) -> dict[str, Any]:
    if panel.log:
        return log_axis("", [found for curve in panel.curves for found in curve["y"]], **others)
    return axis("", rangemode="tozero", nticks=5, tickmode="auto", **others)


def _title(said: str, top: float) -> dict[str, Any]:
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": top, "yanchor": "bottom"}
    return {**place, "text": said, "showarrow": False, "font": {"size": 13}, "align": "left"}


def _burn_in(plan: PlanFile, where: str) -> dict[str, Any]:
    x = plan.constants.burn_in + 0.5
    return {"type": "line", "x0": x, "x1": x, "yref": where, "y0": 0, "y1": 1, "line": {"color": "#1a1a1a", "width": 1}}


def _thinned(plan: PlanFile, at: list[int]) -> str:
    return "" if len(at) == plan.constants.rounds else f" {len(at):,} of {plan.constants.rounds:,} rounds are drawn."


def _strip(plan: Plan, at: list[int]) -> dict[str, Any]:
    """The limit of every round as a coloured background: a heat map costs the same for ten rounds and a thousand."""
    steps = [(i + end) / len(REGIMES) for i in range(len(REGIMES)) for end in (0, 1)]
    colors = [LIMIT_COLORS[name] for name in REGIMES for _ in range(2)]
    return {
        "type": "heatmap",
        "x": [i + 1 for i in at],
        "y": [0.5],
        "z": [plan.limit[at]],
        "zmin": -0.5,
        "zmax": len(REGIMES) - 0.5,
        "colorscale": [list(pair) for pair in zip(steps, colors, strict=True)],
        "showscale": False,
        "opacity": 0.25,
        "hoverinfo": "skip",
    }


def _patches(plan: Plan) -> list[dict[str, Any]]:
    """A patch of each colour for the legend."""
    look = {"x": [None], "y": [None], "yaxis": "y2", "mode": "markers", "hoverinfo": "skip"}
    return [
        {
            **look,
            "name": f"round is {name}",
            "marker": {"symbol": "square", "size": 12, "color": LIMIT_COLORS[name], "opacity": 0.5},
        }
        for name, part in plan.regime_share.items()
        if part
    ]


def _gain(plan: PlanFile, at: list[int]) -> Panel:
    curve = {"y": [plan.gain[i] for i in at], "name": "gain α", "line": _line("#1a1a1a")}
    return Panel("gain α: received amplitude per unit of gradient", [{**curve, "showlegend": False}], log=True)


def _line(color: str, **others: Any) -> dict[str, Any]:
    return {"color": color, "width": 1.5, "shape": "hvh", **others}


def _noise(plan: Plan, at: list[int]) -> Panel:
    useful, total = plan.langevin_noise[at], plan.noise_variance[at]
    name = "useful, 1 − e²" if plan.friction is not None else "useful, 2η"
    fill = {"fill": "tonexty", "fillcolor": "rgba(213,94,0,0.35)"}
    curves = [
        {"y": useful, "name": f"noise that is {name}", "line": _line("#009e73", width=2)},
        {"y": total, "name": "noise in all; filled: excess", "line": _line("#d55e00"), **fill},
    ]
    return Panel(f"noise variance σ² of the {'velocity' if plan.friction is not None else 'update'}", curves, log=True)


def _spent(plan: Plan, at: list[int]) -> list[Panel]:
    if not plan.clips:
        return []
    spent = (plan.ledger + np.cumsum(plan.loss, axis=0))[at]
    most = int(np.argmax(spent[-1]))
    budget = float(plan.privacy.budget(plan.devices)[most])
    curves = [
        {"y": spent[:, most], "name": f"loss of device {most}, which spends most", "line": _line("#0072b2")},
        {"y": np.median(spent, axis=1), "name": "loss of the median device", "line": _line("#0072b2", dash="dot")},
    ]
    if np.isfinite(budget):
        curves.append({"y": np.full(len(at), budget), "name": "budget", "line": _line("#1a1a1a", dash="dash")})
    return [Panel("privacy loss so far, Σ 2(αℓ)²/N0", curves)]


def _senders(plan: PlanFile, at: list[int]) -> Panel:
    curve = {"y": [plan.active_devices[i] for i in at], "name": "devices sending", "line": _line("#1a1a1a")}
    return Panel(f"devices sending, of {plan.constants.devices}", [{**curve, "showlegend": False}])


def _threshold(plan: PlanFile, at: list[int]) -> list[Panel]:
    if not any(plan.threshold):
        return []
    curve = {"y": [plan.threshold[i] for i in at], "name": "threshold", "line": _line("#1a1a1a"), "showlegend": False}
    return [Panel("threshold: the weakest channel |h| that sends", [curve])]


def _steps(plan: PlanFile, at: list[int]) -> list[Panel]:
    if min(plan.step_size) == max(plan.step_size):
        return []
    curve = {"y": [plan.step_size[i] for i in at], "name": "step size", "line": _line("#1a1a1a"), "showlegend": False}
    return [Panel("step size η", [curve])]


def _distance(run: Run, plan: PlanFile) -> Html:
    """Bound, exact law and estimate over the rounds."""
    constants = plan.constants
    at = picked(constants.rounds)
    curves: list[dict[str, Any]] = []
    found: list[tuple[str, str, list[float | None]]] = []
    if plan.bound is not None:
        found.append(("bound", COLORS[1], plan.bound))
    if plan.exact_w2_sq is not None:
        found.append(("exact law, if unclipped", COLORS[0], plan.exact_w2_sq))
    for name, color, values in found:
        y = [values[i] for i in at]
        curves.append(
            {"x": [i + 1 for i in at], "y": y, "name": name, "mode": "lines", "line": {"color": color, "width": 2}}
        )
    if run.summary is not None and run.summary.w2_sq is not None:
        kept = run.summary.w2_sq.per_round
        some = picked(len(kept))
        curves.append(
            {
                "x": [constants.burn_in + i + 1 for i in some],
                "y": [kept[i] for i in some],
                "name": "estimated from the chains",
                "mode": "markers",
                "marker": {"color": COLORS[2], "size": 6},
            }
        )
    alone = [curve["name"] for curve in curves] == ["bound"]
    if not curves:
        return missing("Neither a bound nor an exact law is known for this model and these dynamics.")
    where = " in whitened coordinates (the bound)" if plan.coordinates == "whitened" and plan.bound is not None else ""
    what = "bound on W2²" if alone else "W2² to the posterior"
    layout = {
        "height": 430,
        "margin": {"l": 70, "r": 15, "t": 30, "b": 60},
        "xaxis": axis("round", range=[0.5, constants.rounds + 0.5]),
        "showlegend": True,
        "yaxis": log_axis(what, [found for curve in curves for found in curve["y"]]),
        "hovermode": "x unified",
        "legend": LEGEND_BELOW,
        "shapes": [_burn_in(plan, "y domain")] if constants.burn_in else [],
    }
    caption = f"Squared distance of the samples' law to the posterior{where}, round by round."
    if alone:
        caption = (
            f"A bound on the squared distance of the samples' law to the posterior{where}, which holds while nothing "
            "is clipped. The distance itself is not known."
        )
    if run.summary is not None and run.summary.w2_sq is not None:
        caption += FLOOR
    title = "A bound on the distance to the posterior" if alone else "How far from the posterior"
    return join([text("<h3>{title}, round by round</h3>", title=title), figure("distance", curves, layout, caption)])
