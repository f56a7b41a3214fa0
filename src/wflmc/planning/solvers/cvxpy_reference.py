"""The power problem for a generic convex solver (cvxpy with Clarabel): slower, and independent of ours."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from wflmc.errors import InputError
from wflmc.planning.solvers.program import Array, Program


def solve_by_cvxpy(program: Program) -> Array:
    """a[S], optimal to the solver's tolerance; budgets and caps are met to that tolerance too."""
    try:
        cp: Any = importlib.import_module("cvxpy")
    except ImportError:
        raise InputError("solver", "cvxpy", "'own' unless cvxpy is installed: pip install 'wflmc[convex]'") from None
    rounds = program.cap.size
    # Units in which a and the noise are near 1: without them Clarabel is off by per cents, on either side.
    share = np.median(program.budget) / max(1, program.active.sum(0).max())
    unit = float(np.median(np.minimum(program.cap, share)))
    scale = float(np.median(program.cost)) / unit / (1 - float(np.median(program.decay)))
    a, noise, total = cp.Variable(rounds), cp.Variable(rounds), cp.Variable(rounds)
    budget = np.minimum(program.budget, 2 * program.cap.sum()) / unit
    limits = [
        a <= program.cap / unit,
        a >= program.floor / unit,
        noise >= cp.multiply(program.cost / unit / scale, cp.inv_pos(a)),
        total[0] == noise[0],
        program.active.T.astype(float) @ a <= budget,
    ]
    if rounds > 1:
        limits.append(total[1:] == cp.multiply(program.decay[1:], total[:-1]) + noise[1:])
    kept = (total + program.base / scale)[program.burn_in :]
    goal = cp.max(kept) if program.objective == "worst" else cp.sum(kept) / (rounds - program.burn_in)
    cp.Problem(cp.Minimize(goal), limits).solve(solver=cp.CLARABEL)
    if a.value is None:
        raise InputError("solver", "cvxpy", "'own' for this problem: Clarabel found no solution")
    return np.asarray(a.value) * unit
