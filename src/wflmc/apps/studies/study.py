"""A study: grid points, what is measured at each of them, and running them with a cache.

An interrupted study continues where it stopped, and a finished one is read back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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
    """One value of one scheme at one x; y_se is the standard error of y, None where y is exact."""

    figure: str
    scheme: str
    x: float
    y: float | None
    y_se: float | None = None


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
    """Return the mean of values[n] over n experiments, None where it is not finite, with its standard error."""
    mean = float(values.mean())
    if not np.isfinite(mean):
        return Row(figure, scheme, x, None)
    return Row(
        figure,
        scheme,
        x,
        mean,
        float(values.std(ddof=1) / values.size**0.5) if values.size > 1 else None,
    )


class Point(NamedTuple):
    """One x value and the schemes measured there; without an x, schemes whose result is the same at every x."""

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
    """All settings and data that decide the results, as plain values; empty where points take no time and no cache."""
    measure: Callable[[Point, Progress], Tables]

    def key(self, point: Point) -> str:
        """Return the name that the result of a point is cached under."""
        return key_of({"study": self.name, "point": point, "identity": self.identity})


def run_study(
    study: Study,
    cache: Path | None,
    progress: Progress,
    warn: Warn,
    engine: Engine = local,
) -> Tables:
    """Compute all tables of a study, in order of x and scheme.

    Args:
        cache: folder of the results of points; None keeps none.
        progress: called with the number of points done, fractions included.
        warn: called with failures, and with cached results that turn out to be damaged.
        engine: computes the points.

    Raises:
        StudyError: points failed; the others have been computed and are cached.
    """
    keys, cache = (
        [study.key(point) for point in study.points],
        cache if study.identity else None,
    )
    results = {}
    for index, result, _ in run_tasks(
        study.measure, [*study.points], keys, cache, progress, warn, engine
    ):
        if isinstance(result, Failure):
            trace = f"\n{result.traceback}" if result.traceback else ""
            warn(f"{study.name} at {study.points[index]}: {result.reason}{trace}")
        else:
            results[index] = result
    if failures := len(keys) - len(results):
        raise StudyError(
            f"{failures} of {len(keys)} points of {study.name} failed; the others are kept."
        )
    return _assemble(study, [results[index] for index in range(len(keys))])


def run_tasks(
    work: Work[TaskT, ResultT],
    tasks: Sequence[TaskT],
    keys: list[str],
    cache: Path | None,
    progress: Progress,
    warn: Warn,
    engine: Engine,
) -> Iterator[tuple[int, ResultT | Failure, bool]]:
    """Yield results in the order of completion: index of the task, plain data or a `Failure`, whether it was cached.

    Args:
        work: from a task to plain data, the same wherever it is computed.
        keys: names that results are cached under, one for each task.
        cache, progress, warn, engine: those of `run_study`.
    """
    found = (
        {}
        if cache is None
        else {index: load(cache, key, warn) for index, key in enumerate(keys)}
    )
    cached = {index: result for index, result in found.items() if result is not None}
    done = len(cached)
    progress(done)
    for index, result in cached.items():
        yield index, result, True
    rest = [index for index in range(len(tasks)) if index not in cached]
    for place, result in engine(
        work, [tasks[index] for index in rest], part_of(progress, done, 1)
    ):
        index, done = rest[place], done + 1
        if cache is not None and not isinstance(result, Failure):
            save(cache, keys[index], result, warn)
        progress(done)
        yield index, result, False


def _assemble(study: Study, results: list[Tables]) -> Tables:
    """Return one list of rows per table; a result that holds at every x is repeated at every x."""
    xs = sorted(
        {x for point in study.points for x in point.xs or (point.x,) if x is not None}
    )
    tables: Tables = defaultdict(list)
    for point, result in zip(study.points, results, strict=True):
        for name, rows in result.items():
            made = [Row(*row) for row in rows]
            places = xs if point.x is None else [point.x]
            tables[name] += (
                made
                if point.xs
                else [row._replace(x=x) for x in places for row in made]
            )
    rank = {scheme: index for index, scheme in enumerate(study.order)}
    return {
        name: sorted(rows, key=lambda row: (row.x, rank.get(row.scheme, 0)))
        for name, rows in tables.items()
    }
