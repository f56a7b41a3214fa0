"""A Bayesian neural network in Flax on handwritten digits, under privacy: beside
federated descent at the same ε.

python examples/flax_network.py        # --epsilon 8, --step 0.002, --chains 8
"""

import argparse

import jax
import numpy as np
from flax import nnx

import wflmc
from network import DELTA, load
from reference import table, with_error

DEVICES, HIDDEN, CLIP = 10, 16, 1.0


class Network(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.inner, self.outer = (
            nnx.Linear(64, HIDDEN, rngs=rngs),
            nnx.Linear(HIDDEN, 10, rngs=rngs),
        )

    def __call__(self, pixels):
        return self.outer(nnx.tanh(self.inner(pixels / 4)))


def log_likelihood(logits, digit):
    return jax.nn.log_softmax(logits)[digit]


def make_posterior(train):
    # The cost of a network is not convex: L is a value to tune steps by, and no bound
    # holds.
    return wflmc.from_flax(
        Network(nnx.Rngs(0)), log_likelihood, train, devices=DEVICES, prior=1.0, L=500.0
    )


def make_plans(posterior, epsilon, step_size, rounds=300):
    """Plans of sampling and of descent: one link, one promise, as many rounds, as large
    a step.
    """
    link = wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=30)
    clip = CLIP * float(posterior.sizes.max())
    privacy = wflmc.Privacy(
        epsilon=epsilon, delta=DELTA, clip=clip, unit="record", example_clip=CLIP
    )
    keep, policy = rounds // 4, wflmc.Policy(power="equal", schedule="all")
    steps = {
        "step_size": step_size,
        "burn_in": rounds - keep,
        "samples": keep,
        "initial_w2_sq": 1.0,
    }
    sampling = wflmc.plan(posterior, link, privacy, **steps, policy=policy)
    descent = wflmc.baselines.gradient_descent(
        posterior,
        link,
        privacy,
        step_size=step_size,
        rounds=rounds,
        average=keep,
        schedule="all",
    )
    return sampling, descent


def scores(posterior, theta, test):
    """Accuracy, ECE and NLL of each replica's mean prediction over its draws,
    theta[replica, draw, m].
    """
    p = posterior.predictive(
        lambda q, u: jax.nn.softmax(posterior.apply(q, u)), theta, test[0]
    )
    found = wflmc.evaluation.calibration(
        np.maximum(np.asarray(p, float), 1e-30), test[1]
    )
    return found.accuracy, found.ece, found.nll


def main():
    options = argparse.ArgumentParser(
        description="A Bayesian neural network in Flax under privacy"
    )
    options.add_argument("--epsilon", type=float, default=8.0)
    options.add_argument("--step", type=float, nargs="+", default=[0.001, 0.003])
    options.add_argument("--chains", type=int, default=8)
    given = options.parse_args()
    train, test = load()
    posterior, rows = make_posterior(train), []
    for step in given.step:
        sampling, descent = make_plans(posterior, given.epsilon, step)
        traces = [
            wflmc.sample(jax.random.key(2), posterior, plan, chains=given.chains)
            for plan in (sampling, descent)
        ]
        kinds = {"WFLMC": traces[0].theta, "descent, last": traces[1].theta[:, -1:]}
        kinds["descent, average"] = traces[1].theta.mean(1, keepdims=True)
        rows += [
            [name, f"{step:g}", *map(with_error, scores(posterior, t, test))]
            for name, t in kinds.items()
        ]
    functions = {
        "predictions": lambda q: jax.nn.softmax(
            jax.vmap(lambda u: posterior.apply(q, u))(test[0][:20])
        )
    }
    print(
        f"{posterior.dim} parameters, (ε, δ) = ({given.epsilon:g}, {DELTA:g}) per image (replace)"
    )
    table(["", "step", "accuracy", "ECE", "NLL"], rows)
    evaluation = wflmc.evaluate(traces[0], posterior, functions=functions)
    print(evaluation, *evaluation.warnings, sep="\n")


if __name__ == "__main__":
    main()
