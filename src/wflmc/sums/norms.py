"""Norms whose rounding is bounded.

The steps of the proof are 3 and 8 in docs/explanation/privacy.md, "Sums in floating
point".
"""

import jax
import jax.numpy as jnp

from wflmc.sums.constants import (
    LONGEST_VECTOR,
    LOST_SQUARE,
    SMALLEST_COORDINATE,
    SQUARES_PER_STAGE,
)
from wflmc.sums.pairs import barrier
from wflmc.sums.parts import part_size, split_axis


def sum_squares(
    values: jax.Array,
    axis: int = -1,
    stage: int = SQUARES_PER_STAGE,
) -> jax.Array:
    """Return Σ x² along an axis, in stages (Sums, step 3).

    Rounding grows with the logarithm of the axis's length, not with the length itself:
    a term goes through `additions(n, stage)` additions.

    Args:
        values: float32 [..., n, ...].
        axis: that of the n numbers.
        stage: squares that are added at once; their sums are added again.

    Returns:
        The sum without that axis.
    """
    return staged_sum(values**2, axis, stage)


def staged_sum(
    terms: jax.Array,
    axis: int = -1,
    stage: int = SQUARES_PER_STAGE,
) -> jax.Array:
    """Return Σ x along an axis, in stages.

    Terms are added `stage` at a time, and then their sums again. Barriers keep XLA from
    merging the stages into one long sum.

    Args:
        terms: float32 [..., n, ...].
        axis: that of the n numbers.
        stage: terms that are added at once.

    Returns:
        The sum without that axis.
    """
    axis = axis % terms.ndim
    while terms.shape[axis] > stage:
        terms = barrier(split_axis(terms, axis, stage).sum(axis + 1))
    return terms.sum(axis)


def additions(count: int, stage: int = SQUARES_PER_STAGE) -> int:
    """Return the most additions that a term of `sum_squares` goes through.

    A sum of at most `stage` numbers counts as many additions as it has terms. The error
    of the whole sum is bounded by this number times u.

    Args:
        count: n, how many numbers are added.
        stage: as of `sum_squares`.
    """
    if count <= stage:
        return count
    size = part_size(count, stage)
    return size + additions(-(-count // size), stage)


def root_of_squares(squares: jax.Array, count: int) -> jax.Array:
    r"""Return a norm that is not too small, but for rounding (Sums, step 8).

    $$\sqrt{\textstyle\sum x_i^2 + n \, 2^{-124}}$$

    Squares below 2⁻¹²⁶ may be lost, so that as much as may be lost is added before the
    root is taken.

    Args:
        squares: Σ x² of n numbers.
        count: n.

    Returns:
        The norm; infinite where squares are too large for float32.
    """
    return jnp.sqrt(squares + count * LOST_SQUARE)


def vector_norms(gradients: jax.Array) -> jax.Array:
    """Return the norms ‖g‖ of gradients, rounded by a known ν (Sums, steps 3 and 8).

    `bound.vector_norm_error` is that ν. No norm is too small for lost squares; one
    above 2⁶⁴ is infinite, so that its gradient adds nothing.

    Args:
        gradients: g[..., m].

    Returns:
        [...].
    """
    return root_of_squares(sum_squares(gradients), gradients.shape[-1])


def row_norms(rows: jax.Array) -> jax.Array:
    """Return ‖u‖ of rows whose squares float32 need not hold.

    Rows are divided by their largest coordinate before squares are taken. This costs
    another pass over the data, which features that stay the same need once.

    Args:
        rows: u[..., d].

    Returns:
        The norms [...]: infinite above `LONGEST_VECTOR`, 0 where no coordinate reaches
        `SMALLEST_COORDINATE`, not a number where a coordinate is not finite.
    """
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    # XLA may multiply by an inverse, which the largest and smallest numbers lack.
    usable = (largest >= SMALLEST_COORDINATE) & (largest <= LONGEST_VECTOR)
    scaled = rows / jnp.where(usable, largest, 1.0)
    norms = largest[..., 0] * jnp.sqrt(sum_squares(scaled))
    too_long = jnp.where(jnp.isfinite(largest[..., 0]), jnp.inf, jnp.nan)
    return jnp.where(norms <= LONGEST_VECTOR, norms, too_long)
