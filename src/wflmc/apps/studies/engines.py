"""Engines compute the points of a study: in this process, one after the other, or on the workers of a Dask cluster.

An engine is a function from work and tasks to results in the order of completion. A task that fails gives a `Failure`,
and the others go on. Work returns plain data, the same wherever it is done.
"""

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypedDict, TypeVar

import jax

from wflmc.apps.studies.cache import JAX_SETTINGS, Warn, software
from wflmc.support.errors import (
    InputError,
    OverspendError,
    SamplingError,
    UnfinishedError,
)

Progress = Callable[[float], None]
"""Called with how much of the work is done."""
TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")
Work = Callable[[TaskT, Progress], ResultT]
"""From a task, and a function that takes the share of it that is done, to plain data."""


class Failure(NamedTuple):
    """A task without a result: why, in a sentence, and where in the code if the error was not expected."""

    reason: str
    traceback: str | None = None


class StudyError(UnfinishedError):
    """Points of a study failed, or the workers are gone; the sentence says what to do."""


class Engine(Protocol):
    """A function that computes tasks."""

    def __call__(
        self,
        work: Work[TaskT, ResultT],
        tasks: Sequence[TaskT],
        progress: Progress,
    ) -> Iterator[tuple[int, ResultT | Failure]]:
        """Yield the indices of tasks with their results, or failures, in the order of completion."""


class WorkOrder(TypedDict):
    """What a worker is sent once for all tasks: plain data, which it can read whatever its version is."""

    work: bytes
    """Pickled."""
    settings: dict[str, object]
    """Of JAX, which decide results."""
    software: dict[str, str]
    """Versions, by name."""


def local(
    work: Work[TaskT, ResultT],
    tasks: Sequence[TaskT],
    progress: Progress,
) -> Iterator[tuple[int, ResultT | Failure]]:
    """Compute all tasks in this process, in order."""
    for index, task in enumerate(tasks):
        yield index, attempt(work, task, part_of(progress, index, 1))


def part_of(progress: Progress, start: float, size: float) -> Progress:
    """Return the progress of a part of the work that begins at `start` and is `size` of the whole."""
    return lambda share: progress(start + size * share)


def attempt(
    work: Work[TaskT, ResultT],
    task: TaskT,
    progress: Progress,
) -> ResultT | Failure:
    """Return the result of a task, or its failure."""
    try:
        return work(task, progress)
    except InputError as error:
        return Failure(error.in_scenario)
    except (SamplingError, OverspendError) as error:
        return Failure(str(error))
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


@contextmanager
def open_engine(name: str, workers: int | None, warn: Warn) -> Iterator[Engine]:
    """Yield the engine of a name: `local`, `dask` (workers on this machine) or `dask:ADDRESS` (of a scheduler).

    A cluster is started, or connected to, at the first task, and left at the end.

    Args:
        workers: number of workers on this machine; by default one per core, and one where JAX uses an accelerator.
        warn: called while a scheduler or its workers are waited for.
    """
    kind, colon, address = name.partition(":")
    if name != "local" and not (kind == "dask" and bool(colon) == bool(address)):
        raise InputError(
            "--engine",
            name,
            "local, dask, or dask:ADDRESS with the address of a Dask scheduler",
        )
    if workers is not None and (workers < 1 or name != "dask"):
        raise InputError(
            "--workers", workers, "at least 1, and left out but with --engine dask"
        )
    if name == "local":
        yield local
        return
    from wflmc.apps.studies.cluster import open_cluster  # distributed is optional

    with open_cluster(address or None, workers, warn) as engine:
        yield engine


def order(work: bytes) -> WorkOrder:
    """Return pickled work with the settings of this process that decide its results."""
    settings = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    return {"work": work, "settings": settings, "software": software()}


def perform(order: WorkOrder, task: bytes) -> object:
    """Compute a pickled task on a worker.

    Returns:
        The result of the task, or its `Failure`.

    Raises:
        StudyError: the worker's software or settings would give other results.
    """
    for name, value in order["settings"].items():
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
            software.cache_clear()
    here, wanted = software(), order["software"]
    differences = [
        f"{name} {(here.get(name) or 'none')[:12]} instead of {(wanted.get(name) or 'none')[:12]}"
        for name in {**wanted, **here}
        if here.get(name) != wanted.get(name)
    ]
    if differences:
        raise StudyError(
            f"it is not set up as this machine, and would give other numbers: {', '.join(differences)}"
        )
    return attempt(pickle.loads(order["work"]), pickle.loads(task), lambda _: None)
