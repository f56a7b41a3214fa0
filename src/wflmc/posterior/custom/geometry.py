r"""Coordinates in which a model of one's own is nearly round: by its mode and Hessian there, then by pilot chains.

In the coordinates φ with θ = centre + W φ a posterior with that mean and covariance W Wᵀ is N(0, I), whatever the
scales of its parameters. First W Wᵀ is the inverse Hessian at a mode; then pilot chains, a simulation on pooled data in
which real devices take no part, replace it by their sample covariance. Everything here is float64: scales that differ by
a factor of a million leave float32 no digits. All of it looks at the data it is given, and ε does not cover that.
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
NEWTON, STARTS = 60, 4
CHAINS, ROUNDS, PASSES, HALVINGS = 64, 192, 4, 6
"""Of the pilot; each pass begins with the geometry of the one before."""
STEP, GUESS = 0.5, 2.0
"""h√L of the pilot, and L of its first pass."""
EFFECTIVE = 1024
"""Independent draws that a pass of the pilot is worth, roughly: with few of them the covariance of many parameters is
taken nearer to that of the pass before."""
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


class NoModeError(ValueError):
    """No mode was found; `direction`[m] is the one along which the cost does not rise, or the search ran away."""

    def __init__(self, reason: str, direction: Array) -> None:
        super().__init__(reason)
        self.direction = direction


def in_float64() -> Any:
    """Return a context in which JAX computes in float64."""
    return (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(True)


def laplace(cost: Cost, start: Array) -> Geometry:
    """Return coordinates by the Hessian at a mode, searched for from `start` and from random places.

    Raises:
        NoModeError: where the cost falls without end, or does not rise in some direction.
    """
    value_and_grad = jax.jit(jax.value_and_grad(cost))
    hessian = jax.jit(partial(_hessian, cost))
    generator, trouble = np.random.default_rng(0), NoModeError("", 0 * start)
    for attempt in range(STARTS):
        begin = start if not attempt else start + generator.uniform(-2, 2, start.size)
        mode, trouble = _search(value_and_grad, hessian, begin)
        if not trouble.args[0]:
            return _around(mode, hessian(mode))
    raise trouble


def _hessian(cost: Cost, theta: Any) -> Any:
    """Return the Hessian, some columns at a time; of many parameters an estimate of its diagonal, [m]."""
    product = lambda vector: jax.jvp(jax.grad(cost), (theta,), (vector,))[1]  # noqa: E731
    if theta.size <= DENSE:
        return jax.lax.map(product, jnp.eye(theta.size), batch_size=32)
    signs = jax.random.rademacher(jax.random.key(0), (64, theta.size), float)
    return jax.lax.map(lambda sign: sign * product(sign), signs).mean(0)


def _scaled(hessian: Array) -> tuple[Array, Array, Array]:
    """Return scales d[m] with a unit diagonal of D H D, and the eigenvalues and eigenvectors of that."""
    diagonal = np.abs(hessian if hessian.ndim == 1 else np.diag(hessian))
    scale = np.maximum(diagonal, 1e-30) ** -0.5
    if hessian.ndim == 1:
        return scale, np.sign(hessian), np.eye(0)
    values, vectors = np.linalg.eigh(hessian * np.outer(scale, scale))
    return scale, values, vectors


def _search(value_and_grad: Any, hessian: Any, start: Array) -> tuple[Array, NoModeError]:
    """Return a mode, by a quasi-Newton search and then Newton's steps; and why it is none, "" where it is."""

    def function(theta: Array) -> tuple[float, Array]:
        value, gradient = value_and_grad(theta)
        good = np.isfinite(value) and np.all(np.isfinite(gradient))
        return (float(value), np.asarray(gradient)) if good else (1e300, np.zeros_like(theta))

    theta = np.asarray(minimize(function, start, jac=True, method="L-BFGS-B", options={"maxiter": 300}).x)
    value, gradient = function(theta)
    for _ in range(NEWTON):
        matrix = np.asarray(hessian(theta))
        scale, values, vectors = _scaled(matrix)
        if not np.all(np.isfinite(values)):
            return theta, NoModeError("its Hessian is nan there", np.asarray(~np.isfinite(scale), dtype=float))
        # Newton's step with the sign of every curvature mended, which leaves saddle points behind.
        size = np.maximum(np.abs(values), FLAT * np.abs(values).max())
        pull = scale * gradient
        step = scale * (pull / size if matrix.ndim == 1 else vectors @ ((vectors.T @ pull) / size))
        gain = float(gradient @ step)
        for halved in range(30):
            trial = theta - step * 0.5**halved
            lower, slope = function(trial)
            if lower < value:
                theta, value, gradient = trial, lower, slope
                break
        else:
            break
        if gain < 1e-10:
            break
    if value >= 1e300 or np.abs(theta - start).max() > FAR * (1 + np.abs(start).max()) and gain > 1e-3:
        return theta, NoModeError("−log p falls without end", theta - start)
    if gain > 1e-2:
        return theta, NoModeError("the search for a mode did not settle", step)
    return theta, _flat(np.asarray(hessian(theta)))


def _flat(hessian: Array) -> NoModeError:
    """Return the error of a direction in which the cost does not rise; an empty one where it rises in all."""
    scale, values, vectors = _scaled(hessian)
    if values.min() > FLAT * values.max():
        return NoModeError("", scale)
    least = np.argmin(values)
    return NoModeError("−log p does not rise", np.eye(scale.size)[least] if hessian.ndim == 1 else vectors[:, least])


def _around(mode: Array, hessian: Any) -> Geometry:
    scale, values, vectors = _scaled(np.asarray(hessian))
    matrix = scale if vectors.size == 0 else scale[:, None] * vectors / np.sqrt(values)
    return Geometry(Affine(np.asarray(mode, dtype=float), matrix), 0 * scale, np.ones_like(scale), 1.0)


def refine(cost: Cost, geometry: Geometry) -> Geometry:
    """Return coordinates by the mean and covariance of pilot chains, and the largest curvature that they met.

    A step that makes energies grow until chains are lost is halved; where that does not help, the geometry of the pass
    before is kept.
    """
    motion, affine, dim = Kinetic(2.0), geometry.coordinates, geometry.mode.size

    @jax.jit
    def run(affine: Affine, phi: Any, h: Any, std: Any, key: Any) -> Any:
        slope = jax.grad(lambda at: cost(affine.parameters(at)))

        def body(state: Any, key: Any) -> Any:
            pull = jax.vmap(slope)(motion.gradient_position(*state, h))
            state = motion.step(*state, pull, std * jax.random.normal(key, phi.shape), h, 1.0, 1.0)
            return state, state[0]

        def largest(at: Any, vector: Any) -> Any:
            turn = lambda _, v: jax.jvp(slope, (at,), (v / jnp.linalg.norm(v),))[1]  # noqa: E731
            return jnp.linalg.norm(jax.lax.fori_loop(0, 16, turn, vector))

        first, *rest = jax.random.split(key, ROUNDS + 1)
        start = jax.random.normal(first, phi.shape)
        draws = jax.lax.scan(body, (phi, start), jnp.stack(rest))[1][ROUNDS // 2 :]
        return draws, jnp.max(jax.vmap(largest)(draws[-1], start))

    keys = jax.random.split(jax.random.key(0), PASSES + 1)
    phi, met = np.asarray(jax.random.normal(keys[-1], (CHAINS, dim))), GUESS
    for key in keys[:PASSES]:
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
        root = np.diag(np.std(spread, axis=0)) if affine.matrix.ndim == 1 else np.linalg.cholesky(covariance)
        phi, met = np.linalg.solve(root, (draws[-1] - centre).T).T, max(1.0, float(largest))
        matrix = affine.matrix * np.diag(root) if affine.matrix.ndim == 1 else affine.matrix @ root
        affine = Affine(affine.parameters(centre), matrix)
    old = geometry.coordinates
    turned = affine.matrix / old.matrix if old.matrix.ndim == 1 else np.linalg.solve(old.matrix, affine.matrix)
    curvature = turned**2 if turned.ndim == 1 else np.linalg.eigvalsh(turned.T @ turned)
    return Geometry(affine, affine.of(old.centre), curvature, met)
