"""NumPyro models as posteriors: the density of one example, the prior, and draws in the space of the sites.

The model runs on the data of one example, with plates over examples cut down to one. That is the likelihood of the
example only where examples are independent given the parameters; so the sum over examples is compared with the model on
all data, site by site, and a model for which they differ is refused.
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
        shared: names of arrays that happen to be as long, and that every device knows whole.
        keep: sites with a value for every example to be kept as parameters; up to 64 examples all are.
        initial: values of sites to search for a mode from, by name; else 0 in unconstrained space.
        preconditioner: as of `posterior_from`. By default pilot chains on the pooled data find mean and covariance,
            and no promise of privacy covers what these tell; the posterior of public data tells nothing.
        coords: labels along plates, by the plate's name, for ArviZ.
        options: those of `posterior_from`: mu, L, batch, partition, key.

    Raises:
        InputError: in one sentence that names the site, for a model that cannot be split over devices.
    """
    reading = {"data": data, "axis": example_axis, "shared": shared, "keep": keep}
    made = {"coords": coords, "devices": devices, "preconditioner": preconditioner, **options}
    program = _read(model, initial=initial or {}, **reading)
    try:
        return program.posterior(**made)
    except InputError as error:  # a model without a mode may have one if it is written with offsets
        centred = [name for name in program.start if _is_location_scale(program.full[name]["fn"])]
        if not isinstance(error.__cause__, NoModeError) or not centred:
            raise
        with suppress(InputError):
            return _read(_with_offsets(model, centred), initial={}, **reading).posterior(**made)
        raise


def _library() -> Any:
    """Return NumPyro, which is imported when a model needs it."""
    import numpyro

    return numpyro


def _with_offsets(model: Any, names: list[str]) -> Any:
    """Return the model with some sites written as location + scale * offset."""
    config = {name: _library().infer.reparam.LocScaleReparam(0) for name in names}
    return wraps(model)(_library().handlers.reparam(model, config=config))


def _is_location_scale(fn: Any) -> bool:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return hasattr(fn, "loc") and hasattr(fn, "scale") and "Real" in type(fn.support).__name__


@dataclass
class _Program:
    """A model with its data; how it is cut to some examples, and what its sites turned out to be."""

    model: Any
    arguments: dict[str, Any]
    """By name; each a pytree."""
    axes: dict[str, int] = field(default_factory=dict)
    """Of the leaves that are examples, by path: the axis that counts them."""
    count: int = 0
    """N. Plates of this size, and whole numbers among the arguments, are cut as examples are."""
    full: dict[str, Any] = field(default_factory=dict)
    """The sites on all data, at the start."""
    start: dict[str, Any] = field(default_factory=dict)
    """Unconstrained values of the latent sites that are parameters."""
    supports: dict[str, Any] = field(default_factory=dict)
    """Values of the discrete latent sites, which are summed over."""
    likelihood: dict[str, Any] = field(default_factory=dict)
    """Sample sites of the example: the axis of their log-densities that counts examples, if there is one."""
    of_example: tuple[str, ...] = ()
    """Sites that depend on the example, or are summed over."""

    @property
    def examples(self) -> dict[str, Any]:
        """The data of examples by path, [N, ...], and their numbers."""
        leaves = _leaves(self.arguments)
        arrays = {path: np.moveaxis(np.asarray(leaves[path]), axis, 0) for path, axis in self.axes.items()}
        return arrays | {INDEX: np.arange(self.count, dtype=np.int32)}

    @property
    def local(self) -> dict[str, int]:
        """Latent sites with a value for every example, and the axis that counts these."""
        shapes = {name: np.shape(self.full[name]["value"]) for name in self.start if self.is_cut(name)}
        return {name: shape.index(self.count) for name, shape in shapes.items()}

    @property
    def observed(self) -> dict[str, Any]:
        """What was observed, by site, [N, ...]."""
        values = {name: np.asarray(self.full[name]["value"]) for name in self.likelihood if name not in self.supports}
        counted = {name: value for name, value in values.items() if self.count in value.shape}
        return {name: np.moveaxis(value, value.shape.index(self.count), 0) for name, value in counted.items()}

    @property
    def dims(self) -> dict[str, list[str]]:
        """Names of the axes of every site: of its plates, where there are some."""
        found = {}
        for name, site in self.full.items():
            shape, event = np.shape(site["value"]), len(getattr(site.get("fn"), "event_shape", ()))
            found[name] = [f"{name}_dim_{axis}" for axis in range(len(shape))]
            for frame in site.get("cond_indep_stack", ()):
                if len(shape) >= event - frame.dim and shape[frame.dim - event] == frame.size:
                    found[name][frame.dim - event] = frame.name
        return found

    def is_cut(self, name: str) -> bool:
        """Return whether a site is in a plate over examples."""
        return any(frame.size == self.count for frame in self.full[name]["cond_indep_stack"])

    def posterior(self, coords: Mapping[str, Any] | None, **options: Any) -> CustomPosterior:
        """Return the posterior of the model as it is cut."""
        low = {name: _bijection(self.full[name])(-start - 50) for name, start in self.start.items()}
        scales = [name for name, value in low.items() if np.all(np.asarray(value) >= 0)]
        together = None if None in self.likelihood.values() else self.log_likelihoods
        sites = Sites(self.values, self.simulate, self.dims, coords or {}, self.observed, scales, together)
        known = {"initial": self.start, "sites": sites, **options}
        return posterior_from(self.log_likelihood, self.log_prior, self.examples, **known)

    def cut_to(self, examples: Any) -> Any:
        """Return the model, without arguments, on some examples, [rows, ...] by path."""
        rows = examples[INDEX].shape[0]

        def leaf(path: Any, value: Any) -> Any:
            if (name := _name(path)) in self.axes:
                return jnp.moveaxis(examples[name], 0, self.axes[name])
            return rows if isinstance(value, int | np.integer) and value == self.count else value

        def plate(site: Any) -> Any:
            return jnp.arange(rows) if site["type"] == "plate" and site["args"][0] == self.count else None

        arguments, handlers = jax.tree_util.tree_map_with_path(leaf, self.arguments), _library().handlers
        return handlers.seed(handlers.substitute(lambda: self.model(**arguments), substitute_fn=plate), 0)

    def densities(self, model: Any, parameters: Any, chosen: Any) -> dict[str, Any]:
        """Return log-densities of the sample sites of a cut model, and the values of deterministic ones.

        They lack what NumPyro multiplies densities by to make up for plates that are cut. `chosen` are values of
        discrete sites.
        """
        handlers, made = _library().handlers, {}
        values = _library().infer.util.constrain_fn(model, (), {}, parameters) | chosen
        for name, site in handlers.trace(handlers.substitute(model, values)).get_trace().items():
            if site["type"] == "sample":
                scale, value = self.full[name]["scale"], site["fn"].log_prob(site["value"])
                made[name] = value if scale is None else scale * value
            elif site["type"] == "deterministic":
                made[name] = site["value"]
        return made

    def of_examples(self, parameters: Any, examples: Any, chosen: Any) -> dict[str, Any]:
        """Return `densities` on some examples, whose discrete sites all have the values `chosen`."""
        index, local = examples[INDEX], self.local
        held = parameters | {name: jnp.take(parameters[name], index, axis) for name, axis in local.items()}
        full = {name: self.full[name]["value"].shape for name in chosen}
        shapes = {name: [index.size if n == self.count else n for n in shape] for name, shape in full.items()}
        each = {name: jnp.full(shapes[name], value) for name, value in chosen.items()}
        return self.densities(self.cut_to(examples), held, each)

    def log_likelihoods(self, parameters: Any, examples: Any) -> Any:
        """Return log p(example|θ) of examples, [rows], summed over their discrete latent variables."""
        rows = examples[INDEX].shape[0]

        def given(chosen: Any) -> Any:
            made, total = self.of_examples(parameters, examples, chosen), jnp.zeros(rows)
            for name, axis in self.likelihood.items():
                value = made[name] if rows == 1 else jnp.moveaxis(made[name], axis, 0)
                total = total + value.reshape(rows, -1).sum(1)
            return total

        if not self.supports:
            return given({})
        values = jnp.asarray(np.array(list(product(*self.supports.values()))).T)
        return jax.nn.logsumexp(jax.vmap(given)(dict(zip(self.supports, values, strict=True))), axis=0)

    def log_likelihood(self, parameters: Any, example: Any) -> Any:
        """Return log p(example|θ)."""
        return self.log_likelihoods(parameters, _rows(example))[0]

    def prior(self) -> Any:
        """Return the model without the sites of examples: on an example of ones, or on N where some are local."""
        ones = {path: np.ones_like(values[0]) for path, values in self.examples.items()}
        model = self.cut_to(_rows(ones, self.count if self.local else 1))
        return _library().handlers.block(model, hide=self.of_example)

    def log_prior(self, parameters: Any) -> Any:
        """Return the log-density of all that is not an example's, log-Jacobians included."""
        return -_library().infer.util.potential_energy(self.prior(), (), {}, parameters)

    def values(self, parameters: Any) -> dict[str, Any]:
        """Return the values of latent sites, and of deterministic ones that do not depend on the data."""
        return dict(_library().infer.util.constrain_fn(self.prior(), (), {}, parameters, return_deterministic=True))

    def simulate(self, key: Any, values: Any, example: Any) -> dict[str, Any]:
        """Draw the observed sites of one example by NumPyro's Predictive, given values by site."""
        held = {name: values[name] for name in self.start}
        held |= {name: jnp.take(held[name], example[INDEX][None], axis) for name, axis in self.local.items()}
        shapes = {name: value.shape[1:] for name, value in self.observed.items()}
        model = _library().handlers.uncondition(self.cut_to(_rows(example)))
        made = _library().infer.Predictive(model, held, return_sites=[*shapes], batch_ndims=0)(key)
        return {name: jnp.reshape(made[name], shape) for name, shape in shapes.items()}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by path."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _rows(example: Any, count: int = 1) -> Any:
    """Return so many copies of an example, [count, ...]."""
    return jax.tree.map(lambda value: jnp.broadcast_to(value, (count, *np.shape(value))), example)


def _bijection(site: Any) -> Any:
    return _library().distributions.biject_to(site["fn"].support)


def _read(model: Any, data: Any, axis: int, shared: Sequence[str], keep: Sequence[str], initial: Any) -> _Program:
    """Return the model, cut such that the sum over examples is the model on all data; refuse one that cannot be."""
    names = [name for name, one in inspect.signature(model).parameters.items() if one.kind is not one.VAR_KEYWORD]
    if isinstance(data, Mapping) and set(names) & set(data):
        given = {name: data[name] for name in names if name in data}
    else:
        given = dict(zip(names, data if isinstance(data, tuple) else (data,), strict=False))
    arguments = {name: np.asarray(value) if isinstance(value, list) else value for name, value in given.items()}
    program = _Program(model, arguments)
    with in_float64(), _naming_site(program):
        _find_sites(program, initial)
        _find_examples(program, axis, shared)
        _check_latent(program, keep)
        _check(program)
    return program


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
        place = next((f"site {name}" for name in at if name), "model")
        wanted = "one that runs on the data (are its arguments there? is a plate over the wrong axis?)"
        raise InputError(place, Found(f"fails: {said}"), wanted) from error


def _find_sites(program: _Program, initial: Any) -> None:
    """Find the sites on all data, at the start."""
    handlers = _library().handlers

    def value_of(site: Any) -> Any:
        if site["type"] != "sample" or site["is_observed"]:
            return None
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

    seeded = handlers.seed(handlers.substitute(program.model, substitute_fn=value_of), 0)
    program.full = dict(handlers.trace(seeded).get_trace(**program.arguments))


def _find_examples(program: _Program, axis: int, shared: Sequence[str]) -> None:
    """Find which data are examples: those as long as what is observed."""
    arrays = {path: np.shape(leaf) for path, leaf in _leaves(program.arguments).items() if np.ndim(leaf)}
    axes = {path: min(axis, len(s) - 1) for path, s in arrays.items() if path.split(".")[0] not in shared}
    observed = [np.shape(site["value"]) for site in program.full.values() if site.get("is_observed")]
    sizes = [shape[min(axis, len(shape) - 1)] for shape in observed if shape]
    sizes += [arrays[path][at] for path, at in axes.items()]
    program.count = next((size for size in sizes if any(size in shape for shape in arrays.values())), 0)
    program.axes = {path: at for path, at in axes.items() if arrays[path][at] == program.count}
    if not program.axes or not observed:
        raise InputError("model", Found("observes no array of the data"), "a NumPyro model with obs=… of the data")


def _check_latent(program: _Program, keep: Sequence[str]) -> None:
    """Refuse latent sites that would grow with the data, and discrete ones that cannot be summed over."""
    problem, wanted = "", ""
    for name in (*program.local, *program.supports):
        if name in program.local and program.count > FEW and name not in keep:
            problem = "has a value for every example, and grows with the data"
            wanted = "a variable of all examples, summed over by hand, or named in keep=… to be a parameter for each"
        elif name in program.supports and not program.is_cut(name):
            problem = "is discrete and of all examples"
            wanted = "in the plate over examples, where it is summed over; others have to be summed over by hand"
        elif np.prod([values.size for values in program.supports.values()], dtype=float) > COMBINATIONS:
            problem, wanted = "has too many values", f"at most {COMBINATIONS}, all discrete sites together"
        if problem:
            raise InputError(f"site {name}", Found(problem), wanted)


def _check(program: _Program) -> None:
    """Refuse a model whose examples are not independent, or that has no finite density and gradient at the start."""
    generator, count, examples = np.random.default_rng(0), program.count, program.examples
    start = jax.tree.map(jnp.asarray, program.start)
    near = {name: value + 0.1 * generator.standard_normal(value.shape) for name, value in start.items()}
    chosen = {name: values[0] for name, values in program.supports.items()}
    whole = {name: np.asarray(value) for name, value in program.of_examples(near, examples, chosen).items()}
    alike = {name: np.asarray(value) for name, value in program.densities(program.prior(), near, chosen).items()}
    compared = ((name, value, whole[name]) for name, value in alike.items())
    same = {name for name, one, other in compared if one.shape == other.shape and np.allclose(one, other)}
    program.of_example = tuple(name for name in whole if name not in same or name in chosen)
    shapes = {name: whole[name].shape for name in program.of_example if program.full[name]["type"] == "sample"}
    program.likelihood = {name: s.index(count) if count in s else None for name, s in shapes.items()}

    def totals(parameters: Any) -> Any:
        each = jax.vmap(lambda one: program.of_examples(parameters, _rows(one), chosen))(examples)
        return {name: jnp.sum(each[name]) for name in program.likelihood}

    slopes = jax.jit(jax.jacfwd(totals))(start)
    for name, total in jax.jit(totals)(near).items():
        plates, size, problem, wanted = program.full[name]["cond_indep_stack"], np.abs(whole[name]).sum(), "", ""
        if plates and not program.is_cut(name):
            problem = f"is in plate {plates[0].name} of {plates[0].size}"
            wanted = f"in a plate over its {count} examples, along example_axis"
        elif not np.isfinite(size) or not all(np.all(np.isfinite(s)) for s in slopes[name].values()):
            problem = "has a density or a gradient that is nan or infinite where the search begins"
            wanted = "finite there (a root or a log of 0?): mend it, or give initial=…"
        elif abs(np.sum(total) - whole[name].sum()) > AGREES * (count + size):
            problem = "depends on more than its own example"
            wanted = "independent given the parameters: compute what all devices know, such as means or lags, before"
        if problem:
            raise InputError(f"site {name}", Found(problem), wanted)
