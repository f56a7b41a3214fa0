"""A federation's whitening release: made once, with noise as good as that of its rounds.

Every device holds the whitening matrix. An attacker who knows the seed of its noise makes the release again of either
of two neighbouring data sets, and sees which of them gives that matrix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from wflmc.apps.federation import execution
from wflmc.privacy import Ledger
from wflmc.privacy.whitening import Release
from wflmc.scenario import build, load_scenario
from wflmc.support.errors import InputError

from ..error_tools import names_key
from ..federation_tools import ROUNDING

SCENARIO = """
[posterior]
devices = 4
examples = 80
intercept = true
preconditioner = "private-whiten"
[privacy]
epsilon = 10.0
delta = 0.01
[sampler]
burn_in = 2
samples = 3
chains = 1
"""
NOISES = {
    "channel": ("--noise", "channel"),
    "devices": ("--noise", "devices", "--set", "policy.power=noiseless-dp"),
}


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


def matrix_of(folder: Path, device: int = 0) -> Any:
    """The whitening matrix that a device holds."""
    path = folder / "federation" / f"device-{device}" / "model.json"
    return np.array(json.loads(path.read_text())["whitening"])


@pytest.mark.parametrize("noise", NOISES)
def test_nobody_can_make_the_release_again(
    call: Any, scenario: Path, tmp_path: Path, noise: str
) -> None:
    seeded = build(load_scenario(str(scenario))).release
    assert seeded is not None
    matrices = []
    for name in ("first", "second"):
        folder = tmp_path / name
        command = ("federate", scenario, "--runtime", "process", "--out", folder)
        code, _, err = call(*command, *NOISES[noise])
        assert code == 0, err
        matrices.append(matrix_of(folder))
    for matrix, other in ((matrices[0], seeded.matrix), matrices):
        assert matrix.shape == other.shape
        assert np.linalg.norm(matrix - other) > 1e-3 * np.linalg.norm(other)


def test_simulated_noise_is_that_of_a_run(
    call: Any, scenario: Path, tmp_path: Path
) -> None:
    command = ("federate", scenario, "--runtime", "process", "--out", tmp_path / "out")
    assert call(*command)[0] == 0
    release = build(load_scenario(str(scenario))).release
    assert release is not None
    np.testing.assert_array_equal(matrix_of(tmp_path / "out"), release.matrix)


def test_a_federation_that_goes_on_keeps_its_release_and_pays_once(
    call: Any, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    command = ("federate", scenario, "--runtime", "process", "--out", folder)
    run = execution.run_in_process

    def stopped(server: Any, devices: Any, progress: Any) -> None:
        def stop(finished: int, rounds: int) -> None:
            progress(finished, rounds)
            if finished == 3:
                raise InputError("stop", finished, "what this test does")

        run(server, devices, stop)

    with monkeypatch.context() as patch:
        patch.setattr(execution, "run_in_process", stopped)
        assert call(*command, "--noise", "channel")[0] != 0
    before = matrix_of(folder)
    lines = (folder / "ledger.jsonl").read_text().splitlines()

    assert call(*command, "--noise", "channel")[0] == 0
    np.testing.assert_array_equal(matrix_of(folder), before)
    path = folder / "federation" / execution.RELEASE_FILE
    assert path.stat().st_mode & 0o077 == 0
    release = Release.load(path)
    np.testing.assert_array_equal(release.matrix, before)
    assert (folder / "ledger.jsonl").read_text().splitlines()[: len(lines)] == lines
    inputs = build(load_scenario(str(scenario)), release=release)
    ledger = Ledger(inputs.privacy, 4, path=folder / "ledger.jsonl", read_only=True)
    assert ledger.rounds(release.name) == len(release.loss)
    assert len(ledger.entries) == len(release.loss) + 5
    assert np.max(ledger.spent / ledger.budget) <= 1 + 1e-9
    # Samples are mapped back by the matrix that the devices had.
    drawn = inputs.posterior.coordinates_of(_first_draw(folder))
    positions = np.load(folder / "federation" / "server" / "theta.npy")
    assert np.abs(positions[0, 0] - drawn).max() < 10 * ROUNDING

    # The release cannot be made again from the scenario beside it.
    code, _, err = call("run", "--plan", folder, "--out", tmp_path / "again")
    assert code == 2
    assert names_key(err, "--plan: noise", "channel", "private-whiten")

    path.unlink()
    code, _, err = call(*command, "--noise", "channel")
    assert code == 2
    assert names_key(err, "release", path)


def _first_draw(folder: Path) -> Any:
    import h5netcdf

    with h5netcdf.File(folder / "trace.nc") as file:
        return file["posterior"]["theta"][0, 0].astype(float)


@pytest.mark.parametrize("seed", ["0", "secret"])
def test_real_devices_hold_one_release_and_have_paid_for_it(
    call: Any, scenario: Path, tmp_path: Path, seed: str
) -> None:
    folder = tmp_path / "out"
    options = ("--prepare", "--set", f"sampler.seed={seed}")
    for _ in range(2):
        code, _, err = call("federate", scenario, "--out", folder, *options)
        assert code == 0, err
    release = Release.load(folder / "federation" / execution.RELEASE_FILE)
    for device in range(4):
        np.testing.assert_array_equal(matrix_of(folder, device), release.matrix)
        ledger = folder / "federation" / f"device-{device}" / "ledger.jsonl"
        _, before = ledger.read_text().splitlines()
        assert json.loads(before)["loss"] == [release.spent[device]]
    server = folder / "federation" / "server"
    content = b"".join(file.read_bytes() for file in server.iterdir() if file.is_file())
    assert release.name.encode() not in content


def test_no_release_is_made_of_data_that_stand_in(
    call: Any, scenario: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    code, _, err = call(
        "federate", scenario, "--prepare", "--own-data", "--out", folder
    )
    assert code == 2
    assert names_key(err, "posterior.preconditioner", "private-whiten", "--own-data")
    assert not (folder / "federation").exists()
