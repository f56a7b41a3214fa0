"""A model given as two JAX functions, traced once and named by what it computes.

The functions are traced once, and that trace is what runs: what they take from around them may change later without
any effect. The name is that of the traced gradients with their constants. Two runs of one script have equal names, so
that compiled code, checkpoints and ledgers know the model again; functions that compute something else never share one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from numpy.typing import NDArray

from wflmc.posterior.coordinates import Affine, Points
from wflmc.posterior.custom.precision import in_float32
from wflmc.sums.independence import Traced, check_independence, nested_jaxprs
from wflmc.sums.norms import row_norms
from wflmc.sums.record_gradients import (
    RecordGradient,
    inline_call,
    map_equations,
    run_traced,
)
from wflmc.support.errors import Found, InputError
from wflmc.support.keys import digest
from wflmc.support.trees import ArrayTree, DrawFunction, NumericArray, Values

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

Shapes = tuple[tuple[int, ...], ...]
LogLikelihood: TypeAlias = Callable[..., ArrayLike]
"""log p(example|θ), of (parameters, example), in the pytrees that a model has."""
LogPrior: TypeAlias = Callable[..., ArrayLike]
"""log p(θ) up to a constant, of the parameters, in the pytree that a model has."""
ModelFunction: TypeAlias = Callable[..., ArrayTree]
"""A function of pytrees of a model, such as (parameters, input), to another pytree."""
ShapeTree: TypeAlias = (
    jax.ShapeDtypeStruct | Mapping[str, "ShapeTree"] | Sequence["ShapeTree"] | None
)
"""A pytree of shapes and types in place of arrays."""
INDEX = "_example"
"""The number of an example, among its data, where a model of another library asks for it."""
WORKING_BYTES = 2**24
"""Intermediate results at a time, where a function is computed for many draws and examples."""


class Sites(NamedTuple):
    """What a model of another library knows of its parameters beside their density."""

    constrain: Callable[..., Values] | None = None
    """From the parameters of one draw, a pytree, to values by the names of the model's sites; None: as they are."""
    simulate: ModelFunction | None = None
    """Draws what one example's outcomes might have been: of (key, values by site, example)."""
    dims: Mapping[str, Sequence[str]] = {}
    """The names of a site's axes."""
    coords: Mapping[str, Sequence[object]] = {}
    """Labels along axes, by their names."""
    observed: Mapping[str, np.ndarray] = {}
    """What was observed, by site, [N, ...]."""
    scales: Sequence[str] = ()
    """Sites of positive values."""
    together: Callable[..., jax.Array] | None = None
    """log p(example|θ) of several examples at once, of (parameters, examples [n, ...]) -> [n]."""
    apply: ModelFunction | None = None
    """A network's output, of (parameters, input)."""
    functions: Mapping[str, DrawFunction] = {}
    """Of the parameters, to be diagnosed beside them, by name."""
    symmetric: bool = False
    """Whether hidden units may change places: then parameters of different chains need not agree."""
    not_covered: Mapping[str, str] = {}
    """What every device knows of the data beside its own examples, and ε does not cover: a sentence by name."""


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """Where the parameters of a model are in the flat θ[m]."""

    structure: jax.tree_util.PyTreeDef = field(compare=False, repr=False)
    """Of the parameters, as JAX flattens them."""
    shapes: Shapes = field(compare=False, repr=False)
    """Of the arrays of parameters."""
    sites: Sites = field(compare=False, repr=False)
    """What a model of another library knows of its parameters."""

    @property
    def dim(self) -> int:
        """m, the number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def unflatten(self, theta: NumericArray) -> ArrayTree:
        """Return θ[..., m] as the parameters, every leaf with the same leading axes."""
        edges = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        flat = (jnp if isinstance(theta, jax.Array) else np).split(
            theta, edges, axis=-1
        )
        leaves = [
            part.reshape((*part.shape[:-1], *shape))
            for part, shape in zip(flat, self.shapes, strict=True)
        ]
        parameters: ArrayTree = jax.tree.unflatten(self.structure, leaves)
        return parameters


@dataclass(frozen=True)
class TracedModel(ParameterLayout):
    """The functions, and how flat parameters are unflattened for them; equal where names are."""

    likelihood: "ClosedJaxpr" = field(compare=False, repr=False)
    """−log p(example|θ) as a jaxpr of the arrays of parameters and of one example."""
    prior: "ClosedJaxpr" = field(compare=False, repr=False)
    """−log p(θ) as a jaxpr of the arrays of parameters."""
    name: str = ""
    numbers: int = field(default=1, compare=False, repr=False)
    """Intermediate results of one example's log-likelihood, roughly: what a gradient must remember."""
    space: Affine | None = field(default=None, compare=False, repr=False)
    """Coordinates that costs are functions of; None: the parameters."""

    def values(self, theta: NumericArray) -> ArrayTree:
        """Return θ[..., m] as `unflatten` does, or of a model of another library as values by site."""
        parameters, constrain = self.unflatten(theta), self.sites.constrain
        if constrain is None:
            return parameters
        for _ in range(np.ndim(theta) - 1):
            constrain = jax.vmap(constrain)
        with in_float32():
            made = jax.jit(constrain)(parameters)
        return made if isinstance(theta, jax.Array) else jax.tree.map(np.asarray, made)

    def cost(self, theta: jax.Array, example: ArrayTree) -> jax.Array:
        """Return −log p(example|θ), in full float32 also where an accelerator would rather round."""
        return self._run(self.likelihood, theta, example)

    @cached_property
    def record(self) -> RecordGradient:
        """The gradient of the cost of one example."""

        def cost(leaves: list[jax.Array], example: list[jax.Array]) -> jax.Array:
            if self.space is not None:
                return self.cost(
                    jnp.concatenate([jnp.ravel(leaf) for leaf in leaves]), example
                )
            inlined = map_equations(self.likelihood, inline_call)
            return run_traced(inlined, *leaves, *example)[0]

        arrays = [np.zeros(one.shape, one.dtype) for one in self.likelihood.in_avals]
        return RecordGradient(
            cost, arrays[: len(self.shapes)], arrays[len(self.shapes) :]
        )

    def prior_cost(self, theta: jax.Array) -> jax.Array:
        """Return −log p(θ), up to a constant."""
        return self._run(self.prior, theta)

    def parameters(self, phi: Points) -> Points:
        """Return θ[m] of the coordinates φ[m]."""
        return phi if self.space is None else self.space.parameters(phi)

    def moved(self, space: Affine) -> "TracedModel":
        """Return the model with costs of coordinates in place of parameters."""
        return replace(self, space=space, name=digest(self.name.encode(), *space))

    def _run(
        self,
        traced: "ClosedJaxpr",
        theta: jax.Array,
        example: ArrayTree = (),
    ) -> jax.Array:
        values = jax.tree.leaves((self.unflatten(self.parameters(theta)), example))
        return run_traced(traced, *values)[0].astype(theta.dtype)


def checked_arrays(key: str, data: ArrayTree) -> tuple[ArrayTree, int]:
    """Return a pytree of examples as NumPy arrays, and the number of examples."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(data)
    arrays = [
        _checked_array(key + jax.tree_util.keystr(path), leaf) for path, leaf in leaves
    ]
    shapes = [array.shape for array in arrays]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0] or not shapes[0][0]:
        wanted = "(X, y) of at least one example; np.asarray makes one of a list of numbers or rows"
        given = Found(
            f"has arrays of shapes {', '.join(map(str, shapes[:6]))}"
            if arrays
            else "has no arrays"
        )
        raise InputError(
            key,
            given,
            f"an array, or arrays, with the examples along one first axis, such as {wanted}",
        )
    return jax.tree.unflatten(structure, arrays), shapes[0][0]


def _checked_array(key: str, leaf: ArrayLike) -> np.ndarray:
    """Return an array of real numbers that an accelerator can hold."""
    array = np.asarray(leaf)
    if array.dtype == np.longdouble:
        array = array.astype(float)
    if array.dtype.kind not in "fiub":
        wanted = "real numbers: np.unique(values, return_inverse=True)[1] encodes texts as integers"
        raise InputError(key, Found(f"has entries of type {array.dtype}"), wanted)
    if array.dtype.kind in "iu" and array.size:
        held = np.iinfo(accelerator_dtype(array.dtype))
        if int(array.min()) < held.min or int(array.max()) > held.max:
            allowed = f"whole numbers from {held.min} up to {held.max}: scale them, or give floats"
            raise InputError(
                key, Found(f"has whole numbers that {held.dtype} cannot hold"), allowed
            )
    return array


def checked_parameters(
    initial: object,
) -> tuple[NDArray[np.float64], jax.tree_util.PyTreeDef, Shapes]:
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
        raise InputError(
            "initial",
            Found("has no parameters, or nan or infinite ones"),
            "at least one array, finite",
        )
    return flat, structure, tuple(array.shape for array in arrays)


def accelerator_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the type of numbers on an accelerator: float32 for floats, at most 32 bits for whole numbers."""
    given = np.dtype(dtype)
    if given.kind == "f":
        return np.dtype(np.float32)
    return (
        np.dtype(f"{given.kind}4")
        if given.kind in "iu" and given.itemsize > 4
        else given
    )


def on_device(values: Points) -> Points:
    """Return an array in the type of numbers on an accelerator, also where a process has float64 switched on."""
    return values.astype(accelerator_dtype(values.dtype))


def shape_of(
    key: str,
    function: object,
    wanted: str,
    call: ModelFunction,
    *arguments: ArrayTree,
) -> ShapeTree:
    """Return the shapes of what `call`, which calls a person's function, would return; refuse a function that fails."""
    if not callable(function):
        raise InputError(key, function, wanted)
    try:
        shapes: ShapeTree = jax.eval_shape(call, *arguments)
        return shapes
    except Exception as error:  # whatever a person's function may raise
        said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][
            :200
        ].rstrip(".: ")
        if isinstance(
            error, jax.errors.JAXTypeError | jax.errors.JAXIndexError
        ):  # values that are only being traced
            wanted += ": use jax.numpy in place of numpy and float(), and jnp.where in place of if, range(n) and masks"
        raise InputError(key, Found(f"fails: {said}"), wanted) from error


def _check_number(key: str, wanted: str, result: ShapeTree, *kinds: DTypeLike) -> None:
    """Refuse the shapes of a function's result where that is not one number of these kinds."""
    leaves = jax.tree.leaves(result)
    if (
        len(leaves) != 1
        or leaves[0].shape != ()
        or not any(jnp.issubdtype(leaves[0].dtype, kind) for kind in kinds)
    ):
        shown = (
            ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
        )
        raise InputError(
            key,
            Found(f"returns {shown}"),
            f"{wanted}, that returns one floating-point number",
        )


def _shapes_of(tree: ArrayTree) -> str:
    """Return the shapes of a tree's arrays, in its structure, as a short text."""
    shown = str(jax.tree.map(lambda leaf: tuple(leaf.shape), tree))
    return shown if len(shown) <= 120 else shown[:117] + "..."


def trace_model(
    log_likelihood: LogLikelihood,
    log_prior: LogPrior,
    layout: ParameterLayout,
    data: ArrayTree,
) -> TracedModel:
    """Return functions of parameters, traced on one example.

    Args:
        log_likelihood: of parameters and one example.
        log_prior: of parameters.
        layout: of the parameters.
        data: examples, a pytree of arrays [N, ...].

    Returns:
        The model, named by what it computes.

    Raises:
        InputError: where a function fails, does not return one number, or could let
            one example change the gradient of another.
    """
    theta = np.zeros(layout.dim, np.float32)
    example = jax.tree.map(lambda array: on_device(array[0]), data)
    sizes = f"parameters of shape {_shapes_of(layout.unflatten(theta))}"
    wanted = f"a JAX function of (parameters, example), with {sizes} and ONE example of shape {_shapes_of(example)}"
    alone = f"a JAX function of parameters alone, with {sizes}"

    def likelihood(theta: jax.Array, example: ArrayTree) -> ArrayLike:
        return log_likelihood(layout.unflatten(theta), example)

    def prior(theta: jax.Array) -> ArrayLike:
        return log_prior(layout.unflatten(theta))

    found = shape_of(
        "log_likelihood", log_likelihood, wanted, likelihood, theta, example
    )
    _check_number("log_likelihood", wanted, found, jnp.floating)
    found = shape_of("log_prior", log_prior, alone, prior, theta)
    _check_number(
        "log_prior", alone, found, jnp.floating, jnp.integer
    )  # 0 is the usual flat one
    with jax.default_matmul_precision("highest"):
        parameters = layout.unflatten(theta)
        cost = jax.make_jaxpr(
            lambda p, e: -jnp.asarray(log_likelihood(p, e), theta.dtype)
        )(parameters, example)
        prior_cost = jax.make_jaxpr(lambda p: -jnp.asarray(log_prior(p), theta.dtype))(
            parameters
        )
    check_independence(
        "log_likelihood", cost
    )  # before a gradient, which of some operations there is none
    check_independence("log_prior", prior_cost)
    model = TracedModel(
        structure=layout.structure,
        shapes=layout.shapes,
        sites=layout.sites,
        likelihood=cost,
        prior=prior_cost,
    )
    gradient = jax.make_jaxpr(jax.value_and_grad(model.cost))(theta, example)
    prior_gradient = jax.make_jaxpr(jax.value_and_grad(model.prior_cost))(theta)
    check_independence("log_likelihood", gradient, *_trace_together(model, data))
    check_independence("log_prior", prior_gradient)
    gradients = gradient, prior_gradient
    inputs = {id(variable) for variable in gradient.jaxpr.invars[1:]}
    if not any(
        id(value) in inputs
        for equation in gradient.jaxpr.eqns
        for value in equation.invars
    ):
        instead = "data that it takes from elsewhere would count once for every example of every device"
        raise InputError(
            "log_likelihood",
            Found("does not look at its example"),
            f"{wanted}: {instead}",
        )
    parts = [
        text.encode()
        for text in (str(model.structure), str(model.shapes), *map(str, gradients))
    ]
    inner = [jaxpr for one in gradients for jaxpr in nested_jaxprs(one)]
    constants = [value for jaxpr in inner for value in getattr(jaxpr, "consts", ())]
    return replace(
        model,
        name=digest(*parts, *map(_plain, constants)),
        numbers=max(1, result_size(cost)),
    )


def _trace_together(model: TracedModel, data: ArrayTree) -> "list[ClosedJaxpr]":
    """Return the traced gradient of the log-likelihood of two examples at once, where a model has such a function.

    It is what devices that are clipped as a whole compute, and devices are computed at once as well.
    """
    together = model.sites.together
    if together is None:
        return []

    def total(theta: jax.Array, examples: ArrayTree) -> jax.Array:
        return jnp.sum(together(model.unflatten(theta), examples))

    examples = jax.tree.map(lambda array: on_device(array[:2]), data)
    return [
        jax.make_jaxpr(jax.value_and_grad(total))(
            np.zeros(model.dim, np.float32), examples
        )
    ]


def _plain(value: ArrayLike) -> np.ndarray:
    """Return a constant as an array, a random key by its data."""
    typed = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if typed else value)


def result_size(jaxpr: Traced) -> int:
    """Return how many numbers all equations of a jaxpr compute."""
    outputs = (
        out
        for inner in nested_jaxprs(jaxpr)
        for equation in inner.eqns
        for out in equation.outvars
    )
    return sum(int(np.prod(getattr(out.aval, "shape", ()))) for out in outputs)


@partial(jax.jit, static_argnums=(0, 3))
def costs_and_norms(
    model: TracedModel, examples: ArrayTree, theta: jax.Array, at_a_time: int
) -> tuple[jax.Array, jax.Array]:
    """Return the cost of every example, and the norm of its gradient, [N]."""

    def one(example: ArrayTree) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(model.cost)(theta, example)
        return value, row_norms(gradient)

    return jax.lax.map(one, examples, batch_size=at_a_time)


@partial(jax.jit, static_argnums=0)
def per_example(
    function: ModelFunction,
    draws: ArrayTree,
    examples: ArrayTree,
) -> ArrayTree:
    """Return function(draw, example) for all of draws[D, ...] and examples[n, ...], [D, n, ...]."""
    numbers = result_size(
        jax.make_jaxpr(function)(
            *jax.tree.map(lambda values: values[0], (draws, examples))
        )
    )
    count, many = (len(jax.tree.leaves(values)[0]) for values in (draws, examples))
    at_a_time = int(np.clip(WORKING_BYTES // (4 * count * max(1, numbers)), 1, many))

    def of(draw: ArrayTree) -> ArrayTree:
        return jax.lax.map(
            lambda example: function(draw, example), examples, batch_size=at_a_time
        )

    return jax.vmap(of)(draws)


def predictive_mean(
    model: TracedModel,
    function: ModelFunction,
    theta: jax.Array,
    inputs: ArrayTree,
) -> ArrayTree:
    """Average function(parameters, input) over draws: theta[chain, draw, m], inputs[n, ...] -> [chain, n, ...]."""
    given = jax.tree.map(jnp.asarray, checked_arrays("inputs", inputs)[0])
    one = jax.tree.map(lambda values: values[0], given)
    wanted = f"a JAX function of (parameters, input), with ONE of the inputs of shape {_shapes_of(one)}"
    shape_of(
        "function",
        function,
        wanted,
        lambda at, u: function(model.values(at), u),
        theta[0, 0],
        one,
    )
    return _predictive_mean(model, function, theta, given)


@partial(jax.jit, static_argnums=(0, 1))
def _predictive_mean(
    model: TracedModel,
    function: ModelFunction,
    theta: jax.Array,
    inputs: ArrayTree,
) -> ArrayTree:
    def at(draw: jax.Array) -> ArrayTree:
        values = model.values(draw)
        return jax.vmap(lambda given: function(values, given))(inputs)

    def chain(draws: jax.Array) -> ArrayTree:
        first = jax.tree.map(
            lambda shape: jnp.zeros(shape.shape, jnp.float32),
            jax.eval_shape(at, draws[0]),
        )
        total = jax.lax.scan(
            lambda so_far, draw: (jax.tree.map(jnp.add, so_far, at(draw)), None),
            first,
            draws,
        )[0]
        return jax.tree.map(lambda values: values / draws.shape[0], total)

    return jax.lax.map(chain, theta)
