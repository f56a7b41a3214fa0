"""Random power problems that look like the planner's own, for the tests of the general solver."""

from __future__ import annotations

import numpy as np

from wflmc.planning.program import Program
from wflmc.recursion import first_order


def from_channel(active, cap, budget, rho, burn_in, objective) -> Program:
    """The planner's own shape: cost η²(K/K_a)², caps also limited by η(K/K_a)²/2, base from its recursion."""
    devices, senders, eta = active.shape[1], active.sum(1), 1 - rho
    error = 0.3 * eta + 0.5 * eta * (devices - senders) / devices
    base = first_order(error - 2 * eta, rho**2)
    cap = np.minimum(cap, eta * (devices / senders) ** 2 / 2)
    return Program(active, budget, cap, eta**2 * (devices / senders) ** 2, rho, burn_in, base, objective)


def activity(rng: np.random.Generator, rounds: int, devices: int, kind: str):
    """[S, K] booleans with at least one sender per round: all, iid, correlated in time, or sparse."""
    if kind == "all":
        on = np.ones((rounds, devices), dtype=bool)
    elif kind == "iid":
        on = rng.random((rounds, devices)) < rng.uniform(0.05, 1)
    elif kind == "correlated":
        factor = rng.uniform(0.8, 0.99)
        noise = np.sqrt(1 - factor**2) * rng.standard_normal((rounds, devices))
        on = first_order(noise, factor) > rng.uniform(-1, 1.5)
    else:
        on = rng.random((rounds, devices)) < min(1.0, 2 / devices)
    idle = np.flatnonzero(~on.any(1))
    on[idle, rng.integers(devices, size=idle.size)] = True
    return on


def random_program(rng: np.random.Generator) -> Program:
    """S 5-200, K 1-50, caps over 40 dB, budgets from very tight to loose, equal or not, ρ .5-.999, any burn-in."""
    rounds, devices = (int(np.exp(rng.uniform(np.log(low), np.log(high)))) for low, high in ((5, 200), (1, 50)))
    on = activity(rng, rounds, devices, str(rng.choice(["all", "iid", "correlated", "sparse"])))
    weakest = np.where(on, rng.exponential(0.01, on.shape), np.inf).min(1)
    cap = 10 ** rng.uniform(0, 4) * weakest * 10 ** rng.uniform(-2, 2)
    budget = np.full(devices, 10 ** rng.uniform(-4, 0.2) * (cap @ on).max())
    if rng.random() < 0.5:
        budget *= 10 ** rng.uniform(-1, 1, devices)
    rho = 1 - 10 ** rng.uniform(-3, np.log10(0.5))
    burn_in = int(rng.choice([0, rounds - 1, rng.integers(rounds)]))
    return from_channel(on, cap, budget, rho, burn_in, str(rng.choice(["worst", "average"])))


def kept_value(program: Program, bounds) -> float:
    """The objective of bounds[S]."""
    kept = bounds[program.burn_in :]
    return float(kept.max() if program.objective == "worst" else kept.mean())
