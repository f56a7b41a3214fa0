"""The JSON files of runs and fits: one model of each, for writers and readers alike.

plan.json, summary.json and fit.json are written from these models and checked against
them when they are read, so that a file that was damaged or edited is refused.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from wflmc.dynamics import Dynamics, from_constants
from wflmc.evaluation import (
    Calibration,
    Evaluation,
    ExactLaw,
    Spread,
    exact_law,
    reliability,
)
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
    "wflmc run simulates all devices in one process and protects nobody. Over a real "
    "radio the server receives only the noisy sum; over a digital link wflmc federate "
    "protects against everyone but the server's own process, or locally (--noise "
    "devices) at K times the loss.",
)
"""The last warning of every run that is no federation."""
PUBLIC_FILES = ("link.gains", "posterior.prior_from")
"""Keys of files that plan.json has the hash of.

The data are not among them: whoever knows all records but one could guess that one and
compare the hash. What a plan takes from the data are its constants, which are compared;
and a ledger knows the data of its runs.
"""
BY_ROUND = ("step_size", "gain", "threshold", "active_devices", "bound", "exact_w2_sq")
"""Lists of plan.json with one number for every round."""


def _check_bins(bins: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """Refuse a reliability diagram without a number for every bin that has examples."""
    fractions = bins.get("share", [])
    confidences = bins.get("confidence", [])
    accuracies = bins.get("observed", [])
    is_rectangular = len(fractions) == len(confidences) == len(accuracies)
    if not is_rectangular or None in fractions:
        raise ValueError("bins without share, confidence and observed")
    rows = zip(fractions, confidences, accuracies, strict=True)
    for fraction, confidence, accuracy in rows:
        if fraction and None in (confidence, accuracy):
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


def _check_length(name: str, values: Sequence[object] | None, size: int) -> None:
    """Refuse a list of another length; None stands for a list that is left out."""
    if values is not None and len(values) != size:
        raise ValueError(f"{name} has {len(values)} numbers, not {size}")


Bins = Annotated[dict[str, list[float | None]], AfterValidator(_check_bins)]
"""A reliability diagram: fraction of examples, confidence and accuracy by bin."""
Causes = Annotated[list[JsonObject], AfterValidator(_check_causes)]
"""A diagnosis."""


class Document(BaseModel, extra="allow"):
    """Part of a JSON file; keys that other commands or versions add are not changed."""


class SpreadPart(Document):
    """`spread`: a chain's law beside the posterior, at the first and last kept round."""

    variance_ratio: list[float]
    coverage_90: list[float]


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
        """Return the dynamics of the chains, with their friction.

        They are overdamped where the file has no friction, else kinetic. The key
        `dynamics` has their name for readers of the file and is not needed here.
        """
        return from_constants({"friction": self.friction})


class Spending(Document):
    """`privacy` of plan.json."""

    budget: float | None
    accountant: Literal["exact", "paper"]
    unit: Literal["device", "record"]
    adjacency: Literal["replace", "add-remove"]
    rounding: float | None = None
    example_clip: list[float] | None = None
    """Clipping threshold of one example's gradient, [K]; None where examples are not
    clipped one by one."""
    spent_max: float | None
    epsilon_spent: float | None
    epsilon_by: dict[str, float | None] | None
    epsilon_each: list[float | None] | None
    spent: list[float] | None
    spent_before: list[float] | None = None
    budgets: list[float | None]

    @property
    def total(self) -> list[float] | None:
        """Return the privacy loss of every device, [K], that of earlier runs included.

        It is None where gradients are not clipped, as no finite loss is true then. The
        loss of a release for whitening is part of what was spent before.
        """
        if self.spent is None or self.spent_before is None:
            return self.spent
        return np.add(self.spent, self.spent_before).tolist()

    @property
    def shares(self) -> list[float] | None:
        """Return the fraction of its budget that every device spends, [K].

        It is None where nothing is promised, so that there is no budget, or nothing is
        clipped. A budget of 0 allows no loss, and its fraction is 0.
        """
        total = self.total
        if total is None or None in self.budgets:
            return None
        fractions = []
        for spent, budget in zip(total, self.budgets, strict=True):
            fraction = spent / (budget or 1.0)
            fractions.append(fraction)
        return fractions


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
    classes: list[int] | list[str] | None = None
    coordinates: Literal["parameters", "whitened"]
    whitening: JsonObject | None
    privacy: Spending
    exact_w2_sq: list[float | None] | None
    exact_ess_min: float | None
    spread: SpreadPart | None = None
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
    """Whether devices brought their own data; those of the scenario stand in for it."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        """Refuse lists without one number for every round, or for every device."""
        rounds = self.constants.rounds
        for name in BY_ROUND:
            _check_length(name, getattr(self, name), rounds)
        devices = self.constants.devices
        for name, values in self.privacy:
            if isinstance(values, list):
                _check_length(name, values, devices)
        _check_warnings(self.warnings, self.warning_codes)
        return self

    @property
    def notices(self) -> list[Notice]:
        """Return the plan's warnings with their codes, in their order.

        Code decides by the codes; sentences are for readers and may be reworded. The
        file has equally many of both, or it is refused.
        """
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
    """`coverage` of summary.json: the posterior's probability of the chains' intervals,
    mean over chains."""

    chain_90: float
    chain_50: float
    noise_aware_90: float | None = None
    noise_aware_50: float | None = None


class LedgerPart(Document):
    """`ledger` of summary.json, which counts earlier runs in the ledger as well."""

    file: str
    """Relative to the run folder where it is in it."""
    rounds: int
    chain: str
    """The hash of the last line, which stands for all lines up to it."""
    spent: list[float]
    """Privacy loss of every device, [K]."""
    share_of_budget: float | None
    """The largest fraction of a device's budget; None where no budget is finite."""


class Federation(Document):
    """How the rounds went, where devices were a federation's."""

    noise: str
    """Who added it: channel, devices or simulated."""
    secure_aggregation: Literal[False] = False
    """A file in which it is true is refused: its ε would be that of masked sums."""
    tolerate: int = 0
    releases: int = 1
    """Chains of the same real devices that are published: losses are those of all."""
    own_data: bool = False
    """Whether devices brought their own data, so that there is no posterior to compare
    with."""
    asked: list[int]
    """Devices that every round asked for their gradient."""
    sent: list[int]
    """Devices that transmitted in every round."""
    absences: int
    empty_rounds: int = 0
    """Rounds in which no device transmitted."""


RELATIVE_SHARE_ERROR = 0.1
"""Largest tolerated error of a class's mean probability, relative to the fraction of
rows that have its label."""
SHARE_STANDARD_ERRORS = 2.6
"""Standard errors beyond which an error is not chance: a normal variable exceeds 2.6 in
absolute value about once in 100 times."""


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
    """The mean `ece` of labels that are drawn from the predictions themselves."""

    def is_biased(self, rows: int) -> bool:
        """Return whether the mean probability is too far from the label's frequency.

        It is if the difference exceeds both 10 % of the frequency and 2.6 standard
        errors √(p(1 − p)/n) of a mean probability p; few rows thus prove nothing.

        Args:
            rows: n, how many rows the scores were computed on.
        """
        probability = self.predicted_share
        difference = abs(probability - self.share)
        standard_error = (probability * (1 - probability) / rows) ** 0.5
        is_large = difference > RELATIVE_SHARE_ERROR * self.share
        is_significant = difference > SHARE_STANDARD_ERRORS * standard_error
        return is_large and is_significant


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


class PublicPart(Document):
    """The public rows of a fit, on which ε is not spent."""

    rows: int
    labelled: bool
    """Whether they gave the prior's mean, besides scales and whitening."""
    digest: str
    """Of the rows as numbers, with their labels."""
    source: str | None = None
    """The name of the file; None for a frame or arrays."""
    sha256: str | None = None
    """Of the file."""


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
    """The mean `ece` of labels that are drawn from the predictions themselves."""
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
    public: PublicPart | None = None
    """The public rows; None where there were none."""
    prior_distance: float | None = None
    """How far the mean of the draws is from the prior's mean that labelled public rows
    gave, in standard deviations of the prior. It follows from the draws, so that ε
    covers it."""
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
        """Return the classes whose mean probability is too far from their frequency.

        Both are measured on the rows that were held out, as `ClassScores.is_biased`
        defines it. The list is empty for regressions, for most fits, and where no rows
        were held out.
        """
        if not self.test_rows:
            return []
        return [scores for scores in self.by_class if scores.is_biased(self.test_rows)]

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        """Refuse rows of tables that lack a column which every fit writes."""
        scores = {"relative_mse"}
        device_columns = {"device", "rows", "rmse"}
        if self.classes:
            scores = {"nll", "accuracy", "ece"}
            device_columns = {"device", "rows", "accuracy"}
        _check_columns(self.candidates, scores | self.settings.keys())
        _check_columns(self.worth.values(), scores)
        _check_columns(self.by_device, device_columns)
        return self


def _check_columns(
    rows: Iterable[Mapping[str, object]],
    columns: AbstractSet[str],
) -> None:
    """Refuse rows of a table that lack a column."""
    for row in rows:
        if not columns <= row.keys():
            raise ValueError("rows of a table lack a column")


class SummaryFile(Document):
    """summary.json, in the order of its keys."""

    owner_only: str = OWNER_ONLY
    w2_sq: DistancePart | None
    exact_w2_sq: list[float | None] | None
    exact_ess_min: float | None
    spread: SpreadPart | None = None
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
    prior_distance: float | None = None
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
        """Return the run's warnings with their codes, in their order.

        Those of the chains come first, then those of the plan, and for simulations the
        one that they protect nobody. The file has equally many sentences and codes.
        """
        return list(map(Notice, self.warning_codes, self.warnings))


Model = TypeVar("Model", bound=BaseModel)


def read_document(path: Path, model: type[Model], key: str) -> Model:
    """Read a JSON file and check it against its model.

    Keys that the model does not have are kept. A value of another type, a list of
    another length or a missing key makes the file unreadable as a whole.

    Args:
        path: of the file.
        model: `PlanFile`, `SummaryFile` or another model of a file.
        key: the argument or option that names the file, for errors.

    Returns:
        The content of the file.

    Raises:
        InputError: if the file cannot be read, or is not as wflmc wrote it; the message
            names the first value that is wrong.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        requirement = f"a readable file ({error.strerror})"
        raise InputError(key, str(path), requirement) from None
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        prefix = f"{location}: " if location else ""
        requirement = f"as wflmc wrote it ({prefix}{first['msg']})"
        raise InputError(key, str(path), requirement) from None


def plan_document(
    scenario: Scenario,
    inputs: Inputs,
    plan: Plan,
    seconds: float,
    law: ExactLaw | None = None,
    compare: bool = False,
) -> JsonObject:
    """Return the content of plan.json, which `wflmc plan --json` prints.

    It is plain data: numbers that are not finite are None. Advice is added by those who
    ask for it, and `diagnosis` is None here.

    Args:
        scenario: as resolved.
        inputs: its posterior, link and privacy.
        plan: of the scenario.
        seconds: that planning took.
        law: the exact law of the chains, where it has been computed already.
        compare: whether dp-accounting is asked for its ε too.

    Returns:
        The values of `PlanFile` by name, in its order.
    """
    if law is None:
        law = exact_law(inputs.posterior, plan)
    document = {
        **_round_values(plan),
        **_plan_values(plan, seconds),
        **_input_values(scenario, inputs, plan),
        "constants": _constant_values(plan),
        "privacy": _privacy_values(plan, compare),
        "exact_w2_sq": law.w2_sq,
        "exact_ess_min": law.ess_min,
        "spread": _spread_values(law.spread),
        "diagnosis": None,
    }
    return PlanFile.model_validate(plain(document)).model_dump(exclude_unset=True)


def _spread_values(spread: Spread | None) -> JsonObject | None:
    """Return `spread` of plan.json and summary.json."""
    return None if spread is None else spread._asdict()


def _constant_values(plan: Plan) -> JsonObject:
    """Return `constants` of plan.json."""
    rounds = len(plan.rounds)
    names = ("mu", "L", "gamma", "dim", "devices", "burn_in", "initial_w2_sq")
    values = _attributes(plan, names)
    values["rounds"] = rounds
    values["samples"] = rounds - plan.burn_in
    values["step_size"] = plan.step_size[-1]
    values.update(plan.dynamics.constants)
    return values


def _round_values(plan: Plan) -> JsonObject:
    """Return what plan.json has of the rounds and of the regimes that they are in."""
    by_round = ("step_size", "gain", "threshold", "active_devices", "bound")
    regimes = ("regime", "regime_share")
    return _attributes(plan, by_round + regimes)


def _plan_values(plan: Plan, seconds: float) -> JsonObject:
    """Return what plan.json has of the plan as a whole."""
    values = _attributes(plan, ("objective", "lower_bound", "gap", "warnings"))
    values["warning_codes"] = codes(plan.notices)
    values["max_round_noise"] = plan.certificate.noise_limit
    values["channel_uses"] = channel_uses(plan)
    values["seconds"] = seconds
    values["version"] = __version__
    values["plan_digest"] = plan.checksum
    return values


def _input_values(scenario: Scenario, inputs: Inputs, plan: Plan) -> JsonObject:
    """Return what plan.json has of the scenario and of what was built from it."""
    posterior = inputs.posterior
    class_names = None
    if isinstance(posterior, Predicts):
        class_names = posterior.class_names
    whitening = None
    if inputs.release is not None:
        budget = plan.privacy.budget(plan.devices)
        whitening = inputs.release.summary(budget)
    is_whitened = posterior.coordinates is not None
    return {
        "classes": class_names,
        "coordinates": "whitened" if is_whitened else "parameters",
        "whitening": whitening,
        "energy": transmit_energy(plan, inputs.link),
        "not_covered": [vars(item) for item in inputs.not_covered],
        "scenario": _json_scenario(scenario),
        "files": file_digests(scenario, PUBLIC_FILES),
    }


def _privacy_values(plan: Plan, compare: bool) -> JsonObject:
    """Return `privacy` of plan.json."""
    budget = plan.privacy.budget(plan.devices)
    has_ledger = plan.ledger.any()
    clips_examples = np.isfinite(plan.example_clip).all()
    values = _attributes(plan.privacy, ("accountant", "unit", "adjacency"))
    values |= _attributes(plan, ("rounding", "epsilon_spent"))
    values["budget"] = budget.min()
    values["budgets"] = budget
    values["example_clip"] = plan.example_clip if clips_examples else None
    values["spent_before"] = plan.ledger if has_ledger else None
    values["epsilon_by"] = _epsilon_by(plan, compare)
    values["epsilon_each"] = None
    values["spent"] = None
    values["spent_max"] = None
    if plan.clips:
        spent = plan.spent
        values["epsilon_each"] = plan.privacy.epsilons_spent(spent + plan.ledger)
        values["spent"] = spent
        values["spent_max"] = spent.max()
    return values


def _attributes(source: object, names: Iterable[str]) -> JsonObject:
    """Return attributes by name."""
    return {name: getattr(source, name) for name in names}


def _epsilon_by(plan: Plan, compare: bool) -> dict[str, float | None] | None:
    """Return ε of the worst device by every accountant, None where none is promised."""
    privacy = plan.privacy
    if not plan.clips or privacy.delta is None:
        return None
    total = plan.spent + plan.ledger
    epsilon_by: dict[str, float | None] = {}
    for accountant in ACCOUNTANTS:
        epsilon_by[accountant] = privacy.epsilon_spent(total, accountant)
    exact_epsilons = privacy.epsilons_spent(total, "exact")
    if compare and exact_epsilons is not None:
        worst_device = int(np.argmax(exact_epsilons))
        losses = np.append(plan.loss[:, worst_device], plan.ledger[worst_device])
        deltas = np.broadcast_to(privacy.delta, exact_epsilons.shape)
        delta = float(deltas[worst_device])
        epsilon_by |= epsilon_by_dp_accounting(losses[losses > 0], delta)
    return epsilon_by


def _json_scenario(scenario: Scenario) -> JsonObject:
    """Return the keys that were set, without infinities, which JSON cannot write.

    Infinity is the default of every key that allows it but `policy.max_round_noise`,
    which is written as the text "inf".
    """
    content: dict[str, JsonObject] = scenario.model_dump(
        exclude_unset=True,
        exclude_none=True,
    )
    if scenario.policy.max_round_noise == math.inf:
        content["policy"]["max_round_noise"] = "inf"
    finite: JsonObject = {}
    for section, values in content.items():
        finite[section] = {
            key: value for key, value in values.items() if value != math.inf
        }
    return finite


EVALUATED = (
    "exact_w2_sq",
    "exact_ess_min",
    "rhat_max",
    "ess_min",
    "ess_tail_min",
    "frozen",
    "clip_rate",
    "example_clip_rate",
    "epsilon_spent",
    "adjacency",
    "coverage",
    "prior_distance",
)
"""Values of an evaluation that summary.json has under the same names."""


def summary_document(
    evaluation: Evaluation,
    plan: Mapping[str, object],
    *,
    notices: Sequence[Notice],
    ledger: Mapping[str, object] | None,
    seconds: float,
) -> JsonObject:
    """Return the content of summary.json.

    It is plain data: numbers that are not finite are None. Warnings of the chains come
    before those of the plan. Advice is added by those who ask for it, and `diagnosis`
    is None here.

    Args:
        evaluation: of the trace.
        plan: the content of plan.json.
        notices: of the plan, and after them those of every run, such as `SIMULATED`.
        ledger: as `ledger_document` returns it.
        seconds: that the run took.

    Returns:
        The values of `SummaryFile` by name, in its order.
    """
    document = _attributes(evaluation, EVALUATED)
    document |= evaluation.mean_scores
    document["owner_only"] = OWNER_ONLY
    document["spread"] = _spread_values(evaluation.spread)
    document["w2_sq"] = None
    if evaluation.w2_sq is not None:
        document["w2_sq"] = _attributes(evaluation.w2_sq, DistancePart.model_fields)
    document["reliability"] = None
    if isinstance(evaluation.scores, Calibration):
        document["reliability"] = reliability(evaluation.scores)
    functions = {}
    for name, diagnostics in evaluation.functions.items():
        functions[name] = diagnostics._asdict()
    document["functions"] = functions
    document["diagnosis"] = None
    document["not_covered"] = plan.get("not_covered", [])
    all_notices = (*evaluation.notices, *notices)
    document["warnings"] = texts(all_notices)
    document["warning_codes"] = codes(all_notices)
    document["seconds"] = seconds
    document["ledger"] = ledger
    return SummaryFile.model_validate(plain(document)).model_dump(exclude_unset=True)
