"""What a person gives for a model of one's own, refused in words: arrays, parameters, and functions that fail."""

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


def checked_parameters(initial: Any) -> tuple[NDArray[np.float64], Any, tuple[tuple[int, ...], ...]]:
    """The starting parameters flat, their structure and their shapes."""
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
        raise InputError(
            "initial", Found("has no parameters, or nan or infinite ones"), "finite, and at least one number"
        )
    return flat, structure, tuple(array.shape for array in arrays)


def checked_arrays(key: str, data: Any) -> tuple[Any, int]:
    """A pytree of examples as NumPy arrays, and how many examples there are."""
    paths, structure = jax.tree_util.tree_flatten_with_path(data)
    for path, found in jax.tree_util.tree_leaves_with_path(data, is_leaf=_plain_list):
        if isinstance(found, list):
            raise InputError(key + jax.tree_util.keystr(path), Found(f"is a list of {len(found)} values"), ARRAYS)
    arrays = [_checked_array(key + jax.tree_util.keystr(path), leaf) for path, leaf in paths]
    if len({array.shape[0] if array.ndim else None for array in arrays}) != 1 or not arrays[0].ndim:
        shown = ", ".join(str(array.shape) for array in arrays)
        raise InputError(key, Found(f"has arrays of shapes {shown}" if arrays else "has no arrays"), ARRAYS)
    count = int(arrays[0].shape[0])
    if not count:
        raise InputError(key, Found("has arrays without any example"), "arrays of at least one example")
    return jax.tree.unflatten(structure, arrays), count


def _plain_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str | int | float | np.generic) for v in value)


def _checked_array(key: str, leaf: Any) -> NDArray[Any]:
    """An array of real numbers that an accelerator can hold."""
    array = np.asarray(leaf)
    if array.dtype == np.longdouble:
        array = array.astype(float)
    kind = array.dtype.kind
    if kind in "OSU":
        instead = "real numbers: encode texts as integers, such as by np.unique(values, return_inverse=True)[1]"
        raise InputError(key, Found(f"has entries of type {array.dtype}"), instead)
    if kind not in "fiub":
        raise InputError(key, Found(f"has entries of type {array.dtype}"), "real numbers")
    if kind in "iu" and array.size:
        most = np.iinfo(on_accelerator(array.dtype))
        if int(array.min()) < most.min or int(array.max()) > most.max:
            allowed = f"whole numbers from {most.min} up to {most.max}: scale them, or give floats"
            raise InputError(key, Found(f"has whole numbers that {most.dtype} cannot hold"), allowed)
    return array


def on_accelerator(kind: Any) -> Any:
    """The type of numbers there: float32 for any that are not whole."""
    return np.dtype(np.float32) if np.dtype(kind).kind == "f" else jax.dtypes.canonicalize_dtype(kind)


def shapes_of(tree: Any) -> str:
    """The shapes of a tree's arrays, in its structure, in a few words."""
    shown = str(jax.tree.map(lambda leaf: tuple(leaf.shape), tree))
    return shown if len(shown) <= 120 else shown[:117] + "..."


def shape_of(key: str, function: Any, wanted: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call of a person's function would return; one that fails is refused in words."""
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
        raise InputError(
            key, Found(f"fails{_where(function, error)}: {_said(error)}"), _advice(error, wanted)
        ) from error  # whose traceback shows where


def check_number(
    key: str, function: Any, wanted: str, call: Callable[..., Any], *arguments: Any, whole: bool = False
) -> None:
    """Refuse a function that does not return one floating-point number, or a whole one where that is welcome."""
    leaves = jax.tree.leaves(shape_of(key, function, wanted, call, *arguments))
    kinds = (jnp.floating, jnp.integer) if whole else (jnp.floating,)
    if len(leaves) != 1 or leaves[0].shape != () or not any(jnp.issubdtype(leaves[0].dtype, kind) for kind in kinds):
        found = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
        raise InputError(key, Found(f"returns {found}"), f"{wanted}, that returns one floating-point number")


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:110].rstrip('.')}" if lines else type(error).__name__


def _where(function: Any, error: Exception) -> str:
    """In which line of the person's own file, where that can be told."""
    function = getattr(function, "func", function)
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename]
    return f" in line {lines[-1]} of {os.path.basename(code.co_filename)}" if code is not None and lines else ""


def _advice(error: Exception, wanted: str) -> str:
    errors = jax.errors
    hints: tuple[tuple[type[Exception], str], ...] = (
        (errors.TracerArrayConversionError, "use jax.numpy in place of numpy"),
        (errors.TracerBoolConversionError, "use jnp.where in place of a decision by values"),
        (
            errors.TracerIntegerConversionError,
            "lengths and places must not depend on values: use jnp.where over a fixed jnp.arange in place of range(n)",
        ),
        (errors.NonConcreteBooleanIndexError, "use jnp.where(mask, values, 0.0) in place of values[mask]"),
        (errors.ConcretizationTypeError, "use jax.numpy in place of math, float() and item()"),
    )
    return next((f"{wanted}: {hint}" for kind, hint in hints if isinstance(error, kind)), wanted)
