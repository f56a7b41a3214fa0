"""Full disks, and two commands in one folder: one sentence, nothing half-written, and what was begun goes on."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from contextlib import contextmanager

import numpy as np
import pytest

from wflmc import storage
from wflmc.errors import InputError
from wflmc.privacy import Ledger
from wflmc.storage import replacing, reserve, sole_writer, write_text

from ..cli_tools import strict
from ..privacy.ledger_tools import PROMISE, losses_of

SMALL = """
[posterior]
devices = 6
examples = 60
[privacy]
epsilon = 8.0
delta = 0.01
[sampler]
burn_in = 10
samples = 30
chains = 20
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@contextmanager
def largest_file(size):
    """No file may grow beyond a size, as on a disk that is full: the system answers with an OSError."""
    resource = pytest.importorskip("resource", reason="limits on files need a POSIX system")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # Python ignores the signal that goes with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def check_failed(code, out, err, folder):
    """One sentence that names a file of the folder, exit code 1, and no part of a file left behind."""
    assert (code, out) == (1, "")
    assert err.count("\n") == 1, err
    assert str(folder) in err
    assert not [name for name in files_in(folder) if name.endswith(".part")]


# Full disks


def test_a_run_that_meets_a_full_disk_goes_on_later(call, small, tmp_path):
    """Every file of a run in turn is the one that there is no room for."""
    whole = tmp_path / "whole"
    assert call("run", small, "--out", whole)[0] == 0
    wanted = strict((whole / "summary.json").read_text())
    failed = set()
    for name in ("trace.nc", "ledger.jsonl", "plan.json"):
        folder = tmp_path / name
        with largest_file((whole / name).stat().st_size - 1):
            code, out, err = call("run", small, "--out", folder)
        check_failed(code, out, err, folder)
        failed |= {path for path in files_in(whole) if f"{folder / path};" in err}
        resumed = f"wflmc run --resume {folder} goes on" in err
        code, _, err = call("run", *(["--resume", folder] if resumed else [small, "--out", folder]))
        assert code == 0, err
        assert files_in(folder) == files_in(whole)
        assert losses_of(folder / "ledger.jsonl") == losses_of(whole / "ledger.jsonl")
        assert strict((folder / "summary.json").read_text())["w2_sq"] == wanted["w2_sq"]
    assert failed >= {"trace.nc", "ledger.jsonl"}


def test_a_finished_run_is_as_it_was_where_the_next_one_has_no_room(call, small, tmp_path):
    folder = tmp_path / "run"
    assert call("run", small, "--out", folder)[0] == 0
    names = ["plan.json", "scenario.toml", "summary.json", "trace.nc"]
    before = [(folder / name).read_bytes() for name in names]
    with largest_file((folder / "trace.nc").stat().st_size - 1):
        code, out, err = call("run", small, "--out", folder, "--set", "link.snr_db=3", "--set", "sampler.seed=1")
    assert "kept as ledger-1.jsonl" in err.splitlines()[0]
    check_failed(code, out, err.split("\n", 1)[1], folder)
    assert [(folder / name).read_bytes() for name in names] == before


def test_a_real_disk_that_is_full_and_then_enlarged(call, small, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=72k", "tmpfs", disk], capture_output=True)
    if not made or made.returncode:
        pytest.skip("mounting a small disk needs the rights of root")
    try:
        folder = disk / "run"
        check_failed(*call("run", small, "--out", folder), folder)
        code, out, err = call("run", small, "--out", folder)
        check_failed(code, out, err.splitlines(keepends=True)[-1], folder)
        subprocess.run([mount, "-o", "remount,size=4m", disk], check=True)
        code, _, err = call("run", small, "--out", folder)
        assert code == 0, err
        assert not (folder / ".checkpoint").exists()
    finally:
        # Lazily: a file of it may be open somewhere for a moment longer.
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("command", ["new", "plan --plot", "sweep", "reproduce", "report"])
def test_other_commands_leave_nothing_half_written(call, small, tmp_path, command):
    out = tmp_path / "out"
    arguments = {
        "new": ["new", out / "study"],
        "plan --plot": ["plan", small, "--no-compare", "--plot", out / "p.png"],
        "sweep": ["sweep", small, "--grid", "link.snr_db=1,2", "--plan-only", "--cache", tmp_path, "--out", out / "s"],
        "reproduce": ["reproduce", "fig3b", "--out", out / "f"],
        "report": ["report", "--explore", "--out", out / "x.html"],
    }[command]
    out.mkdir()
    with largest_file(100):
        code, _, err = call(*arguments)
    assert code == 1
    assert str(out) in err.splitlines()[-1]
    assert not list(out.iterdir())


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_text(path, "before")

    def write(error):
        with replacing(path) as file:
            file.write(b"half of")
            raise error

    with pytest.raises(OSError, match="No space") as caught:
        write(OSError(errno.ENOSPC, "No space left on device"))
    assert caught.value.filename == str(path)
    with pytest.raises(KeyboardInterrupt):
        write(KeyboardInterrupt)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "before")]


@pytest.mark.parametrize("reserving", [True, False])
def test_room_is_reserved_before_it_is_needed(tmp_path, monkeypatch, reserving):
    if not reserving:  # as on a Mac
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with open(tmp_path / "file", "wb") as file:
        reserve(file, 1000)
        with pytest.raises(OSError, match="needed") as caught:
            reserve(file, 2**62)
    assert caught.value.errno == errno.ENOSPC


def test_samples_in_a_mapped_file_have_their_room_from_the_start(tmp_path, monkeypatch):
    """Where they had not, a full disk would kill the process by a bus error."""
    from wflmc.sampling import checkpoint

    path = tmp_path / "theta.npy"
    with pytest.raises(OSError, match=r"theta\.npy"):
        checkpoint.room((2**20, 2**20, 2**20), path, begun=False)
    assert not path.exists()
    checkpoint.room((100, 100, 10), path, begun=False)
    if hasattr(os, "posix_fallocate"):
        assert 512 * path.stat().st_blocks >= path.stat().st_size


def test_a_ledger_without_room_keeps_what_it_had(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(PROMISE, 3, path=path)
    ledger.charge("a", 0, [[0.1, 0.1, 0.1]])
    before = path.read_bytes()
    with largest_file(len(before) + 50), pytest.raises(OSError, match=r"ledger\.jsonl"):
        ledger.charge("a", 1, [[0.1, 0.1, 0.1]] * 5)
    assert path.read_bytes() == before
    ledger.charge("a", 1, [[0.2, 0.1, 0.1]])
    np.testing.assert_allclose(Ledger(PROMISE, 3, path=path).spent, [0.3, 0.2, 0.2])


# Two commands in one folder


def test_a_folder_in_use_is_refused_by_name(call, small, tmp_path):
    folder = tmp_path / "run"
    assert call("run", small, "--out", folder)[0] == 0
    before = files_in(folder)
    grid = ["--grid", "link.snr_db=1,2", "--plan-only", "--cache", tmp_path / "cache"]
    commands = [
        ["run", "--more", "3", "--resume", folder],
        ["run", small, "--out", folder],
        ["sweep", small, *grid, "--out", folder],
        ["reproduce", "fig3b", "--out", folder],
    ]
    if importlib.util.find_spec("flwr") is not None:
        commands.append(["federate", small, "--runtime", "process", "--out", folder])
    with sole_writer(folder):
        for arguments in commands:
            code, out, err = call(*arguments)
            assert (code, out) == (2, "")
            assert err.startswith(f"wflmc: {arguments[-2]} = {str(folder)!r} ")
            assert f"process {os.getpid()} is" in err
            assert err.count("\n") == 1
    assert files_in(folder) == before
    assert call("run", small, "--out", folder)[0] == 0


def test_a_lock_that_nobody_holds_locks_nothing(tmp_path):
    """What a process leaves that was killed, or that had no room for its number."""
    for left in (b"", b"12345", b"\xff"):
        (tmp_path / ".lock").write_bytes(left)
        with sole_writer(tmp_path), pytest.raises(InputError, match=f"process {os.getpid()} is"), sole_writer(tmp_path):
            pass
        assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_meanwhile_is_not_held(tmp_path, monkeypatch):
    """The holder removes its file when it is done; who has just opened that one takes the next."""
    lock, times = storage._lock, []

    def slowly(file):
        times.append(1)
        if len(times) == 1:
            (tmp_path / ".lock").unlink()
        return lock(file)

    monkeypatch.setattr(storage, "_lock", slowly)
    with sole_writer(tmp_path):
        assert (tmp_path / ".lock").exists()
        assert len(times) == 2


def test_locks_without_fcntl(tmp_path, monkeypatch):
    """Windows locks bytes of a file; a stand-in for its module counts who holds them."""
    held = set()

    def locking(number, mode, size):
        place = os.fstat(number).st_ino, os.lseek(number, 0, os.SEEK_CUR), size
        if place in held:
            raise PermissionError(errno.EACCES, "locked")
        held.add(place)

    monkeypatch.setattr(storage, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2))
    with sole_writer(tmp_path), pytest.raises(InputError, match="process"), sole_writer(tmp_path):
        pass


def test_a_disk_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch):
    def flock(file, mode):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(storage, "fcntl", types.SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4))
    with sole_writer(tmp_path):
        pass


def test_an_output_folder_that_nothing_is_written_to_is_removed(call, small, tmp_path):
    code, _, _ = call("run", small, "--out", tmp_path / "a" / "b", "--set", "posterior.devices=1000")
    assert code == 2
    assert not (tmp_path / "a").exists()


def test_links_in_a_folder_are_not_followed(tmp_path):
    """Others may write to the folder too: what a link points to stays as it is."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".lock").symlink_to(victim)
    (tmp_path / "plan.json.part").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        write_text(tmp_path / "plan.json", "{}")
    with pytest.raises(OSError, match="symbolic link"), sole_writer(tmp_path):
        pass
    assert victim.read_text() == "precious"
