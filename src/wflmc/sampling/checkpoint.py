"""Where a run has got to, in a folder: what a run that was stopped goes on from, with the very same draws."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.support.errors import InputError
from wflmc.support.keys import digest
from wflmc.support.storage import naming_file, read_arrays, replacing, reserve


class Progress(NamedTuple):
    """The chains being run, how many of their rounds are done, and what is known so far."""

    at: int = 0
    """The first of the chains that are run together now; all before it are finished."""
    rounds: int = 0
    """Rounds that these have done."""
    theta: Any = None
    """Where every chain is after the last round that it has done, [chain, m]; with kinetic dynamics and their
    velocities, [chain, 2m]."""
    clip_rate: Any = None
    """[round, chain]."""
    averages: Any = None
    """Over draws that are not kept, [chain, numbers]."""
    transcript_row: Any = None
    """Of the last round of a federation, [chain, 2m + 1]."""


class Checkpoint(NamedTuple):
    """A folder with the samples and the progress of one run.

    Args:
        name: a digest of plan, data, seed and chunks; progress of another run is refused.
    """

    folder: Path
    name: str

    @property
    def file(self) -> Path:
        """The file of the progress."""
        return self.folder / "progress.npz"

    @property
    def samples(self) -> Path:
        """The file of the samples."""
        return self.folder / "theta.npy"

    def load(self) -> Progress:
        """What was saved; the beginning where nothing was."""
        file = self.file
        if not file.exists():
            return Progress()
        saved = read_arrays(file, key="checkpoint", allowed="a readable file")
        if str(saved.pop("digest", "")) != _digest(saved):
            raise InputError("checkpoint", str(file), "a readable file (it is damaged)")
        if str(saved.pop("name")) != self.name:
            raise InputError("checkpoint", str(file), "of the same plan, data, seed and memory limit")
        fields: dict[str, Any] = {**saved}
        fields["at"] = int(saved["at"].item())
        fields["rounds"] = int(saved["rounds"].item())
        return Progress(**fields)

    def save(self, progress: Progress) -> None:
        """Write whole or not at all."""
        with replacing(self.file) as file:
            known = {name: np.asarray(value) for name, value in progress._asdict().items() if value is not None}
            known["name"] = np.array(self.name)
            known["digest"] = np.array(_digest(known))
            np.savez(file, allow_pickle=False, **known)


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a hash of arrays with their names."""
    return digest(*(part for name, array in sorted(arrays.items()) for part in (name.encode(), array)))


def room(shape: tuple[int, ...], store: str | Path | None, begun: bool) -> Any:
    """Where samples go: memory, or a file, which may have been begun."""
    if store is None:
        return np.empty(shape, np.float32)
    path = Path(store)
    try:
        with naming_file(path):
            room = np.lib.format.open_memmap(path, mode="r+" if begun else "w+", dtype=np.float32, shape=shape)
            with path.open("r+b") as file:  # a full disk under a mapped file kills the process
                reserve(file, path.stat().st_size)
    except OSError:
        if not begun:
            path.unlink(missing_ok=True)
        raise
    except Exception:  # the header of a file that is damaged fails in a dozen ways
        raise InputError("checkpoint", str(store), f"samples of shape {shape}") from None
    if room.shape != shape or room.dtype != np.float32:
        raise InputError("checkpoint", str(store), f"samples of shape {shape}")
    return room
