"""The limit on a round's noise: it holds, keeps chains home, and where it cannot, names one that can."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import wflmc
from tests.plan_tools import grouped
from wflmc import channel

from ..conftest import count
from ..error_tools import codes_of, least_number, raises_input_error


def test_guarded_plan_does_not_blow_up(posterior):
    """At η = 1/(μ+L) and 30 dB the optimum's early noise is too much for clipped gradients; with M = 1 chains stay."""
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=30)
    promise = wflmc.Privacy(15, 0.01, 30, "paper")
    keywords = {
        "step_size": 1 / (posterior.mu + posterior.L),
        "burn_in": 50,
        "samples": 50,
    }
    worst = {}
    for limit in (np.inf, 1.0):
        plan = wflmc.plan(
            posterior, link, promise, **grouped(max_round_noise=limit, **keywords)
        )
        trace = wflmc.sample(jax.random.key(0), posterior, plan, chains=100)
        worst[limit] = wflmc.evaluate(trace, posterior).w2_sq.worst
        assert plan.gap <= 1e-6
        assert ("chains-may-be-lost" in codes_of(plan)) == (limit == np.inf)
    assert worst[np.inf] > 100
    assert worst[1.0] < 0.05


def test_a_guard_that_cannot_be_kept_names_one_that_can(posterior):
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=30)
    promise = wflmc.Privacy(1, 0.01, 30)
    keywords = {
        "step_size": 1 / (posterior.mu + posterior.L),
        "burn_in": 50,
        "samples": 50,
    }
    with raises_input_error("max_round_noise", section="policy") as caught:
        wflmc.plan(posterior, link, promise, **grouped(max_round_noise=0.1, **keywords))
    feasible = least_number(caught.value)
    plan = wflmc.plan(
        posterior, link, promise, **grouped(max_round_noise=feasible, **keywords)
    )
    assert np.all(plan.spent <= promise.budget(30) * (1 + 1e-9))
    with pytest.raises(wflmc.InputError):
        wflmc.plan(
            posterior,
            link,
            promise,
            **grouped(max_round_noise=feasible * 0.999, **keywords),
        )


@pytest.mark.parametrize("objective", ["worst", "average"])
def test_guards_close_to_their_limit_are_certified(posterior, objective):
    """Just above the limit that the message names the interior is thin; plans are certified, and do not warn of it."""
    for seed in range(count(10, 100)):
        link = wflmc.Link(channel.rayleigh(0.01), snr_db=15 + seed % 3 * 10, seed=seed)
        promise = wflmc.Privacy(
            [1 + k % 7 for k in range(30)], 0.01, [10 + k for k in range(30)]
        )
        keywords = {
            "step_size": 0.5 / (posterior.mu + posterior.L),
            "burn_in": 20,
            "samples": 20,
            "objective": objective,
        }
        with raises_input_error("max_round_noise", section="policy") as caught:
            wflmc.plan(
                posterior, link, promise, **grouped(max_round_noise=1e-3, **keywords)
            )
        limit = least_number(caught.value)
        plan = wflmc.plan(
            posterior, link, promise, **grouped(max_round_noise=limit, **keywords)
        )
        assert plan.gap <= 1e-6
        assert "chains-may-be-lost" not in codes_of(plan)
        reach = plan.step_size * sum(10 + k for k in range(30))
        assert np.all(np.sqrt(5 * plan.noise_variance) <= limit * reach * (1 + 1e-9))
        assert np.all(plan.spent <= promise.budget(30) * (1 + 1e-9))


def test_the_guard_holds_on_static_channels_too(posterior):
    """Theorem 1 knows no floor, so with one the general solver takes over."""
    keywords = {
        "step_size": 1 / (posterior.mu + posterior.L),
        "burn_in": 50,
        "samples": 1,
        "schedule": "all",
    }
    link = wflmc.Link(channel.static(1e-4), snr_db=30)
    promise = wflmc.Privacy(15, 0.01, 30)
    free, guarded = (
        wflmc.plan(posterior, link, promise, **grouped(max_round_noise=m, **keywords))
        for m in (np.inf, 0.5)
    )
    reach = guarded.step_size * 30 * 30
    assert np.any(np.sqrt(5 * free.noise_variance) > 0.5 * reach)
    assert np.all(np.sqrt(5 * guarded.noise_variance) <= 0.5 * reach * (1 + 1e-9))
    assert free.objective < guarded.objective
    assert guarded.gap <= 1e-6


def test_a_guard_that_power_rules_out(posterior):
    """At −20 dB power alone makes rounds noisier than that; the message names a feasible limit."""
    keywords = {"step_size": 1e-4, "burn_in": 5, "samples": 5, "schedule": "all"}
    link = wflmc.Link(channel.static(1e-4), snr_db=-20)
    with raises_input_error("max_round_noise", section="policy") as caught:
        wflmc.plan(
            posterior, link, wflmc.Privacy(), **grouped(max_round_noise=1.0, **keywords)
        )
    feasible = least_number(caught.value)
    assert feasible > 1
    assert (
        wflmc.plan(
            posterior,
            link,
            wflmc.Privacy(),
            **grouped(max_round_noise=feasible, **keywords),
        ).gap
        <= 1e-15
    )
