"""The noise of every round that brings a chain's true law nearest to the posterior, with a proof of how near.

The unknown is the variance v[s] that a round puts on its update. The W2² of a Gaussian law to the posterior is convex
in v; so is what privacy costs, cost/v. An interior-point method finds the v with the smallest worst W2² over the kept
rounds. The proof does not rely on it: convex functions lie above their tangents, which are minimised in closed form.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from wflmc.dynamics import Array, Motion, Response, diagonal_response
from wflmc.planning.solvers.path_following import follow_path
from wflmc.planning.solvers.program import HEADROOM, Bools
from wflmc.support.errors import InputError

TOLERANCE, STEPS = 1e-9, 100
"""The relative gap at which the search ends, and the most steps of one search."""
LEAST_POWER = 1e-12
"""Every round gets at least this share of an even split of the tightest budget: noise without end helps nobody."""
AS_GOOD = 1e-7
"""Relative distance given away for a plan without needless noise."""
ROUNDING = 1e-14
"""Distances this small next to the posterior's own size are rounding."""


@dataclass(frozen=True, eq=False)
class Proxy:
    """A Gaussian posterior as one would guess it without the data: from a public set, or from what is known of them.

    All devices are taken to hold alike data, so that only the size of a round's weights matters.
    """

    precision: ArrayLike
    """Eigenvalues of the Hessian of f, prior included: [m], or one for all directions."""
    mean_sq: ArrayLike = 0.0
    """‖posterior mean‖², taken to lie in all directions alike; or its squares along each, [m]."""
    prior_std: float = 1.0
    """Of θ[0] with init = "prior"."""

    def response(self, dim: int, motion: Motion, burn_in: int) -> Response:
        """How the law of a chain of `dim` parameters on this posterior answers to noise."""
        precision, mean_sq = (
            np.asarray(given, dtype=float) for given in (self.precision, self.mean_sq)
        )
        for name, given, least in (
            ("precision", precision, 1e-50),
            ("mean_sq", mean_sq, 0.0),
        ):
            if given.shape not in ((), (dim,)) or not np.all(
                (given >= least) & (given < 1e50)
            ):
                allowed = f"finite, {'above' if least else 'at least'} 0, and one number or {dim}, one per parameter"
                raise InputError(f"proxy.{name}", getattr(self, name), allowed)
        each = mean_sq if mean_sq.ndim else np.full(dim, float(mean_sq) / dim)
        start = self.prior_std**2 if motion.init == "prior" else 0.0
        return diagonal_response(
            np.broadcast_to(precision, (dim,)), each, start, motion, burn_in
        )


class _ByMatrices:
    """F[s'](v) = shift + tr(C + C* − 2(C*^½ C C*^½)^½) with C affine in v: convex, of known derivatives.

    Called with v[S] it gives F[S_u], of which exactly the worst is the objective.
    """

    def __init__(self, r: Response) -> None:
        values, vectors = np.linalg.eigh(r.target)
        self.root, self.inverse = (
            (vectors * values**power) @ vectors.T for power in (0.5, -0.5)
        )
        kept, rounds, self.dim, _ = r.effect.shape
        self.effect = (self.root @ r.effect @ self.root).reshape(kept, rounds, -1)
        self.base = (self.root @ r.covariance @ self.root).reshape(kept, -1)
        self.shift, self.trace, self.spread = (
            r.shift,
            np.trace(r.effect, axis1=-2, axis2=-1),
            float(values.sum()),
        )
        self.least = (
            1e-30 * float(values[0]) ** 2
        )  # in place of eigenvalues that are not there
        self.rows, self.columns = np.triu_indices(self.dim)

    def _roots(self, v: Array) -> tuple[Array, Array]:
        """Return square roots of the eigenvalues of C*^½ C C*^½, and its eigenvectors."""
        inner = (self.base + v @ self.effect).reshape(-1, self.dim, self.dim)
        values, vectors = np.linalg.eigh(0.5 * (inner + np.swapaxes(inner, -1, -2)))
        return np.sqrt(np.maximum(values, self.least)), vectors

    def _value(self, roots: Array, vectors: Array) -> Array:
        """Return F, the distance as ‖X C*^−½ − C*^½‖² with X = (C*^½ C C*^½)^½: no large numbers cancel."""
        x = (vectors * roots[:, None, :]) @ np.swapaxes(vectors, -1, -2)
        return np.asarray(
            self.shift + ((x @ self.inverse - self.root) ** 2).sum((-1, -2))
        )

    def __call__(self, v: Array) -> Array:
        return self._value(*self._roots(v))

    def expand(self, v: Array) -> tuple[Array, Array, Array]:
        """Return F[S_u], its gradient[S_u, S], and J[S_u, S, r] with J Jᵀ its Hessian."""
        roots, vectors = self._roots(v)
        inverse = (vectors / roots[:, None, :]) @ np.swapaxes(vectors, -1, -2)
        gradient = (
            self.trace - (self.effect @ inverse.reshape(-1, self.dim**2, 1))[..., 0]
        )
        # Second derivatives of the square root are its divided differences between eigenvalues.
        one, two = roots[:, self.rows], roots[:, self.columns]
        size = np.sqrt((1.0 + (self.rows != self.columns)) / (one * two * (one + two)))
        pairs = vectors[:, :, None, self.rows] * vectors[:, None, :, self.columns]
        turn = pairs.reshape(roots.shape[0], self.dim**2, -1) * size[:, None]
        return self._value(roots, vectors), gradient, self.effect @ turn


class _ByEigenvalues:
    """The same where all matrices share their eigenvectors, `times` of which have each eigenvalue."""

    def __init__(self, r: Response, times: Array) -> None:
        self.r, self.times, self.shift, self.std = r, times, r.shift, np.sqrt(r.target)
        self.trace, self.spread = r.effect @ times, float(times @ r.target)

    def _std(self, v: Array) -> Array:
        return np.maximum(
            np.sqrt(self.r.covariance + v @ self.r.effect), 1e-15 * self.std
        )

    def __call__(self, v: Array) -> Array:
        return np.asarray(self.shift + (self._std(v) - self.std) ** 2 @ self.times)

    def expand(self, v: Array) -> tuple[Array, Array, Array]:
        std = self._std(v)
        gradient = (self.r.effect @ ((1 - self.std / std) * self.times)[..., None])[
            ..., 0
        ]
        root = self.r.effect * np.sqrt(0.5 * self.times * self.std / std**3)[:, None]
        return self.shift + (std - self.std) ** 2 @ self.times, gradient, root


Distances = _ByMatrices | _ByEigenvalues


def distances(response: Response) -> Distances:
    """Return W2² of a linear chain's law to the posterior as a convex function of its noise, with its derivatives."""
    return (
        _ByMatrices(response)
        if response.times is None
        else _ByEigenvalues(response, response.times)
    )


class NoiseLimits(NamedTuple):
    """low ≤ v ≤ high and Σ_s active[s, k] cost[s]/v[s] ≤ budget[k], written as use @ (1/v) ≤ 1."""

    low: Array
    high: Array
    use: Array
    """active cost/budget of the devices whose budget may bind, [K', S]."""


class NoiseSolution(NamedTuple):
    """v[S], the worst W2² it gives, and what no noise within the limits can go below."""

    v: Array
    value: float
    lower_bound: float


def solve(
    response: Response,
    cost: Array,
    low: Array,
    high: Array,
    active: Bools,
    budget: Array,
    calm: Array,
) -> NoiseSolution:
    """The noise with the smallest worst W2², to a certified relative gap of TOLERANCE or as near as rounding allows.

    Args:
        response: how the kept rounds' law follows from the noise.
        cost: privacy cost of a round at unit noise, [S]: a = cost/v.
        low, high: limits of v, [S]; high may be infinite.
        active: [S, K]; budget: of Σ_s active[s, k] cost[s]/v[s], [K], may be infinite.
        calm: no more noise than this, [S], where as good a law can be had without it: optima are not always unique.
    """
    distance = distances(response)
    binding = np.flatnonzero((cost / low) @ active > budget * (1 - HEADROOM))
    use = active.T[binding] * (cost / (budget[binding] * (1 - HEADROOM))[:, None])
    token = use.max(0, initial=0.0) * cost.size / LEAST_POWER
    limits = NoiseLimits(
        low, np.maximum(low, np.minimum(high, np.where(token > 0, token, np.inf))), use
    )
    best = NoiseIncumbent(distance, limits, start(limits, distance))
    most = np.minimum(
        limits.high, np.where(np.isfinite(best.ceiling), 4 * best.ceiling, 1e6 * best.v)
    )
    if np.all(use @ (1 / calm) < 1) and np.any(calm < most):
        _improve(best, np.minimum(calm, most))
    calmer, value = best.v, best.value
    if best.gap > TOLERANCE:
        _improve(best, most)
    if best.gap > AS_GOOD:  # one in 1500 of the tests' random problems
        _improve(best, most, 2 * STEPS, care=0.3)
    if value - best.value <= max(
        AS_GOOD * best.value, best.rounding
    ):  # as good as the best but for little
        best.v, best.value = calmer, value
    lower_bound = best.bound if best.gap > 0 else best.value
    return NoiseSolution(v=best.v, value=best.value, lower_bound=lower_bound)


def _improve(
    best: "NoiseIncumbent", high: Array, steps: int = STEPS, care: float = 0.0
) -> None:
    """Follow the path below `high` until the gap is small or the path has ended."""
    limits = best.limits
    # A little wider, so that there is an inside even where limits meet.
    wider = NoiseLimits(
        low=limits.low * (1 - 1e-11), high=high * (1 + 1e-11), use=limits.use
    )
    path = NoisePath(best.distances, wider, care)
    follow_path(path, best, TOLERANCE, steps)


class NoiseIncumbent:
    """The best noise and the best lower bound met so far."""

    def __init__(self, distances: Distances, limits: NoiseLimits, v: Array) -> None:
        self.distances, self.limits = distances, limits
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
        return (
            0.0
            if self.value - self.bound <= self.rounding
            else 1 - self.bound / self.value
        )

    def offer(self, v: Array) -> None:
        """Keep v, made to meet all limits exactly, if it is the best so far."""
        limits = self.limits
        v = np.clip(v, limits.low, limits.high)
        least = 1 / limits.high
        need, room = limits.use @ (1 / v - least), 1 - limits.use @ least
        over = float(np.max(need / np.maximum(room, 1e-300), initial=0.0))
        if over > 1:
            v = np.clip(
                1 / (least + (1 / v - least) / over * (1 - 1e-15)),
                limits.low,
                limits.high,
            )
        value = float(self.distances(v).max())
        if value < self.value:
            self.value, self.v = value, v

    def is_worth_updating(self, path: "NoisePath") -> bool:
        """Return True: every point of the path is looked at."""
        return True

    def update(self, path: "NoisePath") -> None:
        """Take the path's present point into account."""
        self.offer(path.v)
        self.prove(path)

    def has_stalled(self, path: "NoisePath") -> bool:
        """Return whether the path is nearer to the optimum than rounding lets a proof be."""
        return path.gap < 1e-5 * TOLERANCE * self.value

    def prove(self, path: "NoisePath") -> None:
        """Weights w[S_u] of sum 1 and prices lam[K'] bound all noise: the tangent at v, minimised in closed form."""
        w, lam = path.prices
        slope, price = w @ path.g, lam @ self.limits.use
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            u = np.where(slope > 0, np.sqrt(price / slope), self.ceiling)
            u = np.clip(u, self.limits.low, self.ceiling)
            least = np.where(slope == 0, 0.0, slope * u) + price / u
        bound = float(w @ path.F - slope @ path.v + least.sum() - lam.sum())
        self.bound = max(self.bound, bound)


def start(limits: NoiseLimits, distances: Distances) -> Array:
    """Noise well inside all limits: of the posterior's size if they allow it, else the more the less it matters."""
    least, most = 1 / limits.high, 1 / limits.low
    weight, rise = (
        distances.trace.mean(0),
        np.full(most.size, distances.trace.sum(1).max() / distances.spread),
    )
    if limits.use.size:
        price = limits.use.mean(0)
        wish = np.sqrt(
            np.maximum(
                weight / np.maximum(price, 1e-3 * price.max()), 1e-30 * weight.max()
            )
        )
        rise = np.minimum(rise, wish / float(np.max(limits.use @ wish)))
    rise = np.clip(
        rise - least, np.minimum(least, 0.5 * (most - least)), 0.9 * (most - least)
    )
    need, room = limits.use @ rise, np.maximum(1 - limits.use @ least, 1e-14)
    return np.asarray(
        1 / (least + rise * min(1.0, 0.5 / float(np.max(need / room, initial=0.5))))
    )


class NoisePath:
    """Primal-dual interior point with Mehrotra's corrector for min t, F(v) ≤ t, under the limits.

    All constraints have slacks x and prices z, stacked: F ≤ t, budgets, low, high. Slacks are unknowns of their own and
    may miss what they stand for by `miss`, which a full step removes but for curvature. Steps are relative, dv = v y.

    Args:
        care: share of the present gap that every step aims at, at least: 0 is fastest, 0.3 hardly ever goes astray.
    """

    def __init__(
        self, distances: Distances, limits: NoiseLimits, care: float = 0.0
    ) -> None:
        self.distances, self.limits, self.care, self.v = (
            distances,
            limits,
            care,
            start(limits, distances),
        )
        self.rounds, self.kept = self.v.size, distances.shift.size
        self.F, self.g, self.J = distances.expand(self.v)
        self.t = (
            1.2 * float(self.F.max())
            - 0.1 * float(self.F.min())
            + 1e-6 * distances.spread
        )
        self.x = self._slacks()
        self.miss = np.zeros(self.x.size)
        self.z = 1 / self.x
        self.z /= self.z[: self.kept].sum()

    def _slacks(self) -> Array:
        v, limits = self.v, self.limits
        return np.concatenate(
            [self.t - self.F, 1 - limits.use @ (1 / v), v - limits.low, limits.high - v]
        )

    def _parts(self, stacked: Array) -> tuple[Array, Array, Array, Array]:
        """The parts of a stack: kept rounds, budgets, low, high."""
        S = self.rounds
        return (
            stacked[: self.kept],
            stacked[self.kept : -2 * S],
            stacked[-2 * S : -S],
            stacked[-S:],
        )

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
        bend = (
            (self.J * (np.sqrt(w)[:, None, None] * v[:, None]))
            .swapaxes(1, 2)
            .reshape(-1, self.rounds)
        )
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
        off, off_level = (
            w @ self.slope - lam @ self.cost + self.v * (high - low),
            1 - w.sum(),
        )
        y = -self.scale * cho_solve(
            self.factor, self.scale * (off + self.mean * off_level), check_finite=False
        )
        dt = float(self.mean @ y - off_level / self.level)
        dx = (
            np.concatenate(
                [dt - self.slope @ y, self.cost @ y, self.v * y, -self.v * y]
            )
            - self.miss
        )
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
        alpha = 0.99 * min(
            _reach(self.x, dx),
            _reach(self.z, dz),
            _reach(np.full(self.rounds, 0.8 - self.care), y),
        )
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
