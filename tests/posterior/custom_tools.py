"""What tests of own models share."""

import jax
import jax.numpy as jnp
import numpy as np

import wflmc

KEY = jax.random.key(3)
RAGGED = "dirichlet:0.5"
GAUSSIAN = wflmc.gaussian_regression(KEY, devices=6, examples=90, partition=RAGGED)


def gaussian_likelihood(theta, example):
    u, v = example
    return -0.5 * (v - theta @ u) ** 2


def gaussian_prior(theta):
    return -0.5 * theta @ theta


def owners_of(posterior):
    return np.repeat(np.arange(posterior.devices), posterior.sizes)


def rows_of(posterior, target):
    """The examples of a posterior that holds them padded, device by device."""
    real = np.arange(posterior.features.shape[1]) < posterior.sizes[:, None]
    return posterior.features[real], target[real]


def as_own(known, **keywords):
    """A Gaussian posterior, written as a log-likelihood."""
    data = rows_of(known, known.target)
    return wflmc.posterior_from(
        gaussian_likelihood,
        gaussian_prior,
        data,
        initial=jnp.zeros(known.dim),
        devices=owners_of(known),
        **keywords,
    )
