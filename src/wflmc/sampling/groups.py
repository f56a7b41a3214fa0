"""A trace as xarray data sets by group, in ArviZ's schema."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError
from wflmc.keys import host_generator
from wflmc.posterior.own_checks import shape_of
from wflmc.storage import replacing, reserve
from wflmc.version import __version__

if TYPE_CHECKING:
    from wflmc.planning import Plan
    from wflmc.sampling.trace import Trace

DRAWN = ("chain", "draw")
TAKEN = (*DRAWN, "observation", "device")
"""Names of axes, which no variable can have."""

Predictive = bool | Callable[[Any, Any, Any], Any]


def groups(
    trace: Trace, attributes: dict[str, Any] | None, posterior: Any, predictive: Predictive, features: Any
) -> dict[str, Any]:
    """The data sets by the names of their groups; arguments as of `Trace.to_arviz`."""
    plan, burn_in = trace.plan, trace.plan.burn_in
    made = {
        "posterior": _variables(trace.theta, posterior),
        "sample_stats": _statistics(trace, trace.clip_rate, slice(burn_in, None)),
    }
    if trace.velocity is not None:
        last = {"last_velocity": (("chain", "parameter"), trace.velocity)}
        made["sample_stats"] = made["sample_stats"].assign(last).assign_coords(parameter=np.arange(plan.dim))
    if trace.warmup is not None:
        made["warmup_posterior"] = _variables(trace.warmup, posterior)
    if trace.warmup_clip_rate is not None:
        made["warmup_sample_stats"] = _statistics(trace, trace.warmup_clip_rate, slice(burn_in))
    if posterior is not None:
        made |= _outcomes(trace, posterior, predictive, features)
    elif predictive or features is not None:
        raise InputError("posterior", None, "given, for what it predicts")
    about: dict[str, Any] = {"inference_library": "wflmc", "inference_library_version": __version__}
    about |= {"plan": _in_short(plan)} | ({} if trace.key is None else {"key": list(trace.key)})
    return {name: group.assign_attrs({**about, **(attributes or {})}) for name, group in made.items()}


def _in_short(plan: Plan) -> str:
    """What a plan is about, as JSON; numbers of each device or round as a list where they differ."""

    def one(values: Any) -> Any:
        found = np.unique(values)
        return float(found[0]) if found.size == 1 else np.asarray(values).tolist()

    facts = {
        "devices": plan.devices,
        "rounds": plan.rounds,
        "burn_in": plan.burn_in,
        "dynamics": plan.dynamics,
        "step_size": one(plan.step_size),
        "epsilon_spent": plan.epsilon_spent,
    }
    if plan.clips:
        facts["clip"] = one(plan.clip)
    return json.dumps(facts)


def _variables(theta: NDArray[Any], posterior: Any) -> Any:
    """The parameters of theta[chain, draw, m]: by their names where a model of one's own has named them."""
    import xarray as xr

    chains, draws, dim = theta.shape
    coords: dict[str, Any] = {"chain": np.arange(chains), "draw": np.arange(draws)}
    if posterior is not None and hasattr(posterior, "unflatten") and posterior.dim == dim:
        return xr.Dataset(_named(posterior.unflatten(theta), DRAWN, "theta"), coords=coords)
    return xr.Dataset({"theta": ((*DRAWN, "parameter"), theta)}, coords={**coords, "parameter": np.arange(dim)})


def _named(tree: Any, leading: tuple[str, ...], alone: str) -> dict[str, Any]:
    """The leaves of a tree by name, with their axes' names; one that is no tree is called `alone`.

    A leaf called as an axis, such as chain, becomes chain_.
    """
    made: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or alone
        while name in TAKEN or name in made:
            name += "_"
        axes = [f"{name}_dim_{axis}" for axis in range(np.ndim(leaf) - len(leading))]
        made[name] = ((*leading, *axes), np.asarray(leaf))
    return made


def _statistics(trace: Trace, clip_rate: NDArray[Any], rounds: slice) -> Any:
    """What is known of rounds, the same for all chains where they share a plan."""
    import xarray as xr

    plans, shape = trace.plans, clip_rate.shape
    per_round: dict[str, list[NDArray[Any]]] = {
        "gain": [p.gain[rounds] for p in plans],
        "active_devices": [p.active_devices[rounds] for p in plans],
        "excess_noise": [p.excess_noise[rounds] for p in plans],
    }
    if all(p.clips for p in plans):
        per_round["loss"] = [p.loss.max(-1)[rounds] for p in plans]
    stats = {name: (DRAWN, np.broadcast_to(np.stack(rows), shape)) for name, rows in per_round.items()}
    coords = {name: np.arange(size) for name, size in zip(DRAWN, shape, strict=True)}
    return xr.Dataset({"clip_rate": (DRAWN, clip_rate), **stats}, coords=coords)


def _outcomes(trace: Trace, posterior: Any, predictive: Predictive, features: Any) -> dict[str, Any]:
    """The groups of what was observed, and of what the model draws for every sample: the same draws every time."""
    import xarray as xr

    if not hasattr(posterior, "observed") or posterior.dim != trace.theta.shape[-1]:
        raise InputError("posterior", type(posterior).__name__, "the model of these samples, for what it predicts")
    y, device = posterior.observed
    held = {"observation": np.arange(device.size), "device": ("observation", device)}
    made = {"observed_data": xr.Dataset(_named(y, ("observation",), "y"), coords=held)}
    draws = dict(zip(DRAWN, map(np.arange, trace.theta.shape), strict=False))
    drawn = _drawn_by_function if callable(predictive) else _drawn_by_model

    def predicted(group: str, rows: Any, coords: dict[str, Any] | None = None) -> Any:
        outcomes = drawn(trace, posterior, predictive, group, rows)
        numbered = {"observation": np.arange(jax.tree.leaves(outcomes)[0].shape[2])}
        return xr.Dataset(_named(outcomes, (*DRAWN, "observation"), "y"), coords={**draws, **(coords or numbered)})

    if predictive:
        made["posterior_predictive"] = predicted("posterior_predictive", None, held)
    if features is not None:
        made["predictions"] = predicted("predictions", features)
    return made


def _drawn_by_model(trace: Trace, posterior: Any, predictive: Predictive, group: str, rows: Any) -> Any:
    if not hasattr(posterior, "simulate"):
        allowed = "a function of (key, parameters, example) that draws what this model would observe"
        raise InputError("predictive", predictive, allowed)
    generator = host_generator(jax.random.key(0), group)
    return np.stack([posterior.simulate(generator, theta, rows) for theta in trace.theta])


def _drawn_by_function(trace: Trace, posterior: Any, predictive: Any, group: str, rows: Any) -> Any:
    if not hasattr(posterior, "unflatten"):
        raise InputError("predictive", "a function", "True or False: this model draws by itself")
    examples = jax.tree.map(jnp.asarray, posterior.observed[0] if rows is None else rows)
    count = len(jax.tree.leaves(examples)[0])
    first = posterior.unflatten(jnp.asarray(trace.theta[0, 0])), jax.tree.map(lambda values: values[0], examples)
    wanted = "a JAX function of (key, parameters, example) that draws what this model would observe"
    shape_of("predictive", predictive, wanted, predictive, jax.random.key(0), *first)

    def at(key: jax.Array, theta: jax.Array) -> Any:
        parameters = posterior.unflatten(theta)
        return jax.vmap(lambda k, example: predictive(k, parameters, example))(jax.random.split(key, count), examples)

    theta = jnp.asarray(trace.theta)
    key = jax.random.fold_in(jax.random.key(0), int(group == "predictions"))
    return jax.lax.map(lambda pair: jax.vmap(at)(*pair), (jax.random.split(key, theta.shape[:2]), theta))


def write_groups(path: str | Path, made: dict[str, Any]) -> None:
    """Write data sets by group as NetCDF, whole or not at all, with one chain at a time in memory.

    HDF5 crashes when the disk is full. So the file without its numbers is made in memory, and the room for all of them
    is reserved before HDF5 writes the first.
    """
    import h5netcdf
    import h5py  # type: ignore[import-untyped]

    empty = io.BytesIO()
    with h5netcdf.File(empty, "w") as file:
        for name, group in made.items():
            place = file.create_group(name)
            place.attrs.update(group.attrs)
            place.dimensions = dict(group.sizes)
            for variable, content in group.variables.items():
                place.create_variable(variable, content.dims, content.dtype)
    variables = [(f"{name}/{v}", content) for name, group in made.items() for v, content in group.variables.items()]
    room = sum(content.nbytes + 2048 for _, content in variables)  # and where HDF5 leaves gaps
    with replacing(path) as target:
        target.write(empty.getbuffer())
        target.flush()
        reserve(target, target.tell() + room)
        with h5py.File(target.name, "r+") as file:
            for name, content in variables:
                place, values = file[name], content.values
                for rows in range(len(values)) if values.ndim > 1 else [...]:
                    place[rows] = values[rows]
