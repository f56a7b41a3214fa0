r"""Clipped sums of the softmax model's gradients on an accelerator.

Parameters are held as columns θ[d, C, chain]: chains side by side make matrix products
large. On CPUs `wflmc.sums.softmax_classes` is faster.

With residuals $r = p - 1[\mathrm{label}]$ the gradient of a record is $u\,r^\top$, of
norm $\lVert u\rVert\,\lVert r\rVert$; that of a device is $U^\top R$ plus its share of
the prior's. The float64 reference is `reference.softmax_record_gradients`. Devices of
few rows have their own path, `wflmc.sums.softmax_rows`.

Rows of features may be longer than the parameters of a class: zeros that fill them up
to a multiple of 32 bytes make products with few chains faster on GPUs. These zeros meet
parameters of zero, and no gradient has entries for them.

Letters in einsum strings: k is a device of a block, or a step of its rows, n a row, d a
feature, c a class, x a chain, or a class and a chain where these are one axis; in
`prior_share` i and j are features.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wflmc.sums import softmax_gpu
from wflmc.sums.blocks import DeviceInputs, scan_blocks, scan_float32_groups
from wflmc.sums.chains import batch_chains
from wflmc.sums.clipping import cap_prior, clip_factor, clip_pairs, signal_bound
from wflmc.sums.constants import (
    MAX_RECORDS_CLIPPED_IN_FLOAT32,
    RECORDS_PER_FLOAT32_SUM,
)
from wflmc.sums.devices import (
    ClippedSum,
    Sum,
    add_devices,
    add_on_lattice,
    add_pairs_on_lattice,
    zero_pair_sum,
    zero_sum,
)
from wflmc.sums.norms import root_of_squares, row_norms, sum_squares
from wflmc.sums.pairs import Pair, as_pair, barrier, computed_once, plus
from wflmc.sums.parts import split_axis
from wflmc.sums.prior import DevicePrior
from wflmc.sums.records import Records, sum_records, sum_steps
from wflmc.support.errors import without_data

COLUMN_AXES = (-3, -2)
"""Axes of the parameters in columns[..., d, C, chain]."""


@without_data
class LabelledRows(NamedTuple):
    """Records of devices, with leading axes [blocks, block], or [block]."""

    features: jax.Array
    """u[..., n, d], zero where a device has fewer records, and where rows are filled
    up."""
    labels: jax.Array
    """Classes [..., n], from 0."""
    norms: jax.Array | None = None
    """‖u‖[..., n], where records are clipped; infinite for rows that add nothing."""


def measured_rows(features: jax.Array, labels: jax.Array) -> LabelledRows:
    """Return records with their norms; those that float32 cannot use add nothing.

    Such a row has an infinite norm, and so residuals of zero (Sums, step 8). Its
    features become zeros too: numbers that overflow in it would show nevertheless, as
    0 · ∞ is not a number.

    Args:
        features: u[..., n, d].
        labels: classes [..., n], from 0.
    """
    norms = row_norms(features)
    usable = jnp.isfinite(norms)
    usable_features = jnp.where(usable[..., None], features, 0.0)
    usable_norms = jnp.where(usable, norms, jnp.inf)
    return LabelledRows(usable_features, labels, usable_norms)


def clip_devices(
    blocks: LabelledRows,
    prior: DevicePrior,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    *,
    dim: int,
) -> ClippedSum:
    """Return Σ_k w_k clip(g_k) of some chains (Sums, steps 3 to 5).

    Chains are the last axis of all that is computed. A GPU may compute the gradients of
    a block in one kernel (`wflmc.sums.softmax_gpu`).

    Args:
        blocks: records of devices.
        prior: a device's share of the prior.
        theta: θ[chain, m], or [chain, K, m] where each device received its own.
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.
        dim: d, the features that have parameters.

    Returns:
        The sum [chain, m] and the norms [chain, K].
    """
    common_columns = None if theta.ndim == 3 else columns_of(theta, dim)
    bound = signal_bound(weight, clip)

    def add(
        total: Sum,
        block: LabelledRows,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        columns = _columns(common_columns, inputs, dim)
        gradients = device_gradients(block, prior, columns)
        norms = _device_norms(gradients)
        factors = clip_factor(inputs.weight.T, inputs.clip.T, norms)
        clipped = factors[:, None, None] * gradients
        return add_devices(total, clipped, 0, bound), norms.T

    inputs = DeviceInputs(weight, clip, theta=theta if theta.ndim == 3 else None)
    start = zero_sum(_zero_columns(theta, dim), weight.shape[1])
    total, norms = scan_float32_groups(add, blocks, start, inputs)
    return ClippedSum(jax.tree.map(vectors_of, total), norms)


def clip_records(
    blocks: LabelledRows,
    prior: DevicePrior,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array,
    *,
    dim: int,
) -> ClippedSum:
    """Return the sum with every record clipped first (Sums, steps 1 to 5).

    The norm of a record's gradient is ‖u‖ ‖r‖, so that its residuals are clipped and no
    gradient of a record is ever written. Devices are clipped after that.

    Args:
        blocks: records of devices, with the norms of their features.
        prior: a device's share of the prior.
        theta: θ[chain, m], or [chain, K, m] where each device received its own.
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.
        example_clip: c, as `weight`.
        dim: d, the features that have parameters.

    Returns:
        The sum [chain, m] and the norms of the devices' gradients [chain, K].
    """
    common_columns = None if theta.ndim == 3 else columns_of(theta, dim)
    common_prior_gradient = None
    if common_columns is not None:
        common_prior_gradient = _capped_share(prior, common_columns)
    bound = signal_bound(weight, clip)

    def add(
        total: Sum,
        block: LabelledRows,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        columns = _columns(common_columns, inputs, dim)
        prior_gradient = common_prior_gradient
        if prior_gradient is None:
            prior_gradient = _capped_share(prior, columns)
        assert inputs.example_clip is not None
        gradients = _clipped_record_sums(
            block, prior_gradient, columns, inputs.example_clip
        )
        return _add_clipped(total, gradients, inputs, block, bound)

    received = theta if theta.ndim == 3 else None
    inputs = DeviceInputs(weight, clip, example_clip, received)
    start = zero_pair_sum(_zero_columns(theta, dim))
    total, norms = scan_blocks(add, blocks, start, inputs)
    return ClippedSum(jax.tree.map(vectors_of, total), norms)


def _add_clipped(
    total: Sum,
    gradients: Pair,
    inputs: DeviceInputs,
    block: LabelledRows,
    bound: jax.Array,
) -> tuple[Sum, jax.Array]:
    """Clip devices' gradients and add them; those of many records in pairs."""
    if block.labels.shape[1] > MAX_RECORDS_CLIPPED_IN_FLOAT32:
        block_size, _, _, chains = gradients.high.shape
        block_and_chain = (block_size, chains)
        weight = jnp.broadcast_to(inputs.weight.T, block_and_chain)
        clipped, norms = clip_pairs(gradients, weight, inputs.clip.T, (1, 2))
        return add_pairs_on_lattice(total, clipped, 0, bound), norms.T
    rounded = gradients.rounded
    norms = _device_norms(rounded)
    factors = clip_factor(inputs.weight.T, inputs.clip.T, norms)
    sent = factors[:, None, None] * rounded
    return add_on_lattice(total, sent, 0, bound), norms.T


def device_gradients(
    block: LabelledRows,
    prior: DevicePrior,
    columns: jax.Array,
) -> jax.Array:
    """Return the gradients of a block of devices, unclipped.

    Each is U^T R plus the device's share of the prior's. Which of two ways computes the
    first term depends on shapes and the machine alone.

    Args:
        block: records [block, n, ...], whose rows may be filled up to more than d.
        prior: a device's share of the prior.
        columns: θ as [d, C, chain], or [block, d, C, chain] where each device received
            its own.

    Returns:
        [block, d, C, chain].
    """
    features = block.features
    labels = block.labels
    if softmax_gpu.fits(features, columns):
        likelihood = jax.lax.platform_dependent(
            features,
            labels,
            columns,
            cuda=softmax_gpu.gradients,
            default=likelihood_gradients,
        )
    else:
        likelihood = likelihood_gradients(features, labels, columns)
    return likelihood + prior_share(prior, columns)


def likelihood_gradients(
    features: jax.Array,
    labels: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """Return the gradients of a block of devices without the prior's share.

    Logits are counted from those of the first class, whose gradient is minus the sum of
    all others: one class less to compute.

    Args:
        features: u[block, n, d], or with rows that are filled up to more than d.
        labels: classes [block, n], from 0.
        columns: θ as [d, C, chain], or [block, d, C, chain].

    Returns:
        [block, d, C, chain].
    """
    logits = _logits(features, columns[..., 1:, :] - columns[..., :1, :])
    largest = jnp.maximum(logits.max(1, keepdims=True), 0.0)
    raised = jnp.exp(logits - largest)
    p = raised * (1 / (jnp.exp(-largest) + raised.sum(1, keepdims=True)))
    seen = jax.nn.one_hot(labels - 1, logits.shape[1], dtype=features.dtype)
    dim = columns.shape[-3]
    if len(features) == 1:
        # Labels are the same for all chains: taken off at the end, not from each p.
        rows = features[0].T
        expected = product(rows, p)
        observed = product(rows, seen[0])
        other_classes = (expected - observed[..., None])[None, :dim]
    else:
        residuals = p.reshape(*labels.shape, *p.shape[1:]) - seen[..., None]
        row_sums = weighted_rows(features, residuals.reshape(*labels.shape, -1))
        shape = (len(features), dim, *p.shape[1:])
        other_classes = row_sums[:, :dim].reshape(shape)
    first_class = -other_classes.sum(2, keepdims=True)
    return jnp.concatenate([first_class, other_classes], axis=2)


def _clipped_record_sums(
    block: LabelledRows,
    prior_gradient: jax.Array,
    columns: jax.Array,
    example_clip: jax.Array,
) -> Pair:
    """Return gradients of devices whose records are clipped (Sums, steps 1 to 3).

    Float32 adds a step of at most 256 rows, pairs add the steps. Which of two ways
    computes them depends on shapes alone.

    Args:
        block: records [block, n, ...].
        prior_gradient: a device's share of the prior's gradient, as `columns`.
        columns: θ as [d, C, chain], or [block, d, C, chain].
        example_clip: c[chain, block].

    Returns:
        [block, d, C, chain].
    """
    dim, classes, chains = columns.shape[-3:]
    devices, rows = block.labels.shape
    steps = -(-rows // RECORDS_PER_FLOAT32_SUM)
    if steps * classes * chains <= rows:
        records = _add_steps_together(block, columns, example_clip)
    else:
        records = _add_steps_in_turn(block, columns, example_clip)
    shape = (devices, dim, classes, chains)
    of_records = Pair(*(part[:, :dim].reshape(shape) for part in records))
    return plus(of_records, as_pair(jnp.broadcast_to(prior_gradient, shape)))


def _add_steps_together(
    block: LabelledRows,
    columns: jax.Array,
    example_clip: jax.Array,
) -> Pair:
    """Return Σ_n u_n r_nᵀ over clipped records, all steps in one batch of products.

    This suits few chains, where the sums of all steps are smaller than the features:
    these are cut where they lie, and each product reads them once.

    Args:
        block: records [block, n, ...].
        columns: θ as [d, C, chain], or [block, d, C, chain].
        example_clip: c[chain, block].

    Returns:
        [block, d or more, C · chain].
    """
    assert block.norms is not None
    residuals = _clipped_residuals(
        block.features, block.labels, block.norms, columns, example_clip
    )
    residuals_by_step = split_axis(residuals, 1, RECORDS_PER_FLOAT32_SUM)
    features_by_step = split_axis(block.features, 1, RECORDS_PER_FLOAT32_SUM)
    # Features last, as they lie, and transposed when few numbers are left.
    step_sums = jnp.einsum(
        "ksnx,ksnd->ksxd", residuals_by_step, features_by_step, precision="highest"
    )
    total = sum_steps(step_sums)
    return Pair(total.high.swapaxes(1, 2), total.low.swapaxes(1, 2))


def _add_steps_in_turn(
    block: LabelledRows,
    columns: jax.Array,
    example_clip: jax.Array,
) -> Pair:
    """Return Σ_n u_n r_nᵀ over clipped records, one step after the other.

    This suits many chains: the residuals of one step are held at a time, and features
    are copied step by step.

    Args:
        block: records [block, n, ...].
        columns: θ as [d, C, chain], or [block, d, C, chain].
        example_clip: c[chain, block].

    Returns:
        [block, d or more, C · chain].
    """

    def add_step(
        features: jax.Array,
        labels: jax.Array,
        norms: jax.Array,
    ) -> jax.Array:
        residuals = _clipped_residuals(features, labels, norms, columns, example_clip)
        if len(features) == 1:
            flat = residuals[0]
            return jnp.matmul(features[0].T, flat, precision="highest")[None]
        return weighted_rows(features, residuals)

    devices, _, dim = block.features.shape
    row_length = columns.shape[-2] * columns.shape[-1]
    like = jnp.zeros((devices, dim, row_length), block.features.dtype)
    arrays = [Records(values, axis=1) for values in block if values is not None]
    return sum_records(add_step, like, *arrays)


def _clipped_residuals(
    features: jax.Array,
    labels: jax.Array,
    norms: jax.Array,
    columns: jax.Array,
    example_clip: jax.Array,
) -> jax.Array:
    """Return the residuals of clipped records, [block, n, C · chain]."""
    residuals = softmax_residuals(_logits(features, columns), labels.ravel())
    limits = row_limits(norms, example_clip)
    clipped = clip_residuals(residuals, norms, limits)
    return clipped.reshape(*labels.shape, -1)


def clip_residuals(
    residuals: jax.Array,
    norms: jax.Array,
    limits: jax.Array,
) -> jax.Array:
    r"""Return $r \min(1, c/(\lVert u\rVert\,\lVert r\rVert))$ (Sums, step 3).

    The gradient $u\,r^\top$ of a record is then at most c long, but for rounding. Rows
    whose norm is infinite, as their squares would overflow, get residuals of zero. So
    do rows whose residuals are not finite, which must not show in the sum of all others
    (step 8).

    Args:
        residuals: r[block · n, C, chain].
        norms: ‖u‖[block, n]; infinite for rows that add nothing.
        limits: c of every row, [block · n, chain].

    Returns:
        Residuals of records that are clipped.
    """
    norms_of_rows = norms.reshape(-1, 1)
    lengths = class_norms(residuals, axis=1) * norms_of_rows
    weight = jnp.ones(())
    factors = clip_factor(weight, limits, lengths)
    clipped = residuals * factors[:, None]
    usable = jnp.isfinite(lengths)
    return jnp.where(usable[:, None], clipped, 0.0)


def row_limits(norms: jax.Array, example_clip: jax.Array) -> jax.Array:
    """Return the clipping threshold c of every row.

    All rows of a device have the device's threshold, for every chain its own.

    Args:
        norms: ‖u‖[block, n], for its shape.
        example_clip: c[chain, block].

    Returns:
        [block · n, chain].
    """
    return jnp.repeat(example_clip.T, norms.shape[1], axis=0)


def class_norms(residuals: jax.Array, axis: int) -> jax.Array:
    """Return ‖r‖ over classes, rounded by a known ν (Sums, step 3).

    It is not too small for lost squares (step 8): residuals are at most 1, and those of
    a record that is predicted almost surely are tiny.

    Args:
        residuals: with an axis of C classes.
        axis: that of the classes.

    Returns:
        The norms, without that axis.
    """
    squares = jnp.sum(residuals**2, axis=axis)
    return root_of_squares(squares, residuals.shape[axis])


def softmax_residuals(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the residuals p(class|u) − 1[class = label] of rows for all chains.

    Labels are the same for all chains. The residuals of a row add up to 0 over classes,
    but for rounding.

    Args:
        logits: [n, C, chain].
        labels: classes [n], from 0.

    Returns:
        [n, C, chain].
    """
    seen = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
    return softmax(logits) - seen[..., None]


def softmax(logits: jax.Array) -> jax.Array:
    """Return the probabilities p(class|u) of rows for all chains.

    The largest logit of a row is subtracted before exponentials are taken, so that none
    overflows. A logit that is nan makes all probabilities of its row nan.

    Args:
        logits: [n, C, chain].
    """
    raised = jnp.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def prior_share(prior: DevicePrior, columns: jax.Array) -> jax.Array:
    """Return a device's share of the prior's gradient, Λ(θ_c − θ₀_c)/K for every class.

    Args:
        prior: a device's share of the prior.
        columns: θ as [..., d, C, chain].

    Returns:
        Of the shape of `columns`.
    """
    if prior.mean is not None:
        columns = columns - columns_of(prior.mean[None], columns.shape[-3])
    if jnp.ndim(prior.curvature) == 0:
        return prior.curvature * columns
    return jnp.einsum(
        "ij,...jcx->...icx", prior.curvature, columns, precision="highest"
    )


def columns_of(theta: jax.Array, dim: int) -> jax.Array:
    """Return parameters as columns, with the chains along the last axis.

    Chains side by side make matrix products large, which accelerators are fast with.
    `vectors_of` is the inverse for parameters that all devices share.

    Args:
        theta: θ[chain, ..., m], the C vectors one after the other.
        dim: d.

    Returns:
        [..., d, C, chain].
    """
    by_class = theta.reshape(*theta.shape[:-1], -1, dim)
    return jnp.moveaxis(by_class.swapaxes(-1, -2), 0, -1)


def vectors_of(columns: jax.Array) -> jax.Array:
    """Return columns as parameters or gradients of chains again.

    It is the inverse of `columns_of`: the C vectors of d features stand one after the
    other in each chain's vector.

    Args:
        columns: [d, C, chain].

    Returns:
        [chain, m].
    """
    return columns.transpose(2, 1, 0).reshape(columns.shape[-1], -1)


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the matrix product of left[i, j] and right[j, ...].

    It is computed in full float32 on every accelerator; by default some would round
    factors to fewer bits, which the proof does not allow.

    Args:
        left: a matrix.
        right: an array whose first axis is summed over.

    Returns:
        [i, ...].
    """
    flat = right.reshape(right.shape[0], -1)
    products = jnp.matmul(left, flat, precision="highest")
    return products.reshape(-1, *right.shape[1:])


def weighted_rows(features: jax.Array, residuals: jax.Array) -> jax.Array:
    """Return Σ_n u_n r_nᵀ of every device of a block, one matrix product for each.

    In full float32, as `product`. Classes and chains are one axis here.

    Args:
        features: u[k, n, d].
        residuals: r[k, n, x].

    Returns:
        [k, d, x].
    """
    return jnp.einsum("knd,knx->kdx", features, residuals, precision="highest")


def _columns(common: jax.Array | None, inputs: DeviceInputs, dim: int) -> jax.Array:
    """Return θ of all devices as columns, or of each device of a block."""
    if common is not None:
        return common
    assert inputs.theta is not None
    return columns_of(inputs.theta, dim)


def _logits(features: jax.Array, columns: jax.Array) -> jax.Array:
    """Return logits[block · n, C, chain] of features[block, n, d or more]."""
    dim = columns.shape[-3]
    added_features = features.shape[-1] - dim
    if added_features:
        widths = [(0, 0)] * (columns.ndim - 3) + [(0, added_features), (0, 0), (0, 0)]
        columns = jnp.pad(columns, widths)
    if columns.ndim == 4:
        logits = jnp.einsum("knd,kdcx->kncx", features, columns, precision="highest")
        by_row = logits.reshape(-1, *columns.shape[2:])
    else:
        by_row = product(features.reshape(-1, features.shape[-1]), columns)
    return hold_logits(by_row, dim)


def hold_logits(products: jax.Array, dim: int) -> jax.Array:
    """Return logits of which every use has the same rounded number (Sums, step 8).

    The largest logit of a row is subtracted before exponentials are taken. The product
    of one feature is a multiplication, which XLA may compute again, unrounded, in that
    subtraction: the exponent of the largest logit is then not 0 but the rounding of the
    logit, of which the exponential may overflow. A product of more features is a matrix
    product, which is computed once, so that nothing has to be held.

    Args:
        products: of rows and parameters, of any shape.
        dim: d, the number of features that have parameters.

    Returns:
        The same numbers.
    """
    return computed_once(products) if dim == 1 else products


def _device_norms(gradients: jax.Array) -> jax.Array:
    """Return ‖g‖[block, chain] of gradients[block, d, C, chain] (Sums, step 3)."""
    by_class = barrier(sum_squares(gradients, 1))
    squares = jnp.sum(by_class, axis=1)
    return root_of_squares(squares, gradients.shape[1] * gradients.shape[2])


def _capped_share(prior: DevicePrior, columns: jax.Array) -> jax.Array:
    """Return a device's share of the prior's gradient, not absurdly long."""
    return cap_prior(prior_share(prior, columns), COLUMN_AXES)


def _zero_columns(theta: jax.Array, dim: int) -> jax.Array:
    """Return zeros[d, C, chain]."""
    return jnp.zeros((dim, theta.shape[-1] // dim, theta.shape[0]), theta.dtype)


@functools.cache
def device_clipped_sum(dim: int) -> Callable[..., ClippedSum]:
    """Return `clip_devices` of one chain.

    The function is the same object for equal d, so that nothing is compiled twice.
    Mapped over chains by `jax.vmap`, it is one call for all of them.

    Args:
        dim: d, the features that have parameters.

    Returns:
        A function of (blocks, prior, theta, weight, clip).
    """
    return batch_chains(functools.partial(clip_devices, dim=dim), chain_arguments=3)


@functools.cache
def record_clipped_sum(dim: int) -> Callable[..., ClippedSum]:
    """Return `clip_records` of one chain.

    The function is the same object for equal d, so that nothing is compiled twice.
    Mapped over chains by `jax.vmap`, it is one call for all of them.

    Args:
        dim: d, the features that have parameters.

    Returns:
        A function of (blocks, prior, theta, weight, clip, example_clip).
    """
    return batch_chains(functools.partial(clip_records, dim=dim), chain_arguments=4)
