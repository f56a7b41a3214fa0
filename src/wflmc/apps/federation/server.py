"""The server's side of a federation: θ, the plan and the ledger, round by round.

Every round has the four steps of `wflmc.sampling.loop.run_rounds`, in this order:

1. *transport*: the server sends a request to each device that the plan schedules, and
   superposes the signals that come back;
2. *charge*: the ledger is charged for the devices that sent (`_Session.charge`);
3. *advance*: the noise of the channel is drawn, and the chains are updated;
4. *keep*: the progress is stored, then everything that follows from it.

The ledger is therefore charged before the noise of a round exists, and before anything
that reveals the round is written. Each device charges its own ledger, too, before its
signal leaves it (`wflmc.apps.federation.device.Device.answer`).

A device that does not answer in time, or not properly, is one that did not transmit: it
is not in the sum, it pays nothing, and the others weigh more (K/K_a with the number K_a
of devices that sent).

Before the first round, and whenever a server resumes, all connected devices are asked
whether they can use their data. If one cannot, the server stops: nothing of a round has
been requested, and nobody has paid.

How requests reach the devices depends on the transport: `run_in_process` calls devices
in this process, and `wflmc.apps.federation.flower_server` sends Flower messages.
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
from wflmc.apps.federation.messages import Reception, RoundRequest
from wflmc.posterior.base import Posterior
from wflmc.privacy.ledger import Ledger
from wflmc.runs.documents import Document, JsonObject
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
    add_no_noise,
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
"""A transport: from the requests of a round to what the server receives, superposed."""

Notify = Callable[[str], None]
"""Called with a sentence about the progress, for a person who waits."""

LOG = "rounds.jsonl"
"""In a server's folder: one line for every round, as `RoundLog`."""
LEDGER = "ledger.path"
"""In a server's folder: the path of the ledger to charge, where it is not its own."""
OWN_LEDGER = "ledger.jsonl"
"""In a server's folder: its own ledger, charged unless `LEDGER` names another file."""
STOPPED_WHILE_STORING = "the server was stopped while it stored the round"
"""Why a round is lost whose noise cannot be drawn again."""
SENDERS_MISSING = "a round that was paid for is only repeated with all its senders"
"""Why a round is lost that has been charged, but not answered by all who paid."""


class Server(NamedTuple):
    """A job, the folder with its progress, and the ledger that it is charged to."""

    job: Job
    folder: Path
    ledger: Ledger | None
    """None where nothing is clipped, so that no loss is finite."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the stored progress of the chains and the file of their samples.

        Both are in the coordinates that the chains move in, which `trace_of` maps to
        parameters. The checkpoint carries the name of the run, so that the progress of
        another plan, key or channel in the same folder is refused when it is loaded.
        """
        return Checkpoint(self.folder, f"federation-{self.job.run}")

    @property
    def transcript(self) -> Path:
        """Return the file of everything that the server received.

        It is a NumPy array of shape [round, chain] whose elements are of
        `transcript_dtype`: the position, the estimate of the gradient and the variance
        of its noise. Rows of rounds that have not been run are zero.
        """
        return self.folder / "transcript.npy"


def open_server(job: Job, folder: Path) -> Server:
    """Open the server of a job, new or stopped, with the ledger that it charges.

    The ledger is the server's own in the folder, unless a file there names another
    one. A job without clipping has none, as its losses are infinite. If no round has
    been charged yet, the ledger first checks that the budget suffices for the whole
    plan with all scheduled devices.

    Args:
        job: from `make_job`, or `Job.load`.
        folder: of the server; created where it does not exist.

    Returns:
        The server, ready for `serve`.

    Raises:
        InputError: the ledger and the stored progress do not belong together, or the
            file that names the ledger is damaged.
        OverspendError: the plan would spend more than is left of a budget.
    """
    plan = job.plan
    folder.mkdir(parents=True, exist_ok=True)
    if not plan.clips:
        return Server(job, folder, None)
    path = folder / _ledger_name(folder)
    ledger = Ledger(plan.privacy, plan.devices, enforced=plan.enforced, path=path)
    server = Server(job, folder, ledger)
    charged_rounds = ledger.rounds(job.run)
    stored_rounds = server.checkpoint.load().rounds
    # With fewer rounds stored, a second chain would be drawn under the same noise, and
    # the two would reveal each other. The last round may be charged, but not stored.
    if not stored_rounds <= charged_rounds <= stored_rounds + 1:
        raise InputError(
            "ledger",
            f"{charged_rounds} rounds of this run",
            f"with all {stored_rounds} rounds in {folder}, or one more",
        )
    if charged_rounds == 0:
        ledger.check(plan.start, job.planned_loss)
    return server


def _ledger_name(folder: Path) -> str:
    """Return the path of the ledger, relative to the folder of its server."""
    path = folder / LEDGER
    if not path.exists():
        return OWN_LEDGER
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
    notify: Notify | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Run all rounds that are left; each is stored before the next one is requested.

    A round is charged before its noise is drawn. Its line in rounds.jsonl, which says
    who sent, is written first; then its progress, from which its rows in all other
    files follow. Whenever a server is stopped, its disk therefore has at most one draw
    of the noise of a round.

    A server that was stopped between charging a round and storing its result requests
    the round again, at no cost, from exactly the devices that have paid. The sums of
    two sets of senders under the same noise would reveal their difference: if one of
    these devices does not answer, the round is lost. It is also lost if the server was
    stopped while it stored a result whose noise cannot be drawn again.

    Args:
        server: from `open_server`.
        exchange: the transport.
        progress: called with (rounds finished, rounds of the plan).
        notify: called with a sentence for every round.
        check: called before the first request, if rounds are left; raises to stop.

    Raises:
        InputError: another process uses the folder, or its files are damaged.
        OverspendError: a round would overspend a budget; nothing of it is stored.
        SamplingError: a chain left the finite numbers.
    """
    job = server.job
    plan = job.plan
    with sole_writer(server.folder, "job"):
        saved = server.checkpoint.load()
        if check is not None and saved.rounds < len(plan.rounds):
            check()
        store = _Store.opened(server, saved)
        if saved.begun:
            # A crash may have come between the progress and the rows that follow.
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
            notify=notify,
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

    The progress is saved first, completely or not at all. Rows that were written before
    it would contain one draw of the noise, and after a crash another draw of the same
    round, which has been paid for once.
    """

    burn_in: int
    samples: NDArray[np.float32]
    """θ of the rounds after burn-in, [draw, chain, m]."""
    transcript: NDArray[np.void]
    """[round, chain]."""

    @classmethod
    def opened(cls, server: Server, saved: Progress) -> Self:
        """Open both files, or create them before the first round.

        Args:
            server: whose folder has the files.
            saved: the progress that is stored there; whether it has begun decides
                between opening and creating.

        Returns:
            Both files mapped into memory, of the shapes that the plan needs.

        Raises:
            InputError: a file that was begun is damaged or has another shape.
            OSError: a file that was begun is missing, or the disk is full.
        """
        job = server.job
        plan = job.plan
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
        """Write the rows of the last finished round, and flush them to the disk.

        After a crash the same rows are written again, with the same content. A round of
        burn-in has a row in the transcript only.

        Args:
            progress: stored before, after at least one round.
        """
        assert progress.chains is not None
        assert progress.reception is not None
        round_index = progress.rounds - 1
        write_rows(self.transcript, round_index, progress.reception)
        flush(self.transcript)
        if round_index >= self.burn_in:
            self.samples[round_index - self.burn_in] = progress.chains.position
            flush(self.samples)


class _RoundSignal(NamedTuple):
    """What the transport has brought in a round: the signal of the loop."""

    scheduled: NDArray[np.bool_]
    """Which devices were sent a request, [K]."""
    reception: Reception
    already_charged: bool
    """Whether the round was charged before the server was stopped."""
    position: NDArray[np.float32]
    """Where the chains evaluate gradients, [chain, m]."""
    start_seconds: float
    """When the round began, in seconds of `time.perf_counter`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Session:
    """A running server: the steps of a round, as `run_rounds` calls them."""

    server: Server
    exchange: Exchange
    rounds: KernelRounds
    """The rounds of the plan, as the kernel takes them."""
    keys: jax.Array
    """The keys of the chains, [chain]."""
    store: _Store
    progress: ProgressCallback | None
    notify: Notify | None

    def transport(self, block: slice, state: State) -> _RoundSignal:
        """Request a round from the devices, and superpose what they send.

        A round that has been charged before is requested only from the devices that
        have paid for it, and is lost unless all of them send.

        Args:
            block: one round.
            state: of all chains before the round.

        Returns:
            The superposed signal, without the noise that the channel adds, and which
            devices sent it.
        """
        start_seconds = time.perf_counter()
        round_index = block.start
        kernel_round = self.rounds[round_index]
        position = np.asarray(_gradient_positions(state, kernel_round))
        weight = self.server.job.plan.weight[round_index]
        scheduled = np.asarray(weight > 0)
        charged_loss = self._charged_loss(round_index)
        if charged_loss is None:
            reception = self._request(round_index, state, scheduled)
        else:
            scheduled = scheduled & (charged_loss > 0)
            reception = self._repeat(round_index, state, scheduled)
        return _RoundSignal(
            scheduled=scheduled,
            reception=reception,
            already_charged=charged_loss is not None,
            position=position,
            start_seconds=start_seconds,
        )

    def _charged_loss(self, round_index: int) -> NDArray[np.float64] | None:
        """Return what a round was charged before, [K]; None where it was not."""
        ledger = self.server.ledger
        if ledger is None:
            return None
        job = self.server.job
        return ledger.paid(job.run, job.plan.start + round_index)

    def _request(
        self,
        round_index: int,
        state: State,
        scheduled: NDArray[np.bool_],
    ) -> Reception:
        """Broadcast the positions to the scheduled devices; return what they send."""
        job = self.server.job
        keys = compiled_round_keys(self.keys, job.plan.start + round_index)
        theta = np.asarray(_broadcast(keys, state, self.rounds[round_index]))
        requests = _requests(job, round_index, theta, keys, scheduled)
        return self.exchange(list(requests))

    def _repeat(
        self,
        round_index: int,
        state: State,
        paying: NDArray[np.bool_],
    ) -> Reception:
        """Repeat a round that was charged, or lose it unless all who paid send."""
        job = self.server.job
        if _may_have_left_a_draw(self.server):
            return _lost_reception(job, paying, STOPPED_WHILE_STORING)
        reception = self._request(round_index, state, paying)
        if not _only_part_sent(reception, paying):
            return reception
        lost_round = _lost_reception(job, reception.sent, SENDERS_MISSING)
        return lost_round._replace(absent=reception.absent | lost_round.absent)

    def charge(self, block: slice, signal: _RoundSignal) -> None:
        """Charge the devices that sent, unless the round has been charged already.

        The loop calls this before the noise of the round is drawn and before anything
        of the round is written.

        Args:
            block: one round.
            signal: from `transport`.

        Raises:
            InputError: the ledger has the same noise under another run.
            OverspendError: a device would spend more than its budget.
        """
        job = self.server.job
        ledger = self.server.ledger
        if ledger is None or signal.already_charged:
            return
        loss = job.loss(block.start, signal.reception.sent)
        ledger.charge(
            run=job.run,
            first=job.plan.start + block.start,
            losses=loss[None],
            noise=job.noise_name,
        )

    @property
    def noise_source(self) -> NoiseSource:
        """Return where the noise of a sum comes from.

        With noise by the devices it is part of their signals, and nothing is added,
        although the job has a lattice: that of a device's own part.
        Noise of the channel is an exact draw on the lattice of the job. Simulated noise
        comes from the keys of the chains, and protects nobody.
        """
        job = self.server.job
        lattice = job.lattice
        if job.noise == "devices":
            return add_no_noise
        if lattice is not None:
            return LatticeNoise(lambda round_index: lattice)
        return ChannelNoise(self.keys, self.rounds, job.plan.start)

    def receive(
        self,
        round_index: int,
        signal: _RoundSignal,
    ) -> jax.Array | NDArray[np.floating] | None:
        """Draw the noise of a round, which has been charged by now.

        Args:
            round_index: from 0.
            signal: from `transport`.

        Returns:
            The received sum y[chain, m], noise included; None where no device has sent,
            for which no noise is drawn.
        """
        if not signal.reception.sent.any():
            return None
        return self.noise_source(round_index, signal.reception.total)

    def update(
        self,
        round_index: int,
        state: State,
        signal: _RoundSignal,
        received: jax.Array | NDArray[np.float64],
    ) -> State:
        """Move the chains by the received sum, weighted by the devices that sent.

        Args:
            round_index: from 0.
            state: of all chains before the round.
            signal: from `transport`; at least one device sent.
            received: y[chain, m].

        Returns:
            The state of all chains after the round.
        """
        job = self.server.job
        weighting = rescale(job, round_index, signal.reception.sent)
        planned = self.rounds[round_index]
        rescaled = replace(planned.rounds, server_noise=weighting.server_noise)
        kernel_round = replace(planned, rounds=rescaled)
        keys = compiled_round_keys(self.keys, job.plan.start + round_index)
        received_sum = jnp.asarray(received, jnp.float32)
        scale = jnp.float32(weighting.scale)
        return _update(keys, state, received_sum, scale, kernel_round)

    def keep(self, block: slice, state: State, info: HostInfo[_RoundSignal]) -> None:
        """Log a round, store its progress, then the rows that follow from it.

        Args:
            block: one round.
            state: of all chains after the round.
            info: the signal of the round and what was received.
        """
        signal = info.signal
        seconds = time.perf_counter() - signal.start_seconds
        _log_round(self.server, block.start, signal, seconds, notify=self.notify)
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
        info: HostInfo[_RoundSignal],
    ) -> GradientEstimate:
        """Return what the server knows of the gradient after a round, in float32."""
        job = self.server.job
        signal = info.signal
        position = signal.position.astype(np.float32)
        if info.received is None:
            return GradientEstimate(
                position=position,
                gradient=np.zeros_like(position),
                noise=np.full(job.chains, np.inf, np.float32),
            )
        sent = signal.reception.sent
        scale = rescale(job, round_index, sent).scale
        factor = scale / job.plan.gain[round_index]
        received_sum = np.asarray(info.received, np.float32)
        gradient = factor * received_sum
        variance = job.round_noise(round_index, sent) * factor**2
        return GradientEstimate(
            position=position,
            gradient=gradient.astype(np.float32),
            noise=np.full(job.chains, variance, np.float32),
        )


def _only_part_sent(reception: Reception, scheduled: NDArray[np.bool_]) -> bool:
    """Return whether some device sent, but not exactly those that were scheduled."""
    someone_sent = reception.sent.any()
    return bool(someone_sent and np.any(reception.sent != scheduled))


def _save(server: Server, progress: Progress) -> None:
    """Store progress, and return when it is on the disk.

    If that fails, a file stays behind by which the next start knows of it.
    """
    try:
        server.checkpoint.save(progress)
    except BaseException:
        with suppress(OSError):
            _unfinished_file(server).touch(mode=0o600)
        raise
    sync_folder(server.folder)


def _unfinished_file(server: Server) -> Path:
    """Return the file of the progress while it is being written."""
    file = server.checkpoint.file
    return file.with_name(file.name + PART)


def _may_have_left_a_draw(server: Server) -> bool:
    """Return whether the server was stopped while it stored a draw of the noise.

    A new draw would be a second look at a round that was paid for once. Noise of the
    devices is in their answers, and simulated noise in the key of the job: these are
    the same when the round is repeated.
    """
    job = server.job
    server_draws_noise = job.noise == "channel" and job.lattice is not None
    return server_draws_noise and _unfinished_file(server).exists()


def _lost_reception(
    job: Job, lost_devices: NDArray[np.bool_], reason: str
) -> Reception:
    """Return the reception of a round in which no signal counts.

    Args:
        job: what is run.
        lost_devices: those whose signals do not count; the log has them as absent, [K].
        reason: why, for the log.
    """
    return Reception(
        total=np.zeros((job.chains, job.plan.dim)),
        sent=np.zeros(job.plan.devices, np.bool_),
        absent={int(device): reason for device in np.flatnonzero(lost_devices)},
    )


def trace_of(server: Server, posterior: Posterior | None = None) -> Trace:
    """Read the samples of a finished job.

    The rates of clipping are nan: devices do not report how often they clipped, as that
    depends on their data and no charge covers it. The trace does not contain the key of
    the chains either, as whoever has both can subtract simulated noise.

    Args:
        server: from `open_server`, with all rounds run.
        posterior: maps the coordinates that the chains move in to parameters; None
            returns the coordinates themselves.

    Returns:
        The trace of all chains, with its transcript.

    Raises:
        InputError: rounds are left, or a file is damaged.
    """
    plan = server.job.plan
    chains = server.job.chains
    saved = server.checkpoint.load()
    rounds = len(plan.rounds)
    if saved.rounds < rounds or saved.chains is None:
        state = f"{saved.rounds} of {rounds} rounds in {server.folder}"
        raise InputError("job", state, "finished")
    sample_shape = (rounds - plan.burn_in, chains, plan.dim)
    float32 = np.dtype(np.float32)
    by_draw = _read_rows(server.checkpoint.samples, sample_shape, float32)
    samples = by_draw.swapaxes(0, 1)
    theta = np.asarray(samples) if posterior is None else posterior.parameters(samples)
    row_dtype = transcript_dtype(plan.dim)
    rows = _read_rows(server.transcript, (rounds, chains), row_dtype)
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
    expected = f"an array of shape {shape}, as wflmc wrote it"
    mismatch = InputError("job", str(path), expected)
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception:
        # A damaged header makes NumPy raise errors of many types.
        raise mismatch from None
    if rows.shape != shape or rows.dtype != dtype:
        raise mismatch
    return rows


class RoundLog(Document):
    """A line about a round, in rounds.jsonl."""

    round: int
    asked: int
    """The number of devices that the round counted on, whether a request reached them
    or not. A repeated round counts on those that have paid for it."""
    sent: int
    """The number of devices that sent."""
    absent: dict[str, str]
    """Why devices did not send, by their number."""
    seconds: float


def read_log(folder: Path) -> list[JsonObject]:
    """Read what happened in every round.

    A round that was repeated after a crash has several lines: the last one counts.
    Lines that a crash has cut short, or that are no rows of a log, are skipped.

    Args:
        folder: of the server.

    Returns:
        One row with the keys of `RoundLog` for every round, by number; none if there is
        no log.
    """
    path = folder / LOG
    if not path.exists():
        return []
    row_of_round = {}
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        with suppress(ValidationError):
            row = RoundLog.model_validate_json(line)
            row_of_round[row.round] = row.model_dump()
    return [row_of_round[number] for number in sorted(row_of_round)]


def _requests(
    job: Job,
    round_index: int,
    theta: NDArray[np.float32],
    keys: jax.Array,
    scheduled: NDArray[np.bool_],
) -> Iterator[RoundRequest]:
    """Yield the requests of a round to the scheduled devices.

    θ is [chain, m], or [chain, K, m] where every device receives its own over a noisy
    downlink.
    """
    plan = job.plan
    received_ratio = np.ones(plan.devices)
    if plan.received is not None:
        received_ratio = plan.received[round_index]
    batch = _batch_keys(keys) if job.batch else None
    for device in np.flatnonzero(scheduled):
        device_theta = theta if theta.ndim == 2 else theta[:, device]
        estimate = job.channel_estimates[round_index, device]
        yield RoundRequest(
            device=int(device),
            round=plan.start + round_index,
            theta=device_theta,
            gain=float(job.gain[round_index, device]),
            channel_estimate=float(estimate),
            channel_gain=float(estimate * received_ratio[device]),
            batch=batch,
        )


def _batch_keys(keys: jax.Array) -> NDArray[np.uint32]:
    """Return the keys of the chains' mini-batches in a round, as words."""
    batch_keys = jax.vmap(partial(named, name="batch"))(keys)
    return np.asarray(jax.random.key_data(batch_keys))


def superpose(
    job: Job,
    requests: list[RoundRequest],
    signals: Mapping[int, NDArray[np.float32]],
    absent: dict[int, str],
) -> Reception:
    """Add up the signals of a round as the air does: Σ_k |h_k| x_k.

    The terms are added in the order of the requests, so that the sum does not depend on
    which device answered first. With noise of the channel each term is rounded to the
    lattice on which the noise is drawn.

    Args:
        job: what is run.
        requests: of the round.
        signals: x_k[chain, m] of the devices that sent, by device.
        absent: why other devices did not send, by device.

    Returns:
        The sum in float64, and which devices are in it.
    """
    total = np.zeros((job.chains, job.plan.dim))
    for request in requests:
        if request.device not in signals:
            continue
        signal = signals[request.device].astype(float)
        term = request.channel_gain * signal
        if job.noise == "channel" and job.lattice:
            term = job.lattice.rounded(term)
        total += term
    sent = np.isin(np.arange(job.plan.devices), list(signals))
    return Reception(total, sent, absent)


class Weighting(NamedTuple):
    """How the server weighs a sum, by the devices that sent."""

    scale: float
    """The factor K/K_a on the sum."""
    server_noise: jax.Array | None
    """The variance of the server's own noise; None where it adds none."""


def rescale(job: Job, round_index: int, sent: NDArray[np.bool_]) -> Weighting:
    """Compute how the sum of a round is weighted, by the devices that sent.

    The scale is K/K_a with the number K_a of senders, which amplifies the noise of the
    channel as the senders become fewer. The server then adds less noise of its own, so
    that the total variance stays as planned; it adds none where the received noise
    alone exceeds the plan's.

    Args:
        job: what is run.
        round_index: from 0.
        sent: which devices sent, [K]; at least one.

    Returns:
        The scale and the variance of the server's noise.
    """
    plan = job.plan
    planned_scale = float(plan.scale[round_index])
    active_devices = int(plan.active_devices[round_index])
    scale = planned_scale * (active_devices / int(sent.sum()))
    if not np.any(plan.server_noise):
        return Weighting(scale, None)
    planned_noise = float(plan.server_noise[round_index])
    # The planned number itself, not computed again: chains are those of `wflmc run`.
    if scale == planned_scale and job.noise != "devices":
        return Weighting(scale, jnp.float32(planned_noise))
    kick = float(plan.kick[round_index])
    gain = plan.gain[round_index]
    planned_factor = kick * planned_scale / gain
    planned_total = planned_noise + plan.noise_power * planned_factor**2
    factor = kick * scale / gain
    received_noise = job.round_noise(round_index, sent) * factor**2
    server_noise = max(0.0, planned_total - received_noise)
    return Weighting(scale, jnp.float32(server_noise))


@jax.jit
def _broadcast(keys: jax.Array, state: State, kernel_round: KernelRounds) -> jax.Array:
    """Return what devices receive of the positions where gradients are evaluated.

    The shape is [chain, m], or [chain, K, m] with noisy downlinks.
    """

    def broadcast_chain(key: jax.Array, state: State) -> jax.Array:
        position = _gradient_position(state, kernel_round)
        return broadcast(named(key, "downlink"), position, kernel_round)

    return jax.vmap(broadcast_chain, (0, CHAIN_AXES))(keys, state)


def _gradient_position(state: State, kernel_round: KernelRounds) -> jax.Array:
    """Return where a chain evaluates gradients, [m]."""
    dynamics = kernel_round.constants.dynamics
    return dynamics.gradient_position(state.phase, kernel_round.rounds.step_size)


def _gradient_positions(state: State, kernel_round: KernelRounds) -> jax.Array:
    """Return where all chains evaluate gradients, [chain, m]."""
    of_chain = partial(_gradient_position, kernel_round=kernel_round)
    return jax.vmap(of_chain, (CHAIN_AXES,))(state)


@jax.jit
def _update(
    keys: jax.Array,
    state: State,
    received: jax.Array,
    scale: jax.Array,
    kernel_round: KernelRounds,
) -> State:
    """Return the next state of all chains, from y[chain, m]."""

    def update_chain(key: jax.Array, state: State, received: jax.Array) -> State:
        server_key = named(key, "server")
        return update(server_key, state, received, scale[None], kernel_round)

    axes = (0, CHAIN_AXES, 0)
    return jax.vmap(update_chain, axes, CHAIN_AXES)(keys, state, received)


def _log_round(
    server: Server,
    round_index: int,
    signal: _RoundSignal,
    seconds: float,
    *,
    notify: Notify | None,
) -> None:
    """Write a line about a round: how many devices sent, and why others did not."""
    number = server.job.plan.start + round_index
    reception = signal.reception
    reasons = sorted(reception.absent.items())
    scheduled_count = int(signal.scheduled.sum())
    sent_count = int(reception.sent.sum())
    row = {
        "round": number,
        "asked": scheduled_count,
        "sent": sent_count,
        "absent": {str(device): reason for device, reason in reasons},
        "seconds": round(seconds, 3),
    }
    append_text(server.folder / LOG, json.dumps(row) + "\n")
    if notify is None:
        return
    sentences = [f"round {number + 1}: {sent_count} of {scheduled_count} sent"]
    for device, reason in reasons:
        sentences.append(f"device {device} absent: {reason}")
    notify("; ".join(sentences))


def run_in_process(
    server: Server,
    devices: Sequence[Device],
    progress: ProgressCallback | None = None,
) -> None:
    """Run all rounds with devices in this process, one after the other.

    No messages are sent, so that a round takes milliseconds: for first steps, and for
    machines too small for Flower's simulation engine. A device that refuses a request,
    by its terms or its budget, is absent from the round.

    Args:
        server: from `open_server`.
        devices: all of them, in the order of the plan.
        progress: called with (rounds finished, rounds of the plan).

    Raises:
        InputError: see `serve`.
        OverspendError: see `serve`.
        SamplingError: see `serve`.
    """

    def exchange(requests: list[RoundRequest]) -> Reception:
        signals = {}
        absent = {}
        for request in requests:
            device = devices[request.device]
            try:
                signals[request.device] = device.answer(request)
            except (InputError, OverspendError) as error:
                absent[request.device] = f"refused by the device: {error}"
        return superpose(server.job, requests, signals, absent)

    serve(server, exchange, progress)
