"""`wflmc doctor`: what is said to be there is there, and what is missing is named with what brings it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from wflmc.cli import doctor
from wflmc.data.sets import SHA256

from ..cli_tools import strict

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
    "project"
]


def names(requirements):
    return {re.match(r"[A-Za-z0-9-]+", text)[0] for text in requirements}


def test_what_is_installed(call):
    code, out, err = call("doctor", "--json")
    assert (code, err) == (0, "")
    document = strict(out)
    assert document["works"] is True
    assert document["problems"] == []
    assert document["core"] == {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "numpy", "scipy")
    }
    assert document["jax"]["backend"] == jax.default_backend()
    assert len(document["jax"]["devices"]) == len(jax.devices())
    assert jax.devices()[0].device_kind in document["jax"]["devices"][0]
    for feature in document["features"]:
        for package, version in feature["packages"].items():
            if version is not None:
                assert version == importlib.metadata.version(package)
    code, out, _ = call("doctor")
    assert code == 0
    assert f"jax {importlib.metadata.version('jax')}" in out
    assert out.endswith("The core works.\n")


def test_every_package_is_in_the_extra_that_is_said_to_bring_it():
    for feature, (extra, packages) in doctor.FEATURES.items():
        brought = (
            PROJECT["dependencies"]
            if extra is None
            else PROJECT["optional-dependencies"][extra]
        )
        assert set(packages) <= names(brought), feature


def test_every_package_beyond_the_core_is_listed():
    listed = {
        package for _, packages in doctor.FEATURES.values() for package in packages
    }
    # Without these two there is no command line to ask.
    assert names(PROJECT["dependencies"]) <= listed | set(doctor.CORE) | {
        "click",
        "typer",
    }
    for extra in ("convex", "dp", "openml"):
        assert names(PROJECT["optional-dependencies"][extra]) <= listed | {"attrs"}


@pytest.mark.parametrize("how", ["no module", "no package"])
def test_what_is_missing_is_named_with_what_to_install(call, monkeypatch, how):
    if how == "no module":
        real = doctor.util.find_spec
        gone = {"cvxpy", "sklearn", "arviz"}
        monkeypatch.setattr(
            doctor.util, "find_spec", lambda name: None if name in gone else real(name)
        )
    else:

        def version(name, real=importlib.metadata.version):
            if name in {"cvxpy", "scikit-learn", "arviz"}:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(doctor.metadata, "version", version)
    code, out, _ = call("doctor", "--json")
    assert code == 0
    install = {
        feature["name"]: feature["install"] for feature in strict(out)["features"]
    }
    assert install["wflmc plan --solver cvxpy"] == "pip install 'wflmc[convex]'"
    assert install["data from OpenML"] == "pip install 'wflmc[openml]'"
    assert install["traces, R-hat and ESS (ArviZ)"] == "pip install arviz"
    assert install["pictures"] is None
    code, out, _ = call("doctor")
    assert code == 0
    assert "cvxpy missing" in out
    assert "pip install 'wflmc[openml]'" in out


def test_mnist_and_the_cache(call, monkeypatch, tmp_path):
    monkeypatch.delenv("WFLMC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def look():
        return strict(call("doctor", "--json")[1])

    document = look()
    assert document["mnist"] == {
        "folder": str(tmp_path / "wflmc" / "mnist"),
        "found": False,
        "get": "wflmc data mnist",
    }
    assert document["cache"] == {"folder": str(tmp_path / "wflmc"), "writable": True}
    assert list(tmp_path.iterdir()) == []  # looking makes nothing
    (tmp_path / "own").mkdir()
    for name in list(SHA256)[1:]:
        (tmp_path / "own" / f"{name}.gz").touch()
    monkeypatch.setenv("WFLMC_DATA", str(tmp_path / "own"))
    assert next(iter(SHA256)) in look()["mnist"]["get"]
    (tmp_path / "own" / next(iter(SHA256))).touch()
    assert look()["mnist"] == {
        "folder": str(tmp_path / "own"),
        "found": True,
        "get": None,
    }
    (tmp_path / "wflmc").touch()  # a file where the folder should be
    assert look()["cache"]["writable"] is False


def test_a_broken_core_is_exit_code_1(call, monkeypatch):
    import wflmc

    def fails(*_, **__):
        raise RuntimeError("no\nlibrary")

    monkeypatch.setattr(wflmc, "plan", fails)
    code, out, _ = call("doctor", "--json")
    assert code == 1
    assert strict(out)["problems"] == ["RuntimeError: no library"]
    code, out, _ = call("doctor")
    assert code == 1
    assert out.endswith("The core does not work.\n")


def test_jax_without_its_backend_is_exit_code_1():
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    command = [sys.executable, "-m", "wflmc", "doctor", "--json"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 1, result.stderr
    document = json.loads(result.stdout)
    assert document["works"] is False
    assert "nonsense" in document["problems"][0]


def test_nothing_heavy_is_imported():
    code = "import sys; from wflmc.cli.doctor import examine; examine(); print(*sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {
        "arviz",
        "xarray",
        "matplotlib",
        "cvxpy",
        "dp_accounting",
        "sklearn",
        "pydantic",
    }
    assert not heavy & set(result.stdout.split())
