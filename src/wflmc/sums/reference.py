"""Plain float64 references of the fast paths, in NumPy.

Each is a few lines of the definition, without blocks, pairs or chains. Tests compare
the fast paths with them; nothing else uses them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.sums.constants import MAX_CANCELLATION

Array = NDArray[np.float64]


def clip_vectors(vectors: ArrayLike, clip: ArrayLike) -> Array:
    """Return v min(1, c/‖v‖).

    Vectors within their threshold, those of zero included, are returned as they are. An
    infinite threshold clips nothing.

    Args:
        vectors: v[..., m].
        clip: c[...], or one number for all.

    Returns:
        The clipped vectors, [..., m].
    """
    values = np.asarray(vectors, dtype=float)
    norms = np.linalg.norm(values, axis=-1)
    factors = np.ones_like(norms)
    np.divide(clip, norms, out=factors, where=norms > clip)
    return factors[..., None] * values


def device_clipped_sum(
    gradients: ArrayLike,
    weight: ArrayLike,
    clip: ArrayLike,
) -> Array:
    """Return Σ_k w_k g_k min(1, ℓ_k/‖g_k‖) of one chain.

    This is what every path computes where whole devices are protected, up to the
    rounding that `wflmc.sums.bound` bounds.

    Args:
        gradients: g[K, m], each with its device's share of the prior's.
        weight: w[K].
        clip: ℓ[K].

    Returns:
        [m].
    """
    return np.asarray(weight, dtype=float) @ clip_vectors(gradients, clip)


def record_clipped_sum(
    record_gradients: Sequence[ArrayLike],
    prior_share: ArrayLike,
    *,
    weight: ArrayLike,
    clip: ArrayLike,
    example_clip: ArrayLike,
) -> Array:
    """Return the sum over devices of records that are clipped one by one.

    A device's gradient is Σ_n g_n min(1, c_k/‖g_n‖) plus the prior's share, and is then
    clipped itself, to ℓ_k.

    Args:
        record_gradients: [N_k, m] of each device.
        prior_share: each device's share of the prior's gradient, [m].
        weight: w[K].
        clip: ℓ[K].
        example_clip: c[K].

    Returns:
        [m].
    """
    limits = np.asarray(example_clip, dtype=float)
    prior_gradient = np.asarray(prior_share)
    gradients = []
    for records, limit in zip(record_gradients, limits, strict=True):
        clipped = clip_vectors(records, limit)
        gradients.append(clipped.sum(0) + prior_gradient)
    return device_clipped_sum(gradients, weight, clip)


def short_device_clipped_sum(
    record_gradients: Sequence[ArrayLike],
    prior_share: ArrayLike,
    *,
    weight: ArrayLike,
    clip: ArrayLike,
    example_clip: ArrayLike = np.inf,
) -> Array:
    """Return the sum over softmax devices of at most eight rows (Sums, step 6).

    A device is clipped as if its norm were at least a quarter of the sum of the norms
    of its records, clipped where they are, and of the prior's share. Where c < ℓ it is
    clipped by its own norm, as all other devices are.

    Args:
        record_gradients: [N_k, m] of each device.
        prior_share: each device's share of the prior's gradient, [m].
        weight: w[K].
        clip: ℓ[K].
        example_clip: c[K], or one number for all; infinite where records are not
            clipped.

    Returns:
        [m].
    """
    weights = np.asarray(weight, dtype=float)
    limits = np.asarray(clip, dtype=float)
    example_limits = np.broadcast_to(example_clip, limits.shape)
    prior_gradient = np.asarray(prior_share, dtype=float)
    total = np.zeros_like(prior_gradient)
    for index, records in enumerate(record_gradients):
        clipped = clip_vectors(records, example_limits[index])
        gradient = clipped.sum(0) + prior_gradient
        norm = np.linalg.norm(gradient)
        if example_limits[index] >= limits[index]:
            lengths = np.linalg.norm(clipped, axis=-1)
            length_sum = lengths.sum() + np.linalg.norm(prior_gradient)
            norm = max(norm, length_sum / MAX_CANCELLATION)
        factor = limits[index] / norm if norm > limits[index] else 1.0
        total = total + weights[index] * factor * gradient
    return total


def gaussian_record_gradients(
    theta: ArrayLike,
    features: ArrayLike,
    target: ArrayLike,
) -> Array:
    """Return the gradients (θᵀu − v) u of the linear model's records.

    The noise of the targets has variance 1, so that the cost of a record is half its
    squared residual.

    Args:
        theta: θ[m].
        features: u[..., n, m].
        target: v[..., n].

    Returns:
        [..., n, m].
    """
    u = np.asarray(features, dtype=float)
    residuals = u @ np.asarray(theta, dtype=float) - target
    return residuals[..., None] * u


def gaussian_device_gradients(
    theta: ArrayLike,
    features: ArrayLike,
    target: ArrayLike,
    prior_share: ArrayLike,
) -> Array:
    """Return Σ_n (θᵀu_n − v_n) u_n plus the prior's share, for every device.

    Rows of zeros, which fill up devices of fewer records, add nothing, whatever their
    target.

    Args:
        theta: θ[m].
        features: u[K, n, m].
        target: v[K, n].
        prior_share: a device's share of the prior's gradient, [m].

    Returns:
        [K, m].
    """
    records = gaussian_record_gradients(theta, features, target)
    return np.asarray(records.sum(-2) + np.asarray(prior_share))


def softmax_residuals(
    theta: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: int,
) -> Array:
    """Return p(class|u) − 1[class = label], with p the softmax of the logits θ_cᵀu.

    The gradient of a record's cost is the outer product of this vector and u. The
    largest logit is subtracted first, so that no exponential overflows.

    Args:
        theta: θ[m], the C vectors θ_c one after the other.
        features: u[..., n, d].
        labels: [..., n].
        classes: C.

    Returns:
        [..., n, C].
    """
    by_class = np.asarray(theta, dtype=float).reshape(classes, -1)
    logits = np.asarray(features, dtype=float) @ by_class.T
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    probability = raised / raised.sum(-1, keepdims=True)
    observed = np.eye(classes)[np.asarray(labels)]
    return np.asarray(probability - observed)


def softmax_record_gradients(
    theta: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: int,
) -> Array:
    """Return the gradients of the softmax model's records.

    That of a record is the outer product of its residuals and its features, with the C
    vectors one after the other, as θ has them.

    Args:
        theta: θ[m], m = C d.
        features: u[..., n, d].
        labels: [..., n].
        classes: C.

    Returns:
        [..., n, m].
    """
    u = np.asarray(features, dtype=float)
    residuals = softmax_residuals(theta, u, labels, classes)
    gradients = residuals[..., :, None] * u[..., None, :]
    return gradients.reshape(*gradients.shape[:-2], -1)


def softmax_device_gradients(
    theta: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    *,
    classes: int,
    prior_share: ArrayLike,
) -> Array:
    """Return the sum of a device's record gradients plus the prior's share.

    It is R^T U, with residuals R [n, C] and features U [n, d]. No gradient of a record
    is written, which tests with many records would not have the memory for.

    Args:
        theta: θ[m], m = C d.
        features: u[..., n, d].
        labels: [..., n].
        classes: C.
        prior_share: a device's share of the prior's gradient, [m].

    Returns:
        [..., m].
    """
    u = np.asarray(features, dtype=float)
    residuals = softmax_residuals(theta, u, labels, classes)
    products = residuals.swapaxes(-1, -2) @ u
    return np.asarray(products.reshape(*products.shape[:-2], -1) + prior_share)
