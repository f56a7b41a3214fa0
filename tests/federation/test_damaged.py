"""Damaged files of federations: one sentence that names the file, whatever stands in it, and never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from wflmc.apps.federation.device import open_device
from wflmc.apps.federation.job import Job
from wflmc.apps.federation.messages import Terms
from wflmc.apps.federation.server import open_server, read_log, run_in_process, trace_of
from wflmc.support.errors import InputError

from ..error_tools import raises_input_error
from ..federation_tools import Federation, make_federation

DEEP = "[" * 5000 + "]" * 5000
"""Deeper than what reads it can go."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("damaged"))


@pytest.fixture
def folder(federation: Federation, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(federation.folder, tmp_path / "federation"))


def rewrite(path: Path, change: dict[str, Any]) -> None:
    """Give keys of a JSON file other values; None removes a key."""
    content = {
        key: value
        for key, value in (json.loads(path.read_text()) | change).items()
        if value is not None
    }
    path.write_text(json.dumps(content).replace('"@"', DEEP))


@pytest.mark.parametrize(
    "change",
    [
        {"tolerate": [1, 2]},
        {"releases": "2"},
        {"batch": "@"},
        {"tolerate": 10**9},
        {"noise": None},
        {"digest": -1.0},
        {"other": 1},
    ],
)
def test_jobs(folder: Path, change: dict[str, Any]) -> None:
    rewrite(folder / "server" / "job.json", change)
    with raises_input_error("job"):
        Job.load(folder / "server")


def test_arrays_of_jobs(folder: Path) -> None:
    folder = folder / "server"
    changes: dict[str, list[dict[str, Any]]] = {
        "job.npz": [
            {"position": np.array("x")},
            {"known": np.zeros(0)},
            {"other": np.zeros(1)},
        ],
        "plan.npz": [
            {"context.clip": np.zeros(0)},
            {"rounds.gain": np.ones(2)},
            {"other": np.zeros(1)},
        ],
    }
    for name, others in changes.items():
        path = folder / name
        content = path.read_bytes()
        with np.load(path) as saved:
            arrays = dict(saved)
        for damaged in (b"", content[:-50], content[:100]):
            path.write_bytes(damaged)
            with raises_input_error("job"):
                Job.load(folder)
        for change in others:
            np.savez(path, **arrays | change)
            with raises_input_error("job"):
                Job.load(folder)
        path.write_bytes(content)
    Job.load(folder)


def test_a_plan_of_another_job_is_refused(folder: Path, tmp_path: Path) -> None:
    server = folder / "server"
    plan = Job.load(server).plan
    plan.with_rounds(gain=plan.gain / 2).save(server / "plan.npz")
    with raises_input_error("job", server):
        Job.load(server)


@pytest.mark.parametrize(
    "change",
    [
        {"chains": "x"},
        {"example_clip": False},
        {"clip": float("nan")},
        {"gain": [1.0]},
        {"known": [0.0] * 7},
        {"promise": "@"},
        {"promise": {"epsilon": 1.0}},
        {"run": None},
        {"other": 1},
        {"share": 1.0, "step": 0.0},
    ],
)
def test_terms(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "device-0" / "terms.json"
    rewrite(path, change)
    with raises_input_error("terms"):
        Terms.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"intercept": True}},
        {"model": "@"},
        {"whitening": [[1.0, 2.0]]},
        {"whitening": "x"},
        {"model": {"intercept": False, "prior_std": -1.0}},
        {"model": {"intercept": False, "prior_std": 1.0, "classes": [[0], [1]]}},
    ],
)
def test_models_of_devices(folder: Path, change: dict[str, Any]) -> None:
    folder = folder / "device-0"
    rewrite(folder / "model.json", change)
    with pytest.raises(InputError):
        open_device(folder)


def test_data_of_devices(folder: Path) -> None:
    folder = folder / "device-0"
    content = (folder / "data.npz").read_bytes()
    with np.load(folder / "data.npz") as saved:
        arrays = dict(saved)
    for damaged in (b"", content[:-50], content[:100], b"\x93NUMPY"):
        (folder / "data.npz").write_bytes(damaged)
        with pytest.raises(InputError):
            open_device(folder)
    for change in (
        {"y": np.array(1.0)},
        {"y": np.ones((2, 2))},
        {"X": np.ones(3)},
        {"y": np.array([None])},
    ):
        np.savez(folder / "data.npz", **arrays | change)
        with pytest.raises(InputError):
            open_device(folder)


def test_progress_of_servers(federation: Federation, tmp_path: Path) -> None:
    server = open_server(federation.job, tmp_path)
    run_in_process(server, federation.devices())
    lines = (server.folder / "rounds.jsonl").read_text()
    rounds = len(federation.job.plan.rounds)
    assert len(read_log(server.folder)) == rounds
    others = [
        "[]",
        '{"round": [1]}',
        '{"round": "x", "asked": 1}',
        '{"round": 2}',
        "1e308",
        DEEP,
        "null",
        "\x00",
    ]
    (server.folder / "rounds.jsonl").write_bytes(
        (lines + "\n".join(others)).encode() + b"\n\xff\xfe\n"
    )
    assert len(read_log(server.folder)) == rounds
    assert trace_of(server).theta.shape[0] == 2
    for name in ("transcript.npy", "theta.npy"):
        path = server.folder / name
        content = path.read_bytes()
        for damaged in (
            b"\x93NUMPY",
            content[:40],
            content[:20] + b"((((" + content[24:],
            content[:-4],
        ):
            path.write_bytes(damaged)
            with pytest.raises(InputError):
                trace_of(server)
        np.save(path, np.array(1.0))
        with pytest.raises(InputError):
            trace_of(server)
        path.write_bytes(content)
    (server.folder / "ledger.path").write_bytes(b"\xff\x00")
    with pytest.raises(InputError):
        open_server(federation.job, server.folder)
