"""Whether a model has finite values and gradients where chains begin."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.posterior.coordinates import Affine
from wflmc.posterior.custom.model import TracedModel, on_device
from wflmc.posterior.custom.precision import in_float32
from wflmc.sums.norms import row_norms
from wflmc.support.compilation import Compiler
from wflmc.support.errors import Fault, InputError, without_data
from wflmc.support.trees import ArrayTree


@without_data
class Finiteness(NamedTuple):
    """Whether values and gradients are finite."""

    examples: jax.Array
    """Those of every example, [N]."""
    prior: jax.Array
    """Those of the prior, a number."""


MAX_GRADIENT_BYTES = 2**24
"""Bytes of the gradients of examples at a time, at eight a number."""


class StartCheck:
    """Refuses a model without a finite value or gradient where chains begin."""

    def __init__(self, model: TracedModel, examples: ArrayTree) -> None:
        """Prepare the check.

        Args:
            model: of parameters, not of coordinates.
            examples: a pytree of arrays [N, ...].
        """
        count = len(jax.tree.leaves(examples)[0])
        affordable = MAX_GRADIENT_BYTES // (8 * model.dim)
        block = min(count, max(1, affordable))
        # What float32 cannot hold is infinite, and refused.
        with np.errstate(over="ignore"):
            self._examples = jax.tree.map(on_device, examples)
        self._dim = model.dim
        self._not_compiled = partial(_are_finite, model, block)
        self._run: Callable[[Affine | None, NDArray[np.float32], ArrayTree], Finiteness]
        self._run = partial(_are_finite_by_name, model, block)

    def compile(self, compiler: Compiler) -> None:
        """Have the check compiled, for coordinates that are yet to be found.

        They must be those of a matrix [m, m]. Without this call, `refuse` compiles
        the check when it is first needed, once for all models of the same name.

        Args:
            compiler: in whose threads XLA works.
        """
        space = Affine(np.zeros(self._dim), np.eye(self._dim))
        theta = np.zeros(self._dim, np.float32)
        with in_float32():
            self._run = compiler.start(self._not_compiled, space, theta, self._examples)

    def refuse(self, space: Affine | None, start: NDArray[np.float64]) -> None:
        """Refuse the model if it is not finite where chains begin.

        Values and gradients are those of float32, in which chains compute; the prior is
        looked at after all examples.

        Args:
            space: the coordinates that chains move in; None: the parameters.
            start: where they begin, in these coordinates, [m].

        Raises:
            InputError: names the first example without a finite value or gradient, or
                the prior.
        """
        with in_float32():
            finite = self._run(space, start.astype(np.float32), self._examples)
        requirement = (
            "finite at `initial`: start elsewhere, or mend it (log of 0? a root at 0? "
            "data that are nan?)"
        )
        problem = "has a value or a gradient that is nan or infinite"
        examples_are_finite = np.asarray(finite.examples)
        if not np.all(examples_are_finite):
            first = np.flatnonzero(~examples_are_finite)[0]
            where = Fault(f"{problem} at example {first}")
            raise InputError("log_likelihood", where, requirement)
        if not np.asarray(finite.prior):
            raise InputError("log_prior", Fault(problem), requirement)


def _are_finite(
    model: TracedModel,
    block: int,
    space: Affine | None,
    theta: jax.Array,
    examples: ArrayTree,
) -> Finiteness:
    """Return whether values and gradients at φ[m] are finite.

    Args:
        model: of parameters.
        block: examples that are computed at a time.
        space: the coordinates of φ; None: the parameters.
        theta: φ[m].
        examples: a pytree of arrays [N, ...].
    """
    moved = replace(model, space=space)

    def is_finite(example: ArrayTree) -> jax.Array:
        value, gradient = jax.value_and_grad(moved.cost)(theta, example)
        return jnp.isfinite(value) & jnp.isfinite(row_norms(gradient))

    examples_are_finite = jax.lax.map(is_finite, examples, batch_size=block)
    value, gradient = jax.value_and_grad(moved.prior_cost)(theta)
    prior_is_finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    return Finiteness(examples_are_finite, prior_is_finite)


_are_finite_by_name = jax.jit(_are_finite, static_argnums=(0, 1))
"""The same; models of the same name are compiled once."""
