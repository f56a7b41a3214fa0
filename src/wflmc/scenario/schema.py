"""The scenario file's keys, and one clear sentence for each way to get them wrong.

Keys that are fields of `Link`, `Privacy`, `Sampler` and `Policy` are declared there;
here are those that only a file has.
"""

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from wflmc.channel import Link
from wflmc.data.sets import DATA_SETS
from wflmc.planning.options import Policy, Sampler
from wflmc.privacy import Privacy
from wflmc.scenario.sections import (
    ScenarioSection,
    key_type,
    registered_name,
    section_of,
)
from wflmc.support.errors import InputError, refuse

# The outer limits keep squares and sums inside the range of floats, and sizes inside
# the memory of machines.
Positive = Annotated[float, Field(ge=1e-50, le=1e50, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e50, allow_inf_nan=False)]
OneOrEach = Positive | Annotated[list[Positive], Field(min_length=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**7)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
LONG_NUMBER = r"(?<=[no] )(0\.00000\d*|\d{12,})"
"""A limit that is better read with an exponent, behind the last letters of "greater
than" or "equal to" in pydantic's messages."""

# Type checkers read the keys as the fields that they are made from.
if TYPE_CHECKING:
    LinkKeys = Link
    PrivacyKeys = Privacy
    SamplerKeys = Sampler
    PolicyKeys = Policy
else:
    LinkKeys = section_of(Link)
    PrivacyKeys = section_of(Privacy)
    SamplerKeys = section_of(Sampler)
    PolicyKeys = section_of(Policy)


class PosteriorSection(ScenarioSection):
    """What is sampled, from which data, and which device holds them."""

    model: registered_name("models", "gaussian", "softmax") = "gaussian"  # type: ignore[valid-type]
    devices: Count = 30
    data: str = "synthetic"
    features: Literal["principal", "scattering"] = "principal"
    whiten_from: str | list[str] = ""
    whiten_ridge: Positive = 1e-3
    examples: Count = 1200
    dim: Count = 5
    intercept: bool = False
    partition: str = "iid"
    preconditioner: Literal["none", "whiten", "private-whiten"] = "none"
    whiten_clip: NotNegative = 0.0
    whiten_share: Probability = 0.1
    whiten_rounds: Annotated[int, Field(ge=3, le=10**5)] = 16
    prior_std: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    prior_from: str = ""
    prior_on: Literal["parameters", "whitened"] = "parameters"
    classes: Annotated[int, Field(ge=2, le=10**7)] | list[int] | list[str] | None = None
    mu: NotNegative = 0.0
    L: NotNegative = 0.0
    initial_w2_sq: NotNegative = 0.0
    seed: Seed = 0

    @property
    def whitening_sources(self) -> tuple[str, ...]:
        """The public data sets or files that whiten the features; empty for none."""
        if isinstance(self.whiten_from, str):
            return (self.whiten_from,) if self.whiten_from else ()
        return tuple(self.whiten_from)

    @property
    def adds_ones(self) -> bool:
        """Whether an intercept is a column of ones.

        Features from public images or rows have a smaller constant in its place.
        """
        return self.intercept and self.features != "scattering" and not self.whiten_from


class LinkSection(LinkKeys, ScenarioSection):
    """The channel: a fading law by its name and constants, and the fields of `Link`."""

    fading: registered_name(  # type: ignore[valid-type]
        "fading", "static", "rayleigh", "rician", "file"
    ) = "rayleigh"
    power: OneOrEach = 0.01
    rician_k: NotNegative = 3.0
    correlation: Annotated[float, Field(ge=0, le=1)] = 0.0
    gains: str = ""  # type: ignore[assignment]


class PrivacySection(PrivacyKeys, ScenarioSection):
    """What each device is promised: the fields of `Privacy`."""


class SamplerSection(SamplerKeys, ScenarioSection):
    """The chain: the fields of `Sampler`, its rounds, and how it is run."""

    step_size: OneOrEach | str = "0.4/(mu+L)"
    burn_in: Annotated[int, Field(ge=0, le=10**7)] | Literal["auto"] = 50
    max_burn_in: Annotated[int, Field(ge=8, le=10**6)] = 5000
    samples: Count = 50
    chains: Count = 100
    friction: key_type(Sampler, "friction", str) = Sampler.friction  # type: ignore[valid-type]
    """A number, or an expression of μ and L."""
    keep: Literal["draws", "predictions"] = "draws"
    seed: Seed | Literal["secret"] = 0
    transcript: bool = False


class PolicySection(PolicyKeys, ScenarioSection):
    """Who transmits, and with what power: the fields of `Policy`."""

    max_round_noise: key_type(  # type: ignore[valid-type]
        Policy, "max_round_noise", Literal["inf"]
    ) = Policy.max_round_noise
    """JSON has no number for infinity."""


class Scenario(ScenarioSection):
    """A whole scenario; every key has a default."""

    posterior: PosteriorSection = PosteriorSection()
    link: LinkSection = LinkSection()
    privacy: PrivacySection = PrivacySection()
    sampler: SamplerSection = SamplerSection()
    policy: PolicySection = PolicySection()

    def is_set(self, key: str) -> bool:
        """Return whether a key such as `link.power` was set, not left at its default.

        A key that a file sets to its default counts as set; an unknown one does not.
        """
        section, _, name = key.partition(".")
        if section not in self.model_fields_set:
            return False
        return name in getattr(self, section).model_fields_set


SECTIONS = {name: type(field.default) for name, field in Scenario.model_fields.items()}
KINETIC_STEP = "1/L**0.5"
"""The default of kinetic dynamics: half of the step at which they become unstable."""
PAPER_IMAGES = {"posterior.examples": 12_000, "posterior.dim": 30}
"""The paper's images of MNIST, and principal directions that they are projected on."""
SCATTERING_COEFFICIENTS = 3969
"""Of an image, all of which are its features."""


def validate(content: dict[str, Any], prefix: str = "") -> Scenario:
    """Return the scenario in plain data; keys that are left out may depend on others.

    Args:
        content: sections by name, with their keys.
        prefix: begins the key of errors, where the data are part of a file.

    Returns:
        The scenario, with defaults for the keys that are left out.

    Raises:
        InputError: names the first wrong key.
    """
    try:
        scenario = Scenario.model_validate(content)
    except ValidationError as error:
        raise _explain(error, prefix) from None
    _check_posterior(scenario, f"{prefix}posterior.")
    defaults = {
        key: value
        for key, value in _dependent_defaults(scenario).items()
        if not scenario.is_set(key)
    }
    return with_values(scenario, defaults)


def _check_posterior(scenario: Scenario, prefix: str) -> None:
    """Refuse keys of the section `posterior` that contradict each other."""
    section = scenario.posterior
    has_images = section.data in DATA_SETS
    scatters = section.features == "scattering"
    sets_dim = scatters and scenario.is_set("posterior.dim")
    whitens = bool(section.whiten_from)
    refuse(
        (
            has_images and section.model != "softmax",
            f"{prefix}data",
            section.data,
            "used with posterior.model = 'softmax'",
        ),
        (
            scatters and not has_images,
            f"{prefix}features",
            section.features,
            f"'principal' without images ({', '.join(DATA_SETS)})",
        ),
        (
            sets_dim and section.dim != SCATTERING_COEFFICIENTS,
            f"{prefix}dim",
            section.dim,
            f"{SCATTERING_COEFFICIENTS} or left out",
        ),
        (
            whitens and section.data == "synthetic",
            f"{prefix}whiten_from",
            section.whiten_from,
            "left out for synthetic data",
        ),
        (
            whitens and has_images and not scatters,
            f"{prefix}whiten_from",
            section.whiten_from,
            "given for images with features = 'scattering'",
        ),
    )
    _check_public_prior(section, f"{prefix}prior_from")


def _check_public_prior(section: PosteriorSection, key: str) -> None:
    """Refuse public rows for a prior where the model or its features take none."""
    source = section.prior_from
    if not source:
        return
    if section.model not in ("gaussian", "softmax"):
        requirement = "left out for a custom model, which states its own prior"
        raise InputError(key, source, requirement)
    if section.data in DATA_SETS and section.features != "scattering":
        requirement = "given for images with features = 'scattering'"
        raise InputError(key, source, requirement)


def _dependent_defaults(scenario: Scenario) -> dict[str, Any]:
    """Return the defaults that depend on other keys."""
    defaults: dict[str, Any] = {}
    if scenario.sampler.dynamics == "kinetic":
        defaults["sampler.step_size"] = KINETIC_STEP
    data = scenario.posterior.data
    if data in DATA_SETS:
        scatters = scenario.posterior.features == "scattering"
        defaults |= PAPER_IMAGES
        if scatters:
            defaults["posterior.examples"] = DATA_SETS[data].train_images
            defaults["posterior.dim"] = SCATTERING_COEFFICIENTS
    return defaults


def with_values(scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
    """Return the scenario with other values of some keys.

    Values are not checked, and they count as set.

    Args:
        scenario: which stays as it is.
        values: by key, such as `link.snr_db`.

    Returns:
        A new scenario.
    """
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed = getattr(scenario, section).model_copy(update={name: value})
        scenario = scenario.model_copy(update={section: changed})
    return scenario


SECTION_ERRORS = ("model_type", "model_attributes_type", "dict_type")
"""Types of pydantic's errors about a section that is no table of keys."""
TYPE_ERRORS = ("_type", "literal_error")
"""Ends of the types of pydantic's errors about values of another type."""


class _Rule(NamedTuple):
    """A key, whether it has no effect, and why."""

    key: str
    has_no_effect: bool
    reason: str


def irrelevant(scenario: Scenario) -> dict[str, str]:
    """Return the keys that other keys make meaningless, each with the reason.

    They are returned whether they are set or not; a notice is due only for keys that
    are set.

    Args:
        scenario: as `validate` returns it.

    Returns:
        The end of a sentence "KEY has no effect: ..." by key, in the order of sections.
    """
    rules = [
        *_link_rules(scenario),
        *_posterior_rules(scenario.posterior),
        *_privacy_rules(scenario.privacy),
        *_sampler_rules(scenario.sampler),
        *_policy_rules(scenario),
    ]
    return {rule.key: rule.reason for rule in rules if rule.has_no_effect}


def _has_ideal_link(policy: PolicySection) -> bool:
    return policy.power in ("noiseless", "noiseless-dp")


def _has_release(posterior: PosteriorSection) -> bool:
    """Return whether a whitening release is sent over the link.

    It is, even if the policy then has an ideal link.
    """
    return posterior.preconditioner == "private-whiten"


def _link_rules(scenario: Scenario) -> list[_Rule]:
    """Return the rules of the section `link`."""
    link = scenario.link
    policy = scenario.policy
    is_ideal = _has_ideal_link(policy)
    is_unused = is_ideal and not _has_release(scenario.posterior)
    no_fading = link.fading in ("file", "static")
    is_random = link.csi_error > 0 or policy.schedule == "unbiased"
    draws_nothing = no_fading and (is_ideal or not is_random)
    fading = f"link.fading = {link.fading!r}"
    ideal_link = f"policy.power = {policy.power!r} has an ideal link"
    return [
        _Rule("link.rician_k", link.fading != "rician", fading),
        _Rule("link.gains", link.fading != "file", fading),
        _Rule("link.power", link.fading == "file", fading),
        _Rule("link.correlation", no_fading, fading),
        _Rule("link.seed", draws_nothing, f"{fading} draws nothing"),
        _Rule("link.snr_db", is_unused, ideal_link),
        _Rule("link.csi_error", is_unused, ideal_link),
        _Rule("link.downlink_snr_db", is_ideal, ideal_link),
    ]


def _posterior_rules(posterior: PosteriorSection) -> list[_Rule]:
    """Return the rules of the section `posterior`."""
    has_images = posterior.data in DATA_SETS
    is_drawn = has_images or posterior.data == "synthetic"
    is_dealt_out = posterior.partition not in ("blocks", "by-label")
    draws_nothing = not is_drawn and not is_dealt_out
    not_released = not _has_release(posterior)
    preconditioner = f"posterior.preconditioner = {posterior.preconditioner!r}"
    no_whitening = posterior.preconditioner == "none"
    data = f"posterior.data = {posterior.data!r}"
    no_public_rows = not posterior.whiten_from
    model = f"posterior.model = {posterior.model!r}"
    return [
        _Rule("posterior.seed", draws_nothing, "nothing is drawn"),
        _Rule("posterior.whiten_clip", not_released, preconditioner),
        _Rule("posterior.whiten_share", not_released, preconditioner),
        _Rule("posterior.whiten_rounds", not_released, preconditioner),
        _Rule("posterior.prior_on", no_whitening, preconditioner),
        _Rule("posterior.features", not has_images, data),
        _Rule(
            "posterior.whiten_ridge",
            no_public_rows,
            "there is no posterior.whiten_from",
        ),
        _Rule("posterior.classes", posterior.model != "softmax", model),
    ]


def _privacy_rules(privacy: PrivacySection) -> list[_Rule]:
    """Return the rules of the section `privacy`."""
    hides_devices = privacy.unit == "device"
    no_promise = privacy.epsilon is None
    return [
        _Rule("privacy.example_clip", hides_devices, "privacy.unit = 'device'"),
        _Rule("privacy.accountant", no_promise, "there is no privacy.epsilon"),
    ]


def _sampler_rules(sampler: SamplerSection) -> list[_Rule]:
    """Return the rules of the section `sampler`."""
    is_overdamped = sampler.dynamics != "kinetic"
    plans_nothing = sampler.burn_in == 0 and sampler.step_schedule == "planned"
    is_number = sampler.burn_in != "auto"
    return [
        _Rule("sampler.friction", is_overdamped, "sampler.dynamics = 'overdamped'"),
        _Rule("sampler.step_schedule", plans_nothing, "there is no burn-in"),
        _Rule("sampler.max_burn_in", is_number, "sampler.burn_in is a number"),
    ]


def _policy_rules(scenario: Scenario) -> list[_Rule]:
    """Return the rules of the section `policy`."""
    policy = scenario.policy
    is_kinetic = scenario.sampler.dynamics == "kinetic"
    is_ideal = _has_ideal_link(policy)
    power = f"policy.power = {policy.power!r}"
    schedule = f"policy.schedule = {policy.schedule!r}"
    kinetic = "sampler.dynamics = 'kinetic'"
    is_optimized = policy.power == "optimized"
    limits_overdamped = policy.power == "noiseless-dp" and not is_kinetic
    no_bound = is_kinetic and (is_ideal or policy.schedule == "all")
    looks_ahead = policy.power in ("optimized", "equal")
    return [
        _Rule(
            "policy.max_round_noise",
            not is_optimized and not limits_overdamped,
            f"{power} with {kinetic}" if is_kinetic else power,
        ),
        _Rule("policy.bound", no_bound, f"{kinetic} has no bound"),
        _Rule("policy.schedule", is_ideal, f"{power} always has all devices"),
        _Rule("policy.senders", policy.schedule != "unbiased", schedule),
        _Rule("policy.csi", not looks_ahead, f"{power} looks at no other round"),
    ]


def _explain(error: ValidationError, prefix: str) -> InputError:
    """Return the first problem as key, what was given, and what is allowed."""
    problems = error.errors()
    first = problems[0]
    location = first["loc"][:2]
    key = ".".join(str(part) for part in location)
    if first["type"] == "extra_forbidden":
        return InputError(prefix + key, first["input"], f"a known {_nearest(key)}")
    if first["type"] in SECTION_ERRORS:
        requirement = f"a section: write [{key}] and its keys below it"
        return InputError(prefix + key, first["input"], requirement)
    # Of the branches of a union, the one whose type fits explains more than the others.
    same_key = [problem for problem in problems if problem["loc"][:2] == location]
    fitting = [
        problem for problem in same_key if not problem["type"].endswith(TYPE_ERRORS)
    ]
    relevant = fitting or same_key
    value = relevant[0]["input"]
    is_nan = value != value  # values may be of any type, for which isnan may fail
    limit_errors = ("greater", "less")
    if is_nan and all(item["type"].startswith(limit_errors) for item in relevant):
        return InputError(prefix + key, value, "a number")
    messages = [problem["msg"].removeprefix("Input should be ") for problem in relevant]
    requirement = " or ".join(dict.fromkeys(messages))
    return InputError(prefix + key, value, re.sub(LONG_NUMBER, _short, requirement))


def _short(digits: re.Match[str]) -> str:
    """Return a limit with an exponent."""
    return f"{float(digits[0]):g}"


def _nearest(key: str) -> str:
    """Return what to write instead of an unknown section or key.

    It is the end of the sentence "must be a known ...".
    """
    section, _, name = key.partition(".")
    keys = [
        f"{section_name}.{field}"
        for section_name, model in SECTIONS.items()
        for field in model.model_fields
    ]
    kind = "key" if name else "section"
    candidates = [full for full in keys if full.endswith("." + (name or section))]
    if not candidates:
        valid_names = keys if name else list(SECTIONS)
        candidates = difflib.get_close_matches(key, valid_names, n=1)
    if candidates:
        return f"{kind}; did you mean {candidates[0]}?"
    siblings = [full for full in keys if full.startswith(section + ".")]
    return f"{kind} ({', '.join(siblings or SECTIONS)})"
