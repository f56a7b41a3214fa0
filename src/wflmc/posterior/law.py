"""Exact laws of Gaussian chains, and the Wasserstein distance between Gaussians."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Gaussian(NamedTuple):
    """Normal laws: mean[..., m] and covariance[..., m, m]."""

    mean: Array
    covariance: Array


def w2_squared(first: Gaussian, second: Gaussian) -> Array:
    """W2² between Gaussians: ‖m1−m2‖² + tr(C1 + C2 − 2(C2^½ C1 C2^½)^½). Broadcasts over the front."""
    values, vectors = np.linalg.eigh(second.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    inner = root @ first.covariance @ root
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(0.5 * (inner + np.swapaxes(inner, -1, -2))), 0.0)).sum(-1)
    traces = np.trace(first.covariance, axis1=-2, axis2=-1) + values.sum(-1)
    shift = ((first.mean - second.mean) ** 2).sum(-1)
    return np.maximum(shift + traces - 2 * cross, 0.0)


def affine_chain(start: Gaussian, matrix: Array, offset: Array, noise_variance: Array) -> Gaussian:
    """Law of θ[s] = A[s] θ[s−1] + b[s] + N(0, σ²[s] I) for every s = 1..S.

    Composition of affine Gaussian maps is associative, so all prefixes come from log2(S) batched matrix
    products instead of S small ones.

    Args:
        start: law of θ[0].
        matrix: A[..., S, m, m]; offset: b[..., S, m]; noise_variance: σ²[..., S].
    """
    rounds, size = matrix.shape[-3], matrix.shape[-1]
    matrix, offset = matrix.copy(), offset.copy()
    spread = noise_variance[..., None, None] * np.eye(size)
    shift = 1
    while shift < rounds:
        late, early = np.s_[..., shift:, :, :], np.s_[..., :-shift, :, :]
        a = matrix[late]
        new_offset = offset[..., shift:, :] + np.einsum("...ij,...j->...i", a, offset[..., :-shift, :])
        new_spread = spread[late] + a @ spread[early] @ np.swapaxes(a, -1, -2)
        matrix[late] = a @ matrix[early]
        offset[..., shift:, :] = new_offset
        spread[late] = new_spread
        shift *= 2
    mean = np.einsum("...ij,...j->...i", matrix, start.mean) + offset
    covariance = matrix @ start.covariance @ np.swapaxes(matrix, -1, -2) + spread
    return Gaussian(mean, covariance)


def pool(laws: Gaussian) -> Gaussian:
    """The first two moments of an equal mixture over the leading axis: E[m], E[C] + Cov(m)."""
    mean = laws.mean.mean(0)
    away = laws.mean - mean
    return Gaussian(mean, laws.covariance.mean(0) + np.einsum("p...i,p...j->...ij", away, away) / away.shape[0])
