"""A model given as two JAX functions: looked at once, refused in words where it cannot work, and named by what it does.

The functions are traced once, and that trace is what runs: what they take from around them may change later without
any effect. The name is that of the traced gradients with their constants. Two runs of one script have equal names, so
that compiled code, checkpoints and ledgers know the model again; functions that compute something else never share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from wflmc.errors import Found, InputError
from wflmc.keys import digest
from wflmc.posterior.blocks import row_norms
from wflmc.posterior.own_checks import check_number, on_accelerator, shapes_of


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """What is the same for all data: the functions, and how flat parameters are theirs. Equal where names are."""

    likelihood: Any
    """−log p(example|θ) as it was traced, of θ[m] and the arrays of one example."""
    prior: Any
    """−log p(θ) as it was traced, of θ[m]."""
    structure: Any
    """Of the parameters, as JAX flattens them."""
    shapes: tuple[tuple[int, ...], ...]
    name: str = ""
    numbers: int = 1
    """Intermediate results of one example's log-likelihood, roughly: what a gradient must remember."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Model({self.name})"

    @property
    def dim(self) -> int:
        """m, the number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def unflatten(self, theta: Any) -> Any:
        """θ[..., m] as the parameters, every leaf with the same leading axes."""
        edges = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        parts: Any = (jnp if isinstance(theta, jax.Array) else np).split(theta, edges, axis=-1)
        leaves = [part.reshape((*part.shape[:-1], *shape)) for part, shape in zip(parts, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    def cost(self, theta: jax.Array, example: Any) -> jax.Array:
        """−log p(example|θ), in full float32 also where an accelerator would rather round."""
        return self._run(self.likelihood, theta, *jax.tree.leaves(example))

    def prior_cost(self, theta: jax.Array) -> jax.Array:
        """−log p(θ), up to a constant."""
        return self._run(self.prior, theta)

    def _run(self, traced: Any, *values: Any) -> jax.Array:
        given = [jnp.asarray(value, wanted.dtype) for value, wanted in zip(values, traced.in_avals, strict=True)]
        return jaxpr_as_fun(traced)(*given)[0].astype(values[0].dtype)


def checked_model(
    log_likelihood: Callable[[Any, Any], Any],
    log_prior: Callable[[Any], Any],
    structure: Any,
    shapes: tuple[tuple[int, ...], ...],
    data: Any,
) -> Model:
    """The model, traced on one example."""
    made = Model(None, None, structure, shapes)
    theta = np.zeros(made.dim, np.float32)
    example = jax.tree.map(lambda array: array[0].astype(on_accelerator(array.dtype)), data)
    sizes = f"parameters of shape {shapes_of(made.unflatten(theta))}"
    wanted = f"a JAX function of (parameters, example), with {sizes} and ONE example of shape {shapes_of(example)}"
    check_number(
        "log_likelihood", log_likelihood, wanted, lambda t, e: log_likelihood(made.unflatten(t), e), theta, example
    )
    alone = f"a JAX function of parameters alone, with {sizes}"
    check_number("log_prior", log_prior, alone, lambda t: log_prior(made.unflatten(t)), theta, whole=True)
    with jax.default_matmul_precision("highest"):
        likelihood = jax.make_jaxpr(lambda t, e: -jnp.asarray(log_likelihood(made.unflatten(t), e), t.dtype))(
            theta, example
        )
        prior = jax.make_jaxpr(lambda t: -jnp.asarray(log_prior(made.unflatten(t)), t.dtype))(theta)
    for key, one in (("log_likelihood", likelihood), ("log_prior", prior)):
        if any("callback" in name or "debug" in name for name in _primitives(one.jaxpr)):
            raise InputError(key, Found("calls back to Python"), "written in JAX alone: no callbacks, no debug prints")
    made = Model(likelihood, prior, structure, shapes)
    traced = (
        jax.make_jaxpr(jax.value_and_grad(made.cost))(theta, example),
        jax.make_jaxpr(jax.value_and_grad(made.prior_cost))(theta),
    )
    if not _used(traced[0].jaxpr, traced[0].jaxpr.invars[1:]):
        instead = "data that it takes from elsewhere would count once for every example of every device"
        raise InputError("log_likelihood", Found("does not look at its example"), f"{wanted}: {instead}")
    parts = [text.encode() for text in (str(structure), str(shapes), *map(str, traced))]
    name = digest(*parts, *(value for one in traced for value in _constants(one)))
    return Model(likelihood, prior, structure, shapes, name, max(1, sum(result_sizes(likelihood.jaxpr))))


def _constants(traced: Any) -> Iterator[Any]:
    """All arrays that a traced function has taken from around it, also those of functions inside."""
    for value in traced.consts:
        typed = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(value) if typed else value)
    for equation in traced.jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(value, "jaxpr") and hasattr(value, "consts"):
                yield from _constants(value)


def _used(jaxpr: Any, variables: Sequence[Any]) -> bool:
    """Whether any step of a traced function takes any of the variables."""
    names = {id(variable) for variable in variables}
    return any(id(value) in names for equation in jaxpr.eqns for value in equation.invars)


def _inner(jaxpr: Any) -> Iterator[Any]:
    """The traced functions that steps of a traced function call."""
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield inner


def _primitives(jaxpr: Any) -> Iterator[str]:
    """The names of all steps."""
    yield from (equation.primitive.name for equation in jaxpr.eqns)
    for inner in _inner(jaxpr):
        yield from _primitives(inner)


def result_sizes(jaxpr: Any) -> Iterator[int]:
    """Numbers that each step of a traced function makes."""
    for equation in jaxpr.eqns:
        yield sum(int(np.prod(getattr(out.aval, "shape", ()))) for out in equation.outvars)
    for inner in _inner(jaxpr):
        yield from result_sizes(inner)


@partial(jax.jit, static_argnums=(0, 3))
def look(model: Model, examples: Any, theta: jax.Array, at_a_time: int) -> tuple[jax.Array, jax.Array]:
    """The cost of every example, and the norm of its gradient, [N]."""

    def one(example: Any) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(model.cost)(theta, example)
        return value, row_norms(gradient)

    return jax.lax.map(one, examples, batch_size=at_a_time)
