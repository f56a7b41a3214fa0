"""A progress bar, where a person watches."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]
"""From a name and a number of steps to a bar, as `progress_bar` is."""


@contextmanager
def progress_bar(task: str, total: int) -> Iterator[Callable[[float], None]]:
    """Show a bar with the time left on a terminal, nothing elsewhere; yield a function that sets what is done."""
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
        yield lambda done: bar.update(row, completed=done)
