"""Tables of practitioners: reading them, describing their columns, and encoding them as features and outcomes.

Given a schema, every row is encoded by itself: no row changes how another one is read. What a schema does not declare
is read off the data once, by `make_schema`, and listed in the schema's `taken`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from wflmc.apps.tables.cells import (
    CODE,
    MISSING,
    NOT_LISTED,
    NameIndex,
    check_unambiguous,
    have_equal_spellings,
    infer_kind,
    is_missing_word,
    parse_number,
    plain_form,
    read_names,
    read_numbers,
)
from wflmc.apps.tables.schema import (
    Column,
    Missing,
    Schema,
    Task,
    class_labels,
    listed_names,
    nearest_name,
    split_declarations,
    validated,
)
from wflmc.posterior.inputs import MOST, check_counts
from wflmc.support.errors import Found, InputError, conflict
from wflmc.support.storage import read_arrays, read_lines

if TYPE_CHECKING:  # it is imported only where a table is used
    from pandas import DataFrame, Index, Series

UNTYPED = "wflmc.untyped"
"""Attribute of a frame whose cells are all text because its file knows no types: a CSV."""
MOST_CATEGORIES = 100
"""Categories of one column that are taken from data."""
MOST_NUMERIC_CLASSES = 20
"""Different whole numbers up to which a target is taken to have classes."""
FORMATTED_NUMBER = re.compile(
    r"[-+]?(\d+|\d{1,3}([,. '\xa0]\d{3})+)([.,]\d+)?([eE][-+]?\d+)?"
)
"""A number as people write it, with separators of thousands or a decimal comma."""
DELIMITERS = "\t;|,"
"""Delimiters of text files, those that seldom stand in a name first."""
GAPS = "which columns have missing values"


def _installed(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise InputError(
            name, None, "installed to use tables: pip install 'wflmc[tables]'"
        ) from None


class _ArrowTable(Protocol):
    """A table of pyarrow."""

    def to_pandas(self, *, integer_object_nulls: bool) -> DataFrame:
        """Return it as a frame, integers beside missing values as objects if asked to."""


# Reading


def read_table(path: str | Path) -> DataFrame:
    """Read a table from a file.

    Cells of a text file stay text, whatever they look like: only the kinds of columns decide how they are read.

    Args:
        path: a text file with a header (.csv, .tsv, .txt; a tab, semicolon, bar or comma delimits columns, whichever
            the header has most, in .txt also a space), .parquet, or .npz with X[N, d] and, if there are, y[N] and
            devices[N], which become columns x0, x1, …, y and device.

    Returns:
        A pandas.DataFrame with one row for each record.

    Raises:
        InputError: if there is no such file, or no table with distinct names and at least one row in it.
    """
    _installed("pandas")
    file = Path(path).expanduser()
    readers = dict.fromkeys((".csv", ".tsv", ".txt"), _read_text) | {
        ".parquet": _read_parquet,
        ".npz": _read_npz,
    }
    suffix = file.suffix.lower()
    if suffix not in readers:
        raise InputError(
            "table", str(path), f"a file that ends in {', '.join(readers)}"
        )
    if not file.exists():
        raise InputError("table", str(path), "a file that exists")
    try:
        frame = readers[suffix](file)
    except InputError:
        raise
    except Exception as error:  # a corrupt file can fail in many ways, and messages of libraries may show its content
        reason = (
            f" ({error.strerror})"
            if isinstance(error, OSError) and error.strerror
            else ""
        )
        raise InputError(
            "table", str(path), f"a {suffix} file that can be read{reason}"
        ) from None
    return _checked(frame)


def _read_text(path: Path) -> DataFrame:
    """Read a delimited text file, every cell as text.

    The header alone, which is public, decides what the delimiter is. Quotes have to be closed in their line, and every
    row needs as many cells as the header, so that a damaged row is refused instead of running into the next.
    """
    wanted = "a text file in UTF-8, quoted as CSV is, each row in one line with as many values as the header"
    try:
        lines = read_lines(path)
        first_line = next((line for line in lines if line.strip()), "")
        delimiter = _delimiter(first_line, allow_space=path.suffix.lower() == ".txt")
        reader = csv.reader(
            lines, delimiter=delimiter, skipinitialspace=True, strict=True
        )
        rows = []
        for line_number, row in enumerate(reader, 1):
            if reader.line_num != line_number:
                raise csv.Error("a quotation runs into the next line")
            if row:
                rows.append(row)
    except (csv.Error, UnicodeDecodeError):
        raise InputError("table", str(path), f"{wanted}, that can be read") from None
    if not rows:
        raise InputError("table", Found("is empty"), "a header and at least one row")
    header = _column_names(rows[0])
    records = [_record(row, len(header)) for row in rows[1:]]
    if any(record is None for record in records):
        raise InputError("table", str(path), f"{wanted}, that can be read")
    pandas = _installed("pandas")
    cells = np.array(records, dtype=object).reshape(len(records), len(header))
    frame = pandas.DataFrame(cells, columns=header, dtype=object)
    frame.attrs[UNTYPED] = True
    return frame


def _delimiter(header: str, *, allow_space: bool) -> str:
    """Return the delimiter of a text file: the sign that stands in its header most often, outside of quotes.

    Args:
        header: the first line.
        allow_space: whether spaces delimit columns where no other sign does; else they are part of a name.
    """
    unquoted = re.sub(r'"[^"]*"', "", header)
    counts = {sign: unquoted.count(sign) for sign in DELIMITERS}
    if any(counts.values()):
        return max(counts, key=lambda sign: counts[sign])
    return " " if allow_space else ","


def _column_names(header: list[str]) -> list[str]:
    """Return the names of columns, refused where the first row holds numbers; empty ones are numbered."""
    numbers = [plain_form(name) for name in header if parse_number(name) is not None]
    has_fraction = any(not re.fullmatch(r"-?\d+", number) for number in numbers)
    if has_fraction or len(set(numbers)) < len(
        numbers
    ):  # these are data, and must not show in errors as names
        allowed = "a table with a name for each column in the first row"
        raise InputError("table", Found("has numbers for names"), allowed)
    names = [
        name if name.strip() else f"Unnamed: {place}"
        for place, name in enumerate(header)
    ]
    _check_names(_installed("pandas").Index(names))
    return names


def _record(row: list[str], columns: int) -> list[str] | None:
    """Return the cells of a row, without an empty one after a delimiter at its end; None if their number is wrong."""
    if len(row) == columns + 1 and not row[-1].strip():
        return row[:-1]
    return row if len(row) == columns else None


def _read_parquet(path: Path) -> DataFrame:
    _installed("pyarrow")
    return _from_arrow(import_module("pyarrow.parquet").read_table(path))


def _from_arrow(table: _ArrowTable) -> DataFrame:
    """Return an Arrow table as a frame in which integers stay integers beside missing values."""
    return table.to_pandas(integer_object_nulls=True)


def _read_npz(path: Path) -> DataFrame:
    """Read X[N, d], y[N] and devices[N]; features are numbers, of whatever type."""
    allowed = "an .npz file with numbers X[N, d], y[N] and, if there are, devices[N]"
    arrays = read_arrays(
        path, key="table", allowed=allowed, names=("X", "y", "devices")
    )
    X = arrays.get("X", np.zeros(0))
    columns = {
        name: arrays[key]
        for key, name in (("y", "y"), ("devices", "device"))
        if key in arrays
    }
    is_numeric = X.dtype.kind in "biuf"
    if (
        X.ndim != 2
        or not is_numeric
        or any(values.shape != X.shape[:1] for values in columns.values())
    ):
        raise InputError("table", str(path), allowed)
    names = [f"x{place}" for place in range(X.shape[1])]
    # All features share one type, which a single value may decide: as float64 they are the same whatever it was.
    return (
        _installed("pandas").DataFrame(X.astype(float), columns=names).assign(**columns)
    )


def as_frame(table: object) -> DataFrame:
    """Return a table as a pandas.DataFrame whose column names are text.

    Args:
        table: a path for `read_table`, a pandas frame (not copied), or a frame of another library with `to_arrow` or
            `to_pandas`, such as polars'.
    """
    if isinstance(table, str | Path):
        return read_table(table)
    if not isinstance(table, _installed("pandas").DataFrame):
        table = _converted(table)
    return _checked(table)


def _converted(table: object) -> DataFrame:
    """Return a frame of another library as one of pandas."""
    _installed("pyarrow")  # by which polars converts
    try:
        if hasattr(table, "to_arrow"):
            return _from_arrow(table.to_arrow())
        if hasattr(table, "to_pandas"):
            return table.to_pandas()
    except Exception:  # types that Arrow lacks; messages of libraries may show values
        raise InputError(
            "table", table, "a frame whose columns can be converted to those of pandas"
        ) from None
    raise InputError("table", table, "a path, or a frame of pandas or polars")


def _checked(frame: DataFrame) -> DataFrame:
    if frame.columns.nlevels > 1:
        raise InputError(
            "table",
            Found("has names of several levels"),
            "a table with one name for each column",
        )
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.rename(columns=str)
    _check_names(frame.columns)
    if not len(frame):
        raise InputError("table", Found("has no rows"), "a header and at least one row")
    return frame


def _check_names(names: Index) -> None:
    repeated = ", ".join(repr(name) for name in names[names.duplicated()].unique())
    if repeated:
        raise InputError(
            "table",
            Found(f"has more than one column named {repeated}"),
            "a table with distinct names",
        )


# Describing


def make_schema(
    frame: DataFrame,
    *,
    target: str | None,
    task: Task | None = None,
    device: str | None = None,
    id: str | None = None,
    missing: Missing | None = None,
    declared: Mapping[str, object] | None = None,
) -> Schema:
    """Describe a table: as declared, and where nothing is declared as the data are.

    Args:
        frame: the table, as `as_frame` returns it.
        target: the column to predict.
        task: classification or regression; by default classification if the target is text, boolean, or at most 20
            different whole numbers.
        device: the column that says which device holds a row.
        id: a column of unique values that is no feature.
        missing: "refuse", the default, or "indicator", which fills in a constant and adds a feature that says where.
        declared: part of a schema as plain data, with columns by name or in a list. Arguments take precedence.

    Returns:
        The schema. Its `taken` lists what was read off the data, and what `declared` has there.

    Raises:
        InputError: if a column cannot be used as it is. The sentence shows no values of the table.
    """
    of_table, of_columns = split_declarations(declared or {})
    arguments = {
        "target": target,
        "task": task,
        "device": device,
        "id": id,
        "missing": missing,
    }
    content = of_table | {
        key: value for key, value in arguments.items() if value is not None
    }
    default_task = "classification" if "classes" in content else "regression"
    schema = validated(Schema, {"task": default_task, "columns": []} | content)
    features = _features(frame, schema)
    for name in of_columns:
        if name not in features:
            raise InputError("columns", name, nearest_name(name, features, "feature"))
    _check_spellings([str(label) for label in schema.classes or []], "classes")
    taken = list(schema.taken)
    if not {"task", "classes", "target_range"} & content.keys():
        schema = schema.model_copy(
            update={"task": _infer_task(frame, str(schema.target))}
        )
        taken.append("task")
    if schema.task == "classification" and schema.classes is None:
        schema = schema.model_copy(
            update={"classes": _infer_classes(frame, str(schema.target))}
        )
        taken.append("classes")
    inferred = [
        name for name in features if _declared_kind(of_columns.get(name, {})) is None
    ]
    if inferred:
        taken.append(f"kinds of columns: {listed_names(inferred)}")
    columns = [
        _describe(frame, name, of_columns.get(name, {}), schema, taken)
        for name in features
    ]
    schema = schema.model_copy(
        update={"columns": columns, "taken": list(dict.fromkeys(taken))}
    )
    encode(frame, schema)  # refuses a cell that does not fit
    outcomes(frame, schema)
    return schema


def _check_spellings(names: Sequence[str], key: str) -> None:
    """Refuse declared names of which a library may write one for another.

    Args:
        names: classes or categories.
        key: what errors call them.

    Raises:
        InputError: if two names are the same number or boolean, such as 1, 1.0 and True.
    """
    if have_equal_spellings(names):
        allowed = "without names that are the same number, such as 1, 1.0 and True (codes such as 01 may differ)"
        raise InputError(key, Found("has a number twice"), allowed)


def _features(frame: DataFrame, schema: Schema) -> list[str]:
    """Return the names of the columns that are features, after a check of those that are not."""
    roles = {"target": schema.target, "device": schema.device, "id": schema.id}
    if schema.target is None:
        raise InputError("target", None, "given, as the column to predict")
    if schema.target in (schema.device, schema.id):
        raise InputError(
            "target", schema.target, "a column that is neither the device nor the id"
        )
    for role, name in roles.items():
        if name is not None:
            _complete_names(
                frame, name, role, listed=schema.classes if role == "target" else None
            )
    if schema.id is not None and frame[schema.id].duplicated().any():
        allowed = "unique, since epsilon hides one row and someone with two rows is hidden less (or --device"
        raise InputError(
            f"id {schema.id!r}",
            Found("has repeated values"),
            f"{allowed} {schema.id} --unit device)",
        )
    features = [name for name in frame.columns if name not in roles.values()]
    unnamed = [name for name in features if name.startswith("Unnamed: ")]
    if unnamed:  # mostly row numbers, which tell the target of a sorted table
        raise InputError(
            f"column {unnamed[0]!r}",
            Found("has no name in the table"),
            "named, dropped or given as --id",
        )
    if not features:
        raise InputError(
            "table",
            Found("has no features"),
            "a table with a column besides target, device and id",
        )
    return features


def _complete_names(
    frame: DataFrame, name: str, role: str, listed: Sequence[int | str] | None = None
) -> list[str]:
    """Return the names in a column that is no feature, refused where one is missing.

    Args:
        frame: the table.
        name: the column.
        role: target, device or id.
        listed: public names, which are never missing values.
    """
    if name not in frame.columns:
        raise InputError(role, name, nearest_name(name, frame.columns, "column"))
    key = f"{role} {name!r}"
    names = read_names(frame[name], key)
    never_missing = {str(label) for label in listed or ()}
    complete = [
        text
        for text in names
        if text is not None and (text in never_missing or not is_missing_word(text))
    ]
    if len(complete) < len(names):
        raise InputError(
            key, Found("has missing values"), "complete: leave out such rows"
        )
    return complete


def _is_typed(frame: DataFrame) -> bool:
    """Return whether the types of a frame's columns are statements of whoever made it."""
    return not frame.attrs.get(UNTYPED, False)


def _infer_task(frame: DataFrame, target: str) -> Task:
    """Return the task that all values of a target suggest together."""
    key = f"target {target!r}"
    inferred = infer_kind(frame[target], key, is_typed=_is_typed(frame))
    if inferred.kind == "categorical" or inferred.is_boolean:
        return "classification"
    values = np.unique(read_numbers(frame[target], key))
    is_whole = not np.any(values % 1)
    return (
        "classification"
        if is_whole and len(values) <= MOST_NUMERIC_CLASSES
        else "regression"
    )


def _infer_classes(frame: DataFrame, target: str) -> list[int] | list[str]:
    """Return the sorted labels that a target has: whole numbers, or text."""
    key = f"target {target!r}"
    inferred = infer_kind(frame[target], key, is_typed=_is_typed(frame))
    names = set(_complete_names(frame, target, "target"))
    labels: list[int] | list[str] = sorted(names)
    if inferred.is_boolean:
        labels = sorted({str(parse_number(name) == 1) for name in names})
    elif inferred.kind == "numeric":
        numbers = {parse_number(name) for name in names}
        labels = class_labels(list(numbers))
        labels.sort()
    if len(labels) == 1:
        raise InputError(
            key, Found("has one class only"), "a column of at least two classes"
        )
    if not 2 <= len(labels) <= MOST:
        problem = "has too many classes" if labels else "has no class labels"
        raise InputError(
            key,
            Found(problem),
            f"a column of whole numbers or text, of at most {MOST} classes",
        )
    return labels


def _declared_kind(declared: Mapping[str, object]) -> object:
    """Return the kind that is declared of a column, or that follows from what is; None if nothing says it."""
    if "kind" in declared:
        return declared["kind"]
    if "range" in declared or declared.get("indicator"):
        return "numeric"
    return "categorical" if "categories" in declared else None


def _describe(
    frame: DataFrame,
    name: str,
    declared: Mapping[str, object],
    schema: Schema,
    taken: list[str],
) -> Column:
    """Return a column as declared, with what is not declared taken from the data and listed in `taken`."""
    series = frame[name]
    key = f"column {name!r}"
    kind = _declared_kind(declared)
    update: dict[str, object] = {}
    if kind is None:
        inferred = infer_kind(series, key, is_typed=_is_typed(frame))
        kind = inferred.kind
        if inferred.is_boolean:
            update["range"] = (0.0, 1.0)
            taken.append(f"range of {name}")
    column = validated(
        Column, {**declared, "kind": kind, "name": name}, f"columns.{name}"
    )
    _check_spellings(column.categories or [], f"columns.{name}.categories")
    if column.kind == "categorical" and column.categories is None:
        update["categories"] = _infer_categories(
            series, key, is_declared="kind" in declared
        )
        taken.append(f"categories of {name}")
    elif (
        column.kind == "numeric"
        and column.indicator is None
        and schema.missing == "indicator"
    ):
        update["indicator"] = bool(np.isnan(read_numbers(series, key)).any())
        taken.append(GAPS)
    return column.model_copy(update=update)


def _infer_categories(series: Series, key: str, *, is_declared: bool) -> list[str]:
    """Return the sorted names that a column has.

    Args:
        series: the column.
        key: what errors call it.
        is_declared: whether it was declared categorical, so that its names may look like numbers.
    """
    categories = sorted(
        {
            name
            for name in read_names(series, key)
            if name is not None and not is_missing_word(name)
        }
    )
    advice = "dropped, given as --id, or declared categorical with its categories in the schema"
    numbers = sum(_is_formatted_number(text.strip()) for text in categories)
    if (
        not is_declared
        and len(categories) > MOST_NUMERIC_CLASSES
        and numbers > 0.9 * len(categories)
    ):
        raise InputError(
            key,
            Found("has numbers written as text"),
            f"written with a decimal point, or {advice}",
        )
    if len(categories) > MOST_CATEGORIES:
        raise InputError(
            key, Found(f"has more than {MOST_CATEGORIES} different values"), advice
        )
    return categories


def _is_formatted_number(text: str) -> bool:
    """Return whether a text is a number as people write it, and not a code such as a postal one."""
    return FORMATTED_NUMBER.fullmatch(text) is not None and CODE.fullmatch(text) is None


# Encoding


def encode(
    frame: DataFrame, schema: Schema
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
    """Encode a table as features; nothing but the schema decides how.

    A numeric column is one feature, followed by an indicator of missing values where it may have them. A categorical
    one is a feature for each category, all 0 where the value is missing or in none of them. Other columns are ignored.

    Args:
        frame: the table, as `as_frame` returns it; it needs no target.
        schema: as `make_schema` returns it.

    Returns:
        X[N, d], the public ranges[d, 2] (nan where there is none), and the names of the features. Values outside their
        range are not clipped. A row of X depends on that row of the table and on the schema alone.

    Raises:
        InputError: if a column is absent, or a cell is not of its column's kind.
    """
    absent = ", ".join(
        repr(column.name)
        for column in schema.columns
        if column.name not in frame.columns
    )
    if absent:
        raise InputError(
            "table",
            Found(f"has no column {absent}"),
            "a table with all columns of the schema",
        )
    X = np.hstack(
        [_encoded(frame[column.name], column, schema) for column in schema.columns],
        dtype=float,
    )
    ranges = np.array([both for column in schema.columns for both in column.ranges])
    return X, ranges, [name for column in schema.columns for name in column.features]


def _encoded(series: Series, column: Column, schema: Schema) -> NDArray[np.float64]:
    """Return the features[N, …] of one column."""
    if column.kind == "categorical":
        places = _places(series, column)
        _check_gaps(places == MISSING, column, schema)
        categories = np.arange(len(column.categories or []))
        return (places[:, None] == categories).astype(float)
    values = read_numbers(series, f"column {column.name!r}")
    gaps = np.isnan(values)
    _check_gaps(gaps, column, schema)
    features = np.column_stack([np.where(gaps, schema.fill, values), gaps])
    return features[:, : len(column.features)]


def _places(series: Series, column: Column) -> NDArray[np.intp]:
    """Return the place of every cell among the categories of its column, [N]."""
    key = f"column {column.name!r}"
    categories = column.categories or []
    names = read_names(series, key)
    check_unambiguous(series, categories, key)
    return NameIndex(categories).places(names)


def _check_gaps(gaps: NDArray[np.bool_], column: Column, schema: Schema) -> None:
    """Refuse missing values where the schema has no place for them."""
    is_welcome = column.indicator or (
        column.kind == "categorical" and schema.missing == "indicator"
    )
    if is_welcome or not gaps.any():
        return
    allowed = "complete (wflmc fit --missing indicator fills in a constant and adds a column that says where"
    if column.kind == "categorical":
        allowed += "; a name such as NA or None counts as missing unless it is declared as a category"
    allowed += ")"
    if schema.missing == "indicator":
        allowed = "complete, as it was at the fit or as it was declared"
    raise InputError(f"column {column.name!r}", Found("has missing values"), allowed)


def outcomes(frame: DataFrame, schema: Schema) -> np.ndarray:
    """Return the target of each row: labels as in `schema.classes`, or floats.

    Raises:
        InputError: if the target is missing in a row, or is none of the classes.
    """
    key = f"target {schema.target!r}"
    names = _complete_names(frame, str(schema.target), "target", listed=schema.classes)
    if schema.task == "regression":
        return read_numbers(frame[schema.target], key)
    classes = schema.classes or []
    labels = [str(label) for label in classes]
    check_unambiguous(frame[schema.target], labels, key)
    places = NameIndex(labels).places(names)
    if np.any(places < 0):
        raise InputError(
            key,
            Found("has a label outside the classes"),
            "labelled by the classes of the schema",
        )
    return np.asarray(classes)[places]


def owners(
    frame: DataFrame, schema: Schema, devices: int | None, rng: np.random.Generator
) -> NDArray[np.intp]:
    """Return the device of each row, 0 to K − 1.

    Args:
        frame: the table, as `as_frame` returns it.
        schema: its device column, whatever its values, decides where there is one.
        devices: else the number of devices, which share the rows equally and at random; None is one device.
        rng: draws the shares.
    """
    if schema.device is not None:
        if devices is not None:
            raise conflict("devices", devices, "beside a device column")
        names = _complete_names(frame, schema.device, "device")
        place_of = {
            name: place for place, name in enumerate(device_names(frame, schema))
        }
        return np.array([place_of[name] for name in names], dtype=np.intp)
    if devices is None:
        return np.zeros(len(frame), np.intp)
    check_counts(devices=devices)
    if devices > len(frame):
        raise InputError("devices", devices, "at most the number of rows")
    return rng.permutation(np.arange(len(frame), dtype=np.intp) % devices)


def device_names(frame: DataFrame, schema: Schema) -> list[str]:
    """Return the distinct names in the device column, in the order of the devices: by number where all are numbers."""
    names = sorted(set(_complete_names(frame, str(schema.device), "device")))
    numbers = {name: parse_number(name) for name in names}
    if any(number is None for number in numbers.values()):
        return names
    return sorted(names, key=lambda name: numbers[name])  # type: ignore[arg-type,return-value]


def unknown_categories(frame: DataFrame, schema: Schema) -> list[str]:
    """Return the categorical columns with a value that is none of their categories; missing ones aside."""
    columns = [column for column in schema.columns if column.kind == "categorical"]
    return [
        column.name
        for column in columns
        if np.any(_places(frame[column.name], column) == NOT_LISTED)
    ]
