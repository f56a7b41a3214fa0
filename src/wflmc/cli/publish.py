"""`wflmc publish`: the part of a run that ε covers, and nothing else."""

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli.shared import AsJson, flag, option, print_result

ACCEPT = "Publish what depends on inputs that ε does not cover; list them."


def command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Folder of a finished run (--out of `wflmc run`)."
        ),
    ],
    out: Annotated[str, option("FILE", "New NetCDF file (.nc).")],
    what: Annotated[
        str,
        option("KIND", "draws; predictions (for --features); moments; noise-aware."),
    ] = "draws",
    features: Annotated[
        str | None,
        option("FILE", "Public rows to predict (.npy, .npz), or public moments."),
    ] = None,
    chains: Annotated[
        int,
        option(
            "N", "Only 1: N chains of the same devices cost N times the privacy loss."
        ),
    ] = 1,
    accept: Annotated[bool, flag("--accept-not-covered", ACCEPT)] = False,
    as_json: AsJson = False,
) -> None:
    """Write the part of a run that ε covers, its first chain, with a statement of what
    is promised to whom.

    A run folder is for its owner. The published file has no key, seed, clip rates,
    exact law, constants of the data, paths or digests. A run that is to be published
    needs sampler.seed = "secret".

    Example: wflmc publish results --out draws.nc
    """
    from wflmc.runs.publish import publish_run, statement_lines

    features_file = None if features is None else Path(features).expanduser()
    target = Path(out).expanduser()
    statement = publish_run(
        Path(run).expanduser(),
        target,
        kind=what,
        chains=chains,
        features=features_file,
        accept=accept,
    )
    document = {"file": str(target), **statement}
    lines = [*statement_lines(statement), f"Written to {target}"]
    print_result(document, lines, as_json)
