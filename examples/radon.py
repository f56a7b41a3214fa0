"""Radon-like measurements by county, every county a device, at (8, 1e-5) per record:
coverage of the county means.

python examples/radon.py               # --epsilon 8, --chains 20

Geometry comes from a public survey of the same design, simulated here: ε covers all
that is taken from the data.
"""

import argparse

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import wflmc

COUNTIES, HOMES, DELTA = 30, 60, 1e-5


def draw(seed):
    """Homes of all counties, and the true means of the counties."""
    rng = np.random.default_rng(seed)
    county = np.repeat(np.arange(COUNTIES), HOMES)
    level, basement = rng.normal(1.3, 0.5, COUNTIES), rng.binomial(1, 0.7, county.size)
    data = {"county": county, "basement": basement, "counties": COUNTIES}
    return {
        **data,
        "log_radon": level[county] + 0.6 * basement + rng.normal(0, 0.8, county.size),
    }, level


def model(county, basement, log_radon, counties):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(0, 1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("counties", counties):
        level = numpyro.sample("level", dist.Normal(mean, spread))
    with numpyro.plate("homes", len(county)):
        numpyro.sample(
            "log_radon",
            dist.Normal(level[county] + effect * basement, noise),
            obs=log_radon,
        )


def coverage(levels, truth, share=0.9):
    """Share of counties whose true mean is in the central interval of each chain's
    draws [chain, draw, county].
    """
    low, high = np.quantile(levels, [(1 - share) / 2, (1 + share) / 2], axis=1)
    return ((truth >= low) & (truth <= high)).mean(1)


def main():
    options = argparse.ArgumentParser(description="Radon by county under privacy")
    options.add_argument("--epsilon", type=float, default=8.0)
    options.add_argument("--chains", type=int, default=20)
    given = options.parse_args()
    (data, truth), (public, _) = draw(0), draw(1)
    stand_in = wflmc.from_numpyro(model, public, devices=public["county"])
    posterior = wflmc.from_numpyro(
        model, data, devices=data["county"], preconditioner=stand_in
    )
    link = wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=40)
    privacy = wflmc.Privacy(
        given.epsilon, DELTA, clip=3.0, unit="record", example_clip=0.3
    )
    plan = wflmc.plan(posterior, link, privacy)
    trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=given.chains)
    levels = posterior.unflatten(trace.theta)["level"]
    found = coverage(levels, truth)
    exact = wflmc.plan(
        posterior,
        wflmc.Link(wflmc.channel.static(), snr_db=150),
        wflmc.Privacy(clip=1e5),
    )
    free = posterior.unflatten(
        wflmc.sample(jax.random.key(1), posterior, exact, chains=20).theta
    )["level"]
    error = found.std(ddof=1) / len(found) ** 0.5
    wide = levels.std((0, 1)).mean() / free.std((0, 1)).mean()
    promise = f"(ε, δ) = ({given.epsilon:g}, {DELTA:g}) per record (replace)"
    print(f"{promise}, {len(plan.rounds)} rounds of {COUNTIES} counties")
    print(
        f"noise after burn-in: {plan.noise_ratio:.2f} times what sampling needs; ε spent {plan.epsilon_spent:.3g}"
    )
    print(
        f"coverage of 90 % intervals of the county means: {found.mean():.3f} ± {error:.3f}"
    )
    print(f"without privacy: {coverage(free.reshape(1, -1, COUNTIES), truth)[0]:.3f}")
    print(f"spread of the county means: {wide:.2f} times that without privacy")
    print(*plan.warnings, sep="\n")


if __name__ == "__main__":
    main()
