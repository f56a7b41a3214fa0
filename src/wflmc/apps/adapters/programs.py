"""NumPyro models as posteriors: the density of one example, the prior, and draws in the space of the sites.

The model runs on the data of one example, with plates over examples cut down to one. That is the likelihood of the
example only where examples are independent given the parameters; so the sum over examples is compared with the model on
all data, site by site, and a model for which they differ is refused.

Everything else, the prior above all, belongs to no single record, is never clipped, and must not depend on the
examples. It is read off the model on placeholders, examples of ones: private data enter a posterior only as the rows of
its examples. Which sites are an example's is decided by the equations of the model (`dependence`), never by the values
of data. What else a model computes with, arguments of other lengths and arrays from around it, every device knows: it
is listed in `not_covered` of the posterior, and observations of such data are refused unless `shared` declares them.
"""

import inspect
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from wflmc.apps.adapters.dependence import (
    NOTHING,
    Constant,
    Sources,
    all_sources,
    sources_of,
)
from wflmc.apps.adapters.numpyro_types import (
    Arrays,
    Model,
    Site,
    bijection,
    constrain,
    library,
    location_and_scale,
    seeded,
    seeded_on_host,
    values_of,
    visit,
    visit_at,
)
from wflmc.posterior.custom import CustomPosterior, posterior_from
from wflmc.posterior.custom.geometry import GeometryError
from wflmc.posterior.custom.model import EXAMPLE_INDEX, Sites
from wflmc.posterior.custom.precision import in_float64
from wflmc.support.errors import Fault, InputError, without_data
from wflmc.support.trees import ArrayTree, NumericArray, Values

LeafPath: TypeAlias = tuple[Hashable, ...]
"""Of a leaf in a pytree, as JAX names it."""
Leaf: TypeAlias = jax.typing.ArrayLike
"""Of an argument; NumPy takes what is no number for an array without axes."""
ArgumentLeaves: TypeAlias = Mapping[str, Leaf]
"""Leaves of the arguments of a model, by path."""
Chosen: TypeAlias = Mapping[str, jax.Array | np.integer]
"""One value of every discrete latent site, by name."""

FEW = 64
"""Up to so many examples, latent variables of every example are kept as parameters without being asked to."""
COMBINATIONS = 256
"""Values of an example's discrete latent variables, all together, that are summed over."""
AGREES = 1e-6
"""Relative error to which a site's density on all data is the sum over examples, in float64."""
DECIDED = "depends on control flow by data or parameters"
TRACEABLE = "decided without looking at values: use jnp.where, or numpyro.handlers.mask, in place of if"
NON_FINITE = (
    "has a density or a gradient that is nan or infinite where the search begins"
)
FINITE = "finite there (a root or a log of 0?): mend it, or give initial=…"
REAL_KINDS = ("f", "i", "u", "b")
"""Kinds of NumPy's numbers that a density can be computed from: floating-point, whole and truth values."""
EXAMPLES, PARAMETERS, CHOSEN = "examples", "parameters", "chosen"
"""Names of what a site may be computed from: private data, parameters, values of an example's discrete sites."""
OF_EXAMPLE = frozenset([EXAMPLES, CHOSEN])
"""Of these, what makes a site one of an example."""
ARGUMENT, DECLARED = "argument", "declared"
"""Names of arguments that every device knows: undeclared ones, and those that `shared` names."""


def from_numpyro(
    model: Model,
    data: object,
    *,
    devices: int | ArrayLike | Sequence[ArrayLike],
    example_axis: int = 0,
    shared: Sequence[str] = (),
    keep: Sequence[str] = (),
    initial: Mapping[str, ArrayLike] | None = None,
    preconditioner: str | ArrayLike | CustomPosterior = "pilot",
    coords: Mapping[str, Sequence[object]] | None = None,
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
            their number, every device knows, and `posterior.not_covered` lists it. Sites that observe such data, and
            factors of them, are refused.
        devices: how many; or the device of every example, [N]; or a list of each one's examples.
        example_axis: the axis of the arrays that counts the examples; the last one of arrays with fewer axes.
        shared: names of arguments that are public: every device knows them whole, also where they are as long as the
            observations, and sites may observe them. They are listed in `posterior.not_covered` as well.
        keep: sites with a value for every example to be kept as parameters; up to 64 examples all are.
        initial: values of sites to search for a mode from, by name; else 0 in unconstrained space.
        preconditioner: as of `posterior_from`. By default pilot chains on the pooled data find mean and covariance,
            and no promise of privacy covers what these tell; the posterior of public data tells nothing.
        coords: labels along plates, by the plate's name, for ArviZ.
        options: those of `posterior_from`: mu, L, batch, partition, key.

    Raises:
        InputError: in one sentence that names the site, for a model that cannot be split over devices, or whose prior
            would depend on data.
    """
    read = partial(_read, data=data, axis=example_axis, shared=shared, keep=keep)
    options |= {"devices": devices, "preconditioner": preconditioner}
    program = read(model, initial=initial or {})
    try:
        return program.posterior(coords, **options)
    except (
        InputError
    ) as error:  # a model without a mode may have one if it is written with offsets
        if not isinstance(error.__cause__, GeometryError) or not program.is_centred:
            raise
        try:
            with_offsets = _with_offsets(model, program.location_scale)
            return read(with_offsets, initial={}).posterior(coords, **options)
        except InputError as error_with_offsets:
            if isinstance(error_with_offsets.__cause__, GeometryError):
                raise  # to be told to write offsets would not help
        raise


def _with_offsets(model: Model, names: list[str]) -> Model:
    """Return the model with some sites written as location + scale * offset."""
    numpyro = library()
    config = {name: numpyro.infer.reparam.LocScaleReparam(0) for name in names}
    return wraps(model)(numpyro.handlers.reparam(model, config=config))


@without_data
@dataclass
class _Program:
    """A model with its data; how it is cut to some examples, and what its sites turned out to be."""

    model: Model
    arguments: dict[str, object]
    """By name; each a pytree."""
    shared: tuple[str, ...] = ()
    """Names of arguments that are declared public."""
    lists: tuple[str, ...] = ()
    """Names of arguments that were given as lists: one entry with a fraction makes floats of all their numbers."""
    runs_on_ones: bool = True
    """Whether the model ran on ones before it saw data, so that it cannot have kept any from its first call."""
    axes: dict[str, int] = field(default_factory=dict)
    """Of the leaves that are examples, by path: the axis that counts them."""
    count: int = 0
    """N. Plates of this size, and whole numbers among the arguments, are cut as examples are."""
    full: dict[str, Site] = field(default_factory=dict)
    """The sites on as many placeholders as there are examples, at the start."""
    observations: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of the observed sites."""
    start: dict[str, np.ndarray] = field(default_factory=dict)
    """Unconstrained values of the latent sites that are parameters."""
    supports: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of the discrete latent sites, which are summed over."""
    likelihood: dict[str, int | None] = field(default_factory=dict)
    """Sample sites of the example: the axis of their log-densities that counts examples, if there is one."""
    prior_sites: tuple[str, ...] = ()
    """All other sample sites."""
    public_values: tuple[str, ...] = ()
    """Deterministic sites that do not depend on the examples."""
    is_centred: bool = False
    """Whether the location or the scale of a latent site is another parameter, as in a hierarchy without offsets."""
    not_covered: dict[str, str] = field(default_factory=dict)
    """What every device knows whole and ε does not cover: a sentence by name."""

    @property
    def examples(self) -> dict[str, np.ndarray]:
        """The data of examples by path, [N, ...], and their numbers."""
        leaves = _leaves(self.arguments)
        arrays = {
            path: np.moveaxis(np.asarray(leaves[path]), axis, 0)
            for path, axis in self.axes.items()
        }
        return arrays | {EXAMPLE_INDEX: np.arange(self.count, dtype=np.int32)}

    @property
    def other_arguments(self) -> dict[str, Leaf]:
        """Arguments that are numbers and no examples, by path."""
        leaves = {
            path: leaf
            for path, leaf in _leaves(self.arguments).items()
            if path not in self.axes
        }
        return {
            path: leaf for path, leaf in leaves.items() if _kind(leaf) in REAL_KINDS
        }

    @property
    def opaque_arguments(self) -> dict[str, Leaf]:
        """Arguments that are objects of any kind but functions, by path: numbers in them cannot be traced."""
        objects = {
            path: leaf
            for path, leaf in _leaves(self.arguments).items()
            if _kind(leaf) == "O"
        }
        return {path: leaf for path, leaf in objects.items() if not callable(leaf)}

    def is_declared(self, path: str) -> bool:
        """Return whether an argument is named in `shared`."""
        return path.split(".")[0] in self.shared

    def placeholders(self, rows: int) -> dict[str, np.ndarray]:
        """Return examples of ones, [rows, ...] by path, with their numbers: all that the prior sees of examples."""
        examples = {
            path: values
            for path, values in self.examples.items()
            if path != EXAMPLE_INDEX
        }
        ones = {
            path: np.ones((rows, *values.shape[1:]), values.dtype)
            for path, values in examples.items()
        }
        return ones | {EXAMPLE_INDEX: np.arange(rows, dtype=np.int32)}

    @property
    def local(self) -> dict[str, int]:
        """Latent sites with a value for every example, and the axis that counts these."""
        shapes = {
            name: np.shape(self.full[name]["value"])
            for name in self.start
            if self.is_cut(name)
        }
        return {name: shape.index(self.count) for name, shape in shapes.items()}

    @property
    def location_scale(self) -> list[str]:
        """Latent sites that can be written as location + scale * offset."""
        return [
            name
            for name in self.start
            if location_and_scale(self.full[name]["fn"]) is not None
        ]

    @property
    def observed(self) -> dict[str, np.ndarray]:
        """What was observed, by site, [N, ...]."""
        values = {
            name: value
            for name, value in self.observations.items()
            if name in self.likelihood
        }
        counted = {
            name: value for name, value in values.items() if self.count in value.shape
        }
        return {
            name: np.moveaxis(value, value.shape.index(self.count), 0)
            for name, value in counted.items()
        }

    @property
    def dims(self) -> dict[str, list[str]]:
        """Names of the axes of every site: of its plates, where there are some."""
        found = {}
        for name, site in self.full.items():
            shape, event = (
                np.shape(site["value"]),
                len(getattr(site.get("fn"), "event_shape", ())),
            )
            found[name] = [f"{name}_dim_{axis}" for axis in range(len(shape))]
            for frame in site.get("cond_indep_stack", ()):
                if (
                    len(shape) >= event - frame.dim
                    and shape[frame.dim - event] == frame.size
                ):
                    found[name][frame.dim - event] = frame.name
        return found

    def is_cut(self, name: str) -> bool:
        """Return whether a site is in a plate over examples."""
        return any(
            frame.size == self.count for frame in self.full[name]["cond_indep_stack"]
        )

    def posterior(
        self,
        coords: Mapping[str, Sequence[object]] | None,
        **options: Any,
    ) -> CustomPosterior:
        """Return the posterior of the model as it is cut."""
        with in_float64():  # in which these bijections are compiled already
            low = {
                name: bijection(self.full[name])(-start - 50)
                for name, start in self.start.items()
            }
        scales = [name for name, value in low.items() if np.all(np.asarray(value) >= 0)]
        batched_log_likelihood = None
        if None not in self.likelihood.values():
            batched_log_likelihood = self.log_likelihoods
        sites = Sites(
            constrain=self.values,
            simulate=self.simulate,
            dims=self.dims,
            coords=coords or {},
            observed=self.observed,
            scales=scales,
            batched_log_likelihood=batched_log_likelihood,
            not_covered=self.not_covered,
        )
        known = {"initial": self.start, "sites": sites, **options}
        return posterior_from(
            self.log_likelihood, self.log_prior, self.examples, **known
        )

    def cut_to(
        self,
        examples: Values,
        replaced: ArgumentLeaves | None = None,
    ) -> Model:
        """Return the model of `without_keys` with a random key."""
        return seeded(self.without_keys(examples, replaced))

    def without_keys(
        self,
        examples: Values,
        replaced: ArgumentLeaves | None = None,
        arrays: ModuleType = jnp,
    ) -> Model:
        """Return the model, without arguments and random keys, on some examples.

        Args:
            examples: [rows, ...] by path.
            replaced: other arguments to put in place of the model's own, by path.
            arrays: `jax.numpy` or `numpy`, whose arrays the model is given.
        """
        rows = examples[EXAMPLE_INDEX].shape[0]
        replaced = replaced or {}

        def leaf(path: LeafPath, value: Leaf) -> Leaf:
            name = _name(path)
            if name in self.axes:
                return arrays.moveaxis(examples[name], 0, self.axes[name])
            if name in replaced:
                return replaced[name]
            return (
                rows
                if isinstance(value, int | np.integer) and value == self.count
                else value
            )

        def plate(site: Site) -> jax.Array | None:
            return (
                jnp.arange(rows)
                if site["type"] == "plate" and site["args"][0] == self.count
                else None
            )

        arguments = jax.tree_util.tree_map_with_path(leaf, self.arguments)
        substitute = library().handlers.substitute
        return substitute(lambda: self.model(**arguments), substitute_fn=plate)

    def trace(
        self, model: Model, parameters: Values, chosen: Values
    ) -> dict[str, Site]:
        """Return the sites of a cut model.

        Args:
            model: of `cut_to`.
            parameters: unconstrained values of its latent sites.
            chosen: values of its discrete sites.
        """
        return visit_at(model, {**constrain(model, parameters), **chosen})

    @property
    def first_values(self) -> Chosen:
        """The first value of every discrete latent site."""
        return {name: values[0] for name, values in self.supports.items()}

    def densities(self, model: Model, parameters: Values, chosen: Values) -> Arrays:
        """Return the log-densities of the sample sites of a cut model, and the values of deterministic ones.

        They lack what NumPyro multiplies densities by to make up for plates that are cut.
        """
        results: Arrays = {}
        for name, site in self.trace(model, parameters, chosen).items():
            if site["type"] == "sample":
                scale = self.full[name]["scale"]
                density = _log_density(site, parameters)
                results[name] = density if scale is None else scale * density
            elif site["type"] == "deterministic":
                results[name] = site["value"]
        return results

    def parameters_of(
        self, parameters: Values, index: jax.Array | np.ndarray
    ) -> Values:
        """Return parameters of which those with a value for every example are cut to some examples."""
        local = {
            name: jnp.take(parameters[name], index, axis)
            for name, axis in self.local.items()
        }
        return {**parameters, **local}

    def discrete_values(self, chosen: Chosen, rows: int) -> Arrays:
        """Return values of discrete sites, the same for so many examples."""
        shapes = {name: self.full[name]["value"].shape for name in chosen}
        cut = {
            name: [rows if size == self.count else size for size in shape]
            for name, shape in shapes.items()
        }
        return {name: jnp.full(cut[name], value) for name, value in chosen.items()}

    def of_examples(
        self,
        parameters: Values,
        examples: Values,
        chosen: Chosen,
    ) -> Arrays:
        """Return `densities` on some examples, whose discrete sites all have the values `chosen`."""
        cut = self.parameters_of(parameters, examples[EXAMPLE_INDEX])
        return self.densities(
            self.cut_to(examples),
            cut,
            self.discrete_values(chosen, examples[EXAMPLE_INDEX].size),
        )

    def log_likelihoods(self, parameters: Values, examples: Values) -> jax.Array:
        """Return log p(example|θ) of examples, [rows], summed over their discrete latent variables."""
        rows = examples[EXAMPLE_INDEX].shape[0]

        def conditional(chosen: Chosen) -> jax.Array:
            densities = self.of_examples(parameters, examples, chosen)
            total = jnp.zeros(rows)
            for name, axis in self.likelihood.items():
                density = densities[name]
                if rows != 1 and axis is not None:
                    density = jnp.moveaxis(density, axis, 0)
                total = total + density.reshape(rows, -1).sum(1)
            return total

        if not self.supports:
            return conditional({})
        values = jnp.asarray(np.array(list(product(*self.supports.values()))).T)
        return jax.nn.logsumexp(
            jax.vmap(conditional)(dict(zip(self.supports, values, strict=True))), axis=0
        )

    def log_likelihood(self, parameters: Values, example: Values) -> jax.Array:
        """Return log p(example|θ)."""
        return self.log_likelihoods(parameters, _as_row(example))[0]

    @property
    def prior_rows(self) -> int:
        """Placeholders that the prior is computed with: one, or N where parameters have a value for every example."""
        return self.count if self.local else 1

    def prior_densities(self, parameters: Values) -> Arrays:
        """Return `densities` on placeholders, of which `prior_sites` and `public_values` hold for any data."""
        chosen = self.discrete_values(self.first_values, self.prior_rows)
        return self.densities(
            self.cut_to(self.placeholders(self.prior_rows)), parameters, chosen
        )

    def log_prior(self, parameters: Values) -> jax.Array:
        """Return the log-density of all that is not an example's, log-Jacobians included."""
        densities = self.prior_densities(parameters)
        return sum(
            (jnp.sum(densities[name]) for name in self.prior_sites), start=jnp.zeros(())
        )

    def values(self, parameters: Values) -> Arrays:
        """Return the values of latent sites, and of deterministic ones that do not depend on the data."""
        model = self.cut_to(self.placeholders(self.prior_rows))
        values = constrain(model, parameters, deterministic=True)
        return {
            name: value
            for name, value in values.items()
            if name in self.start or name in self.public_values
        }

    def simulate(self, key: jax.Array, values: Values, example: Values) -> Arrays:
        """Draw the observed sites of one example by NumPyro's Predictive, given values by site."""
        latent = {name: jnp.asarray(values[name]) for name in self.start}
        index = example[EXAMPLE_INDEX][None]
        latent |= {
            name: jnp.take(latent[name], index, axis)
            for name, axis in self.local.items()
        }
        shapes = {name: value.shape[1:] for name, value in self.observed.items()}
        model = library().handlers.uncondition(self.cut_to(_as_row(example)))
        predictive = library().infer.Predictive(
            model, latent, return_sites=[*shapes], batch_ndims=0
        )
        draws = predictive(key)
        return {name: jnp.reshape(draws[name], shape) for name, shape in shapes.items()}


def _name(path: LeafPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _leaves(tree: Mapping[str, object]) -> dict[str, Leaf]:
    """Return the leaves of a pytree by path."""
    return {
        _name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _kind(leaf: Leaf) -> str:
    """Return the kind of an argument's numbers, as NumPy names kinds; an empty text for a random key."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return getattr(dtype, "kind", "")


def _as_row(example: Values) -> Arrays:
    """Return one example as several examples are given, [1, ...]."""
    return {name: jnp.asarray(value)[None] for name, value in example.items()}


def _log_density(site: Site, parameters: Values) -> jax.Array:
    """Return the unscaled log-density of a sample site, and of a latent one the log-Jacobian with it."""
    name = site["name"]
    fn = site["fn"]
    value = site["value"]
    density = fn.log_prob(value)
    if name not in parameters:
        return density
    log_det = bijection(site).log_abs_det_jacobian(parameters[name], value)
    event_axes = range(jnp.ndim(value) - len(fn.event_shape), jnp.ndim(log_det))
    return density + jnp.sum(log_det, tuple(event_axes))


def _read(
    model: Model,
    *,
    data: object,
    axis: int,
    shared: Sequence[str],
    keep: Sequence[str],
    initial: Mapping[str, ArrayLike],
) -> _Program:
    """Return the model, cut such that the sum over examples is the model on all data; refuse one that cannot be."""
    names = [
        name
        for name, one in inspect.signature(model).parameters.items()
        if one.kind is not one.VAR_KEYWORD
    ]
    if isinstance(data, Mapping) and set(names) & set(data):
        given = {name: data[name] for name in names if name in data}
    else:
        given = dict(
            zip(names, data if isinstance(data, tuple) else (data,), strict=False)
        )
    lists = tuple(name for name, value in given.items() if isinstance(value, list))
    arguments = {
        name: np.asarray(value) if name in lists else value
        for name, value in given.items()
    }
    _check_paths(arguments)
    program = _Program(model, arguments, tuple(shared), lists)
    with in_float64(), _naming_site(program):
        _run_on_blanks(program)
        _find_examples(program, axis, initial)
        _check_latent(program, keep)
        _check_sources(program)
        _check_densities(program)
    return program


def _check_paths(arguments: Mapping[str, object]) -> None:
    """Refuse arguments of which two have the same path, or one that of the numbers of examples."""
    paths = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(arguments)]
    ambiguous = sorted(
        path for path in {*paths} if path == EXAMPLE_INDEX or paths.count(path) > 1
    )
    if ambiguous:
        wanted = (
            f"an argument with a name of its own, other than {EXAMPLE_INDEX}: keys "
            "with dots may spell another one's path"
        )
        raise InputError(
            f"data[{ambiguous[0]}]", Fault("has a name that is taken"), wanted
        )


def _run_on_blanks(program: _Program) -> None:
    """Run the model on ones before it sees data: a model that remembers its first data then remembers nothing private.

    A mean kept from the first call would otherwise pass from all records into the prior, as a number like any other.
    """

    def blank(path: LeafPath, leaf: Leaf) -> Leaf:
        is_private = (
            np.ndim(leaf) > 0
            and _kind(leaf) in REAL_KINDS
            and not program.is_declared(_name(path))
        )
        return np.ones_like(leaf) if is_private else leaf

    arguments = jax.tree_util.tree_map_with_path(blank, program.arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _find_sites(lambda _: partial(program.model, **arguments), {})
        except Exception:  # what the model cannot do with ones, it may do with data; `_not_covered` lists it
            program.runs_on_ones = False


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
            traces = [
                getattr(frame.f_locals.get("self"), "trace", None) for frame in frames
            ]
            seen = {
                name for trace in traces if isinstance(trace, Mapping) for name in trace
            }
            place = next((name for name in program.full if name not in seen), "")
            raise InputError(f"site {place}", Fault(DECIDED), TRACEABLE) from error
        at = [
            f.f_locals.get("name")
            for f in frames
            if f.f_globals.get("__name__") == "numpyro.primitives"
        ]
        said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][
            :160
        ].rstrip(".: ")
        place = next((f"site {name}" for name in at if name), "model")
        wanted = "one that runs on the data (are its arguments there? is a plate over the wrong axis?)"
        raise InputError(place, Fault(f"fails: {said}"), wanted) from error


@without_data
class _Reading(NamedTuple):
    """The sites of a model where its latent ones have the values to start from."""

    sites: dict[str, Site]
    start: dict[str, np.ndarray]
    """Unconstrained values of the continuous latent sites."""
    supports: dict[str, np.ndarray]
    """All values of the discrete ones."""


def _find_sites(
    model: Callable[[ModuleType], Model], initial: Mapping[str, ArrayLike]
) -> _Reading:
    """Run a model without arguments at the start, with arrays of NumPy if it can.

    JAX would compile a program for each of its operations. What a model cannot do with arrays of NumPy, such as to
    index them inside a loop of JAX, it is asked to do with those of JAX.

    Args:
        model: without random keys, for the library of its arrays.
        initial: values of latent sites by name; others are 0 in unconstrained space.
    """
    try:
        with np.errstate(all="ignore"):
            return _visit_sites(model(np), initial, np)
    except InputError:
        raise
    except Exception:  # whatever a person's model may raise
        return _visit_sites(model(jnp), initial, jnp)


def _visit_sites(
    model: Model, initial: Mapping[str, ArrayLike], arrays: ModuleType
) -> _Reading:
    """Run a model at the start with arrays of NumPy, which it cannot change, or of JAX."""
    reading = _Reading({}, {}, {})

    def value_of(site: Site) -> NumericArray | None:
        if site["type"] != "sample" or site["is_observed"]:
            return None
        name = site["name"]
        fn = site["fn"]
        if fn.support.is_discrete:
            if not fn.has_enumerate_support:
                raise InputError(
                    f"site {name}",
                    Fault("is discrete without end"),
                    "continuous, or summed over by hand",
                )
            reading.supports[name] = values_of(fn)
            return _constant_array(
                arrays.broadcast_to(reading.supports[name][0], fn.shape())
            )
        to_support = bijection(site)
        shape = to_support.inverse_shape(fn.shape())
        value = np.zeros(shape)
        if name in initial:
            value = np.asarray(to_support.inv(jnp.asarray(initial[name], float)))
        reading.start[name] = np.broadcast_to(value, shape).copy()
        return _constant_array(arrays.asarray(to_support(reading.start[name])))

    reading.sites.update(visit(seeded_on_host(model), value_of))
    return reading


def _constant_array(values: NumericArray) -> NumericArray:
    """Return an array that a model cannot change in place: those of JAX cannot be either."""
    if isinstance(values, np.ndarray):
        values = values.view()
        values.flags.writeable = False
    return values


def _find_examples(
    program: _Program,
    axis: int,
    initial: Mapping[str, ArrayLike],
) -> None:
    """Find which data are examples, those as long as what is observed, and the sites on placeholders for them."""
    on_data = _find_sites(
        lambda _: partial(program.model, **program.arguments), initial
    )
    program.full = (
        on_data.sites
    )  # names of sites, for errors; what is kept is read off placeholders below
    _check_plates(on_data.sites)
    observed = {
        name: np.asarray(site["value"])
        for name, site in on_data.sites.items()
        if site.get("is_observed")
    }

    shapes = {
        path: np.shape(leaf)
        for path, leaf in _leaves(program.arguments).items()
        if np.ndim(leaf)
    }
    candidates = {
        path: shape for path, shape in shapes.items() if not program.is_declared(path)
    }
    axes = {path: min(axis, len(shape) - 1) for path, shape in candidates.items()}
    sizes = [
        value.shape[min(axis, value.ndim - 1)]
        for value in observed.values()
        if value.ndim
    ]
    sizes += [shapes[path][counted] for path, counted in axes.items()]
    program.count = next(
        (size for size in sizes if any(size in shape for shape in candidates.values())),
        0,
    )
    program.axes = {
        path: counted
        for path, counted in axes.items()
        if shapes[path][counted] == program.count
    }
    if not program.axes or not observed:
        raise InputError(
            "model",
            Fault("observes no array of the data"),
            "a NumPyro model with obs=… of the data",
        )

    placeholders = program.placeholders(program.count)
    on_placeholders = _find_sites(
        lambda arrays: program.without_keys(placeholders, arrays=arrays), initial
    )
    _check_same_sites(on_data, on_placeholders)
    program.observations = observed
    program.full, program.start, program.supports = on_placeholders


def _check_plates(sites: Mapping[str, Site]) -> None:
    """Refuse plates that draw mini-batches: their densities are scaled, and which examples are drawn is random."""
    for name, site in sites.items():
        if site["type"] != "plate":
            continue
        size, subsample_size = site["args"]
        if subsample_size is not None and subsample_size != size:
            wanted = "one of all examples: mini-batches are an option of the posterior, batch=…"
            raise InputError(
                f"site {name}",
                Fault(f"is a plate that draws {subsample_size} of {size}"),
                wanted,
            )


def _check_same_sites(on_data: _Reading, on_placeholders: _Reading) -> None:
    """Refuse a model whose sites, or the values of a discrete one, depend on the data."""
    missing = on_data.sites.keys() ^ on_placeholders.sites.keys()
    if missing:
        raise InputError(f"site {min(missing)}", Fault(DECIDED), TRACEABLE)
    for name, values in on_placeholders.supports.items():
        if not np.array_equal(values, on_data.supports[name]):
            wanted = "one whose values are the same whatever the data, or summed over by hand"
            raise InputError(
                f"site {name}",
                Fault("is discrete with values that depend on the data"),
                wanted,
            )


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
        elif (
            np.prod([values.size for values in program.supports.values()], dtype=float)
            > COMBINATIONS
        ):
            problem, wanted = (
                "has too many values",
                f"at most {COMBINATIONS}, all discrete sites together",
            )
        if problem:
            raise InputError(f"site {name}", Fault(problem), wanted)


class _SiteSources(NamedTuple):
    """What a site is computed from."""

    value: Sources
    density: Sources = NOTHING
    """Of its log-density, with its scale; none for sites without one."""
    scale: Sources = NOTHING
    """Of what `numpyro.handlers.scale` multiplies its density by."""
    law: Sources = NOTHING
    """Of the location and the scale of its law, where it has both."""


def _site_sources(program: _Program, others: ArgumentLeaves) -> dict[str, _SiteSources]:
    """Return what every site of a model on as many placeholders as examples is computed from.

    Args:
        others: arguments that are no examples, to be told apart from constants, by path.
    """
    names = {
        path: DECLARED if program.is_declared(path) else ARGUMENT for path in others
    }
    groups = {
        group: {path: others[path] for path in names if names[path] == group}
        for group in (ARGUMENT, DECLARED)
    }
    examples = program.placeholders(program.count)
    index = examples.pop(EXAMPLE_INDEX)

    def quantities(inputs: dict[str, Any]) -> dict[tuple[str, str], ArrayTree]:
        model = program.cut_to(
            inputs[EXAMPLES] | {EXAMPLE_INDEX: inputs[EXAMPLE_INDEX]},
            inputs[ARGUMENT] | inputs[DECLARED],
        )
        parameters = program.parameters_of(inputs[PARAMETERS], inputs[EXAMPLE_INDEX])
        chosen = program.discrete_values(inputs[CHOSEN], program.count)
        results: dict[tuple[str, str], ArrayTree] = {}
        for name, site in program.trace(model, parameters, chosen).items():
            if site["type"] == "sample":
                scale = 1.0 if site["scale"] is None else site["scale"]
                results[name, "value"] = site["value"]
                results[name, "density"] = (_log_density(site, parameters), scale)
                results[name, "scale"] = scale
                results[name, "law"] = location_and_scale(site["fn"])
            elif site["type"] in ("deterministic", "param", "mutable"):
                results[name, "value"] = site["value"]
        return results

    inputs: dict[str, ArrayTree] = {
        EXAMPLES: examples,
        EXAMPLE_INDEX: index,
        PARAMETERS: program.start,
        CHOSEN: program.first_values,
        **groups,
    }
    by_site: dict[str, dict[str, Sources]] = {}
    for (name, quantity), sources in sources_of(quantities, inputs).items():
        by_site.setdefault(name, {})[quantity] = all_sources(sources)
    return {name: _SiteSources(**sources) for name, sources in by_site.items()}


def _traceable(
    program: _Program,
    others: ArgumentLeaves,
) -> dict[str, Leaf]:
    """Return those of the other arguments that a model takes as arrays, and not as numbers known beforehand."""

    def is_traceable(candidates: ArgumentLeaves) -> bool:
        try:
            _site_sources(program, candidates)
        except Exception:  # whatever a person's model may raise: it may call NumPy, or loop as often as a number says
            return False
        return True

    if not others or is_traceable(others):
        return dict(others)
    return {path: leaf for path, leaf in others.items() if is_traceable({path: leaf})}


def _check_sources(program: _Program) -> None:
    """Tell the sites of examples from those of the prior, and refuse a model whose prior would depend on data."""
    others = program.other_arguments
    # Whole numbers are sizes more often than data, and a size cannot be traced.
    sizes = {
        path: leaf
        for path, leaf in others.items()
        if np.ndim(leaf) == 0 and _kind(leaf) != "f"
    }
    known = {path: leaf for path, leaf in others.items() if path not in sizes}
    traceable = _traceable(program, known)
    untraced = [path for path in known if path not in traceable]
    sources = _site_sources(program, traceable)
    for name, site in program.full.items():
        if name in sources:
            _check_latent_sources(program, name, site["type"], sources[name])

    observed = [name for name, site in program.full.items() if site.get("is_observed")]
    if not all(OF_EXAMPLE & sources[name].density for name in observed):
        numbers = {path: leaf for path, leaf in sizes.items() if leaf != program.count}
        sources = _site_sources(program, traceable | _traceable(program, numbers))
    for name in observed:
        _check_observed_sources(program, name, sources[name], untraced)
    _sort_sites(program, sources)
    numbers = _traceable(
        program, {path: leaf for path, leaf in sizes.items() if leaf != program.count}
    )
    known |= numbers | program.opaque_arguments
    program.not_covered = _not_covered(
        program, known, all_sources([site.density for site in sources.values()])
    )


def _sort_sites(program: _Program, sources: Mapping[str, _SiteSources]) -> None:
    """Sort the sites of a model into those of its examples and all others."""
    of_example: list[str] = []
    prior_sites: list[str] = []
    public_values: list[str] = []
    for name, site in program.full.items():
        if site["type"] == "sample":
            is_summed_over = name in program.supports
            is_in_plate = site["is_observed"] and program.is_cut(name)
            is_own = bool(OF_EXAMPLE & sources[name].density)
            (
                of_example if is_summed_over or is_in_plate or is_own else prior_sites
            ).append(name)
        elif site["type"] == "deterministic" and not OF_EXAMPLE & sources[name].value:
            public_values.append(name)
    program.likelihood = dict.fromkeys(of_example)
    program.prior_sites = tuple(prior_sites)
    program.public_values = tuple(public_values)
    program.is_centred = any(
        PARAMETERS in sources[name].law for name in program.location_scale
    )


def _check_latent_sources(
    program: _Program, name: str, kind: str, sources: _SiteSources
) -> None:
    """Refuse a site whose scale, start or prior depends on examples that are not its own."""
    problem, wanted = "", ""
    is_local = kind == "sample" and program.is_cut(name)
    if kind in ("param", "mutable") and EXAMPLES in sources.value:
        problem = "begins with a value computed from the examples"
        wanted = "initialised without them"
    elif EXAMPLES in sources.scale:
        problem = "has a density that is scaled by the examples"
        wanted = "scaled by public numbers: weights of examples are written with numpyro.factor in their plate"
    elif (
        name in program.start
        and not is_local
        and OF_EXAMPLE & (sources.density | sources.value)
    ):
        problem = "has a prior that depends on the examples"
        wanted = "a variable whose prior is public: give public numbers, named in shared=…, in their place"
    elif name in program.start and EXAMPLES in sources.value:
        problem = "has a support that depends on its example"
        wanted = "one with the same support for all examples"
    if problem:
        raise InputError(f"site {name}", Fault(problem), wanted)


def _check_observed_sources(
    program: _Program, name: str, sources: _SiteSources, untraced: Sequence[str]
) -> None:
    """Refuse an observed site, or a factor, of data that are no examples and that nobody has declared public.

    No clipping limits what a record in such data does to the posterior.

    Args:
        untraced: arguments that any site may depend on, as they cannot be traced.
    """
    undeclared = [path for path in untraced if not program.is_declared(path)]
    may_be_declared = len(undeclared) < len(untraced)
    value_data = {source for source in sources.value if isinstance(source, Constant)}
    density_data = _data_like(program, sources.density)
    if may_be_declared:  # constants may then be computed from an argument that is declared and cannot be traced
        value_data, density_data = set(), set()
    is_value_elsewhere = not OF_EXAMPLE & sources.value and (
        ARGUMENT in sources.value or value_data
    )
    is_site_elsewhere = not OF_EXAMPLE & sources.density
    if is_value_elsewhere or (
        is_site_elsewhere
        and (ARGUMENT in sources.density or density_data or undeclared)
    ):
        problem = (
            f"depends on data that are not split as the {program.count} examples are"
        )
        wanted = "one of the examples (with numpyro.handlers.mask for outcomes that were not measured for all of them)"
        raise InputError(
            f"site {name}",
            Fault(problem),
            f"{wanted}, or of public arguments that shared=… names",
        )


def _data_like(program: _Program, sources: Sources) -> set[Constant]:
    """Return the constants that may be data: libraries have whole numbers of their own, but not of that length."""
    constants = {source for source in sources if isinstance(source, Constant)}
    return {
        constant
        for constant in constants
        if constant.kind == "f" or program.count in constant.shape
    }


def _not_covered(
    program: _Program,
    known: ArgumentLeaves,
    sources: Sources,
) -> dict[str, str]:
    """Return sentences, by name, on what every device knows of a model beside the examples."""
    undeclared = ", ".join(path for path in known if not program.is_declared(path))
    declared = ", ".join(
        path for path in _leaves(program.arguments) if program.is_declared(path)
    )
    shapes = ", ".join(
        sorted({str(constant.shape) for constant in _data_like(program, sources)})
    )
    lists = ", ".join(name for name in program.lists if not program.is_declared(name))
    texts = {
        "arguments of the model": (
            undeclared,
            f"Arguments that are not split as examples are, and that every device knows in full: {undeclared}.",
        ),
        "shared arguments of the model": (
            declared,
            f"Arguments that shared=… declares public, and that every device knows in full: {declared}.",
        ),
        "arrays around the model": (
            shapes,
            f"Arrays that the model takes from outside its arguments, and every device knows, of shapes: {shapes}.",
        ),
        "types of lists": (
            lists,
            f"Whether the numbers of a list are whole, which all of its entries decide (give arrays instead): {lists}.",
        ),
        "memory of the model": (
            not program.runs_on_ones,
            "The model does not run on ones, so that it saw the data first: what its code keeps of them is not seen.",
        ),
    }
    return {name: text for name, (listed, text) in texts.items() if listed}


def _near(program: _Program) -> dict[str, np.ndarray]:
    """Return parameters close to the start, where densities that differ are not equal by accident."""
    generator = np.random.default_rng(0)
    return {
        name: value + 0.1 * generator.standard_normal(value.shape)
        for name, value in program.start.items()
    }


class _Densities(NamedTuple):
    """Log-densities by site, at some parameters and on some examples."""

    whole: Arrays
    """Of the model on all of these examples, and values of deterministic sites."""
    prior: Arrays
    """The same of the model on placeholders."""
    by_example: Arrays
    """Of the model on every example alone, added up; of sites of examples."""
    slopes: Arrays
    """Of `by_example`, all parameters growing at the same pace: not finite where one of their derivatives is not."""


def _check_densities(program: _Program) -> None:
    """Refuse a prior that depends on the number of examples, and examples that are not independent.

    One program computes all densities: most of the time that these checks take XLA compiles.
    """
    near = _near(program)
    placeholders = program.placeholders(program.count)
    chosen = program.first_values

    @jax.jit
    def densities(parameters: Values, examples: Values) -> _Densities:
        def totals(parameters: Values) -> Arrays:
            alone = jax.vmap(
                lambda example: program.of_examples(
                    parameters, _as_row(example), chosen
                )
            )(examples)
            return {name: jnp.sum(alone[name]) for name in program.likelihood}

        growth = jax.tree.map(jnp.ones_like, parameters)
        by_example, slopes = jax.jvp(totals, (parameters,), (growth,))
        return _Densities(
            whole=program.of_examples(parameters, examples, chosen),
            prior=program.prior_densities(parameters),
            by_example=by_example,
            slopes=slopes,
        )

    @jax.jit
    def without_examples(parameters: Values) -> tuple[Arrays, Arrays]:
        return program.of_examples(
            parameters, placeholders, chosen
        ), program.prior_densities(parameters)

    try:
        on_placeholders = densities(near, placeholders)
    except Exception:  # whatever the model raises on one example: what is wrong with its prior is said first
        _check_prior(program, *without_examples(near))
        raise
    _check_prior(program, on_placeholders.whole, on_placeholders.prior)
    examples = program.examples
    _check_sums(
        program,
        near=densities(near, examples),
        start=densities(program.start, examples),
    )


def _check_prior(program: _Program, whole: Values, prior: Values) -> None:
    """Refuse a prior that depends on how many examples there are, or that is not finite.

    Args:
        whole: densities on as many placeholders as there are examples.
        prior: those on placeholders that the prior is computed with.
    """

    def agrees(name: str) -> bool:
        same_shape = whole[name].shape == prior[name].shape
        return same_shape and np.allclose(whole[name], prior[name], equal_nan=True)

    for name in program.prior_sites:
        if not agrees(name):
            problem = "has a prior that depends on the number of examples"
            wanted = "a site in their plate, or one of public arguments: give their number as a float"
            raise InputError(f"site {name}", Fault(problem), wanted)
        if not np.all(np.isfinite(prior[name])):
            raise InputError(f"site {name}", Fault(NON_FINITE), FINITE)
    program.public_values = tuple(
        name for name in program.public_values if agrees(name)
    )
    shapes = {name: whole[name].shape for name in program.likelihood}
    program.likelihood = {
        name: shape.index(program.count) if program.count in shape else None
        for name, shape in shapes.items()
    }


def _check_sums(program: _Program, *, near: _Densities, start: _Densities) -> None:
    """Refuse a model whose examples are not independent, or that has no finite density and gradient at the start.

    Args:
        near: densities on all data, close to the start.
        start: the same at the start.
    """
    for name in program.likelihood:
        plates = program.full[name]["cond_indep_stack"]
        density = np.asarray(near.whole[name])
        size = np.abs(density).sum()
        problem, wanted = "", ""
        if plates and not program.is_cut(name):
            problem = f"is in plate {plates[0].name} of {plates[0].size}"
            wanted = f"in a plate over its {program.count} examples, along example_axis"
        elif not np.isfinite(size) or not np.isfinite(start.slopes[name]):
            problem, wanted = NON_FINITE, FINITE
        elif abs(float(near.by_example[name]) - density.sum()) > AGREES * (
            program.count + size
        ):
            problem = "depends on more than its own example"
            wanted = "independent given the parameters: give lagged values as columns, and public means as arguments"
        if problem:
            raise InputError(f"site {name}", Fault(problem), wanted)
