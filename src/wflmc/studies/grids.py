"""Grids of values, and the points they span."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import NamedTuple

from wflmc.errors import InputError

FORMS = "of the form KEY=a:b:step or KEY=v1,v2,..., such as link.snr_db=0:40:2"
MOST = 1_000_000
"""Points of a sweep."""
OPENING, CLOSING, QUOTES = "([{", ")]}", "\"'"


class Grid(NamedTuple):
    """A key and its values, as texts."""

    key: str
    values: tuple[str, ...]


def parse_grid(text: str) -> Grid:
    """A grid from `KEY=a:b:step`, both ends included, or from `KEY=v1,v2,...`.

    >>> parse_grid("link.snr_db=0:1:0.5")
    Grid(key='link.snr_db', values=('0.0', '0.5', '1.0'))
    >>> parse_grid("link.power=[0.01,0.02],0.01").values
    ('[0.01,0.02]', '0.01')
    """
    key, equals, given = text.partition("=")
    key = key.strip()
    if not (equals and key and given.strip()):
        raise InputError("--grid", text, FORMS)
    items = _split(given)
    if "" in items:
        raise InputError("--grid", text, "without empty values: " + FORMS)
    ranges = [item for item in items if ":" in item and _number(item.partition(":")[0]) is not None]
    if ranges and len(items) > 1:
        raise InputError("--grid", text, "either one range or a list of values: " + FORMS)
    values = _range(text, ranges[0]) if ranges else tuple(items)
    if len({_meaning(value) for value in values}) < len(values):
        raise InputError("--grid", text, "of values that differ")
    return Grid(key, values)


def unquoted(value: str) -> str:
    """A value without the quotation marks around it."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in QUOTES else value


def points(grids: Sequence[Grid]) -> list[tuple[str, ...]]:
    """One value per grid for every point, the first grid's slowest."""
    keys = [grid.key for grid in grids]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise InputError("--grid", twice[0], "of keys that differ")
    count = math.prod(len(grid.values) for grid in grids)
    if count > MOST:
        raise InputError("--grid", f"{count:,} points", f"at most {MOST:,}")
    return list(itertools.product(*(grid.values for grid in grids)))


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket and no quotation."""
    items, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES:
            quote = letter
        elif letter in OPENING + CLOSING:
            depth += 1 if letter in OPENING else -1
        if letter == "," and not depth and not quote:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items]


def _meaning(value: str) -> Fraction | str:
    """The same for texts of the same value."""
    number = _number(value)
    return unquoted("".join(value.split())) if number is None else number


def _number(text: str) -> Fraction | None:
    """A decimal number, exactly; one beyond those of floats is none."""
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return Fraction(number) if number.is_finite() and abs(number.adjusted()) < 308 else None


def _range(text: str, item: str) -> tuple[str, ...]:
    """a, a + step, ..., b: counted in exact arithmetic, so that no rounding adds or loses an end."""
    parts = item.split(":")
    numbers = [number for part in parts if (number := _number(part)) is not None]
    if len(parts) != 3 or len(numbers) != 3:
        raise InputError("--grid", text, "a range a:b:step of three numbers, such as link.snr_db=0:40:2")
    first, last, step = numbers
    if step == 0 or (last - first) * step < 0:
        raise InputError("--grid", text, f"a range whose step leads from {parts[0].strip()} to {parts[1].strip()}")
    steps = (last - first) / step
    if steps >= MOST:
        raise InputError("--grid", text, f"a range of at most {MOST:,} values")
    if steps.denominator != 1:
        end = _text(first + math.floor(steps) * step, False)
        raise InputError("--grid", text, f"a range that ends at {parts[1].strip()}; this one would end at {end}")
    whole = all(_is_whole(part) for part in parts)
    return tuple(_text(first + index * step, whole) for index in range(int(steps) + 1))


def _is_whole(text: str) -> bool:
    return text.strip().lstrip("+-").isdigit()


def _text(value: Fraction, whole: bool) -> str:
    return str(int(value)) if whole else repr(float(value))
