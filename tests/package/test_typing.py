"""The types that programs built on the package are checked with."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import wflmc

from ..conftest import FULL

PACKAGE = Path(wflmc.__file__).parent

GOOD = """
import jax
import numpy as np
from numpy.typing import NDArray

import wflmc

posterior: wflmc.posterior.GaussianPosterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
link: wflmc.Link = wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=20)
privacy: wflmc.Privacy = wflmc.Privacy(epsilon=15, delta=0.01, clip=30)
step_size: float = 0.4 / (posterior.mu + posterior.L)
plan: wflmc.Plan = wflmc.plan(posterior, link, privacy, step_size=step_size, burn_in=50, samples=50)
ideal: wflmc.Plan = wflmc.plan(posterior)
trace: wflmc.Trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=100)
found: wflmc.evaluation.Evaluation = wflmc.evaluate(trace, posterior)
spent: float | None = plan.epsilon_spent
gain: NDArray[np.float64] = plan.gain
mean: NDArray[np.float64] = posterior.exact.mean
report: wflmc.audit.AuditReport = wflmc.audit.audit(jax.random.key(2), plan, posterior)
print(repr(plan), found, report, trace.to_arviz().posterior)
"""
WRONG = {
    "plan = wflmc.plan(posterior, link, privacy, step_size=step_size, burn_in='50', samples=50)": "arg-type",
    "plan = wflmc.Link(wflmc.channel.static())": "assignment",
    "print(plan.epsilon_spend)": "attr-defined",
    "wflmc.sample(jax.random.key(1), posterior)": "call-arg",
}


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_every_property_of_a_plan_has_a_type():
    assert {field.name for field in fields(wflmc.Plan)} == set(
        wflmc.Plan.__annotations__
    )
    properties = {
        name: value
        for name, value in vars(wflmc.Plan).items()
        if isinstance(value, property)
    }
    assert {
        "gain",
        "step_size",
        "scale",
        "noise_power",
        "loss",
        "clips_at",
        "epsilon_spent",
    } <= set(properties)
    for name, value in properties.items():
        assert value.fget.__annotations__["return"] is not Any, name
        assert value.__doc__, name


@pytest.mark.skipif(not FULL, reason="mypy takes half a minute: make test-full runs it")
def test_mypy_knows_the_types_of_the_public_functions(tmp_path):
    pytest.importorskip(
        "mypy", reason="mypy is not installed: pip install 'wflmc[dev]'"
    )
    file = tmp_path / "downstream.py"
    file.write_text(GOOD + "\n".join(WRONG) + "\n", encoding="utf-8")
    options = [
        "--strict",
        "--follow-imports=silent",
        "--config-file=",
        f"--cache-dir={tmp_path / 'cache'}",
    ]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, file.name], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "MYPYPATH": str(PACKAGE.parent)},
    )  # fmt: skip
    first = GOOD.count("\n") + 1
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert [
        (int(line.split(":")[1]), line.rsplit("[", 1)[-1].rstrip("]"))
        for line in errors
    ] == list(enumerate(WRONG.values(), first)), checked.stdout + checked.stderr
