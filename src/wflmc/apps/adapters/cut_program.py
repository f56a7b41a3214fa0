"""A NumPyro model with its data, evaluated on some of the examples.

A model is cut to some examples: arguments that count examples, and plates over them,
are cut to these, and whole numbers among the arguments that are N become their number.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.apps.adapters.numpyro_types import (
    Arrays,
    Model,
    Site,
    bijection,
    constrain,
    library,
    location_and_scale,
    seeded,
    visit_at,
)
from wflmc.posterior.custom import CustomPosterior, posterior_from
from wflmc.posterior.custom.model import EXAMPLE_INDEX, Sites
from wflmc.posterior.custom.precision import in_float64
from wflmc.support.errors import Fault, InputError, without_data
from wflmc.support.trees import Values

LeafPath: TypeAlias = tuple[Hashable, ...]
"""Of a leaf in a pytree, as JAX names it."""
Leaf: TypeAlias = jax.typing.ArrayLike
"""Of an argument. NumPy takes an object that is no number for an array without axes."""
ArgumentLeaves: TypeAlias = Mapping[str, Leaf]
"""Leaves of the arguments of a model, by path."""
DiscreteValues: TypeAlias = Mapping[str, jax.Array | np.integer]
"""One value of every discrete latent site, by name."""

REAL_KINDS = ("f", "i", "u", "b")
"""Kinds of NumPy's numbers that a density can be computed from.

These are floating-point numbers, whole numbers with and without sign, and truth values.
"""
OBJECT_KIND = "O"
"""The kind of NumPy's arrays of objects."""
FAR_BELOW_START = 50
"""Distance below the start, in unconstrained space, at which a site's sign is read.

The exponential of −50 is still a positive number, and a positive site is near 0 there.
"""


class Refusal(NamedTuple):
    """Why a site is refused, and what it has to be instead."""

    fault: str
    """What is wrong, in words that follow the name of the site."""
    requirement: str
    """The end of the sentence "it must be ..."."""


CONTROL_FLOW = Refusal(
    "depends on control flow by data or parameters",
    "decided without looking at values: use jnp.where, or numpyro.handlers.mask, in "
    "place of if",
)


def refuse_site(name: str, refusal: Refusal | None) -> None:
    """Raise the error about a site that there is a reason to refuse.

    The sentence is "site NAME <fault>, but it must be <requirement>".

    Args:
        name: of the site.
        refusal: the reason; None where there is none, and nothing happens.

    Raises:
        InputError: names the site.
    """
    if refusal is not None:
        raise InputError(f"site {name}", Fault(refusal.fault), refusal.requirement)


@without_data
@dataclass
class Program:
    """A model with its data, how it is cut to some examples, and what its sites are.

    The functions that read a model fill in the fields one after the other: first the
    examples, then the sites, then which of these belong to an example.
    """

    model: Model
    arguments: dict[str, object]
    """By name; each a pytree."""
    shared: tuple[str, ...] = ()
    """Names of arguments that are declared public."""
    list_arguments: tuple[str, ...] = ()
    """Names of arguments that were passed as lists.

    One entry with a fraction makes floats of all their numbers.
    """
    runs_on_ones: bool = True
    """Whether the model ran on ones before it saw data.

    It then cannot have kept any private value from its first call.
    """
    example_axes: dict[str, int] = field(default_factory=dict)
    """Of the leaves that are examples, by path: the axis that counts them."""
    count: int = 0
    """N. Plates of this size, and arguments that are this number, are cut as well."""
    sites: dict[str, Site] = field(default_factory=dict)
    """On as many placeholders as there are examples, at the start."""
    observations: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of the observed sites."""
    start: dict[str, np.ndarray] = field(default_factory=dict)
    """Unconstrained values of the latent sites that are parameters."""
    supports: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of the discrete latent sites, which are summed over."""
    likelihood_axes: dict[str, int | None] = field(default_factory=dict)
    """Of the sample sites of an example: the axis of their log-densities that counts
    examples, if there is one."""
    prior_sites: tuple[str, ...] = ()
    """All other sample sites."""
    public_values: tuple[str, ...] = ()
    """Deterministic sites that do not depend on the examples."""
    is_centred: bool = False
    """Whether the location or the scale of a latent site is another parameter.

    So it is in a hierarchy that is written without offsets.
    """
    not_covered: dict[str, str] = field(default_factory=dict)
    """What every device knows in full and ε does not cover: a sentence by name."""

    @property
    def examples(self) -> dict[str, np.ndarray]:
        """The data of examples by path, [N, ...], and their numbers.

        The axis that counts examples comes first, whatever it is in the arguments. The
        numbers from 0 to N − 1 are under `EXAMPLE_INDEX`: by them an example finds its
        own entries of parameters that have one for each.
        """
        leaves = leaves_by_path(self.arguments)
        arrays = {}
        for path, axis in self.example_axes.items():
            values = np.asarray(leaves[path])
            arrays[path] = np.moveaxis(values, axis, 0)
        arrays[EXAMPLE_INDEX] = np.arange(self.count, dtype=np.int32)
        return arrays

    @property
    def numeric_arguments(self) -> dict[str, Leaf]:
        """Arguments that are numbers and no examples, by path.

        Every device knows them. They are arrays of other lengths than N, declared
        arguments, and single numbers such as N itself; texts, functions and random keys
        are not among them.
        """
        return {
            path: leaf
            for path, leaf in leaves_by_path(self.arguments).items()
            if path not in self.example_axes and number_kind(leaf) in REAL_KINDS
        }

    @property
    def opaque_arguments(self) -> dict[str, Leaf]:
        """Arguments that are objects other than functions, by path.

        Numbers in them cannot be traced, so that no equation shows whether a density is
        computed from them. They are listed in `not_covered`, as every device knows
        them.
        """
        return {
            path: leaf
            for path, leaf in leaves_by_path(self.arguments).items()
            if number_kind(leaf) == OBJECT_KIND and not callable(leaf)
        }

    def is_declared(self, path: str) -> bool:
        """Return whether an argument, or a part of one, is declared public.

        The names in `shared` are those of arguments; a leaf of a pytree belongs to the
        argument that its path begins with. Declared arguments are no examples, even
        where they are as long as the observations.
        """
        return path.split(".")[0] in self.shared

    def placeholders(self, rows: int) -> dict[str, np.ndarray]:
        """Return examples of ones, with their numbers.

        They have the shapes and types of the data and none of its values, and are all
        that the prior sees of examples.

        Args:
            rows: how many.

        Returns:
            Arrays [rows, ...] by path; the numbers of the rows, from 0, under
            `EXAMPLE_INDEX`.
        """
        ones = {
            path: np.ones((rows, *values.shape[1:]), values.dtype)
            for path, values in self.examples.items()
            if path != EXAMPLE_INDEX
        }
        return ones | {EXAMPLE_INDEX: np.arange(rows, dtype=np.int32)}

    @property
    def local_axes(self) -> dict[str, int]:
        """The axis that counts examples, of latent sites with a value for every one.

        These are continuous sites in a plate of size N, which are kept as parameters.
        The axis is the first of length N in the value of the site. Sites of all
        examples, such as weights, are not among them.
        """
        shapes = {
            name: np.shape(self.sites[name]["value"])
            for name in self.start
            if self.is_in_example_plate(name)
        }
        return {name: shape.index(self.count) for name, shape in shapes.items()}

    @property
    def location_scale_sites(self) -> list[str]:
        """Latent sites that can be written as location + scale * offset.

        They are those whose law has both and takes all real values, after its
        transformations; NumPyro's `LocScaleReparam` rewrites them. A hierarchy that has
        no mode as it is written may have one with offsets.
        """
        return [
            name
            for name in self.start
            if location_and_scale(self.sites[name]["fn"]) is not None
        ]

    @property
    def observed(self) -> dict[str, np.ndarray]:
        """Observations of sites of an example, by site, [N, ...].

        The axis that counts examples comes first. Factors and observations without an
        axis of length N are left out: they have no value for one example that could be
        simulated.
        """
        values = {}
        for name, value in self.observations.items():
            if name in self.likelihood_axes and self.count in value.shape:
                axis = value.shape.index(self.count)
                values[name] = np.moveaxis(value, axis, 0)
        return values

    @property
    def dims(self) -> dict[str, list[str]]:
        """Names of the axes of every site, as ArviZ takes them.

        An axis along a plate has the name of the plate. Every other axis, such as those
        of one draw of a vector, is called `<site>_dim_<number>`.
        """
        return {name: _axis_names(name, site) for name, site in self.sites.items()}

    def is_in_example_plate(self, name: str) -> bool:
        """Return whether a site is in a plate over examples, which has size N.

        A plate of another meaning that has N entries by accident counts as one over
        examples, and is cut as such. Continuous latent sites in one become parameters
        with a value for every example.
        """
        frames = self.sites[name]["cond_indep_stack"]
        return any(frame.size == self.count for frame in frames)

    def posterior(
        self,
        coords: Mapping[str, Sequence[object]] | None,
        **options: Any,
    ) -> CustomPosterior:
        """Return the posterior of the model as it is cut.

        Sites whose values are not negative even far below the start in unconstrained
        space are named as scales.

        Args:
            coords: labels along plates, by the plate's name; None for none.
            **options: those of `posterior_from`, such as `devices`.

        Returns:
            The posterior of the parameters, which are unconstrained inside.

        Raises:
            InputError: as of `posterior_from`, for a model without a mode among others.
        """
        with in_float64():  # in which these bijections are compiled already
            low_values = {
                name: bijection(self.sites[name])(-start - FAR_BELOW_START)
                for name, start in self.start.items()
            }
        scales = [
            name for name, value in low_values.items() if np.all(np.asarray(value) >= 0)
        ]
        batched_log_likelihood = None
        if None not in self.likelihood_axes.values():
            batched_log_likelihood = self.log_likelihoods
        sites = Sites(
            constrain=self.constrained_values,
            simulate=self.simulate,
            dims=self.dims,
            coords=coords or {},
            observed=self.observed,
            scales=scales,
            batched_log_likelihood=batched_log_likelihood,
            not_covered=self.not_covered,
        )
        return posterior_from(
            self.log_likelihood,
            self.log_prior,
            self.examples,
            initial=self.start,
            sites=sites,
            **options,
        )

    def seeded_model_on(
        self,
        examples: Values,
        replaced: ArgumentLeaves | None = None,
    ) -> Model:
        """Return the model on some examples, with a fixed random key.

        It can be traced by JAX. Latent sites still draw their values unless these are
        substituted.

        Args:
            examples: [rows, ...] by path, with their numbers.
            replaced: as of `model_on`.

        Returns:
            A model without arguments.
        """
        return seeded(self.model_on(examples, replaced))

    def model_on(
        self,
        examples: Values,
        replaced: ArgumentLeaves | None = None,
        arrays: ModuleType = jnp,
    ) -> Model:
        """Return the model, without arguments and random keys, on some examples.

        Arguments that count examples are these examples, whole numbers that are N are
        their number, and plates of size N have as many entries.

        Args:
            examples: [rows, ...] by path, with their numbers.
            replaced: other arguments to put in place of the model's own, by path.
            arrays: `jax.numpy` or `numpy`, whose arrays the model gets.

        Returns:
            A model that needs a random key where it draws.
        """
        rows = examples[EXAMPLE_INDEX].shape[0]
        replacements = replaced or {}

        def cut_leaf(path: LeafPath, leaf: Leaf) -> Leaf:
            name = path_name(path)
            if name in self.example_axes:
                return arrays.moveaxis(examples[name], 0, self.example_axes[name])
            if name in replacements:
                return replacements[name]
            is_count = isinstance(leaf, int | np.integer) and leaf == self.count
            return rows if is_count else leaf

        def cut_plate(site: Site) -> jax.Array | None:
            if site["type"] == "plate" and site["args"][0] == self.count:
                return jnp.arange(rows)
            return None

        arguments = jax.tree_util.tree_map_with_path(cut_leaf, self.arguments)
        substitute = library().handlers.substitute
        return substitute(lambda: self.model(**arguments), substitute_fn=cut_plate)

    def trace(
        self, model: Model, parameters: Values, discrete: Values
    ) -> dict[str, Site]:
        """Return the sites of a cut model at some parameters.

        Parameters are constrained first, by the transformations that the model itself
        has at these values.

        Args:
            model: of `seeded_model_on`.
            parameters: unconstrained values of its latent sites.
            discrete: values of its discrete sites.

        Returns:
            The sites by name, in the order in which the model visits them.
        """
        return visit_at(model, {**constrain(model, parameters), **discrete})

    @property
    def first_values(self) -> DiscreteValues:
        """The first value of every discrete latent site."""
        return {name: values[0] for name, values in self.supports.items()}

    def densities(self, model: Model, parameters: Values, discrete: Values) -> Arrays:
        """Return log-densities of sample sites, and values of deterministic ones.

        Densities of latent sites include the log-Jacobian of their transformation. They
        lack the factor by which NumPyro makes up for plates that are cut: the scale of
        a site is that on all placeholders, and not that of the cut model. It is a
        constant, since scales computed from examples or latent values are refused.

        Args:
            model: of `seeded_model_on`.
            parameters: unconstrained values of its latent sites.
            discrete: values of its discrete sites.

        Returns:
            Arrays by site; sites of other types are left out.
        """
        results: Arrays = {}
        for name, site in self.trace(model, parameters, discrete).items():
            if site["type"] == "sample":
                scale = self.sites[name]["scale"]
                density = log_density(site, parameters)
                results[name] = density if scale is None else scale * density
            elif site["type"] == "deterministic":
                results[name] = site["value"]
        return results

    def parameters_of(
        self, parameters: Values, index: jax.Array | np.ndarray
    ) -> Values:
        """Return the parameters that the model has on some examples.

        Every other parameter is common to all examples.

        Args:
            parameters: unconstrained values by site, of all N examples.
            index: numbers of the examples, [rows].

        Returns:
            The same values; those of sites with a value for every example are cut to
            these examples.
        """
        local = {
            name: jnp.take(parameters[name], index, axis)
            for name, axis in self.local_axes.items()
        }
        return {**parameters, **local}

    def discrete_values(self, discrete: DiscreteValues, rows: int) -> Arrays:
        """Return values of discrete sites, the same for every example.

        The likelihood sums over such values, one combination after the other.

        Args:
            discrete: one value of every site.
            rows: how many examples the model is cut to.

        Returns:
            Arrays of the shapes that the sites have on so many examples.
        """
        arrays: Arrays = {}
        for name, value in discrete.items():
            shape = self.sites[name]["value"].shape
            cut_shape = [rows if size == self.count else size for size in shape]
            arrays[name] = jnp.full(cut_shape, value)
        return arrays

    def densities_on(
        self,
        parameters: Values,
        examples: Values,
        discrete: DiscreteValues,
    ) -> Arrays:
        """Return `densities` on some examples with equal discrete values.

        Args:
            parameters: unconstrained values by site, of all N examples.
            examples: [rows, ...] by path, with their numbers.
            discrete: one value of every discrete site.

        Returns:
            Log-densities and values of deterministic sites, by site.
        """
        index = examples[EXAMPLE_INDEX]
        return self.densities(
            self.seeded_model_on(examples),
            self.parameters_of(parameters, index),
            self.discrete_values(discrete, index.size),
        )

    def log_likelihoods(self, parameters: Values, examples: Values) -> jax.Array:
        """Return log p(example|θ) of some examples.

        Discrete latent variables of an example are summed over: the log of the sum of
        p(example, z|θ) over all combinations z of their values.

        Args:
            parameters: unconstrained values by site, of all N examples.
            examples: [rows, ...] by path, with their numbers.

        Returns:
            The log-likelihood of each, [rows].
        """

        def conditional(discrete: DiscreteValues) -> jax.Array:
            return self._conditional_log_likelihoods(parameters, examples, discrete)

        if not self.supports:
            return conditional({})
        combinations = np.array(list(product(*self.supports.values())))
        by_site = jnp.asarray(combinations.T)
        discrete = dict(zip(self.supports, by_site, strict=True))
        return jax.nn.logsumexp(jax.vmap(conditional)(discrete), axis=0)

    def _conditional_log_likelihoods(
        self, parameters: Values, examples: Values, discrete: DiscreteValues
    ) -> jax.Array:
        """Return log p(example, z|θ) of examples with the same discrete values z."""
        rows = examples[EXAMPLE_INDEX].shape[0]
        densities = self.densities_on(parameters, examples, discrete)
        total = jnp.zeros(rows)
        for name, axis in self.likelihood_axes.items():
            density = densities[name]
            if rows != 1 and axis is not None:
                density = jnp.moveaxis(density, axis, 0)
            total = total + density.reshape(rows, -1).sum(1)
        return total

    def log_likelihood(self, parameters: Values, example: Values) -> jax.Array:
        """Return log p(example|θ), summed over the example's discrete variables.

        It is the likelihood of the posterior: the gradient of one example is clipped to
        the threshold of a record.

        Args:
            parameters: unconstrained values by site, of all N examples.
            example: arrays by path, with its number.

        Returns:
            A number.
        """
        return self.log_likelihoods(parameters, as_row(example))[0]

    @property
    def prior_rows(self) -> int:
        """How many placeholders the prior is computed with.

        One is enough, unless parameters have a value for every example: then N. A prior
        that depends on this number is refused when the model is read.
        """
        return self.count if self.local_axes else 1

    def prior_densities(self, parameters: Values) -> Arrays:
        """Return `densities` on placeholders.

        Those of `prior_sites` and `public_values` hold for any data, since no equation
        leads from an example to them; those of other sites mean nothing. Discrete sites
        have their first value, which reaches no prior site either.
        """
        placeholders = self.placeholders(self.prior_rows)
        discrete = self.discrete_values(self.first_values, self.prior_rows)
        model = self.seeded_model_on(placeholders)
        return self.densities(model, parameters, discrete)

    def log_prior(self, parameters: Values) -> jax.Array:
        """Return the log-density of everything that belongs to no example.

        It includes the log-Jacobians of latent sites, observations of public arguments
        and factors that do not depend on examples. No value of an example enters it,
        and it is never clipped. Parameters are unconstrained values by site.
        """
        densities = self.prior_densities(parameters)
        terms = (jnp.sum(densities[name]) for name in self.prior_sites)
        return sum(terms, start=jnp.zeros(()))

    def constrained_values(self, parameters: Values) -> Arrays:
        """Return the values of latent sites by name.

        Values are in the space of the sites, for unconstrained parameters.
        Deterministic sites that do not depend on the examples are returned as well;
        others are left out, because the model runs on placeholders here.
        """
        model = self.seeded_model_on(self.placeholders(self.prior_rows))
        values = constrain(model, parameters, deterministic=True)
        names = self.start.keys() | set(self.public_values)
        return {name: value for name, value in values.items() if name in names}

    def simulate(self, key: jax.Array, values: Values, example: Values) -> Arrays:
        """Draw the observed sites of one example by NumPyro's Predictive.

        Args:
            key: random.
            values: of latent sites by name, in the space of the sites.
            example: arrays by path, with its number; what is observed is ignored.

        Returns:
            Draws by site, each of the shape of one example's observation.
        """
        index = example[EXAMPLE_INDEX][None]
        latent = {name: jnp.asarray(values[name]) for name in self.start}
        for name, axis in self.local_axes.items():
            latent[name] = jnp.take(latent[name], index, axis)
        shapes = {name: value.shape[1:] for name, value in self.observed.items()}
        cut_model = self.seeded_model_on(as_row(example))
        model = library().handlers.uncondition(cut_model)
        predictive = library().infer.Predictive(
            model, latent, return_sites=[*shapes], batch_ndims=0
        )
        draws = predictive(key)
        return {name: jnp.reshape(draws[name], shape) for name, shape in shapes.items()}


def _axis_names(name: str, site: Site) -> list[str]:
    """Return names of the axes of a site's value: of its plates, or numbered."""
    shape = np.shape(site["value"])
    event_rank = len(getattr(site.get("fn"), "event_shape", ()))
    names = [f"{name}_dim_{axis}" for axis in range(len(shape))]
    for frame in site.get("cond_indep_stack", ()):
        axis = frame.dim - event_rank
        if len(shape) >= -axis and shape[axis] == frame.size:
            names[axis] = frame.name
    return names


def path_name(path: LeafPath) -> str:
    """Return the path of a leaf as a text, its keys joined by dots, such as `X.0`.

    The name of the argument comes first. Keys that have dots may make the paths of two
    leaves equal; arguments are refused then.
    """
    return jax.tree_util.keystr(path, simple=True, separator=".")


def leaves_by_path(tree: Mapping[str, object]) -> dict[str, Leaf]:
    """Return the leaves of a pytree by path.

    Of two leaves with the same path, as keys with dots can make them, the last one is
    returned; a model's arguments are checked for that beforehand.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def number_kind(leaf: Leaf) -> str:
    """Return the kind of an argument's numbers, as NumPy names kinds.

    It is f, i, u or b for numbers that a density can be computed from, an empty text
    for a random key, and `O` for an object that is no number. A list or a number of
    Python has the kind of the array that NumPy makes of it.
    """
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return getattr(dtype, "kind", "")


def as_row(example: Values) -> Arrays:
    """Return the arrays of one example in the shape of several examples, [1, ...].

    Models see examples along an axis, also where there is one only; its number becomes
    an array of one number.
    """
    return {name: jnp.asarray(value)[None] for name, value in example.items()}


def log_density(site: Site, parameters: Values) -> jax.Array:
    """Return the unscaled log-density of a sample site.

    Scales of `numpyro.handlers.scale` and of plates are left to the caller.

    Args:
        site: with its value.
        parameters: unconstrained values of latent sites; the density of one of these
            includes the log-Jacobian of its transformation.

    Returns:
        The log-density over the batch axes of the site.
    """
    name = site["name"]
    law = site["fn"]
    value = site["value"]
    density = law.log_prob(value)
    if name not in parameters:
        return density
    log_det = bijection(site).log_abs_det_jacobian(parameters[name], value)
    event_axes = range(jnp.ndim(value) - len(law.event_shape), jnp.ndim(log_det))
    return density + jnp.sum(log_det, tuple(event_axes))
