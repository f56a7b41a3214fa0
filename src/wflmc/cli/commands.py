"""What the commands do, without how it is shown."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from wflmc import report, studies
from wflmc.errors import InputError
from wflmc.evaluation import evaluate, preload
from wflmc.posterior import GaussianPosterior, gaussian_regression
from wflmc.sampling import sample
from wflmc.scenario import (
    Scenario,
    build,
    load_data,
    load_scenario,
    make_plan,
    plan_document,
    read_plan,
    solve_for,
    summary_document,
    to_json,
    to_toml,
    write_text,
)

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def plan_command(path: str, overrides: list[str] | None, solver: str, plot: str | None) -> dict[str, Any]:
    """The plan's JSON document; draws it where asked."""
    return _planned(load_scenario(path, overrides), solver, plot, time.perf_counter())


def _planned(scenario: Scenario, solver: str, plot: str | None, began: float) -> dict[str, Any]:
    if plot is not None:
        report.check_picture(plot)
    inputs = build(scenario)
    made = make_plan(scenario, inputs, solver=solver)
    document = plan_document(scenario, inputs, made, time.perf_counter() - began)
    if plot is not None:
        report.draw_plan(made, plot)
    return document


def solve_command(
    path: str,
    overrides: list[str] | None,
    solver: str,
    plot: str | None,
    key: str,
    target: float | None,
    metric: str,
) -> dict[str, Any]:
    """The plan at the smallest value of `key` that reaches the target, and the answer under `solve_for`."""
    began = time.perf_counter()
    if target is None:
        raise InputError("--target", target, "given with --solve-for")
    if plot is not None:
        report.check_picture(plot)
    answer = solve_for(load_scenario(path, overrides), key, target, metric, solver)
    document = _planned(answer.scenario, solver, plot, began)
    asked = answer._asdict()
    asked.pop("scenario")
    return {**document, "solve_for": {**asked, "reachable": answer.value is not None}}


def _folder(out: str) -> Path:
    """The folder to write to, made if need be, and tried before any long work."""
    folder = Path(os.path.expanduser(out))
    try:
        if not out:
            raise FileNotFoundError(2, "No such file or directory")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError("--out", out, f"a folder that can be written ({error.strerror})") from None
    return folder


def run_command(
    path: str | None, saved_plan: str | None, out: str | None, overrides: list[str] | None, bar: ProgressBar
) -> tuple[dict[str, Any], str, Path | None]:
    """The summary as JSON document and as text, and the folder that was written.

    The four files are written one after the other at the end, so that a run that fails leaves a folder as it was.
    """
    began = time.perf_counter()
    if (path is None) == (saved_plan is None):
        raise InputError("scenario", path, "either a scenario file or --plan FILE, one of the two")
    if saved_plan is not None:
        if overrides:
            raise InputError("--set", overrides[0], "left out with --plan, which is already made")
        scenario, inputs, made = read_plan(saved_plan)
    else:
        scenario = load_scenario(str(path), overrides)
        inputs = build(scenario)
        made = make_plan(scenario, inputs)
    settled = scenario.sampler.model_copy(update={"burn_in": made.burn_in})
    scenario = scenario.model_copy(update={"sampler": settled})
    document = plan_document(scenario, inputs, made, time.perf_counter() - began)
    folder = None if out is None else _folder(out)
    preload()
    with bar("sampling", made.rounds) as advance:
        trace = sample(
            jax.random.key(scenario.sampler.seed),
            inputs.posterior,
            made,
            chains=scenario.sampler.chains,
            progress=lambda done, _: advance(done),
        )
    evaluation = evaluate(trace, inputs.posterior)
    summary = summary_document(evaluation, made.warnings, time.perf_counter() - began)
    if folder is not None:
        part = folder / "trace.nc.part"
        trace.save(part, {"scenario": to_toml(scenario), "seed": scenario.sampler.seed})
        os.replace(part, folder / "trace.nc")
        write_text(folder / "scenario.toml", to_toml(scenario))
        write_text(folder / "plan.json", to_json(document))
        write_text(folder / "summary.json", to_json(summary))
    return summary, str(evaluation), folder


def _paper_posterior(data: list[str]) -> GaussianPosterior:
    """The paper's 30 devices with synthetic data, or with a file's in file order."""
    if len(data) > 1:
        raise InputError("--data", data, "one .npz or .csv file")
    try:
        X, y = load_data(os.path.expanduser(data[0])) if data else (None, None)
        return gaussian_regression(jax.random.key(0), devices=30, X=X, y=y, partition="blocks")
    except InputError as error:
        if error.key == "devices":
            raise InputError("--data", data[0], "a data set of at least 30 examples, one for each device") from None
        raise InputError("--data", error.given, error.allowed) from None


def reproduce_command(
    names: list[str], out: str, data: list[str], bar: ProgressBar
) -> tuple[dict[str, Any], list[studies.Claim], list[Path]]:
    """Figures and claims: the JSON document, the claims, and the pictures written."""
    for name in names:
        if name not in (*studies.NAMES, "all"):
            raise InputError("figure", name, f"one of {', '.join(studies.NAMES)} or all")
    wanted = list(studies.NAMES) if "all" in names else list(dict.fromkeys(names))
    source = Path(data[0]).name if data else "synthetic data"
    setting = studies.Setting(_paper_posterior(data))
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
            pictures += report.draw_figure(name, setting, rows, source, folder / f"{name}.png")
    found = studies.claims(setting)
    claims = [claim._asdict() for claim in found]
    write_text(folder / "claims.json", to_json({"data": source, "claims": claims}))
    return {"figures": wanted, "files": [str(path) for path in pictures], "claims": claims}, found, pictures
