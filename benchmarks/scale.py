"""Sizes that a first program would not survive: each in a process of its own, with its
peak memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.table import Table

import wflmc
from wflmc import channel
from wflmc.posterior.softmax import synthetic_labels
from wflmc.sampling import Execution

IN_MEMORY = Execution()


class Case(NamedTuple):
    """What is run, and what [chains, devices, m] would take in float32."""

    about: str
    devices: int
    chains: int
    dim: int
    run: Callable[[], object]


def _sample(
    posterior: object,
    chains: int,
    burn_in: int,
    samples: int,
    execution: Execution = IN_MEMORY,
) -> object:
    plan = wflmc.plan(
        posterior, wflmc.Link(channel.rayleigh(1.0), snr_db=20), wflmc.Privacy(50, 0.1, 300),
        step_size=1 / (posterior.mu + posterior.L), burn_in=burn_in, samples=samples,
        policy=wflmc.Policy("equal", "all", "average"), initial_w2_sq=1.0,
    )  # fmt: skip
    return wflmc.sample(jax.random.key(0), posterior, plan, chains, execution=execution)


def _softmax(devices: int, examples: int, dim: int, classes: int = 10) -> object:
    X, y = synthetic_labels(jax.random.key(0), examples, dim, classes)
    return wflmc.softmax_regression(
        jax.random.key(0), devices, X=X, y=y, classes=classes, partition="blocks"
    )


def _stream() -> object:
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    with tempfile.TemporaryDirectory() as folder:
        trace = _sample(
            posterior,
            100,
            50,
            100_000,
            execution=Execution(store=Path(folder) / "theta.npy"),
        )
        assert np.isfinite(trace.theta[:, -1]).all()
    return trace


CASES: dict[str, Case] = {
    "K=100": Case("12,000 examples on 100 devices", 100, 50, 300, lambda: _sample(_softmax(100, 12_000, 30), 50, 4, 1)),
    "K=1000": Case(
        "12,000 examples on 1,000 devices", 1000, 50, 300, lambda: _sample(_softmax(1000, 12_000, 30), 50, 4, 1)
    ),
    "K=10000": Case(
        "12,000 examples on 10,000 devices", 10_000, 50, 300, lambda: _sample(_softmax(10_000, 12_000, 30), 50, 4, 1)
    ),
    "m=1e6": Case(
        "a million parameters (d = 10,000, 100 classes)", 20, 4, 1_000_000,
        lambda: _sample(_softmax(20, 1000, 10_000, 100), 4, 2, 1),
    ),
    "chains=1e4": Case(
        "10,000 chains of the Gaussian model, 100 rounds", 30, 10_000, 5,
        lambda: _sample(wflmc.gaussian_regression(jax.random.key(0), devices=30), 10_000, 50, 50),
    ),
    "S=1e5": Case("100,000 rounds of 100 chains, streamed to disk", 30, 100, 5, _stream),
    "100GiB": Case(
        "naive layout above 100 GiB (1,000 chains, 1,000 devices), --memory 1GiB", 1000, 1000, 30_000,
        lambda: _sample(_softmax(1000, 2000, 3000), 1000, 1, 1, execution=Execution(memory=2.0**30)),
    ),
}  # fmt: skip


def measure(name: str) -> dict[str, float]:
    """Seconds and peak MiB of one case, in this process."""
    began = time.perf_counter()
    CASES[name].run()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": peak_memory()}


def peak_memory() -> float:
    """Peak MiB of this process; Linux hands ru_maxrss down to children, and VmHWM does
    not.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def sizes() -> Table:
    """All cases; the peak includes Python, JAX and the data."""
    table = Table(
        title="Scale (seconds with planning and compilation; peak of the whole process)"
    )
    for column in ("what", "chains × devices × m in float32", "seconds", "peak MiB"):
        table.add_column(column, justify="right")
    for name, case in CASES.items():
        command = [sys.executable, "-m", "benchmarks.scale", name]
        found = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
        naive = 4 * case.chains * case.devices * case.dim / 2**30
        table.add_row(
            case.about,
            f"{naive:.3g} GiB",
            f"{found['seconds']:.1f}",
            f"{found['peak']:.0f}",
        )
    return table


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
