"""What planning is asked for: `Sampler`, `Policy`, and the whole request.

The sections `sampler` and `policy` of scenario files are made from these dataclasses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike

from wflmc.channel import Link
from wflmc.dynamics import Dynamics, by_name
from wflmc.planning.bound import BOUNDS, Allocation, Problem
from wflmc.planning.exact import Proxy
from wflmc.planning.plan import Plan
from wflmc.planning.policies import POLICIES, PowerPolicy
from wflmc.planning.schedule import RULES
from wflmc.planning.steps import SCHEDULES
from wflmc.posterior.inputs import INITS
from wflmc.privacy import Privacy
from wflmc.support.declarations import (
    Choices,
    Interval,
    NotInFiles,
    check_fields,
    documented,
)
from wflmc.support.errors import InputError

OBJECTIVES = ("worst", "average", "exact", "transcript")
"""The names that `Policy.objective` may have."""
CSI = ("full", "causal")
"""The names that `Policy.csi` may have."""
SOLVERS = ("own", "cvxpy")
"""The names that `Policy.solver` may have."""
DYNAMICS = ("overdamped", "kinetic")
"""The names that `Sampler.dynamics` may have."""


@documented
@dataclass(frozen=True)
class Sampler:
    """The chain, as in the `sampler` section of a scenario.

    Step size, burn-in and samples are arguments of `plan`.
    """

    step_schedule: Annotated[
        str,
        Choices(SCHEDULES),
        "constant, or planned: `step_size` is that of the kept rounds, and those of "
        "burn-in are searched for (some seventy plans; see `wflmc.planning.steps`).",
    ] = "constant"
    init: Annotated[
        str,
        Choices(INITS),
        "where the chain starts: prior, a draw from it; prior-mean, the mean of such "
        "draws; or zero.",
    ] = "prior"
    dynamics: Annotated[
        str | Dynamics,
        Choices(DYNAMICS),
        "overdamped as in the paper; or kinetic, with a velocity: fewer rounds where "
        "μ and L are far apart. No bound is known for it: under a promise `optimized` "
        'needs objective = "exact" or "transcript", and `noiseless-dp` fills budgets '
        "to one level without these.",
    ] = "overdamped"
    friction: Annotated[
        float,
        Interval(minimum=1e-50, maximum=1e50),
        "γ_f of kinetic dynamics.",
    ] = 2.0
    burn_in_temperature: Annotated[
        float,
        Interval(minimum=0.0, maximum=1.0),
        "τ, the noise of a round of burn-in over that of a kept round. Below 1 burn-in "
        "may transmit with up to 1/τ times the power, and arrives nearer to the "
        "posterior where budget is left; the first draws are then too narrow. Plans "
        "that minimize the bound keep 1, and those by the exact law choose all noise.",
    ] = 1.0
    start: Annotated[
        int,
        NotInFiles(),
        Interval(minimum=0),
        "The round to begin with, where rounds came before: channels and noise "
        "continue from there.",
    ] = 0
    before: Annotated[
        Plan | None,
        NotInFiles(),
        'For objective = "exact", the plan of the rounds that came before, whose law '
        "the chain continues from.",
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def motion(self) -> Dynamics:
        """Return the dynamics, with their friction.

        A name is looked up, and dynamics that were passed as a value are returned as
        they are; `friction` matters for kinetic ones by name alone.

        Raises:
            InputError: no dynamics have that name.
        """
        return by_name(self.dynamics, self.friction)


@documented
@dataclass(frozen=True)
class Policy:
    """Who transmits, and how strongly, as in the `policy` section of a scenario."""

    power: Annotated[
        str | PowerPolicy | Callable[[Problem], Allocation],
        Choices(tuple(POLICIES), group="policies"),
        "optimized, equal, no-dp, noiseless-dp or noiseless; or a custom "
        "`PowerPolicy`.",
    ] = "optimized"
    schedule: Annotated[
        str,
        Choices(RULES),
        "threshold, all, or unbiased (as many in every round, each device equally "
        "often); the noiseless schemes always have all devices.",
    ] = "threshold"
    objective: Annotated[
        str,
        Choices(OBJECTIVES),
        "worst or average of the bound over the kept rounds; or exact, the worst true "
        "W2² of the chain's law while nothing is clipped, for which `optimized` and "
        "`noiseless-dp` choose all noise themselves; or transcript, the variance V of "
        "the noise in what all kept rounds together say about the gradient, for "
        "`wflmc.noise_aware`.",
    ] = "worst"
    senders: Annotated[
        int,
        Interval(minimum=0, maximum=10**7),
        'q, the active devices of a round with schedule = "unbiased"; 0: chosen by the '
        "fading law.",
    ] = 0
    csi: Annotated[
        str,
        Choices(CSI),
        "full, where the channels of all rounds are known beforehand as in the paper; "
        "or causal, where a round's power is decided by the channels up to it and a "
        "forecast of the others (without a certificate).",
    ] = "full"
    bound: Annotated[
        str,
        Choices(BOUNDS),
        "corrected, or paper for the formula as printed.",
    ] = "corrected"
    max_round_noise: Annotated[
        float | None,
        Interval(minimum=1e-9),
        "M, a limit on the noise of every round: √m σ ≤ M η Σ ℓ_k, M times what all "
        "clipped gradients together can undo. For `optimized` and `noiseless-dp`; "
        "chains may be lost without it. By default there is none, but for objective = "
        '"exact" (which knows of no clipping) 2 where that can be afforded, and for '
        'objective = "transcript" 1, or what power and half of the budget allow.',
    ] = None
    proxy: Annotated[
        Proxy | None,
        NotInFiles(),
        'For objective = "exact", a public stand-in for the posterior; without it the '
        "posterior itself is used.",
    ] = None
    solver: Annotated[
        str,
        NotInFiles(),
        Choices(SOLVERS),
        "own, or cvxpy as an independent reference (without a certificate).",
    ] = "own"

    def __post_init__(self) -> None:
        check_fields(self)


DEFAULT_SAMPLER = Sampler()
"""The chain where `plan` is passed none."""
DEFAULT_POLICY = Policy()
"""The policy where `plan` is passed none."""


def check_kinds(link: object, privacy: object, sampler: object, policy: object) -> None:
    """Refuse arguments of `plan` in each other's place.

    Only their classes are checked, so that a link that was passed as the promise is
    reported as that, not as a missing attribute somewhere later.

    Args:
        link: must be a `Link`.
        privacy: must be a `Privacy`.
        sampler: must be a `Sampler`.
        policy: must be a `Policy`.

    Raises:
        InputError: names the first that is of another class.
    """
    kinds = (
        ("link", link, Link),
        ("privacy", privacy, Privacy),
        ("sampler", sampler, Sampler),
        ("policy", policy, Policy),
    )
    for name, value, kind in kinds:
        if not isinstance(value, kind):
            raise InputError(name, type(value).__name__, f"a wflmc.{kind.__name__}")


ROUND_KEYS = ("step_size", "burn_in", "samples")
"""Keys of the section `sampler` that are fields of a request."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for, beside the posterior: the arguments of `plan`, checked.

    `dataclasses.replace` makes another request of it, and checks it again.

    Args:
        link: the channels, and what devices may transmit.
        privacy: the promise.
        step_size: η, a number, or one for each of the S_b + S_u rounds.
        burn_in: S_b, rounds that are discarded.
        samples: S_u, rounds that are kept.
        sampler: the chain, beyond that.
        policy: who transmits, and how strongly.
        ledger: loss that each device has spent before, [K]; None for none.
        initial_w2_sq: W2² between start and posterior; None where it is computed.

    Raises:
        InputError: a value is of the wrong kind or out of range, or two of them
            contradict each other.
    """

    link: Link
    privacy: Privacy
    step_size: ArrayLike
    burn_in: int
    samples: int
    sampler: Sampler = DEFAULT_SAMPLER
    policy: Policy = DEFAULT_POLICY
    ledger: ArrayLike | None = None
    initial_w2_sq: float | None = None

    def __post_init__(self) -> None:
        check_kinds(
            link=self.link,
            privacy=self.privacy,
            sampler=self.sampler,
            policy=self.policy,
        )
        self._check_rounds()
        self._check_steps()
        self._check_objective()
        distance = self.initial_w2_sq
        if distance is not None and not 0 <= distance < np.inf:
            raise InputError(
                "initial_w2_sq", distance, "finite and at least 0", section="posterior"
            )

    @property
    def rounds(self) -> int:
        """Return S = S_b + S_u, the number of rounds."""
        return self.burn_in + self.samples

    def with_values(self, values: Mapping[str, object]) -> "PlanRequest":
        """Return the request with other values of some keys, as scenarios name them.

        All values are set at once and the result is checked as a whole, so that the
        order of keys does not matter.

        Args:
            values: by key, such as `link.snr_db` or `sampler.burn_in`.

        Returns:
            The changed request.

        Raises:
            InputError: a value is not allowed.
        """
        by_section: dict[str, dict[str, Any]] = {
            "link": {},
            "privacy": {},
            "sampler": {},
            "policy": {},
        }
        rounds: dict[str, Any] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            if section == "sampler" and name in ROUND_KEYS:
                rounds[name] = value
            else:
                by_section[section][name] = value
        link = replace(self.link, **by_section["link"])
        privacy = replace(self.privacy, **by_section["privacy"])
        sampler = replace(self.sampler, **by_section["sampler"])
        policy = replace(self.policy, **by_section["policy"])
        return replace(
            self,
            link=link,
            privacy=privacy,
            sampler=sampler,
            policy=policy,
            **rounds,
        )

    def _check_rounds(self) -> None:
        """Refuse numbers of rounds that are not whole or too small."""
        for name, fewest in (("burn_in", 0), ("samples", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise InputError(name, value, "a whole number", section="sampler")
            if value < fewest:
                raise InputError(name, value, f"at least {fewest}", section="sampler")

    def _check_steps(self) -> None:
        """Refuse step sizes of another length, or with options that forbid them."""
        steps = np.asarray(self.step_size)
        if steps.dtype.kind not in "fiu":
            expected = (
                "a number, or one for each round "
                "(expressions such as '0.4/(mu+L)' are for scenario files)"
            )
            raise InputError("step_size", self.step_size, expected, section="sampler")
        if steps.shape not in ((), (self.rounds,)):
            shape = f"an array of shape {steps.shape}"
            expected = f"a number, or {self.rounds} of them, one per round"
            raise InputError("step_size", shape, expected, section="sampler")
        is_planned = self.sampler.step_schedule == "planned"
        if self.policy.csi == "causal" and (is_planned or np.ptp(steps) > 0):
            expected = "full with step sizes that change by round"
            raise InputError("csi", "causal", expected, section="policy")
        if is_planned:
            self._check_planned_steps(steps)

    def _check_planned_steps(self, steps: np.ndarray) -> None:
        """Refuse to plan step sizes where that is not possible."""
        if self.policy.objective == "transcript":
            expected = "constant, or given by round"
        elif self.sampler.motion.has_velocity:
            expected = "constant with dynamics = 'kinetic'"
        elif steps.ndim:
            expected = "'constant' with a step size for every round"
        else:
            return
        raise InputError("step_schedule", "planned", expected, section="sampler")

    def _check_objective(self) -> None:
        """Refuse options with which an objective cannot be planned for."""
        objective = self.policy.objective
        solver = self.policy.solver
        if objective not in ("exact", "transcript"):
            return
        if self.policy.csi == "causal":
            expected = "worst or average with csi = 'causal'"
            raise InputError("objective", objective, expected, section="policy")
        if solver != "own":
            raise InputError("solver", solver, f"'own' with objective = {objective!r}")
