"""Rows of a table as numbers: features, outcomes, and the devices that hold them.

Given a schema, every row is encoded by itself: no row changes how another one is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.apps.tables.cells import (
    MISSING,
    NOT_LISTED,
    NameIndex,
    check_unambiguous,
    is_missing_word,
    parse_number,
    read_names,
    read_numbers,
)
from wflmc.apps.tables.schema import Column, Schema, nearest_name
from wflmc.posterior.inputs import check_counts
from wflmc.support.errors import Fault, InputError, conflict, without_data

if TYPE_CHECKING:  # it is imported only where a table is used
    from pandas import DataFrame, Series


@without_data
class EncodedTable(NamedTuple):
    """A table as features.

    Args:
        X: features of every row, [N, d].
        ranges: their public lowest and highest values, [d, 2]; nan where not public.
        names: of the features.
    """

    X: NDArray[np.float64]
    ranges: NDArray[np.float64]
    names: list[str]


def encode(frame: DataFrame, schema: Schema) -> EncodedTable:
    """Encode a table as features; nothing but the schema decides how.

    A numeric column is one feature, followed by an indicator of missing values where it
    may have them. A categorical one is a feature for each category, all 0 where the
    value is missing or in none of them. Other columns are ignored.

    Args:
        frame: the table, as `as_frame` returns it; it needs no target.
        schema: as `make_schema` returns it.

    Returns:
        The features, their public ranges and their names. Values outside their range
        are not clipped. A row of X depends on that row of the table and on the schema
        alone.

    Raises:
        InputError: if a column is absent, a cell is not of its column's kind, a value
            is missing where the schema has no feature for it, or a number may be
            several of a column's categories.
    """
    columns = schema.columns
    absent = [column.name for column in columns if column.name not in frame.columns]
    if absent:
        problem = f"has no column {', '.join(map(repr, absent))}"
        requirement = "a table with all columns of the schema"
        raise InputError("table", Fault(problem), requirement)
    blocks = [_encode_column(frame[column.name], column, schema) for column in columns]
    ranges = [bounds for column in columns for bounds in column.ranges]
    names = [name for column in columns for name in column.features]
    return EncodedTable(np.hstack(blocks, dtype=float), np.array(ranges), names)


def _encode_column(
    series: Series, column: Column, schema: Schema
) -> NDArray[np.float64]:
    """Return the features[N, …] of one column."""
    if column.kind == "categorical":
        indices = _category_indices(series, column)
        _check_missing(indices == MISSING, column, schema)
        categories = np.arange(len(column.categories or []))
        return (indices[:, None] == categories).astype(float)
    values = read_numbers(series, f"column {column.name!r}")
    missing = np.isnan(values)
    _check_missing(missing, column, schema)
    filled = np.where(missing, schema.fill, values)
    features = np.column_stack([filled, missing])
    return features[:, : len(column.features)]


def _category_indices(series: Series, column: Column) -> NDArray[np.intp]:
    """Return the index of every cell among the categories of its column, [N]."""
    key = f"column {column.name!r}"
    categories = column.categories or []
    names = read_names(series, key)
    check_unambiguous(series, categories, key)
    return NameIndex(categories).indices_of(names)


def _check_missing(missing: NDArray[np.bool_], column: Column, schema: Schema) -> None:
    """Refuse missing values that the schema has no feature for.

    Args:
        missing: which cells are, [N].
        column: theirs.
        schema: of the table.
    """
    is_categorical = column.kind == "categorical"
    is_indicated = schema.missing == "indicator"
    is_allowed = column.indicator or (is_categorical and is_indicated)
    if is_allowed or not missing.any():
        return
    if is_indicated:
        requirement = "complete, as it was at the fit or as it was declared"
    else:
        option = "wflmc fit --missing indicator"
        hint = f"{option} fills in a constant and adds a column that says where"
        if is_categorical:
            words = "a name such as NA or None counts as missing"
            hint += f"; {words} unless it is declared as a category"
        requirement = f"complete ({hint})"
    problem = "has missing values"
    raise InputError(f"column {column.name!r}", Fault(problem), requirement)


def outcomes(frame: DataFrame, schema: Schema) -> np.ndarray:
    """Return the target of every row.

    Args:
        frame: the table, as `as_frame` returns it.
        schema: names the target, and its classes where there are any.

    Returns:
        Labels as they stand in `schema.classes`, or float64 for a regression, [N].

    Raises:
        InputError: if there is no such column, if the target is missing in a row, or if
            it is none of the classes or, in a regression, no finite number.
    """
    target = str(schema.target)
    key = f"target {schema.target!r}"
    names = complete_names(frame, target, "target", listed=schema.classes)
    if schema.task == "regression":
        return read_numbers(frame[target], key)
    classes = schema.classes or []
    labels = [str(label) for label in classes]
    check_unambiguous(frame[target], labels, key)
    indices = NameIndex(labels).indices_of(names)
    if np.any(indices < 0):
        problem = "has a label outside the classes"
        requirement = "labelled by the classes of the schema"
        raise InputError(key, Fault(problem), requirement)
    return np.asarray(classes)[indices]


def complete_names(
    frame: DataFrame,
    name: str,
    role: str,
    listed: Sequence[int | str] | None = None,
) -> list[str]:
    """Return the names in a column that is no feature, where none may be missing.

    Args:
        frame: the table.
        name: the column.
        role: target, device or id, by which errors call the column.
        listed: public names, which are never missing values, whatever they look like.

    Returns:
        The name of every row, [N].

    Raises:
        InputError: if there is no such column, a value is missing or cannot be read.
    """
    if name not in frame.columns:
        raise InputError(role, name, nearest_name(name, frame.columns, "column"))
    key = f"{role} {name!r}"
    never_missing = {str(label) for label in listed or ()}
    names = []
    for text in read_names(frame[name], key):
        is_name = text in never_missing
        if text is None or (is_missing_word(text) and not is_name):
            requirement = "complete: leave out such rows"
            raise InputError(key, Fault("has missing values"), requirement)
        names.append(text)
    return names


def owners(
    frame: DataFrame,
    schema: Schema,
    devices: int | None,
    generator: np.random.Generator,
) -> NDArray[np.intp]:
    """Return the device that holds each row.

    A device column decides, whatever its values. Without one, rows are dealt out
    equally and at random, which depends on their number alone.

    Args:
        frame: the table, as `as_frame` returns it.
        schema: its device column decides where there is one.
        devices: else the number of devices; None is one device.
        generator: deals out the rows.

    Returns:
        The number of a device, 0 to K − 1, for every row, [N].

    Raises:
        InputError: if there are both a device column and a number of devices, if a row
            has no device, or if the number is not a whole one from 1 to that of the
            rows.
    """
    if schema.device is not None:
        if devices is not None:
            raise conflict("devices", devices, "beside a device column")
        names = complete_names(frame, schema.device, "device")
        distinct_names = device_names(frame, schema)
        number_of = {name: number for number, name in enumerate(distinct_names)}
        return np.array([number_of[name] for name in names], dtype=np.intp)
    if devices is None:
        return np.zeros(len(frame), np.intp)
    check_counts(devices=devices)
    if devices > len(frame):
        raise InputError("devices", devices, "at most the number of rows")
    return generator.permutation(np.arange(len(frame), dtype=np.intp) % devices)


def device_names(frame: DataFrame, schema: Schema) -> list[str]:
    """Return the distinct names in the device column, in the order of the devices.

    Args:
        frame: the table, as `as_frame` returns it.
        schema: one with a device column.

    Returns:
        The names, [K]: by number where all of them are numbers, else sorted as text.

    Raises:
        InputError: if a device is missing.
    """
    names = sorted(set(complete_names(frame, str(schema.device), "device")))
    numbers = [parse_number(name) for name in names]
    known_numbers = [number for number in numbers if number is not None]
    if len(known_numbers) < len(names):
        return names
    number_of = dict(zip(names, known_numbers, strict=True))
    return sorted(names, key=number_of.__getitem__)


def unknown_categories(frame: DataFrame, schema: Schema) -> list[str]:
    """Return the categorical columns with a value that is none of their categories.

    Such a value is encoded as 0 in every feature of its column. Missing values do not
    count.

    Args:
        frame: the table, as `as_frame` returns it, with all columns of the schema.
        schema: as `make_schema` returns it.

    Returns:
        The names of these columns, in the order of the schema.

    Raises:
        InputError: if a cell cannot be read.
    """
    unknown = []
    for column in schema.columns:
        if column.kind != "categorical":
            continue
        indices = _category_indices(frame[column.name], column)
        if np.any(indices == NOT_LISTED):
            unknown.append(column.name)
    return unknown
