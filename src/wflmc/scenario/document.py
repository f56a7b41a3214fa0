"""The JSON of a plan and of a run's summary, and a plan read back from its JSON."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError
from wflmc.evaluation import Calibration, Evaluation, exact_ess, exact_w2_sq, has_law, reliability
from wflmc.planning import Allocation, Plan, Problem, policy
from wflmc.privacy import ACCOUNTANTS
from wflmc.privacy.reference import epsilon_by_dp_accounting
from wflmc.scenario.build import Inputs, build, make_plan
from wflmc.scenario.coverage import OWNER_ONLY, NotCovered
from wflmc.scenario.files import is_data_path, plain
from wflmc.scenario.schema import Scenario, validate
from wflmc.version import __version__

SIMULATED = (
    "wflmc run simulates all devices in one process and protects nobody. Over a real radio the server hears only the "
    "noisy sum; over a digital link wflmc federate protects against everyone but the server's own process, or locally "
    "(--noise devices) at K times the loss."
)
"""Said of every run that is no federation."""
PLAN_FILE = "a JSON file as `wflmc plan --json` writes it"


def plan_document(
    scenario: Scenario,
    inputs: Inputs,
    plan: Plan,
    seconds: float,
    compare: bool = False,
    causes: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What `wflmc plan --json` prints, plain data.

    Args:
        compare: whether dp-accounting is asked for its ε too.
        causes: the diagnosis, where one was made.
    """
    spent = plan.spent if plan.clips else None
    budget = plan.privacy.budget(plan.devices)
    document = {
        "constants": {
            "mu": plan.mu,
            "L": plan.L,
            "step_size": float(plan.step_size[-1]),
            "gamma": plan.gamma,
            "dim": plan.dim,
            "devices": plan.devices,
            "rounds": plan.rounds,
            "burn_in": plan.burn_in,
            "samples": plan.rounds - plan.burn_in,
            "initial_w2_sq": plan.initial_w2_sq,
            **({} if plan.friction is None else {"dynamics": plan.dynamics, "friction": plan.friction}),
        },
        "step_size": plan.step_size,
        "regime": plan.regime,
        "regime_share": plan.regime_share,
        "gain": plan.gain,
        "threshold": plan.threshold,
        "active_devices": plan.active_devices,
        "bound": plan.bound,
        "objective": plan.objective,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "max_round_noise": plan.noise_limit,
        "classes": getattr(inputs.posterior, "class_names", None),
        "coordinates": "parameters" if inputs.posterior.coordinates is None else "whitened",
        "whitening": None if inputs.release is None else inputs.release.summary(budget),
        "privacy": {
            "budget": float(budget.min()),
            "accountant": plan.privacy.accountant,
            "unit": plan.privacy.unit,
            "adjacency": plan.privacy.adjacency,
            "rounding": plan.rounding,
            "spent_max": None if spent is None else float(spent.max()),
            "epsilon_spent": plan.epsilon_spent,
            "epsilon_by": _epsilon_by(plan, compare),
            "epsilon_each": plan.privacy.epsilons_spent(plan.spent + plan.ledger) if plan.clips else None,
            "spent": spent,
            "spent_before": plan.ledger if plan.ledger.any() else None,
            "budgets": budget,
        },
        "exact_w2_sq": exact_w2_sq(inputs.posterior, plan) if has_law(inputs.posterior) else None,
        "exact_ess_min": float(exact_ess(inputs.posterior, plan).min()) if has_law(inputs.posterior) else None,
        "diagnosis": causes,
        "not_covered": [item._asdict() for item in inputs.not_covered],
        "warnings": list(plan.warnings),
        "seconds": seconds,
        "version": __version__,
        "scenario": _json_scenario(scenario),
        "files": _digests(_public_files(scenario)),
    }
    result: dict[str, Any] = plain(document)
    return result


def _epsilon_by(plan: Plan, compare: bool) -> dict[str, float | None] | None:
    """ε of the worst device by each accountant; None where nothing is promised."""
    privacy, total = plan.privacy, plan.spent + plan.ledger
    if not plan.clips or privacy.delta is None:
        return None
    found: dict[str, float | None] = {name: privacy.epsilon_spent(total, name) for name in ACCOUNTANTS}
    if compare:
        each = privacy.epsilons_spent(total, "exact")
        assert each is not None
        worst = int(np.argmax(each))
        delta = float(np.broadcast_to(privacy.delta, each.shape)[worst])
        rounds = np.append(plan.loss[:, worst], plan.ledger[worst])
        found.update(epsilon_by_dp_accounting(rounds[rounds > 0], delta))
    return found


def _public_files(scenario: Scenario) -> dict[str, str]:
    """Files by key that a plan has the hash of: not the data, as that would tell the last label to who knows the rest.

    What a plan takes from the data are its constants, which are compared; and a ledger knows the data of its runs.
    """
    return {"link.gains": scenario.link.gains} if scenario.link.fading == "file" else {}


def _digests(files: dict[str, str]) -> dict[str, str]:
    """SHA-256 of files, by key."""
    return {key: hashlib.sha256(Path(path).read_bytes()).hexdigest() for key, path in files.items()}


def _json_scenario(scenario: Scenario) -> dict[str, Any]:
    """The keys that were set; JSON cannot write infinity, and one key has a default that is not it."""
    content: dict[str, dict[str, Any]] = scenario.model_dump(exclude_unset=True, exclude_none=True)
    return {
        section: {
            key: "inf" if value == math.inf else value
            for key, value in values.items()
            if value != math.inf or key == "max_round_noise"
        }
        for section, values in content.items()
    }


def summary_document(
    evaluation: Evaluation,
    warnings: tuple[str, ...],
    seconds: float,
    causes: list[dict[str, Any]],
    beyond: list[dict[str, Any]],
) -> dict[str, Any]:
    """What `DIR/summary.json` holds, plain data.

    Args:
        warnings: of the plan, those that every run has last.
        causes: the diagnosis.
        beyond: `not_covered` of the plan.
    """
    distance, scores = evaluation.w2_sq, evaluation.scores
    document = {
        "owner_only": OWNER_ONLY,
        "w2_sq": None
        if distance is None
        else {
            "worst": distance.worst,
            "worst_se": distance.worst_se,
            "floor": distance.floor,
            "per_round": distance.per_round,
        },
        "exact_w2_sq": evaluation.exact_w2_sq,
        "exact_ess_min": evaluation.exact_ess_min,
        "rhat_max": evaluation.rhat_max,
        "ess_min": evaluation.ess_min,
        "ess_tail_min": evaluation.ess_tail_min,
        "frozen": list(evaluation.frozen),
        "clip_rate": evaluation.clip_rate,
        "example_clip_rate": evaluation.example_clip_rate,
        **evaluation.mean_scores,
        "reliability": reliability(scores)._asdict() if isinstance(scores, Calibration) else None,
        "epsilon_spent": evaluation.epsilon_spent,
        "adjacency": evaluation.adjacency,
        "diagnosis": causes,
        "not_covered": beyond,
        "warnings": [*evaluation.warnings, *warnings],
        "seconds": seconds,
    }
    result: dict[str, Any] = plain(document)
    return result


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
