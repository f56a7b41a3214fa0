"""Small federations for tests."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from wflmc.apps.federation.device import Device, client_app
from wflmc.apps.federation.flower_server import Transport
from wflmc.apps.federation.job import Job, federated_plan, make_job, write_federation
from wflmc.apps.federation.server import Server, open_server, serve
from wflmc.privacy import Ledger
from wflmc.sampling import Trace, sample
from wflmc.scenario import Inputs, Scenario, build, validate

SCENARIO: dict[str, dict[str, Any]] = {
    "posterior": {"devices": 5, "examples": 100},
    "link": {"snr_db": 25.0},
    "privacy": {"epsilon": 15.0, "delta": 0.01},
    "sampler": {"burn_in": 3, "samples": 4, "chains": 2},
}
ROUNDING = 2e-5
"""Far above rounding of float32 over some rounds, far below a step of a chain (0.1)."""


FIRST = 1000
"""The first node id."""
RAISED = 2
"""Flower's code for a client app that raised."""

Fault = Callable[[Message, int], Message | None]
"""Maps a reply and its device to what arrives of it; None where nothing ever does."""


class Federation(NamedTuple):
    """A scenario ready to be run, by the server or by the simulator."""

    scenario: Scenario
    inputs: Inputs
    job: Job
    folder: Path

    def server(self, name: str = "server") -> Server:
        """Return a server in a folder of its own."""
        return open_server(self.job, self.folder / name)

    def devices(self) -> list[Device]:
        """Return all devices, with fresh ledgers in memory."""
        all_devices = []
        for k in range(self.job.plan.devices):
            terms = self.job.terms(k)
            ledger = Ledger(terms.promise, 1, enforced=terms.enforced)
            all_devices.append(
                Device(self.inputs.posterior.device(k), terms, ledger, b"a test %d" % k)
            )
        return all_devices

    def app(self) -> ClientApp:
        """Return the Flower client app of fresh `devices`."""
        return app_of(self.devices())

    def simulated(self) -> Trace:
        """Return the trace of `wflmc.sample` with the same plan and key."""
        key = jax.random.key(self.scenario.sampler.seed)
        return sample(key, self.inputs.posterior, self.job.plan, chains=self.job.chains)


def make_federation(
    folder: Path, changes: dict[str, Any] | None = None, **options: Any
) -> Federation:
    """Write and return a federation of the small scenario.

    Args:
        folder: of the federation's files.
        changes: of the scenario, by dotted keys.
        **options: keywords of `federated_plan` and `make_job`, such as `noise`.
    """
    content = {section: dict(values) for section, values in SCENARIO.items()}
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        content.setdefault(section, {})[name] = value
    scenario = validate(content)
    inputs = build(scenario)
    plan = federated_plan(scenario, inputs, **options)
    key = jax.random.key(scenario.sampler.seed)
    chains = scenario.sampler.chains
    job = make_job(key, inputs.posterior, inputs.link, plan, chains=chains, **options)
    write_federation(folder, scenario, inputs, job)
    return Federation(scenario, inputs, job, folder)


def app_of(devices: Sequence[Any]) -> ClientApp:
    """Return the Flower client app of devices in the order of their nodes."""
    return client_app(lambda context: devices[int(context.node_config["partition-id"])])


def largest_difference(first: Trace, second: Trace) -> float:
    """Return the largest difference of the draws of two traces."""
    assert first.theta.shape == second.theta.shape
    return float(np.abs(np.asarray(first.theta) - np.asarray(second.theta)).max())


def expected_chain(
    job: Job, posterior: Any, sent: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return θ[round, chain, m] of an overdamped chain by the paper's formulas in
    float64, device by device.

    Shares nothing with the code under test but the draws of the noise; sent[S, K] says
    who sends.
    """
    plan = job.plan
    number = np.arange(job.chains)
    noise_key = jax.random.fold_in(jax.random.wrap_key_data(job.key), _crc("noise"))
    theta = job.position.astype(float)
    positions = []
    for s in range(len(plan.rounds)):
        active = int(sent[s].sum())
        if active:
            for c in number:
                key = jax.random.fold_in(
                    jax.random.fold_in(noise_key, c), plan.start + s
                )
                z = np.asarray(
                    jax.random.normal(
                        jax.random.fold_in(key, _crc("noise")), (plan.dim,)
                    ),
                    float,
                )
                y = np.sqrt(plan.noise_power) * z
                for k in np.flatnonzero(sent[s]):
                    gradient = posterior.hessian[k] @ theta[c] - posterior.linear[k]
                    y = y + plan.gain[s] * gradient * min(
                        1.0, plan.clips_at[0][k] / np.linalg.norm(gradient)
                    )
                theta[c] = (
                    theta[c]
                    - plan.step_size[s] * plan.devices / (plan.gain[s] * active) * y
                )
        positions.append(theta.copy())
    return np.array(positions)


def _crc(name: str) -> int:
    return zlib.crc32(name.encode())


def run_on_grid(
    server: Server, app: ClientApp, fault: Fault | None = None, progress: Any = None
) -> None:
    """Run all rounds by Flower's messages in this process; answers come at once, so the
    deadline is 0 s.
    """
    grid = LocalGrid(app, server.job.plan.devices, fault)
    nodes = {node: k for k, node in enumerate(grid.get_node_ids())}
    serve(server, Transport(grid, server.job, nodes, deadline=0.0), progress)


class LocalGrid(Grid):
    """A Flower grid in this process, which hands every message to the client app at
    once; device k is node 1000 + k.

    Args:
        app: of all devices; a context's node_config says which one is meant, by its
            partition-id.
        devices: K.
        fault: what becomes of replies on their way, for tests.
    """

    def __init__(
        self, app: ClientApp, devices: int, fault: Fault | None = None
    ) -> None:
        # Flower's messages ask who sends them; in its own runtimes these are set by the process around an app.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self._app, self._fault = app, fault
        self._replies: dict[str, Message] = {}
        self._context = {
            FIRST + k: Context(
                1,
                FIRST + k,
                {"partition-id": k, "num-partitions": devices},
                RecordDict(),
                {},
            )
            for k in range(devices)
        }

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """The run that this grid serves."""
        return None

    def create_message(self, *args: Any, **options: Any) -> Message:
        """Refuse: the transport makes its messages itself."""
        raise AssertionError("the transport makes its messages itself")

    def get_node_ids(self) -> list[int]:
        """Return all nodes."""
        return list(self._context)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand over messages; return their ids."""
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to messages with these ids, each of them once."""
        return [
            self._replies.pop(ident) for ident in message_ids if ident in self._replies
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Hand over messages and return the replies; nothing takes time."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, message: Message) -> str:
        ident = uuid.uuid4().hex
        node = message.metadata.dst_node_id
        sent = _transferred(message, ident)
        try:
            answer: Message | None = self._app(sent, self._context[node])
        except Exception as error:
            # As Flower does: the server gets an error in place of a reply.
            answer = Message(Error(RAISED, f"{type(error)}:<'{error}'>"), reply_to=sent)
        assert answer is not None
        _address(answer, uuid.uuid4().hex)
        if self._fault is not None:
            answer = self._fault(answer, node - FIRST)
        if answer is not None:
            self._replies[ident] = (
                answer
                if answer.has_error()
                else _transferred(answer, answer.metadata.message_id)
            )
        return ident


def _address(message: Message, ident: str) -> None:
    """Write on a message what Flower's link writes on it."""
    message.metadata.__dict__.update(_message_id=ident, _run_id=1)


def _transferred(message: Message, ident: str) -> Message:
    """Return the message as the other end reads it: as bytes and back."""
    _address(message, ident)
    objects = {
        name: part.deflate() for name, part in get_all_nested_objects(message).items()
    }
    received: Any = inflate_object_from_contents(message.object_id, objects)
    _address(received, ident)
    return received
