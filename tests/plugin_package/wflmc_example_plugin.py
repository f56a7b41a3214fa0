"""What another package may add to wflmc: a policy, a fading law and a model."""

import jax.numpy as jnp
import numpy as np

import wflmc
from wflmc.channel import Fading
from wflmc.planning import Allocation, PowerPolicy


def half(problem):
    return Allocation(0.5 * problem.cap)


HALF = PowerPolicy(half, private=False)


def two_rays(power):
    """A strong ray and one that fades: |h|² has mean `power`."""

    def draw(generator, rounds, devices):
        return np.sqrt(np.asarray(power)) * np.sqrt(
            0.5 + generator.exponential(0.5, (rounds, devices))
        )

    return Fading("two-rays", draw)


def poisson(devices=4, seed=0):
    """Counts with one rate."""
    counts = np.random.default_rng(seed).poisson(3.0, 40)
    return wflmc.posterior_from(
        lambda rate, count: count * rate - jnp.exp(rate),
        lambda rate: -0.5 * rate**2,
        counts,
        initial=0.0,
        devices=devices,
    )
