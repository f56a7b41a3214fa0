"""The capacity model against small cases: what it predicts and what is measured, in one run, with their ratio.

`python -m benchmarks.capacity` prints the table of docs/scale.md. Each case has a process of its own, so that its
peak of memory is its own; bytes of memory need Linux. Seconds are processor seconds, which other work on the machine
hardly changes.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import wflmc
from wflmc import channel
from wflmc.planning.capacity import capacity, traits_of
from wflmc.planning.costs import Size, Traits

Row = tuple[str, str, float, float]
"""What it is, its unit, what is predicted and what is measured."""


def _seconds(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def _peak(call: Callable[[], object]) -> tuple[object, float]:
    """What a call returns, and the bytes that its peak is above what was there before; nan where it cannot be told."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = _status("VmRSS")
        return call(), _status("VmHWM") - before
    except OSError:
        return call(), float("nan")


def _status(name: str) -> float:
    return 1024.0 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def update(parameters: int) -> list[Row]:
    """The server's update, without and with noise of its own."""
    kernel: Any = importlib.import_module("wflmc.sampling.kernel")
    key, theta, y, weight = jax.random.key(0), jnp.zeros(parameters), jnp.ones(parameters), jnp.ones(1)
    rows: list[Row] = []
    for noise in (None, np.float32(0.1)):
        now = kernel.Rounds(np.float32(0.1), np.float32(1), np.ones(1), noise, np.ones(1), np.float32(1))
        advance = jax.jit(kernel.update)
        measured = _seconds(lambda f=advance, n=now: f(key, theta, y, weight, n).block_until_ready())
        traits = Traits(loss_bytes=0, server_noise=noise is not None)
        predicted = capacity(Size(1, parameters, 1, 1), traits).server.seconds
        rows.append((f"update{'' if noise is None else ' with noise'}, m = {parameters:.0e}", "s", predicted, measured))
    return rows


def _plan(posterior: Any, rounds: int, **keywords: Any) -> tuple[wflmc.Plan, wflmc.Link]:
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=20)
    privacy = wflmc.Privacy(15, 0.01, 30)
    step = 0.4 / (posterior.mu + posterior.L)
    keywords = {"step_size": step, "burn_in": rounds // 2, "samples": rounds - rounds // 2, **keywords}
    return wflmc.plan(posterior, link, privacy, **keywords), link


class Target:
    """All that planning asks of a posterior."""

    mu, L, dim = 100.0, 200.0, 10

    def __init__(self, devices: int) -> None:
        self.devices = devices

    def initial_w2_sq(self, init: str = "prior") -> float:
        """W2² between start and posterior."""
        del init
        return 5.0


def planning(rounds: int, devices: int) -> list[Row]:
    """A whole plan with thresholds."""
    _plan(Target(10), 10)
    began = time.process_time()
    _, peak = _peak(lambda: _plan(Target(devices), rounds))
    seconds = time.process_time() - began
    found = capacity(Size(devices, 10, rounds, rounds // 2), Traits()).planning
    about = f"S = {rounds:,}, K = {devices:,}"
    return [(f"planning, {about}", "s", found.seconds, seconds), (f"planning, {about}", "bytes", found.bytes, peak)]


def ledger(rounds: int, devices: int) -> list[Row]:
    """A ledger written round by round, and read again."""
    plan, link = _plan(Target(devices), rounds)
    size = Size(devices, 10, rounds, rounds // 2)
    found, losses = capacity(size, traits_of(plan, link)).files, plan.loss
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        book = wflmc.privacy.Ledger(plan.privacy, devices, subject="a", path=path)
        began = time.process_time()
        for at in range(rounds):
            book.charge("a" * 32, at, losses[at : at + 1], "b" * 32)
        seconds = (time.process_time() - began) / rounds
        size_on_disk = path.stat().st_size
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            peak = fresh.submit(_reading, plan.privacy, devices, path).result()
    about = f"S = {rounds:,}, K = {devices:,}"
    return [
        (f"ledger.jsonl, {about}", "bytes", found.ledger, size_on_disk),
        (f"ledger, a round, {about}", "s", found.ledger_seconds, seconds),
        (f"ledger, reading, {about}", "bytes", found.ledger_memory, peak),
    ]


def _reading(privacy: wflmc.Privacy, devices: int, path: Path) -> float:
    """Bytes at the peak of reading a ledger."""
    return _peak(lambda: wflmc.privacy.Ledger(privacy, devices, subject="a", path=path))[1]


def emulation(devices: int, examples: int, dim: int, chains: int) -> list[Row]:
    """Softmax regression, whole calls of the sampler; per chain and round."""
    posterior = wflmc.softmax_regression(jax.random.key(0), devices, examples=examples, dim=dim, classes=10)
    rounds = 20
    plan, link = _plan(posterior, rounds, schedule="all", power="equal", initial_w2_sq=1.0)
    key = jax.random.key(0)
    measured = _seconds(lambda: wflmc.sample(key, posterior, plan, chains), repeats=3) / (rounds * chains)
    size = Size(devices, posterior.dim, rounds, rounds // 2, examples / devices, per_example=4.0)
    predicted = capacity(size, traits_of(plan, link)).emulation.seconds
    about = f"K = {devices:,}, m = {posterior.dim:,}, N = {examples:,}, {chains} chains"
    return [(f"chain and round, {about}", "s", predicted, measured)]


def samples(parameters: int, chains: int, kept: int) -> list[Row]:
    """trace.nc of a run."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=2, examples=20, dim=parameters)
    plan, _ = _plan(posterior, 2 * kept, schedule="all", power="equal")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.nc"
        wflmc.sample(jax.random.key(0), posterior, plan, chains).save(path)
        measured = path.stat().st_size
    predicted = chains * capacity(Size(2, parameters, 2 * kept, kept), Traits()).files.samples
    return [(f"trace.nc, m = {parameters}, {chains} × {kept:,} samples", "bytes", predicted, measured)]


CASES: list[tuple[Callable[..., list[Row]], tuple[int, ...]]] = [
    (update, (10**5,)),
    (update, (10**6,)),
    (update, (10**7,)),
    (update, (10**8,)),
    (emulation, (30, 3000, 30, 50)),
    (emulation, (30, 12_000, 30, 150)),
    (emulation, (300, 12_000, 100, 20)),
    (planning, (300, 1000)),
    (planning, (1000, 1000)),
    (planning, (1000, 10_000)),
    (planning, (3000, 3000)),
    (planning, (10_000, 1000)),
    (planning, (10, 10**6)),
    (ledger, (100, 1000)),
    (ledger, (30, 30_000)),
    (ledger, (3, 10**6)),
    (samples, (20, 10, 1000)),
    (samples, (300, 10, 1000)),
]


def main() -> None:
    """Print the table, in Markdown with `--markdown`; with the number of a case, that case as JSON."""
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        measure, arguments = CASES[int(sys.argv[1])]
        print(json.dumps(measure(*arguments)))
        return
    table = Table(title="The capacity model against what is measured")
    for name in ("what", "predicted", "measured", "predicted / measured"):
        table.add_column(name, justify="left" if name == "what" else "right")
    rows = []
    for index in range(len(CASES)):
        command = [sys.executable, "-m", "benchmarks.capacity", str(index)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
        for what, unit, predicted, measured in json.loads(done.stdout):
            rows.append((what, f"{predicted:.3g} {unit}", f"{measured:.3g} {unit}", f"{predicted / measured:.2f}"))
            table.add_row(*rows[-1])
    if "--markdown" in sys.argv:
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
