"""Making plans: who transmits, how strongly, and what that is worth; one at a time or hundreds for a study."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Gains, Link
from wflmc.dynamics import Array, Motion, Response, continued
from wflmc.planning import advice, causal, exact, schedule
from wflmc.planning.bound import Allocation, Problem, discretization_error
from wflmc.planning.defaults import example_clip_notice, fill_in, fill_in_example_clip
from wflmc.planning.options import Options, Policy, Sampler, checked_options
from wflmc.planning.plan import Certificate, Context, Plan, Rounds
from wflmc.planning.policies import PowerPolicy, equal_parts, policy_named
from wflmc.planning.solvers.closed_form import DP, LIMITS, LMC, POLICY, POWER, is_static, regime, tightest
from wflmc.planning.steps import plan_steps
from wflmc.planning.transcript import information
from wflmc.posterior.base import Posterior, check_posterior
from wflmc.privacy import Privacy
from wflmc.privacy.releases import ideal_link
from wflmc.sums.bound import LARGEST_ROUNDING
from wflmc.support.errors import InputError
from wflmc.support.notices import Notice, NoticeCode

PAIR_BYTES, MEMORY = 100, 64_000_000_000
"""Bytes that planning takes at its peak for a round and a device, and the most that a plan may take."""

NOTHING = 1e-9
"""Share of a budget that is rounding, not something left to spend."""
ACTIVE = 1e-5
"""Relative distance from a limit up to which a round counts as being at it."""
USUAL_LIMIT = 2.0
"""The limit on a round's noise for plans by the exact law, which would else make early rounds as loud as they like."""
TRANSCRIPT_PART = 0.5
"""The largest part of a budget that a limit on the noise of rounds may take in plans for transcripts."""
DEFAULT_SAMPLER = Sampler()
DEFAULT_POLICY = Policy()


def plan(
    posterior: Posterior,
    link: Link | None = None,
    privacy: Privacy | None = None,
    *,
    step_size: ArrayLike | None = None,
    burn_in: int | None = None,
    samples: int | None = None,
    sampler: Sampler = DEFAULT_SAMPLER,
    policy: Policy = DEFAULT_POLICY,
    ledger: ArrayLike | None = None,
    initial_w2_sq: float | None = None,
    **deprecated: Any,
) -> Plan:
    """Decide which devices transmit and how strongly in every round.

    `plan(posterior)` is plain Langevin sampling: over an ideal link, without a promise,
    and with nothing clipped.

    Args:
        posterior: the model, its data split over devices.
        link: the channels, and what devices may transmit; None for an ideal link, which
            limits nothing.
        privacy: the promise; None promises nothing, as `Privacy()` does, whose `clip`
            is 30. Where it hides records and has no `example_clip`, one is chosen as in
            `wflmc.planning.defaults`, and a warning says so. Where link and privacy are
            both None the policy is `noiseless`, which does not clip, unless `policy`
            says otherwise.
        step_size: η, above 0 and below 2/L: a number, or one for each of the S_b + S_u rounds; with kinetic dynamics
            h, below 2/√L. Longer steps are a warning where L is known to be loose. What is left out of these three is
            chosen as in `wflmc.planning.defaults`, without a promise of privacy and `sampler` with kinetic dynamics.
        burn_in: S_b, rounds that are discarded.
        samples: S_u, rounds that are kept.
        sampler: the chain, beyond that.
        policy: who transmits, and how strongly.
        ledger: loss that each device has spent before, [K]; the plan makes do with what is left.
        initial_w2_sq: W2² between start and posterior, where a public value is known; else computed.
        **deprecated: the fields of `sampler` and `policy` as keywords, as in version 0.1.

    Returns:
        The plan, which is all that `wflmc.sample` needs.

    Raises:
        InputError: an argument is of the wrong kind or out of range, or limits
            contradict each other.

    Examples:
        >>> import jax, wflmc
        >>> posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
        >>> wflmc.plan(posterior).regime
        'lmc-limited'
    """
    check_posterior(posterior)
    if link is None and privacy is None and policy is DEFAULT_POLICY:
        policy = Policy(power="noiseless")
    link = ideal_link() if link is None else link
    privacy = Privacy() if privacy is None else privacy
    for name, value, kind in (("link", link, Link), ("privacy", privacy, Privacy)):
        if not isinstance(value, kind):
            raise InputError(name, type(value).__name__, f"a wflmc.{kind.__name__}")
    asked = privacy
    privacy = fill_in_example_clip(posterior, asked)
    given = {"step_size": step_size, "burn_in": burn_in, "samples": samples, "sampler": sampler, "policy": policy}
    if step_size is None or burn_in is None or samples is None:
        given = fill_in(posterior, privacy, given, sampler is not DEFAULT_SAMPLER or bool(deprecated))
    options = checked_options(given | {"ledger": ledger, "initial_w2_sq": initial_w2_sq} | deprecated)
    result = _prepare(posterior, link, privacy, options).plan()
    if privacy is asked:
        return result
    return result.with_notices((*result.notices, example_clip_notice(privacy)))


def plan_many(posterior: Posterior, links: Sequence[Link], privacy: Privacy, **keywords: Any) -> list[Plan]:
    """Make one plan for each link, as a study needs them by the hundred; `keywords` are those of `plan`."""
    options = checked_options(keywords)
    return [_prepare(posterior, link, privacy, options).plan() for link in links]


def _prepare(posterior: Posterior, link: Link, privacy: Privacy, options: Options) -> "_Planning":
    """Return everything up to the power of the rounds, with the step sizes of burn-in if they are to be planned."""
    _check_size(options, posterior.devices)
    if options.sampler.step_schedule == "constant":
        return _Planning(posterior, link, privacy, options)
    kept = float(np.asarray(options.step_size))
    constant = dataclasses.replace(options.sampler, step_schedule="constant")

    def with_steps(steps: Array, *notes: Notice) -> "_Planning":
        given = dataclasses.replace(options, step_size=steps, sampler=constant)
        return _Planning(posterior, link, privacy, given, kept * (1 + 1e-9), *notes)

    steps = plan_steps(lambda steps: with_steps(steps).plan(), kept, options.burn_in, options.samples)
    if np.ptp(steps) > 0 or options.burn_in == 0:
        return with_steps(steps)
    text = "No other step sizes of burn-in were found better: step_schedule = 'planned' has kept the constant one."
    return with_steps(steps, Notice(NoticeCode.STEPS_NOT_IMPROVED, text))


def _check_size(options: Options, devices: int) -> None:
    """Refuse a plan that does not fit into a usual memory, before anything of its size is made."""
    rounds = options.sampler.start + options.burn_in + options.samples
    needed = PAIR_BYTES * rounds * max(devices, 3)  # there are some numbers for every round alone
    if needed > MEMORY:
        name = "samples" if options.samples >= options.burn_in else "burn_in"
        why = f"planning {rounds:,} rounds of {devices:,} devices takes about {needed / 1e9:,.0f} GB of memory"
        allowed = f"smaller: {why}, and {MEMORY / 1e9:.0f} GB is the limit. Plan fewer rounds or devices"
        raise InputError(name, getattr(options, name), f"{allowed}; docs/scale.md has formulas for larger ones")


class _Planning:
    """Participation, budgets and the power problem of a plan; `finish` makes the plan of its solution.

    Args:
        usual: rounds with a larger step size than this may not be noisier than clipped gradients can undo.
        notes: notices of the plan beside those about its numbers.
    """

    def __init__(
        self,
        posterior: Posterior,
        link: Link,
        privacy: Privacy,
        options: Options,
        usual: float = np.inf,
        *notes: Notice,
    ) -> None:
        self.posterior, self.link, self.privacy, self.options, self.notes = posterior, link, privacy, options, notes
        devices, power, first = posterior.devices, options.policy.power, options.sampler.start
        named = policy_named(power) if isinstance(power, str) else power
        self.scheme = named if isinstance(named, PowerPolicy) else PowerPolicy(named)
        self.step_size = np.asarray(options.step_size, dtype=float) * np.ones(options.burn_in + options.samples)
        self.clip, self.example_clip = privacy.clips(devices), privacy.example_clips(devices)
        self.rounding = self._rounding() if self.scheme.clips else 0.0
        self.mu, self.L = float(posterior.mu), float(posterior.L)
        if not 0 < self.mu <= self.L:
            raise InputError("mu", self.mu, f"above 0 and at most L = {self.L:g}")
        # A bound on the curvature that is loose everywhere is no reason to refuse steps that are stable along a chain.
        stable = 1 / float(options.sampler.motion.stretching_step(self.step_size).max())
        self.contracts = not (posterior.curvature_is_loose and self.mu <= stable <= self.L / 2)
        if not self.contracts:
            self.L = stable
        self.contraction = options.sampler.motion.contraction(self.step_size, self.mu, self.L)
        known, self.received = link.gains(first + self.step_size.size, devices), None
        self.uncertainty, self.downlink_noise = 1.0, 0.0
        if self.scheme.wireless:
            self.uncertainty, self.downlink_noise = link.uncertainty, link.downlink_noise * posterior.prior_power
            received = link.mismatch(*known.shape)
            if received is not None:  # plans are made of what devices know
                known, self.received = known / received, received[first:]
        self.known, self.gains = known[first:], np.abs(known[first:]).astype(float)
        self.rule, self.schedule = self._participation(known)
        active = self.schedule.active
        self.scale = devices / active.sum(-1)
        self.weight = active * self.scale[:, None]
        self.ledger = self._spent_before()
        self.problem = self._problem(usual)

    def plan(self) -> Plan:
        """Solve it."""
        return self.finish(self.allocate(self.problem))

    def _rounding(self) -> float:
        """Return e of `Plan.rounding`; where float32 would blur more than a little, the plan is refused."""
        # What rounding may add to a change is the same for all neighbours, which may differ by less than 2 min(c, ℓ).
        smaller = np.minimum(self.clip, self.example_clip)
        less = float(np.max(smaller / self.privacy.sensitivity(self.posterior.devices)))
        found = less * self.posterior.rounding(self.clip, self.example_clip).total
        if found > LARGEST_ROUNDING:
            name = "example_clip" if np.isfinite(self.example_clip).any() else "clip"
            why = f"a float32 sum hides a change of {smaller.min():.3g} only to within {found:.0%}"
            raise InputError(name, np.unique(getattr(self, name)).tolist(), f"nearer to one another and to clip: {why}")
        return found

    def _participation(self, known: Gains) -> tuple[schedule.Rule, schedule.Schedule]:
        """Choose the active devices of every round, given the gains from round 0 on."""
        link, policy, dim = self.link, self.options.policy, self.posterior.dim
        name, reach = policy.schedule if self.scheme.wireless else "all", dim * link.snr(self.clip.size) / self.clip**2
        worth = self.options.sampler.motion.noise_step(self.step_size)
        # The paper prints β̃ where E‖√β̃ Δ‖² = m β̃ (Lemma 1).
        excess = float(dim) if policy.bound == "corrected" else 1.0
        rule = schedule.Rule(name, self.clip, reach, worth, excess, self.uncertainty)
        if rule.name != "unbiased":
            return rule, rule(self.gains)
        rule = dataclasses.replace(rule, senders=causal.choose_senders(policy.senders, link, rule))
        quality, lots = link.quality(known)
        return rule, schedule.by_quality(quality[-len(self.gains) :], lots[-len(self.gains) :], rule.senders)

    def _spent_before(self) -> Array:
        """Return the loss spent before, [K]."""
        ledger, devices = self.options.ledger, self.posterior.devices
        spent = np.zeros(devices) if ledger is None else np.asarray(ledger, dtype=float)
        if spent.shape != (devices,) or not np.all((spent >= 0) & np.isfinite(spent)):
            raise InputError("ledger", ledger, f"{devices} finite losses of at least 0, one per device")
        return spent

    def _budget(self) -> Array:
        """Return B_k = (R_k − ledger_k)/(2 sensitivity_k²), [K], over the square of the channels' uncertainty."""
        whole = self.privacy.budget(self.posterior.devices)
        left = whole - self.ledger
        empty = np.flatnonzero(left <= NOTHING * np.where(np.isfinite(whole), whole, 0.0))
        if empty.size:
            given = f"a loss of {self.ledger[empty[0]]:.6g} for device {empty[0]}"
            raise InputError("ledger", given, f"below its budget of {whole[empty[0]]:.6g}: nothing is left to spend")
        return left / (2 * self.privacy.sensitivity(self.posterior.devices) ** 2) / self.uncertainty**2

    def _problem(self, usual_step: float) -> Problem:
        """State the power problem."""
        posterior, options, step_size, active = self.posterior, self.options, self.step_size, self.schedule.active
        policy, by_law = options.policy, options.policy.objective == "exact"
        budget = self._budget() if self.scheme.private else np.full(posterior.devices, np.inf)
        power_cap = self.rule.power_cap(self.gains, active) if self.scheme.wireless else np.full(step_size.size, np.inf)

        def least(limit: ArrayLike) -> Array:
            """a at which a round's noise is `limit` times what all clipped gradients can undo, [S]."""
            return np.asarray(posterior.dim * (self.scale / (np.asarray(limit) * self.clip.sum())) ** 2)

        noise_limit = np.inf if policy.max_round_noise is None else policy.max_round_noise
        if policy.max_round_noise is None and by_law and self.scheme.optimal:
            floor = least(USUAL_LIMIT)
            if np.all(floor <= power_cap) and np.all(floor @ active <= budget):
                noise_limit = USUAL_LIMIT
        if policy.max_round_noise is None and policy.objective == "transcript" and self.scheme.optimal:
            needs = (least(1.0) / power_cap).max(), (least(1.0) @ active / budget).max() / TRANSCRIPT_PART
            noise_limit = max(1.0, float(np.max(needs)) ** 0.5 * (1 + 1e-9))
        limit = np.where(step_size > usual_step, np.minimum(noise_limit, 1.0), noise_limit)
        error = self.rule.error(active)
        if self.downlink_noise:  # what noise in the received θ adds to a gradient, on average
            error = error + self.downlink_noise * posterior.downlink_error(self.weight)
        start = options.initial_w2_sq
        if start is None:  # without a bound nobody asks how far away it is
            start = posterior.initial_w2_sq(options.sampler.init) if self.contracts else np.nan
        return Problem(
            **{name: getattr(self, name) for name in ("contraction", "step_size", "scale", "contracts")},
            burn_in=options.burn_in,
            objective=policy.objective,
            start=start,
            error=discretization_error(step_size, self.L, posterior.dim) + step_size**2 * error,
            noise_weight=self.rule.weight,
            active=active,
            budget=budget,
            power_cap=power_cap,
            floor=least(limit),
            noise_limit=noise_limit,
            solver=policy.solver,
            dynamics=options.sampler.motion,
            response=self._response() if by_law else None,
            fills_up=not by_law or not self.scheme.optimal,
        )

    def _response(self) -> Response:
        """Return how the kept rounds' law answers to this plan's noise, by the proxy or the posterior itself."""
        proxy, sampler, burn_in = self.options.policy.proxy, self.options.sampler, self.options.burn_in
        step_size, weight, before = self.step_size, self.weight, sampler.before
        if before is not None:
            step_size, weight = np.append(before.step_size, step_size), np.concatenate([before.weight, weight])
            burn_in += len(before.rounds)
        motion = Motion(step_size, weight, sampler.init, sampler.motion, self.downlink_noise)
        respond = self.posterior.response if proxy is None else partial(proxy.response, self.posterior.dim)
        by: Response = respond(motion, burn_in)
        if not all(np.all(np.abs(part) < 1e100) for part in (by.effect, by.covariance, by.shift)):
            raise InputError("objective", "exact", "worst or average here: the chain diverges and its law overflows")
        return by if before is None else continued(by, before.noise_variance)

    @property
    def allocate(self) -> Callable[[Problem], Allocation]:
        """How the power of the rounds is found."""
        if self.options.policy.csi == "full" or not self.scheme.wireless:
            return self.scheme.allocate
        usual = discretization_error(self.step_size, self.L, self.posterior.dim)[-1]
        forecast = causal.Forecast(self.link.fading.law, self.rule, self.known, float(usual))
        return causal.causally(self.scheme.allocate, forecast)

    def finish(self, allocation: Allocation) -> Plan:
        """Make the plan of an allocation, with its certificate and its notices."""
        problem = self.problem
        a = allocation.a
        rounds = Rounds(
            step_size=self.step_size,
            gain=np.sqrt(a * self.link.noise_power),
            weight=self.weight,
            server_noise=problem.server_noise(a),
            received=self.received,
        )
        plan = Plan(rounds, self._certificate(allocation), self._context())
        wireless_link = self.link if self.scheme.wireless else None
        about_inputs = advice.input_notices(self.posterior, wireless_link, self.privacy)
        about_plan = advice.plan_notices(self.posterior, plan, problem, self.options)
        return plan.with_notices((*about_inputs, *about_plan, *self.notes))

    def _certificate(self, allocation: Allocation) -> Certificate:
        """Return what is known of the plan of an allocation, without notices."""
        problem = self.problem
        a = allocation.a
        is_causal = self.options.policy.csi == "causal"
        limit = _limit(problem, a, self.scheme, causal=is_causal)
        is_static_link = np.all(self.gains == self.gains[0])
        gamma = problem.contraction.gamma[problem.burn_in :]
        bound = problem.bound(a) if problem.has_bound else None
        return Certificate(
            threshold=self.schedule.threshold,
            bound=bound,
            power_share=a / problem.power_cap,
            limit=limit,
            objective=self._objective(a, bound),
            objective_name=problem.objective,
            lower_bound=allocation.lower_bound,
            regime=_regime(problem, limit, self.scheme) if is_static_link else None,
            gamma=float(gamma.max()),
            noise_limit=problem.noise_limit,
        )

    def _objective(self, a: Array, bound: Array | None) -> float:
        """Return what the policy minimizes, at powers a[S] with their bound[S]."""
        problem = self.problem
        if problem.objective == "transcript":
            return 1 / information(problem, a)
        if problem.response is not None:
            noise = (problem.kick * problem.scale) ** 2 / a + problem.server_noise(a)
            return float(exact.distances(problem.response)(noise).max())
        return np.nan if bound is None else problem.value(bound)

    def _context(self) -> Context:
        """Return what the plan is made for."""
        unclipped = np.full(self.posterior.devices, np.inf)
        return Context(
            privacy=self.privacy,
            clip=self.clip if self.scheme.clips else unclipped,
            example_clip=self.example_clip if self.scheme.clips else unclipped,
            noise_power=self.link.noise_power,
            burn_in=self.problem.burn_in,
            init=self.options.sampler.init,
            mu=self.mu,
            L=self.L,
            dim=self.posterior.dim,
            sizes=np.asarray(self.posterior.sizes, dtype=np.intp),
            initial_w2_sq=self.problem.start,
            ledger=self.ledger,
            start=self.options.sampler.start,
            uncertainty=self.uncertainty,
            enforced=self.scheme.private,
            dynamics=self.problem.dynamics,
            downlink_noise=self.downlink_noise,
            rounding=self.rounding,
        )


def _regime(
    problem: Problem,
    limit: NDArray[np.intp],
    scheme: PowerPolicy,
) -> str | None:
    """Return what limits a whole plan, where limits do not change over the rounds.

    Of an optimum it is Theorem 1's regime. Other policies have it only as far as they
    reach its limit: in the DP-limited regime some rounds may sit at a cap, in all
    others every round sits at the same limit.

    Args:
        problem: the power problem.
        limit: of every round, [S], as `_limit` returns it.
        scheme: the policy.

    Returns:
        One of LIMITS; None where it changes with the round, or where the objective is
        not the bound.
    """
    if problem.objective in ("exact", "transcript") or not is_static(problem):
        return None
    equal_share = tightest(problem) / problem.rounds
    theorem = str(regime(problem.lmc_cap[0], problem.power_cap[0], equal_share))
    if scheme.optimal:
        return theorem
    limits = {LIMITS[index] for index in limit}
    if len(limits) == 1:
        return limits.pop()
    return theorem if theorem == DP and POLICY not in limits else None


def _limit(
    problem: Problem,
    a: Array,
    scheme: PowerPolicy,
    *,
    causal: bool,
) -> NDArray[np.intp]:
    """Return the limit of every round, by the constraints that are active in it.

    In this order: a round has the noise that Langevin sampling needs; or it is at the
    power limit of its weakest sender; or privacy holds it back, because a sender spends
    its whole budget over the rounds or the round takes all of its part of one. A round
    that none of these holds back has, of an optimum, the noise that the objective
    wants: more power would not lower it. Any other policy could have sent more
    strongly.

    Args:
        problem: the power problem.
        a: the power of every round, [S].
        scheme: the policy.
        causal: whether power was chosen without knowledge of later rounds, for which
            budget is kept back.

    Returns:
        Indices into LIMITS, [S].
    """
    spent = a @ problem.active >= (1 - ACTIVE) * problem.budget
    exhausted = (problem.active & spent).any(-1)
    # An optimum takes equal parts only where there is no bound.
    takes_parts = not scheme.optimal or not problem.contracts
    at_part = takes_parts & np.isclose(a, equal_parts(problem), rtol=ACTIVE, atol=0.0)
    shares_budget = scheme.shares_budget or (causal and scheme.optimal)
    kept_back = scheme.private and shares_budget and problem.fills_up
    at_budget = exhausted | at_part | kept_back
    at_power = a >= (1 - ACTIVE) * problem.power_cap
    at_lmc = problem.fills_up & (a >= (1 - ACTIVE) * problem.lmc_cap)
    return np.select(
        [at_lmc, at_power, at_budget],
        [LIMITS.index(LMC), LIMITS.index(POWER), LIMITS.index(DP)],
        default=LIMITS.index(LMC if scheme.optimal else POLICY),
    )
