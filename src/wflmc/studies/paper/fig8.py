"""Figure 8 of the paper (MNIST, calibration against SNR), and what it leaves open: unlike devices and clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import channel
from wflmc.baselines import sbfl
from wflmc.channel import Link
from wflmc.data import Features
from wflmc.errors import InputError
from wflmc.evaluation import Calibration, predictive_scores
from wflmc.planning import POLICIES, Plan, plan_many
from wflmc.posterior import SoftmaxPosterior, softmax_regression
from wflmc.privacy import Privacy
from wflmc.sampling import sample
from wflmc.studies.paper.claim import Claim, Curves
from wflmc.studies.study import Point, Progress, Row, Study, Tables, digest, part_of

IDEAL = tuple(name for name, policy in POLICIES.items() if not policy.wireless)
"""Schemes on an ideal link: the same at every SNR."""
ORDER = (*POLICIES, "sbfl")
SNR_GRID = tuple(float(x) for x in range(5, 45, 5))
SCORES = ("ece", "accuracy", "nll", "brier")
PARTITIONS = ("blocks", "dirichlet:1", "dirichlet:0.1", "by-label")
"""From devices alike to devices that hold one class each."""
CLIPS = (30.0, 100.0, 300.0, 1000.0, 3000.0)
PAIRS = (("equal", "optimized"), ("optimized", "no-dp"))
"""Schemes whose calibration errors are also compared experiment by experiment."""
BATCH = 10
"""Experiments between two looks at the standard error, where a study may stop early."""

Values = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Mnist:
    """The paper's MNIST study: Rayleigh fading of power 1e-4, ε = 50, δ = 0.1, ℓ = 300, S = 600, η = 2/(μ + L)."""

    features: Features
    experiments: int = 50
    devices: int = 30
    gain_power: float = 1e-4
    epsilon: float = 50.0
    delta: float = 0.1
    clip: float = 300.0
    burn_in: int = 550
    samples: int = 50
    partition: str = "blocks"
    step_factor: float = 2.0
    seed: int = 0
    stop_se: float | None = None
    """Stop a point when the standard error of every scheme's calibration error is this share of it."""
    memory: float | None = None
    """Limit of the sampler, in bytes; results depend on it by float rounding."""

    def __post_init__(self) -> None:
        if self.experiments < 1:
            raise InputError("--experiments", self.experiments, "at least 1")

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the results, as plain values."""
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k != "features"}
        return {**settings, "data": digest(self.features)}

    def posterior(self) -> SoftmaxPosterior:
        """The training data over the devices."""
        X, y = self.features.X, self.features.y
        return softmax_regression(jax.random.key(self.seed), self.devices, X=X, y=y, partition=self.partition)

    def plans(self, posterior: SoftmaxPosterior, scheme: str, links: Sequence[Link]) -> list[Plan]:
        """One plan for each link, by the paper's bound and accountant, for the average over the kept rounds."""
        wireless = POLICIES[scheme].wireless  # on an ideal link all experiments have the same plan
        made = plan_many(
            posterior,
            links if wireless else links[:1],
            Privacy(self.epsilon, self.delta, self.clip, "paper"),
            step_size=self.step_factor / (posterior.mu + posterior.L),
            burn_in=self.burn_in,
            samples=self.samples,
            power=scheme,
            objective="average",
            bound="paper",
            initial_w2_sq=0.0,  # adds the same to every plan's objective
        )
        return made if wireless else made * len(links)

    def score(self, posterior: SoftmaxPosterior, theta: NDArray[Any]) -> Calibration:
        """Test scores of theta[chain, draw, m], one per chain."""
        return predictive_scores(posterior, theta, self.features.X_test, self.features.y_test)


def mnist_study(setting: Mnist) -> Study:
    """Figure 8: calibration error, accuracy, log-likelihood and Brier score on the test set against SNR."""
    posterior = setting.posterior()
    wireless = tuple(scheme for scheme in ORDER if scheme not in IDEAL)

    def measure(point: Point, progress: Progress) -> Tables:
        # The ideal schemes never look at the SNR; any will do.
        values = _batches(setting, posterior, point.schemes, 0.0 if point.x is None else point.x, progress)
        x = 0.0 if point.x is None else point.x
        scores = {scheme: {name: own[name] for name in SCORES} for scheme, own in values.items()}
        tables = _tables("fig8", scores, x)
        if set(PAIRS[0]) <= set(values):
            tables["fig8_paired"] = [_paired(values, *pair, x) for pair in PAIRS]
        return tables

    points = (Point(None, IDEAL), *(Point(x, wireless) for x in SNR_GRID))
    return Study("fig8", points, ORDER, setting.identity, measure)


def heterogeneity_study(setting: Mnist, snr_db: float = 30.0) -> Study:
    """Test scores of the optimised scheme against the clipping threshold, for devices alike and unlike."""

    def measure(point: Point, progress: Progress) -> Tables:
        (partition,), clip = point.schemes, float(point.x or 0)
        own = dataclasses.replace(setting, partition=partition, clip=clip)
        values = _batches(own, own.posterior(), ("optimized",), snr_db, progress)
        return _tables("heterogeneity", {partition: values["optimized"]}, clip)

    points = tuple(Point(clip, (partition,)) for partition in PARTITIONS for clip in CLIPS)
    return Study("heterogeneity", points, PARTITIONS, {**setting.identity, "snr_db": snr_db}, measure)


def _batches(
    setting: Mnist, posterior: SoftmaxPosterior, schemes: Sequence[str], snr_db: float, progress: Progress
) -> dict[str, Values]:
    """Scores of every scheme in every experiment; all in one call, or batch by batch until they are known well."""
    size = setting.experiments if setting.stop_se is None else BATCH
    found: dict[str, list[Values]] = {scheme: [] for scheme in schemes}
    for first in range(0, setting.experiments, size):
        numbers = range(first, min(first + size, setting.experiments))
        part_done = part_of(progress, first / setting.experiments, len(numbers) / setting.experiments)
        part = _experiments(setting, posterior, schemes, snr_db, numbers, part_done)
        for scheme, values in part.items():
            found[scheme].append(values)
        joined = {s: {k: np.concatenate([v[k] for v in parts]) for k in parts[0]} for s, parts in found.items()}
        if setting.stop_se is not None and all(_known(v["ece"], setting.stop_se) for v in joined.values()):
            break
    return joined


def _known(values: NDArray[np.float64], share: float) -> bool:
    return bool(values.size > 1 and values.std(ddof=1) / values.size**0.5 <= share * values.mean())


def _experiments(
    setting: Mnist,
    posterior: SoftmaxPosterior,
    schemes: Sequence[str],
    snr_db: float,
    numbers: Sequence[int],
    progress: Progress,
) -> dict[str, Values]:
    """Scores of some experiments: the same channels, starts and noise for all schemes."""
    fading, key = channel.rayleigh(setting.gain_power), jax.random.key(setting.seed)
    links = [Link(fading, snr_db, seed=setting.seed + number) for number in numbers]
    langevin = [scheme for scheme in schemes if scheme in POLICIES]
    trace = sample(
        key,
        posterior,
        [plan for scheme in langevin for plan in setting.plans(posterior, scheme, links)],
        numbers=list(numbers) * len(langevin),
        memory=setting.memory,
        progress=lambda done, rounds: progress(0.9 * done / rounds),
    )
    thetas = dict(zip(langevin, np.split(trace.theta, len(langevin)), strict=True))
    rates = dict(zip(langevin, np.split(trace.clip_rate.mean(1), len(langevin)), strict=True))
    if "sbfl" in schemes:
        rounds = setting.burn_in + setting.samples
        thetas["sbfl"] = sbfl(key, posterior, links, rounds=rounds, numbers=numbers)[:, None]
    result = {}
    for scheme, theta in thetas.items():
        scores = setting.score(posterior, theta)
        result[scheme] = {name: getattr(scores, name) for name in SCORES}
        if scheme in rates:
            result[scheme]["clip_rate"] = rates[scheme].astype(float)
    return result


def _paired(values: dict[str, Values], above: str, below: str, x: float) -> Row:
    """The mean difference of two schemes' calibration errors, which share channels and noise."""
    found = values[above]["ece"] - values[below]["ece"]
    error = float(found.std(ddof=1) / found.size**0.5) if found.size > 1 else None
    return Row("fig8", f"{above} - {below}", x, float(found.mean()), error)


def _tables(name: str, values: dict[str, Values], x: float) -> Tables:
    """Means and standard errors over experiments; the table of the study's own name holds the calibration error."""
    tables: Tables = {}
    for scheme, scores in values.items():
        for score, found in scores.items():
            table = name if score == "ece" else f"{name}_{score}"
            error = float(found.std(ddof=1) / found.size**0.5) if found.size > 1 else None
            tables.setdefault(table, []).append(Row(name, scheme, x, float(found.mean()), error))
    return tables


def claims_fig8(tables: Tables) -> list[Claim]:
    ece = Curves(tables["fig8"])
    langevin = [name for name in ece.y if name != "sbfl"]
    worst = np.max([ece.y[name] for name in langevin], axis=0)
    paired = Curves(tables["fig8_paired"])
    over, error = paired.y["optimized - no-dp"], paired.error["optimized - no-dp"]
    high = ece.x >= 20.0
    gain, gain_error = paired.y["equal - optimized"][high], paired.error["equal - optimized"][high]
    # Too little to see or to be sure of; with many experiments paired errors are smaller than what can be seen.
    same = np.abs(over) < np.maximum(0.01 * ece.y["optimized"], 2 * error)
    level = ", ".join(f"{x:g}" for x in ece.x[same])
    return [
        Claim(
            "fig8",
            "SBFL is worse calibrated than every WFLMC scheme: smallest ratio of ECE",
            "> 1",
            float(np.min(ece.y["sbfl"] / worst)),
            bool(np.all(ece.y["sbfl"] > worst)),
            note="SBFL starts where the chains start; 20 iterations",
        ),
        Claim(
            "fig8",
            "without DP, ECE is the lowest: smallest margin of optimized over it",
            "≥ 0",
            float(np.min(over)),
            bool(np.all((over >= 0) | same)),
            note=f"within 1 % or two errors at {level or 'no'} dB; paired errors up to {error.max():.1g}",
        ),
        Claim(
            "fig8",
            "optimized is no worse than equal from 20 dB on: mean difference of ECE",
            "≥ 0",
            float(np.mean(gain)),
            bool(np.all(gain >= -2 * gain_error)),
            note=f"paired standard error {gain_error.max():.1g} at each SNR",
        ),
    ]
