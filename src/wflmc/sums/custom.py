"""Clipped sums of a custom model's gradients, by automatic differentiation.

The float64 reference is `reference.record_clipped_sum`, given the gradients of single
records.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wflmc.sums.blocks import AddBlock, DeviceInputs, scan_blocks, split_blocks
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
from wflmc.sums.norms import row_norms
from wflmc.sums.pairs import Pair, as_pair, plus, two_sum
from wflmc.sums.record_gradients import ArrayGradients, with_fast_convolutions
from wflmc.support.errors import without_data
from wflmc.support.trees import ArrayTree


@without_data
class DeviceRecords(NamedTuple):
    """Records of devices, with a leading axis [K], or of one device, without it."""

    records: ArrayTree
    """A pytree of arrays [..., n, ...], filled up with copies."""
    size: jax.Array
    """How many of them there really are."""
    number: jax.Array
    """The device's number, by which its mini-batches are drawn."""


@dataclass(frozen=True)
class CustomGradients:
    """The functions and sizes that a custom model's sums are made of."""

    costs: Callable[[jax.Array, ArrayTree], jax.Array]
    """−log p(record|θ) of θ[m] and records[n, ...], [n]."""
    record_gradients: Callable[[jax.Array, ArrayTree], list[ArrayGradients]]
    """Gradients of the cost of every record, by array of parameters."""
    prior_gradient: Callable[[jax.Array], jax.Array]
    """A device's share of the prior's gradient at θ[m], [m]."""
    devices: int
    """K."""
    block: int
    """Devices that are computed at a time."""
    batch: int | None
    """Records that a device draws for a round; None: all."""
    records_per_block: int
    """Records of a device that are computed at a time; 0: all."""


@without_data
class DeviceGradient(NamedTuple):
    """A device's gradient with its share of the prior's."""

    gradient: Pair
    """[m]."""
    nonfinite: jax.Array
    """Whether a record was left out of it that has no finite gradient."""


@without_data
class Batch(NamedTuple):
    """Records of one device that take part in a round."""

    records: ArrayTree
    """A pytree of arrays [n, ...]."""
    real: jax.Array
    """Which of them are not copies, [n]."""
    scale: jax.Array
    """What each counts: N_k/batch, or 1."""
    block: int
    """How many are computed at a time."""


BlockGradient = Callable[[ArrayTree, jax.Array], tuple[jax.Array, jax.Array]]
"""From a block of records, and which of them are real, to the sum of their gradients
[m], and whether one was left out."""


# Sums over devices.


def device_clipped_sum(
    model: CustomGradients,
    data: DeviceRecords,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    key: jax.Array | None,
) -> ClippedSum:
    """Return Σ_k w_k clip(g_k) of one chain (Sums, steps 3 to 5).

    Gradients of a block of devices are computed together by automatic differentiation,
    and clipped as whole vectors. With mini-batches every device draws its own records.

    Args:
        model: what gradients are made of.
        data: records of all devices, [K', ...].
        theta: θ[m], or [K, m] where each device received its own.
        weight: w[K].
        clip: ℓ[K].
        key: draws the mini-batches; None: all records take part.

    Returns:
        The sum [m] and the norms [K]; a norm is not a number where a gradient is not.
    """
    bound = signal_bound(weight, clip)

    def gradient_of(
        theta: jax.Array,
        device: DeviceRecords,
        key: jax.Array | None,
    ) -> DeviceGradient:
        return device_gradient(model, theta, device, key)

    def add(
        total: Sum,
        block: DeviceRecords,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        received = None if inputs.theta is None else inputs.theta[0]
        if model.block == 1 and received is None:
            # `vmap` would compute both branches of a condition.
            of_device = with_fast_convolutions(gradient_of)
            gradients = _of_one(of_device(theta, _first(block), key))
        else:
            axes = (None if received is None else 0, 0, None)
            position = theta if received is None else received
            of_block = with_fast_convolutions(jax.vmap(gradient_of, axes))
            gradients = of_block(position, block, key)
        clipped, norms = _clip_float32(
            gradients.gradient.high,
            gradients.nonfinite,
            inputs,
        )
        return add_devices(total, clipped, 0, bound), norms[None]

    inputs = _inputs(theta, weight, clip)
    start = zero_sum(_zeros(theta), model.devices)
    return _scan(add, model, data, start, inputs)


def record_clipped_sum(
    model: CustomGradients,
    data: DeviceRecords,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array,
    key: jax.Array | None,
) -> ClippedSum:
    """Return the sum with every record clipped first (Sums, steps 1 to 5).

    A record whose gradient is not finite adds nothing, and its device's norm is
    reported as nan. Devices of more than 1,024 records are clipped in pairs.

    Args:
        model: what gradients are made of.
        data: records of all devices, [K', ...].
        theta: θ[m], or [K, m] where each device received its own.
        weight: w[K].
        clip: ℓ[K].
        example_clip: c[K].
        key: draws the mini-batches; None: all records take part.

    Returns:
        The sum [m] and the norms [K]; a norm is not a number where a gradient is not.
    """
    bound = signal_bound(weight, clip)
    longest = jax.tree.leaves(data.records)[0].shape[1]
    in_pairs = longest > MAX_RECORDS_CLIPPED_IN_FLOAT32

    def gradient_of(
        theta: jax.Array,
        device: DeviceRecords,
        limit: jax.Array,
        key: jax.Array | None,
    ) -> DeviceGradient:
        return clipped_device_gradient(model, theta, device, limit, key)

    def add(
        total: Sum,
        block: DeviceRecords,
        inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        assert inputs.example_clip is not None
        received = None if inputs.theta is None else inputs.theta[0]
        limits = inputs.example_clip[0]
        if model.block == 1 and received is None:
            # `vmap` would compute both branches of a condition.
            of_device = with_fast_convolutions(gradient_of)
            gradients = _of_one(of_device(theta, _first(block), limits[0], key))
        else:
            axes = (None if received is None else 0, 0, 0, None)
            position = theta if received is None else received
            of_block = with_fast_convolutions(jax.vmap(gradient_of, axes))
            gradients = of_block(position, block, limits, key)
        if in_pairs:
            weights = inputs.weight[0]
            sent, lengths = clip_pairs(
                gradients.gradient, weights, inputs.clip[0], (-1,)
            )
            norms = jnp.where(gradients.nonfinite, jnp.nan, lengths)
            return add_pairs_on_lattice(total, sent, 0, bound), norms[None]
        clipped, norms = _clip_float32(
            gradients.gradient.rounded,
            gradients.nonfinite,
            inputs,
        )
        return add_on_lattice(total, clipped, 0, bound), norms[None]

    inputs = _inputs(theta, weight, clip, example_clip)
    return _scan(add, model, data, zero_pair_sum(_zeros(theta)), inputs)


def _inputs(
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array | None = None,
) -> DeviceInputs:
    """Return the inputs of devices, with a chain axis of length 1."""
    return DeviceInputs(
        weight=jnp.asarray(weight)[None],
        clip=jnp.asarray(clip)[None],
        example_clip=None if example_clip is None else example_clip[None],
        theta=theta[None] if theta.ndim == 2 else None,
    )


def _scan(
    add: AddBlock[DeviceRecords],
    model: CustomGradients,
    data: DeviceRecords,
    start: Sum,
    inputs: DeviceInputs,
) -> ClippedSum:
    """Return the sum over blocks of devices, without a chain axis."""
    blocks = jax.tree.map(lambda values: split_blocks(values, model.block), data)
    total, norms = scan_blocks(add, blocks, start, inputs)
    return ClippedSum(total, norms[0])


def _clip_float32(
    gradients: jax.Array,
    nonfinite: jax.Array,
    inputs: DeviceInputs,
) -> tuple[jax.Array, jax.Array]:
    """Clip gradients[block, m]; one that is not a number adds nothing (Sums, step 8).

    Returns:
        The clipped gradients [block, m]; and the norms [block], not a number where a
        record was lost, so that a chain of a simulation stops.
    """
    lengths = row_norms(gradients)
    factors = clip_factor(inputs.weight[0], inputs.clip[0], lengths)
    norms = jnp.where(nonfinite, jnp.nan, lengths)
    no_number = jnp.isnan(lengths)[:, None]
    return jnp.where(no_number, 0.0, factors[:, None] * gradients), norms


def _zeros(theta: jax.Array) -> jax.Array:
    """Return zeros[m]."""
    return jnp.zeros(theta.shape[-1], theta.dtype)


def _first(block: DeviceRecords) -> DeviceRecords:
    """Return the only device of a block."""
    first: DeviceRecords = jax.tree.map(lambda values: values[0], block)
    return first


def _of_one(device: DeviceGradient) -> DeviceGradient:
    """Return the gradient of one device as that of a block."""
    block: DeviceGradient = jax.tree.map(lambda value: value[None], device)
    return block


# Gradients of one device.


def device_gradient(
    model: CustomGradients,
    theta: jax.Array,
    device: DeviceRecords,
    key: jax.Array | None = None,
) -> DeviceGradient:
    """Return one device's gradient without clipping.

    It is Σ −∇log p(record|θ) over its records plus its share of the prior's gradient.
    With a mini-batch the records drawn count N_k/batch times. Copies that fill up a
    device count 0.

    Args:
        model: what gradients are made of.
        theta: θ[m].
        device: its records.
        key: draws the mini-batch; None: all records take part.

    Returns:
        The gradient with the device's share of the prior's, [m].
    """
    batch = _drawn(model, device, key, theta.dtype)

    def block_gradient(
        records: ArrayTree,
        real: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        def cost(position: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(real, model.costs(position, records), 0.0))

        return batch.scale * jax.grad(cost)(theta), jnp.zeros((), bool)

    return _sum_records(block_gradient, batch, model.prior_gradient(theta))


def clipped_device_gradient(
    model: CustomGradients,
    theta: jax.Array,
    device: DeviceRecords,
    example_clip: jax.Array,
    key: jax.Array | None = None,
) -> DeviceGradient:
    """Return one device's gradient with its records clipped (Sums, steps 1 to 3).

    At most 256 records are in one float32 sum. The prior's share is not clipped with
    them, only kept from being absurdly long (`cap_prior`).

    Args:
        model: what gradients are made of.
        theta: θ[m].
        device: its records.
        example_clip: c, of what a record adds: of a mini-batch, N_k/batch times its
            gradient.
        key: draws the mini-batch; None: all records take part.

    Returns:
        The gradient with the device's share of the prior's, [m].
    """
    batch = _drawn(model, device, key, theta.dtype)
    block_gradient = partial(
        _clipped_block_gradient,
        model,
        theta,
        example_clip,
        batch.scale,
    )
    prior = cap_prior(model.prior_gradient(theta), (-1,))
    # More records in one float32 sum would be more sensitive (Sums, step 1).
    batch = batch._replace(block=min(batch.block, RECORDS_PER_FLOAT32_SUM))
    return _sum_records(block_gradient, batch, prior)


def _clipped_block_gradient(
    model: CustomGradients,
    theta: jax.Array,
    example_clip: jax.Array,
    scale: jax.Array,
    records: ArrayTree,
    real: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of clipped gradients of a block, and whether one was left out.

    A record without a finite gradient adds nothing: whether there is one must not show.
    """
    arrays = model.record_gradients(theta, records)
    norms = _record_norms(arrays, example_clip, scale)
    nonfinite = ~jnp.isfinite(norms)
    counted = jnp.where(real & ~nonfinite, 1.0, 0.0)
    finite_norms = jnp.where(nonfinite, 0.0, norms)
    factors = scale * clip_factor(counted, example_clip, finite_norms)

    def sum_all() -> jax.Array:
        return jnp.concatenate([array.weighted(factors) for array in arrays])

    def sum_finite() -> jax.Array:
        finite = [array.without(nonfinite) for array in arrays]
        return jnp.concatenate([array.weighted(factors) for array in finite])

    total = jax.lax.cond(jnp.any(nonfinite), sum_finite, sum_all)
    return total, jnp.any(nonfinite & real)


def _record_norms(
    arrays: list[ArrayGradients],
    example_clip: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Return the norms of `scale` times the records' gradients, [n] (Sums, step 3).

    They are computed in units of the clipping threshold, so that no square that matters
    is too large or too small for float32.
    """
    unit = jnp.where(jnp.isfinite(example_clip), example_clip, 1.0) / scale
    squares = sum(array.squares(1 / unit) for array in arrays)
    return scale * unit * jnp.sqrt(squares)


def _drawn(
    model: CustomGradients,
    device: DeviceRecords,
    key: jax.Array | None,
    dtype: jnp.dtype,
) -> Batch:
    """Return the records of a device that take part in a round.

    A mini-batch is drawn without replacement: a record that came twice would count
    twice. There is one draw for each record, so that a device alone, which is not
    filled up, draws the same.
    """
    count = jax.tree.leaves(device.records)[0].shape[0]
    real = jnp.arange(count) < device.size
    if model.batch is None or key is None or model.batch >= count:
        block = model.records_per_block or count
        return Batch(device.records, real, jnp.ones((), dtype), block)
    device_key = jax.random.fold_in(key, device.number)

    def draw(index: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(device_key, index))

    draws = jax.vmap(draw)(jnp.arange(count))
    chosen = jax.lax.top_k(jnp.where(real, draws, -1.0), model.batch)[1]
    records = jax.tree.map(lambda values: jnp.asarray(values)[chosen], device.records)
    scale = jnp.maximum(device.size / model.batch, 1.0).astype(dtype)
    return Batch(records, real[chosen], scale, model.batch)


def _sum_records(
    block_gradient: BlockGradient,
    batch: Batch,
    prior: jax.Array,
) -> DeviceGradient:
    """Return the sum over blocks of records, in pairs, plus the prior's share (step 2).

    Args:
        block_gradient: the float32 sum of a block.
        batch: the records.
        prior: the device's share of the prior's gradient, [m].

    Returns:
        The gradient [m].
    """
    count = batch.real.shape[0]
    if batch.block >= count:
        block_sum, nonfinite = block_gradient(batch.records, batch.real)
        return DeviceGradient(two_sum(block_sum, prior), nonfinite)
    missing = -count % batch.block  # of a mini-batch; devices come in whole blocks

    def padded(values: jax.Array) -> jax.Array:
        return jnp.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)], "edge")

    records = jax.tree.map(padded, batch.records)
    real = jnp.pad(batch.real, (0, missing))
    blocks = jax.tree.map(
        lambda values: split_blocks(values, batch.block),
        (records, real),
    )

    def step(
        total: DeviceGradient,
        block: tuple[ArrayTree, jax.Array],
    ) -> tuple[DeviceGradient, None]:
        block_records, block_real = block
        block_sum, nonfinite = block_gradient(block_records, block_real)
        gradient = plus(total.gradient, as_pair(block_sum))
        return DeviceGradient(gradient, total.nonfinite | nonfinite), None

    zero = DeviceGradient(as_pair(jnp.zeros_like(prior)), jnp.zeros((), bool))
    total, _ = jax.lax.scan(step, zero, blocks)
    return DeviceGradient(plus(total.gradient, as_pair(prior)), total.nonfinite)
