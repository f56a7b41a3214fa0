"""Bayesian multinomial logistic regression: the model of the paper's MNIST study."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import helmert, solve_triangular
from scipy.special import log_softmax, logsumexp

from wflmc.dynamics import Motion, Quadratic, Response, diagonal_response
from wflmc.posterior.base import STATIC, Maybe
from wflmc.posterior.coordinates import Coordinates
from wflmc.posterior.inputs import (
    Names,
    as_classes,
    check_counts,
    check_init,
    checked,
    class_names,
)
from wflmc.posterior.law import Gaussian, w2_squared
from wflmc.posterior.partition import spread_over_devices
from wflmc.posterior.regression import Regression, check_regression
from wflmc.sums import bound, softmax_classes, softmax_rows
from wflmc.sums import softmax as sums
from wflmc.sums.blocks import block_size, pad_to_blocks, split_blocks
from wflmc.sums.constants import (
    CPU_CACHE_BYTES,
    DEVICES_PER_FLOAT32_SUM,
    LONGEST_VECTOR,
    MAX_ROWS_OF_SHORT_DEVICE,
    RECORDS_PER_FLOAT32_SUM,
    ROW_SUMS_PER_LATTICE,
    ROWS_PER_FLOAT32_SUM,
)
from wflmc.sums.devices import ClippedSum
from wflmc.sums.norms import row_norms
from wflmc.sums.parts import part_size
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator

Array = NDArray[np.float64]
Labels = NDArray[np.intp]

MOST_PRODUCTS_PER_BLOCK = 8
"""Float32 sums of rows of one block of short devices, on a CPU."""
ROWS_PER_PRODUCT_ON_ACCELERATOR = 32
"""Rows of short devices per float32 sum of a block, on an accelerator."""
ROWS_AT_A_TIME = 512
"""Rows whose logits a CPU computes at a time. With 12,000 rows of 30 features in 10
classes, and 1 to 150 chains, 400 to 1,200 were the fastest."""
FEWEST_ROWS_AT_A_TIME = 128
"""However many chains share them."""
FEWEST_ROWS_ALONE = 128
"""Rows from which on the products of a device are computed by themselves: XLA's products
of several devices at a time are slower."""
ROWS_TOGETHER = 1024
"""Rows of devices with fewer rows that are computed at a time."""
COPIES_OF_GRADIENTS = 16
"""Bytes of a parameter while the gradients of a block of devices are clipped: four
float32 numbers."""
MANY, LANCZOS = 2**26, 1e-3
"""Numbers of features from which on their largest curvature is found by Lanczos' method, and its relative error."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SoftmaxPosterior(Regression):
    """p(θ|D) for p(v = c|u) ∝ exp(θ_cᵀu) and prior N(0, prior_std² I); θ is the C vectors θ_c one after the other.

    The gradient of device k in θ_c is Σ_n p(c|u_n) u_n − Σ_{n: v_n = c} u_n + θ_c/(K prior_std²). μ is the smallest
    curvature of the prior, L the largest eigenvalue of Σ u uᵀ/2 and the prior's curvature (Böhning's bound).
    """

    labels: NDArray[np.intp]
    """Class of each row, [K, n]."""
    norms: Any = None
    """‖u‖ of each row, [K, n], where chains need them."""
    example_block: int = field(default=0, metadata=STATIC)
    chains_last: bool = field(default=False, metadata=STATIC)
    """Whether chains are the last axis of gradients (`wflmc.sums.softmax`), as suits an
    accelerator with many of them; else rows are (`wflmc.sums.softmax_classes`)."""
    class_names: Names = field(default=(0, 1), metadata=STATIC)
    """The label of every class in the data, C of them; all else here counts classes from 0."""

    curvature = 0.5  # Böhning's bound
    start_is_estimate = curvature_is_loose = True

    @property
    def dim(self) -> int:
        """m = C d, the number of parameters."""
        return int(self.classes * self.features.shape[-1])

    @property
    def outcomes(self) -> NDArray[Any]:
        """The labels as in the data."""
        return np.asarray(self.class_names)[self.labels]

    @property
    def _data(self) -> tuple[Array, Labels]:
        return self.features, self.labels

    def _with_data(
        self,
        features: Array,
        outcomes: Any,
        sizes: Labels,
        prior_std: float,
        space: Coordinates | None,
    ) -> "SoftmaxPosterior":
        made = _assemble(features, outcomes, sizes, prior_std, self.class_names, space)
        return replace(made, intercept=self.intercept)

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: Maybe = None,
        example_clip: Maybe = None,
    ) -> ClippedSum:
        """Return `clipped_sum` before it is rounded.

        Under `vmap` all chains go through one matrix product after the other, a block of devices at a time: working
        memory does not grow with the number of devices.
        """
        by_rows = self._short_devices and theta.ndim == 1
        norms = None
        if by_rows or example_clip is not None:
            norms = (
                row_norms(jnp.asarray(self.features))
                if self.norms is None
                else self.norms
            )
        if not by_rows and not self.chains_last:
            return self._sum_by_class(theta, weight, clip, norms, example_clip)
        records = sums.LabelledRows(
            features=split_blocks(self.features, self.block),
            labels=split_blocks(self.labels, self.block),
            norms=None if norms is None else split_blocks(norms, self.block),
        )
        path = softmax_rows if by_rows else sums
        if example_clip is None:
            return path.device_clipped_sum(records, self._share, theta, weight, clip)
        return path.record_clipped_sum(
            records, self._share, theta, weight, clip, example_clip
        )

    def _sum_by_class(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        norms: Maybe,
        example_clip: Maybe,
    ) -> ClippedSum:
        """Return `unrounded_sum` in the layout by class."""
        count = int(self.features.shape[1])
        limit = count if example_clip is None else RECORDS_PER_FLOAT32_SUM
        rows = self.example_block or part_size(count, limit)
        missing = -count % rows  # of a posterior that is not on the accelerator yet

        def filled_up(values: ArrayLike) -> jax.Array:
            widths = [(0, 0), (0, missing), *[(0, 0)] * (np.ndim(values) - 2)]
            return (
                jnp.pad(jnp.asarray(values), widths) if missing else jnp.asarray(values)
            )

        records = sums.LabelledRows(
            features=filled_up(self.features),
            labels=filled_up(self.labels),
            norms=None if norms is None else filled_up(norms),
        )
        steps = softmax_classes.Steps(
            block=self.block,
            rows=rows,
            takes_devices_together=count < FEWEST_ROWS_ALONE,
        )
        if example_clip is None:
            add_devices = softmax_classes.device_clipped_sum(steps)
            return add_devices(records, self._share, theta, weight, clip)
        add_records = softmax_classes.record_clipped_sum(steps)
        return add_records(records, self._share, theta, weight, clip, example_clip)

    @property
    def _short_devices(self) -> bool:
        """Whether devices have so few rows that their norms come from products of rows."""
        return int(self.features.shape[1]) <= MAX_ROWS_OF_SHORT_DEVICE

    @property
    def _share(self) -> Any:
        """Each device's share of the prior's curvature: a number, or a matrix [d, d]."""
        if self.coordinates is None:
            return 1 / (self.devices * self.prior_std**2)
        return self.coordinates.precision / self.devices

    def rounding(self, clip: Array, example_clip: Array) -> bound.RoundingError:
        """Return e by its terms; see `Posterior.rounding`."""
        dim = int(self.features.shape[-1])
        norm_error = bound.matrix_norm_error(dim, self.classes)
        settings = bound.SumSettings(
            dim=self.dim,
            sizes=self.sizes,
            clip=clip,
            example_clip=example_clip,
            device_norm_error=norm_error,
            record_norm_error=norm_error,
        )
        if self._short_devices:
            settings = replace(
                settings,
                device_norm_error=bound.short_device_norm_error(dim, self.classes),
                row_product_error=bound.row_product_error(dim, self.classes),
            )
        return bound.rounding_error(settings)

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Return the memory that one device at a time needs for its part of a round, in bytes."""
        return 8.0 * chains * (self.features.shape[1] * self.classes + self.dim)

    def work(self, by_example: bool = False) -> float:
        """Return the number of operations of one chain in one round, roughly."""
        return float(self.devices * self.dim * (50 + self.features.shape[1]))

    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same posterior in float32, in blocks of devices; see `Posterior.on_accelerator`."""
        ready = self._laid_out(chains, limit, by_example)
        block = ready.block
        group = DEVICES_PER_FLOAT32_SUM
        if self._short_devices:
            group = softmax_rows.devices_on_lattice(block, self.features.shape[1])

        def placed(values: np.ndarray) -> Any:  # NumPy's on the host, JAX's here
            missing = -values.shape[1] % (ready.example_block or 1)
            rows = [(0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)]
            return pad_to_blocks(
                np.pad(values, rows) if missing else values, block, group
            )

        norms = None
        if by_example or self._short_devices:
            squares = np.einsum(
                "knd,knd->kn", self.features, self.features, dtype=float
            )
            lengths = np.sqrt(squares)
            usable = np.where(lengths > LONGEST_VECTOR, np.inf, lengths)
            norms = placed(usable.astype(np.float32))
        return replace(
            ready,
            features=placed(self.features.astype(np.float32, copy=False)),
            labels=placed(self.labels),
            norms=norms,
            subject="",  # other data, same program
        )

    def _laid_out(self, chains: int, limit: float, by_example: bool) -> Self:
        """Return the posterior with the layout and the block sizes for these shapes.

        Args:
            chains: that are run at the same time.
            limit: bytes.
            by_example: whether examples are clipped one by one.
        """
        on_cpu = jax.default_backend() == "cpu"
        if self._short_devices:
            short_block = self._short_device_block(chains, limit)
            return replace(
                self, block=short_block, example_block=0, chains_last=not on_cpu
            )
        if on_cpu:
            return self._in_steps(chains, limit, by_example)
        block = block_size(
            self.devices,
            bytes_per_device=self.working_bytes(chains),
            theta_bytes=4.0 * chains * self.dim,
            limit=limit,
        )
        return replace(self, block=block, example_block=0, chains_last=True)

    def _in_steps(self, chains: int, limit: float, by_example: bool) -> Self:
        """Return the posterior with so many rows at a time that a CPU's cache holds them."""
        rows = int(self.features.shape[1])
        cache = min(limit, CPU_CACHE_BYTES)
        if rows < FEWEST_ROWS_ALONE:
            block_bytes = 4.0 * chains * self.classes * ROWS_TOGETHER
            block = block_size(
                self.devices,
                bytes_per_device=4.0 * chains * self.classes * rows,
                theta_bytes=np.inf,
                limit=min(limit, block_bytes),
            )
            return replace(self, block=block, example_block=rows, chains_last=False)
        row_bytes = 4 * max(self.classes * chains, self.features.shape[-1])
        wanted = RECORDS_PER_FLOAT32_SUM if by_example else ROWS_AT_A_TIME
        largest = int(np.clip(cache // row_bytes, FEWEST_ROWS_AT_A_TIME, wanted))
        block = block_size(
            self.devices,
            bytes_per_device=float(COPIES_OF_GRADIENTS * chains * self.dim),
            theta_bytes=np.inf,
            limit=cache,
        )
        return replace(
            self, block=block, example_block=part_size(rows, largest), chains_last=False
        )

    def _short_device_block(self, chains: int, limit: float) -> int:
        """Return how many devices of few rows are computed at a time.

        Args:
            chains: that are run at the same time.
            limit: bytes.
        """
        rows = self.features.shape[1]
        together = softmax_rows.chains_together(chains, self.dim)
        # On a CPU, as many as one matrix product may add; a few times that where its
        # cache holds all these sums.
        held_by_cache = CPU_CACHE_BYTES // (4 * self.dim * together)
        products = int(np.clip(held_by_cache, 1, MOST_PRODUCTS_PER_BLOCK))
        largest = ROW_SUMS_PER_LATTICE * ROWS_PER_PRODUCT_ON_ACCELERATOR // rows
        if jax.default_backend() == "cpu":
            largest = products * ROWS_PER_FLOAT32_SUM // rows
        several_copies = 128.0 * together * rows * self.classes
        return block_size(
            self.devices,
            bytes_per_device=several_copies,
            theta_bytes=np.inf,
            limit=limit,
            largest=largest,
        )

    def example_norms(self, theta: ArrayLike) -> Array:
        """Return ‖gradient‖ of every example at theta[..., m], [..., N]: ‖p − 1[label]‖ ‖u‖."""
        u, labels = self.real_rows(self.features), self.real_rows(self.labels)
        given = self.coordinates_of(np.asarray(theta, dtype=float))
        logits = given.reshape(*given.shape[:-1], self.classes, -1) @ u.T
        residual = np.exp(logits - logsumexp(logits, axis=-2, keepdims=True))
        residual -= np.arange(self.classes)[:, None] == labels
        return np.linalg.norm(residual, axis=-2) * np.linalg.norm(u, axis=1)

    def gradients(self, theta: jax.Array) -> jax.Array:
        """Return every device's own gradient, unclipped, [K, m]."""

        def one(device: tuple[jax.Array, jax.Array]) -> jax.Array:
            features, labels = device
            columns = sums.columns_of(theta[None], self.features.shape[-1])
            block = sums.LabelledRows(features[None], labels[None])
            gradients = sums.device_gradients(block, self._share, columns)
            return gradients[0].transpose(2, 1, 0).ravel()

        return jax.lax.map(one, (jnp.asarray(self.features), jnp.asarray(self.labels)))[
            : self.devices
        ]

    def predict(self, theta: ArrayLike, features: ArrayLike) -> NDArray[np.float32]:
        """Return p(class|u) averaged over the draws of each chain: theta[chain, draw, m], u[n, d] -> [chain, n, C].

        The features are those of the data; where the model has an intercept, it adds the constant itself.
        """
        return np.asarray(
            _predict(
                jnp.asarray(theta),
                jnp.asarray(self.design_matrix(features)),
                self.classes,
            )
        )

    def classes_of(self, labels: ArrayLike) -> Labels:
        """Return the class, 0 to C − 1, of labels as in the data."""
        return as_classes(labels, self.class_names)

    def _draw(
        self, generator: np.random.Generator, theta: Array, rows: Array
    ) -> NDArray[Any]:
        logits = theta.reshape(len(theta), self.classes, -1) @ rows.T
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        return np.asarray(self.class_names)[
            np.argmax(logits + generator.gumbel(size=logits.shape), axis=1)
        ]

    def _log_likelihood(
        self, theta: Array, rows: Array, outcomes: NDArray[Any]
    ) -> Array:
        logits = theta.reshape(len(theta), self.classes, -1) @ rows.T
        return logits[
            :, self.classes_of(outcomes), np.arange(outcomes.size)
        ] - logsumexp(logits, axis=1)

    @cached_property
    def laplace(self) -> tuple[Array, Array]:
        """The posterior's mode[m], and its variances[m] along the main directions of the Hessian there."""
        mode, covariance = self._laplace
        prior = np.linalg.eigvalsh(self.prior_precision)
        return mode, np.concatenate(
            [1 / prior, np.tile(np.linalg.eigvalsh(covariance), self.classes - 1)]
        )

    @cached_property
    def _laplace(self) -> tuple[Array, Array]:
        rows = self.features.reshape(-1, self.features.shape[-1])
        return _laplace(rows, self.labels.ravel(), self.classes, self.prior_precision)

    def response(self, motion: Motion, burn_in: int) -> Response:
        """Return how the law of a chain on the Laplace approximation depends on noise, if all devices hold alike data.

        It is said of the coordinates that chains move in, along the main directions of the approximation.
        """
        mode, covariance = self._laplace
        values, vectors = np.linalg.eigh(covariance)
        prior, others = np.linalg.inv(self.prior_precision), self.classes - 1
        size = ((mode.reshape(self.classes, -1) @ vectors) ** 2).sum(0) / others
        # At the mode the classes' vectors sum to zero: nothing of it lies where all classes move alike.
        alike = np.linalg.eigvalsh(prior)
        variance = np.concatenate([alike, np.tile(values, others)])
        mean_sq = np.concatenate([np.zeros(size.size), np.tile(size, others)])
        spread = np.concatenate(
            [alike, np.tile(np.diagonal(vectors.T @ prior @ vectors), others)]
        )
        start = spread if motion.init == "prior" else np.zeros_like(spread)
        return diagonal_response(1 / variance, mean_sq, start, motion, burn_in)

    def quadratic(self, init: str = "prior") -> Quadratic:
        """Return the cost around its mode, without the directions in which all classes move alike."""
        mode, covariance = self._laplace
        values, vectors = np.linalg.eigh(covariance)
        at = mode.reshape(self.classes, -1)
        p = np.exp(log_softmax(self.features @ at.T, axis=-1))
        real = np.arange(self.labels.shape[1]) < self.sizes[:, None]
        residual = (p - np.eye(self.classes)[self.labels]) * real[..., None]
        gradients = (
            residual.swapaxes(1, 2) @ self.features
            + at @ self.prior_precision / self.devices
        )
        unlike = helmert(self.classes)  # directions that tell classes apart, [C - 1, C]
        spread = np.einsum(
            "ij,ik,kj->j", vectors, np.linalg.inv(self.prior_precision), vectors
        )
        return Quadratic(
            np.tile(1 / values, self.classes - 1),
            -(unlike @ at @ vectors).ravel(),
            np.tile(spread if init == "prior" else 0 * spread, self.classes - 1),
            (unlike @ gradients @ vectors).reshape(self.devices, -1),
            np.asarray(self.parameters(mode)),
        )

    def downlink_error(self, weight: ArrayLike) -> Array:
        """Bound E‖Σ_k w_k (∇f_k(θ + e_k) − ∇f_k(θ))‖² for unit downlink noise e_k, by each device's own smoothness."""
        hessian = (
            self.curvature * self.features.swapaxes(1, 2) @ self.features
            + self.prior_precision / self.devices
        )
        return np.asarray(
            self.dim
            * (np.asarray(weight, dtype=float) @ np.linalg.eigvalsh(hessian)[:, -1])
            ** 2
        )

    def initial_w2_sq(self, init: str = "prior") -> float:
        """Return W2² between the law of θ[0] and the Laplace estimate of the posterior."""
        check_init(init)
        mode, covariance = self._laplace
        if init == "zero":
            return float(mode @ mode + np.sum(self.laplace[1]))
        centre = np.zeros(
            len(covariance)
        )  # what moves all classes alike is as in the prior, and adds nothing
        prior = Gaussian(
            centre, np.asarray(np.linalg.inv(self.prior_precision), dtype=float)
        )
        return float(
            mode @ mode
            + (self.classes - 1) * w2_squared(prior, Gaussian(centre, covariance))
        )


@partial(jax.jit, static_argnames=("classes",))
def _predict(theta: jax.Array, features: jax.Array, classes: int) -> jax.Array:
    """Return the mean over draws of p(class|u), in blocks of rows that stay in the processor's cache."""
    count, dim = features.shape
    block = int(np.clip(2**22 // (classes * theta.shape[1]), 1, min(count, 1024)))
    rows = jnp.pad(features, ((0, -count % block), (0, 0))).reshape(-1, block, dim)

    def chain(draws: jax.Array) -> jax.Array:
        columns = draws.reshape(-1, classes, dim).transpose(2, 1, 0)
        return jax.lax.map(
            lambda u: sums.softmax(sums.product(u, columns)).mean(-1), rows
        ).reshape(-1, classes)[:count]

    return jax.lax.map(chain, theta)


def _assemble(
    features: Array,
    labels: Labels,
    sizes: Labels,
    prior_std: float,
    names: Names,
    space: Coordinates | None = None,
) -> SoftmaxPosterior:
    X = features.reshape(-1, features.shape[-1])
    mu = (
        prior_std**-2
        if space is None
        else float(np.linalg.eigvalsh(space.precision)[0])
    )
    L = _largest_curvature(X, mu if space is None else space.precision)
    if not np.isfinite(L):
        raise InputError(
            "data", "values whose squares overflow", "scaled to moderate size"
        )
    constants = {
        "prior_std": prior_std,
        "mu": mu,
        "L": L,
        "class_names": names,
        "coordinates": space,
    }
    return SoftmaxPosterior(features=features, labels=labels, sizes=sizes, **constants)  # type: ignore[arg-type]


def _largest_curvature(X: Array, precision: Any) -> float:
    """Return the largest eigenvalue of Σ u uᵀ/2 + precision, a number or a matrix; infinite if squares overflow."""
    number, width = np.ndim(precision) == 0, X.shape[1]
    if (
        X.size > MANY
    ):  # by Lanczos' method, whose matrix-vector products need no second moments
        from scipy.sparse.linalg import LinearOperator, eigsh

        def curved(v: Array) -> Array:
            pulled = precision * v if number else precision @ v
            return np.asarray(
                0.5 * (X.T @ (X @ v.astype(X.dtype))).astype(float) + pulled
            )

        operator = LinearOperator((width, width), matvec=curved, dtype=np.float64)
        value, vector = eigsh(operator, k=1, which="LA", tol=LANCZOS, v0=np.ones(width))
        error = np.linalg.norm(curved(vector[:, 0]) - value[0] * vector[:, 0])
        return float(value[0] + error)
    X = X.astype(float, copy=False)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # refused by the caller, in words
        second = (
            X @ X.T if width > len(X) and number else X.T @ X
        )  # the same largest eigenvalue
    if not np.all(np.isfinite(second)):
        return np.inf
    return float(
        np.linalg.eigvalsh(0.5 * second + (0.0 if number else precision))[-1]
        + (precision if number else 0.0)
    )


def _laplace(
    X: Array, labels: Labels, classes: int, precision: Array
) -> tuple[Array, Array]:
    """Return the mode[m], and the covariance[d, d] of what tells one class from the others.

    The Hessian Σ (diag(p) − p pᵀ) ⊗ u uᵀ is taken for (I − 1 1ᵀ/C) ⊗ M of the same trace: what moves all classes
    alike is known from the prior alone, and the classes are otherwise treated alike. Against the full Hessian, W2²
    to the prior was within 1 % in most cases tried, 5 % in the worst.

    Args:
        X: features of all examples, [N, d].
        labels: class of each, [N].
        precision: the prior's curvature for one class, [d, d].
    """
    from scipy.optimize import (
        minimize,
    )  # takes longer to import than most commands take to run

    linear = np.zeros((X.shape[1], classes))
    np.add.at(linear.T, labels, X)
    # In coordinates in which Böhning's bound on the Hessian is the identity, the mode is found in few steps.
    root = np.linalg.cholesky(0.5 * X.T @ X + precision).T
    shape = linear.shape

    def cost(z: Array) -> tuple[float, Array]:
        theta = solve_triangular(root, z.reshape(shape))
        logits = X @ theta
        total = logsumexp(logits, axis=1)
        pulled = precision @ theta
        value = total.sum() - np.vdot(linear, theta) + 0.5 * np.vdot(theta, pulled)
        gradient = X.T @ np.exp(logits - total[:, None]) - linear + pulled
        return float(value), solve_triangular(root, gradient, trans="T").ravel()

    best = minimize(
        cost,
        np.zeros(linear.size),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 1000, "ftol": 1e-7},
    )
    theta = solve_triangular(root, best.x.reshape(shape))
    logits = X @ theta
    p = np.exp(logits - logsumexp(logits, axis=1)[:, None])
    curvature = (1 - (p**2).sum(1)) / (classes - 1)
    return theta.T.ravel(), np.asarray(
        np.linalg.inv(X.T @ (curvature[:, None] * X) + precision), dtype=float
    )


def softmax_regression(
    key: jax.Array,
    devices: int = 30,
    *,
    examples: int = 1200,
    dim: int = 5,
    classes: int | Sequence[int] | Sequence[str] | None = None,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    intercept: bool = False,
    partition: str | NDArray[np.intp] = "iid",
    prior_std: float = 1.0,
) -> SoftmaxPosterior:
    """Return the posterior of a multinomial logistic regression whose examples are spread over devices.

    Without X and y the data are those of `synthetic_labels`.

    Args:
        key: seeds data and partition (as two separate streams).
        devices: K.
        examples, dim: N and the number of features, of synthetic data.
        classes: C, of labels 0 to C − 1, or the label of every class; by default 10 synthetic ones, or with own data
            every label that y has, sorted. That set is treated as public: declare it where it is not.
        X, y: own data, [N, dim] and labels [N], whole numbers or text.
        intercept: add a column of ones to X.
        partition: iid, blocks, by-label or dirichlet:A, or the device of every row; see `wflmc.posterior.partition`.
        prior_std: s of the prior N(0, s² I).
    """
    check_regression(devices, prior_std, X, y, examples=examples, dim=dim)
    if classes is not None and np.ndim(classes) == 0:
        check_counts(classes=classes)  # type: ignore[arg-type]
    if X is None or y is None:
        names = class_names((), 10 if classes is None else classes)
        features, labels = synthetic_labels(key, examples, dim, len(names))
    else:
        features, _ = checked(X, np.zeros(np.shape(y)))
        names = class_names(y, classes)
        labels = as_classes(y, names)
    u, held, sizes = spread_over_devices(
        key, features, labels, devices, intercept, partition
    )
    return replace(_assemble(u, held, sizes, prior_std, names), intercept=intercept)


def synthetic_labels(
    key: jax.Array, examples: int, dim: int, classes: int = 10, stream: str = "data"
) -> tuple[Array, Labels]:
    """Draw u ~ N(0, I) and labels from the model itself, with parameters drawn from N(0, I).

    Args:
        stream: another name gives other examples of the same parameters, as a test set needs.
    """
    truth = host_generator(key, "truth").standard_normal((dim, classes))
    generator = host_generator(key, stream)
    features = generator.standard_normal((examples, dim))
    return features, np.argmax(
        features @ truth + generator.gumbel(size=(examples, classes)), axis=1
    )
