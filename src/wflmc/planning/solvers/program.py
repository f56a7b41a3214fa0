"""The general power problem as arrays: what a plan costs, what it spends, and the dual that bounds all plans below."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.support.errors import InputError
from wflmc.support.recursion import backward, first_order

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
HEADROOM = 1e-12
"""Plans stop this relative distance short of every budget, so that rounding never overspends."""
_BLOCK = 1 << 21  # (round, device) pairs turned into floats at a time


@dataclass(frozen=True)
class Program:
    """One allocation problem over S rounds and K devices; the unknown a[S] is the power alpha^2/N0 of each round.

    B[s'] = base[s'] + sum_{s<=s'} (rho[s+1] ... rho[s'])^2 cost[s]/a[s]. Its maximum ("worst") or mean ("average")
    over the rounds after `burn_in` is minimised subject to floor <= a <= cap and sum_s active[s,k] a[s] <= budget[k].
    """

    active: NDArray[
        Any
    ]  # [S, K], at least one device in every round; or its probability, for forecasts
    budget: Array  # [K] > 0, may be inf
    cap: Array  # [S] > 0
    cost: Array  # [S] > 0
    rho: Array  # [S] in (0, 1)
    base: Array  # [S]
    floor: Array  # [S], 0 <= floor <= cap
    burn_in: int  # 0 <= burn_in < S
    objective: str = "worst"

    @property
    def decay(self) -> Array:
        """rho^2: the share of the bound of the round before that is left in each round's, [S]."""
        return self.rho * self.rho


def round_bounds(p: Program, a: Array) -> Array:
    """B[s'] for every round, shape [S]."""
    return p.base + first_order(p.cost / a, p.decay)


def dual(p: Program, w: Array, lam: Array) -> tuple[float, Array]:
    """The Lagrangian dual at weights w[S] >= 0 of sum 1 and prices lam[K] >= 0, and the powers that attain it.

    No feasible plan has a smaller objective than the dual value; at the optimum the powers are the optimal plan.
    """
    price = price_of_rounds(p.active, lam)
    weight = p.cost * backward(w, p.decay)
    # The minimiser of weight/a + price*a; without a weight it is the floor, without a price the cap.
    with np.errstate(over="ignore"):
        a = np.sqrt(
            np.divide(weight, price, out=np.full_like(weight, np.inf), where=price > 0)
        )
    a = np.where(weight > 0, np.clip(a, p.floor, p.cap), p.floor)
    paid = np.divide(weight, a, out=np.zeros_like(a), where=(weight > 0) & (a > 0))
    priced = lam > 0  # an infinite budget must have no price
    return float(
        w @ p.base + (np.sum(paid + price * a) - lam[priced] @ p.budget[priced])
    ), a


def _blocks(active: Bools) -> Iterator[slice]:
    """Slices of rounds, small enough to turn into floats and to keep rounding out of long sums."""
    size = min(1024, max(1, _BLOCK // max(1, active.shape[1])))
    return (slice(i, i + size) for i in range(0, active.shape[0], size))


def price_of_rounds(active: Bools, lam: Array) -> Array:
    """sum_k active[s,k] lam[k], shape [S]."""
    used = np.flatnonzero(
        lam
    )  # mostly few: only their columns need turning into floats
    return np.concatenate([active[i][:, used] @ lam[used] for i in _blocks(active)])


def tightest(active: Bools, value: Array) -> Array:
    """The smallest value[k] among the devices active in each round, shape [S]."""
    return np.concatenate(
        [np.where(active[i], value, np.inf).min(1) for i in _blocks(active)]
    )


class Usage:
    """What each device spends on a plan, without holding a float copy of a large activity matrix."""

    def __init__(self, active: Bools) -> None:
        self.active: NDArray[Any] = (
            active.astype(np.float64) if active.size <= _BLOCK else active
        )
        self.blocks = list(_blocks(active))

    def __call__(self, a: Array) -> Array:
        """sum_s active[s,k] a[s], shape [K]."""
        parts = [
            a[i] @ self.active[i].astype(np.float64, copy=False) for i in self.blocks
        ]
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)


def solve_by_cvxpy(program: Program) -> Array:
    """a[S] by a generic convex solver (cvxpy with Clarabel): slower than ours, and independent of it.

    It is optimal to the solver's tolerance; budgets and caps are met to that tolerance too.
    """
    try:
        cp: Any = importlib.import_module("cvxpy")
    except ImportError:
        raise InputError(
            "solver",
            "cvxpy",
            "'own' unless cvxpy is installed: pip install 'wflmc[convex]'",
        ) from None
    rounds = program.cap.size
    # Units in which a and the noise are near 1: without them Clarabel is off by per cents, on either side.
    share = np.median(program.budget) / max(1, program.active.sum(0).max())
    unit = float(np.median(np.minimum(program.cap, share)))
    scale = (
        float(np.median(program.cost)) / unit / (1 - float(np.median(program.decay)))
    )
    a, noise, total = cp.Variable(rounds), cp.Variable(rounds), cp.Variable(rounds)
    budget = np.minimum(program.budget, 2 * program.cap.sum()) / unit
    limits = [
        a <= program.cap / unit,
        a >= program.floor / unit,
        noise >= cp.multiply(program.cost / unit / scale, cp.inv_pos(a)),
        total[0] == noise[0],
        program.active.T.astype(float) @ a <= budget,
    ]
    if rounds > 1:
        limits.append(
            total[1:] == cp.multiply(program.decay[1:], total[:-1]) + noise[1:]
        )
    kept = (total + program.base / scale)[program.burn_in :]
    goal = (
        cp.max(kept)
        if program.objective == "worst"
        else cp.sum(kept) / (rounds - program.burn_in)
    )
    cp.Problem(cp.Minimize(goal), limits).solve(solver=cp.CLARABEL)
    if a.value is None:
        raise InputError(
            "solver", "cvxpy", "'own' for this problem: Clarabel found no solution"
        )
    return np.asarray(a.value) * unit
