"""The SBFL baseline against what it estimates, and against its steps written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.baselines import estimate, sbfl
from wflmc.errors import InputError
from wflmc.keys import named


def test_the_estimate_is_the_conditional_mean():
    """Entries from the prior, sent and heard: among those heard near some y, the mean entry is the estimate."""
    key = jax.random.key(0)
    mean, spread, gain, snr = 0.3, 2.0, 0.5, 3.0
    entries = mean + spread * jax.random.normal(key, (1, 2_000_000))
    noise = jax.random.normal(jax.random.key(1), entries.shape)
    guess = np.asarray(estimate(entries, jnp.array([gain]), snr, noise))[0]
    heard = np.asarray(gain * jnp.sign(entries - mean) + noise / snr**0.5)[0]
    for low in np.linspace(-1.5, 1.5, 7):
        near = (heard > low) & (heard < low + 0.05)
        error = spread / near.sum() ** 0.5
        assert abs(np.asarray(entries)[0][near].mean() - guess[near].mean()) < 4 * error + 1e-3


def test_limits_of_the_estimate():
    gradient = jax.random.normal(jax.random.key(0), (3, 50))
    noise = jax.random.normal(jax.random.key(1), gradient.shape)
    mean, spread = gradient.mean(1, keepdims=True), gradient.std(1, keepdims=True)
    clear = mean + np.sqrt(2 / np.pi) * spread * jnp.sign(gradient - mean)
    np.testing.assert_allclose(estimate(gradient, jnp.ones(3), 1e6, noise), clear, rtol=1e-5)
    np.testing.assert_allclose(
        estimate(gradient, jnp.ones(3), 1e-12, noise), jnp.broadcast_to(mean, (3, 50)), atol=1e-5
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_written_out(momentum):
    """At a very high SNR the noise is silent and two iterations can be done by hand."""
    posterior = wflmc.softmax_regression(jax.random.key(0), 3, examples=31, dim=4, classes=3, partition="dirichlet:1")
    links = [wflmc.Link(channel.rayleigh(1.0), snr_db=120, seed=seed) for seed in range(2)]
    key = jax.random.key(5)
    found = sbfl(key, posterior, links, rounds=8, momentum=momentum, numbers=[0, 7])
    step = 1 / (1 + posterior.L / 31)
    for row, number in enumerate([0, 7]):
        theta = posterior.draw_initial(jax.random.fold_in(named(key, "init"), number))
        velocity = 0.0
        for _ in range(2):  # ⌊8/3⌋
            gradient = posterior.gradients(theta) / posterior.sizes[:, None]
            mean, spread = gradient.mean(1, keepdims=True), gradient.std(1, keepdims=True)
            velocity = momentum * velocity + (mean + np.sqrt(2 / np.pi) * spread * jnp.sign(gradient - mean)).sum(0)
            theta = theta - step * velocity
        np.testing.assert_allclose(found[row], theta, rtol=1e-4, atol=1e-4)


def test_noise_and_channels_written_out():
    """At a moderate SNR, with the noise drawn again: other noise in every iteration and experiment, own gains."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    links = [wflmc.Link(channel.rayleigh(1.0), snr_db=3, seed=seed) for seed in range(2)]
    key = jax.random.key(5)
    found = sbfl(key, posterior, links, rounds=9, momentum=0.5, step_size=0.01, numbers=[4, 7])
    for row, (link, number) in enumerate(zip(links, [4, 7], strict=True)):
        theta, velocity = posterior.draw_initial(jax.random.fold_in(named(key, "init"), number)), 0.0
        gains = np.abs(link.gains(9, 3))
        for iteration in range(3):
            noise_key = jax.random.fold_in(jax.random.fold_in(named(key, "sbfl"), number), iteration)
            noise = jax.random.normal(noise_key, (3, 5))
            total = 0.0
            for k in range(3):
                g = posterior.gradients(theta)[k] / posterior.sizes[k]
                h = gains[3 * iteration + k, k]  # devices take turns
                y = h * jnp.sign(g - g.mean()) + noise[k] / np.sqrt(link.snr(1)[0])
                total += g.mean() + np.sqrt(2 / np.pi) * g.std() * jnp.tanh(h * y * link.snr(1)[0])
            velocity = 0.5 * velocity + total
            theta = theta - 0.01 * velocity
        np.testing.assert_allclose(found[row], theta, rtol=1e-4, atol=1e-4)


def test_it_learns_when_the_channel_is_good():
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=300)
    good, bad = ([wflmc.Link(channel.static(1.0), snr_db=snr)] for snr in (60, -60))
    distance = {}
    for name, links in (("good", good), ("bad", bad)):
        theta = sbfl(jax.random.key(0), posterior, links, rounds=300, momentum=0.0, step_size=0.1)
        distance[name] = np.linalg.norm(theta[0] - posterior.mean)
    assert distance["good"] < 0.2 < distance["bad"]


@pytest.mark.parametrize(
    ("keywords", "key"),
    [({"rounds": 2}, "rounds"), ({"momentum": 1.0}, "momentum"), ({"step_size": -1.0}, "step_size")],
)
def test_bad_input(keywords, key):
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    with pytest.raises(InputError) as caught:
        sbfl(jax.random.key(0), posterior, [wflmc.Link(channel.static())], **{"rounds": 30, **keywords})
    assert caught.value.key == key
