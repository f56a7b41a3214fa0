"""The noise that brings a chain's true law nearest to the posterior, with a proof.

The unknown is the variance v[s] that a round puts on its update. The W2² of a Gaussian
law to the posterior is convex in v; so is what privacy costs, cost/v. An interior-point
method finds the v with the smallest worst W2² over the kept rounds. The proof does not
rely on it: convex functions lie above their tangents, which are minimized in closed
form.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from wflmc.dynamics import Array, Motion, Response, diagonal_response
from wflmc.planning.solvers.path_following import MAX_STEPS, follow_path
from wflmc.planning.solvers.program import HEADROOM, MIN_POWER_FRACTION, Bools
from wflmc.posterior.inputs import starts_at_point
from wflmc.support.errors import InputError

GAP_TOLERANCE = 1e-9
"""The relative gap at which the search ends."""
MODERATION_TOLERANCE = 1e-7
"""Relative distance given away for a plan without needless noise."""
DISTANCE_ROUNDING = 1e-14
"""Distances this small next to the posterior's own size are rounding."""
SLOW_CENTERING = 0.3
"""Fraction of the present gap that every step of the slow search aims at."""
MAX_RELATIVE_STEP = 0.8
"""A step takes at most this fraction off any v[s]."""
BOUNDARY_FRACTION = 0.99
"""Fraction of the way to the boundary that a step goes."""
REGULARIZATION = 1e-14
"""Added to the unit diagonal of the scaled Newton matrix, against rounding."""
MIN_PROXY_PRECISION = 1e-50
"""The smallest curvature of a proxy."""
MAX_PROXY_VALUE = 1e50
"""Numbers of a proxy are below this, so that products of them are finite."""


@dataclass(frozen=True, eq=False)
class Proxy:
    """A Gaussian posterior as one would guess it without the data.

    It is guessed from a public data set, or from what is known of the data. All devices
    are taken to hold similar data, so that only the size of a round's weights matters.
    """

    precision: ArrayLike
    """Eigenvalues of the Hessian of f, prior included: [m], or one for all
    directions."""
    mean_sq: ArrayLike = 0.0
    """‖posterior mean − m‖² for the mean m of the start, equally in all directions; or
    its squares along each, [m]."""
    prior_std: float = 1.0
    """Of θ[0] with init = "prior"."""

    def response(self, dim: int, motion: Motion, burn_in: int) -> Response:
        """Return how the law of a chain on this posterior depends on noise.

        The posterior is N(mean, diag(1/precision)), and the chain starts at
        N(m, prior_std² I) or at m, the prior's mean or 0. No private data are used, so that a plan by the
        proxy is covered by ε.

        Args:
            dim: m, the number of parameters.
            motion: how the chain moves; overdamped dynamics alone.
            burn_in: S_b; the response is that of the rounds after it.

        Returns:
            The response, by eigenvalues.

        Raises:
            InputError: a field of the proxy is out of range or of another length, or
                dynamics are kinetic.
        """
        precision = self._checked("precision", dim, MIN_PROXY_PRECISION)
        mean_sq = self._checked("mean_sq", dim, 0.0)
        if mean_sq.ndim == 0:
            mean_sq = np.full(dim, float(mean_sq) / dim)
        initial_variance = 0.0 if starts_at_point(motion.init) else self.prior_std**2
        return diagonal_response(
            np.broadcast_to(precision, (dim,)),
            mean_sq,
            initial_variance,
            motion,
            burn_in,
        )

    def _checked(self, name: str, dim: int, minimum: float) -> Array:
        """Return a field as an array, if it is in range: a number or [m]."""
        field = getattr(self, name)
        values = np.asarray(field, dtype=float)
        is_in_range = (values >= minimum) & (values < MAX_PROXY_VALUE)
        if values.shape in ((), (dim,)) and np.all(is_in_range):
            return values
        lower_limit = "above" if minimum else "at least"
        raise InputError(
            f"proxy.{name}",
            field,
            f"finite, {lower_limit} 0, and one number or {dim}, one per parameter",
        )


class Expansion(NamedTuple):
    """W2² of all kept rounds at some noise v[S], to second order."""

    value: Array
    """F, [S_u]."""
    gradient: Array
    """Of F by v, [S_u, S]."""
    hessian_root: Array
    """J with J Jᵀ the Hessian of F, [S_u, S, r].

    It has a column for each pair i ≤ j of m eigenvectors, or for each of d eigenvalues.
    """


class _ByMatrices:
    """W2² of every kept round as a function of the noise.

    F[s'](v) = shift + tr(C + C* − 2(C*^½ C C*^½)^½) with C affine in v, which is convex
    and has known derivatives. Called with v[S] it gives F[S_u].

    Args:
        response: by matrices.
    """

    def __init__(self, response: Response) -> None:
        values, vectors = np.linalg.eigh(response.target)
        self.root = (vectors * values**0.5) @ vectors.T
        self.inverse_root = (vectors * values**-0.5) @ vectors.T
        kept_rounds, rounds, self.dim, _ = response.effect.shape
        effect = self.root @ response.effect @ self.root
        self.effect = effect.reshape(kept_rounds, rounds, -1)
        base = self.root @ response.covariance @ self.root
        self.base = base.reshape(kept_rounds, -1)
        self.shift = response.shift
        self.trace = np.trace(response.effect, axis1=-2, axis2=-1)
        self.spread = float(values.sum())
        """tr C*, the posterior's own size."""
        self.smallest_eigenvalue = 1e-30 * float(values[0]) ** 2
        """In place of eigenvalues that are zero."""
        self.rows, self.columns = np.triu_indices(self.dim)

    def _roots(self, v: Array) -> tuple[Array, Array]:
        """Return the square roots of the eigenvalues of C*^½ C C*^½, and eigenvectors.

        They are [S_u, m] and [S_u, m, m], with eigenvectors as columns.
        """
        flat = self.base + v @ self.effect
        inner = flat.reshape(-1, self.dim, self.dim)
        transposed = np.swapaxes(inner, -1, -2)
        values, vectors = np.linalg.eigh(0.5 * (inner + transposed))
        positive = np.maximum(values, self.smallest_eigenvalue)
        return np.sqrt(positive), vectors

    def _value(self, roots: Array, vectors: Array) -> Array:
        """Return F by the distance ‖X C*^−½ − C*^½‖² with X = (C*^½ C C*^½)^½.

        No large numbers cancel in it.
        """
        transposed = np.swapaxes(vectors, -1, -2)
        x = (vectors * roots[:, None, :]) @ transposed
        difference = x @ self.inverse_root - self.root
        distance = (difference**2).sum((-1, -2))
        return np.asarray(self.shift + distance)

    def __call__(self, v: Array) -> Array:
        roots, vectors = self._roots(v)
        return self._value(roots, vectors)

    def expand(self, v: Array) -> Expansion:
        """Return F, its gradient and a root of its Hessian.

        With X = (C*^½ C C*^½)^½ the gradient of tr(C − 2X) by C is I − C*^½ X⁻¹ C*^½.
        Where X² changes by M, the second derivative is
        Σ_ij M_ij²/(√λ_i √λ_j (√λ_i + √λ_j)) in the eigenvectors of X², whose
        eigenvalues are λ: one column of J for each pair i ≤ j.

        Args:
            v: noise of every round, [S].

        Returns:
            The expansion at v.
        """
        roots, vectors = self._roots(v)
        transposed = np.swapaxes(vectors, -1, -2)
        inverse = (vectors / roots[:, None, :]) @ transposed
        inverse_columns = inverse.reshape(-1, self.dim**2, 1)
        gradient = self.trace - (self.effect @ inverse_columns)[..., 0]
        first = roots[:, self.rows]
        second = roots[:, self.columns]
        multiplicity = 1.0 + (self.rows != self.columns)
        size = np.sqrt(multiplicity / (first * second * (first + second)))
        left = vectors[:, :, None, self.rows]
        right = vectors[:, None, :, self.columns]
        pairs = (left * right).reshape(len(roots), self.dim**2, -1)
        rotation = pairs * size[:, None]
        return Expansion(
            value=self._value(roots, vectors),
            gradient=gradient,
            hessian_root=self.effect @ rotation,
        )


class _ByEigenvalues:
    """W2² as of `_ByMatrices`, where all matrices share their eigenvectors.

    Args:
        response: by eigenvalues, [..., d].
        multiplicity: how many eigenvectors have each of them, [d].
    """

    def __init__(self, response: Response, multiplicity: Array) -> None:
        self.response = response
        self.multiplicity = multiplicity
        self.shift = response.shift
        self.target_std = np.sqrt(response.target)
        self.trace = response.effect @ multiplicity
        self.spread = float(multiplicity @ response.target)
        """tr C*, the posterior's own size."""

    def _std(self, v: Array) -> Array:
        """Return the standard deviations along all directions, [S_u, d]."""
        variance = self.response.covariance + v @ self.response.effect
        return np.maximum(np.sqrt(variance), 1e-15 * self.target_std)

    def _value(self, std: Array) -> Array:
        """Return F."""
        distance = (std - self.target_std) ** 2 @ self.multiplicity
        return np.asarray(self.shift + distance)

    def __call__(self, v: Array) -> Array:
        return self._value(self._std(v))

    def expand(self, v: Array) -> Expansion:
        """Return F = shift + Σ_d n_d (√c_d − √c*_d)², its gradient and a Hessian root.

        The variances c_d are affine in v; the derivative of each term by its c_d is
        n_d (1 − √(c*_d/c_d)), the second one n_d √c*_d/(2 c_d^{3/2}).

        Args:
            v: noise of every round, [S].

        Returns:
            The expansion at v, with one column of J for each eigenvalue.
        """
        effect = self.response.effect
        std = self._std(v)
        slope = (1 - self.target_std / std) * self.multiplicity
        gradient = (effect @ slope[..., None])[..., 0]
        curvature = 0.5 * self.multiplicity * self.target_std / std**3
        return Expansion(
            value=self._value(std),
            gradient=gradient,
            hessian_root=effect * np.sqrt(curvature)[:, None],
        )


Distances = _ByMatrices | _ByEigenvalues
"""W2² of the kept rounds as a function of v[S], with its derivatives."""


def distances(response: Response) -> Distances:
    """Return W2² of a linear chain's law to the posterior as a function of its noise.

    The function maps v[S] to W2²[S_u] and is convex; `expand` gives its first and
    second derivatives. It is exact for Gaussian posteriors while no gradient is
    clipped.

    Args:
        response: how the law of the kept rounds depends on the noise of every round, by
            matrices or by eigenvalues.

    Returns:
        The function.
    """
    if response.multiplicity is None:
        return _ByMatrices(response)
    return _ByEigenvalues(response, response.multiplicity)


class NoiseProblem(NamedTuple):
    """Which noise may be chosen, and what it does."""

    response: Response
    """How the law of the kept rounds depends on the noise."""
    cost: Array
    """Privacy cost of a round at unit noise, [S]: a = cost/v."""
    low: Array
    """The least v, [S]."""
    high: Array
    """The largest v, [S]; may be infinite."""
    active: Bools
    """Whether a device transmits, [S, K]."""
    budget: Array
    """The most of Σ_s active[s, k] cost[s]/v[s], [K]; may be infinite."""
    moderate: Array
    """No more noise than this, [S], where as good a law can be had without it.

    Optima are not always unique.
    """


class NoiseLimits(NamedTuple):
    """low ≤ v ≤ high and Σ_s active[s, k] cost[s]/v[s] ≤ budget[k].

    The budgets are written as use @ (1/v) ≤ 1.
    """

    low: Array
    """[S]."""
    high: Array
    """[S]; finite where a round costs anything."""
    use: Array
    """active cost/budget of the devices whose budget may bind, [K', S]."""


class NoiseSolution(NamedTuple):
    """The best noise, and how good any noise can be."""

    v: Array
    """Within all limits, [S]."""
    value: float
    """The worst W2² that it gives."""
    lower_bound: float
    """What no noise within the limits can go below."""


def solve(problem: NoiseProblem) -> NoiseSolution:
    """Find the noise with the smallest worst W2² over the kept rounds.

    It is found to a certified relative gap of `GAP_TOLERANCE`, or as near as rounding
    allows. If moderate noise is as good to `MODERATION_TOLERANCE`, it is taken.

    Args:
        problem: the limits of the noise, and its effect.

    Returns:
        The noise, its worst W2², and a lower bound that does not rely on the solver.
    """
    distance = distances(problem.response)
    limits = _noise_limits(problem)
    best = NoiseIncumbent(distance, limits, interior_noise(limits, distance))
    # A path needs finite limits: where none is implied, far above any useful noise.
    largest = np.where(np.isfinite(best.ceiling), 4 * best.ceiling, 1e6 * best.v)
    high = np.minimum(limits.high, largest)
    moderate = problem.moderate
    meets_budgets = np.all(limits.use @ (1 / moderate) < 1)
    if meets_budgets and np.any(moderate < high):
        _improve(best, np.minimum(moderate, high))
    moderate_v = best.v
    moderate_value = best.value
    if best.gap > GAP_TOLERANCE:
        _improve(best, high)
    if best.gap > MODERATION_TOLERANCE:  # one in 1500 of the tests' random problems
        _improve(best, high, max_steps=2 * MAX_STEPS, min_centering=SLOW_CENTERING)
    tolerance = max(MODERATION_TOLERANCE * best.value, best.rounding)
    if moderate_value - best.value <= tolerance:
        best.v = moderate_v
        best.value = moderate_value
    lower_bound = best.bound if best.gap > 0 else best.value
    return NoiseSolution(v=best.v, value=best.value, lower_bound=lower_bound)


def _noise_limits(problem: NoiseProblem) -> NoiseLimits:
    """Return the limits of a problem, with the budgets of the devices that may bind."""
    cost = problem.cost
    budget = problem.budget * (1 - HEADROOM)
    largest_spending = (cost / problem.low) @ problem.active
    binding = np.flatnonzero(largest_spending > budget)
    binding_budget = budget[binding][:, None]
    use = problem.active.T[binding] * (cost / binding_budget)
    # A round has at least MIN_POWER_FRACTION of an even split of every budget: noise
    # without limit would improve nothing.
    largest = use.max(0, initial=0.0) * cost.size / MIN_POWER_FRACTION
    useful = np.where(largest > 0, largest, np.inf)
    high = np.maximum(problem.low, np.minimum(problem.high, useful))
    return NoiseLimits(problem.low, high, use)


def _improve(
    best: "NoiseIncumbent",
    high: Array,
    max_steps: int = MAX_STEPS,
    min_centering: float = 0.0,
) -> None:
    """Follow the path below `high` until the gap is small or the path has ended."""
    limits = best.limits
    # A little wider, so that there is an inside even where limits meet.
    wider = NoiseLimits(
        low=limits.low * (1 - 1e-11), high=high * (1 + 1e-11), use=limits.use
    )
    path = NoisePath(best.distances, wider, min_centering)
    follow_path(path, best, GAP_TOLERANCE, max_steps)


class NoiseIncumbent:
    """The best noise and the best lower bound met so far.

    Args:
        distances: W2² as a function of the noise.
        limits: of the noise.
        v: noise to begin with, [S].
    """

    def __init__(self, distances: Distances, limits: NoiseLimits, v: Array) -> None:
        self.distances = distances
        self.limits = limits
        self.v = v
        self.value = np.inf
        self.bound = float(distances.shift.max())
        self.rounding = DISTANCE_ROUNDING * distances.spread
        self.offer(v)
        # Noise that adds more than this to tr C of a kept round is farther from the
        # posterior than v: it need not be looked at.
        largest_trace = (np.sqrt(distances.spread) + np.sqrt(self.value)) ** 2
        with np.errstate(divide="ignore", over="ignore"):
            implied = largest_trace / distances.trace.max(0)
        self.ceiling = np.minimum(limits.high, implied)

    @property
    def gap(self) -> float:
        """Return (value − bound)/value, the proven gap.

        It is 0 where the difference is no more than rounding next to the posterior's
        own size, tr C*. Distances are differences of such numbers, and no solver could
        make them more exact.
        """
        if self.value - self.bound <= self.rounding:
            return 0.0
        return 1 - self.bound / self.value

    def offer(self, v: Array) -> None:
        """Keep noise if it is the best so far.

        It is first made to meet all limits exactly: clipped to low and high, and then,
        where a budget is overspent, 1/v is scaled down towards 1/high for all rounds.

        Args:
            v: noise of every round, [S]; need not meet the limits.
        """
        limits = self.limits
        v = np.clip(v, limits.low, limits.high)
        smallest_inverse = 1 / limits.high
        required = limits.use @ (1 / v - smallest_inverse)
        available = 1 - limits.use @ smallest_inverse
        excess = float(np.max(required / np.maximum(available, 1e-300), initial=0.0))
        if excess > 1:
            rise = (1 / v - smallest_inverse) / excess
            inverse = smallest_inverse + rise * (1 - 1e-15)
            v = np.clip(1 / inverse, limits.low, limits.high)
        value = float(self.distances(v).max())
        if value < self.value:
            self.value = value
            self.v = v

    def is_worth_updating(self, path: "NoisePath") -> bool:
        """Return True: every point of the path is looked at."""
        return True

    def update(self, path: "NoisePath") -> None:
        """Take the path's present point into account.

        Its noise is offered as a solution, made to meet all limits, and its prices give
        a lower bound; each is kept only if it is better than the best so far.

        Args:
            path: at the point.
        """
        self.offer(path.v)
        self.prove(path)

    def has_stalled(self, path: "NoisePath") -> bool:
        """Return whether the path is too near the optimum for a better proof.

        Its gap is then far below the tolerance, and further steps could improve neither
        the noise nor the bound by anything that float64 shows.

        Args:
            path: at the present point.
        """
        return path.gap < 1e-5 * GAP_TOLERANCE * self.value

    def prove(self, path: "NoisePath") -> None:
        """Keep the lower bound that a path's prices give, if it is the best so far.

        Weights w of sum 1 and prices λ ≥ 0 bound all noise by the tangent at the
        path's v: w·F − g·v − Σ λ + Σ_s min_u (g u + price/u) with g = Σ w ∇F, each
        minimum over low ≤ u ≤ ceiling in closed form.

        Args:
            path: at the point.
        """
        prices = path.prices
        slope = prices.rounds @ path.expansion.gradient
        price = prices.budgets @ self.limits.use
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            u = np.where(slope > 0, np.sqrt(price / slope), self.ceiling)
            u = np.clip(u, self.limits.low, self.ceiling)
            smallest = np.where(slope == 0, 0.0, slope * u) + price / u
        tangent = prices.rounds @ path.expansion.value - slope @ path.v
        bound = float(tangent + smallest.sum() - prices.budgets.sum())
        self.bound = max(self.bound, bound)


def interior_noise(limits: NoiseLimits, distances: Distances) -> Array:
    """Return noise well inside all limits, from which a path can start.

    It is of the posterior's size if the limits allow that; otherwise a round gets the
    more noise, the less it matters for the distance and the more it costs. All
    constraints have slack, half of every budget at least where that is possible.

    Args:
        limits: of the noise.
        distances: W2² as a function of the noise.

    Returns:
        v[S].
    """
    smallest_inverse = 1 / limits.high
    largest_inverse = 1 / limits.low
    range_of_inverse = largest_inverse - smallest_inverse
    weight = distances.trace.mean(0)
    # 1/v at which all rounds together add the posterior's own size to tr C.
    inverse_of_size = distances.trace.sum(1).max() / distances.spread
    rise = np.full(largest_inverse.size, inverse_of_size)
    if limits.use.size:
        # The largest 1/v ∝ √(weight/price) that meets all budgets.
        price = limits.use.mean(0)
        worth = weight / np.maximum(price, 1e-3 * price.max())
        profile = np.sqrt(np.maximum(worth, 1e-30 * weight.max()))
        rise = np.minimum(rise, profile / float(np.max(limits.use @ profile)))
    smallest_rise = np.minimum(smallest_inverse, 0.5 * range_of_inverse)
    # From here on counted from the smallest 1/v.
    rise = np.clip(rise - smallest_inverse, smallest_rise, 0.9 * range_of_inverse)
    required = limits.use @ rise
    available = np.maximum(1 - limits.use @ smallest_inverse, 1e-14)
    excess = float(np.max(required / available, initial=0.5))
    return np.asarray(1 / (smallest_inverse + rise * min(1.0, 0.5 / excess)))


class ByConstraint(NamedTuple):
    """Numbers for all constraints, by kind."""

    rounds: Array
    """F ≤ t, [S_u]."""
    budgets: Array
    """[K']."""
    low: Array
    """[S]."""
    high: Array
    """[S]."""


class PathPrices(NamedTuple):
    """The prices of a path's point, scaled to weights of sum 1."""

    rounds: Array
    """Weights of the kept rounds, w[S_u]."""
    budgets: Array
    """Prices of the budgets that belong to them, λ[K']."""


class NoiseNewtonSystem(NamedTuple):
    """Newton's matrix at a point, in relative steps dv = v y.

    The level t is eliminated from it.
    """

    ratio: Array
    """Prices over slacks, stacked."""
    slope: Array
    """∂F/∂y, [S_u, S]."""
    cost: Array
    """use/v, [K', S]."""
    level_curvature: float
    """Of t."""
    mean_slope: Array
    """∂F/∂y, averaged over the kept rounds, [S]."""
    scale: Array
    """1/√diagonal of the matrix, [S]."""
    factor: tuple[Array, bool]
    """Cholesky factor of the scaled matrix."""


class NoiseDirection(NamedTuple):
    """A step of all unknowns."""

    relative_noise: Array
    """Of v, relative to v, [S]."""
    level: float
    """Of t."""
    slacks: Array
    """Stacked."""
    prices: Array
    """Stacked."""


class NoisePath:
    """Primal-dual interior point for min t, F(v) ≤ t, under the limits of the noise.

    It uses Mehrotra's corrector. All constraints have slacks x and prices z
    (`multipliers`), stacked: F ≤ t, budgets, low, high. Slacks are unknowns of their
    own and may differ from what they stand for by `residual`, which a full step removes
    but for curvature. Steps are relative, dv = v y.

    Args:
        distances: W2² as a function of the noise.
        limits: of the noise.
        min_centering: fraction of the present gap that every step aims at, at least: 0
            is fastest, 0.3 hardly ever goes astray.
    """

    def __init__(
        self, distances: Distances, limits: NoiseLimits, min_centering: float = 0.0
    ) -> None:
        self.distances = distances
        self.limits = limits
        self.min_centering = min_centering
        self.v = interior_noise(limits, distances)
        self.rounds = self.v.size
        self.kept_rounds = distances.shift.size
        self.expansion = distances.expand(self.v)
        largest = float(self.expansion.value.max())
        smallest = float(self.expansion.value.min())
        # A little above all F, so that their slacks are positive.
        self.level = 1.2 * largest - 0.1 * smallest + 1e-6 * distances.spread
        self.slacks = self._slacks()
        self.residual = np.zeros(self.slacks.size)
        self.multipliers = 1 / self.slacks
        self.multipliers /= self.multipliers[: self.kept_rounds].sum()

    def _slacks(self) -> Array:
        """Return what slacks stand for at the present point, stacked."""
        v = self.v
        limits = self.limits
        below_level = self.level - self.expansion.value
        unspent = 1 - limits.use @ (1 / v)
        return np.concatenate([below_level, unspent, v - limits.low, limits.high - v])

    def _by_constraint(self, stacked: Array) -> ByConstraint:
        """Return the parts of a stack."""
        rounds = self.rounds
        return ByConstraint(
            rounds=stacked[: self.kept_rounds],
            budgets=stacked[self.kept_rounds : -2 * rounds],
            low=stacked[-2 * rounds : -rounds],
            high=stacked[-rounds:],
        )

    @property
    def gap(self) -> float:
        """Return how far the present point would be from the optimum.

        It is Σ x z, the duality gap of a point without residuals, and goes to 0 along
        the path. It is not a proof: that is what `NoiseIncumbent` derives from the
        point's prices.
        """
        return float(self.slacks @ self.multipliers)

    @property
    def prices(self) -> PathPrices:
        """Return weights of the kept rounds, and prices of the budgets.

        They are the multipliers of F ≤ t and of the budgets over the sum of the former,
        so that the weights have sum 1; any such values give a lower bound.
        """
        multipliers = self._by_constraint(self.multipliers)
        total = multipliers.rounds.sum()
        return PathPrices(multipliers.rounds / total, multipliers.budgets / total)

    def _newton_system(self) -> NoiseNewtonSystem:
        """Return Newton's matrix at the present point, factored."""
        v = self.v
        expansion = self.expansion
        multipliers = self._by_constraint(self.multipliers)
        all_ratios = self.multipliers / self.slacks
        ratio = self._by_constraint(all_ratios)
        slope = expansion.gradient * v
        cost = self.limits.use / v
        level_curvature = ratio.rounds.sum()
        mean_slope = ratio.rounds @ slope / level_curvature

        root_weight = np.sqrt(multipliers.rounds)[:, None, None]
        curvature = expansion.hessian_root * (root_weight * v[:, None])
        curvature = curvature.swapaxes(1, 2).reshape(-1, self.rounds)
        deviation = (slope - mean_slope) * np.sqrt(ratio.rounds)[:, None]
        spending = cost * np.sqrt(ratio.budgets)[:, None]
        H = curvature.T @ curvature + deviation.T @ deviation + spending.T @ spending
        box = v * v * (ratio.low + ratio.high)
        diagonal = slice(None, None, self.rounds + 1)
        H.flat[diagonal] += box + 2 * (multipliers.budgets @ cost)
        scale = 1 / np.sqrt(H.diagonal())
        H *= scale * scale[:, None]
        H.flat[diagonal] += REGULARIZATION
        return NoiseNewtonSystem(
            ratio=all_ratios,
            slope=slope,
            cost=cost,
            level_curvature=level_curvature,
            mean_slope=mean_slope,
            scale=scale,
            factor=cho_factor(H, check_finite=False),
        )

    def _direction(
        self, system: NoiseNewtonSystem, aim: Array | float
    ) -> NoiseDirection:
        """Return the step towards x z = aim.

        Slacks and prices are eliminated. `constant` is the part of the prices after the
        step that does not depend on the step.
        """
        target = aim / self.slacks
        constant = self._by_constraint(target + system.ratio * self.residual)
        of_limits = self.v * (constant.high - constant.low)
        gradient = constant.rounds @ system.slope - constant.budgets @ system.cost
        gradient = gradient + of_limits
        level_gradient = 1 - constant.rounds.sum()
        right = gradient + system.mean_slope * level_gradient
        scaled_step = cho_solve(system.factor, system.scale * right, check_finite=False)
        y = -system.scale * scaled_step
        level_step = level_gradient / system.level_curvature
        level = float(system.mean_slope @ y - level_step)
        change = np.concatenate(
            [level - system.slope @ y, system.cost @ y, self.v * y, -self.v * y]
        )
        slacks = change - self.residual
        return NoiseDirection(
            relative_noise=y,
            level=level,
            slacks=slacks,
            prices=target - self.multipliers - system.ratio * slacks,
        )

    def step(self) -> bool:
        """Move to the next point of the path, by a predictor and a corrector.

        The predictor aims at a gap of zero; how far it could go decides what the
        corrector aims at, which also removes the predictor's second-order error.

        Returns:
            False where rounding leaves no direction; the point is then as before.
        """
        try:
            system = self._newton_system()
        except LinAlgError:
            return False
        predictor = self._direction(system, 0.0)
        length = self._longest_step(predictor)
        centre = self._centre(predictor, length)
        second_order = length * length * predictor.slacks * predictor.prices
        corrector = self._direction(system, centre - second_order)
        largest_fall = np.full(self.rounds, MAX_RELATIVE_STEP - self.min_centering)
        length = BOUNDARY_FRACTION * min(
            self._longest_step(corrector),
            _length_to_zero(largest_fall, corrector.relative_noise),
        )
        if not np.isfinite(length * corrector.relative_noise).all():
            return False
        self.v = self.v * (1 + length * corrector.relative_noise)
        self.level = self.level + length * corrector.level
        self.slacks = self.slacks + length * corrector.slacks
        self.multipliers = self.multipliers + length * corrector.prices
        self.expansion = self.distances.expand(self.v)
        self.residual = self.slacks - self._slacks()
        return True

    def _longest_step(self, direction: NoiseDirection) -> float:
        """Return the longest step, at most 1, that keeps slacks and prices positive."""
        by_slacks = _length_to_zero(self.slacks, direction.slacks)
        by_prices = _length_to_zero(self.multipliers, direction.prices)
        return min(by_slacks, by_prices)

    def _centre(self, predictor: NoiseDirection, length: float) -> float:
        """Return the product x z that the corrector aims at.

        Args:
            predictor: the step towards 0.
            length: how much of it is possible.
        """
        count = self.slacks.size
        mean_product = self.gap / count
        slacks = self.slacks + length * predictor.slacks
        multipliers = self.multipliers + length * predictor.prices
        predicted_product = float(slacks @ multipliers) / count
        # Large residuals must be removed first: prices without products are hard to
        # move.
        residual = float(np.abs(self.residual) @ self.multipliers) / self.gap
        progress = max(predicted_product / mean_product, 0.0) ** 3
        return mean_product * min(1.0, progress + 0.1 * residual + self.min_centering)


def _length_to_zero(x: Array, dx: Array) -> float:
    """Return the longest step, at most 1, that keeps x at or above 0."""
    falls = dx < 0
    return float(np.min(-x[falls] / dx[falls], initial=1.0))
