"""The figures of a study, for pictures and for its page.

The page of the paper's figures has the paper's statements beside ours too.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup
from pydantic import BaseModel

from wflmc.apps.report.figure import (
    CURVE_LOOKS,
    LIMIT_LOOKS,
    Axis,
    Band,
    CurveLook,
    Figure,
    Line,
    Note,
    Panel,
)
from wflmc.apps.report.matplotlib_pictures import draw_picture
from wflmc.apps.report.plotly_figures import draw
from wflmc.apps.report.tables import read_rows, write_csv
from wflmc.apps.report.templates import PageSection, render, render_page
from wflmc.apps.report.text import CONTRADICTS, ablation, uncertainty, verdict
from wflmc.apps.studies.paper.fig2_to_fig5 import FIGURES
from wflmc.apps.studies.study import Claim, Row
from wflmc.planning.solvers.closed_form import DP, LMC, POWER
from wflmc.runs.documents import read_document
from wflmc.support.storage import write_text


class FigureLabels(NamedTuple):
    """What a figure is called, and its x axis."""

    title: str
    x: str


class PanelLabels(NamedTuple):
    """What the panel of a table is called, and its y axis."""

    title: str
    y: str
    log: bool = False


class SharedPoint(NamedTuple):
    """The point of the map of regimes where the edges of two limits meet."""

    snr_db: float
    step_size: float


PAPER_SCHEMES = ("optimized", "equal", "no-dp", "noiseless-dp", "noiseless", "sbfl")
"""Schemes that look the same in all figures, in the order of `CURVE_LOOKS`."""
SCHEME_NAMES = {
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
"""What figures call the schemes of tables; others are called by their own names."""
LEAGUE_SCHEMES = {
    "ours": "posterior sampling, private",
    "descent": "descent, private (point estimate)",
    "posterior": "the posterior: unclipped, no promise",
}
"""The schemes of the league that its picture shows."""
SCORE_NAMES = {
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
"""What pages call the numbers of further tables, by the end of the table's name."""
MEASURED_FIGURES = {
    "fig6": FigureLabels("W2² to the posterior against SNR", "SNR (dB)"),
    "fig7": FigureLabels(
        "W2² to the posterior against burn-in, 30 dB", "rounds of burn-in S_b"
    ),
    "fig8": FigureLabels("MNIST test set against SNR", "SNR (dB)"),
    "beyond": FigureLabels("Past the paper: its schemes and ours", "SNR (dB)"),
    "heterogeneity": FigureLabels(
        "Unlike devices and clipping, MNIST, 30 dB, optimized power",
        "clipping threshold ℓ",
    ),
    "record": FigureLabels(
        "What hiding one example instead of a device buys", "ε (δ = 0.01, replace)"
    ),
    "league": FigureLabels(
        "Private posteriors of images, over the air",
        "ε (δ = 1e-5 per image, add-remove)",
    ),
}
"""The figures that chains are run for."""
FIGURE_LABELS = {
    name: FigureLabels(study.title, study.x_label) for name, study in FIGURES.items()
} | MEASURED_FIGURES
"""All figures but the second, which is a map."""
ECE = "ECE (20 disjoint bins)"
WORST_W2 = "worst W2² after burn-in"
EXACT_LAW = "exact law (no clipping, no Monte Carlo)"
PANEL_LABELS = dict.fromkeys(
    FIGURES, PanelLabels("", "bound on W2² (as printed in the paper)", log=True)
) | {
    "fig6": PanelLabels("estimated from chains", WORST_W2, log=True),
    "fig7": PanelLabels("estimated from chains", WORST_W2, log=True),
    "fig6_exact": PanelLabels(EXACT_LAW, WORST_W2, log=True),
    "fig7_exact": PanelLabels(EXACT_LAW, WORST_W2, log=True),
    "fig8": PanelLabels("expected calibration error", ECE, log=True),
    "fig8_accuracy": PanelLabels("accuracy", "accuracy"),
    "fig8_nll": PanelLabels("negative log-likelihood", "NLL (nats)", log=True),
    "beyond_w2": PanelLabels(
        "figure 6's setting", "W2², worst after burn-in (exact law)", log=True
    ),
    "beyond": PanelLabels("figure 8's setting", ECE, log=True),
    "beyond_accuracy": PanelLabels("figure 8's setting", "accuracy"),
    "heterogeneity_accuracy": PanelLabels("accuracy", "accuracy"),
    "heterogeneity": PanelLabels("expected calibration error", ECE),
    "heterogeneity_clip_rate": PanelLabels(
        "gradients clipped after burn-in", "share of gradients"
    ),
    "league": PanelLabels("accuracy", "accuracy"),
    "league_ece": PanelLabels("calibration error", ECE, log=True),
    "record_budget": PanelLabels("privacy budget", "budget for Σ 2(αℓ)²/N0", log=True),
    "record": PanelLabels(
        "distance to the posterior", "exact W2², worst after burn-in", log=True
    ),
}
"""The panels of all figures by the table that they show, in their order."""
STUDY_NAMES = ("fig2", *FIGURE_LABELS)
"""The figures that a folder may have, in the order of the page."""
LOG_X_FIGURES = ("heterogeneity", "league")
"""Figures whose x axis is logarithmic."""
SAME_Y_FIGURES = ("fig6", "fig7")
"""Figures whose panels share the scale of y."""
CLAIM_MARKS = {"holds": "✓", "differs": "✗", CONTRADICTS: "!"}
"""The symbol of every verdict on a claim."""
WIDEST_CURVE = 3.2
"""Width of the first curve of a panel, in points."""
CURVE_WIDTH_STEP = 0.45
"""By how much every further curve is thinner: they coincide in places."""
THINNEST_CURVE = 0.9
"""In points."""
FLOOR_COLOR = "#555555"
"""Of the estimator's floor."""
MAP_MARGIN = 1.3
"""Height of the map of regimes over its highest edge."""

Tables = Mapping[str, list[Row]]
"""Rows by the name of their table."""


def write_study(folder: Path, name: str, tables: Tables, subtitle: str) -> list[Path]:
    """Write the tables of a study and draw its picture.

    Args:
        folder: where `TABLE.csv`, `NAME.png` and `NAME.svg` are written; of the study
            `beyond` also `ablation.md`.
        name: of the study, such as `fig6`.
        tables: what was measured.
        subtitle: the second line of the picture's title.

    Returns:
        The pictures, and the ablation's file.
    """
    for stem, rows in tables.items():
        write_csv(folder / f"{stem}.csv", Row._fields, rows)
    figure = _picture(name, tables, subtitle)
    written = draw_picture(figure, folder / f"{name}.png", folder / f"{name}.svg")
    if name == "beyond":
        path = folder / "ablation.md"
        write_text(path, ablation(tables))
        written.append(path)
    return written


def _picture(name: str, tables: Tables, subtitle: str) -> Figure:
    """Return the figure of any study."""
    if name == "fig2":
        return regimes(tables[name], subtitle)
    return study_figure(name, tables, subtitle)


def study_figure(name: str, tables: Tables, subtitle: str = "") -> Figure:
    """Show the tables of a study, a panel each.

    Panels whose tables are missing are left out; the league has a panel for each data
    set. Where there is an estimate of W2² from chains, its floor for perfect samples is
    drawn too.

    Args:
        name: of the study; any but `fig2`, which is a map (`regimes`).
        tables: what was measured.
        subtitle: the second line of the picture's title.

    Returns:
        Panels side by side; the tables that no panel shows are left to the page.
    """
    labels = FIGURE_LABELS[name]
    panels = []
    for key, panel_labels in PANEL_LABELS.items():
        if _figure_of(key) != name or key not in tables:
            continue
        y = Axis(panel_labels.y, panel_labels.log)
        floor = _floor(tables.get(f"{key}_floor", ()))
        table = tables[key]
        parts = _league_parts(table) if name == "league" else {"": table}
        for prefix, rows in parts.items():
            title = f"{prefix}{panel_labels.title}"
            panels.append(Panel([*curves(rows), *floor], y, title, key))
    return Figure(
        panels,
        Axis(labels.x, log=name in LOG_X_FIGURES),
        f"{labels.title}\n{subtitle}",
        same_y=name in SAME_Y_FIGURES,
        shared_legend=len(panels) > 1 and name != "beyond",
    )


def _league_parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows that the league's picture shows, by the start of their title.

    Schemes of the league's tables are called `DATA, SCHEME`.
    """
    parts: dict[str, list[Row]] = {}
    for row in rows:
        data, _, scheme = row.scheme.partition(", ")
        if scheme in LEAGUE_SCHEMES:
            renamed = row._replace(scheme=LEAGUE_SCHEMES[scheme])
            parts.setdefault(f"{data}: ", []).append(renamed)
    return parts


def curves(rows: Sequence[Row]) -> Iterator[Line]:
    """Draw one curve per scheme, in the order of the rows.

    The paper's schemes look the same in all figures. Later curves are thinner, as
    curves coincide in places. Rows without a number are left out.

    Args:
        rows: of one table; x may differ between schemes.

    Yields:
        The curves, with error bars where there are standard errors.
    """
    schemes = dict.fromkeys(row.scheme for row in rows)
    for rank, scheme in enumerate(schemes):
        look = _curve_look(scheme, rank)
        measured = [row for row in rows if row.scheme == scheme and row.y is not None]
        x = [row.x for row in measured]
        y = [row.y for row in measured]
        errors = [row.y_se for row in measured]
        name = SCHEME_NAMES.get(scheme, scheme)
        width = max(THINNEST_CURVE, WIDEST_CURVE - CURVE_WIDTH_STEP * rank)
        shown_errors = errors if any(errors) else None
        line = Line(x, y, name, look.color, width=width, error=shown_errors)
        yield replace(line, dash=look.dash, marker=look.marker)


def _curve_look(scheme: str, rank: int) -> CurveLook:
    """Return the look of a scheme: its own, or that of its rank among the curves."""
    if scheme in PAPER_SCHEMES:
        return CURVE_LOOKS[PAPER_SCHEMES.index(scheme)]
    return CURVE_LOOKS[rank % len(CURVE_LOOKS)]


def _floor(rows: Sequence[Row]) -> list[Line]:
    """Return what the estimator gives for perfect samples, if that is known.

    Nothing below it can be told apart.
    """
    if not rows:
        return []
    x = [row.x for row in rows]
    y = [row.y for row in rows]
    name = "floor of the estimator (perfect samples)"
    return [Line(x, y, name, FLOOR_COLOR, ":", width=2)]


Edge = dict[float, float]
"""The step size at the edge of a regime, by the SNR in dB."""


def regimes(rows: Sequence[Row], subtitle: str = "") -> Figure:
    """Show figure 2: which limit of Theorem 1 binds, over SNR and step size.

    Below the edge of `lmc-limited`, channel noise is no more than Langevin sampling
    needs. Above it power limits the gain up to some SNR, and privacy beyond; where
    their edges meet between two rows, the point is worked out.

    Args:
        rows: of fig2.csv: edges as step sizes y over the SNR x, by regime.
        subtitle: the second line of the picture's title.

    Returns:
        A map with a name in every area; without edges, an empty one.
    """
    edges = {
        name: {row.x: row.y for row in rows if row.scheme == name and row.y is not None}
        for name in (LMC, POWER, DP)
    }
    shared = _shared_point(edges[POWER], edges[DP])
    if shared is not None:
        edges = {
            name: _with_point(edge, shared.snr_db, shared.step_size)
            for name, edge in edges.items()
        }
    top = MAP_MARGIN * max(edges[LMC].values(), default=1.0)
    bands = []
    notes = []
    for name, edge in edges.items():
        if not edge:
            continue
        band = _regime_band(name, edge, top)
        bands.append(band)
        notes.append(_band_note(band))
    step_axis = Axis("step size η", range=(0.0, top))
    ends = (min(edges[LMC]), max(edges[LMC])) if edges[LMC] else None
    caption = (
        "Below the edge, channel noise is no more than Langevin sampling needs; above, "
        "power or privacy limits."
    )
    return Figure(
        [Panel(bands, step_axis, key="fig2", notes=notes)],
        Axis("SNR = P/(m N0) (dB)", range=ends),
        f"Regimes of Theorem 1\n{subtitle}",
        caption,
        legend=False,
    )


def _shared_point(power: Edge, privacy: Edge) -> SharedPoint | None:
    """Return where the edges of power and privacy meet, between two rows.

    The edge of power is proportional to the SNR, that of privacy is constant.
    """
    if not power or not privacy:
        return None
    last_power = max(power)
    first_privacy = min(privacy)
    step_size = privacy[first_privacy]
    gain_db = 10 * math.log10(step_size / power[last_power])
    snr_db = min(max(last_power + gain_db, last_power), first_privacy)
    return SharedPoint(snr_db, step_size)


def _with_point(edge: Edge, snr_db: float, step_size: float) -> Edge:
    """Return an edge with one more point, in the order of the SNR."""
    return dict(sorted([*edge.items(), (snr_db, step_size)]))


def _regime_band(name: str, edge: Edge, top: float) -> Band:
    """Return the area of a regime: below its edge for `lmc-limited`, else above."""
    snr = list(edge)
    steps = list(edge.values())
    low = steps
    high = [top] * len(snr)
    if name == LMC:
        low = [0.0] * len(snr)
        high = steps
    look = LIMIT_LOOKS[name]
    return Band(snr, low, high, name, look.color, 0.45, hatch=look.hatch)


def _band_note(band: Band) -> Note:
    """Return the name of a regime in the middle of its area."""
    middle = len(band.x) // 2
    x = float(band.x[middle] or 0.0)
    low = float(band.low[middle] or 0.0)
    high = float(band.high[middle] or 0.0)
    y = 0.5 * (low + high)
    return Note(x, y, band.name)


class ClaimsFile(BaseModel):
    """claims.json."""

    data: str
    claims: list[Claim]


def is_study(folder: Path) -> bool:
    """Decide whether a folder has the claims or the tables of a study.

    Args:
        folder: that may be one of `wflmc reproduce`.

    Returns:
        Whether there is a claims.json, or a CSV file whose name begins with that of a
        figure; their content is not read.
    """
    if (folder / "claims.json").exists():
        return True
    return any(_figure_of(path.stem) for path in folder.glob("*.csv"))


def render_study(folder: Path) -> str:
    """Render the page of a study: the paper's statements, then every figure.

    Tables that no figure shows are listed below the figure that they belong to. A study
    that was stopped has no statements yet.

    Args:
        folder: as `wflmc reproduce` has written it.

    Returns:
        One HTML file.

    Raises:
        InputError: claims.json or a table is damaged.
    """
    path = folder / "claims.json"
    claims = read_document(path, ClaimsFile, "report") if path.exists() else None
    tables = {
        path.stem: read_rows(path)
        for path in sorted(folder.glob("*.csv"))
        if _figure_of(path.stem)
    }
    present = {_figure_of(table) for table in tables}
    names = [name for name in STUDY_NAMES if name in present]
    statements = _statements(claims, names)
    sections = [PageSection("claims", "The paper's statements", statements)]
    for name in names:
        of_figure = {
            table: rows for table, rows in tables.items() if _figure_of(table) == name
        }
        html = _figure_section(name, of_figure)
        sections.append(PageSection(name, _section_title(name), html))
    command = ["wflmc", "reproduce", *names]
    if claims is not None and _is_own_data(claims.data):
        command += ["--data", "FILE"]
    command += ["--out", str(folder)]
    lead = (
        f"Results of {shlex.join(command)}. Repeating this command reuses what has "
        "been measured. Figures can be zoomed, and legends clicked."
    )
    return render_page(f"Study {folder.resolve().name}", lead, sections)


def _is_own_data(data: str) -> bool:
    """Return whether the data of a study came from a file of the user."""
    return bool(data) and "synthetic" not in data and data != "MNIST"


def _section_title(name: str) -> str:
    """Return the heading of a figure."""
    if name.startswith("fig"):
        return name.replace("fig", "Figure ", 1)
    return name.capitalize()


def _figure_of(table: str) -> str | None:
    """Return the figure of a table: the longest name that the table's begins with."""
    matching = [name for name in STUDY_NAMES if f"{table}_".startswith(f"{name}_")]
    return max(matching, key=len, default=None)


def _statements(claims: ClaimsFile | None, names: Sequence[str]) -> Markup:
    """Render the paper's statements beside ours, or why there are none."""
    statements = [] if claims is None else claims.claims
    verdicts = [verdict(claim.holds, claim.contradiction) for claim in statements]
    return render(
        "study_claims.html",
        claims=claims,
        verdicts=verdicts,
        marks=CLAIM_MARKS,
        contradicts=CONTRADICTS,
        names=names,
    )


def _figure_section(name: str, tables: Tables) -> Markup:
    """Render the figure of a study panel by panel, then the tables that it omits."""
    if name == "fig2":
        map_figure = draw(name, regimes(tables[name]))
        return render(
            "study_figure.html",
            title="Regimes of Theorem 1",
            figures=[map_figure],
            further=None,
        )
    figure = study_figure(name, tables)
    labels = FIGURE_LABELS[name]
    panels = []
    for panel in figure.panels:
        caption = _panel_caption(panel.title or labels.title, tables[panel.key])
        # The caption has the title, and each panel its own place on the page.
        untitled = replace(panel, title="")
        alone = replace(figure, panels=[untitled], caption=caption)
        panels.append(draw(panel.key, alone))
    drawn = {panel.key for panel in figure.panels}
    further = {
        table: rows
        for table, rows in tables.items()
        if rows and table.removesuffix("_floor") not in drawn
    }
    return render(
        "study_figure.html",
        title=labels.title,
        figures=panels,
        further=_further(further, labels.x) if further else None,
    )


def _panel_caption(title: str, rows: Sequence[Row]) -> str:
    """Return what a panel shows, in sentences."""
    caption = f"{title[:1].upper()}{title[1:]}."
    if any(row.y_se for row in rows):
        caption += " Bars are two standard errors."
    return caption


class FurtherCell(NamedTuple):
    """A number of a table that no figure shows."""

    key: str
    value: float | None
    uncertainty: str


class FurtherRow(NamedTuple):
    """The numbers of a scheme at one x."""

    scheme: str
    x: str
    cells: list[FurtherCell]


def _further(tables: Tables, x_label: str) -> Markup:
    """Render tables side by side: a row for each scheme and x, a column for each."""
    all_rows = [row for rows in tables.values() for row in rows]
    points = dict.fromkeys((row.scheme, row.x) for row in all_rows)
    rows = []
    for scheme, x in points:
        cells = [
            _further_cell(name, table, scheme, x) for name, table in tables.items()
        ]
        rows.append(FurtherRow(scheme, f"{x:g}", cells))
    scores = []
    for name in tables:
        score = name.split("_", 1)[-1].removeprefix("ablation_")
        scores.append(SCORE_NAMES.get(score, score))
    return render("study_further.html", x_label=x_label, scores=scores, rows=rows)


def _further_cell(
    name: str, table: Sequence[Row], scheme: str, x: float
) -> FurtherCell:
    """Return the number of a scheme at one x; None where the table has none."""
    key = f"{name}.{scheme}.{x:g}"
    # Of several rows for one point the last counts.
    for row in reversed(table):
        if row.scheme == scheme and row.x == x:
            return FurtherCell(key, row.y, uncertainty(row))
    return FurtherCell(key, None, "")
