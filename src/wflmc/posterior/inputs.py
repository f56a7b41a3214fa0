"""Checks of what all models are given: data, labels, prior and start."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import InputError, unknown

Array = NDArray[np.float64]

INITS = ("prior", "zero")
Names = tuple[int, ...] | tuple[str, ...]
MOST = 1000
"""Classes that are taken from data; more are targets of a regression, or a mistake."""


def check_init(init: str) -> None:
    """Refuse a start that is not known."""
    if init not in INITS:
        raise unknown("init", init, INITS, section="sampler")


def check_positive(numbers: Mapping[str, float], or_zero: bool = False) -> None:
    """Refuse what is not one finite number above 0, or 0 where that is welcome; `numbers` are by name."""
    for name, value in numbers.items():
        one = np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"
        if not (one and 0 <= value < np.inf and (or_zero or value)):
            raise InputError(
                name,
                value,
                f"a number, finite and {'at least' if or_zero else 'above'} 0",
            )


def check_counts(**counts: int) -> None:
    """Refuse what is no size of at least one."""
    for name, value in counts.items():
        if (
            not isinstance(value, int | np.integer)
            or isinstance(value, bool)
            or value < 1
        ):
            raise InputError(name, value, "a whole number of at least 1")


def checked(X: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    """Return X[N, features] and y[N] as finite floats; float32 features stay what they are."""
    raw = np.asarray(X), np.asarray(y)
    if any(array.dtype.kind not in "fiub" for array in raw):
        raise InputError(
            "data",
            f"X of type {raw[0].dtype} and y of type {raw[1].dtype}",
            "real numbers",
        )
    features, target = (
        raw[0] if raw[0].dtype == np.float32 else raw[0].astype(float),
        raw[1].astype(float),
    )
    if (
        features.ndim != 2
        or target.ndim != 1
        or features.shape[0] != target.shape[0]
        or not features.size
    ):
        given = f"X of shape {features.shape} and y of shape {target.shape}"
        raise InputError("data", given, "X[N, features] and y[N], not empty")
    if not (np.all(np.isfinite(features)) and np.all(np.isfinite(target))):
        raise InputError("data", "values that are nan or infinite", "finite everywhere")
    return features, target


def with_intercept(features: Array) -> Array:
    """Return the features and a column of ones."""
    return np.column_stack([features, np.ones(features.shape[0], features.dtype)])


def class_names(
    y: ArrayLike, classes: int | Sequence[int] | Sequence[str] | None
) -> Names:
    """Return the label of every class: 0 to C − 1 for a number C, names as given, else the sorted labels that y has."""
    if isinstance(classes, int | np.integer):
        names: Names = tuple(range(classes))
    elif classes is not None:
        names = tuple(_values(classes).tolist())
    else:
        names = tuple(np.unique(_values(y)).tolist())
        if not 2 <= len(names) <= MOST:
            given = (
                "labels y of one class only"
                if len(names) < 2
                else f"labels y of {len(names)} different values"
            )
            raise InputError(
                "data",
                given,
                f"labelled by whole numbers or text, of 2 to {MOST} classes",
            )
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(
            "classes",
            classes,
            "at least 2, or the names of at least two classes, each given once",
        )
    return names


def as_classes(y: ArrayLike, names: Names) -> NDArray[np.intp]:
    """Return the class of every label, 0 to C − 1, refused where there is none of that name."""
    numbers = {name: number for number, name in enumerate(names)}
    found = np.array(
        [numbers.get(label, -1) for label in _values(y).tolist()], dtype=np.intp
    )
    if np.any(found < 0):
        listed = ", ".join(map(str, names[:6])) + ", …" * (len(names) > 6)
        raise InputError(
            "data",
            f"an unknown label y[{np.argmax(found < 0)}]",
            f"labelled by {listed}",
        )
    return found


def _values(y: ArrayLike) -> np.ndarray:
    """Return labels as an array of whole numbers or of text."""
    values = np.asarray(y)
    if values.dtype.kind == "O" and all(
        isinstance(value, str) for value in values.flat
    ):  # as tables hold text
        values = values.astype(str)
    if values.dtype.kind not in "fiubU":
        raise InputError(
            "data",
            f"labels y of type {values.dtype}",
            "labelled by whole numbers or text",
        )
    if values.dtype.kind == "U":
        return values
    # One label that is no integer makes floats of all: from this size on, they may have lost digits by that.
    largest = (
        2.0 ** (np.finfo(values.dtype).nmant + 1)
        if values.dtype.kind == "f"
        else 2.0**63
    )
    bad = np.flatnonzero(
        ~np.isfinite(values)
        | (values != np.floor(values))
        | (np.abs(values) >= largest)
    )
    if bad.size:
        raise InputError(
            "data", f"an invalid label y[{bad[0]}]", "labelled by whole numbers or text"
        )
    return values.astype(np.int64)
