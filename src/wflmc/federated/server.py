"""The server's side of a federation: θ, the plan and the ledger, round by round, stopped and resumed.

In a round the server asks those whom the plan lets send, hears the sum of those who did, writes down what it cost them,
adds the noise of the channel and updates. A device that does not answer in time, or not properly, is one that did not
transmit: it is not in the sum, it pays nothing, and the others weigh more (K/K_a with the K_a that there were).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError, SamplingError
from wflmc.federated.job import Job
from wflmc.federated.messages import Ask, Heard
from wflmc.keys import named
from wflmc.privacy import Ledger
from wflmc.sampling import Trace
from wflmc.sampling.checkpoint import Checkpoint, Progress, room
from wflmc.sampling.kernel import Rounds, ahead, heard, receive, rounds_of, update
from wflmc.sampling.runner import chain_keys
from wflmc.storage import naming_file, sole_writer

Exchange = Callable[[list[Ask]], Heard]
"""From what is asked to what is heard; the transport, with the superposition at the server's end of it."""

LOG = "rounds.jsonl"
LEDGER = "ledger.path"
"""In a server's folder: names the ledger to charge, where that is not its own."""


class Server(NamedTuple):
    """A job, the folder that keeps its progress, and the ledger that it is charged to."""

    job: Job
    folder: Path
    ledger: Ledger | None

    @property
    def checkpoint(self) -> Checkpoint:
        """Progress and samples, in the coordinates that chains move in."""
        return Checkpoint(self.folder, f"federation-{self.job.run}")

    @property
    def skip(self) -> int:
        """Rounds whose samples are not kept."""
        return self.job.plan.burn_in


def open_server(job: Job, folder: Path, ledger: str | Path | None = None) -> Server:
    """The server of a job, with its own ledger in the folder unless another is named, here or in the folder."""
    plan = job.plan
    folder.mkdir(parents=True, exist_ok=True)
    if not plan.clips:
        return Server(job, folder, None)
    elsewhere = folder / LEDGER
    if ledger is None and elsewhere.exists():
        ledger = folder / elsewhere.read_text(encoding="utf-8")
    path = folder / "ledger.jsonl" if ledger is None else Path(ledger)
    book = Ledger(plan.privacy, plan.devices, enforced=plan.enforced, path=path)
    paid, done = book.rounds(job.run), Server(job, folder, book).checkpoint.load().rounds
    if paid < done:
        raise InputError("ledger", f"{paid} rounds of this run", f"one with all {done} rounds that were sent")
    if paid > done + 1:  # another chain with the same noise would give both away
        allowed = f"as it was: the ledger has {paid} rounds; without it, begin a new federation with another seed"
        raise InputError("checkpoint", f"{done} rounds in {folder}", allowed)
    if paid == 0:
        book.check(plan.start, job.planned_loss())
    return Server(job, folder, book)


def serve(
    server: Server,
    exchange: Exchange,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Run all rounds that have not been run; every one is kept before the next is asked for.

    A server that was stopped between paying for a round and keeping its result asks the same devices for it again, with
    the same noise: that round has been paid for. It needs all of them and nobody else, as the sums of two sets of
    senders under the same noise would give their difference away; if one does not answer, the round is lost.
    """
    with sole_writer(server.folder, "job"):
        _serve(server, exchange, progress, say)


def _serve(server: Server, exchange: Exchange, progress: Any, say: Any) -> None:
    job, plan = server.job, server.job.plan
    saved = server.checkpoint.load()
    state = jnp.asarray(job.start if saved.theta is None else saved.theta)
    kept = room((plan.rounds - server.skip, job.chains, plan.dim), server.checkpoint.samples, saved.theta is not None)
    rounds: Rounds = jax.tree.map(jnp.asarray, rounds_of(plan))
    keys = chain_keys(jax.random.wrap_key_data(jnp.asarray(job.key)), jnp.arange(job.chains))
    for at in range(saved.rounds, plan.rounds):
        began = time.perf_counter()
        now, number = rounds.at(at), plan.start + at
        round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        scheduled, paid = _whom(server, at)
        found = exchange(_asks(job, at, np.asarray(_broadcast(round_keys, state, now)), round_keys, scheduled))
        if paid and np.any(found.sent != scheduled):
            found = _lost(found)
        if server.ledger is not None and not paid:
            server.ledger.charge(job.run, number, job.loss(at, found.sent)[None], job.noise_name)
        if found.sent.any():
            scale, noise = rescale(job, at, found.sent)
            now, simulated = now._replace(server_noise=noise), job.noise != "devices" and job.lattice is None
            total = job.lattice.noisy(found.total) if job.noise == "channel" and job.lattice else found.total
            signal = jnp.asarray(total, jnp.float32)
            state, finite = _move(round_keys, state, signal, jnp.float32(scale), now, simulated)
            if not bool(finite):
                raise SamplingError(f"A chain left the finite numbers in round {number + 1}.")
        if at >= server.skip:
            kept[at - server.skip] = np.asarray(state)[:, : plan.dim]
            kept.flush()
        _log(server, number, scheduled, found, time.perf_counter() - began, say)
        server.checkpoint.save(_progress(job, at + 1, np.asarray(state)))
        _settle(server.folder)
        if progress is not None:
            progress(at + 1, plan.rounds)


def trace_of(server: Server, posterior: Any = None) -> Trace:
    """The samples of a job that is finished.

    Args:
        posterior: maps the coordinates that chains move in to parameters, where these differ. How often gradients were
            clipped is nan: devices do not tell, as that is about their data and no loss covers it. Nor has a trace the
            key of the chains: who has both can take the noise away.
    """
    plan, saved = server.job.plan, server.checkpoint.load()
    if saved.rounds < plan.rounds or saved.theta is None:
        raise InputError("job", f"{saved.rounds} of {plan.rounds} rounds in {server.folder}", "finished")
    kept = np.load(server.checkpoint.samples, mmap_mode="r").swapaxes(0, 1)
    theta = getattr(posterior, "parameters", np.asarray)(kept)
    unknown = np.full(theta.shape[:2], np.nan, np.float32)
    velocity = None if plan.friction is None else saved.theta[:, plan.dim :]
    return Trace(theta, unknown, np.full(plan.burn_in, np.nan), None, (plan,), velocity)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """What happened in every round, the last account of each."""
    path = folder / LOG
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):  # a line that a crash has cut short
            line = json.loads(text)
            found[line["round"]] = line
    return [found[number] for number in sorted(found)]


def _whom(server: Server, at: int) -> tuple[NDArray[np.bool_], bool]:
    """Those who are asked, by the plan, and whether the round has been paid for: then they are only those who paid."""
    scheduled = np.asarray(server.job.plan.weight[at] > 0)
    number = server.job.plan.start + at
    paid = None if server.ledger is None else server.ledger.paid(server.job.run, number)
    if paid is None:
        return scheduled, False
    return scheduled & (paid > 0), True


def _lost(found: Heard) -> Heard:
    """A round that cannot be repeated as it was: as if nobody had sent."""
    why = "a round that was paid for is only repeated with all its senders"
    others = {int(device): why for device in np.flatnonzero(found.sent)}
    return Heard(np.zeros_like(found.total), np.zeros_like(found.sent), found.absent | others)


def _asks(job: Job, at: int, theta: Any, keys: jax.Array, scheduled: NDArray[np.bool_]) -> list[Ask]:
    plan = job.plan
    received = np.ones(plan.devices) if plan.received is None else plan.received[at]
    batch = None
    if job.batch:
        batch = np.asarray(jax.random.key_data(jax.vmap(lambda key: named(key, "batch"))(keys)))
    return [
        Ask(
            device=int(k),
            round=plan.start + at,
            theta=theta if theta.ndim == 2 else theta[:, k],
            gain=float(job.gain[at, k]),
            known=float(job.known[at, k]),
            arrives=float(job.known[at, k] * received[k]),
            batch=batch,
        )
        for k in np.flatnonzero(scheduled)
    ]


def rescale(job: Job, at: int, sent: NDArray[np.bool_]) -> tuple[float, Any]:
    """The factor on the sum, and the variance of the server's own noise, by who really sent.

    Weights grow as the senders become fewer, and the channel's noise with them; the server then adds less of its own,
    so that all noise together stays what the plan meant it to be, where that is possible.
    """
    plan = job.plan
    planned = float(plan.scale[at])
    scale = planned * (int(plan.active_devices[at]) / int(sent.sum()))
    if not np.any(plan.server_noise):
        return scale, None
    base, kick = float(plan.server_noise[at]), float(plan.kick[at])
    meant = base + plan.noise_power * (kick * planned / plan.gain[at]) ** 2
    there = job.round_noise(at, sent) * (kick * scale / plan.gain[at]) ** 2
    same = scale == planned and job.noise != "devices"
    return scale, jnp.float32(base if same else max(0.0, meant - there))


@jax.jit
def _broadcast(keys: jax.Array, state: jax.Array, now: Rounds) -> jax.Array:
    """What devices hear of where chains are, [chain, m], or [chain, K, m] where each hears something else."""
    return jax.vmap(lambda key, place: heard(named(key, "downlink"), ahead(place, now), now))(keys, state)


@partial(jax.jit, static_argnames=("simulated",))
def _move(keys: jax.Array, state: jax.Array, signal: jax.Array, scale: jax.Array, now: Rounds, simulated: bool) -> Any:
    """The next state of all chains, and whether all are finite; simulated noise is added where no other was."""

    def one(key: jax.Array, state: jax.Array, signal: jax.Array) -> jax.Array:
        received = receive(named(key, "noise"), signal, now) if simulated else signal
        return update(named(key, "server"), state, received, scale[None], now)

    fresh = jax.vmap(one)(keys, state, signal)
    return fresh, jnp.all(jnp.isfinite(fresh))


def _progress(job: Job, rounds: int, state: NDArray[Any]) -> Progress:
    none = np.zeros(0)
    return Progress(0, rounds, state, none, none, state[:, job.plan.dim :])


def _settle(folder: Path) -> None:
    """Have progress on the disk before the next round is paid for, even if the machine fails."""
    with (folder / "progress.npz").open("r+b") as file:
        os.fsync(file.fileno())


def _log(server: Server, number: int, scheduled: NDArray[np.bool_], found: Heard, seconds: float, say: Any) -> None:
    """A line about a round: how many were asked, who of them did not send, and why."""
    absent = {str(device): why for device, why in sorted(found.absent.items())}
    line = {"round": number, "asked": int(scheduled.sum()), "sent": int(found.sent.sum()), "absent": absent}
    with naming_file(server.folder / LOG), (server.folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "seconds": round(seconds, 3)}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if say is not None:
        reasons = "".join(f"; device {device} absent: {why}" for device, why in absent.items())
        say(f"round {number + 1}: {line['sent']} of {line['asked']} sent{reasons}")
