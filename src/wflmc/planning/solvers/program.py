"""The general power problem as arrays: what a plan costs, what it spends, and the dual that bounds all plans below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.recursion import backward, first_order

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

    active: NDArray[Any]  # [S, K], at least one device in every round; or its probability, for forecasts
    budget: Array  # [K] > 0, may be inf
    cap: Array  # [S] > 0
    cost: Array  # [S] > 0
    rho: Array  # [S] in (0, 1); a number stands for all rounds
    burn_in: int  # 0 <= burn_in < S
    base: Array  # [S]
    objective: str = "worst"
    floor: Array = field(default_factory=lambda: np.zeros(0))  # [S] >= 0; empty means zero

    def __post_init__(self) -> None:
        kind = float if np.asarray(self.active).dtype.kind == "f" else bool
        object.__setattr__(self, "active", np.asarray(self.active, dtype=kind))
        rounds, devices = self.active.shape
        if np.size(self.floor) == 0:
            object.__setattr__(self, "floor", np.zeros(rounds))
        if np.ndim(self.rho) == 0:
            object.__setattr__(self, "rho", np.full(rounds, self.rho))
        for name in ("budget", "cap", "cost", "rho", "base", "floor"):
            value, size = np.asarray(getattr(self, name), dtype=np.float64), devices if name == "budget" else rounds
            if value.shape != (size,) or np.isnan(value).any() or (name != "budget" and np.isinf(value).any()):
                raise ValueError(f"{name} must be {size} finite numbers (a budget may be inf)")
            object.__setattr__(self, name, value)
        if self.objective not in ("worst", "average"):
            raise ValueError(f"objective must be 'worst' or 'average', not {self.objective!r}")
        if not (self.rho.min() > 0 and self.rho.max() < 1 and 0 <= self.burn_in < rounds):
            raise ValueError(f"need 0 < rho < 1 and 0 <= burn_in < {rounds}, got {self.rho} and {self.burn_in}")
        if min(self.cap.min(), self.cost.min(), self.budget.min(initial=1.0)) <= 0:
            raise ValueError("cap, cost and budget must be positive")
        if np.any((self.floor < 0) | (self.floor > self.cap)) or not self.active.any(axis=1).all():
            raise ValueError("every round needs 0 <= floor <= cap and an active device")

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
        a = np.sqrt(np.divide(weight, price, out=np.full_like(weight, np.inf), where=price > 0))
    a = np.where(weight > 0, np.clip(a, p.floor, p.cap), p.floor)
    paid = np.divide(weight, a, out=np.zeros_like(a), where=(weight > 0) & (a > 0))
    priced = lam > 0  # an infinite budget must have no price
    return float(w @ p.base + (np.sum(paid + price * a) - lam[priced] @ p.budget[priced])), a


def _blocks(active: Bools) -> Iterator[slice]:
    """Slices of rounds, small enough to turn into floats and to keep rounding out of long sums."""
    size = min(1024, max(1, _BLOCK // max(1, active.shape[1])))
    return (slice(i, i + size) for i in range(0, active.shape[0], size))


def price_of_rounds(active: Bools, lam: Array) -> Array:
    """sum_k active[s,k] lam[k], shape [S]."""
    used = np.flatnonzero(lam)  # mostly few: only their columns need turning into floats
    if active.shape[0] * used.size <= _BLOCK:
        return np.asarray(active[:, used] @ lam[used])
    return np.concatenate([active[i][:, used] @ lam[used] for i in _blocks(active)])


def tightest(active: Bools, value: Array) -> Array:
    """The smallest value[k] among the devices active in each round, shape [S]."""
    if active.size <= _BLOCK:
        return np.asarray(np.where(active, value, np.inf).min(1))
    return np.concatenate([np.where(active[i], value, np.inf).min(1) for i in _blocks(active)])


class Usage:
    """What each device spends on a plan, without holding a float copy of a large activity matrix."""

    def __init__(self, active: Bools) -> None:
        self.active = active
        self.dense = active.astype(np.float64) if active.size <= _BLOCK else None
        self.short = active.shape[0] <= 1024

    def __call__(self, a: Array) -> Array:
        """sum_s active[s,k] a[s], shape [K]."""
        if self.dense is not None and self.short:
            return np.asarray(a @ self.dense)
        on: NDArray[Any] = self.active if self.dense is None else self.dense
        parts = [a[i] @ on[i].astype(np.float64, copy=False) for i in _blocks(self.active)]
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)
