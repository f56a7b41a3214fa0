"""`wflmc sweep`: a scenario at every point of a grid, as one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli.shared import (
    AsJson,
    Cache,
    EngineName,
    Memory,
    Overrides,
    ScenarioPath,
    Workers,
    cache_compilations,
    note,
    parse_bytes,
    print_json,
)
from wflmc.progress import progress_bar


def command(
    scenario: ScenarioPath,
    grids: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=VALUES",
            help="FIRST:LAST:STEP, both ends included, or v1,v2,...; may repeat, the first key changes slowest.",
        ),
    ] = None,
    overrides: Overrides = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Plan every point and run no chains.")] = False,
    engine: EngineName = "local",
    workers: Workers = None,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for sweep.csv.")] = "out/sweep",
    cache: Cache = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Plan, sample and evaluate a scenario at every point of a grid, into one table.

    Finished points are kept: a sweep that was stopped goes on where it was. Points that fail are listed in
    DIR/failed.json, do not stop the others, and make the exit code 1.

    Example: wflmc sweep scenario.toml --grid link.snr_db=0:40:5 --grid privacy.epsilon=5,10,15 --out results
    """
    from wflmc.cli.grid import Request, sweep_command

    cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(scenario, grids or [], overrides or [], plan_only, engine, workers, out, cache, limit)
    document = sweep_command(request, progress_bar, note)
    if as_json:
        print_json(document)
    else:
        print(f"{document['done']} of {document['points']} points ({document['cached']} from the cache)")
        print(f"Written to {document['file']}")
    if document["failed"]:
        note(f"{document['failed']} points failed: {Path(out) / 'failed.json'} has them all.")
        raise typer.Exit(1)
