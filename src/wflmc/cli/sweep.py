"""`wflmc sweep`: a scenario at every point of a grid, as one table."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    points_folder,
    print_json,
)
from wflmc.errors import InputError
from wflmc.progress import progress_bar
from wflmc.storage import output_folder, write_text

if TYPE_CHECKING:
    from wflmc.runs.point import Task
    from wflmc.studies.engines import Failure

Values = dict[str, str]
"""A grid point: the value of every grid key, as text."""


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
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for sweep.csv.")] = "out/sweep",
    cache: Cache = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Plan, sample and evaluate a scenario at every point of a grid, into one table.

    Finished points are cached: a sweep that was stopped continues where it stopped. Points that fail are listed in
    DIR/failed.json, do not stop the others, and make the exit code 1.

    Example: wflmc sweep scenario.toml --grid link.snr_db=0:40:5 --grid privacy.epsilon=5,10,15 --out results
    """
    from wflmc.runs import point
    from wflmc.studies import open_engine
    from wflmc.studies.cache import key_of
    from wflmc.studies.engines import Failure
    from wflmc.studies.grids import FORMS, parse_grid, points
    from wflmc.studies.study import run_tasks

    cache_compilations()
    if not grids:
        raise InputError("--grid", None, FORMS)
    axes = [parse_grid(text) for text in grids]
    where = [{axis.key: value for axis, value in zip(axes, values, strict=True)} for values in points(axes)]
    tasks = _tasks(scenario, overrides or [], where, plan_only, parse_bytes(memory))
    rows: dict[int, dict[str, Any]] = {}
    failures: dict[int, Failure] = {}
    cached = 0
    with open_engine(engine, workers, note) as compute, output_folder(out) as folder:
        finished = points_folder(cache)
        keys = [key_of({"sweep": task.identity}) for task in tasks]
        with progress_bar("points", len(tasks)) as advance:
            for index, result, was_cached in run_tasks(point.measure, tasks, keys, finished, advance, note, compute):
                if isinstance(result, Failure):
                    failures[index] = result
                else:
                    rows[index] = result
                    cached += was_cached
        write_text(folder / "sweep.csv", _table(where, rows, point.columns(plan_only)))
        _write_failures(folder / "failed.json", where, failures)
    if as_json:
        counts = {"points": len(tasks), "done": len(rows), "cached": cached, "failed": len(failures)}
        print_json({"file": str(folder / "sweep.csv"), **counts})
    else:
        print(f"{len(rows)} of {len(tasks)} points ({cached} from the cache)")
        print(f"Written to {folder / 'sweep.csv'}")
    if failures:
        note(f"{len(failures)} points failed: {folder / 'failed.json'} lists them.")
        raise typer.Exit(1)


def _tasks(
    path: str, overrides: list[str], where: Sequence[Values], plan_only: bool, memory: float | None
) -> list[Task]:
    """Return the scenario of every point, validated before anything is computed."""
    from wflmc.runs.point import Task
    from wflmc.scenario import load_scenario
    from wflmc.scenario.build import build_privacy
    from wflmc.scenario.files import file_digests

    for text in overrides:
        if text.partition("=")[0].strip() in where[0]:
            raise InputError("--set", text, "of another key: --grid gives this one its values")
    tasks: list[Task] = []
    known: dict[Any, dict[str, str]] = {}
    for values in where:
        given = [f"{key}={value}" for key, value in values.items()]
        try:
            scenario = load_scenario(path, [*overrides, *given])
            build_privacy(scenario)
            if scenario.sampler.seed == "secret" and not plan_only:
                raise InputError("sampler.seed", "secret", "a number in a sweep, whose points can be repeated")
            names = (scenario.posterior.data, scenario.link.fading, scenario.link.gains)
            if names not in known:  # large files are read once
                known[names] = file_digests(scenario)
        except InputError as error:
            if error.key in values:
                raise InputError(f"--grid {error.key}", error.given, error.allowed) from None
            if error.key == "--set" and error.given in given:
                raise InputError("--grid", error.given, error.allowed) from None
            raise
        tasks.append(Task(scenario, known[names], plan_only, memory))
    return tasks


def _table(where: Sequence[Values], rows: dict[int, dict[str, Any]], names: Sequence[str]) -> str:
    """Return the table as CSV: grid keys first; floats to the last bit, and an empty cell where there is no number."""
    from wflmc.studies.grids import unquoted

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*where[0], *names])
    for index, row in sorted(rows.items()):
        writer.writerow([*map(unquoted, where[index].values()), *(row[name] for name in names)])
    return text.getvalue()


def _write_failures(path: Path, where: Sequence[Values], failures: dict[int, Failure]) -> None:
    """Write which points failed and why, and print one line for each reason."""
    from wflmc.scenario import to_json

    if not failures:
        path.unlink(missing_ok=True)
        return
    document = [{"point": where[index], **failure._asdict()} for index, failure in sorted(failures.items())]
    write_text(path, to_json({"failed": document}))
    by_reason = defaultdict(list)
    for index, failure in sorted(failures.items()):
        by_reason[failure.reason].append(" ".join(f"{key}={value}" for key, value in where[index].items()))
    for reason, (first, *others) in by_reason.items():
        note(f"failed at {first}{f' and {len(others)} more' if others else ''}: {reason}")
