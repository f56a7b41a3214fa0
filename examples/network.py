"""A small Bayesian neural network on handwritten digits, trained under privacy: against
descent, and against NUTS.

python examples/network.py             # --epsilon 8, --steps 0.002 …
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import wflmc
from reference import log_density, needs, nuts, table, with_error

DEVICES, TRAIN, HIDDEN = 10, 1000, 10
DELTA = 1e-5  # well below one over the number of images
EXAMPLE_CLIP = 1.0


def load():
    """Pixels from −1 to 1 and digits: (X, y) to train on, and (X, y) to test on."""
    X, y = needs("sklearn.datasets", "scikit-learn").load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    X, y = X[order] / 8 - 1, y[order]
    return (X[:TRAIN], y[:TRAIN]), (X[TRAIN:], y[TRAIN:])


def logits(parameters, pixels):
    """Two layers; the factors keep their inputs of order one when every parameter is
    N(0, 1), as the prior has it.
    """
    hidden = jnp.tanh(parameters["in"] @ pixels / 4 + parameters["bias"])
    return parameters["out"] @ hidden * 3 / HIDDEN**0.5 + parameters["level"]


def log_likelihood(parameters, example):
    pixels, digit = example
    return jax.nn.log_softmax(logits(parameters, pixels))[digit]


def log_prior(parameters):
    return -0.5 * sum(jnp.sum(values**2) for values in jax.tree.leaves(parameters))


def make_posterior(train):
    rng = np.random.default_rng(1)
    start = {
        "in": rng.normal(
            size=(HIDDEN, 64)
        ),  # unlike one another, or all hidden units would stay alike
        "bias": rng.normal(size=HIDDEN),
        "out": np.zeros((10, HIDDEN)),
        "level": np.zeros(10),
    }
    # The cost of a network is not convex: mu and L are values to tune steps by, and no
    # bound holds.
    return wflmc.posterior_from(
        log_likelihood,
        log_prior,
        train,
        initial=start,
        devices=DEVICES,
        mu=1.0,
        L=500.0,
    )


def reference(posterior, train, warmup=100, draws=100):
    """Hidden units may change places, so that only predictions can be compared, not
    weights.
    """
    on_device = (jnp.asarray(train[0], jnp.float32), jnp.asarray(train[1]))
    start = jnp.asarray(posterior.start, jnp.float32)
    return nuts(
        jax.random.key(0),
        log_density(posterior, on_device),
        start,
        warmup,
        draws,
        doublings=6,
    )


def private(posterior, epsilon, step_size, rounds=400, chains=8):
    """Traces of sampling and of descent: one link, one promise, as many rounds, as
    large a step.
    """
    link = wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=30)
    clip = EXAMPLE_CLIP * TRAIN / DEVICES
    privacy = wflmc.Privacy(
        epsilon=epsilon,
        delta=DELTA,
        clip=clip,
        unit="record",
        example_clip=EXAMPLE_CLIP,
    )
    keep, policy = rounds // 4, wflmc.Policy(power="equal", schedule="all")
    steps = {"step_size": step_size, "burn_in": rounds - keep, "samples": keep}
    sampling = wflmc.plan(
        posterior, link, privacy, **steps, policy=policy, initial_w2_sq=1.0
    )
    descent = wflmc.baselines.gradient_descent(
        posterior,
        link,
        privacy,
        step_size=step_size,
        rounds=rounds,
        average=keep,
        schedule="all",
    )
    return [
        wflmc.sample(jax.random.key(2), posterior, plan, chains=chains)
        for plan in (sampling, descent)
    ]


def scores(posterior, theta, test):
    """Accuracy, ECE and NLL of each replica's mean prediction over its draws,
    theta[replica, draw, m].
    """
    p = posterior.predictive(lambda q, u: jax.nn.softmax(logits(q, u)), theta, test[0])
    found = wflmc.evaluation.calibration(
        np.maximum(np.asarray(p, float), 1e-30), test[1]
    )
    return found.accuracy, found.ece, found.nll


def main():
    options = argparse.ArgumentParser(
        description="A Bayesian neural network under privacy"
    )
    options.add_argument("--epsilon", type=float, default=2.0)
    options.add_argument(
        "--steps", type=float, nargs="+", default=[0.0006, 0.001, 0.003]
    )
    options.add_argument("--chains", type=int, default=8)
    given = options.parse_args()
    train, test = load()
    posterior = make_posterior(train)
    rows = [
        [
            "NUTS, no privacy",
            "",
            *map(with_error, scores(posterior, reference(posterior, train), test)),
        ]
    ]
    for step in given.steps:
        sampling, descent = private(posterior, given.epsilon, step, chains=given.chains)
        kinds = {"WFLMC": sampling.theta, "descent, last": descent.theta[:, -1:]}
        kinds["descent, average"] = descent.theta.mean(1, keepdims=True)
        rows += [
            [name, f"{step:g}", *map(with_error, scores(posterior, t, test))]
            for name, t in kinds.items()
        ]
    print(
        f"{posterior.dim} parameters, ε = {given.epsilon:g}, δ = {DELTA:g} per image; over {given.chains} replicas"
    )
    table(["", "step", "accuracy", "ECE", "NLL"], rows)


if __name__ == "__main__":
    main()
