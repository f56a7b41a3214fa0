"""A device: its own data, its own terms and its own ledger; computes, clips and precodes its gradient."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError
from wflmc.federated.terms import Ask, Terms
from wflmc.keys import digest
from wflmc.privacy import Ledger, round_loss
from wflmc.sampling import default_memory

SLACK = 1e-6
"""Relative rounding that a device forgives a request."""


class Device:
    """One device, which answers what its terms allow.

    Args:
        posterior: of this device alone, such as `posterior.device(k)`.
        ledger: its own, for one device; charged before it answers. Losses are counted for whatever has left the device,
            heard or not, so that it may show more than the server's.
        secret: what seeds the device's own noise, known to nobody else.
    """

    def __init__(self, posterior: Any, terms: Terms, ledger: Ledger | None = None, secret: bytes = b"") -> None:
        if posterior.dim != terms.dim:
            raise InputError("data", f"a model of {posterior.dim} parameters", f"one of {terms.dim}, as in the terms")
        if terms.share and not secret:
            raise InputError("secret", None, "given where the device adds noise of its own")
        self.terms, self.ledger, self.secret = terms, ledger, secret
        self._data = posterior.digest
        self._by_example = np.isfinite(terms.example_clip)
        self._ready = posterior.fitted(terms.chains, default_memory() / 4, self._by_example)

    def answer(self, ask: Ask) -> NDArray[np.float32]:
        """x = (α r/|ĥ|) clip(g) of every chain, with its share of the noise where it adds one, [chain, m]."""
        self._check(ask)
        if self.ledger is not None:
            self._pay(self.ledger, ask)
        limit = np.array([self.terms.example_clip], np.float32) if self._by_example else None
        keys = None if ask.batch is None else jax.random.wrap_key_data(jnp.asarray(ask.batch))
        clip, gain = np.array([self.terms.clip], np.float32), jnp.float32(ask.precoder)
        signal = _signal(self._ready, jnp.asarray(ask.theta), gain, clip, limit, keys)
        return np.asarray(signal) + self._noise(ask) if self.terms.share else np.asarray(signal)

    def _check(self, ask: Ask) -> None:
        terms = self.terms
        if ask.device != terms.device or not 0 <= ask.round < terms.rounds:
            given = f"device {ask.device}, round {ask.round}"
            raise InputError("request", given, f"for device {terms.device} and a round below {terms.rounds}")
        if ask.theta.shape != (terms.chains, terms.dim) or ask.theta.dtype != np.float32:
            given = f"{ask.theta.dtype} of shape {ask.theta.shape}"
            raise InputError("theta", given, f"float32 [{terms.chains} chains, {terms.dim} parameters]")
        if not np.all(np.isfinite(ask.theta)):
            raise InputError("theta", "nan or infinite", "finite")
        if not (0 < ask.gain < np.inf and 0 < ask.known < np.inf):
            raise InputError("gain", (ask.gain, ask.known), "finite and above 0")
        if terms.power == np.inf and ask.known != 1:  # which would make it send more than it pays for
            raise InputError("known", ask.known, "1 on an ideal link, where nothing fades")
        if terms.power < np.inf and (ask.precoder * terms.clip) ** 2 > terms.power * (1 + SLACK):
            raise InputError("gain", ask.gain, "within the transmit power of the device")

    def _pay(self, ledger: Ledger, ask: Ask) -> None:
        """Charge a request, in one step with what is refused: other processes of this device may be asked as well.

        The same request again is answered with the same numbers, and costs nothing. Another request for the same round
        is refused where the server draws the noise, as its draws of a round are the same again.
        """
        gain, reach = np.array([ask.gain]), np.array([self.terms.sensitivity])
        loss = self.terms.factor * round_loss(gain, np.ones((1, 1)), reach, self.terms.noise_power)
        name, noise = self._name(ask), "" if self.terms.share else self.terms.run
        try:
            ledger.charge(name, ask.round, loss, noise)
        except InputError as error:
            if error.key != "seed":
                raise
            allowed = "one that has not been answered: two answers under the same noise tell more than they cost"
            raise InputError("request", f"round {ask.round + 1} again", allowed) from None

    def _name(self, ask: Ask) -> str:
        """A name for a request and so for its answer: other data give another, with other noise, that costs again."""
        keys = () if ask.batch is None else (ask.batch,)
        about = (self.terms.run.encode(), self._data.encode())
        return digest(*about, ask.theta, np.array([ask.round, ask.gain, ask.known]), *keys)

    def _noise(self, ask: Ask) -> NDArray[np.float32]:
        """The device's share: another for every request, the same for the same one again."""
        seed = hashlib.sha256(self.secret + self._name(ask).encode()).digest()
        generator = np.random.Generator(np.random.Philox(int.from_bytes(seed)))
        draws = generator.standard_normal(ask.theta.shape)
        return (np.sqrt(self.terms.share) * draws).astype(np.float32)


@jax.jit
def _signal(posterior: Any, theta: jax.Array, gain: jax.Array, clip: Any, limit: Any, keys: Any) -> jax.Array:
    one = jnp.ones(1, theta.dtype)

    def chain(theta: jax.Array, key: Any) -> jax.Array:
        return gain * posterior.clipped_sum(theta, one, clip, key=key, example_clip=limit)[0]

    return jax.vmap(chain, (0, None if keys is None else 0))(theta, keys)
