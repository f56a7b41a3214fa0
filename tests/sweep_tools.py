"""Sweeps in a process of their own, whose workers can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def start(*arguments):
    command = [sys.executable, "-m", "wflmc", "sweep", *map(str, arguments)]
    own = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own, start_new_session=True
    )


def kept(cache):
    return len(list(Path(cache).rglob("*.json")))


def wait_for(process, cache, count):
    """Until so many points are done."""
    while kept(cache) < count and process.poll() is None:
        time.sleep(0.005)


def workers_of(process):
    """The processes that compute for a command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            line = (folder / "cmdline").read_bytes()
        except OSError:  # it ended in between
            continue
        if parent == process.pid and b"spawn_main" in line:
            found.append(int(folder.name))
    return found


def alive(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
