"""Models and their data on devices: clipped gradient sums, μ and L, and exact laws where they exist.

`wflmc.posterior` may be called: it makes the posterior of a model of one's own, see `OwnPosterior`.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from wflmc.posterior import own
from wflmc.posterior.base import HasLaw, Posterior, Predicts
from wflmc.posterior.coordinates import Coordinates, coordinates, whitening
from wflmc.posterior.gaussian import GaussianPosterior, gaussian_regression
from wflmc.posterior.law import Gaussian, pool, w2_squared
from wflmc.posterior.own_posterior import OwnPosterior
from wflmc.posterior.response import Motion
from wflmc.posterior.softmax import SoftmaxPosterior, softmax_regression

__all__ = [
    "Coordinates",
    "Gaussian",
    "GaussianPosterior",
    "HasLaw",
    "Motion",
    "OwnPosterior",
    "Posterior",
    "Predicts",
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


def _shown_as(call: Any, function: Any) -> None:
    """What editors and `inspect` tell of a call."""
    given = inspect.signature(function)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    call.__doc__, call.__signature__ = function.__doc__, given.replace(parameters=[itself, *given.parameters.values()])


_shown_as(_Callable.__call__, own.posterior)
sys.modules[__name__].__class__ = _Callable
