"""Policies by name: each is a function from a Problem to the power of every round."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import Array, Response
from wflmc.planning import exact
from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.solvers import closed_form
from wflmc.planning.solvers.allocation import allocate
from wflmc.planning.solvers.program import HEADROOM, solve_by_cvxpy
from wflmc.planning.transcript import most_information
from wflmc.support.errors import InputError
from wflmc.support.plugins import load

MIN_NOISE_FRACTION = 1e-9
"""The least noise of a round under the exact law, as a fraction of Langevin's 2η.

An ideal link could do with none at all, and would then transmit with infinite power.
"""
PRINTED_LIMIT_MARGIN = 1e-5
"""Relative margin of a noise limit in an error, more than what printing rounds away."""


class PowerPolicy(NamedTuple):
    """How power is chosen, and which parts of the system the scheme has."""

    allocate: Callable[[Problem], Allocation]
    """The power of every round, a[S] = α²/N0."""
    wireless: bool = True
    """Fading and transmit power limit the gain, and thresholds decide who transmits."""
    private: bool = True
    """The privacy budget limits the gain."""
    clips: bool = True
    """Gradients are clipped; without it nothing is promised."""
    optimal: bool = False
    """The policy minimizes the objective.

    For the exact law it then chooses all the noise, and the server adds none.
    """
    shares_budget: bool = False
    """Every round has a part of each sender's budget, which it may not exceed.

    A round below the caps is then at its part, and dp-limited, though something of the
    budget may be left at the end.
    """


def optimal(problem: Problem) -> Allocation:
    """Minimize the objective, with a certificate.

    Theorem 1's closed form is used where it applies: one kept round over a static
    channel. Otherwise the bound is minimized by an interior point method, the exact law
    by `exact.solve` and V of transcripts by a linear program. Where the budgets allow
    every round its cap, that is the optimum. Where steps are too long for a bound, the
    budgets are filled to one water level.

    Args:
        problem: the limits of power, and the objective.

    Returns:
        a[S], and a lower bound on the objective of any power within the limits; None by
        the solver cvxpy and where the objective has no bound.

    Raises:
        InputError: limits contradict each other, or no bound is known for the dynamics.
    """
    check_floor(problem)
    if problem.response is not None:
        return _nearest_law(problem, problem.response)
    if problem.objective == "transcript":
        return most_information(problem)
    if not problem.contracts:
        return water_level(problem)
    _check_has_bound(problem)
    if problem.solver == "cvxpy":
        a = np.clip(solve_by_cvxpy(problem.program()), problem.floor, problem.cap)
        return Allocation(problem.within_budget(a))
    if np.all(problem.cap @ problem.active <= problem.budget):
        return _all_at_cap(problem)
    if _has_closed_form(problem):
        return closed_form.solve(problem)
    solution = allocate(problem.program())
    return Allocation(solution.a, solution.lower_bound)


def _check_has_bound(problem: Problem) -> None:
    """Refuse a bound as the objective where none is known and a budget limits power."""
    is_unlimited = np.all(np.isinf(problem.budget))
    if problem.has_bound or is_unlimited:
        return
    raise InputError(
        "objective",
        problem.objective,
        "'exact' with dynamics = 'kinetic', for which no bound is known; "
        "or power = 'equal'",
        section="policy",
    )


def _all_at_cap(problem: Problem) -> Allocation:
    """Return the optimum where no budget binds, which proves itself."""
    if not problem.has_bound:
        return Allocation(problem.cap)
    bound = problem.bound(problem.cap)
    return Allocation(problem.cap, problem.value(bound))


def _has_closed_form(problem: Problem) -> bool:
    """Return whether Theorem 1 gives the optimum."""
    keeps_single_round = problem.rounds - problem.burn_in == 1
    if not keeps_single_round or problem.floor.any():
        return False
    return closed_form.is_static(problem)


def _nearest_law(problem: Problem, response: Response) -> Allocation:
    """Return the power of the noise v that brings the true law nearest.

    It is a = (kick K/K_a)²/v: no noise but the channel's is in a round. Noise of at
    most twice Langevin's, or twice the least where power allows no less, is preferred
    where it is as good.

    Args:
        problem: the limits of power.
        response: how the law of the kept rounds depends on v.
    """
    cost = problem.channel_noise(np.ones(problem.rounds))  # v = cost/a
    smallest = MIN_NOISE_FRACTION * problem.langevin_noise
    low = np.maximum(cost / problem.power_cap, smallest)
    with np.errstate(divide="ignore"):
        high = np.maximum(cost / problem.floor, low)
    moderate = 2 * np.maximum(low, problem.langevin_noise)
    noise_problem = exact.NoiseProblem(
        response=response,
        cost=cost,
        low=low,
        high=high,
        active=problem.active,
        budget=problem.budget,
        moderate=np.minimum(high, moderate),
    )
    solution = exact.solve(noise_problem)
    a = np.minimum(cost / solution.v, problem.power_cap)
    return Allocation(a, solution.lower_bound)


def check_floor(problem: Problem) -> None:
    """Refuse a limit on a round's noise that the other limits do not allow.

    The limit asks for a least power in every round, `Problem.floor`. The error names
    what stands against it (transmit power, the noise that Langevin sampling needs, or
    privacy) and the smallest limit that is feasible.

    Args:
        problem: the limits of power.

    Raises:
        InputError: the floor exceeds a cap or a budget.
    """
    floor = problem.floor
    at_lmc_cap = float(np.max(floor / problem.lmc_cap))
    has_lmc_cap = problem.fills_up and problem.objective != "transcript"
    excess = {
        "transmit power": float(np.max(floor / problem.power_cap)),
        "the noise that Langevin sampling needs": at_lmc_cap * has_lmc_cap,
        "privacy": float(np.max(floor @ problem.active / problem.budget)),
    }
    cause = max(excess, key=lambda name: excess[name])
    if excess[cause] <= 1:
        return
    # The floor goes with the inverse square of the limit.
    feasible = problem.noise_limit * np.sqrt(excess[cause])
    expected = (
        f"at least {feasible * (1 + PRINTED_LIMIT_MARGIN):.6g}: "
        f"{cause} allows no less noise"
    )
    raise InputError("max_round_noise", problem.noise_limit, expected, section="policy")


def equal(problem: Problem) -> Allocation:
    """Split each device's budget into equal parts over its active rounds (Sec. VI, 1).

    a = min(B_k/n_k, cap) in every round, n_k being the active rounds of device k: the
    active device with the smallest part decides, and no device overspends. Nothing is
    optimized, so that there is no lower bound.

    Args:
        problem: the limits of power.

    Returns:
        a[S] ≤ cap.
    """
    return Allocation(np.minimum(problem.cap, equal_parts(problem)))


def equal_parts(problem: Problem) -> Array:
    """Return the largest powers that spend equal parts of the senders' budgets.

    A device that is active in n rounds has the part B_k/n for each; a round may spend
    no more than the smallest part of its active devices. Caps are not applied, and
    devices that are never active do not matter.

    Args:
        problem: the budgets, and who is active.

    Returns:
        a[S]; infinite where no active device has a budget.
    """
    active_rounds = np.maximum(problem.active.sum(0), 1)
    part = problem.budget * (1 - HEADROOM) / active_rounds
    return np.where(problem.active, part, np.inf).min(-1)


def water_level(problem: Problem) -> Allocation:
    """Spend all that rounds can use of the budgets, as evenly as possible.

    A common level of power is raised in all rounds together. A round stays at its cap,
    and the rounds of a device stay where they are when its budget is used up; all
    others rise on. In the end every round is at its cap or has an active device without
    budget left. No other power within the limits raises the smallest round, or the
    next smallest at the same value of the smallest, and so on.

    Args:
        problem: the limits of power; its floors must be feasible.

    Returns:
        a[S] from floor to cap, without a lower bound.
    """
    limit = problem.budget * (1 - HEADROOM)
    a = np.minimum(problem.floor, problem.cap)
    is_rising = np.ones(problem.rounds, dtype=bool)
    # Every pass uses up a budget, or ends with all rounds at their caps.
    while is_rising.any():
        remaining = limit - a[~is_rising] @ problem.active[~is_rising]
        level = _affordable_level(
            floor=problem.floor[is_rising],
            cap=problem.cap[is_rising],
            active=problem.active[is_rising],
            budget=remaining,
        )
        lowest = np.minimum(problem.floor, problem.cap)
        a = np.where(is_rising, np.clip(level.power, lowest, problem.cap), a)
        uses_exhausted = problem.active[:, level.is_exhausted].any(-1)
        is_rising &= (a < problem.cap) & ~uses_exhausted
    return Allocation(problem.within_budget(a))


class _Level(NamedTuple):
    """A level of power that all rounds can rise to."""

    power: float
    """Infinite where all rounds can be at their caps."""
    is_exhausted: NDArray[np.bool_]
    """Devices whose budget is used up at this level, [K]."""


def _affordable_level(
    *, floor: Array, cap: Array, active: NDArray[np.bool_], budget: Array
) -> _Level:
    """Return the highest level whose powers clip(level, floor, cap) are affordable.

    What a device spends is piecewise linear in the level: a round in which it is active
    adds 1 to the slope from its floor to its cap.

    Args:
        floor: of the rounds, [n].
        cap: of the rounds, [n]; may be infinite.
        active: who transmits, [n, K].
        budget: what is left of the budgets, [K]; may be infinite.
    """
    corner = np.concatenate([np.minimum(floor, cap), cap])
    slope_change = np.concatenate([active, -active.astype(float)])
    order = np.argsort(corner, kind="stable")
    corner = corner[order]
    slope = np.cumsum(slope_change[order], axis=0)
    length = np.diff(corner, prepend=corner[0])
    slope_before = np.vstack([np.zeros_like(slope[:1]), slope[:-1]])
    with np.errstate(invalid="ignore"):
        rise = np.where(slope_before > 0, slope_before * length[:, None], 0.0)
    spent = np.minimum(floor, cap) @ active + np.cumsum(rise, axis=0)
    # The last corner that a device can pay for, and how far it gets beyond it.
    last = np.maximum((spent <= budget).sum(0) - 1, 0)
    device = np.arange(budget.size)
    available = np.maximum(budget - spent[last, device], 0.0)
    last_slope = slope[last, device]
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond = np.where(last_slope > 0, available / last_slope, np.inf)
    # Floors that take a whole budget leave nothing to rise with.
    has_no_room = active.any(0) & (spent[0] > budget)
    beyond = np.where(has_no_room, 0.0, beyond)
    level = corner[last] + beyond
    lowest = float(level.min(initial=np.inf))
    return _Level(lowest, np.isfinite(level) & (level <= lowest))


def ideal(problem: Problem) -> Allocation:
    """Return the optimum of an ideal link, or a water level where none is known.

    It is the policy of `noiseless-dp`. With kinetic dynamics, and with steps too long
    for a bound, nothing says which power is best; the budgets are then filled to one
    level, unless the objective is the exact law or transcripts, which can be optimized
    with any dynamics.

    Args:
        problem: the limits of power, of which transmit power is infinite.

    Returns:
        a[S], with a lower bound where the objective was minimized.

    Raises:
        InputError: limits contradict each other.
    """
    has_other_objective = (
        problem.response is not None or problem.objective == "transcript"
    )
    if problem.has_bound or has_other_objective:
        return optimal(problem)
    check_floor(problem)
    return water_level(problem)


def at_caps(problem: Problem) -> Allocation:
    """Transmit as strongly as power and the Langevin noise allow.

    More power would leave less noise than sampling needs, which the server would have
    to add again. Privacy budgets are ignored.

    Args:
        problem: the limits of power.

    Returns:
        a[S] = cap, without a lower bound.
    """
    return Allocation(problem.cap)


POLICIES: dict[str, PowerPolicy] = {
    "optimized": PowerPolicy(optimal, optimal=True),
    "equal": PowerPolicy(equal, shares_budget=True),
    "no-dp": PowerPolicy(at_caps, private=False),
    "noiseless-dp": PowerPolicy(ideal, wireless=False, optimal=True),
    "noiseless": PowerPolicy(at_caps, wireless=False, private=False, clips=False),
}
"""The policies that come with wflmc, by name."""


def policy_named(
    power: str | PowerPolicy | Callable[[Problem], Allocation],
) -> PowerPolicy:
    """Return the policy that `Policy.power` stands for.

    Names are those of `POLICIES` and of other packages' entry points in the group
    `wflmc.policies`.

    Args:
        power: a registered name; or a policy; or a plain function, which becomes one
            with the usual flags.

    Returns:
        The policy.

    Raises:
        InputError: no policy has that name.
    """
    if isinstance(power, str):
        registered = load("policies", power, "power", POLICIES, section="policy")
        return _as_policy(registered)
    return _as_policy(power)


def _as_policy(power: PowerPolicy | Callable[[Problem], Allocation]) -> PowerPolicy:
    """Return a policy, of a plain function one with the usual flags."""
    return power if isinstance(power, PowerPolicy) else PowerPolicy(power)
