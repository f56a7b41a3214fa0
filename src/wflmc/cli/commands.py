"""What the commands do, without how it is shown."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from wflmc import report, studies
from wflmc.errors import InputError, naming
from wflmc.evaluation import evaluate
from wflmc.posterior import gaussian_regression
from wflmc.sampling import sample
from wflmc.scenario import (
    Inputs,
    Scenario,
    build,
    load_data,
    load_scenario,
    make_plan,
    plan_document,
    read_plan,
    summary_document,
    to_json,
    to_toml,
    write_text,
)

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def plan_command(path: str, overrides: list[str] | None) -> dict[str, Any]:
    """The plan's JSON document."""
    began = time.perf_counter()
    scenario = load_scenario(path, overrides)
    inputs = build(scenario)
    made = make_plan(scenario, inputs)
    return plan_document(scenario, inputs, made, time.perf_counter() - began)


def _folder(out: str) -> Path:
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--out", out, f"a folder that can be written ({error.strerror})") from None
    return folder


def run_command(
    path: str | None, saved_plan: str | None, out: str | None, overrides: list[str] | None, bar: ProgressBar
) -> tuple[dict[str, Any], str, Path | None]:
    """The summary as JSON document and as text, and the folder that was written."""
    began = time.perf_counter()
    if (path is None) == (saved_plan is None):
        raise InputError("scenario", path, "given as a file, or in its place a plan by --plan FILE")
    if path is None:
        if overrides:
            raise InputError("--set", overrides[0], "left out with --plan, which is already made")
        scenario, inputs, made = read_plan(str(saved_plan))
    else:
        scenario = load_scenario(path, overrides)
        inputs = build(scenario)
        made = make_plan(scenario, inputs)
    document = plan_document(scenario, inputs, made, time.perf_counter() - began)
    folder = None if out is None else _folder(out)
    if folder is not None:
        settled = scenario.sampler.model_copy(update={"burn_in": made.burn_in})
        write_text(folder / "scenario.toml", to_toml(scenario.model_copy(update={"sampler": settled})))
        write_text(folder / "plan.json", to_json(document))
    trace = _sample(scenario, inputs, made, bar)
    evaluation = evaluate(trace, inputs.posterior)
    if folder is not None:
        part = folder / "trace.nc.part"
        trace.save(part, {"scenario": to_toml(scenario), "seed": scenario.sampler.seed})
        os.replace(part, folder / "trace.nc")
    summary = summary_document(evaluation, time.perf_counter() - began)
    if folder is not None:
        write_text(folder / "summary.json", to_json(summary))
    text = "\n".join([*(f"warning: {warning}" for warning in made.warnings), str(evaluation)])
    return summary, text, folder


def _sample(scenario: Scenario, inputs: Inputs, made: Any, bar: ProgressBar) -> Any:
    section = scenario.sampler
    with bar("sampling", made.rounds) as advance:
        return sample(
            jax.random.key(section.seed),
            inputs.posterior,
            made,
            chains=section.chains,
            progress=lambda done, _: advance(done),
        )


def reproduce_command(
    names: list[str], out: str, data: list[str], bar: ProgressBar
) -> tuple[dict[str, Any], list[studies.Claim], list[Path]]:
    """Figures and claims: the JSON document, the claims, and the pictures written."""
    wanted = list(studies.NAMES) if "all" in names else list(dict.fromkeys(names))
    for name in wanted:
        if name not in studies.NAMES:
            raise InputError("figure", name, f"one of {', '.join(studies.NAMES)} or all")
    with naming("--data"):
        loaded = [load_data(path) for path in data]
        if len(loaded) > 1:
            raise InputError("count", len(loaded), "one .npz or .csv file")
        X, y = loaded[0] if loaded else (None, None)
        posterior = gaussian_regression(jax.random.key(0), devices=30, X=X, y=y, partition="blocks")
    setting = studies.Setting(posterior)
    folder = _folder(out)
    pictures: list[Path] = []
    grid = {name: studies.points(name, setting) for name in wanted}
    done = 0
    with bar("figures", sum(len(points) for points in grid.values())) as advance:
        for name, points in grid.items():
            rows = []
            for x in points:
                rows += studies.point(name, setting, float(x))
                done += 1
                advance(done)
            report.write_csv(folder / f"{name}.csv", rows)
            target = folder / f"{name}.png"
            drawn = report.draw_regimes(setting, target) if name == "fig2" else report.draw_curves(name, rows, target)
            pictures += drawn
    found = [claim for claim in studies.claims(setting) if _covers(claim.figure, wanted)]
    claims = [claim._asdict() for claim in found]
    write_text(folder / "claims.json", to_json({"data": data or "synthetic", "claims": claims}))
    return {"figures": wanted, "files": [str(path) for path in pictures], "claims": claims}, found, pictures


def _covers(figure: str, wanted: list[str]) -> bool:
    return figure == "all" or any(name.startswith(figure) for name in wanted)
