"""Pairs of float32 numbers: arithmetic with 46 bits.

The step of the proof is 2 in docs/explanation/privacy.md, "Sums in floating point".

A pair stands for the number high + low. Accelerators are fast with float32 alone, and
float64 on a host would need all gradients there.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Arrays = TypeVar("Arrays", jax.Array, list[jax.Array])

LOWEST_FINITE = -3.3e38
"""Below every number that sums of clipped gradients meet."""

LEADING_BITS = -4096
"""Mask of a float32's sign, exponent and first 12 bits; int32 in two's complement."""


class Pair(NamedTuple):
    """A number that float32 would round, as the sum of two float32 numbers."""

    high: jax.Array
    """The number, rounded to float32."""
    low: jax.Array
    """What rounding left out."""

    @property
    def rounded(self) -> jax.Array:
        """Return the float32 number next to high + low.

        For a normalised pair, as all functions here return, that is `high` itself; the
        sum also serves pairs whose low part has grown.
        """
        return self.high + self.low

    @property
    def double(self) -> NDArray[np.float64]:
        """Return high + low in float64, on the host, without error.

        The host waits for the accelerator. Tests compare pairs with float64 references
        by it.
        """
        return np.asarray(self.high, np.float64) + np.asarray(self.low, np.float64)


def as_pair(value: jax.Array) -> Pair:
    """Return a float32 number as a pair whose low part is zero.

    The pair stands for exactly that number. It is how float32 sums, such as those of a
    block of records, enter the arithmetic of pairs.

    Args:
        value: float32, of any shape.
    """
    return Pair(value, jnp.zeros_like(value))


def two_sum(a: jax.Array, b: jax.Array) -> Pair:
    r"""Return a + b without error (Knuth; docs/explanation/privacy.md, Sums, step 2).

    $$h = a \oplus b,\quad t = h \ominus a,\quad
      l = (a \ominus (h \ominus t)) \oplus (b \ominus t),\quad h + l = a + b.$$

    Args:
        a: float32.
        b: float32, of the same shape.

    Returns:
        The pair (h, l).
    """
    a = computed_once(a)
    b = computed_once(b)
    high = a + b
    part = high - a
    low = (a - (high - part)) + (b - part)
    return Pair(high, low)


def plus(a: Pair, b: Pair) -> Pair:
    """Return a + b with an error below 2⁻⁴⁶ of the larger (Sums, step 2).

    The high parts are added without error; what that leaves is added to the low parts
    in float32, and the result is normalised.

    Args:
        a: a pair.
        b: a pair of the same shape.

    Returns:
        The sum as a pair.
    """
    high, low = two_sum(a.high, b.high)
    return two_sum(high, low + (a.low + b.low))


def times(factor: jax.Array, value: Pair) -> Pair:
    """Return factor · value with a relative error below 2⁻⁴⁵ (Sums, step 2).

    Float32 holds products of 12-bit halves, so the four products of the halves of
    `factor` and of `value.high` have no error; only their sums have.

    Args:
        factor: float32.
        value: a pair of the same shape.

    Returns:
        The product as a pair.
    """
    factor = jnp.asarray(factor, value.high.dtype)
    if value.high.dtype != jnp.float32:
        return Pair(factor * value.high, factor * value.low)
    a = _halves(computed_once(factor))
    b = _halves(computed_once(value.high))
    cross = two_sum(a.high * b.low, a.low * b.high)
    remainder = cross.low + (a.low * b.low + factor * value.low)
    return plus(as_pair(a.high * b.high), two_sum(cross.high, remainder))


def squared(value: Pair) -> Pair:
    """Return the square of a pair, as a pair.

    With value = h + l it is h·(h + l) + h·l, where the last product is rounded to
    float32 and l² is left out, as both are below 2⁻⁴⁵ of the square.

    Args:
        value: a normalised pair.
    """
    return plus(times(value.high, value), as_pair(value.high * value.low))


def sum_pairs(terms: Pair, axes: tuple[int, ...]) -> Pair:
    """Return the sum of pairs along axes, by halves of what remains.

    The first half is added to the second until one pair is left: log₂ n steps. In one
    reduction XLA could not vectorize the pairs' arithmetic.

    Args:
        terms: pairs [...].
        axes: which axes to sum over.

    Returns:
        Pairs without these axes.
    """
    leading = tuple(range(len(axes)))

    def flattened(part: jax.Array) -> jax.Array:
        kept_shape = np.delete(part.shape, axes)
        return jnp.moveaxis(part, axes, leading).reshape(-1, *kept_shape)

    high = flattened(terms.high)
    low = flattened(terms.low)
    while len(high) > 1:
        to_even = [(0, len(high) % 2), *[(0, 0)] * (high.ndim - 1)]
        high = jnp.pad(high, to_even)
        low = jnp.pad(low, to_even)
        half = len(high) // 2
        first = Pair(high[:half], low[:half])
        second = Pair(high[half:], low[half:])
        total = plus(first, second)
        high = barrier(total.high)
        low = barrier(total.low)
    return Pair(high[0], low[0])


def barrier(partial_sums: Arrays) -> Arrays:
    """Return partial sums that are to be added again, unchanged.

    Without a barrier XLA would merge both stages into one long sum, whose error is
    larger. Stages of sums stay apart behind it. A single product or quotient need not:
    where XLA fuses operations, it may compute one anew for each of its uses, without
    rounding where it is added to something. That is harmless for a value that is only
    multiplied, compared or stored, whose every computation rounds alike; only
    `computed_once` holds a product that is added.

    Args:
        partial_sums: an array, or a list of arrays.
    """
    hold = cast(Callable[[Arrays], Arrays], jax.lax.optimization_barrier)
    return hold(partial_sums)


def computed_once(value: jax.Array) -> jax.Array:
    """Return the value itself, rounded once and for all.

    A compiler may compute a product again, unrounded, wherever it is added to something
    (fused multiply-add), and the errors of sums would no longer be those of the same
    sums. It cannot do so behind a maximum, while XLA on CPUs does so behind a barrier.

    Args:
        value: float32, above `LOWEST_FINITE` or not a number.

    Returns:
        The same numbers.
    """
    return jnp.maximum(value, LOWEST_FINITE)


def _halves(value: jax.Array) -> Pair:
    """Return the first 12 bits of a float32 number, and the other 12.

    Bits are masked, not rounded, so that no compiler can take this for superfluous.
    """
    bits = jax.lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(LEADING_BITS)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return Pair(high, value - high)
