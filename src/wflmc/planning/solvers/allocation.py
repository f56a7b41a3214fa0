"""Split transmit power over rounds under privacy budgets, and prove how optimally."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.planning.solvers.interior_point import PowerPath
from wflmc.planning.solvers.path_following import MAX_STEPS, follow_path
from wflmc.planning.solvers.program import (
    HEADROOM,
    MIN_POWER_FRACTION,
    Array,
    PowerProgram,
    Usage,
    dual,
    round_bounds,
    smallest_of_senders,
)

MAX_STALLED_UPDATES = 5
"""Updates in a row that hardly helped, after which the search ends."""
FORGOTTEN_LOG_WEIGHT = -45.0
"""Rounds of whose error a factor below e^−45 is left in the first kept round weigh less
than 1e-39 in its bound: they get the least power."""
PRICE_SCALES = (0.0, *np.logspace(-4, 4, 33))
"""Factors on prices that are tried for a proof by a single round."""


class PowerSolution(NamedTuple):
    """A feasible plan, and a dual point that proves a bound on all feasible plans."""

    a: Array
    """Power α²/N0 of every round, [S]."""
    objective: float
    """The worst or the average bound that this power gives."""
    lower_bound: float
    """What no feasible power can go below."""
    gap: float
    """(objective − lower_bound)/|objective|."""
    w: Array
    """Weights of the rounds' bounds, [S]: zero up to burn-in, sum 1."""
    lam: Array
    """Prices of the devices' budgets, [K]."""


def allocate(program: PowerProgram, tol: float = 1e-9) -> PowerSolution:
    """Minimize the worst or the average bound over all feasible powers, with a proof.

    min_a max or mean over s' > S_b of B[s'], with
    B[s'] = base[s'] + Σ_{s ≤ s'} ρ^{2(s'−s)} cost[s]/a[s], subject to floor ≤ a ≤ cap
    and Σ_s active[s, k] a[s] ≤ budget[k]. Rounds that are forgotten long before the
    first kept one get the least power.

    The search need not be right: any weights and prices give a valid bound, and a worse
    search leaves a wider gap. Only the plans that it offers have to meet all limits,
    which `PowerIncumbent.feasible` sees to and `PowerIncumbent.offer` does not check.

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
    if binding.size:
        _improve(incumbent, binding)
    else:
        # Every round at its cap is optimal, and the prices that an incumbent starts
        # from prove it: they are zero.
        incumbent.offer(program.cap)
        incumbent.prove(incumbent.worst_weights(), incumbent.lam)
    return PowerSolution(
        a=incumbent.a,
        objective=incumbent.value,
        # Rounding may put the bound past the value.
        lower_bound=min(incumbent.bound, incumbent.value),
        gap=max(incumbent.gap, 0.0),
        w=incumbent.w,
        lam=incumbent.lam,
    )


def _skipped_rounds(program: PowerProgram) -> int:
    """Return how many first rounds no longer matter in the first round that counts."""
    log_rho = np.log(program.rho[program.burn_in : 0 : -1])
    is_forgotten = np.cumsum(log_rho) < FORGOTTEN_LOG_WEIGHT
    forgotten = int(np.count_nonzero(is_forgotten))
    return max(0, min(forgotten, program.cap.size - 2))


class PowerIncumbent:
    """The best feasible plan and the best lower bound met so far.

    Each is evaluated on the whole problem.

    Args:
        program: the problem.
        usage: what devices spend on a plan of it.
        tolerance: the relative gap from which on no better plan is searched for.
    """

    def __init__(self, program: PowerProgram, usage: Usage, tolerance: float) -> None:
        self.program = program
        self.usage = usage
        self.tolerance = tolerance
        self.value = np.inf
        self.bound = -np.inf
        self.stalled_updates = 0
        self.skipped = _skipped_rounds(program)
        rounds = program.cap.size
        budget = smallest_of_senders(program.active, program.budget)
        small = MIN_POWER_FRACTION / rounds * budget
        self.min_power = np.maximum(program.floor, np.minimum(program.cap, small))
        self.a = self.min_power
        self.w = np.zeros(rounds)
        self.lam = np.zeros(program.budget.size)

    @property
    def gap(self) -> float:
        """Return (value − bound)/|value|, the proven gap.

        It is infinite before a plan was offered, and may be slightly negative by
        rounding. No feasible plan is better than the best one by more than this.
        """
        if not np.isfinite(self.value):
            return np.inf
        return (self.value - self.bound) / abs(self.value)

    def feasible(self, a: Array) -> Array:
        """Return a plan that meets all limits, near to one that need not.

        It is snapped to the box. Rounds at their caps stay there if the budgets allow
        it; what others have beyond their least power shrinks, or grows up to twofold,
        to suit the tightest of their devices.

        Args:
            a: power of every round, [S].

        Returns:
            Power within caps, floors and budgets, [S].
        """
        cap = self.program.cap
        limit = self.program.budget * (1 - HEADROOM)
        a = np.clip(a, self.min_power, cap)
        a = np.where(a >= cap * (1 - 1e-9), cap, a)
        fixed = np.where(a == cap, cap, self.min_power)
        available = limit - self.usage(fixed)
        if available.min() < 0:  # capped rounds alone overspend: let them move too
            fixed = self.min_power
            available = np.maximum(limit - self.usage(fixed), 0.0)
        moving = a - fixed
        required = self.usage(moving)
        scale = np.full_like(required, 2.0)
        is_scarce = available < 2 * required
        np.divide(available, required, out=scale, where=is_scarce)
        scale_of_round = smallest_of_senders(self.program.active, scale)
        return np.minimum(fixed + scale_of_round * moving, cap)

    def offer(self, a: Array) -> None:
        """Keep a feasible plan if it is the best so far.

        It is valued on the whole problem, by the worst or the average bound of the kept
        rounds.

        Args:
            a: power of every round that meets all limits, [S].
        """
        bounds = self._kept_bounds(a)
        is_worst = self.program.objective == "worst"
        value = float(bounds.max() if is_worst else bounds.mean())
        if value < self.value:
            self.value = value
            self.a = a

    def prove(self, w: Array, lam: Array) -> Array:
        """Keep a dual point if its bound is the best so far.

        Any weights and prices of at least 0 give a valid bound, `program.dual`; the
        path's are good ones near the optimum.

        Args:
            w: weights of the rounds' bounds, [S]: zero up to burn-in, of sum 1.
            lam: prices of the budgets, [K].

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
        """Return weights of the rounds' bounds that the best plan suggests.

        They are equal over the kept rounds for "average". For "worst" the worst round
        of the plan has all of the weight, which proves the optimum where that round
        stands out.

        Returns:
            w[S], zero up to burn-in and of sum 1.
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
        """Return whether the path is near enough to the optimum.

        Before that its points prove little, and evaluating them on the whole problem
        takes longer than a step.

        Args:
            path: at its present point.
        """
        return path.gap < 2 * self.tolerance

    def update(self, path: PowerPath) -> None:
        """Take the path's present point into account.

        Its weights and prices are a dual point, whose optimal powers are offered as a
        plan, and so is the path's own power. Updates in a row that hardly narrow the
        gap are counted.

        Args:
            path: at the point.
        """
        before = self.value - self.bound
        w = np.zeros(self.program.cap.size)
        w[self.program.burn_in :] = path.weights / path.weights.sum()
        lam = np.zeros(self.program.budget.size)
        lam[path.devices] = path.device_prices
        # The plan read off the prices is the smoother one: it goes first.
        from_prices = self.prove(w, lam)
        from_path = np.concatenate([self.min_power[: self.skipped], path.power])
        for plan in (from_prices, from_path):
            if self.gap > self.tolerance:
                self.offer(self.feasible(plan))
        has_helped = self.value - self.bound < 0.7 * before
        self.stalled_updates = 0 if has_helped else self.stalled_updates + 1

    def has_stalled(self, path: PowerPath) -> bool:
        """Return whether several updates in a row hardly helped.

        This happens where rounding hides further progress, at gaps slightly above the
        tolerance.

        Args:
            path: at its present point, which does not matter.
        """
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
    skipped_power = np.where(is_skipped, incumbent.min_power, 0.0)
    remaining = program.budget - incumbent.usage(skipped_power)
    tail = replace(
        program,
        active=program.active[skipped:],
        cap=program.cap[skipped:],
        cost=program.cost[skipped:],
        rho=program.rho[skipped:],
        base=program.base[skipped:],
        floor=program.floor[skipped:],
        burn_in=program.burn_in - skipped,
        budget=np.maximum(remaining, 1e-12 * program.budget),
    )
    usage = Usage(tail.active) if skipped else incumbent.usage
    path = PowerPath(tail, usage, binding)
    follow_path(path, incumbent, incumbent.tolerance, MAX_STEPS)
    if incumbent.gap > incumbent.tolerance:
        # Where one round towers over the others its bound alone is a proof, for
        # suitable prices.
        w = incumbent.worst_weights()
        lam = incumbent.lam
        for scale in PRICE_SCALES:
            incumbent.prove(w, scale * lam)
