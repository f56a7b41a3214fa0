"""Points of a sweep: two that read different arrays, functions or files are never taken for one."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from ..cli_tools import strict

SCENARIO = """
[posterior]
devices = 4
[link]
fading = "static"
power = 0.01
[privacy]
epsilon = 8.0
delta = 0.01
[sampler]
burn_in = 20
samples = 10
"""


@pytest.fixture
def sweep(call, tmp_path):
    """A sweep without chains: its JSON, or the error that it ended with."""
    scenario = tmp_path / "s.toml"
    scenario.write_text(SCENARIO)
    places = ["--out", tmp_path / "out", "--cache", tmp_path / "cache", "--json"]

    def run(*arguments):
        code, out, err = call("sweep", scenario, "--plan-only", *arguments, *places)
        assert code == 0, err
        return strict(out)

    return run


def rows(folder):
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_arrays_of_one_file_are_points_of_their_own(sweep, tmp_path):
    gains = np.full((30, 4), 0.1)
    np.savez(tmp_path / "h.npz", weak=gains, strong=10 * gains)
    grid = "link.gains=h.npz:weak,h.npz:strong"
    for cached in (0, 2):
        summary = sweep("--set", "link.fading=file", "--grid", grid)
        assert summary["cached"] == cached
        weak, strong = rows(tmp_path / "out")
        assert weak["energy"] != strong["energy"]


MODEL = """
import jax, wflmc
def small():
    return wflmc.gaussian_regression(jax.random.key(0), devices=4, examples=40, dim=2)
def large():
    return wflmc.gaussian_regression(jax.random.key(0), devices=4, examples=400, dim=2)
"""


def test_models_in_files_are_points_of_their_own(sweep, tmp_path):
    (tmp_path / "a.py").write_text(MODEL)
    (tmp_path / "b.py").write_text(MODEL.replace("examples=40,", "examples=80,"))
    grid = "posterior.model=a.py:small,a.py:large,b.py:small"
    for cached in (0, 3):
        assert sweep("--grid", grid)["cached"] == cached
        assert len({row["objective"] for row in rows(tmp_path / "out")}) == 3


def test_results_belong_to_the_content_of_public_rows(sweep, tmp_path):
    generator = np.random.default_rng(0)
    X = generator.standard_normal((40, 2))
    np.savez(tmp_path / "d.npz", X=X, y=X[:, 0])
    public = tmp_path / "public.npz"
    arguments = [
        "--set",
        "posterior.data=d.npz",
        "--set",
        "posterior.whiten_from=public.npz",
        "--set",
        "posterior.examples=40",
        "--grid",
        "link.snr_db=10,20",
    ]
    for scale in (2.0, 9.0):
        np.savez(public, X=scale * X, y=X[:, 0])
        assert sweep(*arguments)["cached"] == 0
    assert sweep(*arguments)["cached"] == 2
