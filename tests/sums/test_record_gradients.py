"""Clipped sums of records' gradients: against gradients of one record after the other, in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.sums import reference
from wflmc.sums.constants import RECORD_SQUARES_PER_STAGE, UNIT_ROUNDOFF
from wflmc.sums.norms import additions
from wflmc.sums.record_gradients import with_fast_convolutions

from ..conftest import FULL
from ..sampling.compile_tools import clipped_sum

DEVICES = 3
CLIP = 0.7
ORDER = "NCH", "HOI", "HCN"


def prior(parameters):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(parameters))


def dense(p, x):
    return jax.nn.log_softmax(jnp.tanh(x @ p["a"]) @ p["b"] + p["c"])[1]


def transposed(p, x):
    return jax.nn.log_softmax(p["b"].T @ jnp.tanh(p["a"].T @ x) + p["c"])[1]


def one_row(p, x):
    return jax.nn.log_softmax(jnp.tanh(x[None] @ p["a"]) @ p["b"] + p["c"])[0, 1]


def shaped(p, x):
    return jax.nn.log_softmax(
        jnp.tanh(x @ p["a"].reshape(6, 5)) @ jnp.reshape(p["b"], (5, 4)) + p["c"],
    )[1]


def twice(p, x):
    """One matrix enters twice: its gradient is the sum of two products."""
    return dense(p, x) + jnp.sin(x[::-1] @ p["a"])[0]


def rows_of_a_record(p, x):
    """A record of two rows: its gradient is a sum over them."""
    return jax.nn.log_softmax(jnp.tanh(x.reshape(2, 3) @ p["a"][:3]) @ p["b"] + p["c"])[
        :, 1
    ].sum()


def jitted(p, x):
    """A function wrapped in `jax.jit`, within another one."""
    return jax.jit(lambda p, x: jax.jit(dense)(p, x))(p, x)


def convolved(p, x):
    """A convolution with dimensions in an order of its own: channels first, kernels in between."""
    seen = jax.lax.conv_general_dilated(
        x[None, None],
        p["a"][:3, :, None],
        (2,),
        "SAME",
        dimension_numbers=ORDER,
    )
    return jax.nn.log_softmax(jnp.tanh(seen[:, :, 0]).sum(0) @ p["b"] + p["c"])[1]


def parameters(shapes=((6, 5), (5, 4), (4,))):
    generator = np.random.default_rng(3)
    return dict(
        zip("abc", (generator.standard_normal(shape) for shape in shapes), strict=True)
    )


def posterior_of(function, rows, start, devices=DEVICES):
    return wflmc.posterior_from(
        function,
        prior,
        rows,
        initial=start,
        devices=devices,
        mu=1.0,
        L=50.0,
    )


def float64():
    return (
        jax.enable_x64(True)
        if hasattr(jax, "enable_x64")
        else jax.experimental.enable_x64()
    )


def one_by_one(posterior, function, start, clip=CLIP):
    """The sum of every record's gradient, clipped, with the prior's, in float64."""
    rows = np.asarray(posterior.observed[0], np.float64)
    gradients = jax.jit(
        jax.vmap(jax.grad(lambda p, row: -function(p, row)), (None, 0))
    )(start, rows)
    flat = np.concatenate(
        [np.reshape(leaf, (len(rows), -1)) for leaf in jax.tree.leaves(gradients)],
        axis=1,
    )
    prior_gradient = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(start)])
    return prior_gradient + reference.clip_vectors(flat, np.full(len(flat), clip)).sum(
        0,
    )


@pytest.mark.parametrize(
    ("function", "size"),
    [
        # Products of two vectors are in other tests of this file too.
        *[
            (network, 24)
            for network in (dense, transposed, one_row, shaped, jitted)
            if FULL
        ],
        *[(twice, 43), (rows_of_a_record, 54), (convolved, 43)],
    ],
)
def test_sums_are_those_of_one_record_after_the_other(function, size):
    rows = 2 * np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)
    start = parameters()
    own = posterior_of(function, rows, start)
    # The size of the vectors, where a gradient is their product.
    assert own.model.record_gradient.size == size
    theta = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(start)]).astype(
        np.float32,
    )
    with float64():
        expected = one_by_one(own, function, start)
    ones = jnp.ones(DEVICES)
    for mine in (own, own.on_accelerator(1, 1e9, True)):
        actual = clipped_sum(mine, theta, ones, 1e6 * ones, None, CLIP * ones)[0]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_convolutions_of_whole_devices_are_summed():
    rows = np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)
    start = parameters()
    own = posterior_of(convolved, rows, start)
    theta = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(start)]).astype(
        np.float32,
    )
    with float64():
        expected = one_by_one(own, convolved, start, clip=np.inf)
    ones = jnp.ones(DEVICES)
    for mine in (own, own.on_accelerator(1, 1e9, False)):
        assert mine.block == (1 if mine is own else DEVICES)
        np.testing.assert_allclose(
            clipped_sum(mine, theta, ones, 1e6 * ones)[0],
            expected,
            rtol=1e-5,
            atol=1e-5,
        )


def orders(traced):
    """The orders of dimensions of all convolutions in a trace, those of functions that it calls too."""
    for equation in traced.eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield equation.params["dimension_numbers"]
        for value in jax.tree.leaves(
            equation.params,
            is_leaf=lambda value: hasattr(value, "eqns"),
        ):
            yield from orders(value) if hasattr(value, "eqns") else ()


def plain(x, kernel, order, groups):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (2, 1),
        "SAME",
        None,
        (1, 2),
        dimension_numbers=order,
        feature_group_count=groups,
    )


ORDERS = (
    ("NHWC", "HWIO", "NHWC"),
    ("NCHW", "OIHW", "NCHW"),
    ("HCWN", "IHOW", "WNCH"),
)
"""Axes of the input, the kernel and the output."""


def scanned(x, kernel, order, groups):
    """In a loop whose steps are computed again on the way back."""

    def step(total, row):
        return total + plain(row, kernel, order, groups).sum(), None

    return jax.lax.scan(jax.checkpoint(step), 0.0, jnp.stack([x, x + 1]))[0]


def chosen(x, kernel, order, groups):
    """In one of two branches, and in a function that is compiled by itself."""
    inner = jax.jit(lambda: plain(x, kernel, order, groups))
    return jax.lax.cond(x.sum() > 0, inner, lambda: 2 * inner())


@pytest.mark.parametrize(
    ("function", "groups", "order"),
    [
        (function, groups, order)
        for function, groups in ((plain, 1), (plain, 2), (scanned, 1), (chosen, 2))
        for order in ORDERS
    ]
    if FULL
    else [
        (plain, 1, ORDERS[0]),
        (plain, 2, ORDERS[1]),
        (scanned, 1, ORDERS[2]),
        (chosen, 2, ORDERS[1]),
    ],
)
def test_convolutions_are_brought_into_order_and_stay_the_same(function, order, groups):
    generator = np.random.default_rng(5)
    x = generator.standard_normal((5, 7, 8, 4))
    kernel = generator.standard_normal((3, 2, 4 // groups, 6))
    x = jnp.asarray(x.transpose(["NHWC".index(name) for name in order[0]]), jnp.float32)
    kernel = jnp.asarray(
        kernel.transpose(["HWIO".index(name) for name in order[1]]), jnp.float32
    )
    gradient = jax.grad(
        lambda x, kernel: jnp.tanh(function(x, kernel, order, groups)).sum(),
        (0, 1),
    )
    mine = with_fast_convolutions(gradient)
    standard = jax.lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
    before, after = (
        set(orders(jax.make_jaxpr(compiled)(x, kernel)))
        for compiled in (gradient, mine)
    )
    assert before != {standard}
    # An accelerator's compiler chooses the order by itself.
    if jax.default_backend() == "cpu":
        assert after == {standard}
    for actual, expected in zip(
        jax.jit(mine)(x, kernel),
        jax.jit(gradient)(x, kernel),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def layer(weights, row):
    """Of a row (u, v): the gradient with respect to the weights is −u vᵀ."""
    return -(row[:3] @ weights) @ row[3:]


@pytest.mark.parametrize(
    ("u", "v"),
    [(1e-30, 1e33), (1e33, 1e-30), (1e-22, 1e22), (1e17, 1.0), (1.0, 1e17)],
)
def test_vectors_of_any_size_are_clipped(u, v):
    """Whose own squares float32 does not hold."""
    rows = np.zeros((3, 5), np.float32)
    rows[0] = [3 * u, 0, 4 * u, 0.6 * v, 0.8 * v]
    own = posterior_of(layer, rows, np.zeros((3, 2)))
    assert own.model.record_gradient.size == 5
    ones = jnp.ones(DEVICES)
    actual = clipped_sum(
        own,
        np.zeros(6, np.float32),
        ones,
        1e6 * ones,
        None,
        CLIP * ones,
    )[0]
    size = min(5 * np.float64(np.float32(u)) * v, CLIP)
    np.testing.assert_allclose(
        actual,
        size * np.outer([0.6, 0, 0.8], [0.6, 0.8]).ravel(),
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    "bad",
    [
        (np.inf, 1.0),
        (1.0, np.inf),
        (np.nan, 1.0),
        (1.0, np.nan),
        (0.0, np.inf),
        (1e30, 1e30),
    ],
)
def test_a_record_without_a_finite_gradient_adds_nothing(bad):
    rows = np.ones((30, 5), np.float32)
    whole, less = (
        posterior_of(layer, data, np.zeros((3, 2)), devices=1)
        for data in (rows, rows[1:])
    )
    rows[4] = [bad[0]] * 3 + [bad[1]] * 2
    ones = jnp.ones(1)
    sums = [
        clipped_sum(own, np.zeros(6, np.float32), ones, 1e6 * ones, None, 10.0 * ones)[
            0
        ]
        for own in (replace(whole, data=rows[None]), less)
    ]
    np.testing.assert_allclose(*sums, rtol=1e-6)


def test_numbers_of_other_types_are_taken_as_they_were_traced():
    rows = np.random.default_rng(0).standard_normal((9, 6)).astype(np.float32)
    own = posterior_of(dense, rows, parameters())
    ones = np.ones(DEVICES)
    theta = np.full(54, 0.1)
    expected = clipped_sum(
        own,
        theta.astype(np.float32),
        ones,
        1e6 * ones,
        None,
        CLIP * ones,
    )[0]
    with float64():
        actual = own.clipped_sum(
            jnp.asarray(theta),
            ones,
            1e6 * ones,
            None,
            jnp.asarray(CLIP * ones),
        )[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_charge_for_a_records_norm_is_that_of_its_largest_array():
    """4,100 parameters would be added in two stages, but 4,096 of them are by themselves, in one."""
    start = {"a": np.zeros(4096), "b": np.zeros(4)}
    own = posterior_of(
        lambda p, x: jnp.sum(jnp.sin(p["a"])) * x[0] + jnp.sum(p["b"]),
        np.ones((3, 6), np.float32),
        start,
    )
    assert (
        own.model.record_gradient.additions
        == 4096
        > additions(4100, RECORD_SQUARES_PER_STAGE)
    )
    clip = np.full(DEVICES, 5.0)
    assert own.rounding(clip, clip / 5).record_norm > (4096 + 2) / 2 * UNIT_ROUNDOFF
