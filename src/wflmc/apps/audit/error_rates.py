"""What the error rates of a test prove of a mechanism's privacy."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

CUT_GRID_SIZE = 601
"""Thresholds that `counting_threshold` compares."""
CUT_MARGIN = 6.0
"""How far beyond μ/2 the largest of them is, in standard deviations of the statistic: a
normal variable is further out with a probability of 1e-9."""
MIN_DETECTION = 1e-300
"""Stands for what is not positive where thresholds are compared by a quotient."""


def rate_upper(errors: ArrayLike, trials: int, risk: float) -> NDArray[np.float64]:
    """Return Clopper and Pearson's upper bound on a rate.

    It is the (1 − risk) quantile of Beta(e + 1, n − e) for e errors in n trials, and 1
    if all trials are errors. The bound is too low with a probability of at most `risk`,
    whatever the rate.

    Args:
        errors: numbers of errors, of any shape.
        trials: number of trials, of which these are the errors.
        risk: probability to be wrong, of each bound.

    Returns:
        Bounds of the shape of `errors`.

    >>> round(float(rate_upper(0, 100, 0.05)), 4)  # the "rule of three"
    0.0295
    """
    error_counts = np.asarray(errors, dtype=float)
    successes = np.maximum(trials - error_counts, 0.5)
    bound = special.betaincinv(error_counts + 1, successes, 1 - risk)
    return np.where(error_counts >= trials, 1.0, bound)


def mu_lower(false_positive: float, false_negative: float) -> float:
    """Return the least μ of a Gaussian trade-off curve that allows such error rates.

    No test of N(μ, 1) against N(0, 1) has rates with Φ⁻¹(1 − α) + Φ⁻¹(1 − β) > μ, so
    that the left-hand side bounds μ from below. It is a proof only for mechanisms whose
    trade-off curve is Gaussian, as that of a plan is claimed to be.

    Args:
        false_positive: rate α at which − is taken for +.
        false_negative: rate β at which + is taken for −.

    Returns:
        The bound; 0 where even equal distributions allow these rates.
    """
    false_positive_score = float(special.ndtri(false_positive))
    false_negative_score = float(special.ndtri(false_negative))
    return max(0.0, -false_positive_score - false_negative_score)


def epsilon_by_counting(
    false_positive: float,
    false_negative: float,
    delta: float,
) -> float:
    """Return the least ε of an (ε, δ)-private mechanism that allows such error rates.

    For all tests of such a mechanism 1 − δ − α ≤ e^ε β, and the same with the rates
    exchanged; no assumption on the law of its output is needed. With n trials of each
    kind it cannot prove much more than log n.

    Args:
        false_positive: rate α at which − is taken for +.
        false_negative: rate β at which + is taken for −.
        delta: δ.

    Returns:
        The bound; 0 where the rates prove nothing.

    >>> round(epsilon_by_counting(1e-5, 1e-5, 0.01), 2)
    11.5
    """
    bounds = [0.0]
    if false_positive < 1 - delta:
        bounds.append(float(np.log((1 - delta - false_positive) / false_negative)))
    if false_negative < 1 - delta:
        bounds.append(float(np.log((1 - delta - false_negative) / false_positive)))
    return max(bounds)


def largest_mu(trials: int, risk: float) -> float:
    """Return the largest μ that a test can prove, by making no error at all.

    Plans may lose far more than so many trials can show; attacks therefore choose a
    part of the rounds whose claimed μ is below this.

    Args:
        trials: of each data set.
        risk: probability to be wrong, half of it for each of the two error rates.
    """
    false_positive, false_negative = rate_upper([0, 0], trials, risk / 2)
    return mu_lower(false_positive, false_negative)


def counting_threshold(mu: float, trials: int, delta: float, risk: float) -> float:
    """Return the threshold at which counting is expected to prove the largest ε.

    The statistic is N(±μ/2, 1). Candidates lie between 0 and μ/2 + 6; the errors that μ
    leads one to expect decide among them, not those that are seen, so that the choice
    costs no confidence.

    Args:
        mu: distance of the means.
        trials: of each data set.
        delta: δ at which ε is stated.
        risk: probability to be wrong, half of it for each of the two error rates.

    Returns:
        The threshold above which a test decides for +.
    """
    cuts = np.linspace(0.0, mu / 2 + CUT_MARGIN, CUT_GRID_SIZE)
    false_positive_rate = special.ndtr(-cuts - mu / 2)
    false_negative_rate = special.ndtr(cuts - mu / 2)
    false_positives = trials * false_positive_rate
    false_negatives = trials * false_negative_rate
    false_positive_bound = rate_upper(false_positives, trials, risk / 2)
    false_negative_bound = rate_upper(false_negatives, trials, risk / 2)
    detection = np.maximum(1 - delta - false_negative_bound, MIN_DETECTION)
    best = np.argmax(detection / false_positive_bound)
    return float(cuts[best])
