"""Tables of practitioners, from files and from frames of pandas and polars.

A text file has no types: its cells stay text, whatever they look like, and only the
kinds of columns decide how they are read (`wflmc.apps.tables.cells`). No row changes
how another one is split or stored.
"""

from __future__ import annotations

import csv
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from wflmc.apps.tables.cells import parse_number, plain_form
from wflmc.support.delimited import TextRow, split_rows
from wflmc.support.errors import Fault, InputError
from wflmc.support.storage import read_arrays, read_lines

if TYPE_CHECKING:  # it is imported only where a table is used
    from pandas import DataFrame, Index

UNTYPED = "wflmc.untyped"
"""Attribute of a frame whose cells are all text because its file knows no types."""
DELIMITERS = "\t;|,"
"""Delimiters of text files, those that seldom stand in a name first."""
UNNAMED_PREFIX = "Unnamed: "
"""Start of the names of columns that have none in their file."""
ARRAY_COLUMNS = {"y": "y", "devices": "device"}
"""Columns that arrays of an .npz file become, by the array's name."""


class _ArrowTable(Protocol):
    """A table of pyarrow."""

    def to_pandas(self, *, integer_object_nulls: bool) -> DataFrame:
        """Return the table as a frame of pandas.

        Args:
            integer_object_nulls: store integers beside missing values as objects; else
                they become floats.
        """


def _installed(name: str) -> ModuleType:
    """Return a package that tables need, or refuse to go on without it."""
    try:
        return import_module(name)
    except ImportError:
        requirement = "installed to use tables: pip install 'wflmc[tables]'"
        raise InputError(name, None, requirement) from None


def as_frame(table: object) -> DataFrame:
    """Return a table as a pandas.DataFrame whose column names are text.

    Args:
        table: a path for `read_table`, a pandas frame (not copied), or a frame of
            another library with `to_arrow` or `to_pandas`, such as polars'.

    Returns:
        The frame, with distinct names and at least one row. Integers beside missing
        values stay integers where Arrow converts them.

    Raises:
        InputError: if a path cannot be read (see `read_table`), the value is no table,
            it has no rows, or two columns have one name.
    """
    if isinstance(table, str | Path):
        return read_table(table)
    if not isinstance(table, _installed("pandas").DataFrame):
        table = _converted(table)
    return _checked(table)


def read_table(path: str | Path) -> DataFrame:
    """Read a table from a file.

    Cells of a text file stay text, whatever they look like: only the kinds of columns
    decide how they are read.

    Args:
        path: a text file with a header (.csv, .tsv, .txt; a tab, semicolon, bar or
            comma delimits columns, whichever the header has most; a space in a .txt
            file whose header has none of these), .parquet, or .npz with X[N, d] and, if
            there are, y[N] and devices[N], which become columns x0, x1, …, y and
            device.

    Returns:
        A pandas.DataFrame with one row for each record.

    Raises:
        InputError: if there is no such file, no table with distinct names and at least
            one row in it, or if the package that reads it is not installed.
    """
    _installed("pandas")
    readers = {
        ".csv": _read_text,
        ".tsv": _read_text,
        ".txt": _read_text,
        ".parquet": _read_parquet,
        ".npz": _read_npz,
    }
    file = Path(path).expanduser()
    suffix = file.suffix.lower()
    if suffix not in readers:
        requirement = f"a file that ends in {', '.join(readers)}"
        raise InputError("table", str(path), requirement)
    if not file.exists():
        raise InputError("table", str(path), "a file that exists")
    try:
        frame = readers[suffix](file)
    except InputError:
        raise
    except Exception as error:
        # A corrupt file can fail in many ways, and messages of libraries may show its
        # content.
        reason = error.strerror if isinstance(error, OSError) else None
        requirement = f"a {suffix} file that can be read"
        if reason:
            requirement += f" ({reason})"
        raise InputError("table", str(path), requirement) from None
    return _checked(frame)


def _read_text(path: Path) -> DataFrame:
    """Read a delimited text file, every cell as text.

    The header alone, which is public, decides what the delimiter is. Quotes have to be
    closed in their line, and every row needs as many cells as the header, so that a
    damaged row is refused instead of running into the next.
    """
    form = "quoted as CSV is, each row in one line with as many values as the header"
    requirement = f"a text file in UTF-8, {form}, that can be read"
    try:
        rows = _split_text(path)
    except (csv.Error, UnicodeDecodeError):
        raise InputError("table", str(path), requirement) from None
    if not rows:
        raise InputError("table", Fault("is empty"), "a header and at least one row")
    header = _column_names(rows[0].cells)
    records = [_record(row.cells, len(header)) for row in rows[1:]]
    if any(record is None for record in records):
        raise InputError("table", str(path), requirement)
    cells = np.array(records, dtype=object).reshape(len(records), len(header))
    frame = _installed("pandas").DataFrame(cells, columns=header, dtype=object)
    frame.attrs[UNTYPED] = True
    return frame


def _split_text(path: Path) -> list[TextRow]:
    """Return the rows of a text file, the header first, without empty lines."""
    lines = read_lines(path)
    header = next((line for line in lines if line.strip()), "")
    delimiter = _delimiter(header, allow_space=path.suffix.lower() == ".txt")
    rows = split_rows(lines, delimiter=delimiter, skip_spaces=True)
    return [row for row in rows if row.cells]


def _delimiter(header: str, *, allow_space: bool) -> str:
    """Return the sign that stands in the header of a text file most often.

    Args:
        header: the first line; what is in quotes there does not count.
        allow_space: whether spaces delimit columns where no other sign does; else they
            are part of a name.
    """
    unquoted = re.sub(r'"[^"]*"', "", header)
    counts = {sign: unquoted.count(sign) for sign in DELIMITERS}
    if any(counts.values()):
        return max(counts, key=lambda sign: counts[sign])
    return " " if allow_space else ","


def _column_names(header: list[str]) -> list[str]:
    """Return the names of columns, refused where the first row holds numbers.

    Columns without a name are called `Unnamed: INDEX`.
    """
    numbers = [plain_form(name) for name in header if parse_number(name) is not None]
    has_fraction = any(not re.fullmatch(r"-?\d+", number) for number in numbers)
    has_repeated_number = len(set(numbers)) < len(numbers)
    if has_fraction or has_repeated_number:
        # These are data, and must not show in errors as names.
        requirement = "a table with a name for each column in the first row"
        raise InputError("table", Fault("has numbers for names"), requirement)
    names = [
        name if name.strip() else f"{UNNAMED_PREFIX}{index}"
        for index, name in enumerate(header)
    ]
    _check_names(_installed("pandas").Index(names))
    return names


def _record(cells: list[str], columns: int) -> list[str] | None:
    """Return the cells of a row; None if there are not as many as columns.

    One empty cell too many at the end, behind a last delimiter, is dropped.
    """
    if len(cells) == columns + 1 and not cells[-1].strip():
        return cells[:-1]
    return cells if len(cells) == columns else None


def _read_parquet(path: Path) -> DataFrame:
    _installed("pyarrow")
    return _from_arrow(import_module("pyarrow.parquet").read_table(path))


def _from_arrow(table: _ArrowTable) -> DataFrame:
    """Return an Arrow table as a frame.

    Integers stay integers beside missing values.
    """
    return table.to_pandas(integer_object_nulls=True)


def _read_npz(path: Path) -> DataFrame:
    """Read X[N, d], y[N] and devices[N]; features are numbers, of whatever type."""
    requirement = (
        "an .npz file with numbers X[N, d], y[N] and, if there are, devices[N]"
    )
    names = ("X", *ARRAY_COLUMNS)
    arrays = read_arrays(path, key="table", requirement=requirement, names=names)
    X = arrays.get("X", np.zeros(0))
    is_table = X.ndim == 2 and X.dtype.kind in "biuf"
    columns = {
        column: arrays[name] for name, column in ARRAY_COLUMNS.items() if name in arrays
    }
    has_row_each = all(values.shape == X.shape[:1] for values in columns.values())
    if not is_table or not has_row_each:
        raise InputError("table", str(path), requirement)
    feature_names = [f"x{index}" for index in range(X.shape[1])]
    # All features share one type, which a single value may decide: as float64 they are
    # the same whatever it was.
    features = _installed("pandas").DataFrame(X.astype(float), columns=feature_names)
    return features.assign(**columns)


def _converted(table: object) -> DataFrame:
    """Return a frame of another library as one of pandas."""
    _installed("pyarrow")  # by which polars converts
    try:
        if hasattr(table, "to_arrow"):
            return _from_arrow(table.to_arrow())
        if hasattr(table, "to_pandas"):
            return table.to_pandas()
    except Exception:  # types that Arrow lacks; messages of libraries may show values
        requirement = "a frame whose columns can be converted to those of pandas"
        raise InputError("table", table, requirement) from None
    raise InputError("table", table, "a path, or a frame of pandas or polars")


def _checked(frame: DataFrame) -> DataFrame:
    """Return a frame whose column names are text and distinct, and that has a row."""
    if frame.columns.nlevels > 1:
        problem = "has names of several levels"
        requirement = "a table with one name for each column"
        raise InputError("table", Fault(problem), requirement)
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.rename(columns=str)
    _check_names(frame.columns)
    if not len(frame):
        raise InputError("table", Fault("has no rows"), "a header and at least one row")
    return frame


def _check_names(names: Index) -> None:
    """Refuse names that several columns have."""
    repeated = names[names.duplicated()].unique()
    if len(repeated):
        listed = ", ".join(repr(name) for name in repeated)
        problem = f"has more than one column named {listed}"
        raise InputError("table", Fault(problem), "a table with distinct names")
