"""Gradients of single records of any JAX model, for a clip of each; of a dense layer's weights without their products.

What one record adds to the gradient of a matrix of weights is the product of what the layer was given and of what came
back. Both vectors say its norm, and one matrix product adds such products of many records, none of which is written.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.sums.independence import check_independence
from wflmc.sums.pairs import RECORD_STAGE, additions, barrier, sum_squares

ORDERS = "reshape", "transpose", "squeeze"
"""Operations that give a product of vectors another shape or order."""


def run(traced: Any, *values: Any) -> list[jax.Array]:
    """Return what a traced function gives for numbers that may be of other types than those that it was traced for."""
    from jax.extend.core import jaxpr_as_fun  # brings Pallas along, which `wflmc plan` need not wait for

    given = [jnp.asarray(value, wanted.dtype) for value, wanted in zip(values, traced.in_avals, strict=True)]
    return jaxpr_as_fun(traced)(*given)


def rewritten(traced: Any, change: Callable[[Any], Any]) -> Any:
    """Return a traced function with every equation changed, and before that those of the functions that it calls."""

    def inner(value: Any) -> Any:
        return rewritten(value, change) if hasattr(value, "eqns") else value

    jaxpr = getattr(traced, "jaxpr", traced)  # a closed one has constants beside its equations
    params = [jax.tree.map(inner, one.params, is_leaf=lambda value: hasattr(value, "eqns")) for one in jaxpr.eqns]
    changed = jaxpr.replace(eqns=[change(one.replace(params=new)) for one, new in zip(jaxpr.eqns, params, strict=True)])
    return changed if jaxpr is traced else traced.replace(jaxpr=changed)


def inlined(equation: Any) -> Any:
    """Return a call of a function wrapped in `jax.jit` as one that leaves that function's equations in its place."""
    now = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
    return equation.replace(params={**equation.params, "inline": now}) if "inline" in equation.params else equation


def in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with its convolutions in the order of dimensions that XLA is fast with on a CPU.

    XLA brings them there by itself, but not in loops, such as those over rounds and blocks of devices.
    """

    def made(*values: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*values)
        results = run(rewritten(traced, _ordered), *jax.tree.leaves(values))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return made if jax.default_backend() == "cpu" else function


def _ordered(equation: Any) -> Any:
    """Return a convolution as one of rows [n, ..., in] and kernels [..., in, out]; any other equation as it is."""
    if equation.primitive.name != "conv_general_dilated":
        return equation
    given = equation.params["dimension_numbers"]
    last = len(given.lhs_spec) - 1
    rows = 0, last, *range(1, last)
    wanted = jax.lax.ConvDimensionNumbers(rows, (last, last - 1, *range(last - 1)), rows)

    def moved(values: jax.Array, source: Any, target: Any) -> jax.Array:
        return values.transpose([source[role] for role in np.argsort(target)])

    def convolve(*values: jax.Array) -> jax.Array:
        standard = [moved(value, *specs) for value, *specs in zip(values, given, wanted, strict=False)]
        made = equation.primitive.bind(*standard, **{**equation.params, "dimension_numbers": wanted})
        return moved(made, wanted.out_spec, given.out_spec)

    call = jax.make_jaxpr(jax.jit(convolve))(*[one.aval for one in equation.invars]).eqns[0]
    return call.replace(invars=equation.invars, outvars=equation.outvars)


class Rows(NamedTuple):
    """Gradients of n records with respect to one array of parameters."""

    right: jax.Array
    """[n, size], or the second vectors of products, [n, q]."""
    left: jax.Array | None = None
    """The first ones, [n, p], whose largest number is 1."""
    after: tuple[Any, ...] = ()
    """Equations from a product to the array of parameters, the last one first."""

    def squares(self, scale: jax.Array) -> jax.Array:
        """Return the squared norms of `scale` times the gradients, [n]."""
        squares = sum_squares(self.right * scale, stage=RECORD_STAGE)
        return squares if self.left is None else squares * sum_squares(self.left, stage=RECORD_STAGE)

    def weighted(self, weights: jax.Array) -> jax.Array:
        """Return their sum with weights[n], [size]."""
        if self.left is None:
            return jnp.matmul(weights, self.right, precision="highest")
        total = jnp.matmul(self.left.T, weights[:, None] * self.right, precision="highest")
        for equation in reversed(self.after):
            total = equation.primitive.bind(total.reshape(equation.invars[0].aval.shape), **equation.params)
        return total.ravel()

    def without(self, lost: jax.Array) -> "Rows":
        """Return them with zeros in place of some."""
        return self._replace(right=jnp.where(lost[:, None], 0.0, self.right))


class Gradient:
    """The gradient of a cost of (arrays of parameters, example), traced with a product's vectors in its place."""

    def __init__(self, cost: Callable[[Any, Any], Any], leaves: Any, example: Any) -> None:
        traced: Any = jax.make_jaxpr(jax.grad(cost))(leaves, example)
        # A rule of `jax.custom_vjp` is Python code that may act otherwise than when the model was checked.
        check_independence("log_likelihood", traced)
        made = {id(out): equation for equation in traced.eqns for out in equation.outvars}
        found = [_vectors(made, out) for out in traced.jaxpr.outvars]
        outputs = [part for parts, _ in found for part in parts]
        self._run = partial(run, traced.replace(jaxpr=traced.jaxpr.replace(outvars=outputs)))
        self._parts = [(len(parts), after) for parts, after in found]
        sizes = [[int(np.prod(part.aval.shape)) for part in parts] for parts, _ in found]
        self.size = sum(map(sum, sizes))
        """Numbers of one record's gradient."""
        self.additions = max(sum(additions(size, RECORD_STAGE) for size in of_leaf) for of_leaf in sizes)
        """The most that a term of its squared norm goes through, before those of all arrays are added."""

    def of(self, leaves: Any, examples: Any) -> list[Rows]:
        """Return gradients of examples[n, ...]."""
        made = barrier(jax.vmap(lambda one: self._run(*leaves, *jax.tree.leaves(one)))(examples))
        flat = iter([values.reshape(len(values), -1) for values in made])
        return [_rows(list(islice(flat, count)), after) for count, after in self._parts]


def _rows(parts: list[jax.Array], after: tuple[Any, ...]) -> Rows:
    if len(parts) == 1:
        return Rows(parts[0])
    left, right = parts
    most = jnp.abs(left).max(1, keepdims=True)  # so that no square of a factor is too large or too small
    return Rows(right * most, jnp.where((most > 0) & jnp.isfinite(most), left / most, 0.0), after)


def _vectors(made: dict[int, Any], out: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the vectors whose products an output of a trace is, and what is done to these; or the output itself."""
    after, equation = [], made.get(id(out))
    while equation is not None and equation.primitive.name in ORDERS:
        after.append(equation)
        equation = made.get(id(equation.invars[0]))
    if equation is not None and equation.primitive.name == "dot_general":
        left, right, product = (int(np.prod(one.aval.shape)) for one in (*equation.invars, *equation.outvars))
        alike = len({one.aval.dtype for one in (*equation.invars, *equation.outvars)}) == 1
        if alike and left * right == product and left + right < product:  # nothing is summed over
            return list(equation.invars), tuple(after)
    return [out], ()
