"""What holds for the package as a whole: a bare core, documented examples, no registry hosts in the pins."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import wflmc

ROOT = Path(__file__).parents[2]

BARE = """
import sys
for name in (
    "pydantic", "typer", "rich", "matplotlib", "plotly", "arviz", "xarray", "cvxpy",
    "dp_accounting", "filelock", "jinja2",
):
    sys.modules[name] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "arviz" else found(name, package)
import jax, wflmc
posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
link = wflmc.Link(wflmc.channel.static(power=1e-4), snr_db=20)
privacy = wflmc.Privacy(epsilon=15, delta=0.01, clip=30)
plan = wflmc.plan(posterior, link, privacy, step_size=0.4 / (posterior.mu + posterior.L), burn_in=20, samples=1)
trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=10)
result = wflmc.evaluate(trace, posterior)
assert result.rhat_max is None and result.ess_min is None and result.w2_sq.worst > 0
print("bare core works")
"""


def test_the_core_runs_with_jax_numpy_and_scipy_alone():
    result = subprocess.run(
        [sys.executable, "-c", BARE], capture_output=True, text=True, check=False
    )
    assert result.stdout == "bare core works\n", result.stderr


def modules():
    names = [info.name for info in pkgutil.walk_packages(wflmc.__path__, "wflmc.")]
    return ["wflmc", *(name for name in names if not name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} must say what it is for"
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    # A module attribute may be hidden by a function of the same name; sys.modules has the module.
    result = doctest.testmod(sys.modules[name], optionflags=flags)
    assert result.failed == 0


def test_pins_name_versions_and_nothing_else():
    paths = list((ROOT / "constraints").glob("*.txt"))
    assert paths
    for path in paths:
        lines = path.read_text().splitlines()
        assert lines, path
        for line in lines:
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line), line


def test_names_for_type_checkers_are_those_at_run_time():
    stub = ast.parse(
        Path(wflmc.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    )
    declared = next(node.value for node in stub.body if isinstance(node, ast.AnnAssign))
    assert set(ast.literal_eval(declared)) == set(wflmc.__all__)
    imported = {
        name.asname: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert set(wflmc.__all__) <= set(imported)
    for name, home in imported.items():
        assert getattr(wflmc, name) is getattr(importlib.import_module(home), name)
