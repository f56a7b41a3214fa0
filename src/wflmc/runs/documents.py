"""plan.json and summary.json: what is written to them, and what is read from them."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, model_validator

from wflmc.evaluation import Calibration, Evaluation, exact_ess, exact_w2_sq, has_law, reliability
from wflmc.planning import Plan
from wflmc.privacy import ACCOUNTANTS
from wflmc.privacy.reference import epsilon_by_dp_accounting
from wflmc.scenario import Inputs, Scenario
from wflmc.scenario.coverage import OWNER_ONLY
from wflmc.scenario.files import plain
from wflmc.version import __version__

SIMULATED = (
    "wflmc run simulates all devices in one process and protects nobody. Over a real radio the server hears only the "
    "noisy sum; over a digital link wflmc federate protects against everyone but the server's own process, or locally "
    "(--noise devices) at K times the loss."
)
"""Said of every run that is no federation."""


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
    adjacency: str = "replace"
    """Plans of earlier versions do not say it, and have no other."""
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


class Uncovered(BaseModel):
    """One item of `not_covered`."""

    name: str
    text: str
    published: bool


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
    not_covered: list[Uncovered] = []
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
    floor: float | None = None
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


class Cause(BaseModel):
    """One item of a diagnosis."""

    cause: str
    text: str


class Federation(BaseModel):
    """How the rounds went, where devices were a federation's."""

    noise: str
    secure_aggregation: Literal[False] = False
    """Earlier versions had it, and their ε was that of masked sums."""
    tolerate: int = 0
    asked: list[int]
    sent: list[int]
    absences: int


class SummaryFile(BaseModel):
    """summary.json, as far as a page needs it."""

    w2_sq: Distance | None
    exact_w2_sq: list[float | None] | None
    exact_ess_min: float | None
    rhat_max: float | None
    ess_min: float | None
    ess_tail_min: float | None
    frozen: list[int] = []
    clip_rate: ClipRate
    example_clip_rate: float | None = None
    accuracy: float | None
    ece: float | None
    nll: float | None
    brier: float | None
    rmse: float | None = None
    reliability: Bins | None
    epsilon_spent: float | None
    diagnosis: list[Cause] | None = None
    warnings: list[str]
    seconds: float
    ledger: LedgerPart | None
    federation: Federation | None = None


def plan_document(
    scenario: Scenario,
    inputs: Inputs,
    plan: Plan,
    seconds: float,
    compare: bool = False,
    causes: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What `wflmc plan --json` prints, plain data.

    Args:
        compare: whether dp-accounting is asked for its ε too.
        causes: the diagnosis, where one was made.
    """
    spent = plan.spent if plan.clips else None
    budget = plan.privacy.budget(plan.devices)
    document = {
        "constants": {
            "mu": plan.mu,
            "L": plan.L,
            "step_size": float(plan.step_size[-1]),
            "gamma": plan.gamma,
            "dim": plan.dim,
            "devices": plan.devices,
            "rounds": plan.rounds,
            "burn_in": plan.burn_in,
            "samples": plan.rounds - plan.burn_in,
            "initial_w2_sq": plan.initial_w2_sq,
            **({} if plan.friction is None else {"dynamics": plan.dynamics, "friction": plan.friction}),
        },
        "step_size": plan.step_size,
        "regime": plan.regime,
        "regime_share": plan.regime_share,
        "gain": plan.gain,
        "threshold": plan.threshold,
        "active_devices": plan.active_devices,
        "bound": plan.bound,
        "objective": plan.objective,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "max_round_noise": plan.noise_limit,
        "classes": getattr(inputs.posterior, "class_names", None),
        "coordinates": "parameters" if inputs.posterior.coordinates is None else "whitened",
        "whitening": None if inputs.release is None else inputs.release.summary(budget),
        "privacy": {
            "budget": float(budget.min()),
            "accountant": plan.privacy.accountant,
            "unit": plan.privacy.unit,
            "adjacency": plan.privacy.adjacency,
            "rounding": plan.rounding,
            "spent_max": None if spent is None else float(spent.max()),
            "epsilon_spent": plan.epsilon_spent,
            "epsilon_by": _epsilon_by(plan, compare),
            "epsilon_each": plan.privacy.epsilons_spent(plan.spent + plan.ledger) if plan.clips else None,
            "spent": spent,
            "spent_before": plan.ledger if plan.ledger.any() else None,
            "budgets": budget,
        },
        "exact_w2_sq": exact_w2_sq(inputs.posterior, plan) if has_law(inputs.posterior) else None,
        "exact_ess_min": float(exact_ess(inputs.posterior, plan).min()) if has_law(inputs.posterior) else None,
        "diagnosis": causes,
        "not_covered": [item._asdict() for item in inputs.not_covered],
        "warnings": list(plan.warnings),
        "seconds": seconds,
        "version": __version__,
        "scenario": _json_scenario(scenario),
        "files": _digests(_public_files(scenario)),
    }
    result: dict[str, Any] = plain(document)
    return result


def _epsilon_by(plan: Plan, compare: bool) -> dict[str, float | None] | None:
    """ε of the worst device by each accountant; None where nothing is promised."""
    privacy, total = plan.privacy, plan.spent + plan.ledger
    if not plan.clips or privacy.delta is None:
        return None
    found: dict[str, float | None] = {name: privacy.epsilon_spent(total, name) for name in ACCOUNTANTS}
    if compare:
        each = privacy.epsilons_spent(total, "exact")
        assert each is not None
        worst = int(np.argmax(each))
        delta = float(np.broadcast_to(privacy.delta, each.shape)[worst])
        rounds = np.append(plan.loss[:, worst], plan.ledger[worst])
        found.update(epsilon_by_dp_accounting(rounds[rounds > 0], delta))
    return found


def _public_files(scenario: Scenario) -> dict[str, str]:
    """Files by key that a plan has the hash of: not the data, as that would tell the last label to who knows the rest.

    What a plan takes from the data are its constants, which are compared; and a ledger knows the data of its runs.
    """
    return {"link.gains": scenario.link.gains} if scenario.link.fading == "file" else {}


def _digests(files: dict[str, str]) -> dict[str, str]:
    """SHA-256 of files, by key."""
    return {key: hashlib.sha256(Path(path).read_bytes()).hexdigest() for key, path in files.items()}


def _json_scenario(scenario: Scenario) -> dict[str, Any]:
    """The keys that were set; JSON cannot write infinity, and one key has a default that is not it."""
    content: dict[str, dict[str, Any]] = scenario.model_dump(exclude_unset=True, exclude_none=True)
    return {
        section: {
            key: "inf" if value == math.inf else value
            for key, value in values.items()
            if value != math.inf or key == "max_round_noise"
        }
        for section, values in content.items()
    }


def summary_document(
    evaluation: Evaluation,
    warnings: tuple[str, ...],
    seconds: float,
    causes: list[dict[str, Any]],
    beyond: list[dict[str, Any]],
) -> dict[str, Any]:
    """What `DIR/summary.json` holds, plain data.

    Args:
        warnings: of the plan, those that every run has last.
        causes: the diagnosis.
        beyond: `not_covered` of the plan.
    """
    distance, scores = evaluation.w2_sq, evaluation.scores
    document = {
        "owner_only": OWNER_ONLY,
        "w2_sq": None
        if distance is None
        else {
            "worst": distance.worst,
            "worst_se": distance.worst_se,
            "floor": distance.floor,
            "per_round": distance.per_round,
        },
        "exact_w2_sq": evaluation.exact_w2_sq,
        "exact_ess_min": evaluation.exact_ess_min,
        "rhat_max": evaluation.rhat_max,
        "ess_min": evaluation.ess_min,
        "ess_tail_min": evaluation.ess_tail_min,
        "frozen": list(evaluation.frozen),
        "clip_rate": evaluation.clip_rate,
        "example_clip_rate": evaluation.example_clip_rate,
        **evaluation.mean_scores,
        "reliability": reliability(scores)._asdict() if isinstance(scores, Calibration) else None,
        "epsilon_spent": evaluation.epsilon_spent,
        "adjacency": evaluation.adjacency,
        "diagnosis": causes,
        "not_covered": beyond,
        "warnings": [*evaluation.warnings, *warnings],
        "seconds": seconds,
    }
    result: dict[str, Any] = plain(document)
    return result
