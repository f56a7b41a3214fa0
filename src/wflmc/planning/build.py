"""Making plans: who transmits, how strongly, and what that is worth; one at a time or hundreds for a study."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Gains, Link
from wflmc.dynamics import Array, Contraction, Dynamics, Motion, Response, continued
from wflmc.planning import causal, exact, notices, schedule
from wflmc.planning.bound import Allocation, Problem, discretization_error
from wflmc.planning.defaults import (
    example_clip_notice,
    fill_in_chain,
    fill_in_example_clip,
)
from wflmc.planning.options import (
    DEFAULT_POLICY,
    DEFAULT_SAMPLER,
    PlanRequest,
    Policy,
    Sampler,
    check_kinds,
)
from wflmc.planning.plan import Certificate, Context, Plan, Rounds
from wflmc.planning.policies import POLICIES, PowerPolicy, equal_parts, policy_named
from wflmc.planning.solvers.closed_form import (
    DP,
    LIMITS,
    LMC,
    POLICY,
    POWER,
    is_static,
    regime,
    tightest,
)
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
    request = complete_request(
        posterior,
        link,
        privacy,
        step_size=step_size,
        burn_in=burn_in,
        samples=samples,
        sampler=sampler,
        policy=policy,
        ledger=ledger,
        initial_w2_sq=initial_w2_sq,
    )
    return plan_from(posterior, request)


def complete_request(
    posterior: Posterior,
    link: Link | None,
    privacy: Privacy | None,
    *,
    step_size: ArrayLike | None = None,
    burn_in: int | None = None,
    samples: int | None = None,
    sampler: Sampler = DEFAULT_SAMPLER,
    policy: Policy = DEFAULT_POLICY,
    ledger: ArrayLike | None = None,
    initial_w2_sq: float | None = None,
) -> PlanRequest:
    """Return the request of the arguments of `plan`, with what they leave out.

    Args:
        posterior: the model.
        link: as of `plan`.
        privacy: as of `plan`.
        step_size: as of `plan`.
        burn_in: as of `plan`.
        samples: as of `plan`.
        sampler: as of `plan`.
        policy: as of `plan`.
        ledger: as of `plan`.
        initial_w2_sq: as of `plan`.

    Returns:
        The request; `plan_from` makes the plan of it.

    Raises:
        InputError: as of `plan`.
    """
    check_posterior(posterior)
    if link is None and privacy is None and policy is DEFAULT_POLICY:
        policy = Policy(power="noiseless")
    link = ideal_link() if link is None else link
    privacy = Privacy() if privacy is None else privacy
    check_kinds(link=link, privacy=privacy, sampler=sampler, policy=policy)
    chain = fill_in_chain(
        posterior,
        privacy,
        step_size=step_size,
        burn_in=burn_in,
        samples=samples,
        sampler=sampler,
        may_be_kinetic=sampler is DEFAULT_SAMPLER,
    )
    return PlanRequest(
        link=link,
        privacy=privacy,
        step_size=chain.step_size,
        burn_in=chain.burn_in,
        samples=chain.samples,
        sampler=chain.sampler,
        policy=policy,
        ledger=ledger,
        initial_w2_sq=initial_w2_sq,
    )


def plan_from(posterior: Posterior, request: PlanRequest) -> Plan:
    """Make the plan of a request.

    A clip of examples that it lacks is chosen, and a warning says so.

    Args:
        posterior: the model, its data split over devices.
        request: all other arguments of `plan`.

    Returns:
        The plan, as `plan` returns it.

    Raises:
        InputError: the request does not suit the posterior, or its limits contradict
            each other.
    """
    privacy = fill_in_example_clip(posterior, request.privacy)
    if privacy is request.privacy:
        return _prepare(posterior, request).plan()
    result = _prepare(posterior, dataclasses.replace(request, privacy=privacy)).plan()
    return result.with_notices((*result.notices, example_clip_notice(privacy)))


class TrialPlan:
    """A plan that is only compared with others: made without notices, and when it is asked for.

    Args:
        posterior: the model, its data split over devices.
        request: all other arguments of `plan`.

    Raises:
        InputError: the request does not suit the posterior.
    """

    def __init__(self, posterior: Posterior, request: PlanRequest) -> None:
        privacy = fill_in_example_clip(posterior, request.privacy)
        self._planning = _prepare(
            posterior, dataclasses.replace(request, privacy=privacy)
        )

    @property
    def problem(self) -> Problem:
        """What decides the power of its rounds."""
        return self._planning.problem

    @property
    def weight_received(self) -> Array:
        """As of `Plan`, [S, K]."""
        planning = self._planning
        received = 1.0 if planning.received is None else planning.received
        return planning.weight * received

    @property
    def keeps_limits(self) -> bool:
        """Whether its policy is known to stay below the caps and within the budgets of the problem."""
        return self._planning.scheme in POLICIES.values()

    def plan(self) -> Plan:
        """Make the plan.

        Raises:
            InputError: its limits contradict each other.
        """
        return self._planning.draft(self._planning.allocate(self.problem))


def plan_many(
    posterior: Posterior,
    links: Sequence[Link],
    privacy: Privacy,
    *,
    step_size: ArrayLike,
    burn_in: int,
    samples: int,
    sampler: Sampler = DEFAULT_SAMPLER,
    policy: Policy = DEFAULT_POLICY,
    ledger: ArrayLike | None = None,
    initial_w2_sq: float | None = None,
) -> list[Plan]:
    """Make one plan for each link, as a study needs them by the hundred.

    Args:
        posterior: the model, its data split over devices.
        links: of the plans.
        privacy: the promise, the same for all.
        step_size: η, a number, or one for each round.
        burn_in: S_b, rounds that are discarded.
        samples: S_u, rounds that are kept.
        sampler: the chain, beyond that.
        policy: who transmits, and how strongly.
        ledger: loss that each device has spent before, [K].
        initial_w2_sq: W2² between start and posterior, where a public value is known.

    Returns:
        The plans, in the order of the links.

    Raises:
        InputError: as of `plan`.
    """
    requests = [
        PlanRequest(
            link=link,
            privacy=privacy,
            step_size=step_size,
            burn_in=burn_in,
            samples=samples,
            sampler=sampler,
            policy=policy,
            ledger=ledger,
            initial_w2_sq=initial_w2_sq,
        )
        for link in links
    ]
    return [plan_from(posterior, request) for request in requests]


def _prepare(posterior: Posterior, request: PlanRequest) -> "_Planning":
    """Return everything up to the power of the rounds, with the step sizes of burn-in if they are to be planned."""
    _check_size(request, posterior.devices)
    if request.sampler.step_schedule == "constant":
        return _Planning(posterior, request)
    kept_step = float(np.asarray(request.step_size))
    constant = dataclasses.replace(request.sampler, step_schedule="constant")

    def with_steps(steps: Array, *notes: Notice) -> "_Planning":
        with_these = dataclasses.replace(request, step_size=steps, sampler=constant)
        return _Planning(posterior, with_these, kept_step * (1 + 1e-9), *notes)

    steps = plan_steps(
        lambda steps: with_steps(steps).plan(),
        kept_step,
        request.burn_in,
        request.samples,
    )
    if np.ptp(steps) > 0 or request.burn_in == 0:
        return with_steps(steps)
    text = "No other step sizes of burn-in were found better: step_schedule = 'planned' has kept the constant one."
    return with_steps(steps, Notice(NoticeCode.STEPS_NOT_IMPROVED, text))


def _check_size(request: PlanRequest, devices: int) -> None:
    """Refuse a plan that does not fit into a usual memory, before anything of its size is made."""
    rounds = request.sampler.start + request.rounds
    needed = (
        PAIR_BYTES * rounds * max(devices, 3)
    )  # there are some numbers for every round alone
    if needed > MEMORY:
        name = "samples" if request.samples >= request.burn_in else "burn_in"
        why = f"planning {rounds:,} rounds of {devices:,} devices takes about {needed / 1e9:,.0f} GB of memory"
        allowed = f"smaller: {why}, and {MEMORY / 1e9:.0f} GB is the limit. Plan fewer rounds or devices"
        allowed = f"{allowed}; docs/guides/scale.md has formulas for larger ones"
        raise InputError(name, getattr(request, name), allowed, section="sampler")


class Curvature(NamedTuple):
    """The constants that a plan takes for the posterior's, and how its rounds contract."""

    mu: float
    """μ, the smallest curvature."""
    L: float
    """The largest curvature; less than the posterior's where `contracts` is false."""
    contracts: bool
    """Whether L is a bound. A bound that is loose everywhere is no reason to refuse
    steps that are stable along a chain: these are then taken to be stable."""
    contraction: Contraction
    """Of every round."""


class Channels(NamedTuple):
    """The link as devices know it."""

    known: Gains
    """Gains that devices know, from round 0 on, [start + S, K]."""
    received: Array | None
    """|h/ĥ| of the plan's rounds, [S, K]; None where devices know their channels."""
    uncertainty: float
    """The largest |h/ĥ| that the link allows."""
    downlink_noise: float
    """Variance of the noise of what devices receive."""


class Participation(NamedTuple):
    """Who transmits in every round."""

    rule: schedule.Rule
    schedule: schedule.Schedule
    """Active devices and thresholds."""
    scale: Array
    """K over the number of active devices, [S]."""
    weight: Array
    """`scale` of active devices, 0 of others, [S, K]."""


class _Planning:
    """Participation, budgets and the power problem of a plan; `finish` makes the plan of its solution.

    Args:
        posterior: the model.
        request: what the plan is made for.
        usual_step: rounds with a larger step size than this may not be noisier than
            clipped gradients can undo.
        notes: notices of the plan beside those about its numbers.
    """

    def __init__(
        self,
        posterior: Posterior,
        request: PlanRequest,
        usual_step: float = np.inf,
        *notes: Notice,
    ) -> None:
        self.posterior = posterior
        self.request = request
        self.link = request.link
        self.privacy = request.privacy
        self.notes = notes
        self.scheme = policy_named(request.policy.power)
        self.step_size = np.asarray(request.step_size, dtype=float) * np.ones(
            request.rounds
        )
        self.clip = self.privacy.clips(posterior.devices)
        self.example_clip = self.privacy.example_clips(posterior.devices)
        self.rounding = self._rounding() if self.scheme.clips else 0.0

        curvature = _curvature(posterior, request.sampler.motion, self.step_size)
        self.mu = curvature.mu
        self.L = curvature.L
        self.contracts = curvature.contracts
        self.contraction = curvature.contraction

        channels = _channels(self.link, posterior, request, self.scheme)
        self.received = channels.received
        self.uncertainty = channels.uncertainty
        self.downlink_noise = channels.downlink_noise
        self.known = channels.known[request.sampler.start :]
        self.gains = np.abs(self.known).astype(float)

        participation = self._participation(channels.known)
        self.rule = participation.rule
        self.schedule = participation.schedule
        self.scale = participation.scale
        self.weight = participation.weight

        self.ledger = self._spent_before()
        self.problem = self._problem(usual_step)

    def plan(self) -> Plan:
        """Solve it."""
        return self.finish(self.allocate(self.problem))

    def _rounding(self) -> float:
        """Return e of `Plan.rounding`; where float32 would blur more than a little, the plan is refused."""
        # What rounding may add to a change is the same for all neighbours, which may differ by less than 2 min(c, ℓ).
        smaller_clip = np.minimum(self.clip, self.example_clip)
        sensitivity = self.privacy.sensitivity(self.posterior.devices)
        largest_ratio = float(np.max(smaller_clip / sensitivity))
        rounding = (
            largest_ratio * self.posterior.rounding(self.clip, self.example_clip).total
        )
        if rounding > LARGEST_ROUNDING:
            name = "example_clip" if np.isfinite(self.example_clip).any() else "clip"
            why = f"a float32 sum hides a change of {smaller_clip.min():.3g} only to within {rounding:.0%}"
            raise InputError(
                name,
                np.unique(getattr(self, name)).tolist(),
                f"nearer to one another and to clip: {why}",
                section="privacy",
            )
        return rounding

    def _participation(self, known: Gains) -> Participation:
        """Choose the active devices of every round.

        Args:
            known: gains from round 0 on, [start + S, K].
        """
        rule, chosen = self._rule_and_schedule(known)
        scale = self.posterior.devices / chosen.active.sum(-1)
        weight = chosen.active * scale[:, None]
        return Participation(rule=rule, schedule=chosen, scale=scale, weight=weight)

    def _rule_and_schedule(
        self, known: Gains
    ) -> tuple[schedule.Rule, schedule.Schedule]:
        """Return the rule of participation, and what it decides for these gains."""
        link = self.link
        policy = self.request.policy
        dim = self.posterior.dim
        rule = schedule.Rule(
            policy.schedule if self.scheme.wireless else "all",
            self.clip,
            dim * link.snr(self.clip.size) / self.clip**2,
            self.request.sampler.motion.noise_step(self.step_size),
            # The paper prints β̃ where E‖√β̃ Δ‖² = m β̃ (Lemma 1).
            float(dim) if policy.bound == "corrected" else 1.0,
            self.uncertainty,
        )
        if rule.name != "unbiased":
            return rule, rule(self.gains)
        rule = dataclasses.replace(
            rule, senders=causal.choose_senders(policy.senders, link, rule)
        )
        quality, lots = link.quality(known)
        rounds = len(self.gains)
        return rule, schedule.by_quality(
            quality[-rounds:], lots[-rounds:], rule.senders
        )

    def _spent_before(self) -> Array:
        """Return the loss spent before, [K]."""
        ledger = self.request.ledger
        devices = self.posterior.devices
        spent = np.zeros(devices) if ledger is None else np.asarray(ledger, dtype=float)
        if spent.shape != (devices,) or not np.all((spent >= 0) & np.isfinite(spent)):
            raise InputError(
                "ledger",
                ledger,
                f"{devices} finite losses of at least 0, one per device",
            )
        return spent

    def _budget(self) -> Array:
        """Return B_k = (R_k − ledger_k)/(2 sensitivity_k²), [K], over the square of the channels' uncertainty."""
        devices = self.posterior.devices
        if not self.scheme.private:
            return np.full(devices, np.inf)
        whole = self.privacy.budget(devices)
        left = whole - self.ledger
        empty = np.flatnonzero(
            left <= NOTHING * np.where(np.isfinite(whole), whole, 0.0)
        )
        if empty.size:
            first = empty[0]
            spent = f"a loss of {self.ledger[first]:.6g} for device {first}"
            allowed = (
                f"below its budget of {whole[first]:.6g}: nothing is left to spend"
            )
            raise InputError("ledger", spent, allowed)
        return left / (2 * self.privacy.sensitivity(devices) ** 2) / self.uncertainty**2

    def _problem(self, usual_step: float) -> Problem:
        """State the power problem."""
        posterior = self.posterior
        policy = self.request.policy
        step_size = self.step_size
        active = self.schedule.active
        by_law = policy.objective == "exact"
        budget = self._budget()
        power_cap = np.full(step_size.size, np.inf)
        if self.scheme.wireless:
            power_cap = self.rule.power_cap(self.gains, active)
        noise_limit = self._noise_limit(power_cap, budget)
        limit = np.where(
            step_size > usual_step, np.minimum(noise_limit, 1.0), noise_limit
        )
        error = self.rule.error(active)
        if (
            self.downlink_noise
        ):  # what noise in the received θ adds to a gradient, on average
            error = error + self.downlink_noise * posterior.downlink_error(self.weight)
        return Problem(
            contraction=self.contraction,
            step_size=step_size,
            scale=self.scale,
            contracts=self.contracts,
            burn_in=self.request.burn_in,
            objective=policy.objective,
            start=self._initial_w2_sq(),
            error=discretization_error(step_size, self.L, posterior.dim)
            + step_size**2 * error,
            noise_weight=self.rule.weight,
            active=active,
            budget=budget,
            power_cap=power_cap,
            floor=self._floor(limit),
            noise_limit=noise_limit,
            solver=policy.solver,
            dynamics=self.request.sampler.motion,
            response=self._response() if by_law else None,
            fills_up=not by_law or not self.scheme.optimal,
        )

    def _floor(self, limit: ArrayLike) -> Array:
        """Return the power at which a round's noise is at a limit, a[S].

        Args:
            limit: M, in units of what all clipped gradients can undo, a number or [S].
        """
        reach = np.asarray(limit) * self.clip.sum()
        return np.asarray(self.posterior.dim * (self.scale / reach) ** 2)

    def _noise_limit(self, power_cap: Array, budget: Array) -> float:
        """Return M, the limit on the noise of a round.

        It is that of the policy, or what suits the policy's objective.

        Args:
            power_cap: the largest a of every round, [S].
            budget: B_k, [K].
        """
        policy = self.request.policy
        active = self.schedule.active
        if policy.max_round_noise is not None:
            return policy.max_round_noise
        if not self.scheme.optimal:
            return np.inf
        if policy.objective == "exact":
            floor = self._floor(USUAL_LIMIT)
            affordable = np.all(floor <= power_cap) and np.all(floor @ active <= budget)
            return USUAL_LIMIT if affordable else np.inf
        if policy.objective == "transcript":
            floor = self._floor(1.0)
            of_power = (floor / power_cap).max()
            of_budget = (floor @ active / budget).max() / TRANSCRIPT_PART
            return max(1.0, float(np.max((of_power, of_budget))) ** 0.5 * (1 + 1e-9))
        return np.inf

    def _initial_w2_sq(self) -> float:
        """Return W2² between start and posterior; nan where there is no bound to use it."""
        if self.request.initial_w2_sq is not None:
            return self.request.initial_w2_sq
        if not self.contracts:
            return np.nan
        return self.posterior.initial_w2_sq(self.request.sampler.init)

    def _response(self) -> Response:
        """Return how the kept rounds' law answers to this plan's noise, by the proxy or the posterior itself."""
        proxy = self.request.policy.proxy
        sampler = self.request.sampler
        burn_in = self.request.burn_in
        step_size = self.step_size
        weight = self.weight
        before = sampler.before
        if before is not None:
            step_size = np.append(before.step_size, step_size)
            weight = np.concatenate([before.weight, weight])
            burn_in += len(before.rounds)
        motion = Motion(
            step_size, weight, sampler.init, sampler.motion, self.downlink_noise
        )
        respond = (
            self.posterior.response
            if proxy is None
            else partial(proxy.response, self.posterior.dim)
        )
        response: Response = respond(motion, burn_in)
        parts = (response.effect, response.covariance, response.shift)
        if not all(np.all(np.abs(part) < 1e100) for part in parts):
            allowed = "worst or average here: the chain diverges and its law overflows"
            raise InputError("objective", "exact", allowed, section="policy")
        return (
            response if before is None else continued(response, before.noise_variance)
        )

    @property
    def allocate(self) -> Callable[[Problem], Allocation]:
        """How the power of the rounds is found."""
        if self.request.policy.csi == "full" or not self.scheme.wireless:
            return self.scheme.allocate
        usual = discretization_error(self.step_size, self.L, self.posterior.dim)[-1]
        forecast = causal.Forecast(
            self.link.fading.law, self.rule, self.known, float(usual)
        )
        return causal.causally(self.scheme.allocate, forecast)

    def finish(self, allocation: Allocation) -> Plan:
        """Make the plan of an allocation, with its certificate and its notices."""
        plan = self.draft(allocation)
        wireless_link = self.link if self.scheme.wireless else None
        about_inputs = notices.input_notices(
            self.posterior, wireless_link, self.privacy
        )
        about_plan = notices.plan_notices(
            self.posterior, plan, self.problem, self.request
        )
        return plan.with_notices((*about_inputs, *about_plan, *self.notes))

    def draft(self, allocation: Allocation) -> Plan:
        """Make the plan of an allocation, with its certificate but without notices."""
        problem = self.problem
        a = allocation.a
        rounds = Rounds(
            step_size=self.step_size,
            gain=np.sqrt(a * self.link.noise_power),
            weight=self.weight,
            server_noise=problem.server_noise(a),
            received=self.received,
        )
        return Plan(rounds, self._certificate(allocation), self._context())

    def _certificate(self, allocation: Allocation) -> Certificate:
        """Return what is known of the plan of an allocation, without notices."""
        problem = self.problem
        a = allocation.a
        is_causal = self.request.policy.csi == "causal"
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
            init=self.request.sampler.init,
            mu=self.mu,
            L=self.L,
            dim=self.posterior.dim,
            sizes=np.asarray(self.posterior.sizes, dtype=np.intp),
            initial_w2_sq=self.problem.start,
            ledger=self.ledger,
            start=self.request.sampler.start,
            uncertainty=self.uncertainty,
            enforced=self.scheme.private,
            dynamics=self.problem.dynamics,
            downlink_noise=self.downlink_noise,
            rounding=self.rounding,
        )


def _curvature(posterior: Posterior, motion: Dynamics, step_size: Array) -> Curvature:
    """Return the constants of a posterior, and how rounds of these step sizes contract.

    Args:
        posterior: the model.
        motion: the dynamics.
        step_size: of every round, [S].

    Raises:
        InputError: μ and L contradict each other, or a step is too long.
    """
    mu = float(posterior.mu)
    L = float(posterior.L)
    if not 0 < mu <= L:
        raise InputError(
            "mu", mu, f"above 0 and at most L = {L:g}", section="posterior"
        )
    longest = float(motion.stretching_step(step_size).max())
    stable = 1 / longest if longest > 0 else np.inf  # steps of 0 are refused below
    contracts = not (posterior.curvature_is_loose and mu <= stable <= L / 2)
    if not contracts:
        L = stable
    return Curvature(mu, L, contracts, motion.contraction(step_size, mu, L))


def _channels(
    link: Link, posterior: Posterior, request: PlanRequest, scheme: PowerPolicy
) -> Channels:
    """Return the link's gains as devices know them, of which plans are made.

    Args:
        link: the link.
        posterior: whose devices transmit.
        request: of which rounds.
        scheme: the policy; on an ideal link channels are known and the broadcast has
            no noise.
    """
    first = request.sampler.start
    gains = link.gains(first + request.rounds, posterior.devices)
    if not scheme.wireless:
        return Channels(gains, received=None, uncertainty=1.0, downlink_noise=0.0)
    downlink_noise = link.downlink_noise * posterior.prior_power
    mismatch = link.mismatch(*gains.shape)
    if mismatch is None:
        return Channels(gains, None, link.uncertainty, downlink_noise)
    return Channels(
        gains / mismatch, mismatch[first:], link.uncertainty, downlink_noise
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
