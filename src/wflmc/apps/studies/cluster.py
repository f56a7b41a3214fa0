"""The Dask engine: tasks on workers of this machine, or of any scheduler that answers."""

import functools
import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Any, Protocol, Self

import jax

from wflmc.apps.studies.cache import Warn
from wflmc.apps.studies.engines import (
    Engine,
    Failure,
    Progress,
    ResultT,
    StudyError,
    TaskT,
    Work,
    order,
)
from wflmc.support.errors import InputError

cloudpickle: ModuleType
dask: ModuleType
distributed: ModuleType
try:
    cloudpickle, dask, distributed = (
        import_module(name) for name in ("cloudpickle", "dask", "distributed")
    )
except ImportError:
    raise InputError(
        "--engine", "dask", "local without Dask; pip install 'wflmc[dask]' brings it"
    ) from None

SETTINGS = {
    "distributed.nanny.pre-spawn-environ": {},  # as many BLAS threads as here: their number may show in the last bit
    "distributed.scheduler.worker-saturation": 1.0,  # no task waits on a worker, to be blamed for its death
    "distributed.admin.large-graph-warning-threshold": "1GB",  # data of a study travel with its tasks
    "distributed.comm.timeouts.connect": "30s",
}
WAIT = 60.0
"""Seconds for a scheduler to write its file, when both are started at the same time."""
RESUME = "Finished points are kept: the same command goes on."


class _Future(Protocol):
    """What this module uses of a future of Dask."""

    @property
    def key(self) -> str:
        """The name of its task."""

    @property
    def status(self) -> str:
        """Such as finished or error."""

    def done(self) -> bool:
        """Return whether there is a result or an error."""

    def result(self) -> object:
        """Return the result."""

    def exception(self) -> Exception:
        """Return the error."""

    def release(self) -> None:
        """Let the cluster forget the result."""


class _Client(Protocol):
    """What this module uses of a client of Dask."""

    def __enter__(self) -> Self:
        """Return the client, which is closed at the end of the block."""

    def __exit__(self, *error: object) -> None:
        """Close the client."""

    def map(
        self,
        function: Callable[[bytes], object],
        tasks: list[bytes],
        *,
        key: list[str],
        pure: bool,
    ) -> list[_Future]:
        """Send tasks to workers."""

    def cancel(self, futures: list[_Future]) -> None:
        """Give tasks up."""


@contextmanager
def open_cluster(
    address: str | None, workers: int | None, warn: Warn
) -> Iterator[Engine]:
    """Yield the engine of a cluster that is started, or connected to, at the first task.

    Dask repeats a task whose worker, or whose result, is lost. One that loses its worker time and again is a failure.
    A worker that cannot be used ends the work: it would fail every point that it is given.

    Args:
        address: of a scheduler, or the JSON file that it writes; None starts workers on this machine.
        workers: number of workers on this machine.
        warn: called while a scheduler or its workers are waited for.
    """
    with ExitStack() as stack:

        @functools.cache
        def open_client() -> _Client:
            stack.enter_context(dask.config.set(SETTINGS))
            stack.enter_context(
                distributed.utils.silence_logging_cmgr(logging.CRITICAL)
            )  # we report it ourselves
            return stack.enter_context(
                _start(stack, workers) if address is None else _connect(address, warn)
            )

        def compute(
            work: Work[TaskT, ResultT],
            tasks: Sequence[TaskT],
            progress: Progress,
        ) -> Iterator[tuple[int, ResultT | Failure]]:
            """Workers do not report parts of points."""
            if not tasks:
                return
            client, batch = open_client(), uuid.uuid4().hex[:12]
            indices = {f"wflmc-{batch}-{index}": index for index in range(len(tasks))}
            # Pickled here and not by Dask: a scheduler needs neither this package nor JAX.
            pickled = [cloudpickle.dumps(task) for task in tasks]
            futures = client.map(
                _pickled_by_value(work), pickled, key=list(indices), pure=False
            )
            try:
                for future in distributed.as_completed(futures):
                    yield indices[future.key], _result(future)
                    future.release()
            except distributed.CancelledError:
                raise StudyError(
                    f"The scheduler is gone, or has dropped the work. {RESUME}"
                ) from None
            finally:
                client.cancel([future for future in futures if not future.done()])

        yield compute


def _start(stack: ExitStack, workers: int | None) -> _Client:
    """Return a client of workers on this machine, which end with the stack."""
    # Workers share compiled code with this process.
    shared = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    environment = {
        name.upper(): str(value)
        for name in shared
        if (value := getattr(jax.config, name)) is not None
    }
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wflmc-dask-"))
    with _interrupts_deferred():
        cluster = distributed.LocalCluster(
            n_workers=workers
            or (dask.system.CPU_COUNT if jax.default_backend() == "cpu" else 1),
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",  # any free port; 8787 may be another cluster's
            scheduler_kwargs={"dashboard": False},
            worker_dashboard_address=None,
            local_directory=folder,
            memory_limit=0,  # the sampler has its own limit, and results are small
            silence_logs=logging.CRITICAL,
            env=environment,
        )
        stack.enter_context(cluster)
    return distributed.Client(cluster)


def _connect(address: str, warn: Warn) -> _Client:
    """Return a client of the scheduler at an address, or of the one that writes a JSON file."""
    where = {"address": address}
    if address.endswith(".json"):
        file = os.path.expanduser(address)
        where, deadline = {"scheduler_file": file}, time.monotonic() + WAIT
        if not os.path.exists(file):
            warn(
                f"{file} is not there yet; waiting up to {WAIT:.0f} s for a scheduler to write it."
            )
        while not os.path.exists(file):
            if time.monotonic() > deadline:
                raise InputError(
                    "--engine",
                    f"dask:{file}",
                    "the file that a Dask scheduler has written",
                )
            time.sleep(0.1)
    try:
        client = distributed.Client(**where)
    except (OSError, ValueError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            "--engine", f"dask:{address}", f"where a Dask scheduler answers ({why})"
        ) from None
    if not client.scheduler_info(n_workers=1)["workers"]:
        warn(f"The scheduler at {address} has no workers yet; waiting for them.")
    return client


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the block is done: a cluster that is half started cannot be ended.

    Ctrl-C reaches every process of a terminal, except those started in this block and by threads started in it: the
    command alone answers it, and then ends the workers.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "pthread_sigmask"
    ):
        yield
        return
    pending: list[int] = []
    resource_tracker.ensure_running()  # a thread that starts it would unblock the signal
    handler = signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if pending:
            signal.raise_signal(signal.SIGINT)


def _pickled_by_value(work: Work[TaskT, ResultT]) -> Callable[[bytes], object]:
    """Return a function that a scheduler can hold without importing this package: it belongs to no module."""
    payload = order(cloudpickle.dumps(work))

    def call(task: bytes) -> object:
        from distributed import get_worker

        try:
            from wflmc.apps.studies.engines import perform

            return perform(payload, task)
        except Exception as error:
            raise RuntimeError(
                f"The worker at {get_worker().address} cannot be used: {error}"
            ) from None

    return call


def _result(future: _Future) -> Any:
    """Return the result of a task, or its failure."""
    if future.status != "error":
        return future.result()
    error = future.exception()
    if isinstance(error, distributed.KilledWorker):
        times = error.allowed_failures + 1
        return Failure(
            f"Its worker died {times} times (memory, perhaps). The same command tries it again."
        )
    raise StudyError(f"{str(error).rstrip('.')}. {RESUME}")
