"""Engines compute the points of a study: in this process, or on a Dask cluster.

An engine is a function from work and tasks to results in the order of completion. A
task that fails gives a `Failure`, and the others go on. Work returns plain data, the
same wherever it is computed.
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
"""Called with the part of the work that is finished."""
TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")
Work = Callable[[TaskT, Progress], ResultT]
"""From a task, and a function that takes the finished part of it, to plain data."""

MAX_SHOWN_VERSION = 12
"""Characters of a version or digest that an error shows."""


class Failure(NamedTuple):
    """A task without a result."""

    reason: str
    """One sentence."""
    traceback: str | None = None
    """Where in the code, if the error was not expected."""


class StudyError(UnfinishedError):
    """Points of a study failed, or the workers are gone; the text names the remedy."""


class Engine(Protocol):
    """A function that computes tasks."""

    def __call__(
        self,
        work: Work[TaskT, ResultT],
        tasks: Sequence[TaskT],
        progress: Progress,
    ) -> Iterator[tuple[int, ResultT | Failure]]:
        """Yield the indices of tasks with their results, in the order of completion.

        Args:
            work: computes a task; the same wherever it runs.
            tasks: what is computed.
            progress: called with the number of finished tasks, fractions included, by
                engines that see the inside of a task.

        Yields:
            The index of a task, and its result or its failure.
        """


class WorkOrder(TypedDict):
    """What a worker receives once for all tasks.

    It is plain data, which a worker can read whatever its version of wflmc is.
    """

    work: bytes
    """Pickled."""
    settings: dict[str, object]
    """Settings of JAX that decide results."""
    software: dict[str, str]
    """Versions, by name."""


def local(
    work: Work[TaskT, ResultT],
    tasks: Sequence[TaskT],
    progress: Progress,
) -> Iterator[tuple[int, ResultT | Failure]]:
    """Compute all tasks in this process, in order.

    It is the engine `local`. A task begins when the result of the one before has been
    taken, so that a caller who stores each result loses at most one of them.

    Args:
        work: computes a task.
        tasks: what is computed.
        progress: called with the number of finished tasks, fractions included.

    Yields:
        The index of a task, and its result or its failure.
    """
    for index, task in enumerate(tasks):
        yield index, attempt(work, task, part_of(progress, index, 1))


def part_of(progress: Progress, start: float, size: float) -> Progress:
    """Return the progress of a part of the work.

    The part reports numbers from 0 to 1, as if it were everything; the original
    function receives `start` + `size` times that number.

    Args:
        progress: of all the work.
        start: how much of the work is finished when the part begins.
        size: of the part, in units of the work.

    Returns:
        A function for the part.
    """
    return lambda fraction: progress(start + size * fraction)


def attempt(
    work: Work[TaskT, ResultT],
    task: TaskT,
    progress: Progress,
) -> ResultT | Failure:
    """Return the result of a task, or its failure.

    Errors that a user can mend (bad input, a diverged chain, an exhausted budget)
    become one sentence; any other exception is taken for a fault in wflmc and keeps its
    traceback. Interrupts pass through.

    Args:
        work: computes the task.
        task: what is computed.
        progress: called with the finished part of the task.
    """
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
    """Yield the engine of a name.

    A cluster is started, or connected to, at the first task, and left at the end: a
    study whose points are all in the cache starts none.

    Args:
        name: `local`; `dask`, with workers on this machine; or `dask:ADDRESS`, with
            those of a scheduler.
        workers: number of workers on this machine; None for one per core, and for one
            where JAX uses an accelerator.
        warn: called while a scheduler or its workers are waited for.

    Yields:
        The engine.

    Raises:
        InputError: if there is no such engine, if Dask is not installed, or if workers
            are counted for another engine than `dask`.
    """
    kind, colon, address = name.partition(":")
    is_dask = kind == "dask" and bool(colon) == bool(address)
    if name != "local" and not is_dask:
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
    from wflmc.apps.studies.cluster import DaskEngine  # distributed is optional

    with DaskEngine(address or None, workers, warn) as engine:
        yield engine


def make_work_order(work: bytes) -> WorkOrder:
    """Return pickled work together with what decides its results in this process.

    A worker compares the versions with its own and takes over the settings of JAX
    before it unpickles anything.

    Args:
        work: as pickled by cloudpickle.
    """
    settings = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    return {"work": work, "settings": settings, "software": software()}


def perform(order: WorkOrder, task: bytes) -> object:
    """Compute a pickled task on a worker.

    The worker's settings of JAX become those of the order, and stay so.

    Args:
        order: the work, and where it comes from.
        task: pickled.

    Returns:
        The result of the task, or its `Failure`.

    Raises:
        StudyError: if the worker's software would give other results; nothing is
            unpickled then.
    """
    for name, value in order["settings"].items():
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
            software.cache_clear()
    differences = _differences(software(), order["software"])
    if differences:
        raise StudyError(
            "it is not set up as this machine, and would give other numbers: "
            + ", ".join(differences)
        )
    work = pickle.loads(order["work"])
    return attempt(work, pickle.loads(task), lambda _: None)


def _differences(installed: dict[str, str], required: dict[str, str]) -> list[str]:
    """Return in which names the software of a worker differs, with both versions."""
    differences = []
    for name in {**required, **installed}:
        worker_version = installed.get(name)
        version = required.get(name)
        if worker_version != version:
            shown_worker_version = (worker_version or "none")[:MAX_SHOWN_VERSION]
            shown_version = (version or "none")[:MAX_SHOWN_VERSION]
            differences.append(
                f"{name} {shown_worker_version} instead of {shown_version}"
            )
    return differences
