"""A step size for every round: bound, solver, schedules by expression and by search."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.evaluation import estimate_w2_sq, exact_w2_sq
from wflmc.planning.schedule import threshold_schedule
from wflmc.planning.solvers.allocation import allocate
from wflmc.planning.solvers.program import PowerProgram
from wflmc.planning.steps import REST, clipped_law

from ..cli_tools import strict
from ..conftest import count
from ..error_tools import codes_of, names_key, raises_input_error, text_of
from .problems import check, random_program
from .scenarios import Target, check_limits, fading_cases, make_plan
from .test_allocation import reference

seeds = st.integers(0, 2**32 - 1)


def varying(rng: np.random.Generator) -> PowerProgram:
    """A random problem whose decay and cost change with the round, by up to a factor of 100."""
    p = random_program(rng)
    size = p.cap.size
    rho = np.clip(1 - (1 - p.rho) * 10 ** rng.uniform(-1, 1, size), 0.05, 1 - 1e-7)
    return replace(p, rho=rho, cost=p.cost * 10 ** rng.uniform(-1, 1, size))


def random_steps(rng: np.random.Generator, target, rounds: int):
    return rng.uniform(0.05, 0.99, rounds) * 2 / target.L


def by_hand(plan, target, clip, weight):
    """Proposition 1 round by round, with each round's own constants."""
    bound = target.initial_w2_sq()
    bounds = []
    for s, eta in enumerate(plan.step_size):
        gamma = (
            1 - eta * target.mu
            if eta <= 2 / (target.mu + target.L)
            else eta * target.L - 1
        )
        silent = target.devices - plan.active_devices[s]
        inside = (
            eta**4 * target.L**3 * target.dim / 3 + eta**3 * target.L**2 * target.dim
        )
        inside += 4 * eta**2 * clip**2 * silent**2 + weight * max(
            0.0, plan.noise_variance[s] - 2 * eta
        )
        bound = ((1 + gamma) / 2) ** 2 * bound + 2 * (1 + gamma) / (1 - gamma) * inside
        bounds.append(bound)
    return bounds


@given(fading_cases(), seeds, st.sampled_from(["paper", "corrected"]))
def test_bound_and_limits_round_by_round(case, seed, which):
    target, h, keywords = case
    steps = random_steps(np.random.default_rng(seed), target, len(h))
    plan = make_plan(target, h, step_size=steps, bound=which, **keywords)
    np.testing.assert_array_equal(plan.step_size, steps)
    weight = target.dim if which == "corrected" else 1
    np.testing.assert_allclose(
        plan.bound, by_hand(plan, target, keywords["clip"], weight), rtol=1e-9
    )
    check_limits(plan, h, keywords["snr_db"], keywords["clip"])
    assert np.all(plan.noise_variance >= 2 * steps * (1 - 1e-9))
    assert 0 <= plan.gap <= 1e-6


@given(fading_cases())
def test_equal_steps_are_a_constant_step(case):
    target, h, keywords = case
    step = 0.4 / (target.mu + target.L)
    constant, per_round = (
        make_plan(target, h, step_size=eta, **keywords)
        for eta in (step, np.full(len(h), step))
    )
    np.testing.assert_array_equal(constant.gain, per_round.gain)
    assert constant.gamma == per_round.gamma == pytest.approx(1 - step * target.mu)
    assert constant.digest == per_round.digest


def test_varying_decay_against_clarabel():
    rng = np.random.default_rng(0)
    agree = 0
    instances = count(40, 300)
    for _ in range(instances):
        p = varying(rng)
        x = allocate(p)
        check(p, x, gap=1e-8)
        value = reference(p)
        assert x.objective <= value + 1e-6 * abs(value)
        assert value >= x.lower_bound - 1e-9 * abs(value)
        agree += abs(value - x.objective) <= 1e-5 * abs(x.objective)
    assert agree >= 0.6 * instances


def test_varying_decay_is_certified_for_both_objectives():
    rng = np.random.default_rng(1)
    for p in (varying(rng) for _ in range(60)):
        for objective in ("worst", "average"):
            problem = replace(p, objective=objective)
            check(problem, allocate(problem), gap=1e-8)


@given(fading_cases(), seeds)
def test_thresholds_with_the_step_of_each_round(case, seed):
    target, h, _ = case
    steps = random_steps(np.random.default_rng(seed), target, len(h))
    gains = np.abs(h)
    clip = np.full(target.devices, 3.0)
    caps = 1e4 * gains**2 * target.mu
    together = threshold_schedule(gains, clip, caps / target.L, steps, target.dim)
    for s, eta in enumerate(steps):
        alone = threshold_schedule(
            gains[s : s + 1], clip, caps[s : s + 1] / target.L, float(eta), target.dim
        )
        np.testing.assert_array_equal(alone.active[0], together.active[s])


@given(seeds)
def test_order_budget_and_floors_with_varying_decay(seed):
    rng = np.random.default_rng(seed)
    p = varying(rng)
    x = allocate(p)
    order = rng.permutation(p.budget.size)
    permuted = allocate(replace(p, active=p.active[:, order], budget=p.budget[order]))
    assert permuted.objective == pytest.approx(x.objective, rel=2e-8)
    richer = allocate(replace(p, budget=p.budget * rng.uniform(1, 2, p.budget.size)))
    assert richer.objective <= x.objective + 1e-8 * abs(x.objective)
    budget_share = float(np.min(p.budget / (p.cap @ p.active + 1e-300)))
    floored = replace(p, floor=p.cap * min(1.0, budget_share) * rng.random(p.cap.size))
    check(floored, allocate(floored), gap=1e-7)


@pytest.mark.parametrize("objective", ["worst", "average"])
def test_products_of_decay_that_underflow(objective):
    rng = np.random.default_rng(2)
    rounds = 20_000
    p = PowerProgram(
        active=rng.random((rounds, 2)) < [1.0, 0.6], budget=np.array([1e3, 5e2]), cap=np.ones(rounds),
        cost=np.full(rounds, 1e-3), rho=rng.uniform(0.3, 0.999, rounds), burn_in=10_000, base=np.zeros(rounds),
        floor=np.zeros(rounds), objective=objective,
    )  # fmt: skip
    check(p, allocate(p), gap=1e-8)


def test_whole_plans_with_varying_steps_agree_with_the_reference(posterior):
    rng = np.random.default_rng(3)
    for index in range(count(6, 40)):
        link = wflmc.Link(channel.rayleigh(0.01), snr_db=rng.uniform(5, 40), seed=index)
        promise = wflmc.Privacy(10 ** rng.uniform(0.3, 1.7), 0.01, 30)
        keywords = {
            "step_size": rng.uniform(0.05, 1.5, 60) / (posterior.mu + posterior.L), "burn_in": 35, "samples": 25,
            "objective": str(rng.choice(["worst", "average"])),
        }  # fmt: skip
        ours, theirs = (
            wflmc.plan(posterior, link, promise, **grouped(solver=name, **keywords))
            for name in ("own", "cvxpy")
        )
        assert ours.objective <= theirs.objective * (1 + 1e-6)
        assert ours.gap <= 1e-6
        assert np.all(ours.spent <= promise.budget(30))


def test_theorem_1_is_for_one_step_size(monkeypatch):
    """On a static channel with one sample the closed form would be wrong for steps that change."""
    target = Target(1.0, 3.0, 4, 3)
    h = np.full((12, 3), 0.1)
    steps = np.where(np.arange(12) < 6, 0.4, 0.1)
    plan = make_plan(target, h, step_size=steps, epsilon=2.0, clip=5.0, snr_db=60)
    assert plan.regime is None
    assert plan.gap <= 1e-6
    assert (
        make_plan(target, h, step_size=0.1, epsilon=2.0, clip=5.0, snr_db=60).regime
        == "dp-limited"
    )


BAD = [
    (np.full(7, 0.1), ("(7,)", 8)),
    (np.full((1, 8), 0.1), ("(1, 8)", 8)),
    (np.r_[np.full(5, 0.1), 0.7, 0.1, 0.1], ("2/L = 0.666667", "round 6")),
    (np.r_[0.1, -0.1, np.full(6, 0.1)], ("2/L = 0.666667", "round 2")),
    (np.r_[np.full(7, 0.1), np.nan], ("2/L = 0.666667", "round 8")),
    (np.r_[np.full(7, 0.1), 1e-14], ("mu = 1e-14", "round 8")),
    (0.7, ("2/L = 0.666667",)),
]


@pytest.mark.parametrize(("steps", "facts"), BAD)
def test_bad_steps_are_named(steps, facts):
    with raises_input_error("step_size", *facts, section="sampler") as caught:
        make_plan(Target(1.0, 3.0, 4, 3), np.full((8, 3), 0.1), step_size=steps)
    assert np.ndim(steps) or "round" not in str(caught.value)


def test_bad_schedules_are_named():
    h = np.full((8, 3), 0.1)
    for keywords in (
        {"step_schedule": "free"},
        {"step_schedule": "planned", "step_size": np.full(8, 0.1)},
    ):
        with pytest.raises(wflmc.InputError) as caught:
            make_plan(Target(1.0, 3.0, 4, 3), h, **keywords)
        assert caught.value.key == "step_schedule"


def test_divergence_looks_at_the_step_of_every_round():
    """Rounds with few unlike devices: a step that is large only where everyone sends is no reason to warn."""
    posterior = wflmc.gaussian_regression(
        jax.random.key(3), devices=6, examples=60, partition="dirichlet:0.1"
    )
    gains = np.full((10, 6), 1e-4)
    gains[5, int(np.argmax(posterior.sizes))] = 1.0
    link = wflmc.Link(channel.from_array(gains), snr_db=10)
    small, large = 0.02 / posterior.L, 1.0 / posterior.L

    def warned(steps):
        plan = wflmc.plan(
            posterior,
            link,
            wflmc.Privacy(clip=1.0),
            step_size=steps,
            burn_in=9,
            samples=1,
        )
        assert plan.active_devices[5] == 1
        return "expanding-rounds" in codes_of(plan)

    one_large_step, one_small_step = np.full(10, small), np.full(10, large)
    one_large_step[5], one_small_step[5] = large, small
    assert warned(one_large_step)
    assert warned(large)
    assert not warned(one_small_step)
    assert not warned(small)


# Planned schedules


def figure_6(posterior, epsilon, **keywords):
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=30)
    step = 0.4 / (posterior.mu + posterior.L)
    return wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(epsilon, 0.01, 30),
        **grouped(**{"step_size": step, "burn_in": 50, "samples": 50} | keywords),
    )


@pytest.mark.parametrize("epsilon", [4, 15])
def test_planned_steps_help_and_chains_that_are_clipped_agree(posterior, epsilon):
    """By the bound, by the exact law, and by chains: clipping is what large steps might not survive."""
    constant, planned = (
        figure_6(posterior, epsilon, step_schedule=name)
        for name in ("constant", "planned")
    )
    assert planned.objective < constant.objective
    assert planned.gap <= 1e-6
    assert np.all(planned.spent <= planned.privacy.budget(30))
    exact = [exact_w2_sq(posterior, plan)[50:].max() for plan in (constant, planned)]
    assert exact[1] < exact[0] * (0.75 if epsilon == 15 else 1)
    seen = [
        estimate_w2_sq(
            wflmc.sample(jax.random.key(1), posterior, plan, chains=100).theta,
            posterior.exact,
        )
        for plan in (constant, planned)
    ]
    assert seen[1].worst < seen[0].worst + seen[0].worst_se


@given(fading_cases(), st.sampled_from(["worst", "average"]))
def test_planned_is_never_worse_than_constant(case, objective):
    target, h, keywords = case
    step = 0.4 / (target.mu + target.L)
    burn_in = keywords["burn_in"] % 13  # a search of a hundred plans: keep it short
    samples = min(3, len(h) - burn_in)
    h = h[: burn_in + samples]
    keywords = {**keywords, "burn_in": burn_in, "samples": samples}
    constant, planned = (
        make_plan(
            target,
            h,
            step_size=step,
            step_schedule=name,
            objective=objective,
            **keywords,
        )
        for name in ("constant", "planned")
    )
    assert planned.objective <= constant.objective * (1 + 1e-9)
    laws = [clipped_law(plan)[burn_in:] for plan in (constant, planned)]
    value = np.mean if objective == "average" else np.max
    assert value(laws[1]) <= value(laws[0]) * (1 + 1e-9)
    np.testing.assert_allclose(planned.step_size[burn_in:], step, rtol=1e-12)
    assert planned.step_size.max() <= 2 / (target.mu + target.L) * (1 + 1e-9)
    assert planned.step_size.min() >= REST * step * (1 - 1e-9)
    check_limits(planned, h, keywords["snr_db"], keywords["clip"])
    # No large step is noisier than clipped gradients can undo.
    large = planned.step_size > step * (1 + 1e-9)
    reach = planned.step_size * keywords["clip"] * target.devices
    assert np.all(
        np.sqrt(target.dim * planned.noise_variance)[large] <= reach[large] * (1 + 1e-9)
    )


def test_the_bound_alone_would_choose_badly(posterior):
    """Large steps up to the end of burn-in: a smaller bound, and a chain much further away. The search knows better."""
    constant = figure_6(posterior, 8)
    steps = constant.step_size.copy()
    steps[:50] = 2 / (posterior.mu + posterior.L)
    misled = figure_6(posterior, 8, step_size=steps)
    assert misled.objective < 0.8 * constant.objective
    assert (
        exact_w2_sq(posterior, misled)[50:].max()
        > 4 * exact_w2_sq(posterior, constant)[50:].max()
    )
    assert clipped_law(misled)[50:].max() > 4 * clipped_law(constant)[50:].max()


def test_the_simple_law_is_the_exact_one_without_clipping():
    """With one parameter and no clipping the chain is on a quadratic; only the start is simplified."""
    posterior = wflmc.gaussian_regression(
        jax.random.key(5), devices=4, examples=40, dim=1
    )
    steps = np.random.default_rng(0).uniform(0.1, 0.9, 80) / posterior.L
    link = wflmc.Link(channel.static())
    plan = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(),
        step_size=steps,
        burn_in=60,
        samples=20,
        policy=wflmc.Policy(power="noiseless"),
    )
    np.testing.assert_allclose(
        clipped_law(plan)[60:], exact_w2_sq(posterior, plan)[60:], rtol=1e-6
    )


# Through the scenario


def test_a_schedule_by_expression(plan_of, scenario):
    text = "0.4/(mu+L)*(1 + 3*(s<=S_b/2) + 0*S)"
    document = plan_of(
        scenario, "--set", f"sampler.step_size={text}", "--set", "sampler.samples=3"
    )
    constants = document["constants"]
    step = 0.4 / (constants["mu"] + constants["L"])
    assert document["step_size"] == pytest.approx([4 * step] * 25 + [step] * 28)
    assert constants["step_size"] == pytest.approx(step)
    assert constants["gamma"] == pytest.approx(1 - step * constants["mu"])
    limited = plan_of(
        scenario, "--set", "sampler.step_size=max(min(1/(mu+L), 1e-4, 1e-2/s), 5e-5)"
    )
    np.testing.assert_allclose(
        limited["step_size"], np.clip(1e-2 / np.arange(1, 52), 5e-5, 1e-4)
    )
    plain = plan_of(scenario)
    assert len(set(plain["step_size"])) == 1


@pytest.mark.parametrize(
    ("overrides", "key", "fact"),
    [
        (["sampler.step_size=0.4/(mu+L)*t"], "sampler.step_size", "mu, L, s, S, S_b"),
        (["sampler.step_size=abs(s)"], "sampler.step_size", "min, max"),
        (["sampler.step_size=min()"], "sampler.step_size", "arithmetic"),
        (["sampler.step_size=1e-4/(s-3)"], "sampler.step_size", "arithmetic"),
        (["sampler.step_size=1e-4*(3-s)**0.5"], "sampler.step_size", "arithmetic"),
        (["sampler.step_size=1e-4*(0<s<3)"], "sampler.step_size", "arithmetic"),
        (["sampler.step_size=1e-4*(s<40)"], "sampler.step_size", "round 40"),
        (["sampler.step_size=s/L"], "sampler.step_size", "round 2"),
        (["sampler.step_size=[1e-4, 1e-4]"], "sampler.step_size", "51 of them"),
        (
            ["sampler.step_size=1e-4/s", "sampler.burn_in=auto"],
            "sampler.step_size",
            "mu, L",
        ),
        (
            ["sampler.step_size=[1e-4]", "sampler.burn_in=auto"],
            "sampler.burn_in",
            "every round",
        ),
        (["sampler.step_schedule=free"], "sampler.step_schedule", "planned"),
        (
            ["sampler.step_schedule=planned", "sampler.step_size=1e-4/s"],
            "sampler.step_schedule",
            "constant",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_schedules_are_one_sentence(call, scenario, overrides, key, fact):
    code, out, err = call(
        "plan", scenario, *(word for text in overrides for word in ("--set", text))
    )
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert names_key(err, key, fact)


def test_nothing_to_plan_is_said(plan_of, scenario):
    document = plan_of(
        scenario, "--set", "sampler.step_schedule=planned", "--set", "sampler.burn_in=0"
    )
    assert text_of(document, "no-effect").startswith("sampler.step_schedule ")


PLANNED = """
[link]
snr_db = 30.0
[privacy]
epsilon = 60.0
delta = 0.01
[sampler]
burn_in = 40
samples = 10
chains = 8
step_schedule = "planned"
"""


def test_planned_runs_are_read_again_and_go_on(tmp_path, call):
    (tmp_path / "s.toml").write_text(PLANNED)
    folder = tmp_path / "out"
    code, out, err = call("run", tmp_path / "s.toml", "--out", folder)
    assert code == 0, err
    assert "ESS min of one chain" in out
    first = strict((folder / "plan.json").read_text())
    steps = first["step_size"]
    assert len(steps) == 50
    assert len(set(steps)) > 1
    assert set(steps[40:]) == {first["constants"]["step_size"]}
    summary = strict((folder / "summary.json").read_text())
    assert summary["exact_ess_min"] == pytest.approx(first["exact_ess_min"])
    code, out, err = call("run", "--plan", folder / "plan.json", "--json")
    assert code == 0, err
    assert strict(out)["w2_sq"] == summary["w2_sq"]
    code, _, err = call("run", "--resume", folder, "--more", "5")
    assert code == 0, err
    longer = strict((folder / "plan.json").read_text())
    assert longer["step_size"] == [*steps, *[steps[-1]] * 5]
    assert longer["gain"][:50] == pytest.approx(first["gain"])
    code, _, err = call(
        "run", "--plan", folder / "plan.json", "--ledger", tmp_path / "new.jsonl"
    )
    assert code == 0, err
    spoilt = {**longer, "step_size": [*steps[:-1], 1.0, *longer["step_size"][50:]]}
    (tmp_path / "spoilt.json").write_text(json.dumps(spoilt))
    code, _, err = call("run", "--plan", tmp_path / "spoilt.json")
    assert code == 2
    assert names_key(err, "--plan: step_size", "wflmc plan --out")
