"""Noisy sums over private data that the server receives before the first round.

All devices send at once, as they do with gradients: the server receives the
superposition of their sums under channel noise. Each release is a Gaussian mechanism,
so that its loss adds to that of the gradients and is taken from the same budget
(docs/explanation/privacy.md, "The whitening release").
"""

import secrets
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Link, static
from wflmc.privacy import Privacy
from wflmc.privacy.lattice import Lattice
from wflmc.support.errors import InputError
from wflmc.support.keys import digest

Array = NDArray[np.float64]

IDEAL_SNR_DB = 200.0
"""SNR in dB at which channel noise is negligible beside any noise for privacy."""
FLOAT64_EPSILON = 2.0**-52
"""Twice the relative error of one operation in float64: both neighbours have one."""
CLIPPING_OPERATIONS = 8
"""More than the roundings of a clipped sum, besides those of its squared norm."""
TERM_ERROR = 2.0**-36
"""Relative rounding of the term of one example, and of a loss, that is charged for.

A row of d numbers that is clipped in float64 may be too long by a relative
(d/2 + 4) 2⁻⁵³, which is less than half of this up to d = 2¹⁷.
"""
SMALLEST_NORM = 1e-300
"""In the place of a norm of zero, which is divided by."""


def ideal_link() -> Link:
    """Return a link whose power and noise limit nothing.

    What is received over it has the noise that privacy asks for, and practically no
    more. Tables and plans without a link of their own use it.

    Returns:
        A static channel of gain 1 at an SNR of 200 dB, with perfect knowledge of the
        channel.
    """
    return Link(static(1.0), snr_db=IDEAL_SNR_DB)


class ReceivedMean(NamedTuple):
    """A mean over all examples, as the server receives it.

    The examples of a device count as much as the device's amplitude allows.
    """

    mean: Array
    """Received sums, weighted by round, over the weight of their examples, [n]."""
    noise_std: float
    """The standard deviation of the noise on each of its entries."""


class ReleaseChannel:
    r"""The channel over which one release is sent, and what it has cost so far.

    In round $s$ device $k$ sends its sum at an amplitude $a_{s,k}$, in units of
    $\sqrt{N_0}$, so that a change of the sum by $\Delta$ costs the device the loss
    $(a_{s,k}\Delta)^2/2$. The amplitude is full power or, if that costs more, what
    the budget of the round allows. Without `exact`, noise comes from `key` and
    repeats; it then protects a simulation only.

    Args:
        key: seeds the noise, together with everything that decides what is sent.
        link: the channel.
        privacy: what devices are promised; its unit and adjacency decide how much one
            change moves a sum.
        sizes: the number of examples N_k of each device, [K].
        uses: channel uses of a round, over which a sum is repeated.
        rounds: of the link that the release may take; those before it are skipped.
        settings: numbers of the release that decide what is sent.
        exact: draw noise on a lattice from the operating system's entropy, which
            protects real data, instead of simulating it.
    """

    def __init__(
        self,
        key: jax.Array,
        link: Link,
        privacy: Privacy,
        sizes: NDArray[np.intp],
        *,
        uses: int,
        rounds: range,
        settings: Array,
        exact: bool = False,
    ) -> None:
        devices = sizes.size
        self.link = link
        self.privacy = privacy
        self.sizes = sizes
        self.uses = uses
        self.exact = exact
        self.losses: list[Array] = []
        """The privacy loss of every round and device, [rounds, K] for each sum."""
        self.mismatch = np.ones((len(rounds), devices))
        """|h/ĥ|, how much stronger a device arrives than it intends, [round, K]."""
        mismatch = link.mismatch(rounds.stop, devices)
        if mismatch is not None:
            self.mismatch = mismatch[rounds.start :]
        gains = np.abs(link.gains(rounds.stop, devices)[rounds.start :])
        self.known_gains = gains / self.mismatch
        """|ĥ|, the gains that devices know, [round, K]."""
        # Whoever sends something else, on another channel or at another power, has to
        # have other noise too: equal noise would cancel in a difference.
        facts: list[ArrayLike | bytes] = [
            self.known_gains,
            self.mismatch,
            link.snr(devices),
            privacy.budget(devices),
            privacy.unit.encode(),
            settings,
        ]
        if privacy.adjacency != "replace":
            facts.append(privacy.adjacency.encode())
        seed = digest(np.asarray(jax.random.key_data(key)), *facts)
        self.noise_name = secrets.token_hex(16) if exact else digest(seed.encode())
        """A name for the noise, for ledgers: the noise cannot be drawn from it. Exact
        noise is new in every release, which therefore costs again."""
        self._generator = np.random.default_rng(int(seed, 16))

    def receive(
        self,
        rounds: int,
        sums: Array,
        *,
        reach: float,
        moved_by: float,
        budget_fraction: float,
    ) -> ReceivedMean:
        """Send devices' sums in the next rounds, and pay for them.

        The result is private for every device: a change of its data, as the promise
        defines it, costs no more than the fraction of its budget. What is paid is
        appended to `losses`. The amplitude of a round is public and does not depend on
        the sums. Nothing is charged to a ledger here; callers do that.

        Args:
            rounds: how many rounds the release takes.
            sums: of the examples of each device, [K, n]; longer ones are clipped to
                N_k times `reach`.
            reach: N_k times it is sent at full power: the largest norm that one example
                adds to a sum, or less.
            moved_by: the largest norm by which one example, replaced or left empty,
                moves a sum. Used where the promise is about records. No example adds
                more than the larger of `reach` and `moved_by`.
            budget_fraction: of every device's budget, for all of these rounds.

        Returns:
            The mean over all examples as the server receives it, in which devices that
            arrive more weakly count for less, and its noise.

        Raises:
            InputError: if the rounding of sums alone would take every device's budget;
                or, with `exact`, if a device arrives too weakly to be hidden.
        """
        first = sum(map(len, self.losses))
        block = slice(first, first + rounds)
        devices, entries = sums.shape
        limit = np.asarray(self.sizes * reach, dtype=float)
        norms = np.linalg.norm(sums, axis=1)
        factors = np.minimum(1.0, limit / np.maximum(norms, SMALLEST_NORM))
        sent = sums * factors[:, None]

        root_snr = np.sqrt(self.link.snr(devices) * self.uses)
        full_amplitude = self.known_gains[block] * root_snr / limit
        # Every round may spend the same: it need not know the gains of the others.
        allowed_loss = budget_fraction * self.privacy.budget(devices) / rounds
        longest_term = max(reach, moved_by)
        change = self._largest_change(limit, moved_by, longest_term, entries)
        amplitude, loss = self._pay(full_amplitude, change, limit, allowed_loss)

        self.losses.append(loss)
        arriving = amplitude * self.mismatch[block]
        received = self._add_noise(arriving @ sent, loss, arriving @ limit)

        weight = amplitude.sum(1)
        total_weight = float(weight @ (amplitude @ self.sizes))
        if total_weight == 0:
            raise InputError(
                "epsilon",
                self.privacy.epsilon,
                "larger: the rounding of a sum in float64 would take every budget",
                section="privacy",
            )
        mean = weight @ received / total_weight
        return ReceivedMean(mean, float(np.linalg.norm(weight)) / total_weight)

    def _largest_change(
        self, limit: Array, moved_by: float, longest_term: float, entries: int
    ) -> Array:
        """Return the largest norm by which neighbouring data move a sent sum, [K].

        A sum in float64 changes by a little more than the exact one: both neighbours'
        sums are rounded, and then clipped in float64
        (docs/explanation/privacy.md, "Releases before the first round").

        Args:
            limit: the norm to which sums are clipped, [K].
            moved_by: as of `receive`.
            longest_term: the largest norm of what one example adds to a sum.
            entries: n, the numbers of a sum.
        """
        change = 2 * limit
        if self.privacy.unit == "record":
            change = np.minimum(moved_by, change)
        elif self.privacy.adjacency == "add-remove":  # a silent device sends nothing
            change = limit
        operations = self.sizes + entries + CLIPPING_OPERATIONS
        rounding = operations * FLOAT64_EPSILON * self.sizes * longest_term
        return np.asarray(change * (1 + TERM_ERROR) + rounding)

    def _pay(
        self, full_amplitude: Array, change: Array, limit: Array, allowed_loss: Array
    ) -> tuple[Array, Array]:
        """Return the amplitudes that devices can afford, and what they cost.

        The server receives one rounded sum over devices. Its rounding is relative to
        all that arrives, however weakly a device arrives itself, and is part of every
        device's loss. A device whose allowed loss is less than that is silent: what
        then arrives does not depend on its data.

        Args:
            full_amplitude: at full power, [round, K].
            change: the largest change of a device's sum, [K].
            limit: the largest norm of a device's sum, [K].
            allowed_loss: of a round, [K].

        Returns:
            The amplitudes and the losses, each [round, K].
        """
        arriving_change = self.link.uncertainty * change
        allowed_change = np.sqrt(2 * allowed_loss)
        # No amplitude is larger than without rounding, and so the total is a bound.
        largest_amplitude = np.minimum(full_amplitude, allowed_change / arriving_change)
        total = self.link.uncertainty * largest_amplitude @ limit
        rounding = (limit.size + 1) * FLOAT64_EPSILON * total[:, None]

        affordable_change = np.maximum(allowed_change - rounding, 0.0)
        amplitude = np.minimum(full_amplitude, affordable_change / arriving_change)
        loss = (amplitude * arriving_change + rounding) ** 2 / 2
        # Their own rounding, which `TERM_ERROR` covers, could exceed what is allowed.
        loss = np.minimum(loss, allowed_loss)
        return amplitude, np.where(amplitude > 0, loss, 0.0)

    def _add_noise(self, signal: Array, loss: Array, total: Array) -> Array:
        """Return a signal[round, n] with noise of variance 1.

        Args:
            signal: what arrives, without noise.
            loss: of every round and device, [round, K].
            total: the largest norm of the signal in every round, [round].
        """
        if not self.exact:
            return signal + self._generator.standard_normal(signal.shape)
        changes = np.sqrt(2 * loss)
        received = np.empty_like(signal)
        for index, change in enumerate(changes):
            lattice = Lattice.fitted(
                deviation=1.0,
                change=change,
                norm=np.zeros_like(change),
                total=float(total[index]),
                dim=signal.shape[1],
            )
            received[index] = lattice.noisy(signal[index])
        return received


def clip_rows(rows: Array, radius: float, is_real: NDArray[np.bool_]) -> Array:
    """Return rows that are no longer than a radius, and empty ones as zeros.

    Rows within the ball stay as they are; longer ones are scaled onto it. The
    projection brings no two rows further apart, so that a sum over them moves by at
    most twice the radius when one row is replaced, and by the radius when one is left
    empty.

    Args:
        rows: of all devices, [K, n, d]; padding may hold anything finite.
        radius: the largest Euclidean norm of a row.
        is_real: whether there is an example in a row, [K, n]; other rows become zero.

    Returns:
        The clipped rows, [K, n, d].
    """
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    factors = np.minimum(1.0, radius / np.maximum(norms, SMALLEST_NORM))
    return rows * (factors * is_real[..., None])
