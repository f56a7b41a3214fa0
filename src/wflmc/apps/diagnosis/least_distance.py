"""Lower bounds on the forecast of a plan, one of them before its power is chosen.

A search that knows a better plan already need not make this one, or not forecast it.

Clipped gradients contract no more than unclipped ones. So along a direction of
precision λ the variance v in a forecast (`wflmc.evaluation.clipped_law`) obeys

    v[s+1] ≥ f[s] v[s] + σ²[s],        f[s] = max(0, 1 − η[s] λ Σ_k w[s, k] n_k)²,

for the weights w of devices in the update and their fractions n of the data. Its mean
over the kept rounds is at least V = b + Σ_s u[s] σ²[s], with a constant b and weights
u ≥ 0; and as (√(λv) − 1)², from v = 1/λ on, is convex and rises, the worst and the
average round are at least as far from the posterior as V is. The noise of a round,
σ² = C/a, falls with its power a, which is below a cap and spends the budgets of
devices: at any prices of these budgets, Lagrange's dual function is below V.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import Array
from wflmc.evaluation.clipped_law import ForecastModel
from wflmc.planning import Plan
from wflmc.planning.bound import Problem
from wflmc.planning.build import TrialPlan
from wflmc.support.recursion import BlockRecursion

MAX_GROUPS = 8
"""Groups of directions with a bound of their own."""
PRICE_UPDATES = 4
"""By which prices come near to the best ones; any prices give a bound."""
ROUNDING = 1e-6
"""Relative size of what is taken off for rounding."""


class PrecisionGroups(NamedTuple):
    """Directions in groups of similar precision, with what bounds all of a group.

    In shapes, g counts the groups and S the rounds.
    """

    sizes: Array
    """Directions of each group, [g]."""
    lowest: Array
    """The lowest precision of each group, [g]."""
    highest: Array
    """The highest, which contracts most, [g]."""
    start: Array
    """The smallest variance at the start, [g]."""

    @classmethod
    def of(cls, precision: Array, start: Array) -> "PrecisionGroups":
        """Return the directions in groups of similar precision, at most eight.

        Groups have as many distinct precisions each as is possible, so that directions
        of equal precision are in one group.

        Args:
            precision: λ of every direction, [d].
            start: the variance of every direction before the first round, [d].

        Returns:
            The groups, those of low precision first.
        """
        order = np.argsort(precision, kind="stable")
        ranked = precision[order]
        distinct = np.append(0, np.flatnonzero(np.diff(ranked)) + 1)
        count = min(MAX_GROUPS, distinct.size)
        chosen = np.linspace(0, distinct.size, count, endpoint=False)
        first = distinct[chosen.astype(int)]
        last = np.append(first[1:], precision.size) - 1
        return cls(
            sizes=(last + 1 - first).astype(float),
            lowest=ranked[first],
            highest=ranked[last],
            start=np.minimum.reduceat(start[order], first),
        )

    def contraction(self, curvature: Array) -> Array:
        """Return f, the smallest fraction of a variance that a round leaves.

        It is max(0, 1 − λc)², for the highest precision λ of a group and the curvature
        c of a round.

        Args:
            curvature: η Σ_k w_k n_k of every round, [S].

        Returns:
            [g, S].
        """
        step = 1 - np.multiply.outer(self.highest, curvature)
        return np.maximum(step, 0.0) ** 2

    def distance(self, variance: Array) -> Array:
        """Return a lower bound on the distance of variances from the posterior's.

        Args:
            variance: of every group, [g, ...].

        Returns:
            The mean over directions of (√(λv) − 1)², 0 where v is below 1/λ, [...].
        """
        scaled = (self.lowest * variance.T).T
        excess_std = np.maximum(np.sqrt(scaled) - 1, 0.0)
        mean = np.tensordot(self.sizes / self.sizes.sum(), excess_std**2, 1)
        return (1 - ROUNDING) * mean


def least_distance(trial: TrialPlan, model: ForecastModel) -> float:
    """Return a lower bound on `ChainForecast.scaled_w2_sq` before a plan is made.

    Args:
        trial: the plan.
        model: what forecasts take the posterior for.

    Returns:
        W2² in posterior variances; 0 for kinetic chains, which this bound does not
        cover, and for policies that may ignore limits.
    """
    problem = trial.problem
    if problem.dynamics.has_velocity or not trial.keeps_limits:
        return 0.0
    groups = PrecisionGroups.of(model.cost.precision, model.cost.start_variance)
    curvature = problem.step_size * _sum_over_devices(
        trial.weight_received, model.data_share
    )
    contraction = groups.contraction(curvature)
    weight = _weight_of_noise(contraction, problem.burn_in)
    of_start = groups.start * contraction[:, 0] * weight[:, 0]
    return float(groups.distance(of_start + _least_noise(weight, problem)))


def unclipped_distance(plan: Plan, model: ForecastModel) -> float:
    """Return a lower bound on `ChainForecast.scaled_w2_sq` of a plan.

    It costs one recursion over the rounds, far less than the forecast itself.

    Args:
        plan: whose noise and weights are used.
        model: what forecasts take the posterior for.

    Returns:
        W2² in posterior variances if nothing were clipped and chains had the right
        mean; 0 for kinetic chains.
    """
    if plan.dynamics.has_velocity:
        return 0.0
    groups = PrecisionGroups.of(model.cost.precision, model.cost.start_variance)
    curvature = plan.step_size * _sum_over_devices(
        plan.weight_received, model.data_share
    )
    contraction = groups.contraction(curvature)
    recursion = BlockRecursion([1] * groups.sizes.size, len(plan.rounds), 1)
    path = recursion.solve(
        [[contraction]], [plan.noise_variance], groups.start[:, None]
    )
    kept_variances = path[:, plan.burn_in + 1 :, 0]
    distances = groups.distance(kept_variances)
    is_average = plan.certificate.objective_name == "average"
    return float(distances.mean() if is_average else distances.max())


def _sum_over_devices(values: NDArray[Any], weight: Array) -> Array:
    """Return Σ_k values[s, k] weight[k], [S].

    OpenBLAS would give a product of this size to several threads.
    """
    return np.einsum("sk,k->s", values, weight)


def _weight_of_noise(contraction: Array, burn_in: int) -> Array:
    """Return u: what noise of a round adds to the mean variance of the kept ones.

    Args:
        contraction: f of every round, [g, S].
        burn_in: rounds that are not kept.

    Returns:
        u[s] = f[s+1] u[s+1] + 1/S_u for kept rounds s, without the last term for
        others; [g, S].
    """
    groups, rounds = contraction.shape
    averaging_weight = np.zeros(rounds)
    averaging_weight[burn_in:] = 1 / (rounds - burn_in)
    backwards = np.ones((groups, rounds))
    backwards[:, 1:] = contraction[:, :0:-1]
    recursion = BlockRecursion([1] * groups, rounds, 1)
    increments = averaging_weight[::-1]
    path = recursion.solve([[backwards]], [increments], np.zeros((groups, 1)))
    return path[:, :0:-1, 0]


def _least_noise(weight: Array, problem: Problem) -> Array:
    """Return a lower bound on Σ_s u[s] σ²[s] over all powers within the limits, [g].

    Every finite budget has the same price t, in units of that budget. The dual function
    is then Σ_s min_a (u C/a + t p a) − t n, where n is the number of such budgets and
    p[s] the sum of 1/budget over the round's senders. The minimum is at
    a = √(u C/(t p)), or at the cap. Where no round is at its cap, the best t is the one
    with which all rounds together spend n.

    Args:
        weight: u of every round, [g, S].
        problem: the power problem.
    """
    cap = problem.cap
    cost = weight * (problem.kick * problem.scale) ** 2
    noise_at_cap = cost / cap
    is_limited = np.isfinite(problem.budget)
    if not is_limited.any():
        return noise_at_cap.sum(-1)
    budget_count = np.count_nonzero(is_limited)
    spending = _sum_over_devices(problem.active, 1 / problem.budget)
    root = np.sqrt(cost * spending)
    price = (root.sum(-1, keepdims=True) / budget_count) ** 2
    spent_at_cap = cap * spending
    for _ in range(PRICE_UPDATES):
        spent_by_round = np.minimum(root / np.sqrt(price), spent_at_cap)
        spent = spent_by_round.sum(-1, keepdims=True)
        price = price * (spent / budget_count) ** 2
    is_capped = root >= spent_at_cap * np.sqrt(price)
    at_cap = noise_at_cap + price * spent_at_cap
    below_cap = 2 * root * np.sqrt(price)
    terms = np.where(is_capped, at_cap, below_cap)
    dual = terms.sum(-1) - price[:, 0] * budget_count
    return np.maximum(dual, noise_at_cap.sum(-1))
