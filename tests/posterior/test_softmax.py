"""Softmax regression against automatic differentiation, quadrature, and its own definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from wflmc.posterior import softmax
from wflmc.posterior.softmax import synthetic_labels
from wflmc.sums import reference
from wflmc.sums import softmax as softmax_sums
from wflmc.support.errors import InputError

from ..conftest import FULL, count
from ..sampling.compile_tools import clipped_sum, clipped_sums, gradients

CASES = [("iid", 6), ("by-label", 4), ("dirichlet:0.3", 5), ("blocks", 1)]


def data_of(examples=60, dim=3, classes=4, seed=0):
    return synthetic_labels(jax.random.key(seed), examples, dim, classes)


def held_by(posterior, X):
    """Which examples every device holds, [K, N], found again among the rows of its padded block."""
    blocks = zip(posterior.features, posterior.sizes, strict=True)
    return np.array(
        [[(row == rows[:size]).all(1).any() for row in X] for rows, size in blocks]
    )


def cost(theta, rows, labels, held, devices, prior_std):
    """f_k = −log p(D_k|θ) − log p(θ)/K of the rows that are held, written out."""
    logits = rows @ theta.reshape(-1, rows.shape[1]).T
    log_likelihoods = jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]
    return -jnp.sum(held * log_likelihoods) + 0.5 * jnp.sum(theta**2) / (
        devices * prior_std**2
    )


gradient_of_cost = jax.jit(jax.grad(cost))


@pytest.mark.parametrize(("partition", "devices"), CASES)
def test_gradients_are_those_of_the_written_out_cost(partition, devices):
    X, y = data_of()
    posterior = wflmc.softmax_regression(
        jax.random.key(0), devices, X=X, y=y, partition=partition, prior_std=0.7
    )
    assert posterior.sizes.sum() == 60
    theta = jax.random.normal(jax.random.key(1), (posterior.dim,))
    held = held_by(posterior, X)
    np.testing.assert_array_equal(held.sum(1), posterior.sizes)
    expected = np.stack(
        [
            gradient_of_cost(theta, X, y, rows, devices, 0.7)
            for rows in held.astype(float)
        ]
    )
    np.testing.assert_allclose(gradients(posterior, theta), expected, atol=2e-4)
    weight = np.linspace(0, 2, devices) if devices > 1 else np.ones(1)
    clip = np.full(devices, float(np.median(np.linalg.norm(expected, axis=1))))
    total, norm = clipped_sum(posterior, theta, jnp.asarray(weight), jnp.asarray(clip))
    lengths = np.linalg.norm(expected, axis=1)
    clipped = reference.clip_vectors(expected, clip)
    np.testing.assert_allclose(norm, lengths, rtol=1e-4)
    np.testing.assert_allclose(
        total, reference.device_clipped_sum(expected, weight, clip), atol=5e-4
    )
    for k in range(devices) if FULL else {0, devices - 1}:
        alone, _ = clipped_sum(
            posterior.device(k), theta, jnp.ones(1), jnp.asarray(clip[k : k + 1])
        )
        np.testing.assert_allclose(alone, clipped[k], atol=2e-4)


@pytest.mark.parametrize("block", [1, 3])
# Logits up to 2, 20, 1e3 and 1e7.
@pytest.mark.parametrize("size", [0.3, 3.0, 100.0, 1e6])
def test_gradients_of_logits_of_any_size(size, block):
    X, y = (np.asarray(values) for values in data_of(dim=4, classes=5))
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 3, X=X, y=y, partition="blocks"
    )
    theta = size * np.random.default_rng(2).standard_normal((2, posterior.dim)).astype(
        np.float32
    )
    held = [
        jnp.asarray(values.reshape(-1, block, *values.shape[1:]))
        for values in (posterior.features, y.reshape(3, -1))
    ]
    columns = softmax_sums.columns_of(jnp.asarray(theta), 4)
    compiled = jax.jit(softmax_sums.likelihood_gradients)
    actual = np.concatenate(
        [compiled(*data, columns) for data in zip(*held, strict=True)]
    )
    rows = np.asarray(posterior.features, np.float64)
    labels = y.reshape(3, -1)
    logits = np.einsum("knd,dcx->kncx", rows, np.asarray(columns, np.float64))
    residual = np.stack(
        [
            reference.softmax_residuals(chain, rows, labels, classes=5)
            for chain in theta
        ],
        axis=-1,
    )
    expected = np.einsum("knd,kncx->kdcx", rows, residual)
    # A logit of float32 is off by some 2⁻²³ of its size, and a probability by a quarter of that.
    np.testing.assert_allclose(
        actual, expected, atol=2e-5 + 5e-7 * min(np.abs(logits).max(), 40.0) * 20
    )


@pytest.mark.skipif(
    not FULL,
    reason="other tests compare several chains with one: make test-full runs it",
)
def test_chains_together_are_chains_one_by_one():
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 5, examples=40, dim=3, classes=3
    )
    theta = jax.random.normal(jax.random.key(1), (7, posterior.dim))
    weight = jax.random.uniform(jax.random.key(2), (7, 5))
    clip = 1 + jax.random.uniform(jax.random.key(3), (7, 5))
    together = clipped_sums(posterior, theta, weight, clip)
    shared = jax.jit(lambda p, *a: jax.vmap(p.clipped_sum, (0, None, None))(*a))(
        posterior, theta, weight[0], clip[0]
    )
    for c in range(7):
        for actual, expected in zip(
            together, clipped_sum(posterior, theta[c], weight[c], clip[c]), strict=True
        ):
            np.testing.assert_allclose(actual[c], expected, rtol=1e-4, atol=1e-4)
        for actual, expected in zip(
            shared, clipped_sum(posterior, theta[c], weight[0], clip[0]), strict=True
        ):
            np.testing.assert_allclose(actual[c], expected, rtol=1e-4, atol=1e-4)


def test_chains_that_no_cache_holds_are_taken_some_at_a_time():
    """More than 64 chains of many parameters and devices of few rows; the last ones do not fill a part."""
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 3, examples=6, dim=9000, classes=2, partition="blocks"
    )
    theta = jax.random.normal(jax.random.key(1), (130, posterior.dim)) / 9000**0.5
    weight, clip = jnp.arange(1.0, 4.0), jnp.full(3, 20.0)
    sums, norms = jax.jit(lambda p, *a: jax.vmap(p.clipped_sum, (0, None, None))(*a))(
        posterior, theta, weight, clip
    )
    assert (sums.shape, norms.shape) == (theta.shape, (130, 3))
    for c in (0, 63, 64, 129):
        expected, lengths = clipped_sum(posterior, theta[c], weight, clip)
        np.testing.assert_allclose(sums[c], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(norms[c], lengths, rtol=1e-4)


def results_of(jaxpr):
    """The sizes of all arrays that a traced function makes on its way, inner functions and loops included."""
    for equation in jaxpr.eqns:
        yield from (int(np.prod(result.aval.shape)) for result in equation.outvars)
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda value: hasattr(value, "jaxpr"),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from results_of(inner)


@pytest.mark.parametrize("rows", [4, 20])  # a device with few rows, and with many
def test_memory_does_not_grow_with_the_devices(rows):
    """No array of [chains, devices, m] is made: what is larger with more devices are the data and the norms."""

    def memory_of(devices):
        posterior = wflmc.softmax_regression(
            jax.random.key(0),
            devices,
            examples=rows * devices,
            dim=10,
            partition="blocks",
        )
        arguments = (
            jnp.zeros((50, posterior.dim)),
            jnp.ones((50, devices)),
            jnp.ones((50, devices)),
        )
        sums = jax.make_jaxpr(jax.vmap(posterior.clipped_sum))(*arguments)
        all_gradients = jax.make_jaxpr(jax.vmap(posterior.gradients))(arguments[0])
        return max(results_of(sums.jaxpr)), max(results_of(all_gradients.jaxpr))

    ten_devices, many_devices = memory_of(10), memory_of(200)
    assert many_devices[0] - ten_devices[0] < 0.1 * 50 * 200 * 100
    # Were every device's gradient of every chain formed, the test would see it.
    assert many_devices[1] == 50 * 200 * 100


@given(st.integers(0, 10**6), st.floats(0.1, 3), st.floats(0.1, 5))
def test_curvature_lies_between_mu_and_L(seed, prior_std, spread):
    posterior = wflmc.softmax_regression(
        jax.random.key(seed % 7), 3, examples=30, dim=3, classes=3, prior_std=prior_std
    )
    generator = np.random.default_rng(seed)
    theta = spread * generator.standard_normal((3, 3))
    X = posterior.features.reshape(-1, 3)
    p = np.exp(X @ theta.T)
    p /= p.sum(1, keepdims=True)
    inner = p[:, :, None] * np.eye(3) - p[:, :, None] * p[:, None, :]
    hessian = (
        np.einsum("nab,ni,nj->aibj", inner, X, X).reshape(9, 9)
        + np.eye(9) / prior_std**2
    )
    values = np.linalg.eigvalsh(hessian)
    assert posterior.mu * (1 - 1e-9) <= values[0]
    assert values[-1] <= posterior.L * (1 + 1e-9)


def test_permuting_devices_changes_nothing():
    X, y = data_of()
    order = np.concatenate(
        [np.arange(60).reshape(6, 10)[k] for k in (3, 0, 5, 1, 4, 2)]
    )
    first = wflmc.softmax_regression(jax.random.key(0), 6, X=X, y=y, partition="blocks")
    second = wflmc.softmax_regression(
        jax.random.key(0), 6, X=X[order], y=y[order], partition="blocks"
    )
    theta = jax.random.normal(jax.random.key(1), (first.dim,))
    ones = jnp.ones(6)
    clip = jnp.full(6, 2.0)
    np.testing.assert_allclose(
        clipped_sum(first, theta, ones, clip)[0],
        clipped_sum(second, theta, ones, clip)[0],
        atol=1e-4,
    )
    assert (first.mu, first.L) == pytest.approx((second.mu, second.L), rel=1e-9)


def test_the_laplace_estimate():
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 4, examples=400, dim=2, classes=3
    )
    mode, variance = posterior.laplace
    gradient, _ = clipped_sum(
        posterior, jnp.asarray(mode), jnp.ones(4), jnp.full(4, np.inf)
    )
    assert np.linalg.norm(gradient) < 1e-3 * posterior.L
    # The whole Hessian at the mode, by automatic differentiation.
    X, y = data_of(400, 2, 3)
    hessian = jax.jit(jax.hessian(cost))(mode, X, y, np.ones(400), 1, 1.0)
    assert abs((1 / variance).sum() / np.trace(hessian) - 1) < 1e-4
    spread = np.linalg.eigvalsh(np.linalg.inv(hessian))
    whole = mode @ mode + np.sum((1 - np.sqrt(spread)) ** 2)
    assert abs(posterior.initial_w2_sq() / whole - 1) < 0.03
    assert abs(posterior.initial_w2_sq("zero") - mode @ mode - variance.sum()) < 1e-9
    # Hardly any data: the posterior is the prior.
    assert (
        wflmc.softmax_regression(
            jax.random.key(0), 1, X=1e-4 * X[:5], y=y[:5]
        ).initial_w2_sq()
        < 1e-3
    )


def test_chains_reach_the_posterior():
    """Two classes and one feature: mean and covariance by quadrature on a grid."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((12, 1))
    y = (X[:, 0] + 0.5 * generator.standard_normal(12) > 0).astype(int)
    posterior = wflmc.softmax_regression(jax.random.key(0), 3, X=X, y=y)
    axis = np.linspace(-5, 5, 401)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    logits = X @ grid.T[:, None, :].reshape(2, 1, -1).transpose(1, 0, 2).reshape(1, -1)
    logits = logits.reshape(12, 2, -1)
    density = (logits[np.arange(12), y] - np.logaddexp(logits[:, 0], logits[:, 1])).sum(
        0
    ) - 0.5 * (grid**2).sum(1)
    density = np.exp(density - density.max())
    density /= density.sum()
    mean = density @ grid
    covariance = (grid - mean).T @ ((grid - mean) * density[:, None])
    plan = wflmc.plan(
        posterior, wflmc.Link(wflmc.channel.static()), wflmc.Privacy(), step_size=0.01, burn_in=800, samples=1,
        policy=wflmc.Policy(power="noiseless"), initial_w2_sq=1.0,
    )  # fmt: skip
    chains = count(2000, 8000)
    theta = wflmc.sample(jax.random.key(3), posterior, plan, chains=chains).theta[:, 0]
    error = np.sqrt(np.diag(covariance) / chains)
    assert np.all(np.abs(theta.mean(0) - mean) < 4 * error)  # of the start, e⁻⁸ is left
    # The step adds η λ/4 of the variance to it, with curvature λ at most L: here below 4 %.
    np.testing.assert_allclose(
        np.cov(theta.T),
        covariance,
        atol=4 * np.sqrt(2 / chains) * covariance.max() + 0.02,
    )


def test_predictions_are_means_over_draws():
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 2, examples=30, dim=3, classes=4
    )
    theta = (
        np.random.default_rng(0)
        .standard_normal((5, 6, posterior.dim))
        .astype(np.float32)
    )
    features = np.random.default_rng(1).standard_normal((1030, 3))
    predicted = posterior.predict(theta, features)
    logits = np.einsum(
        "nd,abcd->abnc", features, theta.reshape(5, 6, 4, 3).astype(float)
    )
    p = np.exp(logits)
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(predicted, p.mean(1), atol=1e-5)


def test_synthetic_labels_follow_the_model():
    """Draws of the same parameters under another stream, with the frequencies that the softmax gives."""
    X, y = synthetic_labels(jax.random.key(0), 50_000, 2, 3)
    again, _ = synthetic_labels(jax.random.key(0), 50_000, 2, 3, stream="test")
    assert not np.array_equal(X, again)
    posterior = wflmc.softmax_regression(jax.random.key(0), 2, X=X, y=y, prior_std=10)
    p = posterior.predict(posterior.laplace[0][None, None], X)[0]
    for c in range(3):
        error = np.sqrt((p[:, c] * (1 - p[:, c])).sum())
        assert abs((y == c).sum() - p[:, c].sum()) < 4 * error
    # Bins of the predicted probability hold as many of the class as they say.
    near = (p[:, 0] > 0.6) & (p[:, 0] < 0.7)
    assert abs((y[near] == 0).mean() - p[near, 0].mean()) < 4 * np.sqrt(
        0.25 / near.sum()
    )


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"y": [0, 1, 2.5]}, "data"),
        ({"y": [0, 0, 0]}, "data"),
        ({"y": [0, 1]}, "data"),
        ({"y": None}, "y"),
        ({"prior_std": 0.0}, "prior_std"),
        ({"partition": "by-size"}, "partition"),
        ({"X": np.full((3, 2), 1e200)}, "data"),
    ],
)
def test_bad_input(keywords, key):
    arguments = {"X": np.ones((3, 2)), "y": [0, 1, 2], **keywords}
    with pytest.raises(InputError) as caught:
        wflmc.softmax_regression(jax.random.key(0), 2, **arguments)
    assert caught.value.key == key


@pytest.mark.parametrize("examples", [6, 60])
def test_a_posterior_for_each_chain(examples):
    """`vmap` over posteriors, with few rows a device and with many."""
    both = [
        wflmc.softmax_regression(
            jax.random.key(s), 2, examples=examples, dim=3, classes=4
        )
        for s in (0, 1)
    ]
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *both
    )
    theta = jnp.ones((2, 12))
    weight = jnp.ones(2)
    clip = jnp.full(2, 3.0)
    actual = jax.jit(jax.vmap(lambda p, t: p.clipped_sum(t, weight, clip)))(
        stacked, theta
    )
    for c, posterior in enumerate(both):
        for part, expected in zip(
            actual, clipped_sum(posterior, theta[c], weight, clip), strict=True
        ):
            np.testing.assert_allclose(part[c], expected, rtol=1e-4, atol=1e-5)


def test_large_features_stay_float32_and_their_curvature_is_found_without_second_moments(
    monkeypatch,
):
    X, y = data_of(500, 20)
    arguments = {
        "X": X.astype(np.float32),
        "y": y,
        "classes": 4,
        "intercept": True,
        "partition": "blocks",
    }
    dense = wflmc.softmax_regression(jax.random.key(0), 5, **arguments)
    assert dense.features.dtype == np.float32
    whitened = dense.whitened(np.diag(np.linspace(0.5, 2, 21)))
    monkeypatch.setattr(softmax, "LANCZOS_FEATURES", 0)
    large = wflmc.softmax_regression(jax.random.key(0), 5, **arguments)
    assert np.array_equal(large.features, dense.features)
    assert dense.L * (1 - 1e-6) <= large.L <= 1.01 * dense.L
    again = large.whitened(np.diag(np.linspace(0.5, 2, 21)))
    assert whitened.L * (1 - 1e-6) <= again.L <= 1.01 * whitened.L


@pytest.mark.parametrize("rows", [3, 30, 700, 1500] if FULL else [3, 1500])
def test_norms_of_rows_that_are_known_change_nothing(rows):
    """Clipping examples one by one, with devices of few rows, of one block of records, of several, and by pairs."""
    X, y = data_of(2 * rows, 4)
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 2, X=X, y=y, classes=4, partition="blocks"
    )
    theta = np.random.default_rng(0).standard_normal(posterior.dim).astype(np.float32)
    held = posterior.on_accelerator(1, 2.0**30, by_example=True)
    assert held.norms is not None
    weight = np.ones(2)
    clip = np.array([1e6, 0.05 * rows])
    example_clip = np.full(2, 0.7)
    sums = [
        clipped_sum(model, theta, weight, clip, example_clip=example_clip)[0]
        for model in (posterior, held)
    ]
    records = reference.softmax_record_gradients(theta, X, y, classes=4).reshape(
        2, rows, -1
    )
    expected = reference.record_clipped_sum(
        records, theta / 2, weight=weight, clip=clip, example_clip=example_clip
    )
    for actual in sums:
        np.testing.assert_allclose(
            actual, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max()
        )
