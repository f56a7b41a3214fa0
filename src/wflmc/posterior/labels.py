"""Labels as people have them, whole numbers or text, and the classes 0 to C − 1 that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError

Names = tuple[int, ...] | tuple[str, ...]
MOST = 1000
"""Classes that are taken from data; more are targets of a regression, or a mistake."""


def class_names(y: ArrayLike, classes: int | Sequence[int] | Sequence[str] | None) -> Names:
    """The label of every class: 0 to C − 1 for a number C, names as given, else the sorted labels that y has."""
    if isinstance(classes, int | np.integer):
        names: list[Any] = list(range(classes))
    elif classes is not None:
        names = _values(classes).tolist()
    else:
        names = np.unique(_values(y)).tolist()
        if not 2 <= len(names) <= MOST:
            given = "labels y of one class only" if len(names) < 2 else f"labels y of {len(names)} different values"
            raise InputError("data", given, f"labelled by whole numbers or text, of 2 to {MOST} classes")
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError("classes", classes, "at least 2, or the names of at least two classes, each given once")
    return tuple(names)


def as_classes(y: ArrayLike, names: Names) -> NDArray[np.intp]:
    """The class of every label, refused where there is none of that name."""
    values, known = _values(y), np.asarray(names)
    same_kind = (values.dtype.kind == "U") == (known.dtype.kind == "U")
    order = np.argsort(known, kind="stable")
    place = order[np.searchsorted(known, values, sorter=order).clip(0, len(known) - 1)] if same_kind else None
    unknown = np.zeros(1, int) if place is None else np.flatnonzero(known[place] != values)
    if place is None or unknown.size:
        raise InputError("data", f"an unknown label y[{unknown[0]}]", f"labelled by {_listed(names)}")
    return np.asarray(place, dtype=np.intp)


def _values(y: Any) -> NDArray[Any]:
    """Labels as an array of whole numbers or of text."""
    values = np.asarray(y)
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values.flat):  # as tables hold text
        values = values.astype(str)
    if values.dtype.kind not in "fiubU":
        raise InputError("data", f"labels y of type {values.dtype}", "labelled by whole numbers or text")
    if values.dtype.kind == "U":
        return values
    bad = np.flatnonzero(~np.isfinite(values) | (values != np.floor(values)) | (np.abs(values) >= 2.0**63))
    if bad.size:
        raise InputError("data", f"an invalid label y[{bad[0]}]", "labelled by whole numbers or text")
    return values.astype(np.int64)


def _listed(names: Names) -> str:
    if names == tuple(range(len(names))):
        return f"whole numbers from 0 to {len(names) - 1}"
    shown = [str(name) for name in names]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "…", shown[-1]])
