"""Policies by name: each is a function from a Problem to the power of every round."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from wflmc.dynamics import Array, Response
from wflmc.planning import exact
from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.solvers import closed_form
from wflmc.planning.solvers.allocation import allocate
from wflmc.planning.solvers.program import HEADROOM, solve_by_cvxpy
from wflmc.planning.transcript import most_information
from wflmc.support.errors import InputError
from wflmc.support.plugins import load

LEAST_NOISE = 1e-9
"""Of the 2η of Langevin sampling: an ideal link could do with none at all, and would then send infinitely strongly."""


class PowerPolicy(NamedTuple):
    """How power is chosen, and which parts of the system the scheme has."""

    allocate: Callable[[Problem], Allocation]
    """The power of every round, a[S] = α²/N0."""
    wireless: bool = True
    """Fading and transmit power limit the gain, and thresholds decide who sends."""
    private: bool = True
    """The privacy budget limits the gain."""
    clips: bool = True
    """Gradients are clipped; without it nothing is promised."""
    optimal: bool = False
    """The policy minimises the objective; for the exact law it then decides on all noise, and the server adds none."""
    shares_budget: bool = False
    """Every round has a part of each sender's budget, which it may not exceed. A round
    below the caps is then at its part, and dp-limited, though something of the budget
    may be left at the end."""


def optimal(problem: Problem) -> Allocation:
    """The minimiser of the objective, with a certificate: in closed form where there is one, else by our solver."""
    check_floor(problem)
    if problem.response is not None:
        return _nearest_law(problem, problem.response)
    if problem.objective == "transcript":
        return most_information(problem)
    if not problem.contracts:
        return equal(problem)
    if not problem.has_bound and not np.all(np.isinf(problem.budget)):
        allowed = "'exact' with dynamics = 'kinetic', for which no bound is known; or power = 'equal'"
        raise InputError("objective", problem.objective, allowed, section="policy")
    if problem.solver == "cvxpy":
        a = np.clip(solve_by_cvxpy(problem.program()), problem.floor, problem.cap)
        return Allocation(problem.within_budget(a))
    if np.all(problem.cap @ problem.active <= problem.budget):
        return Allocation(
            problem.cap,
            problem.value(problem.bound(problem.cap)) if problem.has_bound else None,
        )
    if (
        problem.rounds - problem.burn_in == 1
        and closed_form.is_static(problem)
        and not problem.floor.any()
    ):
        return closed_form.solve(problem)
    solution = allocate(problem.program())
    return Allocation(solution.a, solution.lower_bound)


def _nearest_law(problem: Problem, response: Response) -> Allocation:
    """The noise v that brings the true law nearest to the posterior, as power a = (η K/K_a)²/v."""
    cost = (problem.kick * problem.scale) ** 2
    low = np.maximum(cost / problem.power_cap, LEAST_NOISE * problem.langevin_noise)
    with np.errstate(divide="ignore"):
        high = np.maximum(cost / problem.floor, low)
    calm = np.minimum(high, 2 * np.maximum(low, problem.langevin_noise))
    found = exact.solve(response, cost, low, high, problem.active, problem.budget, calm)
    return Allocation(np.minimum(cost / found.v, problem.power_cap), found.lower_bound)


def check_floor(problem: Problem) -> None:
    """Say which noise limit would be feasible if this one is not."""
    needs = {
        "transmit power": float(np.max(problem.floor / problem.power_cap)),
        "the noise that Langevin sampling needs": float(
            np.max(problem.floor / problem.lmc_cap)
            * (problem.fills_up and problem.objective != "transcript")
        ),
        "privacy": float(np.max(problem.floor @ problem.active / problem.budget)),
    }
    cause = max(needs, key=lambda name: needs[name])
    if needs[cause] > 1:
        # The floor goes with the inverse square of the limit; the margin is more than printing rounds away.
        limit = problem.noise_limit * np.sqrt(needs[cause]) * (1 + 1e-5)
        allowed = f"at least {limit:.6g}: {cause} allows no less noise"
        raise InputError(
            "max_round_noise", problem.noise_limit, allowed, section="policy"
        )


def equal(problem: Problem) -> Allocation:
    """Each device's budget in equal parts over its active rounds (Sec. VI, 1); the tightest active device decides."""
    return Allocation(np.minimum(problem.cap, equal_parts(problem)))


def equal_parts(problem: Problem) -> Array:
    """The power of every round that spends no more than an equal part of any sender's budget, [S]."""
    rounds_of_device = np.maximum(problem.active.sum(0), 1)
    return np.where(
        problem.active, problem.budget * (1 - HEADROOM) / rounds_of_device, np.inf
    ).min(-1)


def ideal(problem: Problem) -> Allocation:
    """The optimum of an ideal link; in equal parts where no bound says what is best, with kinetic dynamics."""
    known = problem.response is not None or problem.objective == "transcript"
    return optimal(problem) if problem.has_bound or known else equal(problem)


def at_caps(problem: Problem) -> Allocation:
    """As strong as power and the Langevin noise allow, whatever it costs in privacy."""
    return Allocation(problem.cap)


POLICIES: dict[str, PowerPolicy] = {
    "optimized": PowerPolicy(optimal, optimal=True),
    "equal": PowerPolicy(equal, shares_budget=True),
    "no-dp": PowerPolicy(at_caps, private=False),
    "noiseless-dp": PowerPolicy(ideal, wireless=False, optimal=True),
    "noiseless": PowerPolicy(at_caps, wireless=False, private=False, clips=False),
}


def policy_named(
    power: str | PowerPolicy | Callable[[Problem], Allocation],
) -> PowerPolicy:
    """Return the policy that `Policy.power` stands for.

    Args:
        power: a registered name; or a policy; or a plain function, which becomes one
            with the usual flags.

    Raises:
        InputError: no policy has that name.
    """
    policy = (
        load("policies", power, "power", POLICIES, section="policy")
        if isinstance(power, str)
        else power
    )
    return policy if isinstance(policy, PowerPolicy) else PowerPolicy(policy)
