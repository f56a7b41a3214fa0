"""Where commands write to, and how they show that they are at work."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from wflmc.errors import InputError

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]


def writable_folder(path: str, option: str = "--out") -> Path:
    """The folder to write to, made if need be, and tried before any long work."""
    folder = Path(os.path.expanduser(path))
    try:
        if not path:
            raise FileNotFoundError(2, "No such file or directory")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(option, path, f"a folder that can be written ({error.strerror})") from None
    return folder
