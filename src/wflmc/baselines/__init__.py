"""Protocols that are not wireless federated Langevin Monte Carlo, for comparison."""

from wflmc.baselines.descent import gradient_descent
from wflmc.baselines.one_bit import sbfl

__all__ = ["gradient_descent", "sbfl"]
