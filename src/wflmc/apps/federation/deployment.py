"""A federation on machines of its own: certificates, keys, Flower's app and commands.

`prepare` adds to what `write_federation` has written:

    ca/ca.key, ca.crt                        the authority; its key signs certificates
                                             of the server: keep it elsewhere
    server/ca.crt, server.pem, server.key    TLS
    server/keys/device-k.pub                 the keys of devices that the server admits
    server/app/pyproject.toml                Flower's app, which names two modules of
                                             wflmc and has no code
    server/flwr/config.toml                  where Flower's commands find the SuperLink
    device-k/ca.crt, key, key.pub            the authority that the device trusts, and
                                             the key that proves who it is
    COMMANDS.md                              what to type on the server and on every
                                             device

`Loopback` runs the same commands on this machine, with SuperLink and SuperNodes as
separate processes.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, Self

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
from wflmc.apps.federation.server import Notify, read_log
from wflmc.sampling.execution import ProgressCallback
from wflmc.support.storage import write_text
from wflmc.version import __version__

SUPERLINK_NAME = "wflmc"
"""The name of the SuperLink in Flower's configuration, and among the processes here."""
RUN_NAME = "run"
"""The name of the process that follows the run."""
NO_TELEMETRY = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Environment variables that keep Flower from contacting its makers' servers."""
COMMANDS_FILE = "COMMANDS.md"
"""In the folder of a federation: what to type on its machines."""
LOOPBACK_HOST = "127.0.0.1"
"""The address of this machine."""
DEFAULT_ADDRESS = "127.0.0.1:8000"
"""Where devices reach the server, unless another address is named."""
FIRST_SUPERNODE_PORT = 9094
"""The port for the processes of the first device's SuperNode, on its own machine."""
PORTS = range(10240, 32768)
"""Ports that may be chosen for a server: above those of the system's services, and
below those that systems give to connections."""
MAX_PORT_TRIES = 1000
"""How many ports are tried before none counts as free."""

POLL_SECONDS = 0.2
"""Seconds between two looks at a process."""
END_SECONDS = 15.0
"""Seconds that a process gets to end after a signal."""
SUPERLINK_START_SECONDS = 180.0
"""Seconds that the SuperLink gets to come up."""
DEVICE_WAIT_SECONDS = 240.0
"""Seconds that a run waits for its devices before the first round."""
COMMANDED_WAIT_SECONDS = 600
"""The same, in the commands for machines of their own, which people start."""
CONNECT_SECONDS = 5
"""Seconds that the SuperLink gets to accept a connection."""
RESTART_SECONDS = 1.0
"""Seconds before a SuperNode that ended is started again."""

MAX_COMMAND_LENGTH = 110
"""A longer command is shown with every option on a line of its own."""
LOG_TAIL = 1500
"""Characters that an error shows of the log of a SuperLink."""
RUN_LOG_TAIL = 2000
"""Characters that an error shows of the log of a run."""

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""What ends this process from outside: `kill`, and a terminal that is closed."""
DEVICE_SECTION = (
    "\nDevice {device}, in the folder `{folder}`:\n\n```bash\n{quiet}\n{command}\n```\n"
)
"""What COMMANDS.md has for every device."""

SignalHandler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` returns."""


def prepare(
    folder: Path,
    devices: int,
    address: str = DEFAULT_ADDRESS,
    deadline: float = 60.0,
) -> None:
    """Add to the folder of a federation what its machines need.

    Certificates and keys that exist are kept, so that a second call repairs what is
    missing: without server/server.pem, a new certificate is signed by the authority in
    `ca`; without device-k/key.pub, device k gets a new key. If ca.key is missing as
    well, the authority is a new one, and every device needs its ca.crt.

    Args:
        folder: as `write_federation` left it.
        devices: K.
        address: host and port at which devices reach the server; this machine's own
            names always reach it.
        deadline: seconds that a round waits for its devices.
    """
    server = folder / SERVER
    _prepare_certificates(folder, address)
    (server / KEYS).mkdir(exist_ok=True)
    for device in range(devices):
        _prepare_device(folder / DEVICE.format(device), server)
    app = server / "app"
    app.mkdir(exist_ok=True)
    write_text(app / "pyproject.toml", _fill_template("app.toml", version=__version__))
    write_config(server / "flwr", server.resolve() / "ca.crt", address)
    write_text(folder / COMMANDS_FILE, _commands(devices, address, deadline))


def _prepare_certificates(folder: Path, address: str) -> None:
    """Write the authority and the server's certificate, where one is missing."""
    server = folder / SERVER
    authority = folder / "ca"
    if (server / "server.pem").exists() and (server / "ca.crt").exists():
        return
    authority.mkdir(exist_ok=True, mode=0o700)
    server.chmod(0o700)
    if not (authority / "ca.key").exists():
        write_authority(authority)
    shutil.copyfile(authority / "ca.crt", server / "ca.crt")
    host = address.rpartition(":")[0].strip("[]")
    hosts = dict.fromkeys([LOOPBACK_HOST, "::1", "localhost", host])
    write_server_certificate(authority, server, list(hosts))


def _prepare_device(folder: Path, server: Path) -> None:
    """Write what a device needs, and its public key for the server."""
    folder.chmod(0o700)
    shutil.copyfile(server / "ca.crt", folder / "ca.crt")
    if not (folder / "key.pub").exists():
        write_device_key(folder)
    shutil.copyfile(folder / "key.pub", server / KEYS / f"{folder.name}.pub")


def write_config(home: Path, certificate: Path, address: str) -> None:
    """Write Flower's configuration, which says where the SuperLink is.

    Flower's commands read it where the environment variable FLWR_HOME names the folder.
    They connect by TLS, and trust only servers with a certificate of this authority.

    Args:
        home: the folder; created where it does not exist.
        certificate: of the authority, ca.crt.
        address: host and port of the SuperLink.
    """
    home.mkdir(exist_ok=True, parents=True)
    config = _fill_template(
        "config.toml",
        name=SUPERLINK_NAME,
        address=json.dumps(address),
        certificate=json.dumps(str(certificate)),
    )
    write_text(home / "config.toml", config)


def superlink_command(
    host: str,
    port: int | str,
    database: str = "superlink.db",
) -> list[str]:
    """Return the command that starts the SuperLink, in the server's folder.

    It uses TLS, and admits only SuperNodes whose keys have been registered. It installs
    nothing: apps run with the packages that are there.

    Args:
        host: address to listen at.
        port: to listen at.
        database: file of Flower's own state, which survives a restart.

    Returns:
        The program and its arguments.
    """
    command = ["flower-superlink", "--host", host, "--port", str(port)]
    command += ["--ssl-ca-certfile", "ca.crt"]
    command += ["--ssl-certfile", "server.pem"]
    command += ["--ssl-keyfile", "server.key"]
    command += ["--enable-supernode-auth"]
    command += ["--disable-runtime-dependency-installation"]
    command += ["--database", database]
    return command


def supernode_command(address: str, port: int) -> list[str]:
    """Return the command that starts the SuperNode of a device, in its folder.

    The SuperNode trusts the authority of the federation, and proves with the device's
    key who it is.

    Args:
        address: host and port of the SuperLink.
        port: for processes of the device's own machine; every SuperNode of one machine
            needs another one.

    Returns:
        The program and its arguments.
    """
    command = ["flower-supernode", "--superlink", address]
    command += ["--root-certificates", "ca.crt"]
    command += ["--auth-supernode-private-key", "key"]
    command += ["--port", str(port)]
    command += ["--node-config", "folder='.'"]
    return command


def run_command(deadline: float, wait: float) -> list[str]:
    """Return the arguments of `flwr` that start the run, in the server's folder.

    The same command resumes a run that was stopped.

    Args:
        deadline: seconds that a round waits for its devices.
        wait: seconds to wait for devices before the first round.

    Returns:
        The arguments after `flwr`.
    """
    config = f"folder='.' deadline={float(deadline)} wait={float(wait)}"
    return ["run", "app", SUPERLINK_NAME, "--run-config", config]


def _commands(devices: int, address: str, deadline: float) -> str:
    """Return the text of COMMANDS.md."""
    host, _, port = address.rpartition(":")
    variables = [f"{name}={value}" for name, value in NO_TELEMETRY.items()]
    quiet = f'export {" ".join(variables)} FLWR_HOME="$PWD/flwr"'
    sections = []
    for device in range(devices):
        command = supernode_command(address, FIRST_SUPERNODE_PORT + device)
        section = DEVICE_SECTION.format(
            device=device,
            folder=DEVICE.format(device),
            quiet=quiet,
            command=_format_command(command),
        )
        sections.append(section)
    superlink = superlink_command(host.strip("[]"), port)
    run = ["flwr", *run_command(deadline, COMMANDED_WAIT_SECONDS)]
    return _fill_template(
        "commands.md",
        quiet=quiet,
        link=_format_command(superlink),
        name=SUPERLINK_NAME,
        nodes="".join(sections),
        run=_format_command(run),
    )


def _fill_template(template: str, **values: str) -> str:
    """Return a template of this package with its fields filled in."""
    path = Path(__file__).with_name("templates") / template
    return path.read_text(encoding="utf-8").format(**values)


def _format_command(command: list[str]) -> str:
    """Return a command as it is typed, in a shell.

    A long one has every option on a line of its own.
    """
    words = [f'"{word}"' if "'" in word else shlex.quote(word) for word in command]
    text = " ".join(words)
    if len(text) < MAX_COMMAND_LENGTH:
        return text
    return text.replace(" --", " \\\n  --")


class LoggedProcess(NamedTuple):
    """A process of the deployment, and the file that has its output."""

    process: psutil.Popen
    log: Path

    @property
    def output(self) -> str:
        """Return what the process has written so far.

        Both its standard output and its errors are in it, without the codes by which
        terminals show colours. Bytes that are not UTF-8 are replaced.
        """
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return re.sub(r"\x1b\[\d+m", "", text).strip()

    @property
    def ended(self) -> bool:
        """Return whether the process has ended.

        Its children may outlive it: a SuperLink and a SuperNode start processes for the
        apps that they run. The property says nothing of those; see `tree`.
        """
        return self.process.poll() is not None

    def tree(self) -> list[psutil.Process]:
        """Return all processes that this one has started, and itself last.

        The children of children are in it. It is empty once `ended` is true: the
        children of a process that has ended can no longer be found.
        """
        try:
            return [*self.process.children(recursive=True), self.process]
        except psutil.NoSuchProcess:
            return []


class Loopback:
    """A prepared federation on this machine.

    All of its processes end with the `with` block: first the ServerApp, then the
    SuperNodes, then the SuperLink. The block is also left on Ctrl-C, SIGTERM and
    SIGHUP, but not on SIGKILL.

    Args:
        folder: as `prepare` left it; gets a folder `loopback` with logs and Flower's
            own state.
        port: of the SuperLink; a free one by default.
        notify: called with a sentence for everything that happens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        notify: Notify = print,
    ) -> None:
        self.folder = folder.resolve()
        self.server = self.folder / SERVER
        self.notify = notify
        self.state = self.folder / "loopback"
        self.environment = environment(self.state / "flwr")
        plan = Job.load(self.server).plan
        self.rounds = len(plan.rounds)
        self.devices = plan.devices
        self.port = port or free_port()
        self.processes: dict[str, LoggedProcess] = {}
        self._reported_rounds = 0
        self._previous_handlers: dict[int, SignalHandler] = {}

    @property
    def address(self) -> str:
        """Return the host and the port of the SuperLink.

        The host is this machine's own address, which is in the server's certificate,
        so that SuperNodes and Flower's commands trust it. Other machines cannot reach
        it.
        """
        return f"{LOOPBACK_HOST}:{self.port}"

    def __enter__(self) -> Self:
        write_config(self.state / "flwr", self.server / "ca.crt", self.address)
        for number in END_SIGNALS:
            # An ignored signal stays ignored, as nohup needs it.
            if signal.getsignal(number) != signal.SIG_IGN:
                previous = signal.signal(number, _exit_on_signal)
                self._previous_handlers[number] = previous
        return self

    def __exit__(self, *error: object) -> None:
        superlink = self.processes.pop(SUPERLINK_NAME, None)
        clients = list(self.processes.values())
        links = [] if superlink is None else [superlink]
        # Listed now: children of a process that has ended can no longer be found.
        trees = [process for logged in (*clients, *links) for process in logged.tree()]
        try:
            # The ServerApp first: it would take leaving devices for absent ones. The
            # SuperLink last: devices that sign off there are admitted at once the next
            # time.
            for link in links:
                kill(link.tree()[:-1])
            _terminate(clients)
            _terminate(links)
        finally:
            kill(trees)
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)

    def run(self, deadline: float, progress: ProgressCallback | None = None) -> None:
        """Run the federation to its end, or resume it where it was stopped.

        The SuperLink and one SuperNode for every device are started, with TLS and
        authentication, and the run is submitted.

        Args:
            deadline: seconds that a round waits for its devices.
            progress: called with (rounds finished, rounds of the plan).

        Raises:
            DeploymentError: a process did not come up, or the run was not completed.
        """
        self.start_superlink()
        for device in range(self.devices):
            self.start_supernode(device)
        self.wait(self.submit(deadline), progress)

    def start_superlink(self) -> None:
        """Start the SuperLink, wait until it answers, and register the devices' keys.

        Keys that are registered already stay so. Its database is in the folder of the
        state, so that a SuperLink that was killed can be started again.

        Raises:
            DeploymentError: it did not come up, or refused a key.
        """
        database = str(self.state / "superlink.db")
        command = superlink_command(LOOPBACK_HOST, self.port, database)
        superlink = self._start(SUPERLINK_NAME, command, self.server, self.environment)
        end = time.monotonic() + SUPERLINK_START_SECONDS
        while not self._listens():
            if superlink.ended or time.monotonic() > end:
                log = superlink.output[-LOG_TAIL:]
                raise DeploymentError(f"The SuperLink did not come up:\n{log}")
            time.sleep(POLL_SECONDS)
        self.notify(f"SuperLink at {self.address}, process {superlink.process.pid}")
        register(self.server, SUPERLINK_NAME, self.environment, self.notify)

    def start_supernode(self, device: int) -> None:
        """Start the SuperNode of a device, and do not wait until it is connected.

        It runs in the folder of the device, with a state of Flower's own. A run waits
        for its devices before the first round. If the SuperNode is started again, its
        log goes on in the same file: what ended it before stays there.

        Args:
            device: its number.
        """
        name = DEVICE.format(device)
        command = supernode_command(self.address, free_port())
        own_environment = environment(self.state / name)
        self._start(
            name,
            command,
            self.folder / name,
            own_environment,
            appends=name in self.processes,
        )

    def submit(
        self,
        deadline: float,
        wait: float = DEVICE_WAIT_SECONDS,
    ) -> LoggedProcess:
        """Submit the run to the SuperLink; one that was stopped is resumed.

        Args:
            deadline: seconds that a round waits for its devices.
            wait: seconds to wait for devices before the first round.

        Returns:
            The process that follows the run, and ends with it; for `wait`.
        """
        command = ["flwr", *run_command(deadline, wait), "--stream"]
        return self._start(RUN_NAME, command, self.server, self.environment)

    def wait(
        self,
        run: LoggedProcess,
        progress: ProgressCallback | None = None,
        until: int | None = None,
    ) -> None:
        """Follow a run to its end, or until some rounds are finished.

        SuperNodes that have ended are started again: Flower refuses a node for about a
        minute after it was killed.

        Args:
            run: from `submit`.
            progress: called with (rounds finished, rounds of the plan).
            until: the number of rounds to wait for; None for the end of the run.

        Raises:
            DeploymentError: the SuperLink has ended, or the run before its last round.
        """
        ended = False
        while not ended and (until is None or self._reported_rounds < until):
            time.sleep(POLL_SECONDS)
            # Asked before the log is read, which is then complete if the run has ended.
            ended = run.ended
            self._report(progress)
            self._restart_supernodes(run)
        if ended and self._reported_rounds < self.rounds:
            raise DeploymentError(why_stopped(run.output))

    def _restart_supernodes(self, run: LoggedProcess) -> None:
        """Start the SuperNodes again that have ended; without a SuperLink, stop."""
        ended_names = [name for name, logged in self.processes.items() if logged.ended]
        for name in ended_names:
            logged = self.processes[name]
            if logged is run:
                continue
            if name == SUPERLINK_NAME:
                log = logged.output[-LOG_TAIL:]
                raise DeploymentError(f"The SuperLink has ended:\n{log}")
            time.sleep(RESTART_SECONDS)
            device = name.removeprefix(DEVICE.format(""))
            self.start_supernode(int(device))

    def _start(
        self,
        name: str,
        command: list[str],
        folder: Path,
        process_environment: Mapping[str, str],
        *,
        appends: bool = False,
    ) -> LoggedProcess:
        """Start a process in its own session, so that Ctrl-C reaches only this one.

        Its log replaces that of an earlier process, unless it is appended to it.
        """
        log = self.state / f"{name}.log"
        with log.open("ab" if appends else "wb") as file:
            process = psutil.Popen(
                command,
                cwd=folder,
                env=process_environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        logged = LoggedProcess(process, log)
        self.processes[name] = logged
        return logged

    def _listens(self) -> bool:
        """Return whether the SuperLink has opened its port."""
        endpoint = (LOOPBACK_HOST, self.port)
        try:
            with socket.create_connection(endpoint, timeout=CONNECT_SECONDS):
                return True
        except OSError:
            return False

    def _report(self, progress: ProgressCallback | None) -> None:
        """Report the rounds that are new in the log, and who was absent."""
        rows = read_log(self.server)[self._reported_rounds :]
        self._reported_rounds += len(rows)
        for row in rows:
            number = row["round"] + 1
            for device, reason in row["absent"].items():
                self.notify(f"round {number}: device {device} absent: {reason}")
        if rows and progress is not None:
            progress(self._reported_rounds, self.rounds)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """End this process as a shell reports it, so that `with` blocks are left."""
    sys.exit(128 + number)


def _terminate(processes: Iterable[LoggedProcess]) -> None:
    """Ask processes to end, and wait for them for a while."""
    waiting = []
    for logged in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            logged.process.terminate()
        waiting.append(logged.process)
    psutil.wait_procs(waiting, END_SECONDS)


def why_stopped(output: str) -> str:
    """Return why a run was not completed, from what its process has written.

    This is the sentence of the server's own DeploymentError where it has raised one,
    such as about devices that cannot use their data. Otherwise it is the end of the
    output.

    Args:
        output: of the process that followed the run.

    Returns:
        A sentence, or the last lines of the log.
    """
    sentences = re.findall(rf"{DeploymentError.__name__}: (.+)", output)
    if sentences:
        return sentences[-1]
    return f"The run was not completed. Its log ends:\n{output[-RUN_LOG_TAIL:]}"


def kill(processes: list[psutil.Process]) -> None:
    """End processes at once, and wait until they have ended.

    They get no chance to clean up (SIGKILL). Processes that have ended before are
    skipped; the wait is limited to `END_SECONDS`.

    Args:
        processes: such as `LoggedProcess.tree` returns.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, END_SECONDS)


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables of Flower's processes.

    They run the same Python and the same wflmc as this process, on the CPU unless
    JAX_PLATFORMS says otherwise, reach this machine without a proxy, and request
    nothing of the network.

    Args:
        home: the folder of Flower's state and configuration; created where it does not
            exist.

    Returns:
        The variables of this process, with those for Flower.
    """
    home.mkdir(parents=True, exist_ok=True)
    variables = {"JAX_PLATFORMS": "cpu", **os.environ, **NO_TELEMETRY}
    variables["FLWR_HOME"] = str(home)
    variables["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    variables["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"
    direct_hosts = f"{LOOPBACK_HOST},localhost"
    variables["NO_PROXY"] = direct_hosts
    variables["no_proxy"] = direct_hosts
    scripts = str(Path(sys.executable).parent)
    variables["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    source = str(Path(wflmc.__file__).resolve().parents[1])
    python_paths = [source]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        python_paths.append(inherited)
    variables["PYTHONPATH"] = os.pathsep.join(python_paths)
    return variables


def free_port() -> int:
    """Return a port of this machine that no process uses.

    It is below the ports that systems give to outgoing connections, which could take it
    before a server does.

    Returns:
        A port, chosen at random from `PORTS`.

    Raises:
        DeploymentError: all ports that were tried are in use.
    """
    for port in random.sample(PORTS, MAX_PORT_TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK_HOST, port))
            return port
    raise DeploymentError("No free port was found on this machine.")
