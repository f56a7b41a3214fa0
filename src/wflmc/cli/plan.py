"""`wflmc plan`: the plan of a scenario, or the smallest value of a key that reaches a target."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wflmc.cli.shared import AsJson, Overrides, ScenarioPath, note, print_json, show, warn
from wflmc.errors import InputError
from wflmc.progress import progress_bar

if TYPE_CHECKING:
    from wflmc.scenario import Scenario


def _capacity(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=f"With --capacity: {text}")


def command(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the plan into this file (.png, .svg, .pdf).")
    ] = None,
    solver: Annotated[str, typer.Option(help="own, or cvxpy as an independent reference.")] = "own",
    unknown: Annotated[
        str | None,
        typer.Option(
            "--solve-for",
            metavar="KEY",
            help="Find the smallest link.snr_db, privacy.epsilon or sampler.burn_in that reaches --target.",
        ),
    ] = None,
    target: Annotated[float | None, typer.Option(help="W2² to reach after burn-in.")] = None,
    metric: Annotated[str, typer.Option(help="What must reach the target: bound, or exact (the true W2²).")] = "bound",
    ledger: Annotated[
        str | None, typer.Option(metavar="FILE", help="Plan with the budget that this ledger of a run leaves.")
    ] = None,
    compare: Annotated[bool, typer.Option(help="Show ε by dp-accounting too (two seconds of imports).")] = True,
    capacity: Annotated[
        bool, typer.Option("--capacity", help="Show the costs: airtime, energy, operations, bytes.")
    ] = False,
    devices: Annotated[float | None, _capacity("K", "number of devices, such as 1e6.")] = None,
    parameters: Annotated[float | None, _capacity("M", "number of parameters.")] = None,
    rounds: Annotated[float | None, _capacity("S", "number of rounds, of which the same share is kept.")] = None,
    bandwidth: Annotated[float | None, _capacity("HZ", "of the channel; 20e6 by default.")] = None,
    power: Annotated[float | None, _capacity("WATT", "radiated at the power limit; 0.2 by default.")] = None,
    efficiency: Annotated[float | None, _capacity("BIT/S/HZ", "of digital links; 1 by default.")] = None,
    coherence: Annotated[float | None, _capacity("SECONDS", "of constant channels; 0.01 by default.")] = None,
) -> None:
    """Plan which devices transmit in every round and with which power, and bound the distance to the posterior.

    Exit code 1 if no value of the --solve-for key reaches the target.

    --capacity adds the costs of the plan, for the scenario's own size or for that of --devices, --parameters and
    --rounds, of which nothing is built.

    Example: wflmc plan scenario.toml --set link.snr_db=10
    """
    from wflmc.planning import capacity as capacities
    from wflmc.report import run_figures, text
    from wflmc.runs import diagnose, make_plan, plan_document
    from wflmc.runs.execution import spent_before
    from wflmc.scenario import build, load_scenario
    from wflmc.scenario.files import plain

    began = time.perf_counter()
    sizes = _capacity_sizes(
        capacity, devices=devices, parameters=parameters, rounds=rounds, bandwidth=bandwidth, power=power,
        efficiency=efficiency, coherence=coherence,
    )  # fmt: skip
    if target is not None and unknown is None:
        raise InputError("--target", target, "left out without --solve-for KEY")
    if ledger is not None and unknown is not None:
        raise InputError("--ledger", ledger, "left out with --solve-for")
    if plot is not None:
        run_figures.check_picture(plot)
    config, answer = load_scenario(scenario, overrides), None
    if unknown is not None:
        config, answer = _search(config, unknown, target, metric, solver)
    inputs = build(config)
    spent = None if ledger is None else spent_before(ledger, inputs, must_exist=True)
    plan = make_plan(config, inputs, solver=solver, ledger=spent)
    causes = diagnose(config, inputs, plan)
    document = plan_document(config, inputs, plan, time.perf_counter() - began, compare, causes)
    if capacity:
        document["capacity"] = plain(
            capacities.document(plan, inputs.link, float(inputs.posterior.sizes.mean()), sizes)
        )
    if answer is not None:
        _add_answer(document, answer)
    if plot is not None:
        run_figures.draw_plan(plan, plot)
    if as_json:
        warn(document["warnings"])
        print_json(document)
    else:
        show(text.plan_table(document))
        for table in text.capacity_tables(document["capacity"]) if capacity else []:
            show(table)
        if plot is not None:
            print(f"Picture: {plot}")
    if answer is not None and not answer["reachable"]:
        if as_json:
            note(answer["answer"])
        raise typer.Exit(1)


def _capacity_sizes(wanted: bool, **sizes: float | None) -> dict[str, float]:
    """Return the options of --capacity that were given, checked."""
    from wflmc.planning import capacity

    given = {name: value for name, value in sizes.items() if value is not None}
    if given and not wanted:
        name, value = next(iter(given.items()))
        raise InputError(f"--{name}", value, "left out without --capacity")
    capacity.check(given, "--")
    return given


def _search(
    scenario: Scenario, key: str, target: float | None, metric: str, solver: str
) -> tuple[Scenario, dict[str, Any]]:
    """Return the scenario at the smallest value of `key` that reaches the target, and the answer as plain data."""
    from wflmc.runs import solve_for

    if target is None:
        raise InputError("--target", target, "given with --solve-for")
    with progress_bar("plans tried, at most", 330 if key == "sampler.burn_in" else 60) as advance:
        answer = solve_for(scenario, key, target, metric, solver, advance)
    document = answer._asdict()
    return document.pop("scenario"), {**document, "reachable": answer.value is not None}


def _add_answer(document: dict[str, Any], answer: dict[str, Any]) -> None:
    """Add the answer of a search to the JSON of its plan, also as a sentence."""
    from wflmc.report.text import answer_sentence
    from wflmc.scenario import NotCovered

    if answer["metric"] == "exact" and document["not_covered"]:
        why = "It was chosen by the exact distance to the posterior (--metric exact)."
        document["not_covered"].append(NotCovered(f"--solve-for {answer['key']}", why)._asdict())
    answer["answer"] = answer_sentence(answer, document["privacy"]["adjacency"])
    document["solve_for"] = answer
