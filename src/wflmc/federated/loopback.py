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
from typing import Any, NamedTuple

import psutil

import wflmc
from wflmc.federated.deployment import LINK, QUIET, run_command, superlink_command, supernode_command, write_config
from wflmc.federated.folder import DEVICE, SERVER
from wflmc.federated.job import Job
from wflmc.federated.registration import DeploymentError, flwr, register
from wflmc.federated.server import read_log

HOST = "127.0.0.1"
GRACE = 15.0
"""Seconds for a process to end when it is asked to."""
PATIENCE = 180.0
"""Seconds for a process to come up. Flower refuses a node for about a minute after it was killed."""
WAIT = 240.0
"""Seconds that a run waits for its devices before the first round."""
LOOK = 15.0
"""Seconds without a finished round after which a run is asked for its status; asking takes seconds of a core."""

ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What ends this process from outside: `kill`, and a terminal that is closed."""


class Part(NamedTuple):
    """A process of the deployment, and where it writes."""

    process: psutil.Popen
    log: Path
    begin: int
    """Where its part of the log begins."""
    since: float
    """When it was started for the first time, by the monotonic clock."""

    @property
    def output(self) -> str:
        """What it has written."""
        return self.log.read_bytes()[self.begin :].decode("utf-8", "replace").strip()

    @property
    def admitted(self) -> bool:
        """Whether the SuperLink has let this SuperNode in."""
        return "SuperNode ID:" in self.output

    def tree(self) -> list[psutil.Process]:
        """Return all processes below this one, and itself last."""
        try:
            return [*self.process.children(recursive=True), self.process]
        except psutil.NoSuchProcess:
            return []


class Loopback:
    """A prepared federation on this machine; all of its processes end with the `with` block.

    Args:
        folder: as `prepare` left it; gets a folder `loopback` with logs and Flower's own state.
        port: of the SuperLink; a free one by default.
        say: called with a sentence for everything that happens.
    """

    def __init__(self, folder: Path, *, port: int | None = None, say: Callable[[str], None] = print) -> None:
        self.folder, self.server, self.say = folder.resolve(), folder.resolve() / SERVER, say
        self.state = self.folder / "loopback"
        self.env = environment(self.state / "flwr")
        self.rounds, self.port = len(Job.load(self.server).plan.rounds), port or free_port()
        self.link: Part | None = None
        self.nodes: dict[int, Part] = {}
        self._reported = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Loopback:
        write_config(self.state / "flwr", self.server / "ca.crt", f"{HOST}:{self.port}")
        if threading.current_thread() is threading.main_thread():
            for number in (one for one in ENDS if signal.getsignal(one) != signal.SIG_IGN):  # as nohup asks for
                self._handlers[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))
        return self

    def __exit__(self, *error: object) -> None:
        nodes, link = list(self.nodes.values()), [] if self.link is None else [self.link]
        processes = [process for part in (*nodes, *link) for process in part.tree()]
        try:
            # First the ServerApp, which would take leaving devices for absent ones; the SuperLink last, as devices sign
            # off there. What is started next time is then let in at once.
            kill([process for part in link for process in part.tree()[:-1]])
            for parts in (nodes, link):
                for part in parts:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        part.process.terminate()
                psutil.wait_procs([part.process for part in parts], GRACE)
        finally:
            kill(processes)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start_link(self) -> None:
        """Start the SuperLink, wait until it answers, and let the devices' keys in."""
        command = superlink_command(HOST, self.port, str(self.state / "superlink.db"))
        self.link = self._start("superlink", command, self.server, self.env)
        context = ssl.create_default_context(cafile=str(self.server / "ca.crt"))
        while not self._answers(context):
            if self.link.process.poll() is not None or time.monotonic() > self.link.since + PATIENCE:
                raise DeploymentError(f"The SuperLink did not come up:\n{self.link.output[-1500:]}")
            time.sleep(0.2)
        self.say(f"SuperLink at {HOST}:{self.port}, process {self.link.process.pid}")
        register(self.server, LINK, self.env, self.say)

    def start_node(self, k: int) -> None:
        """Start the SuperNode of a device; `supervise` starts it again should Flower refuse it."""
        name, before = DEVICE.format(k), self.nodes.get(k)
        command = supernode_command(f"{HOST}:{self.port}", free_port())
        part = self._start(name, command, self.folder / name, environment(self.state / name))
        if before is None:
            self.say(f"SuperNode of device {k}, process {part.process.pid}")
        self.nodes[k] = part if before is None or before.admitted else part._replace(since=before.since)

    def submit(self, deadline: float, wait: float = WAIT) -> str:
        """Start the run, or one that goes on where the last one was; return its id."""
        return str(flwr(run_command(deadline, wait), self.env, self.server)["run-id"])

    def wait(self, run: str, progress: Callable[[int, int], None] | None = None, until: int | None = None) -> None:
        """Follow a run to its end, or until some rounds are done; nodes that Flower refused are started again."""
        looked = time.monotonic()
        while until is None or self._reported < until:
            if self._report(progress):
                looked = time.monotonic()
            self.supervise()
            if time.monotonic() - looked > (1.0 if self._reported >= self.rounds else LOOK):
                status = flwr(["list", "--run-id", run, LINK], self.env)["runs"][0]["status"]
                looked = time.monotonic()
                if status == "finished:completed":
                    self._report(progress)
                    return
                if status.startswith("finished"):
                    raise DeploymentError(f"The run was not completed ({status}). Its log ends:\n{self._log(run)}")
            time.sleep(0.2)

    def supervise(self) -> None:
        """Start again what Flower has refused; DeploymentError where that does not help."""
        if self.link is None or self.link.process.poll() is not None:
            raise DeploymentError(f"The SuperLink has ended:\n{self.link.output[-1500:] if self.link else ''}")
        for k, part in self.nodes.items():
            if part.process.poll() is None:
                continue
            if not part.admitted and time.monotonic() - part.since > PATIENCE:
                raise DeploymentError(f"The SuperNode of device {k} is not let in:\n{part.output[-1500:]}")
            time.sleep(1.0)
            self.start_node(k)

    def _start(self, name: str, command: list[str], folder: Path, env: Mapping[str, str]) -> Part:
        """Start a process in a session of its own, so that Ctrl-C is for this one alone."""
        with (self.state / f"{name}.log").open("ab") as file:
            begin, nothing = file.tell(), subprocess.DEVNULL
            process = psutil.Popen(
                command, cwd=folder, env=env, stdin=nothing, stdout=file, stderr=file, start_new_session=True
            )
        return Part(process, Path(file.name), begin, time.monotonic())

    def _answers(self, context: ssl.SSLContext) -> bool:
        """Return whether the SuperLink answers by a certificate that devices trust."""
        connection = http.client.HTTPSConnection(HOST, self.port, context=context, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except ssl.SSLError as error:
            raise DeploymentError(f"The SuperLink's certificate does not fit: {error}") from None
        except OSError:
            return False

    def _report(self, progress: Callable[[int, int], None] | None) -> bool:
        """Say who was absent in rounds that are new in the log; return whether there are any."""
        rows = read_log(self.server)[self._reported :]
        self._reported += len(rows)
        for row in rows:
            for device, reason in row["absent"].items():
                self.say(f"round {row['round'] + 1}: device {device} absent: {reason}")
        if rows and progress is not None:
            progress(self._reported, self.rounds)
        return bool(rows)

    def _log(self, run: str) -> str:
        words = ["flwr", "log", run, LINK, "--show"]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        return re.sub(r"\x1b\[\d+m", "", done.stdout or done.stderr).strip()[-2000:]


def run_on_loopback(
    folder: Path, *, deadline: float, say: Callable[[str], None], progress: Callable[[int, int], None] | None = None
) -> None:
    """Run a prepared federation on this machine, as separate processes with TLS and authentication, to its end.

    A run that was stopped goes on where it was, with the same folder.

    Args:
        folder: as `prepare` left it.
        deadline: seconds that a round waits for its devices.
        say: called with a sentence for everything that happens.
        progress: called with (rounds done, rounds in all).
    """
    with Loopback(folder, say=say) as loopback:
        loopback.start_link()
        for k in range(len(list(folder.glob(DEVICE.format("*"))))):
            loopback.start_node(k)
        loopback.wait(loopback.submit(deadline), progress)


def kill(processes: list[psutil.Process]) -> None:
    """End processes without any warning, and wait until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GRACE)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: the same Python and wflmc as here, nothing asked of the network."""
    home.mkdir(parents=True, exist_ok=True)
    code = str(Path(wflmc.__file__).resolve().parents[1])
    return {
        "JAX_PLATFORMS": "cpu",
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        **dict.fromkeys(("NO_PROXY", "no_proxy"), f"{HOST},localhost"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def free_port() -> int:
    """Return a port that nobody uses, below those that systems give to connections, which could take it."""
    for port in random.sample(range(10240, 32768), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise DeploymentError("No free port was found on this machine.")
