"""Past the paper: the study that compares, and the numbers that are promised for it."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps.report.study_page import write_study
from wflmc.apps.studies.beyond import (
    ABLATION,
    RECIPES,
    beyond_ablation,
    beyond_gaussian,
    beyond_mnist,
)
from wflmc.apps.studies.paper.fig6_fig7 import MultiSample
from wflmc.apps.studies.paper.fig8 import Mnist
from wflmc.apps.studies.study import Point
from wflmc.data.sets import Features
from wflmc.evaluation import exact_ess
from wflmc.posterior.softmax import synthetic_labels

from ..cli_tools import is_picture
from ..conftest import FULL

SOME_RECIPES = list(RECIPES) if FULL else list(RECIPES)[1:2]
SOME_LEFT_OUT = list(ABLATION) if FULL else list(ABLATION)[:1]
EXAMPLE = Path(__file__).parents[2] / "examples" / "whitened.toml"


@pytest.fixture(scope="module")
def tables():
    """A point of every kind, on little data."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=6, examples=240)
    linear = beyond_gaussian(
        MultiSample(posterior, experiments=2, rounds=21), chains=50
    )
    key = jax.random.key(1)
    features = Features(
        *synthetic_labels(key, 300, 5), *synthetic_labels(key, 100, 5, stream="test")
    )
    setting = Mnist(features, experiments=2, devices=6)
    images, without = beyond_mnist(setting), beyond_ablation(setting)
    rows_by_table: dict = {}
    for study, xs, schemes in (
        (linear, (30.0,), [linear.order]),
        (images, (20.0,), [(name,) for name in SOME_RECIPES]),
        (without, (20.0,), [(name,) for name in SOME_LEFT_OUT]),
    ):
        for x in xs:
            for names in schemes:
                for table, rows in study.measure(
                    Point(x, names), lambda _: None
                ).items():
                    rows_by_table.setdefault(table, []).extend(rows)
    return rows_by_table


def test_every_scheme_is_measured(tables):
    assert {row.scheme for row in tables["beyond"]} == set(SOME_RECIPES)
    assert {row.scheme for row in tables["beyond_ablation_nll"]} == set(SOME_LEFT_OUT)
    for rows in tables.values():
        assert all(row.y is None or np.isfinite(row.y) for row in rows)
    spent = {(row.scheme, row.x): row.y for row in tables["beyond_epsilon"]}
    for name in SOME_RECIPES:
        assert spent[name, 20.0] <= RECIPES[name].get("epsilon", Mnist.epsilon) * (
            1 + 1e-9
        )


def test_the_exact_objective_is_the_best_of_its_promise(tables):
    law = {row.scheme: row.y for row in tables["beyond_w2"] if row.x == 30.0}
    assert law["+ exact law as objective"] <= law["+ exact accountant"]


def test_pictures_and_tables_of_it(tables, tmp_path):
    *files, table = write_study(tmp_path, "beyond", tables, "a test")
    assert all(map(is_picture, files))
    text = table.read_text()
    assert text.count("\n| ") == 2 + 8 + len(SOME_LEFT_OUT)
    assert "| ours |" in text


def test_figure_6_past_the_paper():
    """At most 1.4e-4 (here far less) where the paper's optimum has 7e-4, with more effective samples."""
    posterior = wflmc.gaussian_regression(jax.random.key(0))
    links = [
        wflmc.Link(channel.rayleigh(0.01), snr_db=30, seed=seed) for seed in range(5)
    ]
    rounds = {"burn_in": 50, "samples": 50}
    paper = wflmc.plan_many(
        posterior, links, wflmc.Privacy(15, 0.01, 30, "paper"), policy=wflmc.Policy(bound="paper"),
        step_size=0.4 / (posterior.mu + posterior.L), **rounds,
    )  # fmt: skip
    ours = wflmc.plan_many(
        posterior, links, wflmc.Privacy(15, 0.01, 30), policy=wflmc.Policy(objective="exact", max_round_noise=1),
        step_size=0.3 / (posterior.mu + posterior.L), **rounds,
    )  # fmt: skip
    worst = [
        np.mean([wflmc.exact_w2_sq(posterior, plan)[50:].max() for plan in plans])
        for plans in (paper, ours)
    ]
    assert worst[0] > 5e-4
    assert worst[1] < 3e-5
    ess = [
        np.mean([exact_ess(posterior, plan).min() for plan in plans])
        for plans in (paper, ours)
    ]
    assert ess[1] > 1.2 * ess[0]
    assert all(
        plan.gap < 1e-6 and plan.epsilon_spent <= 15 * (1 + 1e-9) for plan in ours
    )


@pytest.mark.skipif(not FULL, reason="600 rounds on MNIST: make test-full runs it")
@pytest.mark.parametrize(
    ("preconditioner", "epsilon", "clip"),
    [("whiten", 1.25, 30.0), ("private-whiten", 2.0, 60.0)],
)
def test_mnist_past_the_paper(
    preconditioner, epsilon, clip, mnist_folder, monkeypatch, call
):
    monkeypatch.setenv("WFLMC_DATA", str(mnist_folder))
    keys = {
        "posterior.preconditioner": preconditioner,
        "privacy.epsilon": epsilon,
        "privacy.clip": clip,
    }
    changes = [*(f"{key}={value!r}" for key, value in keys.items()), "sampler.chains=3"]
    sets = [part for change in changes for part in ("--set", change)]
    code, out, err = call("run", EXAMPLE, *sets, "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["accuracy"] >= 0.88
    assert summary["ece"] <= 0.016
    assert summary["nll"] <= 0.41
    assert summary["epsilon_spent"] <= epsilon * (1 + 1e-9)
