"""plan.json and summary.json: one model of each, for those who write them and those who read them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from wflmc.dynamics import Dynamics, from_constants
from wflmc.evaluation import Calibration, Evaluation, ExactLaw, exact_law, reliability
from wflmc.planning import Plan
from wflmc.planning.resources import channel_uses, transmit_energy
from wflmc.posterior.base import Predicts
from wflmc.privacy.accountants import ACCOUNTANTS, epsilon_by_dp_accounting
from wflmc.scenario import OWNER_ONLY, Inputs, NotCovered, Scenario, file_digests, plain
from wflmc.support.errors import InputError
from wflmc.support.notices import Notice, NoticeCode, codes, texts
from wflmc.version import __version__

JsonObject = dict[str, Any]
"""Plain data with named values, as in JSON."""
SIMULATED = Notice(
    NoticeCode.SIMULATED,
    "wflmc run simulates all devices in one process and protects nobody. Over a real radio the server receives only "
    "the noisy sum; over a digital link wflmc federate protects against everyone but the server's own process, or "
    "locally (--noise devices) at K times the loss.",
)
"""Given for every run that is no federation."""
PUBLIC_FILES = ("link.gains",)
"""Keys of files that plan.json has the hash of: not the data, as that would tell the last label to who knows the rest.

What a plan takes from the data are its constants, which are compared; and a ledger knows the data of its runs.
"""


BY_ROUND = ("step_size", "gain", "threshold", "active_devices", "bound", "exact_w2_sq")
"""Lists of plan.json with one number for every round."""


def _check_bins(bins: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """Refuse a reliability diagram without a number for every bin that has examples."""
    parts = [bins.get(name, []) for name in ("share", "confidence", "observed")]
    if len({len(part) for part in parts}) > 1 or None in parts[0]:
        raise ValueError("bins without share, confidence and observed")
    for share, confidence, observed in zip(*parts, strict=True):
        if share and None in (confidence, observed):
            raise ValueError("a bin with examples, but without confidence or observed")
    return bins


def _check_causes(causes: list[JsonObject]) -> list[JsonObject]:
    """Refuse causes without their sentence."""
    if not all(isinstance(cause.get("text"), str) for cause in causes):
        raise ValueError("a cause without text")
    return causes


def _check_warnings(warnings: list[str], codes: list[str]) -> None:
    """Refuse warnings without a code for each of them."""
    if len(warnings) != len(codes):
        raise ValueError(f"{len(warnings)} warnings with {len(codes)} warning_codes")


Bins = Annotated[dict[str, list[float | None]], AfterValidator(_check_bins)]
"""A reliability diagram: share of examples, confidence and accuracy by bin."""
Causes = Annotated[list[JsonObject], AfterValidator(_check_causes)]
"""A diagnosis."""


class Document(BaseModel, extra="allow"):
    """Part of a JSON file; keys that other commands or versions add are kept as they are."""


class Constants(Document):
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
    dynamics: str = "overdamped"
    friction: float | None = None

    @property
    def motion(self) -> Dynamics:
        """The dynamics of the chains, with their friction."""
        return from_constants({"friction": self.friction})


class Spending(Document):
    """`privacy` of plan.json."""

    budget: float | None
    accountant: Literal["exact", "paper"]
    unit: Literal["device", "record"]
    adjacency: Literal["replace", "add-remove"]
    rounding: float | None = None
    example_clip: list[float] | None = None
    """Clipping threshold of one example's gradient, [K]; None where examples are not clipped one by one."""
    spent_max: float | None
    epsilon_spent: float | None
    epsilon_by: dict[str, float | None] | None
    epsilon_each: list[float | None] | None
    spent: list[float] | None
    spent_before: list[float] | None = None
    budgets: list[float | None]

    @property
    def total(self) -> list[float] | None:
        """Loss of every device, that of earlier runs with it."""
        if self.spent is None or self.spent_before is None:
            return self.spent
        return np.add(self.spent, self.spent_before).tolist()

    @property
    def shares(self) -> list[float] | None:
        """Share of its budget that every device spends; None where nothing is promised or nothing is clipped."""
        total = self.total
        if total is None or None in self.budgets:
            return None
        return [
            spent / (budget or 1.0)
            for spent, budget in zip(total, self.budgets, strict=True)
        ]


class PlanFile(Document):
    """plan.json, in the order of its keys."""

    constants: Constants
    step_size: list[float]
    regime: str | None
    regime_share: dict[str, float]
    gain: list[float]
    threshold: list[float | None]
    active_devices: list[int]
    bound: list[float | None] | None
    objective: float | None
    lower_bound: float | None = None
    gap: float | None
    max_round_noise: float | None = None
    classes: list[Any] | None = None
    coordinates: Literal["parameters", "whitened"]
    whitening: JsonObject | None
    privacy: Spending
    exact_w2_sq: list[float | None] | None
    exact_ess_min: float | None
    channel_uses: int | None = None
    energy: list[float] | None = None
    diagnosis: Causes | None = None
    not_covered: list[NotCovered]
    warnings: list[str]
    warning_codes: list[str]
    """Of the warnings, in their order."""
    seconds: float
    version: str
    scenario: dict[str, JsonObject]
    files: dict[str, str]
    """SHA-256 of the files that the plan was made with, by key."""
    plan_digest: str
    """`Plan.checksum` of the plan, by which its file is recognised."""
    noise: str = "simulated"
    """Who adds it, where devices were a federation's."""
    own_data: bool = False
    """Whether devices brought their own data, for which those of the scenario stand in."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        """Refuse lists without one number for every round, or for every device."""
        rounds, devices = self.constants.rounds, self.constants.devices
        sizes = [(name, getattr(self, name), rounds) for name in BY_ROUND]
        sizes += [
            (name, values, devices)
            for name, values in self.privacy
            if isinstance(values, list)
        ]
        for name, values, size in sizes:
            if values is not None and len(values) != size:
                raise ValueError(f"{name} has {len(values)} numbers, not {size}")
        _check_warnings(self.warnings, self.warning_codes)
        return self

    @property
    def notices(self) -> list[Notice]:
        """The warnings with their codes."""
        return list(map(Notice, self.warning_codes, self.warnings))


class DistancePart(Document):
    """`w2_sq` of summary.json."""

    worst: float | None
    worst_se: float | None
    floor: float | None = None
    per_round: list[float | None]


class ClipRate(Document):
    """`clip_rate` of summary.json."""

    burn_in: float | None
    samples: float | None


class CoveragePart(Document):
    """`coverage` of summary.json: the posterior's probability of the chains' intervals, mean over chains."""

    chain_90: float
    chain_50: float
    noise_aware_90: float | None = None
    noise_aware_50: float | None = None


class LedgerPart(Document):
    """`ledger` of summary.json."""

    file: str
    rounds: int
    chain: str
    spent: list[float]
    share_of_budget: float | None


class Federation(Document):
    """How the rounds went, where devices were a federation's."""

    noise: str
    secure_aggregation: Literal[False] = False
    """Earlier versions had it, and their ε was that of masked sums."""
    tolerate: int = 0
    releases: int = 1
    """Chains of the same real devices that are given away: losses are those of all."""
    own_data: bool = False
    """Whether devices brought their own data: then nothing is compared with a posterior."""
    asked: list[int]
    sent: list[int]
    absences: int
    empty_rounds: int = 0
    """Rounds in which no device transmitted."""


RELATIVE_SHARE_ERROR = 0.1
"""Error of a class's mean probability, over its share of the rows, up to which it is good enough."""
SHARE_STANDARD_ERRORS = 2.6
"""Standard errors of a share beyond which chance is no excuse: 1 in 100."""


class ClassScores(Document):
    """How well the probabilities of one class fit the rows that were held out."""

    label: int | str
    share: float
    """Of the rows that have this label."""
    predicted_share: float
    """The mean probability of this label."""
    ece: float
    """Calibration error of the probability of this label against all others."""
    ece_floor: float
    """That of a model that is right about its own predictions."""

    def is_biased(self, rows: int) -> bool:
        """Return whether the mean probability is off by more than 10 % and by more than chance, on so many rows."""
        off = abs(self.predicted_share - self.share)
        chance = (self.predicted_share * (1 - self.predicted_share) / rows) ** 0.5
        return (
            off > RELATIVE_SHARE_ERROR * self.share
            and off > SHARE_STANDARD_ERRORS * chance
        )


class FitPrivacy(Document):
    """`privacy` of fit.json."""

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    accountant: str
    promised: float
    """ε."""
    loss: dict[str, float]
    """Of each part."""
    left: float
    """Of ε."""


class FitFile(Document):
    """fit.json: what `wflmc fit` chose, spent and reached."""

    task: str
    target: str
    rows: int
    test_rows: int
    features: int
    devices: int
    classes: list[Any] | None
    accuracy: float | None = None
    ece: float | None = None
    ece_floor: float | None = None
    """What a model that is right about its own predictions has: labels drawn from them."""
    nll: float | None = None
    rmse: float | None = None
    r2: float | None = None
    coverage_90: float | None = None
    epsilon_spent: float
    epsilon_by_part: dict[str, float]
    privacy: FitPrivacy
    settings: dict[str, bool | int | float]
    candidates: list[dict[str, bool | int | float]]
    """The best of those that were tried on a stand-in."""
    worth: dict[str, dict[str, bool | int | float]]
    """What more of something would reach on a stand-in."""
    reliability: Bins | None = None
    by_class: list[ClassScores] = []
    """Scores of every class on the rows that were held out."""
    by_device: list[dict[str, int | float | str]] = []
    not_covered: list[NotCovered]
    warnings: list[str]
    seconds: float
    version: str

    @property
    def biased_classes(self) -> list[ClassScores]:
        """Return the classes whose mean probability is too far from their share of rows.

        The rows are those that were held out; without any, no class is biased.
        """
        if not self.test_rows:
            return []
        return [scores for scores in self.by_class if scores.is_biased(self.test_rows)]

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        """Refuse rows of tables that lack a column which every fit writes."""
        scores = {"nll", "accuracy", "ece"} if self.classes else {"relative_mse"}
        score = "accuracy" if self.classes else "rmse"
        complete = (
            all(scores | self.settings.keys() <= row.keys() for row in self.candidates)
            and all(scores <= row.keys() for row in self.worth.values())
            and all({"device", "rows", score} <= row.keys() for row in self.by_device)
        )
        if not complete:
            raise ValueError("rows of a table lack a column")
        return self


class SummaryFile(Document):
    """summary.json, in the order of its keys."""

    owner_only: str = OWNER_ONLY
    w2_sq: DistancePart | None
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
    coverage: CoveragePart | None = None
    epsilon_spent: float | None
    adjacency: str = "replace"
    functions: dict[str, JsonObject] = {}
    diagnosis: Causes | None = None
    not_covered: list[NotCovered] = []
    warnings: list[str]
    warning_codes: list[str]
    """Of the warnings, in their order."""
    seconds: float
    ledger: LedgerPart | None
    federation: Federation | None = None

    @model_validator(mode="after")
    def _check_codes(self) -> Self:
        """Refuse warnings without a code for each of them."""
        _check_warnings(self.warnings, self.warning_codes)
        return self

    @property
    def notices(self) -> list[Notice]:
        """The warnings with their codes."""
        return list(map(Notice, self.warning_codes, self.warnings))


Model = TypeVar("Model", bound=BaseModel)


def read_document(path: Path, model: type[Model], key: str) -> Model:
    """Return plan.json or summary.json.

    Args:
        key: the argument that names the file, for the error.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            key, str(path), f"a readable file ({error.strerror})"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            key,
            str(path),
            f"as wflmc wrote it ({f'{where}: ' * bool(where)}{first['msg']})",
        ) from None


def plan_document(
    scenario: Scenario,
    inputs: Inputs,
    plan: Plan,
    seconds: float,
    law: ExactLaw | None = None,
    compare: bool = False,
) -> JsonObject:
    """Return the content of plan.json, which `wflmc plan --json` prints: plain data.

    Args:
        law: as `exact_law` gives it, where it has been computed already.
        compare: whether dp-accounting is asked for its ε too.
    """
    spent = plan.spent if plan.clips else None
    budget, law = (
        plan.privacy.budget(plan.devices),
        law or exact_law(inputs.posterior, plan),
    )
    constants = _attributes(
        plan, "mu", "L", "gamma", "dim", "devices", "burn_in", "initial_w2_sq"
    )
    sizes = {"rounds": len(plan.rounds), "samples": len(plan.rounds) - plan.burn_in}
    document = {
        "constants": {
            **constants,
            **sizes,
            "step_size": plan.step_size[-1],
            **plan.dynamics.constants,
        },
        **_attributes(
            plan,
            "step_size",
            "regime",
            "regime_share",
            "gain",
            "threshold",
            "active_devices",
            "bound",
        ),
        **_attributes(plan, "objective", "lower_bound", "gap", "warnings"),
        "warning_codes": codes(plan.notices),
        "max_round_noise": plan.certificate.noise_limit,
        "classes": inputs.posterior.class_names
        if isinstance(inputs.posterior, Predicts)
        else None,
        "coordinates": "parameters"
        if inputs.posterior.coordinates is None
        else "whitened",
        "whitening": None if inputs.release is None else inputs.release.summary(budget),
        "privacy": {
            **_attributes(plan.privacy, "accountant", "unit", "adjacency"),
            **_attributes(plan, "rounding", "epsilon_spent"),
            "example_clip": plan.example_clip
            if np.isfinite(plan.example_clip).all()
            else None,
            "budget": budget.min(),
            "spent_max": None if spent is None else spent.max(),
            "epsilon_by": _epsilon_by(plan, compare),
            "epsilon_each": plan.privacy.epsilons_spent(plan.spent + plan.ledger)
            if plan.clips
            else None,
            "spent": spent,
            "spent_before": plan.ledger if plan.ledger.any() else None,
            "budgets": budget,
        },
        **{f"exact_{name}": value for name, value in law._asdict().items()},
        "channel_uses": channel_uses(plan),
        "energy": transmit_energy(plan, inputs.link),
        "diagnosis": None,
        "not_covered": [vars(item) for item in inputs.not_covered],
        "seconds": seconds,
        "version": __version__,
        "scenario": _json_scenario(scenario),
        "files": file_digests(scenario, PUBLIC_FILES),
        "plan_digest": plan.checksum,
    }
    return PlanFile.model_validate(plain(document)).model_dump(exclude_unset=True)


def _attributes(source: object, *names: str) -> JsonObject:
    return {name: getattr(source, name) for name in names}


def _epsilon_by(plan: Plan, compare: bool) -> dict[str, float | None] | None:
    """Return ε of the worst device by each accountant; None where nothing is promised."""
    privacy, total = plan.privacy, plan.spent + plan.ledger
    if not plan.clips or privacy.delta is None:
        return None
    found: dict[str, float | None] = {
        name: privacy.epsilon_spent(total, name) for name in ACCOUNTANTS
    }
    each = privacy.epsilons_spent(total, "exact")
    if compare and each is not None:
        worst = int(np.argmax(each))
        rounds = np.append(plan.loss[:, worst], plan.ledger[worst])
        delta = float(np.broadcast_to(privacy.delta, each.shape)[worst])
        found |= epsilon_by_dp_accounting(rounds[rounds > 0], delta)
    return found


def _json_scenario(scenario: Scenario) -> JsonObject:
    """Return the keys that were set; JSON cannot write infinity, and one key has a default that is not it."""
    content: dict[str, JsonObject] = scenario.model_dump(
        exclude_unset=True, exclude_none=True
    )
    if scenario.policy.max_round_noise == math.inf:
        content["policy"]["max_round_noise"] = "inf"
    return {
        name: {key: value for key, value in keys.items() if value != math.inf}
        for name, keys in content.items()
    }


def summary_document(
    evaluation: Evaluation,
    plan: Mapping[str, object],
    *,
    notices: Sequence[Notice],
    ledger: Mapping[str, object] | None,
    seconds: float,
) -> JsonObject:
    """Return the content of summary.json, plain data.

    Args:
        evaluation: of the trace.
        plan: the content of plan.json.
        notices: of the plan, those that every run has last.
        ledger: as `ledger_document` gives it.
        seconds: that the run took.
    """
    distance, scores = evaluation.w2_sq, evaluation.scores
    notices = (*evaluation.notices, *notices)
    document = {
        **_attributes(
            evaluation,
            "exact_w2_sq",
            "exact_ess_min",
            "rhat_max",
            "ess_min",
            "ess_tail_min",
            "frozen",
        ),
        **_attributes(
            evaluation,
            "clip_rate",
            "example_clip_rate",
            "epsilon_spent",
            "adjacency",
            "coverage",
        ),
        **evaluation.mean_scores,
        "owner_only": OWNER_ONLY,
        "w2_sq": None
        if distance is None
        else _attributes(distance, *DistancePart.model_fields),
        "reliability": reliability(scores) if isinstance(scores, Calibration) else None,
        "functions": {
            name: found._asdict() for name, found in evaluation.functions.items()
        },
        "diagnosis": None,
        "not_covered": plan.get("not_covered", []),
        "warnings": texts(notices),
        "warning_codes": codes(notices),
        "seconds": seconds,
        "ledger": ledger,
    }
    return SummaryFile.model_validate(plain(document)).model_dump(exclude_unset=True)
