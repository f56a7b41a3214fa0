"""Sums over private data that the server receives once, before the first round of a chain, and what they cost.

All devices send at once, as they do with gradients: the server receives the sum under channel noise. It is a Gaussian
mechanism, whose loss is taken from the same budget.
"""

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.channel import Link, static
from wflmc.privacy import Privacy
from wflmc.privacy.lattice import Lattice
from wflmc.support.keys import digest

Array = NDArray[np.float64]


def ideal_link() -> Link:
    """Return a link that limits nothing: what is received has the noise that privacy asks for, and no more."""
    return Link(static(1.0), snr_db=200.0)


class Air:
    """The channel of a release: gains as devices know them and as they are, what devices are promised and have lost."""

    def __init__(
        self,
        key: jax.Array,
        link: Link,
        privacy: Privacy,
        sizes: NDArray[np.intp],
        uses: int,
        rounds: int,
        settings: Array,
        start: int = 0,
        exact: bool = False,
    ) -> None:
        """Open the channel.

        Args:
            key: seeds the noise, together with all that decides what is sent.
            sizes: N_k, [K].
            uses: channel uses of a round.
            rounds: of the whole release.
            settings: numbers of the release that decide what is sent.
            start: rounds of the link that came before.
            exact: draw noise that protects for real, on a lattice, from the operating system's entropy instead.
        """
        devices = sizes.size
        self.link, self.privacy, self.sizes, self.uses = link, privacy, sizes, uses
        self.losses: list[Array] = []
        self.exact = exact
        off = link.mismatch(start + rounds, devices)
        self.off = np.ones((rounds, devices)) if off is None else off[start:]
        self.known = np.abs(link.gains(start + rounds, devices)[start:]) / self.off
        # Whoever sends something else, on another channel or at another power, has other noise too.
        about = (
            self.known,
            self.off,
            link.snr(devices),
            privacy.budget(devices),
            privacy.unit.encode(),
            settings,
        )
        neighbours = (
            () if privacy.adjacency == "replace" else (privacy.adjacency.encode(),)
        )
        seed = digest(np.asarray(jax.random.key_data(key)), *about, *neighbours)
        self.noise = digest(
            seed.encode()
        )  # ledgers have this name, from which nobody can draw the noise again
        self.generator = np.random.default_rng(int(seed, 16))

    def receive(
        self, rounds: int, sums: Array, reach: float, moved_by: float, share: float
    ) -> tuple[Array, float]:
        """Return devices' sums[K, n] as the server receives them, averaged over all examples, and the noise.

        Args:
            rounds: how many it takes, of `self.uses` channel uses each, in which the n numbers are repeated.
            reach: what one example adds to the length of a sum, so that N_k times it is what full power is made for;
                longer sums are clipped to it.
            moved_by: how far one example, replaced or left empty, moves a sum.
        """
        done = sum(map(len, self.losses))
        at = slice(done, done + rounds)
        limit = self.sizes * reach
        length = np.linalg.norm(sums, axis=1)
        sent = sums * np.minimum(1.0, limit / np.maximum(length, 1e-300))[:, None]
        strength = (
            self.known[at] * np.sqrt(self.link.snr(self.sizes.size) * self.uses) / limit
        )  # over √N0
        moved = 2 * limit
        if self.privacy.unit == "record":
            moved = np.minimum(moved_by, moved)
        elif self.privacy.adjacency == "add-remove":  # a silent device sends nothing
            moved = limit
        # Sums in float64 change by a little more than exact ones: see Sums in
        # docs/explanation/privacy.md.
        moved = moved * (
            1
            + (self.sizes.size + self.sizes.max() + sums.shape[1])
            * self.sizes.sum()
            * 2.0**-52
        )
        loss = (self.link.uncertainty * strength * moved) ** 2 / 2
        allowed = (
            share * self.privacy.budget(self.sizes.size) / rounds
        )  # of a round, which need not know the others
        fraction = np.minimum(1.0, allowed / loss)
        self.losses.append(loss * fraction)
        strength = strength * np.sqrt(fraction)
        signal = (strength * self.off[at]) @ sent
        if self.exact:
            change, total = np.sqrt(2 * self.losses[-1]), strength @ limit
            signal = np.array([
                Lattice.fitted(1.0, one, np.zeros_like(one), float(most), sums.shape[1]).noisy(each)
                for one, most, each in zip(change, total, signal, strict=True)
            ])  # fmt: skip
        else:
            signal = signal + self.generator.standard_normal(signal.shape)
        weight = strength.sum(1)
        total = float(weight @ (strength @ self.sizes))
        return weight @ signal / total, float(np.linalg.norm(weight)) / total


def within(rows: Array, radius: float, real: NDArray[np.bool_]) -> Array:
    """Return rows[K, n, d] no longer than the radius, and zero where there is no example."""
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows * (
        np.minimum(1.0, radius / np.maximum(length, 1e-300)) * real[..., None]
    )
