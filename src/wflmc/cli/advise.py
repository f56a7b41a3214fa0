"""`wflmc advise`: what keeps samples from the posterior, and what would help."""

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli import shared
from wflmc.support.errors import InputError, conflict

RUN = "Folder of a run, finished or stopped, or a scenario file."


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help=RUN)],
    overrides: shared.Overrides = None,
    as_json: shared.AsJson = False,
) -> None:
    """Say what keeps the samples of a run from the posterior, and what would help.

    Causes come worst first. Changes are tried by making plans with one setting changed,
    and named only if a forecast of their chains is better. The advice is written to
    RUN/advice.json, and `wflmc report RUN` shows it. Of a run that was stopped, and of
    a scenario file, the plan alone is looked at; for the latter nothing is written.

    Advice may look at the devices' data, which ε does not cover: it is for their owner.

    Example: wflmc advise results
    """
    from wflmc.apps.diagnosis import advice as advising

    folder = Path(run).expanduser()
    if not folder.exists():
        raise InputError("RUN", run, advising.RUN_FOLDER)
    if not folder.is_dir():
        advice = advising.advise_scenario(run, overrides)
        document = advice.model_dump(mode="json") | {"file": None}
        shared.print_result(document, advising.advice_lines(advice), as_json)
        return
    if overrides:
        why = "with the folder of a run, whose settings are decided"
        raise conflict("--set", overrides[0], why)
    advice = advising.advise_run(folder)
    path = advising.write_advice(folder, advice)
    document = advice.model_dump(mode="json") | {"file": str(path)}
    lines = advising.advice_lines(advice)
    if not advice.finished:
        lines.append(advising.FROM_PLAN_ALONE)
    lines.append(f"Written to {path}")
    shared.print_result(document, lines, as_json)
