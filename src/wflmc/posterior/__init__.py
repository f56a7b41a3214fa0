"""Models and their data on devices: clipped gradient sums, μ and L, and exact laws where they exist.

`wflmc.posterior` may be called: it makes the posterior of a model of one's own, see `OwnPosterior`.
"""

import sys
from types import ModuleType
from typing import Any

from wflmc.posterior import own
from wflmc.posterior.coordinates import Coordinates, coordinates, whitening
from wflmc.posterior.gaussian import GaussianPosterior, gaussian_regression
from wflmc.posterior.law import Gaussian, pool, w2_squared
from wflmc.posterior.own_posterior import OwnPosterior
from wflmc.posterior.softmax import SoftmaxPosterior, softmax_regression

__all__ = [
    "Coordinates",
    "Gaussian",
    "GaussianPosterior",
    "OwnPosterior",
    "SoftmaxPosterior",
    "coordinates",
    "gaussian_regression",
    "pool",
    "softmax_regression",
    "w2_squared",
    "whitening",
]


class _Callable(ModuleType):
    """A package that may be called."""

    def __call__(self, *arguments: Any, **keywords: Any) -> OwnPosterior:
        return own.posterior(*arguments, **keywords)

    __call__.__doc__ = own.posterior.__doc__


sys.modules[__name__].__class__ = _Callable
