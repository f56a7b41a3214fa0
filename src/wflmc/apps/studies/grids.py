"""Grids of values, as `wflmc sweep --grid` takes them, and the points that they span."""

import itertools
import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import NamedTuple

from wflmc.support.errors import InputError

FORMS = "of the form KEY=a:b:step or KEY=v1,v2,..., such as link.snr_db=0:40:2"
MAX_POINTS = 1_000_000
BRACKETS, QUOTES = (("(", ")"), ("[", "]"), ("{", "}")), "\"'"


class Grid(NamedTuple):
    """A key and its values, as texts."""

    key: str
    values: tuple[str, ...]


def parse_grid(text: str) -> Grid:
    """Return the grid of `KEY=a:b:step`, both ends included, or of `KEY=v1,v2,...`.

    >>> parse_grid("link.snr_db=0:1:0.5")
    Grid(key='link.snr_db', values=('0.0', '0.5', '1.0'))
    >>> parse_grid("link.power=[0.01,0.02],0.01").values
    ('[0.01,0.02]', '0.01')
    """
    key, _, given = text.partition("=")
    if not (key.strip() and given.strip()):
        raise InputError("--grid", text, FORMS)
    items = _split(given)
    if "" in items:
        raise InputError("--grid", text, "without empty values: " + FORMS)
    ranges = [
        item
        for item in items
        if ":" in item and _number(item.partition(":")[0]) is not None
    ]
    if ranges and len(items) > 1:
        raise InputError(
            "--grid", text, "either one range or a list of values: " + FORMS
        )
    values = _range(text, ranges[0]) if ranges else items
    if len({_meaning(value) for value in values}) < len(values):
        raise InputError("--grid", text, "of values that differ")
    return Grid(key.strip(), tuple(values))


def unquoted(value: str) -> str:
    """Return a value without the quotation marks around it."""
    return (
        value[1:-1]
        if len(value) > 1 and value[0] == value[-1] and value[0] in QUOTES
        else value
    )


def points(grids: Sequence[Grid]) -> list[tuple[str, ...]]:
    """Return one value per grid for every point; the first grid varies most slowly."""
    keys = [grid.key for grid in grids]
    repeated = [key for key in keys if keys.count(key) > 1]
    if repeated:
        raise InputError("--grid", repeated[0], "of keys that differ")
    count = math.prod(len(grid.values) for grid in grids)
    if count > MAX_POINTS:
        raise InputError("--grid", f"{count:,} points", f"at most {MAX_POINTS:,}")
    return list(itertools.product(*(grid.values for grid in grids)))


def _split(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotation marks."""
    items: list[str] = []
    for part in text.split(","):
        if items and _is_open(items[-1]):
            items[-1] += f",{part}"
        else:
            items.append(part)
    return [item.strip() for item in items]


def _is_open(text: str) -> bool:
    """Return whether a bracket or a quotation mark of a text is not closed."""
    return any(text.count(a) > text.count(b) for a, b in BRACKETS) or any(
        text.count(mark) % 2 for mark in QUOTES
    )


def _meaning(value: str) -> Fraction | str:
    """Return the same for texts of the same value."""
    number = _number(value)
    return unquoted("".join(value.split())) if number is None else number


def _number(text: str) -> Fraction | None:
    """Return a decimal number exactly; None for other texts and for numbers beyond the range of floats."""
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return (
        Fraction(number)
        if number.is_finite() and abs(number.adjusted()) < 308
        else None
    )


def _range(text: str, item: str) -> list[str]:
    """Return a, a + step, ..., b, in exact arithmetic, so that rounding neither adds nor loses an end."""
    parts = [part.strip() for part in item.split(":")]
    numbers = [number for part in parts if (number := _number(part)) is not None]
    if len(parts) != 3 or len(numbers) != 3:
        raise InputError(
            "--grid",
            text,
            "a range a:b:step of three numbers, such as link.snr_db=0:40:2",
        )
    first, last, step = numbers
    if step == 0 or (last - first) * step < 0:
        raise InputError(
            "--grid", text, f"a range whose step leads from {parts[0]} to {parts[1]}"
        )
    steps = (last - first) / step
    if steps >= MAX_POINTS:
        raise InputError("--grid", text, f"a range of at most {MAX_POINTS:,} values")
    if steps.denominator != 1:
        end = float(first + math.floor(steps) * step)
        raise InputError(
            "--grid",
            text,
            f"a range that ends at {parts[1]}; this one would end at {end}",
        )
    values = [first + index * step for index in range(int(steps) + 1)]
    whole = all(part.lstrip("+-").isdigit() for part in parts)
    return [str(int(value)) if whole else repr(float(value)) for value in values]
