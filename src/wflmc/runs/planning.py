"""The plan of a scenario: made, read back from its JSON, or made longer."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wflmc import planning
from wflmc.dynamics import Array
from wflmc.evaluation import choose_burn_in
from wflmc.planning import Allocation, Plan, Policy, PowerPolicy, Problem, Sampler, policy_named
from wflmc.planning.advice import UNSCALED_FEATURES
from wflmc.privacy.ledger import Ledger
from wflmc.runs.documents import PUBLIC_FILES, PlanFile, read_document
from wflmc.scenario import Inputs, Scenario, build, data_warnings, scenario_keys, step_sizes, validate, with_values
from wflmc.scenario.files import file_digests, plain
from wflmc.support.errors import InputError, conflict

SAME = 1 + 1e-9
"""Ratio of numbers that count as equal: other processors round otherwise."""


def make_plan(
    scenario: Scenario, inputs: Inputs, power: PowerPolicy | None = None, solver: str = "own", ledger: Any = None
) -> Plan:
    """Return the plan of a scenario, by its own policy or a given one.

    Args:
        ledger: what devices have spent before, [K], a release that whitening took included.
    """
    scenario = settle_burn_in(scenario, inputs)
    with scenario_keys():
        keywords = plan_keywords(scenario, inputs, power, solver, ledger)
        result = planning.plan(inputs.posterior, inputs.link, inputs.privacy, **keywords)
    # Where a promise is made and all constants are public, a plan says nothing about the data.
    warnings = [text for text in result.warnings if not (inputs.public and text.startswith(UNSCALED_FEATURES))]
    return result.replace(warnings=(*inputs.warnings, *warnings, *data_warnings(inputs.not_covered)))


def spent_before(path: str | None, inputs: Inputs, must_exist: bool = False) -> Any:
    """Return what devices have spent by a ledger, and are about to spend on whitening, [K]; None of a new ledger."""
    if path is None or not Path(path).exists():
        if path is not None and must_exist:
            raise InputError("--ledger", path, "a ledger that a run has written")
        return None
    ledger = Ledger(inputs.privacy, inputs.posterior.devices, subject=inputs.posterior.digest, path=path)
    paid = inputs.release is not None and ledger.rounds(inputs.release.name) > 0
    return ledger.spent if paid else ledger.spent + inputs.spent


def plan_keywords(
    scenario: Scenario, inputs: Inputs, power: PowerPolicy | None = None, solver: str = "own", ledger: Any = None
) -> dict[str, Any]:
    """Return the keywords of `wflmc.plan` for a scenario whose burn-in is settled, as those of `make_plan`."""
    section, policy = scenario.sampler, scenario.policy
    limit = np.inf if policy.max_round_noise == "inf" else policy.max_round_noise
    given = policy.model_dump() | {"power": power or policy.power, "max_round_noise": limit, "solver": solver}
    schedule = section.step_schedule if power is None else "constant"
    start = 0 if inputs.release is None else len(inputs.release.loss)
    return {
        "step_size": step_sizes(scenario, inputs.posterior),
        "burn_in": int(section.burn_in),
        "samples": section.samples,
        "sampler": Sampler(step_schedule=schedule, init=section.init, dynamics=inputs.dynamics, start=start),
        "policy": Policy(**given),
        "ledger": inputs.spent if ledger is None else ledger,
        "initial_w2_sq": scenario.posterior.initial_w2_sq or None,
    }


def settle_burn_in(scenario: Scenario, inputs: Inputs) -> Scenario:
    """Replace burn_in = "auto" by the number of rounds that a noiseless pilot takes to forget its start."""
    section = scenario.sampler
    if section.burn_in != "auto":
        return scenario
    with scenario_keys():
        key = jax.random.key(0 if section.seed == "secret" else section.seed)  # of the pilot, which protects nobody
        burn_in = choose_burn_in(key, inputs.posterior, inputs.step_size, section.max_burn_in, inputs.dynamics)
    return with_values(scenario, {"sampler.burn_in": burn_in})


def read_plan(path: str | Path, key: jax.Array | None = None, option: str = "--plan") -> tuple[Scenario, Inputs, Plan]:
    """Return a plan as `wflmc plan --json` wrote it, its gains taken as they are, with its scenario and inputs.

    The scenario inside gives data, channels and schedule again; gains that do not belong to that schedule, or
    that break the power limit or the privacy budget, are refused.

    Args:
        key: as of `build`.
        option: that names the file, for errors.
    """
    document = read_document(Path(path).expanduser(), PlanFile, option)
    scenario = _settled_scenario(document, option)
    for name, digest in file_digests(scenario, {*PUBLIC_FILES, *document.files}).items():
        if document.files.get(name) != digest:
            allowed = "the file that the plan was made with; it has changed since"
            raise InputError(f"{option}: {name}", str(path), allowed)
    if key is None and scenario.sampler.seed == "secret" and scenario.posterior.preconditioner == "private-whiten":
        allowed = "a number with private-whiten: a secret key is deleted when its run ends, and the release with it"
        raise InputError(f"{option}: sampler.seed", "secret", allowed)
    inputs = build(scenario, key)
    known = {item.name for item in inputs.not_covered}  # the scenario no longer shows what was settled in the plan
    settled = (item for item in document.not_covered if item.name not in known)
    inputs = inputs._replace(not_covered=(*inputs.not_covered, *settled))

    spent = document.privacy.spent_before
    paid = inputs.spent if spent is None else np.maximum(spent, inputs.spent)
    given = partial(_given_power, document, inputs.link.noise_power, option)
    result = make_plan(scenario, inputs, policy_named(scenario.policy.power)._replace(allocate=given), ledger=paid)
    _check_constants(document, result, option)
    return scenario, inputs, result


def _check_constants(document: PlanFile, result: Plan, option: str) -> None:
    """Refuse a plan whose constants are not those that its scenario gives again."""
    now = {name: plain(getattr(result, name)) for name in ("mu", "L", "dim", "initial_w2_sq", "devices")}
    now |= {"rounds": len(result.rounds), "budget": plain(float(result.privacy.budget(result.devices).min()))}
    then = {**document.constants.model_dump(), "budget": document.privacy.budget}
    for name, value in now.items():
        given, place = then[name], "privacy" if name == "budget" else "constants"
        if value != given and (value is None or given is None or not math.isclose(value, given, rel_tol=SAME - 1)):
            raise InputError(f"{option}: {place}.{name}", given, f"{value!r}, as its scenario gives")


def _settled_scenario(document: PlanFile, option: str) -> Scenario:
    """Return the scenario of a plan, with everything in it that planning decided."""
    settled = {"burn_in": document.constants.burn_in, "step_schedule": "constant"}
    settled |= {"step_size": _one_or_each(np.asarray(document.step_size)), **document.constants.motion.parameters}
    sampler = {**document.scenario.get("sampler", {}), **settled}
    return validate({**document.scenario, "sampler": sampler}, f"{option}: ")


def _given_power(document: PlanFile, noise_power: float, option: str, problem: Problem) -> Allocation:
    """Return the power of a plan's file, checked against the limits of its scenario."""
    gain, allowed = np.asarray(document.gain), ""
    if not np.all((gain > 0) & np.isfinite(gain)) or gain.shape != (problem.rounds,):
        raise InputError(f"{option}: gain", document.gain, f"{problem.rounds} finite numbers above 0")
    a = gain**2 / noise_power
    share, over = a @ problem.active / problem.budget, a > problem.power_cap * SAME
    if np.any(over):
        allowed = f"within the power limit of round {int(np.argmax(over)) + 1}"
    elif np.any(share > SAME):
        allowed = f"within every privacy budget; device {np.argmax(share)} would spend {share.max():.4g} times its own"
    elif document.active_devices != problem.active.sum(-1).tolist():
        allowed = "one for the active_devices that the plan's own scenario gives"
    if allowed:
        raise InputError(f"{option}: gain", document.gain, allowed)
    return Allocation(a)


def extend_plan(scenario: Scenario, inputs: Inputs, plan: Plan, more: int, spent: Array) -> tuple[Scenario, Plan]:
    """Return the scenario and plan with `more` rounds after the last, made from what is left of every budget.

    Args:
        spent: by every device, [K], the plan's own rounds included.
    """
    by_plan = plan.spent if plan.clips else np.zeros(plan.devices)
    before = np.maximum(plan.ledger, spent - by_plan)
    empty = np.flatnonzero(before + by_plan >= plan.privacy.budget(plan.devices) / SAME)
    if plan.enforced and plan.clips and empty.size:
        raise conflict("--more", more, f"here: nothing is left to spend of the budget of device {empty[0]}")
    steps = np.append(plan.step_size, np.full(more, plan.step_size[-1]))
    constant = {"sampler.step_schedule": "constant"}
    samples = scenario.sampler.samples + more
    longer = with_values(scenario, constant | {"sampler.samples": samples, "sampler.step_size": _one_or_each(steps)})
    only = {"sampler.burn_in": 0, "sampler.samples": more, "sampler.step_size": float(steps[-1])}
    keywords = plan_keywords(with_values(scenario, constant | only), inputs, ledger=before + by_plan)
    sampler = keywords["sampler"]
    keywords["sampler"] = replace(sampler, start=sampler.start + len(plan.rounds), before=plan)
    if plan.bound is not None:
        keywords["initial_w2_sq"] = float(plan.bound[-1])
    with scenario_keys():
        added = planning.plan(inputs.posterior, inputs.link, inputs.privacy, **keywords)
    a = np.concatenate([plan.gain, added.gain]) ** 2 / inputs.link.noise_power
    scheme = policy_named(scenario.policy.power)._replace(allocate=lambda problem: Allocation(a))
    return longer, make_plan(longer, inputs, scheme, ledger=before)


def _one_or_each(steps: Array) -> float | list[float]:
    """Return step sizes as a scenario has them: a number where all are the same, else one for every round."""
    return float(steps.flat[0]) if np.unique(steps).size == 1 else [float(step) for step in steps]
