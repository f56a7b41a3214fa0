"""The server's side of a federation: θ, the plan and the ledger, round by round, stopped and resumed.

In a round the server asks those whom the plan lets send, receives the sum of those who did, charges them for it, adds
the noise of the channel and updates. A device that does not answer in time, or not properly, is one that did not
transmit: it is not in the sum, it pays nothing, and the others weigh more (K/K_a with the K_a that there were).

Before the first round, and whenever a server goes on, all devices that are connected are asked whether they can use
their data. If one cannot, the server stops: nothing of a round has been asked for, and nobody has paid.

How requests reach devices is a matter of the transport: `run_in_process` asks devices in this process, and
`wflmc.apps.federation.flower_server` asks them by Flower's messages.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from wflmc.apps.federation.device import Device
from wflmc.apps.federation.job import Job
from wflmc.apps.federation.messages import (
    Reception,
    RoundRequest,
)
from wflmc.posterior.base import Posterior
from wflmc.privacy.ledger import Ledger
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
from wflmc.support.errors import InputError, OverspendError
from wflmc.support.keys import named
from wflmc.support.storage import PART, append_text, sole_writer, sync_folder

Exchange = Callable[[list[RoundRequest]], Reception]
"""From what is asked to what is received; the transport, with the superposition at the server's end of it."""

Say = Callable[[str], None]
"""Called with a sentence for whoever waits."""


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
    if (
        not done <= paid <= done + 1
    ):  # with fewer rounds done, another chain with the same noise would give both away
        raise InputError(
            "ledger",
            f"{paid} rounds of this run",
            f"with all {done} rounds in {folder}, or one more",
        )
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


def _requests(
    job: Job, at: int, theta: Any, keys: jax.Array, scheduled: NDArray[np.bool_]
) -> Iterator[RoundRequest]:
    """Yield what is asked of every scheduled device; theta[chain, m], or [chain, K, m] with noisy downlinks."""
    plan = job.plan
    received = np.ones(plan.devices) if plan.received is None else plan.received[at]
    batch = (
        np.asarray(jax.random.key_data(jax.vmap(partial(named, name="batch"))(keys)))
        if job.batch
        else None
    )
    for k in np.flatnonzero(scheduled):
        place, known = (
            theta if theta.ndim == 2 else theta[:, k],
            float(job.known[at, k]),
        )
        gain, arrives = float(job.gain[at, k]), float(job.known[at, k] * received[k])
        yield RoundRequest(int(k), plan.start + at, place, gain, known, arrives, batch)


def superpose(
    job: Job,
    requests: list[RoundRequest],
    signals: Mapping[int, Any],
    absent: dict[int, str],
) -> Reception:
    """Return what the server receives where these devices send these signals[chain, m], superposed as by the air."""
    total = np.zeros((job.chains, job.plan.dim))
    for request in (
        requests
    ):  # in the order of the devices, so that the sum does not depend on who was first
        if request.device in signals:
            part = request.arrives * signals[request.device].astype(float)
            total += (
                job.lattice.rounded(part)
                if job.noise == "channel" and job.lattice
                else part
            )
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
