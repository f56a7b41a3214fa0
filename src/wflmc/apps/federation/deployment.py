"""A federation on machines of its own: certificates, keys, Flower's app, and the commands, also run on one machine.

What `write_federation` has written gets, by `prepare`,

    ca/ca.key, ca.crt                         the authority; its key signs certificates of the server: keep it elsewhere
    server/ca.crt, server.pem, server.key     TLS
    server/keys/device-k.pub                  whom the server is to let in
    server/app/pyproject.toml                 Flower's app, which names two modules of wflmc and has no code
    server/flwr/config.toml                   where Flower's commands find the SuperLink
    device-k/ca.crt, key, key.pub             whom the device trusts, and what it proves itself with
    COMMANDS.md                               what to type on the server and on every device

`Loopback` runs the same commands on this machine, SuperLink and SuperNodes as processes of their own.
"""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

import psutil

import wflmc
from wflmc.apps.federation.certificates import (
    write_authority,
    write_device_key,
    write_server_certificate,
)
from wflmc.apps.federation.job import Job
from wflmc.apps.federation.messages import DEVICE, SERVER
from wflmc.apps.federation.registration import KEYS, DeploymentError, register
from wflmc.apps.federation.server import read_log
from wflmc.sampling.execution import ProgressCallback
from wflmc.support.storage import write_text
from wflmc.version import __version__

LINK = "wflmc"
"""What the SuperLink is called in Flower's configuration."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Flower asks its makers' servers nothing."""
FIRST_PORT = 9094
"""Of the SuperNodes' own processes, on their own machines."""
HOST, ADDRESS = "127.0.0.1", "127.0.0.1:8000"
GRACE = 15.0
"""Seconds for a process to end when it is asked to."""
PATIENCE = 180.0
"""Seconds for the SuperLink to come up."""
WAIT = 240.0
"""Seconds that a run waits for its devices before the first round."""

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""What ends this process from outside: `kill`, and a terminal that is closed."""
NODE = "\nDevice {k}, in the folder `{folder}`:\n\n```bash\n{quiet}\n{command}\n```\n"


def prepare(
    folder: Path, devices: int, address: str = ADDRESS, deadline: float = 60.0
) -> None:
    """Add to the folder of a federation what its machines need; certificates and keys that are there are kept.

    Args:
        folder: as `write_federation` left it.
        devices: K.
        address: host and port at which devices reach the server; this machine's own names always reach it.
        deadline: seconds that a round waits for its devices.
    """
    server, authority, host = (
        folder / SERVER,
        folder / "ca",
        address.rpartition(":")[0].strip("[]"),
    )
    if not (server / "server.pem").exists() or not (server / "ca.crt").exists():
        authority.mkdir(exist_ok=True, mode=0o700)
        server.chmod(0o700)
        if not (authority / "ca.key").exists():
            write_authority(authority)
        shutil.copyfile(authority / "ca.crt", server / "ca.crt")
        write_server_certificate(
            authority, server, list(dict.fromkeys([HOST, "::1", "localhost", host]))
        )
    for place in (server / KEYS, server / "app"):
        place.mkdir(exist_ok=True)
    for place in (folder / DEVICE.format(k) for k in range(devices)):
        place.chmod(0o700)
        shutil.copyfile(server / "ca.crt", place / "ca.crt")
        if not (place / "key.pub").exists():
            write_device_key(place)
        shutil.copyfile(place / "key.pub", server / KEYS / f"{place.name}.pub")
    write_text(
        server / "app" / "pyproject.toml", _filled("app.toml", version=__version__)
    )
    write_config(server / "flwr", server.resolve() / "ca.crt", address)
    write_text(folder / "COMMANDS.md", _commands(devices, address, deadline))


def write_config(home: Path, certificate: Path, address: str) -> None:
    """Write Flower's configuration into a folder for FLWR_HOME: where the SuperLink is, and whom to trust as it."""
    home.mkdir(exist_ok=True, parents=True)
    where = {
        "address": json.dumps(address),
        "certificate": json.dumps(str(certificate)),
    }
    write_text(home / "config.toml", _filled("config.toml", name=LINK, **where))


def superlink_command(
    host: str, port: int | str, database: str = "superlink.db"
) -> list[str]:
    """Return what starts the SuperLink, in the server's folder."""
    tls = "--ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key"
    options = f"{tls} --enable-supernode-auth --disable-runtime-dependency-installation --database"
    return [
        "flower-superlink",
        "--host",
        host,
        "--port",
        str(port),
        *options.split(),
        database,
    ]


def supernode_command(address: str, port: int) -> list[str]:
    """Return what starts the SuperNode of a device, in its folder; its port is for processes of its own machine."""
    options = f"--root-certificates ca.crt --auth-supernode-private-key key --port {port} --node-config folder='.'"
    return ["flower-supernode", "--superlink", address, *options.split()]


def run_command(deadline: float, wait: float) -> list[str]:
    """Return the arguments of `flwr` that start the run, in the server's folder."""
    return [
        "run",
        "app",
        LINK,
        "--run-config",
        f"folder='.' deadline={float(deadline)} wait={float(wait)}",
    ]


def _commands(devices: int, address: str, deadline: float) -> str:
    """Return the text of COMMANDS.md."""
    host, _, port = address.rpartition(":")
    quiet = (
        "export "
        + " ".join(f"{name}={value}" for name, value in QUIET.items())
        + ' FLWR_HOME="$PWD/flwr"'
    )
    link, run = (
        superlink_command(host.strip("[]"), port),
        ["flwr", *run_command(deadline, 600)],
    )
    commands = [
        _shown(supernode_command(address, FIRST_PORT + k)) for k in range(devices)
    ]
    nodes = [
        NODE.format(k=k, folder=DEVICE.format(k), quiet=quiet, command=text)
        for k, text in enumerate(commands)
    ]
    shown = {
        "quiet": quiet,
        "link": _shown(link),
        "name": LINK,
        "nodes": "".join(nodes),
        "run": _shown(run),
    }
    return _filled("commands.md", **shown)


def _filled(template: str, **parts: str) -> str:
    """Return a template with its parts filled in."""
    return (
        Path(__file__)
        .with_name("templates")
        .joinpath(template)
        .read_text(encoding="utf-8")
        .format(**parts)
    )


def _shown(words: list[str]) -> str:
    """Return a command as it is typed; options on lines of their own where it is long."""
    text = " ".join(f'"{word}"' if "'" in word else shlex.quote(word) for word in words)
    return text if len(text) < 110 else text.replace(" --", " \\\n  --")


class Part(NamedTuple):
    """A process of the deployment, and where it writes."""

    process: psutil.Popen
    log: Path

    @property
    def output(self) -> str:
        """What it has written, without colours."""
        return re.sub(
            r"\x1b\[\d+m", "", self.log.read_text(encoding="utf-8", errors="replace")
        ).strip()

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

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.server, self.say = (
            folder.resolve(),
            folder.resolve() / SERVER,
            say,
        )
        self.state = self.folder / "loopback"
        self.env = environment(self.state / "flwr")
        self.rounds, self.port = (
            len(Job.load(self.server).plan.rounds),
            port or free_port(),
        )
        self.parts: dict[str, Part] = {}
        self._reported = 0
        self._handlers: dict[
            int, Callable[[int, FrameType | None], object] | int | None
        ] = {}

    def __enter__(self) -> Self:
        write_config(self.state / "flwr", self.server / "ca.crt", f"{HOST}:{self.port}")
        for number in (
            one for one in ENDS if signal.getsignal(one) != signal.SIG_IGN
        ):  # as nohup asks for
            self._handlers[number] = signal.signal(
                number, lambda number, _: sys.exit(128 + number)
            )
        return self

    def __exit__(self, *error: object) -> None:
        link = [self.parts.pop(name) for name in (LINK,) if name in self.parts]
        processes = [
            process for part in (*self.parts.values(), *link) for process in part.tree()
        ]
        try:
            # First the ServerApp, which would take leaving devices for absent ones; the SuperLink last, as devices sign
            # off there. What is started next time is then let in at once.
            kill([process for part in link for process in part.tree()[:-1]])
            for parts in (list(self.parts.values()), link):
                for part in parts:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        part.process.terminate()
                psutil.wait_procs([part.process for part in parts], GRACE)
        finally:
            kill(processes)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def run(self, deadline: float, progress: ProgressCallback | None = None) -> None:
        """Run the federation, with TLS and authentication, to its end; one that was stopped goes on where it was.

        Args:
            deadline: seconds that a round waits for its devices.
            progress: called with (rounds done, rounds in all).
        """
        self.start_link()
        for k in range(len(list(self.folder.glob(DEVICE.format("*"))))):
            self.start_node(k)
        self.wait(self.submit(deadline), progress)

    def start_link(self) -> None:
        """Start the SuperLink, wait until it answers, and let the devices' keys in."""
        command = superlink_command(HOST, self.port, str(self.state / "superlink.db"))
        link, end = (
            self._start(LINK, command, self.server, self.env),
            time.monotonic() + PATIENCE,
        )
        while not self._listens():
            if link.process.poll() is not None or time.monotonic() > end:
                raise DeploymentError(
                    f"The SuperLink did not come up:\n{link.output[-1500:]}"
                )
            time.sleep(0.2)
        self.say(f"SuperLink at {HOST}:{self.port}, process {link.process.pid}")
        register(self.server, LINK, self.env, self.say)

    def start_node(self, k: int) -> None:
        """Start the SuperNode of a device."""
        name, command = (
            DEVICE.format(k),
            supernode_command(f"{HOST}:{self.port}", free_port()),
        )
        self._start(name, command, self.folder / name, environment(self.state / name))

    def submit(self, deadline: float, wait: float = WAIT) -> Part:
        """Start the run, or one that goes on where the last one was; return the process that follows it."""
        return self._start(
            "run",
            ["flwr", *run_command(deadline, wait), "--stream"],
            self.server,
            self.env,
        )

    def wait(
        self,
        run: Part,
        progress: ProgressCallback | None = None,
        until: int | None = None,
    ) -> None:
        """Follow a run to its end, or until some rounds are done; start SuperNodes again that Flower has refused."""
        ended = False
        while not ended and (until is None or self._reported < until):
            time.sleep(0.2)
            ended = run.process.poll() is not None
            self._report(progress)
            gone = [
                name
                for name, part in self.parts.items()
                if part.process.poll() is not None
            ]
            for name in (name for name in gone if self.parts[name] is not run):
                if name == LINK:
                    raise DeploymentError(
                        f"The SuperLink has ended:\n{self.parts[name].output[-1500:]}"
                    )
                time.sleep(
                    1.0
                )  # Flower refuses a node for about a minute after it was killed
                self.start_node(int(name.removeprefix(DEVICE.format(""))))
        if ended and self._reported < self.rounds:
            raise DeploymentError(why_stopped(run.output))

    def _start(
        self, name: str, command: list[str], folder: Path, env: Mapping[str, str]
    ) -> Part:
        """Start a process in a session of its own, so that Ctrl-C is for this one alone."""
        log, how = (
            self.state / f"{name}.log",
            {"cwd": folder, "env": env, "stdin": subprocess.DEVNULL},
        )
        with log.open("wb") as file:
            process = psutil.Popen(
                command, **how, stdout=file, stderr=file, start_new_session=True
            )
        self.parts[name] = Part(process, log)
        return self.parts[name]

    def _listens(self) -> bool:
        """Return whether the SuperLink has opened its port."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=5),
        ):
            return True
        return False

    def _report(self, progress: ProgressCallback | None) -> None:
        """Say who was absent in rounds that are new in the log."""
        rows = read_log(self.server)[self._reported :]
        self._reported += len(rows)
        for row in rows:
            for device, reason in row["absent"].items():
                self.say(f"round {row['round'] + 1}: device {device} absent: {reason}")
        if rows and progress is not None:
            progress(self._reported, self.rounds)


def why_stopped(output: str) -> str:
    """Return why a run was not completed, from what its process has written.

    That is the sentence of the server's own DeploymentError where it has raised one, such as
    over devices that cannot use their data; else the end of the output.
    """
    raised = re.findall(rf"{DeploymentError.__name__}: (.+)", output)
    return (
        raised[-1]
        if raised
        else f"The run was not completed. Its log ends:\n{output[-2000:]}"
    )


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
        "PYTHONPATH": os.pathsep.join(
            [code, *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }


def free_port() -> int:
    """Return a port that nobody uses, below those that systems give to connections, which could take it."""
    for port in random.sample(range(10240, 32768), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise DeploymentError("No free port was found on this machine.")
