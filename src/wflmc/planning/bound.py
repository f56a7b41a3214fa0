"""The convergence bound on W2² to the posterior, as a function of transmit power.

The variable is a[s] = α[s]²/N0, in which noise power drops out: the channel puts
η²(K/K_a)²/a on the update, device k's budget reads
Σ_s active[s, k] a[s] ≤ B_k = R_k/(2 s_k²) with s_k half the change that its adjacency
allows (ℓ_k for a device that is replaced), and both power and the noise that Langevin
sampling needs are caps on a.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import OVERDAMPED, Array, Contraction, Dynamics, Response
from wflmc.planning.solvers.program import HEADROOM, PowerProgram
from wflmc.support.recursion import first_order

BOUNDS = ("corrected", "paper")
"""The names that `Policy.bound` may have."""
MIN_TEMPERATURE = 1e-9
"""The temperature at which the Langevin cap of rounds at temperature 0 is taken.

They need no noise at all, and an ideal link would transmit with infinite power.
"""
SERVER_NOISE_TOLERANCE = 0.5e-9
"""Missing noise below this fraction of what a round needs is taken as 0.

At the Langevin cap channel noise is all that is needed, up to rounding, which the
server should not add.
"""


def discretization_error(step_size: Array, L: float, dim: int) -> Array:
    """Return the error of finite steps in the bound, η⁴L³m/3 + η³L²m (Lemma 2).

    It is added in every round, in the units of B/κ, and is what a chain without channel
    noise and with all devices active is left with.

    Args:
        step_size: η, of any shape.
        L: smoothness of the cost.
        dim: m, the number of parameters.

    Returns:
        The error, of the shape of η.
    """
    return step_size**4 * L**3 * dim / 3 + step_size**3 * L**2 * dim


class Allocation(NamedTuple):
    """The power of every round."""

    a: Array
    """α²/N0, [S]."""
    lower_bound: float | None = None
    """A proven lower bound on the objective of all powers within the limits.

    None where the policy claims no optimum.
    """


@dataclass(frozen=True)
class Problem:
    """Everything that decides the power of a plan, for given active sets."""

    contraction: Contraction
    """Of every round, each [S]."""
    step_size: Array
    """η[S]."""
    burn_in: int
    """S_b."""
    objective: str
    """worst, average, exact or transcript."""
    initial_bound: float
    """B[0], W2² between start and posterior; nan where no bound uses it."""
    error: Array
    """Discretization and participation error per round, in the units of B / κ, [S]."""
    noise_weight: float
    """Factor of excess noise in the bound: 1 (paper) or m (corrected)."""
    scale: Array
    """K/K_a, [S]."""
    active: NDArray[Any]
    """Who transmits, [S, K]; in forecasts the probability of it."""
    budget: Array
    """B_k, [K], infinite without privacy."""
    power_cap: Array
    """Largest a that the weakest active device affords, [S]; infinite on an ideal
    link."""
    floor: Array
    """Smallest a, [S]: a limit on the noise of a round; 0 without one."""
    dim: int
    """m, the number of parameters."""
    temperature: Array
    """τ[S], the noise that a round is filled up to over Langevin's own.

    It is 1 in kept rounds, and may be below 1 in burn-in.
    """
    noise_limit: float = np.inf
    """M of that limit: √m σ ≤ M times what all clipped gradients can move θ in a
    round."""
    solver: str = "own"
    """own or cvxpy."""
    response: Response | None = None
    """With the objective "exact": how the law of the kept rounds depends on the noise
    of all."""
    fills_up: bool = True
    """Whether the server adds what channel noise lacks of τ 2η.

    It does not where the optimum of the exact law chooses all noise.
    """
    dynamics: Dynamics = OVERDAMPED
    """Overdamped or kinetic."""
    contracts: bool = True
    """Whether steps are below what the posterior's L allows.

    Longer ones are planned without a bound where that L is known to be loose, as they
    may be stable nevertheless.
    """

    @property
    def kick(self) -> Array:
        """Return the factor of the gradient in the update, [S].

        It is η for overdamped steps, and (h/2)(1 + e) of the velocity for kinetic ones,
        with e = exp(−γ_f h).
        """
        return np.asarray(self.dynamics.kick(self.step_size))

    def channel_noise(self, a: Array) -> Array:
        """Return the variance that the channel's noise puts on the update.

        It is (kick K/K_a)²/a: z of variance N0 enters the update with the factor
        kick K/(α K_a), and a = α²/N0.

        Args:
            a: power of every round, above 0, [S].

        Returns:
            The variance in every coordinate, [S].
        """
        return (self.kick * self.scale) ** 2 / a

    @property
    def langevin_noise(self) -> Array:
        """Return the variance of the noise that samples of the posterior need, [S].

        It is 2η (Lemma 3), or 1 − e² of the velocity with kinetic dynamics.
        """
        return np.asarray(self.dynamics.langevin_noise(self.step_size))

    @property
    def required_noise(self) -> Array:
        """Return the variance of the noise that a round is filled up to, [S].

        It is τ 2η: Langevin's own in kept rounds, and less in burn-in at a temperature
        τ below 1.
        """
        return self.temperature * self.langevin_noise

    @property
    def has_bound(self) -> bool:
        """Return whether Proposition 1 bounds W2² for these rounds.

        It does for overdamped dynamics with steps below 2/L. Otherwise `bound`, `base`
        and `program` say nothing.
        """
        return self.dynamics.has_bound and self.contracts

    @property
    def rounds(self) -> int:
        """Return S, the number of rounds, burn-in included."""
        return int(self.scale.size)

    @property
    def lmc_cap(self) -> Array:
        """Return a at which channel noise is the noise that a round needs, [S].

        By Lemma 3 a round needs noise of variance 2η, which the channel supplies at
        a = η(K/K_a)²/2, with `Dynamics.noise_step` as η. More power would leave less,
        and the server would have to add the difference: it costs privacy and gains
        nothing. A round of burn-in at temperature τ needs τ 2η, and its cap is 1/τ
        times higher.
        """
        noise_step = self.dynamics.noise_step(self.step_size)
        temperature = np.maximum(self.temperature, MIN_TEMPERATURE)
        return np.asarray(noise_step * self.scale**2 / 2 / temperature)

    @property
    def cap(self) -> Array:
        """Return the smaller of the power cap and the Langevin cap, [S].

        No plan for the bound has more power in a round; plans for the exact law may go
        beyond the Langevin cap.
        """
        return np.minimum(self.power_cap, self.lmc_cap)

    @property
    def cost(self) -> Array:
        """Return the coefficient of 1/a in the bound, κ q η² (K/K_a)², [S].

        q is `noise_weight`: 1 in the bound as printed, and m as corrected
        (docs/explanation/theory.md, Lemma 1). The term of round s in B[s'] is
        cost[s]/a[s] times ρ^{2(s'−s)}.
        """
        squared_step = (self.step_size * self.scale) ** 2
        return self.contraction.kappa * self.noise_weight * squared_step

    def bound(self, a: Array) -> Array:
        """Return the bound on W2² of every round (Proposition 1).

        B[s] = ρ² B[s−1] + κ (error + q max(0, η²(K/K_a)²/a − 2η) + cold) from
        B[0] = `initial_bound`, with q = 1 as printed and q = m as corrected, and cold
        as of `cold_error`. It holds while no gradient is clipped.

        Args:
            a: power of every round, above 0, [S].

        Returns:
            B[1..S].
        """
        excess = np.maximum(0.0, self.channel_noise(a) - 2 * self.step_size)
        noise = self.error + self.noise_weight * excess + self.cold_error(a)
        kappa = self.contraction.kappa
        return first_order(kappa * noise, self.contraction.rho**2, self.initial_bound)

    def cold_error(self, a: Array) -> Array:
        """Return the error of rounds with less noise than Langevin's, in the bound.

        Moved by the same standard normal vector, a step with noise of variance v < 2η
        and one with 2η differ by m(√(2η) − √v)² on average
        (docs/explanation/theory.md, Proposition 1). v is all the noise of the round,
        the server's included, so that rounds at temperature 1 have no such error.

        Args:
            a: power of every round, above 0, [S].

        Returns:
            The error in the units of `error`, at least 0, [S].
        """
        langevin_noise = 2 * self.step_size
        noise = self.channel_noise(a) + self.server_noise(a)
        is_cold = langevin_noise - noise > SERVER_NOISE_TOLERANCE * langevin_noise
        difference = np.sqrt(langevin_noise) - np.sqrt(noise)
        return np.where(is_cold, self.dim * difference**2, 0.0)

    def server_noise(self, a: Array) -> Array:
        """Return the variance of the noise that the server adds (Sec. III-A).

        β = max(0, τ 2η − η²(K/K_a)²/a): what channel noise lacks of what a round needs.
        Less than `SERVER_NOISE_TOLERANCE` is taken as 0. It is 0 in all rounds where
        the optimum of the exact law chooses all noise.

        Args:
            a: power of every round, above 0, [S].

        Returns:
            β[S].
        """
        if not self.fills_up:
            return np.zeros(a.size)
        required = self.required_noise
        missing = required - self.channel_noise(a)
        return np.where(missing > SERVER_NOISE_TOLERANCE * required, missing, 0.0)

    def base(self) -> Array:
        """Return the part of the bound that power does not change.

        Below the Langevin cap the excess is exactly η²(K/K_a)²/a − 2η, so that the
        bound is base + Σ ρ^{2(s'−s)} cost/a with the base from B[0], errors and −2ηq.
        It may be negative.

        Returns:
            [S], for B[1..S].
        """
        saved_noise = 2 * self.step_size * self.noise_weight
        fixed = self.contraction.kappa * (self.error - saved_noise)
        return first_order(fixed, self.contraction.rho**2, self.initial_bound)

    def value(self, bound: Array) -> float:
        """Return the objective, the worst or the average of the bound after burn-in.

        Any objective but "worst" is averaged here; those of the exact law and of
        transcripts are computed elsewhere.

        Args:
            bound: B[1..S].

        Returns:
            A distance W2².
        """
        kept_bounds = bound[self.burn_in :]
        if self.objective == "worst":
            return float(kept_bounds.max())
        return float(kept_bounds.mean())

    def program(self) -> PowerProgram:
        """Return the problem as the general solver takes it.

        It is about the bound for powers up to both caps, in which it is convex. The
        solver knows nothing of steps, devices' gradients or noise: all of it is in
        `cost`, `base` and ρ. It holds at temperature 1 alone: colder rounds only add to
        the bound.

        Returns:
            The arrays of the problem, those of all rounds.
        """
        return PowerProgram(
            active=self.active,
            budget=self.budget,
            cap=self.cap,
            cost=self.cost,
            rho=self.contraction.rho,
            base=self.base(),
            floor=self.floor,
            burn_in=self.burn_in,
            objective=self.objective,
        )

    def within_budget(self, a: Array) -> Array:
        """Return the same profile, scaled down until no device overspends.

        One factor is applied to all rounds, so that Σ_s active a stops a relative
        1e-12 short of every budget. A profile that fits is returned as it is.

        Args:
            a: power of every round, [S].

        Returns:
            Power within all budgets, [S].
        """
        spent = a @ self.active
        limit = self.budget * (1 - HEADROOM)
        is_over = spent > limit
        if not is_over.any():
            return a
        return a * np.min(limit[is_over] / spent[is_over]) * (1 - 1e-15)
