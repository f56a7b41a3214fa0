r"""Gaussian noise on a lattice, drawn exactly from the operating system's entropy.

Noise in floating point takes few values, and those that can lie under a message tell
neighbours apart (Mironov 2012). Here a signal is rounded to multiples of a step, and
the noise is a discrete Gaussian number of steps: every integer is possible, whatever
the signal, so that low-order bits show nothing. Losses are those of Gaussian noise
(docs/guides/federation.md has the proof):

- Draws are exact, by the rejection sampler of Canonne, Kamath and Steinke (2020),
  Algorithms 2 and 3.
- Rounding moves two signals of $m$ coordinates apart by at most $\sqrt m$ steps. The
  noise is wider by as much.
- With at least $2^{20}$ steps in a standard deviation the discrete Gaussian is Gaussian
  noise that is rounded at random, but for a factor of $1 \pm e^{-310}$ in a
  coordinate's probabilities and $10^{-11}$ of the loss; and so are sums of such draws
  (Kairouz, Liu and Steinke 2021).

Coarser lattices are refused, because this argument does not cover them.
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

MIN_STEPS_PER_DEVIATION = 2.0**20
"""Steps in a standard deviation from which losses are those of Gaussian noise."""
MAX_EXACT_MULTIPLE = 2.0**52
"""Multiples of the step up to this are added in float64 without rounding."""
TAIL_DEVIATIONS = 64
"""Standard deviations that no noise reaches: the probability is exp(−2048)."""
FLOAT32_CHANGE = 2.0**-22
"""What two roundings to float32 move two signals apart, over the larger norm."""
MAX_WIDENING = 0.01
"""The largest fraction by which noise is made wider to pay for rounding."""
DECISION_MARGIN = 2.0**-40
"""Distance from a probability below which a draw is decided in exact arithmetic; far
above the rounding of a probability in float64, some 2⁻⁵⁰."""
WORD_BITS = 64
"""Random bits that are drawn at a time."""


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
        """Return the finest lattice on which sums are exact in float64.

        The noise is wider than `deviation` by what rounding, to float32 and to the
        lattice, can add to the distance of two neighbouring signals: every loss is at
        most that of Gaussian noise of standard deviation `deviation` on signals
        without rounding.

        Args:
            deviation: the standard deviation that the loss was computed for.
            change: the largest distance of neighbouring signals before rounding,
                [...]; 0 where none is sent.
            norm: the largest norm of the same signals, [...]; 0 where they are sent in
                float64, without a rounding to float32.
            total: the largest norm of a sum of signals.
            dim: the number of coordinates m.

        Returns:
            A lattice whose step is a power of two.

        Raises:
            InputError: if the noise would have fewer than 2²⁰ steps in a standard
                deviation, or would have to be wider by more than 1 %.
        """
        largest = total + TAIL_DEVIATIONS * deviation
        step = float(2.0 ** np.ceil(np.log2(largest / MAX_EXACT_MULTIPLE)))
        is_sent = change > 0
        sent_change = change[is_sent]
        rounding = np.sqrt(dim) * step + FLOAT32_CHANGE * norm[is_sent]
        widening = float(np.max(rounding / sent_change, initial=0.0))
        is_coarse = deviation < MIN_STEPS_PER_DEVIATION * step
        if is_coarse or widening > MAX_WIDENING:
            raise InputError(
                "noise",
                f"one of {deviation:.3g} for signals up to {total:.3g}, parts of which "
                f"are {sent_change.min():.3g}",
                "'simulated' where numbers are too far apart to hide the smallest in "
                "the sum",
            )
        return cls(step, int(np.ceil(deviation * (1 + widening) / step)))

    @property
    def variance(self) -> float:
        """The variance of the noise, in the units of the signal."""
        return (self.scale * self.step) ** 2

    def rounded(self, signal: ArrayLike) -> Array:
        """Return the nearest points of the lattice, without noise.

        Every coordinate moves by at most half a step; ties go to even multiples.
        Signals on the lattice are returned as they are.

        Args:
            signal: of any shape.

        Returns:
            Multiples of the step, in the shape of the signal.
        """
        return np.rint(np.asarray(signal, dtype=float) / self.step) * self.step

    def noisy(self, signal: ArrayLike) -> Array:
        """Return the nearest points of the lattice, plus exact discrete Gaussian noise.

        Coordinates have independent noise. It cannot be repeated: its entropy is the
        operating system's, and no seed is kept. The result is private as far as the
        signal and its neighbours keep to the limits that the lattice was fitted to.

        Args:
            signal: of any shape.

        Returns:
            Multiples of the step, in the shape of the signal.
        """
        nearest = self.rounded(signal)
        draws = discrete_gaussian(self.scale, nearest.size)
        return np.asarray(nearest + self.step * draws.reshape(nearest.shape))


def discrete_gaussian(scale: int, count: int) -> Integers:
    r"""Draw independent discrete Gaussian integers, exactly.

    $P(n) \propto \exp(-n^2/(2 \mathrm{scale}^2))$ for all integers $n$ (Canonne, Kamath
    and Steinke 2020, Algorithm 3). A comparison that float64 does not decide is decided
    in exact arithmetic, by further random bits if need be. How long a draw takes
    depends on the draws alone, not on the signal that they hide.

    Args:
        scale: the parameter σ, a positive integer; close to the standard deviation.
        count: how many to draw; 0 gives an empty array.

    Returns:
        The draws, [count].
    """
    draws = np.zeros(0, np.int64)
    while draws.size < count:
        # A quarter to a half of the tries are accepted.
        proposals = _discrete_laplace(scale, 64 + 3 * (count - draws.size))
        accepted = proposals[_accept_gaussian(proposals, scale)]
        draws = np.concatenate([draws, accepted])
    return draws[:count]


def _accept_gaussian(proposals: Integers, scale: int) -> NDArray[np.bool_]:
    """Decide which of discrete Laplace draws are discrete Gaussian ones.

    n is accepted with probability exp(−(|n| − scale)²/(2 scale²)).
    """
    excess = np.abs(proposals) - scale

    def exact_power(index: int) -> Fraction:
        return Fraction(int(excess[index]) ** 2, 2 * scale**2)

    return _below_exp((excess / scale) ** 2 / 2, exact_power)


def _discrete_laplace(scale: int, tries: int) -> Integers:
    """Draw integers with P(n) ∝ exp(−|n|/scale); fewer than were tried (Algorithm 2).

    |n| = remainder + scale · quotient, of which the quotient is geometric.
    """
    unused_bits = np.uint64(WORD_BITS - scale.bit_length())
    remainder = (_words(tries) >> unused_bits).astype(np.int64)
    remainder = remainder[remainder < scale]

    def exact_power(index: int) -> Fraction:
        return Fraction(int(remainder[index]), scale)

    remainder = remainder[_below_exp(remainder / scale, exact_power)]
    size = remainder + scale * _geometric(remainder.size)
    is_negative = _words(size.size) >> np.uint64(WORD_BITS - 1) == 1
    # Zero would come twice as often as it should, as 0 and as −0.
    is_second_zero = is_negative & (size == 0)
    return np.where(is_negative, -size, size)[~is_second_zero]


def _geometric(count: int) -> Integers:
    """Draw integers n ≥ 0 with P(n) ∝ exp(−n)."""
    draws = np.zeros(count, np.int64)
    undecided = np.arange(count)
    while undecided.size:
        goes_on = _below_exp(np.ones(undecided.size), lambda _: Fraction(1))
        undecided = undecided[goes_on]
        draws[undecided] += 1
    return draws


def _below_exp(
    power: Array, exact_power: Callable[[int], Fraction]
) -> NDArray[np.bool_]:
    """Return True with probability exp(−power).

    Args:
        power: of every decision, rounded to float64.
        exact_power: the power of one of them as a fraction, for draws that float64
            does not decide.
    """
    words = _words(power.size)
    uniform = words * 2.0**-WORD_BITS
    probability = np.exp(-power)
    is_below = uniform < probability
    is_close = np.abs(uniform - probability) < DECISION_MARGIN
    for index in np.flatnonzero(is_close):
        bits = int(words[index])
        is_below[index] = _below_exactly(bits, exact_power(int(index)))
    return np.asarray(is_below)


def _below_exactly(bits: int, power: Fraction) -> bool:
    """Decide whether a uniform number that begins with 64 bits is below exp(−power).

    Further bits are drawn as long as those that there are do not decide.
    """
    length = WORD_BITS
    while True:
        context = Context(prec=length // 3 + 30)
        exponent = context.divide(Decimal(-power.numerator), Decimal(power.denominator))
        probability = context.exp(exponent)  # rounded correctly
        bound = context.multiply(probability, Decimal(2**length))
        if not bits - 1 <= bound <= bits + 2:
            return bits < bound
        next_bits = int.from_bytes(token_bytes(WORD_BITS // 8))
        bits = bits << WORD_BITS | next_bits
        length += WORD_BITS


def _words(count: int) -> NDArray[np.uint64]:
    """Draw uniform words of 64 bits."""
    return np.frombuffer(token_bytes(8 * count), np.uint64)
