"""The noise of every round that brings a chain's true law nearest to the posterior, with a proof of how near.

The unknown is the variance v[s] that a round puts on its update. The W2² of a Gaussian law to the posterior is convex
in v; so is what privacy costs, cost/v. An interior-point method finds the v with the smallest worst W2² over the kept
rounds. The proof does not rely on it: convex functions lie above their tangents, which are minimised in closed form.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.planning.allocation import HEADROOM
from wflmc.planning.distance import Distances
from wflmc.planning.exact_path import Limits, Path, start
from wflmc.posterior.response import AnyResponse

Array = NDArray[np.float64]

LEAST_POWER = 1e-12
"""Every round gets at least this share of an even split of the tightest budget: noise without end helps nobody."""
AS_GOOD = 1e-7
"""Relative distance given away for a plan without needless noise."""
ROUNDING = 1e-14
"""Distances this small next to the posterior's own size are rounding."""


class Solution(NamedTuple):
    """v[S], the worst W2² it gives, and what no noise within the limits can go below."""

    v: Array
    value: float
    lower_bound: float
    iterations: int


def solve(
    response: AnyResponse,
    cost: Array,
    low: Array,
    high: Array,
    active: NDArray[np.bool_],
    budget: Array,
    calm: Array,
    tol: float = 1e-9,
    max_iterations: int = 100,
) -> Solution:
    """The noise with the smallest worst W2², to a certified relative gap of `tol` or as near as rounding allows.

    Args:
        response: how the kept rounds' law follows from the noise.
        cost: privacy cost of a round at unit noise, [S]: a = cost/v.
        low, high: limits of v, [S]; high may be infinite.
        active: [S, K]; budget: of Σ_s active[s, k] cost[s]/v[s], [K], may be infinite.
        calm: no more noise than this, [S], where as good a law can be had without it: optima are not always unique.
    """
    distances = Distances(response)
    binding = np.flatnonzero((cost / low) @ active > budget * (1 - HEADROOM))
    use = active.T[binding] * (cost / (budget[binding] * (1 - HEADROOM))[:, None])
    token = use.max(0, initial=0.0) * cost.size / LEAST_POWER
    limits = Limits(low, np.maximum(low, np.minimum(high, np.where(token > 0, token, np.inf))), use)
    best = _Best(distances, limits, start(limits, distances), tol)
    most = np.minimum(limits.high, np.where(np.isfinite(best.ceiling), 4 * best.ceiling, 1e6 * best.v))
    steps = 0
    if np.all(use @ (1 / calm) < 1) and np.any(calm < most):
        steps = _improve(best, np.minimum(calm, most), max_iterations)
    calmer = best.v, best.value
    if not best.done:
        steps += _improve(best, most, max_iterations)
    if best.gap > AS_GOOD:  # one in 1500 of the tests' random problems
        steps += _improve(best, most, 2 * max_iterations, care=0.3)
    best.prefer(*calmer)
    return Solution(best.v, best.value, best.bound if best.gap > 0 else best.value, steps)


def _improve(best: _Best, high: Array, max_iterations: int, care: float = 0.0) -> int:
    """Follow the path below `high` until the gap is small or the path has ended; the steps it took."""
    limits = best.limits
    # A little wider, so that there is an inside even where limits meet.
    path = Path(best.distances, Limits(limits.low * (1 - 1e-11), high * (1 + 1e-11), limits.use), care)
    for step in range(1, max_iterations + 1):
        moved = path.step()
        best.update(path)
        if best.done or not moved or path.gap < 1e-5 * best.tol * best.value:
            return step
    return max_iterations


class _Best:
    """The best noise and the best lower bound met so far."""

    def __init__(self, distances: Distances, limits: Limits, v: Array, tol: float) -> None:
        self.distances, self.limits, self.tol = distances, limits, tol
        self.value, self.bound = np.inf, float(distances.shift.max())
        self.rounding = ROUNDING * distances.spread
        self.offer(v)
        # Noise whose trace alone is larger than this at a kept round is farther off than v: it need not be looked at.
        reach = (np.sqrt(distances.spread) + np.sqrt(self.value)) ** 2
        with np.errstate(divide="ignore", over="ignore"):
            self.ceiling = np.minimum(limits.high, reach / distances.trace.max(0))

    @property
    def gap(self) -> float:
        """(value - bound)/value, 0 where that is rounding."""
        return 0.0 if self.value - self.bound <= self.rounding else 1 - self.bound / self.value

    @property
    def done(self) -> bool:
        """Whether the gap is small enough."""
        return self.gap <= self.tol

    def offer(self, v: Array) -> None:
        """Keep v, made to meet all limits exactly, if it is the best so far."""
        limits = self.limits
        v = np.clip(v, limits.low, limits.high)
        least = 1 / limits.high
        need, room = limits.use @ (1 / v - least), 1 - limits.use @ least
        over = float(np.max(need / np.maximum(room, 1e-300), initial=0.0))
        if over > 1:
            v = np.clip(1 / (least + (1 / v - least) / over * (1 - 1e-15)), limits.low, limits.high)
        value = float(self.distances(v).max())
        if value < self.value:
            self.value, self.v = value, v

    def prove(self, v: Array, F: Array, g: Array, w: Array, lam: Array) -> None:
        """Weights w[S_u] of sum 1 and prices lam[K'] bound all noise: the tangent at v, minimised in closed form."""
        slope, price = w @ g, lam @ self.limits.use
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            u = np.where(slope > 0, np.sqrt(price / slope), self.ceiling)
            u = np.clip(u, self.limits.low, self.ceiling)
            least = np.where(slope == 0, 0.0, slope * u) + price / u
        bound = float(w @ F - slope @ v + least.sum() - lam.sum())
        self.bound = max(self.bound, bound)

    def update(self, path: Path) -> None:
        """Take the path's present point into account."""
        self.offer(path.v)
        self.prove(path.v, path.F, path.g, *path.prices)

    def prefer(self, v: Array, value: float) -> None:
        """Take v if it is as good as the best but for little."""
        if value - self.value <= max(AS_GOOD * self.value, self.rounding):
            self.v, self.value = v, value
