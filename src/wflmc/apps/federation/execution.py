"""A federation in a run folder: begun once and for all, run, resumed and finished.

The folder `federation` in the run's own holds what the server and every device hold,
and their progress. The files of a finished run stand beside it, as those of `wflmc run`
do.
"""

import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypedDict

import jax
import numpy as np

from wflmc.apps.federation import flower_server
from wflmc.apps.federation.deployment import (
    COMMANDS_FILE,
    DEFAULT_ADDRESS,
    Loopback,
    prepare,
)
from wflmc.apps.federation.device import devices_in, open_device
from wflmc.apps.federation.job import Job, federated_plan, make_job, write_federation
from wflmc.apps.federation.messages import DEVICE, MAX_CHAINS, SERVER
from wflmc.apps.federation.server import (
    LEDGER,
    LOG,
    OWN_LEDGER,
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
from wflmc.privacy.whitening import Release
from wflmc.runs.documents import (
    Document,
    JsonObject,
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
from wflmc.support.errors import InputError
from wflmc.support.keys import secret_key
from wflmc.support.notices import Notice, NoticeCode, codes
from wflmc.support.progress import ProgressBar
from wflmc.support.storage import naming_file, write_text

RUNTIMES = ("simulation", "process", "deployment")
"""Where devices run: in Flower's engine, in this process, or in processes here."""
FEDERATION = "federation"
"""In a run folder: the folders of the server and of all devices."""
ABOUT_FILE = "about.json"
"""In the folder of a federation: what identifies it, as `AboutFile`."""
PLAN_DOCUMENT = "plan.json"
"""In the folder of a federation: its plan, copied to the run folder at the end."""
RELEASE_FILE = "release.npz"
"""In the folder of a federation: the release that whitens, where its noise protects."""
STAND_IN = "data that stand in for the devices' own"
"""What a scenario's data are where devices bring their own, in the words of notices."""
DIFFERENCES = {
    "asked": "scenario",
    "real": "kind of devices (real or simulated)",
    "own_data": "source of data",
}
"""What two federations differ in, where about.json has another name for it."""
HOST_AND_PORT = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
"""A host name, an IPv4 address or an IPv6 address in brackets, and a port. Names are
ASCII, as certificates need them."""
MAX_PORT = 65535
"""The largest number of a port."""
UNKNOWN_LAW = ExactLaw(None, None)
"""The law of the chains where the devices' data are not known here."""

EMULATED = (
    "The radio channel is emulated: epsilon does not hold against the server's process "
    "(--noise devices does)."
)
NO_PROTECTION = (
    "The noise is simulated, from sampler.seed, and protects nobody; --noise channel "
    "draws one that does."
)
ONE_BY_ONE = (
    "Each message is hidden by its own part of the noise alone, which costs {} times "
    "the loss of the sum. The ledger counts it."
)
LATE_MESSAGES = (
    "Messages that came late or were rejected are not in this ledger, but in those of "
    "the devices that sent them."
)
SPARE_NOISE = (
    "To tolerate {} absences, every device adds 1/{} of the noise: if all transmit, a "
    "sum has up to {:.3g} times the noise that was planned."
)
ABSENCES = (
    "Absences of scheduled devices: {}. {} of the plan, in which all of them transmit."
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
    """How many devices each round counted on, see `RoundLog`."""
    sent: list[int]
    """How many devices sent, by round."""
    absences: int
    empty_rounds: int
    epsilon_spent: float | None
    adjacency: str


class FederationResult(NamedTuple):
    """What `run_federation` has brought about."""

    scenario: Scenario
    summary: JsonObject
    """The content of summary.json; of a preparation, its folder and its warnings."""
    evaluation: Evaluation | None
    """Of the samples; None where the federation was only prepared."""
    files: list[Path]
    """Those that were written into the run folder."""


class FederationOptions(NamedTuple):
    """The options of the command `wflmc federate`."""

    scenario: str
    """The path of the scenario."""
    overrides: list[str] | None
    """Of --set, as KEY=VALUE."""
    runtime: str
    requested_noise: str | None
    """Who adds the noise; None for the default, see `noise`."""
    tolerate: int
    chains: int | None
    """None for the scenario's, or 1 where devices are real."""
    deadline: float
    """Seconds that a round waits for its devices."""
    ledger: str | None
    """The file to spend from; None for one in the run folder."""
    prepare: bool
    """Whether devices are real: folders and commands are written, and nothing is
    run."""
    own_data: bool
    """Whether real devices bring their own data."""
    address: str | None
    """Host and port of the server for real devices; None for the default."""

    @property
    def noise(self) -> str:
        """Return who adds the noise, as requested or by default.

        The default is "channel" where devices are real. It is "simulated", which
        protects nobody, where this machine has the data of all devices anyway. Then the
        chains are those of `wflmc run`.
        """
        if self.requested_noise:
            return self.requested_noise
        return "channel" if self.prepare else "simulated"

    def check(self) -> None:
        """Refuse options that are wrong, or do not go together.

        The scenario is not read for it. Whether the noise fits the policy, and whether
        so many absences can be tolerated, is checked with the plan, by `make_job`.

        Raises:
            InputError: names the option, and says what is allowed.
        """
        self._check_run()
        self._check_preparation()

    def _check_run(self) -> None:
        """Refuse wrong options of any federation."""
        if self.runtime not in RUNTIMES:
            expected = f"one of {', '.join(RUNTIMES)}"
            raise InputError("--runtime", self.runtime, expected)
        if self.prepare and self.noise == "simulated":
            expected = (
                "channel or devices with --prepare: simulated noise protects nobody"
            )
            raise InputError("--noise", self.noise, expected)
        if self.chains is not None and not 0 < self.chains <= MAX_CHAINS:
            raise InputError("--chains", self.chains, f"1 to {MAX_CHAINS:,}")
        if not 0 < self.deadline < np.inf:
            raise InputError("--deadline", self.deadline, "a number of seconds above 0")
        if self.ledger and not Path(self.ledger).parent.is_dir():
            expected = "a file in a folder that exists"
            raise InputError("--ledger", self.ledger, expected)

    def _check_preparation(self) -> None:
        """Refuse options of real devices that are wrong, or given for others."""
        expected = "given with --prepare"
        if self.address is not None and not self.prepare:
            raise InputError("--address", self.address, expected)
        address = re.fullmatch(HOST_AND_PORT, self.address or DEFAULT_ADDRESS)
        if address is None or not 0 < int(address["port"]) <= MAX_PORT:
            example = "host and port, such as 10.0.0.7:8000"
            raise InputError("--address", self.address, example)
        if self.own_data and not self.prepare:
            raise InputError("--own-data", True, expected)

    def identity(self, scenario: Scenario) -> AboutFile:
        """Return what makes two federations the same, as about.json has it.

        Only the same federation is resumed in a folder. The runtime and the deadline
        are not part of it: they may differ from one part of a run to the next.

        Args:
            scenario: that the options name, with its overrides.

        Returns:
            The content of about.json, with the defaults filled in.
        """
        chains = self.chains
        if not chains:
            chains = 1 if self.prepare else scenario.sampler.chains
        ledger = None
        if self.ledger is not None:
            ledger = str(Path(self.ledger).resolve())
        return AboutFile(
            asked=to_toml(scenario),
            real=self.prepare,
            chains=chains,
            ledger=ledger,
            noise=self.noise,
            tolerate=self.tolerate,
            own_data=self.own_data,
            address=self.address,
        )


def run_federation(
    options: FederationOptions,
    folder: Path,
    bar: ProgressBar,
    notify: Notify,
) -> FederationResult:
    """Run a federation from its plan to its files, or resume it.

    The first call plans the federation and writes its folders. Real devices are only
    prepared; when all their rounds have been run, the same call writes the files of the
    run. With simulated devices all rounds that are left are run at once.

    Args:
        options: of the command, checked.
        folder: of the run, which no other process writes to.
        bar: shows progress.
        notify: called with sentences for a person who waits.

    Returns:
        The summary, the evaluation and the files.

    Raises:
        InputError: the options do not fit the scenario, or the federation in the folder
            is another one.
        OverspendError: the plan would spend more than is left of a budget.
        DeploymentError: the rounds could not be run to the end.
    """
    scenario = load_scenario(options.scenario, options.overrides)
    identity = options.identity(scenario)
    federation = folder / FEDERATION
    has_begun = federation.exists()
    if has_begun:
        _refuse_other(folder, identity)
    inputs = _build_inputs(scenario, options, federation if has_begun else None)
    _check_custom_model(inputs.posterior, options)
    if not has_begun:
        _begin(folder, scenario, inputs, options, identity=identity)
    server = _open(folder, inputs, options, identity)
    plan = server.job.plan
    finished_rounds = server.checkpoint.load().rounds
    rounds = len(plan.rounds)
    if 0 < finished_rounds < rounds:
        notify(
            f"Going on with the federation in {federation} "
            f"after {finished_rounds} rounds."
        )
    if finished_rounds < rounds:
        if options.prepare:
            summary = _preparation_summary(federation, plan, finished_rounds)
            return FederationResult(scenario, summary, None, [])
        with bar("rounds", rounds) as advance:

            def show_progress(finished: int, _: int) -> None:
                advance(finished)

            _run(
                server, inputs.posterior, options, progress=show_progress, notify=notify
            )
        # The ledger is read again: another process may have charged it.
        server = open_server(server.job, server.folder)
    return _finish(folder, scenario, inputs, server, options=options)


def _build_inputs(
    scenario: Scenario, options: FederationOptions, federation: Path | None
) -> Inputs:
    """Return what the federation is planned from, with the release that whitens.

    Devices hold the matrix of the release, so that its noise protects where that of the
    rounds does. Such noise cannot be drawn again: the release is made once, stored by
    `_begin`, and read ever after, also by a server that was restarted.

    Args:
        scenario: what is planned.
        options: of the command.
        federation: the folder of one that has begun; None before.
    """
    data_words = STAND_IN if options.own_data else THESE_DATA
    preconditioner = scenario.posterior.preconditioner
    if preconditioner != "private-whiten" or options.noise == "simulated":
        return build(scenario, data_words=data_words)
    if options.own_data:
        expected = "none or whiten with --own-data: devices would pay for other data"
        raise InputError("posterior.preconditioner", preconditioner, expected)
    release = None
    if federation is not None:
        release = Release.load(federation / RELEASE_FILE)
    return build(scenario, data_words=data_words, exact=True, release=release)


def _check_custom_model(posterior: Posterior, options: FederationOptions) -> None:
    """Refuse to run a custom model in other processes, which lack its functions."""
    in_process = not options.prepare and options.runtime == "process"
    if isinstance(posterior, Regression) or in_process:
        return
    option = "--prepare" if options.prepare else options.runtime
    expected = (
        "process with a custom model: other processes do not have its functions; "
        "see docs/guides/numpyro.md"
    )
    raise InputError("--runtime", option, expected)


def _open(
    folder: Path,
    inputs: Inputs,
    options: FederationOptions,
    identity: AboutFile,
) -> Server:
    """Open the server of the federation in a run folder, with its ledger.

    What a call that was stopped has not written yet is written now: the files of real
    devices' machines, and what the ledger has to hold before the first round.
    """
    federation = folder / FEDERATION
    job = Job.load(federation / SERVER)
    if options.prepare and not (federation / COMMANDS_FILE).exists():
        address = options.address or DEFAULT_ADDRESS
        prepare(federation, job.plan.devices, address, options.deadline)
    if job.plan.clips:
        _open_ledger(job.plan, inputs, folder, identity)
    return open_server(job, federation / SERVER)


def _preparation_summary(federation: Path, plan: Plan, rounds: int) -> JsonObject:
    """Return the summary of a federation whose rounds are run elsewhere."""
    return {
        "folder": str(federation),
        "rounds": rounds,
        "warnings": list(plan.warnings),
        "warning_codes": list(codes(plan.notices)),
    }


def _run(
    server: Server,
    posterior: Posterior,
    options: FederationOptions,
    *,
    progress: ProgressCallback,
    notify: Notify,
) -> None:
    """Run all rounds that are left, in the runtime of the options."""
    federation = server.folder.parent
    devices = server.job.plan.devices
    if options.runtime == "process":
        _run_in_process(server, posterior, progress)
    elif options.runtime == "simulation":
        flower_server.run_in_engine(
            server,
            devices_in(federation),
            progress=progress,
            deadline=options.deadline,
        )
    else:
        prepare(federation, devices)
        with Loopback(federation, notify=notify) as loopback:
            loopback.run(options.deadline, progress)


def _run_in_process(
    server: Server,
    posterior: Posterior,
    progress: ProgressCallback,
) -> None:
    """Open all devices in this process, and run all rounds that are left."""
    devices = []
    for device in range(server.job.plan.devices):
        folder = server.folder.parent / DEVICE.format(device)
        if isinstance(posterior, Regression):
            devices.append(open_device(folder))
        else:
            part = posterior.device(device)
            # The protocol does not promise a hash; posteriors are hashed by identity.
            devices.append(open_device(folder, part))  # type: ignore[arg-type]
    run_in_process(server, devices, progress)


def _refuse_other(folder: Path, identity: AboutFile) -> None:
    """Refuse to continue another federation than that in the folder.

    Its ledgers count what that federation has spent.
    """
    path = folder / FEDERATION / ABOUT_FILE
    if not path.exists():
        expected = "a folder in which nothing else is called federation"
        raise InputError("--out", str(path.parent), expected)
    stored = read_document(path, Document, "--out").model_dump()
    for name, value in identity.items():
        if stored.get(name) != value:
            difference = DIFFERENCES.get(name, name)
            expected = f"another folder: the federation in it has another {difference}"
            raise InputError("--out", str(folder), expected)


def _begin(
    folder: Path,
    scenario: Scenario,
    inputs: Inputs,
    options: FederationOptions,
    *,
    identity: AboutFile,
) -> None:
    """Plan a federation and write its folders, all of them or none."""
    start_seconds = time.perf_counter()
    _refuse_ledger_of_another_run(folder, identity)
    inputs = _with_coverage(inputs, options)
    job = _make_job(scenario, inputs, options, identity["chains"])
    seconds = time.perf_counter() - start_seconds
    document = _plan_document(scenario, inputs, job, options, seconds=seconds)
    part = folder / "federation.part"
    # A command that was stopped may have left it.
    shutil.rmtree(part, ignore_errors=True)
    with naming_file(part):
        write_federation(part, scenario, inputs, job, with_data=not options.own_data)
    if not options.prepare:
        ledger_path = identity["ledger"] or f"../../{OWN_LEDGER}"
        write_text(part / SERVER / LEDGER, ledger_path)
    if inputs.release is not None and options.noise != "simulated":
        inputs.release.save(part / RELEASE_FILE)
    write_text(part / PLAN_DOCUMENT, to_json(document))
    write_text(part / ABOUT_FILE, to_json(identity))
    part.rename(folder / FEDERATION)


def _refuse_ledger_of_another_run(folder: Path, identity: AboutFile) -> None:
    """Refuse a run folder whose ledger is there, but not the one to spend from."""
    ledger = folder / OWN_LEDGER
    if identity["real"] or not ledger.exists():
        return
    if identity["ledger"] != str(ledger.resolve()):
        expected = (
            f"without the ledger of another run; --ledger {ledger} spends from it"
        )
        raise InputError("--out", str(folder), expected)


def _with_coverage(inputs: Inputs, options: FederationOptions) -> Inputs:
    """Return the inputs with what ε does not cover in a federation.

    Data that stand in for the devices' own are nobody's. A seed is not covered where it
    draws the noise, which only a simulation does: otherwise that of the rounds and of
    the release that whitens comes from the operating system's entropy.
    """
    if options.own_data:
        stand_in_notices = data_notices(inputs.not_covered, STAND_IN)
        notices = (*inputs.notices, *stand_in_notices)
        return inputs._replace(not_covered=(), notices=notices)
    if options.noise == "simulated":
        return inputs
    items = (item for item in inputs.not_covered if item.name != "sampler.seed")
    return inputs._replace(not_covered=tuple(items))


def _plan_document(
    scenario: Scenario,
    inputs: Inputs,
    job: Job,
    options: FederationOptions,
    *,
    seconds: float,
) -> JsonObject:
    """Return the content of plan.json, with the noise and the costs of a federation."""
    document = plan_document(
        _settled(scenario, job),
        inputs,
        received_plan(job),
        seconds,
        law=UNKNOWN_LAW if options.own_data else None,
    )
    document["noise"] = options.noise
    document["own_data"] = options.own_data
    if job.plan.clips:
        document["privacy"] |= _costs(job)
    return document


def _settled(scenario: Scenario, job: Job) -> Scenario:
    """Return the scenario with the rounds of burn-in and the chains that are run."""
    values = {"sampler.burn_in": job.plan.burn_in, "sampler.chains": job.chains}
    return with_values(scenario, values)


def _make_job(
    scenario: Scenario,
    inputs: Inputs,
    options: FederationOptions,
    chains: int,
) -> Job:
    """Plan the rounds and make the job.

    Real devices get a key that nobody knows: the scenario's seed may be public.
    """
    seed = scenario.sampler.seed
    if seed == "secret" and not options.prepare:
        expected = "a number: it seeds where chains start; --noise channel is secret"
        raise InputError("sampler.seed", seed, expected)
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
        plan = plan.with_notices(_stand_in_notices(plan.notices))
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


def _stand_in_notices(notices: Iterable[Notice]) -> Iterator[Notice]:
    """Yield the notices of a plan whose data stand in for those of the devices."""
    for notice in notices:
        if notice.code == NoticeCode.ORACLE:
            yield oracle_notice(STAND_IN)
        else:
            yield notice


def _open_ledger(
    plan: Plan,
    inputs: Inputs,
    folder: Path,
    identity: AboutFile,
) -> None:
    """Begin or open the ledger of a federation, and charge what was spent before it.

    With real devices it does not name the data: otherwise its server could test whose
    data these are.
    """
    if identity["real"]:
        ledger = Ledger(
            plan.privacy,
            plan.devices,
            subject="",
            enforced=plan.enforced,
            path=folder / FEDERATION / SERVER / OWN_LEDGER,
        )
        if plan.ledger.any():
            ledger.charge("before", 0, plan.ledger[None])
        return
    ledger = Ledger(
        plan.privacy,
        plan.devices,
        subject=inputs.posterior.digest,
        enforced=plan.enforced,
        path=identity["ledger"] or folder / OWN_LEDGER,
    )
    release = inputs.release
    if release is not None:
        ledger.charge(
            run=release.name, first=0, losses=release.loss, noise=release.noise
        )


def received_plan(job: Job) -> Plan:
    """Return the plan with all the noise that the sums have when nobody is absent.

    Where devices tolerate absences they add more than the plan's N0 together. The
    server adds less of its own noise in return; what still exceeds the planned variance
    counts here as the server's.

    Args:
        job: of the plan.

    Returns:
        The plan with a larger `server_noise`; the same plan where no absences are
        tolerated.
    """
    plan = job.plan
    if not job.tolerate:
        return plan
    received_noise = np.array(
        [
            job.round_noise(round_index, plan.weight[round_index] > 0)
            for round_index in range(len(plan.rounds))
        ]
    )
    factor = plan.kick * plan.scale / plan.gain
    variance = received_noise * factor**2
    excess = np.maximum(0.0, variance - plan.noise_variance)
    return plan.with_rounds(server_noise=plan.server_noise + excess)


def _costs(job: Job) -> JsonObject:
    """Return `privacy` of plan.json: the cost of all chains that are released."""
    promise = job.plan.privacy
    spent = job.planned_loss.sum(0)
    total = spent + job.plan.ledger
    costs: JsonObject = {
        "spent": spent,
        "spent_max": spent.max(),
        "epsilon_each": promise.epsilons_spent(total),
    }
    if promise.delta is not None:
        costs["epsilon_by"] = {
            name: promise.epsilon_spent(total, name) for name in ACCOUNTANTS
        }
    costs["epsilon_spent"] = promise.epsilon_spent(total)
    return dict(plain(costs))


def _finish(
    folder: Path,
    scenario: Scenario,
    inputs: Inputs,
    server: Server,
    *,
    options: FederationOptions,
) -> FederationResult:
    """Evaluate the samples and write the files of a run.

    Where devices brought their own data, the posterior of the scenario is that of a
    stand-in: samples are not compared with it. The seconds are those of all rounds,
    whichever command or process has run them.
    """
    job = server.job
    ledger = server.ledger
    preload(draws=len(job.plan.rounds) - job.plan.burn_in)
    plan_path = folder / FEDERATION / PLAN_DOCUMENT
    plan_file = read_document(plan_path, PlanFile, "--out")
    document = plan_file.model_dump(exclude_unset=True)
    plan = received_plan(job)
    trace = replace(trace_of(server, inputs.posterior), plans=(plan,))
    if not scenario.sampler.transcript:
        trace = replace(trace, transcript=None)
    posterior = None if options.own_data else inputs.posterior
    test_set = None if options.own_data else inputs.test
    evaluation = evaluate(trace, posterior, test_set)
    account = _account(server, options)
    notices = _notices(job, account["absences"], options.own_data)
    summary = summary_document(
        evaluation,
        document,
        notices=(*plan.notices, *notices),
        ledger=ledger_document(ledger, folder),
        seconds=sum(row["seconds"] for row in read_log(server.folder)),
    )
    summary["epsilon_spent"] = account["epsilon_spent"]
    summary["federation"] = account
    shutil.copyfile(server.folder / LOG, folder / LOG)
    files = write_run(
        folder,
        scenario=_settled(scenario, job),
        trace=trace,
        plan=plan,
        plan_document=document,
        summary=summary,
        prior_mean=inputs.prior_mean,
        ledger=None if ledger is None else ledger.path,
    )
    return FederationResult(scenario, summary, evaluation, [*files, folder / LOG])


def _account(server: Server, options: FederationOptions) -> Account:
    """Return `federation` of summary.json: who sent, and what that cost."""
    job = server.job
    rows = read_log(server.folder)
    scheduled_counts = [row["asked"] for row in rows]
    sent_counts = [row["sent"] for row in rows]
    absences = sum(len(row["absent"]) for row in rows)
    empty_rounds = sent_counts.count(0)
    runtime = "deployment" if options.prepare else options.runtime
    epsilon_spent = None
    if server.ledger is not None:
        spent = server.ledger.spent
        epsilon_spent = plain(job.plan.privacy.epsilon_spent(spent))
    return Account(
        runtime=runtime,
        noise=job.noise,
        tolerate=job.tolerate,
        releases=job.releases,
        own_data=options.own_data,
        asked=scheduled_counts,
        sent=sent_counts,
        absences=absences,
        empty_rounds=empty_rounds,
        epsilon_spent=epsilon_spent,
        adjacency=job.plan.privacy.adjacency,
    )


def _notices(job: Job, absences: int, own_data: bool) -> Iterator[Notice]:
    """Yield the assumptions behind the numbers of a federation.

    Args:
        job: that was run.
        absences: how often a scheduled device did not send.
        own_data: whether devices brought their own data, for which no law is known.
    """
    if job.noise == "devices":
        noise_parts = int(job.quorum.max())
        yield Notice(NoticeCode.DEVICE_NOISE, ONE_BY_ONE.format(noise_parts))
        if absences:
            yield Notice(NoticeCode.LATE_MESSAGES, LATE_MESSAGES)
    else:
        yield Notice(NoticeCode.EMULATED_CHANNEL, EMULATED)
        if job.lattice is None:
            yield Notice(NoticeCode.NO_PROTECTION, NO_PROTECTION)
    if job.tolerate:
        excess = float(np.max(job.plan.active_devices / job.quorum))
        text = SPARE_NOISE.format(job.tolerate, int(job.quorum.min()), excess)
        yield Notice(NoticeCode.SPARE_NOISE, text)
    if absences:
        planned = "The bound is that"
        if not own_data:
            planned = "The bound and the exact law are those"
        text = ABSENCES.format(absences, planned)
        yield Notice(NoticeCode.ABSENT_DEVICES, text)
