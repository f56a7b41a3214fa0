"""A run folder: written whole, and read again part by part; a file that is damaged or another run's is refused by name.

Beside the files of the run, `digests.json` has the SHA-256 of each. It is for the owner of the data, as all of the
folder is.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.planning import Plan, policy_named
from wflmc.posterior import Posterior
from wflmc.privacy import Ledger
from wflmc.runs.documents import PlanFile, SummaryFile, read_document
from wflmc.runs.planning import read_plan
from wflmc.sampling import Trace
from wflmc.scenario import OWNER_ONLY, Inputs, Scenario, build_privacy, load_scenario, to_json, to_toml, validate
from wflmc.support.errors import InputError
from wflmc.support.storage import replacing

DIGESTS = "digests.json"
QUOTES = "'\""
TRACE_BYTES = 2**28
"""Of samples that are read; of longer traces every so many-th."""


def write_run(
    folder: Path, scenario: Scenario, trace: Trace, plan: dict[str, Any], summary: dict[str, Any], ledger: Path | None
) -> list[Path]:
    """Write the files of a run: all of them have their room on the disk before the first takes its place.

    Args:
        plan, summary: the contents of plan.json and summary.json.
        ledger: that was charged; where it is in the folder it is one of the files that are returned.
    """
    texts = {"scenario.toml": to_toml(scenario), "plan.json": to_json(plan), "summary.json": to_json(summary)}
    attributes: dict[str, Any] = {"privacy": OWNER_ONLY, "scenario": texts["scenario.toml"]}
    if scenario.sampler.seed == "secret":
        trace = replace(trace, key=None)
    else:
        attributes["seed"] = scenario.sampler.seed
    with ExitStack() as stack:
        digests = stack.enter_context(replacing(folder / DIGESTS))
        for name, text in texts.items():
            file = stack.enter_context(replacing(folder / name))
            file.write(text.encode())
            file.flush()
        trace.save(folder / "trace.nc", attributes)
        hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        digests.write(to_json({"trace.nc": _sha256(folder / "trace.nc"), **hashes}).encode())
    files = [folder / name for name in ("trace.nc", *texts, DIGESTS)]
    return files if ledger is None or ledger.resolve().parent != folder.resolve() else [*files, ledger]


def ledger_document(ledger: Ledger | None, folder: Path | None) -> dict[str, Any] | None:
    """Return `ledger` of summary.json: its file, relative to the run folder if it is inside, and what it counts."""
    if ledger is None or ledger.path is None:
        return None
    path, home = ledger.path.resolve(), None if folder is None else folder.resolve()
    return {
        "file": str(path.relative_to(home) if home is not None and path.is_relative_to(home) else path),
        "rounds": len(ledger.entries),
        "chain": ledger.chain,
        "spent": ledger.spent.tolist(),
        "share_of_budget": float((ledger.spent / ledger.budget).max()) if np.isfinite(ledger.budget).any() else None,
    }


class Draws(NamedTuple):
    """Samples of trace.nc."""

    theta: NDArray[np.float64]
    """[chain, draw, m]."""
    every: int
    """1, or that only every so many-th draw was read."""
    early: NDArray[np.float64] | None = None
    """[chain, round, m] of burn-in, where it was kept."""


class Rebuilt(NamedTuple):
    """What plan.json gives again when the data are still there."""

    inputs: Inputs
    plan: Plan


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder; a part beside the plan is None where its file is missing."""

    folder: Path
    stopped: bool
    """Whether rounds are still to be run."""
    plan: PlanFile
    summary: SummaryFile | None
    scenario: Scenario
    scenario_text: str | None
    draws: Draws | None
    ledger: Ledger | None
    rebuilt: Rebuilt | None
    not_rebuilt: str
    """Why not."""

    @property
    def posterior(self) -> Posterior | None:
        """The posterior that was sampled, where its data are still there.

        It is None where devices brought their own data: the scenario's stand in for them,
        and their posterior is another one.
        """
        if self.rebuilt is None or self.plan.own_data:
            return None
        return self.rebuilt.inputs.posterior

    @property
    def releases(self) -> int:
        """Chains whose losses the numbers of privacy add up: more than one where real devices paid for several."""
        federation = None if self.summary is None else self.summary.federation
        return 1 if federation is None else federation.releases

    @property
    def ideal(self) -> bool:
        """Whether there is no channel between devices and server."""
        return not policy_named(self.scenario.policy.power).wireless


def read_run(folder: Path) -> Run:
    """Return everything in the folder of a run, finished or stopped.

    Raises:
        InputError: a file is damaged, or of another run.
    """
    stopped, results = (folder / ".checkpoint" / "plan.json").exists(), folder / "summary.json"
    unfinished = stopped and not results.exists()
    _check_digests(folder, stopped)
    path = (folder / ".checkpoint" if unfinished else folder) / "plan.json"
    plan = read_document(path, PlanFile, "report")
    summary = read_document(results, SummaryFile, "report") if results.exists() else None
    scenario, text = _read_scenario(folder, plan)
    draws = None if unfinished else _read_draws(folder / "trace.nc", plan)
    ledger = _read_ledger(folder, summary, scenario)
    return Run(folder, stopped, plan, summary, scenario, text, draws, ledger, *_rebuild(path, ledger))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in what goes wrong while it is read."""
    try:
        yield
    except Exception as error:  # a file that is damaged can fail in a dozen ways
        reason = str(error).strip(QUOTES) or "it is damaged"
        raise InputError("report", str(path), f"as wflmc wrote it ({reason})") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_digests(folder: Path, stopped: bool) -> None:
    """Refuse a file that is not as the run wrote it; earlier versions have left no digests."""
    if not (folder / DIGESTS).exists():
        return
    with _reading(folder / DIGESTS):
        digests = dict(json.loads((folder / DIGESTS).read_text(encoding="utf-8")))
    for name, digest in digests.items():
        path = folder / name
        if path.exists() and _sha256(path) != digest:
            hint = f"; `wflmc run --resume {folder}` may mend it" * stopped
            raise InputError("report", str(path), f"the file that its run wrote: the hash in {DIGESTS} differs{hint}")


def _read_scenario(folder: Path, plan: PlanFile) -> tuple[Scenario, str | None]:
    """Return the resolved scenario and its text; from the plan where the file is missing."""
    path = folder / "scenario.toml"
    if path.exists():
        with _reading(path):
            return load_scenario(path), path.read_text(encoding="utf-8")
    return validate(plan.scenario, f"{folder / 'plan.json'}: "), None


def _rebuild(path: Path, ledger: Ledger | None) -> tuple[Rebuilt | None, str]:
    try:
        _, inputs, plan = read_plan(path)
    except (InputError, OSError) as error:  # the data have gone or changed: the rest of the page can do without
        return None, str(error)
    if ledger is not None and not ledger.is_about(inputs.posterior.digest):
        return None, "The data have changed since: they are not those that the ledger is about."
    return Rebuilt(inputs, plan), ""


def _read_draws(path: Path, plan: PlanFile) -> Draws | None:
    import h5netcdf

    if not path.exists():
        return None
    with _reading(path), h5netcdf.File(path) as file:
        if "predictions/probability" in file:
            return None
        theta, warmup = file["posterior/theta"], file.get("warmup_posterior/theta")
        chains, draws, dim = theta.shape
        draws = min(draws, plan.constants.samples)  # a crash may have left more
        if (draws, dim) != (plan.constants.samples, plan.constants.dim):
            raise ValueError("its samples are not those of plan.json")
        every = min(draws, max(1, -(-(4 * chains * draws * dim) // TRACE_BYTES)))
        early = None if warmup is None or not warmup.shape[1] else np.asarray(warmup[:, ::every], dtype=float)
        return Draws(np.asarray(theta[:, :draws:every], dtype=float), every, early)


def _read_ledger(folder: Path, summary: SummaryFile | None, scenario: Scenario) -> Ledger | None:
    """Return the ledger, every line of it verified; the run has to be in it."""
    part = None if summary is None else summary.ledger
    path = folder / ("ledger.jsonl" if part is None else part.file)
    if not path.is_file():
        return None
    with _reading(path):
        with path.open(encoding="utf-8") as file:
            devices = json.loads(file.readline())["devices"]
        ledger = Ledger(build_privacy(scenario), devices, path=path, read_only=True)
        if part is not None and part.chain not in ledger.chains:
            raise ValueError("rounds are missing that summary.json counts, or it is another run's ledger")
    return ledger
