"""Checks of what all models take from users: data, labels, prior and start."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import InputError, unknown

Array = NDArray[np.float64]

INITS = ("prior", "prior-mean", "zero")
"""Where chains may start: drawn from the prior, at the mean of these draws, or at
zero."""
Names = tuple[int, ...] | tuple[str, ...]
"""The labels of classes: whole numbers, or texts."""
LARGEST_PARAMETER = 1e9
"""Chains start at a prior's mean; from larger parameters on, products with features may
overflow in float32."""
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""Chains compute in float32, in which a larger number is infinite."""
MAX_CLASSES = 1000
"""Classes that are taken from data; more are targets of a regression, or a mistake."""
MAX_SHOWN_NAMES = 6
"""Classes that an error names."""
LABEL_KINDS = "labelled by whole numbers or text"
"""What labels must be, in errors."""


def check_init(init: str) -> None:
    """Refuse the name of a start that does not exist.

    Args:
        init: one of `INITS`.

    Raises:
        InputError: names the starts that exist.
    """
    if init not in INITS:
        raise unknown("init", init, INITS, section="sampler")


def starts_at_point(init: str) -> bool:
    """Return whether all chains start at the same point.

    Args:
        init: one of `INITS`.
    """
    return init != "prior"


def check_prior_mean(prior_mean: ArrayLike | None, dim: int) -> Array | None:
    """Return the mean of a prior as one vector of finite floats.

    Args:
        prior_mean: θ₀, of m numbers in any shape, those of a class side by side; or
            None.
        dim: m.

    Returns:
        θ₀[m]; None where no mean is given.

    Raises:
        InputError: for another number of values, or values that are not finite or too
            large.
    """
    if prior_mean is None:
        return None
    mean = np.asarray(prior_mean)
    requirement = f"{dim} finite numbers, one per parameter"
    if mean.dtype.kind not in "fiu" or mean.size != dim:
        problem = f"shape {mean.shape} of type {mean.dtype}"
        raise InputError("prior_mean", problem, requirement)
    if not np.all(np.isfinite(mean)):
        raise InputError("prior_mean", "values that are nan or infinite", requirement)
    values = mean.astype(float).ravel()
    if np.abs(values).max() > LARGEST_PARAMETER:
        largest = f"values up to {np.abs(values).max():.3g}"
        raise InputError("prior_mean", largest, f"at most {LARGEST_PARAMETER:g}")
    return values


def check_positive(numbers: Mapping[str, float], or_zero: bool = False) -> None:
    """Refuse what is not one finite number above 0.

    Args:
        numbers: by the names of the arguments that they were passed for.
        or_zero: whether 0 is allowed as well.

    Raises:
        InputError: for the first that is an array with axes, a text, a boolean,
            negative, infinite or nan; or 0, unless that is allowed.
    """
    bound = "at least" if or_zero else "above"
    for name, value in numbers.items():
        is_number = np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"
        if not (is_number and 0 <= value < np.inf and (or_zero or value)):
            raise InputError(name, value, f"a number, finite and {bound} 0")


def check_counts(**counts: int) -> None:
    """Refuse what is not a whole number of at least one.

    Args:
        **counts: sizes, by the names of the arguments that they were passed for.

    Raises:
        InputError: for the first that is none; booleans are none either.
    """
    for name, value in counts.items():
        is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not is_whole or value < 1:
            raise InputError(name, value, "a whole number of at least 1")


def check_data(X: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    """Return the examples of a regression as arrays of finite floats.

    Args:
        X: features, [N, d]; those in float32 stay in it, to save memory.
        y: targets, [N].

    Returns:
        Features [N, d] and targets [N].

    Raises:
        InputError: if the data are empty, of unequal length, of another type than real
            numbers or booleans, not finite, or too large for float32.
    """
    features = np.asarray(X)
    target = np.asarray(y)
    if not (_is_real(features) and _is_real(target)):
        problem = f"X of type {features.dtype} and y of type {target.dtype}"
        raise InputError("data", problem, "real numbers")
    if features.dtype != np.float32:
        features = features.astype(float)
    target = target.astype(float)
    if features.ndim != 2 or target.ndim != 1:
        raise _wrong_shapes(features, target)
    if features.shape[0] != target.shape[0] or not features.size:
        raise _wrong_shapes(features, target)
    if not (np.all(np.isfinite(features)) and np.all(np.isfinite(target))):
        raise InputError("data", "values that are nan or infinite", "finite everywhere")
    if max(np.abs(features).max(), np.abs(target).max()) > LARGEST_FLOAT32:
        problem = "values that float32 cannot hold"
        raise InputError("data", problem, "scaled to moderate size")
    return features, target


def _is_real(values: np.ndarray) -> bool:
    """Return whether an array holds real numbers or booleans."""
    return values.dtype.kind in "fiub"


def _wrong_shapes(features: np.ndarray, target: np.ndarray) -> InputError:
    """Return the error for data whose shapes do not fit a regression."""
    problem = f"X of shape {features.shape} and y of shape {target.shape}"
    return InputError("data", problem, "X[N, features] and y[N], not empty")


def with_intercept(features: Array) -> Array:
    """Return features with a column of ones appended, of the same type.

    Args:
        features: u[N, d].

    Returns:
        [N, d + 1].
    """
    return np.column_stack([features, np.ones(features.shape[0], features.dtype)])


def class_names(
    y: ArrayLike, classes: int | Sequence[int] | Sequence[str] | None
) -> Names:
    """Return the label of every class.

    Labels that are found in the data depend on them: where the set of classes is not
    public, callers should declare it.

    Args:
        y: labels, [N]; read only where `classes` is None.
        classes: C, for labels 0 to C − 1; or the labels themselves, whose order is
            kept; or None, for all labels that y has, sorted.

    Raises:
        InputError: for fewer than two classes or repeated names, or for labels that are
            neither whole numbers nor texts, or, in the data, of more than 1,000
            different values.
    """
    names: Names
    if isinstance(classes, int | np.integer):
        names = tuple(range(classes))
    elif classes is not None:
        names = tuple(_label_values(classes, "classes", "classes").tolist())
    else:
        names = tuple(np.unique(_label_values(y)).tolist())
        _check_names_of_data(names)
    if len(names) < 2 or len(set(names)) < len(names):
        requirement = (
            "at least 2, or the names of at least two classes, each given once"
        )
        raise InputError("classes", classes, requirement)
    return names


def _check_names_of_data(names: Names) -> None:
    """Refuse labels of the data that are too few or too many to be classes."""
    if 2 <= len(names) <= MAX_CLASSES:
        return
    problem = f"labels y of {len(names)} different values"
    if len(names) < 2:
        problem = "labels y of one class only"
    raise InputError("data", problem, f"{LABEL_KINDS}, of 2 to {MAX_CLASSES} classes")


def as_classes(y: ArrayLike, names: Names) -> NDArray[np.intp]:
    """Return the class of every label, as a number.

    Args:
        y: labels, [N].
        names: the label of every class, [C].

    Returns:
        Numbers 0 to C − 1, [N].

    Raises:
        InputError: for a label that is not among the names; it shows the position of
            the first one, not the label.
    """
    numbers = {name: number for number, name in enumerate(names)}
    labels = _label_values(y).tolist()
    classes = np.array([numbers.get(label, -1) for label in labels], dtype=np.intp)
    is_unknown = classes < 0
    if np.any(is_unknown):
        shown_names = ", ".join(map(str, names[:MAX_SHOWN_NAMES]))
        if len(names) > MAX_SHOWN_NAMES:
            shown_names += ", …"
        problem = f"an unknown label y[{np.argmax(is_unknown)}]"
        raise InputError("data", problem, f"labelled by {shown_names}")
    return classes


def _label_values(y: ArrayLike, key: str = "data", name: str = "y") -> np.ndarray:
    """Return labels as an array of whole numbers or of text.

    Args:
        y: the labels, [N].
        key: the argument that they came by, for errors.
        name: of the array in it.

    Raises:
        InputError: for labels of another type, or numbers that are not whole or may
            have lost digits.
    """
    values = np.asarray(y)
    if _holds_text_objects(values):
        values = values.astype(str)
    if values.dtype.kind not in "fiubU":
        raise InputError(key, f"labels {name} of type {values.dtype}", LABEL_KINDS)
    if values.dtype.kind == "U":
        return values
    # One label that is no integer makes floats of all: from this size on, they may have
    # lost digits by that.
    largest = 2.0**63
    if values.dtype.kind == "f":
        largest = 2.0 ** (np.finfo(values.dtype).nmant + 1)
    is_whole = np.isfinite(values) & (values == np.floor(values))
    is_valid = is_whole & (np.abs(values) < largest)
    if not np.all(is_valid):
        first = np.flatnonzero(~is_valid)[0]
        raise InputError(key, f"an invalid label {name}[{first}]", LABEL_KINDS)
    return values.astype(np.int64)


def _holds_text_objects(values: np.ndarray) -> bool:
    """Return whether an array holds texts as objects, as columns of tables do."""
    if values.dtype.kind != "O":
        return False
    return all(isinstance(value, str) for value in values.flat)
