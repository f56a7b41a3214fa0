"""Tables of numbers as CSV files: those of studies, and those of sweeps."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from wflmc.apps.studies.study import Row
from wflmc.support.delimited import parse_finite
from wflmc.support.errors import InputError
from wflmc.support.storage import write_text


def read_columns(path: Path) -> dict[str, list[str]]:
    """Read the columns of a CSV file with a header.

    Empty lines are skipped.

    Args:
        path: of a file in UTF-8.

    Returns:
        The cells of every column by its name, as text.

    Raises:
        InputError: the file cannot be read or is empty, rows have unequal lengths, or
            two columns have the same name.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = [row for row in csv.reader(file) if row]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(head)
        names = dict.fromkeys(head)
        return {name: list(column) for name, column in zip(names, columns, strict=True)}
    except (OSError, ValueError, csv.Error):
        requirement = (
            "a CSV file in UTF-8, with as many cells in each row, and no column twice"
        )
        raise InputError("report", str(path), requirement) from None


def as_number(cell: str) -> float | None:
    """Read the number of a cell.

    Args:
        cell: as it stands in the file.

    Returns:
        The number; None where the cell is empty, no number, or not finite, as pages
        cannot draw these.
    """
    return parse_finite(cell)


def read_rows(path: Path) -> list[Row]:
    """Read the table of a figure, as studies write it.

    Args:
        path: of a CSV file with the columns of `Row`; others are ignored.

    Returns:
        The rows in their order, with None where y or its standard error is empty.

    Raises:
        InputError: the file is damaged, a column is missing, or an x is no number.
    """
    columns = read_columns(path)
    try:
        row_columns = [columns[name] for name in Row._fields]
        rows = []
        for figure, scheme, x, y, y_se in zip(*row_columns, strict=True):
            row = Row(figure, scheme, float(x), as_number(y), as_number(y_se))
            rows.append(row)
        return rows
    except (KeyError, ValueError):
        requirement = f"a table with the columns {', '.join(Row._fields)}"
        raise InputError("report", str(path), requirement) from None


def write_csv(
    path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Write a table, which takes the place of an older one when it is complete.

    Args:
        path: of the file.
        head: the names of the columns.
        rows: of as many cells as there are columns; floats are written to the last bit,
            and None as an empty cell.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    write_text(path, text.getvalue())
