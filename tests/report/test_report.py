"""Pages of runs: their numbers are those of the files, whatever is missing is said in words."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import h5netcdf
import numpy as np
import pytest

from wflmc.apps.diagnosis.advice import advise_run, read_advice, write_advice
from wflmc.apps.report import explorer
from wflmc.apps.report.run_page import answer_section, scenario_section
from wflmc.apps.report.verdicts import (
    MARKS,
    all_verdicts,
    clipped,
    comparison,
    converged,
    distance,
    privacy,
    resembles,
)
from wflmc.cli.report import command, render_folder
from wflmc.runs.documents import Federation
from wflmc.runs.execution import RunRequest, run_scenario
from wflmc.runs.folder import read_run
from wflmc.scenario import with_values
from wflmc.support.errors import InputError

from ..conftest import FULL
from ..error_tools import raises_input_error
from .report_tools import Page, check_in_browser, in_browser

GAUSSIAN = """
[posterior]
devices = 5
examples = 100
dim = 3
[link]
snr_db = 30.0
[privacy]
epsilon = [8.0, 8.0, 15.0, 15.0, 30.0]
delta = 0.01
[sampler]
burn_in = 6
samples = 8
chains = 6
"""
SOFTMAX = """
[posterior]
model = "softmax"
devices = 4
data = DATA
intercept = true
[privacy]
epsilon = 8.0
delta = 0.01
unit = "record"
example_clip = 9.0
[sampler]
burn_in = 5
samples = 6
chains = 3
"""
BARE = """
[posterior]
devices = 4
examples = 60
dim = 2
[sampler]
burn_in = 3
samples = 1
chains = 5
[policy]
power = "noiseless"
"""
KINETIC = """
[posterior]
devices = 4
examples = 60
dim = 2
[sampler]
dynamics = "kinetic"
burn_in = 3
samples = 6
chains = 4
[policy]
power = "equal"
"""
UGLY = "<script>document.title='run'</script><img src=x onerror=alert(1)>.npz"


@contextlib.contextmanager
def silent(task, total):
    yield lambda done: None


def run_in(folder, text=None, **others):
    request = dict.fromkeys(RunRequest._fields) | others
    if text is not None:
        scenario = folder.with_suffix(".toml")
        scenario.write_text(text)
        request |= {"scenario": str(scenario), "out": str(folder)}
    folder.mkdir(exist_ok=True)
    run_scenario(RunRequest(**request), folder, silent, lambda said: None)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One small run of each kind; tests that change a folder copy it."""
    home = tmp_path_factory.mktemp("runs")
    generator = np.random.default_rng(0)
    path = home / UGLY
    path.parent.mkdir()
    y = generator.integers(0, 3, 130)
    X = generator.standard_normal((130, 2)) + 2 * np.eye(3)[y][:, :2]
    np.savez(path, X=X[:80], y=y[:80], X_test=X[80:], y_test=y[80:])
    return {
        "gaussian": run_in(home / "gaussian", GAUSSIAN),
        "softmax": run_in(
            home / "softmax", SOFTMAX.replace("DATA", json.dumps(str(path)))
        ),
        "bare": run_in(home / "bare", BARE),
        "kinetic": run_in(home / "kinetic", KINETIC),
    }


@pytest.fixture(scope="module")
def pages(runs):
    return {name: render_folder(folder) for name, folder in runs.items()}


@pytest.fixture
def copied(runs, tmp_path):
    """A copy of a run's folder to break."""
    return lambda name="gaussian": Path(shutil.copytree(runs[name], tmp_path / name))


def files_of(folder):
    return {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("plan", "summary")
    }


def look_up(document, key):
    for part in key.split("."):
        document = document[part]
    return document


@pytest.mark.parametrize("name", ["gaussian", "softmax", "bare", "kinetic"])
def test_numbers_are_those_of_the_files(runs, pages, name):
    page, files = Page(pages[name]), files_of(runs[name])
    keys = [key for key in page.values if key.startswith(("plan.", "summary."))]
    assert {"summary.rhat_max", "summary.ess_min", "plan.constants.dim"} <= set(keys)
    for key in keys:
        assert page.values[key] == look_up(files, key), key
    plan, summary = files["plan"], files["summary"]
    assert page.curve("plan", "gain α")["y"] == plan["gain"]
    assert page.curve("plan", "active devices")["y"] == plan["active_devices"]
    if plan["bound"] is not None:
        assert page.curve("distance", "bound")["y"] == plan["bound"]
    if plan["exact_w2_sq"] is not None:
        assert (
            page.curve("distance", "exact law, no clipping")["y"] == plan["exact_w2_sq"]
        )
        assert (
            page.curve("distance", "estimated from the chains")["y"]
            == summary["w2_sq"]["per_round"]
        )
    if plan["privacy"]["spent"] is not None:
        assert page.curve("spent", "spent")["y"] == plan["privacy"]["spent"]
    for warning in summary["warnings"]:
        assert warning in page.text


def test_promise_and_budgets(runs, pages):
    page, files = Page(pages["gaussian"]), files_of(runs["gaussian"])
    assert page.curve("spent", "budget")["y"] == files["plan"]["privacy"]["budgets"]
    assert (
        page.values["plan.privacy.epsilon_by.paper"]
        == files["plan"]["privacy"]["epsilon_by"]["paper"]
    )
    worst = page.curve("epsilon", "exact accountant")["y"][-1]
    assert worst == pytest.approx(files["plan"]["privacy"]["epsilon_each"][0], rel=1e-9)
    assert "(ε, δ) = (8 to 30, 0.01)" in page.text
    assert "any change of a device's data (adjacency: replace)" in page.text
    assert "ε (replace) is that of one chain" in page.text
    assert "ε at δ = 0.01 (replace)" in page.text
    assert "Its hash chain is intact" in page.text
    assert "one chain" in page.text


def test_scores(runs, pages):
    page, files = Page(pages["softmax"]), files_of(runs["softmax"])
    fraction_curve = page.curve("reliability", "share of examples")
    assert fraction_curve["y"] == files["summary"]["reliability"]["share"]
    full = [i for i, part in enumerate(fraction_curve["y"]) if part > 1e-3]
    observed = files["summary"]["reliability"]["observed"]
    assert page.curve("reliability", "predictions")["y"] == [observed[i] for i in full]
    for score in ("accuracy", "ece", "nll", "brier"):
        assert page.values[f"summary.{score}"] == files["summary"][score]
    assert "Laplace approximation" in page.text
    assert "(class 2, intercept)" in page.text
    assert "the data have no test set" in Page(pages["gaussian"]).text


def test_samples_beside_the_law(runs, pages):
    """Means and laws in the table are those of the trace and of the exact posterior."""
    page, run = Page(pages["gaussian"]), read_run(runs["gaussian"])
    exact = run.inputs.posterior.exact
    for index in range(3):
        assert page.values[f"law.mean.{index}"] == exact.mean[index]
        assert page.values[f"law.sd.{index}"] == exact.covariance[index, index] ** 0.5
        assert page.values[f"mean.{index}"] == pytest.approx(
            run.draws.theta[:, :, index].mean(), rel=1e-12
        )


def test_what_comes_from_files_does_not_run(pages):
    page = Page(pages["softmax"])
    name = UGLY.rpartition("/")[2]
    assert name in page.text  # as text
    assert "onerror" not in page.attributes
    assert "<script>document" not in pages["softmax"]


def test_nothing_is_promised_and_nothing_clips(pages):
    text = Page(pages["bare"]).text
    assert "no finite ε would be true" in text
    assert "Kept draws per chain: 1, too few to follow a chain." in text
    assert "No privacy is promised. Gradients are not clipped" in text
    assert "there is no δ to state an ε at" in Page(pages["kinetic"]).text


def test_more_rounds(copied):
    folder = copied("kinetic")
    run_in(folder, resume=str(folder), more=5)
    page = Page(render_folder(folder))
    files = files_of(folder)
    assert (
        len(page.curve("plan", "gain α")["y"])
        == files["plan"]["constants"]["rounds"]
        == 14
    )
    assert page.values["summary.w2_sq.worst"] == files["summary"]["w2_sq"]["worst"]
    assert (
        "Rounds in the ledger: 14, each written before it was transmitted" in page.text
    )


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("trace.nc", "trace.nc is missing"),
        ("summary.json", "summary.json is missing"),
        ("ledger.jsonl", "There is no ledger in the folder"),
        ("scenario.toml", "scenario.toml is missing; this is what plan.json says"),
    ],
)
def test_missing_files_are_said_in_words(copied, file, said):
    folder = copied()
    (folder / file).unlink()
    assert said in Page(render_folder(folder)).text


def test_all_but_the_plan_is_missing(copied):
    folder = copied()
    for file in ("trace.nc", "summary.json", "ledger.jsonl", "scenario.toml"):
        (folder / file).unlink()
    drawn = set(Page(render_folder(folder)).drawings)
    assert {"plan", "distance", "spent"} <= drawn
    assert not {"traces", "reliability", "marginal0"} & drawn


def test_a_run_that_was_stopped(copied):
    folder = copied()
    (folder / ".checkpoint").mkdir()
    shutil.move(folder / "plan.json", folder / ".checkpoint")
    for file in ("trace.nc", "summary.json", "scenario.toml"):
        (folder / file).unlink()
    text = Page(render_folder(folder)).text
    assert "stopped before its end. 14 rounds are in its ledger" in text
    assert f"wflmc run --resume {folder}" in text


def test_data_that_have_changed(runs, copied):
    folder = copied("softmax")
    data = Path(
        json.loads((folder / "plan.json").read_text())["scenario"]["posterior"]["data"]
    )
    content = data.read_bytes()
    try:
        with np.load(data) as archive:
            arrays = dict(archive)
        arrays["y"][0] = (arrays["y"][0] + 1) % 3
        np.savez(data, **arrays)
        changed = Page(render_folder(folder)).text
        data.unlink()
        gone = Page(render_folder(folder)).text
    finally:
        data.write_bytes(content)
    assert "The data have changed since" in changed
    assert "No such file" in gone
    assert "The posterior is not known here" in gone


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edited(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("plan.json", Path.unlink),
        ("plan.json", cut),
        ("plan.json", lambda path: edited(path, gain=[1.0])),
        ("plan.json", lambda path: edited(path, bound="none")),
        ("summary.json", cut),
        ("summary.json", lambda path: edited(path, w2_sq=3)),
        ("trace.nc", cut),
        (
            "ledger.jsonl",
            lambda path: path.write_text(path.read_text().replace("0.", "0.1", 1)),
        ),
        ("ledger.jsonl", lambda path: path.write_text("")),
        (
            "ledger.jsonl",
            lambda path: path.write_text(
                "".join(path.read_text().splitlines(keepends=True)[:3])
            ),
        ),
        ("scenario.toml", lambda path: path.write_text("[posterior")),
    ],
)
def test_a_damaged_file_is_named(copied, file, harm):
    folder = copied()
    harm(folder / file)
    with raises_input_error("report", folder / file):
        render_folder(folder)


def retold(folder, **changes):
    """Another run of the same shape: its files as they would be with other keys, as far as a page compares them."""
    plan = json.loads((folder / "plan.json").read_text())
    for section, keys in changes.items():
        plan["scenario"][section] |= keys
    (folder / "plan.json").write_text(json.dumps(plan))


def test_a_plan_of_another_run(copied):
    folder = copied()
    retold(folder, privacy={"epsilon": 3.0}, link={"snr_db": 0.0})
    with raises_input_error("report", folder / "plan.json", "digests.json"):
        render_folder(folder)
    (folder / "trace.nc").unlink()
    with raises_input_error("report", folder / "plan.json"):
        render_folder(folder)


@pytest.mark.parametrize("file", ["scenario.toml", "trace.nc"])
def test_a_scenario_or_a_trace_of_another_run(copied, file):
    folder = copied()
    text = (folder / "scenario.toml").read_text()
    changed = text.replace("snr_db = 30.0", "snr_db = 29.0")
    assert changed != text
    if file == "scenario.toml":
        (folder / file).write_text(changed)
    else:
        with h5netcdf.File(folder / file, "a") as trace:
            trace["posterior"].attrs["scenario"] = changed
    with raises_input_error("report", folder / file, "digests.json"):
        render_folder(folder)


def test_a_summary_of_another_run(copied):
    folder = copied()
    edited(folder / "summary.json", epsilon_spent=3.0)
    with raises_input_error("report", folder / "summary.json", "digests.json"):
        render_folder(folder)
    folder = copied("kinetic")
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    edited(folder / "summary.json", ledger=ledger | {"chain": "0" * 64})
    (folder / "digests.json").unlink()  # as of earlier versions
    with raises_input_error("report", folder / "ledger.jsonl", "summary.json"):
        render_folder(folder)


def test_a_run_that_was_resumed_or_made_from_a_plan(copied, runs, tmp_path):
    """A run of a plan has the plan's own scenario; of one with more rounds step sizes are numbers."""
    from_plan = tmp_path / "from_plan"
    run_in(from_plan, plan=str(runs["gaussian"] / "plan.json"), out=str(from_plan))
    assert (from_plan / "scenario.toml").read_text() == (
        runs["gaussian"] / "scenario.toml"
    ).read_text()
    assert (from_plan / "plan.npz").read_bytes() == (
        runs["gaussian"] / "plan.npz"
    ).read_bytes()
    render_folder(from_plan)
    folder = copied("kinetic")
    assert "step_size = 0." not in (folder / "scenario.toml").read_text()
    run_in(folder, resume=str(folder), more=2)
    assert "step_size = 0." in (folder / "scenario.toml").read_text()
    render_folder(folder)


@pytest.mark.parametrize("name", ["plan.npz", "plan.json", "scenario.toml"])
def test_a_page_needs_files_of_one_plan(copied, name):
    """Each of them taken from a run of another plan, in a folder without digests."""
    other = copied("kinetic")
    folder = Path(shutil.copytree(other, other.with_name("folder")))
    run_in(other, resume=str(other), more=2)
    shutil.copy(other / name, folder / name)
    (folder / "digests.json").unlink()
    with pytest.raises(InputError, match=r"plan\.npz|scenario\.toml"):
        render_folder(folder)


def test_a_page_without_the_plan_file(copied):
    folder = copied()
    (folder / "plan.npz").unlink()
    page = Page(render_folder(folder))
    assert "plan.npz is missing" in page.text
    assert "plan" not in page.drawings


def test_data_are_never_replaced(copied):
    folder = copied()
    (folder / "notes.html").write_text("my notes")
    for name in ("summary.json", "ledger.jsonl", "new.json", "notes.html"):
        with raises_input_error("--out", folder / name):
            command(str(folder), False, str(folder / name))
    assert (folder / "notes.html").read_text() == "my notes"
    for _ in range(2):
        command(str(folder), False, None)
        assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_looking_changes_nothing(copied):
    folder = copied()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    render_folder(folder)
    assert {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } == before


def test_verdicts_follow_from_the_numbers(runs):
    run = read_run(runs["gaussian"])

    def with_summary(**changes):
        return dataclasses.replace(run, summary=run.summary.model_copy(update=changes))

    assert converged(with_summary(rhat_max=1.5, ess_min=900.0)).mark == "bad"
    assert converged(with_summary(rhat_max=1.1, ess_min=900.0)).mark == "note-mark"
    assert converged(with_summary(rhat_max=1.005, ess_min=100.0)).mark == "note-mark"
    assert converged(with_summary(rhat_max=1.005, ess_min=900.0)).mark == "good"
    assert converged(with_summary(rhat_max=None, ess_min=None)).mark == "unknown"
    alone = converged(with_summary(rhat_max=None, ess_min=10.0))
    assert alone.mark == "unknown"
    assert "only one chain" in alone.reason
    far = run.summary.w2_sq.model_copy(update={"worst": 1e3, "per_round": [1e3] * 8})
    half = run.summary.clip_rate.model_copy(update={"samples": 0.5})
    assert distance(with_summary(w2_sq=far, clip_rate=half)).mark == "bad"
    law = distance(
        with_summary(w2_sq=far, clip_rate=half.model_copy(update={"samples": 0.0}))
    )
    assert f"{max(run.plan.exact_w2_sq[6:]):.3g} by the exact law" in law.reason
    assert privacy(run).mark == "good"
    spent = [2.0 * (budget or 0) for budget in run.plan.privacy.budgets]
    over = run.plan.model_copy(
        update={"privacy": run.plan.privacy.model_copy(update={"spent": spent})}
    )
    assert privacy(dataclasses.replace(run, plan=over)).mark == "bad"
    assert "200 % of it" in answer_section(dataclasses.replace(run, plan=over))
    less = run.scenario.privacy.model_copy(update={"epsilon": 3.0})
    promised = dataclasses.replace(
        run, scenario=run.scenario.model_copy(update={"privacy": less})
    )
    assert "promised was 3" in privacy(promised).reason
    assert "by the ledger a device has spent" in privacy(promised).reason
    assert privacy(promised).mark == "bad"


@pytest.mark.parametrize("name", ["gaussian", "softmax"])
def test_what_the_page_sees_of_the_samples_decides(runs, name):
    """Agreeing chains with a quarter of the spread, far from the law, by a plan of the right noise: no tick says so."""
    run = read_run(runs[name])
    law = comparison(run).law
    generator = np.random.default_rng(0)
    std = np.sqrt(np.diagonal(law.covariance))
    diagnosed = run.summary.model_copy(update={"rhat_max": 1.0, "ess_min": 900.0})

    def with_draws(spread, shift):
        theta = law.mean + std * (
            shift + spread * generator.standard_normal((30, 40, std.size))
        )
        return dataclasses.replace(
            run, draws=run.draws._replace(theta=theta), summary=diagnosed
        )

    bad = with_draws(0.25, 1.5)
    resemblance = resembles(bad)
    assert resemblance.mark == "bad"
    assert "0.2" in resemblance.reason
    assert "|z| = " in resemblance.reason
    assert converged(bad).mark == "good"  # alone
    good_verdicts = [verdict for verdict in all_verdicts(bad) if verdict.mark == "good"]
    assert not [
        v
        for v in good_verdicts
        if any(word in v.reason for word in ("agree", "far from", "noise", "resemble"))
    ]
    assert [v.mark for v in all_verdicts(bad)] == sorted(
        (v.mark for v in all_verdicts(bad)), key=list(MARKS).index
    )
    assert resembles(with_draws(4.0, 0.0)).mark == "bad"
    assert resembles(with_draws(1.6, 0.0)).mark == "note-mark"
    assert resembles(with_draws(1.0, 0.5)).mark == "note-mark"
    assert resembles(with_draws(1.0, 0.0)).mark == "good"
    assert resembles(dataclasses.replace(bad, inputs=None)) is None


def test_the_page_says_that_devices_were_simulated(runs, pages):
    for name in ("gaussian", "bare"):
        text = Page(pages[name]).text
        assert text.count("protects nobody") == 1
        assert "simulated devices" in text
        assert "stayed with them" not in text
    counts = {
        "noise": "channel",
        "secure_aggregation": False,
        "asked": [5],
        "sent": [5],
        "absences": 0,
    }
    run = read_run(runs["gaussian"])
    summary = run.summary.model_copy(
        update={"federation": Federation(**counts, epsilon_of_messages=None)}
    )
    assert "protects nobody" not in answer_section(
        dataclasses.replace(run, summary=summary)
    )


def test_the_page_has_the_advice_that_was_asked_for(pages, copied):
    assert "What would help" not in Page(pages["gaussian"]).text
    folder = copied()
    advice = advise_run(folder)
    write_advice(folder, advice)
    page = Page(render_folder(folder))
    assert advice.diagnosis
    for cause in advice.diagnosis[:2]:
        assert cause["text"] in page.text
    assert "test scores are not used" in page.text
    plan = folder / "plan.json"
    plan.write_text(plan.read_text() + "\n")  # another run's
    assert "What would help" not in answer_section(
        dataclasses.replace(read_run(copied("bare")), folder=folder)
    )
    (folder / "advice.json").write_text("{")
    with raises_input_error("report", folder / "advice.json"):
        read_advice(folder)


def test_clipping_in_words(runs):
    run = read_run(runs["gaussian"])

    def verdict_at(rate, **changes):
        clip_rate = run.summary.clip_rate.model_copy(update={"samples": rate})
        return clipped(
            dataclasses.replace(
                run,
                summary=run.summary.model_copy(
                    update={"clip_rate": clip_rate, **changes}
                ),
            )
        )

    assert (verdict_at(0.0).mark, verdict_at(0.1).mark, verdict_at(0.6).mark) == (
        "good",
        "note-mark",
        "bad",
    )
    examples = verdict_at(0.0, example_clip_rate=0.04)
    assert examples.mark == "note-mark"
    assert "Often" not in examples.reason
    kinetic = read_run(runs["kinetic"])
    rate = kinetic.summary.clip_rate.model_copy(update={"samples": 0.99})
    verdict = clipped(
        dataclasses.replace(
            kinetic, summary=kinetic.summary.model_copy(update={"clip_rate": rate})
        )
    )
    assert verdict.mark == "bad"
    assert "ound" not in verdict.reason.replace("rounds", "")


def test_distance_from_chains(runs):
    """Where gradients are clipped: above the floor of the estimate, or not to be told."""
    run = read_run(runs["gaussian"])
    size = float(np.trace(run.inputs.posterior.exact.covariance))
    rate = run.summary.clip_rate.model_copy(update={"samples": 0.1})

    def verdict(mean, worst, error):
        w2_sq = run.summary.w2_sq.model_copy(
            update={"worst": worst, "worst_se": error, "per_round": [mean] * 8}
        )
        summary = run.summary.model_copy(update={"w2_sq": w2_sq, "clip_rate": rate})
        return distance(dataclasses.replace(run, summary=summary))

    # Six perfect chains would show as much.
    assert verdict(0.4 * size, 2 * size, 0.5 * size).mark == "unknown"
    assert "6 chains are too few" in verdict(0.4 * size, 2 * size, 0.5 * size).reason
    assert verdict(10 * size, 10 * size, size).mark == "bad"
    assert "Probably far" in verdict(10 * size, 10 * size, 6 * size).reason
    start = run.plan.constants.initial_w2_sq
    assert (
        f"it was {start:.3g} at the start" in verdict(3 * start, 3 * start, 0.1).reason
    )


def test_epsilon_of_an_only_chain_does_not_speak_of_replicas(runs):
    run = read_run(runs["gaussian"])
    alone = with_values(run.scenario, {"sampler.chains": 1})
    assert "publishing several chains" in privacy(run).reason
    assert "publishing" not in privacy(dataclasses.replace(run, scenario=alone)).reason


def test_an_ideal_link_has_no_channel(runs, pages):
    text = Page(pages["bare"]).text
    assert "over an ideal link" in text
    assert "over the air" not in text
    assert "no channel limits what devices transmit" in text


def test_one_chain(copied):
    folder = run_in(
        copied("bare").with_name("one"),
        BARE.replace("samples = 1", "samples = 9").replace("= 5", "= 1"),
    )
    text = Page(render_folder(folder)).text
    assert "Number of chains: 1; kept draws: 9" in text
    assert "Do the chains agree with each other? Not known" in text
    assert "1 of 1 chain, a colour each" in text
    assert "at most –" not in text


def test_bound_and_chains(runs, pages):
    run = read_run(runs["gaussian"])
    texts = ["The chains are at W2² = 9, above the plan's bound of 8."]
    above = run.summary.model_copy(
        update={"warnings": texts, "warning_codes": ["above-bound"]}
    )
    page = Page(answer_section(dataclasses.replace(run, summary=above)))
    assert "above the plan's bound of 8" in page.text
    _, layout = Page(pages["softmax"]).drawings["distance"]
    assert layout["yaxis"]["title"]["text"] == "bound on W2²"
    assert layout["showlegend"]


def test_who_sends(runs):
    run = read_run(runs["gaussian"])
    assert min(run.plan.active_devices) == 5
    assert "silent" not in scenario_section(run)
    some = run.plan.model_copy(update={"active_devices": [5] * 13 + [4]})
    assert "silent" in scenario_section(dataclasses.replace(run, plan=some))


def test_burn_in_is_drawn_where_it_was_kept(tmp_path):
    folder = run_in(tmp_path / "early", GAUSSIAN, keep_burn_in=True)
    traces, layout = Page(render_folder(folder)).drawings["traces"]
    assert traces[0]["x"] == list(range(1, 15))
    assert {shape["x0"] for shape in layout["shapes"]} == {6.5}
    with h5netcdf.File(folder / "trace.nc") as file:
        first = file["warmup_posterior"]["theta"][0, :, 0]
    assert traces[0]["y"][:6] == pytest.approx(first.tolist(), abs=1e-6)


def test_what_the_explorer_leaves_out(pages):
    assert "a static channel of the mean power" in Page(pages["gaussian"]).text
    assert "one draw kept after all rounds" in Page(pages["gaussian"]).text
    for name in ("bare", "kinetic"):
        assert "Theorem 1, which is not about this run" in Page(pages[name]).text
        assert 'id="explorer-map"' not in pages[name]


def test_without_arviz(runs, monkeypatch):
    monkeypatch.setattr("wflmc.evaluation.diagnostics._arviz", lambda: None)
    assert "Means and standard deviations" in render_folder(runs["gaussian"])


def test_the_explorer_starts_at_the_plan(runs, pages):
    plan = files_of(runs["gaussian"])["plan"]
    assert 'id="explorer"' in pages["gaussian"]
    start = explorer.constants_of(plan)
    assert tuple(start[key] for key in ("epsilon", "delta", "clip", "snr_db")) == (
        8.0,
        0.01,
        30.0,
        30.0,
    )
    assert all(script in pages["gaussian"] for script in explorer.scripts(start))


@pytest.mark.parametrize(
    "kind", ["softmax", *(("gaussian", "bare", "kinetic") if FULL else ())]
)
def test_in_a_browser(pages, tmp_path, kind):
    assert "<title>Run " in check_in_browser(pages[kind], tmp_path)


def test_the_browser_tells_what_is_asked_for(tmp_path):
    if not FULL:
        pytest.skip("a test of the test above: make test-full runs it")
    assert in_browser('<img src="http://example.org/x.png">', tmp_path)[2] == [
        "http://example.org/x.png"
    ]
