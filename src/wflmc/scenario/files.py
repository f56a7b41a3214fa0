"""Reading and writing the files a scenario names: TOML, data sets, channel gains, JSON."""

from __future__ import annotations

import csv
import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError, without_data
from wflmc.scenario.schema import Scenario, irrelevant, validate

DATA_SUFFIXES = (".npz", ".csv")


def load_scenario(path: str | Path, overrides: list[str] | None = None) -> Scenario:
    """A validated scenario from a TOML file, with `section.key=value` overrides; paths become absolute."""
    file = Path(os.path.expanduser(path))
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("scenario", str(path), f"a readable TOML file ({_reason(error)})") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError("scenario", str(path), f"valid TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None
    for text in overrides or []:
        _override(content, text)
    return resolve_paths(validate(content), file.resolve().parent)


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "it is not UTF-8 text"


def _override(content: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise InputError("--set", text, "of the form section.key=value")
    if "\n" in value:
        raise InputError("--set", text, "one key and one value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word such as `equal` is a text
    table = content.setdefault(section, {})
    if not isinstance(table, dict):
        raise InputError(section, table, f"a section: write [{section}] and its keys below it")
    table[name] = parsed


def resolve_paths(scenario: Scenario, folder: Path) -> Scenario:
    """The same scenario with its paths made absolute, relative to the scenario file's folder."""
    data, gains = scenario.posterior.data, scenario.link.gains
    if is_data_path(data):
        section = scenario.posterior.model_copy(update={"data": str(folder / os.path.expanduser(data))})
        scenario = scenario.model_copy(update={"posterior": section})
    if gains:
        link = scenario.link.model_copy(update={"gains": str(folder / os.path.expanduser(gains))})
        scenario = scenario.model_copy(update={"link": link})
    return scenario


def is_data_path(data: str) -> bool:
    """Whether `posterior.data` names a file."""
    return data.lower().endswith(DATA_SUFFIXES)


@without_data
class DataSet(NamedTuple):
    """X[N, features] and y[N], and a test set where there is one."""

    X: NDArray[Any]
    y: NDArray[Any]
    X_test: NDArray[Any] | None = None
    y_test: NDArray[Any] | None = None
    columns: tuple[str, ...] = ()
    """The names of the features, where the file has some."""


def load_data(path: str | Path, text_labels: bool = False) -> DataSet:
    """A data set from .npz (arrays X and y, and X_test and y_test if there are) or .csv.

    A CSV with a header has one column named y; without a header the last column is y.

    Args:
        text_labels: whether y of a CSV may be text.
    """
    try:
        return _load_npz(path) if str(path).lower().endswith(".npz") else _load_csv(path, text_labels)
    except OSError as error:
        raise InputError("data", str(path), f"a readable .npz or .csv file ({_reason(error)})") from None


def _load_npz(path: str | Path) -> DataSet:
    wanted = "an .npz file with numeric arrays X and y"
    try:
        with np.load(path, allow_pickle=False) as content:
            found = DataSet(content["X"], content["y"], content.get("X_test"), content.get("y_test"))
    except OSError:
        raise
    except Exception:  # a corrupt archive can fail in a dozen ways, all of which mean the same to its owner
        raise InputError("data", str(path), wanted) from None
    if (found.X_test is None) != (found.y_test is None):
        raise InputError("data", str(path), "an .npz file with both of X_test and y_test, or neither")
    return found


def _load_csv(path: str | Path, text_labels: bool) -> DataSet:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file), 1) if any(map(str.strip, row))]
    except (ValueError, csv.Error):
        raise InputError("data", str(path), "a CSV file in UTF-8 with commas between its columns") from None
    names = [name.strip() for name in lines[0][1]] if lines else []
    # Where labels may be text, a first row of numbers that ends with a text is an example; y would be a name.
    header = "y" in names or not all(_is_number(name) for name in (names[:-1] if text_labels else names))
    if header and "" in names:
        raise InputError("data", str(path), "a CSV whose columns all have a name (an index column must go)")
    if header and names.count("y") != 1:
        raise InputError("data", str(path), "a CSV of numbers, or one whose header names exactly one column y")
    rows = lines[1:] if header else lines
    if not rows or len(names) < 2:
        raise InputError("data", str(path), "a CSV with at least one row, one feature column and y")
    for number, row in rows:
        if len(row) != len(names):
            raise InputError("data", str(path), f"a CSV of {len(names)} columns; line {number} has {len(row)}")
    at = names.index("y") if header else len(names) - 1
    labels = [row[at].strip() for _, row in rows]
    named = text_labels and "" not in labels and not any(map(_is_number, labels))
    features = [column for column in range(len(names)) if column != at]
    table = np.array([_csv_numbers(path, line, {column: row[column] for column in features}) for line, row in rows])
    wanted = "whose y are all numbers or all text" if text_labels else "of numbers"
    y = np.array(labels if named else [_csv_numbers(path, line, {at: row[at]}, wanted)[0] for line, row in rows])
    return DataSet(table, y, columns=tuple(names[:at] + names[at + 1 :]) if header else ())


def _csv_numbers(path: str | Path, line: int, cells: dict[int, str], wanted: str = "of numbers") -> list[float]:
    """Return the numbers in the cells of a line, by column; an error names the place, never what stands there."""
    bad = [column for column, text in cells.items() if not _is_number(text)]
    if bad:
        raise InputError("data", str(path), f"a CSV {wanted}; line {line} has none in column {bad[0] + 1}")
    return [float(text) for text in cells.values()]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def load_gains(path: str) -> NDArray[Any]:
    """Channel gains [rounds, devices] from an .npy file."""
    if not path:
        raise InputError("gains", path, "the name of an .npy file when link.fading = 'file'")
    try:
        with open(path, "rb") as file:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    except OSError as error:
        raise InputError("gains", path, f"a readable .npy file ({_reason(error)})") from None
    except Exception:  # as for a corrupt archive
        raise InputError("gains", path, "an .npy file of real or complex numbers (numpy.save writes one)") from None


def to_toml(scenario: Scenario) -> str:
    """The scenario as resolved: every key with its value, but for those left alone that have no effect."""
    idle = set(irrelevant(scenario))
    if is_data_path(scenario.posterior.data):
        idle |= {"posterior.examples", "posterior.dim"}
    lines = []
    for section, values in scenario.model_dump(exclude_none=True).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            if f"{section}.{key}" not in idle or scenario.given(f"{section}.{key}"):
                lines.append(f"{key} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value)


def plain(value: Any) -> Any:
    """Data that JSON can hold: arrays become lists, and what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: Any) -> str:
    """One JSON object, never with NaN or Infinity in it."""
    return json.dumps(plain(value), allow_nan=False)
