"""Exact laws of Gaussian chains, and the Wasserstein distance between Gaussians."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Response, effects
from wflmc.support.errors import without_data

Array = NDArray[np.float64]


class Gaussian(NamedTuple):
    """Normal laws: mean[..., m] and covariance[..., m, m]."""

    mean: Array
    covariance: Array


def w2_squared(first: Gaussian, second: Gaussian) -> Array:
    """Return W2² between Gaussians: ‖m1−m2‖² + tr(C1 + C2 − 2(C2^½ C1 C2^½)^½).

    Broadcasts over the front; infinite where the first law has overflowed.
    """
    finite = np.asarray(
        (np.abs(first.mean) < 1e75).all(-1)
        & (np.abs(first.covariance) < 1e150).all((-1, -2))
    )
    first = Gaussian(
        np.where(finite[..., None], first.mean, 0.0),
        np.where(finite[..., None, None], first.covariance, 0.0),
    )
    values, vectors = np.linalg.eigh(second.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]) @ np.swapaxes(
        vectors, -1, -2
    )
    inner = root @ first.covariance @ root
    cross = np.sqrt(
        np.maximum(np.linalg.eigvalsh(0.5 * (inner + np.swapaxes(inner, -1, -2))), 0.0)
    ).sum(-1)
    traces = np.trace(first.covariance, axis1=-2, axis2=-1) + values.sum(-1)
    shift = ((first.mean - second.mean) ** 2).sum(-1)
    return np.where(finite, np.maximum(shift + traces - 2 * cross, 0.0), np.inf)


@without_data
class LinearChain(NamedTuple):
    """x[s] = A[s] x[s−1] + b[s] + G[s] N(0, σ²[s] I) + N(0, D[s]), and θ[s] = R x[s]: the law of x stays Gaussian."""

    start: Gaussian
    """The law of x[0]."""
    matrix: Array
    """A[..., S, n, n]."""
    offset: Array
    """b[..., S, n]."""
    enters: Array
    """G[..., S, n, m] by which the noise of a plan enters, or one [n, m] for all rounds."""
    readout: Array
    """R[m, n]."""
    other: Array | None = None
    """D[..., S, n, n], the covariance of noise that is not the plan's; None where there is none."""

    def states(self, noise_variance: ArrayLike) -> Gaussian:
        """Return the law of x[1..S] for σ²[..., S]."""
        variance = np.asarray(noise_variance, dtype=float)[..., None, None]
        spread = variance * (self.enters @ np.swapaxes(self.enters, -1, -2))
        if self.other is not None:
            spread = spread + self.other
        # Doubling does log2(S) times the arithmetic in log2(S) large calls: faster only while matrices are small.
        compose = _by_doubling if self.matrix.shape[-1] <= 12 else _round_by_round
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a chain that diverges ends in inf, and is reported as such
            return compose(self.start, self.matrix, self.offset, spread)

    def law(self, noise_variance: ArrayLike) -> Gaussian:
        """Return the law of θ[1..S] for σ²[..., S]: mean[..., S, m], covariance[..., S, m, m]."""
        return self._read(self.states(noise_variance))

    def _read(self, states: Gaussian) -> Gaussian:
        with np.errstate(over="ignore", invalid="ignore"):
            return Gaussian(
                states.mean @ self.readout.T,
                self.readout @ states.covariance @ self.readout.T,
            )

    def variance_of_mean(self, noise_variance: ArrayLike, burn_in: int) -> Array:
        """Return the variance of the mean of θ over the rounds after burn-in, [m], for one chain and σ²[S]."""
        kept, R = slice(burn_in, None), self.readout
        covariance = self.states(noise_variance).covariance[kept]
        # P[t] = Cov(x[t], the sum of the kept θ up to t) = A[t] P[t−1] + C[t] Rᵀ
        joint, total = np.zeros((R.shape[1], R.shape[0])), np.zeros(R.shape[0])
        with np.errstate(over="ignore", invalid="ignore"):
            for a, c in zip(self.matrix[kept], covariance, strict=True):
                covered = c @ R.T
                joint = a @ joint + covered
                total += np.diagonal(R @ (2 * joint - covered))
        return total / len(covariance) ** 2

    def response(self, burn_in: int, target: Gaussian) -> Response:
        """Return how θ after burn-in depends on the noise of every round, for one chain (no leading axes)."""
        rounds = self.matrix.shape[0]
        still = self._read(self.states(np.zeros(rounds)))
        with np.errstate(over="ignore", invalid="ignore"):
            shift = ((still.mean[burn_in:] - target.mean) ** 2).sum(-1)
            enters = np.broadcast_to(self.enters, (rounds, *self.enters.shape[-2:]))
            effect = effects(self.matrix, enters, self.readout, burn_in)
        return Response(still.covariance[burn_in:], effect, shift, target.covariance)


def _by_doubling(
    start: Gaussian, matrix: Array, offset: Array, spread: Array
) -> Gaussian:
    """Compose neighbouring maps, then maps of neighbours, and so on: composition is associative."""
    matrix, offset = matrix.copy(), offset.copy()
    shift = 1
    while shift < matrix.shape[-3]:
        late, early = np.s_[..., shift:, :, :], np.s_[..., :-shift, :, :]
        a = matrix[late]
        new_offset = offset[..., shift:, :] + np.einsum(
            "...ij,...j->...i", a, offset[..., :-shift, :]
        )
        new_spread = spread[late] + a @ spread[early] @ np.swapaxes(a, -1, -2)
        matrix[late] = a @ matrix[early]
        offset[..., shift:, :] = new_offset
        spread[late] = new_spread
        shift *= 2
    mean = np.einsum("...ij,...j->...i", matrix, start.mean) + offset
    return Gaussian(
        mean, matrix @ start.covariance @ np.swapaxes(matrix, -1, -2) + spread
    )


def _round_by_round(
    start: Gaussian, matrix: Array, offset: Array, spread: Array
) -> Gaussian:
    mean, covariance = start
    means, covariances = np.empty_like(offset), np.empty_like(matrix)
    for s in range(matrix.shape[-3]):
        a = matrix[..., s, :, :]
        mean = np.einsum("...ij,...j->...i", a, mean) + offset[..., s, :]
        covariance = a @ covariance @ np.swapaxes(a, -1, -2) + spread[..., s, :, :]
        means[..., s, :], covariances[..., s, :, :] = mean, covariance
    return Gaussian(means, covariances)


def pool(laws: Gaussian) -> Gaussian:
    """Return the first two moments of an equal mixture over the leading axis: E[m], E[C] + Cov(m)."""
    mean = laws.mean.mean(0)
    away = laws.mean - mean
    return Gaussian(
        mean,
        laws.covariance.mean(0)
        + np.einsum("p...i,p...j->...ij", away, away) / away.shape[0],
    )
