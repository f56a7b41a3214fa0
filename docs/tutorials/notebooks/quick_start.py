# %% [markdown]
# # Quick start
#
# Thirty devices hold the data of a linear regression. We plan, sample and compare with
# the
# exact posterior.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

import wflmc

posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
link = wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=20)
privacy = wflmc.Privacy(epsilon=15, delta=0.01, clip=30)
posterior

# %% [markdown]
# ## A plan
#
# The plan says which devices transmit in every round and how strongly. Its ε is for
# adjacency `replace`.

# %%
plan = wflmc.plan(
    posterior,
    link,
    privacy,
    step_size=0.4 / (posterior.mu + posterior.L),
    burn_in=50,
    samples=50,
)
print(plan.regime_share)
print(f"ε spent: {plan.epsilon_spent:.3g} ({plan.privacy.adjacency})")

# %% [markdown]
# ## Samples

# %%
trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=100)
print(wflmc.evaluate(trace, posterior))

# %%
figure, axes = plt.subplots(figsize=(6, 3))
axes.hist(
    trace.theta[..., 0].ravel(), bins=60, density=True, alpha=0.5, label="samples"
)
grid = np.linspace(*axes.get_xlim(), 200)
mean, sd = posterior.exact.mean[0], posterior.exact.covariance[0, 0] ** 0.5
axes.plot(
    grid,
    np.exp(-0.5 * ((grid - mean) / sd) ** 2) / (sd * np.sqrt(2 * np.pi)),
    label="posterior",
)
axes.set_xlabel("θ[0]")
axes.legend()
