"""The Dask engine: tasks on workers of this machine, or of any scheduler that answers.

Scheduling, repeating tasks whose worker or result is lost, replacing workers and
forgetting results are Dask's own. What is added here are workers that compute the same
numbers as this process, a scheduler that needs neither wflmc nor JAX, and Ctrl-C.
"""

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from typing import Any, Self

import jax

from wflmc.apps.studies.cache import Warn
from wflmc.apps.studies.engines import (
    Failure,
    Progress,
    ResultT,
    StudyError,
    TaskT,
    Work,
    make_work_order,
)
from wflmc.support.errors import InputError

try:
    import cloudpickle
    import dask
    import distributed
except ImportError:
    raise InputError(
        "--engine", "dask", "local without Dask; pip install 'wflmc[dask]' brings it"
    ) from None

SETTINGS = {
    # As many BLAS threads as here: their number may show in the last bit.
    "distributed.nanny.pre-spawn-environ": {},
    # No task waits on a worker, to be blamed for its death.
    "distributed.scheduler.worker-saturation": 1.0,
    # Data of a study travel with its tasks.
    "distributed.admin.large-graph-warning-threshold": "1GB",
    "distributed.comm.timeouts.connect": "30s",
}
"""Settings of Dask while the engine is open."""
MAX_FILE_WAIT = 60.0
"""Seconds for a scheduler to write its file, when both are started at the same time."""
FILE_WAIT_STEP = 0.1
"""Seconds between two looks for that file."""
SHARED_WITH_WORKERS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)
"""Settings of JAX by which workers on this machine share compiled code with it."""
RESUME = "Finished points are kept: the same command continues."


class DaskEngine:
    """An engine on the workers of a Dask cluster.

    The cluster is started, or connected to, at the first task, and left at the end of
    the `with` block. A task that loses its worker time and again is a failure. A worker
    that cannot be used ends the work: it would fail every point that it receives.
    """

    def __init__(self, address: str | None, workers: int | None, warn: Warn) -> None:
        """Prepare an engine, without starting anything.

        Args:
            address: of a scheduler, or the JSON file that it writes; None starts
                workers on this machine.
            workers: number of workers on this machine; None for one per core, and for
                one where JAX uses an accelerator.
            warn: called while a scheduler or its workers are waited for.
        """
        self._address = address
        self._workers = workers
        self._warn = warn
        self._stack = ExitStack()
        self._client: distributed.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(
        self,
        work: Work[TaskT, ResultT],
        tasks: Sequence[TaskT],
        progress: Progress,
    ) -> Iterator[tuple[int, ResultT | Failure]]:
        """Yield indices and results as workers finish.

        They report no parts of tasks: `progress` is not called.
        """
        if not tasks:
            return
        client = self._open_client()
        # Pickled here and not by Dask: a scheduler needs neither this package nor JAX.
        pickled_tasks = [cloudpickle.dumps(task) for task in tasks]
        futures = client.map(_pickled_by_value(work), pickled_tasks, pure=False)
        indices = {future.key: index for index, future in enumerate(futures)}
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

    def _open_client(self) -> distributed.Client:
        """Return the client, which is opened the first time."""
        if self._client is None:
            enter = self._stack.enter_context
            enter(dask.config.set(SETTINGS))
            # What Dask logs at a loss is reported here as one sentence.
            enter(distributed.utils.silence_logging_cmgr(logging.CRITICAL))
            if self._address is None:
                client = _start(self._stack, self._workers)
            else:
                client = _connect(self._address, self._warn)
            self._client = enter(client)
        return self._client


def _start(stack: ExitStack, workers: int | None) -> distributed.Client:
    """Return a client of workers on this machine, which end with the stack."""
    if workers is None:
        uses_processors = jax.default_backend() == "cpu"
        workers = dask.system.CPU_COUNT if uses_processors else 1
    environment = {}
    for name in SHARED_WITH_WORKERS:
        value = getattr(jax.config, name)
        if value is not None:
            environment[name.upper()] = str(value)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wflmc-dask-"))
    with _interrupts_deferred():
        cluster = distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            # Any free port; 8787 may be another cluster's.
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            worker_dashboard_address=None,
            local_directory=folder,
            memory_limit=0,  # the sampler has its own limit, and results are small
            silence_logs=logging.CRITICAL,
            env=environment,
        )
        stack.enter_context(cluster)
    return distributed.Client(cluster)


def _connect(address: str, warn: Warn) -> distributed.Client:
    """Return a client of the scheduler at an address, or of one that writes a file."""
    scheduler = {"address": address}
    if address.endswith(".json"):
        file = os.path.expanduser(address)
        _wait_for_file(file, warn)
        scheduler = {"scheduler_file": file}
    try:
        client = distributed.Client(**scheduler)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            "--engine", f"dask:{address}", f"where a Dask scheduler answers ({reason})"
        ) from None
    if not client.scheduler_info(n_workers=1)["workers"]:
        warn(f"The scheduler at {address} has no workers yet; waiting for them.")
    return client


def _wait_for_file(file: str, warn: Warn) -> None:
    """Wait until a scheduler has written its file; Dask itself would wait forever."""
    if os.path.exists(file):
        return
    warn(
        f"{file} is not there yet; waiting up to {MAX_FILE_WAIT:.0f} s for a scheduler "
        "to write it."
    )
    deadline = time.monotonic() + MAX_FILE_WAIT
    while not os.path.exists(file):
        if time.monotonic() > deadline:
            raise InputError(
                "--engine", f"dask:{file}", "the file that a Dask scheduler has written"
            )
        time.sleep(FILE_WAIT_STEP)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the block is done: a half-started cluster cannot be ended.

    Ctrl-C reaches every process of a terminal, except those started in this block and
    by threads started in it: the command alone answers it, and then ends the workers.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    pending: list[int] = []
    # Started here: a thread that starts it would unblock the signal.
    resource_tracker.ensure_running()
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
    """Return a function that a scheduler can hold without importing this package.

    A nested function belongs to no module, and is pickled with its code.
    """
    work_order = make_work_order(cloudpickle.dumps(work))

    def call(task: bytes) -> object:
        from distributed import get_worker

        try:
            from wflmc.apps.studies.engines import perform

            return perform(work_order, task)
        except Exception as error:
            raise RuntimeError(
                f"The worker at {get_worker().address} cannot be used: {error}"
            ) from None

    return call


def _result(future: distributed.Future) -> Any:
    """Return the result of a task or its failure; raise if its worker is unusable."""
    if future.status != "error":
        return future.result()
    error = future.exception()
    if isinstance(error, distributed.KilledWorker):
        deaths = error.allowed_failures + 1
        return Failure(
            f"Its worker died {deaths} times (memory, perhaps). The same command tries "
            "it again."
        )
    raise StudyError(f"{str(error).rstrip('.')}. {RESUME}")
