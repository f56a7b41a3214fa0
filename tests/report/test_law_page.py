"""What a page of a run works out itself: the law beside the samples, errors of means, autocorrelation."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy.special import softmax

import wflmc
from wflmc.apps.report.plotly_figures import thin
from wflmc.apps.report.run_figures import histogram_range
from wflmc.evaluation.wasserstein import autocorrelation, compare, laplace_law


def test_laplace_law_is_that_of_the_hessian():
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 3, examples=90, dim=2, classes=3, intercept=True
    ).whitened()
    law = laplace_law(posterior)
    rows = posterior.real_rows(posterior.features)
    labels = posterior.observed[0]

    def gradient(theta):
        """Of the negative log posterior in the parameters, where the prior is N(0, I)."""
        p = (
            softmax(
                rows @ posterior.coordinates.inverse.T @ theta.reshape(3, -1).T, axis=1
            )
            - np.eye(3)[labels]
        )
        return (p.T @ rows @ posterior.coordinates.inverse.T).ravel() + theta

    steps = 1e-5 * np.eye(posterior.dim)
    hessian = (
        np.array(
            [gradient(law.mean + step) - gradient(law.mean - step) for step in steps]
        )
        / 2e-5
    )
    np.testing.assert_allclose(
        law.covariance, np.linalg.inv(hessian), rtol=1e-5, atol=1e-8
    )
    # The mean is the mode, to within a small Newton step.
    assert np.abs(np.linalg.solve(hessian, gradient(law.mean))).max() < 0.05


def test_perfect_samples_have_small_z():
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=3, examples=60, dim=8
    )
    generator = np.random.default_rng(0)
    theta = generator.multivariate_normal(
        posterior.exact.mean, posterior.exact.covariance, size=(40, 25)
    )
    comparison = compare(theta, posterior.exact)
    # The largest of eight draws from a t law of 39 degrees of freedom.
    assert np.abs(comparison.z).max() < 4.5
    np.testing.assert_allclose(
        comparison.deviation / comparison.expected, 1, atol=5 / np.sqrt(2 * 1000)
    )
    shifted = compare(theta + 0.1 * comparison.expected, posterior.exact)
    assert np.mean(shifted.z - comparison.z) == pytest.approx(
        0.1 * np.sqrt(1000), rel=0.3
    )


def test_far_outliers_leave_thehistogram_range():
    generator = np.random.default_rng(0)
    low, high = histogram_range(np.append(generator.standard_normal(1000), [1e6, -1e5]))
    assert -12 < low < -5
    assert 5 < high < 12
    assert histogram_range(np.arange(10.0)) == (0.0, 9.0)


def test_autocorrelation_of_a_known_chain():
    generator = np.random.default_rng(0)
    theta = np.zeros((200, 400))
    for draw in range(1, 400):
        theta[:, draw] = 0.8 * theta[:, draw - 1] + 0.6 * generator.standard_normal(200)
    estimate = autocorrelation(theta[:, 50:], 5)
    # The tolerance is about 3/√(200 · 350/9).
    np.testing.assert_allclose(estimate, 0.8 ** np.arange(6), atol=0.03)


def test_long_curves_are_thinned():
    assert thin(10) == list(range(10))
    indices = thin(10**6)
    assert (indices[0], indices[-1]) == (0, 10**6 - 1)
    assert len(indices) <= 1500
