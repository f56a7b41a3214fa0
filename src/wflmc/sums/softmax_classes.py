r"""Clipped sums of the softmax model's gradients, one class after the other.

Logits are held as [chain, C, row]: exponentials and sums over classes run along rows,
which a processor takes several at a time, however few chains there are. With residuals
$r = p - 1[\mathrm{label}]$ the gradient of a record is $r\,u^\top$, of norm
$\lVert u\rVert\,\lVert r\rVert$; that of a device is $R\,U$ plus its share of the
prior's. θ[chain, m] is [chain, C, d] as it stands, so that nothing is transposed.

Accelerators take `wflmc.sums.softmax`, in which chains are the last axis; devices of
few rows have `wflmc.sums.softmax_rows`. The float64 reference of all three is
`reference.softmax_record_gradients`.

Letters in einsum strings: k is a device of a block, s a part of its rows, n a row, d a
feature, c a class, x a chain, or a class and a chain where these are one axis.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

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
from wflmc.sums.norms import root_of_squares, staged_sum, sum_squares
from wflmc.sums.pairs import Pair, as_pair, barrier, plus
from wflmc.sums.parts import split_axis
from wflmc.sums.prior import DevicePrior
from wflmc.sums.records import sum_steps
from wflmc.sums.softmax import LabelledRows, hold_logits

Total = TypeVar("Total", jax.Array, Pair)
"""A sum over rows: in float32, or as a pair."""

CLASS_AXIS = 1
"""Of logits and residuals [chain, C, row]."""
PARAMETER_AXES = (-2, -1)
"""Axes of the parameters in [..., C, d]."""


class Steps(NamedTuple):
    """How many devices and rows are processed at a time."""

    block: int
    """Devices whose gradients are clipped and added at a time."""
    rows: int
    """Rows of a device that are taken at a time; divides n. Where whole devices are
    taken together it does not count."""
    takes_devices_together: bool = False
    """Whether a step has all rows of a block of devices. It may then have more than 256
    rows of a device, which are clipped together and added in parts of at most 256."""

    def blocks(self, records: LabelledRows) -> jax.Array:
        """Return the numbers of the devices, block by block.

        Loops go through these, not through the data: what a loop takes apart, XLA may
        copy before it.

        Args:
            records: of devices, [K', n, ...], in whole blocks.

        Returns:
            0 to K' − 1, [blocks, block].
        """
        return jnp.arange(len(records.labels)).reshape(-1, self.block)


class StepInputs(NamedTuple):
    """What the devices of a step have to know beside their data."""

    parameters: jax.Array
    """θ as [chain, C, d], or [devices, chain, C, d]."""
    example_clip: jax.Array | None
    """c[chain or 1, devices], where records are clipped."""

    def of_device(self, index: jax.Array) -> "StepInputs":
        """Return the inputs of one of the devices, their axis kept with length 1.

        Parameters that all devices share are returned as they are.

        Args:
            index: of the device within the step.
        """
        parameters = self.parameters
        if parameters.ndim == 4:
            parameters = jax.lax.dynamic_slice_in_dim(parameters, index, 1)
        example_clip = self.example_clip
        if example_clip is not None:
            example_clip = jax.lax.dynamic_slice_in_dim(example_clip, index, 1, axis=1)
        return StepInputs(parameters, example_clip)


def clip_devices(
    records: LabelledRows,
    prior: DevicePrior,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    *,
    steps: Steps,
) -> ClippedSum:
    """Return Σ_k w_k clip(g_k) of some chains (Sums, steps 3 to 5).

    A gradient is R U of residuals and features, plus the prior's share. Rows of a
    device are taken in steps, so that memory does not grow with their number.

    Args:
        records: of devices, [K', n, ...], in whole blocks.
        prior: a device's share of the prior.
        theta: θ[chain, m], or [chain, K, m] where each device received its own.
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.
        steps: how many devices and rows are taken at a time.

    Returns:
        The sum [chain, m] and the norms [chain, K].
    """
    common = None if theta.ndim == 3 else _by_class(theta, records)
    bound = signal_bound(weight, clip)[:, None, None]

    def add(
        total: Sum,
        devices: jax.Array,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        parameters = _parameters(common, inputs, records)
        likelihood = _sum_rows(
            _gradients_of_step, records, devices, inputs, parameters, steps
        )
        gradients = likelihood + prior_share(prior, parameters)
        norms = _device_norms(gradients)
        factors = clip_factor(inputs.weight.T, inputs.clip.T, norms)
        clipped = factors[..., None, None] * gradients
        return add_devices(total, clipped, 0, bound), norms.T

    inputs = DeviceInputs(weight, clip, theta=theta if theta.ndim == 3 else None)
    start = zero_sum(_zero_parameters(theta, records), weight.shape[1])
    total, norms = scan_float32_groups(add, steps.blocks(records), start, inputs)
    return ClippedSum(jax.tree.map(_vectors, total), norms)


def clip_records(
    records: LabelledRows,
    prior: DevicePrior,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array,
    *,
    steps: Steps,
) -> ClippedSum:
    """Return the sum with every record clipped first (Sums, steps 1 to 5).

    Residuals are clipped in place of records: no gradient of a record is ever written.
    Float32 adds at most 256 rows of a device: a step, or a part of one that has whole
    devices. Pairs add these sums, and devices are clipped after that, those of more
    than 1,024 records in pairs too.

    Args:
        records: of devices, [K', n, ...], with the norms of their features.
        prior: a device's share of the prior.
        theta: θ[chain, m], or [chain, K, m] where each device received its own.
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.
        example_clip: c, as `weight`.
        steps: how many devices and rows are taken at a time.

    Returns:
        The sum [chain, m] and the norms of the devices' gradients [chain, K].
    """
    common = None if theta.ndim == 3 else _by_class(theta, records)
    common_prior_gradient = None
    if common is not None:
        common_prior_gradient = _capped_share(prior, common)
    bound = signal_bound(weight, clip)[:, None, None]

    def add(
        total: Sum,
        devices: jax.Array,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        parameters = _parameters(common, inputs, records)
        prior_gradient = common_prior_gradient
        if prior_gradient is None:
            prior_gradient = _capped_share(prior, parameters)
        of_records = _sum_rows(
            _records_of_step, records, devices, inputs, parameters, steps
        )
        shares = jnp.broadcast_to(prior_gradient, of_records.high.shape)
        gradients = plus(of_records, as_pair(shares))
        in_pairs = records.labels.shape[1] > MAX_RECORDS_CLIPPED_IN_FLOAT32
        return _add_clipped(total, gradients, inputs, bound, in_pairs)

    received = theta if theta.ndim == 3 else None
    inputs = DeviceInputs(weight, clip, example_clip, received)
    start = zero_pair_sum(_zero_parameters(theta, records))
    total, norms = scan_blocks(add, steps.blocks(records), start, inputs)
    return ClippedSum(jax.tree.map(_vectors, total), norms)


def _add_clipped(
    total: Sum,
    gradients: Pair,
    inputs: DeviceInputs,
    bound: jax.Array,
    in_pairs: bool,
) -> tuple[Sum, jax.Array]:
    """Clip devices' gradients and add them; those of many records in pairs."""
    weight = inputs.weight.T
    clip = inputs.clip.T
    if in_pairs:
        block_and_chain = gradients.high.shape[:2]
        flat = Pair(*(_flat_parameters(part) for part in gradients))
        weights = jnp.broadcast_to(weight, block_and_chain)
        clipped, norms = clip_pairs(flat, weights, clip, (2,))
        sent = Pair(*(part.reshape(gradients.high.shape) for part in clipped))
        return add_pairs_on_lattice(total, sent, 0, bound), norms.T
    rounded = gradients.rounded
    norms = _device_norms(rounded)
    factors = clip_factor(weight, clip, norms)
    sent_rounded = factors[..., None, None] * rounded
    return add_on_lattice(total, sent_rounded, 0, bound), norms.T


def _gradients_of_step(step: LabelledRows, inputs: StepInputs) -> jax.Array:
    """Return Σ_n r_n u_nᵀ over the rows of a step, unclipped.

    Args:
        step: records [devices, rows, ...].
        inputs: of these devices.

    Returns:
        [devices, chain, C, d].
    """
    logits = _logits(step.features, inputs.parameters)
    residuals = softmax_residuals(logits, step.labels.ravel())
    return _weighted_rows(residuals, step.features)


def _records_of_step(step: LabelledRows, inputs: StepInputs) -> Pair:
    """Return Σ_n r_n u_nᵀ over the rows of a step, each clipped (Sums, steps 1 to 3).

    Args:
        step: records [devices, rows, ...].
        inputs: of these devices.

    Returns:
        [devices, chain, C, d].
    """
    assert step.norms is not None
    assert inputs.example_clip is not None
    logits = _logits(step.features, inputs.parameters)
    residuals = softmax_residuals(logits, step.labels.ravel())
    limits = jnp.repeat(inputs.example_clip, step.norms.shape[1], axis=1)
    clipped = clip_residuals(residuals, step.norms.ravel(), limits)
    return _add_in_pairs(clipped, step.features)


def _sum_rows(
    of_step: Callable[[LabelledRows, StepInputs], Total],
    records: LabelledRows,
    devices: jax.Array,
    inputs: DeviceInputs,
    parameters: jax.Array,
    steps: Steps,
) -> Total:
    """Return the sum over the rows of every device of a block.

    The devices of a block are computed together, or one after the other in steps.

    Args:
        of_step: from the records of a step to the sum over its rows, an array or a
            pair. Float32 adds the arrays of several steps; pairs are added as pairs.
        records: of all devices, [K', n, ...].
        devices: which of them are the block, successive numbers [block].
        inputs: of the block.
        parameters: θ as [chain, C, d], or [block, chain, C, d].
        steps: how many rows are taken at a time.

    Returns:
        [block, chain, C, d].
    """
    block = len(devices)
    of_block = StepInputs(parameters, inputs.example_clip)
    if steps.takes_devices_together:
        return of_step(_slice_rows(records, devices[0], block), of_block)
    if block == 1:
        return _sum_steps(of_step, records, devices[0], of_block, steps.rows)

    def of_device(index: jax.Array) -> Total:
        device_inputs = of_block.of_device(index)
        device = devices[0] + index
        total = _sum_steps(of_step, records, device, device_inputs, steps.rows)
        alone: Total = jax.tree.map(lambda values: values[0], total)
        return alone

    return jax.lax.map(of_device, jnp.arange(block))


def _sum_steps(
    of_step: Callable[[LabelledRows, StepInputs], Total],
    records: LabelledRows,
    device: jax.Array,
    inputs: StepInputs,
    rows_per_step: int,
) -> Total:
    """Return the sum over the rows of one device, `rows_per_step` at a time.

    Memory therefore does not grow with the number of rows.

    Args:
        of_step: as of `_sum_rows`.
        records: of all devices, [K', n, ...].
        device: its number.
        inputs: of the device.
        rows_per_step: divides n.

    Returns:
        [1, chain, C, d]: a step is a block of one device for `of_step`.
    """
    step_count = records.labels.shape[1] // rows_per_step
    if step_count == 1:
        return of_step(_slice_rows(records, device, 1), inputs)
    by_step: LabelledRows = jax.tree.map(
        lambda values: values.reshape(-1, rows_per_step, *values.shape[2:]),
        records,
    )
    first_step = device * step_count

    def add(total: Total, index: jax.Array) -> tuple[Total, None]:
        term = of_step(_slice_rows(by_step, first_step + index, 1), inputs)
        return plus(total, term) if isinstance(total, Pair) else total + term, None

    # From zero, and not from the first step: XLA would compute a step outside of the
    # loop at the same time as one inside, in threads that wait for each other longer
    # than a step takes.
    of_first_step = jax.eval_shape(of_step, _slice_rows(by_step, first_step, 1), inputs)
    zero: Total = jax.tree.map(
        lambda values: jnp.zeros(values.shape, values.dtype), of_first_step
    )
    total, _ = jax.lax.scan(add, zero, jnp.arange(step_count))
    return total


def _slice_rows(records: LabelledRows, first: jax.Array, count: int) -> LabelledRows:
    """Return some entries along the first axis of all arrays."""
    chosen: LabelledRows = jax.tree.map(
        lambda values: jax.lax.dynamic_slice_in_dim(values, first, count),
        records,
    )
    return chosen


def clip_residuals(
    residuals: jax.Array,
    norms: jax.Array,
    limits: jax.Array,
) -> jax.Array:
    r"""Return $r \min(1, c/(\lVert u\rVert\,\lVert r\rVert))$ (Sums, step 3).

    The gradient $r\,u^\top$ of a record is then at most c long, but for rounding. Rows
    whose norm is infinite, as their squares would overflow, get residuals of zero. So
    do rows whose residuals are not finite, which must not show in the sum of all others
    (step 8).

    Args:
        residuals: r[chain, C, n].
        norms: ‖u‖[n]; infinite for rows that add nothing.
        limits: c of every row, [chain or 1, n].

    Returns:
        Residuals of records that are clipped.
    """
    squares = jnp.sum(residuals**2, axis=CLASS_AXIS)
    lengths = root_of_squares(squares, residuals.shape[CLASS_AXIS]) * norms
    # The barrier asks for one factor for a row, not for every class. Where XLA computes
    # it for every class all the same, it is the same number: it is added to nothing.
    weight = jnp.ones(())
    factors = barrier(clip_factor(weight, limits, lengths))
    clipped = residuals * factors[:, None]
    usable = jnp.isfinite(lengths)
    return jnp.where(usable[:, None], clipped, 0.0)


def softmax_residuals(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the residuals p(class|u) − 1[class = label] of rows for all chains.

    The largest logit of a row is subtracted before exponentials are taken, so that none
    overflows. Labels are the same for all chains.

    Args:
        logits: [chain, C, n].
        labels: classes [n], from 0.

    Returns:
        [chain, C, n].
    """
    raised = jnp.exp(logits - logits.max(CLASS_AXIS, keepdims=True))
    p = raised * (1 / raised.sum(CLASS_AXIS, keepdims=True))
    classes = jnp.arange(logits.shape[CLASS_AXIS], dtype=labels.dtype)
    return p - (labels == classes[:, None]).astype(p.dtype)


def prior_share(prior: DevicePrior, parameters: jax.Array) -> jax.Array:
    """Return a device's share of the prior's gradient, Λ(θ_c − θ₀_c)/K for every class.

    Args:
        prior: a device's share of the prior.
        parameters: θ as [chain, C, d], or [block, chain, C, d].

    Returns:
        [block or 1, chain, C, d].
    """
    if prior.mean is not None:
        parameters = parameters - prior.mean.reshape(parameters.shape[-2:])
    if jnp.ndim(prior.curvature) == 0:
        gradient = prior.curvature * parameters
    else:
        gradient = jnp.matmul(parameters, prior.curvature, precision="highest")
    return _with_device_axis(gradient)


def _capped_share(prior: DevicePrior, parameters: jax.Array) -> jax.Array:
    """Return a device's share of the prior's gradient, not absurdly long."""
    return cap_prior(prior_share(prior, parameters), PARAMETER_AXES)


def _logits(features: jax.Array, parameters: jax.Array) -> jax.Array:
    """Return logits[chain, C, block · rows] of features[block, rows, d]."""
    block, rows, dim = features.shape
    if parameters.ndim == 3:
        flat = parameters.reshape(-1, dim)
        all_rows = features.reshape(-1, dim)
        logits = jnp.matmul(flat, all_rows.T, precision="highest")
    else:
        logits = jnp.einsum("kxcd,knd->xckn", parameters, features, precision="highest")
    by_row = logits.reshape(*parameters.shape[-3:-1], block * rows)
    return hold_logits(by_row, dim)


def _weighted_rows(residuals: jax.Array, features: jax.Array) -> jax.Array:
    """Return Σ_n r_n u_nᵀ of every device.

    Args:
        residuals: r[chain, C, k · n].
        features: u[k, n, d].

    Returns:
        [k, chain, C, d].
    """
    block, rows, dim = features.shape
    shape = residuals.shape[:2]
    flat = residuals.reshape(-1, block * rows)
    if block == 1:
        sums = jnp.matmul(flat, features[0], precision="highest")
    else:
        by_device = flat.reshape(-1, block, rows)
        sums = jnp.einsum("xkn,knd->kxd", by_device, features, precision="highest")
    return sums.reshape(block, *shape, dim)


def _add_in_pairs(residuals: jax.Array, features: jax.Array) -> Pair:
    """Return Σ_n r_n u_nᵀ of every device, in pairs (Sums, steps 1 and 2).

    Float32 adds at most 256 rows; pairs add these sums.

    Args:
        residuals: r[chain, C, k · n].
        features: u[k, n, d].

    Returns:
        [k, chain, C, d].
    """
    block, rows, dim = features.shape
    if rows <= RECORDS_PER_FLOAT32_SUM:
        return as_pair(_weighted_rows(residuals, features))
    by_device = residuals.reshape(-1, block, rows)
    residual_parts = split_axis(by_device, 2, RECORDS_PER_FLOAT32_SUM)
    feature_parts = split_axis(features, 1, RECORDS_PER_FLOAT32_SUM)
    float32_sums = jnp.einsum(
        "xksn,ksnd->ksxd", residual_parts, feature_parts, precision="highest"
    )
    total = sum_steps(float32_sums)
    shape = (block, *residuals.shape[:2], dim)
    return Pair(total.high.reshape(shape), total.low.reshape(shape))


def _device_norms(gradients: jax.Array) -> jax.Array:
    """Return ‖g‖[block, chain] of gradients[block, chain, C, d] (Sums, step 3)."""
    by_feature = barrier(sum_squares(gradients, axis=2))
    squares = staged_sum(by_feature, axis=2)
    return root_of_squares(squares, gradients.shape[2] * gradients.shape[3])


def _by_class(theta: jax.Array, records: LabelledRows) -> jax.Array:
    """Return θ[..., m] as [..., C, d]; d is that of the records."""
    return theta.reshape(*theta.shape[:-1], -1, records.features.shape[-1])


def _parameters(
    common: jax.Array | None,
    inputs: DeviceInputs,
    records: LabelledRows,
) -> jax.Array:
    """Return θ of a block of devices.

    Args:
        common: θ as [chain, C, d] where all devices received the same; else None.
        inputs: of the block.
        records: of all devices.

    Returns:
        `common`, or [block, chain, C, d] where each device received its own.
    """
    if common is not None:
        return common
    assert inputs.theta is not None
    return _by_class(inputs.theta.swapaxes(0, 1), records)


def _with_device_axis(values: jax.Array) -> jax.Array:
    """Return [chain, C, d] with an axis of devices in front, where it has none."""
    return values[None] if values.ndim == 3 else values


def _flat_parameters(values: jax.Array) -> jax.Array:
    """Return [..., C, d] as [..., m]."""
    return values.reshape(*values.shape[:-2], -1)


def _vectors(total: jax.Array) -> jax.Array:
    """Return [chain, C, d] as θ[chain, m] again."""
    return total.reshape(total.shape[0], -1)


def _zero_parameters(theta: jax.Array, records: LabelledRows) -> jax.Array:
    """Return zeros[chain, C, d]."""
    dim = records.features.shape[-1]
    return jnp.zeros((theta.shape[0], theta.shape[-1] // dim, dim), theta.dtype)


@functools.cache
def device_clipped_sum(steps: Steps) -> Callable[..., ClippedSum]:
    """Return `clip_devices` of one chain.

    The function is the same object for equal steps, so that nothing is compiled twice.
    Mapped over chains by `jax.vmap`, it is one call for all of them.

    Args:
        steps: how many devices and rows are taken at a time.

    Returns:
        A function of (records, prior, theta, weight, clip).
    """
    return batch_chains(
        functools.partial(clip_devices, steps=steps),
        chain_arguments=3,
    )


@functools.cache
def record_clipped_sum(steps: Steps) -> Callable[..., ClippedSum]:
    """Return `clip_records` of one chain.

    The function is the same object for equal steps, so that nothing is compiled twice.
    Mapped over chains by `jax.vmap`, it is one call for all of them.

    Args:
        steps: how many devices and rows are taken at a time.

    Returns:
        A function of (records, prior, theta, weight, clip, example_clip).
    """
    return batch_chains(
        functools.partial(clip_records, steps=steps),
        chain_arguments=4,
    )
