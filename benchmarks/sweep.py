"""What a Dask cluster on this machine costs a sweep, and what it brings: `python -m
benchmarks.sweep`.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import psutil
from rich.console import Console
from rich.table import Table

from wflmc.apps.studies.engines import Engine, local, open_engine
from wflmc.runs.point import PointTask, measure
from wflmc.scenario import load_scenario

SCENARIO = Path(__file__).parents[1] / "examples" / "fading.toml"


def _nothing(task: Any, progress: Any) -> dict[str, Any]:
    del progress
    return {"y": task}


def _processor_seconds() -> float:
    """Of this process and its workers so far."""
    own = psutil.Process()
    return sum(
        sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True))
    )


def _measure(
    engine: Engine, work: Any, tasks: Any
) -> tuple[float, float, dict[int, Any]]:
    """Seconds by the clock, seconds of processors, and what was found."""
    began, busy = time.perf_counter(), _processor_seconds()
    found = dict(engine(work, tasks, lambda _: None))
    return time.perf_counter() - began, _processor_seconds() - busy, found


def _points(number: int, chains: int) -> list[PointTask]:
    side = math.isqrt(number)
    overrides = [
        [
            f"link.snr_db={40 * i / side}",
            f"privacy.epsilon={5 + j}",
            f"sampler.chains={chains}",
        ]
        for i in range(side)
        for j in range(-(-number // side))
    ]
    return [
        PointTask(load_scenario(SCENARIO, given), {}, False, None)
        for given in overrides[:number]
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--chains", type=int, default=100)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    tasks, many = _points(options.points, options.chains), range(1000)
    with tempfile.TemporaryDirectory() as folder:
        config: Any = jax.config
        config.update("jax_compilation_cache_dir", folder)
        config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        _measure(local, measure, tasks[:1])
        found = {"all points, this process": _measure(local, measure, tasks)}
        with open_engine("dask", options.workers, print) as engine:
            found["start of the cluster, with imports"] = _measure(
                engine, _nothing, range(options.workers)
            )
            found[
                "first points of the workers (ArviZ, compiled code from the cache)"
            ] = _measure(engine, measure, tasks[: options.workers])
            found["all points, the cluster once it runs"] = _measure(
                engine, measure, tasks
            )
            found[f"{len(many)} points that take no time"] = _measure(
                engine, _nothing, many
            )
    assert (
        found["all points, this process"][2]
        == found["all points, the cluster once it runs"][2]
    )
    title = (
        f"{options.points} points, {options.workers} workers, {os.cpu_count()} cores"
    )
    table = Table("what", "seconds", "of processors", title=title)
    for name, (clock, busy, _) in found.items():
        table.add_row(name, f"{clock:.1f}", f"{busy:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
