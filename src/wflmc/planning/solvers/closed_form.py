"""Theorem 1: the optimal power for one kept sample over a static channel, in closed form and certified."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Array
from wflmc.planning.bound import Allocation, Problem

LMC, POWER, DP = "lmc-limited", "power-limited", "dp-limited"
REGIMES = (LMC, POWER, DP)
"""Those of Theorem 1, each named by the limit that binds."""
POLICY = "policy-limited"
"""Of rounds in which the policy sends more softly than all limits allow."""
LIMITS = (*REGIMES, POLICY)
"""What may limit the power of a round."""

FLOOR = 1e-12
"""Early rounds get at least this fraction of an equal share. The exact optimum falls like ρ^{−s} towards the
first round and underflows in long runs; raising it costs at most this fraction of the budget."""


def regime(
    lmc_cap: ArrayLike, power_cap: ArrayLike, share: ArrayLike
) -> NDArray[np.str_]:
    """Theorem 1's partition, given both caps and the equal share B/S of the budget; broadcasts."""
    lmc, power, dp = np.broadcast_arrays(lmc_cap, power_cap, share)
    return np.where(
        lmc <= np.minimum(dp, power),
        LMC,
        np.where(power <= np.minimum(dp, lmc), POWER, DP),
    )


def is_static(problem: Problem) -> bool:
    """Whether every round has the same active devices, limits and step size."""
    each = (problem.active, problem.power_cap, problem.step_size)
    return all(bool(np.all(values == values[0])) for values in each)


def tightest(problem: Problem) -> float:
    """The smallest budget among the active devices of a static problem."""
    return float(problem.budget[problem.active[0]].min())


def _water_level(
    cap: float, budget: float, rate: float, rounds: int
) -> tuple[Array, float]:
    """a[s] = min(cap, e^{u + rate·s}) with Σ a = budget, for budget < rounds·cap; also u.

    The profile rises, so the capped rounds are the last ones. With n uncapped rounds, u has a closed form;
    the right n is the largest whose last uncapped round does not exceed the cap.
    """
    n = np.arange(1.0, rounds + 1)
    left = budget - (rounds - n) * cap
    with np.errstate(divide="ignore", invalid="ignore"):
        # Less log Σ_{s=1}^{n} e^{rate·s}, without overflow.
        u = np.log(left) - (rate * n + np.log(np.expm1(-rate * n) / np.expm1(-rate)))
    level = float(u[np.flatnonzero((left > 0) & (u + rate * n <= np.log(cap)))[-1]])
    return np.minimum(cap, np.exp(np.minimum(level + rate * n, np.log(cap)))), level


def _dual(problem: Problem, cap: float, budget: float, level: float) -> float:
    """Lagrangian dual of the single-sample problem at the price that belongs to the water level.

    Any price gives a valid lower bound on the optimum; this one makes a[s] = min(cap, e^{u − s log ρ})
    the minimiser of cost·W/a + price·a with W[s] = ρ^{2(S−s)}.
    """
    s = np.arange(1, problem.rounds + 1)
    log_rho = float(problem.contraction.log_rho[0])
    log_weight = 2 * (problem.rounds - s) * log_rho
    log_cost = float(np.log(problem.cost[0]))
    log_price = log_cost + 2 * problem.rounds * log_rho - 2 * level
    log_a = np.minimum(np.log(cap), level - s * log_rho)
    terms = np.exp(log_cost + log_weight - log_a) + np.exp(log_price + log_a)
    return float(problem.base()[-1] + terms.sum() - np.exp(log_price) * budget)


def solve(problem: Problem) -> Allocation:
    """The optimum of Theorem 1 for a static problem with one kept sample and a budget that binds."""
    cap, budget = float(problem.cap[0]), tightest(problem)
    a, level = _water_level(
        cap, budget, -float(problem.contraction.log_rho[0]), problem.rounds
    )
    a = np.maximum(a, FLOOR * budget / problem.rounds)
    return Allocation(problem.within_budget(a), _dual(problem, cap, budget, level))
