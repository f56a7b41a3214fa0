"""Posteriors of custom models, of two JAX functions."""

from wflmc.posterior.custom.build import posterior_from
from wflmc.posterior.custom.posterior import CustomPosterior

__all__ = ["CustomPosterior", "posterior_from"]
