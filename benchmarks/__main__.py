"""`python -m benchmarks`: one table of ratios, each pair timed in turns on this machine."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import wflmc
from wflmc import channel


def side_by_side(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """Median seconds of two functions, called in turns after one warm-up each."""
    ours(), theirs()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, seconds in zip((ours, theirs), times, strict=True):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def numpy_chain(posterior, plan, generator):
    """One chain as a first program would write it: a loop over rounds, and one over devices."""
    theta = generator.standard_normal(posterior.dim)
    for s in range(plan.rounds):
        received = np.zeros(posterior.dim)
        for k in range(posterior.devices):
            if plan.weight[s, k] > 0:
                gradient = posterior.hessian[k] @ theta - posterior.linear[k]
                received += plan.gain[s] * gradient * min(1.0, plan.clip[k] / np.linalg.norm(gradient))
        received += np.sqrt(plan.noise_power) * generator.standard_normal(posterior.dim)
        theta = theta - plan.step_size[s] * plan.scale[s] / plan.gain[s] * received
    return theta


def main() -> None:
    """Print the table."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=20)
    step_size = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(
        posterior, link, wflmc.Privacy(15, 0.01, 30), step_size=step_size, burn_in=50, samples=50, power="equal"
    )
    chains, few = 10_000, 5
    generator = np.random.default_rng(0)
    ours, theirs = side_by_side(
        lambda: wflmc.sample(jax.random.key(0), posterior, plan, chains),
        lambda: [numpy_chain(posterior, plan, generator) for _ in range(few)],
        repeats=3,
    )
    rows = [("sampler, 10,000 chains × 100 rounds × 30 devices", "NumPy loop", (theirs / few) / (ours / chains))]

    everyone = dataclasses.replace(plan, weight=np.ones_like(plan.weight))
    loop_law = lambda: loop(posterior, everyone)  # noqa: E731
    ours, theirs = side_by_side(
        lambda: posterior.law(plan.step_size, plan.weight, plan.noise_variance), loop_law, repeats=20
    )
    rows.append(("exact law, 100 rounds", "loop over rounds", theirs / ours))

    table = Table(title="Times faster than")
    for name in ("what", "against", "ratio"):
        table.add_column(name)
    for what, against, ratio in rows:
        table.add_row(what, against, f"{ratio:.1f}")
    Console().print(table)


def loop(posterior, plan):
    """The law of the chain round by round."""
    mean, covariance = posterior.initial("prior")
    for s in range(plan.rounds):
        step = np.eye(posterior.dim) - plan.step_size[s] * np.tensordot(plan.weight[s], posterior.hessian, 1)
        mean = step @ mean + plan.step_size[s] * plan.weight[s] @ posterior.linear
        covariance = step @ covariance @ step.T + plan.noise_variance[s] * np.eye(posterior.dim)
    return mean, covariance


if __name__ == "__main__":
    main()
