"""Figures 6 and 7 of the paper: many kept samples over fading channels, measured by W2² to the exact posterior."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from wflmc import channel
from wflmc.channel import Link
from wflmc.errors import InputError
from wflmc.evaluation import estimate_w2_sq, exact_w2_sq, floor_w2_sq
from wflmc.planning import POLICIES, Plan, plan_many
from wflmc.privacy import Privacy
from wflmc.sampling import sample
from wflmc.studies.engine import Point, Progress, Study, Tables, digest
from wflmc.studies.rows import Row

SCHEMES = tuple(POLICIES)
SNR_GRID = tuple(float(x) for x in range(5, 45, 5))
BURN_IN_GRID = tuple(float(x) for x in range(10, 100, 10))


@dataclass(frozen=True)
class MultiSample:
    """The paper's multi-sample study: Rayleigh fading of power 0.01, ε = 15, δ = 0.01, ℓ = 30, S = 100."""

    posterior: Any
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
        """One plan per experiment, each on a channel of its own."""
        # On an ideal link no channel is seen, and all experiments have the same plan.
        drawn = self.experiments if POLICIES[scheme].wireless else 1
        fading = channel.rayleigh(self.gain_power)
        made = plan_many(
            self.posterior,
            [Link(fading, snr_db, seed=self.seed + experiment) for experiment in range(drawn)],
            Privacy(self.epsilon, self.delta, self.clip, "paper"),
            step_size=self.step_size,
            burn_in=burn_in,
            samples=self.rounds - burn_in,
            power=scheme,
            bound="paper",
        )
        return made if drawn == self.experiments else made * self.experiments


def multi_sample_study(name: str, setting: MultiSample) -> Study:
    """Figure 6 (against SNR, S_b = 50) or figure 7 (against S_b, 30 dB)."""
    if setting.experiments < 2:
        raise InputError("--experiments", setting.experiments, "at least 2: distances are estimated over chains")

    def measure(point: Point, progress: Progress) -> Tables:
        x = float(point.x or 0)
        snr_db, burn_in = (x, setting.rounds // 2) if name == "fig6" else (30.0, int(x))
        return measure_w2(name, setting, x, snr_db, burn_in, progress)

    grid = SNR_GRID if name == "fig6" else BURN_IN_GRID
    settings = {k: v for k, v in dataclasses.asdict(setting).items() if k != "posterior"}
    identity = {**settings, "data": digest(setting.posterior)}
    return Study(name, tuple(Point(x, SCHEMES) for x in grid), SCHEMES, identity, measure)


def measure_w2(name: str, setting: MultiSample, x: float, snr_db: float, burn_in: int, progress: Progress) -> Tables:
    """Worst W2² after burn-in of every scheme at one x: from chains, by the exact law, and the estimator's floor.

    All schemes and experiments are one call of the sampler, with the same channels and noise for all schemes.
    """
    plans = {}
    for index, scheme in enumerate(SCHEMES):
        plans[scheme] = setting.plans(scheme, snr_db, burn_in)
        progress(0.5 * (index + 1) / len(SCHEMES))
    trace = sample(
        jax.random.key(setting.seed),
        setting.posterior,
        [plan for scheme in SCHEMES for plan in plans[scheme]],
        numbers=list(range(setting.experiments)) * len(SCHEMES),
        memory=setting.memory,
        keep_burn_in=True,  # one shape, hence one compilation, whatever the burn-in
        progress=lambda done, rounds: progress(0.5 + 0.3 * done / rounds),
    )
    exact, estimated = [], []
    for scheme, theta in zip(SCHEMES, np.split(trace.theta, len(SCHEMES)), strict=True):
        distance = estimate_w2_sq(theta, setting.posterior.exact)
        estimated.append(Row(name, scheme, x, distance.worst, distance.worst_se))
        law = exact_w2_sq(setting.posterior, plans[scheme])
        exact.append(Row(name, scheme, x, float(law[burn_in:].max())))
    floor, floor_se = floor_w2_sq(
        setting.posterior.exact, setting.step_size, setting.experiments, setting.rounds - burn_in
    )
    return {name: estimated, f"{name}_exact": exact, f"{name}_floor": [Row(name, "floor", x, floor, floor_se)]}
