"""Ctrl-C is heard wherever it comes, and the handler of whoever calls is theirs again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

import wflmc
from wflmc.cli import app

from ..cli_tools import PATIENCE, listening


def test_an_interrupt_inside_the_hook_of_the_garbage_collector_comes_again():
    """Python swallows what is raised there; JAX has such a hook, and long runs are in it now and then."""

    def _xla_gc_callback():  # by the name that JAX gives it
        signal.raise_signal(signal.SIGINT)

    def command():
        _xla_gc_callback()
        threading.Event().wait(PATIENCE)  # until it comes again

    before = signal.getsignal(signal.SIGINT)
    assert app.exit_code(command) == app.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("start", "module"),
    [
        (["-m", "wflmc"], "typer"),
        (["-m", "wflmc"], "jax"),
        (["-c", "from wflmc.cli import main; main()"], "jax"),
    ],
)
def test_an_interrupt_while_modules_are_imported(tmp_path, start, module):
    """One line and exit code 1, no traceback: a module that takes its time stands in for a real one."""
    (tmp_path / f"{module}.py").write_text(
        "import threading\nprint('here', flush=True)\nthreading.Event().wait(900)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with listening(*start, "plan", "x.toml", PYTHONPATH=path) as process:
        assert process.stdout.readline() == "here\n", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (1, "wflmc: Interrupted.\n")


def test_the_command_line_listens_before_anything_large_is_imported():
    script = "import sys, wflmc.cli; print({'jax', 'numpy', 'scipy', 'typer', 'click'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def test_names_of_the_package_are_imported_when_they_are_asked_for():
    namespace = {}
    exec("from wflmc import *", namespace)
    assert set(wflmc.__all__) <= set(namespace)
    assert set(dir(wflmc)) == set(wflmc.__all__)
    assert namespace["Link"] is wflmc.channel.Link
    assert wflmc.support.errors.InputError is namespace["InputError"]
    with pytest.raises(
        AttributeError, match="module 'wflmc' has no attribute 'nothing'"
    ):
        wflmc.nothing  # noqa: B018
