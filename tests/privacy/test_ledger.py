"""The ledger: nothing is forgotten, nothing is spent twice, and no round that would overspend is sent."""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from wflmc.privacy import Ledger
from wflmc.privacy.ledger import ForeignLedgerError, anchor_path
from wflmc.sampling import simulation
from wflmc.support.errors import InputError, OverspendError

from ..error_tools import missing_facts, names_key, raises_input_error
from ..plan_tools import with_context
from .ledger_tools import BUDGET, PROMISE, SCENARIO, spent_in


def written(path) -> Ledger:
    return Ledger(PROMISE, 2, subject="them", path=path)


def test_rounds_that_were_charged_before_do_not_shift_the_one_that_is_named():
    ledger = Ledger(PROMISE, 2)
    ledger.charge("a", 1, [[1.0, 0.0]])
    with pytest.raises(OverspendError) as caught:
        ledger.charge("a", 0, [[0.5, 0.0], [1.0, 0.0], [9.0, 0.0]])
    assert (caught.value.round, caught.value.device) == (2, 0)
    assert ledger.spent.tolist() == [1.0, 0.0]


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
    assert (first.last_hash, last.rounds("a"), last.rounds("b")) == (
        last.last_hash,
        5,
        2,
    )
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
    for start in range(0, len(values), size):
        rows = np.array(values[start : start + size])[:, None]
        try:
            ledger.charge("a", start, rows)
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
    ("damage", "kind", "fact"),
    [
        (
            change(2, lambda line: line.replace("0.5", "0.1")),
            InputError,
            "line 3 or one above",
        ),
        (change(2, lambda line: ""), InputError, "line 3 or one above"),
        (change(1, lambda line: "nonsense\n"), InputError, "line 2"),
        (
            change(1, lambda line: json.dumps({"chain": "x"}) + "\n"),
            InputError,
            "line 2",
        ),
        (
            change(2, lambda line: line.replace("[0.5", "[-0.5")),
            InputError,
            "line 3 is",
        ),
        (
            change(0, lambda line: line.replace('"subject": "', '"subject": "x')),
            ForeignLedgerError,
            "data",
        ),
        (
            change(0, lambda line: line.replace('"epsilon": 8.0', '"epsilon": 80.0')),
            ForeignLedgerError,
            "epsilon = 8.0",
        ),
        (
            change(
                0, lambda line: line.replace('"unit": "device"', '"unit": "record"')
            ),
            ForeignLedgerError,
            "unit = device",
        ),
        (
            change(0, lambda line: line.replace('"replace"', '"add-remove"')),
            ForeignLedgerError,
            "adjacency = replace",
        ),
        (
            change(0, lambda line: line.replace('"devices": 2', '"devices": 3')),
            ForeignLedgerError,
            "devices = 2",
        ),
    ],
)
def test_a_ledger_that_was_changed_is_refused(tmp_path, damage, kind, fact):
    path = tmp_path / "ledger.jsonl"
    written(path).charge("a", 0, [[0.2, 0.5], [0.5, 0.5], [0.1, 0.0]])
    damage(path)
    with raises_input_error("ledger", fact, error=kind) as caught:
        written(path)
    assert type(caught.value) is kind


def test_a_line_cut_short_by_a_crash_was_never_acted_upon(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path).charge("a", 0, [[0.2, 0.5]])
    before = anchor_path(path).read_text()
    written(path).charge("a", 1, [[0.5, 0.5]])
    whole = path.read_text()
    path.write_text(whole[:-20])
    anchor_path(path).write_text(before)  # which is written last
    ledger = written(path)
    assert ledger.rounds("a") == 1
    ledger.charge("a", 1, [[0.5, 0.5]])
    assert path.read_text() == whole


@pytest.mark.parametrize(
    "content",
    [b"my notes", b'{"constants": {"mu": 1.0}}', b"\x00\xff", b'{"ledger": 1, "devi'],
)
def test_a_file_that_is_no_ledger_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with raises_input_error("ledger", path):
        written(path)
    assert path.read_bytes() == content
    assert not anchor_path(path).exists()


def test_a_first_line_cut_short_and_a_missing_anchor(tmp_path):
    """The one is a ledger that a crash left before it was one; the other is refused, and nothing is cut off."""
    path = tmp_path / "ledger.jsonl"
    for length in (0, 5, 30):
        path.write_bytes(b'{"ledger": 2, "subject": "abcdef'[:length])
        assert written(path).spent.tolist() == [0, 0]
        anchor_path(path).unlink()
    path.write_bytes(path.read_bytes() + b'{"run": "')
    before = path.read_bytes()
    with raises_input_error("ledger", "ledger.jsonl.head"):
        written(path)
    assert path.read_bytes() == before


def test_another_loss_for_the_same_round_of_the_same_run_is_refused():
    ledger = Ledger(PROMISE, 1)
    ledger.charge("a", 0, [[0.2]])
    with raises_input_error("ledger", "round 1"):
        ledger.charge("a", 0, [[0.3]])
    with raises_input_error("losses"):
        ledger.charge("a", 1, [[np.nan]])


def test_a_spent_budget_stops_the_sampler_before_it_sends(paid_setting, monkeypatch):
    posterior, link, plan = paid_setting
    ledger = Ledger(PROMISE, 6, subject=posterior.digest)
    wflmc.sample(jax.random.key(1), posterior, plan, 2, ledger=ledger)
    # A call of this has sent something, and fails.
    monkeypatch.setattr(simulation, "advance_block", None)
    with pytest.raises(OverspendError):
        wflmc.sample(jax.random.key(2), posterior, plan, 2, ledger=ledger)
    np.testing.assert_allclose(ledger.spent, plan.spent)
    greedy = wflmc.plan(
        posterior,
        link,
        PROMISE,
        step_size=plan.step_size[0],
        burn_in=13,
        samples=20,
        policy=wflmc.Policy(power="no-dp"),
    )
    with pytest.raises(OverspendError):
        wflmc.sample(
            jax.random.key(2), posterior, with_context(greedy, enforced=True), 2
        )


def test_one_ledger_for_several_runs(tmp_path, call):
    scenario, ledger = tmp_path / "s.toml", tmp_path / "people.jsonl"
    scenario.write_text(SCENARIO)
    assert call("run", scenario, "--ledger", ledger)[0] == 0
    code, out, _ = call("plan", scenario, "--ledger", ledger, "--json", "--no-compare")
    document = json.loads(out)
    assert document["privacy"]["spent_before"] == pytest.approx(
        np.array(spent_in(ledger)).tolist()
    )
    assert document["privacy"]["epsilon_spent"] <= 8 * (1 + 1e-9)
    saved = tmp_path / "rest.json"
    saved.write_text(out)
    code, _, err = call("run", "--plan", saved)
    assert code == 2
    assert names_key(err, "--ledger")
    code, _, err = call(
        "run", scenario, "--ledger", ledger, "--set", "privacy.epsilon=9.0"
    )
    assert code == 2
    assert names_key(err, "--ledger", "epsilon = 8.0", "epsilon = 9.0")
    code, _, err = call(
        "run", scenario, "--ledger", ledger, "--set", "posterior.seed=1"
    )
    assert code == 2
    assert names_key(err, "--ledger", ledger, "data")
    for seed in range(1, 10):
        code, _, err = call(
            "run", scenario, "--ledger", ledger, "--set", f"sampler.seed={seed}"
        )
        assert np.max(spent_in(ledger)) <= BUDGET * (1 + 1e-9)
        if code:
            break
    assert seed > 1
    assert code == 2
    assert names_key(err, "--ledger", "device 1", "budget")


def test_a_folder_used_again_keeps_the_old_ledger(tmp_path, call):
    scenario, folder = tmp_path / "s.toml", tmp_path / "o"
    scenario.write_text(SCENARIO)
    call("run", scenario, "--out", folder)
    first = (folder / "ledger.jsonl").read_text()
    call("run", scenario, "--out", folder)  # the very same again sends nothing new
    assert (folder / "ledger.jsonl").read_text() == first
    louder = ("--set", "link.snr_db=5.0")
    for more in (
        (),
        ("--set", "privacy.epsilon=7.0"),
        ("--set", "posterior.seed=1"),
        ("--ledger", tmp_path / "all"),
    ):
        code, _, err = call("run", scenario, "--out", folder, *louder, *more)
        assert code == 2
        assert names_key(err, "sampler.seed", 0, "--out", "ledger.jsonl")
    _, _, err = call(
        "run", scenario, "--out", folder, *louder, "--set", "sampler.seed=1"
    )
    assert not missing_facts(err, ("ledger-1.jsonl",))
    assert (folder / "ledger-1.jsonl").read_text() == first
    assert (folder / "ledger.jsonl").read_text() != first
    code, _, err = call("run", scenario, "--out", folder, *louder)
    assert code == 2  # a ledger that was set aside still counts
    assert names_key(err, "sampler.seed", "ledger-1.jsonl")
    # What was sent before may be sent again.
    assert call("run", scenario, "--out", folder)[0] == 0


def test_the_same_noise_for_another_plan_is_refused(paid_setting, tmp_path, call):
    """Two sums with the same noise and other gains are two equations: who sees both has the gradients."""
    posterior, _, plan = paid_setting
    tenth = plan.with_rounds(gain=plan.gain / 10)
    ledger = Ledger(wflmc.Privacy(80, 0.01, 30), 6, subject=posterior.digest)
    wflmc.sample(jax.random.key(1), posterior, plan, 2, ledger=ledger)
    with raises_input_error("seed", "round 1"):
        wflmc.sample(jax.random.key(1), posterior, tenth, 2, ledger=ledger)
    wflmc.sample(jax.random.key(2), posterior, tenth, 2, ledger=ledger)
    scenario, people = tmp_path / "s.toml", tmp_path / "people.jsonl"
    scenario.write_text(SCENARIO)
    assert call("run", scenario, "--ledger", people)[0] == 0
    code, _, err = call(
        "run", scenario, "--ledger", people, "--set", "link.snr_db=-9.0"
    )
    assert code == 2
    assert names_key(err, "seed", "round 1")


def test_spending_without_limits_is_written_down_too(tmp_path, call):
    scenario, people = tmp_path / "s.toml", tmp_path / "people.jsonl"
    scenario.write_text(SCENARIO)
    louder = ("--set", "link.snr_db=30.0", "--set", "policy.power=no-dp")
    assert call("run", scenario, "--ledger", people, *louder)[0] == 0
    assert np.min(spent_in(people)) > BUDGET
    code, _, err = call("run", scenario, "--ledger", people, "--set", "sampler.seed=1")
    assert code == 2
    assert names_key(err, "--ledger", "device 0", "budget")


def test_another_prior_is_another_run(paid_setting):
    """Of the same data and plan: what is sent differs, so it is not free, and its noise must be another."""
    posterior, _, plan = paid_setting
    other = wflmc.gaussian_regression(
        jax.random.key(0), devices=6, examples=120, prior_std=0.2
    )
    assert other.digest == posterior.digest
    small = plan.with_rounds(gain=plan.gain / 3)
    ledger = Ledger(PROMISE, 6, subject=posterior.digest)
    wflmc.sample(jax.random.key(1), posterior, small, 2, ledger=ledger)
    before = ledger.spent
    with raises_input_error("seed", "round 1"):
        wflmc.sample(jax.random.key(1), other, small, 2, ledger=ledger)
    wflmc.sample(jax.random.key(2), other, small, 2, ledger=ledger)
    np.testing.assert_allclose(ledger.spent, 2 * before)


def test_a_ledger_of_others_is_refused(paid_setting):
    posterior, _, plan = paid_setting
    record = wflmc.Privacy(8, 0.01, 30, unit="record", example_clip=9.0)
    for ledger in (
        Ledger(PROMISE, 5),
        Ledger(PROMISE, 6, subject="someone else"),
        Ledger(record, 6, subject=posterior.digest),
    ):
        with raises_input_error("ledger", "6 devices"):
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
