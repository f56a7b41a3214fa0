"""`wflmc run`: simulate a scenario from its plan to its files."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wflmc.cli.shared import AsJson, Memory, Overrides, cache_compilations, note, parse_bytes, print_json, warn
from wflmc.progress import progress_bar
from wflmc.storage import output_folder

if TYPE_CHECKING:
    from wflmc.evaluation import Evaluation
    from wflmc.scenario import Scenario


def command(
    scenario: Annotated[str | None, typer.Argument(help="Scenario file (TOML).")] = None,
    saved_plan: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="Run this saved plan (JSON of `wflmc plan`) instead.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Folder for trace.nc, plan.json, summary.json, scenario.toml."),
    ] = None,
    overrides: Overrides = None,
    memory: Memory = None,
    ledger: Annotated[
        str | None,
        typer.Option("--ledger", metavar="FILE", help="Spend from this ledger; DIR/ledger.jsonl by default."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="DIR", help="Go on with the run in this folder, stopped or (--more) finished."
        ),
    ] = None,
    more: Annotated[
        int | None, typer.Option("--more", metavar="N", help="With --resume: N more rounds from what is left to spend.")
    ] = None,
    keep_burn_in: Annotated[
        bool, typer.Option("--keep-burn-in", help="Also write the samples of burn-in (warmup_posterior).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a scenario, sample its chains and evaluate them.

    A run with --out that is stopped loses nothing: the same command, or --resume DIR, goes on with it.

    Example: wflmc run scenario.toml --out results
    """
    from wflmc.report.text import diagnosis_lines
    from wflmc.runs.execution import Request, run_scenario

    cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(scenario, saved_plan, out, overrides, limit, ledger, resume, more, keep_burn_in)
    with _folder(out, resume) as folder:
        result = run_scenario(request, folder, progress_bar, note)
        files = [*result.files, *draw_scores(result.evaluation, result.scenario, folder)]
    summary = result.summary
    if as_json:
        warn(summary["warnings"])
        print_json(summary)
        return
    *warnings, simulated = summary["warnings"]
    warn(warnings)
    if files:
        print(summary["owner_only"])
    print("\n".join([str(result.evaluation), *diagnosis_lines(summary["diagnosis"])]))
    print(simulated)
    print("Chains are replicas for evaluation: ε is that of one chain, and publishing several adds up.")
    if files:
        print(f"Written to {files[0].parent}: {', '.join(path.name for path in files)}")


def _folder(out: str | None, resume: str | None) -> AbstractContextManager[Path | None]:
    """Return the folder to write to, for this process alone."""
    if resume is None:
        return nullcontext() if out is None else output_folder(out)
    return output_folder(resume, "--resume") if Path(resume).expanduser().is_dir() else nullcontext()


def draw_scores(evaluation: Evaluation, scenario: Scenario, folder: Path | None) -> list[Path]:
    """Draw the reliability diagram of a classifier into the folder of its run; return the files."""
    import numpy as np

    from wflmc.evaluation import Calibration, reliability
    from wflmc.report.run_figures import draw_reliability

    if folder is None or not isinstance(evaluation.scores, Calibration):
        return []
    ends = np.unique([np.min(scenario.link.snr_db), np.max(scenario.link.snr_db)])
    title = f"{scenario.policy.power}, {' to '.join(f'{end:g}' for end in ends)} dB"
    return draw_reliability(reliability(evaluation.scores), title, folder / "reliability.png")
