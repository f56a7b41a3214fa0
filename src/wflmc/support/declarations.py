"""Fields of settings that are declared once: type, default, limits and description.

`Link`, `Privacy`, `Sampler` and `Policy` are plain dataclasses whose fields carry their
limits and a description in `typing.Annotated`. Two things are made from that:

- `check_fields`, which refuses values that a field may not have, for the Python API;
- the section of a scenario file (`wflmc.scenario.sections`), with the same limits.

>>> @dataclass(frozen=True)
... class Antenna:
...     tilt: Annotated[float, Interval(minimum=0, below=90), "In degrees."] = 10.0
>>> [(field.name, field.default, str(field.interval)) for field in declared_fields(Antenna)]
[('tilt', 10.0, 'at least 0 and below 90')]
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
        """Return whether it has all of these numbers; nan is in none."""
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
        parts = [
            f"{word} {_short(end)}" for word, end in ends.items() if end is not None
        ]
        return " and ".join(parts)


@dataclass(frozen=True)
class Choices:
    """The names that a field may have.

    Args:
        names: our own.
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
        one_each = interval.per_device and numbers.ndim == 1 and numbers.size > 0
        right_shape = numbers.ndim == 0 or one_each
        if not (right_kind and right_shape and interval.contains(numbers)):
            raise InputError(self.name, value, self._allowed_numbers(interval), section)

    def _allowed_numbers(self, interval: Interval) -> str:
        """Return which numbers are allowed, in words."""
        kind = "a whole number" if self.kind is int else "a number"
        of = " of" if str(interval).startswith("at ") else ""
        each = ", or one for each device" if interval.per_device else ""
        return f"{kind}{of} {interval}{each}"

    def _check_choice(self, value: object, choices: Choices, section: str) -> None:
        """Refuse a name that is none of ours and none that a package registers."""
        if not isinstance(value, str) and self.kind is not str:
            return  # a value that the name would stand for
        if isinstance(value, str) and value in choices.names:
            return
        if not choices.group:
            raise unknown(self.name, value, choices.names, section)
        if value not in plugins.names(choices.group):
            allowed = plugins.known_names(choices.group, choices.names)
            raise InputError(self.name, value, allowed, section)


@functools.cache
def declared_fields(kind: type) -> tuple[DeclaredField, ...]:
    """Return the fields of a dataclass with what their annotations declare."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        _declared(field, hints[field.name]) for field in dataclasses.fields(kind)
    )


def check_fields(value: object) -> None:
    """Refuse a dataclass of which some field has a value that its declaration forbids.

    The section of errors is the name of the class in lower case: `link` for a `Link`.

    Raises:
        InputError: names the first such field.
    """
    kind: type = type(value)
    section = kind.__name__.lower()
    for field in declared_fields(kind):
        field.check(getattr(value, field.name), section)


def documented(kind: type[T]) -> type[T]:
    """Add the descriptions of its fields to the docstring of a dataclass, as `Args`."""
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
        hint, *rest = get_args(hint)
        metadata = tuple(rest)
    kind, optional = _without_none(hint)
    return DeclaredField(
        name=field.name,
        kind=kind,
        default=field.default,
        description=next((item for item in metadata if isinstance(item, str)), ""),
        interval=next((item for item in metadata if isinstance(item, Interval)), None),
        choices=next((item for item in metadata if isinstance(item, Choices)), None),
        optional=optional,
        in_files=not any(isinstance(item, NotInFiles) for item in metadata),
    )


def _without_none(hint: object) -> tuple[object, bool]:
    """Return a type without None, and whether it had None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    kinds = get_args(hint)
    others = tuple(kind for kind in kinds if kind is not types.NoneType)
    return Union[others], len(others) < len(kinds)  # noqa: UP007


def _short(number: float) -> str:
    """Return a limit as people write it."""
    return str(number) if isinstance(number, int) else f"{number:g}"
