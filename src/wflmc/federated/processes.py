"""Processes of a deployment on one machine: how they are started, and how they and all below them are ended."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import wflmc
from wflmc.federated.deployment import QUIET
from wflmc.federated.registration import DeploymentError

HOST = "127.0.0.1"
GRACE = 15.0
"""Seconds for a process to end when it is asked to."""


class Part(NamedTuple):
    """A process, what it is called, and where it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    begin: int
    """Where its part of the log begins."""

    @property
    def said(self) -> str:
        """What it has written."""
        return self.log.read_bytes()[self.begin :].decode("utf-8", "replace").strip()

    @property
    def tail(self) -> str:
        """The end of that."""
        return self.said[-1500:]

    @property
    def let_in(self) -> bool:
        """Whether the SuperLink has let this SuperNode in."""
        return "SuperNode ID:" in self.said


def start(name: str, command: list[str], folder: Path, env: Mapping[str, str], log: Path) -> Part:
    """Start a process in a group of its own, so that Ctrl-C is for this one alone."""
    with log.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    return Part(name, process, log, begin)


def groups_below(above: int) -> set[int]:
    """Process groups of a process and of all below it: Flower makes new ones."""
    rows, family = _all_processes(), {above}
    for _ in range(5):  # a process, its superexec, its app, and what that may start
        family |= {pid for pid, parent, _ in rows if parent in family}
    return {above} | {group for pid, _, group in rows if pid in family} - {os.getpgrp()}


def kill(part: Part) -> None:
    """End a process and all below it without any warning."""
    for group in groups_below(part.process.pid):
        signal_group(group, signal.SIGKILL)
    part.process.wait()


def environment(home: Path) -> dict[str, str]:
    """Environment of Flower's processes: the same Python and wflmc as here, nothing asked of the network."""
    home.mkdir(parents=True, exist_ok=True)
    found = {"JAX_PLATFORMS": "cpu", **os.environ, **QUIET, "FLWR_HOME": str(home)}
    found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    found["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"
    found["NO_PROXY"] = found["no_proxy"] = f"{HOST},localhost"
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    code = str(Path(wflmc.__file__).resolve().parents[1])
    found["PYTHONPATH"] = os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def free_port() -> int:
    """A port of this machine that nobody uses, below those that systems give to connections, which could take it."""
    for port in random.sample(range(10240, 32768), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise DeploymentError("No free port was found on this machine.")


def _all_processes() -> list[tuple[int, int, int]]:
    """(process, parent, group) of all that run on this machine."""
    if Path("/proc/self/stat").exists():
        found = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended by now
                state = file.read_text().rpartition(")")[2].split()
                found.append((int(file.parent.name), int(state[1]), int(state[2])))
        return found
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,pgid="], capture_output=True, text=True, check=True)
    rows = [[int(word) for word in line.split()] for line in listed.stdout.splitlines()]
    return [(pid, parent, group) for pid, parent, group in rows]


def await_end(process: subprocess.Popen[bytes]) -> None:
    """Give a process time to end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def signal_group(group: int, number: int) -> bool:
    """Signal a process group; whether there is one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
