"""Settings of a fit, chosen without a look at the data: on a public stand-in of the same size.

A stand-in is drawn from the model itself: as many rows, features, classes and devices as the table has, and features
whose covariance falls off as those of tables do. Candidates are planned and run on it as they would be on the table,
under the same promise and over the same link, and the one with the best predictions for further rows is taken. All of
this is public and costs no privacy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from wflmc.channel import Link
from wflmc.evaluation.scores import expected_calibration
from wflmc.planning import Plan, Policy, PowerPolicy, Sampler, plan
from wflmc.planning.policies import equal
from wflmc.posterior import (
    GaussianPosterior,
    SoftmaxPosterior,
    gaussian_regression,
    softmax_regression,
)
from wflmc.privacy import Privacy
from wflmc.privacy.releases import Array, ideal_link
from wflmc.privacy.whitening import Release, release_whitening
from wflmc.sampling import sample
from wflmc.support.errors import without_data
from wflmc.support.keys import named

Tabular = GaussianPosterior | SoftmaxPosterior
TabularT = TypeVar("TabularT", bound=Tabular)

CLIPS, TRAVELS, PRIORS, ROUNDS = (
    (0.2, 0.4, 0.8, 2.0),
    (0.03, 0.1, 0.25, 0.5, 1.0),
    (6.0, 12.0),
    (50, 100),
)
"""Candidates: the clip over the length of a row (2 clips next to nothing: a gradient is at most √2 times as long as
its row); how far clipped gradients of one row carry the prediction for it over
the whole chain; the spread of the prior's predictions; and rounds."""
BURN_INS = (0.25, 0.5, 0.75)
"""Shares of the rounds."""
WHITENED = 0.1
"""The share that whitening, where it is tried, takes of what is left of a budget."""
LARGEST_MOMENTS = 10**7
"""Numbers that devices would send for it, d² each, above which it is not tried."""
STRENGTHS = {True: (1.0, 2.0, 5.0), False: (1.0, 2.0)}
"""Distance of the stand-ins' classes over their spread, or the spread of their mean targets over the noise."""
DECAY = 1.0
"""Variances of the stand-in's directions fall off as number^−DECAY."""
MOST_ROWS, TEST_ROWS = 50_000, 1000
"""Of a stand-in, and of further ones that its predictions are scored on."""
RARE = 0.5
"""A class is rare if its share is less than this times what it would be among equally frequent classes."""
PRICE_OF_NO_CLIPPING = 1.1
"""Where a class is rare, settings that clip nothing are taken unless their loss is more than this many times the least
one: rows of a rare class have the longest gradients, and clipping takes probability from their class alone."""
AS_GOOD = 1.01
"""A loss on the stand-ins that is not more than this many times the least one is as good."""
NUMBERS, DRAWN, FEW = 2 * 10**5, 6, 2
"""As many stand-ins of each strength are drawn as have so many numbers together; at least one, and at most so many, or
few to say what more of something is worth, which nothing is chosen by."""


class Advance(Protocol):
    """Hears how far a choice of settings is."""

    def __call__(self, done: int, total: int, /) -> None:
        """Take note that so many parts are done, of so many in all."""


@dataclass(frozen=True)
class Settings:
    """What is chosen of a fit; in units of scaled features, whose mean square is 1."""

    clip: float
    """Of a row's gradient, or of a device's where devices are hidden as a whole."""
    step_size: float
    burn_in: int
    samples: int
    prior_std: float
    whiten: bool = False
    """Move in coordinates of unit second moments, by a release that is paid for, with the prior on these."""


class PromiseTerms(Protocol):
    """What a promise is made of, as estimators and requests for fits have it."""

    @property
    def epsilon(self) -> float:
        """ε."""

    @property
    def delta(self) -> float:
        """δ."""

    @property
    def unit(self) -> str:
        """Whose change is hidden: record or device."""

    @property
    def adjacency(self) -> str:
        """replace or add-remove."""


def promise_of(terms: PromiseTerms) -> Privacy:
    """Return the promise of such terms; clips are yet to be chosen."""
    clip = 1.0 if terms.unit == "record" else None
    return Privacy(
        terms.epsilon,
        terms.delta,
        unit=terms.unit,
        adjacency=terms.adjacency,
        example_clip=clip,
    )


class Facts(NamedTuple):
    """What is public of a table, a promise and a link."""

    rows: int
    features: int
    """Without the intercept."""
    classes: int
    """0 for numbers."""
    devices: int
    promise: Privacy
    """Its clips are chosen."""
    spent: float
    """Loss of every device before the first round of the chain."""
    rounds_before: int = 0
    """Of the link."""
    link: Link | None = None
    """None for an ideal one."""
    shares: tuple[float, ...] = ()
    """Of every class among the rows, as they were released; empty where all classes count as equally frequent."""

    @property
    def class_shares(self) -> Array:
        """The share of every class, [C]."""
        return np.asarray(
            self.shares or np.full(self.classes, 1 / max(1, self.classes))
        )

    @property
    def has_rare_class(self) -> bool:
        """Whether a class is rare among the others."""
        return bool(self.classes) and bool(
            self.class_shares.min() * self.classes < RARE
        )

    @property
    def row_length(self) -> float:
        """The length of a typical row of scaled features, with the constant."""
        return float((self.features + 1) ** 0.5)

    @property
    def crowd(self) -> float:
        """How many rows of the table there are for one of a stand-in; gradients are so many times larger."""
        return max(1.0, self.rows / MOST_ROWS)

    @property
    def by_record(self) -> bool:
        """Whether rows are hidden one by one."""
        return bool(self.promise.unit == "record")

    @property
    def channel(self) -> Link:
        """The link, or an ideal one."""
        return ideal_link() if self.link is None else self.link


class Expected(NamedTuple):
    """A candidate, and what it reaches on the stand-ins."""

    settings: Settings
    nll: float
    """Mean of −log p(label); for numbers, the mean square error over the target's variance."""
    accuracy: float | None
    """None for numbers."""
    ece: float | None
    """Calibration error of the probabilities; None for numbers."""
    rank: float
    """By which candidates are compared: the geometric mean of the losses, in which a tenth less counts alike on a
    stand-in that is easy and on one that is hard."""

    @property
    def scores(self) -> dict[str, float]:
        """The scores by name: of probabilities, or of numbers."""
        if self.accuracy is None or self.ece is None:
            return {"relative_mse": self.nll}
        return {"nll": self.nll, "accuracy": self.accuracy, "ece": self.ece}

    @property
    def plain(self) -> dict[str, float]:
        """Settings, scores and rank as plain data."""
        return {**asdict(self.settings), **self.scores, "rank": self.rank}


def candidates(facts: Facts) -> Iterator[Settings]:
    """Yield settings to choose from, without whitening."""
    length = facts.row_length
    # Gradients of a device's rows partly cancel.
    gradient = (
        length if facts.by_record else length * (facts.rows / facts.devices) ** 0.75
    )
    for rounds, prior, clip, travel, burn_in in product(
        ROUNDS, PRIORS, CLIPS, TRAVELS, BURN_INS
    ):
        limit, skip = clip * gradient, int(burn_in * rounds)
        step = travel / (limit * length * rounds * facts.crowd)
        yield Settings(limit, step, skip, rounds - skip, prior / length)


def near(settings: Settings) -> list[Settings]:
    """Return settings with half and twice the clip and the step size."""
    clip, step = settings.clip, settings.step_size
    factors = product((0.5, 1.0, 2.0), repeat=2)
    return [
        replace(settings, clip=clip * one, step_size=step * other)
        for one, other in factors
    ]


def initial_parameters(facts: Facts) -> Array:
    """Return where chains begin, [m]: at zero, or for classes where every row has the classes' shares for odds.

    From there, a chain need not travel to the intercept of a rare class before it can learn anything else.
    """
    if not facts.classes:
        return np.zeros(facts.features + 1)
    parameters = np.zeros((facts.classes, facts.features + 1))
    log_shares = np.log(facts.class_shares)
    parameters[:, -1] = log_shares - log_shares.mean()
    return parameters.ravel()


def private_posterior(
    facts: Facts,
    settings: Settings,
    X: Array,
    y: ArrayLike,
    owner: NDArray[np.intp] | None = None,
    classes: Sequence[int] | Sequence[str] | None = None,
) -> Tabular:
    """Return the posterior of scaled features X[N, d] and targets or labels, with constants that tell nothing of them.

    Args:
        owner: the device of each row; by default nearly equal parts in their order.
    """
    make: Callable[..., Tabular] = gaussian_regression
    if facts.classes:
        make = partial(
            softmax_regression, classes=facts.classes if classes is None else classes
        )
    posterior = make(
        jax.random.key(0),  # nothing is drawn by this key
        facts.devices,
        X=X,
        y=y,
        intercept=True,
        prior_std=settings.prior_std,
        partition="blocks" if owner is None else owner,
    )
    return suited(posterior, settings)


def suited(posterior: TabularT, settings: Settings) -> TabularT:
    """Return a posterior whose constants are public: the step size was chosen without the data, and suits an L."""
    curvature = settings.prior_std**-2
    return replace(
        posterior, mu=curvature, L=max(1 / settings.step_size, 1.01 * curvature)
    )


Whitened = tuple[Tabular, Facts, Release | None]
"""A posterior in other coordinates, the facts after the release that it took, and that release."""


def whiten(
    key: jax.Array,
    facts: Facts,
    settings: Settings,
    posterior: Tabular,
    exact: bool = False,
) -> Whitened:
    """Return a posterior as it is, or in coordinates that a release whitens, if that is among the settings.

    Args:
        exact: as of `release_whitening`.
    """
    if not settings.whiten:
        return posterior, facts, None
    left = 1 - facts.spent / float(facts.promise.budget(1)[0])
    start = facts.rounds_before
    release = release_whitening(
        key,
        posterior,
        facts.channel,
        facts.promise,
        budget_fraction=WHITENED * left,
        rounds=3 if facts.link is None else 16,
        prior_on="whitened",
        start=start,
        exact=exact,
    )
    after = facts._replace(
        spent=facts.spent + float(release.spent.max()),
        rounds_before=start + len(release.loss),
    )
    return (
        suited(posterior.whitened(release.matrix, "whitened"), settings),
        after,
        release,
    )


def make_plan(facts: Facts, settings: Settings, posterior: Tabular) -> Plan:
    """Return the plan of settings: what is left of a budget in equal parts, as draws count alike in an average."""
    promise = replace(facts.promise, clip=settings.clip, example_clip=None)
    if facts.by_record:  # clipped one by one, the rows of a device need no other clip
        largest_sum = settings.clip * float(posterior.sizes.max())
        promise = replace(facts.promise, clip=largest_sum, example_clip=settings.clip)
    power = PowerPolicy(equal, wireless=False) if facts.link is None else "equal"
    made = plan(
        posterior,
        facts.channel,
        promise,
        step_size=settings.step_size,
        burn_in=settings.burn_in,
        samples=settings.samples,
        sampler=Sampler(init="zero", start=facts.rounds_before),
        policy=Policy(power=power),
        ledger=np.full(facts.devices, facts.spent),
        initial_w2_sq=1.0,
    )
    # Notices, bound and objective may look at the data.
    certificate = replace(made.certificate, notices=(), bound=None, objective=np.nan)
    return replace(made, certificate=certificate)


class _PlanCase(NamedTuple):
    """All that tells the plans of one call of `expect` apart.

    Stand-ins have rows, features and devices in equal numbers, and no plan looks at the
    rows: settings have one plan for all of them. Only a release that whitens may leave
    each with a budget and a scale of its own.
    """

    settings: Settings
    spent: float
    """Loss before the first round of the chain."""
    rounds_before: int
    """Of the link."""
    prior_power: float
    """Mean square of a parameter under the prior, by which noise of the downlink scales."""


class _SharedPlans:
    """Plans of candidates over the stand-ins of one table, each made once."""

    def __init__(self) -> None:
        self._plans: dict[_PlanCase, Plan] = {}

    def plan_of(self, facts: Facts, settings: Settings, posterior: Tabular) -> Plan:
        """Return the plan of settings on a stand-in.

        Args:
            facts: of the table, after the release that whitening took.
            settings: of the candidate.
            posterior: of the stand-in.

        Returns:
            The plan, the same object for all stand-ins that it serves.
        """
        case = _PlanCase(
            settings=settings,
            spent=facts.spent,
            rounds_before=facts.rounds_before,
            prior_power=float(posterior.prior_power),
        )
        if case not in self._plans:
            suitable = suited(posterior, settings)
            self._plans[case] = make_plan(facts, settings, suitable)
        return self._plans[case]


@without_data
class StandIn(NamedTuple):
    """A public table that is drawn from a known law, and further rows of it."""

    X: Array
    """Features, [N, d]."""
    y: np.ndarray
    """Classes from 0, or targets, [N]."""
    X_test: Array
    """Features of further rows, [n, d]."""
    expected: Array
    """What the law says of these rows: the probability of every class, [n, C], or the mean of the target, [n]."""
    noise: float = 0.0
    """Variance of a target about its mean."""


def stand_in(facts: Facts, strength: float, seed: int) -> StandIn:
    """Draw a table of the model, public data: classes are normal clusters, and numbers lie about a plane.

    Args:
        facts: the size of the table, and how frequent its classes are.
        strength: the distance of two clusters of few over their spread, or the spread of mean targets over that of the
            noise.
        seed: of the draw.
    """
    generator, size = (
        np.random.default_rng([seed, facts.features, facts.classes]),
        facts.features,
    )
    rows = min(facts.rows, MOST_ROWS)
    variance = np.arange(1, size + 1) ** -DECAY
    spread = np.sqrt(variance / variance.mean())
    turn = np.linalg.qr(generator.standard_normal((size, size)))[0]
    along = generator.standard_normal((rows + TEST_ROWS, size))
    if facts.classes:
        y: np.ndarray = generator.choice(
            facts.classes, size=len(along), p=facts.class_shares
        )
        center = generator.standard_normal((facts.classes, size))
        center -= center.mean(0)
        apart = np.sqrt(
            2 * facts.classes / (facts.classes - 1) * np.mean((center**2).sum(1))
        )
        center -= facts.class_shares @ center  # scaled features have a mean of zero
        # Among more classes, one is confused as rarely where they are further apart.
        center *= (
            strength
            * (np.log2(facts.classes) if facts.classes > 3 else 1.0) ** 0.5
            / apart
        )
        along += center[y]
        log_density = along[rows:] @ center.T - (center**2).sum(1) / 2
        expected = softmax(log_density + np.log(facts.class_shares), axis=1)
        noise = 0.0
    else:
        mean = (along * spread**2) @ generator.standard_normal(size)
        noise = 1 / (1 + strength**2)
        mean *= (1 - noise) ** 0.5 / mean.std()
        y = mean + noise**0.5 * generator.standard_normal(len(along))
        expected = mean[rows:]
    X = (along * spread) @ turn.T
    X /= np.sqrt(np.mean(X**2))
    return StandIn(X[:rows], y[:rows], X[rows:], expected, noise)


def expect(
    facts: Facts,
    asked: list[Settings],
    progress: Advance | None = None,
    most: int = DRAWN,
) -> list[Expected]:
    """Return what settings reach on the stand-ins, in their order.

    On a stand-in of fewer rows, steps are longer by as much: it moves as the table would, with more noise.

    Args:
        most: stand-ins of each strength; `DRAWN` by default.
    """
    given, asked = (
        asked,
        [replace(one, step_size=one.step_size * facts.crowd) for one in asked],
    )
    scaled = facts._replace(
        rows=min(facts.rows, MOST_ROWS), devices=min(facts.devices, MOST_ROWS)
    )
    groups: dict[tuple[int, float, bool], dict[Settings, list[int]]] = {}
    for number, settings in enumerate(
        asked
    ):  # chains that can be run together; those that differ in burn-in are one
        whole = replace(
            settings, burn_in=0, samples=settings.burn_in + settings.samples
        )
        alike = groups.setdefault((whole.samples, whole.prior_std, whole.whiten), {})
        alike.setdefault(whole, []).append(number)
    drawn = int(np.clip(NUMBERS // (facts.rows * facts.features), 1, most or DRAWN))
    strengths = STRENGTHS[facts.classes > 0] * drawn
    scores = np.zeros((len(strengths), len(asked), 3))
    shared_plans = _SharedPlans()
    for seed, strength in enumerate(strengths):
        table, key = stand_in(facts, strength, seed), jax.random.key(seed)
        for done, chains in enumerate(groups.values()):
            first = next(iter(chains))
            plain = private_posterior(scaled, first, table.X, table.y)
            posterior, after, _ = whiten(named(key, "whitening"), scaled, first, plain)
            plans = [
                shared_plans.plan_of(after, settings, posterior) for settings in chains
            ]
            start = np.tile(initial_parameters(facts), (len(plans), 1))
            theta = np.asarray(sample(key, posterior, plans, initial=start).theta)
            places = np.array(
                [
                    (number, row)
                    for row, numbers in enumerate(chains.values())
                    for number in numbers
                ]
            )
            skipped = np.array([asked[number].burn_in for number in places[:, 0]])
            for burn_in in np.unique(skipped):
                numbers, rows = places[skipped == burn_in].T
                scores[seed, numbers] = _scores(plain, theta[rows, burn_in:], table)
            if progress is not None:
                progress(seed * len(groups) + done + 1, len(strengths) * len(groups))
    nll, accuracy, ece = scores.mean(0).T
    rank = np.exp(np.log(scores[..., 0]).mean(0))
    return [
        Expected(
            settings,
            nll=float(nll[number]),
            accuracy=float(accuracy[number]) if facts.classes else None,
            ece=float(ece[number]) if facts.classes else None,
            rank=float(rank[number]),
        )
        for number, settings in enumerate(given)
    ]


def _scores(posterior: Tabular, draws: np.ndarray, table: StandIn) -> Array:
    """Return scores of predictions for further rows, expected over their labels or targets.

    Args:
        posterior: of the stand-in, in the coordinates of its features.
        draws: [chain, draw, m].
        table: the stand-in.

    Returns:
        The loss, the accuracy and the calibration error of every chain, [chain, 3]; the last two are 0 for numbers.
    """
    if isinstance(posterior, SoftmaxPosterior):
        predicted = np.maximum(
            posterior.predict(draws, table.X_test).astype(float), 1e-12
        )
        predicted /= predicted.sum(2, keepdims=True)
        found = expected_calibration(predicted, table.expected)
        return np.stack([found.nll, found.accuracy, found.ece], axis=1)
    mean = draws.astype(float).mean(1) @ posterior.design_matrix(table.X_test).T
    loss = np.mean((mean - table.expected) ** 2, axis=1) + table.noise
    return np.stack([loss, *np.zeros((2, len(loss)))], axis=1)


_chosen: dict[Facts, list[Expected]] = {}


def choose(facts: Facts, progress: Advance | None = None) -> list[Expected]:
    """Return all candidates and what each is expected to reach, the one to take first; equal facts are asked once."""
    if (
        facts.link is None and facts in _chosen
    ):  # arrays of a link do not tell whether it is the same
        return list(_chosen[facts])
    ranked = _sorted(expect(facts, list(candidates(facts)), progress))
    if facts.features**2 * facts.devices <= LARGEST_MOMENTS:
        best = _eligible(facts, ranked)[0]
        ranked = _sorted(
            ranked + expect(facts, near(replace(best.settings, whiten=True)))
        )
    eligible = _eligible(facts, ranked)
    as_good = [
        candidate
        for candidate in eligible
        if candidate.rank <= AS_GOOD * eligible[0].rank
    ]
    steadiest = max(
        as_good, key=lambda candidate: candidate.settings.samples
    )  # an average over most draws
    ranked.sort(key=lambda candidate: candidate is not steadiest)
    if facts.link is None:
        _chosen[facts] = list(ranked)
    return ranked


def _sorted(candidates: list[Expected]) -> list[Expected]:
    """Return candidates by their rank, the best first."""
    return sorted(candidates, key=lambda candidate: candidate.rank)


def _eligible(facts: Facts, ranked: list[Expected]) -> list[Expected]:
    """Return the candidates to choose from: all of them, or where a class is rare those that clip nothing.

    A gradient is at most √2 times as long as its row.
    """
    if not (facts.has_rare_class and facts.by_record):
        return ranked
    affordable = PRICE_OF_NO_CLIPPING * min(candidate.nll for candidate in ranked)
    longest = 2**0.5 * facts.row_length
    unclipped = [
        candidate
        for candidate in ranked
        if candidate.settings.clip >= longest and candidate.nll <= affordable
    ]
    return unclipped or ranked


def worth(facts: Facts, chosen: Settings) -> dict[str, Expected]:
    """Return what settings near the chosen ones would reach with more of something, on stand-ins of that size."""
    promise, tried = facts.promise, near(chosen)
    more = {
        "as it is": facts,
        "twice epsilon": facts._replace(
            promise=replace(
                promise, epsilon=2 * np.asarray(promise.epsilon, dtype=float)
            )
        ),
        "twice the rows and devices": facts._replace(
            rows=2 * facts.rows, devices=2 * facts.devices
        ),
    }
    if facts.link is not None:
        more["10 dB more"] = facts._replace(
            link=replace(facts.link, snr_db=np.asarray(facts.link.snr_db) + 10)
        )
    found = {
        name: _sorted(expect(one, tried, most=min(FEW, DRAWN)))[0]
        for name, one in more.items()
    }
    longer = [
        replace(
            s, step_size=s.step_size / 2, burn_in=2 * s.burn_in, samples=2 * s.samples
        )
        for s in tried
    ]
    return {
        **found,
        "twice the rounds": _sorted(expect(facts, longer, most=min(FEW, DRAWN)))[0],
    }
