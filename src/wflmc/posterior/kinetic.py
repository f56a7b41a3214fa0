"""The exact law of kinetic Langevin chains with affine gradients: an affine chain on (θ, v)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wflmc.posterior.law import Gaussian

Array = NDArray[np.float64]


def with_velocity(start: Gaussian) -> Gaussian:
    """The law of (θ, v) at the start: v ~ N(0, I), independent of θ."""
    none, one = np.zeros_like(start.covariance), np.eye(start.mean.size)
    covariance = np.block([[start.covariance, none], [none, one]])
    return Gaussian(np.concatenate([start.mean, np.zeros_like(start.mean)]), covariance)


def kinetic_round(step: Array, friction: Array, hessian: Array, linear: Array) -> tuple[Array, Array, Array]:
    """A round on (θ, v) with gradients Hθ − b: matrix [..., 2m, 2m], offset [..., 2m], how noise enters [..., 2m, m].

    The velocity becomes v' = e v − k (H (θ + h v/2) − b) + noise with k = h (1 + e)/2, and θ becomes θ + h (v + v')/2.

    Args:
        step: h[..., S]; friction: γ_f[..., 1] or one number; hessian: H[..., S, m, m]; linear: b[..., S, m].
    """
    half, decay = 0.5 * step[..., None, None], np.exp(-friction * step)[..., None, None]
    kick = half * (1 + decay)
    pull, push = kick * hessian, kick[..., 0] * linear
    one = np.broadcast_to(np.eye(hessian.shape[-1]), hessian.shape)
    fresh = np.concatenate([-pull, decay * one - half * pull], axis=-1)
    return (
        np.concatenate([np.concatenate([one, half * one], axis=-1) + half * fresh, fresh], axis=-2),
        np.concatenate([half[..., 0] * push, push], axis=-1),
        np.concatenate([half * one, one], axis=-2),
    )
