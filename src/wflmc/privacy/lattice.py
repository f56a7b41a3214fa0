"""Gaussian noise on a lattice: drawn exactly, from the operating system's entropy, with no trace in low-order bits.

Noise in floating point has few values, and those that can lie under a message tell neighbours apart (Mironov 2012).
Here a signal is rounded to multiples of a step, and the noise is a discrete Gaussian number of steps: every integer is
possible, whatever the signal. Losses are those of Gaussian noise (docs/guides/federation.md has the proof):

- Draws are exact, by the rejection sampler of Canonne, Kamath and Steinke (2020), Algorithms 2 and 3.
- Rounding moves two signals of m coordinates apart by at most √m steps. The noise is wider by as much.
- With at least 2²⁰ steps in a standard deviation the discrete Gaussian is Gaussian noise that is rounded at random, but
  for a factor of 1 ± exp(−310) in a coordinate's probabilities and 10⁻¹¹ of the loss; and so are sums of them (Kairouz,
  Liu and Steinke 2021).
"""

from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from secrets import token_bytes
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import InputError

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

COARSEST = 2.0**20
"""The fewest steps in a standard deviation."""
EXACT = 2.0**52
"""Multiples of the step up to this are added in float64 without rounding."""
TAIL = 64
"""Standard deviations that no noise reaches: the chance is exp(−2048)."""
SINGLE = 2.0**-22
"""What two roundings to float32 move two signals apart, over the largest norm that they have."""
WIDEST = 0.01
"""The largest share by which noise is made wider to pay for rounding."""
MARGIN = 2.0**-40
"""Far above the rounding of a probability in float64 (some 2⁻⁵⁰): closer draws are decided exactly."""


class Lattice(NamedTuple):
    """Multiples of a step, and the standard deviation of the noise on them."""

    step: float
    """A power of two, so that multiples of it are exact."""
    scale: int
    """The standard deviation, in steps."""

    @classmethod
    def fitted(
        cls, deviation: float, change: Array, norm: Array, total: float, dim: int
    ) -> Self:
        """Return the finest lattice on which sums are exact, with noise as costly as Gaussian noise of a deviation.

        Args:
            change: how far neighbours can move a signal before it is rounded, [...]; 0 where none is sent.
            norm: the largest norm of the same signals, [...].
            total: the largest norm of a sum of signals.
            dim: m.
        """
        step = float(2.0 ** np.ceil(np.log2((total + TAIL * deviation) / EXACT)))
        sent = change > 0
        wider = float(
            np.max(
                (np.sqrt(dim) * step + SINGLE * norm[sent]) / change[sent], initial=0.0
            )
        )
        if deviation < COARSEST * step or wider > WIDEST:
            given = f"one of {deviation:.3g} for signals up to {total:.3g}, parts of which are {change[sent].min():.3g}"
            raise InputError(
                "noise",
                given,
                "'simulated' where numbers are too far apart to hide the least in the sum",
            )
        return cls(step, int(np.ceil(deviation * (1 + wider) / step)))

    @property
    def variance(self) -> float:
        """The variance of the noise."""
        return (self.scale * self.step) ** 2

    def rounded(self, signal: ArrayLike) -> Array:
        """Return the nearest point of the lattice."""
        return np.rint(np.asarray(signal, dtype=float) / self.step) * self.step

    def noisy(self, signal: ArrayLike) -> Array:
        """Return the nearest point of the lattice, plus noise."""
        nearest = self.rounded(signal)
        draws = discrete_gaussian(self.scale, nearest.size)
        return np.asarray(nearest + self.step * draws.reshape(nearest.shape))


def discrete_gaussian(scale: int, count: int) -> Integers:
    """Draw independent integers n with probabilities in proportion to exp(−n²/(2 scale²)), exactly."""
    draws = np.zeros(0, np.int64)
    while draws.size < count:
        steps = _discrete_laplace(scale, 64 + 3 * (count - draws.size))
        draws = np.concatenate([draws, steps[_gaussian_among(steps, scale)]])
    return draws[:count]


def _gaussian_among(steps: Integers, scale: int) -> NDArray[np.bool_]:
    """Decide which of discrete Laplace draws are discrete Gaussian ones."""
    beyond = np.abs(steps) - scale
    return _below_exp(
        (beyond / scale) ** 2 / 2, lambda i: Fraction(int(beyond[i]) ** 2, 2 * scale**2)
    )


def _discrete_laplace(scale: int, tries: int) -> Integers:
    """Draw integers with probabilities in proportion to exp(−|n|/scale); fewer than were tried."""
    below = (_words(tries) >> np.uint64(64 - scale.bit_length())).astype(np.int64)
    below = below[below < scale]
    below = below[_below_exp(below / scale, lambda i: Fraction(int(below[i]), scale))]
    wholes = np.zeros(below.size, np.int64)
    undecided = np.arange(below.size)
    while undecided.size:
        undecided = undecided[
            _below_exp(np.ones(undecided.size), lambda i: Fraction(1))
        ]
        wholes[undecided] += 1
    size = below + scale * wholes
    negative = _words(size.size) >> np.uint64(63) == 1
    return np.where(negative, -size, size)[~(negative & (size == 0))]


def _below_exp(power: Array, exact: Callable[[int], Fraction]) -> NDArray[np.bool_]:
    """Return True with probability exp(−power); `exact` gives a power as a fraction where float64 does not decide."""
    words = _words(power.size)
    draws, chance = words * 2.0**-64, np.exp(-power)
    below = draws < chance
    for i in np.flatnonzero(np.abs(draws - chance) < MARGIN):
        below[i] = _below_exactly(int(words[i]), exact(int(i)))
    return np.asarray(below)


def _below_exactly(bits: int, power: Fraction) -> bool:
    """Decide whether a uniform number that begins with these 64 bits is below exp(−power), by more bits if needed."""
    length = 64
    while True:
        context = Context(prec=length // 3 + 30)  # Decimal.exp is rounded correctly
        exponent = context.divide(Decimal(-power.numerator), Decimal(power.denominator))
        bound = context.multiply(context.exp(exponent), Decimal(2**length))
        if not bits - 1 <= bound <= bits + 2:
            return bits < bound
        bits, length = bits << 64 | int.from_bytes(token_bytes(8)), length + 64


def _words(count: int) -> NDArray[np.uint64]:
    """Draw uniform words of 64 bits."""
    return np.frombuffer(token_bytes(8 * count), np.uint64)
