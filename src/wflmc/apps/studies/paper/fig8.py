"""Figure 8 of the paper: calibration on MNIST against SNR.

Beside it is what the figure leaves open: unlike devices, and clipping.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypedDict

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import (
    Link,
    Plan,
    Policy,
    Privacy,
    Sampler,
    Trace,
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
from wflmc.apps.studies.study import Claim, Point, Row, Study, Tables, mean_row
from wflmc.data.sets import Features
from wflmc.evaluation import predictive_scores
from wflmc.planning import POLICIES, PlanRequest
from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy.whitening import Release

IDEAL = tuple(name for name, policy in POLICIES.items() if not policy.wireless)
"""Schemes on an ideal link: the same at every SNR."""
ORDER = (*SCHEMES, "sbfl")
"""Schemes in the order of the tables."""
SCORES = ("ece", "accuracy", "nll", "brier")
PARTITIONS = ("blocks", "dirichlet:1", "dirichlet:0.1", "by-label")
"""From devices alike to devices that hold one class each."""
CLIPS = (30.0, 100.0, 300.0, 1000.0, 3000.0)
"""ℓ of the study of unlike devices."""
PAIRS = (("equal", "optimized"), ("optimized", "no-dp"))
"""Schemes that share channels and noise, whose calibration errors are also compared
experiment by experiment."""
BATCH = 10
"""Experiments between two checks of the standard error, where a study may stop
early."""
SAMPLING_FRACTION = 0.9
"""Of a point's time, for its progress."""
VISIBLE_DIFFERENCE = 0.01
"""Relative, of calibration errors that a figure can show."""

Scores = dict[str, dict[str, NDArray[np.float64]]]
"""Scores by scheme and name, one of each for every experiment."""


@dataclass(frozen=True)
class Mnist:
    """The paper's MNIST study.

    It has Rayleigh fading of power 1e-4, ε = 50, δ = 0.1, ℓ = 300, S = 600, and
    η = 2/(μ + L).
    """

    features: Features
    experiments: int = 50
    devices: int = 30
    gain_power: float = 1e-4
    """Mean of |h|²."""
    snr_db: float = 20.0
    epsilon: float | None = 50.0
    delta: float | None = 0.1
    clip: float = 300.0
    example_clip: float | None = None
    """c; None where a device is protected and not an example."""
    accountant: str = "paper"
    bound: str = "paper"
    burn_in: int = 550
    samples: int = 50
    partition: str = "blocks"
    intercept: bool = False
    whiten: str = "none"
    """Whitened coordinates: none, public, or private, which are paid for from the
    privacy budget."""
    step_factor: float = 2.0
    """η (μ + L)."""
    init: str = "prior"
    seed: int = 0
    stop_se: float | None = None
    """Stops a point when the standard error of every scheme's calibration error is at
    most this, relative to the error itself."""
    memory: float | None = None
    """Limit of the sampler, in bytes; results depend on it by float rounding."""

    @property
    def privacy(self) -> Privacy:
        """Return the promise to the devices.

        With a clipping threshold for examples it is for one example, otherwise for a
        device. Without an ε nothing is promised, and the accountant is the exact one.
        """
        unit = "device" if self.example_clip is None else "record"
        accountant = "exact" if self.epsilon is None else self.accountant
        return Privacy(
            self.epsilon,
            self.delta,
            self.clip,
            accountant,
            unit,
            self.example_clip,
        )

    def posterior(self) -> SoftmaxPosterior:
        """Return the posterior of the training data over the devices.

        It is whitened where the coordinates are public; private ones are released anew
        in every experiment.
        """
        posterior = softmax_regression(
            jax.random.key(self.seed),
            self.devices,
            X=self.features.X,
            y=self.features.y,
            partition=self.partition,
            intercept=self.intercept,
        )
        return posterior.whitened() if self.whiten == "public" else posterior

    def links(self, numbers: Sequence[int]) -> list[Link]:
        """Return the channels of some experiments.

        The fading of an experiment depends on its number and the seed of the study
        alone, and so is the same at every SNR and for every scheme.

        Args:
            numbers: of the experiments.
        """
        fading = channel.rayleigh(self.gain_power)
        seeds = [self.seed + number for number in numbers]
        return [Link(fading, self.snr_db, seed=seed) for seed in seeds]

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
            release: that has paid for the posterior's coordinates, before the first
                round; None where they cost nothing.
        """
        first_round = 0
        ledger = None
        if release is not None:
            first_round = len(release.loss)
            ledger = release.spent
        request = PlanRequest(
            link=links[0],
            privacy=self.privacy,
            step_size=self.step_factor / (posterior.mu + posterior.L),
            burn_in=self.burn_in,
            samples=self.samples,
            sampler=Sampler(init=self.init, start=first_round),
            policy=Policy(objective="average", bound=self.bound),
            ledger=ledger,
            initial_w2_sq=0.0,  # which adds the same to the bound of every plan
        )
        return plans_of(scheme, posterior, links, request)


class Recipe(TypedDict, total=False):
    """What differs from the setting of figure 8: fields of `Mnist`."""

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
    """Return figure 8: scores on the test set against SNR.

    Schemes on an ideal link are one point, which holds at every SNR.

    Args:
        setting: of the study.

    Returns:
        A study with the tables `fig8` (calibration error), `fig8_accuracy`, `fig8_nll`
        and `fig8_brier`, and `fig8_paired` with differences of calibration errors over
        the same channels and noise.
    """
    wireless = tuple(scheme for scheme in ORDER if scheme not in IDEAL)
    wireless_points = [Point(snr_db, wireless) for snr_db in SNR_GRID]
    points = (Point(None, IDEAL), *wireless_points)
    identity = identity_of(setting, "features")
    measure = partial(_measure_fig8, setting=setting, posterior=setting.posterior())
    return Study("fig8", points, ORDER, identity, measure)


def _measure_fig8(
    point: Point,
    progress: Progress,
    *,
    setting: Mnist,
    posterior: SoftmaxPosterior,
) -> Tables:
    """Return the scores of a point's schemes."""
    x = point.x or 0.0  # schemes without an x do not depend on the SNR
    at_snr = dataclasses.replace(setting, snr_db=x)
    values = _scores_in_batches(at_snr, posterior, point.schemes, progress)
    tables = tables_of("fig8", values, x, SCORES)
    if set(PAIRS[0]) <= set(values):
        tables["fig8_paired"] = _paired_rows(values, x)
    return tables


def _paired_rows(values: Scores, x: float) -> list[Row]:
    """Return the mean differences of calibration errors over the same experiments."""
    rows = []
    for above, below in PAIRS:
        difference = values[above]["ece"] - values[below]["ece"]
        rows.append(mean_row("fig8", f"{above} - {below}", x, difference))
    return rows


def heterogeneity_study(setting: Mnist) -> Study:
    """Return test scores at 30 dB against ℓ, for devices alike and unlike.

    There is a curve for every way in which the images are divided over the devices, and
    a table of the rates at which gradients are clipped.

    Args:
        setting: figure 8's; the SNR, the threshold and the partition are replaced.
    """
    recipes: dict[str, Recipe] = {
        partition: {"partition": partition, "snr_db": 30.0} for partition in PARTITIONS
    }
    return recipes_study(
        "heterogeneity",
        setting,
        recipes,
        varies="clip",
        grid=CLIPS,
        score="clip_rate",
    )


def recipes_study(
    name: str,
    setting: Mnist,
    recipes: Mapping[str, Recipe],
    *,
    varies: Literal["snr_db", "clip"],
    grid: Sequence[float],
    score: str,
) -> Study:
    """Return test scores of the optimized scheme, a curve for every recipe.

    Every x of every recipe is a point; recipes with the same coordinates and the same
    division of the images share a posterior.

    Args:
        name: of the study and its tables.
        setting: what the recipes change.
        recipes: what differs from the setting, by the name of the curve.
        varies: the field of the setting that is x.
        grid: values of x.
        score: what is tabulated beside `SCORES`: clip_rate or epsilon.
    """
    measure = _RecipeMeasure(
        name=name,
        setting=setting,
        recipes=recipes,
        varies=varies,
        scores=(*SCORES, score),
    )
    points = tuple(Point(x, (scheme,)) for x in grid for scheme in recipes)
    identity = {**identity_of(setting, "features"), "recipes": recipes}
    return Study(name, points, tuple(recipes), identity, measure)


@dataclass(frozen=True)
class _RecipeMeasure:
    """Scores of one recipe at one x."""

    name: str
    setting: Mnist
    recipes: Mapping[str, Recipe]
    varies: Literal["snr_db", "clip"]
    scores: tuple[str, ...]
    """Which scores are tabulated."""
    posteriors: dict[tuple[str, bool, str], SoftmaxPosterior] = field(
        default_factory=dict
    )
    """By partition, intercept and whitening; filled as points need them."""

    def __call__(self, point: Point, progress: Progress) -> Tables:
        """Return the scores of the point's recipe."""
        (scheme,) = point.schemes
        x = float(point.x or 0)
        at_x: Recipe = {"clip": x} if self.varies == "clip" else {"snr_db": x}
        by_recipe = dataclasses.replace(self.setting, **self.recipes[scheme])
        changed = dataclasses.replace(by_recipe, **at_x)
        kind = (changed.partition, changed.intercept, changed.whiten)
        if kind not in self.posteriors:
            self.posteriors[kind] = changed.posterior()
        values = _scores_in_batches(
            changed, self.posteriors[kind], ("optimized",), progress
        )
        of_scheme = {scheme: values["optimized"]}
        return tables_of(self.name, of_scheme, x, self.scores)


def _joined(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all experiments."""
    return jax.tree.map(lambda *values: np.concatenate(values), *parts)


def _scores_in_batches(
    setting: Mnist,
    posterior: SoftmaxPosterior,
    schemes: Sequence[str],
    progress: Progress,
) -> Scores:
    """Return scores of every scheme in every experiment.

    They are computed all at once, or by batches until the standard error is small
    enough.
    """
    count = setting.experiments
    size = count if setting.stop_se is None else BATCH
    batches: list[Scores] = []
    for first in range(0, count, size):
        numbers = range(first, min(first + size, count))
        batch_progress = part_of(progress, first / count, len(numbers) / count)
        batch = experiments(setting, posterior, schemes, numbers, batch_progress)
        batches.append(batch)
        if setting.stop_se is not None and _is_precise(batches, setting.stop_se):
            break
    return _joined(batches)


def _is_precise(batches: Sequence[Scores], stop_se: float) -> bool:
    """Return whether every scheme's calibration error has a small standard error.

    Args:
        batches: scores so far.
        stop_se: largest standard error, relative to the calibration error.
    """
    for values in _joined(batches).values():
        row = mean_row("fig8", "", 0.0, values["ece"])
        if row.y and (row.y_se is None or row.y_se > stop_se * row.y):
            return False
    return True


def experiments(
    setting: Mnist,
    posterior: SoftmaxPosterior,
    schemes: Sequence[str],
    numbers: range,
    progress: Progress,
    release: Release | None = None,
) -> Scores:
    """Return scores of some experiments.

    All schemes have the same channels, starts and noise. Where whitened coordinates are
    private, every experiment releases its own, which is the first thing that its budget
    pays for.

    Args:
        setting: of the study.
        posterior: the model.
        schemes: names of policies, and `sbfl`.
        numbers: of the experiments, which decide their channels and noise.
        progress: called with the finished part.
        release: of the posterior's private coordinates; without one these are released
            first.

    Returns:
        By scheme, the scores, and of those with plans the rate at which gradients were
        clipped and ε.
    """
    if setting.whiten == "private" and release is None:
        return _privately_whitened(setting, posterior, schemes, numbers, progress)
    links = setting.links(numbers)
    plans = {
        scheme: setting.plans(posterior, scheme, links, release)
        for scheme in schemes
        if scheme in POLICIES
    }
    sampling = part_of(progress, 0, SAMPLING_FRACTION)
    traces = sample_schemes(setting, posterior, plans, numbers, sampling)
    result = {
        scheme: _trace_scores(setting, posterior, trace, plans[scheme])
        for scheme, trace in traces.items()
    }
    if "sbfl" in schemes:
        theta = _sbfl(setting, posterior, links, numbers)
        result["sbfl"] = _theta_scores(setting, posterior, theta)
    return result


def _privately_whitened(
    setting: Mnist,
    posterior: SoftmaxPosterior,
    schemes: Sequence[str],
    numbers: range,
    progress: Progress,
) -> Scores:
    """Return scores of experiments that each release coordinates of their own."""
    key = jax.random.key(setting.seed)
    count = len(numbers)
    parts = []
    links = setting.links(numbers)
    for index, (number, link) in enumerate(zip(numbers, links, strict=True)):
        release_key = jax.random.fold_in(key, number)
        release = release_whitening(release_key, posterior, link, setting.privacy)
        part = experiments(
            setting,
            posterior.whitened(release.matrix),
            schemes,
            numbers=range(number, number + 1),
            progress=part_of(progress, index / count, 1 / count),
            release=release,
        )
        parts.append(part)
    return _joined(parts)


def _sbfl(
    setting: Mnist,
    posterior: SoftmaxPosterior,
    links: Sequence[Link],
    numbers: range,
) -> NDArray[np.float32]:
    """Return the estimates of SBFL, [experiment, 1, m]."""
    mean_curvature = posterior.L / np.sum(posterior.sizes)
    authors_step = 1 / (1 + mean_curvature)
    rounds = setting.burn_in + setting.samples
    estimates = baselines.sbfl(
        jax.random.key(setting.seed),
        posterior,
        links,
        rounds=rounds,
        step_size=authors_step,
        numbers=numbers,
    )
    return estimates[:, None]


def _trace_scores(
    setting: Mnist, posterior: SoftmaxPosterior, trace: Trace, plans: Sequence[Plan]
) -> dict[str, NDArray[np.float64]]:
    """Return scores of chains, their clip rates and what their plans spend."""
    scores = _theta_scores(setting, posterior, trace.theta)
    scores["clip_rate"] = trace.clip_rate.mean(1).astype(float)
    spent = [plan.epsilon_spent for plan in plans]
    scores["epsilon"] = np.array(spent, dtype=float)
    return scores


def _theta_scores(
    setting: Mnist, posterior: SoftmaxPosterior, theta: NDArray[np.float32]
) -> dict[str, NDArray[np.float64]]:
    """Return scores on the test set of θ[experiment, draw, m]."""
    scores = predictive_scores(posterior, theta, *setting.features.test_set)
    return {name: getattr(scores, name) for name in SCORES}


def tables_of(name: str, values: Scores, x: float, scores: Sequence[str]) -> Tables:
    """Return means of some scores over experiments, at one x.

    Args:
        name: of the study.
        values: scores by scheme and name, [experiment].
        x: of the point.
        scores: which of them are tabulated.

    Returns:
        A table for each score. The one that has the study's name holds the calibration
        error; the others have the name of the score behind it.
    """
    figure = name.partition("_")[0]
    tables: Tables = {}
    for score in scores:
        table_name = name if score == "ece" else f"{name}_{score}"
        tables[table_name] = [
            mean_row(figure, scheme, x, scheme_scores[score])
            for scheme, scheme_scores in values.items()
        ]
    return tables


class _Outcome(NamedTuple):
    """What the paper states of figure 8, and our number."""

    statement: str
    paper: str
    ours: float
    holds: bool
    note: str


def claims(tables: Tables) -> list[Claim]:
    """Return the outcomes stated of figure 8, with our numbers.

    Schemes that share channels and noise are compared by their paired differences,
    whose standard errors are smaller than those of the curves.

    Args:
        tables: of the figures that have been computed; without figure 8 there are no
            claims.
    """
    if "fig8" not in tables:
        return []
    ece = Curves(tables["fig8"])
    paired = Curves(tables["fig8_paired"])
    outcomes = [
        _sbfl_outcome(ece),
        _without_dp_outcome(ece, paired),
        _equal_outcome(ece, paired),
    ]
    return [
        Claim(
            "fig8",
            outcome.statement,
            outcome.paper,
            outcome.ours,
            outcome.holds,
            note=outcome.note,
        )
        for outcome in outcomes
    ]


def _sbfl_outcome(ece: Curves) -> _Outcome:
    """Return whether SBFL is worse calibrated than all schemes, at every SNR."""
    scheme_errors = [y for name, y in ece.y.items() if name != "sbfl"]
    worst_scheme = np.max(scheme_errors, axis=0)
    ratios = ece.y["sbfl"] / worst_scheme
    ratio = float(np.min(ratios))
    return _Outcome(
        "SBFL is worse calibrated than every WFLMC scheme: smallest ratio of ECE",
        "> 1",
        ratio,
        ratio > 1,
        "SBFL starts where the chains start; 20 iterations",
    )


def _without_dp_outcome(ece: Curves, paired: Curves) -> _Outcome:
    """Return whether calibration is best without a promise, at every SNR."""
    margin = paired.y["optimized - no-dp"]
    error = paired.error["optimized - no-dp"]
    # Too small to see or to be significant: with many experiments paired errors are
    # smaller than what can be seen.
    visible = VISIBLE_DIFFERENCE * ece.y["optimized"]
    tolerance = np.maximum(visible, 2 * error)
    is_same = np.abs(margin) < tolerance
    is_no_worse = bool(np.all((margin >= 0) | is_same))
    levels = ", ".join(f"{snr_db:g}" for snr_db in ece.x[is_same]) or "no"
    note = (
        f"within 1 % or two errors at {levels} dB; "
        f"paired errors up to {error.max():.1g}"
    )
    return _Outcome(
        "without DP, ECE is the lowest: smallest margin of optimized over it",
        "≥ 0",
        float(margin.min()),
        is_no_worse,
        note,
    )


def _equal_outcome(ece: Curves, paired: Curves) -> _Outcome:
    """Return whether optimized power is no worse than equal power, from 20 dB on."""
    is_used = ece.x >= 20
    gain = paired.y["equal - optimized"][is_used]
    error = paired.error["equal - optimized"][is_used]
    is_no_worse = bool(np.all(gain >= -2 * error))
    return _Outcome(
        "optimized is no worse than equal from 20 dB on: mean difference of ECE",
        "≥ 0",
        float(gain.mean()),
        is_no_worse,
        f"paired standard error {error.max():.1g} at each SNR",
    )
