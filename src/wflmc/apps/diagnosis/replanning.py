"""Making a plan again with some of its settings changed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from wflmc.apps.diagnosis.values import SettingValue
from wflmc.channel import drawn_once
from wflmc.planning import Plan, PlanRequest, plan_from
from wflmc.planning.build import TrialPlan
from wflmc.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Replanner:
    """A posterior, and what its plan was made for."""

    posterior: Posterior
    """The model, whose data planning may look at."""
    request: PlanRequest
    """All other arguments of `wflmc.plan`."""

    def plan(self, changes: Mapping[str, SettingValue]) -> Plan:
        """Make the plan with other values of some scenario keys.

        Args:
            changes: new values by key, such as `privacy.clip`, of the sections `link`,
                `privacy`, `sampler` and `policy`.

        Returns:
            The plan.

        Raises:
            InputError: a value is out of range, or limits contradict each other.
        """
        return plan_from(self.posterior, self.request.with_values(changes))

    def trial(self, changes: Mapping[str, SettingValue]) -> TrialPlan:
        """Prepare the plan with other values of some scenario keys.

        Bounds on its forecast need not wait for the plan: its channels, weights and
        limits are there before the power is chosen.

        Args:
            changes: as of `plan`.

        Returns:
            What makes the plan, without notices.

        Raises:
            InputError: a value is out of range.
        """
        return TrialPlan(self.posterior, self.request.with_values(changes))

    def settled_by(self, plan: Plan) -> "Replanner":
        """Return the replanner with the choices of a plan: steps, rounds and dynamics.

        Other plans then differ in the changed key alone. Step sizes that were planned
        are taken as they are, since planning them takes some seventy plans. Gains are
        drawn once for all of them.

        Args:
            plan: that of the request.

        Returns:
            The settled replanner.
        """
        step_size = plan.step_size
        is_constant = bool(np.all(step_size == step_size[0]))
        request = self.request
        fading = drawn_once(request.link.fading)
        sampler = replace(
            request.sampler, step_schedule="constant", dynamics=plan.dynamics
        )
        settled_request = replace(
            request,
            link=replace(request.link, fading=fading),
            step_size=float(step_size[0]) if is_constant else step_size,
            burn_in=plan.burn_in,
            samples=len(plan.rounds) - plan.burn_in,
            sampler=sampler,
        )
        return replace(self, request=settled_request)
