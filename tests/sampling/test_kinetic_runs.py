"""Kinetic chains: rounds written out, runs that go on, and the privacy of every round."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps import audit
from wflmc.dynamics import kinetic
from wflmc.evaluation import choose_burn_in
from wflmc.sampling import Execution, Start, chunks, kernel
from wflmc.support.errors import OverspendError

from ..conftest import FULL
from ..error_tools import codes_of, raises_input_error
from .kinetic_tools import ill_conditioned, kinetic_plan


def test_a_round_written_out(small):
    """By hand from what was received, with clipping, and the noise that overdamped chains have too."""
    plan = kinetic_plan(small, "no-dp", privacy=wflmc.Privacy(clip=5.0))
    run = kernel(small, plan)
    state = run.init(jax.random.key(4))
    after, info = run.step(jax.random.key(5), state)
    theta, velocity = (
        np.asarray(values, dtype=float) for values in (state.position, state.velocity)
    )
    h = plan.step_size[0]
    decay = np.exp(-plan.dynamics.friction * plan.step_size[0])
    middle = theta + h / 2 * velocity
    gradients = small.hessian @ middle - small.linear
    np.testing.assert_allclose(info.norm, np.linalg.norm(gradients, axis=1), rtol=1e-4)
    estimate = plan.scale[0] / plan.gain[0] * np.asarray(info.received, dtype=float)
    kicked = decay * (velocity - h / 2 * estimate) - h / 2 * estimate
    np.testing.assert_allclose(after.velocity, kicked, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        after.position, middle + h / 2 * kicked, rtol=1e-4, atol=1e-5
    )
    clipped = (
        gradients * np.minimum(1, 5.0 / np.linalg.norm(gradients, axis=1))[:, None]
    )
    noise = (
        np.asarray(info.received)
        - plan.gain[0] * (plan.weight[0] / plan.scale[0]) @ clipped
    )
    draw = jax.random.normal(wflmc.support.keys.named(jax.random.key(5), "noise"), (3,))
    np.testing.assert_allclose(noise, draw, rtol=1e-3, atol=1e-3)
    with raises_input_error("state.velocity", "kernel.init"):
        run.step(jax.random.key(5), state._replace(velocity=None))


def test_runner_is_the_kernel_in_a_loop(small):
    plan = kinetic_plan(small, "equal", burn_in=4, samples=6)
    key = jax.random.key(9)
    named = wflmc.support.keys.named
    fold = jax.random.fold_in
    trace = wflmc.sample(key, small, plan, chains=3)
    run = kernel(small, plan)
    for chain in range(3):
        theta = small.draw_initial(fold(named(key, "init"), chain))
        velocity = jax.random.normal(fold(named(key, "velocity"), chain), (3,))
        state = run.init(key)._replace(position=theta, velocity=velocity)
        noise = fold(named(key, "noise"), chain)
        for s in range(len(plan.rounds)):
            state, _ = jax.jit(run.step)(fold(noise, s), state)
            if s >= 4:
                np.testing.assert_allclose(
                    state.position, trace.theta[chain, s - 4], rtol=1e-4, atol=1e-5
                )
        np.testing.assert_allclose(
            state.velocity, trace.velocity[chain], rtol=1e-4, atol=1e-5
        )


def test_plans_in_a_batch_are_plans_on_their_own(small):
    plans = [
        kinetic_plan(small, "equal", friction=friction, samples=4)
        for friction in (0.5, 2.0, 8.0)
    ]
    together = wflmc.sample(jax.random.key(1), small, plans)
    for number, plan in enumerate(plans):
        alone = wflmc.sample(jax.random.key(1), small, plan, 1, numbers=[number])
        np.testing.assert_allclose(
            together.theta[number], alone.theta[0], rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(
        wflmc.exact_w2_sq(small, plans[1]), wflmc.exact_w2_sq(small, [plans[1]] * 2)
    )
    assert len({plan.digest for plan in plans}) == 3
    overdamped = wflmc.plan(
        small,
        wflmc.Link(channel.static()),
        wflmc.Privacy(),
        step_size=0.01,
        burn_in=11,
        samples=4,
        policy=wflmc.Policy(power="equal"),
    )
    with raises_input_error("plan", "2 plans", "dynamics"):
        wflmc.sample(jax.random.key(1), small, [plans[0], overdamped])
    assert wflmc.sample(jax.random.key(1), small, overdamped, 2).velocity is None
    assert kernel(small, overdamped).init(jax.random.key(0)).velocity is None


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("memory", [None, 2000.0] if FULL else [None])
def test_stopped_and_resumed_is_as_if_never_stopped(
    six_devices, tmp_path, monkeypatch, memory
):
    plan = kinetic_plan(six_devices, "equal", burn_in=13, samples=20)
    monkeypatch.setattr(chunks, "BLOCK_WORK", 8 * 9 * six_devices.work())
    arguments = (jax.random.key(1), six_devices, plan, 9)
    whole = wflmc.sample(*arguments, execution=Execution(memory=memory))

    def stop(done, of):
        raise StoppedError

    stops = 0
    while stops < 100:
        try:
            trace = wflmc.sample(
                *arguments,
                execution=Execution(memory=memory, checkpoint=tmp_path, progress=stop),
            )
            break
        except StoppedError:
            stops += 1
    assert stops >= (4 if memory is None else 10)
    np.testing.assert_array_equal(trace.theta, whole.theta)
    np.testing.assert_array_equal(trace.velocity, whole.velocity)
    assert np.all(whole.velocity.std(0) > 0)


def test_rounds_that_fill_up_the_last_block_move_no_chain(six_devices, monkeypatch):
    plan = kinetic_plan(six_devices, "equal", burn_in=3, samples=10)
    whole = wflmc.sample(jax.random.key(1), six_devices, plan, 4)
    # Blocks of five rounds, the last of three.
    monkeypatch.setattr(chunks, "BLOCK_WORK", 5 * 4 * six_devices.work())
    parts = wflmc.sample(jax.random.key(1), six_devices, plan, 4)
    np.testing.assert_allclose(parts.velocity, whole.velocity, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(parts.theta, whole.theta, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    not FULL,
    reason="tests/cli/test_kinetic_command.py adds rounds too: make test-full runs it",
)
def test_the_rest_of_a_plan_goes_on_with_the_same_draws(six_devices):
    plan = kinetic_plan(six_devices, "equal", burn_in=3, samples=20)
    whole = wflmc.sample(jax.random.key(1), six_devices, plan, 5)
    begun = wflmc.sample(
        jax.random.key(1), six_devices, plan.from_round(0), 5, keep_burn_in=True
    )
    np.testing.assert_allclose(begun.theta, whole.theta, rtol=1e-4, atol=1e-5)
    short = kinetic_plan(six_devices, factor=0.1, burn_in=3, samples=9)
    long = kinetic_plan(six_devices, factor=0.1, burn_in=3, samples=20)
    first = wflmc.sample(jax.random.key(1), six_devices, short, 5)
    where = Start(first.theta[:, -1], first.velocity)
    rest = long.from_round(12)
    assert rest.bound is None
    assert np.isnan(rest.initial_w2_sq)
    after = wflmc.sample(jax.random.key(1), six_devices, rest, 5, initial=where)
    in_one_run = wflmc.sample(jax.random.key(1), six_devices, long, 5)
    np.testing.assert_allclose(
        after.theta, in_one_run.theta[:, 9:], rtol=1e-4, atol=1e-5
    )
    elsewhere = wflmc.sample(
        jax.random.key(1), six_devices, rest, 5, initial=first.theta[:, -1]
    )
    assert np.abs(elsewhere.theta[:, 0] - in_one_run.theta[:, 9]).max() > 0.01
    with raises_input_error("initial", "(5, 10)"):
        wflmc.sample(
            jax.random.key(1),
            six_devices,
            rest,
            5,
            initial=np.concatenate([where.position, where.velocity], axis=1),
        )
    with raises_input_error("initial.velocity", "(5, 2)"):
        wflmc.sample(
            jax.random.key(1),
            six_devices,
            rest,
            5,
            initial=Start(where.position, where.velocity[:, :2]),
        )


@pytest.mark.parametrize("power", ["equal", "noiseless-dp"])
@pytest.mark.parametrize("unit", ["device", "record"])
def test_every_round_costs_what_an_overdamped_one_of_this_gain_does(
    six_devices, power, unit
):
    """x = 2aℓ², and no device is taken beyond its budget."""
    privacy = wflmc.Privacy(
        3.0, 1e-3, clip=20.0, unit=unit, example_clip=2.0 if unit == "record" else None
    )
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=70, csi_error=0.1)
    plan = wflmc.plan(
        six_devices,
        link,
        privacy,
        step_size=1 / six_devices.L**0.5,
        sampler=wflmc.Sampler(friction=2 * six_devices.mu**0.5, dynamics="kinetic"),
        burn_in=20,
        samples=20,
        policy=wflmc.Policy(power=power),
    )
    sensitivity = 20.0 if unit == "device" else 2.0
    strength = np.maximum(
        plan.context.uncertainty, 1.0 if plan.received is None else plan.received
    )
    expected = (
        2
        * (plan.gain[:, None] * strength * sensitivity) ** 2
        / plan.noise_power
        * (plan.weight > 0)
    )
    np.testing.assert_allclose(plan.loss, expected, rtol=1e-12)
    budget = privacy.budget(6)
    assert np.all(plan.spent <= budget)
    assert plan.spent.max() > 0.9 * budget[0]
    with pytest.raises(OverspendError):
        wflmc.sample(
            jax.random.key(0), six_devices, plan.with_rounds(gain=1.2 * plan.gain), 2
        )


def test_an_audit_holds_and_finds_what_is_wrong(six_devices, monkeypatch):
    plan = kinetic_plan(
        six_devices, "equal", loss=np.ones(6), privacy=wflmc.Privacy(8, 0.01, 30)
    )
    attacks = audit.ATTACKS if FULL else ["constant", "model"]
    report = audit.audit(
        jax.random.key(0), plan, six_devices, trials=20_000, attacks=attacks
    )
    assert report.consistent
    assert max(test.epsilon_gaussian for test in report.tests) > 0.8 * report.epsilon
    module = sys.modules["wflmc.sampling.kernel"]
    honest = module.superpose
    monkeypatch.setattr(
        module,
        "superpose",
        lambda key, signal, noise_power: honest(key, signal, noise_power / 4),
    )
    # Another number of trials is compiled anew, and so with the change; no other test has this number.
    assert not audit.audit(
        jax.random.key(0), plan, trials=19_064, attacks=["constant"]
    ).consistent


def test_stats_say_how_much_noise_is_too_much(six_devices):
    plan = kinetic_plan(six_devices, factor=0.5, samples=3)
    groups = wflmc.sample(jax.random.key(0), six_devices, plan, 4).to_arviz()
    stats = groups["sample_stats"]
    decay = np.exp(-plan.dynamics.friction * plan.step_size[0])
    np.testing.assert_allclose(stats["excess_noise"], 1 - decay**2, rtol=1e-9)
    assert stats["last_velocity"].shape == (4, 5)


def test_what_cannot_be_is_refused(six_devices):
    with raises_input_error("step_size", "2/√L", section="sampler"):
        kinetic_plan(six_devices, factor=1.0, step=2.0)
    with raises_input_error("friction", section="sampler"):
        kinetic_plan(six_devices, factor=1.0, friction=0.0)
    with raises_input_error("friction", section="sampler"):
        kinetic_plan(six_devices, factor=1.0, friction=np.inf)
    with raises_input_error("step_size", "friction", section="sampler"):
        kinetic_plan(six_devices, factor=1.0, step=1e-13)
    with raises_input_error("dynamics", section="sampler", value="ballistic"):
        kinetic_plan(six_devices, factor=1.0, dynamics="ballistic")
    for objective in ("worst", "average"):
        with raises_input_error("objective", "exact", "kinetic", value=objective):
            kinetic_plan(six_devices, "optimized", objective=objective)
    kinetic_plan(six_devices, factor=1.0, step=1.99)


def test_plans_warn_of_useless_friction_and_of_unlike_devices(six_devices):
    assert "unsuitable-friction" not in codes_of(kinetic_plan(six_devices, "equal"))
    for friction in (0.1, 21 * (six_devices.L / six_devices.mu) ** 0.5):
        plan = kinetic_plan(six_devices, "equal", friction=friction)
        assert "unsuitable-friction" in codes_of(plan)
    unlike = wflmc.gaussian_regression(
        jax.random.key(1), 4, examples=40, dim=3, partition="by-label"
    )
    plan = kinetic_plan(unlike, "no-dp", step=1.95, loss=[1.0, 1e-12, 1e-12, 1e-12])
    heaviest = np.linalg.eigvalsh(np.tensordot(plan.weight[0], unlike.hessian, 1))[-1]
    warned = "expanding-rounds" in codes_of(plan)
    assert warned == (plan.step_size[0] ** 2 * heaviest > 4)


def test_a_pilot_finds_the_burn_in():
    """As long as the mean needs to forget, and less than overdamped steps take."""
    posterior = ill_conditioned()
    step = 1 / posterior.L**0.5
    friction = 2 * posterior.mu**0.5
    burn_in = choose_burn_in(
        jax.random.key(0), posterior, step, 5000, kinetic(friction)
    )
    plan = kinetic_plan(posterior, factor=1.0, step=1.0)
    memory = -1 / np.log(plan.gamma)
    assert memory < burn_in < 10 * memory
    with raises_input_error("max_burn_in", section="sampler", value=10):
        choose_burn_in(jax.random.key(0), posterior, step, 10, kinetic(friction))
