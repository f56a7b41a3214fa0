"""Advice, and the forecast it rests on against the same forecast as a loop over rounds.

python -m benchmarks.advice
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
from rich.console import Console
from rich.table import Table
from tests.evaluation.clipped_reference import forecast_by_rounds

import wflmc
from benchmarks.timing import side_by_side
from wflmc import channel
from wflmc.evaluation.clipped_law import forecast, model_of
from wflmc.planning import Policy, Sampler

DEVICES = 30
SETTINGS: dict[str, dict[str, float | str]] = {
    "as in the paper": {},
    "small clip": {"clip": 3.0},
    "large clip": {"clip": 300.0},
    "small epsilon": {"epsilon": 1.0},
    "equal power": {"power": "equal", "epsilon": 4.0},
    "kinetic": {"power": "equal", "epsilon": 4.0, "dynamics": "kinetic"},
}
"""What differs from the paper's study, by name: settings with much to try."""


def posteriors() -> dict[str, wflmc.posterior.Posterior]:
    """The models of the two studies, their data synthetic."""
    key = jax.random.key(0)
    return {
        "gaussian": wflmc.gaussian_regression(
            key, devices=DEVICES, examples=40 * DEVICES
        ),
        "softmax": wflmc.softmax_regression(
            key, devices=DEVICES, examples=40 * DEVICES
        ),
    }


def arguments(
    posterior: wflmc.posterior.Posterior, rounds: int, changes: dict[str, float | str]
) -> dict[str, object]:
    """The arguments of `plan` and `advise` beside the posterior."""
    step_size = 0.4 / (posterior.mu + posterior.L)
    sampler = Sampler()
    if changes.get("dynamics") == "kinetic":
        step_size = posterior.L**-0.5
        sampler = Sampler(dynamics="kinetic", friction=float(2 * posterior.mu**0.5))
    return {
        "link": wflmc.Link(channel.rayleigh(0.01), snr_db=30),
        "privacy": wflmc.Privacy(
            changes.get("epsilon", 15.0), 0.01, changes.get("clip", 30.0)
        ),
        "step_size": float(step_size),
        "burn_in": rounds // 2,
        "samples": rounds - rounds // 2,
        "sampler": sampler,
        "policy": Policy(power=str(changes.get("power", "optimized"))),
    }


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call; the first one counts, as users make one."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def against_loops(sizes: tuple[int, ...] = (100, 1000), repeats: int = 3) -> Table:
    """Seconds of advice, and of one forecast against its loop over rounds, both in
    turns in this run.
    """
    table = Table(
        title=f"Advice for {DEVICES} devices, and one of its forecasts against a loop over rounds"
    )
    for name in ("S", "model", "setting", "advice", "forecast", "loop", "times faster"):
        table.add_column(name, justify="right")
    for rounds in sizes:
        for model_name, posterior in posteriors().items():
            for setting, changes in SETTINGS.items():
                given = arguments(posterior, rounds, changes)
                plan = wflmc.plan(posterior, **given)
                model = model_of(plan, posterior)
                advice = median_seconds(
                    lambda p=posterior, g=given: wflmc.advise(p, **g), repeats
                )
                fast, slow = side_by_side(
                    lambda p=plan, m=model: forecast(p, m),
                    lambda p=plan, m=model: forecast_by_rounds(p, m),
                    repeats=repeats,
                )
                table.add_row(
                    str(rounds), model_name, setting, f"{advice:.2f} s",
                    f"{1e3 * fast:.1f} ms", f"{1e3 * slow:.0f} ms", f"{slow / fast:.1f}",
                )  # fmt: skip
    return table


def main() -> None:
    """Print the table."""
    Console(width=120).print(against_loops())


if __name__ == "__main__":
    main()
