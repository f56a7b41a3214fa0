"""What a model of another library brings along beside its examples: no private record may get into prior or start.

The prior is split over the devices and never clipped, and chains begin where all devices know. A record that enters
there moves the sum without limit, whatever epsilon says.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc

from ..conftest import FULL

numpyro = pytest.importorskip("numpyro", reason="pip install numpyro")
dist = pytest.importorskip("numpyro.distributions")
N = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = RNG.normal(size=N)
W = RNG.normal(size=N)
OTHERS = RNG.normal(size=5)
# Ones, as placeholders are: by values alone, nothing would seem to depend on them.
ONES = np.ones(N)
KNOWN = {
    "mu": 1.0,
    "L": 100.0,
    "preconditioner": "none",
    "devices": 3,
    "partition": "blocks",
}


def observe(y, mean):
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def mean_of(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    observe(y, mean)
    return mean


def two_plates(y, z):
    mean = mean_of(y)
    with numpyro.plate("others", len(z)):
        numpyro.sample("z", dist.Normal(mean, 1), obs=z)


def others_first(y, z):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.sample("z", dist.Normal(mean, 1), obs=z)
    observe(y, mean)


def factor_of_another_length(y, z):
    numpyro.factor("penalty", -0.5 * jnp.sum((z - mean_of(y)) ** 2))


def factor_by_numpy(y, z):
    numpyro.factor("penalty", -0.5 * (mean_of(y) - np.mean(z)) ** 2)


def half_by_index(y, z, person):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([N]).to_event(1))
    mean_of(y)
    numpyro.sample("z", dist.Normal(effect[person], 1), obs=z)


def half_by_mask(y, w):
    numpyro.sample("w", dist.Normal(mean_of(y), 1), obs=w[w > 0])


def number(y, total):
    numpyro.sample("total", dist.Normal(mean_of(y), 1), obs=total)


def whole_number(y, count):
    numpyro.sample("count", dist.Poisson(jnp.exp(mean_of(y))), obs=count)


def around_the_model(y):
    numpyro.sample("z", dist.Normal(mean_of(y), 1), obs=OTHERS)


def factor_around_the_model(y):
    numpyro.factor("penalty", dist.Normal(mean_of(y), 1).log_prob(OTHERS).sum())


def prior_location(y):
    observe(y, numpyro.sample("mean", dist.Normal(jnp.mean(y), 1)))


def prior_support(y):
    bounds = dist.constraints.interval(-50.0, 50.0 + jnp.max(y))
    observe(y, numpyro.sample("mean", dist.ImproperUniform(bounds, (), ())))


def initial_value(y):
    observe(
        y,
        numpyro.sample("mean", dist.Normal(numpyro.param("location", jnp.mean(y)), 1)),
    )


def scale(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.handlers.scale(scale=1 / (1 + jnp.max(jnp.abs(y)))):
        observe(y, mean)


def values_of_a_discrete_site(y, n):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("records", len(y)):
        successes = numpyro.sample(
            "successes", dist.BinomialLogits(level, n), infer={"enumerate": "parallel"}
        )
        numpyro.sample("y", dist.Normal(successes, 1), obs=y)


REFUSED = (
    (two_plates, "site z", {"y": Y, "z": OTHERS}),
    (two_plates, "site z", {"y": Y, "z": W[::2]}),  # of every second person
    (others_first, "site y", {"y": Y, "z": OTHERS}),
    (factor_of_another_length, "site penalty", {"y": Y, "z": OTHERS}),
    (factor_by_numpy, "site penalty", {"y": Y, "z": OTHERS}),
    (half_by_index, "site z", {"y": Y, "z": W[::2], "person": np.arange(0, N, 2)}),
    (half_by_mask, "site w", {"y": Y, "w": W}),
    (number, "site total", {"y": Y, "total": 3.5}),
    (whole_number, "site count", {"y": Y, "count": 7}),
    (around_the_model, "site z", {"y": Y}),
    (factor_around_the_model, "site penalty", {"y": Y}),
    (prior_location, "site mean", {"y": ONES}),
    (prior_support, "site mean", {"y": ONES}),
    (initial_value, "site location", {"y": ONES}),
    (scale, "site y", {"y": Y}),
    (values_of_a_discrete_site, "site successes", {"y": Y, "n": np.full(N, 3)}),
)


@pytest.mark.parametrize(
    ("model", "site", "data"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_data_outside_the_examples_are_refused(model, site, data):
    with pytest.raises(wflmc.InputError) as caught:
        wflmc.from_numpyro(model, data, **KNOWN)
    assert caught.value.key == site


@partial(jax.jit, static_argnums=0)
def prior_costs(model, theta):
    """Return −log p(θ) of θ[draw, m], [draw]; compiled once for models of the same name."""
    return jax.vmap(model.prior_cost)(theta)


def assert_only_one_record_differs(posterior, other, row):
    """Check that two posteriors are the same to the bit but for one record's log-likelihood."""
    # The name hashes the traced prior and likelihood, with their constants.
    assert posterior.model.name == other.model.name
    np.testing.assert_array_equal(posterior.start, other.start)
    theta = np.random.default_rng(1).normal(size=(2, posterior.dim)).astype(np.float32)
    np.testing.assert_array_equal(
        prior_costs(posterior.model, theta), prior_costs(other.model, theta)
    )
    before, after = posterior.log_likelihood(theta), other.log_likelihood(theta)
    np.testing.assert_array_equal(np.delete(before, row, 1), np.delete(after, row, 1))
    assert np.all(before[:, row] != after[:, row])


def with_row(values, row, value):
    """Return an array with another value in one row."""
    changed = np.array(values)
    changed[row] = value
    return changed


def hierarchy(x, y, group, predictor, survey, groups):
    """Groups with a predictor of another length, a public survey, and offsets of records with laws of their own."""
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("groups", groups):
        level = numpyro.sample(
            "level", dist.Normal(slope * predictor, jnp.array([1.0, 2.0, 3.0]))
        )
    numpyro.sample("centred", dist.Normal(jnp.sum(level), 0.1), obs=0.0)
    with numpyro.plate("records", len(y)):
        offset = numpyro.sample("offset", dist.LogNormal(slope * x, 1))
        numpyro.sample("x", dist.Normal(slope, 1), obs=x)
        numpyro.sample("y", dist.Normal(level[group] + offset, 1), obs=y)
    numpyro.sample("survey", dist.Normal(slope, 1), obs=survey)


@pytest.mark.parametrize(
    ("row", "value"), [(0, 1e4), (0, 2.0), (N - 1, -1e4)] if FULL else [(0, 1e4)]
)
def test_a_replaced_record_changes_its_own_likelihood_alone(row, value):
    public = {"predictor": OTHERS[:3], "survey": OTHERS, "groups": 3}
    data = {"x": ONES, "y": Y, "group": np.arange(N) % 3, **public}
    changed = data | {"x": with_row(ONES, row, value), "y": with_row(Y, row, value)}
    posterior = wflmc.from_numpyro(hierarchy, data, shared=("survey",), **KNOWN)
    other = wflmc.from_numpyro(hierarchy, changed, shared=("survey",), **KNOWN)
    assert_only_one_record_differs(posterior, other, row)
    listed = {
        name: text.partition(": ")[2] for name, text in posterior.not_covered.items()
    }
    assert listed == {
        "arguments of the model": "predictor.",
        "shared arguments of the model": "survey.",
        "arrays around the model": "(3,).",
    }


def log_likelihood(logits, label):
    return jax.nn.log_softmax(logits)[label]


def linen_module(initialised):
    """Return a Linen module of which something is initialised by its input, unless that is nothing."""
    nn = pytest.importorskip("flax.linen", reason="pip install flax")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            if initialised == "a parameter":
                x = x + self.param("shift", lambda key: -x)
            elif initialised == "a parameter by its spread":
                # The spread is 0 for zeros and for ones.
                x = x * self.param("scale", lambda key: 1 + jnp.std(x))
            elif initialised == "a parameter by NumPy":
                x = x - self.param("shift", lambda key: jnp.asarray(np.mean(x)))
            elif initialised == "a variable":
                x = x - self.variable("statistics", "mean", lambda: x).value
            return nn.Dense(2)(nn.BatchNorm(use_running_average=True)(x))

    return Network()


LABELS = np.arange(N) % 2
BY_INPUT = (
    "a parameter",
    "a parameter by its spread",
    "a parameter by NumPy",
    "a variable",
)


@pytest.mark.parametrize("initialised", BY_INPUT)
def test_modules_that_their_input_initialises_are_refused(initialised):
    module = linen_module(initialised)
    with pytest.raises(wflmc.InputError) as caught:
        wflmc.from_flax(module, log_likelihood, (X, LABELS), **KNOWN)
    assert caught.value.key == "module"


def test_a_replaced_record_leaves_the_start_of_a_module():
    module = linen_module("nothing")
    posterior = wflmc.from_flax(module, log_likelihood, (X, LABELS), **KNOWN)
    other = wflmc.from_flax(
        module, log_likelihood, (with_row(X, 0, 1e4), LABELS), **KNOWN
    )
    assert_only_one_record_differs(posterior, other, 0)
