"""Refuse a traced model in which one record could change the gradient of another.

The gradients of many records are computed at once (`jax.vmap`) and then clipped one by one. The clip bounds what a
record adds to the sum only if no record enters the gradient of another one, and if nothing is remembered from record to
record. For the primitives that JAX itself batches this holds: `vmap` computes what a loop over records would compute.
It need not hold for

- operations whose batching, or whose code, somebody else has written: `jax.custom_batching.custom_vmap`, foreign
  functions, Pallas kernels, primitives that a library or a person has added to JAX;
- random bits of the `rbg` generators, which `vmap` draws for all records from the first record's key;
- effects: callbacks, prints, and references to arrays that change.

A trace of the function alone does not show what the rules of `jax.custom_jvp` and `jax.custom_vjp` do, so the trace of
the gradient is to be checked as well.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from wflmc.support.errors import Found, InputError

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
"""Parts of the names of JAX's primitives whose batching, or whose code, comes from elsewhere or cannot be read."""
SHARED_RANDOM_BITS = ("rng_bit_generator", "rng_uniform")
"""Primitives whose random bits for one record depend on the other records, or on the record's place among them."""
INDEPENDENT_GENERATORS = ("threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
"""Random generators of JAX for which `vmap` over keys draws what each key alone would draw."""


def nested_jaxprs(jaxpr: Any) -> Iterator[Any]:
    """Yield a jaxpr and all that its equations call; closed ones have the arrays that they have taken from around."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(value, "eqns"):
                yield from nested_jaxprs(value)


def check_independence(key: str, *jaxprs: Any) -> None:
    """Refuse traced functions of one record that might see other records when many are computed at once.

    Args:
        key: the argument that the functions come from, such as `log_likelihood`.
        jaxprs: traces of the function and of its gradient; of a gradient, the one that is run.

    Raises:
        InputError: where an operation is not batched by JAX's own rules, or has effects.
    """
    equations = [equation for traced in jaxprs for jaxpr in nested_jaxprs(traced) for equation in jaxpr.eqns]
    primitives = {equation.primitive for equation in equations}
    names = sorted(primitive.name for primitive in primitives)
    if _any_contains(names, CALLBACKS):
        raise InputError(key, Found("calls back to Python"), "written in JAX alone: no callbacks, no debug prints")
    if any(traced.effects for traced in jaxprs):
        allowed = "a pure function: what it keeps in a reference would pass from one example to the next"
        raise InputError(key, Found("has effects"), allowed)
    foreign = _any_contains(names, NOT_BATCHED_BY_JAX)
    foreign += sorted(primitive.name for primitive in primitives - _jax_primitives())
    if foreign:
        allowed = (
            "made of operations that JAX batches itself: another rule may let one example change another's gradient"
        )
        raise InputError(key, Found(f"uses {foreign[0]}"), allowed)
    shared = _any_contains(names, SHARED_RANDOM_BITS) + _shared_keys(equations)
    if shared:
        instead = "jax.random.key(seed, impl='threefry2x32')"
        allowed = f"written with keys of {instead}: of others, one example's key may decide the bits of all examples"
        raise InputError(key, Found(f"uses {shared[0]}"), allowed)


def _any_contains(names: Iterable[str], parts: tuple[str, ...]) -> list[str]:
    """Return the names that have one of these parts."""
    return [name for name in names if any(part in name for part in parts)]


def _jax_primitives() -> set[Any]:
    """Return the primitives that JAX's own modules define.

    They are known by identity, as anybody may give a primitive any name.
    """
    from jax.extend.core import Primitive  # brings Pallas along, which `wflmc plan` need not wait for

    modules = [module for name, module in sys.modules.items() if name.startswith("jax.")]
    values = [value for module in modules for value in getattr(module, "__dict__", {}).values()]
    return {value for value in values if isinstance(value, Primitive)}


def _shared_keys(equations: Iterable[Any]) -> list[str]:
    """Return the types of random keys among the equations' values whose generator is not an independent one."""
    types = {getattr(value.aval, "dtype", None) for equation in equations for value in _variables(equation)}
    keys = {dtype for dtype in types if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)}
    return sorted(f"random keys of type {dtype}" for dtype in keys - _independent_keys()) if keys else []


def _variables(equation: Any) -> list[Any]:
    return [*equation.invars, *equation.outvars]


def _independent_keys() -> set[Any]:
    """Return the types of random keys of `INDEPENDENT_GENERATORS`, as far as this version of JAX has them."""
    types = set()
    for generator in INDEPENDENT_GENERATORS:
        try:
            key = jax.eval_shape(lambda seed, generator=generator: jax.random.key(seed, impl=generator), 0)
        except (ValueError, TypeError, NotImplementedError):
            continue
        types.add(key.dtype)
    return types
