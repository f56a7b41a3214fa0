r"""Clipped sums of the linear model's gradients, for all chains at once.

The gradient of device k is $H_k\theta - b_k$, with its share of the prior in $H_k$;
that of one record is $(\theta^\top u - v)\,u$. The float64 references are
`reference.gaussian_device_gradients` and `reference.gaussian_record_gradients`.

Letters in einsum strings: c is a chain, k a device of a block, n a row (of H or of the
records), m a parameter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from wflmc.sums.blocks import DeviceInputs, scan_blocks, scan_float32_groups
from wflmc.sums.chains import batch_chains
from wflmc.sums.clipping import cap_prior, clip_factor, clip_pairs, signal_bound
from wflmc.sums.constants import LONGEST_VECTOR, MAX_RECORDS_CLIPPED_IN_FLOAT32
from wflmc.sums.devices import (
    ClippedSum,
    Sum,
    add_devices,
    add_on_lattice,
    add_pairs_on_lattice,
    zero_pair_sum,
    zero_sum,
)
from wflmc.sums.norms import row_norms, vector_norms
from wflmc.sums.pairs import Pair, as_pair, plus
from wflmc.sums.prior import DevicePrior
from wflmc.sums.records import Records, sum_records
from wflmc.support.errors import without_data


@without_data
class Quadratics(NamedTuple):
    """Costs of devices, with leading axes [blocks, block]."""

    hessian: jax.Array
    """H[..., m, m]."""
    linear: jax.Array
    """b[..., m]."""


@without_data
class LinearRecords(NamedTuple):
    """Records of devices, with leading axes [blocks, block]."""

    features: jax.Array
    """u[..., n, m], zero where a device has fewer records."""
    target: jax.Array
    """v[..., n]."""


def clip_devices(
    blocks: Quadratics,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
) -> ClippedSum:
    """Return Σ_k w_k clip(g_k) of some chains (Sums, steps 3 to 5).

    With g_k = H_k θ − b_k, the gradients of a block of devices for all chains are one
    matrix product. Devices of weight 0 add nothing, but their norms are reported.

    Args:
        blocks: costs of devices.
        theta: θ[chain, m], or [chain, K, m] where each device received its own.
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.

    Returns:
        The sum [chain, m] and the norms [chain, K].
    """
    bound = signal_bound(weight, clip)[:, None, None]

    def add(
        total: Sum,
        block: Quadratics,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        # H is symmetric: its rows are its columns.
        gradients = _row_products(theta, inputs.theta, block.hessian) - block.linear
        norms = vector_norms(gradients)
        factors = clip_factor(inputs.weight, inputs.clip, norms)
        clipped = factors[..., None] * gradients
        return add_devices(total, clipped, 1, bound), norms

    inputs = DeviceInputs(weight, clip, theta=theta if theta.ndim == 3 else None)
    start = zero_sum(_zeros(theta), weight.shape[1])
    return ClippedSum(*scan_float32_groups(add, blocks, start, inputs))


def clip_records(
    blocks: LinearRecords,
    prior: DevicePrior,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array,
) -> ClippedSum:
    """Return the sum with every record clipped first (Sums, steps 1 to 5).

    The gradient of a record is (θᵀu − v) u, so that clipping it is clipping its
    residual to c/‖u‖; no gradient of a record is ever written. Devices are clipped
    after that.

    Args:
        blocks: records of devices.
        prior: a device's share of the prior, with a matrix of curvature.
        theta: θ[chain, m], or [chain, K, m] where each device received its own.
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.
        example_clip: c, as `weight`.

    Returns:
        The sum [chain, m] and the norms of the devices' gradients [chain, K].
    """
    bound = signal_bound(weight, clip)[:, None, None]
    common_prior_gradient = (
        None if theta.ndim == 3 else _prior_share(theta[:, None], prior)
    )

    def add(
        total: Sum,
        block: LinearRecords,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        residuals = _clipped_residuals(theta, block, inputs)
        if common_prior_gradient is None:
            assert inputs.theta is not None
            prior_gradient = _prior_share(inputs.theta, prior)
        else:
            prior_gradient = common_prior_gradient
        devices, _, dim = block.features.shape
        like = jnp.zeros((len(residuals), devices, dim), theta.dtype)
        gradients = _device_gradients(residuals, block.features, prior_gradient, like)
        return _add_clipped(total, gradients, inputs, block, bound)

    received = theta if theta.ndim == 3 else None
    inputs = DeviceInputs(weight, clip, example_clip, received)
    start = zero_pair_sum(_zeros(theta))
    return ClippedSum(*scan_blocks(add, blocks, start, inputs))


def _clipped_residuals(
    theta: jax.Array,
    block: LinearRecords,
    inputs: DeviceInputs,
) -> jax.Array:
    r"""Return residuals $r = \theta^\top u - v$ clipped to $|r| \le c/\lVert u\rVert$.

    Returns:
        [chain, block, n].
    """
    assert inputs.example_clip is not None
    residuals = _row_products(theta, inputs.theta, block.features) - block.target
    # A row whose norm is too small for float32 is limited as if it were not.
    lengths = jnp.maximum(row_norms(block.features), 1 / LONGEST_VECTOR)
    limits = inputs.example_clip[..., None] / lengths
    return clip_residuals(residuals, limits)


def clip_residuals(residuals: jax.Array, limits: jax.Array) -> jax.Array:
    """Return residuals, each moved to the nearest number within its limit.

    The gradient of a record is its residual times u, so that a residual within c/‖u‖
    is a gradient within c: this is the clipping of records. Residuals that are not a
    number stay so.

    Args:
        residuals: r[chain, block, n].
        limits: c/‖u‖ of every record, of a shape that goes with it.
    """
    return jnp.clip(residuals, -limits, limits)


def _device_gradients(
    residuals: jax.Array,
    features: jax.Array,
    prior_gradient: jax.Array,
    like: jax.Array,
) -> Pair:
    """Return Σ_n r_n u_n plus the prior's share, of the shape of `like`."""
    of_records = Records(residuals, axis=2), Records(features, axis=1)
    records = sum_records(_weighted_rows, like, *of_records)
    return plus(records, as_pair(prior_gradient + like))


def _add_clipped(
    total: Sum,
    gradients: Pair,
    inputs: DeviceInputs,
    block: LinearRecords,
    bound: jax.Array,
) -> tuple[Sum, jax.Array]:
    """Clip devices' gradients and add them; those of many records in pairs."""
    if block.target.shape[1] > MAX_RECORDS_CLIPPED_IN_FLOAT32:
        weight = jnp.broadcast_to(inputs.weight, gradients.high.shape[:2])
        clipped, norms = clip_pairs(gradients, weight, inputs.clip, (-1,))
        return add_pairs_on_lattice(total, clipped, 1, bound), norms
    rounded = gradients.rounded
    norms = vector_norms(rounded)
    factors = clip_factor(inputs.weight, inputs.clip, norms)
    sent = factors[..., None] * rounded
    return add_on_lattice(total, sent, 1, bound), norms


def _prior_share(theta: jax.Array, prior: DevicePrior) -> jax.Array:
    """Return a device's share of the prior's gradient at θ[..., m]."""
    curvature = jnp.asarray(prior.curvature)
    deviation = theta
    if prior.mean is not None:
        deviation = theta - prior.mean
    gradient = jnp.matmul(deviation, curvature, precision="highest")
    return cap_prior(gradient, (-1,))


def _row_products(
    theta: jax.Array,
    received: jax.Array | None,
    rows: jax.Array,
) -> jax.Array:
    """Return products of rows[k, n, m] with θ, or with what their device received.

    Returns:
        [chain, k, n].
    """
    if received is not None:
        return jnp.einsum("ckm,knm->ckn", received, rows, precision="highest")
    flat = rows.reshape(-1, theta.shape[1]).T
    products = jnp.matmul(theta, flat, precision="highest")
    return products.reshape(-1, *rows.shape[:2])


def _weighted_rows(residuals: jax.Array, features: jax.Array) -> jax.Array:
    """Return Σ_n r_n u_n, [chain, k, m]."""
    return jnp.einsum("ckn,knm->ckm", residuals, features, precision="highest")


def _zeros(theta: jax.Array) -> jax.Array:
    """Return zeros[chain, m]."""
    return jnp.zeros((theta.shape[0], theta.shape[-1]), theta.dtype)


device_clipped_sum = batch_chains(clip_devices, chain_arguments=3)
"""`clip_devices` of one chain, of (blocks, theta, weight, clip)."""
record_clipped_sum = batch_chains(clip_records, chain_arguments=4)
"""`clip_records` of one chain, of (blocks, prior, theta, weight, clip,
example_clip)."""
