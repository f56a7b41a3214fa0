"""A run from its plan to its files, stopped and resumed without losing a sample or a loss.

While a run is under way its folder holds `.checkpoint` (plan, samples and progress) and `ledger.jsonl`; the other files
are written at the end.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from wflmc.evaluation import Evaluation, evaluate, exact_law, preload
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

Say = Callable[[str], None]
Result = tuple[Scenario, JsonObject, Evaluation, list[Path]]
"""The scenario as settled, the content of summary.json, the evaluation, and the files that were written."""

CHECKPOINT, SETTINGS = ".checkpoint", "about.json"
VELOCITY = "velocity.npy"
"""In a checkpoint: of kinetic chains that are continued, when they had stopped."""
STORED = (
    "posterior/theta", "sample_stats/clip_rate", "sample_stats/last_velocity", "warmup_posterior/theta",
    "warmup_sample_stats/clip_rate",
)  # fmt: skip
"""What is read of trace.nc when rounds are added."""
SECRET = "secret"
"""In a checkpoint: the key, where the seed is secret; it goes with the checkpoint when the run ends."""
SECRET_BYTES = 8
"""Of such a key (see `secret_key`)."""


class RunRequest(NamedTuple):
    """The arguments of `wflmc run`."""

    scenario: str | None
    plan: str | None
    out: str | None
    overrides: list[str] | None
    memory: float | None
    ledger: str | None
    resume: str | None
    more: int | None
    keep_burn_in: bool = False


class RunSettings(Document):
    """about.json in a checkpoint: what the plan there does not say of the run."""

    start: int = 0
    memory: float | None = None
    ledger: str | None = None
    asked: str = ""
    """The scenario as it was asked for, before anything in it was settled."""
    keep_burn_in: bool = False


@errors.without_data
class RunTask(NamedTuple):
    """What is to be run: a plan, of which the first `start` rounds may have been run before."""

    scenario: Scenario
    inputs: Inputs
    plan: Plan
    folder: Path | None
    ledger: Path | None
    key: jax.Array
    """Of starts and noise."""
    settings: RunSettings
    resumed: bool = False
    """Whether the folder holds samples of this run already."""

    @property
    def checkpoint(self) -> Path | None:
        """Where progress is kept."""
        return None if self.folder is None else self.folder / CHECKPOINT


def run_scenario(
    request: RunRequest, folder: Path | None, bar: ProgressBar, say: Say
) -> Result:
    """Run a scenario from its plan to its files.

    Args:
        folder: of the run, which no other process writes to; None where nothing is to be written.
        bar: shows progress.
        say: takes sentences for whoever waits.
    """
    began = time.perf_counter()
    task = (
        _new_task(request, folder, say)
        if request.resume is None
        else _resume_task(request)
    )
    try:
        return _run(task, bar, say, began)
    except (KeyboardInterrupt, OSError) as error:
        if task.folder is None or _settings(task.folder) is None:
            raise
        hint = f"wflmc run --resume {task.folder} goes on with this run"
        if isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:
            raise errors.UnfinishedError(
                f"{error.strerror}: {error.filename or task.folder}; {hint}."
            ) from None
        say(f"{hint}.")
        raise


def _run(task: RunTask, bar: ProgressBar, say: Say, began: float) -> Result:
    task = task._replace(
        scenario=with_values(task.scenario, {"sampler.burn_in": task.plan.burn_in})
    )
    law = exact_law(task.inputs.posterior, task.plan)
    if task.resumed and task.checkpoint is not None:
        stored = read_document(task.checkpoint / PLAN_DOCUMENT, PlanFile, "--resume")
        document = stored.model_dump(exclude_unset=True)
    else:
        document = documents.plan_document(
            task.scenario, task.inputs, task.plan, time.perf_counter() - began, law=law
        )
    before = _stored_trace(task) if task.settings.start else None
    preload(draws=len(task.plan.rounds) - task.plan.burn_in)
    ledger, release = _open_ledger(task), task.inputs.release
    if task.checkpoint is not None:
        if not task.resumed and (task.checkpoint / SETTINGS).exists():
            say(
                f"{task.folder} held another run that was stopped; this one takes its place."
            )
        _write_checkpoint(task.checkpoint, task, document, before)
    with tempfile.TemporaryDirectory(prefix="wflmc-") as scratch:
        try:
            if ledger is not None and release is not None:
                ledger.charge(release.name, 0, release.loss, release.noise)
            trace = _sample(task, before, ledger, Path(scratch), bar)
        except (
            errors.SamplingError,
            errors.OverspendError,
        ):  # would fail again in the same round
            if task.checkpoint is not None:
                shutil.rmtree(task.checkpoint)
            raise
        if before is not None:
            both = {
                name: (getattr(before, name), getattr(trace, name))
                for name in ("theta", "clip_rate")
            }
            joined: Any = {
                name: np.concatenate(parts, axis=1) for name, parts in both.items()
            }
            trace = replace(
                before,
                **joined,
                plans=(task.plan,),
                velocity=trace.velocity,
                key=trace.key,
            )
        evaluation = evaluate(trace, task.inputs.posterior, task.inputs.test, law)
        summary = documents.summary_document(
            evaluation,
            document,
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
                plan_document=document,
                summary=summary,
                ledger=task.ledger,
            )
    if task.checkpoint is not None:
        shutil.rmtree(task.checkpoint)
    return task.scenario, summary, evaluation, files


def _new_task(request: RunRequest, folder: Path | None, say: Say) -> RunTask:
    """Plan a run, or go on with the very one that was stopped in its folder."""
    if (request.scenario is None) == (request.plan is None):
        raise InputError(
            "scenario",
            request.scenario,
            "either a scenario file or --plan PATH, one of the two",
        )
    if request.more is not None:
        raise conflict("--more", request.more, "or given with --resume DIR")
    if request.plan is not None:
        if request.overrides:
            raise conflict(
                "--set", request.overrides[0], "with --plan, which is already made"
            )
        loaded = open_plan(request.plan)
        scenario, inputs, plan = loaded.scenario, loaded.inputs, loaded.plan
        key = _new_key(scenario)
        if np.any(plan.ledger > inputs.spent * (1 + 1e-9)) and request.ledger is None:
            raise missing(
                "--ledger", "with a plan that was made from what a ledger leaves"
            )
    else:
        scenario = load_scenario(str(request.scenario), request.overrides)
        if folder is not None:
            refuse_own_scenario(Path(str(request.scenario)), folder, scenario)
        if folder is not None and _is_stopped_here(folder, scenario, request):
            say(f"Going on with the run that was stopped in {request.out}.")
            return _stopped_task(folder, request.memory)
        key = _new_key(scenario)
        inputs = build(scenario, key)
        plan = make_plan(scenario, inputs, ledger=spent_before(request.ledger, inputs))
    path = None if request.ledger is None else Path(request.ledger).resolve()
    if path is None and folder is not None and plan.clips:
        path = folder / "ledger.jsonl"
    if request.keep_burn_in and scenario.sampler.keep == "predictions":
        raise conflict("--keep-burn-in", True, "with sampler.keep = 'predictions'")
    settings = RunSettings(
        memory=request.memory,
        asked=to_toml(scenario),
        keep_burn_in=bool(request.keep_burn_in),
    )
    task = RunTask(scenario, inputs, plan, folder, path, key, settings)
    if folder is not None:
        _refuse_folder(folder, task, request.ledger is None, say)
    return task


def _new_key(scenario: Scenario) -> jax.Array:
    """Return the key of a scenario's seed; a new one where it is secret, also for rounds that are added later."""
    seed = scenario.sampler.seed
    return secret_key() if seed == "secret" else seeded(seed)


def _refuse_folder(folder: Path, task: RunTask, own_ledger: bool, say: Say) -> None:
    """Refuse a folder whose samples or noise must not be mixed with this run's; set another run's ledger aside."""
    if _is_finished_in_secret(folder):
        why = "samples of a secret seed cannot be drawn again, and their losses add up with those of another run"
        raise InputError(
            "--out",
            str(folder),
            f"another folder: {why} (--ledger keeps count of both)",
        )
    if not task.plan.clips:
        return
    name = run_name(
        task.key, task.inputs.posterior, task.plan, task.scenario.sampler.chains
    )
    for path in sorted(folder.glob("ledger*.jsonl")):
        if noise_of_another_run(path, name, noise_name(task.key)):
            why = f"{path.name} has another run with the noise of this seed, and who sees both can take it away"
            raise InputError(
                "sampler.seed",
                task.scenario.sampler.seed,
                f"another one, or given another --out: {why}",
            )
    if own_ledger and task.ledger is not None and task.ledger.exists():
        _set_aside(task, task.ledger, name, say)


def _is_finished_in_secret(folder: Path) -> bool:
    """Return whether a folder has a finished run whose seed is secret.

    Raises:
        InputError: its scenario cannot be read, so that nobody can tell.
    """
    path = folder / SCENARIO_FILE
    if not (path.is_file() and (folder / "trace.nc").is_file()):
        return False
    try:
        return load_scenario(path).sampler.seed == "secret"
    except InputError:
        allowed = f"another folder: {SCENARIO_FILE} of the run in it cannot be read"
        raise InputError("--out", str(folder), allowed) from None


def _set_aside(task: RunTask, path: Path, name: str, say: Say) -> None:
    """Keep the ledger of another run that used this folder; the same run again sends nothing new."""
    with suppress(ForeignLedgerError):
        ledger, release = _ledger_at(task, path), task.inputs.release
        same = {ledger.name(name), ledger.name("" if release is None else release.name)}
        if {run for run, _ in ledger.entries} <= same:
            return
    kept = next(
        p
        for i in range(1, 10**6)
        if not (p := path.with_name(f"ledger-{i}.jsonl")).exists()
    )
    move_ledger(path, kept)
    say(
        f"{path.parent} has the ledger of another run, kept as {kept.name}; --ledger spends from one ledger."
    )


def _resume_task(request: RunRequest) -> RunTask:
    """Go on with the run in a folder: with one that was stopped, or with more rounds of one that is finished."""
    for name, value in (
        request._replace(resume=None, more=None, memory=None)._asdict().items()
    ):
        if value:
            option = {"scenario": name, "overrides": "--set"}.get(
                name, f"--{name.replace('_', '-')}"
            )
            raise conflict(
                option, value, "with --resume, which goes on with what a folder holds"
            )
    folder = Path(str(request.resume)).expanduser()
    if _settings(folder) is not None:
        if request.more is not None:
            raise conflict(
                "--more", request.more, "until the run that was stopped is finished"
            )
        return _stopped_task(folder, request.memory)
    if not (folder / "summary.json").exists() or (folder / "federation").exists():
        raise InputError(
            "--resume",
            str(folder),
            "a folder that `wflmc run --out` has written, not wflmc federate",
        )
    if request.more is None or not 0 < request.more <= 10**7:
        raise InputError(
            "--more",
            request.more,
            "1 to 10,000,000 rounds: the run in this folder is finished",
        )
    loaded = load_plan(folder, option="--resume")
    scenario, inputs, plan = loaded.scenario, loaded.inputs, loaded.plan
    if scenario.sampler.keep == "predictions":
        raise conflict(
            "--more",
            request.more,
            "with sampler.keep = 'predictions': the last draws were not kept",
        )
    kept = _summary(folder).ledger
    path = None if kept is None else folder / kept.file
    settings = RunSettings(start=len(plan.rounds), memory=request.memory)
    task = RunTask(scenario, inputs, plan, folder, path, _new_key(scenario), settings)
    ledger = _open_ledger(task)
    spent = plan.ledger if ledger is None else ledger.spent
    longer = extend_plan(scenario, inputs, plan, more=request.more, spent=spent)
    return task._replace(scenario=longer.scenario, plan=longer.plan)


def _settings(folder: Path) -> RunSettings | None:
    """Return the settings of the run that was stopped in a folder; None where there is none."""
    path = folder / CHECKPOINT / SETTINGS
    return read_document(path, RunSettings, "--resume") if path.exists() else None


def _is_stopped_here(folder: Path, scenario: Scenario, request: RunRequest) -> bool:
    """Return whether the run that was stopped in a folder is the very one that is asked for."""
    settings = _settings(folder)
    if settings is None or settings.asked != to_toml(scenario):
        return False
    path = (
        "ledger.jsonl"
        if request.ledger is None
        else str(Path(request.ledger).resolve())
    )
    same_options = request.memory in (
        None,
        settings.memory,
    ) and settings.keep_burn_in == bool(request.keep_burn_in)
    return same_options and settings.ledger in (None, path)


def _stopped_task(folder: Path, memory: float | None) -> RunTask:
    """Return the run that was stopped in a folder."""
    settings, path = (
        read_document(folder / CHECKPOINT / SETTINGS, RunSettings, "--resume"),
        folder / CHECKPOINT / SECRET,
    )
    secret = _read_secret(path) if path.exists() else None
    loaded = load_plan(folder / CHECKPOINT, secret, "--resume")
    scenario = loaded.scenario
    if secret is None and scenario.sampler.seed == "secret":
        raise InputError(
            "--resume",
            str(path),
            "there: without it the noise of rounds that were sent is not known",
        )
    ledger = None if settings.ledger is None else folder / settings.ledger
    settings = settings.model_copy(update={"memory": memory or settings.memory})
    key = _new_key(scenario) if secret is None else secret
    return RunTask(
        scenario,
        loaded.inputs,
        loaded.plan,
        folder,
        ledger,
        key,
        settings,
        resumed=True,
    )


def _read_secret(path: Path) -> jax.Array:
    """Return the key that a checkpoint keeps."""
    words = path.read_bytes()
    if len(words) != SECRET_BYTES:
        raise InputError(
            "--resume", str(path), f"the {SECRET_BYTES} bytes that the run has written"
        )
    return secret_key(words)


def _summary(folder: Path) -> SummaryFile:
    return read_document(folder / "summary.json", SummaryFile, "--resume")


def _ledger_at(task: RunTask, path: Path) -> Ledger:
    posterior, plan = task.inputs.posterior, task.plan
    return Ledger(
        plan.privacy,
        plan.devices,
        subject=posterior.digest,
        enforced=plan.enforced,
        path=path,
    )


def _open_ledger(task: RunTask) -> Ledger | None:
    """Return the ledger to charge; one that does not hold what this folder's earlier run has spent is refused."""
    if task.ledger is None:
        return None
    if not task.settings.start:
        return _ledger_at(task, task.ledger)
    assert task.folder is not None
    before = _summary(task.folder).ledger
    ledger = _ledger_at(task, task.ledger) if task.ledger.exists() else None
    if ledger is None or before is None or before.chain not in ledger.line_hashes:
        allowed = f"the ledger of the run in this folder; {'it is' if ledger is None else 'rounds are'} missing"
        raise InputError("ledger", str(task.ledger), allowed)
    return ledger


def _write_checkpoint(
    folder: Path, task: RunTask, document: JsonObject, before: Trace | None
) -> None:
    """Write down what is about to be run, in place of another run that was stopped here."""
    if not task.resumed and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    if task.scenario.sampler.seed == "secret":
        with replacing(folder / SECRET, mode=0o600) as file:
            file.write(np.asarray(jax.random.key_data(task.key)).tobytes())
    task.plan.save(folder / PLAN_FILE)
    write_text(folder / PLAN_DOCUMENT, to_json(document))
    write_text(folder / SCENARIO_FILE, to_toml(task.scenario))
    if before is not None and before.velocity is not None:
        with replacing(folder / VELOCITY) as file:
            np.save(file, before.velocity)
    path = task.ledger
    ledger = path and (path.name if path.parent == task.folder else str(path.resolve()))
    write_text(
        folder / SETTINGS, to_json(task.settings.model_dump() | {"ledger": ledger})
    )


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
    """Sample the chains of a scenario, and keep what it says: draws, or predictions at
    the features of the test set.

    Args:
        key: seeds starts and noise.
        scenario: says how many chains there are, and what is kept of them.
        inputs: of the scenario.
        plan: of all chains.
        scratch: a folder for draws that would fill most of the memory, unless there is
            a checkpoint, which has them.
        execution: without a file for draws, which is chosen here.
        keep_burn_in: as of `sample`, and the arguments after it.
    """
    chains, posterior = scenario.sampler.chains, inputs.posterior
    predictions = None
    if scenario.sampler.keep == "predictions":
        if inputs.test is None or not isinstance(posterior, SoftmaxPosterior):
            allowed = "draws without a test set of labels (X_test, y_test)"
            raise InputError("sampler.keep", "predictions", allowed)
        predictions = inputs.test[0]
    else:
        draws = len(plan.rounds) - (0 if keep_burn_in else plan.burn_in)
        float32_bytes = 4.0 * chains * draws * plan.dim
        large = float32_bytes > (execution.memory or default_memory()) / 2
        if large and execution.checkpoint is None:
            execution = replace(execution, store=scratch / "theta.npy")
    return sample(
        key,
        posterior,
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
    plan = (
        task.plan.from_round(task.settings.start) if task.settings.start else task.plan
    )
    initial = None
    if before is not None:  # where the chains were when they stopped
        initial = Start(before.theta[:, -1], before.velocity)
    with bar("sampling", len(plan.rounds)) as advance:
        execution = Execution(
            memory=task.settings.memory,
            checkpoint=task.checkpoint,
            progress=lambda done, work: advance(len(plan.rounds) * done / work),
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


def _stored_trace(task: RunTask) -> Trace:
    """Return the samples that the folder holds already."""
    import h5netcdf

    assert task.folder is not None
    mismatch = InputError(
        "--resume", str(task.folder), "a folder whose trace.nc belongs to its plan.json"
    )
    try:
        with h5netcdf.File(task.folder / "trace.nc") as file:
            parts: list[Any] = [
                None if (part := file.get(name)) is None else part[...]
                for name in STORED
            ]
    except OSError as error:
        reason = error.strerror or "it is damaged"
        raise InputError(
            "--resume",
            str(task.folder / "trace.nc"),
            f"a file that can be read ({reason})",
        ) from None
    except Exception:  # what HDF5 makes of a damaged file
        raise InputError(
            "--resume",
            str(task.folder / "trace.nc"),
            "as wflmc wrote it (it is damaged)",
        ) from None
    theta, rate, velocity, warmup, warmup_rate = parts
    plan, kept = task.plan, task.settings.start - task.plan.burn_in
    if theta is None or rate is None or theta.ndim != 3 or rate.ndim != 2:
        raise mismatch
    theta, rate = (
        theta[:, :kept],
        rate[:, :kept],
    )  # a crash at the very end may have left the new ones too
    if task.resumed and velocity is not None:  # and their velocity
        path = task.folder / CHECKPOINT / VELOCITY
        velocity = read_array(
            path, key="--resume", requirement="the velocities that the run has written"
        )
    shape = (task.scenario.sampler.chains, kept, plan.dim)
    if theta.shape != shape or (velocity is None) == plan.dynamics.has_velocity:
        raise mismatch
    burn_in_rate = np.full(plan.burn_in, _summary(task.folder).clip_rate.burn_in or 0.0)
    return Trace(theta, rate, burn_in_rate, warmup, (plan,), velocity, warmup_rate)
