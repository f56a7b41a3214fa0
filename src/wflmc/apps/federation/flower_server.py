"""The server of a federation on Flower: requests and answers as messages over its grid.

Devices are in Flower's simulation engine (`run_in_engine`), or on machines of their own: `app` runs beside a SuperLink,
and runs all rounds of the job in its folder that have not been run. Its run config:

    folder      the server's folder, with job.npz and job.json, and the nodes.json that was written when keys were
                registered: a device is the node with its key, and no other
    deadline    seconds that a round waits; a device that is late did not transmit
    wait        seconds to wait for devices before the first round, and for any of them later on
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
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from wflmc.apps.federation.device import NOT_READY
from wflmc.apps.federation.job import Job
from wflmc.apps.federation.messages import (
    DEVICE,
    Reception,
    RejectedError,
    RoundRequest,
    read_reply,
    short,
    write_request,
)
from wflmc.apps.federation.registration import DeploymentError, read_nodes
from wflmc.apps.federation.server import Exchange, Server, open_server, serve, superpose
from wflmc.privacy.ledger import TOLERANCE
from wflmc.sampling.execution import ProgressCallback
from wflmc.support.errors import InputError, without_data

log = logging.getLogger("wflmc.apps.federation")
_say = partial(print, flush=True)

POLL = 0.5
"""Seconds between two looks for answers: each is a request to the SuperLink, which has others to serve."""
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
    DecodeError,
)
"""What Flower raises over a reply that it cannot put together; a lost connection is none of these."""
RAISED_BY_DEVICE = (
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
)
"""Flower's codes for errors of a device's own app; others are about connections and messages."""
HELLO = "query.hello"
"""The type of messages that ask whether a device can use its data."""
NOT_STARTED = (
    "No round was begun and nobody was charged. Repeat the same command when this is mended, or disconnect these "
    "devices to go on without them."
)


@without_data
class Hello(NamedTuple):
    """What devices have answered before the first round, by node."""

    devices: dict[int, int]
    """The number that a device has, by its own word."""
    failures: dict[int, str]
    """What the app of a device has raised in place of an answer."""


class Transport:
    """Requests to devices and their answers over Flower's grid, superposed as the air would.

    Args:
        grid: Flower's, of a run.
        job: what is run.
        nodes: which device is behind each node id. Ids belong to registered keys where SuperNodes are authenticated, so
            that this table is what binds a device to its key.
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
        self.grid, self.job, self.deadline, self.poll = grid, job, deadline, poll
        self.node = {device: node for node, device in nodes.items()}
        self._one_by_one = False

    def __call__(self, requests: list[RoundRequest]) -> Reception:
        """Send the requests of a round, wait until the deadline, and add up what came."""
        job, signals, late = self.job, {}, f"late: no answer within {self.deadline:g} s"
        here = set(self.grid.get_node_ids())
        absent = {
            one.device: late if self.node.get(one.device) in here else "not connected"
            for one in requests
        }
        asked = [
            (one, secrets.token_hex(16))
            for one in requests
            if absent[one.device] == late
        ]
        messages = [
            Message(
                write_request(one, job.run, nonce),
                self.node[one.device],
                "query.gradient",
                ttl=self.deadline,
            )
            for one, nonce in asked
        ]
        about = dict(zip(self.grid.push_messages(messages), asked, strict=True))
        for ident, message in self._answers(set(about)):
            request, nonce = about[ident]
            if message is not None and message.has_error():
                absent[request.device] = (
                    f"error {message.error.code}: {short(message.error.reason)}"
                )
                continue
            try:
                signals[request.device] = read_reply(
                    message,
                    request,
                    run=job.run,
                    nonce=nonce,
                    norm_limit=job.largest_norm(request),
                )
                del absent[request.device]
            except RejectedError as error:
                absent[request.device] = f"rejected, {error}"
        return superpose(job, requests, signals, absent)

    def greet(self, nodes: Iterable[int]) -> Hello:
        """Ask devices whether they can use their data; no request of a round, which would cost, is sent.

        A device that does not answer before the deadline, or not readably, is in neither
        part of what is returned: it is absent, as it may be in any round.

        Args:
            nodes: node ids, those of devices that are connected.
        """
        devices, failures = {}, {}
        nodes = sorted(nodes)
        messages = [
            Message(RecordDict(), node, HELLO, ttl=self.deadline) for node in nodes
        ]
        asked = dict(zip(self.grid.push_messages(messages), nodes, strict=True))
        for ident, message in self._answers(set(asked)):
            if message is None:
                continue
            if message.has_error():
                if message.error.code in RAISED_BY_DEVICE:
                    said = str(
                        message.error.reason
                    )  # Flower adds the type of the error
                    failures[asked[ident]] = (
                        NOT_READY if NOT_READY in said else short(said)
                    )
                continue
            with suppress(KeyError, TypeError, ValueError):
                devices[asked[ident]] = int(
                    message.content.config_records["about"]["device"]
                )
        return Hello(devices, failures)

    def _answers(self, idents: set[str]) -> Iterator[tuple[str, Message | None]]:
        """Yield (id of a request, its reply, None if unreadable) until all are here or the deadline has passed."""
        end, waiting = time.monotonic() + self.deadline, idents - {""}
        while waiting:
            for ident, message in self._pull(sorted(waiting)):
                if ident in waiting:
                    waiting.discard(ident)
                    yield ident, message
            if not waiting or time.monotonic() > end:
                return
            time.sleep(self.poll)

    def _pull(self, waiting: list[str]) -> list[tuple[str, Message | None]]:
        """Return what has come, all at once; one by one since somebody has sent what spoils that for all."""
        if self._one_by_one and len(waiting) > 1:
            return [reply for ident in waiting for reply in self._pull([ident])]
        try:
            return [
                (reply.metadata.reply_to_message_id, reply)
                for reply in self.grid.pull_messages(waiting)
            ]
        except UNREADABLE:
            if self._one_by_one:
                return [(waiting[0], None)]
            log.warning(
                "A reply cannot be read; from now on they are fetched one by one.",
                exc_info=True,
            )
            self._one_by_one = True
            return self._pull(waiting)


def connected(grid: Grid, count: int, wait: float) -> list[int]:
    """Return the nodes that are connected, once there are so many or the seconds have passed."""
    end = time.monotonic() + wait
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < end:
        time.sleep(POLL)
    return nodes


def meet(transport: Transport, wait: float) -> dict[int, int]:
    """Return which device is behind each node of Flower's engine, by what it says of itself.

    Args:
        transport: to the devices, of which no node is known yet.
        wait: seconds to wait until as many nodes as devices are connected.

    Raises:
        DeploymentError: devices cannot use their data; nothing of a round was sent.
    """
    devices = transport.job.plan.devices
    hello = transport.greet(connected(transport.grid, devices, wait))
    if hello.failures:
        reason = next(iter(hello.failures.values()))
        silent = sorted(set(range(devices)) - set(hello.devices.values()))
        raise _not_ready(dict.fromkeys(silent, reason))
    return hello.devices


def check_ready(transport: Transport) -> None:
    """Stop where a registered device that is connected cannot use its data.

    Devices that are not connected, or do not answer in time, are absent as in any round.

    Raises:
        DeploymentError: says which devices; nothing of a round was sent.
    """
    here = set(transport.grid.get_node_ids())
    device_of = {
        node: device for device, node in transport.node.items() if node in here
    }
    failures = transport.greet(device_of).failures
    if failures:
        raise _not_ready({device_of[node]: reason for node, reason in failures.items()})


def _not_ready(failures: Mapping[int, str]) -> DeploymentError:
    """Return the error that names devices by their numbers, with what each has said."""
    devices_by_reason: dict[str, list[str]] = {}
    for device, reason in sorted(failures.items()):
        devices_by_reason.setdefault(reason, []).append(DEVICE.format(device))
    reasons = (
        f"{', '.join(devices)}: {reason}"
        for reason, devices in devices_by_reason.items()
    )
    return DeploymentError(f"{'; '.join(reasons)}. {NOT_STARTED}")


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the job; a line a round, to be read by `flwr log`."""
    folder = Path(str(context.run_config["folder"]))
    deadline, wait = (
        _seconds(name, context.run_config.get(name)) for name in ("deadline", "wait")
    )
    job = Job.load(folder)
    server = open_server(job, folder)
    ledger, done = server.ledger, server.checkpoint.load().rounds
    if ledger is not None and np.any(ledger.spent < job.plan.ledger * (1 - TOLERANCE)):
        raise InputError(
            "ledger",
            str(ledger.path),
            "that of the preparation: it lacks what was spent before",
        )
    _say(
        f"{done} of {len(job.plan.rounds)} rounds are done; waiting for {job.plan.devices} devices"
    )
    nodes = {row.node: row.device for row in read_nodes(folder)}
    connected(grid, len(nodes), wait)
    transport = Transport(grid, job, nodes, deadline, POLL)
    serve(
        server,
        patient(transport, wait),
        notify=_say,
        check=partial(check_ready, transport),
    )
    _say("all rounds are done")


def patient(exchange: Exchange, wait: float, pause: float = 5.0) -> Exchange:
    """Ask again as long as nobody answers: a server without a network would else run through all rounds for nothing.

    Devices answer the same request with the same numbers, so that nothing is paid twice.
    """

    def repeated(requests: list[RoundRequest]) -> Reception:
        end = time.monotonic() + wait
        while True:
            reception = exchange(requests)
            if reception.sent.any() or not requests:
                return reception
            reasons = "; ".join(
                f"device {device}: {why}"
                for device, why in sorted(reception.absent.items())
            )
            if time.monotonic() > end:
                raise DeploymentError(
                    f"No device has answered for {wait:g} s; the run can go on later. {reasons}"
                )
            _say(f"nobody answered, asking again; {reasons}")
            time.sleep(pause)

    return repeated


def _seconds(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise InputError(name, value, "a number of seconds")
    return float(value)


def run_in_engine(
    server: Server,
    app: ClientApp,
    *,
    progress: ProgressCallback | None = None,
    deadline: float = 600.0,
) -> None:
    """Run all devices in Flower's simulation engine, which shares them out among processes (ray).

    Args:
        server, progress: as of `serve`.
        app: of the devices, such as `devices_in(folder)`.
        deadline: seconds that a round waits for its devices.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault(
        "JAX_PLATFORMS", "cpu"
    )  # one accelerator is not for all these processes
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    center = ServerApp()

    @center.main()
    def main(grid: Grid, context: Context) -> None:
        nodes = meet(Transport(grid, server.job, {}, deadline), wait=deadline)
        serve(server, Transport(grid, server.job, nodes, deadline), progress)

    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {
            "num_cpus": os.cpu_count() or 1,
            "logging_level": "ERROR",
            "log_to_driver": False,
        },
    }
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which leaves JAX's threads alone.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        run_simulation(center, app, server.job.plan.devices, backend_config=backend)
