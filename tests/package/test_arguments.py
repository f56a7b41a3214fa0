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
from wflmc.support.errors import InputError

KEY = jax.random.key(0)
LINK, NOTHING = wflmc.Link(channel.static(1.0), snr_db=40), wflmc.Privacy(clip=30)
POSTERIOR = wflmc.gaussian_regression(KEY, devices=4, examples=40)
OTHER = wflmc.gaussian_regression(KEY, devices=8, examples=40)
STEPS = {"step_size": 1e-3, "burn_in": 2, "samples": 3}
PLAN = wflmc.plan(POSTERIOR, LINK, NOTHING, **STEPS)
KERNEL = wflmc.sampling.kernel(POSTERIOR, PLAN)
STATE = KERNEL.init(KEY)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: wflmc.sample(0, POSTERIOR, PLAN), "one key"),
        (lambda: wflmc.sample(jax.random.split(KEY, 3), POSTERIOR, PLAN), "one key"),
        (lambda: wflmc.sample(POSTERIOR, PLAN, KEY), "one key"),
        (lambda: wflmc.sample(KEY, PLAN, POSTERIOR), "a posterior"),
        (lambda: wflmc.sample(KEY, POSTERIOR, KEY), "a plan of wflmc.plan"),
        (lambda: wflmc.sample(KEY, OTHER, PLAN), "made for this posterior"),
        (lambda: KERNEL.init(0), "one key"),
        (lambda: KERNEL.step(STATE, KEY), "one key"),
        (lambda: KERNEL.step(KEY, STATE.position), "step.key, state"),
        (lambda: wflmc.sampling.kernel(PLAN, POSTERIOR), "a posterior"),
        (lambda: wflmc.sampling.kernel(POSTERIOR, LINK), "a plan"),
        (lambda: wflmc.sampling.kernel(OTHER, PLAN), "made for this posterior"),
        (lambda: wflmc.plan(LINK, POSTERIOR, NOTHING, **STEPS), "a posterior"),
        (lambda: wflmc.plan(POSTERIOR, NOTHING, LINK, **STEPS), "a wflmc.Link"),
        (lambda: wflmc.plan(POSTERIOR, LINK, LINK, **STEPS), "a wflmc.Privacy"),
        (
            lambda: wflmc.plan(POSTERIOR, LINK, NOTHING, **STEPS | {"burn_in": 2.0}),
            "a whole number",
        ),
        (
            lambda: wflmc.plan(POSTERIOR, LINK, NOTHING, **STEPS | {"samples": "3"}),
            "a whole number",
        ),
        (
            lambda: wflmc.plan(
                POSTERIOR, LINK, NOTHING, **STEPS | {"step_size": "0.3/L"}
            ),
            "scenario files",
        ),
        (lambda: wflmc.Link(1.0, snr_db=20), "a fading law"),
        (lambda: wflmc.evaluate(POSTERIOR, PLAN), "a trace"),
        (lambda: wflmc.gaussian_regression(0), "^key = 0 was given.*jax.random.key.0."),
        (lambda: wflmc.softmax_regression(0), "^key = 0 was given.*jax.random.key.0."),
        (
            lambda: wflmc.softmax_regression(0, devices=2, X=np.eye(2), y=[0, 1]),
            "^key = 0 .*jax.random.key.0.",
        ),
        (
            lambda: wflmc.audit.audit(0, PLAN, delta=0.1),
            "^key = 0 was given.*jax.random.key.0.",
        ),
        (
            lambda: wflmc.baselines.sbfl(0, POSTERIOR, [LINK], rounds=4),
            "^key = 0 was given.*jax.random.key.0.",
        ),
        (
            lambda: wflmc.release_whitening(0, POSTERIOR, LINK, NOTHING),
            "^key = 0 was given.*jax.random.key.0.",
        ),
        (
            lambda: wflmc.softmax_regression(KEY, devices=np.arange(9)),
            "^devices is an array .*a whole number",
        ),
        (
            lambda: wflmc.gaussian_regression(KEY, devices=[0, 1, 1, 0]),
            "^devices is a list .*a whole number",
        ),
        (
            lambda: wflmc.gaussian_regression(KEY, devices=True),
            "^devices = True .*a whole number",
        ),
        (
            lambda: wflmc.softmax_regression(KEY, classes=2.5),
            "^classes = 2.5 .*a whole number",
        ),
        (
            lambda: wflmc.gaussian_regression(KEY, prior_std="1"),
            "^prior_std = '1' .*a number",
        ),
    ],
)
def test_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()


@pytest.mark.parametrize("name", ["burn_in", "samples"])
@pytest.mark.parametrize(
    "how", [{}, {"step_schedule": "planned"}, {"start": 7}, {"objective": "average"}]
)
def test_plans_beyond_any_memory_are_refused_before_anything_is_made_of_their_size(
    name, how
):
    sizes = r"rounds of 4 devices takes about 400 GB of memory, and 64 GB is the limit. Plan fewer rounds or devices"
    with pytest.raises(InputError, match=rf"^{name} = 1000000000 was given.*{sizes}"):
        wflmc.plan(POSTERIOR, LINK, NOTHING, **grouped(**STEPS | {name: 10**9} | how))
    with pytest.raises(InputError, match="is the limit"):
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
    assert not any("spread" in text for text in quiet.warnings)
    step = 0.3 / POSTERIOR.L
    plans = [
        wflmc.plan(POSTERIOR, wflmc.Link(channel.static(1e-4), snr_db=snr_db), NOTHING, step_size=step, burn_in=400,
                   samples=1, policy=wflmc.Policy(power="no-dp"))
        for snr_db in (18.0, 18.0 + 10 * np.log10(4))
    ]  # fmt: skip
    assert plans[0].noise_ratio == pytest.approx(4 * plans[1].noise_ratio, rel=1e-9)
    assert plans[0].noise_ratio > 2
    warning = next(text for text in plans[0].warnings if "spread" in text)
    assert f"{plans[0].noise_ratio:.3g} times the noise" in warning
    assert not re.search(
        "help|larger|smaller|higher", warning
    )  # advice is the diagnosis alone
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
    found = wflmc.evaluate(wflmc.sample(KEY, POSTERIOR, plan, chains=3), POSTERIOR)
    assert found.noise_ratio == pytest.approx(plan.noise_ratio)
    assert f"{plan.noise_ratio:.3g} times what sampling needs" in str(found)


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
