"""`wflmc sweep`: a scenario at every point of a grid, as one table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wflmc.cli import shared
from wflmc.cli.shared import flag, note, option
from wflmc.support.errors import InputError, conflict, renamed_keys
from wflmc.support.progress import progress_bar
from wflmc.support.storage import output_folder, write_text

if TYPE_CHECKING:
    from wflmc.apps.studies.engines import Engine
    from wflmc.runs.point import PointTask

GRID = (
    "FIRST:LAST:STEP, both ends included, or v1,v2,...; may repeat, the first key "
    "changes slowest."
)
Values = dict[str, str]
"""A grid point: the value of every grid key, as text."""


def command(
    scenario: shared.ScenarioPath,
    grids: Annotated[list[str] | None, option("KEY=VALUES", GRID, "--grid")] = None,
    overrides: shared.Overrides = None,
    plan_only: Annotated[
        bool, flag("--plan-only", "Plan every point and run no chains.")
    ] = False,
    engine: shared.EngineName = "local",
    workers: shared.Workers = None,
    out: Annotated[str, option("DIR", "Folder for sweep.csv.")] = "out/sweep",
    cache: shared.Cache = None,
    memory: shared.Memory = None,
    as_json: shared.AsJson = False,
) -> None:
    """Plan, sample and evaluate a scenario at every point of a grid, into one table.

    Finished points are cached: a sweep that was stopped continues where it stopped.
    Points that fail are listed in DIR/failed.json, do not stop the others, and make the
    exit code 1.

    Example: wflmc sweep scenario.toml --grid link.snr_db=0:40:5
    --grid privacy.epsilon=5,10,15 --out results
    """
    from wflmc.apps.report.tables import write_csv
    from wflmc.apps.studies.engines import open_engine
    from wflmc.apps.studies.grids import FORMS, parse_grid, points
    from wflmc.runs import point
    from wflmc.scenario.coverage import SELECTED

    shared.cache_compilations()
    if not grids or not all("." in text.partition("=")[0] for text in grids):
        raise InputError("--grid", grids, FORMS)
    axes = [parse_grid(text) for text in grids]
    axis_keys = [axis.key for axis in axes]
    grid_points = [dict(zip(axis_keys, values, strict=True)) for values in points(axes)]
    max_bytes = shared.parse_bytes(memory)
    tasks = _tasks(scenario, overrides or [], grid_points, plan_only, max_bytes)
    names = point.columns(plan_only)
    with open_engine(engine, workers, note) as compute, output_folder(out) as folder:
        finished = shared.points_folder(cache)
        results = _measure(tasks, grid_points, names, finished, compute)
        rows = results.rows
        failures = results.failures
        table_file = folder / "sweep.csv"
        failures_file = folder / "failed.json"
        sorted_rows = [row for _, row in sorted(rows.items())]
        sorted_failures = [failure for _, failure in sorted(failures.items())]
        write_csv(table_file, [*grid_points[0], *names], sorted_rows)
        _write_failures(failures_file, sorted_failures)
    is_promised = any(task.scenario.privacy.epsilon is not None for task in tasks)
    uncovered = [SELECTED] if is_promised and not plan_only else []
    document = {
        "file": str(table_file),
        "points": len(tasks),
        "done": len(rows),
        "cached": results.cached,
        "failed": len(failures),
        "not_covered": uncovered,
    }
    lines = [
        f"{len(rows)} of {len(tasks)} points ({results.cached} from the cache)",
        f"Written to {table_file}",
        *uncovered,
    ]
    shared.print_result(document, lines, as_json)
    if failures:
        note(f"{len(failures)} points failed: {failures_file} lists them.")
        raise typer.Exit(1)


@dataclass
class _Results:
    """What the points of a sweep have given, by their number."""

    rows: dict[int, list[Any]] = field(default_factory=dict)
    """Of the table: the settings of a point, and what was measured."""
    failures: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The settings of a point, and why it failed."""
    cached: int = 0
    """Points that an earlier sweep had finished."""


def _measure(
    tasks: "list[PointTask]",
    grid_points: list[Values],
    names: Sequence[str],
    finished: Path,
    compute: "Engine",
) -> _Results:
    """Measure all points that are not cached, with a progress bar.

    Args:
        tasks: of the points.
        grid_points: the settings of the points.
        names: of the columns of results.
        finished: the folder for finished points.
        compute: the engine.
    """
    from wflmc.apps.studies.cache import key_of
    from wflmc.apps.studies.engines import Failure
    from wflmc.apps.studies.grids import unquoted
    from wflmc.apps.studies.study import run_tasks
    from wflmc.runs import point

    results = _Results()
    keys = [key_of({"sweep": task.identity}) for task in tasks]
    with progress_bar("points", len(tasks)) as advance:
        outcomes = run_tasks(
            point.measure,
            tasks,
            keys,
            cache=finished,
            progress=advance,
            warn=note,
            engine=compute,
        )
        for index, outcome, was_cached in outcomes:
            values = grid_points[index]
            if isinstance(outcome, Failure):
                results.failures[index] = {"point": values, **outcome._asdict()}
                continue
            settings = map(unquoted, values.values())
            measured = [outcome[name] for name in names]
            results.rows[index] = [*settings, *measured]
            results.cached += was_cached
    return results


def _tasks(
    path: str,
    overrides: list[str],
    grid_points: list[Values],
    plan_only: bool,
    memory: float | None,
) -> "list[PointTask]":
    """Return the task of every point, validated before anything is computed."""
    from wflmc.runs.point import PointTask
    from wflmc.scenario import build_privacy, file_digests, load_scenario

    for text in overrides:
        if text.partition("=")[0].strip() in grid_points[0]:
            raise conflict("--set", text, "where --grid gives this one its values")
    tasks: list[PointTask] = []
    digests_by_files: dict[Any, dict[str, str]] = {}
    for values in grid_points:
        settings = [f"{key}={value}" for key, value in values.items()]
        with renamed_keys({key: f"--grid {key}" for key in values}):
            scenario = load_scenario(path, [*overrides, *settings])
            build_privacy(scenario)
            if scenario.sampler.seed == "secret" and not plan_only:
                requirement = "a number in a sweep, whose points can be repeated"
                raise InputError("sampler.seed", "secret", requirement)
            link = scenario.link
            posterior = scenario.posterior
            files = (
                posterior.data,
                posterior.whitening_sources,
                posterior.prior_from,
                posterior.model,
                link.fading,
                link.gains,
            )
            # Points share their files, which may be large and are read once.
            if files not in digests_by_files:
                digests_by_files[files] = file_digests(scenario)
        tasks.append(PointTask(scenario, digests_by_files[files], plan_only, memory))
    return tasks


def _write_failures(path: Path, failures: list[dict[str, Any]]) -> None:
    """Write which points failed and why, and print one line for each reason."""
    from wflmc.scenario import to_json

    if not failures:
        path.unlink(missing_ok=True)
        return
    write_text(path, to_json({"failed": failures}))
    points_by_reason: dict[str, list[Values]] = {}
    for failure in failures:
        points_by_reason.setdefault(failure["reason"], []).append(failure["point"])
    for reason, failed_points in points_by_reason.items():
        first = " ".join(f"{key}={value}" for key, value in failed_points[0].items())
        further = len(failed_points) - 1
        count = f" and {further} more" if further else ""
        note(f"failed at {first}{count}: {reason}")
