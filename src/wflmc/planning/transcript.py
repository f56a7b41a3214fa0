"""Plans for noise-aware posteriors: the power at which all kept rounds together say most about the gradient.

A round receives the gradient under noise of variance v = (K/K_a)²/a, a = α²/N0, and the kept rounds together under
noise of variance V, 1/V = Σ 1/v: it does not matter in which of them the budget is spent. 1/V is linear in a, and so
are all limits. A linear program finds the smallest V, and its dual prices prove that no plan has a smaller one. Rounds
of burn-in count for nothing, since gradients are clipped there; they get the power that brings the chain near.
"""

import numpy as np
import scipy  # its parts are imported when used

from wflmc.dynamics import Array
from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.solvers.program import HEADROOM

EVEN = 5e-7
"""Share of the information that is given away for powers that are as equal as possible."""


def information(problem: Problem, a: Array) -> float:
    """Return 1/V = Σ a (K_a/K)² over the kept rounds."""
    return float((a / problem.scale**2)[problem.burn_in :].sum())


def most_information(problem: Problem) -> Allocation:
    """Return the powers with the smallest V, the most equal ones of these, and a proven lower bound on V."""
    kept, limited = (
        np.arange(problem.rounds) >= problem.burn_in,
        np.isfinite(problem.budget),
    )
    if not limited.any():
        a = np.where(
            kept & np.isfinite(problem.power_cap), problem.power_cap, problem.cap
        )
        return Allocation(a, 1 / information(problem, a))
    budget = problem.budget[limited] * (1 - HEADROOM)
    unit = budget.min()
    floor = np.minimum(problem.floor, problem.power_cap) / unit
    high = np.where(
        kept, np.minimum(problem.power_cap / unit, 1.0), floor
    )  # no round takes more than all
    use, value = (
        problem.active[:, limited].T * (unit / budget)[:, None],
        np.where(kept, problem.scale**-2.0, 0.0),
    )
    # One unknown more is the largest power of a kept round, which costs a little: the most equal powers are taken.
    largest = np.hstack([np.eye(problem.rounds)[kept], -np.ones((kept.sum(), 1))])
    rows = np.vstack([np.hstack([use, np.zeros((len(use), 1))]), largest])
    limits, box = (
        np.append(np.ones(len(use)), np.zeros(kept.sum())),
        [*zip(floor, high, strict=True), (0, 1)],
    )
    goal = (
        np.append(-value, EVEN) / EVEN
    )  # so that the solver's tolerance is below what is given away
    found = scipy.optimize.linprog(
        goal, A_ub=rows, b_ub=limits, bounds=box, method="highs"
    )
    # Any prices of at least 0 bound 1/V from above: the bound needs no trust in the solver.
    price = np.maximum(-found.ineqlin.marginals[: len(use)] * EVEN, 0.0)
    net = value - price @ use
    bound = price.sum() + np.where(net > 0, net * high, net * floor).sum()
    return Allocation(
        problem.within_budget(np.clip(found.x[:-1], floor, high) * unit),
        float(1 / (unit * bound)),
    )
