"""Running a study: its points one after the other or on many machines, each kept as soon as it is done.

An interrupted study goes on where it stopped, and one that was done is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wflmc.studies.cache import Say, digest, key_of, load, save
from wflmc.studies.engines import Engine, Failure, Progress, StudyError, Work, local, part_of

__all__ = ["Point", "Progress", "Study", "Tables", "digest", "part_of", "run_study", "run_tasks"]


class Row(NamedTuple):
    """One value of one scheme at one x; y_se is the standard error of y, None where y is exact."""

    figure: str
    scheme: str
    x: float
    y: float | None
    y_se: float | None = None


Tables = dict[str, list[Row]]
"""Rows by the name of the table they belong to."""


class Point(NamedTuple):
    """One x value and the schemes measured there; without an x, schemes whose result is the same at every x."""

    x: float | None
    schemes: tuple[str, ...]


class Study(NamedTuple):
    """A figure as work to do."""

    name: str
    points: tuple[Point, ...]
    order: tuple[str, ...]
    """Schemes in the order of the tables."""
    identity: dict[str, Any]
    """All settings and data that decide the results, as plain values."""
    measure: Callable[[Point, Progress], Tables]


def run_study(study: Study, folder: Path | None, progress: Progress, say: Say, engine: Engine = local) -> Tables:
    """All tables of a study, in order of x and scheme.

    A point that fails does not stop the others, which are kept; then it is an error.

    Args:
        progress: called with the number of points done, and parts of them.
        folder: where results of points are kept; None keeps none.
        say: told of kept results that turn out to be damaged.
        engine: who computes.
    """
    measure = study.measure  # without the study: what is sent away should be small

    def work(point: Point, share: Progress) -> dict[str, list[list[Any]]]:
        return {name: [list(row) for row in rows] for name, rows in measure(point, share).items()}

    keys = [_key(study, point) for point in study.points]
    found, failed = {}, []
    for index, result, _ in run_tasks(work, study.points, keys, folder, progress, say, engine):
        if isinstance(result, Failure):
            failed.append(f"{study.name} at {study.points[index]}: {result.reason}")
            say(f"{failed[-1]}\n{result.traceback}" if result.traceback else failed[-1])
        else:
            found[index] = {name: [Row(*row) for row in rows] for name, rows in result.items()}
    if failed:
        raise StudyError(f"{len(failed)} of {len(keys)} points of {study.name} failed; the others are kept.")
    return _assemble(study, [(point, found[index]) for index, point in enumerate(study.points)])


def run_tasks(
    work: Work,
    tasks: Sequence[Any],
    keys: Sequence[str],
    folder: Path | None,
    progress: Progress,
    say: Say,
    engine: Engine,
) -> Iterator[tuple[int, Any, bool]]:
    """The results of all tasks as they come: number, plain data or a `Failure`, and whether it had been kept.

    Args:
        work: from a task to plain data, the same wherever it is computed.
        keys: the names that results are kept under, one for each task.
    """
    kept = {}
    for index, key in enumerate(keys):
        if folder is not None and (found := load(folder, key, say)) is not None:
            kept[index] = found
    done = len(kept)
    progress(done)
    for index, result in kept.items():
        yield index, result, True
    rest = [index for index in range(len(tasks)) if index not in kept]
    for place, result in engine(work, [tasks[index] for index in rest], part_of(progress, done, 1)):
        index, done = rest[place], done + 1
        if folder is not None and not isinstance(result, Failure):
            save(folder, keys[index], result, say)
        progress(done)
        yield index, result, False


def _assemble(study: Study, found: list[tuple[Point, Tables]]) -> Tables:
    """One list of rows per table; what holds at every x is repeated at every x."""
    xs = [point.x for point, _ in found if point.x is not None]
    result: Tables = {}
    for point, tables in found:
        for name, rows in tables.items():
            at = [row._replace(x=x) for x in xs for row in rows] if point.x is None else rows
            result.setdefault(name, []).extend(at)
    rank = {scheme: index for index, scheme in enumerate(study.order)}
    return {name: sorted(rows, key=lambda row: (row.x, rank.get(row.scheme, 0))) for name, rows in result.items()}


def _key(study: Study, point: Point) -> str:
    return key_of({"study": study.name, "point": point, "identity": study.identity})
