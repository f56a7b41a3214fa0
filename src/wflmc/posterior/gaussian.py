"""Bayesian linear regression with unit noise: the paper's model, all of it exact."""

from dataclasses import dataclass, field, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import OVERDAMPED, Dynamics, Motion, Quadratic, Response
from wflmc.posterior.base import STATIC, OptionalArray
from wflmc.posterior.coordinates import Coordinates
from wflmc.posterior.inputs import check_data, check_prior_mean, starts_at_point
from wflmc.posterior.law import Gaussian, LinearChain, w2_squared
from wflmc.posterior.partition import spread_over_devices
from wflmc.posterior.regression import Regression, check_regression
from wflmc.sums import gaussian as sums
from wflmc.sums.blocks import block_size, pad_to_blocks, split_blocks
from wflmc.sums.devices import ClippedSum
from wflmc.sums.prior import DevicePrior
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator

Array = NDArray[np.float64]

PAPER_PARAMETERS = (0.071, -0.518, 0.9342, 0.7198, 0.4676)
"""The parameters that the paper's synthetic data follow."""
OPERATIONS_PER_PARAMETER = 50
"""Operations of a device for each parameter beside products with its data, roughly:
norm, clipping and sum."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GaussianPosterior(Regression):
    """p(θ|D) for v = θᵀu + N(0, 1) and prior N(θ₀, prior_std² I).

    It is held as each device's sufficient statistics: the gradient of device k is
    H_k θ − b_k with H_k = Σ u uᵀ + I/(K prior_std²) and
    b_k = Σ v u + θ₀/(K prior_std²), so that a round costs K small matrix products
    whatever the number of examples. Clipping the
    examples one by one needs them all: the gradient of one is (θᵀu − v) u, and clipping
    it to c limits its residual to c/‖u‖.
    """

    target: Array
    """v[K, n]."""
    hessian: Array
    """H[K, m, m], each device's share of the prior included."""
    linear: Array
    """b[K, m], each device's share of the prior included."""
    mean: Array
    """Of the posterior, in the coordinates that chains move in, [m]."""
    covariance: Array
    """Of the posterior, in these coordinates, [m, m]."""
    block: int = field(default=0, metadata=STATIC)
    """Devices whose gradients are computed at a time; 0: all, before
    `on_accelerator`."""

    @property
    def dim(self) -> int:
        """Return m, the number of parameters: one for every feature."""
        return int(self.linear.shape[-1])

    @property
    def _data(self) -> tuple[Array, Array]:
        return self.features, self.target

    def _with_data(
        self,
        features: Array,
        outcomes: np.ndarray,
        sizes: NDArray[np.intp],
        prior_std: float,
        prior_mean: Array | None,
        space: Coordinates | None,
    ) -> "GaussianPosterior":
        posterior = _assemble(
            features,
            outcomes,
            sizes,
            prior_std=prior_std,
            prior_mean=prior_mean,
            space=space,
        )
        return replace(posterior, intercept=self.intercept)

    @property
    def mode(self) -> Array:
        """Return the parameters of the largest posterior density, which are its mean.

        Returns:
            θ[m].
        """
        return self.exact.mean

    @property
    def exact(self) -> Gaussian:
        """Return the posterior of the parameters, N((ΣH_k)⁻¹ Σb_k, (ΣH_k)⁻¹).

        Where chains move in other coordinates φ, mean and covariance are mapped by
        θ = Wᵀφ. It is computed when the posterior is made, in float64, and but for
        rounding does not depend on how examples are spread over devices.

        Returns:
            mean[m] and covariance[m, m].
        """
        if self.coordinates is None:
            return self.exact_in_coordinates
        W = self.coordinates.matrix
        return Gaussian(self.mean @ W, W.T @ self.covariance @ W)

    @property
    def exact_in_coordinates(self) -> Gaussian:
        """Return the posterior in the coordinates that chains move in.

        The same as `exact` where chains move in the parameters themselves. Distances
        of the bound are measured in these coordinates.

        Returns:
            mean[m] and covariance[m, m].
        """
        return Gaussian(self.mean, self.covariance)

    def _initial(self, init: str) -> Gaussian:
        """Return the law of φ[0]: the prior, or a point mass at its mean or zero."""
        mean = self.start_mean(init)
        prior_root = self.prior_std * np.eye(self.dim)
        if self.coordinates is not None:
            prior_root = self.coordinates.prior_root
        if starts_at_point(init):
            return Gaussian(mean, 0.0 * prior_root)
        return Gaussian(mean, prior_root @ prior_root.T)

    def initial_w2_sq(self, init: str = "prior") -> float:
        """Compute W2² between the start and the posterior, exactly.

        Distances are those of the coordinates that chains move in. It is the distance
        at the start in the paper's Proposition 1.

        Args:
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.

        Raises:
            InputError: for another start.
        """
        return float(w2_squared(self._initial(init), self.exact_in_coordinates))

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: OptionalArray = None,
        example_clip: OptionalArray = None,
    ) -> ClippedSum:
        """Compute Σ_k w_k clip(H_k θ − b_k, ℓ_k) before it is rounded to float32.

        Where examples are clipped as well, the gradient is summed over the examples
        in place of the product with H_k.

        Args:
            theta: θ[m], or what each device received of it, [K, m].
            weight: w[K]; 0 for a device that does not transmit.
            clip: ℓ[K]; may be infinite.
            key: not used: there are no mini-batches.
            example_clip: c[K], to which every example's gradient is clipped first;
                None: examples are not clipped one by one.

        Returns:
            The sum [m] and the norms ‖g_k‖, [K].
        """
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
        prior = self._device_prior
        return sums.record_clipped_sum(
            records, prior, theta, weight, clip, example_clip
        )

    @property
    def _device_prior(self) -> DevicePrior:
        """Each device's share of the prior, with a matrix of curvature [m, m]."""
        if self.coordinates is not None:
            curvature = self.coordinates.precision / self.devices
        else:
            curvature = np.eye(self.dim) / (self.devices * self.prior_std**2)
        return DevicePrior(curvature, self.prior_mean)  # type: ignore[arg-type]

    @property
    def prior_linear(self) -> Array:
        """Return each device's share of the prior in b_k, Λφ₀/K, [m].

        It is zero for a prior around zero.
        """
        if self.prior_mean is None:
            return np.zeros(self.dim)
        return self.prior_precision @ self.prior_mean / self.devices

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Estimate the memory that one device at a time needs for its part of a round.

        Two float32 copies of a gradient per chain; with examples clipped one by one,
        as many of every residual.

        Args:
            chains: chains that are run at the same time.
            by_example: whether examples are clipped one by one.

        Returns:
            Bytes, without the data.
        """
        residuals = self.features.shape[1] if by_example else 0
        return 8.0 * chains * (self.dim + residuals)

    def work(self, by_example: bool = False) -> float:
        """Estimate the number of operations of one chain in one round.

        K products with an [m, m] matrix, or with all features where examples are
        clipped one by one, and what clipping a device takes.

        Args:
            by_example: whether examples are clipped one by one.
        """
        products = self.features.shape[1] if by_example else self.dim
        operations = self.devices * self.dim * (OPERATIONS_PER_PARAMETER + products)
        return float(operations)

    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same posterior in float32, padded to whole blocks of devices.

        Examples come along only where they are to be clipped one by one; otherwise
        features and targets have no rows, and rounds use the statistics H_k and b_k.

        Args:
            chains: chains that are run at the same time.
            limit: bytes that a block may use.
            by_example: whether examples are to be clipped one by one.
        """
        device_bytes = self.working_bytes(chains, by_example)
        block = block_size(
            self.devices,
            bytes_per_device=device_bytes,
            theta_bytes=4.0 * chains * self.dim,
            limit=limit,
        )
        features = self.features
        target = self.target
        if not by_example:
            features = features[:, :0]
            target = target[:, :0]

        def padded(values: Array) -> np.ndarray:
            blocks = pad_to_blocks(values.astype(np.float32), block)
            return blocks  # type: ignore[return-value]  # JAX's here, NumPy's on the host

        return replace(
            self,
            hessian=padded(self.hessian),
            linear=padded(self.linear),
            features=padded(features),
            target=padded(target),
            block=block,
            # Programs are compiled for static fields: other data need no other one.
            subject="",
        )

    def example_norms(self, theta: ArrayLike) -> Array:
        """Compute |θᵀu − v| ‖u‖, the norm of every example's gradient.

        Args:
            theta: parameters θ[..., m].

        Returns:
            [..., N], device after device, in the coordinates that chains move in.
        """
        features = self.real_rows(self.features)
        target = self.real_rows(self.target)
        phi = self.coordinates_of(np.asarray(theta))
        residuals = np.abs(phi @ features.T - target)
        return residuals * np.linalg.norm(features, axis=1)

    def _draw(self, generator: np.random.Generator, theta: Array, rows: Array) -> Array:
        mean = theta @ rows.T
        return mean + generator.standard_normal(mean.shape)

    def _log_likelihood(self, theta: Array, rows: Array, outcomes: Array) -> Array:
        residuals = outcomes - theta @ rows.T
        return -0.5 * (residuals**2 + np.log(2 * np.pi))

    def gradients(self, theta: jax.Array) -> jax.Array:
        """Compute every device's gradient H_k θ − b_k, unclipped.

        For protocols that do not superpose signals; the loop over rounds never holds
        all of them.

        Args:
            theta: θ[m], in the coordinates that chains move in.

        Returns:
            [K, m].
        """
        products = jnp.asarray(self.hessian) @ theta
        return (products - self.linear)[: self.devices]

    def expansion(self, step_size: float, weight: ArrayLike) -> float:
        """Return the largest factor by which one round can stretch an error of θ.

        It is the largest |eigenvalue| of I − η Σ_k w_k H_k. η < 2/L keeps it below 1
        while all devices transmit; reweighting a few devices whose data differ may
        not.

        Args:
            step_size: η.
            weight: w[S, K] of devices in the update.

        Returns:
            The factor over all rounds.
        """
        distinct_weights = np.unique(np.asarray(weight, dtype=float), axis=0)
        hessians = np.tensordot(distinct_weights, self.hessian, 1)
        maps = np.eye(self.dim) - step_size * hessians
        return float(np.abs(np.linalg.eigvalsh(maps)).max())

    def downlink_error(self, weight: ArrayLike) -> Array:
        """Compute E‖Σ_k w_k H_k e_k‖² for unit downlink noise e_k at every device.

        Exact for this model: Σ_k w_k² ‖H_k‖²_F, as gradients are affine and the
        devices' noises are independent.

        Args:
            weight: w[..., K] of devices in the update.

        Returns:
            [...]; multiply it by the variance of the downlink noise.
        """
        squared_weights = np.asarray(weight, dtype=float) ** 2
        squared_norms = (self.hessian**2).sum((-1, -2))
        return np.asarray(squared_weights @ squared_norms)

    def chain(self, motion: Motion) -> LinearChain:
        """Return a chain that is never clipped, as a linear recursion.

        Gradients are affine, so that A = I − η Σ_k w_k H_k and b = η Σ_k w_k b_k for
        overdamped steps; kinetic ones have states (θ, v). Downlink noise adds
        (kick)² Σ_k w_k² H_k² times its variance.

        Args:
            motion: step sizes, weights, start, dynamics and downlink noise.

        Returns:
            The chain; its `law` is that of the parameters.
        """
        dynamics = motion.dynamics
        step_size = np.asarray(motion.step_size, dtype=float)
        weights = np.asarray(motion.weight, dtype=float)
        hessian = np.tensordot(weights, self.hessian, 1)
        linear = weights @ self.linear
        readout = np.eye(self.dim)
        if self.coordinates is not None:
            readout = self.coordinates.matrix.T
        mean, covariance = self._initial(motion.init)
        start = Gaussian(*dynamics.initial_law(mean, covariance))
        matrix, offset, noise_matrix = dynamics.linear_round(step_size, hessian, linear)
        chain = LinearChain(
            start=start,
            matrix=matrix,
            offset=offset,
            noise_matrix=noise_matrix,
            readout=dynamics.readout(readout),
        )
        if not np.any(motion.downlink):
            return chain
        downlink_variance = np.asarray(motion.downlink, dtype=float)
        scale = dynamics.kick(step_size) ** 2 * downlink_variance
        squared_hessians = np.tensordot(weights**2, self.hessian @ self.hessian, 1)
        covariance_of_kick = scale[..., None, None] * squared_hessians
        transposed = np.swapaxes(noise_matrix, -1, -2)
        return chain._replace(
            extra_covariance=noise_matrix @ covariance_of_kick @ transposed
        )

    def law(
        self,
        step_size: ArrayLike,
        weight: ArrayLike,
        noise_variance: ArrayLike,
        init: str = "prior",
        dynamics: Dynamics = OVERDAMPED,
        downlink: ArrayLike = 0.0,
    ) -> Gaussian:
        """Compute the exact law of θ[1..S] while no gradient is clipped.

        Leading axes of the arguments are different plans, of which all laws are
        computed at once.

        Args:
            step_size: η[..., S], or h of kinetic dynamics.
            weight: w[..., S, K] of devices in the update.
            noise_variance: σ²[..., S] of the whole noise of an update.
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.
            dynamics: overdamped or kinetic.
            downlink: variance of the noise in what devices receive of θ.

        Returns:
            mean[..., S, m] and covariance[..., S, m, m] of the parameters.
        """
        motion = Motion(
            step_size=step_size,
            weight=weight,
            init=init,
            dynamics=dynamics,
            downlink=downlink,
        )
        return self.chain(motion).law(noise_variance)

    def response(self, motion: Motion, burn_in: int) -> Response:
        """Compute how the exact law after burn-in depends on the noise of every round.

        Args:
            motion: step sizes η[S], weights [S, K] and start, of one chain without
                leading axes.
            burn_in: rounds that are discarded.

        Returns:
            The response, in parameters.

        Raises:
            InputError: if it would take too much memory.
        """
        return self.chain(motion).response(burn_in, self.exact)

    def quadratic(self, init: str = "prior") -> Quadratic:
        """Return the cost around its mode, which for this model is all of it.

        The directions are the eigenvectors of H = Σ_k H_k; no approximation is made.

        Args:
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.

        Returns:
            The quadratic along m directions, in the coordinates that chains move in.

        Raises:
            InputError: for another start.
        """
        values, vectors = np.linalg.eigh(self.hessian.sum(0))
        start = self._initial(init)
        start_variance = np.einsum("ij,ik,kj->j", vectors, start.covariance, vectors)
        way = self.mean - start.mean
        gradients_at_mode = self.hessian @ self.mean - self.linear
        return Quadratic(
            precision=values,
            start_mean=-way @ vectors,
            start_variance=start_variance,
            gradients_at_mode=gradients_at_mode @ vectors,
            mode=self.exact.mean,
        )


def _assemble(
    features: Array,
    target: Array,
    sizes: NDArray[np.intp],
    *,
    prior_std: float,
    prior_mean: Array | None,
    space: Coordinates | None = None,
) -> GaussianPosterior:
    """Return the posterior of data on devices.

    Args:
        features: u[K, n, d].
        target: v[K, n].
        sizes: N_k, [K].
        prior_std: of the prior on every parameter.
        prior_mean: φ₀[m]; None: zero.
        space: the coordinates that features and mean are in; None: the parameters.

    Raises:
        InputError: where squares overflow, or the Hessian is not positive definite.
    """
    devices, _, dim = features.shape
    prior_precision = np.eye(dim) / prior_std**2
    if space is not None:
        prior_precision = space.precision
    # What overflows is refused below, in a sentence.
    with np.errstate(over="ignore", invalid="ignore"):
        moments = features.swapaxes(1, 2) @ features
        hessian = moments + prior_precision / devices
        linear = np.einsum("kn,knm->km", target, features)
        if prior_mean is not None:
            linear = linear + prior_precision @ prior_mean / devices
    total = hessian.sum(0)
    if not (np.all(np.isfinite(total)) and np.all(np.isfinite(linear))):
        problem = "values whose squares overflow"
        raise InputError("data", problem, "scaled to moderate size")
    values, vectors = np.linalg.eigh(total)
    if not values[0] > 0:
        problem = f"features with a Hessian eigenvalue of {values[0]:.3g}"
        raise InputError("data", problem, "scaled to moderate size")
    return GaussianPosterior(
        features=features,
        target=target,
        sizes=sizes,
        prior_std=prior_std,
        prior_mean=prior_mean,
        coordinates=space,
        hessian=hessian,
        linear=linear,
        mean=np.linalg.solve(total, linear.sum(0)),
        covariance=(vectors / values) @ vectors.T,
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
    prior_mean: ArrayLike | None = None,
) -> GaussianPosterior:
    """Return the posterior of a linear regression whose examples are on devices.

    The likelihood is v ~ N(θᵀu, 1). Without X and y the data are synthetic by the
    paper's recipe: u ~ N(0, I) and v = tᵀu + N(0, 1), with the paper's t for dim = 5
    and a draw from N(0, I) otherwise.

    Args:
        key: seeds data and partition, as two separate streams.
        devices: K.
        examples: N, of synthetic data.
        dim: the number of features, of synthetic data.
        X: features of your own data, [N, dim]; comes with `y`.
        y: targets of your own data, [N].
        intercept: whether to add a column of ones to X.
        partition: "iid", "blocks", "by-label" or "dirichlet:A", or the device of every
            row, [N]; see `wflmc.posterior.partition`.
        prior_std: s of the prior N(θ₀, s² I).
        prior_mean: θ₀[m], with the intercept's last where there is one; None: zero. ε
            covers nothing of it, so that it must not come from the private data.

    Returns:
        The posterior, with exact μ and L.

    Raises:
        InputError: for bad sizes, data or a mean that are not finite or overflow, or X
            without y.

    Examples:
        >>> posterior = gaussian_regression(jax.random.key(0), devices=30)
        >>> posterior.exact.mean.shape
        (5,)
    """
    check_regression(devices, prior_std, X, y, examples=examples, dim=dim)
    if X is None or y is None:
        features, target = _synthetic(key, examples, dim)
    else:
        features, target = check_data(X, y)
    rows, targets, sizes = spread_over_devices(
        key,
        features,
        target,
        devices=devices,
        intercept=intercept,
        rule=partition,
    )
    posterior = _assemble(
        rows,
        targets,
        sizes,
        prior_std=prior_std,
        prior_mean=check_prior_mean(prior_mean, rows.shape[-1]),
    )
    return replace(posterior, intercept=intercept)


def _synthetic(key: jax.Array, examples: int, dim: int) -> tuple[Array, Array]:
    """Draw features [examples, dim] and targets [examples] by the paper's recipe."""
    generator = host_generator(key, "data")
    parameters = np.array(PAPER_PARAMETERS)
    if dim != len(PAPER_PARAMETERS):
        parameters = generator.standard_normal(dim)
    features = generator.standard_normal((examples, dim))
    noise = generator.standard_normal(examples)
    return features, features @ parameters + noise
