"""The interior-point method behind `exact`: Newton's method for noise, level and prices at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from wflmc.planning.distance import Distances

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """low ≤ v ≤ high and Σ_s active[s, k] cost[s]/v[s] ≤ budget[k], written as use @ (1/v) ≤ 1."""

    low: Array
    high: Array
    use: Array
    """active cost/budget of the devices whose budget may bind, [K', S]."""


def start(limits: Limits, distances: Distances) -> Array:
    """Noise well inside all limits: of the posterior's size if they allow it, else the more the less it matters."""
    least, most = 1 / limits.high, 1 / limits.low
    weight, rise = distances.trace.mean(0), np.full(most.size, distances.trace.sum(1).max() / distances.spread)
    if limits.use.size:
        price = limits.use.mean(0)
        wish = np.sqrt(np.maximum(weight / np.maximum(price, 1e-3 * price.max()), 1e-30 * weight.max()))
        rise = np.minimum(rise, wish / float(np.max(limits.use @ wish)))
    rise = np.clip(rise - least, np.minimum(least, 0.5 * (most - least)), 0.9 * (most - least))
    need, room = limits.use @ rise, np.maximum(1 - limits.use @ least, 1e-14)
    return np.asarray(1 / (least + rise * min(1.0, 0.5 / float(np.max(need / room, initial=0.5)))))


class Path:
    """Primal-dual interior point with Mehrotra's corrector for min t, F(v) ≤ t, under the limits.

    All constraints have slacks x and prices z, stacked: F ≤ t, budgets, low, high. Slacks are unknowns of their own and
    may miss what they stand for by `miss`, which a full step removes but for curvature. Steps are relative, dv = v y.

    Args:
        care: share of the present gap that every step aims at, at least: 0 is fastest, 0.3 hardly ever goes astray.
    """

    def __init__(self, distances: Distances, limits: Limits, care: float = 0.0) -> None:
        self.distances, self.limits, self.care, self.v = distances, limits, care, start(limits, distances)
        self.rounds, self.kept = self.v.size, distances.shift.size
        self.F, self.g, self.J = distances.expand(self.v)
        self.t = 1.2 * float(self.F.max()) - 0.1 * float(self.F.min()) + 1e-6 * distances.spread
        self.x = self._slacks()
        self.miss = np.zeros(self.x.size)
        self.z = 1 / self.x
        self.z /= self.z[: self.kept].sum()

    def _slacks(self) -> Array:
        v, limits = self.v, self.limits
        return np.concatenate([self.t - self.F, 1 - limits.use @ (1 / v), v - limits.low, limits.high - v])

    def _parts(self, stacked: Array) -> tuple[Array, Array, Array, Array]:
        """The parts of a stack: kept rounds, budgets, low, high."""
        S = self.rounds
        return stacked[: self.kept], stacked[self.kept : -2 * S], stacked[-2 * S : -S], stacked[-S:]

    @property
    def gap(self) -> float:
        """How far the present point would be from the optimum if it missed nothing."""
        return float(self.x @ self.z)

    @property
    def prices(self) -> tuple[Array, Array]:
        """Weights of the kept rounds, of sum 1, [S_u], and the prices of the budgets that go with them, [K']."""
        w, lam, _, _ = self._parts(self.z)
        return w / w.sum(), lam / w.sum()

    def _prepare(self) -> None:
        """Newton's matrix in relative steps, with the level t eliminated, and its Cholesky factor."""
        v = self.v
        self.ratio = self.z / self.x
        w, lam, _, _ = self._parts(self.z)
        omega, paid, low, high = self._parts(self.ratio)
        self.slope, self.cost = self.g * v, self.limits.use / v
        self.level = omega.sum()
        self.mean = omega @ self.slope / self.level
        bend = (self.J * (np.sqrt(w)[:, None, None] * v[:, None])).swapaxes(1, 2).reshape(-1, self.rounds)
        apart = (self.slope - self.mean) * np.sqrt(omega)[:, None]
        spend = self.cost * np.sqrt(paid)[:, None]
        H = bend.T @ bend + apart.T @ apart + spend.T @ spend
        H.flat[:: self.rounds + 1] += v * v * (low + high) + 2 * (lam @ self.cost)
        self.scale = 1 / np.sqrt(H.diagonal())
        H *= self.scale * self.scale[:, None]
        H.flat[:: self.rounds + 1] += 1e-14
        self.factor = cho_factor(H, check_finite=False)

    def _direction(self, aim: Array | float) -> tuple[Array, float, Array, Array]:
        """The step towards x z = aim: of v (relative), of t, of the slacks and of the prices."""
        wanted = aim / self.x
        w, lam, low, high = self._parts(wanted + self.ratio * self.miss)
        off, off_level = w @ self.slope - lam @ self.cost + self.v * (high - low), 1 - w.sum()
        y = -self.scale * cho_solve(self.factor, self.scale * (off + self.mean * off_level), check_finite=False)
        dt = float(self.mean @ y - off_level / self.level)
        dx = np.concatenate([dt - self.slope @ y, self.cost @ y, self.v * y, -self.v * y]) - self.miss
        return y, dt, dx, wanted - self.z - self.ratio * dx

    def step(self) -> bool:
        """Move; False where rounding leaves no direction."""
        try:
            self._prepare()
        except LinAlgError:
            return False
        mu = self.gap / self.x.size
        _, _, dx, dz = self._direction(0.0)
        alpha = min(_reach(self.x, dx), _reach(self.z, dz))
        after = float((self.x + alpha * dx) @ (self.z + alpha * dz)) / self.x.size
        # Slacks that miss much must be put right first: prices without products are hard to move.
        behind = float(np.abs(self.miss) @ self.z) / self.gap
        centre = mu * min(1.0, max(after / mu, 0.0) ** 3 + 0.1 * behind + self.care)
        y, dt, dx, dz = self._direction(centre - alpha * alpha * dx * dz)
        alpha = 0.99 * min(_reach(self.x, dx), _reach(self.z, dz), _reach(np.full(self.rounds, 0.8 - self.care), y))
        if not np.isfinite(alpha * y).all():
            return False
        self.v, self.t = self.v * (1 + alpha * y), self.t + alpha * dt
        self.x, self.z = self.x + alpha * dx, self.z + alpha * dz
        self.F, self.g, self.J = self.distances.expand(self.v)
        self.miss = self.x - self._slacks()
        return True


def _reach(x: Array, dx: Array) -> float:
    """The longest step, at most 1, that keeps x at or above 0."""
    falls = dx < 0
    return float(np.min(-x[falls] / dx[falls], initial=1.0))
