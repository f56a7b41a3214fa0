"""Calibration scores against scikit-learn, a plain loop, and cases with known answers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

import wflmc
from wflmc.evaluation import calibration, reliability
from wflmc.posterior.softmax import synthetic_labels
from wflmc.support.errors import InputError

from ..error_tools import raises_input_error


def random_case(seed, count=500, classes=5):
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.full(classes, 0.4), count)
    return p, generator.integers(0, classes, count)


@pytest.mark.parametrize("seed", range(5))
def test_against_scikit_learn(seed):
    p, y = random_case(seed)
    scores = calibration(p, y)
    assert scores.accuracy == accuracy_score(y, p.argmax(1))
    assert scores.nll == pytest.approx(log_loss(y, p, labels=range(5)), rel=1e-9)
    assert scores.brier == pytest.approx(
        brier_score_loss(y, p, labels=range(5), scale_by_half=False), rel=1e-9
    )
    confidence = p.max(1)
    hit = p.argmax(1) == y
    observed, mean = calibration_curve(hit, confidence, n_bins=20, strategy="uniform")
    held = np.histogram(confidence, np.linspace(0, 1, 21))[0]
    assert scores.ece == pytest.approx(
        np.sum(held[held > 0] * np.abs(observed - mean)) / len(y), rel=1e-9
    )
    full = scores.bin_fraction > 0
    np.testing.assert_allclose(scores.observed[full], observed)
    np.testing.assert_allclose(scores.confidence[full], mean)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 6))
def test_against_a_plain_loop(seed, bins, classes):
    p, y = random_case(seed, 60, classes)
    error = 0.0
    for j in range(bins):
        inside = [i for i in range(60) if j / bins < p[i].max() <= (j + 1) / bins]
        if inside:
            accuracy = np.mean([p[i].argmax() == y[i] for i in inside])
            error += (
                len(inside) / 60 * abs(accuracy - np.mean([p[i].max() for i in inside]))
            )
    scores = calibration(p, y, bins)
    assert scores.ece == pytest.approx(error, abs=1e-12)
    assert 0 <= scores.ece <= 1
    assert scores.bin_fraction.sum() == pytest.approx(1)


def test_known_answers():
    sure_and_right = calibration(np.eye(3), [0, 1, 2])
    assert (
        sure_and_right.accuracy,
        sure_and_right.ece,
        sure_and_right.nll,
        sure_and_right.brier,
    ) == (1, 0, 0, 0)
    sure_and_wrong = calibration(np.eye(3), [1, 2, 0])
    assert (sure_and_wrong.accuracy, sure_and_wrong.ece, sure_and_wrong.brier) == (
        0,
        1,
        2,
    )
    assert np.isinf(sure_and_wrong.nll)
    undecided = calibration(np.full((10, 2), 0.5), [0, 1] * 5)
    assert (undecided.accuracy, undecided.ece, undecided.brier) == (0.5, 0, 0.5)
    # Nested bins, as behind the published figure, would count the first bin's gap twenty times.
    two_bins = calibration([[0.98, 0.02], [0.02, 0.98], [0.6, 0.4]], [0, 0, 1])
    assert two_bins.ece == pytest.approx((2 * abs(0.98 - 0.5) + 0.6) / 3)


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
        for values, expected in zip(together, calibration(p, y), strict=True):
            np.testing.assert_allclose(values[c], expected, rtol=1e-12)
    merged = reliability(together)
    pooled = calibration(np.concatenate(cases), np.tile(y, 3))
    np.testing.assert_allclose(merged["share"], pooled.bin_fraction)
    for name in ("observed", "confidence"):
        np.testing.assert_allclose(merged[name], getattr(pooled, name))


def test_bins_include_their_upper_edge():
    for bins in (10, 20, 49, 100):
        p = np.arange(1, bins + 1) / bins
        p = p[p > 0.5]
        scores = calibration(np.column_stack([p, 1 - p]), np.zeros(p.size, int), bins)
        assert np.flatnonzero(scores.bin_fraction).tolist() == list(
            range(bins - p.size, bins)
        )


def test_scores_of_a_model(tmp_path):
    """Test sets that are not right are refused, and an intercept is the model's own business."""
    X, y = synthetic_labels(jax.random.key(0), 60, 3, 3)
    posterior = wflmc.softmax_regression(jax.random.key(0), 4, X=X, y=y, intercept=True)
    link = wflmc.Link(wflmc.channel.static(1.0))
    privacy = wflmc.Privacy(50, 0.1, 30)
    plan = wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=0.01,
        burn_in=5,
        samples=4,
        initial_w2_sq=1.0,
    )
    trace = wflmc.sample(jax.random.key(0), posterior, plan, 3)
    scores = wflmc.evaluate(trace, posterior, test=(X, y)).scores
    whole = wflmc.evaluate(trace, posterior, test=(X, y.astype(float))).scores
    assert np.array_equal(scores.nll, whole.nll)
    logits = np.einsum(
        "nd,abcd->abnc",
        np.column_stack([X, np.ones(60)]),
        trace.theta.reshape(3, 4, 3, 4).astype(float),
    )
    p = np.exp(logits)
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        scores.nll, -np.log(p.mean(1)[:, np.arange(60), y]).mean(1), rtol=1e-4
    )
    for test in (
        (X, y - 1),
        (X * np.nan, y),
        (X, y + 5),
        (X, y + 0.5),
        (X[:, :2], y),
        (X[:0], y[:0]),
        (X, y[:5]),
        X,
    ):
        with pytest.raises(InputError):
            wflmc.evaluate(trace, posterior, test=test)


@pytest.mark.parametrize("p", [[[0.5, np.nan]], [[2.0, 3.0]], [[-0.5, 1.5]]])
def test_what_is_no_probability(p):
    with raises_input_error("probabilities"):
        calibration(p, [0])


def test_bad_input():
    for labels in ([-1, 1, 2], [0, 1, 3], [0.5, 1, 2]):
        with raises_input_error("labels", "0 to 2"):
            calibration(np.eye(3), labels)
    with raises_input_error("labels", "(2,)", "(3, 3)"):
        calibration(np.eye(3), [0, 1])
    with raises_input_error("bins", value=0):
        calibration(np.eye(3), [0, 1, 2], bins=0)
