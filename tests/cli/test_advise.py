"""`wflmc advise`: a finished run, a stopped one, a scenario file, and what is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from wflmc.runs import execution
from wflmc.support.errors import InputError

from ..cli_tools import strict
from ..error_tools import names_key

NOISY = (
    "--set",
    "privacy.clip=300.0",
    "--set",
    "sampler.samples=20",
    "--set",
    "sampler.chains=4",
)

SMALL = """
[posterior]
data = "{data}"
devices = 3
[sampler]
burn_in = 10
samples = 5
chains = 4
"""


@pytest.fixture
def run_folder(call, scenario, tmp_path):
    """A run whose clip is far too large."""
    folder = tmp_path / "run"
    code, _, err = call("run", scenario, *NOISY, "--out", folder)
    assert code == 0, err
    return folder


def advice_of(call, *arguments):
    code, out, err = call("advise", *arguments, "--json")
    assert code == 0, err
    assert err == ""
    return strict(out)


def test_a_run_makes_one_plan_and_no_advice(call, scenario, tmp_path, plans_made):
    code, out, _ = call("run", scenario, *NOISY, "--out", tmp_path / "run", "--json")
    assert code == 0
    assert plans_made() == 1
    assert strict(out)["diagnosis"] is None
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["diagnosis"] is None
    )
    assert not (tmp_path / "run" / "advice.json").exists()
    assert "diagnosis" not in call("run", scenario, *NOISY)[1]


@pytest.mark.parametrize(("objective", "looks"), [("worst", False), ("exact", True)])
def test_advice_looks_at_data_where_the_plan_does(call, scenario, objective, looks):
    public = [
        "posterior.mu=0.5",
        "posterior.L=2000.0",
        "posterior.initial_w2_sq=5.0",
        f"policy.objective={objective}",
    ]
    overrides = [part for setting in public for part in ("--set", setting)]
    document = advice_of(call, scenario, *overrides)
    names = [entry["name"] for entry in document["not_covered"]]
    assert ("advice" in names) is looks


def test_advice_on_a_run(call, scenario, run_folder):
    """The causes are those of its plan; the evidence is what its chains have shown."""
    before = {
        path.name: path.read_bytes() for path in run_folder.iterdir() if path.is_file()
    }
    document = advice_of(call, run_folder)
    first, *_ = document["diagnosis"]
    assert (first["change"]["key"], first["change"]["direction"]) == (
        "privacy.clip",
        "down",
    )
    planned = strict(call("plan", scenario, *NOISY, "--json")[1])["diagnosis"]
    assert [cause["change"] for cause in document["diagnosis"]] == [
        cause["change"] for cause in planned
    ]
    assert document["finished"] is True
    assert document["not_covered"][0]["name"] == "advice"
    written = strict((run_folder / "advice.json").read_text())
    assert written["diagnosis"] == document["diagnosis"]
    assert document["file"] == str(run_folder / "advice.json")
    after = {
        path.name: path.read_bytes()
        for path in run_folder.iterdir()
        if path.name in before
    }
    assert after == before
    code, out, err = call("advise", run_folder)
    assert (code, err) == (0, "")
    assert f"1. {first['text']}" in out
    assert "epsilon does not cover" in out
    assert call("report", run_folder)[0] == 0


def test_advice_on_a_stopped_run_is_from_its_plan(
    call, scenario, tmp_path, monkeypatch
):
    def stop(*_, **__):
        raise InputError("stop", None, "what this test does")

    monkeypatch.setattr(execution, "sample_chains", stop)
    folder = tmp_path / "run"
    call("run", scenario, *NOISY, "--out", folder)
    assert (folder / ".checkpoint" / "plan.json").exists()
    document = advice_of(call, folder)
    assert document["finished"] is False
    assert document["diagnosis"][0]["change"]["key"] == "privacy.clip"
    assert "not finished" in call("advise", folder)[1]


def test_advice_on_a_scenario_is_that_of_its_plan(call, scenario, tmp_path):
    before = sorted(tmp_path.iterdir())
    document = advice_of(call, scenario, *NOISY)
    assert document["file"] is None
    planned = strict(call("plan", scenario, *NOISY, "--json")[1])
    assert document["diagnosis"] == planned["diagnosis"]
    assert sorted(tmp_path.iterdir()) == before


def test_a_clip_of_examples_is_among_what_is_proposed(call, scenario):
    small = (
        "--set",
        "privacy.unit=record",
        "--set",
        "privacy.example_clip=0.1",
        "--set",
        "sampler.samples=20",
    )
    keys = {
        cause["change"]["key"]
        for cause in advice_of(call, scenario, *small)["diagnosis"]
        if cause["change"]
    }
    assert "privacy.example_clip" in keys


def test_bad_input(call, run_folder, scenario, tmp_path):
    """One sentence that names what was given, and exit code 2."""
    damaged = shutil.copytree(run_folder, tmp_path / "damaged")
    (damaged / "plan.json").write_text("{")
    federation = tmp_path / "federation_folder"
    (federation / "federation").mkdir(parents=True)
    cases = {
        (tmp_path,): ("RUN", "wflmc run"),
        (tmp_path / "missing",): ("RUN", "wflmc run"),
        (damaged,): ("RUN", damaged / "plan.json"),
        (federation,): ("RUN", "wflmc federate"),
        (run_folder, "--set", "privacy.clip=3"): ("--set", "privacy.clip=3"),
    }
    for arguments, (key, fact) in cases.items():
        code, out, err = call("advise", *arguments)
        assert code == 2, err
        assert out == ""
        assert names_key(err, key, fact)
    assert not (damaged / "advice.json").exists()


def test_a_run_whose_data_are_gone_is_refused(call, tmp_path):
    generator = np.random.default_rng(0)
    data = tmp_path / "data.npz"
    np.savez(
        data, X=generator.standard_normal((60, 2)), y=generator.standard_normal(60)
    )
    path = tmp_path / "scenario.toml"
    path.write_text(SMALL.format(data=data))
    assert call("run", path, "--out", tmp_path / "run")[0] == 0
    data.unlink()
    code, out, err = call("advise", tmp_path / "run")
    assert (code, out) == (2, "")
    assert names_key(err, "RUN", "posterior.data", data)
