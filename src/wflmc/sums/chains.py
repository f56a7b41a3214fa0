"""Compute all chains of a `vmap` in one call."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")
"""A pytree of arrays."""


def batch_chains(
    function: Callable[..., Result],
    chain_arguments: int,
) -> Callable[..., Result]:
    """Return a function of one chain whose `vmap` is one call for all chains.

    The sampler's kernel is written for one chain and mapped over chains; this way its
    sums become matrix products with all of them. Where the data are mapped too, as in
    coverage studies with a data set for each chain, nothing is shared and `vmap` acts
    as usual.

    Args:
        function: takes data, then `chain_arguments` arrays with a leading chain axis,
            and returns arrays with one. The first of these arrays always has the full
            axis, by which `function` knows how many chains there are; in each other
            one the axis has length 1 where all chains have the same.
        chain_arguments: how many of the last arguments are a chain's own.

    Returns:
        A function of data and of the arguments of one chain, without a chain axis.
    """
    last = slice(-chain_arguments, None)
    first = slice(None, -chain_arguments)

    def one_chain(*arguments: Any) -> Result:
        chains = [value[None] for value in arguments[last]]
        result = function(*arguments[first], *chains)
        chain_result: Result = jax.tree.map(lambda value: value[0], result)
        return chain_result

    single = jax.custom_batching.custom_vmap(one_chain)

    @single.def_vmap
    def _(axis_size: int, batched: list[Any], *arguments: Any) -> tuple[Result, Result]:
        if any(jax.tree.leaves(batched[first])):
            # As many data sets as chains: there is nothing to share.
            axes = jax.tree.map(lambda flag: 0 if flag else None, list(batched))
            result = jax.vmap(one_chain, axes)(*arguments)
        else:
            flags = zip(arguments[last], batched[last], strict=True)
            chains = [value if flag else value[None] for value, flag in flags]
            # The first one says how many chains there are.
            shape = (axis_size, *chains[0].shape[1:])
            chains[0] = jnp.broadcast_to(chains[0], shape)
            result = function(*arguments[first], *chains)
        return result, jax.tree.map(lambda _: True, result)

    return single
