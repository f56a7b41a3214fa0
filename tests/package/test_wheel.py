"""The wheel works in an empty environment, without the repository beside it, and the sdist has what belongs to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from ..conftest import FULL

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not FULL, reason="builds and installs a package, minutes: make test-full runs it"
)


def run(*command, cwd, **keywords):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        **keywords,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


def test_the_sdist_can_be_cited_and_the_wheel_is_typed(built):
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "CITATION.cff",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "src/wflmc/py.typed",
    } <= files
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "wflmc/py.typed" in names
    assert all(name.startswith(("wflmc/", "wflmc-")) for name in names)


def test_the_wheel_plans_runs_and_reports_in_an_empty_environment(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    place = tmp_path / "elsewhere"
    place.mkdir()
    line = "py311" if sys.version_info < (3, 12) else "py312"
    install = [
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints" / f"{line}.txt",
        wheel,
    ]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(binaries / "python", "-m", "pip", *install, cwd=place, env=bare)
    wflmc = binaries / "wflmc"
    run(wflmc, "new", "study", cwd=place, env=bare)
    plan = json.loads(
        run(wflmc, "plan", "study/scenario.toml", "--json", cwd=place, env=bare)
    )
    assert plan["objective"] > 0
    small = ["--set", "sampler.chains=4"]
    summary = run(
        wflmc,
        "run",
        "study/scenario.toml",
        *small,
        "--out",
        "results",
        "--json",
        cwd=place,
        env=bare,
    )
    assert json.loads(summary)["epsilon_spent"] > 0
    run(wflmc, "report", "results", cwd=place, env=bare)
    assert "<html" in (place / "results" / "report.html").read_text(encoding="utf-8")
