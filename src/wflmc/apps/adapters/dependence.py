"""What the results of a function are computed from, read off its equations.

Whether a density depends on private data must not be decided by their values: data that
happen to be equal to a placeholder would make it look independent, and one record could
decide. The equations of a traced function are the same for all data of the same shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from wflmc.sums.independence import nested_jaxprs
from wflmc.support.trees import ArrayTree

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Inputs = TypeVar("Inputs")
"""A dictionary of pytrees by name, such as the function takes."""
Name = TypeVar("Name", bound=str | tuple[str, ...])
"""Of a result."""

CALL_PRIMITIVES = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "checkpoint",
    "remat",
    "remat2",
)
"""Primitives that do nothing but call a function.

Its inputs are the inputs of the primitive, and its results are the primitive's.
"""
FUNCTION_PARAMETERS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""The parameters of these primitives that hold the function."""
WHOLE_NUMBER_KINDS = "iub"
"""Kinds of NumPy's whole numbers, with and without sign, and of truth values."""


@dataclass(frozen=True)
class Constant:
    """An array of more than one number that a function takes from around it."""

    shape: tuple[int, ...]
    kind: str
    """Of its numbers, as NumPy names kinds.

    They are i, u or b for whole numbers and truth values, and f for all others.
    """


Sources = frozenset[str | Constant]
"""Names of inputs, and constants."""
SourceTree: TypeAlias = (
    Sources | Mapping[str, "SourceTree"] | Sequence["SourceTree"] | None
)
"""A pytree of results, with `Sources` in place of its arrays."""
NOTHING: Sources = frozenset()


def sources_of(
    function: Callable[[Inputs], Mapping[Name, ArrayTree]],
    inputs: Mapping[str, ArrayTree],
) -> dict[Name, SourceTree]:
    """Return what every result of a JAX function is computed from.

    The function is traced, and no value of an input is used. An input that only lends
    its shape is no source. Loops and conditions count as if each of their results were
    computed from all of their inputs.

    Args:
        function: of one dictionary, to pytrees of arrays by name.
        inputs: the dictionary, a pytree of arrays by name.

    Returns:
        The results with `Sources` in place of arrays: the names in `inputs`, and a
        `Constant` for every array that the function takes from elsewhere.
    """
    trace = jax.make_jaxpr(function, return_shape=True)
    traced, shapes = trace(dict(inputs))
    leaves = jax.tree_util.tree_leaves_with_path(dict(inputs))
    input_sources: list[Sources] = [frozenset([path[0].key]) for path, _ in leaves]
    output_sources = _propagate(traced, input_sources)
    return jax.tree.unflatten(jax.tree.structure(shapes), output_sources)


def all_sources(tree: SourceTree) -> Sources:
    """Return the union of all sources in a pytree, as `sources_of` returns it.

    It says what the results are computed from together, and is `NOTHING` for a tree
    without leaves.
    """
    return NOTHING.union(*jax.tree.leaves(tree))


def _propagate(traced: "Jaxpr | ClosedJaxpr", inputs: list[Sources]) -> list[Sources]:
    """Return the sources of every output of a jaxpr, from those of its inputs."""
    jaxpr = _open(traced)
    constants = [_constant(value) for value in getattr(traced, "consts", ())]
    sources_by_variable = dict(zip(map(id, jaxpr.invars), inputs, strict=True))
    sources_by_variable |= zip(map(id, jaxpr.constvars), constants, strict=True)

    def sources(variable: "Var | Literal") -> Sources:
        if hasattr(variable, "val"):
            return _constant(variable.val)
        return sources_by_variable.get(id(variable), NOTHING)

    for equation in jaxpr.eqns:
        arguments = [sources(variable) for variable in equation.invars]
        called = _called_function(equation)
        if called is None:
            union = NOTHING.union(*arguments, _inner_constants(equation))
            results = [union] * len(equation.outvars)
        else:
            results = _propagate(called, arguments)
        sources_by_variable |= zip(map(id, equation.outvars), results, strict=True)
    return [sources(variable) for variable in jaxpr.outvars]


def _open(traced: "Jaxpr | ClosedJaxpr") -> "Jaxpr":
    """Return the equations of a traced function, without its constants."""
    return traced.jaxpr if hasattr(traced, "jaxpr") else traced


def _called_function(equation: "JaxprEqn") -> "Jaxpr | ClosedJaxpr | None":
    """Return the function that an equation does nothing but call.

    None for all other equations, and where the inputs or the results do not correspond.
    """
    if equation.primitive.name not in CALL_PRIMITIVES:
        return None
    parameters = equation.params
    functions = (parameters[name] for name in FUNCTION_PARAMETERS if name in parameters)
    called = next(functions, None)
    if called is None or not hasattr(called, "eqns"):
        return None
    jaxpr = _open(called)
    same_inputs = len(jaxpr.invars) == len(equation.invars)
    same_outputs = len(jaxpr.outvars) == len(equation.outvars)
    return called if same_inputs and same_outputs else None


def _inner_constants(equation: "JaxprEqn") -> Sources:
    """Return the constants of all functions among the parameters of an equation.

    Those of functions that these call are among them.
    """
    parameters = list(equation.params.values())
    values = jax.tree.leaves(parameters, is_leaf=lambda value: hasattr(value, "eqns"))
    constants = NOTHING
    for function in values:
        if hasattr(function, "eqns"):
            for jaxpr in nested_jaxprs(function):
                constants = constants.union(*map(_constant, _captured_values(jaxpr)))
    return constants


def _captured_values(jaxpr: "Jaxpr | ClosedJaxpr") -> list[ArrayLike]:
    """Return the constants and the literals of a jaxpr, without those of inner ones."""
    values = list(getattr(jaxpr, "consts", ()))
    for equation in jaxpr.eqns:
        for variable in equation.invars:
            if hasattr(variable, "val"):
                values.append(variable.val)
    return values


def _constant(value: ArrayLike) -> Sources:
    """Return the source of a captured value: none for one number or a random key."""
    shape = tuple(np.shape(value))
    dtype = getattr(value, "dtype", None)
    if int(np.prod(shape)) <= 1 or not isinstance(dtype, np.dtype):
        return NOTHING
    kind = dtype.kind if dtype.kind in WHOLE_NUMBER_KINDS else "f"
    return frozenset([Constant(shape, kind)])
