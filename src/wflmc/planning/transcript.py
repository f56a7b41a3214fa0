"""Plans for noise-aware posteriors: the power at which all kept rounds together say most about the gradient.

A round receives the gradient under noise of variance v = (K/K_a)²/a, a = α²/N0, and the kept rounds together under
noise of variance V, 1/V = Σ 1/v: it does not matter in which of them the budget is spent. 1/V is linear in a, and so
are all limits. A linear program finds the smallest V, and its dual prices prove that no plan has a smaller one. Rounds
of burn-in count for nothing, since gradients are clipped there; they get the power that brings the chain near.
"""

import numpy as np
from scipy.optimize import linprog

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
    limited = np.isfinite(problem.budget)
    cap = problem.power_cap if limited.any() else problem.cap
    if not limited.any():
        a = np.where(np.arange(problem.rounds) < problem.burn_in, np.minimum(cap, problem.cap), cap)
        return Allocation(a, 1 / information(problem, a))
    unit = problem.budget[limited].min() * (1 - HEADROOM)
    use = problem.active[:, limited].T / (problem.budget[limited, None] * (1 - HEADROOM) / unit)
    value = np.where(np.arange(problem.rounds) < problem.burn_in, 0.0, problem.scale**-2.0)
    floor = np.minimum(problem.floor, cap) / unit
    high = np.where(value > 0, np.minimum(cap / unit, 1.0), floor)  # nobody spends more than all in one round
    first = linprog(-value, A_ub=use, b_ub=np.ones(len(use)), bounds=np.stack([floor, high], 1), method="highs")
    # The dual needs no trust in the solver: any prices of at least 0 bound 1/V from above.
    price = np.maximum(-first.ineqlin.marginals, 0.0)
    net = value - price @ use
    bound = float(price.sum() + np.where(net > 0, net * high, net * floor).sum())
    # The same with one more unknown, the largest power of a kept round, which is to be small.
    wanted = [np.append(row, 0.0) for row in (*use, -value)]
    below = np.column_stack([np.diag((value > 0) * 1.0)[value > 0], -np.ones((value > 0).sum())])
    limits = np.concatenate([np.ones(len(use)), [first.fun * (1 - EVEN)], np.zeros(len(below))])
    box = np.stack([np.append(floor, 0.0), np.append(high, 1.0)], 1)
    goal = np.append(np.zeros(problem.rounds), 1.0)
    even = linprog(goal, A_ub=np.vstack([*wanted, below]), b_ub=limits, bounds=box, method="highs")
    found = first.x if even.x is None else even.x[:-1]
    a = problem.within_budget(np.clip(found, floor, high) * unit)
    return Allocation(a, unit**-1 / bound)
