"""Bayesian linear regression with unit noise: the model of the paper's analysis, with everything exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError
from wflmc.keys import digest, host_generator, named
from wflmc.posterior.blocks import block_size, pad_to_blocks, split_blocks
from wflmc.posterior.coordinates import Coordinates, Moving
from wflmc.posterior.gaussian_sums import by_examples, clipped_sum
from wflmc.posterior.inputs import check_counts, check_init, check_prior, checked, draw_start, with_intercept
from wflmc.posterior.kinetic import kinetic_round, with_velocity
from wflmc.posterior.law import Gaussian, LinearChain, w2_squared
from wflmc.posterior.partition import assign, by_device, padded
from wflmc.posterior.response import Motion, Quadratic, Response
from wflmc.posterior.summation import UNIT, Rounding, Total, additions, margin

Array = NDArray[np.float64]

PAPER_PARAMETERS = (0.071, -0.518, 0.9342, 0.7198, 0.4676)


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPosterior(Moving):
    """p(θ|D) for v = θᵀu + N(0, 1) and prior N(0, prior_std² I), held as each device's sufficient statistics.

    The gradient of device k is H_k θ − b_k with H_k = Σ u uᵀ + I/(K prior_std²) and b_k = Σ v u, so a round
    costs K small matrix products whatever the number of examples. Clipping the examples one by one needs them all:
    the gradient of one is (θᵀu − v) u, and clipping it to c limits its residual to c/‖u‖.
    """

    hessian: Array
    """H[K, m, m], each device's share of the prior included."""
    linear: Array
    """b[K, m]."""
    sizes: NDArray[np.intp]
    """N_k, [K]."""
    prior_std: float
    mean: Array
    covariance: Array
    mu: float
    """Smallest eigenvalue of the Hessian (strong convexity)."""
    L: float
    """Largest eigenvalue of the Hessian (smoothness)."""
    features: Array
    """u[K, n, m]; devices of unlike size are filled up with rows of zeros, which add nothing."""
    target: Array
    """v[K, n]."""
    block: int = 0
    """Devices whose gradients are worked out at a time; 0: all of them."""
    intercept: bool = False
    """Whether the last feature is a constant that the model has added itself."""
    coordinates: Coordinates | None = None
    """Where chains move, if not among the parameters themselves; all that is above is then said of them."""
    subject: str = ""
    """The name of the data, where features are no longer what they were."""
    columns: tuple[str, ...] = ()
    """The names of the features, where there are some."""

    @property
    def dim(self) -> int:
        """m, the number of parameters."""
        return int(self.linear.shape[-1])

    @property
    def devices(self) -> int:
        """K."""
        return int(self.sizes.shape[0])

    @property
    def exact(self) -> Gaussian:
        """The posterior of the parameters."""
        return self._of_parameters(self.exact_in_coordinates)

    @property
    def exact_in_coordinates(self) -> Gaussian:
        """The posterior in the coordinates that chains move in."""
        return Gaussian(self.mean, self.covariance)

    def initial(self, init: str = "prior") -> Gaussian:
        """The law of θ[0]: the prior, or a point mass at zero."""
        return self._of_parameters(self._initial(init))

    def _initial(self, init: str) -> Gaussian:
        """The same in the chain's coordinates."""
        check_init(init)
        spread = self.prior_std * np.eye(self.dim) if self.coordinates is None else self.coordinates.spread
        return Gaussian(np.zeros(self.dim), spread @ spread.T if init == "prior" else 0.0 * spread)

    def _of_parameters(self, law: Gaussian) -> Gaussian:
        """The law of the parameters from that of the chain's coordinates."""
        if self.coordinates is None:
            return law
        W = self.coordinates.matrix
        return Gaussian(law.mean @ W, W.T @ law.covariance @ W)

    def initial_w2_sq(self, init: str = "prior") -> float:
        """W2² between the start and the posterior, in the coordinates that chains move in."""
        return float(w2_squared(self._initial(init), self.exact_in_coordinates))

    def _moved(self, space: Coordinates) -> GaussianPosterior:
        """The same posterior in other coordinates."""
        moved = _from_rows(self.features @ space.matrix.T, self.target, self.sizes, self.prior_std, space)
        return replace(moved, intercept=self.intercept, subject=self.digest)

    @property
    def digest(self) -> str:
        """A short name for the data and who holds them."""
        return self.subject or digest(self.features, self.target, self.sizes)

    def draw_initial(self, key: jax.Array, init: str = "prior") -> jax.Array:
        """Where one chain starts, [m]."""
        return draw_start(key, init, self.dim, self.prior_std, self.coordinates)

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: jax.Array | None = None,
        example_clip: jax.Array | None = None,
    ) -> tuple[Total, jax.Array]:
        """`clipped_sum` before it is rounded."""
        del key
        block = self.block or self.devices
        if example_clip is None:
            data = split_blocks(self.hessian, block), split_blocks(self.linear, block)
            return clipped_sum(data, theta, weight, clip)
        rows = split_blocks(self.features, block), split_blocks(self.target, block)
        return by_examples(rows, self._share, theta, weight, clip, example_clip)

    def margin(self, clip: Array, example_clip: Array) -> float:
        """How much less clips are to be, see `summation.margin`."""
        norm = (additions(self.dim) / 2 + 8) * UNIT
        return margin(Rounding(norm, norm), self.dim, self.sizes, clip, example_clip)

    @property
    def _share(self) -> Any:
        """Each device's share of the prior's curvature."""
        if self.coordinates is None:
            return np.eye(self.dim) / (self.devices * self.prior_std**2)
        return self.coordinates.precision / self.devices

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Memory that one device at a time needs for its part of a round."""
        return 8.0 * chains * (self.dim + (self.features.shape[1] if by_example else 0))

    def work(self, by_example: bool = False) -> float:
        """Operations of one chain in one round, roughly."""
        return float(self.devices * self.dim * (50 + (self.features.shape[1] if by_example else self.dim)))

    def on_accelerator(self, chains: int, limit: float, by_example: bool = False) -> GaussianPosterior:
        """The same posterior, in float32 on the accelerator, in blocks of devices that keep to a limit of bytes.

        Args:
            by_example: whether examples are to be clipped one by one; only then they are taken along.
        """
        block = block_size(self.devices, self.working_bytes(chains, by_example), 4.0 * chains * self.dim, limit)
        rows = slice(None if by_example else 0)
        return replace(
            self,
            hessian=pad_to_blocks(self.hessian.astype(np.float32), block),
            linear=pad_to_blocks(self.linear.astype(np.float32), block),
            features=pad_to_blocks(self.features[:, rows].astype(np.float32), block),
            target=pad_to_blocks(self.target[:, rows].astype(np.float32), block),
            block=block,
        )

    def example_norms(self, theta: ArrayLike) -> Array:
        """‖gradient‖ of every example at theta[..., m], [..., N]."""
        u, v = self.real_rows(self.features), self.real_rows(self.target)
        return np.abs(self.coordinates_of(np.asarray(theta)) @ u.T - v) * np.linalg.norm(u, axis=1)

    @property
    def outcomes(self) -> Array:
        """The targets."""
        return self.target

    def _draw(self, generator: np.random.Generator, theta: Array, rows: Array) -> Array:
        """Targets for rows[n, m], [draw, n]."""
        mean = theta @ rows.T
        return mean + generator.standard_normal(mean.shape)

    def _log_likelihood(self, theta: Array, rows: Array, outcomes: Array) -> Array:
        """Of targets[n], [draw, n]."""
        return -0.5 * ((outcomes - theta @ rows.T) ** 2 + np.log(2 * np.pi))

    def gradients(self, theta: jax.Array) -> jax.Array:
        """Every device's own gradient, unclipped, [K, m]: for protocols that do not superpose."""
        return (jnp.asarray(self.hessian) @ theta - self.linear)[: self.devices]

    def device(self, index: int) -> GaussianPosterior:
        """One device's part alone: its `clipped_sum` gives that device's clipped gradient."""
        if not 0 <= index < self.devices:
            raise InputError("device", index, f"between 0 and {self.devices - 1}")
        at = slice(index, index + 1)
        rows = slice(self.sizes[index])
        # Its share of the prior is all of its own.
        std = self.prior_std * self.devices**0.5
        space = None if self.coordinates is None else self.coordinates.shared(self.devices)
        alone = _from_rows(self.features[at, rows], self.target[at, rows], self.sizes[at], std, space)
        return replace(alone, intercept=self.intercept)

    def expansion(self, step_size: float, weight: ArrayLike) -> float:
        """The largest factor by which one round can stretch an error of θ, over the rounds of weight[S, K].

        η < 2/L keeps it below 1 while everyone sends. Reweighting a few unlike devices may not.
        """
        partial = np.unique(np.asarray(weight, dtype=float), axis=0)
        steps = np.eye(self.dim) - step_size * np.tensordot(partial, self.hessian, 1)
        return float(np.abs(np.linalg.eigvalsh(steps)).max())

    def downlink_error(self, weight: ArrayLike) -> Array:
        """E‖Σ_k w_k H_k e_k‖² for unit noise e_k in what every device hears of θ, weight[..., K] -> [...]."""
        return np.asarray(np.asarray(weight, dtype=float) ** 2 @ (self.hessian**2).sum((-1, -2)))

    def chain(self, motion: Motion) -> LinearChain:
        """A chain that is never clipped, as a linear one."""
        eta, weights = np.asarray(motion.step_size, dtype=float), np.asarray(motion.weight, dtype=float)
        hessian, linear = np.tensordot(weights, self.hessian, 1), weights @ self.linear
        one, start, kick = np.eye(self.dim), self._initial(motion.init), eta
        readout = one if self.coordinates is None else self.coordinates.matrix.T
        if motion.friction is None:
            made = LinearChain(start, one - eta[..., None, None] * hessian, eta[..., None] * linear, one, readout)
        else:
            friction = np.asarray(motion.friction, dtype=float)
            both = np.concatenate([readout, np.zeros_like(readout)], axis=1)
            made = LinearChain(with_velocity(start), *kinetic_round(eta, friction, hessian, linear), both)
            kick = eta * (1 + np.exp(-friction * eta)) / 2
        if not np.any(motion.downlink):
            return made
        other = (kick**2 * motion.downlink)[..., None, None] * np.tensordot(weights**2, self.hessian @ self.hessian, 1)
        return made._replace(other=made.enters @ other @ np.swapaxes(made.enters, -1, -2))

    def law(
        self, step_size: ArrayLike, weight: ArrayLike, noise_variance: ArrayLike, init: str = "prior", **others: Any
    ) -> Gaussian:
        """Exact law of θ[1..S] while no gradient is clipped: mean[..., S, m], covariance[..., S, m, m].

        Args:
            noise_variance: σ²[..., S] of the whole update noise; all else is that of `Motion`.
        """
        return self.chain(Motion(step_size, weight, init, **others)).law(noise_variance)

    def response(self, motion: Motion, burn_in: int) -> Response:
        """How the exact law of the rounds after `burn_in` answers to noise, for one chain (no leading axes)."""
        return self.chain(motion).response(burn_in, self.exact)

    def quadratic(self, init: str = "prior") -> Quadratic:
        """The cost around its mode, which for this model is all of it."""
        values, vectors = np.linalg.eigh(self.hessian.sum(0))
        spread = np.einsum("ij,ik,kj->j", vectors, self._initial(init).covariance, vectors)
        pull = (self.hessian @ self.mean - self.linear) @ vectors
        return Quadratic(values, -self.mean @ vectors, spread, pull, self.exact.mean)


jax.tree_util.register_dataclass(
    GaussianPosterior,
    data_fields=[
        *("hessian", "linear", "sizes", "prior_std", "mean", "covariance", "mu", "L", "features", "target"),
        "coordinates",
    ],
    meta_fields=["block", "intercept", "subject", "columns"],
)


def _from_rows(
    features: Array, target: Array, sizes: NDArray[np.intp], prior_std: float, space: Coordinates | None = None
) -> GaussianPosterior:
    devices, _, dim = features.shape
    prior = np.eye(dim) / prior_std**2 if space is None else space.precision
    with np.errstate(over="ignore", invalid="ignore"):  # refused below, in words
        hessian = features.swapaxes(1, 2) @ features + prior / devices
        linear = np.einsum("kn,knm->km", target, features)
    total = hessian.sum(0)
    if not np.all(np.isfinite(total)):
        raise InputError("data", "values whose squares overflow", "scaled to moderate size")
    values, vectors = np.linalg.eigh(total)
    if not values[0] > 0:
        raise InputError("data", f"features with a Hessian eigenvalue of {values[0]:.3g}", "scaled to moderate size")
    covariance = (vectors / values) @ vectors.T
    mean = np.linalg.solve(total, linear.sum(0))
    return GaussianPosterior(
        hessian=hessian,
        linear=linear,
        sizes=sizes,
        prior_std=prior_std,
        mean=mean,
        covariance=covariance,
        mu=float(values[0]),
        L=float(values[-1]),
        features=features,
        target=target,
        coordinates=space,
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
    partition: str = "iid",
    prior_std: float = 1.0,
) -> GaussianPosterior:
    """Posterior of a linear regression whose examples are spread over devices.

    Without X and y the data are synthetic by the paper's recipe: u ~ N(0, I), v = tᵀu + N(0, 1), with the
    paper's t for dim = 5 and a draw from N(0, I) otherwise.

    Args:
        key: seeds data and partition (as two separate streams).
        devices: K.
        examples, dim: N and the number of features, of synthetic data.
        X, y: own data, [N, dim] and [N].
        intercept: add a column of ones to X.
        partition: iid, blocks, by-label or dirichlet:A, see `wflmc.posterior.partition`.
        prior_std: s of the prior N(0, s² I).
    """
    check_prior(prior_std)
    check_counts(devices=devices)
    if (X is None) != (y is None):
        raise InputError("X" if X is None else "y", None, "given together with the other of X and y")
    features, target = _synthetic(key, examples, dim) if X is None or y is None else checked(X, y)
    if intercept:
        features = with_intercept(features)
    owner = assign(partition, target, devices, host_generator(named(key, "data"), "partition"))
    parts, sizes = by_device(owner, devices, features, target)
    u, v = padded(parts, sizes)
    return replace(_from_rows(u, v, sizes, prior_std), intercept=intercept)


def _synthetic(key: jax.Array, examples: int, dim: int) -> tuple[Array, Array]:
    check_counts(examples=examples, dim=dim)
    generator = host_generator(key, "data")
    truth = np.array(PAPER_PARAMETERS) if dim == 5 else generator.standard_normal(dim)
    features = generator.standard_normal((examples, dim))
    return features, features @ truth + generator.standard_normal(examples)
