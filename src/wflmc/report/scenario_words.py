"""A scenario in sentences."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from operator import attrgetter
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy.promise import HIDDEN
from wflmc.report.blocks import Html, asset, number, paragraph, text
from wflmc.runs.folder import Run

DATA = {"synthetic": "synthetic data", "mnist": "MNIST"}


def sentences(cases: Iterable[tuple[Any, str]], **parts: object) -> Html:
    """Return a paragraph with the sentences of all cases (holds, sentence) that hold."""
    return paragraph(" ".join(sentence for holds, sentence in cases if holds), **parts)


def scenario_rows(run: Run) -> list[tuple[str, Html]]:
    """Return the scenario of a run in the sentences of `scenario_words.toml`, each row with what it is about."""
    parts = _parts(run)
    rows = []
    for about, keys in tomllib.loads(asset("scenario_words.toml")).items():
        said = [words.get(str(attrgetter(key)(parts)), words.get("*", "")) for key, words in keys.items()]
        rows.append((about, text(" ".join(filter(None, said)), **vars(parts))))
    return rows


def _parts(run: Run) -> SimpleNamespace:
    """Return the sections of a scenario, and what sentences say beyond their values."""
    scenario, plan, posterior = run.scenario, run.plan, None if run.rebuilt is None else run.rebuilt.inputs.posterior
    link, policy, privacy = scenario.link, scenario.policy, scenario.privacy
    names = list(map(str, posterior.class_names)) if isinstance(posterior, SoftmaxPosterior) else []
    listed = f"{', '.join(names[:10])}{', …' * (len(names) > 10)}"
    held = [] if posterior is None else posterior.sizes.tolist()
    everyone = min(plan.active_devices) == plan.constants.devices
    return SimpleNamespace(
        **{**dict(scenario), "link": type(link)() if run.ideal else link},
        examples=sum(held),
        held=held,
        source=DATA.get(scenario.posterior.data, PurePath(scenario.posterior.data).name),
        classes=f" into {len(names)} classes ({listed})" if names else "",
        constants=plan.constants,
        channel="ideal" if run.ideal else link.fading,
        gains=PurePath(link.gains).name,
        hidden=HIDDEN[privacy.unit, privacy.adjacency],
        clipping="none" if policy.power == "noiseless" else privacy.unit,
        ignored=privacy.epsilon is not None and policy.power in ("no-dp", "noiseless"),
        step_size=plan.step_size,
        parameters=", ".join(f"the {key} {number(value)}" for key, value in plan.constants.motion.parameters.items()),
        participation="ideal" if run.ideal else "all" if everyone else policy.schedule,
        power=f"optimized {policy.objective}" if policy.power == "optimized" else policy.power,
    )
