"""Figures 6 and 7 of the paper: many kept samples over fading channels, measured by W2² to the exact posterior."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from wflmc import InputError, Link, Plan, Policy, Privacy, channel
from wflmc.apps.studies.cache import identity_of
from wflmc.apps.studies.engines import Progress, part_of
from wflmc.apps.studies.paper.common import (
    SCHEMES,
    SNR_GRID,
    Curves,
    plans_of,
    sample_schemes,
)
from wflmc.apps.studies.study import Claim, Point, Row, Study, Tables
from wflmc.evaluation import estimate_w2_sq, exact_w2_sq, floor_w2_sq
from wflmc.planning import PlanRequest
from wflmc.posterior import GaussianPosterior

BURN_IN_GRID = tuple(float(x) for x in range(10, 100, 10))


@dataclass(frozen=True)
class MultiSample:
    """The paper's multi-sample study: Rayleigh fading of power 0.01, ε = 15, δ = 0.01, ℓ = 30, S = 100."""

    posterior: GaussianPosterior
    experiments: int = 100
    gain_power: float = 0.01
    epsilon: float = 15.0
    delta: float = 0.01
    clip: float = 30.0
    rounds: int = 100
    step_factor: float = 0.4
    seed: int = 0
    memory: float | None = None
    """Limit of the sampler, in bytes; results depend on it by float rounding."""

    @property
    def step_size(self) -> float:
        """η = 0.4/(μ + L)."""
        return float(self.step_factor / (self.posterior.mu + self.posterior.L))

    def plans(self, scheme: str, snr_db: float, burn_in: int) -> list[Plan]:
        """Return one plan per experiment, by the paper's bound and accountant.

        Each experiment has a channel of its own.

        Args:
            scheme: the name of a power policy.
            snr_db: of the links.
            burn_in: S_b.
        """
        return plans_of(
            scheme, self.posterior, self.links(snr_db), self.request(snr_db, burn_in)
        )

    def links(self, snr_db: float) -> list[Link]:
        """Return the channels of the experiments."""
        fading = channel.rayleigh(self.gain_power)
        seeds = range(self.seed, self.seed + self.experiments)
        return [Link(fading, snr_db, seed=seed) for seed in seeds]

    def request(self, snr_db: float, burn_in: int) -> PlanRequest:
        """Return what the paper's plans have in common."""
        return PlanRequest(
            link=self.links(snr_db)[0],
            privacy=Privacy(self.epsilon, self.delta, self.clip, "paper"),
            step_size=self.step_size,
            burn_in=burn_in,
            samples=self.rounds - burn_in,
            policy=Policy(bound="paper"),
        )


def multi_sample_study(name: str, setting: MultiSample) -> Study:
    """Return figure 6 (against SNR, S_b = 50) or figure 7 (against S_b, 30 dB)."""
    if setting.experiments < 2:
        raise InputError(
            "--experiments",
            setting.experiments,
            "at least 2: distances are estimated over chains",
        )

    def measure(point: Point, progress: Progress) -> Tables:
        x = float(point.x or 0)
        snr_db, burn_in = (x, setting.rounds // 2) if name == "fig6" else (30.0, int(x))
        return measure_w2(name, setting, x, snr_db, burn_in, progress)

    grid = SNR_GRID if name == "fig6" else BURN_IN_GRID
    return Study(
        name,
        tuple(Point(x, SCHEMES) for x in grid),
        SCHEMES,
        identity_of(setting, "posterior"),
        measure,
    )


def measure_w2(
    name: str,
    setting: MultiSample,
    x: float,
    snr_db: float,
    burn_in: int,
    progress: Progress,
) -> Tables:
    """Measure the worst W2² after burn-in of every scheme: from chains, by the exact law, and the estimator's floor.

    All schemes and experiments are one call of the sampler, with the same channels and noise for all schemes.
    """
    plans = {}
    for index, scheme in enumerate(SCHEMES):
        plans[scheme] = setting.plans(scheme, snr_db, burn_in)
        progress(0.5 * (index + 1) / len(SCHEMES))
    posterior = setting.posterior
    # With burn-in kept there is one shape, hence one compilation, whatever the burn-in.
    numbers, sampled = range(setting.experiments), part_of(progress, 0.5, 0.3)
    traces = sample_schemes(
        setting, posterior, plans, numbers, sampled, keep_burn_in=True
    )
    exact, estimated = [], []
    for scheme, trace in traces.items():
        distance = estimate_w2_sq(trace.theta, posterior.exact)
        estimated.append(Row(name, scheme, x, distance.worst, distance.worst_se))
        exact.append(
            Row(
                name,
                scheme,
                x,
                float(exact_w2_sq(posterior, plans[scheme])[burn_in:].max()),
            )
        )
    floor = floor_w2_sq(
        posterior.exact,
        setting.step_size,
        setting.experiments,
        setting.rounds - burn_in,
    )
    return {
        name: estimated,
        f"{name}_exact": exact,
        f"{name}_floor": [Row(name, "floor", x, *floor)],
    }


def _largest_rise(curves: Curves) -> float:
    """Return the largest rise from one S_b to the next, in combined standard errors (relative where there are none)."""
    rises = []
    for name, y in curves.y.items():
        error = np.hypot(curves.error[name][1:], curves.error[name][:-1])
        rises.append(np.max((y[1:] - y[:-1]) / np.where(error > 0, error, y[:-1])))
    return float(np.max(rises))


Measured = tuple[
    str, str, float | str, Callable[[Curves], float], tuple[float, float], str
]
"""A figure, a statement, the paper's number, how it is measured, the open interval in which it holds, and a note with
the same number by the exact laws."""
STATED: tuple[Measured, ...] = (
    ("fig6", "equal over optimized from 20 dB on: mean ratio", 2.4,
     lambda curves: curves.mean_ratio("equal", "optimized", 20), (1.8, 3.2),
     "the ratio of the exact laws is {:.2f}; the estimator's floor hides part of it"),
    ("fig6", "optimized reaches noiseless-DP: mean ratio from 25 dB on", 1.0,
     lambda curves: curves.mean_ratio("optimized", "noiseless-dp", 25), (0.0, 1.1), "{:.2f} by the exact laws"),
    ("fig6", "without DP, noiseless LMC is reached by 20 dB: ratio", 1.0,
     lambda curves: float(curves.ratio("no-dp", "noiseless", 20)[0]), (0.0, 1.25),
     "only because of the estimator's floor: {:.2f} by the exact laws"),
    ("fig7", "all schemes fall with S_b: largest rise in standard errors", "≤ 0",
     _largest_rise, (-np.inf, 1.0), "largest relative rise of the exact laws {:.1%}"),
    ("fig7", "equal over optimized from S_b = 40 on: smallest ratio", "> 1",
     lambda curves: float(curves.ratio("equal", "optimized", 40).min()), (1.0, np.inf), "{:.2f} by the exact laws"),
)  # fmt: skip


def claims(tables: Tables) -> Iterator[Claim]:
    """Yield the outcomes stated of those of figures 6 and 7 that are among the tables."""
    for name, statement, paper, number, (low, high), note in STATED:
        if name in tables:
            ours, exact = (
                number(Curves(tables[table])) for table in (name, f"{name}_exact")
            )
            yield Claim(
                name, statement, paper, ours, low < ours < high, note=note.format(exact)
            )
