"""A model given as two JAX functions: looked at once, refused in words where it cannot work, and named by what it does.

The name is that of the traced gradients with their constants. Two runs of one script have equal names, so that compiled
code, checkpoints and ledgers know the model again; functions that compute something else never share one.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError
from wflmc.keys import digest

FLOATS = jnp.floating


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """What is the same for all data: the functions, and how flat parameters are theirs. Equal where names are."""

    log_likelihood: Callable[[Any, Any], Any]
    log_prior: Callable[[Any], Any]
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
        with jax.default_matmul_precision("highest"):
            return -jnp.asarray(self.log_likelihood(self.unflatten(theta), example), theta.dtype)

    def prior_cost(self, theta: jax.Array) -> jax.Array:
        """−log p(θ), up to a constant."""
        with jax.default_matmul_precision("highest"):
            return -jnp.asarray(self.log_prior(self.unflatten(theta)), theta.dtype)


def checked_parameters(initial: Any) -> tuple[NDArray[np.float64], Any, tuple[tuple[int, ...], ...]]:
    """The starting parameters flat, their structure and their shapes."""
    leaves, structure = jax.tree.flatten(initial)
    if not leaves:
        raise InputError("initial", initial, "a pytree with at least one array of floating-point parameters")
    for leaf in leaves:
        kind = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        if not jnp.issubdtype(kind, FLOATS):
            raise InputError("initial", f"parameters of type {kind}", "floating-point numbers, such as 0.0 for 0")
    arrays = [np.asarray(leaf, dtype=float) for leaf in leaves]
    flat = np.concatenate([array.ravel() for array in arrays])
    if not flat.size or not np.all(np.isfinite(flat)):
        raise InputError("initial", "no parameters, or nan or infinite ones", "finite, and at least one number")
    return flat, structure, tuple(array.shape for array in arrays)


def checked_data(data: Any) -> tuple[Any, int]:
    """The data as NumPy arrays, and how many examples there are."""
    leaves, structure = jax.tree.flatten(data)
    arrays = [np.asarray(leaf) for leaf in leaves]
    if any(array.dtype.kind not in "fiub" for array in arrays):
        kinds = ", ".join(sorted({str(array.dtype) for array in arrays}))
        raise InputError("data", f"arrays of type {kinds}", "real numbers")
    shapes = ", ".join(str(array.shape) for array in arrays)
    lengths = {array.shape[0] if array.ndim else None for array in arrays}
    if len(lengths) != 1 or None in lengths:
        raise InputError(
            "data",
            f"arrays of shapes {shapes}" if arrays else "no arrays",
            "arrays with one first axis, the examples, such as (X, y); np.asarray makes one of a list of rows",
        )
    if not arrays[0].shape[0]:
        raise InputError("data", f"arrays of shapes {shapes}", "at least one example")
    return jax.tree.unflatten(structure, arrays), int(arrays[0].shape[0])


def checked_model(
    log_likelihood: Callable[[Any, Any], Any],
    log_prior: Callable[[Any], Any],
    structure: Any,
    shapes: tuple[tuple[int, ...], ...],
    data: Any,
) -> Model:
    """The model, traced on one example."""
    made = Model(log_likelihood, log_prior, structure, shapes)
    theta = np.zeros(made.dim, np.float32)
    example = jax.tree.map(lambda array: array[0].astype(on_accelerator(array.dtype)), data)
    shown = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(example))
    wanted = f"a JAX function of parameters and ONE example (an array or arrays of shapes {shown})"
    _check_scalar(
        "log_likelihood", log_likelihood, wanted, lambda t, e: log_likelihood(made.unflatten(t), e), theta, example
    )
    _check_scalar(
        "log_prior", log_prior, "a JAX function of parameters alone", lambda t: log_prior(made.unflatten(t)), theta
    )
    traced = (
        jax.make_jaxpr(jax.value_and_grad(made.cost))(theta, example),
        jax.make_jaxpr(jax.value_and_grad(made.prior_cost))(theta),
    )
    if not _used(traced[0].jaxpr, traced[0].jaxpr.invars[1:]):
        given = "a function that does not look at its example"
        raise InputError("log_likelihood", given, f"{wanted}, which is the only one that counts there")
    parts = [text.encode() for text in (str(structure), str(shapes), *map(str, traced))]
    name = digest(*parts, *(value for one in traced for value in _constants(one)))
    numbers = sum(_count(jax.make_jaxpr(log_likelihood)(made.unflatten(theta), example).jaxpr))
    return Model(log_likelihood, log_prior, structure, shapes, name, max(1, numbers))


def on_accelerator(kind: Any) -> Any:
    """The type of numbers there: float32 for any that are not whole."""
    return np.dtype(np.float32) if np.dtype(kind).kind == "f" else jax.dtypes.canonicalize_dtype(kind)


def shape_of(key: str, function: Any, wanted: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call of a person's function would return; one that fails is refused in words."""
    if not callable(function):
        raise InputError(key, function, wanted)
    try:
        return jax.eval_shape(call, *arguments)
    except Exception as error:  # whatever a person's function may raise
        raise InputError(
            key, f"a function that fails{_where(function, error)}: {_said(error)}", _advice(error, wanted)
        ) from None


def _check_scalar(key: str, function: Any, wanted: str, call: Callable[..., Any], *arguments: Any) -> None:
    result = shape_of(key, function, wanted, call, *arguments)
    leaves = jax.tree.leaves(result)
    if len(leaves) != 1 or leaves[0].shape != () or not jnp.issubdtype(leaves[0].dtype, FLOATS):
        found = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
        raise InputError(key, f"a function that returns {found}", f"{wanted} that returns one floating-point number")


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:110]}" if lines else type(error).__name__


def _where(function: Any, error: Exception) -> str:
    """In which line of the person's own file, where that can be told."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename]
    return f" in line {lines[-1]}" if lines else ""


def _advice(error: Exception, wanted: str) -> str:
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return f"{wanted}: use jax.numpy in place of numpy"
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return f"{wanted}: use jnp.where in place of a decision by values"
    if isinstance(error, jax.errors.ConcretizationTypeError):
        return f"{wanted}: use jax.numpy in place of math, float() and item()"
    return wanted


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


def _count(jaxpr: Any) -> Iterator[int]:
    """Numbers that each step of a traced function makes."""
    for equation in jaxpr.eqns:
        yield sum(int(np.prod(getattr(out.aval, "shape", ()))) for out in equation.outvars)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", None)
            if inner is not None:
                yield from _count(inner)
