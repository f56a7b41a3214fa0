r"""What the server makes of a received gradient: overdamped Langevin steps, or kinetic ones with a velocity.

Kinetic (underdamped) Langevin dynamics, dθ = v dt, dv = −∇f dt − γ_f v dt + √(2γ_f) dW, go in steps of h with one
gradient each: half a drift, half a kick, friction, half a kick with the same gradient, half a drift,

    θ ← θ + (h/2) v,    v ← e v − (h/2)(1 + e) ĝ(θ) + √(1 − e²) ξ,    θ ← θ + (h/2) v,    e = exp(−γ_f h).

The channel's noise in ĝ is part of the 1 − e². In these functions a friction of None stands for overdamped steps,
θ ← θ − η ĝ + √(2η) ξ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError

Array = NDArray[np.float64]

DYNAMICS = ("overdamped", "kinetic")


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


def kick(step_size: Any, friction: float | None) -> Any:
    """The factor of the gradient: η on θ, or (h/2)(1 + e) on the velocity."""
    return step_size if friction is None else 0.5 * step_size * (1 + np.exp(-friction * step_size))


def langevin_noise(step_size: Any, friction: float | None) -> Any:
    """Variance of the noise that a round needs: 2η on θ, or 1 − e² on the velocity."""
    return 2 * step_size if friction is None else -np.expm1(-2 * friction * step_size)


def noise_step(step_size: Any, friction: float | None) -> Any:
    """The overdamped step that wants as much noise in the gradient, 2/η = (4/h²) tanh(γ_f h/2)."""
    return step_size if friction is None else step_size**2 / (2 * np.tanh(0.5 * friction * step_size))


def kinetic_rate(step_size: Array, friction: float, mu: float, L: float) -> Contraction:
    """γ[S]: the factor by which the mean forgets its start in a round, in the long run. No bound on W2² is known.

    Along an eigenvector of the Hessian with eigenvalue λ a round has eigenvalues z, z² − (1 + e)(1 − h²λ/2) z + e = 0.
    Both are inside the unit circle while h²λ < 4, and the larger one is largest at λ = μ or λ = L.
    """
    if not 0 < mu <= L:
        raise InputError("mu", mu, f"above 0 and at most L = {L:g}")
    wrong = ~((step_size > 0) & (step_size < 2 / L**0.5))
    if wrong.any():
        allowed = f"above 0 and below 2/√L = {2 / L**0.5:.6g} with dynamics = 'kinetic'"
        raise InputError("step_size", float(step_size[wrong][0]), allowed)
    if not 0 < friction < np.inf:
        raise InputError("friction", friction, "finite and above 0")
    decay = np.exp(-friction * step_size)
    half_trace = 0.5 * (1 + decay) * (1 - 0.5 * step_size**2 * np.array([[mu], [L]]))
    root = np.sqrt((half_trace**2 - decay).astype(complex))
    gamma = np.abs([half_trace + root, half_trace - root]).max((0, 1))
    if not np.all(gamma < 1 - 1e-12):
        first = float(step_size[np.argmax(gamma)])
        raise InputError(
            "step_size", first, f"such that the start is forgotten: with friction = {friction:.3g} it is not"
        )
    unknown = np.full_like(gamma, np.nan)
    return Contraction(gamma, unknown, unknown, unknown)
