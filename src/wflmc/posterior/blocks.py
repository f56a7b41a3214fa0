"""Clipped gradient sums, block by block of devices: working memory that does not grow with their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

CPU_BLOCK = 2**22
"""Bytes of gradients at a time on a CPU: what stays in its cache."""


def filled_up(values: NDArray[Any], block: int) -> Any:
    """values[K, ...] on the device, with zeros for the devices that fill up the last block."""
    missing = -len(values) % block
    return jnp.asarray(np.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)]))


def in_blocks(values: Any, block: int) -> jax.Array:
    """values[K', ...] as [K'/block, block, ...]."""
    return jnp.asarray(values).reshape(-1, block, *values.shape[1:])


def block_size(devices: int, bytes_per_device: float, limit: float) -> int:
    """How many devices to take at a time; in equal blocks, as few of them as the limit allows."""
    if jax.default_backend() == "cpu":
        limit = min(limit, CPU_BLOCK)
    most = int(np.clip(limit // max(1.0, bytes_per_device), 1, devices))
    return -(-devices // -(-devices // most))


def accumulate(
    gradient: Callable[[Any, jax.Array], jax.Array],
    blocks: Any,
    columns: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Σ_k weight_k g_k min(1, ℓ_k/‖g_k‖) for many chains, and the norms ‖g_k‖.

    Args:
        gradient: from one block of data and the columns to the gradients [block, ..., chain] of its devices.
        blocks: data with leading axes [blocks, block].
        columns: parameters [..., chain]; weight, clip: [chain, K].

    Returns:
        The sum [..., chain], and the norms [chain, K].
    """
    count, size = jax.tree.leaves(blocks)[0].shape[:2]

    def by_block(values: jax.Array) -> jax.Array:
        return jnp.pad(values.T, ((0, count * size - values.shape[1]), (0, 0))).reshape(count, size, -1)

    def add(total: jax.Array, part: tuple[Any, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        data, w, limit = part
        found = gradient(data, columns)
        flat = found.reshape(size, -1, found.shape[-1])
        norm = jnp.sqrt(jnp.sum(flat**2, axis=1))
        # A silent device may have no gradient at all: 0/0 is no reason to clip.
        factor = w * jnp.where(norm > limit, limit / norm, 1.0)
        return total + jnp.sum(factor[:, None] * flat, axis=0).reshape(total.shape), norm

    parts = (blocks, by_block(weight), by_block(clip))
    start = jnp.zeros_like(columns)
    if count == 1:
        total, norms = add(start, jax.tree.map(lambda values: values[0], parts))
    else:
        total, norms = jax.lax.scan(add, start, parts)
    return total, norms.reshape(count * size, -1)[: weight.shape[1]].T


def many_chains(function: Callable[..., Any], own: int) -> Callable[..., Any]:
    """A function of one chain whose `vmap` over chains is one call of `function` for all of them.

    Args:
        function: takes data and then `own` arguments with a leading chain axis, and returns values with one.
    """

    @jax.custom_batching.custom_vmap
    def single(*arguments: Any) -> Any:
        chains = [value[None] for value in arguments[-own:]]
        return jax.tree.map(lambda value: value[0], function(*arguments[:-own], *chains))

    @single.def_vmap
    def _(axis_size: int, batched: list[Any], *arguments: Any) -> tuple[Any, Any]:
        if any(jax.tree.leaves(batched[:-own])):
            raise NotImplementedError("vmap over chains of one posterior, not over posteriors")
        chains = [
            value if flag else jnp.broadcast_to(value, (axis_size, *value.shape))
            for value, flag in zip(arguments[-own:], batched[-own:], strict=True)
        ]
        result = function(*arguments[:-own], *chains)
        return result, jax.tree.map(lambda _: True, result)

    return single
