"""`wflmc reproduce | sweep | federate`: many points, or many devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli.shell import (
    AsJson,
    Cache,
    EngineName,
    Memory,
    Overrides,
    ScenarioPath,
    Workers,
    cache_compilations,
    note,
    print_json,
    progress,
    show,
    warn,
)


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

    cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(figures or ["all"], out, data or [], experiments, stop_se, cache, limit, engine, workers)
    document, found, files = reproduce_command(request, progress, note)
    if as_json:
        print_json(document)
        return
    from wflmc.report import claims_table

    if found:
        show(claims_table(found))
    print("\n".join(["Pictures:", *(f"  {path}" for path in files), f"Claims: {Path(out) / 'claims.json'}"]))


def sweep(
    scenario: ScenarioPath,
    grids: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=VALUES",
            help="FIRST:LAST:STEP, both ends included, or v1,v2,...; may repeat, the first key changes slowest.",
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

    cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(scenario, grids or [], overrides or [], plan_only, engine, workers, out, cache, limit)
    document = sweep_command(request, progress, note)
    if as_json:
        print_json(document)
    else:
        print(f"{document['done']} of {document['points']} points ({document['cached']} from the cache)")
        print(f"Written to {document['file']}")
    if document["failed"]:
        note(f"{document['failed']} points failed: {Path(out) / 'failed.json'} has them all.")
        raise typer.Exit(1)


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
        str | None,
        typer.Option(
            "--noise",
            metavar="NAME",
            help="Who adds it: channel (emulated), devices (each its share), or simulated (from the seed, protects "
            "nobody: the default unless --prepare is given).",
        ),
    ] = None,
    tolerate: Annotated[
        int,
        typer.Option("--tolerate", metavar="N", help="With --noise devices: absences that a round survives."),
    ] = 0,
    chains: Annotated[
        int | None,
        typer.Option("--chains", metavar="N", help="Chains at a time; the scenario's, or 1 with --prepare."),
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
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="With --prepare: where devices reach the server; 127.0.0.1:8000 by default.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a scenario as a federation on Flower: the server holds the plan and the ledger, each device its own data.

    With simulated noise and the same seed the chains are those of `wflmc run`. The same command goes on with a
    federation that was stopped.

    Example: wflmc federate scenario.toml --out results
    """
    from wflmc.cli.federate import federate_command
    from wflmc.cli.federation import Request

    cache_compilations()
    asked = Request(
        scenario, out, overrides, runtime, noise, tolerate, chains, deadline, ledger, prepare,
        own_data, address,
    )  # fmt: skip
    summary, text, files = federate_command(asked, progress, note)
    warn(summary["warnings"])
    if as_json:
        print_json(summary)
        return
    if files:
        print(summary["owner_only"])
    print(text)
    if files:
        print(f"Written to {out}: {', '.join(path.name for path in files)}")
