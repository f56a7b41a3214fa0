# %% [markdown]
# # A Bayesian neural network in Flax, with calibration
#
# Digits of 8 × 8 pixels, 1000 of them on ten devices, at (ε, δ) = (8, 1e-5) per image,
# adjacency `replace`.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

import wflmc

X, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(y))
X, y = (X[order] / 8 - 1).astype(np.float32), y[order]
train, test = (X[:1000], y[:1000]), (X[1000:], y[1000:])


class Network(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = (
            nnx.Linear(64, 16, rngs=rngs),
            nnx.Linear(16, 10, rngs=rngs),
        )

    def __call__(self, pixels):
        return self.outer(nnx.tanh(self.inner(pixels / 4)))


def log_likelihood(logits, digit):
    return jax.nn.log_softmax(logits)[digit]


posterior = wflmc.from_flax(
    Network(nnx.Rngs(0)), log_likelihood, train, devices=10, prior=1.0, L=500.0
)
posterior

# %%
link = wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=30)
privacy = wflmc.Privacy(
    epsilon=8, delta=1e-5, clip=100.0, unit="record", example_clip=1.0
)
plan = wflmc.plan(
    posterior, link, privacy, step_size=0.003, burn_in=225, samples=75,
    initial_w2_sq=1.0, policy=wflmc.Policy(power="equal", schedule="all"),
)  # fmt: skip
trace = wflmc.sample(jax.random.key(2), posterior, plan, chains=4)

# %% [markdown]
# ## Which diagnostic to believe
#
# Hidden units are exchangeable, so R-hat of the weights means little. Look at R-hat of
# the predictions.

# %%
functions = {
    "predictions": lambda q: jax.nn.softmax(
        jax.vmap(lambda u: posterior.apply(q, u))(test[0][:20])
    )
}
evaluation = wflmc.evaluate(trace, posterior, functions=functions)
print(evaluation)
print(*evaluation.warnings, sep="\n")

# %% [markdown]
# ## Calibration

# %%
p = posterior.predictive(
    lambda q, u: jax.nn.softmax(posterior.apply(q, u)), trace.theta, test[0]
)
scores = wflmc.evaluation.calibration(np.maximum(np.asarray(p, float), 1e-30), test[1])
print(
    f"accuracy {scores.accuracy.mean():.3f}, ECE {scores.ece.mean():.3f}, NLL {scores.nll.mean():.3f}"
)

# %%
sure, right = p.max(-1).ravel(), (p.argmax(-1) == test[1]).ravel()
bins = np.clip((sure * 10).astype(int), 0, 9)
figure, axes = plt.subplots(figsize=(4, 4))
shown = [b for b in range(10) if (bins == b).sum() > 20]
axes.plot(
    [sure[bins == b].mean() for b in shown],
    [right[bins == b].mean() for b in shown],
    "o-",
)
axes.plot([0, 1], [0, 1], "k--")
axes.set(xlabel="confidence", ylabel="accuracy")
