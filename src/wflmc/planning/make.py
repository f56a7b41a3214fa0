"""Making plans: who sends, how strongly, and what that is worth; one at a time or hundreds for a study."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Link
from wflmc.errors import InputError
from wflmc.planning import causal, single_sample
from wflmc.planning.bound import contraction, discretization_error, noise_weight
from wflmc.planning.plan import Plan
from wflmc.planning.policies import Policy, policy
from wflmc.planning.problem import Allocation, Problem
from wflmc.planning.schedule import Rule
from wflmc.privacy import Privacy

Array = NDArray[np.float64]


NOTHING = 1e-9
"""Share of a budget that is rounding, not something left to spend."""


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


@dataclass(frozen=True)
class Options:
    """The keywords of `plan`, checked."""

    step_size: float
    burn_in: int
    samples: int
    power: str | Policy = "optimized"
    schedule: str = "threshold"
    objective: str = "worst"
    bound: str = "corrected"
    init: str = "prior"
    initial_w2_sq: float | None = None
    max_round_noise: float = np.inf
    ledger: ArrayLike | None = None
    start: int = 0
    solver: str = "own"
    csi: str = "full"
    senders: int = 0

    def __post_init__(self) -> None:
        if self.csi not in ("full", "causal"):
            raise InputError("csi", self.csi, "one of full, causal")
        if self.start < 0:
            raise InputError("start", self.start, "at least 0")
        if self.burn_in < 0:
            raise InputError("burn_in", self.burn_in, "at least 0")
        if self.samples < 1:
            raise InputError("samples", self.samples, "at least 1")
        if not self.max_round_noise > 0:
            raise InputError("max_round_noise", self.max_round_noise, "above 0")
        if self.initial_w2_sq is not None and not 0 <= self.initial_w2_sq < np.inf:
            raise InputError("initial_w2_sq", self.initial_w2_sq, "finite and at least 0")


class Prepared(NamedTuple):
    """A plan but for its power: the problem, how to solve it, and what to make of the answer."""

    problem: Problem
    allocate: Callable[[Problem], Allocation]
    finish: Callable[[Allocation], Plan]


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
    start: int = 0,
    solver: str = "own",
    csi: str = "full",
    senders: int = 0,
) -> Plan:
    """Decide who sends and how strongly in every round.

    Args:
        step_size: η, above 0 and below 2/L.
        burn_in: S_b, rounds that are thrown away; samples: S_u, rounds that are kept.
        power: optimized, equal, no-dp, noiseless-dp or noiseless; or a policy of one's own.
        schedule: threshold, all, or unbiased (as many in every round, each device as often); the noiseless schemes
            always have everyone.
        objective: worst or average of the bound over the kept rounds.
        bound: corrected, or paper for the formula as printed.
        init: prior or zero, where the chain starts.
        initial_w2_sq: W2² between start and posterior, where a public value is known; else computed.
        max_round_noise: M, a limit on the noise of every round: √m σ ≤ M η Σ ℓ_k, M times what all clipped
            gradients together can undo. For `optimized` and `noiseless-dp`; chains may be lost without it.
        ledger: loss that each device has spent before, [K]; the plan makes do with what is left.
        start: the round to begin with, where rounds came before: channels and noise go on from there.
        solver: own, or cvxpy as an independent reference (without a certificate).
        csi: full, where the channels of all rounds are known beforehand as in the paper; or causal, where a round's
            power is decided by the channels up to it and a forecast of the others (without a certificate).
        senders: q, the devices that send in a round with schedule = "unbiased"; 0: chosen by the fading law.
    """
    options = Options(
        step_size=step_size,
        burn_in=burn_in,
        samples=samples,
        power=power,
        schedule=schedule,
        objective=objective,
        bound=bound,
        init=init,
        initial_w2_sq=initial_w2_sq,
        max_round_noise=max_round_noise,
        ledger=ledger,
        start=start,
        solver=solver,
        csi=csi,
        senders=senders,
    )
    prepared = _prepare(posterior, link, privacy, options)
    return prepared.finish(prepared.allocate(prepared.problem))


def plan_many(
    posterior: Target, links: Sequence[Link], privacy: Privacy, *, workers: int = 1, **keywords: Any
) -> list[Plan]:
    """One plan for each link, as a study needs them by the hundred; `keywords` are those of `plan`.

    Args:
        workers: processes that share the optimisation. Starting them costs a few seconds, which pays for thousands of
            plans or long ones; a script that uses them needs the usual `if __name__ == "__main__":`.
    """
    prepared = [_prepare(posterior, link, privacy, Options(**keywords)) for link in links]
    problems = [item.problem for item in prepared]
    solvers = [item.allocate for item in prepared]
    if workers <= 1 or len(problems) < 2:
        allocations = [solve(problem) for solve, problem in zip(solvers, problems, strict=True)]
    else:
        # Not fork: JAX runs threads, and a forked copy of them may hang.
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            chunk = -(-len(problems) // (4 * workers))
            allocations = list(pool.map(_solve, solvers, problems, chunksize=chunk))
    return [item.finish(allocation) for item, allocation in zip(prepared, allocations, strict=True)]


def _solve(allocate: Callable[[Problem], Allocation], problem: Problem) -> Allocation:
    return allocate(problem)


def _prepare(posterior: Target, link: Link, privacy: Privacy, options: Options) -> Prepared:
    """Schedule, caps and budgets: everything up to the power of the rounds."""
    devices, dim, rounds = posterior.devices, posterior.dim, options.burn_in + options.samples
    mu, L, step_size = float(posterior.mu), float(posterior.L), options.step_size
    scheme = policy(options.power) if isinstance(options.power, str) else options.power
    constants = contraction(step_size, mu, L)
    excess_weight = noise_weight(options.bound, dim)
    clip = privacy.clips(devices)

    now = slice(options.start, None)
    known = link.gains(options.start + rounds, devices)
    received = link.mismatch(options.start + rounds, devices) if scheme.wireless else None
    uncertainty = link.uncertainty if scheme.wireless else 1.0
    if received is not None:
        known, received = known / received, received[now]  # what devices know, and plans are made of
    gains = np.abs(known).astype(float)[now]
    reach = dim * link.snr(devices) / clip**2
    rule = Rule(options.schedule if scheme.wireless else "all", clip, reach, step_size, excess_weight, uncertainty)
    standing = None
    if rule.name == "unbiased":
        rule = dataclasses.replace(rule, senders=causal.choose_senders(options.senders, link, rule))
        how_good, lots = link.standing(known)
        standing = (how_good[now], lots[now])
    who = rule(gains, standing)
    power_cap = rule.power_cap(gains, who.active) if scheme.wireless else np.full(rounds, np.inf)
    scale = devices / who.active.sum(-1)
    discretization = discretization_error(step_size, L, dim)
    allocate = scheme.allocate
    if options.csi == "causal" and scheme.wireless:
        allocate = causal.causally(allocate, causal.forecast(link.fading.law, rule, known[now], discretization))
    before = _ledger(options.ledger, devices)
    start = posterior.initial_w2_sq(options.init) if options.initial_w2_sq is None else options.initial_w2_sq
    problem = Problem(
        contraction=constants,
        step_size=step_size,
        burn_in=options.burn_in,
        objective=options.objective,
        start=start,
        error=discretization + step_size**2 * rule.error(who.active),
        noise_weight=excess_weight,
        scale=scale,
        active=who.active,
        budget=_budget(privacy, devices, before) / uncertainty**2 if scheme.private else np.full(devices, np.inf),
        power_cap=power_cap,
        floor=dim * (scale / (options.max_round_noise * clip.sum())) ** 2,
        noise_limit=options.max_round_noise,
        solver=options.solver,
    )

    def finish(allocation: Allocation) -> Plan:
        bounds = problem.bound(allocation.a)
        made = Plan(
            step_size=np.full(rounds, step_size),
            gain=np.sqrt(allocation.a * link.noise_power),
            weight=who.active * scale[:, None],
            clip=clip if scheme.clips else np.full(devices, np.inf),
            example_clip=privacy.example_clips(devices) if scheme.clips else np.full(devices, np.inf),
            noise_power=link.noise_power,
            server_noise=_server_noise(problem, allocation.a),
            burn_in=options.burn_in,
            init=options.init,
            threshold=who.threshold,
            bound=bounds,
            objective=problem.value(bounds),
            objective_name=options.objective,
            lower_bound=allocation.lower_bound,
            regime=_regime(problem) if np.all(gains == gains[0]) else None,
            power_share=allocation.a / power_cap,
            limit=_limit(problem, allocation.a),
            privacy=privacy,
            gamma=constants.gamma,
            mu=mu,
            L=L,
            dim=dim,
            initial_w2_sq=start,
            ledger=before,
            start=options.start,
            received=received,
            uncertainty=uncertainty,
            enforced=scheme.private,
        )
        return dataclasses.replace(
            made,
            warnings=(
                *_warnings(made, problem, options.max_round_noise),
                *_divergence(posterior, made),
                *_estimated(posterior, options),
            ),
        )

    return Prepared(problem, allocate, finish)


def _ledger(ledger: ArrayLike | None, devices: int) -> Array:
    spent = np.zeros(devices) if ledger is None else np.asarray(ledger, dtype=float)
    if spent.shape != (devices,) or not np.all((spent >= 0) & np.isfinite(spent)):
        raise InputError("ledger", ledger, f"{devices} finite losses of at least 0, one per device")
    return spent


def _budget(privacy: Privacy, devices: int, ledger: Array) -> Array:
    """B_k = (R_k − ledger_k)/(2 sensitivity_k²)."""
    whole = privacy.budget(devices)
    left = whole - ledger
    empty = np.flatnonzero(left <= NOTHING * np.where(np.isfinite(whole), whole, 0.0))
    if empty.size:
        given = f"a loss of {ledger[empty[0]]:.6g} for device {empty[0]}"
        raise InputError("ledger", given, f"below its budget of {whole[empty[0]]:.6g}: nothing is left to spend")
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


def _estimated(posterior: Target, options: Options) -> list[str]:
    """Models without a closed form can only estimate how far the start is from the posterior."""
    if options.initial_w2_sq is not None or not getattr(posterior, "start_is_estimate", False):
        return []
    return [
        "W2² between start and posterior is a Laplace estimate, and the bound is no better than it; "
        "posterior.initial_w2_sq can be given instead."
    ]


def _divergence(posterior: Target, made: Plan) -> list[str]:
    """Partial participation may undo what η < 2/L ensures; models that know their Hessian can tell."""
    expansion = getattr(posterior, "expansion", None)
    if expansion is None or made.active_devices.min() == made.devices:
        return []
    factor = expansion(float(made.step_size[0]), made.weight)
    if factor <= 1:
        return []
    return [
        "The devices that send in some rounds are so unlike the rest that a step stretches errors "
        f"{factor:.3g} times: without clipping the chain may diverge. Use a smaller step size or schedule = 'all'."
    ]


def _remedy(problem: Problem, made: Plan) -> str:
    """What helps against noise that clipped gradients cannot undo, by what makes it."""
    least = made.dim * (problem.scale / made.clip.sum()) ** 2  # the power at which they just can
    if np.any(least > problem.lmc_cap):
        return "It is the noise that Langevin sampling itself needs: a larger clip or more devices help."
    if np.any(least > problem.power_cap):
        return "Transmit power makes it: a higher SNR, more devices or schedule = 'threshold' help."
    if not problem.affordable(least):
        return "Privacy makes it: fewer rounds, more devices or a larger epsilon help."
    return "A smaller step size or max_round_noise = 1 helps."


def _warnings(made: Plan, problem: Problem, max_round_noise: float) -> list[str]:
    found = []
    factor = max_round_noise if np.isfinite(max_round_noise) else 1.0
    if made.gap is not None and made.gap > 1e-6:
        found.append(f"The power is proven optimal only to a relative gap of {made.gap:.1g}.")
    if made.clips:
        reach = factor * made.step_size * made.clip.sum()
        loud = np.flatnonzero(np.sqrt(made.dim * made.noise_variance) > reach * (1 + 1e-9))
        if loud.size:
            found.append(
                f"In {loud.size} of {made.rounds} rounds the noise of one round exceeds {_times(factor)}what all "
                "clipped gradients together can undo (η Σ ℓ_k); the bound ignores clipping, and chains may not come "
                f"back. {_remedy(problem, made)}"
            )
    if not made.clips and made.privacy.epsilon is not None:
        found.append("This scheme does not clip: epsilon is not kept, and no finite one would be true.")
    if made.objective > 10 * max(made.initial_w2_sq, 1e-300):
        found.append("The bound after burn-in is far above the distance at the start: it says nothing here.")
    if made.clips:
        limit = made.privacy.budget(made.devices)
        over = np.flatnonzero(made.spent + made.ledger > limit * (1 + 1e-9))
        if over.size:
            found.append(
                f"{over.size} of {made.devices} devices spend more than the privacy budget, which this policy ignores."
            )
    return found


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{factor:g} times "
