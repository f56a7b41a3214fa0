"""What tests of custom models share."""

import jax
import jax.numpy as jnp
import numpy as np

import wflmc

KEY = jax.random.key(3)
RAGGED = "dirichlet:0.5"
GAUSSIAN = wflmc.gaussian_regression(KEY, devices=6, examples=90, partition=RAGGED)


def gaussian_likelihood(theta, example):
    """Return log N(v; θᵀu, 1) of an example (u, v), up to a constant."""
    u, v = example
    return -0.5 * (v - theta @ u) ** 2


def gaussian_prior(theta):
    """Return log N(θ; 0, 1), up to a constant."""
    return -0.5 * theta @ theta


def owners_of(posterior):
    """Return the device of every row of `rows_of`."""
    return np.repeat(np.arange(posterior.devices), posterior.sizes)


def rows_of(posterior, target):
    """Return features and targets of a posterior without their padding, device after
    device.
    """
    real = np.arange(posterior.features.shape[1]) < posterior.sizes[:, None]
    return posterior.features[real], target[real]


def as_custom(known, **keywords):
    """Return a Gaussian posterior as a custom model of the same examples on the same
    devices.
    """
    data = rows_of(known, known.target)
    return wflmc.posterior_from(
        gaussian_likelihood,
        gaussian_prior,
        data,
        initial=jnp.zeros(known.dim),
        devices=owners_of(known),
        **keywords,
    )
