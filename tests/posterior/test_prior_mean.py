"""Priors around a public mean: posteriors, gradients, starts, laws and plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp

import wflmc
from wflmc.dynamics import Motion
from wflmc.evaluation import simulated_coverage
from wflmc.posterior import Gaussian, w2_squared
from wflmc.sums import reference
from wflmc.sums.constants import MAX_ROWS_OF_SHORT_DEVICE

from ..conftest import FULL
from ..error_tools import raises_input_error
from ..sampling import compile_tools

DEVICES = 4
CLASSES = 3
DIM = 3
STD = 0.7
CHAINS = 3000
INITS = ("prior", "prior-mean", "zero")
RECORDS = {"short devices": 20, "some rows": 120, "in pairs": 4 * 1300}
"""Of all devices: each layout of softmax sums has one."""
LAYOUTS = ("gaussian", "softmax", "softmax, chains last")


def draw_data(records, seed=0):
    """Return correlated features, targets, labels and a mean for every class."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((records, DIM)) @ [
        [1, 0, 0],
        [0.6, 0.5, 0],
        [0, 0, 2],
    ]
    y = X @ [1.0, -2.0, 0.5] + generator.standard_normal(records)
    labels = generator.integers(0, CLASSES, records)
    return X, y, labels, generator.standard_normal((CLASSES, DIM))


def gaussian(records=60, **changes):
    X, y, _, means = draw_data(records)
    arguments = {"prior_std": STD, "prior_mean": means[0], **changes}
    return wflmc.gaussian_regression(jax.random.key(1), DEVICES, X=X, y=y, **arguments)


def softmax(records=60, **changes):
    X, _, labels, means = draw_data(records)
    arguments = {"prior_std": STD, "prior_mean": means, **changes}
    return wflmc.softmax_regression(
        jax.random.key(1), DEVICES, X=X, y=labels, classes=CLASSES, **arguments
    )


MODELS = {"gaussian": gaussian, "softmax": softmax}


def negative_log_density(posterior, mean):
    """Return −log p(θ|D) up to a constant, of all data, written out."""
    X = posterior.real_rows(posterior.features)
    outcomes = posterior.observed[0]

    def cost(theta):
        distance = jnp.sum((theta - mean.ravel()) ** 2) / (2 * STD**2)
        if posterior.classes:
            logits = X @ theta.reshape(CLASSES, DIM).T
            chosen = jnp.take_along_axis(logits, outcomes[:, None], 1)[:, 0]
            likelihood = jax.nn.logsumexp(logits, axis=1) - chosen
        else:
            likelihood = 0.5 * (outcomes - X @ theta) ** 2
        return likelihood.sum() + distance

    return cost


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_log_density(model):
    posterior = MODELS[model]()
    mean = draw_data(60)[3]
    cost = negative_log_density(posterior, mean[0] if model == "gaussian" else mean)
    theta = jnp.linspace(-1.0, 2.0, posterior.dim)
    expected = jax.jit(jax.grad(cost))(theta)
    np.testing.assert_allclose(
        compile_tools.gradients(posterior, theta).sum(0), expected, rtol=1e-4, atol=1e-4
    )
    parts = [
        compile_tools.gradients(posterior.device(k), theta)[0] for k in range(DEVICES)
    ]
    np.testing.assert_allclose(sum(parts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "size", "by_record"),
    list(product(LAYOUTS, RECORDS, [False, True]))
    if FULL
    else [
        ("gaussian", "in pairs", True),
        ("softmax", "short devices", False),
        ("softmax", "in pairs", True),
        ("softmax, chains last", "some rows", False),
    ],
)
def test_clipped_sums_are_those_of_the_reference(layout, size, by_record):
    """Of the coordinates that whiten the features, whose prior has a matrix, and of θ."""
    records = RECORDS[size]
    raw = gaussian(records) if layout == "gaussian" else softmax(records)
    for posterior in (raw, raw.whitened()):
        ready = posterior.on_accelerator(2, 2.0**30, by_record)
        if layout == "softmax, chains last":
            ready = replace(ready, chains_last=True)
        generator = np.random.default_rng(2)
        theta = generator.standard_normal((2, posterior.dim))
        weight = generator.uniform(0.2, 1, DEVICES)
        weight[0] = 0
        clip = np.full(DEVICES, 0.1 * records)
        example_clip = np.full(DEVICES, 0.6) if by_record else None
        sums = clipped_sums(ready, np.float32(theta), weight, clip, example_clip)
        for phi, actual in zip(theta, sums, strict=True):
            expected = reference_sum(posterior, phi, weight, clip, example_clip)
            np.testing.assert_allclose(actual, expected, atol=2e-4 * weight @ clip)


@jax.jit
def clipped_sums(posterior, theta, weight, clip, example_clip):
    """Return the sums of all chains by the fast path, [chain, m]."""

    def sum_of_chain(phi):
        return posterior.clipped_sum(phi, weight, clip, example_clip=example_clip)[0]

    return jax.vmap(sum_of_chain)(theta)


def reference_sum(posterior, phi, weight, clip, example_clip):
    """Return the sum of clipped gradients in float64, prior and all."""
    mean = posterior.coordinates_of(draw_data(int(posterior.sizes.sum()))[3])
    if not posterior.classes:
        mean = mean[0]
    deviation = (phi - mean.ravel()).reshape(-1, DIM)
    prior_share = (deviation @ posterior.prior_precision).ravel() / DEVICES
    gradients = []
    outcomes = posterior.labels if posterior.classes else posterior.target
    rows_of_devices = zip(posterior.features, outcomes, posterior.sizes, strict=True)
    for rows, values, size in rows_of_devices:
        u = rows[:size]
        if posterior.classes:
            of_records = reference.softmax_record_gradients(
                phi, u, values[:size], CLASSES
            )
        else:
            of_records = reference.gaussian_record_gradients(phi, u, values[:size])
        gradients.append(of_records)
    is_short = posterior.features.shape[1] <= MAX_ROWS_OF_SHORT_DEVICE
    if example_clip is not None:
        return reference.record_clipped_sum(
            gradients, prior_share, weight=weight, clip=clip, example_clip=example_clip
        )
    if posterior.classes and is_short:
        return reference.short_device_clipped_sum(
            gradients, prior_share, weight=weight, clip=clip
        )
    of_devices = np.array([rows.sum(0) + prior_share for rows in gradients])
    return reference.device_clipped_sum(of_devices, weight, clip)


@pytest.mark.parametrize("prior_on", ["parameters", "whitened"])
def test_the_posterior_of_a_regression_is_ridge_regression_around_the_mean(prior_on):
    X, y, _, means = draw_data(60)
    whitened = gaussian().whitened(prior_on=prior_on)
    precision = np.eye(DIM) / STD**2
    if prior_on == "whitened":
        # φ = W⁻ᵀθ has covariance STD² I, so that θ = Wᵀφ has STD² WᵀW.
        W = whitened.coordinates.matrix
        precision = np.linalg.inv(STD**2 * W.T @ W)
    covariance = np.linalg.inv(X.T @ X + precision)
    mean = covariance @ (X.T @ y + precision @ means[0])
    np.testing.assert_allclose(whitened.exact.covariance, covariance, rtol=1e-9)
    np.testing.assert_allclose(whitened.exact.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(whitened.mode, mean, rtol=1e-9)
    start = whitened.parameters(np.asarray(whitened.start_mean("prior-mean")))
    np.testing.assert_allclose(start, means[0], rtol=1e-9)


def test_the_mode_of_a_softmax_model_minimises_the_cost():
    X, _, labels, means = draw_data(60)

    def cost(flat):
        theta = flat.reshape(CLASSES, DIM)
        logits = X @ theta.T
        misfit = logsumexp(logits, axis=1) - logits[np.arange(60), labels]
        return misfit.sum() + np.sum((theta - means) ** 2) / (2 * STD**2)

    expected = minimize(cost, np.zeros(CLASSES * DIM), method="BFGS").x
    for posterior in (softmax(), softmax().whitened()):
        np.testing.assert_allclose(posterior.mode, expected, atol=1e-3)
        deviation = (posterior.mode - means.ravel()).reshape(CLASSES, DIM)
        # The likelihood does not know what all classes have in common.
        np.testing.assert_allclose(deviation.sum(0), 0, atol=1e-9)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("model", MODELS)
def test_starts_have_the_law_of_their_name(model, init):
    """Also in other coordinates: mean and covariance of many draws."""
    posterior = MODELS[model]().whitened()
    means = draw_data(60)[3]
    mean = means[0] if model == "gaussian" else means.ravel()
    keys = jax.random.split(jax.random.key(4), CHAINS)
    draws = jax.vmap(lambda key: posterior.draw_initial(key, init))(keys)
    theta = np.asarray(posterior.parameters(draws), dtype=float)
    expected_mean = 0 * mean if init == "zero" else mean
    std = STD if init == "prior" else 0.0
    five_errors = 5 * std / CHAINS**0.5
    np.testing.assert_allclose(theta.mean(0), expected_mean, atol=1e-5 + five_errors)
    np.testing.assert_allclose(theta.std(0), std, atol=1e-5 + five_errors)


@pytest.mark.parametrize("init", INITS)
def test_the_distance_of_the_start(init):
    posterior = gaussian()
    mean = draw_data(60)[3][0]
    start = Gaussian(mean * (init != "zero"), STD**2 * np.eye(DIM) * (init == "prior"))
    expected = w2_squared(start, posterior.exact)
    assert posterior.initial_w2_sq(init) == pytest.approx(float(expected), rel=1e-9)
    quadratic = posterior.quadratic(init)
    distance_sq = np.sum((start.mean - posterior.exact.mean) ** 2)
    assert np.sum(quadratic.start_mean**2) == pytest.approx(distance_sq)
    classifier = softmax()
    way = classifier.mode
    if init != "zero":
        way = way - draw_data(60)[3].ravel()
    variances = classifier.laplace.variances
    if init == "prior":
        variances = (variances**0.5 - STD) ** 2
    estimate = np.sum(way**2) + variances.sum()
    assert classifier.initial_w2_sq(init) == pytest.approx(estimate, rel=1e-6)


@pytest.mark.parametrize("init", INITS)
def test_the_forecast_of_a_softmax_model_is_its_quadratic_written_out(init):
    """Mean and covariance of every round by matrices [m, m], from start to mode."""
    posterior = softmax()
    contrast_precision = np.linalg.inv(posterior._contrast_covariance)
    common = np.full((CLASSES, CLASSES), 1 / CLASSES)
    hessian = np.kron(np.eye(CLASSES) - common, contrast_precision)
    hessian += np.kron(common, posterior.prior_precision)
    rounds = 4
    step_size = 0.5 / np.linalg.eigvalsh(hessian)[-1]
    weight = np.ones((rounds, DEVICES))
    motion = Motion(np.full(rounds, step_size), weight, init)
    response = posterior.response(motion, burn_in=0)
    start = draw_data(60)[3].ravel() * (init != "zero")
    deviation = start - posterior.mode
    covariance = STD**2 * np.eye(posterior.dim) * (init == "prior")
    contraction = np.eye(posterior.dim) - step_size * hessian
    for s in range(rounds):
        deviation = contraction @ deviation
        covariance = contraction @ covariance @ contraction
        assert response.shift[s] == pytest.approx(deviation @ deviation, rel=1e-6)
        spectrum = np.repeat(response.covariance[s], response.multiplicity.astype(int))
        assert np.sort(spectrum) == pytest.approx(
            np.linalg.eigvalsh(covariance), rel=1e-6, abs=1e-12
        )


def make_plan(posterior, init, *, snr_db, epsilon, clip, burn_in, samples):
    """Plan equal powers over a static channel, with a clip that no gradient meets."""
    return wflmc.plan(
        posterior,
        wflmc.Link(wflmc.channel.static(0.01), snr_db=snr_db),
        wflmc.Privacy(epsilon=epsilon, delta=0.01, clip=clip),
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=burn_in,
        samples=samples,
        sampler=wflmc.Sampler(init=init),
        policy=wflmc.Policy(power="equal"),
    )


@pytest.mark.parametrize("deviations", [0, 5])
@pytest.mark.parametrize("init", INITS)
def test_law_bound_and_chains_agree(init, deviations):
    """A prior mean at the truth, and one that is five prior deviations off."""
    X, y, _, _ = draw_data(60)
    truth = np.array([1.0, -2.0, 0.5])
    mean = truth + deviations * STD * np.array([1.0, 0.0, 0.0])
    posterior = wflmc.gaussian_regression(
        jax.random.key(1), DEVICES, X=X, y=y, prior_std=STD, prior_mean=mean
    )
    plan = make_plan(
        posterior, init, snr_db=30, epsilon=1e4, clip=3000, burn_in=3, samples=4
    )
    law = posterior.law(plan.step_size, plan.weight, plan.noise_variance, init=init)
    w2_sq = w2_squared(law, posterior.exact)
    assert np.all(w2_sq <= plan.bound)
    trace = wflmc.sample(jax.random.key(5), posterior, plan, chains=CHAINS)
    assert trace.clip_rate.max() == 0
    theta = np.asarray(trace.theta, dtype=float)
    kept_mean = law.mean[plan.burn_in :]
    variance = np.diagonal(law.covariance, axis1=1, axis2=2)[plan.burn_in :]
    five_errors = 5 * (variance / CHAINS) ** 0.5
    assert np.all(np.abs(theta.mean(0) - kept_mean) < five_errors)
    assert np.all(np.abs(theta.var(0) / variance - 1) < 5 * (2 / CHAINS) ** 0.5)


def test_noise_aware_intervals_hold_around_a_mean_far_from_zero():
    """Parameters from the prior and data from the model: 90 % of intervals hold them."""
    X, y, _, _ = draw_data(200)
    posterior = wflmc.gaussian_regression(
        jax.random.key(1),
        DEVICES,
        X=X,
        y=y,
        prior_std=0.3,
        prior_mean=[20.0, -20.0, 10.0],
    )
    plan = make_plan(
        posterior, "prior-mean", snr_db=90, epsilon=1e5, clip=5000, burn_in=4, samples=8
    )
    coverage = simulated_coverage(jax.random.key(6), posterior, [plan], 300)
    error = coverage.error[0]
    assert abs(coverage.noise_aware[0] - 0.9) < 4 * error
    assert error < 0.02
    # Relative to the posterior's; the prior alone would give intervals four times as wide.
    assert coverage.noise_aware_width[0] < 2
    assert coverage.trace.clip_rate.max() == 0


def test_means_that_no_model_has_are_refused():
    with raises_input_error("prior_mean", 3):
        gaussian(prior_mean=[1.0, 2.0])
    with raises_input_error("prior_mean", 9):
        softmax(prior_mean=np.zeros((3, 4)))
    with raises_input_error("prior_mean"):
        gaussian(prior_mean=[1.0, np.nan, 0.0])
    with raises_input_error("prior_mean"):
        gaussian(prior_mean=["a", "b", "c"])
    with raises_input_error("prior_mean", "1e+09"):
        gaussian(prior_mean=[1e10, 0.0, 0.0])
    with raises_input_error("prior_mean", "1e+09"):
        gaussian(prior_mean=[1e8, 0.0, 0.0]).whitened(1e-3 * np.eye(DIM))


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_draws_two_deviations_away_are_said_to_be(model, whitened):
    """The mean of every chain counts, not how its draws spread, in any coordinates."""
    posterior = MODELS[model]()
    plan = wflmc.plan(posterior, step_size=1e-3, burn_in=1, samples=6)
    trace = wflmc.sample(jax.random.key(7), posterior, plan, chains=3)
    means = draw_data(60)[3]
    mean = means[0] if model == "gaussian" else means.ravel()
    generator = np.random.default_rng(8)
    spread = generator.standard_normal((3, 6, posterior.dim))
    spread -= spread.mean(1, keepdims=True)
    theta = mean + 2 * STD + spread
    if whitened:
        posterior = posterior.whitened()
    moved = replace(trace, theta=theta.astype(np.float32))
    evaluation = wflmc.evaluate(moved, posterior)
    assert evaluation.prior_distance == pytest.approx(2, rel=1e-5)
    around_zero = replace(posterior, prior_mean=None)
    assert wflmc.evaluate(moved, around_zero).prior_distance is None
