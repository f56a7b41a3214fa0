"""The figures of a study, for pictures and for its page, which has the paper's statements beside ours too."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from wflmc.apps.report.blocks import (
    Html,
    PageSection,
    data,
    fold,
    grid,
    join,
    missing,
    page,
    paragraph,
    table,
    words,
)
from wflmc.apps.report.figure import (
    LIMIT_LOOKS,
    LOOKS,
    Axis,
    Band,
    Figure,
    Item,
    Line,
    Panel,
)
from wflmc.apps.report.matplotlib_pictures import draw_picture
from wflmc.apps.report.plotly_figures import draw
from wflmc.apps.report.tables import read_rows, write_csv
from wflmc.apps.report.text import CONTRADICTS, ablation, uncertainty, verdict
from wflmc.apps.studies.paper.fig2_to_fig5 import FIGURES
from wflmc.apps.studies.study import Claim, Row
from wflmc.planning.solvers.closed_form import DP, LMC, POWER
from wflmc.runs.documents import read_document
from wflmc.support.storage import write_text

PLACES = ("optimized", "equal", "no-dp", "noiseless-dp", "noiseless", "sbfl")
WORDS = words("study_words.toml")
TITLES = {
    name: (study.title, study.x_label) for name, study in FIGURES.items()
} | WORDS["figures"]
"""Title and label of the x axis of every figure but the second."""
PANELS = dict.fromkeys(FIGURES, WORDS["closed_form"]) | WORDS["panels"]
"""Title, label of the y axis, and whether it is logarithmic, of the panel that shows a table."""
KNOWN = ("fig2", *TITLES)
COUNTS = "{all} statements, tested on {data}: {n[0]} hold, {n[1]} differ, and in {n[2]} the paper contradicts itself."
MARKS = {"holds": "✓", "differs": "✗", CONTRADICTS: "!"}

Tables = Mapping[str, list[Row]]


def write_study(folder: Path, name: str, tables: Tables, about: str) -> list[Path]:
    """Write the tables of a study and draw its picture; return the pictures, and the ablation's table."""
    for stem, rows in tables.items():
        write_csv(folder / f"{stem}.csv", Row._fields, rows)
    figure = (
        regimes(tables[name], about)
        if name == "fig2"
        else study_figure(name, tables, about)
    )
    written = draw_picture(figure, folder / f"{name}.png", folder / f"{name}.svg")
    if name != "beyond":
        return written
    write_text(folder / "ablation.md", ablation(tables))
    return [*written, folder / "ablation.md"]


def study_figure(name: str, tables: Tables, about: str = "") -> Figure:
    """Return the figure of a study, with those of its panels whose tables are there."""
    (title, x_label), panels = TITLES[name], []
    for key, (about_it, *axis) in PANELS.items():
        if _figure_of(key) == name and key in tables:
            parts = _by_data(tables[key]) if name == "league" else {"": tables[key]}
            for whose, rows in parts.items():
                lines = [*curves(rows), *_floor(tables.get(f"{key}_floor", ()))]
                panels.append(Panel(lines, Axis(*axis), f"{whose}{about_it}", key))
    shared = len(panels) > 1 and name != "beyond"
    x = Axis(x_label, log=name in ("heterogeneity", "league"))
    return Figure(
        panels,
        x,
        f"{title}\n{about}",
        same_y=name in ("fig6", "fig7"),
        shared_legend=shared,
    )


def _by_data(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each data set of the league that its picture shows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        title, _, kind = row.scheme.partition(", ")
        if kind in WORDS["league"]:
            found.setdefault(f"{title}: ", []).append(
                row._replace(scheme=WORDS["league"][kind])
            )
    return found


def curves(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield one curve per scheme; later ones are thinner, as curves coincide in places."""
    for rank, scheme in enumerate(dict.fromkeys(row.scheme for row in rows)):
        color, marker, dash = LOOKS[
            PLACES.index(scheme) if scheme in PLACES else rank % len(LOOKS)
        ]
        chosen = [row for row in rows if row.scheme == scheme and row.y is not None]
        x, y, error = (
            [getattr(row, name) for row in chosen] for name in ("x", "y", "y_se")
        )
        width, name = max(0.9, 3.2 - 0.45 * rank), WORDS["schemes"].get(scheme, scheme)
        yield Line(
            x, y, name, color, dash, marker, width, error=error if any(error) else None
        )


def _floor(rows: Sequence[Row]) -> list[Line]:
    """Return what the estimator gives for perfect samples: nothing below it can be told apart."""
    x, y = [row.x for row in rows], [row.y for row in rows]
    return (
        [
            Line(
                x,
                y,
                "floor of the estimator (perfect samples)",
                "#555555",
                ":",
                width=2,
            )
        ]
        if rows
        else []
    )


def regimes(rows: Sequence[Row], about: str = "") -> Figure:
    """Return figure 2: which limit binds, over SNR and step size."""
    known = [row for row in rows if row.y is not None]
    edges = {
        name: {row.x: row.y or 0.0 for row in known if row.scheme == name}
        for name in (LMC, POWER, DP)
    }
    power, privacy = edges[POWER], edges[DP]
    if power and privacy:
        # Where they meet, between two rows: the edge of power is proportional to the SNR, that of privacy is constant.
        last, first = max(power), min(privacy)
        meet = min(
            max(last + 10 * math.log10(privacy[first] / power[last]), last), first
        )
        edges = {
            name: dict(sorted([*edge.items(), (meet, privacy[first])]))
            for name, edge in edges.items()
        }
    top = 1.3 * max(edges[LMC].values(), default=1.0)
    items, notes = list[Item](), list[tuple[float, float, str]]()
    for name, edge in edges.items():
        x, y = list(edge), list(edge.values())
        below, above = ([0.0] * len(x), y) if name == LMC else (y, [top] * len(x))
        if x:
            items.append(
                Band(
                    x,
                    below,
                    above,
                    name,
                    LIMIT_LOOKS[name][0],
                    0.45,
                    hatch=LIMIT_LOOKS[name][1],
                )
            )
            middle = len(x) // 2
            notes.append((x[middle], 0.5 * (below[middle] + above[middle]), name))
    caption = "Below the edge, channel noise is no more than Langevin sampling needs; above, power or privacy limits."
    panel = Panel(items, Axis("step size η", range=(0.0, top)), key="fig2", notes=notes)
    snr = Axis("SNR = P/(m N0) (dB)", range=(min(edges[LMC]), max(edges[LMC])))
    return Figure([panel], snr, f"Regimes of Theorem 1\n{about}", caption, legend=False)


class ClaimsFile(BaseModel):
    """claims.json."""

    data: str
    claims: list[Claim]


def is_study(folder: Path) -> bool:
    """Return whether a folder has the claims or the tables of a study."""
    return (folder / "claims.json").exists() or any(
        _figure_of(path.stem) for path in folder.glob("*.csv")
    )


def render_study(folder: Path) -> str:
    """Return the page of the study in a folder."""
    path = folder / "claims.json"
    claims = read_document(path, ClaimsFile, "report") if path.exists() else None
    tables = {
        path.stem: read_rows(path)
        for path in sorted(folder.glob("*.csv"))
        if _figure_of(path.stem)
    }
    names = [
        name for name in KNOWN if any(_figure_of(table) == name for table in tables)
    ]
    sections = [
        PageSection(
            "claims",
            "The paper's statements",
            _statements(claims, ", ".join(names) or "no figure"),
        )
    ]
    for name in names:
        title = (
            name.replace("fig", "Figure ", 1)
            if name.startswith("fig")
            else name.capitalize()
        )
        shown = {
            table: rows for table, rows in tables.items() if _figure_of(table) == name
        }
        sections.append(PageSection(name, title, _figures(name, shown)))
    own_data = (
        claims is not None
        and claims.data
        and "synthetic" not in claims.data
        and claims.data != "MNIST"
    )
    command = f"wflmc reproduce {' '.join(names)}{' --data FILE' if own_data else ''} --out {folder}"
    lead = f"Results of {command}, which reuses what it has measured. Figures can be zoomed, and legends clicked."
    return page(f"Study {folder.resolve().name}", lead, sections)


def _figure_of(table: str) -> str | None:
    """Return the figure that a table belongs to: the longest name that it begins with."""
    return max(
        (name for name in KNOWN if f"{table}_".startswith(f"{name}_")),
        key=len,
        default=None,
    )


def _statements(claims: ClaimsFile | None, listed: str) -> Html:
    if claims is None:
        return missing(
            "claims.json is missing: the study is not finished, or was stopped before its end."
        )
    if not claims.claims:
        return missing(
            "The paper makes no statement about {listed}: this goes past the paper.",
            listed=listed,
        )
    verdicts = [verdict(claim.holds, claim.contradiction) for claim in claims.claims]
    rows = []
    for i, (claim, name) in enumerate(zip(claims.claims, verdicts, strict=True)):
        numbers = {"paper": claim.paper, "ours": claim.ours}
        cells = [
            v if isinstance(v, str) else data(f"claims.{i}.{key}", v, 4)
            for key, v in numbers.items()
        ]
        rows.append(
            (claim.figure, claim.statement, *cells, f"{MARKS[name]} {name}", claim.note)
        )
    counts = [verdicts.count(name) for name in MARKS]
    note = paragraph(
        COUNTS, all=len(rows), data=claims.data or "unknown data", n=counts
    )
    return join(
        [
            note,
            grid(
                [
                    table(
                        rows, ("figure", "statement", "paper", "ours", "verdict", "why")
                    )
                ],
                "wide",
            ),
        ]
    )


def _figures(name: str, tables: Tables) -> Html:
    """Return the figure of a study panel by panel, then the tables that it does not show."""
    if name == "fig2":
        return join(
            [paragraph("Regimes of Theorem 1."), draw(name, regimes(tables[name]))]
        )
    figure, (title, x_label), parts = study_figure(name, tables), TITLES[name], []
    for panel in figure.panels:
        errors = (
            " Bars are two standard errors."
            if any(row.y_se for row in tables[panel.key])
            else ""
        )
        about = panel.title or title
        caption = f"{about[:1].upper()}{about[1:]}.{errors}"
        parts.append(
            draw(
                panel.key,
                replace(figure, panels=[replace(panel, title="")], caption=caption),
            )
        )
    drawn = {panel.key for panel in figure.panels}
    rest = {
        t: rows
        for t, rows in tables.items()
        if rows and t.removesuffix("_floor") not in drawn
    }
    shown: list[object] = [
        paragraph("{title}.", title=title),
        grid(parts) if len(parts) > 1 else join(parts),
    ]
    return join([*shown, _further(rest, x_label)] if rest else shown)


def _further(tables: Tables, x_label: str) -> Html:
    """Return tables side by side: a row for each scheme and x, a column for each table."""
    cells = {
        (row.scheme, row.x, name): row for name, rows in tables.items() for row in rows
    }

    def cell(scheme: str, x: float, name: str) -> Html:
        found = cells.get((scheme, x, name), Row("", scheme, x, None))
        return join([data(f"{name}.{scheme}.{x:g}", found.y), uncertainty(found)])

    places = dict.fromkeys(key[:2] for key in cells)
    rows = [
        [scheme, f"{x:g}", *(cell(scheme, x, name) for name in tables)]
        for scheme, x in places
    ]
    scores = [name.split("_", 1)[-1].removeprefix("ablation_") for name in tables]
    head = ("scheme", x_label, *(WORDS["scores"].get(score, score) for score in scores))
    note = paragraph("Means with their standard errors.")
    return fold(
        "Further measurements", join([grid([table(rows, head)], "numbers"), note])
    )
