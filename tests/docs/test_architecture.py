"""The pages on architecture and theory: every function that they name exists."""

import importlib
import re

import pytest

from .docs_tools import ROOT

PAGE = (ROOT / "docs/reference/architecture.md").read_text(encoding="utf-8")
THEORY = (ROOT / "docs/explanation/theory.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(wflmc\.[\w.]+\w)`", PAGE + THEORY)))


def find(name):
    """Return the object with a dotted name, importing its longest module."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if attribute in getattr(found, "__annotations__", {}):
                return found.__annotations__[attribute]
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"{name} is in no module")


def test_the_page_names_what_a_reader_looks_for():
    assert len(NAMES) > 30


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name):
    assert find(name) is not None


def test_the_theory_keeps_the_anchors_that_the_source_names():
    anchors = re.findall(r"^## (.+)$", THEORY, re.M)
    assert anchors == [
        "Update",
        "Lemma 1",
        "Lemma 2",
        "Lemma 3",
        "Proposition 1",
        "Privacy",
        "Theorem 1",
        "Thresholds",
        "Corrections",
    ]


def test_identifiers_of_the_page_are_in_the_source():
    """Names without their module, such as `POLICIES` in a row about policies.py."""
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "src/wflmc").rglob("*.py"))
    )
    identifiers = set(re.findall(r"`([A-Za-z_]\w+)(?:\([\w, ]*\))?`", PAGE))
    assert len(identifiers) > 30
    known = set(re.findall(r"\w+", source))
    assert sorted(identifiers - known) == []


def test_a_wrong_name_is_noticed():
    with pytest.raises(AttributeError):
        find("wflmc.dynamics.Overdamped.stride")
