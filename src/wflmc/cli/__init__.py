"""The command line.

Its entry imports nothing that takes time, so that Ctrl-C works from the beginning.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["main"]

FAILED = 1
"""The exit code after an interrupt, or a failure other than bad input."""
STANDARD_ERROR = 2
"""Number of the file that errors are written to."""
BLAS_THREAD_TIMEOUT = "4"
"""How long idle threads of OpenBLAS spin, as an exponent of 2.

By default they spin where other work could run.
"""


def main() -> None:
    """Run the command line and end the process.

    The exit code is 0 when done, 2 for bad input, and 1 for anything else, Ctrl-C
    included.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", BLAS_THREAD_TIMEOUT)
    with interrupt_handler(exit_at_once):
        from wflmc.cli import app

        app.leave(app.exit_code(app.run_app))


@contextmanager
def interrupt_handler(
    handler: Callable[[int, FrameType | None], None],
) -> Iterator[None]:
    """Handle Ctrl-C by a function while inside.

    Nothing changes in other threads than the main one, or where the caller of Python
    has a handler of its own.

    Args:
        handler: called with the number of the signal and the frame that it interrupts.

    Yields:
        Nothing, while the handler is in place.
    """
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
    """End the process on Ctrl-C, at once and without a traceback.

    It is the handler before a command has begun and after it is done, when nothing can
    be lost.

    Args:
        number: of the signal.
        frame: that it interrupts.
    """
    os.write(STANDARD_ERROR, b"wflmc: Interrupted.\n")
    os._exit(FAILED)
