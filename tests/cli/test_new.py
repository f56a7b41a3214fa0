"""`wflmc new`: what it writes works as it stands, and says no more than the schema knows."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib

import pytest

from wflmc.scenario import Scenario, load_scenario, validate

from ..conftest import FULL
from ..error_tools import codes_of, names_key


@pytest.fixture
def new_folder(call, tmp_path):
    folder = tmp_path / "my study"
    code, out, err = call("new", folder)
    assert (code, err) == (0, "")
    return folder, out


def test_the_scenario_plans_at_once(new_folder, plan_of):
    document = plan_of(new_folder[0] / "scenario.toml")
    assert document["privacy"]["epsilon_spent"] <= 3 * (1 + 1e-9)
    assert document["gap"] <= 1e-6
    # That constants come from private data, as with every plan like it.
    assert codes_of(document) == ["data-constants"]


def test_the_next_two_commands(new_folder):
    folder, out = new_folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.py",
        "scenario.toml",
    ]
    assert out.splitlines()[1:] == [
        f"  wflmc plan '{folder}/scenario.toml'",
        f"  python '{folder}/model.py'",
    ]


def test_what_is_given_is_the_default_but_for_what_has_none(new_folder):
    """So that deleting a line changes nothing, and the comments' words for defaults stay true."""
    scenario = load_scenario(new_folder[0] / "scenario.toml").model_dump()
    without_default = {
        f"privacy.{key}" for key in ("unit", "epsilon", "delta", "example_clip")
    } | {"policy.max_round_noise"}
    for section, values in Scenario().model_dump().items():
        for key, value in values.items():
            if f"{section}.{key}" not in without_default:
                assert scenario[section][key] == value, f"{section}.{key}"


def test_every_key_and_every_word_in_its_comments_is_known(new_folder):
    """Lines that are commented out, and the alternatives that comments name, are allowed too."""
    text = (new_folder[0] / "scenario.toml").read_text(encoding="utf-8")
    assert set(tomllib.loads(text)) == set(Scenario.model_fields)
    section = ""
    tried = 0
    for line in text.splitlines():
        if heading := re.match(r"\[(\w+)\]", line):
            section = heading[1]
        match = re.match(r"(?:# )?(\w+) = ([^#]*)(?:#(.*))?$", line)
        if not match:
            continue
        key, value, comment = match.groups()
        for word in [value, *re.findall(r'(?<!= )"[^"]+"', comment or "")]:
            validate({section: {key: tomllib.loads(f"value = {word}")["value"]}})
            tried += 1
    assert tried > 40


def test_the_script_runs_as_it_stands(new_folder, capsys):
    runpy.run_path(str(new_folder[0] / "model.py"), run_name="__main__")
    printed = capsys.readouterr().out
    mean = [
        float(word)
        for word in re.search(r"posterior mean +\[(.*)\]", printed)[1].split()
    ]
    # Within four standard deviations of the posterior.
    assert mean == pytest.approx([0.5, -0.5, 1.0, 0.7, 0.4], abs=0.12)
    assert "ε spent" in printed


@pytest.mark.skipif(not FULL, reason="a second run of the script: make test-full")
def test_the_script_runs_with_labels(new_folder):
    text = (new_folder[0] / "model.py").read_text(encoding="utf-8")
    old, new = (
        "posterior = wflmc.gaussian_regression",
        "y = (y > 0).astype(int)\nposterior = wflmc.softmax_regression",
    )
    assert old in text
    text = text.replace(old, new).replace("chains=100", "chains=4")
    result = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("there", ["folder", "file", "under a file"])
def test_what_is_there_is_left_alone(call, tmp_path, there):
    target = tmp_path / "taken"
    if there == "folder":
        target.mkdir()
    else:
        target.touch()
    code, out, err = call("new", target / "x" if there == "under a file" else target)
    assert (code, out) == (2, "")
    assert names_key(err, "NAME", target)
    assert there != "folder" or not list(target.iterdir())


def test_a_folder_needs_a_name(call):
    assert call("new", "")[0] == 2


def test_a_name_of_a_file_is_refused(call, tmp_path):
    code, _, err = call("new", tmp_path / "study.toml")
    assert code == 2
    assert names_key(err, "NAME", tmp_path / "study.toml", "folder")
    assert not (tmp_path / "study.toml").exists()
