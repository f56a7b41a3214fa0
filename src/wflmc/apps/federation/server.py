"""The server's side of a federation: θ, the plan and the ledger, round by round, stopped and resumed.

In a round the server asks those whom the plan lets send, receives the sum of those who did, charges them for it, adds
the noise of the channel and updates. A device that does not answer in time, or not properly, is one that did not
transmit: it is not in the sum, it pays nothing, and the others weigh more (K/K_a with the K_a that there were).

Before the first round, and whenever a server goes on, all devices that are connected are asked whether they can use
their data. If one cannot, the server stops: nothing of a round has been asked for, and nobody has paid.

Devices are in this process, in Flower's simulation engine, or on machines of their own: `app` runs beside a SuperLink,
and runs all rounds of the job in its folder that have not been run. Its run config:

    folder      the server's folder, with job.npz and job.json, and the nodes.json that was written when keys were
                registered: a device is the node with its key, and no other
    deadline    seconds that a round waits; a device that is late did not transmit
    wait        seconds to wait for devices before the first round, and for any of them later on
"""

import json
import logging
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from pydantic import ValidationError

from wflmc.apps.federation.device import NOT_READY, Device
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
from wflmc.posterior.base import Posterior
from wflmc.privacy.ledger import TOLERANCE, Ledger
from wflmc.runs.documents import Document
from wflmc.sampling import (
    CHAIN_AXES,
    KernelRounds,
    Start,
    State,
    Trace,
    broadcast,
    chain_keys,
    kernel_rounds,
    update,
)
from wflmc.sampling.checkpoint import Checkpoint, Progress, allocate, flush
from wflmc.sampling.execution import ProgressCallback
from wflmc.sampling.loop import HostInfo, HostRound, run_rounds, single_rounds
from wflmc.sampling.noise import (
    ChannelNoise,
    LatticeNoise,
    NoiseSource,
    noise_of_senders,
)
from wflmc.sampling.starts import compiled_round_keys
from wflmc.sampling.transcript import (
    GradientEstimate,
    Transcript,
    transcript_dtype,
    write_rows,
)
from wflmc.support.errors import InputError, OverspendError, without_data
from wflmc.support.keys import named
from wflmc.support.storage import PART, append_text, sole_writer, sync_folder

Exchange = Callable[[list[RoundRequest]], Reception]
"""From what is asked to what is received; the transport, with the superposition at the server's end of it."""

Say = Callable[[str], None]
"""Called with a sentence for whoever waits."""

log = logging.getLogger("wflmc.apps.federation")
_say = partial(print, flush=True)

POLL = 0.5
"""Seconds between two looks for answers: each is a request to the SuperLink, which has others to serve."""
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError, DecodeError)
"""What Flower raises over a reply that it cannot put together; a lost connection is none of these."""
RAISED_BY_DEVICE = (ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
"""Flower's codes for errors of a device's own app; others are about connections and messages."""
HELLO = "query.hello"
"""The type of messages that ask whether a device can use its data."""
NOT_STARTED = (
    "No round was begun and nobody was charged. Repeat the same command when this is mended, or disconnect these "
    "devices to go on without them."
)
LOG = "rounds.jsonl"
LEDGER = "ledger.path"
"""In a server's folder: names the ledger to charge, where that is not its own."""


class Server(NamedTuple):
    """A job, the folder that has its progress, and the ledger that it is charged to."""

    job: Job
    folder: Path
    ledger: Ledger | None

    @property
    def checkpoint(self) -> Checkpoint:
        """Progress and samples, in the coordinates that chains move in."""
        return Checkpoint(self.folder, f"federation-{self.job.run}")

    @property
    def transcript(self) -> Path:
        """Rows [round, chain] of `transcript_dtype`: all that was received."""
        return self.folder / "transcript.npy"


def open_server(job: Job, folder: Path) -> Server:
    """Return the server of a job, with its own ledger in the folder unless another is named there."""
    plan = job.plan
    folder.mkdir(parents=True, exist_ok=True)
    if not plan.clips:
        return Server(job, folder, None)
    path = folder / _ledger_name(folder)
    book = Ledger(plan.privacy, plan.devices, enforced=plan.enforced, path=path)
    server = Server(job, folder, book)
    paid, done = book.rounds(job.run), server.checkpoint.load().rounds
    if not done <= paid <= done + 1:  # with fewer rounds done, another chain with the same noise would give both away
        raise InputError("ledger", f"{paid} rounds of this run", f"with all {done} rounds in {folder}, or one more")
    if paid == 0:
        book.check(plan.start, job.planned_loss)
    return server


def _ledger_name(folder: Path) -> str:
    """Return the name of the ledger that a server's folder has, or names."""
    path = folder / LEDGER
    if not path.exists():
        return "ledger.jsonl"
    try:
        name = path.read_text("utf-8")
    except ValueError:
        name = ""
    if not name or not name.isprintable():
        raise InputError("ledger", str(path), "the name of a file, as wflmc wrote it")
    return name


def serve(
    server: Server,
    exchange: Exchange,
    progress: ProgressCallback | None = None,
    say: Say | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Run all rounds that have not been run; every one is stored before the next is asked for.

    A round is paid for before its noise is drawn, and nothing of it is written before
    its progress, from which its rows in other files follow. So whenever a server is
    stopped, its disk has at most one draw of a round.

    A server that was stopped between paying for a round and storing its result asks the
    same devices for it again: that round has been paid for. It needs all of them and
    nobody else, as the sums of two sets of senders under the same noise would give
    their difference away; if one does not answer, the round is lost. So it is where the
    crash came while the round was being stored, and its noise cannot be drawn again.

    Args:
        server: as `open_server` gives it.
        exchange: the transport.
        progress: called with (rounds done, rounds in all).
        say: called with a line for every round.
        check: called before anything is asked for, where rounds are left; raises to stop.
    """
    job, plan = server.job, server.job.plan
    with sole_writer(server.folder, "job"):
        saved = server.checkpoint.load()
        if check is not None and saved.rounds < len(plan.rounds):
            check()
        store = _Store.opened(server, saved)
        if saved.begun:  # a crash may have come between progress and what follows
            store.write(saved)
        start = job.start if saved.chains is None else saved.chains
        key = jax.random.wrap_key_data(jnp.asarray(job.key))
        session = _Session(
            server=server,
            exchange=exchange,
            rounds=jax.device_put(kernel_rounds(plan)),
            keys=chain_keys(key, jnp.arange(job.chains)),
            store=store,
            progress=progress,
            say=say,
        )
        run_rounds(
            start.state(saved.rounds),
            single_rounds(saved.rounds, len(plan.rounds)),
            transport=session.transport,
            charge=session.charge,
            advance=HostRound(session.receive, session.update),
            keep=session.keep,
        )


class _Store(NamedTuple):
    """The files of samples and of the transcript, whose rows follow from the progress.

    Progress is saved first, whole or not at all. Rows that were written before it would
    be those of one draw of the noise, and after a crash those of another draw of the
    same round, which has been paid for once.
    """

    burn_in: int
    samples: NDArray[np.float32]
    """θ of the kept rounds, [draw, chain, m]."""
    transcript: NDArray[np.void]
    """[round, chain]."""

    @classmethod
    def opened(cls, server: Server, saved: Progress) -> Self:
        """Open both files, or create them where no round is done."""
        job, plan = server.job, server.job.plan
        rounds = len(plan.rounds)
        samples = allocate(
            (rounds - plan.burn_in, job.chains, plan.dim),
            server.checkpoint.samples,
            begun=saved.begun,
        )
        transcript = allocate(
            (rounds, job.chains),
            server.transcript,
            begun=saved.begun,
            dtype=transcript_dtype(plan.dim),
        )
        return cls(plan.burn_in, samples, transcript)

    def write(self, progress: Progress) -> None:
        """Write what a round has left; after a crash it is written again as it was."""
        assert progress.chains is not None
        assert progress.reception is not None
        round_index = progress.rounds - 1
        write_rows(self.transcript, round_index, progress.reception)
        flush(self.transcript)
        if round_index >= self.burn_in:
            self.samples[round_index - self.burn_in] = progress.chains.position
            flush(self.samples)


class _Exchanged(NamedTuple):
    """What has come of the requests of a round: the signal of the loop."""

    scheduled: NDArray[np.bool_]
    """Who was asked, [K]."""
    reception: Reception
    paid_before: bool
    """Whether the round was charged before the server was stopped."""
    position: NDArray[np.float32]
    """Where chains have asked for gradients, [chain, m]."""
    began: float
    """When the round began, in seconds of `time.perf_counter`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Session:
    """A server at work: transport, payment, noise source, update and what is kept."""

    server: Server
    exchange: Exchange
    rounds: KernelRounds
    """Of the plan, as the kernel takes them."""
    keys: jax.Array
    """Of the chains, [chain]."""
    store: _Store
    progress: ProgressCallback | None
    say: Say | None

    def transport(self, block: slice, state: State) -> _Exchanged:
        """Ask the devices of a round, and superpose what they send.

        A round that has been paid for is asked of those alone who have paid, and lost
        unless all of them send.
        """
        began = time.perf_counter()
        job, ledger = self.server.job, self.server.ledger
        round_index = block.start
        number = job.plan.start + round_index
        now = self.rounds[round_index]
        position = np.asarray(_gradient_positions(state, now))
        scheduled = np.asarray(job.plan.weight[round_index] > 0)
        paid = None if ledger is None else ledger.paid(job.run, number)
        if paid is not None:
            scheduled = scheduled & (paid > 0)
        if paid is not None and _may_have_left_a_draw(self.server):
            reason = "the server was stopped while it stored the round"
            reception = _lost(job, scheduled, reason)
        else:
            keys = compiled_round_keys(self.keys, number)
            theta = np.asarray(_broadcast(keys, state, now))
            requests = [*_requests(job, round_index, theta, keys, scheduled)]
            reception = self.exchange(requests)
        if paid is not None and _others_sent(reception, scheduled):
            reason = "a round that was paid for is only repeated with all its senders"
            lost = _lost(job, reception.sent, reason)
            reception = lost._replace(absent=reception.absent | lost.absent)
        return _Exchanged(scheduled, reception, paid is not None, position, began)

    def charge(self, block: slice, signal: _Exchanged) -> None:
        """Charge those who sent, unless they have paid for the round already."""
        job, ledger = self.server.job, self.server.ledger
        if ledger is None or signal.paid_before:
            return
        loss = job.loss(block.start, signal.reception.sent)[None]
        number = job.plan.start + block.start
        ledger.charge(job.run, number, loss, job.noise_name)

    @property
    def noise_source(self) -> NoiseSource:
        """Who adds the noise: the devices, an exact draw, or a simulated channel."""
        job = self.server.job
        lattice = job.lattice
        if job.noise == "devices":
            return noise_of_senders
        if lattice is not None:
            return LatticeNoise(lambda round_index: lattice)
        return ChannelNoise(self.keys, self.rounds, job.plan.start)

    def receive(
        self,
        round_index: int,
        signal: _Exchanged,
    ) -> jax.Array | NDArray[np.floating] | None:
        """Return y[chain, m]; None where nobody has sent."""
        if not signal.reception.sent.any():
            return None
        return self.noise_source(round_index, signal.reception.total)

    def update(
        self,
        round_index: int,
        state: State,
        signal: _Exchanged,
        received: jax.Array | NDArray[np.float64],
    ) -> State:
        """Move the chains by what was received, weighted by who really sent."""
        job = self.server.job
        weighting = rescale(job, round_index, signal.reception.sent)
        planned = self.rounds[round_index]
        own_noise = replace(planned.rounds, server_noise=weighting.server_noise)
        now = replace(planned, rounds=own_noise)
        keys = compiled_round_keys(self.keys, job.plan.start + round_index)
        received_sum = jnp.asarray(received, jnp.float32)
        return _update(keys, state, received_sum, jnp.float32(weighting.scale), now)

    def keep(self, block: slice, state: State, info: HostInfo[_Exchanged]) -> None:
        """Log a round, store its progress, then the rows that follow from it."""
        signal = info.signal
        seconds = time.perf_counter() - signal.began
        _log(self.server, block.start, signal, seconds, self.say)
        progress = Progress(
            rounds=block.stop,
            chains=Start.of_state(state),
            reception=self._estimate(block.start, info),
        )
        _save(self.server, progress)
        self.store.write(progress)
        if self.progress is not None:
            self.progress(block.stop, len(self.server.job.plan.rounds))

    def _estimate(
        self,
        round_index: int,
        info: HostInfo[_Exchanged],
    ) -> GradientEstimate:
        """Return what the server knows of the gradient after a round, in float32."""
        job, signal = self.server.job, info.signal
        position = signal.position.astype(np.float32)
        if info.received is None:
            nothing = np.zeros_like(position)
            infinite = np.full(job.chains, np.inf, np.float32)
            return GradientEstimate(position, gradient=nothing, noise=infinite)
        sent = signal.reception.sent
        factor = rescale(job, round_index, sent).scale / job.plan.gain[round_index]
        received = np.asarray(info.received, np.float32)
        variance = job.round_noise(round_index, sent) * factor**2
        return GradientEstimate(
            position=position,
            gradient=(factor * received).astype(np.float32),
            noise=np.full(job.chains, variance, np.float32),
        )


def _others_sent(reception: Reception, scheduled: NDArray[np.bool_]) -> bool:
    """Return whether somebody sent, but not all of those who were asked."""
    return bool(reception.sent.any() and np.any(reception.sent != scheduled))


def _save(server: Server, progress: Progress) -> None:
    """Store progress, and return when it is on the disk.

    Where that fails, a file stays behind by which the next start knows of it.
    """
    try:
        server.checkpoint.save(progress)
    except BaseException:
        with suppress(OSError):
            _unfinished(server).touch(mode=0o600)
        raise
    sync_folder(server.folder)


def _unfinished(server: Server) -> Path:
    """Return the file of progress while it is being written."""
    file = server.checkpoint.file
    return file.with_name(file.name + PART)


def _may_have_left_a_draw(server: Server) -> bool:
    """Return whether a crash came while progress, with a draw of the noise, was stored.

    A new draw would be a second look at a round that was paid for once. Noise of the
    devices is in their answers, and simulated noise in the job's key: these come again
    as they were.
    """
    drawn_here = server.job.noise == "channel" and server.job.lattice is not None
    return drawn_here and _unfinished(server).exists()


def _lost(job: Job, senders: NDArray[np.bool_], reason: str) -> Reception:
    """Return a round without any sender."""
    absent = {int(device): reason for device in np.flatnonzero(senders)}
    nothing = np.zeros((job.chains, job.plan.dim))
    return Reception(nothing, np.zeros(job.plan.devices, np.bool_), absent)


def trace_of(server: Server, posterior: Posterior | None = None) -> Trace:
    """Return the samples of a job that is finished.

    Args:
        server: as `open_server` gives it.
        posterior: maps the coordinates that chains move in to parameters, where these differ. How often gradients were
            clipped is nan: devices do not tell, as that is about their data and no loss covers it. Nor has a trace the
            key of the chains: who has both can take the noise away.
    """
    plan, chains = server.job.plan, server.job.chains
    saved = server.checkpoint.load()
    rounds = len(plan.rounds)
    if saved.rounds < rounds or saved.chains is None:
        done = f"{saved.rounds} of {rounds} rounds in {server.folder}"
        raise InputError("job", done, "finished")
    shape = (rounds - plan.burn_in, chains, plan.dim)
    samples = _read_rows(server.checkpoint.samples, shape, np.dtype(np.float32))
    samples = samples.swapaxes(0, 1)
    theta = np.asarray(samples) if posterior is None else posterior.parameters(samples)
    rows = _read_rows(server.transcript, (rounds, chains), transcript_dtype(plan.dim))
    return Trace(
        theta=theta,
        clip_rate=np.full(theta.shape[:2], np.nan, np.float32),
        burn_in_clip_rate=np.full(plan.burn_in, np.nan),
        warmup=None,
        plans=(plan,),
        velocity=saved.chains.velocity,
        transcript=Transcript.from_rows(np.array(rows), np.arange(rounds), rounds),
    )


def _read_rows(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """Return the rows of a finished run, mapped from their file."""
    allowed = f"an array of shape {shape}, as wflmc wrote it"
    mismatch = InputError("job", str(path), allowed)
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception:  # the header of a file that is damaged fails in a dozen ways
        raise mismatch from None
    if rows.shape != shape or rows.dtype != dtype:
        raise mismatch
    return rows


class RoundLog(Document):
    """A line about a round, in rounds.jsonl."""

    round: int
    asked: int
    sent: int
    absent: dict[str, str]
    """Why devices did not send, by their number."""
    seconds: float


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return what happened in every round, the last account of each."""
    path = folder / LOG
    if not path.exists():
        return []
    rows = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValidationError):  # a line that a crash has cut short
            row = RoundLog.model_validate_json(text)
            rows[row.round] = row.model_dump()
    return [rows[number] for number in sorted(rows)]


def _requests(job: Job, at: int, theta: Any, keys: jax.Array, scheduled: NDArray[np.bool_]) -> Iterator[RoundRequest]:
    """Yield what is asked of every scheduled device; theta[chain, m], or [chain, K, m] with noisy downlinks."""
    plan = job.plan
    received = np.ones(plan.devices) if plan.received is None else plan.received[at]
    batch = np.asarray(jax.random.key_data(jax.vmap(partial(named, name="batch"))(keys))) if job.batch else None
    for k in np.flatnonzero(scheduled):
        place, known = theta if theta.ndim == 2 else theta[:, k], float(job.known[at, k])
        gain, arrives = float(job.gain[at, k]), float(job.known[at, k] * received[k])
        yield RoundRequest(int(k), plan.start + at, place, gain, known, arrives, batch)


def superpose(job: Job, requests: list[RoundRequest], signals: Mapping[int, Any], absent: dict[int, str]) -> Reception:
    """Return what the server receives where these devices send these signals[chain, m], superposed as by the air."""
    total = np.zeros((job.chains, job.plan.dim))
    for request in requests:  # in the order of the devices, so that the sum does not depend on who was first
        if request.device in signals:
            part = request.arrives * signals[request.device].astype(float)
            total += job.lattice.rounded(part) if job.noise == "channel" and job.lattice else part
    return Reception(total, np.isin(np.arange(job.plan.devices), list(signals)), absent)


class Weighting(NamedTuple):
    """How the server weighs a sum, by who really sent."""

    scale: float
    """The factor K/K_a on the sum."""
    server_noise: jax.Array | None
    """The variance of the server's own noise; None where it adds none."""


def rescale(job: Job, round_index: int, sent: NDArray[np.bool_]) -> Weighting:
    """Return how a round's sum is weighted, by who really sent.

    Weights grow as the senders become fewer, and the channel's noise with them; the
    server then adds less of its own, so that all noise together stays what the plan
    meant it to be, where that is possible.

    Args:
        job: what is run.
        round_index: which round, from 0.
        sent: who sent, [K]; at least one device.
    """
    plan = job.plan
    planned = float(plan.scale[round_index])
    active_devices = int(plan.active_devices[round_index])
    scale = planned * (active_devices / int(sent.sum()))
    if not np.any(plan.server_noise):
        return Weighting(scale, None)
    planned_noise = float(plan.server_noise[round_index])
    if scale == planned and job.noise != "devices":
        return Weighting(scale, jnp.float32(planned_noise))
    kick = float(plan.kick[round_index])
    gain = plan.gain[round_index]
    wanted = planned_noise + plan.noise_power * (kick * planned / gain) ** 2
    received = job.round_noise(round_index, sent) * (kick * scale / gain) ** 2
    return Weighting(scale, jnp.float32(max(0.0, wanted - received)))


@jax.jit
def _broadcast(keys: jax.Array, state: State, now: KernelRounds) -> jax.Array:
    """Return what devices receive of the positions where gradients are asked for,
    [chain, m], or [chain, K, m] with noisy downlinks."""

    def broadcast_one(key: jax.Array, state: State) -> jax.Array:
        return broadcast(named(key, "downlink"), _gradient_position(state, now), now)

    return jax.vmap(broadcast_one, (0, CHAIN_AXES))(keys, state)


def _gradient_position(state: State, now: KernelRounds) -> jax.Array:
    """Return where a chain asks for gradients, [m]."""
    return now.constants.dynamics.gradient_position(state.phase, now.rounds.step_size)


def _gradient_positions(state: State, now: KernelRounds) -> jax.Array:
    """Return where all chains ask for gradients, [chain, m]."""
    return jax.vmap(partial(_gradient_position, now=now), (CHAIN_AXES,))(state)


@jax.jit
def _update(
    keys: jax.Array,
    state: State,
    received: jax.Array,
    scale: jax.Array,
    now: KernelRounds,
) -> State:
    """Return the next state of all chains, from y[chain, m]."""

    def update_one(key: jax.Array, state: State, received: jax.Array) -> State:
        return update(named(key, "server"), state, received, scale[None], now)

    axes = (0, CHAIN_AXES, 0)
    return jax.vmap(update_one, axes, CHAIN_AXES)(keys, state, received)


def _log(
    server: Server,
    round_index: int,
    signal: _Exchanged,
    seconds: float,
    say: Say | None,
) -> None:
    """Write a line about a round: how many were asked, who of them did not send, and
    why."""
    number = server.job.plan.start + round_index
    reception = signal.reception
    reasons = sorted(reception.absent.items())
    absent = {str(device): reason for device, reason in reasons}
    row = {
        "round": number,
        "asked": int(signal.scheduled.sum()),
        "sent": int(reception.sent.sum()),
        "absent": absent,
        "seconds": round(seconds, 3),
    }
    append_text(server.folder / LOG, json.dumps(row) + "\n")
    if say is not None:
        parts = [f"round {number + 1}: {row['sent']} of {row['asked']} sent"]
        parts += [f"device {device} absent: {reason}" for device, reason in reasons]
        say("; ".join(parts))


def run_in_process(
    server: Server,
    devices: Sequence[Device],
    progress: ProgressCallback | None = None,
) -> None:
    """Run all devices one after the other in this process, without messages.

    Rounds take milliseconds: for first steps, and for machines without room for Flower's simulation engine.

    Args:
        server: as `open_server` gives it.
        devices: in the order of the plan.
        progress: called with (rounds done, rounds in all).
    """

    def exchange(requests: list[RoundRequest]) -> Reception:
        signals, absent = {}, {}
        for request in requests:
            try:
                signals[request.device] = devices[request.device].answer(request)
            except (InputError, OverspendError) as error:
                absent[request.device] = f"refused by the device: {error}"
        return superpose(server.job, requests, signals, absent)

    serve(server, exchange, progress)


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

    def __init__(self, grid: Grid, job: Job, nodes: Mapping[int, int], deadline: float, poll: float = 0.05) -> None:
        self.grid, self.job, self.deadline, self.poll = grid, job, deadline, poll
        self.node = {device: node for node, device in nodes.items()}
        self._one_by_one = False

    def __call__(self, requests: list[RoundRequest]) -> Reception:
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

    def greet(self, nodes: Iterable[int]) -> Hello:
        """Ask devices whether they can use their data; no request of a round, which would cost, is sent.

        A device that does not answer before the deadline, or not readably, is in neither
        part of what is returned: it is absent, as it may be in any round.

        Args:
            nodes: node ids, those of devices that are connected.
        """
        devices, failures = {}, {}
        nodes = sorted(nodes)
        messages = [Message(RecordDict(), node, HELLO, ttl=self.deadline) for node in nodes]
        asked = dict(zip(self.grid.push_messages(messages), nodes, strict=True))
        for ident, message in self._answers(set(asked)):
            if message is None:
                continue
            if message.has_error():
                if message.error.code in RAISED_BY_DEVICE:
                    said = str(message.error.reason)  # Flower adds the type of the error
                    failures[asked[ident]] = NOT_READY if NOT_READY in said else short(said)
                continue
            with suppress(KeyError, TypeError, ValueError):
                devices[asked[ident]] = int(message.content.config_records["about"]["device"])
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
    device_of = {node: device for device, node in transport.node.items() if node in here}
    failures = transport.greet(device_of).failures
    if failures:
        raise _not_ready({device_of[node]: reason for node, reason in failures.items()})


def _not_ready(failures: Mapping[int, str]) -> DeploymentError:
    """Return the error that names devices by their numbers, with what each has said."""
    devices_by_reason: dict[str, list[str]] = {}
    for device, reason in sorted(failures.items()):
        devices_by_reason.setdefault(reason, []).append(DEVICE.format(device))
    reasons = (f"{', '.join(devices)}: {reason}" for reason, devices in devices_by_reason.items())
    return DeploymentError(f"{'; '.join(reasons)}. {NOT_STARTED}")


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
        raise InputError("ledger", str(ledger.path), "that of the preparation: it lacks what was spent before")
    _say(f"{done} of {len(job.plan.rounds)} rounds are done; waiting for {job.plan.devices} devices")
    nodes = {row.node: row.device for row in read_nodes(folder)}
    connected(grid, len(nodes), wait)
    transport = Transport(grid, job, nodes, deadline, POLL)
    serve(server, patient(transport, wait), say=_say, check=partial(check_ready, transport))
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
            reasons = "; ".join(f"device {device}: {why}" for device, why in sorted(reception.absent.items()))
            if time.monotonic() > end:
                raise DeploymentError(f"No device has answered for {wait:g} s; the run can go on later. {reasons}")
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
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # one accelerator is not for all these processes
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    center = ServerApp()

    @center.main()
    def main(grid: Grid, context: Context) -> None:
        nodes = meet(Transport(grid, server.job, {}, deadline), wait=deadline)
        serve(server, Transport(grid, server.job, nodes, deadline), progress)

    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": os.cpu_count() or 1, "logging_level": "ERROR", "log_to_driver": False},
    }
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which leaves JAX's threads alone.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        run_simulation(center, app, server.job.plan.devices, backend_config=backend)
