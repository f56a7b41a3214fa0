"""Scenarios with softmax regression: planned, run, saved and read back."""

from __future__ import annotations

import numpy as np
import pytest

from wflmc.evaluation import calibration

from ..cli_tools import PLAN_KEYS, SUMMARY_KEYS, is_picture, strict
from ..conftest import FULL
from ..error_tools import codes_of, names_key

SOFTMAX = """
[posterior]
model = "softmax"
devices = 6
examples = 240
dim = 4
partition = "dirichlet:0.5"
[link]
power = 1.0
[privacy]
epsilon = 1000.0
delta = 0.1
clip = 100.0
[sampler]
step_size = "1/(mu+L)"
burn_in = 60
samples = 20
chains = 6
[policy]
objective = "average"
"""


@pytest.fixture
def softmax(tmp_path):
    path = tmp_path / "softmax.toml"
    path.write_text(SOFTMAX)
    return path


def test_plan(plan_of, softmax):
    document = plan_of(softmax)
    assert set(document) >= PLAN_KEYS
    assert document["exact_w2_sq"] is None
    assert document["constants"]["dim"] == 40
    assert document["constants"]["mu"] == 1
    assert document["gap"] < 1e-6
    assert "estimated-start" in codes_of(document)
    with_start = plan_of(softmax, "--set", "posterior.initial_w2_sq=3.0")
    assert with_start["constants"]["initial_w2_sq"] == 3
    assert "estimated-start" not in codes_of(with_start)


def test_a_plan_without_a_bound_is_not_solved_for_it(call, softmax):
    long_steps = ("--set", "sampler.step_size=2.5/L")
    question = ("--solve-for", "link.snr_db", "--target", "1")
    code, out, err = call("plan", softmax, *long_steps, *question)
    assert code == 2
    assert out == ""
    assert names_key(err, "--metric", "bound")


def test_a_plan_without_a_bound_is_shown(call, softmax):
    options = ("--set", "sampler.step_size=2.5/L", "--no-advice")
    code, out, err = call("plan", softmax, *options)
    assert code == 0, err
    (row,) = [line for line in out.splitlines() if line.startswith("bound on W2²")]
    assert "2/L" in row
    assert "kinetic" not in row


def test_run(call, softmax, tmp_path):
    code, out, err = call("run", softmax, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    summary = strict(out)
    assert set(summary) >= SUMMARY_KEYS
    assert summary["w2_sq"] is None
    assert summary["exact_w2_sq"] is None
    assert 0.3 < summary["accuracy"] < 1
    assert 0 < summary["ece"] < 0.3
    assert 0 < summary["nll"] < 2.3
    assert 0 < summary["brier"] < 1
    assert sum(summary["reliability"]["share"]) == pytest.approx(1)
    assert {"trace.nc", "plan.json", "summary.json", "scenario.toml"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert all(
        is_picture(tmp_path / "out" / f"reliability.{suffix}")
        for suffix in ("png", "svg")
    )
    again = strict(call("run", "--plan", tmp_path / "out" / "plan.json", "--json")[1])
    assert again["nll"] == summary["nll"]
    text = call("run", softmax)[1]
    assert f"accuracy {summary['accuracy']:.4f}" in text
    other = strict(call("run", tmp_path / "out" / "scenario.toml", "--json")[1])
    assert other["ece"] == summary["ece"]


def test_scores_are_those_of_the_saved_chains(call, softmax, tmp_path):
    """Each chain predicts with the mean over its draws, then scores are averaged over chains: from trace.nc."""
    import xarray as xr

    generator = np.random.default_rng(0)
    X, truth = generator.standard_normal((300, 3)), generator.standard_normal((3, 4))
    y = np.argmax(X @ truth + generator.gumbel(size=(300, 4)), axis=1)
    np.savez(tmp_path / "d.npz", X=X[:200], y=y[:200], X_test=X[200:], y_test=y[200:])
    keys = [
        "posterior.data=d.npz",
        "posterior.examples=200",
        "posterior.dim=3",
        "posterior.intercept=true",
    ]
    code, out, err = call(
        "run",
        softmax,
        *[w for k in keys for w in ("--set", k)],
        "--out",
        tmp_path / "o",
        "--json",
    )
    assert code == 0, err
    theta = xr.open_datatree(tmp_path / "o" / "trace.nc")["posterior"]["theta"].values
    assert theta.shape == (6, 20, 16)
    features = np.column_stack([X[200:], np.ones(100)])
    logits = np.einsum(
        "nd,abcd->abnc", features, theta.reshape(6, 20, 4, 4).astype(float)
    )
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    scores = calibration(p.mean(1), y[200:])
    for name in ("accuracy", "ece", "nll", "brier"):
        assert strict(out)[name] == pytest.approx(
            getattr(scores, name).mean(), rel=1e-4
        )


def test_without_a_test_set_there_are_no_scores(call, softmax, tmp_path):
    generator = np.random.default_rng(0)
    table = np.column_stack(
        [generator.standard_normal((60, 2)), generator.integers(0, 3, 60)]
    )
    np.savetxt(tmp_path / "d.csv", table, delimiter=",")
    keys = ["posterior.data=d.csv", "posterior.examples=60", "posterior.dim=2"]
    code, out, err = call(
        "run",
        softmax,
        *[w for k in keys for w in ("--set", k)],
        "--out",
        tmp_path / "o",
        "--json",
    )
    assert code == 0, err
    assert strict(out)["accuracy"] is None
    assert strict(out)["reliability"] is None
    assert not (tmp_path / "o" / "reliability.png").exists()


@pytest.mark.skipif(not FULL, reason="four seconds of MNIST: make test-full runs it")
def test_mnist(plan_of, softmax, mnist_folder, monkeypatch, call, tmp_path):
    monkeypatch.setenv("WFLMC_DATA", str(mnist_folder))
    keys = [
        "posterior.data=mnist",
        "posterior.examples=600",
        "posterior.dim=8",
        "posterior.partition=by-label",
    ]
    changes = [word for key in keys for word in ("--set", key)]
    document = plan_of(softmax, *changes)
    assert document["constants"]["dim"] == 80
    summary = strict(
        call("run", softmax, *changes, "--set", "privacy.clip=1000.0", "--json")[1]
    )
    assert summary["accuracy"] > 0.15
    (tmp_path / "default.toml").write_text(
        '[posterior]\nmodel = "softmax"\ndata = "mnist"\n'
    )
    default = plan_of(tmp_path / "default.toml", "--set", "posterior.initial_w2_sq=1.0")
    assert default["constants"]["dim"] == 300
    assert default["scenario"]["posterior"]["examples"] == 12_000


@pytest.mark.parametrize(
    ("changes", "key", "fact"),
    [
        (
            ["posterior.model=gaussian", "posterior.data=mnist"],
            "posterior.data",
            "posterior.model = 'softmax'",
        ),
        (["posterior.data=fashion"], "posterior.data", "'fashion-mnist'"),
        (["posterior.mu=1e9"], "posterior.mu", "L"),
    ],
)
def test_bad_input(call, softmax, changes, key, fact):
    code, out, err = call(
        "plan", softmax, *[word for text in changes for word in ("--set", text)]
    )
    assert (code, out) == (2, "")
    assert names_key(err, key, fact)


def test_bad_test_sets(call, softmax, tmp_path):
    X, y = np.ones((30, 4)), np.arange(30) % 3
    for X_test, y_test, key, facts in (
        (np.ones((5, 3)), np.zeros(5), "posterior.features", ("X_test", "(5, 3)")),
        (np.ones((5, 4)), np.full(5, 7), "posterior.data", ("y[0]", "0, 1, 2")),
        (np.ones((5, 4)), np.zeros(4), "posterior.data", ("(5, 4)", "(4,)")),
    ):
        np.savez(tmp_path / "d.npz", X=X, y=y, X_test=X_test, y_test=y_test)
        changes = ["posterior.data=d.npz", "posterior.examples=30"]
        code, _, err = call(
            "plan", softmax, *[word for text in changes for word in ("--set", text)]
        )
        assert code == 2
        assert names_key(err, key, *facts)


def test_the_exact_law_is_not_to_be_had(call, softmax):
    code, _, err = call(
        "plan",
        softmax,
        "--solve-for",
        "link.snr_db",
        "--target",
        "1",
        "--metric",
        "exact",
    )
    assert code == 2
    assert names_key(err, "--metric", "'bound'", "posterior.model")
