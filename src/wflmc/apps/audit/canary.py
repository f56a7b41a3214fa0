"""Canaries: posteriors whose gradients are chosen, far above every clipping threshold.

Only clipping and noise hide them. They clip by the code that all models clip by, and go
through the sampler's own kernel.
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

CANARY_FEATURES = 3
"""Number of features of canary data sets: few, but more than the one direction that the
canary is in."""
WIDE_PRIOR_STD = 1e3
"""Standard deviation of the prior of canary data sets; its gradient near θ = 0 is
negligible beside the canary's."""


class Canary(NamedTuple):
    """Gradients of devices: a part that the server knows and one secret example."""

    example: NumericArray
    """Gradients of the secret examples, [K, m]; or [K], where every device transmits in
    a coordinate of its own and m = K."""
    base: NumericArray
    """What the server knows, as `example`."""

    @property
    def batch(self) -> None:
        """Return that canaries draw no mini-batches, as the sampler's kernel asks."""

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: jax.Array | None = None,
        example_clip: jax.Array | None = None,
    ) -> ClippedSum:
        """Return Σ_k weight_k clip(base_k + clip(example_k)).

        It is the sum that a round asks of every posterior, in float32; gradients do not
        depend on θ. The order of both clips is that of the models: the example first,
        then the gradient of the device.

        Args:
            theta: θ[m], which is not used.
            weight: [K], 0 for a device that does not transmit.
            clip: ℓ[K], may be infinite.
            key: is not used: there are no mini-batches.
            example_clip: c[K]; None where examples are not clipped.

        Returns:
            The sum [m], and the norms of the gradients before the device's clip, [K].
        """
        example = self.example
        if example_clip is not None:
            factor = clip_factor(jnp.ones(()), example_clip, _norms(example))
            parameter_axes = (1,) * (example.ndim - factor.ndim)
            factor = factor.reshape(factor.shape + parameter_axes)
            example = example * factor
        gradient = self.base + example
        norms = _norms(gradient)
        factor = clip_factor(weight, clip, norms)
        total = factor * gradient if gradient.ndim == 1 else factor @ gradient
        return ClippedSum(Sum(total), norms)


def _norms(gradient: NumericArray) -> jax.Array:
    """Return the norms [K] of gradients [K, m] or [K]."""
    if gradient.ndim == 1:
        return jnp.abs(gradient)
    return jnp.linalg.norm(gradient, axis=1)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["example", "base", "turn"],
    meta_fields=[],
)
@dataclass(frozen=True, repr=False)
class TurningCanary(Posterior):
    """A canary for whole runs of `wflmc.sample`, whose sign depends on θ.

    The server knows θ. The canary transmits in the first of two parameters; the second
    one, which moves by noise alone, turns it.
    """

    example: NumericArray
    """[K]."""
    base: NumericArray
    """[K]."""
    turn: NumericArray | np.floating
    """The canary changes its sign whenever the second parameter moves on by this."""

    # No chain needs these.
    mu = L = sizes = digest = initial_w2_sq = gradients = example_norms = device = None  # type: ignore[assignment]
    dim = 2
    """m."""

    @property
    def devices(self) -> int:
        """Return the number of devices, K, from the shape of the gradients.

        A canary has no data and therefore no `sizes`, from which other posteriors count
        their devices.
        """
        return int(self.example.shape[0])

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Return the memory of one round in bytes, roughly.

        It is what the sampler divides chains into chunks by. All devices are computed
        together, with two parameters each.

        Args:
            chains: that are run at the same time.
            by_example: whether examples are clipped one by one; makes no difference.
        """
        return 64.0 * chains * self.devices

    def work(self, by_example: bool = False) -> float:
        """Return the number of operations of one chain in one round, roughly.

        The sampler uses it to divide work; it does not change any number.

        Args:
            by_example: whether examples are clipped one by one; makes no difference.
        """
        return 100.0 * self.devices

    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same canary in float32 on the accelerator.

        There are no data to be laid out by blocks, so that the arguments, which the
        sampler passes to every posterior, make no difference.

        Args:
            chains: that are run at the same time.
            limit: of memory, in bytes.
            by_example: whether examples are clipped one by one.
        """
        return jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), self)

    def draw_initial(self, key: jax.Array, init: str = "zero") -> jax.Array:
        """Return the start of a chain, which is always θ = 0.

        Attacks compute what was received in the first round as a difference from it.

        Args:
            key: is not used.
            init: is not used: a canary has no prior to draw from.
        """
        return jnp.zeros(2)

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: jax.Array | None = None,
        example_clip: jax.Array | None = None,
    ) -> ClippedSum:
        """Return the clipped sum of a `Canary`, times the sign that θ gives it.

        Every device transmits its clipped gradient in the first coordinate; the second
        coordinate of the sum is 0, and only the channel's noise moves it.

        Args:
            theta: θ[2].
            weight: [K], 0 for a device that does not transmit.
            clip: ℓ[K], may be infinite.
            key: is not used: there are no mini-batches.
            example_clip: c[K]; None where examples are not clipped.

        Returns:
            The sum [2], and the norms before the device's clip, [K].
        """
        canary = Canary(self.example, self.base)
        total, norms = canary.unrounded_sum(theta, weight, clip, key, example_clip)
        first = direction(theta, self.turn) * total.high.sum()
        return ClippedSum(Sum(jnp.stack([first, jnp.zeros(())])), norms)


def direction(theta: Points, turn: NumericArray | np.floating) -> Points:
    """Return the sign of a `TurningCanary` at θ, 1 or −1.

    It is 1 − 2 (⌊θ₂/turn⌋ mod 2). The same arithmetic serves arrays of JAX, inside the
    sampler, and arrays of NumPy, when the server works out which sign a run had; both
    have to be float32 to agree.

    Args:
        theta: θ[..., 2].
        turn: length of the intervals of θ₂ in which the sign is the same.
    """
    return 1 - 2 * (theta[..., 1] / turn // 1 % 2)


def canary_pair(
    posterior: Regression,
    device: int,
    size: float,
    neighbour: float = -1.0,
    background: float = 0.0,
) -> Pair:
    """Return two small posteriors of a kind, which differ in one row of one device.

    At θ = 0 that row's gradient is ±size in a direction that is no coordinate's. All
    other rows are zeros, but for a known one that points against the canary where there
    is a background. Models have different code for devices of few and of many rows: the
    canary data sets have few rows where the model has, and many where it has many.

    Args:
        posterior: Gaussian or softmax; says which kind, how many devices, and whether
            rows are few. Its data are not used.
        device: whose canary it is.
        size: norm of its gradient.
        neighbour: the row's gradient in the second over that in the first: −1
            (`replace`), or 0 for an empty row (`add-remove`); no other value is
            possible.
        background: norm of what another row of the device adds in both, against the
            canary.

    Returns:
        The posteriors + and −.
    """
    devices = posterior.devices
    has_many_rows = posterior.features.shape[1] > MAX_ROWS_OF_SHORT_DEVICE
    rows = MAX_ROWS_OF_SHORT_DEVICE + 1 if has_many_rows else 2
    canary_row = device * rows + rows - 1  # the last of the device's rows
    canary_rows = slice(canary_row - 1, canary_row + 1)
    X = np.zeros((2, devices * rows, CANARY_FEATURES))
    unit_vector = np.full(CANARY_FEATURES, CANARY_FEATURES**-0.5)
    is_gaussian = isinstance(posterior, GaussianPosterior)
    if is_gaussian:  # the gradient is (θu − v)u
        y = np.zeros((2, devices * rows), float)
        feature_norms = [float(background > 0), 1.0]
        y[0, canary_rows] = (background, -size)
        y[1, canary_rows] = (background, -neighbour * size)
    else:  # at θ = 0 the gradient is ±(u, −u)/2, by the label
        y = np.zeros((2, devices * rows), int)
        feature_norms = [2**0.5 * background, 2**0.5 * size]
        y[0, canary_row] = 1
    X[:, canary_rows] = np.outer(feature_norms, unit_vector)
    X[1, canary_row] *= neighbour != 0
    build = _gaussian_canary if is_gaussian else _softmax_canary
    return build(devices, X[0], y[0]), build(devices, X[1], y[1])


def _gaussian_canary(devices: int, X: np.ndarray, y: np.ndarray) -> Regression:
    """Return a Gaussian model of successive rows, with a wide prior."""
    return gaussian_regression(
        jax.random.key(0),
        devices,
        X=X,
        y=y,
        partition="blocks",
        prior_std=WIDE_PRIOR_STD,
    )


def _softmax_canary(devices: int, X: np.ndarray, y: np.ndarray) -> Regression:
    """Return a softmax model of successive rows and two classes, with a wide prior."""
    return softmax_regression(
        jax.random.key(0),
        devices,
        X=X,
        y=y,
        partition="blocks",
        prior_std=WIDE_PRIOR_STD,
        classes=2,
    )
