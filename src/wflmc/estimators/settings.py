"""Settings of a fit, chosen without a look at the data: on a public stand-in of the same size.

A stand-in is drawn from the model itself: as many rows, features, classes and devices as the table has, and features
whose covariance falls off as those of tables do. Candidates are planned and run on it as they would be on the table,
under the same promise and over the same link, and the one with the best predictions for further rows is taken. All of
this is public and costs no privacy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.channel import Link
from wflmc.errors import without_data
from wflmc.evaluation.scores import calibration
from wflmc.planning import Plan, Policy, PowerPolicy, Sampler, plan
from wflmc.planning.policies import equal
from wflmc.posterior import GaussianPosterior, SoftmaxPosterior, gaussian_regression, softmax_regression
from wflmc.privacy import Privacy
from wflmc.releases import ideal_link
from wflmc.sampling import sample

Array = NDArray[np.float64]
Advance = Callable[[int, int], None]

CLIPS, TRAVELS, PRIORS, ROUNDS = (0.2, 0.4, 0.8), (0.03, 0.1, 0.25, 0.5, 1.0), (6.0, 12.0), (50, 100)
"""Candidates: the clip over the length of a row; how far clipped gradients of one row carry the prediction for it over
the whole chain; the spread of the prior's predictions; and rounds, of which half are burn-in."""
STRENGTHS = {True: (1.0, 2.0, 5.0), False: (1.0, 2.0)}
"""Distance of the stand-ins' classes over their spread, or the spread of their mean targets over the noise."""
DECAY = 1.0
"""Variances of the stand-in's directions fall off as number^−DECAY."""
MOST_ROWS, TEST_ROWS = 50_000, 1000
"""Of a stand-in, and of further ones that its predictions are scored on."""
SMALL, DRAWN = 10**5, 2
"""Numbers of a table from which on one stand-in of each strength is enough; else so many are drawn."""


@dataclass(frozen=True)
class Settings:
    """What is chosen of a fit; in units of scaled features, whose mean square is 1."""

    clip: float
    """Of a row's gradient, or of a device's where devices are hidden as a whole."""
    step_size: float
    burn_in: int
    samples: int
    prior_std: float


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


def candidates(facts: Facts) -> Iterator[Settings]:
    """Yield settings to choose from."""
    length = (facts.features + 1) ** 0.5
    # Gradients of a device's rows partly cancel.
    gradient = length if facts.by_record else length * (facts.rows / facts.devices) ** 0.75
    for rounds, prior, clip, travel in product(ROUNDS, PRIORS, CLIPS, TRAVELS):
        limit = clip * gradient
        step = travel / (limit * length * rounds * facts.crowd)
        yield Settings(limit, step, rounds // 2, rounds - rounds // 2, prior / length)


def private_posterior(
    facts: Facts, settings: Settings, X: Array, y: Any, owner: NDArray[np.intp] | None = None, classes: Any = None
) -> GaussianPosterior | SoftmaxPosterior:
    """Return the posterior of scaled features X[N, d] and targets or labels, with constants that tell nothing of them.

    Args:
        owner: the device of each row; by default nearly equal parts in their order.
    """
    common: dict[str, Any] = {"X": X, "y": y, "intercept": True, "prior_std": settings.prior_std}
    common["partition"] = "blocks" if owner is None else owner
    key = jax.random.key(0)  # nothing is drawn
    made: GaussianPosterior | SoftmaxPosterior
    if facts.classes:
        made = softmax_regression(key, facts.devices, classes=facts.classes if classes is None else classes, **common)
    else:
        made = gaussian_regression(key, facts.devices, **common)
    return suited(made, settings)


def suited(posterior: Any, settings: Settings) -> Any:
    """Return a posterior whose constants are public: the step size was chosen without the data, and suits an L."""
    curvature = settings.prior_std**-2
    return replace(posterior, mu=curvature, L=max(1 / settings.step_size, 1.01 * curvature))


def make_plan(facts: Facts, settings: Settings, posterior: GaussianPosterior | SoftmaxPosterior) -> Plan:
    """Return the plan of settings: what is left of a budget in equal parts, as draws count alike in an average."""
    limits: dict[str, Any] = {"clip": settings.clip, "example_clip": None}
    if facts.by_record:  # clipped one by one, the rows of a device need no other clip
        limits = {"clip": settings.clip * float(posterior.sizes.max()), "example_clip": settings.clip}
    power = PowerPolicy(equal, wireless=False) if facts.link is None else "equal"
    made = plan(
        posterior,
        ideal_link() if facts.link is None else facts.link,
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


@without_data
class StandIn(NamedTuple):
    """Public data in place of a table."""

    X: Array
    y: NDArray[Any]
    X_test: Array
    y_test: NDArray[Any]


def stand_in(facts: Facts, strength: float, seed: int) -> StandIn:
    """Draw a table of the model: classes are normal clusters, and numbers lie about a plane.

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
    return StandIn(X[:rows], y[:rows], X[rows:], y[rows:])


def expect(facts: Facts, asked: list[Settings], progress: Advance | None = None) -> list[Expected]:
    """Return what settings reach on the stand-ins, in their order.

    On a stand-in of fewer rows, steps are longer by as much: it moves as the table would, with more noise.
    """
    given, asked = asked, [replace(one, step_size=one.step_size * facts.crowd) for one in asked]
    scaled = facts._replace(rows=min(facts.rows, MOST_ROWS), devices=min(facts.devices, MOST_ROWS))
    groups: dict[tuple[int, float], list[int]] = {}
    for number, settings in enumerate(asked):  # chains that can be run together
        groups.setdefault((settings.samples, settings.prior_std), []).append(number)
    strengths = STRENGTHS[facts.classes > 0] * (DRAWN if facts.rows * facts.features < SMALL else 1)
    scores = np.zeros((len(strengths), len(asked), 2))
    for seed, strength in enumerate(strengths):
        table = stand_in(facts, strength, seed)
        for done, members in enumerate(groups.values()):
            posterior = private_posterior(scaled, asked[members[0]], table.X, table.y)
            plans = [make_plan(scaled, asked[number], suited(posterior, asked[number])) for number in members]
            theta = np.asarray(sample(jax.random.key(seed), posterior, plans).theta)
            for number, draws in zip(members, theta, strict=True):
                scores[seed, number] = _score(posterior, draws, table)
            if progress is not None:
                progress(seed * len(groups) + done + 1, len(strengths) * len(groups))
    nll, accuracy = np.exp(np.log(scores[..., 0]).mean(0)), scores[..., 1].mean(0)
    return [
        Expected(s, float(n), float(a) if facts.classes else None) for s, n, a in zip(given, nll, accuracy, strict=True)
    ]


def _score(posterior: GaussianPosterior | SoftmaxPosterior, draws: Any, table: StandIn) -> tuple[float, float]:
    """Return the loss of predictions for further rows, and their accuracy."""
    if isinstance(posterior, SoftmaxPosterior):
        p = np.maximum(posterior.predict(draws[None], table.X_test)[0].astype(float), 1e-12)
        found = calibration(p / p.sum(1, keepdims=True), table.y_test)
        return float(found.nll), float(found.accuracy)
    mean = posterior.design_matrix(table.X_test) @ draws.astype(float).mean(0)
    return float(np.mean((mean - table.y_test) ** 2)), 0.0


def choose(facts: Facts, progress: Advance | None = None) -> list[Expected]:
    """Return all candidates and what each is expected to reach, the best one first; equal facts are asked once."""
    if facts.link is not None:  # whose arrays do not tell whether it is the same
        return _sorted(facts, list(candidates(facts)), progress)
    if facts not in _chosen:
        _chosen[facts] = _sorted(facts, list(candidates(facts)), progress)
    return list(_chosen[facts])


_chosen: dict[Facts, list[Expected]] = {}


def _sorted(facts: Facts, asked: list[Settings], progress: Advance | None = None) -> list[Expected]:
    return sorted(expect(facts, asked, progress), key=lambda one: one.nll)


def worth(facts: Facts, chosen: Settings) -> dict[str, Expected]:
    """Return what settings near the chosen ones would reach with more of something, on stand-ins of that size."""
    near = [
        replace(chosen, clip=chosen.clip * clip, step_size=chosen.step_size * step)
        for clip, step in product((0.5, 1.0, 2.0), repeat=2)
    ]
    promise = facts.promise
    more = {
        "as it is": facts,
        "twice epsilon": facts._replace(promise=replace(promise, epsilon=2 * np.asarray(promise.epsilon, dtype=float))),
        "twice the rows and devices": facts._replace(rows=2 * facts.rows, devices=2 * facts.devices),
    }
    if facts.link is not None:
        more["10 dB more"] = facts._replace(link=replace(facts.link, snr_db=np.asarray(facts.link.snr_db) + 10))
    found = {name: _sorted(one, near)[0] for name, one in more.items()}
    longer = [replace(s, step_size=s.step_size / 2, burn_in=2 * s.burn_in, samples=2 * s.samples) for s in near]
    return {**found, "twice the rounds": _sorted(facts, longer)[0]}
