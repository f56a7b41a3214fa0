"""Cut an axis into equal parts."""

import jax
import jax.numpy as jnp


def part_size(count: int, largest: int) -> int:
    """Return the length of equal parts, at most `largest`.

    A length that divides the total is preferred, because it saves a copy, unless it is
    less than half of the length of equal parts that do not.

    Args:
        count: the total length.
        largest: the longest part.

    Returns:
        The length of a part.
    """
    fair = -(-count // -(-count // largest))
    divisors = (size for size in range(largest, fair // 2, -1) if count % size == 0)
    return next(divisors, fair)


def split_axis(values: jax.Array, axis: int, largest: int) -> jax.Array:
    """Return an axis in equal parts, filled up with zeros where they do not divide it.

    Zeros change no sum, which is what parts are for. The length of the parts is that of
    `part_size`.

    Args:
        values: [..., n, ...].
        axis: which axis to cut.
        largest: the longest part.

    Returns:
        [..., parts, size, ...].
    """
    axis = axis % values.ndim
    size = part_size(values.shape[axis], largest)
    missing = -values.shape[axis] % size
    if missing:
        widths = [(0, missing * (index == axis)) for index in range(values.ndim)]
        values = jnp.pad(values, widths)
    before = values.shape[:axis]
    after = values.shape[axis + 1 :]
    return values.reshape(*before, -1, size, *after)
