"""What all models ask of their data, prior and start."""

from __future__ import annotations

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError
from wflmc.posterior.coordinates import Coordinates

Array = NDArray[np.float64]

INITS = ("prior", "zero")


def check_init(init: str) -> None:
    """Refuse a start that is not known."""
    if init not in INITS:
        raise InputError("init", init, f"one of {', '.join(INITS)}")


def draw_start(key: jax.Array, init: str, dim: int, prior_std: float, space: Coordinates | None = None) -> jax.Array:
    """Where a chain starts, [m]: at a draw from the prior, or at zero."""
    check_init(init)
    draw = jax.random.normal(key, (dim,))
    if init == "zero":
        return 0.0 * draw
    if space is None:
        return prior_std * draw
    return (draw.reshape(-1, len(space.spread)) @ space.spread.T).ravel()


def check_prior(prior_std: float) -> None:
    """Refuse a prior without a proper width."""
    if not (isinstance(prior_std, int | float | np.number) and 0 < prior_std < np.inf):
        raise InputError("prior_std", prior_std, "a number, finite and above 0")


def check_counts(**counts: int) -> None:
    """Refuse what is no size of at least one."""
    for name, value in counts.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise InputError(name, value, "a whole number of at least 1")


def checked(X: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    """X[N, features] and y[N] as finite floats."""
    raw = np.asarray(X), np.asarray(y)
    if any(array.dtype.kind not in "fiub" for array in raw):
        raise InputError("data", f"X of type {raw[0].dtype} and y of type {raw[1].dtype}", "real numbers")
    features, target = raw[0].astype(float), raw[1].astype(float)
    if features.ndim != 2 or target.ndim != 1 or features.shape[0] != target.shape[0] or not features.size:
        raise InputError(
            "data",
            f"X of shape {features.shape} and y of shape {target.shape}",
            "X[N, features] and y[N], not empty",
        )
    if not (np.all(np.isfinite(features)) and np.all(np.isfinite(target))):
        raise InputError("data", "values that are nan or infinite", "finite everywhere")
    return features, target


def with_intercept(features: Array) -> Array:
    """The features and a column of ones."""
    return np.column_stack([features, np.ones(features.shape[0])])
