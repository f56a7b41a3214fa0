"""Sums whose sensitivity is what is claimed: the one place that says how clipped gradients are added.

A float32 sum of many clipped gradients is more sensitive than an exact one: a changed record may put the running sum on
the other side of a power of two, and records that come later are then rounded away for one neighbour and not for the
other (Casacuberta et al., CCS 2022). Here float32 adds at most `ROWS` records at a time. Blocks of records, devices and
the prior's share are added as pairs of float32, and noise comes before the pair is rounded to one. `rounding` bounds
how much the sensitivity grows by all of that; clips act at so much less (docs/privacy.md has the proof).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.support.errors import InputError

UNIT = 2.0**-24
"""Unit roundoff of float32."""
ROWS = 256
"""Records that float32 adds."""
DEVICES = 4096
"""Devices that are added to a pair at a time."""
STAGE, RECORD_STAGE = 32, 4096
"""Squares that float32 adds; their sums are added again. Of a record, more: its norm's error is not multiplied by how
much more a device may send than a record."""
FEW = 128
"""Devices that float32 adds where any one of them may change as a whole."""
PRODUCTS = 256
"""Sums of rows of many devices that are added on one lattice."""
PAIRS = 1024
"""Records of a device above which all that it does is done in pairs."""
CANCELLING = 4.0
"""How far the rows of a device of few rows may cancel; it is clipped as if they did not cancel further."""
CLIP_PAIRS_ERROR = 2.0**-40
"""Relative error of `clip_pairs`."""
LARGEST_ROUNDING = 0.05
"""What a plan does not go beyond."""
LOST_SQUARE = 2.0**-124
"""More than float32 loses of a square that is too small for it, and of the sums that it is added in: numbers below
2⁻¹²⁶, which many processors take for zero."""
LOST_NORM = 2.0**-117
"""More than the squares that are lost of a device's norm, over the number of parameters, also where the norm is that of
products of rows."""
LONGEST = 2.0**60
"""The longest row of features, and the longest gradient, that norms are taken of; a longer one adds nothing. Float32
holds its square, and the quotient of the smallest clip and its norm."""
LONGEST_PRIOR = 2.0**58
"""The longest share of the prior's gradient, and the longest sum of clipped records beside it."""


class Sum(NamedTuple):
    """A number that float32 would round, as the sum of two that it holds."""

    high: jax.Array
    low: jax.Array

    @property
    def double(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """On the host, in float64."""
        return np.asarray(self.high, np.float64) + np.asarray(self.low, np.float64)

    @property
    def rounded(self) -> jax.Array:
        """The one float32 next to it."""
        return self.high + self.low


Total = Sum | jax.Array
"""A sum over devices: a pair, or a float32 where there are few devices that are hidden as a whole."""


ClippedSum = tuple[Total, jax.Array]
"""A sum over devices, and the norm of each device's gradient before clipping, [K]."""


def as_pair(value: Total) -> Sum:
    """Return a float32 as a pair."""
    return value if isinstance(value, Sum) else Sum(value, jnp.zeros_like(value))


def _rounded(value: jax.Array) -> jax.Array:
    """Return the value itself, once and for all.

    Compilers may compute a product anew, unrounded, wherever it is added to something (fused multiply-add), and the
    errors of sums would no longer be those of the same sums. They cannot do so behind a maximum; nothing is ever as
    small as this one.
    """
    return jnp.maximum(value, -3.3e38)


def two_sum(a: jax.Array, b: jax.Array) -> Sum:
    """Return a + b without any error (Knuth)."""
    a, b = _rounded(a), _rounded(b)
    high = a + b
    part = high - a
    return Sum(high, (a - (high - part)) + (b - part))


def plus(total: Sum, more: Sum) -> Sum:
    """Return the sum of two pairs, with an error below 2⁻⁴⁶ of the larger."""
    high, low = two_sum(total.high, more.high)
    return two_sum(high, low + (total.low + more.low))


def times(factor: jax.Array, value: Sum) -> Sum:
    """Return the product of a float32 and a pair, with a relative error below 2⁻⁴⁵."""
    factor = jnp.asarray(factor, value.high.dtype)
    if value.high.dtype != jnp.float32:
        return Sum(factor * value.high, factor * value.low)
    a, b = _halves(_rounded(factor)), _halves(_rounded(value.high))
    cross = two_sum(a.high * b.low, a.low * b.high)
    rest = cross.low + (a.low * b.low + factor * value.low)
    return plus(as_pair(a.high * b.high), two_sum(cross.high, rest))


def _halves(value: jax.Array) -> Sum:
    """Return the first 12 bits of a float32, and the other 12: float32 holds products of halves.

    Bits are masked, not rounded: no compiler can take that for superfluous.
    """
    bits = jax.lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(-4096)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return Sum(high, value - high)


def prior_factor(prior: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return by what a device's share of the prior's gradient is scaled: 1, or less where it is absurdly long.

    It is kept within `LONGEST_PRIOR`, so that no sum of it and of clipped records comes near to `LONGEST`, where a
    change of one record could make a device silent. A share is public, so that one of another length is as good for
    privacy.

    Args:
        prior: shares, each a vector along `axes`.

    Returns:
        The factors, of the shape of `prior` without `axes`.
    """
    coordinates = float(np.prod([prior.shape[axis] for axis in axes]))
    largest = jnp.max(jnp.abs(prior), axis=axes)
    reach = LONGEST_PRIOR / coordinates**0.5
    return jnp.where(largest <= reach, 1.0, reach / largest)


def cap_prior(prior: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return shares of the prior's gradient times their `prior_factor`."""
    return prior * jnp.expand_dims(prior_factor(prior, axes), axes)


def signal_bound(weight: jax.Array, clip: jax.Array) -> jax.Array:
    """Return what no device's weighted, clipped gradient exceeds: public, whatever the data."""
    return jnp.max(jnp.where(weight > 0, weight * clip, 0.0))


def lattice_sum(terms: jax.Array, axis: int, bound: jax.Array) -> Sum:
    """Return Σ terms along an axis, the same in any order.

    A term is rounded to a lattice so fine that this changes it by n² 2⁻⁴⁶ of the bound at most, and so coarse that both
    parts of every partial sum are float32 numbers.

    Args:
        bound: what no term exceeds. Where it is infinite nothing is promised, and terms are added as they are.
    """
    count = terms.shape[axis]
    if count == 1:
        return as_pair(jnp.squeeze(terms, axis))
    return two_sum(*both_sums(lattice_parts(terms, count, bound), axis))


def lattice_parts(terms: jax.Array, count: int, bound: jax.Array) -> Sum:
    """Return terms as sums of two parts, so that float32 adds `count` of the first and of the second without error."""
    if terms.dtype != jnp.float32:
        return as_pair(terms)
    most = jnp.asarray(bound, jnp.float32) * count
    finite = jnp.isfinite(most) & (most > 0)
    exponent = (jax.lax.bitcast_convert_type(most, jnp.int32) >> 23) - 126  # most < 2^exponent
    high = jnp.where(finite, _on_lattice(terms, exponent - 23), terms)
    low = jnp.where(finite, _on_lattice(terms - high, exponent - 47 + int(np.ceil(np.log2(count)))), 0.0)
    return Sum(high, low)


def both_sums(parts: Sum, axis: int) -> Sum:
    """Return the sum of either part along an axis, in one pass; two of them take XLA on a CPU far longer."""
    zero, axes = np.zeros((), parts.high.dtype), (axis % parts.high.ndim,)
    return Sum(*jax.lax.reduce(tuple(parts), (zero, zero), lambda x, y: (x[0] + y[0], x[1] + y[1]), axes))


def _float32_sum(terms: jax.Array, axis: int) -> jax.Array:
    """Return Σ terms along an axis as a matrix product, which XLA on a CPU does faster than a sum."""
    return jnp.tensordot(jnp.ones(terms.shape[axis], terms.dtype), terms, (0, axis), precision="highest")


def _on_lattice(values: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return values rounded to multiples of 2^exponent, or of 2⁻¹²⁶ if that is more."""
    exponent = jnp.maximum(exponent, -126)
    up, down = (jax.lax.bitcast_convert_type((power + 127) << 23, jnp.float32) for power in (-exponent, exponent))
    return jnp.round(values * up) * down


def lattice_sum_pairs(terms: Sum, axis: int, bound: jax.Array) -> Sum:
    """Return the `lattice_sum` of pairs."""
    return plus(lattice_sum(terms.high, axis, bound), lattice_sum(terms.low, axis, bound * 2.0**-22))


def clip_pairs(gradient: Sum, weight: jax.Array, clip: jax.Array, axes: tuple[int, ...]) -> tuple[Sum, jax.Array]:
    """Return weight · g · min(1, clip/‖g‖) with a relative error of 2⁻⁴⁰, and the norms.

    Where the records of a device are clipped one by one to far less than the device, the rounding of its norm alone
    would be more than a record adds.

    Args:
        gradient: pairs, normalised.
        weight, clip: of the gradient's shape without `axes`.
    """
    squares = barrier(sum_squares(gradient.high, axes[0]))
    total = squares.sum([axis - 1 for axis in axes[1:]]) if axes[1:] else squares
    norm = root_of_squares(total, gradient.high.size // total.size)

    def unclipped() -> Sum:
        return times(jnp.broadcast_to(jnp.expand_dims(weight, axes), gradient.high.shape), gradient)

    def clipped() -> Sum:
        ratio = _clip_ratio(_plus_along(_squared(gradient), axes), clip)
        factor = times(weight, ratio)
        each = Sum(*(barrier(jnp.expand_dims(part, axes)) for part in factor))  # once, not for every coordinate
        sent = times(jnp.broadcast_to(each.high, gradient.high.shape), gradient)
        return plus(sent, as_pair(each.low * gradient.high))

    # Far below its clip, which is the rule, nobody is clipped; a norm that is not a number is not below.
    return jax.lax.cond(jnp.all(norm < 0.98 * clip), unclipped, clipped), norm


def _clip_ratio(square: Sum, clip: jax.Array) -> Sum:
    """Return min(1, clip/√square) as a pair; 0 where the square is too large for float32, or not a number."""
    length = jnp.sqrt(square.high)
    limit = jnp.where(jnp.isfinite(clip), clip, 1.0).astype(length.dtype)
    first = limit / length
    wanted = times(limit, as_pair(limit))
    missing = plus(wanted, times(-first, times(first, square))).rounded / wanted.high
    ratio = two_sum(first, first * missing / 2)
    shorter = (length > 0.99 * clip) & ((ratio.high < 1) | ((ratio.high == 1) & (ratio.low < 0)))
    high = jnp.where(shorter, ratio.high, 1.0)
    low = jnp.where(shorter, ratio.low, 0.0)
    held = (length <= LONGEST) | jnp.isinf(clip)
    return Sum(jnp.where(held, high, 0.0), jnp.where(held, low, 0.0))


def _squared(value: Sum) -> Sum:
    return plus(times(value.high, value), as_pair(value.high * value.low))


def _plus_along(terms: Sum, axes: tuple[int, ...]) -> Sum:
    """Return Σ of pairs along axes, by halves: one after the other, as in one go XLA could not vectorize them."""
    first = tuple(range(len(axes)))
    high, low = (jnp.moveaxis(part, axes, first).reshape(-1, *np.delete(part.shape, axes)) for part in terms)
    while len(high) > 1:
        odd = [(0, len(high) % 2), *[(0, 0)] * (high.ndim - 1)]
        high, low = jnp.pad(high, odd), jnp.pad(low, odd)
        half = len(high) // 2
        high, low = map(barrier, plus(Sum(high[:half], low[:half]), Sum(high[half:], low[half:])))
    return Sum(high[0], low[0])


def zero_total(like: jax.Array, devices: int) -> Total:
    """Return zero, for a sum over so many devices of which any one may change as a whole."""
    zero = jnp.zeros_like(like)
    return zero if devices <= FEW else as_pair(zero)


def add_devices(total: Total, terms: jax.Array, axis: int, bound: jax.Array) -> Total:
    """Add what devices send, where a whole device may change: float32 adds a few, `lattice_sum` their sums."""
    if not isinstance(total, Sum):
        return total + _float32_sum(terms, axis)
    if terms.shape[axis] <= FEW:
        return plus(total, as_pair(_float32_sum(terms, axis)))
    axis = axis % terms.ndim
    return plus(total, lattice_sum(barrier(_split(terms, axis, FEW).sum(axis + 1)), axis, bound * FEW))


def sum_records(add: Callable[..., jax.Array], like: jax.Array, *records: tuple[jax.Array, int]) -> Sum:
    """Return Σ over records, of which float32 adds `ROWS` at a time.

    Args:
        add: the sum of a block, from a block of every one of `records`.
        like: what the sum looks like.
        records: arrays, and which axis is that of the records.
    """
    count = records[0][0].shape[records[0][1]]
    if count <= ROWS:
        return as_pair(add(*(values for values, _ in records)))
    if count <= 8 * ROWS:  # too few blocks for a loop
        parts = [range(count)[at : at + ROWS] for at in range(0, count, ROWS)]
        cut = [add(*(jax.lax.slice_in_dim(v, at[0], at[-1] + 1, axis=axis) for v, axis in records)) for at in parts]
        return functools.reduce(plus, map(as_pair, cut))

    alone = all(values.shape[0] == 1 and axis == 1 for values, axis in records)  # whose axis XLA would copy data for
    if alone:
        blocks = tuple(_split(values[0], 0, ROWS) for values, _ in records)
    else:
        blocks = tuple(jnp.moveaxis(_split(values, axis, ROWS), axis, 0) for values, axis in records)

    def step(total: Sum, block: tuple[jax.Array, ...]) -> tuple[Sum, None]:
        return plus(total, as_pair(add(*((values[None] for values in block) if alone else block)))), None

    return jax.lax.scan(step, as_pair(jnp.zeros_like(like)), blocks)[0]


def _split(values: jax.Array, axis: int, size: int) -> jax.Array:
    """Return an axis in equal blocks of at most a size, filled up with zeros where need be, [..., block, size, ...]."""
    axis = axis % values.ndim
    size = part_size(values.shape[axis], size)
    missing = -values.shape[axis] % size
    if missing:
        values = jnp.pad(values, [(0, missing * (at == axis)) for at in range(values.ndim)])
    return values.reshape(*values.shape[:axis], -1, size, *values.shape[axis + 1 :])


def part_size(count: int, most: int) -> int:
    """Return the length of equal parts, at most `most`; one that divides the whole saves a copy."""
    fair = -(-count // -(-count // most))
    return next((size for size in range(most, fair // 2, -1) if count % size == 0), fair)


def sum_squares(values: jax.Array, axis: int = -1, stage: int = STAGE) -> jax.Array:
    """Return Σ x² along an axis; a long one in stages, so that rounding grows with the logarithm of its length."""
    terms, axis = values**2, axis % values.ndim
    while terms.shape[axis] > stage:
        terms = barrier(_split(terms, axis, stage).sum(axis + 1))
    return terms.sum(axis)


def root_of_squares(squares: jax.Array, count: int) -> jax.Array:
    """Return the norm of `count` numbers from the sum of their squares; never less than it is, but for rounding.

    Squares below 2⁻¹²⁶ may be lost, and as much as may be lost is added before the root is taken. The norm is infinite
    where squares are too large for float32.
    """
    return jnp.sqrt(squares + count * LOST_SQUARE)


def barrier(partial: Any) -> Any:
    """Return sums that are to be added again: XLA would make one long sum of both stages."""
    return jax.lax.optimization_barrier(partial)  # type: ignore[no-untyped-call]


def additions(count: int, stage: int = STAGE) -> int:
    """Return the most additions that a term of `sum_squares` goes through."""
    if count <= stage:
        return count
    size = part_size(count, stage)
    return size + additions(-(-count // size), stage)


def rounding(norm: float, record: float, dim: int, sizes: Any, clip: Any, example_clip: Any, mixed: int = 0) -> float:
    """Return e, such that clips at c/(1 + e) and ℓ/(1 + e) make a sensitivity of at most 2 min(c, ℓ) in float32.

    Args:
        norm: relative error of what a device sends, by its norm and all that follows.
        record: relative error of a record's norm.
        clip, example_clip: ℓ[K] and c[K]; infinite where there is none.
        mixed: rows of many devices that float32 adds; 0 where it adds those of one device alone.

    Raises:
        InputError: where a sum of clipped records may be too long for float32 to take its norm.
    """
    devices, finite, by_record = len(clip), np.isfinite(clip), bool(np.isfinite(example_clip).any())
    if not finite.any():
        return 0.0
    sensitivity = np.where(finite, np.minimum(clip, example_clip), np.inf)
    sent = np.where(by_record & (np.asarray(sizes) > PAIRS), CLIP_PAIRS_ERROR, norm)
    # What others send is rounded together with a device whose clips may be smaller.
    least, others = np.min(sensitivity), np.max(clip[finite])
    pairs = min(devices, DEVICES) ** 2 * dim**0.5 * 2.0**-45 + devices**2 * 2.0**-44
    found = np.max(np.where(finite, clip / sensitivity * sent, 0.0))
    found += others / least * pairs * (16 if mixed else 1)
    most = int(np.max(sizes))
    if by_record:
        longer = np.max(np.where(finite, np.minimum(example_clip / sensitivity, 2.0), 1.0))
        found += record + longer * min(most, ROWS) ** 2 * UNIT + most**2 * 2.0**-45
        found += np.max(np.where(finite, dim * LOST_NORM / (clip * sensitivity), 0.0))
        longest = np.where(finite & (example_clip < clip), np.asarray(sizes) * example_clip, 0.0)
        if np.max(longest) > LONGEST_PRIOR:
            allowed = f"at most {LONGEST_PRIOR / most:.3g}, for devices of {most} examples"
            raise InputError("example_clip", float(np.max(example_clip[example_clip < clip])), allowed)
    else:
        found += others / least * (min(devices, FEW) ** 2 + 4 * FEW * (devices <= FEW)) * UNIT
    if mixed:
        row = np.where(example_clip < clip, example_clip, CANCELLING * clip)
        found += np.max(row[finite]) / least * mixed**2 * UNIT
        found += others / least * CANCELLING * mixed * min(devices, PRODUCTS) ** 2 * dim**0.5 * 2.0**-46
    return float(1.01 * found)  # products of these errors, all small
