"""Many devices on one machine: in this process, or in Flower's simulation engine, by the same two apps."""

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
from wflmc.federated.flower_server import Post
from wflmc.federated.folder import DEVICE, open_device
from wflmc.federated.server import Server, serve

FIRST = 1000
"""The first node id."""
RAISED = 2
"""Flower's code for a client app that raised."""

Fault = Callable[[Message, int], Message | None]
"""From a reply and the device that gave it to what arrives of it; None: nothing ever does."""


class LocalGrid(Grid):
    """K nodes in this process, device k at node 1000 + k.

    Args:
        fault: what becomes of replies on their way, for tests.
    """

    def __init__(self, app: ClientApp, devices: int, fault: Fault | None = None) -> None:
        # Flower's messages ask who sends them; in its own runtimes these are set by the process around an app.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self._app, self._fault = app, fault
        self._replies: dict[str, Message] = {}
        self._context = {
            FIRST + k: Context(
                run_id=1,
                node_id=FIRST + k,
                node_config={"partition-id": k, "num-partitions": devices},
                state=RecordDict(),
                run_config={},
            )
            for k in range(devices)
        }

    def set_run(self, run: Any) -> None:
        """Runs are not told apart here."""

    @property
    def run(self) -> Any:
        """The run that this grid serves."""
        return None

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """All nodes."""
        return list(self._context)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand over messages; their ids."""
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies to messages with these ids, each of them once."""
        return [self._replies.pop(ident) for ident in message_ids if ident in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """All at once."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, message: Message) -> str:
        ident = uuid.uuid4().hex
        _address(message, ident)
        context = self._context[message.metadata.dst_node_id]
        sent = _over_the_wire(message, ident)
        try:
            answer: Message | None = self._app(sent, context)
        except Exception as error:  # as Flower does: the server gets an error in place of a reply
            answer = Message(Error(RAISED, f"{type(error)}:<'{error}'>"), reply_to=sent)
        assert answer is not None
        _address(answer, uuid.uuid4().hex)
        if self._fault is not None:
            answer = self._fault(answer, message.metadata.dst_node_id - FIRST)
        if answer is not None:
            self._replies[ident] = answer if answer.has_error() else _over_the_wire(answer, answer.metadata.message_id)
        return ident


def _address(message: Message, ident: str) -> None:
    """What Flower's link writes on a message."""
    message.metadata.__dict__["_message_id"] = ident
    message.metadata.__dict__["_run_id"] = 1


def _over_the_wire(message: Message, ident: str) -> Message:
    """The message as bytes and back, as the other end would read it."""
    objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    other: Any = inflate_object_from_contents(message.object_id, objects)
    _address(other, ident)
    found: Message = other
    return found


Progress = Callable[[int, int], None]


def devices_in(folder: Path) -> ClientApp:
    """The app of devices whose folders lie side by side, each found by its number."""

    def find(context: Context) -> Any:
        return open_device(folder / DEVICE.format(context.node_config["partition-id"]))

    return client_app(find)


def run_in_process(
    server: Server, app: ClientApp, *, progress: Progress | None = None, fault: Fault | None = None, wait: float = 10.0
) -> None:
    """All devices one after the other in this process; answers come at once, so what has not come will not.

    Args:
        wait: seconds to wait for devices that do not say who they are.
    """
    devices = server.job.plan.devices
    grid = LocalGrid(app, devices, fault)
    nodes = {node: k for k, node in enumerate(grid.get_node_ids())}
    serve(server, Post(grid, server.job, nodes, deadline=0.0, wait=wait), progress)


def run_in_engine(
    server: Server,
    app: ClientApp,
    *,
    progress: Progress | None = None,
    processes: int | None = None,
    deadline: float = 600.0,
) -> None:
    """All devices in Flower's simulation engine, which shares them out among processes (ray)."""
    if importlib.util.find_spec("ray") is None:
        allowed = "'process' where ray is missing: pip install 'wflmc[flower]' brings it"
        raise InputError("runtime", "simulation", allowed)
    cores = processes or os.cpu_count() or 1
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # one accelerator is not for all these processes
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    center = ServerApp()

    @center.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        serve(server, Post(grid, server.job, deadline=deadline, wait=deadline), progress)

    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "logging_level": "ERROR", "log_to_driver": False},
    }
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which leaves JAX's threads alone.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        run_simulation(center, app, server.job.plan.devices, backend_config=backend)
