"""The check of readability: what it counts, what it refuses, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.house import compute_figures, measure_file
from scripts.ratchet import DESCRIPTIONS, Limits, measure_tree

REPOSITORY = Path(__file__).parents[2]

CLEAR = '''
def scale(values, factor):
    """Multiply values by a factor.

    Args:
        values: any numbers.
        factor: of any sign.

    Returns:
        The products, in the order of the values.
    """
    products = []
    for value in values:
        products.append(value * factor)
    return products
'''
"""A module that every figure approves of."""

DEFECTS = {
    "pairs": "low, high = 1, 2\n",
    "any_uses": "from typing import Any as Anything\nvalue: Anything = 1\n",
    "everyday": "found = 1\n",
    "args_percent": 'def add(a, b):\n    """Add numbers without rounding."""\n',
    "docstring_words": 'def clear():\n    """Clear."""\n',
    "nodes_median": "def f(x):\n"
    + 3 * "    x = [x(a + b * c, d=e) for a in x if not -a < b[c]]\n",
    "nodes_90": "def f(x):\n    x()\n    y = 1\n    x = [x(a + b * c) for a in x]\n",
}
"""Code that makes one figure worse."""


@pytest.fixture
def package(tmp_path):
    """A package of one clear module, with its figures recorded."""
    root = tmp_path / "package"
    root.mkdir()
    (root / "clear.py").write_text(CLEAR)
    Limits.of(measure_tree(root)).write(tmp_path / "limits.json")
    return root


def ratchet(root, *options):
    limits = root.with_name("limits.json")
    command = [sys.executable, "-m", "scripts.ratchet", str(root)]
    return subprocess.run(
        [*command, "--limits", str(limits), *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )


def test_the_package_is_not_harder_to_read_than_recorded(package):
    result = ratchet(package)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("figure", DEFECTS)
def test_a_defect_fails(package, figure):
    (package / "unclear.py").write_text(DEFECTS[figure])
    result = ratchet(package)
    assert result.returncode == 1
    assert DESCRIPTIONS[figure] in result.stdout


@pytest.mark.parametrize(
    ("figure", "place"),
    [
        ("pairs", "unclear.py:1: low, high = (1, 2)"),
        ("any_uses", "unclear.py:2: Any"),
        ("everyday", "unclear.py:1: found"),
    ],
)
def test_the_message_names_file_and_line(package, figure, place):
    (package / "unclear.py").write_text(DEFECTS[figure])
    assert place in ratchet(package).stdout


def test_places_in_files_that_are_as_before_are_not_printed(package):
    (package / "before.py").write_text(DEFECTS["pairs"])
    Limits.of(measure_tree(package)).write(package.with_name("limits.json"))
    (package / "after.py").write_text(DEFECTS["pairs"])
    message = ratchet(package).stdout
    assert "after.py:1" in message
    assert "before.py" not in message


def test_update_lowers_the_bar_and_never_raises_it(package):
    limits = package.with_name("limits.json")
    (package / "unclear.py").write_text(DEFECTS["pairs"])
    Limits.of(measure_tree(package)).write(limits)
    (package / "unclear.py").write_text("low = 1\nhigh = 2\n")
    improved = ratchet(package)
    assert improved.returncode == 0
    assert "--update" in improved.stdout

    assert ratchet(package, "--update").returncode == 0
    assert json.loads(limits.read_text())["figures"]["pairs"] == 0

    (package / "unclear.py").write_text(DEFECTS["pairs"])
    assert ratchet(package, "--update").returncode == 1
    assert json.loads(limits.read_text())["figures"]["pairs"] == 0


@pytest.mark.parametrize(
    "statement", ["a, b = b, a", "rows, columns = x.shape", "a, b = f()", "a = 1, 2"]
)
def test_swaps_and_unpacking_are_not_pairs(statement):
    assert measure_file("module.py", statement).pairs == []


def test_figures_of_a_module():
    figures = compute_figures([measure_file("module.py", CLEAR)])
    assert figures.nodes_median == pytest.approx(2.8)
    assert figures.args_percent == 100
    assert figures.docstring_words == 22
