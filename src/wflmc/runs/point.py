"""A scenario as one point of a sweep: what its plan is worth and what its chains measure, as a flat row of numbers."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wflmc.data import SHA256
from wflmc.errors import InputError
from wflmc.evaluation import Evaluation, evaluate, exact_ess, exact_w2_sq, has_law
from wflmc.planning import Plan
from wflmc.runs.planning import make_plan
from wflmc.sampling import Trace, default_memory, sample
from wflmc.scenario.build import Inputs, build
from wflmc.scenario.files import is_data_path, plain
from wflmc.scenario.schema import Scenario

PLANNED = ("exact_w2_sq", "objective", "gap", "exact_ess_min", "epsilon_spent", "adjacency", "regime", "burn_in")
"""Columns of a plan."""
SAMPLED = (
    "w2_sq", "w2_sq_se", "ess_min", "ess_tail_min", "rhat_max", "clip_rate_burn_in", "clip_rate_samples",
    "example_clip_rate", "accuracy", "ece", "nll", "brier", "rmse",
)  # fmt: skip
"""Columns that chains add."""


class Task(NamedTuple):
    """All that decides the row of a point."""

    scenario: Scenario
    files: dict[str, str]
    """SHA-256 of the files that the scenario reads, by key."""
    plan_only: bool
    memory: float | None

    @property
    def identity(self) -> dict[str, Any]:
        """The same as plain values; files by their content, wherever they are."""
        content: dict[str, Any] = self.scenario.model_dump()
        for key, digest in self.files.items():
            section, _, name = key.partition(".")
            content[section][name] = digest
        return {"scenario": content, "plan_only": self.plan_only, "memory": self.memory}


def digests(scenario: Scenario) -> dict[str, str]:
    """SHA-256 of the files that a scenario reads, by key."""
    files = {}
    if is_data_path(scenario.posterior.data):
        files["posterior.data"] = scenario.posterior.data
    if scenario.link.fading == "file" and scenario.link.gains:
        files["link.gains"] = scenario.link.gains
    found = {key: _digest(key, path) for key, path in files.items()}
    if scenario.posterior.data == "mnist":  # which is verified whenever it is read
        found["posterior.data"] = "".join(SHA256.values())
    return found


def _digest(key: str, path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(key, path, f"a file that can be read ({error.strerror})") from None


def columns(plan_only: bool) -> tuple[str, ...]:
    """The names of a row's numbers."""
    return PLANNED if plan_only else PLANNED + SAMPLED


def measure(task: Task, progress: Callable[[float], None]) -> dict[str, Any]:
    """The row of a point, plain data: the numbers that `wflmc plan`, or `wflmc run`, would show."""
    found = digests(task.scenario)
    for key, digest in task.files.items():
        if found[key] != digest:
            section, _, name = key.partition(".")
            given = getattr(getattr(task.scenario, section), name)
            raise InputError(key, given, "the same file for all who compute; it differs here")
    inputs = build(task.scenario)
    plan = make_plan(task.scenario, inputs)
    row = _planned(inputs, plan)
    if not task.plan_only:
        with tempfile.TemporaryDirectory(prefix="wflmc-") as scratch:
            trace = _chains(task, inputs, plan, Path(scratch), progress)
            row |= _sampled(evaluate(trace, inputs.posterior, inputs.test))
    result: dict[str, Any] = plain(row)
    return result


def _planned(inputs: Inputs, plan: Plan) -> dict[str, Any]:
    law = has_law(inputs.posterior)
    return {
        "exact_w2_sq": float(exact_w2_sq(inputs.posterior, plan)[plan.burn_in :].max()) if law else None,
        "objective": plan.objective,
        "gap": plan.gap,
        "exact_ess_min": float(exact_ess(inputs.posterior, plan).min()) if law else None,
        "epsilon_spent": plan.epsilon_spent,
        "adjacency": plan.privacy.adjacency,
        "regime": plan.regime,
        "burn_in": plan.burn_in,
    }


def _chains(task: Task, inputs: Inputs, plan: Plan, scratch: Path, progress: Callable[[float], None]) -> Trace:
    sampler = task.scenario.sampler
    assert sampler.seed != "secret"  # whoever makes points has refused it
    # As in a run: samples that would not leave room for anything else go to a file at once.
    size = 4.0 * sampler.chains * (plan.rounds - plan.burn_in) * plan.dim
    large = size > (task.memory or default_memory()) / 2
    return sample(
        jax.random.key(sampler.seed),
        inputs.posterior,
        plan,
        chains=sampler.chains,
        memory=task.memory,
        store=scratch / "theta.npy" if large else None,
        progress=lambda done, rounds: progress(0.9 * done / rounds),
    )


def _sampled(evaluation: Evaluation) -> dict[str, Any]:
    distance = evaluation.w2_sq
    return {
        "w2_sq": None if distance is None else distance.worst,
        "w2_sq_se": None if distance is None else distance.worst_se,
        "ess_min": evaluation.ess_min,
        "ess_tail_min": evaluation.ess_tail_min,
        "rhat_max": evaluation.rhat_max,
        "clip_rate_burn_in": evaluation.clip_rate["burn_in"],
        "clip_rate_samples": evaluation.clip_rate["samples"],
        "example_clip_rate": evaluation.example_clip_rate,
        **evaluation.mean_scores,
    }
