"""What the commands do, without how it is shown."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wflmc import audit, report
from wflmc.cli.output import ProgressBar, writable_folder
from wflmc.data import fetch_mnist, load_mnist
from wflmc.errors import InputError
from wflmc.evaluation import Evaluation, evaluate, preload, reliability
from wflmc.sampling import Trace, default_memory, sample
from wflmc.scenario import (
    Scenario,
    build,
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


def run_command(
    path: str | None,
    saved_plan: str | None,
    out: str | None,
    overrides: list[str] | None,
    memory: float | None,
    bar: ProgressBar,
) -> tuple[dict[str, Any], str, list[Path]]:
    """The summary as JSON document and as text, and the files that were written.

    They are written one after the other at the end, so that a run that fails leaves a folder as it was.
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
    folder = None if out is None else writable_folder(out)
    preload()
    samples = 4.0 * scenario.sampler.chains * scenario.sampler.samples * made.dim
    with tempfile.TemporaryDirectory(dir=folder, prefix=".samples-") as scratch:
        # Samples that would not leave room for anything else go to a file at once.
        store = Path(scratch) / "theta.npy" if samples > (memory or default_memory()) / 2 else None
        with bar("sampling", made.rounds) as advance:
            trace = sample(
                jax.random.key(scenario.sampler.seed),
                inputs.posterior,
                made,
                chains=scenario.sampler.chains,
                memory=memory,
                store=store,
                progress=lambda done, work: advance(made.rounds * done / work),
            )
        evaluation = evaluate(trace, inputs.posterior, inputs.test)
        summary = summary_document(evaluation, made.warnings, time.perf_counter() - began)
        written = _write_run(folder, scenario, trace, evaluation, document, summary)
    return summary, str(evaluation), written


def _write_run(
    folder: Path | None,
    scenario: Scenario,
    trace: Trace,
    evaluation: Evaluation,
    document: dict[str, Any],
    summary: dict[str, Any],
) -> list[Path]:
    """The files of a run, each written whole or not at all."""
    written: list[Path] = []
    if folder is not None:
        names = ["trace.nc", "scenario.toml", "plan.json", "summary.json"]
        written = [folder / name for name in names]
        part = folder / "trace.nc.part"
        trace.save(part, {"scenario": to_toml(scenario), "seed": scenario.sampler.seed})
        os.replace(part, folder / "trace.nc")
        write_text(folder / "scenario.toml", to_toml(scenario))
        write_text(folder / "plan.json", to_json(document))
        write_text(folder / "summary.json", to_json(summary))
        if evaluation.scores is not None:
            about = f"{scenario.policy.power}, {_range(scenario.link.snr_db)} dB"
            written += report.draw_reliability(reliability(evaluation.scores), about, folder / "reliability.png")
    return written


def _range(values: float | list[float]) -> str:
    """One number, or the smallest and the largest of several."""
    ends = np.unique([np.min(values), np.max(values)])
    return " to ".join(f"{end:g}" for end in ends)


def audit_command(
    path: str,
    overrides: list[str] | None,
    trials: int,
    confidence: float,
    seed: int,
    device: int | None,
    delta: float | None,
    bar: ProgressBar,
) -> tuple[dict[str, Any], str]:
    """The audit's JSON document, and its verdict in one sentence."""
    began = time.perf_counter()
    if not 0 <= seed < 2**32:
        raise InputError("--seed", seed, "between 0 and 2**32 - 1")
    scenario = load_scenario(path, overrides)
    inputs = build(scenario)
    made = make_plan(scenario, inputs)
    if not made.clips:
        given = scenario.policy.power
        raise InputError("policy.power", given, f"a scheme that clips: {given} does not, so nothing is promised")
    with bar("attacking", trials) as advance:
        try:
            found = audit.audit(
                jax.random.key(seed),
                made,
                inputs.posterior,
                trials=trials,
                confidence=confidence,
                delta=delta,
                device=device,
                progress=lambda done, work: advance(trials * done / work),
            )
        except InputError as error:
            if error.key in ("trials", "confidence", "device", "delta"):
                raise InputError(f"--{error.key}", error.given, error.allowed) from None
            raise
    seconds = time.perf_counter() - began
    return {**found.as_dict(), "warnings": list(made.warnings), "seconds": seconds}, found.verdict


def data_command(folder: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """MNIST obtained and verified: where it is, and what it holds."""
    try:
        kept = fetch_mnist(folder, say)
    except InputError as error:
        raise InputError("--data" if folder else error.key, error.given, error.allowed) from None
    images = load_mnist(kept)
    return {
        "name": "mnist",
        "folder": str(kept),
        "train": len(images.train_labels),
        "test": len(images.test_labels),
        "verified": True,
    }
