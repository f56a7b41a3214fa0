"""The Gaussian model: gradients, constants, partitions, exact laws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm

import wflmc
from wflmc.posterior import Gaussian, pool, w2_squared
from wflmc.posterior.law import LinearChain
from wflmc.posterior.partition import assign
from wflmc.support.keys import host_generator, named

from ..error_tools import raises_input_error
from ..sampling.compile_tools import clipped_sum

RULES = ["iid", "blocks", "by-label", "dirichlet:0.1", "dirichlet:5"]


def data(seed=0, examples=60, dim=3):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((examples, dim)), generator.standard_normal(
        examples
    )


@pytest.mark.parametrize("prior_std", [1.0, 0.3])
def test_gradients_are_those_of_the_log_density(prior_std):
    """Against automatic differentiation of each device's −log p(D_k|θ) − log p(θ)/K."""
    X, y = data()
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=4, X=X, y=y, partition="blocks", prior_std=prior_std
    )
    theta = jnp.array([0.3, -1.0, 2.0])

    def cost(theta, u, v):
        return jnp.sum((v - u @ theta) ** 2) / 2 + jnp.sum(theta**2) / (
            2 * prior_std**2 * 4
        )

    blocks = zip(np.split(X, 4), np.split(y, 4), strict=True)
    slope = jax.jit(jax.grad(cost))
    expected = np.stack([slope(theta, u, v) for u, v in blocks])
    total, norm = clipped_sum(posterior, theta, jnp.ones(4), jnp.full(4, jnp.inf))
    np.testing.assert_allclose(total, expected.sum(0), rtol=1e-5)
    np.testing.assert_allclose(norm, np.linalg.norm(expected, axis=1), rtol=1e-5)
    for k in range(4):
        alone, _ = clipped_sum(
            posterior.device(k), theta, jnp.ones(1), jnp.full(1, jnp.inf)
        )
        np.testing.assert_allclose(alone, expected[k], rtol=1e-5)


def test_clipping_by_hand():
    """Each device's gradient is scaled onto the ball, the weights act after it, and silent devices are silent."""
    X, y = data()
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=4, X=X, y=y)
    theta = jnp.array([0.3, -1.0, 2.0])
    gradient = np.asarray(posterior.hessian @ theta - posterior.linear)
    norm = np.linalg.norm(gradient, axis=1)
    clip = np.array([norm[0] / 2, norm[1] * 2, norm[2] / 10, norm[3]])
    weight = np.array([2.0, 1.5, 0.0, 1.0])
    total, reported = posterior.clipped_sum(
        theta, jnp.asarray(weight), jnp.asarray(clip)
    )
    expected = 2.0 * gradient[0] / 2 + 1.5 * gradient[1] + gradient[3]
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(reported, norm, rtol=1e-5)


def test_constants_and_posterior_do_not_depend_on_the_partition():
    X, y = data()
    reference = np.linalg.solve(X.T @ X + np.eye(3), X.T @ y)
    eigenvalues = np.linalg.eigvalsh(X.T @ X + np.eye(3))
    for rule in RULES:
        posterior = wflmc.gaussian_regression(
            jax.random.key(3), devices=7, X=X, y=y, partition=rule
        )
        np.testing.assert_allclose(posterior.mean, reference, rtol=1e-10)
        np.testing.assert_allclose(
            posterior.covariance, np.linalg.inv(X.T @ X + np.eye(3)), rtol=1e-10
        )
        assert (posterior.mu, posterior.L) == pytest.approx(
            (eigenvalues[0], eigenvalues[-1])
        )
        assert posterior.sizes.sum() == 60


def test_authors_data(paper_posterior):
    assert paper_posterior.mu == pytest.approx(1147.407, abs=5e-4)
    assert pytest.approx(1360.475, abs=5e-4) == paper_posterior.L
    assert paper_posterior.initial_w2_sq() == pytest.approx(6.6397, abs=5e-5)


def test_the_prior_is_the_start():
    """W2² between N(0, s² I) and the posterior by hand, and draws with that spread."""
    X, y = data()
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=3, X=X, y=y, prior_std=0.4
    )
    spread = np.sqrt(np.linalg.eigvalsh(posterior.covariance))
    expected = np.sum(posterior.mean**2) + np.sum((0.4 - spread) ** 2)
    assert posterior.initial_w2_sq() == pytest.approx(expected, rel=1e-9)
    draws = jax.vmap(posterior.draw_initial)(
        jax.random.split(jax.random.key(1), 20_000)
    )
    assert np.std(np.asarray(draws, dtype=float)) == pytest.approx(
        0.4, rel=4 / np.sqrt(2 * 60_000)
    )


def test_streams_of_one_seed_are_apart():
    """Data, partition, channel, start and noise never share numbers."""
    key = jax.random.key(0)
    sources = {
        "data": host_generator(key, "data"),
        "partition": host_generator(named(key, "data"), "partition"),
        "channel": host_generator(key, "channel"),
    }
    draws = {name: generator.standard_normal(4) for name, generator in sources.items()}
    assert len({tuple(values) for values in draws.values()}) == 3
    h = wflmc.Link(wflmc.channel.rayleigh(), seed=0).gains(1, 2)
    np.testing.assert_allclose(
        np.stack([h.real, h.imag], -1).ravel() * np.sqrt(2), draws["channel"]
    )
    posterior = wflmc.gaussian_regression(key, devices=1, examples=1, dim=4)
    # The stream begins with θ*[4], then u[4]; its outer product and 1 make the Hessian.
    features = host_generator(key, "data").standard_normal(8)[4:]
    np.testing.assert_allclose(
        posterior.hessian[0], np.outer(features, features) + np.eye(4)
    )


def test_overflow_is_reported_as_infinite():
    """A chain that stretches errors diverges; its law must not break the linear algebra."""
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=4, examples=40, dim=3, partition="by-label"
    )
    weight = np.zeros((4000, 4))
    weight[:, 0] = 400.0
    law = posterior.law(np.full(4000, 1.0), weight, np.ones(4000))
    distance = w2_squared(law, posterior.exact)
    assert np.isinf(distance[-1])
    assert np.isfinite(distance[0])
    assert posterior.expansion(1.0, weight) > 1
    assert posterior.expansion(1.9 / posterior.L, np.ones((1, 4))) < 1


def test_synthetic_data_follow_the_recipe():
    posterior = wflmc.gaussian_regression(
        jax.random.key(5), examples=200_000, devices=3
    )
    truth = np.array([0.071, -0.518, 0.9342, 0.7198, 0.4676])
    assert np.all(np.abs(posterior.mean - truth) < 4.5 / np.sqrt(200_000))
    np.testing.assert_allclose(
        posterior.hessian.sum(0) / 200_000, np.eye(5), atol=5 * np.sqrt(2 / 200_000)
    )
    other = wflmc.gaussian_regression(jax.random.key(6), examples=200, devices=3)
    assert not np.allclose(
        other.mean,
        wflmc.gaussian_regression(jax.random.key(5), examples=200, devices=3).mean,
    )


def test_partition_leaves_the_data_alone():
    """Changing who holds what must not redraw the data."""
    first, second = (
        wflmc.gaussian_regression(jax.random.key(0), devices=n, partition=rule)
        for n, rule in [(30, "iid"), (7, "by-label")]
    )
    np.testing.assert_allclose(first.mean, second.mean, rtol=1e-9)


def test_intercept_adds_a_parameter():
    X, y = data()
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=3, X=X, y=y + 5, intercept=True
    )
    assert posterior.dim == 4
    assert posterior.mean[-1] == pytest.approx(5, abs=0.6)


@given(
    st.sampled_from(RULES),
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_every_example_has_one_device_and_every_device_an_example(
    rule, devices, extra, seed, classes
):
    generator = np.random.default_rng(seed)
    size = devices + extra - 1
    labels = (
        generator.integers(0, 10, size).astype(float)
        if classes
        else generator.standard_normal(size)
    )
    owner = assign(rule, labels, devices, generator)
    sizes = np.bincount(owner, minlength=devices)
    assert owner.shape == labels.shape
    assert sizes.size == devices
    assert sizes.min() >= 1
    if not rule.startswith("dirichlet"):
        assert sizes.max() - sizes.min() <= 1


def test_what_each_partition_means():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10.0), 100))
    generator = np.random.default_rng(1)
    assert np.array_equal(
        assign("blocks", labels, 4, generator), np.repeat(np.arange(4), 250)
    )
    by_label = assign("by-label", labels, 10, generator)
    assert all(np.unique(labels[by_label == k]).size == 1 for k in range(10))
    iid = assign("iid", labels, 10, generator)
    assert all(np.unique(labels[iid == k]).size == 10 for k in range(10))

    def classes_per_device(rule):
        owner = assign(rule, labels, 10, generator)
        label_fractions = np.stack(
            [
                np.bincount(labels[owner == k].astype(int), minlength=10)
                / np.sum(owner == k)
                for k in range(10)
            ]
        )
        return np.mean(1 / np.sum(label_fractions**2, axis=1))

    assert (
        classes_per_device("dirichlet:0.05")
        < 3.5
        < 8
        < classes_per_device("dirichlet:100")
    )


@pytest.mark.parametrize(
    "rule",
    [
        "sorted",
        "dirichlet",
        "dirichlet:0",
        "dirichlet:-1",
        "dirichlet:x",
        "dirichlet:inf",
    ],
)
def test_unknown_partitions(rule):
    with raises_input_error("partition", "iid", "by-label", "dirichlet:A", value=rule):
        assign(rule, np.zeros(5), 2, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"devices": 61, "examples": 60}, "devices"),
        ({"devices": 0}, "devices"),
        ({"prior_std": 0.0}, "prior_std"),
        ({"X": np.ones((3, 2))}, "y"),
        ({"X": np.ones((3, 2)), "y": np.ones(4)}, "data"),
        ({"X": np.array([[np.nan]]), "y": np.ones(1), "devices": 1}, "data"),
        ({"dim": 0}, "dim"),
    ],
)
def test_bad_models(arguments, key):
    with pytest.raises(wflmc.InputError) as caught:
        wflmc.gaussian_regression(jax.random.key(0), **arguments)
    assert caught.value.key == key


def random_gaussian(seed, size=4):
    generator = np.random.default_rng(seed)
    root = generator.standard_normal((size, size))
    return Gaussian(
        generator.standard_normal(size), root @ root.T + 0.01 * np.eye(size)
    )


def test_w2_against_matrix_square_roots():
    first, second = random_gaussian(0), random_gaussian(1)
    root = sqrtm(second.covariance)
    cross = sqrtm(root @ first.covariance @ root)
    expected = np.sum((first.mean - second.mean) ** 2) + np.trace(
        first.covariance + second.covariance - 2 * cross
    )
    assert w2_squared(first, second) == pytest.approx(float(expected.real), rel=1e-10)
    assert w2_squared(second, first) == pytest.approx(float(expected.real), rel=1e-9)
    assert w2_squared(first, first) == pytest.approx(0, abs=1e-12)


def test_w2_of_scalars_and_point_masses():
    """In one dimension W2² = (m1−m2)² + (s1−s2)²."""
    law = lambda mean, std: Gaussian(np.array([mean]), np.array([[std**2]]))  # noqa: E731
    assert w2_squared(law(1.0, 2.0), law(4.0, 0.5)) == pytest.approx(9 + 2.25)
    assert w2_squared(law(1.0, 0.0), law(4.0, 0.0)) == pytest.approx(9)


def test_w2_broadcasts():
    first, second = random_gaussian(0), random_gaussian(1)
    stacked = Gaussian(
        np.stack([first.mean, second.mean]),
        np.stack([first.covariance, second.covariance]),
    )
    np.testing.assert_allclose(
        w2_squared(stacked, first), [0, w2_squared(second, first)], atol=1e-12
    )


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("size", [3, 14])
def test_linear_chain_against_a_plain_loop(rounds, size):
    generator = np.random.default_rng(rounds)
    matrix = np.eye(size) - 0.9 / size * generator.random((2, rounds, size, size))
    offset = generator.standard_normal((2, rounds, size))
    variance = generator.random((2, rounds))
    start = random_gaussian(3, size)
    enters, readout = generator.standard_normal((2, size, size))
    other = np.cov(generator.standard_normal((size, 3 * size)))
    result = LinearChain(start, matrix, offset, enters, readout, other).law(variance)
    for b in range(2):
        mean, covariance = start
        for s in range(rounds):
            mean = matrix[b, s] @ mean + offset[b, s]
            covariance = (
                matrix[b, s] @ covariance @ matrix[b, s].T
                + variance[b, s] * enters @ enters.T
                + other
            )
            np.testing.assert_allclose(
                result.mean[b, s], readout @ mean, rtol=1e-9, atol=1e-9
            )
            np.testing.assert_allclose(
                result.covariance[b, s],
                readout @ covariance @ readout.T,
                rtol=1e-9,
                atol=1e-9,
            )


def test_pooled_moments_are_those_of_the_mixture():
    laws = [random_gaussian(seed, 2) for seed in range(3)]
    stacked = Gaussian(
        np.stack([law.mean for law in laws]), np.stack([law.covariance for law in laws])
    )
    pooled = pool(stacked)
    second = np.mean(
        [law.covariance + np.outer(law.mean, law.mean) for law in laws], axis=0
    )
    np.testing.assert_allclose(pooled.mean, stacked.mean.mean(0))
    np.testing.assert_allclose(
        pooled.covariance, second - np.outer(pooled.mean, pooled.mean), atol=1e-12
    )


def test_unbiased_langevin_settles_at_its_known_stationary_law(small):
    """With everyone sending and σ² = 2η, C = 2η (I − A²)⁻¹ and the mean is the posterior's."""
    eta = 0.5 / small.L
    law = small.law(np.full(4000, eta), np.ones((4000, 5)), np.full(4000, 2 * eta))
    step = np.eye(3) - eta * small.hessian.sum(0)
    np.testing.assert_allclose(law.mean[-1], small.mean, rtol=1e-8)
    np.testing.assert_allclose(
        law.covariance[-1], 2 * eta * np.linalg.inv(np.eye(3) - step @ step), rtol=1e-8
    )
