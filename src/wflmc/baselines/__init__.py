"""Protocols that are not wireless federated Langevin Monte Carlo, for comparison."""

from wflmc.baselines.sbfl import sbfl

__all__ = ["sbfl"]
