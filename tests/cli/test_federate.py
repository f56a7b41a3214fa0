"""`wflmc federate`: the files of a run, the simulator's chains, what is refused; and Flower's simulation engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import arviz
import jax
import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from wflmc.apps.federation import execution
from wflmc.apps.federation.job import Job
from wflmc.privacy import Ledger, Privacy
from wflmc.privacy.ledger import Anchor
from wflmc.scenario import build, load_scenario

from ..cli_tools import strict
from ..conftest import FULL, count
from ..error_tools import codes_of, missing_facts, names_key, text_of
from ..federation_tools import ROUNDING, app_of, run_on_grid
from ..report.report_tools import Page

SCENARIO = """
[posterior]
devices = 4
examples = 80
[privacy]
epsilon = 10.0
delta = 0.01
[sampler]
burn_in = 2
samples = 3
chains = 2
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def samples(folder: Path) -> Any:
    return arviz.from_netcdf(folder / "trace.nc").posterior["theta"].values


def test_files_and_chains_are_those_of_a_run(
    call: Any, small: Path, tmp_path: Path
) -> None:
    federated, simulated = tmp_path / "federated", tmp_path / "simulated"
    code, out, err = call(
        "federate", small, "--runtime", "process", "--out", federated, "--json"
    )
    assert code == 0, err
    summary = strict(out)
    assert call("run", small, "--out", simulated, "--json")[0] == 0
    assert {path.name for path in simulated.iterdir()} <= {
        path.name for path in federated.iterdir()
    }
    assert np.abs(samples(federated) - samples(simulated)).max() < ROUNDING
    run = json.loads((simulated / "summary.json").read_text())
    assert set(run) < set(summary)
    np.testing.assert_allclose(
        summary["ledger"]["spent"], run["ledger"]["spent"], rtol=1e-12
    )
    assert summary["epsilon_spent"] == pytest.approx(run["epsilon_spent"], rel=1e-9)
    assert summary["clip_rate"] == {"burn_in": None, "samples": None}
    assert summary["federation"]["asked"] == summary["federation"]["sent"]
    assert {"emulated-channel", "no-protection"} <= set(codes_of(summary))
    subject = json.loads((federated / "ledger.jsonl").read_text().splitlines()[0])[
        "subject"
    ]
    assert subject
    ledger = Ledger(
        Privacy(10.0, 0.01), 4, path=federated / "ledger.jsonl", read_only=True
    )
    assert len(ledger.entries) == 5
    assert call("report", federated)[0] == 0
    # The same command again finds everything done; another one keeps its hands off these ledgers.
    assert (
        call("federate", small, "--runtime", "process", "--out", federated, "--json")[0]
        == 0
    )
    assert len((federated / "ledger.jsonl").read_text().splitlines()) == 6
    code, _, err = call(
        "federate",
        small,
        "--runtime",
        "process",
        "--out",
        federated,
        "--set",
        "link.snr_db=3",
    )
    assert code == 2
    assert names_key(err, "--out", federated, "scenario")
    code, _, err = call("run", "--resume", federated, "--more", 2)
    assert code == 2
    assert names_key(err, "--resume", federated, "wflmc federate")


def test_noise_by_the_devices_costs_a_device_as_often_as_there_are_shares(
    call: Any, small: Path, tmp_path: Path
) -> None:
    code, _, err = call(
        "federate",
        small,
        "--runtime",
        "process",
        "--out",
        tmp_path / "no",
        "--noise",
        "devices",
    )
    assert code == 2
    assert names_key(err, "policy.power", "noiseless-dp")
    ideal = ("--set", "policy.power=noiseless-dp")
    code, out, err = call(
        "federate",
        small,
        "--runtime",
        "process",
        "--out",
        tmp_path / "yes",
        "--noise",
        "devices",
        *ideal,
        "--json",
    )
    assert code == 0, err
    summary = strict(out)
    plan = json.loads((tmp_path / "yes" / "plan.json").read_text())
    # The loss of a gradient of norm 30, the clip, in noise N0 = 1.
    expected = 4 * 2 * np.sum((np.array(plan["gain"]) * 30.0) ** 2)
    np.testing.assert_allclose(
        summary["ledger"]["spent"], np.full(4, expected), rtol=1e-9
    )
    np.testing.assert_allclose(
        plan["privacy"]["spent"], summary["ledger"]["spent"], rtol=1e-9
    )
    assert summary["ledger"]["share_of_budget"] <= 1 + 1e-9
    assert summary["epsilon_spent"] == pytest.approx(plan["privacy"]["epsilon_spent"])
    assert summary["epsilon_spent"] == pytest.approx(
        max(plan["privacy"]["epsilon_each"])
    )
    assert call("report", tmp_path / "yes")[0] == 0
    assert "4 times" in text_of(summary, "device-noise")
    # One that an earlier version was to run with masks is not run without them.
    job = tmp_path / "yes" / "federation" / "server" / "job.json"
    job.write_text(json.dumps({**json.loads(job.read_text()), "job.aggregated": True}))
    code, _, err = call(
        "federate",
        small,
        "--runtime",
        "process",
        "--out",
        tmp_path / "yes",
        "--noise",
        "devices",
        *ideal,
    )
    assert code == 2
    assert names_key(err, "job", "--ledger")


def test_a_federation_with_absences_has_its_own_numbers_and_a_page(
    call: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fault(message: Any, device: int) -> Any:
        calls.append(device)
        return None if device == 1 and len(calls) < 8 else message

    monkeypatch.setattr(
        execution,
        "run_in_process",
        lambda server, devices, _: run_on_grid(server, app_of(devices), fault),
    )
    ideal = ("--noise", "devices", "--set", "policy.power=noiseless-dp")
    code, out, err = call(
        "federate",
        small,
        "--runtime",
        "process",
        "--out",
        tmp_path / "out",
        *ideal,
        "--json",
    )
    assert code == 0, err
    summary = strict(out)
    assert summary["federation"]["sent"] == [3, 3, 4, 4, 4]
    assert summary["ledger"]["spent"][1] < summary["ledger"]["spent"][0]
    assert not missing_facts(text_of(summary, "absent-devices"), (2,))
    assert "late-messages" in codes_of(summary)
    assert call("report", tmp_path / "out")[0] == 0
    page = Page((tmp_path / "out" / "report.html").read_text()).text
    summary["federation"]["secure_aggregation"] = (
        True  # by an earlier version: its ε is not of what the page describes
    )
    (tmp_path / "out" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "out" / "digests.json").unlink()
    code, _, err = call("report", tmp_path / "out")
    assert code == 2
    assert names_key(err, "report", "federation.secure_aggregation")
    assert "Results of wflmc federate" in page
    assert "Were gradients clipped? Not known" in page
    assert "Hardly:" not in page
    assert "18 of 20 expected messages" in page
    assert "are of the plan, without absences" in page


def test_noise_for_absences_that_do_not_come_is_in_the_exact_law(
    call: Any, small: Path, tmp_path: Path
) -> None:
    ideal = (
        "--noise",
        "devices",
        "--set",
        "policy.power=noiseless-dp",
        "--set",
        "privacy.epsilon=1",
        "--json",
    )
    noises = {}
    for tolerate in (0, 2):
        out = tmp_path / f"out{tolerate}"
        command = (
            "federate",
            small,
            "--runtime",
            "process",
            "--out",
            out,
            "--tolerate",
            tolerate,
        )
        code, printed, err = call(*command, *ideal)
        assert code == 0, err
        plan = json.loads((out / "plan.json").read_text())
        noises[tolerate] = plan["exact_w2_sq"][-1]
        assert np.allclose(strict(printed)["exact_w2_sq"], plan["exact_w2_sq"])
    # The plan for two absences takes half the noise for one sum; with all four there the sum has as much as without.
    assert noises[2] == pytest.approx(noises[0], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "key", "fact"),
    [
        (["--runtime", "cloud"], "--runtime", "cloud"),
        (["--noise", "server"], "noise", "server"),
        (["--tolerate", "1"], "tolerate", "--noise devices"),
        (["--chains", "0"], "--chains", 0),
        (["--chains", "1" + 20 * "0"], "--chains", "10,000,000"),
        (["--deadline", "0"], "--deadline", "0.0"),
        (["--own-data"], "--own-data", "--prepare"),
        (["--prepare", "--noise", "simulated"], "--noise", "simulated"),
        (["--prepare", "--address", "here"], "--address", "here"),
        (["--prepare", "--address", "10.0.0.5:65536"], "--address", "10.0.0.5:65536"),
        (
            ["--prepare", "--address", "größe.example:8000"],
            "--address",
            "größe.example:8000",
        ),
        (["--address", "10.0.0.5:8000"], "--address", "--prepare"),
        (["--ledger", "nowhere/ledger.jsonl"], "--ledger", "nowhere/ledger.jsonl"),
        (
            [
                "--noise",
                "devices",
                "--tolerate",
                "4",
                "--set",
                "policy.power=noiseless-dp",
            ],
            "tolerate",
            "0 and 3",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    call: Any, small: Path, tmp_path: Path, arguments: list[str], key: str, fact: object
) -> None:
    code, out, err = call("federate", small, "--out", tmp_path / "out", *arguments)
    assert (code, out) == (2, "")
    assert names_key(err, key, fact), err
    assert not (tmp_path / "out" / "federation").exists()


def test_what_others_have_written_is_left_alone(
    call: Any, small: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "out" / "federation" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    code, _, err = call(
        "federate", small, "--runtime", "process", "--out", tmp_path / "out"
    )
    assert code == 2
    assert names_key(err, "--out", mine.parent)
    assert mine.read_text() == "mine"
    # Nor is a chain begun beside the ledger of another run without looking at it.
    assert call("run", small, "--out", tmp_path / "run", "--json")[0] == 0
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    code, _, err = call(
        "federate", small, "--runtime", "process", "--out", tmp_path / "run"
    )
    assert code == 2
    assert names_key(err, "--out", "--ledger", tmp_path / "run" / "ledger.jsonl")
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before
    assert not (tmp_path / "run" / "federation").exists()


def test_a_federation_that_was_not_written_whole_is_written_again_and_moves_with_its_folder(
    call: Any, small: Path, tmp_path: Path
) -> None:
    begun = tmp_path / "out" / "federation.part"
    begun.mkdir(parents=True)
    (begun / "about.json").write_text("{}")
    assert (
        call(
            "federate",
            small,
            "--runtime",
            "process",
            "--out",
            tmp_path / "out",
            "--json",
        )[0]
        == 0
    )
    (tmp_path / "out").rename(tmp_path / "moved")
    assert (
        call(
            "federate",
            small,
            "--runtime",
            "process",
            "--out",
            tmp_path / "moved",
            "--json",
        )[0]
        == 0
    )
    assert not (tmp_path / "out").exists()


def test_what_a_ledger_holds_is_not_spent_again(
    call: Any, small: Path, tmp_path: Path
) -> None:
    scenario = load_scenario(
        str(small),
        ["posterior.preconditioner=private-whiten", "posterior.intercept=true"],
    )
    inputs = build(scenario)
    path = tmp_path / "shared.jsonl"
    book = Ledger(inputs.privacy, 4, subject=inputs.posterior.digest, path=path)
    book.charge("an earlier run", 0, [book.budget / 2])
    more = (
        "--set",
        "posterior.preconditioner=private-whiten",
        "--set",
        "posterior.intercept=true",
        "--ledger",
        path,
    )
    code, out, err = call(
        "federate",
        small,
        "--runtime",
        "process",
        "--out",
        tmp_path / "out",
        *more,
        "--json",
    )
    assert code == 0, err
    release = inputs.release
    assert release is not None
    book = Ledger(inputs.privacy, 4, subject=inputs.posterior.digest, path=path)
    assert book.rounds(release.name) == len(release.loss)
    assert 0.6 < np.max(book.spent / book.budget) <= 1 + 1e-9
    for k in range(4):
        lines = (
            (tmp_path / "out" / "federation" / f"device-{k}" / "ledger.jsonl")
            .read_text()
            .splitlines()
        )
        before = json.loads(lines[1])
        assert before["round"] == 0
        assert before["loss"][0] == pytest.approx(book.budget[k] / 2 + release.spent[k])
    assert strict(out)["federation"]["absences"] == 0
    # A real server begins a ledger of its own with all of that: with the owner's it could try whose data these are.
    assert (
        call("federate", small, "--prepare", "--out", tmp_path / "real", *more)[0] == 0
    )
    server = tmp_path / "real" / "federation" / "server" / "ledger.jsonl"
    assert json.loads(server.read_text().splitlines()[0])["subject"] == ""
    assert Anchor.of(server).salt != Anchor.of(path).salt
    # Its release has noise that protects: it is another one, and costs as much again.
    np.testing.assert_allclose(
        Ledger(inputs.privacy, 4, path=server).spent, book.spent + release.spent
    )
    assert call("plan", small, *more[2:4], "--ledger", server, "--no-compare")[0] == 0


def test_every_chain_of_real_devices_is_paid_for(
    call: Any, small: Path, tmp_path: Path
) -> None:
    # The key of the scenario's seed, which anybody may know.
    keys = {tuple(jax.random.key_data(jax.random.key(0)).tolist())}
    for name, chains in (("one", ()), ("three", ("--chains", 3))):
        assert (
            call("federate", small, "--prepare", "--out", tmp_path / name, *chains)[0]
            == 0
        )
        job = Job.load(tmp_path / name / "federation" / "server")
        assert job.releases == job.chains == (3 if chains else 1)
        total = job.planned_loss.sum(0) / job.plan.privacy.budget(4)
        assert total.max() == pytest.approx(1)
        assert job.noise == "channel"
        assert job.lattice is not None
        keys.add(tuple(job.key.tolist()))
    assert len(keys) == 3
    code, _, err = call(
        "federate", small, "--runtime", "process", "--out", tmp_path / "one"
    )
    assert code == 2
    assert names_key(err, "--out", tmp_path / "one")


def test_without_flower_a_sentence_says_what_to_install(
    call: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "flwr" else find(name, *more),
    )
    code, _, err = call("federate", small, "--out", tmp_path / "out")
    assert code == 2
    assert names_key(err, "--runtime", "wflmc[flower]")


@pytest.mark.skipif(
    not FULL, reason="starts ray, and make federation does too: make test-full runs it"
)
def test_clients_in_flowers_simulation_engine_are_the_simulators_chain(
    small: Path, tmp_path: Path, call: Any
) -> None:
    pytest.importorskip(
        "ray",
        reason="Flower's simulation engine needs ray: pip install 'wflmc[flower]'",
    )
    devices, rounds = count(4, 30), count(3, 20)
    sizes = {
        "posterior.devices": devices,
        "sampler.burn_in": rounds - 2,
        "sampler.samples": 2,
    }
    arguments = [
        str(small),
        *(
            word
            for name, value in sizes.items()
            for word in ("--set", f"{name}={value}")
        ),
        "--json",
    ]
    command = [
        sys.executable,
        "-m",
        "wflmc",
        "federate",
        *arguments,
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [*command, "--deadline", "1800"],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = strict(done.stdout)
    assert len(summary["federation"]["sent"]) == rounds
    assert max(summary["federation"]["sent"]) == devices
    assert summary["federation"]["absences"] == 0
    assert "Traceback" not in done.stderr
    assert "emulated-channel" in codes_of(summary)
    assert call("run", *arguments, "--out", tmp_path / "run")[0] == 0
    assert (
        np.abs(samples(tmp_path / "out") - samples(tmp_path / "run")).max() < ROUNDING
    )
    for k in range(devices):
        assert (
            tmp_path / "out" / "federation" / f"device-{k}" / "ledger.jsonl"
        ).exists()
