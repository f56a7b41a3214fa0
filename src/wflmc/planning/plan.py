"""The plan: all that the sampler needs, and what is known about it before anything is sent."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Link
from wflmc.errors import InputError
from wflmc.planning import single_sample
from wflmc.planning.bound import contraction, discretization_error, noise_weight
from wflmc.planning.policies import Policy, policy
from wflmc.planning.problem import Problem
from wflmc.planning.schedule import everyone, participation_error
from wflmc.planning.schedule import schedule as make_schedule
from wflmc.privacy import Privacy, round_loss

Array = NDArray[np.float64]


class Target(Protocol):
    """What planning must know of a posterior."""

    @property
    def mu(self) -> float: ...
    @property
    def L(self) -> float: ...
    @property
    def dim(self) -> int: ...
    @property
    def devices(self) -> int: ...
    def initial_w2_sq(self, init: str = ...) -> float: ...


@dataclass(frozen=True, eq=False)
class Plan:
    """Gains and active devices of every round, with the bound and the privacy they imply."""

    step_size: Array
    """η[S]."""
    gain: Array
    """α[S]."""
    weight: Array
    """Weight of each device's gradient in the update, [S, K]: K/K_a, or 0 for a silent device."""
    clip: Array
    """ℓ[K]; infinite for a scheme that does not clip."""
    example_clip: Array
    """Bound on one example's gradient, [K]; infinite: examples are not clipped one by one."""
    noise_power: float
    """N0."""
    server_noise: Array
    """β[S], variance of the noise that the server adds."""
    burn_in: int
    init: str
    threshold: Array
    bound: Array
    objective: float
    objective_name: str
    lower_bound: float | None
    regime: str | None
    power_share: Array
    """Share of the transmit power limit that the weakest sender uses, [S]; 0 on an ideal link."""
    limit: NDArray[np.intp]
    """Which limit each round sits at, as an index into REGIMES, [S]."""
    privacy: Privacy
    gamma: float
    mu: float
    L: float
    dim: int
    initial_w2_sq: float
    ledger: Array
    """Loss that each device had spent before this plan, [K]."""
    warnings: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        """S."""
        return int(self.gain.shape[-1])

    @property
    def devices(self) -> int:
        """K."""
        return int(self.weight.shape[-1])

    @property
    def active_devices(self) -> NDArray[np.intp]:
        """K_a[S]."""
        return np.count_nonzero(self.weight, axis=-1)

    @property
    def scale(self) -> Array:
        """The server's factor on the received sum, K/K_a: the largest weight of each round, [S]."""
        return self.weight.max(-1)

    @property
    def regime_share(self) -> dict[str, float]:
        """Share of the rounds that sit at each limit."""
        return {name: float(np.mean(self.limit == index)) for index, name in enumerate(single_sample.REGIMES)}

    @property
    def noise_variance(self) -> Array:
        """σ²[S] of the update: channel noise and server noise together."""
        return self.noise_power * (self.step_size * self.scale / self.gain) ** 2 + self.server_noise

    @property
    def loss(self) -> Array:
        """Privacy loss of every round and device, [S, K]; infinite where a device sends unclipped."""
        reach = np.minimum(self.clip, self.example_clip)
        return round_loss(self.gain, self.weight / self.scale[:, None], reach, self.noise_power)

    @property
    def spent(self) -> Array:
        """Total loss per device, [K]."""
        return self.loss.sum(-2)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped; without clipping no finite ε would be true."""
        return bool(np.all(np.isfinite(np.minimum(self.clip, self.example_clip))))

    @property
    def epsilon_spent(self) -> float | None:
        """ε of the worst device at its δ, earlier spending included; None without clipping or without a δ."""
        return self.privacy.epsilon_spent(self.spent + self.ledger) if self.clips else None

    @property
    def gap(self) -> float | None:
        """(objective − lower_bound)/objective, where the policy claims an optimum."""
        return None if self.lower_bound is None else max(0.0, 1 - self.lower_bound / self.objective)


def plan(
    posterior: Target,
    link: Link,
    privacy: Privacy,
    *,
    step_size: float,
    burn_in: int,
    samples: int,
    power: str | Policy = "optimized",
    schedule: str = "threshold",
    objective: str = "worst",
    bound: str = "corrected",
    init: str = "prior",
    initial_w2_sq: float | None = None,
    max_round_noise: float = np.inf,
    ledger: ArrayLike | None = None,
    solver: str = "own",
) -> Plan:
    """Decide who sends and how strongly in every round.

    Args:
        step_size: η, above 0 and below 2/L.
        burn_in: S_b, rounds that are thrown away; samples: S_u, rounds that are kept.
        power: optimized, equal, no-dp, noiseless-dp or noiseless; or a policy of one's own.
        schedule: threshold or all; the noiseless schemes always have everyone.
        objective: worst or average of the bound over the kept rounds.
        bound: corrected, or paper for the formula as printed.
        init: prior or zero, where the chain starts.
        initial_w2_sq: W2² between start and posterior, where a public value is known; else computed.
        max_round_noise: M, a limit on the noise of every round: √m σ ≤ M η Σ ℓ_k, M times what all clipped
            gradients together can undo. For `optimized` and `noiseless-dp`; chains may be lost without it.
        ledger: loss that each device has spent before, [K]; the plan makes do with what is left.
        solver: own, or cvxpy as an independent reference (without a certificate).
    """
    _check_counts(burn_in, samples)
    if not max_round_noise > 0:
        raise InputError("max_round_noise", max_round_noise, "above 0")
    if initial_w2_sq is not None and not 0 <= initial_w2_sq < np.inf:
        raise InputError("initial_w2_sq", initial_w2_sq, "finite and at least 0")
    devices, dim, rounds = posterior.devices, posterior.dim, burn_in + samples
    mu, L = float(posterior.mu), float(posterior.L)
    scheme = policy(power) if isinstance(power, str) else power
    constants = contraction(step_size, mu, L)
    excess_weight = noise_weight(bound, dim)
    clip = privacy.clips(devices)

    gains = np.abs(link.gains(rounds, devices)).astype(float)
    if scheme.wireless:
        device_cap = dim * link.snr * gains**2 / clip**2
        who = make_schedule(schedule, gains, clip, device_cap, step_size, excess_weight)
        power_cap = np.where(who.active, device_cap, np.inf).min(-1)
    else:
        who = everyone(gains)
        power_cap = np.full(rounds, np.inf)
    scale = devices / who.active.sum(-1)
    before = _ledger(ledger, devices)
    budget = _budget(privacy, devices, before) if scheme.private else np.full(devices, np.inf)
    problem = Problem(
        contraction=constants,
        step_size=step_size,
        burn_in=burn_in,
        objective=objective,
        start=posterior.initial_w2_sq(init) if initial_w2_sq is None else initial_w2_sq,
        error=discretization_error(step_size, L, dim) + step_size**2 * participation_error(clip, who.active),
        noise_weight=excess_weight,
        scale=scale,
        active=who.active,
        budget=budget,
        power_cap=power_cap,
        floor=dim * (scale / (max_round_noise * clip.sum())) ** 2,
        noise_limit=max_round_noise,
        solver=solver,
    )
    allocation = scheme.allocate(problem)
    bounds = problem.bound(allocation.a)
    made = Plan(
        step_size=np.full(rounds, step_size),
        gain=np.sqrt(allocation.a * link.noise_power),
        weight=who.active * problem.scale[:, None],
        clip=clip if scheme.clips else np.full(devices, np.inf),
        example_clip=np.full(devices, np.inf),
        noise_power=link.noise_power,
        server_noise=_server_noise(problem, allocation.a),
        burn_in=burn_in,
        init=init,
        threshold=who.threshold,
        bound=bounds,
        objective=problem.value(bounds),
        objective_name=objective,
        lower_bound=allocation.lower_bound,
        regime=_regime(problem) if np.all(gains == gains[0]) else None,
        power_share=allocation.a / problem.power_cap,
        limit=_limit(problem, allocation.a),
        privacy=privacy,
        gamma=constants.gamma,
        mu=mu,
        L=L,
        dim=dim,
        initial_w2_sq=problem.start,
        ledger=before,
    )
    return dataclasses.replace(made, warnings=tuple(_warnings(made)))


def _check_counts(burn_in: int, samples: int) -> None:
    if burn_in < 0:
        raise InputError("burn_in", burn_in, "at least 0")
    if samples < 1:
        raise InputError("samples", samples, "at least 1")


def _ledger(ledger: ArrayLike | None, devices: int) -> Array:
    spent = np.zeros(devices) if ledger is None else np.asarray(ledger, dtype=float)
    if spent.shape != (devices,) or not np.all((spent >= 0) & np.isfinite(spent)):
        raise InputError("ledger", ledger, f"{devices} finite losses of at least 0, one per device")
    return spent


def _budget(privacy: Privacy, devices: int, ledger: Array) -> Array:
    """B_k = (R_k − ledger_k)/(2 sensitivity_k²)."""
    left = privacy.budget(devices) - ledger
    if np.any(left <= 0):
        empty = np.flatnonzero(left <= 0)
        raise InputError("ledger", f"all of the budget of device {empty[0]}", "below every device's budget")
    return left / (2 * privacy.sensitivity(devices) ** 2)


def _server_noise(problem: Problem, a: Array) -> Array:
    """β = max(0, 2η − channel part) (Sec. III-A); rounding at the Langevin cap is not noise to add."""
    eta = problem.step_size
    missing = 2 * eta - (eta * problem.scale) ** 2 / a
    return np.where(missing > 1e-9 * eta, missing, 0.0)


def _regime(problem: Problem) -> str | None:
    """Theorem 1's regime where it applies: limits that do not change over the rounds."""
    if not single_sample.is_static(problem):
        return None
    share = single_sample.tightest(problem) / problem.rounds
    return str(single_sample.regime(problem.lmc_cap[0], problem.power_cap[0], share))


def _limit(problem: Problem, a: Array) -> NDArray[np.intp]:
    """The limit of every round; below both caps it is privacy that limits."""
    near = 1 - 1e-9
    at_lmc, at_power = a >= near * problem.lmc_cap, a >= near * problem.power_cap
    names = single_sample.REGIMES
    kinds = [names.index(single_sample.LMC), names.index(single_sample.POWER)]
    return np.select([at_lmc, at_power], kinds, names.index(single_sample.DP))


def _warnings(made: Plan) -> list[str]:
    found = []
    if made.clips:
        reach = made.step_size * made.clip.sum()
        loud = np.flatnonzero(np.sqrt(made.dim * made.noise_variance) > reach)
        if loud.size:
            found.append(
                f"In {loud.size} of {made.rounds} rounds the noise of one round exceeds what all clipped gradients "
                f"together can undo (η Σ ℓ_k); the bound ignores clipping, and chains may not come back. "
                "A smaller step size or max_round_noise = 1 helps."
            )
        limit = made.privacy.budget(made.devices)
        over = np.flatnonzero(made.spent + made.ledger > limit * (1 + 1e-9))
        if over.size:
            found.append(
                f"{over.size} of {made.devices} devices spend more than the privacy budget, which this policy ignores."
            )
    return found
