"""From counted errors of an attack to what it proves: upper bounds on error rates, lower bounds on μ and ε."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]


class Errors(NamedTuple):
    """Wrong guesses of a test between two neighbouring data sets, each tried `trials` times."""

    false_positives: int
    """Trials of − that were taken for +."""
    false_negatives: int
    """Trials of + that were taken for −."""
    trials: int
    """Of each of the two."""

    def upper(self, risk: float) -> tuple[float, float]:
        """Upper bounds on both rates that hold together but for a probability of `risk`, half of it for each."""
        low, high = rate_upper([self.false_positives, self.false_negatives], self.trials, risk / 2).tolist()
        return low, high


def rate_upper(errors: ArrayLike, trials: int, risk: float) -> Array:
    """Clopper and Pearson's upper bound on a rate: too low with a probability of at most `risk`.

    >>> round(float(rate_upper(0, 100, 0.05)), 4)  # the "rule of three"
    0.0295
    """
    seen = np.asarray(errors, dtype=float)
    return np.where(seen >= trials, 1.0, special.betaincinv(seen + 1, np.maximum(trials - seen, 0.5), 1 - risk))


def mu_lower(false_positive: float, false_negative: float) -> float:
    """The least μ of any Gaussian trade-off curve that allows a test with these error rates; 0 if all do."""
    return max(0.0, -float(special.ndtri(false_positive)) - float(special.ndtri(false_negative)))


def epsilon_by_counting(false_positive: float, false_negative: float, delta: float) -> float:
    """The least ε for which an (ε, δ)-private mechanism allows a test with these error rates, whatever its law.

    >>> round(epsilon_by_counting(1e-5, 1e-5, 0.01), 2)
    11.5
    """
    pairs = ((false_positive, false_negative), (false_negative, false_positive))
    return max([0.0, *(float(np.log((1 - delta - one) / other)) for one, other in pairs if one < 1 - delta)])


def largest_mu(trials: int, risk: float) -> float:
    """The largest μ that a test can prove, by making no error in `trials` of each kind."""
    return mu_lower(*Errors(0, 0, trials).upper(risk))


def counting_threshold(mu: float, trials: int, delta: float, risk: float) -> float:
    """Where to cut a statistic N(±μ/2, 1) so that counting alone is expected to prove most.

    The errors that μ leads one to expect decide, not those that are seen.
    """
    cuts = np.linspace(0.0, mu / 2 + 6, 601)
    bounds = [rate_upper(trials * special.ndtr(x), trials, risk / 2) for x in (-cuts - mu / 2, cuts - mu / 2)]
    proven = np.log(np.maximum(1 - delta - bounds[1], 1e-300) / bounds[0])
    return float(cuts[np.argmax(proven)])
