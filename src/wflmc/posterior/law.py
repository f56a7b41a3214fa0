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
    """W2² between Gaussians: ‖m1−m2‖² + tr(C1 + C2 − 2(C2^½ C1 C2^½)^½).

    Broadcasts over the front; infinite where the first law has overflowed.
    """
    finite = np.asarray((np.abs(first.mean) < 1e75).all(-1) & (np.abs(first.covariance) < 1e150).all((-1, -2)))
    first = Gaussian(
        np.where(finite[..., None], first.mean, 0.0), np.where(finite[..., None, None], first.covariance, 0.0)
    )
    values, vectors = np.linalg.eigh(second.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    inner = root @ first.covariance @ root
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(0.5 * (inner + np.swapaxes(inner, -1, -2))), 0.0)).sum(-1)
    traces = np.trace(first.covariance, axis1=-2, axis2=-1) + values.sum(-1)
    shift = ((first.mean - second.mean) ** 2).sum(-1)
    return np.where(finite, np.maximum(shift + traces - 2 * cross, 0.0), np.inf)


def affine_chain(start: Gaussian, matrix: Array, offset: Array, noise_variance: Array) -> Gaussian:
    """Law of θ[s] = A[s] θ[s−1] + b[s] + N(0, σ²[s] I) for every s = 1..S.

    Args:
        start: law of θ[0].
        matrix: A[..., S, m, m]; offset: b[..., S, m]; noise_variance: σ²[..., S].
    """
    return chain_law(start, matrix, offset, noise_variance[..., None, None] * np.eye(matrix.shape[-1]))


def chain_law(start: Gaussian, matrix: Array, offset: Array, spread: Array) -> Gaussian:
    """The same for noise of covariance spread[..., S, m, m]."""
    # Doubling does log2(S) times the arithmetic in log2(S) large calls: faster only while matrices are small.
    follow = _by_doubling if matrix.shape[-1] <= 12 else _round_by_round
    with np.errstate(over="ignore", invalid="ignore"):  # a chain that diverges ends in inf, and is reported as such
        return follow(start, matrix, offset, spread)


class Response(NamedTuple):
    """How a Gaussian chain answers to the noise of its rounds, at the rounds that are kept.

    With noise of variance σ²[s] the covariance of θ after kept round s' is
    covariance[s'] + Σ_s σ²[s] effect[s', s] effect[s', s]ᵀ.
    """

    covariance: Array
    """Of θ from the start alone, [S_u, m, m]."""
    effect: Array
    """The matrix by which unit noise of round s reaches θ after kept round s', [S_u, S, m, m]; 0 for later noise."""
    shift: Array
    """‖mean − mean of the target‖² after each kept round, [S_u]."""
    target: Array
    """Covariance of the target, [m, m]."""


def chain_response(
    start: Gaussian, matrix: Array, offset: Array, enters: Array, burn_in: int, target: Gaussian
) -> Response:
    """The response of x[s] = A[s] x[s−1] + b[s] + G[s] N(0, σ²[s] I), where θ is the first m entries of x.

    Args:
        start: law of x[0]; matrix: A[S, n, n]; offset: b[S, n]; enters: G[S, n, m].
        burn_in: rounds that are not kept; target: what θ should be distributed as, m-dimensional.
    """
    rounds, dim = matrix.shape[0], target.mean.size
    mean, covariance = start
    reach = np.zeros_like(enters)
    kept = rounds - burn_in
    out = Response(np.empty((kept, dim, dim)), np.empty((kept, rounds, dim, dim)), np.empty(kept), target.covariance)
    for s, (a, b, g) in enumerate(zip(matrix, offset, enters, strict=True)):
        mean, covariance = a @ mean + b, a @ covariance @ a.T
        reach[:s] = a @ reach[:s]
        reach[s] = g
        if s >= burn_in:
            out.covariance[s - burn_in] = covariance[:dim, :dim]
            out.effect[s - burn_in] = reach[:, :dim]
            out.shift[s - burn_in] = np.sum((mean[:dim] - target.mean) ** 2)
    return out


def _by_doubling(start: Gaussian, matrix: Array, offset: Array, spread: Array) -> Gaussian:
    """Compose neighbouring maps, then maps of neighbours, and so on: composition is associative."""
    matrix, offset = matrix.copy(), offset.copy()
    shift = 1
    while shift < matrix.shape[-3]:
        late, early = np.s_[..., shift:, :, :], np.s_[..., :-shift, :, :]
        a = matrix[late]
        new_offset = offset[..., shift:, :] + np.einsum("...ij,...j->...i", a, offset[..., :-shift, :])
        new_spread = spread[late] + a @ spread[early] @ np.swapaxes(a, -1, -2)
        matrix[late] = a @ matrix[early]
        offset[..., shift:, :] = new_offset
        spread[late] = new_spread
        shift *= 2
    mean = np.einsum("...ij,...j->...i", matrix, start.mean) + offset
    return Gaussian(mean, matrix @ start.covariance @ np.swapaxes(matrix, -1, -2) + spread)


def _round_by_round(start: Gaussian, matrix: Array, offset: Array, spread: Array) -> Gaussian:
    mean, covariance = start
    means, covariances = np.empty_like(offset), np.empty_like(matrix)
    for s in range(matrix.shape[-3]):
        a = matrix[..., s, :, :]
        mean = np.einsum("...ij,...j->...i", a, mean) + offset[..., s, :]
        covariance = a @ covariance @ np.swapaxes(a, -1, -2) + spread[..., s, :, :]
        means[..., s, :], covariances[..., s, :, :] = mean, covariance
    return Gaussian(means, covariances)


def pool(laws: Gaussian) -> Gaussian:
    """The first two moments of an equal mixture over the leading axis: E[m], E[C] + Cov(m)."""
    mean = laws.mean.mean(0)
    away = laws.mean - mean
    return Gaussian(mean, laws.covariance.mean(0) + np.einsum("p...i,p...j->...ij", away, away) / away.shape[0])
