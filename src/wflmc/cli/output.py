"""Where commands write to, and how they show that they are at work."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from wflmc.errors import InputError

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]


def parse_bytes(text: str, option: str = "--memory") -> float:
    """A size such as 4GiB, 500MB or 1e9 as a number of bytes."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if found is None or not float(found[1]) > 0:
        raise InputError(option, text, "a size above 0 such as 4GiB or 500MB")
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** ("kmgt".index(found[2]) + 1 if found[2] else 0)


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
