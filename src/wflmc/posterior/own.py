"""Any JAX model: a log-likelihood of one example, a log-prior, and data spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError
from wflmc.keys import host_generator, named
from wflmc.posterior.own_model import Model, checked_data, checked_model, checked_parameters
from wflmc.posterior.own_posterior import EXAMPLES, OwnPosterior, look
from wflmc.posterior.partition import partition as split

Array = NDArray[np.float64]


def posterior(
    log_likelihood: Callable[[Any, Any], Any],
    log_prior: Callable[[Any], Any],
    data: Any,
    *,
    initial: Any = None,
    devices: int | ArrayLike | Sequence[ArrayLike] | None = None,
    initial_std: float = 0.0,
    partition: str = "iid",
    key: jax.Array | None = None,
    mu: float | None = None,
    L: float | None = None,
    batch: int | None = None,
) -> OwnPosterior:
    """The posterior of any JAX model whose examples are spread over devices.

    Args:
        log_likelihood: of parameters and ONE example, a number; log_prior: of parameters, up to a constant.
        data: a pytree of arrays [N, ...] with the examples along their first axis.
        initial: parameters to start chains at, any pytree of floating-point arrays. It must be given: it says what
            parameters there are, which the functions alone cannot.
        devices: must be given too: how many; or the device of every example, [N]; or a list of each one's examples.
        initial_std: standard deviation of the starts around `initial`, the same for all parameters.
        partition: iid or blocks, where `devices` is a number; key: seeds iid (jax.random.key(0) unless given).
        mu, L: strong convexity and smoothness of −log p(θ|D), where public values are known. Else they are estimated by
            the Hessian at `initial` and at a mode, which depends on the data: no promise of privacy covers that.
        batch: examples that each device draws for a round, all by default. Gradients are then noisier than the bound
            knows, and no privacy is claimed for an example not being drawn.
    """
    examples, count = checked_data(data)
    if initial is None:
        width = max([leaf.shape[-1] for leaf in jax.tree.leaves(examples) if leaf.ndim > 1], default=1)
        such = f"np.zeros({width}) or {{'weights': np.zeros({width}), 'intercept': 0.0}}"
        raise InputError(
            "initial", None, f"the parameters that chains start at, as log_prior takes them, such as {such}"
        )
    start, structure, shapes = checked_parameters(initial)
    model = checked_model(log_likelihood, log_prior, structure, shapes, examples)
    given = {"mu": mu, "L": L}
    for name, value in given.items():
        if value is not None and not (isinstance(value, int | float | np.number) and 0 < value < np.inf):
            raise InputError(name, value, "a number above 0 and finite")
    if mu is not None and L is not None and mu > L:
        raise InputError("mu", mu, f"at most L = {L:g}")
    if not 0 <= initial_std < np.inf:
        raise InputError("initial_std", initial_std, "finite and at least 0")
    if batch is not None and (not isinstance(batch, int | np.integer) or batch < 1):
        raise InputError("batch", batch, "a whole number of at least 1")
    _check_start(model, examples, start)
    key = jax.random.key(0) if key is None else key
    if not isinstance(key, jax.Array):
        raise InputError("key", key, "a key of JAX, such as jax.random.key(0)")
    parts = _parts(devices, count, partition, key)
    sizes = np.array([part.size for part in parts])
    # A device's first example fills it up: one of zeros might have no likelihood at all.
    places = np.stack([np.append(part, np.full(sizes.max() - part.size, part[0])) for part in parts])
    made = OwnPosterior(
        data=jax.tree.map(lambda values: values[places], examples),
        sizes=sizes,
        start=start,
        initial_std=float(initial_std),
        mu=np.nan if mu is None else float(mu),
        L=np.nan if L is None else float(L),
        model=model,
        sharing=len(parts),
        batch=None if batch is None else int(batch),
        estimated=tuple(name for name, value in given.items() if value is None),
    )
    return _with_estimates(made) if made.estimated else made


def _with_estimates(made: OwnPosterior) -> OwnPosterior:
    found = np.concatenate([made.eigenvalues(made.start), made.laplace[1]])
    if "mu" in made.estimated and not found.min() > 0:
        least = f"at the start or at the mode found, where the Hessian's least eigenvalue is {found.min():.3g}"
        raise InputError(
            "mu", None, f"a number above 0: none can be estimated, as the cost is not convex {least} (is a sign wrong?)"
        )
    if "L" in made.estimated and not np.all(np.isfinite(found)):
        raise InputError("L", None, "a number above 0: its estimate did not converge")
    done = replace(
        made,
        mu=float(found.min()) if "mu" in made.estimated else made.mu,
        L=float(np.abs(found).max()) if "L" in made.estimated else made.L,
    )
    vars(done)["laplace"] = made.laplace  # the same, and not found again
    return done


def _check_start(model: Model, examples: Any, start: Array) -> None:
    """Refuse a model that has no value or no gradient where chains begin."""
    theta, how_many = jnp.asarray(start, jnp.float32), len(jax.tree.leaves(examples)[0])
    costs, norms = look(model, examples, theta, min(how_many, max(1, EXAMPLES // (8 * model.dim))))
    value, gradient = jax.value_and_grad(model.prior_cost)(theta)
    instead = "finite at `initial`: start elsewhere, or mend it (log of 0? a root at 0? data that are nan?)"
    for what, values in (("value", costs), ("gradient", norms)):
        bad = np.flatnonzero(~np.isfinite(np.asarray(values)))
        if bad.size:
            raise InputError("log_likelihood", f"a {what} that is nan or infinite at example {bad[0]}", instead)
    if not np.isfinite(value) or not np.all(np.isfinite(np.asarray(gradient))):
        raise InputError("log_prior", "a value or gradient that is nan or infinite", instead)


def _parts(devices: Any, count: int, rule: str, key: jax.Array) -> list[NDArray[np.intp]]:
    """The examples of every device."""
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        if rule not in ("iid", "blocks"):
            raise InputError("partition", rule, "iid or blocks; or give the device of every example as `devices`")
        devices = split(rule, np.zeros(count), int(devices), host_generator(named(key, "data"), "partition"))
    if isinstance(devices, list | tuple) and devices and np.ndim(devices[0]) == 1:
        parts = [np.asarray(part) for part in devices]
        whole = np.concatenate(parts)
        if whole.dtype.kind not in "iu" or not np.array_equal(np.sort(whole), np.arange(count)):
            raise InputError("devices", f"a list of {len(parts)}", f"lists in which each of 0..{count - 1} is once")
    elif devices is None:
        raise InputError("devices", None, f"how many devices share the {count} examples, or the device of each of them")
    else:
        owner = np.asarray(devices)
        if owner.shape != (count,) or owner.dtype.kind not in "iu" or owner.min() < 0:
            raise InputError(
                "devices", devices, f"a number, the device of each of the {count} examples, or a list of examples each"
            )
        parts = [np.flatnonzero(owner == index) for index in range(int(owner.max()) + 1)]
    empty = [index for index, part in enumerate(parts) if part.size == 0]
    if empty:
        raise InputError("devices", f"no example for device {empty[0]}", "at least one example for every device")
    return parts
