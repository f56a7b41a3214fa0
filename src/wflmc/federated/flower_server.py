"""The server's side on Flower: requests to devices and their answers, and what runs beside a SuperLink or in an engine.

The app runs all rounds of the job in its folder that have not been run. Its run config:

    folder      the server's folder, with job.npz and job.json
    deadline    seconds that a round waits; a device that is late did not transmit
    wait        seconds to wait for devices before the first round, and for any of them later on

The folder has a nodes.json, written when keys were registered: a device is the node with its key, and no other.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from wflmc.errors import InputError
from wflmc.federated.device import open_device
from wflmc.federated.flower_client import client_app
from wflmc.federated.job import DEVICE, Job
from wflmc.federated.messages import Reception, RejectedError, Request, read_reply, short, write_request
from wflmc.federated.registration import DeploymentError, read_nodes
from wflmc.federated.server import Exchange, Progress, Server, open_server, serve, superpose
from wflmc.privacy.ledger import TOLERANCE

log = logging.getLogger("wflmc.federated")
_say = partial(print, flush=True)

POLL = 0.5
"""Seconds between two looks for answers: each is a request to the SuperLink, which has others to serve."""
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError, DecodeError)
"""What Flower raises over a reply that it cannot put together; a lost connection is none of these."""


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

    def __init__(self, grid: Grid, job: Job, nodes: Mapping[int, int], deadline: float, poll: float = 0.05) -> None:
        self.grid, self.job, self.deadline, self.poll = grid, job, deadline, poll
        self.node = {device: node for node, device in nodes.items()}
        self._one_by_one = False

    def __call__(self, requests: list[Request]) -> Reception:
        """Send the requests of a round, wait until the deadline, and add up what came."""
        job, signals, late = self.job, {}, f"late: no answer within {self.deadline:g} s"
        here = set(self.grid.get_node_ids())
        absent = {one.device: late if self.node.get(one.device) in here else "not connected" for one in requests}
        asked = [(one, secrets.token_hex(16)) for one in requests if absent[one.device] == late]
        messages = [
            Message(write_request(one, job.run, nonce), self.node[one.device], "query.gradient", ttl=self.deadline)
            for one, nonce in asked
        ]
        about = dict(zip(self.grid.push_messages(messages), asked, strict=True))
        for ident, message in self._answers(set(about)):
            request, nonce = about[ident]
            if message is not None and message.has_error():
                absent[request.device] = f"error {message.error.code}: {short(message.error.reason)}"
                continue
            try:
                signals[request.device] = read_reply(message, request, job.run, nonce, job.largest_norm(request))
                del absent[request.device]
            except RejectedError as error:
                absent[request.device] = f"rejected, {error}"
        return superpose(job, requests, signals, absent)

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
            return [(reply.metadata.reply_to_message_id, reply) for reply in self.grid.pull_messages(waiting)]
        except UNREADABLE:
            if self._one_by_one:
                return [(waiting[0], None)]
            log.warning("A reply cannot be read; from now on they are fetched one by one.", exc_info=True)
            self._one_by_one = True
            return self._pull(waiting)


def connected(grid: Grid, count: int, wait: float) -> list[int]:
    """Return the nodes that are connected, once there are so many or the seconds have passed."""
    end = time.monotonic() + wait
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < end:
        time.sleep(POLL)
    return nodes


def meet(grid: Grid, devices: int, wait: float) -> dict[int, int]:
    """Return which device is behind each node of Flower's engine, by what it says of itself."""
    hello = [Message(RecordDict(), node, "query.hello", ttl=wait) for node in connected(grid, devices, wait)]
    replies = grid.send_and_receive(hello, timeout=wait)
    return {reply.metadata.src_node_id: reply.content["about"]["device"] for reply in replies if reply.has_content()}


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the job; a line a round, to be read by `flwr log`."""
    folder = Path(str(context.run_config["folder"]))
    deadline, wait = (_seconds(name, context.run_config.get(name)) for name in ("deadline", "wait"))
    job = Job.load(folder)
    server = open_server(job, folder)
    ledger, done = server.ledger, server.checkpoint.load().rounds
    if ledger is not None and np.any(ledger.spent < job.plan.ledger * (1 - TOLERANCE)):
        allowed = "the one with which the federation was prepared: it lacks what devices had spent before"
        raise InputError("ledger", str(ledger.path), allowed)
    _say(f"{done} of {len(job.plan.rounds)} rounds are done; waiting for {job.plan.devices} devices")
    nodes = {row.node: row.device for row in read_nodes(folder)}
    connected(grid, len(nodes), wait)
    serve(server, patient(Transport(grid, job, nodes, deadline, POLL), wait), say=_say)
    _say("all rounds are done")


def patient(exchange: Exchange, wait: float, pause: float = 5.0) -> Exchange:
    """Ask again as long as nobody answers: a server without a network would else run through all rounds for nothing.

    Devices answer the same request with the same numbers, so that nothing is paid twice.
    """

    def repeated(requests: list[Request]) -> Reception:
        end = time.monotonic() + wait
        while True:
            reception = exchange(requests)
            if reception.sent.any() or not requests:
                return reception
            reasons = "; ".join(f"device {device}: {why}" for device, why in sorted(reception.absent.items()))
            if time.monotonic() > end:
                text = f"No device has answered for {wait:g} s, so the run is stopped; it can go on later. {reasons}"
                raise DeploymentError(text)
            _say(f"nobody answered, asking again; {reasons}")
            time.sleep(pause)

    return repeated


def _seconds(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise InputError(name, value, "a number of seconds")
    return float(value)


def devices_in(folder: Path) -> ClientApp:
    """Return the app of devices whose folders lie side by side, each named by its number."""
    return client_app(lambda context: open_device(folder / DEVICE.format(context.node_config["partition-id"])))


def run_in_engine(server: Server, app: ClientApp, *, progress: Progress | None = None, deadline: float = 600.0) -> None:
    """Run all devices in Flower's simulation engine, which shares them out among processes (ray).

    Args:
        server, progress: as of `serve`.
        app: of the devices, such as `devices_in(folder)`.
        deadline: seconds that a round waits for its devices.
    """
    if importlib.util.find_spec("ray") is None:
        allowed = "'process' where ray is missing: pip install 'wflmc[flower]' brings it"
        raise InputError("runtime", "simulation", allowed)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # one accelerator is not for all these processes
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    center = ServerApp()

    @center.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        nodes = meet(grid, server.job.plan.devices, deadline)
        serve(server, Transport(grid, server.job, nodes, deadline), progress)

    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": os.cpu_count() or 1, "logging_level": "ERROR", "log_to_driver": False},
    }
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which leaves JAX's threads alone.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        run_simulation(center, app, server.job.plan.devices, backend_config=backend)
