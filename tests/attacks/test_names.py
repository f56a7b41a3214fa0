"""A hash of private data is a test for guesses: who knows all of the data but one label tries the labels.

The attacker knows the code, the scenario, the plan, every feature and all labels but one. For each label that it could
be, they compute the names that files had: of the data, of their file, of the run, of a device's answer. On files of
earlier versions exactly one label fits, the true one. Names are now HMACs with a secret that only the owner has.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat

import jax
import numpy as np
import pytest

from wflmc.apps.federation.device import open_device
from wflmc.apps.federation.job import make_job, write_federation
from wflmc.apps.federation.server import open_server
from wflmc.privacy import Ledger
from wflmc.runs.execution import RunRequest, run_scenario
from wflmc.runs.planning import load_plan
from wflmc.sampling import run_name
from wflmc.sampling.payment import noise_name
from wflmc.scenario import build, load_scenario
from wflmc.support.keys import digest

from ..report.test_report import silent

CLASSES = 5
TRUE = 3
SCENARIO = """
[posterior]
model = "softmax"
devices = 3
data = DATA
mu = 1.0
L = 50.0
[privacy]
epsilon = 8.0
delta = 0.01
[sampler]
burn_in = 2
samples = 4
chains = 2
seed = 77
"""


def content(label):
    """A data file with this as the first label."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, CLASSES, 30)
    y[:CLASSES] = np.arange(CLASSES)
    y[-1] = label
    file = io.BytesIO()
    np.savez(file, X=generator.standard_normal((30, 2)), y=y)
    return file.getvalue()


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """The folder of a run and of a federation, and for every label what an attacker takes to be the posterior."""
    home = tmp_path_factory.mktemp("names")
    data, scenario, out = home / "data.npz", home / "s.toml", home / "run"
    scenario.write_text(SCENARIO.replace("DATA", json.dumps(str(data))))
    guesses = {}
    for label in range(CLASSES):
        data.write_bytes(content(label))
        guesses[label] = build(load_scenario(str(scenario))).posterior
    data.write_bytes(content(TRUE))
    options = dict.fromkeys(RunRequest._fields) | {
        "scenario": str(scenario),
        "out": str(out),
    }
    out.mkdir()
    run_scenario(RunRequest(**options), out, silent, lambda said: None)
    return home, guesses


def published(folder):
    """What others may see: all texts but the anchors, which are for their owner alone."""
    text = ""
    for path in folder.rglob("*"):
        if path.suffix == ".head":
            assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o600
        elif path.suffix in (".json", ".jsonl", ".toml", ".path"):
            text += path.read_text()
        elif path.name == "plan.npz":
            with np.load(path) as arrays:
                text += " ".join(str(arrays[name].tolist()) for name in arrays.files)
    assert text
    return text


def fits(text, names):
    """The labels one of whose names is in a text."""
    return [
        label for label, hidden in names.items() if any(name in text for name in hidden)
    ]


def test_a_run_folder_does_not_tell_the_last_label(setting):
    """Ledger, plan.json and summary.json of `wflmc run`, and what the ledger's anchor alone can tell."""
    home, guesses = setting
    plan = load_plan(home / "run").plan
    key = jax.random.key(77)
    names = {
        label: (
            posterior.digest,
            hashlib.sha256(content(label)).hexdigest(),
            run_name(key, posterior, plan, 2),
        )
        for label, posterior in guesses.items()
    }
    assert len({name for hidden in names.values() for name in hidden}) == 3 * CLASSES
    assert fits(published(home / "run"), names) == []
    path = home / "run" / "ledger.jsonl"
    # But its owner can: resuming finds the run again.
    for label, posterior in guesses.items():
        ledger = Ledger(plan.privacy, 3, path=path)
        assert ledger.is_about(posterior.digest) == (label == TRUE)
        assert (ledger.rounds(names[label][2]) > 0) == (label == TRUE)


def test_a_ledger_does_not_tell_the_seed(setting):
    """Seeds are few: who has a bare hash of the key tries them, and takes the noise away."""
    home, _ = setting
    names = {seed: (noise_name(jax.random.key(seed)),) for seed in range(60, 90)}
    assert fits(published(home / "run"), names) == []


def test_two_ledgers_have_other_names_for_the_same(setting, tmp_path):
    home, guesses = setting
    plan = load_plan(home / "run").plan
    lines = []
    for name in ("one", "other"):
        path = tmp_path / name
        ledger = Ledger(plan.privacy, 3, subject=guesses[TRUE].digest, path=path)
        ledger.charge("run", 0, plan.loss[:1], noise="noise")
        lines.append([json.loads(line) for line in path.read_text().splitlines()])
    (header, line), (other_header, other_line) = lines
    assert header["subject"] != other_header["subject"]
    assert {line["run"], line["noise"]}.isdisjoint(
        {other_line["run"], other_line["noise"]}
    )


def test_a_federation_does_not_tell_the_last_label(setting, tmp_path):
    """The server's folder (its job and its ledger), and the ledger of a device, which is the device's own."""
    home, guesses = setting
    loaded = load_plan(home / "run")
    scenario, inputs, plan = loaded.scenario, loaded.inputs, loaded.plan
    job = make_job(jax.random.key(5), inputs.posterior, inputs.link, plan)
    write_federation(tmp_path, scenario, inputs, job)
    open_server(job, tmp_path / "server").ledger.charge(
        job.run, 0, plan.loss[:1], job.noise_name
    )
    owner = next(
        k
        for k in range(3)
        if guesses[0].device(k).digest != guesses[1].device(k).digest
    )
    request = np.array([0, plan.gain[0], job.channel_estimates[0, owner]])
    names = {
        label: (
            posterior.digest,
            posterior.device(owner).digest,
            digest(
                job.run.encode(),
                posterior.device(owner).digest.encode(),
                job.position,
                request,
            ),
        )
        for label, posterior in guesses.items()
    }
    open_device(tmp_path / f"device-{owner}").ledger.charge(
        names[TRUE][2], 0, plan.loss[:1, owner : owner + 1]
    )
    assert len({name for hidden in names.values() for name in hidden}) == 3 * CLASSES
    assert fits(published(tmp_path), names) == []
