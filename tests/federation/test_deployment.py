"""The federation on machines of its own: certificates, folders, the two apps, and a real deployment on loopback."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import Context, RecordDict

import wflmc
from wflmc.apps.federation import certificates, device, registration
from wflmc.apps.federation import flower_server as serving
from wflmc.apps.federation.certificates import (
    write_authority,
    write_device_key,
    write_server_certificate,
)
from wflmc.apps.federation.deployment import (
    END_SIGNALS,
    LOOPBACK_HOST,
    Loopback,
    environment,
    free_port,
    prepare,
)
from wflmc.apps.federation.job import make_job, write_federation
from wflmc.apps.federation.messages import Reception
from wflmc.apps.federation.registration import (
    DeploymentError,
    Node,
    read_nodes,
    register,
)
from wflmc.apps.federation.server import open_server, read_log, trace_of
from wflmc.runs.planning import make_plan
from wflmc.sampling.checkpoint import Checkpoint
from wflmc.scenario import load_scenario
from wflmc.scenario.build import build
from wflmc.support.errors import InputError

from ..conftest import FULL
from ..error_tools import raises_input_error
from ..federation_tools import FIRST, ROUNDING, LocalGrid
from ..plan_tools import with_context

ROOT = Path(__file__).parents[2]
DEVICES = 3
CHAINS = 2


@pytest.fixture(scope="module")
def setting():
    """A small study: scenario, inputs and job."""
    changes = [
        f"posterior.devices={DEVICES}",
        "sampler.burn_in=2",
        "sampler.samples=3",
        "link.snr_db=10",
    ]
    scenario = load_scenario(ROOT / "examples" / "fading.toml", changes)
    inputs = build(scenario)
    job = make_job(
        jax.random.key(0),
        inputs.posterior,
        inputs.link,
        make_plan(scenario, inputs),
        chains=CHAINS,
    )
    return scenario, inputs, job


@pytest.fixture
def folder(setting, tmp_path):
    """The folder of a federation that is ready for deployment."""
    scenario, inputs, job = setting
    write_federation(tmp_path / "fed", scenario, inputs, job)
    prepare(tmp_path / "fed", DEVICES, "10.0.0.7:9000")
    return tmp_path / "fed"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_server_s_certificate_is_the_authority_s(folder):
    server = folder / "server"
    authority, certificate = (
        x509.load_pem_x509_certificate((server / name).read_bytes())
        for name in ("ca.crt", "server.pem")
    )
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [
        "127.0.0.1",
        "::1",
        "10.0.0.7",
    ]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(
        x509.BasicConstraints
    ).value.ca
    key = load_pem_private_key((server / "server.key").read_bytes(), None)
    assert key.public_key() == certificate.public_key()


def _handshake(served: Path, trusted: Path, host: str) -> None:
    """A TLS handshake in memory, between a server with a certificate and a client that trusts an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(served / "server.pem", served / "server.key")
    inbound, outbound = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(trusted)).wrap_bio(
        inbound, outbound, server_hostname=host
    )
    server = context.wrap_bio(outbound, inbound, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    client.do_handshake()


def test_devices_trust_their_server_and_no_other(folder, tmp_path):
    served = folder / "server"
    for host in ("localhost", "10.0.0.7"):
        _handshake(served, folder / "device-0" / "ca.crt", host)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        _handshake(served, folder / "device-0" / "ca.crt", "other.example")
    write_authority(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(served, tmp_path / "ca.crt", "10.0.0.7")


def test_devices_have_keys_of_their_own_on_p384(folder):
    publics = set()
    for k in range(DEVICES):
        device_folder = folder / f"device-{k}"
        private = load_ssh_private_key((device_folder / "key").read_bytes(), None)
        public = load_ssh_public_key((device_folder / "key.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert private.public_key() == public
        assert (folder / "server" / "keys" / f"device-{k}.pub").read_bytes() == (
            device_folder / "key.pub"
        ).read_bytes()
        publics.add((device_folder / "key.pub").read_bytes())
    assert len(publics) == DEVICES


def test_secrets_are_their_owner_s_alone(folder, tmp_path):
    secrets = [folder / "ca" / "ca.key", folder / "server" / "server.key"]
    secrets += [folder / f"device-{k}" / "key" for k in range(DEVICES)]
    assert {_mode(path) for path in secrets} == {0o600}
    assert {_mode(folder / name) for name in ("ca", "server", "device-0")} == {0o700}
    assert not [
        path
        for path in (folder / "server").rglob("*")
        if path.name in ("ca.key", "key", "data.npz", "secret")
    ]
    assert not [
        path
        for path in (folder / "device-0").rglob("*")
        if path.name in ("ca.key", "server.key", "job.npz")
    ]
    open_to_all = tmp_path / "key"
    open_to_all.write_text("x")
    open_to_all.chmod(0o644)
    write_device_key(tmp_path)
    assert _mode(open_to_all) == 0o600


def test_the_app_that_is_sent_out_has_no_code_and_no_secret(folder):
    app = folder / "server" / "app"
    assert [path.name for path in app.iterdir()] == ["pyproject.toml"]
    settings = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]
    assert settings["components"] == {
        "serverapp": "wflmc.apps.federation.flower_server:app",
        "clientapp": "wflmc.apps.federation.device:app",
    }
    assert settings["config"].keys() == {"folder", "deadline", "wait"}
    config = tomllib.loads((folder / "server" / "flwr" / "config.toml").read_text())[
        "superlink"
    ]
    assert config["wflmc"]["address"] == "10.0.0.7:9000"
    assert (
        Path(config["wflmc"]["root-certificates"]).read_bytes()
        == (folder / "ca" / "ca.crt").read_bytes()
    )


def test_commands_name_files_that_are_there(folder):
    text = (folder / "COMMANDS.md").read_text()
    server, *devices = re.split(r"^Device \d+, in the folder", text, flags=re.M)
    files = {"ca.crt", "server.pem", "server.key", "flwr/config.toml"}
    for name in files:
        assert f" {name}" in server
        assert (folder / "server" / name).exists()
    assert len(devices) == DEVICES
    ports = set()
    for part in devices:
        machine_folder = folder / re.match(r" `(.+)`", part)[1]
        options = dict(re.findall(r"--([\w-]+) (\S+)", part))
        assert (machine_folder / options["root-certificates"]).exists()
        assert (machine_folder / options["auth-supernode-private-key"]).exists()
        assert options["superlink"] == "10.0.0.7:9000"
        ports.add(options["port"])
    assert len(ports) == DEVICES
    assert (
        folder / "server" / re.search(r"flwr run (\w+)", text)[1] / "pyproject.toml"
    ).exists()


def test_preparing_again_keeps_keys_and_renews_what_was_taken_away(folder):
    names = ["server/server.pem", "device-0/key", "device-1/key.pub", "ca/ca.key"]
    before = {name: (folder / name).read_bytes() for name in names}
    (folder / "device-1" / "key.pub").unlink()
    prepare(folder, DEVICES)
    assert [name for name in names if (folder / name).read_bytes() != before[name]] == [
        "device-1/key.pub"
    ]
    copy = folder / "server" / "keys" / "device-1.pub"
    assert copy.read_bytes() == (folder / "device-1" / "key.pub").read_bytes()


def test_a_certificate_can_be_renewed_by_the_same_authority(folder):
    (folder / "server" / "server.pem").unlink()
    before = (folder / "device-0" / "ca.crt").read_bytes()
    prepare(folder, DEVICES, "new.example:9000")
    assert (folder / "device-0" / "ca.crt").read_bytes() == before
    _handshake(folder / "server", folder / "device-0" / "ca.crt", "new.example")


def _grid(folder: Path, fault=None) -> LocalGrid:
    """The devices' own app in one process, each with its own folder."""

    def app(message, context):
        context.node_config["folder"] = str(
            folder / f"device-{context.node_config['partition-id']}"
        )
        return device.app(message, context)

    return LocalGrid(app, DEVICES, fault)


def _lost(device: int, number: int):
    """A fault: one reply never arrives."""

    def fault(answer, answering):
        answered_round = (
            None if answer.has_error() else answer.content["about"].get("round")
        )
        return None if (answering, answered_round) == (device, number) else answer

    return fault


def _serve(fed: Path, grid: LocalGrid, **config: object) -> None:
    run_config = {"folder": str(fed / "server"), "deadline": 0.0, "wait": 0.0, **config}
    if not (fed / "server" / "nodes.json").exists():
        _known(fed, {FIRST + k: k for k in range(DEVICES)})
    serving.app(grid, Context(1, 1, {}, RecordDict(), run_config))


def _losses(folder: Path, name: str = "server") -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / name / "ledger.jsonl").read_text().splitlines()[1:]
    ]


def _known(folder: Path, nodes: dict[int, int]) -> None:
    rows = [
        Node(node, device, f"key {device}")._asdict() for node, device in nodes.items()
    ]
    (folder / "server" / "nodes.json").write_text(json.dumps(rows))


def test_the_two_apps_draw_the_simulator_s_chains(folder, setting, capsys):
    _, inputs, job = setting
    _serve(folder, _grid(folder))
    actual = trace_of(open_server(job, folder / "server")).theta
    expected = wflmc.sample(jax.random.key(0), inputs.posterior, job.plan, CHAINS).theta
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ROUNDING)
    lines = capsys.readouterr().out.splitlines()
    assert len(
        [line for line in lines if re.match(r"round \d: \d of \d sent", line)]
    ) == len(job.plan.rounds)
    assert lines[-1] == "all rounds are done"
    assert np.allclose([line["loss"] for line in _losses(folder)], job.plan.loss)


def test_a_device_is_the_node_with_its_key(folder, setting):
    _known(folder, {FIRST: 0, FIRST + 1: 1})
    _serve(folder, _grid(folder))
    absent = [
        row["absent"]
        for row in read_log(folder / "server")
        if setting[2].plan.weight[row["round"], 2]
    ]
    assert absent
    assert all("2" in devices for devices in absent)
    assert not any(line["loss"][2] for line in _losses(folder))


def test_a_node_that_is_another_device_is_not_heard(folder):
    _known(folder, {FIRST: 1, FIRST + 1: 0, FIRST + 2: 2})
    # Only these two devices are to send in the last round.
    with pytest.raises(DeploymentError, match="No device has answered"):
        _serve(folder, _grid(folder))
    absent = [row["absent"] for row in read_log(folder / "server")]
    assert all(
        "refused by the device" in why
        for row in absent
        for device, why in row.items()
        if device in "01"
    )
    assert not any(line["loss"][0] or line["loss"][1] for line in _losses(folder))


def _stopped_before_keeping(folder: Path, monkeypatch, round_index: int) -> None:
    """A server that dies after a round has been paid for and before its result is kept."""
    save = Checkpoint.save

    def broken(self, progress):
        if progress.rounds == round_index + 1:
            raise KeyboardInterrupt
        save(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", broken)
        with pytest.raises(KeyboardInterrupt):
            _serve(folder, _grid(folder))


def test_a_server_that_died_after_paying_pays_once(folder, setting, monkeypatch):
    _, inputs, job = setting
    _stopped_before_keeping(folder, monkeypatch, round_index=2)
    assert len(_losses(folder)) == 3
    _serve(folder, _grid(folder))
    assert [line["round"] for line in _losses(folder)] == list(
        range(len(job.plan.rounds))
    )
    for k in range(DEVICES):
        sent_rounds = np.flatnonzero(job.plan.weight[:, k] > 0).tolist()
        assert [line["round"] for line in _losses(folder, f"device-{k}")] == sent_rounds
    actual = trace_of(open_server(job, folder / "server")).theta
    expected = wflmc.sample(jax.random.key(0), inputs.posterior, job.plan, CHAINS).theta
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ROUNDING)


def test_a_device_that_paid_and_is_gone_does_not_hold_up_the_server(
    folder, setting, monkeypatch
):
    plan = setting[2].plan
    _stopped_before_keeping(folder, monkeypatch, round_index=1)
    _serve(folder, _grid(folder, _lost(device=1, number=1)))
    # What was paid stays paid.
    assert np.allclose([line["loss"] for line in _losses(folder)], plan.loss)
    # A round is repeated by all devices that paid for it, or lost.
    assert read_log(folder / "server")[1]["sent"] == 0


def test_one_folder_has_one_run_at_a_time(folder):
    refused = []

    def meanwhile(answer, device):
        with raises_input_error("job", folder / "server", f"process {os.getpid()}"):
            _serve(folder, _grid(folder))
        refused.append(device)
        return answer

    _serve(folder, _grid(folder, meanwhile))
    assert refused


def test_a_server_that_nobody_answers_asks_again_and_gives_up(setting, capsys):
    job = setting[2]
    answers = iter([False, True])

    def exchange(asks):
        return Reception(None, np.array([next(answers)]), {0: "not connected"})

    assert serving.repeat_until_answered(exchange, wait=60, pause=0)(["ask"]).sent.any()
    assert "asking again; device 0: not connected" in capsys.readouterr().out

    def silent(asks):
        return Reception(None, np.zeros(job.plan.devices, bool), {0: "late"})

    with pytest.raises(DeploymentError, match="No device has answered"):
        serving.repeat_until_answered(silent, wait=0, pause=0)(["ask"])


@pytest.mark.parametrize(
    "config", [{"deadline": "soon"}, {"wait": -1}, {"folder": "nowhere"}]
)
def test_a_run_config_that_cannot_be_is_refused(folder, config):
    with pytest.raises(InputError):
        _serve(folder, _grid(folder), **config)


def test_a_device_needs_its_folder():
    with raises_input_error("node-config", value=None):
        device.configured_device(Context(1, 1, {}, RecordDict(), {}))


def test_registration_registers_what_is_new(folder, monkeypatch):
    calls = []
    registered = {}

    def flwr(words, env, folder=None):
        calls.append(words[1])
        if words[1] == "register":
            node = 10**18 + len(calls)
            registered[node] = words[2]
            return {"node-id": str(node)}
        if words[1] == "unregister":
            del registered[int(words[2])]
        return {"nodes": [{"node-id": str(node)} for node in registered]}

    monkeypatch.setattr(registration, "flwr", flwr)
    server = folder / "server"
    first = register(server, "wflmc", {})
    assert [row.device for row in first] == list(range(DEVICES))
    assert calls == ["list"] + ["register"] * DEVICES
    assert register(server, "wflmc", {}) == first == read_nodes(server)
    assert calls[-1] == "list"
    (folder / "device-1" / "key.pub").unlink()
    prepare(folder, DEVICES)
    second = register(server, "wflmc", {})
    assert calls[-2:] == ["unregister", "register"]
    assert [a.node == b.node for a, b in zip(first, second, strict=True)] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "fact"),
    [("device-00.pub", "device 0"), ("device-a.pub", "device number")],
)
def test_a_key_file_without_a_device_of_its_own_is_refused(folder, name, fact):
    keys = folder / "server" / "keys"
    (keys / name).write_bytes((keys / "device-0.pub").read_bytes())
    with raises_input_error("keys", keys / name, fact):
        register(folder / "server", "wflmc", {})


def test_registration_stopped_between_two_keys_of_a_device_can_be_repeated(
    folder, monkeypatch
):
    """Flower lists nodes that were unregistered, too, and admits no key twice."""
    status_of = {}
    keys = set()

    def flwr(words, env, folder=None):
        if words[1] == "register":
            key = Path(words[2]).read_text()
            if key in keys:
                raise DeploymentError("Public key already in use.")
            keys.add(key)
            node = str(10**18 + len(status_of))
            status_of[node] = "registered"
            return {"node-id": node}
        assert words[1] == "list"
        rows = [{"node-id": node, "status": status_of[node]} for node in status_of]
        return {"nodes": rows}

    monkeypatch.setattr(registration, "flwr", flwr)
    server = folder / "server"
    first = register(server, "wflmc", {})
    status_of[str(first[1].node)] = "unregistered"
    with pytest.raises(DeploymentError, match=r"device-1\.pub: Public key"):
        register(server, "wflmc", {})
    (folder / "device-1" / "key.pub").unlink()
    prepare(folder, DEVICES)
    second = register(server, "wflmc", {})
    assert first[0] == second[0]
    assert first[1].node != second[1].node
    assert first[2] == second[2]


def test_registration_without_flower_is_a_deployment_error(tmp_path):
    with pytest.raises(DeploymentError, match="cannot be started"):
        registration.flwr(["ls"], {"PATH": ""}, tmp_path / "missing")


def test_a_table_with_a_node_twice_is_refused(folder):
    rows = [Node(7, 0, "a")._asdict(), Node(7, 1, "b")._asdict()]
    (folder / "server" / "nodes.json").write_text(json.dumps(rows))
    with raises_input_error("nodes", folder / "server" / "nodes.json"):
        read_nodes(folder / "server")


def test_server_certificates_need_the_authority_s_key(tmp_path):
    write_authority(tmp_path)
    write_server_certificate(tmp_path, tmp_path, ["localhost"])
    _handshake(tmp_path, tmp_path / "ca.crt", "localhost")


def test_a_host_name_of_a_certificate_is_ascii(tmp_path):
    write_authority(tmp_path)
    with pytest.raises(InputError, match="ASCII"):
        write_server_certificate(tmp_path, tmp_path, ["bücher.example"])
    assert not (tmp_path / "server.key").exists()


def test_a_renewed_certificate_is_of_the_same_authority(folder, tmp_path, monkeypatch):
    """Where the folders of server and devices have moved to their machines."""
    authority, new = folder / "ca", tmp_path / "renewed"
    monkeypatch.setattr(
        sys, "argv", ["certificates.py", str(authority), str(new), "server.example.org"]
    )
    runpy.run_path(certificates.__file__, run_name="__main__")
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
    assert stat.S_IMODE((new / "server.key").stat().st_mode) == 0o600
    _handshake(new, folder / "device-0" / "ca.crt", "server.example.org")
    with pytest.raises(FileNotFoundError, match=r"ca\.key"):
        write_server_certificate(tmp_path / "nothing", new, ["localhost"])


def test_commands_have_the_deadline_that_is_asked_for(folder):
    prepare(folder, DEVICES, deadline=240)
    assert "deadline=240.0" in (folder / "COMMANDS.md").read_text()


def test_a_server_whose_ledger_stayed_elsewhere_is_refused(folder, setting):
    job = setting[2]
    spent = with_context(job.plan, ledger=np.full(DEVICES, 1e-3))
    replace(job, plan=spent).save(folder / "server")
    with raises_input_error("ledger", folder / "server" / "ledger.jsonl"):
        _serve(folder, _grid(folder))


@pytest.mark.parametrize("number", END_SIGNALS)
def test_a_signal_to_end_ends_a_deployment_unless_it_is_ignored(folder, number):
    def nothing(*_):
        """Any handler of one's own."""

    before = signal.signal(number, nothing)
    try:
        with pytest.raises(SystemExit) as end, Loopback(folder, port=8000):
            signal.raise_signal(number)
        assert end.value.code == 128 + number
        assert signal.getsignal(number) is nothing
        signal.signal(number, signal.SIG_IGN)  # as under nohup
        with Loopback(folder, port=8000):
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_port_that_is_taken_is_not_used(monkeypatch):
    with socket.socket() as other:
        other.bind((LOOPBACK_HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda *_: [taken])
        with pytest.raises(DeploymentError, match="No free port"):
            free_port()


def test_processes_run_this_wflmc_and_ask_nothing_of_the_network(tmp_path):
    env = environment(tmp_path / "home")
    assert env["PATH"].startswith(str(Path(sys.executable).parent))
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(
        Path(wflmc.__file__).parents[1]
    )
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"]) == (
        "0",
        "1",
    )


@pytest.mark.skipif(
    not FULL, reason="minutes of real processes: make test-full runs it"
)
@pytest.mark.parametrize("what", ["simulation", "deployment"])
def test_flower_s_own_runtimes_draw_the_simulator_s_chains(what):
    command = [sys.executable, str(ROOT / "scripts" / "federation.py"), what]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
