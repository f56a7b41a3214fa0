"""Where a run has got to, in a folder: what a run that was stopped goes on from, with the very same draws."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError


class Progress(NamedTuple):
    """The chains being run, how many of their rounds are done, and what is known so far."""

    at: int = 0
    """The first of the chains that are run together now; all before it are finished."""
    rounds: int = 0
    """Rounds that these have done."""
    theta: NDArray[Any] | None = None
    """Where these are, [chain, m]."""
    clip_rate: NDArray[Any] | None = None
    """[draw, chain]."""
    burn_in_rate: NDArray[Any] | None = None
    """[S_b]."""


class Checkpoint(NamedTuple):
    """A folder with the samples and the progress of one run.

    Args:
        name: a digest of plan, data, seed and chunks; progress of another run is refused.
    """

    folder: Path
    name: str

    @property
    def samples(self) -> Path:
        """The file of the samples."""
        return self.folder / "theta.npy"

    def load(self) -> Progress:
        """What was saved; the beginning where nothing was."""
        file = self.folder / "progress.npz"
        if not file.exists():
            return Progress()
        try:
            with np.load(file, allow_pickle=False) as saved:
                name, found = str(saved["name"]), {field: saved[field] for field in Progress._fields}
        except (OSError, ValueError, KeyError) as error:
            raise InputError("checkpoint", str(file), f"a readable file ({error})") from None
        if name != self.name:
            raise InputError("checkpoint", str(file), "of the same plan, data, seed and memory limit")
        return Progress(**{**found, "at": int(found["at"]), "rounds": int(found["rounds"])})

    def save(self, progress: Progress) -> None:
        """Write whole or not at all."""
        part = self.folder / "progress.part.npz"
        np.savez(part, name=np.array(self.name), **progress._asdict())
        os.replace(part, self.folder / "progress.npz")
