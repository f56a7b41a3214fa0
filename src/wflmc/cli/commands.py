"""What the commands do, without how it is shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from wflmc import audit, report
from wflmc.cli.output import ProgressBar
from wflmc.cli.run import spent_before
from wflmc.data import fetch_mnist, load_mnist
from wflmc.errors import InputError
from wflmc.planning import capacity as capacities
from wflmc.scenario import (
    NotCovered,
    Scenario,
    build,
    diagnosis,
    load_scenario,
    make_plan,
    plan_document,
    solve_for,
)
from wflmc.scenario.files import plain


def sizes_given(asked: bool, **options: float | None) -> dict[str, float] | None:
    """The options of --capacity that were given, checked; None where no capacity was asked for."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if not asked:
            raise InputError(f"--{name}", value, "left out without --capacity")
    capacities.check(given, "--")
    return given if asked else None


def plan_command(
    path: str,
    overrides: list[str] | None,
    solver: str,
    plot: str | None,
    ledger: str | None,
    compare: bool,
    capacity: dict[str, float] | None,
) -> dict[str, Any]:
    """The plan's JSON document; draws it where asked."""
    return _planned(load_scenario(path, overrides), solver, plot, time.perf_counter(), ledger, compare, capacity)


def _planned(
    scenario: Scenario,
    solver: str,
    plot: str | None,
    began: float,
    ledger: str | None,
    compare: bool,
    capacity: dict[str, float] | None,
) -> dict[str, Any]:
    if plot is not None:
        report.check_picture(plot)
    inputs = build(scenario)
    spent = None if ledger is None else spent_before(ledger, inputs, must_exist=True)
    made = make_plan(scenario, inputs, solver=solver, ledger=spent)
    causes = diagnosis(scenario, inputs, made)
    document = plan_document(scenario, inputs, made, time.perf_counter() - began, compare, causes)
    if capacity is not None:
        document["capacity"] = plain(
            capacities.document(made, inputs.link, float(inputs.posterior.sizes.mean()), capacity)
        )
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
    compare: bool,
    capacity: dict[str, float] | None,
    bar: ProgressBar,
) -> dict[str, Any]:
    """The plan at the smallest value of `key` that reaches the target, and the answer under `solve_for`."""
    began = time.perf_counter()
    if target is None:
        raise InputError("--target", target, "given with --solve-for")
    if plot is not None:
        report.check_picture(plot)
    with bar("plans tried, at most", 330 if key == "sampler.burn_in" else 60) as advance:
        answer = solve_for(load_scenario(path, overrides), key, target, metric, solver, advance)
    document = _planned(answer.scenario, solver, plot, began, None, compare, capacity)
    asked = answer._asdict()
    asked.pop("scenario")
    asked["reachable"] = answer.value is not None
    if metric == "exact" and document["not_covered"]:
        found = NotCovered(
            f"--solve-for {key}", "It was chosen by the exact distance to the posterior (--metric exact)."
        )
        document["not_covered"].append(found._asdict())
    return {
        **document,
        "solve_for": {**asked, "answer": report.answer_sentence(asked, document["privacy"]["adjacency"])},
    }


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
    verdict = found.verdict
    if made.ledger.any():
        spent = f"{made.epsilon_spent:.4g}" if made.epsilon_spent is not None else "more"
        with_it = f"with the release that whitened its features the promise is {spent} ({found.adjacency})"
        verdict += f" That is of its rounds alone; {with_it}."
    return {**found.as_dict(), "warnings": list(made.warnings), "seconds": seconds}, verdict


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
