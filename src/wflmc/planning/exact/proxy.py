"""A public stand-in for a posterior, so that a plan for the exact law need not look at private data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from wflmc.dynamics import DiagonalResponse, Motion, diagonal_response
from wflmc.errors import InputError


@dataclass(frozen=True, eq=False)
class Proxy:
    """A Gaussian posterior as one would guess it without the data: from a public set, or from what is known of them.

    All devices are taken to hold alike data, so that only the size of a round's weights matters.
    """

    precision: ArrayLike
    """Eigenvalues of the Hessian of f, prior included: [m], or one for all directions."""
    mean_sq: ArrayLike = 0.0
    """‖posterior mean‖², taken to lie in all directions alike; or its squares along each, [m]."""
    prior_std: float = 1.0
    """Of θ[0] with init = "prior"."""

    def response(self, dim: int, motion: Motion, burn_in: int) -> DiagonalResponse:
        """How the law of a chain of `dim` parameters on this posterior answers to noise."""
        precision, mean_sq = (np.asarray(given, dtype=float) for given in (self.precision, self.mean_sq))
        for name, given, least in (("precision", precision, 1e-50), ("mean_sq", mean_sq, 0.0)):
            if given.shape not in ((), (dim,)) or not np.all((given >= least) & (given < 1e50)):
                allowed = f"finite, {'above' if least else 'at least'} 0, and one number or {dim}, one per parameter"
                raise InputError(f"proxy.{name}", getattr(self, name), allowed)
        each = mean_sq if mean_sq.ndim else np.full(dim, float(mean_sq) / dim)
        start = self.prior_std**2 if motion.init == "prior" else 0.0
        return diagonal_response(np.broadcast_to(precision, (dim,)), each, start, motion, burn_in)
