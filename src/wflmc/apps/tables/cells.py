"""How one cell of a table is read: by the kind of its column, and by nothing else.

Every cell is read by itself, so that no row decides how another one is read: otherwise
ε would not hide a row. A value may be stored in many ways (text of a CSV, an integer
that became a float beside a gap, a decimal, a category). It is read alike in all of
them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.support.delimited import parse_float
from wflmc.support.errors import Fault, InputError

if TYPE_CHECKING:  # it is imported only where a table is used
    from pandas import Series

Cell = str | bool | int | float | Decimal
"""The value of a cell that is not missing."""
Kind = Literal["numeric", "categorical"]
"""What the cells of a column are: numbers to calculate with, or names to tell apart."""
CellLook = Literal["missing", "boolean", "number", "name"]
"""What one cell looks like as long as nothing declares the kind of its column."""

MISSING_WORDS = frozenset(
    [
        "",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
        "NULL",
        "NaN",
        "None",
        "n/a",
        "nan",
        "null",
    ]
)
"""Texts that stand for a missing value unless they are declared as a category.

The list is that of pandas.
"""
BOOLEAN_WORDS = {"true": True, "false": False}
"""Texts that stand for a boolean, in upper or lower case."""
WHOLE_NUMBER = re.compile(r"([-+]?)0*(\d+)", re.ASCII)
"""A whole number as text: its sign, and its digits without leading zeros."""
FLOAT = re.compile(
    r"[-+]?(\d+\.\d*|\.\d+|\d+[eE][-+]?\d+|\d+\.\d*[eE][-+]?\d+|\.\d+[eE][-+]?\d+)",
    re.ASCII,
)
"""A number as text with a decimal point or an exponent, as floats are written."""
CODE = re.compile(r"[-+]?0\d+", re.ASCII)
"""Digits after a leading zero, such as those of a postal code: a name, no number."""
SMALLEST_INEXACT_WHOLE = 2**53
"""Below this size a whole float64 is one whole number; 2⁵³ may have been 2⁵³ + 1."""
MAX_INTEGER_BITS = 4096
"""Size of the largest integer that has a name.

Python writes no integer of more than 4300 digits.
"""
NOT_LISTED = -1
"""Index of a name that is none of the public ones."""
MISSING = -2
"""Index of a cell that is missing."""


def is_missing_word(text: str) -> bool:
    """Return whether a text stands for a missing value.

    Args:
        text: a cell; spaces around the word do not count.

    Returns:
        Whether it is empty or one of `MISSING_WORDS`, in exactly that spelling. A word
        that is declared as a category or class has to be recognized before.
    """
    return text.strip() in MISSING_WORDS


def parse_number(text: str) -> float | None:
    """Return the number that a text stands for, a boolean as 0 or 1.

    A number has ASCII digits and a decimal point, and no separators; the words inf and
    infinity count as numbers.

    Args:
        text: a cell; spaces around the number or the boolean do not count.

    Returns:
        The nearest float64, infinity beyond the largest one; None where the text is
        neither a number nor a boolean.

    >>> parse_number(" 1e3"), parse_number("+.5"), parse_number("TRUE")
    (1000.0, 0.5, 1.0)
    >>> parse_number("1,000"), parse_number("1_000")
    (None, None)
    """
    number = parse_float(text)
    if number is not None:
        return number
    boolean = BOOLEAN_WORDS.get(text.strip().lower())
    return None if boolean is None else float(boolean)


def plain_form(name: str) -> str:
    """Return what all spellings of a number have in common.

    Leading zeros, a plus sign and a decimal point without need are dropped; booleans
    are 0 and 1. By their plain forms two libraries agree on a number that each of them
    writes in its own way.

    Args:
        name: of a category, a class or a device.

    Returns:
        The plain form; any name that is no number as it is.

    >>> [plain_form(name) for name in ("01067", "+1.0", "1e3", "0.50", "TRUE", "a")]
    ['1067', '1', '1000', '0.5', '1', 'a']
    """
    stripped = name.strip()
    whole_number = WHOLE_NUMBER.fullmatch(stripped)
    if whole_number:
        sign, digits = whole_number.groups()
        is_negative = sign == "-" and digits != "0"
        return f"-{digits}" if is_negative else digits
    number = parse_number(stripped)
    return name if number is None else _name_of_float(number)


def name_of(cell: Cell) -> str:
    """Return the name that a cell is in a column of names.

    Args:
        cell: a value as Python has it; not missing.

    Returns:
        Text as it stands, and a number in its plain form, so that a whole number has
        one name whether it is stored as an integer, a float or a decimal. Booleans are
        True and False.

    >>> [name_of(cell) for cell in ("01067", 1.0, 1, True, Decimal("0.50"))]
    ['01067', '1', '1', 'True', '0.5']
    """
    if isinstance(cell, str):
        return cell
    if isinstance(cell, float):
        return _name_of_float(cell)
    if isinstance(cell, Decimal):
        return plain_form(str(cell))
    return str(cell)


def _name_of_float(number: float) -> str:
    """Return the name of a number, the same for a whole one as for that integer."""
    is_exact = number.is_integer() and abs(number) < SMALLEST_INEXACT_WHOLE
    return str(int(number)) if is_exact else repr(number)


def is_library_spelling(name: str) -> bool:
    """Return whether a library may write a number or a boolean like this.

    It may then write it in another way because of another row: 1 as 1.0 beside a
    missing value, True as true.

    Args:
        name: a category or class, as it is declared or as it stands in a cell.

    Returns:
        Whether it is a number or boolean without a plus sign and without leading zeros,
        which people write but libraries do not.

    >>> [is_library_spelling(name) for name in ("1", "1.0", "1e-05", "true")]
    [True, True, True, True]
    >>> [is_library_spelling(name) for name in ("+1", "01", "a")]
    [False, False, False]
    """
    is_number = parse_number(name) is not None
    return is_number and not name.startswith("+") and CODE.fullmatch(name) is None


def have_equal_spellings(names: Sequence[str]) -> bool:
    """Return whether two names are one number or boolean, written by two libraries.

    Such names must not be declared together: which of them a cell holds would depend
    on the other rows of its column.

    Args:
        names: distinct categories or classes.

    Returns:
        Whether two names that libraries may have written have one plain form, such as
        1, 1.0 and True. Codes such as 01 do not count: no library writes them.
    """
    forms = [plain_form(name) for name in names if is_library_spelling(name)]
    return len(set(forms)) < len(forms)


class NameIndex:
    """Public names, and the index that a cell's name has among them.

    A name is looked up as it is spelled, then by its plain form: 1.0 finds 1, and 1067
    finds 01067, unless two of the public names have this form. What a library may have
    written finds the one name that it may also have written: 1 finds 1.0 beside +1. A
    text such as NA is a missing value unless it is one of the public names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Index distinct names by 0, 1, … in their order."""
        self._by_spelling = {name: index for index, name in enumerate(names)}
        self._by_form = _by_unique_form(self._by_spelling)
        library_spellings = {
            name: index
            for name, index in self._by_spelling.items()
            if is_library_spelling(name)
        }
        self._by_library_form = _by_unique_form(library_spellings)

    def index_of(self, name: str | None) -> int:
        """Return the index of a name among the public ones.

        Args:
            name: of a cell, as `read_names` returns it; None where it is missing.

        Returns:
            The index, `NOT_LISTED` for a name that finds none of them, or `MISSING` for
            None and for a word such as NA that is not among them.
        """
        if name is None:
            return MISSING
        exact_index = self._by_spelling.get(name)
        if exact_index is not None:
            return exact_index
        if is_missing_word(name):
            return MISSING
        form = plain_form(name)
        if is_library_spelling(name) and form in self._by_library_form:
            return self._by_library_form[form]
        return self._by_form.get(form, NOT_LISTED)

    def indices_of(self, names: Iterable[str | None]) -> NDArray[np.intp]:
        """Return the index of every name of a column.

        Args:
            names: of the cells; None where one is missing.

        Returns:
            What `index_of` returns for each of them, [N].
        """
        listed = list(names)
        index_of_name = {name: self.index_of(name) for name in set(listed)}
        return np.array([index_of_name[name] for name in listed], dtype=np.intp)


def _by_unique_form(index_of_name: Mapping[str, int]) -> dict[str, int]:
    """Return indices by the plain forms of their names, without those of several."""
    forms = [plain_form(name) for name in index_of_name]
    occurrences = Counter(forms)
    index_of_form = dict(zip(forms, index_of_name.values(), strict=True))
    return {
        form: index for form, index in index_of_form.items() if occurrences[form] == 1
    }


def check_unambiguous(series: Series, names: Sequence[str], key: str) -> None:
    """Refuse numbers in a column of names if they may be several of its names.

    A library keeps the codes 1 and 01 as text where another row of the column is text,
    and reads both as the number 1 where all rows are numbers. Text is never ambiguous,
    and neither is a number that is the plain form of one name only.

    Args:
        series: a column.
        names: its public names.
        key: what errors call the column.

    Raises:
        InputError: if a cell is stored as a number, and several names are this number.
    """
    occurrences = Counter(map(plain_form, names))
    ambiguous_forms = {form for form, count in occurrences.items() if count > 1}
    if not ambiguous_forms:
        return
    for cell in read_cells(series, key):
        if cell is None or isinstance(cell, str):
            continue
        if plain_form(name_of(cell)) in ambiguous_forms:
            problem = "has numbers that several of its public names stand for"
            raise InputError(key, Fault(problem), "stored as text")


def read_cells(series: Series, key: str) -> list[Cell | None]:
    """Return the values of a column as Python objects.

    Args:
        series: a column, however it is stored.
        key: what errors call the column.

    Returns:
        The cells, [N]; None where one is missing. Text stays text: a word such as NA is
        not looked at here.

    Raises:
        InputError: if a cell is neither text, a number nor a boolean; or if a float may
            have lost digits (see `_check_exact`).
    """
    values = series.tolist()
    if all(type(value) is str for value in values):
        return values
    try:
        missing = series.isna()
    except ArithmeticError:  # a decimal that signals that it is no number
        problem = "has values that are not numbers"
        requirement = "a column of numbers or text"
        raise InputError(key, Fault(problem), requirement) from None
    cells: list[Cell | None] = []
    for value, is_missing in zip(values, missing, strict=True):
        cell = value.item() if isinstance(value, np.generic) else value
        if is_missing:
            cells.append(None)
        elif isinstance(cell, str | bool | int | float | Decimal):
            cells.append(cell)
        else:
            is_mixed = series.dtype == object
            stored_type = type(cell).__name__ if is_mixed else str(series.dtype)
            problem = f"has values of type {stored_type}"
            raise InputError(key, Fault(problem), "a column of numbers or text")
    floats = [cell for cell in cells if isinstance(cell, float)]
    _check_exact(np.asarray(floats, dtype=float), key)
    return cells


def read_names(series: Series, key: str) -> list[str | None]:
    """Return the name of every cell of a column, as `name_of` has it.

    Args:
        series: a column, however it is stored.
        key: what errors call the column.

    Returns:
        The names, [N]; None where a cell is missing. A text such as NA is a name here.

    Raises:
        InputError: as of `read_cells`; if an integer has more digits than Python
            writes; or if a text is a float that may have lost digits.
    """
    if _stored_kind(series) == "f":
        # Narrower floats lose the digits of smaller whole numbers.
        precision = np.finfo(f"f{series.dtype.itemsize}").nmant + 1
        numbers = series.to_numpy(dtype=float, na_value=np.nan)
        _check_exact(numbers, key, smallest_inexact=2.0**precision)
    cells = read_cells(series, key)
    for cell in cells:
        if isinstance(cell, int) and cell.bit_length() > MAX_INTEGER_BITS:
            problem = "has integers of too many digits"
            raise InputError(key, Fault(problem), "stored as text")
    names = [None if cell is None else name_of(cell) for cell in cells]
    float_names = [name for name in names if name and FLOAT.fullmatch(name.strip())]
    _check_exact(np.array(float_names, dtype=float), key)
    return names


def read_numbers(series: Series, key: str) -> NDArray[np.float64]:
    """Return the number of every cell of a column.

    Args:
        series: a column, however it is stored; text is read by `parse_number`.
        key: what errors call the column.

    Returns:
        The nearest float64 of each cell, [N]; nan where one is missing, 0.0 for -0.0.

    Raises:
        InputError: if a cell is not a finite number, or if a float may have lost digits
            (see `_check_exact`).
    """
    stored_kind = _stored_kind(series)
    if stored_kind in "biuf":
        numbers = series.to_numpy(dtype=float, na_value=np.nan)
    else:
        cells = read_cells(series, key)
        numbers = np.array([_number_of(cell, key) for cell in cells], dtype=float)
    if stored_kind == "f":
        _check_exact(numbers, key)
    if np.isinf(numbers).any():
        raise InputError(key, Fault("has infinite values"), "finite everywhere")
    return numbers + 0.0  # -0.0 becomes 0.0, since not every type has it


def _stored_kind(series: Series) -> str:
    """Return the letter by which NumPy names the type of a column; O for objects."""
    return str(getattr(series.dtype, "kind", "O"))


def _number_of(cell: Cell | None, key: str) -> float:
    """Return the number of a cell, nan where it is missing."""
    if cell is None:
        return math.nan
    if not isinstance(cell, str):
        return _as_float(cell)
    number = parse_number(cell)
    if number is not None:
        return number
    if is_missing_word(cell):
        return math.nan
    problem = "has values that are not numbers"
    raise InputError(key, Fault(problem), "a column of numbers")


def _as_float(number: bool | int | float | Decimal) -> float:
    """Return the nearest float64; infinity beyond the largest one."""
    try:
        return float(number)
    except OverflowError:
        return np.inf


def _check_exact(
    numbers: NDArray[np.float64],
    key: str,
    smallest_inexact: float = SMALLEST_INEXACT_WHOLE,
) -> None:
    """Refuse floats that may have been whole numbers before they lost digits.

    A library that finds one missing value in a column of integers stores, and writes,
    them all as floats: were that accepted, one row would change the digits of all
    others.

    Args:
        numbers: of a column; whole ones from `smallest_inexact` on are refused.
        key: what errors call the column.
        smallest_inexact: the size from which on one float of the column's type stands
            for several whole numbers.
    """
    is_large = np.isfinite(numbers) & (np.abs(numbers) >= smallest_inexact)
    if np.any(is_large & (numbers == np.floor(numbers))):
        problem = "has whole numbers too large for the floats that they are stored as"
        requirement = "stored as integers or as text, or in a larger unit"
        raise InputError(key, Fault(problem), requirement)


class InferredKind(NamedTuple):
    """What the cells of a column suggest about it.

    Args:
        kind: of the column.
        is_boolean: whether all its cells are booleans; the column is then numeric.
    """

    kind: Kind
    is_boolean: bool = False


def infer_kind(series: Series, key: str, *, is_typed: bool) -> InferredKind:
    """Infer the kind that all cells of a column suggest together.

    This looks at every row, so it is done once, stored in the schema and listed as
    taken from the data; a declared kind makes it needless.

    Args:
        series: a column.
        key: what errors call it.
        is_typed: whether the column's type is the table's own statement (a frame,
            parquet), so that text is text; the cells of a text file have no types, and
            are numbers where all of them look like numbers.

    Returns:
        Numeric where every cell is a number or missing, or every one a boolean or
        missing; else categorical, as are columns of pandas' type of categories.

    Raises:
        InputError: as of `read_cells`.
    """
    if str(series.dtype) == "category":
        return InferredKind("categorical")
    looks = {_look(cell, is_typed) for cell in read_cells(series, key)}
    looks.discard("missing")
    if looks == {"boolean"}:
        return InferredKind("numeric", is_boolean=True)
    return InferredKind("numeric" if looks <= {"number"} else "categorical")


def _look(cell: Cell | None, is_typed: bool) -> CellLook:
    """Return what one cell looks like; the text of a typed table is a name."""
    if cell is None:
        return "missing"
    if not isinstance(cell, str):
        return "boolean" if isinstance(cell, bool) else "number"
    number = None if is_typed else parse_number(cell)
    if number is None:
        return "missing" if is_missing_word(cell) else "name"
    text = cell.strip()
    if text.lower() in BOOLEAN_WORDS:
        return "boolean"
    return "name" if CODE.fullmatch(text) else "number"
