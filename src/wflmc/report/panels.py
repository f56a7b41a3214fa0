"""Pictures of the measured studies: panels side by side, curves with bands of two standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wflmc.evaluation import Reliability
from wflmc.report.figures import STYLES, save_figure
from wflmc.studies import Row, Tables


class Panel(NamedTuple):
    """One set of axes: which table, and how to show it."""

    table: str
    title: str
    y_label: str
    log_y: bool = False


class Layout(NamedTuple):
    """A picture: its panels and what they share."""

    title: str
    x_label: str
    panels: tuple[Panel, ...]
    log_x: bool = False
    same_y: bool = False
    own_legends: bool = False
    """Panels whose curves are not the same ones."""


def _distance_panels(name: str) -> tuple[Panel, ...]:
    return (
        Panel(name, "estimated from chains", "worst W2² after burn-in", log_y=True),
        Panel(f"{name}_exact", "exact law (no clipping, no Monte Carlo)", "", log_y=True),
    )


LAYOUTS = {
    "fig6": Layout("W2² to the posterior against SNR", "SNR (dB)", _distance_panels("fig6"), same_y=True),
    "fig7": Layout(
        "W2² to the posterior against burn-in, 30 dB", "rounds of burn-in S_b", _distance_panels("fig7"), same_y=True
    ),
    "fig8": Layout(
        "MNIST test set against SNR",
        "SNR (dB)",
        (
            Panel("fig8", "expected calibration error", "ECE (20 disjoint bins)", log_y=True),
            Panel("fig8_accuracy", "accuracy", "accuracy"),
            Panel("fig8_nll", "negative log-likelihood", "NLL (nats)", log_y=True),
        ),
    ),
    "beyond": Layout(
        "Past the paper: its schemes and ours",
        "SNR (dB)",
        (
            Panel("beyond_w2", "figure 6's setting", "W2², worst after burn-in (exact law)", log_y=True),
            Panel("beyond", "figure 8's setting", "ECE (20 disjoint bins)", log_y=True),
            Panel("beyond_accuracy", "figure 8's setting", "accuracy"),
        ),
        own_legends=True,
    ),
    "heterogeneity": Layout(
        "Unlike devices and clipping, MNIST, 30 dB, optimized power",
        "clipping threshold ℓ",
        (
            Panel("heterogeneity_accuracy", "accuracy", "accuracy"),
            Panel("heterogeneity", "expected calibration error", "ECE (20 disjoint bins)"),
            Panel("heterogeneity_clip_rate", "gradients clipped after burn-in", "share of gradients"),
        ),
        log_x=True,
    ),
}
_PARTITION_LABELS = {
    "blocks": "alike (40 of each class)",
    "dirichlet:1": "Dirichlet, A = 1",
    "dirichlet:0.1": "Dirichlet, A = 0.1",
    "by-label": "one class each",
}
# The same colours, markers and dashes in the same order, whatever the curves are.
_LOOKS = [{key: value for key, value in style.items() if key != "label"} for style in STYLES.values()]
_LOOKS += [
    {"color": "#56B4E9", "marker": "P", "linestyle": (0, (4, 1, 1, 1))},
    {"color": "#7F6000", "marker": "*", "linestyle": (0, (2, 1))},
]


def draw_panels(name: str, tables: Tables, about: str, path: Path) -> list[Path]:
    """The picture of a measured study; returns the files written (.png and .svg)."""
    from matplotlib.figure import Figure

    layout = LAYOUTS[name]
    figure = Figure(figsize=(1.2 + 4.6 * len(layout.panels), 4.6), layout="constrained")
    figure.suptitle(f"{layout.title}\n{about.replace('$', chr(92) + '$')}", fontsize=11)
    every = figure.subplots(1, len(layout.panels), sharey=layout.same_y)
    for axes, panel in zip(np.atleast_1d(every), layout.panels, strict=True):
        _draw(axes, tables[panel.table])
        if f"{panel.table}_floor" in tables:
            _draw_floor(axes, tables[f"{panel.table}_floor"])
        axes.set(title=panel.title, xlabel=layout.x_label, ylabel=panel.y_label)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3, which="both")
        axes.tick_params(labelleft=True)
        if panel.log_y:
            axes.set_yscale("log")
        if layout.log_x:
            ticks = sorted({row.x for row in tables[panel.table]})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.minorticks_off()
    if layout.own_legends:
        for axes in np.atleast_1d(every):
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=8, handlelength=3.5)
    else:
        handles, labels = np.atleast_1d(every)[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, handlelength=3.5)
    return save_figure(figure, path)


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    """One line per scheme, with a band of two standard errors on both sides."""
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    for rank, scheme in enumerate(schemes):
        own = [row for row in rows if row.scheme == scheme and row.y is not None]
        style = STYLES.get(scheme) or {**_LOOKS[rank % len(_LOOKS)], "label": _PARTITION_LABELS.get(scheme, scheme)}
        x, y = np.array([row.x for row in own]), np.array([row.y for row in own], dtype=float)
        error = np.array([row.y_se or 0.0 for row in own])
        # Curves coincide in places: later ones are thinner, and markers are hollow.
        width = max(0.9, 3.2 - 0.45 * rank)
        axes.plot(x, y, linewidth=width, markersize=5.5, fillstyle="none", **style)
        if error.any():
            low = np.maximum(y - 2 * error, 0.3 * y)  # stays on a logarithmic scale
            axes.fill_between(x, low, y + 2 * error, color=style["color"], alpha=0.12, linewidth=0)


def _draw_floor(axes: Any, rows: Sequence[Row]) -> None:
    """What the estimator gives for perfect samples: nothing below it can be told apart."""
    label = "floor of the estimator (perfect samples)"
    x, y = [row.x for row in rows], [row.y for row in rows]
    axes.plot(x, y, color="0.35", linewidth=1.8, linestyle=(0, (1, 1)), label=label)


def draw_reliability(found: Reliability, about: str, path: Path) -> list[Path]:
    """Confidence against accuracy, bin by bin, over all chains."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 5.4), layout="constrained")
    figure.suptitle(f"Reliability on the test set\n{about.replace('$', chr(92) + '$')}", fontsize=11)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    full = found.share > 1e-3  # a bin of a few examples says nothing
    upper.plot([0, 1], [0, 1], color="0.5", linewidth=1, label="perfect calibration")
    upper.plot(found.confidence[full], found.observed[full], marker="o", color="#D55E00", label="mean over chains")
    upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    upper.legend(fontsize=8)
    edges = np.linspace(0, 1, found.share.size + 1)
    lower.bar(edges[:-1], found.share, width=np.diff(edges), align="edge", color="#0072B2", edgecolor="white")
    lower.set(xlabel="confidence", ylabel="share of examples")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    return save_figure(figure, path)
