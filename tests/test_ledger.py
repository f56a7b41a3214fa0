"""The ledger: nothing is forgotten, nothing is spent twice, and no round that would overspend is sent."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from wflmc import channel
from wflmc.errors import InputError, OverspendError
from wflmc.privacy import Ledger
from wflmc.sampling import runner

PROMISE = wflmc.Privacy(8, 0.01, 30)
BUDGET = float(wflmc.privacy.budget(8, 0.01))


def written(path) -> Ledger:
    return Ledger(PROMISE, 2, subject="them", path=path)


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "ledger.jsonl"
    losses = np.random.default_rng(0).uniform(0, 0.1, (7, 2))
    first = written(path)
    first.charge("a", 0, losses[:3])
    again = written(path)
    again.charge("a", 3, losses[3:5])
    first.charge("b", 0, losses[5:])  # has been overtaken, and notices
    again.charge("a", 3, losses[3:5])
    last = written(path)
    for ledger in (first, last):
        np.testing.assert_array_equal(ledger.spent, np.cumsum(losses, axis=0)[-1])
    assert (first.chain, last.rounds("a"), last.rounds("b")) == (last.chain, 5, 2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["loss"] for row in rows[1:]] == losses.tolist()


def test_the_first_round_and_device_beyond_a_budget_are_named():
    ledger = Ledger(wflmc.Privacy([8, 1], 0.01, 30), 2)
    small = float(wflmc.privacy.budget(1, 0.01))
    losses = np.full((10, 2), small / 3.5)
    with pytest.raises(OverspendError) as error:
        ledger.charge("a", 20, losses)
    assert (error.value.round, error.value.device) == (23, 1)
    assert "Round 24" in str(error.value)
    assert not ledger.spent.any()  # nothing was charged, for nothing was sent
    ledger.charge("a", 20, losses[:3])
    with pytest.raises(OverspendError):
        ledger.charge("a", 23, losses[:1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 5))
def test_no_sequence_of_charges_overspends(values, size):
    ledger = Ledger(PROMISE, 1)
    sent = 0.0
    for at in range(0, len(values), size):
        rows = np.array(values[at : at + size])[:, None]
        try:
            ledger.charge("a", at, rows)
            sent += rows.sum()
        except OverspendError:
            assert sent + rows.sum() > BUDGET
    assert ledger.spent[0] == pytest.approx(sent)
    assert ledger.spent[0] <= BUDGET * (1 + 1e-9)


def change(number, text):
    def apply(path):
        lines = path.read_text().splitlines(keepends=True)
        lines[number] = text(lines[number])
        path.write_text("".join(lines))

    return apply


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change(2, lambda line: line.replace("0.5", "0.1")), "line 3 or one above it has been changed"),
        (change(2, lambda line: ""), "line 3 or one above it has been changed"),
        (change(1, lambda line: "nonsense\n"), "line 2 is not one of its lines"),
        (change(1, lambda line: json.dumps({"chain": "x"}) + "\n"), "line 2 is not one of its lines"),
        (change(2, lambda line: line.replace("[0.5", "[-0.5")), "line 3 is not one of its lines"),
        (change(0, lambda line: line.replace('"them"', '"others"')), "about the same data"),
        (change(0, lambda line: line.replace('"epsilon": 8.0', '"epsilon": 80.0')), "one with epsilon = 8.0"),
        (change(0, lambda line: line.replace('"unit": "device"', '"unit": "record"')), "one with unit = device"),
        (change(0, lambda line: line.replace('"devices": 2', '"devices": 3')), "one with devices = 2"),
    ],
)
def test_a_ledger_that_was_changed_is_refused(tmp_path, damage, says):
    path = tmp_path / "ledger.jsonl"
    written(path).charge("a", 0, [[0.2, 0.5], [0.5, 0.5], [0.1, 0.0]])
    damage(path)
    with pytest.raises(InputError, match="ledger") as error:
        written(path)
    assert says in str(error.value)


def test_a_line_cut_short_by_a_crash_was_never_acted_upon(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path).charge("a", 0, [[0.2, 0.5], [0.5, 0.5]])
    whole = path.read_text()
    path.write_text(whole[:-20])
    ledger = written(path)
    assert ledger.rounds("a") == 1
    ledger.charge("a", 1, [[0.5, 0.5]])
    assert path.read_text() == whole
    path.write_text("")
    assert not written(path).spent.any()


def test_another_loss_for_the_same_round_of_the_same_run_is_refused():
    ledger = Ledger(PROMISE, 1)
    ledger.charge("a", 0, [[0.2]])
    with pytest.raises(InputError, match="another loss for round 1"):
        ledger.charge("a", 0, [[0.3]])
    with pytest.raises(InputError, match="losses"):
        ledger.charge("a", 1, [[np.nan]])


@pytest.fixture(scope="module")
def setting():
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=6, examples=120)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=25)
    step = 0.4 / (posterior.mu + posterior.L)
    return posterior, link, wflmc.plan(posterior, link, PROMISE, step_size=step, burn_in=13, samples=20)


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("memory", [None, 2000.0])
def test_stopped_and_resumed_is_as_if_never_stopped(setting, tmp_path, monkeypatch, memory):
    """StoppedError after every single block in turn, with chains in one chunk or in several."""
    posterior, _, plan = setting
    monkeypatch.setattr(runner, "BLOCK_WORK", 8 * 9 * posterior.work())
    arguments = (jax.random.key(1), posterior, plan, 9)
    straight = Ledger(PROMISE, 6, subject=posterior.digest)
    whole = wflmc.sample(*arguments, memory=memory, ledger=straight)
    path, folder = tmp_path / "ledger.jsonl", tmp_path / "checkpoint"
    folder.mkdir()
    stops = 0

    def stop(done, of):
        raise StoppedError

    for _ in range(100):
        ledger = Ledger(PROMISE, 6, subject=posterior.digest, path=path)
        try:
            trace = wflmc.sample(
                *arguments, memory=memory, ledger=ledger, checkpoint=folder, progress=None if stops > 40 else stop
            )
            break
        except StoppedError:
            stops += 1
    assert stops >= (4 if memory is None else 10)
    np.testing.assert_array_equal(trace.theta, whole.theta)
    np.testing.assert_array_equal(trace.clip_rate, whole.clip_rate)
    np.testing.assert_array_equal(trace.burn_in_clip_rate, whole.burn_in_clip_rate)
    np.testing.assert_array_equal(ledger.spent, straight.spent)
    assert ledger.rounds(next(iter(ledger.entries))[0]) == plan.rounds
    np.testing.assert_allclose(ledger.spent, plan.spent, rtol=1e-12)


def test_a_crash_between_paying_and_saving_pays_once(setting, tmp_path, monkeypatch):
    posterior, _, plan = setting
    monkeypatch.setattr(runner, "BLOCK_WORK", 8 * 9 * posterior.work())
    path = tmp_path / "ledger.jsonl"

    def die(*_, **__):
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_advance", die)
        with pytest.raises(StoppedError):
            wflmc.sample(
                jax.random.key(1), posterior, plan, 9, checkpoint=tmp_path,
                ledger=Ledger(PROMISE, 6, subject=posterior.digest, path=path),
            )  # fmt: skip
    ledger = Ledger(PROMISE, 6, subject=posterior.digest, path=path)
    assert 0 < ledger.rounds(next(iter(ledger.entries))[0]) < plan.rounds
    wflmc.sample(jax.random.key(1), posterior, plan, 9, checkpoint=tmp_path, ledger=ledger)
    np.testing.assert_allclose(ledger.spent, plan.spent, rtol=1e-12)


def test_resuming_with_anything_else_is_refused(setting, tmp_path):
    posterior, _, plan = setting
    ledger = Ledger(PROMISE, 6, subject=posterior.digest)
    wflmc.sample(jax.random.key(1), posterior, plan, 9, checkpoint=tmp_path, ledger=ledger)
    for key, chains in ((jax.random.key(2), 9), (jax.random.key(1), 8)):
        with pytest.raises(InputError, match="same plan, data, seed"):
            wflmc.sample(key, posterior, plan, chains, checkpoint=tmp_path)
    empty = Ledger(PROMISE, 6, subject=posterior.digest)
    with pytest.raises(InputError, match="0 rounds of this run"):
        wflmc.sample(jax.random.key(1), posterior, plan, 9, checkpoint=tmp_path, ledger=empty)


def test_a_spent_budget_stops_the_sampler_before_it_sends(setting, monkeypatch):
    posterior, link, plan = setting
    ledger = Ledger(PROMISE, 6, subject=posterior.digest)
    wflmc.sample(jax.random.key(1), posterior, plan, 2, ledger=ledger)
    monkeypatch.setattr(runner, "_advance", None)  # whoever gets here has sent something
    with pytest.raises(OverspendError):
        wflmc.sample(jax.random.key(2), posterior, plan, 2, ledger=ledger)
    np.testing.assert_allclose(ledger.spent, plan.spent)
    greedy = wflmc.plan(
        posterior, link, PROMISE, step_size=plan.step_size[0], burn_in=13, samples=20, power="no-dp"
    )  # fmt: skip
    with pytest.raises(OverspendError):
        wflmc.sample(jax.random.key(2), posterior, dataclasses.replace(greedy, enforced=True), 2)


def test_the_rest_of_a_plan_goes_on_with_the_same_draws(setting):
    posterior, link, plan = setting
    whole = wflmc.sample(jax.random.key(1), posterior, plan, 5, keep_burn_in=True)
    every = np.concatenate([whole.warmup, whole.theta], axis=1)
    for start in (1, 13, 20):
        rest = plan.rest(start)
        assert rest.burn_in == max(0, 13 - start)
        trace = wflmc.sample(jax.random.key(1), posterior, rest, 5, initial=every[:, start - 1])
        np.testing.assert_array_equal(trace.theta, whole.theta[:, max(0, start - 13) :])
        np.testing.assert_allclose(rest.ledger + rest.spent, plan.spent, rtol=1e-12)
        again = wflmc.plan(
            posterior, link, PROMISE, step_size=plan.step_size[0], burn_in=rest.burn_in,
            samples=rest.rounds - rest.burn_in, ledger=rest.ledger, start=start, initial_w2_sq=rest.initial_w2_sq,
        )  # fmt: skip
        np.testing.assert_array_equal(again.weight, rest.weight)
        np.testing.assert_allclose(
            again.gain, rest.gain, rtol=1e-4
        )  # planning the rest changes an optimal plan nowhere
        assert again.objective == pytest.approx(plan.objective, rel=1e-9)


SCENARIO = """
[posterior]
devices = 10
examples = 400
[link]
snr_db = -5.0
[privacy]
epsilon = 8.0
delta = 0.01
[sampler]
burn_in = 50
samples = 50
chains = 10
"""

SLOWLY = """
import sys, time
from wflmc.sampling import runner
runner.BLOCK_WORK = 1
advance = runner._advance
def slow(*arguments, **keywords):
    time.sleep(0.03)
    return advance(*arguments, **keywords)
runner._advance = slow
from wflmc.cli import main
main()
"""


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


def test_a_run_killed_and_resumed_spends_what_an_undisturbed_one_does(tmp_path, call):
    scenario = tmp_path / "s.toml"
    scenario.write_text(SCENARIO)
    code, _, _ = call("run", scenario, "--out", tmp_path / "whole")
    assert code == 0
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", SLOWLY, "run", str(scenario), "--out", str(killed)]
    for rounds in (10, 60):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 120
            while len(lines_of(killed / "ledger.jsonl")) < rounds and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert process.poll() is None, "the run was over before it was killed"
            os.kill(process.pid, signal.SIGKILL)
        command = [sys.executable, "-c", SLOWLY, "run", "--resume", str(killed)]
        assert rounds <= len(lines_of(killed / "ledger.jsonl")) < 101
        assert not (killed / "trace.nc").exists()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    whole, resumed = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "whole", killed))
    assert json.loads(done.stdout)["ledger"] == resumed["ledger"]
    assert lines_of(killed / "ledger.jsonl") == lines_of(tmp_path / "whole" / "ledger.jsonl")
    assert resumed["ledger"] == whole["ledger"]
    assert resumed["w2_sq"]["worst"] == pytest.approx(whole["w2_sq"]["worst"], rel=1e-3)  # other blocks round otherwise
    assert not (killed / ".checkpoint").exists()


@pytest.mark.parametrize("extra", [(), ("--ledger", "people.jsonl"), ("--set", "sampler.burn_in=auto")])
def test_the_same_command_goes_on_with_a_stopped_run(tmp_path, call, monkeypatch, extra):
    """Stopped in the middle of it, then again with another scenario, which begins anew."""
    from wflmc.cli import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "BLOCK_WORK", 1)
    scenario, folder = tmp_path / "s.toml", tmp_path / "o"
    scenario.write_text(SCENARIO)
    whole = run.sample

    def stopping(*arguments, progress, **keywords):
        def stop(done, work):
            if done > work / 2:
                raise InputError("stop", done, "what this test does")

        return whole(*arguments, **keywords, progress=stop)

    with monkeypatch.context() as patch:
        patch.setattr(run, "sample", stopping)
        code, _, err = call("run", scenario, "--out", folder, *extra)
    assert (code, (folder / ".checkpoint").exists()) == (2, True), err
    ledger = tmp_path / "people.jsonl" if "--ledger" in extra else folder / "ledger.jsonl"
    paid = lines_of(ledger)
    code, _, err = call("run", scenario, "--out", folder, *extra)
    assert code == 0
    assert "Going on with the run that was stopped" in err
    assert lines_of(ledger)[: len(paid)] == paid
    np.testing.assert_allclose(wflmc_spent(ledger), json.loads((folder / "plan.json").read_text())["privacy"]["spent"])
    assert not (folder / ".checkpoint").exists()


def test_more_rounds_from_what_is_left(tmp_path, call):
    scenario = tmp_path / "s.toml"
    scenario.write_text(SCENARIO)
    folder = tmp_path / "o"
    call("run", scenario, "--out", folder)
    before = json.loads((folder / "plan.json").read_text())
    left = lines_of(folder / "ledger.jsonl")
    code, _, err = call("run", "--resume", folder, "--more", "7")
    assert code == 0, err
    after = json.loads((folder / "plan.json").read_text())
    assert after["gain"][:100] == before["gain"]
    assert (after["constants"]["rounds"], len(lines_of(folder / "ledger.jsonl"))) == (107, 108)
    assert lines_of(folder / "ledger.jsonl")[:101] == left
    assert np.all(np.array(after["privacy"]["spent"]) <= after["privacy"]["budget"] * (1 + 1e-9))
    trace = wflmc.scenario.load_scenario(str(folder / "scenario.toml"))
    assert trace.sampler.samples == 57
    summary = json.loads((folder / "summary.json").read_text())
    np.testing.assert_allclose(summary["ledger"]["spent"], after["privacy"]["spent"], rtol=1e-9)
    assert len(summary["w2_sq"]["per_round"]) == 57

    kept = (folder / "ledger.jsonl").read_text()
    (folder / "ledger.jsonl").write_text("\n".join(kept.splitlines()[:50]) + "\n")
    code, _, err = call("run", "--resume", folder, "--more", "7")
    assert code == 2
    assert "rounds are missing from it" in err
    (folder / "ledger.jsonl").unlink()
    code, _, err = call("run", "--resume", folder, "--more", "7")
    assert code == 2
    assert "it is missing" in err


def test_one_ledger_for_several_runs(tmp_path, call):
    scenario, ledger = tmp_path / "s.toml", tmp_path / "people.jsonl"
    scenario.write_text(SCENARIO)
    assert call("run", scenario, "--ledger", ledger)[0] == 0
    code, out, _ = call("plan", scenario, "--ledger", ledger, "--json", "--no-compare")
    document = json.loads(out)
    assert document["privacy"]["spent_before"] == pytest.approx(np.array(wflmc_spent(ledger)).tolist())
    assert document["privacy"]["epsilon_spent"] <= 8 * (1 + 1e-9)
    code, _, err = call("run", scenario, "--ledger", ledger, "--set", "privacy.epsilon=9.0")
    assert code == 2
    assert "one with epsilon = 9.0" in err
    code, _, err = call("run", scenario, "--ledger", ledger, "--set", "posterior.seed=1")
    assert code == 2
    assert "about the same data" in err
    for seed in range(1, 10):
        code, _, err = call("run", scenario, "--ledger", ledger, "--set", f"sampler.seed={seed}")
        assert np.max(wflmc_spent(ledger)) <= BUDGET * (1 + 1e-9)
        if code:
            break
    assert seed > 1
    assert code == 2
    assert "nothing is left to spend" in err


def wflmc_spent(path):
    return np.sum([json.loads(line)["loss"] for line in lines_of(path)[1:]], axis=0)


def test_a_folder_used_again_keeps_the_old_ledger(tmp_path, call):
    scenario, folder = tmp_path / "s.toml", tmp_path / "o"
    scenario.write_text(SCENARIO)
    call("run", scenario, "--out", folder)
    first = (folder / "ledger.jsonl").read_text()
    call("run", scenario, "--out", folder)  # the very same again sends nothing new
    assert (folder / "ledger.jsonl").read_text() == first
    _, _, err = call("run", scenario, "--out", folder, "--set", "link.snr_db=5.0")
    assert "kept as ledger-1.jsonl" in err
    assert (folder / "ledger-1.jsonl").read_text() == first
    assert (folder / "ledger.jsonl").read_text() != first


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--more", "3"), "given with --resume"),
        (("--resume", "nowhere"), "a folder that `wflmc run --out` has written"),
    ],
)
def test_bad_input(tmp_path, call, arguments, says):
    scenario = tmp_path / "s.toml"
    scenario.write_text(SCENARIO)
    if arguments[0] == "--more":
        arguments = (scenario, *arguments)
    code, _, err = call("run", *arguments)
    assert code == 2
    assert says in err


def test_the_same_noise_for_another_plan_is_refused(setting, tmp_path, call):
    """Two sums with the same noise and other gains are two equations: who sees both has the gradients."""
    posterior, _, plan = setting
    tenth = dataclasses.replace(plan, gain=plan.gain / 10)
    ledger = Ledger(wflmc.Privacy(80, 0.01, 30), 6, subject=posterior.digest)
    wflmc.sample(jax.random.key(1), posterior, plan, 2, ledger=ledger)
    with pytest.raises(InputError, match="the noise that another run of this ledger had in round 1"):
        wflmc.sample(jax.random.key(1), posterior, tenth, 2, ledger=ledger)
    wflmc.sample(jax.random.key(2), posterior, tenth, 2, ledger=ledger)
    scenario, people = tmp_path / "s.toml", tmp_path / "people.jsonl"
    scenario.write_text(SCENARIO)
    assert call("run", scenario, "--ledger", people)[0] == 0
    code, _, err = call("run", scenario, "--ledger", people, "--set", "link.snr_db=-9.0")
    assert code == 2
    assert "another one: who sees two rounds" in err


def test_a_stopped_run_finds_its_ledger_from_anywhere(tmp_path, call, monkeypatch):
    from wflmc.cli import run

    scenario, here, there = tmp_path / "s.toml", tmp_path / "here", tmp_path / "there"
    scenario.write_text(SCENARIO)
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)

    def stop(*_, **__):
        raise InputError("stop", "here", "what this test does")

    with monkeypatch.context() as patch:
        patch.setattr(run, "sample", stop)
        call("run", scenario, "--out", "shared", "--ledger", "people.jsonl")
        call("run", scenario, "--out", "own")
    monkeypatch.chdir(there)
    (here / "own").rename(there / "moved")
    for folder in (here / "shared", there / "moved"):
        code, _, err = call("run", "--resume", folder)
        assert code == 0, err
        assert json.loads((folder / "plan.json").read_text())["gap"] is not None  # the certificate is kept
    assert len(lines_of(here / "people.jsonl")) == len(lines_of(there / "moved" / "ledger.jsonl")) == 101
    assert sorted(path.name for path in there.iterdir()) == ["moved"]


def test_what_is_not_as_it_was_written_is_refused(tmp_path, call):
    scenario, folder = tmp_path / "s.toml", tmp_path / "o"
    scenario.write_text(SCENARIO)
    call("run", scenario, "--out", folder)
    ledger, summary = folder / "ledger.jsonl", folder / "summary.json"
    kept = ledger.read_text()
    ledger.write_text(kept.replace('"round": 3', '"round": 4', 1))
    code, _, err = call("run", scenario, "--out", folder)
    assert code == 2
    assert "has been changed" in err
    ledger.write_text(kept)
    for text in ("", "{", "{}", '{"ledger": {}}'):
        summary.write_text(text)
        code, _, err = call("run", "--resume", folder, "--more", "3")
        assert code == 2
        assert "summary.json" in err
    code, _, err = call("plan", scenario, "--ledger", tmp_path / "typo.jsonl")
    assert code == 2
    assert "a ledger that a run has written" in err


def test_spending_without_limits_is_written_down_too(tmp_path, call):
    scenario, people = tmp_path / "s.toml", tmp_path / "people.jsonl"
    scenario.write_text(SCENARIO)
    louder = ("--set", "link.snr_db=30.0", "--set", "policy.power=no-dp")
    assert call("run", scenario, "--ledger", people, *louder)[0] == 0
    assert np.min(wflmc_spent(people)) > BUDGET
    code, _, err = call("run", scenario, "--ledger", people, "--set", "sampler.seed=1")
    assert code == 2
    assert "nothing is left to spend" in err


def test_more_rounds_pay_attention_to_what_others_have_spent(tmp_path, call):
    scenario, people, folder = tmp_path / "s.toml", tmp_path / "people.jsonl", tmp_path / "o"
    scenario.write_text(SCENARIO)
    call("run", scenario, "--ledger", people, "--out", folder)
    assert call("run", scenario, "--ledger", people, "--set", "sampler.seed=1")[0] == 0
    code, _, err = call("run", "--resume", folder, "--more", "100")
    assert np.max(wflmc_spent(people)) <= BUDGET * (1 + 1e-9)
    assert not (folder / ".checkpoint").exists()
    assert code == 0 or "nothing is left to spend" in err


def test_another_prior_is_another_run(setting):
    """Of the same data and plan: what is sent differs, so it is not free, and its noise must be another."""
    posterior, _, plan = setting
    other = wflmc.gaussian_regression(jax.random.key(0), devices=6, examples=120, prior_std=0.2)
    assert other.digest == posterior.digest
    small = dataclasses.replace(plan, gain=plan.gain / 3)
    ledger = Ledger(PROMISE, 6, subject=posterior.digest)
    wflmc.sample(jax.random.key(1), posterior, small, 2, ledger=ledger)
    before = ledger.spent
    with pytest.raises(InputError, match="the noise that another run"):
        wflmc.sample(jax.random.key(1), other, small, 2, ledger=ledger)
    wflmc.sample(jax.random.key(2), other, small, 2, ledger=ledger)
    np.testing.assert_allclose(ledger.spent, 2 * before)


def test_a_ledger_of_others_is_refused(setting):
    posterior, _, plan = setting
    record = wflmc.Privacy(8, 0.01, 30, unit="record", example_clip=9.0)
    for ledger in (
        Ledger(PROMISE, 5),
        Ledger(PROMISE, 6, subject="someone else"),
        Ledger(record, 6, subject=posterior.digest),
    ):
        with pytest.raises(InputError, match="about this plan's 6 devices"):
            wflmc.sample(jax.random.key(1), posterior, plan, 2, ledger=ledger)


def test_what_could_not_be_written_was_not_charged(tmp_path, monkeypatch):
    ledger = written(tmp_path / "ledger.jsonl")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            ledger.charge("a", 0, [[1.0, 1.0]])
    assert ledger.rounds("a") == 0
