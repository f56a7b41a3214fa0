"""How far a run has come, in a folder from which it continues with the very same
draws."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from wflmc.sampling.starts import Start
from wflmc.sampling.transcript import GradientEstimate
from wflmc.support.errors import InputError
from wflmc.support.keys import digest
from wflmc.support.storage import naming_file, read_arrays, replacing, reserve

Arrays = Mapping[str, NDArray[Any]]
"""What a file holds, by name; their types are those that were written."""

AVERAGES = "averages."
"""Prefix of what a recorder holds, by its name, in the file."""
RECEPTION = "reception."
"""Prefix of what was received in the last round."""


class Progress(NamedTuple):
    """The chains being run, how many of their rounds are done, and all results so far
    that are in no file of their own."""

    first_chain: int = 0
    """The first of the chains that are run together now; all before it are finished."""
    rounds: int = 0
    """Rounds that these have done."""
    chains: Start | None = None
    """Where every chain is after the last round that it has done; None before the first
    round."""
    clip_rate: NDArray[np.float32] | None = None
    """[round, chain]; None where devices do not tell."""
    averages: Arrays = MappingProxyType({})
    """Averages over draws that are not kept, by name."""
    reception: GradientEstimate | None = None
    """What was received in the last round of a federation, [chain, ...]."""

    @property
    def begun(self) -> bool:
        """Return whether any round is done.

        If so, the file of the samples exists and holds draws, which a run that
        continues must not overwrite; `allocate` takes this as an argument. A run whose
        first block was interrupted has not begun.
        """
        return self.chains is not None

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all of it as named arrays, as NumPy's archives store them.

        What is None is left out. Averages and what was received have a prefix before
        their names, so that no recorder can collide with a field of its own.
        `from_arrays` is the inverse.

        Returns:
            Arrays by name, without the checkpoint's name and digest.
        """
        values: dict[str, ArrayLike | None] = {
            "first_chain": self.first_chain,
            "rounds": self.rounds,
            "clip_rate": self.clip_rate,
        }
        if self.chains is not None:
            values["position"] = self.chains.position
            values["velocity"] = self.chains.velocity
        if self.reception is not None:
            for name, array in self.reception._asdict().items():
                values[RECEPTION + name] = array
        for name, array in self.averages.items():
            values[AVERAGES + name] = array
        present = {key: value for key, value in values.items() if value is not None}
        return {name: np.asarray(value) for name, value in present.items()}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> "Progress":
        """Return the progress that `to_arrays` has converted.

        Arrays that are missing become None: a velocity of overdamped chains, the clip
        rate where devices do not report it, or what was received outside of
        federations.

        Args:
            arrays: by name, with their prefixes.

        Returns:
            The progress, its arrays not copied.
        """
        chains = None
        if "position" in arrays:
            velocity = arrays.get("velocity")
            chains = Start(arrays["position"], velocity)
        reception = None
        received_arrays = _with_prefix(arrays, RECEPTION)
        if received_arrays:
            reception = GradientEstimate(**received_arrays)
        first_chain = arrays["first_chain"].item()
        rounds = arrays["rounds"].item()
        return cls(
            first_chain=int(first_chain),
            rounds=int(rounds),
            chains=chains,
            clip_rate=arrays.get("clip_rate"),
            averages=_with_prefix(arrays, AVERAGES),
            reception=reception,
        )


def _with_prefix(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with a prefix, without it."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays[name] for name in names}


class Checkpoint(NamedTuple):
    """A folder with the samples and the progress of one run."""

    folder: Path
    name: str
    """A digest of plan, data, seed and chunks; progress of another run is refused."""

    @property
    def file(self) -> Path:
        """Return the path of the progress, which `save` replaces as a whole.

        It is NumPy's archive of named arrays, with a digest of its contents. It does
        not exist before the first block is done.
        """
        return self.folder / "progress.npz"

    @property
    def samples(self) -> Path:
        """Return the path of the samples, which grow block by block.

        It is NumPy's format for one array, mapped into memory. Only rounds that the
        progress counts are valid in it: the file is flushed before the progress is
        saved.
        """
        return self.folder / "theta.npy"

    def load(self) -> Progress:
        """Return what was saved, or the beginning where nothing was.

        The digest of the contents is verified first, then the name of the run: a run
        with another plan, other data, another seed or another memory limit would not
        continue with the same draws.

        Returns:
            The progress after the last block that was saved; an empty one where there
            is no file.

        Raises:
            InputError: if the file is damaged, or of another run.
        """
        file = self.file
        if not file.exists():
            return Progress()
        arrays = read_arrays(file, key="checkpoint", requirement="a readable file")
        if str(arrays.pop("digest", "")) != _digest(arrays):
            raise InputError("checkpoint", str(file), "a readable file (it is damaged)")
        if str(arrays.pop("name")) != self.name:
            requirement = "of the same plan, data, seed and memory limit"
            raise InputError("checkpoint", str(file), requirement)
        return Progress.from_arrays(arrays)

    def save(self, progress: Progress) -> None:
        """Write progress, completely or not at all.

        A new file takes the place of the previous one only when it is on the disk, so
        that a crash leaves one of the two. Files of samples must be flushed before.

        Args:
            progress: after a block that was charged, found finite and recorded.
        """
        with replacing(self.file) as file:
            arrays = progress.to_arrays()
            arrays["name"] = np.array(self.name)
            arrays["digest"] = np.array(_digest(arrays))
            np.savez(file, allow_pickle=False, **arrays)


def _digest(arrays: Arrays) -> str:
    """Return a hash of arrays with their names."""
    parts: list[ArrayLike | bytes] = []
    for name, array in sorted(arrays.items()):
        parts += [name.encode(), array]
    return digest(*parts)


def allocate(
    shape: tuple[int, ...],
    path: str | Path | None,
    *,
    begun: bool,
    dtype: DTypeLike = np.float32,
) -> NDArray[Any]:
    """Return an array for results, in memory or mapped from a file.

    The space for the entire file is reserved now, so that a full disk is an error here
    and not a crash in the middle of a run. A new file that does not fit is removed.

    Args:
        shape: of the array.
        path: the file; None for memory.
        begun: whether the file exists and holds results already.
        dtype: of the array.

    Returns:
        The array, its values undefined unless `begun`.

    Raises:
        InputError: if the file that was begun holds another array.
        OSError: if the disk has no space for the file.
    """
    if path is None:
        return np.empty(shape, dtype)
    file_path = Path(path)
    mismatch = InputError("checkpoint", str(path), f"samples of shape {shape}")
    try:
        with naming_file(file_path):
            array = np.lib.format.open_memmap(
                file_path,
                mode="r+" if begun else "w+",
                dtype=np.dtype(dtype),
                shape=shape,
            )
            # A full disk under a mapped file would kill the process later.
            with file_path.open("r+b") as file:
                reserve(file, file_path.stat().st_size)
    except OSError:
        if not begun:
            file_path.unlink(missing_ok=True)
        raise
    except Exception:  # NumPy raises many kinds of errors for a damaged header
        raise mismatch from None
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise mismatch
    return array


def flush(array: NDArray[np.generic]) -> None:
    """Write an array to its file, if it has one.

    An array in memory is left as it is. After this returns the file holds all that was
    assigned to the array, and a checkpoint may count on it.

    Args:
        array: perhaps a `np.memmap`, as `allocate` returns for a path.
    """
    if isinstance(array, np.memmap):
        array.flush()
