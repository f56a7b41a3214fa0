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
    size, mean = jnp.exp(theta[0]), jnp.exp(theta[1] + 0 * u[0])
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
    "int64 that would wrap": (r"data\[1\] has whole numbers that int32.*to 2147483647.*floats", {"data": (X, LARGE)}),
    "no value away from the start": (r"initial leads to no mode.*is it nan nearby", {"likelihood": walled}),
    "wrong sign": (r"initial leads to no mode.*sign wrong", {"likelihood": lambda t, e: (e[1] - t @ e[0]) ** 2}),
    "mu above an estimated L": (r"mu = 1000.0.*at most L = .*L is an estimate", {"mu": 1e3}),
    "L below an estimated mu": (r"at most L = 0.01 \(mu is an estimate", {"L": 0.01}),
    "many keys": (r"key is an array of type key<\w+> and shape \(3,\)", {"key": jax.random.split(KEY, 3)}),
    "a key of floats": (r"key is an array of type float32", {"key": jnp.arange(3.0)}),
    "no spread": (r"initial_std is missing", {"initial_std": None}),
    "a spread in letters": (r"initial_std = '1'", {"initial_std": "1"}),
    "many spreads": (r"initial_std is an array of type float64.*a number", {"initial_std": np.ones(2)}),
    "mixed lists": (r"devices is a list of 2 values.*a list of each", {"devices": [[0, 1], 5]}),
    "data of each device": (r"devices is a list of 2 values.*the device", {"devices": [X[:10], X[10:]]}),
    "ids": (r"devices is an array of type int64.*np.unique\(ids", {"devices": np.arange(40) % 4 + 10**12}),
    "floats": (r"devices is an array of type float64.*np.unique", {"devices": np.arange(40) % 4 + 0.5}),
    "negative": (r"devices is an array.*the device \(0, 1, …\)", {"devices": np.arange(40) % 4 - 1}),
    "too few": (r"devices is an array of type int64 and shape \(39,\)", {"devices": np.arange(39) % 4}),
    "truth for a number": (r"devices = True was given", {"devices": True}),
    "batch": (r"batch = True", {"batch": True}),
    "mu": (r"mu = True", {"mu": True}),
    "partition": (r"partition = 'by-label'.*iid or blocks", {"partition": "by-label", "devices": np.arange(40) % 4}),
    "a list in data": (r"data has arrays of shapes.*np.asarray", {"data": (X, list(Y))}),
    "texts": (r"data\['y'\] has entries of type <U1.*integers", {"data": {"x": X, "y": np.array(["a"] * 40)}}),
    "complex data": (r"data has entries of type complex128", {"data": Y * 1j}),
    "width": (r"parameters of shape \(3,\) and ONE example of shape \(\(2,\), \(\)\)", {"initial": np.zeros(3)}),
    "a text": (r"log_likelihood fails: TypeError.*str.*must be a JAX", {"likelihood": lambda t, e: "no"}),
    "loops": (r"in place of if, range\(n\)", {"likelihood": two_steps}),
    "masks": (r"jnp.where in place of .* masks", {"likelihood": masked}),
    "a whole likelihood": (r"returns int32\[\]", {"likelihood": lambda t, e: 0}),
    "a prior of truth": (r"log_prior returns bool\[\]", {"prior": lambda t: t[0] > 0}),
    "no example": (r"does not look at its example.*count once for every example", {"likelihood": lambda t, e: t[0]}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    words, given = REFUSED[what]
    with pytest.raises(wflmc.InputError, match=words):
        make(**given)


@pytest.mark.parametrize(
    ("words", "function", "inputs"),
    [
        (r"inputs has arrays of shapes \(\)", lambda p, u: p[0], 1.0),
        (r"shapes \(0, 2\).*at least one example", lambda p, u: p[0], X[:0]),
        (r"shapes \(40, 2\), \(3,\)", lambda p, u: p[0], (X, Y[:3])),
        ("inputs has entries of type <U1", lambda p, u: p[0], np.array(["a", "b"])),
        ("function fails: ", lambda p, u: p["weights"], X),
    ],
)
def test_predictions_refused(words, function, inputs):
    with pytest.raises(wflmc.InputError, match=words):
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
    made = wflmc.posterior_from(
        lambda t, e: -0.5 * (t * e) ** 2,
        lambda t: -0.5 * t**2,
        X[:, 0],
        initial=1.0,
        devices=4,
        mu=known,
    )
    assert made.mu <= made.L == pytest.approx(known, rel=1e-5)


def test_a_cost_that_is_convex_at_the_mode_alone():
    counts = np.random.default_rng(0).negative_binomial(30, 0.5, 40)
    made = make(negative_binomial, lambda t: -0.05 * t @ t, (X, counts))
    assert made.mu == made.laplace[1].min() > 0
    assert made.estimated[0].startswith(
        "mu (at the mode alone: at the start the least eigenvalue is -"
    )
    assert made.estimated[1] == "L"  # plans warn of these by name


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_a_mode_as_good_as_float32_has_it(offset):
    """A cost whose constant hides its slopes from float32 is no failed search; nor is a start at the mode."""
    found = make(lambda t, e: gaussian_likelihood(t, e) - offset)
    again = make(
        lambda t, e: gaussian_likelihood(t, e) - offset, initial=found.laplace[0]
    )
    exact = np.linalg.solve(X.T @ X + np.eye(2), X.T @ Y)
    for made in (found, again):
        np.testing.assert_allclose(
            made.laplace[0], exact, atol=1e-3 if not offset else 0.5
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
    asked = outcomes.ArvizOptions(make(mu=1.0, L=90.0), predictive=lambda p, e: e[1])
    with pytest.raises(
        wflmc.InputError, match=r"predictive fails.*\(key, parameters, example\)"
    ):
        outcomes.outcome_groups(np.zeros((1, 2, 2)), asked)


def test_words_cross_process_borders():
    error = wflmc.InputError("data", Fault("has no arrays"), "arrays")
    assert (
        str(pickle.loads(pickle.dumps(error)))
        == "data has no arrays, but it must be arrays."
    )


def test_a_search_that_ends_early_says_so():
    curves = np.array([1.0, 100.0])

    def search(steps):
        def cost(theta):
            return 0.5 * theta**2 @ curves, curves * theta

        return find_mode(cost, lambda _, v: curves * v, np.array([50.0, 1.0]), steps)

    assert search(500)[1] == ""
    assert "the gradient's norm is still" in search(1)[1]
