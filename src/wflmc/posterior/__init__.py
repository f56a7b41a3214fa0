"""Models and their data on devices: clipped gradient sums, μ and L, and exact laws where they exist."""

from wflmc.posterior.gaussian import GaussianPosterior, gaussian_regression
from wflmc.posterior.law import Gaussian, pool, w2_squared

__all__ = ["Gaussian", "GaussianPosterior", "gaussian_regression", "pool", "w2_squared"]
