"""`wflmc sweep`: a scenario at every point of a grid, as one table."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wflmc.data import cache_folder
from wflmc.errors import InputError
from wflmc.progress import ProgressBar
from wflmc.runs.point import Task, columns, digests, measure
from wflmc.scenario import load_scenario, to_json
from wflmc.scenario.build import build_privacy
from wflmc.storage import output_folder, writable_folder, write_text
from wflmc.studies.cache import key_of
from wflmc.studies.engines import Failure, open_engine
from wflmc.studies.grids import FORMS, Grid, parse_grid, points, unquoted
from wflmc.studies.study import run_tasks

Say = Callable[[str], None]


class Request(NamedTuple):
    """What was asked for."""

    scenario: str
    grids: list[str]
    overrides: list[str]
    plan_only: bool
    engine: str
    workers: int | None
    out: str
    cache: str | None
    memory: float | None


class Point(NamedTuple):
    """The values of the grids, as texts, and what they make of the scenario."""

    values: tuple[str, ...]
    task: Task


def sweep_command(request: Request, bar: ProgressBar, say: Say) -> dict[str, Any]:
    """Compute all points and write their table; how many were done, had been kept, and failed."""
    if not request.grids:
        raise InputError("--grid", None, FORMS)
    grids = [parse_grid(text) for text in request.grids]
    asked = _points(request, grids)
    rows: dict[int, dict[str, Any]] = {}
    failures: dict[int, Failure] = {}
    cached = 0
    with open_engine(request.engine, request.workers, say) as engine, output_folder(request.out) as folder:
        cache = writable_folder(request.cache, "--cache") if request.cache else cache_folder() / "studies"
        keys = [key_of({"sweep": point.task.identity}) for point in asked]
        with bar("points", len(asked)) as advance:
            tasks = [point.task for point in asked]
            for index, result, kept in run_tasks(measure, tasks, keys, cache, advance, say, engine):
                if isinstance(result, Failure):
                    failures[index] = result
                else:
                    rows[index] = result
                    cached += kept
        file = folder / "sweep.csv"
        write_text(file, _table(grids, asked, rows, columns(request.plan_only)))
        _tell_failures(folder / "failed.json", grids, asked, failures, say)
    return {
        "file": str(file),
        "points": len(asked),
        "done": len(rows),
        "cached": cached,
        "failed": len(failures),
    }


def _points(request: Request, grids: Sequence[Grid]) -> list[Point]:
    """Every point's scenario, validated before anything is computed."""
    for text in request.overrides:
        if text.partition("=")[0].strip() in {grid.key for grid in grids}:
            raise InputError("--set", text, "of another key: --grid gives this one its values")
    asked: list[Point] = []
    read: dict[Any, dict[str, str]] = {}
    for values in points(grids):
        given = [f"{grid.key}={value}" for grid, value in zip(grids, values, strict=True)]
        try:
            scenario = load_scenario(request.scenario, [*request.overrides, *given])
            build_privacy(scenario)
            if scenario.sampler.seed == "secret" and not request.plan_only:
                raise InputError("sampler.seed", "secret", "a number in a sweep, whose points can be repeated")
            named = (scenario.posterior.data, scenario.link.fading, scenario.link.gains)
            files = read[named] = read[named] if named in read else digests(scenario)  # large ones are read once
        except InputError as error:
            if any(error.key == grid.key for grid in grids):
                raise InputError(f"--grid {error.key}", error.given, error.allowed) from None
            if error.key == "--set" and error.given in given:
                raise InputError("--grid", error.given, error.allowed) from None
            raise
        asked.append(Point(values, Task(scenario, files, request.plan_only, request.memory)))
    return asked


def _table(grids: Sequence[Grid], asked: Sequence[Point], rows: dict[int, dict[str, Any]], names: Sequence[str]) -> str:
    """The table as CSV: keys of the grids first; floats to the last bit, and an empty cell where there is no number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(grid.key for grid in grids), *names])
    for index in sorted(rows):
        shown = [unquoted(value) for value in asked[index].values]
        writer.writerow([*shown, *(_cell(rows[index][name]) for name in names)])
    return text.getvalue()


def _cell(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else repr(value)


def _tell_failures(
    path: Path, grids: Sequence[Grid], asked: Sequence[Point], failures: dict[int, Failure], say: Say
) -> None:
    """Write down which points failed and why, and say it in as many lines as there are reasons."""
    if not failures:
        path.unlink(missing_ok=True)
        return
    document = []
    for index, failure in sorted(failures.items()):
        given = {grid.key: value for grid, value in zip(grids, asked[index].values, strict=True)}
        document.append({"point": given, **failure._asdict()})
    write_text(path, to_json({"failed": document}))
    for reason, count in Counter(failures[index].reason for index in sorted(failures)).items():
        first = next(entry["point"] for entry in document if entry["reason"] == reason)
        where = " ".join(f"{key}={value}" for key, value in first.items())
        more = "" if count == 1 else f" and {count - 1} more"
        say(f"failed at {where}{more}: {reason}")
