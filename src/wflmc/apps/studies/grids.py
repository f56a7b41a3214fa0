"""Grids of values, as `wflmc sweep --grid` takes them, and their points."""

import itertools
import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import NamedTuple

from wflmc.support.errors import InputError

FORMS = "of the form KEY=a:b:step or KEY=v1,v2,..., such as link.snr_db=0:40:2"
"""How a grid is written, for errors and help."""
MAX_POINTS = 1_000_000
"""Points of a sweep, and values of a range."""
MAX_DECIMAL_EXPONENT = 308
"""Of numbers that floats can hold."""
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
"""Between these a comma does not separate values."""
QUOTES = "\"'"
"""Between two of the same a comma does not separate values."""


class Grid(NamedTuple):
    """A key and its values, as texts."""

    key: str
    values: tuple[str, ...]


def parse_grid(text: str) -> Grid:
    """Return the grid of `KEY=a:b:step`, both ends included, or of `KEY=v1,v2,...`.

    Numbers are counted in decimal, so that rounding neither adds nor loses an end.
    Values of a list stay as they are typed; two that mean the same, such as 1 and 1.0,
    are refused.

    Args:
        text: as typed after `--grid`.

    Returns:
        The key and its values; range values are whole numbers where a, b and step are,
        and otherwise floats to the last digit.

    Raises:
        InputError: if the text has no such form, or a range does not reach its end.

    >>> parse_grid("link.snr_db=0:1:0.5")
    Grid(key='link.snr_db', values=('0.0', '0.5', '1.0'))
    >>> parse_grid("link.power=[0.01,0.02],0.01").values
    ('[0.01,0.02]', '0.01')
    """
    key, _, listing = text.partition("=")
    if not (key.strip() and listing.strip()):
        raise InputError("--grid", text, FORMS)
    items = _split(listing)
    if "" in items:
        raise InputError("--grid", text, "without empty values: " + FORMS)
    values = items
    if any(_is_range(item) for item in items):
        if len(items) > 1:
            raise InputError(
                "--grid", text, "either one range or a list of values: " + FORMS
            )
        values = _range_values(text, items[0])
    meanings = {_meaning(value) for value in values}
    if len(meanings) < len(values):
        raise InputError("--grid", text, "of values that differ")
    return Grid(key.strip(), tuple(values))


def unquoted(value: str) -> str:
    """Return a value without the quotation marks around it.

    Only a pair of the same marks is removed, and only one pair; other values are
    returned as they are.

    Args:
        value: of a grid.

    >>> unquoted("'x,y'")
    'x,y'
    """
    if len(value) < 2:
        return value
    is_quoted = value[0] == value[-1] and value[0] in QUOTES
    return value[1:-1] if is_quoted else value


def points(grids: Sequence[Grid]) -> list[tuple[str, ...]]:
    """Return all combinations of the values of some grids.

    Args:
        grids: at least one, with keys that differ.

    Returns:
        One value per grid for every point, in the order of the grids; the first grid
        varies most slowly.

    Raises:
        InputError: if a key is repeated, or if there are more than a million points.
    """
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
    for opening, closing in BRACKETS:
        if text.count(opening) > text.count(closing):
            return True
    return any(text.count(mark) % 2 for mark in QUOTES)


def _is_range(item: str) -> bool:
    """Return whether a value begins with a number and a colon, as a range does."""
    first, colon, _ = item.partition(":")
    return bool(colon) and _number(first) is not None


def _meaning(value: str) -> Fraction | str:
    """Return the same for texts of the same value."""
    number = _number(value)
    if number is not None:
        return number
    return unquoted("".join(value.split()))


def _number(text: str) -> Fraction | None:
    """Return a decimal number exactly.

    None for other texts, and for numbers beyond the range of floats.
    """
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    if not number.is_finite() or abs(number.adjusted()) >= MAX_DECIMAL_EXPONENT:
        return None
    return Fraction(number)


def _range_values(text: str, item: str) -> list[str]:
    """Return a, a + step, ..., b in exact arithmetic.

    Args:
        text: of the grid, for errors.
        item: a:b:step.
    """
    parts = [part.strip() for part in item.split(":")]
    first, last, step = _range_numbers(text, parts)
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
    if all(part.lstrip("+-").isdigit() for part in parts):
        return [str(int(value)) for value in values]
    return [repr(float(value)) for value in values]


def _range_numbers(
    text: str,
    parts: list[str],
) -> tuple[Fraction, Fraction, Fraction]:
    """Return the first number of a range, the last, and a step that leads there.

    Args:
        text: of the grid, for errors.
        parts: of the range, as typed.
    """
    numbers = [_number(part) for part in parts]
    finite_numbers = [number for number in numbers if number is not None]
    if len(parts) != 3 or len(finite_numbers) != 3:
        raise InputError(
            "--grid",
            text,
            "a range a:b:step of three numbers, such as link.snr_db=0:40:2",
        )
    first, last, step = finite_numbers
    if step == 0 or (last - first) * step < 0:
        raise InputError(
            "--grid", text, f"a range whose step leads from {parts[0]} to {parts[1]}"
        )
    return first, last, step
