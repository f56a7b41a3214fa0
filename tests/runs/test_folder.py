"""Run folders: the digests of their parts, and folders that have lost them."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from wflmc.runs.folder import read_run

from ..error_tools import raises_input_error
from ..report.test_report import run_in
from .test_publish import SECRET


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    # Leaves budget for more rounds.
    text = SECRET.replace('"secret"', "3").replace("epsilon = 8.0", "epsilon = 500.0")
    return run_in(tmp_path_factory.mktemp("folder") / "run", text)


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_digests_are_those_of_the_files(folder):
    digests = json.loads((folder / "digests.json").read_text())
    assert sorted(digests) == [
        "plan.json",
        "plan.npz",
        "scenario.toml",
        "summary.json",
        "trace.nc",
    ]
    for name, digest in digests.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(
    "name",
    [
        "plan.json",
        "plan.npz",
        "scenario.toml",
        "summary.json",
        "trace.nc",
        "digests.json",
    ],
)
def test_a_file_that_has_changed_is_named(folder, name):
    with (folder / name).open("ab") as file:
        file.write(b" x")
    with raises_input_error("report", folder / name):
        read_run(folder)


def test_a_folder_opens_without_its_digests(folder):
    (folder / "digests.json").unlink()
    run = read_run(folder)
    assert run.draws.theta.shape == (2, 8, 4)
    assert run.saved_plan is not None
    assert run.inputs is not None


def test_more_rounds_have_digests_of_their_own(folder):
    before = (folder / "digests.json").read_text()
    run_in(folder, resume=str(folder), more=2)
    assert (folder / "digests.json").read_text() != before
    assert read_run(folder).plan.constants.rounds == 13
