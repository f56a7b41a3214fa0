"""Federated gradient descent: against its law in closed form, within every limit, and at the mode without noise."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from wflmc import channel
from wflmc.apps.baselines import gradient_descent

from ..conftest import count
from ..error_tools import codes_of, raises_input_error
from ..posterior.custom_tools import GAUSSIAN, as_custom

CHAINS = count(2000, 20_000)
LIMIT = 4.0
"""Largest |z| allowed."""


def hessians(posterior):
    """H_k and b_k of the gradients H_k θ − b_k, by the gradients themselves."""
    points = np.concatenate([np.zeros((1, posterior.dim)), np.eye(posterior.dim)])
    gradients = np.stack(
        [
            np.asarray(posterior.gradients(jax.numpy.asarray(row, np.float32)), float)
            for row in points
        ]
    )
    return (gradients[1:] - gradients[0]).transpose(1, 2, 0), -gradients[0]


def test_noisy_descent_has_its_law():
    """Mean and covariance of the last iterate and of the average, by the recursion and its unrolled noise."""
    link = wflmc.Link(
        channel.static(np.geomspace(1, 0.1, 6)), snr_db=70, noise_power=0.3
    )
    # The threshold is far above every gradient, which costs privacy.
    privacy = wflmc.Privacy(epsilon=1e7, delta=1e-3, clip=1e4)
    rounds = 12
    averaged = 5
    step = 0.2 / (GAUSSIAN.mu + GAUSSIAN.L)
    plan = gradient_descent(
        GAUSSIAN,
        link,
        privacy,
        step_size=step,
        rounds=rounds,
        average=averaged,
        init="zero",
    )
    assert np.all(plan.server_noise == 0)
    assert plan.epsilon_spent == pytest.approx(1e7)
    trace = wflmc.sample(jax.random.key(5), GAUSSIAN, plan, chains=CHAINS)
    assert trace.clip_rate.max() == 0

    H, b = hessians(GAUSSIAN)
    noise = link.noise_power * (step * plan.weight.max(-1) / plan.gain) ** 2
    mean = np.zeros(GAUSSIAN.dim)
    path = []
    means = []
    paths = []
    for s in range(rounds):
        move = np.eye(GAUSSIAN.dim) - step * np.einsum("k,kij->ij", plan.weight[s], H)
        mean = move @ mean + step * plan.weight[s] @ b
        path = [move @ shock for shock in path] + [
            np.sqrt(noise[s]) * np.eye(GAUSSIAN.dim)
        ]
        means.append(mean)
        paths.append(path + [np.zeros_like(move)] * (rounds - 1 - s))
    responses = np.array(paths)  # [round, source of noise, m, m]
    cases = {
        "last": (trace.theta[:, -1], means[-1], responses[-1]),
        "average": (
            trace.theta.mean(1),
            np.mean(means[-averaged:], 0),
            responses[-averaged:].mean(0),
        ),
    }
    for name, (theta, expected, response) in cases.items():
        covariance = np.einsum("sij,skj->ik", response, response)
        variance = np.diagonal(covariance)
        z = (theta.mean(0) - expected) / np.sqrt(variance / CHAINS)
        assert np.abs(z).max() < LIMIT, name
        sample_covariance = np.cov(theta.T)
        # The standard error of a sample covariance.
        spread = np.sqrt((covariance**2 + np.outer(variance, variance)) / CHAINS)
        assert np.abs((sample_covariance - covariance) / spread).max() < LIMIT, name


@given(
    epsilon=st.floats(0.1, 50),
    snr_db=st.floats(-20, 80),
    clip=st.floats(0.1, 1e3),
    clip_ratio=st.none() | st.floats(0.01, 3),
    rounds=st.integers(1, 40),
    schedule=st.sampled_from(["threshold", "all"]),
    csi_error=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
)
def test_no_limit_is_exceeded_and_one_is_met(
    epsilon, snr_db, clip, clip_ratio, rounds, schedule, csi_error, seed
):
    unit = (
        {}
        if clip_ratio is None
        else {"unit": "record", "example_clip": clip_ratio * clip}
    )
    privacy = wflmc.Privacy(epsilon=epsilon, delta=1e-5, clip=clip, **unit)
    link = wflmc.Link(
        channel.rayleigh(0.1),
        snr_db=snr_db,
        noise_power=2.0,
        seed=seed,
        csi_error=csi_error,
    )
    plan = gradient_descent(
        GAUSSIAN,
        link,
        privacy,
        step_size=1 / GAUSSIAN.L,
        rounds=rounds,
        schedule=schedule,
    )
    budget = privacy.budget(6)
    assert np.all(plan.spent <= budget)
    assert plan.epsilon_spent <= epsilon * (1 + 1e-6)
    h = np.abs(link.gains(rounds, 6))
    known = h if csi_error == 0 else h / link.mismatch(rounds, 6)
    # The largest ‖x_k‖².
    power = np.where(plan.weight > 0, (plan.gain[:, None] * clip / known) ** 2, 0.0)
    limit = 10 ** (snr_db / 10) * GAUSSIAN.dim * link.noise_power
    assert np.all(power <= limit * (1 + 1e-9))
    # In every round either power or an equal part of someone's budget holds devices back.
    turns = np.maximum((plan.weight > 0).sum(0), 1)
    at_budget = (plan.loss >= budget / turns * (1 - 1e-6)).any(-1)
    assert np.all(at_budget | (power.max(-1) >= limit * (1 - 1e-6)))


def test_without_noise_it_ends_at_the_mode():
    custom = as_custom(GAUSSIAN, mu=GAUSSIAN.mu, L=GAUSSIAN.L)
    link = wflmc.Link(channel.static(), snr_db=200)
    plan = gradient_descent(
        custom, link, wflmc.Privacy(clip=1e4), step_size=1.5 / custom.L, rounds=60
    )
    trace = wflmc.sample(jax.random.key(0), custom, plan, chains=2)
    np.testing.assert_allclose(
        trace.theta[:, -1], np.tile(GAUSSIAN.mean, (2, 1)), atol=1e-5
    )
    assert plan.epsilon_spent is None
    assert "bound" not in str(wflmc.evaluate(trace, custom)).lower()


def test_it_sends_more_strongly_than_sampling_does():
    """A good link and no promise: sampling keeps the noise that it wants, descent none that it can avoid."""
    link = wflmc.Link(channel.static(), snr_db=60)
    common = {"step_size": 0.1 / GAUSSIAN.L}
    descent = gradient_descent(
        GAUSSIAN, link, wflmc.Privacy(), rounds=4, average=2, **common
    )
    sampling = wflmc.plan(
        GAUSSIAN, link, wflmc.Privacy(), burn_in=2, samples=2, **common
    )
    assert np.all(descent.noise_variance < 1e-3 * sampling.noise_variance)
    np.testing.assert_allclose(descent.power_share, 1)
    assert descent.regime_share["power-limited"] == 1
    assert (len(descent.rounds), descent.burn_in) == (4, 2)


def test_steps_may_change_and_rounds_are_checked():
    link = wflmc.Link(channel.static(), snr_db=20)
    steps = np.linspace(1, 0.1, 5) / GAUSSIAN.L
    plan = gradient_descent(GAUSSIAN, link, wflmc.Privacy(), step_size=steps, rounds=5)
    np.testing.assert_array_equal(plan.step_size, steps)
    assert plan.with_rounds(gain=plan.gain * 2).digest != plan.digest
    for wrong in (0, 6, 2.5):
        with raises_input_error("average"):
            gradient_descent(
                GAUSSIAN,
                link,
                wflmc.Privacy(),
                step_size=steps,
                rounds=5,
                average=wrong,
            )


def test_what_was_spent_and_what_was_estimated_is_not_forgotten():
    link = wflmc.Link(channel.rayleigh(1.0), snr_db=20)
    privacy = wflmc.Privacy(epsilon=5, delta=1e-3, clip=30)
    settings = {"step_size": 1e-3, "rounds": 20, "schedule": "all"}
    spent = 0.4 * privacy.budget(6)
    rest = gradient_descent(GAUSSIAN, link, privacy, ledger=spent, **settings)
    assert rest.epsilon_spent == pytest.approx(5, rel=1e-6)
    np.testing.assert_allclose(rest.spent, 0.6 * privacy.budget(6), rtol=1e-6)
    assert gradient_descent(GAUSSIAN, link, privacy, **settings).warnings == ()
    warned = gradient_descent(as_custom(GAUSSIAN), link, privacy, **settings)
    assert codes_of(warned) == ["estimated-constants"]


@pytest.mark.parametrize(
    "wrong", [{"rounds": 2.5}, {"rounds": 0}, {"schedule": "unbiased"}, {"average": 30}]
)
def test_refused(wrong):
    settings = {"step_size": 1e-3, "rounds": 20} | wrong
    with raises_input_error(next(iter(wrong))):
        gradient_descent(
            GAUSSIAN, wflmc.Link(channel.static()), wflmc.Privacy(clip=30), **settings
        )


def test_who_sends_is_as_asked():
    link = wflmc.Link(channel.rayleigh(1.0), snr_db=-20)
    privacy = wflmc.Privacy(epsilon=5, delta=1e-3, clip=30)
    settings = {"step_size": 0.2 / GAUSSIAN.L, "rounds": 30}
    everyone = gradient_descent(GAUSSIAN, link, privacy, schedule="all", **settings)
    some = gradient_descent(GAUSSIAN, link, privacy, **settings)
    assert everyone.active_devices.min() == 6 > some.active_devices.min()
