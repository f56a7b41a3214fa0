"""The scenario file's keys, and one clear sentence for each way to get them wrong.

Keys that are fields of `Link`, `Privacy`, `Sampler` and `Policy` are declared there;
here are those that only a file has.
"""

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from wflmc.support.errors import InputError

# The outer limits keep squares and sums inside the range of floats, and sizes inside what machines hold.
Positive = Annotated[float, Field(ge=1e-50, le=1e50, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e50, allow_inf_nan=False)]
OneOrEach = Positive | Annotated[list[Positive], Field(min_length=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**7)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
LONG = r"(?<=[no] )(0\.00000\d*|\d{12,})"
"""A limit that is better read with an exponent, behind "greater than" or "equal to"."""

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
    whiten_from: str = ""
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
    prior_on: Literal["parameters", "whitened"] = "parameters"
    classes: Annotated[int, Field(ge=2, le=10**7)] | list[int] | list[str] | None = None
    mu: NotNegative = 0.0
    L: NotNegative = 0.0
    initial_w2_sq: NotNegative = 0.0
    seed: Seed = 0

    @property
    def adds_ones(self) -> bool:
        """Whether an intercept is a column of ones; public features have a smaller constant of their own."""
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

    def given(self, key: str) -> bool:
        """Return whether a key such as `link.power` was set rather than left at its default."""
        section, _, name = key.partition(".")
        return (
            section in self.model_fields_set
            and name in getattr(self, section).model_fields_set
        )


SECTIONS = {name: type(field.default) for name, field in Scenario.model_fields.items()}
KINETIC_STEP = "1/L**0.5"
"""Half of where kinetic steps become unstable."""
PAPER_IMAGES = {"posterior.examples": 12_000, "posterior.dim": 30}
"""The paper's images of MNIST, and principal directions that they are projected on."""
ALL_IMAGES = {"posterior.examples": 60_000, "posterior.dim": 3969}
"""All images, and their scattering coefficients."""


def validate(content: dict[str, Any], place: str = "") -> Scenario:
    """Return the scenario in plain data; keys that are left out may depend on others.

    Args:
        place: begins the key of errors, where the data are part of a file.

    Raises:
        InputError: names the first wrong key.
    """
    try:
        scenario = Scenario.model_validate(content)
    except ValidationError as error:
        raise _explain(error, place) from None
    defaults: dict[str, Any] = {}
    if scenario.sampler.dynamics == "kinetic":
        defaults["sampler.step_size"] = KINETIC_STEP
    section, images = scenario.posterior, scenario.posterior.data in DATA_SETS
    scattering, whitened = section.features == "scattering", section.whiten_from
    if images:
        defaults |= ALL_IMAGES if scattering else PAPER_IMAGES
    for key, wrong, allowed in (
        (
            "data",
            images and section.model != "softmax",
            "used with posterior.model = 'softmax'",
        ),
        (
            "features",
            scattering and not images,
            f"'principal' without images ({', '.join(DATA_SETS)})",
        ),
        (
            "dim",
            scattering and scenario.given("posterior.dim") and section.dim != 3969,
            "3969 or left out",
        ),
        (
            "whiten_from",
            whitened and section.data == "synthetic",
            "left out for synthetic data",
        ),
        (
            "whiten_from",
            whitened and images and not scattering,
            "given for images with features = 'scattering'",
        ),
    ):
        if wrong:
            raise InputError(f"{place}posterior.{key}", getattr(section, key), allowed)
    return with_values(
        scenario,
        {key: value for key, value in defaults.items() if not scenario.given(key)},
    )


def with_values(scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
    """Return the scenario with other values of some keys, such as `link.snr_db`."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed = getattr(scenario, section).model_copy(update={name: value})
        scenario = scenario.model_copy(update={section: changed})
    return scenario


def irrelevant(scenario: Scenario) -> dict[str, str]:
    """Return the keys that other keys make meaningless, each with the reason."""
    posterior, link, privacy, sampler, policy = (
        getattr(scenario, section) for section in SECTIONS
    )
    ideal = policy.power in ("noiseless", "noiseless-dp")
    released = (
        posterior.preconditioner == "private-whiten"
    )  # over the link, whatever comes after
    kinetic = sampler.dynamics == "kinetic"
    no_fading = link.fading in ("file", "static")
    random_link = link.csi_error > 0 or policy.schedule == "unbiased"
    nothing_drawn = posterior.data not in (
        "synthetic",
        *DATA_SETS,
    ) and posterior.partition in ("blocks", "by-label")
    fading, power = f"link.fading = {link.fading!r}", f"policy.power = {policy.power!r}"
    ideal_link = f"{power} has an ideal link"
    without_limit = policy.power not in ("optimized", "noiseless-dp") or (
        kinetic and policy.power != "optimized"
    )
    preconditioner = f"posterior.preconditioner = {posterior.preconditioner!r}"
    rules = [
        ("link.rician_k", link.fading != "rician", fading),
        ("link.gains", link.fading != "file", fading),
        ("link.power", link.fading == "file", fading),
        ("link.correlation", no_fading, fading),
        (
            "link.seed",
            no_fading and (ideal or not random_link),
            f"{fading} draws nothing",
        ),
        *(
            (f"link.{name}", ideal and not released, ideal_link)
            for name in ("snr_db", "csi_error")
        ),
        ("link.downlink_snr_db", ideal, ideal_link),
        ("posterior.seed", nothing_drawn, "nothing is drawn"),
        *(
            (f"posterior.whiten_{name}", not released, preconditioner)
            for name in ("clip", "share", "rounds")
        ),
        ("posterior.prior_on", posterior.preconditioner == "none", preconditioner),
        (
            "posterior.features",
            posterior.data not in DATA_SETS,
            f"posterior.data = {posterior.data!r}",
        ),
        (
            "posterior.whiten_ridge",
            not posterior.whiten_from,
            "there is no posterior.whiten_from",
        ),
        (
            "posterior.classes",
            posterior.model != "softmax",
            f"posterior.model = {posterior.model!r}",
        ),
        ("privacy.example_clip", privacy.unit == "device", "privacy.unit = 'device'"),
        ("privacy.accountant", privacy.epsilon is None, "there is no privacy.epsilon"),
        ("sampler.friction", not kinetic, "sampler.dynamics = 'overdamped'"),
        (
            "sampler.step_schedule",
            sampler.burn_in == 0 and sampler.step_schedule == "planned",
            "there is no burn-in",
        ),
        (
            "sampler.max_burn_in",
            sampler.burn_in != "auto",
            "sampler.burn_in is a number",
        ),
        (
            "policy.max_round_noise",
            without_limit,
            power + " with sampler.dynamics = 'kinetic'" * kinetic,
        ),
        (
            "policy.bound",
            kinetic and (ideal or policy.schedule == "all"),
            "sampler.dynamics = 'kinetic' has no bound",
        ),
        ("policy.schedule", ideal, f"{power} always has all devices"),
        (
            "policy.senders",
            policy.schedule != "unbiased",
            f"policy.schedule = {policy.schedule!r}",
        ),
        (
            "policy.csi",
            policy.power not in ("optimized", "equal"),
            f"{power} looks at no other round",
        ),
    ]
    return {key: why for key, holds, why in rules if holds}


def _explain(error: ValidationError, place: str) -> InputError:
    """Return the first problem as key, what was given, and what is allowed."""
    first, *_ = problems = error.errors()
    key = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "extra_forbidden":
        return InputError(place + key, first["input"], f"a known {_nearest(key)}")
    if first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return InputError(
            place + key,
            first["input"],
            f"a section: write [{key}] and its keys below it",
        )
    # Of the branches of a union, the one whose type fits tells more than those whose type does not.
    same_key = [
        problem for problem in problems if problem["loc"][:2] == first["loc"][:2]
    ]
    fitting = [
        problem
        for problem in same_key
        if not problem["type"].endswith(("_type", "literal_error"))
    ] or same_key
    given = fitting[0]["input"]
    if given != given and all(
        problem["type"].startswith(("greater", "less")) for problem in fitting
    ):
        return InputError(
            place + key, given, "a number"
        )  # nan is on neither side of a limit
    allowed = " or ".join(
        dict.fromkeys(
            problem["msg"].removeprefix("Input should be ") for problem in fitting
        )
    )
    return InputError(
        place + key,
        given,
        re.sub(LONG, lambda digits: f"{float(digits[0]):g}", allowed),
    )


def _nearest(key: str) -> str:
    """Return what to write instead of an unknown section or key."""
    section, _, name = key.partition(".")
    names = [
        f"{section}.{field}"
        for section, model in SECTIONS.items()
        for field in model.model_fields
    ]
    elsewhere = [full for full in names if full.endswith("." + (name or section))]
    near = elsewhere or difflib.get_close_matches(key, names if name else SECTIONS, n=1)
    siblings = [full for full in names if full.startswith(section + ".")] or [*SECTIONS]
    kind = "key" if name else "section"
    return (
        f"{kind}; did you mean {near[0]}?"
        if near
        else f"{kind} ({', '.join(siblings)})"
    )
