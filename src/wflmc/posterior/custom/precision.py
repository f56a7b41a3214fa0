"""Both precisions in one process: float32 for chains, float64 for what prepares them.

A model may be traced in both precisions in any order: by NUTS in float32, here in
float64, and in float32 again. Where a process has float64 switched on
(`numpyro.enable_x64()`), models that chains move by are still traced in float32.

JAX keeps the traces of the two apart, but not the NumPy arrays that a model takes from
around it. From 0.9.2 on it converts such an array to the precision in force once, and
as long as any traced function holds the result it takes the same one in the other
precision too: a float64 product then meets a float32 factor, and fails. So arrays that
were converted are forgotten whenever the precision changes; they are converted again
where they are used next, and traced functions keep those that they hold. They are
forgotten also where the precision stays: the user may have changed it.

The table belongs to the process, the precision to a thread: one thread at a time is in
one of these contexts. Threads that trace the same model by other means meanwhile, as
NUTS does, may still meet each other's arrays. (Models of NumPyro run in one thread at a
time anyway: its handlers belong to the process too.)
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import RLock
from typing import Any

import jax

_PRECISION_LOCK = RLock()
"""Held by the thread that has chosen a precision."""


def in_float64() -> AbstractContextManager[None]:
    """Let JAX compute in float64 within a context.

    NumPy arrays that were used in float32 before, or are used in it afterwards, are
    converted anew. One thread at a time can be in such a context; others wait.

    Returns:
        The context, at whose end the precision is as it was before.
    """
    return _in_precision(double=True)


def in_float32() -> AbstractContextManager[None]:
    """Let JAX compute in float32 within a context.

    It does so also in a process that has float64 switched on. One thread at a time can
    be in such a context; others wait.

    Returns:
        The context, at whose end the precision is as it was before.
    """
    return _in_precision(double=False)


@contextmanager
def _in_precision(*, double: bool) -> Iterator[None]:
    """Change the precision of this thread until the end, also after an error.

    Args:
        double: whether it is float64.
    """
    # Earlier versions of JAX have the context manager among experimental functions.
    module: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    with _PRECISION_LOCK:
        _forget_converted_arrays()
        try:
            with module.enable_x64(double):
                yield
        finally:
            _forget_converted_arrays()


def _forget_converted_arrays() -> None:
    """Let JAX begin a new table of the NumPy arrays that it has converted.

    There is no public function for it: `jax.clear_caches` throws away all compiled code
    of the process, and leaves the arrays that a user's own functions hold. This is the
    function with which JAX begins the first table, and it takes less than a
    microsecond. Versions of JAX before 0.9.2 have no table. Should a later one begin it
    otherwise, nothing is forgotten, and models that take NumPy arrays from around them
    fail in the second precision.
    """
    with suppress(ImportError, AttributeError, TypeError):
        from jax._src import literals
        from jaxlib import _jax

        _jax.set_typed_ndarray_type(literals.TypedNdArray)
