"""Gradients that are not finite: whether a number overflows is private, and no noise hides that an answer is none.

The attacker is the server, which chooses θ, or whoever knows for which θ a record of a model of one's own has no
gradient. It asks for an answer there: with one of two neighbouring data sets it would be nan, with the other a number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps.federation.device import Device
from wflmc.apps.federation.job import make_job
from wflmc.apps.federation.messages import RoundRequest
from wflmc.support.errors import SamplingError

from ..error_tools import raises_input_error


def _likelihood(theta, x):
    return jnp.log(x - theta[0])


def _prior(theta):
    return -0.5 * theta @ theta


def own(records):
    data = np.asarray(records, np.float32)
    return wflmc.posterior_from(
        _likelihood, _prior, data, initial=jnp.zeros(1), devices=1, mu=1.0, L=10.0
    )


@pytest.mark.parametrize("unit", ["device", "record"])
def test_a_record_or_device_without_a_gradient_adds_nothing(unit):
    """At θ = 2 the record 2 has an infinite gradient, and its neighbour 9 a small one."""
    clips = np.array([3.0], np.float32)
    theta = jnp.full(1, 2.0)
    sums = {}
    for name, last in {"infinite": [2.0], "small": [9.0], "absent": []}.items():
        total, norm = own([4.0, 5.0, *last]).unrounded_sum(
            theta, np.ones(1), clips, None, clips if unit == "record" else None
        )
        sums[name] = total.double
        assert np.isnan(norm[0]) == (name == "infinite")
    # All gradients are within the clips. A record that is clipped by itself is left out
    # of the sum; where only the device is clipped, the device as a whole is.
    expected = sums["absent"] if unit == "record" else 0.0
    np.testing.assert_allclose(sums["infinite"], expected, rtol=1e-6)
    assert np.abs(sums["small"] - sums["absent"]).max() > 0.1
    assert np.abs(sums["small"] - sums["infinite"]).max() <= 6


def test_a_chain_of_a_simulation_stops_there():
    posterior = own([4.0, 5.0, 1.0])
    link = wflmc.Link(channel.static(), snr_db=40)
    privacy = wflmc.Privacy(1, 1e-5, 30.0, unit="record", example_clip=3.0)
    plan = wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=0.01,
        burn_in=1,
        samples=1,
        initial_w2_sq=1.0,
    )
    with pytest.raises(SamplingError, match="gradient"):
        wflmc.sample(
            jax.random.key(0), posterior, plan, chains=2, initial=np.ones((2, 1))
        )


def test_a_device_answers_for_no_theta_that_may_overflow():
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=2, examples=20, dim=2
    )
    link = wflmc.Link(channel.static(), snr_db=40)
    privacy = wflmc.Privacy(1, 1e-5, 30.0)
    plan = wflmc.plan(posterior, link, privacy, step_size=1e-3, burn_in=1, samples=1)
    job = make_job(jax.random.key(1), posterior, link, plan)
    device = Device(posterior.device(0), job.terms(0))
    ask = RoundRequest(
        0,
        0,
        np.full((1, 2), 1e9, np.float32),
        float(job.gain[0, 0]),
        float(job.channel_estimates[0, 0]),
    )
    assert np.all(np.isfinite(device.answer(ask)))
    for theta in (1e37, -2e9, np.nan):
        with raises_input_error("theta", "1e+09"):
            device.answer(ask._replace(theta=np.full((1, 2), theta, np.float32)))
    wide = wflmc.gaussian_regression(
        jax.random.key(0),
        1,
        X=np.full((4, 2), 1e10) * np.eye(2)[[0, 1, 0, 1]],
        y=np.ones(4),
    )
    with raises_input_error("data", "1e+09"):
        Device(wide, job.terms(0))
