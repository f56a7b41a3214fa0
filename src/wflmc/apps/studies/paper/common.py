"""What the figures of the paper share: curves of a table, and plans by scheme."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import Link, Plan, Trace, sample
from wflmc.apps.studies.engines import Progress
from wflmc.apps.studies.study import Row
from wflmc.planning import POLICIES, PlanRequest, plan_from, policy_named
from wflmc.posterior import Posterior
from wflmc.sampling import Execution

SCHEMES = tuple(POLICIES)
SNR_GRID = tuple(float(x) for x in range(5, 45, 5))
"""In dB, of figures 6 and 8."""


class Curves:
    """The curves of a table: y and its standard error by scheme, on the common grid x."""

    def __init__(self, rows: list[Row]) -> None:
        self.x = np.unique([row.x for row in rows])
        by_scheme = {
            row.scheme: [other for other in rows if other.scheme == row.scheme]
            for row in rows
        }
        self.y = {
            name: np.array([row.y or 0.0 for row in curve])
            for name, curve in by_scheme.items()
        }
        self.error = {
            name: np.array([row.y_se or 0.0 for row in curve])
            for name, curve in by_scheme.items()
        }

    def ratio(self, above: str, below: str, start: float) -> NDArray[np.float64]:
        """Return the ratio of two curves at the points from x = start on."""
        return self.y[above][self.x >= start] / self.y[below][self.x >= start]

    def mean_ratio(self, above: str, below: str, start: float) -> float:
        """Return the geometric mean of the ratio."""
        return float(np.exp(np.mean(np.log(self.ratio(above, below, start)))))


def sample_schemes(
    setting: Any,
    posterior: Posterior,
    plans: dict[str, list[Plan]],
    numbers: range,
    progress: Progress,
    **options: Any,
) -> dict[str, Trace]:
    """Return the traces of some experiments by scheme: one call of the sampler, the same starts and noise for all."""
    every, chains = (
        [plan for each in plans.values() for plan in each],
        [*numbers] * len(plans),
    )
    key = jax.random.key(setting.seed)
    execution = Execution(
        memory=setting.memory, progress=lambda done, rounds: progress(done / rounds)
    )
    trace = sample(
        key, posterior, every, numbers=chains, execution=execution, **options
    )
    parts = zip(
        plans,
        np.split(trace.theta, len(plans)),
        np.split(trace.clip_rate, len(plans)),
        strict=True,
    )
    return {
        name: replace(trace, theta=theta, clip_rate=clip_rate)
        for name, theta, clip_rate in parts
    }


def plans_of(
    scheme: str, posterior: Posterior, links: Sequence[Link], request: PlanRequest
) -> list[Plan]:
    """Return one plan of a scheme for each link.

    Args:
        scheme: the name of a power policy.
        posterior: the model.
        links: of the experiments.
        request: what the plans share; its link and its policy's power are replaced.

    Returns:
        The plans, in the order of the links; on an ideal link all experiments have the
        same one.
    """
    policy = replace(request.policy, power=scheme)
    if not policy_named(scheme).wireless:
        return [plan_from(posterior, replace(request, policy=policy))] * len(links)
    return [
        plan_from(posterior, replace(request, policy=policy, link=link))
        for link in links
    ]
