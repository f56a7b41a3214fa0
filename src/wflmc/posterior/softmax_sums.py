"""Clipped gradient sums of the softmax model, for all chains at once and a block of devices at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wflmc.posterior.blocks import clipping, many_chains, over_blocks, row_norms


def columns_of(theta: jax.Array, dim: int) -> jax.Array:
    """theta[chain, ..., m] as [..., d, C, chain]: chains side by side are what makes the matrix products large."""
    return jnp.moveaxis(theta.reshape(*theta.shape[:-1], -1, dim).swapaxes(-1, -2), 0, -1)


def _rows(columns: jax.Array) -> jax.Array:
    """[d, C, chain] as theta[chain, m] again."""
    return columns.transpose(2, 1, 0).reshape(columns.shape[-1], -1)


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """left[i, j] right[j, ...], in full float32 also where an accelerator would rather round."""
    flat = jnp.matmul(left, right.reshape(right.shape[0], -1), precision="highest")
    return flat.reshape(-1, *right.shape[1:])


def softmax(logits: jax.Array) -> jax.Array:
    """p(class|u) from logits[n, C, chain]."""
    raised = jnp.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def pull(share: Any, columns: jax.Array) -> jax.Array:
    """A device's share of the prior's gradient; `share` of the curvature is a number, or a matrix [d, d]."""
    if jnp.ndim(share) == 0:
        return share * columns
    return jnp.einsum("ij,...jcx->...icx", share, columns, precision="highest")


def _residuals(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """p(class|u) − 1[class = label] from logits[n, C, chain] and labels[n]."""
    return softmax(logits) - jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)[..., None]


def _limited(residual: jax.Array, u: jax.Array, limit: jax.Array, rows: int) -> jax.Array:
    """residual[n, C, chain] with every example's gradient, ‖r‖ ‖u‖ long, clipped to limit[chain, block]."""
    most = jnp.repeat(limit.T, rows, axis=0)
    length = jnp.sqrt(jnp.sum(residual**2, axis=1)) * row_norms(u)[:, None]
    return residual * clipping(jnp.ones(()), most, length)[:, None]


def gradients_of(
    data: tuple[jax.Array, jax.Array], share: Any, columns: jax.Array, example_clip: jax.Array | None = None
) -> jax.Array:
    """Gradients of a block of devices for all chains, [block, d, C, chain].

    Args:
        columns: [d, C, chain], or [block, d, C, chain] where each device has its own.
    """
    features, labels = data
    block, rows, dim = features.shape
    flat = features.reshape(-1, dim)
    if columns.ndim == 4:
        logits = jnp.einsum("knd,kdcx->kncx", features, columns, precision="highest")
        logits = logits.reshape(-1, *columns.shape[2:])
    else:
        logits = product(flat, columns)
    if block == 1 and example_clip is None:
        # What was seen is the same for all chains: taken off at the end, not from every chain's p.
        hot = jax.nn.one_hot(labels[0], columns.shape[-2], dtype=features.dtype)
        likelihood = (product(flat.T, softmax(logits)) - product(flat.T, hot)[..., None])[None]
    else:
        residual = _residuals(logits, labels.reshape(-1))
        if example_clip is not None:
            residual = _limited(residual, flat, example_clip, rows)
        apart = residual.reshape(block, rows, -1)
        likelihood = jnp.einsum("knd,knx->kdx", features, apart, precision="highest").reshape(
            block, *columns.shape[-3:]
        )
    return likelihood + pull(share, columns)


def _chains_by_devices(blocks: Any, share: Any, theta: jax.Array, *limits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """theta[chain, m], and weight, clip and perhaps example_clip [chain, K] -> sums[chain, m], norms[chain, K].

    With theta[chain, K, m] each device takes its own.
    """
    dim, heard = blocks[0].shape[-1], [theta] if theta.ndim == 3 else []
    columns = None if heard else columns_of(theta, dim)
    start = jnp.zeros((dim, theta.shape[-1] // dim, theta.shape[0]), theta.dtype)

    def add(
        total: jax.Array, data: Any, w: jax.Array, limit: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        at = columns_of(others[-1], dim) if columns is None else columns
        example = others[0] if len(others) > len(heard) else None
        gradients = gradients_of(data, share, at, example)
        norm = jnp.sqrt(jnp.sum(gradients**2, axis=(1, 2)))
        factor = clipping(w.T, limit.T, norm)
        return total + jnp.sum(factor[:, None, None] * gradients, axis=0), norm.T

    total, norms = over_blocks(add, blocks, start, *limits, *heard)
    return _rows(total), norms


def _chains_by_rows(blocks: Any, share: Any, theta: jax.Array, *limits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same for devices of few rows, without any device's own gradient.

    With residuals r = p − 1[label] the gradient is Uᵀr + pulled, the latter a share of the prior's. Its norm follows
    from the few products of a device's rows, ‖Uᵀr‖² = Σ_ij (u_i·u_j)(r_i·r_j) and (Uᵀr)·pulled = Σ_i r_i·(u_i·pulled),
    and the clipped sum is one matrix product.
    """
    block, rows, dim = blocks[0].shape[1:]
    classes = theta.shape[1] // dim
    columns = columns_of(theta, dim)
    pulled = pull(share, columns)
    length = jnp.sum(pulled**2, axis=(0, 1))

    def add(
        carry: tuple[jax.Array, jax.Array], data: Any, w: jax.Array, limit: jax.Array, example: jax.Array | None = None
    ) -> tuple[Any, jax.Array]:
        total, prior = carry
        u, label = data[0].reshape(-1, dim), data[1].reshape(-1)
        logits = product(u, columns)
        residual = _residuals(logits, label)
        if example is not None:
            residual = _limited(residual, u, example, rows)
        along = share * logits if jnp.ndim(share) == 0 else product(u, pulled)
        across = jnp.sum(residual * along, axis=1).reshape(block, rows, -1).sum(1)
        apart = residual.reshape(block, rows, classes, -1)
        inner = jnp.einsum("kid,kjd->kij", data[0], data[0], precision="highest")[..., None]
        square = length + 2 * across
        for i in range(rows):
            for j in range(i + 1):
                square += (1 if i == j else 2) * inner[:, i, j] * jnp.sum(apart[:, i] * apart[:, j], axis=1)
        # Where rows cancel, the square is all rounding: taken at its largest, so that nothing is sent unclipped.
        sizes = jnp.sqrt(jnp.sum(apart**2, axis=2)) * row_norms(data[0])[..., None]
        rounding = 2e-6 * (sizes.sum(1) + jnp.sqrt(length)) ** 2
        norm = jnp.sqrt(jnp.maximum(square, 0.0))
        factor = clipping(w.T, limit.T, jnp.sqrt(jnp.maximum(square, 0.0) + rounding))
        clipped = (factor[:, None, None] * apart).reshape(residual.shape)
        return (total + product(u.T, clipped), prior + factor.sum(0)), norm.T

    start = (jnp.zeros_like(columns), jnp.zeros(theta.shape[0]))
    (total, prior), norms = over_blocks(add, blocks, start, *limits)
    return _rows(total + prior * pulled), norms


by_devices = many_chains(_chains_by_devices, own=3)
by_rows = many_chains(_chains_by_rows, own=3)
by_devices_clipped = many_chains(_chains_by_devices, own=4)
by_rows_clipped = many_chains(_chains_by_rows, own=4)
