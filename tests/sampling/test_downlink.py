"""A noisy broadcast: what devices hear of θ, what that does to the chain, and that it does nothing to privacy."""

from __future__ import annotations

import json
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.apps import audit
from wflmc.planning.build import TrialPlan, complete_request
from wflmc.posterior import w2_squared
from wflmc.sampling.kernel import broadcast, kernel_rounds

from ..conftest import FULL
from ..error_tools import names_key, raises_input_error
from ..plan_tools import with_context
from .compile_tools import clipped_sum

CHAINS = 4000
LIMIT = 4.5  # standard errors


def gaussian(**keywords):
    rng = np.random.default_rng(1)
    X = rng.standard_normal((60, 3)) * [1.0, 0.5, 2.0]
    return wflmc.gaussian_regression(
        jax.random.key(0), 4, X=X, y=X.sum(1) + rng.standard_normal(60), **keywords
    )


def labelled(examples):
    return wflmc.softmax_regression(
        jax.random.key(0), 4, examples=examples, dim=2, classes=3
    )


def planned(posterior, snr_db=np.inf, **keywords):
    link = wflmc.Link(channel.static(1.0), snr_db=60, downlink_snr_db=snr_db)
    settings = {
        "step_size": 0.4 / (posterior.mu + posterior.L),
        "burn_in": 25,
        "samples": 2,
        **keywords,
    }
    return wflmc.plan(
        posterior,
        link,
        settings.pop("privacy", wflmc.Privacy(None, None, 1e4)),
        **grouped(**settings),
    )


def test_every_device_hears_noise_of_its_own():
    posterior = gaussian(prior_std=0.5)
    plan = planned(posterior, 20.0)
    assert plan.downlink_noise == pytest.approx(0.25 / 100)
    now = jax.tree.map(jnp.asarray, kernel_rounds(plan)[0])
    keys = jax.random.split(jax.random.key(1), CHAINS)
    theta = jnp.array([1.0, -2.0, 0.5])
    noise = np.asarray(jax.vmap(lambda key: broadcast(key, theta, now))(keys)) - theta
    assert noise.shape == (CHAINS, 4, 3)
    sample_covariance = np.cov(noise.reshape(CHAINS, -1).T)
    error = plan.downlink_noise * np.sqrt(2 / CHAINS)
    np.testing.assert_allclose(
        sample_covariance, plan.downlink_noise * np.eye(12), atol=LIMIT * error
    )


@pytest.mark.parametrize(
    ("model", "example_clip", "examples"),
    # Few rows on a device, and many.
    list(product(["gaussian", "softmax", "whitened"], [None, 0.7], [16, 120]))[
        :: 1 if FULL else 3
    ],
)
def test_gradients_are_taken_where_each_device_thinks_it_is(
    model, examples, example_clip
):
    posterior = gaussian() if model == "gaussian" else labelled(examples)
    posterior = posterior.whitened() if model == "whitened" else posterior
    places = jnp.asarray(
        np.random.default_rng(0).standard_normal((2, 4, posterior.dim)), jnp.float32
    )
    weight, clip = jnp.array([1.0, 0.0, 0.5, 2.0]), jnp.array([3.0, 3.0, 1e3, 1e3])
    limit = None if example_clip is None else jnp.full(4, example_clip)
    ready = posterior.on_accelerator(2, 1e9, by_example=example_clip is not None)
    total, norms = jax.jit(
        jax.vmap(
            lambda position: ready.clipped_sum(
                position, weight, clip, example_clip=limit
            )
        )
    )(places)
    devices = [posterior.device(k) for k in range(4)]
    one_limit = None if limit is None else limit[:1]
    for chain in range(2):
        alone = [
            clipped_sum(
                device,
                places[chain, k],
                weight[k, None],
                clip[k, None],
                example_clip=one_limit,
            )
            for k, device in enumerate(devices)
        ]
        np.testing.assert_allclose(
            total[chain], sum(part[0] for part in alone), rtol=2e-4, atol=2e-4
        )
        np.testing.assert_allclose(
            norms[chain], np.concatenate([part[1] for part in alone]), rtol=2e-4
        )


@pytest.mark.parametrize("dynamics", ["overdamped", "kinetic"])
def test_the_law_counts_the_noise_that_chains_hear(dynamics):
    posterior = gaussian().whitened() if dynamics == "overdamped" else gaussian()
    kinetic = {} if dynamics == "overdamped" else {
        "dynamics": "kinetic", "friction": 2 * posterior.mu**0.5, "step_size": posterior.L**-0.5
    }  # fmt: skip
    plan = planned(posterior, -3.0, power="no-dp", **kinetic)
    law = posterior.law(
        plan.step_size,
        plan.weight,
        plan.noise_variance,
        plan.init,
        dynamics=plan.dynamics,
        downlink=plan.downlink_noise,
    )
    quiet = posterior.law(
        plan.step_size,
        plan.weight,
        plan.noise_variance,
        plan.init,
        dynamics=plan.dynamics,
    )
    assert np.trace(law.covariance[-1]) > 1.2 * np.trace(quiet.covariance[-1])
    theta = wflmc.sample(jax.random.key(2), posterior, plan, CHAINS).theta[:, -1]
    spread = np.diagonal(law.covariance[-1])
    assert (
        np.abs((theta.mean(0) - law.mean[-1]) / np.sqrt(spread / CHAINS)).max() < LIMIT
    )
    assert np.abs(theta.var(0, ddof=1) / spread - 1).max() < LIMIT * np.sqrt(2 / CHAINS)
    assert wflmc.exact_w2_sq(posterior, plan)[-1] == pytest.approx(
        float(
            w2_squared(
                wflmc.posterior.Gaussian(law.mean[-1], law.covariance[-1]),
                posterior.exact,
            )
        )
    )


def test_the_bound_holds_and_grows_with_the_noise():
    posterior = gaussian()
    plans = [
        planned(posterior, snr, power="no-dp") for snr in (np.inf, 20.0, 0.0, -20.0)
    ]
    for plan in plans:
        assert np.all(wflmc.exact_w2_sq(posterior, plan) <= plan.bound)
    objectives = [plan.objective for plan in plans]
    assert objectives == sorted(objectives)
    assert objectives[-1] > 2 * objectives[0]


def test_the_error_of_softmax_gradients_is_bounded():
    posterior = labelled(40)
    weight = np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 0.0, 2.0, 0.0]])
    bound = posterior.downlink_error(weight)
    rng = np.random.default_rng(0)
    theta = np.random.default_rng(1).standard_normal(posterior.dim)
    gradients = jax.jit(posterior.gradients)
    base = np.asarray(gradients(jnp.asarray(theta)))
    moved = []
    for _ in range(50):
        places = theta + 0.3 * rng.standard_normal((4, posterior.dim))
        moved.append(
            [
                np.asarray(gradients(jnp.asarray(place)))[k]
                for k, place in enumerate(places)
            ]
        )
    error = np.einsum("sk,nkm->nsm", weight, np.array(moved) - base)
    assert np.all((error**2).sum(-1).mean(0) <= 0.09 * bound)


def test_plans_by_the_exact_law_know_of_it():
    posterior = gaussian()
    privacy = wflmc.Privacy(8, 0.01, 30)
    plan = planned(posterior, 0.0, objective="exact", privacy=privacy)
    assert plan.objective == pytest.approx(
        wflmc.exact_w2_sq(posterior, plan)[25:].max(), rel=1e-9
    )
    ignorant = planned(posterior, objective="exact", privacy=privacy)
    ignorant = with_context(ignorant, downlink_noise=plan.downlink_noise)
    assert plan.objective <= wflmc.exact_w2_sq(posterior, ignorant)[25:].max() * (
        1 + 1e-6
    )


def test_privacy_does_not_depend_on_what_devices_hear():
    posterior = gaussian()
    privacy = wflmc.Privacy(8, 0.01, 30)
    noisy, quiet = (
        planned(posterior, snr, privacy=privacy, power="equal")
        for snr in (10.0, np.inf)
    )
    np.testing.assert_array_equal(noisy.loss, quiet.loss)
    assert noisy.digest != quiet.digest
    report = audit.audit(jax.random.key(3), noisy, trials=20_000)
    assert report.consistent
    assert report.epsilon == pytest.approx(noisy.epsilon_spent)


def test_a_scenario_with_a_noisy_broadcast(tmp_path, call):
    path = tmp_path / "s.toml"
    path.write_text(
        "[posterior]\nexamples = 300\ndevices = 6\n[sampler]\nburn_in = 9\nsamples = 8\nchains = 4\n"
    )
    noisy = ("--set", "link.downlink_snr_db=10.0")
    code, out, err = call("run", path, *noisy, "--out", tmp_path / "a", "--json")
    assert code == 0, err
    quiet = json.loads(call("run", path, "--json")[1])
    assert max(json.loads(out)["exact_w2_sq"][9:]) > max(quiet["exact_w2_sq"][9:])
    assert call("run", "--plan", tmp_path / "a" / "plan.json")[0] == 0
    assert call("run", "--resume", tmp_path / "a", "--more", "3")[0] == 0
    code, _, err = call("plan", path, "--set", "link.downlink_snr_db=nan")
    assert code == 2
    assert names_key(err, "link.downlink_snr_db", "nan")
    with raises_input_error("downlink_snr_db", "nan", section="link"):
        wflmc.Link(channel.static(), downlink_snr_db=float("nan"))


def test_devices_that_arrive_more_strongly_bring_more_of_the_downlink_noise():
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=4, examples=40)
    errors = {}
    for csi_error in (0.0, 0.2):
        for snr_db in (20.0, np.inf):
            link = wflmc.Link(
                channel.static(1.0), csi_error=csi_error, downlink_snr_db=snr_db
            )
            request = complete_request(
                posterior,
                link,
                wflmc.Privacy(4, 0.01),
                step_size=0.4 / (posterior.mu + posterior.L),
                burn_in=2,
                samples=2,
            )
            errors[csi_error, snr_db] = TrialPlan(posterior, request).problem.error
    exact_knowledge = errors[0.0, 20.0] - errors[0.0, np.inf]
    rough_knowledge = errors[0.2, 20.0] - errors[0.2, np.inf]
    np.testing.assert_allclose(rough_knowledge, exact_knowledge / 0.8**2, rtol=1e-9)
