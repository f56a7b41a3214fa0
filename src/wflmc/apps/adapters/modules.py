"""Neural networks of Flax and Equinox as posteriors.

Trained parameters are split from everything that stays as it is, such as statistics of
batch normalisation.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from wflmc.apps.adapters.dependence import all_sources, sources_of
from wflmc.posterior.custom import CustomPosterior, posterior_from
from wflmc.posterior.custom.model import Sites
from wflmc.support.errors import Fault, InputError
from wflmc.support.trees import ArrayTree

Data = tuple[ArrayTree, ArrayTree]
"""Inputs and targets, pytrees of arrays [N, ...]."""
Devices = int | ArrayLike | Sequence[ArrayLike]
Parameters = TypeVar("Parameters")
"""The trained arrays of a module, as the library nests them: a pytree."""
LogLikelihood = Callable[..., jax.Array]
"""Of a network's output and a target, both as the network and the data have them."""
Prior = ArrayTree | Callable[..., jax.Array]
"""Standard deviations, or a log-density of the parameters."""
if TYPE_CHECKING:
    import equinox
    from flax import linen, nnx


def from_flax(
    module: "nnx.Module | linen.Module",
    log_likelihood: LogLikelihood,
    data: Data,
    *,
    devices: Devices,
    prior: Prior = 1.0,
    key: jax.Array | None = None,
    **options: Any,
) -> CustomPosterior:
    """Return the posterior of the parameters of a Flax module, of NNX or of Linen.

    Args:
        module: an NNX module with its parameters, from which chains start; or a Linen
            module, whose parameters are initialised on an input of zeros: the start of
            the chains must not depend on the data. Variables that are no `nnx.Param`,
            or not in Linen's collection `params`, stay as they are.
        log_likelihood: of the module's output for one input and that example's target,
            a number.
        data: inputs and targets, pytrees of arrays [N, ...].
        devices: how many; or the device of every example, [N]; or a list of each one's
            examples.
        prior: standard deviation of N(0, s²) for all parameters; one for each leaf, a
            pytree; or a log-density, a function of the parameters.
        key: initialises a Linen module; jax.random.key(0) by default.
        options: those of `posterior_from`. Without `mu` and a preconditioner, μ is the
            prior's, or 1 where the prior is a log-density. Without `L` it is the
            largest curvature where chains start: the cost of a network is not convex,
            and no bound holds.

    Returns:
        The posterior of the parameters, which `posterior.unflatten` returns as the
        library nests them.

    Raises:
        InputError: for an object that is no module of Flax, and for a Linen module that
            initialises anything by its input.
    """
    from flax import linen, nnx

    network = partial(_network, log_likelihood=log_likelihood, data=data, prior=prior)
    if isinstance(module, linen.Module):
        _check_data(data)
        initial_key = jax.random.key(0) if key is None else key
        collections = _initialise(module, initial_key, data[0])
        start = collections.pop("params", {})

        def apply_linen(parameters: ArrayTree, inputs: ArrayTree) -> ArrayTree:
            variables: dict[str, Any] = {"params": parameters, **collections}
            return module.apply(variables, inputs)

        return network(start, apply_linen, devices=devices, **options)
    if not isinstance(module, nnx.Module):
        raise InputError(
            "module", type(module).__name__, "a module of flax.nnx or flax.linen"
        )
    graph, trained, fixed = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]
    merge = partial(nnx.merge, graph)

    def apply_nnx(parameters: ArrayTree, inputs: ArrayTree) -> ArrayTree:
        return merge(parameters, fixed)(inputs)

    return network(trained, apply_nnx, devices=devices, **options)


def from_equinox(
    module: "equinox.Module",
    log_likelihood: LogLikelihood,
    data: Data,
    *,
    devices: Devices,
    prior: Prior = 1.0,
    **options: Any,
) -> CustomPosterior:
    """Return the posterior of the floating-point arrays of an Equinox module.

    All floating-point and complex arrays of the module are parameters, from which
    chains start; its other fields stay as they are.

    Args:
        module: called with one input, without a random key.
        log_likelihood: of the module's output for one input and that example's target,
            a number.
        data: inputs and targets, pytrees of arrays [N, ...].
        devices: how many; or the device of every example, [N]; or a list of each one's
            examples.
        prior: standard deviation of N(0, s²) for all parameters; one for each leaf, a
            pytree; or a log-density, a function of the parameters.
        options: those of `posterior_from`, as of `from_flax`.

    Returns:
        The posterior of the parameters, a module whose other fields are None.

    Raises:
        InputError: for data that are no tuple of inputs and targets.
    """
    import equinox as eqx

    start, static = eqx.partition(module, eqx.is_inexact_array)

    def apply(parameters: ArrayTree, inputs: ArrayTree) -> ArrayTree:
        combined: Callable[[ArrayTree], ArrayTree] = eqx.combine(parameters, static)
        return combined(inputs)

    return _network(
        start,
        apply,
        log_likelihood=log_likelihood,
        data=data,
        prior=prior,
        devices=devices,
        **options,
    )


def _initialise(
    module: "linen.Module",
    key: jax.Array,
    inputs: ArrayTree,
) -> dict[str, ArrayTree]:
    """Return the collections of a Linen module, initialised on zeros.

    A module whose input decides them is refused.

    Args:
        module: without variables.
        key: that initialises them.
        inputs: a pytree of arrays [N, ...]; only their shapes and types are used.
    """
    zeros = jax.tree.map(lambda values: jnp.zeros_like(jnp.asarray(values[0])), inputs)

    def collections(inputs: Mapping[str, ArrayTree]) -> dict[str, ArrayTree]:
        return dict(module.init(key, inputs["input"]))

    try:
        sources = sources_of(collections, {"input": zeros})
        depends_on_input = "input" in all_sources(sources)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        depends_on_input = True  # it needs a value of the input
    if depends_on_input:
        fault = Fault("initialises parameters or other variables by its input")
        requirement = (
            "one that is initialised by its key alone: what an input decides would "
            "reveal a private record"
        )
        raise InputError("module", fault, requirement)
    return dict(module.init(key, zeros))


def _check_data(data: object) -> None:
    """Refuse data that are no tuple of inputs and targets."""
    if not isinstance(data, tuple) or len(data) != 2:
        raise InputError("data", data, "a tuple of inputs and targets")


def _network(
    start: Parameters,
    apply: Callable[[Parameters, ArrayTree], ArrayTree],
    *,
    log_likelihood: LogLikelihood,
    data: Data,
    prior: Prior,
    **options: Any,
) -> CustomPosterior:
    """Return the posterior of parameters that `apply` takes with one input."""
    _check_data(data)
    deviations = jax.tree.broadcast(1.0 if callable(prior) else prior, start)

    def log_likelihood_of_example(parameters: Parameters, example: Data) -> jax.Array:
        inputs, target = example
        return log_likelihood(apply(parameters, inputs), target)

    def log_gaussian(parameters: Parameters) -> jax.Array | float:
        squares = jax.tree.map(
            lambda values, deviation: jnp.sum((values / deviation) ** 2),
            parameters,
            deviations,
        )
        return -0.5 * sum(jax.tree.leaves(squares))

    matrices = [leaf for leaf in jax.tree.leaves(start) if np.ndim(leaf) > 1]
    # In other coordinates the prior has another curvature.
    preconditioner = options.get("preconditioner", "none")
    if isinstance(preconditioner, str) and preconditioner == "none":
        largest_deviation = max(map(np.max, jax.tree.leaves(deviations)))
        options.setdefault("mu", float(largest_deviation) ** -2)
    # Hidden units of more than one layer can be exchanged.
    sites = Sites(apply=apply, symmetric=len(matrices) > 1)
    return posterior_from(
        log_likelihood_of_example,
        prior if callable(prior) else log_gaussian,
        data,
        initial=start,
        sites=sites,
        **options,
    )
