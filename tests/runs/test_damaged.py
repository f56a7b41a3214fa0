"""Damaged files of runs: one sentence that names the file, whatever stands in it, and never a traceback."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

import numpy as np
import pytest

from wflmc.privacy import Ledger, Privacy
from wflmc.runs.execution import CHECKPOINT, SECRET, RunRequest, run_scenario
from wflmc.runs.folder import read_run
from wflmc.runs.planning import load_plan, plan_again
from wflmc.sampling import Start
from wflmc.sampling.checkpoint import Checkpoint, Progress, allocate
from wflmc.scenario import build_posterior, load_scenario, validate
from wflmc.support.errors import InputError

from ..report.test_report import run_in
from .test_publish import SECRET as SCENARIO

DEEP = "[" * 5000 + "]" * 5000
"""Deeper than what reads it can go."""
DIGITS = "9" * 5000
"""More than Python turns into a number."""


class StoppedError(Exception):
    """The run has been stopped."""


@contextmanager
def stopping(task, total):
    """A progress bar at whose first step the run stops."""

    def stop(done):
        raise StoppedError

    yield stop


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    text = SCENARIO.replace('"secret"', "3").replace("epsilon = 8.0", "epsilon = 500.0")
    return run_in(tmp_path_factory.mktemp("damaged") / "run", text)


@pytest.fixture
def folder(finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "run")
    (copy / "digests.json").unlink()  # which would refuse any change before it is read
    return copy


@pytest.mark.parametrize(
    "value", [DEEP, DIGITS, f"{{a = {DEEP}}}"], ids=["deep", "digits", "table"]
)
def test_scenarios(tmp_path, value):
    path = tmp_path / "s.toml"
    path.write_text(f"[sampler]\nsamples = {value}\n")
    with pytest.raises(InputError):
        load_scenario(path)
    path.write_text("[sampler]\nsamples = 3\n")
    with pytest.raises(InputError):
        load_scenario(path, [f"sampler.samples={value}"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scenario", {"sampler": 1}),
        ("scenario", {"sampler": None}),
        ("scenario", [1]),
        ("constants", DEEP),
        ("gain", DIGITS),
    ],
)
def test_plans(folder, key, value):
    path = folder / "plan.json"
    document = json.loads(path.read_text())
    text = json.dumps(document | {key: "@"}).replace(
        '"@"', value if isinstance(value, str) else json.dumps(value)
    )
    path.write_text(text)
    for read in (load_plan, plan_again):
        with pytest.raises(InputError):
            read(path)
    with pytest.raises(InputError):
        run_in(folder, resume=str(folder), more=1)


@pytest.mark.parametrize(
    "content",
    [DEEP.encode(), b"\xff\xfe", b"", b"{}", b"[1]"],
    ids=["deep", "bytes", "empty", "{}", "[1]"],
)
def test_digests_and_ledgers(folder, content):
    (folder / "digests.json").write_bytes(content)
    if content != b"{}":
        with pytest.raises(InputError):
            read_run(folder)
    (folder / "digests.json").unlink()
    (folder / "ledger.jsonl").write_bytes(content)
    with pytest.raises(InputError):
        read_run(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"run": None},
        {"run": 3},
        {"round": None},
        {"round": [1]},
        {"loss": ["1.0", "x"]},
        {"noise": 1},
        {"chain": "@"},
        {"loss": ["1", "2"]},
    ],
)
def test_lines_of_ledgers(tmp_path, change):
    path = tmp_path / "ledger.jsonl"
    promise = Privacy(epsilon=8.0, delta=0.01)
    Ledger(promise, 2, path=path).charge("run", 0, [[0.1, 0.2]])
    first, second = path.read_text().splitlines()
    line = {
        name: value
        for name, value in (json.loads(second) | change).items()
        if value is not None
    }
    path.write_text(f"{first}\n{json.dumps(line)}\n".replace('"@"', DEEP))
    for read_only in (True, False):
        with pytest.raises(InputError):
            Ledger(promise, 2, path=path, read_only=read_only)
    path.write_text(f"{first}\n{second}\n")
    for anchor in (
        f'"lines": 2, "chain": {DEEP}',
        '"lines": Infinity, "chain": ""',
        '"lines": -3, "chain": ""',
    ):
        (tmp_path / "ledger.jsonl.head").write_text(f'{{"salt": "", {anchor}}}')
        with pytest.raises(InputError):
            Ledger(promise, 2, path=path)


def test_progress(tmp_path):
    checkpoint = Checkpoint(tmp_path, "name")
    progress = Progress(
        rounds=2, chains=Start(np.ones((2, 3))), clip_rate=np.zeros((2, 2))
    )
    checkpoint.save(progress)
    whole = progress.to_arrays()
    assert checkpoint.load().rounds == 2
    content = checkpoint.file.read_bytes()
    for damaged in (
        b"",
        content[:-20],
        content[:200],
        content.replace(b"position", b"velocity"),
        b"PK\x03\x04",
    ):
        checkpoint.file.write_bytes(damaged)
        with pytest.raises(InputError):
            checkpoint.load()
    for change in (
        {"first_chain": np.nan},
        {"rounds": "x"},
        {"position": 1.0},
        {"other": np.ones(2)},
    ):
        np.savez(checkpoint.file, **whole | change, name=np.array("name"))
        with pytest.raises(InputError):
            checkpoint.load()
    checkpoint.samples.write_bytes(b"\x93NUMPY nothing else")
    with pytest.raises(InputError):
        allocate((2, 3), checkpoint.samples, begun=True)


def test_keys_and_samples_of_runs_that_go_on(folder, tmp_path):
    for damaged in (b"", (folder / "trace.nc").read_bytes()[:3000], b"x" * 1000):
        (folder / "trace.nc").write_bytes(damaged)
        with pytest.raises(InputError):
            run_in(folder, resume=str(folder), more=1)
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (tmp_path / "s.toml").write_text(SCENARIO)
    request = RunRequest(
        **dict.fromkeys(RunRequest._fields)
        | {"scenario": str(tmp_path / "s.toml"), "out": str(stopped)}
    )
    with pytest.raises(StoppedError):
        run_scenario(request, stopped, stopping, lambda said: None)
    secret = stopped / CHECKPOINT / SECRET
    key = secret.read_bytes()
    for damaged in (b"", key[:-1], key + b"x"):
        secret.write_bytes(damaged)
        with pytest.raises(InputError):
            run_in(stopped, resume=str(stopped))


@pytest.mark.parametrize(
    "arrays",
    [
        {"y": np.array(1.0)},
        {"y": np.ones((4, 2), int)},
        {"X": np.ones(4)},
        {"y_test": np.array(1), "X_test": np.ones((1, 2))},
        {"y_test": np.ones((2, 2), int), "X_test": np.ones((2, 2))},
    ],
)
@pytest.mark.parametrize("model", ["gaussian", "softmax"])
def test_shapes_of_data(tmp_path, arrays, model):
    np.savez(
        tmp_path / "d.npz", **{"X": np.ones((4, 2)), "y": np.arange(4) % 2} | arrays
    )
    scenario = validate(
        {"posterior": {"model": model, "data": str(tmp_path / "d.npz"), "devices": 2}}
    )
    with pytest.raises(InputError):
        build_posterior(scenario)
