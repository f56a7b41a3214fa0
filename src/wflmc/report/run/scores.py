"""Predictions on a test set: how often they are right or how far off, and whether their confidence is right."""

from __future__ import annotations

from typing import Any

from wflmc.report.parts import COLORS, LEGEND_BELOW, Html, axis, figure, grid, join, missing, share, table, value
from wflmc.runs.documents import Bins, SummaryFile
from wflmc.runs.folder import Run

FEW = 1e-3
"""A bin with a smaller share of the examples says nothing, and is not drawn."""


def scores_section(run: Run) -> Html:
    """The reliability diagram beside the scores."""
    if run.summary is None:
        why = "the run is not finished" if run.stopped else "summary.json is missing"
        return missing("There are no scores: {why}.", why=why)
    if run.summary.rmse is not None:
        return _table(run.summary)
    if run.summary.accuracy is None:
        return missing("There are no scores: {why}.", why="the data have no test set (arrays X_test and y_test)")
    drawn = missing("summary.json has no reliability diagram.")
    if run.summary.reliability is not None:
        drawn = _diagram(run.summary.reliability)
    return grid([drawn, _table(run.summary)])


def _table(summary: SummaryFile) -> Html:
    rows = [
        ("accuracy", share("summary.accuracy", summary.accuracy), "share of test examples with the right label"),
        ("ECE", value("summary.ece", summary.ece), "mean gap between confidence and accuracy over 20 bins; 0 is ideal"),
        ("NLL", value("summary.nll", summary.nll), "mean of −log p(right label), in nats; punishes sure mistakes"),
        (
            "Brier score",
            value("summary.brier", summary.brier),
            "squared error of the probabilities, 0 to 2; 0 is ideal",
        ),
    ]
    if summary.rmse is not None:
        rows = [
            ("RMSE", value("summary.rmse", summary.rmse), "root mean squared error; the model's own noise is 1"),
            ("NLL", value("summary.nll", summary.nll), "mean of −log p(target), in nats; punishes sure mistakes"),
        ]
    said = "Each chain predicts with the mean over its kept samples; scores are then averaged over chains."
    return join([Html("<div>"), table(rows, ("score", "value", "meaning")), Html(f"<p>{said}</p></div>")])


def _diagram(bins: Bins) -> Html:
    full = [i for i, part in enumerate(bins.share) if part > FEW]
    count = len(bins.share)
    traces: list[dict[str, Any]] = [
        {"x": [0, 1], "y": [0, 1], "name": "perfect calibration", "mode": "lines", "line": {"color": "#8a93a0"}},
        {
            "x": [bins.confidence[i] for i in full],
            "y": [bins.observed[i] for i in full],
            "name": "predictions",
            "mode": "lines+markers",
            "line": {"color": COLORS[1]},
        },
        {
            "type": "bar",
            "x": [(i + 0.5) / count for i in range(count)],
            "y": bins.share,
            "width": 1 / count,
            "yaxis": "y2",
            "name": "share of examples",
            "marker": {"color": COLORS[0]},
        },
    ]
    layout = {
        "height": 500,
        "margin": {"l": 65, "r": 15, "t": 30, "b": 50},
        "xaxis": axis("confidence", range=[0, 1], anchor="y2"),
        "yaxis": axis("accuracy", range=[0, 1.02], domain=[0.33, 1]),
        "yaxis2": axis("share", domain=[0, 0.24], nticks=4, rangemode="tozero"),
        "legend": {**LEGEND_BELOW, "y": -0.16},
    }
    caption = (
        "Of predictions made with a confidence of 80 %, 80 % should be right: on the diagonal. Below it the model is "
        "too sure of itself, above it not sure enough. Bars: how many predictions are that confident."
    )
    return figure("reliability", traces, layout, caption)
