"""Models and their data on devices: clipped gradient sums, μ and L, and exact laws."""

from wflmc.dynamics import Motion
from wflmc.posterior.base import HasLaw, Posterior, Predicts
from wflmc.posterior.coordinates import Coordinates, coordinates, whitening
from wflmc.posterior.custom import CustomPosterior, posterior_from
from wflmc.posterior.gaussian import GaussianPosterior, gaussian_regression
from wflmc.posterior.law import Gaussian, pool, w2_squared
from wflmc.posterior.regression import Regression
from wflmc.posterior.softmax import SoftmaxPosterior, softmax_regression

__all__ = [
    "Coordinates",
    "CustomPosterior",
    "Gaussian",
    "GaussianPosterior",
    "HasLaw",
    "Motion",
    "Posterior",
    "Predicts",
    "Regression",
    "SoftmaxPosterior",
    "coordinates",
    "gaussian_regression",
    "pool",
    "posterior_from",
    "softmax_regression",
    "w2_squared",
    "whitening",
]
