"""What regression models share: features and outcomes on devices, and coordinates."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.posterior.base import STATIC, Posterior, check_device
from wflmc.posterior.coordinates import Coordinates, coordinates, whitening
from wflmc.posterior.inputs import (
    Names,
    check_counts,
    check_init,
    check_positive,
    check_prior_mean,
    starts_at_point,
    with_intercept,
)
from wflmc.support.errors import InputError, Shown, ShownValues
from wflmc.support.keys import digest

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Regression(Shown, Posterior):
    """p(θ|D) with prior N(θ₀, prior_std² I) and inner products θᵀu of features u.

    Features, prior mean, μ, L and gradients are those of the coordinates that chains
    move in; `whitened` gives others.
    """

    features: Array
    """u[K, n, d]; devices of unlike size are filled up with rows of zeros, which add
    nothing."""
    sizes: NDArray[np.intp]
    """N_k, [K]."""
    prior_std: float
    prior_mean: Array | None = None
    """φ₀[m], the prior's mean in the coordinates that chains move in; None: zero."""
    mu: float
    L: float
    block: int = field(default=1, metadata=STATIC)
    intercept: bool = field(default=False, metadata=STATIC)
    """Whether the last feature is a constant that the model has added itself."""
    coordinates: Coordinates | None = None
    subject: str = field(default="", metadata=STATIC)
    """The digest of the data, where features are no longer what they were."""
    columns: tuple[str, ...] = field(default=(), metadata=STATIC)
    """The names of the features; empty where they have none."""

    curvature = 1.0
    """The most by which an example with features u can curve the cost, over ‖u‖²."""

    def _facts(self) -> ShownValues:
        return {
            "devices": self.devices,
            "examples": int(np.sum(self.sizes)),
            "parameters": self.dim,
            "classes": self.classes or None,
            "mu": self.mu,
            "L": self.L,
        }

    @property
    def outcomes(self) -> np.ndarray:
        """Return what the devices have observed, targets or labels, [K, n].

        Rows beyond a device's size only fill it up.
        """
        return self._data[1]

    @property
    @abstractmethod
    def _data(self) -> tuple[Array, np.ndarray]:
        """Features, and outcomes as the model holds them."""

    @property
    @abstractmethod
    def mode(self) -> Array:
        """Return the parameters of the largest posterior density, θ[m]."""

    @abstractmethod
    def _with_data(
        self,
        features: Array,
        outcomes: np.ndarray,
        sizes: NDArray[np.intp],
        prior_std: float,
        prior_mean: Array | None,
        space: Coordinates | None,
    ) -> Self:
        """Return the same model of other data.

        Args:
            features: u[K, n, d], in the coordinates of `space`.
            outcomes: as in the data, [K, n].
            sizes: N_k, [K].
            prior_std: of the prior on the parameters, used where `space` is None.
            prior_mean: φ₀[m], in the coordinates of `space`; None: zero.
            space: the coordinates, with the prior in them; None: the parameters.
        """

    @abstractmethod
    def _draw(
        self, generator: np.random.Generator, theta: Array, rows: Array
    ) -> np.ndarray:
        """Draw outcomes of the model.

        Args:
            generator: of the draws.
            theta: in the coordinates of the rows, [draw, m].
            rows: features, [n, d].

        Returns:
            [draw, n].
        """

    @abstractmethod
    def _log_likelihood(self, theta: Array, rows: Array, outcomes: np.ndarray) -> Array:
        """Return log p of every outcome.

        Args:
            theta: in the coordinates of the rows, [draw, m].
            rows: features, [n, d].
            outcomes: [n].

        Returns:
            [draw, n].
        """

    @property
    def prior_precision(self) -> Array:
        """Return the prior's curvature for the parameters of one set of features.

        It is that of the coordinates that chains move in, [d, d]; of several classes
        each has the same.
        """
        if self.coordinates is None:
            return np.eye(self.features.shape[-1]) / self.prior_std**2
        return self.coordinates.precision

    @property
    def class_names(self) -> Names:
        """Return the label of every class, [C]; empty for a model without classes."""
        return ()

    @property
    def classes(self) -> int:
        """Return C, the number of classes; 0 for a model without classes."""
        return len(self.class_names)

    @property
    def digest(self) -> str:
        """Return a hash of the data and of which device holds them.

        It is that of the original features, whatever coordinates chains move in; only
        the part of one device of a whitened posterior has that of its whitened ones.
        """
        return self.subject or digest(*self._data, self.sizes)

    def device(self, index: int) -> Self:
        """Return one device's part: its examples, and its share of the prior.

        The share is a prior whose curvature is 1/K of the whole one, so that costs of
        all parts add up to that of all data.

        Args:
            index: the device, 0 to K − 1.

        Raises:
            InputError: if there is no such device.
        """
        check_device(index, self.devices)
        features, outcomes = self._data
        size = self.sizes[index]
        space = None
        if self.coordinates is not None:
            space = self.coordinates.for_device(self.devices)
        return self._with_data(
            features=features[index : index + 1, :size],
            outcomes=outcomes[index : index + 1, :size],
            sizes=self.sizes[index : index + 1],
            prior_std=self.prior_std * self.devices**0.5,
            prior_mean=self.prior_mean,
            space=space,
        )

    def whitened(
        self, matrix: ArrayLike | None = None, prior_on: str = "parameters"
    ) -> Self:
        """Return the same posterior for chains that move in φ = W⁻ᵀθ.

        Samples come back as parameters θ. The default W depends on the data, and a
        promise of privacy does not cover it; `wflmc.release_whitening` pays for one.

        Args:
            matrix: W[d, d]; by default that which whitens the features (see
                `wflmc.posterior.whitening`).
            prior_on: "parameters" leaves the prior as it is; "whitened" puts
                N(φ₀, prior_std² I) on φ, which is another prior on θ, of the same mean.

        Raises:
            InputError: for a matrix of another shape or without an inverse, or a
                posterior that has been whitened already.
        """
        if self.coordinates is not None:
            requirement = "given for a posterior in its own coordinates"
            raise InputError("matrix", "a second one", requirement)
        if matrix is None:
            matrix = self._whitening_matrix(prior_on)
        dim = self.features.shape[-1]
        if np.shape(matrix) != (dim, dim):
            problem = f"shape {np.shape(matrix)}"
            raise InputError("matrix", problem, f"[{dim}, {dim}], as many as features")
        space = coordinates(matrix, self.prior_std, prior_on)
        features, outcomes = self._data
        prior_mean = None
        if self.prior_mean is not None:
            moved_mean = space.of(self.prior_mean)
            prior_mean = check_prior_mean(moved_mean, self.dim)
        posterior = self._with_data(
            features=features @ space.matrix.T,
            outcomes=outcomes,
            sizes=self.sizes,
            prior_std=self.prior_std,
            prior_mean=prior_mean,
            space=space,
        )
        return replace(posterior, subject=self.digest)

    def _whitening_matrix(self, prior_on: str) -> Array:
        """Return W[d, d] by the first two moments of all features."""
        varying_features = self.features.shape[-1] - self.intercept
        rows = self.real_rows(self.features)[:, :varying_features]
        shape = (varying_features, varying_features)
        covariance = np.cov(rows.T, bias=True).reshape(shape)
        return whitening(
            rows.mean(0),
            covariance,
            intercept=self.intercept,
            ridge=self.prior_ridge(prior_on),
        )

    def prior_ridge(self, prior_on: str) -> float:
        """Return the second moment that curves the cost as much as the prior does.

        Added to the moments of features before these are whitened, it makes the
        prior's curvature part of what whitening evens out.

        Args:
            prior_on: "parameters", or "whitened" for a prior on the coordinates.

        Returns:
            1/(curvature · N · prior_std²); 0 for a prior on the coordinates.
        """
        if prior_on != "parameters":
            return 0.0
        return float(1 / (self.curvature * self.sizes.sum() * self.prior_std**2))

    @property
    def prior_power(self) -> float:
        """Return the mean square of a coordinate's distance from the prior's mean.

        It is prior_std² where chains move in the parameters; else the average of the
        prior's variances over coordinates. A link states its downlink noise relative
        to it, as the server may broadcast differences from a mean that is public.
        """
        if self.coordinates is None:
            return float(self.prior_std) ** 2
        prior_root = self.coordinates.prior_root
        return float((prior_root**2).sum() / len(prior_root))

    def start_mean(self, init: str) -> Array:
        """Return the mean of the law that chains start from.

        Args:
            init: "prior", "prior-mean" or "zero".

        Returns:
            φ[m], the prior's mean or zero.

        Raises:
            InputError: for another start.
        """
        check_init(init)
        if init == "zero" or self.prior_mean is None:
            return np.zeros(self.dim)
        return self.prior_mean

    def draw_initial(self, key: jax.Array, init: str = "prior") -> jax.Array:
        """Draw the start of one chain, in the coordinates that chains move in.

        Args:
            key: of the draw.
            init: "prior"; or "prior-mean" or "zero" for a start at that point.

        Returns:
            φ[m].

        Raises:
            InputError: for another start.
        """
        draw = jax.random.normal(key, (self.dim,))
        mean = jnp.asarray(self.start_mean(init), draw.dtype)
        if starts_at_point(init):
            return mean + 0.0 * draw
        return mean + self._deviation_from_prior_mean(draw)

    def _deviation_from_prior_mean(self, draw: jax.Array) -> jax.Array:
        """Return R z, which is φ − φ₀ under the prior, for a draw z[m] from N(0, I)."""
        if self.coordinates is None:
            return self.prior_std * draw
        prior_root = self.coordinates.prior_root
        by_class = draw.reshape(-1, len(prior_root))
        return (by_class @ prior_root.T).ravel()

    @cached_property
    def feature_scales(self) -> Array:
        """Return the root mean square of every feature over all examples.

        The last feature of a model with an intercept is left out: it is the constant,
        where features are not whitened. Rows that fill up devices count neither in the
        sum nor in the number.

        Returns:
            [d], or [d − 1] with an intercept.
        """
        total = np.einsum("knd,knd->d", self.features, self.features)
        without_intercept = total[: total.size - self.intercept]
        return np.sqrt(without_intercept / self.sizes.sum())

    def real_rows(self, values: np.ndarray) -> np.ndarray:
        """Return the rows of examples, without those that only fill up devices.

        Args:
            values: [K, n, ...], such as `features`.

        Returns:
            [N, ...], device after device.
        """
        return values[np.arange(values.shape[1]) < self.sizes[:, None]]

    @property
    def observed(self) -> tuple[np.ndarray, NDArray[np.intp]]:
        """Return what was observed, and which device holds it.

        Returns:
            Targets or labels, device after device, [N]; and the device of each, [N].
        """
        owners = np.repeat(np.arange(self.sizes.size), self.sizes)
        return self.real_rows(self.outcomes), owners

    @property
    def covariates(self) -> Array:
        """Return the features as they were given, without an intercept's constant.

        Whitening is undone, up to rounding.

        Returns:
            u[N, d], in the order of `observed`.
        """
        features = self.real_rows(self.features)
        if self.coordinates is not None:
            features = features @ self.coordinates.inverse.T
        return features[:, : features.shape[1] - self.intercept]

    def simulate(
        self,
        generator: np.random.Generator,
        theta: ArrayLike,
        features: ArrayLike | None = None,
    ) -> np.ndarray:
        """Draw outcomes from the model itself.

        They are draws of the posterior predictive distribution where θ is drawn from
        the posterior.

        Args:
            generator: of the draws.
            theta: parameters θ[draw, m].
            features: u[n, d], as in the data; by default those that the devices hold,
                in the order of `observed`.

        Returns:
            Targets or labels, [draw, n].

        Raises:
            InputError: for features of another shape than those of the data.
        """
        draws = np.asarray(theta, dtype=float)
        if features is None:
            rows = self.real_rows(self.features)
            return self._draw(generator, self.coordinates_of(draws), rows)
        return self._draw(generator, draws, self.design_matrix(features))

    def log_likelihood(self, theta: ArrayLike) -> Array:
        """Compute log p(outcome|u, θ) of every observation.

        Normalised, in natural logarithms, as scores such as WAIC and LOO need it.

        Args:
            theta: parameters θ[draw, m].

        Returns:
            [draw, N], in the order of `observed`.
        """
        phi = self.coordinates_of(np.asarray(theta, dtype=float))
        rows = self.real_rows(self.features)
        return self._log_likelihood(phi, rows, self.real_rows(self.outcomes))

    def design_matrix(self, features: ArrayLike) -> Array:
        """Check features, and add the constant where the model has an intercept.

        Args:
            features: u[n, d], as in the data; those in float32 stay in it.

        Returns:
            Rows that parameters θ are multiplied by, [n, d] or [n, d + 1].

        Raises:
            InputError: for an empty array, another number of features than in the
                data, or values that are not finite.
        """
        rows = np.asarray(features)
        if rows.dtype != np.float32:
            rows = rows.astype(float, copy=False)
        width = self.features.shape[-1] - self.intercept
        if rows.ndim != 2 or rows.shape[0] == 0 or rows.shape[1] != width:
            requirement = f"[n, {width}], of as many features as X"
            raise InputError("features", f"shape {rows.shape}", requirement)
        if not np.all(np.isfinite(rows)):
            problem = "values that are nan or infinite"
            raise InputError("features", problem, "finite everywhere")
        return with_intercept(rows) if self.intercept else rows


def check_regression(
    devices: int,
    prior_std: float,
    X: ArrayLike | None,
    y: ArrayLike | None,
    *,
    examples: int,
    dim: int,
) -> None:
    """Refuse arguments that no regression can have.

    Args:
        devices: K.
        prior_std: of the prior.
        X: features, or None for synthetic data.
        y: outcomes; given if and only if `X` is.
        examples: N, of synthetic data.
        dim: the number of features, of synthetic data.

    Raises:
        InputError: for sizes below 1, a deviation that is not above 0, or only one of X
            and y.
    """
    check_positive({"prior_std": prior_std})
    check_counts(devices=devices, examples=examples, dim=dim)
    if (X is None) != (y is None):
        missing_argument = "X" if X is None else "y"
        requirement = "given together with the other of X and y"
        raise InputError(missing_argument, None, requirement)
