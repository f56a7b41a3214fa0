r"""Gradients of single records of any JAX model, of which each is clipped.

What one record adds to the gradient of a dense layer's weights is a product
$x\delta^\top$ of what entered the layer and of what came back. Its norm is
$\lVert x\rVert\,\lVert\delta\rVert$, and one matrix product adds such products of many
records: none of them is ever written (docs/explanation/privacy.md, Sums, step 3).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from wflmc.sums.constants import RECORD_SQUARES_PER_STAGE
from wflmc.sums.independence import check_independence, is_jaxpr
from wflmc.sums.norms import additions, sum_squares
from wflmc.sums.pairs import barrier
from wflmc.support.errors import without_data
from wflmc.support.trees import ArrayTree, NumericArray

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
"""A pytree of arrays."""

RESHAPING = ("reshape", "transpose", "squeeze")
"""Primitives that give a product of vectors another shape or order."""
CONVOLUTION = "conv_general_dilated"
"""The primitive of convolutions."""


# Traced functions.


def run_traced(traced: "ClosedJaxpr", *values: ArrayLike) -> list[jax.Array]:
    """Call a traced function, its arguments converted to the types of the trace.

    Other types would make `jax.jit` trace anew. Here the Python code that was traced
    does not run again, so that what it reads from around cannot have changed.

    Args:
        traced: a closed jaxpr.
        *values: its arguments, flat.

    Returns:
        Its results, flat.
    """
    # This import brings Pallas along, which `wflmc plan` need not wait for.
    from jax.extend.core import jaxpr_as_fun

    declared = zip(values, traced.in_avals, strict=True)
    arguments = [jnp.asarray(value, shape.dtype) for value, shape in declared]
    return jaxpr_as_fun(traced)(*arguments)


def map_equations(
    traced: "ClosedJaxpr",
    change: Callable[["JaxprEqn"], "JaxprEqn"],
) -> "ClosedJaxpr":
    """Return a traced function with every equation changed.

    Functions within equations, such as bodies of loops, are changed too, from the
    inside out. A change must keep the variables that an equation reads and writes.

    Args:
        traced: the function.
        change: from an equation to another one. Equations of the functions that an
            equation calls are changed before it.

    Returns:
        The function with the same constants.
    """
    return _with_jaxpr(traced, _map_jaxpr(traced.jaxpr, change))


def _map_jaxpr(
    jaxpr: "Jaxpr",
    change: Callable[["JaxprEqn"], "JaxprEqn"],
) -> "Jaxpr":
    """Return equations, and those of the functions that they call, changed."""
    # This import brings Pallas along, which `wflmc plan` need not wait for.
    from jax.extend.core import ClosedJaxpr, Jaxpr

    def changed_value(value: object) -> object:
        if isinstance(value, ClosedJaxpr):
            return map_equations(value, change)
        if isinstance(value, Jaxpr):
            return _map_jaxpr(value, change)
        return value

    def changed_equation(equation: "JaxprEqn") -> "JaxprEqn":
        params = jax.tree.map(changed_value, equation.params, is_leaf=is_jaxpr)
        return change(equation.replace(params=params))

    equations = [changed_equation(equation) for equation in jaxpr.eqns]
    return jaxpr.replace(eqns=equations)  # type: ignore[no-untyped-call]


def _with_jaxpr(traced: "ClosedJaxpr", jaxpr: "Jaxpr") -> "ClosedJaxpr":
    """Return other equations with the constants of a traced function."""
    return traced.replace(jaxpr=jaxpr)  # type: ignore[no-untyped-call]


def _bind(equation: "JaxprEqn", *operands: jax.Array) -> jax.Array:
    """Apply an equation that has one result to other operands of the same shapes."""
    bind = equation.primitive.bind
    return bind(*operands, **equation.params)  # type: ignore[no-untyped-call]


def _shape_of(variable: "Var | Literal") -> "ShapedArray":
    """Return the shape and the type of a variable that is an array."""
    return cast("ShapedArray", variable.aval)


def inline_call(equation: "JaxprEqn") -> "JaxprEqn":
    """Mark a call of a `jax.jit` function, so that its equations replace it.

    A product of two vectors is only recognised where its equation stands in the trace
    itself, not behind a call. Other equations are returned as they are.

    Args:
        equation: of a trace, as `map_equations` passes it.
    """
    if "inline" not in equation.params:
        return equation
    inline = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
    return equation.replace(params={**equation.params, "inline": inline})


def with_fast_convolutions(
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """Return a function with its convolutions in the order that XLA is fast with.

    On a CPU, XLA brings dimensions into that order by itself, but not in loops, such as
    those over rounds and blocks of devices.

    Args:
        function: of pytrees of arrays.

    Returns:
        The same function; on an accelerator, `function` itself.
    """

    def ordered(*values: Arguments.args, **named: Arguments.kwargs) -> Result:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*values, **named)
        changed = map_equations(traced, _order_convolution)
        results = run_traced(changed, *jax.tree.leaves((values, named)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered if jax.default_backend() == "cpu" else function


def _order_convolution(equation: "JaxprEqn") -> "JaxprEqn":
    """Return a convolution as one of rows [n, ..., in] and kernels [..., in, out]."""
    if equation.primitive.name != CONVOLUTION:
        return equation
    declared = equation.params["dimension_numbers"]
    last = len(declared.lhs_spec) - 1
    rows = (0, last, *range(1, last))
    kernels = (last, last - 1, *range(last - 1))
    standard = jax.lax.ConvDimensionNumbers(rows, kernels, rows)

    def moved(
        values: jax.Array,
        source: Sequence[int],
        target: Sequence[int],
    ) -> jax.Array:
        return values.transpose([source[role] for role in np.argsort(target)])

    def convolve(left: jax.Array, right: jax.Array) -> jax.Array:
        operands = (
            moved(left, declared.lhs_spec, standard.lhs_spec),
            moved(right, declared.rhs_spec, standard.rhs_spec),
        )
        params = {**equation.params, "dimension_numbers": standard}
        result = _bind(equation.replace(params=params), *operands)
        return moved(result, standard.out_spec, declared.out_spec)

    shapes = [variable.aval for variable in equation.invars]
    call = jax.make_jaxpr(jax.jit(convolve))(*shapes).eqns[0]
    return call.replace(invars=equation.invars, outvars=equation.outvars)


# Gradients.


@without_data
class ArrayGradients(NamedTuple):
    """Gradients of n records with respect to one array of parameters."""

    right: jax.Array
    """[n, size], or the second vectors of products, [n, q]."""
    left: jax.Array | None = None
    """The first vectors, [n, p], whose largest number is 1."""
    reshaping: tuple["JaxprEqn", ...] = ()
    """Equations from a product to the array of parameters, the last one first."""

    def squares(self, scale: jax.Array) -> jax.Array:
        """Return the squared norms of `scale` times the gradients (Sums, step 3).

        The squared norm of a product of two vectors is the product of theirs. With the
        clipping threshold as the unit, no square that matters is out of float32's
        range.

        Args:
            scale: one over the unit.

        Returns:
            [n].
        """
        right = sum_squares(self.right * scale, stage=RECORD_SQUARES_PER_STAGE)
        if self.left is None:
            return right
        return right * sum_squares(self.left, stage=RECORD_SQUARES_PER_STAGE)

    def weighted(self, weights: jax.Array) -> jax.Array:
        """Return Σ_n w_n g_n, one matrix product of all records.

        Products of two vectors are never written: the weights go to the right vectors.
        The sum is brought to the order of the array of parameters afterwards.

        Args:
            weights: w[n], the clipping factors.

        Returns:
            [size], the array flat.
        """
        if self.left is None:
            return jnp.matmul(weights, self.right, precision="highest")
        right = weights[:, None] * self.right
        total = jnp.matmul(self.left.T, right, precision="highest")
        for equation in reversed(self.reshaping):
            shape = _shape_of(equation.invars[0]).shape
            total = _bind(equation, total.reshape(shape))
        return total.ravel()

    def without(self, nonfinite: jax.Array) -> "ArrayGradients":
        """Return the gradients with zeros for records that have no finite gradient.

        A factor of 0 alone would not do: 0 times infinity is not a number, and it would
        spread to the whole sum.

        Args:
            nonfinite: which records these are, [n].
        """
        return self._replace(right=jnp.where(nonfinite[:, None], 0.0, self.right))


@without_data
class Factored(NamedTuple):
    """An output of a trace, as the vectors whose product it is, or by itself."""

    vectors: "list[Var | Literal]"
    """Variables of the trace: two vectors, or the output alone."""
    reshaping: tuple["JaxprEqn", ...]
    """Equations from the product to the output, the last one first."""

    @property
    def sizes(self) -> list[int]:
        """Return how many numbers every vector has: one or two lengths.

        They are those of one record. For a product of vectors their sum is far less
        than the size of the array of parameters, which is their product.
        """
        return [int(np.prod(_shape_of(vector).shape)) for vector in self.vectors]

    @property
    def additions(self) -> int:
        """Return the most additions that a square goes through (Sums, step 3).

        Squares of either vector are added in stages of 4,096; the norm of a product has
        the rounding of both. `bound.traced_norm_error` takes this number.
        """
        return sum(additions(size, RECORD_SQUARES_PER_STAGE) for size in self.sizes)


class RecordGradient:
    """The traced gradient of a cost of (arrays of parameters, record).

    Where the gradient is a product of two vectors, the trace returns these.
    """

    def __init__(
        self,
        cost: Callable[[list[jax.Array], list[jax.Array]], jax.Array],
        leaves: Sequence[NumericArray],
        record: Sequence[NumericArray],
    ):
        """Trace the gradient.

        Args:
            cost: of a list of arrays and of one record.
            leaves: arrays of the parameters' shapes.
            record: of a record's shapes.

        Raises:
            InputError: where one record could change the gradient of another.
        """
        traced = jax.make_jaxpr(jax.grad(cost))(leaves, record)
        # A rule of `jax.custom_vjp` is Python code, which may act otherwise than when
        # the model was checked.
        check_independence("log_likelihood", traced)
        sources = {}
        for equation in traced.eqns:
            for output in equation.outvars:
                sources[id(output)] = equation
        self._outputs = [_factored(sources, out) for out in traced.jaxpr.outvars]
        vectors = [vector for output in self._outputs for vector in output.vectors]
        jaxpr: Jaxpr = traced.jaxpr
        jaxpr = jaxpr.replace(outvars=vectors)  # type: ignore[no-untyped-call]
        self._run = partial(run_traced, _with_jaxpr(traced, jaxpr))

    @property
    def size(self) -> int:
        """Return how many numbers one record's gradient takes, as vectors.

        It decides how many records are computed at a time within the memory. A dense
        layer counts with its inputs plus its outputs, not with their product.
        """
        return sum(sum(output.sizes) for output in self._outputs)

    @property
    def additions(self) -> int:
        """Return the most additions that a square goes through within its array.

        The array of parameters with the longest sum decides. Those across arrays come
        on top, one for each array (`bound.traced_norm_error`).
        """
        return max(output.additions for output in self._outputs)

    def of(
        self,
        leaves: Sequence[jax.Array],
        records: ArrayTree,
    ) -> list[ArrayGradients]:
        """Return the gradients of records, by array of parameters.

        All records are computed at once, with vectors in place of their products. A
        barrier keeps XLA from computing them twice, for the norms and for the sum.

        Args:
            leaves: arrays of parameters, as the trace has them.
            records: a pytree of arrays [n, ...].

        Returns:
            One entry for each array of parameters.
        """

        def gradient(record: ArrayTree) -> list[jax.Array]:
            return self._run(*leaves, *jax.tree.leaves(record))

        vectors = barrier(jax.vmap(gradient)(records))
        flat = iter([values.reshape(len(values), -1) for values in vectors])
        arrays = []
        for output in self._outputs:
            of_array = list(islice(flat, len(output.vectors)))
            arrays.append(_array_gradients(of_array, output.reshaping))
        return arrays


def _array_gradients(
    vectors: list[jax.Array],
    reshaping: tuple["JaxprEqn", ...],
) -> ArrayGradients:
    """Return gradients whose left vectors have a largest number of 1.

    Then no square of either vector is too large or too small on its own.
    """
    if len(vectors) == 1:
        return ArrayGradients(vectors[0])
    left, right = vectors
    largest = jnp.abs(left).max(1, keepdims=True)
    usable = (largest > 0) & jnp.isfinite(largest)
    scaled = jnp.where(usable, left / largest, 0.0)
    return ArrayGradients(right * largest, scaled, reshaping)


def _factored(sources: "dict[int, JaxprEqn]", output: "Var | Literal") -> Factored:
    """Return the vectors whose product an output of a trace is, or the output itself.

    Args:
        sources: the equation of every variable, by the variable's id.
        output: a variable of the trace.
    """
    reshaping = []
    equation = sources.get(id(output))
    while equation is not None and equation.primitive.name in RESHAPING:
        reshaping.append(equation)
        equation = sources.get(id(equation.invars[0]))
    if equation is not None and _is_outer_product(equation):
        return Factored(list(equation.invars), tuple(reshaping))
    return Factored([output], ())


def _is_outer_product(equation: "JaxprEqn") -> bool:
    """Return whether an equation multiplies vectors and sums over nothing."""
    if equation.primitive.name != "dot_general":
        return False
    variables = (*equation.invars, *equation.outvars)
    sizes = [int(np.prod(_shape_of(variable).shape)) for variable in variables]
    left, right, product = sizes
    same_type = len({_shape_of(variable).dtype for variable in variables}) == 1
    return same_type and left * right == product and left + right < product
