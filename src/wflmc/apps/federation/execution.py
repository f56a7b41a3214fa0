"""A federation in a run folder: begun once and for all, run, resumed and finished.

The folder `federation` in the run's own holds what the server and every device hold, and how far they have got; the
files of a finished run stand beside it, as those of `wflmc run` do.
"""

import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import numpy as np

from wflmc.apps.federation import flower_server
from wflmc.apps.federation.deployment import ADDRESS, Loopback, prepare
from wflmc.apps.federation.device import devices_in, open_device
from wflmc.apps.federation.job import Job, federated_plan, make_job, write_federation
from wflmc.apps.federation.messages import DEVICE, SERVER
from wflmc.apps.federation.server import (
    LEDGER,
    LOG,
    Notify,
    Server,
    open_server,
    read_log,
    run_in_process,
    trace_of,
)
from wflmc.evaluation import Evaluation, ExactLaw, evaluate, preload
from wflmc.planning import Plan
from wflmc.planning.notices import oracle_notice
from wflmc.posterior import Posterior
from wflmc.posterior.regression import Regression
from wflmc.privacy import ACCOUNTANTS, Ledger
from wflmc.runs.documents import (
    Document,
    PlanFile,
    plan_document,
    read_document,
    summary_document,
)
from wflmc.runs.folder import ledger_document, write_run
from wflmc.runs.planning import spent_before
from wflmc.sampling.execution import ProgressCallback
from wflmc.scenario import (
    THESE_DATA,
    Inputs,
    Scenario,
    build,
    data_notices,
    load_scenario,
    plain,
    to_json,
    to_toml,
    with_values,
)
from wflmc.support.errors import InputError, refuse
from wflmc.support.keys import secret_key
from wflmc.support.notices import Notice, NoticeCode, codes
from wflmc.support.progress import ProgressBar
from wflmc.support.storage import naming_file, write_text

Result = tuple[Scenario, dict[str, Any], Evaluation | None, list[Path]]
"""The scenario, the content of summary.json, the evaluation unless it was only prepared, and the files written."""

RUNTIMES = ("simulation", "process", "deployment")
STAND_IN = "data that stand in for the devices' own"
"""What a scenario's data are where devices bring their own, in the words of notices."""
WORDS = {
    "asked": "scenario",
    "real": "kind of devices (real or simulated)",
    "own_data": "source of data",
}
"""What two federations differ in, where about.json has another name for it."""
HOST_AND_PORT = r"(\[[^]]+\]|[^:]+):[0-9]{1,5}"

EMULATED = "The radio channel is emulated: epsilon does not hold against the server's process (--noise devices does)."
NO_PROTECTION = "The noise is simulated, from sampler.seed, and protects nobody; --noise channel draws one that does."
ONE_BY_ONE = "Each message is hidden by its own share of the noise alone: {} times the loss of the sum, as is counted."
LEFT = "Messages that came late or were rejected are not in this ledger, but in those of the devices that sent them."
SPARE = "For {} absences every device adds 1/{} of the noise: with all there, sums have up to {:.3g} times as much."
ABSENT = (
    "{} times a device was asked and did not send; {} of the plan, in which all do."
)


class AboutFile(TypedDict):
    """about.json: what makes two federations the same."""

    asked: str
    """The scenario, as TOML."""
    real: bool
    """Whether devices are real, or simulated on this machine."""
    chains: int
    ledger: str | None
    """The file to spend from; None: that of the run's folder."""
    noise: str
    tolerate: int
    own_data: bool
    address: str | None


class Account(TypedDict):
    """`federation` of summary.json: who sent, and what that cost by the ledger."""

    runtime: str
    noise: str
    tolerate: int
    releases: int
    own_data: bool
    asked: list[int]
    """Devices that were asked, by round."""
    sent: list[int]
    """Devices that sent, by round."""
    absences: int
    empty_rounds: int
    epsilon_spent: float | None
    adjacency: str


class FederationOptions(NamedTuple):
    """What the command was asked for."""

    scenario: str
    overrides: list[str] | None
    runtime: str
    given_noise: str | None
    tolerate: int
    chains: int | None
    deadline: float
    ledger: str | None
    prepare: bool
    own_data: bool
    address: str | None

    @property
    def noise(self) -> str:
        """Who adds the noise: simulated where this machine has all the data anyway."""
        return self.given_noise or ("channel" if self.prepare else "simulated")

    def check(self) -> None:
        """Refuse options that are wrong, or do not go together."""
        address = re.fullmatch(HOST_AND_PORT, self.address or ADDRESS)
        bare = self.prepare and self.noise == "simulated"
        refuse(
            (
                self.runtime not in RUNTIMES,
                "--runtime",
                self.runtime,
                f"one of {', '.join(RUNTIMES)}",
            ),
            (
                bare,
                "--noise",
                self.noise,
                "channel or devices with --prepare: simulated noise protects nobody",
            ),
            (
                self.chains is not None and not 0 < self.chains <= 10**7,
                "--chains",
                self.chains,
                "1 to 10,000,000",
            ),
            (
                not 0 < self.deadline < np.inf,
                "--deadline",
                self.deadline,
                "a number of seconds above 0",
            ),
            (
                not Path(self.ledger or ".").parent.is_dir(),
                "--ledger",
                self.ledger,
                "a file in a folder that is there",
            ),
            (
                self.address is not None and not self.prepare,
                "--address",
                self.address,
                "given with --prepare",
            ),
            (
                address is None,
                "--address",
                self.address,
                "host and port, such as 10.0.0.7:8000",
            ),
            (
                self.own_data and not self.prepare,
                "--own-data",
                True,
                "given with --prepare",
            ),
        )

    def identity(self, scenario: Scenario) -> AboutFile:
        """Return what makes two federations the same, as about.json has it."""
        chains = self.chains or (1 if self.prepare else scenario.sampler.chains)
        ledger = None if self.ledger is None else str(Path(self.ledger).resolve())
        return {
            "asked": to_toml(scenario),
            "real": self.prepare,
            "chains": chains,
            "ledger": ledger,
            "noise": self.noise,
            "tolerate": self.tolerate,
            "own_data": self.own_data,
            "address": self.address,
        }


def run_federation(
    options: FederationOptions, folder: Path, bar: ProgressBar, say: Notify
) -> Result:
    """Run what is asked for, from its plan to its files, or go on with it.

    Args:
        options: of the command, checked.
        folder: of the run, which no other process writes to.
        bar: shows progress.
        say: called with sentences for whoever waits.
    """
    place = folder / "federation"
    scenario = load_scenario(options.scenario, options.overrides)
    data_words = STAND_IN if options.own_data else THESE_DATA
    inputs = build(scenario, data_words=data_words)
    about = options.identity(scenario)
    if not isinstance(inputs.posterior, Regression) and (
        options.prepare or options.runtime != "process"
    ):
        given, why = (
            "--prepare" if options.prepare else options.runtime,
            "other processes do not have its functions",
        )
        raise InputError(
            "--runtime",
            given,
            f"process with a model of your own: {why}; see docs/guides/numpyro.md",
        )
    if place.exists():
        _refuse_other(folder, about)
    else:
        _begin(folder, scenario, inputs, options, about)
    job = Job.load(place / SERVER)
    if options.prepare and not (place / "COMMANDS.md").exists():
        prepare(place, job.plan.devices, options.address or ADDRESS, options.deadline)
    if job.plan.clips:
        _open_ledger(job.plan, inputs, folder, about)
    server = open_server(job, place / SERVER)
    done, rounds = server.checkpoint.load().rounds, len(job.plan.rounds)
    if 0 < done < rounds:
        say(f"Going on with the federation in {place} after {done} rounds.")
    if options.prepare and done < rounds:
        prepared = {
            "folder": str(place),
            "rounds": done,
            "warnings": list(job.plan.warnings),
            "warning_codes": list(codes(job.plan.notices)),
        }
        return scenario, prepared, None, []
    if done < rounds:
        with bar("rounds", rounds) as advance:
            _run(
                server,
                inputs.posterior,
                place,
                options,
                lambda now, _: advance(now),
                say,
            )
        server = open_server(
            job, place / SERVER
        )  # which another process may have charged
    return _finish(folder, scenario, inputs, server, options)


def _run(
    server: Server,
    posterior: Posterior,
    place: Path,
    options: FederationOptions,
    progress: ProgressCallback,
    say: Notify,
) -> None:
    """Run all rounds that are left."""
    devices, deadline = server.job.plan.devices, options.deadline
    if options.runtime == "process":
        parts = [
            None if isinstance(posterior, Regression) else posterior.device(k)
            for k in range(devices)
        ]
        folders = [place / DEVICE.format(k) for k in range(devices)]
        # A protocol says nothing of hashing; posteriors are hashed by identity.
        opened = [open_device(*pair) for pair in zip(folders, parts, strict=True)]  # type: ignore[arg-type]
        run_in_process(server, opened, progress)
    elif options.runtime == "simulation":
        flower_server.run_in_engine(
            server, devices_in(place), progress=progress, deadline=deadline
        )
    else:
        prepare(place, devices)
        with Loopback(place, say=say) as loopback:
            loopback.run(deadline, progress)


def _refuse_other(folder: Path, about: AboutFile) -> None:
    """Refuse any federation in the folder but the one that is asked for, for its ledgers' sake."""
    path = folder / "federation" / "about.json"
    if not path.exists():
        raise InputError(
            "--out",
            str(path.parent),
            "a folder in which nothing else is called federation",
        )
    before = read_document(path, Document, "--out").model_dump()
    other = [
        WORDS.get(name, name)
        for name, value in about.items()
        if before.get(name) != value
    ]
    if other:
        raise InputError(
            "--out",
            str(folder),
            f"another folder: the federation in it has another {other[0]}",
        )


def _begin(
    folder: Path,
    scenario: Scenario,
    inputs: Inputs,
    options: FederationOptions,
    about: AboutFile,
) -> None:
    """Plan a federation and write its folders, all of them or none."""
    began, part, ledger = (
        time.perf_counter(),
        folder / "federation.part",
        folder / "ledger.jsonl",
    )
    if (
        ledger.exists()
        and not options.prepare
        and about["ledger"] != str(ledger.resolve())
    ):
        raise InputError(
            "--out",
            str(folder),
            f"without the ledger of another run; --ledger {ledger} spends from it",
        )
    if options.own_data:  # data that stand in for others' are nobody's
        notices = (*inputs.notices, *data_notices(inputs.not_covered, STAND_IN))
        inputs = inputs._replace(not_covered=(), notices=notices)
    elif options.noise != "simulated":  # it cannot be drawn again
        beyond = (item for item in inputs.not_covered if item.name != "sampler.seed")
        inputs = inputs._replace(not_covered=tuple(beyond))
    job = _job(scenario, inputs, options, about["chains"])
    settled = with_values(
        scenario, {"sampler.burn_in": job.plan.burn_in, "sampler.chains": job.chains}
    )
    law = (
        ExactLaw(None, None) if options.own_data else None
    )  # that of a stand-in is nobody's
    document = plan_document(
        settled, inputs, received_plan(job), time.perf_counter() - began, law
    )
    document["noise"] = options.noise
    document["own_data"] = options.own_data
    if job.plan.clips:
        document["privacy"] |= _costs(job)
    shutil.rmtree(part, ignore_errors=True)  # of a command that was stopped
    with naming_file(part):
        write_federation(part, scenario, inputs, job, with_data=not options.own_data)
    if not options.prepare:
        write_text(part / SERVER / LEDGER, about["ledger"] or "../../ledger.jsonl")
    write_text(part / "plan.json", to_json(document))
    write_text(part / "about.json", to_json(about))
    part.rename(folder / "federation")


def _job(
    scenario: Scenario, inputs: Inputs, options: FederationOptions, chains: int
) -> Job:
    """Plan the rounds; real devices get a key that nobody knows, as anybody may know the scenario's seed."""
    seed = scenario.sampler.seed
    if seed == "secret" and not options.prepare:
        raise InputError(
            "sampler.seed",
            seed,
            "a number: it seeds where chains start; --noise channel is secret",
        )
    releases = chains if options.prepare else 1
    plan = federated_plan(
        scenario,
        inputs,
        noise=options.noise,
        tolerate=options.tolerate,
        releases=releases,
        paid=spent_before(options.ledger, inputs),
    )
    if options.own_data:
        plan = plan.with_notices(_about_stand_in(plan.notices))
    key = secret_key() if options.prepare else jax.random.key(int(seed))
    return make_job(
        key,
        inputs.posterior,
        inputs.link,
        plan,
        chains=chains,
        noise=options.noise,
        tolerate=options.tolerate,
        releases=releases,
    )


def _about_stand_in(notices: Iterable[Notice]) -> Iterator[Notice]:
    """Yield the notices of a plan whose data stand in for those of the devices."""
    for notice in notices:
        if notice.code == NoticeCode.ORACLE:
            yield oracle_notice(STAND_IN)
        else:
            yield notice


def _open_ledger(plan: Plan, inputs: Inputs, folder: Path, about: AboutFile) -> None:
    """Begin or open the ledger of a federation, with what was spent before its first round.

    That of a real one names nobody: its server may not try whose data these are.
    """
    real, release = about["real"], inputs.release
    path = (
        folder / "federation" / SERVER / "ledger.jsonl"
        if real
        else about["ledger"] or folder / "ledger.jsonl"
    )
    subject = "" if real else inputs.posterior.digest
    ledger = Ledger(
        plan.privacy, plan.devices, subject=subject, enforced=plan.enforced, path=path
    )
    if real and plan.ledger.any():
        ledger.charge("before", 0, plan.ledger[None])
    elif not real and release is not None:
        ledger.charge(release.name, 0, release.loss, release.noise)


def received_plan(job: Job) -> Plan:
    """Return the plan with all the noise that the sums have when nobody is absent.

    Where devices tolerate absences they add more than the plan's N0 together. What of it the server does not leave out
    of its own noise counts here as the server's.
    """
    plan = job.plan
    if not job.tolerate:
        return plan
    noise = np.array(
        [job.round_noise(at, plan.weight[at] > 0) for at in range(len(plan.rounds))]
    )
    variance = noise * (plan.kick * plan.scale / plan.gain) ** 2
    excess = np.maximum(0.0, variance - plan.noise_variance)
    return plan.with_rounds(server_noise=plan.server_noise + excess)


def _costs(job: Job) -> dict[str, object]:
    """Return `privacy` of plan.json, for what this transport and all chains that are given away cost."""
    promise, spent = job.plan.privacy, job.planned_loss.sum(0)
    total = spent + job.plan.ledger
    costs: dict[str, object] = {
        "spent": spent,
        "spent_max": spent.max(),
        "epsilon_each": promise.epsilons_spent(total),
    }
    if promise.delta is not None:
        costs["epsilon_by"] = {
            name: promise.epsilon_spent(total, name) for name in ACCOUNTANTS
        }
    return dict(plain({**costs, "epsilon_spent": promise.epsilon_spent(total)}))


def _finish(
    folder: Path,
    scenario: Scenario,
    inputs: Inputs,
    server: Server,
    options: FederationOptions,
) -> Result:
    """Evaluate the samples and write the files of a run.

    Where devices brought their own data, the posterior of the scenario is that of a
    stand-in: samples are not compared with it. The seconds are those of all rounds,
    whichever command or process has run them.
    """
    job, ledger = server.job, server.ledger
    preload(draws=len(job.plan.rounds) - job.plan.burn_in)
    document = read_document(
        folder / "federation" / "plan.json", PlanFile, "--out"
    ).model_dump(exclude_unset=True)
    plan, known = received_plan(job), not options.own_data
    trace = replace(trace_of(server, inputs.posterior), plans=(plan,))
    trace = trace if scenario.sampler.transcript else replace(trace, transcript=None)
    evaluation = evaluate(
        trace, inputs.posterior if known else None, inputs.test if known else None
    )
    about = _account(
        server, "deployment" if options.prepare else options.runtime, options.own_data
    )
    summary = summary_document(
        evaluation,
        document,
        notices=(*plan.notices, *_notices(job, about["absences"], options.own_data)),
        ledger=ledger_document(ledger, folder),
        seconds=sum(row["seconds"] for row in read_log(server.folder)),
    )
    summary["epsilon_spent"] = about["epsilon_spent"]
    summary["federation"] = about
    shutil.copyfile(server.folder / LOG, folder / LOG)
    settled = with_values(
        scenario, {"sampler.burn_in": plan.burn_in, "sampler.chains": job.chains}
    )
    files = write_run(
        folder,
        scenario=settled,
        trace=trace,
        plan=plan,
        plan_document=document,
        summary=summary,
        ledger=None if ledger is None else ledger.path,
    )
    return scenario, summary, evaluation, [*files, folder / LOG]


def _account(server: Server, runtime: str, own_data: bool) -> Account:
    """Return `federation` of summary.json: who sent, and what that cost by the ledger."""
    job, rows, ledger = server.job, read_log(server.folder), server.ledger
    return {
        "runtime": runtime,
        "noise": job.noise,
        "tolerate": job.tolerate,
        "releases": job.releases,
        "own_data": own_data,
        "asked": [row["asked"] for row in rows],
        "sent": [row["sent"] for row in rows],
        "absences": sum(len(row["absent"]) for row in rows),
        "empty_rounds": sum(row["sent"] == 0 for row in rows),
        "epsilon_spent": None
        if ledger is None
        else plain(job.plan.privacy.epsilon_spent(ledger.spent)),
        "adjacency": job.plan.privacy.adjacency,
    }


def _notices(job: Job, absences: int, own_data: bool) -> Iterator[Notice]:
    """Yield what the numbers of a federation rest on.

    Args:
        job: what was run.
        absences: how often a device was asked and did not send.
        own_data: whether devices brought their own data, for which no law is known.
    """
    planned = "the bound is that" if own_data else "bound and exact law are those"
    if job.noise == "devices":
        yield Notice(NoticeCode.DEVICE_NOISE, ONE_BY_ONE.format(int(job.quorum.max())))
        if absences:
            yield Notice(NoticeCode.LATE_MESSAGES, LEFT)
    else:
        yield Notice(NoticeCode.EMULATED_CHANNEL, EMULATED)
        if job.lattice is None:
            yield Notice(NoticeCode.NO_PROTECTION, NO_PROTECTION)
    if job.tolerate:
        excess = float(np.max(job.plan.active_devices / job.quorum))
        text = SPARE.format(job.tolerate, int(job.quorum.min()), excess)
        yield Notice(NoticeCode.SPARE_NOISE, text)
    if absences:
        yield Notice(NoticeCode.ABSENT_DEVICES, ABSENT.format(absences, planned))
