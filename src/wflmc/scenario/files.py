"""Reading and writing the files that a scenario names: TOML, data sets, JSON."""

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.data.sets import DATA_SETS, SHA256, Features, check_shapes, load
from wflmc.scenario.gains import split_variable
from wflmc.scenario.schema import (
    PosteriorSection,
    Scenario,
    irrelevant,
    validate,
    with_values,
)
from wflmc.support.delimited import TextRow, parse_finite, split_rows
from wflmc.support.errors import InputError
from wflmc.support.plugins import is_file_model
from wflmc.support.storage import read_arrays, read_lines

Labels = Literal["numbers", "text", "inferred"]
"""What the targets of a CSV are; inferred ones are whichever all of them are."""

DATA_SUFFIXES = (".npz", ".csv")
FILES = (
    "posterior.data",
    "posterior.whiten_from",
    "posterior.prior_from",
    "posterior.model",
    "link.gains",
)
"""All keys that may name a file."""
MAX_LABEL_LENGTH = 1000
"""Characters of a label: an array of text is as wide as its longest one."""
TARGET_NAME = "y"
"""The column of a CSV that holds the targets or labels."""


def load_scenario(path: str | Path, overrides: list[str] | None = None) -> Scenario:
    """Read and validate a scenario file.

    Paths in the file are relative to its folder, and become absolute. A Python file
    (`.py`) stands for a scenario whose model is its function `build`, with every other
    key at its default.

    Args:
        path: of the TOML file, in UTF-8, or of the Python file; `~` is expanded.
        overrides: texts of the form `section.key=value`, which replace what the file
            has; the last one of a key counts. A value that is not TOML is a text.

    Returns:
        The validated scenario.

    Raises:
        InputError: the file cannot be read, is no valid TOML, or a key or value of it
            or of an override is not allowed.
    """
    file = Path(path).expanduser()
    if file.suffix == ".py":
        content: dict[str, object] = {"posterior": {"model": f"{file.name}:build"}}
    else:
        content = _read_toml(file, str(path))
    for override in overrides or []:
        _override(content, override)
    scenario = validate(content)
    folder = file.resolve().parent
    absolute_paths: dict[str, str | list[str]] = {}
    for key, names in _paths(scenario).items():
        paths = [_absolute(folder, key, name) for name in names]
        absolute_paths[key] = paths if len(paths) > 1 else paths[0]
    return with_values(scenario, absolute_paths)


def _read_toml(file: Path, shown_path: str) -> dict[str, object]:
    """Return the content of a TOML file; errors name it by the path that was passed."""
    with _reading("scenario", shown_path, "a TOML file in UTF-8"):
        text = file.read_text(encoding="utf-8-sig")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        problem = message[:1].lower() + message[1:]
        raise InputError("scenario", shown_path, f"valid TOML: {problem}") from None
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        requirement = "TOML with numbers and lists of moderate length"
        raise InputError("scenario", shown_path, requirement) from None


def _absolute(folder: Path, key: str, path: str) -> str:
    """Return a path relative to a folder as an absolute one.

    The variable behind a path of gains is left as it is.
    """
    if key != "link.gains":
        return str(folder / os.path.expanduser(path))
    gains = split_variable(path)
    file = folder / os.path.expanduser(gains.path)
    return str(gains._replace(path=str(file)))


def _paths(scenario: Scenario) -> dict[str, tuple[str, ...]]:
    """Return the files that a scenario names, by key."""
    section = scenario.posterior
    sources = section.whitening_sources
    paths: dict[str, tuple[str, ...]] = {}
    if scenario.link.gains:
        paths["link.gains"] = (scenario.link.gains,)
    if is_data_path(section.data):
        paths["posterior.data"] = (section.data,)
    if sources and all(is_data_path(source) for source in sources):
        paths["posterior.whiten_from"] = sources
    if is_data_path(section.prior_from):
        paths["posterior.prior_from"] = (section.prior_from,)
    if is_file_model(section.model):
        paths["posterior.model"] = (section.model,)
    return paths


@contextmanager
def _reading(key: str, path: str | Path, requirement: str) -> Iterator[None]:
    """Refuse a file that cannot be read or holds something else, which never shows."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        reason = error.strerror or "it is damaged"
        readable = f"{requirement} that can be read ({reason})"
        raise InputError(key, str(path), readable) from None
    except Exception:  # a corrupt file can fail in a dozen ways, with one meaning
        raise InputError(key, str(path), requirement) from None


def _override(content: dict[str, object], override: str) -> None:
    """Put the value of `section.key=value` into the content of a scenario file."""
    key, equals, value = override.partition("=")
    section, dot, name = key.strip().partition(".")
    is_complete = equals and dot and section and name
    if not is_complete or "\n" in value:
        requirement = "one key and one value, of the form section.key=value"
        raise InputError("--set", override, requirement)
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value.strip()  # a bare word such as `equal` is a text
    table = content.setdefault(section, {})
    if not isinstance(table, dict):
        requirement = f"a section: write [{section}] and its keys below it"
        raise InputError(section, table, requirement)
    table[name] = parsed


def is_data_path(data: str) -> bool:
    """Return whether a value of `posterior.data` names a file of data.

    Args:
        data: the value: the name of a built-in data set, or a path.

    Returns:
        Whether it ends in .npz or .csv, in upper or lower case. Whether such a file
        exists is not looked at.
    """
    return data.lower().endswith(DATA_SUFFIXES)


def file_digests(scenario: Scenario, keys: Collection[str] = FILES) -> dict[str, str]:
    """Compute the SHA-256 of the files that some keys of a scenario name.

    A plan that is read back, a sweep and a report recognize by these digests whether
    files have changed. The digest of private data is a test for guesses of them: it must
    not be published.

    Args:
        scenario: with absolute paths, as `load_scenario` returns it.
        keys: those whose files are read; `FILES` by default.

    Returns:
        Hexadecimal digests by key. Keys that name no file are absent, as are gains
        that the fading law does not use. Several files of a key have their digests
        joined. For `data = "mnist"` there are the four known digests of its files: the
        files are verified whenever they are read.

    Raises:
        InputError: a file cannot be read.
    """
    digests = {}
    for key, paths in _paths(scenario).items():
        is_unused = key == "link.gains" and scenario.link.fading != "file"
        if key not in keys or is_unused:
            continue
        digests[key] = "".join(_file_digest(key, path) for path in paths)
    public_images = scenario.posterior.prior_from
    if public_images in DATA_SETS and "posterior.prior_from" in keys:
        digests["posterior.prior_from"] = _image_digest(public_images)
    if scenario.posterior.data == "mnist" and "posterior.data" in keys:
        digests["posterior.data"] = "".join(SHA256.values())
    return digests


def _file_digest(key: str, path: str) -> str:
    """Return the SHA-256 of the file in the value of a key."""
    with _reading(key, path, "a file"):
        content = Path(file_of(key, path)).read_bytes()
        return hashlib.sha256(content).hexdigest()


def _image_digest(name: str) -> str:
    """Return the SHA-256 of the images and labels of a data set."""
    total = hashlib.sha256()
    for values in load(name):
        total.update(values.tobytes())
    return total.hexdigest()


def file_of(key: str, path: str) -> str:
    """Return the file in the value of a key, without what follows its name there.

    That is the function of a model, or the variable with the gains, and the colon
    before it. The values of other keys are returned as they are.

    Args:
        key: such as `link.gains`.
        path: its value.
    """
    if key == "posterior.model":
        return path.rpartition(":")[0]
    if key == "link.gains":
        return split_variable(path).path
    return path


def column_order(
    path: str | Path, names: Sequence[str], columns: Sequence[str]
) -> list[int]:
    """Return where the columns of the data stand in another file.

    Args:
        path: of the other file, for errors.
        names: of its columns.
        columns: those of the data.

    Returns:
        An index into `names` for each of `columns`.

    Raises:
        InputError: for other names, or a name that stands there twice.
    """
    requirement = "a file with the columns of posterior.data, each once"
    missing = [name for name in columns if name not in names]
    added = [name for name in names if name not in columns]
    repeated = [name for name in names if list(names).count(name) > 1]
    if repeated or len(set(columns)) < len(columns):
        twice = repeated or [name for name in columns if columns.count(name) > 1]
        raise InputError("data", str(path), f"{requirement}; {twice[0]!r} is repeated")
    if added:
        raise InputError("data", str(path), f"{requirement}; it has {added[0]!r}")
    if missing:
        raise InputError("data", str(path), f"{requirement}; it lacks {missing[0]!r}")
    return [names.index(name) for name in columns]


def load_features(
    path: str | Path, columns: Sequence[str], width: int
) -> NDArray[np.number]:
    """Read rows without labels, from the array X of an .npz file or from a CSV.

    A column y of a CSV is passed over, whatever stands in it; so is the last column of
    one without a header that has one more than the data have features.

    Args:
        path: of the file.
        columns: the names of the data's features, into whose order those of a header
            are brought; empty where they have none.
        width: the number of the data's features.

    Returns:
        Features, [N, d].

    Raises:
        InputError: if the file cannot be read, or has other columns.
    """
    if str(path).lower().endswith(".npz"):
        requirement = "an .npz file of a numeric array X"
        arrays = read_arrays(path, key="data", requirement=requirement, names=("X",))
        if "X" not in arrays:
            raise InputError("data", str(path), requirement)
        return arrays["X"]
    file = _read_csv(path)
    first_cells = file.first_cells
    indices = [index for index, name in enumerate(first_cells) if name != TARGET_NAME]
    has_header = any(
        parse_finite(first_cells[index]) is None for index in indices[:width]
    )
    if not has_header:
        indices = list(range(len(first_cells)))
        if len(indices) == width + 1:
            indices = indices[:width]
    elif columns:
        names = [first_cells[index] for index in indices]
        order = column_order(path, names, columns)
        indices = [indices[position] for position in order]
    if len(indices) != width:
        requirement = f"a CSV of {width} features, as the data have"
        raise file.error(f"{requirement}; it has {len(indices)}")
    records = file.rows[1:] if has_header else file.rows
    features = [
        row._replace(cells=[row.cells[index] for index in indices]) for row in records
    ]
    if not features:
        raise file.error("a CSV of at least one row of numbers")
    values = np.array([_finite_numbers(row) for row in features])
    missing = np.isnan(values)
    _refuse_missing(file, features, missing)
    return values


def label_kind(section: PosteriorSection) -> Labels:
    """Return what the targets of a CSV are.

    Args:
        section: whose model and classes declare them; without declared classes the
            labels of a softmax model are inferred.
    """
    if section.model != "softmax":
        return "numbers"
    if section.classes is None:
        return "inferred"
    if isinstance(section.classes, int):
        return "numbers"
    has_text = any(isinstance(name, str) for name in section.classes)
    return "text" if has_text else "numbers"


class DataFile(NamedTuple):
    """What a file of data holds.

    Args:
        data: features and targets, and a test set where there is one.
        names: of the features, which only the header of a CSV has; else empty.
    """

    data: Features
    names: tuple[str, ...]


def load_data(
    path: str | Path, labels: Labels = "numbers", examples: int | None = None
) -> DataFile:
    """Read a data set from .npz (arrays X and y, optionally X_test and y_test) or .csv.

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
        InputError: if the file cannot be read or is no such data set. Where a cell of a
            CSV is at fault, its line and column are named, never what stands there.
    """
    if str(path).lower().endswith(".npz"):
        return DataFile(_load_npz(path), names=())
    return _load_csv(path, labels, examples)


def _load_npz(path: str | Path) -> Features:
    """Return X and y of an .npz file, and X_test and y_test where it has both.

    Their shapes are checked. Arrays of other names are not read.
    """
    requirement = "an .npz file of numeric arrays X and y"
    arrays = read_arrays(
        path, key="data", requirement=requirement, names=Features._fields
    )
    if "X" not in arrays or "y" not in arrays:
        raise InputError("data", str(path), requirement)
    if ("X_test" in arrays) != ("y_test" in arrays):
        requirement = "an .npz file with both of X_test and y_test, or neither"
        raise InputError("data", str(path), requirement)
    data = Features(**arrays)
    check_shapes(data, "data")
    return data


class _CsvFile(NamedTuple):
    """The rows of a CSV, all of the same width.

    Args:
        path: of the file, for errors.
        rows: those of all lines that are not blank, cells without spaces around them.
        has_blank_lines: whether there are other lines.
    """

    path: str
    rows: list[TextRow]
    has_blank_lines: bool

    @property
    def first_cells(self) -> list[str]:
        """The cells of the first row; none where there is no row."""
        return self.rows[0].cells if self.rows else []

    def error(self, requirement: str) -> InputError:
        """Return the error about this file."""
        return InputError("data", self.path, requirement)


def _load_csv(path: str | Path, labels: Labels, examples: int | None) -> DataFile:
    """Return the data set of a CSV and the features' names."""
    file = _read_csv(path)
    has_header = _has_header(file, labels, examples)
    _check_columns(file, has_header=has_header, examples=examples)
    names = file.first_cells
    if not has_header:
        target = len(names) - 1
        return DataFile(_encode(file, file.rows, target, labels), names=())
    target = names.index(TARGET_NAME)
    data = _encode(file, file.rows[1:], target, labels)
    return DataFile(data, names=tuple(name for name in names if name != TARGET_NAME))


def _read_csv(path: str | Path) -> _CsvFile:
    """Return the rows of a CSV.

    Lines are split one by one: a quote that one of them leaves open is an error, and
    swallows no other. So is a carriage return inside a line, which would split it.
    """
    requirement = (
        "a CSV file in UTF-8 with commas between its columns, each row in one line"
    )
    with _reading("data", path, requirement):
        lines = ["" if line.isspace() else line for line in read_lines(path)]
        split = split_rows(lines)
    rows = []
    for row in split:
        if row.cells:
            cells = [cell.strip() for cell in row.cells]
            rows.append(row._replace(cells=cells))
    file = _CsvFile(str(path), rows, has_blank_lines=len(rows) < len(split))
    width = len(file.first_cells)
    for row in rows:
        if len(row.cells) != width:
            problem = f"line {row.line_number} has {len(row.cells)}"
            raise file.error(f"a CSV of {width} columns; {problem}")
    return file


def _has_header(file: _CsvFile, labels: Labels, examples: int | None) -> bool:
    """Return whether the first row names the columns.

    The public number of examples decides. Without one, what the row looks like does,
    also where the rows are of another number: `build_posterior` refuses those.
    """
    if examples is not None and len(file.rows) in (examples, examples + 1):
        return len(file.rows) == examples + 1
    first_cells = file.first_cells
    number_cells = first_cells if labels == "numbers" else first_cells[:-1]
    if any(parse_finite(cell) is None for cell in number_cells):
        return True
    if TARGET_NAME not in first_cells:
        return False
    if labels != "numbers":
        last_cells = [row.cells[-1] for row in file.rows]
        if all(parse_finite(cell) is None for cell in last_cells):
            # Behind numbers, and above text, "y" may be a name or a label.
            clear = "a CSV whose first line is clearly names or an example"
            raise file.error(f"{clear}; posterior.examples says which it is")
    return True


def _check_columns(file: _CsvFile, *, has_header: bool, examples: int | None) -> None:
    """Refuse a CSV without a row, or whose header does not name every column."""
    first_cells = file.first_cells
    may_hide_header = file.has_blank_lines and TARGET_NAME in first_cells
    if examples is not None and not has_header and may_hide_header:
        # A blank line in the place of a row must not make a row of the header.
        requirement = "a CSV without blank lines, since its first line may be a header"
        raise file.error(requirement)
    is_named = "" not in first_cells and first_cells.count(TARGET_NAME) == 1
    records = len(file.rows) - has_header
    if len(first_cells) < 2 or records < 1 or (has_header and not is_named):
        rows = "a CSV of at least one row of numbers, y the last of them"
        header = "with a header that names every column and exactly one of them y"
        raise file.error(f"{rows}, or {header}")


def _encode(
    file: _CsvFile, records: list[TextRow], target: int, labels: Labels
) -> Features:
    """Return the data set of the rows behind a header.

    Args:
        file: of the rows, for errors.
        records: the rows, one for each example.
        target: index of the column that holds the targets.
        labels: what the targets are.
    """
    numbers = np.array([_finite_numbers(row) for row in records])
    texts = [row.cells[target] for row in records]
    missing = np.isnan(numbers)
    is_text = labels == "text"
    if labels == "inferred":
        is_text = all(texts) and bool(missing[:, target].all())
    if is_text:
        missing[:, target] = [not 0 < len(text) <= MAX_LABEL_LENGTH for text in texts]
    _refuse_missing(file, records, missing)
    X = np.delete(numbers, target, axis=1)
    y = np.array(texts) if is_text else numbers[:, target]
    return Features(X, y)


def _finite_numbers(row: TextRow) -> list[float]:
    """Return the finite number in every cell of a row, nan where there is none."""
    numbers = [parse_finite(cell) for cell in row.cells]
    return [math.nan if number is None else number for number in numbers]


def _refuse_missing(
    file: _CsvFile, records: list[TextRow], missing: NDArray[np.bool_]
) -> None:
    """Refuse data with a cell[row, column] that has no value; the first is named."""
    if not missing.any():
        return
    row, column = np.argwhere(missing)[0]
    line_number = records[row].line_number
    requirement = "a CSV of numbers, in which y may be all text for a softmax model"
    problem = f"line {line_number} has none in column {column + 1}"
    raise file.error(f"{requirement}; {problem}")


def to_toml(scenario: Scenario) -> str:
    """Write a resolved scenario as the text of a TOML file.

    Every key stands there with its value, defaults included, so that the file means the
    same whatever later defaults are. Keys that have no effect are left out unless they
    were given.

    Args:
        scenario: as `load_scenario` or `validate` returns it.

    Returns:
        The text, by which `load_scenario` reads the same scenario again.
    """
    omitted = set(irrelevant(scenario))
    if is_data_path(scenario.posterior.data):
        omitted |= {"posterior.examples", "posterior.dim"}
    lines = []
    for section, values in scenario.model_dump(exclude_none=True).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            name = f"{section}.{key}"
            if name not in omitted or scenario.is_set(name):
                lines.append(f"{key} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    """Return a value in TOML: as in JSON, but for infinity, which is in no list."""
    return repr(value) if isinstance(value, float) else json.dumps(value)


def plain(value: object) -> Any:
    """Convert results to data that JSON can hold.

    Arrays and tuples become lists, numbers of NumPy those of Python, and keys of
    dictionaries text. Numbers that are not finite become null: standard JSON has no
    NaN and no Infinity.

    Args:
        value: a number, a text, None, an array, or lists and dictionaries of such
            values.

    Returns:
        The value in plain data; what is of no such type is returned as it is.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: object) -> str:
    """Write results as one line of JSON, never with NaN or Infinity in it.

    Args:
        value: as of `plain`, which converts it first.

    Returns:
        The text, without a line feed at its end.

    Raises:
        TypeError: some part of the value is of a type that JSON lacks.
    """
    return json.dumps(plain(value), allow_nan=False)
