"""The command line. Its entry imports nothing that takes time, so that Ctrl-C works from the first moment on."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["main"]

FAILED = 1
"""The exit code of whatever is neither done nor bad input; after Ctrl-C too."""


def main() -> None:
    """Run the command line: exit code 0 when done, 2 for bad input, 1 for anything else, Ctrl-C included."""
    os.environ.setdefault(
        "OPENBLAS_THREAD_TIMEOUT", "4"
    )  # its idle threads would spin, where other work could run
    with interrupt_handler(exit_at_once):
        from wflmc.cli import app

        app.leave(app.exit_code(app.run_app))


@contextmanager
def interrupt_handler(
    handler: Callable[[int, FrameType | None], None],
) -> Iterator[None]:
    """Handle Ctrl-C by `handler` while inside; in other threads, or where the caller handles it, change nothing."""
    before = signal.getsignal(signal.SIGINT)
    replaceable = before in (signal.default_int_handler, exit_at_once)
    if not replaceable or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End the process on Ctrl-C, before a command has begun or after it is done: nothing can be lost."""
    os.write(2, b"wflmc: Interrupted.\n")
    os._exit(FAILED)
