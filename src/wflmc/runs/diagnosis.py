"""The diagnosis of a scenario's plan or run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wflmc.evaluation import Evaluation
from wflmc.evaluation.causes import Change, Setting, find_causes
from wflmc.planning import Plan
from wflmc.runs.inverse import with_changes
from wflmc.runs.planning import make_plan
from wflmc.scenario.build import Inputs
from wflmc.scenario.files import plain
from wflmc.scenario.schema import Scenario, with_values


def diagnose(
    scenario: Scenario, inputs: Inputs, plan: Plan, evaluation: Evaluation | None = None, *, changes: bool = True
) -> list[dict[str, Any]]:
    """Return what keeps samples from the posterior, worst first; empty where they are expected to be good.

    Where a promise is made and all that the plan takes from the data was given as public, data are not looked at here
    either.

    Args:
        changes: whether changes are tried, by plans with other values.
    """
    settled = {"sampler.burn_in": plan.burn_in, "sampler.step_schedule": "constant"}
    if scenario.sampler.step_schedule == "planned":
        settled["sampler.step_size"] = plan.step_size.tolist()

    def replan(values: Mapping[str, Any]) -> Plan:
        return make_plan(*with_changes(with_values(scenario, settled), inputs, values), ledger=plan.ledger)

    slow = scenario.policy.objective == "exact" or scenario.policy.csi == "causal"
    setting = Setting(scenario.link.snr_db, scenario.policy.power, replan, slow) if changes else None
    causes = find_causes(plan, None if inputs.public else inputs.posterior, setting, evaluation)
    return [
        {
            "cause": cause.cause,
            "evidence": cause.evidence,
            "cost": plain(float(cause.cost)),
            "change": None if cause.change is None else _change(cause.change),
            "instead": None if cause.instead is None else _change(cause.instead),
            "text": str(cause),
        }
        for cause in causes
    ]


def _change(change: Change) -> dict[str, Any]:
    expected = None
    if change.expected is not None:
        before, after = change.expected
        expected = {"before": plain(float(before)), "after": plain(float(after)), "exact": change.exact}
    return {
        "key": change.key,
        "value": change.value,
        "direction": change.direction,
        "with": dict(change.others),
        "expected": expected,
    }
