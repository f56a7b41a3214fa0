"""Tasks on the workers of a Dask cluster: here, or wherever a scheduler answers."""

from __future__ import annotations

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
from typing import Any

import jax

from wflmc.errors import InputError
from wflmc.studies.engines import Failure, Progress, StudyError, Work, order

cloudpickle: Any
dask: Any
distributed: Any
try:
    cloudpickle, dask, distributed = (import_module(name) for name in ("cloudpickle", "dask", "distributed"))
except ImportError:
    raise InputError("--engine", "dask", "local without Dask; pip install 'wflmc[dask]' brings it") from None

SETTINGS = {
    "distributed.nanny.pre-spawn-environ": {},  # as many BLAS threads as here: their number may show in the last bit
    "distributed.scheduler.worker-saturation": 1.0,  # no task waits on a worker, to be blamed for the death of it
    "distributed.admin.large-graph-warning-threshold": "1GB",  # data of a study travel with its tasks
    "distributed.comm.timeouts.connect": "30s",
}
WAIT = 60.0
"""Seconds for a scheduler to write its file, when both are started together."""
KEPT = "Finished points are kept: the same command goes on."


class Cluster:
    """A cluster that is started, or asked, when there is the first task to compute."""

    def __init__(self, address: str | None, workers: int | None, say: Callable[[str], None]) -> None:
        self._address, self._workers, self._say = address, workers, say
        self._stack = ExitStack()
        self._found: Any = None

    def compute(self, work: Work, tasks: Sequence[Any], progress: Progress) -> Iterator[tuple[int, Any]]:
        """An engine: points are tasks of Dask, and come back as values.

        Dask computes a task again whose worker, or whose result, is lost. One that loses its worker time and again
        is a failure. A worker that cannot be used ends the work: it would fail every point that it gets hold of.
        """
        del progress  # the parts of points are not told
        if not tasks:
            return
        client = self._client()
        call, batch = _sent_by_value(work), uuid.uuid4().hex[:12]
        keys = {f"wflmc-{batch}-{index}": index for index in range(len(tasks))}
        # Pickled here and not by Dask: a scheduler needs neither this package nor JAX.
        sent = [cloudpickle.dumps(task) for task in tasks]
        futures = client.map(call, sent, key=list(keys), pure=False)
        try:
            for future in distributed.as_completed(futures):
                yield keys[future.key], _result(future)
                future.release()
        except distributed.CancelledError:
            raise StudyError(f"The scheduler is gone, or has dropped the work. {KEPT}") from None
        finally:
            client.cancel([future for future in futures if not future.done()])

    def close(self) -> None:
        """Leave a scheduler elsewhere; end what was started here."""
        self._stack.close()

    def _client(self) -> Any:
        if self._found is None:
            self._stack.enter_context(dask.config.set(SETTINGS))
            self._stack.enter_context(distributed.utils.silence_logging_cmgr(logging.CRITICAL))  # we say it ourselves
            self._found = self._stack.enter_context(self._here() if self._address is None else self._elsewhere())
        return self._found

    def _here(self) -> Any:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="wflmc-dask-"))
        with _deaf():
            cluster = distributed.LocalCluster(
                n_workers=self._workers or (dask.system.CPU_COUNT if jax.default_backend() == "cpu" else 1),
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # any free port; 8787 may be another cluster's
                scheduler_kwargs={"dashboard": False},
                worker_dashboard_address=None,
                local_directory=folder,
                memory_limit=0,  # the sampler keeps its own, and results are small
                silence_logs=logging.CRITICAL,
                env=_compilations(),
            )
            self._stack.enter_context(cluster)
        return distributed.Client(cluster)

    def _elsewhere(self) -> Any:
        address = str(self._address)
        where = {"address": address}
        if address.endswith(".json"):
            where = {"scheduler_file": os.path.expanduser(address)}
            self._wait_for(where["scheduler_file"])
        try:
            client = distributed.Client(**where)
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError("--engine", f"dask:{address}", f"where a Dask scheduler answers ({why})") from None
        if not client.scheduler_info(n_workers=1)["workers"]:
            self._say(f"The scheduler at {address} has no workers yet; waiting for them.")
        return client

    def _wait_for(self, file: str) -> None:
        if not os.path.exists(file):
            self._say(f"{file} is not there yet; waiting up to {WAIT:.0f} s for a scheduler to write it.")
        ends = time.monotonic() + WAIT
        while not os.path.exists(file):
            if time.monotonic() > ends:
                raise InputError("--engine", f"dask:{file}", "the file that a Dask scheduler has written")
            time.sleep(0.1)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C waits until this is done: a cluster that is half started cannot be ended.

    It reaches every process of a terminal, but none that is started here, nor those that a thread of here will start:
    the command alone answers it, and then ends the workers.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    heard: list[int] = []
    resource_tracker.ensure_running()  # the thread that starts it would hear again
    answer = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, answer)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _sent_by_value(work: Work) -> Callable[[bytes], Any]:
    """A function that a scheduler can hold without importing anything of ours: it is no module's."""
    payload = order(cloudpickle.dumps(work))

    def call(task: bytes) -> Any:
        from distributed import get_worker

        try:
            from wflmc.studies.engines import perform

            return perform(payload, task)
        except Exception as error:
            raise RuntimeError(f"The worker at {get_worker().address} cannot be used: {error}") from None

    return call


def _result(future: Any) -> Any:
    """What came of a task."""
    if future.status != "error":
        return future.result()
    error = future.exception()
    if isinstance(error, distributed.KilledWorker):
        times = error.allowed_failures + 1
        return Failure(f"Its worker died {times} times (memory, perhaps). The same command tries it again.")
    raise StudyError(f"{str(error).rstrip('.')}. {KEPT}")


def _compilations() -> dict[str, str]:
    """Where workers on this machine find compiled code: with this process."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(config.jax_persistent_cache_min_compile_time_secs),
    }
