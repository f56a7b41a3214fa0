"""Neural networks of Flax and Equinox as posteriors: trained parameters apart from everything that stays as it is."""

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
        module: an NNX module with its parameters, from which chains start; or a Linen module, whose parameters are
            initialised on an input of zeros: the start of the chains must not depend on the data. What is no
            `nnx.Param`, or not in Linen's collection `params`, stays as it is.
        log_likelihood: of the module's output for one input and that example's target, a number.
        data: inputs and targets, pytrees of arrays [N, ...].
        devices: how many; or the device of every example, [N]; or a list of each one's examples.
        prior: standard deviation of N(0, s²) for all parameters; one for each leaf, a pytree; or a log-density, a
            function of the parameters.
        key: initialises a Linen module; jax.random.key(0) unless given.
        options: those of `posterior_from`. Without `mu` it is the prior's, and without `L` the largest curvature where
            chains start: the cost of a network is not convex, and no bound holds.

    Raises:
        InputError: for what is no module of Flax, and for a Linen module that initialises anything by its input.
    """
    from flax import linen, nnx

    network = partial(_network, log_likelihood=log_likelihood, data=data, prior=prior)
    if isinstance(module, linen.Module):
        _check_data(data)
        collections = _initialise(
            module, jax.random.key(0) if key is None else key, data[0]
        )
        start = collections.pop("params", {})

        def apply(parameters: ArrayTree, value: ArrayTree) -> ArrayTree:
            variables: dict[str, Any] = {"params": parameters, **collections}
            return module.apply(variables, value)

        return network(start, apply, devices=devices, **options)
    if not isinstance(module, nnx.Module):
        raise InputError(
            "module", type(module).__name__, "a module of flax.nnx or flax.linen"
        )
    graph, trained, rest = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]
    merge = partial(nnx.merge, graph)
    return network(trained, lambda p, x: merge(p, rest)(x), devices=devices, **options)


def from_equinox(
    module: "equinox.Module",
    log_likelihood: LogLikelihood,
    data: Data,
    *,
    devices: Devices,
    prior: Prior = 1.0,
    **options: Any,
) -> CustomPosterior:
    """Return the posterior of the floating-point arrays of an Equinox module; arguments as of `from_flax`."""
    import equinox as eqx

    start, static = eqx.partition(module, eqx.is_inexact_array)
    return _network(
        start,
        lambda p, x: eqx.combine(p, static)(x),
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
    """Return the collections of a Linen module, initialised on zeros; refuse one whose input decides them.

    Args:
        inputs: a pytree of arrays [N, ...], of which only the shapes and types are used.
    """
    zeros = jax.tree.map(lambda values: jnp.zeros_like(jnp.asarray(values[0])), inputs)

    def collections(inputs: Mapping[str, ArrayTree]) -> dict[str, ArrayTree]:
        return dict(module.init(key, inputs["input"]))

    try:
        sources = sources_of(collections, {"input": zeros})
        by_input = "input" in all_sources(sources)
    except (
        jax.errors.JAXTypeError,
        jax.errors.JAXIndexError,
    ):  # a value of the input is asked for
        by_input = True
    if by_input:
        wanted = "one that is initialised by its key alone: what an input decides would tell of a private record"
        raise InputError(
            "module",
            Fault("initialises parameters or other variables by its input"),
            wanted,
        )
    return dict(module.init(key, zeros))


def _check_data(data: object) -> None:
    """Refuse what is no tuple of inputs and targets."""
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
    scale = jax.tree.broadcast(1.0 if callable(prior) else prior, start)

    def of_example(parameters: Parameters, example: Data) -> jax.Array:
        return log_likelihood(apply(parameters, example[0]), example[1])

    def gaussian(parameters: Parameters) -> jax.Array | float:
        squares = jax.tree.map(lambda p, s: jnp.sum((p / s) ** 2), parameters, scale)
        return -0.5 * sum(jax.tree.leaves(squares))

    symmetric = sum(np.ndim(leaf) > 1 for leaf in jax.tree.leaves(start)) > 1
    if isinstance(options.get("preconditioner", "none"), str):
        options.setdefault("mu", float(max(map(np.max, jax.tree.leaves(scale)))) ** -2)
    sites = Sites(apply=apply, symmetric=symmetric)
    log_prior = prior if callable(prior) else gaussian
    return posterior_from(
        of_example, log_prior, data, initial=start, sites=sites, **options
    )
