"""One page for a folder: of a run, of a study, or of a sweep."""

from __future__ import annotations

from pathlib import Path

from wflmc.errors import InputError
from wflmc.report.run import run_page
from wflmc.report.study_page import is_study, study_page
from wflmc.report.sweep_page import sweep_page

RUN_FILES = ("summary.json", "plan.json", "trace.nc", ".checkpoint/plan.json")


def describe(folder: Path) -> str:
    """The page of what `wflmc run`, `reproduce` or `sweep` has left in a folder, as HTML that needs nothing else."""
    if any((folder / name).exists() for name in RUN_FILES):
        return run_page(folder)
    if (folder / "sweep.csv").exists():
        return sweep_page(folder)
    if is_study(folder):
        return study_page(folder)
    raise InputError(
        "folder",
        str(folder),
        "a folder that `wflmc run`, `federate`, `reproduce` or `sweep` has written with --out, and finished",
    )
