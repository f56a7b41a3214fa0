"""`wflmc plan` as users and scripts meet it: JSON, text, the same numbers as the Python interface."""

from __future__ import annotations

import numpy as np
import pytest

import wflmc

from ..cli_tools import CONSTANTS, PLAN_KEYS, strict
from ..error_tools import names_key


def test_plan_json(plan_of, scenario):
    document = plan_of(scenario)
    assert set(document) >= PLAN_KEYS
    assert set(document["constants"]) == CONSTANTS
    assert document["regime"] == "dp-limited"
    assert document["classes"] is None
    rounds = document["constants"]["rounds"]
    assert rounds == 51
    for name in ("gain", "threshold", "active_devices", "bound", "exact_w2_sq"):
        assert len(document[name]) == rounds, name
    assert document["objective"] == document["bound"][-1]
    assert document["gap"] <= 1e-9
    privacy = document["privacy"]
    assert set(privacy) >= {
        "budget",
        "accountant",
        "unit",
        "spent_max",
        "epsilon_spent",
        "spent",
    }
    assert len(privacy["spent"]) == 30
    assert privacy["spent_max"] <= privacy["budget"]
    assert privacy["epsilon_spent"] == pytest.approx(8.0, rel=1e-9)
    assert (privacy["accountant"], privacy["unit"]) == ("exact", "device")


@pytest.mark.parametrize("power", ["equal", "no-dp", "noiseless-dp", "noiseless"])
def test_plan_json_of_the_other_schemes(plan_of, scenario, power):
    document = plan_of(
        scenario, "--set", f"policy.power={power}", "--set", "link.snr_db=5"
    )
    assert document["objective"] > 0
    assert (document["gap"] is None) == (power != "noiseless-dp")
    if power.startswith("noiseless"):
        assert set(document["threshold"]) == {0.0}
        assert set(document["active_devices"]) == {30}
    if power == "noiseless":
        assert [
            document["privacy"][k] for k in ("spent_max", "epsilon_spent", "spent")
        ] == [None] * 3


def test_plan_for_people(call, scenario):
    code, out, err = call("plan", scenario)
    assert code == 0
    assert err == ""
    for word in (
        "dp-limited",
        "30 devices",
        "bound on W2²",
        "ε = 8",
        "exact accountant",
    ):
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
        policy=wflmc.Policy(schedule="all"),
    )
    np.testing.assert_array_equal(document["gain"], plan.gain)
    np.testing.assert_array_equal(document["bound"], plan.bound)
    np.testing.assert_array_equal(
        document["exact_w2_sq"], wflmc.exact_w2_sq(posterior, plan)
    )


def test_fading_plan_has_shares_instead_of_a_regime(plan_of, scenario):
    overrides = [
        "policy.power=equal",
        "link.fading=rayleigh",
        "link.power=0.01",
        "policy.schedule=threshold",
    ]
    document = plan_of(
        scenario, *(word for text in overrides for word in ("--set", text))
    )
    assert document["regime"] is None
    assert sum(document["regime_share"].values()) == pytest.approx(1)
    assert min(document["active_devices"]) < 30


def test_burn_in_auto(call, plan_of, scenario):
    document = plan_of(
        scenario, "--set", "sampler.burn_in=auto", "--set", "policy.power=equal"
    )
    assert 10 < document["constants"]["burn_in"] < 100
    again = plan_of(
        scenario, "--set", "sampler.burn_in=auto", "--set", "policy.power=equal"
    )
    assert again["constants"] == document["constants"]
    code, _, err = call(
        "plan",
        scenario,
        "--set",
        "sampler.burn_in=auto",
        "--set",
        "sampler.max_burn_in=20",
    )
    assert code == 2
    assert names_key(err, "sampler.max_burn_in", 20, "1.01")


def test_plan_shows_the_diagnosis(call, plan_of, scenario):
    """Causes ranked, with a change that can be typed and helps."""
    sets = ("--set", "privacy.clip=300.0")
    first, *_ = strict(call("plan", scenario, *sets, "--json")[1])["diagnosis"]
    assert first["cause"] in ("channel noise", "privacy noise")
    assert (first["change"]["key"], first["change"]["direction"]) == (
        "privacy.clip",
        "down",
    )
    assert f"privacy.clip = {first['change']['value']:g}" in first["text"]
    assert "1. " + first["text"][:40] in " ".join(
        call("plan", scenario, *sets)[1].split()
    )
    better = plan_of(scenario, "--set", f"privacy.clip={first['change']['value']}")
    assert better["objective"] < plan_of(scenario, *sets)["objective"]


def test_no_advice_makes_one_plan(call, scenario, plans_made):
    code, out, _ = call("plan", scenario, "--no-advice")
    assert code == 0
    assert "diagnosis" not in out
    assert plans_made() == 1
    assert (
        strict(call("plan", scenario, "--no-advice", "--json")[1])["diagnosis"] is None
    )
    call("plan", scenario)
    assert plans_made() > 3


def test_dp_accounting_is_asked_with_json_or_compare(
    call, plan_of, scenario, monkeypatch
):
    assert set(plan_of(scenario)["privacy"]["epsilon_by"]) == {
        "exact",
        "paper",
        "pld",
        "rdp",
    }
    assert set(plan_of(scenario, "--no-compare")["privacy"]["epsilon_by"]) == {
        "exact",
        "paper",
    }
    assert "pld" not in call("plan", scenario)[1]
    assert "pld" in call("plan", scenario, "--compare")[1]
    monkeypatch.setattr("wflmc.cli.plan.find_spec", lambda name: None)
    code, _, err = call("plan", scenario, "--compare")
    assert code == 2
    assert names_key(err, "--compare", "wflmc[dp]")
