"""`wflmc report`: a run, a study or the explorer as one HTML file that opens anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli.shared import AsJson, flag, option, print_json
from wflmc.errors import InputError
from wflmc.storage import write_text

FOLDER = "Folder of a run, a study or a sweep, as its --out named it."
EXPLORE = "Write the explorer: sliders for a plan, starting at the paper's or FOLDER's."
OUT = "FOLDER/report.html by default; explorer.html with --explore."


def command(
    folder: Annotated[str | None, typer.Argument(metavar="[FOLDER]", help=FOLDER)] = None,
    explore: Annotated[bool, flag("--explore", EXPLORE)] = False,
    out: Annotated[str | None, option("FILE.html", OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that opens offline: the results of a run or a study, or an explorer of plans.

    Example: wflmc report --explore --out explorer.html
    """
    if folder is None and not explore:
        raise InputError("FOLDER", None, "the folder of a run or a study, or --explore without one")
    source = None if folder is None else Path(folder).expanduser()
    if source is not None and not source.is_dir():
        allowed = "a folder that `wflmc run`, `federate`, `reproduce` or `sweep` has written with --out"
        raise InputError("FOLDER", folder, allowed)
    if out is not None:
        target = Path(out).expanduser()
    elif explore or source is None:
        target = Path("explorer.html")
    else:
        target = source / "report.html"
    _check_target(target)
    write_text(target, _page(source, explore))
    if as_json:
        print_json({"file": str(target)})
    else:
        print(f"Written to {target}: open it in a browser.")


def _check_target(target: Path) -> None:
    """Refuse to replace anything but a page."""
    if not target.parent.is_dir() or target.is_dir():
        raise InputError("--out", str(target), "a file name in a folder that exists")
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
    """Return the page as HTML."""
    from wflmc.report import explorer
    from wflmc.report.pages import render_folder
    from wflmc.runs.documents import PlanFile, read_document

    if source is None:
        return explorer.explorer_page(explorer.paper_study())
    if not explore:
        return render_folder(source)
    plan = read_document(source / "plan.json", PlanFile, "FOLDER")
    return explorer.explorer_page(explorer.constants_of(plan))
