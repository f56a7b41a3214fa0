"""The server's side of a federation: θ, the plan and the ledger, round by round, stopped and resumed.

In a round the server asks those whom the plan lets send, receives the sum of those who did, charges them for it, adds
the noise of the channel and updates. A device that does not answer in time, or not properly, is one that did not
transmit: it is not in the sum, it pays nothing, and the others weigh more (K/K_a with the K_a that there were).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError, OverspendError, SamplingError
from wflmc.federated.device import Device
from wflmc.federated.job import Job
from wflmc.federated.messages import Reception, Request
from wflmc.keys import named
from wflmc.planning.plan import Rounds
from wflmc.posterior.base import Posterior
from wflmc.privacy import Ledger
from wflmc.sampling import Trace, checkpoint
from wflmc.sampling.checkpoint import Checkpoint, room
from wflmc.sampling.kernel import State, broadcast, kernel_rounds, receive, update
from wflmc.sampling.runner import CHAINS, chain_keys, packed, unpacked
from wflmc.storage import append_text, sole_writer

Exchange = Callable[[list[Request]], Reception]
"""From what is asked to what is received; the transport, with the superposition at the server's end of it."""

Progress = Callable[[int, int], None]
"""Called with (rounds done, rounds in all)."""

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


def open_server(job: Job, folder: Path, ledger: str | Path | None = None) -> Server:
    """Return the server of a job, with its own ledger in the folder unless another is named, here or in the folder."""
    plan = job.plan
    folder.mkdir(parents=True, exist_ok=True)
    if not plan.clips:
        return Server(job, folder, None)
    if ledger is None:
        ledger = folder / ((folder / LEDGER).read_text("utf-8") if (folder / LEDGER).exists() else "ledger.jsonl")
    book = Ledger(plan.privacy, plan.devices, enforced=plan.enforced, path=Path(ledger))
    server = Server(job, folder, book)
    paid, done = book.rounds(job.run), server.checkpoint.load().rounds
    if paid < done:
        raise InputError("ledger", f"{paid} rounds of this run", f"one with all {done} rounds that were sent")
    if paid > done + 1:  # another chain with the same noise would give both away
        allowed = f"as it was: the ledger has {paid} rounds; without it, begin a new federation with another seed"
        raise InputError("checkpoint", f"{done} rounds in {folder}", allowed)
    if paid == 0:
        book.check(plan.start, job.planned_loss)
    return server


def serve(
    server: Server,
    exchange: Exchange,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Run all rounds that have not been run; every one is stored before the next is asked for.

    A server that was stopped between paying for a round and storing its result asks the same devices for it again, with
    the same noise: that round has been paid for. It needs all of them and nobody else, as the sums of two sets of
    senders under the same noise would give their difference away; if one does not answer, the round is lost.

    Args:
        server: as `open_server` gives it.
        exchange: the transport.
        progress: called with (rounds done, rounds in all).
        say: called with a line for every round.
    """
    job, plan = server.job, server.job.plan
    with sole_writer(server.folder, "job"):
        saved = server.checkpoint.load()
        state = unpacked(job.start if saved.theta is None else saved.theta, plan, saved.rounds)
        shape = (len(plan.rounds) - plan.burn_in, job.chains, plan.dim)
        samples = room(shape, server.checkpoint.samples, saved.theta is not None)
        rounds: Rounds = jax.tree.map(jnp.asarray, kernel_rounds([plan]))
        keys = chain_keys(jax.random.wrap_key_data(jnp.asarray(job.key)), jnp.arange(job.chains))
        for at in range(saved.rounds, len(plan.rounds)):
            began = time.perf_counter()
            round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, plan.start + at)
            state, scheduled, reception = _round(server, at, rounds[at], round_keys, state, exchange)
            if at >= plan.burn_in:
                samples[at - plan.burn_in] = np.asarray(state.theta)
                samples.flush()
            _log(server, at, scheduled, reception, time.perf_counter() - began, say)
            server.checkpoint.save(checkpoint.Progress(0, at + 1, packed(state), np.zeros(0)))
            with (server.folder / "progress.npz").open("r+b") as file:  # on the disk before the next round is paid for
                os.fsync(file.fileno())
            if progress is not None:
                progress(at + 1, len(plan.rounds))


def _round(
    server: Server, at: int, now: Rounds, keys: jax.Array, state: State, exchange: Exchange
) -> tuple[State, NDArray[np.bool_], Reception]:
    """Run one round: return the next state, who was asked, [K], and what was received."""
    job, ledger, number = server.job, server.ledger, server.job.plan.start + at
    scheduled = np.asarray(job.plan.weight[at] > 0)
    paid = None if ledger is None else ledger.paid(job.run, number)
    if paid is not None:  # asked again, of those alone who have paid
        scheduled = scheduled & (paid > 0)
    reception = exchange(_requests(job, at, np.asarray(_broadcast(keys, state, now)), keys, scheduled))
    if paid is not None and np.any(reception.sent != scheduled):
        reason = "a round that was paid for is only repeated with all its senders"
        absent = reception.absent | {int(device): reason for device in np.flatnonzero(reception.sent)}
        reception = Reception(np.zeros_like(reception.total), np.zeros_like(reception.sent), absent)
    if ledger is not None and paid is None:
        ledger.charge(job.run, number, job.loss(at, reception.sent)[None], job.noise_name)
    if reception.sent.any():
        scale, noise = rescale(job, at, reception.sent)
        now, simulated = replace(now, server_noise=noise), job.noise != "devices" and job.lattice is None
        total = job.lattice.noisy(reception.total) if job.noise == "channel" and job.lattice else reception.total
        state, finite = _move(keys, state, jnp.asarray(total, jnp.float32), jnp.float32(scale), now, simulated)
        if not bool(finite):
            raise SamplingError(f"A chain left the finite numbers in round {number + 1}.")
    return state, scheduled, reception


def trace_of(server: Server, posterior: Posterior | None = None) -> Trace:
    """Return the samples of a job that is finished.

    Args:
        server: as `open_server` gives it.
        posterior: maps the coordinates that chains move in to parameters, where these differ. How often gradients were
            clipped is nan: devices do not tell, as that is about their data and no loss covers it. Nor has a trace the
            key of the chains: who has both can take the noise away.
    """
    plan, saved = server.job.plan, server.checkpoint.load()
    if saved.rounds < len(plan.rounds) or saved.theta is None:
        raise InputError("job", f"{saved.rounds} of {len(plan.rounds)} rounds in {server.folder}", "finished")
    samples = np.load(server.checkpoint.samples, mmap_mode="r").swapaxes(0, 1)
    theta = np.asarray(samples) if posterior is None else posterior.parameters(samples)
    unknown = np.full(theta.shape[:2], np.nan, np.float32)
    velocity = saved.theta[:, plan.dim :] if plan.dynamics.has_velocity else None
    return Trace(theta, unknown, np.full(plan.burn_in, np.nan), None, (plan,), velocity)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return what happened in every round, the last account of each."""
    path, rows = folder / LOG, {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):  # a line that a crash has cut short
            row = json.loads(text)
            rows[row["round"]] = row
    return [rows[number] for number in sorted(rows)]


def _requests(job: Job, at: int, theta: Any, keys: jax.Array, scheduled: NDArray[np.bool_]) -> list[Request]:
    """Return what is asked of every scheduled device; theta[chain, m], or [chain, K, m] with noisy downlinks."""
    plan = job.plan
    received = np.ones(plan.devices) if plan.received is None else plan.received[at]
    batch = None
    if job.batch:
        batch = np.asarray(jax.random.key_data(jax.vmap(lambda key: named(key, "batch"))(keys)))
    requests = []
    for k in np.flatnonzero(scheduled):
        place, known = theta if theta.ndim == 2 else theta[:, k], float(job.known[at, k])
        gain, arrives = float(job.gain[at, k]), float(job.known[at, k] * received[k])
        requests.append(Request(int(k), plan.start + at, place, gain, known, arrives, batch))
    return requests


def superpose(
    job: Job, requests: list[Request], signals: Mapping[int, NDArray[np.float32]], absent: dict[int, str]
) -> Reception:
    """Return what the server receives where these devices send these signals[chain, m], superposed as by the air."""
    total = np.zeros((job.chains, job.plan.dim))
    for request in requests:  # in the order of the devices, so that the sum does not depend on who was first
        if request.device in signals:
            part = request.arrives * signals[request.device].astype(float)
            total += job.lattice.rounded(part) if job.noise == "channel" and job.lattice else part
    return Reception(total, np.isin(np.arange(job.plan.devices), list(signals)), absent)


def rescale(job: Job, at: int, sent: NDArray[np.bool_]) -> tuple[float, Any]:
    """Return the factor on the sum, and the variance of the server's own noise, by who really sent.

    Weights grow as the senders become fewer, and the channel's noise with them; the server then adds less of its own,
    so that all noise together stays what the plan meant it to be, where that is possible.
    """
    plan = job.plan
    planned = float(plan.scale[at])
    scale = planned * (int(plan.active_devices[at]) / int(sent.sum()))
    if not np.any(plan.server_noise):
        return scale, None
    base, kick = float(plan.server_noise[at]), float(plan.kick[at])
    if scale == planned and job.noise != "devices":
        return scale, jnp.float32(base)
    wanted = base + plan.noise_power * (kick * planned / plan.gain[at]) ** 2
    received = job.round_noise(at, sent) * (kick * scale / plan.gain[at]) ** 2
    return scale, jnp.float32(max(0.0, wanted - received))


@jax.jit
def _broadcast(keys: jax.Array, state: State, now: Rounds) -> jax.Array:
    """Return what devices receive of the chains' positions, [chain, m], or [chain, K, m] with noisy downlinks."""

    def one(key: jax.Array, state: State) -> jax.Array:
        place = now.constants.dynamics.gradient_position(state.theta, state.velocity, now.step_size)
        return broadcast(named(key, "downlink"), place, now)

    return jax.vmap(one, (0, CHAINS))(keys, state)


@partial(jax.jit, static_argnames=("simulated",))
def _move(keys: jax.Array, state: State, signal: jax.Array, scale: jax.Array, now: Rounds, simulated: bool) -> Any:
    """Return the next state of all chains, and whether all are finite; simulated noise is added where no other was."""

    def one(key: jax.Array, state: State, signal: jax.Array) -> State:
        received = receive(named(key, "noise"), signal, now) if simulated else signal
        return update(named(key, "server"), state, received, scale[None], now)

    fresh = jax.vmap(one, (0, CHAINS, 0), CHAINS)(keys, state, signal)
    return fresh, jnp.all(jnp.isfinite(fresh.theta))


def _log(server: Server, at: int, scheduled: NDArray[np.bool_], found: Reception, seconds: float, say: Any) -> None:
    """Write a line about a round: how many were asked, who of them did not send, and why."""
    number = server.job.plan.start + at
    absent = {str(device): reason for device, reason in sorted(found.absent.items())}
    row = {"round": number, "asked": int(scheduled.sum()), "sent": int(found.sent.sum()), "absent": absent}
    append_text(server.folder / LOG, json.dumps({**row, "seconds": round(seconds, 3)}) + "\n")
    if say is not None:
        reasons = "".join(f"; device {device} absent: {reason}" for device, reason in absent.items())
        say(f"round {number + 1}: {row['sent']} of {row['asked']} sent{reasons}")


def run_in_process(server: Server, devices: Sequence[Device], progress: Progress | None = None) -> None:
    """Run all devices one after the other in this process, without messages.

    Rounds take milliseconds: for first steps, and for machines without room for Flower's simulation engine.

    Args:
        server: as `open_server` gives it.
        devices: in the order of the plan.
        progress: called with (rounds done, rounds in all).
    """

    def exchange(requests: list[Request]) -> Reception:
        signals, absent = {}, {}
        for request in requests:
            try:
                signals[request.device] = devices[request.device].answer(request)
            except (InputError, OverspendError) as error:
                absent[request.device] = f"refused by the device: {error}"
        return superpose(server.job, requests, signals, absent)

    serve(server, exchange, progress)
