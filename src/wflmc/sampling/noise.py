"""Where the noise in a received signal comes from, for rounds that run on the host.

Compiled rounds draw theirs in `wflmc.sampling.kernel.receive`, from the same keys as
`ChannelNoise`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.privacy.lattice import Lattice
from wflmc.sampling.kernel import KernelRounds, receive
from wflmc.sampling.starts import compiled_round_keys
from wflmc.sums.devices import Sum
from wflmc.support.keys import named

Signal = NDArray[np.floating]


class NoiseSource(Protocol):
    """From the index of a round and its signal[chain, m] to y[chain, m]."""

    def __call__(self, round_index: int, signal: Signal) -> jax.Array | Signal:
        """Return what the server receives in a round.

        Args:
            round_index: index of the round in the plan, from 0.
            signal: the superposition of what devices have transmitted, [chain, m].

        Returns:
            y[chain, m], the signal with its noise.
        """


def add_no_noise(round_index: int, signal: Signal) -> Signal:
    """Return the signal as it is: the noise is in what devices have sent.

    That is so with distributed noise, where every device adds a K-th of the noise to
    its message, and the server sees each message with that part alone.

    Args:
        round_index: index of the round in the plan.
        signal: what has reached the server, [chain, m].
    """
    return signal


@dataclass(frozen=True, eq=False)
class LatticeNoise:
    """Exact noise on a lattice, from the operating system's entropy: it protects.

    It cannot be repeated: a second call for the same round draws anew.
    """

    lattice: Callable[[int], Lattice]
    """The lattice of a round, by its index."""

    def __call__(self, round_index: int, signal: Signal) -> Signal:
        """Return the nearest point of the round's lattice, plus discrete noise.

        The noise comes from the operating system's entropy; a second call for the same
        round returns another value, and both together reveal more than was charged.

        Args:
            round_index: index of the round in the plan.
            signal: the clipped sum, [chain, m].
        """
        return self.lattice(round_index).noisy(signal)


@dataclass(frozen=True, eq=False)
class ChannelNoise:
    """Float32 noise from keys, as that of `wflmc.sample`: the same again for one key.

    It offers no protection against anyone who knows the key.
    """

    keys: jax.Array
    """Of the chains, [chain]."""
    rounds: KernelRounds
    first_number: int
    """The number of the plan's first round, which keys are folded by."""

    def __call__(self, round_index: int, signal: Signal) -> jax.Array:
        """Return y = signal + z, z ~ N(0, N0 I).

        The keys are folded by the number of the round, so that a plan that continues
        another one draws fresh noise.

        Args:
            round_index: index of the round in the plan.
            signal: what devices have transmitted, [chain, m]; taken as float32.
        """
        keys = compiled_round_keys(self.keys, self.first_number + round_index)
        float32_signal = jnp.asarray(signal, jnp.float32)
        return _receive(keys, float32_signal, self.rounds[round_index])


@jax.jit
def _receive(
    keys: jax.Array,
    signal: jax.Array,
    current_round: KernelRounds,
) -> jax.Array:
    """Return y[chain, m] of all chains."""

    def receive_chain(key: jax.Array, signal: jax.Array) -> jax.Array:
        return receive(named(key, "noise"), Sum(signal), current_round)

    return jax.vmap(receive_chain)(keys, signal)
