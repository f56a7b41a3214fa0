"""Power without knowledge of later channels.

In every round the later ones are forecast, all of them are planned with the budgets
that are left, and the first power of that plan is transmitted and charged.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wflmc.channel import ChannelRanking, Gains, GaussMarkov, Link, complex_normal
from wflmc.dynamics import Array, Contraction
from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.policies import check_floor, equal, optimal
from wflmc.planning.schedule import Rule, best_senders
from wflmc.planning.solvers.allocation import allocate
from wflmc.planning.solvers.program import HEADROOM
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator, seeded

SIMULATED_ROUNDS = 2000
"""Rounds drawn from a law, to choose the number of senders and to know a typical
round."""
FORECAST_DRAWS = 1000
"""Rounds drawn for one forecast of a correlated channel."""
MIN_FORECAST_PATHS = 8
"""The fewest draws of every later round, however many rounds are forecast."""
MAX_FORECAST_PATHS = 32
"""The most draws of every later round, however few rounds are forecast."""
FORGOTTEN_CORRELATION = 1e-2
"""Correlation with the present below which a later round is a typical one."""
PLAN_LIFETIME_FRACTION = 1 / 128
"""Fraction of the remaining rounds for which a plan serves: each of the last 128 rounds
is planned afresh."""
CAUSAL_GAP_TOLERANCE = 1e-6
"""Relative gap to which the remaining rounds are planned."""
LARGE_BUDGET_FRACTION = 1 / 8
"""A round that would spend more of what is left is planned afresh."""
MAX_LATER_FLOORS_FRACTION = 0.9
"""The largest fraction of what is left that the floors of later rounds may take."""


class SimulatedRounds(NamedTuple):
    """Independent rounds of a fading law."""

    gains: Gains
    """h[n, K]."""
    ranking: ChannelRanking | None
    """For `unbiased`: how good the channels are for their own devices, [n, K]."""


def simulate_rounds(law: GaussMarkov, rule: Rule) -> SimulatedRounds:
    """Draw `SIMULATED_ROUNDS` independent rounds of a law.

    The draws are the same for every link and every run, so that what is chosen by them
    does not depend on the channels that a run meets, which would bias the choice. Each
    round is the second of a pair, because its quality depends on the round before.

    Args:
        law: of the gains.
        rule: of participation, which decides the number of devices and whether
            channels are ranked.

    Returns:
        The gains, ranked for `unbiased`.
    """
    generator = host_generator(seeded(0), "forecast")
    before, noise = complex_normal(generator, 2, SIMULATED_ROUNDS, rule.clip.size)
    first = law.draw_first(before)
    second = law.draw_after(first, noise[:, None])[:, 0]
    pairs = np.stack([first, second], axis=-2)
    gains = pairs[:, 1]
    if rule.name != "unbiased":
        return SimulatedRounds(gains, ranking=None)
    quality = law.quality(pairs)[:, 1]
    tie_breaks = generator.random(noise.shape)
    return SimulatedRounds(gains, ChannelRanking(quality, tie_breaks))


def choose_senders(senders: int, link: Link, rule: Rule) -> int:
    """Return the number of devices that transmit in every round of `unbiased`.

    A number that the policy sets is taken. For 0 it is the one with the least mean
    error of a round at full power, by `best_senders` over simulated rounds of the
    link's fading law.

    Args:
        senders: q of the policy, or 0.
        link: the channels.
        rule: of participation.

    Returns:
        q, from 1 to K.

    Raises:
        InputError: q is out of range, or 0 where no fading law is known.
    """
    devices = rule.clip.size
    law = link.fading.law
    needs_law = senders == 0
    if not 0 <= senders <= devices or (needs_law and law is None):
        expected = f"between 1 and {devices}, or 0 where the fading law is known"
        raise InputError("senders", senders, expected, section="policy")
    if not needs_law or law is None:
        return senders
    gains, ranking = simulate_rounds(law, rule)
    assert ranking is not None
    step_sizes = np.ravel(rule.step_size)
    return best_senders(
        ranking.quality,
        ranking.tie_breaks,
        clip=rule.clip,
        device_cap=rule.unit_gain_cap * np.abs(gains) ** 2,
        step_size=float(step_sizes[-1]),
        noise_weight=rule.noise_weight,
    )


class Outlook(NamedTuple):
    """What is expected of n rounds, or known of them."""

    active: Array
    """Probability that a device transmits, [n, K]."""
    scale: Array
    """K/K_a, [n]."""
    power_cap: Array
    """Cap on a by transmit power and by the Langevin cap, [n]."""
    error: Array
    """Discretization and participation error, as `Problem.error`, [n]."""

    def mean_repeated(self, rounds: int) -> "Outlook":
        """Return the mean of these rounds, repeated.

        Every quantity is averaged by itself. It is the forecast for rounds of which
        nothing more is known.

        Args:
            rounds: how many times; 0 gives no rounds.

        Returns:
            The outlook on so many equal rounds.
        """
        return Outlook(
            active=_repeated_mean(self.active, rounds),
            scale=_repeated_mean(self.scale, rounds),
            power_cap=_repeated_mean(self.power_cap, rounds),
            error=_repeated_mean(self.error, rounds),
        )

    def followed_by(self, later: "Outlook") -> "Outlook":
        """Return these rounds and others after them.

        Args:
            later: the rounds that follow, of the same devices.

        Returns:
            The outlook on both, in this order.
        """
        return Outlook(
            active=np.concatenate([self.active, later.active]),
            scale=np.concatenate([self.scale, later.scale]),
            power_cap=np.concatenate([self.power_cap, later.power_cap]),
            error=np.concatenate([self.error, later.error]),
        )


def _repeated_mean(values: Array, count: int) -> Array:
    """Return the mean over the first axis, so many times."""
    return np.repeat(values.mean(0, keepdims=True), count, axis=0)


def outlook_on_known(problem: Problem, rounds: slice) -> Outlook:
    """Return rounds of a problem as they are.

    Args:
        problem: the power problem of all rounds.
        rounds: which of them.

    Returns:
        The outlook, in which every device transmits with probability 0 or 1, and the
        cap on power is the smaller of transmit power and the Langevin cap.
    """
    return Outlook(
        active=problem.active[rounds].astype(float),
        scale=problem.scale[rounds],
        power_cap=problem.cap[rounds],
        error=problem.error[rounds],
    )


class Forecast:
    """What the channels known by some round say about the rounds after it.

    Args:
        law: of the gains; None where nothing is known but past rounds.
        rule: of participation; later rounds have its last step size.
        known_gains: the gains as devices know them, h[S, K].
        discretization: error of a round in which all devices transmit.
    """

    def __init__(
        self,
        law: GaussMarkov | None,
        rule: Rule,
        known_gains: Gains,
        discretization: float,
    ) -> None:
        self.law = law
        self.known_gains = known_gains
        self.discretization = discretization
        step_sizes = np.ravel(rule.step_size)
        self.rule = replace(rule, step_size=float(step_sizes[-1]))
        self.typical: Outlook | None = None
        """A round of which nothing is known but the law, [1]."""
        self.noise: Gains | None = None
        """CN(0, 1) draws for rounds that the present says something about,
        [paths, n, K]."""
        if law is None:
            return
        chooses_at_random = rule.name == "unbiased"
        never_changes = law.scatter == 0 or law.correlation == 1
        if never_changes and not chooses_at_random:
            return
        self.typical = self._typical_round(law, rule)
        if law.correlation > 0 and not chooses_at_random:
            self.noise = self._draw_noise(law)

    def _typical_round(self, law: GaussMarkov, rule: Rule) -> Outlook:
        """Return one round that stands for all of which nothing is known but the law.

        It is the mean of simulated rounds, except that a device's probability to
        transmit is estimated from these rounds together with those of its equals.
        """
        simulated = simulate_rounds(law, rule)
        outlook = self.on_rounds(simulated.gains, simulated.ranking)
        # Laplace's rule of succession: no probability is 0 or 1.
        probability = (outlook.active.sum(0) + 1) / (SIMULATED_ROUNDS + 2)
        # With `unbiased` all devices transmit equally often, whatever their powers.
        traits: tuple[ArrayLike, ...] = ()
        if rule.name != "unbiased":
            traits = (law.power, rule.clip, rule.unit_gain_cap)
        pooled = _mean_over_equals(probability, traits)
        return outlook._replace(active=pooled[None]).mean_repeated(1)

    def _draw_noise(self, law: GaussMarkov) -> Gains:
        """Draw noise for the rounds that are correlated with the present one."""
        rounds, devices = self.known_gains.shape
        memory = int(np.log(FORGOTTEN_CORRELATION) / np.log(law.correlation)) + 1
        near_rounds = min(rounds, memory)
        paths = np.clip(
            FORECAST_DRAWS // near_rounds, MIN_FORECAST_PATHS, MAX_FORECAST_PATHS
        )
        generator = host_generator(seeded(0), "paths")
        return complex_normal(generator, int(paths), near_rounds, devices)

    def outlook(self, problem: Problem, round_index: int) -> Outlook:
        """Return what is expected of all rounds after one, from rounds up to it alone.

        Independent fading has typical rounds; correlated fading has rounds drawn given
        the present one, until it is forgotten; a constant channel stays as it is; and
        without a law later rounds are as past ones on average.

        Args:
            problem: the power problem, of which only rounds up to the present are used.
            round_index: the present round, from 0.

        Returns:
            The outlook on the rounds after it, none for the last round.
        """
        rounds = problem.rounds - round_index - 1
        if self.typical is None and self.law is None:
            past = round_index + 1
            mean = outlook_on_known(problem, slice(0, past)).mean_repeated(rounds)
            # A device that never transmitted may yet do so, and one that always did
            # may stop: the rule of succession.
            return mean._replace(active=(mean.active * past + 1) / (past + 2))
        if self.typical is None:
            present = slice(round_index, round_index + 1)
            return outlook_on_known(problem, present).mean_repeated(rounds)
        if self.law is None or self.noise is None or rounds == 0:
            return self.typical.mean_repeated(rounds)
        noise = self.noise[:, :rounds]
        near = self._near_outlook(self.law, self.typical, noise, round_index)
        return near.followed_by(self.typical.mean_repeated(rounds - noise.shape[1]))

    def _near_outlook(
        self, law: GaussMarkov, typical: Outlook, noise: Gains, round_index: int
    ) -> Outlook:
        """Return the outlook on the rounds that the present one says something about.

        Args:
            law: of the gains.
            typical: a round of which nothing is known.
            noise: CN(0, 1) draws, [paths, n, K].
            round_index: the present round.
        """
        paths, rounds, devices = noise.shape
        gains = law.draw_after(self.known_gains[round_index], noise)
        drawn = self.on_rounds(gains.reshape(-1, devices))
        by_path = (values.reshape(paths, rounds, *values.shape[1:]) for values in drawn)
        mean = Outlook(*(values.mean(0) for values in by_path))
        # A typical round counts as one more path: no probability is 0 or 1.
        probability = (mean.active * paths + typical.active) / (paths + 1)
        return mean._replace(active=probability)

    def on_rounds(self, gains: Gains, ranking: ChannelRanking | None = None) -> Outlook:
        """Return what the rule of participation decides for rounds with these gains.

        The cap on a is the smaller of transmit power and of the Langevin cap
        η(K/K_a)²/2.

        Args:
            gains: h[n, K].
            ranking: how good the channels are, for `unbiased`.

        Returns:
            The outlook on these rounds.
        """
        size = np.abs(gains)
        step_size = float(np.asarray(self.rule.step_size))
        active = self.rule(size, ranking).active
        scale = active.shape[1] / active.sum(-1)
        lmc_cap = step_size * scale**2 / 2
        power_cap = self.rule.power_cap(size, active)
        participation = step_size**2 * self.rule.error(active)
        return Outlook(
            active=active.astype(float),
            scale=scale,
            power_cap=np.minimum(power_cap, lmc_cap),
            error=self.discretization + participation,
        )


def _mean_over_equals(values: Array, traits: tuple[ArrayLike, ...]) -> Array:
    """Return the mean over devices that are alike in everything known of them, [K].

    Otherwise chance would make one of them the most active of all, and power would seem
    free in rounds in which that one is silent.

    Args:
        values: of every device, [K].
        traits: what is known of them, a number or [K] each; all devices are alike where
            there are none.
    """
    columns = [np.broadcast_to(trait, values.shape) for trait in (0.0, *traits)]
    table = np.column_stack(columns)
    _, kind = np.unique(table, axis=0, return_inverse=True)
    kind = kind.ravel()
    means = np.bincount(kind, values) / np.bincount(kind)
    return means[kind]


class _ServingPlan(NamedTuple):
    """The plan by which rounds transmit until the next plan."""

    first_round: int
    problem: Problem
    """Of all rounds from the first one on."""
    a: Array
    """Power of these rounds."""

    def power(self, full: Problem, round_index: int) -> float:
        """Return the power of a round, for the devices that are really active.

        Power goes as the root of the cost, that is as K/K_a.

        Args:
            full: the problem of all rounds.
            round_index: counted in that problem.
        """
        index = round_index - self.first_round
        expected_scale = self.problem.scale[index]
        power = self.a[index] * full.scale[round_index] / expected_scale
        return float(np.clip(power, full.floor[round_index], full.cap[round_index]))

    def recoverable_distance(self) -> float:
        """Return the median bound of the kept rounds, as planned."""
        kept_bounds = self.problem.bound(self.a)[self.problem.burn_in :]
        return float(np.median(kept_bounds))


def optimize_causally(forecast: Forecast, problem: Problem) -> Allocation:
    """Return the power of every round from what is known in it.

    The rounds from the present one on are planned by the forecast, with what is left of
    the budgets, and the first of them is transmitted. No round can overspend, however
    wrong the forecast. One plan serves for several rounds where many remain.

    Args:
        forecast: what each round says about the later ones.
        problem: the power problem, as it turns out.

    Returns:
        a[S], without a lower bound.

    Raises:
        InputError: another solver is asked for, no bound is known, or a device has too
            little left for the noise limit of a round.
    """
    _check_causal(problem)
    check_floor(problem)
    # Rounds that are not planned yet are at their caps. They do not matter: the bound of
    # a round depends on it and on earlier ones.
    a = problem.cap.copy()
    remaining = problem.budget * (1 - HEADROOM)
    present_bound = problem.initial_bound
    serving = _ServingPlan(first_round=0, problem=problem, a=problem.cap)
    for s in range(problem.rounds):
        active = problem.active[s]
        _check_remaining(problem, s, remaining)
        a[s] = serving.power(problem, s)
        age = s - serving.first_round
        is_old = age >= (problem.rounds - s) * PLAN_LIFETIME_FRACTION
        is_expensive = np.any(a[s] * active > remaining * LARGE_BUDGET_FRACTION)
        if s == 0 or is_old or is_expensive:
            if s > problem.burn_in and problem.objective == "worst":
                # What a round was cannot be undone: no power is spent on coming back
                # from it.
                recoverable = serving.recoverable_distance()
                present_bound = min(present_bound, recoverable)
            outlook = forecast.outlook(problem, s)
            remaining_problem = _remaining_problem(
                outlook, problem, s, remaining=remaining, initial_bound=present_bound
            )
            solution = allocate(remaining_problem.program(), tol=CAUSAL_GAP_TOLERANCE)
            serving = _ServingPlan(s, remaining_problem, solution.a)
            a[s] = solution.a[0]
        remaining = remaining - a[s] * active
        present_bound = float(problem.bound(a)[s])
    return Allocation(a)


def _check_causal(problem: Problem) -> None:
    """Refuse options with which power cannot be planned round by round."""
    if problem.solver != "own":
        expected = "own with csi = 'causal', which has no reference"
        raise InputError("solver", problem.solver, expected)
    if not problem.has_bound:
        raise InputError(
            "dynamics",
            problem.dynamics.name,
            "overdamped, and step_size below 2/L, with csi = 'causal', which needs a "
            "bound",
            section="sampler",
        )


def _check_remaining(problem: Problem, round_index: int, remaining: Array) -> None:
    """Refuse a noise limit whose power is no longer available in a round."""
    required = problem.floor[round_index] * problem.active[round_index]
    is_short = required > remaining * (1 - HEADROOM)
    if not is_short.any():
        return
    device = np.argmax(is_short)
    raise InputError(
        "max_round_noise",
        problem.noise_limit,
        f"larger with csi = 'causal': too little is left to device {device} in round "
        f"{round_index + 1}, which could not be foreseen",
        section="policy",
    )


def _remaining_problem(
    outlook: Outlook,
    problem: Problem,
    round_index: int,
    *,
    remaining: Array,
    initial_bound: float,
) -> Problem:
    """Return the problem of a round as it is and of the later ones as expected.

    Args:
        outlook: on the rounds after the present one.
        problem: of all rounds.
        round_index: the present round.
        remaining: what is left of the budgets, [K].
        initial_bound: the bound before the present round.
    """
    # Two standard deviations more activity than expected: a device that runs dry spoils
    # a round.
    probability = outlook.active
    variance = probability * (1 - probability) / max(len(probability), 1)
    cautious = np.minimum(1.0, probability + 2 * np.sqrt(variance))
    later = outlook._replace(active=cautious)
    present = outlook_on_known(problem, slice(round_index, round_index + 1))
    rounds = present.followed_by(later)
    floor = _affordable_floor(problem.floor[round_index], rounds, remaining)
    contraction = Contraction(*(part[round_index:] for part in problem.contraction))
    return replace(
        problem,
        active=rounds.active,
        scale=rounds.scale,
        power_cap=rounds.power_cap,
        error=rounds.error,
        contraction=contraction,
        step_size=problem.step_size[round_index:],
        temperature=problem.temperature[round_index:],
        burn_in=max(0, problem.burn_in - round_index),
        initial_bound=initial_bound,
        budget=remaining,
        floor=floor,
    )


def _affordable_floor(present_floor: float, rounds: Outlook, remaining: Array) -> Array:
    """Return the least power of the present round and of the later ones, [n].

    A limit on the noise asks for a power that goes with (K/K_a)². In the later rounds
    it is lowered until all of them together are affordable.

    Args:
        present_floor: of the present round.
        rounds: the present round and the later ones.
        remaining: what is left of the budgets, [K].
    """
    relative_scale = rounds.scale / rounds.scale[0]
    floor = np.minimum(present_floor * relative_scale**2, rounds.power_cap)
    available = remaining - floor[0] * rounds.active[0]
    required = floor[1:] @ rounds.active[1:]
    is_required = required > 0
    usable = MAX_LATER_FLOORS_FRACTION * available[is_required]
    affordable_fraction = usable / required[is_required]
    floor[1:] *= np.min(affordable_fraction, initial=1.0)
    return floor


def split_equally(problem: Problem) -> Allocation:
    """Spend in every round an equal part of what is left, for each round that is left.

    The active device with the least left decides. It is what `equal` does where later
    rounds, and so the number of them in which a device transmits, are unknown.

    Args:
        problem: the power problem.

    Returns:
        a[S] ≤ cap, without a lower bound.
    """
    a = np.empty(problem.rounds)
    remaining = problem.budget * (1 - HEADROOM)
    for s in range(problem.rounds):
        active = problem.active[s]
        rounds_left = problem.rounds - s
        a[s] = min(problem.cap[s], remaining[active].min() / rounds_left)
        remaining = remaining - a[s] * active
    return Allocation(a)


def without_foresight(
    policy: Callable[[Problem], Allocation], forecast: Forecast
) -> Callable[[Problem], Allocation]:
    """Return the policy that does the same without knowledge of later rounds.

    `optimal` becomes `optimize_causally`, and `equal` becomes `split_equally`. Policies
    that do not depend on other rounds, and custom ones, are taken as they are.

    Args:
        policy: from a problem to the power of its rounds.
        forecast: what each round says about the later ones.

    Returns:
        The causal policy.
    """
    if policy is optimal:
        return partial(optimize_causally, forecast)
    if policy is equal:
        return split_equally
    return policy
