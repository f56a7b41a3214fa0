r"""Coordinates in which a model of one's own is nearly round: by its mode and Hessian there, then by pilot chains.

In the coordinates φ with θ = centre + W φ a posterior with that mean and covariance W Wᵀ is N(0, I), whatever the
scales of its parameters. First W Wᵀ is the inverse Hessian at a mode; then pilot chains, a simulation on pooled data
in which real devices take no part, replace it by their sample covariance. Everything here is float64: scales that
differ by a factor of a million leave float32 no digits. All of it looks at the data it is given, and ε does not cover
that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from wflmc.dynamics import Kinetic
from wflmc.posterior.coordinates import Affine

Array = NDArray[np.float64]
Cost = Callable[[Any], Any]

DENSE = 512
"""Up to so many parameters W is a matrix; beyond, it scales every parameter by itself."""
FAR = 1e3
"""A mode farther from the start than this, in unconstrained parameters of any scale, is taken for none at all."""
FLAT = 1e-9
"""Of the largest: a scaled curvature below it is rounding."""
AWAY = 1e6
"""Standard deviations from a mode at which a density that can be normalised has fallen by more than 1/AWAY."""
FLAT_COST = "−log p does not rise"
SEARCH: dict[str, Any] = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": 300}}
NEWTON, STARTS, PLACES = 60, 2, 24
"""Steps, starts, and places on the way that are compared where there is no mode."""
CHAINS, ROUNDS, HALVINGS = 64, 192, 6
PASSES, MOST_PASSES = 4, 20
"""Of the pilot: each begins with the geometry of the one before, until that changes no more."""
STEP, GUESS = 0.5, 2.0
"""h√L of the pilot, and L of its first pass."""
EFFECTIVE = 1024
"""Independent draws that a pass of the pilot is worth, roughly: with few of them the covariance of many parameters is
taken nearer to that of the pass before."""
GROWN = 2.5
"""By how much a variance may still grow in the last pass of the pilot: of a proper posterior it has settled."""
LOST = 1e2
"""Standard deviations from the centre at which a pilot chain counts as lost."""


class Geometry(NamedTuple):
    """Coordinates, and what is known of −log p in them."""

    coordinates: Affine
    mode: Array
    """In φ, [m]."""
    curvature: Array
    """Eigenvalues of the Hessian at the mode, [m]."""
    L: float
    """The largest curvature that was met."""
    elbo: float = -np.inf
    """A lower bound on log p(D), up to a constant: of two ways to write a model, the larger is nearer to normal."""


class NoModeError(ValueError):
    """No mode was found; `direction`[m] is the one along which the cost does not rise, or the search ran away.

    `best` has the coordinates, of all places on the way, of the normal law that is nearest to the posterior.
    """

    def __init__(self, reason: str, direction: Array, best: Geometry | None = None) -> None:
        super().__init__(reason)
        self.direction, self.best = direction, best


def in_float64() -> Any:
    """Return a context in which JAX computes in float64."""
    home: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    return home.enable_x64(True)


def laplace(cost: Cost, start: Array, free: Array | None = None) -> Geometry:
    """Return coordinates by the Hessian at a mode, searched for from `start` and from a random place.

    Args:
        cost: −log p of θ[m].
        start: [m].
        free: 0 for parameters that are scales, [m]: these follow when all others are fitted, or would run away.

    Raises:
        NoModeError: where the cost falls without end, or does not rise in some direction.
    """
    value_and_grad, hessian = jax.jit(jax.value_and_grad(cost)), jax.jit(partial(_hessian, cost))
    path: list[Array] = []
    generator, troubles, many = np.random.default_rng(0), [], jax.jit(jax.vmap(cost))
    for attempt in range(STARTS):
        begin = start + generator.uniform(-2, 2, start.size) * attempt
        if free is not None:
            begin = np.asarray(minimize(partial(_finite, value_and_grad, free), begin, **SEARCH).x)
        mode, trouble = _search(value_and_grad, hessian, begin, path)
        if trouble is None:
            found = _around(mode, np.asarray(hessian(mode)))
            trouble = _endless(many, found.coordinates)
        if trouble is None:
            return found
        troubles.append(trouble)
        if trouble.args[0] == FLAT_COST:
            raise trouble
    places = [_around(place, np.asarray(hessian(place))) for place in path[:: -(-len(path) // PLACES)]]
    elbo = [_elbo(many, place, generator) for place in places]
    raise NoModeError(str(troubles[0]), troubles[0].direction, places[int(np.argmax(elbo))]._replace(elbo=max(elbo)))


def _endless(many: Any, affine: Affine) -> NoModeError | None:
    """Return the error of a direction in which the cost has not risen by log R at R standard deviations, if any."""
    matrix = np.diag(affine.matrix) if affine.matrix.ndim == 1 else affine.matrix
    steps = np.concatenate([matrix.T, -matrix.T])
    rise = np.asarray(many(affine.centre + AWAY * steps)) - np.asarray(many(affine.centre[None]))
    least = int(np.argmin(np.where(np.isnan(rise), np.inf, rise)))
    return NoModeError(FLAT_COST, steps[least]) if rise[least] < np.log(AWAY) else None


def _elbo(many: Any, place: Geometry, generator: np.random.Generator) -> float:
    """Return E[log p] + entropy of the normal law of coordinates, up to a constant; −∞ where that is not finite."""
    affine = place.coordinates
    costs = np.asarray(many(affine.parameters(generator.standard_normal((CHAINS, affine.centre.size)))))
    size = np.log(affine.matrix).sum() if affine.matrix.ndim == 1 else np.linalg.slogdet(affine.matrix)[1]
    return float(np.nan_to_num(size - costs.mean(), nan=-np.inf))


def _hessian(cost: Cost, theta: Any) -> Any:
    """Return the Hessian, some columns at a time; of many parameters an estimate of its diagonal, [m]."""

    def product(vector: Any) -> Any:
        return jax.jvp(jax.grad(cost), (theta,), (vector,))[1]

    if theta.size <= DENSE:
        return jax.lax.map(product, jnp.eye(theta.size), batch_size=32)
    signs = jax.random.rademacher(jax.random.key(0), (64, theta.size), float)
    return jax.lax.map(lambda sign: sign * product(sign), signs).mean(0)


def _scaled(hessian: Array) -> tuple[Array, Array, Array]:
    """Return scales d[m] with a unit diagonal of D H D, and the eigenvalues and eigenvectors of that."""
    diagonal = hessian if hessian.ndim == 1 else np.diag(hessian)
    scale = np.maximum(np.abs(diagonal), 1e-30) ** -0.5
    if hessian.ndim == 1:
        return scale, np.sign(hessian), np.eye(0)
    return scale, *np.linalg.eigh(hessian * np.outer(scale, scale))


def _finite(value_and_grad: Any, free: Any, theta: Array) -> tuple[float, Array]:
    """Return a cost and its gradient in the parameters that are free; a large one where there is none."""
    value, gradient = value_and_grad(theta)
    good = np.isfinite(value) and np.all(np.isfinite(gradient))
    return (float(value), free * np.asarray(gradient)) if good else (1e300, np.zeros_like(theta))


def _search(value_and_grad: Any, hessian: Any, start: Array, path: list[Array]) -> tuple[Array, NoModeError | None]:
    """Return a mode, by a quasi-Newton search and then Newton's steps along `path`; and why it is none, if so."""
    function = partial(_finite, value_and_grad, 1.0)
    theta = np.asarray(minimize(function, start, callback=lambda at: path.append(np.array(at)), **SEARCH).x)
    (value, gradient), step, gain = function(theta), 0 * theta, np.inf
    for _ in range(NEWTON):
        scale, values, vectors = _scaled(np.asarray(hessian(theta)))
        if not np.all(np.isfinite(values)) or gain < 1e-10:
            break
        # Newton's step with the sign of every curvature mended, which leaves saddle points behind.
        size, pull = np.maximum(np.abs(values), FLAT * np.abs(values).max()), scale * gradient
        step = scale * (vectors @ ((vectors.T @ pull) / size) if vectors.size else pull / size)
        gain = float(gradient @ step)
        trials = (theta - step * 0.5**halved for halved in range(30))
        better = next((trial for trial in trials if function(trial)[0] < value), None)
        if better is None:
            break
        theta, (value, gradient) = better, function(better)
        path.append(theta)
    if value >= 1e300 or not gain < 1e-2 or not np.all(np.isfinite(values)):
        away = np.nan_to_num(theta - start if np.abs(theta - start).max() > FAR else step)
        return theta, NoModeError("−log p falls without end, or has no mode nearby,", away)
    least = int(np.argmin(values))
    if values[least] > FLAT * values.max():
        return theta, None
    return theta, NoModeError(FLAT_COST, vectors[:, least] if vectors.size else np.eye(scale.size)[least])


def _around(place: Array, hessian: Array) -> Geometry:
    """Return coordinates by the Hessian at a place, its curvatures taken for positive."""
    scale, values, vectors = _scaled(hessian)
    size = np.maximum(np.abs(values), FLAT * np.abs(values).max())
    matrix = scale[:, None] * vectors / np.sqrt(size) if vectors.size else scale
    return Geometry(Affine(np.asarray(place, dtype=float), matrix), 0 * scale, np.ones_like(scale), 1.0)


def refine(cost: Cost, geometry: Geometry) -> Geometry:
    """Return coordinates by the mean and covariance of pilot chains, and the largest curvature that they met.

    A step that makes energies grow until chains are lost is halved; where that does not help, the geometry of the pass
    before is kept.

    Raises:
        NoModeError: where a variance still grows in the last pass, as of an improper posterior.
    """
    motion, affine, dim = Kinetic(2.0), geometry.coordinates, geometry.mode.size

    @jax.jit
    def run(affine: Affine, phi: Any, h: Any, std: Any, key: Any) -> Any:
        slope = jax.grad(lambda at: cost(affine.parameters(at)))

        def body(state: Any, key: Any) -> Any:
            theta, velocity = state
            pull = jax.vmap(slope)(motion.gradient_position(theta, velocity, h))
            noise = std * jax.random.normal(key, phi.shape)
            state = motion.step(theta, velocity, pull, noise, h, 1.0, 1.0)
            return state, state[0]

        def largest(at: Any, vector: Any) -> Any:
            def turn(_: Any, v: Any) -> Any:
                return jax.jvp(slope, (at,), (v / jnp.linalg.norm(v),))[1]

            return jnp.linalg.norm(jax.lax.fori_loop(0, 16, turn, vector))

        first, *rest = jax.random.split(key, ROUNDS + 1)
        start = jax.random.normal(first, phi.shape)
        draws = jax.lax.scan(body, (phi, start), jnp.stack(rest))[1][ROUNDS // 2 :]
        return draws, jnp.max(jax.vmap(largest)(draws[-1], start))

    keys = jax.random.split(jax.random.key(0), MOST_PASSES + 1)
    phi, met = np.asarray(jax.random.normal(keys[-1], (CHAINS, dim))), GUESS
    values, vectors = np.ones(1), np.eye(dim)
    for number, key in enumerate(keys[:MOST_PASSES]):
        if number >= PASSES and values[-1] < GROWN:
            break
        h, begin = STEP / met**0.5, phi
        for _ in range(HALVINGS):
            draws, largest = map(np.asarray, run(affine, begin, h, motion.langevin_noise(h) ** 0.5, key))
            if np.all(np.abs(draws) < LOST) and np.isfinite(largest):
                break
            h, begin = h / 2, begin / 2
        else:
            break
        centre, spread = draws.mean((0, 1)), draws.reshape(-1, dim)
        weight = EFFECTIVE / (EFFECTIVE + 5 * dim)
        covariance = weight * np.atleast_2d(np.cov(spread.T)) + (1 - weight) * np.eye(dim)
        root: Any = np.diag(np.std(spread, axis=0)) if affine.matrix.ndim == 1 else np.linalg.cholesky(covariance)
        phi, met = np.linalg.solve(root, (draws[-1] - centre).T).T, max(1.0, float(largest))
        values, vectors = np.linalg.eigh(root @ root.T)
        matrix = affine.matrix * np.diag(root) if affine.matrix.ndim == 1 else affine.matrix @ root
        affine = Affine(affine.parameters(centre), matrix)
    if values[-1] > GROWN:
        raise NoModeError(
            "its variance grows without end in pilot chains",
            affine.parameters(vectors[:, -1]) - affine.centre,
            geometry,
        )
    old = geometry.coordinates
    turned = affine.matrix / old.matrix if old.matrix.ndim == 1 else np.linalg.solve(old.matrix, affine.matrix)
    curvature = turned**2 if turned.ndim == 1 else np.linalg.eigvalsh(turned.T @ turned)
    return Geometry(affine, affine.of(old.centre), curvature, met)
