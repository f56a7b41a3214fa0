"""The SBFL baseline against what it estimates, and against its steps written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps.baselines import estimate_from_signs, sbfl, stable_step_size
from wflmc.support.errors import InputError, SamplingError
from wflmc.support.keys import named

from ..conftest import FULL
from ..sampling.compile_tools import gradients


def test_the_estimate_is_the_conditional_mean():
    """Entries from the prior, sent and heard: among those heard near some y, the mean entry is the estimate."""
    key = jax.random.key(0)
    mean = 0.3
    spread = 2.0
    gain = 0.5
    snr = 3.0
    entries = mean + spread * jax.random.normal(key, (1, 2_000_000))
    noise = jax.random.normal(jax.random.key(1), entries.shape)
    guess = estimate_from_signs(entries, jnp.array([gain]), jnp.array([snr]), noise)
    guess = np.asarray(guess)[0]
    received = np.asarray(gain * jnp.sign(entries - mean) + noise / snr**0.5)[0]
    for low in np.linspace(-1.5, 1.5, 7):
        near = (received > low) & (received < low + 0.05)
        error = spread / near.sum() ** 0.5
        assert (
            abs(np.asarray(entries)[0][near].mean() - guess[near].mean())
            < 4 * error + 1e-3
        )


def test_limits_of_the_estimate():
    gradient = jax.random.normal(jax.random.key(0), (3, 50))
    noise = jax.random.normal(jax.random.key(1), gradient.shape)
    mean, spread = gradient.mean(1, keepdims=True), gradient.std(1, keepdims=True)
    clear = mean + np.sqrt(2 / np.pi) * spread * jnp.sign(gradient - mean)
    np.testing.assert_allclose(
        estimate_from_signs(gradient, jnp.ones(3), jnp.full(3, 1e6), noise),
        clear,
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        estimate_from_signs(gradient, jnp.ones(3), jnp.full(3, 1e-12), noise),
        jnp.broadcast_to(mean, (3, 50)),
        atol=1e-5,
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_written_out(momentum):
    """At a very high SNR the noise is silent and two iterations can be done by hand."""
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 3, examples=31, dim=4, classes=3, partition="dirichlet:1"
    )
    links = [
        wflmc.Link(channel.rayleigh(1.0), snr_db=120, seed=seed) for seed in range(2)
    ]
    key = jax.random.key(5)
    step = 1 / (1 + posterior.L / 31)  # the authors'
    actual = sbfl(
        key,
        posterior,
        links,
        rounds=8,
        step_size=step,
        momentum=momentum,
        numbers=[0, 7],
    )
    for row, number in enumerate([0, 7]):
        theta = posterior.draw_initial(jax.random.fold_in(named(key, "init"), number))
        velocity = 0.0
        for _ in range(2):  # ⌊8/3⌋
            gradient = gradients(posterior, theta) / posterior.sizes[:, None]
            mean, spread = (
                gradient.mean(1, keepdims=True),
                gradient.std(1, keepdims=True),
            )
            velocity = momentum * velocity + (
                mean + np.sqrt(2 / np.pi) * spread * jnp.sign(gradient - mean)
            ).sum(0)
            theta = theta - step * velocity
        np.testing.assert_allclose(actual[row], theta, rtol=1e-4, atol=1e-4)


def test_noise_and_channels_written_out():
    """At a moderate SNR, with the noise drawn again: other noise in every iteration and experiment, own gains."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    links = [
        wflmc.Link(channel.rayleigh(1.0), snr_db=3, seed=seed) for seed in range(2)
    ]
    key = jax.random.key(5)
    actual = sbfl(
        key, posterior, links, rounds=9, momentum=0.5, step_size=0.01, numbers=[4, 7]
    )
    for row, (link, number) in enumerate(zip(links, [4, 7], strict=True)):
        theta = posterior.draw_initial(jax.random.fold_in(named(key, "init"), number))
        velocity = 0.0
        gains = np.abs(link.gains(9, 3))
        for iteration in range(3):
            noise_key = jax.random.fold_in(
                jax.random.fold_in(named(key, "sbfl"), number), iteration
            )
            noise = jax.random.normal(noise_key, (3, 5))
            total = 0.0
            for k in range(3):
                g = gradients(posterior, theta)[k] / posterior.sizes[k]
                h = gains[3 * iteration + k, k]  # devices take turns
                y = h * jnp.sign(g - g.mean()) + noise[k] / np.sqrt(link.snr(1)[0])
                total += g.mean() + np.sqrt(2 / np.pi) * g.std() * jnp.tanh(
                    h * y * link.snr(1)[0]
                )
            velocity = 0.5 * velocity + total
            theta = theta - 0.01 * velocity
        np.testing.assert_allclose(actual[row], theta, rtol=1e-4, atol=1e-4)


def test_it_learns_when_the_channel_is_good():
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=300)
    good, bad = ([wflmc.Link(channel.static(1.0), snr_db=snr)] for snr in (60, -60))
    distance = {}
    for name, links in (("good", good), ("bad", bad)):
        theta = sbfl(
            jax.random.key(0), posterior, links, rounds=300, momentum=0.0, step_size=0.1
        )
        distance[name] = np.linalg.norm(theta[0] - posterior.mean)
    assert distance["good"] < 0.2 < distance["bad"]


@pytest.mark.parametrize("iterations", [20, 300] if FULL else [300])
def test_with_two_parameters_it_is_linear_and_ends_at_the_mean(iterations):
    """Two entries minus their mean are (d, −d), of standard deviation |d|: one bit then loses only a factor."""
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=3, examples=30, dim=2
    )
    key = jax.random.key(5)
    link = wflmc.Link(channel.static(1.0), snr_db=100)
    momentum = 0.9
    theta = sbfl(key, posterior, [link], rounds=3 * iterations, momentum=momentum)[0]

    average = np.full((2, 2), 0.5)
    received = average + np.sqrt(2 / np.pi) * (np.eye(2) - average)
    # Each device has 10 examples.
    pull = received @ np.linalg.inv(posterior.covariance) / 10
    step = stable_step_size(posterior, momentum)
    eye = np.eye(2)
    move = np.block(
        [[eye - step * pull, -step * momentum * eye], [pull, momentum * eye]]
    )
    start = np.asarray(
        posterior.draw_initial(jax.random.fold_in(named(key, "init"), 0)), float
    )
    state = np.linalg.matrix_power(move, iterations) @ np.append(
        start - posterior.mean, np.zeros(2)
    )
    np.testing.assert_allclose(theta - posterior.mean, state[:2], rtol=1e-3, atol=2e-5)
    # The best that momentum allows is √0.9 = 0.949.
    assert np.abs(np.linalg.eigvals(move)).max() < 0.95


def test_the_usual_step_is_stable():
    """One bit leaves a bias, as devices' gradients do not vanish at the mode; it does not grow with the rounds."""
    owner = np.repeat(np.arange(5), (300, 100, 50, 30, 20))
    generator = np.random.default_rng(0)
    features = generator.normal(size=(owner.size, 5))
    outcomes = features @ [0.1, -0.5, 0.9, 0.7, 0.5] + generator.normal(size=owner.size)
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), 5, X=features, y=outcomes, partition=owner
    )
    links = [
        wflmc.Link(channel.rayleigh(1.0), snr_db=20, seed=seed) for seed in range(3)
    ]
    theta = sbfl(jax.random.key(1), posterior, links, rounds=3000)
    # Chains start about √6 away.
    assert np.linalg.norm(theta - posterior.mean, axis=1).max() < 0.15


@pytest.mark.parametrize("step_size", [0.5, 1e30], ids=["finite", "not finite"])
def test_divergence_is_an_error(step_size):
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    with pytest.raises(SamplingError, match="step_size"):
        sbfl(
            jax.random.key(1),
            posterior,
            [wflmc.Link(channel.static(1.0))],
            rounds=60,
            step_size=step_size,
        )


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"rounds": 2}, "rounds"),
        ({"momentum": 1.0}, "momentum"),
        ({"step_size": -1.0}, "step_size"),
    ],
)
def test_bad_input(keywords, key):
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    with pytest.raises(InputError) as caught:
        sbfl(
            jax.random.key(0),
            posterior,
            [wflmc.Link(channel.static())],
            **{"rounds": 30, **keywords},
        )
    assert caught.value.key == key
