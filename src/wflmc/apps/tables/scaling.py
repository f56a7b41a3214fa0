r"""Scales of features that are paid for: where the values of every column lie.

They are released once, over the channel of the gradients, by up to three sums. The
first counts, by column, the values of each order of magnitude; the second, within the
magnitude that was found for a column, those of each part of its range. From these
counts a range is read off that holds most of the values. The third has the columns'
means and their mean square within these ranges. Ranges that are public are taken as
they are, and cost nothing. Frequencies of classes are released in the same way, by one
sum (docs/explanation/privacy.md).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.channel import Link
from wflmc.privacy import Privacy
from wflmc.privacy.releases import ReleaseChannel, ideal_link
from wflmc.support.errors import InputError
from wflmc.support.keys import check_key, digest

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

EXPONENTS = np.arange(-30, 41)
"""Orders of magnitude, in powers of two; larger and smaller ones are cut to them."""
MAGNITUDE_KINDS = EXPONENTS.size + 1
"""Kinds of values that the first sum counts: zeros, and those of each order."""
RANGE_PARTS = 8
"""Parts of the range from −M to M, where M is a column's magnitude."""
MIN_WINDOW_FRACTION = 0.25
"""The fraction of a column's values that its range holds, at least."""
MIN_EVIDENCE = 6.0
"""Log-likelihood ratio above which a column's magnitude is believed.

Other columns take the median of those that are.
"""
MAX_QUARTILE_DISTANCE = 1.0
"""Distance of the quartiles of the columns' orders of magnitude, in powers of two.

Up to it, all of them have one range.
"""
MIN_ZERO_FRACTION = 0.2
"""Fraction of zeros from which on a range includes zero."""
SCALED_LIMIT = 6.0
"""Scaled values further than this from zero are brought there."""
HISTOGRAM_FRACTION = 0.35
"""Part of the release's loss that each of the two histograms takes."""
MOMENTS_FRACTION = 0.3
"""Part of the release's loss that means and mean squares take."""
NORM_REACH = 1.2
"""Rows of d columns, with their mean squares, are brought to √d times this norm."""
MIN_MEAN_SQUARE = 0.04
"""Least mean square about the mean, in squares of half a range, that a scale has."""
SCALING_FRACTIONS = (0.02, 0.25)
"""The smallest and the largest part of a budget that scales may take."""
SCALING_LOSS_FACTOR = 300.0
"""Scales of d columns of N examples are worth the loss 300 d/N²."""
CLASS_SHARE_NOISE = 1e-3
"""Standard deviation of the noise on a class's frequency that is worth paying for."""
CLASS_COUNTS_BUDGET = (0.002, 0.02)
"""The smallest and the largest part of a budget that counts of classes may take."""
MAX_RELATIVE_COUNT_NOISE = 0.25
"""Noise of a class's count over the count of equally frequent classes.

Above it, counts of classes would tell too little to be paid for.
"""
SMALLEST_NORM = 1e-300
"""In the place of a norm of zero, which is divided by."""


@dataclass(frozen=True, eq=False)
class ReleaseTerms:
    """What a release keeps to, and how it is sent.

    Args:
        privacy: what devices are promised.
        link: the channel; None for an ideal one.
        start: rounds of the link that came before.
        exact: draw noise that protects real data; as of `ReleaseChannel`.
    """

    privacy: Privacy
    link: Link | None = None
    start: int = 0
    exact: bool = False

    def open_channel(
        self, key: jax.Array, sizes: Indices, *, uses: int, rounds: int, settings: Array
    ) -> ReleaseChannel:
        """Return the channel of one release.

        Args:
            key: seeds the noise, together with everything that decides what is sent.
            sizes: the number of examples of each device, [K].
            uses: channel uses of a round, over which a sum is repeated.
            rounds: how many the release may take, from `start` on.
            settings: numbers of the release that decide what is sent.

        Returns:
            A channel over which nothing was sent yet.
        """
        return ReleaseChannel(
            key,
            link=ideal_link() if self.link is None else self.link,
            privacy=self.privacy,
            sizes=sizes,
            uses=uses,
            rounds=range(self.start, self.start + rounds),
            settings=settings,
            exact=self.exact,
        )


class Scaling(NamedTuple):
    """The map (x − center) / scale of every column.

    Args:
        center: [d].
        scale: above 0, [d].
    """

    center: Array
    scale: Array

    def __call__(self, rows: Array) -> Array:
        """Return rows[n, d], scaled, and within ±`SCALED_LIMIT`."""
        scaled = (rows - self.center) / self.scale
        return np.clip(scaled, -SCALED_LIMIT, SCALED_LIMIT)


class ScalingRelease(NamedTuple):
    """Scales, and what they cost.

    Args:
        scaling: of every column.
        loss: privacy loss of every round and device, [rounds, K].
        name: of everything that was sent, under which a ledger is charged.
        noise: a name for its noise.
    """

    scaling: Scaling
    loss: Array
    name: str
    noise: str


def scaling_fraction(
    units: int, columns: int, budget: float, finds_ranges: bool
) -> float:
    """Return the part of a budget that scales are worth.

    Scales cost the loss 300 d/N². Where examples are replaced, the noise of a count is
    then a tenth of all examples, and that of a column's mean 0.18 of half its range.
    The part is within `SCALING_FRACTIONS`, times `MOMENTS_FRACTION` where nothing but
    means has to be sent.

    Args:
        units: N, the examples that are hidden one by one; devices, where these are
            hidden as a whole.
        columns: d.
        budget: the loss that is allowed in all.
        finds_ranges: whether the range of a column has to be found.

    Returns:
        The part, above 0 and at most 0.25.
    """
    fraction = SCALING_LOSS_FACTOR * columns / (units**2 * budget)
    bounded = float(np.clip(fraction, *SCALING_FRACTIONS))
    return bounded * (1.0 if finds_ranges else MOMENTS_FRACTION)


def release_scaling(
    key: jax.Array,
    rows: Array,
    owner: Indices,
    terms: ReleaseTerms,
    *,
    ranges: Array | None = None,
    groups: tuple[int, ...] = (),
    budget_fraction: float | None = None,
) -> ScalingRelease:
    """Release a scale of every column, within (ε, δ) differential privacy.

    Three rounds are sent where some range has to be found, else one. Before the means
    are taken, values further than three half-widths from the middle of their column's
    range are brought there, and rows longer than 1.2 √d half-widths, with their mean
    squares, are shortened. Unless noise is exact, it is the same for the same key,
    terms, groups and budget fraction, and as many devices, columns and unknown ranges.

    Args:
        key: seeds the channel noise.
        rows: of all devices, [N, d], finite.
        owner: the device of each row, 0 to K − 1, [N]; every device holds a row.
        terms: the promise, and the channel.
        ranges: the least and the largest value of every column, [d, 2], where that is
            public; nan where it is not.
        groups: where, among the columns, a group of columns begins that has a mean
            square of its own.
        budget_fraction: part of every device's budget; by default `scaling_fraction`.

    Returns:
        The scales and their cost. Nothing is charged to a ledger here.

    Raises:
        InputError: if there is not a range for every column, the smaller value first.
    """
    check_key(key)
    count, columns = rows.shape
    devices = int(owner.max()) + 1
    column_ranges = _checked_ranges(ranges, columns)
    is_unknown = np.isnan(column_ranges[:, 0])
    unknown = int(is_unknown.sum())
    finds_ranges = unknown > 0
    if budget_fraction is None:
        units = count if terms.privacy.unit == "record" else devices
        budget = float(terms.privacy.budget(devices).min())
        budget_fraction = scaling_fraction(units, columns, budget, finds_ranges)
    release_channel = terms.open_channel(
        key,
        sizes=np.bincount(owner, minlength=devices),
        uses=max(unknown * MAGNITUDE_KINDS, columns + 1 + len(groups)),
        rounds=3 if finds_ranges else 1,
        settings=np.array([columns, unknown, budget_fraction, *groups], dtype=float),
    )
    if finds_ranges:
        group = np.searchsorted(np.array(groups), np.arange(columns), side="right")
        column_ranges[is_unknown] = _find_ranges(
            release_channel,
            rows=rows[:, is_unknown],
            owner=owner,
            group=group[is_unknown],
            budget_fraction=HISTOGRAM_FRACTION * budget_fraction,
        )
    middle = column_ranges.mean(1)
    half_width = (column_ranges[:, 1] - column_ranges[:, 0]) / 2
    in_range = (rows - middle) / half_width
    moments = _find_means(
        release_channel,
        rows=np.clip(in_range, -SCALED_LIMIT / 2, SCALED_LIMIT / 2),
        owner=owner,
        edges=np.array([0, *groups, columns]),
        budget_fraction=budget_fraction * (MOMENTS_FRACTION if finds_ranges else 1.0),
    )
    center = middle + half_width * moments.mean
    scaling = Scaling(center, half_width * moments.deviation)
    loss = np.concatenate(release_channel.losses)
    noise_name = release_channel.noise_name
    name = digest(rows, owner, noise_name.encode(), loss)
    return ScalingRelease(scaling, loss, f"scale-{name}", f"scale-{noise_name}")


def _checked_ranges(ranges: Array | None, columns: int) -> Array:
    """Return a copy of public ranges[d, 2]; nan where there are none."""
    if ranges is None:
        return np.full((columns, 2), np.nan)
    checked = np.array(ranges, dtype=float)
    requirement = f"two numbers for each of {columns} columns, the smaller one first"
    if checked.shape != (columns, 2):
        raise InputError("ranges", f"shape {checked.shape}", requirement)
    is_ordered = checked[:, 0] < checked[:, 1]
    is_unknown = np.isnan(checked).all(1)
    wrong = np.flatnonzero(~is_ordered & ~is_unknown)
    if wrong.size:
        raise InputError("ranges", f"{checked[wrong[0]].tolist()}", requirement)
    return checked


def class_counts_fraction(units: int, classes: int, budget: float) -> float:
    """Return the part of a budget that counts of classes are worth.

    At a loss l, a row that is replaced by another moves the frequencies by √2/N, and
    their noise is 1/(N √l). The part is what a noise of `CLASS_SHARE_NOISE` costs,
    within `CLASS_COUNTS_BUDGET`.

    Args:
        units: N, the examples that are hidden one by one; devices, where these are
            hidden as a whole.
        classes: C.
        budget: the loss that is allowed in all.

    Returns:
        The part; 0 where the counts would tell too little (see
        `MAX_RELATIVE_COUNT_NOISE`), and no release should be made.
    """
    price = 1 / (CLASS_SHARE_NOISE**2 * units**2 * budget)
    fraction = float(np.clip(price, *CLASS_COUNTS_BUDGET))
    noise = 1 / (units * (fraction * budget) ** 0.5)
    return fraction if noise * classes <= MAX_RELATIVE_COUNT_NOISE else 0.0


class ClassShares(NamedTuple):
    """The share of every class among the rows, and what it cost.

    Args:
        shares: above 0, with a sum of 1, [C].
        loss: privacy loss of every round and device, [rounds, K].
        name: of what was sent, under which a ledger is charged.
        noise: a name for its noise.
    """

    shares: Array
    loss: Array
    name: str
    noise: str


def release_class_shares(
    key: jax.Array,
    labels: Indices,
    classes: int,
    owner: Indices,
    terms: ReleaseTerms,
    budget_fraction: float,
) -> ClassShares:
    """Release how frequent every class is: one noisy histogram of the labels.

    It takes one round. A class without rows has a share above 0 all the same.

    Args:
        key: seeds the channel noise.
        labels: the class of every row, from 0, [N].
        classes: C.
        owner: the device of every row, [N].
        terms: the promise, and the channel.
        budget_fraction: part of every device's budget, see `class_counts_fraction`.

    Returns:
        The shares and their cost. Shares that noise hides are drawn towards 1/C, as far
        as Stein's estimate says, and none is below half of the noise.
    """
    release_channel = terms.open_channel(
        key,
        sizes=np.bincount(owner),
        uses=classes,
        rounds=1,
        settings=np.array([classes, budget_fraction, terms.start], dtype=float),
    )
    received = count_kinds(
        release_channel,
        kind=labels[:, None],
        kinds=classes,
        owner=owner,
        budget_fraction=budget_fraction,
    )
    noise_std = received.noise_std
    # Shares have a sum of 1: what noise says against it is dropped.
    deviation = received.shares[0] - received.shares[0].mean()
    power = max(float(deviation @ deviation), SMALLEST_NORM)
    hidden = (classes - 1) * noise_std**2 / power
    shares = 1 / classes + max(0.0, 1 - hidden) * deviation
    shares = np.maximum(shares, max(noise_std, 1 / len(labels)) / 2)
    shares = shares / shares.sum()
    loss = np.concatenate(release_channel.losses)
    noise_name = release_channel.noise_name
    name = digest(labels, owner, noise_name.encode(), loss)
    return ClassShares(shares, loss, f"classes-{name}", f"classes-{noise_name}")


def _find_ranges(
    release_channel: ReleaseChannel,
    rows: Array,
    owner: Indices,
    group: Indices,
    budget_fraction: float,
) -> Array:
    """Return a range of every column that holds most of its values, [d, 2].

    Args:
        release_channel: over which two histograms are sent.
        rows: of all devices, [N, d].
        owner: the device of each row, [N].
        group: the index of each column's group, [d]; where the columns of a group are
            alike, they get one range.
        budget_fraction: for each of the histograms.
    """
    magnitudes = _find_magnitudes(
        release_channel,
        rows=rows,
        owner=owner,
        group=group,
        budget_fraction=budget_fraction,
    )
    size = 2.0**magnitudes.exponent
    part = np.floor((rows / size + 1) / 2 * RANGE_PARTS)
    nonzero_kind = np.clip(part, 0, RANGE_PARTS - 1) + 1
    counts = count_kinds(
        release_channel,
        kind=np.where(rows == 0, 0, nonzero_kind).astype(np.intp),
        kinds=RANGE_PARTS + 1,
        owner=owner,
        budget_fraction=budget_fraction,
    )
    # Where counts say little, a wide range is the safer one.
    nonzero_shares = counts.shares[:, 1:]
    window = _likeliest_windows(
        nonzero_shares, counts.noise_std, width_power=2.0
    ).window
    for columns in magnitudes.alike_columns:  # these are counted together
        pooled_shares = nonzero_shares[columns].mean(0, keepdims=True)
        pooled_noise = counts.noise_std / columns.size**0.5
        window[columns] = _likeliest_windows(
            pooled_shares, pooled_noise, width_power=0.0
        ).window
    ranges = (2 * window / RANGE_PARTS - 1) * size[:, None]
    # Both histograms have counted the zeros.
    zero_share = (magnitudes.zero_share + counts.shares[:, 0]) / 2
    is_often_zero = zero_share > MIN_ZERO_FRACTION
    ranges[is_often_zero, 0] = np.minimum(ranges[is_often_zero, 0], 0)
    ranges[is_often_zero, 1] = np.maximum(ranges[is_often_zero, 1], 0)
    return ranges


class _Magnitudes(NamedTuple):
    """Orders of magnitude of columns.

    Args:
        exponent: values are mostly below two to this power, [d].
        zero_share: how many values are zero, as received, [d].
        alike_columns: groups of columns that have one magnitude.
    """

    exponent: Array
    zero_share: Array
    alike_columns: list[Indices]


def _find_magnitudes(
    release_channel: ReleaseChannel,
    rows: Array,
    owner: Indices,
    group: Indices,
    budget_fraction: float,
) -> _Magnitudes:
    """Return the magnitude of every column; arguments as of `_find_ranges`."""
    with np.errstate(divide="ignore"):
        order = np.floor(np.log2(np.abs(rows)))
    nonzero_kind = np.clip(order, EXPONENTS[0], EXPONENTS[-1]) - EXPONENTS[0] + 1
    counts = count_kinds(
        release_channel,
        kind=np.where(rows == 0, 0, nonzero_kind).astype(np.intp),
        kinds=MAGNITUDE_KINDS,
        owner=owner,
        budget_fraction=budget_fraction,
    )
    likeliest = _likeliest_windows(
        counts.shares[:, 1:], counts.noise_std, width_power=0.0
    )
    exponent = (EXPONENTS[likeliest.window[:, 1] - 1] + 1).astype(np.float64)
    is_sure = likeliest.evidence > MIN_EVIDENCE
    alike_columns = []
    for number in np.unique(group):
        columns = np.flatnonzero(group == number)
        pooled = _pool(exponent[columns], is_sure[columns])
        exponent[columns] = pooled.exponent
        if pooled.is_alike:
            alike_columns.append(columns)
    return _Magnitudes(exponent, counts.shares[:, 0], alike_columns)


class _PooledExponents(NamedTuple):
    """Magnitudes of the columns of one group.

    Args:
        exponent: of each, [n].
        is_alike: whether all of them have the same.
    """

    exponent: Array
    is_alike: bool


def _pool(exponent: Array, is_sure: NDArray[np.bool_]) -> _PooledExponents:
    """Return the magnitudes of a group's columns, with the unsure ones filled in.

    Where the sure ones are much the same, all columns get their upper quartile, sure
    ones too; else unsure ones get the median of the sure ones, or of all if none is.
    The rule uses what is released already, and costs no privacy.

    Args:
        exponent: of each column, as received, [n].
        is_sure: whether the evidence for it is above `MIN_EVIDENCE`, [n].
    """
    sure = exponent[is_sure]
    low, usual, high = np.percentile(sure if sure.size else exponent, [25, 50, 75])
    if sure.size > 1 and high - low <= MAX_QUARTILE_DISTANCE:
        # These are columns of one sort, such as pixels.
        return _PooledExponents(np.full_like(exponent, np.ceil(high)), is_alike=True)
    return _PooledExponents(np.where(is_sure, exponent, usual), is_alike=False)


class KindShares(NamedTuple):
    """How frequent each kind of value is, as the server receives it.

    Args:
        shares: of every column, [d, kinds]; noise can bring them below 0.
        noise_std: standard deviation of the noise on each of them.
    """

    shares: Array
    noise_std: float


def count_kinds(
    release_channel: ReleaseChannel,
    kind: Indices,
    kinds: int,
    owner: Indices,
    budget_fraction: float,
) -> KindShares:
    r"""Release a histogram of every column, in one round.

    A row counts once in every column. Left empty it leaves d counts, so that the sum
    moves by $\sqrt{d}$; replaced, it leaves d counts and enters d others, and the sum
    moves by $\sqrt{2d}$.

    Args:
        release_channel: over which the counts are sent.
        kind: of every value, 0 to `kinds` − 1, [N, d].
        kinds: how many there are.
        owner: the device of each row, [N].
        budget_fraction: part of every device's budget that the histogram costs.

    Returns:
        The share of every kind in a column, and the noise on it.
    """
    columns = kind.shape[1]
    devices = release_channel.sizes.size
    device_column = owner[:, None] * columns + np.arange(columns)
    cell = device_column * kinds + kind
    counts = np.bincount(cell.ravel(), minlength=devices * columns * kinds)
    counts_of_devices = counts.reshape(devices, -1).astype(float)
    is_removed = release_channel.privacy.adjacency == "add-remove"
    changed_counts = columns if is_removed else 2 * columns
    received = release_channel.receive(
        1,
        counts_of_devices,
        reach=columns**0.5,
        moved_by=changed_counts**0.5,
        budget_fraction=budget_fraction,
    )
    shares = received.mean.reshape(columns, kinds)
    return KindShares(shares, received.noise_std)


class _LikeliestWindows(NamedTuple):
    """Where the values of columns most likely lie.

    Args:
        window: the first kind, and the one behind the last, [d, 2].
        evidence: the log-likelihood ratio over no values at all, [d], with what
            `width_power` adds to it.
    """

    window: Indices
    evidence: Array


def _likeliest_windows(
    shares: Array, noise_std: float, width_power: float
) -> _LikeliestWindows:
    """Return the window of kinds that a column's values most likely fill evenly.

    A mass p that is spread evenly over w kinds, which together received the share s,
    has the log-likelihood p (s − p/2)/(w σ²) over no values at all; p is s, brought
    between `MIN_WINDOW_FRACTION` and 1.

    Args:
        shares: of each kind, [d, kinds], with a noise that is the same for all.
        noise_std: its standard deviation.
        width_power: how much more likely wide windows are beforehand, as a power of
            their width.
    """
    columns, kinds = shares.shape
    first, last = np.triu_indices(kinds)
    cumulated = np.cumsum(shares, axis=1)
    share_below = np.concatenate([np.zeros((columns, 1)), cumulated], axis=1)
    share_within = share_below[:, last + 1] - share_below[:, first]
    width = last + 1 - first
    mass = np.clip(share_within, MIN_WINDOW_FRACTION, 1.0)
    fit = mass * (share_within - mass / 2) / (width * noise_std**2)
    likelihood = fit + width_power * np.log(width)
    best = likelihood.argmax(1)
    window = np.stack([first[best], last[best] + 1], axis=1)
    return _LikeliestWindows(window, likelihood.max(1))


class _Moments(NamedTuple):
    """Moments of columns.

    Args:
        mean: [d].
        deviation: root mean square about the mean of the column's group, [d].
    """

    mean: Array
    deviation: Array


def _find_means(
    release_channel: ReleaseChannel,
    rows: Array,
    owner: Indices,
    edges: Indices,
    budget_fraction: float,
) -> _Moments:
    """Return the moments of columns, received in one round.

    Args:
        release_channel: over which their sums are sent.
        rows: of all devices, [N, d].
        owner: the device of each row, [N]; every device holds a row.
        edges: where each group of columns begins, and the number of columns at the end.
        budget_fraction: for this round.
    """
    columns = rows.shape[1]
    # With this weight a row at the ends of all ranges has the norm 1.12 √d where there
    # is one group: few rows are longer than `NORM_REACH` √d.
    weight = columns**0.5 / 2
    groups = [slice(first, end) for first, end in pairwise(edges)]
    squares = np.stack([(rows[:, group] ** 2).mean(1) for group in groups], axis=1)
    vector = np.concatenate([rows, weight * np.minimum(squares, 1.0)], axis=1)
    reach = NORM_REACH * columns**0.5
    norms = np.maximum(np.linalg.norm(vector, axis=1), SMALLEST_NORM)
    vector *= np.minimum(1.0, reach / norms)[:, None]
    by_device = vector[np.argsort(owner, kind="stable")]
    first_rows = np.concatenate([[0], np.cumsum(release_channel.sizes)[:-1]])
    is_removed = release_channel.privacy.adjacency == "add-remove"
    received = release_channel.receive(
        1,
        np.add.reduceat(by_device, first_rows, axis=0),
        reach=reach,
        moved_by=reach if is_removed else 2 * reach,
        budget_fraction=budget_fraction,
    )
    mean = received.mean[:columns]
    power = max(float(mean @ mean), SMALLEST_NORM)
    # Stein's estimate: not further from the true means than zeros are.
    mean = mean * max(0.0, 1 - columns * received.noise_std**2 / power)
    deviation = np.empty(columns)
    for number, group in enumerate(groups):
        mean_square = received.mean[columns + number] / weight
        variance = mean_square - np.mean(mean[group] ** 2)
        deviation[group] = np.sqrt(np.clip(variance, MIN_MEAN_SQUARE, 1.0))
    return _Moments(mean, deviation)
