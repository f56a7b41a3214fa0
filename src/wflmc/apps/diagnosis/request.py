"""The arguments of a plan, to make it again with some of them changed."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wflmc.apps.diagnosis.values import SettingValue
from wflmc.channel import Link
from wflmc.planning import Plan, Policy, Sampler, plan
from wflmc.posterior import Posterior
from wflmc.privacy import Privacy

PLAN_ARGUMENTS = ("step_size", "burn_in", "samples")
"""Keys of the section `sampler` that are arguments of `plan` itself."""


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The arguments of `wflmc.plan`; None stands for its default."""

    posterior: Posterior
    link: Link
    privacy: Privacy
    step_size: ArrayLike | None = None
    burn_in: int | None = None
    samples: int | None = None
    sampler: Sampler | None = None
    policy: Policy | None = None
    ledger: ArrayLike | None = None
    initial_w2_sq: float | None = None

    def plan(self) -> Plan:
        """Make the plan.

        Raises:
            InputError: an argument is out of range, or limits contradict each other.
        """
        arguments: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                arguments[field.name] = value
        return plan(**arguments)

    def settled_by(self, made: Plan) -> "PlanRequest":
        """Return the request with what its plan has chosen: steps, rounds, dynamics.

        Other plans then differ in the changed key alone. Step sizes that were planned
        are taken as they are, since planning them takes some seventy plans.

        Args:
            made: the plan of this request.
        """
        step_size = made.step_size
        is_constant = bool(np.all(step_size == step_size[0]))
        sampler = self.sampler or Sampler()
        return replace(
            self,
            step_size=float(step_size[0]) if is_constant else step_size,
            burn_in=made.burn_in,
            samples=len(made.rounds) - made.burn_in,
            sampler=replace(sampler, step_schedule="constant", dynamics=made.dynamics),
            policy=self.policy or Policy(),
        )

    def changed(self, changes: Mapping[str, SettingValue]) -> "PlanRequest":
        """Return the request with other values of some scenario keys.

        Args:
            changes: new values by key, such as `privacy.clip`, of the sections `link`,
                `privacy`, `sampler` and `policy`.
        """
        link: dict[str, Any] = {}
        privacy: dict[str, Any] = {}
        sampler: dict[str, Any] = {}
        policy: dict[str, Any] = {}
        arguments: dict[str, Any] = {}
        sections = {
            "link": link,
            "privacy": privacy,
            "sampler": sampler,
            "policy": policy,
        }
        for key, value in changes.items():
            section, _, name = key.partition(".")
            target = arguments if name in PLAN_ARGUMENTS else sections[section]
            target[name] = value
        return replace(
            self,
            link=replace(self.link, **link),
            privacy=replace(self.privacy, **privacy),
            sampler=replace(self.sampler or Sampler(), **sampler),
            policy=replace(self.policy or Policy(), **policy),
            **arguments,
        )
