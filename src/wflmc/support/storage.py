"""Files that are complete or absent, folders with one writer, and arrays of any origin.

A file takes its name only when all of it is on the disk. Readers of arrays check sizes
before they unpack anything, since a file may come from somebody else.
"""

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

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk, a quota, and a limit on the size of files."""

MAX_EXPANDED_BYTES = 2**30
"""What arrays may take in memory, however small their file: any machine has as much."""
MAX_EXPANSION = 200
"""How many times the size of their file larger arrays may take.

Deflate packs zeros a thousand times, images in float64 some 20 times. Of sparse data of
more than 1 GiB, `numpy.savez` writes a file that is not packed.
"""
NPY = ".npy"
"""Ends the name of an array in an .npz file."""
SHARED_MODE = 0o077
"""Bits of a file's mode by which others than its owner may use it."""
DISK_BLOCK_BYTES = 512
"""The unit in which a system counts the space that a file takes."""
PART = ".part"
"""Ends the name of a file that is being written."""
Arrays = Mapping[str, np.ndarray]
"""Arrays by name."""
DIGEST = "digest"
"""The array of an .npz file that has the digest of all others."""


def _no_link(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file, but none that a symbolic link of its name points to.

    Others may write to the folder, too, and could have put a link there.
    """
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), mode)


@contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Add the name of a file to an OSError raised inside that has none.

    Errors of writing to an open file, such as that of a full disk, do not name it.

    Args:
        path: of the file.

    Yields:
        Nothing, while errors are completed.

    Raises:
        OSError: the one raised inside.
    """
    try:
        yield
    except OSError as error:
        error.filename = str(path) if error.filename is None else error.filename
        raise


@contextmanager
def replacing(
    path: str | Path, suffix: str = PART, mode: int = 0o666
) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces another one when all of it is on the disk.

    It is `path` + suffix, in the same folder. After an error it is removed, and the
    file at `path` stays as it was.

    Args:
        path: of the file to replace, which need not exist.
        suffix: of the new file; each process needs its own where several may write the
            same file at once.
        mode: who may read a new file, before the umask; 0o600 for its owner alone.

    Yields:
        The new file, open for writing.

    Raises:
        OSError: the file cannot be written, or a symbolic link has its name.
    """
    target = Path(path)
    part = target.with_name(target.name + suffix)
    try:
        with naming_file(target):
            if not mode & SHARED_MODE:
                # A file that a crash has left there may have been open to others.
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
    """Create a folder that only its owner can read, unless it exists; return it.

    An existing folder keeps its mode. Folders above it that are missing are created
    with the usual mode.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, complete or not at all.

    Args:
        path: of the file, which is replaced where it exists.
        text: with line feeds at the ends of lines, on every system.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode())


def append_text(path: Path, text: str) -> None:
    """Append a text in UTF-8 to a file, and return when all of it is on the disk.

    After an error, a part of the text may be in the file.

    Args:
        path: of the file, which is created where it does not exist.
        text: to append.

    Raises:
        OSError: the file cannot be written.
    """
    with naming_file(path), path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk.

    Without it, a loss of power may bring back a file that was replaced. Nothing happens
    on a system that cannot open folders, such as Windows.
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
    """Reserve the disk space that an open file will need.

    Some writers cannot handle a full disk: HDF5, and files that are mapped to memory. A
    file system that cannot reserve space passes.

    Args:
        file: open for writing, by its name.
        size: of the complete file, in bytes.

    Raises:
        OSError: the disk has not as much space.
    """
    status = os.fstat(file.fileno())
    used = DISK_BLOCK_BYTES * getattr(status, "st_blocks", 0)
    available = shutil.disk_usage(Path(file.name).parent).free + used
    if size > available:
        sizes = f"{_mebibytes(size, 3)} needed, {_mebibytes(available, 3)} free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({sizes})")
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise


def _mebibytes(size: int, digits: int) -> str:
    """Return a size in bytes as a text in MiB, to so many digits."""
    return f"{size / 2**20:,.{digits}g} MiB"


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
    """Return the folder to write to, created if need be.

    A temporary file is written to it, so that a fault shows before any long work.

    Args:
        path: of the folder; a leading ~ is the user's home.
        option: the option that names the folder, for the error.

    Returns:
        The existing folder.

    Raises:
        InputError: it cannot be created or written.
        OSError: the disk is full.
    """
    folder = Path(os.path.expanduser(path))
    try:
        if not path:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in FULL_DISK_ERRORS:
            raise
        requirement = f"a folder that can be written ({error.strerror})"
        raise InputError(option, path, requirement) from None
    return folder


@contextmanager
def output_folder(path: str, option: str = "--out") -> Iterator[Path]:
    """Yield the folder to write to, created if need be, for this process alone.

    A folder that was created and stayed empty is removed at the end.

    Args:
        path: of the folder; a leading ~ is the user's home.
        option: the option that names the folder, for errors.

    Yields:
        The existing folder, while no other process may write to it.

    Raises:
        InputError: it cannot be written, or another process is writing to it.
    """
    folder = Path(os.path.expanduser(path))
    with removed_if_empty(folder), sole_writer(writable_folder(path, option), option):
        yield folder


@contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a folder, and those above it, that were created inside and stayed empty.

    Folders that exist at the beginning stay.

    Args:
        folder: which need not exist.

    Yields:
        Nothing, while folders may be created.
    """
    missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with suppress(OSError):
            for path in missing_folders:
                path.rmdir()


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
        requirement: what the file must be, as the end of "... must be ...".
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
        members = _array_members(archive, names)
        size = sum(member.file_size for member in members)
        _check_size(size, file, key=key, requirement=requirement, limit=limit)
        arrays = {}
        for member in members:
            with archive.open(member) as header:
                _check_header(header, member.file_size)
            with archive.open(member) as content:
                arrays[member.filename.removesuffix(NPY)] = _read_npy(content)
        return arrays


def _array_members(
    archive: zipfile.ZipFile, names: Collection[str] | None
) -> list[zipfile.ZipInfo]:
    """Return the members of an archive that are arrays, only those of `names` if given.

    An array that is there twice is refused: readers differ in which one they take.
    """
    members = [member for member in archive.infolist() if member.filename.endswith(NPY)]
    if names is not None:
        members = [
            member for member in members if member.filename.removesuffix(NPY) in names
        ]
    if len({member.filename for member in members}) < len(members):
        raise ValueError("an array that is there twice")
    return members


def arrays_digest(arrays: Arrays) -> str:
    """Return the SHA-256 of arrays with their names, types and shapes.

    Arrays are taken in the order of their names, and in C order, so that equal contents
    have equal digests.

    Args:
        arrays: by name, in any order.

    Returns:
        64 hexadecimal digits.
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

    Nothing is compressed. `read_verified_arrays` reads the file again, and refuses one
    that was changed.

    Args:
        file: open for writing.
        arrays: by name; none of them is called `digest`, and none has objects.
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
        requirement: what the file must be, as the end of "... must be ...".

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
    """Read the array of an .npy file of any origin, after a check of its size.

    Args:
        path: of the file.
        key: the option or key that names the file, for errors.
        requirement: what the file must be, as the end of "... must be ...".
        limit: the most bytes that the array may take; `expansion_limit` of the file's
            size by default.

    Returns:
        The array; objects are never unpickled.

    Raises:
        InputError: the file cannot be read, is damaged or is too large.
    """
    with _refusing_damage(path, key, requirement), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(size, file, key=key, requirement=requirement, limit=limit)
        _check_header(file, size)
        file.seek(0)
        return _read_npy(file)


def expansion_limit(file_size: int) -> int:
    """Return the most memory, in bytes, that arrays of a file of this size may take.

    It is 200 times the size of the file, or 1 GiB if that is more, and never more than
    the memory of the machine, where the system tells it.
    """
    limit = max(MAX_EXPANDED_BYTES, MAX_EXPANSION * file_size)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = min(limit, max(memory, MAX_EXPANDED_BYTES))
    return limit


@contextmanager
def _refusing_damage(path: str | Path, key: str, requirement: str) -> Iterator[None]:
    """Refuse a file that cannot be read or is damaged; no error shows its content."""
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
    max_size = expansion_limit(file_size) if limit is None else limit
    if size > max_size:
        sizes = (
            f"it takes {_mebibytes(size, 4)} of memory, of at most "
            f"{_mebibytes(max_size, 4)}"
        )
        is_compressed = size > file_size
        hint = ""
        if is_compressed:
            hint = "; numpy.savez writes a file that is not compressed"
        raise InputError(key, str(file.name), f"{requirement} ({sizes}{hint})")


def _check_header(file: IO[bytes], size: int) -> None:
    """Refuse an array that declares another size than its file has, or needs pickle."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    # In whole numbers of any size: NumPy's own would overflow.
    count = 1
    for length in shape:
        count *= int(length)
    if dtype.hasobject or dtype.itemsize == 0 or min(shape, default=0) < 0:
        raise ValueError("an array that is not made of numbers or text")
    if file.tell() + count * dtype.itemsize != size:
        raise ValueError("an array of another size than it declares")


def _read_npy(file: IO[bytes]) -> np.ndarray:
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
