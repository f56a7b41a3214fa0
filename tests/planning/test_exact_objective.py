"""Plans for the true law of the chain, by the planner and the command line."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.dynamics import Motion, continued
from wflmc.evaluation import exact_w2_sq
from wflmc.planning import Proxy, plan_many
from wflmc.planning.exact import distances
from wflmc.posterior import w2_squared

from ..cli_tools import FADING, with_set
from ..error_tools import raises_input_error
from .scenarios import Planned

# Through the planner

LINK = wflmc.Link(channel.rayleigh(0.01), snr_db=30)
PRIVACY = wflmc.Privacy(15, 0.01, 30)


def planned(
    posterior,
    link=LINK,
    privacy=PRIVACY,
    burn_in=50,
    samples=50,
    factor=0.4,
    **keywords,
):
    step = factor / (posterior.mu + posterior.L)
    keywords = {"objective": "exact", **keywords}
    return wflmc.plan(
        posterior,
        link,
        privacy,
        **grouped(step_size=step, burn_in=burn_in, samples=samples, **keywords),
    )


def worst(posterior, plan):
    return exact_w2_sq(posterior, plan)[plan.burn_in :].max()


@pytest.mark.parametrize("power", list(wflmc.planning.POLICIES))
@pytest.mark.parametrize(
    "privacy", [PRIVACY, wflmc.Privacy(clip=30)], ids=["private", "open"]
)
def test_objective_is_the_law(small, power, privacy):
    plan = planned(small, power=power, privacy=privacy, burn_in=9, samples=8)
    assert plan.objective == pytest.approx(worst(small, plan), rel=1e-9)
    assert plan.certificate.objective_name == "exact"
    if power in ("optimized", "noiseless-dp"):
        assert plan.gap <= 1e-6
        assert not plan.server_noise.any()
        assert np.all(plan.power_share <= 1 + 1e-12)
        assert np.all(plan.spent <= privacy.budget(5))
    else:
        assert plan.lower_bound is None
        bound = planned(
            small, power=power, privacy=privacy, burn_in=9, samples=8, objective="worst"
        )
        assert np.array_equal(bound.gain, plan.gain)
        assert np.array_equal(bound.server_noise, plan.server_noise)
    looked = power in ("optimized", "noiseless-dp")
    assert any("oracle" in text for text in plan.warnings) == (
        looked and privacy.epsilon is not None
    )


def figure_6(posterior):
    """The exact law's worst distance at 30 dB, planned for itself and for the bound: means over five channels."""
    exact = [planned(posterior, replace(LINK, seed=seed)) for seed in range(5)]
    assert max(plan.gap for plan in exact) < 1e-8
    bound = [
        planned(posterior, replace(LINK, seed=seed), objective="worst")
        for seed in range(5)
    ]
    return [
        np.mean([worst(posterior, plan) for plan in plans]) for plans in (exact, bound)
    ]


def test_figure_6_is_far_below_the_bounds_optimum(posterior):
    exact, bound = figure_6(posterior)
    assert exact < 0.5 * bound


def test_figure_6_on_the_authors_data(paper_posterior):
    exact, bound = figure_6(paper_posterior)
    assert exact < min(1.4e-4, 0.4 * bound)


def test_no_fading_and_all_power_prove_what_privacy_costs(posterior):
    """Less than noiseless-dp no schedule and no SNR can reach, and 30 dB come within 10 % of it."""
    ideal = planned(posterior, power="noiseless-dp")
    plans = [planned(posterior, replace(LINK, seed=seed)) for seed in range(3)]
    for plan in plans:
        assert ideal.lower_bound < plan.objective < 1.1 * ideal.objective


def test_devices_have_no_order(six_devices):
    gains = np.abs(np.asarray(LINK.gains(30, 6)))
    order = np.random.default_rng(0).permutation(6)
    privacy = wflmc.Privacy([3, 4, 5, 6, 7, 8], 0.01, 30)
    turned = wflmc.Privacy(np.arange(3, 9)[order].tolist(), 0.01, 30)
    mixed = replace(six_devices, **{
        name: getattr(six_devices, name)[order] for name in ("hessian", "linear", "sizes", "features", "target")
    })  # fmt: skip
    first = planned(
        six_devices, wflmc.Link(channel.from_array(gains), 25), privacy, 18, 12
    )
    second = planned(
        mixed, wflmc.Link(channel.from_array(gains[:, order]), 25), turned, 18, 12
    )
    assert first.objective == pytest.approx(second.objective, rel=1e-7)
    assert first.gain == pytest.approx(second.gain, rel=1e-3)
    assert first.active_devices.min() < 6


def test_more_never_hurts(six_devices):
    link = wflmc.Link(channel.static(1e-4), snr_db=25)
    values = [
        planned(six_devices, link, wflmc.Privacy(e, 0.01, 30), 18, 12).objective
        for e in (2, 4, 8, 16, 32)
    ]
    assert all(
        later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(values)
    )
    values = [
        planned(six_devices, replace(link, snr_db=x), burn_in=18, samples=12).objective
        for x in (10, 20, 30, 60)
    ]
    assert all(
        later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(values)
    )


@pytest.mark.parametrize("samples", [1, 6])
def test_static_channels_and_single_samples(six_devices, samples):
    plan = planned(
        six_devices,
        wflmc.Link(channel.static(1e-4), snr_db=35),
        wflmc.Privacy(8, 0.01, 30),
        24,
        samples,
    )
    assert plan.regime is None
    assert plan.gap <= 1e-6
    bound = planned(
        six_devices,
        wflmc.Link(channel.static(1e-4), snr_db=35),
        wflmc.Privacy(8, 0.01, 30),
        24,
        samples,
        objective="worst",
    )
    assert worst(six_devices, plan) < worst(six_devices, bound)
    assert plan.objective == pytest.approx(worst(six_devices, plan), rel=1e-9)


def test_ledger_and_budgets_of_each(six_devices):
    privacy = wflmc.Privacy([3, 4, 5, 6, 7, 80], 0.01, 30)
    budget = privacy.budget(6)
    ledger = 0.5 * budget * np.array([0, 1, 0, 1, 0, 1])
    free = planned(six_devices, privacy=privacy, burn_in=18, samples=12)
    plan = planned(six_devices, privacy=privacy, burn_in=18, samples=12, ledger=ledger)
    assert np.all(plan.spent + ledger <= budget)
    assert np.all(free.spent <= budget)
    assert np.max((plan.spent + ledger) / budget) > 1 - 1e-6
    assert plan.objective > free.objective
    assert plan.gap <= 1e-6


def test_noise_limit_is_kept(posterior):
    free = planned(posterior)
    limited = planned(posterior, max_round_noise=1.0)
    reach = limited.step_size * limited.clip.sum()
    assert np.all(np.sqrt(5 * limited.noise_variance) <= reach * (1 + 1e-9))
    assert np.any(np.sqrt(5 * free.noise_variance) > reach)
    assert free.objective < limited.objective < 2 * free.objective
    with raises_input_error("max_round_noise", section="policy"):
        planned(posterior, max_round_noise=0.01)


def test_without_privacy_noise_stays_near_langevins(posterior):
    """Wild early noise could do as well by the law, and would lose chains that clip."""
    plan = planned(posterior, privacy=wflmc.Privacy(clip=30))
    assert np.all(plan.noise_variance <= 4 * plan.step_size * (1 + 1e-9))
    assert plan.objective < 0.1 * worst(
        posterior, planned(posterior, power="noiseless")
    )
    assert not plan.warnings


def test_one_parameter_reaches_the_posterior_to_rounding():
    alone = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30, dim=1)
    link = wflmc.Link(channel.static(0.01), snr_db=30)
    plan = planned(alone, link, wflmc.Privacy(clip=30), 120, 3)
    assert plan.objective < 1e-12
    assert plan.gap <= 1e-6


def test_silent_devices_cost_what_the_law_says(small):
    """Unlike devices and deep fades: thresholds silence some, and the law sees the shifted mean."""
    plan = planned(
        small,
        wflmc.Link(channel.rayleigh(0.01), snr_db=15),
        burn_in=12,
        samples=10,
        factor=0.2,
    )
    assert plan.active_devices.min() < 5
    assert plan.objective == pytest.approx(worst(small, plan), rel=1e-9)
    assert plan.gap <= 1e-6


def test_a_proxy_stands_in_for_the_data(posterior):
    proxy = Proxy(precision=1201.0, mean_sq=2.0)
    plan = planned(posterior, proxy=proxy)
    oracle = planned(posterior)
    assert not any("oracle" in text for text in plan.warnings)
    assert (
        worst(posterior, oracle)
        < worst(posterior, plan)
        < 1.25 * worst(posterior, oracle)
    )
    assert worst(posterior, plan) < 0.5 * worst(
        posterior, planned(posterior, objective="worst")
    )
    assert plan.gap <= 1e-6
    per_device = Proxy(precision=np.full(5, 1201.0), mean_sq=np.full(5, 0.4))
    assert planned(posterior, proxy=per_device).objective == pytest.approx(
        plan.objective, rel=1e-9
    )
    exact = planned(
        posterior,
        wflmc.Link(channel.static(0.01), 30),
        proxy=Proxy(1201.0),
        init="zero",
        burn_in=5,
    )
    assert exact.gap <= 1e-6
    for wrong in (
        Proxy(precision=[1.0, 2.0]),
        Proxy(precision=-1.0),
        Proxy(1.0, mean_sq=np.nan),
    ):
        with pytest.raises(wflmc.InputError, match="proxy"):
            planned(posterior, proxy=wrong)


def test_proxy_of_the_truth_is_the_truth(six_devices):
    """With everyone sending, what devices hold on their own does not matter."""
    values, vectors = np.linalg.eigh(np.linalg.inv(six_devices.covariance))
    proxy = Proxy(precision=values, mean_sq=(vectors.T @ six_devices.mean) ** 2)
    link = wflmc.Link(channel.static(1e-4), snr_db=35)
    by_proxy = planned(six_devices, link, burn_in=9, samples=6, proxy=proxy)
    known = planned(six_devices, link, burn_in=9, samples=6)
    assert by_proxy.objective == pytest.approx(known.objective, rel=1e-7)


def test_softmax_plans_by_its_laplace_approximation():
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 4, examples=200, dim=3, classes=3
    )
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=25)
    plan = planned(posterior, link, wflmc.Privacy(20, 0.01, 30), 20, 10, 1.0)
    assert plan.gap <= 1e-6
    response = posterior.response(plan.motion, 20)
    assert plan.objective == pytest.approx(
        distances(response)(plan.noise_variance).max(), rel=1e-12
    )
    mode, variance = posterior.laplace
    assert response.multiplicity @ response.target == pytest.approx(
        variance.sum(), rel=1e-9
    )
    none = posterior.response(Motion(np.full(1, 1e-30), np.ones((1, 4))), 0)
    assert none.shift[0] == pytest.approx(mode @ mode, rel=1e-4)
    bound = planned(
        posterior, link, wflmc.Privacy(20, 0.01, 30), 20, 10, 1.0, objective="average"
    )
    assert plan.objective < distances(response)(bound.noise_variance).max()


def test_going_on_from_a_plan(six_devices):
    """Planning the rest after a plan sees the law that the plan has left, not the start again."""
    first = planned(six_devices, burn_in=10, samples=5)
    rest = planned(
        six_devices,
        burn_in=0,
        samples=6,
        start=15,
        ledger=0.5 * first.spent,
        before=first,
    )
    both = six_devices.law(
        np.append(first.step_size, rest.step_size),
        np.concatenate([first.weight, rest.weight]),
        np.append(first.noise_variance, rest.noise_variance),
    )
    assert rest.objective == pytest.approx(
        w2_squared(both, six_devices.exact)[15:].max(), rel=1e-9
    )
    whole = six_devices.response(
        Motion(
            np.append(first.step_size, rest.step_size),
            np.concatenate([first.weight, rest.weight]),
        ),
        15,
    )
    later = continued(whole, first.noise_variance)
    assert distances(later)(rest.noise_variance) == pytest.approx(
        w2_squared(both, six_devices.exact)[15:], rel=1e-8
    )


def test_plans_by_the_hundred_are_the_same(six_devices):
    links = [replace(LINK, seed=seed) for seed in range(3)]
    step = 0.4 / (six_devices.mu + six_devices.L)
    plans = plan_many(
        six_devices,
        links,
        PRIVACY,
        step_size=step,
        burn_in=9,
        samples=6,
        policy=wflmc.Policy(objective="exact"),
    )
    for link, plan in zip(links, plans, strict=True):
        assert np.array_equal(
            plan.gain, planned(six_devices, link, burn_in=9, samples=6).gain
        )


def test_what_it_cannot_do_it_says(six_devices, small):
    with raises_input_error("solver", "own", "exact"):
        planned(six_devices, solver="cvxpy")

    class Unknown(Planned):
        sizes = six_devices.sizes
        mu, L, dim, devices = (
            six_devices.mu,
            six_devices.L,
            six_devices.dim,
            six_devices.devices,
        )
        initial_w2_sq = six_devices.initial_w2_sq

    with raises_input_error("objective", "proxy", section="policy"):
        planned(Unknown())
    assert planned(Unknown(), proxy=Proxy(60.0)).gap <= 1e-6
    with raises_input_error("objective", "memory", section="policy"):
        planned(
            wflmc.gaussian_regression(
                jax.random.key(0), devices=2, examples=9, dim=200
            ),
            burn_in=50,
            samples=100,
        )
    size = np.repeat([1.0, 9.0], 20)[:, None]
    unlike = wflmc.gaussian_regression(
        jax.random.key(0),
        devices=2,
        X=size * six_devices.features.reshape(-1, 5)[:40],
        y=np.ones(40),
        partition="blocks",
    )
    only_one = wflmc.Link(channel.from_array(np.tile([1e-9, 1.0], (900, 1))), 10)
    with raises_input_error("objective", "diverges", section="policy"):
        planned(unlike, only_one, burn_in=800, samples=100, factor=1.9)


# Through the command line


def test_plan_run_read_back_and_more(tmp_path, call, plan_of, scenario):
    settings = with_set(
        [*FADING, "policy.objective=exact", "sampler.burn_in=15", "sampler.samples=8"]
    )
    document = plan_of(scenario, *settings)
    assert document["objective"] == pytest.approx(
        max(document["exact_w2_sq"][15:]), rel=1e-9
    )
    assert document["gap"] < 1e-6
    code, out, _ = call("plan", scenario, *settings)
    assert code == 0
    assert "W2² by the law" in out
    folder = tmp_path / "run"
    assert call("run", scenario, *settings, "--out", folder)[0] == 0
    run_again = tmp_path / "again"
    code, _, err = call("run", "--plan", folder / "plan.json", "--out", run_again)
    assert code == 0, err
    again = plan_file(run_again)
    assert again["gain"] == plan_file(folder)["gain"]
    assert again["objective"] == pytest.approx(document["objective"], rel=1e-9)
    assert again["exact_w2_sq"] == pytest.approx(document["exact_w2_sq"], rel=1e-9)
    code, _, err = call("plan", scenario, *settings, "--plot", tmp_path / "plan.png")
    assert code == 0, err
    code, _, err = call("plan", scenario, *settings, "--solver", "cvxpy")
    assert code == 2
    assert "--solver" in err


def test_more_rounds_go_on_from_the_law_of_those_before(tmp_path, call, scenario):
    settings = [
        *FADING,
        "policy.objective=exact",
        "sampler.burn_in=25",
        "sampler.samples=8",
        "privacy.epsilon=400",
    ]
    folder = tmp_path / "run"
    assert call("run", scenario, *with_set(settings), "--out", folder)[0] == 0
    before = plan_file(folder)
    code, _, err = call("run", "--resume", folder, "--more", "7")
    assert code == 0, err
    longer = plan_file(folder)
    assert longer["gain"][:33] == before["gain"]
    assert np.all(np.array(longer["privacy"]["spent"]) <= longer["privacy"]["budget"])
    # 1.36 times; 1.94 if it began at the prior.
    assert max(longer["exact_w2_sq"][33:]) < 1.6 * before["objective"]
    assert longer["objective"] == pytest.approx(
        max(longer["exact_w2_sq"][25:]), rel=1e-9
    )


def plan_file(folder):
    return json.loads((folder / "plan.json").read_text())
