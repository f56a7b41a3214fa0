"""A starting point: replace X and y by your data, then run this file."""

import jax
import numpy as np

import wflmc

# X[examples, features], standardised, and y[examples]. These are synthetic.
generator = np.random.default_rng(0)
X = generator.standard_normal((1200, 5))
y = X @ [0.5, -0.5, 1.0, 0.7, 0.4] + generator.standard_normal(1200)

# For labels (whole numbers or text) use wflmc.softmax_regression with the same arguments.
posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30, X=X, y=y)

link = wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=20)
# Hides one example. example_clip: the typical norm of one example's gradient; clip: of a device's.
privacy = wflmc.Privacy(epsilon=3, delta=1e-5, unit="record", example_clip=5, clip=30)
plan = wflmc.plan(
    posterior,
    link,
    privacy,
    step_size=0.4 / (posterior.mu + posterior.L),
    burn_in=50,
    samples=50,
    policy=wflmc.Policy(max_round_noise=1.0),
)
print(f"bound on W2²             {plan.objective:.3g}")

trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=100)
# test=(X_test, y_test) would add scores of the predictions.
print(wflmc.evaluate(trace, posterior))
print(f"posterior mean           {np.round(trace.theta.mean((0, 1)), 3)}")
# trace.to_arviz(posterior) is an ArviZ object; trace.save("trace.nc") writes the draws.
