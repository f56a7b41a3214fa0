"""Channel gains h[round, device] from files: .npy, .npz, .csv, .mat and .h5.

Every format gives the same array as `numpy.save` of the gains would, so that a plan
does not depend on the program that measured or simulated a channel. Files may come from
anywhere: nothing is unpickled, no link to another file is followed, and the size of an
array is known before it is read.
"""

import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.support.delimited import TextRow, split_rows
from wflmc.support.errors import InputError
from wflmc.support.storage import (
    NPY,
    expansion_limit,
    read_array,
    read_arrays,
    read_lines,
)

Array = NDArray[Any]

KEY = "link.gains"
"""The key of a scenario that names the file, for errors."""
FORMATS = ".npy, .npz, .csv, .mat, .h5 or .hdf5"
"""The endings of the files that are read, for errors."""
WITH_VARIABLE = re.compile(
    r"(?P<path>.+\.(?:npy|npz|csv|mat|h5|hdf5)):(?P<variable>.*)", re.I | re.S
)
"""A file of a known format, and the variable in it."""
MAX_NAMES_SHOWN = 10
"""Variables of a file that an error lists."""
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""The bytes by which an HDF5 file is recognized."""
HDF5_OFFSETS = (0, 512)
"""Bytes before the signature: none, or those in which MATLAB describes a file."""
MATLAB_NUMBERS = re.compile(r"double|single|u?int(8|16|32|64)")
"""Classes of MATLAB whose arrays are numbers; others are logical, char, cell, …"""
MATLAB_FLOATS = {"double": "float64", "single": "float32"}
"""Types of NumPy for the floating-point classes of MATLAB."""
MATLAB_INTERNAL = re.compile(r"#\w+#(/|$)")
"""Groups of a MATLAB 7.3 file in which there are no variables: #refs#, #subsystem#."""
MAX_NUMBER_BYTES = 16
"""Bytes of a complex number in double precision, the largest that a file holds."""
MAT_HEADER_BYTES = 128
"""Bytes before the first element of a MATLAB 5 file."""
MAT_TAG_BYTES = 8
"""Bytes in which an element of a MATLAB 5 file states its type and its length."""
MAT_COMPRESSED = 15
"""Type of a compressed element of a MATLAB 5 file (miCOMPRESSED)."""
MAT_BYTE_ORDERS = {b"IM": "<u4", b"MI": ">u4"}
"""Type of the numbers in such a tag, by the end of the file's header."""
UNPACKED_CHUNK_BYTES = 2**20
"""How much is unpacked at a time while the size of a file's content is counted."""

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
COMPLEX_CELL = re.compile(
    rf"(?P<real>[+-]?{_NUMBER})(?:\s*(?P<sign>\+\s*-|[+-])\s*(?P<imag>{_NUMBER})[ij])?"
    rf"|(?P<imag_only>[+-]?{_NUMBER})[ij]",
    re.ASCII,
)
"""A real number, the sum of a real and an imaginary one, or an imaginary one."""


class GainsFile(NamedTuple):
    """What `link.gains` names.

    Args:
        path: of the file.
        variable: the array in it; None where the file has only one.
    """

    path: str
    variable: str | None = None

    def __str__(self) -> str:
        return self.path if self.variable is None else f"{self.path}:{self.variable}"


def split_variable(gains: str) -> GainsFile:
    """Split `FILE` or `FILE:VARIABLE`, the value of `link.gains`, into its parts.

    >>> split_variable("h.mat:H")
    GainsFile(path='h.mat', variable='H')
    >>> split_variable("C:/data/h.npy")
    GainsFile(path='C:/data/h.npy', variable=None)

    Args:
        gains: as in a scenario.

    Returns:
        The file and the variable. Only what follows the ending of a known format is a
        variable: other colons belong to the path.
    """
    parts = WITH_VARIABLE.fullmatch(gains)
    if parts is None:
        return GainsFile(gains)
    return GainsFile(parts["path"], parts["variable"])


def load_gains(gains: str) -> Array:
    """Read channel gains from a file.

    Args:
        gains: `FILE`, or `FILE:VARIABLE` where the file holds several arrays. The
            ending of the file says its format; one of any other ending is read as .npy.

    Returns:
        The array as the file has it, [rounds, devices] if the file is right, which
        `channel.from_array` checks.

    Raises:
        InputError: the file cannot be read, holds something else than numbers, or the
            variable is not there or has to be chosen.
    """
    if not gains:
        requirement = f"the name of a file ({FORMATS}) when link.fading = 'file'"
        raise InputError(KEY, gains, requirement)
    file = split_variable(gains)
    readers: Mapping[str, Callable[[GainsFile], Array]] = {
        ".npz": _load_npz,
        ".csv": _load_csv,
        ".mat": _load_mat,
        ".h5": _load_hdf5,
        ".hdf5": _load_hdf5,
    }
    suffix = Path(file.path).suffix.lower()
    read = readers.get(suffix, _load_npy)
    # MATLAB's arrays are stored by columns, which would change the rounding of sums.
    return np.array(read(file), order="C")


def _load_npy(file: GainsFile) -> Array:
    _refuse_variable(file)
    requirement = (
        f"a file of real or complex numbers ({FORMATS}; numpy.save writes an .npy file)"
    )
    return read_array(file.path, key=KEY, requirement=requirement)


def _load_npz(file: GainsFile) -> Array:
    requirement = "an .npz file of arrays of real or complex numbers"
    with _refusing_damage(file, requirement), zipfile.ZipFile(file.path) as archive:
        members = [name for name in archive.namelist() if name.endswith(NPY)]
    variable = _choose(file, [name.removesuffix(NPY) for name in members])
    arrays = read_arrays(file.path, key=KEY, requirement=requirement, names=[variable])
    return arrays[variable]


def _load_csv(file: GainsFile) -> Array:
    """Read a line for each round and a column for each device."""
    _refuse_variable(file)
    requirement = (
        "a CSV file in UTF-8 with a line for each round and a column for each device"
    )
    with _refusing_damage(file, requirement):
        rows = split_rows(read_lines(file.path))
    while rows and not any(cell.strip() for cell in rows[-1].cells):
        rows.pop()
    if not rows:
        raise InputError(KEY, str(file), f"{requirement}; it is empty")
    width = len(rows[0].cells)
    gains: list[list[complex | float]] = []
    has_phase = False
    for row in rows:
        if len(row.cells) != width or width == 0:
            counts = f"{len(row.cells)} columns, line 1 has {width}"
            problem = f"line {row.line_number} has {counts}"
            raise InputError(KEY, str(file), f"{requirement}; {problem}")
        values = _gains_of_round(file, row, requirement)
        has_phase |= any(isinstance(value, complex) for value in values)
        gains.append(values)
    return np.array(gains, dtype=complex if has_phase else float)


def _gains_of_round(
    file: GainsFile, row: TextRow, requirement: str
) -> list[complex | float]:
    """Return the number in every cell of a line, refused where one has none."""
    values = []
    for column, cell in enumerate(row.cells, 1):
        value = as_complex(cell)
        if value is None:
            numbers = "of numbers such as 0.5, 0.3-0.4j or 0.3-0.4i"
            problem = f"line {row.line_number} has none in column {column}"
            full_requirement = f"{requirement}, without a header, {numbers}; {problem}"
            raise InputError(KEY, str(file), full_requirement)
        values.append(value)
    return values


def as_complex(cell: str) -> complex | float | None:
    """Return the finite number in a cell of a table of gains.

    >>> as_complex("0.3-0.4i"), as_complex("(1e-3+-2j)")
    ((0.3-0.4j), (0.001-2j))
    >>> as_complex("2"), as_complex("1_0")
    (2.0, None)

    Args:
        cell: a real number, or a complex one as MATLAB (`0.3-0.4i`), Python
            (`(0.3-0.4j)`) or `numpy.savetxt` (`(0.3+-0.4j)`) writes it.

    Returns:
        A complex number where the cell has an imaginary part, else a real one; None
        where it has no finite number in ASCII digits.
    """
    text = cell.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    parts = COMPLEX_CELL.fullmatch(text)
    if parts is None:
        return None
    real = float(parts["real"] or 0)
    imaginary_text = parts["imag"] or parts["imag_only"]
    imaginary = float(imaginary_text or 0)
    if not (math.isfinite(real) and math.isfinite(imaginary)):
        return None
    if imaginary_text is None:
        return real
    sign = parts["sign"] or ""
    return complex(real, -imaginary if "-" in sign else imaginary)


def _load_mat(file: GainsFile) -> Array:
    """Read a MATLAB file: of versions 4 to 7 by SciPy, of version 7.3 as HDF5."""
    requirement = "a MATLAB file with an array of real or complex numbers"
    with _refusing_damage(file, requirement):
        if _is_hdf5(file.path):
            # MATLAB stores columns first, and HDF5 calls that the transpose.
            return _read_hdf5(file, requirement).T
        return _read_matlab5(file, requirement)


def _read_matlab5(file: GainsFile, requirement: str) -> Array:
    """Return an array of a MATLAB file of versions 4 to 7."""
    from scipy.io import loadmat, whosmat

    _check_size(file, requirement, _expanded_bytes(file.path))
    contents = {
        name: (shape, matlab_class) for name, shape, matlab_class in whosmat(file.path)
    }
    variable = _choose(file, list(contents))
    shape, matlab_class = contents[variable]
    if not MATLAB_NUMBERS.fullmatch(matlab_class):
        raise _no_numbers(file, variable, f"of class {matlab_class}")
    _check_size(file, requirement, math.prod(shape) * MAX_NUMBER_BYTES)
    arrays = loadmat(file.path, variable_names=[variable], appendmat=False)
    values = np.asarray(arrays[variable])
    if np.iscomplexobj(values):
        return values
    # MATLAB writes doubles that are whole numbers as small integers, in which |h| may
    # overflow. SciPy's option for that, mat_dtype, drops imaginary parts.
    dtype = np.dtype(MATLAB_FLOATS.get(matlab_class, values.dtype))
    return values.astype(dtype)


def _load_hdf5(file: GainsFile) -> Array:
    requirement = "an HDF5 file with an array of real or complex numbers"
    with _refusing_damage(file, requirement):
        return _read_hdf5(file, requirement)


def _read_hdf5(file: GainsFile, requirement: str) -> Array:
    """Return a data set of an HDF5 file as it is stored.

    Data sets are found by hard links alone, so that nothing outside the file is read.
    """
    h5py = _h5py(file)
    with h5py.File(file.path, "r") as content:
        datasets: dict[str, Any] = {}

        def collect(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset) and not MATLAB_INTERNAL.match(name):
                datasets[name] = node

        content.visititems(collect)
        variable = _choose(file, list(datasets))
        dataset = datasets[variable]
        problem = _dataset_problem(dataset)
        if problem is not None:
            raise _no_numbers(file, variable, problem)
        _check_size(file, requirement, dataset.size * dataset.dtype.itemsize)
        values = np.asarray(dataset[()])
    return _from_pairs(values) if _has_pairs(values.dtype.names) else values


def _dataset_problem(dataset: Any) -> str | None:
    """Return why an HDF5 data set is no array of numbers; None if it is one."""
    matlab_class = dataset.attrs.get("MATLAB_class", b"double")
    if isinstance(matlab_class, bytes):
        matlab_class = matlab_class.decode("ascii", "replace")
    if not MATLAB_NUMBERS.fullmatch(str(matlab_class)):
        return f"of class {matlab_class}"
    if dataset.shape is None or "MATLAB_empty" in dataset.attrs:
        return "empty"
    if dataset.external or dataset.is_virtual:
        return "stored in another file"
    if dataset.dtype.kind not in "fciu" and not _has_pairs(dataset.dtype.names):
        return f"of type {dataset.dtype}"
    return None


def _has_pairs(field_names: tuple[str, ...] | None) -> bool:
    """Return whether numbers are stored as a real and an imaginary part."""
    return field_names == ("real", "imag")


def _from_pairs(values: Array) -> Array:
    """Return complex numbers from pairs of a real and an imaginary part, bit by bit."""
    result = np.empty(values.shape, np.result_type(values["real"], np.complex64))
    result.real = values["real"]
    result.imag = values["imag"]
    return result


def _h5py(file: GainsFile) -> Any:
    """Return h5py, which is imported when a file needs it."""
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError:
        requirement = "a file that can be read here: HDF5 needs h5py (pip install h5py)"
        raise InputError(KEY, str(file), requirement) from None
    return h5py


def _is_hdf5(path: str) -> bool:
    with open(path, "rb") as content:
        start = content.read(max(HDF5_OFFSETS) + len(HDF5_SIGNATURE))
    return any(start.startswith(HDF5_SIGNATURE, offset) for offset in HDF5_OFFSETS)


def _expanded_bytes(path: str) -> int:
    """Return the bytes that the elements of a MATLAB 5 file have when unpacked.

    Counting ends where there are more than any file of its size may have.
    """
    file_size = os.path.getsize(path)
    limit = expansion_limit(file_size)
    total = file_size
    with open(path, "rb") as content:
        header = content.read(MAT_HEADER_BYTES)
        order = MAT_BYTE_ORDERS.get(header[-2:])
        if order is None:  # version 4 packs nothing
            return total
        for element in _compressed_elements(content, order):
            unpacker = zlib.decompressobj()
            while element and not unpacker.eof and total <= limit:
                total += len(unpacker.decompress(element, UNPACKED_CHUNK_BYTES))
                element = unpacker.unconsumed_tail
            if total > limit:
                break
    return total


def _compressed_elements(content: IO[bytes], order: str) -> Iterator[bytes]:
    """Yield the compressed elements of a MATLAB 5 file, from behind its header on."""
    while len(tag := content.read(MAT_TAG_BYTES)) == MAT_TAG_BYTES:
        element_type, length = (int(word) for word in np.frombuffer(tag, order))
        element = content.read(length)
        if element_type == MAT_COMPRESSED:
            yield element


def _check_size(file: GainsFile, requirement: str, size: int) -> None:
    """Refuse an array that would take more memory than one of such a file may."""
    limit = expansion_limit(os.path.getsize(file.path))
    if size > limit:
        sizes = f"more than {limit / 2**20:,.4g} MiB of memory"
        raise InputError(KEY, str(file), f"{requirement} (it takes {sizes})")


def _choose(file: GainsFile, names: list[str]) -> str:
    """Return the variable that a scenario chooses, or the only one that a file has."""
    if file.variable is None and len(names) == 1:
        return names[0]
    variable = (file.variable or "").strip("/")
    if variable in names:
        return variable
    if not names:
        raise InputError(KEY, str(file), "a file that holds an array")
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    if len(names) > MAX_NAMES_SHOWN:
        shown += ", …"
    example = f"{Path(file.path).name}:{names[0]}"
    requirement = f"the file and one of its variables, as {example} (it has {shown})"
    raise InputError(KEY, str(file), requirement)


def _refuse_variable(file: GainsFile) -> None:
    if file.variable is not None:
        requirement = "a file name without a variable: such a file holds one array"
        raise InputError(KEY, str(file), requirement)


def _no_numbers(file: GainsFile, variable: str, problem: str) -> InputError:
    """Return the error for a variable that is no array of numbers."""
    numbers = "a full array of real or complex numbers"
    return InputError(KEY, str(file), f"{numbers}, but {variable} is {problem}")


@contextmanager
def _refusing_damage(file: GainsFile, requirement: str) -> Iterator[None]:
    """Refuse a file that cannot be read or is of another format."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except OSError as error:
        is_missing = not os.path.exists(file.path)
        reason = "no such file" if is_missing else error.strerror or "it is damaged"
        raise InputError(KEY, str(file), f"{requirement} ({reason})") from None
    except Exception:  # a damaged file can fail in a dozen ways
        raise InputError(KEY, str(file), f"{requirement} (it is damaged)") from None
