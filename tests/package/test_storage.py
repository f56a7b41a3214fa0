"""Full disks, and two commands in one folder: one sentence, nothing half-written, and what was begun goes on."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from contextlib import contextmanager

import filelock
import numpy as np
import pytest

from wflmc.privacy import Ledger
from wflmc.scenario.files import load_data
from wflmc.scenario.gains import load_gains
from wflmc.support import storage
from wflmc.support.errors import InputError
from wflmc.support.storage import (
    expansion_limit,
    read_arrays,
    replacing,
    reserve,
    sole_writer,
    write_text,
)

from ..cli_tools import strict
from ..error_tools import names_key, raises_input_error
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
    resource = pytest.importorskip(
        "resource", reason="limits on files need a POSIX system"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal that goes with this limit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_in(folder):
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )


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
    # The ledger is to be longer than the plan, and the trace longer than the ledger.
    small.write_text(small.read_text().replace("burn_in = 10", "burn_in = 60"))
    assert call("run", small, "--out", whole)[0] == 0
    expected = strict((whole / "summary.json").read_text())
    failed = set()
    for name in ("trace.nc", "ledger.jsonl", "plan.json"):
        folder = tmp_path / name
        with largest_file((whole / name).stat().st_size - 1):
            code, out, err = call("run", small, "--out", folder)
        check_failed(code, out, err, folder)
        failed |= {path for path in files_in(whole) if f"{folder / path};" in err}
        resumed = f"wflmc run --resume {folder}" in err
        code, _, err = call(
            "run", *(["--resume", folder] if resumed else [small, "--out", folder])
        )
        assert code == 0, err
        assert files_in(folder) == files_in(whole)
        assert losses_of(folder / "ledger.jsonl") == losses_of(whole / "ledger.jsonl")
        assert (
            strict((folder / "summary.json").read_text())["w2_sq"] == expected["w2_sq"]
        )
    assert failed >= {"trace.nc", "ledger.jsonl"}


def test_a_finished_run_is_as_it_was_where_the_next_one_has_no_room(
    call, small, tmp_path
):
    folder = tmp_path / "run"
    assert call("run", small, "--out", folder)[0] == 0
    names = ["plan.json", "plan.npz", "scenario.toml", "summary.json", "trace.nc"]
    before = [(folder / name).read_bytes() for name in names]
    with largest_file((folder / "trace.nc").stat().st_size - 1):
        code, out, err = call(
            "run",
            small,
            "--out",
            folder,
            "--set",
            "link.snr_db=3",
            "--set",
            "sampler.seed=1",
        )
    assert "ledger-1.jsonl" in err.splitlines()[0]
    check_failed(code, out, err.split("\n", 1)[1], folder)
    assert [(folder / name).read_bytes() for name in names] == before


def test_a_real_disk_that_is_full_and_then_enlarged(call, small, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    mounted = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=72k", "tmpfs", disk], capture_output=True
    )
    if not mounted or mounted.returncode:
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


@pytest.mark.parametrize(
    "command", ["new", "plan --plot", "sweep", "reproduce", "report"]
)
def test_other_commands_leave_nothing_half_written(call, small, tmp_path, command):
    out = tmp_path / "out"
    arguments = {
        "new": ["new", out / "study"],
        "plan --plot": ["plan", small, "--no-compare", "--plot", out / "p.png"],
        "sweep": [
            "sweep",
            small,
            "--grid",
            "link.snr_db=1,2",
            "--plan-only",
            "--cache",
            tmp_path,
            "--out",
            out / "s",
        ],
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
        checkpoint.allocate((2**20, 2**20, 2**20), path, begun=False)
    assert not path.exists()
    checkpoint.allocate((100, 100, 10), path, begun=False)
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
            assert names_key(err, arguments[-2], folder, f"process {os.getpid()}")
    assert files_in(folder) == before
    assert call("run", small, "--out", folder)[0] == 0


def test_a_lock_that_nobody_holds_locks_nothing(tmp_path):
    """What a process leaves that was killed, or that had no room for its number."""
    for left in (b"", b"12345", b"\xff"):
        (tmp_path / ".lock").write_bytes(left)
        with (
            sole_writer(tmp_path),
            raises_input_error("--out", tmp_path, f"process {os.getpid()}"),
            sole_writer(tmp_path),
        ):
            pass
        assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_meanwhile_is_not_held(tmp_path, monkeypatch):
    """The holder removes its file when it is done; who has just opened that one takes the next."""
    lock = storage._lock
    times = []

    def slowly(file):
        times.append(1)
        if len(times) == 1:
            (tmp_path / ".lock").unlink()
        return lock(file)

    monkeypatch.setattr(storage, "_lock", slowly)
    with sole_writer(tmp_path):
        assert (tmp_path / ".lock").exists()
        assert len(times) == 2


def test_the_number_of_the_holder_is_not_in_the_byte_that_is_locked(tmp_path):
    """Windows lets nobody else read the first byte of a locked file."""
    with sole_writer(tmp_path):
        content = (tmp_path / ".lock").read_bytes()
    assert content[1:] == b"%d" % os.getpid()


def test_a_disk_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch):
    def lock_descriptor(descriptor, blocking):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock, "lock_descriptor", lock_descriptor)
    with sole_writer(tmp_path):
        pass


HOLDER = """
import sys, time
from pathlib import Path
from wflmc.support import storage
with getattr(storage, sys.argv[1])(Path(sys.argv[2])):
    print("locked", flush=True)
    time.sleep(600)
"""
"""A process that holds a lock until it is killed."""


@contextmanager
def holder_of(kind, path):
    """Another process that holds a lock, and is killed at the end."""
    command = [sys.executable, "-c", HOLDER, kind, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_killed_process_leaves_no_lock_on_a_folder(tmp_path):
    with holder_of("sole_writer", tmp_path) as process:
        with (
            raises_input_error("--out", tmp_path, f"process {process.pid}"),
            sole_writer(tmp_path),
        ):
            pass
        process.kill()
        process.wait()
        assert (tmp_path / ".lock").exists()
        with sole_writer(tmp_path):
            pass
    assert not list(tmp_path.iterdir())


def test_a_ledger_is_locked_itself_until_its_process_is_killed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(PROMISE, 3, path=path).charge("a", 0, [[0.1, 0.1, 0.1]])
    names = files_in(tmp_path)
    mode = path.stat().st_mode
    with holder_of("exclusive", path) as process:
        charge = threading.Thread(
            target=lambda: Ledger(PROMISE, 3, path=path).charge("a", 1, [[0.1] * 3])
        )
        charge.start()
        charge.join(0.3)
        assert charge.is_alive()
        assert files_in(tmp_path) == names
        process.kill()
        process.wait()
        charge.join(30)
        assert not charge.is_alive()
    assert Ledger(PROMISE, 3, path=path).rounds("a") == 2
    assert path.stat().st_mode == mode


def test_an_output_folder_that_nothing_is_written_to_is_removed(call, small, tmp_path):
    code, _, _ = call(
        "run", small, "--out", tmp_path / "a" / "b", "--set", "posterior.devices=1000"
    )
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


def npy(header: str, content: bytes = b"") -> bytes:
    """An .npy file with any header."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def peak_of(call, *arguments, **keywords):
    """Return the error that a call raises, None without one, and the most memory that it took."""
    tracemalloc.start()
    raised = None
    try:
        call(*arguments, **keywords)
    except InputError as error:
        raised = error
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return raised, peak


def test_an_archive_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    """Some kilobytes that would fill 16 MiB, with the limits of small machines in place of 1 GiB and 200 times."""
    monkeypatch.setattr(storage, "MAX_EXPANDED_BYTES", 2**20)
    np.savez_compressed(tmp_path / "d.npz", X=np.zeros((2**18, 8)), y=np.zeros(2**18))
    error, peak = peak_of(load_data, tmp_path / "d.npz")
    assert error is not None
    assert error.key == "data"
    assert peak < 2**20
    # This file is as large as its header says.
    np.savez(tmp_path / "d.npz", X=np.zeros((2**18, 8)), y=np.zeros(2**18))
    assert len(load_data(tmp_path / "d.npz")[0].y) == 2**18


def test_sparse_data_may_be_compressed(tmp_path):
    """Zeros are packed a thousand times; 1 GiB of them may be, whatever the size of the file."""
    np.savez_compressed(
        tmp_path / "d.npz", X=np.zeros((10_000, 100)), y=np.arange(10_000)
    )
    size = (tmp_path / "d.npz").stat().st_size
    assert size < 50_000
    assert expansion_limit(size) == 2**30
    assert load_data(tmp_path / "d.npz")[0].X.shape == (10_000, 100)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 8), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 3), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': '<U0', 'fortran_order': False, 'shape': (1099511627776,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<f8', 'shape': (2,), }",
        "(" * 100,
    ],
)
def test_an_array_of_another_size_than_it_declares(tmp_path, header):
    """Neither in an archive nor alone, and without the memory that it declares; 16 bytes follow the header."""
    content = npy(header, bytes(16))
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("X.npy", content)
        archive.writestr("y.npy", content)
    (tmp_path / "h.npy").write_bytes(content)
    for read, name in ((load_data, "d.npz"), (load_gains, "h.npy")):
        error, peak = peak_of(read, str(tmp_path / name))
        assert error is not None
        assert peak < 2**20


def test_archives_that_are_no_archives_of_arrays(tmp_path):
    path = tmp_path / "d.npz"
    array = io.BytesIO()
    np.save(array, np.arange(3.0))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("X.npy", array.getvalue())
        archive.writestr("note.txt", b"not an array")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("X.npy", array.getvalue())
    with pytest.raises(InputError):
        read_arrays(path, key="data", requirement="arrays")
    assert read_arrays(path, key="data", requirement="arrays", names=("y",)) == {}
    np.savez(path, X=np.arange(3.0), y=np.array(["a", "b"]))
    content = path.read_bytes()
    whole = read_arrays(path, key="data", requirement="arrays")
    assert (whole["X"].tolist(), whole["y"].tolist()) == ([0.0, 1.0, 2.0], ["a", "b"])
    for damaged in (content[:-30], content[:60], b"", content.replace(b"<f8", b"<f4")):
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            read_arrays(path, key="data", requirement="arrays")
    with pytest.raises(InputError):
        read_arrays(tmp_path / "missing.npz", key="data", requirement="arrays")
