"""Models of one's own that cannot work, refused in words."""

import dataclasses
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc

from ..error_tools import raises_input_error
from .custom_tools import GAUSSIAN, as_custom, gaussian_likelihood, gaussian_prior

KEY = jax.random.key(3)


def refused(
    key,
    /,
    *facts,
    likelihood=gaussian_likelihood,
    prior=gaussian_prior,
    data=None,
    **keywords,
):
    settings = {"initial": np.zeros(2), "devices": 2, **keywords}
    data = (np.ones((4, 2)), np.ones(4)) if data is None else data
    with raises_input_error(key, *facts):
        wflmc.posterior_from(likelihood, prior, data, **settings)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """Parameters beside what is none, as in a module of Equinox."""

    weight: Any
    layers: Any = ()


@pytest.mark.parametrize(
    ("layers", "leaf", "facts"),
    [
        (
            [{"activation": jnp.tanh}],
            "[0]['activation']",
            ("function", "eqx.partition", "eqx.combine"),
        ),
        ((0.0, "relu"), "[1]", ("'relu'",)),
        (object(), "", ("object",)),
        ([3], "[0]", (3,)),
        ([True], "[0]", (True,)),
        ([np.zeros(2, int)], "[0]", ("int64", "(2,)")),
    ],
)
def test_the_leaf_at_fault_is_named(layers, leaf, facts):
    refused(
        f"initial.layers{leaf}",
        "floating-point array",
        *facts,
        initial=Module(np.zeros(2), layers),
    )


def test_parameters_of_a_module_are_taken():
    def likelihood(module, example):
        return gaussian_likelihood(module.weight, example)

    def prior(module):
        return gaussian_prior(module.weight)

    data = GAUSSIAN.features[:, 0], GAUSSIAN.target[:, 0]
    posterior = wflmc.posterior_from(
        likelihood,
        prior,
        data,
        initial=Module(np.zeros(5), None),
        devices=2,
        mu=1.0,
        L=1e3,
    )
    assert isinstance(posterior.unflatten(np.ones(5)), Module)


def failing(theta, example):
    return deeper(theta) * example[1]


def deeper(theta):
    raise LookupError(f"no such thing for {theta.shape}")


@pytest.mark.parametrize("prior", [False, True])
def test_an_error_in_a_function_of_ones_own_keeps_its_traceback(prior):
    functions = (gaussian_likelihood, deeper) if prior else (failing, gaussian_prior)
    key = "log_prior" if prior else "log_likelihood"
    with raises_input_error(key, "LookupError") as caught:
        wflmc.posterior_from(
            *functions, (np.ones((4, 2)), np.ones(4)), initial=np.zeros(2), devices=2
        )
    assert isinstance(caught.value.__cause__, LookupError)
    shown = "".join(traceback.format_exception(caught.value))
    assert (
        shown.index("in deeper")
        < shown.index("LookupError: no such thing")
        < shown.index("InputError")
    )
    assert ("in failing" in shown) != prior


def branching(theta, example):
    return theta[0] if theta[0] > 0 else theta[1]


def test_wrong_models_are_refused_in_words():
    likelihoods = [
        ("((2,), ())", lambda t, e: t * e[1]),
        ("float32[2]", lambda t, e: t * e[1]),
        ("nothing", lambda t, e: None),
        ("int32[]", lambda t, e: 1),
        ("example 0", lambda t, e: -jnp.sqrt(t @ t) * e[1]),
        ("TypeError", lambda t, e: -t @ jnp.ones(3)),
        ("jnp.where", branching),
        ("jax.numpy", lambda t, e: np.asarray(t)[0]),
        ("float()", lambda t, e: float(t[0])),
        (3.0, 3.0),
        ("look", lambda t, e: -jnp.sum((np.ones(4) - np.ones((4, 2)) @ t) ** 2)),
    ]
    for fact, likelihood in likelihoods:
        refused("log_likelihood", fact, likelihood=likelihood)
    refused(
        "log_likelihood",
        "example 3",
        likelihood=lambda t, e: jnp.log(e[1] - t @ t),
        data=(np.ones((4, 2)), np.array([1.0, 1, 1, -1])),
    )
    refused(
        "log_likelihood",
        "KeyError",
        likelihood=lambda t, e: t["weights"],
        initial={"weight": 0.0},
    )
    for fact, prior in (
        ("float32[2]", lambda t: t),
        ("nan", lambda t: jnp.log(t[0])),
        ("parameters alone", lambda t, e: 0.0),
    ):
        refused("log_prior", fact, prior=prior)
    for facts, data in (
        (("(4, 2)", "(3,)"), (np.ones((4, 2)), np.ones(3))),
        (("(0, 2)", "(0,)"), (np.ones((0, 2)), np.ones(0))),
        (("no arrays",), ()),
        (("(4,)", "()"), (np.ones(4), 1.0)),
        (("()", "np.asarray"), [[1.0, 2.0], [3.0, 4.0]]),
    ):
        refused("data", *facts, data=data)
    refused("data[1]", "<U1", data=(np.ones((4, 2)), np.array(list("abcd"))))
    refused("initial", "int64", "floating-point array", initial=np.zeros(2, int))
    refused("initial", "no parameters", initial=())
    refused("initial", "finite", initial=np.array([np.nan, 0.0]))
    refused("initial", "no parameters", initial=None)
    refused("initial", "sign", likelihood=lambda t, e: (e[1] - t @ e[0]) ** 2)
    refused(
        "mu",
        "convex",
        "-24",
        likelihood=lambda t, e: 3 * e[1] * (t @ t),
        prior=lambda t: 0.0,
    )
    refused("mu", -1.0, mu=-1.0)
    refused("mu", 2.0, "L = 1", mu=2.0, L=1.0)
    refused("mu", "'1'", mu="1")
    refused("batch", 0, batch=0)
    refused("initial_std", -1.0, initial_std=-1.0)
    refused("partition", "iid", "blocks", partition="by-label")
    for facts, devices in (
        ((5, 4), 5),
        (("list of 4",), [0, 0, 2, 2]),
        (("list of 2",), [[0, 1], [1, 2, 3]]),
        (("list of 2",), [[0.0, 1.0], [2.0, 3.0]]),
        (("[0, 1]", "4 examples"), [0, 1]),
        (("missing", "4 examples"), None),
    ):
        refused("devices", *facts, devices=devices)
    refused("key", "jax.random.key", key=0)


def test_wrong_calls_of_a_posterior_are_refused_in_words():
    custom = as_custom(GAUSSIAN, mu=1.0, L=90.0)
    for call in (
        custom.unflatten,
        custom.example_norms,
        lambda t: custom.predictive(gaussian_likelihood, t, np.ones(3)),
    ):
        with raises_input_error("theta", "(1, 2, 7)", "m = 5"):
            call(np.zeros((1, 2, 7)))
    with raises_input_error("theta", "theta[chain, draw, m]"):
        custom.predictive(lambda t, u: t @ u, np.zeros(5), np.ones((3, 5)))
    with raises_input_error("function", "weights", "(5,)"):
        custom.predictive(
            lambda t, u: t["weights"] @ u, np.zeros((1, 1, 5)), np.ones((3, 5))
        )
    with raises_input_error("device", "0 and 5", value=6):
        custom.device(6)
    with raises_input_error("init", "prior", "zero", value="mode"):
        custom.draw_initial(KEY, "mode")


def printing(p, e):
    jax.debug.print("{}", p)
    return -0.5 * (e - p[0]) ** 2


def calling(p, e):
    return -0.5 * (e - jax.pure_callback(np.asarray, p[0], p[0])) ** 2


@pytest.mark.parametrize("log_likelihood", [printing, calling, jax.jit(calling)])
def test_callbacks_are_refused(log_likelihood):
    """What they compute is not in the trace, by which compiled code and ledgers know a model."""
    with raises_input_error("log_likelihood", "callbacks"):
        wflmc.posterior_from(
            log_likelihood,
            lambda p: 0,
            np.ones(8),
            initial=jnp.zeros(1),
            devices=2,
            mu=1.0,
            L=10.0,
        )
