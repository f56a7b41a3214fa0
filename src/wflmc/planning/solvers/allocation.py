"""Split transmit power over rounds optimally under per-device privacy budgets, and prove how optimal it is."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.planning.solvers.interior_point import PowerPath
from wflmc.planning.solvers.path_following import follow_path
from wflmc.planning.solvers.program import HEADROOM, Array, Program, Usage, dual, round_bounds, tightest

MAX_STEPS = 100
"""The most steps along the central path."""
MAX_STALLED_UPDATES = 5
"""Updates in a row that hardly helped, after which the search ends."""
FORGOTTEN_LOG_WEIGHT = -45.0
"""Rounds of whose error a factor below e^−45 is left in the first kept round weigh less
than 1e-39 in its bound: they get the least power."""


class PowerSolution(NamedTuple):
    """A feasible plan, and the dual point (w, lam) that proves `lower_bound` for every feasible plan."""

    a: Array  # [S]
    objective: float
    lower_bound: float
    gap: float  # (objective - lower_bound) / |objective|
    w: Array  # [S] weights of the rounds' bounds: zero up to burn_in, sum 1
    lam: Array  # [K] device prices


def allocate(program: Program, tol: float = 1e-9) -> PowerSolution:
    """Solve one problem, whose floor meets all budgets, to a certified relative gap of `tol` or as rounding allows."""
    usage = Usage(program.active)
    incumbent = PowerIncumbent(program, usage, tolerance=tol)
    limit = program.budget * (1 - HEADROOM)
    binding = np.flatnonzero(usage(program.cap) > limit)
    if binding.size == 0:  # every round at its cap is optimal, and zero prices prove it
        incumbent.offer(program.cap)
        incumbent.prove(incumbent.weights(), incumbent.lam)
    else:
        _improve(incumbent, binding)
    return PowerSolution(
        a=incumbent.a,
        objective=incumbent.value,
        # Rounding may put the bound past the value.
        lower_bound=min(incumbent.bound, incumbent.value),
        gap=max(incumbent.gap, 0.0),
        w=incumbent.w,
        lam=incumbent.lam,
    )


def _skipped_rounds(program: Program) -> int:
    """Return how many first rounds no longer matter in the first round that counts."""
    log_rho = np.log(program.rho[program.burn_in : 0 : -1])
    is_forgotten = np.cumsum(log_rho) < FORGOTTEN_LOG_WEIGHT
    return max(0, min(int(np.count_nonzero(is_forgotten)), program.cap.size - 2))


class PowerIncumbent:
    """The best feasible plan and the best lower bound met so far, each evaluated on the whole problem.

    Args:
        p: the problem.
        use: what devices spend on a plan of it.
        tolerance: the relative gap from which on no better plan is searched for.
    """

    def __init__(self, p: Program, use: Usage, tolerance: float) -> None:
        self.p, self.use, self.tolerance = p, use, tolerance
        self.value, self.bound, self.stalled_updates = np.inf, -np.inf, 0
        self.skipped = _skipped_rounds(p)
        # No round may have zero power: 1e-12 of an even split costs next to nothing.
        self.least = np.maximum(p.floor, np.minimum(p.cap, 1e-12 / p.cap.size * tightest(p.active, p.budget)))
        self.a, self.w, self.lam = self.least, np.zeros(p.cap.size), np.zeros(p.budget.size)

    @property
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

    def is_worth_updating(self, path: PowerPath) -> bool:
        """Return whether the path is near the optimum; before, its points prove little."""
        return path.gap < 2 * self.tolerance

    def update(self, path: PowerPath) -> None:
        """Take the path's present point into account, and count the times in a row that it hardly helped."""
        before, p = self.value - self.bound, self.p
        w, lam = np.zeros(p.cap.size), np.zeros(p.budget.size)
        w[p.burn_in :] = path.w / path.w.sum()
        lam[path.rows] = path.s[path.boxes : path.boxes + path.rows.size] / path.p.budget[path.rows]
        from_prices = self.prove(w, lam)
        from_path = np.concatenate([self.least[: self.skipped], path.M[0, 0]])
        for plan in (from_prices, from_path):
            if self.gap > self.tolerance:  # the plan read off the prices is the smoother one: it goes first
                self.offer(self.feasible(plan))
        has_helped = self.value - self.bound < 0.7 * before
        self.stalled_updates = 0 if has_helped else self.stalled_updates + 1

    def has_stalled(self, path: PowerPath) -> bool:
        """Return whether several updates in a row hardly helped."""
        return self.stalled_updates > MAX_STALLED_UPDATES


def _improve(incumbent: PowerIncumbent, binding: NDArray[np.intp]) -> None:
    """Improve on an incumbent by the interior point until its gap is at most the tolerance or stays where it is."""
    p, use, skipped = incumbent.p, incumbent.use, incumbent.skipped
    left = p.budget - use(np.where(np.arange(p.cap.size) < skipped, incumbent.least, 0.0))
    later = {name: getattr(p, name)[skipped:] for name in ("active", "cap", "cost", "rho", "base", "floor")}
    tail = replace(p, **later, burn_in=p.burn_in - skipped, budget=np.maximum(left, 1e-12 * p.budget))
    path = PowerPath(tail, Usage(tail.active) if skipped else use, binding)
    follow_path(path, incumbent, incumbent.tolerance, MAX_STEPS)
    if incumbent.gap > incumbent.tolerance:
        # Where one round towers over the others its bound alone is a proof, for suitable prices.
        w, lam = incumbent.weights(), incumbent.lam
        for scale in (0.0, *np.logspace(-4, 4, 33)):
            incumbent.prove(w, scale * lam)
