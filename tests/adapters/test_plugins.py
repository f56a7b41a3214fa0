"""Plugins by entry points, and models in files of one's own: the same commands as for ours."""

import json
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from wflmc.planning import policy_named

from ..conftest import FULL
from ..docs.docs_tools import ROOT, blocks_of, compare
from ..error_tools import names_key, raises_input_error

PACKAGE = Path(__file__).parents[1] / "plugin_package"
ENTRIES = """[wflmc.policies]
half = wflmc_example_plugin:HALF
half-private = wflmc_example_plugin:half
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
NUMPYRO_MODEL = """
import numpy as np
import numpyro
import numpyro.distributions as dist
import wflmc

def model(group, y, predictor, groups):
    with numpyro.plate("groups", groups):
        level = numpyro.sample("level", dist.Normal(predictor, 1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(level[group], 1), obs=y)

def build(devices=3):
    y, group = np.random.default_rng(0).normal(size=30), np.arange(30) % 2
    data = {"group": group, "y": y, "predictor": np.array([0.0, 1.0]), "groups": 2}
    return wflmc.from_numpyro(model, data, devices=devices, mu=16.0, L=16.0, preconditioner="none")
"""
QUICK = (
    "--set",
    "sampler.chains=4",
    "--set",
    "sampler.samples=8",
    "--set",
    "sampler.burn_in=5",
)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The example package, installed: its module and its metadata on the path."""
    if FULL and find_spec("hatchling"):
        source = shutil.copytree(PACKAGE, tmp_path / "source")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-build-isolation",
            "--no-deps",
        ]
        subprocess.run([*pip, "--target", str(tmp_path), str(source)], check=True)
    else:  # as pip leaves it
        info = tmp_path / "wflmc_example_plugin-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: wflmc-example-plugin\nVersion: 0.1\n"
        )
        (info / "entry_points.txt").write_text(ENTRIES)
        (tmp_path / "wflmc_example_plugin.py").write_text(
            (PACKAGE / "wflmc_example_plugin.py").read_text()
        )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_package_adds_a_policy_a_fading_law_and_a_model(plugin, call, tmp_path):
    path = tmp_path / "scenario.toml"
    path.write_text(
        '[posterior]\nmodel = "poisson"\ndevices = 5\n[link]\nfading = "two-rays"\n[policy]\npower = "half"\n'
    )
    code, out, err = call("plan", path, *QUICK, "--json")
    assert code == 0, err
    assert json.loads(out)["constants"]["devices"] == 5
    assert not policy_named("half").private
    assert policy_named("half-private").private  # a function alone keeps the promise


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """The package that docs/guides/extending.md shows, installed; its scenario, and the output that the page shows."""
    blocks = {
        block.title: block
        for block in blocks_of(ROOT / "docs/guides/extending.md")
        if block.title
    }
    for title, block in blocks.items():
        (tmp_path / title).write_text(block.text)
    groups = tomllib.loads(blocks["pyproject.toml"].text)["project"]["entry-points"]
    lines = [
        [f"[{group}]", *(f"{name} = {value}" for name, value in named.items())]
        for group, named in groups.items()
    ]
    info = tmp_path / "thrifty-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: thrifty\nVersion: 0.1\n"
    )
    (info / "entry_points.txt").write_text(
        "\n".join(line for group in lines for line in group)
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "thrifty.toml", blocks["printed.txt"]


def test_the_documented_package_works(documented, call):
    scenario, shown = documented
    code, out, err = call("plan", scenario)
    assert code == 0, err
    compare(shown, shown.text.splitlines(), out)


def test_a_policy_that_spends_half_of_the_budget_is_not_limited_by_privacy(
    documented, call
):
    scenario, _ = documented
    static = ("--set", "link.fading=static", "--set", "privacy.epsilon=0.5")
    code, out, err = call("plan", scenario, *QUICK, *static, "--json", "--no-compare")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["privacy"]["spent_max"] == pytest.approx(plan["privacy"]["budget"] / 2)
    assert plan["regime"] == "policy-limited"
    assert plan["regime_share"]["policy-limited"] == 1
    assert plan["regime_share"]["dp-limited"] == 0


@pytest.mark.skipif(
    not FULL, reason="a run and its page take two seconds: make test-full runs it"
)
def test_a_registered_policy_has_run_and_report(documented, call, tmp_path):
    scenario, _ = documented
    code, _, err = call(
        "run",
        scenario,
        *QUICK,
        "--set",
        "privacy.epsilon=0.5",
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert code == 0, err
    code, _, err = call("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert code == 0, err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "policy-limited" in page
    assert "thrifty" in page


def test_names_that_nobody_registered_are_refused(call, tmp_path):
    path = tmp_path / "scenario.toml"
    for section, key, group in (
        ("posterior", "model", "models"),
        ("link", "fading", "fading"),
        ("policy", "power", "policies"),
    ):
        path.write_text(f'[{section}]\n{key} = "half"\n')
        code, _, err = call("plan", path)
        assert code == 2
        # It names how to register a name.
        facts = "half", f"wflmc.{group}", "docs/guides/extending.md"
        assert names_key(err, f"{section}.{key}", *facts)
    assert (ROOT / "docs/guides/extending.md").exists()
    with raises_input_error("power", "wflmc.policies", section="policy", value="half"):
        policy_named("half")


def test_a_plan_lists_what_every_device_knows_of_a_model(call, tmp_path):
    pytest.importorskip("numpyro", reason="pip install numpyro")
    path = tmp_path / "model.py"
    path.write_text(NUMPYRO_MODEL)
    known = (
        "--set",
        "privacy.epsilon=8",
        "--set",
        "privacy.delta=1e-3",
        "--set",
        "posterior.initial_w2_sq=1",
    )
    code, out, err = call("plan", path, *QUICK, *known, "--json")
    assert code == 0, err
    listed = {item["name"]: item for item in json.loads(out)["not_covered"]}
    assert "predictor" in listed["arguments of the model"]["text"]
    assert listed["arguments of the model"]["published"]


def test_a_model_in_a_file_has_run_report_sweep_and_federation(call, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    code, _, err = call("run", path, *QUICK, "--out", tmp_path / "run", "--json")
    assert code == 0, err
    assert (
        "square"
        in json.loads((tmp_path / "run" / "summary.json").read_text())["functions"]
    )
    code, _, err = call("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert code == 0, err
    if FULL:
        code, _, err = call(
            "sweep",
            path,
            *QUICK,
            "--grid",
            "posterior.devices=2,3",
            "--out",
            tmp_path / "sweep",
        )
        assert code == 0, err
        code, _, err = call(
            "federate",
            path,
            *QUICK,
            "--runtime",
            "process",
            "--out",
            tmp_path / "federation",
        )
        assert code == 0, err
    code, _, err = call(
        "federate", path, "--runtime", "simulation", "--out", tmp_path / "other"
    )
    assert code == 2
    assert names_key(err, "--runtime", "simulation", "process")
    code, _, err = call("run", path, "--set", f"posterior.model={path}:missing")
    assert code == 2
    assert names_key(err, "posterior.model", "missing")
