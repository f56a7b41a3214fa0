"""Reading and writing the files a scenario names: TOML, data sets, channel gains, JSON."""

import csv
import hashlib
import json
import math
import os
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.data import SHA256, Features
from wflmc.errors import InputError
from wflmc.plugins import is_own_model
from wflmc.scenario.schema import Scenario, irrelevant, validate, with_values

DATA_SUFFIXES = (".npz", ".csv")
FILES = ("posterior.data", "posterior.model", "link.gains")
"""Keys that may name a file."""


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
            raise InputError("scenario", str(path), f"valid TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None
    for text in overrides or []:
        _override(content, text)
    scenario, folder = validate(content), file.resolve().parent
    paths = _paths(scenario).items()
    return with_values(scenario, {key: str(folder / os.path.expanduser(given)) for key, given in paths})


def _paths(scenario: Scenario) -> dict[str, str]:
    """Return the files that a scenario names, by key."""
    files = {f"posterior.{name}": getattr(scenario.posterior, name) for name in ("data", "whiten_from")}
    named = {"link.gains": scenario.link.gains, **{key: path for key, path in files.items() if is_data_path(path)}}
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
        raise InputError(key, str(path), f"{wanted} that can be read ({error.strerror or 'it is damaged'})") from None
    except Exception:  # a corrupt file can fail in a dozen ways, all of which mean the same to its owner
        raise InputError(key, str(path), wanted) from None


def _override(content: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name) or "\n" in value:
        raise InputError("--set", text, "one key and one value, of the form section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word such as `equal` is a text
    table = content.setdefault(section, {})
    if not isinstance(table, dict):
        raise InputError(section, table, f"a section: write [{section}] and its keys below it")
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
                digests[key] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    if scenario.posterior.data == "mnist" and "posterior.data" in keys:  # which is verified whenever it is read
        digests["posterior.data"] = "".join(SHA256.values())
    return digests


def load_data(path: str | Path, text_labels: bool = False) -> tuple[Features, tuple[str, ...]]:
    """Return a data set from .npz (arrays X and y, and X_test and y_test if there are) or .csv, and its columns' names.

    A CSV with a header has one column named y; without a header the last column is y. Only a header has names.

    Args:
        text_labels: whether y of a CSV may be text.
    """
    return (_load_npz(path), ()) if str(path).lower().endswith(".npz") else _load_csv(path, text_labels)


def _load_npz(path: str | Path) -> Features:
    with _reading("data", path, "an .npz file of numeric arrays X and y"), np.load(path, allow_pickle=False) as arrays:
        result = Features(arrays["X"], arrays["y"], arrays.get("X_test"), arrays.get("y_test"))
    if (result.X_test is None) != (result.y_test is None):
        raise InputError("data", str(path), "an .npz file with both of X_test and y_test, or neither")
    return result


def _load_csv(path: str | Path, text_labels: bool) -> tuple[Features, tuple[str, ...]]:
    """Return the data set of a CSV and the features' names; an error names the place, never what stands there."""
    wanted = "a CSV file in UTF-8 with commas between its columns"
    with _reading("data", path, wanted), open(path, encoding="utf-8-sig", newline="") as file:
        lines = {number: [cell.strip() for cell in row] for number, row in enumerate(csv.reader(file), 1)}
    rows = {number: row for number, row in lines.items() if any(row)}
    names = next(iter(rows.values()), [])
    for number, row in rows.items():
        if len(row) != len(names):
            raise InputError("data", str(path), f"a CSV of {len(names)} columns; line {number} has {len(row)}")
    numbers = np.array([[as_float(cell) for cell in row] for row in rows.values()]).reshape(len(rows), len(names))
    # Where labels may be text, a first row of numbers that ends with a text is an example; y would be a name.
    header = "y" in names or bool(np.isnan(numbers[:1, : len(names) - text_labels]).any())
    if len(names) < 2 or len(rows) <= header or (header and ("" in names or names.count("y") != 1)):
        wanted = "a CSV of at least one row of numbers, y the last of them, or with a header that names every column"
        raise InputError("data", str(path), f"{wanted} and exactly one of them y")
    target = names.index("y") if header else len(names) - 1
    labels, numbers = np.array([row[target] for row in rows.values()])[header:], numbers[header:]
    text = text_labels and np.all(labels != "") and bool(np.isnan(numbers[:, target]).all())
    bad = np.argwhere(np.isnan(numbers) & ~(text & (np.arange(len(names)) == target)))
    if bad.size:
        line, column = [*rows][header + bad[0, 0]], bad[0, 1] + 1
        wanted = "a CSV of numbers, in which y may be all text for a softmax model"
        raise InputError("data", str(path), f"{wanted}; line {line} has none in column {column}")
    columns = tuple(name for name in names if name != "y") if header else ()
    return Features(np.delete(numbers, target, axis=1), labels if text else numbers[:, target]), columns


def as_float(text: str) -> float:
    """Return the number of a cell; nan where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def load_gains(path: str) -> NDArray[Any]:
    """Return channel gains [rounds, devices] from an .npy file."""
    if not path:
        raise InputError("gains", path, "the name of an .npy file when link.fading = 'file'")
    wanted = "an .npy file of real or complex numbers (numpy.save writes one)"
    with _reading("gains", path, wanted), open(path, "rb") as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


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
                lines.append(f"{key} = {repr(value) if isinstance(value, float) else json.dumps(value)}")
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
