"""Comparison of a NumPyro model with the sum over its examples and its prior."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.apps.adapters.cut_program import Program, Refusal, as_row, refuse_site
from wflmc.apps.adapters.numpyro_types import Arrays
from wflmc.support.trees import Values

MAX_RELATIVE_ERROR = 1e-6
"""Relative error to which a site's density on all data is the sum over examples.

Densities are computed in float64, with sums in different orders.
"""
DISTANCE_FROM_START = 0.1
"""Standard deviation of the offsets at which densities are compared.

It is one of unconstrained values. At the start itself many parameters are 0, and
different densities equal by accident.
"""
NON_FINITE = Refusal(
    "has a density or a gradient that is nan or infinite where the search begins",
    "finite there (a root or a log of 0?): change the model, or pass initial=…",
)
PRIOR_FROM_COUNT = Refusal(
    "has a prior that depends on the number of examples",
    "a site in their plate, or one of public arguments: give their number as a float",
)
DEPENDENT_EXAMPLES = Refusal(
    "depends on more than its own example",
    "independent given the parameters: give lagged values as columns, and public means "
    "as arguments",
)


class _Densities(NamedTuple):
    """Log-densities by site, at some parameters and on some examples."""

    joint: Arrays
    """Of the model on all of these examples, and values of deterministic sites."""
    prior: Arrays
    """The same of the model on placeholders."""
    by_example: Arrays
    """Of the model on every example alone, added up; of sites of examples."""
    slopes: Arrays
    """Of `by_example`, where all parameters grow at the same pace.

    They are not finite where one of the derivatives is not.
    """


DensityFunction: TypeAlias = Callable[[Values, Values], _Densities]
"""Of unconstrained parameters and examples."""


def check_densities(program: Program) -> None:
    """Refuse a prior that depends on N, and examples that are not independent.

    One compiled program computes all densities, since compilation takes most of the
    time of these checks. The prior is checked first, on placeholders. Deterministic
    sites that depend on the number of examples are removed from `public_values`, and
    the axes of `likelihood_axes` are set.

    Args:
        program: whose sites are sorted into those of examples and others.

    Raises:
        InputError: names the site.
    """
    near_start = _near_start(program)
    placeholders = program.placeholders(program.count)
    densities = _density_function(program)
    try:
        on_placeholders = densities(near_start, placeholders)
    except Exception:
        # Whatever the model raises on one example, a fault of its prior is reported
        # first.
        _check_prior(program, *_without_examples(program, near_start, placeholders))
        raise
    _check_prior(program, on_placeholders.joint, on_placeholders.prior)
    examples = program.examples
    _check_sums(
        program,
        near_start=densities(near_start, examples),
        at_start=densities(program.start, examples),
    )


def _near_start(program: Program) -> dict[str, np.ndarray]:
    """Return parameters near the start, where densities are not equal by accident."""
    generator = np.random.default_rng(0)
    return {
        name: value + DISTANCE_FROM_START * generator.standard_normal(value.shape)
        for name, value in program.start.items()
    }


def _density_function(program: Program) -> DensityFunction:
    """Return the compiled function that computes all densities of a program."""
    discrete = program.first_values

    @jax.jit
    def densities(parameters: Values, examples: Values) -> _Densities:
        def sums(parameters: Values) -> Arrays:
            return _sums_over_examples(program, parameters, examples)

        growth = jax.tree.map(jnp.ones_like, parameters)
        by_example, slopes = jax.jvp(sums, (parameters,), (growth,))
        return _Densities(
            joint=program.densities_on(parameters, examples, discrete),
            prior=program.prior_densities(parameters),
            by_example=by_example,
            slopes=slopes,
        )

    return densities


def _sums_over_examples(
    program: Program, parameters: Values, examples: Values
) -> Arrays:
    """Return the log-densities of the sites of examples, added up over examples."""
    discrete = program.first_values

    def of_example(example: Values) -> Arrays:
        return program.densities_on(parameters, as_row(example), discrete)

    by_example = jax.vmap(of_example)(examples)
    return {name: jnp.sum(by_example[name]) for name in program.likelihood_axes}


def _without_examples(
    program: Program, parameters: Values, placeholders: Values
) -> tuple[Arrays, Arrays]:
    """Return the joint and the prior densities on placeholders alone."""

    @jax.jit
    def densities(parameters: Values) -> tuple[Arrays, Arrays]:
        joint = program.densities_on(parameters, placeholders, program.first_values)
        return joint, program.prior_densities(parameters)

    return densities(parameters)


def _check_prior(program: Program, joint: Values, prior: Values) -> None:
    """Refuse a prior that depends on how many examples there are, or is not finite.

    Args:
        program: whose `public_values` and `likelihood_axes` are set.
        joint: densities on as many placeholders as there are examples.
        prior: those on placeholders that the prior is computed with.
    """

    def agrees(name: str) -> bool:
        same_shape = joint[name].shape == prior[name].shape
        return same_shape and np.allclose(joint[name], prior[name], equal_nan=True)

    for name in program.prior_sites:
        if not agrees(name):
            refuse_site(name, PRIOR_FROM_COUNT)
        if not np.all(np.isfinite(prior[name])):
            refuse_site(name, NON_FINITE)
    program.public_values = tuple(
        name for name in program.public_values if agrees(name)
    )
    shapes = {name: joint[name].shape for name in program.likelihood_axes}
    program.likelihood_axes = {
        name: shape.index(program.count) if program.count in shape else None
        for name, shape in shapes.items()
    }


def _check_sums(
    program: Program, *, near_start: _Densities, at_start: _Densities
) -> None:
    """Refuse examples that are not independent, or not finite at the start.

    Args:
        program: with the sites of its examples.
        near_start: densities on all data, close to the start.
        at_start: the same at the start.
    """
    for name in program.likelihood_axes:
        plates = program.sites[name]["cond_indep_stack"]
        if plates and not program.is_in_example_plate(name):
            fault = f"is in plate {plates[0].name} of {plates[0].size}"
            requirement = (
                f"in a plate over its {program.count} examples, along example_axis"
            )
            refuse_site(name, Refusal(fault, requirement))
        density = np.asarray(near_start.joint[name])
        size = np.abs(density).sum()
        if not np.isfinite(size) or not np.isfinite(at_start.slopes[name]):
            refuse_site(name, NON_FINITE)
        error = abs(float(near_start.by_example[name]) - density.sum())
        if error > MAX_RELATIVE_ERROR * (program.count + size):
            refuse_site(name, DEPENDENT_EXAMPLES)
