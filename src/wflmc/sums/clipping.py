"""Clip gradients of records and devices.

The steps of the proof are 3, 4 and 8 in docs/explanation/privacy.md, "Sums in floating
point".
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.sums.constants import LONGEST_RECORD_SUM, LONGEST_VECTOR
from wflmc.sums.norms import root_of_squares, sum_squares
from wflmc.sums.pairs import (
    Pair,
    as_pair,
    barrier,
    plus,
    squared,
    sum_pairs,
    times,
    two_sum,
)

SURELY_UNCLIPPED = 0.98
"""A float32 norm below this times the clipping threshold belongs to a gradient within
it."""
NEARLY_CLIPPED = 0.99
"""Below this times the threshold no gradient is scaled."""


class ClippedPairs(NamedTuple):
    """Clipped gradients of some devices, and their norms before clipping."""

    gradients: Pair
    norms: jax.Array


def clip_factor(weight: jax.Array, clip: jax.Array, norm: jax.Array) -> jax.Array:
    r"""Return $w \min(1, \ell/\lVert g\rVert)$ (Sums, steps 3 and 4).

    A gradient of zero is not clipped: 0/0 is no reason to. A norm that is not a number
    is no reason to send unclipped: it spreads, and the sampler stops.

    Args:
        weight: w.
        clip: the clipping threshold ℓ, may be infinite.
        norm: ‖g‖.

    Returns:
        The factors, of the arguments' common shape.
    """
    return weight * jnp.where(norm <= clip, 1.0, clip / norm)


def signal_bound(weight: jax.Array, clip: jax.Array) -> jax.Array:
    """Return what no device's weighted, clipped gradient exceeds: max_k w_k ℓ_k.

    The lattice on which devices are added follows from it, so it must be public: it
    depends on weights and thresholds alone. Each chain has its own: a lattice that suits
    another chain's thresholds could round more than this chain's plan pays for. Devices
    of weight 0 do not count, even if their threshold is infinite.

    Args:
        weight: w[..., K], of all devices.
        clip: ℓ, of a shape that goes with `weight`.

    Returns:
        [...], a number for each chain; infinite where a transmitting device is not
        clipped.
    """
    return jnp.max(jnp.where(weight > 0, weight * clip, 0.0), axis=-1)


def prior_factor(prior: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the factors of prior shares, min(1, 2⁵⁸/(√m max_i |x_i|)) (Sums, step 8).

    It is 1, or less where a share is longer than `LONGEST_RECORD_SUM`. Otherwise a sum
    of it and of clipped records could come near `LONGEST_VECTOR`, where a change of one
    record makes a device silent. A share is public, so another length is as private.

    Args:
        prior: shares, each a vector along `axes`.
        axes: those of the parameters.

    Returns:
        The factors, of the shape of `prior` without `axes`.
    """
    coordinates = float(np.prod([prior.shape[axis] for axis in axes]))
    largest = jnp.max(jnp.abs(prior), axis=axes)
    reach = LONGEST_RECORD_SUM / coordinates**0.5
    return jnp.where(largest <= reach, 1.0, reach / largest)


def cap_prior(prior: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the prior's gradient, as far as a device adds it, at most 2⁵⁸ long.

    It is multiplied by its `prior_factor`, which is 1 unless parameters are absurdly
    large; then records cannot make their device's gradient overflow (Sums, step 8).

    Args:
        prior: vectors along `axes`.
        axes: those of the parameters.

    Returns:
        Vectors of the same shape.
    """
    return prior * jnp.expand_dims(prior_factor(prior, axes), axes)


def clip_pairs(
    gradient: Pair,
    weight: jax.Array,
    clip: jax.Array,
    axes: tuple[int, ...],
) -> ClippedPairs:
    r"""Clip pairs: $w\,g \min(1, \ell/\lVert g\rVert)$ to 2⁻⁴⁰ of it (Sums, step 4).

    Where records are clipped to far less than their device, the rounding of the
    device's norm in float32 would be more than a record adds.

    Args:
        gradient: pairs, normalised: g[..., parameters].
        weight: w, of the gradient's shape without `axes`.
        clip: ℓ, as `weight`.
        axes: those of the parameters.

    Returns:
        The clipped pairs and the norms, rounded as float32 norms are.
    """
    norm = _float32_norms(gradient.high, axes)
    shape = gradient.high.shape

    def unclipped() -> Pair:
        weights = jnp.broadcast_to(jnp.expand_dims(weight, axes), shape)
        return times(weights, gradient)

    def clipped() -> Pair:
        squared_norm = sum_pairs(squared(gradient), axes)
        factor = times(weight, _clip_ratio(squared_norm, clip))
        # The barrier asks for one factor for a device, not for every coordinate;
        # `times` holds what it multiplies, so that both ways give the same numbers.
        high = barrier(jnp.expand_dims(factor.high, axes))
        low = barrier(jnp.expand_dims(factor.low, axes))
        product = times(jnp.broadcast_to(high, shape), gradient)
        return plus(product, as_pair(low * gradient.high))

    # Devices are rarely clipped; a norm that is not a number is not below.
    all_inside = jnp.all(norm < SURELY_UNCLIPPED * clip)
    return ClippedPairs(jax.lax.cond(all_inside, unclipped, clipped), norm)


def _float32_norms(gradients: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the norms of gradients along one or two axes."""
    squares = barrier(sum_squares(gradients, axes[0]))
    if axes[1:]:
        squares = squares.sum([axis - 1 for axis in axes[1:]])
    return root_of_squares(squares, gradients.size // squares.size)


def _clip_ratio(square: Pair, clip: jax.Array) -> Pair:
    r"""Return $\min(1, \ell/\sqrt{s})$ as a pair, by one step of Newton's method.

    With $r \approx \ell/\sqrt{s}$ in float32, the pair is
    $r + r\,(\ell^2 - r^2 s)/(2\ell^2)$.

    Args:
        square: s, as a pair.
        clip: ℓ, may be infinite.

    Returns:
        The ratio; 0 where s is too large for float32, or not a number.
    """
    length = jnp.sqrt(square.high)
    limit = jnp.where(jnp.isfinite(clip), clip, 1.0).astype(length.dtype)
    estimate = limit / length
    squared_limit = times(limit, as_pair(limit))
    residual = plus(squared_limit, times(-estimate, times(estimate, square)))
    correction = residual.rounded / squared_limit.high
    ratio = two_sum(estimate, estimate * correction / 2)
    below_one = (ratio.high < 1) | ((ratio.high == 1) & (ratio.low < 0))
    is_clipped = (length > NEARLY_CLIPPED * clip) & below_one
    high = jnp.where(is_clipped, ratio.high, 1.0)
    low = jnp.where(is_clipped, ratio.low, 0.0)
    has_norm = (length <= LONGEST_VECTOR) | jnp.isinf(clip)
    return Pair(jnp.where(has_norm, high, 0.0), jnp.where(has_norm, low, 0.0))
