"""A run folder: written completely or not at all, and read again part by part.

A file that is damaged, or belongs to another run, is refused by name.

Beside the files of the run, `digests.json` has the SHA-256 of each. It is for the owner
of the data, as all of the folder is.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.planning import Plan, policy_named
from wflmc.planning.plan import PLAN_FILE
from wflmc.posterior import Posterior
from wflmc.privacy import Ledger
from wflmc.runs.documents import JsonObject, PlanFile, SummaryFile, read_document
from wflmc.runs.planning import (
    PLAN_DOCUMENT,
    SCENARIO_FILE,
    check_scenario_file,
    plan_inputs,
    read_plan_file,
)
from wflmc.sampling import Trace
from wflmc.scenario import (
    OWNER_ONLY,
    Inputs,
    Scenario,
    build_privacy,
    file_digests,
    load_scenario,
    to_json,
    to_toml,
    validate,
)
from wflmc.support.errors import InputError
from wflmc.support.storage import replacing

PRIOR_FILE = "prior.npz"
"""A prior by public rows: its mean θ₀[m]; its standard deviation, and whether that is of
`parameters` or `whitened` coordinates; the name of the file of these rows, and its
SHA-256."""
DIGESTS = "digests.json"
"""The file with the SHA-256 of all others."""
PRIOR_KEY = "posterior.prior_from"
QUOTES = "'\""
"""Characters around the message of a `KeyError`."""
TRACE_BYTES = 2**28
"""Memory of the draws that are read, in float32; longer traces are thinned."""
FLOAT32_BYTES = 4
"""Bytes of a number in trace.nc."""


def write_run(
    folder: Path,
    *,
    scenario: Scenario,
    trace: Trace,
    plan: Plan,
    plan_document: Mapping[str, object],
    summary: Mapping[str, object],
    prior_mean: NDArray[np.float64] | None,
    ledger: Path | None,
) -> list[Path]:
    """Write the files of a run.

    Plan, texts and trace are written before the first of them takes its place, so that
    a disk which is too full for them leaves the folder as it was. The key of a secret
    seed is left out of the trace.

    Args:
        folder: of the run.
        scenario: as resolved.
        trace: the samples.
        plan: that was run.
        plan_document: the content of plan.json.
        summary: the content of summary.json.
        prior_mean: θ₀[m] as it was fitted to public rows; None for a prior around zero.
        ledger: that was charged.

    Returns:
        The files, among them the ledger where it is in the folder.
    """
    texts = _plan_texts(scenario, plan_document) | {"summary.json": to_json(summary)}
    attributes: JsonObject = {
        "privacy": OWNER_ONLY,
        "scenario": texts[SCENARIO_FILE],
    }
    if scenario.sampler.seed == "secret":
        trace = replace(trace, key=None)
    else:
        attributes["seed"] = scenario.sampler.seed
    with ExitStack() as stack:
        # The stack renames in reverse. After a crash in between, digests.json is still
        # that of earlier files, and `read_run` refuses the new ones.
        digests = stack.enter_context(replacing(folder / DIGESTS))
        hashes = _write_plan_and_texts(stack, folder, plan, texts)
        trace_path = folder / "trace.nc"
        trace.save(trace_path, attributes)
        hashes |= _write_prior(stack, folder, scenario, prior_mean)
        hashes = {"trace.nc": _sha256(trace_path), **hashes}
        digests.write(to_json(hashes).encode())
    files = [folder / name for name in (*hashes, DIGESTS)]
    if ledger is not None and ledger.resolve().parent == folder.resolve():
        files.append(ledger)
    return files


def write_plan(
    folder: Path, *, scenario: Scenario, plan: Plan, plan_document: Mapping[str, object]
) -> list[Path]:
    """Write a plan that has not been run, as `wflmc plan --out` does.

    The files of a plan that is there already are replaced together.

    Args:
        folder: where plan.npz, plan.json and scenario.toml go.
        scenario: as resolved.
        plan: the plan.
        plan_document: the content of plan.json.

    Returns:
        The files.

    Raises:
        InputError: the folder has a run, whose plan would be replaced.
    """
    refuse_run(folder)
    texts = _plan_texts(scenario, plan_document)
    with ExitStack() as stack:
        hashes = _write_plan_and_texts(stack, folder, plan, texts)
    return [folder / name for name in hashes]


def refuse_run(folder: Path) -> None:
    """Refuse a folder that has a run, whose plan must not be replaced.

    A run is there if any of its files is, or its checkpoint: draws and losses are
    explained by the plan beside them. A folder with a plan alone passes, and so does
    one that does not exist.

    Args:
        folder: where a plan is to be written.

    Raises:
        InputError: if there is a run, finished or stopped.
    """
    for name in ("trace.nc", "summary.json", ".checkpoint"):
        if (folder / name).exists():
            requirement = "another folder: the run in it has its own plan"
            raise InputError("--out", str(folder), requirement)


def _plan_texts(
    scenario: Scenario, plan_document: Mapping[str, object]
) -> dict[str, str]:
    """Return the text files of a plan, by name."""
    return {SCENARIO_FILE: to_toml(scenario), PLAN_DOCUMENT: to_json(plan_document)}


def _write_plan_and_texts(
    stack: ExitStack, folder: Path, plan: Plan, texts: Mapping[str, str]
) -> dict[str, str]:
    """Write plan.npz and text files, which take their places when the stack is closed.

    Returns:
        The SHA-256 of every file, by name.
    """
    file = stack.enter_context(replacing(folder / PLAN_FILE))
    plan.write(file)
    file.flush()
    hashes = {PLAN_FILE: _sha256(Path(file.name))}
    for name, text in texts.items():
        file = stack.enter_context(replacing(folder / name))
        file.write(text.encode())
        file.flush()
        hashes[name] = hashlib.sha256(text.encode()).hexdigest()
    return hashes


def _write_prior(
    stack: ExitStack,
    folder: Path,
    scenario: Scenario,
    prior_mean: NDArray[np.float64] | None,
) -> dict[str, str]:
    """Write the prior of public rows, as `_write_plan_and_texts` writes its files.

    Without one, that of an earlier run in the same folder goes.
    """
    section = scenario.posterior
    if prior_mean is None:
        (folder / PRIOR_FILE).unlink(missing_ok=True)
        return {}
    file = stack.enter_context(replacing(folder / PRIOR_FILE))
    np.savez(
        file,
        mean=prior_mean,
        std=section.prior_std,
        prior_on=section.prior_on,
        source=Path(section.prior_from).name,
        sha256=file_digests(scenario, [PRIOR_KEY]).get(PRIOR_KEY, ""),
    )
    file.flush()
    return {PRIOR_FILE: _sha256(Path(file.name))}


def ledger_document(ledger: Ledger | None, folder: Path | None) -> JsonObject | None:
    """Return `ledger` of summary.json: its file, and all that the ledger counts.

    `rounds` and `spent` count every run in the ledger, those before this one included.
    `chain` is the hash of the last line, which depends on all lines before it, so that
    `_read_ledger` recognises a ledger that lost rounds. The keys are those of
    `LedgerPart`.

    Args:
        ledger: that was charged; None where there is none.
        folder: of the run. A ledger inside it is named by its relative path.

    Returns:
        Plain data, with the largest fraction of a device's budget that is spent (None
        where no budget is finite); None for no ledger, or one without a file.
    """
    if ledger is None or ledger.path is None:
        return None
    path = ledger.path.resolve()
    if folder is not None and path.is_relative_to(folder.resolve()):
        path = path.relative_to(folder.resolve())
    fraction = None
    if np.isfinite(ledger.budget).any():
        fractions = ledger.spent / ledger.budget
        fraction = float(fractions.max())
    return {
        "file": str(path),
        "rounds": len(ledger.entries),
        "chain": ledger.last_hash,
        "spent": ledger.spent.tolist(),
        "share_of_budget": fraction,
    }


class Draws(NamedTuple):
    """Samples of trace.nc."""

    theta: NDArray[np.float64]
    """[chain, draw, m]."""
    every: int
    """The step between draws that were read: 1 where all of them were."""
    early: NDArray[np.float64] | None = None
    """[chain, round, m] of burn-in, where it was kept, thinned by the same step."""


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder; a part beside the plan is None where its file is missing."""

    folder: Path
    stopped: bool
    """Whether rounds are still to be run."""
    plan: PlanFile
    """plan.json."""
    saved_plan: Plan | None
    """plan.npz."""
    summary: SummaryFile | None
    scenario: Scenario
    scenario_text: str | None
    draws: Draws | None
    ledger: Ledger | None
    inputs: Inputs | None
    """Posterior, link and privacy, rebuilt where the data are still there."""
    no_inputs: str
    """Why there are no inputs; empty where there are."""

    @property
    def posterior(self) -> Posterior | None:
        """Return the posterior that was sampled, where its data are still there.

        It is None where the data are gone or have changed, and where devices brought
        their own data: the scenario's stand in for them, and their posterior is another
        one.
        """
        if self.inputs is None or self.plan.own_data:
            return None
        return self.inputs.posterior

    @property
    def releases(self) -> int:
        """Return how many chains the numbers of privacy cover.

        It is more than 1 only for federations whose real devices paid for several
        chains. The chains of a simulation are replicas of one experiment, and its
        numbers are those of any single one.
        """
        federation = None if self.summary is None else self.summary.federation
        return 1 if federation is None else federation.releases

    @property
    def ideal(self) -> bool:
        """Return whether there is no channel between devices and server.

        So it is for the policies "noiseless" and "noiseless-dp", which the paper
        compares with: figures then have no transmit power to show.
        """
        return not policy_named(self.scenario.policy.power).wireless


def read_run(folder: Path) -> Run:
    """Return everything in the folder of a run, finished or stopped.

    Files are compared with their digests and with one another first. Of a run that was
    stopped before its end, the plan is that of the checkpoint, and there are no draws.
    Missing data do not matter: the run then has no inputs.

    Args:
        folder: that `wflmc run --out` or `wflmc federate` has written.

    Returns:
        The plan, and every other part whose file is there.

    Raises:
        InputError: a file is damaged, or of another run.
    """
    summary_path = folder / "summary.json"
    stopped = (folder / ".checkpoint" / "plan.json").exists()
    unfinished = stopped and not summary_path.exists()
    _check_digests(folder, stopped)
    plan_folder = folder / ".checkpoint" if unfinished else folder
    view = plan_folder / PLAN_DOCUMENT
    plan = read_document(view, PlanFile, "report")
    saved_plan = _read_saved_plan(view.with_name(PLAN_FILE), plan)
    summary = _read_summary(summary_path)
    scenario, text = _read_scenario(folder, plan)
    if not unfinished:
        planned = validate(plan.scenario, f"{view}: ")
        check_scenario_file(folder / SCENARIO_FILE, planned, "report")
    ledger = _read_ledger(folder, summary, scenario)
    inputs, no_inputs = _rebuild(view, plan, saved_plan, ledger)
    return Run(
        folder=folder,
        stopped=stopped,
        plan=plan,
        saved_plan=saved_plan,
        summary=summary,
        scenario=scenario,
        scenario_text=text,
        draws=None if unfinished else _read_draws(folder / "trace.nc", plan),
        ledger=ledger,
        inputs=inputs,
        no_inputs=no_inputs,
    )


def _read_summary(path: Path) -> SummaryFile | None:
    """Return summary.json; None where the file is missing."""
    return read_document(path, SummaryFile, "report") if path.exists() else None


def _read_saved_plan(path: Path, document: PlanFile) -> Plan | None:
    """Return the plan of plan.npz; None where the file is missing."""
    return read_plan_file(path, document, "report") if path.exists() else None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in what goes wrong while it is read."""
    try:
        yield
    except Exception as error:  # libraries raise many kinds of errors for damaged files
        reason = str(error).strip(QUOTES) or "it is damaged"
        raise InputError("report", str(path), f"as wflmc wrote it ({reason})") from None


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_digests(folder: Path, stopped: bool) -> None:
    """Refuse a file that is not as the run wrote it.

    Files that are missing pass, and so does a folder without digests.json, as that of a
    run that was stopped.
    """
    if not (folder / DIGESTS).exists():
        return
    with _reading(folder / DIGESTS):
        text = (folder / DIGESTS).read_text(encoding="utf-8")
        digests = dict(json.loads(text))
    hint = f"; `wflmc run --resume {folder}` may mend it" if stopped else ""
    requirement = f"the file that its run wrote: the hash in {DIGESTS} differs{hint}"
    for name, digest in digests.items():
        path = folder / name
        if path.exists() and _sha256(path) != digest:
            raise InputError("report", str(path), requirement)


def _read_scenario(folder: Path, plan: PlanFile) -> tuple[Scenario, str | None]:
    """Return the resolved scenario, and the text of scenario.toml.

    Where that file is missing, the scenario is that of plan.json, and there is no text.
    """
    path = folder / "scenario.toml"
    if path.exists():
        with _reading(path):
            return load_scenario(path), path.read_text(encoding="utf-8")
    return validate(plan.scenario, f"{folder / 'plan.json'}: "), None


def _rebuild(
    view: Path, document: PlanFile, plan: Plan | None, ledger: Ledger | None
) -> tuple[Inputs | None, str]:
    """Return the inputs of the plan, or why there are none: a page can do without."""
    if plan is None:
        return None, f"{PLAN_FILE} is missing."
    try:
        inputs = plan_inputs(plan, document, key=None, view=view, option="report")
    except InputError as error:  # the data have gone or changed
        return None, error.in_scenario
    except OSError as error:
        return None, str(error)
    if ledger is not None and not ledger.is_about(inputs.posterior.digest):
        reason = "they are not those that the ledger is about"
        return None, f"The data have changed since: {reason}."
    return inputs, ""


def _read_draws(path: Path, plan: PlanFile) -> Draws | None:
    """Return the draws of trace.nc, thinned to `TRACE_BYTES`.

    None where the file is missing, and for a run that kept predictions alone.
    """
    import h5netcdf

    if not path.exists():
        return None
    with _reading(path), h5netcdf.File(path) as file:
        if "predictions/probability" in file:
            return None
        theta = file["posterior/theta"]
        chains, draws, dim = theta.shape
        samples = plan.constants.samples
        # A crash while rounds were added may have left more.
        draws = min(draws, samples)
        if (draws, dim) != (samples, plan.constants.dim):
            raise ValueError("its samples are not those of plan.json")
        trace_bytes = FLOAT32_BYTES * chains * draws * dim
        needed_step = -(-trace_bytes // TRACE_BYTES)
        step = min(draws, max(1, needed_step))
        early = None
        warmup = file.get("warmup_posterior/theta")
        if warmup is not None and warmup.shape[1]:
            early = np.asarray(warmup[:, ::step], dtype=float)
        thinned = np.asarray(theta[:, :draws:step], dtype=float)
        return Draws(thinned, step, early)


def _read_ledger(
    folder: Path, summary: SummaryFile | None, scenario: Scenario
) -> Ledger | None:
    """Return the ledger, every line of it verified; None where its file is missing.

    The last line that summary.json has noted (`ledger_document`) must be in it.
    """
    part = None if summary is None else summary.ledger
    path = folder / ("ledger.jsonl" if part is None else part.file)
    if not path.is_file():
        return None
    with _reading(path):
        with path.open(encoding="utf-8") as file:
            devices = json.loads(file.readline())["devices"]
        ledger = Ledger(build_privacy(scenario), devices, path=path, read_only=True)
        if part is not None and part.chain not in ledger.line_hashes:
            raise ValueError(
                "rounds are missing that summary.json counts, or it is another run's "
                "ledger"
            )
    return ledger
