"""The plan of a scenario: made, read back from its JSON, or made longer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError, naming
from wflmc.evaluation import choose_burn_in
from wflmc.planning import Allocation, Plan, Policy, Problem, plan, policy
from wflmc.planning.advice import UNSCALED_FEATURES
from wflmc.runs.documents import _digests, _public_files
from wflmc.scenario.build import Inputs, build, step_sizes
from wflmc.scenario.coverage import NotCovered, data_warnings
from wflmc.scenario.files import is_data_path, plain
from wflmc.scenario.schema import PrivacySection, SamplerSection, Scenario, validate

PLAN_FILE = "a JSON file as `wflmc plan --json` writes it"


def make_plan(
    scenario: Scenario,
    inputs: Inputs,
    power: Policy | None = None,
    solver: str = "own",
    ledger: ArrayLike | None = None,
    start: int = 0,
    initial_w2_sq: float | None = None,
    before: Plan | None = None,
) -> Plan:
    """The plan of a scenario, by its own policy or a given one.

    Args:
        ledger: what devices have spent before, a release that whitening took included.
        start: rounds of the chain that came before; those of a release come on top.
        initial_w2_sq: as of `plan`.
    """
    policy = scenario.policy
    scenario = settle_burn_in(scenario, inputs)
    burn_in = scenario.sampler.burn_in
    try:
        made = plan(
            inputs.posterior,
            inputs.link,
            inputs.privacy,
            step_size=step_sizes(scenario, inputs.posterior),
            step_schedule=scenario.sampler.step_schedule if power is None else "constant",
            burn_in=int(burn_in),
            samples=scenario.sampler.samples,
            power=power or policy.power,
            schedule=policy.schedule,
            senders=policy.senders,
            csi=policy.csi,
            objective=policy.objective,
            bound=policy.bound,
            init=scenario.sampler.init,
            initial_w2_sq=initial_w2_sq or scenario.posterior.initial_w2_sq or None,
            ledger=inputs.spent if ledger is None else ledger,
            start=start if inputs.release is None else start + len(inputs.release.loss),
            max_round_noise=np.inf if policy.max_round_noise == "inf" else policy.max_round_noise,
            solver=solver,
            before=before,
            dynamics=scenario.sampler.dynamics,
            friction=2.0 if inputs.friction is None else inputs.friction,
        )
    except InputError as error:
        raise InputError(f"{_section_of(error)}{error.key}", error.given, error.allowed) from None
    # Where a promise is made and all constants are public, a plan says nothing about the data.
    said = [text for text in made.warnings if not (inputs.public and text.startswith(UNSCALED_FEATURES))]
    return dataclasses.replace(made, warnings=(*inputs.warnings, *said, *data_warnings(inputs.not_covered)))


def _section_of(error: InputError) -> str:
    """The section an error of planning belongs to: link for gains, else wherever the key is."""
    if error.key in ("solver", "ledger"):
        return "--"
    if error.key in PrivacySection.model_fields:
        return "privacy."
    if error.key in ("gains", "snr_db") or (error.key == "power" and not isinstance(error.given, str)):
        return "link."
    return "sampler." if error.key in SamplerSection.model_fields else "policy."


def settle_burn_in(scenario: Scenario, inputs: Inputs) -> Scenario:
    """The scenario with `burn_in = "auto"` replaced by where a simulated noiseless pilot has forgotten its start."""
    section = scenario.sampler
    if section.burn_in != "auto":
        return scenario
    with naming("sampler"):
        key = jax.random.key(0 if section.seed == "secret" else section.seed)  # of the pilot, which protects nobody
        chosen = choose_burn_in(key, inputs.posterior, inputs.step_size, section.max_burn_in, inputs.friction)
    return scenario.model_copy(update={"sampler": section.model_copy(update={"burn_in": chosen})})


def read_plan(path: str | Path, key: jax.Array | None = None) -> tuple[Scenario, Inputs, Plan]:
    """A plan as `wflmc plan --json` wrote it, its gains taken as they stand.

    The scenario inside gives data, channels and schedule again; gains that do not belong to that schedule, or
    that break the power limit or the privacy budget, are refused.

    Args:
        key: as of `build`.
    """
    document = _plan_file(path)
    try:
        scenario = validate(document["scenario"])
        gain = np.asarray(document["gain"], dtype=float)
        constants, active = document["constants"], list(document["active_devices"])
        steps = np.asarray(document.get("step_size", constants["step_size"]), dtype=float)
        settled = {"burn_in": int(constants["burn_in"]), "step_schedule": "constant", "step_size": _settled(steps)}
        if "friction" in constants:
            settled["friction"] = float(constants["friction"])
        names = ("mu", "L", "dim", "devices", "rounds", "initial_w2_sq")
        expected = {name: float(constants[name]) for name in names}
        budget, digests = document["privacy"]["budget"], document["files"]
        before = document["privacy"].get("spent_before")
        noted = [NotCovered(**item) for item in document.get("not_covered", [])]
    except InputError as error:
        raise InputError(f"--plan: {error.key}", error.given, error.allowed) from None
    except (ValueError, TypeError, KeyError, OverflowError):
        raise InputError("--plan", str(path), PLAN_FILE) from None
    scenario = validate(_merged(scenario, settled))
    files = _public_files(scenario)
    if "posterior.data" in digests and is_data_path(scenario.posterior.data):  # of earlier versions
        files["posterior.data"] = scenario.posterior.data
    changed = [key for key, digest in _digests(files).items() if digests.get(key) != digest]
    if changed:
        raise InputError(
            f"--plan: {changed[0]}", str(path), "the file that the plan was made with; it has changed since"
        )
    if key is None and scenario.sampler.seed == "secret" and scenario.posterior.preconditioner == "private-whiten":
        allowed = (
            "a number with private-whiten: a secret is deleted with the run's end, and the release cannot be repeated"
        )
        raise InputError("--plan: sampler.seed", "secret", allowed)
    inputs = build(scenario, key)
    known = {item.name for item in inputs.not_covered}  # what is settled in the plan's scenario shows no more in it
    inputs = inputs._replace(not_covered=(*inputs.not_covered, *(item for item in noted if item.name not in known)))

    def as_given(problem: Problem) -> Allocation:
        if gain.shape != (problem.rounds,) or not np.all((gain > 0) & np.isfinite(gain)):
            raise InputError("gain", document["gain"], f"{problem.rounds} finite numbers above 0")
        if active != problem.active.sum(-1).tolist():
            raise InputError("active_devices", active, "the schedule that the plan's own scenario gives")
        a = gain**2 / inputs.link.noise_power
        if np.any(a > problem.power_cap * (1 + 1e-9)):
            first = int(np.argmax(a > problem.power_cap * (1 + 1e-9)))
            raise InputError("gain", float(gain[first]), f"within the power limit of round {first + 1}")
        over = a @ problem.active / problem.budget
        if np.any(over > 1 + 1e-9):
            worst = int(np.argmax(over))
            raise InputError(
                "gain",
                str(path),
                f"within every privacy budget; device {worst} would spend {over[worst]:.4g} times its own",
            )
        return Allocation(a)

    scheme = policy(scenario.policy.power)._replace(allocate=as_given)
    try:
        paid = inputs.spent if before is None else np.maximum(before, inputs.spent)
        made = make_plan(scenario, inputs, scheme, ledger=paid)
    except InputError as error:
        raise InputError(f"--plan: {error.key.removeprefix('policy.')}", error.given, error.allowed) from None
    now = {name: float(getattr(made, name)) for name in names}
    # Not exactly: other processors round otherwise.
    unlike = [name for name in names if not math.isclose(now[name], expected[name], rel_tol=1e-9)]
    if unlike:
        raise InputError(
            f"--plan: constants.{unlike[0]}", expected[unlike[0]], f"{now[unlike[0]]!r}, as its scenario gives"
        )
    limit = plain(float(made.privacy.budget(made.devices).min()))
    if (limit is None) != (budget is None) or (limit is not None and not math.isclose(limit, budget, rel_tol=1e-9)):
        raise InputError("--plan: privacy.budget", budget, f"{limit!r}, as its scenario gives")
    return scenario, inputs, made


def extend_plan(
    scenario: Scenario, inputs: Inputs, plan: Plan, more: int, spent: NDArray[np.float64]
) -> tuple[Scenario, Plan]:
    """The scenario and plan with `more` rounds after the last, made from what is left of every budget.

    Args:
        spent: by every device, [K], the plan's own rounds included.
    """
    own = plan.spent if plan.clips else np.zeros(plan.devices)
    before = np.maximum(plan.ledger, spent - own)
    steps = np.append(plan.step_size, np.full(more, plan.step_size[-1]))
    settled = {"samples": scenario.sampler.samples + more, "step_schedule": "constant", "step_size": _settled(steps)}
    longer = scenario.model_copy(update={"sampler": scenario.sampler.model_copy(update=settled)})
    only = longer.sampler.model_copy(update={"burn_in": 0, "samples": more, "step_size": float(steps[-1])})
    rest = make_plan(
        scenario.model_copy(update={"sampler": only}),
        inputs,
        ledger=before + own,
        start=plan.rounds,
        initial_w2_sq=None if plan.bound is None else float(plan.bound[-1]),
        before=plan,
    )

    def as_made(_: Problem) -> Allocation:
        return Allocation(np.concatenate([plan.gain, rest.gain]) ** 2 / inputs.link.noise_power)

    scheme = policy(scenario.policy.power)._replace(allocate=as_made)
    return longer, make_plan(longer, inputs, scheme, ledger=before)


def _settled(steps: NDArray[np.float64]) -> float | list[float]:
    """Step sizes as the scenario has them: a number where all are the same, else one for every round."""
    return float(steps.flat[0]) if np.unique(steps).size == 1 else [float(step) for step in steps]


def _plan_file(path: str | Path) -> dict[str, Any]:
    try:
        document = json.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("--plan", str(path), f"a readable file ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise InputError("--plan", str(path), PLAN_FILE) from None
    if not isinstance(document, dict) or not isinstance(document.get("scenario"), dict):
        raise InputError("--plan", str(path), PLAN_FILE)
    return document


def _merged(scenario: Scenario, sampler: dict[str, Any]) -> dict[str, Any]:
    """The scenario as plain data, with some keys of its sampler settled."""
    content: dict[str, Any] = scenario.model_dump(exclude_unset=True, exclude_none=True)
    return {**content, "sampler": {**content.get("sampler", {}), **sampler}}
