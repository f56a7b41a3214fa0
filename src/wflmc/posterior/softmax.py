"""Bayesian multinomial logistic regression: the model of the paper's MNIST study."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_triangular
from scipy.special import logsumexp

from wflmc.errors import InputError
from wflmc.keys import host_generator, named
from wflmc.posterior.inputs import (
    check_counts,
    check_init,
    check_prior,
    checked,
    draw_start,
    with_intercept,
)
from wflmc.posterior.partition import by_device
from wflmc.posterior.partition import partition as split

Array = NDArray[np.float64]
Labels = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class SoftmaxPosterior:
    """p(θ|D) for p(v = c|u) ∝ exp(θ_cᵀu) and prior N(0, prior_std² I); θ is the C vectors θ_c one after the other.

    The gradient of device k in θ_c is Σ_n p(c|u_n) u_n − Σ_{n: v_n = c} u_n + θ_c/(K prior_std²). Devices of
    unlike size are padded with rows of zeros, which add nothing to it.
    """

    features: Array
    """u[K, n, d]."""
    linear: Array
    """Sum of the features of each class, [K, d, C]."""
    sizes: Labels
    """N_k, [K]."""
    prior_std: float
    mu: float
    """1/prior_std², the curvature of the prior (strong convexity)."""
    L: float
    """λ_max(Σ u uᵀ)/2 + 1/prior_std², Böhning's bound (smoothness)."""

    start_is_estimate = True
    """`initial_w2_sq` is a Laplace estimate: the posterior has no closed form."""

    @property
    def classes(self) -> int:
        """C."""
        return int(self.linear.shape[-1])

    @property
    def dim(self) -> int:
        """m = C d, the number of parameters."""
        return int(self.linear.shape[-1] * self.linear.shape[-2])

    @property
    def devices(self) -> int:
        """K."""
        return int(self.linear.shape[0])

    def draw_initial(self, key: jax.Array, init: str = "prior") -> jax.Array:
        """One θ[0], [m]."""
        return draw_start(key, init, self.dim, self.prior_std)

    def clipped_sum(
        self, theta: jax.Array, weight: jax.Array, clip: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Σ_k weight_k g_k min(1, ℓ_k/‖g_k‖), and the norms ‖g_k‖ before clipping.

        One device at a time, and under `vmap` all chains of a device in one matrix product: memory does not grow
        with the number of devices.

        Args:
            theta: θ[m]; weight: [K], 0 for a silent device; clip: ℓ[K], may be infinite.
            key: for models that draw mini-batches; not used here.
        """
        del key
        share = 1 / (self.devices * self.prior_std**2)
        return _clipped_sum(self.features, self.linear, share, theta, weight, clip)

    def gradients(self, theta: jax.Array) -> jax.Array:
        """Every device's own gradient, unclipped, [K, m]: for protocols that do not superpose."""
        share = 1 / (self.devices * self.prior_std**2)

        def one(features: jax.Array, linear: jax.Array) -> jax.Array:
            return _gradient(features, linear, share, _columns(theta[None], linear)).transpose(2, 1, 0).ravel()

        return jax.lax.map(lambda device: one(*device), (jnp.asarray(self.features), jnp.asarray(self.linear)))

    def device(self, index: int) -> SoftmaxPosterior:
        """One device's part alone, with its own share of the prior as its prior."""
        if not 0 <= index < self.devices:
            raise InputError("device", index, f"between 0 and {self.devices - 1}")
        at = slice(index, index + 1)
        features = self.features[at, : self.sizes[index]]
        return _assemble(features, self.linear[at], self.sizes[at], self.prior_std * self.devices**0.5)

    def predict(self, theta: ArrayLike, features: ArrayLike) -> NDArray[np.float32]:
        """p(class|u) averaged over the draws of each chain: theta[chain, draw, m], u[n, d] -> [chain, n, C]."""
        return np.asarray(_predict(jnp.asarray(theta), jnp.asarray(features), self.classes))

    @cached_property
    def laplace(self) -> tuple[Array, Array]:
        """The posterior's mode[m], and its variances[m] along the main directions of the Hessian there.

        The Hessian Σ (diag(p) − p pᵀ) ⊗ u uᵀ is taken for (I − 1 1ᵀ/C) ⊗ M of the same trace: what moves all classes
        alike is known from the prior alone, and the classes are otherwise treated alike.
        """
        from scipy.optimize import minimize  # takes longer to import than most commands take to run

        X = self.features.reshape(-1, self.features.shape[-1])
        linear, precision = self.linear.sum(0), self.prior_std**-2
        # In coordinates in which Böhning's bound on the Hessian is the identity, the mode is found in few steps.
        root = np.linalg.cholesky(0.5 * X.T @ X + precision * np.eye(X.shape[1])).T
        shape = linear.shape

        def cost(z: Array) -> tuple[float, Array]:
            theta = solve_triangular(root, z.reshape(shape))
            logits = X @ theta
            total = logsumexp(logits, axis=1)
            value = total.sum() - np.vdot(linear, theta) + 0.5 * precision * np.vdot(theta, theta)
            gradient = X.T @ np.exp(logits - total[:, None]) - linear + precision * theta
            return float(value), solve_triangular(root, gradient, trans="T").ravel()

        found = minimize(
            cost, np.zeros(linear.size), jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-7}
        )
        theta = solve_triangular(root, found.x.reshape(shape))
        logits = X @ theta
        p = np.exp(logits - logsumexp(logits, axis=1)[:, None])
        curvature = (1 - (p**2).sum(1)) / (self.classes - 1)
        along = np.maximum(np.linalg.eigvalsh(X.T @ (curvature[:, None] * X)), 0.0)
        values = np.concatenate([np.zeros(along.size), np.tile(along, self.classes - 1)])
        return theta.T.ravel(), 1 / (values + precision)

    def initial_w2_sq(self, init: str = "prior") -> float:
        """W2² between the law of θ[0] and the Laplace estimate of the posterior."""
        check_init(init)
        mean, variance = self.laplace
        scale = self.prior_std if init == "prior" else 0.0
        return float(mean @ mean + np.sum((scale - np.sqrt(variance)) ** 2))


jax.tree_util.register_dataclass(
    SoftmaxPosterior, data_fields=["features", "linear", "sizes", "prior_std", "mu", "L"], meta_fields=[]
)


def _columns(theta: jax.Array, linear: Any) -> jax.Array:
    """theta[chain, m] as [d, C, chain]: chains side by side are what makes the matrix products large."""
    return theta.reshape(theta.shape[0], linear.shape[-1], linear.shape[-2]).transpose(2, 1, 0)


def _softmax(features: jax.Array, columns: jax.Array) -> jax.Array:
    """p(class|u) for features[n, d] and columns[d, C, chain], [n, C, chain]."""
    dim, *rest = columns.shape
    logits = (features @ columns.reshape(dim, -1)).reshape(-1, *rest)
    raised = jnp.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def _gradient(features: Any, linear: Any, share: Any, columns: jax.Array) -> jax.Array:
    """One device's gradient for all chains, [d, C, chain]."""
    p = _softmax(features, columns)
    likelihood = (features.T @ p.reshape(p.shape[0], -1)).reshape(columns.shape)
    return likelihood - linear[..., None] + share * columns


def _all_chains(
    features: Any, linear: Any, share: Any, theta: jax.Array, weight: jax.Array, clip: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """theta[chain, m], weight[chain, K], clip[chain, K] -> sums[chain, m], norms[chain, K]."""
    columns = _columns(theta, linear)

    def add(total: jax.Array, device: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        u, b, w, limit = device
        gradient = _gradient(u, b, share, columns)
        norm = jnp.sqrt(jnp.sum(gradient**2, axis=(0, 1)))
        return total + w * jnp.minimum(1.0, limit / norm) * gradient, norm

    devices = (jnp.asarray(features), jnp.asarray(linear), weight.T, clip.T)
    total, norms = jax.lax.scan(add, jnp.zeros_like(columns), devices)
    return total.transpose(2, 1, 0).reshape(theta.shape), norms.T


@jax.custom_batching.custom_vmap
def _clipped_sum(
    features: Any, linear: Any, share: Any, theta: jax.Array, weight: jax.Array, clip: jax.Array
) -> tuple[jax.Array, jax.Array]:
    total, norm = _all_chains(features, linear, share, theta[None], weight[None], clip[None])
    return total[0], norm[0]


@_clipped_sum.def_vmap
def _(axis_size: int, batched: list[bool], *arguments: Any) -> tuple[Any, Any]:
    """All chains go through together; they share the data."""
    if any(batched[:3]):
        raise NotImplementedError("vmap over chains of one posterior, not over posteriors")
    chains = [
        value if own else jnp.broadcast_to(value, (axis_size, *value.shape))
        for value, own in zip(arguments[3:], batched[3:], strict=True)
    ]
    return _all_chains(*arguments[:3], *chains), (True, True)


@partial(jax.jit, static_argnames=("classes",))
def _predict(theta: jax.Array, features: jax.Array, classes: int) -> jax.Array:
    """Mean over draws of p(class|u), chain by chain and in blocks of rows that stay in the processor's cache."""
    count, dim = features.shape
    block = min(count, 1024)
    rows = jnp.pad(features, ((0, -count % block), (0, 0))).reshape(-1, block, dim)

    def chain(draws: jax.Array) -> jax.Array:
        columns = draws.reshape(-1, classes, dim).transpose(2, 1, 0)
        return jax.lax.map(lambda part: _softmax(part, columns).mean(-1), rows).reshape(-1, classes)[:count]

    return jax.lax.map(chain, theta)


def _assemble(features: Array, linear: Array, sizes: Labels, prior_std: float) -> SoftmaxPosterior:
    X = features.reshape(-1, features.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):  # refused below, in words
        second = X.T @ X
    if not np.all(np.isfinite(second)):
        raise InputError("data", "values whose squares overflow", "scaled to moderate size")
    precision = prior_std**-2
    L = 0.5 * float(np.linalg.eigvalsh(second)[-1]) + precision
    return SoftmaxPosterior(features, linear, sizes, prior_std, mu=precision, L=L)


def softmax_regression(
    key: jax.Array,
    devices: int = 30,
    *,
    examples: int = 1200,
    dim: int = 5,
    classes: int = 10,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    intercept: bool = False,
    partition: str = "iid",
    prior_std: float = 1.0,
) -> SoftmaxPosterior:
    """Posterior of a multinomial logistic regression whose examples are spread over devices.

    Without X and y the data are those of `synthetic_labels`.

    Args:
        key: seeds data and partition (as two separate streams).
        X, y: own data, [N, dim] and labels [N], whole numbers from 0; `classes` then comes from them.
        intercept: add a column of ones to X.
        partition: see `wflmc.posterior.partition`.
    """
    check_prior(prior_std)
    if (X is None) != (y is None):
        raise InputError("X" if X is None else "y", None, "given together with the other of X and y")
    if X is None or y is None:
        features, labels = synthetic_labels(key, examples, dim, classes)
    else:
        features, target = checked(X, y)
        labels = as_labels(target)
        classes = int(labels.max()) + 1
    if intercept:
        features = with_intercept(features)
    owner = split(partition, labels.astype(float), devices, host_generator(named(key, "data"), "partition"))
    parts, sizes = by_device(owner, devices, features, labels)
    padded = np.zeros((devices, sizes.max(), features.shape[1]))
    linear = np.zeros((devices, features.shape[1], classes))
    for k, (u, v) in enumerate(parts):
        padded[k, : len(v)] = u
        np.add.at(linear[k].T, v, u)
    return _assemble(padded, linear, sizes, prior_std)


def synthetic_labels(
    key: jax.Array, examples: int, dim: int, classes: int = 10, stream: str = "data"
) -> tuple[Array, Labels]:
    """u ~ N(0, I) and labels from the model itself, with parameters drawn from N(0, I).

    Args:
        stream: another name gives other examples of the same parameters, as a test set needs.
    """
    check_counts(examples=examples, dim=dim)
    if classes < 2:
        raise InputError("classes", classes, "at least 2")
    truth = host_generator(key, "truth").standard_normal((dim, classes))
    generator = host_generator(key, stream)
    features = generator.standard_normal((examples, dim))
    # The largest of logits plus Gumbel noise is a draw from their softmax.
    return features, np.argmax(features @ truth + generator.gumbel(size=(examples, classes)), axis=1)


def as_labels(target: Array, classes: int | None = None) -> Labels:
    """Labels as whole numbers from 0, refused where they are not, or not below `classes`."""
    limit = 1000 if classes is None else classes
    if np.any((target != np.floor(target)) | (target < 0) | (target >= limit)) or (
        classes is None and target.max() < 1
    ):
        bad = target[(target != np.floor(target)) | (target < 0) | (target >= limit)]
        given = float(bad[0]) if bad.size else "one class only"
        raise InputError(
            "data", given, f"labels y that are whole numbers from 0 to {limit - 1}, of two classes or more"
        )
    return target.astype(np.intp)
