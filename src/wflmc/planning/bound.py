"""The convergence bound on W2² to the posterior, and the power problem: the bound as a function of transmit power.

The variable is a[s] = α[s]²/N0, in which noise power drops out: the channel puts η²(K/K_a)²/a on the update,
device k's budget reads Σ_s active[s, k] a[s] ≤ B_k = R_k/(2ℓ_k²), and both power and the noise that Langevin
sampling needs are caps on a.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import OVERDAMPED, Array, Contraction, Dynamics, Response
from wflmc.planning.solvers.program import HEADROOM, Program
from wflmc.support.recursion import first_order

BOUNDS = ("corrected", "paper")


def discretization_error(step_size: Array, L: float, dim: int) -> Array:
    """η⁴L³m/3 + η³L²m, Lemma 2."""
    return step_size**4 * L**3 * dim / 3 + step_size**3 * L**2 * dim


class Allocation(NamedTuple):
    """a[S], and a proven lower bound on the objective where the policy claims an optimum."""

    a: Array
    lower_bound: float | None = None


@dataclass(frozen=True)
class Problem:
    """Everything that decides the power of a plan, for given active sets."""

    contraction: Contraction
    """Of every round, each [S]."""
    step_size: Array
    """η[S]."""
    burn_in: int
    objective: str
    start: float
    """B[0]."""
    error: Array
    """Discretisation and participation error per round, in the units of B / κ, [S]."""
    noise_weight: float
    scale: Array
    """K/K_a, [S]."""
    active: NDArray[Any]
    """Who sends, [S, K]; in forecasts the probability of it."""
    budget: Array
    """B_k, [K], infinite without privacy."""
    power_cap: Array
    """Largest a the weakest active device can afford, [S]; infinite on an ideal link."""
    floor: Array
    """Smallest a, [S]: a limit on the noise of a round; 0 without one."""
    noise_limit: float = np.inf
    """M of that limit: √m σ at most M times what all clipped gradients can move θ in a round."""
    solver: str = "own"
    response: Response | None = None
    """With the objective "exact": how the law of the kept rounds follows from the noise of all."""
    fills_up: bool = True
    """Whether the server adds what channel noise lacks of 2η; not where the optimum of the exact law chooses it all."""
    dynamics: Dynamics = OVERDAMPED
    contracts: bool = True
    """Whether steps are below what the posterior's L allows; a looser L than need be may forbid steps that work."""

    @property
    def kick(self) -> Array:
        """The factor of the gradient in the update, [S]."""
        return np.asarray(self.dynamics.kick(self.step_size))

    @property
    def langevin_noise(self) -> Array:
        """The variance of the noise that a round needs, [S]."""
        return np.asarray(self.dynamics.langevin_noise(self.step_size))

    @property
    def has_bound(self) -> bool:
        """Whether a bound on W2² is known."""
        return self.dynamics.has_bound and self.contracts

    @property
    def rounds(self) -> int:
        """S."""
        return int(self.scale.size)

    @property
    def lmc_cap(self) -> Array:
        """a at which the channel noise is exactly what Langevin needs, 2η by Lemma 3, [S]."""
        return np.asarray(self.dynamics.noise_step(self.step_size) * self.scale**2 / 2)

    @property
    def cap(self) -> Array:
        """The smaller of both caps, [S]."""
        return np.minimum(self.power_cap, self.lmc_cap)

    @property
    def cost(self) -> Array:
        """Coefficient of 1/a in the bound: κ q η² (K/K_a)², [S]."""
        return (
            self.contraction.kappa
            * self.noise_weight
            * (self.step_size * self.scale) ** 2
        )

    def bound(self, a: Array) -> Array:
        """B[1..S], Proposition 1."""
        excess = np.maximum(
            0.0, (self.step_size * self.scale) ** 2 / a - 2 * self.step_size
        )
        noise = self.error + self.noise_weight * excess
        return first_order(
            self.contraction.kappa * noise, self.contraction.rho**2, self.start
        )

    def server_noise(self, a: Array) -> Array:
        """β = max(0, 2η − channel part) (Sec. III-A); rounding at the Langevin cap is not noise to add."""
        missing = self.langevin_noise - (self.kick * self.scale) ** 2 / a
        return (
            np.where(missing > 0.5e-9 * self.langevin_noise, missing, 0.0)
            if self.fills_up
            else np.zeros(a.size)
        )

    def base(self) -> Array:
        """B[1..S] without the terms cost/a, for a below the Langevin cap, where the excess is c/a − 2η."""
        fixed = self.contraction.kappa * (
            self.error - 2 * self.step_size * self.noise_weight
        )
        return first_order(fixed, self.contraction.rho**2, self.start)

    def value(self, bound: Array) -> float:
        """The objective: the worst or the average of the bound after burn-in."""
        kept = bound[self.burn_in :]
        return float(kept.max() if self.objective == "worst" else kept.mean())

    def program(self) -> Program:
        """The problem as the general solver takes it."""
        rounds = self.cap, self.cost, self.contraction.rho, self.base(), self.floor
        return Program(self.active, self.budget, *rounds, self.burn_in, self.objective)

    def within_budget(self, a: Array) -> Array:
        """The same profile scaled down, if need be, until no device spends more than its budget."""
        spent = a @ self.active
        limit = self.budget * (1 - HEADROOM)
        over = spent > limit
        return a * np.min(limit[over] / spent[over]) * (1 - 1e-15) if over.any() else a
