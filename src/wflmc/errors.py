"""The one error for input a person can mend: which key, what was given, what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Found(str):
    """What is wrong with an argument, in words that follow its name: "data" + "has no arrays"."""


class InputError(ValueError):
    """Bad input, said in one sentence.

    Args:
        key: the argument or scenario key at fault, such as `link.snr_db`.
        given: what was given; or, as `Found`, what is wrong with it.
        allowed: what is allowed, as the end of the sentence "... must be ...".
    """

    def __init__(self, key: str, given: object, allowed: str) -> None:
        self.key, self.given, self.allowed = key, given, allowed
        described = isinstance(given, Found)
        shown = str(given) if described else repr(given)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        start = f"{key} {shown}" if described else f"{key} = {shown} was given"
        end = "" if allowed.endswith("?") else "."
        super().__init__(f"{start}, but it must be {allowed}{end}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str]]:
        """Errors cross process borders by their parts."""
        return type(self), (self.key, self.given, self.allowed)


class SamplingError(RuntimeError):
    """A chain left the finite numbers; the sentence says when, and what to try."""


class UnfinishedError(RuntimeError):
    """Work that other processes could not finish; the sentence says why, and what to do."""


class OverspendError(RuntimeError):
    """A round would take a device beyond its privacy budget; nothing of it was sent."""

    def __init__(self, number: int, device: int, loss: float, budget: float) -> None:
        self.round, self.device, self.loss, self.budget = number, device, loss, budget
        super().__init__(
            f"Round {number + 1} would bring device {device} to a loss of {loss:.6g}, "
            f"above its budget of {budget:.6g}: not sent."
        )

    def __reduce__(self) -> tuple[type[OverspendError], tuple[int, int, float, float]]:
        """Errors cross process borders by their parts."""
        return type(self), (self.round, self.device, self.loss, self.budget)


@contextmanager
def naming(section: str) -> Iterator[None]:
    """Prefix the key of any InputError raised inside with a scenario section.

    >>> with naming("link"):
    ...     raise InputError("snr_db", "x", "a number")
    Traceback (most recent call last):
    wflmc.errors.InputError: link.snr_db = 'x' was given, but it must be a number.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{section}.{error.key}", error.given, error.allowed) from None
