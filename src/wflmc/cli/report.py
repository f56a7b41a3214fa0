"""`wflmc report`: a run, a study, a sweep or the explorer as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli.shared import AsJson, flag, option, print_result
from wflmc.support.errors import InputError
from wflmc.support.storage import write_text

FOLDER = "Folder of a run, a fit, a study or a sweep, as its --out named it."
EXPLORE = "Write the explorer: sliders for a plan, starting at the paper's or FOLDER's."
OUT = "FOLDER/report.html by default; explorer.html with --explore."
RESULT_FOLDER = (
    "a folder that `wflmc run`, `fit`, `federate`, `reproduce` or `sweep` has written "
    "with --out"
)
PAGE_NAME = "a file name that ends in .html, in a folder that exists"
PAGE_SUFFIXES = (".html", ".htm")
PAGE_STARTS = (b"<!doctype html", b"<html")
"""What a page begins with, in lower case, after a byte order mark and spaces."""
RUN_FILES = ("summary.json", "plan.json", "trace.nc", ".checkpoint/plan.json")


def command(
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help=FOLDER)
    ] = None,
    explore: Annotated[bool, flag("--explore", EXPLORE)] = False,
    out: Annotated[str | None, option("FILE.html", OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that opens offline: the results of a run or a study, or an
    explorer of plans.

    Example: wflmc report --explore --out explorer.html
    """
    source = None if folder is None else Path(folder).expanduser()
    if source is None and not explore:
        raise InputError("FOLDER", None, f"{RESULT_FOLDER}, unless there is --explore")
    if source is not None and not source.is_dir():
        raise InputError("FOLDER", folder, RESULT_FOLDER)
    target = Path("explorer.html")
    if source is not None and not explore:
        target = source / "report.html"
    if out is not None:
        target = Path(out).expanduser()
    _check_target(target)
    write_text(target, _render(source, explore))
    line = f"Written to {target}: open it in a browser."
    print_result({"file": str(target)}, [line], as_json)


def _render(folder: Path | None, explore: bool) -> str:
    """Return the explorer, or the page of the results in a folder."""
    if explore or folder is None:
        return render_explorer(folder)
    return render_folder(folder)


def _check_target(target: Path) -> None:
    """Refuse to replace anything but a page."""
    is_page_name = target.suffix.lower() in PAGE_SUFFIXES
    if not target.parent.is_dir() or target.is_dir() or not is_page_name:
        raise InputError("--out", str(target), PAGE_NAME)
    if target.exists():
        start = target.read_bytes()[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if start and not start.startswith(PAGE_STARTS):
            requirement = (
                "a new file, or a page to replace; this one holds something else"
            )
            raise InputError("--out", str(target), requirement)


def render_folder(folder: Path) -> str:
    """Return the page of the results in a folder.

    They are those that `wflmc run`, `fit`, `federate`, `reproduce` or `sweep` has
    written; the files in the folder decide which.

    Args:
        folder: an existing one.

    Returns:
        HTML that opens offline.

    Raises:
        InputError: there are no finished results, or a file is damaged.
    """
    from wflmc.apps.report import fit_page, run_page, study_page, sweep_page
    from wflmc.runs.documents import FitFile, read_document

    if any((folder / name).exists() for name in RUN_FILES):
        return run_page.render_run(folder)
    if (folder / "sweep.csv").exists():
        return sweep_page.render_sweep(folder)
    if study_page.is_study(folder):
        return study_page.render_study(folder)
    if (folder / "fit.json").exists():
        fit = read_document(folder / "fit.json", FitFile, "FOLDER")
        return fit_page.render_fit(fit, folder.resolve().name)
    raise InputError("folder", str(folder), f"{RESULT_FOLDER}, and finished")


def render_explorer(folder: Path | None) -> str:
    """Return the page of the explorer, which has sliders for a plan.

    Args:
        folder: of a run, whose plan the sliders start at; None for the paper's study.

    Returns:
        HTML that opens offline.

    Raises:
        InputError: the folder has no readable plan.json.
    """
    from wflmc.apps.report import explorer
    from wflmc.runs.documents import PlanFile, read_document

    if folder is None:
        return explorer.explorer_page(explorer.paper_study())
    plan = read_document(folder / "plan.json", PlanFile, "FOLDER")
    return explorer.explorer_page(explorer.constants_of(plan))
