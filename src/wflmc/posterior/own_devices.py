"""Which device holds which example of a model of one's own: a number of devices, an owner each, or a list each."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import Found, InputError
from wflmc.keys import host_generator, named
from wflmc.posterior.partition import partition as split

Parts = list[NDArray[np.intp]]

NUMBERED = "ids become such numbers by np.unique(ids, return_inverse=True)[1]"


def parts_of(devices: Any, count: int, rule: str, key: jax.Array) -> Parts:
    """The examples of every device, by their numbers in 0..count − 1."""
    if rule not in ("iid", "blocks"):
        raise InputError("partition", rule, "iid or blocks; or give the device of every example as `devices`")
    if devices is None:
        wanted = f"how many devices share the {count} examples, or the device of each of them"
        raise InputError("devices", Found("was not given"), wanted)
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        owner = split(rule, np.zeros(count), int(devices), host_generator(named(key, "data"), "partition"))
        return _by_owner(owner, count)
    if isinstance(devices, list | tuple) and any(_axes(part) for part in devices):
        return _listed(devices, count)
    return _by_owner(np.asarray(devices), count)


def _axes(part: Any) -> int:
    try:
        return int(np.ndim(part))
    except ValueError:  # rows of unlike length
        return 2


def _listed(devices: list[Any] | tuple[Any, ...], count: int) -> Parts:
    axes = [_axes(part) for part in devices]
    wanted = f"lists in which each of 0..{count - 1} is once"
    if max(axes) > 1:
        instead = "put the data together and give np.repeat(np.arange(K), [examples of each device])"
        raise InputError("devices", Found("has lists of data"), f"the device of every example: {instead}; or {wanted}")
    if min(axes) < 1:
        raise InputError("devices", Found("has single values beside lists"), wanted)
    parts = [np.asarray(part) for part in devices]
    _refuse_empty([part.size for part in parts], "leave empty lists out")
    whole = np.concatenate(parts)
    if whole.dtype.kind not in "iu" or not np.array_equal(np.sort(whole), np.arange(count)):
        raise InputError("devices", Found(f"is a list of {len(parts)} lists"), f"{wanted}: the examples' numbers")
    return parts


def _by_owner(owner: NDArray[Any], count: int) -> Parts:
    each = f"a number of devices, the device of each of the {count} examples, or a list of examples for each device"
    if owner.shape != (count,):
        if not owner.ndim:
            raise InputError("devices", owner.tolist(), each)
        given = f"length {owner.size}" if owner.ndim == 1 else f"shape {owner.shape}"
        raise InputError("devices", Found(f"is an array of {given}"), each)
    whole = "the numbers 0, 1, … of devices"
    if owner.dtype.kind not in "iu":
        raise InputError("devices", Found(f"is an array of type {owner.dtype}"), f"{whole}: {NUMBERED}")
    if owner.min() < 0:
        raise InputError("devices", Found("has negative numbers"), f"{whole}: {NUMBERED}")
    if owner.max() >= count:
        found = Found(f"has {np.unique(owner).size} different numbers, not all below {count}")
        raise InputError("devices", found, f"{whole}, each with an example: {NUMBERED}")
    sizes = np.bincount(owner)
    _refuse_empty(sizes, NUMBERED)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def _refuse_empty(sizes: Any, hint: str) -> None:
    empty = np.flatnonzero(np.asarray(sizes) == 0)
    if empty.size:
        found = Found(f"has no example for device {empty[0]}")
        raise InputError("devices", found, f"at least one example for every device: {hint}")
