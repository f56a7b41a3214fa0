"""What a model of one's own says of examples: a person's function, for every draw or averaged over draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.errors import Found, InputError
from wflmc.posterior.own_checks import checked_arrays, shape_of, shapes_of
from wflmc.posterior.own_model import Model, result_sizes

WORKING_BYTES = 2**24
"""Intermediate results at a time, where a function is worked out for many draws and examples."""


@partial(jax.jit, static_argnums=0)
def per_example(function: Callable[[Any, Any], Any], draws: Any, examples: Any) -> Any:
    """function(draw, example) for all of draws[D, ...] and examples[n, ...], [D, n, ...]."""
    one = jax.tree.map(lambda values: values[0], (draws, examples))
    numbers = sum(result_sizes(jax.make_jaxpr(function)(*one).jaxpr))
    count, many = (len(jax.tree.leaves(values)[0]) for values in (draws, examples))
    at_a_time = int(np.clip(WORKING_BYTES // (4 * count * max(1, numbers)), 1, many))

    def of(draw: Any) -> Any:
        return jax.lax.map(lambda example: function(draw, example), examples, batch_size=at_a_time)

    return jax.vmap(of)(draws)


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
