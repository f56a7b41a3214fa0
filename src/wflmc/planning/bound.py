"""The convergence bound on W2² to the posterior, and the constants it contracts with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError

Array = NDArray[np.float64]

BOUNDS = ("corrected", "paper")


class Contraction(NamedTuple):
    """How fast a Langevin step forgets: γ (Proposition 1), ρ = (1+γ)/2 and κ = 2(1+γ)/(1−γ), one for each step size."""

    gamma: Array
    rho: Array
    kappa: Array
    log_rho: Array


def contraction(step_size: ArrayLike, mu: float, L: float) -> Contraction:
    """Constants of the bound for 0 < η < 2/L, one η or one per round; at η = 2/L the chain no longer contracts."""
    eta = np.asarray(step_size, dtype=float)
    if not 0 < mu <= L:
        raise InputError("mu", mu, f"above 0 and at most L = {L:g}")
    _each("step_size", eta, (eta > 0) & (eta < 2 / L), f"above 0 and below 2/L = {2 / L:.6g}")
    # 1 − γ directly, not by subtraction: it is tiny for small steps and κ divides by it.
    distance = np.where(eta <= 2 / (mu + L), eta * mu, 2 - eta * L)
    least = f"large enough to contract: step_size × mu = {distance.min():.3g} is too small"
    if mu < 1e-9 * L:
        least += f" (L/mu = {L / mu:.1g}, as of features that are not scaled: standardise them)"
    _each("step_size", eta, distance >= 1e-12, least)
    gamma = 1 - distance
    return Contraction(gamma, 1 - distance / 2, 2 * (1 + gamma) / distance, np.log1p(-distance / 2))


def _each(key: str, value: Array, holds: NDArray[np.bool_], allowed: str) -> None:
    """Refuse the first value that does not hold, and say of which round it is where they differ."""
    if not np.all(holds):
        at = int(np.argmin(np.ravel(holds)))
        where = "" if np.all(value == value.flat[0]) else f" in every round, also in round {at + 1}"
        raise InputError(key, float(value.flat[at]), allowed + where)


def noise_weight(bound: str, dim: int) -> float:
    """Factor of the excess noise β̃: the paper prints 1 where E‖√β̃ Δ‖² = m β̃ (Lemma 1)."""
    if bound not in BOUNDS:
        raise InputError("bound", bound, f"one of {', '.join(BOUNDS)}")
    return float(dim) if bound == "corrected" else 1.0


def discretization_error(step_size: Array, L: float, dim: int) -> Array:
    """η⁴L³m/3 + η³L²m, Lemma 2."""
    return step_size**4 * L**3 * dim / 3 + step_size**3 * L**2 * dim
