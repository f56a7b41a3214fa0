"""Tables of numbers as CSV files: those of studies, and those of sweeps."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from wflmc.errors import InputError
from wflmc.storage import write_text
from wflmc.studies import Row


def read_columns(path: Path) -> dict[str, list[str]]:
    """The columns of a CSV file with a header, as text."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise InputError("report", str(path), f"a readable file ({error.strerror})") from None
    except (ValueError, csv.Error):
        raise InputError("report", str(path), "a CSV file in UTF-8 with a header") from None
    if len(set(head)) < len(head) or any(len(row) != len(head) for row in rows):
        raise InputError("report", str(path), "a CSV file with as many cells in each row as its header names")
    return {name: [row[index] for row in rows] for index, name in enumerate(head)}


def as_number(cell: str) -> float | None:
    """The number of a cell; None where it is empty, no number, or not finite."""
    try:
        found = float(cell)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def read_rows(path: Path) -> list[Row]:
    """The table of a figure, as studies write it."""
    columns = read_columns(path)
    if list(columns) != list(Row._fields):
        raise InputError("report", str(path), f"a table with the columns {', '.join(Row._fields)}")
    rows = []
    for figure, scheme, x, y, y_se in zip(*columns.values(), strict=True):
        at = as_number(x)
        if at is None or any(cell and as_number(cell) is None for cell in (y, y_se)):
            raise InputError("report", str(path), "a table whose x, y and y_se are numbers, or empty")
        rows.append(Row(figure, scheme, at, as_number(y), as_number(y_se)))
    return rows


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the tidy table of a figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    write_text(path, text.getvalue())
