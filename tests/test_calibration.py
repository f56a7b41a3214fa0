"""Calibration scores against scikit-learn, a plain loop, and cases with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from wflmc.errors import InputError
from wflmc.evaluation import calibration, reliability


def random_case(seed, count=500, classes=5):
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.full(classes, 0.4), count)
    return p, generator.integers(0, classes, count)


@pytest.mark.parametrize("seed", range(5))
def test_against_scikit_learn(seed):
    p, y = random_case(seed)
    found = calibration(p, y)
    assert found.accuracy == accuracy_score(y, p.argmax(1))
    assert found.nll == pytest.approx(log_loss(y, p, labels=range(5)), rel=1e-9)
    assert found.brier == pytest.approx(brier_score_loss(y, p, labels=range(5), scale_by_half=False), rel=1e-9)
    confidence, hit = p.max(1), p.argmax(1) == y
    observed, mean = calibration_curve(hit, confidence, n_bins=20, strategy="uniform")
    held = np.histogram(confidence, np.linspace(0, 1, 21))[0]
    assert found.ece == pytest.approx(np.sum(held[held > 0] * np.abs(observed - mean)) / len(y), rel=1e-9)
    full = found.share > 0
    np.testing.assert_allclose(found.observed[full], observed)
    np.testing.assert_allclose(found.confidence[full], mean)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 6))
def test_against_a_plain_loop(seed, bins, classes):
    p, y = random_case(seed, 60, classes)
    error = 0.0
    for j in range(bins):
        inside = [i for i in range(60) if j / bins < p[i].max() <= (j + 1) / bins]
        if inside:
            accuracy = np.mean([p[i].argmax() == y[i] for i in inside])
            error += len(inside) / 60 * abs(accuracy - np.mean([p[i].max() for i in inside]))
    found = calibration(p, y, bins)
    assert found.ece == pytest.approx(error, abs=1e-12)
    assert 0 <= found.ece <= 1
    assert found.share.sum() == pytest.approx(1)


def test_known_answers():
    sure_and_right = calibration(np.eye(3), [0, 1, 2])
    assert (sure_and_right.accuracy, sure_and_right.ece, sure_and_right.nll, sure_and_right.brier) == (1, 0, 0, 0)
    sure_and_wrong = calibration(np.eye(3), [1, 2, 0])
    assert (sure_and_wrong.accuracy, sure_and_wrong.ece, sure_and_wrong.brier) == (0, 1, 2)
    assert np.isinf(sure_and_wrong.nll)
    undecided = calibration(np.full((10, 2), 0.5), [0, 1] * 5)
    assert (undecided.accuracy, undecided.ece, undecided.brier) == (0.5, 0, 0.5)
    # Nested bins, as behind the published figure, would count the first bin's gap twenty times.
    apart = calibration([[0.98, 0.02], [0.02, 0.98], [0.6, 0.4]], [0, 0, 1])
    assert apart.ece == pytest.approx((2 * abs(0.98 - 0.5) + 0.6) / 3)


def test_labels_drawn_from_the_probabilities_are_calibrated():
    p, _ = random_case(0, 200_000)
    y = (p.cumsum(1) < np.random.default_rng(1).random((200_000, 1))).sum(1)
    assert calibration(p, y).ece < 0.005
    assert calibration(p**2 / (p**2).sum(1, keepdims=True), y).ece > 0.05


def test_chains_at_once_and_reliability():
    cases = [random_case(seed)[0] for seed in range(3)]
    y = random_case(0)[1]
    together = calibration(np.stack(cases), y)
    for c, p in enumerate(cases):
        for found, wanted in zip(together, calibration(p, y), strict=True):
            np.testing.assert_allclose(found[c], wanted, rtol=1e-12)
    merged, pooled = reliability(together), calibration(np.concatenate(cases), np.tile(y, 3))
    np.testing.assert_allclose(merged.share, pooled.share)
    np.testing.assert_allclose(merged.observed, pooled.observed)
    np.testing.assert_allclose(merged.confidence, pooled.confidence)


def test_bad_input():
    with pytest.raises(InputError, match="one label for each row"):
        calibration(np.eye(3), [0, 1])
    with pytest.raises(InputError, match="bins"):
        calibration(np.eye(3), [0, 1, 2], bins=0)
