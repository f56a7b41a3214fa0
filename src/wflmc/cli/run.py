"""`wflmc run`: simulate a scenario from its plan to its files."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli import shared
from wflmc.cli.shared import flag, option
from wflmc.support.errors import renamed_keys
from wflmc.support.notices import NoticeCode
from wflmc.support.progress import progress_bar
from wflmc.support.storage import output_folder

REPLICAS = (
    "Chains are replicas for evaluation: ε is that of one chain, and publishing "
    "several adds up."
)


def command(
    scenario: Annotated[
        str | None, typer.Argument(help="Scenario file (TOML), or model (Python).")
    ] = None,
    plan: Annotated[
        str | None,
        option("PATH", "Run this plan: plan.npz, plan.json, or their folder."),
    ] = None,
    out: Annotated[
        str | None,
        option(
            "DIR",
            "Folder for trace.nc, plan.npz, plan.json, summary.json, scenario.toml.",
        ),
    ] = None,
    overrides: shared.Overrides = None,
    memory: shared.Memory = None,
    ledger: Annotated[
        str | None,
        option("FILE", "Spend from this ledger; DIR/ledger.jsonl by default."),
    ] = None,
    resume: Annotated[
        str | None,
        option("DIR", "Go on with this folder's run, stopped or (--more) finished."),
    ] = None,
    more: Annotated[
        int | None,
        option("N", "With --resume: N more rounds from what is left to spend."),
    ] = None,
    keep_burn_in: Annotated[
        bool, flag("--keep-burn-in", "Also write burn-in's samples (warmup_posterior).")
    ] = False,
    as_json: shared.AsJson = False,
) -> None:
    """Plan a scenario, sample its chains and evaluate them.

    SCENARIO may be a Python file whose function `build` returns the posterior of a
    model of your own. This executes the file, as does posterior.model =
    "FILE.py:FUNCTION" in a scenario.

    A run with --out that is stopped loses nothing: the same command, or --resume DIR,
    goes on with it. `wflmc advise DIR` says which setting would make it better.

    Example: wflmc run scenario.toml --out results
    """
    from wflmc.apps.report import run_figures
    from wflmc.runs.documents import SIMULATED
    from wflmc.runs.execution import RunRequest, run_scenario

    shared.cache_compilations()
    limit = shared.parse_bytes(memory)
    request = RunRequest(
        scenario, plan, out, overrides, limit, ledger, resume, more, keep_burn_in
    )
    writing: AbstractContextManager[Path | None] = nullcontext()
    if resume is not None:
        writing = output_folder(resume, "--resume")
    elif out is not None:
        writing = output_folder(out, "--out")
    option_names = {"ledger": "--ledger"} if ledger else {}
    with writing as folder, renamed_keys(option_names):
        settled, summary, evaluation, files = run_scenario(
            request, folder, progress_bar, shared.note
        )
        files += run_figures.draw_scores(evaluation, settled, folder)
    warnings = summary["warnings"]
    if not as_json:
        # That the run is simulated stands below its results, not among the warnings.
        pairs = zip(summary["warning_codes"], warnings, strict=True)
        warnings = [warning for code, warning in pairs if code != NoticeCode.SIMULATED]
    shared.warn(warnings)
    lines = [str(evaluation), SIMULATED.text, REPLICAS]
    if files:
        names = ", ".join(path.name for path in files)
        written = f"Written to {files[0].parent}: {names}"
        lines = [summary["owner_only"], *lines, written]
    shared.print_result(summary, lines, as_json)
