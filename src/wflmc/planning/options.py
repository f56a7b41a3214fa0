"""What planning is asked for: the chain (`Sampler`), and who transmits how strongly (`Policy`)."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wflmc.dynamics import Dynamics, by_name
from wflmc.planning.bound import BOUNDS, Allocation, Problem
from wflmc.planning.exact import Proxy
from wflmc.planning.plan import Plan
from wflmc.planning.policies import PowerPolicy
from wflmc.planning.schedule import RULES
from wflmc.planning.steps import SCHEDULES
from wflmc.support.errors import InputError, refuse, unknown

OBJECTIVES, CSI, SOLVERS = ("worst", "average", "exact", "transcript"), ("full", "causal"), ("own", "cvxpy")


@dataclass(frozen=True)
class Sampler:
    """The chain, as in the `sampler` section of a scenario; step size, burn-in and samples are arguments of `plan`."""

    step_schedule: str = "constant"
    """constant, or planned: `step_size` is that of the kept rounds, and those of burn-in are searched for (some seventy
    plans; see `wflmc.planning.steps`)."""
    init: str = "prior"
    """prior or zero, where the chain starts."""
    dynamics: str | Dynamics = "overdamped"
    """overdamped as in the paper; or kinetic, with a velocity: fewer rounds where μ and L are far apart. No bound is
    known for it: `optimized` needs objective = "exact", else `noiseless-dp` takes equal parts."""
    friction: float = 2.0
    """γ_f of kinetic dynamics."""
    start: int = 0
    """The round to begin with, where rounds came before: channels and noise continue from there."""
    before: Plan | None = None
    """For objective = "exact", the plan of the rounds that came before, whose law the chain continues from."""

    @property
    def motion(self) -> Dynamics:
        """The dynamics, with their friction."""
        return by_name(self.dynamics, self.friction)


@dataclass(frozen=True)
class Policy:
    """Who transmits, and how strongly, as in the `policy` section of a scenario."""

    power: str | PowerPolicy | Callable[[Problem], Allocation] = "optimized"
    """optimized, equal, no-dp, noiseless-dp or noiseless; or a custom `PowerPolicy`."""
    schedule: str = "threshold"
    """threshold, all, or unbiased (as many in every round, each device equally often); the noiseless schemes always
    have all devices."""
    objective: str = "worst"
    """worst or average of the bound over the kept rounds; or exact, the worst true W2² of the chain's law while nothing
    is clipped, for which `optimized` and `noiseless-dp` choose all noise themselves; or transcript, the variance V of
    the noise in what all kept rounds together say about the gradient, for `wflmc.noise_aware`."""
    senders: int = 0
    """q, the active devices of a round with schedule = "unbiased"; 0: chosen by the fading law."""
    csi: str = "full"
    """full, where the channels of all rounds are known beforehand as in the paper; or causal, where a round's power is
    decided by the channels up to it and a forecast of the others (without a certificate)."""
    bound: str = "corrected"
    """corrected, or paper for the formula as printed."""
    max_round_noise: float | None = None
    """M, a limit on the noise of every round: √m σ ≤ M η Σ ℓ_k, M times what all clipped gradients together can undo.
    For `optimized` and `noiseless-dp`; chains may be lost without it. By default there is none, but for
    objective = "exact" (which knows of no clipping) 2 where that can be afforded, and for objective = "transcript" 1,
    or what power and half of the budget allow."""
    proxy: Proxy | None = None
    """For objective = "exact", a public stand-in for the posterior; without it the posterior itself is used."""
    solver: str = "own"
    """own, or cvxpy as an independent reference (without a certificate)."""


@dataclass(frozen=True)
class Options:
    """The keywords of `plan`, checked."""

    step_size: ArrayLike
    burn_in: int
    samples: int
    sampler: Sampler = Sampler()
    policy: Policy = Policy()
    ledger: ArrayLike | None = None
    initial_w2_sq: float | None = None

    def __post_init__(self) -> None:
        sampler, policy = self.sampler, self.policy
        whole = {"burn_in": self.burn_in, "samples": self.samples, "start": sampler.start, "senders": policy.senders}
        for name, value in whole.items():
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise InputError(name, value, "a whole number")
        steps = np.asarray(self.step_size)
        if steps.dtype.kind not in "fiu":
            allowed = "a number, or one for each round (expressions such as '0.4/(mu+L)' are for scenario files)"
            raise InputError("step_size", self.step_size, allowed)
        names = {"csi": CSI, "objective": OBJECTIVES, "solver": SOLVERS, "bound": BOUNDS, "schedule": RULES}
        for name, known in names.items():
            if getattr(policy, name) not in known:
                raise unknown(name, getattr(policy, name), known)
        causal, schedule, rounds = policy.csi == "causal", sampler.step_schedule, self.burn_in + self.samples
        planned, shape = schedule == "planned", f"an array of shape {steps.shape}"
        own, limit, distance = policy.objective in ("exact", "transcript"), policy.max_round_noise, self.initial_w2_sq
        refuse(
            (causal and own, "objective", policy.objective, "worst or average with csi = 'causal'"),
            (own and policy.solver != "own", "solver", policy.solver, f"'own' with objective = {policy.objective!r}"),
            (planned and policy.objective == "transcript", "step_schedule", "planned", "constant, or given by round"),
            (causal and (planned or np.ptp(steps) > 0), "csi", "causal", "full with step sizes that change by round"),
            (planned and sampler.motion.has_velocity, "step_schedule", "planned", "constant with dynamics = 'kinetic'"),
            (sampler.start < 0, "start", sampler.start, "at least 0"),
            (self.burn_in < 0, "burn_in", self.burn_in, "at least 0"),
            (self.samples < 1, "samples", self.samples, "at least 1"),
            (schedule not in SCHEDULES, "step_schedule", schedule, f"one of {', '.join(SCHEDULES)}"),
            (planned and steps.ndim, "step_schedule", "planned", "'constant' with a step size for every round"),
            (steps.shape not in ((), (rounds,)), "step_size", shape, f"a number, or {rounds} of them, one per round"),
            (limit is not None and not limit > 0, "max_round_noise", limit, "a number above 0"),
            (distance is not None and not 0 <= distance < np.inf, "initial_w2_sq", distance, "finite and at least 0"),
        )


def plan_arguments(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `plan` for keywords of which some are fields of its `sampler` or its `policy`.

    >>> plan_arguments({"burn_in": 50, "power": "equal"})["policy"].power
    'equal'
    """
    arguments = dict(keywords)
    for part, kind in (("sampler", Sampler), ("policy", Policy)):
        changes = {field.name: arguments.pop(field.name) for field in fields(kind) if field.name in arguments}
        arguments[part] = replace(arguments.get(part, kind()), **changes)
    return arguments


def checked_options(keywords: Mapping[str, Any]) -> Options:
    """Return the options of `plan`; fields of sampler and policy as keywords, as in version 0.1, go in 0.3."""
    deprecated = [name for name in keywords if name not in Options.__dataclass_fields__]
    if deprecated:
        parts = "sampler=wflmc.Sampler(…) or policy=wflmc.Policy(…)"
        text = f"plan({', '.join(f'{name}=…' for name in deprecated)}) is deprecated: it belongs into {parts}"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return Options(**plan_arguments(keywords))
