"""Models of one's own that cannot work, refused in words."""

import dataclasses
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc

from .custom_tools import GAUSSIAN, as_own, gaussian_likelihood, gaussian_prior

KEY = jax.random.key(3)


def refused(
    match, likelihood=gaussian_likelihood, prior=gaussian_prior, data=None, **keywords
):
    given = {"initial": np.zeros(2), "devices": 2, **keywords}
    data = (np.ones((4, 2)), np.ones(4)) if data is None else data
    with pytest.raises(wflmc.InputError, match=match):
        wflmc.posterior_from(likelihood, prior, data, **given)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """Parameters beside what is none, as in a module of Equinox."""

    weight: Any
    layers: Any = ()


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            [{"activation": jnp.tanh}],
            r"initial\.layers\[0\]\['activation'\] is a function.*eqx.partition.*eqx.combine",
        ),
        (
            (0.0, "relu"),
            r"initial\.layers\[1\] = 'relu' was given.*a floating-point array.*leave out",
        ),
        (object(), r"initial\.layers is an object.*a floating-point array"),
        ([3], r"initial\.layers\[0\] = 3 was given.*such as 0.0 for 0"),
        ([True], r"initial\.layers\[0\] = True was given.*such as 0.0 for 0"),
        (
            [np.zeros(2, int)],
            r"initial\.layers\[0\] is an array of type int64 and shape \(2,\).*such as 0.0 for 0",
        ),
    ],
)
def test_the_leaf_at_fault_is_named(layers, words):
    refused(words, initial=Module(np.zeros(2), layers))


def test_parameters_of_a_module_are_taken():
    def likelihood(module, example):
        return gaussian_likelihood(module.weight, example)

    def prior(module):
        return gaussian_prior(module.weight)

    data = GAUSSIAN.features[:, 0], GAUSSIAN.target[:, 0]
    made = wflmc.posterior_from(
        likelihood,
        prior,
        data,
        initial=Module(np.zeros(5), None),
        devices=2,
        mu=1.0,
        L=1e3,
    )
    assert isinstance(made.unflatten(np.ones(5)), Module)


def failing(theta, example):
    return deeper(theta) * example[1]


def deeper(theta):
    raise LookupError(f"no such thing for {theta.shape}")


@pytest.mark.parametrize("prior", [False, True])
def test_an_error_in_a_function_of_ones_own_keeps_its_traceback(prior):
    functions = (gaussian_likelihood, deeper) if prior else (failing, gaussian_prior)
    with pytest.raises(wflmc.InputError, match=r"fails: LookupError") as caught:
        wflmc.posterior_from(
            *functions, (np.ones((4, 2)), np.ones(4)), initial=np.zeros(2), devices=2
        )
    assert isinstance(caught.value.__cause__, LookupError)
    shown = "".join(traceback.format_exception(caught.value))
    assert (
        shown.index("in deeper")
        < shown.index("LookupError: no such thing for (2,)")
        < shown.index("InputError")
    )
    assert ("in failing" in shown) != prior


def branching(theta, example):
    return theta[0] if theta[0] > 0 else theta[1]


def test_wrong_models_are_refused_in_words():
    refused(
        r"returns float32\[2\].*ONE example.*one floating-point number",
        lambda t, e: t * e[1],
    )
    refused(r"log_prior.*returns float32\[2\]", prior=lambda t: t)
    refused(r"log_likelihood.*returns nothing", lambda t, e: None)
    refused(r"returns int32\[\]", lambda t, e: 1)
    refused(
        r"nan or infinite at example 3",
        lambda t, e: jnp.log(e[1] - t @ t),
        data=(np.ones((4, 2)), np.array([1.0, 1, 1, -1])),
    )
    refused(
        r"gradient that is nan or infinite at example 0",
        lambda t, e: -jnp.sqrt(t @ t) * e[1],
    )
    refused(r"log_prior.*nan", prior=lambda t: jnp.log(t[0]))
    refused(
        r"shapes \(4, 2\), \(3,\).*one first axis", data=(np.ones((4, 2)), np.ones(3))
    )
    refused(r"at least one example", data=(np.ones((0, 2)), np.ones(0)))
    refused(r"no arrays", data=())
    refused(r"first axis", data=(np.ones(4), 1.0))
    refused(r"real numbers", data=(np.ones((4, 2)), np.array(list("abcd"))))
    refused(r"fails: TypeError.*\(2,\), \(\)", lambda t, e: -t @ jnp.ones(3))
    refused(r"KeyError", lambda t, e: t["weights"], initial={"weight": 0.0})
    refused(r"jnp.where in place of if", branching)
    refused(r"jax.numpy in place of numpy", lambda t, e: np.asarray(t)[0])
    refused(r"a JAX function", 3.0)
    refused(r"log_prior.*parameters alone", prior=lambda t, e: 0.0)
    refused(r"floating-point array", initial=np.zeros(2, int))
    refused(r"at least one array", initial=())
    refused(r"finite", initial=np.array([np.nan, 0.0]))
    refused(
        r"mu was not given.*not convex.*eigenvalue -24",
        lambda t, e: 3 * e[1] * (t @ t),
        lambda t: 0.0,
    )
    refused(r"mu = -1.0.*finite and above 0", mu=-1.0)
    refused(r"batch = 0", batch=0)
    refused(r"initial_std", initial_std=-1.0)
    refused(r"iid or blocks", partition="by-label")
    refused(r"at most the number of examples", devices=5)
    refused(
        r"a list of 4 values.*a list of each device's examples", devices=[0, 0, 2, 2]
    )
    refused(
        r"a list of 2 values.*a list of each device's examples",
        devices=[[0, 1], [1, 2, 3]],
    )
    refused(
        r"a list of 2 values.*a list of each device's examples",
        devices=[[0.0, 1.0], [2.0, 3.0]],
    )
    refused(r"of each of the 4 examples", devices=[0, 1])
    refused(r"initial has no parameters", initial=None)
    refused(r"devices is missing.*a number of devices", devices=None)
    refused(r"at most L = 1", mu=2.0, L=1.0)
    refused(r"mu = '1'.*a number", mu="1")
    refused(r"key = 0.*jax.random.key", key=0)
    refused(
        r"does not look at its example",
        lambda t, e: -jnp.sum((np.ones(4) - np.ones((4, 2)) @ t) ** 2),
    )
    refused(r"in place of numpy and float\(\)", lambda t, e: float(t[0]))
    refused(r"np.asarray makes one of a list", data=[[1.0, 2.0], [3.0, 4.0]])
    refused(r"is a sign wrong", lambda t, e: (e[1] - t @ e[0]) ** 2)


def test_wrong_calls_of_a_posterior_are_refused_in_words():
    own = as_own(GAUSSIAN, mu=1.0, L=90.0)
    for call in (
        own.unflatten,
        own.example_norms,
        lambda t: own.predictive(gaussian_likelihood, t, np.ones(3)),
    ):
        with pytest.raises(wflmc.InputError, match=r"shape \(1, 2, 7\).*m = 5"):
            call(np.zeros((1, 2, 7)))
    with pytest.raises(wflmc.InputError, match=r"theta\[chain, draw, m\]"):
        own.predictive(lambda t, u: t @ u, np.zeros(5), np.ones((3, 5)))
    with pytest.raises(wflmc.InputError, match=r"function fails: .*ONE of the inputs"):
        own.predictive(
            lambda t, u: t["weights"] @ u, np.zeros((1, 1, 5)), np.ones((3, 5))
        )
    with pytest.raises(wflmc.InputError, match="between 0 and 5"):
        own.device(6)
    with pytest.raises(wflmc.InputError, match="one of prior, zero"):
        own.draw_initial(KEY, "mode")


def printing(p, e):
    jax.debug.print("{}", p)
    return -0.5 * (e - p[0]) ** 2


def calling(p, e):
    return -0.5 * (e - jax.pure_callback(np.asarray, p[0], p[0])) ** 2


@pytest.mark.parametrize("log_likelihood", [printing, calling, jax.jit(calling)])
def test_callbacks_are_refused(log_likelihood):
    """What they compute is not in the trace, by which compiled code and ledgers know a model."""
    with pytest.raises(wflmc.InputError, match="calls back to Python"):
        wflmc.posterior_from(
            log_likelihood,
            lambda p: 0,
            np.ones(8),
            initial=jnp.zeros(1),
            devices=2,
            mu=1.0,
            L=10.0,
        )
