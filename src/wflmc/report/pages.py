"""One page for a folder: of a run, of a study, or of a sweep."""

from __future__ import annotations

from pathlib import Path

from wflmc.errors import InputError
from wflmc.report.run_page import render_run
from wflmc.report.study_page import is_study, render_study
from wflmc.report.sweep_page import render_sweep

RUN_FILES = ("summary.json", "plan.json", "trace.nc", ".checkpoint/plan.json")


def render_folder(folder: Path) -> str:
    """Return the page of what `wflmc run`, `reproduce` or `sweep` has written to a folder, as one HTML file."""
    if any((folder / name).exists() for name in RUN_FILES):
        return render_run(folder)
    if (folder / "sweep.csv").exists():
        return render_sweep(folder)
    if is_study(folder):
        return render_study(folder)
    wanted = "a folder that `wflmc run`, `federate`, `reproduce` or `sweep` has written with --out, and finished"
    raise InputError("folder", str(folder), wanted)
