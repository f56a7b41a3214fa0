"""Checks of what a person gives for a custom model: arrays, parameters, and functions that fail."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import Found, InputError

ARRAYS = (
    "an array, or arrays, with the examples along one first axis, such as (X, y); "
    "np.asarray makes one of a list of numbers or rows"
)
PARAMETERS = (
    "a floating-point array: leave out what is no parameter, as eqx.partition(model, eqx.is_inexact_array) does, "
    "and put it back inside log_likelihood and log_prior, as eqx.combine does"
)
HINTS = {
    jax.errors.TracerArrayConversionError: "use jax.numpy in place of numpy",
    jax.errors.TracerBoolConversionError: "use jnp.where in place of a decision by values",
    jax.errors.TracerIntegerConversionError: "use jnp.where over a fixed jnp.arange in place of range(n)",
    jax.errors.NonConcreteBooleanIndexError: "use jnp.where(mask, values, 0.0) in place of values[mask]",
    jax.errors.ConcretizationTypeError: "use jax.numpy in place of math, float() and item()",
}
"""Advice for what cannot be traced; the last is the general case of those before it."""


def checked_parameters(initial: Any) -> tuple[NDArray[np.float64], Any, tuple[tuple[int, ...], ...]]:
    """Return the starting parameters as one flat array, their pytree structure and their shapes."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(initial)
    if not leaves:
        raise InputError("initial", initial, "a pytree with at least one array of floating-point parameters")
    for path, leaf in leaves:
        number = hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)
        if not number or not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.floating):
            wanted = "floating-point numbers, such as 0.0 for 0" if number else PARAMETERS
            raise InputError("initial" + jax.tree_util.keystr(path), leaf, wanted)
    arrays = [np.asarray(leaf, dtype=float) for _, leaf in leaves]
    flat = np.concatenate([array.ravel() for array in arrays])
    if not flat.size or not np.all(np.isfinite(flat)):
        given = Found("has no parameters, or nan or infinite ones")
        raise InputError("initial", given, "finite, and at least one number")
    return flat, structure, tuple(array.shape for array in arrays)


def checked_arrays(key: str, data: Any) -> tuple[Any, int]:
    """Return a pytree of examples as NumPy arrays, and the number of examples."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data, is_leaf=_is_plain_list):
        if isinstance(leaf, list):
            raise InputError(key + jax.tree_util.keystr(path), Found(f"is a list of {len(leaf)} values"), ARRAYS)
    leaves, structure = jax.tree_util.tree_flatten_with_path(data)
    arrays = [_checked_array(key + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    if len({array.shape[:1] for array in arrays}) != 1 or not arrays[0].ndim:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise InputError(key, Found(f"has arrays of shapes {shapes}" if arrays else "has no arrays"), ARRAYS)
    if not len(arrays[0]):
        raise InputError(key, Found("has arrays without any example"), "arrays of at least one example")
    return jax.tree.unflatten(structure, arrays), len(arrays[0])


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str | int | float | np.generic) for v in value)


def _checked_array(key: str, leaf: Any) -> NDArray[Any]:
    """Return an array of real numbers that an accelerator can hold."""
    array = np.asarray(leaf)
    if array.dtype == np.longdouble:
        array = array.astype(float)
    if array.dtype.kind not in "fiub":
        wanted = "real numbers: np.unique(values, return_inverse=True)[1] encodes texts as integers"
        raise InputError(key, Found(f"has entries of type {array.dtype}"), wanted)
    if array.dtype.kind in "iu" and array.size:
        held = np.iinfo(accelerator_dtype(array.dtype))
        if int(array.min()) < held.min or int(array.max()) > held.max:
            allowed = f"whole numbers from {held.min} up to {held.max}: scale them, or give floats"
            raise InputError(key, Found(f"has whole numbers that {held.dtype} cannot hold"), allowed)
    return array


def accelerator_dtype(dtype: Any) -> Any:
    """Return the type of numbers on an accelerator: float32 for floats, at most 32 bits for whole numbers."""
    return np.dtype(np.float32) if np.dtype(dtype).kind == "f" else jax.dtypes.canonicalize_dtype(dtype)


def shapes_of(tree: Any) -> str:
    """Return the shapes of a tree's arrays, in its structure, as a short text."""
    shown = str(jax.tree.map(lambda leaf: tuple(leaf.shape), tree))
    return shown if len(shown) <= 120 else shown[:117] + "..."


def shape_of(key: str, function: Any, wanted: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the shapes of what `call`, which calls a person's function, would return; refuse a function that fails."""
    if not callable(function):
        raise InputError(key, function, wanted)

    def checked(*traced: Any) -> Any:
        result = call(*traced)
        for leaf in jax.tree.leaves(result):
            known = isinstance(leaf, jax.Array | bool | int | float | complex)
            if not known and np.asarray(leaf).dtype.kind not in "fiubcV":
                raise InputError(key, Found(f"returns a {type(leaf).__name__}"), wanted)
        return result

    try:
        return jax.eval_shape(checked, *arguments)
    except InputError:
        raise
    except Exception as error:  # whatever a person's function may raise
        said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:130].rstrip(".: ")
        hint = next((f"{wanted}: {hint}" for kind, hint in HINTS.items() if isinstance(error, kind)), wanted)
        raise InputError(key, Found(f"fails{_line(function, error)}: {said}"), hint) from error


def check_number(
    key: str, function: Any, wanted: str, call: Callable[..., Any], *arguments: Any, whole: bool = False
) -> None:
    """Refuse a function that does not return one floating-point number, or a whole one where that is welcome."""
    leaves = jax.tree.leaves(shape_of(key, function, wanted, call, *arguments))
    kinds = (jnp.floating, jnp.integer) if whole else (jnp.floating,)
    if len(leaves) != 1 or leaves[0].shape != () or not any(jnp.issubdtype(leaves[0].dtype, kind) for kind in kinds):
        shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
        raise InputError(key, Found(f"returns {shown}"), f"{wanted}, that returns one floating-point number")


def _line(function: Any, error: Exception) -> str:
    """Return in which line of the person's own file an error was raised, where that is known."""
    function = getattr(function, "func", function)
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if code is None:
        return ""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == code.co_filename]
    return f" in line {lines[-1]} of {os.path.basename(code.co_filename)}" if lines else ""
