"""A scenario as one point of a sweep: what its plan is worth and what its chains measure, as a flat row of numbers."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wflmc.evaluation import evaluate, exact_law
from wflmc.planning.resources import channel_uses, transmit_energy
from wflmc.runs.execution import sample_chains
from wflmc.runs.planning import make_plan
from wflmc.sampling import Execution
from wflmc.scenario import Scenario, build, file_digests, plain
from wflmc.support.errors import InputError

PLANNED = (
    "exact_w2_sq", "objective", "gap", "exact_ess_min", "epsilon_spent", "adjacency", "regime", "burn_in",
    "channel_uses", "energy",
)  # fmt: skip
"""Columns of a plan."""
SAMPLED = (
    "w2_sq", "w2_sq_se", "ess_min", "ess_tail_min", "rhat_max", "clip_rate_burn_in", "clip_rate_samples",
    "example_clip_rate", "accuracy", "ece", "nll", "brier", "rmse",
)  # fmt: skip
"""Columns that chains add."""


class PointTask(NamedTuple):
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


def measure(task: PointTask, progress: Callable[[float], None]) -> dict[str, Any]:
    """Return the row of a point, plain data: the numbers that `wflmc plan`, or `wflmc run`, would show."""
    digests = file_digests(task.scenario)
    for key, digest in task.files.items():
        if digests[key] != digest:
            raise InputError(key, "another file", "the same file for all workers")
    inputs = build(task.scenario)
    plan = make_plan(task.scenario, inputs)
    law = exact_law(inputs.posterior, plan)
    row: dict[str, Any] = {
        name: getattr(plan, name)
        for name in ("objective", "gap", "epsilon_spent", "regime")
    }
    row |= {
        "adjacency": plan.privacy.adjacency,
        "burn_in": plan.burn_in,
        "exact_ess_min": law.ess_min,
    }
    row["exact_w2_sq"] = None if law.w2_sq is None else max(law.w2_sq[plan.burn_in :])
    energy = transmit_energy(plan, inputs.link)
    row["channel_uses"] = channel_uses(plan)
    row["energy"] = None if energy is None else float(energy.sum())
    if not task.plan_only:
        assert (
            task.scenario.sampler.seed != "secret"
        )  # whoever makes points has refused it
        seeded = jax.random.key(task.scenario.sampler.seed)
        with tempfile.TemporaryDirectory(prefix="wflmc-") as scratch:
            execution = Execution(
                memory=task.memory,
                progress=lambda done, rounds: progress(0.9 * done / rounds),
            )
            trace = sample_chains(
                seeded, task.scenario, inputs, plan, Path(scratch), execution=execution
            )
            found = evaluate(trace, inputs.posterior, inputs.test, law)
        rates = {f"clip_rate_{when}": rate for when, rate in found.clip_rate.items()}
        same = {
            name: getattr(found, name)
            for name in ("ess_min", "ess_tail_min", "rhat_max", "example_clip_rate")
        }
        distance = (
            {}
            if found.w2_sq is None
            else {"w2_sq": found.w2_sq.worst, "w2_sq_se": found.w2_sq.worst_se}
        )
        row |= {
            "w2_sq": None,
            "w2_sq_se": None,
            **distance,
            **same,
            **rates,
            **found.mean_scores,
        }
    return dict(plain(row))
