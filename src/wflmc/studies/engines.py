"""Who computes the points: this process, one after the other, or the workers of a Dask cluster.

An engine is a function from work and tasks to results as they come. A task that fails comes as a `Failure`, and the
others go on. Work gives plain data, and the same wherever it is done.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax

from wflmc.errors import InputError, OverspendError, SamplingError, UnfinishedError
from wflmc.studies.cache import JAX_SETTINGS, software

Progress = Callable[[float], None]
"""Called with how much of the work is done."""
Work = Callable[[Any, Progress], Any]
"""From a task, and a function to be told how much of it is done, to plain data."""


class Failure(NamedTuple):
    """A task that came to nothing: why, in a sentence, and where in the code if nobody expected it."""

    reason: str
    traceback: str | None = None


class StudyError(UnfinishedError):
    """Points of a study failed, or those who compute them are gone; the sentence says what to do."""


class Engine(Protocol):
    """Computes tasks."""

    def __call__(self, work: Work, tasks: Sequence[Any], progress: Progress, /) -> Iterator[tuple[int, Any]]:
        """Numbers of tasks with their results, or failures, in the order in which they are done."""


def local(work: Work, tasks: Sequence[Any], progress: Progress) -> Iterator[tuple[int, Any]]:
    """All tasks in this process, in order."""
    for index, task in enumerate(tasks):
        yield index, attempt(work, task, part_of(progress, index, 1))


def part_of(progress: Progress, start: float, size: float) -> Progress:
    """Progress of a part of the work that begins at `start` and is `size` of the whole."""
    return lambda share: progress(start + size * share)


def attempt(work: Work, task: Any, progress: Progress) -> Any:
    """The result of a task, or the failure that came instead."""
    try:
        return work(task, progress)
    except (InputError, SamplingError, OverspendError) as error:
        return Failure(str(error))
    except MemoryError:
        return Failure("This needs more memory than there is.")
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


@contextmanager
def open_engine(name: str, workers: int | None, say: Callable[[str], None]) -> Iterator[Engine]:
    """The engine of a name: `local`, `dask` (workers on this machine) or `dask:ADDRESS` (of a scheduler).

    A cluster is started, or asked, when there is the first task to compute, and left at the end.

    Args:
        workers: how many on this machine; all cores by default, and one where JAX computes on an accelerator.
        say: told when workers are waited for.
    """
    kind, _, address = name.partition(":")
    if kind not in ("local", "dask") or (kind == "local" and name != "local") or name == "dask:":
        raise InputError("--engine", name, "local, dask, or dask:ADDRESS with the address of a Dask scheduler")
    if workers is not None and (workers < 1 or name != "dask"):
        raise InputError("--workers", workers, "at least 1, and left out but with --engine dask")
    if kind == "local":
        yield local
        return
    from wflmc.studies.cluster import Cluster  # distributed is optional

    cluster = Cluster(address or None, workers, say)
    try:
        yield cluster.compute
    finally:
        cluster.close()


def order(work: bytes) -> dict[str, Any]:
    """What a worker is sent once for all tasks: work, pickled, and how it must be done for results to be the same.

    Plain data, which a worker can read whatever its version is.
    """
    settings = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    return {"work": work, "settings": settings, "software": software()}


def perform(order: dict[str, Any], task: bytes) -> Any:
    """Compute a task, pickled, on a worker; a `StudyError` where results would not be the same."""
    config: Any = jax.config
    for name, value in order["settings"].items():
        if getattr(config, name) != value:
            config.update(name, value)
            software.cache_clear()
    own, wanted = software(), order["software"]
    unlike = [name for name in {**wanted, **own} if own.get(name) != wanted.get(name)]
    if unlike:
        said = ", ".join(f"{name} {_short(own.get(name))} instead of {_short(wanted.get(name))}" for name in unlike)
        raise StudyError(f"it is not set up as this machine, and would give other numbers: {said}")
    return attempt(pickle.loads(order["work"]), pickle.loads(task), lambda _: None)


def _short(text: str | None) -> str:
    """The beginning of a long digest; none at all where there is no such thing."""
    return text[:12] if text else "none"
