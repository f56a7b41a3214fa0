"""Plain float64 references of the fast paths, in NumPy.

Each is a few lines of the definition, without blocks, pairs or chains. Tests compare
the fast paths with them; nothing else uses them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def clip_vectors(vectors: ArrayLike, clip: ArrayLike) -> Array:
    """Return v min(1, c/‖v‖) of vectors[..., m] and c[...]."""
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
    """Return Σ_k w_k g_k min(1, ℓ_k/‖g_k‖).

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
    gradients = [
        clip_vectors(records, limit).sum(0) + prior_share
        for records, limit in zip(record_gradients, limits, strict=True)
    ]
    return device_clipped_sum(gradients, weight, clip)


def gaussian_record_gradients(
    theta: ArrayLike,
    features: ArrayLike,
    target: ArrayLike,
) -> Array:
    """Return (θᵀu − v) u of u[..., n, m] and v[..., n], [..., n, m]."""
    u = np.asarray(features, dtype=float)
    residuals = u @ np.asarray(theta, dtype=float) - target
    return residuals[..., None] * u


def gaussian_device_gradients(
    theta: ArrayLike,
    features: ArrayLike,
    target: ArrayLike,
    prior_share: ArrayLike,
) -> Array:
    """Return Σ_n (θᵀu_n − v_n) u_n plus the prior's share[m], [K, m]."""
    records = gaussian_record_gradients(theta, features, target)
    return np.asarray(records.sum(-2) + prior_share)


def softmax_residuals(
    theta: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: int,
) -> Array:
    """Return p(class|u) − 1[class = label].

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
    seen = np.eye(classes)[np.asarray(labels)]
    return np.asarray(raised / raised.sum(-1, keepdims=True) - seen)


def softmax_record_gradients(
    theta: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: int,
) -> Array:
    """Return the gradients of records, [..., n, m]; arguments as of the residuals."""
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
    """Return the sum of a device's records plus the prior's share[m], [..., m]."""
    u = np.asarray(features, dtype=float)
    residuals = softmax_residuals(theta, u, labels, classes)
    products = residuals.swapaxes(-1, -2) @ u
    return np.asarray(products.reshape(*products.shape[:-2], -1) + prior_share)
