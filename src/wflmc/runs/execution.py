"""A run from its plan to its files, stopped and resumed without losing a sample or a loss.

While a run is under way its folder holds `.checkpoint` (plan, samples and progress) and `ledger.jsonl`; the other files
are written at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from wflmc.errors import InputError, OverspendError, SamplingError, UnfinishedError, without_data
from wflmc.evaluation import Evaluation, evaluate, preload
from wflmc.keys import secret_key
from wflmc.planning import Plan
from wflmc.privacy import ForeignLedgerError, Ledger
from wflmc.privacy.ledger import move_ledger, noise_of_another_run
from wflmc.progress import ProgressBar
from wflmc.runs.diagnosis import diagnose
from wflmc.runs.documents import SIMULATED, plan_document, summary_document
from wflmc.runs.planning import extend_plan, make_plan, read_plan
from wflmc.sampling import Trace, default_memory, run_name, sample
from wflmc.sampling.payment import noise_name
from wflmc.scenario import Inputs, Scenario, build, load_scenario, to_json, to_toml
from wflmc.scenario.coverage import OWNER_ONLY
from wflmc.storage import FULL, replacing, write_text

Say = Callable[[str], None]

VELOCITY = "velocity.npy"
"""In a checkpoint: of kinetic chains that go on, when they had stopped."""
SECRET = "secret"
"""In a checkpoint: the key, where the seed is secret; it goes with the checkpoint when the run ends."""


class Request(NamedTuple):
    """What the command was asked for."""

    scenario: str | None
    plan: str | None
    out: str | None
    overrides: list[str] | None
    memory: float | None
    ledger: str | None
    resume: str | None
    more: int | None
    keep_burn_in: bool = False


@without_data
class Task(NamedTuple):
    """What is to be run: a plan, of which the first `start` rounds may have been run before."""

    scenario: Scenario
    inputs: Inputs
    plan: Plan
    folder: Path | None
    ledger: Path | None
    start: int
    memory: float | None
    asked: str
    """The scenario as it was asked for, before anything in it was settled."""
    resumed: bool = False
    """Whether the folder holds samples of this run already."""
    keep_burn_in: bool = False
    secret: jax.Array | None = None
    """The key, where the seed is secret."""

    @property
    def key(self) -> jax.Array:
        """The seed of starts and noise."""
        seed = self.scenario.sampler.seed
        if isinstance(seed, int):
            return jax.random.key(seed)
        assert self.secret is not None
        return self.secret

    @property
    def checkpoint(self) -> Path | None:
        """Where progress is kept."""
        return None if self.folder is None else self.folder / ".checkpoint"


class Result(NamedTuple):
    """What a run has found, and the files that were written."""

    scenario: Scenario
    summary: dict[str, Any]
    evaluation: Evaluation
    files: list[Path]


def run_scenario(request: Request, folder: Path | None, bar: ProgressBar, say: Say) -> Result:
    """Run what is asked for, from its plan to its files.

    Args:
        folder: of the run, which no other process writes to; None where nothing is to be written.
        bar: shows progress.
        say: takes sentences for whoever waits.
    """
    began = time.perf_counter()
    task = _resumed(request) if request.resume is not None else _new(request, folder, say)
    try:
        return _run(task, bar, say, began)
    except OSError as error:
        if error.errno not in FULL or task.folder is None or _about(task.folder) is None:
            raise
        goes_on = f"wflmc run --resume {task.folder} goes on with this run when there is room"
        raise UnfinishedError(f"{error.strerror}: {error.filename or task.folder}; {goes_on}.") from None


def _run(task: Task, bar: ProgressBar, say: Say, began: float) -> Result:
    settled = task.scenario.sampler.model_copy(update={"burn_in": task.plan.burn_in})
    task = task._replace(scenario=task.scenario.model_copy(update={"sampler": settled}))
    document = plan_document(task.scenario, task.inputs, task.plan, time.perf_counter() - began)
    if task.resumed and task.checkpoint is not None:  # as it was made: a plan that is read again has no certificate
        document = json.loads((task.checkpoint / "plan.json").read_text(encoding="utf-8"))
    before = _earlier(task) if task.start else None
    preload()
    ledger = _open_ledger(task)
    release = task.inputs.release
    with tempfile.TemporaryDirectory(prefix="wflmc-") as scratch:
        if task.checkpoint is not None:
            if not task.resumed and (task.checkpoint / "about.json").exists():
                say(f"{task.folder} held another run that was stopped; this one takes its place.")
            _begin(task, document, before)
        try:
            if ledger is not None and release is not None:
                ledger.charge(release.name, 0, release.loss, release.noise)
            trace = _sample(task, before, ledger, Path(scratch), bar)
        except KeyboardInterrupt:
            if task.folder is not None:
                say(f"wflmc run --resume {task.folder} goes on with this run.")
            raise
        except (SamplingError, OverspendError):  # would fail again in the same round
            if task.checkpoint is not None:
                shutil.rmtree(task.checkpoint)
            raise
        if before is not None:
            trace = _joined(before, trace, task.plan)
        evaluation = evaluate(trace, task.inputs.posterior, task.inputs.test)
        causes = diagnose(task.scenario, task.inputs, task.plan, evaluation)
        warnings = (*task.plan.warnings, SIMULATED)
        beyond = document.get("not_covered", [])
        summary = summary_document(evaluation, warnings, time.perf_counter() - began, causes, beyond)
        summary["ledger"] = None if ledger is None else ledger_document(ledger, task)
        written = write_run(task, trace, document, summary)
    if task.checkpoint is not None:
        shutil.rmtree(task.checkpoint)
    return Result(task.scenario, summary, evaluation, written)


def _new(request: Request, folder: Path | None, say: Say) -> Task:
    if (request.scenario is None) == (request.plan is None):
        raise InputError("scenario", request.scenario, "either a scenario file or --plan FILE, one of the two")
    if request.more is not None:
        raise InputError("--more", request.more, "given with --resume DIR")
    if request.plan is not None:
        if request.overrides:
            raise InputError("--set", request.overrides[0], "left out with --plan, which is already made")
        scenario, inputs, plan = read_plan(request.plan)
        secret = _secret(scenario)
        if np.any(plan.ledger > inputs.spent * (1 + 1e-9)) and request.ledger is None:
            raise InputError("--ledger", None, "given: this plan was made from what a ledger leaves")
    else:
        scenario = load_scenario(str(request.scenario), request.overrides)
        begun = None if folder is None else _begun(folder, scenario, request)
        if begun is not None:
            say(f"Going on with the run that was stopped in {request.out}.")
            return begun
        secret = _secret(scenario)
        inputs = build(scenario, secret)
        spent = None if request.ledger is None else spent_before(request.ledger, inputs)
        plan = make_plan(scenario, inputs, ledger=spent)
    own = folder is not None and plan.clips
    path = Path(request.ledger).resolve() if request.ledger else folder / "ledger.jsonl" if folder and own else None
    asked = to_toml(scenario)
    keep = request.keep_burn_in
    task = Task(scenario, inputs, plan, folder, path, 0, request.memory, asked, keep_burn_in=keep, secret=secret)
    if folder is not None and _holds_secret_samples(folder):
        why = "samples of a secret seed cannot be drawn again, and their losses add up with those of another run"
        raise InputError("--out", str(folder), f"another folder: {why} (--ledger keeps count of both)")
    if folder is not None and plan.clips:
        name = run_name(task.key, inputs.posterior, plan, scenario.sampler.chains)
        _refuse_noise_of(folder, task, name)
        if request.ledger is None and path is not None and path.exists():
            _set_aside(task, path, name, say)
    return task


def _holds_secret_samples(folder: Path) -> bool:
    """Whether a finished run with a secret seed is there."""
    scenario = folder / "scenario.toml"
    there = scenario.is_file() and (folder / "trace.nc").is_file()
    return there and 'seed = "secret"' in scenario.read_text(encoding="utf-8")


def _secret(scenario: Scenario) -> jax.Array | None:
    """A new key where the scenario's seed is secret: rounds that are added later have noise of their own."""
    return secret_key() if scenario.sampler.seed == "secret" else None


def _refuse_noise_of(folder: Path, task: Task, name: str) -> None:
    """Refuse the noise that another run of this folder had, whatever its promise and data were."""
    for path in sorted(folder.glob("ledger*.jsonl")):
        if noise_of_another_run(path, name, noise_name(task.key)):
            allowed = (
                "another one, or given with another --out where only one of the two is shown to others: "
                f"{path.name} has another run with the noise of this seed, and who sees both can take it away"
            )
            raise InputError("sampler.seed", task.scenario.sampler.seed, allowed)


def spent_before(path: str, inputs: Inputs, must_exist: bool = False) -> Any:
    """What devices have spent by a ledger, and are about to spend on whitening; None where it is yet to be begun."""
    if not Path(path).exists():
        if must_exist:
            raise InputError("--ledger", path, "a ledger that a run has written")
        return None
    try:
        ledger = Ledger(inputs.privacy, inputs.posterior.devices, subject=inputs.posterior.digest, path=path)
    except InputError as error:
        raise InputError("--ledger", error.given, error.allowed) from None
    paid = inputs.release is not None and ledger.rounds(inputs.release.name) > 0
    return ledger.spent if paid else ledger.spent + inputs.spent


def _set_aside(task: Task, path: Path, name: str, say: Say) -> None:
    """Keep the ledger of another run that used this folder; the same run again sends nothing new."""
    with suppress(ForeignLedgerError):
        ledger, release = _ledger_at(task, path), task.inputs.release
        if {run for run, _ in ledger.entries} <= {
            ledger.name(name),
            ledger.name("" if release is None else release.name),
        }:
            return
    kept = next(p for i in range(1, 10**6) if not (p := path.with_name(f"ledger-{i}.jsonl")).exists())
    move_ledger(path, kept)
    say(f"{path.parent} has the ledger of another run, kept as {kept.name}; --ledger spends from one ledger.")


def _resumed(request: Request) -> Task:
    for option, value in (
        ("scenario", request.scenario),
        ("--plan", request.plan),
        ("--out", request.out),
        ("--set", request.overrides),
        ("--ledger", request.ledger),
        ("--keep-burn-in", request.keep_burn_in),
    ):
        if value:
            raise InputError(option, value, "left out with --resume, which goes on with what a folder holds")
    folder = Path(os.path.expanduser(str(request.resume)))
    if _about(folder) is not None:
        if request.more is not None:
            raise InputError("--more", request.more, "left out until the run that was stopped is finished")
        return _stopped(folder, request.memory)
    if (folder / "federation").exists():
        raise InputError("--resume", str(folder), "a folder of `wflmc run`; `wflmc federate` goes on with a federation")
    if not (folder / "summary.json").exists():
        raise InputError("--resume", str(folder), "a folder that `wflmc run --out` has written")
    if request.more is None or request.more < 1:
        raise InputError("--more", request.more, "a number of rounds above 0: the run in this folder is finished")
    scenario, inputs, plan = _plan_in(folder)
    kept = _summary(folder)["ledger"]
    path = None if kept is None else folder / kept["file"]
    task = Task(scenario, inputs, plan, folder, path, plan.rounds, request.memory, "", secret=_secret(scenario))
    ledger = _open_ledger(task)
    spent = plan.ledger if ledger is None else ledger.spent
    try:
        longer = extend_plan(scenario, inputs, plan, request.more, spent)
    except InputError as error:
        if error.key == "--ledger":
            raise InputError("--more", request.more, f"left out: {error.given} is not {error.allowed}") from None
        raise
    return task._replace(scenario=longer[0], plan=longer[1])


def _plan_in(folder: Path, key: jax.Array | None = None) -> tuple[Scenario, Inputs, Plan]:
    try:
        return read_plan(folder / "plan.json", key)
    except InputError as error:
        raise InputError(error.key.replace("--plan", "--resume"), error.given, error.allowed) from None


def _about(folder: Path) -> dict[str, Any] | None:
    """What a folder says of a run that was stopped in it; None where there is none."""
    about = folder / ".checkpoint" / "about.json"
    if not about.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(about.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("start", "memory", "ledger", "asked", "keep_burn_in")}
    except (ValueError, KeyError, TypeError):
        raise InputError("--resume", str(about), "as wflmc wrote it") from None


def _stopped(folder: Path, memory: float | None) -> Task:
    """The run that was stopped in a folder."""
    settings = _about(folder)
    assert settings is not None
    kept = folder / ".checkpoint" / SECRET
    secret = secret_key(kept.read_bytes()) if kept.exists() else None
    scenario, inputs, plan = _plan_in(folder / ".checkpoint", secret)
    if secret is None and scenario.sampler.seed == "secret":
        raise InputError("--resume", str(kept), "there: without it the noise of rounds that were sent is not known")
    ledger = None if settings["ledger"] is None else folder / settings["ledger"]
    limit = memory or settings["memory"]
    start, asked, keep = settings["start"], settings["asked"], settings["keep_burn_in"]
    return Task(scenario, inputs, plan, folder, ledger, start, limit, asked, True, keep, secret)


def _begun(folder: Path, scenario: Scenario, request: Request) -> Task | None:
    """The run that was stopped in a folder, if it is the very one that is asked for."""
    settings = _about(folder)
    if settings is None or settings["asked"] != to_toml(scenario):
        return None
    path = "ledger.jsonl" if request.ledger is None else str(Path(request.ledger).resolve())
    same = settings["ledger"] in (None, path) and request.memory in (None, settings["memory"])
    same = same and settings["keep_burn_in"] == request.keep_burn_in
    return _stopped(folder, request.memory) if same else None


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        ledger = found["ledger"]
        return {
            "clip_rate": {"burn_in": found["clip_rate"]["burn_in"]},
            "ledger": None if ledger is None else {"file": str(ledger["file"]), "chain": str(ledger["chain"])},
        }
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError("--resume", str(folder / "summary.json"), "as wflmc wrote it") from None


def _ledger_at(task: Task, path: Path) -> Ledger:
    posterior, plan = task.inputs.posterior, task.plan
    return Ledger(plan.privacy, plan.devices, subject=posterior.digest, enforced=plan.enforced, path=path)


def _open_ledger(task: Task) -> Ledger | None:
    """The ledger to charge; one that does not hold what this folder's earlier run has spent is refused."""
    if task.ledger is None:
        return None
    if not task.start:
        return _ledger_at(task, task.ledger)
    if not task.ledger.exists():
        raise InputError("ledger", str(task.ledger), "the ledger of the run in this folder; it is missing")
    ledger = _ledger_at(task, task.ledger)
    assert task.folder is not None
    if _summary(task.folder)["ledger"]["chain"] not in ledger.chains:
        raise InputError("ledger", str(task.ledger), "the ledger of the run in this folder; rounds are missing from it")
    return ledger


def ledger_document(ledger: Ledger, task: Task) -> dict[str, Any]:
    assert ledger.path is not None
    folder = None if task.folder is None else task.folder.resolve()
    inside = folder is not None and ledger.path.resolve().is_relative_to(folder)
    share = ledger.spent / ledger.budget
    return {
        "file": str(ledger.path.resolve().relative_to(folder) if inside and folder else ledger.path.resolve()),
        "rounds": len(ledger.entries),
        "chain": ledger.chain,
        "spent": ledger.spent.tolist(),
        "share_of_budget": float(share.max()) if np.isfinite(ledger.budget).any() else None,
    }


def _begin(task: Task, document: dict[str, Any], before: Trace | None) -> None:
    """Write down what is about to be run, in place of another run that was stopped here."""
    folder = task.checkpoint
    assert folder is not None
    inside = task.ledger is not None and task.ledger.parent == task.folder
    ledger = None if task.ledger is None else task.ledger.name if inside else str(task.ledger.resolve())
    about = {"start": task.start, "memory": task.memory, "ledger": ledger, "asked": task.asked}
    about["keep_burn_in"] = task.keep_burn_in
    if not task.resumed and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    if task.secret is not None:
        with replacing(folder / SECRET, mode=0o600) as file:
            file.write(np.asarray(jax.random.key_data(task.secret)).tobytes())
    write_text(folder / "plan.json", to_json(document))
    if before is not None and before.velocity is not None:
        with replacing(folder / VELOCITY) as file:
            np.save(file, before.velocity)
    write_text(folder / "about.json", to_json(about))


def _sample(task: Task, before: Trace | None, ledger: Ledger | None, scratch: Path, bar: ProgressBar) -> Trace:
    plan, chains = task.plan.rest(task.start) if task.start else task.plan, task.scenario.sampler.chains
    samples = 4.0 * chains * (plan.rounds - (0 if task.keep_burn_in else plan.burn_in)) * plan.dim
    # Samples that would not leave room for anything else go to a file at once.
    large = task.checkpoint is None and samples > (task.memory or default_memory()) / 2
    with bar("sampling", plan.rounds) as advance:
        return sample(
            task.key,
            task.inputs.posterior,
            plan,
            chains=chains,
            keep_burn_in=task.keep_burn_in,
            memory=task.memory,
            store=scratch / "theta.npy" if large else None,
            initial=None if before is None else _last(before),
            ledger=ledger,
            checkpoint=task.checkpoint,
            progress=lambda done, work: advance(plan.rounds * done / work),
        )


def _last(before: Trace) -> Any:
    """Where the chains were when they stopped, with their velocities if they have any."""
    theta = before.theta[:, -1]
    return theta if before.velocity is None else np.concatenate([theta, before.velocity], axis=1)


def _earlier(task: Task) -> Trace:
    """The samples that the folder holds already."""
    import h5netcdf

    assert task.folder is not None
    with h5netcdf.File(task.folder / "trace.nc") as file:
        theta, stats = file["posterior"]["theta"][...], file["sample_stats"]
        rate = stats["clip_rate"][...]
        velocity = stats["last_velocity"][...] if "last_velocity" in stats else None
        early_samples = early_rate = None
        if "warmup_posterior" in file:
            early_samples = file["warmup_posterior"]["theta"][...]
            early_rate = file["warmup_sample_stats"]["clip_rate"][...]
    early = _summary(task.folder)["clip_rate"]["burn_in"]
    plan = task.plan
    kept = task.start - plan.burn_in
    theta, rate = theta[:, :kept], rate[:, :kept]  # a crash at the very end may have left the new ones too
    if task.resumed and velocity is not None:  # and their velocity
        velocity = np.load(task.folder / ".checkpoint" / VELOCITY)
    if theta.shape != (task.scenario.sampler.chains, kept, plan.dim) or (velocity is None) != (plan.friction is None):
        raise InputError("--resume", str(task.folder), "a folder whose trace.nc belongs to its plan.json")
    return Trace(theta, rate, np.full(plan.burn_in, early or 0.0), early_samples, (plan,), velocity, early_rate)


def _joined(before: Trace, after: Trace, plan: Plan) -> Trace:
    return Trace(
        np.concatenate([before.theta, after.theta], axis=1),
        np.concatenate([before.clip_rate, after.clip_rate], axis=1),
        before.burn_in_clip_rate,
        before.warmup,
        (plan,),
        after.velocity,
        before.warmup_clip_rate,
        after.key,
    )


def write_run(task: Task, trace: Trace, document: dict[str, Any], summary: dict[str, Any]) -> list[Path]:
    """Write the files of a run: all of them have their room on the disk before the first takes its place."""
    folder, scenario = task.folder, task.scenario
    if folder is None:
        return []
    written = [folder / name for name in ("trace.nc", "scenario.toml", "plan.json", "summary.json")]
    with ExitStack() as stack:
        for path, text in zip(written[1:], (to_toml(scenario), to_json(document), to_json(summary)), strict=True):
            file = stack.enter_context(replacing(path))
            file.write(text.encode())
            file.flush()
        about: dict[str, Any] = {"privacy": OWNER_ONLY, "scenario": to_toml(scenario)}
        if scenario.sampler.seed == "secret":
            trace = replace(trace, key=None)
        else:
            about["seed"] = scenario.sampler.seed
        trace.save(written[0], about)
    inside = task.ledger is not None and task.ledger.resolve().parent == folder.resolve()
    return [*written, task.ledger] if inside and task.ledger is not None else written
