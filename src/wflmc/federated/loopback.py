"""A deployment on one machine: SuperLink and SuperNodes as processes on loopback, by the documented commands."""

from __future__ import annotations

import http.client
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from wflmc.federated.deployment import LINK, run_command, superlink_command, supernode_command, write_config
from wflmc.federated.folder import DEVICE, SERVER
from wflmc.federated.job import Job
from wflmc.federated.processes import (
    HOST,
    Part,
    await_end,
    environment,
    free_port,
    groups_below,
    kill,
    signal_group,
    start,
)
from wflmc.federated.registration import DeploymentError, Node, flwr, register
from wflmc.federated.server import read_log

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
