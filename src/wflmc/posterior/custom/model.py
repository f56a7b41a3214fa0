"""A model given as two JAX functions, traced once and named by what it computes.

The functions are traced once, and that trace is what runs: what they take from around them may change later without
any effect. The name is that of the traced gradients with their constants. Two runs of one script have equal names, so
that compiled code, checkpoints and ledgers know the model again; functions that compute something else never share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from wflmc.errors import Found, InputError
from wflmc.keys import digest
from wflmc.posterior.blocks import row_norms
from wflmc.posterior.custom.checks import accelerator_dtype, check_number, checked_arrays, shape_of, shapes_of

WORKING_BYTES = 2**24
"""Intermediate results at a time, where a function is computed for many draws and examples."""


@dataclass(frozen=True, eq=False, repr=False)
class TracedModel:
    """The functions, and how flat parameters are unflattened for them; equal where names are."""

    likelihood: Any
    """−log p(example|θ) as a jaxpr of θ[m] and the arrays of one example."""
    prior: Any
    """−log p(θ) as a jaxpr of θ[m]."""
    structure: Any
    """Of the parameters, as JAX flattens them."""
    shapes: tuple[tuple[int, ...], ...]
    name: str = ""
    numbers: int = 1
    """Intermediate results of one example's log-likelihood, roughly: what a gradient must remember."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedModel) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"TracedModel({self.name})"

    @property
    def dim(self) -> int:
        """m, the number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def unflatten(self, theta: Any) -> Any:
        """Return θ[..., m] as the parameters, every leaf with the same leading axes."""
        edges = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        parts: Any = (jnp if isinstance(theta, jax.Array) else np).split(theta, edges, axis=-1)
        leaves = [part.reshape((*part.shape[:-1], *shape)) for part, shape in zip(parts, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    def cost(self, theta: jax.Array, example: Any) -> jax.Array:
        """Return −log p(example|θ), in full float32 also where an accelerator would rather round."""
        return self._run(self.likelihood, theta, *jax.tree.leaves(example))

    def prior_cost(self, theta: jax.Array) -> jax.Array:
        """Return −log p(θ), up to a constant."""
        return self._run(self.prior, theta)

    def _run(self, traced: Any, *values: Any) -> jax.Array:
        given = [jnp.asarray(value, wanted.dtype) for value, wanted in zip(values, traced.in_avals, strict=True)]
        return jaxpr_as_fun(traced)(*given)[0].astype(values[0].dtype)


def trace_model(
    log_likelihood: Callable[[Any, Any], Any],
    log_prior: Callable[[Any], Any],
    structure: Any,
    shapes: tuple[tuple[int, ...], ...],
    data: Any,
) -> TracedModel:
    """Return the model, traced on one example; refuse functions that cannot work."""
    model = TracedModel(None, None, structure, shapes)
    theta = np.zeros(model.dim, np.float32)
    example = jax.tree.map(lambda array: array[0].astype(accelerator_dtype(array.dtype)), data)
    sizes = f"parameters of shape {shapes_of(model.unflatten(theta))}"
    wanted = f"a JAX function of (parameters, example), with {sizes} and ONE example of shape {shapes_of(example)}"

    def likelihood(theta: Any, example: Any) -> Any:
        return log_likelihood(model.unflatten(theta), example)

    def prior(theta: Any) -> Any:
        return log_prior(model.unflatten(theta))

    check_number("log_likelihood", log_likelihood, wanted, likelihood, theta, example)
    check_number("log_prior", log_prior, f"a JAX function of parameters alone, with {sizes}", prior, theta, whole=True)
    with jax.default_matmul_precision("highest"):
        costs = (
            jax.make_jaxpr(lambda t, e: -jnp.asarray(likelihood(t, e), t.dtype))(theta, example),
            jax.make_jaxpr(lambda t: -jnp.asarray(prior(t), t.dtype))(theta),
        )
    for key, cost in zip(("log_likelihood", "log_prior"), costs, strict=True):
        names = (equation.primitive.name for equation in _equations(cost.jaxpr))
        if any("callback" in name or "debug" in name for name in names):
            raise InputError(key, Found("calls back to Python"), "written in JAX alone: no callbacks, no debug prints")
    model = TracedModel(*costs, structure, shapes)
    gradients = (
        jax.make_jaxpr(jax.value_and_grad(model.cost))(theta, example),
        jax.make_jaxpr(jax.value_and_grad(model.prior_cost))(theta),
    )
    inputs = {id(variable) for variable in gradients[0].jaxpr.invars[1:]}
    if not any(id(value) in inputs for equation in gradients[0].jaxpr.eqns for value in equation.invars):
        instead = "data that it takes from elsewhere would count once for every example of every device"
        raise InputError("log_likelihood", Found("does not look at its example"), f"{wanted}: {instead}")
    parts = [text.encode() for text in (str(structure), str(shapes), *map(str, gradients))]
    name = digest(*parts, *(value for gradient in gradients for value in _constants(gradient)))
    return replace(model, name=name, numbers=max(1, result_size(costs[0].jaxpr)))


def _constants(traced: Any) -> Iterator[Any]:
    """Yield all arrays that a traced function has taken from around it, also those of functions inside."""
    for value in traced.consts:
        typed = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(value) if typed else value)
    for equation in traced.jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(value, "jaxpr") and hasattr(value, "consts"):
                yield from _constants(value)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def result_size(jaxpr: Any) -> int:
    """Return how many numbers all equations of a jaxpr compute."""
    outputs = (out for equation in _equations(jaxpr) for out in equation.outvars)
    return sum(int(np.prod(getattr(out.aval, "shape", ()))) for out in outputs)


@partial(jax.jit, static_argnums=(0, 3))
def costs_and_norms(model: TracedModel, examples: Any, theta: jax.Array, at_a_time: int) -> tuple[jax.Array, jax.Array]:
    """Return the cost of every example, and the norm of its gradient, [N]."""

    def one(example: Any) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(model.cost)(theta, example)
        return value, row_norms(gradient)

    return jax.lax.map(one, examples, batch_size=at_a_time)


@partial(jax.jit, static_argnums=0)
def per_example(function: Callable[[Any, Any], Any], draws: Any, examples: Any) -> Any:
    """Return function(draw, example) for all of draws[D, ...] and examples[n, ...], [D, n, ...]."""
    one = jax.tree.map(lambda values: values[0], (draws, examples))
    numbers = result_size(jax.make_jaxpr(function)(*one).jaxpr)
    count, many = (len(jax.tree.leaves(values)[0]) for values in (draws, examples))
    at_a_time = int(np.clip(WORKING_BYTES // (4 * count * max(1, numbers)), 1, many))

    def of(draw: Any) -> Any:
        return jax.lax.map(lambda example: function(draw, example), examples, batch_size=at_a_time)

    return jax.vmap(of)(draws)


def predictive_mean(model: TracedModel, function: Callable[[Any, Any], Any], theta: jax.Array, inputs: Any) -> Any:
    """Average function(parameters, input) over draws: theta[chain, draw, m], inputs[n, ...] -> [chain, n, ...]."""
    given = jax.tree.map(jnp.asarray, checked_arrays("inputs", inputs)[0])
    one = jax.tree.map(lambda values: values[0], given)
    wanted = f"a JAX function of (parameters, input), with ONE of the inputs of shape {shapes_of(one)}"
    result = shape_of("function", function, wanted, lambda at, u: function(model.unflatten(at), u), theta[0, 0], one)
    leaves = jax.tree.leaves(result)
    if not leaves or any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
        shown = ", ".join(str(leaf.dtype) for leaf in leaves) or "nothing"
        raise InputError("function", Found(f"returns {shown}"), f"{wanted}, that returns real numbers")
    return _predictive_mean(model, function, theta, given)


@partial(jax.jit, static_argnums=(0, 1))
def _predictive_mean(model: TracedModel, function: Callable[[Any, Any], Any], theta: jax.Array, inputs: Any) -> Any:
    def at(draw: jax.Array) -> Any:
        return jax.vmap(lambda given: function(model.unflatten(draw), given))(inputs)

    def chain(draws: jax.Array) -> Any:
        first = jax.tree.map(lambda shape: jnp.zeros(shape.shape, jnp.float32), jax.eval_shape(at, draws[0]))
        total = jax.lax.scan(lambda so_far, draw: (jax.tree.map(jnp.add, so_far, at(draw)), None), first, draws)[0]
        return jax.tree.map(lambda values: values / draws.shape[0], total)

    return jax.lax.map(chain, theta)
