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
    made = planned(small, power=power, privacy=privacy, burn_in=9, samples=8)
    assert made.objective == pytest.approx(worst(small, made), rel=1e-9)
    assert made.certificate.objective_name == "exact"
    if power in ("optimized", "noiseless-dp"):
        assert made.gap <= 1e-6
        assert not made.server_noise.any()
        assert np.all(made.power_share <= 1 + 1e-12)
        assert np.all(made.spent <= privacy.budget(5))
    else:
        assert made.lower_bound is None
        bound = planned(
            small, power=power, privacy=privacy, burn_in=9, samples=8, objective="worst"
        )
        assert np.array_equal(bound.gain, made.gain)
        assert np.array_equal(bound.server_noise, made.server_noise)
    looked = power in ("optimized", "noiseless-dp")
    assert any("oracle" in text for text in made.warnings) == (
        looked and privacy.epsilon is not None
    )


def figure_6(posterior):
    """The exact law's worst distance at 30 dB, planned for itself and for the bound: means over five channels."""
    made = [planned(posterior, replace(LINK, seed=seed)) for seed in range(5)]
    assert max(plan.gap for plan in made) < 1e-8
    bound = [
        planned(posterior, replace(LINK, seed=seed), objective="worst")
        for seed in range(5)
    ]
    return [
        np.mean([worst(posterior, plan) for plan in plans]) for plans in (made, bound)
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
    made = [planned(posterior, replace(LINK, seed=seed)) for seed in range(3)]
    for plan in made:
        assert ideal.lower_bound < plan.objective < 1.1 * ideal.objective


def test_devices_have_no_order(few):
    gains = np.abs(np.asarray(LINK.gains(30, 6)))
    order = np.random.default_rng(0).permutation(6)
    privacy = wflmc.Privacy([3, 4, 5, 6, 7, 8], 0.01, 30)
    turned = wflmc.Privacy(np.arange(3, 9)[order].tolist(), 0.01, 30)
    mixed = replace(few, **{
        name: getattr(few, name)[order] for name in ("hessian", "linear", "sizes", "features", "target")
    })  # fmt: skip
    one = planned(few, wflmc.Link(channel.from_array(gains), 25), privacy, 18, 12)
    two = planned(
        mixed, wflmc.Link(channel.from_array(gains[:, order]), 25), turned, 18, 12
    )
    assert one.objective == pytest.approx(two.objective, rel=1e-7)
    assert one.gain == pytest.approx(two.gain, rel=1e-3)
    assert one.active_devices.min() < 6


def test_more_never_hurts(few):
    link = wflmc.Link(channel.static(1e-4), snr_db=25)
    values = [
        planned(few, link, wflmc.Privacy(e, 0.01, 30), 18, 12).objective
        for e in (2, 4, 8, 16, 32)
    ]
    assert all(
        later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(values)
    )
    values = [
        planned(few, replace(link, snr_db=x), burn_in=18, samples=12).objective
        for x in (10, 20, 30, 60)
    ]
    assert all(
        later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(values)
    )


@pytest.mark.parametrize("samples", [1, 6])
def test_static_channels_and_single_samples(few, samples):
    made = planned(
        few,
        wflmc.Link(channel.static(1e-4), snr_db=35),
        wflmc.Privacy(8, 0.01, 30),
        24,
        samples,
    )
    assert made.regime is None
    assert made.gap <= 1e-6
    bound = planned(
        few,
        wflmc.Link(channel.static(1e-4), snr_db=35),
        wflmc.Privacy(8, 0.01, 30),
        24,
        samples,
        objective="worst",
    )
    assert worst(few, made) < worst(few, bound)
    assert made.objective == pytest.approx(worst(few, made), rel=1e-9)


def test_ledger_and_budgets_of_each(few):
    privacy = wflmc.Privacy([3, 4, 5, 6, 7, 80], 0.01, 30)
    budget = privacy.budget(6)
    ledger = 0.5 * budget * np.array([0, 1, 0, 1, 0, 1])
    free, made = planned(few, privacy=privacy, burn_in=18, samples=12), None
    made = planned(few, privacy=privacy, burn_in=18, samples=12, ledger=ledger)
    assert np.all(made.spent + ledger <= budget)
    assert np.all(free.spent <= budget)
    assert np.max((made.spent + ledger) / budget) > 1 - 1e-6
    assert made.objective > free.objective
    assert made.gap <= 1e-6


def test_noise_limit_is_kept(posterior):
    free, made = planned(posterior), planned(posterior, max_round_noise=1.0)
    reach = made.step_size * made.clip.sum()
    assert np.all(np.sqrt(5 * made.noise_variance) <= reach * (1 + 1e-9))
    assert np.any(np.sqrt(5 * free.noise_variance) > reach)
    assert free.objective < made.objective < 2 * free.objective
    with raises_input_error("max_round_noise", section="policy"):
        planned(posterior, max_round_noise=0.01)


def test_without_privacy_noise_stays_near_langevins(posterior):
    """Wild early noise could do as well by the law, and would lose chains that clip."""
    made = planned(posterior, privacy=wflmc.Privacy(clip=30))
    assert np.all(made.noise_variance <= 4 * made.step_size * (1 + 1e-9))
    assert made.objective < 0.1 * worst(
        posterior, planned(posterior, power="noiseless")
    )
    assert not made.warnings


def test_one_parameter_reaches_the_posterior_to_rounding():
    alone = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30, dim=1)
    link = wflmc.Link(channel.static(0.01), snr_db=30)
    made = planned(alone, link, wflmc.Privacy(clip=30), 120, 3)
    assert made.objective < 1e-12
    assert made.gap <= 1e-6


def test_silent_devices_cost_what_the_law_says(small):
    """Unlike devices and deep fades: thresholds silence some, and the law sees the shifted mean."""
    made = planned(
        small,
        wflmc.Link(channel.rayleigh(0.01), snr_db=15),
        burn_in=12,
        samples=10,
        factor=0.2,
    )
    assert made.active_devices.min() < 5
    assert made.objective == pytest.approx(worst(small, made), rel=1e-9)
    assert made.gap <= 1e-6


def test_a_proxy_stands_in_for_the_data(posterior):
    proxy = Proxy(precision=1201.0, mean_sq=2.0)
    made, oracle = planned(posterior, proxy=proxy), planned(posterior)
    assert not any("oracle" in text for text in made.warnings)
    assert (
        worst(posterior, oracle)
        < worst(posterior, made)
        < 1.25 * worst(posterior, oracle)
    )
    assert worst(posterior, made) < 0.5 * worst(
        posterior, planned(posterior, objective="worst")
    )
    assert made.gap <= 1e-6
    each = Proxy(precision=np.full(5, 1201.0), mean_sq=np.full(5, 0.4))
    assert planned(posterior, proxy=each).objective == pytest.approx(
        made.objective, rel=1e-9
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


def test_proxy_of_the_truth_is_the_truth(few):
    """With everyone sending, what devices hold on their own does not matter."""
    values, vectors = np.linalg.eigh(np.linalg.inv(few.covariance))
    proxy = Proxy(precision=values, mean_sq=(vectors.T @ few.mean) ** 2)
    link = wflmc.Link(channel.static(1e-4), snr_db=35)
    made, known = (
        planned(few, link, burn_in=9, samples=6, proxy=proxy),
        planned(few, link, burn_in=9, samples=6),
    )
    assert made.objective == pytest.approx(known.objective, rel=1e-7)


def test_softmax_plans_by_its_laplace_approximation():
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 4, examples=200, dim=3, classes=3
    )
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=25)
    made = planned(posterior, link, wflmc.Privacy(20, 0.01, 30), 20, 10, 1.0)
    assert made.gap <= 1e-6
    response = posterior.response(made.motion, 20)
    assert made.objective == pytest.approx(
        distances(response)(made.noise_variance).max(), rel=1e-12
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
    assert made.objective < distances(response)(bound.noise_variance).max()


def test_going_on_from_a_plan(few):
    """Planning the rest after a plan sees the law that the plan has left, not the start again."""
    first = planned(few, burn_in=10, samples=5)
    rest = planned(
        few, burn_in=0, samples=6, start=15, ledger=0.5 * first.spent, before=first
    )
    both = few.law(
        np.append(first.step_size, rest.step_size),
        np.concatenate([first.weight, rest.weight]),
        np.append(first.noise_variance, rest.noise_variance),
    )
    assert rest.objective == pytest.approx(
        w2_squared(both, few.exact)[15:].max(), rel=1e-9
    )
    whole = few.response(
        Motion(
            np.append(first.step_size, rest.step_size),
            np.concatenate([first.weight, rest.weight]),
        ),
        15,
    )
    later = continued(whole, first.noise_variance)
    assert distances(later)(rest.noise_variance) == pytest.approx(
        w2_squared(both, few.exact)[15:], rel=1e-8
    )


def test_plans_by_the_hundred_are_the_same(few):
    links = [replace(LINK, seed=seed) for seed in range(3)]
    step = 0.4 / (few.mu + few.L)
    many = plan_many(
        few,
        links,
        PRIVACY,
        step_size=step,
        burn_in=9,
        samples=6,
        policy=wflmc.Policy(objective="exact"),
    )
    for link, made in zip(links, many, strict=True):
        assert np.array_equal(made.gain, planned(few, link, burn_in=9, samples=6).gain)


def test_what_it_cannot_do_it_says(few, small):
    with raises_input_error("solver", "own", "exact"):
        planned(few, solver="cvxpy")

    class Unknown(Planned):
        sizes = few.sizes
        mu, L, dim, devices = few.mu, few.L, few.dim, few.devices
        initial_w2_sq = few.initial_w2_sq

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
        X=size * few.features.reshape(-1, 5)[:40],
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
    made = tmp_path / "again"
    code, _, err = call("run", "--plan", folder / "plan.json", "--out", made)
    assert code == 0, err
    again = plan_file(made)
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
