"""Clipped gradient sums of linear regression, for all chains at once and a block of devices at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wflmc.posterior.blocks import clipping, many_chains, over_blocks, row_norms


def _all_chains(blocks: Any, theta: jax.Array, weight: jax.Array, clip: jax.Array) -> tuple[jax.Array, jax.Array]:
    """theta[chain, m] or [chain, K, m], weight[chain, K], clip[chain, K] -> sums[chain, m], norms[chain, K]."""
    heard = _own(theta)

    def add(
        total: jax.Array, data: Any, w: jax.Array, limit: jax.Array, *own: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        hessian, linear = data
        if own:
            gradient = jnp.einsum("ckm,kmn->ckn", own[0], hessian, precision="highest") - linear
        else:
            flat = hessian.reshape(-1, theta.shape[1])  # symmetric, so that rows are columns
            gradient = jnp.matmul(theta, flat.T, precision="highest").reshape(-1, *linear.shape) - linear
        norm = jnp.sqrt(jnp.sum(gradient**2, axis=-1))
        return total + jnp.sum(clipping(w, limit, norm)[..., None] * gradient, axis=1), norm

    return over_blocks(add, blocks, jnp.zeros((theta.shape[0], theta.shape[-1]), theta.dtype), weight, clip, *heard)


def _own(theta: jax.Array) -> list[jax.Array]:
    """What each device has heard, where they have not all heard the same: an argument that goes block by block."""
    return [theta] if theta.ndim == 3 else []


def _chains_by_examples(
    blocks: Any, share: Any, theta: jax.Array, weight: jax.Array, clip: jax.Array, example_clip: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same with every example clipped first, from the examples themselves."""
    heard = _own(theta)

    def add(
        total: jax.Array, data: Any, w: jax.Array, limit: jax.Array, example: jax.Array, *own: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        u, v = data
        if own:
            residual = jnp.einsum("ckm,knm->ckn", own[0], u, precision="highest") - v
        else:
            rows = u.reshape(-1, theta.shape[1])
            residual = jnp.matmul(theta, rows.T, precision="highest").reshape(-1, *v.shape) - v
        size = row_norms(u)
        most = jnp.where(size > 0, example[..., None] / size, jnp.inf)
        kept = jnp.clip(residual, -most, most)
        gradient = jnp.einsum("ckn,knm->ckm", kept, u, precision="highest")
        gradient = gradient + (own[0] if own else theta[:, None]) @ share
        norm = jnp.sqrt(jnp.sum(gradient**2, axis=-1))
        return total + jnp.sum(clipping(w, limit, norm)[..., None] * gradient, axis=1), norm

    start = jnp.zeros((theta.shape[0], theta.shape[-1]), theta.dtype)
    return over_blocks(add, blocks, start, weight, clip, example_clip, *heard)


clipped_sum = many_chains(_all_chains, own=3)
by_examples = many_chains(_chains_by_examples, own=4)
