"""The audit of correct code: its statistics, and how close it comes to what is spent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import wflmc
from wflmc import channel
from wflmc.apps import audit
from wflmc.apps.audit import attack
from wflmc.apps.audit.canary import canary_pair
from wflmc.apps.audit.error_rates import (
    counting_threshold,
    epsilon_by_counting,
    largest_mu,
    mu_lower,
    rate_upper,
)
from wflmc.apps.audit.target import CANARY_NORM_OVER_CLIP, attack_target, window
from wflmc.privacy import epsilon_spent

from ..conftest import FULL, count
from ..error_tools import raises_input_error
from .audit_tools import KEY, LONG, SCHEMES, SOFTMAX, TRIALS, planned, softmax_of


def test_rates_are_those_of_clopper_and_pearson():
    for errors, trials, risk in [
        (0, 50, 0.01),
        (3, 50, 0.004),
        (500, 1000, 0.1),
        (49, 50, 0.05),
        (50, 50, 0.05),
    ]:
        by_scipy = (
            stats.binomtest(errors, trials).proportion_ci(1 - 2 * risk, "exact").high
        )
        assert rate_upper(errors, trials, risk) == pytest.approx(by_scipy, rel=1e-9)
    pair = rate_upper([3, 7], 50, 0.005)
    assert pair == pytest.approx(
        [stats.beta.ppf(0.995, k + 1, 50 - k) for k in (3, 7)], rel=1e-9
    )


def test_rates_hold_as_often_as_they_say():
    rng = np.random.default_rng(0)
    for rate in (0.5, 0.02):
        seen = rng.binomial(1000, rate, size=20_000)
        assert np.mean(rate_upper(seen, 1000, 0.05) < rate) <= 0.05 + 3 * np.sqrt(
            0.05 / 20_000
        )


def test_lower_bounds_of_perfect_knowledge():
    """With the true error rates of a Gaussian mechanism, μ is found exactly and counting stays below ε."""
    for mu in (0.2, 1.0, 3.0, 8.0):
        for cut in (-0.5, 0.0, 1.0):
            rates = (
                float(stats.norm.sf(cut + mu / 2)),
                float(stats.norm.cdf(cut - mu / 2)),
            )
            assert mu_lower(*rates) == pytest.approx(mu, rel=1e-9)
            for delta in (1e-5, 0.01):
                assert (
                    epsilon_by_counting(*rates, delta)
                    <= float(epsilon_spent(mu**2 / 2, delta)) + 1e-9
                )
    assert mu_lower(0.6, 0.6) == 0
    assert epsilon_by_counting(1.0, 1.0, 0.01) == 0


def test_counting_cannot_prove_more_than_about_12():
    upper = rate_upper([0, 0], 500_000, 0.005)
    assert 11 < epsilon_by_counting(*upper, 1e-5) < 12.5
    assert largest_mu(500_000, 0.01) == pytest.approx(mu_lower(*upper))


def test_the_threshold_for_counting_is_the_best_of_its_kind():
    mu = 1.5
    delta = 0.01
    trials = 100_000
    risk = 0.01

    def proven(cut):
        rates = [stats.norm.sf(cut + mu / 2), stats.norm.cdf(cut - mu / 2)]
        return epsilon_by_counting(
            *(rate_upper(trials * r, trials, risk / 2) for r in rates), delta
        )

    best = counting_threshold(mu, trials, delta, risk)
    assert proven(best) >= max(proven(cut) for cut in np.linspace(0, 6, 100)) - 1e-3
    assert proven(best) > 2 * proven(0.0)


def test_windows_are_runs_of_rounds_within_the_limit():
    rng = np.random.default_rng(0)
    for _ in range(200):
        loss = rng.exponential(size=12) * (rng.random(12) < 0.7)
        limit = rng.exponential() * 3
        mask = window(loss, limit)
        if not loss.any():
            assert mask.all()
            continue
        runs = [
            loss[i:j].sum()
            for i in range(12)
            for j in range(i + 1, 13)
            if 0 < loss[i:j].sum() <= limit
        ]
        best = max(runs, default=loss[loss > 0].min())
        assert loss[mask].sum() == pytest.approx(best)


def test_differences_cancel_what_they_should():
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(3, 9))
    gain = rng.uniform(1, 2, 9)
    mask = np.ones(9, dtype=bool)
    mask[4] = False
    plain = attack.differences(signal, mask)
    scaled = attack.differences(signal, mask, gain=gain)
    np.testing.assert_allclose(plain.sum(1), 0, atol=1e-12)
    np.testing.assert_allclose(scaled @ gain, 0, atol=1e-12)
    # Each weight is the part of the signal that is left, so its own matched filter.
    for weight in (plain, scaled):
        np.testing.assert_allclose((weight * signal).sum(1), (weight**2).sum(1))
        assert not weight[:, 4].any()
    first, second = attack.pairs(mask, 1)
    assert [first.tolist(), second.tolist()] == [[1, 3, 6], [2, 5, 7]]


# Correct code


POINTS = [(1, 1e-5, 30), (8, 0.01, 30), (15, 0.01, 30), (50, 0.1, 60)]


@pytest.mark.parametrize(
    ("epsilon", "delta", "clip"), POINTS if FULL else [POINTS[0], POINTS[-1]]
)
def test_the_audit_comes_close_to_what_is_spent(posterior, epsilon, delta, clip):
    """The Gaussian study at 30 dB, spending its whole budget; a million trials in the full suite."""
    promise = wflmc.Privacy(epsilon, delta, clip)
    plan = planned(
        posterior,
        promise,
        rounds=100,
        link=wflmc.Link(channel.rayleigh(0.01), snr_db=30),
    )
    attacks = audit.ATTACKS if FULL else ["constant", "turning"]
    report = audit.audit(
        jax.random.key(0),
        plan,
        posterior,
        trials=count(200_000, 1_000_000),
        attacks=attacks,
    )
    assert report.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert report.epsilon == pytest.approx(plan.epsilon_spent)
    assert report.consistent
    # No attack of 200,000 trials can prove more of ε = 50 than this.
    least = 0.85 if FULL or epsilon < 50 else 0.75
    assert least <= report.ratio <= 1
    assert 0 < report.epsilon_lower_counting < min(12, report.epsilon_lower)
    assert report.tests[0].name == "matched filter"


def test_error_rates_are_those_of_the_claim(six_devices):
    plan = planned(six_devices)
    report = audit.audit(KEY, plan, six_devices, trials=TRIALS)
    assert report.consistent
    assert "gaussian model" in {test.name for test in report.tests}
    main = report.tests[0]
    assert main.mu_claimed == pytest.approx(np.sqrt(2 * plan.spent[report.device]))
    expected = stats.norm.cdf(-main.mu_claimed / 2)
    for wrong in (main.false_positives, main.false_negatives):
        assert abs(wrong - expected * TRIALS / 2) < 4 * np.sqrt(expected * TRIALS / 2)
    assert "No attack found more than" in str(report)
    again = audit.audit(KEY, plan, six_devices, trials=TRIALS)
    assert again == report


def test_the_unit_of_noise_does_not_matter(six_devices):
    links = [
        wflmc.Link(channel.static(0.01), snr_db=40, noise_power=power)
        for power in (1.0, 1e-6)
    ]
    reports = [
        audit.audit(KEY, planned(six_devices, link=link), trials=TRIALS)
        for link in links
    ]
    for first, second in zip(*(report.tests for report in reports), strict=True):
        assert abs(first.false_positives - second.false_positives) <= 3
        assert first.mu_claimed == pytest.approx(second.mu_claimed)


QUICK_SCHEMES = (
    "record",
    "example or an empty one",
    "unlike devices",
    "silent rounds",
)


@pytest.mark.parametrize("name", SCHEMES if FULL else QUICK_SCHEMES)
def test_every_kind_of_plan_holds(six_devices, name):
    plan = planned(six_devices, **SCHEMES[name])
    attacks = (
        audit.ATTACKS
        if FULL or name in ("record", "silent rounds")
        else ("constant", "devices")
    )
    report = audit.audit(KEY, plan, six_devices, trials=TRIALS, attacks=attacks)
    assert report.consistent, str(report)
    assert report.ratio > 0.7
    assert report.device == np.argmax(plan.spent)
    test_names = {test.name for test in report.tests}
    by_record = plan.privacy.unit == "record" and "record" in attacks
    assert ("record on a device that is clipped" in test_names) == by_record
    assert ("rounds of silence" in test_names) == bool(
        np.any(plan.weight[:, report.device] == 0)
    )


@pytest.mark.parametrize(
    ("examples", "promise", "rounds"), SOFTMAX + LONG if FULL else SOFTMAX[:1]
)
def test_softmax_models_hold(examples, promise, rounds):
    """Few rows and many rows are worked out in different ways; examples are clipped in both, in every round."""
    posterior, plan = softmax_of(examples, promise, rounds)
    goal = attack_target(plan)
    sides = canary_pair(posterior, goal.device, CANARY_NORM_OVER_CLIP * 30)
    slow = attack.float32_rounds(attack._slow_plan(goal, 6, 1e-12))
    start = jnp.zeros((rounds, 6))
    first, second = (
        attack.transmitted(side.on_accelerator(1, 2.0**30), slow, start).double
        for side in sides
    )
    np.testing.assert_allclose(
        np.linalg.norm(first - second, axis=1),
        2 * goal.signal[:, goal.device],
        rtol=1e-4 + plan.rounding,
    )
    report = audit.audit_model(
        KEY, plan, posterior, trials=8000 if FULL or rounds < 100 else 2000
    )
    assert report.consistent
    assert report.ratio > 0.8
    assert report.tests[0].rounds == rounds


def test_false_alarms_are_rare(six_devices):
    """Of 20 audits at 90 % confidence two may be wrong; sharing the risk makes it fewer."""
    plan = planned(six_devices)
    keys = jax.random.split(KEY, 20)
    attacks = ["constant", "turning"]
    reports = [
        audit.audit(key, plan, trials=1000, confidence=0.9, attacks=attacks)
        for key in keys
    ]
    assert sum(not report.consistent for report in reports) <= 2


def test_a_plan_without_a_promise_needs_a_delta(six_devices):
    plan = planned(six_devices, wflmc.Privacy(clip=30), power="no-dp")
    with raises_input_error("delta", value=None):
        audit.audit(KEY, plan, trials=1000)
    assert audit.audit(KEY, plan, trials=TRIALS, delta=0.01).consistent


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"trials": 10}, "trials"),
        ({"confidence": 1.0}, "confidence"),
        ({"device": 6}, "device"),
        ({"device": -1}, "device"),
        ({"delta": 2.0}, "delta"),
        ({"csi_error": 1.0}, "csi_error"),
        ({"posterior": object()}, "posterior"),
        ({"attacks": ["loud"]}, "attacks"),
    ],
)
def test_bad_input(six_devices, keywords, key):
    with pytest.raises(wflmc.InputError) as caught:
        audit.audit(KEY, planned(six_devices), **keywords)
    assert caught.value.key == key


def test_nothing_is_promised_without_clipping(six_devices):
    with raises_input_error("plan", "clip"):
        audit.audit(KEY, planned(six_devices, power="noiseless"))


def test_progress_and_a_device_of_choice(six_devices):
    seen = []
    report = audit.audit(
        KEY,
        planned(six_devices),
        trials=TRIALS,
        device=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert report.device == 3
    assert {test.device for test in report.tests if test.name != "every device"} == {3}
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


# Broken code: all on settings that the tests above find in order
