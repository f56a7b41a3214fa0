"""Making plans: who sends, how strongly, and what that is worth; one at a time or hundreds for a study."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Link
from wflmc.dynamics import AnyResponse, Dynamics, Motion, continued
from wflmc.errors import InputError
from wflmc.planning import causal
from wflmc.planning.advice import input_warnings, plan_warnings
from wflmc.planning.bound import Allocation, Problem, discretization_error, noise_weight
from wflmc.planning.exact.distance import Distances
from wflmc.planning.exact.proxy import Proxy
from wflmc.planning.options import KnowsLaw, Options, SumsExactly, Target, check_inputs
from wflmc.planning.plan import Plan
from wflmc.planning.policies import Policy, policy
from wflmc.planning.schedule import Rule
from wflmc.planning.solvers import single_sample
from wflmc.planning.steps import plan_steps
from wflmc.posterior.summation import LARGEST_MARGIN
from wflmc.privacy import Privacy

PAIR_BYTES, MEMORY = 100, 64_000_000_000
"""Bytes that planning takes at its peak for a round and a device, and the most that a plan may take."""

Array = NDArray[np.float64]

NOTHING = 1e-9
"""Share of a budget that is rounding, not something left to spend."""
USUAL_LIMIT = 2.0
"""The limit on a round's noise for plans by the exact law, which would else make early rounds as loud as they like."""


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
    dynamics: str | Dynamics = "overdamped",
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
    check_inputs(posterior, link, privacy)
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
    _check_size(options, posterior.devices)
    if options.step_schedule == "planned":
        return _with_planned_steps(posterior, link, privacy, options)
    devices, dim, rounds = posterior.devices, posterior.dim, options.burn_in + options.samples
    mu, L, step_size = float(posterior.mu), float(posterior.L), _step_sizes(options.step_size, rounds)
    scheme = policy(options.power) if isinstance(options.power, str) else options.power
    dynamics = options.motion
    constants = dynamics.contraction(step_size, mu, L)
    excess_weight = noise_weight(options.bound, dim)
    clip = privacy.clips(devices)
    rounding = _rounding(posterior, privacy) if scheme.clips else 0.0

    now = slice(options.start, None)
    known = link.gains(options.start + rounds, devices)
    received = link.mismatch(options.start + rounds, devices) if scheme.wireless else None
    uncertainty = link.uncertainty if scheme.wireless else 1.0
    if received is not None:
        known, received = known / received, received[now]  # what devices know, and plans are made of
    gains = np.abs(known).astype(float)[now]
    reach = dim * link.snr(devices) / clip**2
    worth = dynamics.noise_step(step_size)
    rule = Rule(options.schedule if scheme.wireless else "all", clip, reach, worth, excess_weight, uncertainty)
    usual = dataclasses.replace(rule, step_size=float(worth[-1]))  # for rounds that are only imagined
    standing = None
    if rule.name == "unbiased":
        chosen = causal.choose_senders(options.senders, link, usual)
        rule, usual = (dataclasses.replace(each, senders=chosen) for each in (rule, usual))
        how_good, lots = link.quality(known)
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
        dynamics=dynamics,
        response=_response(posterior, options, weight, downlink) if options.objective == "exact" else None,
        fills_up=options.objective != "exact" or not scheme.optimal,
    )

    def finish(allocation: Allocation) -> Plan:
        bounds = problem.bound(allocation.a) if dynamics.has_bound else None
        server_noise = problem.server_noise(allocation.a)
        value = np.nan if bounds is None else problem.value(bounds)
        if problem.response is not None:
            noise = (problem.kick * scale) ** 2 / allocation.a + server_noise
            value = float(Distances(problem.response)(noise).max())
        made = Plan.of(
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
            limit=_limit(problem, allocation.a, not scheme.optimal or options.csi == "causal"),
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
            dynamics=dynamics,
            downlink_noise=downlink,
            noise_limit=noise_limit,
            rounding=rounding,
        )
        about_inputs = input_warnings(posterior, link if scheme.wireless else None, privacy)
        return made.replace(warnings=(*about_inputs, *plan_warnings(posterior, made, problem, options)))

    return Prepared(problem, allocate, finish)


def _check_size(options: Options, devices: int) -> None:
    """Refuse a plan that does not fit into a usual memory, before anything of its size is made."""
    rounds = options.start + options.burn_in + options.samples
    needed = PAIR_BYTES * rounds * max(devices, 3)  # there are some numbers for every round alone
    if needed > MEMORY:
        name = "samples" if options.samples >= options.burn_in else "burn_in"
        why = f"planning {rounds:,} rounds of {devices:,} devices takes about {needed / 1e9:,.0f} GB of memory"
        allowed = f"smaller: {why}, and {MEMORY / 1e9:.0f} GB is the limit. Plan fewer rounds or devices"
        raise InputError(name, getattr(options, name), f"{allowed}; `wflmc plan --capacity` estimates such a plan")


def _with_planned_steps(posterior: Target, link: Link, privacy: Privacy, options: Options) -> Prepared:
    """The step sizes of burn-in by a search over whole plans; large steps are only taken where they can be undone."""
    kept = float(np.asarray(options.step_size))

    def prepared(steps: Array) -> Prepared:
        given = dataclasses.replace(options, step_size=steps, step_schedule="constant")
        return _prepare(posterior, link, privacy, given, usual_step=kept * (1 + 1e-9))

    def make(steps: Array) -> Plan:
        found = prepared(steps)
        return found.finish(found.allocate(found.problem))

    steps = plan_steps(make, kept, options.burn_in, options.samples)
    found = prepared(steps)
    if np.ptp(steps) > 0 or options.burn_in == 0:
        return found
    note = "No other step sizes of burn-in were found better: step_schedule = 'planned' has kept the constant one."

    def finish(allocation: Allocation) -> Plan:
        plan = found.finish(allocation)
        return plan.replace(warnings=(*plan.warnings, note))

    return found._replace(finish=finish)


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


def _rounding(posterior: Target, privacy: Privacy) -> float:
    """e of `Plan.rounding`; where float32 would blur more than a little, the plan is refused."""
    clip, example_clip = privacy.clips(posterior.devices), privacy.example_clips(posterior.devices)
    # What rounding may add to a change is the same for all neighbours, which may differ by less than 2 min(c, ℓ).
    less = float(np.max(np.minimum(clip, example_clip) / privacy.sensitivity(posterior.devices)))
    found = less * posterior.margin(clip, example_clip) if isinstance(posterior, SumsExactly) else 0.0
    if found <= LARGEST_MARGIN:
        return found
    sizes = f"a float32 sum of {posterior.devices:,} devices that send up to {clip.max():.3g} each"
    why = f"{sizes} hides a change of {np.minimum(clip, example_clip).min():.3g} only to within {found:.0%}"
    name = "example_clip" if np.isfinite(example_clip).any() else "clip"
    given = np.unique(example_clip if name == "example_clip" else clip)
    allowed = "nearer to clip, or clip smaller" if name == "example_clip" else "nearer to one another"
    raise InputError(name, given.tolist() if given.size > 1 else given[0], f"{allowed}: {why}")


def _heard_error(posterior: Target, downlink: float, weight: Array) -> Array:
    """Mean squared error of a round's gradient from the noise in what devices hear of θ, [S]."""
    if downlink == 0:
        return np.zeros(len(weight))
    known = getattr(posterior, "downlink_error", None)
    worst = posterior.dim * (weight.sum(-1) * posterior.L) ** 2  # no device is less smooth than all together
    return np.asarray(downlink * (worst if known is None else known(weight)))


def _response(posterior: Target, options: Options, weight: Array, downlink: float) -> AnyResponse:
    """How the kept rounds' law answers to the noise of this plan's rounds, by the proxy or the posterior itself."""
    step_size, burn_in, before = _step_sizes(options.step_size, len(weight)), options.burn_in, options.before
    if before is not None:
        step_size, weight = np.append(before.step_size, step_size), np.concatenate([before.weight, weight])
        burn_in += len(before.rounds)
    motion = Motion(step_size, weight, options.init, options.motion, downlink)
    if options.proxy is not None:
        found: AnyResponse = options.proxy.response(posterior.dim, motion, burn_in)
    elif isinstance(posterior, KnowsLaw):
        found = posterior.response(motion, burn_in)
    else:
        raise InputError("objective", "exact", "worst or average, or given with a proxy: this model knows no law")
    if not all(np.all(np.abs(part) < 1e100) for part in (found.effect, found.covariance, found.shift)):
        raise InputError("objective", "exact", "worst or average here: the chain diverges and its law overflows")
    return found if before is None else continued(found, before.noise_variance)


def _regime(problem: Problem) -> str | None:
    """Theorem 1's regime where it applies: limits that do not change over the rounds."""
    if problem.objective == "exact" or not single_sample.is_static(problem):
        return None
    share = single_sample.tightest(problem) / problem.rounds
    return str(single_sample.regime(problem.lmc_cap[0], problem.power_cap[0], share))


def _limit(problem: Problem, a: Array, shared: bool) -> NDArray[np.intp]:
    """The limit of every round; below both caps it is a budget that a device of the round has spent.

    Rounds that none of these holds back have the noise that the objective wants: more power would not lower it.

    Args:
        shared: whether a round below both caps is at its share of a budget, equal or kept back for rounds to come,
            which it may not exceed even where others leave some of theirs.
    """
    spent = a @ problem.active >= (1 - 1e-5) * problem.budget
    held = (problem.active & spent).any(-1) | (shared & problem.fills_up)
    near = 1 - (1e-9 if problem.fills_up else 1e-5)
    at_lmc, at_power = a >= near * problem.lmc_cap, a >= near * problem.power_cap
    at_lmc = (at_lmc & problem.fills_up) | (~at_power & ~held)
    names = single_sample.REGIMES
    kinds = [names.index(single_sample.LMC), names.index(single_sample.POWER)]
    return np.select([at_lmc, at_power], kinds, names.index(single_sample.DP))
