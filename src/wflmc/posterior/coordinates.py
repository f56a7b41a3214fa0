"""Other coordinates for the same posterior: whitened features, parameters mapped back, the prior stated in either.

A chain contracts at the pace of its slowest direction and is stable at that of its fastest. In the coordinates φ with
θ = Wᵀφ the features are z = W u and every inner product θᵀu = φᵀz is as before, so that the model is the same and only
the geometry changes. With W whitening the features, all directions that the data speak about are alike.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import InputError, without_data

Array = NDArray[np.float64]
Points = TypeVar("Points", jax.Array, np.ndarray)
"""Points θ or φ[..., m], arrays of JAX or of NumPy; what is returned is of the same kind."""

PRIORS = ("parameters", "whitened")
SMALLEST = 1e-10
"""Directions with less than this share of the largest variance are stretched no further: they may be rounding."""


@without_data
class Coordinates(NamedTuple):
    """The coordinates φ of a chain: θ = Wᵀφ for the parameters that belong to one set of features (one class)."""

    matrix: Array
    """W[d, d]."""
    inverse: Array
    """W⁻¹, so that φ = W⁻ᵀθ."""
    spread: Array
    """R[d, d] with φ ~ N(0, R Rᵀ) under the prior."""
    precision: Array
    """(R Rᵀ)⁻¹, the prior's curvature."""

    def parameters(self, phi: Points) -> Points:
        """Return θ[..., m] of φ[..., m]."""
        return _apply(phi, self.matrix)

    def linear(self, phi: Points) -> Points:
        """Return the linear part of `parameters`, Wᵀφ, for φ[..., m]: all of it, as θ = 0 where φ = 0."""
        return self.parameters(phi)

    def of(self, theta: Points) -> Points:
        """Return φ[..., m] of θ[..., m]."""
        return _apply(theta, self.inverse)

    def shared(self, devices: int) -> Coordinates:
        """Return the same with one device's share of the prior."""
        return self._replace(
            spread=self.spread * devices**0.5, precision=self.precision / devices
        )


@without_data
class Affine(NamedTuple):
    """The coordinates φ of a chain on a model of one's own: θ = centre + W φ."""

    centre: Array
    """[m]."""
    matrix: Array
    """W[m, m], or the diagonal of one, [m]."""

    def parameters(self, phi: Points) -> Points:
        """Return θ[..., m] of φ[..., m]."""
        return self.linear(phi) + self.centre

    def linear(self, phi: Points) -> Points:
        """Return the linear part of `parameters`, W φ, for φ[..., m]: by it differences and covariances are mapped."""
        return phi * self.matrix if self.matrix.ndim == 1 else phi @ self.matrix.T

    def of(self, theta: Points) -> Points:
        """Return φ[..., m] of θ[..., m]."""
        away = theta - self.centre
        return (
            away / self.matrix
            if self.matrix.ndim == 1
            else away @ np.linalg.inv(self.matrix).T
        )


def _apply(values: Points, matrix: Array) -> Points:
    """Return values[..., m] times the matrix, in pieces of its size."""
    pieces = values.shape[-1] // len(matrix)
    return (values.reshape(*values.shape[:-1], pieces, len(matrix)) @ matrix).reshape(
        values.shape
    )


def coordinates(
    matrix: ArrayLike, prior_std: float, prior_on: str = "parameters"
) -> Coordinates:
    """Return coordinates by W, with the prior N(0, prior_std² I) on the parameters θ or on the coordinates φ."""
    W = np.asarray(matrix, dtype=float)
    if prior_on not in PRIORS:
        raise InputError("prior_on", prior_on, f"one of {', '.join(PRIORS)}")
    if not np.all(np.isfinite(W)) or not np.linalg.cond(W) < 1e12:
        raise InputError("matrix", W, "finite, and one that can be inverted")
    inverse = np.linalg.inv(W)
    if prior_on == "parameters":
        return Coordinates(W, inverse, prior_std * inverse.T, W @ W.T / prior_std**2)
    return Coordinates(
        W, inverse, prior_std * np.eye(len(W)), np.eye(len(W)) / prior_std**2
    )


def whitening(
    mean: ArrayLike,
    covariance: ArrayLike,
    intercept: bool,
    least: float = 0.0,
    ridge: float = 0.0,
) -> Array:
    """Return W with z = W u of unit second moments: E[z zᵀ] = I where `least` and `ridge` are zero.

    Args:
        mean: of the features, [d]; covariance: [d, d], both without the constant that an intercept adds.
        intercept: with one, u has that constant and W one row more. Then z is, up to a rotation, what centring and
            scaling would give; without one, centring would be another model, and moments are those about zero.
        least: variances below this are taken for it, such as those that noise hides.
        ridge: added to all moments, for what the prior knows.
    """
    centre, spread = np.asarray(mean, dtype=float), np.asarray(covariance, dtype=float)
    values, vectors = np.linalg.eigh(spread)
    spread = (vectors * np.maximum(values, least)) @ vectors.T
    moments = spread + np.outer(centre, centre)
    if intercept:
        moments = np.block([[moments, centre[:, None]], [centre, np.ones(1)]])
    values, vectors = np.linalg.eigh(moments)
    if not values[-1] > 0:
        raise InputError(
            "data", "features that are all zero", "features that vary, for whitening"
        )
    return np.asarray(
        (vectors / np.sqrt(np.maximum(values + ridge, SMALLEST * values[-1])))
        @ vectors.T
    )
