"""Networks of Flax and Equinox: the density is that of the same network written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc

from ..conftest import FULL
from ..error_tools import raises_input_error

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 3)).astype(np.float32), RNG.integers(0, 2, 24)
WEIGHTS = {
    "inner": RNG.normal(size=(3, 4)).astype(np.float32),
    "outer": RNG.normal(size=(4, 2)).astype(np.float32),
}


def log_likelihood(logits, label):
    return jax.nn.log_softmax(logits)[label]


def linen():
    from flax import linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            hidden = jnp.tanh(nn.Dense(4, use_bias=False)(x))
            return nn.Dense(2, use_bias=False)(hidden)

    return wflmc.from_flax(Network(), log_likelihood, (X, Y), devices=3, prior=2.0)


def nnx():
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
            self.outer = nnx.Linear(4, 2, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.outer(jnp.tanh(self.inner(x)))

    return wflmc.from_flax(
        Network(nnx.Rngs(0)), log_likelihood, (X, Y), devices=3, prior=2.0
    )


def equinox():
    import equinox as eqx

    network = eqx.nn.MLP(
        3,
        2,
        4,
        1,
        activation=jnp.tanh,
        use_bias=False,
        use_final_bias=False,
        key=jax.random.key(0),
    )
    return wflmc.from_equinox(network, log_likelihood, (X, Y), devices=3, prior=2.0)


@pytest.mark.skipif(not FULL, reason="make test-full runs it")
@pytest.mark.parametrize("make", [linen, nnx, equinox], ids=lambda make: make.__name__)
def test_density_is_that_of_the_network_by_hand(make):
    pytest.importorskip(
        "equinox" if make is equinox else "flax", reason="pip install flax equinox"
    )
    posterior = make()
    order = ("inner", "outer")
    # Equinox stores weights as [out, in].
    turn = (lambda w: w.T) if make is equinox else (lambda w: w)
    theta = np.concatenate([np.ravel(turn(WEIGHTS[name])) for name in order])[None]
    logits = np.tanh(X @ WEIGHTS["inner"]) @ WEIGHTS["outer"]
    log_densities = np.asarray(jax.nn.log_softmax(logits))[np.arange(24), Y]
    np.testing.assert_allclose(
        np.sort(posterior.log_likelihood(theta)[0]), np.sort(log_densities), rtol=1e-4
    )
    np.testing.assert_allclose(
        posterior.model.prior_cost(theta[0]), 0.5 * np.sum(theta**2) / 4, rtol=1e-5
    )
    np.testing.assert_allclose(
        posterior.apply(posterior.unflatten(theta[0]), X[0]),
        logits[0],
        rtol=1e-4,
        atol=1e-5,
    )
    assert posterior.mu == 0.25
    assert "L" in posterior.estimated
    assert posterior.model.sites.symmetric


@pytest.mark.skipif(not FULL, reason="make test-full runs it")
def test_networks_say_why_parameters_cannot_mix():
    pytest.importorskip("equinox", reason="pip install equinox")
    posterior = equinox()
    link = wflmc.Link(wflmc.channel.static(), snr_db=100)
    privacy = wflmc.Privacy(clip=1e3)
    # So short that nothing mixes.
    how = {
        "step_size": 1e-6,
        "burn_in": 0,
        "samples": 8,
        "initial_w2_sq": 1.0,
    }
    plan = wflmc.plan(posterior, link, privacy, **how)
    starts = RNG.normal(size=(3, posterior.dim))
    trace = wflmc.sample(jax.random.key(0), posterior, plan, chains=3, initial=starts)
    evaluation = wflmc.evaluate(
        trace, posterior, functions={"first": lambda net: posterior.apply(net, X[0])}
    )
    text = " ".join(evaluation.warnings)
    assert "can change places" in text
    assert "R-hat of first" in text


def test_the_curvature_of_the_prior_is_not_that_of_other_coordinates():
    eqx = pytest.importorskip("equinox", reason="pip install equinox")
    posterior = wflmc.from_equinox(
        eqx.nn.Linear(3, 1, key=jax.random.key(0)),
        lambda output, target: -0.5 * jnp.sum((output - target) ** 2),
        (X, Y.astype(np.float32)),
        devices=3,
        prior=0.1,
        preconditioner="laplace",
    )
    assert posterior.mu <= posterior.L
    assert "mu" in posterior.estimated


def test_bad_modules_are_refused():
    pytest.importorskip("flax", reason="pip install flax")
    with raises_input_error("module", "flax.nnx", "flax.linen"):
        wflmc.from_flax(lambda x: x, log_likelihood, (X, Y), devices=2)
