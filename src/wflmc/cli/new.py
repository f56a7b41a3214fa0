"""`wflmc new`: a folder with a scenario and a script to start from."""

import shlex
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from wflmc.support.errors import InputError
from wflmc.support.storage import removed_if_empty, replacing

TEMPLATES = ("scenario.toml", "model.py")


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the new folder.")
    ],
) -> None:
    """Create a folder with a commented scenario and a Python script to start from.

    Example: wflmc new study
    """
    folder = Path(name).expanduser()
    if folder.suffix == ".toml":
        requirement = "the name of a folder; a scenario.toml is made in it"
        raise InputError("NAME", name, requirement)
    with removed_if_empty(folder), ExitStack() as stack:
        try:
            folder.mkdir(parents=True)
        except (FileExistsError, NotADirectoryError):
            requirement = "the name of a new folder; there is something of that name"
            raise InputError("NAME", name, requirement) from None
        templates = resources.files("wflmc.cli").joinpath("templates")
        for template in TEMPLATES:
            file = stack.enter_context(replacing(folder / template))
            file.write(templates.joinpath(template).read_bytes())
            file.flush()
    scenario, model = (shlex.quote(str(folder / template)) for template in TEMPLATES)
    print(f"Written to {name}: {', '.join(TEMPLATES)}. Next:")
    print(f"  wflmc plan {scenario}")
    print(f"  python {model}")
