"""The schema of a table: everything that encoding a row depends on besides the row."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from wflmc.apps.tables.cells import Kind, name_of
from wflmc.support.errors import InputError

Task = Literal["classification", "regression"]
"""What is predicted: one of some classes, or a number."""
Missing = Literal["refuse", "indicator"]
"""Missing values: an error, or a constant and a second feature that says where."""

MAX_LABEL = 2**63
"""Labels that are whole numbers are stored as int64: they are smaller than this."""
MAX_LISTED_NAMES = 20
"""Names of columns that a sentence lists."""


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    """Refuse a range whose ends are not in order; `validated` has the sentence."""
    if value[0] >= value[1]:
        raise ValueError
    return value


Range = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ordered)]
"""The lowest and the highest value."""


def _is_category(item: object) -> TypeGuard[str | int | float]:
    """Return whether a declared value may be a category: not where it is missing."""
    if isinstance(item, float) and math.isnan(item):
        return False
    return isinstance(item, str | int | float)


class Column(BaseModel, extra="forbid", frozen=True):
    """A column of features: its kind, and what is public about it."""

    name: str
    """As in the header of the table."""
    kind: Kind
    """Whether its cells are numbers or names."""
    range: Range | None = None
    """Lowest and highest value of a numeric column, where they are public."""
    categories: list[str] | None = None
    """Names that the cells of a categorical column may have, in their order."""
    indicator: bool | None = None
    """Whether a numeric column may have missing values, which a second feature marks.

    None is undecided.
    """

    @field_validator("categories", mode="before")
    @classmethod
    def _check_categories(cls, value: object) -> list[str] | None:
        """Return declared categories by the names that cells have; refuse anything else.

        By name (`name_of`), 1, 1.0 and "1" are one category, which must not be given
        twice; that 1 and True are not given together is checked by `make_schema`.
        Without any category the column would have no features, and nan is a missing
        value. The error is the end of a sentence, see `validated`.
        """
        if value is None:
            return None
        items = value if isinstance(value, list | tuple) else []
        usable_items = [item for item in items if _is_category(item)]
        names = [name_of(item) for item in usable_items]
        has_others = len(names) < len(items)
        if not names or has_others or len(set(names)) < len(names):
            requirement = "at least one text or number, none missing, each given once"
            raise ValueError(f"a list of {requirement}")
        return names

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        """Refuse what belongs to the other kind of column."""
        is_numeric = self.kind == "numeric"
        has_names = is_numeric and self.categories is not None
        has_numbers = not is_numeric and (self.range or self.indicator)
        if has_names or has_numbers:
            numeric = "numeric, with a range or an indicator"
            raise ValueError(f"either {numeric}, or categorical, with categories")
        return self

    @property
    def features(self) -> list[str]:
        """Names of the features that the column becomes.

        A categorical column becomes a feature `name=category` for each category, a
        numeric one itself and, with an indicator, `name=missing`.
        """
        if self.kind == "categorical":
            return [f"{self.name}={category}" for category in self.categories or []]
        return [self.name, f"{self.name}=missing"] if self.indicator else [self.name]

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """The lowest and the highest value of each of these features.

        (0, 1) for a category or an indicator, and the range of a numeric column where
        it is public; else (nan, nan), so that a fit has to pay for it.
        """
        if self.kind == "categorical":
            return [(0.0, 1.0) for _ in self.features]
        numeric_range = self.range or (float("nan"), float("nan"))
        return [numeric_range, (0.0, 1.0)] if self.indicator else [numeric_range]


class Schema(BaseModel, extra="forbid", frozen=True):
    """What is public about a table: everything that encoding it depends on.

    Names of columns are public. `taken` lists whatever else was read off the data:
    kinds of columns, categories, classes, the task.
    """

    target: str | None = None
    """The column to predict."""
    task: Task
    """Whether the target is a class or a number."""
    device: str | None = None
    """The column that says which device holds a row."""
    id: str | None = None
    """The column of unique names of rows, which is no feature."""
    missing: Missing = "refuse"
    """What becomes of missing values."""
    fill: FiniteFloat = 0.0
    """Number in place of a missing one."""
    classes: list[int] | list[str] | None = None
    """Labels that the target may have, in their order."""
    target_range: Range | None = None
    """Lowest and highest target of a regression, where they are public."""
    columns: list[Column]
    """Columns that are features, in the order of the table."""
    taken: list[str] = []
    """What was read off the data, which ε does not cover."""

    @field_validator("classes", mode="before")
    @classmethod
    def _check_classes(cls, value: object) -> list[int] | list[str] | None:
        """Return declared labels as `class_labels` has them; refuse anything else.

        The error is the end of a sentence, see `validated`.
        """
        if value is None:
            return None
        labels = class_labels(value) if isinstance(value, list | tuple) else []
        if len(labels) < 2 or len(set(labels)) < len(labels):
            kinds = "at least two whole numbers or at least two texts"
            raise ValueError(f"a list of {kinds}, each given once")
        return labels

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        """Refuse what belongs to the other task."""
        is_regression = self.task == "regression"
        has_classes = is_regression and self.classes
        has_numbers = not is_regression and self.target_range
        if has_classes or has_numbers:
            classification = "a classification where it has classes"
            regression = "a regression where it has target_range"
            raise ValueError(f"{classification}, and {regression}")
        return self


def class_labels(values: Sequence[object]) -> list[int] | list[str]:
    """Return values as class labels, all of them texts or all of them whole numbers.

    Args:
        values: as they are declared, or as they were found in a target.

    Returns:
        Texts and booleans by name, or whole numbers below 2⁶³ as int; an empty list if
        there is anything else among the values, or both kinds.
    """
    names = [name_of(value) for value in values if isinstance(value, str | bool)]
    if len(names) == len(values):
        return names
    numbers = [int(value) for value in values if _is_label(value)]
    return numbers if len(numbers) == len(values) else []


def _is_label(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a whole number of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < MAX_LABEL and (isinstance(value, int) or value.is_integer())


Document = TypeVar("Document", bound=BaseModel)


def validated(
    model: type[Document], content: Mapping[str, object], prefix: str = ""
) -> Document:
    """Return the document that declared content makes.

    Args:
        model: `Schema` or `Column`.
        content: what is declared, by key.
        prefix: what errors put before a key, such as `columns.age`.

    Returns:
        An instance of `model`.

    Raises:
        InputError: the first problem, in one sentence, with the nearest key that is
            known where the problem is a key.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    message = first["msg"].removeprefix("Value error, ")
    requirement = message.removeprefix("Input should be ")
    if first["type"] == "extra_forbidden":
        requirement = nearest_name(name, model.model_fields, "key")
    elif name.endswith("range"):
        requirement = "two finite numbers, the lower first"
    key = f"{prefix}.{name}".strip(".") or "schema"
    raise InputError(key, first["input"], requirement)


def nearest_name(name: str, known_names: Iterable[str], noun: str) -> str:
    """Return the end of an error about an unknown name.

    >>> nearest_name("agee", ["age", "sex"], "column")
    'a known column; did you mean age?'

    Args:
        name: the unknown one.
        known_names: those that there are.
        noun: what they name, such as column.

    Returns:
        What the name must be, with the nearest one that is known, or where none is near
        with a list of them (see `listed_names`).
    """
    names = list(known_names)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"a known {noun}; did you mean {close[0]}?"
    return f"a known {noun} ({listed_names(names)})"


def listed_names(names: Sequence[str]) -> str:
    """Return names as part of a sentence, with commas between them.

    Args:
        names: of any number.

    Returns:
        All of them, or of many the first `MAX_LISTED_NAMES` and how many more there
        are, so that a table of thousands of columns does not fill a screen.
    """
    shown = ", ".join(names[:MAX_LISTED_NAMES])
    omitted = len(names) - MAX_LISTED_NAMES
    return f"{shown} and {omitted} more" if omitted > 0 else shown


def read_declarations(path: str | Path, key: str) -> dict[str, object]:
    """Read part of a schema from a JSON file, for `make_schema`.

    Its keys are not checked here: `make_schema` does that when it knows the table.

    Args:
        path: the file, in UTF-8; `~` is expanded.
        key: what errors call it, such as `--schema`.

    Returns:
        The content by key.

    Raises:
        InputError: if the file cannot be read, or holds anything but one JSON object.
    """
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise InputError(key, str(path), "a JSON file that can be read") from None
    if not isinstance(content, dict):
        raise InputError(key, str(path), "a JSON file that holds one object")
    return content


def read_schema(path: Path, key: str) -> Schema:
    """Read the whole schema that a fit has written.

    Args:
        path: the file, `schema.json` in the folder of a fit.
        key: what errors call it.

    Returns:
        The schema, by which a table is encoded as it was for the fit.

    Raises:
        InputError: if the file cannot be read, or holds anything but a schema.
    """
    content = read_declarations(path, key)
    try:
        return Schema.model_validate(content)
    except ValidationError:
        requirement = "a schema as `wflmc fit` wrote it"
        raise InputError(key, str(path), requirement) from None


class SplitDeclarations(NamedTuple):
    """What is declared of a table.

    Args:
        table: by key, without columns.
        columns: by name and key.
    """

    table: dict[str, object]
    columns: dict[str, dict[str, object]]


def split_declarations(declared: Mapping[str, object]) -> SplitDeclarations:
    """Split what is declared of a table from what is declared of its columns.

    Args:
        declared: part of a schema as plain data, whose `columns` are an object by name,
            or a list of objects with names as in a written schema.

    Returns:
        The two parts. None counts as not declared, and is left out.

    Raises:
        InputError: if the columns are neither an object with an object for each name,
            nor a list of objects with distinct names.
    """
    table = _without_none(declared)
    columns = table.pop("columns", {})
    by_name = _columns_by_name(columns) if isinstance(columns, list) else columns
    form = "an object with an object for each column"
    requirement = f"{form}, or a list of them with distinct names"
    if not isinstance(by_name, Mapping):
        raise InputError("columns", columns, requirement)
    of_columns = {}
    for name, content in by_name.items():
        if not isinstance(content, Mapping):
            raise InputError("columns", columns, requirement)
        of_columns[str(name)] = _without_none(content)
    return SplitDeclarations(table, of_columns)


def _without_none(content: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of an object that are not None."""
    return {key: value for key, value in content.items() if value is not None}


def _columns_by_name(columns: list[object]) -> Mapping[str, object] | None:
    """Return declared columns, listed as in a written schema, by their names.

    It is None, which the caller refuses, unless all are objects with distinct names.
    """
    by_name: dict[str, object] = {}
    for column in columns:
        name = column.get("name") if isinstance(column, Mapping) else None
        if not isinstance(name, str) or name in by_name:
            return None
        by_name[name] = column
    return by_name
