"""Clipping examples one by one: sums against autodiff, the sensitivity it buys, planning and sampling with it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.posterior import softmax
from wflmc.support.errors import InputError

from ..conftest import FULL
from ..error_tools import raises_input_error
from ..plan_tools import with_context
from .compile_tools import clipped_sum


def gaussian_likelihood(theta, u, v):
    return -0.5 * (u @ theta - v) ** 2


def softmax_likelihood(theta, u, v):
    return jax.nn.log_softmax(theta.reshape(-1, u.size) @ u)[v.astype(int)]


KINDS = {
    "gaussian": (gaussian_likelihood, "target", lambda: wflmc.gaussian_regression(
        jax.random.key(3), devices=4, examples=37, dim=3, partition="dirichlet:0.5", prior_std=0.7)),
    "many rows": (softmax_likelihood, "labels", lambda: wflmc.softmax_regression(
        jax.random.key(3), 4, examples=61, dim=3, classes=3, partition="dirichlet:0.5", prior_std=0.7)),
    "few rows": (softmax_likelihood, "labels", lambda: wflmc.softmax_regression(
        jax.random.key(3), 9, examples=41, dim=3, classes=3, prior_std=0.7)),
}  # fmt: skip


@functools.cache
def gradient_of(likelihood):
    return jax.jit(jax.grad(lambda t, u, v: -likelihood(t, u, v)))


def by_autodiff(likelihood, posterior, answers, theta, weight, clip, example_clip):
    """The definition: clip every example's gradient, sum, add the prior's share, clip the sum; device by device."""
    gradient = gradient_of(likelihood)
    total = np.zeros(posterior.dim)
    norms = []
    for k in range(posterior.devices):
        rows = slice(posterior.sizes[k])
        own = np.array(theta) / (posterior.devices * posterior.prior_std**2)
        for u, v in zip(posterior.features[k, rows], answers[k, rows], strict=True):
            g = np.asarray(
                gradient(jnp.asarray(theta), jnp.asarray(u), jnp.asarray(v)), float
            )
            own += g * min(1, example_clip[k] / np.linalg.norm(g))
        norms.append(np.linalg.norm(own))
        total += weight[k] * own * min(1, clip[k] / norms[-1])
    return total, np.array(norms)


@pytest.mark.parametrize("kind", KINDS if FULL else ["many rows"])
def test_sums_are_those_of_vmapped_gradients(kind, monkeypatch):
    likelihood, name, make = KINDS[kind]
    posterior = make()
    assert (posterior.features.shape[1] <= softmax.MAX_ROWS_OF_SHORT_DEVICE) == (
        kind == "few rows"
    )
    rng = np.random.default_rng(0)
    theta = rng.standard_normal((3, posterior.dim))
    weight = rng.uniform(size=(3, posterior.devices)) * (
        rng.uniform(size=(3, posterior.devices)) < 0.8
    )
    clip = rng.uniform(1, 8, posterior.devices)
    example_clip = rng.uniform(0.2, 2, posterior.devices)
    expected = [
        by_autodiff(
            likelihood, posterior, getattr(posterior, name), t, w, clip, example_clip
        )
        for t, w in zip(theta, weight, strict=True)
    ]
    # A GPU takes blocks of several devices for softmax too.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for ready in (
        posterior,
        posterior.on_accelerator(3, 1e9, True),
        posterior.on_accelerator(3, 1.0, True),
    ):
        sums = jax.vmap(
            lambda t, w, p=ready: p.clipped_sum(
                t, w, clip, example_clip=jnp.asarray(example_clip)
            )
        )
        actual = jax.jit(sums)(theta.astype(np.float32), weight.astype(np.float32))
        for place, (total, norms) in enumerate(expected):
            np.testing.assert_allclose(actual[0][place], total, rtol=2e-4, atol=2e-4)
            np.testing.assert_allclose(actual[1][place], norms, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_examples(kind):
    likelihood, name, make = KINDS[kind]
    posterior = make()
    theta = np.random.default_rng(1).standard_normal(posterior.dim)
    real = np.arange(posterior.features.shape[1]) < posterior.sizes[:, None]
    u = posterior.features[real]
    v = getattr(posterior, name)[real]
    gradients = jax.vmap(jax.grad(likelihood), (None, 0, 0))(
        jnp.asarray(theta), jnp.asarray(u), jnp.asarray(v)
    )
    np.testing.assert_allclose(
        posterior.example_norms(theta), np.linalg.norm(gradients, axis=1), rtol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS if FULL else ["few rows"])
def test_a_clip_that_never_bites_changes_nothing(kind):
    posterior = KINDS[kind][2]()
    theta = jax.random.normal(jax.random.key(1), (posterior.dim,))
    ones = jnp.ones(posterior.devices)
    inf = jnp.full(posterior.devices, jnp.inf)
    whole = clipped_sum(posterior, theta, ones, 5 * ones)
    for limit in (inf, 1e6 * ones):
        for a, b in zip(
            clipped_sum(posterior, theta, ones, 5 * ones, example_clip=limit),
            whole,
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@jax.jit
def one_device(posterior, theta, clip, example_clip):
    return posterior.clipped_sum(theta, jnp.ones(1), clip, example_clip=example_clip)[0]


@given(
    st.sampled_from(["gaussian", "softmax"]), st.floats(0.1, 20), st.floats(0.5, 20), st.floats(-50, 50),
    st.integers(0, 10_000),
)  # fmt: skip
def test_replacing_a_record_moves_a_device_by_twice_the_smaller_clip(
    kind, c, ell, value, seed
):
    rng = np.random.default_rng(seed)
    X, y = 3 * rng.standard_normal((12, 2)), rng.integers(0, 3, 12)
    y[:3] = [0, 1, 2]
    other_X = X.copy()
    other_y = y.astype(float)
    other_X[-1] = rng.standard_normal(2) * value
    other_y[-1] = rng.integers(0, 3)
    make = wflmc.gaussian_regression if kind == "gaussian" else wflmc.softmax_regression
    pair = [
        make(jax.random.key(0), 1, X=a, y=b, partition="blocks")
        for a, b in ((X, y), (other_X, other_y))
    ]
    theta = jnp.asarray(3 * rng.standard_normal(pair[0].dim), jnp.float32)
    sums = [one_device(p, theta, jnp.full(1, ell), jnp.full(1, c)) for p in pair]
    assert (
        np.linalg.norm(np.asarray(sums[0] - sums[1], float))
        <= 2 * min(c, ell) * (1 + 1e-4) + 1e-4
    )


def record_plan(posterior, c, **keywords):
    privacy = wflmc.Privacy(4, 1e-3, 30, unit="record", example_clip=c)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=30)
    step = 0.4 / (posterior.mu + posterior.L)
    return wflmc.plan(
        posterior,
        link,
        privacy,
        **grouped(step_size=step, burn_in=30, samples=20, **keywords),
    )


def test_a_smaller_record_buys_gain_until_another_limit_holds(posterior):
    """Against spec: Σx ≤ R max(1, ℓ/c)² in units of the device's loss x = 2(αℓ)²/N0."""
    device = wflmc.plan(
        posterior, wflmc.Link(channel.rayleigh(0.01), snr_db=30), wflmc.Privacy(4, 1e-3, 30),
        step_size=0.4 / (posterior.mu + posterior.L), burn_in=30, samples=20,
    )  # fmt: skip
    budget = float(wflmc.privacy.budget(4, 1e-3))
    objectives = [device.objective]
    for c in (60, 30, 15, 9, 1):
        plan = record_plan(posterior, c)
        x = 2 * (plan.gain[:, None] * (plan.weight > 0) * 30) ** 2
        assert x.sum(0).max() <= budget * max(1, 30 / c) ** 2 * (1 + 1e-9)
        np.testing.assert_allclose(
            plan.spent, x.sum(0) * min(1, c / 30) ** 2, rtol=1e-12
        )
        objectives.append(plan.objective)
    # c ≥ ℓ protects no less than the device.
    assert objectives[0] == objectives[1] == objectives[2]
    assert np.all(np.diff(objectives[2:]) <= 0)
    assert objectives[-1] < objectives[0] / 5


def test_sampling_clips_what_the_plan_says(posterior):
    loose, tight = record_plan(posterior, 1e3), record_plan(posterior, 1.0)
    free = wflmc.plan(
        posterior, wflmc.Link(channel.rayleigh(0.01), snr_db=30), wflmc.Privacy(4, 1e-3, 30),
        step_size=0.4 / (posterior.mu + posterior.L), burn_in=30, samples=20,
    )  # fmt: skip
    key = jax.random.key(0)
    same = wflmc.sample(key, posterior, free, 5), wflmc.sample(key, posterior, loose, 5)
    np.testing.assert_allclose(same[0].theta, same[1].theta, rtol=1e-3, atol=1e-4)
    unclipped = with_context(tight, example_clip=np.full(30, 1e3), enforced=False)
    both = wflmc.sample(key, posterior, [unclipped, tight])
    alone = wflmc.sample(key, posterior, tight, 2)
    np.testing.assert_allclose(both.theta[1], alone.theta[1], rtol=1e-4, atol=1e-5)
    assert np.abs(both.theta[0] - alone.theta[0]).max() > 1e-3


def test_examples_far_out_lose_their_pull():
    """With a clip of 1 an outlier moves the chain no more than any other example: the mean stays where it was."""
    rng = np.random.default_rng(0)
    X = np.ones((400, 1))
    y = 2 + rng.standard_normal(400)
    y[0] = 1e5
    posterior = wflmc.gaussian_regression(jax.random.key(0), 4, X=X, y=y)
    link = wflmc.Link(channel.static(1.0), snr_db=60)
    privacy = wflmc.Privacy(clip=1e3, unit="record", example_clip=1.0)
    plan = wflmc.plan(
        posterior, link, privacy, step_size=0.5 / posterior.L, burn_in=100, samples=100
    )
    trace = wflmc.sample(jax.random.key(0), posterior, plan, 20)
    assert abs(trace.theta.mean() - 2) < 0.2
    assert posterior.mean[0] > 100


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"unit": "person"}, "unit"),
        ({"adjacency": "remove"}, "adjacency"),
        ({"example_clip": 3.0}, "example_clip"),
        ({"unit": "record", "example_clip": 0.0}, "example_clip"),
    ],
)
def test_promises_that_make_no_sense(keywords, key):
    with pytest.raises(InputError) as error:
        wflmc.Privacy(1, 1e-5, 30, **keywords)
    assert error.value.key == key


def test_a_promise_to_records_without_a_clip_has_no_sensitivity(posterior):
    """Only models that know a typical norm get one from `plan`; there is no silent sensitivity."""
    promise = wflmc.Privacy(1, 1e-5, 30, unit="record")
    with pytest.raises(InputError) as error:
        promise.sensitivity(30)
    assert error.value.key == "example_clip"
    with pytest.raises(InputError) as error:
        wflmc.plan(posterior, privacy=promise, step_size=1e-3, burn_in=2, samples=2)
    assert error.value.key == "example_clip"


def test_a_list_of_the_wrong_length_is_named(posterior):
    privacy = wflmc.Privacy(1, 1e-5, 30, unit="record", example_clip=[1.0, 2.0])
    with raises_input_error("example_clip", "30 devices", value=[1.0, 2.0]):
        privacy.sensitivity(30)


def test_blocks_that_are_filled_up_add_nothing(monkeypatch):
    """Devices that fill up the last block have no examples, and clips of 0: 0/0 must not spread."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=7, examples=70)
    theta = jnp.ones(posterior.dim)
    ones = jnp.ones(7)
    expected = clipped_sum(posterior, theta, ones, 30 * ones, example_clip=ones)
    ready = posterior.on_accelerator(1, 3 * posterior.working_bytes(1, True), True)
    assert ready.block * 3 > 7
    assert len(ready.hessian) > 7
    for actual, value in zip(
        clipped_sum(ready, theta, ones, 30 * ones, example_clip=ones),
        expected,
        strict=True,
    ):
        np.testing.assert_allclose(actual, value, rtol=1e-4, atol=1e-4)


def test_norms_beyond_float32_do_not_switch_clipping_off():
    """Squares that under- or overflow: a tiny row with a huge target, and a row of 1e20 beside others."""
    X = np.array([[1e-20, 1e-20], [1.0, 0.0]])
    tiny = wflmc.gaussian_regression(jax.random.key(0), 1, X=X, y=np.array([1e24, 0.0]))
    total, _ = clipped_sum(
        tiny, jnp.zeros(2), jnp.ones(1), jnp.full(1, 1e4), example_clip=jnp.ones(1)
    )
    assert np.linalg.norm(total) <= 1 + 1e-4
    rows = np.array([[1e20, 0.0], [0.0, 1e10], [1.0, 1.0]])
    huge = wflmc.softmax_regression(jax.random.key(0), 1, X=rows, y=np.array([0, 1, 0]))
    total, _ = clipped_sum(
        huge, jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.ones(1), jnp.full(1, 30.0)
    )
    assert np.isnan(total).any() or np.linalg.norm(total) <= 30 * (1 + 1e-5)
