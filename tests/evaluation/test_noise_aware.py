"""Noise-aware posteriors: every formula against something independent, and what intervals hold in simulations."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy import stats

import wflmc
from wflmc.evaluation import conditioning, simulated_coverage
from wflmc.posterior import GaussianPosterior
from wflmc.sampling.transcript import Transcript

from ..conftest import FULL

full = pytest.mark.skipif(not FULL, reason="make test-full runs the large counts")
LINK = wflmc.Link(wflmc.channel.rayleigh(0.01), snr_db=30)


@pytest.fixture(scope="module")
def posterior():
    return wflmc.gaussian_regression(jax.random.key(0), devices=30)


def make_plans(posterior, epsilon, count=1, burn_in=10, samples=10, **policy):
    privacy = wflmc.Privacy(epsilon=epsilon, delta=0.01, clip=30)
    steps = np.repeat([0.8, 0.4], [burn_in, samples]) / (posterior.mu + posterior.L)
    return [
        wflmc.plan(
            posterior, replace(LINK, seed=seed), privacy, step_size=steps, burn_in=burn_in, samples=samples,
            sampler=wflmc.Sampler(init="zero"), policy=wflmc.Policy(objective="transcript", **policy),
        )
        for seed in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trace(posterior):
    (plan,) = make_plans(posterior, 4)
    return wflmc.sample(jax.random.key(1), posterior, plan, 60, transcript=True)


def conditioned(gram, prior, position, gradient, noise, extra):
    """The law of θ given all gradients, by brute force: the joint Gaussian of (θ, b̃, g[1..S]), conditioned on g.

    g[s] = Hθ[s] − b̃ + n[s] with b̃ ~ N(Gθ, (1 + c) G).
    """
    rounds, dim = position.shape
    cov_theta = np.linalg.inv(prior)
    cov_b = gram @ cov_theta @ gram + (1 + extra) * gram
    cross = np.tile(-cov_theta @ gram, (1, rounds))
    inner = np.kron(np.ones((rounds, rounds)), cov_b) + np.kron(np.diag(noise), np.eye(dim))
    residual = (gradient - position @ (gram + prior)).ravel()
    return cross @ np.linalg.solve(inner, residual), cov_theta - cross @ np.linalg.solve(inner, cross.T)


def test_it_is_the_joint_gaussian_conditioned_on_what_was_received(posterior, trace):
    made, told = wflmc.noise_aware(trace, posterior, draws=4000), trace.transcript
    prior = np.eye(5)
    gram = posterior.hessian.sum(0) - prior
    for chain in (0, 7):
        used = made.used[:, chain]
        weight = (1 / told.noise[used, chain]) / (1 / told.noise[used, chain]).sum()
        extra = np.sum((weight @ trace.plan.weight[used] - 1) ** 2) / 30
        parts = (np.asarray(values[used, chain], float) for values in (told.position, told.gradient, told.noise))
        mean, covariance = conditioned(gram, prior, *parts, extra)
        np.testing.assert_allclose(made.mean[chain], mean, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(made.covariance[chain], covariance, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(np.cov(made.draws[chain].T), covariance, atol=0.1 * covariance.max())
        np.testing.assert_allclose(made.participation[chain], extra, atol=1e-9)
    lower, upper = made.interval(0.9)
    deviation = np.sqrt(np.diagonal(made.covariance, axis1=1, axis2=2))
    np.testing.assert_allclose((upper - lower) / deviation, 2 * stats.norm.ppf(0.95))


@full
def test_noise_alone_moves_it_around_the_posterior(posterior, trace):
    """Over chains its mean errs by the noise that it states, with all its rounds or some of them."""
    made = wflmc.noise_aware(trace, posterior)
    hessian = posterior.hessian.sum(0)
    error = (made.mean - posterior.exact.mean) @ hessian / np.sqrt(made.noise)[:, None]
    assert abs(np.mean(error**2) - 1) < 4 * np.sqrt(2 / error.size) + 0.05
    assert np.abs(error.mean(0)).max() < 4 / np.sqrt(len(error))
    assert np.all(made.bias < 0.5)


def test_it_is_in_parameters_whatever_the_chain_moves_in(posterior):
    W = np.eye(5) + 0.2 * np.random.default_rng(0).standard_normal((5, 5))
    whitened = posterior.whitened(W)
    (plan,) = make_plans(whitened, 15)
    trace = wflmc.sample(jax.random.key(1), whitened, plan, 20, transcript=True)
    made, told = wflmc.noise_aware(trace, whitened), trace.transcript
    used, c = made.used[:, 3], 3
    # Brute force in the coordinates of the chain, then moved.
    space = whitened.coordinates
    gram = whitened.hessian.sum(0) - space.precision
    parts = (np.asarray(values[used, c], float) for values in (told.position, told.gradient, told.noise))
    mean, covariance = conditioned(gram, space.precision, *parts, made.participation[c])
    np.testing.assert_allclose(made.mean[c], W.T @ mean, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(made.covariance[c], W.T @ covariance @ W, rtol=1e-5, atol=1e-9)
    assert np.abs(made.mean - posterior.exact.mean).mean() < 0.1


def test_the_expected_share_of_clipped_gradients_is_that_of_simulated_devices(posterior):
    rng = np.random.default_rng(0)
    gram, prior = 1200 * np.eye(5), np.eye(5)
    moments, share = wflmc.Moments(gram, prior, 1200), np.full(30, 1 / 30)
    for distance, tolerance in ((0.0, 0.01), (0.4, 0.05), (0.7, 0.1), (1.5, 0.04)):
        position = np.zeros((1, 1, 5))
        position[..., 0] = distance
        one, zero = np.ones((1, 1)), np.zeros((1, 1, 5))
        heard = conditioning._Reception(position, zero, one, np.ones((1, 1, 30)), np.full(30, 30.0), share)
        clipped, bias = heard.clipping(moments, np.zeros((1, 5)))
        features = rng.standard_normal((4000, 40, 5))
        residual = features @ position[0, 0] + rng.standard_normal((4000, 40))
        gradient = np.einsum("kn,knm->km", residual, features) + position[0, 0] / 30
        length = np.linalg.norm(gradient, axis=1)
        assert clipped[0, 0] == pytest.approx(np.mean(length > 30), abs=tolerance)
        lost = 30 * np.linalg.norm(np.mean(gradient * np.minimum(1, 30 / length)[:, None] - gradient, axis=0))
        assert lost < 1.1 * bias[0, 0] + 1


@full
def test_rounds_that_are_clipped_are_left_out(posterior):
    privacy = wflmc.Privacy(epsilon=8, delta=0.01, clip=30)
    step = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(posterior, LINK, privacy, step_size=step, burn_in=30, samples=10)
    trace = wflmc.sample(jax.random.key(2), posterior, plan, 20, transcript=True, keep_burn_in=True)
    made = wflmc.noise_aware(trace, posterior)
    rate = np.concatenate([trace.warmup_clip_rate, trace.clip_rate], axis=1).T
    assert rate[~made.used].mean() > 0.8 > 0.05 > rate[made.used].mean()
    assert made.used[30:].mean() > 0.95


@full
def test_unknown_moments_cost_little_and_known_ones_are_their_limit(posterior, trace):
    gram = posterior.hessian.sum(0) - np.eye(5)
    known = wflmc.noise_aware(trace, wflmc.Moments(gram, np.eye(5), 1200))
    sure = wflmc.noise_aware(trace, wflmc.Moments(gram, np.eye(5), 1200, 1e-3), draws=4000)
    assert (known.method, sure.method) == ("known moments", "uncertain moments")
    assert known.not_covered == sure.not_covered == ()
    np.testing.assert_allclose(sure.mean, known.mean, atol=1e-4)
    np.testing.assert_allclose(sure.covariance, known.covariance, atol=5e-6)
    np.testing.assert_allclose(sure.draws.mean(1), known.mean, atol=5 * np.sqrt(known.covariance.max() / 4000))
    guessed = wflmc.Moments(1200 * np.eye(5), np.eye(5), 1200, np.sqrt(1200) * (1 + (2**0.5 - 1) * np.eye(5)))
    wide = wflmc.noise_aware(trace, guessed, draws=2000)
    ratio = np.diagonal(wide.covariance, axis1=1, axis2=2) / np.diagonal(known.covariance, axis1=1, axis2=2)
    assert 0.9 < ratio.mean() < 1.15
    assert np.abs(wide.mean - known.mean).mean() < 0.2 * np.sqrt(known.covariance.max())


def test_uncertain_moments_against_a_grid():
    """One parameter: the joint posterior of (G, b, θ) on a grid of G, with nothing in closed form but b."""
    rng = np.random.default_rng(0)
    theta, noise = rng.normal(0.5, 0.5, 8), 400.0
    received = (110 + 1) * theta - 70 + rng.normal(0, noise**0.5, 8)
    shape = (8, 1, 1)
    told = Transcript(theta.reshape(shape), received.reshape(shape), np.full((8, 1), noise), np.arange(8), 8)
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=2, examples=100, dim=1)
    plan = wflmc.plan(posterior, LINK, wflmc.Privacy(clip=1e6), step_size=1e-3, burn_in=0, samples=8)
    plan = plan.replace(weight=np.ones((8, 2)))
    trace = replace(wflmc.sample(jax.random.key(0), posterior, plan, 1), transcript=told, plans=(plan,))
    made = wflmc.noise_aware(trace, wflmc.Moments(np.full((1, 1), 100.0), np.eye(1), 100, 20.0), draws=10_000)
    grid = np.linspace(1, 250, 500)
    prior = stats.norm.logpdf(grid, 100, 20)
    middle, V = received.mean(), noise / 8
    likelihood = prior.copy()
    for g, row in enumerate(grid):
        covariance = noise * np.eye(8) + row**2 + row  # θ ~ N(0, 1) and b|θ integrated out
        likelihood[g] += stats.multivariate_normal.logpdf(received, (row + 1) * theta, covariance)
    chance = np.exp(likelihood - likelihood.max())
    chance /= chance.sum()
    precision = 1 + grid**2 / (grid + V)
    mean = grid / (grid + V) * ((grid + 1) * theta.mean() - middle) / precision
    expected = chance @ mean
    variance = chance @ (1 / precision + mean**2) - expected**2
    assert made.mean[0, 0] == pytest.approx(expected, abs=0.03 * variance**0.5)
    assert made.covariance[0, 0, 0] == pytest.approx(variance, rel=0.05)


@full
def test_a_local_quadratic_moves_draws_of_a_softmax_model():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((600, 2))
    y = (rng.random(600) < 1 / (1 + np.exp(-2 * X[:, 0]))).astype(int)
    posterior = wflmc.softmax_regression(jax.random.key(0), devices=5, X=X, y=y)
    privacy = wflmc.Privacy(epsilon=8, delta=0.01, clip=60)
    plan = wflmc.plan(posterior, LINK, privacy, step_size=0.5 / posterior.L, burn_in=40, samples=40)
    trace = wflmc.sample(jax.random.key(1), posterior, plan, 12, transcript=True)
    made = wflmc.noise_aware(trace, posterior)
    law = wflmc.evaluation.wasserstein.laplace_law(posterior)
    assert made.method == "local quadratic"
    assert made.not_covered
    assert wflmc.noise_aware(trace, posterior, public=True).not_covered == ()
    np.testing.assert_allclose(made.draws.mean(1), made.mean, atol=1e-9)
    moments = conditioning.moments_of(posterior, trace)
    total = jax.jacfwd(lambda theta: posterior.gradients(theta).sum(0))
    exact = np.asarray(total(np.asarray(trace.theta[3].mean(0), np.float32)))
    np.testing.assert_allclose(moments.gram[3] + moments.prior, exact, atol=0.01 * exact.max())
    far, near = (np.mean((mean - law.mean) ** 2) for mean in (trace.theta.mean(1), made.mean))
    spread = np.mean(np.diagonal(law.covariance))
    assert near < far + 0.3 * spread
    lower, upper = made.interval(0.9)
    assert np.all(lower < upper)


def test_what_is_not_a_transcript_is_refused(posterior, trace):
    with pytest.raises(wflmc.InputError, match="transcript=True"):
        wflmc.noise_aware(replace(trace, transcript=None), posterior)
    with pytest.raises(wflmc.InputError, match="posterior"):
        wflmc.noise_aware(trace, "posterior")
    with pytest.raises(wflmc.InputError, match="linear regression"):
        simulated_coverage(jax.random.key(0), "posterior", [trace.plan], 10)


@full
def test_draws_go_to_arviz(posterior, trace):
    pytest.importorskip("arviz")
    made = wflmc.noise_aware(trace, posterior, draws=50)
    data = made.to_arviz().posterior
    assert data.theta.shape == (60, 50, 5)
    assert "private data" in data.attrs["not_covered"]


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 15.0] if FULL else [4.0])
def test_intervals_hold_what_they_say(posterior, epsilon):
    """Simulation-based calibration, with plans made for transcripts."""
    count = 2000 if FULL else 200
    found = simulated_coverage(jax.random.key(7), posterior, make_plans(posterior, epsilon, 5), count)
    for level, share, error in zip((0.9, 0.5), found.noise_aware, found.error, strict=True):
        assert abs(share - level) < 3 * error + 0.015
    assert found.chain[0] != pytest.approx(0.9, abs=0.02) or epsilon > 8


@full
def test_public_moments_cover_too(posterior):
    guessed = wflmc.Moments(1200 * np.eye(5), np.eye(5), 1200, np.sqrt(1200) * (1 + (2**0.5 - 1) * np.eye(5)))
    count = 500 if FULL else 60
    found = simulated_coverage(jax.random.key(8), posterior, make_plans(posterior, 4, 5), count, guessed)
    for level, share, error in zip((0.9, 0.5), found.noise_aware, found.error, strict=True):
        assert abs(share - level) < 3 * error + 0.02


def test_the_output_tells_a_changed_device_no_better_than_promised():
    """Attack the noise-aware output with the likelihood ratio of its mean, on data that differ in one whole device."""
    rng, trials = np.random.default_rng(0), 20_000 if FULL else 1000
    X, y = rng.standard_normal((40, 2)), rng.standard_normal(40)
    devices, sides = np.repeat(np.arange(4), 10), []
    for sign in (1.0, -1.0):
        changed_X, changed = X.copy(), y.copy()
        changed_X[:10], changed[:10] = [1.0, 0.0], 1e3 * sign
        sides.append(wflmc.gaussian_regression(jax.random.key(0), 4, X=changed_X, y=changed, partition=devices))
    privacy = wflmc.Privacy(epsilon=1.0, delta=0.01, clip=5)
    policy, step = wflmc.Policy(objective="transcript", schedule="all"), 0.2 / sides[0].L
    link = wflmc.Link(wflmc.channel.static(), snr_db=40)
    plan = wflmc.plan(sides[0], link, privacy, step_size=step, burn_in=0, samples=8, policy=policy)
    assert isinstance(sides[0], GaussianPosterior)
    moments = wflmc.Moments(40 * np.eye(2), np.eye(2), 40)
    output = []
    for key, side in zip((1, 2), sides, strict=True):
        trace = wflmc.sample(jax.random.key(key), side, plan, trials, transcript=True)
        output.append(wflmc.noise_aware(trace, moments, draws=1).mean[:, 0])
    # Half of the trials choose the threshold, the others count; Clopper-Pearson at 99 %.
    half, best = trials // 2, -np.inf
    cuts = np.quantile(np.concatenate([one[:half] for one in output]), np.linspace(0.02, 0.98, 49))
    best = cuts[np.argmax([np.mean(output[0][:half] > cut) - np.mean(output[1][:half] > cut) for cut in cuts])]
    hits, misses = (int(np.sum(one[half:] > best)) for one in output)
    low = stats.beta.ppf(0.005, hits, half - hits + 1)
    high = stats.beta.ppf(0.995, misses + 1, half - misses)
    assert low - 0.01 <= np.exp(1.0) * high
    assert hits / half > misses / half + 0.1  # the attack sees something: the output is not mere noise
