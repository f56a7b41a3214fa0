"""Files that are written whole or not at all, and folders that one process writes to at a time."""

import errno
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from wflmc.errors import InputError

fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None
"""None on Windows, which has a lock of its own."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that a full disk, a quota and a limit on the size of files give."""


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
def replacing(path: str | Path, suffix: str = ".part", mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yield a file, `path` + suffix, that takes the place of `path` when all of it is on the disk; else it is removed.

    Args:
        suffix: of the file; each process needs its own where several may write the same file at once.
        mode: who may read a new file, before the umask; 0o600 for what only its owner may see.
    """
    target = Path(path)
    part = target.with_name(target.name + suffix)
    try:
        with naming_file(target):
            with open(part, "wb", opener=partial(_no_link, mode=mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


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


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keep other threads and processes that use the same file out; systems without such locks have one process."""
    with path.open("ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
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
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that reserves nothing
                raise


@contextmanager
def sole_writer(folder: Path, option: str = "--out") -> Iterator[None]:
    """Keep other processes out of a folder; the lock ends with the process, however that ends.

    Raises:
        InputError: another process holds the lock.
    """
    path = folder / ".lock"
    while True:
        with open(path, "ab+", buffering=0, opener=_no_link) as file:
            if not _lock(file):
                file.seek(0)
                number = file.read(20).decode("ascii", "replace")
                holder = f"process {number}" if number.isdigit() else "another one"
                raise InputError(option, str(folder), f"a folder that no other process is writing to ({holder} is)")
            if not _is_at(file, path):  # removed by the holder before this process had the lock
                continue
            with suppress(OSError):  # a full disk has no room for the number
                file.truncate(0)
                file.write(b"%d" % os.getpid())
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()
            return


def _lock(file: IO[Any]) -> bool:
    """Lock a file until it is closed; whether that was possible."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            windows: Any = importlib.import_module("msvcrt")
            os.lseek(file.fileno(), 2**30, os.SEEK_SET)  # behind the number, which others must be able to read
            windows.locking(file.fileno(), windows.LK_NBLCK, 1)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)  # others: a disk without locks
    return True


def _is_at(file: IO[Any], path: Path) -> bool:
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
        raise InputError(option, path, f"a folder that can be written ({error.strerror})") from None
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
