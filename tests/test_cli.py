"""The command line as users and scripts meet it: JSON, files, exit codes, sentences."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import tomllib

import numpy as np
import pytest

import wflmc
from wflmc.cli import main

STATIC = """
[link]
fading = "static"
power = 1e-4
[privacy]
epsilon = 8.0
delta = 0.01
[sampler]
burn_in = 50
samples = 1
chains = 20
[policy]
schedule = "all"
"""

PLAN_KEYS = {
    "constants", "regime", "regime_share", "gain", "threshold", "active_devices", "bound", "objective", "lower_bound",
    "gap", "privacy", "exact_w2_sq", "warnings", "seconds",
}  # fmt: skip
CONSTANTS = {
    "mu", "L", "step_size", "gamma", "dim", "devices", "rounds", "burn_in", "samples", "initial_w2_sq",
}  # fmt: skip
SUMMARY_KEYS = {
    "w2_sq", "exact_w2_sq", "rhat_max", "ess_min", "clip_rate", "accuracy", "ece", "nll", "epsilon_spent", "seconds",
}  # fmt: skip


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "scenario.toml"
    path.write_text(STATIC)
    return path


def only_warnings(err):
    return all(line.startswith("wflmc: warning: ") for line in err.splitlines())


def refuse(constant):
    raise AssertionError(f"{constant} in JSON")


def strict(text):
    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["wflmc", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return run


@pytest.fixture
def plan_of(call):
    def run(*arguments):
        code, out, err = call("plan", *arguments, "--json")
        assert code == 0, err
        assert only_warnings(err)
        document = strict(out)
        assert err.count("\n") == len(document["warnings"])
        return document

    return run


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
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "scenario.toml", "summary.json", "trace.nc"]
    # The resolved scenario gives the same run, with no warning about keys that have no effect.
    again = tmp_path / "again"
    assert call("run", folder / "scenario.toml", "--out", again)[0] == 0
    np.testing.assert_array_equal(arviz.from_netcdf(again / "trace.nc").posterior["theta"], trace.posterior["theta"])
    assert strict((again / "plan.json").read_text())["warnings"] == []


def test_run_from_a_saved_plan(call, plan_of, scenario, tmp_path):
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan_of(scenario)))
    first, second = tmp_path / "a", tmp_path / "b"
    assert call("run", scenario, "--out", first)[0] == 0
    assert call("run", "--plan", saved, "--out", second)[0] == 0
    one, two = (strict((folder / "summary.json").read_text()) for folder in (first, second))
    assert one["w2_sq"] == two["w2_sq"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda plan: plan.update(gain=[g * 1.01 for g in plan["gain"]]), "gain"),
        (lambda plan: plan.update(gain=plan["gain"][:-1]), "gain"),
        (lambda plan: plan["gain"].__setitem__(3, None), "gain"),
        (lambda plan: plan["active_devices"].__setitem__(3, 7), "active_devices"),
        (lambda plan: plan["scenario"]["link"].update(power=-1.0), "link.power"),
        (lambda plan: plan.pop("constants"), "--plan"),
        (lambda plan: plan["constants"].update(mu=1.0), "constants.mu"),
        (lambda plan: plan["constants"].update(burn_in=float("inf")), "--plan"),
        (lambda plan: plan["privacy"].update(budget=9.0), "privacy.budget"),
        (lambda plan: plan["scenario"]["privacy"].update(epsilon=50.0), "privacy.budget"),
        (lambda plan: plan["scenario"].update(posterior={"seed": 5}), "constants.mu"),
        (lambda plan: plan.update(scenario=[]), "--plan"),
    ],
)
def test_a_tampered_plan_is_refused(call, plan_of, scenario, tmp_path, change, part):
    document = plan_of(scenario)
    change(document)
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(document))
    code, out, err = call("run", "--plan", saved, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert part in err
    assert not (tmp_path / "out").exists()


def test_burn_in_auto(call, plan_of, scenario):
    document = plan_of(scenario, "--set", "sampler.burn_in=auto", "--set", "policy.power=equal")
    assert 10 < document["constants"]["burn_in"] < 100
    again = plan_of(scenario, "--set", "sampler.burn_in=auto", "--set", "policy.power=equal")
    assert again["constants"] == document["constants"]
    code, _, err = call("plan", scenario, "--set", "sampler.burn_in=auto", "--set", "sampler.max_burn_in=20")
    assert code == 2
    assert "sampler.max_burn_in = 20" in err


def test_a_plan_outlives_rounding_but_not_other_data(call, plan_of, scenario, tmp_path):
    generator = np.random.default_rng(0)
    X, y = generator.standard_normal((90, 3)), generator.standard_normal(90)
    np.savez(tmp_path / "d.npz", X=X, y=y)
    np.save(tmp_path / "h.npy", generator.rayleigh(0.1, (60, 30)))
    overrides = ["posterior.data=d.npz", "link.fading=file", "link.gains=h.npy"]
    document = plan_of(scenario, *with_set(overrides))
    document["constants"]["mu"] *= 1 + 1e-13
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(document))
    assert call("run", "--plan", saved)[0] == 0
    np.save(tmp_path / "h.npy", generator.rayleigh(0.1, (60, 30)))
    assert "link.gains" in call("run", "--plan", saved)[2]
    np.savez(tmp_path / "d.npz", X=X, y=-y)
    code, _, err = call("run", "--plan", saved)
    assert code == 2
    assert "posterior.data" in err


def test_a_plan_file_that_is_none(call, tmp_path):
    (tmp_path / "p.json").write_text("[1, 2")
    for name in ("p.json", "missing.json"):
        code, out, err = call("run", "--plan", tmp_path / name)
        assert (code, out) == (2, "")
        assert name in err
        assert "Error" not in err


def test_a_run_that_fails_leaves_the_folder_as_it_was(call, scenario, tmp_path, monkeypatch):
    import wflmc.cli.commands as commands

    def lost(*_, **__):
        raise wflmc.SamplingError("A chain left the finite numbers in round 3.")

    folder = tmp_path / "run"
    assert call("run", scenario, "--out", folder)[0] == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(commands, "sample", lost)
    code, _, err = call("run", scenario, "--out", folder, "--set", "link.snr_db=3")
    assert code == 1
    assert "left the finite numbers" in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_folders_that_cannot_be_written(call, scenario, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", ""):
        for command in (["run", scenario], ["reproduce", "fig2"]):
            code, _, err = call(*command, "--out", out)
            assert code == 2
            assert "--out" in err


def test_interrupt(call, scenario, tmp_path, monkeypatch):
    import wflmc.cli.commands as commands

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "sample", stop)
    monkeypatch.setattr(os, "_exit", sys.exit)  # a real interrupt ends the process at once, and with it the tests
    code, _, err = call("run", scenario, "--out", tmp_path / "run")
    assert code == 1
    assert err.splitlines()[-1] == "wflmc: Interrupted; files that were finished are kept."


def test_interrupting_a_real_process(scenario):
    """Ctrl-C in the middle of compiled work: exit code 1 and the sentence, no traceback, no crash."""
    arguments = [
        "--set",
        "sampler.burn_in=auto",
        "--set",
        "sampler.step_size=1e-6",
        "--set",
        "sampler.max_burn_in=1000000",
    ]
    command = [sys.executable, "-m", "wflmc", "plan", str(scenario), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, ""), err
    assert err == "wflmc: Interrupted; files that were finished are kept.\n"


def test_lost_chains_are_warned_of(call, scenario):
    """Two hundred rounds of burn-in under the privacy budget: the early noise is beyond what clipping can undo."""
    code, out, err = call("run", scenario, "--set", "sampler.burn_in=200", "--json")
    assert code == 0
    warnings = " ".join(strict(out)["warnings"])
    for part in ("were clipped", "above the plan's bound", "exact law without clipping"):
        assert part in warnings
        assert part in err


def test_usage_errors(call):
    for arguments in (["plna"], ["plan"], ["plan", "--what"]):
        code, out, err = call(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("wflmc: ")
        assert err.count("\n") == 1


def write_gains(path, table):
    np.save(path / "h.npy", table)


BAD = [
    (["privacy.epsilon=-1"], "privacy.epsilon"),
    (["privacy.epsilon=nan"], "privacy.epsilon"),
    (["privacy.delta=1.0"], "privacy.delta"),
    (["privacy.delta=0.0"], "privacy.delta"),
    (["privacy.clip=0"], "privacy.clip"),
    (["sampler.step_size=1.0"], "sampler.step_size"),
    (["sampler.step_size=2/L"], "sampler.step_size"),
    (["sampler.step_size=__import__('os')"], "sampler.step_size"),
    (["sampler.step_size=9**9**9**9"], "sampler.step_size"),
    (["sampler.step_size=1/(mu-mu)"], "sampler.step_size"),
    (["sampler.burn_in=later"], "sampler.burn_in"),
    (["sampler.samples=0"], "sampler.samples"),
    (["sampler.chains=2.5"], "sampler.chains"),
    (["sampler.chains=true"], "sampler.chains"),
    (["posterior.devices=1201"], "posterior.devices"),
    (["posterior.devices=many"], "posterior.devices"),
    (["posterior.partition=sorted"], "posterior.partition"),
    (["posterior.data=missing.npz"], "posterior.data"),
    (["posterior.data=nothing"], "posterior.data"),
    (["posterior.model=tree"], "posterior.model"),
    (["posterior.mu=5000"], "posterior.mu"),
    (["posterior.L=1.5"], "posterior.L"),
    (["posterior.prior_std=1e308"], "posterior.prior_std"),
    (["posterior.dim=100000000000"], "posterior.dim"),
    (["posterior.seed=4294967296"], "posterior.seed"),
    (["sampler.chains=99999999999"], "sampler.chains"),
    (["link.noise_power=1e-40"], "link.noise_power"),
    (["link.power=[1.0, -2.0]"], "link.power"),
    (["policy.max_round_noise=0.0"], "policy.max_round_noise"),
    (["policy.max_round_noise=0.001"], "policy.max_round_noise"),
    (["link.snr_db=10\nfoo=3"], "--set"),
    (["posterior.mu=1e-30"], "sampler.step_size"),
    (["posterior.data=~nobody/d.csv"], "posterior.data"),
    (["policy.max_round_noise=1e-300"], "policy.max_round_noise"),
    (["link.snrdb=3"], "link.snrdb"),
    (["links.snr_db=3"], "links"),
    (["link.fading=file"], "link.gains"),
    (["link.fading=file", "link.gains=missing.npy"], "link.gains"),
    (["link.power=[1.0, 2.0]"], "link.power"),
    (["link.snr_db=1e9"], "link.snr_db"),
    (["policy.power=best"], "policy.power"),
    (["snr_db=3"], "--set"),
    (["link.snr_db"], "--set"),
]


@pytest.mark.parametrize(("overrides", "key"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_sentence_and_exit_code_2(call, scenario, tmp_path, overrides, key):
    arguments = [word for text in overrides for word in ("--set", text)]
    code, out, err = call("run", scenario, "--out", tmp_path / "out", "--json", *arguments)
    assert code == 2
    assert out == ""
    assert key in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "part"),
    [
        (np.ones((51, 29)), "30 devices"),
        (np.ones((50, 30)), "51 rounds"),
        (np.ones(51), "rounds, devices"),
        (np.zeros((51, 30)), "non-zero"),
        (np.full((51, 30), np.nan), "finite"),
    ],
)
def test_bad_gain_files(call, scenario, tmp_path, table, part):
    write_gains(tmp_path, table)
    code, out, err = call("plan", scenario, "--set", "link.fading=file", "--set", "link.gains=h.npy", "--json")
    assert (code, out) == (2, "")
    assert "link.gains" in err
    assert part in err


def test_gain_files_are_used_as_they_are(plan_of, scenario, tmp_path):
    table = np.random.default_rng(0).rayleigh(0.1, (60, 30)) * np.exp(1j)
    write_gains(tmp_path, table)
    document = plan_of(
        scenario, "--set", "link.fading=file", "--set", "link.gains=h.npy", "--set", "policy.power=no-dp",
    )  # fmt: skip
    power = (np.array(document["gain"]) * 30) ** 2 / np.min(np.abs(table[:51]), axis=1) ** 2
    cap = document["constants"]["step_size"] / 2
    limit = np.minimum(5 * 100.0, cap * 900 / np.min(np.abs(table[:51]), axis=1) ** 2)
    np.testing.assert_allclose(power, limit, rtol=1e-9)
    assert any("link.power has no effect" in warning for warning in document["warnings"])


def test_a_byte_order_mark_is_no_error(plan_of, tmp_path):
    path = tmp_path / "bom.toml"
    path.write_text("\ufeff" + STATIC, encoding="utf-8")
    assert plan_of(path)["regime"] == "dp-limited"


@pytest.mark.parametrize("text", ["not toml", "[link\n", "\xff\xfe"])
def test_files_that_are_not_toml(call, tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    code, _, err = call("plan", path)
    assert code == 2
    assert "bad.toml" in err
    assert err.count("\n") == 1


def test_missing_scenario(call, tmp_path):
    code, _, err = call("plan", tmp_path / "none.toml")
    assert code == 2
    assert "none.toml" in err
    assert call("run")[0] == 2
    assert call("run", "a.toml", "--plan", "b.json")[0] == 2


def test_misspelt_keys_get_a_suggestion(call, scenario):
    assert "did you mean link.snr_db?" in call("plan", scenario, "--set", "link.snrdb=3")[2]
    assert "did you mean privacy.epsilon?" in call("plan", scenario, "--set", "sampler.epsilon=3")[2]
    assert "did you mean [link]?" in call("plan", scenario, "--set", "lnk.snr_db=3")[2]


@pytest.mark.parametrize(
    "override",
    [
        "posterior.model=softmax", "posterior.preconditioner=whiten", "privacy.unit=record", "link.csi_error=0.1",
        "link.downlink_snr_db=30.0", "sampler.dynamics=kinetic", "policy.schedule=unbiased", "policy.objective=exact",
        "policy.csi=causal", "posterior.prior_on=whitened",
    ],
)  # fmt: skip
def test_features_to_come_are_refused_by_name(call, scenario, override):
    code, _, err = call("plan", scenario, "--set", override)
    assert code == 2
    assert override.split("=")[0] in err
    assert "not built yet" in err


FULL_SCENARIO = """
[posterior]
model = "gaussian"
devices = 30
data = "synthetic"
examples = 1200
dim = 5
intercept = false
partition = "iid"
preconditioner = "none"
prior_std = 1.0
prior_on = "parameters"
mu = 0.0
seed = 0
[link]
fading = "rayleigh"
power = 0.01
rician_k = 3.0
correlation = 0.0
csi_error = 0.0
downlink_snr_db = inf
gains = "h.npy"
snr_db = 20.0
noise_power = 1.0
seed = 0
[privacy]
epsilon = 15.0
delta = 0.01
clip = 30.0
unit = "device"
example_clip = 9.0
accountant = "exact"
[sampler]
step_size = "0.4/(mu+L)"
burn_in = 50
samples = 50
chains = 100
init = "prior"
dynamics = "overdamped"
friction = 2.0
seed = 0
[policy]
power = "equal"
schedule = "threshold"
objective = "worst"
csi = "full"
bound = "corrected"
max_round_noise = inf
"""


def test_every_key_is_accepted_and_idle_ones_are_listed(plan_of, tmp_path):
    path = tmp_path / "full.toml"
    path.write_text(FULL_SCENARIO)
    warnings = " ".join(plan_of(path)["warnings"])
    for key in ("link.rician_k", "link.gains", "privacy.example_clip", "sampler.friction"):
        assert f"{key} has no effect" in warnings
    for key in ("link.power", "link.seed", "policy.schedule", "posterior.mu"):
        assert key not in warnings


def test_every_key_has_a_default(plan_of, tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    document = plan_of(path)
    assert document["constants"]["rounds"] == 100
    assert document["privacy"]["budget"] is None
    assert document["privacy"]["epsilon_spent"] is None
    assert document["warnings"] == []


def test_public_constants(plan_of, scenario):
    given = plan_of(
        scenario, "--set", "posterior.mu=900.0", "--set", "posterior.L=1500.0", "--set", "posterior.initial_w2_sq=9.0"
    )
    constants = given["constants"]
    assert (constants["mu"], constants["L"], constants["initial_w2_sq"]) == (900.0, 1500.0, 9.0)
    assert constants["step_size"] == pytest.approx(0.4 / 2400)
    assert not any("bound does not hold" in warning for warning in given["warnings"])
    wrong = plan_of(scenario, "--set", "posterior.L=1200.0")
    assert any("posterior.L" in warning for warning in wrong["warnings"])


@pytest.mark.parametrize("kind", ["npz", "csv", "bare.csv"])
def test_own_data(plan_of, call, scenario, tmp_path, kind):
    generator = np.random.default_rng(0)
    X, y = generator.standard_normal((90, 3)), generator.standard_normal(90)
    name = f"data.{kind}"
    if kind == "npz":
        np.savez(tmp_path / name, X=X, y=y)
    elif kind == "csv":
        np.savetxt(tmp_path / name, np.column_stack([y, X]), delimiter=",", header="y,a,b,c", comments="")
    else:
        np.savetxt(tmp_path / name, np.column_stack([X, y]), delimiter=",")
    document = plan_of(scenario, "--set", f"posterior.data={name}", "--set", "policy.power=equal")
    eigenvalues = np.linalg.eigvalsh(X.T @ X + np.eye(3))
    assert document["constants"]["mu"] == pytest.approx(eigenvalues[0], rel=1e-9)
    assert document["constants"]["dim"] == 3
    code, _, err = call("plan", scenario, "--set", f"posterior.data={name}", "--set", "posterior.dim=4")
    assert code == 2
    assert "posterior.dim = 4" in err


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("a,b\n1,2\n", "exactly one column y"),
        ("y,a\n1,x\n", "line 2 has 'x'"),
        ("y,a\n1,\n", "line 2 has ''"),
        ("x1,x2,y\n0,0.1,0.2,0.3\n", "3 columns; line 2 has 4"),
        ('"a,1",b,y\n1,2,3,4\n', "3 columns; line 2 has 4"),
        ("1;2\n3;4\n", "exactly one column y"),
        ("y,a\n", "at least one row"),
        (",a,y\n0,1,2\n", "all have a name"),
        ("", "at least one row"),
        ("1\n2\n", "at least one row"),
        ("\xff\xfe", "UTF-8"),
    ],
)
def test_bad_csv(call, scenario, tmp_path, content, part):
    (tmp_path / "d.csv").write_bytes(content.encode("latin-1"))
    code, _, err = call("plan", scenario, "--set", "posterior.data=d.csv")
    assert code == 2
    assert "posterior.data" in err
    assert part in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arrays",
    [
        {"X": np.ones((40, 2))},
        {"X": np.ones((40, 2), dtype=complex), "y": np.ones(40)},
        {"X": np.full((40, 2), "1"), "y": np.ones(40)},
        {"X": np.full((40, 2), 1e200), "y": np.ones(40)},
        {"X": np.full((40, 2), None), "y": np.ones(40)},
        b"not a zip file",
    ],
)
def test_bad_npz(call, scenario, tmp_path, arrays):
    if isinstance(arrays, bytes):
        (tmp_path / "d.npz").write_bytes(arrays)
    else:
        np.savez(tmp_path / "d.npz", **arrays)
    for arguments in (["plan", scenario, "--set", "posterior.data=d.npz"], ["reproduce", "--data", tmp_path / "d.npz"]):
        code, _, err = call(*arguments)
        assert code == 2
        assert "data" in err
        assert err.count("\n") == 1


def test_odd_but_good_csv(plan_of, scenario, tmp_path):
    """Windows line ends, a byte-order mark, blank lines and spaces are no reason to refuse."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((60, 3))
    text = "\ufeff x , y ,z\r\n\r\n" + "\r\n".join(", ".join(f"{v:.6f}" for v in row) for row in table) + "\r\n\r\n"
    (tmp_path / "d.csv").write_bytes(text.encode("utf-8"))
    X = np.round(table[:, [0, 2]], 6)
    document = plan_of(scenario, "--set", "posterior.data=d.csv", "--set", "policy.power=equal")
    assert document["constants"]["L"] == pytest.approx(np.linalg.eigvalsh(X.T @ X + np.eye(2))[-1], rel=1e-9)


def test_reproduce(call, tmp_path):
    code, out, err = call("reproduce", "all", "--out", tmp_path)
    assert (code, err) == (0, "")
    assert "The paper's stated outcomes" in out
    for name in ("fig2", "fig3a", "fig3b", "fig4a", "fig4b", "fig5"):
        for suffix in ("csv", "png", "svg"):
            assert (tmp_path / f"{name}.{suffix}").stat().st_size > 500
        with open(tmp_path / f"{name}.csv") as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0]) == ["figure", "scheme", "x", "y", "y_se"]
        schemes, grid = {row["scheme"] for row in rows}, {row["x"] for row in rows}
        assert len(rows) == len(schemes) * len(grid)
        if name != "fig2":
            assert schemes == {"optimized", "equal", "no-dp", "noiseless-dp", "noiseless"}
    claims = strict((tmp_path / "claims.json").read_text())["claims"]
    assert all(claim["holds"] or claim["contradiction"] for claim in claims)
    assert sorted(claim["figure"] for claim in claims if claim["contradiction"]) == ["fig3b", "fig4a", "fig5"]


def test_reproduce_with_the_authors_data(call, tmp_path, paper_data):
    code, out, _ = call("reproduce", "fig3a", "fig4b", "fig5", "--out", tmp_path, "--data", paper_data, "--json")
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
    np.savez(tmp_path / "d.npz", X=generator.standard_normal((60, 2)), y=generator.standard_normal(60))
    code, out, _ = call("reproduce", "fig2", "--data", tmp_path / "d.npz", "--out", tmp_path / "out")
    assert code == 0
    assert "other data" in out
    assert "contradicts" not in out
    assert "nan" not in (tmp_path / "out" / "claims.json").read_text()


def test_reproduce_refuses_bad_input(call, tmp_path):
    for arguments in (["fig9"], ["all", "fig9"], ["--data", "none.npz"], ["--data", "a.npz", "--data", "b.npz"]):
        code, out, err = call("reproduce", *arguments, "--out", tmp_path / "out")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert call("reproduce", "fig2", "--out", tmp_path / "file")[0] == 2


def test_help_and_version(call):
    assert call("--version")[1] == f"wflmc {wflmc.__version__}\n"
    for command in ("plan", "run", "reproduce"):
        code, out, _ = call(command, "--help")
        assert code == 0
        assert f"Example: wflmc {command}" in out
        assert ("fig2 fig3a" if command == "reproduce" else "Scenario file (TOML)") in out


def test_a_real_process_prints_json_alone_when_piped(scenario, tmp_path):
    """Nothing but JSON on stdout, nothing on stderr, and compilations cached where the user's cache is."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-m", "wflmc", "run", str(scenario), "--json"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert only_warnings(result.stderr)
    assert set(strict(result.stdout)) >= SUMMARY_KEYS
    assert any((tmp_path / "cache" / "wflmc" / "jax").iterdir())


def test_resolved_scenario_is_toml(call, scenario, tmp_path):
    call("run", scenario, "--out", tmp_path / "run")
    content = tomllib.loads((tmp_path / "run" / "scenario.toml").read_text())
    assert content["posterior"]["devices"] == 30
    assert content["policy"]["max_round_noise"] == np.inf


def test_plot(call, scenario, tmp_path):
    for power in ("optimized", "noiseless"):
        for suffix in ("png", "svg"):
            path = tmp_path / f"{power}.{suffix}"
            assert call("plan", scenario, "--plot", path, "--set", f"policy.power={power}")[0] == 0
            assert path.stat().st_size > 10_000
    for bad in ("plan.txt", "none/plan.png"):
        code, _, err = call("plan", scenario, "--plot", tmp_path / bad)
        assert code == 2
        assert "--plot" in err


FADING = ["link.fading=rayleigh", "link.power=0.01", "policy.schedule=threshold", "sampler.samples=20"]


def with_set(overrides):
    return [word for text in overrides for word in ("--set", text)]


@pytest.mark.parametrize("metric", ["bound", "exact"])
@pytest.mark.parametrize("key", ["link.snr_db", "privacy.epsilon", "sampler.burn_in"])
def test_solve_for(plan_of, scenario, key, metric):
    """The answer reaches the target; a little less of the key does not."""
    target = {"bound": 0.4, "exact": 0.002}[metric]
    arguments = [*with_set(FADING), "--metric", metric]
    found = plan_of(scenario, *arguments, "--solve-for", key, "--target", target)
    answer = found["solve_for"]
    assert answer["reachable"]
    kept = found["constants"]["burn_in"]
    reached = found["objective"] if metric == "bound" else max(found["exact_w2_sq"][kept:])
    assert reached == pytest.approx(answer["reached"])
    assert reached <= target
    less = answer["value"] - 1 if key == "sampler.burn_in" else answer["value"] * (1 - 1e-4)
    before = plan_of(scenario, *with_set([*FADING, f"{key}={less}"]))
    kept = before["constants"]["burn_in"]
    assert (before["objective"] if metric == "bound" else max(before["exact_w2_sq"][kept:])) > target


def test_solve_for_what_cannot_be_reached(plan_of, call, scenario):
    found = plan_of(scenario, "--solve-for", "link.snr_db", "--target", "1e-6")
    assert found["solve_for"]["value"] is None
    assert not found["solve_for"]["reachable"]
    assert found["solve_for"]["reached"] == found["objective"] > 1e-6
    _, out, _ = call("plan", scenario, "--solve-for", "link.snr_db", "--target", "1e-6")
    assert "no link.snr_db was found" in out
    for arguments, key in [
        (["--solve-for", "link.power", "--target", "1"], "--solve-for"),
        (["--solve-for", "link.snr_db"], "--target"),
        (["--target", "1"], "--target"),
        (["--solve-for", "link.snr_db", "--target", "1", "--set", "policy.power=noiseless"], "--solve-for"),
        (["--solve-for", "privacy.epsilon", "--target", "1", "--set", "policy.power=no-dp"], "--solve-for"),
        (["--solve-for", "link.snr_db", "--target", "-1"], "--target"),
        (["--solve-for", "link.snr_db", "--target", "1", "--metric", "true"], "--metric"),
    ]:
        code, _, err = call("plan", scenario, *arguments)
        assert code == 2
        assert key in err


@pytest.mark.parametrize(
    ("key", "target"), [("link.snr_db", 0.45), ("privacy.epsilon", 0.45), ("sampler.burn_in", 0.45)]
)
def test_solve_for_under_a_noise_limit(plan_of, scenario, key, target):
    """Values that the limit rules out do not meet the target, and do not end the search either."""
    guard = [*FADING, "policy.max_round_noise=1.0"]
    found = plan_of(scenario, *with_set(guard), "--solve-for", key, "--target", target)
    assert found["solve_for"]["reachable"]
    assert found["objective"] <= target


def test_solve_for_the_average(plan_of, scenario):
    """With the average objective the exact metric is the average too."""
    arguments = [*with_set([*FADING, "policy.objective=average"]), "--metric", "exact"]
    found = plan_of(scenario, *arguments, "--solve-for", "link.snr_db", "--target", "0.002")
    kept = found["exact_w2_sq"][found["constants"]["burn_in"] :]
    assert np.mean(kept) == pytest.approx(found["solve_for"]["reached"])
    assert np.mean(kept) == pytest.approx(0.002, rel=1e-3)
    assert max(kept) > 0.002


def test_the_picture_shows_the_plan(posterior):
    """What is drawn is what was planned: noise above and below 2η, and the loss as it adds up."""
    from matplotlib.figure import Figure

    from wflmc.report import plan_picture

    link = wflmc.Link(wflmc.channel.rayleigh(0.01), snr_db=20)
    plan = wflmc.plan(posterior, link, wflmc.Privacy(15, 0.01, 30), step_size=1e-4, burn_in=10, samples=10)
    rounds = np.arange(1, 21)
    noise, privacy = Figure().subplots(2, 1)
    plan_picture._noise(noise, plan, rounds)
    plan_picture._privacy(privacy, plan, rounds)
    np.testing.assert_allclose(noise.lines[0].get_ydata(), plan.noise_variance)
    useful = noise.collections[1].get_paths()[0].vertices[:, 1]
    assert useful.max() == pytest.approx(2e-4)
    np.testing.assert_allclose(privacy.lines[0].get_ydata(), np.cumsum(plan.loss, axis=0)[:, np.argmax(plan.spent)])


def test_solve_for_finds_the_best_number_of_rounds(plan_of, scenario):
    """The bound falls and rises again with burn-in; a target that only the valley's floor meets is found."""
    fixed = [*FADING, "privacy.epsilon=3.0"]
    values = {n: plan_of(scenario, *with_set([*fixed, f"sampler.burn_in={n}"]))["objective"] for n in range(30)}
    best = min(values, key=values.get)
    assert 0 < best < 29
    found = plan_of(scenario, *with_set(fixed), "--solve-for", "sampler.burn_in", "--target", values[best] * (1 + 1e-9))
    assert found["solve_for"]["value"] == best


def test_solve_for_rounds_against_brute_force(plan_of, scenario):
    fixed = [*FADING, "policy.power=equal", "link.snr_db=12"]
    values = [plan_of(scenario, *with_set([*fixed, f"sampler.burn_in={n}"]))["objective"] for n in range(60)]
    for target in np.geomspace(min(values) * 1.0001, max(values), 8):
        found = plan_of(scenario, *with_set(fixed), "--solve-for", "sampler.burn_in", "--target", target)
        assert found["solve_for"]["value"] == next(n for n, value in enumerate(values) if value <= target)


def test_solve_for_with_a_short_table_of_gains(plan_of, scenario, tmp_path):
    write_gains(tmp_path, np.random.default_rng(0).rayleigh(0.1, (60, 30)))
    overrides = ["link.fading=file", "link.gains=h.npy"]
    found = plan_of(scenario, *with_set(overrides), "--solve-for", "sampler.burn_in", "--target", "1.0")
    assert 0 < found["solve_for"]["value"] < 59


def test_solvers_agree(plan_of, call, scenario):
    own, reference = (plan_of(scenario, *with_set(FADING), "--solver", name) for name in ("own", "cvxpy"))
    assert own["objective"] == pytest.approx(reference["objective"], rel=1e-6)
    assert own["gap"] <= 1e-9
    assert reference["gap"] is None
    code, _, err = call("plan", scenario, "--solver", "best")
    assert code == 2
    assert "--solver" in err


def test_max_round_noise(plan_of, scenario):
    """The guard holds in every round, costs something, and names a feasible limit when it has none."""
    free = plan_of(scenario, *with_set(FADING))
    guarded = plan_of(scenario, *with_set([*FADING, "policy.max_round_noise=1.0"]))
    assert guarded["objective"] > free["objective"]
    active, gain = np.array(guarded["active_devices"]), np.array(guarded["gain"])
    eta = guarded["constants"]["step_size"]
    sigma = eta * 30 / active / gain
    assert np.all(np.sqrt(5) * sigma <= 1.0 * eta * 30 * 30 * (1 + 1e-9))
    assert any("noise of one round" in warning for warning in free["warnings"])
    assert not any("noise of one round" in warning for warning in guarded["warnings"])
    equal = plan_of(scenario, *with_set([*FADING, "policy.max_round_noise=1.0", "policy.power=equal"]))
    assert any("policy.max_round_noise has no effect" in warning for warning in equal["warnings"])
