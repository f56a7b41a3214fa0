"""The scenario file's keys, types, defaults and limits, and one clear sentence for each way to get them wrong."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wflmc.errors import InputError

# The outer limits keep squares and sums inside the range of floats, and sizes inside what machines hold.
Positive = Annotated[float, Field(ge=1e-50, le=1e50, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e50, allow_inf_nan=False)]
OneOrEach = Positive | Annotated[list[Positive], Field(min_length=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Level = Annotated[float, Field(ge=-300, le=300)]
Count = Annotated[int, Field(ge=1, le=10**7)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PosteriorSection(_Section):
    """What is sampled, from which data, and who holds them."""

    model: Literal["gaussian", "softmax"] = "gaussian"
    devices: Count = 30
    data: str = "synthetic"
    examples: Count = 1200
    dim: Count = 5
    intercept: bool = False
    partition: str = "iid"
    preconditioner: Literal["none", "whiten", "private-whiten"] = "none"
    whiten_clip: NotNegative = 0.0
    whiten_share: Probability = 0.1
    whiten_rounds: Annotated[int, Field(ge=3, le=10**5)] = 16
    prior_std: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    prior_on: Literal["parameters", "whitened"] = "parameters"
    classes: Annotated[int, Field(ge=2, le=10**7)] | list[int] | list[str] | None = None
    mu: NotNegative = 0.0
    L: NotNegative = 0.0
    initial_w2_sq: NotNegative = 0.0
    seed: Seed = 0


class LinkSection(_Section):
    """The channel."""

    fading: Literal["static", "rayleigh", "rician", "file"] = "rayleigh"
    power: OneOrEach = 0.01
    rician_k: NotNegative = 3.0
    correlation: Annotated[float, Field(ge=0, le=1)] = 0.0
    csi_error: Annotated[float, Field(ge=0, lt=1)] = 0.0
    downlink_snr_db: Annotated[float, Field(ge=-300)] = float("inf")
    gains: str = ""
    snr_db: Level | Annotated[list[Level], Field(min_length=1)] = 20.0
    noise_power: Annotated[float, Field(ge=1e-30, le=1e30)] = 1.0
    seed: Seed = 0


class PrivacySection(_Section):
    """What each device is promised."""

    epsilon: OneOrEach | None = None
    delta: Probability | Annotated[list[Probability], Field(min_length=1)] | None = None
    clip: OneOrEach = 30.0
    unit: Literal["device", "record"] = "device"
    adjacency: Literal["replace", "add-remove"] = "replace"
    example_clip: OneOrEach | None = None
    accountant: Literal["exact", "paper"] = "exact"


class SamplerSection(_Section):
    """The chain."""

    step_size: OneOrEach | str = "0.4/(mu+L)"
    step_schedule: Literal["constant", "planned"] = "constant"
    burn_in: Annotated[int, Field(ge=0, le=10**7)] | Literal["auto"] = 50
    max_burn_in: Annotated[int, Field(ge=8, le=10**6)] = 5000
    samples: Count = 50
    chains: Count = 100
    init: Literal["prior", "zero"] = "prior"
    dynamics: Literal["overdamped", "kinetic"] = "overdamped"
    friction: Positive | str = 2.0
    seed: Seed | Literal["secret"] = 0


class PolicySection(_Section):
    """Who sends, and how strongly."""

    power: Literal["optimized", "equal", "no-dp", "noiseless-dp", "noiseless"] = "optimized"
    schedule: Literal["threshold", "all", "unbiased"] = "threshold"
    objective: Literal["worst", "average", "exact"] = "worst"
    senders: Annotated[int, Field(ge=0, le=10**7)] = 0
    csi: Literal["full", "causal"] = "full"
    bound: Literal["corrected", "paper"] = "corrected"
    max_round_noise: Annotated[float, Field(ge=1e-9)] | Literal["inf"] | None = None


class Scenario(_Section):
    """A whole scenario; every key has a default."""

    posterior: PosteriorSection = PosteriorSection()
    link: LinkSection = LinkSection()
    privacy: PrivacySection = PrivacySection()
    sampler: SamplerSection = SamplerSection()
    policy: PolicySection = PolicySection()

    def given(self, key: str) -> bool:
        """Whether a key such as `link.power` was set rather than left at its default."""
        section, _, name = key.partition(".")
        return section in self.model_fields_set and name in getattr(self, section).model_fields_set


KINETIC_STEP = "1/L**0.5"
"""Half of where kinetic steps become unstable."""


def validate(content: dict[str, Any]) -> Scenario:
    """A scenario from plain data, or an InputError that names the first wrong key."""
    try:
        scenario = Scenario.model_validate(content)
    except ValidationError as error:
        raise _explain(error) from None
    return _with_kinetic_defaults(_with_mnist_defaults(scenario))


def _with_kinetic_defaults(scenario: Scenario) -> Scenario:
    """Another step size for kinetic dynamics, unless the scenario says otherwise."""
    if scenario.sampler.dynamics == "overdamped" or scenario.given("sampler.step_size"):
        return scenario
    return scenario.model_copy(update={"sampler": scenario.sampler.model_copy(update={"step_size": KINETIC_STEP})})


def _with_mnist_defaults(scenario: Scenario) -> Scenario:
    """The paper's 12,000 images on 30 principal directions, unless the scenario says otherwise."""
    if scenario.posterior.data != "mnist":
        return scenario
    if scenario.posterior.model != "softmax":
        raise InputError("posterior.data", "mnist", "used with posterior.model = 'softmax'")
    paper = {"examples": 12_000, "dim": 30}
    left_out = {name: value for name, value in paper.items() if not scenario.given(f"posterior.{name}")}
    return scenario.model_copy(update={"posterior": scenario.posterior.model_copy(update=left_out)})


def irrelevant(scenario: Scenario) -> dict[str, str]:
    """The keys that other keys make meaningless, each with the reason."""
    fading, policy, data = scenario.link.fading, scenario.policy.power, scenario.posterior.data
    sampler = scenario.sampler
    ideal = policy in ("noiseless", "noiseless-dp")
    released = scenario.posterior.preconditioner == "private-whiten"  # over the link, whatever comes after
    kinetic = scenario.sampler.dynamics == "kinetic"
    no_fading = fading in ("file", "static")
    drawn = scenario.link.csi_error > 0 or scenario.policy.schedule == "unbiased"
    rules = [
        ("link.rician_k", fading != "rician", f"link.fading = {fading!r}"),
        ("link.gains", fading != "file", f"link.fading = {fading!r}"),
        ("link.power", fading == "file", "link.fading = 'file'"),
        ("link.correlation", no_fading, f"link.fading = {fading!r}"),
        ("link.seed", no_fading and (ideal or not drawn), f"link.fading = {fading!r} draws nothing"),
        ("link.snr_db", ideal and not released, f"policy.power = {policy!r} has an ideal link"),
        ("link.csi_error", ideal and not released, f"policy.power = {policy!r} has an ideal link"),
        ("link.downlink_snr_db", ideal, f"policy.power = {policy!r} has an ideal link"),
        (
            "posterior.seed",
            data not in ("synthetic", "mnist") and scenario.posterior.partition in ("blocks", "by-label"),
            "nothing is drawn",
        ),
        *(
            (
                f"posterior.{key}",
                scenario.posterior.preconditioner != "private-whiten",
                f"posterior.preconditioner = {scenario.posterior.preconditioner!r}",
            )
            for key in ("whiten_clip", "whiten_share", "whiten_rounds")
        ),
        ("posterior.prior_on", scenario.posterior.preconditioner == "none", "posterior.preconditioner = 'none'"),
        ("posterior.classes", scenario.posterior.model != "softmax", f"posterior.model = {scenario.posterior.model!r}"),
        ("privacy.example_clip", scenario.privacy.unit == "device", "privacy.unit = 'device'"),
        ("privacy.accountant", scenario.privacy.epsilon is None, "there is no privacy.epsilon"),
        ("sampler.friction", not kinetic, "sampler.dynamics = 'overdamped'"),
        ("sampler.step_schedule", sampler.burn_in == 0 and sampler.step_schedule == "planned", "there is no burn-in"),
        ("sampler.max_burn_in", scenario.sampler.burn_in != "auto", "sampler.burn_in is a number"),
        (
            "policy.max_round_noise",
            policy not in ("optimized", "noiseless-dp") or (kinetic and policy != "optimized"),
            f"policy.power = {policy!r}" + (" with sampler.dynamics = 'kinetic'" if kinetic else ""),
        ),
        (
            "policy.bound",
            kinetic and (ideal or scenario.policy.schedule == "all"),
            "sampler.dynamics = 'kinetic' has no bound",
        ),
        ("policy.schedule", ideal, f"policy.power = {policy!r} always has all devices"),
        ("policy.senders", scenario.policy.schedule != "unbiased", f"policy.schedule = {scenario.policy.schedule!r}"),
        ("policy.csi", policy not in ("optimized", "equal"), f"policy.power = {policy!r} looks at no other round"),
    ]
    return {key: why for key, holds, why in rules if holds}


def _explain(error: ValidationError) -> InputError:
    """The first problem as key, what was given, and what is allowed."""
    problems = error.errors()
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    kind = first["type"]
    if kind == "extra_forbidden":
        return InputError(key, first["input"], f"a known {_nearest(key)}")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return InputError(key, first["input"], f"a section: write [{key}] and its keys below it")
    # Of the branches of a union, the one whose type fits tells more than those whose type does not.
    same_key = [problem for problem in problems if problem["loc"][:2] == first["loc"][:2]]
    fitting = [problem for problem in same_key if not problem["type"].endswith(("_type", "literal_error"))] or same_key
    given = fitting[0]["input"]
    limits = all(problem["type"].startswith(("greater", "less")) for problem in fitting)
    if given != given and limits:  # nan is on neither side of one
        return InputError(key, given, "a number")
    allowed = " or ".join(dict.fromkeys(_allowed(p["type"], p.get("ctx", {}), p["msg"]) for p in fitting))
    return InputError(key, given, allowed)


def _allowed(kind: str, context: dict[str, Any], message: str) -> str:
    phrases = {
        "greater_than": "above {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "below {lt}",
        "less_than_equal": "at most {le}",
        "literal_error": "{expected}",
        "finite_number": "a finite number",
        "float_type": "a number",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "bool_type": "true or false",
        "string_type": "a text",
        "list_type": "a list of numbers",
        "too_short": "a list that is not empty",
    }
    if kind == "greater_than_equal" and 0 < context["ge"] < 1e-8:
        return "above 0"
    if kind in phrases:
        return phrases[kind].format(**context)
    return message[:1].lower() + message[1:]


def _nearest(key: str) -> str:
    section, _, name = key.partition(".")
    sections = Scenario.model_fields
    names = [f"{s}.{field}" for s, info in sections.items() for field in info.default.__class__.model_fields]
    if not name:
        near = difflib.get_close_matches(section, list(sections), n=1)
        inside = [full for full in names if full.endswith("." + section)]
        guess = f"[{near[0]}]" if near else inside[0] if inside else ""
        return f"section; did you mean {guess}?" if guess else f"section ({', '.join(sections)})"
    own = [full for full in names if full.startswith(section + ".")]
    near = difflib.get_close_matches(key, own, n=1, cutoff=0.7) or difflib.get_close_matches(key, names, n=1)
    elsewhere = [full for full in names if full.endswith("." + name)]
    if elsewhere:
        near = elsewhere[:1]
    return f"key; did you mean {near[0]}?" if near else f"key ({', '.join(own)})"
