"""The description of a table: what is declared of it, and what is read off the data.

What a schema does not declare is read off the data once, by `make_schema`, and listed
in the schema's `taken`: ε does not cover it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wflmc.apps.tables.cells import (
    CODE,
    have_equal_spellings,
    infer_kind,
    is_missing_word,
    parse_number,
    read_names,
    read_numbers,
)
from wflmc.apps.tables.encoding import complete_names, encode, outcomes
from wflmc.apps.tables.reading import UNNAMED_PREFIX, UNTYPED
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
from wflmc.posterior.inputs import MAX_CLASSES
from wflmc.support.errors import Fault, InputError

if TYPE_CHECKING:  # it is imported only where a table is used
    from pandas import DataFrame, Series

MAX_CATEGORIES = 100
"""Categories of one column that are taken from data."""
MAX_NUMERIC_CLASSES = 20
"""Different whole numbers up to which a target is taken to have classes."""
MAX_NUMBERS_FRACTION = 0.9
"""Fraction of a column's names that may be numbers if there are many names."""
FORMATTED_NUMBER = re.compile(
    r"[-+]?(\d+|\d{1,3}([,. '\xa0]\d{3})+)([.,]\d+)?([eE][-+]?\d+)?"
)
"""A number as people write it, with separators of thousands or a decimal comma."""
GAPS = "which columns have missing values"
"""What an undeclared indicator takes from the data, in the words of `taken`."""
IN_PUBLIC_ROWS = "public rows: "
"""Before the key of an error about a cell or column of public rows."""
KINDS_OF_PUBLIC_ROWS = " (kinds and gaps are those of public rows unless declared)"
TARGET_OF_PUBLIC_ROWS = (
    " (its kind and classes are those of public rows: --task and --schema say else)"
)

Declarations = Mapping[str, object]
"""What is declared, by key."""


def make_schema(
    frame: DataFrame,
    *,
    target: str | None,
    task: Task | None = None,
    device: str | None = None,
    id: str | None = None,
    missing: Missing | None = None,
    declared: Declarations | None = None,
    public: DataFrame | None = None,
) -> Schema:
    """Describe a table: as declared, and where nothing is declared as the data are.

    With public rows, columns are described as these are. So is the target, if they have
    it.

    Args:
        frame: the table, as `as_frame` returns it.
        target: the column to predict; None: as declared.
        task: classification or regression. By default classification if classes are
            declared, and regression if a target range is; else classification if the
            target is text, boolean, or at most 20 different whole numbers.
        device: the column that says which device holds a row.
        id: a column of unique values that is no feature.
        missing: "refuse", or "indicator", which fills in a constant and adds a feature
            that says where; None: as declared, else "refuse".
        declared: part of a schema as plain data, with columns by name or in a list.
            Arguments other than None take precedence.
        public: a table of public rows, as `as_frame` returns it, with the same features
            and with or without the target; it needs no device and no id.

    Returns:
        The schema. Its `taken` lists what was read off the data, and what `declared`
        has there. What was read off public rows is not among it.

    Raises:
        InputError: if a column cannot be used as it is. The sentence shows no values of
            the table.
    """
    content, of_columns = split_declarations(declared or {})
    arguments = {
        "target": target,
        "task": task,
        "device": device,
        "id": id,
        "missing": missing,
    }
    content |= {key: value for key, value in arguments.items() if value is not None}
    default_task = "classification" if "classes" in content else "regression"
    schema = validated(Schema, {"task": default_task, "columns": []} | content)
    features = _features(frame, schema)
    if public is not None:
        _check_public_columns(public, schema, features)
    for name in of_columns:
        if name not in features:
            raise InputError("columns", name, nearest_name(name, features, "feature"))
    _check_spellings([str(label) for label in schema.classes or []], "classes")
    is_labelled = public is not None and schema.target in public.columns
    with _about_public_rows(public if is_labelled else None, IN_PUBLIC_ROWS):
        labelled = public if is_labelled and public is not None else frame
        if not {"task", "classes", "target_range"} & content.keys():
            schema = _with_inferred_task(labelled, schema)
        if schema.task == "classification" and schema.classes is None:
            schema = _with_inferred_classes(labelled, schema)
        if is_labelled:
            schema = _with_taken(schema, content)
    if public is not None:
        _check_public_kinds(frame, public, features, of_columns)
    with _about_public_rows(public, IN_PUBLIC_ROWS):
        described = frame if public is None else public
        read = _with_columns(described, schema, features, of_columns)
        schema = read if public is None else _with_taken(read, schema.model_dump())
        # Called for their errors: a cell that does not fit is refused here.
        encode(described, schema)
    if is_labelled:
        with _about_public_rows(public, IN_PUBLIC_ROWS):
            outcomes(labelled, schema)
    with _about_public_rows(public, reason=KINDS_OF_PUBLIC_ROWS):
        encode(frame, schema)
    has_declared_target = bool({"classes", "task"} & content.keys())
    describes_target = is_labelled and not has_declared_target
    with _about_public_rows(
        public if describes_target else None, reason=TARGET_OF_PUBLIC_ROWS
    ):
        outcomes(frame, schema)
    return schema


@contextmanager
def _about_public_rows(
    public: DataFrame | None, prefix: str = "", reason: str = ""
) -> Iterator[None]:
    """Let errors say what public rows have to do with them.

    Args:
        public: the rows; None leaves errors as they are.
        prefix: put before the key.
        reason: put behind the requirement.

    Yields:
        Nothing, while an `InputError` raised inside gets these words.

    Raises:
        InputError: the one raised inside.
    """
    try:
        yield
    except InputError as error:
        if public is None:
            raise
        key = f"{prefix}{error.key}"
        requirement = f"{error.requirement}{reason}"
        raise InputError(key, error.value, requirement) from None


def _check_public_columns(
    public: DataFrame, schema: Schema, features: Sequence[str]
) -> None:
    """Refuse public rows whose features are not those of the table.

    A column that the table lacks is refused too: it may be a target with a wrong name.
    """
    absent = [name for name in features if name not in public.columns]
    if absent:
        problem = f"has no column {listed_names([repr(name) for name in absent])}"
        requirement = "a table with all features of the private one"
        raise InputError("public", Fault(problem), requirement)
    roles = (schema.target, schema.device, schema.id)
    expected = {*features, *roles}
    unknown = [name for name in public.columns if name not in expected]
    if unknown:
        names = listed_names([repr(name) for name in unknown])
        problem = f"has a column that the private table lacks: {names}"
        requirement = "a table with the same columns, by name"
        raise InputError("public", Fault(problem), requirement)


def _check_public_kinds(
    frame: DataFrame,
    public: DataFrame,
    features: Sequence[str],
    of_columns: Mapping[str, Declarations],
) -> None:
    """Refuse names in a column of one table and numbers in that of the other.

    Of public names none of the numbers would be a category, so that the column would be
    lost; and codes, as names that look like numbers, are no magnitudes.

    Args:
        frame: the private table.
        public: the public one.
        features: names of the columns of features.
        of_columns: what is declared of some of them.
    """
    for name in features:
        if _declared_kind(of_columns.get(name, {})) is not None:
            continue
        key = f"column {name!r}"
        with _about_public_rows(public, IN_PUBLIC_ROWS):
            described = infer_kind(public[name], key, is_typed=_is_typed(public))
        private = infer_kind(frame[name], key, is_typed=_is_typed(frame))
        if (described.kind == "numeric") == (private.kind == "numeric"):
            continue
        kinds = ("numbers", "names")
        if private.kind != "numeric":
            kinds = ("names", "numbers")
        problem = f"has {kinds[0]} in the table and {kinds[1]} among public rows"
        requirement = "of one kind in both, or declared in the schema"
        raise InputError(key, Fault(problem), requirement)


def _with_taken(schema: Schema, content: Mapping[str, object]) -> Schema:
    """Return a schema whose `taken` is that of another one, or of declarations."""
    return schema.model_copy(update={"taken": content.get("taken", [])})


def _with_inferred_task(frame: DataFrame, schema: Schema) -> Schema:
    """Return a schema with the task that its target suggests."""
    task = _infer_task(frame, str(schema.target))
    return schema.model_copy(update={"task": task, "taken": [*schema.taken, "task"]})


def _with_inferred_classes(frame: DataFrame, schema: Schema) -> Schema:
    """Return a schema with the labels that its target has."""
    classes = _infer_classes(frame, str(schema.target))
    taken = [*schema.taken, "classes"]
    return schema.model_copy(update={"classes": classes, "taken": taken})


def _with_columns(
    frame: DataFrame,
    schema: Schema,
    features: Sequence[str],
    of_columns: Mapping[str, Declarations],
) -> Schema:
    """Return a schema with a description of every column of features.

    Args:
        frame: the table.
        schema: without columns.
        features: the names of the columns.
        of_columns: what is declared of some of them.
    """
    declarations = [of_columns.get(name, {}) for name in features]
    taken = list(schema.taken)
    undeclared = [
        name
        for name, declared in zip(features, declarations, strict=True)
        if _declared_kind(declared) is None
    ]
    if undeclared:
        taken.append(f"kinds of columns: {listed_names(undeclared)}")
    columns = []
    for name, declared in zip(features, declarations, strict=True):
        described = _describe(frame, name, declared, schema)
        columns.append(described.column)
        taken += described.taken
    distinct_taken = list(dict.fromkeys(taken))
    return schema.model_copy(update={"columns": columns, "taken": distinct_taken})


def _check_spellings(names: Sequence[str], key: str) -> None:
    """Refuse declared names of which a library may write one for another.

    Args:
        names: classes or categories.
        key: what errors call them.

    Raises:
        InputError: if two names are one number or boolean, such as 1, 1.0 and True.
    """
    if have_equal_spellings(names):
        equal = "names that are the same number, such as 1, 1.0 and True"
        requirement = f"without {equal} (codes such as 01 may differ)"
        raise InputError(key, Fault("has a number twice"), requirement)


def _features(frame: DataFrame, schema: Schema) -> list[str]:
    """Return the names of the columns that are features.

    The columns that are none are checked on the way.
    """
    roles = {"target": schema.target, "device": schema.device, "id": schema.id}
    if schema.target is None:
        raise InputError("target", None, "given, as the column to predict")
    if schema.target in (schema.device, schema.id):
        requirement = "a column that is neither the device nor the id"
        raise InputError("target", schema.target, requirement)
    for role, name in roles.items():
        if name is not None:
            listed = schema.classes if role == "target" else None
            complete_names(frame, name, role, listed=listed)
    _check_unique_id(frame, schema.id)
    features = [name for name in frame.columns if name not in roles.values()]
    unnamed = [name for name in features if name.startswith(UNNAMED_PREFIX)]
    if unnamed:  # mostly row numbers, which tell the target of a sorted table
        problem = "has no name in the table"
        requirement = "named, dropped or given as --id"
        raise InputError(f"column {unnamed[0]!r}", Fault(problem), requirement)
    if not features:
        requirement = "a table with a column besides target, device and id"
        raise InputError("table", Fault("has no features"), requirement)
    return features


def _check_unique_id(frame: DataFrame, name: str | None) -> None:
    """Refuse a column of ids in which one value stands twice."""
    if name is None or not frame[name].duplicated().any():
        return
    reason = "since epsilon hides one row and someone with two rows is hidden less"
    requirement = f"unique, {reason} (or --device {name} --unit device)"
    raise InputError(f"id {name!r}", Fault("has repeated values"), requirement)


def _is_typed(frame: DataFrame) -> bool:
    """Return whether the types of a frame's columns are statements of its author."""
    return not frame.attrs.get(UNTYPED, False)


def _infer_task(frame: DataFrame, target: str) -> Task:
    """Return the task that all values of a target suggest together."""
    key = f"target {target!r}"
    inferred = infer_kind(frame[target], key, is_typed=_is_typed(frame))
    if inferred.kind == "categorical" or inferred.is_boolean:
        return "classification"
    values = np.unique(read_numbers(frame[target], key))
    is_whole = not np.any(values % 1)
    has_classes = is_whole and len(values) <= MAX_NUMERIC_CLASSES
    return "classification" if has_classes else "regression"


def _infer_classes(frame: DataFrame, target: str) -> list[int] | list[str]:
    """Return the sorted labels that a target has: whole numbers, or text."""
    key = f"target {target!r}"
    inferred = infer_kind(frame[target], key, is_typed=_is_typed(frame))
    names = set(complete_names(frame, target, "target"))
    labels: list[int] | list[str] = sorted(names)
    if inferred.is_boolean:
        labels = sorted({str(parse_number(name) == 1) for name in names})
    elif inferred.kind == "numeric":
        numbers = {parse_number(name) for name in names}
        labels = class_labels(list(numbers))
        labels.sort()
    if len(labels) == 1:
        requirement = "a column of at least two classes"
        raise InputError(key, Fault("has one class only"), requirement)
    if not 2 <= len(labels) <= MAX_CLASSES:
        problem = "has too many classes" if labels else "has no class labels"
        kinds = "a column of whole numbers or text"
        requirement = f"{kinds}, of at most {MAX_CLASSES} classes"
        raise InputError(key, Fault(problem), requirement)
    return labels


def _declared_kind(declared: Declarations) -> object:
    """Return the kind that is declared of a column, or that follows from what is.

    None if nothing says it.
    """
    if "kind" in declared:
        return declared["kind"]
    if "range" in declared or declared.get("indicator"):
        return "numeric"
    return "categorical" if "categories" in declared else None


class _DescribedColumn(NamedTuple):
    """A column, and what of it was read off the data.

    Args:
        column: its description.
        taken: what was read off, in the words of `Schema.taken`.
    """

    column: Column
    taken: list[str]


def _describe(
    frame: DataFrame, name: str, declared: Declarations, schema: Schema
) -> _DescribedColumn:
    """Return a column as declared, and from the data what is not declared."""
    series = frame[name]
    key = f"column {name!r}"
    kind = _declared_kind(declared)
    update: dict[str, object] = {}
    taken = []
    if kind is None:
        inferred = infer_kind(series, key, is_typed=_is_typed(frame))
        kind = inferred.kind
        if inferred.is_boolean:
            update["range"] = (0.0, 1.0)
            taken.append(f"range of {name}")
    content = {**declared, "kind": kind, "name": name}
    column = validated(Column, content, f"columns.{name}")
    _check_spellings(column.categories or [], f"columns.{name}.categories")
    if column.kind == "categorical":
        if column.categories is None:
            is_declared = "kind" in declared
            categories = _infer_categories(series, key, is_declared=is_declared)
            update["categories"] = categories
            taken.append(f"categories of {name}")
    elif column.indicator is None and schema.missing == "indicator":
        update["indicator"] = bool(np.isnan(read_numbers(series, key)).any())
        taken.append(GAPS)
    return _DescribedColumn(column.model_copy(update=update), taken)


def _infer_categories(series: Series, key: str, *, is_declared: bool) -> list[str]:
    """Return the sorted names that a column has.

    Args:
        series: the column.
        key: what errors call it.
        is_declared: whether it was declared categorical, so that its names may look
            like numbers.
    """
    names = {name for name in read_names(series, key) if name is not None}
    categories = sorted(name for name in names if not is_missing_word(name))
    if not categories:
        requirement = "dropped, or declared with its categories"
        raise InputError(key, Fault("has no values"), requirement)
    declaration = "declared categorical with its categories in the schema"
    advice = f"dropped, given as --id, or {declaration}"
    numbers = sum(_is_formatted_number(text.strip()) for text in categories)
    is_numeric = numbers > MAX_NUMBERS_FRACTION * len(categories)
    if not is_declared and len(categories) > MAX_NUMERIC_CLASSES and is_numeric:
        problem = "has numbers written as text"
        requirement = f"written with a decimal point, or {advice}"
        raise InputError(key, Fault(problem), requirement)
    if len(categories) > MAX_CATEGORIES:
        problem = f"has more than {MAX_CATEGORIES} different values"
        raise InputError(key, Fault(problem), advice)
    return categories


def _is_formatted_number(text: str) -> bool:
    """Return whether a text is a number as people write it, and no code."""
    return FORMATTED_NUMBER.fullmatch(text) is not None and CODE.fullmatch(text) is None
