r"""Clipped sums of the softmax model on devices of few rows (Sums, step 6).

No device's gradient $g = U^\top R + q$ is ever computed; q is its share of the prior's.
Its norm follows from the products of its few rows,

$$\lVert g\rVert^2 = \lVert q\rVert^2 + 2\sum_i r_i\cdot(q^\top u_i)
  + \sum_{ij} (u_i\cdot u_j)(r_i\cdot r_j),$$

and the sum over devices, $\sum_k f_k (U_k^\top R_k + q)$ with clipping factors f, is
one matrix product of all rows and the prior's share times $\sum_k f_k$. The float64
reference is `reference.softmax_record_gradients`.
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
    CPU_CACHE_BYTES,
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
from wflmc.sums.pairs import Pair, plus, times
from wflmc.sums.parts import part_size
from wflmc.sums.softmax import (
    Curvature,
    LabelledRows,
    class_norms,
    clip_residuals,
    columns_of,
    prior_share,
    product,
    row_limits,
    softmax_residuals,
    vectors_of,
    weighted_rows,
)
from wflmc.support.errors import without_data

FEWEST_CHAINS_TOGETHER = 64
"""Chains that are taken at a time at least."""


@without_data
class ShortDevices(NamedTuple):
    """Devices of few rows, with leading axes [blocks, block], or [block]."""

    features: jax.Array
    """u[..., n, d]."""
    labels: jax.Array
    """Classes [..., n]."""
    norms: jax.Array
    """‖u‖[..., n]; infinite for rows that add nothing."""
    products: jax.Array
    """u_i · u_j, [..., n, n]."""


class PriorShare(NamedTuple):
    """A device's share q of the prior's gradient, the same for all devices."""

    curvature: Curvature
    """What it is the gradient of."""
    factor: jax.Array
    """[chain]: it is scaled by this where it would be absurdly long."""
    columns: jax.Array
    """q[d, C, chain], scaled."""
    squared_norm: jax.Array
    """‖q‖²[chain]."""


@without_data
class RowResiduals(NamedTuple):
    """Residuals of the rows of a block of devices, clipped where records are."""

    residuals: jax.Array
    """r[block · n, C, chain]."""
    logits: jax.Array
    """[block · n, C, chain]."""
    lengths: jax.Array
    """‖u‖[block, n, 1 or chain] of the rows that count; 0 of others."""


class RowLattice(NamedTuple):
    """How products of rows are added (Sums, step 6)."""

    rows_per_sum: int
    """Rows that float32 adds."""
    sums: int
    """Such sums that are added on one lattice."""
    bound: jax.Array
    """Public: no such sum exceeds it."""


def clip_devices(
    blocks: LabelledRows,
    curvature: Curvature,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
) -> ClippedSum:
    """Return Σ_k w_k clip(g_k) of devices of few rows (Sums, step 6).

    Args:
        blocks: records of devices, with the norms of their features.
        curvature: a device's share of the prior's.
        theta: θ[chain, m].
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.

    Returns:
        The sum [chain, m] and the norms [chain, K].
    """
    return _clip_some_chains(blocks, curvature, theta, DeviceInputs(weight, clip))


def clip_records(
    blocks: LabelledRows,
    curvature: Curvature,
    theta: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array,
) -> ClippedSum:
    """Return the sum with every record clipped first (Sums, step 6).

    Args:
        blocks: records of devices, with the norms of their features.
        curvature: a device's share of the prior's.
        theta: θ[chain, m].
        weight: w[chain, K], or [1, K].
        clip: ℓ, as `weight`.
        example_clip: c, as `weight`.

    Returns:
        The sum [chain, m] and the norms of the devices' gradients [chain, K].
    """
    inputs = DeviceInputs(weight, clip, example_clip)
    return _clip_some_chains(blocks, curvature, theta, inputs)


def _clip_some_chains(
    blocks: LabelledRows,
    curvature: Curvature,
    theta: jax.Array,
    inputs: DeviceInputs,
) -> ClippedSum:
    """Return the sums of some chains after the other; products of rows serve all."""
    devices = _with_products(blocks)
    chains = len(theta)
    size = chains_together(chains, theta.shape[1])
    if size == chains:
        return _clip_chains(devices, curvature, theta, inputs)

    def split(values: jax.Array) -> jax.Array:
        of_all = jnp.broadcast_to(values, (chains, *values.shape[1:]))
        padded = jnp.pad(of_all, ((0, -chains % size), (0, 0)))
        return padded.reshape(-1, size, values.shape[1])

    def clip_part(part: tuple[jax.Array, DeviceInputs]) -> ClippedSum:
        return _clip_chains(devices, curvature, *part)

    parts = jax.lax.map(clip_part, jax.tree.map(split, (theta, inputs)))
    joined: ClippedSum = jax.tree.map(
        lambda values: values.reshape(-1, values.shape[-1])[:chains],
        parts,
    )
    return joined


def _clip_chains(
    blocks: ShortDevices,
    curvature: Curvature,
    theta: jax.Array,
    inputs: DeviceInputs,
) -> ClippedSum:
    """Return the sums of chains that are computed together."""
    dim = blocks.features.shape[-1]
    columns = columns_of(theta, dim)
    prior = _prior_share(curvature, columns)
    signal = signal_bound(inputs.weight, inputs.clip)
    lattice, group = _row_lattice(blocks, inputs, signal)

    def add(
        total: Sum,
        block: ShortDevices,
        of_block: DeviceInputs,
    ) -> tuple[Sum, jax.Array]:
        rows = _row_residuals(block, columns, of_block.example_clip)
        square = _squared_norms(block, rows, prior)
        largest_norm = _largest_norms(square, block, rows, prior, of_block)
        factors = device_factors(of_block, largest_norm)
        by_row = _by_row(rows.residuals, block)
        clipped = (factors[:, None, None] * by_row).reshape(rows.residuals.shape)
        added = _add_rows(block.features.reshape(-1, dim), clipped, lattice)
        assert total.low is not None
        new_total = Sum(total.high + added.high, total.low + added.low)
        norms = jnp.sqrt(jnp.maximum(square, 0.0))
        return new_total, jnp.concatenate([norms, factors], axis=1).T

    zero = zero_pair_sum(columns)
    total, numbers = scan_groups(
        add,
        blocks,
        zero,
        inputs,
        group=group,
        group_start=zero,
    )
    norms, factors = jnp.split(numbers, 2)
    largest_factor = _largest_factor(inputs, signal, prior)
    shares = _prior_of_all(prior, factors, largest_factor)
    with_prior = plus(total.pair, shares)
    sums = Sum(vectors_of(with_prior.high), vectors_of(with_prior.low))
    return ClippedSum(sums, norms)


def device_factors(inputs: DeviceInputs, norms: jax.Array) -> jax.Array:
    """Return the clipping factors of devices, [block, chain]."""
    return clip_factor(inputs.weight.T, inputs.clip.T, norms)


def _with_products(blocks: LabelledRows) -> ShortDevices:
    """Return devices with the products of their rows; 0 of rows that add nothing."""
    assert blocks.norms is not None
    finite = jnp.isfinite(blocks.norms)[..., None]
    usable = jnp.where(finite, blocks.features, 0.0)
    products = jnp.einsum("bkid,bkjd->bkij", usable, usable, precision="highest")
    return ShortDevices(blocks.features, blocks.labels, blocks.norms, products)


def _prior_share(curvature: Curvature, columns: jax.Array) -> PriorShare:
    """Return a device's share of the prior's gradient, with its norm."""
    unscaled = prior_share(curvature, columns)
    factor = prior_factor(unscaled, (0, 1))
    scaled = factor * unscaled
    return PriorShare(
        curvature=curvature,
        factor=factor,
        columns=scaled,
        squared_norm=jnp.sum(scaled**2, axis=(0, 1)),
    )


def _row_lattice(
    blocks: ShortDevices,
    inputs: DeviceInputs,
    signal: jax.Array,
) -> tuple[RowLattice, int]:
    """Return how rows are added, and how many blocks share a lattice."""
    block, rows = blocks.labels.shape[1:]
    devices = inputs.weight.shape[1]
    rows_per_sum = rows_together(block, rows)
    group = blocks_per_group(devices, block, devices_on_lattice(block, rows))
    sums_per_block = -(-block * rows // rows_per_sum)
    bound = MAX_CANCELLATION * ROWS_PER_FLOAT32_SUM * signal
    return RowLattice(rows_per_sum, sums_per_block * group, bound), group


def _row_residuals(
    block: ShortDevices,
    columns: jax.Array,
    example_clip: jax.Array | None,
) -> RowResiduals:
    """Return residuals of all rows; clipped to c/‖u‖ where records are (step 3)."""
    logits = product(block.features.reshape(-1, columns.shape[0]), columns)
    residuals = softmax_residuals(logits, block.labels.reshape(-1))
    lengths = block.norms[..., None]
    if example_clip is None:
        return RowResiduals(residuals, logits, lengths)
    limits = row_limits(block.norms, example_clip)
    too_long = block.norms.reshape(-1, 1) > LONGEST_ROW_PER_CLIP * limits
    limits = jnp.where(too_long, 0.0, limits)
    clipped = clip_residuals(residuals, block.norms, limits)
    too_long_by_row = too_long.reshape(*block.norms.shape, -1)
    return RowResiduals(clipped, logits, jnp.where(too_long_by_row, 0.0, lengths))


def _squared_norms(
    block: ShortDevices,
    rows: RowResiduals,
    prior: PriorShare,
) -> jax.Array:
    r"""Return ‖g‖²[block, chain] of devices, by products of rows; rounded.

    $$\lVert q\rVert^2 + 2\sum_i r_i\cdot(q^\top u_i)
      + \sum_{ij} (u_i\cdot u_j)(r_i\cdot r_j)$$
    """
    devices, count = block.labels.shape
    if jnp.ndim(prior.curvature) == 0:  # qᵀu is a multiple of the logits
        pulls = (prior.curvature * prior.factor) * rows.logits
    else:
        flat = block.features.reshape(-1, block.features.shape[-1])
        pulls = product(flat, prior.columns)
    with_prior = jnp.sum(rows.residuals * pulls, axis=1)
    with_prior = with_prior.reshape(devices, count, -1).sum(1)
    residuals = _by_row(rows.residuals, block)
    products = block.products[..., None]
    square = prior.squared_norm + 2 * with_prior
    for i in range(count):
        for j in range(i + 1):
            times_counted = 1 if i == j else 2
            inner = jnp.sum(residuals[:, i] * residuals[:, j], axis=1)
            square += times_counted * products[:, i, j] * inner
    return square


def _largest_norms(
    square: jax.Array,
    block: ShortDevices,
    rows: RowResiduals,
    prior: PriorShare,
    inputs: DeviceInputs,
) -> jax.Array:
    """Return what no device's norm exceeds, by which it is clipped, [block, chain].

    Where rows cancel, the squared norm is all rounding. It is taken at its largest, so
    that nothing is sent unclipped. Rows are added to those of other devices in float32
    and must not be much longer than what is sent of them: the norm is at least a
    quarter of the sum of their norms where c is not the smaller threshold.
    """
    dim, classes = prior.columns.shape[:2]
    row_lengths = class_norms(_by_row(rows.residuals, block), axis=2) * rows.lengths
    length_sum = row_lengths.sum(1) + jnp.sqrt(prior.squared_norm)
    rounding = row_product_error(dim, classes) * length_sum**2
    error = rounding + lost_of_products(rows.lengths, dim, classes)
    largest = jnp.sqrt(jnp.maximum(square, 0.0) + error)
    smallest_norm = length_sum / MAX_CANCELLATION
    if inputs.example_clip is not None:
        record_is_longer = (inputs.example_clip >= inputs.clip).T
        smallest_norm = jnp.where(record_is_longer, smallest_norm, 0.0)
    return jnp.maximum(largest, smallest_norm)


def lost_of_products(lengths: jax.Array, dim: int, classes: int) -> jax.Array:
    """Return what a device's squared norm may lack by underflow (Sums, step 8).

    Products of residuals below 2⁻¹²⁶ are lost, which are worth that times the lengths
    of their rows.

    Args:
        lengths: ‖u‖[block, n, ...].
        dim: d.
        classes: C.

    Returns:
        [block, ...].
    """
    of_rows = jnp.sum(lengths, axis=1) * (classes * LOST_SQUARE) ** 0.5
    return of_rows**2 + dim * classes * LOST_NORM


def _add_rows(features: jax.Array, clipped: jax.Array, lattice: RowLattice) -> Pair:
    """Return Σ_n u_n r_nᵀ: float32 adds some rows, a lattice these sums (step 6).

    Args:
        features: u[n, d].
        clipped: r[n, C, chain].
        lattice: how they are added.

    Returns:
        [d, C, chain].
    """
    rows_per_sum = lattice.rows_per_sum
    missing = -len(features) % rows_per_sum
    dim = features.shape[1]
    shape = (dim, *clipped.shape[1:])
    left = jnp.pad(features, ((0, missing), (0, 0))).reshape(-1, rows_per_sum, dim)
    padded = jnp.pad(clipped, ((0, missing), (0, 0), (0, 0)))
    right = padded.reshape(len(left), rows_per_sum, -1)
    one_sum = len(left) == 1
    sums = product(left[0].T, right[0])[None] if one_sum else weighted_rows(left, right)
    total = sum_parts(lattice_parts(sums, lattice.sums, lattice.bound), 0)
    return Pair(total.high.reshape(shape), total.low.reshape(shape))


def _largest_factor(
    inputs: DeviceInputs,
    signal: jax.Array,
    prior: PriorShare,
) -> jax.Array:
    """Return what no clipping factor exceeds: public, as the prior's share is.

    A factor is small where the share is long.
    """
    by_share = PRIOR_FACTOR_REACH * signal / jnp.sqrt(prior.squared_norm)
    return jnp.minimum(jnp.max(inputs.weight), by_share)


def _prior_of_all(
    prior: PriorShare,
    factors: jax.Array,
    largest_factor: jax.Array,
) -> Pair:
    """Return q Σ_k f_k of factors[chain, K], on lattices (Sums, step 6)."""
    starts = list(range(DEVICES_PER_LATTICE, factors.shape[1], DEVICES_PER_LATTICE))
    parts = jnp.split(factors.T, starts)
    sums = [lattice_sum(part, 0, largest_factor) for part in parts]
    total = functools.reduce(plus, sums)
    shape = prior.columns.shape
    high = jnp.broadcast_to(total.high, shape)
    low = jnp.broadcast_to(total.low, shape)
    return times(prior.columns, Pair(high, low))


def _by_row(residuals: jax.Array, block: ShortDevices) -> jax.Array:
    """Return residuals as [block, n, C, chain]."""
    return residuals.reshape(*block.labels.shape, residuals.shape[1], -1)


def rows_together(block: int, rows: int) -> int:
    """Return how many rows of a block float32 adds; those of a device stay together."""
    return part_size(block, ROWS_PER_FLOAT32_SUM // rows) * rows


def devices_on_lattice(block: int, rows: int) -> int:
    """Return how many devices, in whole blocks, are added on one lattice."""
    sums_per_block = -(-block * rows // rows_together(block, rows))
    return block * max(1, ROW_SUMS_PER_LATTICE // sums_per_block)


def chains_together(chains: int, dim: int) -> int:
    """Return how many chains of θ[m] are computed together.

    On a CPU, so many that its cache holds their sums.
    """
    if jax.default_backend() != "cpu":
        return chains
    return min(chains, max(FEWEST_CHAINS_TOGETHER, CPU_CACHE_BYTES // (4 * dim)))


device_clipped_sum = batch_chains(clip_devices, chain_arguments=3)
"""`clip_devices` of one chain, of (blocks, curvature, theta, weight, clip)."""
record_clipped_sum = batch_chains(clip_records, chain_arguments=4)
"""`clip_records` of one chain, of (blocks, curvature, theta, weight, clip,
example_clip)."""
