"""Whitened coordinates: the same posterior in another geometry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.dynamics import Motion
from wflmc.posterior import softmax as softmax_module
from wflmc.posterior import whitening

from ..error_tools import raises_input_error
from ..sampling.compile_tools import clipped_sum
from .whitening_tools import KEY, correlated, gaussian


def labelled(rows=40, **keywords):
    X, y = correlated(rows)
    return wflmc.softmax_regression(
        KEY, 5, X=X, y=np.digitize(y, np.quantile(y, [0.3, 0.7])), **keywords
    )


def start_covariance(posterior):
    """Of the parameters that chains begin at."""
    chain = posterior.chain(Motion(np.ones(1), np.ones((1, posterior.devices))))
    return chain.readout @ chain.start.covariance @ chain.readout.T


def log_posterior(theta, posterior, prior_precision):
    """Of the softmax model, written down again, on the features of `posterior`."""
    u = jnp.asarray(posterior.features.reshape(-1, posterior.features.shape[-1]))
    real = (np.arange(posterior.labels.shape[1]) < posterior.sizes[:, None]).ravel()
    weights = theta.reshape(posterior.classes, -1)
    scores = jax.nn.log_softmax(u @ weights.T)[
        jnp.arange(len(u)), posterior.labels.ravel()
    ]
    return jnp.sum(jnp.where(real, scores, 0.0)) - 0.5 * jnp.sum(
        weights * (weights @ prior_precision)
    )


@pytest.mark.parametrize("intercept", [False, True])
def test_whitened_features_have_unit_moments(intercept):
    posterior = gaussian(intercept=intercept).whitened(prior_on="whitened")
    z = posterior.features[
        np.arange(posterior.features.shape[1]) < posterior.sizes[:, None]
    ]
    np.testing.assert_allclose(z.T @ z / len(z), np.eye(z.shape[1]), atol=1e-9)


def test_directions_without_variance_are_left_finite():
    X, y = correlated()
    flat = np.column_stack([X, np.full(len(X), 2.0), X[:, 0]])
    posterior = wflmc.gaussian_regression(
        KEY, 5, X=flat, y=y, intercept=True
    ).whitened()
    assert np.isfinite(posterior.mu)
    same = wflmc.gaussian_regression(KEY, 5, X=flat, y=y, intercept=True)
    np.testing.assert_allclose(
        posterior.exact.covariance, same.exact.covariance, atol=1e-6
    )
    with raises_input_error("data", "whitening"):
        whitening([0.0, 0.0], np.zeros((2, 2)), intercept=False)


@pytest.mark.parametrize("intercept", [False, True])
def test_gaussian_posterior_is_the_same_whatever_the_coordinates(intercept):
    original = gaussian(intercept=intercept, prior_std=0.3)
    other = original.whitened()
    np.testing.assert_allclose(other.exact.mean, original.exact.mean, rtol=1e-8)
    np.testing.assert_allclose(
        other.exact.covariance, original.exact.covariance, rtol=1e-8
    )
    np.testing.assert_allclose(
        start_covariance(other), start_covariance(original), atol=1e-12
    )
    # Whitening covers data and prior together.
    assert other.L / other.mu == pytest.approx(1)
    assert other.digest == original.digest


def test_a_prior_on_whitened_coordinates_is_another_prior():
    original = gaussian(intercept=True)
    std = 0.2
    rows = original.covariates
    W = whitening(rows.mean(0), np.cov(rows.T, bias=True), True)
    u = original.features[
        np.arange(original.features.shape[1]) < original.sizes[:, None]
    ]
    v = original.target[np.arange(original.target.shape[1]) < original.sizes[:, None]]
    prior = std**2 * W.T @ W  # of θ = Wᵀφ
    covariance = np.linalg.inv(u.T @ u + np.linalg.inv(prior))
    other = gaussian(intercept=True, prior_std=std).whitened(prior_on="whitened")
    np.testing.assert_allclose(other.exact.covariance, covariance, rtol=1e-7)
    np.testing.assert_allclose(other.exact.mean, covariance @ (u.T @ v), rtol=1e-7)
    np.testing.assert_allclose(start_covariance(other), prior, rtol=1e-9)
    with raises_input_error("prior_on", value="elsewhere"):
        original.whitened(prior_on="elsewhere")


def test_chains_in_whitened_coordinates_reach_the_posterior_of_the_parameters():
    """Against the exact posterior: estimate and floor of perfect samples, in the parameters' own coordinates."""
    original = gaussian(intercept=True)
    other = original.whitened()
    link = wflmc.Link(channel.static(), snr_db=60)
    step = 0.1 / (other.mu + other.L)
    plan = wflmc.plan(
        other,
        link,
        wflmc.Privacy(),
        step_size=step,
        burn_in=300,
        samples=20,
        policy=wflmc.Policy(power="noiseless"),
        sampler=wflmc.Sampler(init="zero"),
    )
    trace = wflmc.sample(KEY, other, plan, 2000)
    exact = wflmc.exact_w2_sq(other, plan)
    evaluation = wflmc.evaluate(trace, other)
    assert exact[-1] < 0.02 * np.trace(original.exact.covariance)
    error = (trace.theta[:, -1].mean(0) - original.mean) / np.sqrt(
        np.diag(original.covariance) / 2000
    )
    assert np.abs(error).max() < 4
    law = other.law(plan.step_size, plan.weight, plan.noise_variance, "zero")
    spread = trace.theta[:, -1].var(0, ddof=1) / np.diag(law.covariance[-1])
    assert np.abs(spread - 1).max() < 4 * np.sqrt(2 / 2000)
    assert (
        evaluation.w2_sq.worst
        < 5 * np.trace(original.exact.covariance) / 2000 * 5 + exact[300:].max() * 1.2
    )
    goes_on = wflmc.sample(
        KEY, other, plan.from_round(310), 2000, initial=trace.theta[:, 9]
    )
    np.testing.assert_allclose(
        goes_on.theta[:, -1], trace.theta[:, -1], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("rows", [20, 100])  # few rows on a device, and many
@pytest.mark.parametrize("prior_on", ["parameters", "whitened"])
def test_softmax_gradients_are_those_of_the_same_density(rows, prior_on):
    original = labelled(rows, intercept=True, prior_std=0.7)
    assert (original.features.shape[1] <= softmax_module.MAX_ROWS_OF_SHORT_DEVICE) == (
        rows == 20
    )
    other = original.whitened(prior_on=prior_on)
    W = other.coordinates.matrix
    prior = (
        np.eye(5) / 0.49 if prior_on == "parameters" else np.linalg.inv(W.T @ W) / 0.49
    )
    theta = np.random.default_rng(0).standard_normal(original.dim)
    phi = other.coordinates_of(theta)
    np.testing.assert_allclose(other.parameters(phi), theta, rtol=1e-9)
    by_parameters = jax.jit(jax.grad(log_posterior))(
        jnp.asarray(theta), original, prior
    )
    # The chain rule: φ-gradient = W θ-gradient.
    expected = -(np.asarray(by_parameters).reshape(3, -1) @ W.T).ravel()
    ready = other.on_accelerator(1, 1e9)
    everyone = jnp.ones(5), jnp.full(5, jnp.inf)
    total, norms = clipped_sum(ready, jnp.asarray(phi, jnp.float32), *everyone)
    np.testing.assert_allclose(
        total, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max()
    )
    alone = [np.linalg.norm(clipped_sum(other.device(k), jnp.asarray(phi), jnp.ones(1), jnp.full(1, jnp.inf))[0])
             for k in range(5)]  # fmt: skip
    np.testing.assert_allclose(norms, alone, rtol=1e-3)


def test_softmax_constants_bound_the_hessian():
    other = labelled(intercept=True, prior_std=0.7).whitened()
    precision = other.coordinates.precision
    for seed in range(3):
        phi = jnp.asarray(np.random.default_rng(seed).standard_normal(other.dim))
        values = np.linalg.eigvalsh(
            -jax.jit(jax.hessian(log_posterior))(phi, other, precision)
        )
        assert other.mu * (1 - 1e-3) < values[0]
        assert values[-1] < other.L * (1 + 1e-3)


def test_examples_are_clipped_in_the_chain_coordinates():
    other = labelled(intercept=True).whitened()
    c = 0.8
    theta = np.random.default_rng(1).standard_normal(other.dim)
    phi = other.coordinates_of(theta)
    total = np.zeros(other.dim)
    norms = []
    for k in range(5):
        for u, label in zip(
            other.features[k, : other.sizes[k]], other.labels[k], strict=False
        ):
            p = np.exp(phi.reshape(3, -1) @ u)
            gradient = np.outer(p / p.sum() - np.eye(3)[label], u).ravel()
            norms.append(np.linalg.norm(gradient))
            total += gradient * min(1, c / norms[-1])
    total += (phi.reshape(3, -1) @ other.coordinates.precision).ravel()
    actual, _ = clipped_sum(
        other,
        jnp.asarray(phi),
        jnp.ones(5),
        jnp.full(5, jnp.inf),
        example_clip=jnp.full(5, c),
    )
    np.testing.assert_allclose(actual, total, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(other.example_norms(theta), norms, rtol=1e-6)


def test_predictions_and_laplace_belong_to_the_parameters():
    original = labelled(intercept=True)
    other = original.whitened()
    mode, _ = other.laplace
    np.testing.assert_allclose(other.parameters(mode), original.laplace[0], atol=2e-2)
    theta = np.random.default_rng(2).standard_normal((2, 3, original.dim))
    X, _ = correlated(7)
    np.testing.assert_array_equal(original.predict(theta, X), other.predict(theta, X))


def test_one_change_of_coordinates_is_enough():
    with raises_input_error("matrix", "coordinates"):
        gaussian().whitened().whitened()
    with raises_input_error("matrix", "(4, 4)"):
        gaussian().whitened(np.ones((4, 4)))
