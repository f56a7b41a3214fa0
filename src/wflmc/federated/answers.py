"""The last answer of a device, kept before it is sent: asked again, the device repeats it."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError, without_data
from wflmc.storage import fcntl, replacing


@without_data
class Answer(NamedTuple):
    """What a device has been asked and has answered."""

    request: str
    """A name for what was asked."""
    charge: str
    """Under which name the ledger has it; every answer that is drawn anew has one of its own."""
    signal: NDArray[np.float32]
    """x, [chain, m]."""


class Answers:
    """The last answer, in memory or in a file that only its owner reads, which is on the disk before it is sent.

    Whoever is between `load` and `save` is alone there, among all processes that keep the same file.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._last: Answer | None = None
        self._lock = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads and processes out."""
        with self._lock:
            if self.path is None:
                yield
                return
            with self.path.with_suffix(".lock").open("ab") as file:
                if fcntl is not None:  # elsewhere a device is one process
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield

    def load(self) -> Answer | None:
        """The last answer, if there is one."""
        if self.path is None or not self.path.exists():
            return self._last
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                return Answer(str(saved["request"]), str(saved["charge"]), saved["signal"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise InputError("answer", str(self.path), "as wflmc wrote it, or removed: the next is new") from None

    def save(self, answer: Answer) -> None:
        """Take the place of the answer before."""
        self._last = answer
        if self.path is None:
            return
        with replacing(self.path) as file:
            os.chmod(file.name, 0o600)
            content: dict[str, Any] = answer._asdict()
            np.savez(file, allow_pickle=False, **content)
