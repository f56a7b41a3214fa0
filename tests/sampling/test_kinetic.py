"""Kinetic dynamics: the exact law, the Langevin cap, and the rounds that are saved."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy import linalg

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.apps import audit
from wflmc.dynamics import kinetic
from wflmc.posterior import Gaussian, w2_squared

from ..conftest import FULL, count
from .kinetic_tools import (
    CHAINS,
    five_parts,
    ill_conditioned,
    kinetic_plan,
    law_by_parts,
    law_of,
)
from .test_sampling import LIMIT, unclipped, z_scores

CASES = {
    "far below the cap": {"factor": 0.1},
    "below the cap": {"factor": 0.5},
    "at the cap": {"factor": 1.0},
    "above the cap": {"factor": 4.0},
    "from zero, large step": {"factor": 1.0, "init": "zero", "step": 1.8},
    "few send, channels known badly": {
        "power": "equal",
        "csi_error": 0.2,
        "loss": np.geomspace(1e-3, 1e-9, 30),
    },
    "strong friction": {"factor": 2.0, "friction": 30.0},
    "hardly any friction": {"factor": 0.7, "friction": 0.1},
}
QUICK_CASES = (
    "above the cap",
    "from zero, large step",
    "few send, channels known badly",
)


@pytest.mark.parametrize("name", CASES if FULL else QUICK_CASES)
def test_chains_follow_the_exact_law(posterior, name):
    case = CASES[name]
    plan = kinetic_plan(posterior, **case)
    if "loss" in case:
        assert 0 < plan.active_devices.min() < posterior.devices
    law = law_of(posterior, plan)
    for s, (mean, covariance) in enumerate(law_by_parts(plan, posterior)):
        np.testing.assert_allclose(law.mean[s], mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(law.covariance[s], covariance, rtol=1e-9, atol=1e-12)
    trace = wflmc.sample(
        jax.random.key(3), posterior, unclipped(plan), CHAINS, keep_burn_in=True
    )
    theta = np.concatenate([trace.warmup, trace.theta], axis=1)
    scores = np.array(
        [z_scores(theta[:, s], law.mean[s], law.covariance[s]) for s in (0, 1, 4, 11)]
    )
    assert np.all(np.abs(scores[:, 0]) < LIMIT), scores
    assert np.all(scores[:, 1] < LIMIT), scores


def test_one_percent_too_much_noise_is_noticed(posterior):
    plan = kinetic_plan(posterior, factor=1.0, init="zero")
    trace = wflmc.sample(
        jax.random.key(3),
        posterior,
        unclipped(plan.with_rounds(gain=plan.gain / 1.01)),
        CHAINS,
    )
    law = law_of(posterior, plan)
    assert z_scores(trace.theta[:, 0], law.mean[-1], law.covariance[-1])[0] > LIMIT


@pytest.mark.parametrize("step", [0.05, 0.5, 1.0, 1.5, 1.9])
@pytest.mark.parametrize("friction", [0.5, 2.0, 50.0])
def test_samples_have_the_right_variance_whatever_the_step(step, friction):
    """At the end of a round, that is; where gradients are asked for, 1/λ has become 1/(λ (1 − h²λ/4))."""
    posterior = ill_conditioned()
    h = step / posterior.L**0.5
    gamma = friction * posterior.mu**0.5
    total = posterior.hessian.sum(0), posterior.linear.sum(0)
    matrix, offset, enters = kinetic(gamma).linear_round(np.array(h), *total)
    covariance = linalg.solve_discrete_lyapunov(
        matrix, -np.expm1(-2 * gamma * h) * enters @ enters.T
    )
    np.testing.assert_allclose(
        covariance[:5, :5], posterior.covariance, rtol=1e-6, atol=1e-9
    )
    np.testing.assert_allclose(
        np.linalg.solve(np.eye(10) - matrix, offset)[:5], posterior.mean, rtol=1e-6
    )


def test_where_gradients_are_asked_for_the_variance_is_too_large(six_devices):
    plan = kinetic_plan(six_devices, factor=1.0, step=1.5, burn_in=400)
    h, m = plan.step_size[0], six_devices.dim
    covariance = np.eye(2 * m)
    for s in range(len(plan.rounds)):
        matrix, _, enters = five_parts(plan, six_devices, s)
        covariance = (
            matrix @ covariance @ matrix.T + plan.langevin_noise[s] * enters @ enters.T
        )
    ahead = np.concatenate([np.eye(m), h / 2 * np.eye(m)], axis=1)
    curvature = np.linalg.eigvalsh(six_devices.hessian.sum(0))
    expected = 1 / (curvature * (1 - h**2 * curvature / 4))
    np.testing.assert_allclose(
        np.linalg.eigvalsh(ahead @ covariance @ ahead.T), np.sort(expected), rtol=1e-9
    )
    np.testing.assert_allclose(
        covariance[:m, :m], six_devices.covariance, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("friction", [0.1, 2.0, 30.0])
def test_at_the_cap_the_channel_is_all_the_noise_that_sampling_needs(
    six_devices, friction
):
    """a = (K/K_a)² h²/(4 tanh(γ_f h/2)), and with less power there is too much noise."""
    plan = kinetic_plan(six_devices, factor=1.0, friction=friction)
    h = plan.step_size[0]
    decay = np.exp(-plan.dynamics.friction * plan.step_size[0])
    a = h**2 / (4 * np.tanh(plan.dynamics.friction * h / 2))
    np.testing.assert_allclose(plan.gain**2 / plan.noise_power, a, rtol=1e-12)
    assert not plan.server_noise.any()
    assert np.all(plan.limit == 0)  # lmc-limited
    np.testing.assert_allclose(plan.noise_variance, 1 - decay**2, rtol=1e-12)
    for factor, excess in ((1.0, 0.0), (0.8, 0.25), (4.0, 0.0)):
        scaled = kinetic_plan(six_devices, factor=factor, friction=friction)
        np.testing.assert_allclose(
            scaled.excess_noise, excess * (1 - decay**2), rtol=1e-9, atol=1e-12
        )
    silent = kinetic_plan(
        six_devices, "no-dp", friction=friction, loss=[1e9] * 3 + [1e-15] * 3
    )
    assert np.all(silent.active_devices == 3)
    np.testing.assert_allclose(silent.gain**2 / silent.noise_power, 4 * a, rtol=1e-12)


def test_at_the_cap_simulated_chains_have_the_posterior_without_any_other_noise(
    six_devices,
):
    for factor, exact in ((1.0, True), (0.8, False)):
        plan = kinetic_plan(six_devices, factor=factor, burn_in=40)
        assert not plan.server_noise.any()
        theta = wflmc.sample(
            jax.random.key(5), six_devices, unclipped(plan), CHAINS
        ).theta[:, 0]
        score = z_scores(theta, six_devices.mean, six_devices.covariance)[0]
        assert abs(score) < LIMIT if exact else score > 10


def test_above_the_cap_the_server_adds_the_rest(posterior):
    plan = kinetic_plan(posterior, factor=4.0)
    np.testing.assert_allclose(plan.server_noise, 0.75 * plan.langevin_noise, rtol=1e-9)
    np.testing.assert_allclose(plan.noise_variance, plan.langevin_noise, rtol=1e-12)
    loud = audit.above_cap(kinetic_plan(posterior, "equal"), 3.0)
    np.testing.assert_allclose(loud.noise_variance, loud.langevin_noise, rtol=1e-12)
    np.testing.assert_allclose(
        loud.server_noise, (1 - 1 / 9) * loud.langevin_noise, rtol=1e-9
    )


def rounds_to(distances, target):
    reached = np.flatnonzero(distances <= target)
    return int(reached[0]) + 1 if reached.size else len(distances) + 10**6


@pytest.mark.skipif(
    not FULL,
    reason="grids of laws of 6,000 rounds, ten seconds: make test-full runs them",
)
def test_far_fewer_rounds_than_overdamped_at_condition_number_1000():
    """The best of a grid for both. The privacy that they take at their caps is about the same."""
    posterior = ill_conditioned()
    target = 1e-2
    rounds = 6000
    everyone = np.ones((6000, 5))
    stride = count(10, 1)
    slow = {}
    for step in np.geomspace(0.1, 1.95, count(4, 12)) / posterior.L:
        law = posterior.law(np.full(rounds, step), everyone, np.full(rounds, 2 * step))
        some = Gaussian(
            law.mean[stride - 1 :: stride], law.covariance[stride - 1 :: stride]
        )
        slow[step] = stride * rounds_to(w2_squared(some, posterior.exact), target)
    fast = {}
    for step in np.linspace(0.5, 1.95, count(4, 6)) / posterior.L**0.5:
        for friction in np.geomspace(0.5, 8, 7) * posterior.mu**0.5:
            noise = np.full(400, -np.expm1(-2 * friction * step))
            law = posterior.law(
                np.full(400, step), everyone[:400], noise, dynamics=kinetic(friction)
            )
            fast[step, friction] = rounds_to(w2_squared(law, posterior.exact), target)
    eta, (h, friction) = min(slow, key=slow.get), min(fast, key=fast.get)
    assert slow[eta] > 20 * fast[h, friction]
    assert fast[h, friction] < 100
    # Privacy losses divided by ℓ².
    losses = (
        slow[eta] * eta,
        fast[h, friction] * h**2 / (2 * np.tanh(friction * h / 2)),
    )
    assert 0.5 < losses[1] / losses[0] < 1.5

    link = wflmc.Link(channel.static())
    nothing = wflmc.Privacy()
    common = {"power": "noiseless", "samples": 1}
    both = [
        wflmc.plan(
            posterior,
            link,
            nothing,
            **grouped(step_size=eta, burn_in=slow[eta] - 1, **common),
        ),
        wflmc.plan(
            posterior,
            link,
            nothing,
            **grouped(
                step_size=h,
                friction=friction,
                dynamics="kinetic",
                burn_in=fast[h, friction] - 1,
                **common,
            ),
        ),
    ]
    for plan in both:
        assert wflmc.exact_w2_sq(posterior, plan)[-1] <= target
        law = law_of(posterior, plan)
        theta = wflmc.sample(jax.random.key(3), posterior, plan, CHAINS // 5).theta[
            :, 0
        ]
        scores = z_scores(theta, law.mean[-1], law.covariance[-1])
        assert abs(scores[0]) < LIMIT, scores
        assert scores[1] < LIMIT, scores


def test_the_response_is_the_law(small):
    plan = kinetic_plan(small, "equal", step=1.2, burn_in=5, samples=7, csi_error=0.1)
    law = law_of(small, plan)
    response = small.response(plan.motion, plan.burn_in)
    assert response.effect.shape == (7, 12, 3, 3)
    noise = np.einsum("s,ksij->kij", plan.noise_variance, response.effect)
    np.testing.assert_allclose(
        response.covariance + noise, law.covariance[5:], rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(
        response.shift, ((law.mean[5:] - small.mean) ** 2).sum(1), rtol=1e-9, atol=1e-15
    )
    np.testing.assert_array_equal(response.target, small.covariance)
    for sample_index in range(7):
        assert not response.effect[sample_index, 6 + sample_index :].any()
    np.testing.assert_allclose(
        response.effect[0, 5], (plan.step_size[5] / 2) ** 2 * np.eye(3)
    )


def test_power_optimal_for_the_exact_law(small):
    """Better than equal parts, within budgets, and proven."""
    settings = {"step": 1.2, "burn_in": 12, "samples": 9}
    best, equal = (
        kinetic_plan(small, power, objective="exact", **settings)
        for power in ("optimized", "equal")
    )
    exact = [wflmc.exact_w2_sq(small, plan)[12:].max() for plan in (best, equal)]
    assert best.objective == pytest.approx(exact[0], rel=1e-9)
    assert exact[0] < exact[1]
    assert best.gap < 1e-6
    assert np.all(best.spent <= best.privacy.budget(best.devices))
    assert np.all(best.power_share <= 1 + 1e-12)
    assert best.bound is None


def test_effective_sample_size_of_kinetic_chains(small):
    plan = kinetic_plan(small, factor=1.0, step=1.2, burn_in=12, samples=9)
    expected = wflmc.evaluation.exact_ess(small, plan)
    theta = wflmc.sample(jax.random.key(8), small, plan, CHAINS).theta.mean(1)
    variance_ratio = np.diagonal(small.covariance) / theta.var(0, ddof=1)
    assert np.abs(variance_ratio / expected - 1).max() < LIMIT * np.sqrt(2 / CHAINS)


def test_the_rate_is_that_of_the_slowest_mode():
    posterior = ill_conditioned()
    for step, friction in ((0.3, 0.5), (1.0, 2.0), (1.9, 2.0), (1.99, 300.0)):
        plan = kinetic_plan(posterior, factor=1.0, step=step, friction=friction)
        matrix, _, _ = five_parts(plan, posterior, 0)
        assert plan.gamma == pytest.approx(
            np.abs(np.linalg.eigvals(matrix)).max(), rel=1e-9
        )
