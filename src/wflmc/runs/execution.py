"""A run from its plan to its files; one that is stopped loses no draw and no loss.

While a run is under way its folder holds `.checkpoint` (plan, draws and progress) and
`ledger.jsonl`; the other files are written at the end.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from wflmc.evaluation import Evaluation, ExactLaw, evaluate, exact_law, preload
from wflmc.planning import Plan
from wflmc.planning.plan import PLAN_FILE
from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy.ledger import (
    ForeignLedgerError,
    Ledger,
    move_ledger,
    noise_of_another_run,
)
from wflmc.runs import documents
from wflmc.runs.documents import (
    SIMULATED,
    Document,
    JsonObject,
    PlanFile,
    SummaryFile,
    read_document,
)
from wflmc.runs.folder import ledger_document, write_run
from wflmc.runs.planning import (
    PLAN_DOCUMENT,
    SAME,
    SCENARIO_FILE,
    extend_plan,
    load_plan,
    make_plan,
    open_plan,
    refuse_own_scenario,
    spent_before,
)
from wflmc.sampling import (
    Execution,
    Start,
    Trace,
    default_memory,
    noise_name,
    run_name,
    sample,
)
from wflmc.scenario import (
    Inputs,
    Scenario,
    build,
    load_scenario,
    to_json,
    to_toml,
    with_values,
)
from wflmc.support import errors
from wflmc.support.errors import InputError, conflict, missing
from wflmc.support.keys import secret_key, seeded
from wflmc.support.progress import ProgressBar
from wflmc.support.storage import FULL_DISK_ERRORS, read_array, replacing, write_text

Notify = Callable[[str], None]
"""Receives a sentence for the user while a run is prepared or interrupted."""

CHECKPOINT = ".checkpoint"
"""The folder of a run that is under way or was stopped, within the run folder."""
SETTINGS = "about.json"
"""In a checkpoint: the settings of the run; its last file, without which there is no
checkpoint."""
VELOCITY = "velocity.npy"
"""In a checkpoint: velocities of kinetic chains after the earlier rounds of the folder,
where rounds are added."""
SECRET = "secret"
"""In a checkpoint: the key, where the seed is secret. It is deleted with the checkpoint
when the run ends."""
SECRET_BYTES = 8
"""The length of such a key (see `secret_key`)."""
MAX_ADDED_ROUNDS = 10**7
"""Rounds that --more can add at a time."""
MAX_LEDGER_COPIES = 10**6
"""Ledgers of other runs that a folder can hold."""


class RunResult(NamedTuple):
    """What a run leaves."""

    scenario: Scenario
    """As resolved."""
    summary: JsonObject
    """The content of summary.json."""
    evaluation: Evaluation
    files: list[Path]
    """All that were written."""


class RunRequest(NamedTuple):
    """The arguments of `wflmc run`; None where one was not given."""

    scenario: str | None
    plan: str | None
    out: str | None
    overrides: list[str] | None
    memory: float | None
    """Bytes for chains and gradients."""
    ledger: str | None
    resume: str | None
    more: int | None
    keep_burn_in: bool = False


class RunSettings(Document):
    """about.json in a checkpoint: settings of the run that its plan does not have."""

    start: int = 0
    """Rounds that an earlier run in this folder has finished."""
    memory: float | None = None
    ledger: str | None = None
    """Its name where it is in the run folder, so that the folder can be moved, else its
    path; None where there is none, as nothing is clipped."""
    asked: str = ""
    """The scenario as the user wrote it, before anything in it was settled."""
    keep_burn_in: bool = False


@errors.without_data
class RunTask(NamedTuple):
    """A plan to be run, of which the first `start` rounds may have been run before."""

    scenario: Scenario
    inputs: Inputs
    plan: Plan
    folder: Path | None
    ledger: Path | None
    key: jax.Array
    """Of starts and noise."""
    settings: RunSettings
    resumed: bool = False
    """Whether the folder holds draws of this run already."""

    @property
    def checkpoint(self) -> Path | None:
        """Return the folder of the progress, draws and settings of the run.

        It is None where the run has no folder: then nothing is written, and a run that
        is stopped cannot be resumed. The folder is deleted when the run has written its
        files.
        """
        return None if self.folder is None else self.folder / CHECKPOINT


def run_scenario(
    request: RunRequest,
    folder: Path | None,
    bar: ProgressBar,
    notify: Notify,
) -> RunResult:
    """Run a scenario or a plan, or resume a run, from its plan to its files.

    A run that was stopped in the folder is continued if it is the same one. When this
    one is stopped by Ctrl-C or a full disk, its draws and its ledger stay, and the user
    is told how to resume.

    Args:
        request: the arguments of the command.
        folder: of the run, which no other process writes to; None to write nothing.
        bar: shows progress.
        notify: receives sentences for the user.

    Returns:
        The resolved scenario, the summary, the evaluation and the files.

    Raises:
        InputError: if an argument or a file is wrong, or arguments do not go together.
        OverspendError: if the run would exceed a privacy budget.
        SamplingError: if a chain becomes infinite or nan.
        UnfinishedError: if the disk is full; the run can be resumed.
    """
    began = time.perf_counter()
    task = _open_task(request, folder, notify)
    try:
        return _run(task, bar, notify, began)
    except (KeyboardInterrupt, OSError) as error:
        if task.folder is None or _read_settings(task.folder) is None:
            raise
        hint = f"wflmc run --resume {task.folder} continues this run"
        if isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:
            path = error.filename or task.folder
            sentence = f"{error.strerror}: {path}; {hint}."
            raise errors.UnfinishedError(sentence) from None
        notify(f"{hint}.")
        raise


def _run(task: RunTask, bar: ProgressBar, notify: Notify, began: float) -> RunResult:
    """Sample, evaluate and write; delete the checkpoint at the end."""
    burn_in = {"sampler.burn_in": task.plan.burn_in}
    task = task._replace(scenario=with_values(task.scenario, burn_in))
    law = exact_law(task.inputs.posterior, task.plan)
    plan_content = _plan_content(task, law, began)
    before = _stored_trace(task) if task.settings.start else None
    preload(draws=len(task.plan.rounds) - task.plan.burn_in)
    ledger = _open_ledger(task)
    checkpoint = task.checkpoint
    if checkpoint is not None:
        if not task.resumed and (checkpoint / SETTINGS).exists():
            notify(
                f"{task.folder} held another run that was stopped; this one takes its "
                "place."
            )
        _write_checkpoint(checkpoint, task, plan_content, before)
    with tempfile.TemporaryDirectory(prefix="wflmc-") as scratch:
        trace = _charge_and_sample(task, before, ledger, Path(scratch), bar)
        evaluation = evaluate(trace, task.inputs.posterior, task.inputs.test, law)
        summary = documents.summary_document(
            evaluation,
            plan_content,
            notices=(*task.plan.notices, SIMULATED),
            ledger=ledger_document(ledger, task.folder),
            seconds=time.perf_counter() - began,
        )
        files = []
        if task.folder is not None:
            files = write_run(
                task.folder,
                scenario=task.scenario,
                trace=trace,
                plan=task.plan,
                plan_document=plan_content,
                summary=summary,
                prior_mean=task.inputs.prior_mean,
                ledger=task.ledger,
            )
    if checkpoint is not None:
        shutil.rmtree(checkpoint)
    return RunResult(task.scenario, summary, evaluation, files)


def _plan_content(task: RunTask, law: ExactLaw, began: float) -> JsonObject:
    """Return the content of plan.json; that of the checkpoint for a resumed run."""
    if task.resumed and task.checkpoint is not None:
        path = task.checkpoint / PLAN_DOCUMENT
        stored = read_document(path, PlanFile, "--resume")
        return stored.model_dump(exclude_unset=True)
    seconds = time.perf_counter() - began
    return documents.plan_document(
        task.scenario,
        task.inputs,
        task.plan,
        seconds,
        law=law,
    )


def _charge_and_sample(
    task: RunTask,
    before: Trace | None,
    ledger: Ledger | None,
    scratch: Path,
    bar: ProgressBar,
) -> Trace:
    """Pay for a release and run the chains; return all draws of the folder.

    Args:
        task: what is to be run.
        before: draws of earlier rounds, to which those of the added ones are joined.
        ledger: that is charged.
        scratch: a folder for draws that would fill the memory.
        bar: shows progress.
    """
    release = task.inputs.release
    try:
        if ledger is not None and release is not None:
            ledger.charge(release.name, 0, release.loss, release.noise)
        trace = _sample(task, before, ledger, scratch, bar)
    except (errors.SamplingError, errors.OverspendError):
        # The run would fail again in the same round: there is nothing to resume.
        if task.checkpoint is not None:
            shutil.rmtree(task.checkpoint)
        raise
    if before is None:
        return trace
    return replace(
        before,
        theta=np.concatenate([before.theta, trace.theta], axis=1),
        clip_rate=np.concatenate([before.clip_rate, trace.clip_rate], axis=1),
        plans=(task.plan,),
        velocity=trace.velocity,
        key=trace.key,
    )


def _open_task(request: RunRequest, folder: Path | None, notify: Notify) -> RunTask:
    """Return what is to be run."""
    if request.resume is not None:
        return _resume_task(request)
    return _new_task(request, folder, notify)


def _new_task(request: RunRequest, folder: Path | None, notify: Notify) -> RunTask:
    """Plan a run, or continue the same run that was stopped in its folder."""
    if (request.scenario is None) == (request.plan is None):
        requirement = "either a scenario file or --plan PATH, one of the two"
        raise InputError("scenario", request.scenario, requirement)
    if request.more is not None:
        raise conflict("--more", request.more, "or given with --resume DIR")
    if request.plan is not None:
        return _task_of_plan(request, request.plan, folder, notify)
    scenario = load_scenario(str(request.scenario), request.overrides)
    if folder is not None:
        refuse_own_scenario(Path(str(request.scenario)), folder, scenario)
        if _is_stopped_here(folder, scenario, request):
            notify(f"Going on with the run that was stopped in {request.out}.")
            return _stopped_task(folder, request.memory)
    key = _new_key(scenario)
    inputs = build(scenario, key)
    plan = make_plan(scenario, inputs, ledger=spent_before(request.ledger, inputs))
    planned = _PlannedRun(scenario, inputs, plan, key)
    return _task_of(planned, request, folder, notify)


@errors.without_data
class _PlannedRun(NamedTuple):
    """A plan with all that it is run with."""

    scenario: Scenario
    inputs: Inputs
    plan: Plan
    key: jax.Array
    """Of starts and noise."""


def _task_of_plan(
    request: RunRequest,
    path: str,
    folder: Path | None,
    notify: Notify,
) -> RunTask:
    """Return the run of a plan from its file."""
    if request.overrides:
        override = request.overrides[0]
        raise conflict("--set", override, "with --plan, which is already made")
    loaded = open_plan(path)
    key = _new_key(loaded.scenario)
    # Beyond the release that whitens, losses before the plan are those of a ledger.
    release_loss = loaded.inputs.spent * SAME
    counts_ledger = np.any(loaded.plan.ledger > release_loss)
    if counts_ledger and request.ledger is None:
        reason = "with a plan that was made from what a ledger leaves"
        raise missing("--ledger", reason)
    planned = _PlannedRun(loaded.scenario, loaded.inputs, loaded.plan, key)
    return _task_of(planned, request, folder, notify)


def _task_of(
    planned: _PlannedRun,
    request: RunRequest,
    folder: Path | None,
    notify: Notify,
) -> RunTask:
    """Return a new run of a plan; refuse a folder that must not take it."""
    scenario = planned.scenario
    path = None if request.ledger is None else Path(request.ledger).resolve()
    if path is None and folder is not None and planned.plan.clips:
        path = folder / "ledger.jsonl"
    if request.keep_burn_in and scenario.sampler.keep == "predictions":
        raise conflict("--keep-burn-in", True, "with sampler.keep = 'predictions'")
    settings = RunSettings(
        memory=request.memory,
        asked=to_toml(scenario),
        keep_burn_in=bool(request.keep_burn_in),
    )
    task = RunTask(
        scenario=scenario,
        inputs=planned.inputs,
        plan=planned.plan,
        folder=folder,
        ledger=path,
        key=planned.key,
        settings=settings,
    )
    if folder is not None:
        _refuse_folder(folder, task, request.ledger is None, notify)
    return task


def _new_key(scenario: Scenario) -> jax.Array:
    """Return the key of a scenario's seed; a fresh one where it is secret.

    Rounds that are added to a run of a secret seed have a fresh key as well.
    """
    seed = scenario.sampler.seed
    return secret_key() if seed == "secret" else seeded(seed)


def _refuse_folder(
    folder: Path,
    task: RunTask,
    uses_folder_ledger: bool,
    notify: Notify,
) -> None:
    """Refuse a folder whose draws or noise must not be mixed with this run's.

    The ledger of another run in it is renamed.

    Args:
        folder: that the run would write to.
        task: the run.
        uses_folder_ledger: whether its ledger is that of the folder, not of --ledger.
        notify: receives a sentence where a ledger is renamed.
    """
    if _is_finished_in_secret(folder):
        raise InputError(
            "--out",
            str(folder),
            "another folder: samples of a secret seed cannot be drawn again, and their "
            "losses add up with those of another run (--ledger keeps count of both)",
        )
    if not task.plan.clips:
        return
    chains = task.scenario.sampler.chains
    name = run_name(task.key, task.inputs.posterior, task.plan, chains)
    for path in sorted(folder.glob("ledger*.jsonl")):
        if noise_of_another_run(path, name, noise_name(task.key)):
            raise InputError(
                "sampler.seed",
                task.scenario.sampler.seed,
                f"another one, or given another --out: {path.name} has another run "
                "with the noise of this seed, and who sees both can take it away",
            )
    if uses_folder_ledger and task.ledger is not None and task.ledger.exists():
        _set_aside(task, task.ledger, name, notify)


def _is_finished_in_secret(folder: Path) -> bool:
    """Return whether a folder has a finished run whose seed is secret.

    Raises:
        InputError: if its scenario cannot be read, so that this is unknown.
    """
    path = folder / SCENARIO_FILE
    if not (path.is_file() and (folder / "trace.nc").is_file()):
        return False
    try:
        return load_scenario(path).sampler.seed == "secret"
    except InputError:
        requirement = f"another folder: {SCENARIO_FILE} of the run in it cannot be read"
        raise InputError("--out", str(folder), requirement) from None


def _set_aside(task: RunTask, path: Path, name: str, notify: Notify) -> None:
    """Rename the ledger of another run that used this folder.

    The same run again sends nothing new, so its ledger is continued.
    """
    with suppress(ForeignLedgerError):
        ledger = _ledger_at(task, path)
        release = task.inputs.release
        release_name = "" if release is None else release.name
        own_names = {ledger.name(name), ledger.name(release_name)}
        charged_names = {run for run, _ in ledger.entries}
        if charged_names <= own_names:
            return
    copy = _unused_ledger_path(path)
    move_ledger(path, copy)
    notify(
        f"{path.parent} has the ledger of another run, kept as {copy.name}; --ledger "
        "spends from one ledger."
    )


def _unused_ledger_path(path: Path) -> Path:
    """Return the first of ledger-1.jsonl, ledger-2.jsonl, … that does not exist."""
    candidates = (
        path.with_name(f"ledger-{number}.jsonl")
        for number in range(1, MAX_LEDGER_COPIES)
    )
    return next(candidate for candidate in candidates if not candidate.exists())


def _resume_task(request: RunRequest) -> RunTask:
    """Continue the run in a folder: one that was stopped, or a finished one, longer."""
    _refuse_options_of_new_runs(request)
    folder = Path(str(request.resume)).expanduser()
    if _read_settings(folder) is not None:
        if request.more is not None:
            reason = "until the run that was stopped is finished"
            raise conflict("--more", request.more, reason)
        return _stopped_task(folder, request.memory)
    if not (folder / "summary.json").exists() or (folder / "federation").exists():
        requirement = "a folder that `wflmc run --out` has written, not wflmc federate"
        raise InputError("--resume", str(folder), requirement)
    if request.more is None or not 0 < request.more <= MAX_ADDED_ROUNDS:
        requirement = "1 to 10,000,000 rounds: the run in this folder is finished"
        raise InputError("--more", request.more, requirement)
    return _longer_task(folder, request.more, request.memory)


def _refuse_options_of_new_runs(request: RunRequest) -> None:
    """Refuse options that a run which is resumed has settled before."""
    option_names = {"scenario": "scenario", "overrides": "--set"}
    settled = request._replace(resume=None, more=None, memory=None)
    for name, value in settled._asdict().items():
        if value:
            default_option = f"--{name.replace('_', '-')}"
            option = option_names.get(name, default_option)
            reason = "with --resume, which continues what a folder holds"
            raise conflict(option, value, reason)


def _longer_task(folder: Path, more: int, memory: float | None) -> RunTask:
    """Return the finished run in a folder with more rounds."""
    loaded = load_plan(folder, option="--resume")
    scenario = loaded.scenario
    plan = loaded.plan
    if scenario.sampler.keep == "predictions":
        raise conflict(
            "--more",
            more,
            "with sampler.keep = 'predictions': the last draws were not kept",
        )
    ledger_part = _read_summary(folder).ledger
    task = RunTask(
        scenario=scenario,
        inputs=loaded.inputs,
        plan=plan,
        folder=folder,
        ledger=None if ledger_part is None else folder / ledger_part.file,
        key=_new_key(scenario),
        settings=RunSettings(start=len(plan.rounds), memory=memory),
    )
    ledger = _open_ledger(task)
    spent = plan.ledger if ledger is None else ledger.spent
    longer = extend_plan(scenario, loaded.inputs, plan, more=more, spent=spent)
    return task._replace(scenario=longer.scenario, plan=longer.plan)


def _read_settings(folder: Path) -> RunSettings | None:
    """Return the settings of the run that was stopped in a folder, if there is one."""
    path = folder / CHECKPOINT / SETTINGS
    return read_document(path, RunSettings, "--resume") if path.exists() else None


def _is_stopped_here(folder: Path, scenario: Scenario, request: RunRequest) -> bool:
    """Return whether the run that was stopped in a folder is the requested one.

    The scenarios are compared as they were before anything in them was settled; memory,
    ledger and the rounds that are kept have to be the same as well. A run without a
    ledger, which clips nothing, goes with any.
    """
    settings = _read_settings(folder)
    if settings is None or settings.asked != to_toml(scenario):
        return False
    ledger = "ledger.jsonl"
    if request.ledger is not None:
        ledger = str(Path(request.ledger).resolve())
    same_memory = request.memory in (None, settings.memory)
    same_kept_rounds = settings.keep_burn_in == bool(request.keep_burn_in)
    same_ledger = settings.ledger in (None, ledger)
    return same_memory and same_kept_rounds and same_ledger


def _stopped_task(folder: Path, memory: float | None) -> RunTask:
    """Return the run that was stopped in a folder."""
    checkpoint = folder / CHECKPOINT
    settings = read_document(checkpoint / SETTINGS, RunSettings, "--resume")
    path = checkpoint / SECRET
    secret = _read_secret(path) if path.exists() else None
    loaded = load_plan(checkpoint, secret, "--resume")
    scenario = loaded.scenario
    if secret is None and scenario.sampler.seed == "secret":
        requirement = (
            "there: without it the noise of rounds that were sent is not known"
        )
        raise InputError("--resume", str(path), requirement)
    return RunTask(
        scenario=scenario,
        inputs=loaded.inputs,
        plan=loaded.plan,
        folder=folder,
        ledger=None if settings.ledger is None else folder / settings.ledger,
        key=_new_key(scenario) if secret is None else secret,
        settings=settings.model_copy(update={"memory": memory or settings.memory}),
        resumed=True,
    )


def _read_secret(path: Path) -> jax.Array:
    """Return the key that a checkpoint holds."""
    key_bytes = path.read_bytes()
    if len(key_bytes) != SECRET_BYTES:
        requirement = f"the {SECRET_BYTES} bytes that the run has written"
        raise InputError("--resume", str(path), requirement)
    return secret_key(key_bytes)


def _read_summary(folder: Path) -> SummaryFile:
    """Return summary.json of a finished run."""
    return read_document(folder / "summary.json", SummaryFile, "--resume")


def _ledger_at(task: RunTask, path: Path) -> Ledger:
    """Open the ledger in a file for the devices and data of a run."""
    plan = task.plan
    return Ledger(
        plan.privacy,
        plan.devices,
        subject=task.inputs.posterior.digest,
        enforced=plan.enforced,
        path=path,
    )


def _open_ledger(task: RunTask) -> Ledger | None:
    """Return the ledger to charge; None for runs without one.

    Where rounds are added, a ledger that does not hold what the folder's earlier rounds
    have spent is refused.
    """
    if task.ledger is None:
        return None
    if not task.settings.start:
        return _ledger_at(task, task.ledger)
    assert task.folder is not None
    before = _read_summary(task.folder).ledger
    missing_part = "it is"
    if task.ledger.exists():
        ledger = _ledger_at(task, task.ledger)
        if before is not None and before.chain in ledger.line_hashes:
            return ledger
        missing_part = "rounds are"
    requirement = f"the ledger of the run in this folder; {missing_part} missing"
    raise InputError("ledger", str(task.ledger), requirement)


def _write_checkpoint(
    folder: Path,
    task: RunTask,
    plan_content: JsonObject,
    before: Trace | None,
) -> None:
    """Write what is about to be run, in place of another run that was stopped here.

    The settings are the last file: a checkpoint without them does not count.
    """
    if not task.resumed and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    if task.scenario.sampler.seed == "secret":
        key_data = np.asarray(jax.random.key_data(task.key))
        with replacing(folder / SECRET, mode=0o600) as file:
            file.write(key_data.tobytes())
    task.plan.save(folder / PLAN_FILE)
    write_text(folder / PLAN_DOCUMENT, to_json(plan_content))
    write_text(folder / SCENARIO_FILE, to_toml(task.scenario))
    if before is not None and before.velocity is not None:
        with replacing(folder / VELOCITY) as file:
            np.save(file, before.velocity)
    settings = task.settings.model_dump()
    settings["ledger"] = None
    if task.ledger is not None:
        is_in_folder = task.ledger.parent == task.folder
        path = task.ledger.name if is_in_folder else task.ledger.resolve()
        settings["ledger"] = str(path)
    write_text(folder / SETTINGS, to_json(settings))


def sample_chains(
    key: jax.Array,
    scenario: Scenario,
    inputs: Inputs,
    plan: Plan,
    scratch: Path,
    *,
    execution: Execution,
    keep_burn_in: bool = False,
    initial: Start | None = None,
    ledger: Ledger | None = None,
    transcript: bool = False,
) -> Trace:
    """Sample the chains of a scenario.

    `sampler.keep` decides what is recorded: draws, or mean predictions at the features
    of the test set.

    Args:
        key: seeds starts and noise.
        scenario: sets the number of chains, and what is recorded of them.
        inputs: of the scenario.
        plan: of all chains.
        scratch: a folder for draws that would fill more than half of the memory, unless
            there is a checkpoint, which has them.
        execution: without a file for draws, which is chosen here.
        keep_burn_in: whether the draws of burn-in are kept as well.
        initial: where chains start.
        ledger: that is charged.
        transcript: whether the trace has a transcript.

    Returns:
        The trace; its draws may lie in the scratch folder.

    Raises:
        InputError: if predictions are to be kept without a test set of labels.
    """
    chains = scenario.sampler.chains
    predictions = None
    if scenario.sampler.keep == "predictions":
        if inputs.test is None or not isinstance(inputs.posterior, SoftmaxPosterior):
            requirement = "draws without a test set of labels (X_test, y_test)"
            raise InputError("sampler.keep", "predictions", requirement)
        predictions = inputs.test[0]
    else:
        draws = len(plan.rounds) - (0 if keep_burn_in else plan.burn_in)
        float32_bytes = 4.0 * chains * draws * plan.dim
        memory = execution.memory or default_memory()
        if float32_bytes > memory / 2 and execution.checkpoint is None:
            execution = replace(execution, store=scratch / "theta.npy")
    return sample(
        key,
        inputs.posterior,
        plan,
        chains,
        keep_burn_in=keep_burn_in,
        initial=initial,
        ledger=ledger,
        transcript=transcript,
        predictions=predictions,
        execution=execution,
    )


def _sample(
    task: RunTask,
    before: Trace | None,
    ledger: Ledger | None,
    scratch: Path,
    bar: ProgressBar,
) -> Trace:
    """Run the rounds of a task that were not run before, from where chains stopped."""
    plan = task.plan
    if task.settings.start:
        plan = plan.from_round(task.settings.start)
    initial = None
    if before is not None:
        initial = Start(before.theta[:, -1], before.velocity)
    rounds = len(plan.rounds)
    with bar("sampling", rounds) as advance:

        def report(work_done: int, work: int) -> None:
            advance(rounds * work_done / work)

        execution = Execution(
            memory=task.settings.memory,
            checkpoint=task.checkpoint,
            progress=report,
        )
        return sample_chains(
            task.key,
            task.scenario,
            task.inputs,
            plan,
            scratch,
            execution=execution,
            keep_burn_in=task.settings.keep_burn_in,
            initial=initial,
            ledger=ledger,
            transcript=task.scenario.sampler.transcript,
        )


class _StoredArrays(NamedTuple):
    """What trace.nc holds of a trace; None where it has no such array."""

    theta: np.ndarray | None
    clip_rate: np.ndarray | None
    velocity: np.ndarray | None
    warmup: np.ndarray | None
    warmup_clip_rate: np.ndarray | None


def _read_stored_arrays(path: Path) -> _StoredArrays:
    """Read the arrays of trace.nc."""
    import h5netcdf

    def read(file: h5netcdf.File, name: str) -> np.ndarray | None:
        variable = file.get(name)
        return None if variable is None else variable[...]

    try:
        with h5netcdf.File(path) as file:
            return _StoredArrays(
                theta=read(file, "posterior/theta"),
                clip_rate=read(file, "sample_stats/clip_rate"),
                velocity=read(file, "sample_stats/last_velocity"),
                warmup=read(file, "warmup_posterior/theta"),
                warmup_clip_rate=read(file, "warmup_sample_stats/clip_rate"),
            )
    except OSError as error:
        reason = error.strerror or "it is damaged"
        requirement = f"a file that can be read ({reason})"
        raise InputError("--resume", str(path), requirement) from None
    except Exception:  # what HDF5 makes of a damaged file
        requirement = "as wflmc wrote it (it is damaged)"
        raise InputError("--resume", str(path), requirement) from None


def _stored_trace(task: RunTask) -> Trace:
    """Return the draws of the earlier rounds that the folder holds."""
    assert task.folder is not None
    plan = task.plan
    mismatch = InputError(
        "--resume",
        str(task.folder),
        "a folder whose trace.nc belongs to its plan.json",
    )
    stored = _read_stored_arrays(task.folder / "trace.nc")
    theta = stored.theta
    clip_rate = stored.clip_rate
    if theta is None or theta.ndim != 3:
        raise mismatch
    if clip_rate is None or clip_rate.ndim != 2:
        raise mismatch
    # A crash at the very end may have left draws of the added rounds too.
    draws = task.settings.start - plan.burn_in
    theta = theta[:, :draws]
    clip_rate = clip_rate[:, :draws]
    velocity = stored.velocity
    if task.resumed and velocity is not None:
        # So it may have replaced the velocities after the earlier rounds.
        velocity = read_array(
            task.folder / CHECKPOINT / VELOCITY,
            key="--resume",
            requirement="the velocities that the run has written",
        )
    if theta.shape != (task.scenario.sampler.chains, draws, plan.dim):
        raise mismatch
    if (velocity is None) == plan.dynamics.has_velocity:
        raise mismatch
    # The files have the rates of burn-in only where it was kept, but always their mean.
    mean_clip_rate = _read_summary(task.folder).clip_rate.burn_in or 0.0
    return Trace(
        theta=theta,
        clip_rate=clip_rate,
        burn_in_clip_rate=np.full(plan.burn_in, mean_clip_rate),
        warmup=stored.warmup,
        plans=(plan,),
        velocity=velocity,
        warmup_clip_rate=stored.warmup_clip_rate,
    )
