"""The server's side of secure aggregation: Flower's SecAgg+ in place of the plain post, so that it learns a sum alone.

A round takes four exchanges: keys, shares of every device's secrets for all others, masked messages, and shares for
unmasking. A device that falls silent before the masked messages is left out; one that falls silent after is in the
sum. The threshold for unmasking is the quorum of the job and more than half of the senders: with fewer, no secret can
be put together, nothing is unmasked, and the round is lost for all and costs nobody. A sum that can be unmasked but is
rubbish, as any device can make it, is not used, but its senders have paid.

Against whom this protects: logs, storage and curious operators of a server that keeps to the protocol. It does not
against a server that attacks. Flower draws masks from Mersenne Twisters with seeds of 32 bits (28 for those shared by
a pair of devices, as they are folded from text), which can be tried one by one; and devices take each other's public
keys from the server, which can hand out its own instead. `Job.epsilons` therefore has two numbers, for a masked sum
and for bare messages.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid
from numpy.typing import NDArray

from wflmc.federated.apps import Post
from wflmc.federated.job import Job
from wflmc.federated.lattice import MODULUS, lattice_of
from wflmc.federated.masked_messages import read_masked
from wflmc.federated.messages import SLACK, TAIL, RejectedError, refuse_other, request
from wflmc.federated.server import Exchange
from wflmc.federated.terms import Ask, Heard

log = logging.getLogger("wflmc.federated")

WORDS = {
    Stage.SETUP: "when keys were asked for",
    Stage.SHARE_KEYS: "when shares of secrets were asked for",
    Stage.COLLECT_MASKED_VECTORS: "when masked messages were asked for",
    Stage.UNMASK: "when shares for unmasking were asked for",
}


def exchange_for(grid: Grid, job: Job, nodes: Mapping[int, int] | None = None, **times: float) -> Exchange:
    """The exchange of a job: with secure aggregation where it says so, else message by message. See `Post`."""
    return (MaskedPost if job.aggregated else Post)(grid, job, nodes, **times)


class MaskedPost(Post):
    """Requests to devices and the sum of their masked answers; the deadline is for each of four exchanges."""

    def __init__(self, grid: Grid, job: Job, nodes: Mapping[int, int] | None = None, **times: float) -> None:
        self.lattice = lattice_of(job)
        super().__init__(grid, job, nodes, **times)

    def __call__(self, asks: list[Ask]) -> Heard:
        """Run the protocol once."""
        self._all_here()
        here = set(self.grid.get_node_ids())
        absent = {ask.device: "not connected" for ask in asks if self.node.get(ask.device) not in here}
        present = {self.node[ask.device]: ask for ask in asks if ask.device not in absent}
        if not asks:
            return self._lost({}, {}, "nobody was asked")
        quorum = int(self.job.quorum[asks[0].round - self.job.plan.start])
        threshold = max(quorum, len(present) // 2 + 1, 2)
        if len(present) < threshold:
            why = f"{len(present)} devices, of at least {threshold}, were connected"
            return self._lost(present, absent, why)._replace(unasked=True)
        flow = SecAggPlusWorkflow(
            num_shares=1.0,
            reconstruction_threshold=threshold,
            max_weight=1.0,
            clipping_range=self.lattice.reach,
            quantization_range=self.lattice.levels,
            modulus_range=MODULUS,
        )
        with _quiet():
            return self._run(flow, threshold, present, absent)

    def _run(self, flow: Any, threshold: int, present: dict[int, Ask], absent: dict[int, str]) -> Heard:
        line, state, chosen = _Line(self, present, absent), WorkflowState(), _Chosen(list(present))
        context = _context(chosen)
        stages = (flow.setup_stage, flow.share_keys_stage, flow.collect_masked_vectors_stage)
        for number, stage in enumerate(stages):
            if not stage(line, context, state):
                why = f"{len(state.active_node_ids)} devices, of at least {threshold}, were left {WORDS[line.stage]}"
                return self._lost(present, absent, why)
            if number == 0:
                state.nid_to_fitins = line.requests()
            if number == 1:
                _forget_early_leavers(state)
        senders = sorted(state.active_node_ids)
        try:
            with np.errstate(divide="ignore", invalid="ignore"):
                done = flow.unmask_stage(line, context, state)
        except (ValueError, TypeError, IndexError, AssertionError, UnsupportedAlgorithm) as error:
            # Shares that do not fit together; but the server holds enough of them to try others.
            log.warning("The sum could not be unmasked: %s", error)
            return self._spoiled(present, senders, absent, "shares for unmasking do not fit together")
        if not done and line.arrived >= threshold:  # a share in a malformed reply may be a share all the same
            return self._spoiled(present, senders, absent, "too few of the shares for unmasking came in proper form")
        if not done:
            why = f"{len(state.active_node_ids)} devices, of at least {threshold}, were left {WORDS[line.stage]}"
            return self._lost(present, absent, why)
        assert chosen.mean is not None
        total = len(senders) * chosen.mean
        if not self._plausible(total, [present[node] for node in senders]):
            return self._spoiled(present, senders, absent, "the sum is beyond what clipped messages add up to")
        return Heard(total.astype(np.float32), self._flags(present, senders), self._others(present, senders, absent))

    def _plausible(self, total: Any, asks: list[Ask]) -> bool:
        """Whether a sum is finite, and no larger than clipped gradients with their noise and rounding can be."""
        job, root = self.job, np.sqrt(self.job.plan.dim)
        clipped = sum(ask.precoder * float(job.plan.clip[ask.device]) for ask in asks)
        noise = np.sqrt(len(asks) * job.share.max()) * (root + TAIL)
        limit = (clipped + noise + len(asks) * self.lattice.quantum * root) * (1 + SLACK)
        return bool(np.all(np.linalg.norm(total, axis=1) <= limit))

    def _flags(self, present: dict[int, Ask], senders: Iterable[int]) -> Any:
        sent = np.zeros(self.job.plan.devices, dtype=bool)
        sent[[present[node].device for node in senders]] = True
        return sent

    def _others(self, present: dict[int, Ask], senders: list[int], absent: dict[int, str]) -> dict[int, str]:
        """Reasons of those who are not in the sum: who fell silent after it was sent is."""
        inside = {present[node].device for node in senders}
        return {device: why for device, why in absent.items() if device not in inside}

    def _lost(self, present: dict[int, Ask], absent: dict[int, str], why: str) -> Heard:
        """Nothing was unmasked: nobody has sent, and nobody pays."""
        rest = {ask.device: f"the round is lost, nothing was unmasked: {why}" for ask in present.values()}
        return Heard(self._nothing(), self._flags(present, ()), rest | absent)

    def _spoiled(self, present: dict[int, Ask], senders: list[int], absent: dict[int, str], why: str) -> Heard:
        rest = {present[node].device: f"the round is lost, but paid for: {why}" for node in senders}
        return Heard(self._nothing() + np.nan, self._flags(present, senders), absent | rest, spoiled=True)

    def _nothing(self) -> Any:
        return np.zeros((self.job.chains, self.job.plan.dim), np.float32)


class _Line:
    """What Flower's workflow takes for a grid: passes on proper replies alone, and notes why others are missing."""

    def __init__(self, post: MaskedPost, present: dict[int, Ask], absent: dict[int, str]) -> None:
        self.post, self.present, self.absent = post, present, absent
        self.stage: Any = Stage.SETUP
        self.arrived = 0
        self.nonce = {node: secrets.token_hex(16) for node in present}

    def requests(self) -> dict[int, RecordDict]:
        """What goes to devices with the third exchange."""
        return {node: request(ask, self.post.job.run, self.nonce[node]) for node, ask in self.present.items()}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Replies that are proper and in time."""
        del timeout
        letters, found, self.arrived = list(messages), [], 0
        waiting: dict[str, tuple[int, dict[str, Any]]] = {}
        asked = [dict(letter.content.config_records[RECORD_KEY_CONFIGS]) for letter in letters]
        for letter in letters:
            letter.metadata.ttl = self.post.deadline
        for letter, configs, ident in zip(letters, asked, self.post.grid.push_messages(letters), strict=True):
            self.stage, node = configs[Key.STAGE], letter.metadata.dst_node_id
            if ident:
                waiting[ident] = node, configs
            else:
                self._note(node, "could not be reached")
        for ident, reply in self.post.answers(set(waiting)):
            node, configs = waiting.pop(ident)
            if reply is None:
                self._note(node, "rejected, malformed: not to be read")
                continue
            self.arrived += not reply.has_error()
            try:
                self._check(reply, node, configs)
                found.append(reply)
            except RejectedError as error:
                self._note(node, f"rejected, {error}" if not reply.has_error() else str(error))
        for node, _ in waiting.values():
            self._note(node, f"late: no answer within {self.post.deadline:g} s")
        return found

    def _check(self, reply: Message, node: int, configs: dict[str, Any]) -> None:
        job = self.post.job
        read_masked(reply, configs, (job.chains, job.plan.dim))
        if reply.metadata.src_node_id != node:
            raise RejectedError("meant for others: it comes from another node")
        if configs[Key.STAGE] == Stage.COLLECT_MASKED_VECTORS:
            refuse_other(reply.content.get("about"), self.present[node], job.run, self.nonce[node])

    def _note(self, node: int, why: str) -> None:
        device = self.present[node].device
        self.absent[device] = f"{why}, {WORDS[self.stage]}"
        log.warning("Device %s: %s", device, self.absent[device])


class _Node:
    def __init__(self, node: int) -> None:
        self.node_id = node


class _Chosen:
    """What Flower's workflow asks of a strategy and of a client manager: whom to ask, and where the result goes."""

    def __init__(self, nodes: list[int]) -> None:
        self.nodes = nodes
        self.mean: NDArray[np.float64] | None = None

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[tuple[_Node, FitIns]]:
        """Those who are asked; what they are asked follows later."""
        return [(_Node(node), FitIns(parameters, {})) for node in self.nodes]

    def num_available(self) -> int:
        """How many there are."""
        return len(self.nodes)

    def aggregate_fit(self, server_round: int, results: list[tuple[_Node, FitRes]], failures: Any) -> tuple[None, Any]:
        """Keep the mean of those who sent."""
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


def _context(chosen: Any) -> LegacyContext:
    plain = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    context = LegacyContext(context=plain, strategy=chosen, client_manager=chosen)
    context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 0})
    context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
    return context


def _forget_early_leavers(state: Any) -> None:
    """Those who shared no secrets take no part in any mask; Flower's workflow would ask for shares that nobody has."""
    state.sampled_node_ids = set(state.active_node_ids)
    state.nid_to_neighbours = {
        node: state.nid_to_neighbours[node] & state.sampled_node_ids for node in state.sampled_node_ids
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Flower's workflow tells its own log about every stage; what matters goes into ours."""
    talker = logging.getLogger("flwr")
    level = talker.level
    talker.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        talker.setLevel(level)
