"""Plans from requests: who transmits, how strongly, and what that is worth."""

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
    smallest_budget,
)
from wflmc.planning.steps import plan_steps
from wflmc.planning.transcript import information
from wflmc.posterior.base import Posterior, check_posterior
from wflmc.privacy import Privacy
from wflmc.privacy.releases import ideal_link
from wflmc.sums.bound import LARGEST_ROUNDING
from wflmc.support.errors import InputError
from wflmc.support.notices import Notice, NoticeCode

BYTES_PER_ROUND_AND_DEVICE = 100
"""Memory that planning takes at its peak, as measured."""
MIN_COUNTED_DEVICES = 3
"""Numbers for a round alone take as much memory as those of so many devices."""
MAX_PLAN_BYTES = 64_000_000_000
"""The most memory that a plan may take at its peak."""

EMPTY_BUDGET_FRACTION = 1e-9
"""Fraction of a budget that is rounding, not something left to spend."""
AT_LIMIT_TOLERANCE = 1e-5
"""Relative distance from a limit up to which a round counts as being at it."""
EXACT_NOISE_LIMIT = 2.0
"""M of a round's noise limit in plans by the exact law, unless the policy has one.

The law knows of no clipping, and would make early rounds noisier than clipped gradients
can undo.
"""
MAX_TRANSCRIPT_FLOORS_FRACTION = 0.5
"""The largest fraction of a budget that a limit on the noise of rounds may take.

It is for plans for transcripts.
"""
LONG_STEP_NOISE_LIMIT = 1.0
"""M of rounds whose step size exceeds that of the kept rounds."""
MAX_RESPONSE = 1e100
"""Entries of a chain's law from this size on mean that the chain diverges."""
ROUNDING_MARGIN = 1e-9
"""Relative margin by which a limit is widened, so that rounding does not cross it."""


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
        step_size: η, above 0 and below 2/L: a number, or one for each of the S_b + S_u
            rounds; with kinetic dynamics h, below 2/√L. Longer steps are a warning
            where L is known to be loose. Where step size, burn-in or samples are left
            out they are chosen as in `wflmc.planning.defaults`; without a step size, a
            promise of privacy and `sampler` dynamics are kinetic.
        burn_in: S_b, rounds that are discarded.
        samples: S_u, rounds that are kept.
        sampler: the chain, beyond that.
        policy: who transmits, and how strongly.
        ledger: privacy loss that each device has spent before, [K]; the plan spends no
            more than what is left of the budgets.
        initial_w2_sq: W2² between start and posterior, where a public value is known;
            otherwise it is computed.

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
    """Return the request that stands for the arguments of `plan`.

    Arguments that are left out are filled in as `plan` does: an ideal link, no promise,
    the policy `noiseless` where both are left out, and the usual step size and numbers
    of rounds. No plan is made, so that requests can be changed, compared and planned
    later by `plan_from`.

    Args:
        posterior: the model.
        link: the channels; None for an ideal link.
        privacy: the promise; None promises nothing.
        step_size: η, a number or [S_b + S_u]; None for the usual one.
        burn_in: S_b; None for the usual number.
        samples: S_u; None for the usual number.
        sampler: the chain, beyond that.
        policy: who transmits, and how strongly.
        ledger: privacy loss that each device has spent before, [K].
        initial_w2_sq: W2² between start and posterior, where a public value is known.

    Returns:
        The request, in which only a clip of examples may still be missing.

    Raises:
        InputError: an argument is of the wrong kind or out of range.
    """
    check_posterior(posterior)
    if link is None and privacy is None and policy is DEFAULT_POLICY:
        policy = Policy(power="noiseless")
    if link is None:
        link = ideal_link()
    if privacy is None:
        privacy = Privacy()
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

    It is what `plan` does once all arguments are filled in: choose the active devices,
    find the power of every round, and add certificate and notices. A clip of examples
    that the request lacks is chosen here, and a notice says so.

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
    filled_request = dataclasses.replace(request, privacy=privacy)
    result = _prepare(posterior, filled_request).plan()
    return result.with_notices((*result.notices, example_clip_notice(privacy)))


class TrialPlan:
    """A plan that is only compared with others.

    It has no notices, and its power is found only when `plan` is called: what is known
    before, such as the power problem, may rule it out.

    Args:
        posterior: the model, its data split over devices.
        request: all other arguments of `plan`.

    Raises:
        InputError: the request does not suit the posterior.
    """

    def __init__(self, posterior: Posterior, request: PlanRequest) -> None:
        privacy = fill_in_example_clip(posterior, request.privacy)
        filled_request = dataclasses.replace(request, privacy=privacy)
        self._planning = _prepare(posterior, filled_request)

    @property
    def problem(self) -> Problem:
        """Return the power problem of its rounds, for the devices that are active.

        It has caps, floors, budgets and the coefficients of the bound, and depends on
        the channels and on the posterior's constants alone. Any power within its
        limits is a plan.
        """
        return self._planning.problem

    @property
    def weight_received(self) -> Array:
        """Return the weights with which gradients enter the update, [S, K].

        They are known before power is: K/K_a of active devices, times |h/ĥ| where
        devices do not know their channels exactly, and 0 of silent ones. The plan will
        have the same `Plan.weight_received`.
        """
        planning = self._planning
        received = 1.0 if planning.received is None else planning.received
        return planning.weight * received

    @property
    def keeps_limits(self) -> bool:
        """Return whether its policy stays within the caps and budgets of the problem.

        This is known of the policies that come with wflmc. A custom policy may do
        anything, and bounds that hold for all power within the limits say nothing
        about it.
        """
        return self._planning.scheme in POLICIES.values()

    def plan(self) -> Plan:
        """Find the power of the rounds, and make the plan.

        Unlike `plan_from` it derives no notices, which would take time and are not
        needed in a search. Every call solves the problem again.

        Returns:
            The plan, with its certificate.

        Raises:
            InputError: its limits contradict each other.
        """
        allocation = self._planning.allocate(self.problem)
        return self._planning.draft(allocation)


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
    """Make one plan for each link, as studies over many channels need them.

    All other arguments are shared, so that differences between the plans come from
    the links alone. Nothing is filled in but the clip of examples.

    Args:
        posterior: the model, its data split over devices.
        links: of the plans.
        privacy: the promise, the same for all.
        step_size: η, a number, or one for each round.
        burn_in: S_b, rounds that are discarded.
        samples: S_u, rounds that are kept.
        sampler: the chain, beyond that.
        policy: who transmits, and how strongly.
        ledger: privacy loss that each device has spent before, [K].
        initial_w2_sq: W2² between start and posterior, where a public value is known.

    Returns:
        The plans, in the order of the links; none for no links.

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
    """Return everything up to the power of the rounds.

    The step sizes of burn-in are planned first, where the request asks for that.
    """
    _check_size(request, posterior.devices)
    if request.sampler.step_schedule == "planned":
        return _prepare_with_planned_steps(posterior, request)
    return _Planning(posterior, request)


def _prepare_with_planned_steps(
    posterior: Posterior, request: PlanRequest
) -> "_Planning":
    """Return everything up to the power of rounds whose step sizes are planned."""
    kept_step = float(np.asarray(request.step_size))
    usual_step = kept_step * (1 + ROUNDING_MARGIN)
    constant = dataclasses.replace(request.sampler, step_schedule="constant")

    def prepare(step_sizes: Array, extra_notices: Sequence[Notice] = ()) -> _Planning:
        candidate = dataclasses.replace(request, step_size=step_sizes, sampler=constant)
        return _Planning(
            posterior,
            candidate,
            usual_step=usual_step,
            extra_notices=extra_notices,
        )

    step_sizes = plan_steps(
        lambda candidate: prepare(candidate).plan(),
        kept_step,
        request.burn_in,
        request.samples,
    )
    is_constant = np.ptp(step_sizes) == 0
    if not is_constant or request.burn_in == 0:
        return prepare(step_sizes)
    not_improved = Notice(
        NoticeCode.STEPS_NOT_IMPROVED,
        "No other step sizes of burn-in were found better: "
        "step_schedule = 'planned' has kept the constant one.",
    )
    return prepare(step_sizes, [not_improved])


def _check_size(request: PlanRequest, devices: int) -> None:
    """Refuse a plan that does not fit into a usual memory.

    This comes before anything of its size is allocated.
    """
    rounds = request.sampler.start + request.rounds
    counted_devices = max(devices, MIN_COUNTED_DEVICES)
    required = BYTES_PER_ROUND_AND_DEVICE * rounds * counted_devices
    if required <= MAX_PLAN_BYTES:
        return
    name = "samples" if request.samples >= request.burn_in else "burn_in"
    raise InputError(
        name,
        getattr(request, name),
        f"smaller: planning {rounds:,} rounds of {devices:,} devices takes about "
        f"{required / 1e9:,.0f} GB of memory, and {MAX_PLAN_BYTES / 1e9:.0f} GB is the "
        "limit. Plan fewer rounds or devices; docs/guides/scale.md has formulas for "
        "larger ones",
        section="sampler",
    )


class Curvature(NamedTuple):
    """The constants of the posterior as a plan takes them."""

    mu: float
    """μ, the smallest curvature."""
    L: float
    """The largest curvature; less than the posterior's where `contracts` is false."""
    contracts: bool
    """Whether steps are below what the posterior's L allows.

    A bound that is loose everywhere is no reason to refuse steps that are stable along
    a chain: longer ones are then taken to be stable.
    """
    contraction: Contraction
    """How every round contracts."""


class Channels(NamedTuple):
    """The link as devices know it."""

    known_gains: Gains
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
    """The rule that decides it."""
    schedule: schedule.Schedule
    """Active devices and thresholds."""
    scale: Array
    """K over the number of active devices, [S]."""
    weight: Array
    """`scale` of active devices, 0 of others, [S, K]."""


class _Planning:
    """Participation, budgets and the power problem of a plan.

    `finish` makes the plan of a solution of the problem.

    Args:
        posterior: the model.
        request: what the plan is made for.
        usual_step: rounds with a larger step size than this may not be noisier than
            clipped gradients can undo.
        extra_notices: notices of the plan beside those about its numbers.
    """

    def __init__(
        self,
        posterior: Posterior,
        request: PlanRequest,
        *,
        usual_step: float = np.inf,
        extra_notices: Sequence[Notice] = (),
    ) -> None:
        self.posterior = posterior
        self.request = request
        self.link = request.link
        self.privacy = request.privacy
        self.extra_notices = extra_notices
        self.scheme = policy_named(request.policy.power)
        step_size = np.asarray(request.step_size, dtype=float)
        self.step_size = step_size * np.ones(request.rounds)
        self.clip = self.privacy.clips(posterior.devices)
        self.example_clip = self.privacy.example_clips(posterior.devices)
        self.rounding = self._rounding() if self.scheme.clips else 0.0

        # The order matters: each of the methods below reads what is set above it.
        curvature = _curvature(posterior, request.sampler.motion, self.step_size)
        self.mu = curvature.mu
        self.L = curvature.L
        self.contracts = curvature.contracts
        self.contraction = curvature.contraction

        channels = _channels(self.link, posterior, request, self.scheme)
        self.received = channels.received
        self.uncertainty = channels.uncertainty
        self.downlink_noise = channels.downlink_noise
        self.known_gains = channels.known_gains[request.sampler.start :]
        self.gains = np.abs(self.known_gains).astype(float)

        participation = self._participation(channels.known_gains)
        self.rule = participation.rule
        self.schedule = participation.schedule
        self.scale = participation.scale
        self.weight = participation.weight

        self.ledger = self._spent_before()
        self.problem = self._problem(usual_step)

    def plan(self) -> Plan:
        """Find the power of every round, and make the plan with its notices."""
        return self.finish(self.allocate(self.problem))

    def _rounding(self) -> float:
        """Return e of `Plan.rounding`.

        Where float32 would blur sums by more than a little, the plan is refused.
        """
        # What rounding may add to a change is the same for all neighbours, which may
        # differ by less than 2 min(c, ℓ).
        smaller_clip = np.minimum(self.clip, self.example_clip)
        sensitivity = self.privacy.sensitivity(self.posterior.devices)
        largest_ratio = float(np.max(smaller_clip / sensitivity))
        error = self.posterior.rounding(self.clip, self.example_clip)
        rounding = largest_ratio * error.total
        if rounding <= LARGEST_ROUNDING:
            return rounding
        name = "clip"
        clips = self.clip
        if np.isfinite(self.example_clip).any():
            name = "example_clip"
            clips = self.example_clip
        raise InputError(
            name,
            np.unique(clips).tolist(),
            "nearer to one another and to clip: a float32 sum hides a change of "
            f"{smaller_clip.min():.3g} only to within {rounding:.0%}",
            section="privacy",
        )

    def _participation(self, known_gains: Gains) -> Participation:
        """Choose the active devices of every round.

        Args:
            known_gains: gains from round 0 on, [start + S, K].
        """
        rule = self._rule()
        if rule.name == "unbiased":
            senders = self.request.policy.senders
            chosen_senders = causal.choose_senders(senders, self.link, rule)
            rule = dataclasses.replace(rule, senders=chosen_senders)
            ranking = self.link.ranking(known_gains)
            chosen = rule(self.gains, ranking.last_rounds(len(self.gains)))
        else:
            chosen = rule(self.gains)
        scale = self.posterior.devices / chosen.active.sum(-1)
        weight = chosen.active * scale[:, None]
        return Participation(rule=rule, schedule=chosen, scale=scale, weight=weight)

    def _rule(self) -> schedule.Rule:
        """Return the rule of participation; `unbiased` has no number of senders yet."""
        policy = self.request.policy
        devices = self.posterior.devices
        dim = self.posterior.dim
        motion = self.request.sampler.motion
        # The paper prints β̃ where E‖√β̃ Δ‖² = m β̃ (Lemma 1).
        noise_weight = float(dim) if policy.bound == "corrected" else 1.0
        return schedule.Rule(
            name=policy.schedule if self.scheme.wireless else "all",
            clip=self.clip,
            unit_gain_cap=dim * self.link.snr(devices) / self.clip**2,
            step_size=motion.noise_step(self.step_size),
            noise_weight=noise_weight,
            uncertainty=self.uncertainty,
        )

    def _spent_before(self) -> Array:
        """Return the privacy loss spent before, [K]."""
        ledger = self.request.ledger
        devices = self.posterior.devices
        if ledger is None:
            return np.zeros(devices)
        spent = np.asarray(ledger, dtype=float)
        is_loss = (spent >= 0) & np.isfinite(spent)
        if spent.shape != (devices,) or not np.all(is_loss):
            expected = f"{devices} finite losses of at least 0, one per device"
            raise InputError("ledger", ledger, expected)
        return spent

    def _budget(self) -> Array:
        """Return B_k = (R_k − ledger_k)/(2 s_k²), [K], the most of Σ_s active a.

        s_k is the sensitivity. B_k is divided by the square of the channels'
        uncertainty, since devices may arrive that much more strongly than intended.
        """
        devices = self.posterior.devices
        if not self.scheme.private:
            return np.full(devices, np.inf)
        total = self.privacy.budget(devices)
        remaining = total - self.ledger
        finite_total = np.where(np.isfinite(total), total, 0.0)
        exhausted = np.flatnonzero(remaining <= EMPTY_BUDGET_FRACTION * finite_total)
        if exhausted.size:
            device = exhausted[0]
            raise InputError(
                "ledger",
                f"a loss of {self.ledger[device]:.6g} for device {device}",
                f"below its budget of {total[device]:.6g}: nothing is left to spend",
            )
        sensitivity = self.privacy.sensitivity(devices)
        return remaining / (2 * sensitivity**2) / self.uncertainty**2

    def _problem(self, usual_step: float) -> Problem:
        """State the power problem.

        Args:
            usual_step: as of the class.
        """
        policy = self.request.policy
        is_exact = policy.objective == "exact"
        budget = self._budget()
        power_cap = self._power_cap()
        noise_limit = self._noise_limit(power_cap, budget)
        long_step_limit = np.minimum(noise_limit, LONG_STEP_NOISE_LIMIT)
        is_long = self.step_size > usual_step
        limit = np.where(is_long, long_step_limit, noise_limit)
        return Problem(
            contraction=self.contraction,
            step_size=self.step_size,
            scale=self.scale,
            contracts=self.contracts,
            burn_in=self.request.burn_in,
            objective=policy.objective,
            initial_bound=self._initial_w2_sq(),
            error=self._error(),
            noise_weight=self.rule.noise_weight,
            active=self.schedule.active,
            budget=budget,
            power_cap=power_cap,
            floor=self._floor(limit),
            dim=self.posterior.dim,
            temperature=self._temperature(),
            noise_limit=noise_limit,
            solver=policy.solver,
            dynamics=self.request.sampler.motion,
            response=self._response() if is_exact else None,
            fills_up=not self._chooses_all_noise,
        )

    @property
    def _chooses_all_noise(self) -> bool:
        """Whether the policy finds the optimum of the exact law."""
        return self.request.policy.objective == "exact" and self.scheme.optimal

    def _temperature(self) -> Array:
        """Return τ[S], at which rounds need noise of variance τ 2η.

        Kept rounds have 1, and burn-in what the sampler asks for. A plan that minimizes
        the bound has 1 in all rounds, as colder ones would only add to it, and a plan
        that finds the optimum of the exact law chooses all noise.
        """
        temperature = np.ones(self.request.rounds)
        has_bound = self.contracts and self.request.sampler.motion.has_bound
        is_transcript = self.request.policy.objective == "transcript"
        minimizes_bound = self.scheme.optimal and has_bound and not is_transcript
        if not minimizes_bound and not self._chooses_all_noise:
            burn_in = slice(0, self.request.burn_in)
            temperature[burn_in] = self.request.sampler.burn_in_temperature
        return temperature

    def _power_cap(self) -> Array:
        """Return the largest a = α²/N0 that the weakest active device affords, [S]."""
        if not self.scheme.wireless:
            return np.full(self.step_size.size, np.inf)
        return self.rule.power_cap(self.gains, self.schedule.active)

    def _error(self) -> Array:
        """Return the error of every round that power does not change, [S].

        It is in the units of `Problem.error`.
        """
        posterior = self.posterior
        step_size = self.step_size
        gradient_error = self.rule.error(self.schedule.active)
        if self.downlink_noise:
            # What noise in the received θ adds to a gradient, on average, where devices
            # arrive as strongly as they may.
            per_unit = posterior.downlink_error(self.uncertainty * self.weight)
            gradient_error = gradient_error + self.downlink_noise * per_unit
        discretization = discretization_error(step_size, self.L, posterior.dim)
        return discretization + step_size**2 * gradient_error

    def _floor(self, limit: ArrayLike) -> Array:
        """Return the power at which a round's noise is at a limit, a[S].

        The noise of the received gradient has the norm √m (K/K_a)/√a, and the limit is
        M Σ ℓ_k. Without a limit the power is 0.

        Args:
            limit: M, in units of what all clipped gradients can undo, a number or [S].
        """
        largest_norm = np.asarray(limit) * self.clip.sum()
        return np.asarray(self.posterior.dim * (self.scale / largest_norm) ** 2)

    def _noise_limit(self, power_cap: Array, budget: Array) -> float:
        """Return M, the limit on the noise of a round.

        It is that of the policy, or what suits the policy's objective.

        Args:
            power_cap: the largest a of every round, [S].
            budget: B_k, [K].
        """
        policy = self.request.policy
        if policy.max_round_noise is not None:
            return policy.max_round_noise
        if not self.scheme.optimal:
            return np.inf
        active = self.schedule.active
        if policy.objective == "exact":
            floor = self._floor(EXACT_NOISE_LIMIT)
            has_power = np.all(floor <= power_cap)
            is_affordable = has_power and np.all(floor @ active <= budget)
            return EXACT_NOISE_LIMIT if is_affordable else np.inf
        if policy.objective == "transcript":
            floor = self._floor(1.0)
            of_power = (floor / power_cap).max()
            of_budget = (floor @ active / budget).max() / MAX_TRANSCRIPT_FLOORS_FRACTION
            excess = float(np.max((of_power, of_budget)))
            # The floor goes with 1/M².
            return max(1.0, excess**0.5 * (1 + ROUNDING_MARGIN))
        return np.inf

    def _initial_w2_sq(self) -> float:
        """Return W2² between start and posterior; nan where no bound uses it."""
        if self.request.initial_w2_sq is not None:
            return self.request.initial_w2_sq
        if not self.contracts:
            return np.nan
        return self.posterior.initial_w2_sq(self.request.sampler.init)

    def _response(self) -> Response:
        """Return how the law of the kept rounds depends on this plan's noise.

        It is computed by the proxy, or else by the posterior itself, for the weights
        that are intended: what arrives instead is not known beforehand.
        """
        sampler = self.request.sampler
        earlier = sampler.before
        step_size = self.step_size
        weight = self.weight
        burn_in = self.request.burn_in
        if earlier is not None:
            step_size = np.append(earlier.step_size, step_size)
            weight = np.concatenate([earlier.weight, weight])
            burn_in += len(earlier.rounds)
        motion = Motion(
            step_size=step_size,
            weight=weight,
            init=sampler.init,
            dynamics=sampler.motion,
            downlink=self.downlink_noise,
        )
        respond = self.posterior.response
        proxy = self.request.policy.proxy
        if proxy is not None:
            respond = partial(proxy.response, self.posterior.dim)
        response: Response = respond(motion, burn_in)
        _check_response(response)
        if earlier is None:
            return response
        return continued(response, earlier.noise_variance)

    @property
    def allocate(self) -> Callable[[Problem], Allocation]:
        """Return the function that finds the power of the rounds.

        It is that of the policy, made causal where later channels are not known.
        """
        if self.request.policy.csi == "full" or not self.scheme.wireless:
            return self.scheme.allocate
        dim = self.posterior.dim
        discretization = discretization_error(self.step_size, self.L, dim)
        forecast = causal.Forecast(
            self.link.fading.law,
            self.rule,
            self.known_gains,
            float(discretization[-1]),
        )
        return causal.without_foresight(self.scheme.allocate, forecast)

    def finish(self, allocation: Allocation) -> Plan:
        """Make the plan of an allocation, with its certificate and its notices."""
        plan = self.draft(allocation)
        link = self.link if self.scheme.wireless else None
        about_inputs = notices.input_notices(self.posterior, link, self.privacy)
        about_plan = notices.plan_notices(
            self.posterior, plan, self.problem, self.request
        )
        return plan.with_notices((*about_inputs, *about_plan, *self.extra_notices))

    def draft(self, allocation: Allocation) -> Plan:
        """Make the plan of an allocation, with its certificate but without notices."""
        a = allocation.a
        gain = np.sqrt(a * self.link.noise_power)
        server_noise = self.problem.server_noise(a)
        rounds = Rounds(
            step_size=self.step_size,
            gain=gain,
            weight=self.weight,
            server_noise=server_noise,
            received=self.received,
        )
        certificate = self._certificate(allocation)
        return Plan(rounds, certificate, self._context())

    def _certificate(self, allocation: Allocation) -> Certificate:
        """Return what is known of the plan of an allocation, without notices."""
        problem = self.problem
        a = allocation.a
        is_causal = self.request.policy.csi == "causal"
        limit = _limit(problem, a, self.scheme, is_causal=is_causal)
        is_static_link = np.all(self.gains == self.gains[0])
        regime_of_plan = None
        if is_static_link:
            regime_of_plan = _regime(problem, limit, self.scheme)
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
            regime=regime_of_plan,
            gamma=float(gamma.max()),
            noise_limit=problem.noise_limit,
        )

    def _objective(self, a: Array, bound: Array | None) -> float:
        """Return what the policy minimizes, at powers a[S] with their bound[S]."""
        problem = self.problem
        if problem.objective == "transcript":
            return 1 / information(problem, a)
        if problem.response is not None:
            noise = problem.channel_noise(a) + problem.server_noise(a)
            distances = exact.distances(problem.response)
            return float(distances(noise).max())
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
            initial_w2_sq=self.problem.initial_bound,
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
        expected = f"above 0 and at most L = {L:g}"
        raise InputError("mu", mu, expected, section="posterior")
    longest_step = float(motion.stretching_step(step_size).max())
    stable = np.inf  # steps of 0 are refused below
    if longest_step > 0:
        stable = 1 / longest_step
    exceeds_loose_bound = mu <= stable <= L / 2
    contracts = not (posterior.curvature_is_loose and exceeds_loose_bound)
    if not contracts:
        L = stable
    contraction = motion.contraction(step_size, mu, L)
    return Curvature(mu=mu, L=L, contracts=contracts, contraction=contraction)


def _check_response(response: Response) -> None:
    """Refuse the exact objective for a chain that diverges."""
    for part in (response.effect, response.covariance, response.shift):
        if not np.all(np.abs(part) < MAX_RESPONSE):
            raise InputError(
                "objective",
                "exact",
                "worst or average here: the chain diverges and its law overflows",
                section="policy",
            )


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
    first_round = request.sampler.start
    gains = link.gains(first_round + request.rounds, posterior.devices)
    if not scheme.wireless:
        return Channels(gains, received=None, uncertainty=1.0, downlink_noise=0.0)
    known_gains = gains
    received = None
    mismatch = link.mismatch(*gains.shape)
    if mismatch is not None:
        known_gains = gains / mismatch
        received = mismatch[first_round:]
    return Channels(
        known_gains=known_gains,
        received=received,
        uncertainty=link.uncertainty,
        downlink_noise=link.downlink_noise * posterior.prior_power,
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
    equal_part = smallest_budget(problem) / problem.rounds
    theorem = str(regime(problem.lmc_cap[0], problem.power_cap[0], equal_part))
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
    is_causal: bool,
) -> NDArray[np.intp]:
    """Return the limit of every round, by the constraints that are active in it.

    In this order: a round has the noise that Langevin sampling needs; or it is at the
    power limit of its weakest sender; or privacy holds it back, because a sender spends
    its whole budget over the rounds or the round takes all of its part of one. An
    optimum that none of these holds back has the noise that the objective wants: more
    power would not lower it. Any other policy could have transmitted with more power.

    Args:
        problem: the power problem.
        a: the power of every round, [S].
        scheme: the policy.
        is_causal: whether power was chosen without knowledge of later rounds, for which
            budget is kept back.

    Returns:
        Indices into LIMITS, [S].
    """
    nearly = 1 - AT_LIMIT_TOLERANCE
    has_spent_all = a @ problem.active >= nearly * problem.budget
    is_exhausted = (problem.active & has_spent_all).any(-1)
    parts = equal_parts(problem)
    is_at_part = (not scheme.optimal) & np.isclose(
        a, parts, rtol=AT_LIMIT_TOLERANCE, atol=0.0
    )
    shares_budget = scheme.shares_budget or (is_causal and scheme.optimal)
    is_held_back = scheme.private and shares_budget and problem.fills_up
    is_at_budget = is_exhausted | is_at_part | is_held_back
    is_at_power = a >= nearly * problem.power_cap
    is_at_lmc = problem.fills_up & (a >= nearly * problem.lmc_cap)
    return np.select(
        [is_at_lmc, is_at_power, is_at_budget],
        [LIMITS.index(LMC), LIMITS.index(POWER), LIMITS.index(DP)],
        default=LIMITS.index(LMC if scheme.optimal else POLICY),
    )
