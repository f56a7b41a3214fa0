"""The page of a study: the paper's statements beside ours, and every figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ValidationError

from wflmc.errors import InputError
from wflmc.report.blocks import Html, Section, boxes, grid, join, missing, page, paragraph, table, text, value
from wflmc.report.figure import Axis, Figure, Panel
from wflmc.report.plotly_figures import draw
from wflmc.report.study_figures import LAYOUTS, curves, regimes, score_of, study_figure
from wflmc.report.tables import read_rows
from wflmc.report.text import CONTRADICTS, verdict
from wflmc.studies import Row

KNOWN = ("fig2", *LAYOUTS)
MARKS = {"holds": "✓", "differs": "✗", CONTRADICTS: "!"}

Tables = Mapping[str, list[Row]]


class ClaimLine(BaseModel):
    """One claim of claims.json."""

    figure: str
    statement: str
    paper: float | str
    ours: float | str | None
    holds: bool
    contradiction: bool = False
    note: str = ""


class ClaimsFile(BaseModel):
    """claims.json."""

    data: str
    claims: list[ClaimLine]


def is_study(folder: Path) -> bool:
    """Return whether a folder has the claims or the tables of a study."""
    return (folder / "claims.json").exists() or any(_figure_of(path.stem) for path in folder.glob("*.csv"))


def render_study(folder: Path) -> str:
    """Return the page of the study in a folder."""
    claims = _read_claims(folder / "claims.json")
    tables = {path.stem: read_rows(path) for path in sorted(folder.glob("*.csv")) if _figure_of(path.stem)}
    names = [name for name in KNOWN if any(_figure_of(table) == name for table in tables)]
    listed = ", ".join(names) or "no figure"
    sections = [Section("claims", "The paper's statements", _statements(claims, listed))]
    for name in names:
        title = name.replace("fig", "Figure ", 1) if name.startswith("fig") else name.capitalize()
        shown = {table: rows for table, rows in tables.items() if _figure_of(table) == name}
        sections.append(Section(name, title, _figures(name, shown)))
    sections.append(Section("again", "Make it again", _command(folder, claims, names)))
    lead = f"Results of wflmc reproduce in this folder: {listed}. Figures can be zoomed, and legends clicked."
    return page(f"Study {folder.resolve().name}", lead, sections)


def _figure_of(table: str) -> str | None:
    """Return the figure that a table belongs to: the longest name that it begins with."""
    return max((name for name in KNOWN if f"{table}_".startswith(f"{name}_")), key=len, default=None)


def _read_claims(path: Path) -> ClaimsFile | None:
    try:
        return ClaimsFile.model_validate_json(path.read_bytes()) if path.exists() else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError("report", str(path), f"as wflmc wrote it ({where}: {first['msg']})") from None


def _statements(claims: ClaimsFile | None, listed: str) -> Html:
    if claims is None:
        return missing("claims.json is missing: the study is not finished, or was stopped before its end.")
    if not claims.claims:
        return missing("The paper makes no statement about {listed}: this goes past the paper.", listed=listed)
    verdicts = [verdict(claim.holds, claim.contradiction) for claim in claims.claims]
    counts = [
        ("statements of the paper", str(len(verdicts)), f"tested on {claims.data or 'unknown data'}"),
        ("hold", str(verdicts.count("holds")), "within the tolerance of each"),
        ("differ", str(verdicts.count("differs")), "here; the reason is beside each"),
        ("contradict the paper itself", str(verdicts.count(CONTRADICTS)), "its own theorem or numbers"),
    ]
    rows = []
    for index, (claim, name) in enumerate(zip(claims.claims, verdicts, strict=True)):
        paper, ours = (
            given if isinstance(given, str) else value(f"claims.{index}.{key}", given, 4)
            for key, given in (("paper", claim.paper), ("ours", claim.ours))
        )
        rows.append((claim.figure, claim.statement, paper, ours, f"{MARKS[name]} {name}", claim.note))
    head = ("figure", "statement", "paper", "ours", "verdict", "why")
    return join([boxes(counts), grid([table(rows, head)], "wide")])


def _figures(name: str, tables: Tables) -> Html:
    """Return the figure of a study panel by panel, then the tables that it does not show."""
    if name == "fig2":
        return join([paragraph("Regimes of Theorem 1."), draw(name, regimes(tables[name]))])
    figure = study_figure(name, tables)
    layout, drawn = LAYOUTS[name], {panel.key for panel in figure.panels}
    parts = []
    for panel in figure.panels:
        errors = " Bars are two standard errors." if any(row.y_se for row in tables[panel.key]) else ""
        said = f"{panel.title[:1].upper()}{panel.title[1:]}." if panel.title else f"{layout.title}."
        parts.append(draw(panel.key, replace(figure, panels=[replace(panel, title="")], caption=said + errors)))
    shown: list[object] = [paragraph("{about}.", about=layout.title), grid(parts) if len(parts) > 1 else join(parts)]
    rest = {t: rows for t, rows in tables.items() if rows and t not in drawn and t.removesuffix("_floor") not in drawn}
    if rest:
        single = {table: rows for table, rows in rest.items() if len({row.x for row in rows}) == 1}
        shown += [Html("<h3>Further measurements</h3>"), _one_x(single, layout.x_label) if single else ""]
        shown.append(grid(_rest(t, rows, layout.x_label) for t, rows in rest.items() if t not in single))
    return join(shown)


def _rest(name: str, rows: list[Row], x_label: str) -> Html:
    panel = Panel(curves(rows), Axis(score_of(name)))
    return draw(name, Figure([panel], Axis(x_label), caption=f"{name}.csv. Bars are two standard errors."))


def _one_x(tables: Tables, x_label: str) -> Html:
    """Return tables of one x side by side: a row for each scheme, a column for each table."""
    cells = {(name, row.scheme): row for name, rows in tables.items() for row in rows}
    schemes = dict.fromkeys(scheme for _, scheme in cells)
    x = next(iter(cells.values())).x
    rows = [(scheme, *(_measured(name, cells.get((name, scheme))) for name in tables)) for scheme in schemes]
    head = (f"at {x_label} = {x:g}", *map(score_of, tables))
    return join([grid([table(rows, head)], "numbers"), paragraph("Means with their standard errors.")])


def _measured(name: str, row: Row | None) -> object:
    if row is None or row.y is None:
        return "–"
    error = f" ± {row.y_se:.1g}" if row.y_se and row.y_se > 1e-6 * abs(row.y) else ""
    return join([value(f"{name}.{row.scheme}", row.y), error])


def _command(folder: Path, claims: ClaimsFile | None, names: list[str]) -> Html:
    own_data = claims is not None and claims.data and "synthetic" not in claims.data and claims.data != "MNIST"
    return text(
        "<pre>wflmc reproduce {names}{data} --out {folder}</pre><p>{where}<code>--experiments N</code> sets how often "
        "measured figures are repeated; finished measurements are reused.</p>",
        names=" ".join(names),
        data=" --data FILE" if own_data else "",
        folder=folder,
        where="FILE is the data set named above. " if own_data else "",
    )
