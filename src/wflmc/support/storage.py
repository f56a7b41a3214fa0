"""Files written whole or not at all, folders with one writer at a time, and arrays from anywhere."""

import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from wflmc.support.errors import InputError

LOCK_NAME = ".lock"
"""The file of an output folder that its writer locks, and removes at the end."""
LOCK_POLL_SECONDS = 0.01
"""How long a process waits before it tries again to lock a file that is in use."""
HOLDER_START = 1
"""Where the holder's number begins in a lock file: Windows lets nobody else read the
locked byte, which is the first one."""
MAX_HOLDER_DIGITS = 20
"""No process number has more digits."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that a full disk, a quota and a limit on the size of files give."""

MAX_EXPANDED_BYTES = 2**30
"""What arrays may take in memory, however small their file: any machine has as much."""
MAX_EXPANSION = 200
"""How many times the size of their file larger arrays may take.

Deflate packs zeros a thousand times, images in float64 some 20 times. Of sparse data of
more than 1 GiB, `numpy.savez` writes a file that is not packed.
"""
NPY = ".npy"
PART = ".part"
"""Ends the name of a file that is being written."""
Arrays = Mapping[str, np.ndarray]
"""Arrays by name."""
DIGEST = "digest"
"""The array of an .npz file that has the digest of all others."""


def _no_link(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file, but not what a link of its name points to: others may write to the folder, too."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), mode)


@contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Give an OSError raised inside the name of the file that it is about: writing to an open file tells none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path) if error.filename is None else error.filename
        raise


@contextmanager
def replacing(
    path: str | Path, suffix: str = PART, mode: int = 0o666
) -> Iterator[IO[bytes]]:
    """Yield a file, `path` + suffix, that takes the place of `path` when all of it is on the disk; else it is removed.

    Args:
        suffix: of the file; each process needs its own where several may write the same file at once.
        mode: who may read a new file, before the umask; 0o600 for what only its owner may see.
    """
    target = Path(path)
    part = target.with_name(target.name + suffix)
    try:
        with naming_file(target):
            if (
                not mode & 0o077
            ):  # what a crash has left there may have been open to others
                part.unlink(missing_ok=True)
            with open(part, "wb", opener=partial(_no_link, mode=mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner can look into, unless it exists; return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


def append_text(path: Path, text: str) -> None:
    """Add to a file, and return when all of it is on the disk."""
    with naming_file(path), path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk, if the system can tell.

    A loss of power may else bring back a file that was replaced.
    """
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of a file, and wait for it while another holds it.

    The lock is on the file itself, through a descriptor of its own: no lock file lies
    beside it, two threads exclude each other as two processes do, and the system drops
    the lock when the process ends, however that happens. A file that does not exist is
    created empty.

    Windows locks would keep the holder itself from reading the file by its name, so
    that there nothing is locked: on Windows a file has to be used by one process.

    Args:
        path: the file, whose content stays as it is.

    Yields:
        Nothing, while the lock is held.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    with path.open("ab") as file:
        if os.name != "nt":
            from filelock import lock_descriptor

            lock_descriptor(file.fileno(), poll_interval=LOCK_POLL_SECONDS)
        yield


def reserve(file: IO[bytes], size: int) -> None:
    """Take the room that an open file will need, where writers cannot bear a full disk: HDF5, files that are mapped.

    Raises:
        OSError: there is not as much.
    """
    held = 512 * getattr(os.fstat(file.fileno()), "st_blocks", 0)
    free = shutil.disk_usage(Path(file.name).parent).free + held
    if size > free:
        short = f"{size / 2**20:,.3g} MiB needed, {free / 2**20:,.3g} MiB free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({short})")
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
        except OSError as error:
            if error.errno not in (
                errno.EINVAL,
                errno.EOPNOTSUPP,
            ):  # a file system that reserves nothing
                raise


@contextmanager
def sole_writer(folder: Path, option: str = "--out") -> Iterator[None]:
    """Keep other processes from writing to a folder.

    The lock is on the file `.lock` of the folder, which holds the number of this
    process and is removed at the end. What a killed process leaves there locks nothing:
    the system drops a lock with the process that holds it.

    Args:
        folder: an existing folder.
        option: the option that names the folder, for the error.

    Yields:
        Nothing, while the lock is held.

    Raises:
        InputError: another process holds the lock.
        OSError: the lock file cannot be opened, or is a symbolic link.
    """
    path = folder / LOCK_NAME
    while True:
        with open(path, "ab+", buffering=0, opener=_no_link) as file:
            if not _lock(file):
                raise _in_use(file, folder, option)
            if not _is_at(file, path):
                continue  # the holder removed it before this process had the lock
            with suppress(OSError):  # a full disk has no room for the number
                file.truncate(0)
                file.write(b" " * HOLDER_START + b"%d" % os.getpid())
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()
            return


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; return False where another process holds it.

    A disk without locks counts as locked: it is written to all the same.
    """
    from filelock import lock_descriptor

    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError:
        return True


def _in_use(file: IO[bytes], folder: Path, option: str) -> InputError:
    """Return the error for a folder whose lock file another process has locked."""
    file.seek(HOLDER_START)
    number = file.read(MAX_HOLDER_DIGITS).decode("ascii", "replace")
    holder = f"process {number}" if number.isdigit() else "another one"
    reason = f"a folder that no other process is writing to ({holder} is)"
    return InputError(option, str(folder), reason)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def writable_folder(path: str, option: str = "--out") -> Path:
    """Return the folder to write to, made if need be, and tried before any long work."""
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
        raise InputError(
            option, path, f"a folder that can be written ({error.strerror})"
        ) from None
    return folder


@contextmanager
def output_folder(path: str, option: str = "--out") -> Iterator[Path]:
    """Yield the folder to write to, made if need be, for this process alone."""
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


def read_lines(path: str | Path) -> list[str]:
    """Read the lines of a text file in UTF-8, without their ends.

    A line ends with a line feed, which a carriage return may precede. A carriage return
    alone ends lines only in a file without line feeds: else it would make two rows of
    one.

    Args:
        path: of the file.

    Returns:
        The lines, the one after the last end included where it is not empty.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not in UTF-8.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        text = file.read()
    end = "\n" if "\n" in text else "\r"
    lines = text.removesuffix(end).split(end)
    return [line.removesuffix("\r") for line in lines]


def read_arrays(
    path: str | Path,
    *,
    key: str,
    requirement: str,
    names: Collection[str] | None = None,
    limit: int | None = None,
) -> dict[str, np.ndarray]:
    """Read arrays from an .npz file of any origin, after a check of their sizes.

    The sizes that the archive and the header of every array declare are compared with
    each other and with the limit before anything is unpacked, so that a file of 4 MiB
    cannot fill 4 GiB of memory. Objects are never unpickled.

    Args:
        path: of the file.
        key: the option or key that names the file, for errors.
        requirement: what the file must be, as the end of the sentence "... must be ...".
        names: the arrays to read, where they are there; all of them by default.
        limit: the most bytes that they may take together; `expansion_limit` of the
            file's size by default.

    Returns:
        The arrays by name. Those of `names` that the file lacks are missing.

    Raises:
        InputError: the file cannot be read, is damaged, holds an array twice, or is too
            large.
    """
    with (
        _refusing_damage(path, key, requirement),
        open(path, "rb") as file,
        zipfile.ZipFile(file) as archive,
    ):
        members = [
            member for member in archive.infolist() if member.filename.endswith(NPY)
        ]
        if names is not None:
            members = [
                member
                for member in members
                if member.filename.removesuffix(NPY) in names
            ]
        if len({member.filename for member in members}) < len(members):
            raise ValueError("an array that is there twice")
        size = sum(member.file_size for member in members)
        _check_size(size, file, key=key, requirement=requirement, limit=limit)
        arrays = {}
        for member in members:
            with archive.open(member) as header:
                _check_header(header, member.file_size)
            with archive.open(member) as content:
                arrays[member.filename.removesuffix(NPY)] = _read_npy(content)
        return arrays


def arrays_digest(arrays: Arrays) -> str:
    """Return the SHA-256 of arrays with their names, types and shapes.

    Args:
        arrays: by name, in any order.
    """
    total = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        header = f"{name} {array.dtype.str} {array.shape}".encode()
        content = np.ascontiguousarray(array).tobytes()
        for part in (header, content):
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
    return total.hexdigest()


def write_arrays(file: IO[bytes], arrays: Arrays) -> None:
    """Write arrays and their digest to an open file, in the format .npz.

    Args:
        file: open for writing.
        arrays: by name; none of them is called `digest`.
    """
    content: dict[str, np.ndarray] = {**arrays, DIGEST: np.array(arrays_digest(arrays))}
    np.savez(file, allow_pickle=False, **content)


def read_verified_arrays(
    path: str | Path, *, key: str, requirement: str
) -> dict[str, np.ndarray]:
    """Read arrays that `write_arrays` has written, and compare their digest.

    Args:
        path: of the file.
        key: the option that names the file, for errors.
        requirement: what the file must be, as the end of the sentence "... must be ...".

    Returns:
        The arrays by name, without the digest.

    Raises:
        InputError: the file cannot be read, is damaged or has been changed.
    """
    arrays = read_arrays(path, key=key, requirement=requirement)
    digest = arrays.pop(DIGEST, None)
    if digest is None or str(digest) != arrays_digest(arrays):
        raise InputError(
            key, str(path), f"{requirement} (it is damaged, or has been changed)"
        )
    return arrays


def read_array(
    path: str | Path, *, key: str, requirement: str, limit: int | None = None
) -> np.ndarray:
    """Read the array of an .npy file of any origin, as `read_arrays` does of .npz files."""
    with _refusing_damage(path, key, requirement), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(size, file, key=key, requirement=requirement, limit=limit)
        _check_header(file, size)
        file.seek(0)
        return _read_npy(file)


def expansion_limit(file_size: int) -> int:
    """Return the most memory, in bytes, that arrays of a file of this size may take.

    It is never more than the machine has.
    """
    limit = max(MAX_EXPANDED_BYTES, MAX_EXPANSION * file_size)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = min(limit, max(memory, MAX_EXPANDED_BYTES))
    return limit


@contextmanager
def _refusing_damage(path: str | Path, key: str, requirement: str) -> Iterator[None]:
    """Refuse a file that cannot be read, or is another one; its content never shows."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except OSError as error:
        reason = error.strerror or "it is damaged"
        raise InputError(key, str(path), f"{requirement} ({reason})") from None
    except Exception:  # a damaged archive can fail in a dozen ways
        raise InputError(key, str(path), f"{requirement} (it is damaged)") from None


def _check_size(
    size: int, file: IO[bytes], *, key: str, requirement: str, limit: int | None
) -> None:
    """Refuse arrays of a file that would take more memory than they may."""
    file_size = os.fstat(file.fileno()).st_size
    most = expansion_limit(file_size) if limit is None else limit
    if size > most:
        sizes = f"it takes {size / 2**20:,.4g} MiB of memory, of at most {most / 2**20:,.4g} MiB"
        hint = (
            "; numpy.savez writes a file that is not compressed"
            if size > file_size
            else ""
        )
        raise InputError(key, str(file.name), f"{requirement} ({sizes}{hint})")


def _check_header(file: IO[bytes], size: int) -> None:
    """Refuse an array that declares another size than its file has, or needs pickle."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    count = 1
    for length in shape:  # in whole numbers of any size: NumPy's own would overflow
        count *= int(length)
    if dtype.hasobject or dtype.itemsize == 0 or min(shape, default=0) < 0:
        raise ValueError("an array that is not made of numbers or text")
    if file.tell() + count * dtype.itemsize != size:
        raise ValueError("an array of another size than it declares")


def _read_npy(file: IO[bytes]) -> np.ndarray:
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
