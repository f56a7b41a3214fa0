"""The page of a run: the answer first, then the scenario, the plan, the chains, the posterior, scores and privacy."""

from __future__ import annotations

from pathlib import Path

from wflmc.report import explorer
from wflmc.report.page import Section, page
from wflmc.report.parts import Html, join, missing
from wflmc.report.run.answer import answer_section
from wflmc.report.run.chains import chains_section
from wflmc.report.run.nearest import left_out, starts_at
from wflmc.report.run.plan import plan_section
from wflmc.report.run.posterior import posterior_section
from wflmc.report.run.privacy import privacy_section
from wflmc.report.run.scores import scores_section
from wflmc.report.run.words import scenario_section
from wflmc.runs.folder import Run, read_run
from wflmc.scenario.coverage import OWNER_ONLY


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
    """Theorem 1 with sliders, from the point that comes nearest to the run's plan; or why there is none."""
    if run.plan is None:
        return [], []
    point = run.plan.constants.model_dump(exclude={"friction"} if run.plan.constants.friction is None else None)
    section = explorer.section(start := explorer.constants_of({"scenario": run.plan.scenario, "constants": point}))
    if left_out(run):
        why = missing(
            "The explorer computes Theorem 1, which is not about this run: {why}. <code>wflmc report {folder} "
            "--explore</code> makes one for the nearest setting of the theorem.",
            why=left_out(run),
            folder=run.folder,
        )
        return [section._replace(html=why)], []
    return [section._replace(html=join([starts_at(run), Html(section.html)]))], explorer.scripts(start)


def _lead(run: Run) -> str:
    made = "" if run.plan is None else f" Made with wflmc {run.plan.version}."
    took = "" if run.summary is None else f" It took {run.summary.seconds:.3g} seconds."
    command = "run" if run.summary is None or run.summary.federation is None else "federate"
    said = f"What wflmc {command} has left in this folder.{took}{made} Figures can be zoomed, and legends clicked."
    return f"{OWNER_ONLY} {said}"
