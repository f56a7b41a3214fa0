"""`wflmc new | plan | run | audit`: one scenario."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from wflmc.cli.shell import (
    AsJson,
    Memory,
    Overrides,
    ScenarioPath,
    cache_compilations,
    note,
    print_json,
    progress,
    show,
    warn,
)
from wflmc.errors import InputError


def new(name: Annotated[str, typer.Argument(metavar="NAME", help="Of the folder to make.")]) -> None:
    """Make a folder with a commented scenario and a Python script to start from.

    Example: wflmc new study
    """
    from wflmc.cli.new import new_command

    commands = new_command(name)
    print("\n".join([f"Written to {name}: scenario.toml, model.py. Next:", *(f"  {line}" for line in commands)]))


def _capacity(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=f"With --capacity: {text}")


def plan(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the plan into this file (.png, .svg, .pdf).")
    ] = None,
    solver: Annotated[str, typer.Option("--solver", help="own, or cvxpy as an independent reference.")] = "own",
    unknown: Annotated[
        str | None,
        typer.Option(
            "--solve-for",
            metavar="KEY",
            help="Find the smallest link.snr_db, privacy.epsilon or sampler.burn_in that reaches --target.",
        ),
    ] = None,
    target: Annotated[float | None, typer.Option("--target", help="W2² to reach after burn-in.")] = None,
    metric: Annotated[
        str, typer.Option("--metric", help="What must reach the target: bound, or exact (the true W2²).")
    ] = "bound",
    ledger: Annotated[
        str | None, typer.Option("--ledger", metavar="FILE", help="Plan with what this ledger of a run leaves.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Show ε by dp-accounting too (two seconds of imports).")
    ] = True,
    capacity: Annotated[
        bool, typer.Option("--capacity", help="Show what it costs: airtime, energy, operations, bytes.")
    ] = False,
    devices: Annotated[float | None, _capacity("K", "this many devices, such as 1e6.")] = None,
    parameters: Annotated[float | None, _capacity("M", "this many parameters.")] = None,
    rounds: Annotated[float | None, _capacity("S", "this many rounds; the same share of them is kept.")] = None,
    bandwidth: Annotated[float | None, _capacity("HZ", "of the channel; 20e6 by default.")] = None,
    power: Annotated[float | None, _capacity("WATT", "radiated at the power limit; 0.2 by default.")] = None,
    efficiency: Annotated[float | None, _capacity("BIT/S/HZ", "of digital links; 1 by default.")] = None,
    coherence: Annotated[
        float | None, _capacity("SECONDS", "for which channels stay constant; 0.01 by default.")
    ] = None,
) -> None:
    """Decide who sends and how strongly, and what that is worth.

    Exit code 1 if nothing reaches the target of --solve-for.

    With --capacity also what it costs, for the scenario's own size or for --devices, --parameters and --rounds, of
    which nothing is built.

    Example: wflmc plan scenario.toml --set link.snr_db=10
    """
    from wflmc.cli.commands import plan_command, sizes_given, solve_command

    asked = sizes_given(
        capacity, devices=devices, parameters=parameters, rounds=rounds, bandwidth=bandwidth, power=power,
        efficiency=efficiency, coherence=coherence,
    )  # fmt: skip
    if unknown is None:
        if target is not None:
            raise InputError("--target", target, "left out without --solve-for KEY")
        document = plan_command(scenario, overrides, solver, plot, ledger, compare, asked)
    else:
        if ledger is not None:
            raise InputError("--ledger", ledger, "left out with --solve-for")
        document = solve_command(scenario, overrides, solver, plot, unknown, target, metric, compare, asked, progress)
    if as_json:
        warn(document["warnings"])
        print_json(document)
    else:
        from wflmc.report import capacity_tables, plan_table

        show(plan_table(document))
        for table in capacity_tables(document["capacity"]) if capacity else []:
            show(table)
        if plot is not None:
            print(f"Picture: {plot}")
    if unknown is not None and not document["solve_for"]["reachable"]:
        if as_json:
            note(document["solve_for"]["answer"])
        raise typer.Exit(1)


def run(
    scenario: Annotated[str | None, typer.Argument(help="Scenario file (TOML).")] = None,
    saved_plan: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="Run this saved plan (JSON of `wflmc plan`) instead.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Folder for trace.nc, plan.json, summary.json, scenario.toml."),
    ] = None,
    overrides: Overrides = None,
    memory: Memory = None,
    ledger: Annotated[
        str | None,
        typer.Option("--ledger", metavar="FILE", help="Spend from this ledger; DIR/ledger.jsonl by default."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="DIR", help="Go on with the run in this folder, stopped or (--more) finished."
        ),
    ] = None,
    more: Annotated[
        int | None, typer.Option("--more", metavar="N", help="With --resume: N more rounds from what is left to spend.")
    ] = None,
    keep_burn_in: Annotated[
        bool, typer.Option("--keep-burn-in", help="Also write the samples of burn-in (warmup_posterior).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a scenario, sample its chains and evaluate them.

    A run with --out that is stopped loses nothing: the same command, or --resume DIR, goes on with it.

    Example: wflmc run scenario.toml --out results
    """
    from wflmc.cli.output import parse_bytes
    from wflmc.cli.run import Request, run_command

    cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(scenario, saved_plan, out, overrides, limit, ledger, resume, more, keep_burn_in)
    summary, text, files = run_command(request, progress, note)
    if as_json:
        warn(summary["warnings"])
        print_json(summary)
        return
    *warnings, simulated = summary["warnings"]
    warn(warnings)
    if files:
        print(summary["owner_only"])
    print(text)
    print(simulated)
    print("Chains are replicas for evaluation: ε is that of one chain, and publishing several adds up.")
    if files:
        print(f"Written to {files[0].parent}: {', '.join(path.name for path in files)}")


def audit(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", help="Of the main attack, half with each of two data sets.")
    ] = 1_000_000,
    confidence: Annotated[
        float, typer.Option("--confidence", metavar="C", help="Of the lower bounds, all attacks together.")
    ] = 0.99,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seeds the attacks.")] = 0,
    device: Annotated[
        int | None, typer.Option("--device", metavar="K", help="Whom to attack; else the one that loses most.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option("--delta", metavar="D", help="δ to state ε at; else that of the scenario.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the scenario's plan, and hold what that proves of ε against what the plan claims.

    Exit code 1 if an attack proves more than is claimed, or if a sum in floating point changes by more. Counting alone
    cannot prove more than about 12 with a million trials, whatever leaks; the other bound takes the trade-off curve to
    be that of Gaussian noise.

    Example: wflmc audit scenario.toml --trials 100000
    """
    from wflmc.cli.commands import audit_command

    cache_compilations()
    document, verdict = audit_command(scenario, overrides, trials, confidence, seed, device, delta, progress)
    warn(document["warnings"])
    if as_json:
        print_json(document)
    else:
        from wflmc.audit import SCOPE
        from wflmc.report import audit_table

        show(audit_table(document))
        print("".join(f"{found['text']}\n" for found in document["sums"]), end="")
        print(f"{verdict}\n{SCOPE}")
        print("Counting alone assumes nothing, and cannot prove more than about 12 with a million trials.")
    if not document["consistent"]:
        raise typer.Exit(1)
