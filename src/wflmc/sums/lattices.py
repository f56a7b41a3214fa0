r"""Sums that are the same in any order (docs/explanation/privacy.md, Sums, step 5).

Terms are rounded to multiples of a power of two: so fine that a term moves by at most
n² 2⁻⁴⁶ of a public bound, and so coarse that float32 holds both parts of every partial
sum. A term that changes then moves the sum by its own change and rounding alone.
"""

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.sums.pairs import Pair, as_pair, plus, two_sum

LOW_PART_BOUND = 2.0**-22
"""Bound on the low part of a pair, over that of the pair."""
SMALLEST_EXPONENT = -126
"""Of the powers of two that float32 holds in full."""
EXPONENT_BIAS = 127
"""What is added to the exponent of a float32 number in its bits."""
MANTISSA_BITS = 23
"""Bits of a float32 number below its exponent."""


def lattice_sum(terms: jax.Array, axis: int, bound: jax.Array) -> Pair:
    """Return Σ terms along an axis, the same in any order (Sums, step 5).

    A term that changes moves the sum by its own change and by at most n² 2⁻⁴⁶ of the
    bound in every coordinate; all other terms are added without error. A single term is
    returned as it is.

    Args:
        terms: float32 [..., n, ...].
        axis: that of the n terms.
        bound: public; no term exceeds it. One number, or an array that broadcasts to
            `terms`, with length 1 along `axis`: sums on lattices of their own. Where it
            is infinite nothing is promised, and terms are added as they are.

    Returns:
        The sum without that axis.
    """
    count = terms.shape[axis]
    if count == 1:
        return as_pair(jnp.squeeze(terms, axis))
    total = sum_parts(lattice_parts(terms, count, bound), axis)
    return two_sum(total.high, total.low)


def lattice_sum_of_pairs(terms: Pair, axis: int, bound: jax.Array) -> Pair:
    """Return Σ of pairs along an axis, the same in any order (Sums, step 5).

    The high parts and the low parts are added on lattices of their own: a low part is
    at most 2⁻²² of the bound.

    Args:
        terms: pairs [..., n, ...].
        axis: that of the n terms.
        bound: public; no term exceeds it; of a shape as of `lattice_sum`.

    Returns:
        The sum without that axis, as a pair.
    """
    high = lattice_sum(terms.high, axis, bound)
    low = lattice_sum(terms.low, axis, bound * LOW_PART_BOUND)
    return plus(high, low)


def lattice_parts(terms: jax.Array, count: int, bound: jax.Array) -> Pair:
    r"""Return terms as multiples of two powers of two, high + low.

    With $2^E > n \cdot \mathrm{bound}$, high is a multiple of $2^{E-23}$ and low one of
    $2^{E-47+\lceil\log_2 n\rceil}$: float32 adds n of either without error.

    Args:
        terms: float32 [...].
        count: n, how many terms are added in all.
        bound: public; no term exceeds it; of a shape as of `lattice_sum`.

    Returns:
        The two parts, each of the shape of `terms`.
    """
    if terms.dtype != jnp.float32:
        return as_pair(terms)
    largest_sum = jnp.asarray(bound, jnp.float32) * count
    usable = jnp.isfinite(largest_sum) & (largest_sum > 0)
    bits = jax.lax.bitcast_convert_type(largest_sum, jnp.int32)
    exponent = (bits >> MANTISSA_BITS) - (EXPONENT_BIAS - 1)  # largest_sum < 2^exponent
    high = jnp.where(usable, _on_lattice(terms, exponent - 23), terms)
    log_count = int(np.ceil(np.log2(count)))
    low = _on_lattice(terms - high, exponent - 47 + log_count)
    return Pair(high, jnp.where(usable, low, 0.0))


def sum_parts(parts: Pair, axis: int) -> Pair:
    """Return the sums of the high parts and of the low parts along an axis.

    One reduction does both; two of them take XLA on a CPU far longer. Nothing is
    carried from one part to the other: on lattices float32 adds either without error.

    Args:
        parts: of `lattice_parts`.
        axis: that of the terms.

    Returns:
        The two sums, without that axis.
    """
    zero = np.zeros((), parts.high.dtype)
    axes = (axis % parts.high.ndim,)

    def add(
        x: tuple[jax.Array, jax.Array],
        y: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        return x[0] + y[0], x[1] + y[1]

    high, low = jax.lax.reduce((parts.high, parts.low), (zero, zero), add, axes)
    return Pair(high, low)


def _on_lattice(values: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return values rounded to multiples of 2^exponent, or of 2⁻¹²⁶ if that is more."""
    exponent = jnp.maximum(exponent, SMALLEST_EXPONENT)
    up = _power_of_two(-exponent)
    down = _power_of_two(exponent)
    return jnp.round(values * up) * down


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2^exponent as a float32 number."""
    bits = (exponent + EXPONENT_BIAS) << MANTISSA_BITS
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
