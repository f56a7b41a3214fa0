"""Any JAX model: a log-likelihood of one example, a log-prior, and data spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import Found, InputError
from wflmc.keys import check_key
from wflmc.posterior.own_checks import checked_arrays, checked_parameters
from wflmc.posterior.own_devices import parts_of
from wflmc.posterior.own_model import Model, checked_model, look
from wflmc.posterior.own_posterior import EXAMPLES, OwnPosterior

Array = NDArray[np.float64]


def posterior(
    log_likelihood: Callable[[Any, Any], Any],
    log_prior: Callable[[Any], Any],
    data: Any = None,
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
        batch: examples that each device draws for a round, all by default and where no device has more. Gradients are
            then noisier than the bound knows, and no privacy is claimed for an example not being drawn.
    """
    if key is not None:
        check_key(key)
    if data is None:
        instead = "posterior(log_likelihood, log_prior, data, initial=…, devices=…)"
        missing = "log_prior" if not callable(log_prior) else "data"
        raise InputError(missing, Found("is missing"), f"given, as in {instead}")
    examples, count = checked_arrays("data", data)
    if initial is None:
        width = max([leaf.shape[-1] for leaf in jax.tree.leaves(examples) if leaf.ndim > 1], default=1)
        such = f"np.zeros({width}) or {{'weights': np.zeros({width}), 'intercept': 0.0}}"
        wanted = f"the parameters that chains start at, as log_prior takes them, such as {such}"
        raise InputError("initial", Found("was not given"), wanted)
    start, structure, shapes = checked_parameters(initial)
    model = checked_model(log_likelihood, log_prior, structure, shapes, examples)
    given = {"mu": mu, "L": L}
    for name, value in given.items():
        if value is not None and not (_is_number(value) and 0 < value < np.inf):
            raise InputError(name, value, "a number above 0 and finite")
    if mu is not None and L is not None and mu > L:
        raise InputError("mu", mu, f"at most L = {L:g}")
    if not (_is_number(initial_std) and 0 <= initial_std < np.inf):
        raise InputError("initial_std", initial_std, "a number, finite and at least 0")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int | np.integer) or batch < 1):
        raise InputError("batch", batch, "a whole number of at least 1")
    _check_start(model, examples, start)
    parts = parts_of(devices, count, partition, jax.random.key(0) if key is None else key)
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
        batch=None if batch is None or batch >= sizes.max() else int(batch),
        estimated=tuple(name for name, value in given.items() if value is None),
    )
    return _with_estimates(made) if made.estimated else made


def _is_number(value: Any) -> bool:
    """Whether it is one real number, and no truth value."""
    kinds = isinstance(value, int | float | np.number | jax.Array | np.ndarray) and not isinstance(value, bool)
    return kinds and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"


def _with_estimates(made: OwnPosterior) -> OwnPosterior:
    """The same with mu and L by the Hessian at the start and at a mode; mu by the mode's alone where need be."""
    at_start, at_mode = made.eigenvalues(made.start), made.laplace[1]
    found, estimated = np.concatenate([at_start, at_mode]), made.estimated
    if not np.all(np.isfinite(found)):
        wanted = "a number above 0: no estimate was found, as eigenvalues of the Hessian did not converge"
        raise InputError(estimated[0], Found("was not given"), wanted)
    mu, L = made.mu, made.L
    if "mu" in estimated:
        if at_mode.min() <= 0:
            least = f"least eigenvalue {at_mode.min():.3g} at the mode found and {at_start.min():.3g} at `initial`"
            wanted = f"a number above 0: none can be estimated, as the cost is not convex ({least}); is a sign wrong?"
            raise InputError("mu", Found("was not given"), wanted)
        mu = float(found.min() if at_start.min() > 0 else at_mode.min())
        if at_start.min() <= 0:
            alone = f"mu (at the mode alone: at the start the least eigenvalue is {at_start.min():.3g}, not convex)"
            estimated = (alone, *estimated[1:])
    if "L" in estimated:
        L = float(np.abs(found).max())
        # float32 may put the L of a model with mu = L a little below a mu that is known.
        L = mu if L < mu <= L * (1 + 1e-3) else L
    if mu > L and "L" in estimated:
        raise InputError("mu", mu, f"at most L, which is estimated as {L:.6g}")
    if mu > L * (1 + 1e-3):
        raise InputError("L", L, f"at least mu, which is estimated as {mu:.6g}")
    done = replace(made, mu=min(mu, L), L=L, estimated=estimated)
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
            raise InputError(
                "log_likelihood", Found(f"has a {what} that is nan or infinite at example {bad[0]}"), instead
            )
    if not np.isfinite(value) or not np.all(np.isfinite(np.asarray(gradient))):
        raise InputError("log_prior", Found("has a value or gradient that is nan or infinite"), instead)
