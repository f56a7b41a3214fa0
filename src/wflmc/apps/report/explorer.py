"""The explorer: Theorem 1 in the page, with a slider for everything that an engineer can choose."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from wflmc.apps.report.blocks import (
    Html,
    PageSection,
    as_script,
    asset,
    join,
    page,
    plot,
    text,
    words,
)
from wflmc.apps.report.figure import LIMIT_LOOKS
from wflmc.planning.bound import BOUNDS
from wflmc.privacy import ACCOUNTANTS
from wflmc.privacy.promise import ADJACENCIES, UNITS
from wflmc.runs.documents import PlanFile
from wflmc.scenario import validate

ROOM = 20
"""Steps of a slider on both sides of where it starts."""
SCRIPTS = (
    "explorer_privacy.js",
    "explorer_theorem.js",
    "explorer_words.js",
    "explorer_pictures.js",
    "explorer.js",
)
WORDS = words("explorer.toml")


class Control(NamedTuple):
    """A number that can be typed, and chosen by a slider where it has a step.

    The ends of a logarithmic slider are powers of ten, of the step size those of η L/2. Its step is 0.005 or more:
    values are rounded to three digits, and every step has to move them.
    """

    label: str
    least: float
    most: float
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    log: bool = False
    whole: bool = False


Start = Mapping[str, float | str]
"""Numbers and choices that the explorer starts at, by the names of its controls."""
CONTROLS = {key: Control(**fields) for key, fields in WORDS["controls"].items()}
CHOICES: dict[str, Iterable[str]] = {
    "accountant": ACCOUNTANTS,
    "bound": BOUNDS,
    "unit": UNITS,
}
CHOICES |= {"adjacency": ADJACENCIES, "map_axis": WORDS["names"]["map_axis"]}


def paper_study() -> Start:
    """Return the paper's single-sample study on synthetic data, figure 3a at 20 dB."""
    import jax

    from wflmc.posterior import gaussian_regression

    posterior = gaussian_regression(jax.random.key(0), devices=30)
    mu, L, start = posterior.mu, posterior.L, posterior.initial_w2_sq("prior")
    return {
        **WORDS["start"],
        "mu": mu,
        "L": L,
        "initial_w2_sq": start,
        "step_size": 0.4 / (mu + L),
    }


def constants_of(document: PlanFile | Mapping[str, object]) -> Start:
    """Return the point of a plan, from its JSON; of unlike devices the one that limits the others.

    What Theorem 1 does not know starts at what comes nearest: a fading channel at a static one of its mean power,
    several kept samples at one kept after as many rounds, no promise at the paper's, kinetic steps at 0.4/(μ+L).
    """
    plan = PlanFile.model_validate(document)
    scenario, c = validate(plan.scenario), plan.constants
    link, privacy = scenario.link, scenario.privacy
    values: dict[str, float] = {
        name: getattr(c, name)
        for name in ("mu", "L", "dim", "devices", "rounds", "step_size")
    }
    values["initial_w2_sq"] = c.initial_w2_sq or c.dim
    if scenario.sampler.dynamics == "kinetic":
        values["step_size"] = 0.4 / (c.mu + c.L)
    limits = {name: getattr(link, name) for name in ("snr_db", "power", "noise_power")}
    limits |= {
        name: getattr(privacy, name)
        for name in ("epsilon", "delta", "clip", "example_clip")
    }
    # Of unlike devices the ones that limit the others: the weakest, the strictest, the largest gradients.
    values |= {
        n: float(np.max(v) if "clip" in n else np.min(v))
        for n, v in limits.items()
        if v is not None
    }
    values = {
        name: min(max(v, CONTROLS[name].least), CONTROLS[name].most)
        for name, v in values.items()
    }
    chosen = {
        name: getattr(privacy, name) for name in ("unit", "adjacency", "accountant")
    }
    return {**WORDS["start"], **values, **chosen, "bound": scenario.policy.bound}


def section(constants: Start) -> PageSection:
    """Return controls, figures and results; `scripts` bring them to life."""
    controls = {
        key: _control(key, control, constants) for key, control in CONTROLS.items()
    }
    choices = {key: _choice(key, names) for key, names in CHOICES.items()}
    typed = [
        key
        for key, control in CONTROLS.items()
        if not control.step and key != "example_clip"
    ]
    content = text(
        asset("explorer.html"),
        sliders=join(
            controls[key] for key, control in CONTROLS.items() if control.step
        ),
        choices=join(
            [
                *(choices[key] for key in choices if key != "map_axis"),
                controls["example_clip"],
            ]
        ),
        constants=join(controls[key] for key in typed),
        glossary=Html(asset("explorer_glossary.html")),
        map_axis=choices["map_axis"],
        **{
            name: plot(f"explorer-{name}", [], {}, caption)
            for name, caption in WORDS["captions"].items()
        },
    )
    return PageSection(
        "explorer", "Explore", f"<style>{asset('explorer.css')}</style>{content}"
    )


def scripts(constants: Start) -> list[str]:
    """Return what the page computes and draws by itself, started at these constants."""
    colors = {name: color for name, (color, _) in LIMIT_LOOKS.items()}
    given = f"const START = {as_script(constants)}, COLORS = {as_script(colors)};"
    return [
        '(() => {\n"use strict";\n' + "\n".join([given, *map(asset, SCRIPTS)]) + "})();"
    ]


def explorer_page(constants: Start) -> str:
    """Return the explorer alone, as a whole file."""
    lead = "Theorem 1: one kept sample over a static channel, power optimised. All is computed here, without a network."
    return page("Which limit binds?", lead, [section(constants)], scripts(constants))


def _control(key: str, control: Control, constants: Start) -> Html:
    """Return a number with its slider, or alone; its limits are for the script, which says them in words."""
    parts = {
        **control._asdict(),
        "key": key,
        "value": repr(constants[key]),
        "step": "1" if control.whole else "any",
    }
    parts |= {"least": f"{control.least:g}", "most": f"{control.most:g}"}
    if not control.step:
        return text(asset("explorer_number.html"), **parts)
    start = float(constants[key])
    if key == "step_size":
        start = start * float(constants["L"]) / 2
    here = round((np.log10(start) if control.log else start) / control.step)
    # Wide enough to hold the start, with room beside it; steps of 2/L and more are of no use.
    low, high = (
        min(control.low, (here - ROOM) * control.step),
        max(control.high, (here + ROOM) * control.step),
    )
    parts |= {
        "low": f"{low:g}",
        "high": f"{min(high, 0) if key == 'step_size' else high:g}",
    }
    parts |= {"slide": f"{control.step:g}", "scale": "log" if control.log else "linear"}
    note = Html(asset("explorer_devices.html")) if key == "devices" else ""
    return text(asset("explorer_slider.html"), **parts, note=note)


def _choice(key: str, names: Iterable[str]) -> Html:
    options = ((name, WORDS["names"].get(key, {}).get(name, name)) for name in names)
    items = (
        text('<option value="{name}">{words}</option>', name=name, words=words)
        for name, words in options
    )
    return text(
        asset("explorer_choice.html"),
        key=key,
        label=WORDS["labels"][key],
        options=join(items),
    )
