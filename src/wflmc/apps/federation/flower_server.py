"""The server of a federation on Flower: requests and answers as messages on its grid.

Devices are in Flower's simulation engine (`run_in_engine`), or on machines of their
own: `app` runs beside a SuperLink, and runs all rounds of the job in its folder that
are left. Its run config:

    folder      the server's folder, with plan.npz, job.npz and job.json, and the
                nodes.json that was written when keys were registered: a device is the
                node with its key, and no other
    deadline    seconds that a round waits; a device that is late did not transmit
    wait        seconds to wait for devices before the first round, and for any of them
                later on
"""

import logging
import os
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray

from wflmc.apps.federation.device import NOT_READY
from wflmc.apps.federation.job import Job
from wflmc.apps.federation.messages import (
    DEVICE,
    Reception,
    RejectedError,
    RoundRequest,
    printable_line,
    read_reply,
    write_request,
)
from wflmc.apps.federation.registration import DeploymentError, read_nodes
from wflmc.apps.federation.server import Exchange, Server, open_server, serve, superpose
from wflmc.privacy.ledger import TOLERANCE
from wflmc.sampling.execution import ProgressCallback
from wflmc.support.errors import InputError, without_data

log = logging.getLogger("wflmc.apps.federation")
_notify = partial(print, flush=True)

POLL_SECONDS = 0.5
"""Seconds between two looks for answers of real devices: each is a request to the
SuperLink, which has others to serve."""
NONCE_BYTES = 16
"""The length of what makes every message unique."""
ENGINE_DEADLINE_SECONDS = 600.0
"""Seconds that a round waits for devices of Flower's simulation engine."""
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
    DecodeError,
)
"""What Flower raises over a reply that it cannot put together; a lost connection is
none of these."""
RAISED_BY_DEVICE = (
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
)
"""Flower's codes for errors of a device's own app; others are about connections and
messages."""
HELLO = "query.hello"
"""The type of messages that ask whether a device can use its data."""
GRADIENT = "query.gradient"
"""The type of messages with the request of a round."""
NOT_STARTED = (
    "No round was begun and nobody was charged. Repeat the same command when this is "
    "repaired, or disconnect these devices to go on without them."
)
"""The end of an error about devices that cannot use their data."""


@without_data
class Hello(NamedTuple):
    """What devices have answered before the first round, by node."""

    devices: dict[int, int]
    """The number that a device has, by its own word."""
    failures: dict[int, str]
    """What the app of a device has raised in place of an answer."""


@without_data
class _SentRequest(NamedTuple):
    """A request that was sent, and the nonce that its reply must repeat."""

    request: RoundRequest
    nonce: str


class _Reply(NamedTuple):
    """A message that answers one that was sent."""

    message_id: str
    """The id of the message that it answers."""
    message: Message | None
    """None where Flower could not put it together."""


class Transport:
    """Requests to devices and their answers over Flower's grid, added up as in the air.

    Args:
        grid: Flower's, of a run.
        job: what is run.
        nodes: the device behind each node id. Ids belong to registered keys where
            SuperNodes are authenticated, so that this table binds a device to its key.
        deadline: seconds that a round waits; a device that is late did not transmit.
        poll: seconds between two looks for answers.
    """

    def __init__(
        self,
        grid: Grid,
        job: Job,
        nodes: Mapping[int, int],
        deadline: float,
        poll: float = 0.05,
    ) -> None:
        self.grid = grid
        self.job = job
        self.deadline = deadline
        self.poll = poll
        self.node_of_device = {device: node for node, device in nodes.items()}
        self._pulls_one_by_one = False

    def __call__(self, requests: list[RoundRequest]) -> Reception:
        """Send the requests of a round, wait for replies, and add them up.

        Args:
            requests: one for each scheduled device.

        Returns:
            The superposed signals of the devices that answered properly and in time.
            For the others it says why not: not connected, late, in error or rejected.
        """
        absent = self._absent_at_first(requests)
        connected_requests = [
            request for request in requests if request.device not in absent
        ]
        sent_of_message = self._send(connected_requests)
        for request in connected_requests:
            late = f"late: no answer within {self.deadline:g} s"
            absent[request.device] = late
        signals = {}
        for message_id, message in self._replies(set(sent_of_message)):
            sent = sent_of_message[message_id]
            device = sent.request.device
            if message is not None and message.has_error():
                reason = printable_line(message.error.reason)
                absent[device] = f"error {message.error.code}: {reason}"
                continue
            try:
                signals[device] = self._read(message, sent)
            except RejectedError as error:
                absent[device] = f"rejected, {error}"
            else:
                del absent[device]
        return superpose(self.job, requests, signals, absent)

    def _absent_at_first(self, requests: list[RoundRequest]) -> dict[int, str]:
        """Return the devices that are not connected, with the reason."""
        connected_nodes = set(self.grid.get_node_ids())
        absent = {}
        for request in requests:
            node = self.node_of_device.get(request.device)
            if node not in connected_nodes:
                absent[request.device] = "not connected"
        return absent

    def _send(self, requests: list[RoundRequest]) -> dict[str, _SentRequest]:
        """Send requests; return them by the ids of their messages."""
        sent_requests = []
        messages = []
        for request in requests:
            nonce = secrets.token_hex(NONCE_BYTES)
            content = write_request(request, self.job.run, nonce)
            node = self.node_of_device[request.device]
            message = Message(content, node, GRADIENT, ttl=self.deadline)
            sent_requests.append(_SentRequest(request, nonce))
            messages.append(message)
        message_ids = self.grid.push_messages(messages)
        return dict(zip(message_ids, sent_requests, strict=True))

    def _read(self, message: Message | None, sent: _SentRequest) -> NDArray[np.float32]:
        """Return the signal of a reply, or reject it."""
        return read_reply(
            message,
            sent.request,
            run=self.job.run,
            nonce=sent.nonce,
            norm_limit=self.job.largest_norm(sent.request),
        )

    def greet(self, nodes: Iterable[int]) -> Hello:
        """Ask devices whether they can use their data.

        No round is requested, which would cost. A device that does not answer before
        the deadline, or whose answer is lost or cannot be read, is in neither part of
        what is returned: it is absent, as it may be in any round.

        Args:
            nodes: node ids, those of devices that are connected.

        Returns:
            The devices that are ready, and what others have raised.
        """
        devices = {}
        failures = {}
        ordered_nodes = sorted(nodes)
        messages = [
            Message(RecordDict(), node, HELLO, ttl=self.deadline)
            for node in ordered_nodes
        ]
        message_ids = self.grid.push_messages(messages)
        node_of_message = dict(zip(message_ids, ordered_nodes, strict=True))
        for message_id, message in self._replies(set(node_of_message)):
            node = node_of_message[message_id]
            if message is None:
                continue
            if message.has_error():
                if message.error.code in RAISED_BY_DEVICE:
                    failures[node] = _failure_reason(str(message.error.reason))
                continue
            with suppress(KeyError, TypeError, ValueError):
                record = message.content.config_records["about"]
                devices[node] = int(record["device"])
        return Hello(devices, failures)

    def _replies(self, message_ids: set[str]) -> Iterator[_Reply]:
        """Yield replies until all have come, or the deadline has passed."""
        end = time.monotonic() + self.deadline
        # An empty id is that of a message that could not be sent.
        waiting = message_ids - {""}
        while waiting:
            for reply in self._pull(sorted(waiting)):
                if reply.message_id in waiting:
                    waiting.discard(reply.message_id)
                    yield reply
            if not waiting or time.monotonic() > end:
                return
            time.sleep(self.poll)

    def _pull(self, waiting: list[str]) -> list[_Reply]:
        """Return the replies that have come.

        All are pulled at once. A reply that cannot be read spoils that for all others,
        so that from then on they are pulled one by one.
        """
        if self._pulls_one_by_one and len(waiting) > 1:
            return [
                reply for message_id in waiting for reply in self._pull([message_id])
            ]
        try:
            return [
                _Reply(message.metadata.reply_to_message_id, message)
                for message in self.grid.pull_messages(waiting)
            ]
        except UNREADABLE:
            if self._pulls_one_by_one:
                return [_Reply(waiting[0], None)]
            log.warning(
                "A reply cannot be read; from now on they are fetched one by one.",
                exc_info=True,
            )
            self._pulls_one_by_one = True
            return self._pull(waiting)


def _failure_reason(reason: str) -> str:
    """Return why a device is not ready; Flower adds the type of the error."""
    return NOT_READY if NOT_READY in reason else printable_line(reason)


def wait_for_nodes(grid: Grid, count: int, wait: float) -> list[int]:
    """Wait until enough nodes are connected.

    Args:
        grid: Flower's, of a run.
        count: how many nodes to wait for.
        wait: the most seconds to wait.

    Returns:
        The ids of all connected nodes, which may be more or fewer than `count`.
    """
    end = time.monotonic() + wait
    nodes = list(grid.get_node_ids())
    while len(nodes) < count and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        nodes = list(grid.get_node_ids())
    return nodes


def identify_devices(transport: Transport, wait: float) -> dict[int, int]:
    """Find out which device is behind each node of Flower's simulation engine.

    The devices' own answers are trusted, as all of them are on this machine. Real
    devices are identified by their registered keys instead.

    Args:
        transport: to the devices, of which no node is known yet.
        wait: seconds to wait until as many nodes as devices are connected.

    Returns:
        The number of the device for each node id.

    Raises:
        DeploymentError: devices cannot use their data; nothing of a round was sent.
    """
    devices = transport.job.plan.devices
    nodes = wait_for_nodes(transport.grid, devices, wait)
    hello = transport.greet(nodes)
    if hello.failures:
        reason = next(iter(hello.failures.values()))
        # An error does not say which device raised it: all that are silent are named.
        silent_devices = set(range(devices)) - set(hello.devices.values())
        raise _not_ready(dict.fromkeys(sorted(silent_devices), reason))
    return hello.devices


def check_ready(transport: Transport) -> None:
    """Stop if a registered device that is connected cannot use its data.

    Devices that are not connected, or do not answer in time, are absent as in any
    round, and do not stop the run.

    Args:
        transport: to the registered devices.

    Raises:
        DeploymentError: says which devices; nothing of a round was sent.
    """
    connected_nodes = set(transport.grid.get_node_ids())
    device_of_node = {
        node: device
        for device, node in transport.node_of_device.items()
        if node in connected_nodes
    }
    failures = transport.greet(device_of_node).failures
    if failures:
        raise _not_ready(
            {device_of_node[node]: reason for node, reason in failures.items()}
        )


def _not_ready(failures: Mapping[int, str]) -> DeploymentError:
    """Return the error that names devices by their numbers, with their reasons."""
    devices_by_reason: dict[str, list[str]] = {}
    for device, reason in sorted(failures.items()):
        devices = devices_by_reason.setdefault(reason, [])
        devices.append(DEVICE.format(device))
    sentences = [
        f"{', '.join(devices)}: {reason}"
        for reason, devices in devices_by_reason.items()
    ]
    return DeploymentError(f"{'; '.join(sentences)}. {NOT_STARTED}")


app = ServerApp()
"""The app of a server on a machine of its own."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds of a job that are left, and print a line for every one.

    The lines are read by `flwr log`. Before the first request, all connected devices
    must be able to use their data. As long as no device answers a request, it is
    repeated.

    Args:
        grid: Flower's, of a run.
        context: its run config has the folder, the deadline and the wait.

    Raises:
        InputError: the run config or a file in the folder is wrong, or the ledger is
            not that of the preparation.
        DeploymentError: a device cannot use its data, or no device answers.
    """
    config = context.run_config
    folder = Path(str(config["folder"]))
    deadline = _seconds("deadline", config.get("deadline"))
    wait = _seconds("wait", config.get("wait"))
    job = Job.load(folder)
    server = open_server(job, folder)
    finished_rounds = server.checkpoint.load().rounds
    _check_ledger(server)
    _notify(
        f"{finished_rounds} of {len(job.plan.rounds)} rounds are done; "
        f"waiting for {job.plan.devices} devices"
    )
    nodes = {row.node: row.device for row in read_nodes(folder)}
    wait_for_nodes(grid, len(nodes), wait)
    transport = Transport(grid, job, nodes, deadline, poll=POLL_SECONDS)
    serve(
        server,
        repeat_until_answered(transport, wait),
        notify=_notify,
        check=partial(check_ready, transport),
    )
    _notify("all rounds are done")


def _check_ledger(server: Server) -> None:
    """Refuse a ledger that lacks what devices had spent before the job."""
    ledger = server.ledger
    if ledger is None:
        return
    spent_before = server.job.plan.ledger
    if np.any(ledger.spent < spent_before * (1 - TOLERANCE)):
        expected = "that of the preparation: it lacks what was spent before"
        raise InputError("ledger", str(ledger.path), expected)


def repeat_until_answered(
    exchange: Exchange, wait: float, pause: float = 5.0
) -> Exchange:
    """Make an exchange repeat its requests as long as no device answers.

    A server without a network would otherwise run through all rounds for nothing.
    Devices answer the same request with the same numbers, so that nothing is paid
    twice.

    Args:
        exchange: sends the requests of a round.
        wait: seconds after which the exchange gives up.
        pause: seconds between two tries.

    Returns:
        An exchange whose receptions have a sender, unless nothing was requested. It
        raises DeploymentError where it gives up.
    """

    def repeated(requests: list[RoundRequest]) -> Reception:
        end = time.monotonic() + wait
        while True:
            reception = exchange(requests)
            if reception.sent.any() or not requests:
                return reception
            absences = sorted(reception.absent.items())
            reasons = "; ".join(
                f"device {device}: {reason}" for device, reason in absences
            )
            if time.monotonic() > end:
                raise DeploymentError(
                    f"No device has answered for {wait:g} s; "
                    f"the run can be resumed later. {reasons}"
                )
            _notify(f"no device answered, asking again; {reasons}")
            time.sleep(pause)

    return repeated


def _seconds(name: str, value: object) -> float:
    """Return a number of seconds from the run config, or refuse it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InputError(name, value, "a number of seconds")
    return float(value)


def run_in_engine(
    server: Server,
    app: ClientApp,
    *,
    progress: ProgressCallback | None = None,
    deadline: float = ENGINE_DEADLINE_SECONDS,
) -> None:
    """Run all rounds with devices in Flower's simulation engine.

    The engine distributes the devices over processes (ray). These use the CPU unless
    JAX_PLATFORMS is set: one accelerator cannot serve all of them.

    Args:
        server: from `open_server`.
        app: of the devices, such as `devices_in(folder)`.
        progress: called with (rounds finished, rounds of the plan).
        deadline: seconds that a round waits for its devices.

    Raises:
        DeploymentError: devices cannot use their data.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        """Identify the devices of the engine, and run all rounds with them.

        The devices are processes of this machine, so that their own word is enough;
        nothing is requested before all have answered.

        Args:
            grid: of the engine.
            context: of the run; not needed.
        """
        nodes = identify_devices(
            Transport(grid, server.job, {}, deadline), wait=deadline
        )
        transport = Transport(grid, server.job, nodes, deadline)
        serve(server, transport, progress)

    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which leaves JAX's threads alone.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        run_simulation(
            server_app,
            app,
            server.job.plan.devices,
            backend_config=_engine_config(),
        )


def _engine_config() -> dict[str, dict[str, object]]:
    """Return the resources of the engine: one processor for every running device."""
    return {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {
            "num_cpus": os.cpu_count() or 1,
            "logging_level": "ERROR",
            "log_to_driver": False,
        },
    }
