"""NumPyro models as posteriors: the density of one example, the prior, and draws in the space of the sites.

The model runs on the data of one example, with plates over examples cut down to one. That is the likelihood of the
example only where examples are independent given the parameters; so the sum over examples is compared with the model on
all data, site by site, and a model for which they differ is refused.
"""

import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from wflmc.posterior.custom.model import INDEX, Sites, used_inputs

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
    known = {"coords": coords, "devices": devices, "preconditioner": preconditioner, **options}
    reading = {"data": data, "axis": example_axis, "shared": shared, "keep": keep}
    program = _read(model, initial=initial or {}, **reading)
    try:
        return program.posterior(**known)
    except InputError as error:  # a model without a mode may have one if it is written with offsets
        centred = [name for name in program.start if _is_location_scale(program.full[name]["fn"])]
        if not isinstance(error.__cause__, NoModeError) or not centred:
            raise
        try:
            return _read(_with_offsets(model, centred), initial={}, **reading).posterior(**known)
        except InputError:
            raise error from None


def _with_offsets(model: Any, names: list[str]) -> Any:
    """Return the model with some sites written as location + scale * offset."""
    from numpyro import handlers
    from numpyro.infer.reparam import LocScaleReparam

    return wraps(model)(handlers.reparam(model, config={name: LocScaleReparam(0) for name in names}))


@dataclass
class _Program:
    """A model with its data; how it is cut to some examples, and what its sites turned out to be."""

    model: Any
    arguments: dict[str, Any]
    """By name; each a pytree."""
    cut_counts: bool
    """Whether whole numbers equal to N are cut as plates are."""
    axes: dict[str, int] = field(default_factory=dict)
    """Of the leaves that are examples, by path: the axis that counts them."""
    count: int = 0
    """N."""
    full: dict[str, Any] = field(default_factory=dict)
    """The sites on all data, at the start."""
    start: dict[str, Any] = field(default_factory=dict)
    """Unconstrained values of the latent sites that are parameters."""
    supports: dict[str, Any] = field(default_factory=dict)
    """Values of the discrete latent sites, which are summed over."""
    likelihood: dict[str, int | None] = field(default_factory=dict)
    """Sample sites of the example: the axis of their log-densities that counts examples, if there is one."""
    of_example: tuple[str, ...] = ()
    """Sites that depend on the example, or are summed over."""

    @property
    def examples(self) -> dict[str, Any]:
        """The data of examples by path, [N, ...], and their numbers."""
        leaves = _leaves(self.arguments)
        arrays = {path: np.moveaxis(np.asarray(leaves[path]), axis, 0) for path, axis in self.axes.items()}
        arrays = {path: a.astype(np.int32) if a.dtype.kind in "iu" else a for path, a in arrays.items()}
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
        sites = Sites(self.values, self.simulate, self.dims, dict(coords or {}), self.observed, scales, together)
        made = {"initial": self.start, "sites": sites, **options}
        return posterior_from(self.log_likelihood, self.log_prior, self.examples, **made)

    def cut_to(self, examples: Any) -> Any:
        """Return the model, without arguments, on some examples, [rows, ...] by path."""
        from numpyro import handlers

        rows = examples[INDEX].shape[0]

        def leaf(path: Any, value: Any) -> Any:
            if (name := _name(path)) in self.axes:
                return jnp.moveaxis(examples[name], 0, self.axes[name])
            whole = self.cut_counts and isinstance(value, int | np.integer) and value == self.count
            return rows if whole else value

        def plate(site: Any) -> Any:
            return jnp.arange(rows) if site["type"] == "plate" and site["args"][0] == self.count else None

        arguments = jax.tree_util.tree_map_with_path(leaf, self.arguments)
        return handlers.seed(handlers.substitute(lambda: self.model(**arguments), substitute_fn=plate), 0)

    def sites(self, model: Any, parameters: Any, chosen: Any) -> dict[str, Any]:
        """Return the sites of a model without arguments; `chosen` are values of discrete ones by name."""
        from numpyro import handlers
        from numpyro.infer.util import constrain_fn

        def discrete(site: Any) -> Any:
            return jnp.broadcast_to(chosen[site["name"]], site["fn"].shape()) if site["name"] in chosen else None

        model = handlers.substitute(model, substitute_fn=discrete)
        return dict(handlers.trace(handlers.substitute(model, constrain_fn(model, (), {}, parameters))).get_trace())

    def density(self, site: Any) -> Any:
        """Return a site's log-density, without what NumPyro multiplies it by to make up for plates that are cut."""
        scale, value = self.full[site["name"]]["scale"], site["fn"].log_prob(site["value"])
        return value if scale is None else scale * value

    def of_examples(self, parameters: Any, examples: Any, chosen: Any) -> dict[str, Any]:
        """Return log-densities of sample sites and values of deterministic ones on some examples, by site."""
        held = parameters | {
            name: jnp.take(parameters[name], examples[INDEX], axis) for name, axis in self.local.items()
        }
        sites = self.sites(self.cut_to(examples), held, chosen)
        made = {name: site["value"] for name, site in _of(sites, "deterministic").items()}
        return made | {name: self.density(site) for name, site in _of(sites, "sample").items()}

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
        """Return the model without the sites of examples: on one, or on N copies of it where some are local."""
        from numpyro import handlers

        first = {path: values[0] for path, values in self.examples.items()}
        return handlers.block(self.cut_to(_rows(first, self.count if self.local else 1)), hide=self.of_example)

    def log_prior(self, parameters: Any) -> Any:
        """Return the log-density of all that is not an example's, log-Jacobians included."""
        from numpyro.infer.util import potential_energy

        return -potential_energy(self.prior(), (), {}, parameters)

    def values(self, parameters: Any) -> dict[str, Any]:
        """Return the values of latent sites, and of deterministic ones that do not depend on the data."""
        from numpyro.infer.util import constrain_fn

        return dict(constrain_fn(self.prior(), (), {}, parameters, return_deterministic=True))

    def simulate(self, key: Any, values: Any, example: Any) -> dict[str, Any]:
        """Draw the observed sites of one example by NumPyro's Predictive, given values by site."""
        from numpyro import handlers
        from numpyro.infer import Predictive

        held = {name: values[name] for name in self.start}
        held |= {name: jnp.take(held[name], example[INDEX][None], axis) for name, axis in self.local.items()}
        shapes = {name: value.shape[1:] for name, value in self.observed.items()}
        model = handlers.uncondition(self.cut_to(_rows(example)))
        made = Predictive(model, held, return_sites=[*shapes], batch_ndims=0)(key)
        return {name: jnp.reshape(made[name], shape) for name, shape in shapes.items()}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by path."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _rows(example: Any, count: int = 1) -> Any:
    """Return so many copies of an example, [count, ...]."""
    return jax.tree.map(lambda value: jnp.broadcast_to(value, (count, *np.shape(value))), example)


def _of(sites: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the sites of a kind."""
    return {name: site for name, site in sites.items() if site["type"] == kind}


def _is_location_scale(fn: Any) -> bool:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return hasattr(fn, "loc") and hasattr(fn, "scale") and "Real" in type(fn.support).__name__


def _bijection(site: Any) -> Any:
    from numpyro.distributions import biject_to

    return biject_to(site["fn"].support)


def _read(model: Any, data: Any, axis: int, shared: Sequence[str], keep: Sequence[str], initial: Any) -> _Program:
    """Return the model, cut such that the sum over examples is the model on all data; refuse one that cannot be."""
    troubles = []
    for cut_counts in (False, True):
        program = _Program(model, _arguments(inspect.signature(model), data), cut_counts)
        try:
            with in_float64(), _naming_site(program):
                _find_sites(program, axis, shared, initial)
                _check_latent(program, keep)
                _check(program)
            return program
        except InputError as error:
            troubles.append(error)
    raise troubles[0]


def _arguments(signature: inspect.Signature, data: Any) -> dict[str, Any]:
    """Return the data as the model's arguments by name, lists as arrays."""
    names = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
    if isinstance(data, Mapping) and set(names) & set(data):
        given = {name: value for name, value in data.items() if name in names or len(names) < len(signature.parameters)}
    else:
        given = dict(zip(names, data if isinstance(data, tuple) else (data,), strict=False))
    return {name: np.asarray(value) if isinstance(value, list) else value for name, value in given.items()}


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


def _find_sites(program: _Program, axis: int, shared: Sequence[str], initial: Any) -> None:
    """Find the sites on all data, at the start, and which data are examples."""
    from numpyro import handlers

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
    arrays = {path: np.shape(leaf) for path, leaf in _leaves(program.arguments).items() if np.ndim(leaf)}
    axes = {path: min(axis, len(s) - 1) for path, s in arrays.items() if path.split(".")[0] not in shared}
    lengths = {path: arrays[path][at] for path, at in axes.items()}
    observed = [site["value"] for site in _of(program.full, "sample").values() if site["is_observed"]]
    shapes = [np.shape(value) for value in observed if np.size(value) and np.ndim(value)]
    sizes = [shape[min(axis, len(shape) - 1)] for shape in shapes] + [*lengths.values()]
    program.count = next((size for size in sizes if size in lengths.values()), 0)
    if not program.count or not observed:
        raise InputError("model", Found("observes no array of the data"), "a NumPyro model with obs=… of the data")
    program.axes = {path: axes[path] for path, length in lengths.items() if length == program.count}


def _check_latent(program: _Program, keep: Sequence[str]) -> None:
    """Refuse latent sites that would grow with the data, and discrete ones that cannot be summed over."""
    for name in program.local:
        if program.count > FEW and name not in keep:
            wanted = "a variable of all examples, summed over by hand, or named in keep=… to be a parameter for each"
            raise InputError(f"site {name}", Found("has a value for every example, and grows with the data"), wanted)
    for name in program.supports:
        if not program.is_cut(name):
            wanted = "in the plate over examples, where it is summed over; others have to be summed over by hand"
            raise InputError(f"site {name}", Found("is discrete and of all examples"), wanted)
        if np.prod([values.size for values in program.supports.values()], dtype=float) > COMBINATIONS:
            wanted = f"at most {COMBINATIONS}, all discrete sites together"
            raise InputError(f"site {name}", Found("has too many values"), wanted)


def _check(program: _Program) -> None:
    """Refuse a model whose examples are not independent, or that has no finite density and gradient at the start."""
    generator, count = np.random.default_rng(0), program.count
    examples, start = program.examples, jax.tree.map(jnp.asarray, program.start)
    near = {name: value + 0.1 * generator.standard_normal(np.shape(value)) for name, value in start.items()}
    chosen = {name: values[0] for name, values in program.supports.items()}
    one = {name: values[0] for name, values in examples.items()}
    whole = _of(program.sites(program.cut_to(examples), near, chosen), "sample")
    at_once = {name: np.asarray(program.density(site)) for name, site in whole.items()}
    used = used_inputs(lambda example: program.of_examples(near, _rows(example), chosen), one)
    program.of_example = tuple(name for name, inputs in used.items() if set(inputs) - {INDEX} or name in chosen)
    shapes = {name: at_once[name].shape for name in program.of_example if name in whole}
    program.likelihood = {name: s.index(count) if count in s else None for name, s in shapes.items()}

    def totals(parameters: Any) -> Any:
        each = jax.vmap(lambda one: program.of_examples(parameters, _rows(one), chosen))(examples)
        return {name: jnp.sum(each[name]) for name in program.likelihood}

    parts = {
        name: program.density(site) for name, site in _of(program.sites(program.prior(), near, {}), "sample").items()
    }
    for name, total in (jax.jit(totals)(near) | parts).items():
        plates, size = whole[name]["cond_indep_stack"], np.abs(at_once[name]).sum()
        if name in program.likelihood and plates and not program.is_cut(name):
            wanted = f"in a plate over its {count} examples, along example_axis"
            raise InputError(f"site {name}", Found(f"is in plate {plates[0].name} of {plates[0].size}"), wanted)
        if not np.isfinite(size):
            raise InputError(f"site {name}", Found("has no finite density at the start"), "finite: give initial=…")
        if abs(np.sum(total) - at_once[name].sum()) > AGREES * (count + size):
            wanted = "independent given the parameters: compute what all devices know, such as means or lags, before"
            raise InputError(f"site {name}", Found("depends on more than its own example"), wanted)
    for name, slopes in jax.jit(jax.jacfwd(totals))(start).items():
        for of, slope in slopes.items():
            if not np.all(np.isfinite(slope)):
                problem = f"has a gradient with respect to {of} that is nan or infinite"
                wanted = "finite where the search begins (a root or a log of 0?): mend it, or give initial=…"
                raise InputError(f"site {name}", Found(problem), wanted)
