"""What the figures of the paper share: curves of a table, and plans by scheme."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

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
"""Names of the power policies, in the order of the tables."""
SNR_GRID = tuple(float(snr_db) for snr_db in range(5, 45, 5))
"""In dB, of figures 6 and 8."""


class SamplerSetting(Protocol):
    """What a study's setting says of the sampler."""

    @property
    def seed(self) -> int:
        """Return the seed of starts and noise."""

    @property
    def memory(self) -> float | None:
        """Return the limit of the sampler in bytes; None for its default."""


class Curves:
    """The curves of a table: y and its standard error by scheme, on the common grid x.

    Rows without a y or a standard error have 0.
    """

    def __init__(self, rows: list[Row]) -> None:
        """Arrange the rows of a table by scheme, in the order in which they stand.

        Args:
            rows: with the same x for all schemes, sorted.
        """
        self.x = np.unique([row.x for row in rows])
        self.y: dict[str, NDArray[np.float64]] = {}
        self.error: dict[str, NDArray[np.float64]] = {}
        for scheme in dict.fromkeys(row.scheme for row in rows):
            curve = [row for row in rows if row.scheme == scheme]
            y = [row.y or 0.0 for row in curve]
            errors = [row.y_se or 0.0 for row in curve]
            self.y[scheme] = np.array(y)
            self.error[scheme] = np.array(errors)

    def ratio(self, above: str, below: str, start: float) -> NDArray[np.float64]:
        """Return the ratio of two curves.

        Nothing is known of its error: experiments of both curves share channels and
        noise and are not independent.

        Args:
            above: scheme of the numerator.
            below: scheme of the denominator.
            start: first x; smaller ones are left out.

        Returns:
            The ratio at each x from the start on.
        """
        is_used = self.x >= start
        return self.y[above][is_used] / self.y[below][is_used]

    def mean_ratio(self, above: str, below: str, start: float) -> float:
        """Return the geometric mean of the ratio of two curves.

        It is the factor between two curves that are parallel on a logarithmic scale.

        Args:
            above: scheme of the numerator.
            below: scheme of the denominator.
            start: first x; smaller ones are left out.
        """
        logarithms = np.log(self.ratio(above, below, start))
        return float(np.exp(np.mean(logarithms)))


def sample_schemes(
    setting: SamplerSetting,
    posterior: Posterior,
    plans: dict[str, list[Plan]],
    numbers: range,
    progress: Progress,
    *,
    keep_burn_in: bool = False,
) -> dict[str, Trace]:
    """Return the traces of some experiments, by scheme.

    It is one call of the sampler, with the same starts and noise for all schemes, so
    that their differences are not those of random numbers.

    Args:
        setting: seed and memory of the sampler.
        posterior: the model.
        plans: by scheme, one for each experiment.
        numbers: of the experiments, which decide their starts and noise.
        progress: called with the finished part.
        keep_burn_in: whether the traces have the rounds of burn-in.

    Returns:
        By scheme, a trace with one chain for each experiment.
    """
    all_plans = [plan for scheme_plans in plans.values() for plan in scheme_plans]
    chain_numbers = [*numbers] * len(plans)
    execution = Execution(
        memory=setting.memory,
        progress=lambda finished, rounds: progress(finished / rounds),
    )
    key = jax.random.key(setting.seed)
    trace = sample(
        key,
        posterior,
        all_plans,
        numbers=chain_numbers,
        execution=execution,
        keep_burn_in=keep_burn_in,
    )
    thetas = np.split(trace.theta, len(plans))
    clip_rates = np.split(trace.clip_rate, len(plans))
    return {
        scheme: replace(trace, theta=theta, clip_rate=clip_rate)
        for scheme, theta, clip_rate in zip(plans, thetas, clip_rates, strict=True)
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
