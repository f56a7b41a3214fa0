"""Other coordinates for the same posterior: whitened features, parameters mapped back, the prior stated in either.

A chain contracts at the pace of its slowest direction and is stable at that of its fastest. In the coordinates φ with
θ = Wᵀφ the features are z = W u and every inner product θᵀu = φᵀz is as before, so that the model is the same and only
the geometry changes. With W whitening the features, all directions that the data speak about are alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError, Shown, without_data
from wflmc.posterior.base import Posterior

Array = NDArray[np.float64]

PRIORS = ("parameters", "whitened")
SMALLEST = 1e-10
"""Directions with less than this share of the largest variance are stretched no further: they may be rounding."""


@without_data
class Coordinates(NamedTuple):
    """The coordinates φ of a chain: θ = Wᵀφ for the parameters that belong to one set of features (one class)."""

    matrix: Any
    """W[d, d]."""
    inverse: Any
    """W⁻¹, so that φ = W⁻ᵀθ."""
    spread: Any
    """R[d, d] with φ ~ N(0, R Rᵀ) under the prior."""
    precision: Any
    """(R Rᵀ)⁻¹, the prior's curvature."""

    def parameters(self, phi: Any) -> Any:
        """θ[..., m] of φ[..., m]."""
        return _apply(phi, self.matrix)

    def of(self, theta: Any) -> Any:
        """φ[..., m] of θ[..., m]."""
        return _apply(theta, self.inverse)

    def shared(self, devices: int) -> Coordinates:
        """The same with one device's share of the prior."""
        return self._replace(spread=self.spread * devices**0.5, precision=self.precision / devices)


class Moving(Shown, Posterior, ABC):
    """What posteriors whose chains may move in other coordinates have in common."""

    coordinates: Coordinates | None
    prior_std: float
    features: Array
    intercept: bool
    columns: tuple[str, ...]
    curvature: float = 1.0
    """The most by which an example with features u can curve the cost, over ‖u‖²."""

    def _facts(self) -> dict[str, Any]:
        return {
            "devices": len(self.sizes),
            "examples": int(np.sum(self.sizes)),
            "parameters": self.dim,
            "classes": getattr(self, "classes", None),
            "mu": self.mu,
            "L": self.L,
        }

    def whitened(self, matrix: ArrayLike | None = None, prior_on: str = "parameters") -> Self:
        """The same posterior for chains that move in the coordinates φ = W⁻ᵀθ; samples come back as parameters.

        Args:
            matrix: W[d, d], by default that which whitens the features (see `wflmc.posterior.whitening`). It then
                depends on the data, and a promise of privacy does not cover it.
            prior_on: "parameters" leaves the prior as it is; "whitened" puts N(0, prior_std² I) on φ: another prior.
        """
        if self.coordinates is not None:
            raise InputError("matrix", "a second one", "given for a posterior in its own coordinates")
        if matrix is None:
            moments = moments_of(self.features, self.sizes, self.intercept)
            matrix = whitening(*moments, self.intercept, ridge=prior_ridge(self, prior_on))
        wanted = self.features.shape[-1]
        if np.shape(matrix) != (wanted, wanted):
            raise InputError("matrix", f"shape {np.shape(matrix)}", f"[{wanted}, {wanted}], as many as features")
        return self._moved(coordinates(matrix, self.prior_std, prior_on))

    @abstractmethod
    def _moved(self, space: Coordinates) -> Self:
        """The same posterior in other coordinates."""

    @property
    def prior_power(self) -> float:
        """The prior's variance of a coordinate that chains move in, on average."""
        if self.coordinates is None:
            return float(self.prior_std) ** 2
        return float((self.coordinates.spread**2).sum() / len(self.coordinates.spread))

    @cached_property
    def feature_scales(self) -> Array:
        """Root mean square of every feature, without the constant of an intercept, [d]."""
        total = np.einsum("knd,knd->d", self.features, self.features)  # rows that fill up are zero
        return np.sqrt(total[: total.size - self.intercept] / self.sizes.sum())

    @property
    @abstractmethod
    def outcomes(self) -> NDArray[Any]:
        """What the devices have observed, targets or labels, [K, n]."""

    def real_rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """The rows of values[K, n, ...] that are real, device after device, [N, ...]."""
        return values[np.arange(values.shape[1]) < self.sizes[:, None]]

    @property
    def observed(self) -> tuple[NDArray[Any], NDArray[np.intp]]:
        """Targets or labels, device after device, [N], and which device holds each, [N]."""
        return self.real_rows(self.outcomes), np.repeat(np.arange(self.sizes.size), self.sizes)

    @property
    def covariates(self) -> Array:
        """The features u[N, d] as they were given, in the order of `observed`, without an intercept's constant."""
        rows = self.real_rows(self.features)
        given = rows if self.coordinates is None else rows @ self.coordinates.inverse.T
        return given[:, : given.shape[1] - self.intercept]

    def simulate(self, generator: np.random.Generator, theta: ArrayLike, features: ArrayLike | None = None) -> Any:
        """Outcomes drawn from the model itself: theta[draw, m] -> [draw, n].

        Args:
            features: u[n, d], as in the data; by default those that the devices hold, in the order of `observed`.
        """
        draws = np.asarray(theta, dtype=float)
        if features is None:
            return self._draw(generator, self.coordinates_of(draws), self.real_rows(self.features))
        return self._draw(generator, draws, self.design_matrix(features))

    @abstractmethod
    def _draw(self, generator: np.random.Generator, theta: Array, rows: Array) -> NDArray[Any]:
        """Outcomes for rows of features, in the coordinates of theta."""

    def log_likelihood(self, theta: ArrayLike) -> Array:
        """log p(outcome|θ) of every observation, in the order of `observed`: theta[draw, m] -> [draw, N]."""
        draws = self.coordinates_of(np.asarray(theta, dtype=float))
        return self._log_likelihood(draws, self.real_rows(self.features), self.real_rows(self.outcomes))

    @abstractmethod
    def _log_likelihood(self, theta: Array, rows: Array, outcomes: NDArray[Any]) -> Array:
        """log p of the outcomes[n] of rows of features, in the coordinates of theta."""

    def design_matrix(self, features: ArrayLike) -> Array:
        """Features u[n, d] as in the data, checked, with the constant where the model has an intercept."""
        given = np.asarray(features, dtype=float)
        wanted = self.features.shape[-1] - self.intercept
        if given.ndim != 2 or given.shape[0] == 0 or given.shape[1] != wanted:
            raise InputError("features", f"shape {given.shape}", f"[n, {wanted}], not empty")
        if not np.all(np.isfinite(given)):
            raise InputError("features", "values that are nan or infinite", "finite everywhere")
        return np.column_stack([given, np.ones(len(given))]) if self.intercept else given


def _apply(values: Any, matrix: Any) -> Any:
    """values[..., m] times the matrix, in pieces of its size."""
    pieces = values.shape[-1] // len(matrix)
    return (values.reshape(*values.shape[:-1], pieces, len(matrix)) @ matrix).reshape(values.shape)


def coordinates(matrix: ArrayLike, prior_std: float, prior_on: str = "parameters") -> Coordinates:
    """Coordinates by W, with the prior N(0, prior_std² I) on the parameters θ or on the coordinates φ."""
    W = np.asarray(matrix, dtype=float)
    if prior_on not in PRIORS:
        raise InputError("prior_on", prior_on, f"one of {', '.join(PRIORS)}")
    if W.ndim != 2 or W.shape[0] != W.shape[1] or not np.all(np.isfinite(W)):
        raise InputError("matrix", f"shape {W.shape}", "a finite square matrix")
    if not np.linalg.cond(W) < 1e12:
        raise InputError("matrix", f"condition number {np.linalg.cond(W):.3g}", "one that can be inverted")
    inverse = np.linalg.inv(W)
    if prior_on == "parameters":
        return Coordinates(W, inverse, prior_std * inverse.T, W @ W.T / prior_std**2)
    return Coordinates(W, inverse, prior_std * np.eye(len(W)), np.eye(len(W)) / prior_std**2)


def whitening(mean: ArrayLike, covariance: ArrayLike, intercept: bool, least: float = 0.0, ridge: float = 0.0) -> Array:
    """W with z = W u of unit second moments: E[z zᵀ] = I where `least` and `ridge` are zero.

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
        raise InputError("data", "features that are all zero", "features that vary, for whitening")
    return np.asarray((vectors / np.sqrt(np.maximum(values + ridge, SMALLEST * values[-1]))) @ vectors.T)


def prior_ridge(posterior: Any, prior_on: str) -> float:
    """The second moment of features that would curve the cost as much as a prior on the parameters does."""
    if prior_on != "parameters":
        return 0.0
    return float(1 / (posterior.curvature * posterior.sizes.sum() * posterior.prior_std**2))


def moments_of(features: Array, sizes: NDArray[np.intp], intercept: bool) -> tuple[Array, Array]:
    """Mean and covariance of the real rows of features[K, n, d], without an intercept's constant."""
    rows = features[np.arange(features.shape[1]) < sizes[:, None]]
    rows = rows[:, :-1] if intercept else rows
    return rows.mean(0), np.cov(rows.T, bias=True).reshape(rows.shape[1], rows.shape[1])
