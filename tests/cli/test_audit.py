"""`wflmc audit` as users and scripts meet it: JSON, verdict, exit codes."""

from __future__ import annotations

import sys

import pytest

import wflmc

from ..cli_tools import only_warnings, strict, with_set
from ..conftest import FULL
from ..error_tools import names_key

SMALL = with_set(
    [
        "posterior.devices=4",
        "posterior.examples=40",
        "sampler.burn_in=9",
        "sampler.samples=1",
    ]
)
KEYS = {
    "claimed", "epsilon_lower", "epsilon_lower_counting", "ratio", "consistent", "confidence", "trials", "tests",
    "sums", "warnings", "warning_codes", "seconds",
}  # fmt: skip
TEST_KEYS = {
    "name", "device", "rounds", "trials", "false_positives", "false_negatives", "fpr_upper", "fnr_upper", "mu_claimed",
    "mu_lower", "epsilon_claimed", "epsilon_gaussian", "epsilon_counting", "flagged",
}  # fmt: skip


@pytest.fixture
def audit(call, scenario):
    return lambda *arguments: call(
        "audit", scenario, *SMALL, "--trials", "4000", *arguments
    )


def test_json(audit):
    code, out, err = audit("--json")
    assert code == 0, err
    assert only_warnings(err)
    document = strict(out)
    assert set(document) == KEYS
    claimed = document["claimed"]
    assert set(claimed) == {
        "epsilon",
        "delta",
        "loss",
        "device",
        "unit",
        "adjacency",
        "accountant",
    }
    assert claimed["epsilon"] <= 8 * (1 + 1e-9)
    assert (claimed["delta"], claimed["unit"], claimed["accountant"]) == (
        0.01,
        "device",
        "exact",
    )
    assert claimed["adjacency"] == "replace"
    assert document["ratio"] == pytest.approx(
        document["epsilon_lower"] / claimed["epsilon"]
    )
    assert 0.5 < document["ratio"] <= 1
    assert document["consistent"] is True
    assert (document["trials"], document["confidence"]) == (4000, 0.99)
    assert all(set(test) == TEST_KEYS for test in document["tests"])
    assert {"matched filter", "every device", "whole runs", "gaussian model"} <= {
        t["name"] for t in document["tests"]
    }
    assert err.count("\n") == len(document["warnings"])
    again = strict(audit("--json")[1])
    assert {**again, "seconds": 0} == {**document, "seconds": 0}
    other = strict(
        audit(
            "--json",
            "--seed",
            "1",
            "--device",
            "2",
            "--confidence",
            "0.9",
            "--delta",
            "0.05",
        )[1]
    )
    assert (
        other["claimed"]["device"],
        other["claimed"]["delta"],
        other["confidence"],
    ) == (2, 0.05, pytest.approx(0.9))


def test_for_people(audit):
    code, out, _ = audit()
    assert code == 0
    for part in (
        "matched filter",
        "No attack",
        "ε ≥",
        "99 % confidence",
        "claims",
        "simulation",
        "about 12",
    ):
        assert part in out


@pytest.mark.skipif(not FULL, reason="tests/audit audits both: make test-full runs it")
def test_records_and_softmax(audit):
    changes = [
        "privacy.unit=record",
        "privacy.example_clip=9.0",
        "posterior.model=softmax",
        "posterior.dim=2",
    ]
    changes += ["privacy.adjacency=add-remove", "posterior.examples=80"]
    code, out, err = audit("--json", *with_set(changes))
    assert code == 0, err
    document = strict(out)
    assert (document["claimed"]["unit"], document["claimed"]["adjacency"]) == (
        "record",
        "add-remove",
    )
    assert [
        (tested_sum["name"], tested_sum["terms"], tested_sum["flagged"])
        for tested_sum in document["sums"]
    ] == [("sum over records", 20, False)]
    assert document["sums"][0]["ratio"] == pytest.approx(1, abs=0.02)
    assert {"softmax model", "record on a device that is clipped"} <= {
        test["name"] for test in document["tests"]
    }


def test_a_broken_build_ends_with_code_1_after_printing(audit, monkeypatch):
    plan = sys.modules["wflmc.planning.plan"]
    honest = plan.round_loss
    monkeypatch.setattr(plan, "round_loss", lambda *arguments: honest(*arguments) / 4)
    code, out, _ = audit()
    assert code == 1
    assert "BROKEN: the attack" in out
    code, out, _ = audit("--json")
    assert code == 1
    document = strict(out)
    assert document["consistent"] is False
    assert document["ratio"] > 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--trials", "10"], ["--trials = 10", "1000"]),
        (["--confidence", "1"], ["--confidence = 1.0"]),
        (["--device", "4"], ["--device = 4", "0 and 3"]),
        (["--delta", "0"], ["--delta = 0.0"]),
        (["--seed", "-1"], ["--seed = -1"]),
        (["--trials", "many"], ["--trials"]),
        (
            with_set(["policy.power=noiseless"]),
            ["policy.power = 'noiseless'"],
        ),
        (with_set(["link.snr=3"]), ["link.snr_db"]),
    ],
)
def test_bad_input(audit, arguments, parts):
    code, out, err = audit(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_no_privacy_constraint_asks_for_delta(call, tmp_path):
    path = tmp_path / "plain.toml"
    path.write_text('[link]\nfading = "static"\n')
    code, _, err = call("audit", path, *SMALL, "--trials", "2000")
    assert code == 2
    assert names_key(err, "--delta", "missing")
    assert call("audit", path, *SMALL, "--trials", "2000", "--delta", "0.01")[0] == 0


def test_help(call):
    code, out, _ = call("audit", "--help")
    assert code == 0
    assert "Example: wflmc audit scenario.toml" in out
    assert "about 12" in " ".join(out.split())


def test_the_name_is_a_module_with_a_function():
    assert wflmc.audit.audit.__name__ == "audit"
