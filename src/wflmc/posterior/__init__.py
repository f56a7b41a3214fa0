"""Models and their data on devices: clipped gradient sums, μ and L, and exact laws where they exist."""

from wflmc.posterior.coordinates import Coordinates, coordinates, whitening
from wflmc.posterior.gaussian import GaussianPosterior, gaussian_regression
from wflmc.posterior.law import Gaussian, pool, w2_squared
from wflmc.posterior.softmax import SoftmaxPosterior, softmax_regression

__all__ = [
    "Coordinates",
    "Gaussian",
    "GaussianPosterior",
    "SoftmaxPosterior",
    "coordinates",
    "gaussian_regression",
    "pool",
    "softmax_regression",
    "w2_squared",
    "whitening",
]
