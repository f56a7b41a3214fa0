"""`wflmc new`: a folder with a scenario and a script to start from."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

from wflmc.cli.output import removed_if_empty
from wflmc.errors import InputError
from wflmc.storage import replacing

TEMPLATES = ("scenario.toml", "model.py")


def new_command(name: str) -> list[str]:
    """Write the folder; the next two commands."""
    if not name.strip():
        raise InputError("NAME", name, "the name of a folder to make")
    folder = Path(name).expanduser()
    with removed_if_empty(folder), ExitStack() as stack:
        try:
            folder.mkdir(parents=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError("NAME", name, "the name of a folder to make; there is something of that name") from None
        for template in TEMPLATES:
            file = stack.enter_context(replacing(folder / template))
            file.write(resources.files("wflmc.cli").joinpath("templates", template).read_bytes())
            file.flush()
    scenario, model = (shlex.quote(str(folder / template)) for template in TEMPLATES)
    return [f"wflmc plan {scenario}", f"python {model}"]
