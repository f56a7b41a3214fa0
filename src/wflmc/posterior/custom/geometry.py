r"""Coordinates in which a model of one's own is nearly round: by its mode and Hessian there, then by pilot chains.

In the coordinates φ with θ = centre + W φ a posterior with that mean and covariance W Wᵀ is N(0, I), whatever the
scales of its parameters. First W Wᵀ is the inverse Hessian at a mode; then pilot chains, a simulation on pooled data
in which real devices take no part, replace it by their sample covariance. Everything here is float64: scales that
differ by a factor of a million leave float32 no digits. All of it looks at the data it is given, and ε does not cover
that.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # its parts are imported when used
from numpy.typing import NDArray

from wflmc.dynamics import Kinetic, PhasePoint
from wflmc.posterior.coordinates import Affine
from wflmc.support import threefry
from wflmc.support.compilation import Compiler

Array = NDArray[np.float64]
Cost = Callable[[jax.Array], jax.Array]
"""−log p of θ[m], a function of JAX."""

DENSE = 256
"""Up to so many parameters all eigenvalues are worked out."""
SETTLED, PRECISION = 0.01, 1e-5
"""At a mode one more step lowers the cost by no more: 0.01 is a tenth of a standard deviation away; and rounding."""
FLAT = 1e-9
"""Of the largest: a scaled curvature below it is rounding."""
SADDLE = 1e-3
"""Scaled curvatures may be as negative as that where a density is nearly flat."""
STEEP = 4.0
"""By how much −log p may rise at one standard deviation from the mode, where a normal law has 1/2."""
AWAY = 1e6
"""Standard deviations from a mode at which a density that can be normalised has fallen by more than 1/AWAY."""
SEARCHES = 5
"""For a mode, each in the coordinates of the Hessian where the one before ended."""
CHAINS, ROUNDS = 64, 192
KEPT_ROUNDS = ROUNDS // 2
"""Of a pilot's run, the last ones; a program has as many rounds, and runs twice."""
PASSES, MOST_PASSES = 4, 24
"""Of the pilot: each begins with the geometry of the one before, until that changes no more."""
LONG_PASSES, LONG_PASS_RUNS = 12, 8
"""Passes that follow where that many did not settle, and how many times as long each is. A small step takes chains a
short way in one pass, and covariances of many parameters then seem to grow by chance alone."""
PILOT_KEY = (0, 0)
"""The words of `jax.random.key(0)`."""
MOTION = Kinetic(2.0)
"""Of pilot chains, with the friction 2√μ for μ = 1."""
STEP, GUESS = 0.5, 2.0
"""h√L of the pilot, and L of its first pass."""
POWER_STEPS = 16
"""Products by which the largest curvature at a point is estimated."""
EFFECTIVE = 1024
"""Independent draws that a pass of the pilot is worth, roughly: with few of them the covariance of many parameters is
taken nearer to that of the pass before."""
GROWN = 2.5
"""By how much a variance may still grow in the last pass of the pilot: of a proper posterior it has settled."""
STIFF = 1e3
"""The largest curvature in the pilot's coordinates for which chains of some thousand rounds explore the posterior."""
UNEVEN = 5e3
"""The same where no pass met less, as of scales with heavy tails, and the mode has not collapsed.

Two horseshoe regressions with offsets had 1.1e3 and 1.2e3, and 6,000 rounds gave means
within 0.05 standard deviations of those of NUTS; with an L of 9e3, 8,000 rounds left 0.11.
R-hat tells where chains are too short.
"""
COLLAPSED = 100.0
"""How many times wider than at its mode a posterior may be, by standard deviations.

At the mode of a centred hierarchy a scale is nearly 0 and the density a spike: 1e8 times
narrower than the posterior for Neal's funnel and a centred horseshoe. Of a horseshoe with
offsets it is 16 to 28 times narrower, of the eight schools with offsets 4 times.
"""
LOST, OUTER = 1e2, 6.0
"""Standard deviations from the centre at which a pilot chain counts as lost, and to which it is put back: one that was
thrown far by a step too long would be most of the covariance."""


class GeometryError(ValueError):
    """No coordinates were found in which a posterior is nearly round.

    Args:
        problem: what is wrong, in words that follow the name of a parameter.
        remedy: what the parameter must be, as the end of the sentence "... must be ...".
        direction: the one along which the cost does not rise, the search ran away, or chains spread the most, [m].
    """

    def __init__(self, problem: str, remedy: str, direction: Array) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.direction = np.nan_to_num(direction)


class NoModeError(GeometryError):
    """No mode was found."""

    def __init__(self, reason: str, direction: Array) -> None:
        remedy = "a parameter with a proper posterior: give it a prior, or start elsewhere (initial=…)"
        super().__init__(f"has no mode: {reason} along it", remedy, direction)


class UnsettledPilotError(GeometryError):
    """There is a mode, but pilot chains around it found no coordinates that suit all of the posterior.

    Args:
        growth: of the largest variance, in the last pass.
        curvature: the largest one that chains met in the last pass.
        expansion: how many times wider than at the mode the pilot found the posterior, by standard deviations.
        direction: along which chains spread the most, [m].
    """

    def __init__(
        self, *, growth: float, curvature: float, expansion: float, direction: Array
    ) -> None:
        self.is_collapsed = expansion > COLLAPSED
        remedy = "a parameter with shorter tails, as of HalfNormal in place of HalfCauchy for all scales"
        if self.is_collapsed:
            problem = f"has a mode {expansion:.1g} times narrower than the posterior, as where a scale goes to 0"
            remedy = "part of a hierarchy written with offsets, as mean + scale * offset, or with a scale bounded below"
        elif growth >= GROWN:
            problem = "has a mode, but tails whose end pilot chains did not find"
            problem += f": a variance still grew {growth:.2g}-fold"
        else:
            problem = "has a mode, but tails too uneven for one step size"
            problem += f": pilot chains met curvatures of {curvature:.1g}"
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
        """Return the cost and its gradient at θ[m]."""
        value, gradient = self._value_and_gradient(theta)
        return float(value), np.asarray(gradient)

    def value(self, theta: Array) -> float:
        """Return the cost at θ[m]."""
        return self.value_and_gradient(theta)[0]

    def hessian(self, theta: Array) -> Array:
        """Return the Hessian at θ[m], [m, m]."""
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
        points = np.zeros((CHAINS, dim))
        state = PhasePoint(points, points)
        normals = np.zeros((KEPT_ROUNDS, CHAINS, dim))
        self._rounds = compiler.start(
            partial(_rounds, cost), affine, state, normals, STEP, 1.0
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
        """Move chains by some rounds.

        Args:
            affine: the coordinates that they move in.
            point: where they are, [chain, m] each.
            normals: draws of N(0, 1), [KEPT_ROUNDS, chain, m].
            step_size: h.

        Returns:
            Where chains are afterwards, and all their positions, [KEPT_ROUNDS, chain, m].
        """
        noise_std = MOTION.langevin_noise(step_size) ** 0.5
        results = self._rounds(affine, point, normals, step_size, noise_std)
        last, positions = jax.tree.map(np.asarray, results)
        return last, positions

    def largest_curvature(self, affine: Affine, phi: Array, directions: Array) -> float:
        """Return the largest curvature at some points, by the power method.

        Args:
            affine: the coordinates of the points, and of curvatures.
            phi: points [chain, m].
            directions: to begin with, [chain, m].
        """
        products = self._power_method(affine, phi, directions)
        with np.errstate(over="ignore", invalid="ignore"):  # of chains that are lost
            return float(np.max(np.linalg.norm(products, axis=-1)))


def _product(cost: Cost, theta: jax.Array, direction: jax.Array) -> jax.Array:
    """Return the product of the Hessian at θ[m] with a direction[m]."""
    return jax.jvp(jax.grad(cost), (theta,), (direction,))[1]


def _power_method(
    cost: Cost,
    affine: Affine,
    phi: jax.Array,
    directions: jax.Array,
) -> jax.Array:
    """Return directions[chain, m] after some products with the Hessian at φ[chain, m]."""
    slope = jax.grad(lambda at: cost(affine.parameters(at)))

    def repeated(at: jax.Array, direction: jax.Array) -> jax.Array:
        def product(_: int, v: jax.Array) -> jax.Array:
            return jax.jvp(slope, (at,), (v / jnp.linalg.norm(v),))[1]

        return jax.lax.fori_loop(0, POWER_STEPS, product, direction)

    return jax.vmap(repeated)(phi, directions)


def _rounds(
    cost: Cost,
    affine: Affine,
    point: PhasePoint[jax.Array],
    normals: jax.Array,
    step_size: float,
    noise_std: float,
) -> tuple[PhasePoint[jax.Array], jax.Array]:
    """Return where chains are after some rounds, and all their positions."""
    slope = jax.grad(lambda at: cost(affine.parameters(at)))

    def body(
        state: PhasePoint[jax.Array], draws: jax.Array
    ) -> tuple[PhasePoint[jax.Array], jax.Array]:
        gradient = jax.vmap(slope)(MOTION.gradient_position(state, step_size))
        moved = MOTION.step(
            state,
            gradient,
            noise=noise_std * draws,
            step_size=step_size,
            scale=1.0,
            gain=1.0,
        )
        return moved, moved.position

    return jax.lax.scan(body, point, normals)


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

    def find(self, start: Array, free: Array) -> tuple[Affine, float]:
        """Return coordinates, and the largest curvature in them.

        Args:
            start: of the search for a mode, [m].
            free: as of `laplace`.

        Raises:
            GeometryError: as of `laplace` and `refine`.
        """
        at_mode = laplace(self._derivatives, start, free)
        return (at_mode, 1.0) if self._chains is None else refine(self._chains, at_mode)


def laplace(derivatives: Derivatives, start: Array, free: Array) -> Affine:
    """Return coordinates by the Hessian at a mode.

    Args:
        derivatives: of −log p.
        start: of the search, [m].
        free: 0 for parameters that are scales, else 1, [m]: scales follow when all others are fitted, or would run
            away.

    Raises:
        NoModeError: where the cost falls without end, or does not rise in some direction.
    """

    def moved(phi: Array, centre: Array, matrix: Array) -> tuple[float, Array]:
        value, gradient = derivatives.value_and_gradient(centre + matrix @ phi)
        good = np.isfinite(value) and np.all(np.isfinite(gradient))
        return (value, gradient @ matrix) if good else (1e300, np.zeros(start.size))

    zero, search = (
        0 * start,
        partial(
            scipy.optimize.minimize,
            method="L-BFGS-B",
            jac=True,
            options={"maxiter": 300},
        ),
    )
    before, theta = start, start + free * search(moved, zero, (start, np.diag(free))).x
    for _ in range(SEARCHES):
        hessian = derivatives.hessian(theta)
        if not np.all(np.isfinite(hessian)):
            break
        # As after Newton's step with the sign of every curvature mended, which leaves saddle points behind.
        scale = np.maximum(np.abs(np.diag(hessian)), 1e-30) ** -0.5
        values, vectors = np.linalg.eigh(hessian * np.outer(scale, scale))
        matrix = (
            scale[:, None]
            * vectors
            / np.sqrt(np.maximum(np.abs(values), FLAT * np.abs(values).max()))
        )
        before, theta = theta, theta + matrix @ search(moved, zero, (theta, matrix)).x
    if not np.all(np.isfinite(hessian)):
        raise NoModeError(
            "the Hessian is nan or infinite where the search for one ended,",
            theta - before,
        )
    value, pull = moved(zero, theta, matrix)
    if not pull @ pull < 1e-2:
        raise NoModeError(
            "−log p still falls where the search for one ended,", theta - before
        )
    if values[0] < -SADDLE:
        raise NoModeError(
            "−log p curves downwards where the search for one ended,", matrix[:, 0]
        )
    for step in (
        matrix.T
    ):  # where the cost is far from quadratic, a standard deviation is shorter
        while (
            not max(derivatives.value(theta + sign * step) for sign in (-1, 1))
            < value + STEEP
        ):
            step /= 2
    steps = np.concatenate([matrix.T, -matrix.T])
    rise = np.nan_to_num(
        [derivatives.value(theta + AWAY * step) - value for step in steps], nan=np.inf
    )
    if rise.min() < np.log(AWAY):
        raise NoModeError("−log p does not rise", steps[rise.argmin()])
    return Affine(theta, matrix)


def refine(chains: PilotChains, affine: Affine) -> tuple[Affine, float]:
    """Return coordinates by the mean and covariance of pilot chains, and the largest curvature that they met.

    Where energies grow until chains are lost, they begin again nearer to the centre with half the step. Where every
    pass meets curvatures above `STIFF`, as of scales with heavy tails, the pass with the smallest is taken, up to
    `UNEVEN`; not where the mode has collapsed, from where chains may seem to settle before they reach the posterior.

    Args:
        chains: on −log p.
        affine: the coordinates by the Hessian at a mode.

    Raises:
        UnsettledPilotError: where a variance still grows in the last pass, as of an improper posterior, or where
            curvatures differ too much for one step size.
    """
    dim = affine.centre.size
    at_mode = affine
    first, *keys = threefry.split(PILOT_KEY, MOST_PASSES + 1)
    long_keys = threefry.split(
        threefry.fold_in(PILOT_KEY, 1), LONG_PASSES * LONG_PASS_RUNS
    )
    phi = threefry.normals(first[None], (CHAINS, dim))[0]
    curvature = GUESS
    settled = 0
    growth, vectors = np.full(dim, np.inf), np.eye(dim)
    weight = EFFECTIVE / (EFFECTIVE + 5 * dim)
    uneven: tuple[Affine, float] = affine, UNEVEN
    for pass_keys in [
        *([key] for key in keys),
        *long_keys.reshape(LONG_PASSES, LONG_PASS_RUNS, 2),
    ]:
        draws, largest = _simulate(
            chains, affine, phi, step_size=STEP / curvature**0.5, keys=pass_keys
        )
        if not np.all(np.abs(draws) < LOST) or not np.isfinite(largest):
            phi, curvature = phi / 2, 4 * curvature
            continue
        draws = np.clip(draws, -OUTER, OUTER)
        centre = draws.mean((0, 1))
        covariance = np.atleast_2d(np.cov(draws.reshape(-1, dim).T))
        root = np.linalg.cholesky(weight * covariance + (1 - weight) * np.eye(dim))
        phi = np.linalg.solve(root, (draws[-1] - centre).T).T
        curvature = max(1.0, largest)
        settled += 1
        growth, vectors = np.linalg.eigh(root @ root.T)
        affine = Affine(affine.parameters(centre), affine.matrix @ root)
        if settled >= PASSES and growth[-1] < GROWN:
            if curvature < STIFF:
                return affine, curvature
            if curvature < uneven[1]:
                uneven = affine, curvature
    expansion = _expansion(at_mode, affine)
    if uneven[1] < UNEVEN and expansion <= COLLAPSED:
        return uneven
    raise UnsettledPilotError(
        growth=float(growth[-1]),
        curvature=curvature,
        expansion=expansion,
        direction=affine.matrix @ vectors[:, -1],
    )


def _simulate(
    chains: PilotChains,
    affine: Affine,
    phi: Array,
    *,
    step_size: float,
    keys: Iterable[threefry.Words],
) -> tuple[Array, float]:
    """Return draws of runs that follow one another, [draw, chain, m], and the largest curvature that they met.

    Args:
        phi: where chains begin, [chain, m].
        step_size: h.
        keys: one for every run.
    """
    draws = []
    curvatures = []
    for key in keys:
        run_keys = threefry.split(key, ROUNDS + 1)
        velocity = threefry.normals(run_keys[:1], phi.shape)[0]
        point = PhasePoint(phi, velocity)
        for round_keys in np.split(run_keys[1:], ROUNDS // KEPT_ROUNDS):
            normals = threefry.normals(round_keys, phi.shape)
            point, positions = chains.move(
                affine, point, normals=normals, step_size=step_size
            )
        draws.append(positions)
        phi = positions[-1]
        curvatures.append(chains.largest_curvature(affine, phi, velocity))
    return np.concatenate(draws), max(
        curvatures, key=lambda value: value if np.isfinite(value) else np.inf
    )


def _expansion(before: Affine, after: Affine) -> float:
    """Return by how much standard deviations grew from some coordinates to others, where they grew the most."""
    relative = np.linalg.solve(before.matrix, after.matrix)
    return float(np.linalg.norm(relative, 2))


def eigenvalues(product: Callable[[Array], Array], dim: int) -> Array:
    """Return all eigenvalues of a symmetric matrix, ascending; of a large one the smallest and the largest by Lanczos.

    Args:
        product: H v for v[m].

    Returns:
        [m], or [2] for more than `DENSE` parameters; nan where Lanczos does not converge.
    """
    if dim <= DENSE:
        matrix = np.stack([product(row) for row in np.eye(dim)])
        return np.asarray(np.linalg.eigvalsh((matrix + matrix.T) / 2))
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    whole = LinearOperator(
        (dim, dim), matvec=lambda v: product(np.ravel(v)), dtype=float
    )
    start = np.random.default_rng(0).standard_normal(dim)
    ends = np.full(2, np.nan)
    for number, which in enumerate(("SA", "LA")):
        with suppress(ArpackNoConvergence):
            ends[number] = eigsh(
                whole,
                1,
                which=which,
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
    """Return where a cost is least, from `start`: [m]; and, where none was found, why.

    Args:
        cost: its value and gradient at θ[m].
        product: the Hessian at θ[m] times v[m].
    """
    best = scipy.optimize.minimize(
        cost,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": steps, "maxcor": 30},
    )
    mode = np.asarray(best.x, dtype=float)
    value, gradient = cost(mode)
    # The optimiser's own word is no measure: it ends "abnormally" where float32 has no lower value to offer.
    if _gain(gradient, product(mode, gradient)) <= SETTLED + PRECISION * abs(value):
        return mode, ""
    return (
        mode,
        f"the search stopped where the gradient's norm is still {np.linalg.norm(gradient):.3g}",
    )


def _gain(gradient: Array, product: Array) -> float:
    """Return by how much the best step along the gradient would lower a quadratic cost; nan where that has no value."""
    square, curve = float(gradient @ gradient), abs(float(gradient @ product))
    return square**2 / (2 * curve) if curve > 0 else (0.0 if square == 0 else np.nan)
