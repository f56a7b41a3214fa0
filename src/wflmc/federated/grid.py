"""A Flower grid in one process: every message is handed to the client app at once, by Flower's own objects.

Neither ray nor a SuperLink is needed, and rounds take milliseconds: for tests, for first steps, and for machines
without room for Flower's simulation engine. What a client app does to the records of a message stays its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

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
