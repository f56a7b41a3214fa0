"""Tables of practitioners: reading them, describing their columns, and encoding them as features and outcomes."""

import csv
import difflib
import re
import warnings
from collections.abc import Iterable, Mapping
from decimal import Decimal
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, FiniteFloat, ValidationError, field_validator, model_validator

from wflmc.errors import Found, InputError, conflict
from wflmc.posterior.inputs import MOST, check_counts

Frame = Any
"""A pandas.DataFrame; pandas is imported only where a table is used."""
Series = Any
Task = Literal["classification", "regression"]
Missing = Literal["refuse", "indicator"]

NUMBERS = {"boolean", "integer", "integer-na", "floating", "mixed-integer-float", "decimal", "empty"}
TEXTS = {"string", "categorical"}
"""Types of values, as pandas names them, that are numeric and categorical columns."""
MOST_CATEGORIES = 100
"""Categories of one column that are taken from data."""
FEW_VALUES = 20
"""Different whole numbers up to which a target has classes."""
NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}([,. '\xa0]\d{3})+)([.,]\d+)?([eE][-+]?\d+)?")
DELIMITERS = ",;\t| "
GAPS = "which columns have missing values"


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] >= value[1]:
        raise ValueError
    return value


Range = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ordered)]


class Column(BaseModel, extra="forbid", frozen=True):
    """A column of features: its type, and what is public about it."""

    name: str
    kind: Literal["numeric", "categorical"]
    range: Range | None = None
    """Lowest and highest value of a numeric column, where they are public."""
    categories: list[str] | None = None
    indicator: bool | None = None
    """Whether a numeric column may have missing values, which a second feature indicates; None is undecided."""

    @field_validator("categories", mode="before")
    @classmethod
    def _check_categories(cls, value: Any) -> Any:
        names = [_text(one) for one in value] if isinstance(value, list | tuple) else value
        if names is not None and (names is value or len(set(names)) < len(names)):
            raise ValueError("a list of texts or numbers, each given once")
        return names

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        numeric = self.kind == "numeric"
        if (self.categories is not None and numeric) or ((self.range or self.indicator) and not numeric):
            raise ValueError("either numeric, with a range or an indicator, or categorical, with categories")
        return self

    @property
    def features(self) -> list[str]:
        """Names of the features that the column becomes."""
        if self.kind == "categorical":
            return [f"{self.name}={category}" for category in self.categories or []]
        return [self.name, f"{self.name}=missing"] if self.indicator else [self.name]

    @property
    def ranges(self) -> list[Any]:
        """Ranges of these features; nan where none is public."""
        own = [self.range or (np.nan, np.nan)] if self.kind == "numeric" else []
        return [*own, *[(0.0, 1.0)] * (len(self.features) - len(own))]


class Schema(BaseModel, extra="forbid", frozen=True):
    """What is public about a table: everything that encoding it depends on.

    Names and types of columns count as public; `taken` lists whatever else was read off the data.
    """

    target: str | None = None
    task: Task
    device: str | None = None
    id: str | None = None
    missing: Missing = "refuse"
    fill: FiniteFloat = 0.0
    """Number in place of a missing one."""
    classes: list[int] | list[str] | None = None
    target_range: Range | None = None
    columns: list[Column]
    taken: list[str] = []

    @field_validator("classes", mode="before")
    @classmethod
    def _check_classes(cls, value: Any) -> Any:
        names = _labels(value) if isinstance(value, list | tuple) else []
        if value is not None and len(set(names)) < max(2, len(names)):
            raise ValueError("a list of at least two whole numbers or at least two texts, each given once")
        return None if value is None else names

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if (self.classes and self.task == "regression") or (self.target_range and self.task == "classification"):
            raise ValueError("a classification where it has classes, and a regression where it has target_range")
        return self


Model = TypeVar("Model", bound=BaseModel)


def _validated(model: type[Model], content: Mapping[str, Any], place: str = "") -> Model:
    """Return the document of declared content; the first problem is one sentence."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        allowed = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if first["type"] == "extra_forbidden":
            allowed = _nearest(name, model.model_fields, "key")
        elif name.endswith("range"):
            allowed = "two finite numbers, the lower first"
        raise InputError(f"{place}.{name}".strip(".") or "schema", first["input"], allowed) from None


def _nearest(name: str, known: Iterable[str], what: str) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names[:FEW_VALUES]) + ", …" * (len(names) > FEW_VALUES)
    return f"a known {what}; did you mean {near[0]}?" if near else f"a known {what} ({listed})"


def _installed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise InputError(name, None, "installed to use tables: pip install 'wflmc[tables]'") from None


def read_table(path: str | Path) -> Frame:
    """Read a table from a file.

    Args:
        path: a text file with a header (.csv, .tsv, .txt; any delimiter), .parquet, or .npz with X[N, d] and, if
            there are, y[N] and devices[N], which become columns x0, x1, …, y and device.

    Returns:
        A pandas.DataFrame with one row for each record.

    Raises:
        InputError: if there is no such file, or no table with distinct names and at least one row in it.
    """
    pandas, file = _installed("pandas"), Path(path).expanduser()
    readers = dict.fromkeys((".csv", ".tsv", ".txt"), _read_text) | {".parquet": _read_parquet, ".npz": _read_npz}
    suffix = file.suffix.lower()
    if suffix not in readers:
        raise InputError("table", str(path), f"a file that ends in {', '.join(readers)}")
    if not file.exists():
        raise InputError("table", str(path), "a file that exists")
    try:
        frame = readers[suffix](file)
    except InputError:
        raise
    except pandas.errors.EmptyDataError:
        raise InputError("table", Found("is empty"), "a header and at least one row") from None
    except Exception as error:  # a corrupt file can fail in many ways, and messages of pandas may show its content
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        text = " in UTF-8 with as many values in each row as in its header" if readers[suffix] is _read_text else ""
        raise InputError("table", str(path), f"a {suffix} file{text} that can be read{reason}") from None
    return _checked(frame)


def _read_text(path: Path) -> Frame:
    pandas = _installed("pandas")
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = list(islice((line for line in file if line.strip()), 50))
    candidates = "".join(sign for sign in DELIMITERS if head and sign in head[0]) or ","
    try:
        delimiter = csv.Sniffer().sniff("".join(head), candidates).delimiter
    except csv.Error:
        delimiter = candidates.strip(" ")[:1] or ","
    options = {"sep": delimiter, "skipinitialspace": True, "encoding": "utf-8-sig", "engine": "c"}
    names = pandas.read_csv(path, header=None, nrows=1, dtype=str, **options).iloc[0].dropna()  # repeated ones as well
    numbers = pandas.to_numeric(names, errors="coerce").dropna()
    if (numbers % 1 != 0).any() or numbers.duplicated().any():  # these are data, and must not show in errors as names
        wanted = "a table with a name for each column in the first row"
        raise InputError("table", Found("has numbers for names"), wanted)
    _check_names(names)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)  # of rows that are longer than the header
        return pandas.read_csv(path, low_memory=False, index_col=False, **options)


def _read_parquet(path: Path) -> Frame:
    _installed("pyarrow")
    return _installed("pandas").read_parquet(path, engine="pyarrow")


def _read_npz(path: Path) -> Frame:
    with np.load(path, allow_pickle=False) as arrays:
        X, names = arrays["X"], {"y": "y", "devices": "device"}
        columns = {column: arrays[name] for name, column in names.items() if name in arrays}
    if X.ndim != 2 or any(values.shape != X.shape[:1] for values in columns.values()):
        raise InputError("table", str(path), "an .npz file with X[N, d], y[N] and, if there are, devices[N]")
    return _installed("pandas").DataFrame(X, columns=[f"x{i}" for i in range(X.shape[1])]).assign(**columns)


def as_frame(table: Any) -> Frame:
    """Return a table as a pandas.DataFrame whose column names are text.

    Args:
        table: a path for `read_table`, a pandas frame (not copied), or a frame with `to_pandas`, such as polars'.
    """
    if isinstance(table, str | Path):
        return read_table(table)
    if not isinstance(table, _installed("pandas").DataFrame):
        if not hasattr(table, "to_pandas"):
            raise InputError("table", table, "a path, or a frame of pandas or polars")
        _installed("pyarrow")  # by which polars converts
        table = table.to_pandas()
    return _checked(table)


def _checked(frame: Frame) -> Frame:
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.rename(columns=str)
    _check_names(frame.columns)
    if not len(frame):
        raise InputError("table", Found("has no rows"), "a header and at least one row")
    return frame


def _check_names(names: Any) -> None:
    repeated = ", ".join(repr(name) for name in names[names.duplicated()].unique())
    if repeated:
        raise InputError("table", Found(f"has more than one column named {repeated}"), "a table with distinct names")


def make_schema(
    frame: Frame,
    *,
    target: str | None,
    task: Task | None = None,
    device: str | None = None,
    id: str | None = None,
    missing: Missing | None = None,
    declared: Mapping[str, Any] | None = None,
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
    given, columns = _split(declared or {})
    arguments = {"target": target, "task": task, "device": device, "id": id, "missing": missing}
    content = given | {key: value for key, value in arguments.items() if value is not None}
    guess: dict[str, Any] = {"task": "classification" if "classes" in content else "regression", "columns": []}
    schema = _validated(Schema, guess | content)
    features = _features(frame, schema)
    for name in columns:
        if name not in features:
            raise InputError("columns", name, _nearest(name, features, "feature"))
    taken = list(schema.taken)
    if not {"task", "classes", "target_range"} & content.keys():
        schema = schema.model_copy(update={"task": _guess_task(frame[schema.target], taken)})
    if schema.task == "classification" and schema.classes is None:
        schema = schema.model_copy(update={"classes": _take_classes(frame[schema.target])})
        taken.append("classes")
    described = [_describe(frame[name], columns.get(name, {}), schema, taken) for name in features]
    outcomes(frame, schema)  # refuses a target that does not fit
    return schema.model_copy(update={"columns": described, "taken": list(dict.fromkeys(taken))})


def _split(declared: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what is declared of the table, and of its columns by name; None counts as not declared."""
    given = {key: value for key, value in declared.items() if value is not None}
    columns = given.pop("columns", {})
    if isinstance(columns, list) and all(isinstance(one, Mapping) and "name" in one for one in columns):
        columns = {one["name"]: one for one in columns}
    if not isinstance(columns, Mapping) or not all(isinstance(one, Mapping) for one in columns.values()):
        raise InputError("columns", columns, "an object with an object for each column, or a list of them with names")
    return given, {str(name): {key: one[key] for key in one if one[key] is not None} for name, one in columns.items()}


def _features(frame: Frame, schema: Schema) -> list[str]:
    """Return the names of the columns that are features, after a check of those that are not."""
    roles = {"target": schema.target, "device": schema.device, "id": schema.id}
    if schema.target is None:
        raise InputError("target", None, "given, as the column to predict")
    if schema.target in (schema.device, schema.id):
        raise InputError("target", schema.target, "a column that is neither the device nor the id")
    for role, name in roles.items():
        if name is not None:
            _complete(frame, name, role)
    if schema.id is not None and frame[schema.id].duplicated().any():
        allowed = "unique, since epsilon hides one row and someone with two rows is hidden less (or --device"
        raise InputError(f"id {schema.id!r}", Found("has repeated values"), f"{allowed} {schema.id} --unit device)")
    features = [name for name in frame.columns if name not in roles.values()]
    unnamed = [name for name in features if name.startswith("Unnamed: ")]
    if unnamed:  # by pandas: mostly row numbers, which tell the target of a sorted table
        raise InputError(f"column {unnamed[0]!r}", Found("has no name in the table"), "named, dropped or given as --id")
    if not features:
        raise InputError("table", Found("has no features"), "a table with a column besides target, device and id")
    return features


def _complete(frame: Frame, name: str, role: str) -> Series:
    """Return a column that is no feature, refused where values are missing."""
    if name not in frame.columns:
        raise InputError(role, name, _nearest(name, frame.columns, "column"))
    if frame[name].isna().any():
        raise InputError(f"{role} {name!r}", Found("has missing values"), "complete: leave out such rows")
    return frame[name]


def _guess_task(target: Series, taken: list[str]) -> Task:
    """Return the task that a target suggests; where the values decide it, not their type, it is taken from the data."""
    kind = _kind(target)
    if kind in TEXTS or kind == "boolean":
        return "classification"
    values = np.unique(_numbers(target, f"target {target.name!r}"))
    taken.append("task")
    return "classification" if len(values) <= FEW_VALUES and not np.any(values % 1) else "regression"


def _take_classes(target: Series) -> list[int] | list[str]:
    labels, key = _labels(target.unique().tolist()), f"target {target.name!r}"
    if len(labels) == 1:
        raise InputError(key, Found("has one class only"), "a column of at least two classes")
    if not 2 <= len(labels) <= MOST:
        found = "has too many classes" if labels else "has no class labels"
        raise InputError(key, Found(found), f"a column of whole numbers or text, of at most {MOST} classes")
    return sorted(labels)


def _describe(series: Series, given: Mapping[str, Any], schema: Schema, taken: list[str]) -> Column:
    """Return a column as declared, with what is not declared taken from the data."""
    name, kind = series.name, _kind(series)
    if kind not in NUMBERS | TEXTS:
        raise InputError(f"column {name!r}", Found(f"is of type {kind}"), "numbers or text")
    guess = "numeric" if "range" in given or (kind in NUMBERS and "categories" not in given) else "categorical"
    column = _validated(Column, {"kind": guess, **given, "name": name}, f"columns.{name}")
    update: dict[str, Any] = {}
    if column.kind == "numeric":
        _numbers(series, f"column {name!r}")  # refuses what is not numeric
        if column.range is None and kind == "boolean":
            update["range"] = (0.0, 1.0)
        if column.indicator is None and schema.missing == "indicator":
            update["indicator"] = bool(series.isna().any())
            taken.append(GAPS)
    elif column.categories is None:
        update["categories"] = _take_categories(series, declared="kind" in given)
        taken.append(f"categories of {name}")
    column = column.model_copy(update=update)
    _check_gaps(series, column, schema)
    return column


def _take_categories(series: Series, declared: bool) -> list[str]:
    key, categories = f"column {series.name!r}", sorted(_texts(series).dropna().unique())
    advice = "dropped, given as --id, or declared categorical with its categories in the schema"
    numbers = sum(NUMBER.fullmatch(text.strip()) is not None for text in categories)
    if not declared and len(categories) > FEW_VALUES and numbers > 0.9 * len(categories):
        raise InputError(key, Found("has numbers written as text"), f"written with a decimal point, or {advice}")
    if len(categories) > MOST_CATEGORIES:
        raise InputError(key, Found(f"has more than {MOST_CATEGORIES} different values"), advice)
    return categories


def _check_gaps(series: Series, column: Column, schema: Schema) -> None:
    """Refuse missing values where the schema has no place for them."""
    welcome = column.indicator or (column.kind == "categorical" and schema.missing == "indicator")
    if not welcome and series.isna().any():
        allowed = "complete (wflmc fit --missing indicator fills in a constant and adds a column that says where)"
        if schema.missing == "indicator":
            allowed = "complete, as it was at the fit or as it was declared"
        raise InputError(f"column {column.name!r}", Found("has missing values"), allowed)


def _kind(series: Series) -> str:
    return _installed("pandas").api.types.infer_dtype(series, skipna=True)


def _texts(series: Series) -> Series:
    """Return the name of each row's category; missing ones stay missing."""
    return series.astype("category").map(_text, na_action="ignore")


def _text(value: Any) -> str:
    """Return the name of a category, the same whether a whole number is stored as int or, beside gaps, as float."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _labels(values: Iterable[Any]) -> list[Any]:
    """Return class labels: texts and booleans as names, whole numbers as int; none where there is anything else."""
    labels = list(values)
    if all(isinstance(label, str | bool) for label in labels):
        return [str(label) for label in labels]
    whole = (isinstance(one, int | float | Decimal) and not isinstance(one, bool) for one in labels)
    return [int(label) for label in labels] if all(whole) and all(float(one).is_integer() for one in labels) else []


def _numbers(series: Series, key: str) -> NDArray[np.float64]:
    """Return a column of numbers, nan where one is missing."""
    if _kind(series) not in NUMBERS:
        raise InputError(key, Found("has values that are not numbers"), "a column of numbers")
    values: NDArray[np.float64] = series.to_numpy(dtype=float, na_value=np.nan)
    if np.isinf(values).any():
        raise InputError(key, Found("has infinite values"), "finite everywhere")
    return values


def encode(frame: Frame, schema: Schema) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
    """Encode a table as features; nothing but the schema decides how.

    A numeric column is one feature, followed by an indicator of missing values where it may have them. A categorical
    one is a feature for each category, all 0 where the value is missing or in none of them. Other columns are ignored.

    Args:
        frame: the table, as `as_frame` returns it; it needs no target.
        schema: as `make_schema` returns it.

    Returns:
        X[N, d], the public ranges[d, 2] (nan where there is none), and the names of the features. Values outside their
        range are not clipped.
    """
    absent = ", ".join(repr(column.name) for column in schema.columns if column.name not in frame.columns)
    if absent:
        raise InputError("table", Found(f"has no column {absent}"), "a table with all columns of the schema")
    X = np.hstack([_encoded(frame[column.name], column, schema) for column in schema.columns], dtype=float)
    ranges = np.array([both for column in schema.columns for both in column.ranges])
    return X, ranges, [name for column in schema.columns for name in column.features]


def _encoded(series: Series, column: Column, schema: Schema) -> NDArray[Any]:
    """Return the features[N, …] of one column."""
    if column.kind == "categorical":
        _check_gaps(series, column, schema)
        known = _installed("pandas").Index(column.categories, dtype=object)
        return np.eye(len(known) + 1, dtype=bool)[known.get_indexer(_texts(series)), :-1]  # −1, all 0: in none of them
    values = _numbers(series, f"column {column.name!r}")
    _check_gaps(series, column, schema)
    gaps = np.isnan(values)
    return np.column_stack([np.where(gaps, schema.fill, values), gaps])[:, : len(column.features)]


def outcomes(frame: Frame, schema: Schema) -> NDArray[Any]:
    """Return the target of each row: labels as in `schema.classes`, or floats.

    Raises:
        InputError: if the target is missing in a row, or is none of the classes.
    """
    series, key = _complete(frame, str(schema.target), "target"), f"target {schema.target!r}"
    if schema.task == "regression":
        return _numbers(series, key)
    codes, values = _installed("pandas").factorize(series)
    labels, classes = _labels(values.tolist()), schema.classes or []
    labels = [str(label) for label in labels] if isinstance(next(iter(classes), None), str) else labels
    if not labels or not set(labels) <= set(classes):
        raise InputError(key, Found("has a label outside the classes"), "labelled by the classes of the schema")
    return np.asarray(labels)[codes]


def owners(frame: Frame, schema: Schema, devices: int | None, rng: np.random.Generator) -> NDArray[np.intp]:
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
        return _installed("pandas").factorize(_complete(frame, schema.device, "device"), sort=True)[0]
    if devices is None:
        return np.zeros(len(frame), np.intp)
    check_counts(devices=devices)
    if devices > len(frame):
        raise InputError("devices", devices, "at most the number of rows")
    return rng.permutation(np.arange(len(frame), dtype=np.intp) % devices)


def unknown_categories(frame: Frame, schema: Schema) -> list[str]:
    """Return the categorical columns with a value that is none of their categories; missing ones aside."""
    columns = [column for column in schema.columns if column.kind == "categorical"]
    return [one.name for one in columns if not set(_texts(frame[one.name].dropna())) <= set(one.categories or [])]
