"""NumPyro models as posteriors: the density of one example, the prior, and draws in the space of the sites.

The model runs on the data of one example at a time, with plates over examples cut down to one. That is the likelihood
of the example only where examples are independent given the parameters; so the sum over examples is compared with the
model on all data, site by site, and a model for which they differ is refused.
"""

import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from wflmc.errors import Found, InputError
from wflmc.posterior.custom import CustomPosterior, posterior_from
from wflmc.posterior.custom.geometry import NoModeError, in_float64
from wflmc.posterior.custom.model import INDEX, Sites

FEW = 64
"""Up to so many examples, latent variables of every example are kept as parameters without being asked to."""
COMBINATIONS = 256
"""Values of an example's discrete latent variables, all together, that are summed over."""
AGREES = 1e-6
"""Relative error to which a site's density on all data is the sum over examples, in float64."""
DECIDED = "depends on control flow by data or parameters"
TRACEABLE = "decided without looking at values: use jnp.where, or numpyro.handlers.mask, in place of if"
CUTS = ((True, False), (True, True), (False, False))
"""Ways to cut a model to one example: whether plates over examples are, and whole numbers equal to N as well."""


def from_numpyro(
    model: Any,
    data: Any,
    *,
    devices: int | ArrayLike | Sequence[ArrayLike],
    example_axis: int = 0,
    shared: Sequence[str] = (),
    keep: Sequence[str] = (),
    initial: Mapping[str, Any] | None = None,
    preconditioner: Any = "pilot",
    coords: Mapping[str, Any] | None = None,
    **options: Any,
) -> CustomPosterior:
    """Return the posterior of a NumPyro model whose observations are independent over examples given the parameters.

    Parameters are unconstrained inside, and log-Jacobians are counted; `posterior.unflatten(trace.theta)` and
    `trace.to_arviz(posterior)` have values by site, with deterministic sites that do not depend on the data.

    Args:
        model: a NumPyro model. Discrete latent variables of an example are summed over. Where it has no mode, its
            location-scale sites are written as location + scale * offset, as `LocScaleReparam(0)` does.
        data: a dictionary of the model's arguments by name, of which it takes those that it names; a tuple of its
            arguments; or its one argument. Arrays as long as the observations are the examples; all else, such as
            their number, every device knows.
        devices: how many; or the device of every example, [N]; or a list of each one's examples.
        example_axis: the axis of the arrays that counts the examples; the last one of arrays with fewer axes.
        shared: names of arrays that are as long, and that every device knows.
        keep: sites with a value for every example to be kept as parameters; up to 64 examples all are.
        initial: values of sites to search for a mode from, by name; else 0 in unconstrained space.
        preconditioner: as of `posterior_from`. By default pilot chains on the pooled data find mean and covariance,
            and no promise of privacy covers what these tell; the posterior of public data tells nothing.
        coords: labels along plates, by the plate's name, for ArviZ.
        options: those of `posterior_from`: mu, L, batch, partition, key.

    Raises:
        InputError: in one sentence that names the site, for a model that cannot be split over devices.
    """
    known = {"devices": devices, "preconditioner": preconditioner, **options}
    program = _cut(_read(model, data, example_axis, shared, initial or {}), keep)
    without_mode = []
    for written in (program, None):
        if written is None:  # a model without a mode may have one if it is written with offsets
            centred = [name for name in program.latent if _is_location_scale(program.full[name]["fn"])]
            written = _cut(_read(_with_offsets(model, centred), data, example_axis, shared, {}), keep)
        try:
            return written.posterior(coords, **known)
        except InputError as error:
            if (
                not isinstance(error.__cause__, NoModeError)
                or error.__cause__.best is None
                or preconditioner != "pilot"
            ):
                raise
            without_mode.append((error.__cause__.best, written, error))
    for best, written, _ in sorted(without_mode, key=lambda one: -one[0].elbo):
        with suppress(InputError):
            return written.posterior(coords, **known | {"preconditioner": best})
    raise without_mode[0][2]


def _with_offsets(model: Any, names: list[str]) -> Any:
    """Return the model with some sites written as location + scale * offset."""
    from numpyro import handlers
    from numpyro.infer.reparam import LocScaleReparam

    return wraps(model)(handlers.reparam(model, config={name: LocScaleReparam(0) for name in names}))


@dataclass
class _Program:
    """A model with its data; how it is cut to one example, and what its sites turned out to be."""

    model: Any
    arguments: dict[str, Any]
    """By name; each a pytree."""
    axes: dict[str, int]
    """Of the leaves that are examples, by path: the axis that counts them."""
    count: int = 0
    """N."""
    full: dict[str, Any] = field(default_factory=dict)
    """The sites on all data, at the start."""
    start: dict[str, Any] = field(default_factory=dict)
    """Unconstrained values of the latent sites."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the log-densities on all data, by site."""
    supports: dict[str, Any] = field(default_factory=dict)
    """Values of discrete latent sites."""
    cut_plates: bool = True
    cut_counts: bool = False
    of_example: tuple[str, ...] = ()
    """Sites that depend on the example."""
    local: frozenset[str] = frozenset()
    """Latent sites with a value for every example."""
    _cut_now: set[str] = field(default_factory=set)
    """Plates that were cut in the last run."""

    @property
    def examples(self) -> dict[str, Any]:
        """The data of examples by path, [N, ...]."""
        leaves = _leaves(self.arguments)
        arrays = {path: np.moveaxis(np.asarray(leaves[path]), axis, 0) for path, axis in self.axes.items()}
        return {path: a.astype(np.int32) if a.dtype.kind in "iu" else a for path, a in arrays.items()}

    @property
    def latent(self) -> list[str]:
        """Names of the sites that are parameters."""
        return [name for name, site in self.full.items() if _is_latent(site) and not _is_discrete(site)]

    @property
    def discrete(self) -> list[str]:
        """Names of the sites that are summed over."""
        return [name for name, site in self.full.items() if _is_latent(site) and _is_discrete(site)]

    @property
    def observed(self) -> dict[str, Any]:
        """What was observed, by site, [N, ...]."""
        found = {
            name: np.asarray(self.full[name]["value"]) for name in self.of_example if _is_observed(self.full[name])
        }
        where = {name: values.shape.index(self.count) for name, values in found.items() if self.count in values.shape}
        return {name: np.moveaxis(found[name], axis, 0) for name, axis in where.items()}

    @property
    def dims(self) -> dict[str, list[str]]:
        """Names of the axes of every site: of its plates, where there are some."""
        found = {}
        for name, site in self.full.items():
            if site["type"] in ("sample", "deterministic"):
                shape, event = np.shape(site["value"]), len(getattr(site.get("fn"), "event_shape", ()))
                axes = [f"{name}_dim_{axis}" for axis in range(len(shape))]
                for frame in site.get("cond_indep_stack", ()):
                    if len(shape) >= event - frame.dim and shape[frame.dim - event] == frame.size:
                        axes[frame.dim - event] = frame.name
                found[name] = axes
        return found

    def posterior(self, coords: Mapping[str, Any] | None, **options: Any) -> CustomPosterior:
        """Return the posterior of the model as it is cut."""
        scales = [
            name for name in self.latent if np.all(np.asarray(_bijection(self.full[name])(-self.start[name] - 50)) >= 0)
        ]
        sites = Sites(self.values, self.simulate, self.dims, dict(coords or {}), self.observed, scales, self.together())
        examples = self.examples | {INDEX: np.arange(self.count, dtype=np.int32)}
        made = {"initial": self.start, "sites": sites, **options}
        return posterior_from(self.log_likelihood, self.log_prior, examples, **made)

    def run(self, arguments: Any, value_of: Any, cut: int = 0) -> dict[str, Any]:
        """Return the sites of a run with latent values by `value_of(site)`, plates of N cut down to `cut` or not."""
        from numpyro import handlers

        def substitute(site: Any) -> Any:
            if site["type"] == "plate":
                size = site["args"][0]
                if cut and size == self.count:
                    self._cut_now.add(site["name"])
                    size = cut
                return jnp.arange(size)
            if _is_latent(site) and self.full and site["name"] not in self.full:
                raise InputError(f"site {site['name']}", Found(DECIDED), TRACEABLE)
            return value_of(site) if _is_latent(site) else None

        self._cut_now = set()
        seeded = handlers.seed(handlers.substitute(self.model, substitute_fn=substitute), rng_seed=0)
        return dict(handlers.trace(seeded).get_trace(**arguments))

    def with_examples(self, examples: Any, rows: int) -> Any:
        """Return the model's arguments with some examples, [rows, ...] by path, in place of all."""

        def leaf(path: Any, value: Any) -> Any:
            name = _name(path)
            if name in self.axes:
                return jnp.moveaxis(examples[name], 0, self.axes[name])
            whole = self.cut_counts and isinstance(value, int | np.integer) and value == self.count
            return rows if whole else value

        return jax.tree_util.tree_map_with_path(leaf, self.arguments)

    def with_example(self, example: Any, rows: int = 1) -> Any:
        """Return the model's arguments with one example, repeated, in place of all."""
        repeated = jax.tree.map(lambda value: jnp.broadcast_to(value, (rows, *np.shape(value))), example)
        return self.with_examples(repeated, rows)

    def log_likelihoods(self, parameters: Any, examples: Any) -> Any:
        """Return log p(example|θ) of some examples at once, [rows], of a model without local variables."""
        rows = examples[INDEX].shape[0]
        made = self.run(
            self.with_examples(examples, rows), lambda site: _bijection(site)(parameters[site["name"]]), rows
        )
        total = jnp.zeros(rows)
        for name in self.of_example:
            if name in self.shapes:
                cut = sum(frame.name in self._cut_now for frame in made[name]["cond_indep_stack"])
                value = jnp.moveaxis(_log_density(made[name]), self.shapes[name].index(self.count), 0)
                total = total + value.reshape(rows, -1).sum(1) * (rows / self.count) ** cut
        return total

    def together(self) -> Any:
        """Return `log_likelihoods` where it is the same as examples one by one, which take longer; else None."""
        some = {name: jnp.asarray(values[:2]) for name, values in self.examples.items()}
        some[INDEX] = jnp.arange(2)
        try:
            one_by_one = jax.vmap(self.log_likelihood, (None, 0))(self.start, some)
            same = np.allclose(self.log_likelihoods(self.start, some), one_by_one, rtol=1e-4)
        except Exception:  # a model that takes one example, or all
            return None
        return self.log_likelihoods if same and not self.local and not self.discrete else None

    def sites_of(self, parameters: Any, example: Any, chosen: Any) -> dict[str, Any]:
        """Return the sites of one example; `chosen` are values of discrete ones by name."""

        def value_of(site: Any) -> Any:
            name = site["name"]
            wanted, whole = site["fn"].shape(), np.shape(self.full[name]["value"])
            if name in chosen:
                return jnp.broadcast_to(chosen[name], wanted)
            value = parameters[name]
            for axis, (now, before) in enumerate(zip(wanted, whole, strict=True)):
                if now != before:
                    value = jax.lax.dynamic_slice_in_dim(value, example[INDEX], 1, axis)
            return _bijection(site)(value)

        return self.run(self.with_example(example), value_of, int(self.cut_plates))

    def densities(self, parameters: Any, example: Any, chosen: Any) -> dict[str, Any]:
        """Return one example's part of the log-density of every site, a number each."""
        made = self.sites_of(parameters, example, chosen)
        return {name: self._own(name, site, example[INDEX]) for name, site in made.items() if site["type"] == "sample"}

    def _own(self, name: str, site: Any, index: Any) -> Any:
        """Return what one example has of a site's log-density: all of it; its own, where it is of all examples."""
        value, whole = _log_density(site), self.shapes[name]
        # By which NumPyro makes up for plates that were cut.
        value = value / self.count ** sum(frame.name in self._cut_now for frame in site["cond_indep_stack"])
        if np.shape(value) == whole and self.count in whole and self.count > 1:
            value = jnp.take(value, index, axis=whole.index(self.count))
        return jnp.sum(value)

    def log_likelihood(self, parameters: Any, example: Any) -> Any:
        """Return log p(example|θ), summed over its discrete latent variables."""
        names = (*self.of_example, *self.discrete)

        def given(chosen: Any) -> Any:
            made = self.densities(parameters, example, chosen)
            return sum(made[name] for name in names if name in made)

        if not self.discrete:
            return given({})
        values = np.array(list(product(*map(self.supports.__getitem__, self.discrete))))
        return jax.nn.logsumexp(jax.vmap(given)(dict(zip(self.discrete, jnp.asarray(values.T), strict=True))))

    def without_example(self, parameters: Any) -> tuple[dict[str, Any], Any]:
        """Return the sites on data that do not matter, and the log-Jacobians of all parameters."""
        jacobian: Any = 0.0

        def value_of(site: Any) -> Any:
            nonlocal jacobian
            if site["name"] in self.discrete:
                return jnp.broadcast_to(self.supports[site["name"]][0], site["fn"].shape())
            value, bijection = parameters[site["name"]], _bijection(site)
            made = bijection(value)
            jacobian = jacobian + jnp.sum(bijection.log_abs_det_jacobian(value, made))
            return made

        rows = self.count if self.local else 1
        first = {path: jnp.asarray(values[0]) for path, values in self.examples.items()}
        return self.run(self.with_example(first, rows), value_of, int(not self.local and self.cut_plates)), jacobian

    def log_prior(self, parameters: Any) -> Any:
        """Return the log-density of all that is not an example's, log-Jacobians included."""
        sites, jacobian = self.without_example(parameters)
        held = [name for name in sites if name not in (*self.of_example, *self.discrete)]
        return jacobian + sum(jnp.sum(_log_density(sites[name])) for name in held if sites[name]["type"] == "sample")

    def values(self, parameters: Any) -> dict[str, Any]:
        """Return the values of latent sites, and of deterministic ones that do not depend on the data."""
        sites, _ = self.without_example(parameters)
        kinds = {name: site["type"] for name, site in sites.items() if name not in self.of_example}
        return {
            name: sites[name]["value"] for name, kind in kinds.items() if kind == "deterministic" or name in self.latent
        }

    def simulate(self, key: Any, values: Any, example: Any) -> dict[str, Any]:
        """Draw the observed sites of one example by NumPyro's Predictive, given values by site."""
        from numpyro import handlers
        from numpyro.infer import Predictive

        held = {}
        for name in self.latent:
            axis = np.shape(values[name]).index(self.count) if name in self.local else None
            index, value = example[INDEX], values[name]
            held[name] = value if axis is None else jax.lax.dynamic_slice_in_dim(value, index, 1, axis)

        def one(*unused: Any) -> Any:
            return self.model(**self.with_example(example))

        def plates(site: Any) -> Any:
            return jnp.arange(1) if site["type"] == "plate" and site["args"][0] == self.count else None

        drawn = [*self.observed]
        cut = handlers.substitute(handlers.uncondition(one), substitute_fn=plates)
        made = Predictive(cut, held, return_sites=drawn, batch_ndims=0)(key)
        return {name: jnp.reshape(made[name], self.observed[name].shape[1:]) for name in drawn}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by path."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _is_latent(site: Any) -> bool:
    return bool(site["type"] == "sample" and not site["is_observed"])


def _is_observed(site: Any) -> bool:
    return bool(site["type"] == "sample" and site["is_observed"] and np.size(site["value"]))


def _is_discrete(site: Any) -> bool:
    return bool(site["fn"].support.is_discrete)


def _is_location_scale(fn: Any) -> bool:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return hasattr(fn, "loc") and hasattr(fn, "scale") and "Real" in type(fn.support).__name__


def _bijection(site: Any) -> Any:
    from numpyro.distributions import biject_to

    return biject_to(site["fn"].support)


def _log_density(site: Any) -> Any:
    """Return a site's log-density, element by element."""
    value = site["fn"].log_prob(site["value"])
    return value if site["scale"] is None else site["scale"] * value


def _read(model: Any, data: Any, axis: int, shared: Sequence[str], initial: Any) -> _Program:
    """Return the model with its data and its sites on all of them, at the start."""
    arguments = _arguments(inspect.signature(model), data)
    program = _Program(model, arguments, {})

    def value_of(site: Any) -> Any:
        name, fn = site["name"], site["fn"]
        if fn.support.is_discrete:
            if not fn.has_enumerate_support:
                raise InputError(f"site {name}", Found("is discrete without end"), "continuous, or summed over by hand")
            program.supports[name] = np.asarray(fn.enumerate_support(expand=False), dtype=np.int32).ravel()
            return jnp.broadcast_to(program.supports[name][0], fn.shape())
        bijection = _bijection(site)
        shape = bijection.inverse_shape(fn.shape())
        value = bijection.inv(jnp.asarray(initial[name], float)) if name in initial else jnp.zeros(shape)
        program.start[name] = np.asarray(jnp.broadcast_to(value, shape))
        return bijection(program.start[name])

    with in_float64(), _naming_site(program):
        program.full = program.run(arguments, value_of)
        held = {name: site for name, site in program.full.items() if site["type"] == "sample"}
        program.shapes = {name: np.shape(_log_density(site)) for name, site in held.items()}
    lengths = {
        path: np.shape(leaf)[min(axis, np.ndim(leaf) - 1)]
        for path, leaf in _leaves(arguments).items()
        if np.ndim(leaf) and path.split(".")[0] not in shared
    }
    outcomes = [np.shape(site["value"]) for site in program.full.values() if _is_observed(site)]
    sizes = [shape[min(axis, len(shape) - 1)] for shape in outcomes if shape] + [*lengths.values()]
    program.count = next((size for size in sizes if size in lengths.values()), 0)
    if not program.count or not any(s["type"] == "sample" and s["is_observed"] for s in program.full.values()):
        raise InputError("model", Found("observes no array of the data"), "a NumPyro model with obs=… of the data")
    places = {path: min(axis, np.ndim(leaf) - 1) for path, leaf in _leaves(arguments).items() if np.ndim(leaf)}
    program.axes = {path: places[path] for path, length in lengths.items() if length == program.count}
    return program


def _arguments(signature: inspect.Signature, data: Any) -> dict[str, Any]:
    """Return the data as the model's arguments by name."""
    names = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
    if isinstance(data, Mapping) and set(names) & set(data):
        given = {name: value for name, value in data.items() if name in names or len(names) < len(signature.parameters)}
    else:
        given = dict(zip(names, data if isinstance(data, tuple) else (data,), strict=False))

    def is_list(value: Any) -> bool:
        return isinstance(value, list)

    return {
        name: jax.tree.map(lambda v: np.asarray(v) if is_list(v) else v, value, is_leaf=is_list)
        for name, value in given.items()
    }


@contextmanager
def _naming_site(program: _Program) -> Iterator[None]:
    """Let an error of a model name the site, or the plate, that it was at."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever a person's model may raise
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
            seen = [name for f in frames for name in getattr(f.f_locals.get("self"), "trace", ())]
            place = next((name for name in program.full if name not in seen), "")
            raise InputError(f"site {place}", Found(DECIDED), TRACEABLE) from error
        at = [f.f_locals.get("name") for f in frames if f.f_globals.get("__name__") == "numpyro.primitives"]
        said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:160].rstrip(".: ")
        wanted = "of a shape that fits its plates: is a plate over the wrong axis?"
        raise InputError(f"site {next(filter(None, at), '')}", Found(f"fails: {said}"), wanted) from error


def _cut(program: _Program, keep: Sequence[str]) -> _Program:
    """Find how the model is cut to one example, such that the sum over examples is the model on all data."""
    trouble: InputError | None = None
    for program.cut_plates, program.cut_counts in CUTS:
        try:
            with in_float64(), _naming_site(program):
                _check(program, keep)
            return program
        except InputError as error:
            if error.key.startswith("model"):
                raise
            trouble = trouble or error
    assert trouble is not None
    raise trouble


def _check(program: _Program, keep: Sequence[str]) -> None:
    """Refuse a model whose examples are not independent, or that has no finite density and gradient at the start."""
    generator, count = np.random.default_rng(0), program.count
    near = {name: value + 0.1 * generator.standard_normal(np.shape(value)) for name, value in program.start.items()}
    examples = program.examples | {INDEX: np.arange(count, dtype=np.int32)}
    whole = program.run(program.arguments, lambda site: _value_near(program, site, near))
    chosen = {name: whole[name]["value"] for name in program.discrete}

    def all_sites(parameters: Any, example: Any) -> Any:
        index = example[INDEX]
        some = {name: value if count not in np.shape(value) else value[index] for name, value in chosen.items()}
        made = program.sites_of(parameters, example, some)
        return {
            name: site["value"] if site["type"] == "deterministic" else program._own(name, site, index)
            for name, site in made.items()
            if site["type"] in ("sample", "deterministic")
        }

    one = jax.tree.map(lambda values: values[0], examples)
    program.of_example = _depending(all_sites, near, one)
    _check_local(program, keep)
    for name in program.of_example:
        plates = {frame.name: frame.size for frame in program.full[name].get("cond_indep_stack", ())}
        if plates and count not in plates.values() and program.full[name]["type"] == "sample":
            plate, size = next(iter(plates.items()))
            wanted = f"in a plate over its {count} examples, along example_axis"
            raise InputError(f"site {name}", Found(f"is in plate {plate} of {size}"), wanted)
    each = jax.jit(jax.vmap(all_sites, (None, 0)))(near, examples)
    for name in program.of_example:
        if program.full[name]["type"] == "sample":
            total, at_once = float(np.sum(each[name])), float(jnp.sum(_log_density(whole[name])))
            if not np.isfinite(at_once):
                raise InputError(f"site {name}", Found("has no finite density at the start"), "finite: give initial=…")
            if abs(total - at_once) > AGREES * (np.sum(np.abs(each[name])) + 1):
                allowed = "independent over examples given the parameters: name what all devices know in shared=…"
                raise InputError(f"site {name}", Found("depends on more than its own example"), allowed)
    _check_gradients(program, examples)


def _value_near(program: _Program, site: Any, near: Any) -> Any:
    name = site["name"]
    return program.full[name]["value"] if name in program.discrete else _bijection(site)(near[name])


def _depending(function: Any, parameters: Any, example: Any) -> tuple[str, ...]:
    """Return the names of the results that the example's data, but for its number, change."""
    shapes = jax.eval_shape(function, parameters, example)
    traced = jax.make_jaxpr(function)(parameters, example).jaxpr
    first = len(jax.tree.leaves(parameters))
    data = [name != INDEX for name in _leaves(example)]
    marked = {id(variable) for variable, is_data in zip(traced.invars[first:], data, strict=True) if is_data}
    for equation in traced.eqns:
        if any(id(value) in marked for value in equation.invars):
            marked |= {id(value) for value in equation.outvars}
    return tuple(name for name, out in zip(sorted(shapes), traced.outvars, strict=True) if id(out) in marked)


def _check_local(program: _Program, keep: Sequence[str]) -> None:
    """Say which latent sites have a value for every example; refuse those that would grow with the data."""
    count = program.count
    plates = {
        name: {f.size for f in program.full[name]["cond_indep_stack"]}
        for name in program.full
        if _is_latent(program.full[name])
    }
    program.local = frozenset(name for name in program.latent if count in plates[name])
    for name in sorted(program.local - set(keep)):
        if count > FEW:
            wanted = f"a variable of all examples, summed over by hand, or named in keep=… to be {count} parameters"
            raise InputError(f"site {name}", Found("has a value for every example, and grows with the data"), wanted)
    for name in program.discrete:
        if count not in plates[name]:
            wanted = "in the plate over examples, where it is summed over; others have to be summed over by hand"
            raise InputError(f"site {name}", Found("is discrete and of all examples"), wanted)
    if np.prod([program.supports[name].size for name in program.discrete], initial=1.0) > COMBINATIONS:
        name = program.discrete[0]
        raise InputError(
            f"site {name}", Found("has too many values"), f"at most {COMBINATIONS}, all discrete sites together"
        )


def _check_gradients(program: _Program, examples: Any) -> None:
    """Refuse a model without finite gradients at the start, by the first site without one."""

    def totals(parameters: Any) -> Any:
        some = {name: program.supports[name][0] for name in program.discrete}
        each = jax.vmap(lambda one: program.densities(parameters, one, some))(examples)
        return {name: jnp.sum(values) for name, values in each.items()}

    for name, slopes in jax.jit(jax.jacfwd(totals))(jax.tree.map(jnp.asarray, program.start)).items():
        for of, slope in slopes.items():
            if not np.all(np.isfinite(slope)):
                wanted = "finite where the search begins (a root or a log of 0?): mend it, or give initial=…"
                raise InputError(
                    f"site {name}", Found(f"has a gradient with respect to {of} that is nan or infinite"), wanted
                )
