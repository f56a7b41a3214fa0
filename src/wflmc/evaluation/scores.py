"""How good predictions are: scores of predicted probabilities, and of predicted numbers, on test data."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp, softmax

from wflmc.posterior import GaussianPosterior, Predicts
from wflmc.posterior.inputs import Array, check_data
from wflmc.support.errors import InputError

BINS = 20
CHUNK_BYTES = 2**27
TINY = float(np.finfo(np.float32).tiny)
"""What a probability that underflows counts as."""


class Calibration(NamedTuple):
    """Scores of predicted probabilities, one of each for every chain: [...]; the last three are [..., bins]."""

    accuracy: Array
    ece: Array
    """Expected calibration error: mean gap between confidence and accuracy over disjoint bins of equal width."""
    nll: Array
    """Mean of −log p(label)."""
    brier: Array
    """Mean of Σ_c (p_c − 1[label = c])²."""
    confidence: Array
    """Mean confidence in each bin, nan where it is empty."""
    observed: Array
    """Accuracy in each bin, nan where it is empty."""
    share: Array
    """Share of the examples in each bin."""


def calibration(
    probabilities: ArrayLike, labels: ArrayLike, bins: int = BINS
) -> Calibration:
    """Return scores of probabilities[..., n, C] against labels[n].

    Bins are (j/bins, (j+1)/bins] on [0, 1], by the probability of the predicted class (Guo et al. 2017).
    """
    p, truth = np.asarray(probabilities, dtype=float), np.asarray(labels)
    _check(p, truth, bins)
    of_label = p[..., np.arange(truth.size), truth]
    with np.errstate(divide="ignore"):
        nll = -np.log(of_label)
    return _binned(p, hit=p.argmax(-1) == truth, of_label=of_label, nll=nll, bins=bins)


def expected_calibration(
    predicted: Array, truth: Array, bins: int = BINS
) -> Calibration:
    """Return scores of probabilities, expected over labels whose law is known.

    Args:
        predicted: predicted probabilities, [..., n, C], above 0 and of sum 1.
        truth: the probability of every label, [n, C].
        bins: as of `calibration`.
    """
    of_predicted = np.broadcast_to(truth, predicted.shape)
    best = predicted.argmax(-1)[..., None]
    return _binned(
        predicted,
        hit=np.take_along_axis(of_predicted, best, axis=-1)[..., 0],
        of_label=np.einsum("...nc,nc->...n", predicted, truth),
        nll=-np.einsum("...nc,nc->...n", np.log(predicted), truth),
        bins=bins,
    )


def _binned(
    p: Array, *, hit: np.ndarray, of_label: Array, nll: Array, bins: int
) -> Calibration:
    """Return the scores of probabilities p[..., n, C].

    Args:
        p: the probabilities.
        hit: how probable it is that the predicted class is right, [..., n].
        of_label: the probability that was predicted for the label, [..., n].
        nll: −log of it, [..., n].
        bins: how many.
    """
    front, count = p.shape[:-2], p.shape[-2]
    top = p.max(-1)
    bin_of = np.clip(
        np.searchsorted(np.arange(bins + 1) / bins, top, side="left") - 1, 0, bins - 1
    )
    place = bin_of.reshape(-1, count) + bins * np.arange(top.size // count)[:, None]

    def per_bin(values: np.ndarray) -> Array:
        total = np.bincount(
            place.ravel(), values.ravel().astype(float), bins * len(place)
        ).astype(float)
        return np.asarray(total.reshape(*front, bins))

    held, sure, right = per_bin(np.ones_like(top)), per_bin(top), per_bin(hit)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Calibration(
            accuracy=hit.mean(-1),
            ece=np.abs(sure - right).sum(-1) / count,
            nll=nll.mean(-1),
            brier=((p**2).sum(-1) - 2 * of_label + 1).mean(
                -1
            ),  # Σ_c (p_c − 1[c])² = Σ_c p_c² − 2 p_label + 1
            confidence=sure / held,
            observed=right / held,
            share=held / count,
        )


def mean_probabilities(theta: np.ndarray, rows: Array, classes: int) -> Array:
    """Return p(class|u) of a softmax model, averaged over draws: theta[draw, m], rows u[n, d] -> [n, C]."""
    total = np.zeros((len(rows), classes))
    for one in theta:
        total += softmax(rows @ one.reshape(classes, -1).T.astype(float), axis=1)
    return total / len(theta)


def _check(p: Array, truth: np.ndarray, bins: int) -> None:
    """Refuse all but a table of probabilities with a label for each row."""
    if p.ndim < 2 or truth.shape != p.shape[-2:-1] or not truth.size:
        raise InputError(
            "labels",
            f"shape {truth.shape}",
            f"one label for each row of probabilities {p.shape}",
        )
    if truth.dtype.kind not in "iu" or truth.min() < 0 or truth.max() >= p.shape[-1]:
        raise InputError(
            "labels",
            f"{truth.dtype}, or out of range",
            f"whole numbers from 0 to {p.shape[-1] - 1}",
        )
    if not (np.all(p >= 0) and np.all(np.abs(p.sum(-1) - 1) < 1e-3)):
        raise InputError(
            "probabilities",
            "rows with other sums or negative entries",
            "at least 0 and of sum 1",
        )
    if bins < 1:
        raise InputError("bins", bins, "at least 1")


def reliability(scores: Calibration) -> dict[str, Array]:
    """Return confidence, observed accuracy and share of examples per bin over all chains; nan where a bin is empty."""
    share = scores.share.reshape(-1, scores.share.shape[-1])
    held = share.sum(0)
    found = {"confidence": scores.confidence, "observed": scores.observed}
    for name, values in found.items():
        total = np.where(share > 0, values.reshape(share.shape) * share, 0.0).sum(0)
        found[name] = np.divide(
            total, held, out=np.full_like(held, np.nan), where=held > 0
        )
    return {**found, "share": held / len(share)}


def predictive_scores(
    posterior: Predicts, theta: np.ndarray, features: ArrayLike, labels: ArrayLike
) -> Calibration:
    """Return scores of each chain's mean prediction over its draws, theta[chain, draw, m], on test data.

    Labels are as in the training data. Predictions are float32: a probability that underflows counts as the smallest
    there is (1e-38, 87 nats).
    """
    truth = posterior.classes_of(labels)
    held = 4 * theta.shape[1] * theta.shape[2] + 8 * truth.size * len(
        posterior.class_names
    )
    at_once = max(1, CHUNK_BYTES // held)
    parts = [
        calibration(
            np.maximum(posterior.predict(theta[at : at + at_once], features), TINY),
            truth,
        )
        for at in range(0, len(theta), at_once)
    ]
    return Calibration(*(np.concatenate(values) for values in zip(*parts, strict=True)))


class RegressionScores(NamedTuple):
    """Scores of predicted targets, one of each for every chain."""

    rmse: Array
    """Of the chain's mean prediction."""
    nll: Array
    """Mean of −log p(target), where p is the model's density averaged over the chain's draws."""


def regression_scores(
    posterior: GaussianPosterior,
    theta: NDArray[np.floating],
    features: ArrayLike,
    target: ArrayLike,
) -> RegressionScores:
    """Return scores of each chain's predictions N(θᵀu, 1), averaged over its draws theta[chain, draw, m]."""
    rows, observed = check_data(features, target)
    rows = posterior.design_matrix(rows)
    chains, draws, _ = theta.shape
    squares, densities = np.zeros(chains), np.zeros(chains)
    pieces = -(-8 * draws * len(rows) // CHUNK_BYTES)
    for u, v in zip(
        np.array_split(rows, pieces), np.array_split(observed, pieces), strict=True
    ):
        for c, draw in enumerate(theta):
            mean = draw.astype(float) @ u.T
            squares[c] += np.sum((mean.mean(0) - v) ** 2)
            densities[c] += np.sum(logsumexp(-0.5 * (mean - v) ** 2, axis=0))
    rmse, log_density = (
        np.sqrt(squares / len(rows)),
        densities / len(rows) - np.log(draws * np.sqrt(2 * np.pi)),
    )
    return RegressionScores(rmse, -log_density)
