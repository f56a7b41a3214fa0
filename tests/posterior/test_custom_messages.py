"""What a stranger may get wrong with a model of one's own: each is refused in a sentence, or made right."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.posterior.custom.geometry import find_mode
from wflmc.sampling import groups, outcomes
from wflmc.support.errors import Fault

from ..error_tools import raises_input_error
from .custom_tools import gaussian_likelihood, gaussian_prior

KEY = jax.random.key(0)
X, Y = np.random.default_rng(1).normal(size=(40, 2)), np.ones(40)
LARGE = Y.astype(int) * 3_000_000_000


def make(likelihood=gaussian_likelihood, prior=gaussian_prior, data=(X, Y), **keywords):
    return wflmc.posterior_from(
        likelihood, prior, data, **{"initial": np.zeros(2), "devices": 4, **keywords}
    )


def walled(theta, example):
    """It has no value once θ is more than 0.1 from zero."""
    near = theta @ theta < 0.01
    return gaussian_likelihood(theta, (example[0], example[1] + 100)) + jnp.where(
        near, 0.0, jnp.nan
    )


def negative_binomial(theta, example):
    """Counts with a dispersion of their own, which is no convex cost."""
    u, count = example
    size = jnp.exp(theta[0])
    mean = jnp.exp(theta[1] + 0 * u[0])
    gammas = jax.lax.lgamma(count + size) - jax.lax.lgamma(size)
    return (
        gammas
        + size * jnp.log(size / (size + mean))
        + count * jnp.log(mean / (size + mean))
    )


def two_steps(theta, example):
    return sum(theta[0] for _ in range(example[1].astype(int)))


def masked(theta, example):
    return jnp.sum(theta[theta > 0]) * example[1]


REFUSED = {
    "int64 that would wrap": ("data[1]", ("int32", 2147483647), {"data": (X, LARGE)}),
    "no value away from the start": ("initial", ("mode", "nan"), {"likelihood": walled}),
    "wrong sign": ("initial", ("mode", "sign"), {"likelihood": lambda t, e: (e[1] - t @ e[0]) ** 2}),
    "mu above an estimated L": ("mu", (1000.0, "L is an estimate"), {"mu": 1e3}),
    "L below an estimated mu": ("mu", ("L = 0.01", "mu is an estimate"), {"L": 0.01}),
    "many keys": ("key", ("key<fry>", "(3,)"), {"key": jax.random.split(KEY, 3)}),
    "a key of floats": ("key", ("float32",), {"key": jnp.arange(3.0)}),
    "no spread": ("initial_std", ("missing",), {"initial_std": None}),
    "a spread in letters": ("initial_std", ("'1'",), {"initial_std": "1"}),
    "many spreads": ("initial_std", ("float64", "(2,)"), {"initial_std": np.ones(2)}),
    "mixed lists": ("devices", ("list of 2",), {"devices": [[0, 1], 5]}),
    "data of each device": ("devices", ("list of 2",), {"devices": [X[:10], X[10:]]}),
    "ids": ("devices", ("int64", "np.unique"), {"devices": np.arange(40) % 4 + 10**12}),
    "floats": ("devices", ("float64", "np.unique"), {"devices": np.arange(40) % 4 + 0.5}),
    "negative": ("devices", ("int64", "0, 1, …"), {"devices": np.arange(40) % 4 - 1}),
    "too few": ("devices", ("int64", "(39,)", "40 examples"), {"devices": np.arange(39) % 4}),
    "truth for a number": ("devices", (True,), {"devices": True}),
    "batch": ("batch", (True,), {"batch": True}),
    "mu": ("mu", (True,), {"mu": True}),
    "partition": ("partition", ("iid", "blocks"), {"partition": "by-label", "devices": np.arange(40) % 4}),
    "a list in data": ("data", ("shapes", "np.asarray"), {"data": (X, list(Y))}),
    "texts": ("data['y']", ("<U1", "integers"), {"data": {"x": X, "y": np.array(["a"] * 40)}}),
    "complex data": ("data", ("complex128",), {"data": Y * 1j}),
    "width": ("log_likelihood", ("(3,)", "((2,), ())"), {"initial": np.zeros(3)}),
    "a text": ("log_likelihood", ("TypeError", "str"), {"likelihood": lambda t, e: "no"}),
    "loops": ("log_likelihood", ("if", "range(n)"), {"likelihood": two_steps}),
    "masks": ("log_likelihood", ("jnp.where", "masks"), {"likelihood": masked}),
    "a whole likelihood": ("log_likelihood", ("int32[]",), {"likelihood": lambda t, e: 0}),
    "a prior of truth": ("log_prior", ("bool[]",), {"prior": lambda t: t[0] > 0}),
    "no example": ("log_likelihood", ("look",), {"likelihood": lambda t, e: t[0]}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    key, facts, keywords = REFUSED[what]
    with raises_input_error(key, *facts):
        make(**keywords)


@pytest.mark.parametrize(
    ("key", "facts", "function", "inputs"),
    [
        ("inputs", ("()",), lambda p, u: p[0], 1.0),
        ("inputs", ("(0, 2)",), lambda p, u: p[0], X[:0]),
        ("inputs", ("(40, 2)", "(3,)"), lambda p, u: p[0], (X, Y[:3])),
        ("inputs", ("<U1",), lambda p, u: p[0], np.array(["a", "b"])),
        ("function", ("weights",), lambda p, u: p["weights"], X),
    ],
)
def test_predictions_refused(key, facts, function, inputs):
    with raises_input_error(key, *facts):
        make(mu=1.0, L=90.0).predictive(function, np.zeros((1, 2, 2)), inputs)


def test_made_right():
    same = make(data=(X.astype(np.longdouble), Y), batch=1000, mu=1.0, L=90.0)
    assert same.batch is None
    assert same.digest == make(mu=1.0, L=90.0).digest
    flat = make(prior=lambda t: 0)
    assert flat.mu == pytest.approx(np.linalg.eigvalsh(X.T @ X)[0], rel=1e-4)
    assert make(key=jax.random.PRNGKey(0)).devices == 4
    by_id = make(devices=np.unique(np.arange(40) % 4 + 10**12, return_inverse=True)[1])
    np.testing.assert_array_equal(by_id.observed[1], np.repeat(np.arange(4), 10))


def test_a_mu_that_is_l():
    """Here mu is L, and float32 must not refuse what is known."""
    known = float(X[:, 0] @ X[:, 0]) + 1
    posterior = wflmc.posterior_from(
        lambda t, e: -0.5 * (t * e) ** 2,
        lambda t: -0.5 * t**2,
        X[:, 0],
        initial=1.0,
        devices=4,
        mu=known,
    )
    assert posterior.mu <= posterior.L == pytest.approx(known, rel=1e-5)


def test_a_cost_that_is_convex_at_the_mode_alone():
    counts = np.random.default_rng(0).negative_binomial(30, 0.5, 40)
    posterior = make(negative_binomial, lambda t: -0.05 * t @ t, (X, counts))
    assert posterior.mu == posterior.laplace[1].min() > 0
    assert posterior.estimated[0].startswith(
        "mu (at the mode alone: at the start the least eigenvalue is -"
    )
    assert posterior.estimated[1] == "L"  # plans warn of these by name


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_a_mode_as_good_as_float32_has_it(offset):
    """A cost whose constant hides its slopes from float32 is no failed search; nor is a start at the mode."""
    first = make(lambda t, e: gaussian_likelihood(t, e) - offset)
    again = make(
        lambda t, e: gaussian_likelihood(t, e) - offset, initial=first.laplace[0]
    )
    exact = np.linalg.solve(X.T @ X + np.eye(2), X.T @ Y)
    for posterior in (first, again):
        np.testing.assert_allclose(
            posterior.laplace[0], exact, atol=1e-3 if not offset else 0.5
        )


def test_names_of_axes_are_free_for_parameters():
    parameters = {
        "chain": np.zeros((2, 3)),
        "draw": np.zeros((2, 3)),
        "draw_": np.zeros((2, 3)),
    }
    assert set(groups.name_leaves(parameters, groups.DRAW_AXES, "theta")) == {
        "chain_",
        "draw_",
        "draw__",
    }
    assert set(
        groups.name_leaves({"device": Y, "observation": Y}, ("observation",), "y")
    ) == {"device_", "observation_"}


def test_what_draws_outcomes_takes_a_key():
    options = outcomes.ArvizOptions(make(mu=1.0, L=90.0), predictive=lambda p, e: e[1])
    with raises_input_error("predictive", "key, parameters, example"):
        outcomes.outcome_groups(np.zeros((1, 2, 2)), options)


def test_words_cross_process_borders():
    error = wflmc.InputError("data", Fault("has no arrays"), "arrays")
    again = pickle.loads(pickle.dumps(error))
    assert type(again.value) is Fault
    assert str(again) == str(error)


def test_a_search_that_ends_early_says_so():
    curves = np.array([1.0, 100.0])

    def search(steps):
        def cost(theta):
            return 0.5 * theta**2 @ curves, curves * theta

        return find_mode(cost, lambda _, v: curves * v, np.array([50.0, 1.0]), steps)

    assert search(500)[1] == ""
    assert "the gradient's norm is still" in search(1)[1]
