"""How good predictions of numbers are: root mean squared error, and log density of what was observed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

from wflmc.errors import InputError
from wflmc.posterior import GaussianPosterior
from wflmc.posterior.inputs import checked

Array = NDArray[np.float64]

CHUNK_BYTES = 2**27


class Regression(NamedTuple):
    """Scores of predicted targets, one of each for every chain."""

    rmse: Array
    """Of the chain's mean prediction."""
    nll: Array
    """Mean of −log p(target), where p is the model's density averaged over the chain's draws."""


def regression_scores(
    posterior: GaussianPosterior, theta: NDArray[np.floating], features: ArrayLike, target: ArrayLike
) -> Regression:
    """Scores of each chain's predictions N(θᵀu, 1), averaged over its draws theta[chain, draw, m], on test data."""
    try:
        rows, observed = checked(features, target)
        rows = posterior.design_matrix(rows)
    except InputError as error:
        raise InputError("test", error.given, error.allowed) from None
    chains, draws, _ = theta.shape
    squares, densities = np.zeros(chains), np.zeros(chains)
    pieces = -(-8 * draws * len(rows) // CHUNK_BYTES)
    for u, v in zip(np.array_split(rows, pieces), np.array_split(observed, pieces), strict=True):
        for c, draw in enumerate(theta):
            mean = draw.astype(float) @ u.T
            squares[c] += np.sum((mean.mean(0) - v) ** 2)
            densities[c] += np.sum(logsumexp(-0.5 * (mean - v) ** 2, axis=0))
    rmse, log_density = np.sqrt(squares / len(rows)), densities / len(rows) - np.log(draws * np.sqrt(2 * np.pi))
    return Regression(rmse, -log_density)
