"""A hierarchical model: every hospital is a device with a level of its own, drawn from
a population that is learned.

What is predicted is a hospital that has sent nothing yet: how far hospitals differ
decides how sure one may be.

    python examples/hierarchical.py        # --epsilon 2 …
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp, ndtri

import wflmc
from reference import log_density, nuts, table, with_error

HOSPITALS, RECORDS, NEW = 20, 30, 2000
MEAN, SPREAD, SLOPE = (
    1.0,
    0.7,
    -0.5,
)  # of the population that data are drawn from; the noise of a record has variance 1
DELTA = 1e-5


def load():
    """Records of the hospitals, and one record of each of many new hospitals with its
    true level.
    """
    rng = np.random.default_rng(0)

    def draw(hospitals, records):
        hospital = np.repeat(np.arange(hospitals), records)
        level, x = rng.normal(MEAN, SPREAD, hospitals), rng.normal(size=hospital.size)
        y = level[hospital] + SLOPE * x + rng.normal(size=hospital.size)
        return {"hospital": hospital, "x": x, "y": y}, level

    return draw(HOSPITALS, RECORDS)[0], draw(NEW, 1)


def log_likelihood(parameters, record):
    level = (
        parameters["mean"]
        + jnp.exp(parameters["log_spread"]) * parameters["offset"][record["hospital"]]
    )
    return -0.5 * (record["y"] - level - parameters["slope"] * record["x"]) ** 2


def log_prior(
    parameters,
):  # all N(0, 1); offsets are how many spreads a hospital is from the mean
    return -0.5 * sum(jnp.sum(values**2) for values in jax.tree.leaves(parameters))


def make_posterior(data):
    start = {
        "mean": 0.0,
        "log_spread": 0.0,
        "slope": 0.0,
        "offset": np.zeros(HOSPITALS),
    }
    # The cost is not convex in log_spread: mu and L are values to tune steps by, and no
    # bound holds.
    return wflmc.posterior_from(
        log_likelihood,
        log_prior,
        data,
        initial=start,
        devices=data["hospital"],
        mu=1.0,
        L=2.0 * HOSPITALS * RECORDS,
    )


def reference(posterior, data, draws=1000):
    on_device = jax.tree.map(jnp.asarray, data)
    return nuts(
        jax.random.key(0),
        log_density(posterior, on_device),
        jnp.zeros(posterior.dim),
        500,
        draws,
    )


def run(posterior, privacy, snr_db, chains, burn_in=300, samples=200):
    """Traces of sampling and of descent (penalised maximum likelihood): one link, one
    promise, as many rounds.
    """
    link = wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=snr_db)
    # Kinetic steps mix in far fewer rounds, but a promise's noise weighs more on them.
    kinetic = {
        "step_size": 1 / posterior.L**0.5,
        "sampler": wflmc.Sampler(dynamics="kinetic"),
    }
    how = kinetic if privacy.epsilon is None else {"step_size": 1 / posterior.L}
    rounds = {"burn_in": burn_in, "samples": samples, "initial_w2_sq": 1.0}
    sampling = wflmc.plan(
        posterior, link, privacy, policy=wflmc.Policy("equal", "all"), **rounds, **how
    )
    descent = wflmc.baselines.gradient_descent(
        posterior,
        link,
        privacy,
        step_size=1 / posterior.L,
        rounds=burn_in + samples,
        average=samples,
        schedule="all",
    )
    return [
        wflmc.sample(jax.random.key(1), posterior, plan, chains=chains)
        for plan in (sampling, descent)
    ]


def new_hospitals(posterior, theta, new):
    """Spread found, coverage of 90 % intervals for the levels of new hospitals, and NLL
    of their records, [replica].
    """
    (records, levels), found = new, posterior.unflatten(theta.astype(float))
    mean, spread, slope = (
        values[..., None]
        for values in (found["mean"], np.exp(found["log_spread"]), found["slope"])
    )
    grid = ndtri((np.arange(200) + 0.5) / 200)
    drawn = (mean + spread * grid).reshape(
        len(theta), -1
    )  # levels of hospitals that might be
    low, high = np.quantile(drawn, [0.05, 0.95], axis=1)
    covered = ((levels >= low[:, None]) & (levels <= high[:, None])).mean(1)
    log_p = [
        -0.5 * (records["y"] - m - b * records["x"]) ** 2 / (s**2 + 1)
        - 0.5 * np.log(2 * np.pi * (s**2 + 1))
        for m, s, b in zip(mean, spread, slope, strict=True)
    ]
    nll = [-(logsumexp(values, 0) - np.log(len(values))).mean() for values in log_p]
    return spread.mean((1, 2)), covered, np.array(nll)


def main():
    options = argparse.ArgumentParser(
        description="A hierarchical model, private and not"
    )
    options.add_argument("--epsilon", type=float, default=8.0)
    given = options.parse_args()
    data, new = load()
    posterior = make_posterior(data)
    known = reference(posterior, data)
    promise = {
        "epsilon": given.epsilon,
        "delta": DELTA,
        "unit": "record",
        "example_clip": 2.0,
    }
    free = run(posterior, wflmc.Privacy(clip=300.0), 70, 60)
    private = run(posterior, wflmc.Privacy(clip=2.0 * RECORDS, **promise), 40, 60)
    a, b = free[0].theta.reshape(-1, posterior.dim), known[0]
    apart, ratio = np.abs(a.mean(0) - b.mean(0)) / b.std(0), a.std(0) / b.std(0)
    print(
        f"No privacy: means at most {apart.max():.2f} standard deviations from NUTS's,"
    )
    print(
        f"standard deviations {ratio.min():.2f} to {ratio.max():.2f} times NUTS's, {posterior.dim} parameters.\n"
    )
    rows = [["NUTS", "none", *map(with_error, new_hospitals(posterior, known, new))]]
    for name, (sampling, descent) in (
        ("none", free),
        (f"ε = {given.epsilon:g}", private),
    ):
        kinds = {"WFLMC": sampling.theta, "descent, last": descent.theta[:, -1:]}
        kinds["descent, average"] = descent.theta.mean(1, keepdims=True)
        rows += [
            [n, name, *map(with_error, new_hospitals(posterior, t, new))]
            for n, t in kinds.items()
        ]
    print(
        f"{NEW} new hospitals; true spread {SPREAD}; mean ± standard error over 60 replicas; δ = {DELTA:g} per record"
    )
    table(["", "privacy", "spread", "coverage of 90 %", "NLL"], rows)


if __name__ == "__main__":
    main()
