"""Neighbouring data sets for the models of this package: one record, or one device, as loud as can be."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from wflmc.errors import InputError
from wflmc.posterior import GaussianPosterior, SoftmaxPosterior, gaussian_regression, softmax_regression
from wflmc.posterior.softmax import FEW_ROWS


def canary_pair(posterior: Any, device: int, size: float) -> tuple[Any, Any]:
    """Two posteriors of the same kind, as small as can be, with as many devices and gradients ±size on one of them.

    All other rows are zeros. Models that work on few rows in another way than on many are given as few, or as many.
    """
    devices = posterior.devices
    rows = FEW_ROWS + 1 if posterior.features.shape[1] > FEW_ROWS else 2
    at = device * rows + rows - 1  # the last of the device's rows, and in no coordinate's direction
    spread = np.full(3, 3**-0.5)
    X, y = np.zeros((devices * rows, 3)), np.zeros(devices * rows)
    common: dict[str, Any] = {"partition": "blocks", "prior_std": 1e3}
    key = jax.random.key(0)
    if isinstance(posterior, GaussianPosterior):
        # The gradient is (θu − v)u.
        X[at] = spread
        y[at] = size
        plus, minus = (gaussian_regression(key, devices, X=X, y=target, **common) for target in (-y, y))
        return plus, minus
    # At θ = 0 the gradient is ±(u, −u)/2, by the label.
    X[at] = np.sqrt(2) * size * spread
    labels = y.astype(int)
    labels[at] = 1
    sides = [softmax_regression(key, devices, classes=2, X=X, y=label, **common) for label in (labels, 0 * labels)]
    return sides[0], sides[1]


def check_kind(posterior: Any) -> None:
    """Refuse models for which no canary is known."""
    if not isinstance(posterior, GaussianPosterior | SoftmaxPosterior):
        raise InputError(
            "posterior", type(posterior).__name__, "a Gaussian or a softmax posterior; for others use audit_pair"
        )
