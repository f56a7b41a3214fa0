"""Policies by name: each is a function from a Problem to the power of every round."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from wflmc.errors import InputError
from wflmc.planning import single_sample
from wflmc.planning.allocation import HEADROOM, allocate
from wflmc.planning.problem import Allocation, Problem
from wflmc.planning.reference import solve_by_cvxpy


class Policy(NamedTuple):
    """How power is chosen, and which parts of the system the scheme has."""

    allocate: Callable[[Problem], Allocation]
    wireless: bool = True
    """Fading and transmit power limit the gain, and thresholds decide who sends."""
    private: bool = True
    """The privacy budget limits the gain."""
    clips: bool = True


def optimal(problem: Problem) -> Allocation:
    """The minimiser of the objective, with a certificate: in closed form where there is one, else by our solver."""
    check_floor(problem)
    if problem.solver == "cvxpy":
        a = np.clip(solve_by_cvxpy(problem.program()), problem.floor, problem.cap)
        return Allocation(problem.within_budget(a))
    if problem.affordable(problem.cap):
        return Allocation(problem.cap, problem.value(problem.bound(problem.cap)))
    if problem.rounds - problem.burn_in == 1 and single_sample.is_static(problem) and not problem.floor.any():
        return single_sample.solve(problem)
    solution = allocate(problem.program())
    return Allocation(solution.a, solution.lower_bound)


def check_floor(problem: Problem) -> None:
    """Say which noise limit would be feasible if this one is not."""
    needs = {
        "transmit power": float(np.max(problem.floor / problem.power_cap)),
        "the noise that Langevin sampling needs": float(np.max(problem.floor / problem.lmc_cap)),
        "privacy": float(np.max(problem.floor @ problem.active / problem.budget)),
    }
    cause = max(needs, key=lambda name: needs[name])
    if needs[cause] > 1:
        # The floor goes with the inverse square of the limit; the margin is more than printing rounds away.
        limit = problem.noise_limit * np.sqrt(needs[cause]) * (1 + 1e-5)
        raise InputError("max_round_noise", problem.noise_limit, f"at least {limit:.6g}: {cause} allows no less noise")


def equal(problem: Problem) -> Allocation:
    """Each device's budget in equal parts over its active rounds (Sec. VI, 1); the tightest active device decides."""
    rounds_of_device = np.maximum(problem.active.sum(0), 1)
    share = np.where(problem.active, problem.budget * (1 - HEADROOM) / rounds_of_device, np.inf)
    return Allocation(np.minimum(problem.cap, share.min(-1)))


def at_caps(problem: Problem) -> Allocation:
    """As strong as power and the Langevin noise allow, whatever it costs in privacy."""
    return Allocation(problem.cap)


POLICIES: dict[str, Policy] = {
    "optimized": Policy(optimal),
    "equal": Policy(equal),
    "no-dp": Policy(at_caps, private=False),
    "noiseless-dp": Policy(optimal, wireless=False),
    "noiseless": Policy(at_caps, wireless=False, private=False, clips=False),
}


def policy(name: str) -> Policy:
    """The policy registered under a name."""
    if name not in POLICIES:
        raise InputError("power", name, f"one of {', '.join(POLICIES)}")
    return POLICIES[name]
