"""The forecast of clipped chains, all rounds at once, against a loop over rounds."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.evaluation import clipped_rounds
from wflmc.evaluation.clipped_examples import ExampleClipping
from wflmc.evaluation.clipped_law import forecast, model_of
from wflmc.planning import Policy, Sampler

from ..conftest import FULL
from .clipped_reference import forecast_by_rounds

GAUSSIAN = wflmc.gaussian_regression(jax.random.key(1), devices=6, examples=240, dim=3)
UNLIKE = wflmc.gaussian_regression(
    jax.random.key(2), devices=5, examples=200, dim=4, partition="dirichlet:0.5"
)
SOFTMAX = wflmc.softmax_regression(
    jax.random.key(3), devices=4, examples=160, dim=2, classes=3
)
POSTERIORS = {"gaussian": GAUSSIAN, "unlike devices": UNLIKE, "softmax": SOFTMAX}
RANDOM_PLANS = 120 if FULL else 30
RELATIVE_ERROR = 1e-8
"""The sweeps end at a change that leaves some 1e-9."""


def kinetic(posterior):
    return Sampler(dynamics="kinetic", friction=float(2 * posterior.mu**0.5))


def random_plan(seed):
    """A plan of one of the models, with clips and noise from harmless to hopeless."""
    rng = np.random.default_rng(seed)
    posterior = list(POSTERIORS.values())[seed % len(POSTERIORS)]
    is_kinetic = rng.random() < 0.4
    by_record = rng.random() < 0.4
    clip = float(10 ** rng.uniform(-0.5, 2.5))
    epsilon = float(10 ** rng.uniform(-0.5, 2.5))
    privacy = wflmc.Privacy(epsilon, 0.01, clip)
    if by_record:
        example_clip = float(10 ** rng.uniform(-0.7, 0.8))
        privacy = wflmc.Privacy(epsilon, 0.01, clip, "exact", "record", example_clip)
    step = float(rng.uniform(0.02, 1.2)) / (posterior.mu + posterior.L)
    sampler = Sampler()
    if is_kinetic:
        step = float(rng.uniform(0.2, 1.2)) / posterior.L**0.5
        sampler = kinetic(posterior)
    link = wflmc.Link(
        channel.rayleigh(0.01),
        snr_db=float(rng.uniform(0, 60)),
        csi_error=float(rng.choice([0.0, 0.2])),
        downlink_snr_db=float(rng.choice([np.inf, 20.0])),
    )
    return posterior, wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=step,
        burn_in=int(rng.choice([0, 7, 60])),
        samples=int(rng.integers(1, 120)),
        sampler=sampler,
        policy=Policy(
            power="equal"
            if is_kinetic
            else str(rng.choice(["optimized", "equal", "no-dp"])),
            objective=str(rng.choice(["worst", "average"])),
        ),
    )


def assert_same(actual, expected):
    np.testing.assert_allclose(
        actual[:-1], expected[:-1], rtol=RELATIVE_ERROR, atol=1e-12
    )
    assert actual.exact == expected.exact


@pytest.mark.parametrize("seed", range(RANDOM_PLANS))
def test_random_plans_against_a_loop_over_rounds(seed):
    posterior, plan = random_plan(seed)
    model = model_of(plan, posterior)
    assert_same(forecast(plan, model), forecast_by_rounds(plan, model))


@pytest.mark.parametrize("left_out", ["clipping", "excess", "start"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_is_left_out_against_a_loop_over_rounds(seed, left_out):
    posterior, plan = random_plan(seed)
    model = model_of(plan, posterior)
    assert_same(
        forecast(plan, model, **{left_out: False}),
        forecast_by_rounds(plan, model, **{left_out: False}),
    )


def test_random_plans_cover_what_they_should():
    """Clipped and unclipped, by device and by example, of both dynamics, with and without burn-in."""
    plans = [random_plan(seed) for seed in range(30)]
    clipped = [
        forecast(plan, model_of(plan, posterior)).clip_rate for posterior, plan in plans
    ]
    assert any(fraction == 0 for fraction in clipped)
    assert any(0 < fraction < 1 for fraction in clipped)
    assert any(fraction == 1 for fraction in clipped)
    for has in (
        lambda plan: plan.dynamics.has_velocity,
        lambda plan: np.isfinite(plan.example_clip).any(),
        lambda plan: plan.downlink_noise > 0,
        lambda plan: plan.received is not None,
        lambda plan: plan.burn_in == 0,
        lambda plan: plan.certificate.objective_name == "average",
    ):
        assert len({bool(has(plan)) for _, plan in plans}) == 2


@pytest.mark.parametrize("name", POSTERIORS)
def test_short_windows_and_single_rounds_give_the_same(name, monkeypatch):
    """Where a window ends is a matter of speed alone; so is whether it settles at once."""
    posterior = POSTERIORS[name]
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.rayleigh(0.01), snr_db=30),
        wflmc.Privacy(3, 0.01, 3.0),
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=20,
        samples=180,
    )
    model = model_of(plan, posterior)
    expected = forecast_by_rounds(plan, model)
    monkeypatch.setattr(
        clipped_rounds,
        "NUMBERS_IN_A_WINDOW",
        50 * max(posterior.devices, posterior.dim),
    )
    assert_same(forecast(plan, model), expected)
    # Most windows are halved until they are short.
    monkeypatch.setattr(clipped_rounds, "MAX_SWEEPS", 3)
    assert_same(forecast(plan, model), expected)
    monkeypatch.setattr(clipped_rounds, "NUMBERS_IN_A_WINDOW", 1)
    assert_same(forecast(plan, model), expected)


@pytest.mark.parametrize("dynamics", ["overdamped", "kinetic"])
def test_chains_that_diverge_end_in_infinity(dynamics):
    """A public L that is far too small, and nothing is clipped; as long as it takes to overflow."""
    posterior = dataclasses.replace(GAUSSIAN, mu=0.5, L=1.0)
    options = {"step_size": 1.9}
    if dynamics == "kinetic":
        options = {
            "step_size": 1.9,
            "sampler": Sampler(dynamics="kinetic", friction=1.0),
        }
    plan = wflmc.plan(
        posterior, burn_in=100, samples=300, policy=Policy(power="noiseless"), **options
    )
    model = model_of(plan, posterior)
    actual = forecast(plan, model)
    expected = forecast_by_rounds(plan, model)
    assert actual.w2_sq == actual.scaled_w2_sq == actual.inverse_ess == np.inf
    assert expected.w2_sq == expected.scaled_w2_sq == expected.inverse_ess == np.inf
    assert actual.exact


def test_chains_that_clipping_keeps_from_diverging():
    """Steps that are far too long, but a clipped gradient moves θ no farther than its clip."""
    posterior = dataclasses.replace(GAUSSIAN, mu=0.5, L=1.0)
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(1.0), snr_db=60),
        wflmc.Privacy(clip=1.0),
        step_size=1.0,
        burn_in=10,
        samples=40,
    )
    model = model_of(plan, posterior)
    actual = forecast(plan, model)
    assert 1 < actual.scaled_w2_sq < np.inf
    assert_same(actual, forecast_by_rounds(plan, model))


def test_a_model_of_the_plan_alone():
    """Where the data are not looked at."""
    _, plan = random_plan(4)
    model = model_of(plan, None)
    assert_same(forecast(plan, model), forecast_by_rounds(plan, model))


@pytest.mark.parametrize("devices", [1, 2, 5])
def test_a_model_of_the_plan_alone_has_its_mode_where_gradients_add_up_to_zero(devices):
    """Else chains would seem to be off by as much, at odd numbers of devices."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices, examples=200)
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(), snr_db=60),
        wflmc.Privacy(clip=1e6),
        step_size=0.1 / (posterior.mu + posterior.L),
        burn_in=200,
        samples=50,
    )
    model = model_of(plan, None)
    np.testing.assert_allclose(model.cost.gradients_at_mode.sum(0), 0, atol=1e-9)
    exact = forecast(plan, model_of(plan, posterior))
    assert forecast(plan, model).w2_sq == pytest.approx(exact.w2_sq, rel=0.5)


def test_directions_that_stand_for_more_are_clipped_as_all_of_them():
    """Of 160 directions a model of the plan alone has 64."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), 10, examples=2000, dim=160)
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.static(), snr_db=60),
        wflmc.Privacy(clip=250),
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=1,
        samples=1,
    )
    model = model_of(plan, None)
    assert model.cost.precision.size == 64
    expected = forecast(plan, model_of(plan, posterior))
    actual = forecast(plan, model)
    assert actual.fraction_left == pytest.approx(expected.fraction_left, rel=0.25)
    assert_same(actual, forecast_by_rounds(plan, model))


@pytest.mark.parametrize("count", [20, 500])
def test_what_is_left_of_clipped_examples(count):
    """The table between its points, and the slopes that Newton's method takes, against plain means."""
    rng = np.random.default_rng(count)
    norms = rng.gamma(2.0, size=count)
    limits = np.full(count, 1.5) if count > 64 else rng.uniform(0.5, 3, count)
    clipping = ExampleClipping(norms, limits)
    variance = 10 ** rng.uniform(-3, 3, 2000)
    direct = clipping._changes_left(variance)
    np.testing.assert_allclose(
        clipping.changes_left(variance), direct, rtol=1e-9, atol=1e-10
    )
    wide = 10 ** rng.uniform(-200, 200, 5)  # too far apart for a table
    np.testing.assert_allclose(
        clipping.changes_left(wide), clipping._changes_left(wide), rtol=1e-9, atol=1e-10
    )

    norm = np.sqrt(clipping.norms[:, None] ** 2 + variance)
    left = np.minimum(1, clipping.limits[:, None] / norm).mean(0)
    np.testing.assert_allclose(clipping.gradients_left(variance), left, rtol=1e-12)
    factor = 1 + 1e-5
    slope = (clipping._changes_left(variance * factor) - direct) / np.log(factor)
    np.testing.assert_allclose(
        clipping.changes_left_slope(variance), slope, rtol=1e-3, atol=1e-5
    )
    log_left = np.log(clipping.gradients_left(variance * factor) / left) / np.log(
        factor
    )
    np.testing.assert_allclose(
        clipping.gradients_left_slope(variance), log_left, atol=1e-2
    )
