"""The example scripts at small counts.

They agree with NUTS, and docs/results/examples.md is right about their calibration.
"""

import sys

import numpy as np
import pytest

import wflmc

from ..conftest import FULL, count
from ..example_tools import load, z_of_difference, z_scores

pytest.importorskip("sklearn")
LIMIT = 4.5
"""Largest |z| allowed, over some fifty parameters."""


@pytest.fixture(scope="module")
def logistic():
    example = load("logistic")
    train, test = example.load()
    return example, example.make_posterior(train), train, test


@pytest.fixture(scope="module")
def network():
    example = load("network")
    train, test = example.load()
    return example, example.make_posterior(train), train, test


def agrees(theta, known):
    for z in z_scores(theta, known):
        assert np.abs(z).max() < LIMIT, z


@pytest.mark.skipif(not FULL, reason="four seconds of NUTS: make test-full runs it")
def test_logistic_regression_agrees_with_nuts(logistic):
    """Kinetic Langevin has the exact law of a Gaussian posterior: no allowance beside Monte Carlo errors."""
    pytest.importorskip("blackjax")
    example, posterior, train, _ = logistic
    known = example.reference(posterior, train, draws=count(500, 4000))
    trace = example.exact_posterior(
        posterior, chains=count(30, 400), samples=count(60, 300)
    )
    assert trace.clip_rate.max() == 0
    assert trace.plan.excess_noise.max() == 0
    agrees(trace.theta, known)
    assert np.abs(z_scores(1.6 * trace.theta, known)[1]).max() > LIMIT  # it could tell


def test_private_logistic_regression_is_forgiving(logistic):
    """With a step too long for the promise sampling's NLL stays lower; with a good one both are alike."""
    example, posterior, _, test = logistic
    long, good = (
        example.private(posterior, 1.0, times / posterior.L, chains=count(20, 100))
        for times in (1.5, 0.5)
    )
    for sampling, descent in (long, good):
        for trace in (sampling, descent):
            assert trace.plan.epsilon_spent <= 1.0
            assert trace.plan.power_share.max() <= 1
    mine = example.scores(posterior, long[0].theta, test)
    for theta in (long[1].theta[:, -1:], long[1].theta.mean(1, keepdims=True)):
        other = example.scores(posterior, theta, test)
        assert other[1].mean() > mine[1].mean()
        assert z_of_difference(other[2], mine[2]) > 2
    best = example.scores(posterior, good[1].theta.mean(1, keepdims=True), test)
    assert (
        abs(np.mean(example.scores(posterior, good[0].theta, test)[2]) - best[2].mean())
        < 0.02
    )


@pytest.mark.skipif(not FULL, reason="ten seconds of NUTS: make test-full runs it")
def test_the_hierarchy_agrees_with_nuts_and_descent_does_not():
    pytest.importorskip("blackjax")
    example = load("hierarchical")
    data, new = example.load()
    posterior = example.make_posterior(data)
    known = example.reference(posterior, data, draws=count(500, 4000))
    sampling, descent = example.run(
        posterior, wflmc.Privacy(clip=300.0), 70, count(40, 400)
    )
    assert sampling.plan.excess_noise.max() == 0
    agrees(sampling.theta, known)
    spread, covered, nll = example.new_hospitals(
        posterior, sampling.theta.reshape(1, -1, posterior.dim), new
    )
    reference = example.new_hospitals(posterior, known, new)
    assert spread[0] == pytest.approx(reference[0][0], rel=0.1)
    assert abs(covered[0] - 0.9) < 0.05
    assert nll[0] < reference[2][0] + 0.02
    spread, covered, nll = example.new_hospitals(posterior, descent.theta[:, -1:], new)
    assert (
        spread.min() > 2 * example.SPREAD
    )  # the joint mode is where hospitals differ most
    assert covered.min() > 0.99
    assert nll.min() > reference[2][0] + 0.2


@pytest.mark.skipif(not FULL, reason="ten seconds of chains: make test-full runs it")
def test_the_network_under_privacy(network):
    """With a step too long for the promise sampling stays calibrated, descent does not."""
    example, posterior, _, test = network
    sampling, descent = example.private(posterior, 2.0, 0.003, chains=count(4, 16))
    assert max(trace.plan.epsilon_spent for trace in (sampling, descent)) <= 2.0
    mine = example.scores(posterior, sampling.theta, test)
    assert mine[1].mean() < 0.1
    for theta in (descent.theta[:, -1:], descent.theta.mean(1, keepdims=True)):
        other = example.scores(posterior, theta, test)
        assert z_of_difference(other[1], mine[1]) > 3
        assert z_of_difference(other[2], mine[2]) > 3
        assert np.all(other[0] < mine[0] + 0.03)


@pytest.mark.skipif(not FULL, reason="half a minute of NUTS: make test-full runs it")
def test_the_network_is_predicted_by_nuts(network):
    example, posterior, train, test = network
    accuracy, _, nll = example.scores(
        posterior, example.reference(posterior, train), test
    )
    assert accuracy[0] > 0.95
    assert nll[0] < 0.25


def test_a_missing_package_is_a_sentence(monkeypatch):
    example = load("reference")
    monkeypatch.setitem(sys.modules, "blackjax", None)
    with pytest.raises(
        SystemExit, match="needs blackjax, which is not installed: pip install blackjax"
    ):
        example.nuts(None, None, None)
