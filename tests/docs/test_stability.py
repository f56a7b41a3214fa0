"""The page of stable names: every name, file and JSON key on it exists."""

import inspect
import operator
import re

import jax
import pytest
import typer

import wflmc
from wflmc.apps.report.study_page import ClaimsFile
from wflmc.cli.app import app
from wflmc.runs import documents

from .docs_tools import ROOT

PAGE = (ROOT / "docs/reference/stability.md").read_text(encoding="utf-8")
DOCUMENTS = {
    "`plan.json`, `plan --json`": documents.PlanFile,
    "its `constants`": documents.Constants,
    "its `privacy`": documents.Spending,
    "`summary.json`, `run --json`": documents.SummaryFile,
    "its `w2_sq`": documents.DistancePart,
    "its `clip_rate`": documents.ClipRate,
    "its `ledger`": documents.LedgerPart,
    "`fit.json`, `fit --json`": documents.FitFile,
    "`claims.json`": ClaimsFile,
}

FILE_TYPES = ("json", "npz", "nc")


def rows_of(section):
    """Return the cells of the rows of a section's table, without its heading."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"
    ]
    return rows[2:]


@pytest.mark.parametrize(("document", "keys"), rows_of("JSON"))
def test_json_keys_exist(document, keys):
    names = re.findall(r"`(\w+)`", keys)
    assert names
    assert set(names) <= set(DOCUMENTS[document].model_fields)


def test_every_document_is_described():
    assert [row[0] for row in rows_of("JSON")] == list(DOCUMENTS)


def test_every_name_at_the_top_level_is_listed():
    listed = set(re.findall(r"`wflmc\.(\w+)", PAGE))
    assert {name for name in wflmc.__all__ if name != "__version__"} <= listed


def test_python_names_exist():
    entry_points = {"wflmc.policies", "wflmc.fading", "wflmc.models"}
    names = set(re.findall(r"`(wflmc\.[\w.]+)`", PAGE)) - entry_points
    assert len(names) > 30
    for name in names:
        operator.attrgetter(name.removeprefix("wflmc."))(wflmc)


@pytest.fixture(scope="module")
def owners():
    """A small plan, its trace and its posterior, by the names that the page gives them."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3)
    plan = wflmc.plan(posterior, step_size=1e-4, burn_in=2, samples=2)
    trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=2)
    return {"plan": plan, "trace": trace, "posterior": posterior}


def test_members_of_plans_traces_and_posteriors_exist(owners):
    members = re.findall(r"`(plan|trace|posterior)\.(\w+)", PAGE)
    members = [(owner, name) for owner, name in members if name not in FILE_TYPES]
    assert len(members) > 15
    for owner, name in members:
        assert hasattr(owners[owner], name), f"{owner}.{name}"


@pytest.mark.parametrize("function", ["plan", "sample"])
def test_arguments_exist(function):
    (sentence,) = re.findall(
        rf"`wflmc\.{function}\(…\)` takes ([^.]*(?:\.\w[^.]*)*)\.", PAGE
    )
    names = re.findall(r"`(\w+)[`=]", sentence)
    assert len(names) > 5
    assert set(names) <= set(inspect.signature(getattr(wflmc, function)).parameters)


def test_commands_named_on_the_page_exist():
    commands = typer.main.get_command(app).commands
    named = re.findall(r"`wflmc (\w+)", PAGE)
    assert named
    assert set(named) <= set(commands)
