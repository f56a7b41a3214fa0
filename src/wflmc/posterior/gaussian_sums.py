"""Clipped gradient sums of linear regression, for all chains at once and a block of devices at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wflmc.posterior.blocks import clipping, many_chains, over_blocks, row_norms
from wflmc.posterior.summation import (
    PAIRS,
    Sum,
    Total,
    alone,
    begin,
    largest_sent,
    over,
    over_devices,
    over_pairs,
    over_records,
    plus,
    projected,
    squares,
)


def _all_chains(blocks: Any, theta: jax.Array, weight: jax.Array, clip: jax.Array) -> tuple[Total, jax.Array]:
    """theta[chain, m] or [chain, K, m], weight[chain, K], clip[chain, K] -> sums[chain, m], norms[chain, K]."""
    heard, bound = _own(theta), largest_sent(weight, clip)

    def add(total: Total, data: Any, w: jax.Array, limit: jax.Array, *own: jax.Array) -> tuple[Total, jax.Array]:
        hessian, linear = data
        if own:
            gradient = jnp.einsum("ckm,kmn->ckn", own[0], hessian, precision="highest") - linear
        else:
            flat = hessian.reshape(-1, theta.shape[1])  # symmetric, so that rows are columns
            gradient = jnp.matmul(theta, flat.T, precision="highest").reshape(-1, *linear.shape) - linear
        norm = jnp.sqrt(squares(gradient))
        return over_devices(total, clipping(w, limit, norm)[..., None] * gradient, 1, bound), norm

    return over_blocks(add, blocks, begin(_zero(theta), weight.shape[1]), weight, clip, *heard, by_device=True)


def _own(theta: jax.Array) -> list[jax.Array]:
    """What each device has heard, where they have not all heard the same: an argument that goes block by block."""
    return [theta] if theta.ndim == 3 else []


def _zero(theta: jax.Array) -> jax.Array:
    return jnp.zeros((theta.shape[0], theta.shape[-1]), theta.dtype)


def _chains_by_examples(
    blocks: Any, share: Any, theta: jax.Array, weight: jax.Array, clip: jax.Array, example_clip: jax.Array
) -> tuple[Sum, jax.Array]:
    """The same with every example clipped first, from the examples themselves."""
    heard, bound = _own(theta), largest_sent(weight, clip)

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
        gradient = plus(over_records(_weighted, like, (kept, 2), (u, 1)), alone(prior + like))
        if u.shape[1] > PAIRS:
            sent, norm = projected(gradient, jnp.broadcast_to(w, like.shape[:2]), limit, (-1,))
            return plus(total, over_pairs(sent, 1, bound)), norm
        norm = jnp.sqrt(squares(gradient.rounded))
        return plus(total, over(clipping(w, limit, norm)[..., None] * gradient.rounded, 1, bound)), norm

    return over_blocks(add, blocks, alone(_zero(theta)), weight, clip, example_clip, *heard)


def _weighted(kept: jax.Array, u: jax.Array) -> jax.Array:
    return jnp.einsum("ckn,knm->ckm", kept, u, precision="highest")


clipped_sum = many_chains(_all_chains, own=3)
by_examples = many_chains(_chains_by_examples, own=4)
