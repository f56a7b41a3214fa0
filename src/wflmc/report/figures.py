"""Pictures of the studies: distinct in colour, in line style and in grey."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wflmc.planning.solvers.single_sample import REGIMES
from wflmc.storage import replacing, write_text
from wflmc.studies import FIGURES, Row, Setting, regime_map

# Okabe & Ito's palette, which colour-blind people can tell apart; markers and dashes carry the same information.
STYLES: dict[str, dict[str, Any]] = {
    "optimized": {"color": "#D55E00", "marker": "o", "linestyle": "-", "label": "WFLMC, optimized power"},
    "equal": {"color": "#0072B2", "marker": "s", "linestyle": "--", "label": "WFLMC, equal power"},
    "no-dp": {"color": "#009E73", "marker": "^", "linestyle": "-.", "label": "WFLMC without DP constraint"},
    "noiseless-dp": {"color": "#CC79A7", "marker": "D", "linestyle": ":", "label": "noiseless LMC with DP"},
    "noiseless": {"color": "#000000", "marker": "x", "linestyle": (0, (5, 1)), "label": "noiseless LMC"},
    "sbfl": {"color": "#E69F00", "marker": "v", "linestyle": (0, (3, 1, 1, 1)), "label": "SBFL (point estimate)"},
}


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """The tidy table of a figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    write_text(path, text.getvalue())


def _axes(title: str, about: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.text(0.5, 1.02, about, transform=axes.transAxes, ha="center", fontsize=9, color="0.3")
    return figure, axes


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Write a picture as .png and .svg, the same bytes for the same content."""
    import matplotlib

    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    # Dates and random ids would make equal figures differ.
    with matplotlib.rc_context({"svg.hashsalt": "wflmc"}):
        how: list[dict[str, Any]] = [{"dpi": 150}, {"metadata": {"Date": None}}]
        for target, options in zip(written, how, strict=True):
            with replacing(target) as file:
                figure.savefig(file, format=target.suffix[1:], **options)
    return written


def draw_figure(name: str, setting: Setting, rows: Sequence[Row], source: str, path: Path) -> list[Path]:
    """The picture of a study; returns the files written (.png and .svg)."""
    plain = source.replace("$", r"\$")  # not the start of a formula
    about = f"{plain}; ε = {setting.epsilon:g}, δ = {setting.delta:g} (replace), {setting.burn_in} + 1 rounds"
    return _draw_regimes(setting, about, path) if name == "fig2" else _draw_curves(name, rows, about, path)


def _draw_curves(name: str, rows: Sequence[Row], about: str, path: Path) -> list[Path]:
    """One line per scheme."""
    study = FIGURES[name]
    if name == "fig5":
        about = about.replace("ε = 8, ", "")
    figure, axes = _axes(f"{study.title}\n", about, study.x_label, "bound on W2² (as printed in the paper)")
    schemes = [scheme for scheme in STYLES if any(row.scheme == scheme for row in rows)]
    for rank, scheme in enumerate(schemes):
        own = [row for row in rows if row.scheme == scheme and row.y is not None]
        every = max(1, len(own) // 10)
        # Curves coincide in whole regimes: later ones are thinner, and markers are staggered.
        axes.plot(
            [row.x for row in own],
            [row.y for row in own],
            markevery=(rank * every // len(schemes), every),
            markersize=5.5,
            linewidth=3.2 - 0.5 * rank,
            fillstyle="none",
            **STYLES[scheme],
        )
    axes.set_yscale("log")
    if study.x_label.startswith("step"):
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return save_figure(figure, path)


def _draw_regimes(setting: Setting, about: str, path: Path) -> list[Path]:
    """Theorem 1's map over SNR (that is, power) and step size."""
    figure, axes = _axes("Regimes of Theorem 1\n", about, "SNR = P/(m N0) (dB)", "step size η")
    snr = np.linspace(5, 40, 351)
    total = setting.posterior.mu + setting.posterior.L
    step = np.linspace(0.002, 0.5, 250) / total
    names = regime_map(setting, snr[None, :], step[:, None])
    index = np.select([names == name for name in REGIMES], range(len(REGIMES)))
    colors, hatches = ("#F0E442", "#56B4E9", "#E69F00"), ("", "//", "\\\\")
    axes.contourf(snr, step, index, levels=[-0.5, 0.5, 1.5, 2.5], colors=colors, hatches=hatches, alpha=0.6)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
    for rank, name in enumerate(REGIMES):
        inside = np.argwhere(index == rank)
        if inside.size:
            row, column = inside.mean(0)
            axes.text(snr[int(column)], step[int(row)], name, ha="center", va="center", bbox=box)
    for factor, label in ((0.4, "fig. 3a"), (0.13, "fig. 3b")):
        axes.axhline(factor / total, color="black", linewidth=1, linestyle=":")
        axes.text(39.5, factor / total, label, ha="right", va="bottom", fontsize=8, bbox=box)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    return save_figure(figure, path)
