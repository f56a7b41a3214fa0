"""Private accuracy on images over the air, beside the best published: `wflmc reproduce league`.

All 60,000 training images on 30 devices, as public features: scattering coefficients, whitened by the moments of the
other data set. Every training image is protected as a record. Settings are chosen where ε does not have to cover the
choice, on the other data set, or, as in the literature, on 5,000 of the training images, which ε does not cover.
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

DEVICES, PRIOR_STD, CLIP, DELTA, SNR, POWER = 30, 10.0, 400.0, 1e-5, 20.0, 0.01
"""K, the prior's scale, ℓ, δ, and the link: SNR in dB and the mean power of its Rayleigh fading."""
ROUNDS, KEPT = 200, 66
EPSILONS = (0.3, 1.0, 3.0, 10.0)
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
"""The data set that is public when one is private."""
FRICTION_STEP = 0.105
"""γ_f h of kinetic dynamics: the velocity keeps 0.9 of itself from round to round."""
LONG = {"mnist": (300.0, 40_000), "fashion-mnist": (150.0, 50_000)}
"""h² N of unclipped chains, and how many of their rounds are kept, for R-hat of logits below 1.05."""
LONG_BURN_IN, LONG_FRICTION = 4000, 0.2
"""Directions that the data say nothing about have the prior's curvature of 0.01; there this friction is critical."""
CHAINS = 4
"""Unclipped chains."""
SCORES = ("accuracy", "ece", "nll")


class LeagueSettings(NamedTuple):
    """What is chosen for a data set and an ε."""

    dynamics: str
    step: float
    """Of a round, over the number of examples: η N; or h² N of kinetic dynamics."""
    example_clip: float

    def sampler(self, examples: int) -> tuple[float, Sampler]:
        """Return the step size for so many examples, and the dynamics."""
        if self.dynamics == "overdamped":
            return self.step / examples, Sampler(init="zero")
        h = (self.step / examples) ** 0.5
        return h, Sampler(init="zero", dynamics="kinetic", friction=FRICTION_STEP / h)


PLAIN, MOVING, FASHION = "overdamped", "kinetic", "fashion-mnist"
_TABLE: dict[tuple[str, str], dict[float, tuple[str, float, float]]] = {
    ("other", "mnist"): {0.3: (PLAIN, 200, 0.15), 1: (MOVING, 15, 0.5), 3: (PLAIN, 350, 0.8), 10: (MOVING, 60, 1.2)},
    ("other", FASHION): {0.3: (MOVING, 30, 0.15), 1: (MOVING, 30, 0.4), 3: (MOVING, 60, 0.65), 10: (MOVING, 60, 1.2)},
    ("training", "mnist"): {1: (PLAIN, 500, 0.3), 3: (PLAIN, 700, 0.65)},
    ("training", FASHION): {1: (MOVING, 15, 0.8), 3: (MOVING, 30, 1.2)},
    ("descent", "mnist"): {0.3: (PLAIN, 200, 0.15), 1: (PLAIN, 200, 0.4), 3: (PLAIN, 350, 0.65), 10: (PLAIN, 500, 1.2)},
    ("descent", FASHION): {0.3: (PLAIN, 200, 0.15), 1: (PLAIN, 500, 0.15), 3: (PLAIN, 500, 0.5), 10: (PLAIN, 700, 0.8)},
}  # fmt: skip
CHOSEN = {
    (*key, epsilon): LeagueSettings(*row)
    for key, rows in _TABLE.items()
    for epsilon, row in rows.items()
}
"""By where they were chosen and for which private data set: on the `other` data set, on `training` images, and those of
`descent`, the rival, on the other data set; and by ε. `python -m benchmarks.league` chooses."""


@dataclass(frozen=True)
class League:
    """How much of the study is computed; `posterior` adds unclipped chains, which need an accelerator."""

    experiments: int = 3
    memory: float | None = None
    posterior: bool = False


def league_features(name: str) -> Features:
    """Return the features of a data set, whitened by the other one."""
    return image_features(name, OTHER[name], RIDGE, intercept=True)


def league_posterior(features: Features, seed: int = 0) -> SoftmaxPosterior:
    """Return the posterior of the training images on the devices, with a public bound on its curvature."""
    data = {"X": features.X, "y": features.y, "classes": 10, "prior_std": PRIOR_STD}
    made = softmax_regression(jax.random.key(seed), DEVICES, **data)  # type: ignore[arg-type]
    # No row is longer than 1, beside its constant.
    return replace(made, L=0.5 * len(features.y) * (1 + CONSTANT**2) + PRIOR_STD**-2)


def link_of(seed: int) -> Link:
    """Return the channel of an experiment."""
    return Link(channel.rayleigh(POWER), SNR, seed=seed)


def league_plan(
    posterior: SoftmaxPosterior,
    settings: LeagueSettings,
    epsilon: float | None,
    adjacency: str,
    link: Link,
) -> Plan:
    """Return the plan of a row; without an ε the same clips, steps and channel."""
    privacy = Privacy(
        epsilon=epsilon,
        delta=None if epsilon is None else DELTA,
        clip=CLIP,
        unit="record",
        example_clip=settings.example_clip,
        adjacency=adjacency,
    )
    step_size, sampler = settings.sampler(int(posterior.sizes.sum()))
    policy = Policy("equal" if epsilon is not None else "no-dp", objective="average")
    return plan(
        posterior,
        link,
        privacy,
        step_size=step_size,
        burn_in=ROUNDS - KEPT,
        samples=KEPT,
        sampler=sampler,
        policy=policy,
        initial_w2_sq=0.0,
    )


def descent_plan(
    posterior: SoftmaxPosterior, settings: LeagueSettings, epsilon: float, link: Link
) -> Plan:
    """Return descent over the air, whose estimate is the mean of as many last iterates as a chain keeps."""
    privacy = Privacy(
        epsilon,
        DELTA,
        CLIP,
        unit="record",
        example_clip=settings.example_clip,
        adjacency="add-remove",
    )
    size = settings.step / int(posterior.sizes.sum())
    how = {"rounds": ROUNDS, "average": KEPT, "init": "zero"}
    return baselines.gradient_descent(posterior, link, privacy, step_size=size, **how)  # type: ignore[arg-type]


UNPROMISED, TRAINED = "ours without a promise", "ours, chosen on training images"
ROWS = {
    "ours": ("other", "add-remove"),
    "descent": ("descent", "add-remove"),
    "ours (replace)": ("other", "replace"),
    UNPROMISED: ("other", "add-remove"),
    TRAINED: ("training", "add-remove"),
    f"{TRAINED} (replace)": ("training", "replace"),
}
"""Rows of a data set: where their settings were chosen, and their adjacency."""


def rows_at(epsilon: float) -> dict[str, tuple[str, str]]:
    """Return the rows at an ε: all at 1 and 3, the first two elsewhere."""
    return ROWS if epsilon in (1.0, 3.0) else dict(list(ROWS.items())[:2])


class Entry(NamedTuple):
    """A row of the table: its name, its ε, and one plan for each experiment."""

    scheme: str
    x: float
    plans: list[Plan]


def entry(
    scheme: str, epsilon: float, posterior: SoftmaxPosterior, experiments: int
) -> Entry:
    """Return a row at an ε."""
    name, about = _parts(scheme)
    where, adjacency = ROWS[about]
    settings, promised = (
        CHOSEN[where, name, epsilon],
        None if about == UNPROMISED else epsilon,
    )
    make = partial(descent_plan, posterior, settings, epsilon)
    if where != "descent":
        make = partial(league_plan, posterior, settings, promised, adjacency)
    return Entry(scheme, epsilon, [make(link_of(seed)) for seed in range(experiments)])


def _parts(scheme: str) -> tuple[str, str]:
    """Return the data set of a row, and what it is about."""
    title, about = scheme.split(", ", 1)
    return next(
        name for name, known in DATA_SETS.items() if known.title == title
    ), about


def league_study(setting: League) -> Study:
    """Return test scores of private posteriors on two data sets, at several ε.

    Rows of a data set with the same dynamics are a point: sampled together, they read the features once.
    """
    held: dict[str, tuple[Features, SoftmaxPosterior]] = {}

    def data(name: str) -> tuple[Features, SoftmaxPosterior]:
        if name not in held:
            held.clear()  # a gigabyte each
            features = league_features(name)
            held[name] = features, league_posterior(features)
        return held[name]

    def measure(point: Point, progress: Progress) -> Tables:
        name, _ = _parts(point.schemes[0])
        features, posterior = data(name)
        execution = Execution(
            memory=setting.memory, progress=lambda done, work: progress(done / work)
        )
        if not point.xs:
            return _unclipped(name, features, posterior, execution)
        each = zip(point.schemes, point.xs, strict=True)
        rows = [entry(scheme, x, posterior, setting.experiments) for scheme, x in each]
        return _scored(rows, features, posterior, execution)

    points, order = [], []
    for name in OTHER:
        title = DATA_SETS[name].title
        points += [Point(None, (f"{title}, posterior",))] * setting.posterior
        pairs = [(row, epsilon) for epsilon in EPSILONS for row in rows_at(epsilon)]
        for kind in (PLAIN, MOVING):
            some = [
                pair
                for pair in pairs
                if CHOSEN[ROWS[pair[0]][0], name, pair[1]].dynamics == kind
            ]
            points += [
                Point(
                    None,
                    tuple(f"{title}, {row}" for row, _ in some),
                    tuple(x for _, x in some),
                )
            ] * bool(some)
        order += [f"{title}, {row}" for row in (*ROWS, "posterior")]
    settings = {" ".join(map(str, key)): [*value] for key, value in CHOSEN.items()}
    identity = {
        "experiments": setting.experiments,
        "settings": settings,
        "rounds": [ROUNDS, KEPT, LONG, CHAINS],
    }
    return Study("league", tuple(points), tuple(order), identity, measure)


def _scored(
    rows: Sequence[Entry],
    features: Features,
    posterior: SoftmaxPosterior,
    execution: Execution,
) -> Tables:
    """Return scores of rows of the same dynamics."""
    plans = [each for row in rows for each in row.plans]
    numbers = [seed for row in rows for seed in range(len(row.plans))]
    trace = sample(
        jax.random.key(1),
        posterior,
        plans,
        numbers=numbers,
        predictions=features.X_test,
        execution=execution,
    )
    point = [row.scheme.endswith("descent") for row in rows for _ in row.plans]
    scores = scores_of(trace, posterior, *features.test_set, point)
    tables: Tables = {}
    for at, row in enumerate(rows):
        mine = slice(at * len(row.plans), (at + 1) * len(row.plans))
        _add(tables, row, {name: getattr(scores, name)[mine] for name in SCORES})
    return tables


def _add(tables: Tables, row: Entry, values: dict[str, NDArray[np.float64]]) -> None:
    """Add a row's scores, its ε and the share of rounds in which the noise that sampling needs is all there is."""
    if row.plans:
        values["epsilon"] = np.array(
            [each.epsilon_spent for each in row.plans], dtype=float
        )
        values["free"] = np.array(
            [np.mean(each.limit == REGIMES.index(LMC)) for each in row.plans]
        )
    for name, each in values.items():
        table = tables.setdefault(
            "league" if name == "accuracy" else f"league_{name}", []
        )
        table.append(mean_row("league", row.scheme, row.x, each))


def _unclipped(
    name: str, features: Features, posterior: SoftmaxPosterior, execution: Execution
) -> Tables:
    """Return scores of the posterior itself, of unclipped kinetic chains over an ideal link, and R-hat of logits."""
    size, kept = LONG[name]
    step = (size / int(posterior.sizes.sum())) ** 0.5
    sampler = Sampler(init="zero", dynamics=MOVING, friction=LONG_FRICTION)
    ideal = plan(
        posterior,
        link_of(0),
        Privacy(),
        step_size=step,
        burn_in=LONG_BURN_IN,
        samples=kept,
        sampler=sampler,
        policy=Policy("noiseless"),
        initial_w2_sq=0.0,
    )
    trace = sample(
        jax.random.key(2),
        posterior,
        ideal,
        CHAINS,
        predictions=features.X_test,
        execution=execution,
    )
    assert trace.predictions is not None
    scores = scores_of(trace, posterior, *features.test_set, [False] * CHAINS)
    tables, scheme = Tables(), f"{DATA_SETS[name].title}, posterior"
    _add(
        tables,
        Entry(scheme, 0.0, []),
        {score: getattr(scores, score) for score in SCORES},
    )
    tables["league_rhat"] = [
        Row("league", scheme, 0.0, diagnose(trace.predictions.logits).rhat_max)
    ]
    return tables


def scores_of(
    trace: Trace,
    posterior: SoftmaxPosterior,
    rows: ArrayLike,
    labels: ArrayLike,
    point: Sequence[bool],
) -> Calibration:
    """Return scores of every chain; of point estimates those of the mean of their iterates, not mean predictions."""
    assert trace.predictions is not None
    probability = trace.predictions.probability.copy()
    probability[list(point)] = (
        posterior.predict(trace.theta[list(point)], rows) if any(point) else 0.0
    )
    return calibration(np.maximum(probability, SMALLEST_PROBABILITY), labels)
