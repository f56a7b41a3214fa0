"""`wflmc report`: a run, a study or the explorer as one HTML file that opens anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wflmc.cli.shared import AsJson, print_json
from wflmc.errors import InputError
from wflmc.storage import write_text

if TYPE_CHECKING:
    from wflmc.report.explorer import Constants


def command(
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help="Of a run or a study, as --out of those commands named it.")
    ] = None,
    explore: Annotated[
        bool,
        typer.Option("--explore", help="Write the explorer: sliders for a plan, started at the paper's or FOLDER's."),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE.html", help="FOLDER/report.html by default; explorer.html with --explore."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that opens offline: what a run or a study has found, or an explorer of plans.

    Example: wflmc report --explore --out explorer.html
    """
    file = report_command(folder, explore, out)
    if as_json:
        print_json({"file": str(file)})
    else:
        print(f"Written to {file}: open it in a browser.")


def report_command(folder: str | None, explore: bool, out: str | None) -> Path:
    """Write the page; the file."""
    if folder is None and not explore:
        raise InputError("FOLDER", None, "the folder of a run or a study, or --explore without one")
    source = None if folder is None else Path(folder).expanduser()
    if source is not None and not source.is_dir():
        allowed = "a folder that `wflmc run`, `federate`, `reproduce` or `sweep` has written with --out"
        raise InputError("FOLDER", folder, allowed)
    name = "explorer.html" if explore else "report.html"
    target = Path(out).expanduser() if out is not None else Path(name) if explore or source is None else source / name
    if not target.parent.is_dir() or target.is_dir():
        raise InputError("--out", out, "a file name in a folder that exists")
    _refuse_other_files(target)
    write_text(target, _page(source, explore))
    return target


def _refuse_other_files(target: Path) -> None:
    """A page may take the place of a page, never of data."""
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError("--out", str(target), "a name that ends in .html")
    if not target.exists():
        return
    try:
        with target.open("rb") as file:
            begin = file.read(200).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    except OSError as error:
        raise InputError("--out", str(target), f"a file that can be written ({error.strerror})") from None
    if begin and not begin.startswith((b"<!doctype html", b"<html")):
        raise InputError("--out", str(target), "a new file, or an HTML page to replace; this one holds something else")


def _page(source: Path | None, explore: bool) -> str:
    if explore:
        from wflmc.report import explorer

        return explorer.explorer_page(explorer.paper_study() if source is None else _point(source))
    from wflmc.report.describe import describe

    assert source is not None
    return describe(source)


def _point(run: Path) -> Constants:
    """Where the plan of a run is."""
    from wflmc.report.explorer import constants_of

    wanted = "the folder of a run: --explore starts at the point of its plan.json"
    try:
        document = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError("FOLDER", str(run), wanted) from None
    if not isinstance(document, dict):
        raise InputError("FOLDER", str(run), wanted)
    return constants_of(document)
