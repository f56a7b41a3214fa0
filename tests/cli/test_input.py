"""Input of all kinds through the command line: one sentence and exit code 2, or the right answer."""

from __future__ import annotations

import hashlib
import json
import math
import re

import numpy as np
import pytest

from wflmc.scenario import Scenario, validate
from wflmc.support import plugins
from wflmc.support.errors import InputError

from ..cli_tools import STATIC, with_set
from ..error_tools import codes_of, missing_facts, names_key, notices_of, text_of


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
        (
            lambda plan: plan["scenario"]["privacy"].update(epsilon=50.0),
            "privacy.budget",
        ),
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
    # The change shows in no hash of the data, but in what the plan took from them.
    np.savez(tmp_path / "d.npz", X=X, y=2 * y)
    code, _, err = call("run", "--plan", saved)
    assert code == 2
    assert "constants.initial_w2_sq" in err
    assert list(document["files"]) == ["link.gains"]
    hashed = {
        **document["files"],
        "posterior.data": hashlib.sha256(b"the data of an earlier version").hexdigest(),
    }
    saved.write_text(json.dumps({**document, "files": hashed}))
    assert "posterior.data" in call("run", "--plan", saved)[2]
    np.save(tmp_path / "h.npy", generator.rayleigh(0.1, (60, 30)))
    assert "link.gains" in call("run", "--plan", saved)[2]


def test_a_plan_file_that_is_none(call, tmp_path):
    (tmp_path / "p.json").write_text("[1, 2")
    for name in ("p.json", "missing.json"):
        code, out, err = call("run", "--plan", tmp_path / name)
        assert (code, out) == (2, "")
        assert name in err
        assert "Error" not in err


def test_folders_that_cannot_be_written(call, scenario, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", ""):
        for command in (["run", scenario], ["reproduce", "fig2"]):
            code, _, err = call(*command, "--out", out)
            assert code == 2
            assert "--out" in err


def test_usage_errors(call):
    for arguments in (["plna"], ["plan"], ["plan", "--what"]):
        code, out, err = call(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("wflmc: ")
        assert err.count("\n") == 1


BAD = [
    (["privacy.epsilon=-1"], "privacy.epsilon"),
    (["privacy.epsilon=0"], "privacy.epsilon"),
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


def test_limits_are_short_and_names_of_others_are_whole(call, scenario, monkeypatch):
    monkeypatch.setattr(
        plugins, "names", lambda group: ["indoor-2024.11.17.001", "site-20241117093000"]
    )
    for value, says in (
        ("privacy.clip=1e60", "1e+15."),
        ("policy.max_round_noise=0", "1e-09"),
    ):
        assert says in call("plan", scenario, "--set", value)[2]
    err = call("plan", scenario, "--set", "link.fading=foo")[2]
    assert "'indoor-2024.11.17.001', 'site-20241117093000'" in err


def test_nan_and_infinities_of_every_key_are_refused_for_what_they_are():
    """nan is on neither side of a limit, and no sentence says that it is."""
    unlimited = {("link", "downlink_snr_db"), ("policy", "max_round_noise")}
    tried = 0
    for section, content in Scenario.model_fields.items():
        for key, field in type(content.default).model_fields.items():
            kinds = str(field.annotation)
            if "float" not in kinds and "int" not in kinds:
                continue
            for value in (math.nan, math.inf, -math.inf, [math.nan]):
                if value == math.inf and (section, key) in unlimited:
                    validate({section: {key: value}})
                    continue
                with pytest.raises(InputError, match=f"^{section}.{key} = ") as caught:
                    validate({section: {key: value}})
                number = caught.value.value
                if not isinstance(number, list) and math.isnan(number):
                    assert caught.value.requirement.startswith(
                        (
                            "a number",
                            "a finite number",
                            "a valid integer",
                            "a valid number",
                        )
                    )
                tried += 1
    assert tried > 100


@pytest.mark.parametrize(("overrides", "key"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_sentence_and_exit_code_2(
    call, scenario, tmp_path, overrides, key
):
    arguments = [word for text in overrides for word in ("--set", text)]
    code, out, err = call(
        "run", scenario, "--out", tmp_path / "out", "--json", *arguments
    )
    assert code == 2
    assert out == ""
    assert names_key(err, key)
    assert not (tmp_path / "out").exists()


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
    assert names_key(err, "scenario", path)


def test_missing_scenario(call, tmp_path):
    code, _, err = call("plan", tmp_path / "none.toml")
    assert code == 2
    assert names_key(err, "scenario", tmp_path / "none.toml")
    assert call("run")[0] == 2
    assert call("run", "a.toml", "--plan", "b.json")[0] == 2


def test_misspelt_keys_get_a_suggestion(call, scenario):
    for key, change, suggestion in (
        ("link.snrdb", "link.snrdb=3", "link.snr_db?"),
        ("sampler.epsilon", "sampler.epsilon=3", "privacy.epsilon?"),
        ("lnk", "lnk.snr_db=3", "link?"),
    ):
        err = call("plan", scenario, "--set", change)[2]
        assert names_key(err, key)
        assert err.endswith(f" {suggestion}\n")


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
    notices = notices_of(plan_of(path))
    idle = [notice.text.split()[0] for notice in notices if notice.code == "no-effect"]
    for key in (
        "link.rician_k",
        "link.gains",
        "privacy.example_clip",
        "sampler.friction",
    ):
        assert key in idle
    for key in ("link.power", "link.seed", "policy.schedule", "posterior.mu"):
        assert key not in idle


def test_every_key_has_a_default(plan_of, tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    document = plan_of(path)
    assert document["constants"]["rounds"] == 100
    assert document["privacy"]["budget"] is None
    assert document["privacy"]["epsilon_spent"] is None
    assert document["warnings"] == []


def test_constants_from_private_data_are_warned_of(plan_of, scenario):
    public = {"mu": 900.0, "L": 1500.0, "initial_w2_sq": 9.0}

    def leaks(*names, **overrides):
        sets = [f"posterior.{name}={public[name]}" for name in names]
        sets += [
            f"{key.replace('__', '.')}={value}" for key, value in overrides.items()
        ]
        document = plan_of(
            scenario, *(part for text in sets for part in ("--set", text))
        )
        if "data-constants" not in codes_of(document):
            return []
        return re.findall(r"posterior\.(\w+)", text_of(document, "data-constants"))

    assert leaks() == ["mu", "L", "initial_w2_sq"]
    assert leaks("mu", "L") == ["initial_w2_sq"]
    assert leaks(*public) == []
    # Of a softmax model, μ is the prior's.
    assert leaks(posterior__model="softmax") == ["L", "initial_w2_sq"]


def test_public_constants(plan_of, scenario):
    document = plan_of(
        scenario,
        "--set",
        "posterior.mu=900.0",
        "--set",
        "posterior.L=1500.0",
        "--set",
        "posterior.initial_w2_sq=9.0",
    )
    constants = document["constants"]
    assert (constants["mu"], constants["L"], constants["initial_w2_sq"]) == (
        900.0,
        1500.0,
        9.0,
    )
    assert constants["step_size"] == pytest.approx(0.4 / 2400)
    assert not {"constant-too-small", "constant-too-large"} & set(codes_of(document))
    wrong = plan_of(scenario, "--set", "posterior.L=1200.0")
    assert "posterior.L" in text_of(wrong, "constant-too-small")


def test_reproduce_refuses_bad_input(call, tmp_path):
    for arguments in (
        ["fig9"],
        ["all", "fig9"],
        ["--data", "none.npz"],
        ["--data", "a.npz", "--data", "b.npz"],
    ):
        code, out, err = call("reproduce", *arguments, "--out", tmp_path / "out")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert call("reproduce", "fig2", "--out", tmp_path / "file")[0] == 2


@pytest.mark.parametrize(
    "key", ["privacy.epsilon", "privacy.delta", "privacy.clip", "link.snr_db"]
)
def test_lists_of_the_wrong_length_name_their_key(call, scenario, key):
    code, _, err = call("plan", scenario, "--set", f"{key}=[0.1, 0.2]")
    assert code == 2
    assert names_key(err, key, "[0.1, 0.2]", "30 devices")


def test_the_worst_device_is_one_device(call, plan_of, tmp_path):
    path = tmp_path / "per.toml"
    path.write_text(
        "[posterior]\ndevices = 3\nexamples = 60\n[privacy]\nepsilon = [2.0, 8.0, 15.0]\ndelta = 0.01\n"
        "[link]\nsnr_db = 40.0\n"
    )
    privacy = plan_of(path)["privacy"]
    for loss, budget, epsilon, promised in zip(
        privacy["spent"],
        privacy["budgets"],
        privacy["epsilon_each"],
        [2, 8, 15],
        strict=True,
    ):
        assert epsilon <= promised * (1 + 1e-9)
        assert loss <= budget * (1 + 1e-9)
    assert max(privacy["epsilon_each"]) == privacy["epsilon_spent"]
    out = call("plan", path, "--no-compare")[1]
    facts = "budget 0.40128", "ε = 2 (replace)", "exact accountant"
    assert not missing_facts(" ".join(out.split()), facts)


def test_a_scheme_that_does_not_clip_keeps_no_promise(plan_of, scenario):
    document = plan_of(scenario, "--set", "policy.power=noiseless")
    assert "not-clipped" in codes_of(document)
