"""Federated gradient descent over the air: the frequentist counterpart, a point estimate of the posterior's mode.

The same devices send the same clipped gradients over the same link under the same promise, and the server takes
θ ← θ − η K/(α K_a) y. No noise is wanted, so that the server adds none and devices send as strongly as transmit power
and an equal part of their privacy budget allow, also where Langevin sampling would have them send more softly. It is
the counterpart of `power = "equal"`: both could spend more in late rounds.
"""

import numpy as np
from numpy.typing import ArrayLike

from wflmc.channel import Link
from wflmc.errors import InputError, unknown
from wflmc.planning import Plan, plan
from wflmc.planning.advice import estimates, input_warnings
from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.options import Options, Policy, Sampler
from wflmc.planning.solvers.closed_form import DP, POWER, REGIMES
from wflmc.planning.solvers.program import HEADROOM
from wflmc.posterior.base import Posterior
from wflmc.privacy import Privacy


def gradient_descent(
    posterior: Posterior,
    link: Link,
    privacy: Privacy,
    *,
    step_size: ArrayLike,
    rounds: int,
    average: int = 1,
    schedule: str = "threshold",
    init: str = "prior",
    ledger: ArrayLike | None = None,
) -> Plan:
    """Return descent on −log p(θ|D), as a plan that `wflmc.sample` runs, many replicas at once.

    The prior is its weight decay. With `trace = wflmc.sample(key, posterior, plan, chains=…)` the estimates are the
    last iterates, `trace.theta[:, -1]`, or averages of the last rounds, `trace.theta.mean(1)`, which are less noisy.

    Args:
        posterior, link, privacy: as of `wflmc.plan`.
        step_size: η, above 0 and below 2/L: a number, or one for each round.
        rounds: S.
        average: how many of the last ones are kept.
        schedule: all, or threshold: those that sampling would have send, which for small steps are too few here.
        init: prior or zero, where it starts.
        ledger: what devices have spent before, [K].
    """
    if schedule not in ("threshold", "all"):
        raise unknown("schedule", schedule, ("threshold", "all"))
    for name, value, most in (("rounds", rounds, np.inf), ("average", average, rounds)):
        if not isinstance(value, int | np.integer) or not 1 <= value <= most:
            raise InputError(name, value, f"a whole number from 1 to {most}")
    options = Options(
        step_size=step_size,
        burn_in=rounds - average,
        samples=average,
        sampler=Sampler(init=init),
        policy=Policy(loudest, schedule),
        ledger=ledger,
        initial_w2_sq=0.0,
    )
    planned = plan(posterior, link, privacy, **vars(options))
    at_power = planned.power_share >= 1 - 1e-9
    # Bound, objective and most warnings of a plan are about sampling: here nothing is sampled.
    return planned.replace(
        server_noise=np.zeros(rounds),
        limit=np.where(at_power, REGIMES.index(POWER), REGIMES.index(DP)),
        regime=None,
        bound=None,
        objective=np.nan,
        initial_w2_sq=np.nan,
        warnings=(*input_warnings(posterior, link, privacy), *estimates(posterior, options)),
    )


def loudest(problem: Problem) -> Allocation:
    """Send as strongly as transmit power and each sender's budget, in equal parts over its rounds, allow."""
    turns = np.maximum(problem.active.sum(0), 1)
    share = np.where(problem.active, problem.budget * (1 - HEADROOM) / turns, np.inf).min(-1)
    return Allocation(np.minimum(problem.power_cap, share))
