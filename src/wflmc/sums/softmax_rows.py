r"""Clipped sums of the softmax model on devices of few rows (Sums, step 6).

No device's gradient $g = R\,U + q$ is ever computed; q is its share of the prior's. Its
norm follows from the products of its few rows,

$$\lVert g\rVert^2 = \lVert q\rVert^2 + 2\sum_i r_i\cdot(q\,u_i)
  + \sum_{ij} (u_i\cdot u_j)(r_i\cdot r_j),$$

and the sum over devices, $\sum_k f_k (R_k U_k + q)$ with clipping factors f, is one
product of all rows and the prior's share times $\sum_k f_k$. The float64 reference is
`reference.softmax_record_gradients`.

Logits are held as [chain, C, row], as in `wflmc.sums.softmax_classes`. Rows are ordered
by part of a block, then by their number i within a device, then by device: row i of all
devices of a part stand side by side, so that the terms of a norm run along devices,
several at a time, however few chains there are.

Float32 adds rows of many devices, so that no row may be much longer than what its
device sends. Where rows cancel, a device is therefore shortened by more than its
gradient asks for: it is clipped as if its norm were at least a quarter of the sum of
the norms of its rows and of q, Σ/4, unless its records are clipped to less than ℓ. If
Σ/4 is above ‖g‖ and ℓ, it sends 4ℓ‖g‖/Σ, and not min(ℓ, ‖g‖); it counts as clipped
(`reference.short_device_clipped_sum`).

A *part* is the devices of a block whose rows float32 adds to one another, at most 128
rows; p is how many devices it has.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wflmc.sums.blocks import DeviceInputs, blocks_per_group, scan_groups
from wflmc.sums.bound import row_product_error
from wflmc.sums.chains import batch_chains
from wflmc.sums.clipping import clip_factor, prior_factor, signal_bound
from wflmc.sums.constants import (
    DEVICES_PER_LATTICE,
    LONGEST_ROW_PER_CLIP,
    LOST_NORM,
    LOST_SQUARE,
    MAX_CANCELLATION,
    PRIOR_FACTOR_REACH,
    ROW_SUMS_PER_LATTICE,
    ROWS_PER_FLOAT32_SUM,
)
from wflmc.sums.devices import ClippedSum, Sum, zero_pair_sum
from wflmc.sums.lattices import lattice_parts, lattice_sum, sum_parts
from wflmc.sums.norms import root_of_squares, staged_sum, sum_squares
from wflmc.sums.pairs import Pair, barrier, plus, times
from wflmc.sums.parts import part_size
from wflmc.sums.prior import DevicePrior
from wflmc.sums.softmax import LabelledRows, hold_logits
from wflmc.sums.softmax_classes import (
    CLASS_AXIS,
    PARAMETER_AXES,
    clip_residuals,
    prior_share,
    softmax_residuals,
)
from wflmc.support.errors import without_data

MAX_CHAINS_TOGETHER = 32
"""Chains that a CPU takes at a time: its cache then holds the logits of a block."""


@without_data
class ShortDevices(NamedTuple):
    """Devices of few rows, p of them in a part, with leading axes [blocks, parts].

    Parts are filled up with devices whose features are zero.
    """

    features: jax.Array
    """u[..., n, p, d]; 0 in rows that add nothing."""
    labels: jax.Array
    """Classes [..., n, p]."""
    norms: jax.Array
    """‖u‖[..., n, p]; infinite for rows that add nothing."""
    products: jax.Array
    """u_i · u_j, [..., n, n, p]; 0 for rows that add nothing."""

    def block(self, index: jax.Array) -> "ShortDevices":
        """Return a block of devices, with leading axis [parts].

        Args:
            index: the number of the block.
        """
        arrays = (
            jax.lax.dynamic_index_in_dim(values, index, keepdims=False)
            for values in self
        )
        return ShortDevices(*arrays)


class PriorShare(NamedTuple):
    """A device's share q of the prior's gradient, the same for all devices."""

    prior: DevicePrior
    """What it is the gradient of."""
    factor: jax.Array
    """[chain]: it is scaled by this where it would be absurdly long."""
    gradient: jax.Array
    """q[chain, C, d], scaled."""
    squared_norm: jax.Array
    """‖q‖²[chain]."""


@without_data
class RowResiduals(NamedTuple):
    """Residuals of the rows of a block of devices, clipped where records are."""

    residuals: jax.Array
    """r[chain, C, parts · n · p]."""
    logits: jax.Array
    """[chain, C, parts · n · p]; where records are clipped, 0 for rows whose logits are
    not finite."""
    lengths: jax.Array
    """‖u‖[parts, n, p] or [chain, parts, n, p] of the rows that count; 0 of others."""


class RowLattice(NamedTuple):
    """How float32 sums of rows are added (Sums, step 6)."""

    sums: int
    """Sums that are added on one lattice."""
    bound: jax.Array
    """Public: no such sum exceeds it; [chain], or [1] where all chains have the same."""


def clip_devices(
    blocks: LabelledRows,
    prior: DevicePrior,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
) -> ClippedSum:
    """Return Σ_k w_k clip(g_k) of devices of few rows (Sums, step 6).

    No device's gradient is computed, so that time and memory hardly depend on how many
    devices the rows are spread over. A device whose rows cancel is clipped as if its
    norm were at least a quarter of the sum of the norms of its rows and of its share of
    the prior's: it may be shortened where its gradient is within ℓ. The rounding of
    norms, which are never too small, shortens others by a relative 10⁻⁵ at most.

    Args:
        blocks: records of devices [blocks, block, n, ...], with the norms of their
            features; n is at most `MAX_ROWS_OF_SHORT_DEVICE`.
        prior: a device's share of the prior.
        theta: θ[chain, m].
        weight: w[chain, K], or [1, K]; 0 for a device that does not transmit.
        clip: ℓ, as `weight`.

    Returns:
        The sum [chain, m] and the norms [chain, K] before clipping: ‖g‖, or where the
        device is clipped, what it is clipped by, so that a norm is above ℓ if and only
        if the device was shortened.
    """
    return _clip_some_chains(blocks, prior, theta, DeviceInputs(weight, clip))


def clip_records(
    blocks: LabelledRows,
    prior: DevicePrior,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array,
) -> ClippedSum:
    """Return the sum with every record clipped first (Sums, step 6).

    As `clip_devices`, with the residual of every row clipped to c/‖u‖ before the
    device's norm is taken. Where c < ℓ rows are no longer than c, and a device whose
    rows cancel is not shortened for it.

    Args:
        blocks: records of devices [blocks, block, n, ...], with the norms of their
            features; n is at most `MAX_ROWS_OF_SHORT_DEVICE`.
        prior: a device's share of the prior.
        theta: θ[chain, m].
        weight: w[chain, K], or [1, K]; 0 for a device that does not transmit.
        clip: ℓ, as `weight`.
        example_clip: c, as `weight`.

    Returns:
        The sum [chain, m] and the norms [chain, K] of `clip_devices`, of gradients
        whose records are clipped.
    """
    inputs = DeviceInputs(weight, clip, example_clip)
    return _clip_some_chains(blocks, prior, theta, inputs)


def _clip_some_chains(
    blocks: LabelledRows,
    prior: DevicePrior,
    theta: jax.Array,
    inputs: DeviceInputs,
) -> ClippedSum:
    """Return the sums of some chains after the other; products of rows serve all."""
    devices = order_rows(blocks)
    numbers = jnp.arange(blocks.labels.shape[0] * blocks.labels.shape[1])
    device_numbers = numbers.reshape(blocks.labels.shape[:2])
    chains = len(theta)
    size = chains_together(chains)
    if size == chains:
        return _clip_chains(devices, device_numbers, prior, theta, inputs)

    def split(values: jax.Array) -> jax.Array:
        of_all = jnp.broadcast_to(values, (chains, *values.shape[1:]))
        padded = jnp.pad(of_all, ((0, -chains % size), (0, 0)))
        return padded.reshape(-1, size, values.shape[1])

    def clip_part(part: tuple[jax.Array, DeviceInputs]) -> ClippedSum:
        return _clip_chains(devices, device_numbers, prior, *part)

    parts = jax.lax.map(clip_part, jax.tree.map(split, (theta, inputs)))
    joined: ClippedSum = jax.tree.map(
        lambda values: values.reshape(-1, values.shape[-1])[:chains],
        parts,
    )
    return joined


def _clip_chains(
    devices: ShortDevices,
    device_numbers: jax.Array,
    prior: DevicePrior,
    theta: jax.Array,
    inputs: DeviceInputs,
) -> ClippedSum:
    """Return the sums of chains that are computed together.

    The loop goes through numbers of devices [blocks, block], not through their data:
    what a loop takes apart, XLA may copy before it.
    """
    block_size = device_numbers.shape[1]
    dim = devices.features.shape[-1]
    parameters = theta.reshape(len(theta), -1, dim)
    q = _prior_share(prior, parameters)
    signal = signal_bound(inputs.weight, inputs.clip)
    lattice, group = _row_lattice(devices, block_size, inputs, signal)

    def add(
        total: Sum,
        numbers: jax.Array,
        block_inputs: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        block = devices.block(numbers[0] // block_size)
        padded_inputs = _inputs_of_parts(block_inputs, block)
        rows = _row_residuals(block, parameters, padded_inputs.example_clip)
        square = _squared_norms(block, rows, q)
        largest_norm = _largest_norms(square, block, rows, q, padded_inputs)
        factors = device_factors(padded_inputs, largest_norm)
        clipped = _factor_of_rows(factors, block) * rows.residuals
        added = _add_rows(_rows_of_parts(block.features), clipped, lattice)
        assert total.low is not None
        # Blocks of a group share a lattice, on which float32 adds without error.
        new_total = Sum(total.high + added.high, total.low + added.low)
        norms = jnp.sqrt(jnp.maximum(square, 0.0))
        norms = jnp.where(largest_norm > padded_inputs.clip, largest_norm, norms)
        # A loop collects one array of numbers by device: first all norms, then factors.
        by_device = jnp.concatenate([norms, factors]).reshape(2 * len(theta), -1)
        return new_total, by_device[:, :block_size]

    zero = zero_pair_sum(parameters)
    total, norms_and_factors = scan_groups(
        add,
        device_numbers,
        zero,
        inputs,
        group=group,
        group_start=zero,
    )
    norms, factors = jnp.split(norms_and_factors, 2)
    largest_factor = _largest_factor(inputs, signal, q)
    shares = _prior_of_all(q, factors, largest_factor)
    with_prior = plus(total.pair, shares)
    sums = Sum(*(part.reshape(theta.shape) for part in with_prior))
    return ClippedSum(sums, norms)


def device_factors(inputs: DeviceInputs, norms: jax.Array) -> jax.Array:
    """Return the clipping factors w min(1, ℓ/‖g‖) of a block of devices.

    Args:
        inputs: of the devices, [chain or 1, parts, p].
        norms: ‖g‖[chain, parts, p].
    """
    return clip_factor(inputs.weight, inputs.clip, norms)


def order_rows(blocks: LabelledRows) -> ShortDevices:
    """Return devices in parts, row i of all devices of a part side by side.

    As many devices form a part as float32 may add rows of (`rows_together`); the last
    part of a block is filled up with devices without features, which get weight 0
    (`_inputs_of_parts`).

    Every sum calls this. In a compiled loop over rounds it is nevertheless computed
    only once: it depends on the data alone, and XLA moves it in front of the loop (as
    compiled programs show on CPUs).

    Args:
        blocks: records [blocks, block, n, ...], with norms.

    Returns:
        The same devices with the products of their rows.
    """
    assert blocks.norms is not None
    block_size, rows = blocks.labels.shape[1:]
    devices_per_part = rows_together(block_size, rows) // rows
    missing = -block_size % devices_per_part

    def by_part(values: jax.Array) -> jax.Array:
        widths = [(0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)]
        padded = jnp.pad(values, widths)
        shape = (len(values), -1, devices_per_part, *values.shape[2:])
        return jnp.moveaxis(padded.reshape(shape), 2, 3)

    features = by_part(blocks.features)
    norms = by_part(blocks.norms)
    usable = jnp.where(jnp.isfinite(norms)[..., None], features, 0.0)
    # Block, part, rows i and j, device, feature. `row_product_error` needs full float32.
    products = jnp.einsum("baipd,bajpd->baijp", usable, usable, precision="highest")
    return ShortDevices(usable, by_part(blocks.labels), norms, products)


def _inputs_of_parts(inputs: DeviceInputs, block: ShortDevices) -> DeviceInputs:
    """Return inputs [chain, device] as [chain, parts, p], with p devices in a part.

    A part has as many rows as float32 may add (Sums, step 6). Devices that only fill
    the last part have weight 0.
    """
    parts, _, devices_per_part = block.labels.shape

    def by_part(values: jax.Array) -> jax.Array:
        missing = parts * devices_per_part - values.shape[1]
        padded = jnp.pad(values, ((0, 0), (0, missing)))
        return padded.reshape(-1, parts, devices_per_part)

    by_device: DeviceInputs = jax.tree.map(by_part, inputs)
    return by_device


def _prior_share(prior: DevicePrior, parameters: jax.Array) -> PriorShare:
    """Return a device's share of the prior's gradient, with its norm."""
    unscaled = prior_share(prior, parameters)[0]
    factor = prior_factor(unscaled, PARAMETER_AXES)
    scaled = factor[:, None, None] * unscaled
    by_class = barrier(sum_squares(scaled))
    return PriorShare(
        prior=prior,
        factor=factor,
        gradient=scaled,
        squared_norm=staged_sum(by_class),
    )


def _row_lattice(
    devices: ShortDevices,
    block_size: int,
    inputs: DeviceInputs,
    signal: jax.Array,
) -> tuple[RowLattice, int]:
    """Return how rows are added, and how many blocks are a group, on one lattice."""
    parts, rows = devices.labels.shape[1:3]
    device_count = inputs.weight.shape[1]
    per_lattice = devices_on_lattice(block_size, rows)
    group = blocks_per_group(device_count, block_size, per_lattice)
    bound = MAX_CANCELLATION * ROWS_PER_FLOAT32_SUM * signal
    return RowLattice(parts * group, bound), group


def _row_residuals(
    block: ShortDevices,
    parameters: jax.Array,
    example_clip: jax.Array | None,
) -> RowResiduals:
    """Return residuals of all rows; clipped to c/‖u‖ where records are (step 3)."""
    logits = _product_with_rows(parameters, block)
    residuals = barrier(softmax_residuals(logits, block.labels.ravel()))
    if example_clip is None:
        return RowResiduals(residuals, logits, block.norms)
    limits = example_clip[:, :, None, :]
    too_long = block.norms > LONGEST_ROW_PER_CLIP * limits
    limits_of_rows = jnp.where(too_long, 0.0, limits).reshape(len(limits), -1)
    clipped = clip_residuals(residuals, block.norms.ravel(), limits_of_rows)
    lengths = jnp.where(too_long, 0.0, block.norms)
    # A row whose logits overflow has residuals of zero, and must not show elsewhere.
    is_finite = jnp.all(jnp.isfinite(logits), axis=CLASS_AXIS, keepdims=True)
    return RowResiduals(barrier(clipped), jnp.where(is_finite, logits, 0.0), lengths)


def _squared_norms(
    block: ShortDevices,
    rows: RowResiduals,
    q: PriorShare,
) -> jax.Array:
    r"""Return ‖g‖²[chain, parts, p] of devices, by products of rows; rounded.

    $$\lVert q\rVert^2 + 2\sum_i r_i\cdot(q\,u_i)
      + \sum_{ij} (u_i\cdot u_j)(r_i\cdot r_j)$$
    """
    prior = q.prior
    if prior.mean is None and jnp.ndim(prior.curvature) == 0:
        # q u is a multiple of the logits.
        scale = prior.curvature * q.factor
        pulls = scale[:, None, None] * rows.logits
    else:
        pulls = _product_with_rows(q.gradient, block)
    residuals = _by_row(rows.residuals, block)
    prior_pulls = _by_row(pulls, block)
    count = len(residuals)
    with_prior = functools.reduce(
        jnp.add,
        [_class_product(residuals[i], prior_pulls[i]) for i in range(count)],
    )
    square = q.squared_norm[:, None, None] + 2 * with_prior
    for i in range(count):
        for j in range(i + 1):
            times_counted = 1 if i == j else 2
            products = times_counted * block.products[:, i, j]
            square += products * _class_product(residuals[i], residuals[j])
    return square


def _largest_norms(
    square: jax.Array,
    block: ShortDevices,
    rows: RowResiduals,
    q: PriorShare,
    inputs: DeviceInputs,
) -> jax.Array:
    """Return what no device's norm exceeds, by which it is clipped, [chain, parts, p].

    Where rows cancel, the squared norm is all rounding. It is taken at its largest, so
    that nothing is sent unclipped. Rows are added to those of other devices in float32
    and must not be much longer than what is sent of them: the norm is at least a
    quarter of the sum of their norms where c is not the smaller threshold.
    """
    classes, dim = q.gradient.shape[1:]
    squared_residuals = jnp.sum(rows.residuals**2, axis=CLASS_AXIS)
    residual_norms = barrier(root_of_squares(squared_residuals, classes))
    row_lengths = residual_norms.reshape(-1, *block.norms.shape) * rows.lengths
    prior_length = jnp.sqrt(q.squared_norm)[:, None, None]
    length_sum = row_lengths.sum(-2) + prior_length
    rounding = row_product_error(dim, classes) * length_sum**2
    error = rounding + underflow_of_squared_norm(rows.lengths, dim, classes)
    largest = jnp.sqrt(jnp.maximum(square, 0.0) + error)
    smallest_norm = length_sum / MAX_CANCELLATION
    if inputs.example_clip is not None:
        record_is_longer = inputs.example_clip >= inputs.clip
        smallest_norm = jnp.where(record_is_longer, smallest_norm, 0.0)
    return jnp.maximum(largest, smallest_norm)


def underflow_of_squared_norm(lengths: jax.Array, dim: int, classes: int) -> jax.Array:
    """Return the most that a device's squared norm may lack by underflow.

    It is added to the norm, so that no gradient is taken for shorter than it is
    (docs/explanation/privacy.md, Sums, step 8).

    Products of residuals below 2⁻¹²⁶ are lost, which are worth that times the lengths
    of their rows.

    Args:
        lengths: ‖u‖[..., n, p].
        dim: d.
        classes: C.

    Returns:
        [..., p].
    """
    of_rows = jnp.sum(lengths, axis=-2) * (classes * LOST_SQUARE) ** 0.5
    return of_rows**2 + dim * classes * LOST_NORM


def _add_rows(features: jax.Array, clipped: jax.Array, lattice: RowLattice) -> Pair:
    """Return Σ_n r_n u_nᵀ: float32 adds a part, a lattice adds parts (Sums, step 6).

    Args:
        features: u[parts, rows, d].
        clipped: r[chain, C, parts · rows].
        lattice: how parts are added.

    Returns:
        [chain, C, d].
    """
    parts, rows, dim = features.shape
    classes = clipped.shape[1]
    flat = clipped.reshape(-1, parts, rows)
    if parts == 1:
        sums = jnp.matmul(flat[:, 0], features[0], precision="highest")[None]
    else:
        sums = jnp.einsum("xkn,knd->kxd", flat, features, precision="highest")
    bound = lattice.bound[:, None]
    if len(bound) > 1:  # chains of unlike weights or thresholds
        bound = jnp.repeat(bound, classes, axis=0)
    total = sum_parts(lattice_parts(sums, lattice.sums, bound), 0)
    shape = (*clipped.shape[:2], dim)
    return Pair(total.high.reshape(shape), total.low.reshape(shape))


def _largest_factor(
    inputs: DeviceInputs,
    signal: jax.Array,
    q: PriorShare,
) -> jax.Array:
    """Return what no clipping factor of a chain exceeds, [chain].

    It is public, as the prior's share is. A factor is small where the share is long.
    """
    by_share = PRIOR_FACTOR_REACH * signal / jnp.sqrt(q.squared_norm)
    return jnp.minimum(jnp.max(inputs.weight, axis=1), by_share)


def _prior_of_all(
    q: PriorShare,
    factors: jax.Array,
    largest_factor: jax.Array,
) -> Pair:
    """Return q Σ_k f_k of factors[chain, K], on lattices (Sums, step 6)."""
    starts = list(range(DEVICES_PER_LATTICE, factors.shape[1], DEVICES_PER_LATTICE))
    parts = jnp.split(factors.T, starts)
    sums = [lattice_sum(part, 0, largest_factor) for part in parts]
    total = functools.reduce(plus, sums)
    shape = q.gradient.shape
    high = jnp.broadcast_to(total.high[:, None, None], shape)
    low = jnp.broadcast_to(total.low[:, None, None], shape)
    return times(q.gradient, Pair(high, low))


def _product_with_rows(parameters: jax.Array, block: ShortDevices) -> jax.Array:
    """Return parameters[chain, C, d] times every row, [chain, C, parts · n · p]."""
    dim = parameters.shape[-1]
    rows = block.features.reshape(-1, dim)
    flat = jnp.matmul(parameters.reshape(-1, dim), rows.T, precision="highest")
    products = flat.reshape(*parameters.shape[:2], -1)
    return hold_logits(products, dim)


def _factor_of_rows(factors: jax.Array, block: ShortDevices) -> jax.Array:
    """Return factors[chain, parts, p] of every row, [chain, 1, parts · n · p]."""
    shape = (len(factors), *block.norms.shape)
    of_rows = jnp.broadcast_to(factors[:, :, None, :], shape)
    # The barrier asks for one factor for a row, not for every class; either way it is
    # the same number, as it is added to nothing.
    return barrier(of_rows.reshape(len(factors), 1, -1))


def _rows_of_parts(features: jax.Array) -> jax.Array:
    """Return u[parts, n, p, d] as [parts, n · p, d]."""
    return features.reshape(len(features), -1, features.shape[-1])


def _by_row(values: jax.Array, block: ShortDevices) -> list[jax.Array]:
    """Return [chain, C, parts · n · p] of every row i of a device, [chain, C, parts, p]."""
    shape = (*values.shape[:2], *block.labels.shape)
    by_row = values.reshape(shape)
    return [by_row[:, :, :, i] for i in range(block.labels.shape[1])]


def _class_product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return Σ_C of two arrays [chain, C, parts, p]."""
    return jnp.sum(left * right, axis=CLASS_AXIS)


def rows_together(block: int, rows: int) -> int:
    """Return how many rows of a block float32 adds; those of a device stay together.

    Args:
        block: devices of a block.
        rows: n of a device.
    """
    return part_size(block, ROWS_PER_FLOAT32_SUM // rows) * rows


def devices_on_lattice(block: int, rows: int) -> int:
    """Return how many devices, in whole blocks, are added on one lattice.

    Args:
        block: devices of a block.
        rows: n of a device.
    """
    sums_per_block = -(-block * rows // rows_together(block, rows))
    return block * max(1, ROW_SUMS_PER_LATTICE // sums_per_block)


def chains_together(chains: int) -> int:
    """Return how many chains are computed together.

    On a CPU, equal parts of at most `MAX_CHAINS_TOGETHER`; on an accelerator, all.

    Args:
        chains: how many there are.
    """
    if jax.default_backend() != "cpu":
        return chains
    return part_size(chains, MAX_CHAINS_TOGETHER)


device_clipped_sum = batch_chains(clip_devices, chain_arguments=3)
"""`clip_devices` of one chain, of (blocks, prior, theta, weight, clip)."""
record_clipped_sum = batch_chains(clip_records, chain_arguments=4)
"""`clip_records` of one chain, of (blocks, prior, theta, weight, clip,
example_clip)."""
