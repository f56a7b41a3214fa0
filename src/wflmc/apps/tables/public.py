"""What public rows say of a table, before any private row is looked at.

Rows of people who are promised nothing by a fit scale and whiten its features. Where
they are labelled, the same model is fitted to them, and its mode is the mean of the
prior. They also have laws that private rows might follow: settings are tried on tables
drawn from these. All of this is free, as no private row is looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_softmax, softmax
from sklearn.covariance import ledoit_wolf

from wflmc.apps.tables.scaling import SCALED_LIMIT, Scaling
from wflmc.posterior import gaussian_regression, softmax_regression, whitening
from wflmc.posterior.inputs import Names, as_classes, check_data, with_intercept
from wflmc.posterior.regression import Regression
from wflmc.privacy.releases import Array
from wflmc.support.errors import Fault, InputError, renamed_keys, without_data
from wflmc.support.keys import digest

PublicExamples: TypeAlias = tuple[ArrayLike, ArrayLike | None]
"""Features of public rows, [n, d], and their labels or targets, [n], or None."""

MIN_DIRECTION_VARIANCE = 0.05
"""Directions of less variance, in that of a column, are stretched as if they had it.

Public rows are few, or unlike the private ones: what varies little among them may vary
more there.
"""
MAX_WHITENED_FEATURES = 2000
"""Features above which directions are not told apart, and columns are scaled alone."""
CONSTANT_COLUMN = 1e-9
"""A column that varies less than this, relative to its size, is constant."""
PRIOR_PREDICTIONS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Candidates for the spread of predictions under the prior of the public fit."""
FOLDS = 5
"""Parts of the public rows, each of which is predicted from the others."""
MAX_FOLDED_ROWS = 2000
"""Public rows that the spread of the prior is chosen on, at most."""
MIN_CURVATURE = 1e-3
"""Least curvature of the cost by a row: where all rows are predicted for sure."""
MIN_DISTINCT_FRACTION = 0.9
"""Rows that differ from all others, over all rows, where equal rows mean equal people."""
MAX_PRIOR_WEIGHT = 0.1
"""The most that a prior weighs, in private rows, over the number of these."""
COLUMN_DISTORTION = 0.5
"""Columns of a fully distorted table are longer or shorter by a factor exp(0.5 z).

z is standard normal. They are moved by 0.5 z standard deviations too.
"""
MAX_FLIPPED_FRACTION = 0.3
"""Fraction of the public labels that count as wrong where a table is fully distorted."""
MIN_UNFLIPPED_SHARE = 0.05
"""Least share of a class without flipped labels, over its share among public labels."""
COEFFICIENT_DRIFT = 0.5
"""Parameters of a fully distorted table differ from the prior's mean by this factor.

It is a standard deviation, over the root mean square of the prior's mean.
"""


@without_data
class DrawnRows(NamedTuple):
    """Rows that are drawn from a law which public rows allow.

    Args:
        X: features, scaled as private rows will be, [n, d].
        y: classes from 0, or scaled targets, [n].
        expected: what the law says of each row: the probability of every class,
            [n, C], or the mean of the target, [n].
        noise: variance of a target about its mean; 0 for classes.
    """

    X: Array
    y: np.ndarray
    expected: Array
    noise: float


@without_data
@dataclass(frozen=True, eq=False)
class PublicRows:
    """Public rows, scaled, and what follows from them.

    Values of equal rows are equal, so that settings are chosen once for them.

    Args:
        Z: scaled features, [n, d].
        scaling: of the features, and behind them of a labelled target that is a number.
        root: W, by which features with a constant have unit second moments,
            [d + 1, d + 1].
        classes: C; 0 where targets are numbers.
        prior_mean: θ₀[m], the mode on these rows, for scaled features and a constant;
            for C classes m = C (d + 1), class after class. None without labels.
        shares: of every class among the rows; empty for numbers and without labels.
        whitens: whether rows that were left out are predicted better with a prior on
            the parameters of whitened features than on those of scaled ones.
        doubt: standard deviation of what the rows leave open about each parameter, in
            the coordinates of the prior.
        noise: variance of a scaled target about its mean; 0 for classes.
        name: a digest of the rows and their labels.
    """

    Z: Array
    scaling: Scaling
    root: Array
    classes: int
    name: str
    prior_mean: Array | None = None
    shares: tuple[float, ...] = ()
    whitens: bool = True
    doubt: float = 0.0
    noise: float = 0.0

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, PublicRows):
            return NotImplemented
        return (self.name, self.classes) == (value.name, value.classes)

    def __hash__(self) -> int:
        return hash((self.name, self.classes))

    @property
    def is_labelled(self) -> bool:
        """Whether the rows have labels or targets, so that the prior has a mean."""
        return self.prior_mean is not None

    @property
    def directions(self) -> Array:
        """How far whitened features reach in the coordinates of the prior, [d, d].

        The identity where these are whitened; else scaled features are whitened ones
        times this matrix.
        """
        features = self.Z.shape[1]
        if self.whitens:
            return np.eye(features)
        return np.asarray(np.linalg.inv(self.root[:features, :features]))

    @property
    def feature_scaling(self) -> Scaling:
        """The scaling of the features alone, [d]."""
        features = self.Z.shape[1]
        return Scaling(self.scaling.center[:features], self.scaling.scale[:features])

    def prior_std(self, rows: int, weight: float) -> float:
        r"""Return the standard deviation of a prior that weighs as much as some rows.

        In a direction of unit second moment, a row curves the cost by at least κ: by 1
        over the noise of unit variance for numbers, and for classes at odds $q_c$ by
        the smallest eigenvalue of $\mathrm{diag}(q) - q q^T$ but for the 0 of moving
        all classes alike. N rows have at least the curvature Nκ there, and a prior of
        $s^2 = 1/(w N κ)$ that of w N rows. With w = `MAX_PRIOR_WEIGHT`, which is the
        narrowest prior that a fit tries, the posterior is at most 1/11 of the way from
        the private optimum to the prior's mean. This holds where private rows have the
        odds and second moments of the public ones; where a direction has the moment
        v < 1, or a class is rarer than among public rows, the prior weighs more.

        Args:
            rows: N, of the private table, which is public.
            weight: w, above 0.

        Returns:
            s, of each parameter of whitened features.
        """
        curvature = 1.0
        if self.classes:
            shares = np.asarray(self.shares)
            hessian = np.diag(shares) - np.outer(shares, shares)
            curvature = float(np.linalg.eigvalsh(hessian)[1])
        return float((weight * rows * max(curvature, MIN_CURVATURE)) ** -0.5)

    def draw_features(self, generator: np.random.Generator, count: int) -> Array:
        """Draw whitened features like those of the public rows.

        Public rows are drawn with replacement, and moved by normal noise of Silverman's
        bandwidth without making them vary more: few rows that are repeated exactly
        could be learned by heart.

        Args:
            generator: of the draw.
            count: how many rows are drawn.

        Returns:
            [count, d], of about unit second moments.
        """
        available, features = self.Z.shape
        power = 1 / (features + 4)
        bandwidth = min(1.0, (4 / ((features + 2) * available)) ** power)
        drawn = self.Z[generator.integers(available, size=count)]
        noise = generator.standard_normal((count, features))
        whitened = drawn @ self.root[:features, :features]
        return np.asarray((1 - bandwidth**2) ** 0.5 * whitened + bandwidth * noise)

    def scaled_features(
        self, generator: np.random.Generator, whitened: Array, distortion: float
    ) -> Array:
        """Return whitened features as private ones will be scaled: by public rows.

        Args:
            generator: of the units of the columns.
            whitened: [n, d].
            distortion: how far columns are in other units than public ones, 0 to 1.

        Returns:
            [n, d], within the limit of scaled values.
        """
        features = whitened.shape[1]
        root = self.root[:features, :features]
        reach = COLUMN_DISTORTION * distortion
        factor = np.exp(reach * generator.standard_normal(features))
        shift = reach * generator.standard_normal(features)
        X = factor * np.linalg.solve(root.T, whitened.T).T + shift
        return np.asarray(np.clip(X, -SCALED_LIMIT, SCALED_LIMIT))

    def draw_distorted(
        self, generator: np.random.Generator, count: int, distortion: float
    ) -> DrawnRows:
        """Draw rows of a law that differs from what the public rows say.

        Parameters are drawn about the prior's mean, in its coordinates, as far as the
        public rows leave them open (`doubt`). With distortion, they drift further;
        public labels count as flipped at random, so that coefficients are larger than
        they seem; and columns are in other units than public ones.

        Args:
            generator: of the draw.
            count: how many rows are drawn.
            distortion: 0 for rows that are as the public ones say, 1 for the largest.

        Returns:
            Rows that are scaled as private ones will be: by the public scales.
        """
        assert self.prior_mean is not None
        groups = max(1, self.classes)
        mean: Array = self.prior_mean.reshape(groups, -1)
        if self.whitens:
            mean = np.asarray(np.linalg.solve(self.root.T, mean.T).T, dtype=float)
        law = mean.copy()
        if self.classes:
            flipped = MAX_FLIPPED_FRACTION * distortion * generator.random()
            law = self._unflipped(law, flipped)
        size = float(np.sqrt(np.mean(mean**2)))
        spread = np.hypot(self.doubt, COEFFICIENT_DRIFT * distortion * size)
        law += spread * generator.standard_normal(law.shape)
        whitened = self.draw_features(generator, count)
        means = with_intercept(whitened @ self.directions) @ law.T
        expected = softmax(means, axis=1) if self.classes else means[:, 0]
        if self.classes:
            uniform = generator.random((count, 1))
            y = (uniform > np.cumsum(expected, axis=1)[:, :-1]).sum(1)
        else:
            y = expected + self.noise**0.5 * generator.standard_normal(count)
        X = self.scaled_features(generator, whitened, distortion)
        return DrawnRows(X, y, expected, noise=self.noise)

    def _unflipped(self, law: Array, flipped: float) -> Array:
        """Return parameters that flipped labels would have turned into others.

        With a fraction f of labels replaced by any other, a class of share q is seen
        with $q' = q(1 - f) + (1 - q) f/(C - 1)$, and coefficients seem smaller by the
        factor $1 - f - f/(C - 1)$, to first order and where odds are even.

        Args:
            law: parameters of features and a constant, [C, d + 1].
            flipped: f, below 1 − 1/C.
        """
        by_chance = flipped / (self.classes - 1)
        remaining = 1 - flipped - by_chance
        shares = np.asarray(self.shares)
        unflipped = (shares - by_chance) / remaining
        unflipped = np.maximum(unflipped, MIN_UNFLIPPED_SHARE * shares)
        features = law[:, :-1] / remaining
        constants = law[:, -1] + np.log(unflipped / shares)
        return np.column_stack([features, constants])


def public_pair(public: object) -> PublicExamples:
    """Return features and labels of public rows, as they were passed.

    Args:
        public: what a caller has as (X, y).

    Returns:
        X, an array or a frame, and y, or None without labels.

    Raises:
        InputError: it is no pair, or X is no table.
    """
    requirement = "(X, y) of public rows, with y = None where they have no labels"
    if not isinstance(public, tuple | list) or len(public) != 2:
        raise InputError("public", Fault("is no pair"), requirement)
    X, labels = public
    try:
        dimensions = np.ndim(X)
    except ValueError:  # rows of unlike lengths
        dimensions = 0
    if dimensions != 2:
        raise InputError("public", Fault("has an X that is no table"), requirement)
    return X, labels


def in_column_order(X: ArrayLike, columns: Sequence[str] | None) -> ArrayLike:
    """Return public features with the columns of the private ones, in their order.

    Args:
        X: a frame, whose columns go by name; or an array, whose columns go by place.
        columns: names of the private features; None where they have none.

    Raises:
        InputError: a frame has other columns.
    """
    names = getattr(X, "columns", None)
    if names is None or columns is None:
        return X
    if sorted(map(str, names)) != sorted(map(str, columns)):
        problem = Fault("has other columns than the private rows")
        raise InputError("public", problem, f"the columns {', '.join(columns)}")
    ordered: ArrayLike = X[list(columns)]  # type: ignore[call-overload, index]
    return ordered


def public_arrays(
    public: object, features: int, names: Names
) -> tuple[Array, np.ndarray | None]:
    """Return public rows, and their labels, as `learn_public_rows` takes them.

    Args:
        public: features and labels as they were passed.
        features: d, of the private rows.
        names: the label of every class; empty where targets are numbers.

    Returns:
        Features, [n, d], and classes from 0 or targets, [n]; None without labels.

    Raises:
        InputError: they are not finite numbers, of other shapes, or labelled by none of
            the names.
    """
    X, labels = public_pair(public)
    count = len(np.atleast_1d(X))
    if labels is not None and np.shape(labels) != (count,):
        problem = Fault(f"has labels of shape {np.shape(labels)}")
        raise InputError("public", problem, f"labelled row by row, [{count}]")
    y: np.ndarray | None = None
    with renamed_keys({"data": "public"}):
        if labels is None or names:
            rows, _ = check_data(X, np.zeros(count))
        else:
            rows, y = check_data(X, labels)
        if labels is not None and names:
            y = as_classes(labels, names)
    if rows.shape[1] != features:
        problem = Fault(f"has rows of {rows.shape[1]} features")
        raise InputError("public", problem, f"rows of {features} features")
    return rows.astype(float), y


def learn_public_rows(
    X: Array, y: np.ndarray | None, classes: int, ranges: Array | None = None
) -> PublicRows:
    """Learn from public rows what a fit may know before it looks at private ones.

    Args:
        X: features in their own units, [n, d].
        y: classes from 0, or targets in their own unit, [n]; None without labels.
        classes: C; 0 where targets are numbers.
        ranges: least and largest value of features, and of a target behind them, that
            are declared and count in place of those of the rows, [d, 2] or [d + 1, 2];
            nan elsewhere.

    Returns:
        Scales, whitening and, where there are labels, the mean of the prior. The prior
        of the public fit is the one with which rows that were left out are predicted
        best.

    Raises:
        InputError: there are not two rows, or all of them have one label.
    """
    if len(X) < 2:
        raise InputError("public", Fault("has one row"), "at least two rows")
    if y is not None and np.unique(y).size < 2:
        problem = Fault("has one class only" if classes else "has one target only")
        requirement = "labelled by different values, or not labelled at all"
        raise InputError("public", problem, requirement)
    features = X.shape[1]
    columns = X
    groups: tuple[int, ...] = ()
    if y is not None and not classes:
        columns = np.column_stack([X, y])
        groups = (features,)
    if ranges is None:
        ranges = np.full((columns.shape[1], 2), np.nan)
    scaling = _scaling(columns, groups, ranges[: columns.shape[1]])
    Z = Scaling(scaling.center[:features], scaling.scale[:features])(X)
    name = digest(X) if y is None else digest(X, y)
    unlabelled = PublicRows(Z, scaling, root=_root(Z), classes=classes, name=name)
    if y is None:
        return unlabelled
    outcomes = y
    if not classes:
        scaled_targets = (y - scaling.center[-1]) / scaling.scale[-1]
        outcomes = np.clip(scaled_targets, -SCALED_LIMIT, SCALED_LIMIT)
    return _with_prior_mean(unlabelled, outcomes)


def check_distinct(
    X: Array, y: np.ndarray | None, private_X: Array, private_y: np.ndarray
) -> None:
    """Refuse public rows that are the private ones, or some of them, in any order.

    Args:
        X: features of the public rows, [n, d].
        y: their labels; None without any.
        private_X: features of the private rows, [N, d].
        private_y: their labels.

    Raises:
        InputError: every public row is one of the private ones. Rows that are repeated
            say nothing: among few categories, unlike people have equal rows.
    """
    public_columns: list[np.ndarray] = [X]
    private_columns: list[np.ndarray] = [private_X]
    if y is not None:
        names = np.unique(np.concatenate([y, private_y]))
        public_columns.append(np.searchsorted(names, y)[:, None])
        private_columns.append(np.searchsorted(names, private_y)[:, None])
    public_rows = _distinct_rows(public_columns)
    private_rows = _distinct_rows(private_columns)
    if len(public_rows) < MIN_DISTINCT_FRACTION * len(X):
        return
    if len(private_rows) < MIN_DISTINCT_FRACTION * len(private_X):
        return
    if public_rows <= private_rows:
        requirement = "other rows than the table's, which are private"
        raise InputError("public", Fault("has only rows of the table"), requirement)


def _distinct_rows(columns: list[np.ndarray]) -> set[bytes]:
    """Return the bytes of every row of columns side by side, each once."""
    rows = np.ascontiguousarray(np.hstack(columns).astype(float) + 0.0)
    return {row.tobytes() for row in rows}


def parameters_at_shares(shares: ArrayLike, features: int) -> Array:
    """Return parameters by which every row has the odds of the classes.

    Args:
        shares: of the classes, above 0, [C].
        features: d, without the constant.

    Returns:
        Zeros but for the constants, class after class, [C (d + 1)].
    """
    log_shares = np.log(np.asarray(shares, dtype=float))
    parameters = np.zeros((log_shares.size, features + 1))
    parameters[:, -1] = log_shares - log_shares.mean()
    return parameters.ravel()


def _scaling(columns: Array, groups: tuple[int, ...], ranges: Array) -> Scaling:
    """Return scales as a release has them: ranges, by the spread within all of them.

    A column that is seldom other than zero, such as a rare category, is not stretched
    further than others of its range. Columns that are constant keep their unit. A range
    that is declared counts in place of that of the rows.

    Args:
        columns: [n, d].
        groups: where a group of columns begins that has a spread of its own.
        ranges: that are declared, [d, 2]; nan elsewhere.
    """
    is_declared = ~np.isnan(ranges).any(1)
    center = columns.mean(0)
    is_outside = (center < ranges[:, 0]) | (center > ranges[:, 1])
    center = np.where(is_outside, ranges.mean(1), center)
    half_width = np.ptp(columns, axis=0) / 2
    size = np.abs(columns).max(0)
    is_constant = half_width <= CONSTANT_COLUMN * size
    half_width = np.where(is_constant, np.maximum(size, 1.0), half_width)
    spread = np.ones(len(center))
    for first, end in pairwise([0, *groups, len(center)]):
        varying = np.flatnonzero(~is_constant[first:end]) + first
        if varying.size:
            in_range = columns[:, varying].std(0) / half_width[varying]
            spread[first:end] = np.sqrt(np.mean(in_range**2))
    declared_half_width = np.ptp(ranges, axis=1) / 2
    half_width = np.where(is_declared, declared_half_width, half_width)
    return Scaling(center, half_width * spread)


def _root(Z: Array) -> Array:
    """Return W[d + 1, d + 1] by the moments of scaled features, shrunk where rows are few."""
    features = Z.shape[1]
    covariance = np.eye(features)
    if features <= MAX_WHITENED_FEATURES:
        covariance, _ = ledoit_wolf(Z, assume_centered=True)
    return whitening(
        np.zeros(features),
        covariance,
        intercept=True,
        min_variance=MIN_DIRECTION_VARIANCE,
    )


def _with_prior_mean(public: PublicRows, outcomes: np.ndarray) -> PublicRows:
    """Return public rows with what follows from their labels.

    Args:
        public: without it.
        outcomes: classes from 0, or scaled targets, [n].
    """
    count, features = public.Z.shape
    shares: tuple[float, ...] = ()
    if public.classes:
        counts = np.bincount(outcomes, minlength=public.classes) + 0.5
        shares = tuple((counts / counts.sum()).tolist())
    widths = [spread / (features + 1) ** 0.5 for spread in PRIOR_PREDICTIONS]
    fits = {
        (whitens, width): partial(
            _mode, root=public.root if whitens else None, shares=shares, width=width
        )
        for whitens, width in product((True, False), widths)
    }
    losses = {case: _left_out_loss(public, outcomes, fit) for case, fit in fits.items()}
    best = min(losses, key=lambda case: losses[case])
    whitens, width = best
    theta = fits[best](public.Z, outcomes)
    noise = 0.0
    if public.classes:
        logits = with_intercept(public.Z) @ theta.reshape(public.classes, -1).T
        squares = (softmax(logits, axis=1) ** 2).sum(1)
        curvature = float(1 - squares.mean()) / (public.classes - 1)
    else:
        noise = float(np.clip(losses[best], MIN_CURVATURE, 1.0))
        curvature = 1 / noise
    precision = count * max(curvature, MIN_CURVATURE) + width**-2
    return replace(
        public,
        prior_mean=theta,
        shares=shares,
        whitens=whitens,
        doubt=precision**-0.5,
        noise=noise,
    )


def _left_out_loss(
    public: PublicRows,
    outcomes: np.ndarray,
    fit: Callable[[Array, np.ndarray], Array],
) -> float:
    """Return the mean loss on rows that are predicted by a fit to other ones.

    Args:
        public: rows, of which some thousands count.
        outcomes: classes from 0, or scaled targets, [n].
        fit: from rows and their outcomes to parameters.
    """
    count = len(public.Z)
    generator = np.random.default_rng(0)
    folded = generator.permutation(count)[:MAX_FOLDED_ROWS]
    fold = np.arange(folded.size) % min(FOLDS, count)
    loss = 0.0
    for number in range(fold.max() + 1):
        fitted = folded[fold != number]
        tested = folded[fold == number]
        theta = fit(public.Z[fitted], outcomes[fitted])
        loss += _total_loss(theta, public.Z[tested], outcomes[tested], public.classes)
    return loss / folded.size


def _mode(
    Z: Array,
    outcomes: np.ndarray,
    *,
    root: Array | None,
    shares: tuple[float, ...],
    width: float,
) -> Array:
    """Return the mode of the model on public rows, θ[m].

    Args:
        Z: scaled features, [n, d].
        outcomes: classes from 0, or scaled targets, [n].
        root: W, in whose coordinates the prior is; None: on the parameters.
        shares: of the classes; empty for numbers.
        width: standard deviation of the prior.
    """
    # One device holds all rows, so that no key has any effect.
    key = jax.random.key(0)
    model: Regression
    if shares:
        model = softmax_regression(
            key,
            1,
            X=Z,
            y=outcomes,
            classes=len(shares),
            intercept=True,
            prior_std=width,
            prior_mean=parameters_at_shares(shares, Z.shape[1]),
        )
    else:
        model = gaussian_regression(
            key, 1, X=Z, y=outcomes, intercept=True, prior_std=width
        )
    if root is not None:
        model = model.whitened(root, "whitened")
    return np.asarray(model.mode, dtype=float)


def _total_loss(theta: Array, Z: Array, outcomes: np.ndarray, classes: int) -> float:
    """Return the sum of −log p(class), or of squared errors, over rows."""
    design = with_intercept(Z)
    if not classes:
        return float(((outcomes - design @ theta) ** 2).sum())
    log_probabilities = log_softmax(design @ theta.reshape(classes, -1).T, axis=1)
    return float(-log_probabilities[np.arange(len(Z)), outcomes].sum())
