"""The command line as users and scripts meet it: JSON, files, exit codes, pictures of the paper."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import wflmc

from ..cli_tools import (
    CONSTANTS,
    FADING,
    PATIENCE,
    PLAN_KEYS,
    SUMMARY_KEYS,
    listening,
    only_warnings,
    strict,
    with_set,
)


def test_plan_json(plan_of, scenario):
    document = plan_of(scenario)
    assert set(document) >= PLAN_KEYS
    assert set(document["constants"]) == CONSTANTS
    assert document["regime"] == "dp-limited"
    rounds = document["constants"]["rounds"]
    assert rounds == 51
    for name in ("gain", "threshold", "active_devices", "bound", "exact_w2_sq"):
        assert len(document[name]) == rounds, name
    assert document["objective"] == document["bound"][-1]
    assert document["gap"] <= 1e-9
    privacy = document["privacy"]
    assert set(privacy) >= {"budget", "accountant", "unit", "spent_max", "epsilon_spent", "spent"}
    assert len(privacy["spent"]) == 30
    assert privacy["spent_max"] <= privacy["budget"]
    assert privacy["epsilon_spent"] == pytest.approx(8.0, rel=1e-9)
    assert (privacy["accountant"], privacy["unit"]) == ("exact", "device")


@pytest.mark.parametrize("power", ["equal", "no-dp", "noiseless-dp", "noiseless"])
def test_plan_json_of_the_other_schemes(plan_of, scenario, power):
    document = plan_of(scenario, "--set", f"policy.power={power}", "--set", "link.snr_db=5")
    assert document["objective"] > 0
    assert (document["gap"] is None) == (power != "noiseless-dp")
    if power.startswith("noiseless"):
        assert set(document["threshold"]) == {0.0}
        assert set(document["active_devices"]) == {30}
    if power == "noiseless":
        assert [document["privacy"][k] for k in ("spent_max", "epsilon_spent", "spent")] == [None] * 3


def test_plan_for_people(call, scenario):
    code, out, err = call("plan", scenario)
    assert code == 0
    assert err == ""
    for word in ("dp-limited", "30 devices", "bound on W2²", "ε = 8", "exact accountant"):
        assert word in out


def test_plan_equals_the_python_interface(plan_of, scenario):
    import jax

    document = plan_of(scenario)
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    plan = wflmc.plan(
        posterior,
        wflmc.Link(wflmc.channel.static(1e-4), snr_db=20),
        wflmc.Privacy(8, 0.01, 30),
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=50,
        samples=1,
        schedule="all",
    )
    np.testing.assert_array_equal(document["gain"], plan.gain)
    np.testing.assert_array_equal(document["bound"], plan.bound)
    np.testing.assert_array_equal(document["exact_w2_sq"], wflmc.exact_w2_sq(posterior, plan))


def test_fading_plan_has_shares_instead_of_a_regime(plan_of, scenario):
    overrides = ["policy.power=equal", "link.fading=rayleigh", "link.power=0.01", "policy.schedule=threshold"]
    document = plan_of(scenario, *(word for text in overrides for word in ("--set", text)))
    assert document["regime"] is None
    assert sum(document["regime_share"].values()) == pytest.approx(1)
    assert min(document["active_devices"]) < 30


def test_run_writes_everything(call, scenario, tmp_path):
    import arviz

    folder = tmp_path / "new" / "run"
    code, out, err = call(
        "run", scenario, "--out", folder, "--json", "--set", "policy.power=equal", "--set", "sampler.samples=10"
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
    names = ["ledger.jsonl", "ledger.jsonl.head", "plan.json", "scenario.toml", "summary.json", "trace.nc"]
    assert sorted(path.name for path in folder.iterdir()) == names
    # The resolved scenario gives the same run, with no warning about keys that have no effect.
    again = tmp_path / "again"
    assert call("run", folder / "scenario.toml", "--out", again)[0] == 0
    np.testing.assert_array_equal(arviz.from_netcdf(again / "trace.nc").posterior["theta"], trace.posterior["theta"])
    warnings = strict((again / "plan.json").read_text())["warnings"]
    assert all("private data" in text or "times the noise" in text for text in warnings)


def test_run_from_a_saved_plan(call, plan_of, scenario, tmp_path):
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan_of(scenario)))
    first, second = tmp_path / "a", tmp_path / "b"
    assert call("run", scenario, "--out", first)[0] == 0
    assert call("run", "--plan", saved, "--out", second)[0] == 0
    one, two = (strict((folder / "summary.json").read_text()) for folder in (first, second))
    assert one["w2_sq"] == two["w2_sq"]


def test_burn_in_auto(call, plan_of, scenario):
    document = plan_of(scenario, "--set", "sampler.burn_in=auto", "--set", "policy.power=equal")
    assert 10 < document["constants"]["burn_in"] < 100
    again = plan_of(scenario, "--set", "sampler.burn_in=auto", "--set", "policy.power=equal")
    assert again["constants"] == document["constants"]
    code, _, err = call("plan", scenario, "--set", "sampler.burn_in=auto", "--set", "sampler.max_burn_in=20")
    assert code == 2
    assert "sampler.max_burn_in = 20" in err


def test_a_run_that_fails_leaves_the_folder_as_it_was(call, scenario, tmp_path, monkeypatch):
    from wflmc.runs import execution

    def lost(*_, **__):
        raise wflmc.SamplingError("A chain left the finite numbers in round 3.")

    folder = tmp_path / "run"
    assert call("run", scenario, "--out", folder)[0] == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(execution, "sample", lost)
    code, _, err = call("run", scenario, "--out", folder, "--set", "link.snr_db=3", "--set", "sampler.seed=1")
    assert code == 1
    assert "left the finite numbers" in err
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    # But for what may have been sent: the new ledger, beside the one of the run before.
    assert after.pop("ledger-1.jsonl") == before.pop("ledger.jsonl")
    assert after.pop("ledger-1.jsonl.head") == before.pop("ledger.jsonl.head")
    assert len(after.pop("ledger.jsonl").splitlines()) == 1
    assert json.loads(after.pop("ledger.jsonl.head"))["lines"] == 1
    assert after == before


def test_interrupt(call, scenario, tmp_path, monkeypatch):
    from wflmc.runs import execution

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(execution, "sample", stop)
    monkeypatch.setattr(os, "_exit", sys.exit)  # a real interrupt ends the process at once, and with it the tests
    code, _, err = call("run", scenario, "--out", tmp_path / "run")
    assert code == 1
    assert err.splitlines()[-1] == "wflmc: Interrupted; files and points that were finished are kept."


TOLD = """
from wflmc.evaluation import burn_in
block = burn_in._block
def told(*arguments):
    print("a block of compiled work", flush=True)
    return block(*arguments)
burn_in._block = told
from wflmc.cli import main
main()
"""


def test_interrupting_a_real_process(scenario):
    """Ctrl-C in the middle of compiled work: exit code 1 and the sentence, no traceback, no crash."""
    overrides = ["sampler.burn_in=auto", "sampler.step_size=1e-6", "sampler.max_burn_in=1000000"]
    with listening("-c", TOLD, "plan", scenario, *with_set(overrides)) as process:
        for _ in range(3):
            assert process.stdout.readline() == "a block of compiled work\n", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err == "wflmc: Interrupted; files and points that were finished are kept.\n"


def test_a_run_says_that_it_is_a_simulation(call, scenario):
    """Once: among the warnings of the summary, last, and for people in the text."""
    code, out, err = call("run", scenario, "--json")
    assert code == 0
    assert "simulates all devices in one process and protects nobody" in strict(out)["warnings"][-1]
    assert "--noise devices" in err
    code, out, err = call("run", scenario)
    assert out.count("protects nobody") == 1
    assert "protects nobody" not in err
    assert "private data" in err.splitlines()[-1]  # what all runs say comes last


@pytest.mark.advice
def test_plan_and_run_show_the_diagnosis(call, plan_of, scenario):
    """The same causes from the plan as from its chains, ranked, with a change that can be typed."""
    sets = ("--set", "privacy.clip=300.0")
    first, *_ = planned = plan_of(scenario, *sets)["diagnosis"]
    assert first["cause"] in ("channel noise", "privacy noise")
    assert (first["change"]["key"], first["change"]["direction"]) == ("privacy.clip", "down")
    assert f"privacy.clip = {first['change']['value']:g}" in first["text"]
    said = strict(call("run", scenario, *sets, "--json")[1])["diagnosis"]
    assert [(cause["cause"], cause["change"]) for cause in said] == [
        (cause["cause"], cause["change"]) for cause in planned
    ]
    for command in ("plan", "run"):
        assert "1. " + first["text"][:40] in " ".join(call(command, scenario, *sets)[1].split())
    assert (
        plan_of(scenario, "--set", f"privacy.clip={first['change']['value']}")["objective"]
        < plan_of(scenario, *sets)["objective"]
    )


def test_lost_chains_are_warned_of(call, scenario):
    """Two hundred rounds of burn-in under the privacy budget: the early noise is beyond what clipping can undo."""
    code, out, err = call("run", scenario, "--set", "sampler.burn_in=200", "--json")
    assert code == 0
    warnings = " ".join(strict(out)["warnings"])
    for part in ("were clipped", "above the plan's bound", "exact law without clipping"):
        assert part in warnings
        assert part in err


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["plan", "-h"]])
def test_help_is_no_error(call, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert ("Plan which devices transmit" if arguments[:1] == ["plan"] else "federate") in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["federate", "x.toml"], "Missing option '--out'."),
        (["plan", "x.toml", "--target", "much"], "Invalid value for '--target': 'much' is not a valid float."),
        (["plan"], "Missing argument 'SCENARIO'."),
    ],
)
def test_usage_errors_name_no_variable(call, arguments, says):
    assert call(*arguments) == (2, "", f"wflmc: {says} Try --help.\n")


def test_help_and_version(call):
    assert call("--version")[1] == f"wflmc {wflmc.__version__}\n"
    told = {"plan": "Scenario file (TOML)", "run": "Scenario file (TOML)", "reproduce": "fig2 fig3a", "data": "mnist"}
    told |= {"new": "NAME", "doctor": "what to install"}
    for command, part in told.items():
        code, out, _ = call(command, "--help")
        assert code == 0
        assert f"Example: wflmc {command}" in out
        assert part in out


def test_help_imports_nothing_large():
    script = (
        "import sys; from wflmc.cli import app; print({'jax', 'scipy', 'pydantic', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_a_real_process_prints_json_alone_when_piped(scenario, tmp_path):
    """Nothing but JSON on stdout, warnings alone on stderr, and compilations cached where the user's cache is.

    ArviZ cannot write to its own part of the cache, and R-hat is there all the same.
    """
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # however fast this machine is
    del environment["JAX_COMPILATION_CACHE_DIR"]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "arviz").touch()  # where a folder should be
    result = subprocess.run(
        [sys.executable, "-m", "wflmc", "run", str(scenario), "--json", *with_set(["sampler.samples=4", *FADING[:3]])],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert only_warnings(result.stderr), result.stderr
    summary = strict(result.stdout)
    assert set(summary) >= SUMMARY_KEYS
    assert summary["rhat_max"] > 1
    assert any((tmp_path / "cache" / "wflmc" / "jax").iterdir())
