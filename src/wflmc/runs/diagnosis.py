"""The diagnosis of a scenario's plan or run, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from wflmc.evaluation import Evaluation
from wflmc.evaluation.causes import Cause, Change, Setting, find_causes
from wflmc.planning import Plan
from wflmc.runs.inverse import with_value
from wflmc.runs.planning import make_plan
from wflmc.scenario.build import Inputs, build_privacy
from wflmc.scenario.schema import Scenario


def diagnose(
    scenario: Scenario, inputs: Inputs, plan: Plan, evaluation: Evaluation | None = None, *, changes: bool = True
) -> list[dict[str, Any]]:
    """What keeps samples from the posterior, worst first; empty where they are expected to be good.

    Where a promise is made and all that the plan takes from the data was given as public, data are not looked at here
    either.

    Args:
        changes: whether changes are tried, by plans with other values.
    """
    settled = {"sampler.burn_in": plan.burn_in, "sampler.step_schedule": "constant"}
    if scenario.sampler.step_schedule == "planned":
        settled["sampler.step_size"] = plan.step_size.tolist()
    as_made = with_values(scenario, settled)

    def replan(values: Mapping[str, Any]) -> Plan:
        other, given = with_values(as_made, values), inputs
        if "link.snr_db" in values:
            given = given._replace(link=dataclasses.replace(given.link, snr_db=values["link.snr_db"]))
        if any(key.startswith("privacy.") for key in values):
            given = given._replace(privacy=build_privacy(other))
        return make_plan(other, given, ledger=plan.ledger)

    slow = scenario.policy.objective == "exact" or scenario.policy.csi == "causal"
    setting = Setting(scenario.link.snr_db, scenario.policy.power, replan, slow) if changes else None
    looked_at = None if inputs.public else inputs.posterior
    return [_document(cause) for cause in find_causes(plan, looked_at, setting, evaluation)]


def with_values(scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
    for key, value in values.items():
        scenario = with_value(scenario, key, value)
    return scenario


def _document(cause: Cause) -> dict[str, Any]:
    return {
        "cause": cause.cause,
        "evidence": cause.evidence,
        "cost": _finite(cause.cost),
        "change": None if cause.change is None else _tried(cause.change),
        "instead": None if cause.instead is None else _tried(cause.instead),
        "text": str(cause),
    }


def _tried(change: Change) -> dict[str, Any]:
    expected = None
    if change.expected is not None:
        before, after = map(_finite, change.expected)
        expected = {"before": before, "after": after, "exact": change.exact}
    return {
        "key": change.key,
        "value": change.value,
        "direction": change.direction,
        "with": dict(change.others),
        "expected": expected,
    }


def _finite(value: float) -> float | None:
    """Return a number for JSON; None of chains that diverge."""
    return float(value) if np.isfinite(value) else None
