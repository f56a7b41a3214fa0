"""Sums of clipped gradients: pairs that no compiler rounds, sums that no order changes, and their rounding."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from wflmc import channel
from wflmc.sums import constants, reference
from wflmc.sums.clipping import clip_pairs
from wflmc.sums.constants import UNIT_ROUNDOFF
from wflmc.sums.devices import Sum, add_devices, zero_sum
from wflmc.sums.lattices import lattice_sum
from wflmc.sums.norms import additions, sum_squares
from wflmc.sums.pairs import Pair, plus, times, two_sum
from wflmc.sums.records import Records, sum_records

from ..error_tools import raises_input_error

FLOATS = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20)


def mixed(shape, seed=0):
    """Numbers of very unlike sizes, at most 1."""
    rng = np.random.default_rng(seed)
    return (rng.uniform(-1, 1, shape) * 10.0 ** rng.uniform(-7, 0, shape)).astype(
        np.float32,
    )


two_sum_compiled, times_compiled, plus_compiled = (
    jax.jit(two_sum),
    jax.jit(times),
    jax.jit(plus),
)


@given(FLOATS, FLOATS)
def test_compiled_two_sum_has_no_error(a, b):
    high, low = two_sum_compiled(np.float32(a), np.float32(b))
    assert Fraction(float(high)) + Fraction(float(low)) == Fraction(a) + Fraction(b)


@given(FLOATS, FLOATS, FLOATS)
def test_compiled_products_and_sums_of_pairs(a, b, c):
    pair = two_sum_compiled(np.float32(b), np.float32(c * 2.0**-30))
    exact = Fraction(a) * (Fraction(float(pair.high)) + Fraction(float(pair.low)))
    product = times_compiled(np.float32(a), pair)
    assert abs(
        Fraction(float(product.high)) + Fraction(float(product.low)) - exact
    ) <= abs(
        exact,
    ) * Fraction(2) ** -45 + (Fraction(1, 10**30))
    other = two_sum_compiled(np.float32(c), np.float32(a * 2.0**-30))
    added = plus_compiled(pair, other)
    exact = sum(Fraction(float(part)) for part in (*pair, *other))
    larger = max(abs(pair.double), abs(other.double))
    assert abs(
        Fraction(float(added.high)) + Fraction(float(added.low)) - exact,
    ) <= Fraction(float(larger) * 2.0**-46)


def test_xla_keeps_pairs_in_the_loops_they_are_used_in():
    """Fused with products, in a scan, mapped over chains: a compiler that simplified them would lose eight digits.

    It may round the products or not (by fused multiply-add): either is a sum of terms that depend on no other term.
    """
    terms = mixed((3, 2000, 4))

    @jax.jit
    def added(values):
        def step(total, row):
            return plus(total, Pair(row * jnp.float32(1.1), jnp.zeros_like(row))), None

        start = Pair(jnp.zeros(4), jnp.zeros(4))
        return jax.vmap(lambda chain: jax.lax.scan(step, start, chain)[0])(values)

    rounded = (terms * np.float32(1.1)).astype(float)
    fused = terms.astype(float) * np.float32(1.1)
    actual = added(terms).double
    errors = [np.max(np.abs(actual - products.sum(1))) for products in (rounded, fused)]
    assert min(errors) < 2000 * np.abs(terms).sum(1).max() * 2.0**-46


@pytest.mark.parametrize("count", [2, 30, 1000])
def test_sums_over_devices_are_the_same_in_any_order(count):
    terms = mixed((count, 5)) * 7
    order = np.random.default_rng(1).permutation(count)
    summed = jax.jit(lambda x: lattice_sum(x, 0, jnp.float32(7.0)))
    first = summed(terms)
    reordered = summed(terms[order])
    np.testing.assert_array_equal(first.high, reordered.high)
    np.testing.assert_array_equal(first.low, reordered.low)
    # A term is rounded by n² 2⁻⁴⁶ of the bound, so that all together are off by n times that at most.
    assert (
        np.max(np.abs(first.double - terms.astype(float).sum(0)))
        <= count**3 * 2.0**-46 * 7
    )
    # Hence one of them that changes moves the sum by no more than itself and twice its rounding.
    changed = terms.copy()
    changed[count // 2] = -terms[count // 2]
    moved = np.abs(first.double - summed(changed).double)
    own = np.abs(terms[count // 2].astype(float) - changed[count // 2])
    assert np.all(moved <= own + 2 * count**2 * 2.0**-46 * 7)


def test_where_nothing_is_clipped_sums_are_plain():
    terms = mixed((100, 3))
    total = lattice_sum(terms, 0, jnp.float32(np.inf))
    np.testing.assert_allclose(total.double, terms.astype(float).sum(0), atol=1e-4)


@pytest.mark.parametrize("count", [7, 600, 5000])
def test_sums_over_records(count):
    """In one block, in a few, and in a loop over blocks."""
    weights = mixed((2, count))
    rows = mixed((count, 3), 1)
    total = sum_records(
        lambda w, u: w @ u,
        jnp.zeros((2, 3)),
        Records(jnp.asarray(weights), 1),
        Records(jnp.asarray(rows), 0),
    )
    exact = weights.astype(float) @ rows.astype(float)
    allowed = (
        min(count, constants.RECORDS_PER_FLOAT32_SUM)
        * UNIT_ROUNDOFF
        * np.abs(weights).astype(float)
        @ np.abs(rows)
    )
    assert np.all(np.abs(total.double - exact) <= allowed + 1e-12)


def test_sums_over_many_devices():
    terms = mixed((3, 1000, 2))
    total = add_devices(
        zero_sum(jnp.zeros((3, 2)), 1000),
        jnp.asarray(terms),
        1,
        jnp.float32(1.0),
    )
    exact = terms.astype(float).sum(1)
    assert np.all(
        np.abs(total.double - exact)
        <= constants.DEVICES_PER_FLOAT32_SUM * UNIT_ROUNDOFF * np.abs(terms).sum(1)
        + 1e-6
    )
    thirty_devices = add_devices(
        zero_sum(jnp.zeros((3, 2)), 30),
        jnp.asarray(terms[:, :30]),
        1,
        jnp.float32(1.0),
    )
    assert thirty_devices.low is None
    np.testing.assert_array_equal(
        thirty_devices.high, jnp.asarray(terms[:, :30]).sum(1)
    )


@pytest.mark.parametrize("count", [5, 33, 3000])
def test_norms_round_as_little_as_is_said(count):
    values = mixed((4, count, 3))
    exact = (values.astype(float) ** 2).sum(1)
    error = np.abs(
        np.asarray(jax.jit(lambda x: sum_squares(x, 1))(values), float) / exact - 1,
    )
    assert np.max(error) <= (additions(count) + 1) * UNIT_ROUNDOFF
    assert additions(10**6) < 150


@pytest.mark.parametrize("clip", [0.5, 1e3, np.inf])
def test_projection_in_pairs(clip):
    """Against float64: far inside the ball, outside of it, and at its surface."""
    rng = np.random.default_rng(2)
    high = rng.standard_normal((6, 40)).astype(np.float32)
    high[1] *= np.float32(clip / np.linalg.norm(high[1])) if np.isfinite(clip) else 1
    high[2] *= 1e-6
    high[3] = 0
    low = (high * rng.uniform(-1, 1, high.shape) * 2.0**-25).astype(np.float32)
    weight = rng.uniform(0.1, 1, 6).astype(np.float32)
    clipped, norm = jax.jit(clip_pairs, static_argnums=3)(
        Pair(high, low), weight, np.full(6, clip, np.float32), (-1,)
    )
    exact = high.astype(float) + low
    size = np.linalg.norm(exact, axis=1)
    sent = weight.astype(float)[:, None] * reference.clip_vectors(
        exact,
        np.full(6, clip),
    )
    np.testing.assert_allclose(norm, size, rtol=1e-6, atol=1e-17)
    assert np.all(
        np.abs(clipped.double - sent)
        <= constants.PAIR_CLIP_ERROR * np.linalg.norm(sent, axis=1)[:, None] + 1e-30
    )


def test_a_plan_says_how_much_less_it_clips():
    posterior = wflmc.gaussian_regression(
        jax.random.key(0),
        devices=4,
        examples=4000,
        dim=2,
    )
    link = wflmc.Link(channel.static(1.0), snr_db=40)
    keywords = {"step_size": 0.1 / posterior.L, "burn_in": 1, "samples": 1}
    device = wflmc.plan(posterior, link, wflmc.Privacy(1, 1e-5, 30.0), **keywords)
    record = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(1, 1e-5, 30.0, unit="record", example_clip=1.0),
        **keywords,
    )
    assert 0 < device.rounding < 1e-4 < record.rounding < 0.01
    np.testing.assert_allclose(record.clips_at[1] * (1 + record.rounding), 1.0)
    ignored = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(clip=30.0),
        policy=wflmc.Policy(power="noiseless"),
        **keywords,
    )
    assert ignored.rounding == 0
    unlike = wflmc.Privacy(1, 1e-5, [1.0, 1.0, 1.0, 1e7])
    with raises_input_error("clip", section="privacy", value=[1.0, 1e7]):
        wflmc.plan(posterior, link, unlike, **keywords)
    with raises_input_error("example_clip", "1e-09", section="privacy"):
        wflmc.plan(
            posterior,
            link,
            wflmc.Privacy(1, 1e-5, 30.0, unit="record", example_clip=1e-9),
            **keywords,
        )


@pytest.mark.parametrize("in_pairs", [False, True])
def test_a_sum_hides_whether_it_is_a_pair(in_pairs):
    high = jnp.asarray([1.0, -2.0])
    low = jnp.asarray([2.0**-26, 0.0]) if in_pairs else None
    total = Sum(high, low)
    exact = np.array([1.0 + 2.0**-26 * in_pairs, -2.0])
    np.testing.assert_array_equal(total.double, exact)
    np.testing.assert_array_equal(total.rounded, [1.0, -2.0])
    np.testing.assert_allclose(
        total.scaled(jnp.float32(1.1)).double,
        np.float32(1.1) * exact,
        rtol=1e-7,
    )
    # Noise of −1 leaves what float32 would have rounded away before.
    np.testing.assert_array_equal(total.plus_noise(-high), exact - np.asarray(high))
