"""Clipped gradient sums of linear regression, for all chains at once and a block of devices at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wflmc.posterior.blocks import batch_chains, clip_factor, row_norms, scan_blocks
from wflmc.posterior.summation import (
    PAIRS,
    Sum,
    Total,
    add_devices,
    as_pair,
    clip_pairs,
    lattice_sum,
    lattice_sum_pairs,
    plus,
    signal_bound,
    sum_records,
    sum_squares,
    zero_total,
)


def _all_chains(blocks: Any, theta: jax.Array, weight: jax.Array, clip: jax.Array) -> tuple[Total, jax.Array]:
    """theta[chain, m] or [chain, K, m], weight[chain, K], clip[chain, K] -> sums[chain, m], norms[chain, K]."""
    heard, bound = _own(theta), signal_bound(weight, clip)

    def add(total: Total, data: Any, w: jax.Array, limit: jax.Array, *own: jax.Array) -> tuple[Total, jax.Array]:
        hessian, linear = data
        if own:
            gradient = jnp.einsum("ckm,kmn->ckn", own[0], hessian, precision="highest") - linear
        else:
            flat = hessian.reshape(-1, theta.shape[1])  # symmetric, so that rows are columns
            gradient = jnp.matmul(theta, flat.T, precision="highest").reshape(-1, *linear.shape) - linear
        norm = jnp.sqrt(sum_squares(gradient))
        return add_devices(total, clip_factor(w, limit, norm)[..., None] * gradient, 1, bound), norm

    return scan_blocks(add, blocks, zero_total(_zero(theta), weight.shape[1]), weight, clip, *heard, by_device=True)


def _own(theta: jax.Array) -> list[jax.Array]:
    """What each device has heard, where they have not all heard the same: an argument that goes block by block."""
    return [theta] if theta.ndim == 3 else []


def _zero(theta: jax.Array) -> jax.Array:
    return jnp.zeros((theta.shape[0], theta.shape[-1]), theta.dtype)


def _chains_by_examples(
    blocks: Any, share: Any, theta: jax.Array, weight: jax.Array, clip: jax.Array, example_clip: jax.Array
) -> tuple[Sum, jax.Array]:
    """The same with every example clipped first, from the examples themselves."""
    heard, bound = _own(theta), signal_bound(weight, clip)

    def add(
        total: Sum, data: Any, w: jax.Array, limit: jax.Array, example: jax.Array, *own: jax.Array
    ) -> tuple[Sum, jax.Array]:
        u, v = data
        if own:
            residual = jnp.einsum("ckm,knm->ckn", own[0], u, precision="highest") - v
        else:
            rows = u.reshape(-1, theta.shape[1])
            residual = jnp.matmul(theta, rows.T, precision="highest").reshape(-1, *v.shape) - v
        size = row_norms(u)
        most = jnp.where(size > 0, example[..., None] / size, jnp.inf)
        kept = jnp.clip(residual, -most, most)
        prior = jnp.matmul(own[0] if own else theta[:, None], share, precision="highest")
        like = jnp.zeros((kept.shape[0], *u.shape[::2]), theta.dtype)
        gradient = plus(sum_records(_weighted, like, (kept, 2), (u, 1)), as_pair(prior + like))
        if u.shape[1] > PAIRS:
            sent, norm = clip_pairs(gradient, jnp.broadcast_to(w, like.shape[:2]), limit, (-1,))
            return plus(total, lattice_sum_pairs(sent, 1, bound)), norm
        norm = jnp.sqrt(sum_squares(gradient.rounded))
        return plus(total, lattice_sum(clip_factor(w, limit, norm)[..., None] * gradient.rounded, 1, bound)), norm

    return scan_blocks(add, blocks, as_pair(_zero(theta)), weight, clip, example_clip, *heard)


def _weighted(kept: jax.Array, u: jax.Array) -> jax.Array:
    return jnp.einsum("ckn,knm->ckm", kept, u, precision="highest")


clipped_sum = batch_chains(_all_chains, own=3)
by_examples = batch_chains(_chains_by_examples, own=4)
