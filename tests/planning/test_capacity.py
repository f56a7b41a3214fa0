"""The capacity model against hand arithmetic, the powers of a plan, and what the planner itself refuses."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.planning.capacity import Radio, Size, Traits, estimate_capacity, traits_of
from wflmc.support.errors import InputError

from .scenarios import Target, make

HUGE = Size(10**6, 10**8, 10**4, 5000, examples=10)


def by_name(found):
    return {condition["name"]: condition for condition in found["conditions"]}


def test_the_huge_case_by_hand():
    found = estimate_capacity(
        HUGE, Traits(senders=0.5), Radio(bandwidth=20e6, power=0.2, efficiency=2.0, coherence=0.05)
    )
    assert {name: tuple(cost.values()) for name, cost in found["costs"].items()} == {
        "channel_uses": ("", 1e8, 1e12),
        "uplink_airtime": ("s", 2.5, 2.5e4),  # 1e8 numbers, two a symbol, 20e6 symbols a second
        "broadcast_airtime": ("s", 80.0, 80e4),  # 32e8 bits at 40e6 bit/s
        "digital_uplink_airtime": ("s", 4e7, 4e11),  # half a million times that
        "mean_energy_of_a_device": ("J", 0.5, 5e3),  # 0.2 W for 2.5 s
        "largest_energy_of_a_device": ("J", 0.5, 5e3),
        "energy_of_all_devices": ("J", 5e5, 5e9),
        "operations_of_the_server": ("", 2e8, 2e12),
        "operations_of_a_device": ("", 63e8, 63e12),  # 6 for each of 10 examples, 3 to clip
        "broadcast": ("B", 4e8, 4e12),
        "digital_uplink": ("B", 2e14, 2e18),
        "ledger": ("B", 8e6, 8e10),
        "kept_samples": ("B", 4e8, 2e12),
    }
    conditions = by_name(found)
    assert (conditions["coherence"]["needs"], conditions["coherence"]["has"]) == (2.5, 0.05)
    assert conditions["coherence"]["helps"] == "50 blocks of at most 2,000,000 parameters a round"
    assert conditions["privacy"]["needs"] == pytest.approx(2 * 1e8 * 1e4 / 1e12)
    assert conditions["privacy"]["ratio"] == 0  # nothing promised
    assert conditions["power"]["needs"] == pytest.approx(1e-12)
    assert found["conditions"][0]["name"] == "coherence"


def test_a_small_case_by_hand():
    size = Size(devices=7, parameters=11, rounds=3, samples=2, examples=5, per_example=4.0)
    traits = Traits(
        power=0.5, power_most=0.75, ledger=False, kinetic=True, server_noise=True, noisy_broadcast=True,
        budget=2.0, loss_factor=1.5, power_factor=4.0, received_snr=0.01,
    )  # fmt: skip
    found = estimate_capacity(size, traits, Radio(bandwidth=10.0, power=3.0, efficiency=4.0, coherence=0.11))
    round_costs = {name: cost["round"] for name, cost in found["costs"].items()}
    assert round_costs == pytest.approx({
        "channel_uses": 11, "uplink_airtime": 0.55, "broadcast_airtime": 0.55, "digital_uplink_airtime": 61.6,
        "mean_energy_of_a_device": 0.825, "largest_energy_of_a_device": 1.2375, "energy_of_all_devices": 5.775,
        "operations_of_the_server": 110, "operations_of_a_device": 253, "broadcast": 44, "digital_uplink": 308,
        "ledger": 0, "kept_samples": 44,
    })  # fmt: skip
    assert found["costs"]["kept_samples"]["in_all"] == 88
    assert found["costs"]["digital_uplink"]["in_all"] == 924
    conditions = by_name(found)
    assert conditions["coherence"]["helps"] == "6 blocks of at most 2 parameters a round"
    assert conditions["privacy"]["needs"] == pytest.approx(2 * 11 * 3 * 1.5 / 49)
    assert conditions["power"]["ratio"] == pytest.approx(4 / 49 / 0.01)
    ratios = [condition["ratio"] for condition in found["conditions"]]
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize(
    ("bandwidth", "coherence", "parameters", "helps"),
    [
        (10.0, 0.7, 210, "15 blocks of at most 14 parameters a round"),  # 10.5/0.7 is 15.000000000000002
        (20e6, 0.043, 1_720_001, "2 blocks of at most 1,720,000 parameters a round"),  # 40e6 · 0.043 is 1719999.99…
        (10.0, 0.04, 8, "more bandwidth"),
    ],
)
def test_blocks_are_counted_without_rounding_errors(bandwidth, coherence, parameters, helps):
    found = estimate_capacity(Size(1, parameters, 1, 1), Traits(), Radio(bandwidth=bandwidth, coherence=coherence))
    assert by_name(found)["coherence"]["helps"] == helps


def test_energy_is_that_of_the_plans_own_powers(posterior):
    snr_db = np.linspace(15, 25, 30)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=snr_db, csi_error=0.1)
    step = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(posterior, link, wflmc.Privacy(15, 0.01, 30), step_size=step, burn_in=20, samples=20)
    known = np.abs(link.gains(40, 30)) / link.mismatch(40, 30)
    limit = plan.dim * plan.noise_power * 10 ** (snr_db / 10)
    share = np.where(plan.weight > 0, (plan.gain[:, None] * 30 / known) ** 2, 0) / limit
    np.testing.assert_allclose(share.max(1), plan.power_share)
    traits = traits_of(plan, link)
    assert traits.senders == pytest.approx(plan.active_devices.mean() / 30)
    costs = estimate_capacity(Size(30, plan.dim, 40, 20), traits, Radio(bandwidth=1e6, power=0.5))["costs"]
    joules = 0.5 * plan.dim / 2e6 * share
    assert costs["energy_of_all_devices"]["in_all"] == pytest.approx(joules.sum())
    assert costs["largest_energy_of_a_device"]["in_all"] == pytest.approx(joules.sum(0).max())
    assert costs["mean_energy_of_a_device"]["round"] == pytest.approx(joules.mean())


def test_an_ideal_link_radiates_nothing(posterior):
    link = wflmc.Link(channel.static())
    plan = wflmc.plan(posterior, link, wflmc.Privacy(), step_size=1e-4, burn_in=1, samples=1, power="noiseless")
    found = estimate_capacity(Size(30, 5, 2, 1), traits_of(plan, link))
    assert list(found["costs"]["energy_of_all_devices"].values()) == ["J", None, None]
    assert found["costs"]["ledger"]["in_all"] == 0
    assert [by_name(found)[name]["ratio"] for name in ("privacy", "power")] == [0, 0]


@pytest.mark.parametrize("margin", [0.99, 1.01])
@pytest.mark.parametrize("name", ["privacy", "power"])
def test_privacy_and_power_end_where_no_plan_with_a_noise_limit_is_left(name, margin):
    """The planner itself refuses max_round_noise = 1 exactly where the model says that it cannot be had."""
    target, rounds = Target(100.0, 200.0, 40, 6), 10
    needs = by_name(estimate_capacity(Size(target.devices, target.dim, rounds, 1), Traits()))[name]["needs"]
    assert needs == pytest.approx(2 * 40 * 10 / 36 if name == "privacy" else 1 / 36)
    promise = {"epsilon": None, "delta": None}
    if name == "privacy":
        promise = {"epsilon": wflmc.Privacy(1, 0.01).epsilon_spent([margin * needs]), "delta": 0.01}
    snr_db = 60.0 if name == "privacy" else 10 * np.log10(margin * needs)
    h = np.ones((rounds, target.devices))

    def tried():
        return make(target, h, snr_db=snr_db, clip=100.0, max_round_noise=1.0, step_size=1e-3, **promise)

    if margin < 1:
        with pytest.raises(InputError, match=f"max_round_noise .*{name} allows"):
            tried()
    else:
        assert tried().certificate.noise_limit == 1


@pytest.mark.parametrize("schedule", ["all", "threshold", "unbiased"])
@pytest.mark.parametrize("name", ["privacy", "power"])
def test_the_conditions_of_unlike_devices_are_those_of_the_planner(name, schedule):
    """It says how large max_round_noise must be at least: √(needs/has), whoever sends, clips and has spent."""
    target, clip = Target(100.0, 200.0, 40, 6), np.linspace(400, 900, 6)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=np.linspace(5, 10, 6) + 80 * (name == "privacy"), csi_error=0.1)
    epsilon = np.linspace(0.5, 2, 6) if name == "privacy" else np.full(6, 1e4)
    privacy = wflmc.Privacy(epsilon, 0.01, clip, unit="record", example_clip=300.0)
    keywords = {"step_size": 1e-3, "burn_in": 9, "samples": 1, "schedule": schedule, "senders": 2}
    keywords["ledger"] = privacy.budget(6) * np.linspace(0, 0.5, 6)
    plan = wflmc.plan(target, link, privacy, **keywords)
    ratio = by_name(estimate_capacity(Size(6, 40, 10, 1), traits_of(plan, link)))[name]["ratio"]
    with pytest.raises(InputError) as refused:
        wflmc.plan(target, link, privacy, **keywords, max_round_noise=1e-6)
    least, cause = re.match(r"at least (\S+): (.+) allows", refused.value.allowed).groups()
    assert cause.endswith(name)
    assert float(least) == pytest.approx(np.sqrt(ratio), rel=1e-4)


def test_the_command_for_its_own_size_and_for_another(call, plan_of, scenario):
    own = plan_of(scenario, "--no-compare", "--capacity", "--bandwidth", "1e6")["capacity"]
    assert own["size"] == {
        "devices": 30, "parameters": 5, "rounds": 51, "samples": 1, "examples": 40.0, "per_example": 4.0,
    }  # fmt: skip
    assert own["costs"]["uplink_airtime"] == {"unit": "s", "round": 2.5e-6, "in_all": pytest.approx(51 * 2.5e-6)}
    sizes = ["--devices", "1e6", "--parameters", "1e8", "--rounds", "1e4"]
    document = plan_of(scenario, "--no-compare", "--capacity", *sizes)
    huge = document["capacity"]
    assert document["constants"]["devices"] == 30  # the plan itself is the scenario's
    assert (huge["size"]["devices"], huge["size"]["samples"]) == (10**6, round(1e4 / 51))
    assert huge["assumed"]["traits"] == own["assumed"]["traits"]
    assert [each["name"] for each in huge["conditions"] if each["ratio"] > 1] == ["coherence"]
    assert json.dumps(huge, allow_nan=False)
    code, text, _ = call("plan", scenario, "--no-compare", "--capacity", *sizes)
    assert code == 0
    words = " ".join(text.split())
    assert "1,000,000 devices, 100,000,000 parameters, 10,000 rounds one round all rounds" in words
    assert "uplink airtime 2.5 s 6.944 h broadcast airtime 2.667 min 18.52 days" in words
    assert "coherence 2.5 s 10 ms 250 250 blocks of at most 400,000 parameters a round" in words
    assert "capacity" not in plan_of(scenario, "--no-compare")


def test_the_answer_of_an_inverse_question_has_a_capacity_too(plan_of, scenario):
    asked = ["--solve-for", "privacy.epsilon", "--target", "1", "--capacity"]
    assert plan_of(scenario, "--no-compare", *asked)["capacity"]["size"]["devices"] == 30


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--devices", "1e6"], "--devices = 1000000.0 was given, but it must be left out without --capacity."),
        (["--capacity", "--rounds", "1.5"], "--rounds = 1.5 was given, but it must be a whole number"),
        (["--capacity", "--parameters", "1e30"], "--parameters = 1e+30 was given, but it must be a whole number"),
        (
            ["--capacity", "--bandwidth", "0"],
            "--bandwidth = 0.0 was given, but it must be a number between 1e-18 and 1e18.",
        ),
        (["--capacity", "--coherence", "1e-300"], "--coherence = 1e-300 was given, but it must be a number between"),
        (["--capacity", "--power", "nan"], "--power = nan was given, but it must be a number between"),
        (["--capacity", "--devices", "inf"], "--devices = inf was given, but it must be a whole number"),
        (["--capacity", "--devices", "many"], "'many' is not a valid float"),
    ],
)
def test_bad_sizes_are_refused_in_a_sentence(call, scenario, arguments, sentence):
    code, out, err = call("plan", scenario, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_python_refuses_them_too():
    with pytest.raises(InputError, match="devices = 0 was given, but it must be a whole number between"):
        estimate_capacity(Size(0, 1, 1, 1), Traits())
