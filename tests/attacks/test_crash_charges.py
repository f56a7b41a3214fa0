"""A server that crashes must not let a second draw of a round's noise onto its disk that nobody has paid for.

Protective noise comes from the operating system and cannot be drawn again. Two draws of the same round, one in a backup
of transcript.npy and one in the file of the resumed run, average the noise away: together they cost twice what the
ledger counts. The server is stopped between every two of its writes, and while it writes; every reception that has ever
been on the disk must have been charged.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from wflmc.apps.federation import server as serving
from wflmc.apps.federation.server import open_server, read_log, run_in_process, trace_of
from wflmc.privacy import Ledger
from wflmc.privacy.lattice import Lattice

from ..federation_tools import make_federation

STOPPED = 4
"""The round in which the server is stopped; samples are kept from round 3 on."""


class Crash(BaseException):
    """The process has ended."""


@pytest.fixture
def federated(tmp_path):
    return make_federation(tmp_path, {"sampler.chains": 1}, noise="channel")


class Disk:
    """All receptions of a round that a server's folder has ever had, by what reveals them."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.receptions: set[bytes] = set()
        """Rows of the transcript, as bytes."""
        self.samples: set[bytes] = set()

    def look(self, round_index: int) -> None:
        """Note what the files say of a round now."""
        rows = (
            ("transcript.npy", round_index, self.receptions),
            ("theta.npy", round_index - BURN_IN, self.samples),
        )
        for name, row, seen in rows:
            path = self.folder / name
            if path.exists() and (content := np.load(path)[row].tobytes()).strip(b"\0"):
                seen.add(content)
        for path in self.folder.glob("progress.npz*"):
            try:
                with np.load(path) as saved:
                    if int(saved["rounds"]) == round_index + 1:
                        self.samples.add(saved["position"].astype(np.float32).tobytes())
            except Exception:
                # The file is cut short; assume that whoever finds it reads all of it.
                self.samples.add(path.read_bytes())


class Write(NamedTuple):
    """A step of a round that may write: a function, and which of its calls are meant."""

    owner: Any
    name: str
    counts: Callable[..., bool] = lambda *_: True
    first_round: int = 0
    """The first round that makes such a call."""


BURN_IN = 3
WRITES = {
    # Only charges to the server's ledger, which has a file.
    "the charge": Write(Ledger, "charge", lambda ledger, *_: ledger.path is not None),
    "the draw": Write(Lattice, "noisy"),
    "the log": Write(serving, "append_text"),
    "the progress": Write(serving, "_save"),
    "the transcript": Write(
        np.memmap, "flush", lambda array: str(array.filename).endswith("transcript.npy")
    ),
    "the samples": Write(
        np.memmap,
        "flush",
        lambda array: str(array.filename).endswith("theta.npy"),
        BURN_IN,
    ),
}


def crash_at(monkeypatch, write: Write, *, after: bool) -> None:
    """Let the process end in round STOPPED, right before or after this write."""
    original = getattr(write.owner, write.name)
    calls = itertools.count(write.first_round)

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        stops = write.counts(*arguments) and next(calls) == STOPPED
        if stops and not after:
            raise Crash
        result = original(*arguments, **keywords)
        if stops:
            raise Crash
        return result

    monkeypatch.setattr(write.owner, write.name, interrupted)


def finite_rounds(folder) -> Any:
    """Which rows of the transcript are finite in all their fields, [round]."""
    rows = np.load(folder / "transcript.npy")
    assert rows.dtype.names == ("position", "gradient", "noise")
    fields = [
        np.isfinite(rows[name]).reshape(len(rows), -1).all(1)
        for name in rows.dtype.names
    ]
    return np.all(fields, axis=0)


def run(federated, devices) -> Any:
    server = open_server(federated.job, federated.folder / "server")
    run_in_process(server, devices)
    return server


def charges_of(server: Any, number: int) -> int:
    return sum(charged == number for _, charged in server.ledger.entries)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("after", [False, True])
def test_a_server_that_stops_between_two_writes(federated, monkeypatch, write, after):
    devices = federated.devices()
    disk = Disk(federated.folder / "server")
    with monkeypatch.context() as patch:
        crash_at(patch, WRITES[write], after=after)
        with pytest.raises(Crash):
            run(federated, devices)
    disk.look(STOPPED)
    server = run(federated, devices)
    disk.look(STOPPED)
    assert charges_of(server, STOPPED) == 1
    assert len(disk.receptions) == 1
    assert len(disk.samples) == 1
    assert server.ledger.rounds(federated.job.run) == len(federated.job.plan.rounds)
    assert finite_rounds(disk.folder).all()  # no round is lost
    trace = trace_of(server)
    np.testing.assert_array_equal(
        trace.theta[0], np.load(disk.folder / "theta.npy")[:, 0]
    )
    assert len(read_log(disk.folder)) == len(federated.job.plan.rounds)


@pytest.mark.parametrize("left", ["all", "half", "nothing"])
def test_a_server_that_stops_while_it_writes_progress(federated, monkeypatch, left):
    """Of the file that was to take the place of progress.npz all or half stays behind, or the server could still delete
    it: the round is lost.
    """
    devices = federated.devices()
    disk = Disk(federated.folder / "server")
    original = os.replace
    copy = federated.folder / "copy"
    saved = itertools.count()

    def replace(source: Any, target: Any) -> None:
        if str(target).endswith("progress.npz") and next(saved) == STOPPED:
            shutil.copy(source, copy)
            raise Crash
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Crash):
            run(federated, devices)
    content = copy.read_bytes()
    if left != "nothing":
        (disk.folder / "progress.npz.part").write_bytes(
            content if left == "all" else content[: len(content) // 2]
        )
    server = run(federated, devices)
    assert charges_of(server, STOPPED) == 1
    assert np.isinf(np.load(disk.folder / "transcript.npy")["noise"][STOPPED]).all()
    assert np.delete(finite_rounds(disk.folder), STOPPED).all()
    samples = np.load(disk.folder / "theta.npy")
    np.testing.assert_array_equal(
        samples[STOPPED - BURN_IN], samples[STOPPED - BURN_IN - 1]
    )
    assert not (disk.folder / "progress.npz.part").exists()


@pytest.mark.parametrize("noise", ["simulated", "devices"])
def test_noise_that_comes_again_loses_no_round(tmp_path, monkeypatch, noise):
    """The same file stays behind, but a repeated round is the same to the last bit: the run is that without a crash."""
    keys = {"sampler.chains": 1, "policy.power": "noiseless-dp"}
    federated = make_federation(tmp_path, keys, noise=noise)
    devices = federated.devices()
    with monkeypatch.context() as patch:
        crash_at(patch, WRITES["the transcript"], after=True)
        with pytest.raises(Crash):
            run(federated, devices)
    folder = tmp_path / "server"
    before = np.load(folder / "transcript.npy")[: STOPPED + 1]
    (folder / "progress.npz.part").write_bytes(b"cut short")
    run(federated, devices)
    assert finite_rounds(folder).all()
    np.testing.assert_array_equal(
        np.load(folder / "transcript.npy")[: STOPPED + 1], before
    )
