"""Figures of the studies, for pictures and pages: which table is shown in which panel, and how schemes look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wflmc.evaluation import Reliability
from wflmc.planning.solvers.single_sample import DP, LMC, POWER
from wflmc.report.figure import LOOKS, ORANGE, RED, SKY, YELLOW, Axis, Band, Bars, Figure, Line, Note, Panel
from wflmc.report.matplotlib_pictures import draw_picture
from wflmc.studies import FIGURES, Row, Setting

LIMIT_COLORS = {LMC: YELLOW, POWER: SKY, DP: ORANGE}
LIMIT_HATCHES = {LMC: "", POWER: "//", DP: "\\\\"}
PLACES = ("optimized", "equal", "no-dp", "noiseless-dp", "noiseless", "sbfl")
NAMES = {
    "optimized": "WFLMC, optimized power",
    "equal": "WFLMC, equal power",
    "no-dp": "WFLMC without DP constraint",
    "noiseless-dp": "noiseless LMC with DP",
    "noiseless": "noiseless LMC",
    "sbfl": "SBFL (point estimate)",
    "device, exact": "a device is hidden, exact accountant",
    "device, paper": "a device is hidden, the paper's accountant",
    "record, exact": "one example is hidden, clipped to 9",
    "blocks": "alike (40 of each class)",
    "dirichlet:1": "Dirichlet, A = 1",
    "dirichlet:0.1": "Dirichlet, A = 0.1",
    "by-label": "one class each",
}
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


class Shown(NamedTuple):
    """A table as a panel."""

    table: str
    title: str
    y_label: str
    log: bool = False


class Layout(NamedTuple):
    """The panels of a study and what they share."""

    title: str
    x_label: str
    panels: tuple[Shown, ...]
    log_x: bool = False
    own_legends: bool = False
    """Whether panels have curves of their own."""


def _distances(name: str) -> tuple[Shown, ...]:
    return (
        Shown(name, "estimated from chains", "worst W2² after burn-in", log=True),
        Shown(f"{name}_exact", "exact law (no clipping, no Monte Carlo)", "worst W2² after burn-in", log=True),
    )


LAYOUTS = {
    **{
        name: Layout(study.title, study.x_label, (Shown(name, "", "bound on W2² (as printed in the paper)", log=True),))
        for name, study in FIGURES.items()
    },
    "fig6": Layout("W2² to the posterior against SNR", "SNR (dB)", _distances("fig6")),
    "fig7": Layout("W2² to the posterior against burn-in, 30 dB", "rounds of burn-in S_b", _distances("fig7")),
    "fig8": Layout(
        "MNIST test set against SNR",
        "SNR (dB)",
        (
            Shown("fig8", "expected calibration error", "ECE (20 disjoint bins)", log=True),
            Shown("fig8_accuracy", "accuracy", "accuracy"),
            Shown("fig8_nll", "negative log-likelihood", "NLL (nats)", log=True),
        ),
    ),
    "beyond": Layout(
        "Past the paper: its schemes and ours",
        "SNR (dB)",
        (
            Shown("beyond_w2", "figure 6's setting", "W2², worst after burn-in (exact law)", log=True),
            Shown("beyond", "figure 8's setting", "ECE (20 disjoint bins)", log=True),
            Shown("beyond_accuracy", "figure 8's setting", "accuracy"),
        ),
        own_legends=True,
    ),
    "heterogeneity": Layout(
        "Unlike devices and clipping, MNIST, 30 dB, optimized power",
        "clipping threshold ℓ",
        (
            Shown("heterogeneity_accuracy", "accuracy", "accuracy"),
            Shown("heterogeneity", "expected calibration error", "ECE (20 disjoint bins)"),
            Shown("heterogeneity_clip_rate", "gradients clipped after burn-in", "share of gradients"),
        ),
        log_x=True,
    ),
    "record": Layout(
        "What hiding one example instead of a device buys",
        "ε (δ = 0.01, replace)",
        (
            Shown("record_budget", "privacy budget", "budget for Σ 2(αℓ)²/N0", log=True),
            Shown("record", "distance to the posterior", "exact W2², worst after burn-in", log=True),
        ),
    ),
}


def draw_study(name: str, tables: Mapping[str, Sequence[Row]], about: str, path: Path) -> list[Path]:
    """Draw the picture of a study with all its tables; return the files (.png and .svg)."""
    figure = study_figure(name, tables, about)
    return draw_picture(figure, path.with_suffix(".png"), path.with_suffix(".svg"))


def draw_closed_form(name: str, setting: Setting, rows: Sequence[Row], source: str, path: Path) -> list[Path]:
    """Draw the picture of one of figures 2 to 5; return the files (.png and .svg)."""
    epsilon = "" if name == "fig5" else f"ε = {setting.epsilon:g}, "
    about = f"{source}; {epsilon}δ = {setting.delta:g} (replace), {setting.burn_in} + 1 rounds"
    if name != "fig2":
        return draw_study(name, {name: rows}, about, path)
    return draw_picture(regimes(rows, about, setting), path.with_suffix(".png"), path.with_suffix(".svg"))


def study_figure(name: str, tables: Mapping[str, Sequence[Row]], about: str = "") -> Figure:
    """Return the figure of a study, with those of its panels whose tables are there."""
    layout = LAYOUTS[name]
    ticks = sorted({row.x for shown in layout.panels for row in tables.get(shown.table, ())})
    panels = []
    for table, title, label, log in layout.panels:
        if table in tables:
            floor = tables.get(f"{table}_floor", ())
            panels.append(Panel([*curves(tables[table]), *_floor(floor)], Axis(label, log), title, table))
    return Figure(
        panels,
        Axis(layout.x_label, layout.log_x, ticks=ticks if layout.log_x else None),
        f"{layout.title}\n{about}",
        same_y=name in ("fig6", "fig7"),
        shared_legend=len(panels) > 1 and not layout.own_legends,
    )


def curves(rows: Sequence[Row]) -> list[Line]:
    """Return one curve per scheme; later ones are thinner, as curves coincide in places."""
    lines = []
    for rank, scheme in enumerate(dict.fromkeys(row.scheme for row in rows)):
        place = PLACES.index(scheme) if scheme in PLACES else rank % len(LOOKS)
        chosen = [row for row in rows if row.scheme == scheme and row.y is not None]
        color, marker, dash = LOOKS[place]
        lines.append(
            Line(
                [row.x for row in chosen],
                [row.y for row in chosen],
                NAMES.get(scheme, scheme),
                color,
                dash,
                marker,
                width=max(0.9, 3.2 - 0.45 * rank),
                error=[row.y_se or 0.0 for row in chosen] if any(row.y_se for row in chosen) else None,
            )
        )
    return lines


def _floor(rows: Sequence[Row]) -> list[Line]:
    """Return what the estimator gives for perfect samples: nothing below it can be told apart."""
    x, y = [row.x for row in rows], [row.y for row in rows]
    return [Line(x, y, "floor of the estimator (perfect samples)", "#555555", ":", width=2)] if rows else []


def regimes(rows: Sequence[Row], about: str = "", setting: Setting | None = None) -> Figure:
    """Return figure 2: which limit binds, over SNR and step size."""
    edges = {
        name: {row.x: row.y for row in rows if row.scheme == name and row.y is not None} for name in (LMC, POWER, DP)
    }
    power, privacy = edges[POWER], edges[DP]
    if power and privacy:
        # Where they meet, between two rows: the edge of power is proportional to the SNR, that of privacy is constant.
        last, first = max(power), min(privacy)
        meet = min(max(last + 10 * math.log10(privacy[first] / power[last]), last), first)
        edges = {name: dict(sorted([*edge.items(), (meet, privacy[first])])) for name, edge in edges.items()}
    top = 1.3 * max(edges[LMC].values(), default=1.0) if setting is None else setting.step(0.5)
    items: list[Line | Band | Bars] = []
    notes = []
    for name, edge in edges.items():
        x, y = list(edge), list(edge.values())
        below, above = ([0.0] * len(x), y) if name == LMC else (y, [top] * len(x))
        if x:
            items.append(Band(x, below, above, name, LIMIT_COLORS[name], 0.45, hatch=LIMIT_HATCHES[name]))
            middle = len(x) // 2
            notes.append(Note(x[middle], 0.5 * (below[middle] + above[middle]), name))
    for factor, name in () if setting is None else ((0.4, "fig. 3a"), (0.13, "fig. 3b")):
        height = setting.step(factor) if setting is not None else 0.0
        items.append(Line([min(edges[LMC]), max(edges[LMC])], [height] * 2, f"step size of {name}", dash=":", width=1))
        notes.append(Note(max(edges[LMC]) - 2, height, name))
    return Figure(
        [Panel(items, Axis("step size η", range=(0.0, top)), key="fig2", notes=notes)],
        Axis("SNR = P/(m N0) (dB)", range=(min(edges[LMC]), max(edges[LMC]))),
        f"Regimes of Theorem 1\n{about}",
        "Below the edge, the channel noise is no more than Langevin sampling needs. Above it, transmit power or "
        "privacy limits the gain.",
        legend=False,
    )


def score_of(table: str) -> str:
    """Return what a table measures, by its name."""
    return SCORES.get(table.split("_", 1)[-1].removeprefix("ablation_"), table)


def draw_reliability(bins: Reliability, about: str, path: Path) -> list[Path]:
    """Draw the reliability diagram of a run; return the files (.png and .svg)."""
    figure = reliability_figure(bins.confidence, bins.observed, bins.share, about)
    return draw_picture(figure, path.with_suffix(".png"), path.with_suffix(".svg"))


def reliability_figure(confidence: Any, observed: Any, share: Any, about: str = "") -> Figure:
    """Return confidence against accuracy, bin by bin, over all chains; bins of few examples are left out."""
    count, full = len(share), [index for index, part in enumerate(share) if part > 1e-3]
    seen = Line([confidence[i] for i in full], [observed[i] for i in full], "predictions", RED, marker="o")
    ideal = Line([0, 1], [0, 1], "perfect calibration", "#8a93a0")
    centres = [(index + 0.5) / count for index in range(count)]
    return Figure(
        [
            Panel([ideal, seen], Axis("accuracy", range=(0, 1.02)), height=2),
            Panel([Bars(centres, share, "share of examples", width=1 / count)], Axis("share", zero=True), height=0.7),
        ],
        Axis("confidence", range=(0, 1)),
        f"Reliability on the test set\n{about}",
        "Of predictions made with a confidence of 80 %, 80 % should be right: on the diagonal. Below it the model is "
        "overconfident, above it underconfident. Bars show how many predictions have that confidence.",
        stacked=True,
        width=5.2,
    )
