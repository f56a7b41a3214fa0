r"""Clipped sums of the softmax model's gradients, one class after the other.

Logits are held as [chain, C, row]: exponentials and sums over classes run along rows,
which a processor takes several at a time, however few chains there are. With residuals
$r = p - 1[\mathrm{label}]$ the gradient of a record is $r\,u^\top$, of norm
$\lVert u\rVert\,\lVert r\rVert$; that of a device is $R\,U$ plus its share of the
prior's. θ[chain, m] is [chain, C, d] as it stands, so that nothing is transposed.

Accelerators with many chains take `wflmc.sums.softmax`, in which chains are the last
axis; devices of few rows have `wflmc.sums.softmax_rows`. The float64 reference of all
three is `reference.softmax_record_gradients`.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

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
from wflmc.sums.softmax import Curvature, LabelledRows

Total = TypeVar("Total", jax.Array, Pair)

CLASS_AXIS = 1
"""Of logits and residuals [chain, C, row]."""
PARAMETER_AXES = (-2, -1)
"""Axes of the parameters in [..., C, d]."""


def clip_devices(
    blocks: LabelledRows,
    curvature: Curvature,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    *,
    rows_per_step: int,
) -> ClippedSum:
    """Return Σ_k w_k clip(g_k) of some chains (Sums, steps 3 to 5).

    Args:
        blocks: records of devices, [blocks, block, n, ...].
        curvature: a device's share of the prior's.
        theta: θ[chain, m], or [chain, K, m] where each device received its own.
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.
        rows_per_step: how many rows of a device are taken at a time; divides n.

    Returns:
        The sum [chain, m] and the norms [chain, K].
    """
    common = None if theta.ndim == 3 else _by_class(theta, blocks)
    bound = signal_bound(weight, clip)

    def add(
        total: Sum,
        block: LabelledRows,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        parameters = _parameters(common, inputs, block)
        of_step = functools.partial(_gradients_of_step, parameters)
        likelihood = _sum_steps(of_step, block, rows_per_step)
        gradients = likelihood + prior_share(curvature, parameters)
        norms = _device_norms(gradients)
        factors = clip_factor(inputs.weight.T, inputs.clip.T, norms)
        clipped = factors[..., None, None] * gradients
        return add_devices(total, clipped, 0, bound), norms.T

    inputs = DeviceInputs(weight, clip, theta=theta if theta.ndim == 3 else None)
    start = zero_sum(_zero_parameters(theta, blocks), weight.shape[1])
    total, norms = scan_float32_groups(add, blocks, start, inputs)
    return ClippedSum(jax.tree.map(_vectors, total), norms)


def clip_records(
    blocks: LabelledRows,
    curvature: Curvature,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array,
    *,
    rows_per_step: int,
) -> ClippedSum:
    """Return the sum with every record clipped first (Sums, steps 1 to 5).

    Args:
        blocks: records of devices, with the norms of their features.
        curvature: a device's share of the prior's.
        theta: θ[chain, m], or [chain, K, m] where each device received its own.
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.
        example_clip: c, as `weight`.
        rows_per_step: how many rows of a device are taken at a time; divides n.

    Returns:
        The sum [chain, m] and the norms of the devices' gradients [chain, K].
    """
    common = None if theta.ndim == 3 else _by_class(theta, blocks)
    common_prior = None
    if common is not None:
        common_prior = _capped_prior(curvature, common)
    bound = signal_bound(weight, clip)

    def add(
        total: Sum,
        block: LabelledRows,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        parameters = _parameters(common, inputs, block)
        prior = common_prior
        if prior is None:
            prior = _capped_prior(curvature, parameters)
        assert inputs.example_clip is not None
        of_step = functools.partial(_records_of_step, parameters, inputs.example_clip)
        records = _sum_steps(of_step, block, rows_per_step)
        shares = jnp.broadcast_to(prior, records.high.shape)
        gradients = plus(records, as_pair(shares))
        return _add_clipped(total, gradients, inputs, block, bound)

    received = theta if theta.ndim == 3 else None
    inputs = DeviceInputs(weight, clip, example_clip, received)
    start = zero_pair_sum(_zero_parameters(theta, blocks))
    total, norms = scan_blocks(add, blocks, start, inputs)
    return ClippedSum(jax.tree.map(_vectors, total), norms)


def _add_clipped(
    total: Sum,
    gradients: Pair,
    inputs: DeviceInputs,
    block: LabelledRows,
    bound: jax.Array,
) -> tuple[Sum, jax.Array]:
    """Clip devices' gradients and add them; those of many records in pairs."""
    weight = inputs.weight.T
    clip = inputs.clip.T
    if block.labels.shape[1] > MAX_RECORDS_CLIPPED_IN_FLOAT32:
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


def _gradients_of_step(parameters: jax.Array, step: LabelledRows) -> jax.Array:
    """Return Σ_n r_n u_nᵀ over the rows of a step, unclipped.

    Args:
        parameters: θ as [chain, C, d], or [block, chain, C, d].
        step: records [block, rows, ...].

    Returns:
        [block, chain, C, d].
    """
    logits = _logits(step.features, parameters)
    residuals = softmax_residuals(logits, step.labels.ravel())
    return _weighted_rows(residuals, step.features)


def _records_of_step(
    parameters: jax.Array,
    example_clip: jax.Array,
    step: LabelledRows,
) -> Pair:
    """Return Σ_n r_n u_nᵀ over the rows of a step, each clipped (Sums, steps 1 to 3).

    Args:
        parameters: θ as [chain, C, d], or [block, chain, C, d].
        example_clip: c[chain or 1, block].
        step: records [block, rows, ...].

    Returns:
        [block, chain, C, d].
    """
    assert step.norms is not None
    logits = _logits(step.features, parameters)
    residuals = softmax_residuals(logits, step.labels.ravel())
    limits = jnp.repeat(example_clip, step.norms.shape[1], axis=1)
    clipped = clip_residuals(residuals, step.norms.ravel(), limits)
    return _sum_rows_in_pairs(clipped, step.features)


def _sum_steps(
    of_step: Callable[[LabelledRows], Total],
    block: LabelledRows,
    rows_per_step: int,
) -> Total:
    """Return the sum of a function over the steps in which rows are taken.

    Args:
        of_step: from the records of a step [block, rows, ...] to an array, which
            float32 adds, or to a pair.
        block: records [block, n, ...].
        rows_per_step: divides n.
    """
    if rows_per_step == block.labels.shape[1]:
        return of_step(block)

    def steps_first(values: jax.Array) -> jax.Array:
        devices, _, *rest = values.shape
        split = values.reshape(devices, -1, rows_per_step, *rest)
        return jnp.moveaxis(split, 1, 0)

    steps: LabelledRows = jax.tree.map(steps_first, block)

    def add(total: Total, step: LabelledRows) -> tuple[Total, None]:
        term = of_step(step)
        return plus(total, term) if isinstance(total, Pair) else total + term, None

    first = jax.tree.map(lambda values: values[0], steps)
    shape = jax.eval_shape(of_step, first)
    zero = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shape)
    total, _ = jax.lax.scan(add, zero, steps)
    return total


def _sum_rows_in_pairs(residuals: jax.Array, features: jax.Array) -> Pair:
    """Return Σ_n r_n u_nᵀ: float32 adds 256 rows, pairs these sums (steps 1 and 2).

    Args:
        residuals: clipped, r[chain, C, block · rows].
        features: u[block, rows, d].

    Returns:
        [block, chain, C, d].
    """
    block, rows, dim = features.shape
    if rows <= RECORDS_PER_FLOAT32_SUM:
        return as_pair(_weighted_rows(residuals, features))
    by_device = residuals.reshape(*residuals.shape[:2], block, rows)
    parts = split_axis(by_device, 3, RECORDS_PER_FLOAT32_SUM)
    count, size = parts.shape[3:]
    split_features = split_axis(features, 1, RECORDS_PER_FLOAT32_SUM)
    sums = _weighted_rows(
        parts.reshape(*residuals.shape[:2], -1),
        split_features.reshape(block * count, size, dim),
    )
    by_part = sums.reshape(block, count, *sums.shape[1:])
    terms = [as_pair(by_part[:, index]) for index in range(count)]
    return functools.reduce(plus, terms)


def clip_residuals(
    residuals: jax.Array,
    norms: jax.Array,
    limits: jax.Array,
) -> jax.Array:
    r"""Return $r \min(1, c/(\lVert u\rVert\,\lVert r\rVert))$ (Sums, step 3).

    Args:
        residuals: r[chain, C, n].
        norms: ‖u‖[n]; infinite for rows that add nothing.
        limits: c of every row, [chain or 1, n].

    Returns:
        Residuals of records that are clipped.
    """
    squares = jnp.sum(residuals**2, axis=CLASS_AXIS)
    lengths = root_of_squares(squares, residuals.shape[CLASS_AXIS]) * norms
    return residuals * clip_factor(jnp.ones(()), limits, lengths)[:, None]


def softmax_residuals(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return p(class|u) − 1[class = label] of logits[chain, C, n], labels[n]."""
    raised = jnp.exp(logits - logits.max(CLASS_AXIS, keepdims=True))
    p = raised * (1 / raised.sum(CLASS_AXIS, keepdims=True))
    classes = jnp.arange(logits.shape[CLASS_AXIS], dtype=labels.dtype)
    return p - (labels == classes[:, None]).astype(p.dtype)


def prior_share(curvature: Curvature, parameters: jax.Array) -> jax.Array:
    """Return a device's share of the prior's gradient at parameters[..., C, d]."""
    if jnp.ndim(curvature) == 0:
        share = curvature * parameters
    else:
        share = jnp.matmul(parameters, curvature, precision="highest")
    return _behind_block(share)


def _capped_prior(curvature: Curvature, parameters: jax.Array) -> jax.Array:
    """Return a device's share of the prior's gradient, not absurdly long."""
    return cap_prior(prior_share(curvature, parameters), PARAMETER_AXES)


def _logits(features: jax.Array, parameters: jax.Array) -> jax.Array:
    """Return logits[chain, C, block · rows] of features[block, rows, d]."""
    block, rows, dim = features.shape
    if parameters.ndim == 3:
        flat = jnp.matmul(
            parameters.reshape(-1, dim),
            features.reshape(-1, dim).T,
            precision="highest",
        )
        return flat.reshape(*parameters.shape[:2], block * rows)
    logits = jnp.einsum("kxcd,knd->xckn", parameters, features, precision="highest")
    return logits.reshape(*parameters.shape[1:3], block * rows)


def _weighted_rows(residuals: jax.Array, features: jax.Array) -> jax.Array:
    """Return Σ_n r_n u_nᵀ of every device: [chain, C, k · n], [k, n, d] to [k, x, C, d]."""
    block, rows, dim = features.shape
    shape = residuals.shape[:2]
    flat = residuals.reshape(-1, block * rows)
    if block == 1:
        sums = jnp.matmul(flat, features[0], precision="highest")
    else:
        by_device = flat.reshape(-1, block, rows)
        sums = jnp.einsum("xkn,knd->kxd", by_device, features, precision="highest")
    return sums.reshape(block, *shape, dim)


def _device_norms(gradients: jax.Array) -> jax.Array:
    """Return ‖g‖[block, chain] of gradients[block, chain, C, d] (Sums, step 3)."""
    by_feature = barrier(sum_squares(gradients, axis=2))
    squares = staged_sum(by_feature, axis=2)
    return root_of_squares(squares, gradients.shape[2] * gradients.shape[3])


def _by_class(theta: jax.Array, blocks: LabelledRows) -> jax.Array:
    """Return θ[..., m] as [..., C, d]."""
    return theta.reshape(*theta.shape[:-1], -1, blocks.features.shape[-1])


def _parameters(
    common: jax.Array | None,
    inputs: DeviceInputs,
    block: LabelledRows,
) -> jax.Array:
    """Return θ of all devices [chain, C, d], or of each one [block, chain, C, d]."""
    if common is not None:
        return common
    assert inputs.theta is not None
    return _by_class(inputs.theta.swapaxes(0, 1), block)


def _behind_block(values: jax.Array) -> jax.Array:
    """Return [chain, C, d] with an axis of devices in front, where it has none."""
    return values[None] if values.ndim == 3 else values


def _flat_parameters(values: jax.Array) -> jax.Array:
    """Return [..., C, d] as [..., m]."""
    return values.reshape(*values.shape[:-2], -1)


def _vectors(total: jax.Array) -> jax.Array:
    """Return [chain, C, d] as θ[chain, m] again."""
    return total.reshape(total.shape[0], -1)


def _zero_parameters(theta: jax.Array, blocks: LabelledRows) -> jax.Array:
    """Return zeros[chain, C, d]."""
    dim = blocks.features.shape[-1]
    return jnp.zeros((theta.shape[0], theta.shape[-1] // dim, dim), theta.dtype)


@functools.cache
def device_clipped_sum(rows_per_step: int) -> Callable[..., ClippedSum]:
    """Return `clip_devices` of one chain, of (blocks, curvature, theta, weight, clip)."""
    return batch_chains(
        functools.partial(clip_devices, rows_per_step=rows_per_step),
        chain_arguments=3,
    )


@functools.cache
def record_clipped_sum(rows_per_step: int) -> Callable[..., ClippedSum]:
    """Return `clip_records` of one chain, as `device_clipped_sum` with example_clip."""
    return batch_chains(
        functools.partial(clip_records, rows_per_step=rows_per_step),
        chain_arguments=4,
    )
