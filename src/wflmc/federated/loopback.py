"""A deployment on one machine: SuperLink and SuperNodes as processes on loopback, by the documented commands."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import wflmc
from wflmc.federated.deployment import LINK, QUIET, run_command, superlink_command, supernode_command, write_config
from wflmc.federated.folder import DEVICE, SERVER
from wflmc.federated.job import Job
from wflmc.federated.registration import DeploymentError, Node, flwr, register
from wflmc.federated.server import read_log

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


PATIENCE = 180.0
"""Seconds for a process to come up. Flower refuses a node for about a minute after it was killed."""
WAIT = 240.0
"""Seconds that a run waits for its devices before the first round."""
LOOK = 15.0
"""Seconds without news after which a run is asked whether it still runs; asking takes seconds of a core."""

ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What ends this process from outside: `kill`, and a terminal that is closed."""


class Loopback:
    """A prepared federation on this machine; all of its processes end with the `with` block.

    Args:
        folder: as `prepare` left it; gets a folder `loopback` with logs and Flower's own state.
        port: of the SuperLink; a free one by default.
    """

    def __init__(self, folder: Path, *, port: int | None = None, say: Callable[[str], None] = print) -> None:
        self.folder, self.server, self.say = folder.resolve(), folder.resolve() / SERVER, say
        self.own = self.folder / "loopback"
        self.job = Job.load(self.server)
        self.devices = self.job.plan.devices
        self.port = port or free_port()
        self.link: Part | None = None
        self.nodes: dict[int, Part] = {}
        self._since: dict[int, float] = {}
        self._told = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Loopback:
        write_config(self.own / "flwr", self.server / "ca.crt", f"{HOST}:{self.port}")
        if threading.current_thread() is threading.main_thread():
            for number in (one for one in ENDS if signal.getsignal(one) != signal.SIG_IGN):  # as nohup asks for
                self._before[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        link = [] if self.link is None else [self.link]
        parts = [*self.nodes.values(), *link]
        groups = {part.process.pid: {part.process.pid} for part in parts}
        try:
            groups = {part.process.pid: groups_below(part.process.pid) for part in parts}
            # First the ServerApp, which would take leaving devices for absent ones; the SuperLink last, as devices sign
            # off there. What is started next time is then let in at once.
            for part in link:
                for group in groups[part.process.pid] - {part.process.pid}:
                    signal_group(group, signal.SIGKILL)
            for some in (list(self.nodes.values()), link):
                for part in some:
                    part.process.terminate()
                for part in some:
                    await_end(part.process)
        finally:
            for group in set().union(*groups.values()):
                signal_group(group, signal.SIGKILL)
            for part in parts:
                part.process.wait()
            for number, before in self._before.items():
                signal.signal(number, before)

    @property
    def env(self) -> dict[str, str]:
        """Environment of Flower's commands and of the SuperLink."""
        return environment(self.own / "flwr")

    def start_link(self) -> None:
        """Start the SuperLink, or start it again, and wait until it answers."""
        command = superlink_command(HOST, self.port, str(self.own / "superlink.db"))
        self.link = self._start("superlink", command, self.server, self.env)
        context = ssl.create_default_context(cafile=str(self.server / "ca.crt"))
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.link.process.poll() is None:
            try:
                asked = http.client.HTTPSConnection(HOST, self.port, context=context, timeout=5)
                asked.request("GET", "/health")
                if asked.getresponse().status == 200:
                    self.say(f"SuperLink at {HOST}:{self.port}, process {self.link.process.pid}")
                    return
            except ssl.SSLError as error:
                raise DeploymentError(f"The SuperLink's certificate does not fit: {error}") from None
            except OSError:
                time.sleep(0.2)
        raise DeploymentError(f"The SuperLink did not come up:\n{self.link.tail}")

    def register(self) -> list[Node]:
        """Let the devices' keys in, and write down which node is which device."""
        return register(self.server, LINK, self.env, self.say)

    def start_node(self, k: int) -> None:
        """Start the SuperNode of a device; `wait` starts it again should Flower refuse it."""
        self._since.setdefault(k, time.monotonic())
        self._launch(k)
        self.say(f"SuperNode of device {k}, process {self.nodes[k].process.pid}")

    def await_node(self, k: int) -> None:
        """Wait until the SuperNode of a device has been let in, however often it has to be started again."""
        while not self.nodes[k].let_in:
            self.supervise()
            time.sleep(0.2)

    def kill_node(self, k: int) -> None:
        """End the SuperNode of a device without any warning."""
        kill(self.nodes.pop(k))
        self._since.pop(k, None)

    def kill_link(self) -> None:
        """End the SuperLink and the ServerApp that it runs without any warning."""
        assert self.link is not None
        kill(self.link)
        self.link = None

    def submit(self, deadline: float, wait: float = WAIT) -> str:
        """Start the run, or one that goes on where the last one was; its id."""
        done = flwr(run_command(deadline, wait), self.env, self.server)
        return str(done["run-id"])

    def status(self, run: str) -> str:
        """What Flower says of a run, such as "running" or "finished:failed"."""
        return str(flwr(["list", "--run-id", run, LINK], self.env)["runs"][0]["status"])

    def done(self) -> int:
        """Rounds that have been run."""
        return len(read_log(self.server))

    def wait(self, run: str, progress: Callable[[int, int], None] | None = None, until: int | None = None) -> None:
        """Follow a run to its end, or until some rounds are done; nodes that Flower refused are started again."""
        total, looked = self.job.plan.rounds, time.monotonic()
        while until is None or self._told < until:
            if self._news(progress):
                looked = time.monotonic()
            self.supervise()
            if time.monotonic() - looked > (1.0 if self._told >= total else LOOK):
                state, looked = self.status(run), time.monotonic()
                if state == "finished:completed":
                    self._news(progress)
                    return
                if state.startswith("finished"):
                    raise DeploymentError(f"The run was not completed ({state}). Its log ends:\n{self._log(run)}")
            time.sleep(0.2)

    def supervise(self) -> None:
        """Start again what Flower has refused; DeploymentError where that does not help."""
        if self.link is None or self.link.process.poll() is not None:
            raise DeploymentError(f"The SuperLink has ended:\n{self.link.tail if self.link else ''}")
        for k, part in list(self.nodes.items()):
            if part.process.poll() is None:
                continue
            if part.let_in:
                self._since[k] = time.monotonic()
            if time.monotonic() - self._since[k] > PATIENCE:
                raise DeploymentError(f"The SuperNode of device {k} is not let in:\n{part.tail}")
            signal_group(part.process.pid, signal.SIGKILL)  # what it has left
            time.sleep(1.0)
            self._launch(k)

    def _launch(self, k: int) -> None:
        own, name = self.folder / DEVICE.format(k), DEVICE.format(k)
        command = supernode_command(f"{HOST}:{self.port}", free_port())
        self.nodes[k] = self._start(name, command, own, environment(self.own / name))

    def _start(self, name: str, command: list[str], folder: Path, env: Mapping[str, str]) -> Part:
        return start(name, command, folder, env, self.own / f"{name}.log")

    def _news(self, progress: Callable[[int, int], None] | None) -> bool:
        """Tell of rounds that have been run since the last call; whether there were any."""
        fresh = read_log(self.server)[self._told :]
        self._told += len(fresh)
        for row in fresh:
            for device, why in row["absent"].items():
                self.say(f"round {row['round'] + 1}: device {device} absent: {why}")
        if fresh and progress is not None:
            progress(self._told, self.job.plan.rounds)
        return bool(fresh)

    def _log(self, run: str) -> str:
        words = ["flwr", "log", run, LINK, "--show"]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        return re.sub(r"\x1b\[\d+m", "", done.stdout or done.stderr).strip()[-2000:]
