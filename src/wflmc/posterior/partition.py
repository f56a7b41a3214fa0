"""Who holds which example: splitting a data set over devices."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import InputError
from wflmc.support.keys import check_key, host_generator, seeded

Rule: TypeAlias = str | NDArray[np.integer]
"""How examples are spread over devices: by a rule's name, or the device of each, [N]."""
ROWS_AT_ONCE = 4096
"""Rows that are copied at a time."""


def assign(
    rule: Rule,
    labels: NDArray[np.float64],
    devices: int,
    generator: np.random.Generator,
) -> NDArray[np.intp]:
    """Return the device of every example, [N]; every device gets at least one.

    Args:
        rule: `iid` (shuffled), `blocks` (file order), `by-label` (sorted by label), each in nearly equal
            parts; or `dirichlet:A`: the examples of each class are spread over the devices in proportions
            drawn from a Dirichlet law with parameter A, so that a small A gives devices few classes and
            unequal sizes. Labels of more than 20 values are binned at their deciles for this. Or the device of
            every example itself, [N], from 0 to K − 1.
        labels: y[N].
    """
    count = labels.shape[0]
    if not 1 <= devices <= count:
        raise InputError(
            "devices",
            devices,
            f"at least 1, and at most the number of examples ({count})",
        )
    if not isinstance(rule, str):
        given = np.asarray(rule)
        if (
            given.shape != (count,)
            or given.dtype.kind not in "iu"
            or set(np.unique(given)) != set(range(devices))
        ):
            raise InputError(
                "partition",
                f"an array of shape {given.shape}",
                f"a rule, or {count} devices: 0 to K − 1",
            )
        return given.astype(np.intp)
    if rule == "blocks":
        order = np.arange(count)
    elif rule == "iid":
        order = generator.permutation(count)
    elif rule == "by-label":
        order = np.argsort(labels, kind="stable")
    else:
        return _dirichlet(rule, labels, devices, generator)
    owner = np.empty(count, dtype=np.intp)
    owner[order] = np.arange(count) * devices // count
    return owner


def spread_over_devices(
    key: jax.Array,
    features: NDArray[np.float64],
    outcomes: np.ndarray,
    devices: int,
    intercept: bool,
    rule: Rule,
) -> tuple[NDArray[np.float64], np.ndarray, NDArray[np.intp]]:
    """Return features[K, n, d] and outcomes[K, n] of every device in their order, and the devices' sizes [K].

    Devices of unlike size are filled up with zeros. An intercept adds a column of ones to the real rows.
    """
    owner = assign(
        rule, outcomes.astype(float), devices, host_generator(key, "data", "partition")
    )
    order, sizes = (
        np.argsort(owner, kind="stable"),
        np.bincount(owner, minlength=devices),
    )
    real = np.arange(sizes.max()) < sizes[:, None]

    places = np.flatnonzero(real)

    def by_device(values: np.ndarray, ones: int = 0) -> np.ndarray:
        """Return values[N, ...] as [K, n, ...], and columns of ones beside them."""
        rest = (values.shape[1] + ones,) if values.ndim > 1 else ()
        held = np.zeros((real.size, *rest), values.dtype)
        for start in range(
            0, len(places), ROWS_AT_ONCE
        ):  # without a second copy of all that is held
            some = slice(start, start + ROWS_AT_ONCE)
            taken = values[order[some]]
            held[places[some]] = (
                np.pad(taken, ((0, 0), (0, ones)), constant_values=1) if ones else taken
            )
        return held.reshape(*real.shape, *rest)

    return by_device(features, int(intercept)), by_device(outcomes), sizes


def _dirichlet(
    rule: str, labels: NDArray[np.float64], devices: int, generator: np.random.Generator
) -> NDArray[np.intp]:
    name, _, text = rule.partition(":")
    try:
        concentration = float(text)
    except ValueError:
        concentration = np.nan
    if name != "dirichlet" or not 0 < concentration < np.inf:
        raise InputError(
            "partition", rule, "iid, blocks, by-label or dirichlet:A with A above 0"
        )
    classes = np.unique(labels, return_inverse=True)[1]
    if classes.max() >= 20:
        classes = np.searchsorted(np.quantile(labels, np.arange(1, 10) / 10), labels)
    owner = np.empty(labels.shape[0], dtype=np.intp)
    for value in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == value))
        # Gamma draws in logs: for small concentrations all shares of a plain draw may underflow to zero.
        log_share = np.log(generator.standard_gamma(concentration + 1, devices))
        log_share += np.log(generator.random(devices)) / concentration
        share = np.exp(log_share - log_share.max())
        owner[members] = np.repeat(
            np.arange(devices), generator.multinomial(members.size, share / share.sum())
        )
    sizes = np.bincount(owner, minlength=devices)
    for device in np.flatnonzero(
        sizes == 0
    ):  # each gets one example of the device that has most
        largest = int(np.argmax(sizes))
        owner[np.flatnonzero(owner == largest)[0]] = device
        sizes[largest] -= 1
        sizes[device] += 1
    return owner


def by_device(
    devices: int | ArrayLike | Sequence[ArrayLike],
    count: int,
    partition: str = "iid",
    key: jax.Array | None = None,
) -> list[NDArray[np.intp]]:
    """Return the examples of every device, by their numbers in 0..count − 1."""
    key = seeded(0) if key is None else key
    check_key(key)
    if partition not in ("iid", "blocks"):
        raise InputError(
            "partition",
            partition,
            "iid or blocks; or give the device of every example as `devices`",
        )
    given = devices
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        devices = assign(
            partition,
            np.zeros(count),
            int(devices),
            host_generator(key, "data", "partition"),
        )
    if isinstance(devices, list | tuple) and any(np.ndim(part) for part in devices):
        parts = [np.ravel(part) for part in devices]
        valid = all(part.size for part in parts) and np.array_equal(
            np.sort(np.concatenate(parts)), np.arange(count)
        )
    else:
        numbers, owner = np.unique(np.asarray(devices), return_inverse=True)
        parts = np.split(
            np.argsort(owner, axis=None, kind="stable"),
            np.cumsum(np.bincount(owner.ravel()))[:-1],
        )
        valid = owner.shape == (count,) and np.array_equal(
            numbers, np.arange(numbers.size)
        )
    if not valid:
        each = f"the device (0, 1, …) of each of the {count} examples, or a list of each device's examples"
        hint = "np.unique(ids, return_inverse=True)[1] makes such numbers of ids"
        raise InputError("devices", given, f"a number of devices, {each}; {hint}")
    return parts
