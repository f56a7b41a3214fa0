"""Scores of predictions on test data: of predicted probabilities, and of numbers."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp, softmax

from wflmc.posterior import GaussianPosterior, Predicts
from wflmc.posterior.inputs import Array, check_data
from wflmc.support.errors import InputError

BINS = 20
"""Of confidence, for the expected calibration error: as many as in figure 8."""
CHUNK_BYTES = 2**27
"""Of an array that is made at a time; larger ones are cut."""
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)
"""In the place of a float32 probability that underflows."""
SUM_TOLERANCE = 1e-3
"""By which the probabilities of a row may fail to add up to 1: float32 rounding."""


class Calibration(NamedTuple):
    """Scores of predicted probabilities, one of each for every chain.

    All have the shape [...] of the leading axes of the probabilities; the last three
    are [..., bins].
    """

    accuracy: Array
    """The fraction of examples whose most probable class is right."""
    ece: Array
    """Expected calibration error: mean gap between confidence and accuracy over
    disjoint bins of equal width."""
    nll: Array
    """Mean of −log p(label)."""
    brier: Array
    """Mean of Σ_c (p_c − 1[label = c])²."""
    confidence: Array
    """Mean confidence in each bin, nan where it is empty."""
    observed: Array
    """Accuracy in each bin, nan where it is empty."""
    bin_fraction: Array
    """The fraction of the examples in each bin."""


def calibration(
    probabilities: ArrayLike, labels: ArrayLike, bins: int = BINS
) -> Calibration:
    """Score predicted probabilities against labels.

    Bins are (j/bins, (j+1)/bins] on [0, 1], disjoint, by the probability of the
    predicted class (Guo et al. 2017); the paper's own code has nested ones, and
    larger values. A probability of 0 for the label gives an infinite `nll`.

    Args:
        probabilities: of every class, [..., n, C]; each row at least 0 and of sum 1.
        labels: whole numbers from 0 to C − 1, [n].
        bins: how many bins of confidence.

    Returns:
        The scores, one of each for every entry of the leading axes.

    Raises:
        InputError: for labels that do not match the probabilities, rows that are no
            probabilities, or less than one bin.

    Examples:
        >>> scores = calibration([[0.9, 0.1], [0.4, 0.6]], [0, 0])
        >>> float(scores.accuracy), round(float(scores.ece), 3)
        (0.5, 0.35)
    """
    p = np.asarray(probabilities, dtype=float)
    classes = np.asarray(labels)
    _check(p, classes, bins)
    of_label = p[..., np.arange(classes.size), classes]
    with np.errstate(divide="ignore"):
        nll = -np.log(of_label)
    is_right = p.argmax(-1) == classes
    return _binned(p, right=is_right, of_label=of_label, nll=nll, bins=bins)


def expected_calibration(
    predicted: Array, truth: Array, bins: int = BINS
) -> Calibration:
    """Score predicted probabilities by their expectation over labels of known law.

    Settings can be compared by this without any labels. Accuracy, `nll` and `brier` are
    expectations; `ece` compares confidence with the expected accuracy in every bin, so
    that it lacks what chance adds with labels. Nothing is checked: the arguments come
    from this package.

    Args:
        predicted: predicted probabilities, [..., n, C], above 0 and of sum 1.
        truth: the probability of every label, [n, C].
        bins: as of `calibration`.

    Returns:
        The expected scores, [...].
    """
    truth_of_rows = np.broadcast_to(truth, predicted.shape)
    predicted_class = predicted.argmax(-1, keepdims=True)
    right = np.take_along_axis(truth_of_rows, predicted_class, axis=-1)
    of_label = np.einsum("...nc,nc->...n", predicted, truth)
    log_score = np.einsum("...nc,nc->...n", np.log(predicted), truth)
    return _binned(
        predicted, right=right[..., 0], of_label=of_label, nll=-log_score, bins=bins
    )


def _binned(
    p: Array, *, right: np.ndarray, of_label: Array, nll: Array, bins: int
) -> Calibration:
    """Return the scores of probabilities p[..., n, C].

    Args:
        p: the probabilities.
        right: how probable it is that the predicted class is right, [..., n].
        of_label: the probability that was predicted for the label, [..., n].
        nll: −log of it, [..., n].
        bins: how many.
    """
    leading = p.shape[:-2]
    count = p.shape[-2]
    confidence = p.max(-1)
    chains = confidence.size // count
    edges = np.arange(bins + 1) / bins
    upper_edge = np.searchsorted(edges, confidence, side="left")
    bin_index = np.clip(upper_edge - 1, 0, bins - 1)
    first_of_chain = bins * np.arange(chains)[:, None]
    flat_index = (bin_index.reshape(-1, count) + first_of_chain).ravel()

    def sum_by_bin(values: np.ndarray) -> Array:
        weights = values.ravel().astype(float)
        total = np.bincount(flat_index, weights, bins * chains)
        return np.asarray(total.astype(float).reshape(*leading, bins))

    counts = sum_by_bin(np.ones_like(confidence))
    confidences = sum_by_bin(confidence)
    rights = sum_by_bin(right)
    gaps = np.abs(confidences - rights)
    # Σ_c (p_c − 1[c = label])² = Σ_c p_c² − 2 p_label + 1
    squares = (p**2).sum(-1) - 2 * of_label + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        return Calibration(
            accuracy=right.mean(-1),
            ece=gaps.sum(-1) / count,
            nll=nll.mean(-1),
            brier=squares.mean(-1),
            confidence=confidences / counts,
            observed=rights / counts,
            bin_fraction=counts / count,
        )


def mean_probabilities(theta: np.ndarray, rows: Array, classes: int) -> Array:
    """Return p(class|u) of a softmax model, averaged over draws.

    Args:
        theta: parameters, [draw, m] with m = C d.
        rows: features u, [n, d], with the constant where the model has an intercept.
        classes: C.

    Returns:
        The mean probabilities, [n, C], in float64.
    """
    total = np.zeros((len(rows), classes))
    for draw in theta:
        weights = draw.reshape(classes, -1).T.astype(float)
        total += softmax(rows @ weights, axis=1)
    return total / len(theta)


def _check(p: Array, labels: np.ndarray, bins: int) -> None:
    """Refuse all but a table of probabilities with a label for each row."""
    if p.ndim < 2 or labels.shape != p.shape[-2:-1] or not labels.size:
        requirement = f"one label for each row of probabilities {p.shape}"
        raise InputError("labels", f"shape {labels.shape}", requirement)
    classes = p.shape[-1]
    is_integer = labels.dtype.kind in "iu"
    if not is_integer or labels.min() < 0 or labels.max() >= classes:
        raise InputError(
            "labels",
            f"{labels.dtype}, or out of range",
            f"whole numbers from 0 to {classes - 1}",
        )
    excess = p.sum(-1) - 1
    has_sum_one = np.abs(excess) < SUM_TOLERANCE
    if not (np.all(p >= 0) and np.all(has_sum_one)):
        raise InputError(
            "probabilities",
            "rows with other sums or negative entries",
            "at least 0 and of sum 1",
        )
    if bins < 1:
        raise InputError("bins", bins, "at least 1")


def reliability(scores: Calibration) -> dict[str, Array]:
    """Return what a reliability diagram shows, over the examples of all chains.

    Args:
        scores: of `calibration`, with any leading axes.

    Returns:
        `confidence` and `observed` accuracy of each bin, nan where it is empty, and
        the `share` of the examples in it; each [bins].
    """
    bins = scores.bin_fraction.shape[-1]
    fractions = scores.bin_fraction.reshape(-1, bins)
    total_fraction = fractions.sum(0)
    is_filled = total_fraction > 0

    def average(values: Array) -> Array:
        weighted = values.reshape(-1, bins) * fractions
        total = np.where(fractions > 0, weighted, 0.0).sum(0)
        means = np.full_like(total_fraction, np.nan)
        means[is_filled] = total[is_filled] / total_fraction[is_filled]
        return means

    return {
        "confidence": average(scores.confidence),
        "observed": average(scores.observed),
        "share": total_fraction / len(fractions),
    }


def predictive_scores(
    posterior: Predicts, theta: np.ndarray, features: ArrayLike, labels: ArrayLike
) -> Calibration:
    """Score each chain's mean prediction over its draws on test data.

    Predictions are float32: a probability that underflows counts as the smallest normal
    number, 1e-38 or 87 nats. Chains are predicted for a few at a time, which bounds
    memory.

    Args:
        posterior: predicts classes.
        theta: draws of the parameters, [chain, draw, m].
        features: of the test examples, [n, ...] as in the training data.
        labels: of the test examples, [n], with values as in the training data.

    Returns:
        The scores of every chain, [chain].

    Raises:
        InputError: for features or labels that do not match the training data.
    """
    classes = posterior.classes_of(labels)
    chains, draws, dim = theta.shape
    table_size = classes.size * len(posterior.class_names)
    bytes_per_chain = 4 * draws * dim + 8 * table_size
    chunk = max(1, CHUNK_BYTES // bytes_per_chain)
    parts = []
    for first in range(0, chains, chunk):
        probabilities = posterior.predict(theta[first : first + chunk], features)
        positive = np.maximum(probabilities, SMALLEST_PROBABILITY)
        parts.append(calibration(positive, classes))
    fields = zip(*parts, strict=True)
    return Calibration(*(np.concatenate(values) for values in fields))


class RegressionScores(NamedTuple):
    """Scores of predicted targets, one of each for every chain, [chain]."""

    rmse: Array
    """Of the chain's mean prediction."""
    nll: Array
    """Mean of −log p(target), where p is the model's density averaged over the chain's
    draws."""


def regression_scores(
    posterior: GaussianPosterior,
    theta: NDArray[np.floating],
    features: ArrayLike,
    target: ArrayLike,
) -> RegressionScores:
    """Score each chain's predictions N(θᵀu, 1), averaged over its draws, on test data.

    Args:
        posterior: a linear regression, whose features have an intercept or not.
        theta: draws of the parameters θ, [chain, draw, m], whatever coordinates chains
            move in.
        features: of the test examples, [n, d], as in the training data.
        target: of the test examples, [n].

    Returns:
        Root mean square error and negative log density of every chain, [chain].

    Raises:
        InputError: for features or targets that are no finite numbers, or do not match.
    """
    rows, observed = check_data(features, target)
    rows = posterior.design_matrix(rows)
    count = len(rows)
    chains, draws, _ = theta.shape
    squares = np.zeros(chains)
    log_densities = np.zeros(chains)
    pieces = -(-8 * draws * count // CHUNK_BYTES)
    row_parts = np.array_split(rows, pieces)
    observed_parts = np.array_split(observed, pieces)
    for u, v in zip(row_parts, observed_parts, strict=True):
        for index, chain in enumerate(theta):
            mean = chain.astype(float) @ u.T
            squares[index] += np.sum((mean.mean(0) - v) ** 2)
            log_density = logsumexp(-0.5 * (mean - v) ** 2, axis=0)
            log_densities[index] += np.sum(log_density)
    normalization = np.log(draws * np.sqrt(2 * np.pi))
    return RegressionScores(
        rmse=np.sqrt(squares / count),
        nll=-(log_densities / count - normalization),
    )
