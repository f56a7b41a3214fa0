"""How the law of a linear chain answers to the noise of its rounds, and how far that law is from the posterior."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError, without_data

Array = NDArray[np.float64]

MOST_NUMBERS = 2**27
"""Numbers in a response: 1 GiB, of which the planner holds a few copies."""
MOST_DIRECTIONS = 64
"""Directions of nearly the same precision are taken together until no more are left."""


class Motion(NamedTuple):
    """How a chain moves, but for its noise."""

    step_size: ArrayLike
    """η[..., S], or h of kinetic dynamics."""
    weight: ArrayLike
    """Of every device's gradient in the update, [..., S, K]."""
    init: str = "prior"
    friction: ArrayLike | None = None
    """γ_f of kinetic dynamics, [..., 1] or one number; noise is then that of the velocity. None: overdamped."""
    downlink: ArrayLike = 0.0
    """Variance of the noise in what every device hears of θ, [..., 1] or one number."""


@without_data
class Response(NamedTuple):
    """C[s'] = covariance[s'] + Σ_s v[s] effect[s', s] in the S_u kept rounds s', for noise of variance v[S]."""

    covariance: Array
    """From the start alone, [S_u, m, m]."""
    effect: Array
    """Of noise of unit variance in round s, [S_u, S, m, m]: Φ Φᵀ if Φ takes it to θ[s']; zero for s > s'."""
    shift: Array
    """‖mean − posterior mean‖², which no noise changes, [S_u]."""
    target: Array
    """The posterior's covariance, [m, m]."""


@without_data
class DiagonalResponse(NamedTuple):
    """The same where all matrices share their eigenvectors: eigenvalues in place of matrices."""

    covariance: Array
    """[S_u, d]."""
    effect: Array
    """[S_u, S, d]."""
    shift: Array
    """[S_u]."""
    target: Array
    """[d]."""
    times: Array
    """How many directions of the m have these eigenvalues, [d]."""


AnyResponse = Response | DiagonalResponse


@without_data
class Quadratic(NamedTuple):
    """A cost as a quadratic around its mode, along the main directions of its Hessian there."""

    precision: Array
    """Eigenvalues of the Hessian, [d]; directions that no prediction depends on may be left out."""
    away: Array
    """The mean of the start, seen from the mode, [d]."""
    start: Array
    """The variance of the start, [d]."""
    pull: Array
    """Every device's gradient at the mode, [K, d]."""
    mode: Array
    """In parameters, [m]."""


def effects(matrix: Array, enters: Array, readout: Array, burn_in: int) -> Array:
    """Φ Φᵀ for Φ = R A[s'] ⋯ A[s+1] G[s], all s' > burn_in and all s: A[S, n, n] -> [S_u, S, m, m]."""
    rounds, dim = matrix.shape[0], readout.shape[0]
    if (rounds - burn_in) * rounds * dim**2 > MOST_NUMBERS:
        raise InputError("objective", "exact", f"worst or average for so many rounds of {dim} parameters: memory")
    found, carried = np.zeros((rounds - burn_in, rounds, dim, dim)), np.zeros(enters.shape)
    for s in range(rounds):
        carried[:s] = matrix[s] @ carried[:s]
        carried[s] = enters[s]
        if s >= burn_in:
            seen = readout @ carried[: s + 1]
            found[s - burn_in, : s + 1] = seen @ np.swapaxes(seen, -1, -2)
    return found


def diagonal_response(
    precision: Array,
    mean_sq: Array,
    start: ArrayLike,
    motion: Motion,
    burn_in: int,
) -> DiagonalResponse:
    """A chain on a Gaussian posterior to whose Hessian all devices contribute alike.

    Args:
        precision: eigenvalues of the Hessian, [m]; mean_sq: sum_squares of the posterior mean along them, [m].
        start: variance of θ[0] along each, [m] or one number; its mean is zero.
    """
    if motion.friction is not None:
        allowed = "worst with power = 'equal' for kinetic dynamics of this model, whose law is not known"
        raise InputError("objective", "exact", allowed)
    eta, weight = np.asarray(motion.step_size, dtype=float), np.asarray(motion.weight, dtype=float)
    precision, mean_sq, begun, times = _merged(precision, mean_sq, np.broadcast_to(start, precision.shape))
    share = eta * weight.mean(-1)
    factor = (1 - share[:, None] * precision) ** 2
    rounds = share.size
    if (rounds - burn_in) * rounds * times.size > MOST_NUMBERS:
        raise InputError("objective", "exact", "worst or average for so many rounds: memory")
    found, carried = np.zeros((rounds - burn_in, rounds, times.size)), np.zeros((rounds, times.size))
    for s in range(rounds):
        carried[:s] *= factor[s]
        carried[s] = 1.0
        if s >= burn_in:
            found[s - burn_in, : s + 1] = carried[: s + 1]
    kept = np.cumprod(factor, axis=0)[burn_in:]
    covariance = begun * kept
    if np.any(motion.downlink):
        spread = (eta**2 * (weight**2).sum(-1) / weight.shape[1] ** 2)[:, None]
        covariance = covariance + np.einsum("usd,sd->ud", found, motion.downlink * spread * precision**2)
    return DiagonalResponse(covariance, found, kept @ mean_sq, 1 / precision, times)


def _merged(precision: Array, mean_sq: Array, start: Array) -> tuple[Array, Array, Array, Array]:
    """Alike precisions and starts, or if there are too many nearly alike precisions, as one, with how many they are."""
    order = np.lexsort((start, precision))
    precision, mean_sq, start, log = precision[order], mean_sq[order], start[order], np.log(precision[order])
    first = np.append(True, (np.diff(log) > 1e-12) | (np.diff(start) > 1e-12 * start.max()))
    if first.sum() > MOST_DIRECTIONS:
        bins = np.floor((log - log[0]) / (log[-1] - log[0]) * MOST_DIRECTIONS * (1 - 1e-12))
        first = np.append(True, np.diff(bins) > 0)
    at = np.flatnonzero(first)
    times = np.diff(np.append(at, precision.size)).astype(float)
    total = [np.add.reduceat(values, at) for values in (log, mean_sq, start)]
    return np.exp(total[0] / times), total[1], total[2] / times, times


def going_on(response: AnyResponse, noise: Array) -> AnyResponse:
    """The response of the rounds after the first ones, whose noise[n] is settled."""
    done = np.einsum("s,us...->u...", noise, response.effect[:, : noise.size])
    return response._replace(covariance=response.covariance + done, effect=response.effect[:, noise.size :])
