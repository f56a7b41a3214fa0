"""Reading and writing the files a scenario names: TOML, data sets, channel gains, JSON."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError
from wflmc.scenario.schema import Scenario, irrelevant, validate

DATA_SUFFIXES = (".npz", ".csv")


def load_scenario(path: str | Path, overrides: list[str] | None = None) -> Scenario:
    """A validated scenario from a TOML file, with `section.key=value` overrides; paths become absolute."""
    file = Path(path)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
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
        section = scenario.posterior.model_copy(update={"data": str(folder / data)})
        scenario = scenario.model_copy(update={"posterior": section})
    if gains:
        scenario = scenario.model_copy(update={"link": scenario.link.model_copy(update={"gains": str(folder / gains)})})
    return scenario


def is_data_path(data: str) -> bool:
    """Whether `posterior.data` names a file."""
    return data.lower().endswith(DATA_SUFFIXES)


def load_data(path: str | Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """X[N, features] and y[N] from .npz (arrays X and y) or .csv.

    A CSV with a header has one column named y; without a header the last column is y.
    """
    try:
        return _load_npz(path) if str(path).lower().endswith(".npz") else _load_csv(path)
    except InputError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise InputError("data", str(path), f"a readable .npz or .csv file ({_short(error)})") from None


def _short(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0][:100]


def _load_npz(path: str | Path) -> tuple[NDArray[Any], NDArray[Any]]:
    content = np.load(path, allow_pickle=False)
    if not isinstance(content, np.lib.npyio.NpzFile) or not {"X", "y"} <= set(content.files):
        raise InputError("data", str(path), "an .npz file with arrays X and y")
    return content["X"], content["y"]


def _load_csv(path: str | Path) -> tuple[NDArray[Any], NDArray[Any]]:
    with open(path, encoding="utf-8-sig") as file:
        first = file.readline().strip().split(",")
    names = [name.strip().strip('"') for name in first]
    header = not all(_is_number(name) for name in names)
    if header and names.count("y") != 1:
        raise InputError("data", str(path), "a CSV whose header names exactly one column y")
    table = np.loadtxt(path, delimiter=",", skiprows=int(header), ndmin=2, encoding="utf-8-sig")
    if table.shape[1] < 2:
        raise InputError("data", str(path), "a CSV with at least one feature column and y")
    target = names.index("y") if header else table.shape[1] - 1
    return np.delete(table, target, axis=1), table[:, target]


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
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InputError("gains", path, f"a readable .npy file ({_short(error)})") from None


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


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
