"""plan.json and summary.json as far as a page needs them, checked when they are read."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, model_validator


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
