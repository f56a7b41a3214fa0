"""What the folder of a run holds, checked: each part is there, or None, and a damaged file is refused by name."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError, model_validator

from wflmc.errors import InputError
from wflmc.planning import Plan
from wflmc.privacy import Ledger
from wflmc.scenario import Inputs, Scenario, load_scenario, read_plan, validate
from wflmc.scenario.build import build_privacy

TRACE_BYTES = 2**28
"""Of samples that are looked at; of longer traces every so many-th."""


class Constants(BaseModel):
    """`constants` of plan.json."""

    mu: float
    L: float
    step_size: float
    gamma: float | None
    dim: int
    devices: int
    rounds: int
    burn_in: int
    samples: int
    initial_w2_sq: float | None
    friction: float | None = None


class Spending(BaseModel):
    """`privacy` of plan.json."""

    accountant: str
    unit: str
    spent_max: float | None
    epsilon_spent: float | None
    epsilon_by: dict[str, float | None] | None
    epsilon_each: list[float | None] | None
    spent: list[float] | None
    spent_before: list[float] | None
    budgets: list[float | None]

    @property
    def total(self) -> list[float] | None:
        """Loss of every device, that of earlier runs with it."""
        if self.spent is None or self.spent_before is None:
            return self.spent
        return [now + before for now, before in zip(self.spent, self.spent_before, strict=True)]

    @property
    def shares(self) -> list[float] | None:
        """Of its budget that every device spends; None where nothing is promised or nothing is clipped."""
        total = self.total
        if total is None or None in self.budgets:
            return None
        return [spent / (budget or 1.0) for spent, budget in zip(total, self.budgets, strict=True)]


class PlanFile(BaseModel):
    """plan.json, as far as a page needs it."""

    constants: Constants
    step_size: list[float]
    regime: str | None
    regime_share: dict[str, float]
    gain: list[float]
    threshold: list[float | None]
    active_devices: list[int]
    bound: list[float | None] | None
    objective: float | None
    gap: float | None
    coordinates: str
    whitening: dict[str, Any] | None
    privacy: Spending
    exact_w2_sq: list[float | None] | None
    exact_ess_min: float | None
    warnings: list[str]
    version: str
    scenario: dict[str, Any]

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        """One number for every round and for every device."""
        rounds = (self.step_size, self.gain, self.threshold, self.active_devices, self.bound, self.exact_w2_sq)
        devices = (self.privacy.spent, self.privacy.spent_before, self.privacy.budgets, self.privacy.epsilon_each)
        if any(each is not None and len(each) != self.constants.rounds for each in rounds):
            raise ValueError(f"not {self.constants.rounds} numbers, one for each round")
        if any(each is not None and len(each) != self.constants.devices for each in devices):
            raise ValueError(f"not {self.constants.devices} numbers, one for each device")
        return self


class Distance(BaseModel):
    """`w2_sq` of summary.json."""

    worst: float | None
    worst_se: float | None
    per_round: list[float | None]


class ClipRate(BaseModel):
    """`clip_rate` of summary.json."""

    burn_in: float | None
    samples: float | None


class Bins(BaseModel):
    """`reliability` of summary.json."""

    confidence: list[float | None]
    observed: list[float | None]
    share: list[float]

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if not len(self.confidence) == len(self.observed) == len(self.share):
            raise ValueError("bins of unlike number")
        return self


class LedgerPart(BaseModel):
    """`ledger` of summary.json."""

    file: str
    rounds: int
    chain: str
    spent: list[float]
    share_of_budget: float | None


class SummaryFile(BaseModel):
    """summary.json, as far as a page needs it."""

    w2_sq: Distance | None
    exact_w2_sq: list[float | None] | None
    exact_ess_min: float | None
    rhat_max: float | None
    ess_min: float | None
    ess_tail_min: float | None
    clip_rate: ClipRate
    example_clip_rate: float | None = None
    accuracy: float | None
    ece: float | None
    nll: float | None
    brier: float | None
    reliability: Bins | None
    epsilon_spent: float | None
    warnings: list[str]
    seconds: float
    ledger: LedgerPart | None


class Draws(NamedTuple):
    """Samples of trace.nc."""

    theta: NDArray[np.float64]
    """[chain, draw, m]."""
    every: int
    """1, or that only every so many-th draw was read."""


class Rebuilt(NamedTuple):
    """What plan.json gives again when the data are still there."""

    inputs: Inputs
    plan: Plan


@dataclass(frozen=True)
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


Model = TypeVar("Model", bound=BaseModel)


def read_run(folder: Path) -> Run:
    """Everything in the folder of a run, finished or stopped."""
    stopped = (folder / ".checkpoint" / "plan.json").exists()
    unfinished = stopped and not (folder / "summary.json").exists()
    place = folder / ".checkpoint" if unfinished else folder
    plan, summary = _json(place / "plan.json", PlanFile), _json(folder / "summary.json", SummaryFile)
    scenario, told = _scenario(folder, plan)
    rebuilt, why = _rebuild(place / "plan.json") if plan is not None else (None, "plan.json is missing")
    named = folder / (summary.ledger.file if summary is not None and summary.ledger is not None else "ledger.jsonl")
    return Run(
        folder,
        stopped,
        plan,
        summary,
        scenario,
        told,
        None if unfinished else _draws(folder / "trace.nc", plan),
        _ledger(named, scenario),
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


def _rebuild(path: Path) -> tuple[Rebuilt | None, str]:
    try:
        _, inputs, plan = read_plan(path)
    except (InputError, OSError) as error:  # the data have gone or changed: the rest of the page can do without
        return None, str(error)
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
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise damaged(path, str(error).strip("'\"")) from None
    if plan is not None and (draws, dim) != (plan.constants.samples, plan.constants.dim):
        raise damaged(path, "its samples are not those of plan.json")
    if not np.all(np.isfinite(found)):
        raise damaged(path, "a sample is not a finite number")
    return Draws(found, min(every, draws))


def _ledger(path: Path, scenario: Scenario | None) -> Ledger | None:
    """The ledger, every line of it verified, on a copy: to look at it must not change it."""
    if not path.is_file() or scenario is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="wflmc-") as scratch:
            copy = Path(shutil.copy(path, scratch))
            with copy.open(encoding="utf-8") as file:
                header = json.loads(file.readline())
            return Ledger(build_privacy(scenario), header["devices"], subject=header["subject"], path=copy)
    except InputError as error:
        raise damaged(path, error.allowed) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise damaged(path, "its first line is not that of a ledger") from None
