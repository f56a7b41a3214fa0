"""Private accuracy on images over the air, beside the best published results.

`wflmc reproduce league` computes it: all 60,000 training images on 30 devices, as
public features, that is, scattering coefficients whitened by the moments of the other
data set. Every training image is protected as a record. Settings are chosen where ε
does not have to cover the choice: on the other data set, or, as in the literature, on
5,000 of the training images, which ε does not cover.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc import Link, Plan, Policy, Privacy, Sampler, Trace, channel, plan, sample
from wflmc.apps import baselines
from wflmc.apps.studies.engines import Progress
from wflmc.apps.studies.study import Point, Row, Study, Tables, mean_row
from wflmc.data.images import CONSTANT, RIDGE, image_features
from wflmc.data.sets import DATA_SETS, Features
from wflmc.evaluation.diagnostics import diagnose
from wflmc.evaluation.scores import SMALLEST_PROBABILITY, Calibration, calibration
from wflmc.planning.solvers.closed_form import LMC, REGIMES
from wflmc.posterior import SoftmaxPosterior, softmax_regression
from wflmc.sampling import Execution

DEVICES = 30
"""K."""
CLASSES = 10
PRIOR_STD = 10.0
DELTA = 1e-5
"""δ, below one over the number of images."""
SNR_DB = 20.0
FADING_POWER = 0.01
"""Mean power of the Rayleigh fading."""
EPSILONS = (0.3, 1.0, 3.0, 10.0)
EPSILONS_WITH_ALL_ROWS = (1.0, 3.0)
"""ε at which all rows are computed; elsewhere there are ours and the rival alone."""
PUBLIC_DATA_SET = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
"""The data set that is public, by the one that is private."""
OVERDAMPED = "overdamped"
KINETIC = "kinetic"
FRICTION_STEP = 0.105
"""γ_f h of kinetic dynamics: the velocity keeps 0.9 of itself from round to round."""
UNCLIPPED_RUNS = {"mnist": (300.0, 40_000), "fashion-mnist": (150.0, 50_000)}
"""h² N of unclipped chains, and how many of their rounds are kept, for R-hat of logits
below 1.05."""
UNCLIPPED_BURN_IN = 4000
"""Rounds of unclipped chains before the first that is kept."""
UNCLIPPED_FRICTION = 0.2
"""Friction of unclipped chains. Directions that the data do not determine have the
prior's curvature of 0.01, for which this is critical."""
UNCLIPPED_CHAINS = 4
SCORES = ("accuracy", "ece", "nll")


class LeagueSettings(NamedTuple):
    """What is chosen for a data set and an ε."""

    dynamics: str
    step: float
    """Of the first round, times the number of examples: η N; or h² N of kinetic
    dynamics."""
    example_clip: float
    """c, the clipping threshold of a record."""
    device_clip: float
    """ℓ, the clipping threshold of a device."""
    rounds: int
    """S."""
    kept_rounds: int
    """The last rounds, whose draws are kept; descent averages its iterates over as
    many."""
    burn_in_temperature: float = 1.0
    """τ; descent has none."""
    final_step: float = 1.0
    """η of the kept rounds over that of the first round (h² of kinetic dynamics); steps
    fall linearly over burn-in."""

    @property
    def burn_in(self) -> int:
        """Return the number of rounds before the first kept one."""
        return self.rounds - self.kept_rounds

    def step_sizes(self, examples: int) -> NDArray[np.float64]:
        """Return η of overdamped dynamics or h of kinetic ones, [S].

        The curvature of the posterior grows with the number of examples N, so that η is
        `step`/N, and h is its root.

        Args:
            examples: N, of all devices together.
        """
        falling = np.linspace(1.0, self.final_step, self.burn_in)
        constant = np.full(self.kept_rounds, self.final_step)
        squared_step = self.step / examples * np.concatenate([falling, constant])
        if self.dynamics == OVERDAMPED:
            return squared_step
        return np.sqrt(squared_step)

    def sampler(self, examples: int) -> Sampler:
        """Return the dynamics. All chains start at zero, which costs no privacy.

        Args:
            examples: N, of all devices together.
        """
        if self.dynamics == OVERDAMPED:
            return Sampler(init="zero", burn_in_temperature=self.burn_in_temperature)
        first_step = self.step_sizes(examples)[0]
        return Sampler(
            init="zero",
            dynamics=KINETIC,
            friction=float(FRICTION_STEP / first_step),
            burn_in_temperature=self.burn_in_temperature,
        )


CHOSEN: dict[tuple[str, str, float], LeagueSettings] = {
    ("training", "mnist", 1.0): LeagueSettings(
        dynamics="overdamped",
        step=500.0,
        example_clip=0.12,
        device_clip=50.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=0.5,
    ),
    ("training", "mnist", 3.0): LeagueSettings(
        dynamics="overdamped",
        step=500.0,
        example_clip=0.2,
        device_clip=25.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=1.0,
    ),
    ("training", "fashion-mnist", 1.0): LeagueSettings(
        dynamics="overdamped",
        step=120.0,
        example_clip=0.7,
        device_clip=400.0,
        rounds=200,
        kept_rounds=40,
        burn_in_temperature=0.05,
        final_step=1.0,
    ),
    ("training", "fashion-mnist", 3.0): LeagueSettings(
        dynamics="kinetic",
        step=40.0,
        example_clip=0.75,
        device_clip=50.0,
        rounds=200,
        kept_rounds=40,
        burn_in_temperature=0.02,
        final_step=1.0,
    ),
    ("other", "mnist", 0.3): LeagueSettings(
        dynamics="kinetic",
        step=12.0,
        example_clip=0.25,
        device_clip=50.0,
        rounds=200,
        kept_rounds=40,
        burn_in_temperature=0.05,
        final_step=0.5,
    ),
    ("other", "mnist", 1.0): LeagueSettings(
        dynamics="kinetic",
        step=12.0,
        example_clip=0.5,
        device_clip=100.0,
        rounds=200,
        kept_rounds=40,
        burn_in_temperature=0.02,
        final_step=1.0,
    ),
    ("other", "mnist", 3.0): LeagueSettings(
        dynamics="overdamped",
        step=250.0,
        example_clip=0.75,
        device_clip=100.0,
        rounds=200,
        kept_rounds=40,
        burn_in_temperature=0.02,
        final_step=1.0,
    ),
    ("other", "mnist", 10.0): LeagueSettings(
        dynamics="kinetic",
        step=40.0,
        example_clip=1.3,
        device_clip=100.0,
        rounds=200,
        kept_rounds=40,
        burn_in_temperature=0.02,
        final_step=1.0,
    ),
    ("other", "fashion-mnist", 0.3): LeagueSettings(
        dynamics="overdamped",
        step=250.0,
        example_clip=0.06,
        device_clip=50.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=0.5,
    ),
    ("other", "fashion-mnist", 1.0): LeagueSettings(
        dynamics="overdamped",
        step=250.0,
        example_clip=0.12,
        device_clip=25.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=1.0,
    ),
    ("other", "fashion-mnist", 3.0): LeagueSettings(
        dynamics="kinetic",
        step=40.0,
        example_clip=0.2,
        device_clip=50.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=0.5,
    ),
    ("other", "fashion-mnist", 10.0): LeagueSettings(
        dynamics="kinetic",
        step=40.0,
        example_clip=0.56,
        device_clip=100.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=0.5,
    ),
    ("descent", "mnist", 0.3): LeagueSettings(
        dynamics="overdamped",
        step=200.0,
        example_clip=0.15,
        device_clip=400.0,
        rounds=200,
        kept_rounds=66,
    ),
    ("descent", "mnist", 1.0): LeagueSettings(
        dynamics="overdamped",
        step=200.0,
        example_clip=0.4,
        device_clip=400.0,
        rounds=200,
        kept_rounds=66,
    ),
    ("descent", "mnist", 3.0): LeagueSettings(
        dynamics="overdamped",
        step=350.0,
        example_clip=0.65,
        device_clip=400.0,
        rounds=200,
        kept_rounds=66,
    ),
    ("descent", "mnist", 10.0): LeagueSettings(
        dynamics="overdamped",
        step=500.0,
        example_clip=1.2,
        device_clip=400.0,
        rounds=200,
        kept_rounds=66,
    ),
    ("descent", "fashion-mnist", 0.3): LeagueSettings(
        dynamics="overdamped",
        step=200.0,
        example_clip=0.15,
        device_clip=400.0,
        rounds=200,
        kept_rounds=66,
    ),
    ("descent", "fashion-mnist", 1.0): LeagueSettings(
        dynamics="overdamped",
        step=500.0,
        example_clip=0.15,
        device_clip=400.0,
        rounds=200,
        kept_rounds=66,
    ),
    ("descent", "fashion-mnist", 3.0): LeagueSettings(
        dynamics="overdamped",
        step=500.0,
        example_clip=0.5,
        device_clip=400.0,
        rounds=200,
        kept_rounds=66,
    ),
    ("descent", "fashion-mnist", 10.0): LeagueSettings(
        dynamics="overdamped",
        step=700.0,
        example_clip=0.8,
        device_clip=400.0,
        rounds=200,
        kept_rounds=66,
    ),
}
"""Settings by where they were chosen, the private data set and ε.

They were chosen on the `other` data set or on `training` images; those of `descent`,
the rival, on the other data set. `python -m benchmarks.league` chooses."""


class LeagueRow(NamedTuple):
    """A row of a data set."""

    chosen_on: str
    """Where its settings were chosen, as in `CHOSEN`."""
    adjacency: str


WITHOUT_PROMISE = "ours without a promise"
CHOSEN_ON_TRAINING = "ours, chosen on training images"
ROWS = {
    "ours": LeagueRow("other", "add-remove"),
    "descent": LeagueRow("descent", "add-remove"),
    "ours (replace)": LeagueRow("other", "replace"),
    WITHOUT_PROMISE: LeagueRow("other", "add-remove"),
    CHOSEN_ON_TRAINING: LeagueRow("training", "add-remove"),
    f"{CHOSEN_ON_TRAINING} (replace)": LeagueRow("training", "replace"),
}
"""Rows of a data set, by name."""
ROWS_AT_EVERY_EPSILON = ("ours", "descent")


@dataclass(frozen=True)
class League:
    """How much of the study is computed.

    Args:
        experiments: number of channels and seeds.
        memory: limit of the sampler, in bytes.
        unclipped: whether to add rows of the posterior itself, from unclipped chains,
            which need an accelerator.
    """

    experiments: int = 3
    memory: float | None = None
    unclipped: bool = False


def league_features(name: str) -> Features:
    """Return the features of a data set, whitened by the moments of the other one.

    They are public: no image of the private data set has any influence on the features
    of another one. A constant feature stands for an intercept.

    Args:
        name: `mnist` or `fashion-mnist`, of which the other one is the public data set.
    """
    return image_features(name, (PUBLIC_DATA_SET[name],), RIDGE, intercept=True)


def league_posterior(features: Features, seed: int = 0) -> SoftmaxPosterior:
    """Return the posterior of the training images, divided over 30 devices.

    L is a bound that holds for any images, and not the largest eigenvalue of the data's
    Hessian: the step size depends on it, and must not depend on private data. A softmax
    model's curvature is at most half the squared norm of its rows, which are of length
    1 at most, beside their constant.

    Args:
        features: of the images, with the constant feature.
        seed: divides the images over the devices.
    """
    posterior = softmax_regression(
        jax.random.key(seed),
        DEVICES,
        X=features.X,
        y=features.y,
        classes=CLASSES,
        prior_std=PRIOR_STD,
    )
    squared_length = 1 + CONSTANT**2
    data_curvature = 0.5 * len(features.y) * squared_length
    return replace(posterior, L=data_curvature + PRIOR_STD**-2)


def link_of(seed: int) -> Link:
    """Return the channel of an experiment.

    It is Rayleigh fading at 20 dB, the same for all rows of the table, so that rows
    differ by their protocols alone.

    Args:
        seed: the number of the experiment.
    """
    return Link(channel.rayleigh(FADING_POWER), SNR_DB, seed=seed)


def league_plan(
    posterior: SoftmaxPosterior,
    settings: LeagueSettings,
    epsilon: float | None,
    adjacency: str,
    link: Link,
) -> Plan:
    """Return the plan of a row that samples.

    Steps are too long for a bound, so that power fills the budgets to a water level
    (`wflmc.planning.policies.water_level`). Without an ε the clips, steps, temperature
    and channel are the same, so that the row shows what the promise costs.

    Args:
        posterior: of the images.
        settings: what was chosen.
        epsilon: ε of a record at δ = 1e-5; None for no promise.
        adjacency: replace or add-remove.
        link: of the experiment.
    """
    power = "no-dp" if epsilon is None else "optimized"
    policy = Policy(power, objective="average")
    promise = _promise(settings, epsilon, adjacency)
    examples = int(posterior.sizes.sum())
    step_sizes = settings.step_sizes(examples)
    sampler = settings.sampler(examples)
    return plan(
        posterior,
        link,
        promise,
        step_size=step_sizes,
        burn_in=settings.burn_in,
        samples=settings.kept_rounds,
        sampler=sampler,
        policy=policy,
        initial_w2_sq=0.0,
    )


def _promise(
    settings: LeagueSettings, epsilon: float | None, adjacency: str
) -> Privacy:
    """Return the promise for a record; without an ε its clipping thresholds alone."""
    return Privacy(
        epsilon=epsilon,
        delta=None if epsilon is None else DELTA,
        clip=settings.device_clip,
        unit="record",
        example_clip=settings.example_clip,
        adjacency=adjacency,
    )


def descent_plan(
    posterior: SoftmaxPosterior,
    settings: LeagueSettings,
    epsilon: float,
    link: Link,
) -> Plan:
    """Return the plan of the rival: gradient descent over the air.

    Its estimate is the mean of as many last iterates as a chain keeps draws; promise,
    link and number of rounds are those of `league_plan`.

    Args:
        posterior: of the images.
        settings: of overdamped dynamics; their temperature does not matter.
        epsilon: ε of a record at δ = 1e-5, add-remove.
        link: of the experiment.
    """
    privacy = _promise(settings, epsilon, "add-remove")
    examples = int(posterior.sizes.sum())
    return baselines.gradient_descent(
        posterior,
        link,
        privacy,
        step_size=settings.step_sizes(examples),
        rounds=settings.rounds,
        average=settings.kept_rounds,
        init="zero",
    )


def rows_at(epsilon: float) -> dict[str, LeagueRow]:
    """Return the rows at an ε, by name.

    All rows are computed at ε = 1 and 3, where the literature has results; elsewhere
    there are ours and the rival alone.

    Args:
        epsilon: one of `EPSILONS`.
    """
    if epsilon in EPSILONS_WITH_ALL_ROWS:
        return ROWS
    return {name: ROWS[name] for name in ROWS_AT_EVERY_EPSILON}


class Entry(NamedTuple):
    """A row of the table."""

    scheme: str
    x: float
    """ε."""
    plans: list[Plan]
    """One for each experiment."""


def entry(
    scheme: str,
    epsilon: float,
    posterior: SoftmaxPosterior,
    experiments: int,
) -> Entry:
    """Return a row of the table at an ε, with its plans.

    Settings are those in `CHOSEN`; experiment number i has the channel of seed i.

    Args:
        scheme: the title of the data set and the name of the row, after a comma.
        epsilon: one of those for which there are settings.
        posterior: of the private images.
        experiments: number of plans.
    """
    name, row_name = _split_scheme(scheme)
    row = ROWS[row_name]
    settings = CHOSEN[row.chosen_on, name, epsilon]
    links = [link_of(seed) for seed in range(experiments)]
    if row.chosen_on == "descent":
        plans = [descent_plan(posterior, settings, epsilon, link) for link in links]
        return Entry(scheme, epsilon, plans)
    promised_epsilon = None if row_name == WITHOUT_PROMISE else epsilon
    plans = [
        league_plan(posterior, settings, promised_epsilon, row.adjacency, link)
        for link in links
    ]
    return Entry(scheme, epsilon, plans)


def _split_scheme(scheme: str) -> tuple[str, str]:
    """Return the names of the data set and of the row that a scheme stands for."""
    title, row_name = scheme.split(", ", 1)
    names = {data_set.title: name for name, data_set in DATA_SETS.items()}
    return names[title], row_name


class _PrivateImages:
    """The features and the posterior of one data set at a time, a gigabyte each."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._data: tuple[Features, SoftmaxPosterior] | None = None

    def load(self, name: str) -> tuple[Features, SoftmaxPosterior]:
        """Return the data of a data set; they are read unless they were the last."""
        if self._data is None or self._name != name:
            self._data = None  # frees the memory before more is taken
            features = league_features(name)
            self._data = (features, league_posterior(features))
            self._name = name
        return self._data


def league_study(setting: League) -> Study:
    """Return test scores of private posteriors on two data sets, at several ε.

    Rows of a data set with the same dynamics and rounds are a point: sampled together,
    they read the features once.

    Args:
        setting: how much is computed.

    Returns:
        A study with the tables `league` (accuracy), `league_ece`, `league_nll`,
        `league_epsilon` and `league_free`, and `league_rhat` with unclipped chains.
    """
    points: list[Point] = []
    order: list[str] = []
    for name in PUBLIC_DATA_SET:
        title = DATA_SETS[name].title
        if setting.unclipped:
            points.append(Point(None, (f"{title}, posterior",)))
        points += _points_of(name)
        order += [f"{title}, {row_name}" for row_name in (*ROWS, "posterior")]
    settings = {" ".join(map(str, key)): [*value] for key, value in CHOSEN.items()}
    identity = {
        "experiments": setting.experiments,
        "settings": settings,
        "unclipped": [UNCLIPPED_RUNS, UNCLIPPED_CHAINS],
    }
    measure = partial(_measure, setting=setting, images=_PrivateImages())
    return Study("league", tuple(points), tuple(order), identity, measure)


def _measure(
    point: Point,
    progress: Progress,
    *,
    setting: League,
    images: _PrivateImages,
) -> Tables:
    """Return the scores of a point."""
    name, _ = _split_scheme(point.schemes[0])
    features, posterior = images.load(name)
    execution = Execution(
        memory=setting.memory,
        progress=lambda finished, rounds: progress(finished / rounds),
    )
    if not point.xs:
        return _unclipped(name, features, posterior, execution)
    rows = [
        entry(scheme, epsilon, posterior, setting.experiments)
        for scheme, epsilon in zip(point.schemes, point.xs, strict=True)
    ]
    return _scored(rows, features, posterior, execution)


def _points_of(name: str) -> list[Point]:
    """Return the points of a data set: one for each kind of chain.

    Rows of the same dynamics and rounds, whatever their ε, are chains that are sampled
    together.
    """
    title = DATA_SETS[name].title
    rows: dict[tuple[str, int, int], list[tuple[str, float]]] = {}
    for epsilon in EPSILONS:
        for row_name, row in rows_at(epsilon).items():
            settings = CHOSEN[row.chosen_on, name, epsilon]
            kind = (settings.dynamics, settings.rounds, settings.kept_rounds)
            rows.setdefault(kind, []).append((f"{title}, {row_name}", epsilon))
    points = []
    for _, of_kind in sorted(rows.items()):
        schemes, epsilons = zip(*of_kind, strict=True)
        points.append(Point(x=None, schemes=schemes, xs=epsilons))
    return points


def _scored(
    rows: Sequence[Entry],
    features: Features,
    posterior: SoftmaxPosterior,
    execution: Execution,
) -> Tables:
    """Return scores of rows of the same kind, which are sampled together."""
    plans: list[Plan] = []
    numbers: list[int] = []
    is_point_estimate: list[bool] = []
    for row in rows:
        count = len(row.plans)
        plans += row.plans
        numbers += range(count)
        is_point_estimate += [row.scheme.endswith("descent")] * count
    trace = sample(
        jax.random.key(1),
        posterior,
        plans,
        numbers=numbers,
        predictions=features.X_test,
        execution=execution,
    )
    scores = scores_of(trace, posterior, *features.test_set, is_point_estimate)
    tables: Tables = {}
    first = 0
    for row in rows:
        of_row = slice(first, first + len(row.plans))
        first = of_row.stop
        row_scores = {name: getattr(scores, name)[of_row] for name in SCORES}
        _add_row(tables, row, row_scores)
    return tables


def _add_row(
    tables: Tables, row: Entry, scores: dict[str, NDArray[np.float64]]
) -> None:
    """Add a row's scores, and what its plans say of it.

    These are ε, and the fraction of rounds in which the noise that sampling needs is
    all there is, so that the promise is free.
    """
    values = dict(scores)
    if row.plans:
        epsilons = [plan.epsilon_spent for plan in row.plans]
        free_index = REGIMES.index(LMC)
        free_fractions = [np.mean(plan.limit == free_index) for plan in row.plans]
        values["epsilon"] = np.array(epsilons, dtype=float)
        values["free"] = np.array(free_fractions)
    for name, of_experiments in values.items():
        table_name = "league" if name == "accuracy" else f"league_{name}"
        table = tables.setdefault(table_name, [])
        table.append(mean_row("league", row.scheme, row.x, of_experiments))


def _unclipped(
    name: str,
    features: Features,
    posterior: SoftmaxPosterior,
    execution: Execution,
) -> Tables:
    """Return scores of the posterior itself, and R-hat of logits.

    They are from unclipped kinetic chains over an ideal link.
    """
    step, kept_rounds = UNCLIPPED_RUNS[name]
    ideal = plan(
        posterior,
        link_of(0),
        Privacy(),
        step_size=(step / int(posterior.sizes.sum())) ** 0.5,
        burn_in=UNCLIPPED_BURN_IN,
        samples=kept_rounds,
        sampler=Sampler(init="zero", dynamics=KINETIC, friction=UNCLIPPED_FRICTION),
        policy=Policy("noiseless"),
        initial_w2_sq=0.0,
    )
    trace = sample(
        jax.random.key(2),
        posterior,
        ideal,
        UNCLIPPED_CHAINS,
        predictions=features.X_test,
        execution=execution,
    )
    assert trace.predictions is not None
    scores = scores_of(trace, posterior, *features.test_set, [False] * UNCLIPPED_CHAINS)
    scheme = f"{DATA_SETS[name].title}, posterior"
    tables: Tables = {}
    row_scores = {score: getattr(scores, score) for score in SCORES}
    _add_row(tables, Entry(scheme, 0.0, []), row_scores)
    rhat = diagnose(trace.predictions.logits).rhat_max
    tables["league_rhat"] = [Row("league", scheme, 0.0, rhat)]
    return tables


def scores_of(
    trace: Trace,
    posterior: SoftmaxPosterior,
    rows: ArrayLike,
    labels: ArrayLike,
    is_point_estimate: Sequence[bool],
) -> Calibration:
    """Return accuracy and calibration of every chain on test images.

    A chain predicts with the mean of its draws' predictions. A point estimate, which
    descent gives, predicts with the mean of its iterates instead.

    Args:
        trace: of all chains, with predictions at `rows`.
        posterior: of the images.
        rows: features of the test images, [n, d].
        labels: of the test images, [n].
        is_point_estimate: whether a chain is one of descent, [chain].

    Returns:
        The scores, each [chain].
    """
    assert trace.predictions is not None
    probability = trace.predictions.probability.copy()
    point_chains = list(is_point_estimate)
    if any(point_chains):
        probability[point_chains] = posterior.predict(trace.theta[point_chains], rows)
    return calibration(np.maximum(probability, SMALLEST_PROBABILITY), labels)
