"""Clipped gradient sums, block by block of devices: working memory that does not grow with their number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.sums.pairs import DEVICES, FEW, LONGEST, Sum, as_pair, part_size, plus, sum_squares, two_sum

SHORTEST = 2.0**-100
"""Numbers below it are nothing beside any clip."""
CPU_BLOCK = 2**22
"""Bytes of gradients at a time on a CPU: what stays near its cache. Where θ is larger, as much as θ: each block reads
all of it."""


def pad_to_blocks(values: NDArray[Any], block: int, most: int = FEW) -> Any:
    """Return values[K, ...] on the accelerator, with zeros for the devices that fill up the last group of blocks."""
    missing = -len(values) % (block * grouped(len(values), block, most))
    return jax.device_put(np.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)]) if missing else values)


def split_blocks(values: Any, block: int) -> jax.Array:
    """Return values[K', ...] as [K'/block, block, ...]."""
    return jnp.asarray(values).reshape(-1, block, *values.shape[1:])


def grouped(devices: int, block: int, most: int = FEW) -> int:
    """Return how many blocks of devices are a group: at most so many devices are added before a pair takes over."""
    return 1 if devices <= FEW == most else part_size(-(-devices // block), max(1, most // block))


def block_size(devices: int, bytes_per_device: float, theta_bytes: float, limit: float, most: int = DEVICES) -> int:
    """Return how many devices to take at a time; in equal blocks, as few of them as the limit allows."""
    if jax.default_backend() == "cpu":
        limit = min(limit, max(CPU_BLOCK, theta_bytes))
    most = int(np.clip(limit // max(1.0, bytes_per_device), 1, min(devices, most)))
    size = -(-devices // -(-devices // most))
    part = part_size(size, FEW)
    return -(-size // part) * part


def scan_blocks(
    add: Callable[..., tuple[Any, jax.Array]],
    blocks: Any,
    start: Any,
    *limits: jax.Array,
    together: int = 0,
    zero: Sum | None = None,
) -> tuple[Any, jax.Array]:
    """Return a sum over devices, one block after the other.

    Args:
        add: from the sum so far, a block's data, and its part of each of `limits`, [chain, block], to the new sum and
            the norms of the block's gradients, [chain, block].
        blocks: data with leading axes [blocks, block].
        limits: weights, clips: [chain, K], or [1, K] where all chains have the same; [chain, K, m] if each has more.
        together: so many devices may be added to one another before a pair takes their sum over; 0: to the pair.
        zero: what they are added to, where that is not a float32.

    Returns:
        The sum, and the norms [chain, K].
    """
    count, size = jax.tree.leaves(blocks)[0].shape[:2]
    devices = limits[0].shape[1]

    def by_block(values: jax.Array) -> jax.Array:
        rest = values.shape[2:]
        padded = jnp.pad(values, ((0, 0), (0, count * size - devices), *[(0, 0)] * len(rest)))
        return padded.reshape(values.shape[0], count, size, *rest).swapaxes(0, 1)

    if size == 1:  # a loop over axes of length 1 would make XLA copy all data
        blocks = jax.tree.map(lambda values: values.reshape(count, *values.shape[2:]), blocks)

    def body(total: Any, part: tuple[Any, tuple[jax.Array, ...]]) -> tuple[Any, jax.Array]:
        data = jax.tree.map(lambda values: values[None], part[0]) if size == 1 else part[0]
        return add(total, data, *part[1])

    parts = blocks, tuple(by_block(values) for values in limits)
    group = grouped(devices, size, together) if together and isinstance(start, Sum) else 1
    if group == 1 and zero is None:
        total, norms = jax.lax.scan(body, start, parts)
        return total, norms.swapaxes(0, 1).reshape(norms.shape[1], -1)[:, :devices]

    def add_group(total: Sum, part: Any) -> tuple[Sum, jax.Array]:
        some, norms = jax.lax.scan(body, jnp.zeros_like(total.high) if zero is None else zero, part)
        return plus(total, two_sum(*as_pair(some))), norms

    if group == count:
        (total, norms) = add_group(start, parts)
        return total, norms.swapaxes(0, 1).reshape(norms.shape[1], -1)[:, :devices]
    groups = jax.tree.map(lambda values: values.reshape(-1, group, *values.shape[1:]), parts)
    total, norms = jax.lax.scan(add_group, start, groups)
    return total, jnp.moveaxis(norms, 2, 0).reshape(norms.shape[2], -1)[:, :devices]


def clip_factor(weight: jax.Array, clip: jax.Array, norm: jax.Array) -> jax.Array:
    """Return weight · min(1, clip/norm); a device may have no gradient at all, and 0/0 is no reason to clip.

    A norm that is not a number is no reason to send unclipped: it spreads, and the sampler stops.
    """
    return weight * jnp.where(norm <= clip, 1.0, clip / norm)


def row_norms(rows: jax.Array) -> jax.Array:
    """Return ‖u‖ of rows[..., d], whose squares may be too small for float32.

    It is infinite above `LONGEST`, 0 where no coordinate reaches `SHORTEST`, and not a number where one is not finite.
    """
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    # XLA may multiply by an inverse, which the largest and the smallest numbers do not have.
    usable = (largest >= SHORTEST) & (largest <= LONGEST)
    scaled = rows / jnp.where(usable, largest, 1.0)
    norms = largest[..., 0] * jnp.sqrt(sum_squares(scaled))
    too_long = jnp.where(jnp.isfinite(largest[..., 0]), jnp.inf, jnp.nan)
    return jnp.where(norms <= LONGEST, norms, too_long)


def batch_chains(function: Callable[..., Any], chain_arguments: int) -> Callable[..., Any]:
    """Return a function of one chain whose `vmap` over chains is one call of `function` for all of them.

    Args:
        function: takes data and then arguments with a leading chain axis, and returns values with one; all but the
            first of them have length 1 there where they are the same for all chains.
        chain_arguments: how many.
    """

    last = slice(-chain_arguments, None)

    def one_chain(*arguments: Any) -> Any:
        chains = [value[None] for value in arguments[last]]
        return jax.tree.map(lambda value: value[0], function(*arguments[:-chain_arguments], *chains))

    single = jax.custom_batching.custom_vmap(one_chain)

    @single.def_vmap
    def _(axis_size: int, batched: list[Any], *arguments: Any) -> tuple[Any, Any]:
        if any(jax.tree.leaves(batched[:-chain_arguments])):  # as many data sets as chains: nothing to share
            axes = jax.tree.map(lambda flag: 0 if flag else None, list(batched))
            result = jax.vmap(one_chain, axes)(*arguments)
            return result, jax.tree.map(lambda _: True, result)
        chains = [value if flag else value[None] for value, flag in zip(arguments[last], batched[last], strict=True)]
        chains[0] = jnp.broadcast_to(chains[0], (axis_size, *chains[0].shape[1:]))
        result = function(*arguments[:-chain_arguments], *chains)
        return result, jax.tree.map(lambda _: True, result)

    return single
