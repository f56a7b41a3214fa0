"""The general power problem as arrays.

What a plan costs, what it spends, and the dual that bounds all plans from below.
"""

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
Activity = NDArray[np.bool_] | NDArray[np.float64]
"""Whether devices transmit, or with which probability, [S, K]."""
HEADROOM = 1e-12
"""Plans stop this relative distance short of every budget.

Rounding then never overspends.
"""
MIN_POWER_FRACTION = 1e-12
"""The fraction of an even split of the budget that every round gets at least.

No round may have zero power, and this costs next to nothing.
"""
MAX_BLOCK_PAIRS = 1 << 21
"""(round, device) pairs that are turned into floats at a time: 16 MiB."""
MAX_BLOCK_ROUNDS = 1024
"""Rounds that are added up at a time, which keeps rounding out of long sums."""


@dataclass(frozen=True)
class PowerProgram:
    """One allocation problem over S rounds and K devices.

    The unknown a[S] is the power α²/N0 of each round. The bound
    B[s'] = base[s'] + Σ_{s ≤ s'} (ρ[s+1] … ρ[s'])² cost[s]/a[s] has its maximum
    ("worst") or its mean ("average") over the rounds after `burn_in` minimized, subject
    to floor ≤ a ≤ cap and Σ_s active[s, k] a[s] ≤ budget[k].
    """

    active: Activity
    """[S, K], with at least one active device in every round; in forecasts the
    probability that a device is active."""
    budget: Array
    """[K], above 0; may be infinite."""
    cap: Array
    """[S], above 0 and finite."""
    cost: Array
    """[S], above 0."""
    rho: Array
    """ρ[S], between 0 and 1."""
    base: Array
    """[S]."""
    floor: Array
    """[S], from 0 to the cap."""
    burn_in: int
    """S_b, from 0 to S − 1."""
    objective: str = "worst"
    """worst or average."""

    @property
    def decay(self) -> Array:
        """Return ρ²[S], what is left of the bound of the round before in each round's.

        The first entry plays no part, because `base` contains the start.
        """
        return self.rho * self.rho


def round_bounds(program: PowerProgram, a: Array) -> Array:
    """Return the bound B of every round.

    B[s'] = base[s'] + Σ_{s ≤ s'} (ρ[s+1] … ρ[s'])² cost[s]/a[s], which is Proposition 1
    for powers below the Langevin cap. It is computed by its recursion, which takes time
    linear in S.

    Args:
        program: the problem.
        a: power of every round, above 0, [S].

    Returns:
        B[1..S], those of burn-in included.
    """
    return program.base + first_order(program.cost / a, program.decay)


def dual(program: PowerProgram, w: Array, lam: Array) -> tuple[float, Array]:
    """Return the Lagrangian dual, and the powers that attain it.

    g(w, λ) = Σ w base − Σ_k λ_k B_k + Σ_s min_{floor ≤ a ≤ cap} (cost W/a + Λ a), with
    W[s] = Σ_{s' ≥ s} w[s'] (ρ[s+1] … ρ[s'])² and Λ[s] = Σ_k active[s, k] λ_k. Each
    minimum is at √(cost W/Λ), clipped. No feasible plan has a smaller objective than
    the dual value; at the optimum the powers are the optimal plan.

    Args:
        program: the problem.
        w: weights of the rounds' bounds, at least 0 and of sum 1, zero up to burn-in,
            [S].
        lam: prices of the budgets, at least 0, [K]; 0 for infinite budgets.

    Returns:
        The value, and a[S] between floor and cap.
    """
    price = price_of_rounds(program.active, lam)
    weight = program.cost * backward(w, program.decay)
    # Without a weight the minimizer is the floor, without a price the cap.
    ratio = np.full_like(weight, np.inf)
    with np.errstate(over="ignore"):
        np.divide(weight, price, out=ratio, where=price > 0)
    has_weight = weight > 0
    clipped = np.clip(np.sqrt(ratio), program.floor, program.cap)
    a = np.where(has_weight, clipped, program.floor)
    noise = np.zeros_like(a)
    np.divide(weight, a, out=noise, where=has_weight & (a > 0))
    # Without the others: an infinite budget has no price, and 0 · inf is nan.
    has_price = lam > 0
    payments = lam[has_price] @ program.budget[has_price]
    value = w @ program.base + (np.sum(noise + price * a) - payments)
    return float(value), a


def _blocks(active: Activity) -> Iterator[slice]:
    """Return slices of rounds.

    They are small enough to turn into floats and to keep rounding out of long sums.
    """
    rounds, devices = active.shape
    by_memory = max(1, MAX_BLOCK_PAIRS // max(1, devices))
    size = min(MAX_BLOCK_ROUNDS, by_memory)
    return (slice(first, first + size) for first in range(0, rounds, size))


def price_of_rounds(active: Activity, lam: Array) -> Array:
    """Return the price of power in every round, Λ[s] = Σ_k active[s, k] λ_k.

    Only devices with a price take part, which are usually a small part of all.

    Args:
        active: who transmits, [S, K].
        lam: prices of the devices' budgets, [K].

    Returns:
        Λ[S].
    """
    priced = np.flatnonzero(lam)  # only their columns need turning into floats
    parts = [active[block][:, priced] @ lam[priced] for block in _blocks(active)]
    return np.concatenate(parts)


def smallest_of_senders(active: Activity, value: Array) -> Array:
    """Return the smallest value among the devices that are active in each round.

    It is what limits a round in which all active devices have the same power: the
    budget of the tightest of them, or the factor by which that one may still grow.

    Args:
        active: who transmits, at least one device in every round, [S, K].
        value: of every device, [K].

    Returns:
        The minimum of every round, [S].
    """
    parts = [np.where(active[block], value, np.inf).min(1) for block in _blocks(active)]
    return np.concatenate(parts)


class Usage:
    """What each device spends on a plan.

    No float copy of a large matrix of activity is held.

    Args:
        active: who transmits, [S, K].
    """

    def __init__(self, active: Activity) -> None:
        is_small = active.size <= MAX_BLOCK_PAIRS
        self.active: Activity = active.astype(np.float64) if is_small else active
        self.blocks = list(_blocks(active))

    def __call__(self, a: Array) -> Array:
        """Return Σ_s active[s, k] a[s], [K], of power a[S]."""
        parts = []
        for block in self.blocks:
            active = self.active[block].astype(np.float64, copy=False)
            parts.append(a[block] @ active)
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)


def solve_by_cvxpy(program: PowerProgram) -> Array:
    """Solve the problem by a generic convex solver, cvxpy with Clarabel.

    It is slower than ours and independent of it: an optimum to the solver's tolerance,
    to which budgets and caps are met too. There is no certificate.

    Args:
        program: the problem.

    Returns:
        a[S].

    Raises:
        InputError: cvxpy is not installed, or Clarabel finds no solution.
    """
    try:
        cp: Any = importlib.import_module("cvxpy")
    except ImportError:
        expected = "'own' unless cvxpy is installed: pip install 'wflmc[convex]'"
        raise InputError("solver", "cvxpy", expected) from None
    rounds = program.cap.size
    # Units in which a and the noise are near 1: without them Clarabel is off by a few
    # percent, on either side.
    largest_count = max(1, program.active.sum(0).max())
    equal_part = np.median(program.budget) / largest_count
    unit = float(np.median(np.minimum(program.cap, equal_part)))
    forgotten = 1 - float(np.median(program.decay))
    scale = float(np.median(program.cost)) / unit / forgotten

    a = cp.Variable(rounds)
    noise = cp.Variable(rounds)
    total = cp.Variable(rounds)
    budget = np.minimum(program.budget, 2 * program.cap.sum()) / unit
    limits = [
        a <= program.cap / unit,
        a >= program.floor / unit,
        noise >= cp.multiply(program.cost / unit / scale, cp.inv_pos(a)),
        total[0] == noise[0],
        program.active.T.astype(float) @ a <= budget,
    ]
    if rounds > 1:
        remembered = cp.multiply(program.decay[1:], total[:-1])
        limits.append(total[1:] == remembered + noise[1:])
    kept_bounds = (total + program.base / scale)[program.burn_in :]
    goal = cp.max(kept_bounds)
    if program.objective == "average":
        goal = cp.sum(kept_bounds) / (rounds - program.burn_in)
    cp.Problem(cp.Minimize(goal), limits).solve(solver=cp.CLARABEL)
    if a.value is None:
        expected = "'own' for this problem: Clarabel found no solution"
        raise InputError("solver", "cvxpy", expected)
    return np.asarray(a.value) * unit
