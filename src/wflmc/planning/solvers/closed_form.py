"""Theorem 1: the optimal power for one kept sample over a static channel.

`solve` is its DP-limited regime, where privacy does not let every round transmit at its
cap; the optimum has a closed form, and so has the certificate. In the LMC-limited and
the power-limited regime every round is at its cap, which `wflmc.planning.policies`
finds without a solver.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Array
from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.solvers.program import MIN_POWER_FRACTION

LMC = "lmc-limited"
"""The noise that Langevin sampling needs limits the power."""
POWER = "power-limited"
"""Transmit power limits the power."""
DP = "dp-limited"
"""The privacy budget limits the power."""
REGIMES = (LMC, POWER, DP)
"""Those of Theorem 1, each named by the limit that binds."""
POLICY = "policy-limited"
"""Of rounds in which the policy transmits with less power than all limits allow."""
LIMITS = (*REGIMES, POLICY)
"""What may limit the power of a round."""


def regime(
    lmc_cap: ArrayLike, power_cap: ArrayLike, equal_part: ArrayLike
) -> NDArray[np.str_]:
    """Return the regime of Theorem 1's partition.

    LMC-limited if the Langevin cap is at most the other two, power-limited if the power
    cap is, and otherwise DP-limited. Arguments broadcast, for maps of regimes.

    Args:
        lmc_cap: a at which channel noise is what Langevin sampling needs, η(K/K_a)²/2.
        power_cap: a that the weakest device affords.
        equal_part: B/S, the budget in equal parts over the rounds.

    Returns:
        One of `REGIMES` for every entry.
    """
    lmc, power, dp = np.broadcast_arrays(lmc_cap, power_cap, equal_part)
    is_lmc_limited = lmc <= np.minimum(dp, power)
    is_power_limited = power <= np.minimum(dp, lmc)
    power_or_dp = np.where(is_power_limited, POWER, DP)
    return np.where(is_lmc_limited, LMC, power_or_dp)


def is_static(problem: Problem) -> bool:
    """Return whether all rounds are alike.

    They are where every round has the same active devices, the same caps and the same
    step size, as on a static channel. Theorem 1 is about such problems.

    Args:
        problem: the power problem.
    """
    parts = (problem.active, problem.power_cap, problem.lmc_cap, problem.step_size)
    return all(bool(np.all(values == values[0])) for values in parts)


def smallest_budget(problem: Problem) -> float:
    """Return the smallest budget among the active devices of a static problem.

    Where all rounds have the same active devices, only the tightest of their budgets
    matters. It is infinite without privacy.

    Args:
        problem: for which `is_static` holds.

    Returns:
        B, the most of Σ_s a[s].
    """
    return float(problem.budget[problem.active[0]].min())


class WaterLevel(NamedTuple):
    """The optimal profile a[s] = min(cap, e^{u + rate·s})."""

    a: Array
    """[S]."""
    level: float
    """u."""


def _water_level(cap: float, budget: float, rate: float, rounds: int) -> WaterLevel:
    """Return the profile with Σ a = budget, for budget < rounds·cap.

    The profile rises, so that the capped rounds are the last ones. With n uncapped
    rounds, u has a closed form; the right n is the largest whose last uncapped round
    does not exceed the cap.

    Args:
        cap: on a of every round.
        budget: of the sum of a.
        rate: −log ρ, by which the profile rises in a round.
        rounds: S.
    """
    n = np.arange(1.0, rounds + 1)
    log_cap = np.log(cap)
    uncapped_budget = budget - (rounds - n) * cap
    # log Σ_{s=1}^{n} e^{rate·s}, with the largest term outside so as not to overflow.
    log_ratio = np.log(np.expm1(-rate * n) / np.expm1(-rate))
    log_sum = rate * n + log_ratio
    with np.errstate(divide="ignore", invalid="ignore"):
        u = np.log(uncapped_budget) - log_sum
    is_possible = (uncapped_budget > 0) & (u + rate * n <= log_cap)
    uncapped = np.flatnonzero(is_possible)[-1]
    level = float(u[uncapped])
    log_a = np.minimum(level + rate * n, log_cap)
    return WaterLevel(np.minimum(cap, np.exp(log_a)), level)


def _dual(problem: Problem, cap: float, budget: float, level: float) -> float:
    """Return the Lagrangian dual at the price that belongs to a water level.

    Any price gives a valid lower bound on the optimum; this one makes
    a[s] = min(cap, e^{u − s log ρ}) the minimizer of cost·W/a + price·a with
    W[s] = ρ^{2(S−s)}.

    Args:
        problem: with one kept sample.
        cap: on a of every round.
        budget: of the sum of a.
        level: u.
    """
    s = np.arange(1, problem.rounds + 1)
    log_rho = float(problem.contraction.log_rho[0])
    log_weight = 2 * (problem.rounds - s) * log_rho
    log_cost = float(np.log(problem.cost[0]))
    log_price = log_cost + 2 * problem.rounds * log_rho - 2 * level
    log_a = np.minimum(np.log(cap), level - s * log_rho)
    noise = np.exp(log_cost + log_weight - log_a)
    payments = np.exp(log_price + log_a)
    total = (noise + payments).sum()
    return float(problem.base()[-1] + total - np.exp(log_price) * budget)


def solve(problem: Problem) -> Allocation:
    """Return the optimum of Theorem 1 in the DP-limited regime.

    a[s] = min(cap, e^u ρ^{−s}) with u from Σ a = B: the power rises towards the kept
    round, which early noise is forgotten before. Powers stop short of the budget, so
    that rounding never overspends.

    Args:
        problem: static, with one kept sample, no floor and a budget that binds.

    Returns:
        a[S], and the dual's lower bound on the objective.
    """
    cap = float(problem.cap[0])
    budget = smallest_budget(problem)
    rate = -float(problem.contraction.log_rho[0])
    profile = _water_level(cap, budget, rate, problem.rounds)
    # The optimum falls towards the first round, and underflows in long runs.
    smallest = MIN_POWER_FRACTION * budget / problem.rounds
    a = problem.within_budget(np.maximum(profile.a, smallest))
    return Allocation(a, _dual(problem, cap, budget, profile.level))
