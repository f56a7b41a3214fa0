"""Runs that are stopped and go on: the same samples, every loss paid once, and what is refused."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import arviz
import jax
import numpy as np
import pytest

import wflmc
from wflmc.privacy import Ledger
from wflmc.sampling import Execution, chunks, simulation
from wflmc.support.errors import InputError

from ..cli_tools import listening
from ..conftest import FULL
from ..error_tools import missing_facts, names_key, raises_input_error
from ..privacy.ledger_tools import (
    BUDGET,
    PROMISE,
    SCENARIO,
    lines_of,
    losses_of,
    spent_in,
)


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("memory", [None, 2000.0] if FULL else [2000.0])
def test_stopped_and_resumed_is_as_if_never_stopped(
    paid_setting, tmp_path, monkeypatch, memory
):
    """StoppedError after every single block in turn, with chains in one chunk or in several."""
    posterior, _, plan = paid_setting
    monkeypatch.setattr(chunks, "BLOCK_WORK", 8 * 9 * posterior.work())
    arguments = (jax.random.key(1), posterior, plan, 9)
    straight = Ledger(PROMISE, 6, subject=posterior.digest)
    whole = wflmc.sample(
        *arguments, ledger=straight, execution=Execution(memory=memory)
    )
    path, folder = tmp_path / "ledger.jsonl", tmp_path / "checkpoint"
    folder.mkdir()
    stops = 0

    def stop(done, of):
        raise StoppedError

    for _ in range(100):
        ledger = Ledger(PROMISE, 6, subject=posterior.digest, path=path)
        try:
            trace = wflmc.sample(
                *arguments,
                ledger=ledger,
                execution=Execution(
                    memory=memory,
                    checkpoint=folder,
                    progress=None if stops > 40 else stop,
                ),
            )
            break
        except StoppedError:
            stops += 1
    assert stops >= (4 if memory is None else 10)
    np.testing.assert_array_equal(trace.theta, whole.theta)
    np.testing.assert_array_equal(trace.clip_rate, whole.clip_rate)
    np.testing.assert_array_equal(trace.burn_in_clip_rate, whole.burn_in_clip_rate)
    np.testing.assert_array_equal(ledger.spent, straight.spent)
    assert len(ledger.entries) == len(plan.rounds)
    np.testing.assert_allclose(ledger.spent, plan.spent, rtol=1e-12)


def test_a_crash_between_paying_and_saving_pays_once(
    paid_setting, tmp_path, monkeypatch
):
    posterior, _, plan = paid_setting
    monkeypatch.setattr(chunks, "BLOCK_WORK", 8 * 9 * posterior.work())
    path = tmp_path / "ledger.jsonl"

    def die(*_, **__):
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(simulation, "advance_block", die)
        with pytest.raises(StoppedError):
            wflmc.sample(
                jax.random.key(1), posterior, plan, 9, execution=Execution(checkpoint=tmp_path),
                ledger=Ledger(PROMISE, 6, subject=posterior.digest, path=path),
            )  # fmt: skip
    ledger = Ledger(PROMISE, 6, subject=posterior.digest, path=path)
    assert 0 < len(ledger.entries) < len(plan.rounds)
    wflmc.sample(
        jax.random.key(1),
        posterior,
        plan,
        9,
        execution=Execution(checkpoint=tmp_path),
        ledger=ledger,
    )
    np.testing.assert_allclose(ledger.spent, plan.spent, rtol=1e-12)


def test_resuming_with_anything_else_is_refused(paid_setting, tmp_path):
    posterior, _, plan = paid_setting
    ledger = Ledger(PROMISE, 6, subject=posterior.digest)
    wflmc.sample(
        jax.random.key(1),
        posterior,
        plan,
        9,
        execution=Execution(checkpoint=tmp_path),
        ledger=ledger,
    )
    for key, chains in ((jax.random.key(2), 9), (jax.random.key(1), 8)):
        with raises_input_error("checkpoint", tmp_path / "progress.npz"):
            wflmc.sample(
                key, posterior, plan, chains, execution=Execution(checkpoint=tmp_path)
            )
    empty = Ledger(PROMISE, 6, subject=posterior.digest)
    with raises_input_error("ledger", "0 rounds", "33 rounds"):
        wflmc.sample(
            jax.random.key(1),
            posterior,
            plan,
            9,
            execution=Execution(checkpoint=tmp_path),
            ledger=empty,
        )


def test_the_rest_of_a_plan_goes_on_with_the_same_draws(paid_setting):
    posterior, link, plan = paid_setting
    whole = wflmc.sample(jax.random.key(1), posterior, plan, 5, keep_burn_in=True)
    positions = np.concatenate([whole.warmup, whole.theta], axis=1)
    for start in (1, 13, 20):
        rest = plan.from_round(start)
        assert rest.burn_in == max(0, 13 - start)
        trace = wflmc.sample(
            jax.random.key(1), posterior, rest, 5, initial=positions[:, start - 1]
        )
        np.testing.assert_array_equal(trace.theta, whole.theta[:, max(0, start - 13) :])
        np.testing.assert_allclose(rest.ledger + rest.spent, plan.spent, rtol=1e-12)
        again = wflmc.plan(
            posterior,
            link,
            PROMISE,
            step_size=plan.step_size[0],
            burn_in=rest.burn_in,
            samples=len(rest.rounds) - rest.burn_in,
            ledger=rest.ledger,
            sampler=wflmc.Sampler(start=start),
            initial_w2_sq=rest.initial_w2_sq,
        )
        np.testing.assert_array_equal(again.weight, rest.weight)
        # Planning the remaining rounds does not change an optimal plan.
        np.testing.assert_allclose(again.gain, rest.gain, rtol=1e-4)
        assert again.objective == pytest.approx(plan.objective, rel=1e-9)


WAITING = """
import sys, threading
from wflmc.sampling import chunks, simulation
chunks.BLOCK_WORK = 1
advance, left = simulation.advance_block, [int(sys.argv.pop(1))]
def counted(*arguments, **keywords):
    left[0] -= 1
    if left[0] == 0:
        print("in the middle of a round", flush=True)
        threading.Event().wait()
    return advance(*arguments, **keywords)
simulation.advance_block = counted
from wflmc.cli import main
main()
"""


def test_a_run_killed_and_resumed_spends_what_an_undisturbed_one_does(
    tmp_path, call, monkeypatch
):
    """Killed, with all counts twice; while it runs, another one in its folder is refused, and none once it is dead."""
    monkeypatch.setattr(chunks, "BLOCK_WORK", 1)
    scenario = tmp_path / "s.toml"
    scenario.write_text(SCENARIO)
    code, _, _ = call("run", scenario, "--out", tmp_path / "whole")
    assert code == 0
    killed = tmp_path / "killed"
    command = ["run", scenario, "--out", killed]
    # Stopped in burn-in, and among the rounds that are kept.
    for calls in (10, 50) if FULL else (50,):
        paid = lines_of(killed / "ledger.jsonl")
        with listening("-c", WAITING, calls, *command) as process:
            assert process.stdout.readline() == "in the middle of a round\n", (
                process.communicate()[1]
            )
            code, _, err = call(*command)
            assert (code, err.count(f"(process {process.pid} is)")) == (2, 1)
            process.kill()
        command = ["run", "--resume", killed]
        assert len(paid) < len(lines_of(killed / "ledger.jsonl")) < 101
        assert not (killed / "trace.nc").exists()
    code, out, err = call(*command, "--json")
    assert code == 0, err
    whole, resumed = (
        json.loads((folder / "summary.json").read_text())
        for folder in (tmp_path / "whole", killed)
    )
    assert json.loads(out)["ledger"] == resumed["ledger"]
    assert losses_of(killed / "ledger.jsonl") == losses_of(
        tmp_path / "whole" / "ledger.jsonl"
    )
    assert {**resumed["ledger"], "chain": ""} == {**whole["ledger"], "chain": ""}
    assert resumed["w2_sq"] == whole["w2_sq"]
    assert not (killed / ".checkpoint").exists()


@pytest.mark.parametrize(
    "extra", [(), ("--ledger", "people.jsonl"), ("--set", "sampler.burn_in=auto")]
)
def test_the_same_command_goes_on_with_a_stopped_run(
    tmp_path, call, monkeypatch, extra
):
    """Stopped in the middle of it, then again with another scenario, which begins anew."""
    from wflmc.runs import execution

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chunks, "BLOCK_WORK", 1)
    scenario, folder = tmp_path / "s.toml", tmp_path / "o"
    scenario.write_text(SCENARIO)
    whole = execution.sample

    def stopping(*arguments, **keywords):
        def stop(done, work):
            if done > work / 2:
                raise InputError("stop", done, "what this test does")

        stopped = replace(keywords.pop("execution"), progress=stop)
        return whole(*arguments, **keywords, execution=stopped)

    with monkeypatch.context() as patch:
        patch.setattr(execution, "sample", stopping)
        code, _, err = call("run", scenario, "--out", folder, *extra)
    assert (code, (folder / ".checkpoint").exists()) == (2, True), err
    # Only its owner may read it.
    assert stat.S_IMODE((folder / ".checkpoint").stat().st_mode) & 0o077 == 0
    ledger = (
        tmp_path / "people.jsonl" if "--ledger" in extra else folder / "ledger.jsonl"
    )
    paid = lines_of(ledger)
    code, _, err = call("run", scenario, "--out", folder, *extra)
    assert code == 0
    assert not missing_facts(err.splitlines()[0], (folder,))
    assert lines_of(ledger)[: len(paid)] == paid
    np.testing.assert_allclose(
        spent_in(ledger),
        json.loads((folder / "plan.json").read_text())["privacy"]["spent"],
    )
    assert not (folder / ".checkpoint").exists()


def test_more_rounds_from_what_is_left(tmp_path, call):
    scenario = tmp_path / "s.toml"
    scenario.write_text(SCENARIO)
    folder = tmp_path / "o"
    call("run", scenario, "--out", folder)
    before = json.loads((folder / "plan.json").read_text())
    left = lines_of(folder / "ledger.jsonl")
    for rounds in ("0", "1" + 21 * "0"):
        code, _, err = call("run", "--resume", folder, "--more", rounds)
        assert code == 2
        assert names_key(err, "--more", "10,000,000")
    code, _, err = call("run", "--resume", folder, "--more", "7")
    assert code == 0, err
    after = json.loads((folder / "plan.json").read_text())
    assert after["gain"][:100] == before["gain"]
    assert (after["constants"]["rounds"], len(lines_of(folder / "ledger.jsonl"))) == (
        107,
        108,
    )
    assert lines_of(folder / "ledger.jsonl")[:101] == left
    assert np.all(
        np.array(after["privacy"]["spent"]) <= after["privacy"]["budget"] * (1 + 1e-9)
    )
    trace = wflmc.scenario.load_scenario(str(folder / "scenario.toml"))
    assert trace.sampler.samples == 57
    summary = json.loads((folder / "summary.json").read_text())
    np.testing.assert_allclose(
        summary["ledger"]["spent"], after["privacy"]["spent"], rtol=1e-9
    )
    assert len(summary["w2_sq"]["per_round"]) == 57

    content = (folder / "ledger.jsonl").read_text()
    (folder / "ledger.jsonl").write_text("\n".join(content.splitlines()[:50]) + "\n")
    code, _, err = call("run", "--resume", folder, "--more", "7")
    assert code == 2
    assert names_key(err, "ledger", "50 lines", "counts 108")
    (folder / "ledger.jsonl.head").unlink()
    code, _, err = call("run", "--resume", folder, "--more", "7")
    assert code == 2
    assert names_key(err, "ledger", "ledger.jsonl.head", "missing")
    (folder / "ledger.jsonl").unlink()
    code, _, err = call("run", "--resume", folder, "--more", "7")
    assert code == 2
    assert names_key(err, "ledger", folder / "ledger.jsonl", "missing")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("--more", "3"), ("3", "--resume")),
        (("--resume", "nowhere"), ("nowhere", "wflmc run --out")),
    ],
)
def test_bad_input(tmp_path, call, arguments, facts):
    key = arguments[0]
    scenario = tmp_path / "s.toml"
    scenario.write_text(SCENARIO)
    if arguments[0] == "--more":
        arguments = (scenario, *arguments)
    code, _, err = call("run", *arguments)
    assert code == 2
    assert names_key(err, key, *facts)


def test_a_stopped_run_finds_its_ledger_from_anywhere(tmp_path, call, monkeypatch):
    from wflmc.runs import execution

    scenario, here, there = tmp_path / "s.toml", tmp_path / "here", tmp_path / "there"
    scenario.write_text(SCENARIO)
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)

    def stop(*_, **__):
        raise InputError("stop", "here", "what this test does")

    with monkeypatch.context() as patch:
        patch.setattr(execution, "sample", stop)
        call("run", scenario, "--out", "shared", "--ledger", "people.jsonl")
        call("run", scenario, "--out", "own")
    monkeypatch.chdir(there)
    (here / "own").rename(there / "moved")
    for folder in (here / "shared", there / "moved"):
        code, _, err = call("run", "--resume", folder)
        assert code == 0, err
        # The certificate is kept.
        assert json.loads((folder / "plan.json").read_text())["gap"] is not None
    assert (
        len(lines_of(here / "people.jsonl"))
        == len(lines_of(there / "moved" / "ledger.jsonl"))
        == 101
    )
    assert sorted(path.name for path in there.iterdir()) == ["moved"]


def test_what_is_not_as_it_was_written_is_refused(tmp_path, call):
    scenario, folder = tmp_path / "s.toml", tmp_path / "o"
    scenario.write_text(SCENARIO)
    call("run", scenario, "--out", folder)
    ledger, summary = folder / "ledger.jsonl", folder / "summary.json"
    content = ledger.read_text()
    ledger.write_text(content.replace('"round": 3', '"round": 4', 1))
    code, _, err = call("run", scenario, "--out", folder)
    assert code == 2
    assert names_key(err, "ledger", "line 5")
    ledger.write_text(content)
    for text in ("", "{", "{}", '{"ledger": {}}'):
        summary.write_text(text)
        code, _, err = call("run", "--resume", folder, "--more", "3")
        assert code == 2
        assert names_key(err, "--resume", summary)
    code, _, err = call("plan", scenario, "--ledger", tmp_path / "typo.jsonl")
    assert code == 2
    assert names_key(err, "--ledger", tmp_path / "typo.jsonl")


def test_more_rounds_pay_attention_to_what_others_have_spent(tmp_path, call):
    scenario, people, folder = (
        tmp_path / "s.toml",
        tmp_path / "people.jsonl",
        tmp_path / "o",
    )
    scenario.write_text(SCENARIO)
    call("run", scenario, "--ledger", people, "--out", folder)
    assert call("run", scenario, "--ledger", people, "--set", "sampler.seed=1")[0] == 0
    code, _, err = call("run", "--resume", folder, "--more", "100")
    assert np.max(spent_in(people)) <= BUDGET * (1 + 1e-9)
    assert not (folder / ".checkpoint").exists()
    assert code == 2
    assert names_key(err, "--more", "budget")


def test_burn_in_is_kept_on_request_also_when_rounds_are_added(tmp_path, call):
    (tmp_path / "s.toml").write_text(SCENARIO)
    folder = tmp_path / "kept"
    code, _, err = call("run", tmp_path / "s.toml", "--out", folder, "--keep-burn-in")
    assert code == 0, err
    first = arviz.from_netcdf(folder / "trace.nc")
    plan = json.loads((folder / "plan.json").read_text())
    assert first.warmup_posterior["theta"].sizes["draw"] == plan["constants"]["burn_in"]
    assert call("run", "--resume", folder, "--keep-burn-in")[0] == 2
    code, _, err = call("run", "--resume", folder, "--more", "3")
    assert code == 0, err
    longer = arviz.from_netcdf(folder / "trace.nc")
    assert (
        longer.posterior["theta"].sizes["draw"]
        == first.posterior["theta"].sizes["draw"] + 3
    )
    for group in ("warmup_posterior", "warmup_sample_stats"):
        assert set(longer[group].data_vars) == set(first[group].data_vars)
        for name, values in first[group].data_vars.items():
            np.testing.assert_array_equal(longer[group][name].values, values.values)
