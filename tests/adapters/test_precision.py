"""Models in both precisions of one process, in any order: arrays around a model are no one precision's own."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.posterior.custom.precision import in_float32, in_float64

from ..conftest import FULL

WEIGHTS = np.array([0.5, 1.0, 2.0])
ORDER = np.array([2, 0, 1])
KNOWN = {"mu": 1.0, "L": 100.0, "preconditioner": "none", "devices": 3}
RNG = np.random.default_rng(0)


def data_of(examples):
    """Return covariates, outcomes and groups of so many examples."""
    x = RNG.normal(size=(examples, 3))
    return {
        "x": x,
        "y": x.sum(1) + RNG.normal(size=examples),
        "group": np.arange(examples) % 3,
    }


def weighted(theta):
    return jnp.sum(theta[ORDER] * WEIGHTS)


def test_arrays_of_numpy_follow_the_precision():
    theta = np.ones(3)
    # A jaxpr holds the arrays as JAX has converted them.
    traces = [jax.make_jaxpr(weighted)(theta)]
    for _ in range(2):
        with in_float64():
            traces.append(jax.make_jaxpr(weighted)(theta))
            results = (
                weighted(theta),
                jax.grad(weighted)(theta),
                jax.jit(weighted)(theta),
            )
            assert {result.dtype for result in results} == {np.dtype(np.float64)}
        traces.append(jax.make_jaxpr(weighted)(theta))
        results = weighted(theta), jax.grad(weighted)(theta), jax.jit(weighted)(theta)
        assert {result.dtype for result in results} == {np.dtype(np.float32)}


def test_arrays_follow_the_precision_after_an_error():
    held = [jax.make_jaxpr(weighted)(np.ones(3))]

    def fail_in_float64():
        with in_float64():
            held.append(jax.make_jaxpr(weighted)(np.ones(3)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_float64()
    assert [trace.out_avals[0].dtype for trace in held] == [np.float32, np.float64]
    assert weighted(np.ones(3)).dtype == np.float32


@pytest.fixture
def float64_switched_on():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("context", [in_float32, in_float64])
def test_the_precision_is_as_before_afterwards(context, float64_switched_on):
    def fail():
        with context():
            assert jax.config.jax_enable_x64 == (context is in_float64)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert jax.config.jax_enable_x64


def log_likelihood(theta, example):
    x, y, _ = example
    return -0.5 * (y - x[ORDER] @ (WEIGHTS * theta)) ** 2


def log_prior(theta):
    return -0.5 * jnp.sum((WEIGHTS * theta) ** 2)


def custom(data, preconditioner):
    examples = data["x"], data["y"], data["group"]
    options = {"initial": np.zeros(3), "devices": 3, "preconditioner": preconditioner}
    return wflmc.posterior_from(log_likelihood, log_prior, examples, **options)


def test_a_model_is_the_same_in_a_process_of_float64(float64_switched_on):
    data = data_of(30)
    held = [jax.make_jaxpr(log_prior)(np.ones(3))]
    double = custom(data, "none")
    held.append(jax.make_jaxpr(log_prior)(np.ones(3)))
    jax.config.update("jax_enable_x64", False)
    single = custom(data, "none")
    assert [trace.out_avals[0].dtype for trace in held] == [np.float64, np.float64]
    assert double.model.name == single.model.name


def test_threads_may_make_posteriors_at_the_same_time():
    data = data_of(30)
    with ThreadPoolExecutor(4) as threads:
        posteriors = list(
            threads.map(lambda _: custom(data, "laplace"), range(12 if FULL else 6))
        )
    for posterior in posteriors:
        np.testing.assert_allclose(
            posterior.coordinates.centre, posteriors[0].coordinates.centre
        )


def test_a_custom_model_may_take_arrays_from_around_it():
    data = data_of(30)
    posterior = custom(data, "laplace")
    design = data["x"][:, ORDER] * WEIGHTS
    precision = design.T @ design + np.diag(WEIGHTS**2)
    np.testing.assert_allclose(
        posterior.coordinates.centre,
        np.linalg.solve(precision, design.T @ data["y"]),
        rtol=1e-6,
    )


numpyro = pytest.importorskip("numpyro", reason="pip install numpyro")
dist = pytest.importorskip("numpyro.distributions")


@jax.jit
def in_order(slopes):
    return slopes[ORDER] * WEIGHTS


def regression(x, y):
    """Arrays from around the model in its prior and in a jitted function, and sites that a loop of JAX indexes."""
    slopes = numpyro.sample("slopes", dist.Normal(WEIGHTS, 1).to_event(1))

    def add(column, total):
        return total + jnp.asarray(x)[:, column] * slopes[column]

    mean = jax.lax.fori_loop(0, 3, add, x @ in_order(slopes))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def correlated_groups(x, y, group):
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, np.array(2.0)))
    with numpyro.plate("groups", 3):
        offsets = numpyro.sample("offsets", dist.Normal(0, 1).expand([2]).to_event(1))
    effects = offsets @ (scales[:, None] * factor).T
    with numpyro.plate("records", len(y)):
        numpyro.sample(
            "y", dist.Normal(effects[group, 0] + effects[group, 1] * x[:, 0], 1), obs=y
        )


def categories(x, group):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([3, 3]).to_event(2))
    with numpyro.plate("records", len(group)):
        numpyro.sample("group", dist.Categorical(logits=x @ slopes), obs=group)


def arguments_of(model, data):
    names = model.__code__.co_varnames[: model.__code__.co_argcount]
    return {name: data[name] for name in names}


def trace_in_float32(model, data):
    """Return the traced gradient of the potential energy, which NUTS keeps as long as it lives."""
    start = {"slopes": np.zeros(3)}
    return jax.make_jaxpr(
        jax.grad(
            lambda position: numpyro.infer.util.potential_energy(
                model, (), data, position
            )
        )
    )(start)


@pytest.mark.skipif(
    not FULL,
    reason="test_numpyro.py uses models in both precisions: make test-full runs it",
)
def test_a_model_may_be_used_before_and_after_in_float32():
    held = []
    for examples in (12, 9) if FULL else (12,):
        data = arguments_of(regression, data_of(examples))
        held.append(trace_in_float32(regression, data))
        posterior = wflmc.from_numpyro(regression, data, **KNOWN)
        held += posterior, trace_in_float32(regression, data)
        assert posterior.log_likelihood(np.zeros((1, 3))).shape == (1, examples)


@pytest.mark.parametrize(
    ("model", "site"),
    [(regression, "slopes"), *([(correlated_groups, "factor")] if FULL else [])],
)
def test_models_of_float64_processes_are_sampled_in_float32(
    model, site, float64_switched_on
):
    data = arguments_of(model, data_of(12))
    posterior = wflmc.from_numpyro(model, data, **KNOWN)
    theta = jnp.zeros(posterior.dim)
    assert posterior.unflatten(np.float32(theta))[site].dtype == np.float32
    ready = posterior.on_accelerator(1, 2**30)
    assert {leaf.dtype for leaf in jax.tree.leaves(ready.data)} <= {
        np.dtype(np.float32),
        np.dtype(np.int32),
    }
    total, _ = jax.jit(ready.clipped_sum)(theta, jnp.ones(3), jnp.full(3, 1e3))
    np.testing.assert_allclose(
        total, posterior.gradients(theta).sum(0), rtol=1e-4, atol=1e-4
    )


@pytest.mark.skipif(not FULL, reason="make test-full runs it")
@pytest.mark.parametrize("model", [regression, correlated_groups, categories])
def test_nuts_and_posteriors_of_one_model_in_any_order(model):
    held = []
    for examples in (60, 45, 60):
        data = arguments_of(model, data_of(examples))
        for _ in range(2):
            nuts = numpyro.infer.MCMC(
                numpyro.infer.NUTS(model),
                num_warmup=5,
                num_samples=5,
                progress_bar=False,
            )
            nuts.run(jax.random.key(0), **data)
            held.append(nuts)
            held.append(
                wflmc.from_numpyro(model, data, devices=3, preconditioner="laplace")
            )
    dims = {posterior.dim for posterior in held[1::2]}
    assert len(dims) == 1
