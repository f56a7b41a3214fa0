"""The page of a run: the answer first, then the scenario, the plan, the chains, the posterior, scores and privacy."""

from __future__ import annotations

from pathlib import Path

from wflmc.report import explorer
from wflmc.report.page import Section, page
from wflmc.report.run.answer import answer_section
from wflmc.report.run.chains import chains_section
from wflmc.report.run.files import Run, read_run
from wflmc.report.run.plan import plan_section
from wflmc.report.run.posterior import posterior_section
from wflmc.report.run.privacy import privacy_section
from wflmc.report.run.scores import scores_section
from wflmc.report.run.words import scenario_section


def run_page(folder: Path) -> str:
    """The whole page of the run in a folder."""
    run = read_run(folder)
    sections = [
        Section("answer", "In short", answer_section(run)),
        Section("setting", "The scenario", scenario_section(run)),
        Section("plan", "The plan", plan_section(run)),
        Section("chains", "The chains", chains_section(run)),
        Section("samples", "Samples and posterior", posterior_section(run)),
        Section("scores", "Predictions", scores_section(run)),
        Section("spent", "Privacy", privacy_section(run)),
    ]
    more, scripts = _explorer(run)
    return page(f"Run {folder.resolve().name}", _lead(run), [*sections, *more], scripts)


def _explorer(run: Run) -> tuple[list[Section], list[str]]:
    """Theorem 1 with sliders, from the point of the run's plan."""
    if run.plan is None:
        return [], []
    point = run.plan.constants.model_dump(exclude={"friction"} if run.plan.constants.friction is None else None)
    start = explorer.constants_of({"scenario": run.plan.scenario, "constants": point})
    return [explorer.section(start)], explorer.scripts(start)


def _lead(run: Run) -> str:
    made = "" if run.plan is None else f" Made with wflmc {run.plan.version}."
    took = "" if run.summary is None else f" It took {run.summary.seconds:.3g} seconds."
    return f"What wflmc run has left in this folder.{took}{made} Figures can be zoomed, and legends clicked."
