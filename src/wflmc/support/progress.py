"""A progress bar, where a person watches."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]
"""The type of `progress_bar`: from words and a number of steps to a bar, a context that
yields the function which sets how many steps are done."""


@contextmanager
def progress_bar(task: str, total: int) -> Iterator[Callable[[float], None]]:
    """Show a bar with the remaining time on a terminal, and nothing elsewhere.

    The bar is on standard error, and disappears at the end.

    Args:
        task: words that stand before the bar.
        total: how many steps the task has.

    Yields:
        A function that sets how many steps are done, which may be a fraction.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        row = bar.add_task(task, total=total)

        def advance(completed: float) -> None:
            bar.update(row, completed=completed)

        yield advance
