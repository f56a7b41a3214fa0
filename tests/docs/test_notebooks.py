"""The notebooks run, each within two minutes, and show what they print."""

import importlib.util
import time

import pytest

from ..conftest import FULL
from .docs_tools import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials" / "notebooks").glob("*.py"))


def load_pages():
    spec = importlib.util.spec_from_file_location(
        "notebook_pages", ROOT / "docs" / "hooks" / "notebook_pages.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_notebook_is_rendered_with_its_output(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(
        "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 2\nprint('hello')\nx + 1\n"
    )
    page = load_pages().render(path)
    assert page.startswith("# Title\n\nText.\n")
    assert "```text\nhello\n3\n```" in page


@pytest.mark.skipif(not FULL, reason="make test-full runs the notebooks")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_in_two_minutes(path):
    began = time.perf_counter()
    assert "```text" in load_pages().render(path)
    assert time.perf_counter() - began < 120
