"""Numbers as people read them: rounded, whole, in percent, or as a range."""

from collections.abc import Sequence

import numpy as np

MISSING_NUMBER = "–"
"""What stands where a number is not known."""
MIN_GROUPED = 1000
"""The magnitude from which on numbers are shown whole, with commas."""
MAX_GROUPED = 1e6
"""The magnitude from which on numbers are shown with a power of ten."""
RANGE_DIGITS = 4
"""Significant digits of the ends of a range."""


def format_number(value: float | None, digits: int = 3) -> str:
    """Round a number for people.

    Integers, and numbers from a thousand to a million, are shown whole with commas
    between thousands; all others to some significant digits. A power of ten is shown
    only from a million on, and below 0.0001. None becomes a dash.

    Args:
        value: the number, or None where it is not known.
        digits: significant digits of numbers that are not shown whole. A number with
            more digits before its decimal point is shown whole, too.

    Returns:
        The text, without a unit.
    """
    if value is None:
        return MISSING_NUMBER
    if isinstance(value, int):
        return f"{value:,}"
    rounded = f"{value:.{digits}g}"
    has_more_digits = abs(value) >= MIN_GROUPED or "e+" in rounded
    if has_more_digits and abs(value) < MAX_GROUPED:
        return f"{value:,.0f}"
    return rounded


def format_whole(value: float | None) -> str:
    """Round a number to an integer, with commas between thousands.

    Unlike `format_number` it never shows decimals or a power of ten, which suits counts
    that are estimated, such as effective sample sizes. Halves are rounded to the even
    neighbour, as Python formats them.

    Args:
        value: the number, or None where it is not known.

    Returns:
        The text; a dash for None.
    """
    return MISSING_NUMBER if value is None else f"{value:,.0f}"


def format_percent(fraction: float | None) -> str:
    """Show a fraction in percent, never as 0 % if it is not.

    Fractions below 1 % keep two significant digits, those below 10 % and those between
    99 and 100 % keep three; all others are whole percentages, also those above one,
    such as of an overspent budget. From 99.95 % to 100.5 % the text is 100 %.

    Args:
        fraction: usually between 0 and 1; None where it is not known.

    Returns:
        The text with the sign of percent; a dash for None.
    """
    if fraction is None:
        return MISSING_NUMBER
    if 0 < fraction < 0.01:
        return f"{100 * fraction:.2g} %"
    if fraction < 0.1 or 0.99 < fraction < 1:
        return f"{100 * fraction:.3g} %"
    return f"{100 * fraction:.0f} %"


def format_range(values: float | Sequence[float] | None) -> str:
    """Show the smallest and the largest of several numbers.

    Keys of a scenario such as `link.power` hold one number for all devices or one for
    each; both are shown in the same sentence. Where the ends look the same after
    rounding to four digits, only one is shown.

    Args:
        values: one number, or several; None where there are none.

    Returns:
        Such as ``8`` or ``8 to 30``; a dash for None.
    """
    if values is None:
        return MISSING_NUMBER
    smallest = format_number(float(np.min(values)), RANGE_DIGITS)
    largest = format_number(float(np.max(values)), RANGE_DIGITS)
    return smallest if smallest == largest else f"{smallest} to {largest}"
