"""The schema of a table: everything that encoding a row depends on besides the row itself."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeGuard, TypeVar

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
Missing = Literal["refuse", "indicator"]

LARGEST_LABEL = 2**63
"""Labels that are whole numbers are stored as int64."""
MOST_LISTED_NAMES = 20
"""Names of columns that a sentence lists."""


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] >= value[1]:
        raise ValueError
    return value


Range = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ordered)]
"""The lowest and the highest value."""


class Column(BaseModel, extra="forbid", frozen=True):
    """A column of features: its kind, and what is public about it."""

    name: str
    kind: Kind
    range: Range | None = None
    """Lowest and highest value of a numeric column, where they are public."""
    categories: list[str] | None = None
    indicator: bool | None = None
    """Whether a numeric column may have missing values, which a second feature indicates; None is undecided."""

    @field_validator("categories", mode="before")
    @classmethod
    def _check_categories(cls, value: object) -> list[str] | None:
        if value is None:
            return None
        items = value if isinstance(value, list | tuple) else None
        names = [
            name_of(item) for item in items or () if isinstance(item, str | int | float)
        ]
        if items is None or len(names) < len(items) or len(set(names)) < len(names):
            raise ValueError("a list of texts or numbers, each given once")
        return names

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        is_numeric = self.kind == "numeric"
        if is_numeric and self.categories is not None:
            raise ValueError(
                "either numeric, with a range or an indicator, or categorical, with categories"
            )
        if not is_numeric and (self.range or self.indicator):
            raise ValueError(
                "either numeric, with a range or an indicator, or categorical, with categories"
            )
        return self

    @property
    def features(self) -> list[str]:
        """Names of the features that the column becomes."""
        if self.kind == "categorical":
            return [f"{self.name}={category}" for category in self.categories or []]
        return [self.name, f"{self.name}=missing"] if self.indicator else [self.name]

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Ranges of these features; nan where none is public."""
        if self.kind == "categorical":
            return [(0.0, 1.0) for _ in self.features]
        own = self.range or (float("nan"), float("nan"))
        return [own, (0.0, 1.0)] if self.indicator else [own]


class Schema(BaseModel, extra="forbid", frozen=True):
    """What is public about a table: everything that encoding it depends on.

    Names of columns are public. `taken` lists whatever else was read off the data: kinds of columns, categories,
    classes, the task.
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
    def _check_classes(cls, value: object) -> list[int] | list[str] | None:
        if value is None:
            return None
        labels = class_labels(value) if isinstance(value, list | tuple) else []
        if len(labels) < 2 or len(set(labels)) < len(labels):
            raise ValueError(
                "a list of at least two whole numbers or at least two texts, each given once"
            )
        return labels

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if (self.classes and self.task == "regression") or (
            self.target_range and self.task == "classification"
        ):
            raise ValueError(
                "a classification where it has classes, and a regression where it has target_range"
            )
        return self


def class_labels(values: Sequence[object]) -> list[int] | list[str]:
    """Return class labels: texts and booleans by name, whole numbers as int; none of them if there is anything else."""
    names = [name_of(value) for value in values if isinstance(value, str | bool)]
    if len(names) == len(values):
        return names
    numbers = [int(value) for value in values if _is_label(value)]
    return numbers if len(numbers) == len(values) else []


def _is_label(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a whole number of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST_LABEL and (isinstance(value, int) or value.is_integer())


Document = TypeVar("Document", bound=BaseModel)


def validated(
    model: type[Document], content: Mapping[str, object], place: str = ""
) -> Document:
    """Return the document that declared content makes.

    Args:
        model: `Schema` or `Column`.
        content: what is declared, by key.
        place: what errors put before a key, such as `columns.age`.

    Raises:
        InputError: the first problem, in one sentence.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        allowed = (
            first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        )
        if first["type"] == "extra_forbidden":
            allowed = nearest_name(name, model.model_fields, "key")
        elif name.endswith("range"):
            allowed = "two finite numbers, the lower first"
        raise InputError(
            f"{place}.{name}".strip(".") or "schema", first["input"], allowed
        ) from None


def nearest_name(name: str, known: Iterable[str], what: str) -> str:
    """Return the end of an error about an unknown name: the nearest one that is known, else all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"a known {what}; did you mean {close[0]}?"
    return f"a known {what} ({listed_names(names)})"


def listed_names(names: Sequence[str]) -> str:
    """Return names with commas between them, of many the first ones and how many more there are."""
    rest = len(names) - MOST_LISTED_NAMES
    return ", ".join(names[:MOST_LISTED_NAMES]) + (
        f" and {rest} more" if rest > 0 else ""
    )


def read_declarations(path: str | Path, key: str) -> dict[str, object]:
    """Return part of a schema from a JSON file, for `make_schema`.

    Args:
        path: the file.
        key: what errors call it, such as `--schema`.

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
    """Return the whole schema that a fit has written; arguments and errors as of `read_declarations`."""
    content = read_declarations(path, key)
    try:
        return Schema.model_validate(content)
    except ValidationError:
        raise InputError(key, str(path), "a schema as `wflmc fit` wrote it") from None


def split_declarations(
    declared: Mapping[str, object],
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Return what is declared of a table, and of its columns by name; None counts as not declared.

    Raises:
        InputError: if the columns are neither an object by name nor a list of objects with names.
    """
    table = {key: value for key, value in declared.items() if value is not None}
    columns = table.pop("columns", {})
    if isinstance(columns, list) and all(
        isinstance(column, Mapping) for column in columns
    ):
        names = [column.get("name") for column in columns]
        if all(isinstance(name, str) for name in names) and len(set(names)) == len(
            names
        ):
            columns = dict(zip(names, columns, strict=True))
    if not isinstance(columns, Mapping) or not all(
        isinstance(column, Mapping) for column in columns.values()
    ):
        allowed = "an object with an object for each column, or a list of them with distinct names"
        raise InputError("columns", columns, allowed)
    by_name = {
        str(name): {key: value for key, value in column.items() if value is not None}
        for name, column in columns.items()
    }
    return table, by_name
