# %% [markdown]
# # A custom NumPyro model
#
# A NumPyro model is used as it is: its sites are the parameters, and its observations
# are
# split over devices.

# %%
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import wflmc


def model(dose, events):
    level = numpyro.sample("level", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    size = numpyro.sample("size", dist.Gamma(2, 0.5))
    with numpyro.plate("patients", len(dose)):
        mean = jax.numpy.exp(level + slope * dose)
        numpyro.sample("events", dist.NegativeBinomial2(mean, size), obs=events)


rng = np.random.default_rng(0)
dose = rng.normal(size=1500)
data = {
    "dose": dose,
    "events": rng.negative_binomial(3, 3 / (3 + np.exp(0.5 + 0.8 * dose))),
}
posterior = wflmc.from_numpyro(model, data, devices=15)
posterior

# %% [markdown]
# ## Without privacy, over an ideal link
#
# `plan` chooses what it is not given: kinetic dynamics, step size, burn-in and samples.

# %%
ideal = wflmc.Link(wflmc.channel.static(), snr_db=150)
plan = wflmc.plan(posterior, ideal, wflmc.Privacy(clip=1e5))
trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=40)
for site, values in posterior.unflatten(trace.theta).items():
    print(f"{site:6s} {values.mean():.3f} ± {values.std():.3f}")

# %% [markdown]
# ## Against NUTS

# %%
nuts = numpyro.infer.MCMC(
    numpyro.infer.NUTS(model), num_warmup=500, num_samples=2000, progress_bar=False
)
nuts.run(jax.random.key(0), **data)
for site, values in sorted(nuts.get_samples().items()):
    print(f"{site:6s} {values.mean():.3f} ± {values.std():.3f}")

# %% [markdown]
# ## With privacy
#
# (ε, δ) = (8, 1e-5) per record, adjacency `replace`. The pilot chains look at the data
# here, which ε does not cover; the plan's warnings state this. With the posterior of
# public
# data as `preconditioner`, everything is covered.

# %%
privacy = wflmc.Privacy(
    epsilon=8, delta=1e-5, clip=2.0, unit="record", example_clip=0.2
)
private = wflmc.plan(
    posterior, wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=40), privacy
)
trace = wflmc.sample(jax.random.key(2), posterior, private, chains=40)
print(
    len(private.rounds),
    "rounds, noise",
    round(private.noise_ratio, 2),
    "times what sampling needs",
)
for site, values in posterior.unflatten(trace.theta).items():
    print(f"{site:6s} {values.mean():.3f} ± {values.std():.3f}")
print(*private.warnings, sep="\n")
