"""What a model of one's own predicts: a person's function, averaged over draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from wflmc.errors import Found, InputError
from wflmc.posterior.own_checks import checked_arrays, shape_of, shapes_of
from wflmc.posterior.own_model import Model


def predictive(model: Model, function: Callable[[Any, Any], Any], theta: jax.Array, inputs: Any) -> Any:
    """Mean of function(parameters, input) over draws: theta[chain, draw, m], inputs[n, ...] -> [chain, n, ...]."""
    given = jax.tree.map(jnp.asarray, checked_arrays("inputs", inputs)[0])
    one = jax.tree.map(lambda values: values[0], given)
    wanted = f"a JAX function of (parameters, input), with ONE of the inputs of shape {shapes_of(one)}"
    result = shape_of("function", function, wanted, lambda at, u: function(model.unflatten(at), u), theta[0, 0], one)
    leaves = jax.tree.leaves(result)
    if not leaves or any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
        found = ", ".join(str(leaf.dtype) for leaf in leaves) or "nothing"
        raise InputError("function", Found(f"returns {found}"), f"{wanted}, that returns real numbers")
    return _predictive(model, function, theta, given)


@partial(jax.jit, static_argnums=(0, 1))
def _predictive(model: Model, function: Callable[[Any, Any], Any], theta: jax.Array, inputs: Any) -> Any:
    def chain(draws: jax.Array) -> Any:
        def at(draw: jax.Array) -> Any:
            return jax.vmap(lambda given: function(model.unflatten(draw), given))(inputs)

        first = jax.tree.map(lambda shape: jnp.zeros(shape.shape, jnp.float32), jax.eval_shape(at, draws[0]))
        total = jax.lax.scan(lambda so_far, draw: (jax.tree.map(jnp.add, so_far, at(draw)), None), first, draws)[0]
        return jax.tree.map(lambda values: values / draws.shape[0], total)

    return jax.lax.map(chain, theta)
