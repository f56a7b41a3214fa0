"""Making plans: who transmits, how strongly, and what that is worth; one at a time or hundreds for a study."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Gains, Link
from wflmc.dynamics import AnyResponse, Contraction, Dynamics, Motion, continued
from wflmc.errors import InputError
from wflmc.planning import causal
from wflmc.planning.advice import input_warnings, plan_warnings
from wflmc.planning.bound import Allocation, Problem, discretization_error, noise_weight
from wflmc.planning.exact.distance import Distances
from wflmc.planning.options import Options, Policy, Sampler, checked_options
from wflmc.planning.plan import Plan
from wflmc.planning.policies import PowerPolicy, policy_named
from wflmc.planning.schedule import Rule, Schedule
from wflmc.planning.solvers import closed_form
from wflmc.planning.steps import plan_steps
from wflmc.posterior.base import Posterior, check_posterior
from wflmc.posterior.summation import LARGEST_MARGIN
from wflmc.privacy import Privacy

PAIR_BYTES, MEMORY = 100, 64_000_000_000
"""Bytes that planning takes at its peak for a round and a device, and the most that a plan may take."""

Array = NDArray[np.float64]

NOTHING = 1e-9
"""Share of a budget that is rounding, not something left to spend."""
USUAL_LIMIT = 2.0
"""The limit on a round's noise for plans by the exact law, which would else make early rounds as loud as they like."""
SAMPLER, POLICY = Sampler(), Policy()


class Prepared(NamedTuple):
    """A plan but for its power: the problem, how to solve it, and what to make of the answer."""

    problem: Problem
    allocate: Callable[[Problem], Allocation]
    finish: Callable[[Allocation], Plan]

    def plan(self) -> Plan:
        """Solve it."""
        return self.finish(self.allocate(self.problem))


def plan(
    posterior: Posterior,
    link: Link,
    privacy: Privacy,
    *,
    step_size: ArrayLike,
    burn_in: int,
    samples: int,
    sampler: Sampler = SAMPLER,
    policy: Policy = POLICY,
    ledger: ArrayLike | None = None,
    initial_w2_sq: float | None = None,
    **deprecated: Any,
) -> Plan:
    """Decide which devices transmit and how strongly in every round.

    Args:
        posterior: the model, its data split over devices.
        link: the channels, and what devices may transmit.
        privacy: the promise; `Privacy()` promises nothing.
        step_size: η, above 0 and below 2/L: a number, or one for each of the S_b + S_u rounds; with kinetic dynamics
            h, below 2/√L.
        burn_in: S_b, rounds that are discarded.
        samples: S_u, rounds that are kept.
        sampler: the chain, beyond that.
        policy: who transmits, and how strongly.
        ledger: loss that each device has spent before, [K]; the plan makes do with what is left.
        initial_w2_sq: W2² between start and posterior, where a public value is known; else computed.
        **deprecated: the fields of `sampler` and `policy` as keywords, as in version 0.1.

    Returns:
        The plan, which is all that `wflmc.sample` needs.
    """
    check_posterior(posterior)
    if not isinstance(link, Link):
        raise InputError("link", type(link).__name__, "a wflmc.Link")
    if not isinstance(privacy, Privacy):
        raise InputError("privacy", type(privacy).__name__, "a wflmc.Privacy; wflmc.Privacy() promises nothing")
    given = {"step_size": step_size, "burn_in": burn_in, "samples": samples, "sampler": sampler, "policy": policy}
    options = checked_options(given | {"ledger": ledger, "initial_w2_sq": initial_w2_sq}, deprecated)
    return _prepare(_Setting(posterior, link, privacy, options)).plan()


def plan_many(
    posterior: Posterior, links: Sequence[Link], privacy: Privacy, *, workers: int = 1, **keywords: Any
) -> list[Plan]:
    """Make one plan for each link, as a study needs them by the hundred; `keywords` are those of `plan`.

    Args:
        workers: processes that share the optimisation. Starting them costs a few seconds, which pays for thousands of
            plans or long ones; a script that uses them needs the usual `if __name__ == "__main__":`.
    """
    deprecated = {name: keywords.pop(name) for name in [*keywords] if name not in Options.__dataclass_fields__}
    options = checked_options(keywords, deprecated)
    prepared = [_prepare(_Setting(posterior, link, privacy, options)) for link in links]
    if workers <= 1 or len(prepared) < 2:
        return [item.plan() for item in prepared]
    # Not fork: JAX runs threads, and a forked copy of them may hang.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        chunk = -(-len(prepared) // (4 * workers))
        work = [item.allocate for item in prepared], [item.problem for item in prepared]
        allocations = list(pool.map(_solve, *work, chunksize=chunk))
    return [item.finish(allocation) for item, allocation in zip(prepared, allocations, strict=True)]


def _solve(allocate: Callable[[Problem], Allocation], problem: Problem) -> Allocation:
    return allocate(problem)


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What a plan is made for, and what follows from it alone."""

    posterior: Posterior
    link: Link
    privacy: Privacy
    options: Options
    usual_step: float = np.inf
    """Rounds with a larger step than this may not be noisier than clipped gradients can undo."""

    @cached_property
    def scheme(self) -> PowerPolicy:
        """How power is chosen."""
        power = self.options.policy.power
        if isinstance(power, PowerPolicy):
            return power
        return policy_named(power) if isinstance(power, str) else PowerPolicy(power)

    @cached_property
    def step_size(self) -> Array:
        """η[S] from a number or one for each round."""
        eta, rounds = np.asarray(self.options.step_size, dtype=float), self.options.burn_in + self.options.samples
        if eta.ndim > 0 and eta.shape != (rounds,):
            allowed = f"a number, or {rounds} of them, one per round"
            raise InputError("step_size", f"an array of shape {eta.shape}", allowed)
        return eta * np.ones(rounds)

    @cached_property
    def dynamics(self) -> Dynamics:
        """How chains move."""
        return self.options.sampler.motion

    @cached_property
    def contraction(self) -> Contraction:
        """Constants of the bound, [S]; step sizes that are too large are refused."""
        return self.dynamics.contraction(self.step_size, float(self.posterior.mu), float(self.posterior.L))

    @cached_property
    def clip(self) -> Array:
        """ℓ[K]."""
        return self.privacy.clips(self.posterior.devices)

    @cached_property
    def discretization(self) -> Array:
        """Lemma 2, [S]."""
        return discretization_error(self.step_size, float(self.posterior.L), self.posterior.dim)

    @property
    def first(self) -> int:
        """The number of the first round."""
        return self.options.sampler.start


class _Participation(NamedTuple):
    """Who transmits in every round, and what follows from it."""

    rule: Rule
    schedule: Schedule
    known: Gains
    """h[S, K] as devices know it."""
    received: Array | None
    """|h/ĥ|[S, K], None where both are equal."""
    scale: Array
    """K/K_a, [S]."""
    power_cap: Array
    """[S]."""
    forecast: Rule
    """The rule for rounds that are only imagined."""
    downlink: float
    """Variance of the downlink noise."""

    @property
    def weight(self) -> Array:
        """Of every device's gradient, [S, K]."""
        return self.schedule.active * self.scale[:, None]


class _Limits(NamedTuple):
    """What limits the power of rounds beside the devices' transmit power."""

    budget: Array
    """B_k of a, [K]; infinite without privacy."""
    before: Array
    """Loss spent before, [K]."""
    floor: Array
    """The least a, [S]."""
    noise: float
    """M of that floor."""


def _participation(setting: _Setting) -> _Participation:
    """Choose the active devices of every round."""
    link, scheme, clip = setting.link, setting.scheme, setting.clip
    devices, rounds, now = setting.posterior.devices, setting.step_size.size, slice(setting.first, None)
    known = link.gains(setting.first + rounds, devices)
    received = link.mismatch(setting.first + rounds, devices) if scheme.wireless else None
    if received is not None:
        known, received = known / received, received[now]  # what devices know, and plans are made of
    gains = np.abs(known).astype(float)[now]
    _ = setting.contraction  # refuses step sizes before anything is divided by them
    worth = setting.dynamics.noise_step(setting.step_size)
    rule = Rule(
        setting.options.policy.schedule if scheme.wireless else "all",
        clip,
        setting.posterior.dim * link.snr(devices) / clip**2,
        worth,
        noise_weight(setting.options.policy.bound, setting.posterior.dim),
        link.uncertainty if scheme.wireless else 1.0,
    )
    usual = dataclasses.replace(rule, step_size=float(worth[-1]))
    ranking = None
    if rule.name == "unbiased":
        chosen = causal.choose_senders(setting.options.policy.senders, link, usual)
        rule, usual = (dataclasses.replace(each, senders=chosen) for each in (rule, usual))
        quality, lots = link.quality(known)
        ranking = (quality[now], lots[now])
    who = rule(gains, ranking)
    power_cap = rule.power_cap(gains, who.active) if scheme.wireless else np.full(rounds, np.inf)
    downlink = link.downlink_noise * setting.posterior.prior_power if scheme.wireless else 0.0
    scale = devices / who.active.sum(-1)
    return _Participation(rule, who, known[now], received, scale, power_cap, usual, downlink)


def _limits(setting: _Setting, who: _Participation) -> _Limits:
    """Find what is left of the budgets, and how much noise a round may have."""
    policy, devices, active = setting.options.policy, setting.posterior.devices, who.schedule.active
    before = _ledger(setting.options.ledger, devices)
    budget = np.full(devices, np.inf)
    if setting.scheme.private:
        budget = _budget(setting.privacy, devices, before) / who.rule.uncertainty**2

    def least(limit: ArrayLike) -> Array:
        """a at which a round's noise is `limit` times what all clipped gradients can undo, [S]."""
        return np.asarray(setting.posterior.dim * (who.scale / (np.asarray(limit) * setting.clip.sum())) ** 2)

    noise_limit = np.inf if policy.max_round_noise is None else policy.max_round_noise
    if policy.max_round_noise is None and policy.objective == "exact" and setting.scheme.optimal:
        floor = least(USUAL_LIMIT)
        affordable = np.all(floor <= who.power_cap) and np.all(floor @ active <= budget)
        noise_limit = USUAL_LIMIT if affordable else np.inf
    limit = np.where(setting.step_size > setting.usual_step, np.minimum(noise_limit, 1.0), noise_limit)
    return _Limits(budget, before, least(limit), noise_limit)


def _problem(setting: _Setting, who: _Participation, limits: _Limits) -> Problem:
    """State the power problem."""
    posterior, options, step_size = setting.posterior, setting.options, setting.step_size
    start = posterior.initial_w2_sq(options.sampler.init) if options.initial_w2_sq is None else options.initial_w2_sq
    exact = options.policy.objective == "exact"
    # What noise in the received θ adds to a gradient, on average.
    downlink_error = who.downlink * posterior.downlink_error(who.weight) if who.downlink else np.zeros(step_size.size)
    return Problem(
        contraction=setting.contraction,
        step_size=step_size,
        burn_in=options.burn_in,
        objective=options.policy.objective,
        start=start,
        error=setting.discretization + step_size**2 * (who.rule.error(who.schedule.active) + downlink_error),
        noise_weight=who.rule.weight,
        scale=who.scale,
        active=who.schedule.active,
        budget=limits.budget,
        power_cap=who.power_cap,
        floor=limits.floor,
        noise_limit=limits.noise,
        solver=options.policy.solver,
        dynamics=setting.dynamics,
        response=_response(setting, who) if exact else None,
        fills_up=not exact or not setting.scheme.optimal,
    )


def _finish(
    setting: _Setting, who: _Participation, limits: _Limits, problem: Problem, rounding: float, allocation: Allocation
) -> Plan:
    """Make the plan of an allocation, with its certificate and its warnings."""
    posterior, link, options, scheme = setting.posterior, setting.link, setting.options, setting.scheme
    devices, unclipped = posterior.devices, np.full(posterior.devices, np.inf)
    bounds = problem.bound(allocation.a) if setting.dynamics.has_bound else None
    server_noise = problem.server_noise(allocation.a)
    value = np.nan if bounds is None else problem.value(bounds)
    if problem.response is not None:
        noise = (problem.kick * who.scale) ** 2 / allocation.a + server_noise
        value = float(Distances(problem.response)(noise).max())
    gains = np.abs(who.known)
    made = Plan.of(
        step_size=setting.step_size,
        gain=np.sqrt(allocation.a * link.noise_power),
        weight=who.weight,
        server_noise=server_noise,
        received=who.received,
        threshold=who.schedule.threshold,
        bound=bounds,
        power_share=allocation.a / who.power_cap,
        limit=_limit(problem, allocation.a, not scheme.optimal or options.policy.csi == "causal"),
        objective=value,
        objective_name=options.policy.objective,
        lower_bound=allocation.lower_bound,
        regime=_regime(problem) if np.all(gains == gains[0]) else None,
        gamma=float(problem.contraction.gamma[options.burn_in :].max()),
        noise_limit=limits.noise,
        privacy=setting.privacy,
        clip=setting.clip if scheme.clips else unclipped,
        example_clip=setting.privacy.example_clips(devices) if scheme.clips else unclipped,
        noise_power=link.noise_power,
        burn_in=options.burn_in,
        init=options.sampler.init,
        mu=float(posterior.mu),
        L=float(posterior.L),
        dim=posterior.dim,
        initial_w2_sq=problem.start,
        ledger=limits.before,
        start=setting.first,
        uncertainty=who.rule.uncertainty,
        enforced=scheme.private,
        dynamics=setting.dynamics,
        downlink_noise=who.downlink,
        rounding=rounding,
    )
    about_inputs = input_warnings(posterior, link if scheme.wireless else None, setting.privacy)
    return made.replace(warnings=(*about_inputs, *plan_warnings(posterior, made, problem, options)))


def _prepare(setting: _Setting) -> Prepared:
    """Schedule, caps and budgets: everything up to the power of the rounds."""
    _check_size(setting.options, setting.posterior.devices)
    if setting.options.sampler.step_schedule == "planned":
        return _with_planned_steps(setting)
    rounding = _rounding(setting.posterior, setting.privacy) if setting.scheme.clips else 0.0
    who = _participation(setting)
    limits = _limits(setting, who)
    problem, allocate = _problem(setting, who, limits), setting.scheme.allocate
    if setting.options.policy.csi == "causal" and setting.scheme.wireless:
        law, usual = setting.link.fading.law, who.forecast
        ahead = causal.forecast(law, usual, who.known, float(setting.discretization[-1]))
        allocate = causal.causally(allocate, ahead)
    return Prepared(problem, allocate, partial(_finish, setting, who, limits, problem, rounding))


def _check_size(options: Options, devices: int) -> None:
    """Refuse a plan that does not fit into a usual memory, before anything of its size is made."""
    rounds = options.sampler.start + options.burn_in + options.samples
    needed = PAIR_BYTES * rounds * max(devices, 3)  # there are some numbers for every round alone
    if needed > MEMORY:
        name = "samples" if options.samples >= options.burn_in else "burn_in"
        why = f"planning {rounds:,} rounds of {devices:,} devices takes about {needed / 1e9:,.0f} GB of memory"
        allowed = f"smaller: {why}, and {MEMORY / 1e9:.0f} GB is the limit. Plan fewer rounds or devices"
        raise InputError(name, getattr(options, name), f"{allowed}; `wflmc plan --capacity` estimates such a plan")


def _with_planned_steps(setting: _Setting) -> Prepared:
    """Search for the step sizes of burn-in over whole plans; large steps are only taken where they can be undone."""
    options = setting.options
    kept = float(np.asarray(options.step_size))
    constant = dataclasses.replace(options.sampler, step_schedule="constant")

    def prepared(steps: Array) -> Prepared:
        given = dataclasses.replace(options, step_size=steps, sampler=constant)
        return _prepare(dataclasses.replace(setting, options=given, usual_step=kept * (1 + 1e-9)))

    steps = plan_steps(lambda steps: prepared(steps).plan(), kept, options.burn_in, options.samples)
    best = prepared(steps)
    if np.ptp(steps) > 0 or options.burn_in == 0:
        return best
    note = "No other step sizes of burn-in were found better: step_schedule = 'planned' has kept the constant one."

    def finish(allocation: Allocation) -> Plan:
        plan = best.finish(allocation)
        return plan.replace(warnings=(*plan.warnings, note))

    return best._replace(finish=finish)


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


def _rounding(posterior: Posterior, privacy: Privacy) -> float:
    """e of `Plan.rounding`; where float32 would blur more than a little, the plan is refused."""
    clip, example_clip = privacy.clips(posterior.devices), privacy.example_clips(posterior.devices)
    # What rounding may add to a change is the same for all neighbours, which may differ by less than 2 min(c, ℓ).
    less = float(np.max(np.minimum(clip, example_clip) / privacy.sensitivity(posterior.devices)))
    found = less * posterior.margin(clip, example_clip)
    if found <= LARGEST_MARGIN:
        return found
    sizes = f"a float32 sum of {posterior.devices:,} devices that send up to {clip.max():.3g} each"
    why = f"{sizes} hides a change of {np.minimum(clip, example_clip).min():.3g} only to within {found:.0%}"
    name = "example_clip" if np.isfinite(example_clip).any() else "clip"
    given = np.unique(example_clip if name == "example_clip" else clip)
    allowed = "nearer to clip, or clip smaller" if name == "example_clip" else "nearer to one another"
    raise InputError(name, given.tolist() if given.size > 1 else given[0], f"{allowed}: {why}")


def _response(setting: _Setting, who: _Participation) -> AnyResponse:
    """How the kept rounds' law answers to the noise of this plan's rounds, by the proxy or the posterior itself."""
    posterior, proxy, before = setting.posterior, setting.options.policy.proxy, setting.options.sampler.before
    step_size, weight, burn_in = setting.step_size, who.weight, setting.options.burn_in
    if before is not None:
        step_size, weight = np.append(before.step_size, step_size), np.concatenate([before.weight, weight])
        burn_in += len(before.rounds)
    motion = Motion(step_size, weight, setting.options.sampler.init, setting.dynamics, who.downlink)
    by: AnyResponse = (
        posterior.response(motion, burn_in) if proxy is None else proxy.response(posterior.dim, motion, burn_in)
    )
    if not all(np.all(np.abs(part) < 1e100) for part in (by.effect, by.covariance, by.shift)):
        raise InputError("objective", "exact", "worst or average here: the chain diverges and its law overflows")
    return by if before is None else continued(by, before.noise_variance)


def _regime(problem: Problem) -> str | None:
    """Theorem 1's regime where it applies: limits that do not change over the rounds."""
    if problem.objective == "exact" or not closed_form.is_static(problem):
        return None
    share = closed_form.tightest(problem) / problem.rounds
    return str(closed_form.regime(problem.lmc_cap[0], problem.power_cap[0], share))


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
    names = closed_form.REGIMES
    kinds = [names.index(closed_form.LMC), names.index(closed_form.POWER)]
    return np.select([at_lmc, at_power], kinds, names.index(closed_form.DP))
