"""Sweeps in a process of their own, which stop after a number of points so that their
workers can be killed.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..cli_tools import PATIENCE, listening

HELD = """
import sys
from pathlib import Path
cache, limit = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
def held(task, progress):
    import hashlib, time
    from wflmc.runs.point import measure
    row = measure(task, progress)
    # What is handed over counts, not what is stored: that comes later. A point that was lost may go again.
    finished = limit.with_suffix(".finished")
    finished.mkdir(exist_ok=True)
    mine = finished / hashlib.sha256(repr(task.identity).encode()).hexdigest()
    while not mine.exists() and len(list(finished.iterdir())) >= int(limit.read_text()):
        time.sleep(0.02)
    mine.touch()
    return row
from wflmc.cli import main
from wflmc.runs import point
point.measure = held
main()
"""


class Held(NamedTuple):
    """A running sweep of which only as many points finish as the file `limit` says."""

    process: Any
    cache: Path
    limit: Path

    def wait_for(self, count):
        """Wait until so many points are in the cache; fail if the command ends
        before.
        """
        while cached_count(self.cache) < count:
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.02)

    def hold_at(self, count):
        """Let points finish until there are so many."""
        part = self.limit.with_suffix(".part")
        part.write_text(str(count))
        part.replace(self.limit)

    def workers(self):
        """Return the ids of the processes that compute for the command."""
        numbers = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
                line = (folder / "cmdline").read_bytes()
            except OSError:  # it ended in between
                continue
            if parent == self.process.pid and b"spawn_main" in line:
                numbers.append(int(folder.name))
        return numbers


@contextmanager
def held_sweep(cache, limit, *arguments):
    """Run `wflmc sweep` with these arguments, held after `limit` points."""
    file = cache.with_suffix(".limit")
    file.write_text(str(limit))
    command = ["-c", HELD, cache, file, "sweep", *arguments, "--cache", cache]
    with listening(*command, PYTHONWARNINGS="ignore") as process:
        yield Held(process, cache, file)


def cached_count(cache):
    """Return how many points are in the cache."""
    return len(list(Path(cache).rglob("*.json")))


def wait_until_gone(pids):
    """Wait until these processes have ended; fail if they do not."""
    ends = time.monotonic() + PATIENCE
    while any(map(_alive, pids)):
        assert time.monotonic() < ends
        time.sleep(0.02)


def _alive(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[
            2
        ].split()[0] != "Z"
    except OSError:
        return False
