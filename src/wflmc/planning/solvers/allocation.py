"""Split transmit power over rounds under privacy budgets, and prove how optimally."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.planning.solvers.interior_point import PowerPath
from wflmc.planning.solvers.path_following import follow_path
from wflmc.planning.solvers.program import (
    HEADROOM,
    Array,
    Program,
    Usage,
    dual,
    round_bounds,
    tightest,
)

MAX_STEPS = 100
"""The most steps along the central path."""
MAX_STALLED_UPDATES = 5
"""Updates in a row that hardly helped, after which the search ends."""
FORGOTTEN_LOG_WEIGHT = -45.0
"""Rounds of whose error a factor below e^−45 is left in the first kept round weigh less
than 1e-39 in its bound: they get the least power."""
LEAST_SHARE = 1e-12
"""No round may have zero power: this share of an even split costs next to nothing."""


class PowerSolution(NamedTuple):
    """A feasible plan, and the dual point that proves a bound on all feasible plans."""

    a: Array
    """Power α²/N0 of every round, [S]."""
    objective: float
    lower_bound: float
    gap: float
    """(objective − lower_bound)/|objective|."""
    w: Array
    """Weights of the rounds' bounds, [S]: zero up to burn-in, sum 1."""
    lam: Array
    """Prices of the devices' budgets, [K]."""


def allocate(program: Program, tol: float = 1e-9) -> PowerSolution:
    """Solve one allocation problem, with a proof.

    Args:
        program: the problem, whose floor meets all budgets.
        tol: the certified relative gap at which the search ends; rounding may leave a
            larger one.

    Returns:
        The best plan that was met, and the best lower bound.
    """
    usage = Usage(program.active)
    incumbent = PowerIncumbent(program, usage, tolerance=tol)
    limit = program.budget * (1 - HEADROOM)
    binding = np.flatnonzero(usage(program.cap) > limit)
    if binding.size == 0:  # every round at its cap is optimal, and zero prices prove it
        incumbent.offer(program.cap)
        incumbent.prove(incumbent.worst_weights(), incumbent.lam)
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
    """The best feasible plan and the best lower bound met so far.

    Each is evaluated on the whole problem.

    Args:
        program: the problem.
        usage: what devices spend on a plan of it.
        tolerance: the relative gap from which on no better plan is searched for.
    """

    def __init__(self, program: Program, usage: Usage, tolerance: float) -> None:
        self.program = program
        self.usage = usage
        self.tolerance = tolerance
        self.value = np.inf
        self.bound = -np.inf
        self.stalled_updates = 0
        self.skipped = _skipped_rounds(program)
        rounds = program.cap.size
        share = LEAST_SHARE / rounds * tightest(program.active, program.budget)
        self.least = np.maximum(program.floor, np.minimum(program.cap, share))
        self.a = self.least
        self.w = np.zeros(rounds)
        self.lam = np.zeros(program.budget.size)

    @property
    def gap(self) -> float:
        """(value − bound)/|value|."""
        if not np.isfinite(self.value):
            return np.inf
        return (self.value - self.bound) / abs(self.value)

    def feasible(self, a: Array) -> Array:
        """Return a plan that meets all limits, near to one that need not.

        It is snapped to the box; then each round that is not at its cap shrinks or
        grows to suit its tightest device.
        """
        cap = self.program.cap
        limit = self.program.budget * (1 - HEADROOM)
        a = np.clip(a, self.least, cap)
        a = np.where(a >= cap * (1 - 1e-9), cap, a)
        fixed = np.where(a == cap, cap, self.least)
        room = limit - self.usage(fixed)
        if room.min() < 0:  # the capped rounds alone overspend: let them move too
            fixed = self.least
            room = np.maximum(limit - self.usage(fixed), 0.0)
        moving = a - fixed
        need = self.usage(moving)
        twice = np.full_like(need, 2.0)
        scale = np.divide(room, need, out=twice, where=room < 2 * need)
        return np.minimum(fixed + tightest(self.program.active, scale) * moving, cap)

    def offer(self, a: Array) -> None:
        """Keep a feasible plan if it is the best so far."""
        bounds = self._kept_bounds(a)
        is_worst = self.program.objective == "worst"
        value = float(bounds.max() if is_worst else bounds.mean())
        if value < self.value:
            self.value = value
            self.a = a

    def prove(self, w: Array, lam: Array) -> Array:
        """Keep a dual point if its bound is the best so far.

        Returns:
            The powers that attain the bound, [S].
        """
        bound, powers = dual(self.program, w, lam)
        if bound > self.bound:
            self.bound = bound
            self.w = w
            self.lam = lam
        return powers

    def worst_weights(self) -> Array:
        """Return weights of the rounds' bounds that the present plan suggests, [S].

        They are equal for "average", and else all on the worst round.
        """
        burn_in = self.program.burn_in
        w = np.zeros(self.program.cap.size)
        if self.program.objective == "worst":
            w[burn_in + int(np.argmax(self._kept_bounds(self.a)))] = 1.0
        else:
            w[burn_in:] = 1 / (w.size - burn_in)
        return w

    def _kept_bounds(self, a: Array) -> Array:
        """Return the bound of every round after burn-in."""
        return round_bounds(self.program, a)[self.program.burn_in :]

    def is_worth_updating(self, path: PowerPath) -> bool:
        """Return whether the path is near the optimum; before, it proves little."""
        return path.gap < 2 * self.tolerance

    def update(self, path: PowerPath) -> None:
        """Take the path's present point into account.

        The times in a row that this hardly helped are counted.
        """
        before = self.value - self.bound
        w = np.zeros(self.program.cap.size)
        w[self.program.burn_in :] = path.w / path.w.sum()
        lam = np.zeros(self.program.budget.size)
        prices = path.s[path.boxes : path.boxes + path.rows.size]
        lam[path.rows] = prices / path.p.budget[path.rows]
        # The plan read off the prices is the smoother one: it goes first.
        from_prices = self.prove(w, lam)
        from_path = np.concatenate([self.least[: self.skipped], path.M[0, 0]])
        for plan in (from_prices, from_path):
            if self.gap > self.tolerance:
                self.offer(self.feasible(plan))
        has_helped = self.value - self.bound < 0.7 * before
        self.stalled_updates = 0 if has_helped else self.stalled_updates + 1

    def has_stalled(self, path: PowerPath) -> bool:
        """Return whether several updates in a row hardly helped."""
        return self.stalled_updates > MAX_STALLED_UPDATES


def _improve(incumbent: PowerIncumbent, binding: NDArray[np.intp]) -> None:
    """Improve on an incumbent by the interior point, as far as it goes.

    Args:
        incumbent: to improve.
        binding: numbers of the devices whose budget may bind.
    """
    program = incumbent.program
    skipped = incumbent.skipped
    is_skipped = np.arange(program.cap.size) < skipped
    left = program.budget - incumbent.usage(np.where(is_skipped, incumbent.least, 0.0))
    tail = replace(
        program,
        active=program.active[skipped:],
        cap=program.cap[skipped:],
        cost=program.cost[skipped:],
        rho=program.rho[skipped:],
        base=program.base[skipped:],
        floor=program.floor[skipped:],
        burn_in=program.burn_in - skipped,
        budget=np.maximum(left, 1e-12 * program.budget),
    )
    usage = Usage(tail.active) if skipped else incumbent.usage
    path = PowerPath(tail, usage, binding)
    follow_path(path, incumbent, incumbent.tolerance, MAX_STEPS)
    if incumbent.gap > incumbent.tolerance:
        # Where one round towers over the others its bound alone is a proof, for
        # suitable prices.
        w = incumbent.worst_weights()
        lam = incumbent.lam
        for scale in (0.0, *np.logspace(-4, 4, 33)):
            incumbent.prove(w, scale * lam)
