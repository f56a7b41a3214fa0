"""Noise-aware posteriors: every formula against something independent, and what intervals hold in simulations."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import wflmc
from wflmc.evaluation import conditioning, simulated_coverage
from wflmc.posterior import GaussianPosterior
from wflmc.posterior.coordinates import Affine, coordinates
from wflmc.posterior.custom.model import Sites
from wflmc.sampling import Trace
from wflmc.sampling.transcript import Transcript

from ..conftest import FULL
from ..error_tools import raises_input_error

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


def conditioned(gram, prior, position, gradient, noise, extra, prior_mean=0.0):
    """The law of θ given all gradients, by brute force: the joint Gaussian of (θ, b̃, g[1..S]), conditioned on g.

    g[s] = Hθ[s] − b̃ − Λ (prior mean) + n[s] with b̃ ~ N(Gθ, (1 + c) G).
    """
    rounds, dim = position.shape
    cov_theta = np.linalg.inv(prior)
    cov_b = gram @ cov_theta @ gram + (1 + extra) * gram
    cross = np.tile(-cov_theta @ gram, (1, rounds))
    inner = np.kron(np.ones((rounds, rounds)), cov_b) + np.kron(
        np.diag(noise), np.eye(dim)
    )
    residual = (gradient - (position - prior_mean) @ (gram + prior)).ravel()
    return prior_mean + cross @ np.linalg.solve(
        inner, residual
    ), cov_theta - cross @ np.linalg.solve(inner, cross.T)


def test_it_is_the_joint_gaussian_conditioned_on_what_was_received(posterior, trace):
    output = wflmc.noise_aware(trace, posterior, draws=4000)
    transcript = trace.transcript
    prior = np.eye(5)
    gram = posterior.hessian.sum(0) - prior
    for chain in (0, 7):
        used = output.used[:, chain]
        weight = (1 / transcript.noise[used, chain]) / (
            1 / transcript.noise[used, chain]
        ).sum()
        extra = np.sum((weight @ trace.plan.weight[used] - 1) ** 2) / 30
        parts = (
            np.asarray(values[used, chain], float)
            for values in (transcript.position, transcript.gradient, transcript.noise)
        )
        mean, covariance = conditioned(gram, prior, *parts, extra)
        np.testing.assert_allclose(output.mean[chain], mean, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(
            output.covariance[chain], covariance, rtol=1e-6, atol=1e-12
        )
        np.testing.assert_allclose(
            np.cov(output.draws[chain].T), covariance, atol=0.1 * covariance.max()
        )
        np.testing.assert_allclose(output.participation[chain], extra, atol=1e-9)
    lower, upper = output.interval(0.9)
    deviation = np.sqrt(np.diagonal(output.covariance, axis1=1, axis2=2))
    np.testing.assert_allclose((upper - lower) / deviation, 2 * stats.norm.ppf(0.95))


def test_a_prior_around_another_mean_is_conditioned_on_as_well(posterior, trace):
    prior_mean = np.array([0.5, -1.0, 0.0, 2.0, 0.3])
    prior = np.diag([1.0, 20.0, 300.0, 4.0, 50.0])
    gram = posterior.hessian.sum(0) - np.eye(5)
    moments = wflmc.Moments(gram, prior, 1200, prior_linear=prior @ prior_mean)
    result = wflmc.noise_aware(trace, moments, draws=1)
    transcript = trace.transcript
    used = result.used[:, 2]
    parts = (transcript.position, transcript.gradient, transcript.noise)
    received = (np.asarray(values[used, 2], float) for values in parts)
    mean, covariance = conditioned(
        gram, prior, *received, result.participation[2], prior_mean
    )
    np.testing.assert_allclose(result.mean[2], mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(result.covariance[2], covariance, rtol=1e-6, atol=1e-12)


MATRIX = np.eye(5) + 0.3 * np.random.default_rng(1).standard_normal((5, 5))
CENTRE = np.array([3.0, -2.0, 0.0, 40.0, -7.0])
SPACES = {
    "none": None,
    "whitened": coordinates(MATRIX, 1.0),
    "matrix": Affine(CENTRE, MATRIX),
    "scales": Affine(CENTRE, np.array([0.1, 2.0, 1.0, 30.0, 0.5])),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_covariance_is_mapped_without_the_centre(posterior, trace, name):
    """Against finite differences of the map, and the covariance of mapped draws."""
    space = SPACES[name]
    moments = wflmc.Moments(posterior.hessian.sum(0) - np.eye(5), np.eye(5), 1200)
    inside = wflmc.noise_aware(trace, moments, draws=2000)
    result = wflmc.noise_aware(trace, moments._replace(coordinates=space), draws=2000)
    jacobian = np.eye(5)
    if space is not None:
        jacobian = np.asarray(
            space.parameters(np.eye(5)) - space.parameters(np.zeros((5, 5)))
        ).T
    np.testing.assert_allclose(
        result.covariance,
        jacobian @ inside.covariance @ jacobian.T,
        rtol=1e-8,
        atol=1e-12,
    )
    np.testing.assert_array_equal(result.covariance, result.covariance.swapaxes(1, 2))
    assert np.all(np.linalg.eigvalsh(result.covariance) > 0)
    deviation = np.sqrt(np.diagonal(result.covariance, axis1=1, axis2=2))
    ratio = result.draws.std(1) / deviation
    np.testing.assert_allclose(ratio, 1, atol=5 / np.sqrt(2 * 2000))


@full
def test_noise_alone_moves_it_around_the_posterior(posterior, trace):
    """Over chains its mean errs by the noise that it states, with all its rounds or some of them."""
    output = wflmc.noise_aware(trace, posterior)
    hessian = posterior.hessian.sum(0)
    error = (
        (output.mean - posterior.exact.mean) @ hessian / np.sqrt(output.noise)[:, None]
    )
    assert abs(np.mean(error**2) - 1) < 4 * np.sqrt(2 / error.size) + 0.05
    assert np.abs(error.mean(0)).max() < 4 / np.sqrt(len(error))
    assert np.all(output.bias < 0.5)


def test_it_is_in_parameters_whatever_the_chain_moves_in(posterior):
    W = np.eye(5) + 0.2 * np.random.default_rng(0).standard_normal((5, 5))
    whitened = posterior.whitened(W)
    (plan,) = make_plans(whitened, 15)
    trace = wflmc.sample(jax.random.key(1), whitened, plan, 20, transcript=True)
    output = wflmc.noise_aware(trace, whitened)
    transcript = trace.transcript
    used = output.used[:, 3]
    c = 3
    # Brute force in the coordinates of the chain, then moved.
    space = whitened.coordinates
    gram = whitened.hessian.sum(0) - space.precision
    parts = (
        np.asarray(values[used, c], float)
        for values in (transcript.position, transcript.gradient, transcript.noise)
    )
    mean, covariance = conditioned(
        gram, space.precision, *parts, output.participation[c]
    )
    np.testing.assert_allclose(output.mean[c], W.T @ mean, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(
        output.covariance[c], W.T @ covariance @ W, rtol=1e-5, atol=1e-9
    )
    assert np.abs(output.mean - posterior.exact.mean).mean() < 0.1


def test_the_expected_share_of_clipped_gradients_is_that_of_simulated_devices(
    posterior,
):
    rng = np.random.default_rng(0)
    gram = 1200 * np.eye(5)
    prior = np.eye(5)
    moments = wflmc.Moments(gram, prior, 1200)
    data_shares = np.full(30, 1 / 30)
    for distance, tolerance in ((0.0, 0.01), (0.4, 0.05), (0.7, 0.1), (1.5, 0.04)):
        position = np.zeros((1, 1, 5))
        position[..., 0] = distance
        unit = np.ones((1, 1))
        zero = np.zeros((1, 1, 5))
        reception = conditioning._Reception(
            position, zero, unit, np.ones((1, 1, 30)), np.full(30, 30.0), data_shares
        )
        clipped, bias = reception.clipping(moments, np.zeros((1, 5)))
        features = rng.standard_normal((4000, 40, 5))
        residual = features @ position[0, 0] + rng.standard_normal((4000, 40))
        gradient = np.einsum("kn,knm->km", residual, features) + position[0, 0] / 30
        length = np.linalg.norm(gradient, axis=1)
        assert clipped[0, 0] == pytest.approx(np.mean(length > 30), abs=tolerance)
        shortened = 30 * np.linalg.norm(
            np.mean(gradient * np.minimum(1, 30 / length)[:, None] - gradient, axis=0)
        )
        assert shortened < 1.1 * bias[0, 0] + 1


@full
def test_rounds_that_are_clipped_are_left_out(posterior):
    privacy = wflmc.Privacy(epsilon=8, delta=0.01, clip=30)
    step = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(posterior, LINK, privacy, step_size=step, burn_in=30, samples=10)
    trace = wflmc.sample(
        jax.random.key(2), posterior, plan, 20, transcript=True, keep_burn_in=True
    )
    output = wflmc.noise_aware(trace, posterior)
    rate = np.concatenate([trace.warmup_clip_rate, trace.clip_rate], axis=1).T
    assert rate[~output.used].mean() > 0.8 > 0.05 > rate[output.used].mean()
    assert output.used[30:].mean() > 0.95


@full
def test_unknown_moments_cost_little_and_known_ones_are_their_limit(posterior, trace):
    gram = posterior.hessian.sum(0) - np.eye(5)
    known = wflmc.noise_aware(trace, wflmc.Moments(gram, np.eye(5), 1200))
    sure = wflmc.noise_aware(
        trace, wflmc.Moments(gram, np.eye(5), 1200, 1e-3), draws=4000
    )
    assert (known.method, sure.method) == ("known moments", "uncertain moments")
    assert known.not_covered == sure.not_covered == ()
    np.testing.assert_allclose(sure.mean, known.mean, atol=1e-4)
    np.testing.assert_allclose(sure.covariance, known.covariance, atol=5e-6)
    np.testing.assert_allclose(
        sure.draws.mean(1), known.mean, atol=5 * np.sqrt(known.covariance.max() / 4000)
    )
    guessed = wflmc.Moments(
        1200 * np.eye(5),
        np.eye(5),
        1200,
        np.sqrt(1200) * (1 + (2**0.5 - 1) * np.eye(5)),
    )
    wide = wflmc.noise_aware(trace, guessed, draws=2000)
    ratio = np.diagonal(wide.covariance, axis1=1, axis2=2) / np.diagonal(
        known.covariance, axis1=1, axis2=2
    )
    assert 0.9 < ratio.mean() < 1.15
    assert np.abs(wide.mean - known.mean).mean() < 0.2 * np.sqrt(known.covariance.max())


@pytest.mark.parametrize("prior_mean", [0.0, -1.5])
def test_uncertain_moments_against_a_grid(prior_mean):
    """One parameter: the joint posterior of (G, b, θ) on a grid of G, with nothing in closed form but b."""
    rng = np.random.default_rng(0)
    theta = rng.normal(0.5, 0.5, 8)
    noise = 400.0
    received = (110 + 1) * theta - 70 - prior_mean + rng.normal(0, noise**0.5, 8)
    shape = (8, 1, 1)
    transcript = Transcript(
        theta.reshape(shape),
        received.reshape(shape),
        np.full((8, 1), noise),
        np.arange(8),
        8,
    )
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=2, examples=100, dim=1
    )
    plan = wflmc.plan(
        posterior, LINK, wflmc.Privacy(clip=1e6), step_size=1e-3, burn_in=0, samples=8
    )
    plan = plan.with_rounds(weight=np.ones((8, 2)))
    trace = replace(
        wflmc.sample(jax.random.key(0), posterior, plan, 1),
        transcript=transcript,
        plans=(plan,),
    )
    moments = wflmc.Moments(
        np.full((1, 1), 100.0),
        np.eye(1),
        100,
        20.0,
        prior_linear=np.array([prior_mean]),
    )
    output = wflmc.noise_aware(trace, moments, draws=10_000)
    grid = np.linspace(1, 250, 500)
    prior = stats.norm.logpdf(grid, 100, 20)
    middle = received.mean()
    V = noise / 8
    likelihood = prior.copy()
    for g, row in enumerate(grid):
        # The covariance with θ ~ N(prior mean, 1) and b|θ integrated out.
        covariance = noise * np.eye(8) + row**2 + row
        expected = (row + 1) * (theta - prior_mean)
        likelihood[g] += stats.multivariate_normal.logpdf(
            received, expected, covariance
        )
    chance = np.exp(likelihood - likelihood.max())
    chance /= chance.sum()
    precision = 1 + grid**2 / (grid + V)
    linear = (grid + 1) * theta.mean() - middle - prior_mean
    mean = (grid / (grid + V) * linear + prior_mean) / precision
    expected = chance @ mean
    variance = chance @ (1 / precision + mean**2) - expected**2
    assert output.mean[0, 0] == pytest.approx(expected, abs=0.03 * variance**0.5)
    assert output.covariance[0, 0, 0] == pytest.approx(variance, rel=0.05)


@full
def test_a_local_quadratic_moves_draws_of_a_softmax_model():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((600, 2))
    y = (rng.random(600) < 1 / (1 + np.exp(-2 * X[:, 0]))).astype(int)
    posterior = wflmc.softmax_regression(jax.random.key(0), devices=5, X=X, y=y)
    privacy = wflmc.Privacy(epsilon=8, delta=0.01, clip=60)
    plan = wflmc.plan(
        posterior, LINK, privacy, step_size=0.5 / posterior.L, burn_in=40, samples=40
    )
    trace = wflmc.sample(jax.random.key(1), posterior, plan, 12, transcript=True)
    output = wflmc.noise_aware(trace, posterior)
    law = wflmc.evaluation.wasserstein.laplace_law(posterior)
    assert output.method == "local quadratic"
    assert output.not_covered
    assert wflmc.noise_aware(trace, posterior, public=True).not_covered == ()
    deviation = np.sqrt(np.diagonal(output.covariance, axis1=1, axis2=2))
    np.testing.assert_allclose(
        (output.draws.mean(1) - output.mean) / deviation, 0, atol=5 / np.sqrt(1000)
    )
    moments = conditioning.moments_of(posterior, trace)
    total = jax.jacfwd(lambda theta: posterior.gradients(theta).sum(0))
    exact = np.asarray(total(np.asarray(trace.theta[3].mean(0), np.float32)))
    np.testing.assert_allclose(
        moments.gram[3] + moments.prior, exact, atol=0.01 * exact.max()
    )
    far, near = (
        np.mean((mean - law.mean) ** 2) for mean in (trace.theta.mean(1), output.mean)
    )
    spread = np.mean(np.diagonal(law.covariance))
    assert near < far + 0.3 * spread
    lower, upper = output.interval(0.9)
    assert np.all(lower < upper)


RECORDS = 300
KEPT_ROUNDS = 10
BURN_IN = 10
TRUTH = np.array([1.0, 2.0, np.log(0.5)])
"""Level, slope and log sigma of a regression, in the order of the flat parameters."""
SCALES = np.array([0.5, 0.5, 0.5**0.5]) / RECORDS**0.5
"""Posterior deviations of these, by the Fisher information."""
START = TRUTH + 3 * SCALES
PRIOR_MEAN = np.array([0.0, 0.0, -0.5])
PRIOR_STD = 3.0
STEP_SIZE = 0.2


def simulate_records(rng):
    x = rng.standard_normal(RECORDS)
    return x, TRUTH[0] + TRUTH[1] * x + np.exp(TRUTH[2]) * rng.standard_normal(RECORDS)


def slope_of_cost(theta, x, y):
    """The gradient of −log p(θ|x, y), by hand: [m]."""
    precision = np.exp(-2 * theta[2])
    residual = y - theta[0] - theta[1] * x
    of_weights = -precision * np.array([residual.sum(), residual @ x])
    of_scale = RECORDS - precision * residual @ residual
    return np.append(of_weights, of_scale) + (theta - PRIOR_MEAN) / PRIOR_STD**2


def log_likelihood(parameters, record):
    x, y = record
    mean = parameters["weight"][0] + parameters["weight"][1] * x
    return (
        -0.5 * ((y - mean) * jnp.exp(-parameters["width"])) ** 2 - parameters["width"]
    )


def log_prior(parameters):
    flat = jnp.append(parameters["weight"], parameters["width"])
    return -0.5 * jnp.sum((flat - PRIOR_MEAN) ** 2) / PRIOR_STD**2


def constrain(parameters):
    return {"weight": parameters["weight"], "sigma": jnp.exp(parameters["width"])}


SITES = Sites(
    constrain=constrain, dims={"weight": ["term"]}, coords={"term": ["level", "slope"]}
)
"""As the adapter of NumPyro makes them."""


@pytest.fixture(scope="module")
def regression():
    """A custom model whose chains move in scaled coordinates around a public guess."""
    return wflmc.posterior_from(
        log_likelihood,
        log_prior,
        simulate_records(np.random.default_rng(0)),
        initial={"weight": START[:2], "width": START[2]},
        devices=3,
        mu=1.0,
        L=2.0,
        preconditioner=SCALES,
    )


@pytest.fixture(scope="module")
def regression_plan(regression):
    privacy = wflmc.Privacy(clip=1e6)
    rounds = {"step_size": STEP_SIZE, "burn_in": BURN_IN, "samples": KEPT_ROUNDS}
    return wflmc.plan(
        regression, LINK, privacy, **rounds, initial_w2_sq=1.0
    ).with_rounds(weight=np.ones((20, 3)))


def run_chain(regression, plan, rng, start=0.0):
    """A data set and a chain on it with the noise that Langevin sampling needs, without any of the library's code."""
    x, y = simulate_records(rng)
    places = np.arange(RECORDS).reshape(3, -1)
    noise = 2 / STEP_SIZE
    phi = np.zeros(3) + start
    positions, gradients = [], []
    for _ in range(BURN_IN + KEPT_ROUNDS):
        gradient = SCALES * slope_of_cost(
            START + SCALES * phi, x, y
        ) + noise**0.5 * rng.standard_normal(3)
        positions.append(phi)
        gradients.append(gradient)
        phi = phi - STEP_SIZE * gradient
    transcript = Transcript(
        position=np.stack(positions)[:, None],
        gradient=np.stack(gradients)[:, None],
        noise=np.full((BURN_IN + KEPT_ROUNDS, 1), noise),
        start=np.arange(BURN_IN + KEPT_ROUNDS),
        rounds=BURN_IN + KEPT_ROUNDS,
    )
    theta = START + SCALES * np.stack([*positions[BURN_IN + 1 :], phi])[None]
    rates = np.zeros((1, KEPT_ROUNDS)), np.zeros(BURN_IN)
    trace = Trace(theta, *rates, warmup=None, plans=(plan,), transcript=transcript)
    return replace(regression, data=(x[places], y[places])), trace


@pytest.fixture(scope="module")
def in_order_of_truth(regression):
    """Where level, slope and log sigma stand among the flat parameters."""
    numbers = regression.model.unflatten(np.arange(3))
    return np.append(numbers["weight"], numbers["width"])


def test_intervals_of_a_custom_model_cover_with_ten_kept_draws(
    regression, regression_plan, in_order_of_truth
):
    """Over data sets, within 3.3 binomial standard errors; errors of the three parameters are nearly independent."""
    data_sets = 120
    rng = np.random.default_rng(3)
    held = {0.9: [], 0.5: []}
    deviations = []
    for _ in range(data_sets):
        posterior, trace = run_chain(regression, regression_plan, rng)
        result = wflmc.noise_aware(trace, posterior)
        for level, hits in held.items():
            lower, upper = (
                ends[0, in_order_of_truth] for ends in result.interval(level)
            )
            hits.append((lower < TRUTH) & (upper > TRUTH))
        deviations.append(
            np.sqrt(np.diagonal(result.covariance[0]))[in_order_of_truth] / SCALES
        )
    for level, hits in held.items():
        error = np.sqrt(level * (1 - level) / (3 * data_sets))
        assert abs(np.mean(hits) - level) < 3.3 * error
    # V is the noise of ten rounds, 1 in units of the posterior's precision: twice the posterior's variance.
    np.testing.assert_allclose(np.mean(deviations, axis=0), 2**0.5, rtol=0.1)


def test_intervals_by_site_are_in_the_space_of_each_site(
    regression, regression_plan, in_order_of_truth
):
    posterior, trace = run_chain(regression, regression_plan, np.random.default_rng(4))
    result = wflmc.noise_aware(
        trace, replace(posterior, model=replace(posterior.model, sites=SITES))
    )
    assert result.method == "local quadratic"
    assert result.draws.shape == (1, 1000, 3)
    assert {name: draws.shape for name, draws in result.sites.items()} == {
        "weight": (1, 1000, 2),
        "sigma": (1, 1000),
    }
    sites = result.interval_by_site(0.9)
    by_site = np.array(
        [
            np.append(sites["weight"][end], np.log(sites["sigma"][end]))
            for end in range(2)
        ]
    )
    flat = np.array([ends[0, in_order_of_truth] for ends in result.interval(0.9)])
    # The standard error of a quantile of 1000 draws, in deviations of a normal law.
    density = stats.norm.pdf(stats.norm.ppf(0.05))
    error = np.sqrt(0.05 * 0.95 / 1000) / density
    deviation = (flat[1] - flat[0]) / (2 * stats.norm.ppf(0.95))
    np.testing.assert_allclose(by_site / deviation, flat / deviation, atol=4.5 * error)
    axes, _ = result.named_draws.variables["weight"]
    assert axes == ("chain", "draw", "term")
    assert result.named_draws.coords["term"] == ["level", "slope"]


def test_intervals_by_site_of_plain_models_are_those_of_theta(posterior, trace):
    result = wflmc.noise_aware(trace, posterior, draws=50)
    (lower, upper) = result.interval_by_site(0.5)["theta"]
    assert lower.shape == upper.shape == result.mean.shape
    assert np.all(lower < upper)


def test_burn_in_is_beyond_the_reach_of_a_local_quadratic(
    regression, regression_plan, in_order_of_truth
):
    """Chains whose weights come from far away, where the gradient of log sigma is that of no quadratic."""
    chains = 60
    rng = np.random.default_rng(5)
    errors = []
    for _ in range(chains):
        posterior, trace = run_chain(
            regression, regression_plan, rng, start=np.array([10.0, 10.0, 0.0])
        )
        result = wflmc.noise_aware(trace, posterior, draws=1)
        assert result.used[:, 0].tolist() == [False] * BURN_IN + [True] * KEPT_ROUNDS
        deviation = np.sqrt(np.diagonal(result.covariance[0]))[in_order_of_truth]
        errors.append((result.mean[0, in_order_of_truth] - TRUTH) / deviation)
    assert np.abs(np.mean(errors, axis=0)).max() < 4 / np.sqrt(chains)


@pytest.mark.parametrize(("level", "fewest"), [(0.9, 19), (0.5, 3), (0.99, 199)])
def test_intervals_of_draws_hold_one_more_draw_as_often_as_they_say(level, fewest):
    """Also for as few draws as there may be, and for a skewed law."""
    rng = np.random.default_rng(0)
    trials = 4000
    draws = rng.exponential(size=(trials, fewest + 1))
    lower, upper = conditioning.exchangeable_interval(draws[:, :-1], level)
    coverage = np.mean((lower < draws[:, -1]) & (draws[:, -1] < upper))
    assert abs(coverage - level) < 4 * np.sqrt(level * (1 - level) / trials)
    with pytest.raises(wflmc.InputError) as refused:
        conditioning.exchangeable_interval(draws[:, 2:], level)
    assert refused.value.key == "draws"


def test_a_level_out_of_range_is_refused(posterior, trace):
    result = wflmc.noise_aware(trace, posterior, draws=20)
    for intervals in (result.interval, result.interval_by_site):
        with pytest.raises(wflmc.InputError) as refused:
            intervals(1.0)
        assert refused.value.key == "level"


@full
def test_a_direction_without_curvature_is_refused(regression, regression_plan):
    _, trace = run_chain(regression, regression_plan, np.random.default_rng(4))
    flat = wflmc.posterior_from(
        lambda parameters, record: log_likelihood(
            {**parameters, "width": TRUTH[2]}, record
        ),
        lambda parameters: 0.0,
        simulate_records(np.random.default_rng(0)),
        initial={"weight": START[:2], "width": START[2]},
        devices=3,
        mu=1.0,
        L=2.0,
        preconditioner=SCALES,
    )
    with pytest.raises(wflmc.InputError) as refused:
        wflmc.noise_aware(trace, flat)
    assert refused.value.key == "posterior"


@full
def test_a_numpyro_model_has_its_sites():
    numpyro = pytest.importorskip("numpyro", reason="pip install numpyro")
    dist = pytest.importorskip("numpyro.distributions")
    pytest.importorskip("arviz")

    def model(x, y):
        with numpyro.plate("term", 2):
            weight = numpyro.sample("weight", dist.Normal(0, 5))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("records", len(x)):
            numpyro.sample("y", dist.Normal(weight[0] + weight[1] * x, sigma), obs=y)

    x, y = simulate_records(np.random.default_rng(0))
    labels = {"term": ["level", "slope"]}
    posterior = wflmc.from_numpyro(model, {"x": x, "y": y}, devices=3, coords=labels)
    privacy = wflmc.Privacy(
        epsilon=4, delta=1e-5, clip=10, unit="record", example_clip=0.5
    )
    trace = wflmc.sample(
        jax.random.key(1),
        posterior,
        wflmc.plan(posterior, LINK, privacy),
        3,
        transcript=True,
    )
    result = wflmc.noise_aware(trace, posterior)
    assert np.all(np.linalg.eigvalsh(result.covariance) > 0)
    np.testing.assert_array_equal(result.covariance, result.covariance.swapaxes(1, 2))
    deviation = np.sqrt(np.diagonal(result.covariance, axis1=1, axis2=2))
    np.testing.assert_allclose(
        result.draws.std(1) / deviation, 1, atol=5 / np.sqrt(2 * 1000)
    )
    lower, upper = result.interval_by_site(0.9)["sigma"]
    assert np.all((lower > 0) & (lower < upper))
    assert result.interval_by_site(0.9)["weight"][0].shape == (3, 2)
    ours = result.to_arviz().posterior
    theirs = trace.to_arviz(posterior).posterior
    assert set(ours.data_vars) == set(theirs.data_vars) == {"weight", "sigma"}
    assert {name: ours[name].dims for name in ours.data_vars} == {
        name: theirs[name].dims for name in ours.data_vars
    }
    assert (
        ours["term"].values.tolist() == theirs["term"].values.tolist() == labels["term"]
    )
    assert np.all(ours["sigma"].values > 0)


def test_what_is_not_a_transcript_is_refused(posterior, trace):
    with raises_input_error("trace", "transcript=True"):
        wflmc.noise_aware(replace(trace, transcript=None), posterior)
    with raises_input_error("posterior"):
        wflmc.noise_aware(trace, "posterior")
    with raises_input_error("posterior", "linear regression"):
        simulated_coverage(jax.random.key(0), "posterior", [trace.plan], 10)


@pytest.mark.parametrize(
    ("key", "moments", "draws"),
    [
        ("gram", {"gram": np.eye(2)}, 50),
        ("prior", {"prior": np.ones(5)}, 50),
        ("deviation", {"deviation": 0.0}, 50),
        ("deviation", {"deviation": np.nan}, 50),
        ("deviation", {"deviation": np.ones(5)}, 50),
        ("draws", {"deviation": 1.0}, 1),
        ("draws", {}, 0),
    ],
)
def test_moments_that_cannot_be_are_refused(trace, key, moments, draws):
    known = wflmc.Moments(1200 * np.eye(5), np.eye(5), 1200)
    with pytest.raises(wflmc.InputError) as refused:
        wflmc.noise_aware(trace, known._replace(**moments), draws=draws)
    assert refused.value.key == key


def test_a_deviation_that_leaves_no_curvature_is_refused(posterior):
    """One round says nothing of G: its draws are those of the deviation alone."""
    plan = make_plans(posterior, 4, burn_in=0, samples=1)[0]
    trace = wflmc.sample(jax.random.key(1), posterior, plan, 2, transcript=True)
    moments = wflmc.Moments(1200 * np.eye(5), np.eye(5), 1200, deviation=1e9)
    with pytest.raises(wflmc.InputError) as refused:
        wflmc.noise_aware(trace, moments, draws=50)
    assert refused.value.key == "deviation"


@full
def test_draws_go_to_arviz(posterior, trace):
    pytest.importorskip("arviz")
    output = wflmc.noise_aware(trace, posterior, draws=50)
    data = output.to_arviz().posterior
    assert data.theta.shape == (60, 50, 5)
    assert "private data" in data.attrs["not_covered"]


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 15.0] if FULL else [4.0])
def test_intervals_hold_what_they_say(posterior, epsilon):
    """Simulation-based calibration, with plans made for transcripts."""
    count = 2000 if FULL else 200
    coverage = simulated_coverage(
        jax.random.key(7), posterior, make_plans(posterior, epsilon, 5), count
    )
    for level, covered, error in zip(
        (0.9, 0.5), coverage.noise_aware, coverage.error, strict=True
    ):
        assert abs(covered - level) < 3 * error + 0.015
    assert coverage.chain[0] != pytest.approx(0.9, abs=0.02) or epsilon > 8


@full
def test_public_moments_cover_too(posterior):
    guessed = wflmc.Moments(
        1200 * np.eye(5),
        np.eye(5),
        1200,
        np.sqrt(1200) * (1 + (2**0.5 - 1) * np.eye(5)),
    )
    count = 500 if FULL else 60
    coverage = simulated_coverage(
        jax.random.key(8), posterior, make_plans(posterior, 4, 5), count, guessed
    )
    for level, covered, error in zip(
        (0.9, 0.5), coverage.noise_aware, coverage.error, strict=True
    ):
        assert abs(covered - level) < 3 * error + 0.02


def test_the_output_tells_a_changed_device_no_better_than_promised():
    """Attack the noise-aware output with the likelihood ratio of its mean, on data that differ in one whole device."""
    rng = np.random.default_rng(0)
    trials = 20_000 if FULL else 1000
    X, y = rng.standard_normal((40, 2)), rng.standard_normal(40)
    devices = np.repeat(np.arange(4), 10)
    sides = []
    for sign in (1.0, -1.0):
        changed_X, changed = X.copy(), y.copy()
        changed_X[:10] = [1.0, 0.0]
        changed[:10] = 1e3 * sign
        sides.append(
            wflmc.gaussian_regression(
                jax.random.key(0), 4, X=changed_X, y=changed, partition=devices
            )
        )
    privacy = wflmc.Privacy(epsilon=1.0, delta=0.01, clip=5)
    policy = wflmc.Policy(objective="transcript", schedule="all")
    step = 0.2 / sides[0].L
    link = wflmc.Link(wflmc.channel.static(), snr_db=40)
    plan = wflmc.plan(
        sides[0], link, privacy, step_size=step, burn_in=0, samples=8, policy=policy
    )
    assert isinstance(sides[0], GaussianPosterior)
    moments = wflmc.Moments(40 * np.eye(2), np.eye(2), 40)
    output = []
    for key, side in zip((1, 2), sides, strict=True):
        trace = wflmc.sample(jax.random.key(key), side, plan, trials, transcript=True)
        output.append(wflmc.noise_aware(trace, moments, draws=1).mean[:, 0])
    # Half of the trials choose the threshold, the others count; Clopper-Pearson at 99 %.
    half = trials // 2
    best = -np.inf
    cuts = np.quantile(
        np.concatenate([statistic[:half] for statistic in output]),
        np.linspace(0.02, 0.98, 49),
    )
    best = cuts[
        np.argmax(
            [
                np.mean(output[0][:half] > cut) - np.mean(output[1][:half] > cut)
                for cut in cuts
            ]
        )
    ]
    hits, misses = (int(np.sum(statistic[half:] > best)) for statistic in output)
    low = stats.beta.ppf(0.005, hits, half - hits + 1)
    high = stats.beta.ppf(0.995, misses + 1, half - misses)
    assert low - 0.01 <= np.exp(1.0) * high
    # The attack sees something: the output is not mere noise.
    assert hits / half > misses / half + 0.1
