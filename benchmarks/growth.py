"""What the time of `wflmc.sample` grows with: exponents over a decade each, of warm
calls on the softmax model.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from rich.table import Table

import wflmc
from benchmarks.timing import side_by_side

BASE = {"examples": 6000, "features": 30, "chains": 30, "devices": 30, "rounds": 30}
DECADES = {
    "examples": (6000, 19_000, 60_000),
    "features": (30, 95, 300),
    "chains": (30, 95, 300),
    "devices": (30, 95, 300),
    "rounds": (30, 95, 300),
}


def call(examples: int, features: int, chains: int, devices: int, rounds: int) -> Any:
    """Return a call of `sample` of that size."""
    posterior = wflmc.softmax_regression(
        jax.random.key(0), devices, examples=examples, dim=features
    )
    link, privacy = (
        wflmc.Link(wflmc.channel.static(power=1.0), snr_db=40),
        wflmc.Privacy(clip=1e4),
    )
    how = {
        "step_size": 0.4 / (posterior.mu + posterior.L),
        "policy": wflmc.Policy("no-dp"),
        "initial_w2_sq": 1.0,
    }
    plan = wflmc.plan(posterior, link, privacy, burn_in=rounds - 1, samples=1, **how)
    return lambda: wflmc.sample(jax.random.key(1), posterior, plan, chains)


def exponents() -> Table:
    """Return the slope of log time against log size, for each quantity with the others
    fixed.
    """
    table = Table(
        title=f"Time of a call grows with (others: {', '.join(f'{n} {v:,}' for n, v in BASE.items())})"
    )
    for name in ("what", "from", "to", "seconds", "exponent"):
        table.add_column(name, justify="right")
    for name, sizes in DECADES.items():
        seconds = side_by_side(
            *(call(**{**BASE, name: size}) for size in sizes), repeats=5
        )
        slope = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
        spent = f"{seconds[0]:.3f} to {seconds[-1]:.3f}"
        table.add_row(name, f"{sizes[0]:,}", f"{sizes[-1]:,}", spent, f"{slope:.2f}")
    return table


if __name__ == "__main__":
    from rich import print

    print(exponents())
