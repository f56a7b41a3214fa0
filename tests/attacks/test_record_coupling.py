"""A model in which one record changes the gradients of others: their clips then bound nothing.

The attacker has written the model, or a library that it uses. The gradients of all records of a block are computed at
once, and operations may say themselves what "at once" means. A rule that gives every record the sum of all of them lets
one record of ten move the clipped sum by 20 where 2 is claimed, 100 times the privacy loss.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import wflmc
from wflmc.support.errors import InputError

RECORDS = 10


@jax.custom_batching.custom_vmap
def coupled(x):
    """The record itself; of many at once, the sum of all."""
    return x


@coupled.def_vmap
def _(axis_size, in_batched, x):
    del axis_size, in_batched
    return jnp.broadcast_to(x.sum(0, keepdims=True), x.shape), True


@jax.custom_jvp
def coupled_tangent(theta, x):
    return theta * x


coupled_tangent.defjvp(
    lambda primals, tangents: (
        primals[0] * primals[1],
        coupled(primals[1]) * tangents[0],
    )
)


@jax.custom_vjp
def coupled_backwards(theta, x):
    return theta * x


coupled_backwards.defvjp(
    lambda theta, x: (theta * x, x), lambda x, g: (coupled(x) * g, 0.0 * x)
)


@jax.custom_vjp
def coupled_residuals(theta, x):
    return theta * x


coupled_residuals.defvjp(
    lambda theta, x: (theta * x, coupled(x)), lambda x, g: (x * g, 0.0 * x)
)


def in_scan(theta, x):
    return jax.lax.scan(
        lambda total, _: (total + theta * coupled(x), None), 0.0, None, length=1
    )[0]


def in_while(theta, x):
    _, last = jax.lax.while_loop(
        lambda carry: carry[0] < 1,
        lambda carry: (carry[0] + 1, coupled(carry[1])),
        (0, x),
    )
    return theta * jax.lax.stop_gradient(last)


def in_branch(theta, x):
    return jax.lax.cond(theta < 1e9, lambda: theta * coupled(x), lambda: 0.0 * x)


COUPLED = {
    "plainly": lambda theta, x: theta * coupled(x),
    "in jit": lambda theta, x: theta * jax.jit(coupled)(x),
    "in scan": in_scan,
    "in while": in_while,
    "in a branch": in_branch,
    "in checkpoint": jax.checkpoint(lambda theta, x: theta * coupled(x)),
    "in the rule of a custom_jvp": coupled_tangent,
    "in the backward rule of a custom_vjp": coupled_backwards,
    "in the forward rule of a custom_vjp": coupled_residuals,
}

shared_by_lowering = Primitive("shared_by_lowering")
shared_by_lowering.def_abstract_eval(lambda x: x)
shared_by_lowering.def_impl(lambda x: x)
batching.defvectorized(shared_by_lowering)
mlir.register_lowering(
    shared_by_lowering,
    mlir.lower_fun(
        lambda x: jnp.broadcast_to(x.sum(), x.shape), multiple_results=False
    ),
)


def object_with_own_rules():
    """Return an operation that is an object with a batching rule, where JAX has them."""
    try:
        from jax.experimental.hijax import HiPrim, ShapedArray
    except ImportError:
        return None

    class Nonzero(HiPrim):
        """It claims to be an operation of jax.numpy."""

        def __init__(self):
            scalar = ShapedArray((), jnp.dtype(jnp.float32))
            self.in_avals = (scalar,)
            self.out_aval = scalar
            self.params = {}
            super().__init__()

        def expand(self, x):
            return x

    Nonzero.__module__ = "jax._src.numpy.hijax"
    return Nonzero()


object_operation = object_with_own_rules()
counter = jax.new_ref(jnp.zeros(())) if hasattr(jax, "new_ref") else None


def first_record_decides(theta, x):
    """With these generators the bits of all records are drawn from the first one's key."""
    key = jax.random.key(x.astype(jnp.int32), impl="rbg")
    return theta * jax.random.normal(key)


def first_record_decides_bits(theta, x):
    key = jnp.full(4, x.astype(jnp.uint32))
    return theta * jax.lax.rng_bit_generator(key, (), jnp.uint32)[1].astype(jnp.float32)


def counts_records(theta, x):
    counter[...] += 1.0
    return theta * x * counter[...]


def sums_over_an_axis(theta, x):
    return theta * jax.lax.psum(x, "records")


OTHERWISE = {
    "primitive of one's own": lambda theta, x: theta * shared_by_lowering.bind(x),
    "one at a time": lambda theta, x: (
        theta * jax.custom_batching.sequential_vmap(jnp.sin)(x)
    ),
    "random key": first_record_decides,
    "random bits": first_record_decides_bits,
    "named axis": sums_over_an_axis,
} | ({} if counter is None else {"reference": counts_records})
if object_operation is not None:
    OTHERWISE["object with rules of its own"] = lambda theta, x: (
        theta * jax.lax.stop_gradient(object_operation(x))
    )


def _prior(theta):
    return -0.5 * jnp.sum(theta**2)


def posterior_of(product, prior=_prior):
    """A model whose record x has the gradient x, by a product of θ and x."""
    return wflmc.posterior_from(
        lambda theta, x: -product(theta[0], x),
        prior,
        np.ones(RECORDS, np.float32),
        initial=jnp.zeros(1),
        devices=1,
        partition="blocks",
        mu=1.0,
        L=1.0,
    )


@pytest.mark.parametrize("where", [*COUPLED, *OTHERWISE])
def test_a_likelihood_that_may_couple_records_is_refused(where):
    with pytest.raises(InputError) as caught:
        posterior_of((COUPLED | OTHERWISE)[where])
    assert caught.value.key == "log_likelihood"


def test_a_prior_is_refused_likewise():
    with pytest.raises(InputError) as caught:
        posterior_of(
            lambda theta, x: theta * x,
            prior=lambda theta: -0.5 * coupled(theta[0]) ** 2,
        )
    assert caught.value.key == "log_prior"


def test_a_rule_that_changes_after_the_check_is_refused():
    """The rules of a custom_vjp are Python code, which is run anew for every trace."""
    calls = []

    @jax.custom_vjp
    def turncoat(theta, x):
        return theta * x

    def backwards(x, g):
        calls.append(x)
        return (x if len(calls) <= checked else coupled(x)) * g, 0.0 * x

    turncoat.defvjp(lambda theta, x: (theta * x, x), backwards)
    checked = 10**9
    posterior = posterior_of(turncoat)
    checked = len(calls)
    with pytest.raises(InputError) as caught:
        posterior.on_accelerator(1, 2.0**30, by_example=True)
    assert caught.value.key == "log_likelihood"


@jax.custom_vjp
def rounded_product(theta, x):
    return theta * x


rounded_product.defvjp(lambda theta, x: (theta * x, x), lambda x, g: (x * g, 0.0 * x))


def independent(theta, x):
    """Calls, loops, branches, derivatives of one's own and random numbers that `vmap` treats record by record."""
    noise = jax.random.uniform(
        jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), x.astype(jnp.int32))
    )
    loop = jax.lax.fori_loop(0, 2, lambda _, value: value / 2, x)
    total = jax.lax.scan(
        lambda total, part: (total + part * theta, None), 0.0, loop * jnp.ones(4)
    )[0]
    branch = jax.lax.cond(x > 0, jnp.cos, jnp.exp, 0 * theta)
    # Newer versions of JAX have objects for these.
    first = jnp.nonzero(jnp.ones(3) * x, size=1)[0][0]
    place = jnp.searchsorted(jnp.arange(3.0), x)
    one = 1 + 0 * noise + 0 * first + 0 * place
    return jax.checkpoint(jax.jit(rounded_product))(
        total, branch * one * jax.nn.relu(1 + 0 * x)
    )


def test_other_models_are_taken_and_one_record_moves_their_sum_by_its_clip():
    posterior = posterior_of(independent).on_accelerator(1, 2.0**30, by_example=True)

    @jax.jit
    def total(first):
        data = jnp.asarray(posterior.data).at[0, 0].set(first)
        holding = dataclasses.replace(posterior, data=data)
        return holding.unrounded_sum(
            jnp.zeros(1), jnp.ones(1), jnp.full(1, 1e4), None, jnp.ones(1)
        ).total

    change = np.abs(total(30.0).double - total(-30.0).double)
    assert 1.9 < change <= 2 * (1 + 1e-6)
