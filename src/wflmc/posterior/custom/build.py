"""`posterior_from`: a log-likelihood of one example, a log-prior, and data spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import Found, InputError
from wflmc.keys import check_key, host_generator, named
from wflmc.posterior.custom.checks import checked_arrays, checked_parameters
from wflmc.posterior.custom.model import TracedModel, costs_and_norms, trace_model
from wflmc.posterior.custom.posterior import EXAMPLE_BYTES, CustomPosterior
from wflmc.posterior.inputs import check_counts
from wflmc.posterior.partition import assign

NUMBERED = "ids become such numbers by np.unique(ids, return_inverse=True)[1]"


class Assignment(TypedDict, total=False):
    """How examples are assigned to a number of devices."""

    partition: str
    key: jax.Array | None


def posterior_from(
    log_likelihood: Callable[[Any, Any], Any],
    log_prior: Callable[[Any], Any],
    data: Any = None,
    *,
    initial: Any = None,
    devices: int | ArrayLike | Sequence[ArrayLike] | None = None,
    initial_std: float = 0.0,
    mu: float | None = None,
    L: float | None = None,
    batch: int | None = None,
    **assignment: Unpack[Assignment],
) -> CustomPosterior:
    """Return the posterior of any JAX model whose examples are spread over devices.

    Args:
        log_likelihood: of parameters and ONE example, a number.
        log_prior: of parameters, up to a constant.
        data: a pytree of arrays [N, ...] with the examples along their first axis.
        initial: parameters to start chains at, any pytree of floating-point arrays. It must be given: it says what
            parameters there are, which the functions alone cannot.
        devices: must be given too: how many; or the device of every example, [N]; or a list of each one's examples.
        initial_std: standard deviation of the starts around `initial`, the same for all parameters.
        mu, L: strong convexity and smoothness of −log p(θ|D), where public values are known. Else they are estimated by
            the Hessian at `initial` and at a mode, which depends on the data: no promise of privacy covers that.
        batch: examples that each device draws for a round, all by default and where no device has more. Gradients are
            then noisier than the bound knows, and no privacy is claimed for an example not being drawn.
        assignment: where `devices` is a number, `partition` is iid (default) or blocks, and `key` seeds iid
            (jax.random.key(0) unless given).
    """
    if data is None:
        instead = "posterior_from(log_likelihood, log_prior, data, initial=…, devices=…)"
        missing = "data" if callable(log_prior) else "log_prior"
        raise InputError(missing, Found("is missing"), f"given, as in {instead}")
    examples, count = checked_arrays("data", data)
    if initial is None:
        width = max([leaf.shape[-1] for leaf in jax.tree.leaves(examples) if leaf.ndim > 1], default=1)
        such = f"np.zeros({width}) or {{'weights': np.zeros({width}), 'intercept': 0.0}}"
        wanted = f"the parameters that chains start at, as log_prior takes them, such as {such}"
        raise InputError("initial", Found("was not given"), wanted)
    start, structure, shapes = checked_parameters(initial)
    model = trace_model(log_likelihood, log_prior, structure, shapes, examples)
    _check_numbers(mu, L, initial_std)
    if batch is not None:
        check_counts(batch=batch)
    _check_start(model, examples, start)
    parts = examples_by_device(devices, count, **assignment)
    sizes = np.array([part.size for part in parts])
    # A device's first example fills it up: one of zeros might have no likelihood at all.
    places = np.stack([np.append(part, np.full(sizes.max() - part.size, part[0])) for part in parts])
    posterior = CustomPosterior(
        data=jax.tree.map(lambda values: values[places], examples),
        sizes=sizes,
        start=start,
        initial_std=float(initial_std),
        mu=np.nan if mu is None else float(mu),
        L=np.nan if L is None else float(L),
        model=model,
        prior_devices=len(parts),
        batch=None if batch is None or batch >= sizes.max() else int(batch),
        estimated=tuple(name for name, value in (("mu", mu), ("L", L)) if value is None),
    )
    return _with_estimates(posterior) if posterior.estimated else posterior


def _check_numbers(mu: Any, L: Any, initial_std: Any) -> None:
    for name, value in (("mu", mu), ("L", L)):
        if value is not None and not (_is_number(value) and 0 < value < np.inf):
            raise InputError(name, value, "a number above 0 and finite")
    if mu is not None and L is not None and mu > L:
        raise InputError("mu", mu, f"at most L = {L:g}")
    if not (_is_number(initial_std) and 0 <= initial_std < np.inf):
        raise InputError("initial_std", initial_std, "a number, finite and at least 0")


def _is_number(value: Any) -> bool:
    """Return whether it is one real number, and no truth value."""
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"


def _check_start(model: TracedModel, examples: Any, start: NDArray[np.float64]) -> None:
    """Refuse a model that has no value or no gradient where chains begin."""
    theta, how_many = jnp.asarray(start, jnp.float32), len(jax.tree.leaves(examples)[0])
    at_a_time = min(how_many, max(1, EXAMPLE_BYTES // (8 * model.dim)))
    wanted = "finite at `initial`: start elsewhere, or mend it (log of 0? a root at 0? data that are nan?)"
    for what, values in zip(("value", "gradient"), costs_and_norms(model, examples, theta, at_a_time), strict=True):
        bad = np.flatnonzero(~np.isfinite(np.asarray(values)))
        if bad.size:
            given = Found(f"has a {what} that is nan or infinite at example {bad[0]}")
            raise InputError("log_likelihood", given, wanted)
    if not all(np.all(np.isfinite(part)) for part in jax.value_and_grad(model.prior_cost)(theta)):
        raise InputError("log_prior", Found("has a value or gradient that is nan or infinite"), wanted)


def _with_estimates(posterior: CustomPosterior) -> CustomPosterior:
    """Estimate mu and L by the Hessian at the start and at a mode; mu at the mode alone where need be."""
    mu, L, estimated = posterior.mu, posterior.L, posterior.estimated
    at_start, at_mode = posterior.eigenvalues(posterior.start), posterior.laplace[1]
    values, least = np.concatenate([at_start, at_mode]), at_start.min()
    if not np.all(np.isfinite(values)):
        wanted = "a number above 0: no estimate was found, as eigenvalues of the Hessian did not converge"
        raise InputError(estimated[0], Found("was not given"), wanted)
    if "mu" in estimated:
        if at_mode.min() <= 0:
            where = f"least eigenvalue {at_mode.min():.3g} at the mode found and {least:.3g} at `initial`"
            wanted = f"a number above 0: none can be estimated, as the cost is not convex ({where}); is a sign wrong?"
            raise InputError("mu", Found("was not given"), wanted)
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
    if devices is None:
        wanted = f"how many devices share the {count} examples, or the device of each of them"
        raise InputError("devices", Found("was not given"), wanted)
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        generator = host_generator(named(key, "data"), "partition")
        devices = assign(partition, np.zeros(count), int(devices), generator)
    if isinstance(devices, list | tuple) and any(_axes(part) for part in devices):
        parts = _checked_lists(devices, count)
    else:
        owner = _checked_owners(np.asarray(devices), count)
        parts = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
    empty = [number for number, part in enumerate(parts) if not part.size]
    if empty:
        given = Found(f"has no example for device {empty[0]}")
        raise InputError("devices", given, f"at least one example for every device: {NUMBERED}")
    return parts


def _axes(part: Any) -> int:
    try:
        return int(np.ndim(part))
    except ValueError:  # rows of unlike length
        return 2


def _checked_lists(devices: Sequence[Any], count: int) -> list[NDArray[np.intp]]:
    axes, wanted = [_axes(part) for part in devices], f"lists in which each of 0..{count - 1} is once"
    if max(axes) > 1:
        instead = "put the data together and give np.repeat(np.arange(K), [examples of each device])"
        raise InputError("devices", Found("has lists of data"), f"the device of every example: {instead}; or {wanted}")
    if min(axes) < 1:
        raise InputError("devices", Found("has single values beside lists"), wanted)
    parts = [np.asarray(part, dtype=None if len(part) else np.intp) for part in devices]
    whole = np.concatenate(parts)
    if whole.dtype.kind not in "iu" or not np.array_equal(np.sort(whole), np.arange(count)):
        raise InputError("devices", Found(f"is a list of {len(parts)} lists"), f"{wanted}: the examples' numbers")
    return parts


def _checked_owners(owner: NDArray[Any], count: int) -> NDArray[np.intp]:
    if owner.shape != (count,):
        wanted = f"a number of devices, the device of each of the {count} examples, or a list of each device's examples"
        given = Found(f"is an array of shape {owner.shape}") if owner.ndim else owner.tolist()
        raise InputError("devices", given, wanted)
    if owner.dtype.kind not in "iu":
        problem = f"is an array of type {owner.dtype}"
    elif owner.min() < 0:
        problem = "has negative numbers"
    elif owner.max() >= count:
        problem = f"has {np.unique(owner).size} different numbers, not all below {count}"
    else:
        return owner
    raise InputError("devices", Found(problem), f"the numbers 0, 1, … of devices, each with an example: {NUMBERED}")
