"""Runs of saved plans: nothing is planned again, and files that do not belong together are refused."""

from __future__ import annotations

import json
import signal

import arviz
import numpy as np
import pytest

from wflmc.planning import build
from wflmc.planning.plan import Plan
from wflmc.privacy import Privacy
from wflmc.sampling import chunks

from ..cli_tools import listening, strict
from ..error_tools import raises_input_error
from ..plan_tools import with_context

SCENARIO = """
[posterior]
devices = 6
examples = 60
dim = 3
[link]
snr_db = 20.0
[privacy]
epsilon = 60.0
delta = 0.01
[sampler]
burn_in = 8
samples = 6
chains = 4
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def planned(monkeypatch):
    """Every plan that is made."""
    drafts = []
    finish = build._Planning.finish

    def counted(self, allocation):
        drafts.append(self)
        return finish(self, allocation)

    monkeypatch.setattr(build._Planning, "finish", counted)
    return drafts


def theta_of(folder):
    return arviz.from_netcdf(folder / "trace.nc").posterior["theta"].values


def one_sentence(result, *parts):
    """Whether a command refused its input in one sentence that has these parts."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
    return True


def test_one_plan_for_a_run_and_all_that_comes_after(tmp_path, call, scenario, planned):
    folder, again = tmp_path / "x", tmp_path / "y"
    assert call("run", scenario, "--out", folder)[0] == 0
    assert len(planned) == 1
    assert call("report", folder)[0] == 0
    for number, source in enumerate(
        (folder, folder / "plan.npz", folder / "plan.json")
    ):
        assert call("run", "--plan", source, "--out", again / str(number))[0] == 0
    assert len(planned) == 1
    for number in range(3):
        np.testing.assert_array_equal(theta_of(again / str(number)), theta_of(folder))
        assert (again / str(number) / "plan.npz").read_bytes() == (
            folder / "plan.npz"
        ).read_bytes()
    document, second_document = (
        strict((place / "plan.json").read_text()) for place in (folder, again / "0")
    )
    assert document.pop("seconds") != second_document.pop("seconds")
    assert document == second_document
    assert document["gap"] is not None  # the certificate is that of the plan
    assert document["plan_digest"] == Plan.load(folder / "plan.npz").checksum
    assert call("run", "--resume", folder, "--more", "3")[0] == 0
    assert len(planned) == 2  # the rounds that are added
    assert call("report", folder)[0] == 0
    assert len(planned) == 2
    longer = Plan.load(folder / "plan.npz")
    first = Plan.load(again / "0" / "plan.npz")
    for name in ("gain", "weight", "server_noise", "bound"):
        np.testing.assert_array_equal(getattr(longer, name)[:14], getattr(first, name))


def test_plan_out(tmp_path, call, scenario, planned):
    folder = tmp_path / "plan"
    overrides = ("--set", "sampler.burn_in=auto", "--set", "sampler.max_burn_in=500")
    code, out, _ = call("plan", scenario, "--out", folder, *overrides)
    assert code == 0
    assert "plan.npz, scenario.toml, plan.json" in out
    assert sorted(path.name for path in folder.iterdir()) == [
        "plan.json",
        "plan.npz",
        "scenario.toml",
    ]
    planned.clear()
    assert call("run", "--plan", folder, "--out", tmp_path / "a")[0] == 0
    assert not planned
    assert call("run", scenario, "--out", tmp_path / "b", *overrides)[0] == 0
    np.testing.assert_array_equal(theta_of(tmp_path / "a"), theta_of(tmp_path / "b"))
    assert one_sentence(
        call("plan", scenario, "--out", tmp_path / "b"),
        "--out",
        str(tmp_path / "b"),
    )
    mine = tmp_path / "mine" / "scenario.toml"
    mine.parent.mkdir()
    mine.write_text(SCENARIO)
    assert one_sentence(
        call("plan", mine, "--out", mine.parent), "--out", "scenario.toml"
    )


def test_json_alone_is_planned_once(tmp_path, call, scenario, planned):
    _, out, _ = call("plan", scenario, "--json")
    saved = tmp_path / "plan.json"
    saved.write_text(out)
    planned.clear()
    assert call("run", "--plan", saved, "--out", tmp_path / "a")[0] == 0
    assert len(planned) == 1
    assert (
        Plan.load(tmp_path / "a" / "plan.npz").checksum
        == json.loads(out)["plan_digest"]
    )


@pytest.mark.parametrize("name", ["step_size", "gain", "threshold", "bound"])
def test_json_alone_with_an_edited_list(tmp_path, call, scenario, name):
    _, out, _ = call("plan", scenario, "--json")
    document = json.loads(out)
    document[name][3] += 0.01
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(document))
    assert one_sentence(call("run", "--plan", saved), f"--plan: {name}")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (("sampler.dynamics=kinetic", "policy.power=equal"), "bound"),
        (("policy.schedule=unbiased",), "threshold"),
    ],
)
def test_json_alone_without_bound_or_thresholds(
    tmp_path, call, scenario, settings, name
):
    """The file has null for a bound that is not known, and for such thresholds."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    _, out, _ = call("plan", scenario, "--json", *overrides)
    document = json.loads(out)
    assert np.equal(document[name], None).all()
    saved = tmp_path / "plan.json"
    saved.write_text(out)
    assert call("run", "--plan", saved)[0] == 0


@pytest.fixture
def finished(tmp_path, call, scenario):
    folder = tmp_path / "run"
    assert call("run", scenario, "--out", folder)[0] == 0
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def other_plan(path):
    plan = Plan.load(path)
    plan.with_rounds(gain=plan.gain / 2).save(path)


def edited(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


HARMS = [
    ("plan.npz", cut, "plan.npz"),
    ("plan.npz", other_plan, "plan_digest"),
    ("plan.json", cut, "plan.json"),
    (
        "plan.json",
        lambda path: edited(path, lambda plan: plan["gain"].__setitem__(3, 1.0)),
        "gain",
    ),
    (
        "plan.json",
        lambda path: edited(path, lambda plan: plan["constants"].update(mu=1.0)),
        "constants.mu",
    ),
    (
        "plan.json",
        lambda path: edited(path, lambda plan: plan.update(plan_digest="0")),
        "plan_digest",
    ),
    (
        "plan.json",
        lambda path: edited(
            path, lambda plan: plan["scenario"]["link"].update(snr_db=3.0)
        ),
        "link.snr_db",
    ),
    (
        "scenario.toml",
        lambda path: path.write_text(
            path.read_text().replace("snr_db = 20.0", "snr_db = 3.0")
        ),
        "snr_db",
    ),
    ("scenario.toml", lambda path: path.write_text("[link"), "scenario"),
]


@pytest.mark.parametrize(("name", "harm", "said"), HARMS)
def test_files_that_do_not_belong_together(tmp_path, call, finished, name, harm, said):
    harm(finished / name)
    assert one_sentence(
        call("run", "--plan", finished, "--out", tmp_path / "again"), said
    )
    assert not (tmp_path / "again").exists()
    assert one_sentence(call("run", "--resume", finished, "--more", "3"), said)
    assert one_sentence(call("report", finished), name, "digests.json")
    (finished / "digests.json").unlink()
    assert one_sentence(call("report", finished), said)


def test_a_plan_for_other_data(tmp_path, call):
    generator = np.random.default_rng(0)
    X, y = generator.standard_normal((40, 2)), generator.standard_normal(40)
    np.savez(tmp_path / "d.npz", X=X, y=y)
    public = (
        "[posterior]\ndevices = 4\ndata = 'd.npz'\nmu = 0.5\nL = 200.0\n"
        "initial_w2_sq = 5.0\n[sampler]\nchains = 3\n"
    )
    (tmp_path / "s.toml").write_text(public)
    assert call("plan", tmp_path / "s.toml", "--out", tmp_path / "plan")[0] == 0
    # Other data of the same shape: nothing in the plan comes from the data.
    np.savez(tmp_path / "d.npz", X=2 * X, y=y)
    assert call("run", "--plan", tmp_path / "plan", "--out", tmp_path / "a")[0] == 0
    for rows in (X[:36], X[:, :1]):
        np.savez(tmp_path / "d.npz", X=rows, y=y[: len(rows)])
        assert one_sentence(
            call("run", "--plan", tmp_path / "plan"), "--plan", "examples"
        )
    (tmp_path / "s.toml").write_text(public.replace("mu = 0.5\nL = 200.0\n", ""))
    np.savez(tmp_path / "d.npz", X=X, y=y)
    assert call("plan", tmp_path / "s.toml", "--out", tmp_path / "private")[0] == 0
    np.savez(tmp_path / "d.npz", X=2 * X, y=y)
    assert one_sentence(call("run", "--plan", tmp_path / "private"), "constants.")


def saved_again(folder, plan):
    """Put another plan into a folder, with all that plan.json says of it."""
    plan.save(folder / "plan.npz")
    changes = {"plan_digest": plan.checksum, "gain": plan.gain.tolist()}
    edited(folder / "plan.json", lambda document: document.update(changes))


def test_a_plan_that_does_not_keep_the_promise(finished, call):
    """Also where every digest was made again."""
    plan = Plan.load(finished / "plan.npz")
    for changes in (
        {"privacy": Privacy(600.0, 0.01, 30.0)},
        {"enforced": False},
        {"noise_power": 2.0},
    ):
        saved_again(finished, with_context(plan, **changes))
        assert one_sentence(call("run", "--plan", finished), "--plan", "promise")
    saved_again(finished, plan.with_rounds(gain=10 * plan.gain))
    assert one_sentence(call("run", "--plan", finished), "--plan", "budget")
    saved_again(finished, plan)
    assert call("run", "--plan", finished)[0] == 0


WAITING = """
import sys
from wflmc.sampling import chunks, simulation
chunks.BLOCK_WORK = 1
advance, left = simulation.advance_block, [4]
def counted(*arguments, **keywords):
    left[0] -= 1
    if left[0] == 0:
        print("in the middle of a round", flush=True)
        import time
        time.sleep(60)
    return advance(*arguments, **keywords)
simulation.advance_block = counted
from wflmc.cli import main
main()
"""


def test_a_run_stopped_by_sigint_goes_on_with_its_plan(
    tmp_path, call, scenario, planned, monkeypatch
):
    monkeypatch.setattr(chunks, "BLOCK_WORK", 1)
    assert call("run", scenario, "--out", tmp_path / "whole")[0] == 0
    folder = tmp_path / "stopped"
    with listening("-c", WAITING, "run", scenario, "--out", folder) as process:
        assert process.stdout.readline() == "in the middle of a round\n", (
            process.communicate()[1]
        )
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert f"wflmc run --resume {folder}" in err
    saved = folder / ".checkpoint" / "plan.npz"
    content = saved.read_bytes()
    assert content == (tmp_path / "whole" / "plan.npz").read_bytes()
    for harm, said in ((cut, "plan.npz"), (other_plan, "plan_digest")):
        harm(saved)
        assert one_sentence(call("run", "--resume", folder), said)
        assert one_sentence(call("report", folder), said)
        saved.write_bytes(content)
    settled = folder / ".checkpoint" / "scenario.toml"
    text = settled.read_text()
    settled.write_text(text.replace("snr_db = 20.0", "snr_db = 3.0"))
    assert one_sentence(call("run", "--resume", folder), "link.snr_db")
    settled.write_text(text)
    planned.clear()
    assert call("report", folder)[0] == 0
    assert call("run", "--resume", folder)[0] == 0
    assert not planned
    np.testing.assert_array_equal(theta_of(folder), theta_of(tmp_path / "whole"))
    assert (folder / "plan.npz").read_bytes() == content


def test_a_folder_whose_secret_nobody_can_read(finished, tmp_path, call, scenario):
    """The scenario is parsed: a text about a secret seed is none."""
    written = finished / "scenario.toml"
    written.write_text('# not seed = "secret"\n' + written.read_text())
    assert call("run", scenario, "--out", finished)[0] == 0
    written.write_text(
        written.read_text().replace(
            'keep = "draws"\nseed = 0', 'keep = "draws"\nseed="secret"'
        )
    )
    assert one_sentence(call("run", scenario, "--out", finished), "--out", "secret")
    written.write_text("[sampler")
    assert one_sentence(
        call("run", scenario, "--out", finished),
        "--out",
        "scenario.toml",
    )


def test_warnings_have_codes(tmp_path, call, scenario):
    plan = strict(call("plan", scenario, "--json")[1])
    summary = strict(call("run", scenario, "--json")[1])
    for document in (plan, summary):
        assert len(document["warning_codes"]) == len(document["warnings"])
    assert "data-constants" in plan["warning_codes"]
    assert summary["warning_codes"][-1] == "simulated"


def test_missing_files(tmp_path, call):
    (tmp_path / "empty").mkdir()
    for path in ("empty", "missing", "missing.npz", "missing.json"):
        assert one_sentence(
            call("run", "--plan", tmp_path / path), "--plan", "plan.npz or plan.json"
        )
    with raises_input_error("plan", tmp_path / "missing.npz", "No such file"):
        Plan.load(tmp_path / "missing.npz")


def test_added_rounds_are_in_one_notice(tmp_path, call, scenario):
    """Notices about rounds are about all of them, and each code is there once."""
    noisy = ("--set", "link.snr_db=0", "--set", "policy.power=equal")
    assert call("run", scenario, "--out", tmp_path / "run", *noisy)[0] == 0
    for more in (5, 3):
        assert call("run", "--resume", tmp_path / "run", "--more", str(more))[0] == 0
    plan = Plan.load(tmp_path / "run" / "plan.npz")
    by_code = {notice.code: notice.text for notice in plan.notices}
    assert len(by_code) == len(plan.notices)
    assert "of 22 rounds" in by_code["chains-may-be-lost"]


def test_what_is_no_plan_is_named_as_it_was_given(tmp_path, call, scenario):
    for path in (tmp_path / "nowhere", scenario):
        assert one_sentence(
            call("run", "--plan", path, "--out", tmp_path / "out"), f"'{path}'"
        )
