"""Split transmit power over rounds optimally under per-device privacy budgets, and prove how optimal it is."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.planning.solvers.interior_point import CentralPath
from wflmc.planning.solvers.program import HEADROOM, Array, Program, Usage, dual, round_bounds, tightest

STEPS = 100
"""The most steps along the central path."""


class Solution(NamedTuple):
    """A feasible plan, and the dual point (w, lam) that proves `lower_bound` for every feasible plan."""

    a: Array  # [S]
    objective: float
    lower_bound: float
    gap: float  # (objective - lower_bound) / |objective|
    w: Array  # [S] weights of the rounds' bounds: zero up to burn_in, sum 1
    lam: Array  # [K] device prices


def allocate(program: Program, tol: float = 1e-9) -> Solution:
    """Solve one problem, whose floor meets all budgets, to a certified relative gap of `tol` or as rounding allows."""
    p, use = program, Usage(program.active)
    best = _Best(p, use)
    binding = np.flatnonzero(use(p.cap) > p.budget * (1 - HEADROOM))
    if binding.size == 0:  # every round at its cap is optimal, and zero prices prove it
        best.offer(p.cap)
        best.prove(best.weights(), best.lam)
    else:
        _follow_path(best, binding, tol)
    bound, gap = min(best.bound, best.value), max(best.gap(), 0.0)  # rounding may put one past the other
    return Solution(best.a, best.value, bound, gap, best.w, best.lam)


class _Best:
    """The best feasible plan and the best lower bound met so far, each evaluated on the whole problem."""

    def __init__(self, p: Program, use: Usage) -> None:
        self.p, self.use, self.value, self.bound, self.misses = p, use, np.inf, -np.inf, 0
        # No round may have zero power: 1e-12 of an even split costs next to nothing.
        self.least = np.maximum(p.floor, np.minimum(p.cap, 1e-12 / p.cap.size * tightest(p.active, p.budget)))
        self.a, self.w, self.lam = self.least, np.zeros(p.cap.size), np.zeros(p.budget.size)

    def gap(self) -> float:
        """(value - bound) / |value|."""
        return (self.value - self.bound) / abs(self.value) if np.isfinite(self.value) else np.inf

    def feasible(self, a: Array) -> Array:
        """Snap to the box, then shrink or stretch each round that is not at its cap to suit its tightest device."""
        cap, limit = self.p.cap, self.p.budget * (1 - HEADROOM)
        a = np.clip(a, self.least, cap)
        a = np.where(a >= cap * (1 - 1e-9), cap, a)
        fixed = np.where(a == cap, cap, self.least)
        room = limit - self.use(fixed)
        if room.min() < 0:  # the capped rounds alone overspend: let them move too
            fixed = self.least
            room = np.maximum(limit - self.use(fixed), 0.0)
        moving = a - fixed
        need = self.use(moving)
        scale = np.divide(room, need, out=np.full_like(need, 2.0), where=room < 2 * need)
        return np.minimum(fixed + tightest(self.p.active, scale) * moving, cap)

    def offer(self, a: Array) -> None:
        """Keep a feasible plan if it is the best so far."""
        bounds = round_bounds(self.p, a)[self.p.burn_in :]
        value = float(bounds.max() if self.p.objective == "worst" else bounds.mean())
        if value < self.value:
            self.value, self.a = value, a

    def prove(self, w: Array, lam: Array) -> Array:
        """Keep the dual point if its bound is the best so far; the powers that attain it."""
        bound, powers = dual(self.p, w, lam)
        if bound > self.bound:
            self.bound, self.w, self.lam = bound, w, lam
        return powers

    def weights(self) -> Array:
        """Equal weights of the rounds' bounds for "average", else all of it on the worst one, [S]."""
        w = np.zeros(self.p.cap.size)
        if self.p.objective == "worst":
            w[self.p.burn_in + int(np.argmax(round_bounds(self.p, self.a)[self.p.burn_in :]))] = 1.0
        else:
            w[self.p.burn_in :] = 1 / (w.size - self.p.burn_in)
        return w

    def update(self, path: CentralPath, skip: int, tol: float) -> None:
        """Take the path's present point into account, and count the times in a row that it hardly helped."""
        before, p = self.value - self.bound, self.p
        w, lam = np.zeros(p.cap.size), np.zeros(p.budget.size)
        w[p.burn_in :] = path.w / path.w.sum()
        lam[path.rows] = path.s[path.boxes : path.boxes + path.rows.size] / path.p.budget[path.rows]
        from_prices = self.prove(w, lam)
        for plan in (from_prices, np.concatenate([self.least[:skip], path.M[0, 0]])):
            if self.gap() > tol:  # the plan read off the prices is the smoother one: it goes first
                self.offer(self.feasible(plan))
        self.misses = 0 if self.value - self.bound < 0.7 * before else self.misses + 1


def _follow_path(best: _Best, binding: NDArray[np.intp], tol: float) -> None:
    """Improve on `best` by the interior point until its gap is at most tol or stays where it is."""
    p, use = best.p, best.use
    # Rounds this long before the first one that counts weigh less than 1e-39 in it: they get the least power.
    forgotten = np.cumsum(np.log(p.rho[p.burn_in : 0 : -1])) < -45.0
    skip = max(0, min(int(np.count_nonzero(forgotten)), p.cap.size - 2))
    left = p.budget - use(np.where(np.arange(p.cap.size) < skip, best.least, 0.0))
    later = {name: getattr(p, name)[skip:] for name in ("active", "cap", "cost", "rho", "base", "floor")}
    tail = replace(p, **later, burn_in=p.burn_in - skip, budget=np.maximum(left, 1e-12 * p.budget))
    path = CentralPath(tail, Usage(tail.active) if skip else use, binding)
    for step in range(1, STEPS + 1):
        moved = path.step()
        if path.gap() < 2 * tol or not moved or step == STEPS:
            best.update(path, skip, tol)
            if best.gap() <= tol or best.misses > 5 or not moved:
                break
    if best.gap() > tol:  # where one round towers over the others its bound alone is a proof, for suitable prices
        w, lam = best.weights(), best.lam
        for scale in (0.0, *np.logspace(-4, 4, 33)):
            best.prove(w, scale * lam)
