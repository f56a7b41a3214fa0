"""Plans for noise-aware posteriors.

The power is found at which all kept rounds together say most about the gradient. A
round receives the gradient under noise of variance v = (K/K_a)²/a, a = α²/N0, and the
kept rounds together under noise of variance V, 1/V = Σ 1/v: it does not matter in which
of them the budget is spent. 1/V is linear in a, and so are all limits. A linear program
finds the smallest V, and its dual prices prove that no plan has a smaller one. Rounds
of burn-in count for nothing, since gradients are clipped there; they get the power that
brings the chain near.
"""

from typing import NamedTuple

import numpy as np
import scipy  # its parts are imported when used
from numpy.typing import NDArray

from wflmc.dynamics import Array
from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.solvers.program import HEADROOM

EVENNESS_WEIGHT = 5e-7
"""Fraction of the information that is given away for powers as equal as possible."""


def information(problem: Problem, a: Array) -> float:
    """Return what the kept rounds together say about the gradient.

    1/V = Σ a (K_a/K)² over the kept rounds: the precision of the best weighted mean of
    their received gradients, as a = α²/N0. Rounds of burn-in do not count.

    Args:
        problem: of these rounds.
        a: power of every round, [S].

    Returns:
        1/V.
    """
    by_round = a / problem.scale**2
    return float(by_round[problem.burn_in :].sum())


class _LinearProgram(NamedTuple):
    """Maximize value · x under floor ≤ x ≤ high and use @ x ≤ 1.

    x is the power over the smallest budget.
    """

    value: Array
    """Information of a round at unit power, [S]."""
    use: Array
    """What a round takes of every limited budget, [K', S]."""
    floor: Array
    """[S]."""
    high: Array
    """[S]."""
    is_kept: NDArray[np.bool_]
    """Rounds after burn-in, [S]."""


class _LinearSolution(NamedTuple):
    """The powers, and what they cost."""

    x: Array
    """[S]."""
    price: Array
    """Of every budget, [K']; at least 0."""


def most_information(problem: Problem) -> Allocation:
    """Return the powers with the smallest V.

    Without a budget every kept round transmits at its power cap, and at the Langevin
    cap where power has no limit. Otherwise a linear program is solved; of its optima
    the one with the most equal powers is taken. Kept rounds may exceed the Langevin
    cap, because information has no use for noise.

    Args:
        problem: the limits of power.

    Returns:
        a[S], and a proven lower bound on V; None where nothing limits power, and V
        could be as small as one likes.
    """
    is_kept = np.arange(problem.rounds) >= problem.burn_in
    is_limited = np.isfinite(problem.budget)
    if not is_limited.any():
        return _at_power_caps(problem, is_kept)
    budget = problem.budget[is_limited] * (1 - HEADROOM)
    unit = budget.min()
    floor = np.minimum(problem.floor, problem.power_cap) / unit
    # No round takes more than the smallest budget of its senders.
    budget_of_senders = np.where(problem.active[:, is_limited], budget, np.inf).min(-1)
    kept_high = np.minimum(problem.power_cap, budget_of_senders) / unit
    program = _LinearProgram(
        value=np.where(is_kept, problem.scale**-2.0, 0.0),
        use=problem.active[:, is_limited].T * (unit / budget)[:, None],
        floor=floor,
        high=np.where(is_kept, kept_high, floor),
        is_kept=is_kept,
    )
    solution = _solve(program)
    x = np.clip(solution.x, program.floor, program.high)
    bound = _bound(program, solution.price)
    return Allocation(problem.within_budget(x * unit), float(1 / (unit * bound)))


def _at_power_caps(problem: Problem, is_kept: NDArray[np.bool_]) -> Allocation:
    """Return the most power of the kept rounds, and of the others their caps."""
    has_power_cap = is_kept & np.isfinite(problem.power_cap)
    a = np.where(has_power_cap, problem.power_cap, problem.cap)
    is_optimum = np.array_equal(has_power_cap, is_kept)
    return Allocation(a, 1 / information(problem, a) if is_optimum else None)


def _solve(program: _LinearProgram) -> _LinearSolution:
    """Solve the program, of whose optima the most equal powers are taken.

    A further unknown is the largest power of a kept round, which has a small price.
    """
    rounds = program.value.size
    devices = len(program.use)
    kept_rounds = program.is_kept.sum()
    no_largest = np.zeros((devices, 1))
    within_budget = np.hstack([program.use, no_largest])
    selection = np.eye(rounds)[program.is_kept]
    minus_largest = -np.ones((kept_rounds, 1))
    below_largest = np.hstack([selection, minus_largest])
    right = np.append(np.ones(devices), np.zeros(kept_rounds))
    largest_high = max(1.0, float(program.high.max()))
    ranges = [*zip(program.floor, program.high, strict=True), (0, largest_high)]
    # Scaled such that the solver's tolerance is below what is given away.
    goal = np.append(-program.value, EVENNESS_WEIGHT) / EVENNESS_WEIGHT
    solution = scipy.optimize.linprog(
        goal,
        A_ub=np.vstack([within_budget, below_largest]),
        b_ub=right,
        bounds=ranges,
        method="highs",
    )
    marginals = solution.ineqlin.marginals[:devices]
    return _LinearSolution(
        x=solution.x[:-1],
        price=np.maximum(-marginals * EVENNESS_WEIGHT, 0.0),
    )


def _bound(program: _LinearProgram, price: Array) -> float:
    """Return the most information that any powers within the limits can have.

    Any prices of at least 0 give a bound: it needs no trust in the solver.
    """
    net_value = program.value - price @ program.use
    best_x = np.where(net_value > 0, program.high, program.floor)
    best_values = net_value * best_x
    return float(price.sum() + best_values.sum())
