"""What people are told, in errors and by values that show themselves: sizes and settings, never private data."""

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

FEW = 3
"""Values that a list may have to be shown; a longer one may be data."""


class Found(str):
    """What is wrong with an argument, in words that follow its name: "data" + "has no arrays"."""


class Words(str):
    """Words that stand for a value, and are shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


@runtime_checkable
class _HasItem(Protocol):
    """An array of NumPy, JAX or another library."""

    def item(self) -> object:
        """Return the only number as one of Python's."""


def in_words(value: object) -> object:
    """Return a value that may be shown, or words for one that may hold data: the shape of an array, else the type.

    >>> in_words(0.5), in_words(np.zeros((4, 2))), in_words([1.5] * 9)
    (0.5, an array of type float64 and shape (4, 2), a list of 9 values)
    """
    if value is None or isinstance(value, Number | str | PurePath | Shown):
        return value.item() if isinstance(value, np.generic) else value
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape == () and isinstance(value, _HasItem):
        with suppress(Exception):  # a key, or a number that is only being traced
            return in_words(value.item())
    if shape is not None and dtype is not None:
        return Words(f"an array of type {dtype} and shape {tuple(shape)}")
    name = (
        "function"
        if callable(value) and not isinstance(value, type)
        else type(value).__name__
    )
    if not isinstance(value, list | tuple | set | frozenset | dict):
        return Words(f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}")
    if (
        len(value) <= FEW
        and not isinstance(value, dict)
        and all(isinstance(one, Number | str) for one in value)
    ):
        return value
    return Words(f"a {name} of {_counted('values', str(len(value)))}")


class Shown:
    """A value that shows itself in one line, and in notebooks as a small table, by `_facts` alone."""

    def _facts(self) -> ShownValues:
        """Return what is shown: texts, numbers, arrays by their range; None is left out, a plural name counts."""
        return {}

    def __repr__(self) -> str:
        parts = [
            _counted(name, text) if name.endswith("s") else f"{name}={text}"
            for name, text in self._told()
        ]
        return f"{type(self).__name__}({', '.join(parts) or '…'})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in self._told()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"

    def _told(self) -> list[tuple[str, str]]:
        try:
            return [
                (name, _text(value))
                for name, value in self._facts().items()
                if value is not None
            ]
        except Exception:  # JAX puts other things in the place of arrays, and shows them in errors of its own
            return []


def _counted(names: str, count: str) -> str:
    return f"{count} {names.removesuffix('s') if count == '1' else names}"


def _text(value: ShownValue) -> str:
    """Return a number, text or range in a few characters."""
    if isinstance(value, str | int):
        return str(value)
    numbers = np.asarray(value, dtype=float)
    low, high = f"{numbers.min():.4g}", f"{numbers.max():.4g}"
    return low if low == high else f"{low}…{high}"


def fields_in_words(self: object) -> str:
    """Return the fields of a named tuple or dataclass, those that may hold data in words."""
    if dataclasses.is_dataclass(self):
        names = [field.name for field in dataclasses.fields(self)]
    else:
        names = getattr(self, "_fields", [])
    shown = ", ".join(f"{name}={in_words(getattr(self, name))!r}" for name in names)
    return f"{type(self).__name__}({shown})"


def without_data(kind: type[T]) -> type[T]:
    """Let a named tuple or dataclass whose fields may hold data or a key show them in words."""
    kind.__repr__ = fields_in_words  # type: ignore[method-assign]
    return kind


class InputError(ValueError):
    """Bad input, said in one sentence; `missing`, `unknown`, `wrong_length` and `conflict` make those of their kinds.

    `str(error)` names the argument as the Python API does. A command that reads a
    scenario file shows `error.in_scenario` instead, which names the file's key.

    Args:
        key: the argument at fault, such as `snr_db`, or an option of a command.
        given: what was given, of which data are not shown or kept; or, as `Found`, what is wrong with it.
        allowed: what is allowed, as the end of the sentence "... must be ...".
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
        self, key: str, given: object, allowed: str, section: str = ""
    ) -> None:
        self.key = key
        self.given = in_words(given)
        self.allowed = allowed
        self.section = section
        super().__init__(
            key, self.given, allowed, section
        )  # by which it crosses process borders

    @property
    def scenario_key(self) -> str:
        """The key as a scenario file has it, such as `link.snr_db`."""
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def in_scenario(self) -> str:
        """The sentence, about the key of a scenario file."""
        return self._sentence(self.scenario_key)

    def __str__(self) -> str:
        return self._sentence(self.key)

    def of_section(self, section: str, names: Collection[str]) -> "InputError":
        """Return the error as one about a key of a section, if that has one of this name.

        Args:
            section: such as `posterior`.
            names: of its keys.

        Returns:
            The error with that section; itself where it has one already, or where
            `names` lack it.
        """
        if self.section or self.key not in names:
            return self
        return InputError(self.key, self.given, self.allowed, section)

    def _sentence(self, key: str) -> str:
        """Return the sentence, with a name for the argument."""
        given = self.given
        shown = (
            "missing"
            if given is None
            else str(given)
            if isinstance(given, Found)
            else repr(given)
        )
        shown = shown if len(shown) <= 200 else shown[:197] + "..."
        start = f"{key} = {shown} was given"
        if given is None or isinstance(given, Found | Words):
            start = (
                f"{key} {shown}" if isinstance(given, Found) else f"{key} is {shown}"
            )
        return f"{start}, but it must be {self.allowed}{'' if self.allowed.endswith('?') else '.'}"


@contextmanager
def renamed_keys(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors about arguments of functions name the options of a command."""
    try:
        yield
    except InputError as error:
        option = names.get(error.key) or names.get(error.scenario_key)
        if option is None:
            raise
        raise InputError(option, error.given, error.allowed) from None


def refuse(*cases: tuple[object, str, object, str]) -> None:
    """Raise the error of the first case that holds: whether it does, the key, what was given, and what is allowed."""
    for wrong, key, given, allowed in cases:
        if wrong:
            raise InputError(key, given, allowed)


def missing(key: str, reason: str, section: str = "") -> InputError:
    """Return the error for something that has to be given, `reason` saying when."""
    return InputError(key, None, f"given {reason}", section)


def unknown(
    key: str, given: object, known: Iterable[str], section: str = ""
) -> InputError:
    """Return the error for a name that is none of those that are known."""
    return InputError(key, given, f"one of {', '.join(known)}", section)


def wrong_length(
    key: str, given: object, devices: int, section: str = ""
) -> InputError:
    """Return the error for a list that has neither one value nor one for each device."""
    return InputError(
        key, given, f"one number, or one for each of the {devices} devices", section
    )


def conflict(key: str, given: object, reason: str) -> InputError:
    """Return the error for something that must not be given, `reason` saying beside what or until when."""
    return InputError(key, given, f"left out {reason}")


class SamplingError(RuntimeError):
    """A chain left the finite numbers; the sentence says when, and what to try."""


class UnfinishedError(RuntimeError):
    """Work that other processes could not finish; the sentence says why, and what to do."""


class OverspendError(RuntimeError):
    """A round would take a device beyond its privacy budget; nothing of it was sent."""

    def __init__(self, number: int, device: int, loss: float, budget: float) -> None:
        self.round, self.device, self.loss, self.budget = number, device, loss, budget
        super().__init__(
            number, device, loss, budget
        )  # by which it crosses process borders

    def __str__(self) -> str:
        would = f"Round {self.round + 1} would bring device {self.device} to a loss of {self.loss:.6g}"
        return f"{would}, above its budget of {self.budget:.6g}: not sent."
