"""Gradients that are not finite: whether a number overflows is private, and no noise hides that an answer is none.

The attacker is the server, which chooses θ, or whoever knows for which θ a record of a model of one's own has no
gradient. It asks for an answer there: with one of two neighbouring data sets it would be nan, with the other a number.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps.federation.device import Device
from wflmc.apps.federation.job import make_job
from wflmc.apps.federation.messages import RoundRequest
from wflmc.sums import softmax as softmax_sums
from wflmc.sums import softmax_classes, softmax_rows
from wflmc.support.errors import SamplingError

from ..conftest import FULL
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


LARGEST = 1e9
"""The largest number that a device accepts in its data, and in θ."""
ROWS = {"short": (1, 8), "whole": (9, 100), "in steps": (300, 2100)}
"""Rows per device, two for each layout on CPUs."""
THETAS = np.array(
    [[3.1, 7.3, 5.7], [-7.9, 1.3, 7.1], [9.9e8, -3.3e8, 9.7e8], [3e-9, 7e8, 1.0]]
)
"""θ of four chains and three classes, of one feature."""
CLIP = 1e4
EXAMPLE_CLIP = 1.0


def classes_of_extremes(rows, dim, first, label=0):
    """A softmax model of one device of all rows, the first of which the attacker replaces."""
    features = np.ones((rows, dim))
    features[1::3] = LARGEST
    features[2::3] = -LARGEST / 3
    features[0] = first
    labels = np.arange(rows) % 3
    labels[0] = label
    return wflmc.softmax_regression(
        jax.random.key(0), 1, X=features, y=labels, classes=3, partition="blocks"
    )


def change_of_classes(rows, dim, unit, chain_sums):
    """Return the largest change of a sum over what is paid for; nan where one is not finite."""
    theta = np.repeat(THETAS, dim, axis=1).astype(np.float32)
    clip = np.full(1, CLIP)
    limit = np.full(1, EXAMPLE_CLIP if unit == "record" else np.inf)
    sums = []
    for first, label in ((1.0, 0), (-LARGEST, 0), (LARGEST, 2), (0.0, 1)):
        posterior = classes_of_extremes(rows, dim, first, label)
        divisor = 1 + posterior.rounding(clip, limit).total
        ready = posterior.on_accelerator(len(theta), 2.0**28, unit == "record")
        total = chain_sums(
            ready,
            theta,
            np.float32(clip / divisor),
            np.float32(limit / divisor) if unit == "record" else None,
        )
        sums.append(total.double)
    changes = np.linalg.norm(np.array(sums)[1:] - sums[0], axis=2)
    return np.max(changes) / (2 * min(CLIP, float(limit[0])))


def unrounded(posterior, theta, clip, example_clip):
    def of_chain(place):
        return posterior.unrounded_sum(
            place, np.ones(1, np.float32), clip, example_clip=example_clip
        ).total

    return jax.vmap(of_chain)(theta)


chain_sums = jax.jit(unrounded)


@pytest.mark.parametrize(
    ("backend", "dim", "unit"),
    list(product(["cpu", "gpu"], [1, 2], ["device", "record"]))
    if FULL
    else [("cpu", 1, "record"), ("gpu", 1, "device")],
)
@pytest.mark.parametrize("layout", ROWS)
def test_sums_of_classes_are_finite_for_all_that_devices_accept(
    layout, dim, unit, backend, monkeypatch
):
    """One feature's logits are no matrix product, and XLA may compute each twice."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for rows in ROWS[layout]:
        assert change_of_classes(rows, dim, unit, chain_sums) <= 1


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [5, 50, 300] if FULL else [50])
def test_a_row_without_residuals_adds_nothing(rows, backend, monkeypatch):
    """Where logits are computed twice after all, records are still read one by one."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    jax.clear_caches()
    for module in (softmax_sums, softmax_classes, softmax_rows):
        monkeypatch.setattr(module, "hold_logits", lambda products, dim: products)
    without_hold = jax.jit(lambda *arguments: unrounded(*arguments))
    assert change_of_classes(rows, 1, "record", without_hold) <= 1
    jax.clear_caches()


@pytest.mark.parametrize(
    ("rows", "dim"),
    list(product([5, 50, 300], [1, 2])) if FULL else [(5, 1), (50, 2), (300, 1)],
)
def test_a_record_moves_an_answer_by_its_clip_at_most(rows, dim):
    """The server chooses θ; without noise, as here, an answer is the sum of the device."""
    first = classes_of_extremes(rows, dim, 1.0)
    link = wflmc.Link(channel.static(), snr_db=60)
    privacy = wflmc.Privacy(1, 1e-5, CLIP, unit="record", example_clip=EXAMPLE_CLIP)
    plan = wflmc.plan(first, link, privacy, step_size=1e-3, burn_in=1, samples=1)
    job = make_job(jax.random.key(1), first, link, plan)
    for theta in np.repeat(THETAS, dim, axis=1):
        ask = RoundRequest(
            0,
            0,
            np.float32(theta[None]),
            float(job.gain[0, 0]),
            float(job.channel_estimates[0, 0]),
        )
        answers = []
        for value in (1.0, -LARGEST):
            posterior = classes_of_extremes(rows, dim, value)
            device = Device(posterior.device(0), replace(job.terms(0), simulated=True))
            answers.append(device.answer(ask)[0].astype(float))
        amplitude = job.gain[0, 0] / job.channel_estimates[0, 0]
        change = np.linalg.norm(np.subtract(*answers)) / amplitude
        assert change <= 2 * EXAMPLE_CLIP * (1 + 1e-6 * CLIP)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [1, 5, 50, 300] if FULL else [5, 300])
def test_a_record_that_is_predicted_almost_surely_is_clipped_as_sent(
    rows, backend, monkeypatch
):
    """Its residuals are all rounding: those of its norm must be those that are added."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    generator = np.random.default_rng(rows)
    row = np.float32(LARGEST * generator.uniform(-1, 1, 2))
    gaps = generator.uniform(12, 22, 64)
    theta = np.zeros((64, 6), np.float32)
    theta[:, :2] = gaps[:, None] * row / np.sum(row.astype(float) ** 2)
    limits = np.full(1, EXAMPLE_CLIP)
    sums = []
    for first, label in ((0 * row, 0), (row, 0), (row, 1)):
        features = np.full((rows, 2), 1e-3)
        features[0] = first
        labels = np.zeros(rows, int)
        labels[0] = label
        posterior = wflmc.softmax_regression(
            jax.random.key(0), 1, X=features, y=labels, classes=3, prior_std=1e9
        )
        divisor = 1 + posterior.rounding(limits * 100, limits).total
        ready = posterior.on_accelerator(64, 2.0**28, by_example=True)
        clips = np.float32(limits * 100 / divisor), np.float32(limits / divisor)
        sums.append(chain_sums(ready, theta, *clips).double)
    changes = np.linalg.norm(np.array(sums)[1:] - sums[0], axis=2)
    assert 0.9 < np.max(changes) <= EXAMPLE_CLIP


OVERFLOWS = {
    "a row above 2^60": (1e22, 1.0, 1.0),
    "its product with a narrow prior": (1e22, 1.0, 1e-9),
    "the largest row of float32": (3e38, 2.0, 1.0),
    "logits": (1e12, 1e27, 1.0),
    "logits of a row above 2^60": (1e30, 1e9, 1.0),
}
"""Feature, parameter and deviation of the prior."""


@jax.jit
def _clipped_records(posterior, theta):
    clips = jnp.full(2, 10.0)
    total = posterior.unrounded_sum(theta, jnp.ones(2), clips, None, jnp.ones(2)).total
    return jnp.stack(total.pair)


@pytest.mark.parametrize("rows", [3, 9] if not FULL else [1, 3, 8, 9, 300])
@pytest.mark.parametrize("layout", ["as it is", "laid out", "chains last"])
def test_a_softmax_record_that_overflows_adds_nothing(layout, rows):
    """It changes nothing of what other records and devices send: 0 · ∞ would show."""
    for feature, parameter, prior_std in OVERFLOWS.values():
        theta = np.pad(np.full(2, parameter, np.float32), (0, 4))
        sums = []
        for first in (feature, 0.0):
            X = np.ones((2 * rows, 2))
            X[0] = first
            posterior = wflmc.softmax_regression(
                jax.random.key(0),
                2,
                X=X,
                y=np.zeros(2 * rows, int),
                classes=3,
                partition="blocks",
                prior_std=prior_std,
            )
            if layout != "as it is":
                posterior = posterior.on_accelerator(1, 2.0**30, True)
                is_last = layout == "chains last"
                posterior = replace(posterior, chains_last=is_last)
            sums.append(_clipped_records(posterior, theta))
        assert np.isfinite(sums).all()
        np.testing.assert_allclose(sums[0][0], sums[1][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [wflmc.softmax_regression, wflmc.gaussian_regression])
def test_numbers_that_float32_cannot_hold_are_refused(model):
    X = np.ones((4, 2))
    X[1, 1] = -1e39
    with raises_input_error("data"):
        model(jax.random.key(0), 2, X=X, y=np.array([0, 1, 0, 1]))
