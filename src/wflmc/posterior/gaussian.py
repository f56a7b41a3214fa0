"""Bayesian linear regression with unit noise: the model of the paper's analysis, with everything exact."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Motion, Quadratic, Response
from wflmc.posterior.base import STATIC, Maybe
from wflmc.posterior.coordinates import Coordinates
from wflmc.posterior.inputs import check_init, checked
from wflmc.posterior.law import Gaussian, LinearChain, w2_squared
from wflmc.posterior.partition import spread_over_devices
from wflmc.posterior.regression import Regression, check_regression
from wflmc.sums import gaussian as sums
from wflmc.sums.blocks import block_size, pad_to_blocks, split_blocks
from wflmc.sums.devices import ClippedSum
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator

Array = NDArray[np.float64]

PAPER_PARAMETERS = (0.071, -0.518, 0.9342, 0.7198, 0.4676)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GaussianPosterior(Regression):
    """p(θ|D) for v = θᵀu + N(0, 1) and prior N(0, prior_std² I), held as each device's sufficient statistics.

    The gradient of device k is H_k θ − b_k with H_k = Σ u uᵀ + I/(K prior_std²) and b_k = Σ v u, so a round
    costs K small matrix products whatever the number of examples. Clipping the examples one by one needs them all:
    the gradient of one is (θᵀu − v) u, and clipping it to c limits its residual to c/‖u‖.
    """

    target: Array
    """v[K, n]."""
    hessian: Array
    """H[K, m, m], each device's share of the prior included."""
    linear: Array
    """b[K, m]."""
    mean: Array
    covariance: Array
    block: int = field(default=0, metadata=STATIC)

    @property
    def dim(self) -> int:
        """m, the number of parameters."""
        return int(self.linear.shape[-1])

    @property
    def _data(self) -> tuple[Array, Array]:
        return self.features, self.target

    def _with_data(
        self,
        features: Array,
        outcomes: Any,
        sizes: NDArray[np.intp],
        prior_std: float,
        space: Coordinates | None,
    ) -> "GaussianPosterior":
        return replace(
            _assemble(features, outcomes, sizes, prior_std, space),
            intercept=self.intercept,
        )

    @property
    def exact(self) -> Gaussian:
        """The posterior of the parameters."""
        if self.coordinates is None:
            return self.exact_in_coordinates
        W = self.coordinates.matrix
        return Gaussian(self.mean @ W, W.T @ self.covariance @ W)

    @property
    def exact_in_coordinates(self) -> Gaussian:
        """The posterior in the coordinates that chains move in."""
        return Gaussian(self.mean, self.covariance)

    def _initial(self, init: str) -> Gaussian:
        """Return the law of the start in the chain's coordinates: the prior, or a point mass at zero."""
        check_init(init)
        spread = (
            self.prior_std * np.eye(self.dim)
            if self.coordinates is None
            else self.coordinates.spread
        )
        return Gaussian(
            np.zeros(self.dim), spread @ spread.T if init == "prior" else 0.0 * spread
        )

    def initial_w2_sq(self, init: str = "prior") -> float:
        """Return W2² between the start and the posterior, in the coordinates that chains move in."""
        return float(w2_squared(self._initial(init), self.exact_in_coordinates))

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: Maybe = None,
        example_clip: Maybe = None,
    ) -> ClippedSum:
        """Return `clipped_sum` before it is rounded."""
        block = self.block or self.devices
        if example_clip is None:
            quadratics = sums.Quadratics(
                hessian=split_blocks(self.hessian, block),
                linear=split_blocks(self.linear, block),
            )
            return sums.device_clipped_sum(quadratics, theta, weight, clip)
        records = sums.LinearRecords(
            features=split_blocks(self.features, block),
            target=split_blocks(self.target, block),
        )
        return sums.record_clipped_sum(
            records, self._prior_curvature, theta, weight, clip, example_clip
        )

    @property
    def _prior_curvature(self) -> Array:
        """Each device's share of the prior's curvature, [m, m]."""
        if self.coordinates is not None:
            return self.coordinates.precision / self.devices
        return np.eye(self.dim) / (self.devices * self.prior_std**2)

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Return the memory that one device at a time needs for its part of a round, in bytes."""
        return 8.0 * chains * (self.dim + (self.features.shape[1] if by_example else 0))

    def work(self, by_example: bool = False) -> float:
        """Return the number of operations of one chain in one round, roughly."""
        return float(
            self.devices
            * self.dim
            * (50 + (self.features.shape[1] if by_example else self.dim))
        )

    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same posterior in float32, in blocks of devices; see `Posterior.on_accelerator`.

        Examples are taken along only where they are to be clipped one by one.
        """
        block = block_size(
            self.devices,
            bytes_per_device=self.working_bytes(chains, by_example),
            theta_bytes=4.0 * chains * self.dim,
            limit=limit,
        )
        rows = slice(None if by_example else 0)
        taken = {"hessian": self.hessian, "linear": self.linear}
        taken |= {"features": self.features[:, rows], "target": self.target[:, rows]}
        padded: dict[str, Any] = {
            name: pad_to_blocks(values.astype(np.float32), block)
            for name, values in taken.items()
        }
        return replace(
            self, **padded, block=block, subject=""
        )  # other data, same program

    def example_norms(self, theta: ArrayLike) -> Array:
        """Return ‖gradient‖ of every example at theta[..., m], [..., N]."""
        u, v = self.real_rows(self.features), self.real_rows(self.target)
        return np.abs(
            self.coordinates_of(np.asarray(theta)) @ u.T - v
        ) * np.linalg.norm(u, axis=1)

    def _draw(self, generator: np.random.Generator, theta: Array, rows: Array) -> Array:
        mean = theta @ rows.T
        return mean + generator.standard_normal(mean.shape)

    def _log_likelihood(self, theta: Array, rows: Array, outcomes: Array) -> Array:
        return -0.5 * ((outcomes - theta @ rows.T) ** 2 + np.log(2 * np.pi))

    def gradients(self, theta: jax.Array) -> jax.Array:
        """Return every device's own gradient, unclipped, [K, m]."""
        return (jnp.asarray(self.hessian) @ theta - self.linear)[: self.devices]

    def expansion(self, step_size: float, weight: ArrayLike) -> float:
        """Return the largest factor by which one round can stretch an error of θ, over the rounds of weight[S, K].

        η < 2/L keeps it below 1 while all devices transmit. Reweighting a few unlike devices may not.
        """
        partial = np.unique(np.asarray(weight, dtype=float), axis=0)
        steps = np.eye(self.dim) - step_size * np.tensordot(partial, self.hessian, 1)
        return float(np.abs(np.linalg.eigvalsh(steps)).max())

    def downlink_error(self, weight: ArrayLike) -> Array:
        """Return E‖Σ_k w_k H_k e_k‖² for unit downlink noise e_k at every device, weight[..., K] -> [...]."""
        return np.asarray(
            np.asarray(weight, dtype=float) ** 2 @ (self.hessian**2).sum((-1, -2))
        )

    def chain(self, motion: Motion) -> LinearChain:
        """Return a chain that is never clipped, as a linear one."""
        eta, weights = (
            np.asarray(motion.step_size, dtype=float),
            np.asarray(motion.weight, dtype=float),
        )
        hessian, linear = np.tensordot(weights, self.hessian, 1), weights @ self.linear
        readout = (
            np.eye(self.dim) if self.coordinates is None else self.coordinates.matrix.T
        )
        start = Gaussian(*motion.dynamics.initial_law(*self._initial(motion.init)))
        moves = motion.dynamics.linear_round(eta, hessian, linear)
        made = LinearChain(start, *moves, motion.dynamics.readout(readout))
        if not np.any(motion.downlink):
            return made
        kick = motion.dynamics.kick(eta)
        downlink = np.asarray(motion.downlink, dtype=float)
        other = (kick**2 * downlink)[..., None, None] * np.tensordot(
            weights**2, self.hessian @ self.hessian, 1
        )
        return made._replace(
            other=made.enters @ other @ np.swapaxes(made.enters, -1, -2)
        )

    def law(
        self,
        step_size: ArrayLike,
        weight: ArrayLike,
        noise_variance: ArrayLike,
        init: str = "prior",
        **others: Any,
    ) -> Gaussian:
        """Return the exact law of θ[1..S] while no gradient is clipped: mean[..., S, m], covariance[..., S, m, m].

        Args:
            noise_variance: σ²[..., S] of the whole update noise; all else is that of `Motion`.
        """
        return self.chain(Motion(step_size, weight, init, **others)).law(noise_variance)

    def response(self, motion: Motion, burn_in: int) -> Response:
        """Return how the exact law of the rounds after `burn_in` depends on noise, for one chain (no leading axes)."""
        return self.chain(motion).response(burn_in, self.exact)

    def quadratic(self, init: str = "prior") -> Quadratic:
        """Return the cost around its mode, which for this model is all of it."""
        values, vectors = np.linalg.eigh(self.hessian.sum(0))
        spread = np.einsum(
            "ij,ik,kj->j", vectors, self._initial(init).covariance, vectors
        )
        pull = (self.hessian @ self.mean - self.linear) @ vectors
        return Quadratic(values, -self.mean @ vectors, spread, pull, self.exact.mean)


def _assemble(
    features: Array,
    target: Array,
    sizes: NDArray[np.intp],
    prior_std: float,
    space: Coordinates | None = None,
) -> GaussianPosterior:
    devices, _, dim = features.shape
    prior = np.eye(dim) / prior_std**2 if space is None else space.precision
    with np.errstate(over="ignore", invalid="ignore"):  # refused below, in words
        hessian = features.swapaxes(1, 2) @ features + prior / devices
        linear = np.einsum("kn,knm->km", target, features)
    total = hessian.sum(0)
    if not np.all(np.isfinite(total)):
        raise InputError(
            "data", "values whose squares overflow", "scaled to moderate size"
        )
    values, vectors = np.linalg.eigh(total)
    if not values[0] > 0:
        raise InputError(
            "data",
            f"features with a Hessian eigenvalue of {values[0]:.3g}",
            "scaled to moderate size",
        )
    held: dict[str, Any] = {"features": features, "target": target, "sizes": sizes}
    held |= {
        "prior_std": prior_std,
        "coordinates": space,
        "hessian": hessian,
        "linear": linear,
    }
    mean, covariance = (
        np.linalg.solve(total, linear.sum(0)),
        (vectors / values) @ vectors.T,
    )
    return GaussianPosterior(
        **held,
        mean=mean,
        covariance=covariance,
        mu=float(values[0]),
        L=float(values[-1]),
    )


def gaussian_regression(
    key: jax.Array,
    devices: int = 30,
    *,
    examples: int = 1200,
    dim: int = 5,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    intercept: bool = False,
    partition: str | NDArray[np.intp] = "iid",
    prior_std: float = 1.0,
) -> GaussianPosterior:
    """Return the posterior of a linear regression whose examples are spread over devices.

    Without X and y the data are synthetic by the paper's recipe: u ~ N(0, I), v = tᵀu + N(0, 1), with the
    paper's t for dim = 5 and a draw from N(0, I) otherwise.

    Args:
        key: seeds data and partition (as two separate streams).
        devices: K.
        examples, dim: N and the number of features, of synthetic data.
        X, y: own data, [N, dim] and [N].
        intercept: add a column of ones to X.
        partition: iid, blocks, by-label or dirichlet:A, or the device of every row; see `wflmc.posterior.partition`.
        prior_std: s of the prior N(0, s² I).
    """
    check_regression(devices, prior_std, X, y, examples=examples, dim=dim)
    features, target = (
        _synthetic(key, examples, dim) if X is None or y is None else checked(X, y)
    )
    u, v, sizes = spread_over_devices(
        key, features, target, devices, intercept, partition
    )
    return replace(_assemble(u, v, sizes, prior_std), intercept=intercept)


def _synthetic(key: jax.Array, examples: int, dim: int) -> tuple[Array, Array]:
    generator = host_generator(key, "data")
    truth = np.array(PAPER_PARAMETERS) if dim == 5 else generator.standard_normal(dim)
    features = generator.standard_normal((examples, dim))
    return features, features @ truth + generator.standard_normal(examples)
