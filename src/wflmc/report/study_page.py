"""The page of a study: the paper's statements beside ours, and every figure as a drawing one can zoom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from wflmc.errors import InputError
from wflmc.report.page import Section, page
from wflmc.report.panels import LAYOUTS
from wflmc.report.parts import Html, facts, grid, join, missing, paragraph, table, text, value
from wflmc.report.study_figures import (
    curves_figure,
    one_x_table,
    panel_figures,
    record_figures,
    regimes_figure,
    rest_figures,
)
from wflmc.report.tables import read_rows
from wflmc.report.text import verdict
from wflmc.studies import FIGURES, NAMES, Claim, Row

EXTRA = ("record",)
KNOWN = (*NAMES, *LAYOUTS, *EXTRA)
TITLES = {"fig2": "Regimes of Theorem 1", "record": "What hiding one example instead of a device buys"}
MARKS = {"holds": "✓ holds", "differs": "✗ differs", "the paper contradicts itself": "! the paper contradicts itself"}

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
    data: str = ""

    @property
    def verdict(self) -> str:
        """holds, differs, or the paper contradicts itself."""
        return verdict(Claim(self.figure, self.statement, self.paper, self.ours, self.holds, self.contradiction))


class ClaimsFile(BaseModel):
    """claims.json."""

    data: str
    claims: list[ClaimLine]


def is_study(folder: Path) -> bool:
    """Whether a folder has the claims or the tables of a study."""
    return (folder / "claims.json").exists() or any(_figure_of(path.stem) for path in folder.glob("*.csv"))


def study_page(folder: Path) -> str:
    """The whole page of the study in a folder."""
    claims = _claims(folder / "claims.json")
    tables = {path.stem: read_rows(path) for path in sorted(folder.glob("*.csv")) if _figure_of(path.stem)}
    names = [name for name in KNOWN if any(_figure_of(table) == name for table in tables)]
    sections = [Section("claims", "The paper's statements", _statements(claims, names))]
    sections += [Section(name, _title(name), _drawn(name, tables)) for name in names]
    sections.append(Section("again", "Make it again", _command(folder, claims, names)))
    lead = f"What wflmc reproduce has left in this folder: {_list(names)}. Figures can be zoomed, and legends clicked."
    return page(f"Study {folder.resolve().name}", lead, sections)


def _list(names: list[str]) -> str:
    return ", ".join(names) or "no figure"


def _figure_of(table: str) -> str | None:
    """The figure that a table belongs to: the longest name that it begins with."""
    found = [name for name in KNOWN if table == name or table.startswith(f"{name}_")]
    return max(found, key=len) if found else None


def _claims(path: Path) -> ClaimsFile | None:
    if not path.exists():
        return None
    try:
        return ClaimsFile.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError("report", str(path), f"as wflmc wrote it ({where}: {first['msg']})") from None
    except (OSError, ValueError, RecursionError):
        raise InputError("report", str(path), "as wflmc wrote it (it is not JSON)") from None


def _title(name: str) -> str:
    return name.replace("fig", "Figure ", 1) if name.startswith("fig") else name.capitalize()


def _statements(claims: ClaimsFile | None, names: list[str]) -> Html:
    if claims is None:
        return missing("claims.json is missing: the study is not finished, or was stopped before its end.")
    if not claims.claims:
        extra = _list(names)
        return missing(
            "The paper states nothing that {extra} could be held against: it goes past the paper.", extra=extra
        )
    counts = {name: sum(claim.verdict == name for claim in claims.claims) for name in MARKS}
    boxes: list[tuple[str, object, object]] = [
        ("statements of the paper", str(len(claims.claims)), f"tried on {claims.data or 'unknown data'}"),
        ("hold", str(counts["holds"]), "within the tolerance of each"),
        ("differ", str(counts["differs"]), "here; the reason is beside each"),
        ("contradict the paper itself", str(counts["the paper contradicts itself"]), "its own theorem or numbers"),
    ]
    rows = [
        (
            claim.figure,
            claim.statement,
            _cell(f"claims.{index}.paper", claim.paper),
            _cell(f"claims.{index}.ours", claim.ours),
            MARKS[claim.verdict],
            claim.note,
        )
        for index, claim in enumerate(claims.claims)
    ]
    return join([facts(boxes), grid([table(rows, ("figure", "statement", "paper", "ours", "verdict", "why"))], "wide")])


def _cell(key: str, found: float | str | None) -> object:
    return found if isinstance(found, str) else value(key, found, 4)


def _drawn(name: str, tables: Tables) -> Html:
    own = {table: rows for table, rows in tables.items() if _figure_of(table) == name}
    drawn: list[Html] = []
    if name == "fig2":
        drawn, used = [regimes_figure(own[name])] if name in own else [], {name}
    elif name in FIGURES:
        drawn, used = [curves_figure(name, own[name])] if name in own else [], {name}
    elif name == "record":
        drawn, used = record_figures(own)
    else:
        drawn, used = panel_figures(LAYOUTS[name], own)
    x_label = LAYOUTS[name].x_label if name in LAYOUTS else "x"
    rest = {table: rows for table, rows in own.items() if table not in used and rows}
    single = {table: rows for table, rows in rest.items() if len({row.x for row in rows}) == 1}
    about = FIGURES[name].title if name in FIGURES else LAYOUTS[name].title if name in LAYOUTS else TITLES[name]
    parts: list[Any] = [paragraph("{about}.", about=about), grid(drawn) if len(drawn) > 1 else join(drawn)]
    if rest:
        parts.append(text("<h3>Measured besides</h3>"))
        parts += [one_x_table(single, x_label)] if single else []
        parts.append(grid(rest_figures({table: rest[table] for table in rest if table not in single}, x_label)))
    return join(parts)


def _command(folder: Path, claims: ClaimsFile | None, names: list[str]) -> Html:
    data = "" if claims is None else claims.data
    given = " --data FILE" if data and "synthetic" not in data and data != "MNIST" else ""
    command = text(
        "<pre>wflmc reproduce {names}{given} --out {folder}</pre>", names=" ".join(names), given=given, folder=folder
    )
    said = "FILE is the data set named above. " if given else ""
    return join(
        [
            command,
            paragraph(
                "{said}<code>--experiments N</code> sets how often measured figures are repeated; what is already "
                "measured is not measured again.",
                said=said,
            ),
        ]
    )
