"""Bayesian logistic regression on the breast-cancer data: against NUTS, and under
privacy against gradient descent.

python examples/logistic.py            # --epsilon 8, --unit device, --steps 0.5 …
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import wflmc
from reference import log_density, needs, nuts, table, with_error

DEVICES, TRAIN = 20, 400
DELTA = 1e-5  # well below one over the number of records
# gradients of records have norms of 2 at the start, and far below 1 where the chain
# ends
EXAMPLE_CLIP = 1.0


def load():
    """Standardised features and labels: (X, y) to train on, and (X, y) to test on.
    Means and scales are public.
    """
    X, y = needs("sklearn.datasets", "scikit-learn").load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    X, y = X[order], y[order]
    X = (X - X[:TRAIN].mean(0)) / X[:TRAIN].std(0)
    return (X[:TRAIN], y[:TRAIN]), (X[TRAIN:], y[TRAIN:])


def logit(parameters, features):
    return parameters["weights"] @ features + parameters["intercept"]


def log_likelihood(parameters, example):  # of one record
    features, label = example
    return label * logit(parameters, features) - jax.nn.softplus(
        logit(parameters, features)
    )


def log_prior(parameters):  # N(0, 1) on every parameter, up to a constant
    return -0.5 * (
        parameters["weights"] @ parameters["weights"] + parameters["intercept"] ** 2
    )


def make_posterior(train):
    start = {"weights": np.zeros(train[0].shape[1]), "intercept": 0.0}
    # The prior alone makes the cost 1-strongly convex; p(1 − p) ≤ 1/4 bounds the
    # curvature of every record.
    rows = np.column_stack([train[0], np.ones(len(train[0]))])
    smoothness = 1 + np.linalg.norm(rows, 2) ** 2 / 4
    return wflmc.posterior_from(
        log_likelihood,
        log_prior,
        train,
        initial=start,
        devices=DEVICES,
        mu=1.0,
        L=float(smoothness),
    )


def reference(posterior, train, draws=1000):
    on_device = jax.tree.map(lambda values: jnp.asarray(values, jnp.float32), train)
    return nuts(
        jax.random.key(0),
        log_density(posterior, on_device),
        jnp.zeros(posterior.dim),
        300,
        draws,
    )


def exact_posterior(posterior, chains=60, burn_in=250, samples=150):
    """No privacy constraint, everyone sends: kinetic Langevin, whose law is exact for
    Gaussian posteriors.
    """
    link, privacy = (
        wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=60),
        wflmc.Privacy(clip=100.0),
    )
    plan = wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=1 / posterior.L**0.5,
        burn_in=burn_in,
        samples=samples,
        sampler=wflmc.Sampler(dynamics="kinetic"),
        policy=wflmc.Policy(power="equal", schedule="all"),
    )
    return wflmc.sample(jax.random.key(1), posterior, plan, chains=chains)


def private(posterior, epsilon, step_size, unit="record", rounds=200, chains=40):
    """Traces of sampling and of descent: one link, one promise, as many rounds, as
    large a step.
    """
    link = wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=30)
    clip = EXAMPLE_CLIP * TRAIN / DEVICES
    by_record = (
        {"unit": "record", "example_clip": EXAMPLE_CLIP} if unit == "record" else {}
    )
    privacy = wflmc.Privacy(epsilon=epsilon, delta=DELTA, clip=clip, **by_record)
    half, policy = rounds // 2, wflmc.Policy(power="equal", schedule="all")
    sampling = wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=step_size,
        burn_in=half,
        samples=half,
        policy=policy,
    )
    descent = wflmc.baselines.gradient_descent(
        posterior,
        link,
        privacy,
        step_size=step_size,
        rounds=rounds,
        average=half,
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
    p = posterior.predictive(lambda q, u: jax.nn.sigmoid(logit(q, u)), theta, test[0])
    p = np.clip(np.asarray(p, float), 1e-30, 1 - 1e-16)
    found = wflmc.evaluation.calibration(np.stack([1 - p, p], -1), test[1])
    return found.accuracy, found.ece, found.nll


def main():
    options = argparse.ArgumentParser(
        description="Bayesian logistic regression, private and not"
    )
    options.add_argument("--epsilon", type=float, default=1.0)
    options.add_argument("--unit", choices=["record", "device"], default="record")
    options.add_argument(
        "--steps",
        type=float,
        nargs="+",
        default=[0.2, 0.5, 1.5],
        help="step sizes times L",
    )
    given = options.parse_args()
    train, test = load()
    posterior = make_posterior(train)
    known, found = reference(posterior, train), exact_posterior(posterior).theta
    a, b = found.reshape(-1, posterior.dim), known[0]
    apart, ratio = np.abs(a.mean(0) - b.mean(0)) / b.std(0), a.std(0) / b.std(0)
    print(
        f"No privacy: means at most {apart.max():.2f} standard deviations from NUTS's,"
    )
    print(
        f"standard deviations {ratio.min():.2f} to {ratio.max():.2f} times NUTS's, {posterior.dim} parameters.\n"
    )
    rows = [["NUTS, no privacy", "", *map(with_error, scores(posterior, known, test))]]
    for times in given.steps:
        sampling, descent = private(
            posterior, given.epsilon, times / posterior.L, given.unit
        )
        kinds = {"WFLMC": sampling.theta, "descent, last": descent.theta[:, -1:]}
        kinds["descent, average"] = descent.theta.mean(1, keepdims=True)
        rows += [
            [n, f"{times:g}/L", *map(with_error, scores(posterior, t, test))]
            for n, t in kinds.items()
        ]
    print(
        f"ε = {given.epsilon:g}, δ = {DELTA:g} per {given.unit}; mean ± standard error over 40 replicas"
    )
    table(["", "step", "accuracy", "ECE", "NLL"], rows)


if __name__ == "__main__":
    main()
