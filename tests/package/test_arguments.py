"""Arguments in the wrong place or of the wrong kind are refused in a sentence."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from tests.plan_tools import grouped
from wflmc import channel

from ..error_tools import codes_of, missing_facts, raises_input_error, text_of

KEY = jax.random.key(0)
LINK = wflmc.Link(channel.static(1.0), snr_db=40)
NOTHING = wflmc.Privacy(clip=30)
POSTERIOR = wflmc.gaussian_regression(KEY, devices=4, examples=40)
OTHER = wflmc.gaussian_regression(KEY, devices=8, examples=40)
STEPS = {"step_size": 1e-3, "burn_in": 2, "samples": 3}
PLAN = wflmc.plan(POSTERIOR, LINK, NOTHING, **STEPS)
KERNEL = wflmc.sampling.kernel(POSTERIOR, PLAN)
STATE = KERNEL.init(KEY)


@pytest.mark.parametrize(
    ("call", "key", "fact"),
    [
        (lambda: wflmc.sample(0, POSTERIOR, PLAN), "key", "jax.random.key"),
        (
            lambda: wflmc.sample(jax.random.split(KEY, 3), POSTERIOR, PLAN),
            "key",
            "jax.random.key",
        ),
        (lambda: wflmc.sample(POSTERIOR, PLAN, KEY), "key", "jax.random.key"),
        (
            lambda: wflmc.sample(KEY, PLAN, POSTERIOR),
            "posterior",
            "wflmc.posterior_from",
        ),
        (lambda: wflmc.sample(KEY, POSTERIOR, KEY), "plan", "wflmc.plan"),
        (lambda: wflmc.sample(KEY, OTHER, PLAN), "plan", "8 devices"),
        (lambda: KERNEL.init(0), "key", "jax.random.key"),
        (lambda: KERNEL.step(STATE, KEY), "key", "jax.random.key"),
        (lambda: KERNEL.step(KEY, STATE.position), "state", "kernel.init"),
        (
            lambda: wflmc.sampling.kernel(PLAN, POSTERIOR),
            "posterior",
            "wflmc.posterior_from",
        ),
        (lambda: wflmc.sampling.kernel(POSTERIOR, LINK), "plan", "wflmc.plan"),
        (lambda: wflmc.sampling.kernel(OTHER, PLAN), "plan", "8 devices"),
        (
            lambda: wflmc.plan(LINK, POSTERIOR, NOTHING, **STEPS),
            "posterior",
            "wflmc.posterior_from",
        ),
        (lambda: wflmc.plan(POSTERIOR, NOTHING, LINK, **STEPS), "link", "wflmc.Link"),
        (
            lambda: wflmc.plan(POSTERIOR, LINK, LINK, **STEPS),
            "privacy",
            "wflmc.Privacy",
        ),
        (
            lambda: wflmc.plan(POSTERIOR, LINK, NOTHING, **STEPS | {"burn_in": 2.0}),
            "burn_in",
            2.0,
        ),
        (
            lambda: wflmc.plan(POSTERIOR, LINK, NOTHING, **STEPS | {"samples": "3"}),
            "samples",
            "'3'",
        ),
        (
            lambda: wflmc.plan(
                POSTERIOR, LINK, NOTHING, **STEPS | {"step_size": "0.3/L"}
            ),
            "step_size",
            "scenario",
        ),
        (lambda: wflmc.Link(1.0, snr_db=20), "fading", "wflmc.channel.rayleigh"),
        (lambda: wflmc.evaluate(POSTERIOR, PLAN), "trace", "wflmc.sample"),
        (lambda: wflmc.gaussian_regression(0), "key", "jax.random.key"),
        (lambda: wflmc.softmax_regression(0), "key", "jax.random.key"),
        (
            lambda: wflmc.softmax_regression(0, devices=2, X=np.eye(2), y=[0, 1]),
            "key",
            "jax.random.key",
        ),
        (
            lambda: wflmc.audit.audit(0, PLAN, delta=0.1),
            "key",
            "jax.random.key",
        ),
        (
            lambda: wflmc.baselines.sbfl(0, POSTERIOR, [LINK], rounds=4),
            "key",
            "jax.random.key",
        ),
        (
            lambda: wflmc.release_whitening(0, POSTERIOR, LINK, NOTHING),
            "key",
            "jax.random.key",
        ),
        (
            lambda: wflmc.softmax_regression(KEY, devices=np.arange(9)),
            "devices",
            "(9,)",
        ),
        (
            lambda: wflmc.gaussian_regression(KEY, devices=[0, 1, 1, 0]),
            "devices",
            "list of 4",
        ),
        (
            lambda: wflmc.gaussian_regression(KEY, devices=True),
            "devices",
            True,
        ),
        (
            lambda: wflmc.softmax_regression(KEY, classes=2.5),
            "classes",
            2.5,
        ),
        (
            lambda: wflmc.gaussian_regression(KEY, prior_std="1"),
            "prior_std",
            "'1'",
        ),
    ],
)
def test_refused(call, key, fact):
    with raises_input_error(key, fact):
        call()


@pytest.mark.parametrize("name", ["burn_in", "samples"])
@pytest.mark.parametrize(
    "how", [{}, {"step_schedule": "planned"}, {"start": 7}, {"objective": "average"}]
)
def test_plans_beyond_any_memory_are_refused_before_anything_is_made_of_their_size(
    name, how
):
    with raises_input_error(name, "400 GB", "64 GB", section="sampler", value=10**9):
        wflmc.plan(POSTERIOR, LINK, NOTHING, **grouped(**STEPS | {name: 10**9} | how))
    with raises_input_error(name, "64 GB", section="sampler"):
        wflmc.plan_many(
            POSTERIOR, [LINK], NOTHING, **grouped(**STEPS | {name: 10**9} | how)
        )


def test_keys_of_both_kinds_are_taken():
    for key in (KEY, jax.random.PRNGKey(0)):
        wflmc.sample(key, POSTERIOR, PLAN, chains=2)
    jax.jit(KERNEL.step)(KEY, STATE)
    jax.vmap(KERNEL.init)(jax.random.split(KEY, 3))
    assert jnp.all(jnp.isfinite(STATE.position))


def test_noise_that_widens_samples_is_said():
    """Six decibels are four times the noise: where power limits, the ratio follows, and so does the spread."""
    quiet = wflmc.plan(POSTERIOR, LINK, NOTHING, **STEPS)
    assert quiet.noise_ratio == pytest.approx(1, rel=1e-9)
    assert "excess-noise" not in codes_of(quiet)
    step = 0.3 / POSTERIOR.L
    plans = [
        wflmc.plan(POSTERIOR, wflmc.Link(channel.static(1e-4), snr_db=snr_db), NOTHING, step_size=step, burn_in=400,
                   samples=1, policy=wflmc.Policy(power="no-dp"))
        for snr_db in (18.0, 18.0 + 10 * np.log10(4))
    ]  # fmt: skip
    assert plans[0].noise_ratio == pytest.approx(4 * plans[1].noise_ratio, rel=1e-9)
    assert plans[0].noise_ratio > 2
    warning = text_of(plans[0], "excess-noise")
    assert not missing_facts(warning, (f"{plans[0].noise_ratio:.3g} times",))
    # Only the diagnosis gives advice.
    assert not re.search("help|larger|smaller|higher", warning)
    noisy = wflmc.Link(channel.static(1e-4), snr_db=18.0)
    first = wflmc.advise(
        POSTERIOR,
        noisy,
        NOTHING,
        step_size=step,
        burn_in=400,
        samples=1,
        policy=wflmc.Policy(power="no-dp"),
    )[0]
    assert (first.cause, first.change.key) == ("channel noise", "link.snr_db")
    spread = [
        np.trace(POSTERIOR.chain(p.motion).law(p.noise_variance).covariance[-1])
        for p in plans
    ]
    assert spread[0] == pytest.approx(4 * spread[1], rel=1e-6)  # the start is forgotten


def test_evaluation_says_it_too():
    link = wflmc.Link(channel.static(1e-4), snr_db=18)
    plan = wflmc.plan(
        POSTERIOR,
        link,
        NOTHING,
        step_size=0.3 / POSTERIOR.L,
        burn_in=5,
        samples=5,
        policy=wflmc.Policy(power="no-dp"),
    )
    evaluation = wflmc.evaluate(wflmc.sample(KEY, POSTERIOR, plan, chains=3), POSTERIOR)
    assert evaluation.noise_ratio == pytest.approx(plan.noise_ratio)
    assert not missing_facts(str(evaluation), (f"{plan.noise_ratio:.3g} times",))


@pytest.mark.parametrize("step_size", [0, 0.0, [0.0] * 4])
def test_steps_of_zero_are_refused(step_size):
    with pytest.raises(wflmc.InputError) as refused:
        wflmc.plan(POSTERIOR, LINK, NOTHING, step_size=step_size, burn_in=2, samples=2)
    assert refused.value.key == "step_size"


def test_what_does_not_belong_to_a_trace_is_refused():
    plan = wflmc.plan(
        POSTERIOR, LINK, NOTHING, step_size=0.3 / POSTERIOR.L, burn_in=1, samples=2
    )
    with pytest.raises(wflmc.InputError) as refused:
        wflmc.sample(KEY, POSTERIOR, plan, chains=2, ledger=3)
    assert refused.value.key == "ledger"
    other = wflmc.gaussian_regression(
        KEY, devices=3, examples=30, dim=POSTERIOR.dim + 1
    )
    with pytest.raises(wflmc.InputError) as refused:
        wflmc.evaluate(wflmc.sample(KEY, POSTERIOR, plan, chains=2), other)
    assert refused.value.key == "posterior"
