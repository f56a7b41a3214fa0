"""Clipped gradient sums of the softmax model, for all chains at once and a block of devices at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from wflmc.sums import pairs, softmax_gpu
from wflmc.sums.blocks import CPU_BLOCK, batch_chains, clip_factor, grouped, scan_blocks
from wflmc.sums.pairs import ClippedSum, Sum, as_pair, lattice_sum, plus

ROWS_TOGETHER = 128
"""Rows of devices of few rows that float32 adds."""
FARTHEST_ROW = 2.0**45
"""How many times longer than its example's clip a row of a device of few rows may be; a longer one adds nothing. Its
clipped residual would be too small for products with those of other rows, which the device's norm is made of."""


def columns_of(theta: jax.Array, dim: int) -> jax.Array:
    """Return theta[chain, ..., m] as [..., d, C, chain]: chains side by side make the matrix products large."""
    return jnp.moveaxis(theta.reshape(*theta.shape[:-1], -1, dim).swapaxes(-1, -2), 0, -1)


def _rows(columns: jax.Array) -> jax.Array:
    """Return [d, C, chain] as theta[chain, m] again."""
    return columns.transpose(2, 1, 0).reshape(columns.shape[-1], -1)


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return left[i, j] right[j, ...], in full float32 also where an accelerator would rather round."""
    flat = jnp.matmul(left, right.reshape(right.shape[0], -1), precision="highest")
    return flat.reshape(-1, *right.shape[1:])


def softmax(logits: jax.Array) -> jax.Array:
    """Return p(class|u) from logits[n, C, chain]."""
    raised = jnp.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def pull(share: Any, columns: jax.Array) -> jax.Array:
    """Return a device's share of the prior's gradient; `share` of the curvature is a number, or a matrix [d, d]."""
    if jnp.ndim(share) == 0:
        return share * columns
    return jnp.einsum("ij,...jcx->...icx", share, columns, precision="highest")


def _residuals(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return p(class|u) − 1[class = label] from logits[n, C, chain] and labels[n]."""
    return softmax(logits) - jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)[..., None]


def _row_limits(norms: jax.Array, example_clip: jax.Array) -> jax.Array:
    """Return the clip of every row, [block · n, chain], for norms[block, n] and example_clip[chain, block]."""
    return jnp.repeat(example_clip.T, norms.shape[1], axis=0)


def _limited(residual: jax.Array, norms: jax.Array, most: jax.Array) -> jax.Array:
    """Return residual[block · n, C, chain] with gradients of examples, ‖r‖ ‖u‖ long, clipped.

    Args:
        norms: ‖u‖, [block, n]; infinite for rows that add nothing.
        most: what each is clipped to, [block · n, chain].
    """
    length = _class_norms(residual, axis=1) * norms.reshape(-1, 1)
    return residual * clip_factor(jnp.ones(()), most, length)[:, None]


def _class_norms(residual: jax.Array, axis: int) -> jax.Array:
    """Return ‖r‖ over classes."""
    return pairs.root_of_squares(jnp.sum(residual**2, axis=axis), residual.shape[axis])


def clipped_gradients_of(
    data: tuple[jax.Array, ...], prior: jax.Array, columns: jax.Array, example_clip: jax.Array
) -> Sum:
    """Return the gradients of a block of devices whose examples are clipped one by one, [block, d, C, chain].

    Args:
        data: features[block, n, d], labels[block, n] and the features' norms[block, n].
        prior: a device's share of the prior's gradient, as `columns`.
        columns: θ as [d, C, chain], or [block, d, C, chain] where each device has its own.
        example_clip: c[chain, block].
    """
    shape = len(data[0]), *columns.shape[-3:]
    one_by_one = functools.partial(_clipped_likelihood, columns, example_clip)
    like = jnp.zeros((*shape[:2], shape[2] * shape[3]), data[0].dtype)
    records = pairs.sum_records(one_by_one, like, *((values, 1) for values in data))
    shares = jnp.broadcast_to(prior, shape).reshape(like.shape)
    return jax.tree.map(lambda part: part.reshape(shape), plus(records, as_pair(shares)))


def gradients_of(data: tuple[jax.Array, ...], share: Any, columns: jax.Array) -> Sum:
    """Return the gradients of a block of devices for all chains, [block, d, C, chain].

    Args:
        data: features[block, n, d] and labels[block, n].
        share: a device's share of the prior's curvature.
        columns: θ as [d, C, chain], or [block, d, C, chain] where each device has its own.
    """
    features, labels = data[:2]
    if softmax_gpu.fits(features, columns):
        ways = {"cuda": softmax_gpu.gradients, "default": _likelihood}
        return as_pair(jax.lax.platform_dependent(features, labels, columns, **ways) + pull(share, columns))
    return as_pair(_likelihood(features, labels, columns) + pull(share, columns))


def _likelihood(features: jax.Array, labels: jax.Array, columns: jax.Array) -> jax.Array:
    """Return `gradients_of` without clips and without the prior's share.

    Logits are counted from those of the first class, whose gradient is minus the sum of all others.
    """
    logits = _logits(features, columns[..., 1:, :] - columns[..., :1, :])
    most = jnp.maximum(logits.max(1, keepdims=True), 0.0)
    raised = jnp.exp(logits - most)
    p = raised * (1 / (jnp.exp(-most) + raised.sum(1, keepdims=True)))
    hot = jax.nn.one_hot(labels - 1, logits.shape[1], dtype=features.dtype)
    if len(features) == 1:
        # What was seen is the same for all chains: taken off at the end, not from every chain's p.
        others = (product(features[0].T, p) - product(features[0].T, hot[0])[..., None])[None]
    else:
        residual = p.reshape(*labels.shape, *p.shape[1:]) - hot[..., None]
        others = _weighted(features, residual.reshape(*labels.shape, -1))
        others = others.reshape(len(features), columns.shape[-3], *p.shape[1:])
    return jnp.concatenate([-others.sum(2, keepdims=True), others], axis=2)


def _logits(features: jax.Array, columns: jax.Array) -> jax.Array:
    """Return logits[block · n, C, chain] of features[block, n, d]."""
    if columns.ndim == 4:
        each = jnp.einsum("knd,kdcx->kncx", features, columns, precision="highest")
        return each.reshape(-1, *columns.shape[2:])
    return product(features.reshape(-1, features.shape[-1]), columns)


def _clipped_likelihood(columns: jax.Array, limit: jax.Array, *data: jax.Array) -> jax.Array:
    """Return sums over rows whose gradients are clipped one by one, [block, d, C · chain]; `data` as above."""
    features, labels, norms = data
    residual = _residuals(_logits(features, columns), labels.ravel())
    limited = _limited(residual, norms, _row_limits(norms, limit))
    if len(features) == 1:
        return jnp.matmul(features[0].T, limited.reshape(labels.size, -1), precision="highest")[None]
    return _weighted(features, limited.reshape(*labels.shape, -1))


def _weighted(features: jax.Array, residual: jax.Array) -> jax.Array:
    return jnp.einsum("knd,knx->kdx", features, residual, precision="highest")


def _chains_by_devices(blocks: Any, share: Any, theta: jax.Array, *limits: jax.Array) -> ClippedSum:
    """Return sums[chain, m] and norms[chain, K] for theta[chain, m] and weight, clip, perhaps example_clip [chain, K].

    With theta[chain, K, m] each device takes its own.
    """
    dim, received = blocks[0].shape[-1], [theta] if theta.ndim == 3 else []
    columns = None if received else columns_of(theta, dim)
    zero, by_record = jnp.zeros((dim, theta.shape[-1] // dim, theta.shape[0]), theta.dtype), len(limits) > 2
    start = as_pair(zero) if by_record else pairs.zero_total(zero, limits[0].shape[1])
    bound = pairs.signal_bound(*limits[:2])

    def capped_pull(columns: jax.Array) -> jax.Array:
        return pairs.cap_prior(pull(share, columns), (-3, -2))

    prior_of_all = None if columns is None else capped_pull(columns)

    def add(total: Any, data: Any, w: jax.Array, limit: jax.Array, *others: jax.Array) -> ClippedSum:
        at = columns_of(others[-1], dim) if columns is None else columns
        example = others[0] if by_record else None
        if example is None:
            gradients = gradients_of(data, share, at)
        else:
            prior = capped_pull(at) if prior_of_all is None else prior_of_all
            gradients = clipped_gradients_of(data, prior, at, example)
        if example is not None and data[1].shape[1] > pairs.PAIRS:
            weight = jnp.broadcast_to(w.T, gradients.high.shape[::3])
            sent, norm = pairs.clip_pairs(gradients, weight, limit.T, (1, 2))
            return plus(total, pairs.lattice_sum_pairs(sent, 0, bound)), norm.T
        gradient = gradients.rounded if by_record else gradients.high
        squares = jnp.sum(pairs.barrier(pairs.sum_squares(gradient, 1)), axis=1)
        norm = pairs.root_of_squares(squares, zero.shape[0] * zero.shape[1])
        clipped = clip_factor(w.T, limit.T, norm)[:, None, None] * gradient
        if by_record:
            return plus(total, lattice_sum(clipped, 0, bound)), norm.T
        return pairs.add_devices(total, clipped, 0, bound), norm.T

    total, norms = scan_blocks(add, blocks, start, *limits, *received, together=0 if by_record else pairs.FEW)
    return jax.tree.map(_rows, total), norms


def _chains_by_rows(blocks: Any, share: Any, theta: jax.Array, *limits: jax.Array) -> tuple[Sum, jax.Array]:
    """Return the same for devices of few rows, without any device's own gradient.

    With residuals r = p − 1[label] the gradient is Uᵀr + pulled, the latter a share of the prior's. Its norm follows
    from the few products of a device's rows, ‖Uᵀr‖² = Σ_ij (u_i·u_j)(r_i·r_j) and (Uᵀr)·pulled = Σ_i r_i·(u_i·pulled),
    and the clipped sum is one matrix product.
    """
    block, rows, dim = blocks[0].shape[1:]
    classes = theta.shape[1] // dim
    columns = columns_of(theta, dim)
    whole_pull = pull(share, columns)
    prior_factor = pairs.prior_factor(whole_pull, (0, 1))
    pulled = prior_factor * whole_pull
    length = jnp.sum(pulled**2, axis=(0, 1))
    most_sent = pairs.signal_bound(*limits[:2])
    bound = pairs.CANCELLING * ROWS_TOGETHER * most_sent
    # Float32 adds whole devices of few rows, and all of these sums of a group of blocks are on one lattice.
    together, group = rows_together(block, rows), devices_on_lattice(block, rows)
    parts = -(-block * rows // together) * grouped(limits[0].shape[1], block, group)
    # What is sent of a prior's share is public too: a factor is small where the share is large.
    most_factor = jnp.minimum(jnp.max(limits[0]), 16 * most_sent / jnp.sqrt(length))

    def add(
        total: Sum, data: Any, w: jax.Array, limit: jax.Array, example: jax.Array | None = None
    ) -> tuple[Sum, jax.Array]:
        u, label = data[0].reshape(-1, dim), data[1].reshape(-1)
        logits = product(u, columns)
        residual = _residuals(logits, label)
        lengths, inner = (values[..., None] for values in data[2:])
        if example is not None:
            example_limits = _row_limits(data[2], example)
            beyond = data[2].reshape(-1, 1) > FARTHEST_ROW * example_limits
            residual = _limited(residual, data[2], jnp.where(beyond, 0.0, example_limits))
            lengths = jnp.where(beyond.reshape(block, rows, -1), 0.0, lengths)
        along = (share * prior_factor) * logits if jnp.ndim(share) == 0 else product(u, pulled)
        across = jnp.sum(residual * along, axis=1).reshape(block, rows, -1).sum(1)
        apart = residual.reshape(block, rows, classes, -1)
        square = length + 2 * across
        for i in range(rows):
            for j in range(i + 1):
                square += (1 if i == j else 2) * inner[:, i, j] * jnp.sum(apart[:, i] * apart[:, j], axis=1)
        # Where rows cancel, the square is all rounding: taken at its largest, so that nothing is sent unclipped.
        sizes = (_class_norms(apart, axis=2) * lengths).sum(1) + jnp.sqrt(length)
        norm = jnp.sqrt(jnp.maximum(square, 0.0))
        error = rounding_of(dim, classes) * sizes**2 + lost_of(lengths, dim, classes)
        most = jnp.sqrt(jnp.maximum(square, 0.0) + error)
        # Rows are added to those of other devices in float32, and must not be much larger than what is sent of them.
        least = sizes / pairs.CANCELLING
        most = jnp.maximum(most, least if example is None else jnp.where((example >= limit).T, least, 0.0))
        factor = clip_factor(w.T, limit.T, most)
        clipped = (factor[:, None, None] * apart).reshape(residual.shape)
        whole = Sum(*map(jnp.add, total, _added(u, clipped, together, parts, bound)))
        return whole, jnp.concatenate([norm, factor], axis=1).T

    zero = as_pair(jnp.zeros_like(columns))
    total, found = scan_blocks(add, blocks, zero, *limits, together=group, zero=zero)
    norms, factors = jnp.split(found, 2)
    several = jnp.split(factors.T, list(range(pairs.DEVICES, factors.shape[1], pairs.DEVICES)))
    prior = functools.reduce(plus, (lattice_sum(some, 0, most_factor) for some in several))
    shared = pairs.times(pulled, Sum(*(jnp.broadcast_to(part, pulled.shape) for part in prior)))
    whole = plus(total, shared)
    return Sum(_rows(whole.high), _rows(whole.low)), norms


def rows_together(block: int, rows: int) -> int:
    """Return how many rows of a block of devices float32 adds; those of a device stay together."""
    return pairs.part_size(block, ROWS_TOGETHER // rows) * rows


def devices_on_lattice(block: int, rows: int) -> int:
    """Return how many devices, in whole blocks, are added on one lattice."""
    return block * max(1, pairs.PRODUCTS // -(-block * rows // rows_together(block, rows)))


def chains_together(chains: int, dim: int) -> int:
    """Return how many chains of θ[m] `by_rows` takes at a time: on a CPU, so many that its cache holds their sums."""
    return min(chains, max(64, CPU_BLOCK // (4 * dim))) if jax.default_backend() == "cpu" else chains


def _some_chains_by_rows(blocks: Any, share: Any, theta: jax.Array, *limits: jax.Array) -> tuple[Sum, jax.Array]:
    """Return `_chains_by_rows` of some chains after the other; products of rows are the same for all."""
    chains, u = len(theta), blocks[0]
    usable = jnp.where(jnp.isfinite(blocks[2])[..., None], u, 0.0)  # rows that are too long are never sent
    blocks = *blocks, jnp.einsum("bkid,bkjd->bkij", usable, usable, precision="highest")
    size = chains_together(*theta.shape)
    if size == chains:
        return _chains_by_rows(blocks, share, theta, *limits)

    def split(values: jax.Array) -> jax.Array:
        all_chains = jnp.broadcast_to(values, (chains, *values.shape[1:]))
        return jnp.pad(all_chains, ((0, -chains % size), (0, 0))).reshape(-1, size, values.shape[1])

    parts = jax.lax.map(lambda some: _chains_by_rows(blocks, share, *some), tuple(map(split, (theta, *limits))))
    return jax.tree.map(lambda values: values.reshape(-1, values.shape[-1])[:chains], parts)


def _added(u: jax.Array, clipped: jax.Array, together: int, parts: int, bound: jax.Array) -> Sum:
    """Return Σ uᵀ clipped of `together` rows each on a lattice, for u[n, d] and clipped[n, C, chain], [d, C, chain]."""
    missing, shape = -len(u) % together, (u.shape[1], *clipped.shape[1:])
    left = jnp.pad(u, ((0, missing), (0, 0))).reshape(-1, together, u.shape[1])
    right = jnp.pad(clipped, ((0, missing), (0, 0), (0, 0))).reshape(len(left), together, -1)
    terms = product(left[0].T, right[0])[None] if len(left) == 1 else _weighted(left, right)
    total = pairs.both_sums(pairs.lattice_parts(terms, parts, bound), 0)
    return Sum(total.high.reshape(shape), total.low.reshape(shape))


def rounding_of(dim: int, classes: int) -> float:
    """Return the rounding of a device's squared norm by products of rows, over the square of their lengths' sum."""
    return (dim + classes + 48) * pairs.UNIT


def lost_of(lengths: jax.Array, dim: int, classes: int) -> jax.Array:
    """Return the most that a device's squared norm, by products of rows of these lengths[block, rows, ...], may lack.

    Products of residuals below 2⁻¹²⁶ are lost, and are worth that times the lengths of their rows.
    """
    of_rows = jnp.sum(lengths, axis=1) * (classes * pairs.LOST_SQUARE) ** 0.5
    return of_rows**2 + dim * classes * pairs.LOST_NORM


by_devices = batch_chains(_chains_by_devices, chain_arguments=3)
by_rows = batch_chains(_some_chains_by_rows, chain_arguments=3)
by_devices_clipped = batch_chains(_chains_by_devices, chain_arguments=4)
by_rows_clipped = batch_chains(_some_chains_by_rows, chain_arguments=4)
