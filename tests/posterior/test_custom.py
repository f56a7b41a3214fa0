"""Models of one's own: against the models that are known exactly, and against quadrature."""

import contextlib
import io
import subprocess
import sys
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.apps.audit import audit_pair
from wflmc.posterior.custom.geometry import MAX_DENSE_DIM
from wflmc.sums import reference

from ..conftest import FULL, count
from ..error_tools import codes_of, missing_facts, text_of
from ..sampling.compile_tools import clipped_sum, gradients
from .custom_tools import (
    GAUSSIAN,
    KEY,
    RAGGED,
    as_custom,
    gaussian_likelihood,
    owners_of,
    rows_of,
)

LINK = wflmc.Link(wflmc.channel.static(power=1.0), snr_db=60)


def softmax_likelihood(parameters, example):
    logits = parameters["classes"] @ example["u"]
    return logits[example["label"]] - jax.nn.logsumexp(logits)


def softmax_prior(parameters):
    return -0.5 * jnp.sum(parameters["classes"] ** 2)


def softmax_as_own(known, **keywords):
    u, label = rows_of(known, known.labels)
    return wflmc.posterior_from(
        softmax_likelihood,
        softmax_prior,
        {"u": u, "label": label},
        initial={"classes": np.zeros((known.classes, u.shape[1]))},
        devices=owners_of(known),
        **keywords,
    )


def normal(*shape):
    """The same numbers in every test, whichever ran before."""
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


SOFTMAX = wflmc.softmax_regression(
    KEY, devices=7, examples=80, dim=4, classes=3, partition=RAGGED
)
PAIRS = {
    "gaussian": (GAUSSIAN, as_custom(GAUSSIAN)),
    "softmax": (SOFTMAX, softmax_as_own(SOFTMAX, mu=1.0, L=50.0)),
}


@pytest.mark.parametrize(
    ("name", "by_example", "by_device", "chains"),
    list(product(PAIRS, [False, True], [False, True], [0, 3]))
    if FULL
    else [("gaussian", False, True, 3), ("softmax", True, False, 3)],
)
def test_clipped_sums_are_those_of_the_known_model(name, by_example, by_device, chains):
    known, custom = PAIRS[name]
    assert np.ptp(known.sizes) > 0
    K, m = known.devices, known.dim
    theta = normal(chains or 1, *([K] if by_device else []), m)
    weight, clip = jnp.linspace(0.0, 1.5, K), jnp.linspace(2.0, 60.0, K)
    example_clip = jnp.linspace(0.2, 3.0, K) if by_example else None

    @jax.jit
    def sums_of(posterior):
        def sum_of_chain(position):
            return posterior.clipped_sum(
                position, weight, clip, example_clip=example_clip
            )

        return (
            jax.vmap(sum_of_chain)(theta)
            if chains
            else sum_of_chain(jnp.asarray(theta[0]))
        )

    sums = sums_of(known)
    for mine in (
        custom,
        custom.on_accelerator(3, 1e9, by_example),
        replace(custom, block=1).on_accelerator(3, 1.0, by_example),
    ):
        for actual, expected in zip(sums_of(mine), sums, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


def test_examples_a_few_at_a_time_give_the_same(monkeypatch):
    _, custom = PAIRS["softmax"]
    arguments = normal(custom.dim), jnp.ones(7), jnp.full(7, 5.0)
    for by_example in (False, True):
        # No key, and the clip of an example.
        record_arguments = (None, jnp.full(7, 0.8)) if by_example else ()
        whole = clipped_sum(custom, *arguments, *record_arguments)
        monkeypatch.setattr(
            "wflmc.posterior.custom.posterior.MAX_EXAMPLE_BYTES",
            3 * custom._bytes_per_example(by_example),
        )
        blocked = custom.on_accelerator(1, 1e9, by_example)
        assert blocked.example_block == 3
        assert jax.tree.leaves(blocked.data)[0].shape[1] % 3 == 0
        monkeypatch.undo()
        for actual, expected in zip(
            clipped_sum(blocked, *arguments, *record_arguments), whole, strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_norms_and_single_devices(name):
    known, custom = PAIRS[name]
    theta = normal(2, known.dim)
    np.testing.assert_allclose(
        gradients(custom, theta[0]), gradients(known, theta[0]), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        custom.example_norms(theta), known.example_norms(theta), rtol=1e-4, atol=1e-5
    )
    ones = jnp.ones(1)
    for index in (0, known.devices - 1):
        actual = clipped_sum(custom.device(index), theta[0], ones, 5 * ones)
        expected = clipped_sum(known.device(index), theta[0], ones, 5 * ones)
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4, atol=1e-4)


def test_estimates_are_the_hessians_eigenvalues():
    custom = PAIRS["gaussian"][1]
    assert custom.estimated == ("mu", "L")
    assert custom.mu == pytest.approx(GAUSSIAN.mu, rel=1e-4)
    assert pytest.approx(GAUSSIAN.L, rel=1e-4) == custom.L
    for init in ("prior", "zero"):  # the start is a point at zero either way
        assert custom.initial_w2_sq(init) == pytest.approx(
            GAUSSIAN.initial_w2_sq("zero"), rel=1e-3
        )
    assert as_custom(GAUSSIAN, initial_std=1.0).initial_w2_sq() == pytest.approx(
        GAUSSIAN.initial_w2_sq("prior"), rel=1e-3
    )
    assert PAIRS["softmax"][1].estimated == ()


def test_estimates_of_a_large_model_are_by_lanczos():
    large = wflmc.gaussian_regression(
        jax.random.key(0), devices=4, examples=2000, dim=MAX_DENSE_DIM + 44
    )
    custom = as_custom(large)
    assert custom.laplace[1].shape == (2,)
    assert custom.mu == pytest.approx(large.mu, rel=5e-3)
    assert pytest.approx(large.L, rel=5e-3) == custom.L
    assert custom.initial_w2_sq() > large.initial_w2_sq("zero")


def test_plans_say_what_was_estimated():
    custom = as_custom(GAUSSIAN, batch=5)
    common = {"step_size": 0.1 / custom.L, "burn_in": 2, "samples": 2}
    plan = wflmc.plan(custom, LINK, wflmc.Privacy(), **common)
    assert {"estimated-start", "mini-batches"} <= set(codes_of(plan))
    assert not missing_facts(text_of(plan, "estimated-constants"), ("mu", "L"))
    silent = as_custom(GAUSSIAN, mu=GAUSSIAN.mu, L=GAUSSIAN.L)
    common["initial_w2_sq"] = 1.0
    plan = wflmc.plan(silent, LINK, wflmc.Privacy(), **common)
    assert not {"estimated-constants", "estimated-start"} & set(codes_of(plan))
    half = as_custom(GAUSSIAN, mu=GAUSSIAN.mu)
    plan = wflmc.plan(half, LINK, wflmc.Privacy(), **common)
    text = text_of(plan, "estimated-constants")
    assert missing_facts(text, ("mu", "L")) == ["mu"]


@pytest.mark.parametrize("batch", [None, 4])
def test_sampling_has_the_exact_gaussian_law(batch):
    """Means and variances of θ in the last round, against the law of the same plan on the known model."""
    chains = 2000
    custom = as_custom(GAUSSIAN, mu=GAUSSIAN.mu, L=GAUSSIAN.L, batch=batch)
    step = 0.2 / (custom.mu + custom.L)
    plan = wflmc.plan(
        custom,
        LINK,
        wflmc.Privacy(clip=1e5),
        step_size=step,
        burn_in=20,
        samples=1,
        sampler=wflmc.Sampler(init="zero"),
    )
    trace = wflmc.sample(jax.random.key(5), custom, plan, chains=chains)
    assert trace.clip_rate.max() == 0
    law = GAUSSIAN.law(plan.step_size, plan.weight, plan.noise_variance, "zero")
    mean = law.mean[-1]
    variance = np.diagonal(law.covariance[-1])
    theta = trace.theta[:, -1]
    spread = theta.var(0, ddof=1)
    # Batches are unbiased.
    assert np.all(np.abs(theta.mean(0) - mean) < 4.5 * np.sqrt(spread / chains))
    if batch is None:
        assert np.all(np.abs(spread / variance - 1) < 4.5 * np.sqrt(2 / chains))
    else:
        assert np.all(spread > variance * (1 - 4.5 * np.sqrt(2 / chains)))
    evaluation = wflmc.evaluate(trace, custom)
    assert evaluation.w2_sq is None
    assert "clipped" in str(evaluation)


def test_logistic_regression_against_quadrature():
    generator = np.random.default_rng(7)
    X = generator.standard_normal((60, 2))
    y = (generator.random(60) < 1 / (1 + np.exp(-X @ [1.0, -1.5]))).astype(float)

    def log_likelihood(parameters, example):
        u, label = example
        logit = parameters["slope"] * u[0] + parameters["other"] * u[1]
        return label * logit - jax.nn.softplus(logit)

    def log_prior(parameters):
        return -0.5 * (parameters["slope"] ** 2 + parameters["other"] ** 2)

    start = {"slope": 0.0, "other": 0.0}
    custom = wflmc.posterior_from(
        log_likelihood, log_prior, (X, y), initial=start, devices=4, mu=1.0
    )
    # The grid's axes are the slope and the other coefficient.
    grid = np.stack(np.meshgrid(*[np.linspace(-3, 5, 201)] * 2), -1) - [0.0, 3.0]
    logits = grid @ X.T
    log_density = (y * logits - np.logaddexp(0, logits)).sum(-1) - 0.5 * (grid**2).sum(
        -1
    )
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    mean = (density[..., None] * grid).sum((0, 1))
    square = (density[..., None] * (grid - mean) ** 2).sum((0, 1))
    plan = wflmc.plan(
        custom,
        LINK,
        wflmc.Privacy(clip=1e4),
        step_size=0.05 / custom.L,
        burn_in=500,
        samples=1,
    )
    chains = count(500, 2000)
    trace = wflmc.sample(jax.random.key(1), custom, plan, chains=chains)
    drawn = custom.unflatten(trace.theta[:, -1])
    for index, name in enumerate(("slope", "other")):
        values = drawn[name]
        # A step of 0.05/L changes variances by 2.5 % at most.
        assert (
            abs(values.mean() - mean[index])
            < 4.5 * np.sqrt(square[index] / chains) + 0.01
        )
        assert abs(values.var() / square[index] - 1) < 4.5 * np.sqrt(2 / chains) + 0.025
    probability = custom.predictive(
        lambda p, u: jax.nn.sigmoid(p["slope"] * u[0] + p["other"] * u[1]),
        trace.theta,
        X[:5],
    )
    by_grid = (density[..., None] / (1 + np.exp(-(grid @ X[:5].T)))).sum((0, 1))
    assert np.abs(np.asarray(probability).mean(0) - by_grid).max() < 0.02


def test_starts():
    start = {"a": np.full((2,), 3.0), "b": np.float32(-1.0)}
    custom = wflmc.posterior_from(
        lambda p, d: -0.5 * (d - p["b"]) ** 2 - 0.5 * jnp.sum(p["a"] ** 2),
        lambda p: -0.5 * p["b"] ** 2,
        np.arange(6.0),
        initial=start,
        initial_std=0.5,
        devices=[[0, 5], [1, 2, 4], [3]],
    )
    assert custom.sizes.tolist() == [2, 3, 1]
    assert custom.data[1].tolist() == [1.0, 2.0, 4.0]
    draws = jax.vmap(custom.draw_initial)(jax.random.split(KEY, 4000))
    assert np.allclose(draws.mean(0), [3, 3, -1], atol=0.04)
    assert np.allclose(draws.std(0), 0.5, atol=0.03)
    assert not custom.draw_initial(KEY, "zero").any()
    again = custom.unflatten(custom.start)
    assert again["a"].tolist() == [3.0, 3.0]
    assert again["b"] == -1.0


def test_padding_is_never_looked_at():
    """log of a count has no value at zero: padding must not be zeros."""
    counts = np.arange(1.0, 8.0)
    custom = wflmc.posterior_from(
        lambda p, d: -0.5 * (jnp.log(d) - p) ** 2,
        lambda p: -0.5 * p**2,
        counts,
        initial=0.0,
        devices=[[0], [1, 2, 3], [4, 5, 6]],
    )
    ready = replace(custom.on_accelerator(2, 1.0), block=1)
    total, norm = clipped_sum(ready, jnp.zeros(1), jnp.ones(3), jnp.full(3, jnp.inf))
    assert total[0] == pytest.approx(-np.log(counts).sum(), rel=1e-5)
    assert np.all(np.isfinite(norm))


def test_batches_keep_the_clip_and_are_unbiased():
    custom = as_custom(GAUSSIAN, mu=1.0, L=90.0, batch=3)
    theta = normal(custom.dim)
    K = custom.devices
    keys = jax.random.split(KEY, 5_000)
    selected = jnp.zeros(K).at[2].set(1.0)

    @jax.jit
    def sent(posterior, keys, limit=None):
        return jax.vmap(
            lambda key: posterior.clipped_sum(
                theta, selected, jnp.full(K, jnp.inf), key, limit
            )[0]
        )(keys)

    draws = sent(custom, keys)
    exact = gradients(custom, theta)[2]
    assert np.all(
        np.abs(draws.mean(0) - exact) < 4.5 * draws.std(0) / len(keys) ** 0.5 + 1e-3
    )
    # A record changes what its device sends by twice the example clip at most, whatever is drawn.
    c = 0.7
    u, v = (np.array(values) for values in custom.data)
    u[2, 0] = 50.0
    v[2, 0] = -1e3
    other = replace(custom, data=(u, v))
    neighbour_sums = [sent(p, keys[:500], jnp.full(K, c)) for p in (custom, other)]
    change = np.linalg.norm(neighbour_sums[0] - neighbour_sums[1], axis=1)
    assert 0 < change.max() <= 2 * c * (1 + 1e-4)
    assert (change == 0).any()  # not always drawn
    scale = np.maximum(custom.sizes / 3, 1)
    whole = as_custom(GAUSSIAN, mu=1.0, L=90.0).example_norms(theta)
    np.testing.assert_allclose(
        custom.example_norms(theta), whole * np.repeat(scale, custom.sizes), rtol=1e-5
    )


def test_batches_of_all_examples_are_no_batches():
    batched = as_custom(GAUSSIAN, mu=1.0, L=90.0, batch=1000)
    whole = as_custom(GAUSSIAN, mu=1.0, L=90.0)
    plan = wflmc.plan(
        whole, LINK, wflmc.Privacy(), step_size=1e-3, burn_in=0, samples=5
    )
    traces = [wflmc.sample(KEY, p, plan, chains=2).theta for p in (batched, whole)]
    np.testing.assert_array_equal(*traces)


@pytest.mark.parametrize(
    "unit", [{"unit": "record", "example_clip": 2.0}, *([{}] if FULL else [])]
)
@pytest.mark.parametrize("batch", [None, 1] if FULL else [1])
def test_the_audit_holds(unit, batch):
    """Two data sets that differ in one example far above every clip."""
    privacy = wflmc.Privacy(epsilon=4, delta=0.01, clip=5, **unit)

    def side(sign):
        X, y = np.zeros((6, 2)), np.zeros(6)
        X[-1] = [1.0, 0.0]
        y[-1] = sign * 1e5
        return wflmc.posterior_from(
            gaussian_likelihood,
            lambda t: -1e-6 * t @ t,
            (X, y),
            initial=jnp.zeros(2),
            devices=3,
            partition="blocks",
            mu=1.0,
            L=2.0,
            batch=batch,
        )

    plus, minus = side(1), side(-1)
    plan = wflmc.plan(
        plus, LINK, privacy, step_size=0.1, burn_in=5, samples=5, initial_w2_sq=1.0
    )
    report = audit_pair(jax.random.key(2), plan, plus, minus, device=2, trials=4000)
    assert report.consistent, report
    # Drawn in half of the rounds only, a record is hidden better than is claimed.
    if batch is None:
        assert report.tests[0].mu_lower > 0.6 * report.tests[0].mu_claimed


def test_compiled_code_is_shared_by_equal_models():
    def make(scale):
        return wflmc.posterior_from(
            lambda p, d: -scale * (d - p) ** 2,
            lambda p: -0.5 * p**2,
            np.arange(4.0),
            initial=0.0,
            devices=2,
        )

    first, same, other = make(0.5), make(0.5), make(0.7)
    assert first.model == same.model
    assert hash(first.model) == hash(same.model)
    assert first.model != other.model
    array = [make(np.array([scale]).sum()) for scale in (0.5, 0.7)]
    assert array[0].model != array[1].model
    assert jax.tree.structure(first) == jax.tree.structure(same)


def test_runs_have_names_that_last():
    """A checkpoint or a ledger of another process knows the run again; another constant makes another run."""
    script = (
        "import jax, jax.numpy as jnp, numpy as np, wflmc\n"
        "from wflmc.sampling.payment import run_name\n"
        "table = jnp.arange(3.0) * {}\n"
        "p = wflmc.posterior_from(lambda t, d: -0.5 * (d - t @ table) ** 2, lambda t: -0.5 * t @ t, np.arange(4.0),"
        " initial=np.zeros(3), devices=2, mu=1.0, L=9.0)\n"
        "plan = wflmc.plan(p, wflmc.Link(wflmc.channel.static()), wflmc.Privacy(), step_size=1e-3, burn_in=0,"
        " samples=2, initial_w2_sq=1.0)\n"
        "print(run_name(jax.random.key(0), p, plan, 3))\n"
    )
    names = []
    for constant in (1.0, 2.0):
        with contextlib.redirect_stdout(io.StringIO()) as here:
            exec(script.format(constant), {})
        names.append(here.getvalue())
    command = [sys.executable, "-c", script.format(1.0)]
    elsewhere = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout
    assert elsewhere == names[0] != names[1]


def test_what_is_around_a_model_may_change_later():
    """Three functions that share a variable: each runs with the value that it had when the posterior was made."""
    data = np.linspace(0.0, 2.0, 20, dtype=np.float32)
    posteriors = []
    for scale in (1.0, 2.0, 3.0):
        posteriors.append(
            wflmc.posterior_from(
                lambda p, e: -0.5 * (scale * e - p["m"]) ** 2,  # noqa: B023
                lambda p: -0.5 * p["m"] ** 2,
                data,
                initial={"m": 0.0},
                devices=4,
            )
        )
    assert len({built.model.name for built in posteriors}) == 3
    for scale, built in zip((1.0, 2.0, 3.0), posteriors, strict=True):
        np.testing.assert_allclose(built.laplace[0], scale * data.sum() / 21, rtol=1e-5)
        gradient = clipped_sum(built, jnp.zeros(1), jnp.ones(4), jnp.full(4, jnp.inf))[
            0
        ]
        np.testing.assert_allclose(gradient, -scale * data.sum(), rtol=1e-5)


def test_a_device_alone_draws_the_batches_it_draws_among_others():
    posterior = as_custom(GAUSSIAN, batch=2, mu=1.0, L=90.0)
    theta = jnp.ones(posterior.dim)
    key = jax.random.key(8)
    devices = range(6) if FULL else (1, 5)
    weight = np.isin(np.arange(6), devices).astype(np.float32)
    clip = jnp.full(6, jnp.inf)
    whole, _ = clipped_sum(posterior, theta, weight, clip, key)
    alone = [
        clipped_sum(posterior.device(k), theta, jnp.ones(1), clip[:1], key)[0]
        for k in devices
    ]
    np.testing.assert_allclose(sum(alone), whole, rtol=1e-4, atol=1e-4)


def test_a_plan_by_the_law_is_that_of_the_gaussian_model_where_all_directions_are_alike():
    """Every device has the same round Hessian, so that the Laplace approximation leaves nothing out."""
    X = np.tile(3 * np.eye(4), (10, 1))
    y = X @ np.array([1.0, -2.0, 0.5, 3.0]) + np.tile(normal(4), 10)
    known = wflmc.gaussian_regression(KEY, devices=10, X=X, y=y, partition="blocks")
    custom = as_custom(known, initial_std=1.0)
    privacy = wflmc.Privacy(8, 1e-3, clip=20)
    options = {
        "step_size": 0.4 / (known.mu + known.L),
        "burn_in": 20,
        "samples": 5,
        "policy": wflmc.Policy(objective="exact"),
    }
    plans = [
        wflmc.plan(
            model, wflmc.Link(wflmc.channel.rayleigh(1.0), 30), privacy, **options
        )
        for model in (known, custom)
    ]
    assert plans[1].objective == pytest.approx(plans[0].objective, rel=1e-3)
    np.testing.assert_allclose(plans[1].gain, plans[0].gain, rtol=1e-2)


def test_microbatches_and_chains_one_by_one_change_nothing(monkeypatch):
    """Large models take their chains one after the other, and records without a finite gradient add nothing."""
    from wflmc.posterior.custom import posterior as custom

    def likelihood(w, example):
        return -(jnp.sqrt(jnp.abs(example["y"] - example["x"] @ w)) ** 2)

    data = {"x": normal(40, 6), "y": normal(40)}
    constants = {"devices": 4, "mu": 1.0, "L": 9.0}
    posterior = wflmc.posterior_from(
        likelihood, lambda w: -jnp.sum(w**2), data, initial=np.ones(6), **constants
    )
    # √|0|² has no gradient.
    posterior.data["y"][0, 2] = 0.0
    posterior.data["x"][0, 2] = 0.0
    theta = normal(3, 6)
    weight = np.ones(4)
    clip = np.full(4, 2.0)
    most = np.full(4, 0.3)

    def sums():
        ready = posterior.on_accelerator(3, 2**20, True)

        @jax.jit
        @jax.vmap
        def of_chain(position):
            return ready.unrounded_sum(position, weight, clip, example_clip=most)

        return of_chain(theta)

    together, norms = sums()
    monkeypatch.setattr(custom, "CPU_CACHE_BYTES", 0)  # no cache holds anything
    assert posterior._is_large_device == (jax.default_backend() == "cpu")
    one_by_one, others = sums()
    np.testing.assert_allclose(one_by_one.double, together.double, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(others, norms, rtol=1e-5)
    assert np.isnan(norms[:, 0]).all()
    slopes = jax.jit(jax.vmap(jax.grad(likelihood), (None, 0)))
    for position, actual in zip(theta, together.double, strict=True):
        records = []
        for device in range(4):
            rows = {name: values[device] for name, values in posterior.data.items()}
            record_gradients = -np.asarray(slopes(position, rows), float)
            records.append(record_gradients[np.isfinite(record_gradients).all(1)])
        prior_share = 2 * position / 4
        expected = reference.record_clipped_sum(
            records, prior_share, weight=weight, clip=clip, example_clip=most
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
