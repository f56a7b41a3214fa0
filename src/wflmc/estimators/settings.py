"""Settings of a fit, chosen without a look at the data: on a public stand-in of the same size.

A stand-in is drawn from the model itself: as many rows, features, classes and devices as the table has, and features
whose covariance falls off as those of tables do. Candidates are planned and run on it as they would be on the table,
under the same promise and over the same link, and the one with the best predictions for further rows is taken. All of
this is public and costs no privacy.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.channel import Link
from wflmc.data import Features
from wflmc.keys import named
from wflmc.planning import Plan, Policy, PowerPolicy, Sampler, plan
from wflmc.planning.policies import equal
from wflmc.posterior import GaussianPosterior, SoftmaxPosterior, gaussian_regression, softmax_regression
from wflmc.preconditioning import Release, release_whitening
from wflmc.privacy import Privacy
from wflmc.releases import Array, ideal_link
from wflmc.sampling import sample

Advance = Callable[[int, int], None]
Tabular = GaussianPosterior | SoftmaxPosterior

CLIPS, TRAVELS, PRIORS, ROUNDS = (0.2, 0.4, 0.8), (0.03, 0.1, 0.25, 0.5, 1.0), (6.0, 12.0), (50, 100)
"""Candidates: the clip over the length of a row; how far clipped gradients of one row carry the prediction for it over
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
AS_GOOD = 1.01
"""A loss on the stand-ins that is not more than this many times the least one is as good."""
NUMBERS, DRAWN, FEW = 2 * 10**5, 6, 2
"""As many stand-ins of each strength are drawn as have so many numbers together; at least one, and at most so many, or
few to say what more of something is worth, which nothing is chosen by."""


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


def promise_of(terms: Any) -> Privacy:
    """Return the promise of whatever has its `epsilon`, `delta`, `unit` and `adjacency`; clips are yet to be chosen."""
    clip = 1.0 if terms.unit == "record" else None
    return Privacy(terms.epsilon, terms.delta, unit=terms.unit, adjacency=terms.adjacency, example_clip=clip)


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

    @property
    def scores(self) -> dict[str, float]:
        """The scores by name: of probabilities, or of numbers."""
        return {"relative_mse": self.nll} if self.accuracy is None else {"nll": self.nll, "accuracy": self.accuracy}

    @property
    def plain(self) -> dict[str, Any]:
        """Settings and scores as plain data."""
        return {**asdict(self.settings), **self.scores}


def candidates(facts: Facts) -> Iterator[Settings]:
    """Yield settings to choose from, without whitening."""
    length = (facts.features + 1) ** 0.5
    # Gradients of a device's rows partly cancel.
    gradient = length if facts.by_record else length * (facts.rows / facts.devices) ** 0.75
    for rounds, prior, clip, travel, burn_in in product(ROUNDS, PRIORS, CLIPS, TRAVELS, BURN_INS):
        limit, skip = clip * gradient, int(burn_in * rounds)
        step = travel / (limit * length * rounds * facts.crowd)
        yield Settings(limit, step, skip, rounds - skip, prior / length)


def near(settings: Settings, **changes: Any) -> list[Settings]:
    """Return settings with half and twice the clip and the step size, and other changes."""
    clip, step = settings.clip, settings.step_size
    factors = product((0.5, 1.0, 2.0), repeat=2)
    return [replace(settings, clip=clip * one, step_size=step * other, **changes) for one, other in factors]


def private_posterior(
    facts: Facts, settings: Settings, X: Array, y: Any, owner: NDArray[np.intp] | None = None, classes: Any = None
) -> Tabular:
    """Return the posterior of scaled features X[N, d] and targets or labels, with constants that tell nothing of them.

    Args:
        owner: the device of each row; by default nearly equal parts in their order.
    """
    common: dict[str, Any] = {"X": X, "y": y, "intercept": True, "prior_std": settings.prior_std}
    common["partition"] = "blocks" if owner is None else owner
    make: Any = gaussian_regression
    if facts.classes:
        make = partial(softmax_regression, classes=facts.classes if classes is None else classes)
    return suited(make(jax.random.key(0), facts.devices, **common), settings)  # nothing is drawn by this key


def suited(posterior: Any, settings: Settings) -> Any:
    """Return a posterior whose constants are public: the step size was chosen without the data, and suits an L."""
    curvature = settings.prior_std**-2
    return replace(posterior, mu=curvature, L=max(1 / settings.step_size, 1.01 * curvature))


Whitened = tuple[Tabular, Facts, Release | None]
"""A posterior in other coordinates, the facts after the release that it took, and that release."""


def whiten(key: jax.Array, facts: Facts, settings: Settings, posterior: Tabular, exact: bool = False) -> Whitened:
    """Return a posterior as it is, or in coordinates that a release whitens, if that is among the settings.

    Args:
        exact: as of `release_whitening`.
    """
    if not settings.whiten:
        return posterior, facts, None
    left = 1 - facts.spent / float(facts.promise.budget(1)[0])
    how: dict[str, Any] = {"share": WHITENED * left, "rounds": 3 if facts.link is None else 16, "exact": exact}
    link, start = facts.channel, facts.rounds_before
    release = release_whitening(key, posterior, link, facts.promise, prior_on="whitened", start=start, **how)
    after = facts._replace(spent=facts.spent + float(release.spent.max()), rounds_before=start + len(release.loss))
    return suited(posterior.whitened(release.matrix, "whitened"), settings), after, release


def make_plan(facts: Facts, settings: Settings, posterior: Tabular) -> Plan:
    """Return the plan of settings: what is left of a budget in equal parts, as draws count alike in an average."""
    limits: dict[str, Any] = {"clip": settings.clip, "example_clip": None}
    if facts.by_record:  # clipped one by one, the rows of a device need no other clip
        limits = {"clip": settings.clip * float(posterior.sizes.max()), "example_clip": settings.clip}
    power = PowerPolicy(equal, wireless=False) if facts.link is None else "equal"
    made = plan(
        posterior,
        facts.channel,
        replace(facts.promise, **limits),
        step_size=settings.step_size,
        burn_in=settings.burn_in,
        samples=settings.samples,
        sampler=Sampler(init="zero", start=facts.rounds_before),
        policy=Policy(power=power),
        ledger=np.full(facts.devices, facts.spent),
        initial_w2_sq=1.0,
    )
    return made.replace(warnings=(), bound=None, objective=np.nan)  # which may look at the data


def stand_in(facts: Facts, strength: float, seed: int) -> Features:
    """Draw a table of the model, public data: classes are normal clusters, and numbers lie about a plane.

    Args:
        strength: the distance of two clusters of few over their spread, or the spread of mean targets over that of the
            noise.
    """
    generator, size = np.random.default_rng([seed, facts.features, facts.classes]), facts.features
    rows = min(facts.rows, MOST_ROWS)
    variance = np.arange(1, size + 1) ** -DECAY
    spread = np.sqrt(variance / variance.mean())
    turn = np.linalg.qr(generator.standard_normal((size, size)))[0]
    along = generator.standard_normal((rows + TEST_ROWS, size))
    if facts.classes:
        y: NDArray[Any] = generator.integers(facts.classes, size=len(along))
        center = generator.standard_normal((facts.classes, size))
        center -= center.mean(0)
        apart = np.sqrt(2 * facts.classes / (facts.classes - 1) * np.mean((center**2).sum(1)))
        # Among more classes, one is confused as rarely where they are further apart.
        along += center[y] * strength * (np.log2(facts.classes) if facts.classes > 3 else 1.0) ** 0.5 / apart
    else:
        mean = (along * spread**2) @ generator.standard_normal(size)
        y = strength * mean / mean.std() + generator.standard_normal(len(along))
        y /= (1 + strength**2) ** 0.5
    X = (along * spread) @ turn.T
    X /= np.sqrt(np.mean(X**2))
    return Features(X[:rows], y[:rows], X[rows:], y[rows:])


def expect(facts: Facts, asked: list[Settings], progress: Advance | None = None, most: int = DRAWN) -> list[Expected]:
    """Return what settings reach on the stand-ins, in their order.

    On a stand-in of fewer rows, steps are longer by as much: it moves as the table would, with more noise.

    Args:
        most: stand-ins of each strength; `DRAWN` by default.
    """
    given, asked = asked, [replace(one, step_size=one.step_size * facts.crowd) for one in asked]
    scaled = facts._replace(rows=min(facts.rows, MOST_ROWS), devices=min(facts.devices, MOST_ROWS))
    groups: dict[tuple[int, float, bool], dict[Settings, list[int]]] = {}
    for number, settings in enumerate(asked):  # chains that can be run together; those that differ in burn-in are one
        whole = replace(settings, burn_in=0, samples=settings.burn_in + settings.samples)
        alike = groups.setdefault((whole.samples, whole.prior_std, whole.whiten), {})
        alike.setdefault(whole, []).append(number)
    drawn = int(np.clip(NUMBERS // (facts.rows * facts.features), 1, most or DRAWN))
    strengths = STRENGTHS[facts.classes > 0] * drawn
    scores = np.zeros((len(strengths), len(asked), 2))
    for seed, strength in enumerate(strengths):
        table, key = stand_in(facts, strength, seed), jax.random.key(seed)
        for done, chains in enumerate(groups.values()):
            first = next(iter(chains))
            plain = private_posterior(scaled, first, table.X, table.y)
            posterior, after, _ = whiten(named(key, "whitening"), scaled, first, plain)
            plans = [make_plan(after, settings, suited(posterior, settings)) for settings in chains]
            theta = np.asarray(sample(key, posterior, plans).theta)
            places = np.array([(number, row) for row, numbers in enumerate(chains.values()) for number in numbers])
            skipped = np.array([asked[number].burn_in for number in places[:, 0]])
            for burn_in in np.unique(skipped):
                numbers, rows = places[skipped == burn_in].T
                scores[seed, numbers] = _scores(plain, theta[rows, burn_in:], table)
            if progress is not None:
                progress(seed * len(groups) + done + 1, len(strengths) * len(groups))
    nll, accuracy = np.exp(np.log(scores[..., 0]).mean(0)), scores[..., 1].mean(0)
    found = zip(given, nll.tolist(), accuracy.tolist(), strict=True)
    return [Expected(settings, loss, hits if facts.classes else None) for settings, loss, hits in found]


def _scores(posterior: Tabular, draws: Any, table: Features) -> Array:
    """Return the loss of predictions for further rows, and their accuracy, by draws[chain, draw, m]: [chain, 2]."""
    if isinstance(posterior, SoftmaxPosterior):
        p = posterior.predict(draws, table.X_test).astype(float)
        right = np.take_along_axis(p, table.y_test[None, :, None], axis=2)[..., 0] / p.sum(2)
        return np.stack([-np.log(np.maximum(right, 1e-12)).mean(1), (p.argmax(2) == table.y_test).mean(1)], axis=1)
    mean = draws.astype(float).mean(1) @ posterior.design_matrix(table.X_test).T
    loss = np.mean((mean - table.y_test) ** 2, axis=1)
    return np.stack([loss, np.zeros_like(loss)], axis=1)


_chosen: dict[Facts, list[Expected]] = {}


def choose(facts: Facts, progress: Advance | None = None) -> list[Expected]:
    """Return all candidates and what each is expected to reach, the one to take first; equal facts are asked once."""
    if facts.link is None and facts in _chosen:  # arrays of a link do not tell whether it is the same
        return list(_chosen[facts])
    found = _sorted(expect(facts, list(candidates(facts)), progress))
    if facts.features**2 * facts.devices <= LARGEST_MOMENTS:
        found = _sorted(found + expect(facts, near(found[0].settings, whiten=True)))
    # Of those that are as good, the average over most draws is the steadiest one.
    alike = [one for one in found if one.nll <= AS_GOOD * found[0].nll]
    found.sort(key=lambda one: one is not max(alike, key=lambda other: other.settings.samples))
    if facts.link is None:
        _chosen[facts] = list(found)
    return found


def _sorted(found: list[Expected]) -> list[Expected]:
    return sorted(found, key=lambda one: one.nll)


def worth(facts: Facts, chosen: Settings) -> dict[str, Expected]:
    """Return what settings near the chosen ones would reach with more of something, on stand-ins of that size."""
    promise, tried = facts.promise, near(chosen)
    more = {
        "as it is": facts,
        "twice epsilon": facts._replace(promise=replace(promise, epsilon=2 * np.asarray(promise.epsilon, dtype=float))),
        "twice the rows and devices": facts._replace(rows=2 * facts.rows, devices=2 * facts.devices),
    }
    if facts.link is not None:
        more["10 dB more"] = facts._replace(link=replace(facts.link, snr_db=np.asarray(facts.link.snr_db) + 10))
    found = {name: _sorted(expect(one, tried, most=min(FEW, DRAWN)))[0] for name, one in more.items()}
    longer = [replace(s, step_size=s.step_size / 2, burn_in=2 * s.burn_in, samples=2 * s.samples) for s in tried]
    return {**found, "twice the rounds": _sorted(expect(facts, longer, most=min(FEW, DRAWN)))[0]}
