"""Canaries: posteriors whose gradients are given, far above every clip, so that only clipping and noise hide them.

They clip by the code that all models clip by, and go through the sampler's own kernel.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.posterior import (
    GaussianPosterior,
    Posterior,
    Regression,
    gaussian_regression,
    softmax_regression,
)
from wflmc.posterior.coordinates import Points
from wflmc.sums.clipping import clip_factor
from wflmc.sums.constants import MAX_ROWS_OF_SHORT_DEVICE
from wflmc.sums.devices import ClippedSum, Sum
from wflmc.support.trees import NumericArray

Pair = tuple[Posterior, Posterior]
"""Of neighbouring data sets."""


class Canary(NamedTuple):
    """Each device's gradient is a part that the server knows and one example that it wants to know."""

    example: NumericArray
    """[K, m]; or [K], where every device sends in a coordinate of its own, m = K."""
    base: NumericArray
    """What the server knows, as `example`."""

    @property
    def batch(self) -> None:
        """Canaries draw no mini-batches."""

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: jax.Array | None = None,
        example_clip: jax.Array | None = None,
    ) -> ClippedSum:
        """Return Σ_k weight_k clip(base_k + clip(example_k)), and the norms before the device's clip."""
        example = self.example
        if example_clip is not None:
            factor = clip_factor(jnp.ones(()), example_clip, _lengths(example))
            example = example * factor.reshape(
                factor.shape + (1,) * (example.ndim - factor.ndim)
            )
        gradient = self.base + example
        norm = _lengths(gradient)
        factor = clip_factor(weight, clip, norm)
        total = factor * gradient if gradient.ndim == 1 else factor @ gradient
        return ClippedSum(Sum(total), norm)


def _lengths(gradient: NumericArray) -> jax.Array:
    """Return the norms [K] of gradients [K, m] or [K]."""
    return (
        jnp.abs(gradient) if gradient.ndim == 1 else jnp.linalg.norm(gradient, axis=1)
    )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["example", "base", "turn"],
    meta_fields=[],
)
@dataclass(frozen=True, repr=False)
class TurningCanary(Posterior):
    """A canary that whole runs of `wflmc.sample` can have: θ, which the server knows, says which way it points.

    It sends in the first of two parameters; the second one, all noise, turns it.
    """

    example: NumericArray
    """[K]."""
    base: NumericArray
    """[K]."""
    turn: NumericArray | np.floating
    """The canary changes its sign whenever the second parameter goes on by this much."""

    # No chain asks for these.
    mu = L = sizes = digest = initial_w2_sq = gradients = example_norms = device = None  # type: ignore[assignment]
    dim = 2
    """m."""

    @property
    def devices(self) -> int:
        """K."""
        return int(self.example.shape[0])

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Return the memory that one device at a time needs for its part of a round, in bytes."""
        return 64.0 * chains * self.devices

    def work(self, by_example: bool = False) -> float:
        """Return the number of operations of one chain in one round, roughly."""
        return 100.0 * self.devices

    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same, in float32 on the accelerator."""
        return jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), self)

    def draw_initial(self, key: jax.Array, init: str = "zero") -> jax.Array:
        """Return θ[0] = 0."""
        return jnp.zeros(2)

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: jax.Array | None = None,
        example_clip: jax.Array | None = None,
    ) -> ClippedSum:
        """Return the sum and the norms, as `Canary` does."""
        total, norm = Canary(self.example, self.base).unrounded_sum(
            theta, weight, clip, key, example_clip
        )
        first = direction(theta, self.turn) * total.high.sum()
        return ClippedSum(Sum(jnp.stack([first, jnp.zeros(())])), norm)


def direction(theta: Points, turn: NumericArray | np.floating) -> Points:
    """Return which way a `TurningCanary` points at θ[..., 2]: 1 or −1; for arrays of JAX and of NumPy."""
    return 1 - 2 * (theta[..., 1] / turn // 1 % 2)


def canary_pair(
    posterior: Regression,
    device: int,
    size: float,
    neighbour: float = -1.0,
    others: float = 0.0,
) -> Pair:
    """Return two posteriors of one kind, as small as can be, with as many devices and gradients ±size on one of them.

    All other rows are zeros. Models that work on few rows in another way than on many are given as few, or as many.

    Args:
        posterior: Gaussian or softmax; says which kind, how many devices, and whether rows are few.
        device: whose canary it is.
        size: norm of its gradient.
        neighbour: 0 where the second has an empty row in place of −size.
        others: norm of what another row of the device adds in both, against the canary.
    """
    devices, gaussian = posterior.devices, isinstance(posterior, GaussianPosterior)
    rows = (
        MAX_ROWS_OF_SHORT_DEVICE + 1
        if posterior.features.shape[1] > MAX_ROWS_OF_SHORT_DEVICE
        else 2
    )
    at = (
        device * rows + rows - 1
    )  # the last of the device's rows, and in no coordinate's direction
    X, y = (
        np.zeros((2, devices * rows, 3)),
        np.zeros((2, devices * rows), float if gaussian else int),
    )
    if gaussian:  # the gradient is (θu − v)u
        sizes = [float(others > 0), 1.0]
        y[:, at - 1 : at + 1] = [(others, -size), (others, -neighbour * size)]
    else:  # at θ = 0 the gradient is ±(u, −u)/2, by the label
        sizes = [2**0.5 * others, 2**0.5 * size]
        y[0, at] = 1
    X[:, at - 1 : at + 1] = np.outer(sizes, np.full(3, 3**-0.5))
    X[1, at] *= neighbour != 0
    key = jax.random.key(0)

    def make(X: np.ndarray, y: np.ndarray) -> Regression:
        if gaussian:
            return gaussian_regression(
                key, devices, X=X, y=y, partition="blocks", prior_std=1e3
            )
        return softmax_regression(
            key, devices, X=X, y=y, partition="blocks", prior_std=1e3, classes=2
        )

    return make(X[0], y[0]), make(X[1], y[1])
