"""Unbiased partial participation: every device as often, whatever its path loss, and what that is worth."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.evaluation import exact_w2_sq
from wflmc.planning.schedule import best_senders, by_quality, sampling_variance

from ..conftest import count
from ..error_tools import codes_of, names_key, raises_input_error
from .scenarios import Target, check_limits

LOSSES = 0.01 * 10 ** -np.linspace(0, 3, 30)
"""Path losses that span 30 dB."""
PROMISE = wflmc.Privacy(15, 0.01, 30)


@pytest.fixture(scope="module")
def unlike():
    """Devices with unlike data: sorted labels."""
    return wflmc.gaussian_regression(
        jax.random.key(0), devices=30, partition="by-label"
    )


def plan(posterior, fading, snr_db=30, seed=0, **keywords):
    step = 0.4 / (posterior.mu + posterior.L)
    link = wflmc.Link(fading, snr_db=snr_db, seed=seed)
    return wflmc.plan(
        posterior,
        link,
        PROMISE,
        **grouped(**{"step_size": step, "burn_in": 50, "samples": 50} | keywords),
    )


@pytest.mark.parametrize("devices", [1, 2, 5, 7])
def test_variance_of_the_sum_over_all_subsets(devices):
    """Brute force over every subset of q: the formula is exact for gradients of mean zero, and a bound for others."""
    generator = np.random.default_rng(devices)
    g = generator.standard_normal((devices, 3))
    centred = g - g.mean(0)
    for q in range(1, devices + 1):
        for values, exact in ((centred, True), (g, False)):
            errors = [
                np.sum(
                    (devices / q * values[list(senders)].sum(0) - values.sum(0)) ** 2
                )
                for senders in itertools.combinations(range(devices), q)
            ]
            claimed = sampling_variance(np.linalg.norm(values, axis=1), q)
            if exact:
                assert np.mean(errors) == pytest.approx(claimed, abs=1e-12)
            assert np.mean(errors) <= claimed + 1e-12


@pytest.mark.parametrize(
    "fading",
    [
        channel.static([1.0, 0.1, 0.01, 1e-3, 1e-4]),
        channel.rayleigh([1.0, 0.1, 0.01, 1e-3, 1e-4]),
        channel.rayleigh([1.0, 0.1, 0.01, 1e-3, 1e-4], 0.9),
        "file",
        channel.rayleigh(0.01, 0.9999),
        channel.rician([1.0, 0.1, 0.01, 1e-3, 1e-4], 4.0, 0.5),
    ][: count(4, 6)],
)
def test_every_device_has_weight_one_on_average(fading):
    """And also in rounds after which it did or did not send: who sends now has nothing to do with who did."""
    target = Target(3.0, 20.0, 2, 5)
    q = 2
    rounds = 8
    active = []
    for seed in range(count(300, 3000)):
        law = fading
        # Independent rounds of unlike devices, of which nothing else is known.
        if fading == "file":
            generator = np.random.default_rng(seed)
            law = channel.from_array(
                generator.gamma([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], (rounds, 5))
            )
        drawn = wflmc.plan(
            target, wflmc.Link(law, seed=seed), wflmc.Privacy(clip=1.0), step_size=0.02, burn_in=rounds - 1, samples=1,
            policy=wflmc.Policy(schedule="unbiased", senders=q),
        )  # fmt: skip
        assert np.all(drawn.active_devices == q)
        active.append(drawn.weight > 0)
    active = np.array(active)  # [seed, round, device]
    probability = q / 5
    error = np.sqrt(probability * (1 - probability) / active.shape[0])
    assert np.abs(active.mean(0) - probability).max() < 4.5 * error  # 40 means
    np.testing.assert_allclose(
        active.mean((0, 1)), probability, atol=4.5 * error / np.sqrt(rounds)
    )
    both = (active[:, 1:] & active[:, :-1]).mean((0, 1))
    spread = np.sqrt(
        probability**2 * (1 - probability**2) / (active.shape[0] * (rounds - 1))
    )
    np.testing.assert_allclose(both, probability**2, atol=6 * spread)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.99, 0.999999])
@pytest.mark.parametrize("rician_k", [0.0, 5.0])
def test_standing_is_uniform_and_independent(correlation, rician_k):
    fading = channel.rician([1.0, 1e-3], rician_k, correlation)
    h = fading.draw(np.random.default_rng(1), 3000, 2)
    u = fading.law.quality(h)
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    for a, b in ((u[1:, 0], u[:-1, 0]), (u[:, 0], u[:, 1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)


def test_standing_by_scipy():
    """Against the Rice law of a device's round given the one before."""
    law = channel.rayleigh(2.0, 0.8).law
    h = np.array([[1.0 + 1j], [0.3 - 0.5j]])
    spread = np.sqrt(2.0 * (1 - 0.8**2) / 2)
    expected = stats.rice.cdf(abs(h[1, 0]) / spread, abs(0.8 * h[0, 0]) / spread)
    assert law.quality(h)[1, 0] == pytest.approx(expected, rel=1e-9)
    assert law.quality(h)[0, 0] == pytest.approx(
        1 - np.exp(-(abs(h[0, 0]) ** 2) / 2.0), rel=1e-12
    )


def test_forecast_has_the_moments_of_the_law():
    law = channel.rician([1.0, 4.0], 3.0, 0.7).law
    present = np.array([0.5 + 1j, -1.0])
    paths = law.draw_after(
        present, channel.complex_normal(np.random.default_rng(0), 20_000, 3, 2)
    )
    amplitude = np.array([1.0, 2.0])
    for j in (1, 2, 3):
        path = amplitude * np.sqrt(0.75)
        mean = path + 0.7**j * (present - path)
        variance = amplitude**2 * 0.25 * (1 - 0.7 ** (2 * j))
        assert np.all(
            np.abs(paths[:, j - 1].mean(0) - mean) < 4 * np.sqrt(variance / 20_000)
        )
        np.testing.assert_allclose(
            paths[:, j - 1].var(0), variance, rtol=4 * np.sqrt(2 / 20_000)
        )


def test_thresholds_silence_the_same_devices_on_a_static_channel(unlike):
    """Thresholds are biased there; as many senders without bias are several times nearer, and all devices nearest."""
    threshold = plan(unlike, channel.static(LOSSES))
    q = int(threshold.active_devices[0])
    assert q == 28
    assert np.all(threshold.weight[0] == threshold.weight)
    fair = [
        plan(
            unlike,
            channel.static(LOSSES),
            seed=s,
            policy=wflmc.Policy(schedule="unbiased", senders=q),
        )
        for s in range(count(8, 40))
    ]
    everyone = plan(unlike, channel.static(LOSSES), policy=wflmc.Policy(schedule="all"))
    worst = [exact_w2_sq(unlike, p)[50:].max() for p in (threshold, *fair, everyone)]
    assert worst[0] > 5 * np.mean(worst[1:-1])
    assert worst[-1] < np.mean(worst[1:-1])
    # Several plans give the law over schedules.
    assert worst[0] > 10 * exact_w2_sq(unlike, fair)[50:].max()


def test_the_bound_holds_over_schedules(unlike):
    """B[s] bounds W2² of the law averaged over schedules; here against its exact first two moments."""
    plans = [
        plan(
            unlike,
            channel.rayleigh(LOSSES),
            seed=s,
            policy=wflmc.Policy(schedule="unbiased"),
        )
        for s in range(count(6, 30))
    ]
    assert np.all(
        exact_w2_sq(unlike, plans) <= np.max([p.bound for p in plans], axis=0)
    )


@given(
    st.integers(0, 2**31),
    st.sampled_from(["optimized", "equal"]),
    st.sampled_from(["full", "causal"]),
)
def test_limits_hold_and_permuting_devices_permutes_the_plan(seed, power, csi):
    generator = np.random.default_rng(seed)
    devices, rounds = int(generator.integers(1, 8)), int(generator.integers(1, 20))
    q = int(generator.integers(1, devices + 1))
    order = generator.permutation(devices)
    standing = generator.random((rounds, devices))
    lots = generator.random((rounds, devices))
    first = by_quality(standing, lots, q).active
    np.testing.assert_array_equal(
        first[:, order], by_quality(standing[:, order], lots[:, order], q).active
    )
    for s in range(rounds):
        assert standing[s][first[s]].min() >= standing[s][~first[s]].max(initial=-1)
    link = wflmc.Link(
        channel.rayleigh(list(10 ** generator.uniform(-3, 0, devices))),
        snr_db=15.0,
        seed=seed,
    )
    drawn = wflmc.plan(
        Target(3.0, 20.0, 2, devices), link, wflmc.Privacy(2.0, 0.01, 3.0), step_size=0.02, burn_in=rounds - 1,
        samples=1, policy=wflmc.Policy(schedule="unbiased", senders=q, power=power, csi=csi),
    )  # fmt: skip
    check_limits(drawn, link.gains(rounds, devices), 15.0, 3.0)
    assert np.all(drawn.active_devices == q)


def test_the_number_of_senders_is_the_best_one():
    """Against the mean one-round error of each number, worked out one by one; and not by the channels that come."""
    generator = np.random.default_rng(0)
    clip = np.array([1.0, 2.0, 3.0, 1.0])
    n = 500
    u = generator.random((n, 4))
    lots = generator.random((n, 4))
    cap = generator.gamma(1.0, 1.0, (n, 4))
    errors = []
    for q in (1, 2, 3, 4):
        weakest = np.where(by_quality(u, lots, q).active, cap, np.inf).min(-1)
        errors.append(
            sampling_variance(clip, q)
            + 5 * np.maximum(0, (4 / q) ** 2 / weakest - 2 / 0.5).mean()
        )
    assert best_senders(u, lots, clip, cap, 0.5, 5.0) == 1 + np.argmin(errors)
    target = Target(1147.0, 1360.0, 5, 30)
    chosen = {
        int(
            plan(
                target,
                channel.rayleigh(LOSSES),
                seed=s,
                policy=wflmc.Policy(schedule="unbiased"),
            ).active_devices[0]
        )
        for s in range(5)
    }
    assert len(chosen) == 1


def test_more_rounds_begin_with_the_same_schedule(unlike):
    for fading in (channel.static(LOSSES), channel.rayleigh(LOSSES, 0.5)):
        short = plan(
            unlike, fading, policy=wflmc.Policy(schedule="unbiased", senders=10)
        )
        longer = plan(
            unlike,
            fading,
            policy=wflmc.Policy(schedule="unbiased", senders=10),
            samples=70,
        )
        later = plan(
            unlike,
            fading,
            policy=wflmc.Policy(schedule="unbiased", senders=10),
            burn_in=0,
            samples=20,
            sampler=wflmc.Sampler(start=100),
        )
        np.testing.assert_array_equal(
            longer.weight, np.concatenate([short.weight, later.weight])
        )


def test_what_is_refused(unlike):
    for senders in (-1, 31):
        with raises_input_error("senders", section="policy", value=senders):
            plan(
                unlike,
                channel.rayleigh(0.01),
                policy=wflmc.Policy(schedule="unbiased", senders=senders),
            )
    table = channel.rayleigh(0.01).draw(np.random.default_rng(0), 100, 30)
    with raises_input_error("senders", 30, section="policy", value=0):
        plan(
            unlike, channel.from_array(table), policy=wflmc.Policy(schedule="unbiased")
        )
    with raises_input_error("schedule", "threshold, all, unbiased", value="some"):
        plan(unlike, channel.rayleigh(0.01), policy=wflmc.Policy(schedule="some"))


def test_command(tmp_path, plan_of, call):
    path = tmp_path / "s.toml"
    text = '[posterior]\ndevices = 10\nexamples = 400\n[link]\nfading = "static"\nseed = 3\n[policy]\nschedule = "{}"\n'
    path.write_text(text.format("unbiased") + "senders = 4\n")
    document = plan_of(path)
    assert document["active_devices"] == [4] * 100
    assert document["threshold"] == [None] * 100
    assert "no-effect" not in codes_of(document)
    path.write_text(text.format("all") + "senders = 4\n")
    assert (
        sum(
            "link.seed" in w or "policy.senders" in w for w in plan_of(path)["warnings"]
        )
        == 2
    )
    path.write_text(text.format("unbiased") + "senders = 11\n")
    code, _, err = call("plan", path)
    assert code == 2
    assert names_key(err, "policy.senders", 11, "1 and 10")
