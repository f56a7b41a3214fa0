"""Neighbouring data sets for the models of this package: one record, or one device, as loud as can be."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from wflmc.errors import InputError
from wflmc.posterior import GaussianPosterior, SoftmaxPosterior, gaussian_regression, softmax_regression
from wflmc.posterior.softmax import FEW_ROWS


def canary_pair(posterior: Any, device: int, size: float, away: float = -1.0, others: float = 0.0) -> tuple[Any, Any]:
    """Two posteriors of the same kind, as small as can be, with as many devices and gradients ±size on one of them.

    All other rows are zeros. Models that work on few rows in another way than on many are given as few, or as many.

    Args:
        away: 0 where the second has an empty row in place of −size.
        others: norm of what another row of the device adds in both, against the canary.
    """
    devices = posterior.devices
    rows = FEW_ROWS + 1 if posterior.features.shape[1] > FEW_ROWS else 2
    at = device * rows + rows - 1  # the last of the device's rows, and in no coordinate's direction
    X, y = np.zeros((devices * rows, 3)), np.zeros(devices * rows, int)
    common: dict[str, Any] = {"partition": "blocks", "prior_std": 1e3}
    if isinstance(posterior, GaussianPosterior):
        # The gradient is (θu − v)u.
        make: Any = gaussian_regression
        sizes = [float(others > 0), 1.0]
        one, other = y.astype(float), y.astype(float)
        one[at - 1 : at + 1], other[at - 1 : at + 1] = (others, -size), (others, -away * size)
    else:
        # At θ = 0 the gradient is ±(u, −u)/2, by the label.
        make, sizes, common["classes"] = softmax_regression, [2**0.5 * others, 2**0.5 * size], 2
        one, other = (np.arange(y.size) == at).astype(int), y
    X[at - 1 : at + 1] = np.outer(sizes, np.full(3, 3**-0.5))
    Z = X.copy()
    Z[at] *= away != 0
    key = jax.random.key(0)
    return make(key, devices, X=X, y=one, **common), make(key, devices, X=Z, y=other, **common)


def check_kind(posterior: Any) -> None:
    """Refuse models for which no canary is known."""
    if not isinstance(posterior, GaussianPosterior | SoftmaxPosterior):
        raise InputError(
            "posterior", type(posterior).__name__, "a Gaussian or a softmax posterior; for others use audit_pair"
        )
