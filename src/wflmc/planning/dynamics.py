r"""What the server makes of a received gradient: overdamped Langevin steps, or kinetic ones with a velocity.

Kinetic (underdamped) Langevin dynamics, dθ = v dt, dv = −∇f dt − γ_f v dt + √(2γ_f) dW, go in steps of h with one
gradient each: half a drift, half a kick, friction, half a kick with the same gradient, half a drift,

    θ ← θ + (h/2) v,    v ← e v − (h/2)(1 + e) ĝ(θ) + √(1 − e²) ξ,    θ ← θ + (h/2) v,    e = exp(−γ_f h).

The channel's noise in ĝ is part of the 1 − e². In these functions a friction of None stands for overdamped steps,
θ ← θ − η ĝ + √(2η) ξ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError
from wflmc.planning.bound import Contraction

Array = NDArray[np.float64]

DYNAMICS = ("overdamped", "kinetic")


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
