"""`wflmc run` as users and scripts meet it: JSON, files, saved plans, warnings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import wflmc

from ..cli_tools import PLAN_KEYS, SUMMARY_KEYS, only_warnings, strict
from ..error_tools import codes_of, names_key, text_of


def test_run_writes_everything(call, scenario, tmp_path):
    import arviz

    folder = tmp_path / "new" / "run"
    code, out, err = call(
        "run",
        scenario,
        "--out",
        folder,
        "--json",
        "--set",
        "policy.power=equal",
        "--set",
        "sampler.samples=10",
    )
    assert code == 0
    assert only_warnings(err)
    summary = strict(out)
    assert len(summary["warnings"]) == err.count("\n")
    assert set(summary) >= SUMMARY_KEYS
    assert strict((folder / "summary.json").read_text()) == summary
    assert len(summary["w2_sq"]["per_round"]) == 10
    assert summary["w2_sq"]["worst"] == max(summary["w2_sq"]["per_round"])
    assert set(summary["clip_rate"]) == {"burn_in", "samples"}
    trace = arviz.from_netcdf(folder / "trace.nc")
    assert trace.posterior["theta"].shape == (20, 10, 5)
    assert set(strict((folder / "plan.json").read_text())) >= PLAN_KEYS
    names = {
        "digests.json",
        "ledger.jsonl",
        "ledger.jsonl.head",
        "plan.json",
        "plan.npz",
        "scenario.toml",
        "summary.json",
        "trace.nc",
    }
    assert {path.name for path in folder.iterdir()} == names
    # The resolved scenario gives the same run, with no warning about keys that have no effect.
    again = tmp_path / "again"
    assert call("run", folder / "scenario.toml", "--out", again)[0] == 0
    np.testing.assert_array_equal(
        arviz.from_netcdf(again / "trace.nc").posterior["theta"],
        trace.posterior["theta"],
    )
    codes = codes_of(strict((again / "plan.json").read_text()))
    assert set(codes) <= {"data-constants", "excess-noise"}


def test_run_from_a_saved_plan(call, plan_of, scenario, tmp_path):
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan_of(scenario)))
    first, second = tmp_path / "a", tmp_path / "b"
    assert call("run", scenario, "--out", first)[0] == 0
    assert call("run", "--plan", saved, "--out", second)[0] == 0
    summary, repeated = (
        strict((folder / "summary.json").read_text()) for folder in (first, second)
    )
    assert summary["w2_sq"] == repeated["w2_sq"]


def test_a_run_that_fails_leaves_the_folder_as_it_was(
    call, scenario, tmp_path, monkeypatch
):
    from wflmc.runs import execution

    def lost(*_, **__):
        raise wflmc.SamplingError("A chain left the finite numbers in round 3.")

    folder = tmp_path / "run"
    assert call("run", scenario, "--out", folder)[0] == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(execution, "sample", lost)
    code, _, err = call(
        "run",
        scenario,
        "--out",
        folder,
        "--set",
        "link.snr_db=3",
        "--set",
        "sampler.seed=1",
    )
    assert code == 1
    assert "left the finite numbers" in err
    after = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
    }
    # But for what may have been sent: the new ledger, beside the one of the run before.
    assert after.pop("ledger-1.jsonl") == before.pop("ledger.jsonl")
    assert after.pop("ledger-1.jsonl.head") == before.pop("ledger.jsonl.head")
    assert len(after.pop("ledger.jsonl").splitlines()) == 1
    assert json.loads(after.pop("ledger.jsonl.head"))["lines"] == 1
    assert after == before


def test_a_scenario_of_ones_own_is_not_replaced(call, scenario, tmp_path):
    """That of a run, which is as the run would write it, may be."""
    mine = tmp_path / "mine" / "scenario.toml"
    mine.parent.mkdir()
    mine.write_text("# my own words\n" + Path(scenario).read_text())
    before = mine.read_text()
    code, _, err = call("run", mine, "--out", mine.parent)
    assert code == 2
    assert names_key(err, "--out", mine.parent, "scenario.toml")
    assert [path.name for path in mine.parent.iterdir()] == ["scenario.toml"]
    assert mine.read_text() == before
    for source in (mine, tmp_path / "results" / "scenario.toml"):
        assert call("run", source, "--out", tmp_path / "results")[0] == 0


def test_a_run_says_that_it_is_a_simulation(call, scenario):
    """Once: among the warnings of the summary, last, and for people in the text."""
    code, out, err = call("run", scenario, "--json")
    assert code == 0
    assert codes_of(strict(out))[-1] == "simulated"
    assert "--noise devices" in err
    code, out, err = call("run", scenario)
    assert out.count("protects nobody") == 1
    assert "protects nobody" not in err
    assert "private data" in err.splitlines()[-1]  # what all runs say comes last


def test_lost_chains_are_warned_of(call, scenario):
    """Two hundred rounds of burn-in under the privacy budget: the early noise is beyond what clipping can undo."""
    code, out, err = call("run", scenario, "--set", "sampler.burn_in=200", "--json")
    assert code == 0
    summary = strict(out)
    for code in ("clipped-gradients", "above-bound", "clipping-keeps-away"):
        assert text_of(summary, code) in err
