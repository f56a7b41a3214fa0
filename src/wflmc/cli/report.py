"""`wflmc report`: a run, a study, a sweep or the explorer as one HTML file that opens anywhere."""

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli.shared import AsJson, flag, option, print_result
from wflmc.support.errors import InputError
from wflmc.support.storage import write_text

FOLDER = "Folder of a run, a fit, a study or a sweep, as its --out named it."
EXPLORE = "Write the explorer: sliders for a plan, starting at the paper's or FOLDER's."
OUT = "FOLDER/report.html by default; explorer.html with --explore."
WANTED = "a folder that `wflmc run`, `fit`, `federate`, `reproduce` or `sweep` has written with --out"
RUN_FILES = ("summary.json", "plan.json", "trace.nc", ".checkpoint/plan.json")


def command(
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help=FOLDER)
    ] = None,
    explore: Annotated[bool, flag("--explore", EXPLORE)] = False,
    out: Annotated[str | None, option("FILE.html", OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that opens offline: the results of a run or a study, or an explorer of plans.

    Example: wflmc report --explore --out explorer.html
    """
    source = None if folder is None else Path(folder).expanduser()
    if source is None and not explore:
        raise InputError("FOLDER", None, f"{WANTED}, unless there is --explore")
    if source is not None and not source.is_dir():
        raise InputError("FOLDER", folder, WANTED)
    usual = (
        Path("explorer.html") if explore or source is None else source / "report.html"
    )
    target = usual if out is None else Path(out).expanduser()
    _check_target(target)
    write_text(
        target,
        render_explorer(source) if explore or source is None else render_folder(source),
    )
    print_result(
        {"file": str(target)}, [f"Written to {target}: open it in a browser."], as_json
    )


def _check_target(target: Path) -> None:
    """Refuse to replace anything but a page."""
    if (
        not target.parent.is_dir()
        or target.is_dir()
        or target.suffix.lower() not in (".html", ".htm")
    ):
        raise InputError(
            "--out",
            str(target),
            "a file name that ends in .html, in a folder that exists",
        )
    if target.exists():
        begin = target.read_bytes()[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if begin and not begin.startswith((b"<!doctype html", b"<html")):
            raise InputError(
                "--out",
                str(target),
                "a new file, or a page to replace; this one holds something else",
            )


def render_folder(folder: Path) -> str:
    """Return the page of what `wflmc run`, `fit`, `federate`, `reproduce` or `sweep` has written to a folder."""
    from wflmc.apps.report import fit_page, run_page, study_page, sweep_page
    from wflmc.runs.documents import FitFile, read_document

    if any((folder / name).exists() for name in RUN_FILES):
        return run_page.render_run(folder)
    if (folder / "sweep.csv").exists():
        return sweep_page.render_sweep(folder)
    if study_page.is_study(folder):
        return study_page.render_study(folder)
    if (folder / "fit.json").exists():
        return fit_page.render_fit(
            read_document(folder / "fit.json", FitFile, "FOLDER"), folder.resolve().name
        )
    raise InputError("folder", str(folder), f"{WANTED}, and finished")


def render_explorer(folder: Path | None) -> str:
    """Return the explorer, starting at the plan of a run, or at the paper's study."""
    from wflmc.apps.report import explorer
    from wflmc.runs.documents import PlanFile, read_document

    if folder is None:
        return explorer.explorer_page(explorer.paper_study())
    return explorer.explorer_page(
        explorer.constants_of(read_document(folder / "plan.json", PlanFile, "FOLDER"))
    )
