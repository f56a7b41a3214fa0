"""The command line. Its entry imports nothing that takes time, so that Ctrl-C is heard from the first moment on."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["main"]

FAILED = 1
"""The exit code of whatever is neither done nor bad input; after Ctrl-C too."""


def main() -> None:
    """Run the command line: exit code 0 when done, 2 for bad input, 1 for anything else, Ctrl-C included."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or another's business
        _main()
        return
    signal.signal(signal.SIGINT, end)
    try:
        _main()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _main() -> None:
    from wflmc.cli import app

    app.leave(app.guarded(app.run_app))


def end(number: int, frame: FrameType | None) -> None:
    """End at once on Ctrl-C, before a command has begun or after it is done: nothing can be lost."""
    os.write(2, b"wflmc: Interrupted.\n")
    os._exit(FAILED)
