"""What regression models share: features and outcomes on devices, and chains that may move in other coordinates."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.posterior.base import STATIC, Posterior, check_device
from wflmc.posterior.coordinates import Coordinates, coordinates, whitening
from wflmc.posterior.inputs import (
    Names,
    check_counts,
    check_init,
    check_positive,
    with_intercept,
)
from wflmc.support.errors import InputError, Shown, ShownValues
from wflmc.support.keys import digest

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Regression(Shown, Posterior):
    """p(θ|D) with prior N(0, prior_std² I) and inner products θᵀu of features u.

    Features, μ, L and gradients are those of the coordinates that chains move in; `whitened` gives others.
    """

    features: Array
    """u[K, n, d]; devices of unlike size are filled up with rows of zeros, which add nothing."""
    sizes: NDArray[np.intp]
    """N_k, [K]."""
    prior_std: float
    mu: float
    L: float
    block: int = field(default=1, metadata=STATIC)
    intercept: bool = field(default=False, metadata=STATIC)
    """Whether the last feature is a constant that the model has added itself."""
    coordinates: Coordinates | None = None
    subject: str = field(default="", metadata=STATIC)
    """The digest of the data, where features are no longer what they were."""
    columns: tuple[str, ...] = field(default=(), metadata=STATIC)
    """The names of the features, where there are some."""

    curvature = 1.0
    """The most by which an example with features u can curve the cost, over ‖u‖²."""

    def _facts(self) -> ShownValues:
        facts = {
            "devices": self.devices,
            "examples": int(np.sum(self.sizes)),
            "parameters": self.dim,
        }
        return {**facts, "classes": self.classes or None, "mu": self.mu, "L": self.L}

    @property
    def outcomes(self) -> np.ndarray:
        """What the devices have observed, targets or labels, [K, n]."""
        return self._data[1]

    @property
    @abstractmethod
    def _data(self) -> tuple[Array, np.ndarray]:
        """Features, and outcomes as the model holds them."""

    @abstractmethod
    def _with_data(
        self,
        features: Array,
        outcomes: np.ndarray,
        sizes: NDArray[np.intp],
        prior_std: float,
        space: Coordinates | None,
    ) -> Self:
        """Return the same model of other data."""

    @abstractmethod
    def _draw(
        self, generator: np.random.Generator, theta: Array, rows: Array
    ) -> np.ndarray:
        """Draw outcomes for rows of features in the coordinates of theta[draw, m], [draw, n]."""

    @abstractmethod
    def _log_likelihood(self, theta: Array, rows: Array, outcomes: np.ndarray) -> Array:
        """Return log p of the outcomes[n] of rows of features in the coordinates of theta[draw, m], [draw, n]."""

    @property
    def prior_precision(self) -> Array:
        """The prior's curvature for the parameters of one set of features, [d, d]."""
        if self.coordinates is None:
            return np.eye(self.features.shape[-1]) / self.prior_std**2
        return self.coordinates.precision

    @property
    def class_names(self) -> Names:
        """The label of every class in the data, [C]; empty for a model without classes."""
        return ()

    @property
    def classes(self) -> int:
        """C; 0 for a model without classes."""
        return len(self.class_names)

    @property
    def digest(self) -> str:
        """A hash of the data and of which device holds them."""
        return self.subject or digest(*self._data, self.sizes)

    def device(self, index: int) -> Self:
        """Return one device's part, whose prior is its share of the prior."""
        check_device(index, self.devices)
        at, rows = slice(index, index + 1), slice(self.sizes[index])
        features, outcomes = (values[at, rows] for values in self._data)
        space = (
            None if self.coordinates is None else self.coordinates.shared(self.devices)
        )
        return self._with_data(
            features,
            outcomes,
            self.sizes[at],
            self.prior_std * self.devices**0.5,
            space,
        )

    def whitened(
        self, matrix: ArrayLike | None = None, prior_on: str = "parameters"
    ) -> Self:
        """Return the same posterior for chains that move in the coordinates φ = W⁻ᵀθ; samples come back as parameters.

        Args:
            matrix: W[d, d], by default that which whitens the features (see `wflmc.posterior.whitening`). It then
                depends on the data, and a promise of privacy does not cover it.
            prior_on: "parameters" leaves the prior as it is; "whitened" puts N(0, prior_std² I) on φ: another prior.
        """
        if self.coordinates is not None:
            raise InputError(
                "matrix", "a second one", "given for a posterior in its own coordinates"
            )
        if matrix is None:
            rows = self.real_rows(self.features)[
                :, : self.features.shape[-1] - self.intercept
            ]
            covariance = np.cov(rows.T, bias=True).reshape(rows.shape[1], rows.shape[1])
            matrix = whitening(
                rows.mean(0),
                covariance,
                self.intercept,
                ridge=self.prior_ridge(prior_on),
            )
        wanted = self.features.shape[-1]
        if np.shape(matrix) != (wanted, wanted):
            raise InputError(
                "matrix",
                f"shape {np.shape(matrix)}",
                f"[{wanted}, {wanted}], as many as features",
            )
        space = coordinates(matrix, self.prior_std, prior_on)
        features, outcomes = self._data
        moved = self._with_data(
            features @ space.matrix.T, outcomes, self.sizes, self.prior_std, space
        )
        return replace(moved, subject=self.digest)

    def prior_ridge(self, prior_on: str) -> float:
        """Return the second moment of features that would curve the cost as much as a prior on the parameters does."""
        if prior_on != "parameters":
            return 0.0
        return float(1 / (self.curvature * self.sizes.sum() * self.prior_std**2))

    @property
    def prior_power(self) -> float:
        """The prior's variance of a coordinate that chains move in, on average."""
        if self.coordinates is None:
            return float(self.prior_std) ** 2
        return float((self.coordinates.spread**2).sum() / len(self.coordinates.spread))

    def draw_initial(self, key: jax.Array, init: str = "prior") -> jax.Array:
        """Draw the start of one chain, [m]: from the prior, or zero."""
        check_init(init)
        draw = jax.random.normal(key, (self.dim,))
        if init == "zero":
            return 0.0 * draw
        if self.coordinates is None:
            return self.prior_std * draw
        spread = self.coordinates.spread
        return (draw.reshape(-1, len(spread)) @ spread.T).ravel()

    @cached_property
    def feature_scales(self) -> Array:
        """Root mean square of every feature, without the constant of an intercept, [d]."""
        total = np.einsum(
            "knd,knd->d", self.features, self.features
        )  # rows that fill up are zero
        return np.sqrt(total[: total.size - self.intercept] / self.sizes.sum())

    def real_rows(self, values: np.ndarray) -> np.ndarray:
        """Return the rows of values[K, n, ...] that do not only fill up, device after device, [N, ...]."""
        return values[np.arange(values.shape[1]) < self.sizes[:, None]]

    @property
    def observed(self) -> tuple[np.ndarray, NDArray[np.intp]]:
        """Targets or labels, device after device, [N], and which device holds each, [N]."""
        return self.real_rows(self.outcomes), np.repeat(
            np.arange(self.sizes.size), self.sizes
        )

    @property
    def covariates(self) -> Array:
        """The features u[N, d] as they were given, in the order of `observed`, without an intercept's constant."""
        rows = self.real_rows(self.features)
        given = rows if self.coordinates is None else rows @ self.coordinates.inverse.T
        return given[:, : given.shape[1] - self.intercept]

    def simulate(
        self,
        generator: np.random.Generator,
        theta: ArrayLike,
        features: ArrayLike | None = None,
    ) -> np.ndarray:
        """Draw outcomes from the model itself: theta[draw, m] -> [draw, n].

        Args:
            features: u[n, d], as in the data; by default those that the devices hold, in the order of `observed`.
        """
        draws = np.asarray(theta, dtype=float)
        if features is None:
            return self._draw(
                generator, self.coordinates_of(draws), self.real_rows(self.features)
            )
        return self._draw(generator, draws, self.design_matrix(features))

    def log_likelihood(self, theta: ArrayLike) -> Array:
        """Return log p(outcome|θ) of every observation, in the order of `observed`: theta[draw, m] -> [draw, N]."""
        draws = self.coordinates_of(np.asarray(theta, dtype=float))
        return self._log_likelihood(
            draws, self.real_rows(self.features), self.real_rows(self.outcomes)
        )

    def design_matrix(self, features: ArrayLike) -> Array:
        """Return features u[n, d] as in the data, checked, with the constant where the model has an intercept."""
        given = np.asarray(features)
        given = given if given.dtype == np.float32 else given.astype(float, copy=False)
        wanted = self.features.shape[-1] - self.intercept
        if given.ndim != 2 or given.shape[0] == 0 or given.shape[1] != wanted:
            raise InputError(
                "features",
                f"shape {given.shape}",
                f"[n, {wanted}], of as many features as X",
            )
        if not np.all(np.isfinite(given)):
            raise InputError(
                "features", "values that are nan or infinite", "finite everywhere"
            )
        return with_intercept(given) if self.intercept else given


def check_regression(
    devices: int,
    prior_std: float,
    X: ArrayLike | None,
    y: ArrayLike | None,
    **synthetic: int,
) -> None:
    """Refuse what no regression can have; `synthetic` are the sizes of data that are drawn."""
    check_positive({"prior_std": prior_std})
    check_counts(devices=devices, **synthetic)
    if (X is None) != (y is None):
        raise InputError(
            "X" if X is None else "y", None, "given together with the other of X and y"
        )
