"""Inverse questions, pictures of plans, the reference solver and the noise limit on the command line."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

import wflmc
from wflmc.apps.diagnosis.inverse import InverseQuestion, solve_for
from wflmc.runs.planning import make_plan
from wflmc.scenario import build, load_scenario

from ..cli_tools import FADING, is_picture, strict, with_set, write_gains
from ..conftest import count
from ..error_tools import codes_of, missing_facts, names_key, text_of


def test_resolved_scenario_is_toml(call, scenario, tmp_path):
    call("run", scenario, "--out", tmp_path / "run")
    content = tomllib.loads((tmp_path / "run" / "scenario.toml").read_text())
    assert content["posterior"]["devices"] == 30
    assert content["link"]["downlink_snr_db"] == np.inf


def test_plot(call, scenario, tmp_path):
    for power in ("optimized", "noiseless"):
        for suffix in ("png", "svg"):
            path = tmp_path / f"{power}.{suffix}"
            assert (
                call(
                    "plan", scenario, "--plot", path, "--set", f"policy.power={power}"
                )[0]
                == 0
            )
            assert is_picture(path)
    for bad in ("plan.txt", "none/plan.png"):
        code, _, err = call("plan", scenario, "--plot", tmp_path / bad)
        assert code == 2
        assert names_key(err, "--plot", tmp_path / bad)


@pytest.mark.parametrize("metric", ["bound", "exact"])
@pytest.mark.parametrize("key", ["link.snr_db", "privacy.epsilon", "sampler.burn_in"])
def test_solve_for(plan_of, scenario, key, metric):
    """The answer reaches the target; a little less of the key does not."""
    target = {"bound": 0.4, "exact": 0.002}[metric]
    arguments = [*with_set(FADING), "--metric", metric]
    document = plan_of(scenario, *arguments, "--solve-for", key, "--target", target)
    answer = document["solve_for"]
    assert answer["reachable"]
    burn_in = document["constants"]["burn_in"]
    reached = (
        document["objective"]
        if metric == "bound"
        else max(document["exact_w2_sq"][burn_in:])
    )
    assert reached == pytest.approx(answer["reached"])
    assert reached <= target
    less = (
        answer["value"] - 1
        if key == "sampler.burn_in"
        else answer["value"] * (1 - 1e-4)
    )
    before = plan_of(scenario, *with_set([*FADING, f"{key}={less}"]))
    burn_in = before["constants"]["burn_in"]
    assert (
        before["objective"]
        if metric == "bound"
        else max(before["exact_w2_sq"][burn_in:])
    ) > target


def test_solve_for_what_cannot_be_reached(call, scenario):
    """Exit code 1, as the answer is no; the plan is that which comes nearest."""
    arguments = [
        "plan",
        scenario,
        "--no-compare",
        "--solve-for",
        "link.snr_db",
        "--target",
        "1e-6",
    ]
    code, out, err = call(*arguments, "--json")
    document = strict(out)
    answer = document["solve_for"]["answer"]
    assert (code, err.count(answer)) == (1, 1)
    assert not missing_facts(answer, ("link.snr_db", "bound", "1e-06"))
    assert document["solve_for"]["value"] is None
    assert not document["solve_for"]["reachable"]
    assert document["solve_for"]["reached"] == document["objective"] > 1e-6
    code, out, err = call(*arguments)
    assert (code, err) == (1, "")
    assert answer in out
    for arguments, key in [
        (["--solve-for", "link.power", "--target", "1"], "--solve-for"),
        (["--solve-for", "link.snr_db"], "--target"),
        (["--target", "1"], "--target"),
        (["--metric", "exact"], "--metric"),
        (
            [
                "--solve-for",
                "link.snr_db",
                "--target",
                "1",
                "--set",
                "policy.power=noiseless",
            ],
            "--solve-for",
        ),
        (
            [
                "--solve-for",
                "privacy.epsilon",
                "--target",
                "1",
                "--set",
                "policy.power=no-dp",
            ],
            "--solve-for",
        ),
        (["--solve-for", "link.snr_db", "--target", "-1"], "--target"),
        (
            ["--solve-for", "link.snr_db", "--target", "1", "--metric", "true"],
            "--metric",
        ),
    ]:
        code, _, err = call("plan", scenario, *arguments)
        assert code == 2
        assert names_key(err, key)


COLD = ["sampler.burn_in_temperature=0.05"]
NARROW_START = [
    "posterior.examples=10",
    "posterior.prior_std=0.2",
    "posterior.dim=20",
    "posterior.devices=5",
    "sampler.init=zero",
    "sampler.burn_in=5",
]
"""A chain that has not yet reached the width of its posterior."""


def metric_at(path, overrides, metric):
    """The worst bound or exact W2² of a scenario's kept rounds."""
    scenario = load_scenario(path, overrides)
    inputs = build(scenario)
    plan = make_plan(scenario, inputs)
    rounds = (
        plan.bound
        if metric == "bound"
        else wflmc.evaluation.exact_w2_sq(inputs.posterior, plan)
    )
    return max(rounds[plan.burn_in :])


@pytest.mark.parametrize(
    ("key", "metric", "target", "values", "overrides"),
    [
        ("link.snr_db", "exact", 3e-4, (20, 22, 60), [*COLD, "policy.power=no-dp"]),
        ("link.snr_db", "bound", 0.06, (20, 22, 60), [*COLD, "policy.power=no-dp"]),
        (
            "privacy.epsilon",
            "exact",
            3e-4,
            (12, 18, 1000),
            [*COLD, "policy.power=equal", "link.snr_db=60"],
        ),
        # Narrower than the steps of the search.
        ("link.snr_db", "exact", 2e-7, (22, 22.6, 60), [*COLD, "policy.power=no-dp"]),
        # The exact law may be hurt by more power at temperature 1 too.
        (
            "privacy.epsilon",
            "exact",
            0.09,
            (25, 32, 60),
            [*NARROW_START, "policy.power=equal", "link.snr_db=40"],
        ),
    ],
)
def test_solve_for_where_more_is_worse(
    plan_of, scenario, key, metric, target, values, overrides
):
    """The value before a dip misses the target, as that behind it does; the dip's edge is found."""

    def measure(value):
        return metric_at(scenario, [*overrides, f"{key}={value}"], metric)

    before, inside, behind = values
    assert measure(before) > target
    assert measure(inside) <= target
    assert measure(behind) > target
    question = ("--metric", metric, "--solve-for", key, "--target", target)
    answer = plan_of(scenario, *with_set(overrides), *question)["solve_for"]
    assert answer["reachable"]
    assert before < answer["value"] <= inside
    assert measure(answer["value"]) == pytest.approx(answer["reached"])
    assert answer["reached"] <= target
    assert measure(answer["value"] * (1 - 1e-5)) > target


def test_solve_for_comes_near_the_bottom_of_a_dip(call, scenario):
    overrides = [*COLD, "policy.power=no-dp"]
    question = ("--metric", "exact", "--solve-for", "link.snr_db", "--target", "1e-9")
    arguments = (*with_set(overrides), *question, "--json")
    code, out, _ = call("plan", scenario, *arguments)
    answer = strict(out)["solve_for"]
    assert (code, answer["reachable"], answer["value"]) == (1, False, None)
    assert answer["best_at"] == pytest.approx(22.6, abs=0.1)
    assert answer["reached"] == pytest.approx(1e-7, rel=0.1)


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_solve_for_makes_few_plans_where_more_is_never_worse(scenario, temperature):
    """Plans that minimize the bound are bisected; two show that none reaches the target."""
    overrides = [*FADING, f"sampler.burn_in_temperature={temperature}"]
    for target, limit in ((0.4, 30), (1e-6, 2)):
        counts = []
        question = InverseQuestion("link.snr_db", target, "bound", "own")
        solve_for(load_scenario(scenario, overrides), question, counts.append)
        assert max(counts) <= limit


@pytest.mark.parametrize(
    ("key", "target"),
    [("link.snr_db", 0.45), ("privacy.epsilon", 0.45), ("sampler.burn_in", 0.45)],
)
def test_solve_for_under_a_noise_limit(plan_of, scenario, key, target):
    """Values that the limit rules out do not meet the target, and do not end the search either."""
    guard = [*FADING, "policy.max_round_noise=1.0"]
    document = plan_of(
        scenario, *with_set(guard), "--solve-for", key, "--target", target
    )
    assert document["solve_for"]["reachable"]
    assert document["objective"] <= target


def test_solve_for_the_average(plan_of, scenario):
    """With the average objective the exact metric is the average too."""
    arguments = [*with_set([*FADING, "policy.objective=average"]), "--metric", "exact"]
    document = plan_of(
        scenario, *arguments, "--solve-for", "link.snr_db", "--target", "0.002"
    )
    distances = document["exact_w2_sq"][document["constants"]["burn_in"] :]
    assert np.mean(distances) == pytest.approx(document["solve_for"]["reached"])
    assert np.mean(distances) == pytest.approx(0.002, rel=1e-3)
    assert max(distances) > 0.002


def test_the_picture_shows_the_plan(posterior):
    """What is drawn is what was planned: noise above and below 2η, and the loss as it adds up."""
    from wflmc.apps.report.run_figures import plan_figure

    link = wflmc.Link(wflmc.channel.rayleigh(0.01), snr_db=20)
    plan = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(15, 0.01, 30),
        step_size=1e-4,
        burn_in=10,
        samples=10,
    )
    panels = plan_figure(plan).panels
    items = {item.name: item for panel in panels for item in panel.items}
    np.testing.assert_allclose(items["noise"].y, plan.noise_variance)
    np.testing.assert_allclose(items["noise that Langevin sampling needs"].high, 2e-4)
    most = int(np.argmax(plan.spent))
    np.testing.assert_allclose(
        items[f"device {most}, which spends most"].y,
        np.cumsum(plan.loss, axis=0)[:, most],
    )


def test_the_picture_of_cold_burn_in_shows_no_excess_below_what_is_needed(posterior):
    """A round with less noise than sampling needs has none in excess."""
    from wflmc.apps.report.run_figures import plan_figure

    plan = wflmc.plan(
        posterior,
        step_size=1e-4,
        burn_in=10,
        samples=10,
        sampler=wflmc.Sampler(burn_in_temperature=0.05),
    )
    panels = plan_figure(plan).panels
    items = {item.name: item for panel in panels for item in panel.items}
    needed = items["noise that Langevin sampling needs"]
    excess = items["excess noise"]
    np.testing.assert_allclose(items["noise"].y[:10], 0.05 * 2e-4)
    assert np.all(excess.high >= excess.low)
    np.testing.assert_allclose(excess.high - excess.low, 0.0, atol=1e-12)
    assert np.all(needed.low <= plan.noise_variance)


def objective(path, overrides):
    """That of a scenario's plan."""
    scenario = load_scenario(path, overrides)
    return make_plan(scenario, build(scenario)).objective


def test_solve_for_finds_the_best_number_of_rounds(plan_of, scenario):
    """The bound falls and rises again with burn-in; a target that only the valley's floor meets is found."""
    fixed = [*FADING, "privacy.epsilon=3.0"]
    values = {
        n: objective(scenario, [*fixed, f"sampler.burn_in={n}"]) for n in range(30)
    }
    best = min(values, key=values.get)
    assert 0 < best < 29
    document = plan_of(
        scenario,
        *with_set(fixed),
        "--solve-for",
        "sampler.burn_in",
        "--target",
        values[best] * (1 + 1e-9),
    )
    assert document["solve_for"]["value"] == best


def test_solve_for_rounds_against_brute_force(plan_of, scenario):
    fixed = [*FADING, "policy.power=equal", "link.snr_db=12"]
    values = [objective(scenario, [*fixed, f"sampler.burn_in={n}"]) for n in range(40)]
    for target in np.geomspace(min(values) * 1.0001, max(values), count(4, 12)):
        document = plan_of(
            scenario,
            *with_set(fixed),
            "--solve-for",
            "sampler.burn_in",
            "--target",
            target,
        )
        assert document["solve_for"]["value"] == next(
            n for n, value in enumerate(values) if value <= target
        )


def test_solve_for_with_a_short_table_of_gains(plan_of, scenario, tmp_path):
    write_gains(tmp_path, np.random.default_rng(0).rayleigh(0.1, (60, 30)))
    overrides = ["link.fading=file", "link.gains=h.npy"]
    document = plan_of(
        scenario,
        *with_set(overrides),
        "--solve-for",
        "sampler.burn_in",
        "--target",
        "1.0",
    )
    assert 0 < document["solve_for"]["value"] < 59


def test_solvers_agree(plan_of, call, scenario):
    own, reference = (
        plan_of(scenario, *with_set(FADING), "--solver", name)
        for name in ("own", "cvxpy")
    )
    assert own["objective"] == pytest.approx(reference["objective"], rel=1e-6)
    assert own["gap"] <= 1e-9
    assert reference["gap"] is None
    code, _, err = call("plan", scenario, "--solver", "best")
    assert code == 2
    assert names_key(err, "--solver", "best")


def test_max_round_noise(plan_of, scenario):
    """The guard holds in every round, costs something, and names a feasible limit when it has none."""
    free = plan_of(scenario, *with_set(FADING))
    guarded = plan_of(scenario, *with_set([*FADING, "policy.max_round_noise=1.0"]))
    assert guarded["objective"] > free["objective"]
    active, gain = np.array(guarded["active_devices"]), np.array(guarded["gain"])
    eta = guarded["constants"]["step_size"]
    sigma = eta * 30 / active / gain
    assert np.all(np.sqrt(5) * sigma <= 1.0 * eta * 30 * 30 * (1 + 1e-9))
    assert "chains-may-be-lost" in codes_of(free)
    assert "chains-may-be-lost" not in codes_of(guarded)
    equal = plan_of(
        scenario,
        *with_set([*FADING, "policy.max_round_noise=1.0", "policy.power=equal"]),
    )
    assert text_of(equal, "no-effect").startswith("policy.max_round_noise ")
