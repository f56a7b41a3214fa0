"""Many devices on one machine: in this process, or in Flower's simulation engine, by the same two apps.

`LocalGrid` is a Flower grid in one process: every message is handed to the client app at once, by Flower's own objects.
Neither ray nor a SuperLink is needed, and rounds take milliseconds: for tests, for first steps, and for machines
without room for Flower's simulation engine. What a client app does to the records of a message stays its own.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from wflmc.errors import InputError
from wflmc.federated.flower_client import client_app
from wflmc.federated.flower_server import Transport
from wflmc.federated.folder import DEVICE, open_device
from wflmc.federated.server import Server, serve

FIRST = 1000
"""The first node id."""
RAISED = 2
"""Flower's code for a client app that raised."""

Fault = Callable[[Message, int], Message | None]
"""From a reply and the device that gave it to what arrives of it; None: nothing ever does."""
Progress = Callable[[int, int], None]


class LocalGrid(Grid):
    """K nodes in this process, device k at node 1000 + k.

    Args:
        app: of all devices; a context's node_config says which one is meant, by its partition-id.
        devices: K.
        fault: what becomes of replies on their way, for tests.
    """

    def __init__(self, app: ClientApp, devices: int, fault: Fault | None = None) -> None:
        # Flower's messages ask who sends them; in its own runtimes these are set by the process around an app.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self._app, self._fault = app, fault
        self._replies: dict[str, Message] = {}
        self._context = {
            FIRST + k: Context(1, FIRST + k, {"partition-id": k, "num-partitions": devices}, RecordDict(), {})
            for k in range(devices)
        }

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """The run that this grid serves."""
        return None

    def create_message(self, *args: Any, **how: Any) -> Message:
        """Refuse: the transport makes its messages itself."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """Return all nodes."""
        return list(self._context)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand over messages; return their ids."""
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to messages with these ids, each of them once."""
        return [self._replies.pop(ident) for ident in message_ids if ident in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Hand over messages and return the replies; nothing takes time."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, message: Message) -> str:
        ident, node = uuid.uuid4().hex, message.metadata.dst_node_id
        sent = _transferred(message, ident)
        try:
            answer: Message | None = self._app(sent, self._context[node])
        except Exception as error:  # as Flower does: the server gets an error in place of a reply
            answer = Message(Error(RAISED, f"{type(error)}:<'{error}'>"), reply_to=sent)
        assert answer is not None
        _address(answer, uuid.uuid4().hex)
        if self._fault is not None:
            answer = self._fault(answer, node - FIRST)
        if answer is not None:
            self._replies[ident] = answer if answer.has_error() else _transferred(answer, answer.metadata.message_id)
        return ident


def _address(message: Message, ident: str) -> None:
    """Write on a message what Flower's link writes on it."""
    message.metadata.__dict__.update(_message_id=ident, _run_id=1)


def _transferred(message: Message, ident: str) -> Message:
    """Return the message as the other end reads it: as bytes and back."""
    _address(message, ident)
    objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    received: Any = inflate_object_from_contents(message.object_id, objects)
    _address(received, ident)
    return received


def devices_in(folder: Path) -> ClientApp:
    """Return the app of devices whose folders lie side by side, each named by its number."""
    return client_app(lambda context: open_device(folder / DEVICE.format(context.node_config["partition-id"])))


def run_in_process(
    server: Server, app: ClientApp, *, progress: Progress | None = None, fault: Fault | None = None
) -> None:
    """Run all devices one after the other in this process; answers come at once, so what has not come will not.

    Args:
        server: as `open_server` gives it.
        app: of the devices, such as `devices_in(folder)`.
        progress: called with (rounds done, rounds in all).
        fault: what becomes of replies on their way, for tests.
    """
    grid = LocalGrid(app, server.job.plan.devices, fault)
    nodes = {node: k for k, node in enumerate(grid.get_node_ids())}
    serve(server, Transport(grid, server.job, nodes, deadline=0.0), progress)


def run_in_engine(server: Server, app: ClientApp, *, progress: Progress | None = None, deadline: float = 600.0) -> None:
    """Run all devices in Flower's simulation engine, which shares them out among processes (ray).

    Args:
        server, app, progress: as of `run_in_process`.
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
        serve(server, Transport(grid, server.job, deadline=deadline, wait=deadline), progress)

    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": os.cpu_count() or 1, "logging_level": "ERROR", "log_to_driver": False},
    }
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which leaves JAX's threads alone.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        run_simulation(center, app, server.job.plan.devices, backend_config=backend)
