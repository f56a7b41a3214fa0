"""A ledger that is cut at a line looks whole, and a new run would spend again what devices have spent already.

Beside every ledger, `people.jsonl.head` counts its lines and has the hash of the last one. It is written after the
lines, so that a crash in between leaves it behind the ledger, never ahead of it.
"""

from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import pytest

from wflmc.privacy.ledger import Anchor, Ledger, anchor_path
from wflmc.support.errors import OverspendError

from ..error_tools import names_key, raises_input_error
from ..privacy.ledger_tools import BUDGET, PROMISE, SCENARIO, lines_of, spent_in
from ..report.test_report import run_in


def opened(path) -> Ledger:
    return Ledger(PROMISE, 2, subject="them", path=path)


@pytest.fixture
def people(tmp_path):
    """A ledger that leaves a tenth of the budget."""
    path = tmp_path / "people.jsonl"
    opened(path).charge("a", 0, np.full((3, 2), 0.3 * BUDGET), noise="drawn")
    return path


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    home = tmp_path_factory.mktemp("ended")
    run_in(home / "run", SCENARIO)
    return home


@pytest.fixture
def finished(ended, tmp_path):
    """A scenario and the folder of its run."""
    return ended / "run.toml", shutil.copytree(ended / "run", tmp_path / "run")


def cut(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines_of(path)[:lines]))


LENGTHS = {3: "3 lines", 2: "2 lines", 1: "1 line", 0: "0 lines"}


@pytest.mark.parametrize("lines", LENGTHS)
def test_a_ledger_that_was_cut_is_refused(people, lines):
    """Knows the file, cuts its last lines off, and had the budget of those rounds again: 0.9 + 0.9 of 1."""
    cut(people, lines)
    contents = people.read_bytes(), anchor_path(people).read_bytes()
    with raises_input_error("ledger", LENGTHS[lines], "people.jsonl.head", "counts 4"):
        opened(people)
    with raises_input_error("ledger", LENGTHS[lines], "people.jsonl.head", "counts 4"):
        Ledger(PROMISE, 2, path=people, read_only=True)
    assert (people.read_bytes(), anchor_path(people).read_bytes()) == contents


def test_a_ledger_that_is_cut_in_use_is_refused(people):
    """Cuts the file while a run has it open."""
    ledger = opened(people)
    cut(people, 2)
    with raises_input_error("ledger", "2 lines", "people.jsonl.head", "counts 4"):
        ledger.charge("b", 0, np.full((2, 2), 0.3 * BUDGET))


def test_a_ledger_cut_and_continued_is_refused(people, tmp_path):
    """Cuts the file, lets a run grow it beyond its old length beside another anchor, and puts the old anchor back."""
    old = anchor_path(people).read_text()
    anchor_path(people).write_text(
        json.dumps(
            {**json.loads(old), "lines": 1, "chain": opened(people).line_hashes[0]}
        )
    )
    cut(people, 1)
    opened(people).charge("b", 0, np.full((5, 2), 0.1 * BUDGET))
    anchor_path(people).write_text(old)
    hashes = (
        json.loads(lines_of(people)[3])["chain"][:12],
        json.loads(old)["chain"][:12],
    )
    with raises_input_error("ledger", "line 4", *hashes):
        opened(people)


def test_a_ledger_without_its_anchor_is_refused(people):
    """Cuts the file and deletes the anchor, as if the ledger were from before there were anchors."""
    anchor_path(people).unlink()
    with raises_input_error("ledger", "4 lines", "people.jsonl.head", "missing"):
        opened(people)


def test_a_new_run_does_not_spend_again_what_a_cut_ledger_forgot(finished, call):
    """From end to end: `wflmc run --out`, most lines cut off, `wflmc run --ledger` with another seed."""
    scenario, folder = finished
    people = folder / "ledger.jsonl"
    cut(people, 2)
    spent = spent_in(people)
    code, _, err = call("run", scenario, "--ledger", people, "--set", "sampler.seed=1")
    assert code == 2
    assert names_key(err, "--ledger", "2 lines", "counts 101")
    np.testing.assert_array_equal(spent_in(people), spent)


class KilledError(BaseException):
    pass


def test_a_crash_before_the_anchor_is_written_is_no_tampering(people, monkeypatch):
    """Killed between the lines and their anchor: they count, the next one to open the ledger anchors them."""
    ledger = opened(people)

    def die(*_):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Anchor, "save", die)
        with pytest.raises(KilledError):
            ledger.charge("b", 0, np.full((1, 2), 0.1 * BUDGET))
    assert (len(lines_of(people)), Anchor.of(people).lines) == (5, 4)
    again = opened(people)
    assert (again.rounds("b"), Anchor.of(people).lines) == (1, 5)
    assert Anchor.of(people).last_hash == again.last_hash
    with pytest.raises(OverspendError):
        ledger.charge("c", 0, np.full((1, 2), 0.1 * BUDGET))


def test_a_disk_without_room_for_the_anchor_takes_the_lines_back(people, monkeypatch):
    ledger = opened(people)
    whole = people.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Anchor, "save", full)
        with pytest.raises(OSError, match="No space"):
            ledger.charge("b", 0, np.full((1, 2), 0.1 * BUDGET))
    assert people.read_bytes() == whole
    ledger.charge("b", 0, np.full((1, 2), 0.1 * BUDGET))
    assert opened(people).rounds("b") == 1


def test_many_at_once_and_killed_at_any_moment_stay_anchored(tmp_path, monkeypatch):
    """Eight writers, a third of whose anchors are never written: every line is there once, and none is doubted."""
    path = tmp_path / "people.jsonl"
    save = Anchor.save
    chance = np.random.default_rng(0)
    paid, failed = [], []

    def perhaps(self, ledger):
        if chance.random() < 1 / 3:
            raise KilledError
        save(self, ledger)

    def write(writer):
        for number in range(10):
            try:
                opened(path).charge(f"run {writer}", number, [[0.001, 0.002]])
                paid.append((writer, number))
            except KilledError:
                pass
            except Exception as error:
                failed.append(error)

    opened(path)
    monkeypatch.setattr(Anchor, "save", perhaps)
    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert not failed
    ledger = opened(path)
    assert all(
        ledger.paid(f"run {writer}", number) is not None for writer, number in paid
    )
    assert len(ledger.entries) == len(lines_of(path)) - 1
    assert Anchor.of(path) == Anchor(
        len(lines_of(path)), ledger.last_hash, Anchor.of(path).salt
    )


def test_a_ledger_from_before_anchors_is_refused(tmp_path):
    path = tmp_path / "people.jsonl"
    path.write_text(
        json.dumps(
            {
                "ledger": 1,
                "subject": "them",
                "devices": 2,
                "unit": "device",
                "chain": "",
            }
        )
        + "\n"
    )
    with raises_input_error("ledger", "version 2"):
        opened(path)
