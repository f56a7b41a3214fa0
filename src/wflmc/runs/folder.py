"""What the folder of a run holds, checked: each part is there, or None, and a damaged file is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from wflmc.errors import InputError
from wflmc.planning import Plan
from wflmc.privacy import Ledger
from wflmc.runs.documents import PlanFile, SummaryFile
from wflmc.runs.planning import read_plan
from wflmc.runs.together import ledger_of_run, one_scenario, summary_of_plan
from wflmc.scenario import Inputs, Scenario, load_scenario, validate
from wflmc.scenario.build import build_privacy

TRACE_BYTES = 2**28
"""Of samples that are looked at; of longer traces every so many-th."""


class Draws(NamedTuple):
    """Samples of trace.nc."""

    theta: NDArray[np.float64]
    """[chain, draw, m]."""
    every: int
    """1, or that only every so many-th draw was read."""
    shape: tuple[int, int] | None = None
    """Draws and m, as they are in the file."""
    early: NDArray[np.float64] | None = None
    """[chain, round, m] of burn-in, where it was kept."""
    scenario: str | None = None
    """The scenario that the trace says it is of, as TOML."""


class Rebuilt(NamedTuple):
    """What plan.json gives again when the data are still there."""

    inputs: Inputs
    plan: Plan


@dataclass(frozen=True, eq=False)
class Run:
    """A folder of `wflmc run --out`."""

    folder: Path
    stopped: bool
    """Whether rounds are still to be run."""
    plan: PlanFile | None
    summary: SummaryFile | None
    scenario: Scenario | None
    scenario_text: str | None
    draws: Draws | None
    ledger: Ledger | None
    rebuilt: Rebuilt | None
    not_rebuilt: str
    """Why not."""

    @property
    def ideal(self) -> bool:
        """Whether there is no channel between devices and server."""
        return self.scenario is not None and self.scenario.policy.power in ("noiseless", "noiseless-dp")

    @property
    def noise(self) -> Any:
        """σ²[S] of the update: the plan's, or more where devices added noise for absences; None without a plan."""
        if self.rebuilt is None:
            return None
        plan, federation = self.rebuilt.plan, None if self.summary is None else self.summary.federation
        if federation is None or not federation.tolerate:
            return plan.noise_variance
        sent = np.asarray(federation.sent)
        share = plan.noise_power / np.maximum(plan.active_devices - federation.tolerate, 1)
        scale = plan.scale * plan.active_devices / np.maximum(sent, 1)
        return np.maximum(plan.noise_variance, sent * share * (plan.kick * scale / plan.gain) ** 2)


Model = TypeVar("Model", bound=BaseModel)


def read_run(folder: Path) -> Run:
    """Everything in the folder of a run, finished or stopped."""
    stopped = (folder / ".checkpoint" / "plan.json").exists()
    unfinished = stopped and not (folder / "summary.json").exists()
    place = folder / ".checkpoint" if unfinished else folder
    plan, summary = _json(place / "plan.json", PlanFile), _json(folder / "summary.json", SummaryFile)
    scenario, told = _scenario(folder, plan)
    named = folder / (summary.ledger.file if summary is not None and summary.ledger is not None else "ledger.jsonl")
    draws = None if unfinished else _draws(folder / "trace.nc", plan)
    one_scenario(folder, plan, told, None if draws is None else draws.scenario, stopped)
    if plan is not None and draws is not None and draws.shape != (plan.constants.samples, plan.constants.dim):
        raise damaged(folder / "trace.nc", "its samples are not those of plan.json")
    summary_of_plan(folder / "summary.json", plan, summary, stopped)
    ledger = _ledger(named, scenario)
    ledger_of_run(folder, plan, summary, ledger, stopped)
    rebuilt, why = _rebuild(place / "plan.json", ledger) if plan is not None else (None, "plan.json is missing")
    return Run(
        folder,
        stopped,
        plan,
        summary,
        scenario,
        told,
        draws,
        ledger,
        rebuilt,
        why,
    )


def damaged(path: Path, why: str) -> InputError:
    """The error for a file that cannot be read as what it is."""
    return InputError("report", str(path), f"as wflmc wrote it ({why})")


def _json(path: Path, model: type[Model]) -> Model | None:
    if not path.exists():
        return None
    try:
        return model.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(path, f"{where + ': ' if where else ''}{first['msg']}") from None
    except OSError as error:
        raise damaged(path, str(error.strerror)) from None
    except (ValueError, RecursionError):
        raise damaged(path, "it is not JSON") from None


def _scenario(folder: Path, plan: PlanFile | None) -> tuple[Scenario | None, str | None]:
    """The resolved scenario and its text; from the plan where the file is missing."""
    path = folder / "scenario.toml"
    if path.exists():
        try:
            return load_scenario(path), path.read_text(encoding="utf-8")
        except InputError as error:
            raise damaged(path, str(error)) from None
    if plan is None:
        return None, None
    try:
        return validate(plan.scenario), None
    except InputError as error:
        raise damaged(folder / "plan.json", str(error)) from None


def _rebuild(path: Path, ledger: Ledger | None) -> tuple[Rebuilt | None, str]:
    try:
        _, inputs, plan = read_plan(path)
    except (InputError, OSError) as error:  # the data have gone or changed: the rest of the page can do without
        return None, str(error)
    if ledger is not None and not ledger.is_about(inputs.posterior.digest):
        return None, "The data have changed since: they are not those that the ledger is about."
    return Rebuilt(inputs, plan), ""


def _draws(path: Path, plan: PlanFile | None) -> Draws | None:
    import h5netcdf

    if not path.exists():
        return None
    try:
        with h5netcdf.File(path) as file:
            theta = file["posterior"]["theta"]
            chains, draws, dim = theta.shape
            draws = draws if plan is None else min(draws, plan.constants.samples)  # a crash may have left more
            every = max(1, -(-(4 * chains * draws * dim) // TRACE_BYTES))
            found = np.asarray(theta[:, : draws : min(every, draws)], dtype=float)
            early = _early(file, every)
            told = file["posterior"].attrs.get("scenario")
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise damaged(path, str(error).strip("'\"")) from None
    if not np.all(np.isfinite(found)):
        raise damaged(path, "a sample is not a finite number")
    return Draws(found, min(every, draws), (draws, dim), early, None if told is None else str(told))


def _early(file: Any, every: int) -> NDArray[np.float64] | None:
    """Samples of burn-in, as many of them as of the others."""
    if "warmup_posterior" not in file or not file["warmup_posterior"]["theta"].shape[1]:
        return None
    return np.asarray(file["warmup_posterior"]["theta"][:, ::every], dtype=float)


def _ledger(path: Path, scenario: Scenario | None) -> Ledger | None:
    """The ledger, every line of it verified."""
    if not path.is_file() or scenario is None:
        return None
    try:
        with path.open(encoding="utf-8") as file:
            devices = json.loads(file.readline())["devices"]
        return Ledger(build_privacy(scenario), devices, path=path, read_only=True)
    except InputError as error:
        raise damaged(path, error.allowed) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise damaged(path, "its first line is not that of a ledger") from None
