"""Any JAX model as a posterior, made by `wflmc.posterior_from`."""

from wflmc.posterior.custom.posterior import CustomPosterior, posterior_from

__all__ = ["CustomPosterior", "posterior_from"]
