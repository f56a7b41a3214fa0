"""Programs that XLA compiles in other threads while this one goes on.

Tracing is Python and stays in the thread that asks for it, with its precision; XLA
compiles without Python.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, ParamSpec, Self, TypeVar

import jax

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
"""A pytree of arrays."""

WORKERS = 2
"""Threads that compile at the same time: more programs are seldom waiting."""


class Compiler:
    """Compiles programs while others run; a context in which they are asked for.

    Programs that nobody has waited for at its end, as after an error, are abandoned.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(
        self,
        function: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> "Program[Arguments, Result]":
        """Trace a function, and have it compiled in another thread.

        Tracing happens before this returns, so that the function sees the settings of
        the calling thread, such as its precision.

        Args:
            function: of pytrees of arrays.
            *arguments: of the shapes and types that it will be called with.
            **keywords: the same by name.

        Returns:
            The function for such arguments.
        """
        lowered = jax.jit(function).lower(*arguments, **keywords)
        return Program(self._pool.submit(lowered.compile))


class Program(Generic[Arguments, Result]):
    """A function for arguments of fixed shapes, perhaps still being compiled."""

    def __init__(self, compiled: "Future[jax.stages.Compiled]") -> None:
        self._compiled = compiled

    def __call__(
        self, *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        """Wait until it is compiled, and run it."""
        return self._compiled.result()(*arguments, **keywords)
