"""Public tables in the place of a private one, to try settings of a fit on.

A stand-in is a table drawn from the model itself: as many rows, features, classes and
devices as the table has, and features whose covariance falls off as those of tables do.
With public rows, tables are drawn from laws that these allow
(`wflmc.apps.tables.public`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from wflmc.apps.tables.settings import MAX_STAND_IN_ROWS, Facts
from wflmc.privacy.releases import Array
from wflmc.support.errors import without_data

STRENGTHS = {True: (1.0, 2.0, 5.0), False: (1.0, 2.0)}
"""How far a stand-in's targets are above their noise, for classes and for numbers.

The distance of two classes over their spread, or the spread of mean targets over the
noise.
"""
DISTORTIONS = (0.0, 0.5, 1.0)
"""How far tables differ from public labelled rows that they are drawn from.

On undistorted tables alone the narrowest prior would always win. For as many tables as
of one distortion, the mean of the prior misleads: they are stand-ins of the largest of
`STRENGTHS`, where a chain that stays at a wrong mean loses most.
"""
VARIANCE_DECAY = 1.0
"""Variances of the stand-in's directions fall off as number^−VARIANCE_DECAY."""
TEST_ROWS = 1000
"""Further rows of a stand-in, which its predictions are scored on."""
CROWDED_CLASSES = 3
"""With more classes than this, a stand-in's classes are further apart."""


@without_data
class StandIn(NamedTuple):
    """A public table that is drawn from a known law, and further rows of it.

    Args:
        X: features, [N, d].
        y: classes from 0, or targets, [N].
        X_test: features of further rows, [n, d].
        expected: what the law says of these rows: the probability of every class,
            [n, C], or the mean of the target, [n].
        noise: variance of a target about its mean; 0 for classes.
    """

    X: Array
    y: np.ndarray
    X_test: Array
    expected: Array
    noise: float = 0.0


def stand_in(facts: Facts, strength: float, seed: int) -> StandIn:
    """Draw a table of the model, which is public.

    Classes are normal clusters whose log-odds are linear in the features; targets that
    are numbers are linear in them, with noise. The features have directions at random,
    in the k-th of which their variance is proportional to 1/k.

    Args:
        facts: the size of the table, and the shares of its classes: as they were
            released, under the promise, or else equal.
        strength: the distance of two clusters over their spread, where there are few of
            them, or the spread of mean targets over that of the noise.
        seed: of the draw.

    Returns:
        Up to `MAX_STAND_IN_ROWS` rows, and `TEST_ROWS` further ones with what the model
        expects of their outcomes; the mean square of all features is 1.
    """
    dim = facts.features
    public = facts.public
    generator = np.random.default_rng([seed, dim, facts.classes])
    rows = min(facts.rows, MAX_STAND_IN_ROWS)
    directions = np.eye(dim)
    if public is None:
        variance = np.arange(1, dim + 1) ** -VARIANCE_DECAY
        spread = np.sqrt(variance / variance.mean())
        rotation = np.linalg.qr(generator.standard_normal((dim, dim)))[0]
        coordinates = generator.standard_normal((rows + TEST_ROWS, dim))
        weighted = coordinates * spread**2
    else:
        directions = public.directions
        coordinates = public.draw_features(generator, rows + TEST_ROWS)
        weighted = coordinates @ directions
    if facts.classes:
        outcome = _draw_classes(
            generator,
            facts=facts,
            coordinates=coordinates,
            directions=directions,
            strength=strength,
            rows=rows,
        )
    else:
        outcome = _draw_targets(
            generator,
            coordinates=coordinates,
            weighted=weighted,
            strength=strength,
            rows=rows,
        )
    if public is None:
        X = (outcome.coordinates * spread) @ rotation.T
        X /= np.sqrt(np.mean(X**2))
    else:
        distortion = 1.0 if public.is_labelled else 0.0
        X = public.scaled_features(generator, outcome.coordinates, distortion)
    return StandIn(
        X=X[:rows],
        y=outcome.y[:rows],
        X_test=X[rows:],
        expected=outcome.expected,
        noise=outcome.noise,
    )


def distorted_table(facts: Facts, distortion: float, seed: int) -> StandIn:
    """Draw a table of a law that is near to what public labelled rows say.

    Args:
        facts: the size of the table, and the public rows.
        distortion: how far from what they say, 0 to 1; see
            `PublicRows.draw_distorted`.
        seed: of the draw.

    Returns:
        As many rows as `stand_in` does.
    """
    public = facts.public
    assert public is not None  # it has labels
    generator = np.random.default_rng([seed, facts.features, facts.classes])
    rows = min(facts.rows, MAX_STAND_IN_ROWS)
    drawn = public.draw_distorted(generator, rows + TEST_ROWS, distortion)
    return StandIn(
        X=drawn.X[:rows],
        y=drawn.y[:rows],
        X_test=drawn.X[rows:],
        expected=drawn.expected[rows:],
        noise=drawn.noise,
    )


def trial_tables(facts: Facts, stand_ins: int) -> Sequence[Callable[[int], StandIn]]:
    """Return functions that draw the tables to try settings on, from a seed each.

    Args:
        facts: of the table.
        stand_ins: of each kind.
    """
    strengths = STRENGTHS[facts.classes > 0]
    if facts.prior_mean is None:
        return [
            partial(stand_in, facts, strength) for strength in strengths
        ] * stand_ins
    tables: list[Callable[[int], StandIn]] = [
        partial(distorted_table, facts, distortion) for distortion in DISTORTIONS
    ]
    tables.append(partial(stand_in, facts, max(strengths)))
    return tables * stand_ins


@without_data
class _DrawnOutcome(NamedTuple):
    """What is drawn for the N + n rows of a stand-in; see `StandIn`.

    Args:
        coordinates: of all rows, in directions of unit variance, [N + n, d].
        y: of all rows, [N + n].
        expected: what the law says of the last n rows, [n, …].
        noise: variance of a target about its mean.
    """

    coordinates: Array
    y: np.ndarray
    expected: Array
    noise: float


def _draw_classes(
    generator: np.random.Generator,
    facts: Facts,
    coordinates: Array,
    directions: Array,
    strength: float,
    rows: int,
) -> _DrawnOutcome:
    """Draw the class of every row, and move the row to the cluster of its class.

    Args:
        generator: of the stand-in.
        facts: of the table.
        coordinates: of all rows, [N + n, d].
        directions: by which clusters may be further apart in some, [d, d].
        strength: as of `stand_in`.
        rows: N.
    """
    classes = facts.classes
    shares = facts.class_shares
    y = generator.choice(classes, size=len(coordinates), p=shares)
    center = generator.standard_normal((classes, coordinates.shape[1])) @ directions
    center -= center.mean(0)
    mean_square = np.mean((center**2).sum(1))
    # Of two centres, the root mean square over all pairs.
    distance = np.sqrt(2 * classes / (classes - 1) * mean_square)
    center -= shares @ center  # scaled features have a mean of zero
    # Among more classes, one is confused as rarely where they are further apart.
    crowding = np.log2(classes) if classes > CROWDED_CLASSES else 1.0
    center *= strength * crowding**0.5 / distance
    moved = coordinates + center[y]
    log_density = moved[rows:] @ center.T - (center**2).sum(1) / 2
    expected = softmax(log_density + np.log(shares), axis=1)
    return _DrawnOutcome(moved, y, expected, noise=0.0)


def _draw_targets(
    generator: np.random.Generator,
    coordinates: Array,
    weighted: Array,
    strength: float,
    rows: int,
) -> _DrawnOutcome:
    """Draw the target of every row, of variance about 1.

    It depends most on the directions in which features vary most, hence the spread.

    Args:
        generator: of the stand-in.
        coordinates: of all rows, [N + n, d].
        weighted: the coordinates, longer where targets depend on them more.
        strength: as of `stand_in`.
        rows: N.
    """
    slope = generator.standard_normal(coordinates.shape[1])
    mean = weighted @ slope
    noise = 1 / (1 + strength**2)
    mean *= (1 - noise) ** 0.5 / mean.std()
    y = mean + noise**0.5 * generator.standard_normal(len(coordinates))
    return _DrawnOutcome(coordinates, y, mean[rows:], noise)
