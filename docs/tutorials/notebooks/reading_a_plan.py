# %% [markdown]
# # Reading a plan
#
# A plan is everything that the sampler needs. It has three parts: the rounds, a
# certificate and a context.

# %%
import jax
import matplotlib.pyplot as plt

import wflmc

posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
link = wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=20)
privacy = wflmc.Privacy(epsilon=15, delta=0.01, clip=30)
settings = {
    "step_size": 0.4 / (posterior.mu + posterior.L),
    "burn_in": 50,
    "samples": 50,
}
plan = wflmc.plan(posterior, link, privacy, **settings)
plan

# %% [markdown]
# ## What limits a round
#
# Every round is at one of three limits: the noise that Langevin sampling needs,
# transmit power, or the privacy budget.

# %%
print(plan.regime_share)
print(f"noise after burn-in, over what sampling needs: {plan.noise_ratio:.2f}")
print(
    f"ε spent by the worst device: {plan.epsilon_spent:.3g} ({plan.privacy.adjacency})"
)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3))
axes[0].plot(plan.gain)
axes[0].set(xlabel="round", ylabel="gain α")
axes[1].semilogy(plan.bound, label="bound")
axes[1].semilogy(wflmc.exact_w2_sq(posterior, plan), label="exact, no clipping")
axes[1].set(xlabel="round", ylabel="W2²")
axes[1].legend()
# %% [markdown]
# ## What would help

# %%
for cause in wflmc.advise(posterior, link, privacy, **settings):
    print(cause)

# %% [markdown]
# ## The warnings
#
# Warnings state what the numbers do not cover.

# %%
print(*plan.warnings, sep="\n")
