"""`wflmc sweep`: a scenario at every point of a grid, as one table."""

from pathlib import Path
from typing import Annotated, Any

import typer

from wflmc.cli import shared
from wflmc.cli.shared import flag, note, option
from wflmc.support.errors import InputError, conflict, renamed_keys
from wflmc.support.progress import progress_bar
from wflmc.support.storage import output_folder, write_text

GRID = "FIRST:LAST:STEP, both ends included, or v1,v2,...; may repeat, the first key changes slowest."
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

    Finished points are cached: a sweep that was stopped continues where it stopped. Points that fail are listed in
    DIR/failed.json, do not stop the others, and make the exit code 1.

    Example: wflmc sweep scenario.toml --grid link.snr_db=0:40:5 --grid privacy.epsilon=5,10,15 --out results
    """
    from wflmc.apps.report.tables import write_csv
    from wflmc.apps.studies.cache import key_of
    from wflmc.apps.studies.engines import Failure, open_engine
    from wflmc.apps.studies.grids import FORMS, parse_grid, points, unquoted
    from wflmc.apps.studies.study import run_tasks
    from wflmc.runs import point
    from wflmc.scenario.coverage import SELECTED

    shared.cache_compilations()
    if not grids or not all("." in text.partition("=")[0] for text in grids):
        raise InputError("--grid", grids, FORMS)
    axes = [parse_grid(text) for text in grids]
    where = [
        {axis.key: value for axis, value in zip(axes, values, strict=True)}
        for values in points(axes)
    ]
    tasks = _tasks(
        scenario, overrides or [], where, plan_only, shared.parse_bytes(memory)
    )
    names = point.columns(plan_only)
    rows: dict[int, list[Any]] = {}
    failures: dict[int, dict[str, Any]] = {}
    cached = 0
    with open_engine(engine, workers, note) as compute, output_folder(out) as folder:
        finished = shared.points_folder(cache)
        keys = [key_of({"sweep": task.identity}) for task in tasks]
        with progress_bar("points", len(tasks)) as advance:
            for index, result, was_cached in run_tasks(
                point.measure,
                tasks,
                keys,
                cache=finished,
                progress=advance,
                warn=note,
                engine=compute,
            ):
                if isinstance(result, Failure):
                    failures[index] = {"point": where[index], **result._asdict()}
                else:
                    rows[index] = [
                        *map(unquoted, where[index].values()),
                        *(result[name] for name in names),
                    ]
                    cached += was_cached
        write_csv(
            folder / "sweep.csv",
            [*where[0], *names],
            [row for _, row in sorted(rows.items())],
        )
        _write_failures(
            folder / "failed.json", [failure for _, failure in sorted(failures.items())]
        )
    promised = not plan_only and any(
        task.scenario.privacy.epsilon is not None for task in tasks
    )
    uncovered, file = [SELECTED] * promised, str(folder / "sweep.csv")
    counts = {
        "points": len(tasks),
        "done": len(rows),
        "cached": cached,
        "failed": len(failures),
    }
    lines = [
        f"{len(rows)} of {len(tasks)} points ({cached} from the cache)",
        f"Written to {file}",
        *uncovered,
    ]
    shared.print_result(
        {"file": file, **counts, "not_covered": uncovered}, lines, as_json
    )
    if failures:
        note(f"{len(failures)} points failed: {folder / 'failed.json'} lists them.")
        raise typer.Exit(1)


def _tasks(
    path: str,
    overrides: list[str],
    where: list[Values],
    plan_only: bool,
    memory: float | None,
) -> list[Any]:
    """Return the `PointTask` of every point, validated before anything is computed."""
    from wflmc.runs.point import PointTask
    from wflmc.scenario import build_privacy, file_digests, load_scenario

    for text in overrides:
        if text.partition("=")[0].strip() in where[0]:
            raise conflict("--set", text, "where --grid gives this one its values")
    tasks: list[PointTask] = []
    known: dict[Any, dict[str, str]] = {}
    for values in where:
        given = [f"{key}={value}" for key, value in values.items()]
        with renamed_keys({key: f"--grid {key}" for key in values}):
            scenario = load_scenario(path, [*overrides, *given])
            build_privacy(scenario)
            if scenario.sampler.seed == "secret" and not plan_only:
                raise InputError(
                    "sampler.seed",
                    "secret",
                    "a number in a sweep, whose points can be repeated",
                )
            names = (scenario.posterior.data, scenario.link.fading, scenario.link.gains)
            if names not in known:  # large files are read once
                known[names] = file_digests(scenario)
        tasks.append(PointTask(scenario, known[names], plan_only, memory))
    return tasks


def _write_failures(path: Path, failures: list[dict[str, Any]]) -> None:
    """Write which points failed and why, and print one line for each reason."""
    from wflmc.scenario import to_json

    if not failures:
        path.unlink(missing_ok=True)
        return
    write_text(path, to_json({"failed": failures}))
    for reason in dict.fromkeys(failure["reason"] for failure in failures):
        first, *others = (
            failure["point"] for failure in failures if failure["reason"] == reason
        )
        at = " ".join(f"{key}={value}" for key, value in first.items())
        note(f"failed at {at}{f' and {len(others)} more' if others else ''}: {reason}")
