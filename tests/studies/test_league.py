"""The league of private posteriors on images: its rows, its promises, and that choosing looks at no test image."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import league as choosing

from wflmc.apps.report.study_page import study_figure
from wflmc.apps.studies import league
from wflmc.apps.studies.league import (
    CHOSEN,
    EPSILONS,
    LEAGUE_DATA,
    OTHER_DATA_SET,
    League,
    LeagueSettings,
    league_study,
)
from wflmc.apps.studies.study import run_study
from wflmc.data.sets import Features

from ..conftest import FULL

LENGTHS = ((6, 2), (9, 3)) if FULL else ((6, 2),)
"""Rounds and kept rounds of the chains that are tried."""
SPACE = choosing.SearchSpace(lengths=LENGTHS)
DESCENT = choosing.SearchSpace(
    descent=True,
    dynamics=("overdamped",),
    lengths=LENGTHS[:1],
    temperatures=(1.0,),
)


@pytest.fixture
def small(monkeypatch):
    """Features of ten classes that can be told apart, few rounds, and whoever reads files fails."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(10, 12))
    labels = np.arange(600) % 10
    rows = centres[labels] + 0.7 * generator.normal(size=(600, 12))
    rows = np.column_stack(
        [rows / np.maximum(np.linalg.norm(rows, axis=1), 4)[:, None], np.full(600, 0.3)]
    )
    rows = rows.astype(np.float32)
    features = Features(rows[:480], labels[:480], rows[480:], labels[480:])
    monkeypatch.setattr(league, "league_features", lambda name: features)
    short = {
        key: settings._replace(rounds=12, kept_rounds=6)
        for key, settings in CHOSEN.items()
    }
    for name, value in {
        "CHOSEN": short,
        "UNCLIPPED_RUNS": {"mnist": (20.0, 6)},
        "UNCLIPPED_BURN_IN": 6,
        "UNCLIPPED_CHAINS": 2,
    }.items():
        monkeypatch.setattr(league, name, value)
    monkeypatch.setattr(choosing, "HELD_OUT", 60)
    monkeypatch.setattr(choosing, "STEPS", {"overdamped": (20.0,), "kinetic": (10.0,)})
    monkeypatch.setattr(choosing, "EXAMPLE_CLIPS", {10.0: (0.5,)})
    monkeypatch.setattr(choosing, "CHAINS_PER_CALL", 4)
    monkeypatch.setattr(choosing, "FINALISTS", 2)
    return features


def test_every_row_keeps_its_promise_and_has_scores(small, monkeypatch):
    grid = (1.0, 10.0) if FULL else (10.0,)
    monkeypatch.setattr(league, "EPSILONS", grid)
    monkeypatch.setattr(league, "LEAGUE_DATA", {"mnist": LEAGUE_DATA["mnist"]})
    study = league_study(League(2, unclipped=True))
    tables = run_study(
        study._replace(identity={}), None, lambda done: None, pytest.fail
    )
    for name in ("league", "league_ece", "league_nll"):
        mnist_rows = {
            (f"MNIST, {kind}", 10.0) for kind in ("ours", "descent", "posterior")
        }
        row_names = [*league.rows_at("mnist", 1.0), league.POSTERIOR]
        full = {(f"MNIST, {row_name}", 1.0) for row_name in row_names if 1.0 in grid}
        assert {(row.scheme, row.x) for row in tables[name]} == mnist_rows | full
    for row in tables["league_epsilon"]:
        assert (row.y is None) == ("without" in row.scheme)
        assert row.y is None or 0 < row.y <= row.x * (1 + 1e-9)
    spent = {row.scheme: row.y for row in tables["league"] if row.x == 10}
    assert spent["MNIST, posterior"] > 0.5
    assert all(0 <= row.y <= 1 for row in tables["league_free"])
    assert [panel.title for panel in study_figure("league", tables).panels] == [
        "MNIST: accuracy",
        "MNIST: calibration error",
    ]


def test_rows_with_rendered_digits_start_at_the_public_fit(small, monkeypatch):
    name = "mnist-rendered"
    title = league.LEAGUE_DATA[name].title
    fit = league.league_posterior(small, prior_std=3.0).mode
    monkeypatch.setattr(league, "public_fit", lambda name, prior_std: fit)
    posterior = league.league_posterior(small, 3.0, fit)
    plan = league.entry(
        f"{title}, {league.CHOSEN_ON_TRAINING}", 0.3, posterior, experiments=1
    ).plans[0]
    assert plan.context.init == "prior-mean"
    assert plan.epsilon_spent <= 0.3
    monkeypatch.setattr(league, "league_plan", lambda posterior, settings, *_: settings)
    ours, warm = (
        league.entry(f"{title}, {row_name}", 0.3, posterior, experiments=1).plans[0]
        for row_name in (league.CHOSEN_ON_TRAINING, league.AT_TEMPERATURE_1)
    )
    assert warm == ours._replace(burn_in_temperature=1.0) != ours
    study = league_study(League(1))
    scheme = f"{title}, {league.PUBLIC_FIT}"
    points = [point for point in study.points if point.schemes[0] == scheme]
    assert sorted(x for point in points for x in point.xs) == sorted(EPSILONS)
    tables = study.measure(points[0], lambda done: None)
    predicted = (small.X_test @ fit.reshape(10, -1).T).argmax(1)
    assert tables["league"][0].y == pytest.approx(np.mean(predicted == small.y_test))


def test_choosing_looks_at_no_test_image(small):
    blind = Features(small.X, small.y, None, None)
    search = choosing.Search(blind, SPACE)
    search.run([10.0])
    ranking = search.ranking(10.0)
    assert sorted(ranking) == ranking
    assert np.isfinite(ranking[0][0])
    finalists = search.finalists[10.0]
    assert finalists == sorted(finalists)
    # Several chains have their say, and not the one that made a candidate a finalist.
    assert {score.settings for score in finalists} == {
        settings for _, settings in ranking[:2]
    }
    assert all(score.standard_error > 0 for score in finalists)
    tried = {settings for _, settings in ranking}
    assert len(tried) == len(ranking)
    assert {settings.dynamics for settings in tried} == {"overdamped", "kinetic"}
    assert {settings.rounds for settings in tried} == {rounds for rounds, _ in LENGTHS}
    assert {settings.burn_in_temperature for settings in tried} > {0.05, 1.0}


def test_the_best_candidate_is_compared_with_its_neighbours(small):
    search = choosing.Search(small, DESCENT)
    search.run([10.0])
    nll = {settings: nll for nll, settings in search.ranking(10.0)}
    first = LeagueSettings("overdamped", 20.0, 0.5, choosing.DEVICE_CLIP, 6, 2)
    of_first = set(DESCENT.neighbours(first))
    assert of_first <= set(nll)
    second = min(of_first, key=nll.__getitem__)
    assert set(DESCENT.neighbours(second)) <= set(nll)
    assert {settings.burn_in_temperature for settings in nll} == {1.0}


def test_a_chain_has_the_score_of_its_own_settings(small):
    """Calls are filled up, and have chains of several ε: every score is a chain's own."""
    search = choosing.Search(small, DESCENT)
    search.run([10.0])
    alone = choosing.Search(small, DESCENT)
    alone.nll = {10.0: {}}
    (nll, last), *_ = search.ranking(10.0)[::-1]
    alone._score({10.0: [last]})
    assert alone.nll[10.0][last] == pytest.approx(nll, rel=1e-5)


def test_steps_fall_over_burn_in_and_stay():
    settings = LeagueSettings("kinetic", 40.0, 0.5, 100.0, 6, 2, final_step=0.25)
    h = settings.step_sizes(examples=1000)
    np.testing.assert_allclose(h**2, 0.04 * np.array([1, 0.75, 0.5, 0.25, 0.25, 0.25]))
    overdamped = settings._replace(dynamics="overdamped")
    np.testing.assert_allclose(overdamped.step_sizes(examples=1000), h**2)


def test_a_prior_around_a_public_fit_is_tried_at_several_scales(small):
    """Chains start at the fit: where it is good, they have little left to learn."""
    fitted = {
        prior_std: league.league_posterior(small, prior_std).mode
        for prior_std in (2.0, 5.0)
    }
    space = choosing.SearchSpace(
        lengths=LENGTHS, prior_stds=(2.0, 5.0), public_fit=fitted.__getitem__
    )
    search = choosing.Search(small, space)
    search.run([10.0])
    without = choosing.Search(small, SPACE)
    without.run([10.0])
    assert {settings.prior_std for settings in search.nll[10.0]} == {2.0, 5.0}
    assert search.finalists[10.0][0].nll < without.finalists[10.0][0].nll


def test_settings_are_there_for_every_row():
    grid = {
        **{("other", name): EPSILONS for name in OTHER_DATA_SET},
        **{("descent", name): EPSILONS for name in OTHER_DATA_SET},
        **{("training", name): (1.0, 3.0) for name in LEAGUE_DATA},
        ("training", "mnist-rendered"): EPSILONS,
    }
    expected = {
        (way, name, epsilon)
        for (way, name), epsilons in grid.items()
        for epsilon in epsilons
    }
    assert set(CHOSEN) == expected
    assert {(way, name) for way, name, _ in CHOSEN} == {
        (way, name) for way, names in choosing.WAYS.items() for name in names
    }


def test_the_bound_on_the_curvature_is_public(small):
    """It holds for any rows of length 1 beside their constant, and the data do not enter it."""
    posterior = league.league_posterior(small)
    other = league.league_posterior(small._replace(X=np.roll(small.X, 1, axis=0)))
    assert posterior.L == other.L
    rows = posterior.features.reshape(-1, posterior.features.shape[-1]).astype(float)
    assert np.linalg.eigvalsh(0.5 * rows.T @ rows)[-1] + posterior.mu <= posterior.L
