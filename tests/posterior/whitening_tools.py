"""What tests of whitened coordinates share."""

from __future__ import annotations

import jax
import numpy as np

import wflmc

KEY = jax.random.key(3)


def correlated(examples=60, dim=4, seed=0):
    """Return features of different scales, correlated and with means away from zero,
    and targets.
    """
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((dim, dim)) * np.logspace(0, -1.2, dim)
    X = rng.standard_normal((examples, dim)) @ mix + rng.standard_normal(dim)
    return X, X @ rng.standard_normal(dim) + 0.5 + rng.standard_normal(examples)


def gaussian(**keywords):
    """Return the regression of these data on five devices."""
    X, y = correlated()
    return wflmc.gaussian_regression(KEY, 5, X=X, y=y, **keywords)
