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
    """Return the columns of a CSV file with a header, as text."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = [row for row in csv.reader(file) if row]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(head)
        return {
            name: list(column)
            for name, column in zip(dict.fromkeys(head), columns, strict=True)
        }
    except (OSError, ValueError, csv.Error):
        raise InputError(
            "report", str(path), "a CSV file in UTF-8, with as many cells in each row"
        ) from None


def as_number(cell: str) -> float | None:
    """Return the number of a cell; None where it is empty, no number, or not finite."""
    return parse_finite(cell)


def read_rows(path: Path) -> list[Row]:
    """Return the table of a figure, as studies write it."""
    columns = read_columns(path)
    try:
        cells = zip(*(columns[name] for name in Row._fields), strict=True)
        return [
            Row(figure, scheme, float(x), as_number(y), as_number(y_se))
            for figure, scheme, x, y, y_se in cells
        ]
    except (KeyError, ValueError):
        raise InputError(
            "report", str(path), f"a table with the columns {', '.join(Row._fields)}"
        ) from None


def write_csv(
    path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Write a table: floats to the last bit, and an empty cell where there is no number."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    write_text(path, text.getvalue())
