"""Devices with their own data: what is said of their samples, and a federation whose devices cannot read theirs."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from flwr.app import Context, Message, RecordDict

from wflmc.apps.diagnosis import advice, causes
from wflmc.apps.federation import device as device_module
from wflmc.apps.federation import flower_server as serving
from wflmc.apps.federation.deployment import why_stopped
from wflmc.apps.federation.device import client_app, devices_in, open_device
from wflmc.apps.federation.execution import STAND_IN
from wflmc.apps.federation.flower_server import (
    Transport,
    check_ready,
    identify_devices,
    run_in_engine,
)
from wflmc.apps.federation.registration import DeploymentError, Node
from wflmc.apps.federation.server import read_log
from wflmc.planning import Plan
from wflmc.posterior import Posterior

from ..cli_tools import strict
from ..conftest import FULL
from ..federation_tools import FIRST, LocalGrid, make_federation

DEVICES = 3
SIZES = (11, 23, 40)
"""Examples of every device: the stand-in has 20 of each."""
SCENARIO = """
[posterior]
devices = 3
examples = 60
[privacy]
epsilon = 60.0
delta = 0.01
[sampler]
burn_in = 4
samples = 8
"""


class OwnData:
    """A prepared federation, whose devices and server run in this process."""

    def __init__(self, call: Any, folder: Path) -> None:
        self.call = call
        self.folder = folder / "run"
        self.scenario = folder / "scenario.toml"
        self.scenario.write_text(SCENARIO)
        self.federate()
        nodes = [Node(FIRST + k, k, f"key {k}")._asdict() for k in range(DEVICES)]
        (self.server / "nodes.json").write_text(json.dumps(nodes))

    @property
    def server(self) -> Path:
        return self.folder / "federation" / "server"

    def device(self, k: int) -> Path:
        return self.folder / "federation" / f"device-{k}"

    def federate(self) -> dict[str, Any]:
        """Repeat the command of the preparation, which finishes a run whose rounds are done."""
        options = (
            "--prepare",
            "--own-data",
            "--chains",
            2,
            "--out",
            self.folder,
            "--json",
        )
        code, out, err = self.call("federate", self.scenario, *options)
        assert code == 0, err
        # Earlier lines are those of the server's app.
        return dict(strict(out.splitlines()[-1]))

    def bring_data(self, k: int) -> None:
        """Give a device its own data, far from those of the stand-in."""
        rng = np.random.default_rng(k)
        X = rng.normal(size=(SIZES[k], 5))
        np.savez(self.device(k) / "data.npz", X=X, y=X @ [4.0, -3.0, 2.0, 1.0, 5.0])

    def run(self, fault: Any = None) -> None:
        """Run the server's own app to its end."""

        def app(message: Message, context: Context) -> Message:
            context.node_config["folder"] = str(
                self.device(int(context.node_config["partition-id"]))
            )
            return device_module.app(message, context)

        config = {"folder": str(self.server), "deadline": 0.0, "wait": 0.0}
        serving.app(
            LocalGrid(app, DEVICES, fault), Context(1, 1, {}, RecordDict(), config)
        )

    def charges(self, folder: Path) -> int:
        """Rounds that the ledger in a folder has."""
        path = folder / "ledger.jsonl"
        return len(path.read_text().splitlines()[1:]) if path.exists() else 0


@pytest.fixture
def own_data(call: Any, tmp_path: Path) -> OwnData:
    return OwnData(call, tmp_path)


def test_samples_of_devices_own_data_are_not_judged_by_the_stand_in(
    own_data: OwnData, call: Any
) -> None:
    for k in range(DEVICES):
        own_data.bring_data(k)
    own_data.run()
    log = read_log(own_data.server)
    for row in log:
        row["seconds"] = (
            50.0  # of real devices, which the command that evaluates has not waited for
        )
    (own_data.server / "rounds.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in log)
    )
    summary = own_data.federate()
    assert summary["federation"]["own_data"] is True
    compared = (
        "w2_sq",
        "exact_w2_sq",
        "exact_ess_min",
        "coverage",
        "accuracy",
        "rmse",
        "nll",
    )
    assert {name: summary[name] for name in compared} == dict.fromkeys(compared)
    assert summary["seconds"] == pytest.approx(50.0 * len(log))
    plan = json.loads((own_data.folder / "plan.json").read_text())
    assert plan["own_data"] is True
    assert plan["exact_w2_sq"] is plan["exact_ess_min"] is None
    assert any(STAND_IN in warning for warning in summary["warnings"])
    assert summary["diagnosis"] is None
    diagnosis = strict(call("advise", own_data.folder, "--json")[1])["diagnosis"]
    # The plan's constants are those of the stand-in data.
    assert all(cause["change"] is None for cause in diagnosis)
    assert call("report", own_data.folder)[0] == 0
    page = _words(own_data.folder / "report.html")
    by_the_stand_in = (
        "z =",
        "resemble",
        "by the exact law",
        "60 examples",
        "20 each",
        "distributed at random",
    )
    for claim in (*by_the_stand_in, "of one chain"):
        assert claim not in page, claim
    assert page.count("never sees") == 1
    assert "600 seconds" in page
    assert "2 chains together" in page
    assert "effective sample" in page


def test_the_command_says_once_why_nothing_is_compared(
    own_data: OwnData, call: Any
) -> None:
    for k in range(DEVICES):
        own_data.bring_data(k)
    own_data.run()
    options = ("--prepare", "--own-data", "--chains", 2, "--out", own_data.folder)
    code, out, err = call("federate", own_data.scenario, *options)
    assert code == 0, err
    assert out.count("never sees") == 1
    assert "W2²" not in out


def test_the_diagnosis_of_own_data_does_not_look_at_the_stand_in(
    own_data: OwnData, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []

    def find_causes(plan: Plan, posterior: Posterior | None, *others: Any) -> Any:
        looked_at.append(posterior)
        return causes.find_causes(plan, posterior, *others)

    monkeypatch.setattr(advice, "find_causes", find_causes)
    for k in range(DEVICES):
        own_data.bring_data(k)
    own_data.run()
    own_data.federate()
    assert looked_at == []
    advice.advise_run(own_data.folder)
    assert looked_at == [None]


def _words(page: Path) -> str:
    """The text of a page in one line, without the explorer, which is about another setting."""
    body = page.read_text().partition('<section id="explore')[0]
    body = re.sub(r"<(script|style).*?</\1>", "", body, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", body)).split())


def test_devices_that_cannot_read_their_data_stop_the_federation_before_anybody_pays(
    own_data: OwnData,
) -> None:
    own_data.bring_data(0)
    (own_data.device(2) / "data.npz").write_bytes(b"secret 1234")
    with pytest.raises(DeploymentError) as stopped:
        own_data.run()
    sentence = str(stopped.value)
    assert "device-1" in sentence
    assert "device-2" in sentence
    assert "device-0" not in sentence
    assert "1234" not in sentence
    assert "data.npz" not in sentence
    assert [
        own_data.charges(folder)
        for folder in (own_data.server, *map(own_data.device, range(3)))
    ] == [0] * 4
    assert read_log(own_data.server) == []
    # Nothing is lost: with data that can be read the same federation runs.
    for k in (1, 2):
        own_data.bring_data(k)
    own_data.run()
    assert own_data.federate()["federation"]["absences"] == 0


def test_a_device_whose_data_go_away_is_absent_until_the_server_starts_again(
    own_data: OwnData,
) -> None:
    for k in range(DEVICES):
        own_data.bring_data(k)
    answers = []

    def fault(answer: Message, device: int) -> Message:
        answers.append(device)
        if len(answers) == 2 * DEVICES:  # after the greeting and a first round
            (own_data.device(1) / "data.npz").unlink()
            open_device.cache_clear()  # as a new process for every message has none
        if len(answers) == 3 * DEVICES:
            raise KeyboardInterrupt
        return answer

    with pytest.raises(KeyboardInterrupt):
        own_data.run(fault)
    paid = own_data.charges(own_data.server)
    with pytest.raises(DeploymentError, match="device-1"):
        own_data.run()
    assert own_data.charges(own_data.server) == paid
    own_data.bring_data(1)
    own_data.run()
    assert len(read_log(own_data.server)) == 12


def test_devices_that_are_not_there_or_late_do_not_stop_the_federation(
    tmp_path: Path,
) -> None:
    federation = make_federation(tmp_path)
    grid = LocalGrid(
        federation.app(), 5, lambda answer, device: None if device == 2 else answer
    )
    # Node FIRST + 9 is not connected.
    nodes = {FIRST + k: k for k in range(5)} | {FIRST + 9: 9}
    check_ready(Transport(grid, federation.job, nodes, deadline=0.0))


def test_an_engine_whose_devices_cannot_read_their_data_names_them(
    tmp_path: Path,
) -> None:
    federation = make_federation(tmp_path)
    devices = federation.devices()

    def find(context: Context) -> Any:
        k = int(context.node_config["partition-id"])
        if k in (1, 3):
            raise OSError("a secret place")
        return devices[k]

    with pytest.raises(DeploymentError) as stopped:
        identify_devices(
            Transport(LocalGrid(client_app(find), 5), federation.job, {}, deadline=0.0),
            wait=0.0,
        )
    assert re.findall(r"device-\d", str(stopped.value)) == ["device-1", "device-3"]
    assert "secret" not in str(stopped.value)


@pytest.mark.skipif(not FULL, reason="starts ray: make test-full runs it")
def test_flowers_engine_stops_before_anybody_pays(tmp_path: Path) -> None:
    federation = make_federation(tmp_path, {"posterior.devices": 3})
    for k in (1, 2):
        (tmp_path / f"device-{k}" / "data.npz").unlink()
    server = federation.server()
    with pytest.raises(DeploymentError, match="device-1, device-2"):
        run_in_engine(server, devices_in(tmp_path), deadline=60.0)
    assert server.ledger is not None
    assert not server.ledger.spent.any()
    ledger = open_device(tmp_path / "device-0").ledger
    assert ledger is None or not ledger.entries


def test_a_deployment_that_stops_gives_the_servers_own_reason() -> None:
    written = "Traceback:\nwflmc.federated.registration.DeploymentError: device-1: no data\nExit"
    assert why_stopped(written) == "device-1: no data"
    assert "Killed" in why_stopped("Killed")


@pytest.mark.parametrize("module", ["registration", "certificates"])
def test_modules_that_are_commands_run_without_a_warning(module: str) -> None:
    command = [
        sys.executable,
        "-W",
        "error::RuntimeWarning",
        "-m",
        f"wflmc.apps.federation.{module}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("python -m wflmc.apps.federation")
    assert "Warning" not in done.stderr
