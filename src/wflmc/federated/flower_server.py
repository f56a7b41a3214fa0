"""The server's side on Flower: requests to devices and their answers, and the app that runs beside a SuperLink.

The app runs all rounds of the job in its folder that have not been run.

Its run config:

    folder      the server's folder, with job.npz and job.json
    deadline    seconds that a round waits; a device that is late did not transmit
    wait        seconds to wait for devices before the first round, and for any of them later on

Where the folder has a nodes.json, written when keys were registered, a device is the node with its key, and no other.
Without one nodes are asked who they are, and believed.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray

from wflmc.errors import InputError
from wflmc.federated.job import Job
from wflmc.federated.messages import Ask, Heard, RejectedError, read_reply, request
from wflmc.federated.registration import TABLE, DeploymentError, read_nodes
from wflmc.federated.server import Exchange, Server, open_server, serve
from wflmc.privacy.ledger import TOLERANCE

log = logging.getLogger("wflmc.federated")

POLL = 0.5
"""Seconds between two looks for answers: each is a request to the SuperLink, which has others to serve."""

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError, DecodeError)
"""What Flower raises over a reply that it cannot put together; a lost connection is none of these."""

app = ServerApp()


class Post:
    """Requests to devices and their answers over Flower's grid, superposed as the air would.

    Args:
        nodes: which device is behind each node id. Ids belong to registered keys where SuperNodes are authenticated, so
            that this table is what binds a device to its key. Without one nodes are asked, and believed.
        deadline: seconds that a round waits; a device that is late did not transmit.
        wait: seconds to wait for devices to come up before the first round.
    """

    def __init__(
        self,
        grid: Grid,
        job: Job,
        nodes: Mapping[int, int] | None = None,
        deadline: float = 60.0,
        wait: float = 60.0,
        poll: float = 0.05,
    ) -> None:
        self.grid, self.job, self.deadline, self.poll = grid, job, deadline, poll
        self.trusted = nodes is not None
        self.node: dict[int, int] = {device: node for node, device in (nodes or {}).items()}
        self._strangers: set[int] = set()
        self._together = True
        end = time.monotonic() + wait
        while not self._all_here() and time.monotonic() < end:
            time.sleep(self.poll)

    def __call__(self, asks: list[Ask]) -> Heard:
        """Ask, wait until the deadline, and add up what came."""
        job = self.job
        total = np.zeros((job.chains, job.plan.dim))
        sent = np.zeros(job.plan.devices, dtype=bool)
        signals, absent = self.gather(asks)
        for ask in asks:  # in the order of the devices, so that the sum does not depend on who was first
            if ask.device in signals:
                part = ask.arrives * signals[ask.device].astype(float)
                total += job.lattice.rounded(part) if job.noise == "channel" and job.lattice else part
                sent[ask.device] = True
        return Heard(total, sent, absent)

    def gather(self, asks: list[Ask]) -> tuple[dict[int, NDArray[np.float32]], dict[int, str]]:
        """x_k of every device that answered properly and in time, and why others are absent."""
        self._all_here()
        here = set(self.grid.get_node_ids())
        signals: dict[int, NDArray[np.float32]] = {}
        absent = {ask.device: "not connected" for ask in asks if self.node.get(ask.device) not in here}
        waiting: dict[str, tuple[Ask, str]] = {}
        letters = []
        for ask in (ask for ask in asks if ask.device not in absent):
            nonce = secrets.token_hex(16)
            content = request(ask, self.job.run, nonce)
            letters.append(((ask, nonce), self._letter(content, self.node[ask.device], "gradient", str(ask.round))))
        for (about, _), ident in zip(letters, self.grid.push_messages([m for _, m in letters]), strict=True):
            if ident:
                waiting[ident] = about
            else:
                absent[about[0].device] = "could not be reached"
        for ident, message in self.answers(set(waiting)):
            ask, nonce = waiting.pop(ident)
            if message is None:
                absent[ask.device] = "rejected, malformed: not to be read"
                continue
            try:
                signals[ask.device] = read_reply(message, ask, self.job.run, nonce, self.job.largest_norm(ask))
            except RejectedError as error:
                absent[ask.device] = f"rejected, {error}" if not message.has_error() else str(error)
        absent |= {ask.device: f"late: no answer within {self.deadline:g} s" for ask, _ in waiting.values()}
        return signals, absent

    def answers(self, waiting: set[str]) -> Any:
        """(id of what was asked, its reply, None for no readable one) until all are here or the deadline has passed."""
        end = time.monotonic() + self.deadline
        while waiting:
            for ident, message in self._pull(sorted(waiting)):
                if ident in waiting:
                    waiting.discard(ident)
                    yield ident, message
            if not waiting or time.monotonic() > end:
                return
            time.sleep(self.poll)

    def _pull(self, waiting: list[str]) -> list[tuple[str, Message | None]]:
        """What has come, all at once; one by one since somebody has sent what spoils that for all."""
        if self._together:
            try:
                return [(m.metadata.reply_to_message_id, m) for m in self.grid.pull_messages(waiting)]
            except UNREADABLE:
                log.warning("A reply cannot be read; from now on they are fetched one by one.", exc_info=True)
                self._together = False
        found: list[tuple[str, Message | None]] = []
        for ident in waiting:
            try:
                found += [(m.metadata.reply_to_message_id, m) for m in self.grid.pull_messages([ident])]
            except UNREADABLE:
                found.append((ident, None))
        return found

    def _letter(self, content: RecordDict, node: int, kind: str, group: str) -> Message:
        return Message(content, node, f"query.{kind}", ttl=self.deadline, group_id=group)

    def _all_here(self) -> bool:
        """Whether all devices are known and connected; if not, nodes that are not known are asked who they are."""
        here = set(self.grid.get_node_ids())
        if self._complete(here):  # nobody waits for a stranger
            return True
        new = sorted(here - set(self.node.values()) - self._strangers)
        if new and not self.trusted:
            letters = [self._letter(RecordDict(), node, "hello", "hello") for node in new]
            asked = dict(zip(self.grid.push_messages(letters), new, strict=True))
            asked.pop("", None)
            replies = [(asked[ident], message) for ident, message in self.answers(set(asked)) if message is not None]
            for node, message in sorted(replies, key=itemgetter(0)):
                self._introduce(node, message, here)
        return self._complete(here)

    def _complete(self, here: set[int]) -> bool:
        return all(self.node.get(device) in here for device in range(self.job.plan.devices))

    def _introduce(self, node: int, message: Message, here: set[int]) -> None:
        """Believe a node who it is, unless a connected node is that device already."""
        device: Any = -1
        if not message.has_error() and "about" in message.content:
            device = dict(message.content["about"]).get("device", -1)
        known = isinstance(device, int) and 0 <= device < self.job.plan.devices
        if not known or self.node.get(device) in here:
            log.warning("Node %s is turned away: it says that it is device %r.", node, device)
            self._strangers.add(node)
            return
        self.node[device] = node


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the job; a line a round, to be read by `flwr log`."""
    config = context.run_config
    folder = Path(str(config["folder"]))
    deadline, wait = _seconds(config, "deadline"), _seconds(config, "wait")
    job = Job.load(folder)
    server = open_server(job, folder)
    _refuse_forgetful(server)
    done = server.checkpoint.load().rounds
    _say(f"{done} of {job.plan.rounds} rounds are done; waiting for {job.plan.devices} devices")
    nodes = {row.node: row.device for row in read_nodes(folder)} if (folder / TABLE).exists() else None
    serve(server, patient(Post(grid, job, nodes, deadline=deadline, wait=wait, poll=POLL), wait), say=_say)
    _say("all rounds are done")


def patient(exchange: Exchange, wait: float, pause: float = 5.0) -> Exchange:
    """Ask again as long as nobody answers: a server without a network would else run through all rounds for nothing.

    Devices answer the same request with the same numbers, so that nothing is paid twice.
    """

    def ask(asks: list[Ask]) -> Heard:
        end = time.monotonic() + wait
        while True:
            found = exchange(asks)
            if found.sent.any() or not asks:
                return found
            reasons = "; ".join(f"device {device}: {why}" for device, why in sorted(found.absent.items()))
            if time.monotonic() > end:
                text = f"No device has answered for {wait:g} s, so the run is stopped; it can go on later. {reasons}"
                raise DeploymentError(text)
            _say(f"nobody answered, asking again; {reasons}")
            time.sleep(pause)

    return ask


def _refuse_forgetful(server: Server) -> None:
    """InputError for a ledger that has less than the plan takes as spent: it may have stayed on another machine."""
    book, before = server.ledger, server.job.plan.ledger
    if book is not None and np.any(book.spent < before * (1 - TOLERANCE)):
        allowed = "the one with which the federation was prepared: it lacks what devices had spent before"
        raise InputError("ledger", str(book.path), allowed)


def _seconds(config: Any, name: str) -> float:
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise InputError(name, value, "a number of seconds")
    return float(value)


def _say(line: str) -> None:
    print(line, flush=True)
