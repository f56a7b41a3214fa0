"""Where commands write to, and how they show that they are at work."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from wflmc.errors import InputError
from wflmc.storage import FULL, sole_writer

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
        if error.errno in FULL:
            raise
        raise InputError(option, path, f"a folder that can be written ({error.strerror})") from None
    return folder


@contextmanager
def output_folder(path: str, option: str = "--out") -> Iterator[Path]:
    """The folder to write to, made if need be, for this process alone."""
    folder = Path(os.path.expanduser(path))
    with removed_if_empty(folder), sole_writer(writable_folder(path, option), option):
        yield folder


@contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a folder, and those that it is in, if they are made inside and nothing is written to them."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    finally:
        with suppress(OSError):
            for each in missing:
                each.rmdir()
