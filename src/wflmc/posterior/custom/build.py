"""`posterior_from`: a log-likelihood of one example, a log-prior, and data spread over devices."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import Found, InputError
from wflmc.keys import check_key, host_generator, named
from wflmc.posterior.custom.model import Shapes, TracedModel, checked_arrays, costs_and_norms, trace_model
from wflmc.posterior.custom.posterior import EXAMPLE_BYTES, CustomPosterior
from wflmc.posterior.inputs import check_counts, check_positive
from wflmc.posterior.partition import assign


def posterior_from(
    log_likelihood: Callable[[Any, Any], Any],
    log_prior: Callable[[Any], Any],
    data: Any,
    *,
    initial: Any,
    devices: int | ArrayLike | Sequence[ArrayLike],
    initial_std: float = 0.0,
    mu: float | None = None,
    L: float | None = None,
    batch: int | None = None,
    **assignment: Any,
) -> CustomPosterior:
    """Return the posterior of any JAX model whose examples are spread over devices.

    Args:
        log_likelihood: of parameters and ONE example, a number.
        log_prior: of parameters, up to a constant.
        data: a pytree of arrays [N, ...] with the examples along their first axis.
        initial: parameters to start chains at, any pytree of floating-point arrays: it says what parameters there are,
            which the functions alone cannot.
        devices: how many; or the device of every example, [N]; or a list of each one's examples.
        initial_std: standard deviation of the starts around `initial`, the same for all parameters.
        mu, L: strong convexity and smoothness of −log p(θ|D), where public values are known. Else they are estimated by
            the Hessian at `initial` and at a mode, which depends on the data: no promise of privacy covers that.
        batch: examples that each device draws for a round, all by default and where no device has more. Gradients are
            then noisier than the bound knows, and no privacy is claimed for an example not being drawn.
        assignment: where `devices` is a number, `partition` is iid (default) or blocks, and `key` seeds iid
            (jax.random.key(0) unless given).
    """
    examples, count = checked_arrays("data", data)
    start, structure, shapes = _checked_parameters(initial)
    model = trace_model(log_likelihood, log_prior, structure, shapes, examples)
    known = {name: value for name, value in (("mu", mu), ("L", L)) if value is not None}
    check_positive(known)
    check_positive({"initial_std": initial_std}, or_zero=True)
    if mu is not None and L is not None and mu > L:
        raise InputError("mu", mu, f"at most L = {L:g}")
    if batch is not None:
        check_counts(batch=batch)
    _check_start(model, examples, start)
    parts = examples_by_device(devices, count, **assignment)
    sizes = np.array([part.size for part in parts])
    # A device's first example fills it up: one of zeros might have no likelihood at all.
    places = np.stack([np.append(part, np.full(sizes.max() - part.size, part[0])) for part in parts])
    held = jax.tree.map(lambda values: values[places], examples)
    batch = None if batch is None or batch >= sizes.max() else int(batch)
    mu, L = (float(known.get(name, np.nan)) for name in ("mu", "L"))
    estimated = tuple(name for name in ("mu", "L") if name not in known)
    posterior = CustomPosterior(held, sizes, start, float(initial_std), mu, L, model, len(parts), batch, estimated)
    return _with_estimates(posterior) if posterior.estimated else posterior


def _checked_parameters(initial: Any) -> tuple[NDArray[np.float64], Any, Shapes]:
    """Return the starting parameters as one flat array, their pytree structure and their shapes."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(initial)
    for path, leaf in leaves:
        if not jnp.issubdtype(np.asarray(leaf).dtype, jnp.floating):
            instead = "leave out what is no parameter, as eqx.partition(model, eqx.is_inexact_array) does"
            wanted = f"a floating-point array, such as 0.0 for 0: {instead}, and put it back as eqx.combine does"
            raise InputError("initial" + jax.tree_util.keystr(path), leaf, wanted)
    arrays = [np.asarray(leaf, dtype=float) for _, leaf in leaves]
    flat = np.concatenate([np.zeros(0), *(array.ravel() for array in arrays)])
    if not flat.size or not np.all(np.isfinite(flat)):
        raise InputError("initial", Found("has no parameters, or nan or infinite ones"), "at least one array, finite")
    return flat, structure, tuple(array.shape for array in arrays)


def _check_start(model: TracedModel, examples: Any, start: NDArray[np.float64]) -> None:
    """Refuse a model that has no value or no gradient where chains begin."""
    theta, how_many = jnp.asarray(start, jnp.float32), len(jax.tree.leaves(examples)[0])
    at_a_time = min(how_many, max(1, EXAMPLE_BYTES // (8 * model.dim)))
    wanted = "finite at `initial`: start elsewhere, or mend it (log of 0? a root at 0? data that are nan?)"
    problem = "has a value or a gradient that is nan or infinite"
    finite = [np.isfinite(values) for values in costs_and_norms(model, examples, theta, at_a_time)]
    if not np.all(finite):
        first = np.flatnonzero(~np.all(finite, axis=0))[0]
        raise InputError("log_likelihood", Found(f"{problem} at example {first}"), wanted)
    if not all(np.all(np.isfinite(part)) for part in jax.value_and_grad(model.prior_cost)(theta)):
        raise InputError("log_prior", Found(problem), wanted)


def _with_estimates(posterior: CustomPosterior) -> CustomPosterior:
    """Estimate mu and L by the Hessian at the start and at a mode; mu at the mode alone where need be."""
    mu, L, estimated = posterior.mu, posterior.L, posterior.estimated
    at_start, at_mode = posterior.eigenvalues(posterior.start), posterior.laplace[1]
    values, least = np.concatenate([at_start, at_mode]), at_start.min()
    if not np.all(np.isfinite(values)) or ("mu" in estimated and at_mode.min() <= 0):
        where = f"least eigenvalue {at_mode.min():.3g} at the mode found and {least:.3g} at `initial`"
        wanted = f"a number above 0: none can be estimated, as the cost is not convex ({where}); is a sign wrong?"
        raise InputError(estimated[0], Found("was not given"), wanted)
    if "mu" in estimated:
        mu = float(values.min() if least > 0 else at_mode.min())
        if least <= 0:
            mode_only = f"mu (at the mode alone: at the start the least eigenvalue is {least:.3g}, not convex)"
            estimated = (mode_only, *estimated[1:])
    L = float(np.abs(values).max()) if "L" in estimated else L
    if mu > L * (1 + 1e-3):  # float32 may put an estimate a little beside the other constant
        raise InputError("mu", mu, f"at most L = {L:.6g} ({' and '.join(posterior.estimated)} is an estimate)")
    L = max(mu, L) if "L" in estimated else L
    result = replace(posterior, mu=min(mu, L), L=L, estimated=estimated)
    vars(result)["laplace"] = posterior.laplace  # the same, and not computed again
    return result


def examples_by_device(
    devices: Any, count: int, partition: str = "iid", key: jax.Array | None = None
) -> list[NDArray[np.intp]]:
    """Return the examples of every device, by their numbers in 0..count − 1."""
    key = jax.random.key(0) if key is None else key
    check_key(key)
    if partition not in ("iid", "blocks"):
        raise InputError("partition", partition, "iid or blocks; or give the device of every example as `devices`")
    given = devices
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        generator = host_generator(named(key, "data"), "partition")
        devices = assign(partition, np.zeros(count), int(devices), generator)
    if isinstance(devices, list | tuple) and any(np.ndim(part) for part in devices):
        parts = [np.ravel(part) for part in devices]
        valid = all(part.size for part in parts) and np.array_equal(np.sort(np.concatenate(parts)), np.arange(count))
    else:
        numbers, owner = np.unique(np.asarray(devices), return_inverse=True)
        parts = np.split(np.argsort(owner, axis=None, kind="stable"), np.cumsum(np.bincount(owner.ravel()))[:-1])
        valid = owner.shape == (count,) and np.array_equal(numbers, np.arange(numbers.size))
    if not valid:
        wanted = (
            f"a number of devices, the device (0, 1, …) of each of the {count} examples, or a list of each device's "
            "examples; np.unique(ids, return_inverse=True)[1] makes such numbers of ids"
        )
        raise InputError("devices", given, wanted)
    return parts
