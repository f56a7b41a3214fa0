"""How a federation is begun in a folder, once and for all, and found there again."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from wflmc.errors import InputError
from wflmc.keys import secret_key
from wflmc.privacy import ACCOUNTANTS, Ledger
from wflmc.runs import plan_document
from wflmc.runs.execution import spent_before
from wflmc.scenario import Inputs, Scenario, to_json, to_toml
from wflmc.scenario.coverage import PRIVATE
from wflmc.storage import naming_file, write_text

if TYPE_CHECKING:
    from wflmc.federated.job import Job
    from wflmc.planning import Plan

STAND_IN = "data that stand in for the devices' own"
UNFINISHED = "unfinished"
"""In a federation that has not been written whole."""


class Request(NamedTuple):
    """What the command was asked for."""

    scenario: str
    out: str
    overrides: list[str] | None
    runtime: str
    given_noise: str | None
    tolerate: int
    chains: int | None
    deadline: float
    ledger: str | None
    prepare: bool
    own_data: bool
    address: str | None = None

    @property
    def noise(self) -> str:
        """Who adds the noise: simulated where this machine has all the data anyway."""
        return self.given_noise or ("channel" if self.prepare else "simulated")


def about_of(scenario: Scenario, request: Request) -> dict[str, Any]:
    """What makes two federations the same."""
    return {
        "asked": to_toml(scenario),
        "real": request.prepare,
        "noise": request.noise,
        "tolerate": request.tolerate,
        "chains": request.chains or (1 if request.prepare else scenario.sampler.chains),
        "own_data": request.own_data,
        "address": request.address,
        "ledger": None if request.ledger is None else str(Path(request.ledger).resolve()),
    }


def begun(folder: Path, scenario: Scenario, request: Request) -> tuple[Job, dict[str, Any]] | None:
    """The federation that the folder holds; another one than is asked for is refused, for its ledgers' sake."""
    from wflmc.federated.job import Job

    file = folder / "federation" / "about.json"
    if not file.exists() or (file.parent / UNFINISHED).exists():
        return None
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        document = json.loads((folder / "federation" / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError("--out", str(file), "as wflmc wrote it") from None
    wanted = about_of(scenario, request)
    other = [name for name, value in wanted.items() if about.get(name) != value]
    if other:
        words = {
            "asked": "scenario",
            "real": "kind of devices (real or simulated)",
            "chains": "number of chains",
            "own_data": "source of data",
        }
        what = words.get(other[0], other[0])
        allowed = f"another folder: it holds a federation with another {what}, whose ledgers are to be kept"
        raise InputError("--out", str(folder), allowed)
    return Job.load(folder / "federation" / "server"), document


def begin(
    folder: Path, scenario: Scenario, inputs: Inputs, request: Request, began: float
) -> tuple[Job, dict[str, Any]]:
    """Plan a federation and write its folders: its job, and the plan as JSON document."""
    from wflmc.federated.folder import write_federation
    from wflmc.federated.job import federated_plan, make_job
    from wflmc.federated.server import LEDGER

    about = about_of(scenario, request)
    _refuse_folder(folder, about)
    simulated = None if about["real"] else scenario.sampler.seed
    if simulated == "secret":
        allowed = "a number: it seeds where chains start. Noise by --noise channel or devices is secret without it"
        raise InputError("sampler.seed", "secret", allowed)
    if request.noise != "simulated":  # it cannot be drawn again; and data that stand in for others' are nobody's
        beyond = () if request.own_data else (item for item in inputs.not_covered if item.name != "sampler.seed")
        inputs = inputs._replace(not_covered=tuple(beyond))
    releases = about["chains"] if about["real"] else 1
    how: dict[str, Any] = {"noise": request.noise, "tolerate": request.tolerate}
    spent = None if request.ledger is None else spent_before(request.ledger, inputs)
    plan = federated_plan(scenario, inputs, **how, releases=releases, ledger=spent)
    if request.own_data:
        plan = replace(plan, warnings=tuple(warning.replace(PRIVATE, STAND_IN) for warning in plan.warnings))
    job = make_job(
        secret_key() if simulated is None else jax.random.key(simulated),  # anybody may know the scenario's seed
        inputs.posterior,
        inputs.link,
        plan,
        chains=about["chains"],
        **how,
        releases=releases,
    )
    settled = scenario.sampler.model_copy(update={"burn_in": plan.burn_in})
    document = plan_document(
        scenario.model_copy(update={"sampler": settled}), inputs, as_heard(job), time.perf_counter() - began
    )
    document["noise"] = request.noise
    if plan.clips:
        document["privacy"] |= _costs(job)
    place = folder / "federation"
    if (place / UNFINISHED).exists():
        shutil.rmtree(place)
    place.mkdir()
    write_text(place / UNFINISHED, "")
    with naming_file(place):
        write_federation(place, scenario, inputs, job, with_data=not request.own_data)
        if about["real"]:
            from wflmc.federated.deployment import prepare

            where = {} if request.address is None else {"address": request.address}
            prepare(place, job.plan.devices, deadline=request.deadline, **where)
            path = place / "server" / "ledger.jsonl"  # of its own, which names nobody: the server may not try data
        else:
            write_text(place / "server" / LEDGER, about["ledger"] or "../../ledger.jsonl")
            path = Path(about["ledger"] or folder / "ledger.jsonl")
        if plan.clips:
            _pay(plan, inputs, path, about["real"])
    write_text(place / "plan.json", to_json(document))
    write_text(place / "about.json", to_json(about))
    (place / UNFINISHED).unlink()
    return job, document


def _pay(plan: Plan, inputs: Inputs, path: Path, real: bool) -> None:
    """Begin or open the ledger of a federation, with what was spent before its first round."""
    subject = "" if real else inputs.posterior.digest
    ledger = Ledger(plan.privacy, plan.devices, subject=subject, enforced=plan.enforced, path=path)
    if real and plan.ledger.any():
        ledger.charge("before", 0, plan.ledger[None])
    elif not real and inputs.release is not None:
        ledger.charge(inputs.release.name, 0, inputs.release.loss, inputs.release.noise)


def as_heard(job: Job) -> Plan:
    """The plan with all the noise that the sums have when nobody is absent.

    Where devices tolerate absences they add more than the plan's N0 together. What of it the server does not leave out
    of its own noise counts here as the server's.
    """
    plan = job.plan
    if not job.tolerate:
        return plan
    sums = np.array([job.round_noise(at, plan.weight[at] > 0) for at in range(plan.rounds)])
    there = sums * (plan.kick * plan.scale / plan.gain) ** 2
    return replace(plan, server_noise=plan.server_noise + np.maximum(0.0, there - plan.noise_variance))


def _costs(job: Job) -> dict[str, Any]:
    """`privacy` of plan.json, for what this transport and all chains that are given away cost."""
    promise, spent = job.plan.privacy, job.planned_loss().sum(0)
    total = spent + job.plan.ledger
    each = promise.epsilons_spent(total)
    if each is None:
        return {"spent": spent.tolist(), "spent_max": float(spent.max())}
    return {
        "spent": spent.tolist(),
        "spent_max": float(spent.max()),
        "epsilon_spent": float(each.max()),
        "epsilon_each": each.tolist(),
        "epsilon_by": {name: promise.epsilon_spent(total, name) for name in ACCOUNTANTS},
    }


def _refuse_folder(folder: Path, about: dict[str, Any]) -> None:
    """Leave alone what others have written, and ledgers above all."""
    place, ledger = folder / "federation", folder / "ledger.jsonl"
    if place.exists() and not (place / UNFINISHED).exists():
        raise InputError("--out", str(place), "a folder in which nothing else is called federation")
    begun = (place / UNFINISHED).exists()  # by a command that was stopped, with its ledger
    if ledger.exists() and not begun and not about["real"] and about["ledger"] != str(ledger.resolve()):
        allowed = f"a folder without the ledger of another run; --ledger {ledger} spends from that one"
        raise InputError("--out", str(folder), allowed)
