"""The plan of a federation: made for all that its transport and its chains cost beyond one sum over the air."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError
from wflmc.planning import Plan
from wflmc.scenario.build import Inputs, make_plan
from wflmc.scenario.schema import Scenario


def federated_plan(
    scenario: Scenario,
    inputs: Inputs,
    *,
    noise: str = "simulated",
    tolerate: int = 0,
    releases: int = 1,
    ledger: NDArray[np.float64] | None = None,
) -> Plan:
    """The scenario's plan, from budgets that are left when every round costs as much as it does here.

    A round of a plan costs 2 (α r ℓ)²/N0 for one chain whose sum alone is seen. Chains that are all given away cost
    that each; where devices add the noise, the server sees messages one by one, each hidden by its share alone, and a
    round costs as many times more as there are shares in N0.

    Args:
        ledger: what devices have spent before, [K].
    """
    devices = inputs.posterior.devices
    if noise == "devices" and scenario.policy.power != "noiseless-dp":
        allowed = "'noiseless-dp' where devices add the noise: --set policy.power=noiseless-dp"
        raise InputError("policy.power", scenario.policy.power, allowed)
    if noise == "devices" and not 0 <= tolerate < devices:
        raise InputError("--tolerate", tolerate, f"between 0 and {devices - 1}")
    factor = releases * (devices - tolerate if noise == "devices" else 1)
    spent = inputs.spent if ledger is None else ledger
    budget = inputs.privacy.budget(devices)
    # All but a part of the budget counts as spent, and what the plan makes of that part is multiplied again.
    left = np.where(np.isfinite(budget), np.maximum(budget - spent, 0.0), 0.0)
    kept_back = left * (1 - 1 / factor)
    made = make_plan(scenario, inputs, ledger=spent + kept_back)
    return made if factor == 1 else replace(made, ledger=spent)
