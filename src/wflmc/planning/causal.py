"""Power without knowledge of channels to come: forecast the rest, plan it with what is left, send one round, repeat."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wflmc.channel import Gains, GaussMarkov, Link, complex_normal
from wflmc.dynamics import Array, Contraction
from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.policies import check_floor, equal, optimal
from wflmc.planning.schedule import Rule, best_senders
from wflmc.planning.solvers.allocation import allocate
from wflmc.planning.solvers.program import HEADROOM
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator, seeded

SIMULATED = 2000
"""Rounds drawn from the law, to choose the number of senders and to know a typical round."""
DRAWS = 1000
"""Rounds drawn for one forecast of a correlated channel, at least 8 and at most 32 for each round to come."""
FORGOTTEN = 1e-2
"""Correlation with the present below which a round to come is a typical one."""
REPLANS = 128
"""A plan serves for 1/128 of the rounds that are left: the last 128 rounds are each planned afresh."""
TOLERANCE = 1e-6
"""Relative gap to which the rest is planned."""


def simulated(law: GaussMarkov, rule: Rule) -> tuple[Gains, tuple[Array, Array] | None]:
    """Independent rounds h[n, K] of a law, for `unbiased` with ranking and lots; the same ones for every link."""
    generator = host_generator(seeded(0), "forecast")
    before, noise = complex_normal(generator, 2, SIMULATED, rule.clip.size)
    first = law.draw_first(before)
    pair = np.stack([first, law.draw_after(first, noise[:, None])[:, 0]], axis=-2)
    if rule.name != "unbiased":
        return pair[:, 1], None
    return pair[:, 1], (law.quality(pair)[:, 1], generator.random(noise.shape))


def choose_senders(given: int, link: Link, rule: Rule) -> int:
    """The number of devices that send in every round: the one given, or the best by the fading law."""
    devices, law = rule.clip.size, link.fading.law
    if not 0 <= given <= devices or (given == 0 and law is None):
        allowed = f"between 1 and {devices}, or 0 where the fading law is known"
        raise InputError("senders", given, allowed, section="policy")
    if given or law is None:
        return given
    gains, ranking = simulated(law, rule)
    assert ranking is not None
    step_size = float(np.ravel(rule.step_size)[-1])
    return best_senders(
        *ranking, rule.clip, rule.reach * np.abs(gains) ** 2, step_size, rule.weight
    )


class Outlook(NamedTuple):
    """What is expected of rounds: probability to send [n, K], and per round [n] K/K_a, cap on a, error (Problem's)."""

    active: Array
    scale: Array
    power_cap: Array
    error: Array

    def repeated(self, rounds: int) -> "Outlook":
        """The mean of these rounds, so many times."""
        return Outlook(
            *(np.repeat(x.mean(0, keepdims=True), rounds, axis=0) for x in self)
        )

    def then(self, later: "Outlook") -> "Outlook":
        """These rounds and others after them."""
        return Outlook(
            *(np.concatenate(pair) for pair in zip(self, later, strict=True))
        )


def seen(problem: Problem, of: slice) -> Outlook:
    """Rounds as they are."""
    return Outlook(
        problem.active[of].astype(float),
        problem.scale[of],
        problem.cap[of],
        problem.error[of],
    )


class Forecast:
    """What the channels known by some round say about the rounds after it.

    Args:
        known: the gains as devices know them, h[S, K].
        discretization: error of a round in which everyone sends.
    """

    typical: Outlook | None = None
    """A round of which nothing is known but the law, [1]."""
    noise: Gains | None = None
    """CN(0, 1) draws for rounds that the present says something about, [paths, n, K]."""

    def __init__(
        self, law: GaussMarkov | None, rule: Rule, known: Gains, discretization: float
    ) -> None:
        self.law, self.known, self.discretization = law, known, discretization
        self.rule = replace(rule, step_size=float(np.ravel(rule.step_size)[-1]))
        chance = rule.name == "unbiased"
        if law is None or (not chance and (law.scatter == 0 or law.correlation == 1)):
            return
        typical = self.of(*simulated(law, rule))
        often = (typical.active.sum(0) + 1) / (SIMULATED + 2)
        # With `unbiased` all send as often, whatever their powers.
        facts: tuple[ArrayLike, ...] = (
            () if chance else (law.power, rule.clip, rule.reach)
        )
        self.typical = typical._replace(active=_alike(often, *facts)[None]).repeated(1)
        if not chance and law.correlation > 0:
            near = min(len(known), int(np.log(FORGOTTEN) / np.log(law.correlation)) + 1)
            generator = host_generator(seeded(0), "paths")
            self.noise = complex_normal(
                generator, int(np.clip(DRAWS // near, 8, 32)), near, known.shape[1]
            )

    def outlook(self, problem: Problem, s: int) -> Outlook:
        """Rounds s+1, s+2, … from rounds 0..s alone."""
        rounds = problem.rounds - s - 1
        if self.typical is None and self.law is None:
            mean = seen(problem, slice(0, s + 1)).repeated(rounds)
            # Whoever never sent may yet, and whoever always did may stop: the rule of succession.
            return mean._replace(active=(mean.active * (s + 1) + 1) / (s + 3))
        if self.typical is None:
            return seen(problem, slice(s, s + 1)).repeated(rounds)
        if self.law is None or self.noise is None or rounds == 0:
            return self.typical.repeated(rounds)
        noise = self.noise[:, :rounds]
        paths, near, devices = noise.shape
        drawn = self.of(self.law.draw_after(self.known[s], noise).reshape(-1, devices))
        soon = Outlook(*(x.reshape(paths, near, *x.shape[1:]).mean(0) for x in drawn))
        soon = soon._replace(
            active=(soon.active * paths + self.typical.active) / (paths + 1)
        )
        return soon.then(self.typical.repeated(rounds - near))

    def of(self, gains: Gains, ranking: tuple[Array, Array] | None = None) -> Outlook:
        """Rounds with gains h[n, K]."""
        size, eta = np.abs(gains), float(np.asarray(self.rule.step_size))
        active = self.rule(size, ranking).active
        scale = active.shape[1] / active.sum(-1)
        cap = np.minimum(self.rule.power_cap(size, active), eta * scale**2 / 2)
        return Outlook(
            active.astype(float),
            scale,
            cap,
            self.discretization + eta**2 * self.rule.error(active),
        )


def _alike(often: Array, *facts: ArrayLike) -> Array:
    """The mean over devices that are alike in everything that is known of them, [K].

    Chance would make one of them the most active of all, and power would seem free in rounds where that one is silent.
    """
    table = np.column_stack(
        [np.broadcast_to(fact, often.shape) for fact in (0.0, *facts)]
    )
    kind = np.unique(table, axis=0, return_inverse=True)[1].ravel()
    return (np.bincount(kind, often) / np.bincount(kind))[kind]


def optimize_causally(forecast: Forecast, problem: Problem) -> Allocation:
    """Return the power of every round from what is known in it: plan the rest, send the first round of it, go on.

    No round can overspend, because the budgets it is planned with are what is left of them.
    """
    if problem.solver != "own":
        raise InputError(
            "solver", problem.solver, "own with csi = 'causal', which has no reference"
        )
    if not problem.has_bound:
        allowed = "overdamped, and step_size below 2/L, with csi = 'causal', which needs a bound"
        raise InputError("dynamics", problem.dynamics.name, allowed, section="sampler")
    check_floor(problem)
    a, left, start = problem.cap.copy(), problem.budget * (1 - HEADROOM), problem.start
    made, rest, planned = (
        0,
        problem,
        problem.cap,
    )  # the plan that serves: its first round, its problem, its power
    for s in range(problem.rounds):
        short = problem.floor[s] * problem.active[s] > left * (1 - HEADROOM)
        if short.any():
            why = f"too little is left to device {np.argmax(short)} in round {s + 1}, which could not be foreseen"
            allowed = f"larger with csi = 'causal': {why}"
            raise InputError(
                "max_round_noise", problem.noise_limit, allowed, section="policy"
            )
        j = s - made  # power goes as the root of the cost, that is as K/K_a
        a[s] = np.clip(
            planned[j] * problem.scale[s] / rest.scale[j],
            problem.floor[s],
            problem.cap[s],
        )
        if (
            s == 0
            or j >= (problem.rounds - s) / REPLANS
            or np.any(a[s] * problem.active[s] > left / 8)
        ):
            if s > problem.burn_in and problem.objective == "worst":
                # What a round was cannot be undone: no power is spent on coming back from it.
                start = min(
                    start, float(np.median(rest.bound(planned)[rest.burn_in :]))
                )
            rest = _rest(forecast.outlook(problem, s), problem, s, left, start)
            made, planned = s, allocate(rest.program(), tol=TOLERANCE).a
            a[s] = planned[0]
        left = left - a[s] * problem.active[s]
        start = float(problem.bound(a)[s])
    return Allocation(a)


def _rest(
    coming: Outlook, problem: Problem, s: int, left: Array, start: float
) -> Problem:
    """Return the problem of the rounds from s on, the first of them as it is and the others as expected."""
    # Two standard deviations more activity than expected: a device that runs dry spoils a round.
    p = coming.active
    p = np.minimum(1.0, p + 2 * np.sqrt(p * (1 - p) / max(len(p), 1)))
    rounds = seen(problem, slice(s, s + 1)).then(coming._replace(active=p))
    floor = np.minimum(
        problem.floor[s] * (rounds.scale / problem.scale[s]) ** 2, rounds.power_cap
    )
    room, need = left - floor[0] * problem.active[s], floor[1:] @ rounds.active[1:]
    floor[1:] *= np.min(0.9 * room[need > 0] / need[need > 0], initial=1.0)
    return replace(
        problem,
        **rounds._asdict(),
        contraction=Contraction(*(part[s:] for part in problem.contraction)),
        step_size=problem.step_size[s:],
        burn_in=max(0, problem.burn_in - s),
        start=start,
        budget=left,
        floor=floor,
    )


def equal_shares(problem: Problem) -> Allocation:
    """In every round an equal share of what is left, for each round that is left; the tightest sender decides."""
    a, left = np.empty(problem.rounds), problem.budget * (1 - HEADROOM)
    for s in range(problem.rounds):
        a[s] = min(problem.cap[s], left[problem.active[s]].min() / (problem.rounds - s))
        left = left - a[s] * problem.active[s]
    return Allocation(a)


def causally(
    allocate: Callable[[Problem], Allocation], outlook: Forecast
) -> Callable[[Problem], Allocation]:
    """The same policy without knowledge of rounds to come; custom policies are taken as they are."""
    if allocate is optimal:
        return partial(optimize_causally, outlook)
    return equal_shares if allocate is equal else allocate
