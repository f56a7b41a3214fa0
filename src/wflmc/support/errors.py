"""Errors about bad input, and values that show themselves without private data.

Both name sizes, types and settings. A value that may hold data is described, by the
shape of an array or the length of a list, and never shown.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from numbers import Number
from pathlib import PurePath
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

T = TypeVar("T")
ShownValue: TypeAlias = ArrayLike | None
"""A text, a number or an array that a value may show; None is left out."""
ShownValues: TypeAlias = Mapping[str, ShownValue]

MAX_SHOWN_ITEMS = 3
"""Longest list whose items are shown, such as a range; a longer one may be data."""
MAX_SHOWN_CHARACTERS = 200
"""Longest text of a value in an error; a longer one is cut."""
VOWELS = frozenset("AEIOaeio")
"""First letters of the names of types that take the article `an`."""


class Fault(str):
    """What is wrong with an argument, in words that follow its name.

    `InputError("data", Fault("has no arrays"), ...)` begins with "data has no arrays".
    """


class Description(str):
    """Words that stand for a value, and are shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


@runtime_checkable
class _HasItem(Protocol):
    """An array of NumPy, JAX or another library."""

    def item(self) -> object:
        """Return the only number as one of Python's."""


def in_words(value: object) -> object:
    """Return a value that may be shown, or a description of one that may hold data.

    Numbers, texts, paths, None and values that show themselves (`Shown`) are returned,
    and so are lists of at most three numbers or texts. An array is described by its
    type and shape, a longer list by its length, anything else by its type. An array of
    one number, without axes, is that number; a traced one is described.

    Args:
        value: of any type.

    Returns:
        The value itself, with NumPy's numbers as Python's; else a `Description`.

    >>> in_words(0.5), in_words(np.zeros((4, 2))), in_words([1.5] * 9)
    (0.5, an array of type float64 and shape (4, 2), a list of 9 values)
    """
    if value is None or isinstance(value, Number | str | PurePath | Shown):
        return value.item() if isinstance(value, np.generic) else value
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape == () and isinstance(value, _HasItem):
        with suppress(Exception):  # a key, or a number that is only being traced
            return in_words(value.item())
    if shape is not None and dtype is not None:
        return Description(f"an array of type {dtype} and shape {tuple(shape)}")
    if isinstance(value, list | tuple | set | frozenset | dict):
        return value if _may_be_shown(value) else _describe_length(value)
    return _describe_type(value)


def _may_be_shown(items: Collection[object]) -> bool:
    """Return whether a collection is short, and has numbers and texts alone."""
    if len(items) > MAX_SHOWN_ITEMS or isinstance(items, dict):
        return False
    return all(isinstance(item, Number | str) for item in items)


def _describe_length(items: Collection[object]) -> Description:
    count = _counted("values", str(len(items)))
    return Description(f"a {type(items).__name__} of {count}")


def _describe_type(value: object) -> Description:
    is_function = callable(value) and not isinstance(value, type)
    name = "function" if is_function else type(value).__name__
    article = "an" if name[:1] in VOWELS else "a"
    return Description(f"{article} {name}")


class Shown:
    """A value that shows itself by `_facts` alone.

    Its repr is one line; notebooks show a small table. A class overrides `_facts` with
    what may be seen, so that no field with private data is shown by accident.
    """

    def _facts(self) -> ShownValues:
        """Return what is shown, by name.

        Texts and numbers are shown as they are, arrays by their range, and None is left
        out. The value of a name in the plural is a count.
        """
        return {}

    def __repr__(self) -> str:
        parts = []
        for name, text in self._fact_texts():
            is_count = name.endswith("s")
            parts.append(_counted(name, text) if is_count else f"{name}={text}")
        return f"{type(self).__name__}({', '.join(parts) or '…'})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in self._fact_texts()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"

    def _fact_texts(self) -> list[tuple[str, str]]:
        """Return the name and the text of every fact; none if they cannot be read."""
        try:
            facts = self._facts().items()
            return [(name, _text(value)) for name, value in facts if value is not None]
        except Exception:
            # JAX puts other objects in the place of arrays, and its errors show them.
            return []


def _counted(plural: str, count: str) -> str:
    """Return a count with its noun, in the singular for 1."""
    noun = plural.removesuffix("s") if count == "1" else plural
    return f"{count} {noun}"


def _text(value: ShownValue) -> str:
    """Return a number, text or range in a few characters."""
    if isinstance(value, str | int):
        return str(value)
    numbers = np.asarray(value, dtype=float)
    smallest = f"{numbers.min():.4g}"
    largest = f"{numbers.max():.4g}"
    return smallest if smallest == largest else f"{smallest}…{largest}"


def fields_in_words(self: object) -> str:
    """Return the repr of a named tuple or dataclass, its fields shown by `in_words`.

    A short field, such as a number, is shown; an array is described by its type and
    shape. An object that is neither a named tuple nor a dataclass shows no field.

    Returns:
        The name of the class with the fields in parentheses, `Name(field=value, ...)`.
    """
    if dataclasses.is_dataclass(self):
        names = [field.name for field in dataclasses.fields(self)]
    else:
        names = getattr(self, "_fields", [])
    values = {name: in_words(getattr(self, name)) for name in names}
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"{type(self).__name__}({shown})"


def without_data(kind: type[T]) -> type[T]:
    """Make the repr of a class describe fields that may hold data or a key.

    A decorator for named tuples and dataclasses: tracebacks, logs and notebooks show
    the repr of a value, and an array of records would be part of it. `fields_in_words`
    takes its place.

    Args:
        kind: the class, which is changed.

    Returns:
        The same class.
    """
    kind.__repr__ = fields_in_words  # type: ignore[method-assign]
    return kind


class InputError(ValueError):
    """Bad input, described in one sentence.

    `str(error)` names the argument as the Python API does. A command that reads a
    scenario file shows `error.in_scenario` instead, which names the file's key.
    `missing`, `unknown`, `wrong_length` and `conflict` make the usual kinds.

    Args:
        key: the argument at fault, such as `snr_db`, or an option of a command.
        value: what was passed. Data are described, and neither shown nor kept. A
            `Fault` is shown in place of a value.
        requirement: what is allowed, as the end of the sentence "... must be ...".
        section: of a scenario in which the argument is a key, such as `link`; empty
            where scenarios have no such key.

    Examples:
        >>> error = InputError("snr_db", 400.0, "at most 300", section="link")
        >>> print(error)
        snr_db = 400.0 was given, but it must be at most 300.
        >>> print(error.in_scenario)
        link.snr_db = 400.0 was given, but it must be at most 300.
    """

    def __init__(
        self, key: str, value: object, requirement: str, section: str = ""
    ) -> None:
        self.key = key
        self.value = in_words(value)
        self.requirement = requirement
        self.section = section
        # Exceptions cross the border of a process by these arguments.
        super().__init__(key, self.value, requirement, section)

    @property
    def scenario_key(self) -> str:
        """The key as a scenario file has it, such as `link.snr_db`.

        The key alone where the error belongs to no section.
        """
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def in_scenario(self) -> str:
        """The sentence, about the key of a scenario file."""
        return self._sentence(self.scenario_key)

    def __str__(self) -> str:
        return self._sentence(self.key)

    def of_section(self, section: str, names: Collection[str]) -> "InputError":
        """Return the error as one about a key of a section, if that has such a key.

        Args:
            section: such as `posterior`.
            names: of its keys.

        Returns:
            The error with that section; itself where it has one already, or where
            `names` lack it.
        """
        if self.section or self.key not in names:
            return self
        return InputError(self.key, self.value, self.requirement, section)

    def _sentence(self, key: str) -> str:
        """Return the sentence, with a name for the argument."""
        is_question = self.requirement.endswith("?")
        end = "" if is_question else "."
        return f"{self._fault(key)}, but it must be {self.requirement}{end}"

    def _fault(self, key: str) -> str:
        """Return the clause on what is wrong, with a name for the argument."""
        value = self.value
        if value is None:
            return f"{key} is missing"
        if isinstance(value, Fault):
            return f"{key} {_cut(value)}"
        if isinstance(value, Description):
            return f"{key} is {_cut(value)}"
        return f"{key} = {_cut(repr(value))} was given"


def _cut(text: str) -> str:
    """Return a text, its end replaced by dots where it is too long to be shown."""
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return str(text)
    return text[: MAX_SHOWN_CHARACTERS - 3] + "..."


@contextmanager
def renamed_keys(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors about arguments of functions name the options of a command.

    Args:
        names: options by the key of an error, or by its key in a scenario. Errors about
            other keys pass unchanged.

    Yields:
        Nothing, while an `InputError` raised inside is renamed.

    Raises:
        InputError: the one raised inside, with the option as its key.
    """
    try:
        yield
    except InputError as error:
        option = names.get(error.key) or names.get(error.scenario_key)
        if option is None:
            raise
        raise InputError(option, error.value, error.requirement) from None


def refuse(*cases: tuple[object, str, object, str]) -> None:
    """Raise the error of the first case whose condition holds.

    Args:
        *cases: of each, a condition of any type that has a truth value, and then the
            key, the value and the requirement of its `InputError`.

    Raises:
        InputError: of the first case that holds; none is raised where no case holds.
    """
    for condition, key, value, requirement in cases:
        if condition:
            raise InputError(key, value, requirement)


def missing(key: str, reason: str, section: str = "") -> InputError:
    """Return the error for an argument that has to be given.

    Args:
        key: the argument.
        reason: when it has to be given, as the end of "it must be given ...".
        section: of a scenario in which it is a key; empty where there is none.

    Returns:
        The error, to be raised by the caller.
    """
    return InputError(key, None, f"given {reason}", section)


def unknown(
    key: str, value: object, names: Iterable[str], section: str = ""
) -> InputError:
    """Return the error for a name that is not among the valid ones.

    Args:
        key: the argument that has the name.
        value: the name that was passed.
        names: the valid ones, in the order in which the sentence lists them.
        section: of a scenario that has it as a key; empty where there is none.

    Returns:
        The error, to be raised by the caller.
    """
    return InputError(key, value, f"one of {', '.join(names)}", section)


def wrong_length(
    key: str, value: object, devices: int, section: str = ""
) -> InputError:
    """Return the error for a list that has neither one number nor one per device.

    Args:
        key: the argument.
        value: the list.
        devices: K.
        section: of a scenario that has it as a key; empty where there is none.

    Returns:
        The error, to be raised by the caller.
    """
    requirement = f"one number, or one for each of the {devices} devices"
    return InputError(key, value, requirement, section)


def conflict(key: str, value: object, reason: str) -> InputError:
    """Return the error for an argument that must not be given.

    Args:
        key: the argument.
        value: what was passed.
        reason: beside what, or until when, it must be left out, as the end of "it must
            be left out ...".

    Returns:
        The error, to be raised by the caller.
    """
    return InputError(key, value, f"left out {reason}")


class SamplingError(RuntimeError):
    """A chain left the finite numbers; the sentence says when, and what to try."""


class UnfinishedError(RuntimeError):
    """Work that other processes could not finish; the sentence says what to do."""


class OverspendError(RuntimeError):
    """A round would take a device beyond its privacy budget; nothing of it was sent.

    Args:
        number: of the round, from 0.
        device: its number, from 0.
        loss: the privacy loss that the device would have after the round.
        budget: of the device, in the same unit.
    """

    def __init__(self, number: int, device: int, loss: float, budget: float) -> None:
        self.round = number
        self.device = device
        self.loss = loss
        self.budget = budget
        # Exceptions cross the border of a process by these arguments.
        super().__init__(number, device, loss, budget)

    def __str__(self) -> str:
        round_number = self.round + 1
        return (
            f"Round {round_number} would bring device {self.device} to a loss of "
            f"{self.loss:.6g}, above its budget of {self.budget:.6g}: not sent."
        )
