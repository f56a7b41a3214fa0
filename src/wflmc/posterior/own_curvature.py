"""Where the cost of a model of one's own is least, and how it curves there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import Found, InputError
from wflmc.posterior.curvature import eigenvalues, find_mode

if TYPE_CHECKING:
    from wflmc.posterior.own_posterior import OwnPosterior

Array = NDArray[np.float64]


def laplace(posterior: OwnPosterior) -> tuple[Array, Array]:
    """A mode[m] found from the start, and eigenvalues of the Hessian there; refused where there is none."""

    def cost(theta: Array) -> tuple[float, Array]:
        value, gradient = _total(posterior, jnp.asarray(theta, jnp.float32))
        return float(value), np.asarray(gradient, dtype=float)

    mode, trouble = find_mode(cost, lambda theta, vector: _curved(posterior, theta, vector), posterior.start)
    if trouble:
        wanted = "parameters from which −log p(θ|D) falls to a least value (is a sign wrong? is it nan nearby?)"
        instead = "start elsewhere, or give mu, L and a plan's initial_w2_sq"
        raise InputError("initial", Found(f"leads to no mode: {trouble}"), f"{wanted}: {instead}")
    return mode, eigenvalues_at(posterior, mode)


def eigenvalues_at(posterior: OwnPosterior, theta: Array) -> Array:
    """Of the Hessian of the whole cost at θ[m]: all, or of a large model the smallest and the largest."""
    return eigenvalues(lambda vector: _curved(posterior, theta, vector), posterior.dim)


def _curved(posterior: OwnPosterior, theta: Array, vector: Array) -> Array:
    """The Hessian of the whole cost at θ[m] times a vector[m], by float32."""
    at, along = (jnp.asarray(values, jnp.float32) for values in (theta, vector))
    return np.asarray(_product(posterior, at, along), dtype=float)


@jax.jit
def _total(posterior: OwnPosterior, theta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cost and its gradient over all examples of all devices, one device at a time."""

    def body(total: Any, one: Any) -> tuple[Any, None]:
        held, size, _ = one
        real = jnp.arange(jax.tree.leaves(held)[0].shape[0]) < size
        costs = jax.vmap(posterior.model.cost, (None, 0))(theta, held)
        gradient = posterior._gradient(theta, one)[0].rounded
        return (total[0] + jnp.sum(jnp.where(real, costs, 0.0)), total[1] + gradient), None

    return jax.lax.scan(body, (posterior.model.prior_cost(theta), jnp.zeros_like(theta)), posterior._held)[0]


@jax.jit
def _product(posterior: OwnPosterior, theta: jax.Array, vector: jax.Array) -> jax.Array:
    """The Hessian of the whole cost times a vector."""
    return jax.jvp(lambda at: _total(posterior, at)[1], (theta,), (vector,))[1]
