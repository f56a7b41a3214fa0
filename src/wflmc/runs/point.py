"""A scenario as one point of a sweep: what its plan is worth and what its chains measure, as a flat row of numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wflmc.errors import InputError
from wflmc.evaluation import Evaluation, evaluate, exact_law
from wflmc.planning import Plan
from wflmc.runs.execution import store_for
from wflmc.runs.planning import make_plan
from wflmc.sampling import Trace, sample
from wflmc.scenario.build import Inputs, build
from wflmc.scenario.files import file_digests, plain
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


def columns(plan_only: bool) -> tuple[str, ...]:
    """Return the names of a row's numbers."""
    return PLANNED if plan_only else PLANNED + SAMPLED


def measure(task: Task, progress: Callable[[float], None]) -> dict[str, Any]:
    """Return the row of a point, plain data: the numbers that `wflmc plan`, or `wflmc run`, would show."""
    digests = file_digests(task.scenario)
    for key, digest in task.files.items():
        if digests[key] != digest:
            raise InputError(key, "another file", "the same file for all workers")
    inputs = build(task.scenario)
    plan = make_plan(task.scenario, inputs)
    row: dict[str, Any] = {name: getattr(plan, name) for name in ("objective", "gap", "epsilon_spent", "regime")}
    row |= {"adjacency": plan.privacy.adjacency, "burn_in": plan.burn_in}
    if task.plan_only:
        law = exact_law(inputs.posterior, plan)
        row |= {"exact_w2_sq": law.w2_sq, "exact_ess_min": law.ess_min}
    else:
        with tempfile.TemporaryDirectory(prefix="wflmc-") as scratch:
            trace = _sample(task, inputs, plan, Path(scratch), progress)
            row |= _sampled(evaluate(trace, inputs.posterior, inputs.test))
    if row["exact_w2_sq"] is not None:
        row["exact_w2_sq"] = max(row["exact_w2_sq"][plan.burn_in :])
    result: dict[str, Any] = plain(row)
    return result


def _sample(task: Task, inputs: Inputs, plan: Plan, scratch: Path, progress: Callable[[float], None]) -> Trace:
    sampler = task.scenario.sampler
    assert sampler.seed != "secret"  # whoever makes points has refused it
    return sample(
        jax.random.key(sampler.seed),
        inputs.posterior,
        plan,
        chains=sampler.chains,
        memory=task.memory,
        store=store_for((sampler.chains, len(plan.rounds) - plan.burn_in, plan.dim), task.memory, scratch),
        progress=lambda done, rounds: progress(0.9 * done / rounds),
    )


def _sampled(evaluation: Evaluation) -> dict[str, Any]:
    distance = evaluation.w2_sq
    same = ("exact_w2_sq", "exact_ess_min", "ess_min", "ess_tail_min", "rhat_max", "example_clip_rate")
    return {
        **{name: getattr(evaluation, name) for name in same},
        **{f"clip_rate_{when}": rate for when, rate in evaluation.clip_rate.items()},
        **evaluation.mean_scores,
        "w2_sq": None if distance is None else distance.worst,
        "w2_sq_se": None if distance is None else distance.worst_se,
    }
