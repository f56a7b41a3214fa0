"""Studies: grid points, what is measured at each of them, and a run with a cache.

An interrupted study continues where it stopped, and a finished one is read back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.apps.studies.cache import Identity, Warn, key_of, load, save
from wflmc.apps.studies.engines import (
    Engine,
    Failure,
    Progress,
    ResultT,
    StudyError,
    TaskT,
    Work,
    local,
    part_of,
)


class Row(NamedTuple):
    """One value of one scheme at one x."""

    figure: str
    scheme: str
    x: float
    y: float | None
    """None where there is no finite number."""
    y_se: float | None = None
    """Standard error of y; None where y is exact, or from one experiment."""


Tables = dict[str, list[Row]]
"""Rows by the name of their table."""


class Claim(NamedTuple):
    """A stated outcome, the paper's number, ours, and whether it holds."""

    figure: str
    statement: str
    paper: float | str
    ours: float | str | None
    """None where our data show no such boundary in the range of the figure."""
    holds: bool
    contradiction: bool = False
    """The statement contradicts the paper's own theorem or numbers."""
    note: str = ""
    data: str = ""
    """What ours is from."""


def mean_row(figure: str, scheme: str, x: float, values: NDArray[np.float64]) -> Row:
    """Return the mean over experiments, with its standard error.

    The standard error is the empirical standard deviation (n − 1 in the denominator)
    over √n. It is None for a single experiment. Where the mean is not finite, both
    numbers are None: tables hold no infinities.

    Args:
        figure: name of the figure.
        scheme: name of the curve.
        x: where on the curve.
        values: of the experiments, [n].
    """
    mean = float(values.mean())
    if not np.isfinite(mean):
        return Row(figure, scheme, x, None)
    standard_error = None
    if values.size > 1:
        standard_error = float(values.std(ddof=1) / values.size**0.5)
    return Row(figure, scheme, x, mean, standard_error)


class Point(NamedTuple):
    """One x value and the schemes measured there.

    Without an x, schemes whose result is the same at every x.
    """

    x: float | None
    schemes: tuple[str, ...]
    xs: tuple[float, ...] = ()
    """Instead of x, that of each scheme."""


class Study(NamedTuple):
    """A figure as a list of points."""

    name: str
    points: tuple[Point, ...]
    order: tuple[str, ...]
    """Schemes in the order of the tables."""
    identity: Identity
    """All settings and data that decide the results, as plain values; empty where
    points take no time and no cache."""
    measure: Callable[[Point, Progress], Tables]
    """Computes a point; plain data, the same wherever it runs."""

    def key(self, point: Point) -> str:
        """Return the name that the result of a point is cached under.

        It depends on the study, its settings and data, the point and the software, so
        that whatever changes the result changes the name.

        Args:
            point: of the study.
        """
        return key_of({"study": self.name, "point": point, "identity": self.identity})


class TaskResult(NamedTuple, Generic[ResultT]):
    """A task that is finished."""

    task_index: int
    result: ResultT | Failure
    """Plain data, or why there is none."""
    cached: bool
    """Whether the result was stored before."""


def run_study(
    study: Study,
    cache: Path | None,
    progress: Progress,
    warn: Warn,
    engine: Engine = local,
) -> Tables:
    """Compute all tables of a study, in order of x and scheme.

    A point that fails does not stop the others. Results are stored as they arrive; a
    study without an identity takes no time and is not stored.

    Args:
        study: what is computed.
        cache: folder of the results of points; None keeps none.
        progress: called with the number of finished points, fractions included.
        warn: called with failures, and with cached results that turn out to be damaged.
        engine: computes the points.

    Returns:
        The tables by name.

    Raises:
        StudyError: if points failed; the others have been computed and are cached.
    """
    keys = [study.key(point) for point in study.points]
    results: dict[int, Tables] = {}
    for task in run_tasks(
        study.measure,
        list(study.points),
        keys,
        cache=cache if study.identity else None,
        progress=progress,
        warn=warn,
        engine=engine,
    ):
        if isinstance(task.result, Failure):
            point = study.points[task.task_index]
            warn(f"{study.name} at {point}: {_failure_text(task.result)}")
        else:
            results[task.task_index] = task.result
    failures = len(keys) - len(results)
    if failures:
        raise StudyError(
            f"{failures} of {len(keys)} points of {study.name} failed; the others are "
            "kept."
        )
    return _assemble(study, [results[index] for index in range(len(keys))])


def _failure_text(failure: Failure) -> str:
    """Return the reason of a failure, with its traceback where there is one."""
    if not failure.traceback:
        return failure.reason
    return f"{failure.reason}\n{failure.traceback}"


def run_tasks(
    work: Work[TaskT, ResultT],
    tasks: Sequence[TaskT],
    keys: list[str],
    *,
    cache: Path | None,
    progress: Progress,
    warn: Warn,
    engine: Engine,
) -> Iterator[TaskResult[ResultT]]:
    """Yield results in the order of completion, those in the cache first.

    Every new result is stored before it is yielded; failures are not, so that the same
    command tries them again.

    Args:
        work: from a task to plain data, the same wherever it is computed.
        tasks: what is computed.
        keys: names that results are cached under, one for each task.
        cache: folder of the results; None keeps none.
        progress: called with the number of finished tasks, fractions included.
        warn: called with cached results that turn out to be damaged.
        engine: computes the tasks.

    Yields:
        Finished tasks.
    """
    cached: dict[int, ResultT] = {}
    if cache is not None:
        for index, key in enumerate(keys):
            result = load(cache, key, warn)
            if result is not None:
                cached[index] = result
    finished = len(cached)
    progress(finished)
    for index, result in cached.items():
        yield TaskResult(index, result, cached=True)
    missing = [index for index in range(len(tasks)) if index not in cached]
    missing_tasks = [tasks[index] for index in missing]
    engine_progress = part_of(progress, finished, 1)
    for position, result in engine(work, missing_tasks, engine_progress):
        index = missing[position]
        finished += 1
        if cache is not None and not isinstance(result, Failure):
            save(cache, keys[index], result, warn)
        progress(finished)
        yield TaskResult(index, result, cached=False)


def _assemble(study: Study, results: list[Tables]) -> Tables:
    """Return one list of rows per table, sorted by x and scheme.

    A result that holds at every x is repeated at every x.
    """
    grid = _grid(study.points)
    tables: Tables = defaultdict(list)
    for point, result in zip(study.points, results, strict=True):
        for name, values in result.items():
            rows = [Row(*row) for row in values]
            if not point.xs:
                xs = grid if point.x is None else [point.x]
                rows = [row._replace(x=x) for x in xs for row in rows]
            tables[name] += rows
    rank = {scheme: index for index, scheme in enumerate(study.order)}
    return {
        name: sorted(rows, key=lambda row: (row.x, rank.get(row.scheme, 0)))
        for name, rows in tables.items()
    }


def _grid(points: Sequence[Point]) -> list[float]:
    """Return all x of some points, sorted."""
    grid: set[float] = set()
    for point in points:
        if point.xs:
            grid.update(point.xs)
        elif point.x is not None:
            grid.add(point.x)
    return sorted(grid)
