"""`wflmc reproduce`: figures, claims, and what happens when it is stopped."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ..cli_tools import is_picture, strict
from ..conftest import FULL, PAPER_DATA, count
from ..error_tools import names_key

CLOSED = ("fig2", "fig3a", "fig3b", "fig4a", "fig4b", "fig5")
SAMPLED = ("fig6", "fig7") if FULL else ()
FEW_EXPERIMENTS = str(count(2, 3))
SCHEMES = {"optimized", "equal", "no-dp", "noiseless-dp", "noiseless"}


def test_reproduce(call, tmp_path):
    options = ["--experiments", "4", "--cache", tmp_path / "cache"]
    code, out, err = call("reproduce", *CLOSED, *SAMPLED, "--out", tmp_path, *options)
    assert (code, err) == (0, "")
    assert "The paper's stated outcomes" in out
    for name in (*CLOSED, *SAMPLED):
        assert all(
            is_picture(tmp_path / f"{name}.{suffix}") for suffix in ("png", "svg")
        )
        with open(tmp_path / f"{name}.csv") as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0]) == ["figure", "scheme", "x", "y", "y_se"]
        schemes, grid = {row["scheme"] for row in rows}, {row["x"] for row in rows}
        assert len(rows) == len(schemes) * len(grid)
        if name != "fig2":
            assert schemes == SCHEMES
        if name in ("fig6", "fig7"):
            assert all(float(row["y"]) > 0 and float(row["y_se"]) > 0 for row in rows)
    all_claims = strict((tmp_path / "claims.json").read_text())["claims"]
    assert {claim["figure"] for claim in all_claims} >= set(SAMPLED)
    # Four chains prove nothing about these figures.
    claims = [claim for claim in all_claims if claim["figure"] not in ("fig6", "fig7")]
    assert all(claim["holds"] or claim["contradiction"] for claim in claims)
    assert sorted(claim["figure"] for claim in claims if claim["contradiction"]) == [
        "fig3b",
        "fig4a",
        "fig5",
    ]


@pytest.mark.skipif(not FULL, reason="three figures once more: make test-full runs it")
def test_reproduce_with_the_authors_data(call, tmp_path, paper_data):
    code, out, _ = call(
        "reproduce",
        "fig3a",
        "fig4b",
        "fig5",
        "--out",
        tmp_path,
        "--data",
        paper_data,
        "--json",
    )
    assert code == 0
    ours = {claim["statement"]: claim["ours"] for claim in strict(out)["claims"]}
    assert round(ours["W2²(prior, posterior)"], 4) == 6.6397
    assert round(ours["power-limited up to (dB)"], 2) == 16.62
    assert round(ours["equal to noiseless-DP from (dB)"], 2) == 21.57
    assert round(ours["LMC-limited up to η ="] * 1e5, 2) == 5.10
    assert round(ours["DP-limited up to ε ="], 2) == 13.45
    assert round(ours["equal to noiseless-DP up to ε ="], 2) == 4.94
    assert not (tmp_path / "fig2.csv").exists()


def test_other_data_are_no_reproach_to_the_paper(call, tmp_path):
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "d.npz",
        X=generator.standard_normal((60, 2)),
        y=generator.standard_normal(60),
    )
    code, out, _ = call(
        "reproduce", "fig2", "--data", tmp_path / "d.npz", "--out", tmp_path / "out"
    )
    assert code == 0
    assert "other data" in out
    assert "contradicts" not in out
    assert "nan" not in (tmp_path / "out" / "claims.json").read_text()


EXPERIMENTS = 100


@pytest.fixture(scope="module")
def paper_figures(tmp_path_factory):
    """Figures on the authors' data where they are at hand, else on synthetic data; the paper has 100 experiments."""
    folder = tmp_path_factory.mktemp("paper")
    options = ["--data", str(PAPER_DATA)] if PAPER_DATA.exists() else []
    options += ["--experiments", str(EXPERIMENTS)]
    command = [
        sys.executable,
        "-m",
        "wflmc",
        "reproduce",
        "fig6",
        "fig7",
        *options,
        "--json",
    ]
    done = subprocess.run(
        [*command, "--out", str(folder), "--cache", str(folder / "cache")],
        capture_output=True,
        text=True,
        check=True,
    )
    return folder, strict(done.stdout)["claims"]


def curves(path):
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return {
        s: {float(r["x"]): float(r["y"]) for r in rows if r["scheme"] == s}
        for s in dict.fromkeys(r["scheme"] for r in rows)
    }


@pytest.mark.skipif(
    not FULL,
    reason="tests/studies has points of figure 6: make test-full runs all of it",
)
def test_figure_6_as_in_the_paper(paper_figures):
    folder, claims = paper_figures
    assert all(claim["holds"] for claim in claims)
    six = curves(folder / "fig6.csv")
    high = [x for x in six["equal"] if x >= 20]
    # About 2.4 in the paper; with these seeds 2.25, one standard error of a curve being some 15 %.
    assert (
        pytest.approx(
            np.mean([six["equal"][x] / six["optimized"][x] for x in high]), rel=0.25
        )
        == 2.4
    )
    assert all(
        abs(six["optimized"][x] / six["noiseless-dp"][x] - 1) < 0.15 for x in high
    )
    assert abs(six["no-dp"][20] / six["noiseless"][20] - 1) < 0.15
    assert six["no-dp"][5] > 10 * six["noiseless"][5]
    # The exact laws, with no floor: what the estimator could not see.
    exact = curves(folder / "fig6_exact.csv")
    assert exact["noiseless"][30] < 0.1 * six["noiseless"][30]
    assert 0.013 < curves(folder / "fig6_floor.csv")["floor"][30] * EXPERIMENTS < 0.025


@pytest.mark.skipif(
    not FULL,
    reason="figure 7 with all its experiments takes half a minute: make test-full runs it",
)
def test_figure_7_as_in_the_paper(paper_figures):
    seven = curves(paper_figures[0] / "fig7.csv")
    for scheme in SCHEMES:
        assert seven[scheme][10] > 10 * seven[scheme][50]
    assert all(seven["optimized"][x] < seven["equal"][x] for x in range(40, 100, 10))


def start(folder, cache):
    command = [
        sys.executable,
        "-m",
        "wflmc",
        "reproduce",
        "fig6",
        "--experiments",
        FEW_EXPERIMENTS,
    ]
    return subprocess.Popen(
        [*command, "--out", str(folder), "--cache", str(cache)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip


def finish(process):
    _, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    return err


@pytest.mark.skipif(
    not FULL, reason="three times figure 6, ten seconds: make test-full runs it"
)
def test_killed_at_any_moment_and_started_again(call, tmp_path):
    """SIGKILL loses at most the point in progress; the tables are the same, byte for byte."""
    cache = tmp_path / "cache"
    for after in (0, 1, 3, 4, 6, 7):
        process = start(tmp_path / "out", cache)
        while len(list(cache.rglob("*.json"))) < after + 1 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*.json")}
    assert written
    names = ("out", "second")  # both go on from there at once, with the cache in common
    assert {
        finish(process) for process in [start(tmp_path / name, cache) for name in names]
    } == {b""}
    # None was computed again.
    assert all(path.stat().st_mtime_ns == when for path, when in written.items())
    undisturbed = ["--out", tmp_path / "first", "--cache", tmp_path / "other"]
    assert (
        call("reproduce", "fig6", "--experiments", FEW_EXPERIMENTS, *undisturbed)[0]
        == 0
    )
    for table in ("fig6.csv", "fig6_exact.csv", "fig6_floor.csv"):
        texts = {(tmp_path / name / table).read_bytes() for name in (*names, "first")}
        assert len(texts) == 1


def test_figure_8_on_mnist(mnist_folder, tmp_path):
    if not FULL:
        pytest.skip(
            "figure 8 on MNIST takes a minute even with three experiments: make test-full runs it"
        )
    command = [
        sys.executable,
        "-m",
        "wflmc",
        "reproduce",
        "fig8",
        "--experiments",
        "3",
        "--json",
    ]
    folders = [
        "--data",
        str(mnist_folder),
        "--out",
        str(tmp_path),
        "--cache",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(
        [*command, *folders], capture_output=True, text=True, check=True
    )
    assert all(claim["holds"] for claim in strict(done.stdout)["claims"])
    ece, accuracy = (
        curves(tmp_path / "fig8.csv"),
        curves(tmp_path / "fig8_accuracy.csv"),
    )
    assert set(ece) == SCHEMES | {"sbfl"}
    assert all(0.03 < ece["optimized"][x] < 0.08 for x in (20, 30, 40))
    assert all(0.79 < accuracy["optimized"][x] < 0.84 for x in (20, 30, 40))


def test_mnist_that_is_not_there(call, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WFLMC_DATA", str(tmp_path / "nothing"))
    code, out, err = call("reproduce", "fig8", "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert names_key(err, "--data", tmp_path / "nothing", "wflmc data mnist")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fig6", "--experiments", "1"], "--experiments = 1"),
        (["fig6", "--experiments", "0"], "--experiments"),
        (["fig8", "--stop-se", "2"], "--stop-se"),
        (["fig9"], "fig2, fig3a"),
        (["fig6", "--cache", "/dev/null/x"], "--cache"),
    ],
)
def test_bad_input(call, tmp_path, arguments, part):
    code, out, err = call("reproduce", *arguments, "--out", tmp_path)
    assert (code, out) == (2, "")
    assert part in err
