"""`wflmc new`: a folder with a scenario and a script to start from."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path

from wflmc.errors import InputError

TEMPLATES = ("scenario.toml", "model.py")


def new_command(name: str) -> list[str]:
    """Write the folder; the next two commands."""
    if not name.strip():
        raise InputError("NAME", name, "the name of a folder to make")
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError("NAME", name, "the name of a folder to make; there is something of that name") from None
    for template in TEMPLATES:
        text = resources.files("wflmc.cli").joinpath("templates", template).read_text(encoding="utf-8")
        (folder / template).write_text(text, encoding="utf-8")
    scenario, model = (shlex.quote(str(folder / template)) for template in TEMPLATES)
    return [f"wflmc plan {scenario}", f"python {model}"]
