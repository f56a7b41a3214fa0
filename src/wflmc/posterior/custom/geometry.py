"""Coordinates in which a custom model is nearly round, by its mode and pilot chains.

In the coordinates φ with θ = centre + W φ a posterior with that mean and covariance
W Wᵀ is N(0, I), whatever the scales of its parameters. First W Wᵀ is the inverse
Hessian at a mode; then pilot chains, a simulation on pooled data in which real devices
take no part, replace it by their sample covariance. That search is float64: scales
that differ by a factor of a million leave float32 no digits.

`eigenvalues` and `find_mode` are another, later step: by them a finished posterior, in
whatever coordinates, estimates its mode, μ and L by float32 costs. All of this looks
at the data, and ε does not cover that.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # its parts are imported when used
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Kinetic, PhasePoint
from wflmc.posterior.coordinates import Affine
from wflmc.support import threefry
from wflmc.support.compilation import Compiler

Array = NDArray[np.float64]
Cost = Callable[[jax.Array], jax.Array]
"""−log p of θ[m], a function of JAX."""

MAX_DENSE_DIM = 256
"""Parameters up to which all eigenvalues of the Hessian are computed."""
MAX_GAIN_AT_MODE = 0.01
"""Of `find_mode`: at a mode one more step lowers the cost by no more than this, as some
tenth of a standard deviation away, and what rounding adds."""
COST_PRECISION = 1e-5
"""Relative rounding of a cost in float32, for `find_mode`."""
MAX_SQUARED_GRADIENT = 1e-2
"""Of `laplace`: at a mode the squared norm of the scaled gradient is below this."""
MIN_SCALED_CURVATURE = 1e-9
"""A scaled curvature below this fraction of the largest is rounding."""
MIN_DIAGONAL_CURVATURE = 1e-30
"""Curvatures of single parameters are taken to be at least this."""
SADDLE_TOLERANCE = 1e-3
"""Scaled curvatures may be as negative as that where a density is nearly flat."""
STEEP_RISE = 4.0
"""By how much −log p may rise at one standard deviation from the mode, where a normal
law has 1/2."""
FAR_DISTANCE = 1e6
"""Standard deviations from a mode at which a density that can be normalised has fallen
to less than 1/FAR_DISTANCE of that at the mode."""
INVALID_COST = 1e300
"""Stands for a cost that is not finite, so that a search turns back."""
MODE_SEARCHES = 5
"""Searches for a mode, each in the coordinates of the Hessian where the one before
ended."""
PILOT_CHAINS = 64
"""Chains of the pilot."""
PILOT_ROUNDS = 192
"""Of one run of the pilot."""
KEPT_ROUNDS = PILOT_ROUNDS // 2
"""The last rounds of a run; a program has as many rounds, and runs twice."""
MIN_PASSES = 4
"""Passes of the pilot: each begins with the geometry of the one before, until that
changes no more."""
MAX_PASSES = 24
"""Passes of one run each."""
LONG_PASSES = 12
"""Passes of several runs that follow where `MAX_PASSES` did not settle. A small step
takes chains a short way in one run, and covariances of many parameters then seem to
grow by chance alone."""
RUNS_OF_LONG_PASS = 8
"""Runs of the pilot in each of these passes."""
PILOT_KEY = (0, 0)
"""The words of `jax.random.key(0)`."""
PILOT_DYNAMICS = Kinetic(2.0)
"""Of pilot chains, with the friction 2√μ for μ = 1."""
PILOT_STEP = 0.5
"""h√L of the pilot."""
FIRST_CURVATURE = 2.0
"""L of the first pass of the pilot."""
POWER_STEPS = 16
"""Products by which the largest curvature at a point is estimated."""
EFFECTIVE_DRAWS = 1024
"""Independent draws that a pass of the pilot is worth, roughly: where these are few for
the parameters, their covariance is taken nearer to that of the pass before."""
DRAWS_PER_PARAMETER = 5
"""Draws that count for the covariance of the pass before, for every parameter."""
MAX_GROWTH = 2.5
"""By how much a variance may still grow in the last pass of the pilot: of a proper
posterior it has settled."""
MAX_CURVATURE = 1e3
"""The largest curvature in the pilot's coordinates for which chains of some thousand
rounds explore the posterior."""
MAX_UNEVEN_CURVATURE = 5e3
"""The same where no pass met less, as of scales with heavy tails, and the mode has not
collapsed.

Two horseshoe regressions with offsets had 1.1e3 and 1.2e3, and 6,000 rounds gave means
within 0.05 standard deviations of those of NUTS; with an L of 9e3, 8,000 rounds left
0.11. R-hat shows where chains are too short.
"""
MAX_EXPANSION = 100.0
"""How many times wider than at its mode a posterior may be, by standard deviations.

At the mode of a centred hierarchy a scale is nearly 0 and the density a spike: 1e8
times narrower than the posterior for Neal's funnel and a centred horseshoe. Of a
horseshoe with offsets it is 16 to 28 times narrower, of the eight schools with offsets
4 times.
"""
MAX_DISTANCE = 1e2
"""Standard deviations from the centre at which a pilot chain counts as diverged."""
CLIP_DISTANCE = 6.0
"""Standard deviations from the centre to which draws are put back: one that was thrown
far by a step too long would be most of the covariance."""


class GeometryError(ValueError):
    """No coordinates were found in which a posterior is nearly round.

    Args:
        problem: what is wrong, in words that follow the name of a parameter.
        remedy: what the parameter must be, as the end of "... must be ...".
        direction: the one along which the cost does not rise, the search ran away, or
            chains spread the most, [m].
    """

    def __init__(self, problem: str, remedy: str, direction: Array) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.direction = np.nan_to_num(direction)


class NoModeError(GeometryError):
    """No mode was found.

    Args:
        reason: why, in words that "along it" follow.
        direction: along which the cost falls or does not rise, [m].
    """

    def __init__(self, reason: str, direction: Array) -> None:
        problem = f"has no mode: {reason} along it"
        remedy = (
            "a parameter with a proper posterior: give it a prior, or start elsewhere "
            "(initial=…)"
        )
        super().__init__(problem, remedy, direction)


class UnsettledPilotError(GeometryError):
    """Pilot chains around a mode found no coordinates that suit all of the posterior.

    Args:
        growth: of the largest variance, in the last pass.
        curvature: the largest one that chains met in the last pass.
        expansion: how many times wider than at the mode the pilot found the posterior,
            by standard deviations.
        direction: along which chains spread the most, [m].
    """

    def __init__(
        self, *, growth: float, curvature: float, expansion: float, direction: Array
    ) -> None:
        self.is_collapsed = expansion > MAX_EXPANSION
        remedy = (
            "a parameter with shorter tails, as of HalfNormal in place of HalfCauchy "
            "for all scales"
        )
        if self.is_collapsed:
            problem = (
                f"has a mode {expansion:.1g} times narrower than the posterior, as "
                "where a scale goes to 0"
            )
            remedy = (
                "part of a hierarchy written with offsets, as mean + scale * offset, "
                "or with a scale bounded below"
            )
        elif growth >= MAX_GROWTH:
            problem = (
                "has a mode, but tails whose end pilot chains did not find: a variance "
                f"still grew {growth:.2g}-fold"
            )
        else:
            problem = (
                "has a mode, but tails too uneven for one step size: pilot chains met "
                f"curvatures of {curvature:.1g}"
            )
        super().__init__(problem, remedy, direction)


class Derivatives:
    """The derivatives of a cost by which a mode is found."""

    def __init__(self, compiler: Compiler, cost: Cost, dim: int) -> None:
        """Have the programs compiled.

        Args:
            compiler: of the programs.
            cost: −log p of θ[m].
            dim: m.
        """
        theta = np.zeros(dim)
        self.dim = dim
        self._value_and_gradient = compiler.start(jax.value_and_grad(cost), theta)
        self._product = compiler.start(partial(_product, cost), theta, theta)

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """Compute the cost and its gradient, in float64.

        Waits until the program is compiled. Either may be nan or infinite, where the
        density has no finite logarithm.

        Args:
            theta: θ[m].

        Returns:
            The cost, and its gradient [m].
        """
        value, gradient = self._value_and_gradient(theta)
        return float(value), np.asarray(gradient)

    def value(self, theta: Array) -> float:
        """Compute the cost alone, in float64.

        It runs the program of `value_and_gradient`, so that no other one has to be
        compiled.

        Args:
            theta: θ[m].
        """
        value, _ = self.value_and_gradient(theta)
        return value

    def hessian(self, theta: Array) -> Array:
        """Compute the Hessian of the cost, column by column, in float64.

        Every column is a product with a unit vector, by one call of a program each. It
        is not made symmetric: columns differ from rows by rounding.

        Args:
            theta: θ[m].

        Returns:
            [m, m].
        """
        columns = [self._product(theta, direction) for direction in np.eye(self.dim)]
        return np.stack(columns)


class PilotChains:
    """Chains of kinetic Langevin steps on a cost."""

    def __init__(self, compiler: Compiler, cost: Cost, dim: int) -> None:
        """Have the programs compiled.

        Args:
            compiler: of the programs.
            cost: −log p of θ[m].
            dim: m.
        """
        affine = Affine(np.zeros(dim), np.eye(dim))
        points = np.zeros((PILOT_CHAINS, dim))
        state = PhasePoint(points, points)
        normals = np.zeros((KEPT_ROUNDS, PILOT_CHAINS, dim))
        self._rounds = compiler.start(
            partial(_rounds, cost), affine, state, normals, PILOT_STEP, 1.0
        )
        self._power_method = compiler.start(
            partial(_power_method, cost), affine, points, points
        )

    def move(
        self,
        affine: Affine,
        point: PhasePoint[Array],
        *,
        normals: Array,
        step_size: float,
    ) -> tuple[PhasePoint[Array], Array]:
        """Move chains by half a run of kinetic Langevin steps, without rejections.

        Chains may diverge where the step is too long: positions are then infinite or
        nan.

        Args:
            affine: the coordinates that they move in.
            point: where they are, [chain, m] each.
            normals: draws of N(0, 1), [KEPT_ROUNDS, chain, m].
            step_size: h.

        Returns:
            Where chains are afterwards, and all their positions,
            [KEPT_ROUNDS, chain, m].
        """
        noise_std = PILOT_DYNAMICS.langevin_noise(step_size) ** 0.5
        results = self._rounds(affine, point, normals, step_size, noise_std)
        last, positions = jax.tree.map(np.asarray, results)
        return last, positions

    def largest_curvature(self, affine: Affine, phi: Array, directions: Array) -> float:
        """Estimate the largest curvature at some points, by the power method.

        Args:
            affine: the coordinates of the points, and of curvatures.
            phi: points [chain, m].
            directions: to begin with, [chain, m].

        Returns:
            The largest of all points, from below; nan or infinite where a chain has
            diverged.
        """
        products = self._power_method(affine, phi, directions)
        # Of chains that have diverged, norms overflow.
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.max(np.linalg.norm(products, axis=-1)))


def _product(cost: Cost, theta: jax.Array, direction: jax.Array) -> jax.Array:
    """Return the product of the Hessian at θ[m] with a direction[m]."""
    return jax.jvp(jax.grad(cost), (theta,), (direction,))[1]


def _gradient_in(cost: Cost, affine: Affine) -> Callable[[jax.Array], jax.Array]:
    """Return the gradient of a cost as a function of coordinates φ[m]."""

    def cost_of_coordinates(phi: jax.Array) -> jax.Array:
        return cost(affine.parameters(phi))

    return jax.grad(cost_of_coordinates)


def _power_method(
    cost: Cost,
    affine: Affine,
    phi: jax.Array,
    directions: jax.Array,
) -> jax.Array:
    """Return directions[chain, m] after products with the Hessian at φ[chain, m]."""
    gradient = _gradient_in(cost, affine)

    def of_chain(point: jax.Array, direction: jax.Array) -> jax.Array:
        def product(_: int, vector: jax.Array) -> jax.Array:
            unit_vector = vector / jnp.linalg.norm(vector)
            return jax.jvp(gradient, (point,), (unit_vector,))[1]

        return jax.lax.fori_loop(0, POWER_STEPS, product, direction)

    return jax.vmap(of_chain)(phi, directions)


def _rounds(
    cost: Cost,
    affine: Affine,
    point: PhasePoint[jax.Array],
    normals: jax.Array,
    step_size: float,
    noise_std: float,
) -> tuple[PhasePoint[jax.Array], jax.Array]:
    """Return where chains are after some rounds, and all their positions."""
    gradient_at = _gradient_in(cost, affine)

    def advance(
        state: PhasePoint[jax.Array], draws: jax.Array
    ) -> tuple[PhasePoint[jax.Array], jax.Array]:
        position = PILOT_DYNAMICS.gradient_position(state, step_size)
        gradient = jax.vmap(gradient_at)(position)
        next_state = PILOT_DYNAMICS.step(
            state,
            gradient,
            noise=noise_std * draws,
            step_size=step_size,
            scale=1.0,
            gain=1.0,
        )
        return next_state, next_state.position

    return jax.lax.scan(advance, point, normals)


class CoordinateSearch:
    """The search for coordinates, whose programs are compiled from its beginning on.

    All of it is to be done in float64.
    """

    def __init__(
        self, compiler: Compiler, cost: Cost, dim: int, *, by_pilot: bool
    ) -> None:
        """Have the programs compiled.

        Args:
            compiler: of the programs.
            cost: −log p of θ[m].
            dim: m.
            by_pilot: whether pilot chains refine what is found at a mode.
        """
        traced_once = jax.jit(cost)
        self._derivatives = Derivatives(compiler, traced_once, dim)
        self._chains = PilotChains(compiler, traced_once, dim) if by_pilot else None

    def find(self, start: Array, moves_first: Array) -> tuple[Affine, float]:
        """Find the coordinates, and the largest curvature in them.

        By the Hessian at a mode; then by pilot chains, where these were asked for.

        Args:
            start: of the search for a mode, [m].
            moves_first: as of `laplace`.

        Returns:
            The coordinates, in which μ is about 1, and L: 1 at a mode, or the largest
            curvature that pilot chains met.

        Raises:
            GeometryError: as of `laplace` and `refine`.
        """
        at_mode = laplace(self._derivatives, start, moves_first)
        if self._chains is None:
            return at_mode, 1.0
        return refine(self._chains, at_mode)


def laplace(derivatives: Derivatives, start: Array, moves_first: Array) -> Affine:
    """Return coordinates by the Hessian at a mode.

    The mode is searched for several times, each time in the coordinates of the Hessian
    where the last search ended. Where the cost is far from quadratic, standard
    deviations are shortened until it rises by no more than 4 along each.

    Args:
        derivatives: of −log p.
        start: of the search, [m].
        moves_first: 1 for parameters that the first search moves, 0 for positive
            scales, [m]. These stay where they start until the others are fitted, as
            they would run away before; the later searches move all.

    Returns:
        The mode as centre, and a matrix W with W Wᵀ about the inverse Hessian.

    Raises:
        NoModeError: where the cost falls without end, or does not rise in some
            direction.
    """
    previous = start
    theta = start + moves_first * _search(derivatives, start, np.diag(moves_first))
    for _ in range(MODE_SEARCHES):
        hessian = derivatives.hessian(theta)
        if not np.all(np.isfinite(hessian)):
            reason = "the Hessian is nan or infinite where the search for one ended,"
            raise NoModeError(reason, theta - previous)
        values, matrix = _newton_coordinates(hessian)
        previous = theta
        theta = theta + matrix @ _search(derivatives, theta, matrix)
    value, gradient = _cost_in(derivatives, np.zeros(start.size), theta, matrix)
    if not gradient @ gradient < MAX_SQUARED_GRADIENT:
        reason = "−log p still falls where the search for one ended,"
        raise NoModeError(reason, theta - previous)
    if values[0] < -SADDLE_TOLERANCE:
        reason = "−log p curves downwards where the search for one ended,"
        raise NoModeError(reason, matrix[:, 0])
    for step in matrix.T:
        _shorten_steep_step(derivatives, theta, step, value)
    _check_rise(derivatives, theta, matrix, value)
    return Affine(theta, matrix)


def _cost_in(
    derivatives: Derivatives, phi: Array, centre: Array, matrix: Array
) -> tuple[float, Array]:
    """Return the cost at θ = centre + W φ and its gradient in φ[m].

    Where one of them is not finite, the cost is very high and its gradient zero.
    """
    value, gradient = derivatives.value_and_gradient(centre + matrix @ phi)
    if np.isfinite(value) and np.all(np.isfinite(gradient)):
        return value, gradient @ matrix
    return INVALID_COST, np.zeros(phi.size)


def _search(derivatives: Derivatives, centre: Array, matrix: Array) -> Array:
    """Return φ[m] at which the cost of centre + W φ is least, searched for from 0."""

    def cost(phi: Array) -> tuple[float, Array]:
        return _cost_in(derivatives, phi, centre, matrix)

    result = scipy.optimize.minimize(
        cost,
        np.zeros(centre.size),
        method="L-BFGS-B",
        jac=True,
        options={"maxiter": 300},
    )
    return np.asarray(result.x)


def _newton_coordinates(hessian: Array) -> tuple[Array, Array]:
    """Return scaled curvatures, ascending, and the matrix of coordinates by them.

    Scaled so that every parameter's own curvature is 1. Negative curvatures count by
    their absolute value: a gradient step in these coordinates is Newton's step with
    their sign mended, which leaves saddle points behind.
    """
    diagonal = np.abs(np.diag(hessian))
    scale = np.maximum(diagonal, MIN_DIAGONAL_CURVATURE) ** -0.5
    values, vectors = np.linalg.eigh(hessian * np.outer(scale, scale))
    curvatures = np.abs(values)
    smallest = MIN_SCALED_CURVATURE * curvatures.max()
    roots = np.sqrt(np.maximum(curvatures, smallest))
    return values, scale[:, None] * vectors / roots


def _shorten_steep_step(
    derivatives: Derivatives, mode: Array, step: Array, value: float
) -> None:
    """Halve a step[m] in place until the cost rises moderately on both of its sides."""

    def rises_moderately() -> bool:
        costs = [derivatives.value(mode + sign * step) for sign in (-1, 1)]
        return max(costs) < value + STEEP_RISE

    while not rises_moderately():
        step /= 2


def _check_rise(
    derivatives: Derivatives, mode: Array, matrix: Array, value: float
) -> None:
    """Refuse a cost that hardly rises far away from the mode, whose value is given."""
    steps = np.concatenate([matrix.T, -matrix.T])
    costs = [derivatives.value(mode + FAR_DISTANCE * step) for step in steps]
    rise = np.nan_to_num([cost - value for cost in costs], nan=np.inf)
    if rise.min() < np.log(FAR_DISTANCE):
        raise NoModeError("−log p does not rise", steps[rise.argmin()])


def refine(chains: PilotChains, affine: Affine) -> tuple[Affine, float]:
    """Return coordinates by the mean and covariance of pilot chains.

    Where energies grow until chains diverge, they begin again nearer to the centre with
    half the step. Where every pass meets curvatures above `MAX_CURVATURE`, as of scales
    with heavy tails, the pass with the smallest is taken, up to `MAX_UNEVEN_CURVATURE`;
    not where the mode has collapsed, from where chains may seem to settle before they
    reach the posterior.

    Args:
        chains: on −log p.
        affine: the coordinates by the Hessian at a mode.

    Returns:
        The coordinates, and the largest curvature that chains met in them.

    Raises:
        UnsettledPilotError: where a variance still grows in the last pass, as of an
            improper posterior, or where curvatures differ too much for one step size.
    """
    dim = affine.centre.size
    at_mode = affine
    first_key = threefry.split(PILOT_KEY, MAX_PASSES + 1)[:1]
    phi = threefry.normals(first_key, (PILOT_CHAINS, dim))[0]
    curvature = FIRST_CURVATURE
    settled_passes = 0
    growth = np.inf
    widest = np.eye(dim)[:, -1]
    best_uneven = (affine, MAX_UNEVEN_CURVATURE)
    for keys in _pass_keys():
        step_size = PILOT_STEP / curvature**0.5
        draws, largest = _simulate(chains, affine, phi, step_size=step_size, keys=keys)
        if not np.all(np.abs(draws) < MAX_DISTANCE) or not np.isfinite(largest):
            phi = phi / 2
            curvature = 4 * curvature
            continue
        draws = np.clip(draws, -CLIP_DISTANCE, CLIP_DISTANCE)
        centre = draws.mean((0, 1))
        root = _covariance_root(draws)
        phi = np.linalg.solve(root, (draws[-1] - centre).T).T
        curvature = max(1.0, largest)
        settled_passes += 1
        variances, directions = np.linalg.eigh(root @ root.T)
        growth = float(variances[-1])
        widest = directions[:, -1]
        affine = Affine(affine.parameters(centre), affine.matrix @ root)
        if settled_passes < MIN_PASSES or not growth < MAX_GROWTH:
            continue
        if curvature < MAX_CURVATURE:
            return affine, curvature
        if curvature < best_uneven[1]:
            best_uneven = (affine, curvature)
    expansion = _expansion(at_mode, affine)
    if best_uneven[1] < MAX_UNEVEN_CURVATURE and expansion <= MAX_EXPANSION:
        return best_uneven
    raise UnsettledPilotError(
        growth=growth,
        curvature=curvature,
        expansion=expansion,
        direction=affine.matrix @ widest,
    )


def _pass_keys() -> Iterator[threefry.WordPairs]:
    """Yield the keys of every pass of the pilot, one for each of its runs, [run, 2]."""
    single_keys = threefry.split(PILOT_KEY, MAX_PASSES + 1)[1:]
    for key in single_keys:
        yield key[None]
    long_key = threefry.fold_in(PILOT_KEY, 1)
    long_keys = threefry.split(long_key, LONG_PASSES * RUNS_OF_LONG_PASS)
    yield from long_keys.reshape(LONG_PASSES, RUNS_OF_LONG_PASS, 2)


def _covariance_root(draws: Array) -> Array:
    """Return a Cholesky factor of the covariance of draws[draw, chain, m], [m, m].

    With many parameters it is taken nearer to I, that of the pass before.
    """
    dim = draws.shape[-1]
    prior_draws = DRAWS_PER_PARAMETER * dim
    weight = EFFECTIVE_DRAWS / (EFFECTIVE_DRAWS + prior_draws)
    rows = draws.reshape(-1, dim)
    covariance = np.atleast_2d(np.cov(rows.T))
    shrunk = weight * covariance + (1 - weight) * np.eye(dim)
    return np.linalg.cholesky(shrunk)


def _simulate(
    chains: PilotChains,
    affine: Affine,
    phi: Array,
    *,
    step_size: float,
    keys: Iterable[ArrayLike],
) -> tuple[Array, float]:
    """Simulate runs that follow one another.

    Args:
        chains: that are moved.
        affine: the coordinates that they move in.
        phi: where they begin, [chain, m].
        step_size: h.
        keys: one for every run.

    Returns:
        Draws [draw, chain, m], and the largest curvature that chains met; nan or
        infinite where one has diverged.
    """
    draws = []
    curvatures = []
    for key in keys:
        run_keys = threefry.split(key, PILOT_ROUNDS + 1)
        velocity = threefry.normals(run_keys[:1], phi.shape)[0]
        point = PhasePoint(phi, velocity)
        for round_keys in np.split(run_keys[1:], PILOT_ROUNDS // KEPT_ROUNDS):
            normals = threefry.normals(round_keys, phi.shape)
            point, positions = chains.move(
                affine, point, normals=normals, step_size=step_size
            )
        draws.append(positions)
        phi = positions[-1]
        curvatures.append(chains.largest_curvature(affine, phi, velocity))
    return np.concatenate(draws), float(np.max(curvatures))


def _expansion(before: Affine, after: Affine) -> float:
    """Return by how much standard deviations grew, where they grew the most."""
    relative = np.linalg.solve(before.matrix, after.matrix)
    return float(np.linalg.norm(relative, 2))


def eigenvalues(product: Callable[[Array], Array], dim: int) -> Array:
    """Compute eigenvalues of a symmetric matrix by its products with vectors.

    All of a small one; of a large one the smallest and the largest, to 0.1 % by
    Lanczos' method.

    Args:
        product: H v for v[m].
        dim: m.

    Returns:
        [m] ascending, or [2] for more than `MAX_DENSE_DIM` parameters; nan where
        Lanczos' method does not converge.
    """
    if dim <= MAX_DENSE_DIM:
        matrix = np.stack([product(row) for row in np.eye(dim)])
        return np.asarray(np.linalg.eigvalsh((matrix + matrix.T) / 2))
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    def flat_product(vector: Array) -> Array:
        return product(np.ravel(vector))

    operator = LinearOperator((dim, dim), matvec=flat_product, dtype=float)
    start = np.random.default_rng(0).standard_normal(dim)
    ends = np.full(2, np.nan)
    for index, end in enumerate(("SA", "LA")):
        with suppress(ArpackNoConvergence):
            ends[index] = eigsh(
                operator,
                1,
                which=end,
                v0=start,
                tol=1e-3,
                maxiter=100,
                return_eigenvectors=False,
            )[0]
    return ends


def find_mode(
    cost: Callable[[Array], tuple[float, Array]],
    product: Callable[[Array, Array], Array],
    start: Array,
    steps: int = 500,
) -> tuple[Array, str]:
    """Find the mode of a finished posterior, for `CustomPosterior.laplace`.

    It is not the mode that coordinates are made of, which `laplace` finds in float64:
    the cost may be float32 here. The search counts as successful where one more step
    along the gradient would lower the cost by 0.01 at most, plus 1e-5 of the cost,
    which float32 cannot tell apart. What the optimiser itself reports does not count:
    it ends "abnormally" where float32 has no lower value to offer.

    Args:
        cost: its value and gradient at φ[m], the coordinates that chains move in.
        product: the Hessian at φ[m] times v[m].
        start: of the search, [m].
        steps: the most iterations.

    Returns:
        Where the search ended, [m]; and why that is no mode, or an empty text.
    """
    result = scipy.optimize.minimize(
        cost,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": steps, "maxcor": 30},
    )
    mode = np.asarray(result.x, dtype=float)
    value, gradient = cost(mode)
    gain = _gain(gradient, product(mode, gradient))
    if gain <= MAX_GAIN_AT_MODE + COST_PRECISION * abs(value):
        return mode, ""
    norm = np.linalg.norm(gradient)
    return mode, f"the search stopped where the gradient's norm is still {norm:.3g}"


def _gain(gradient: Array, product: Array) -> float:
    """Return by how much a step along the gradient would lower a quadratic cost.

    Args:
        gradient: g[m].
        product: the Hessian times g, [m].

    Returns:
        ‖g‖⁴/(2|gᵀHg|); 0 where the gradient is zero, else nan where the curvature is.
    """
    square = float(gradient @ gradient)
    curvature = abs(float(gradient @ product))
    if curvature > 0:
        return square**2 / (2 * curvature)
    return 0.0 if square == 0 else np.nan
