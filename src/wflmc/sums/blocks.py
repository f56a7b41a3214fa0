"""Go through devices block by block: memory does not grow with their number."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.sums.constants import (
    CPU_CACHE_BYTES,
    DEVICES_PER_FLOAT32_SUM,
    DEVICES_PER_LATTICE,
)
from wflmc.sums.devices import Sum
from wflmc.sums.pairs import plus, two_sum
from wflmc.sums.parts import part_size
from wflmc.support.trees import NumericArray


class DeviceInputs(NamedTuple):
    """What devices have to know in a round, beside their data.

    Arrays are [chain, K, ...], or [1, K, ...] where all chains have the same; those of
    a block of devices are [chain, block, ...].
    """

    weight: jax.Array
    """w; 0 for a device that does not transmit."""
    clip: jax.Array
    """ℓ, the clipping threshold of a device's gradient."""
    example_clip: jax.Array | None = None
    """c, the clipping threshold of a record; None where records are not clipped."""
    theta: jax.Array | None = None
    """θ as each device received it, [chain, K, m]; None where all received the same."""


Blocks = TypeVar("Blocks")
"""The data of devices: a pytree of arrays with leading axes [blocks, block], such as
`DeviceRecords`; or the numbers of the devices, by which a block's data are looked up."""
AddBlock = Callable[[Sum, Blocks, DeviceInputs], tuple[Sum, jax.Array]]
"""From the sum so far, the data of a block of devices, and its part of the inputs, to
the new sum and numbers of every device, such as norms, [chain, block]."""


def pad_to_blocks(
    values: np.ndarray,
    block: int,
    devices_per_group: int = DEVICES_PER_FLOAT32_SUM,
) -> jax.Array:
    """Return values on the accelerator, with zeros for devices that fill up a group.

    Loops over blocks and groups then need no case of their own for the last one. The
    added devices have weight 0 in every round, and so add nothing.

    Args:
        values: [K, ...].
        block: devices of a block.
        devices_per_group: of `blocks_per_group`.

    Returns:
        [K', ...] with K' a multiple of a group's devices.
    """
    group = block * blocks_per_group(len(values), block, devices_per_group)
    missing = -len(values) % group
    if missing:
        widths = [(0, missing), *[(0, 0)] * (values.ndim - 1)]
        values = np.pad(values, widths)
    return jax.device_put(values)


def split_blocks(values: NumericArray, block: int) -> jax.Array:
    """Return values of devices by block, as loops go through them.

    Nothing is copied: successive devices share a block. The number of devices must be a
    multiple of the block's, which `pad_to_blocks` sees to.

    Args:
        values: [K', ...].
        block: devices of a block.

    Returns:
        [K'/block, block, ...].
    """
    return jnp.asarray(values).reshape(-1, block, *values.shape[1:])


def blocks_per_group(
    devices: int,
    block: int,
    devices_per_group: int = DEVICES_PER_FLOAT32_SUM,
) -> int:
    """Return how many blocks are added to one another before a pair takes over.

    A group has at most `devices_per_group` devices, which is what the bound of its
    float32 sum is computed for, or one block where that alone has more. A number that
    divides the number of blocks is preferred.

    Args:
        devices: K.
        block: devices of a block.
        devices_per_group: the most devices of a group.

    Returns:
        Blocks of a group; 1 where float32 adds all devices anyway.
    """
    if devices_per_group == DEVICES_PER_FLOAT32_SUM and devices <= devices_per_group:
        return 1
    blocks = -(-devices // block)
    return part_size(blocks, max(1, devices_per_group // block))


def block_size(
    devices: int,
    *,
    bytes_per_device: float,
    theta_bytes: float,
    limit: float,
    largest: int = DEVICES_PER_LATTICE,
) -> int:
    """Return how many devices to take at a time: equal blocks, as few as memory allows.

    A block of more than 128 devices is a multiple of the parts that `add_devices` cuts
    it into, which then need no filling up.

    Args:
        devices: K.
        bytes_per_device: working memory that a device needs.
        theta_bytes: those of θ of all chains, which each block reads; on a CPU a block
            may take as much, or what its cache holds.
        limit: bytes of a block.
        largest: devices of a block, by the proof.

    Returns:
        Devices of a block: at most K, at most `largest`, and no more than `limit`
        allows, but at least one.
    """
    if jax.default_backend() == "cpu":
        limit = min(limit, max(CPU_CACHE_BYTES, theta_bytes))
    affordable = limit // max(1.0, bytes_per_device)
    largest = int(np.clip(affordable, 1, min(devices, largest)))
    blocks = -(-devices // largest)
    size = _whole_parts(-(-devices // blocks))
    while size > largest:
        blocks += 1
        size = _whole_parts(-(-devices // blocks))
    return size


def _whole_parts(size: int) -> int:
    """Return a size of blocks that is a multiple of their parts; not smaller."""
    part = part_size(size, DEVICES_PER_FLOAT32_SUM)
    return -(-size // part) * part


def scan_blocks(
    add: AddBlock[Blocks],
    blocks: Blocks,
    start: Sum,
    inputs: DeviceInputs,
) -> tuple[Sum, jax.Array]:
    """Add devices to a sum, one block after the other.

    Memory is that of one block: the sum is carried, and the numbers of every device,
    such as norms, are collected. Devices that fill up the last block get inputs of 0.

    Args:
        add: adds a block.
        blocks: data with leading axes [blocks, block].
        start: what is added to.
        inputs: of every device.

    Returns:
        The sum, and the devices' numbers [chain, K].
    """
    body = _scan_body(add, blocks, inputs.theta)
    scanned = _scanned(blocks, inputs)
    total, numbers = jax.lax.scan(body, start, scanned)
    return total, _by_device(numbers, inputs)


def scan_float32_groups(
    add: AddBlock[Blocks],
    blocks: Blocks,
    start: Sum,
    inputs: DeviceInputs,
) -> tuple[Sum, jax.Array]:
    """Add devices that are protected as a whole; float32 adds 128 (Sums, step 5).

    Blocks are added to one another in groups of at most 128 devices, and the groups in
    pairs. With no more than 128 devices in all there are no pairs.

    Args:
        add: adds a block.
        blocks: data with leading axes [blocks, block].
        start: of `zero_sum`, which knows whether there are pairs.
        inputs: of every device.

    Returns:
        The sum, and the devices' numbers [chain, K].
    """
    devices = inputs.weight.shape[1]
    block = jax.tree.leaves(blocks)[0].shape[1]
    group = blocks_per_group(devices, block)
    if start.low is None or group == 1:
        return scan_blocks(add, blocks, start, inputs)
    zero = Sum(jnp.zeros_like(start.high))
    return scan_groups(add, blocks, start, inputs, group=group, group_start=zero)


def scan_groups(
    add: AddBlock[Blocks],
    blocks: Blocks,
    start: Sum,
    inputs: DeviceInputs,
    *,
    group: int,
    group_start: Sum,
) -> tuple[Sum, jax.Array]:
    """Add devices of a group of blocks to one another, and groups to a pair.

    Args:
        add: adds a block to the sum of its group.
        blocks: data with leading axes [blocks, block].
        start: a pair, which groups are added to.
        inputs: of every device.
        group: how many blocks are a group.
        group_start: what the first block of a group is added to.

    Returns:
        The sum, and the devices' numbers [chain, K].
    """
    body = _scan_body(add, blocks, inputs.theta)
    scanned = _scanned(blocks, inputs)

    def add_group(
        total: Sum,
        part: tuple[Blocks, DeviceInputs, jax.Array],
    ) -> tuple[Sum, jax.Array]:
        group_sum, numbers = jax.lax.scan(body, group_start, part)
        return Sum(*plus(total.pair, two_sum(*group_sum.pair))), numbers

    count = jax.tree.leaves(blocks)[0].shape[0]
    if group == count:
        total, numbers = add_group(start, scanned)
        return total, _by_device(numbers, inputs)
    groups = jax.tree.map(lambda values: _grouped(values, group), scanned)
    total, numbers = jax.lax.scan(add_group, start, groups)
    flat = numbers.reshape(-1, *numbers.shape[2:])
    return total, _by_device(flat, inputs)


def _grouped(values: jax.Array, group: int) -> jax.Array:
    """Return values[blocks, ...] as [groups, group, ...], filled up with zeros."""
    missing = -len(values) % group
    if missing:
        values = jnp.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)])
    return values.reshape(-1, group, *values.shape[1:])


def _scanned(
    blocks: Blocks,
    inputs: DeviceInputs,
) -> tuple[Blocks, DeviceInputs, jax.Array]:
    """Return data, inputs and numbers of blocks, with the blocks along the first axis.

    Without θ, which may be larger than all else: it is not taken apart. Blocks of one
    device lose their axis of length 1: a loop over it would make XLA copy all data.
    """
    count, block = jax.tree.leaves(blocks)[0].shape[:2]

    def by_block(values: jax.Array) -> jax.Array:
        chains, devices, *trailing = values.shape
        missing = count * block - devices
        widths = [(0, 0), (0, missing), *[(0, 0)] * len(trailing)]
        padded = jnp.pad(values, widths)
        by_chain = padded.reshape(chains, count, block, *trailing)
        return by_chain.swapaxes(0, 1)

    if block == 1:
        blocks = jax.tree.map(
            lambda values: values.reshape(count, *values.shape[2:]),
            blocks,
        )
    by_blocks: DeviceInputs = jax.tree.map(by_block, inputs._replace(theta=None))
    return blocks, by_blocks, jnp.arange(count)


def _scan_body(
    add: AddBlock[Blocks],
    blocks: Blocks,
    theta: jax.Array | None,
) -> Callable[[Sum, tuple[Blocks, DeviceInputs, jax.Array]], tuple[Sum, jax.Array]]:
    """Return the body of a loop over what `_scanned` returns.

    Args:
        add: adds a block.
        blocks: data with leading axes [blocks, block].
        theta: θ as each device received it, [chain, K, m]; None where all received the
            same.
    """
    count, block = jax.tree.leaves(blocks)[0].shape[:2]
    if theta is not None and theta.shape[1] < count * block:
        missing = count * block - theta.shape[1]
        theta = jnp.pad(theta, ((0, 0), (0, missing), (0, 0)))

    def body(
        total: Sum,
        part: tuple[Blocks, DeviceInputs, jax.Array],
    ) -> tuple[Sum, jax.Array]:
        data, inputs, number = part
        if block == 1:
            data = jax.tree.map(lambda values: values[None], data)
        if theta is not None:
            received = jax.lax.dynamic_slice_in_dim(theta, number * block, block, 1)
            inputs = inputs._replace(theta=received)
        return add(total, data, inputs)

    return body


def _by_device(numbers: jax.Array, inputs: DeviceInputs) -> jax.Array:
    """Return numbers[blocks, chain, block] as [chain, K], without devices that pad."""
    devices = inputs.weight.shape[1]
    return numbers.swapaxes(0, 1).reshape(numbers.shape[1], -1)[:, :devices]
