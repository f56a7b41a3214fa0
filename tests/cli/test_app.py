"""What all commands share: help, usage errors, interrupts, and JSON alone on stdout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

import wflmc

from ..cli_tools import (
    FADING,
    PATIENCE,
    SUMMARY_KEYS,
    listening,
    only_warnings,
    strict,
    with_set,
)


def test_interrupt(call, scenario, tmp_path, monkeypatch):
    from wflmc.runs import execution

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(execution, "sample", stop)
    # A real interrupt ends the process at once, and with it the tests.
    monkeypatch.setattr(os, "_exit", sys.exit)
    code, _, err = call("run", scenario, "--out", tmp_path / "run")
    assert code == 1
    assert err.splitlines()[-1].startswith("wflmc: Interrupted")


SLOW_PLAN = """
from wflmc.evaluation import burn_in
block = burn_in._run_block
def reported(*arguments):
    print("a block of compiled work", flush=True)
    return block(*arguments)
burn_in._run_block = reported
from wflmc.cli import main
main()
"""


def test_interrupting_a_real_process(scenario):
    """Ctrl-C in the middle of compiled work: exit code 1 and the sentence, no traceback, no crash."""
    overrides = [
        "sampler.burn_in=auto",
        "sampler.step_size=1e-6",
        "sampler.max_burn_in=1000000",
    ]
    with listening("-c", SLOW_PLAN, "plan", scenario, *with_set(overrides)) as process:
        for _ in range(3):
            assert process.stdout.readline() == "a block of compiled work\n", (
                process.communicate()[1]
            )
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.startswith("wflmc: Interrupted")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["plan", "-h"]])
def test_help_is_no_error(call, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert (
        "Plan which devices transmit" if arguments[:1] == ["plan"] else "federate"
    ) in out


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["federate", "x.toml"], ["'--out'"]),
        (["plan", "x.toml", "--target", "much"], ["'--target'", "'much'"]),
        (["plan"], ["'SCENARIO'"]),
    ],
)
def test_usage_errors_name_no_variable(call, arguments, facts):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert re.findall(r"'[^']*'", err) == facts
    assert err.endswith(" Try --help.\n")


def test_help_and_version(call):
    assert call("--version")[1] == f"wflmc {wflmc.__version__}\n"
    parts = {
        "plan": "Scenario file (TOML)",
        "run": "Scenario file (TOML)",
        "reproduce": "fig2 fig3a",
        "data": "mnist",
    }
    parts |= {"new": "NAME", "doctor": "what to install"}
    for command, part in parts.items():
        code, out, _ = call(command, "--help")
        assert code == 0
        assert f"Example: wflmc {command}" in out
        assert part in out


def test_help_imports_nothing_large():
    script = (
        "import sys; from wflmc.cli import app; "
        "print({'jax', 'scipy', 'pydantic', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def test_a_real_process_prints_json_alone_when_piped(scenario, tmp_path):
    """Nothing but JSON on stdout, warnings alone on stderr, and compilations cached where the user's cache is.

    ArviZ cannot write to its own part of the cache, and R-hat is there all the same.
    """
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = (
        "0"  # however fast this machine is
    )
    del environment["JAX_COMPILATION_CACHE_DIR"]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "arviz").touch()  # where a folder should be
    result = subprocess.run(
        [sys.executable, "-m", "wflmc", "run", str(scenario), "--json", *with_set(["sampler.samples=4", *FADING[:3]])],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert only_warnings(result.stderr), result.stderr
    summary = strict(result.stdout)
    assert set(summary) >= SUMMARY_KEYS
    assert summary["rhat_max"] > 1
    assert any((tmp_path / "cache" / "wflmc" / "jax").iterdir())
