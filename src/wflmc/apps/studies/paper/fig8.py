"""Figure 8 of the paper (MNIST, calibration against SNR), and what it leaves open: unlike devices and clipping."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import (
    Link,
    Plan,
    Policy,
    Privacy,
    Sampler,
    channel,
    release_whitening,
    softmax_regression,
)
from wflmc.apps import baselines
from wflmc.apps.studies.cache import identity_of
from wflmc.apps.studies.engines import Progress, part_of
from wflmc.apps.studies.paper.common import (
    SCHEMES,
    SNR_GRID,
    Curves,
    plans_of,
    sample_schemes,
)
from wflmc.apps.studies.study import Claim, Point, Study, Tables, mean_row
from wflmc.data.sets import Features
from wflmc.evaluation import predictive_scores
from wflmc.planning import POLICIES, PlanRequest
from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy.whitening import Release

IDEAL = tuple(name for name, policy in POLICIES.items() if not policy.wireless)
"""Schemes on an ideal link: the same at every SNR."""
ORDER = (*SCHEMES, "sbfl")
SCORES = ("ece", "accuracy", "nll", "brier")
PARTITIONS = ("blocks", "dirichlet:1", "dirichlet:0.1", "by-label")
"""From devices alike to devices that hold one class each."""
CLIPS = (30.0, 100.0, 300.0, 1000.0, 3000.0)
PAIRS = (("equal", "optimized"), ("optimized", "no-dp"))
"""Schemes that share channels and noise, whose calibration errors are also compared experiment by experiment."""
BATCH = 10
"""Experiments between two checks of the standard error, where a study may stop early."""

Scores = dict[str, dict[str, NDArray[np.float64]]]
"""Scores by scheme and name, one of each for every experiment."""


@dataclass(frozen=True)
class Mnist:
    """The paper's MNIST study: Rayleigh fading of power 1e-4, ε = 50, δ = 0.1, ℓ = 300, S = 600, η = 2/(μ + L)."""

    features: Features
    experiments: int = 50
    devices: int = 30
    gain_power: float = 1e-4
    snr_db: float = 20.0
    epsilon: float | None = 50.0
    delta: float | None = 0.1
    clip: float = 300.0
    example_clip: float | None = None
    accountant: str = "paper"
    bound: str = "paper"
    burn_in: int = 550
    samples: int = 50
    partition: str = "blocks"
    intercept: bool = False
    whiten: str = "none"
    """Whitened coordinates: none, public, or private, which are paid for from the privacy budget."""
    step_factor: float = 2.0
    init: str = "prior"
    seed: int = 0
    stop_se: float | None = None
    """Stop a point when the standard error of every scheme's calibration error is this share of it."""
    memory: float | None = None
    """Limit of the sampler, in bytes; results depend on it by float rounding."""

    @property
    def privacy(self) -> Privacy:
        """Return the promise to the devices."""
        unit = "device" if self.example_clip is None else "record"
        accountant = "exact" if self.epsilon is None else self.accountant
        return Privacy(
            self.epsilon, self.delta, self.clip, accountant, unit, self.example_clip
        )

    def posterior(self) -> SoftmaxPosterior:
        """Return the posterior of the training data over the devices, whitened where the coordinates are public."""
        X, y, key = self.features.X, self.features.y, jax.random.key(self.seed)
        plain = softmax_regression(
            key,
            self.devices,
            X=X,
            y=y,
            partition=self.partition,
            intercept=self.intercept,
        )
        return plain.whitened() if self.whiten == "public" else plain

    def links(self, numbers: Sequence[int]) -> list[Link]:
        """Return the channels of some experiments."""
        fading = channel.rayleigh(self.gain_power)
        return [
            Link(fading, self.snr_db, seed=self.seed + number) for number in numbers
        ]

    def plans(
        self,
        posterior: SoftmaxPosterior,
        scheme: str,
        links: Sequence[Link],
        release: Release | None = None,
    ) -> list[Plan]:
        """Return one plan for each link, for the average over the kept rounds.

        Args:
            posterior: the model.
            scheme: the name of a power policy.
            links: of the experiments.
            release: that has paid for the posterior's coordinates, before the first round.
        """
        request = PlanRequest(
            link=links[0],
            privacy=self.privacy,
            step_size=self.step_factor / (posterior.mu + posterior.L),
            burn_in=self.burn_in,
            samples=self.samples,
            sampler=Sampler(
                init=self.init, start=0 if release is None else len(release.loss)
            ),
            policy=Policy(objective="average", bound=self.bound),
            ledger=None if release is None else release.spent,
            initial_w2_sq=0.0,  # which adds the same to the bound of every plan
        )
        return plans_of(scheme, posterior, links, request)


class Recipe(TypedDict, total=False):
    """What differs from the setting of figure 8."""

    snr_db: float
    epsilon: float | None
    delta: float | None
    clip: float
    example_clip: float | None
    accountant: str
    bound: str
    burn_in: int
    samples: int
    partition: str
    intercept: bool
    whiten: str
    step_factor: float
    init: str


def mnist_study(setting: Mnist) -> Study:
    """Return figure 8: calibration error, accuracy, log-likelihood and Brier score on the test set against SNR."""
    posterior = setting.posterior()
    wireless = tuple(scheme for scheme in ORDER if scheme not in IDEAL)

    def measure(point: Point, progress: Progress) -> Tables:
        x = point.x or 0.0  # schemes without an x do not depend on the SNR
        values = _batches(
            dataclasses.replace(setting, snr_db=x), posterior, point.schemes, progress
        )
        tables = tables_of("fig8", values, x, SCORES)
        if set(PAIRS[0]) <= set(values):
            pairs = {
                f"{one} - {other}": values[one]["ece"] - values[other]["ece"]
                for one, other in PAIRS
            }
            tables["fig8_paired"] = [
                mean_row("fig8", name, x, difference)
                for name, difference in pairs.items()
            ]
        return tables

    points = (Point(None, IDEAL), *(Point(x, wireless) for x in SNR_GRID))
    return Study("fig8", points, ORDER, identity_of(setting, "features"), measure)


def heterogeneity_study(setting: Mnist) -> Study:
    """Return test scores at 30 dB against the clipping threshold, for devices alike and unlike."""
    recipes: dict[str, Recipe] = {
        partition: {"partition": partition, "snr_db": 30.0} for partition in PARTITIONS
    }
    return recipes_study("heterogeneity", setting, recipes, "clip", CLIPS, "clip_rate")


def recipes_study(
    name: str,
    setting: Mnist,
    recipes: Mapping[str, Recipe],
    varies: Literal["snr_db", "clip"],
    grid: Sequence[float],
    score: str,
) -> Study:
    """Return test scores of the optimised scheme, a curve for every recipe.

    Args:
        recipes: what differs from the setting, by the name of the curve.
        varies: the field of the setting that is x.
        score: what is tabulated beside `SCORES`.
    """
    posteriors: dict[tuple[str, bool, str], SoftmaxPosterior] = {}

    def measure(point: Point, progress: Progress) -> Tables:
        (scheme,) = point.schemes
        x = float(point.x or 0)
        at_x: Recipe = {"clip": x} if varies == "clip" else {"snr_db": x}
        changed = dataclasses.replace(setting, **recipes[scheme])
        changed = dataclasses.replace(changed, **at_x)
        kind = changed.partition, changed.intercept, changed.whiten
        if kind not in posteriors:
            posteriors[kind] = changed.posterior()
        values = _batches(changed, posteriors[kind], ("optimized",), progress)
        return tables_of(name, {scheme: values["optimized"]}, x, (*SCORES, score))

    points = tuple(Point(x, (scheme,)) for x in grid for scheme in recipes)
    return Study(
        name,
        points,
        tuple(recipes),
        {**identity_of(setting, "features"), "recipes": recipes},
        measure,
    )


def _joined(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all experiments."""
    return jax.tree.map(lambda *values: np.concatenate(values), *parts)


def _batches(
    setting: Mnist,
    posterior: SoftmaxPosterior,
    schemes: Sequence[str],
    progress: Progress,
) -> Scores:
    """Return scores of every scheme in every experiment; all at once, or by batches until the error is small enough."""
    count, share = setting.experiments, setting.stop_se
    size = count if share is None else BATCH
    batches: list[Scores] = []
    for first in range(0, count, size):
        numbers = range(first, min(first + size, count))
        batch_progress = part_of(progress, first / count, len(numbers) / count)
        batches.append(
            experiments(setting, posterior, schemes, numbers, batch_progress)
        )
        means = [
            mean_row("fig8", scheme, 0.0, values["ece"])
            for scheme, values in _joined(batches).items()
        ]
        if share is not None and all(
            row.y_se is not None and row.y_se <= share * row.y for row in means if row.y
        ):
            break
    return _joined(batches)


def experiments(
    setting: Mnist,
    posterior: SoftmaxPosterior,
    schemes: Sequence[str],
    numbers: range,
    progress: Progress,
    release: Release | None = None,
) -> Scores:
    """Return scores of some experiments: the same channels, starts and noise for all schemes.

    Args:
        setting, posterior: of the experiments.
        schemes: names of policies, and `sbfl`.
        numbers: of the experiments, which decide their channels and noise.
        progress: called with the share that is done.
        release: of the posterior's private coordinates; without one these are released first.
    """
    key, links, count = (
        jax.random.key(setting.seed),
        setting.links(numbers),
        len(numbers),
    )
    if setting.whiten == "private" and release is None:
        parts = []
        for index, (number, link) in enumerate(
            zip(numbers, links, strict=True)
        ):  # each has coordinates of its own
            paid = release_whitening(
                jax.random.fold_in(key, number), posterior, link, setting.privacy
            )
            whitened, share = (
                posterior.whitened(paid.matrix),
                part_of(progress, index / count, 1 / count),
            )
            parts.append(
                experiments(
                    setting, whitened, schemes, range(number, number + 1), share, paid
                )
            )
        return _joined(parts)
    plans = {
        name: setting.plans(posterior, name, links, release)
        for name in schemes
        if name in POLICIES
    }
    drawn = sample_schemes(
        setting, posterior, plans, numbers, part_of(progress, 0, 0.9)
    )
    thetas = {name: trace.theta for name, trace in drawn.items()}
    if "sbfl" in schemes:
        rounds = setting.burn_in + setting.samples
        step = 1 / (1 + posterior.L / np.sum(posterior.sizes))  # the authors'
        estimates = baselines.sbfl(
            key, posterior, links, rounds=rounds, step_size=step, numbers=numbers
        )
        thetas["sbfl"] = estimates[:, None]
    result = {}
    for scheme, theta in thetas.items():
        scores = predictive_scores(posterior, theta, *setting.features.test_set)
        result[scheme] = {name: getattr(scores, name) for name in SCORES}
        if scheme in plans:
            result[scheme]["clip_rate"] = drawn[scheme].clip_rate.mean(1).astype(float)
            result[scheme]["epsilon"] = np.array(
                [plan.epsilon_spent for plan in plans[scheme]], dtype=float
            )
    return result


def tables_of(name: str, values: Scores, x: float, scores: Sequence[str]) -> Tables:
    """Return means of some scores over experiments; the table that has the study's name holds the calibration error."""
    figure = name.partition("_")[0]
    tables = {}
    for score in scores:
        rows = [
            mean_row(figure, scheme, x, each[score]) for scheme, each in values.items()
        ]
        tables[name if score == "ece" else f"{name}_{score}"] = rows
    return tables


def claims(tables: Tables) -> list[Claim]:
    """Return the outcomes stated of figure 8, where it is among the tables."""
    if "fig8" not in tables:
        return []
    ece, paired = Curves(tables["fig8"]), Curves(tables["fig8_paired"])
    ratio = float(
        np.min(
            ece.y["sbfl"]
            / np.max([y for name, y in ece.y.items() if name != "sbfl"], axis=0)
        )
    )
    margin, error = paired.y["optimized - no-dp"], paired.error["optimized - no-dp"]
    gain, gain_error = (
        curve["equal - optimized"][ece.x >= 20] for curve in (paired.y, paired.error)
    )
    # Too small to see or to be significant; with many experiments paired errors are smaller than what can be seen.
    same = np.abs(margin) < np.maximum(0.01 * ece.y["optimized"], 2 * error)
    level = ", ".join(f"{x:g}" for x in ece.x[same]) or "no"
    lowest, no_worse = (
        bool(np.all((margin >= 0) | same)),
        bool(np.all(gain >= -2 * gain_error)),
    )
    stated = (
        ("SBFL is worse calibrated than every WFLMC scheme: smallest ratio of ECE", "> 1", ratio, ratio > 1,
         "SBFL starts where the chains start; 20 iterations"),
        ("without DP, ECE is the lowest: smallest margin of optimized over it", "≥ 0", float(margin.min()), lowest,
         f"within 1 % or two errors at {level} dB; paired errors up to {error.max():.1g}"),
        ("optimized is no worse than equal from 20 dB on: mean difference of ECE", "≥ 0", float(gain.mean()), no_worse,
         f"paired standard error {gain_error.max():.1g} at each SNR"),
    )  # fmt: skip
    return [
        Claim("fig8", statement, paper, ours, holds, note=note)
        for statement, paper, ours, holds, note in stated
    ]
