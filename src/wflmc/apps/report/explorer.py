"""The explorer: Theorem 1 in a page, with a slider for each thing that can be chosen.

The page computes everything by its own JavaScript (`assets/explorer*.js`), which tests
compare with `wflmc plan`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from wflmc.apps.report.figure import LIMIT_LOOKS
from wflmc.apps.report.plotly_figures import embed_drawing
from wflmc.apps.report.templates import PageSection, read_asset, render, render_page
from wflmc.planning.bound import BOUNDS
from wflmc.privacy import ACCOUNTANTS
from wflmc.privacy.promise import ADJACENCIES, UNITS
from wflmc.runs.documents import Constants, PlanFile
from wflmc.scenario import Scenario, validate

SLIDER_MARGIN_STEPS = 20
"""Steps of a slider on both sides of where it starts."""
PAPER_STEP_FACTOR = 0.4
"""η (μ + L) of the paper's single-sample study."""
SCRIPTS = (
    "explorer_privacy.js",
    "explorer_theorem.js",
    "explorer_words.js",
    "explorer_pictures.js",
    "explorer.js",
)
"""The scripts of the explorer, in the order in which they run."""

Start = Mapping[str, float | str]
"""Numbers and choices that the explorer starts at, by the names of its controls."""
PAPER_START: Start = {
    "dim": 5,
    "devices": 30,
    "rounds": 51,
    "snr_db": 20.0,
    "power": 1e-4,
    "noise_power": 1.0,
    "epsilon": 8.0,
    "delta": 0.01,
    "clip": 30.0,
    "example_clip": 9.0,
    "unit": "device",
    "adjacency": "replace",
    "accountant": "exact",
    "bound": "corrected",
    "map_axis": "epsilon",
}
"""Where the explorer starts, beside μ, L, the initial W2² and the step size: as in the
paper's single-sample study."""


@dataclass(frozen=True)
class Slider:
    """The scale of a slider.

    The ends and the step of a logarithmic slider are exponents of ten; those of the
    step size are of η L/2. A step is 0.005 or more: values are rounded to three digits,
    and every step has to move them.
    """

    low: float
    high: float
    step: float
    log: bool = False


@dataclass(frozen=True)
class Control:
    """A number that can be typed, and chosen by a slider where it has one."""

    label: str
    smallest: float
    """The smallest value that can be typed."""
    largest: float
    slider: Slider | None = None
    is_integer: bool = False


CONTROLS = {
    "snr_db": Control("SNR, P/(m N0)", -300, 300, Slider(-20, 60, 0.1)),
    "epsilon": Control("privacy level ε", 1e-6, 1e6, Slider(-3, 3, 0.01, log=True)),
    "delta": Control(
        "privacy slack δ", 1e-300, 0.999, Slider(-12, -0.3, 0.005, log=True)
    ),
    "step_size": Control(
        "step size η", 1e-50, 1e50, Slider(-4, -0.005, 0.005, log=True)
    ),
    "devices": Control("devices K", 1, 10_000, Slider(1, 300, 1), is_integer=True),
    "rounds": Control("rounds S", 1, 10_000, Slider(1, 1000, 1), is_integer=True),
    "clip": Control(
        "clip ℓ of a device's gradient", 1e-6, 1e6, Slider(-1, 3, 0.01, log=True)
    ),
    "example_clip": Control("clip c of an example's gradient", 1e-6, 1e6),
    "mu": Control("strong convexity μ", 1e-12, 1e12),
    "L": Control("smoothness L", 1e-12, 1e12),
    "dim": Control("parameters m", 1, 1_000, is_integer=True),
    "initial_w2_sq": Control("W2² from start to posterior", 1e-12, 1e12),
    "power": Control("channel power |h|²", 1e-30, 1e30),
    "noise_power": Control("noise power N0", 1e-30, 1e30),
}
"""The numbers of the explorer by the names that its scripts and addresses use."""


@dataclass(frozen=True)
class Choice:
    """A list to choose from."""

    label: str
    options: Mapping[str, str]
    """From the value to what the page calls it."""


def _same_names(values: Sequence[str]) -> dict[str, str]:
    """Return options that are called by their values."""
    return {value: value for value in values}


CHOICES = {
    "accountant": Choice("accountant", _same_names(list(ACCOUNTANTS))),
    "bound": Choice("bound", _same_names(BOUNDS)),
    "unit": Choice("what is hidden", {unit: f"a {unit}" for unit in UNITS}),
    "adjacency": Choice("its neighbours (adjacency)", _same_names(ADJACENCIES)),
    "map_axis": Choice(
        "map over SNR and",
        {"epsilon": "ε", "delta": "δ", "step_size": "η", "rounds": "S", "clip": "ℓ"},
    ),
}
"""The choices of the explorer, by the names that its scripts use."""
CAPTIONS = {
    "map": "Which limit binds where. A click moves the point.",
    "plan": "The gain of each round, and its privacy loss.",
    "bound": (
        "The bound on W2² to the posterior, its parts, and the posterior’s own "
        "variance (m/μ at most)."
    ),
}
"""Captions of the explorer's figures, by the names that its scripts use."""


@dataclass(frozen=True)
class SliderScale:
    """A slider as it stands on a page, with ends that hold where it starts."""

    low: str
    high: str
    step: str
    kind: str
    """log or linear."""


@dataclass(frozen=True)
class NumberField:
    """A control as it stands on a page; its limits are for the script to check."""

    key: str
    label: str
    smallest: str
    largest: str
    step: str
    value: str
    slider: SliderScale | None


def paper_study() -> Start:
    """Return the paper's single-sample study on synthetic data, figure 3a at 20 dB.

    μ, L and the initial W2² are those of the linear regression on 30 devices that the
    paper's data are drawn by; the step size is 0.4/(μ + L).

    Returns:
        The numbers and choices that an explorer starts at without a plan.
    """
    import jax

    from wflmc.posterior import gaussian_regression

    posterior = gaussian_regression(jax.random.key(0), devices=30)
    mu = posterior.mu
    L = posterior.L
    return {
        **PAPER_START,
        "mu": mu,
        "L": L,
        "initial_w2_sq": posterior.initial_w2_sq("prior"),
        "step_size": PAPER_STEP_FACTOR / (mu + L),
    }


def constants_of(document: PlanFile | Mapping[str, object]) -> Start:
    """Return the point of a plan, for an explorer to start at.

    What Theorem 1 does not cover starts at what comes nearest: a fading channel at a
    static one of its mean power, several kept samples at one kept after as many rounds,
    no promise at the paper's, kinetic steps at 0.4/(μ + L). Where devices differ, the
    smallest SNR, power, noise power, ε and δ count, and the largest clips, whichever
    devices have them. Values beyond the limits of a control are moved to them.

    Args:
        document: plan.json, read or as plain data.

    Returns:
        The numbers and choices, by the names of the controls.
    """
    plan = PlanFile.model_validate(document)
    scenario = validate(plan.scenario)
    numbers = _plan_numbers(plan.constants, scenario)
    numbers |= _limiting_numbers(scenario)
    privacy = scenario.privacy
    return {
        **PAPER_START,
        **{key: _within_limits(key, value) for key, value in numbers.items()},
        "unit": privacy.unit,
        "adjacency": privacy.adjacency,
        "accountant": privacy.accountant,
        "bound": scenario.policy.bound,
    }


def _plan_numbers(constants: Constants, scenario: Scenario) -> dict[str, float]:
    """Return the constants of a plan that are controls.

    An initial W2² that is not known, or zero, starts at m.
    """
    step_size = constants.step_size
    if scenario.sampler.dynamics == "kinetic":
        step_size = PAPER_STEP_FACTOR / (constants.mu + constants.L)
    return {
        "mu": constants.mu,
        "L": constants.L,
        "dim": constants.dim,
        "devices": constants.devices,
        "rounds": constants.rounds,
        "step_size": step_size,
        "initial_w2_sq": constants.initial_w2_sq or constants.dim,
    }


def _limiting_numbers(scenario: Scenario) -> dict[str, float]:
    """Return the weakest link, the strictest promise and the largest gradients."""
    link = scenario.link
    privacy = scenario.privacy
    smallest = {
        "snr_db": link.snr_db,
        "power": link.power,
        "noise_power": link.noise_power,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
    }
    largest = {"clip": privacy.clip, "example_clip": privacy.example_clip}
    numbers = {
        key: float(np.min(np.asarray(values)))
        for key, values in smallest.items()
        if values is not None
    }
    for key, values in largest.items():
        if values is not None:
            numbers[key] = float(np.max(np.asarray(values)))
    return numbers


def _within_limits(key: str, value: float) -> float:
    """Return a number, or the limit of its control that it lies beyond."""
    control = CONTROLS[key]
    return min(max(value, control.smallest), control.largest)


def section(constants: Start) -> PageSection:
    """Render controls, figures and results; `scripts` bring them to life.

    Args:
        constants: the numbers and choices that it starts at, as `constants_of` or
            `paper_study` return them. Sliders are as wide as these need.

    Returns:
        The section, with its own style sheet.
    """
    fields = {key: _number_field(key, constants) for key in CONTROLS}
    figures = {}
    for name, caption in CAPTIONS.items():
        figures[name] = embed_drawing(f"explorer-{name}", [], {}, caption=caption)
    style = read_asset("explorer.css")
    html = render(
        "explorer.html", style=style, fields=fields, choices=CHOICES, figures=figures
    )
    return PageSection("explorer", "Explore", html)


def scripts(constants: Start) -> list[Markup]:
    """Return what the page computes and draws by itself.

    Args:
        constants: the numbers and choices that it starts at, as those of `section`.

    Returns:
        One script, which defines nothing outside of itself but `window.wflmc`.
    """
    script = render(
        "explorer.js",
        start=dict(constants),
        colors={name: look.color for name, look in LIMIT_LOOKS.items()},
        sources=[read_asset(name) for name in SCRIPTS],
    )
    return [script]


def explorer_page(constants: Start) -> str:
    """Render the explorer alone, as a whole file.

    Args:
        constants: the numbers and choices that it starts at, as `constants_of` or
            `paper_study` return them.

    Returns:
        One HTML file that computes everything by itself, without a network.
    """
    lead = (
        "Theorem 1: one kept sample over a static channel, power optimised. The page "
        "computes everything itself, without a network."
    )
    sections = [section(constants)]
    return render_page("Which limit binds?", lead, sections, scripts(constants))


def _number_field(key: str, constants: Start) -> NumberField:
    """Return a control as it stands on a page."""
    control = CONTROLS[key]
    scale = None
    if control.slider is not None:
        start = float(constants[key])
        if key == "step_size":
            start = start * float(constants["L"]) / 2
        scale = _slider_scale(control.slider, start, below_one=key == "step_size")
    return NumberField(
        key=key,
        label=control.label,
        smallest=f"{control.smallest:g}",
        largest=f"{control.largest:g}",
        step="1" if control.is_integer else "any",
        value=repr(constants[key]),
        slider=scale,
    )


def _slider_scale(slider: Slider, start: float, *, below_one: bool) -> SliderScale:
    """Return a slider that is wide enough for its start, with steps beside it.

    Args:
        slider: the usual scale.
        start: the value that it starts at, in the slider's unit.
        below_one: whether values of one and more are of no use: steps of 2/L are not.
    """
    position = math.log10(start) if slider.log else start
    step_index = round(position / slider.step)
    first_index = step_index - SLIDER_MARGIN_STEPS
    last_index = step_index + SLIDER_MARGIN_STEPS
    low = min(slider.low, first_index * slider.step)
    high = max(slider.high, last_index * slider.step)
    if below_one:
        high = min(high, 0)
    return SliderScale(
        low=f"{low:g}",
        high=f"{high:g}",
        step=f"{slider.step:g}",
        kind="log" if slider.log else "linear",
    )
