"""The planner against cvxpy with Clarabel, and how it grows with rounds and devices."""

from __future__ import annotations

import resource
import time
import warnings
from dataclasses import replace

import jax
import numpy as np
from rich.table import Table

import wflmc
from benchmarks.timing import side_by_side
from wflmc import channel
from wflmc.planning import POLICIES, Allocation
from wflmc.planning.solvers.allocation import allocate
from wflmc.planning.solvers.program import PowerProgram, round_bounds, solve_by_cvxpy


def program_of(
    rounds: int, devices: int, snr_db: float, objective: str, correlation: float = 0.0
) -> PowerProgram:
    """The paper's Gaussian study over a Rayleigh channel with thresholds, at any size,
    as the solver sees it.
    """
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=devices, examples=40 * devices
    )
    seen: list[PowerProgram] = []

    def capture(problem) -> Allocation:
        seen.append(problem.program())
        return Allocation(problem.cap)

    wflmc.plan(
        posterior,
        wflmc.Link(channel.rayleigh(0.01, correlation), snr_db),
        wflmc.Privacy(15, 0.01, 30, "paper"),
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=rounds // 2,
        samples=rounds - rounds // 2,
        policy=wflmc.Policy(
            POLICIES["optimized"]._replace(allocate=capture), objective=objective
        ),
    )
    return seen[0]


def dense_program(rounds: int, devices: int, objective: str) -> PowerProgram:
    """Random activity of density one half, unequal budgets: sizes that no generic
    solver takes.
    """
    rng = np.random.default_rng(0)
    on = rng.random((rounds, devices), dtype=np.float32) < 0.5
    on[:, 0] |= ~on.any(1)
    eta, scale = 1e-3, devices / on.sum(1)
    cap = np.minimum(rng.exponential(0.003, rounds), eta * scale**2 / 2)
    budget = 0.3 * float(np.max(cap @ on[:, :50])) * rng.uniform(0.8, 2, devices)
    base = np.full(rounds, 0.3)
    rho, floor = np.full(rounds, 1 - eta), np.zeros(rounds)
    return PowerProgram(
        on, budget, cap, (eta * scale) ** 2, rho, base, floor, rounds // 2, objective
    )


def against_cvxpy(
    sizes: list[tuple[int, int, int]],
) -> tuple[Table, dict[str, list[float]]]:
    """Ratio of times and of objectives, and all ratios of times by size; cvxpy is timed
    as a user would call it.
    """
    table = Table(title="Planning against cvxpy + Clarabel (medians, calls in turns)")
    for name in (
        "S",
        "K",
        "objective",
        "SNR",
        "ours",
        "cvxpy",
        "times faster",
        "certified gap",
        "cvxpy worse by",
    ):
        table.add_column(name, justify="right")
    found: dict[str, list[float]] = {}
    for rounds, devices, repeats in sizes:
        ratios = found.setdefault(
            f"planning, S = {rounds}, K = {devices}: cvxpy + Clarabel", []
        )
        for objective in ("worst", "average"):
            for snr_db in (10, 20, 30):
                program = program_of(rounds, devices, snr_db, objective)
                with warnings.catch_warnings():
                    # Clarabel warns when it doubts its own accuracy.
                    warnings.simplefilter("ignore")
                    ours, theirs = side_by_side(
                        lambda p=program: allocate(p),
                        lambda p=program: solve_by_cvxpy(p),
                        repeats=repeats,
                    )
                    excess = _excess(program)
                ratios.append(theirs / ours)
                table.add_row(
                    str(rounds), str(devices), objective, f"{snr_db} dB",
                    f"{1e3 * ours:.2f} ms", f"{1e3 * theirs:.1f} ms",
                    f"{theirs / ours:.1f}", f"{allocate(program).gap:.0e}", f"{excess:.0e}",
                )  # fmt: skip
        table.add_row(
            str(rounds),
            str(devices),
            "median",
            "",
            "",
            "",
            f"{np.median(ratios):.1f}",
            "",
            "",
            end_section=True,
        )
    return table, found


def _excess(program: PowerProgram) -> float:
    """How much worse the reference's plan is than ours, once it is made feasible."""
    a = np.clip(solve_by_cvxpy(program), 1e-300, program.cap)
    a /= max(1.0, float(np.max(a @ program.active / program.budget)))
    kept = round_bounds(program, a)[program.burn_in :]
    value = kept.max() if program.objective == "worst" else kept.mean()
    return float(value / allocate(program).objective - 1)


def growth(largest: int) -> Table:
    """Wall time against the number of (round, device) pairs."""
    table = Table(
        title="Growth of our planner (density one half, unequal budgets, asked for a gap of 1e-6)"
    )
    for name in (
        "S",
        "K",
        "objective",
        "seconds",
        "gap",
        "priced devices",
        "ns per pair",
        "peak MiB",
    ):
        table.add_column(name, justify="right")
    for rounds, devices in (
        (100, 100),
        (1000, 1000),
        (1000, 10_000),
        (10_000, 1000),
        (10_000, 10_000),
    ):
        if max(rounds, devices) > largest:
            continue
        base = dense_program(rounds, devices, "worst")
        for objective in ("worst", "average"):
            program = replace(base, objective=objective)
            began = time.perf_counter()
            solution = allocate(program, 1e-6)
            seconds = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            table.add_row(
                str(rounds), str(devices), objective, f"{seconds:.3f}", f"{solution.gap:.0e}",
                str(np.count_nonzero(solution.lam)), f"{1e9 * seconds / (rounds * devices):.0f}", f"{peak:.0f}",
            )  # fmt: skip
    return table
