"""Rows of delimited text, and the numbers in their cells.

Files hold private records, one in each line. Differential privacy hides a record only
if it changes nothing but itself, so every line is split by itself, and every cell is
read without a look at any other. Readers of tables, data sets and gains share this
part; which cells a column may have is for them to decide.
"""

import csv
import math
from collections.abc import Iterable
from typing import NamedTuple


class TextRow(NamedTuple):
    """The cells of one line of a text file, which its repr does not show.

    Args:
        line_number: of the line in its file, from 1.
        cells: as they stand there, without quotes; none where the line is empty.
    """

    line_number: int
    cells: list[str]

    def __repr__(self) -> str:
        return f"TextRow(line {self.line_number}: {len(self.cells)} cells)"


def split_rows(
    lines: Iterable[str],
    *,
    delimiter: str = ",",
    skip_spaces: bool = False,
) -> list[TextRow]:
    """Split the lines of a CSV file into cells, each line by itself.

    A cell in double quotes may contain the delimiter, and a doubled quote stands for
    one. A quotation has to be closed in its line, so that a damaged line is refused
    instead of running into the next one. A quote inside a cell that does not begin with
    one is an ordinary character.

    Args:
        lines: all lines of the file from the first, as rows are numbered by them,
            without line feeds, as `storage.read_lines` returns them.
        delimiter: the character between two cells.
        skip_spaces: whether spaces after a delimiter are dropped.

    Returns:
        One row for each line, in their order. A row of an empty line has no cells; a
        line of spaces has one cell.

    Raises:
        csv.Error: a quotation is not closed, or its cell goes on behind the closing
            quote; a carriage return stands outside quotes and before the end of a line;
            or a cell is longer than `csv.field_size_limit()`, 131072 characters unless
            the process has changed it.

    >>> rows = split_rows(['a,"b, c"', ""])
    >>> rows[0].cells, rows
    (['a', 'b, c'], [TextRow(line 1: 2 cells), TextRow(line 2: 0 cells)])
    """
    rows = []
    for line_number, line in enumerate(lines, 1):
        reader = csv.reader(
            [line],
            delimiter=delimiter,
            skipinitialspace=skip_spaces,
            strict=True,
        )
        cells = next(reader, [])
        rows.append(TextRow(line_number, cells))
    return rows


def parse_float(text: str) -> float | None:
    """Return the number that a cell holds, in ASCII digits with a decimal point.

    The words inf and infinity count as numbers too. Python's `float` also reads digits
    of other scripts and leaves out underscores; neither is a number here. Spaces around
    a number are ignored. A number beyond the largest float64 is infinite.

    Args:
        text: the cell.

    Returns:
        The nearest float64, which may be infinite; None where the cell has no number,
        or says nan.

    >>> parse_float(" -1.5e3"), parse_float("inf"), parse_float("1_000")
    (-1500.0, inf, None)
    """
    if not text.isascii() or "_" in text:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def parse_finite(text: str) -> float | None:
    """Return the finite number that a cell holds, as `parse_float` reads it.

    Args:
        text: the cell.

    Returns:
        The nearest float64; None where the cell has no number, or one that is not
        finite as a float64, such as inf or 1e999.

    >>> parse_finite("-1.5e3"), parse_finite("inf"), parse_finite("1,5")
    (-1500.0, None, None)
    """
    number = parse_float(text)
    if number is None or not math.isfinite(number):
        return None
    return number
