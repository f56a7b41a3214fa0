"""A device: its own data, its own terms and its own ledger; computes, clips and precodes its gradient."""

from __future__ import annotations

import os
import secrets
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError, OverspendError, without_data
from wflmc.federated.messages import Ask, Terms
from wflmc.keys import digest
from wflmc.posterior.summation import Sum, as_pair
from wflmc.privacy import Ledger, round_loss
from wflmc.sampling import default_memory
from wflmc.storage import fcntl, replacing


@without_data
class Answer(NamedTuple):
    """What a device has been asked and has answered."""

    request: str
    """A name for what was asked."""
    charge: str
    """Under which name the ledger has it; every answer that is drawn anew has one of its own."""
    signal: NDArray[np.float32]
    """x, [chain, m]."""


class Answers:
    """The last answer, in memory or in a file that only its owner reads, which is on the disk before it is sent.

    Whoever is between `load` and `save` is alone there, among all processes that keep the same file.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._last: Answer | None = None
        self._lock = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads and processes out."""
        with self._lock:
            if self.path is None:
                yield
                return
            with self.path.with_suffix(".lock").open("ab") as file:
                if fcntl is not None:  # elsewhere a device is one process
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield

    def load(self) -> Answer | None:
        """The last answer, if there is one."""
        if self.path is None or not self.path.exists():
            return self._last
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                return Answer(str(saved["request"]), str(saved["charge"]), saved["signal"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise InputError("answer", str(self.path), "as wflmc wrote it, or removed: the next is new") from None

    def save(self, answer: Answer) -> None:
        """Take the place of the answer before."""
        self._last = answer
        if self.path is None:
            return
        with replacing(self.path) as file:
            os.chmod(file.name, 0o600)
            content: dict[str, Any] = answer._asdict()
            np.savez(file, allow_pickle=False, **content)


LARGEST = 1e9
"""The largest parameter that a device answers for, and the largest number that its data may have: float32 holds the
gradients of linear and softmax models then, whatever the data."""
SLACK = 1e-6
"""Relative rounding that a device forgives a request."""


class Device:
    """One device, which answers what its terms allow.

    Args:
        posterior: of this device alone, such as `posterior.device(k)`.
        ledger: its own, for one device; charged before it answers. Losses are counted for whatever has left the device,
            heard or not, so that it may show more than the server's. The last answer is kept beside its file.
        secret: salts the names that files have for what was asked, known to nobody else.
    """

    def __init__(self, posterior: Any, terms: Terms, ledger: Ledger | None = None, secret: bytes = b"") -> None:
        if posterior.dim != terms.dim:
            raise InputError("data", f"a model of {posterior.dim} parameters", f"one of {terms.dim}, as in the terms")
        for name in ("features", "target"):
            if np.any(np.abs(getattr(posterior, name, 0.0)) > LARGEST):
                raise InputError("data", f"numbers above {LARGEST:g}", "scaled to moderate size")
        self.terms, self.ledger, self.secret = terms, ledger, secret
        path = None if ledger is None or ledger.path is None else ledger.path.with_name("answer.npz")
        self._answers = Answers(path)
        self._data = posterior.digest
        self._by_example = np.isfinite(terms.example_clip)
        limits = np.array([terms.clip]), np.array([terms.example_clip])
        finite = np.isfinite(terms.sensitivity)
        own = posterior.margin(*limits) * min(terms.clip, terms.example_clip) / terms.sensitivity if finite else 0.0
        least = 1 + max(terms.rounding, own)
        self._clip, self._limit = (np.float32(limit / least) for limit in limits)
        self._ready = posterior.on_accelerator(terms.chains, default_memory() / 4, self._by_example)

    def answer(self, ask: Ask) -> NDArray[np.float32]:
        """x = (α r/|ĥ|) clip(g) of every chain, with its share of the noise where it adds one, [chain, m].

        An answer is kept before it is paid for and sent: the same request again is answered with the same numbers, and
        costs nothing. Any other is a new draw, which costs.
        """
        self._check(ask)
        request = self._name(ask)
        if self.terms.simulated:
            if self.ledger is not None:
                self._pay(self.ledger, ask, request)
            return self._drawn(ask)
        with self._answers.alone():
            answer = before = self._answers.load()
            if answer is None or answer.request != request:
                answer = Answer(request, secrets.token_hex(16), self._drawn(ask))
                self._answers.save(answer)
            try:
                if self.ledger is not None:
                    self._pay(self.ledger, ask, answer.charge)
            except (InputError, OverspendError):
                if before is not None:  # a request that is refused does not take the place of an answer that was paid
                    self._answers.save(before)
                raise
        return answer.signal

    def _drawn(self, ask: Ask) -> NDArray[np.float32]:
        """A new answer."""
        limit = self._limit if self._by_example else None
        keys = None if ask.batch is None else jax.random.wrap_key_data(jnp.asarray(ask.batch))
        gradient = _gradient(self._ready, jnp.asarray(ask.theta), self._clip, limit, keys).double
        # That a gradient is not finite must not show; zero is within the clip.
        signal = self._precoder(ask) * np.where(np.isfinite(gradient), gradient, 0.0)
        return (self.terms.lattice.noisy(signal) if self.terms.share else signal).astype(np.float32)

    def _precoder(self, ask: Ask) -> float:
        """α r/|ĥ|, by what the device itself knows of its channel."""
        return ask.gain / self.terms.known[ask.round - self.terms.start]

    def _check(self, ask: Ask) -> None:
        terms = self.terms
        at = ask.round - terms.start
        if ask.device != terms.device or not 0 <= at < len(terms.gain):
            given = f"device {ask.device}, round {ask.round}"
            allowed = f"for device {terms.device} and a round from {terms.start} to {terms.rounds - 1}"
            raise InputError("request", given, allowed)
        if ask.theta.shape != (terms.chains, terms.dim) or ask.theta.dtype != np.float32:
            given = f"{ask.theta.dtype} of shape {ask.theta.shape}"
            raise InputError("theta", given, f"float32 [{terms.chains} chains, {terms.dim} parameters]")
        if not np.all(np.abs(ask.theta) <= LARGEST):  # gradients might overflow, and whether they do is private
            raise InputError("theta", "nan, infinite or too large", f"at most {LARGEST:g} everywhere")
        if not (0 < ask.gain < np.inf and 0 < ask.known < np.inf):
            raise InputError("gain", (ask.gain, ask.known), "finite and above 0")
        if not abs(ask.known / terms.known[at] - 1) <= SLACK:
            allowed = f"{terms.known[at]:.6g}, what the device itself knows of its channel in round {ask.round + 1}"
            raise InputError("known", ask.known, allowed)
        if ask.gain > terms.gain[at] * (1 + SLACK):
            raise InputError("gain", ask.gain, f"at most {terms.gain[at]:.6g}, as agreed for round {ask.round + 1}")
        if terms.power < np.inf and (self._precoder(ask) * terms.clip) ** 2 > terms.power * (1 + SLACK):
            raise InputError("gain", ask.gain, "within the transmit power of the device")

    def _pay(self, ledger: Ledger, ask: Ask, name: str) -> None:
        """Charge an answer, by what is sent and by what the device knows of its channel.

        Another one for the same round is refused where the server draws the noise, which may be the same again.
        """
        arrives = self._precoder(ask) * self.terms.known[ask.round - self.terms.start]
        gain, reach = np.array([arrives]), np.array([self.terms.sensitivity])
        loss = self.terms.factor * round_loss(gain, np.ones((1, 1)), reach, self.terms.noise_power)
        noise = "" if self.terms.share else self.terms.run
        try:
            ledger.charge(name, ask.round, loss, noise)
        except InputError as error:
            if error.key != "seed":
                raise
            allowed = "one that has not been answered: two answers under the same noise tell more than they cost"
            raise InputError("request", f"round {ask.round + 1} again", allowed) from None

    def _name(self, ask: Ask) -> str:
        """A name for a request to this device: other data give another, with other noise, that costs again."""
        keys = () if ask.batch is None else (ask.batch,)
        about = (self.secret, self.terms.run.encode(), self._data.encode())
        return digest(*about, ask.theta, np.array([ask.round, ask.gain, ask.known]), *keys)


@jax.jit
def _gradient(posterior: Any, theta: jax.Array, clip: Any, limit: Any, keys: Any) -> Sum:
    one = jnp.ones(1, theta.dtype)

    def chain(theta: jax.Array, key: Any) -> Sum:
        return as_pair(posterior.unrounded_sum(theta, one, clip, key=key, example_clip=limit)[0])

    return jax.vmap(chain, (0, None if keys is None else 0))(theta, keys)
