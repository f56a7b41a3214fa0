"""Fields of settings that are declared once: type, default, limits and description.

`Link`, `Privacy`, `Sampler` and `Policy` are plain dataclasses whose fields carry their
limits and a description in `typing.Annotated`. Two things are made from that:

- `check_fields`, which refuses values that a field may not have, for the Python API;
- the section of a scenario file (`wflmc.scenario.sections`), with the same limits.

>>> @dataclass(frozen=True)
... class Antenna:
...     tilt: Annotated[float, Interval(minimum=0, below=90), "In degrees."] = 10.0
>>> (tilt,) = declared_fields(Antenna)
>>> tilt.name, tilt.default, str(tilt.interval)
('tilt', 10.0, 'at least 0 and below 90')
"""

import dataclasses
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from wflmc.support import plugins
from wflmc.support.errors import InputError, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Interval:
    """The numbers that a field may have.

    Args:
        minimum: the smallest number.
        maximum: the largest number.
        above: a number that all others are above.
        below: a number that all others are below.
        per_device: whether there may be a number for each device.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    per_device: bool = False

    def contains(self, numbers: np.ndarray) -> bool:
        """Return whether all of these numbers are allowed.

        Numbers are an array of any shape. An interval never allows nan, and an empty
        array has no number to refuse. Infinity is allowed where no end excludes it.
        """
        lowest = -math.inf if self.minimum is None else self.minimum
        highest = math.inf if self.maximum is None else self.maximum
        within = (numbers >= lowest) & (numbers <= highest)
        if self.above is not None:
            within &= numbers > self.above
        if self.below is not None:
            within &= numbers < self.below
        return bool(np.all(within))

    def __str__(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f"between {_short(self.minimum)} and {_short(self.maximum)}"
        ends = {
            "at least": self.minimum,
            "above": self.above,
            "at most": self.maximum,
            "below": self.below,
        }
        limits = {words: end for words, end in ends.items() if end is not None}
        return " and ".join(f"{words} {_short(end)}" for words, end in limits.items())


@dataclass(frozen=True)
class Choices:
    """The names that a field may have.

    Args:
        names: those of this package.
        group: of entry points, `wflmc.<group>`, by which other packages add names;
            empty where there is none.
    """

    names: tuple[str, ...]
    group: str = ""


@dataclass(frozen=True)
class NotInFiles:
    """Marks a field that only Python can give: scenario files have no key for it."""


@dataclass(frozen=True)
class DeclaredField:
    """One field of a dataclass, as it is declared.

    Args:
        name: of the field.
        kind: its type, without None and without metadata.
        default: its default; `dataclasses.MISSING` where there is none.
        description: one or two sentences; empty where there are none.
        interval: of its numbers.
        choices: its names.
        optional: whether it may be None.
        in_files: whether scenario files have a key for it.
    """

    name: str
    kind: object
    default: object
    description: str
    interval: Interval | None
    choices: Choices | None
    optional: bool
    in_files: bool

    def check(self, value: object, section: str) -> None:
        """Refuse a value that the field may not have.

        Args:
            value: of the field.
            section: of a scenario that has the field, for the error.

        Raises:
            InputError: names the field.
        """
        if value is None and self.optional:
            return
        if self.interval is not None:
            self._check_number(value, self.interval, section)
        if self.choices is not None:
            self._check_choice(value, self.choices, section)

    def _check_number(self, value: object, interval: Interval, section: str) -> None:
        """Refuse what is no number, or a number out of range."""
        numbers = np.asarray(value)
        right_kind = numbers.dtype.kind in ("iu" if self.kind is int else "fiu")
        is_list = numbers.ndim == 1 and numbers.size > 0
        right_shape = numbers.ndim == 0 or (interval.per_device and is_list)
        if not (right_kind and right_shape and interval.contains(numbers)):
            raise InputError(self.name, value, self._requirement(interval), section)

    def _requirement(self, interval: Interval) -> str:
        """Return which numbers are allowed, as the end of a sentence "must be ..."."""
        kind = "a whole number" if self.kind is int else "a number"
        preposition = " of" if str(interval).startswith("at ") else ""
        alternative = ", or one for each device" if interval.per_device else ""
        return f"{kind}{preposition} {interval}{alternative}"

    def _check_choice(self, value: object, choices: Choices, section: str) -> None:
        """Refuse a name that is neither built in nor registered by a package."""
        if not isinstance(value, str) and self.kind is not str:
            return  # a value that the name would stand for
        if isinstance(value, str) and value in choices.names:
            return
        if not choices.group:
            raise unknown(self.name, value, choices.names, section)
        if value not in plugins.names(choices.group):
            requirement = plugins.describe_names(choices.group, choices.names)
            raise InputError(self.name, value, requirement, section)


@functools.cache
def declared_fields(kind: type) -> tuple[DeclaredField, ...]:
    """Return the fields of a dataclass with what their annotations declare.

    They come in the order of the class, also those whose annotation declares neither
    limits nor choices. A class is read once, and the result is kept.
    """
    hints = get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    return tuple(_declared(field, hints[field.name]) for field in fields)


def check_fields(value: object) -> None:
    """Refuse a dataclass of which some field has a value that its declaration forbids.

    The section of errors is the name of the class in lower case: `link` for a `Link`.
    Fields are checked in their order, each by itself.

    Args:
        value: an instance of a dataclass.

    Raises:
        InputError: names the first such field.
    """
    kind: type = type(value)
    section = kind.__name__.lower()
    for field in declared_fields(kind):
        field.check(getattr(value, field.name), section)


def documented(kind: type[T]) -> type[T]:
    """Add the descriptions of its fields to the docstring of a dataclass, as `Args`.

    A decorator for classes that declare their fields: `help` and the documentation
    then show what scenario files and the Python API have in common.

    Args:
        kind: the class, which is changed.

    Returns:
        The same class.
    """
    entries = "\n".join(_entries(kind))
    kind.__doc__ = f"{inspect.cleandoc(kind.__doc__ or '')}\n\nArgs:\n{entries}\n"
    return kind


def _entries(kind: type) -> Iterator[str]:
    """Yield the entry of every field that has a description."""
    for field in declared_fields(kind):
        if field.description:
            text = f"{field.name}: {field.description}"
            yield textwrap.fill(
                text, 84, initial_indent="    ", subsequent_indent="        "
            )


def _declared(field: "dataclasses.Field[object]", hint: object) -> DeclaredField:
    """Return one field, its annotation taken apart."""
    metadata: tuple[object, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *items = get_args(hint)
        metadata = tuple(items)
    kind, optional = _without_none(hint)
    return DeclaredField(
        name=field.name,
        kind=kind,
        default=field.default,
        description=_first_of(str, metadata) or "",
        interval=_first_of(Interval, metadata),
        choices=_first_of(Choices, metadata),
        optional=optional,
        in_files=_first_of(NotInFiles, metadata) is None,
    )


def _first_of(kind: type[T], items: tuple[object, ...]) -> T | None:
    """Return the first item of a type; None where there is none."""
    return next((item for item in items if isinstance(item, kind)), None)


def _without_none(hint: object) -> tuple[object, bool]:
    """Return a type without None, and whether it had None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    kinds = get_args(hint)
    remaining = tuple(kind for kind in kinds if kind is not types.NoneType)
    return Union[remaining], len(remaining) < len(kinds)  # noqa: UP007


def _short(number: float) -> str:
    """Return a limit as people write it."""
    return str(number) if isinstance(number, int) else f"{number:g}"
