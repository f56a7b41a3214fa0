"""A scenario in sentences, and how the explorer's setting differs from it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from operator import attrgetter
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy import HIDDEN
from wflmc.report.blocks import Html, asset, join, number, text
from wflmc.report.explorer import MOST_DEVICES, MOST_DIM, MOST_ROUNDS
from wflmc.runs.documents import PlanFile
from wflmc.runs.folder import Run
from wflmc.scenario import Scenario

DATA = {"synthetic": "synthetic data", "mnist": "MNIST"}


def sentences(cases: Iterable[tuple[Any, str]], **parts: object) -> Html:
    """Return the sentences of all cases (holds, sentence) that hold, one after the other."""
    return join(text(sentence + " ", **parts) for holds, sentence in cases if holds)


def scenario_rows(scenario: Scenario, run: Run) -> list[tuple[str, Html]]:
    """Return the scenario of a run in the sentences of `scenario_words.toml`, each row with what it is about."""
    parts = _parts(scenario, run)
    rows = []
    for about, keys in tomllib.loads(asset("scenario_words.toml")).items():
        said = [(words.get(str(attrgetter(key)(parts)), words.get("*"))) for key, words in keys.items()]
        rows.append((about, sentences(((sentence, sentence) for sentence in said), **vars(parts))))
    return rows


def _parts(scenario: Scenario, run: Run) -> SimpleNamespace:
    """Return the sections of a scenario, and what sentences say beyond their values."""
    link, policy, privacy, plan = scenario.link, scenario.policy, scenario.privacy, run.plan
    posterior = None if run.rebuilt is None else run.rebuilt.inputs.posterior
    classes = ""
    if isinstance(posterior, SoftmaxPosterior):
        names = [str(name) for name in posterior.class_names]
        classes = f" into {len(names)} classes ({', '.join(names[:10])}{', …' * (len(names) > 10)})"
    held = [] if posterior is None else posterior.sizes.tolist()
    everyone = plan is not None and min(plan.active_devices) == plan.constants.devices
    parameters = {} if plan is None else plan.constants.motion.parameters
    return SimpleNamespace(
        **{**dict(scenario), "link": type(link)() if run.ideal else link},
        examples=sum(held),
        held=held,
        source=DATA.get(scenario.posterior.data, PurePath(scenario.posterior.data).name),
        classes=classes,
        constants=plan and plan.constants,
        channel="ideal" if run.ideal else link.fading,
        gains=PurePath(link.gains).name,
        hidden=HIDDEN[privacy.unit, privacy.adjacency],
        clipping="none" if policy.power == "noiseless" else privacy.unit,
        ignored=privacy.epsilon is not None and policy.power in ("no-dp", "noiseless"),
        step_size=plan and plan.step_size,
        parameters=", ".join(f"the {name} {number(value)}" for name, value in parameters.items()),
        participation="ideal" if run.ideal else "all" if everyone else policy.schedule,
        power=f"optimized {policy.objective}" if policy.power == "optimized" else policy.power,
    )


def outside_theorem(run: Run) -> str:
    """Return why the explorer would not be about a run at all; empty where it is."""
    if run.ideal:
        return "its link is ideal, so that no channel limits anything"
    kinetic = run.scenario is not None and run.scenario.sampler.dynamics == "kinetic"
    return "the bound does not hold for kinetic dynamics" if kinetic else ""


def explorer_changes(scenario: Scenario, plan: PlanFile) -> list[str]:
    """Return what the explorer, which starts at the nearest setting of Theorem 1, changes of a run."""
    link, privacy, policy, c = scenario.link, scenario.privacy, scenario.policy, plan.constants
    each = [link.snr_db, link.power, privacy.epsilon, privacy.delta, privacy.clip, privacy.example_clip]
    changes = [
        (link.fading in ("rayleigh", "rician"), "a static channel of the mean power instead of fading"),
        (link.fading == "file", "a static channel of the scenario's power instead of gains from a file"),
        (link.csi_error or link.downlink_snr_db < float("inf"), "known channels and a noiseless broadcast"),
        (c.samples > 1, f"one draw kept after all rounds instead of {c.samples:,}"),
        (privacy.epsilon is None, f"the paper's promise (8, 0.01) ({privacy.adjacency}), as this run has none"),
        (any(isinstance(v, list) and len(set(v)) > 1 for v in each), "for all devices the smallest of each value"),
        (min(plan.active_devices) < c.devices, "all devices transmit instead of some"),
        (len(set(plan.step_size)) > 1, "the step size of the last round in all rounds"),
        (policy.power != "optimized", f"optimized power instead of {policy.power}"),
        (policy.objective == "exact", "the bound minimised instead of the exact law"),
        (c.dim > MOST_DIM, f"{MOST_DIM:,} parameters instead of {c.dim:,}"),
        (c.devices > MOST_DEVICES, f"{MOST_DEVICES:,} devices instead of {c.devices:,}"),
        (c.rounds > MOST_ROUNDS, f"{MOST_ROUNDS:,} rounds instead of {c.rounds:,}"),
    ]
    return [sentence for holds, sentence in changes if holds]
