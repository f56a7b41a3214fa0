"""Scenarios, key sets and small tools that the tests of the command line share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import numpy as np

STATIC = """
[link]
fading = "static"
power = 1e-4
[privacy]
epsilon = 8.0
delta = 0.01
[sampler]
burn_in = 50
samples = 1
chains = 20
[policy]
schedule = "all"
"""

PLAN_KEYS = {
    "constants", "regime", "regime_share", "gain", "threshold", "active_devices", "bound", "objective", "lower_bound",
    "gap", "privacy", "exact_w2_sq", "warnings", "seconds",
}  # fmt: skip
CONSTANTS = {
    "mu", "L", "step_size", "gamma", "dim", "devices", "rounds", "burn_in", "samples", "initial_w2_sq",
}  # fmt: skip
SUMMARY_KEYS = {
    "w2_sq", "exact_w2_sq", "rhat_max", "ess_min", "clip_rate", "accuracy", "ece", "nll", "epsilon_spent", "seconds",
}  # fmt: skip


def only_warnings(err):
    """Return whether every line of stderr is a warning of the command."""
    return all(line.startswith("wflmc: warning: ") for line in err.splitlines())


def _refuse_constant(constant):
    raise AssertionError(f"{constant} in JSON")


def strict(text):
    """Parse JSON, in which NaN and Infinity are errors, as in the standard."""
    return json.loads(text, parse_constant=_refuse_constant)


def write_gains(path, table):
    """Save channel gains [rounds, devices] as h.npy in a folder."""
    np.save(path / "h.npy", table)


FADING = [
    "link.fading=rayleigh",
    "link.power=0.01",
    "policy.schedule=threshold",
    "sampler.samples=20",
]


def with_set(overrides):
    """Return command-line arguments with `--set` before each KEY=VALUE."""
    return [word for text in overrides for word in ("--set", text)]


def is_picture(path):
    """Return whether a file begins and ends like a PNG or an SVG."""
    content = path.read_bytes()
    if path.suffix == ".png":
        return content.startswith(b"\x89PNG") and b"IEND" in content[-16:]
    return b"<svg" in content[:2000] and content.rstrip().endswith(b"</svg>")


PATIENCE = 900
"""Seconds to wait for what takes a few on an idle machine: only a process that hangs
takes as long.
"""


@contextmanager
def listening(*arguments, **environment):
    """Run a Python process that reacts to Ctrl-C, even where this one ignores it as a
    job in the background.

    The process has a session of its own, which is killed at the end with all its
    children.

    Args:
        *arguments: of the Python interpreter.
        **environment: variables that are added to those of this process.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
