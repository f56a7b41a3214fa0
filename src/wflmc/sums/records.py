"""Sums over the records of a device.

The steps of the proof are 1 and 2 in docs/explanation/privacy.md, "Sums in floating
point".
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wflmc.sums.constants import RECORDS_PER_FLOAT32_SUM
from wflmc.sums.pairs import Pair, as_pair, plus, sum_pairs
from wflmc.sums.parts import split_axis
from wflmc.support.errors import without_data

MOST_UNROLLED_BLOCKS = 8
"""Blocks of records up to which a loop over them is not worth its overhead."""

BlockSum = Callable[..., jax.Array]
"""From a block of every array of records to the float32 sum over the block."""


@without_data
class Records(NamedTuple):
    """An array with one entry for every record."""

    values: jax.Array
    axis: int
    """That of the records."""

    def part(self, start: int, stop: int) -> jax.Array:
        """Return the entries of successive records.

        All other axes stay. The bounds are numbers of the program, not traced values,
        so that the result has a known shape.

        Args:
            start: index of the first record.
            stop: index behind the last one, at most `number`.
        """
        return jax.lax.slice_in_dim(self.values, start, stop, axis=self.axis)

    @property
    def number(self) -> int:
        """Return n, the number of records, those that only fill up a device included.

        All arrays of one sum must have equally many. It is known when the program is
        compiled, and decides how the sum is cut.
        """
        return int(self.values.shape[self.axis])

    @property
    def is_of_one_device(self) -> bool:
        """Return whether records come after an axis of devices of length 1.

        Such arrays are cut into blocks without moving an axis, which XLA would do by a
        copy of all data.
        """
        return self.axis == 1 and self.values.shape[0] == 1


def sum_records(add_block: BlockSum, like: jax.Array, *records: Records) -> Pair:
    """Return Σ over records: float32 adds 256, pairs add these sums (Sums, steps 1, 2).

    Records are cut into blocks of at most 256. Few blocks are unrolled; many are a
    loop, whose memory is that of one block.

    Args:
        add_block: the float32 sum of a block, from a block of each of `records`.
        like: an array of the sum's shape and type.
        *records: arrays of equally many records.

    Returns:
        The sum as a pair.
    """
    count = records[0].number
    if count <= RECORDS_PER_FLOAT32_SUM:
        return as_pair(add_block(*(array.values for array in records)))
    if count <= MOST_UNROLLED_BLOCKS * RECORDS_PER_FLOAT32_SUM:
        return _sum_few_blocks(add_block, records)
    return _sum_many_blocks(add_block, like, records)


def sum_steps(step_sums: jax.Array) -> Pair:
    """Return the sum of float32 sums over steps of records, in pairs (Sums, step 2).

    Few steps are added one after the other, which XLA does in one pass over them; many
    by halves.

    Args:
        step_sums: [block, steps, ...].

    Returns:
        [block, ...].
    """
    steps = step_sums.shape[1]
    if steps > MOST_UNROLLED_BLOCKS:
        return sum_pairs(as_pair(step_sums), (1,))
    return functools.reduce(plus, [as_pair(step_sums[:, i]) for i in range(steps)])


def _sum_few_blocks(add_block: BlockSum, records: tuple[Records, ...]) -> Pair:
    """Return the sum over few blocks, without a loop."""
    count = records[0].number
    sums = []
    for start in range(0, count, RECORDS_PER_FLOAT32_SUM):
        stop = min(start + RECORDS_PER_FLOAT32_SUM, count)
        block = [array.part(start, stop) for array in records]
        sums.append(as_pair(add_block(*block)))
    return functools.reduce(plus, sums)


def _sum_many_blocks(
    add_block: BlockSum,
    like: jax.Array,
    records: tuple[Records, ...],
) -> Pair:
    """Return the sum over many blocks, by a loop."""
    # XLA would copy all data to move an axis of length 1 out of the way.
    one_device = all(array.is_of_one_device for array in records)
    if one_device:
        size = RECORDS_PER_FLOAT32_SUM
        blocks = tuple(split_axis(array.values[0], 0, size) for array in records)
    else:
        blocks = tuple(_blocks_first(array) for array in records)

    def step(total: Pair, block: tuple[jax.Array, ...]) -> tuple[Pair, None]:
        arrays = [values[None] for values in block] if one_device else block
        return plus(total, as_pair(add_block(*arrays))), None

    total, _ = jax.lax.scan(step, as_pair(jnp.zeros_like(like)), blocks)
    return total


def _blocks_first(array: Records) -> jax.Array:
    """Return an array cut into blocks of records, with the blocks along axis 0."""
    split = split_axis(array.values, array.axis, RECORDS_PER_FLOAT32_SUM)
    return jnp.moveaxis(split, array.axis, 0)
