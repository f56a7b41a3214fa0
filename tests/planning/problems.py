"""Random power programs like those of the planner, and checks of their solutions, for
tests of the solver.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from wflmc.planning.solvers.program import PowerProgram, dual, round_bounds
from wflmc.support.recursion import first_order


def from_channel(active, cap, budget, rho, burn_in, objective) -> PowerProgram:
    """Return a program as the planner builds them: cost η²(K/K_a)², caps of at most
    η(K/K_a)²/2.

    Args:
        active: [S, K], who sends.
        cap: [S], limits by transmit power.
        budget: [K], limits of privacy.
        rho: the contraction of a round, 1 − η.
        burn_in: rounds that do not count.
        objective: "worst" or "average".
    """
    devices = active.shape[1]
    senders = active.sum(1)
    eta = 1 - rho
    error = 0.3 * eta + 0.5 * eta * (devices - senders) / devices
    base = first_order(error - 2 * eta, rho**2)
    cap = np.minimum(cap, eta * (devices / senders) ** 2 / 2)
    cost = eta**2 * (devices / senders) ** 2
    none = np.zeros(cap.size)
    return PowerProgram(
        active,
        budget,
        cap,
        cost,
        np.full(cap.size, rho),
        base,
        none,
        burn_in,
        objective,
    )


def activity(rng: np.random.Generator, rounds: int, devices: int, kind: str):
    """Return who sends, [S, K], with at least one sender per round: all, iid,
    correlated in time, or sparse.
    """
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


def random_program(rng: np.random.Generator) -> PowerProgram:
    """Return a program of 5-200 rounds and 1-50 devices.

    Caps span 40 dB, budgets go from very tight to loose, equal or not, ρ from 0.5 to
    0.999.
    """
    rounds, devices = (
        int(np.exp(rng.uniform(np.log(low), np.log(high))))
        for low, high in ((5, 200), (1, 50))
    )
    on = activity(
        rng, rounds, devices, str(rng.choice(["all", "iid", "correlated", "sparse"]))
    )
    weakest = np.where(on, rng.exponential(0.01, on.shape), np.inf).min(1)
    cap = 10 ** rng.uniform(0, 4) * weakest * 10 ** rng.uniform(-2, 2)
    budget = np.full(devices, 10 ** rng.uniform(-4, 0.2) * (cap @ on).max())
    if rng.random() < 0.5:
        budget *= 10 ** rng.uniform(-1, 1, devices)
    rho = 1 - 10 ** rng.uniform(-3, np.log10(0.5))
    burn_in = int(rng.choice([0, rounds - 1, rng.integers(rounds)]))
    return from_channel(
        on, cap, budget, rho, burn_in, str(rng.choice(["worst", "average"]))
    )


def kept_value(program: PowerProgram, bounds) -> float:
    """Return the objective of bounds[S] on W2²: the worst or the mean after burn-in."""
    kept_bounds = bounds[program.burn_in :]
    return float(
        kept_bounds.max() if program.objective == "worst" else kept_bounds.mean()
    )


def check(program, solution, gap=1e-9):
    """Check limits, objective, multipliers, lower bound and gap of a solution, without
    the solver's own checks.
    """
    p, x = program, solution
    assert np.all((x.a > 0) & (x.a >= p.floor) & (x.a <= p.cap))
    for k in range(p.budget.size) if p.active.size < 10**5 else [0, p.budget.size - 1]:
        spent = math.fsum(x.a[p.active[:, k]])
        assert spent <= p.budget[k] or spent <= math.fsum(p.floor[p.active[:, k]]) * (
            1 + 1e-12
        )
    assert x.objective == pytest.approx(kept_value(p, round_bounds(p, x.a)), rel=1e-12)
    assert min(x.w.min(), x.lam.min()) >= 0
    assert not x.w[: p.burn_in].any()
    assert x.w.sum() == pytest.approx(1, rel=1e-12)
    if p.objective == "average":
        assert np.ptp(x.w[p.burn_in :]) < 1e-15
    assert written_out_dual(p, x.w, x.lam) >= x.lower_bound - 1e-12 * abs(x.objective)
    assert x.lower_bound <= x.objective
    assert x.gap == pytest.approx(
        (x.objective - x.lower_bound) / abs(x.objective), abs=1e-15
    )
    assert x.gap <= gap


def written_out_dual(p, w, lam):
    """Return the Lagrangian dual by explicit sums, sharing no code with the solver.

    Beyond 300 rounds, where these sums are slow, it is the solver's own.
    """
    if p.cap.size > 300:
        return dual(p, w, lam)[0]
    s = np.arange(p.cap.size)
    fallen = np.cumsum(2 * np.log(p.rho))
    decay = np.where(
        s[:, None] >= s, np.exp(np.minimum(fallen[:, None] - fallen, 0.0)), 0.0
    )
    weight = p.cost * (w @ decay)
    price = p.active @ lam
    with np.errstate(divide="ignore", invalid="ignore"):
        a = np.clip(
            np.nan_to_num(np.sqrt(weight / price), nan=0.0, posinf=np.inf),
            p.floor,
            p.cap,
        )
        terms = np.where(weight > 0, weight / np.where(a > 0, a, 1.0), 0.0) + price * a
    finite = np.isfinite(p.budget)
    return float(w @ p.base + terms.sum() - lam[finite] @ p.budget[finite])
