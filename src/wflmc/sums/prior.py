"""A device's share of a Gaussian prior, whose gradient is public.

It is added to the gradients of a device's records in all models with such a prior
(`wflmc.sums.gaussian`, `softmax`, `softmax_classes` and `softmax_rows`), each of which
computes it in the layout of its own gradients.
"""

from typing import NamedTuple

import jax

Curvature = jax.Array | float
"""A device's share of the prior's curvature: a number, or a matrix [d, d]."""


class DevicePrior(NamedTuple):
    """A device's share of the prior N(θ₀, Λ⁻¹), with the gradient Λ(θ − θ₀)/K.

    The shares of all K devices add up to the prior.
    """

    curvature: Curvature
    """Λ/K, a number where the prior is the same in all directions, else a matrix [d, d]
    that all classes share."""
    mean: jax.Array | None = None
    """θ₀[m]; None: zero."""
