"""The chains themselves: traces of a few of them, autocorrelation, R-hat and effective sample sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.posterior import SoftmaxPosterior
from wflmc.report.parts import COLORS, LEGEND_BELOW, Html, axis, figure, grid, join, missing, paragraph, picked, value
from wflmc.runs.documents import SummaryFile
from wflmc.runs.folder import Draws, Run

FEW = 4
"""Chains and parameters whose traces are drawn."""
LAGS = 60
FEWEST_DRAWS = 4


def chains_section(run: Run) -> Html:
    """Traces, autocorrelation, and what they come to."""
    if run.draws is None:
        why = "the run is not finished" if run.stopped else "trace.nc is missing"
        return missing("There are no samples to show: {why}.", why=why)
    draws = run.draws
    told = _in_words(run.summary)
    kept = draws.theta.shape[1]
    if kept < FEWEST_DRAWS:
        few = missing("Each chain keeps {kept} draw{s}: too few to follow a chain.", kept=kept, s="s" * (kept > 1))
        return join([told, few])
    return join([told, grid([_traces(run, draws), _autocorrelation(run, draws)])])


def parameter_name(run: Run, index: int) -> str:
    """θ[i], and for labels whose weight it is."""
    name = f"θ[{index}]"
    posterior = None if run.rebuilt is None else run.rebuilt.inputs.posterior
    if not isinstance(posterior, SoftmaxPosterior):
        return name
    label, feature = divmod(index, posterior.features.shape[-1])
    last = posterior.intercept and feature == posterior.features.shape[-1] - 1
    return f"{name} (class {posterior.class_names[label]}, {'intercept' if last else f'feature {feature}'})"


def autocorrelation(theta: NDArray[np.float64], lags: int) -> NDArray[np.float64]:
    """Of theta[chain, draw], lags 0 to `lags`, about the mean over all chains."""
    away = theta - theta.mean()
    draws = away.shape[1]
    found = np.array([np.mean(away[:, : draws - lag] * away[:, lag:]) for lag in range(lags + 1)])
    return found / found[0] if found[0] > 0 else np.where(np.arange(lags + 1) == 0, 1.0, 0.0)


def _in_words(summary: SummaryFile | None) -> Html:
    if summary is None or (summary.rhat_max is None and summary.ess_min is None):
        return missing(
            "R-hat and effective sample sizes are not known: they need ArviZ, four draws or more, and for R-hat "
            "several chains."
        )
    between = "R-hat compares the spread between chains with that within them: at most {rhat}. "
    if summary.rhat_max is None:
        between = "R-hat compares chains with each other, and there is one. "
    return paragraph(
        between + "Draws of a chain resemble those "
        " before them; {bulk} independent draws would tell as much of the middle of the worst parameter, {tail} "
        "of its tails.",
        rhat=value("summary.rhat_max", summary.rhat_max, 4),
        bulk=value("summary.ess_min", summary.ess_min, shown=_whole(summary.ess_min)),
        tail=value("summary.ess_tail_min", summary.ess_tail_min, shown=_whole(summary.ess_tail_min)),
    )


def _whole(found: float | None) -> str:
    return "–" if found is None else f"{found:,.0f}"


def _slowest(theta: NDArray[np.float64]) -> list[int]:
    """The parameters whose successive draws resemble each other most: those to look at first."""
    if theta.shape[2] <= FEW:
        return list(range(theta.shape[2]))
    away = theta - theta.mean((0, 1))
    resemblance = (away[:, :-1] * away[:, 1:]).mean((0, 1)) / np.maximum((away**2).mean((0, 1)), 1e-300)
    return sorted(np.argsort(-resemblance)[:FEW].tolist())


def _traces(run: Run, draws: Draws) -> Html:
    theta = draws.theta
    shown, at = _slowest(theta), picked(theta.shape[1], 500)
    burn_in = 0 if draws.early is None or run.plan is None else run.plan.constants.burn_in
    count = len(shown)
    layout: dict[str, Any] = {
        "height": 110 + 105 * count,
        "margin": {"l": 60, "r": 15, "t": 30, "b": 50},
        "xaxis": axis("round" if burn_in else "kept draw", anchor="y" if count == 1 else f"y{count}"),
        "showlegend": False,
        "annotations": [],
        "shapes": [],
    }
    traces = []
    for row, index in enumerate(shown):
        name = "y" if row == 0 else f"y{row + 1}"
        bottom, top = 1 - (row + 1) / count, 1 - row / count - 0.22 / count
        layout[f"yaxis{'' if row == 0 else row + 1}"] = axis("", domain=[bottom, top], nticks=4)
        place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": top, "yanchor": "bottom"}
        layout["annotations"].append({**place, "text": parameter_name(run, index), "showarrow": False})
        if burn_in:
            layout["shapes"].append(_line_after(burn_in, name))
        traces += [
            {
                **_curve(draws, at, burn_in, chain, index),
                "yaxis": name,
                "name": f"chain {chain}",
                "mode": "lines",
                "line": {"width": 1, "color": COLORS[chain % len(COLORS)]},
            }
            for chain in range(min(FEW, theta.shape[0]))
        ]
    some = min(FEW, theta.shape[0])
    slow = "" if theta.shape[2] <= FEW else " The parameters are those that move most slowly."
    which = f"The first {some} of {theta.shape[0]:,} chains, a colour each."
    if theta.shape[0] <= FEW:
        which = f"All {some} chains, a colour each." if some > 1 else "The one chain."
    early = " Burn-in is left of the vertical line." if burn_in else ""
    caption = f"{which} Good chains cover the same ground.{slow}{early}"
    return figure("traces", traces, layout, caption)


def _curve(draws: Draws, at: list[int], burn_in: int, chain: int, index: int) -> dict[str, Any]:
    """One parameter of one chain over the rounds, those of burn-in first where they were kept."""
    x, y = [burn_in + i * draws.every + 1 for i in at], draws.theta[chain, at, index]
    if burn_in and draws.early is not None:
        before = picked(draws.early.shape[1], 500)
        x = [i * draws.every + 1 for i in before] + x
        y = np.concatenate([draws.early[chain, before, index], y])
    return {"x": x, "y": np.round(y, 6)}


def _line_after(burn_in: int, name: str) -> dict[str, Any]:
    x = burn_in + 0.5
    look = {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": {"color": "#1a1a1a", "width": 1}}
    return {**look, "yref": f"{name} domain"}


def _autocorrelation(run: Run, draws: Draws) -> Html:
    theta = draws.theta
    lags = min(LAGS, theta.shape[1] - 2)
    traces: list[dict[str, Any]] = [
        {
            "x": [lag * draws.every for lag in range(lags + 1)],
            "y": np.round(autocorrelation(theta[:, :, index], lags), 5),
            "name": parameter_name(run, index),
            "mode": "lines+markers",
            "marker": {"size": 4},
        }
        for index in _slowest(theta)
    ]
    lowest = float(min(np.min(trace["y"]) for trace in traces))
    layout = {
        "height": 440,
        "margin": {"l": 60, "r": 15, "t": 30, "b": 50},
        "xaxis": axis("rounds apart"),
        "yaxis": axis("autocorrelation", range=[min(-0.3, 1.1 * lowest), 1.05]),
        "legend": LEGEND_BELOW,
        "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": {"width": 1}}],
    }
    caption = (
        "How much a draw resembles the one so many rounds before it. The sooner it falls to 0, the more a draw tells."
    )
    return figure("autocorrelation", traces, layout, caption)
