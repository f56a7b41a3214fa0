"""Sums over devices (docs/explanation/privacy.md, Sums, steps 5 and 7)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.sums.constants import DEVICES_PER_FLOAT32_SUM
from wflmc.sums.lattices import lattice_sum, lattice_sum_of_pairs
from wflmc.sums.pairs import Pair, barrier, plus, times, two_sum
from wflmc.sums.parts import split_axis


class Sum(NamedTuple):
    """A sum over devices before it is rounded to float32.

    Noise has to be added to all of it: `plus_noise` rounds after that (Sums, step 7).
    """

    high: jax.Array
    """The sum, rounded to float32."""
    low: jax.Array | None = None
    """What rounding left out; None where the bound allows for a float32 sum, as of few
    devices that are protected as a whole (Sums, step 5)."""

    @property
    def pair(self) -> Pair:
        """Return the sum as a pair; its low part is zero where there is none.

        So sums of both kinds can be added by the same arithmetic. A low part of zero is
        exact: the sum is then the float32 number itself.
        """
        low = jnp.zeros_like(self.high) if self.low is None else self.low
        return Pair(self.high, low)

    @property
    def rounded(self) -> jax.Array:
        """Return the sum, rounded to float32, without noise.

        It is for those who look at the sum itself, such as tests and audits. What is
        sent must get its noise first, by `plus_noise`: rounding before noise would not
        be covered by the proof of pairs.
        """
        return self.high if self.low is None else self.high + self.low

    @property
    def double(self) -> NDArray[np.float64]:
        """Return the sum in float64, on the host, which holds both parts.

        Devices of a federation transmit this, and the server adds lattice noise to sums
        of it. The host waits for the accelerator.
        """
        high = np.asarray(self.high, np.float64)
        return high if self.low is None else high + np.asarray(self.low, np.float64)

    def scaled(self, factor: jax.Array) -> "Sum":
        """Return the sum times a float32 number, such as the gain α.

        A pair is multiplied as a pair, with a relative error below 2⁻⁴⁵; a float32 sum
        is rounded once more, which its bound includes.

        Args:
            factor: one number, or an array of the sum's shape.
        """
        if self.low is None:
            return Sum(factor * self.high)
        return Sum(*times(factor, self.pair))

    def plus_noise(self, noise: jax.Array) -> jax.Array:
        """Return the float32 number next to sum + noise (Sums, step 7).

        This is the only place where a sum that is sent is rounded. From here on it is
        post-processing of the mechanism that was accounted for.

        Args:
            noise: float32, of the sum's shape.
        """
        if self.low is None:
            return self.high + noise
        noisy = two_sum(self.high, noise)
        return noisy.high + (noisy.low + self.low)


class ClippedSum(NamedTuple):
    """Σ_k w_k g_k min(1, ℓ_k/‖g_k‖) and what it was made of."""

    total: Sum
    """The sum over devices, [m]."""
    norms: jax.Array
    """‖g_k‖ before the device's clipping, [K]. Of a device of few rows that is clipped it
    is the norm that decides, which is larger where rows cancel (Sums, step 6)."""


def zero_sum(like: jax.Array, devices: int) -> Sum:
    """Return zero, to add devices to that are protected as a whole (Sums, step 5).

    Up to 128 devices are added by float32 alone, so that the sum has no low part; more
    are added in groups, whose sums are pairs.

    Args:
        like: an array of the sum's shape and type.
        devices: K, how many are to be added in all.
    """
    zero = jnp.zeros_like(like)
    if devices <= DEVICES_PER_FLOAT32_SUM:
        return Sum(zero)
    return zero_pair_sum(like)


def zero_pair_sum(like: jax.Array) -> Sum:
    """Return zero, to add devices to whose single records are protected (Sums, step 5).

    It is a pair however few devices there are: a record moves the sum by c, and the
    rounding of float32 sums of whole devices, by up to ℓ each, would be more than that.

    Args:
        like: an array of the sum's shape and type.
    """
    return Sum(jnp.zeros_like(like), jnp.zeros_like(like))


def add_devices(total: Sum, terms: jax.Array, axis: int, bound: jax.Array) -> Sum:
    """Add what devices send, where a whole device may change (Sums, step 5).

    Float32 adds up to 128 devices. With more of them in `terms`, their sums are added
    on a lattice; with more in all, such sums are added to a pair.

    Args:
        total: of `zero_sum`.
        terms: float32 [..., devices, ...].
        axis: that of the devices.
        bound: of `signal_bound`, of a shape as of `lattice_sum`.

    Returns:
        The new sum.
    """
    if total.low is None:
        return Sum(total.high + _float32_sum(terms, axis))
    if terms.shape[axis] <= DEVICES_PER_FLOAT32_SUM:
        return Sum(*plus(total.pair, Sum(_float32_sum(terms, axis)).pair))
    axis = axis % terms.ndim
    groups = barrier(split_axis(terms, axis, DEVICES_PER_FLOAT32_SUM).sum(axis + 1))
    group_bound = bound * DEVICES_PER_FLOAT32_SUM
    return Sum(*plus(total.pair, lattice_sum(groups, axis, group_bound)))


def add_on_lattice(total: Sum, terms: jax.Array, axis: int, bound: jax.Array) -> Sum:
    """Add what devices send, where one record of a device may change (Sums, step 5).

    The devices are added on a lattice, the same in any order, and their sum to the pair
    so far. At most 4,096 of them may come at a time: no block of devices whose
    gradients are written has more (`DEVICES_PER_LATTICE`).

    Args:
        total: of `zero_pair_sum`.
        terms: float32 [..., devices, ...].
        axis: that of the devices.
        bound: of `signal_bound`, of a shape as of `lattice_sum`.

    Returns:
        The new sum.
    """
    return Sum(*plus(total.pair, lattice_sum(terms, axis, bound)))


def add_pairs_on_lattice(total: Sum, terms: Pair, axis: int, bound: jax.Array) -> Sum:
    """Add pairs that devices send, where one record of a device may change.

    Devices of many records are clipped in pairs (Sums, step 4), so that what they send
    has a low part, which is added on a lattice of its own.

    Args:
        total: of `zero_pair_sum`.
        terms: pairs [..., devices, ...].
        axis: that of the devices.
        bound: of `signal_bound`, of a shape as of `lattice_sum`.

    Returns:
        The new sum.
    """
    return Sum(*plus(total.pair, lattice_sum_of_pairs(terms, axis, bound)))


def _float32_sum(terms: jax.Array, axis: int) -> jax.Array:
    """Return Σ terms as a matrix product: faster than a sum by XLA on a CPU."""
    ones = jnp.ones(terms.shape[axis], terms.dtype)
    return jnp.tensordot(ones, terms, (0, axis), precision="highest")
