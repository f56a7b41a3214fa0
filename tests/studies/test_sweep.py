"""`wflmc sweep`: grids, tables, failures, and the same bytes whoever computes and whatever dies on the way."""

from __future__ import annotations

import csv
import math
import os
import signal
import socket
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wflmc.apps.studies.cache import key_of
from wflmc.apps.studies.grids import Grid, parse_grid, points
from wflmc.runs.point import PointTask, measure
from wflmc.scenario import load_scenario
from wflmc.scenario.coverage import SELECTED
from wflmc.scenario.files import file_digests

from ..cli_tools import PATIENCE, strict
from ..conftest import FULL, count
from ..error_tools import names_key, raises_input_error
from .sweep_tools import cached_count, held_sweep, wait_until_gone

SMALL = """
[posterior]
devices = 4
examples = 40
[link]
fading = "static"
power = 0.01
[privacy]
epsilon = 8.0
delta = 0.01
[sampler]
burn_in = 20
samples = 10
chains = 4
"""
linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="finds the workers in /proc"
)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def sweep(call, small, tmp_path):
    """A sweep in this process: (exit code, the JSON or None, stderr)."""

    def run(*arguments, out="out", cache="cache", scenario=small):
        places = ["--out", tmp_path / out, "--cache", tmp_path / cache, "--json"]
        code, text, err = call("sweep", scenario, *arguments, *places)
        return code, strict(text) if text else None, err

    return run


def table(folder):
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_help_shows_ranges_as_they_are_typed(call):
    code, out, _ = call("sweep", "--help")
    assert code == 0
    assert "FIRST:LAST:STEP" in out


# Grids


@given(
    first=st.integers(-(10**6), 10**6),
    step=st.integers(-(10**4), 10**4).filter(bool),
    steps=st.integers(0, 300),
    digits=st.integers(0, 6),
)
def test_ranges_include_both_ends(first, step, steps, digits):
    def written(number):
        sign = "-" * (number < 0)
        text = str(abs(number)).rjust(digits + 1, "0")
        return f"{sign}{text[:-digits]}.{text[-digits:]}" if digits else f"{sign}{text}"

    last = first + steps * step
    grid = parse_grid(f"link.snr_db={written(first)}:{written(last)}:{written(step)}")
    assert grid.key == "link.snr_db"
    # Every value is the number that a person would have typed, to the last bit.
    assert list(map(float, grid.values)) == [
        float(written(first + i * step)) for i in range(steps + 1)
    ]
    assert all(text.lstrip("-").isdigit() for text in grid.values) == (digits == 0)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=0:1:0.1", [f"0.{i}" for i in range(10)] + ["1.0"]),
        ("a.b=0:40:2", [str(i) for i in range(0, 41, 2)]),
        ("a.b=3:-3:-3", ["3", "0", "-3"]),
        ("a.b=5:5:1", ["5"]),
        ("a.b=1e-3:3e-3:1e-3", ["0.001", "0.002", "0.003"]),
        (" a.b = 1, 2 ", ["1", "2"]),
        ("a.b=optimized,equal", ["optimized", "equal"]),
        ("a.b=[1,2],[3,4],5", ["[1,2]", "[3,4]", "5"]),
        ("a.b=dirichlet:0.1,blocks", ["dirichlet:0.1", "blocks"]),
        ("a.b=dirichlet:0.1", ["dirichlet:0.1"]),
        ("a.b='x,y',\"z\"", ["'x,y'", '"z"']),
        ("a.b=0.4/(mu+L),1/L**0.5", ["0.4/(mu+L)", "1/L**0.5"]),
        ("a.b=true,false", ["true", "false"]),
        ("a.b=inf,20", ["inf", "20"]),
    ],
)
def test_grids(text, values):
    assert parse_grid(text) == Grid("a.b", tuple(values))


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("a.b", "KEY=a:b:step"),
        ("=1,2", "KEY=a:b:step"),
        ("a.b=", "KEY=a:b:step"),
        ("a.b=1,,2", "empty"),
        ("a.b=0:1:0", "0 to 1"),
        ("a.b=0:1:-0.5", "0 to 1"),
        ("a.b=1:0:0.5", "1 to 0"),
        ("a.b=0:1:0.3", "0.9"),
        ("a.b=0:40:3", "39.0"),
        ("a.b=0:10", "a:b:step"),
        ("a.b=0:ten:1", "a:b:step"),
        ("a.b=0:inf:1", "a:b:step"),
        ("a.b=0:1:0.5,3", "either"),
        ("a.b=1,1.0", "differ"),
        ("a.b=0:1:1e-9", "1,000,000"),
        ("a.b=0:1e400:1e399", "a:b:step"),
        ("a.b=0:1:1e-999999999", "a:b:step"),
        ("a.b=x,'x'", "differ"),
        ("a.b=[1,2],[1, 2]", "differ"),
    ],
)
def test_grids_that_are_refused(text, fact):
    with raises_input_error("--grid", fact, value=text):
        parse_grid(text)


def test_the_first_key_is_the_slowest():
    grids = [Grid("a", ("1", "2")), Grid("b", ("x", "y", "z"))]
    assert points(grids) == [(a, b) for a in "12" for b in "xyz"]
    with raises_input_error("--grid", value="a"):
        points([grids[0], grids[0]])
    with raises_input_error("--grid", "1,000,000,000"):
        points([Grid(key, tuple(map(str, range(1000)))) for key in "abc"])


# Tables


def test_rows_are_what_plan_and_run_say(sweep, call, small, tmp_path):
    grids = ["--grid", "link.snr_db=10:20:10", "--grid", "policy.power=optimized,equal"]
    code, document, err = sweep(*grids, "--set", "privacy.epsilon=6")
    assert (code, err) == (0, "")
    file = tmp_path / "out" / "sweep.csv"
    assert document == {
        "file": str(file),
        "points": 4,
        "done": 4,
        "cached": 0,
        "failed": 0,
        "not_covered": [SELECTED],
    }
    rows = table(tmp_path / "out")
    assert [(r["link.snr_db"], r["policy.power"]) for r in rows] == [
        (snr, name) for snr in ("10", "20") for name in ("optimized", "equal")
    ]
    overrides = ["privacy.epsilon=6", "link.snr_db=20", "policy.power=equal"]
    options = [word for text in overrides for word in ("--set", text)]
    plan, run = (
        strict(call(command, small, *options, "--json")[1])
        for command in ("plan", "run")
    )
    last = {
        name: float(cell)
        for name, cell in rows[3].items()
        if name not in ("policy.power", "regime", "adjacency") and cell
    }
    assert rows[3]["regime"] == (plan["regime"] or "")
    assert (
        rows[3]["adjacency"]
        == plan["privacy"]["adjacency"]
        == run["adjacency"]
        == "replace"
    )
    assert last["objective"] == plan["objective"]
    assert (
        last["exact_w2_sq"]
        == max(plan["exact_w2_sq"][20:])
        == max(run["exact_w2_sq"][20:])
    )
    assert (last["w2_sq"], last["w2_sq_se"]) == (
        run["w2_sq"]["worst"],
        run["w2_sq"]["worst_se"],
    )
    assert (last["clip_rate_burn_in"], last["clip_rate_samples"]) == tuple(
        run["clip_rate"].values()
    )
    for name in (
        "ess_min",
        "ess_tail_min",
        "rhat_max",
        "epsilon_spent",
        "exact_ess_min",
    ):
        assert last[name] == run[name]
    assert rows[3]["accuracy"] == ""
    # Again: nothing is computed, and the table is the same.
    before = file.read_bytes()
    assert sweep(*grids, "--set", "privacy.epsilon=6")[1]["cached"] == 4
    assert file.read_bytes() == before
    assert not {"seconds", "host"} & set(rows[0])
    # What changes a result is computed anew.
    assert (
        sweep(*grids, "--set", "privacy.epsilon=6", "--memory", "1GiB")[1]["cached"]
        == 0
    )


def test_plans_alone(sweep, tmp_path):
    code, _, err = sweep(
        "--grid",
        "sampler.burn_in=10,auto",
        "--grid",
        "link.power=[1,1,1,2],0.1",
        "--plan-only",
    )
    assert (code, err) == (0, "")
    rows = table(tmp_path / "out")
    assert [row["link.power"] for row in rows] == ["[1,1,1,2]", "0.1"] * 2
    assert [row["burn_in"] for row in rows[:2]] == ["10", "10"]
    assert int(rows[2]["burn_in"]) > 0
    assert "w2_sq" not in rows[0]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--grid"]),
        (["--grid", "link=1,2"], ["--grid = ['link=1,2']", "KEY="]),
        (["--grid", "link.snr=1,2"], ["link.snr", "link.snr_db"]),
        (["--grid", "link.snr_db=10,loud"], ["link.snr_db", "'loud'"]),
        (["--grid", "privacy.epsilon=1,-1"], ["--grid privacy.epsilon", "-1"]),
        (["--grid", "policy.power=equal,best"], ["policy.power", "'best'"]),
        (
            ["--grid", "posterior.data=a.npz,b.npz"],
            ["posterior.data", "a.npz"],
        ),
        (
            ["--grid", "link.snr_db=1,2", "--set", "link.snr_db=3"],
            ["--set", "--grid"],
        ),
        (
            ["--grid", "link.snr_db=1,2", "--engine", "spark"],
            ["--engine", "'spark'"],
        ),
        (["--grid", "link.snr_db=1,2", "--engine", "dask:"], ["--engine"]),
        (
            ["--grid", "link.snr_db=1,2", "--workers", "2"],
            ["--workers", "--engine dask"],
        ),
    ],
)
def test_bad_input_before_anything_runs(sweep, tmp_path, arguments, parts):
    code, document, err = sweep(*arguments)
    assert (code, document) == (2, None)
    assert all(part in err for part in parts), err
    assert not (tmp_path / "out").exists()


def test_a_point_that_fails_does_not_stop_the_others(sweep, tmp_path):
    grid = ["--grid", "posterior.devices=4,100,200,5", "--plan-only"]
    for _ in range(2):
        code, document, err = sweep(*grid)
        assert code == 1
        assert (document["points"], document["done"], document["failed"]) == (4, 2, 2)
        assert "failed at posterior.devices=100:" in err
        assert [row["posterior.devices"] for row in table(tmp_path / "out")] == [
            "4",
            "5",
        ]
        failed = strict((tmp_path / "out" / "failed.json").read_text())["failed"]
        assert [entry["point"] for entry in failed] == [
            {"posterior.devices": "100"},
            {"posterior.devices": "200"},
        ]
        assert "posterior.devices = 100" in failed[0]["reason"]
    # Nothing is kept of points that failed.
    assert document["cached"] == cached_count(tmp_path / "cache") == 2
    code, document, _ = sweep("--grid", "posterior.devices=4,5", "--plan-only")
    assert (code, document["cached"]) == (0, 2)
    assert not (tmp_path / "out" / "failed.json").exists()


def scenario_with(folder, data):
    path = folder / "data.toml"
    path.write_text(SMALL.replace("examples = 40", f'data = "{data}"'))
    return path


def test_all_that_decides_a_row_is_in_its_name(small):
    task = PointTask(load_scenario(small), {}, False, None)
    other = load_scenario(small, ["sampler.seed=1"])
    tasks = [
        task,
        task._replace(plan_only=True),
        task._replace(memory=1e9),
        task._replace(scenario=other),
    ]
    assert len({key_of(task.identity) for task in tasks}) == 4


def test_results_belong_to_the_content_of_files(sweep, tmp_path):
    generator = np.random.default_rng(0)

    def write(name):
        np.savez(
            tmp_path / name,
            X=generator.standard_normal((40, 2)),
            y=generator.standard_normal(40),
        )

    write("d.npz")
    once = [
        "--set",
        "posterior.examples=40",
        "--set",
        "posterior.dim=2",
        "--grid",
        "link.snr_db=10,20",
        "--plan-only",
    ]
    assert sweep("--set", "posterior.data=d.npz", *once)[1]["cached"] == 0
    os.rename(tmp_path / "d.npz", tmp_path / "moved.npz")
    assert sweep("--set", "posterior.data=moved.npz", *once)[1]["cached"] == 2
    there = load_scenario(scenario_with(tmp_path, "moved.npz"))
    task = PointTask(there, file_digests(there), True, None)
    write("moved.npz")
    assert sweep("--set", "posterior.data=moved.npz", *once)[1]["cached"] == 0
    # A worker that has another file does not compute with it.
    with raises_input_error("posterior.data"):
        measure(task, lambda _: None)


def test_without_dask(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "wflmc.apps.studies.cluster", raising=False)
    code, _, err = sweep("--grid", "link.snr_db=1,2", "--engine", "dask")
    assert code == 2
    assert names_key(err, "--engine", "pip install 'wflmc[dask]'")


# Workers that die


def big_grid(size):
    """A grid of so many points, in two keys."""
    first = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    return [
        "--grid",
        f"privacy.epsilon=2:{first + 1}:1",
        "--grid",
        f"link.snr_db=0:{size // first - 1}:1",
    ]


@linux
@pytest.mark.skipif(
    not FULL, reason="test_engine.py kills a worker too: make test-full runs it"
)
def test_killed_workers_lose_nothing(sweep, small, tmp_path):
    """One of two workers is killed, twice in the full test; the table is that of one machine, byte for byte."""
    pytest.importorskip("distributed")
    size, kills = count(6, 200), count(1, 2)
    grid = [*big_grid(size), *([] if FULL else ["--plan-only"])]
    cache = tmp_path / "cache"
    places = ["--out", tmp_path / "out", "--json", "--engine", "dask", "--workers", "2"]
    with held_sweep(cache, 1, small, *grid, *places) as held:
        for number in range(kills):
            held.hold_at(1 + number * size // 3)
            held.wait_for(1 + number * size // 3)
            assert cached_count(cache) < size / 2 + 1
            os.kill(held.workers()[0], signal.SIGKILL)
        held.hold_at(size)
        out, err = held.process.communicate(timeout=PATIENCE)
    assert (held.process.returncode, err) == (0, "")
    assert strict(out) == {
        "file": str(tmp_path / "out" / "sweep.csv"), "points": size, "done": size, "cached": 0, "failed": 0,
        "not_covered": [SELECTED] * FULL,
    }  # fmt: skip
    assert sweep(*grid, out="alone", cache="other")[1]["done"] == size
    assert (tmp_path / "out" / "sweep.csv").read_bytes() == (
        tmp_path / "alone" / "sweep.csv"
    ).read_bytes()


@linux
def test_interrupted_and_started_again(sweep, small, tmp_path):
    """Ctrl-C reaches all processes of a terminal; what is finished is kept, and nobody goes on working."""
    pytest.importorskip("distributed")
    grid = [*big_grid(6), "--plan-only"]
    cache = tmp_path / "cache"
    with held_sweep(
        cache,
        2,
        small,
        *grid,
        "--out",
        tmp_path / "out",
        "--engine",
        "dask",
        "--workers",
        "1",
    ) as held:
        held.wait_for(2)
        workers = held.workers()
        os.killpg(held.process.pid, signal.SIGINT)
        out, err = held.process.communicate(timeout=PATIENCE)
    assert (held.process.returncode, out) == (1, "")
    assert err.startswith("wflmc: Interrupted")
    assert err.count("\n") == 1
    wait_until_gone(workers)
    done = cached_count(cache)
    assert 2 <= done < 6
    assert not (tmp_path / "out").exists()
    document = sweep(*grid)[1]
    assert (document["done"], document["cached"]) == (6, done)
    assert len(table(tmp_path / "out")) == 6


def test_no_scheduler_there(sweep, monkeypatch):
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    from wflmc.apps.studies import cluster

    monkeypatch.setitem(cluster.SETTINGS, "distributed.comm.timeouts.connect", "200ms")
    with (
        socket.socket() as taken,
        dask.config.set({"distributed.comm.timeouts.connect": "200ms"}),
    ):
        taken.bind(("127.0.0.1", 0))  # where nobody listens, nor can begin to
        address = f"dask:tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = sweep("--grid", "link.snr_db=1,2", "--engine", address)
    assert code == 2
    assert names_key(err, "--engine", address)
