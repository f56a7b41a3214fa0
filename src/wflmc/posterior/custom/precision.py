"""Float64 for what is worked out beforehand, in a process whose chains are float32.

A model may be traced in both precisions in any order: by NUTS in float32, here in float64, and in float32 again. JAX
keeps the traces of the two apart, but not the NumPy arrays that a model takes from around it. From 0.9.2 on it converts
such an array to the precision in force once, and as long as any traced function holds the result it takes the same one
in the other precision too: a float64 product then meets a float32 factor, and fails. So arrays that were converted are
forgotten whenever the precision changes; they are converted again where they are used next, and traced functions keep
those that they hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax


@contextmanager
def in_float64() -> Iterator[None]:
    """Let JAX compute in float64, also with NumPy arrays that were used in float32 before or are used in it after."""
    home: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    _forget_converted_arrays()
    try:
        with home.enable_x64(True):
            yield
    finally:
        _forget_converted_arrays()


def _forget_converted_arrays() -> None:
    """Let JAX begin a new table of the NumPy arrays that it has converted.

    There is no public function for it. This is the one with which JAX begins the first table, and it takes less than a
    microsecond. Versions of JAX before 0.9.2 have no table.
    """
    with suppress(ImportError, AttributeError):
        from jax._src import literals
        from jaxlib import _jax

        _jax.set_typed_ndarray_type(literals.TypedNdArray)
