"""Making plans: who sends, how strongly, and what that is worth; one at a time or hundreds for a study."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Link
from wflmc.errors import InputError
from wflmc.planning import causal, single_sample
from wflmc.planning.bound import contraction, discretization_error, noise_weight
from wflmc.planning.distance import Distances
from wflmc.planning.dynamics import DYNAMICS, kinetic_rate, noise_step
from wflmc.planning.plan import Plan
from wflmc.planning.policies import Policy, policy
from wflmc.planning.problem import Allocation, Problem
from wflmc.planning.proxy import Proxy
from wflmc.planning.schedule import Rule
from wflmc.planning.steps import SCHEDULES, plan_steps
from wflmc.posterior.response import AnyResponse, going_on
from wflmc.privacy import Privacy

Array = NDArray[np.float64]


NOTHING = 1e-9
"""Share of a budget that is rounding, not something left to spend."""


USUAL_LIMIT = 2.0
"""The limit on a round's noise for plans by the exact law, which would else make early rounds as loud as they like."""


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


@runtime_checkable
class KnowsLaw(Protocol):
    """A posterior that can tell how the law of its chains answers to noise, itself or by an approximation."""

    def response(
        self,
        step_size: ArrayLike,
        weight: ArrayLike,
        burn_in: int,
        init: str = ...,
        friction: ArrayLike | None = ...,
        downlink: float = ...,
    ) -> AnyResponse: ...


@dataclass(frozen=True)
class Options:
    """The keywords of `plan`, checked."""

    step_size: ArrayLike
    burn_in: int
    samples: int
    power: str | Policy = "optimized"
    schedule: str = "threshold"
    objective: str = "worst"
    bound: str = "corrected"
    init: str = "prior"
    initial_w2_sq: float | None = None
    max_round_noise: float | None = None
    ledger: ArrayLike | None = None
    start: int = 0
    solver: str = "own"
    step_schedule: str = "constant"
    proxy: Proxy | None = None
    before: Plan | None = None
    dynamics: str = "overdamped"
    friction: float = 2.0
    csi: str = "full"
    senders: int = 0

    @property
    def kinetic_friction(self) -> float | None:
        """γ_f, or None where dynamics are overdamped."""
        return self.friction if self.dynamics == "kinetic" else None

    def __post_init__(self) -> None:
        if self.csi not in ("full", "causal"):
            raise InputError("csi", self.csi, "one of full, causal")
        if self.csi == "causal" and self.objective == "exact":
            raise InputError("objective", "exact", "worst or average with csi = 'causal'")
        if self.csi == "causal" and (self.step_schedule != "constant" or np.ptp(self.step_size) > 0):
            raise InputError("csi", "causal", "full with step sizes that change from round to round")
        if self.dynamics == "kinetic" and self.step_schedule != "constant":
            raise InputError("step_schedule", self.step_schedule, "constant with dynamics = 'kinetic'")
        if self.dynamics not in DYNAMICS:
            raise InputError("dynamics", self.dynamics, f"one of {', '.join(DYNAMICS)}")
        if self.start < 0:
            raise InputError("start", self.start, "at least 0")
        if self.burn_in < 0:
            raise InputError("burn_in", self.burn_in, "at least 0")
        if self.samples < 1:
            raise InputError("samples", self.samples, "at least 1")
        if self.step_schedule not in SCHEDULES:
            raise InputError("step_schedule", self.step_schedule, f"one of {', '.join(SCHEDULES)}")
        if self.step_schedule == "planned" and np.ndim(self.step_size):
            raise InputError("step_schedule", "planned", "'constant' with a step size that changes with the round")
        if self.max_round_noise is not None and not self.max_round_noise > 0:
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
    step_size: ArrayLike,
    burn_in: int,
    samples: int,
    power: str | Policy = "optimized",
    schedule: str = "threshold",
    objective: str = "worst",
    bound: str = "corrected",
    init: str = "prior",
    initial_w2_sq: float | None = None,
    max_round_noise: float | None = None,
    ledger: ArrayLike | None = None,
    start: int = 0,
    solver: str = "own",
    step_schedule: str = "constant",
    proxy: Proxy | None = None,
    before: Plan | None = None,
    dynamics: str = "overdamped",
    friction: float = 2.0,
    csi: str = "full",
    senders: int = 0,
) -> Plan:
    """Decide who sends and how strongly in every round.

    Args:
        step_size: η, above 0 and below 2/L: a number, or one for each of the S_b + S_u rounds; with kinetic dynamics
            h, below 2/√L.
        burn_in: S_b, rounds that are thrown away; samples: S_u, rounds that are kept.
        power: optimized, equal, no-dp, noiseless-dp or noiseless; or a policy of one's own.
        schedule: threshold, all, or unbiased (as many in every round, each device as often); the noiseless schemes
            always have everyone.
        objective: worst or average of the bound over the kept rounds; or exact, the worst true W2² of the chain's law
            while nothing is clipped, for which `optimized` and `noiseless-dp` choose all noise themselves.
        bound: corrected, or paper for the formula as printed.
        init: prior or zero, where the chain starts.
        initial_w2_sq: W2² between start and posterior, where a public value is known; else computed.
        max_round_noise: M, a limit on the noise of every round: √m σ ≤ M η Σ ℓ_k, M times what all clipped
            gradients together can undo. For `optimized` and `noiseless-dp`; chains may be lost without it. By default
            there is none, but for objective = "exact" (which knows of no clipping) 2 where that can be afforded.
        ledger: loss that each device has spent before, [K]; the plan makes do with what is left.
        start: the round to begin with, where rounds came before: channels and noise go on from there.
        solver: own, or cvxpy as an independent reference (without a certificate).
        step_schedule: constant, or planned: `step_size` is that of the kept rounds, and those of burn-in are searched
            for (some seventy plans; see `wflmc.planning.steps`).
        proxy: for objective = "exact", a public stand-in for the posterior, which else is looked at itself.
        before: for objective = "exact", the plan of the rounds that came before, whose law the chain goes on from.
        dynamics: overdamped as in the paper; or kinetic, with a velocity: fewer rounds where μ and L are far apart. No
            bound is known for it: `optimized` needs objective = "exact", else `noiseless-dp` takes equal parts.
        friction: γ_f of kinetic dynamics.
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
        step_schedule=step_schedule,
        proxy=proxy,
        before=before,
        dynamics=dynamics,
        friction=friction,
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


def _prepare(posterior: Target, link: Link, privacy: Privacy, options: Options, usual_step: float = np.inf) -> Prepared:
    """Schedule, caps and budgets: everything up to the power of the rounds.

    Args:
        usual_step: rounds with a larger step than this may not be noisier than clipped gradients can undo.
    """
    if options.step_schedule == "planned":
        return _with_planned_steps(posterior, link, privacy, options)
    devices, dim, rounds = posterior.devices, posterior.dim, options.burn_in + options.samples
    mu, L, step_size = float(posterior.mu), float(posterior.L), _step_sizes(options.step_size, rounds)
    scheme = policy(options.power) if isinstance(options.power, str) else options.power
    friction = options.kinetic_friction
    constants = contraction(step_size, mu, L) if friction is None else kinetic_rate(step_size, friction, mu, L)
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
    worth = noise_step(step_size, friction)
    rule = Rule(options.schedule if scheme.wireless else "all", clip, reach, worth, excess_weight, uncertainty)
    usual = dataclasses.replace(rule, step_size=float(worth[-1]))  # for rounds that are only imagined
    standing = None
    if rule.name == "unbiased":
        chosen = causal.choose_senders(options.senders, link, usual)
        rule, usual = (dataclasses.replace(each, senders=chosen) for each in (rule, usual))
        how_good, lots = link.standing(known)
        standing = (how_good[now], lots[now])
    who = rule(gains, standing)
    power_cap = rule.power_cap(gains, who.active) if scheme.wireless else np.full(rounds, np.inf)
    scale = devices / who.active.sum(-1)
    weight = who.active * scale[:, None]
    downlink = link.downlink_noise * getattr(posterior, "prior_power", 1.0) if scheme.wireless else 0.0
    discretization = discretization_error(step_size, L, dim)
    allocate = scheme.allocate
    if options.csi == "causal" and scheme.wireless:
        allocate = causal.causally(
            allocate, causal.forecast(link.fading.law, usual, known[now], float(discretization[-1]))
        )
    before = _ledger(options.ledger, devices)
    budget = _budget(privacy, devices, before) / uncertainty**2 if scheme.private else np.full(devices, np.inf)

    def least(limit: ArrayLike) -> Array:
        """a at which a round's noise is `limit` times what all clipped gradients can undo, [S]."""
        return np.asarray(dim * (scale / (np.asarray(limit) * clip.sum())) ** 2)

    noise_limit = np.inf if options.max_round_noise is None else options.max_round_noise
    if options.max_round_noise is None and options.objective == "exact" and scheme.optimal:
        floor = least(USUAL_LIMIT)
        affordable = np.all(floor <= power_cap) and np.all(floor @ who.active <= budget)
        noise_limit = USUAL_LIMIT if affordable else np.inf
    limit = np.where(step_size > usual_step, np.minimum(noise_limit, 1.0), noise_limit)
    start = posterior.initial_w2_sq(options.init) if options.initial_w2_sq is None else options.initial_w2_sq
    problem = Problem(
        contraction=constants,
        step_size=step_size,
        burn_in=options.burn_in,
        objective=options.objective,
        start=start,
        error=discretization + step_size**2 * (rule.error(who.active) + _heard_error(posterior, downlink, weight)),
        noise_weight=excess_weight,
        scale=scale,
        active=who.active,
        budget=budget,
        power_cap=power_cap,
        floor=least(limit),
        noise_limit=noise_limit,
        solver=options.solver,
        friction=friction,
        response=_response(posterior, options, weight, downlink) if options.objective == "exact" else None,
        fills_up=options.objective != "exact" or not scheme.optimal,
    )

    def finish(allocation: Allocation) -> Plan:
        bounds = problem.bound(allocation.a) if friction is None else None
        server_noise = problem.server_noise(allocation.a)
        value = np.nan if bounds is None else problem.value(bounds)
        if problem.response is not None:
            noise = (problem.kick * scale) ** 2 / allocation.a + server_noise
            value = float(Distances(problem.response)(noise).max())
        made = Plan(
            step_size=step_size,
            gain=np.sqrt(allocation.a * link.noise_power),
            weight=weight,
            clip=clip if scheme.clips else np.full(devices, np.inf),
            example_clip=privacy.example_clips(devices) if scheme.clips else np.full(devices, np.inf),
            noise_power=link.noise_power,
            server_noise=server_noise,
            burn_in=options.burn_in,
            init=options.init,
            threshold=who.threshold,
            bound=bounds,
            objective=value,
            objective_name=options.objective,
            lower_bound=allocation.lower_bound,
            regime=_regime(problem) if np.all(gains == gains[0]) else None,
            power_share=allocation.a / power_cap,
            limit=_limit(problem, allocation.a),
            privacy=privacy,
            gamma=float(constants.gamma[options.burn_in :].max()),
            mu=mu,
            L=L,
            dim=dim,
            initial_w2_sq=start,
            ledger=before,
            start=options.start,
            received=received,
            uncertainty=uncertainty,
            enforced=scheme.private,
            friction=friction,
            downlink_noise=downlink,
        )
        return dataclasses.replace(
            made,
            warnings=(
                *_warnings(made, problem),
                *_divergence(posterior, made),
                *_estimated(posterior, options),
                *_oracle(made, options),
            ),
        )

    return Prepared(problem, allocate, finish)


def _with_planned_steps(posterior: Target, link: Link, privacy: Privacy, options: Options) -> Prepared:
    """The step sizes of burn-in by a search over whole plans; large steps are only taken where they can be undone."""
    kept = float(np.asarray(options.step_size))

    def prepared(steps: Array) -> Prepared:
        given = dataclasses.replace(options, step_size=steps, step_schedule="constant")
        return _prepare(posterior, link, privacy, given, usual_step=kept * (1 + 1e-9))

    def make(steps: Array) -> Plan:
        found = prepared(steps)
        return found.finish(found.allocate(found.problem))

    return prepared(plan_steps(make, kept, options.burn_in, options.samples))


def _step_sizes(step_size: ArrayLike, rounds: int) -> Array:
    """η[S] from a number or one for each round."""
    eta = np.asarray(step_size, dtype=float)
    if eta.ndim > 0 and eta.shape != (rounds,):
        raise InputError("step_size", f"an array of shape {eta.shape}", f"a number, or {rounds} of them, one per round")
    return eta * np.ones(rounds)


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


def _heard_error(posterior: Target, downlink: float, weight: Array) -> Array:
    """Mean squared error of a round's gradient from the noise in what devices hear of θ, [S]."""
    if downlink == 0:
        return np.zeros(len(weight))
    known = getattr(posterior, "heard_error", None)
    worst = posterior.dim * (weight.sum(-1) * posterior.L) ** 2  # no device is less smooth than all together
    return np.asarray(downlink * (worst if known is None else known(weight)))


def _response(posterior: Target, options: Options, weight: Array, downlink: float) -> AnyResponse:
    """How the kept rounds' law answers to the noise of this plan's rounds, by the proxy or the posterior itself."""
    step_size, burn_in, before = _step_sizes(options.step_size, len(weight)), options.burn_in, options.before
    friction = options.kinetic_friction
    if before is not None:
        step_size, weight = np.append(before.step_size, step_size), np.concatenate([before.weight, weight])
        burn_in += before.rounds
    if options.proxy is not None:
        found: AnyResponse = options.proxy.response(
            posterior.dim, step_size, weight, burn_in, options.init, friction, downlink
        )
    elif isinstance(posterior, KnowsLaw):
        found = posterior.response(step_size, weight, burn_in, options.init, friction, downlink)
    else:
        raise InputError("objective", "exact", "worst or average, or given with a proxy: this model knows no law")
    if not all(np.all(np.abs(part) < 1e100) for part in (found.effect, found.covariance, found.shift)):
        raise InputError("objective", "exact", "worst or average here: the chain diverges and its law overflows")
    return found if before is None else going_on(found, before.noise_variance)


def _regime(problem: Problem) -> str | None:
    """Theorem 1's regime where it applies: limits that do not change over the rounds."""
    if problem.objective == "exact" or not single_sample.is_static(problem):
        return None
    share = single_sample.tightest(problem) / problem.rounds
    return str(single_sample.regime(problem.lmc_cap[0], problem.power_cap[0], share))


def _limit(problem: Problem, a: Array) -> NDArray[np.intp]:
    """The limit of every round; below both caps it is privacy that limits."""
    near = 1 - 1e-9
    at_lmc, at_power = a >= near * problem.lmc_cap, a >= near * problem.power_cap
    if not problem.fills_up:  # rounds that neither power nor a spent budget holds back have the noise they want
        at_power = a >= (1 - 1e-5) * problem.power_cap
        spent = a @ problem.active >= (1 - 1e-5) * problem.budget
        at_lmc = ~at_power & ~(problem.active & spent).any(-1)
    names = single_sample.REGIMES
    kinds = [names.index(single_sample.LMC), names.index(single_sample.POWER)]
    return np.select([at_lmc, at_power], kinds, names.index(single_sample.DP))


def _estimated(posterior: Target, options: Options) -> list[str]:
    """Models without a closed form can only estimate how far the start is from the posterior."""
    if options.initial_w2_sq is not None or not getattr(posterior, "start_is_estimate", False):
        return []
    so = ", and the bound is no better than it" if options.dynamics == "overdamped" else ""
    return [f"W2² between start and posterior is a Laplace estimate{so}; posterior.initial_w2_sq can be given instead."]


def _oracle(made: Plan, options: Options) -> list[str]:
    """A plan for the exact law looks at the posterior."""
    if options.objective != "exact" or options.proxy is not None or made.privacy.epsilon is None:
        return []
    return [
        "The objective 'exact' is an oracle: the plan depends on the devices' private data, which epsilon does not "
        "cover. Give a public proxy where data are real."
    ]


def _divergence(posterior: Target, made: Plan) -> list[str]:
    """Partial participation may undo what η < 2/L or h < 2/√L ensures; models that know their Hessian can tell."""
    expansion = getattr(posterior, "expansion", None)
    if expansion is None or made.active_devices.min() == made.devices:
        return []
    # A kinetic step is stable while |1 − h²λ/2| < 1.
    step = made.step_size if made.friction is None else made.step_size**2 / 2
    largest = float(step.max())
    factor = expansion(largest, made.weight * (step / largest)[:, None])
    if factor <= 1:
        return []
    stretches = f"stretches errors {factor:.3g} times" if made.friction is None else "is beyond 2/√L of theirs alone"
    return [
        "The devices that send in some rounds are so unlike the rest that a step "
        f"{stretches}: without clipping the chain may diverge. Use a smaller step size or schedule = 'all'."
    ]


def _remedy(problem: Problem, made: Plan, loud: NDArray[np.intp]) -> str:
    """What helps against noise that clipped gradients cannot undo in the rounds `loud`, by what makes it."""
    least = made.dim * (problem.scale / made.clip.sum()) ** 2  # the power at which they just can
    if np.any((least > problem.lmc_cap)[loud]):
        return "It is the noise that Langevin sampling itself needs: a larger clip or more devices help."
    if np.any((least > problem.power_cap)[loud]):
        return "Transmit power makes it: a higher SNR, more devices or schedule = 'threshold' help."
    if not problem.affordable(least):
        return "Privacy makes it: fewer rounds, more devices or a larger epsilon help."
    return "A smaller step size or max_round_noise = 1 helps."


def _warnings(made: Plan, problem: Problem) -> list[str]:
    found = []
    factor = problem.noise_limit if np.isfinite(problem.noise_limit) else 1.0
    if made.gap is not None and made.gap > 1e-6:
        found.append(f"The power is proven optimal only to a relative gap of {made.gap:.1g}.")
    if made.clips:
        # A round of a small step makes little noise, and the rounds after it undo that.
        reach = factor * np.maximum(made.kick, made.kick[-1]) * made.clip.sum()
        loud = np.flatnonzero(np.sqrt(made.dim * made.noise_variance) > reach * (1 + 1e-9))
        if loud.size:
            found.append(
                f"In {loud.size} of {made.rounds} rounds the noise of one round exceeds {_times(factor)}what all "
                f"clipped gradients together can undo ({'η' if made.friction is None else 'h'} Σ ℓ_k); the "
                f"{'bound' if made.friction is None else 'exact law'} ignores clipping, and chains may not come "
                f"back. {_remedy(problem, made, loud)}"
            )
    if not made.clips and made.privacy.epsilon is not None:
        found.append("This scheme does not clip: epsilon is not kept, and no finite one would be true.")
    if made.objective > 10 * max(made.initial_w2_sq, 1e-300):
        found.append(
            "The chain is farther from the posterior after burn-in than at the start."
            if made.objective_name == "exact"
            else "The bound after burn-in is far above the distance at the start: it says nothing here."
        )
    if made.clips:
        limit = made.privacy.budget(made.devices)
        over = np.flatnonzero(made.spent + made.ledger > limit * (1 + 1e-9))
        if over.size:
            found.append(
                f"{over.size} of {made.devices} devices spend more than the privacy budget, which this policy ignores."
            )
    if made.friction is not None:
        low, high = 0.2 * made.mu**0.5, 20 * made.L**0.5
        if not low <= made.friction <= high:
            found.append(
                f"friction = {made.friction:.3g} is outside {low:.3g} to {high:.3g} (0.2√mu to 20√L): the chain swings "
                "or creeps for many rounds. 2√mu is a good choice."
            )
    return found


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{factor:g} times "
