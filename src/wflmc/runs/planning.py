"""The plan of a scenario: made, loaded from its files, or made longer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from numpy.typing import ArrayLike

from wflmc.dynamics import Array
from wflmc.evaluation import choose_burn_in
from wflmc.planning import Plan, PowerPolicy, plan_from, policy_named
from wflmc.planning.notices import joined_notices
from wflmc.planning.plan import PLAN_FILE, join_plans
from wflmc.privacy.ledger import Ledger
from wflmc.runs.documents import PUBLIC_FILES, PlanFile, read_document
from wflmc.scenario import (
    Inputs,
    Scenario,
    build,
    data_notices,
    load_scenario,
    plan_request,
    validate,
    with_values,
)
from wflmc.scenario.files import file_digests, plain, to_toml
from wflmc.support.errors import InputError, conflict, without_data
from wflmc.support.notices import NoticeCode

PLAN_DOCUMENT = "plan.json"
"""The readable view of a plan, beside its file."""
SCENARIO_FILE = "scenario.toml"
"""The resolved scenario of a plan, beside its file."""
SAME = 1 + 1e-9
"""Ratio up to which numbers count as equal: processors round differently."""
NO_PLAN = (
    "a plan.npz or plan.json, or a folder with these, as `wflmc plan --out` writes them"
)
"""What an option that names a plan must be."""
VIEWED_ROUNDS = ("step_size", "gain", "threshold", "active_devices", "bound")
"""Lists of plan.json that have to be those of the plan, one number for every round."""
VIEWED_CONSTANTS = ("mu", "L", "gamma", "dim", "devices", "burn_in", "initial_w2_sq")
"""Numbers in its `constants` that have to be those of the plan."""


@without_data
@dataclass(frozen=True, eq=False)
class LoadedPlan:
    """A plan from its files, with what it is to be run with."""

    scenario: Scenario
    """The scenario that the plan belongs to."""
    inputs: Inputs
    """Its posterior, link and privacy, made again from the scenario."""
    plan: Plan
    document: PlanFile
    """plan.json."""


def make_plan(
    scenario: Scenario,
    inputs: Inputs,
    *,
    solver: str = "own",
    ledger: Array | None = None,
) -> Plan:
    """Return the plan of a scenario.

    Its warnings are those of the scenario, of the plan and of what ε does not cover, in
    this order. With public moments the warning about unscaled features is left out, as
    a plan then says nothing about the data.

    Args:
        scenario: what is planned; `burn_in = "auto"` is settled first.
        inputs: of the scenario.
        solver: own, or cvxpy as a reference.
        ledger: privacy loss that devices have spent before, [K], a release that
            whitening took included; by default that release alone.

    Returns:
        The plan, which has not charged any ledger.

    Raises:
        InputError: if the scenario allows no plan.
    """
    scenario = settle_burn_in(scenario, inputs)
    request = plan_request(scenario, inputs, ledger)
    policy = replace(request.policy, solver=solver)
    request = replace(request, policy=policy)
    result = plan_from(inputs.posterior, request)
    notices = list(inputs.notices)
    for notice in result.notices:
        is_about_data = notice.code == NoticeCode.FEATURES_NOT_SCALED
        if not (inputs.public and is_about_data):
            notices.append(notice)
    notices += data_notices(inputs.not_covered)
    return result.with_notices(notices)


def spent_before(
    path: str | None,
    inputs: Inputs,
    *,
    must_exist: bool = False,
) -> Array | None:
    """Return the privacy loss that devices have spent by a ledger, [K].

    A whitening release that the ledger has not yet paid for is added: the run pays for
    it before its first round.

    Args:
        path: of the ledger; None where there is none.
        inputs: of the scenario, whose whitening release is about to be spent as well.
        must_exist: whether a ledger that is not there is refused.

    Returns:
        The loss of every device; None without a path, and for a ledger that is yet to
        be begun.

    Raises:
        InputError: if the ledger is missing though it must exist, is damaged, or is
            about other devices.
    """
    if path is None:
        return None
    if not Path(path).exists():
        if must_exist:
            raise InputError("--ledger", path, "a ledger that a run has written")
        return None
    posterior = inputs.posterior
    ledger = Ledger(
        inputs.privacy,
        posterior.devices,
        subject=posterior.digest,
        path=path,
    )
    release = inputs.release
    is_paid = release is not None and ledger.rounds(release.name) > 0
    return ledger.spent if is_paid else ledger.spent + inputs.spent


def settle_burn_in(scenario: Scenario, inputs: Inputs) -> Scenario:
    """Replace burn_in = "auto" by the rounds in which a pilot forgets its start.

    The pilot runs without channel noise, on the scenario's data on this machine, and
    sends nothing. Its noise protects nobody, so that a secret seed is replaced by 0.

    Args:
        scenario: as written.
        inputs: of the scenario.

    Returns:
        The scenario with a number of rounds; the same one where it has a number.
    """
    section = scenario.sampler
    if section.burn_in != "auto":
        return scenario
    seed = 0 if section.seed == "secret" else section.seed
    burn_in = choose_burn_in(
        jax.random.key(seed),
        inputs.posterior,
        inputs.step_size,
        section.max_burn_in,
        inputs.dynamics,
    )
    return with_values(scenario, {"sampler.burn_in": burn_in})


def load_plan(
    path: str | Path, key: jax.Array | None = None, option: str = "--plan"
) -> LoadedPlan:
    """Load a plan from its files; nothing is planned again.

    plan.npz has the plan. plan.json, beside it, has its scenario, from which posterior
    and link are rebuilt. Values that are in several of the files must agree.

    Args:
        path: plan.npz, plan.json, or the folder of both.
        key: as of `build`.
        option: that names the files, for errors.

    Returns:
        The plan with its scenario, in which burn-in is a number.

    Raises:
        InputError: a file is missing, is damaged or has been changed, or belongs to
            another plan; or the data are not of the plan's shape.
    """
    file, view = _plan_files(path)
    document = read_document(view, PlanFile, option)
    plan = read_plan_file(file, document, option)
    scenario = validate(document.scenario, f"{option}: ")
    check_scenario_file(view.with_name(SCENARIO_FILE), scenario, option)
    inputs = plan_inputs(plan, document, key=key, view=view, option=option)
    scenario = with_values(scenario, {"sampler.burn_in": plan.burn_in})
    return LoadedPlan(scenario, inputs, plan, document)


def plan_inputs(
    plan: Plan, document: PlanFile, *, key: jax.Array | None, view: Path, option: str
) -> Inputs:
    """Rebuild posterior, link and privacy of a plan from its scenario.

    The scenario may have been edited together with its plan.json, and data may have
    changed; so shapes, constants and the privacy promise are compared with the plan.
    `read_plan_file` has compared the plan with plan.json before.

    Args:
        plan: the plan, whose shape and constants the data have to have.
        document: plan.json, which has the scenario.
        key: as of `build`.
        view: the path of plan.json.
        option: that names the file, for errors.

    Returns:
        The inputs, as `build` returns them.

    Raises:
        InputError: the data are missing, or have another shape or other constants; or
            the plan does not keep the scenario's promise.
    """
    inputs = _rebuild_inputs(document, key=key, view=view, option=option)
    policy = policy_named(validate(document.scenario, f"{option}: ").policy.power)
    _check_data(plan, inputs, view, option)
    _check_scenario_promise(plan, inputs, policy=policy, view=view, option=option)
    return inputs


def plan_again(path: str | Path, option: str = "--plan") -> LoadedPlan:
    """Plan the scenario in a plan.json that has no plan.npz beside it.

    This is what `wflmc plan --json > plan.json` leaves. The result has to be the plan
    that the file describes: `VIEWED_ROUNDS`, `VIEWED_CONSTANTS` and the smallest budget
    are compared, to 1e-9.

    Args:
        path: of the file.
        option: that names the file, for errors.

    Returns:
        The plan with its scenario.

    Raises:
        InputError: the file is damaged, or the plan differs from its contents.
    """
    view = Path(path).expanduser()
    document = read_document(view, PlanFile, option)
    inputs = _rebuild_inputs(document, key=None, view=view, option=option)
    scenario = validate(document.scenario, f"{option}: ")
    scenario = with_values(scenario, {"sampler.burn_in": document.constants.burn_in})
    spent = document.privacy.spent_before
    ledger = None if spent is None else np.maximum(spent, inputs.spent)
    plan = make_plan(scenario, inputs, ledger=ledger)
    _check_planned_again(plan, document, option)
    return LoadedPlan(scenario, inputs, plan, document)


def open_plan(path: str | Path, option: str = "--plan") -> LoadedPlan:
    """Return the plan of plan.npz, of a folder, or of plan.json, with its scenario.

    It is loaded where there is a plan.npz, and planned again where there is none.

    Args:
        path: of either file, or of a folder with one or both.
        option: that names the path, for errors.

    Raises:
        InputError: if there is neither file, or `load_plan` or `plan_again` refuses it.
    """
    file, view = _plan_files(path)
    if file.exists():
        return load_plan(path, option=option)
    if view.exists():
        return plan_again(view, option)
    raise InputError(option, str(path), NO_PLAN)


def refuse_own_scenario(source: Path, folder: Path, scenario: Scenario) -> None:
    """Refuse to replace a scenario.toml that the user has written.

    The resolved scenario is written under the same name, without comments. Replacing a
    file by its own text is no loss, and is allowed: so is a run that is repeated.

    Args:
        source: the file that the scenario was read from.
        folder: where files are to be written.
        scenario: as resolved, which would be written.

    Raises:
        InputError: if the file would be replaced by another text.
    """
    file = source.expanduser().resolve()
    target = folder.expanduser().resolve() / SCENARIO_FILE
    if file == target and file.read_text(encoding="utf-8") != to_toml(scenario):
        requirement = f"another folder: this would replace your {SCENARIO_FILE}"
        raise InputError("--out", str(folder), requirement)


def read_plan_file(file: Path, document: PlanFile, option: str) -> Plan:
    """Return the plan of plan.npz, which has to be the one that plan.json describes.

    The digest decides. Lists and constants are compared as well, since users read these
    in plan.json, and an edited number must not look as if it had been run.

    Args:
        file: plan.npz.
        document: plan.json.
        option: that names the files, for errors.

    Raises:
        InputError: if the file is damaged, or plan.json describes another plan.
    """
    plan = Plan.load(file, key=option)
    if plan.checksum != document.plan_digest:
        raise InputError(
            option,
            str(file),
            f"the plan that {PLAN_DOCUMENT} describes: plan_digest there is another's",
        )
    for name in VIEWED_ROUNDS:
        if getattr(document, name) != plain(getattr(plan, name)):
            raise InputError(f"{option}: {name}", "another list", f"as in {file.name}")
    for name in VIEWED_CONSTANTS:
        written = getattr(document.constants, name)
        if written != plain(getattr(plan, name)):
            key = f"{option}: constants.{name}"
            raise InputError(key, written, f"as in {file.name}")
    return plan


def _plan_files(path: str | Path) -> tuple[Path, Path]:
    """Return the file of a plan and the one of its view."""
    user_path = Path(path).expanduser()
    if user_path.is_dir():
        return user_path / PLAN_FILE, user_path / PLAN_DOCUMENT
    return user_path.with_suffix(".npz"), user_path.with_suffix(".json")


def check_scenario_file(path: Path, scenario: Scenario, option: str) -> None:
    """Refuse a scenario.toml beside a plan that is not the plan's own scenario.

    Values are compared key by key after defaults are filled in, so that comments and
    the order of keys do not matter, and the first difference is named.

    Args:
        path: of the file; nothing is refused where there is none.
        scenario: of the plan.
        option: that names the plan, for errors.

    Raises:
        InputError: if a value differs, or the file cannot be read.
    """
    if not path.exists():
        return
    written = load_scenario(path)
    for section, values in written.model_dump().items():
        planned_section = getattr(scenario, section)
        for name, value in values.items():
            planned_value = getattr(planned_section, name)
            if not _same_value(value, planned_value):
                requirement = f"the scenario of the plan: {section}.{name} has changed"
                raise InputError(option, str(path), requirement)


def _same_value(first: object, second: object) -> bool:
    """Return whether two values of a scenario's key are the same; "inf" is infinity."""
    infinite = ("inf", math.inf)
    return first == second or (first in infinite and second in infinite)


def _rebuild_inputs(
    document: PlanFile, *, key: jax.Array | None, view: Path, option: str
) -> Inputs:
    """Return posterior, link and privacy of a plan's scenario.

    Refused are files whose hash plan.json has and that have changed since, and
    scenarios whose whitening release cannot be made again, as its key is gone or it
    never had one.
    """
    scenario = validate(document.scenario, f"{option}: ")
    digests = file_digests(scenario, {*PUBLIC_FILES, *document.files})
    for name, digest in digests.items():
        if document.files.get(name) != digest:
            requirement = "the file that the plan was made with; it has changed since"
            raise InputError(f"{option}: {name}", str(view), requirement)
    has_release = scenario.posterior.preconditioner == "private-whiten"
    if key is None and scenario.sampler.seed == "secret" and has_release:
        raise InputError(
            f"{option}: sampler.seed",
            "secret",
            "a number with private-whiten: a secret key is deleted when its run ends, "
            "and the release with it",
        )
    if document.noise != "simulated" and has_release:
        raise InputError(
            f"{option}: noise",
            document.noise,
            "simulated with private-whiten: the release of this federation has noise "
            "that protects, with which it cannot be made again",
        )
    inputs = build(scenario, key)
    # The scenario in plan.json no longer shows what was settled when the plan was made,
    # such as burn_in = "auto", which is a number there.
    rebuilt_names = {item.name for item in inputs.not_covered}
    not_covered = list(inputs.not_covered)
    for item in document.not_covered:
        if item.name not in rebuilt_names:
            not_covered.append(item)
    return inputs._replace(not_covered=tuple(not_covered))


def _check_data(plan: Plan, inputs: Inputs, view: Path, option: str) -> None:
    """Refuse a plan for data of another shape, or with other constants.

    Constants may differ by 1e-9, as processors round differently.

    Args:
        plan: that was loaded.
        inputs: of its scenario.
        view: the path of its plan.json, for errors.
        option: that names the file, for errors.
    """
    posterior = inputs.posterior
    same_shape = (plan.devices, plan.dim) == (posterior.devices, posterior.dim)
    same_sizes = np.array_equal(plan.context.sizes, posterior.sizes)
    if not same_shape or not same_sizes:
        raise InputError(
            option,
            str(view),
            "a plan for data of the same numbers of devices, parameters and examples",
        )
    constants = {"mu": posterior.mu, "L": posterior.L}
    if posterior.curvature_is_loose:
        # With steps above 2/L, such a plan is made with a smaller L (`Curvature` in
        # `planning.build`).
        del constants["L"]
    for name, value in constants.items():
        planned = getattr(plan, name)
        if not math.isclose(planned, value, rel_tol=SAME - 1):
            key = f"{option}: constants.{name}"
            requirement = f"{float(value)!r}, as the data and the scenario give now"
            raise InputError(key, planned, requirement)


def _check_scenario_promise(
    plan: Plan, inputs: Inputs, *, policy: PowerPolicy, view: Path, option: str
) -> None:
    """Refuse a plan that does not keep the promise of its scenario.

    The scenario may have been edited together with its plan.json, so what protects
    devices is compared with the plan: the promise, the noise power, whether budgets are
    kept, the loss that is counted for the whitening release, and the sum of losses.

    Args:
        plan: that was loaded.
        inputs: of its scenario.
        policy: that of the scenario.
        view: the path of its plan.json, for errors.
        option: that names the file, for errors.
    """
    same_noise = plan.noise_power == inputs.link.noise_power
    agree_on_budgets = plan.enforced == policy.private
    forgets_release = np.any(plan.ledger < inputs.spent / SAME)
    overspends = False
    if plan.enforced and plan.clips:
        budget = plan.privacy.budget(plan.devices)
        overspends = bool(np.any(plan.spent + plan.ledger > budget * SAME))
    requirement = ""
    if not (same_noise and agree_on_budgets and _same_promise(plan, inputs)):
        requirement = (
            "a plan for the promise, the policy and the noise power of its scenario"
        )
    elif forgets_release:
        requirement = "a plan that counts what the release for whitening has spent"
    elif overspends:
        requirement = "a plan within every privacy budget"
    if requirement:
        raise InputError(option, str(view), requirement)


def _same_promise(plan: Plan, inputs: Inputs) -> bool:
    """Return whether a plan was made for the promise of its scenario."""
    promise = inputs.privacy
    planned = plan.privacy
    for name in ("accountant", "unit", "adjacency"):
        if getattr(promise, name) != getattr(planned, name):
            return False
    numbers = ["epsilon", "delta", "clip"]
    if promise.example_clip is not None:
        # Without one in the scenario, the planner may have chosen it.
        numbers.append("example_clip")
    for name in numbers:
        promised_values = _as_array(getattr(promise, name))
        planned_values = _as_array(getattr(planned, name))
        if not np.array_equal(promised_values, planned_values):
            return False
    return True


def _as_array(value: ArrayLike | None) -> Array:
    """Return one or several numbers of a promise as an array, empty for None."""
    return np.zeros(0) if value is None else np.asarray(value, dtype=float)


def _check_planned_again(plan: Plan, document: PlanFile, option: str) -> None:
    """Refuse a plan that is not the one which its plan.json describes.

    The plan was made again from the scenario in plan.json, as there is no plan.npz.
    Processors round differently, so its numbers may differ by 1e-9 from those of the
    file, and its digest is not compared. Otherwise the lists and constants are those
    that `read_plan_file` compares.

    Args:
        plan: that was made again.
        document: plan.json.
        option: that names the file, for errors.
    """
    constants = {name: plain(getattr(plan, name)) for name in VIEWED_CONSTANTS}
    constants["rounds"] = len(plan.rounds)
    for name, value in constants.items():
        written = getattr(document.constants, name)
        if not _is_close(value, written):
            key = f"{option}: constants.{name}"
            raise InputError(key, written, f"{value!r}, as its scenario gives")
    smallest_budget = plan.privacy.budget(plan.devices).min()
    budget = plain(float(smallest_budget))
    written_budget = document.privacy.budget
    if not _is_close(budget, written_budget):
        key = f"{option}: privacy.budget"
        requirement = f"{budget!r}, as its scenario gives"
        raise InputError(key, written_budget, requirement)
    for name in VIEWED_ROUNDS:
        planned_list = plain(getattr(plan, name))
        if not _is_close_list(planned_list, getattr(document, name)):
            raise InputError(
                f"{option}: {name}",
                "another list",
                "what the plan's own scenario gives; `wflmc plan --out DIR` writes a "
                "plan that is run as it is",
            )


def _is_close(first: float | None, second: float | None) -> bool:
    """Return whether two numbers are equal up to rounding, or both None."""
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=SAME - 1)


def _is_close_list(
    first: Sequence[float | None] | None, second: Sequence[float | None] | None
) -> bool:
    """Return whether two lists are equal up to rounding, or both None.

    None in a list stands for a number that is not defined, such as the threshold of a
    round of the schedule "unbiased".
    """
    if first is None or second is None:
        return first is second
    return len(first) == len(second) and all(map(_is_close, first, second))


@dataclass(frozen=True, eq=False)
class ExtendedPlan:
    """A plan with more rounds than before, and its scenario."""

    scenario: Scenario
    plan: Plan


def extend_plan(
    scenario: Scenario, inputs: Inputs, plan: Plan, *, more: int, spent: Array
) -> ExtendedPlan:
    """Return scenario and plan with more rounds, from what is left of every budget.

    The added rounds alone are planned, from where the last one left the chains, and
    joined with the plan as it is. None of them is burn-in, and their step size is that
    of the last round.

    Args:
        scenario: of the plan.
        inputs: of the scenario.
        plan: of the rounds that were run.
        more: number of rounds to add after the last.
        spent: by every device, [K], the plan's own rounds and all others in the ledger
            included. Less than what the plan itself counts is taken for that.

    Returns:
        The joined plan, whose `ledger` has what was spent outside of it, and the
        scenario with its number of samples and step sizes.

    Raises:
        InputError: nothing is left to spend.
    """
    spent_by_plan = plan.spent if plan.clips else np.zeros(plan.devices)
    before = np.maximum(plan.ledger, spent - spent_by_plan)
    spent_in_all = before + spent_by_plan
    if plan.enforced and plan.clips:
        budget = plan.privacy.budget(plan.devices)
        exhausted = np.flatnonzero(spent_in_all >= budget / SAME)
        if exhausted.size:
            device = exhausted[0]
            reason = f"here: nothing is left to spend of the budget of device {device}"
            raise conflict("--more", more, reason)
    added_values = {
        "sampler.step_schedule": "constant",
        "sampler.burn_in": 0,
        "sampler.samples": more,
        "sampler.step_size": float(plan.step_size[-1]),
    }
    added_scenario = with_values(scenario, added_values)
    request = plan_request(added_scenario, inputs, spent_in_all)
    start = plan.start + len(plan.rounds)
    sampler = replace(request.sampler, start=start, before=plan)
    request = replace(request, sampler=sampler)
    if plan.bound is not None:
        request = replace(request, initial_w2_sq=float(plan.bound[-1]))
    added = plan_from(inputs.posterior, request)
    joined = join_plans(plan, added)
    joined = replace(joined, context=replace(joined.context, ledger=before))
    joined = joined.with_notices(joined_notices(joined, [plan, added]))
    joined_values = {
        "sampler.step_schedule": "constant",
        "sampler.samples": scenario.sampler.samples + more,
        "sampler.step_size": _one_or_per_round(joined.step_size),
    }
    return ExtendedPlan(with_values(scenario, joined_values), joined)


def _one_or_per_round(steps: Array) -> float | list[float]:
    """Return step sizes as a scenario has them: one number, or one for every round."""
    if np.unique(steps).size == 1:
        return float(steps.flat[0])
    return [float(step) for step in steps]
