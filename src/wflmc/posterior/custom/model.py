"""A model given as two JAX functions, traced once and named by what it computes.

The functions are traced once, and that trace is what runs: what they take from around
them may change later without any effect. The name is that of the traced gradients with
their constants. Two runs of one script have equal names, so that compiled code,
checkpoints and ledgers recognise the model; functions that compute something else never
share one.
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
from wflmc.support.errors import Fault, InputError
from wflmc.support.keys import digest
from wflmc.support.trees import ArrayTree, DrawFunction, NumericArray, Values

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

Shapes = tuple[tuple[int, ...], ...]
"""Of several arrays."""
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
EXAMPLE_INDEX = "_example"
"""The name under which an example's data hold its number, where a model of another
library asks for it."""
WORKING_BYTES = 2**24
"""Bytes of intermediate results at a time, where a function is computed for many draws
and examples."""
MAX_SHOWN_SHAPES = 6
"""Shapes that an error lists."""
MAX_SHAPE_TEXT = 120
"""Characters of a pytree of shapes in an error."""
MAX_ERROR_TEXT = 200
"""Characters of another function's error that an error quotes."""


class Sites(NamedTuple):
    """What a model of another library knows of its parameters beside their density."""

    constrain: Callable[..., Values] | None = None
    """From the parameters of one draw, a pytree, to values by the names of the model's
    sites; None: as they are."""
    simulate: ModelFunction | None = None
    """Draws outcomes of one example: of (key, values by site, example)."""
    dims: Mapping[str, Sequence[str]] = {}
    """The names of a site's axes."""
    coords: Mapping[str, Sequence[object]] = {}
    """Labels along axes, by their names."""
    observed: Mapping[str, np.ndarray] = {}
    """What was observed, by site, [N, ...]."""
    scales: Sequence[str] = ()
    """Sites of positive values."""
    batched_log_likelihood: Callable[..., jax.Array] | None = None
    """log p(example|θ) of several examples at once: of (parameters, examples [n, ...])
    to [n]."""
    apply: ModelFunction | None = None
    """A network's output, of (parameters, input)."""
    functions: Mapping[str, DrawFunction] = {}
    """Of the parameters, to be diagnosed beside them, by name."""
    symmetric: bool = False
    """Whether hidden units may be exchanged: then parameters of different chains need
    not agree."""
    not_covered: Mapping[str, str] = {}
    """What every device knows of the data beside its own examples, and ε does not
    cover: a sentence by name."""


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
        """Return m, the number of parameters in all arrays."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def unflatten(self, theta: NumericArray) -> ArrayTree:
        """Return flat parameters as the pytree that the model's functions take.

        Args:
            theta: θ[..., m], of JAX or NumPy.

        Returns:
            The pytree; every array has the same leading axes, and is of the same kind.
        """
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        library = jnp if isinstance(theta, jax.Array) else np
        flat_leaves = library.split(theta, np.cumsum(sizes)[:-1], axis=-1)
        leaves = []
        for flat, shape in zip(flat_leaves, self.shapes, strict=True):
            leaves.append(flat.reshape((*flat.shape[:-1], *shape)))
        parameters: ArrayTree = jax.tree.unflatten(self.structure, leaves)
        return parameters


@dataclass(frozen=True)
class TracedModel(ParameterLayout):
    """The traced functions, and how flat parameters are unflattened for them.

    Models are equal where their names are.
    """

    likelihood: "ClosedJaxpr" = field(compare=False, repr=False)
    """−log p(example|θ) as a jaxpr of the arrays of parameters and of one example."""
    prior: "ClosedJaxpr" = field(compare=False, repr=False)
    """−log p(θ) as a jaxpr of the arrays of parameters."""
    name: str = ""
    intermediate_size: int = field(default=1, compare=False, repr=False)
    """Intermediate numbers of one example's log-likelihood, roughly: what a gradient
    must remember."""
    space: Affine | None = field(default=None, compare=False, repr=False)
    """Coordinates that costs are functions of; None: the parameters."""

    def values(self, theta: NumericArray) -> ArrayTree:
        """Return flat parameters as users know them.

        For a model of another library these are values by site, in the space of the
        site's support; otherwise the pytree of `unflatten`.

        Args:
            theta: parameters θ[..., m], of JAX or NumPy.

        Returns:
            The pytree, with the same leading axes, of arrays of the same kind.
        """
        parameters = self.unflatten(theta)
        constrain = self.sites.constrain
        if constrain is None:
            return parameters
        for _ in range(np.ndim(theta) - 1):
            constrain = jax.vmap(constrain)
        with in_float32():
            values = jax.jit(constrain)(parameters)
        if isinstance(theta, jax.Array):
            return values
        return jax.tree.map(np.asarray, values)

    def cost(self, theta: jax.Array, example: ArrayTree) -> jax.Array:
        """Compute −log p(example|θ).

        In full float32, also where an accelerator would rather round products.

        Args:
            theta: φ[m] of `space`, or θ[m] without one.
            example: one example, a pytree of arrays.

        Returns:
            A number.
        """
        return self._run(self.likelihood, theta, example)

    @cached_property
    def record_gradient(self) -> RecordGradient:
        """Return the traced gradient of the cost of one example.

        Traced once per model, when it is first needed. Without coordinates, calls in
        the likelihood are inlined, so that products of two vectors are seen.
        """

        def cost(leaves: list[jax.Array], example: list[jax.Array]) -> jax.Array:
            if self.space is not None:
                flat = jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])
                return self.cost(flat, example)
            inlined = map_equations(self.likelihood, inline_call)
            return run_traced(inlined, *leaves, *example)[0]

        avals = self.likelihood.in_avals
        arrays = [np.zeros(aval.shape, aval.dtype) for aval in avals]
        leaf_count = len(self.shapes)
        return RecordGradient(cost, arrays[:leaf_count], arrays[leaf_count:])

    def prior_cost(self, theta: jax.Array) -> jax.Array:
        """Compute −log p(θ), up to a constant.

        It is the whole prior, of which a device has one part in K.

        Args:
            theta: φ[m] of `space`, or θ[m] without one.

        Returns:
            A number.
        """
        return self._run(self.prior, theta)

    def parameters(self, phi: Points) -> Points:
        """Map the coordinates of `space` to parameters.

        Args:
            phi: φ[m].

        Returns:
            θ[m]; `phi` itself where there are no coordinates.
        """
        return phi if self.space is None else self.space.parameters(phi)

    def in_coordinates(self, space: Affine) -> "TracedModel":
        """Return the model with costs of coordinates in place of parameters.

        It has another name: chains on it are others.

        Args:
            space: the coordinates φ[m] with θ = centre + W φ.
        """
        return replace(self, space=space, name=digest(self.name.encode(), *space))

    def _run(
        self,
        traced: "ClosedJaxpr",
        theta: jax.Array,
        example: ArrayTree = (),
    ) -> jax.Array:
        """Return the number that a traced function has at φ[m] and an example."""
        parameters = self.unflatten(self.parameters(theta))
        values = jax.tree.leaves((parameters, example))
        return run_traced(traced, *values)[0].astype(theta.dtype)


def checked_arrays(key: str, data: ArrayTree) -> tuple[ArrayTree, int]:
    """Return a pytree of examples as NumPy arrays, and their number.

    Args:
        key: the argument that the data were passed for.
        data: arrays, or lists of numbers, [N, ...] with the same N ≥ 1.

    Returns:
        The pytree of arrays, and N.

    Raises:
        InputError: names the array that is not of real numbers, that a float32
            accelerator cannot hold, or whose length differs.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(data)
    arrays = []
    for path, leaf in leaves:
        arrays.append(_checked_array(key + jax.tree_util.keystr(path), leaf))
    shapes = [array.shape for array in arrays]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or not shapes[0] or not shapes[0][0]:
        problem = "has no arrays"
        if arrays:
            shown_shapes = ", ".join(map(str, shapes[:MAX_SHOWN_SHAPES]))
            problem = f"has arrays of shapes {shown_shapes}"
        requirement = (
            "an array, or arrays, with the examples along one first axis, such as "
            "(X, y) of at least one example; np.asarray makes one of a list of numbers "
            "or rows"
        )
        raise InputError(key, Fault(problem), requirement)
    return jax.tree.unflatten(structure, arrays), shapes[0][0]


def _checked_array(key: str, leaf: ArrayLike) -> np.ndarray:
    """Return an array of real numbers that an accelerator can hold."""
    array = np.asarray(leaf)
    if array.dtype == np.longdouble:
        array = array.astype(float)
    if array.dtype.kind not in "fiub":
        problem = f"has entries of type {array.dtype}"
        requirement = (
            "real numbers: np.unique(values, return_inverse=True)[1] encodes texts as "
            "integers"
        )
        raise InputError(key, Fault(problem), requirement)
    if array.dtype.kind in "iu" and array.size:
        _check_integers(key, array)
    return array


def _check_integers(key: str, array: np.ndarray) -> None:
    """Refuse whole numbers that an accelerator cannot hold."""
    limits = np.iinfo(accelerator_dtype(array.dtype))
    if int(array.min()) >= limits.min and int(array.max()) <= limits.max:
        return
    problem = f"has whole numbers that {limits.dtype} cannot hold"
    requirement = (
        f"whole numbers from {limits.min} up to {limits.max}: scale them, or give "
        "floats"
    )
    raise InputError(key, Fault(problem), requirement)


def checked_parameters(
    initial: object,
) -> tuple[NDArray[np.float64], jax.tree_util.PyTreeDef, Shapes]:
    """Return the starting parameters as one flat array, and where they belong.

    Args:
        initial: a pytree of floating-point arrays or numbers.

    Returns:
        θ[m] in float64, the structure of the pytree, and the shapes of its arrays.

    Raises:
        InputError: names the leaf that is no floating-point array; or where there are
            no parameters, or nan or infinite ones.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(initial)
    arrays = []
    for path, leaf in leaves:
        if not jnp.issubdtype(np.asarray(leaf).dtype, jnp.floating):
            key = "initial" + jax.tree_util.keystr(path)
            requirement = (
                "a floating-point array, such as 0.0 for 0: leave out what is no "
                "parameter, as eqx.partition(model, eqx.is_inexact_array) does, and "
                "put it back as eqx.combine does"
            )
            raise InputError(key, leaf, requirement)
        arrays.append(np.asarray(leaf, dtype=float))
    flat = np.concatenate([np.zeros(0), *(array.ravel() for array in arrays)])
    if not flat.size or not np.all(np.isfinite(flat)):
        problem = Fault("has no parameters, or nan or infinite ones")
        raise InputError("initial", problem, "at least one array, finite")
    return flat, structure, tuple(array.shape for array in arrays)


def accelerator_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the type in which an accelerator holds numbers of a type.

    Args:
        dtype: of an array on the host.

    Returns:
        float32 for floats, at most 32 bits for whole numbers; booleans stay.
    """
    host_dtype = np.dtype(dtype)
    if host_dtype.kind == "f":
        return np.dtype(np.float32)
    if host_dtype.kind in "iu" and host_dtype.itemsize > 4:
        return np.dtype(f"{host_dtype.kind}4")
    return host_dtype


def on_device(values: Points) -> Points:
    """Return an array in the type of numbers on an accelerator.

    It does so also where a process has float64 switched on.

    Args:
        values: of any shape, of JAX or NumPy.

    Returns:
        The same numbers as `accelerator_dtype` says, of the same kind of array.
    """
    return values.astype(accelerator_dtype(values.dtype))


def shape_of(
    key: str,
    function: object,
    requirement: str,
    call: ModelFunction,
    *arguments: ArrayTree,
) -> ShapeTree:
    """Return the shapes of what a user's function returns, without computing it.

    Args:
        key: the argument that the function was passed for.
        function: as the user passed it.
        requirement: what it must be, for errors.
        call: calls the function with arrays such as `arguments`.
        *arguments: pytrees of arrays.

    Returns:
        The pytree of shapes and types.

    Raises:
        InputError: if it is no function, or fails; the sentence quotes its error, and
            says what to use where NumPy or Python met a traced value.
    """
    if not callable(function):
        raise InputError(key, function, requirement)
    try:
        shapes: ShapeTree = jax.eval_shape(call, *arguments)
        return shapes
    except Exception as error:  # whatever a user's function may raise
        message = f"{type(error).__name__}: {str(error).strip()}"
        first_line = message.splitlines()[0][:MAX_ERROR_TEXT].rstrip(".: ")
        problem = Fault(f"fails: {first_line}")
        if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
            requirement += (
                ": use jax.numpy in place of numpy and float(), and jnp.where in place "
                "of if, range(n) and masks"
            )
        raise InputError(key, problem, requirement) from error


def _check_number(
    key: str, requirement: str, result: ShapeTree, *kinds: DTypeLike
) -> None:
    """Refuse the shapes of a function's result unless it is one number of a kind.

    Args:
        key: the argument that the function was passed for.
        requirement: what it must be, for errors.
        result: as of `shape_of`.
        *kinds: types of numbers that are allowed.
    """
    leaves = jax.tree.leaves(result)
    if len(leaves) == 1 and leaves[0].shape == ():
        dtype = leaves[0].dtype
        if any(jnp.issubdtype(dtype, kind) for kind in kinds):
            return
    shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    problem = Fault(f"returns {shown or 'nothing'}")
    requirement = f"{requirement}, that returns one floating-point number"
    raise InputError(key, problem, requirement)


def _shape_text(tree: ArrayTree) -> str:
    """Return the shapes of a tree's arrays, in its structure, as a short text."""
    shapes = str(jax.tree.map(lambda leaf: tuple(leaf.shape), tree))
    if len(shapes) <= MAX_SHAPE_TEXT:
        return shapes
    return shapes[: MAX_SHAPE_TEXT - 3] + "..."


def trace_model(
    log_likelihood: LogLikelihood,
    log_prior: LogPrior,
    layout: ParameterLayout,
    data: ArrayTree,
) -> TracedModel:
    """Trace a model's functions, on one example.

    Within `in_float32` alone: the model's name is that of its float32 gradients.

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
    requirement = _likelihood_requirement(layout, example)
    _check_functions(log_likelihood, log_prior, layout, example)
    cost, prior_cost = _trace_costs(log_likelihood, log_prior, layout, example)
    # Before a gradient, which some operations do not have.
    check_independence("log_likelihood", cost)
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
    batched_gradients = _trace_batched_gradient(model, data)
    check_independence("log_likelihood", gradient, *batched_gradients)
    check_independence("log_prior", prior_gradient)
    _check_example_is_used(gradient, requirement)
    return replace(
        model,
        name=_model_name(layout, (gradient, prior_gradient)),
        intermediate_size=max(1, result_size(cost)),
    )


def _likelihood_requirement(layout: ParameterLayout, example: ArrayTree) -> str:
    """Return what a log-likelihood must be, for errors."""
    return (
        f"a JAX function of (parameters, example), with {_parameter_shapes(layout)} "
        f"and ONE example of shape {_shape_text(example)}"
    )


def _parameter_shapes(layout: ParameterLayout) -> str:
    """Return the shapes of the parameters in words."""
    parameters = layout.unflatten(np.zeros(layout.dim, np.float32))
    return f"parameters of shape {_shape_text(parameters)}"


def _check_functions(
    log_likelihood: LogLikelihood,
    log_prior: LogPrior,
    layout: ParameterLayout,
    example: ArrayTree,
) -> None:
    """Refuse functions that fail, or do not return one number."""
    theta = np.zeros(layout.dim, np.float32)

    def likelihood(theta: jax.Array, example: ArrayTree) -> ArrayLike:
        return log_likelihood(layout.unflatten(theta), example)

    def prior(theta: jax.Array) -> ArrayLike:
        return log_prior(layout.unflatten(theta))

    key = "log_likelihood"
    requirement = _likelihood_requirement(layout, example)
    result = shape_of(key, log_likelihood, requirement, likelihood, theta, example)
    _check_number(key, requirement, result, jnp.floating)
    key = "log_prior"
    requirement = (
        f"a JAX function of parameters alone, with {_parameter_shapes(layout)}"
    )
    result = shape_of(key, log_prior, requirement, prior, theta)
    # The whole number 0 is the usual flat prior.
    _check_number(key, requirement, result, jnp.floating, jnp.integer)


def _trace_costs(
    log_likelihood: LogLikelihood,
    log_prior: LogPrior,
    layout: ParameterLayout,
    example: ArrayTree,
) -> "tuple[ClosedJaxpr, ClosedJaxpr]":
    """Return −log p(example|θ) and −log p(θ) as jaxprs of pytrees, in float32."""
    parameters = layout.unflatten(np.zeros(layout.dim, np.float32))

    def cost(parameters: ArrayTree, example: ArrayTree) -> jax.Array:
        return -jnp.asarray(log_likelihood(parameters, example), np.float32)

    def prior_cost(parameters: ArrayTree) -> jax.Array:
        return -jnp.asarray(log_prior(parameters), np.float32)

    with jax.default_matmul_precision("highest"):
        traced_cost = jax.make_jaxpr(cost)(parameters, example)
        traced_prior_cost = jax.make_jaxpr(prior_cost)(parameters)
    return traced_cost, traced_prior_cost


def _trace_batched_gradient(model: TracedModel, data: ArrayTree) -> "list[ClosedJaxpr]":
    """Return the traced gradient of two examples at once, where a model has one.

    It is what devices that are clipped as a whole compute, and devices are computed at
    once as well. Models without a batched log-likelihood have no such gradient.
    """
    batched_log_likelihood = model.sites.batched_log_likelihood
    if batched_log_likelihood is None:
        return []

    def total(theta: jax.Array, examples: ArrayTree) -> jax.Array:
        return jnp.sum(batched_log_likelihood(model.unflatten(theta), examples))

    theta = np.zeros(model.dim, np.float32)
    examples = jax.tree.map(lambda array: on_device(array[:2]), data)
    return [jax.make_jaxpr(jax.value_and_grad(total))(theta, examples)]


def _check_example_is_used(gradient: "ClosedJaxpr", requirement: str) -> None:
    """Refuse a log-likelihood that does not look at its example."""
    example_variables = {id(variable) for variable in gradient.jaxpr.invars[1:]}
    for equation in gradient.jaxpr.eqns:
        if any(id(value) in example_variables for value in equation.invars):
            return
    requirement += (
        ": data that it takes from elsewhere would count once for every example of "
        "every device"
    )
    problem = Fault("does not look at its example")
    raise InputError("log_likelihood", problem, requirement)


def _model_name(
    layout: ParameterLayout, gradients: "tuple[ClosedJaxpr, ClosedJaxpr]"
) -> str:
    """Return a digest of what the gradients of likelihood and prior compute."""
    texts = [str(layout.structure), str(layout.shapes), *map(str, gradients)]
    constants: list[ArrayLike] = []
    for gradient in gradients:
        for jaxpr in nested_jaxprs(gradient):
            constants += getattr(jaxpr, "consts", ())
    encoded = [text.encode() for text in texts]
    return digest(*encoded, *map(_constant_array, constants))


def _constant_array(value: ArrayLike) -> np.ndarray:
    """Return a constant as an array, a random key by its data."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def result_size(jaxpr: Traced) -> int:
    """Return how many numbers all equations of a jaxpr compute.

    It bounds the memory that the program needs if nothing is freed.

    Args:
        jaxpr: of a traced function; equations of nested ones count as well.
    """
    size = 0
    for inner in nested_jaxprs(jaxpr):
        for equation in inner.eqns:
            shapes = [getattr(out.aval, "shape", ()) for out in equation.outvars]
            size += sum(int(np.prod(shape)) for shape in shapes)
    return size


@partial(jax.jit, static_argnums=(0, 3))
def costs_and_norms(
    model: TracedModel, examples: ArrayTree, theta: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """Compute the cost of every example, and the norm of its gradient.

    Args:
        model: the costs, and their coordinates.
        examples: a pytree of arrays [N, ...].
        theta: φ[m] of the model's coordinates.
        block: examples that are computed at a time.

    Returns:
        Costs [N] and norms [N].
    """

    def of_example(example: ArrayTree) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(model.cost)(theta, example)
        return value, row_norms(gradient)

    return jax.lax.map(of_example, examples, batch_size=block)


@partial(jax.jit, static_argnums=0)
def per_example(
    function: ModelFunction,
    draws: ArrayTree,
    examples: ArrayTree,
) -> ArrayTree:
    """Compute a function of every pair of a draw and an example.

    As many examples are computed at a time as `WORKING_BYTES` hold for all draws.

    Args:
        function: of (draw, example).
        draws: a pytree of arrays [D, ...].
        examples: a pytree of arrays [n, ...].

    Returns:
        The pytree that the function returns, of arrays [D, n, ...].
    """
    first_draw = jax.tree.map(lambda values: values[0], draws)
    first_example = jax.tree.map(lambda values: values[0], examples)
    numbers = result_size(jax.make_jaxpr(function)(first_draw, first_example))
    draw_count = len(jax.tree.leaves(draws)[0])
    example_count = len(jax.tree.leaves(examples)[0])
    bytes_per_example = 4 * draw_count * max(1, numbers)
    block = int(np.clip(WORKING_BYTES // bytes_per_example, 1, example_count))

    def of_draw(draw: ArrayTree) -> ArrayTree:
        def of_example(example: ArrayTree) -> ArrayTree:
            return function(draw, example)

        return jax.lax.map(of_example, examples, batch_size=block)

    return jax.vmap(of_draw)(draws)


def predictive_mean(
    model: TracedModel,
    function: ModelFunction,
    theta: jax.Array,
    inputs: ArrayTree,
) -> ArrayTree:
    """Average a function of parameters and inputs over the draws of each chain.

    Args:
        model: whose parameters are drawn.
        function: of (parameters, one input); parameters are those of `values`.
        theta: parameters θ[chain, draw, m].
        inputs: a pytree of arrays [n, ...].

    Returns:
        The pytree that the function returns, of arrays [chain, n, ...].

    Raises:
        InputError: for inputs that are no arrays, or a function that fails.
    """
    arrays, _ = checked_arrays("inputs", inputs)
    arrays = jax.tree.map(jnp.asarray, arrays)
    first_input = jax.tree.map(lambda values: values[0], arrays)
    requirement = (
        "a JAX function of (parameters, input), with ONE of the inputs of shape "
        f"{_shape_text(first_input)}"
    )

    def call(draw: jax.Array, single_input: ArrayTree) -> ArrayTree:
        return function(model.values(draw), single_input)

    shape_of("function", function, requirement, call, theta[0, 0], first_input)
    return _predictive_mean(model, function, theta, arrays)


@partial(jax.jit, static_argnums=(0, 1))
def _predictive_mean(
    model: TracedModel,
    function: ModelFunction,
    theta: jax.Array,
    inputs: ArrayTree,
) -> ArrayTree:
    """Return `predictive_mean` of inputs that are checked, one chain at a time."""

    def of_draw(draw: jax.Array) -> ArrayTree:
        values = model.values(draw)
        return jax.vmap(lambda single_input: function(values, single_input))(inputs)

    def add(total: ArrayTree, draw: jax.Array) -> tuple[ArrayTree, None]:
        return jax.tree.map(jnp.add, total, of_draw(draw)), None

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(leaf.shape, jnp.float32)

    def of_chain(draws: jax.Array) -> ArrayTree:
        draw_count = draws.shape[0]
        shapes = jax.eval_shape(of_draw, draws[0])
        start = jax.tree.map(zeros, shapes)
        total, _ = jax.lax.scan(add, start, draws)
        return jax.tree.map(lambda values: values / draw_count, total)

    return jax.lax.map(of_chain, theta)
