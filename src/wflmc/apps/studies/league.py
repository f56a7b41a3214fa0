"""Private accuracy on images over the air, beside the best published results.

`wflmc reproduce league` computes it: all 60,000 training images on 30 devices, as
public features, that is, scattering coefficients whitened by the moments of public
images. Every training image is protected as a record. Public digits that are rendered
from fonts may give the prior its mean as well. Settings are chosen where ε does not
have to cover the choice: on the other data set, or, as in the literature, on 5,000 of
the training images, which ε does not cover.
"""

import os
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
from wflmc.data.images import CONSTANT, RIDGE, image_features, public_image_features
from wflmc.data.scattering import VERSION as FEATURES_VERSION
from wflmc.data.sets import Features, cache_folder, load
from wflmc.evaluation.diagnostics import diagnose
from wflmc.evaluation.scores import (
    SMALLEST_PROBABILITY,
    Calibration,
    calibration,
    mean_probabilities,
)
from wflmc.planning.solvers.closed_form import LMC, REGIMES
from wflmc.posterior import SoftmaxPosterior, softmax_regression
from wflmc.sampling import Execution
from wflmc.support.keys import digest
from wflmc.support.storage import replacing

DEVICES = 30
"""K."""
CLASSES = 10
PRIOR_STD = 10.0
"""s, where the prior's mean is zero."""
DELTA = 1e-5
"""δ, below one over the number of images."""
SNR_DB = 20.0
FADING_POWER = 0.01
"""Mean power of the Rayleigh fading."""
EPSILONS = (0.3, 1.0, 3.0, 10.0)
EPSILONS_WITH_ALL_ROWS = (1.0, 3.0)
"""ε at which all rows are computed; elsewhere some are left out (`rows_at`)."""


class LeagueData(NamedTuple):
    """A private data set with the public images that are used for it."""

    title: str
    """What tables call it; without a comma."""
    private: str
    """The data set whose training images are protected."""
    whiten_from: tuple[str, ...]
    """Public data sets whose moments whiten the features."""
    prior_from: str = ""
    """Public data set that the prior's mean is fitted to; empty for a mean of zero."""


LEAGUE_DATA = {
    "mnist": LeagueData("MNIST", "mnist", ("fashion-mnist",)),
    "fashion-mnist": LeagueData("Fashion-MNIST", "fashion-mnist", ("mnist",)),
    "mnist-rendered-whitening": LeagueData(
        "MNIST whitened with rendered digits",
        "mnist",
        ("rendered-digits", "fashion-mnist"),
    ),
    "mnist-rendered": LeagueData(
        "MNIST with rendered digits",
        "mnist",
        ("rendered-digits", "fashion-mnist"),
        prior_from="rendered-digits",
    ),
}
"""By the names that `CHOSEN` has for them."""
OTHER_DATA_SET = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
"""The data set that settings of `other` and `descent` are chosen on, for each name in
`LEAGUE_DATA` that has such rows."""
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
    prior_std: float = PRIOR_STD
    """s, the standard deviation of each parameter under the prior; and under that of
    the public fit which is the prior's mean, where there is one."""

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

    def sampler(self, examples: int, init: str) -> Sampler:
        """Return the dynamics.

        Args:
            examples: N, of all devices together.
            init: the point where all chains start, which is public: "zero", or
                "prior-mean".
        """
        if self.dynamics == OVERDAMPED:
            return Sampler(init=init, burn_in_temperature=self.burn_in_temperature)
        first_step = self.step_sizes(examples)[0]
        return Sampler(
            init=init,
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
    ("training", "mnist-rendered-whitening", 1.0): LeagueSettings(
        dynamics="overdamped",
        step=350.0,
        example_clip=0.12,
        device_clip=50.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=1.0,
    ),
    ("training", "mnist-rendered-whitening", 3.0): LeagueSettings(
        dynamics="overdamped",
        step=500.0,
        example_clip=0.2,
        device_clip=50.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=0.5,
    ),
    ("training", "mnist-rendered", 0.3): LeagueSettings(
        dynamics="overdamped",
        step=250.0,
        example_clip=0.06,
        device_clip=100.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=0.5,
        prior_std=3.0,
    ),
    ("training", "mnist-rendered", 1.0): LeagueSettings(
        dynamics="overdamped",
        step=250.0,
        example_clip=0.12,
        device_clip=50.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=1.0,
        prior_std=3.0,
    ),
    ("training", "mnist-rendered", 3.0): LeagueSettings(
        dynamics="overdamped",
        step=500.0,
        example_clip=0.2,
        device_clip=50.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=0.5,
        prior_std=5.0,
    ),
    ("training", "mnist-rendered", 10.0): LeagueSettings(
        dynamics="overdamped",
        step=500.0,
        example_clip=0.56,
        device_clip=100.0,
        rounds=600,
        kept_rounds=100,
        burn_in_temperature=0.05,
        final_step=0.5,
        prior_std=5.0,
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
"""Settings by the way they were chosen, the name in `LEAGUE_DATA` and ε.

They were chosen on the `other` data set or on `training` images; those of `descent`,
the rival, on the other data set. `python -m benchmarks.league` chooses."""


class LeagueRow(NamedTuple):
    """A row of a data set."""

    chosen_by: str
    """The way its settings were chosen, as in `CHOSEN`."""
    adjacency: str


WITHOUT_PROMISE = "ours without a promise"
CHOSEN_ON_TRAINING = "ours, chosen on training images"
AT_TEMPERATURE_1 = "ours, all rounds at temperature 1"
PUBLIC_FIT = "the public fit alone"
POSTERIOR = "posterior"
ROWS = {
    "ours": LeagueRow("other", "add-remove"),
    "descent": LeagueRow("descent", "add-remove"),
    "ours (replace)": LeagueRow("other", "replace"),
    WITHOUT_PROMISE: LeagueRow("other", "add-remove"),
    CHOSEN_ON_TRAINING: LeagueRow("training", "add-remove"),
    f"{CHOSEN_ON_TRAINING} (replace)": LeagueRow("training", "replace"),
    AT_TEMPERATURE_1: LeagueRow("training", "add-remove"),
}
"""Rows of a data set, by name."""


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
    """Return the features of a private data set, whitened by public images.

    They are public: no image of the private data set has any influence on the features
    of another one. A constant feature stands for an intercept.

    Args:
        name: of `LEAGUE_DATA`.
    """
    data = LEAGUE_DATA[name]
    return image_features(data.private, data.whiten_from, RIDGE, intercept=True)


def public_fit(name: str, prior_std: float) -> NDArray[np.float64] | None:
    """Return the mean of the prior, which is fitted to public images alone.

    It is the mode of the same model on all training images of the public data set,
    under the prior N(0, s² I), as `posterior.prior_from` of a scenario takes it. It is
    computed once, and then read from the user's cache.

    Args:
        name: of `LEAGUE_DATA`.
        prior_std: s.

    Returns:
        θ₀[m]; None where the data have no public labels.
    """
    data = LEAGUE_DATA[name]
    if not data.prior_from:
        return None
    images = load(data.prior_from)
    moments = [load(public).train_images for public in data.whiten_from]
    settings = np.array([RIDGE, prior_std])
    of_images = digest(images.train_images, images.train_labels, *moments, settings)
    file_name = f"{of_images}-public-fit-{FEATURES_VERSION}.npy"
    path = cache_folder() / "scattering" / file_name
    if not path.exists():
        mean = _fit_to_public_images(data, prior_std)
        # Several processes may compute the same file at once.
        with replacing(path, f".{os.getpid()}.part") as file:
            np.save(file, mean)
    return np.asarray(np.load(path))


def _fit_to_public_images(data: LeagueData, prior_std: float) -> NDArray[np.float64]:
    """Return the mode of the model on labelled public images, [m]."""
    public = public_image_features(
        data.prior_from, data.whiten_from, RIDGE, intercept=True
    )
    # One device holds all rows, so that the key has no effect.
    fitted = softmax_regression(
        jax.random.key(0),
        devices=1,
        X=public.X,
        y=public.y,
        classes=CLASSES,
        prior_std=prior_std,
    )
    return fitted.mode


def league_posterior(
    features: Features,
    prior_std: float = PRIOR_STD,
    prior_mean: NDArray[np.float64] | None = None,
) -> SoftmaxPosterior:
    """Return the posterior of the training images, divided over 30 devices.

    L is a bound that holds for any images, and not the largest eigenvalue of the data's
    Hessian: the step size depends on it, and must not depend on private data. A softmax
    model's curvature is at most half the squared norm of its rows, which are of length
    1 at most, beside their constant.

    Args:
        features: of the images, with the constant feature.
        prior_std: s, of each parameter under the prior.
        prior_mean: the prior's mean, [m]; None: zero.
    """
    posterior = softmax_regression(
        jax.random.key(0),
        DEVICES,
        X=features.X,
        y=features.y,
        classes=CLASSES,
        prior_std=prior_std,
        prior_mean=prior_mean,
    )
    squared_length = 1 + CONSTANT**2
    data_curvature = 0.5 * len(features.y) * squared_length
    return replace(posterior, L=data_curvature + prior_std**-2)


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
    init = "zero" if posterior.prior_mean is None else "prior-mean"
    sampler = settings.sampler(examples, init)
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


def rows_at(name: str, epsilon: float) -> dict[str, LeagueRow]:
    """Return the rows of a data set at an ε, by name.

    They are those that there are settings for. Rows of `replace` are computed at ε = 1
    and 3, where the literature has results, and wherever the prior has a mean; those
    without a promise at ε = 1 and 3; those at temperature 1 where the prior has a mean.

    Args:
        name: of `LEAGUE_DATA`.
        epsilon: one of `EPSILONS`.
    """
    at_all_rows = epsilon in EPSILONS_WITH_ALL_ROWS
    has_prior = bool(LEAGUE_DATA[name].prior_from)
    rows = {}
    for row_name, row in ROWS.items():
        if (row.chosen_by, name, epsilon) not in CHOSEN:
            continue
        if row_name == WITHOUT_PROMISE and not at_all_rows:
            continue
        if row.adjacency == "replace" and not (at_all_rows or has_prior):
            continue
        if row_name == AT_TEMPERATURE_1 and not has_prior:
            continue
        rows[row_name] = row
    return rows


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
    settings = CHOSEN[row.chosen_by, name, epsilon]
    if row_name == AT_TEMPERATURE_1:
        settings = settings._replace(burn_in_temperature=1.0)
    links = [link_of(seed) for seed in range(experiments)]
    if row.chosen_by == "descent":
        plans = [descent_plan(posterior, settings, epsilon, link) for link in links]
        return Entry(scheme, epsilon, plans)
    promised_epsilon = None if row_name == WITHOUT_PROMISE else epsilon
    plans = [
        league_plan(posterior, settings, promised_epsilon, row.adjacency, link)
        for link in links
    ]
    return Entry(scheme, epsilon, plans)


def _split_scheme(scheme: str) -> tuple[str, str]:
    """Return the names of the data and of the row that a scheme stands for."""
    title, row_name = scheme.split(", ", 1)
    names = {data.title: name for name, data in LEAGUE_DATA.items()}
    return names[title], row_name


class _PrivateImages:
    """The features of one data set at a time, and one posterior, a gigabyte each."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._features: Features | None = None
        self._prior_std: float | None = None
        self._posterior: SoftmaxPosterior | None = None

    def features(self, name: str) -> Features:
        """Return the features of a data set; they are read unless they were the last."""
        if self._features is None or self._name != name:
            # This frees the memory before more is taken.
            self._posterior = None
            self._features = None
            self._features = league_features(name)
            self._name = name
        return self._features

    def posterior(self, name: str, prior_std: float) -> SoftmaxPosterior:
        """Return the posterior of a data set; it is made unless it was the last."""
        features = self.features(name)
        if self._posterior is None or self._prior_std != prior_std:
            self._posterior = None
            prior_mean = public_fit(name, prior_std)
            self._posterior = league_posterior(features, prior_std, prior_mean)
            self._prior_std = prior_std
        return self._posterior


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
    for name, data in LEAGUE_DATA.items():
        if data.prior_from:
            points += _points_of_public_fit(name)
        if setting.unclipped and name in UNCLIPPED_RUNS:
            points.append(Point(None, (f"{data.title}, {POSTERIOR}",)))
        points += _points_of(name)
        row_names = (*ROWS, PUBLIC_FIT, POSTERIOR)
        order += [f"{data.title}, {row_name}" for row_name in row_names]
    settings = {" ".join(map(str, key)): [*value] for key, value in CHOSEN.items()}
    identity = {
        "experiments": setting.experiments,
        "data": {name: [*data] for name, data in LEAGUE_DATA.items()},
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
    name, row_name = _split_scheme(point.schemes[0])
    features = images.features(name)
    execution = Execution(
        memory=setting.memory,
        progress=lambda finished, rounds: progress(finished / rounds),
    )
    if row_name == PUBLIC_FIT:
        prior_std = CHOSEN["training", name, point.xs[0]].prior_std
        return _public_fit_scores(point, features, public_fit(name, prior_std))
    if row_name == POSTERIOR:
        posterior = images.posterior(name, PRIOR_STD)
        return _unclipped(name, features, posterior, execution)
    kind = _kind_of(point.schemes[0], point.xs[0])
    posterior = images.posterior(name, kind.prior_std)
    rows = [
        entry(scheme, epsilon, posterior, setting.experiments)
        for scheme, epsilon in zip(point.schemes, point.xs, strict=True)
    ]
    return _scored(rows, features, posterior, execution)


class _Kind(NamedTuple):
    """What chains have in common that are sampled together."""

    prior_std: float
    dynamics: str
    rounds: int
    kept_rounds: int


def _kind_of(scheme: str, epsilon: float) -> _Kind:
    """Return the kind of a row's chains."""
    name, row_name = _split_scheme(scheme)
    settings = CHOSEN[ROWS[row_name].chosen_by, name, epsilon]
    return _Kind(
        prior_std=settings.prior_std,
        dynamics=settings.dynamics,
        rounds=settings.rounds,
        kept_rounds=settings.kept_rounds,
    )


def _points_of(name: str) -> list[Point]:
    """Return the points of a data set: one for each kind of chain.

    Rows of the same kind, whatever their ε, are chains that are sampled together.
    """
    title = LEAGUE_DATA[name].title
    rows: dict[_Kind, list[tuple[str, float]]] = {}
    for epsilon in EPSILONS:
        for row_name in rows_at(name, epsilon):
            scheme = f"{title}, {row_name}"
            rows.setdefault(_kind_of(scheme, epsilon), []).append((scheme, epsilon))
    points = []
    for _, of_kind in sorted(rows.items()):
        schemes, epsilons = zip(*of_kind, strict=True)
        points.append(Point(x=None, schemes=schemes, xs=epsilons))
    return points


def _points_of_public_fit(name: str) -> list[Point]:
    """Return the points of the public fit: one for each s that a row's prior has."""
    scheme = f"{LEAGUE_DATA[name].title}, {PUBLIC_FIT}"
    epsilons_of: dict[float, list[float]] = {}
    for epsilon in EPSILONS:
        prior_std = CHOSEN["training", name, epsilon].prior_std
        epsilons_of.setdefault(prior_std, []).append(epsilon)
    return [
        Point(x=None, schemes=(scheme,) * len(epsilons), xs=tuple(epsilons))
        for epsilons in epsilons_of.values()
    ]


def _public_fit_scores(
    point: Point, features: Features, prior_mean: NDArray[np.float64] | None
) -> Tables:
    """Return the scores of the public fit that is the mean of the prior at several ε."""
    assert prior_mean is not None  # the point is one of data with public labels
    test_rows, labels = features.test_set
    rows = np.asarray(test_rows, dtype=np.float64)
    probability = mean_probabilities(prior_mean[None], rows, CLASSES)
    at_least = np.maximum(probability, SMALLEST_PROBABILITY)
    reached = calibration(at_least[None], labels)
    row_scores = {name: getattr(reached, name) for name in SCORES}
    tables: Tables = {}
    for scheme, epsilon in zip(point.schemes, point.xs, strict=True):
        _add_row(tables, Entry(scheme, epsilon, []), row_scores)
    return tables


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
    scheme = f"{LEAGUE_DATA[name].title}, {POSTERIOR}"
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
