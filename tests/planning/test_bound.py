"""The bound and the thresholds: against the formulas written out, brute force and the exact law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from wflmc import channel
from wflmc.dynamics import kinetic, overdamped
from wflmc.planning.schedule import participation_error, threshold_schedule

from ..error_tools import raises_input_error
from .scenarios import Target, make_plan


def written_out_bound(plan, target, which):
    """Proposition 1 as printed: a double sum, nothing recursive."""
    eta = plan.step_size[0]
    m = target.dim
    devices = target.devices
    gamma = (
        1 - eta * target.mu if eta <= 2 / (target.mu + target.L) else eta * target.L - 1
    )
    silent = devices - plan.active_devices
    clip = plan.clip[0]
    excess = np.maximum(
        0,
        plan.noise_power * devices**2 / (plan.gain * plan.active_devices) ** 2
        - 2 / eta,
    )
    excess *= m if which == "corrected" else 1
    inside = eta**4 * target.L**3 * m / 3 + eta**3 * target.L**2 * m + eta**2 * excess
    inside = inside + np.where(
        silent > 0, 4 * eta**2 * np.where(silent > 0, clip, 0) ** 2 * silent**2, 0
    )
    rho = (1 + gamma) / 2
    return np.array(
        [
            rho ** (2 * s) * plan.initial_w2_sq
            + sum(
                rho ** (2 * (s - i)) * 2 * (1 + gamma) / (1 - gamma) * inside[i - 1]
                for i in range(1, s + 1)
            )
            for s in range(1, len(plan.rounds) + 1)
        ]
    )


@pytest.mark.parametrize("which", ["paper", "corrected"])
@pytest.mark.parametrize("power", ["equal", "no-dp", "noiseless"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.05])
def test_bound_against_the_printed_double_sum(which, power, factor):
    target = Target(3.0, 20.0, 7, 6)
    h = channel.rayleigh(0.01).draw(np.random.default_rng(2), 25, 6)
    plan = make_plan(
        target,
        h,
        power=power,
        schedule="threshold",
        step_size=2 * factor / 23,
        bound=which,
        clip=2.0,
        snr_db=5,
    )
    if power != "noiseless":
        assert plan.active_devices.min() < 6
    np.testing.assert_allclose(
        plan.bound, written_out_bound(plan, target, which), rtol=1e-10
    )


def test_contraction_on_both_branches():
    assert overdamped().contraction(0.1, 1.0, 3.0).gamma == pytest.approx(0.9)
    assert overdamped().contraction(0.6, 1.0, 3.0).gamma == pytest.approx(0.8)
    assert overdamped().contraction(0.5, 1.0, 3.0).kappa == pytest.approx(2 * 1.5 / 0.5)
    for step in (0.0, -1.0, 2 / 3, 1.0, np.nan):
        with raises_input_error("step_size", "2/L", section="sampler"):
            overdamped().contraction(step, 1.0, 3.0)


def test_a_step_just_below_its_limit_is_not_called_too_small():
    step = 2 / 3 * (1 - 1e-13)
    with raises_input_error("step_size", "further below", "2/L = 0.666667"):
        overdamped().contraction(step, 1.0, 3.0)
    with raises_input_error("step_size", "too small"):
        overdamped().contraction([0.1, 1e-13], 1.0, 3.0)


def test_parameters_are_read_off_several_states_at_once():
    matrices = np.arange(8.0).reshape(2, 2, 2)
    state_matrices = kinetic(2.0).readout(matrices)
    np.testing.assert_array_equal(state_matrices[..., :2], matrices)
    np.testing.assert_array_equal(state_matrices[..., 2:], np.zeros((2, 2, 2)))


def brute_threshold(gains, clip, power, step_size, weight):
    """The threshold rule of Sec. V-D for one round, threshold by threshold."""
    best = None
    for threshold in sorted(set(gains)):
        active = gains >= threshold
        a = np.min(power * gains[active] ** 2 / clip**2)
        error = 4 * clip**2 * np.sum(~active) ** 2
        error += weight * max(
            0.0, gains.size**2 / np.sum(active) ** 2 / a - 2 / step_size
        )
        if best is None or error < best[0] * (1 - 1e-12):
            best = (error, threshold)
    return best


@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.floats(0, 50),
    st.floats(0.1, 50),
    st.floats(1e-5, 1),
    st.sampled_from([1.0, 5.0]),
)
def test_thresholds_against_brute_force(seed, devices, snr_db, clip, step_size, weight):
    generator = np.random.default_rng(seed)
    gains = np.abs(generator.standard_normal((4, devices))) * 0.1
    gains[2:] = np.round(gains[2:], 1) + 0.1  # ties
    power = 5 * 10 ** (snr_db / 10)
    schedule = threshold_schedule(
        gains, np.full(devices, clip), power * gains**2 / clip**2, step_size, weight
    )
    for row, threshold, active in zip(
        gains, schedule.threshold, schedule.active, strict=True
    ):
        error, _ = brute_threshold(row, clip, power, step_size, weight)
        a = np.min(power * row[active] ** 2 / clip**2)
        ours = 4 * clip**2 * np.sum(~active) ** 2 + weight * max(
            0.0, (devices / np.sum(active)) ** 2 / a - 2 / step_size
        )
        assert ours <= error * (1 + 1e-9)
        assert np.array_equal(active, row >= threshold)


def test_of_equally_good_thresholds_the_one_with_more_devices():
    """Silence costs 4 here, and so does the excess noise of the second device: both send."""
    schedule = threshold_schedule(
        np.array([[1.0, 0.5]]), np.ones(2), np.array([[1.0, 0.125]]), 0.5, 1.0
    )
    assert schedule.active.tolist() == [[True, True]]


def test_equal_gains_mean_everyone():
    schedule = threshold_schedule(
        np.full((1, 4), 0.1), np.ones(4), np.full((1, 4), 1e-9), 0.1, 1.0
    )
    assert schedule.active.all()


def test_participation_error_reduces_to_lemma_1():
    active = np.array(
        [
            [True, True, False, False],
            [True, True, True, True],
            [True, False, False, False],
        ]
    )
    np.testing.assert_allclose(
        participation_error(np.full(4, 3.0), active), [4 * 9 * 4, 0, 4 * 9 * 9]
    )
    # Unequal bounds: silent ones are missed, active ones are overweighted by (K − K_a)/K_a.
    assert participation_error(np.array([1.0, 2.0, 3.0, 4.0]), active)[
        0
    ] == pytest.approx((7 + 3) ** 2)


def printed_and_corrected(post):
    """Plans at η = 2/(μ+L) and 10 dB with the paper's bound and with ours, and the true distance at their end."""
    plans = {
        which: wflmc.plan(
            post,
            wflmc.Link(channel.static(1e-4), snr_db=10),
            wflmc.Privacy(8, 0.01, 30, "paper"),
            step_size=2 / (post.mu + post.L),
            burn_in=50,
            samples=1,
            policy=wflmc.Policy(schedule="all", bound=which),
        )
        for which in ("paper", "corrected")
    }
    np.testing.assert_allclose(plans["paper"].gain, plans["corrected"].gain, rtol=1e-12)
    return (
        plans["paper"].bound[-1],
        plans["corrected"].bound[-1],
        wflmc.exact_w2_sq(post, plans["paper"])[-1],
    )


def test_the_printed_bound_fails_and_the_corrected_one_holds(posterior):
    """Lemma 1 lacks a factor m: the true distance exceeds the paper's bound."""
    printed, corrected, exact = printed_and_corrected(posterior)
    assert printed < 0.95 * exact
    assert exact < corrected


def test_how_far_the_printed_bound_fails_on_the_authors_data(paper_posterior):
    expected = (0.401, 1.918, 0.482)
    np.testing.assert_allclose(
        printed_and_corrected(paper_posterior), expected, atol=5e-4
    )


@pytest.mark.parametrize("power", ["optimized", "equal", "no-dp", "noiseless"])
@pytest.mark.parametrize("snr_db", [5, 15, 25, 40])
@pytest.mark.parametrize("factor", [0.1, 0.4, 1.0, 2.0])
def test_corrected_bound_lies_above_the_exact_law(posterior, power, snr_db, factor):
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(1e-4), snr_db=snr_db),
        wflmc.Privacy(8, 0.01, 30),
        step_size=factor / (posterior.mu + posterior.L),
        burn_in=50,
        samples=1,
        policy=wflmc.Policy(power=power, schedule="all"),
    )
    assert np.all(wflmc.exact_w2_sq(posterior, plan) <= plan.bound * (1 + 1e-9))


def test_corrected_thresholds_weigh_noise_m_times():
    """The correction is in the threshold rule too: it silences weak devices earlier."""
    generator = np.random.default_rng(0)
    gains = np.abs(generator.standard_normal((50, 20))) * 0.1
    cap = 100 * gains**2
    corrected, uncorrected = (
        threshold_schedule(gains, np.ones(20), cap, 0.1, weight).active.sum()
        for weight in (50.0, 1.0)
    )
    assert corrected < uncorrected
