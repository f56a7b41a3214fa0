"""Reading and writing the files a scenario names: TOML, data sets, JSON."""

import csv
import hashlib
import json
import math
import os
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wflmc.data.sets import SHA256, Features, check_shapes
from wflmc.scenario.gains import split_variable
from wflmc.scenario.schema import Scenario, irrelevant, validate, with_values
from wflmc.support.errors import InputError
from wflmc.support.plugins import is_own_model
from wflmc.support.storage import read_arrays, read_lines

Labels = Literal["numbers", "text", "inferred"]
"""What the targets of a CSV are; inferred ones are whichever all of them are."""

DATA_SUFFIXES = (".npz", ".csv")
FILES = ("posterior.data", "posterior.model", "link.gains")
"""Keys that may name a file."""
MAX_LABEL_LENGTH = 1000
"""Characters of a label: an array of text is as wide as its longest one."""


def load_scenario(path: str | Path, overrides: list[str] | None = None) -> Scenario:
    """Return a validated scenario from a TOML file, with `section.key=value` overrides; paths become absolute."""
    file = Path(path).expanduser()
    # A model of one's own has everything else by default.
    content: dict[str, Any] = {"posterior": {"model": f"{file.name}:build"}}
    if file.suffix != ".py":
        with _reading("scenario", path, "a TOML file in UTF-8"):
            text = file.read_text(encoding="utf-8-sig")
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(
                "scenario",
                str(path),
                f"valid TOML: {str(error)[:1].lower()}{str(error)[1:]}",
            ) from None
        except (ValueError, RecursionError):  # thousands of digits, or of brackets
            raise InputError(
                "scenario", str(path), "TOML with numbers and lists of moderate length"
            ) from None
    for text in overrides or []:
        _override(content, text)
    scenario, folder = validate(content), file.resolve().parent
    paths = _paths(scenario).items()
    return with_values(
        scenario, {key: _absolute(folder, key, path) for key, path in paths}
    )


def _absolute(folder: Path, key: str, path: str) -> str:
    """Return a path as it is from a folder; the variable behind that of gains is left as it is."""
    if key != "link.gains":
        return str(folder / os.path.expanduser(path))
    gains = split_variable(path)
    return str(gains._replace(path=str(folder / os.path.expanduser(gains.path))))


def _paths(scenario: Scenario) -> dict[str, str]:
    """Return the files that a scenario names, by key."""
    files = {
        f"posterior.{name}": getattr(scenario.posterior, name)
        for name in ("data", "whiten_from")
    }
    named = {
        "link.gains": scenario.link.gains,
        **{key: path for key, path in files.items() if is_data_path(path)},
    }
    if is_own_model(scenario.posterior.model):
        named["posterior.model"] = scenario.posterior.model
    return {key: path for key, path in named.items() if path}


@contextmanager
def _reading(key: str, path: str | Path, wanted: str) -> Iterator[None]:
    """Refuse a file that cannot be read, or has something else in it; what, never shows."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            key,
            str(path),
            f"{wanted} that can be read ({error.strerror or 'it is damaged'})",
        ) from None
    except Exception:  # a corrupt file can fail in a dozen ways, all of which mean the same to its owner
        raise InputError(key, str(path), wanted) from None


def _override(content: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name) or "\n" in value:
        raise InputError(
            "--set", text, "one key and one value, of the form section.key=value"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value.strip()  # a bare word such as `equal` is a text
    table = content.setdefault(section, {})
    if not isinstance(table, dict):
        raise InputError(
            section, table, f"a section: write [{section}] and its keys below it"
        )
    table[name] = parsed


def is_data_path(data: str) -> bool:
    """Return whether `posterior.data` names a file."""
    return data.lower().endswith(DATA_SUFFIXES)


def file_digests(scenario: Scenario, keys: Collection[str] = FILES) -> dict[str, str]:
    """Return the SHA-256 of the files that some keys of a scenario name, by key.

    That of private data is a test for guesses: it must not be published.
    """
    digests = {}
    for key, path in _paths(scenario).items():
        if key in keys and (key != "link.gains" or scenario.link.fading == "file"):
            with _reading(key, path, "a file"):
                file = path.rpartition(":")[0] if key == "posterior.model" else path
                if key == "link.gains":
                    file = split_variable(path).path
                digests[key] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    if (
        scenario.posterior.data == "mnist" and "posterior.data" in keys
    ):  # which is verified whenever it is read
        digests["posterior.data"] = "".join(SHA256.values())
    return digests


def load_data(
    path: str | Path, labels: Labels = "numbers", examples: int | None = None
) -> tuple[Features, tuple[str, ...]]:
    """Read a data set from .npz (arrays X and y, and X_test and y_test if there are) or .csv.

    A CSV with a header has one column named y; without a header the last column is y.
    Every cell is read by itself: what it says changes no other row. Whether there is a
    header follows from the number of examples where that is given, and is else read off
    the first line, which may be a private row; so are the labels where they are
    "inferred" (`scenario.coverage` lists both).

    Args:
        path: of the file.
        labels: what y of a CSV is.
        examples: the number of rows, where it is public.

    Returns:
        The data, and the names of the features, which only a header has.

    Raises:
        InputError: names the line and the column at fault, never what stands there.
    """
    if str(path).lower().endswith(".npz"):
        return _load_npz(path), ()
    return _load_csv(path, labels, examples)


def _load_npz(path: str | Path) -> Features:
    allowed = "an .npz file of numeric arrays X and y"
    arrays = read_arrays(path, key="data", allowed=allowed, names=Features._fields)
    if "X" not in arrays or "y" not in arrays:
        raise InputError("data", str(path), allowed)
    if ("X_test" in arrays) != ("y_test" in arrays):
        raise InputError(
            "data", str(path), "an .npz file with both of X_test and y_test, or neither"
        )
    data = Features(**arrays)
    check_shapes(data, "data")
    return data


def _load_csv(
    path: str | Path, labels: Labels, examples: int | None
) -> tuple[Features, tuple[str, ...]]:
    """Return the data set of a CSV and the features' names."""
    all_lines = _csv_lines(path)
    lines = {number: cells for number, cells in all_lines.items() if cells}
    first = next(iter(lines.values()), [])
    width = len(first)
    for number, cells in lines.items():
        if len(cells) != width:
            raise InputError(
                "data",
                str(path),
                f"a CSV of {width} columns; line {number} has {len(cells)}",
            )
    header = _has_header(path, list(lines.values()), labels, examples)
    is_complete = len(lines) == len(all_lines)
    if examples is not None and not header and not is_complete and "y" in first:
        # A blank line in the place of a row must not make a row of the header.
        allowed = "a CSV without blank lines, since its first line may be a header"
        raise InputError("data", str(path), allowed)
    named = "" not in first and first.count("y") == 1
    if width < 2 or len(lines) <= header or (header and not named):
        allowed = "a CSV of at least one row of numbers, y the last of them, or with a header that names every column"
        raise InputError("data", str(path), f"{allowed} and exactly one of them y")
    target = first.index("y") if header else width - 1
    names = tuple(name for name in first if name != "y") if header else ()

    line_numbers = list(lines)[header:]
    rows = list(lines.values())[header:]
    numbers = np.array([[as_float(cell) for cell in row] for row in rows])
    texts = [row[target] for row in rows]
    missing = np.isnan(numbers)
    is_text = labels == "text" or (
        labels == "inferred" and all(texts) and bool(missing[:, target].all())
    )
    if is_text:
        missing[:, target] = [not 0 < len(text) <= MAX_LABEL_LENGTH for text in texts]
    if missing.any():
        row, column = np.argwhere(missing)[0]
        allowed = "a CSV of numbers, in which y may be all text for a softmax model"
        where = f"line {line_numbers[row]} has none in column {column + 1}"
        raise InputError("data", str(path), f"{allowed}; {where}")
    X = np.delete(numbers, target, axis=1)
    return Features(X, np.array(texts) if is_text else numbers[:, target]), names


def _csv_lines(path: str | Path) -> dict[int, list[str]]:
    """Return the cells of every line by its number, none of a blank line.

    Lines are read one by one: a quote that one of them leaves open is an error, and
    swallows no other. So is a carriage return inside a line, which would make two of it.
    """
    allowed = (
        "a CSV file in UTF-8 with commas between its columns, each row in one line"
    )
    lines: dict[int, list[str]] = {}
    with _reading("data", path, allowed):
        for number, line in enumerate(read_lines(path), 1):
            lines[number] = []
            if line.strip():
                (cells,) = csv.reader([line], strict=True)
                lines[number] = [cell.strip() for cell in cells]
    return lines


def _has_header(
    path: str | Path, rows: list[list[str]], labels: Labels, examples: int | None
) -> bool:
    """Return whether the first row names the columns.

    The public number of examples decides, and without one what the row looks like.
    """
    if examples is not None and len(rows) in (examples, examples + 1):
        return len(rows) == examples + 1
    first = rows[0] if rows else []
    features = first[:-1] if labels != "numbers" else first
    if any(math.isnan(as_float(cell)) for cell in features):
        return True
    if (
        "y" in first
        and labels != "numbers"
        and all(math.isnan(as_float(row[-1])) for row in rows)
    ):
        allowed = "a CSV whose first line is clearly names or an example; posterior.examples says which it is"
        raise InputError("data", str(path), allowed)
    return "y" in first


def as_float(text: str) -> float:
    """Return the finite number in a cell, in ASCII digits; nan where there is none.

    >>> as_float("-1.5e3"), as_float("1_000"), as_float("inf"), as_float("1,5")
    (-1500.0, nan, nan, nan)
    """
    if (
        not text.isascii() or "_" in text
    ):  # which float() reads as digits, or leaves out
        return math.nan
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def to_toml(scenario: Scenario) -> str:
    """Return the scenario as resolved: every key with its value, but for those left alone that have no effect."""
    idle = set(irrelevant(scenario))
    if is_data_path(scenario.posterior.data):
        idle |= {"posterior.examples", "posterior.dim"}
    lines = []
    for section, values in scenario.model_dump(exclude_none=True).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            if f"{section}.{key}" not in idle or scenario.given(f"{section}.{key}"):
                # All but infinity, which no list has, is written as in JSON.
                lines.append(
                    f"{key} = {repr(value) if isinstance(value, float) else json.dumps(value)}"
                )
        lines.append("")
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """Return data that JSON can hold: arrays become lists, and what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: Any) -> str:
    """Return one JSON object, never with NaN or Infinity in it."""
    return json.dumps(plain(value), allow_nan=False)
