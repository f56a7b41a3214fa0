"""Plugins by entry points, and models in files of one's own: the same commands as for ours."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..conftest import FULL

PACKAGE = Path(__file__).parents[1] / "plugin_package"
ENTRIES = """[wflmc.policies]
half = wflmc_example_plugin:HALF
[wflmc.fading]
two-rays = wflmc_example_plugin:two_rays
[wflmc.models]
poisson = wflmc_example_plugin:poisson
"""
MODEL = """
import jax.numpy as jnp
import numpy as np
import wflmc

def build(devices=3):
    y = np.random.default_rng(0).normal(1.0, 1.0, 30)
    return wflmc.posterior_from(lambda m, v: -0.5 * (v - m["mean"]) ** 2, lambda m: -0.5 * m["mean"] ** 2, y,
                                initial={"mean": 0.0}, devices=devices, mu=31.0, L=31.0,
                                functions={"square": lambda m: m["mean"] ** 2})
"""
QUICK = ("--set", "sampler.chains=4", "--set", "sampler.samples=8", "--set", "sampler.burn_in=5")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The example package, installed: its module and its metadata on the path."""
    if FULL and find_spec("hatchling"):
        source = shutil.copytree(PACKAGE, tmp_path / "source")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
        subprocess.run([*pip, "--target", str(tmp_path), str(source)], check=True)
    else:  # as pip leaves it
        info = tmp_path / "wflmc_example_plugin-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wflmc-example-plugin\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(ENTRIES)
        (tmp_path / "wflmc_example_plugin.py").write_text((PACKAGE / "wflmc_example_plugin.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)


def test_a_package_adds_a_policy_a_fading_law_and_a_model(plugin, call, tmp_path):
    path = tmp_path / "scenario.toml"
    path.write_text(
        '[posterior]\nmodel = "poisson"\ndevices = 5\n[link]\nfading = "two-rays"\n[policy]\npower = "half"\n'
    )
    code, out, err = call("plan", path, *QUICK, "--json")
    assert code == 0, err
    assert json.loads(out)["constants"]["devices"] == 5


def test_names_that_nobody_registered_are_refused(call, tmp_path):
    path = tmp_path / "scenario.toml"
    for section, key in (("posterior", "model"), ("link", "fading"), ("policy", "power")):
        path.write_text(f'[{section}]\n{key} = "half"\n')
        code, _, err = call("plan", path)
        assert code == 2
        assert f"{section}.{key} = 'half' was given" in err


def test_a_model_in_a_file_has_run_report_sweep_and_federation(call, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    code, _, err = call("run", path, *QUICK, "--out", tmp_path / "run", "--json")
    assert code == 0, err
    assert "square" in json.loads((tmp_path / "run" / "summary.json").read_text())["functions"]
    code, _, err = call("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert code == 0, err
    if FULL:
        code, _, err = call("sweep", path, *QUICK, "--grid", "posterior.devices=2,3", "--out", tmp_path / "sweep")
        assert code == 0, err
        code, _, err = call("federate", path, *QUICK, "--runtime", "process", "--out", tmp_path / "federation")
        assert code == 0, err
    code, _, err = call("federate", path, "--runtime", "simulation", "--out", tmp_path / "other")
    assert code == 2
    assert "process with a model of your own" in err
    code, _, err = call("run", path, "--set", f"posterior.model={path}:missing")
    assert code == 2
    assert "has no function missing" in err
