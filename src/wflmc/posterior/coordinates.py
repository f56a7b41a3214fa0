"""Other coordinates for the same posterior: whitened features, parameters mapped back.

A chain contracts at the pace of its slowest direction and is stable at that of its
fastest. In the coordinates φ with θ = Wᵀφ the features are z = W u and every inner
product θᵀu = φᵀz is as before, so that the model is the same and only the geometry
changes. With W whitening the features, all directions that the data inform are alike.
The prior may be stated in either coordinates.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import InputError, without_data

Array = NDArray[np.float64]
Points = TypeVar("Points", jax.Array, np.ndarray)
"""Points θ or φ[..., m], arrays of JAX or of NumPy; what is returned is of the same
kind."""

PRIORS = ("parameters", "whitened")
"""What the prior N(0, prior_std² I) is on: θ or φ."""
MIN_VARIANCE_RATIO = 1e-10
"""Directions with less than this fraction of the largest variance are stretched no
further: they may be rounding."""
MAX_CONDITION_NUMBER = 1e12
"""Of a matrix of coordinates; beyond it, float64 would leave few digits of the map."""


@without_data
class Coordinates(NamedTuple):
    """Linear coordinates φ of a chain: θ = Wᵀφ for every set of features (one class).

    Parameters of several classes are mapped class by class, each by the same W.
    """

    matrix: Array
    """W[d, d]."""
    inverse: Array
    """W⁻¹, so that φ = W⁻ᵀθ."""
    prior_root: Array
    """R[d, d] with φ ~ N(0, R Rᵀ) under the prior."""
    precision: Array
    """(R Rᵀ)⁻¹, the prior's curvature."""

    def parameters(self, phi: Points) -> Points:
        """Map coordinates to parameters, θ = Wᵀφ for every class.

        Args:
            phi: φ[..., m], with m a multiple of d.

        Returns:
            θ[..., m].
        """
        return _apply(phi, self.matrix)

    def linear(self, phi: Points) -> Points:
        """Apply the linear part of `parameters`, by which differences are mapped.

        It is all of the map here, as θ = 0 where φ = 0; `Affine` differs.

        Args:
            phi: φ[..., m].

        Returns:
            Wᵀφ[..., m].
        """
        return self.parameters(phi)

    def of(self, theta: Points) -> Points:
        """Map parameters to coordinates, φ = W⁻ᵀθ for every class.

        Args:
            theta: θ[..., m], with m a multiple of d.

        Returns:
            φ[..., m].
        """
        return _apply(theta, self.inverse)

    def for_device(self, devices: int) -> Coordinates:
        """Return the same map with one device's share of the prior.

        Its curvature is that of the prior over K, so that the shares of all devices
        add up to the prior.

        Args:
            devices: K.
        """
        return self._replace(
            prior_root=self.prior_root * devices**0.5,
            precision=self.precision / devices,
        )


@without_data
class Affine(NamedTuple):
    """The coordinates φ of a chain on a custom model: θ = centre + W φ."""

    centre: Array
    """[m]."""
    matrix: Array
    """W[m, m], or the diagonal of one, [m]."""

    def parameters(self, phi: Points) -> Points:
        """Map coordinates to parameters, θ = centre + W φ.

        Args:
            phi: φ[..., m].

        Returns:
            θ[..., m].
        """
        return self.linear(phi) + self.centre

    def linear(self, phi: Points) -> Points:
        """Apply the linear part of `parameters`, by which differences are mapped.

        Covariances are mapped by it on both sides.

        Args:
            phi: φ[..., m].

        Returns:
            W φ[..., m].
        """
        if self.matrix.ndim == 1:
            return phi * self.matrix
        return phi @ self.matrix.T

    def of(self, theta: Points) -> Points:
        """Map parameters to coordinates, φ = W⁻¹(θ − centre).

        Args:
            theta: θ[..., m].

        Returns:
            φ[..., m].
        """
        deviation = theta - self.centre
        if self.matrix.ndim == 1:
            return deviation / self.matrix
        return deviation @ np.linalg.inv(self.matrix).T


def _apply(values: Points, matrix: Array) -> Points:
    """Return values[..., m] times the matrix, in pieces of its size."""
    size = len(matrix)
    pieces = values.shape[-1] // size
    by_piece = values.reshape(*values.shape[:-1], pieces, size)
    return (by_piece @ matrix).reshape(values.shape)


def coordinates(
    matrix: ArrayLike, prior_std: float, prior_on: str = "parameters"
) -> Coordinates:
    """Return the coordinates φ with θ = Wᵀφ, and the prior in them.

    Args:
        matrix: W[d, d], invertible.
        prior_std: s of the prior N(0, s² I).
        prior_on: whether that prior is on the "parameters" θ, or on the "whitened"
            coordinates φ: then it is another prior on θ.

    Raises:
        InputError: for another `prior_on`, or a matrix that is not finite or whose
            condition number is 1e12 or more.
    """
    W = np.asarray(matrix, dtype=float)
    if prior_on not in PRIORS:
        raise InputError("prior_on", prior_on, f"one of {', '.join(PRIORS)}")
    if not np.all(np.isfinite(W)) or not np.linalg.cond(W) < MAX_CONDITION_NUMBER:
        raise InputError("matrix", W, "finite, and one that can be inverted")
    inverse = np.linalg.inv(W)
    if prior_on == "parameters":
        prior_root = prior_std * inverse.T
        precision = W @ W.T / prior_std**2
    else:
        prior_root = prior_std * np.eye(len(W))
        precision = np.eye(len(W)) / prior_std**2
    return Coordinates(W, inverse, prior_root, precision)


def whitening(
    mean: ArrayLike,
    covariance: ArrayLike,
    intercept: bool,
    min_variance: float = 0.0,
    ridge: float = 0.0,
) -> Array:
    """Return W with z = W u of unit second moments, M^(−1/2) for M = E[u uᵀ].

    E[z zᵀ] = I where `min_variance` and `ridge` are zero. Directions with less than
    1e-10 of the largest moment are stretched no further: they may be rounding.

    Args:
        mean: of the features, [d], without the constant that an intercept adds.
        covariance: of the features, [d, d].
        intercept: whether u ends in a constant 1; then W has one row more, and z is, up
            to a rotation, what centring and scaling would give. Without one, centring
            would be another model, and moments are those about zero.
        min_variance: smaller variances are raised to it, such as those that noise
            hides.
        ridge: added to all moments, for what the prior knows.

    Returns:
        W, symmetric, [d, d] or [d + 1, d + 1].

    Raises:
        InputError: if all features are zero.
    """
    centre = np.asarray(mean, dtype=float)
    values, vectors = np.linalg.eigh(np.asarray(covariance, dtype=float))
    spread = (vectors * np.maximum(values, min_variance)) @ vectors.T
    moments = spread + np.outer(centre, centre)
    if intercept:
        moments = np.block([[moments, centre[:, None]], [centre, np.ones(1)]])
    values, vectors = np.linalg.eigh(moments)
    if not values[-1] > 0:
        problem = "features that are all zero"
        raise InputError("data", problem, "features that vary, for whitening")
    smallest = MIN_VARIANCE_RATIO * values[-1]
    scales = np.sqrt(np.maximum(values + ridge, smallest))
    return np.asarray((vectors / scales) @ vectors.T)
