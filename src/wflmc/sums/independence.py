"""Refuse a traced model in which one record could change the gradient of another.

The gradients of many records are computed at once (`jax.vmap`) and then clipped one by
one. The clipping threshold bounds what a record adds to the sum only if no record
enters the gradient of another one, and if nothing is remembered from record to record.
For the primitives that JAX itself batches this holds: `vmap` computes what a loop over
records would compute. It need not hold for

- operations whose batching, or whose code, somebody else has written:
  `jax.custom_batching.custom_vmap`, foreign functions, Pallas kernels, primitives that
  a library or a person has added to JAX;
- random bits of the `rbg` generators, which `vmap` draws for all records from the first
  record's key;
- effects: callbacks, prints, and references to arrays that change.

A trace of the function alone does not show what the rules of `jax.custom_jvp` and
`jax.custom_vjp` do, so the trace of the gradient is to be checked as well.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.support.errors import Fault, InputError

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive

Traced: TypeAlias = "Jaxpr | ClosedJaxpr"
"""A traced function; a closed one has the arrays that it has taken from around."""

CALLBACKS = ("callback", "debug", "inspect_sharding", "infeed", "outfeed")
"""Parts of the names of primitives that leave the compiled program."""
NOT_BATCHED_BY_JAX = (
    "custom_vmap",
    "ffi_call",
    "custom_call",
    "pallas",
    "core_map",
    "mpmd_map",
    "hi_primitive",
    "custom_partitioning",
    "call_exported",
    "shard_map",
    "pmap",
)
"""Parts of the names of JAX's primitives whose batching, or whose code, comes from
elsewhere or cannot be read."""
SHARED_RANDOM_BITS = ("rng_bit_generator", "rng_uniform")
"""Primitives whose random bits for one record depend on the other records, or on the
record's place among them."""
INDEPENDENT_GENERATORS = ("threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
"""Random generators of JAX for which `vmap` over keys draws what each key alone would
draw."""


def nested_jaxprs(jaxpr: Traced) -> Iterator[Traced]:
    """Yield a traced function and all functions that its equations call.

    These are bodies of loops, branches of conditions, calls of `jax.jit` functions and
    the like, at any depth. A function that several equations call comes several times.

    Args:
        jaxpr: the traced function, which is yielded first.
    """
    yield jaxpr
    for equation in jaxpr.eqns:
        values = list(equation.params.values())
        for value in jax.tree.leaves(values, is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from nested_jaxprs(value)


def is_jaxpr(value: object) -> TypeGuard[Traced]:
    """Return whether a parameter of an equation is a traced function.

    Both kinds of JAX's are: with the arrays that it has taken from around, and without.
    The type is recognised by its equations, since importing it takes long.

    Args:
        value: a parameter, or a part of one.
    """
    return hasattr(value, "eqns")


def check_independence(key: str, *jaxprs: Traced) -> None:
    """Refuse traced functions of one record that might see other records.

    All operations are looked at, those in loops and branches included. An operation
    that JAX itself does not define is refused even if it would be harmless: its
    batching rule cannot be checked.

    Args:
        key: the argument that the functions come from, such as `log_likelihood`.
        *jaxprs: traces of the function and of its gradient; of a gradient, the one that
            is run.

    Raises:
        InputError: where an operation has effects or is not batched by JAX's rules.
    """
    nested = [inner for traced in jaxprs for inner in nested_jaxprs(traced)]
    equations = [equation for jaxpr in nested for equation in jaxpr.eqns]
    primitives = {
        equation.primitive
        for equation in equations
        if not _is_numpy_operation(equation)
    }
    names = sorted(primitive.name for primitive in primitives)
    _check_effects(key, names, jaxprs)
    _check_batching(key, names, primitives)
    _check_random_bits(key, names, equations)


def _check_effects(key: str, names: list[str], jaxprs: tuple[Traced, ...]) -> None:
    """Refuse callbacks and other effects."""
    if _any_contains(names, CALLBACKS):
        requirement = "written in JAX alone: no callbacks, no debug prints"
        raise InputError(key, Fault("calls back to Python"), requirement)
    if any(traced.effects for traced in jaxprs):
        reason = "what it keeps in a reference would pass from one example to the next"
        raise InputError(key, Fault("has effects"), f"a pure function: {reason}")


def _check_batching(key: str, names: list[str], primitives: "set[Primitive]") -> None:
    """Refuse operations that JAX does not batch by its own rules."""
    unknown = sorted(primitive.name for primitive in primitives - _jax_primitives())
    foreign = _any_contains(names, NOT_BATCHED_BY_JAX) + unknown
    if foreign:
        reason = "another rule may let one example change another's gradient"
        requirement = f"made of operations that JAX batches itself: {reason}"
        raise InputError(key, Fault(f"uses {foreign[0]}"), requirement)


def _is_numpy_operation(equation: "JaxprEqn") -> bool:
    """Return whether an equation is an operation that `jax.numpy` itself defines.

    Newer versions of JAX trace some functions, such as `jnp.nonzero`, to a primitive
    that calls an object with rules of its own. These are JAX's where the object's class
    is the one that a module of `jax.numpy` holds, and the object has replaced none of
    its methods. Classes of JAX that hold functions of the user are in other modules.
    """
    called = equation.params.get("_prim")
    defined = type(called)
    if not defined.__module__.startswith("jax._src.numpy."):
        return False
    module = sys.modules.get(defined.__module__)
    if getattr(module, defined.__name__, None) is not defined:
        return False
    return not any(callable(getattr(defined, name, None)) for name in vars(called))


def _check_random_bits(key: str, names: list[str], equations: "list[JaxprEqn]") -> None:
    """Refuse random bits that records share."""
    shared = _any_contains(names, SHARED_RANDOM_BITS) + _shared_keys(equations)
    if shared:
        instead = "jax.random.key(seed, impl='threefry2x32')"
        reason = "of others, one example's key may decide the bits of all examples"
        requirement = f"written with keys of {instead}: {reason}"
        raise InputError(key, Fault(f"uses {shared[0]}"), requirement)


def _any_contains(names: Iterable[str], parts: tuple[str, ...]) -> list[str]:
    """Return the names that have one of these parts."""
    return [name for name in names if any(part in name for part in parts)]


def _jax_primitives() -> "set[Primitive]":
    """Return the primitives that JAX's own modules define.

    They are known by identity, as anybody may give a primitive any name.
    """
    # This import brings Pallas along, which `wflmc plan` need not wait for.
    from jax.extend.core import Primitive

    primitives = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("jax."):
            values = list(getattr(module, "__dict__", {}).values())
            primitives |= {value for value in values if isinstance(value, Primitive)}
    return primitives


def _shared_keys(equations: "Iterable[JaxprEqn]") -> list[str]:
    """Return the types of random keys whose generator is not an independent one."""
    types = set()
    for equation in equations:
        for variable in (*equation.invars, *equation.outvars):
            types.add(getattr(variable.aval, "dtype", None))
    keys = {dtype for dtype in types if _is_random_key(dtype)}
    if not keys:
        return []
    shared = keys - _independent_keys()
    return sorted(f"random keys of type {dtype}" for dtype in shared)


def _is_random_key(dtype: np.dtype | None) -> bool:
    """Return whether a type is that of random keys; None is not."""
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _independent_keys() -> set[np.dtype]:
    """Return the key types of `INDEPENDENT_GENERATORS` that this version of JAX has."""
    types = set()
    for generator in INDEPENDENT_GENERATORS:

        def make_key(seed: jax.Array, generator: str = generator) -> jax.Array:
            return jax.random.key(seed, impl=generator)

        try:
            types.add(jax.eval_shape(make_key, 0).dtype)
        except (ValueError, TypeError, NotImplementedError):
            continue
    return types
