"""Kinetic dynamics: the exact law, the Langevin cap, rounds saved, runs that go on, and the privacy of every round."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

import wflmc
from wflmc import audit, channel
from wflmc.errors import InputError, OverspendError
from wflmc.evaluation import choose_burn_in
from wflmc.planning import POLICIES, Allocation
from wflmc.posterior import w2_squared
from wflmc.posterior.kinetic import kinetic_round
from wflmc.sampling import kernel, runner

from .cli_tools import strict
from .test_sampling import LIMIT, unclipped, z_scores

CHAINS = 20_000


def make(posterior, power="no-dp", *, factor=None, step=0.8, friction=2.0, csi_error=0.0, loss=None, **keywords):
    """A plan with h = step/√L and γ_f = friction·√μ, at `factor` times the Langevin cap where that is given."""
    path_loss = np.geomspace(1.0, 1e-3, posterior.devices) if loss is None else loss
    link = wflmc.Link(channel.static(path_loss), snr_db=40, csi_error=csi_error)
    if factor is not None:
        power = POLICIES["noiseless"]._replace(allocate=lambda problem: Allocation(factor * problem.lmc_cap))
    defaults = {"burn_in": 11, "samples": 1, "step_size": step / posterior.L**0.5, "dynamics": "kinetic"}
    return wflmc.plan(
        posterior, link, keywords.pop("privacy", wflmc.Privacy(15, 0.01, 300)), power=power,
        friction=friction * posterior.mu**0.5, **{**defaults, **keywords},
    )  # fmt: skip


def ill_conditioned():
    """Five parameters whose curvatures go from 1 to 1000."""
    generator = np.random.default_rng(0)
    turn, _ = np.linalg.qr(generator.standard_normal((5, 5)))
    X = np.sqrt(np.geomspace(1, 1000, 5) - 0.01)[:, None] * turn
    y = X @ generator.standard_normal(5)
    return wflmc.gaussian_regression(jax.random.key(0), 5, X=X, y=y, prior_std=10.0, partition="blocks")


def five_parts(plan, posterior, s):
    """Round s on (θ, v), part by part as the splitting is defined: matrix, offset, noise that enters."""
    m, h = posterior.dim, plan.step_size[s]
    one, none = np.eye(m), np.zeros((m, m))
    hessian = np.tensordot(plan.weight_received[s], posterior.hessian, 1)
    linear = plan.weight_received[s] @ posterior.linear
    decay = np.exp(-plan.friction * h)
    drift = np.block([[one, h / 2 * one], [none, one]])
    damp = np.block([[one, none], [none, decay * one]])
    # The second kick has the gradient of the first, taken at the same θ.
    kick = np.block([[one, none], [-h / 2 * hessian, one]])
    push = np.concatenate([np.zeros(m), h / 2 * linear])
    matrix = drift @ kick @ damp @ kick @ drift
    offset = drift @ (kick @ damp @ push + push)
    return matrix, offset, drift @ np.concatenate([none, one])


def law_by_parts(plan, posterior):
    """Mean and covariance of θ after every round."""
    start, m = posterior.initial(plan.init), posterior.dim
    mean, covariance = np.zeros(2 * m), np.eye(2 * m)
    mean[:m], covariance[:m, :m] = start.mean, start.covariance
    for s in range(plan.rounds):
        matrix, offset, enters = five_parts(plan, posterior, s)
        mean = matrix @ mean + offset
        covariance = matrix @ covariance @ matrix.T + plan.noise_variance[s] * enters @ enters.T
        yield mean[:m], covariance[:m, :m]


def law_of(posterior, plan):
    return posterior.law(plan.step_size, plan.weight_received, plan.noise_variance, plan.init, plan.friction)


CASES = {
    "far below the cap": {"factor": 0.1},
    "below the cap": {"factor": 0.5},
    "at the cap": {"factor": 1.0},
    "above the cap": {"factor": 4.0},
    "from zero, large step": {"factor": 1.0, "init": "zero", "step": 1.8},
    "few send, channels known badly": {"power": "equal", "csi_error": 0.2, "loss": np.geomspace(1e-3, 1e-9, 30)},
    "strong friction": {"factor": 2.0, "friction": 30.0},
    "hardly any friction": {"factor": 0.7, "friction": 0.1},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_chains_follow_the_exact_law(posterior, case):
    plan = make(posterior, **case)
    if "loss" in case:
        assert 0 < plan.active_devices.min() < posterior.devices
    law = law_of(posterior, plan)
    for s, (mean, covariance) in enumerate(law_by_parts(plan, posterior)):
        np.testing.assert_allclose(law.mean[s], mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(law.covariance[s], covariance, rtol=1e-9, atol=1e-12)
    trace = wflmc.sample(jax.random.key(3), posterior, unclipped(plan), CHAINS, keep_burn_in=True)
    theta = np.concatenate([trace.warmup, trace.theta], axis=1)
    scores = np.array([z_scores(theta[:, s], law.mean[s], law.covariance[s]) for s in (0, 1, 4, 11)])
    assert np.all(np.abs(scores[:, 0]) < LIMIT), scores
    assert np.all(scores[:, 1] < LIMIT), scores


def test_one_percent_too_much_noise_is_noticed(posterior):
    plan = make(posterior, factor=1.0, init="zero")
    trace = wflmc.sample(
        jax.random.key(3), posterior, unclipped(dataclasses.replace(plan, gain=plan.gain / 1.01)), CHAINS
    )
    law = law_of(posterior, plan)
    assert z_scores(trace.theta[:, 0], law.mean[-1], law.covariance[-1])[0] > LIMIT


@pytest.mark.parametrize("step", [0.05, 0.5, 1.0, 1.5, 1.9])
@pytest.mark.parametrize("friction", [0.5, 2.0, 50.0])
def test_samples_have_the_right_variance_whatever_the_step(step, friction):
    """At the end of a round, that is; where gradients are asked for, 1/λ has become 1/(λ (1 − h²λ/4))."""
    posterior = ill_conditioned()
    h, gamma = step / posterior.L**0.5, friction * posterior.mu**0.5
    total = posterior.hessian.sum(0), posterior.linear.sum(0)
    matrix, offset, enters = kinetic_round(np.array(h), np.array(gamma), *total)
    covariance = linalg.solve_discrete_lyapunov(matrix, -np.expm1(-2 * gamma * h) * enters @ enters.T)
    np.testing.assert_allclose(covariance[:5, :5], posterior.covariance, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(np.linalg.solve(np.eye(10) - matrix, offset)[:5], posterior.mean, rtol=1e-6)


def test_where_gradients_are_asked_for_the_variance_is_too_large(few):
    plan = make(few, factor=1.0, step=1.5, burn_in=400)
    h, m = plan.step_size[0], few.dim
    covariance = np.eye(2 * m)
    for s in range(plan.rounds):
        matrix, _, enters = five_parts(plan, few, s)
        covariance = matrix @ covariance @ matrix.T + plan.langevin_noise[s] * enters @ enters.T
    ahead = np.concatenate([np.eye(m), h / 2 * np.eye(m)], axis=1)
    curvature = np.linalg.eigvalsh(few.hessian.sum(0))
    expected = 1 / (curvature * (1 - h**2 * curvature / 4))
    np.testing.assert_allclose(np.linalg.eigvalsh(ahead @ covariance @ ahead.T), np.sort(expected), rtol=1e-9)
    np.testing.assert_allclose(covariance[:m, :m], few.covariance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("friction", [0.1, 2.0, 30.0])
def test_at_the_cap_the_channel_is_all_the_noise_that_sampling_needs(few, friction):
    """a = (K/K_a)² h²/(4 tanh(γ_f h/2)), and with less power there is too much noise."""
    plan = make(few, factor=1.0, friction=friction)
    h, decay = plan.step_size[0], np.exp(-plan.friction * plan.step_size[0])
    a = h**2 / (4 * np.tanh(plan.friction * h / 2))
    np.testing.assert_allclose(plan.gain**2 / plan.noise_power, a, rtol=1e-12)
    assert not plan.server_noise.any()
    assert np.all(plan.limit == 0)  # lmc-limited
    np.testing.assert_allclose(plan.noise_variance, 1 - decay**2, rtol=1e-12)
    for factor, excess in ((1.0, 0.0), (0.8, 0.25), (4.0, 0.0)):
        made = make(few, factor=factor, friction=friction)
        np.testing.assert_allclose(made.excess_noise, excess * (1 - decay**2), rtol=1e-9, atol=1e-12)
    silent = make(few, "no-dp", friction=friction, loss=[1e9] * 3 + [1e-15] * 3)
    assert np.all(silent.active_devices == 3)
    np.testing.assert_allclose(silent.gain**2 / silent.noise_power, 4 * a, rtol=1e-12)


def test_at_the_cap_simulated_chains_have_the_posterior_without_any_other_noise(few):
    for factor, exact in ((1.0, True), (0.8, False)):
        plan = make(few, factor=factor, burn_in=40)
        assert not plan.server_noise.any()
        theta = wflmc.sample(jax.random.key(5), few, unclipped(plan), CHAINS).theta[:, 0]
        score = z_scores(theta, few.mean, few.covariance)[0]
        assert abs(score) < LIMIT if exact else score > 10


def test_above_the_cap_the_server_adds_the_rest(posterior):
    plan = make(posterior, factor=4.0)
    np.testing.assert_allclose(plan.server_noise, 0.75 * plan.langevin_noise, rtol=1e-9)
    np.testing.assert_allclose(plan.noise_variance, plan.langevin_noise, rtol=1e-12)
    loud = audit.above_cap(make(posterior, "equal"), 3.0)
    np.testing.assert_allclose(loud.noise_variance, loud.langevin_noise, rtol=1e-12)
    np.testing.assert_allclose(loud.server_noise, (1 - 1 / 9) * loud.langevin_noise, rtol=1e-9)


def rounds_to(distances, target):
    reached = np.flatnonzero(distances <= target)
    return int(reached[0]) + 1 if reached.size else len(distances) + 10**6


def test_far_fewer_rounds_than_overdamped_at_condition_number_1000():
    """The best of a grid for both. The privacy that they take at their caps is about the same."""
    posterior, target = ill_conditioned(), 1e-2
    rounds, everyone = 6000, np.ones((6000, 5))
    slow = {}
    for step in np.geomspace(0.1, 1.95, 12) / posterior.L:
        law = posterior.law(np.full(rounds, step), everyone, np.full(rounds, 2 * step))
        slow[step] = rounds_to(w2_squared(law, posterior.exact), target)
    fast = {}
    for step in np.linspace(0.5, 1.95, 6) / posterior.L**0.5:
        for friction in np.geomspace(0.5, 8, 7) * posterior.mu**0.5:
            noise = np.full(400, -np.expm1(-2 * friction * step))
            law = posterior.law(np.full(400, step), everyone[:400], noise, friction=friction)
            fast[step, friction] = rounds_to(w2_squared(law, posterior.exact), target)
    eta, (h, friction) = min(slow, key=slow.get), min(fast, key=fast.get)
    assert slow[eta] > 20 * fast[h, friction]
    assert fast[h, friction] < 100
    losses = slow[eta] * eta, fast[h, friction] * h**2 / (2 * np.tanh(friction * h / 2))  # over ℓ²
    assert 0.5 < losses[1] / losses[0] < 1.5

    link, nothing = wflmc.Link(channel.static()), wflmc.Privacy()
    common = {"power": "noiseless", "samples": 1}
    both = [
        wflmc.plan(posterior, link, nothing, step_size=eta, burn_in=slow[eta] - 1, **common),
        wflmc.plan(
            posterior, link, nothing, step_size=h, friction=friction, dynamics="kinetic",
            burn_in=fast[h, friction] - 1, **common,
        ),
    ]  # fmt: skip
    for plan in both:
        assert wflmc.exact_w2_sq(posterior, plan)[-1] <= target
        law = law_of(posterior, plan)
        theta = wflmc.sample(jax.random.key(3), posterior, plan, CHAINS // 5).theta[:, 0]
        scores = z_scores(theta, law.mean[-1], law.covariance[-1])
        assert abs(scores[0]) < LIMIT, scores
        assert scores[1] < LIMIT, scores


def test_the_response_is_the_law(small):
    plan = make(small, "equal", step=1.2, burn_in=5, samples=7, csi_error=0.1)
    law = law_of(small, plan)
    found = small.response(plan.step_size, plan.weight_received, plan.burn_in, plan.init, plan.friction)
    assert found.effect.shape == (7, 12, 3, 3)
    noise = np.einsum("s,ksij->kij", plan.noise_variance, found.effect)
    np.testing.assert_allclose(found.covariance + noise, law.covariance[5:], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.shift, ((law.mean[5:] - small.mean) ** 2).sum(1), rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(found.target, small.covariance)
    for kept in range(7):
        assert not found.effect[kept, 6 + kept :].any()
    np.testing.assert_allclose(found.effect[0, 5], (plan.step_size[5] / 2) ** 2 * np.eye(3))


def test_power_optimal_for_the_exact_law(small):
    """Better than equal parts, within budgets, and proven."""
    settings = {"step": 1.2, "burn_in": 12, "samples": 9}
    best, equal = (make(small, power, objective="exact", **settings) for power in ("optimized", "equal"))
    exact = [wflmc.exact_w2_sq(small, plan)[12:].max() for plan in (best, equal)]
    assert best.objective == pytest.approx(exact[0], rel=1e-9)
    assert exact[0] < exact[1]
    assert best.gap < 1e-6
    assert np.all(best.spent <= best.privacy.budget(best.devices))
    assert np.all(best.power_share <= 1 + 1e-12)
    assert best.bound is None


def test_effective_sample_size_of_kinetic_chains(small):
    plan = make(small, factor=1.0, step=1.2, burn_in=12, samples=9)
    expected = wflmc.evaluation.exact_ess(small, plan)
    theta = wflmc.sample(jax.random.key(8), small, plan, CHAINS).theta.mean(1)
    found = np.diagonal(small.covariance) / theta.var(0, ddof=1)
    assert np.abs(found / expected - 1).max() < LIMIT * np.sqrt(2 / CHAINS)


def test_the_rate_is_that_of_the_slowest_mode():
    posterior = ill_conditioned()
    for step, friction in ((0.3, 0.5), (1.0, 2.0), (1.9, 2.0), (1.99, 300.0)):
        plan = make(posterior, factor=1.0, step=step, friction=friction)
        matrix, _, _ = five_parts(plan, posterior, 0)
        assert plan.gamma == pytest.approx(np.abs(np.linalg.eigvals(matrix)).max(), rel=1e-9)


def test_a_round_written_out(small):
    """By hand from what was received, with clipping, and the noise that overdamped chains have too."""
    plan = make(small, "no-dp", privacy=wflmc.Privacy(clip=5.0))
    run = kernel(small, plan)
    state = run.init(jax.random.key(4))
    after, info = run.step(jax.random.key(5), state)
    theta, velocity = (np.asarray(values, dtype=float) for values in (state.theta, state.velocity))
    h, decay = plan.step_size[0], np.exp(-plan.friction * plan.step_size[0])
    middle = theta + h / 2 * velocity
    gradients = small.hessian @ middle - small.linear
    np.testing.assert_allclose(info.norm, np.linalg.norm(gradients, axis=1), rtol=1e-4)
    estimate = plan.scale[0] / plan.gain[0] * np.asarray(info.received, dtype=float)
    kicked = decay * (velocity - h / 2 * estimate) - h / 2 * estimate
    np.testing.assert_allclose(after.velocity, kicked, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.theta, middle + h / 2 * kicked, rtol=1e-4, atol=1e-5)
    clipped = gradients * np.minimum(1, 5.0 / np.linalg.norm(gradients, axis=1))[:, None]
    noise = np.asarray(info.received) - plan.gain[0] * (plan.weight[0] / plan.scale[0]) @ clipped
    draw = jax.random.normal(wflmc.keys.named(jax.random.key(5), "noise"), (3,))
    np.testing.assert_allclose(noise, draw, rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match="velocity"):
        run.step(jax.random.key(5), state._replace(velocity=None))


def test_runner_is_the_kernel_in_a_loop(small):
    plan = make(small, "equal", burn_in=4, samples=6)
    key, named, fold = jax.random.key(9), wflmc.keys.named, jax.random.fold_in
    trace = wflmc.sample(key, small, plan, chains=3)
    run = kernel(small, plan)
    for chain in range(3):
        theta = small.draw_initial(fold(named(key, "init"), chain))
        velocity = jax.random.normal(fold(named(key, "velocity"), chain), (3,))
        state = run.init(key)._replace(theta=theta, velocity=velocity)
        noise = fold(named(key, "noise"), chain)
        for s in range(plan.rounds):
            state, _ = jax.jit(run.step)(fold(noise, s), state)
            if s >= 4:
                np.testing.assert_allclose(state.theta, trace.theta[chain, s - 4], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state.velocity, trace.velocity[chain], rtol=1e-4, atol=1e-5)


def test_plans_in_a_batch_are_plans_on_their_own(small):
    plans = [make(small, "equal", friction=friction, samples=4) for friction in (0.5, 2.0, 8.0)]
    together = wflmc.sample(jax.random.key(1), small, plans)
    for number, plan in enumerate(plans):
        alone = wflmc.sample(jax.random.key(1), small, plan, 1, numbers=[number])
        np.testing.assert_allclose(together.theta[number], alone.theta[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(wflmc.exact_w2_sq(small, plans[1]), wflmc.exact_w2_sq(small, [plans[1]] * 2))
    assert len({plan.digest for plan in plans}) == 3
    overdamped = wflmc.plan(
        small, wflmc.Link(channel.static()), wflmc.Privacy(), step_size=0.01, burn_in=11, samples=4, power="equal"
    )
    with pytest.raises(InputError, match="start and dynamics"):
        wflmc.sample(jax.random.key(1), small, [plans[0], overdamped])
    assert wflmc.sample(jax.random.key(1), small, overdamped, 2).velocity is None
    assert kernel(small, overdamped).init(jax.random.key(0)).velocity is None


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("memory", [None, 2000.0])
def test_stopped_and_resumed_is_as_if_never_stopped(few, tmp_path, monkeypatch, memory):
    plan = make(few, "equal", burn_in=13, samples=20)
    monkeypatch.setattr(runner, "BLOCK_WORK", 8 * 9 * few.work())
    arguments = (jax.random.key(1), few, plan, 9)
    whole = wflmc.sample(*arguments, memory=memory)

    def stop(done, of):
        raise StoppedError

    stops = 0
    while stops < 100:
        try:
            trace = wflmc.sample(*arguments, memory=memory, checkpoint=tmp_path, progress=stop)
            break
        except StoppedError:
            stops += 1
    assert stops >= (4 if memory is None else 10)
    np.testing.assert_array_equal(trace.theta, whole.theta)
    np.testing.assert_array_equal(trace.velocity, whole.velocity)
    assert np.all(whole.velocity.std(0) > 0)


def test_the_rest_of_a_plan_goes_on_with_the_same_draws(few):
    plan = make(few, "equal", burn_in=3, samples=20)
    whole = wflmc.sample(jax.random.key(1), few, plan, 5)
    begun = wflmc.sample(jax.random.key(1), few, dataclasses.replace(plan.rest(0)), 5, keep_burn_in=True)
    np.testing.assert_array_equal(begun.theta, whole.theta)
    short = make(few, factor=0.1, burn_in=3, samples=9)
    long = make(few, factor=0.1, burn_in=3, samples=20)
    first = wflmc.sample(jax.random.key(1), few, short, 5)
    where = np.concatenate([first.theta[:, -1], first.velocity], axis=1)
    rest = long.rest(12)
    assert rest.bound is None
    assert np.isnan(rest.initial_w2_sq)
    after = wflmc.sample(jax.random.key(1), few, rest, 5, initial=where)
    every = wflmc.sample(jax.random.key(1), few, long, 5)
    np.testing.assert_allclose(after.theta, every.theta[:, 9:], rtol=1e-4, atol=1e-5)
    elsewhere = wflmc.sample(jax.random.key(1), few, rest, 5, initial=first.theta[:, -1])
    assert np.abs(elsewhere.theta[:, 0] - every.theta[:, 9]).max() > 0.01
    with pytest.raises(InputError, match="initial"):
        wflmc.sample(jax.random.key(1), few, rest, 5, initial=where[:, :7])


@pytest.mark.parametrize("power", ["equal", "noiseless-dp"])
@pytest.mark.parametrize("unit", ["device", "record"])
def test_every_round_costs_what_an_overdamped_one_of_this_gain_does(few, power, unit):
    """x = 2aℓ², and no device is taken beyond its budget."""
    privacy = wflmc.Privacy(3.0, 1e-3, clip=20.0, unit=unit, example_clip=2.0 if unit == "record" else None)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=70, csi_error=0.1)
    plan = wflmc.plan(
        few, link, privacy, step_size=1 / few.L**0.5, friction=2 * few.mu**0.5, dynamics="kinetic", burn_in=20,
        samples=20, power=power,
    )  # fmt: skip
    sensitivity = 20.0 if unit == "device" else 2.0
    strength = np.maximum(plan.uncertainty, 1.0 if plan.received is None else plan.received)
    expected = 2 * (plan.gain[:, None] * strength * sensitivity) ** 2 / plan.noise_power * (plan.weight > 0)
    np.testing.assert_allclose(plan.loss, expected, rtol=1e-12)
    budget = privacy.budget(6)
    assert np.all(plan.spent <= budget)
    assert plan.spent.max() > 0.9 * budget[0]
    with pytest.raises(OverspendError):
        wflmc.sample(jax.random.key(0), few, dataclasses.replace(plan, gain=1.2 * plan.gain), 2)


def test_an_audit_holds_and_finds_what_is_wrong(few, monkeypatch):
    plan = make(few, "equal", loss=np.ones(6), privacy=wflmc.Privacy(8, 0.01, 30))
    report = audit.audit(jax.random.key(0), plan, few, trials=20_000)
    assert report.consistent
    assert max(test.epsilon_gaussian for test in report.tests) > 0.8 * report.epsilon
    module = sys.modules["wflmc.sampling.kernel"]
    honest = module.receive
    jax.clear_caches()
    monkeypatch.setattr(module, "receive", lambda key, signal, now: signal + (honest(key, signal, now) - signal) / 2)
    assert not audit.audit(jax.random.key(0), plan, trials=20_000, attacks=["constant"]).consistent
    jax.clear_caches()


def test_stats_say_how_much_noise_is_too_much(few):
    plan = make(few, factor=0.5, samples=3)
    groups = wflmc.sample(jax.random.key(0), few, plan, 4).datasets()
    stats = groups["sample_stats"]
    decay = np.exp(-plan.friction * plan.step_size[0])
    np.testing.assert_allclose(stats["excess_noise"], 1 - decay**2, rtol=1e-9)
    assert stats["last_velocity"].shape == (4, 5)


def test_what_cannot_be_is_refused(few):
    with pytest.raises(InputError, match="2/√L"):
        make(few, factor=1.0, step=2.0)
    with pytest.raises(InputError, match="friction"):
        make(few, factor=1.0, friction=0.0)
    with pytest.raises(InputError, match="friction"):
        make(few, factor=1.0, friction=np.inf)
    with pytest.raises(InputError, match="forgotten"):
        make(few, factor=1.0, step=1e-13)
    with pytest.raises(InputError, match="dynamics"):
        make(few, factor=1.0, dynamics="ballistic")
    for objective in ("worst", "average"):
        with pytest.raises(InputError, match="'exact' with dynamics = 'kinetic'"):
            make(few, "optimized", objective=objective)
    make(few, factor=1.0, step=1.99)


def test_plans_warn_of_useless_friction_and_of_unlike_devices(few):
    assert not [text for text in make(few, "equal").warnings if "friction" in text]
    for friction in (0.1, 21 * (few.L / few.mu) ** 0.5):
        assert [text for text in make(few, "equal", friction=friction).warnings if "friction" in text]
    unlike = wflmc.gaussian_regression(jax.random.key(1), 4, examples=40, dim=3, partition="by-label")
    plan = make(unlike, "no-dp", step=1.95, loss=[1.0, 1e-12, 1e-12, 1e-12])
    heaviest = np.linalg.eigvalsh(np.tensordot(plan.weight[0], unlike.hessian, 1))[-1]
    warned = any("beyond 2/√L of theirs" in text for text in plan.warnings)
    assert warned == (plan.step_size[0] ** 2 * heaviest > 4)


def test_a_pilot_finds_the_burn_in():
    """As long as the mean needs to forget, and less than overdamped steps take."""
    posterior = ill_conditioned()
    step, friction = 1 / posterior.L**0.5, 2 * posterior.mu**0.5
    found = choose_burn_in(jax.random.key(0), posterior, step, 5000, friction)
    plan = make(posterior, factor=1.0, step=1.0)
    memory = -1 / np.log(plan.gamma)
    assert memory < found < 10 * memory
    with pytest.raises(InputError, match="max_burn_in"):
        choose_burn_in(jax.random.key(0), posterior, step, 10, friction)


SCENARIO = """
[posterior]
devices = 6
examples = 120
[link]
fading = "static"
power = 1.0
snr_db = 60.0
[privacy]
epsilon = 1000.0
delta = 0.01
[sampler]
dynamics = "kinetic"
friction = "2*mu**0.5"
burn_in = 6
samples = 5
chains = 20
[policy]
power = "equal"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kinetic.toml"
    path.write_text(SCENARIO)
    return path


def test_plan_command(plan_of, call, file, tmp_path):
    document = plan_of(file)
    constants = document["constants"]
    assert constants["step_size"] == pytest.approx(constants["L"] ** -0.5)
    assert constants["friction"] == pytest.approx(2 * constants["mu"] ** 0.5)
    assert constants["dynamics"] == "kinetic"
    assert [document[name] for name in ("bound", "objective", "lower_bound", "gap")] == [None] * 4
    assert constants["initial_w2_sq"] > 0
    assert len(document["exact_w2_sq"]) == 11
    assert plan_of(file, "--set", "sampler.friction=7.5")["constants"]["friction"] == 7.5
    assert plan_of(file, "--set", "sampler.step_size=0.01")["constants"]["step_size"] == 0.01
    assert plan_of(file, "--set", "sampler.burn_in=auto")["constants"]["burn_in"] > 0
    idle = plan_of(file, "--set", "sampler.dynamics=overdamped")
    assert "friction" not in idle["constants"]
    assert any("sampler.friction has no effect" in text for text in idle["warnings"])
    code, out, _ = call("plan", file, "--plot", tmp_path / "plan.png")
    assert code == 0
    assert "none is known for kinetic dynamics" in out
    assert (tmp_path / "plan.png").exists()
    for arguments, says in (
        (("--set", "policy.power=optimized"), "policy.objective"),
        (("--set", "sampler.step_size=1.0"), "sampler.step_size"),
        (("--set", "sampler.friction=-1"), "sampler.friction"),
        (("--set", "sampler.friction=mu-mu"), "sampler.friction"),
        (("--set", "sampler.friction=nu"), "sampler.friction"),
        (("--solve-for", "link.snr_db", "--target", "1"), "--metric"),
    ):
        code, _, err = call("plan", file, *arguments)
        assert (code, says in err) == (2, True), err
    code, out, _ = call("plan", file, "--solve-for", "link.snr_db", "--target", "0.5", "--metric", "exact", "--json")
    assert code == 0
    assert strict(out)["solve_for"]["reachable"]


def samples_in(folder):
    import h5netcdf

    with h5netcdf.File(folder / "trace.nc") as found:
        return found["posterior"]["theta"][...], found["sample_stats"]["last_velocity"][...]


def test_run_command_goes_on_as_if_it_had_never_ended(call, file, tmp_path, monkeypatch):
    """At its caps a plan has the same gains whatever the number of rounds: more rounds are those of a longer run."""
    from wflmc.cli import run

    caps = ("--set", "policy.power=no-dp")
    assert call("run", file, *caps, "--out", tmp_path / "long", "--set", "sampler.samples=12")[0] == 0
    folder = tmp_path / "short"
    assert call("run", file, *caps, "--out", folder)[0] == 0
    whole = run.sample

    def crash(*_, **__):
        raise InputError("stop", "here", "what this test does")

    with monkeypatch.context() as patch:  # stopped after its trace was written, before its checkpoint was removed
        patch.setattr(run.shutil, "rmtree", crash)
        assert call("run", "--resume", folder, "--more", "7")[0] == 2
    assert samples_in(folder)[0].shape[1] == 12
    assert (folder / ".checkpoint").exists()
    code, out, err = call("run", "--resume", folder, "--json")
    assert code == 0, err
    assert strict(out)["w2_sq"] is not None
    for ours, theirs in zip(samples_in(folder), samples_in(tmp_path / "long"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert run.sample is whole


def test_a_saved_plan_is_run_as_it_stands(call, file, tmp_path):
    _, out, _ = call("plan", file, "--json")
    (tmp_path / "plan.json").write_text(out)
    assert call("run", "--plan", tmp_path / "plan.json", "--out", tmp_path / "saved")[0] == 0
    assert call("run", file, "--out", tmp_path / "direct")[0] == 0
    for ours, theirs in zip(samples_in(tmp_path / "saved"), samples_in(tmp_path / "direct"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    again = json.loads((tmp_path / "saved" / "plan.json").read_text())
    assert again["constants"]["friction"] == strict(out)["constants"]["friction"]
    summary = json.loads((tmp_path / "saved" / "summary.json").read_text())
    assert not [text for text in summary["warnings"] if "bound" in text]


def test_softmax_chains_move_too():
    """Any model: only the law is Gaussian's."""
    posterior = wflmc.softmax_regression(jax.random.key(0), 4, examples=60, dim=2)
    plan = make(posterior, "equal", privacy=wflmc.Privacy(clip=50.0), initial_w2_sq=1.0, samples=3)
    trace = wflmc.sample(jax.random.key(1), posterior, plan, 5)
    assert jnp.all(jnp.isfinite(trace.theta))
    assert wflmc.evaluate(trace, posterior).bound is None
