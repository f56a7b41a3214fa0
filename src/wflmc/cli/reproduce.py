"""`wflmc reproduce`: the paper's figures, and what it states about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli.shared import (
    AsJson,
    Cache,
    EngineName,
    Memory,
    Workers,
    cache_compilations,
    note,
    parse_bytes,
    print_json,
    show,
)
from wflmc.progress import progress_bar


def command(
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
    from wflmc.cli.figures import Request, reproduce_command

    cache_compilations()
    limit = None if memory is None else parse_bytes(memory)
    request = Request(figures or ["all"], out, data or [], experiments, stop_se, cache, limit, engine, workers)
    document, found, files = reproduce_command(request, progress_bar, note)
    if as_json:
        print_json(document)
        return
    from wflmc.report import claims_table

    if found:
        show(claims_table(found))
    print("\n".join(["Pictures:", *(f"  {path}" for path in files), f"Claims: {Path(out) / 'claims.json'}"]))
