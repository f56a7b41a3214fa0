"""The convergence bound on W2² to the posterior, and the constants it contracts with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError

Array = NDArray[np.float64]

BOUNDS = ("corrected", "paper")


class Contraction(NamedTuple):
    """How fast a Langevin step forgets: γ (Proposition 1), ρ = (1+γ)/2 and κ = 2(1+γ)/(1−γ)."""

    gamma: float
    rho: float
    kappa: float
    log_rho: float


def contraction(step_size: float, mu: float, L: float) -> Contraction:
    """Constants of the bound for 0 < η < 2/L; at η = 2/L the chain no longer contracts."""
    if not 0 < mu <= L:
        raise InputError("mu", mu, f"above 0 and at most L = {L:g}")
    if not 0 < step_size < 2 / L:
        raise InputError("step_size", step_size, f"above 0 and below 2/L = {2 / L:.6g}")
    # 1 − γ directly, not by subtraction: it is tiny for small steps and κ divides by it.
    distance = step_size * mu if step_size <= 2 / (mu + L) else 2 - step_size * L
    if distance < 1e-12:
        raise InputError(
            "step_size", step_size, f"large enough to contract: step_size × mu = {distance:.3g} is too small"
        )
    gamma = 1 - distance
    return Contraction(gamma, 1 - distance / 2, 2 * (1 + gamma) / distance, float(np.log1p(-distance / 2)))


def noise_weight(bound: str, dim: int) -> float:
    """Factor of the excess noise β̃: the paper prints 1 where E‖√β̃ Δ‖² = m β̃ (Lemma 1)."""
    if bound not in BOUNDS:
        raise InputError("bound", bound, f"one of {', '.join(BOUNDS)}")
    return float(dim) if bound == "corrected" else 1.0


def discretization_error(step_size: float, L: float, dim: int) -> float:
    """η⁴L³m/3 + η³L²m, Lemma 2."""
    return step_size**4 * L**3 * dim / 3 + step_size**3 * L**2 * dim
