"""Which device holds which example: splitting a data set over devices."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import InputError
from wflmc.support.keys import check_key, host_generator, seeded

Rule: TypeAlias = str | NDArray[np.integer]
"""How examples are spread over devices: a rule's name, or the device of each, [N]."""
ROWS_PER_COPY = 4096
"""Rows that are copied at a time, so that no second copy of all data is held."""
MAX_DISTINCT_LABELS = 20
"""Distinct labels up to which each is a class; more are binned, at their deciles."""


def assign(
    rule: Rule,
    labels: NDArray[np.float64],
    devices: int,
    generator: np.random.Generator,
) -> NDArray[np.intp]:
    """Assign every example to a device; every device gets at least one.

    `iid` shuffles the examples, `blocks` leaves them in the order of the file, and
    `by-label` sorts them by label; each cuts that order into nearly equal parts.
    `dirichlet:A` spreads the examples of each class in proportions drawn from a
    Dirichlet law with parameter A: a small A gives devices few classes and unequal
    sizes. Labels of more than 20 values are binned at their deciles for this.

    Args:
        rule: one of these names, or the device of every example itself, [N], from 0 to
            K − 1.
        labels: y[N].
        devices: K.
        generator: of the random rules.

    Returns:
        The device of every example, [N].

    Raises:
        InputError: for more devices than examples, an unknown rule, or an array that
            does not have every device.
    """
    count = labels.shape[0]
    if not 1 <= devices <= count:
        requirement = f"at least 1, and at most the number of examples ({count})"
        raise InputError("devices", devices, requirement)
    if not isinstance(rule, str):
        return _check_owners(np.asarray(rule), count, devices)
    if rule == "blocks":
        order = np.arange(count)
    elif rule == "iid":
        order = generator.permutation(count)
    elif rule == "by-label":
        order = np.argsort(labels, kind="stable")
    else:
        concentration = _concentration(rule)
        return _dirichlet(concentration, labels, devices, generator)
    owner = np.empty(count, dtype=np.intp)
    owner[order] = np.arange(count) * devices // count
    return owner


def _check_owners(
    owners: NDArray[np.integer], count: int, devices: int
) -> NDArray[np.intp]:
    """Return the device of every example, [N]; refuse if one of 0 to K − 1 lacks."""
    is_valid = owners.shape == (count,) and owners.dtype.kind in "iu"
    if not is_valid or set(np.unique(owners)) != set(range(devices)):
        problem = f"an array of shape {owners.shape}"
        requirement = f"a rule, or {count} devices: 0 to K − 1"
        raise InputError("partition", problem, requirement)
    return owners.astype(np.intp)


def spread_over_devices(
    key: jax.Array,
    features: NDArray[np.float64],
    outcomes: np.ndarray,
    *,
    devices: int,
    intercept: bool,
    rule: Rule,
) -> tuple[NDArray[np.float64], np.ndarray, NDArray[np.intp]]:
    """Give every device its examples, in the order of the data.

    Devices of unlike size are filled up with zeros, to the n examples of the largest.
    An intercept adds a column of ones to the real rows, not to those that fill up.

    Args:
        key: seeds the random rules.
        features: u[N, d].
        outcomes: targets or labels, [N].
        devices: K.
        intercept: whether to add a column of ones.
        rule: as of `assign`.

    Returns:
        Features [K, n, d or d + 1], outcomes [K, n], and the devices' sizes N_k, [K].

    Raises:
        InputError: as of `assign`.
    """
    generator = host_generator(key, "data", "partition")
    owner = assign(rule, outcomes.astype(float), devices, generator)
    order = np.argsort(owner, kind="stable")
    sizes = np.bincount(owner, minlength=devices)
    is_real = np.arange(sizes.max()) < sizes[:, None]

    def fill(values: np.ndarray, ones: int = 0) -> np.ndarray:
        """Return values[N, ...] as [K, n, ...], and columns of ones beside them."""
        row_shape = (values.shape[1] + ones,) if values.ndim > 1 else ()
        positions = np.flatnonzero(is_real)
        filled = np.zeros((is_real.size, *row_shape), values.dtype)
        for start in range(0, len(positions), ROWS_PER_COPY):
            chunk = slice(start, start + ROWS_PER_COPY)
            rows = values[order[chunk]]
            if ones:
                rows = np.pad(rows, ((0, 0), (0, ones)), constant_values=1)
            filled[positions[chunk]] = rows
        return filled.reshape(*is_real.shape, *row_shape)

    return fill(features, int(intercept)), fill(outcomes), sizes


def _concentration(rule: str) -> float:
    """Return A of the rule `dirichlet:A`; refuse another rule, or A not above 0."""
    name, _, text = rule.partition(":")
    try:
        concentration = float(text)
    except ValueError:
        concentration = np.nan
    if name != "dirichlet" or not 0 < concentration < np.inf:
        requirement = "iid, blocks, by-label or dirichlet:A with A above 0"
        raise InputError("partition", rule, requirement)
    return concentration


def _dirichlet(
    concentration: float,
    labels: NDArray[np.float64],
    devices: int,
    generator: np.random.Generator,
) -> NDArray[np.intp]:
    """Return the device of every example by the rule `dirichlet:A`, [N]."""
    _, classes = np.unique(labels, return_inverse=True)
    if classes.max() >= MAX_DISTINCT_LABELS:
        deciles = np.quantile(labels, np.arange(1, 10) / 10)
        classes = np.searchsorted(deciles, labels)
    owner = np.empty(labels.shape[0], dtype=np.intp)
    for value in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == value))
        # Gamma draws in logs: for small concentrations all of a plain draw may
        # underflow to zero.
        gamma = generator.standard_gamma(concentration + 1, devices)
        log_proportions = np.log(gamma)
        log_proportions += np.log(generator.random(devices)) / concentration
        proportions = np.exp(log_proportions - log_proportions.max())
        normalised = proportions / proportions.sum()
        counts = generator.multinomial(members.size, normalised)
        owner[members] = np.repeat(np.arange(devices), counts)
    _fill_empty_devices(owner, devices)
    return owner


def _fill_empty_devices(owner: NDArray[np.intp], devices: int) -> None:
    """Give every empty device one example of the device that has the most, in place."""
    sizes = np.bincount(owner, minlength=devices)
    for device in np.flatnonzero(sizes == 0):
        largest = int(np.argmax(sizes))
        first_example = np.flatnonzero(owner == largest)[0]
        owner[first_example] = device
        sizes[largest] -= 1
        sizes[device] += 1


def examples_by_device(
    devices: int | ArrayLike | Sequence[ArrayLike],
    count: int,
    partition: str = "iid",
    key: jax.Array | None = None,
) -> list[NDArray[np.intp]]:
    """Return the examples of every device of a custom model.

    Args:
        devices: K; or the device of every example, [N], from 0 to K − 1; or a list of
            the examples of each device.
        count: N.
        partition: "iid" or "blocks", where `devices` is a number.
        key: seeds iid; by default that of seed 0.

    Returns:
        For each device the numbers of its examples, of 0 to N − 1.

    Raises:
        InputError: unless every device has an example and every example one device.
    """
    key = seeded(0) if key is None else key
    check_key(key)
    if partition not in ("iid", "blocks"):
        requirement = "iid or blocks; or give the device of every example as `devices`"
        raise InputError("partition", partition, requirement)
    assigned = devices
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        generator = host_generator(key, "data", "partition")
        assigned = assign(partition, np.zeros(count), int(devices), generator)
    if isinstance(assigned, list | tuple) and any(np.ndim(part) for part in assigned):
        parts = [np.ravel(part) for part in assigned]
        is_valid = _cover_all_examples(parts, count)
    else:
        numbers, owner = np.unique(np.asarray(assigned), return_inverse=True)
        order = np.argsort(owner, axis=None, kind="stable")
        ends = np.cumsum(np.bincount(owner.ravel()))
        parts = np.split(order, ends[:-1])
        has_all_devices = np.array_equal(numbers, np.arange(numbers.size))
        is_valid = owner.shape == (count,) and has_all_devices
    if not is_valid:
        raise InputError("devices", devices, _allowed_devices(count))
    return parts


def _cover_all_examples(parts: list[np.ndarray], count: int) -> bool:
    """Return whether devices have examples, and each of 0 to N − 1 exactly once."""
    if not all(part.size and part.dtype.kind in "iu" for part in parts):
        return False
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(count))


def _allowed_devices(count: int) -> str:
    """Return how N examples may be given to devices, for an error."""
    owners = f"the device (0, 1, …) of each of the {count} examples"
    parts = "or a list of each device's examples"
    hint = "np.unique(ids, return_inverse=True)[1] makes such numbers of ids"
    return f"a number of devices, {owners}, {parts}; {hint}"
