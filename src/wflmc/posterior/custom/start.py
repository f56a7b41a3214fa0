"""Whether a model has finite values and gradients where chains begin."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.posterior.coordinates import Affine
from wflmc.posterior.custom.model import TracedModel, on_device
from wflmc.posterior.custom.precision import in_float32
from wflmc.sums.norms import row_norms
from wflmc.support.compilation import Compiler
from wflmc.support.errors import Found, InputError
from wflmc.support.trees import ArrayTree

Finite: TypeAlias = tuple[jax.Array, jax.Array]
"""Whether every example, [N], and the prior have finite values and gradients."""

BYTES_AT_A_TIME = 2**24
"""Of the gradients of examples."""


class StartCheck:
    """Refuses a model without a finite value or gradient where chains begin."""

    def __init__(self, model: TracedModel, examples: ArrayTree) -> None:
        """Prepare the check.

        Args:
            model: of parameters, not of coordinates.
            examples: a pytree of arrays [N, ...].
        """
        count = len(jax.tree.leaves(examples)[0])
        examples_at_a_time = min(count, max(1, BYTES_AT_A_TIME // (8 * model.dim)))
        with np.errstate(
            over="ignore"
        ):  # what float32 cannot hold is infinite, and refused
            self._examples = jax.tree.map(on_device, examples)
        self._dim = model.dim
        self._not_compiled = partial(_are_finite, model, examples_at_a_time)
        self._run: Callable[[Affine | None, NDArray[np.float32], ArrayTree], Finite]
        self._run = partial(_are_finite_by_name, model, examples_at_a_time)

    def compile(self, compiler: Compiler) -> None:
        """Have the check compiled, for coordinates by a matrix that is yet to be found."""
        space = Affine(np.zeros(self._dim), np.eye(self._dim))
        theta = np.zeros(self._dim, np.float32)
        with in_float32():
            self._run = compiler.start(self._not_compiled, space, theta, self._examples)

    def refuse(self, space: Affine | None, start: NDArray[np.float64]) -> None:
        """Refuse the model if it is not finite.

        Args:
            space: the coordinates that chains move in; None: the parameters.
            start: where they begin, in these coordinates, [m].

        Raises:
            InputError: names the first example without a finite value or gradient, or the prior.
        """
        with in_float32():
            finite = self._run(space, start.astype(np.float32), self._examples)
        examples_are_finite, prior_is_finite = map(np.asarray, finite)
        wanted = "finite at `initial`: start elsewhere, or mend it (log of 0? a root at 0? data that are nan?)"
        problem = "has a value or a gradient that is nan or infinite"
        if not np.all(examples_are_finite):
            first = np.flatnonzero(~examples_are_finite)[0]
            raise InputError(
                "log_likelihood", Found(f"{problem} at example {first}"), wanted
            )
        if not prior_is_finite:
            raise InputError("log_prior", Found(problem), wanted)


def _are_finite(
    model: TracedModel,
    examples_at_a_time: int,
    space: Affine | None,
    theta: jax.Array,
    examples: ArrayTree,
) -> Finite:
    """Return whether values and gradients at θ[m], in some coordinates, are finite."""
    moved = replace(model, space=space)

    def is_finite(example: ArrayTree) -> jax.Array:
        value, gradient = jax.value_and_grad(moved.cost)(theta, example)
        return jnp.isfinite(value) & jnp.isfinite(row_norms(gradient))

    examples_are_finite = jax.lax.map(
        is_finite, examples, batch_size=examples_at_a_time
    )
    value, gradient = jax.value_and_grad(moved.prior_cost)(theta)
    return examples_are_finite, jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))


_are_finite_by_name = jax.jit(_are_finite, static_argnums=(0, 1))
"""The same; models of the same name are compiled once."""
