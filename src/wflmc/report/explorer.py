"""The explorer: Theorem 1 in the page, with a slider for everything that an engineer can choose."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

import numpy as np

from wflmc.errors import InputError
from wflmc.planning.bound import BOUNDS
from wflmc.privacy import ACCOUNTANTS, ADJACENCIES, UNITS
from wflmc.report.page import Section, as_script, asset, figure, page
from wflmc.report.plan_picture import COLORS
from wflmc.scenario import validate

MOST_ROUNDS = 10_000
MOST_DEVICES = 10_000
MOST_DIM = 1_000


class Constants(NamedTuple):
    """Where the explorer starts: a static channel, one kept sample, all devices alike and all sending."""

    mu: float
    L: float
    initial_w2_sq: float
    """W2² between start and posterior."""
    step_size: float
    dim: int = 5
    devices: int = 30
    rounds: int = 51
    snr_db: float = 20.0
    power: float = 1e-4
    """|h|²."""
    noise_power: float = 1.0
    epsilon: float = 8.0
    delta: float = 0.01
    clip: float = 30.0
    example_clip: float = 9.0
    unit: str = "device"
    adjacency: str = "replace"
    accountant: str = "exact"
    bound: str = "corrected"
    map_axis: str = "epsilon"


def paper_study() -> Constants:
    """The paper's single-sample study on synthetic data, figure 3a at 20 dB."""
    import jax

    from wflmc.posterior import gaussian_regression

    posterior = gaussian_regression(jax.random.key(0), devices=30)
    mu, L = posterior.mu, posterior.L
    return Constants(mu, L, posterior.initial_w2_sq("prior"), 0.4 / (mu + L))


def constants_of(document: dict[str, Any]) -> Constants:
    """The point of a plan, from its JSON; of unlike devices the one that limits the others.

    What Theorem 1 does not know starts at what comes nearest: a fading channel at a static one of its mean power,
    several kept samples at one kept after as many rounds, no promise at the paper's, kinetic steps at 0.4/(μ+L).
    """
    wanted = "as `wflmc plan --json` and `wflmc run --out` write it"
    try:
        scenario, found = validate(document["scenario"]), document["constants"]
        mu, L, dim = float(found["mu"]), float(found["L"]), int(found["dim"])
        start = Constants(
            mu=mu,
            L=L,
            dim=min(dim, MOST_DIM),
            initial_w2_sq=float(found["initial_w2_sq"] or dim),
            step_size=0.4 / (mu + L) if "friction" in found else float(found["step_size"]),
            devices=min(int(found["devices"]), MOST_DEVICES),
            rounds=min(int(found["rounds"]), MOST_ROUNDS),
        )
    except (KeyError, TypeError):
        raise InputError("plan.json", "a file without a plan's constants", wanted) from None
    link, privacy = scenario.link, scenario.privacy
    chosen: dict[str, Any] = {
        "snr_db": link.snr_db,
        "power": link.power,
        "noise_power": link.noise_power,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "clip": privacy.clip,
        "example_clip": privacy.example_clip,
    }
    # Of unlike devices the ones that limit the others: the weakest, the strictest, and the loudest gradients.
    limits: dict[str, Any] = {
        name: float((np.max if "clip" in name else np.min)(value))
        for name, value in chosen.items()
        if value is not None
    }
    return _within_limits(
        start._replace(
            **limits,
            unit=privacy.unit,
            adjacency=privacy.adjacency,
            accountant=privacy.accountant,
            bound=scenario.policy.bound,
        )
    )


def _within_limits(constants: Constants) -> Constants:
    """The nearest point that the page can start at, so that it never starts empty."""
    numbers = [*(slider.number for slider in _SLIDERS), *_NUMBERS, _EXAMPLE_CLIP]
    kept = {number.key: min(max(getattr(constants, number.key), number.least), number.most) for number in numbers}
    return constants._replace(**kept)


class _Number(NamedTuple):
    """A value that can be typed, with the least and the most it may be."""

    key: str
    label: str
    least: float
    most: float
    whole: bool = False


class _Slider(NamedTuple):
    """A number with a slider; the ends of a logarithmic one are powers of ten, of the step size those of η L/2.

    A step of a logarithmic one is 0.005 or more: values are rounded to three digits, and every step has to move them.
    """

    number: _Number
    low: float
    high: float
    step: float
    log: bool = False
    note: str = ""


_ABOUT_DEVICES = (
    "<details><summary>changes no curve: why?</summary><p>K cancels in Theorem 1 as long as ℓ stays: all devices are "
    "alike, and all send. More devices pay off where each then holds less data and has smaller gradients, that is by a "
    "smaller clip. K does change the scenario, the energy, and how much noise clipped gradients can undo.</p></details>"
)

_SLIDERS = (
    _Slider(_Number("snr_db", "SNR, P/(m N0)", -300, 300), -20, 60, 0.1),
    _Slider(_Number("epsilon", "privacy level ε", 1e-6, 1e6), -3, 3, 0.01, log=True),
    _Slider(_Number("delta", "privacy slack δ", 1e-300, 0.999), -12, -0.3, 0.005, log=True),
    _Slider(_Number("step_size", "step size η", 1e-50, 1e50), -4, -0.005, 0.005, log=True),
    _Slider(_Number("devices", "devices K", 1, MOST_DEVICES, whole=True), 1, 300, 1, note=_ABOUT_DEVICES),
    _Slider(_Number("rounds", "rounds S", 1, MOST_ROUNDS, whole=True), 1, 1000, 1),
    _Slider(_Number("clip", "clip ℓ of a device's gradient", 1e-6, 1e6), -1, 3, 0.01, log=True),
)

_NUMBERS = (
    _Number("mu", "strong convexity μ", 1e-12, 1e12),
    _Number("L", "smoothness L", 1e-12, 1e12),
    _Number("dim", "parameters m", 1, MOST_DIM, whole=True),
    _Number("initial_w2_sq", "W2² from start to posterior", 1e-12, 1e12),
    _Number("power", "channel power |h|²", 1e-30, 1e30),
    _Number("noise_power", "noise power N0", 1e-30, 1e30),
)
_EXAMPLE_CLIP = _Number("example_clip", "clip c of an example's gradient", 1e-6, 1e6)

_CHOICES = {
    "accountant": ("accountant", {name: name for name in ACCOUNTANTS}),
    "bound": ("bound", {name: name for name in BOUNDS}),
    "unit": ("what is hidden", {name: f"a {name}" for name in UNITS}),
    "adjacency": ("its neighbours (adjacency)", {name: name for name in ADJACENCIES}),
}
_AXES = {"epsilon": "ε", "delta": "δ", "step_size": "η", "rounds": "S", "clip": "ℓ"}

_ANSWER = (
    '<p class="wrong" id="trouble"></p><p class="answer"><strong id="regime" data-result></strong> '
    '<span>bound on W2²: <strong id="headline"></strong></span> <small id="scale"></small></p>'
)
_RESULTS = (
    ("objective", "bound on W2² after S rounds"),
    ("equal_objective", "the same with equal power"),
    ("floor", "floor of the bound, S → ∞ without excess noise"),
    ("spread", "the posterior’s own variance, at most m/μ"),
    ("budget", 'privacy budget R(ε, δ) (<span class="adjacency"></span>)'),
    ("loss", "privacy loss spent"),
    ("epsilon_spent", 'ε spent (<span class="adjacency"></span>)'),
    ("gain-first", "gain α, first round"),
    ("gain-last", "gain α, last round"),
    ("lmc_cap", "LMC cap on α (Langevin noise)"),
    ("power_cap", "power cap on α"),
    ("dp_share", "α at an equal share of the budget"),
    ("energy", "energy of all devices over all rounds, at most (in the unit of P and N0)"),
)


def section(constants: Constants) -> Section:
    """Controls, pictures and results; `scripts` bring them to life."""
    style = f"<style>{asset('explorer.css')}</style>"
    return Section(
        "explorer", "Explore", f'{style}<div class="explorer">{_ANSWER}{_controls(constants)}{_results()}</div>'
    )


def scripts(constants: Constants) -> list[str]:
    """What the page computes and draws by itself, started at these constants."""
    names = ("explorer_privacy.js", "explorer_theorem.js", "explorer_words.js", "explorer_pictures.js", "explorer.js")
    given = f"const START = {as_script(constants._asdict())}, COLORS = {as_script(COLORS)};"
    return ['(() => {\n"use strict";\n' + "\n".join([given, *map(asset, names)]) + "})();"]


def explorer_page(constants: Constants) -> str:
    """The explorer alone, as a whole file."""
    lead = (
        "Theorem 1 of wireless federated Langevin Monte Carlo: one kept sample over a static channel, power optimised. "
        "Everything is computed in this page; it asks the network for nothing."
    )
    return page("Which limit binds?", lead, [section(constants)], scripts(constants))


def _controls(constants: Constants) -> str:
    sliders = "".join(_slider(slider, constants) for slider in _SLIDERS)
    choices = "".join(_select(key, label, options) for key, (label, options) in _CHOICES.items())
    example = _number(_EXAMPLE_CLIP, constants)
    fixed = "".join(_number(number, constants) for number in _NUMBERS)
    return (
        '<form class="controls" aria-label="what can be chosen" onsubmit="return false">'
        f"{sliders}{choices}{example}<details><summary>model and channel</summary>{fixed}</details>"
        '<p><button type="button" id="reset">reset</button></p></form>'
    )


def _results() -> str:
    rows = "".join(f'<div><dt>{label}</dt><dd id="{key}" data-result></dd></div>' for key, label in _RESULTS)
    return (
        '<div id="results"><p id="verdict" aria-live="polite"></p><p class="note" id="cautions" hidden></p>'
        f"{asset('explorer_glossary.html')}"
        f'<div class="map">{_select("map_axis", "map over SNR and", _AXES)}'
        f"{figure('explorer-map', [], {}, 'Which limit binds where. A click moves the point.')}</div>"
        + figure("explorer-plan", [], {}, "How strongly devices send, and what a round costs of the privacy budget.")
        + figure(
            "explorer-bound",
            [],
            {},
            "The bound on W2² to the posterior, what it is made of, and the posterior’s own variance (m/μ at most).",
        )
        + f'<h3>In numbers</h3><dl>{rows}</dl><h3><label for="scenario">The scenario of this point</label></h3>'
        "<p>Save it as <code>point.toml</code>: <code>wflmc plan point.toml</code> gives the same numbers.</p>"
        '<textarea id="scenario" readonly wrap="off" spellcheck="false" rows="32"></textarea>'
        '<p><button type="button" id="copy">copy scenario</button> <span id="copied" role="status"></span></p></div>'
    )


def _wrong(key: str) -> str:
    return f'<p class="wrong" id="{key}-wrong" role="alert"></p>'


def _field(number: _Number, identity: str, constants: Constants) -> str:
    """A field for a number; its limits are for the script, which says them in words."""
    return (
        f'<input type="number" id="{identity}" data-key="{number.key}" data-name="{html.escape(number.label)}" '
        f'data-least="{number.least:g}" data-most="{number.most:g}" step="{1 if number.whole else "any"}" '
        f'value="{getattr(constants, number.key)!r}" aria-describedby="{number.key}-wrong">'
    )


def _ends(slider: _Slider, constants: Constants) -> tuple[float, float]:
    """Where a slider begins and ends: wide enough to hold the start, with room around it."""
    number, start = slider.number, float(getattr(constants, slider.number.key))
    is_step = number.key == "step_size"
    start = start * constants.L / 2 if is_step else start
    here, least, most = np.log10([start, number.least, number.most]) if slider.log else (start, *number[2:4])
    if slider.low <= here <= slider.high:
        return slider.low, slider.high
    room = (slider.high - slider.low) / 2
    low = max(min(slider.low, here - room), least)
    high = max(slider.high, here) if is_step else min(max(slider.high, here + room), most)
    return np.ceil(low / slider.step) * slider.step, np.floor(high / slider.step) * slider.step


def _slider(slider: _Slider, constants: Constants) -> str:
    key, label = slider.number.key, html.escape(slider.number.label)
    low, high = _ends(slider, constants)
    return (
        f'<div class="control"><div class="line"><label for="{key}">{label}</label>'
        f'<output for="{key}" id="{key}-shown"></output></div>'
        f'<div class="line"><input type="range" id="{key}" min="{low:g}" max="{high:g}" '
        f'step="{slider.step:g}" data-scale="{"log" if slider.log else "linear"}">'
        f'<label class="unseen" for="{key}-number">{label}, typed</label>'
        f"{_field(slider.number, f'{key}-number', constants)}</div>{_wrong(key)}{slider.note}</div>"
    )


def _number(number: _Number, constants: Constants) -> str:
    label = f'<label for="{number.key}">{html.escape(number.label)}</label>'
    return (
        f'<div class="control" id="{number.key}-row"><div class="line">{label}'
        f"{_field(number, number.key, constants)}</div>{_wrong(number.key)}</div>"
    )


def _select(key: str, label: str, options: dict[str, str]) -> str:
    items = "".join(f'<option value="{value}">{html.escape(text)}</option>' for value, text in options.items())
    return (
        f'<div class="control"><div class="line"><label for="{key}">{html.escape(label)}</label>'
        f'<select id="{key}" data-name="{html.escape(label)}" aria-describedby="{key}-wrong">{items}</select></div>'
        f"{_wrong(key)}</div>"
    )
