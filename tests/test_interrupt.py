"""Ctrl-C is heard wherever it comes, and the handler of whoever calls is theirs again afterwards."""

from __future__ import annotations

import os
import signal
import time

from wflmc.cli import guard


def test_an_interrupt_inside_the_hook_of_the_garbage_collector_comes_again():
    """Python swallows what is raised there; JAX has such a hook, and long runs are in it now and then."""

    def _xla_gc_callback():  # by the name that JAX gives it
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

    def command():
        _xla_gc_callback()
        time.sleep(5)

    before, began = signal.getsignal(signal.SIGINT), time.monotonic()
    assert guard.guarded(command) == guard.INTERRUPTED
    assert time.monotonic() - began < 4
    assert signal.getsignal(signal.SIGINT) is before
