"""A scenario as one point of a sweep: what its plan is worth and what its chains
measure, as a flat row of numbers."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from wflmc.evaluation import ExactLaw, evaluate, exact_law
from wflmc.planning import Plan
from wflmc.planning.resources import channel_uses, transmit_energy
from wflmc.runs.documents import JsonObject
from wflmc.runs.execution import sample_chains
from wflmc.runs.planning import make_plan
from wflmc.sampling import Execution
from wflmc.scenario import Inputs, Scenario, build, file_digests, plain
from wflmc.scenario.files import file_of
from wflmc.support.errors import InputError

PLANNED = (
    "exact_w2_sq",
    "objective",
    "gap",
    "exact_ess_min",
    "epsilon_spent",
    "adjacency",
    "regime",
    "burn_in",
    "channel_uses",
    "energy",
)
"""Columns of a plan."""
SAMPLED = (
    "w2_sq",
    "w2_sq_se",
    "ess_min",
    "ess_tail_min",
    "rhat_max",
    "clip_rate_burn_in",
    "clip_rate_samples",
    "example_clip_rate",
    "accuracy",
    "ece",
    "nll",
    "brier",
    "rmse",
)
"""Columns that chains add."""
SAMPLED_PROGRESS = 0.9
"""Progress of a point when all its rounds are done, and its evaluation is not."""


class PointTask(NamedTuple):
    """All that decides the row of a point."""

    scenario: Scenario
    files: dict[str, str]
    """SHA-256 of the files that the scenario reads, by key."""
    plan_only: bool
    memory: float | None

    @property
    def identity(self) -> JsonObject:
        """Return the task as plain values, by which finished points are recognised.

        Files count by their content and not by their paths: a study that was copied to
        another folder or machine continues there. What follows a path stays, as one
        file may hold several models or arrays of gains.
        """
        content: JsonObject = self.scenario.model_dump()
        for key, digest in self.files.items():
            section, _, name = key.partition(".")
            value = content[section][name]
            part = ""
            if isinstance(value, str):
                part = value.removeprefix(file_of(key, value))
            content[section][name] = f"{digest}{part}"
        return {
            "scenario": content,
            "plan_only": self.plan_only,
            "memory": self.memory,
        }


def columns(plan_only: bool) -> tuple[str, ...]:
    """Return the names of a row's numbers, in the order of sweep.csv.

    Those of the plan come first. The keys of the grid, which precede them in the file,
    are not among these.

    Args:
        plan_only: whether points are only planned, not sampled.
    """
    return PLANNED if plan_only else PLANNED + SAMPLED


def measure(task: PointTask, progress: Callable[[float], None]) -> JsonObject:
    """Return the row of a point: the numbers that `wflmc plan` or `wflmc run` shows.

    The same task gives the same row on every machine, up to float rounding; no time and
    no host name is in it.

    Args:
        task: scenario, files and whether to sample.
        progress: called with the finished fraction of the point.

    Returns:
        Plain values by column; None for numbers that are infinite or not defined.

    Raises:
        InputError: if a file differs from that of the process that made the task, or
            the scenario cannot be planned.
    """
    digests = file_digests(task.scenario)
    for key, digest in task.files.items():
        if digests[key] != digest:
            raise InputError(key, "another file", "the same file for all workers")
    inputs = build(task.scenario)
    plan = make_plan(task.scenario, inputs)
    law = exact_law(inputs.posterior, plan)
    row = _planned_values(plan, inputs, law)
    if not task.plan_only:
        row |= _sampled_values(task, inputs, plan, law, progress)
    return dict(plain(row))


def _planned_values(plan: Plan, inputs: Inputs, law: ExactLaw) -> JsonObject:
    """Return the columns of a plan."""
    exact_w2_sq = None
    if law.w2_sq is not None:
        exact_w2_sq = max(law.w2_sq[plan.burn_in :])
    energy = transmit_energy(plan, inputs.link)
    return {
        "exact_w2_sq": exact_w2_sq,
        "objective": plan.objective,
        "gap": plan.gap,
        "exact_ess_min": law.ess_min,
        "epsilon_spent": plan.epsilon_spent,
        "adjacency": plan.privacy.adjacency,
        "regime": plan.regime,
        "burn_in": plan.burn_in,
        "channel_uses": channel_uses(plan),
        "energy": None if energy is None else float(energy.sum()),
    }


def _sampled_values(
    task: PointTask,
    inputs: Inputs,
    plan: Plan,
    law: ExactLaw,
    progress: Callable[[float], None],
) -> JsonObject:
    """Run the chains of a point, and return the columns that they add."""
    seed = task.scenario.sampler.seed
    assert seed != "secret"  # refused where points are created

    def report(work_done: int, work: int) -> None:
        progress(SAMPLED_PROGRESS * work_done / work)

    with tempfile.TemporaryDirectory(prefix="wflmc-") as scratch:
        trace = sample_chains(
            jax.random.key(seed),
            task.scenario,
            inputs,
            plan,
            Path(scratch),
            execution=Execution(memory=task.memory, progress=report),
        )
        # Here, as the draws may lie in the scratch folder.
        evaluation = evaluate(trace, inputs.posterior, inputs.test, law)
    distance = evaluation.w2_sq
    values: JsonObject = {
        "w2_sq": None if distance is None else distance.worst,
        "w2_sq_se": None if distance is None else distance.worst_se,
        "ess_min": evaluation.ess_min,
        "ess_tail_min": evaluation.ess_tail_min,
        "rhat_max": evaluation.rhat_max,
        "example_clip_rate": evaluation.example_clip_rate,
    }
    for phase, rate in evaluation.clip_rate.items():
        values[f"clip_rate_{phase}"] = rate
    return values | evaluation.mean_scores
