"""Exact laws of Gaussian chains, and the Wasserstein distance between Gaussians."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Response, effects
from wflmc.support.errors import without_data

Array = NDArray[np.float64]

MAX_MEAN = 1e75
"""Size from which on a mean counts as overflowed: its square is near 1e150."""
MAX_COVARIANCE = 1e150
"""Size from which on a covariance counts as overflowed: products of two such numbers
would be near the largest float64, 1.8e308."""
MAX_DOUBLED_SIZE = 12
"""Numbers in a chain's state up to which the maps of rounds are composed by doubling.

Doubling does log2(S) times the arithmetic in log2(S) large calls: it is faster only
while matrices are small.
"""


class Gaussian(NamedTuple):
    """Normal laws N(mean, covariance), any number of them along leading axes."""

    mean: Array
    """[..., m]."""
    covariance: Array
    """[..., m, m]."""


def w2_squared(first: Gaussian, second: Gaussian) -> Array:
    r"""Compute the squared Wasserstein distance (the paper's equation 15) of Gaussians.

    $W_2^2 = \lVert m_1 - m_2\rVert^2
    + \mathrm{tr}\bigl(C_1 + C_2 - 2(C_2^{1/2} C_1 C_2^{1/2})^{1/2}\bigr)$. Point
    masses, with covariances of zero, are allowed.

    Args:
        first: mean[..., m] and covariance[..., m, m].
        second: laws whose leading axes broadcast against those of `first`.

    Returns:
        W2²[...], at least 0; infinite where the first law has overflowed or is nan.
    """
    mean_is_small = (np.abs(first.mean) < MAX_MEAN).all(-1)
    covariance_is_small = (np.abs(first.covariance) < MAX_COVARIANCE).all((-1, -2))
    finite = np.asarray(mean_is_small & covariance_is_small)
    mean = np.where(finite[..., None], first.mean, 0.0)
    covariance = np.where(finite[..., None, None], first.covariance, 0.0)
    values, vectors = np.linalg.eigh(second.covariance)
    scales = np.sqrt(np.maximum(values, 0.0))[..., None, :]
    root = (vectors * scales) @ np.swapaxes(vectors, -1, -2)
    inner = root @ covariance @ root
    symmetric = 0.5 * (inner + np.swapaxes(inner, -1, -2))
    inner_values = np.maximum(np.linalg.eigvalsh(symmetric), 0.0)
    cross = np.sqrt(inner_values).sum(-1)
    traces = np.trace(covariance, axis1=-2, axis2=-1) + values.sum(-1)
    shift = ((mean - second.mean) ** 2).sum(-1)
    distance = np.maximum(shift + traces - 2 * cross, 0.0)
    return np.where(finite, distance, np.inf)


@without_data
class LinearChain(NamedTuple):
    """A chain whose rounds are affine maps with Gaussian noise.

    x[s] = A[s] x[s−1] + b[s] + G[s] N(0, σ²[s] I) + N(0, D[s]) and θ[s] = R x[s]. The
    law of x stays Gaussian.
    """

    start: Gaussian
    """The law of x[0]."""
    matrix: Array
    """A[..., S, n, n]."""
    offset: Array
    """b[..., S, n]."""
    noise_matrix: Array
    """G[..., S, n, m] by which a plan's noise enters, or one [n, m] for all rounds."""
    readout: Array
    """R[m, n]."""
    extra_covariance: Array | None = None
    """D[..., S, n, n], of noise that is not the plan's; None where there is none."""

    def states(self, noise_variance: ArrayLike) -> Gaussian:
        """Compute the law of the states x[1..S].

        Args:
            noise_variance: σ²[..., S], of the plan's noise.

        Returns:
            mean[..., S, n] and covariance[..., S, n, n]; infinite or nan where the
            chain diverges.
        """
        variance = np.asarray(noise_variance, dtype=float)[..., None, None]
        noise_covariance = variance * (
            self.noise_matrix @ np.swapaxes(self.noise_matrix, -1, -2)
        )
        if self.extra_covariance is not None:
            noise_covariance = noise_covariance + self.extra_covariance
        small = self.matrix.shape[-1] <= MAX_DOUBLED_SIZE
        compose = _by_doubling if small else _round_by_round
        # A chain that diverges ends in inf, and is reported as such.
        with np.errstate(over="ignore", invalid="ignore"):
            return compose(self.start, self.matrix, self.offset, noise_covariance)

    def law(self, noise_variance: ArrayLike) -> Gaussian:
        """Compute the law of the parameters θ[1..S].

        Args:
            noise_variance: σ²[..., S], of the plan's noise.

        Returns:
            mean[..., S, m] and covariance[..., S, m, m]; infinite or nan where the
            chain diverges.
        """
        return self._read(self.states(noise_variance))

    def _read(self, states: Gaussian) -> Gaussian:
        """Return the law of θ = R x."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean = states.mean @ self.readout.T
            covariance = self.readout @ states.covariance @ self.readout.T
            return Gaussian(mean, covariance)

    def variance_of_mean(self, noise_variance: ArrayLike, burn_in: int) -> Array:
        """Compute the variance of the mean of θ over the rounds after burn-in.

        It is the squared Monte Carlo error of one chain, correlations between rounds
        and the spread of the start included. With C[t] = Cov(x[t]) and
        P[t] = Cov(x[t], Σ_{s ≤ t} θ[s]), P[t] = A[t] P[t−1] + C[t] Rᵀ; the variances of
        the sum over all rounds are on the diagonal of Σ_t R (2 P[t] − C[t] Rᵀ).

        Args:
            noise_variance: σ²[S], for a chain without leading axes.
            burn_in: rounds that are discarded.

        Returns:
            [m], of every parameter.
        """
        readout = self.readout
        matrices = self.matrix[burn_in:]
        covariances = self.states(noise_variance).covariance[burn_in:]
        joint = np.zeros((readout.shape[1], readout.shape[0]))
        total = np.zeros(readout.shape[0])
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix, covariance in zip(matrices, covariances, strict=True):
                with_parameters = covariance @ readout.T
                joint = matrix @ joint + with_parameters
                total += np.diagonal(readout @ (2 * joint - with_parameters))
        return total / len(covariances) ** 2

    def response(self, burn_in: int, posterior: Gaussian) -> Response:
        """Compute how θ after burn-in depends on the noise of every round.

        Covariances are affine in the variances σ²[s], and means do not depend on
        them; planning by exact laws chooses σ² by this.

        Args:
            burn_in: rounds that are discarded.
            posterior: of θ, whose mean and covariance the chain should have.

        Returns:
            The response of one chain, which has no leading axes. Its covariance is that
            without the plan's noise: from the start, and from D.

        Raises:
            InputError: if it would take too much memory.
        """
        rounds = self.matrix.shape[0]
        noiseless = self._read(self.states(np.zeros(rounds)))
        noise_shape = (rounds, *self.noise_matrix.shape[-2:])
        with np.errstate(over="ignore", invalid="ignore"):
            shift = ((noiseless.mean[burn_in:] - posterior.mean) ** 2).sum(-1)
            noise_matrix = np.broadcast_to(self.noise_matrix, noise_shape)
            effect = effects(self.matrix, noise_matrix, self.readout, burn_in)
        return Response(
            covariance=noiseless.covariance[burn_in:],
            effect=effect,
            shift=shift,
            target=posterior.covariance,
        )


def _by_doubling(
    start: Gaussian,
    matrix: Array,
    offset: Array,
    noise_covariance: Array,
) -> Gaussian:
    """Compose maps of 2, 4, 8, … successive rounds: composition is associative.

    Args:
        start: the law of x[0].
        matrix: A[..., S, n, n].
        offset: b[..., S, n].
        noise_covariance: of every round, [..., S, n, n]; overwritten.

    Returns:
        The law of x[1..S].
    """
    matrix = matrix.copy()
    offset = offset.copy()
    shift = 1
    while shift < matrix.shape[-3]:
        late = np.s_[..., shift:, :, :]
        early = np.s_[..., :-shift, :, :]
        factor = matrix[late]
        moved_offset = np.einsum("...ij,...j->...i", factor, offset[..., :-shift, :])
        new_offset = offset[..., shift:, :] + moved_offset
        transposed = np.swapaxes(factor, -1, -2)
        moved_covariance = factor @ noise_covariance[early] @ transposed
        new_covariance = noise_covariance[late] + moved_covariance
        matrix[late] = factor @ matrix[early]
        offset[..., shift:, :] = new_offset
        noise_covariance[late] = new_covariance
        shift *= 2
    mean = np.einsum("...ij,...j->...i", matrix, start.mean) + offset
    from_start = matrix @ start.covariance @ np.swapaxes(matrix, -1, -2)
    return Gaussian(mean, from_start + noise_covariance)


def _round_by_round(
    start: Gaussian,
    matrix: Array,
    offset: Array,
    noise_covariance: Array,
) -> Gaussian:
    """Apply the maps of the rounds one after the other; arguments of `_by_doubling`."""
    mean, covariance = start
    means = np.empty_like(offset)
    covariances = np.empty_like(matrix)
    for s in range(matrix.shape[-3]):
        factor = matrix[..., s, :, :]
        transposed = np.swapaxes(factor, -1, -2)
        mean = np.einsum("...ij,...j->...i", factor, mean) + offset[..., s, :]
        covariance = factor @ covariance @ transposed + noise_covariance[..., s, :, :]
        means[..., s, :] = mean
        covariances[..., s, :, :] = covariance
    return Gaussian(means, covariances)


def pool(laws: Gaussian) -> Gaussian:
    """Compute the first two moments of an equal mixture: E[m] and E[C] + Cov(m).

    Of the laws of a chain on several channels, they are the moments of a chain whose
    channel is not known.

    Args:
        laws: mean[p, ..., m] and covariance[p, ..., m, m], mixed over the first axis.

    Returns:
        mean[..., m] and covariance[..., m, m].
    """
    mean = laws.mean.mean(0)
    deviations = laws.mean - mean
    squares = np.einsum("p...i,p...j->...ij", deviations, deviations)
    between = squares / deviations.shape[0]
    return Gaussian(mean, laws.covariance.mean(0) + between)
