"""Scales of features that are paid for: where the values of every column lie, released once over the same channel.

Three sums are received. The first counts, by column, the values of each order of magnitude; the second, in what was
found to be a column's range, those of each part of it. From these counts a range is read off that holds most of the
values. The third has the columns' means and their mean square within these ranges. Ranges that are public are taken as
they are, and cost nothing.
"""

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
"""Orders of magnitude, in powers of two, that values are told apart by."""
PARTS = 8
"""Of the range from −M to M, where M is a column's magnitude."""
LEAST = 0.25
"""The share of a column's values that its range holds, at least."""
TRUST = 6.0
"""Log-likelihood ratio above which a column's magnitude is believed; other columns take the median of those."""
ALIKE = 1.0
"""Distance of the quartiles of the columns' orders of magnitude up to which all of them have one range."""
OFTEN_ZERO = 0.2
"""Share of zeros from which on a range includes zero."""
LIMIT = 6.0
"""Scaled values further than this from zero are brought there."""
COUNTED, AVERAGED = 0.35, 0.3
"""Parts of the loss: of each histogram, and of the means."""
REACH = 1.2
"""Rows of d columns, with what is sent of their size, are brought to √d times this length."""


class Scaling(NamedTuple):
    """(x − center) / scale, by column."""

    center: Array
    scale: Array

    def __call__(self, rows: Array) -> Array:
        """Return rows[n, d], scaled, and within LIMIT."""
        return np.clip((rows - self.center) / self.scale, -LIMIT, LIMIT)


class ScalingRelease(NamedTuple):
    """Scales, and what they cost."""

    scaling: Scaling
    loss: Array
    """Privacy loss of every round and device, [rounds, K]."""
    name: str
    """A name for all that was sent, under which a ledger is charged."""
    noise: str
    """A name for its noise."""


def share_for(examples: int, columns: int, budget: float, counted: bool) -> float:
    """Return the share of a budget that scales are worth: less, the more examples there are for a column.

    At this loss a count's noise is a tenth of all examples, and that of a mean a seventh of a range.

    Args:
        examples: that are hidden one by one; devices, where these are hidden as a whole.
        counted: whether a column's range has to be found.
    """
    wanted = 300.0 * columns / (examples**2 * budget)
    return float(np.clip(wanted, 0.02, 0.25)) * (1.0 if counted else AVERAGED)


def release_scaling(
    key: jax.Array,
    rows: Array,
    owner: Indices,
    privacy: Privacy,
    *,
    link: Link | None = None,
    ranges: Array | None = None,
    groups: tuple[int, ...] = (),
    share: float | None = None,
    exact: bool = False,
) -> ScalingRelease:
    """Release a scale of every column.

    Args:
        key: seeds the channel noise.
        rows: of all devices, [N, d], finite.
        owner: the device of each, [N].
        link: the channel; an ideal one by default.
        ranges: the least and the largest value of every column, [d, 2], where that is public; nan where it is not.
        groups: where, among the columns, a group of columns begins that has a mean square of its own.
        share: of every device's budget; by default `share_for`.
        exact: as of `ReleaseChannel`.
    """
    check_key(key)
    count, columns = rows.shape
    devices = int(owner.max()) + 1
    known = (
        np.full((columns, 2), np.nan)
        if ranges is None
        else np.asarray(ranges, dtype=float)
    )
    wrong = np.flatnonzero(~(known[:, 0] < known[:, 1]) & ~np.isnan(known).all(1))
    if known.shape != (columns, 2) or wrong.size:
        given = (
            f"shape {known.shape}"
            if known.shape != (columns, 2)
            else f"{known[wrong[0]].tolist()}"
        )
        raise InputError(
            "ranges",
            given,
            f"two numbers for each of {columns} columns, the smaller one first",
        )
    unknown = np.isnan(known[:, 0])
    units = count if privacy.unit == "record" else devices
    if share is None:
        share = share_for(
            units, columns, float(privacy.budget(devices).min()), bool(unknown.any())
        )
    sizes = np.bincount(owner, minlength=devices)
    settings = np.array([columns, unknown.sum(), share, *groups], dtype=float)
    uses = max(int(unknown.sum()) * (EXPONENTS.size + 1), columns + 1 + len(groups))
    over, rounds = ideal_link() if link is None else link, 1 + 2 * bool(unknown.any())
    release_channel = ReleaseChannel(
        key,
        over,
        privacy,
        sizes,
        uses=uses,
        rounds=range(rounds),
        settings=settings,
        exact=exact,
    )
    group = np.searchsorted(np.array(groups), np.arange(columns), side="right")
    if unknown.any():
        known = known.copy()
        known[unknown] = _find_ranges(
            release_channel, rows[:, unknown], owner, group[unknown], COUNTED * share
        )
    middle, half = known.mean(1), (known[:, 1] - known[:, 0]) / 2
    within = np.clip((rows - middle) / half, -LIMIT / 2, LIMIT / 2)
    left = share * (AVERAGED if unknown.any() else 1.0)
    mean, size = _find_means(
        release_channel, within, owner, np.array([0, *groups, columns]), left
    )
    loss = np.concatenate(release_channel.losses)
    name = digest(rows, owner, release_channel.noise_name.encode(), loss)
    scaling = Scaling(middle + half * mean, half * size)
    return ScalingRelease(
        scaling, loss, f"scale-{name}", f"scale-{release_channel.noise_name}"
    )


SHARE_NOISE = 1e-3
"""Standard deviation of the noise on the share of a class that is worth paying for."""
CLASS_COUNTS_BUDGET = (0.002, 0.02)
"""The smallest and the largest part of a budget that counts of classes may take."""


LARGEST_SHARE_NOISE = 0.25
"""Noise of a count, over that of equally frequent classes, above which counts of classes would tell too little."""


def class_counts_part(units: int, classes: int, budget: float) -> float:
    """Return the part of a budget that counts of classes are worth; 0 where they would tell too little.

    At a loss l, a row that is replaced by another moves the shares by √2/N, and their noise is 1/(N √l).

    Args:
        units: N, the examples that are hidden one by one; devices, where these are hidden as a whole.
        classes: C.
        budget: the loss that is allowed in all.
    """
    part = float(
        np.clip(1 / (SHARE_NOISE**2 * units**2 * budget), *CLASS_COUNTS_BUDGET)
    )
    noise = 1 / (units * (part * budget) ** 0.5)
    return part if noise * classes <= LARGEST_SHARE_NOISE else 0.0


class ClassShares(NamedTuple):
    """The share of every class among the rows, and what it cost."""

    shares: Array
    """Above 0, with a sum of 1, [C]."""
    loss: Array
    """Privacy loss of every round and device, [rounds, K]."""
    name: str
    """A name for what was sent, under which a ledger is charged."""
    noise: str
    """A name for its noise."""


def release_class_shares(
    key: jax.Array,
    labels: Indices,
    classes: int,
    owner: Indices,
    privacy: Privacy,
    part: float,
    *,
    link: Link | None = None,
    start: int = 0,
    exact: bool = False,
) -> ClassShares:
    """Release how frequent every class is: one noisy histogram of the labels, in one round.

    Args:
        key: seeds the channel noise.
        labels: the class of every row, from 0, [N].
        classes: C.
        owner: the device of every row, [N].
        privacy: what devices are promised.
        part: of every device's budget, see `class_counts_part`.
        link: the channel; an ideal one by default.
        start: rounds of the link that came before.
        exact: as of `ReleaseChannel`.

    Returns:
        The shares and their cost. Shares that noise hides are drawn towards 1/C, as far as Stein's estimate says, and
        none is below half of the noise.
    """
    sizes = np.bincount(owner)
    settings = np.array([classes, part, start], dtype=float)
    channel = ideal_link() if link is None else link
    release_channel = ReleaseChannel(
        key,
        channel,
        privacy,
        sizes,
        uses=classes,
        rounds=range(start, start + 1),
        settings=settings,
        exact=exact,
    )
    received, noise = count_kinds(
        release_channel, labels[:, None], classes, owner, part
    )
    deviation = (
        received[0] - received[0].mean()
    )  # shares have a sum of 1: what noise says against it is dropped
    hidden = (classes - 1) * noise**2 / max(float(deviation @ deviation), 1e-300)
    shares = 1 / classes + max(0.0, 1 - hidden) * deviation
    shares = np.maximum(shares, max(noise, 1 / len(labels)) / 2)
    shares = shares / shares.sum()
    loss = np.concatenate(release_channel.losses)
    name = digest(labels, owner, release_channel.noise_name.encode(), loss)
    return ClassShares(
        shares, loss, f"classes-{name}", f"classes-{release_channel.noise_name}"
    )


def _find_ranges(
    release_channel: ReleaseChannel,
    rows: Array,
    owner: Indices,
    group: Indices,
    share: float,
) -> Array:
    """Return a range of every column that holds most of its values, [d, 2]; `group` is that of each column."""
    with np.errstate(divide="ignore"):
        order = np.clip(np.floor(np.log2(np.abs(rows))), EXPONENTS[0], EXPONENTS[-1])
    kind = np.where(rows == 0, 0, order - EXPONENTS[0] + 1).astype(np.intp)
    counts, noise = count_kinds(release_channel, kind, EXPONENTS.size + 1, owner, share)
    zeros = counts[:, 0]
    window, evidence = _likeliest_window(counts[:, 1:], noise, 0.0)
    magnitude = (EXPONENTS[window[:, 1] - 1] + 1).astype(np.float64)
    alike = [
        _pool(magnitude, np.flatnonzero(group == one), evidence > TRUST)
        for one in np.unique(group)
    ]
    size = 2.0**magnitude
    part = np.clip(np.floor((rows / size + 1) / 2 * PARTS), 0, PARTS - 1)
    counts, noise = count_kinds(
        release_channel,
        np.where(rows == 0, 0, part + 1).astype(np.intp),
        PARTS + 1,
        owner,
        share,
    )
    # Where counts say little, a wide range is the safer one. Columns that are alike are counted together.
    window, _ = _likeliest_window(counts[:, 1:], noise, 2.0)
    for columns in alike:
        if columns.size:
            together = counts[columns, 1:].mean(0, keepdims=True)
            window[columns], _ = _likeliest_window(
                together, noise / columns.size**0.5, 0.0
            )
    found = (2 * window / PARTS - 1) * size[:, None]
    often = zeros + counts[:, 0] > 2 * OFTEN_ZERO
    found[often] = np.stack(
        [np.minimum(found[often, 0], 0), np.maximum(found[often, 1], 0)], axis=1
    )
    return found


def _pool(magnitude: Array, columns: Indices, sure: NDArray[np.bool_]) -> Indices:
    """Give columns of one group whose magnitude is not known that of the others; return columns that are all alike."""
    known = columns[sure[columns]]
    low, usual, high = np.percentile(
        magnitude[known if known.size else columns], [25, 50, 75]
    )
    if known.size > 1 and high - low <= ALIKE:  # columns of one kind, such as pixels
        magnitude[columns] = np.ceil(high)
        return columns
    magnitude[np.setdiff1d(columns, known)] = usual
    return columns[:0]


def count_kinds(
    release_channel: ReleaseChannel,
    kind: Indices,
    kinds: int,
    owner: Indices,
    share: float,
) -> tuple[Array, float]:
    """Return the share of every kind[N, d] in a column as it is received, [d, kinds], and the noise of each."""
    columns = kind.shape[1]
    place = (owner[:, None] * columns + np.arange(columns)) * kinds + kind
    sums = np.bincount(
        place.ravel(), minlength=release_channel.sizes.size * columns * kinds
    ).reshape(release_channel.sizes.size, -1)
    # A row counts once in every column: replaced, it leaves one count and enters another.
    moved = (
        columns if release_channel.privacy.adjacency == "add-remove" else 2 * columns
    ) ** 0.5
    received, noise = release_channel.receive(
        1,
        sums.astype(float),
        reach=columns**0.5,
        moved_by=moved,
        budget_fraction=share,
    )
    return received.reshape(columns, kinds), noise


def _likeliest_window(
    counts: Array, noise: float, wide: float
) -> tuple[Indices, Array]:
    """Return the window of kinds that a column's values most likely spread over evenly, [d, 2], and the evidence.

    Args:
        counts: shares of each kind, [d, kinds], with a noise that is the same for all.
        wide: how much more likely wide windows are beforehand, as a power of their width.
    """
    kinds = counts.shape[1]
    first, last = np.triu_indices(kinds)
    total = np.concatenate(
        [np.zeros((len(counts), 1)), np.cumsum(counts, axis=1)], axis=1
    )
    held, width = total[:, last + 1] - total[:, first], last + 1 - first
    mass = np.clip(held, LEAST, 1.0)
    likelihood = mass * (held - mass / 2) / (width * noise**2) + wide * np.log(width)
    best = likelihood.argmax(1)
    return np.stack([first[best], last[best] + 1], axis=1), likelihood.max(1)


def _find_means(
    release_channel: ReleaseChannel,
    rows: Array,
    owner: Indices,
    edges: Indices,
    share: float,
) -> tuple[Array, Array]:
    """Return the mean of every column of rows[N, d], and the root mean square about it of every group, [d] each."""
    columns = rows.shape[1]
    weight = columns**0.5 / 2
    square = np.stack([(rows[:, a:b] ** 2).mean(1) for a, b in pairwise(edges)], axis=1)
    vector = np.concatenate([rows, weight * np.minimum(square, 1.0)], axis=1)
    reach = REACH * columns**0.5
    vector *= np.minimum(
        1.0, reach / np.maximum(np.linalg.norm(vector, axis=1), 1e-300)
    )[:, None]
    order = np.argsort(owner, kind="stable")
    sums = np.add.reduceat(
        vector[order],
        np.concatenate([[0], np.cumsum(release_channel.sizes)[:-1]]),
        axis=0,
    )
    moved = reach if release_channel.privacy.adjacency == "add-remove" else 2 * reach
    received, noise = release_channel.receive(
        1, sums, reach=reach, moved_by=moved, budget_fraction=share
    )
    mean = received[:columns]
    mean *= max(
        0.0, 1 - columns * noise**2 / max(float(mean @ mean), 1e-300)
    )  # not further off than zero is (Stein)
    size = np.empty(columns)
    for number, (a, b) in enumerate(pairwise(edges)):
        size[a:b] = np.sqrt(
            np.clip(
                received[columns + number] / weight - np.mean(mean[a:b] ** 2), 0.04, 1.0
            )
        )
    return mean, size
