"""Samples beside the law they should have, parameter by parameter, and how successive draws resemble each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from wflmc.evaluation.diagnostics import diagnose
from wflmc.evaluation.wasserstein import floor_w2_sq
from wflmc.posterior import Gaussian, GaussianPosterior, Posterior, SoftmaxPosterior

Array = NDArray[np.float64]

LARGEST_HESSIAN = 1500
"""Parameters up to which the Hessian of a softmax posterior is inverted."""
FLOOR_REPLICAS = 50


class Comparison(NamedTuple):
    """Samples of every parameter, [m], beside the law they should have; nan where something is not known."""

    mean: Array
    error: Array
    """Standard error of the mean."""
    deviation: Array
    """Standard deviation of the samples."""
    law: Gaussian | None
    expected: Array
    """Standard deviations of the law."""
    shift: Array
    """Means of the samples less those of the law."""

    @property
    def z(self) -> Array:
        """The shift in standard errors of the mean."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.error > 0, self.shift / self.error, np.nan)


class MeasuredDistance(NamedTuple):
    """W2² from chains, averaged over the kept rounds, and what perfect samples of as many chains would show."""

    mean: float
    error: float
    """Standard error of the mean."""
    floor: float
    floor_sd: float
    """Standard deviation of one round's estimate from perfect samples."""


def compare(theta: Array, law: Gaussian | None) -> Comparison:
    """Return means and deviations of theta[chain, draw, m] beside a law.

    Standard errors are over chains, which are independent; of one chain, by its effective sample size.
    """
    chains, draws, dim = theta.shape
    mean, deviation = theta.mean((0, 1)), theta.std((0, 1), ddof=1 if chains * draws > 1 else 0)
    if chains > 1:
        error = theta.mean(1).std(0, ddof=1) / np.sqrt(chains)
    else:
        error = deviation / np.sqrt(diagnose(theta).ess_min or np.nan)  # the smallest, which errs on the safe side
    target = law or Gaussian(np.full(dim, np.nan), np.full((dim, dim), np.nan))
    return Comparison(mean, error, deviation, law, np.sqrt(np.diagonal(target.covariance)), mean - target.mean)


def law_of(posterior: Posterior) -> Gaussian | None:
    """Return the exact law of a posterior, or its Laplace approximation; None where neither is known."""
    if isinstance(posterior, GaussianPosterior):
        return posterior.exact
    if isinstance(posterior, SoftmaxPosterior) and posterior.dim <= LARGEST_HESSIAN:
        return laplace_law(posterior)
    return None


def laplace_law(posterior: SoftmaxPosterior) -> Gaussian:
    """Return the Gaussian of the parameters at a softmax posterior's mode, with the inverse of the full Hessian."""
    mode, space, classes = posterior.laplace[0], posterior.coordinates, posterior.classes
    rows = posterior.real_rows(posterior.features)
    features = rows.shape[1]
    p = softmax(rows @ mode.reshape(classes, -1).T, axis=1)
    prior = np.eye(features) / posterior.prior_std**2 if space is None else np.asarray(space.precision)
    hessian = np.kron(np.eye(classes), prior).reshape(classes, features, classes, features)
    for one in range(classes):
        for other in range(classes):
            weight = p[:, one] * ((one == other) - p[:, other])
            hessian[one, :, other] += rows.T @ (weight[:, None] * rows)
    covariance = np.linalg.inv(hessian.reshape(posterior.dim, posterior.dim))
    moved = posterior.parameters(posterior.parameters(covariance).T).T
    return Gaussian(np.asarray(posterior.parameters(mode)), np.asarray(moved))


def measured_distance(
    exact: Gaussian, per_round: Sequence[float | None], worst: float, worst_se: float | None, chains: int
) -> MeasuredDistance:
    """Return the average of an estimated W2²[kept round] with its standard error, and its floor."""
    mean = float(np.mean([value for value in per_round if value is not None]))
    floor, error = floor_w2_sq(exact, 1.0, chains, 1, replicas=FLOOR_REPLICAS)
    relative = (worst_se or 0.0) / worst if worst else 0.0
    return MeasuredDistance(mean, relative * mean, floor, error * FLOOR_REPLICAS**0.5)


def autocorrelation(theta: Array, lags: int) -> Array:
    """Return the autocorrelation of theta[chain, draw, ...] at lags 0 to `lags`, about the mean over all chains."""
    away = theta - theta.mean((0, 1))
    draws = away.shape[1]
    products = np.array([np.mean(away[:, : draws - lag] * away[:, lag:], axis=(0, 1)) for lag in range(lags + 1)])
    products[0] = np.maximum(products[0], 1e-300)  # of a parameter that never moves
    return np.asarray(products / products[0])
