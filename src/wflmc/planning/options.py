"""What planning is asked for, and what it must know of a posterior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from wflmc.channel import Link
from wflmc.dynamics import AnyResponse, Dynamics, Motion, by_name
from wflmc.errors import InputError
from wflmc.planning.exact.proxy import Proxy
from wflmc.planning.plan import Plan
from wflmc.planning.policies import Policy
from wflmc.planning.steps import SCHEDULES
from wflmc.privacy import Privacy


class Target(Protocol):
    """What planning must know of a posterior."""

    @property
    def mu(self) -> float: ...
    @property
    def L(self) -> float: ...
    @property
    def dim(self) -> int: ...
    @property
    def devices(self) -> int: ...
    def initial_w2_sq(self, init: str = ...) -> float: ...


@runtime_checkable
class KnowsLaw(Protocol):
    """A posterior that can tell how the law of its chains answers to noise, itself or by an approximation."""

    def response(self, motion: Motion, burn_in: int) -> AnyResponse: ...


@runtime_checkable
class SumsExactly(Protocol):
    """A posterior that says how much its sums round."""

    def margin(self, clip: Any, example_clip: Any) -> float: ...


@dataclass(frozen=True)
class Options:
    """The keywords of `plan`, checked."""

    step_size: ArrayLike
    burn_in: int
    samples: int
    power: str | Policy = "optimized"
    schedule: str = "threshold"
    objective: str = "worst"
    bound: str = "corrected"
    init: str = "prior"
    initial_w2_sq: float | None = None
    max_round_noise: float | None = None
    ledger: ArrayLike | None = None
    start: int = 0
    solver: str = "own"
    step_schedule: str = "constant"
    proxy: Proxy | None = None
    before: Plan | None = None
    dynamics: str | Dynamics = "overdamped"
    friction: float = 2.0
    csi: str = "full"
    senders: int = 0

    @property
    def motion(self) -> Dynamics:
        """The dynamics, with their friction."""
        return by_name(self.dynamics, self.friction)

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.csi not in ("full", "causal"):
            raise InputError("csi", self.csi, "one of full, causal")
        if self.csi == "causal" and self.objective == "exact":
            raise InputError("objective", "exact", "worst or average with csi = 'causal'")
        if self.csi == "causal" and (self.step_schedule != "constant" or np.ptp(self.step_size) > 0):
            raise InputError("csi", "causal", "full with step sizes that change from round to round")
        if self.motion.has_velocity and self.step_schedule != "constant":
            raise InputError("step_schedule", self.step_schedule, "constant with dynamics = 'kinetic'")
        by_name(self.dynamics, self.friction)
        if self.start < 0:
            raise InputError("start", self.start, "at least 0")
        if self.burn_in < 0:
            raise InputError("burn_in", self.burn_in, "at least 0")
        if self.samples < 1:
            raise InputError("samples", self.samples, "at least 1")
        if self.step_schedule not in SCHEDULES:
            raise InputError("step_schedule", self.step_schedule, f"one of {', '.join(SCHEDULES)}")
        if self.step_schedule == "planned" and np.ndim(self.step_size):
            raise InputError("step_schedule", "planned", "'constant' with a step size that changes with the round")
        if self.max_round_noise is not None and not self.max_round_noise > 0:
            raise InputError("max_round_noise", self.max_round_noise, "a number above 0")
        if self.initial_w2_sq is not None and not 0 <= self.initial_w2_sq < np.inf:
            raise InputError("initial_w2_sq", self.initial_w2_sq, "finite and at least 0")

    def _check_numbers(self) -> None:
        for name in ("burn_in", "samples", "start", "senders"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise InputError(name, value, "a whole number")
        try:
            np.asarray(self.step_size, dtype=float)
        except (TypeError, ValueError):
            allowed = "a number, or one for each round (expressions such as '0.4/(mu+L)' are for scenario files)"
            raise InputError("step_size", self.step_size, allowed) from None


def check_inputs(posterior: object, link: object, privacy: object) -> None:
    """Refuse arguments that are in the wrong place."""
    if not hasattr(posterior, "mu") or not hasattr(posterior, "initial_w2_sq"):
        raise InputError("posterior", type(posterior).__name__, "a posterior, such as that of wflmc.posterior_from(…)")
    if not isinstance(link, Link):
        raise InputError("link", type(link).__name__, "a wflmc.Link")
    if not isinstance(privacy, Privacy):
        raise InputError("privacy", type(privacy).__name__, "a wflmc.Privacy; wflmc.Privacy() promises nothing")
