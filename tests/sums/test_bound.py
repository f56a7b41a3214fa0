"""The rounding bound: its terms add up to e, and none of them can be left out.

Every term has an attack on the code that it is about: inputs whose error in float32,
over s, is more than the other terms cover. Where other terms are always larger, the
error is compared with the term alone.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.apps.audit.summation import neighbours
from wflmc.sums import bound, custom, softmax_rows
from wflmc.sums.bound import RoundingError, SumSettings, rounding_error
from wflmc.sums.clipping import clip_factor
from wflmc.sums.constants import UNIT_ROUNDOFF
from wflmc.sums.devices import add_devices, zero_sum
from wflmc.sums.lattices import lattice_sum
from wflmc.sums.norms import additions, vector_norms
from wflmc.sums.pairs import Pair, as_pair, plus
from wflmc.sums.record_gradients import ArrayGradients
from wflmc.sums.records import Records, sum_records
from wflmc.support.errors import InputError

PROOF = Path(__file__).parents[2] / "docs/explanation/privacy.md"
ALMOST_HALF = 0.49
"""Of a lattice's step: terms of half a step and a little more are rounded up by it."""


def settings_of(
    *,
    dim=1,
    size=1,
    devices=1,
    clip=1.0,
    example_clip=np.inf,
    record_norm_error=None,
    row_product_error=0.0,
):
    """Settings in which all devices are alike."""
    norm_error = bound.vector_norm_error(dim)
    return SumSettings(
        dim=dim,
        sizes=np.full(devices, size),
        clip=np.full(devices, float(clip)),
        example_clip=np.full(devices, float(example_clip)),
        device_norm_error=norm_error,
        record_norm_error=record_norm_error or norm_error,
        row_product_error=row_product_error,
    )


def assert_needed(term, settings, error):
    """Check that e covers an error that was found, and does not without the term."""
    terms = rounding_error(settings)
    assert terms._replace(**{term: 0.0}).total < error <= terms.total


def assert_covered(term, settings, error):
    """Check that a term alone covers an error of what it is about."""
    assert 0 < error <= getattr(rounding_error(settings), term)


# The sum of the terms.


def transcribed(norm, record, dim, sizes, clip, example_clip, rows_together):
    """Write e out as one formula, without functions and constants of the package."""
    u = 2.0**-24
    devices = len(clip)
    by_record = bool(np.isfinite(example_clip).any())
    clipped = np.isfinite(clip)
    if not clipped.any():
        return 0.0
    s = np.where(clipped, np.minimum(clip, example_clip), np.inf)
    ratio = np.max(clip[clipped]) / np.min(s)
    sent = np.where(by_record & (sizes > 1024), 2.0**-40, norm)
    with np.errstate(invalid="ignore"):
        e = np.max(np.where(clipped, clip / s * sent, 0.0))
        longer = np.max(np.where(clipped, np.minimum(example_clip / s, 2.0), 1.0))
    pairs = min(devices, 4096) ** 2 * dim**0.5 * 2.0**-45 + devices**2 * 2.0**-44
    e += ratio * pairs * (16 if rows_together else 1)
    largest = int(np.max(sizes))
    if by_record:
        e += record + longer * min(largest, 256) ** 2 * u + largest**2 * 2.0**-45
        e += np.max(np.where(clipped, dim * 2.0**-117 / (clip * s), 0.0))
    else:
        e += ratio * (min(devices, 128) ** 2 + 4 * 128 * (devices <= 128)) * u
    if rows_together:
        row = np.where(example_clip < clip, example_clip, 4.0 * clip)
        e += np.max(row[clipped]) / np.min(s) * rows_together**2 * u
        e += ratio * 4.0 * rows_together * min(devices, 256) ** 2 * dim**0.5 * 2.0**-46
    return float(1.01 * e)


DEVICE_CLIPS = (1e-15, 0.3, 30.0, 9e14, np.inf)
RECORD_CLIPS = (1e-15, 0.29, 70.0, np.inf)


@pytest.mark.parametrize("devices", [1, 30, 128, 129, 5000])
@pytest.mark.parametrize("size", [1, 8, 256, 1024, 1025, 40_000])
def test_terms_add_up_to_the_formula(devices, size):
    """To the bit: plans and ledgers hold numbers that depend on e."""
    generator = np.random.default_rng(devices + size)
    cases = itertools.product(DEVICE_CLIPS, RECORD_CLIPS, (1, 37, 7850), (False, True))
    compared = 0
    for clip, example_clip, dim, alike in cases:
        spread = generator.uniform(1.0 if alike else 0.5, 1.0, (2, devices))
        clips = clip * spread[0]
        example_clips = example_clip * spread[1]
        sizes = np.full(devices, size)
        sizes[0] = max(1, size // 2)
        for features, classes, short in (
            (dim, 0, False),
            (dim, 10, False),
            (dim, 10, True),
        ):
            norm = ((additions(features) + classes) / 2 + 8) * 2.0**-24
            products = (features + classes + 48) * 2.0**-24
            settings = SumSettings(
                dim=dim,
                sizes=sizes,
                clip=clips,
                example_clip=example_clips,
                device_norm_error=norm + 18 * 2.0**-24 if short else norm,
                record_norm_error=norm,
                row_product_error=products if short else 0.0,
            )
            record = norm + 208 * products if short else norm
            arguments = (dim, sizes, clips, example_clips, 128 if short else 0)
            expected = transcribed(settings.device_norm_error, record, *arguments)
            try:
                total = rounding_error(settings).total
            except InputError:
                assert np.max(sizes * example_clips) > 2.0**58
                continue
            assert total == expected
            compared += 1
    assert compared > 200


def test_models_give_the_errors_of_their_norms():
    """As the formula has them: of vectors, classes, rows, and traced records."""
    u = 2.0**-24
    clip, example_clip = np.full(3, 2.0), np.full(3, 1.0)

    def expected(norm, record, posterior, rows_together=0):
        arguments = (posterior.dim, posterior.sizes, clip, example_clip, rows_together)
        return transcribed(norm, record, *arguments)

    gaussian = wflmc.gaussian_regression(jax.random.key(0), 3, examples=60, dim=40)
    norm = (additions(40) / 2 + 8) * u
    assert gaussian.rounding(clip, example_clip).total == expected(norm, norm, gaussian)
    long = wflmc.softmax_regression(
        jax.random.key(0),
        3,
        examples=60,
        dim=40,
        classes=4,
    )
    norm = ((additions(40) + 4) / 2 + 8) * u
    assert long.rounding(clip, example_clip).total == expected(norm, norm, long)
    short = wflmc.softmax_regression(
        jax.random.key(0),
        3,
        examples=9,
        dim=40,
        classes=4,
    )
    record = norm + 208 * (40 + 4 + 48) * u
    total = short.rounding(clip, example_clip).total
    assert total == expected(norm + 18 * u, record, short, 128)
    traced = wflmc.posterior_from(
        lambda p, x: p["a"] @ x + p["b"],
        lambda p: -jnp.sum(p["a"] ** 2),
        np.ones((9, 5), np.float32),
        initial={"a": np.zeros(5), "b": np.zeros(())},
        devices=3,
        mu=1.0,
        L=1.0,
    )
    norm = (additions(6) / 2 + 8) * u
    record = ((5 + 2) / 2 + 14) * u
    assert traced.rounding(clip, example_clip).total == expected(norm, record, traced)


def test_nothing_is_charged_where_nothing_is_clipped():
    assert rounding_error(settings_of(clip=np.inf)) == RoundingError()


def steps_of_the_proof():
    """The steps of docs/explanation/privacy.md, by their numbers."""
    text = PROOF.read_text().split("## Sums in floating point")[1]
    section = text.split("\n## ")[0]
    paragraphs = re.split(r"^(\d)\. \*\*", section, flags=re.M)
    return dict(zip(paragraphs[1::2], paragraphs[2::2], strict=True))


@pytest.mark.parametrize("term", RoundingError._fields)
def test_every_term_cites_its_step_of_the_proof(term):
    steps = steps_of_the_proof()
    assert list(steps) == list("12345678")
    cited = re.findall(r"step (\d)", getattr(bound, term).__doc__)
    assert f"`{term}`" in steps[cited[0]]


# A test per term.


def test_record_norm():
    """Added one after the other, all of 4,096 squares are lost on the first.

    XLA may add them in this order or in another, whose error must be covered too.
    """
    rows = np.full((1, 4096), (0.9 * UNIT_ROUNDOFF) ** 0.5, np.float32)
    rows[0, 0] = 1.0
    unit = jnp.ones(())

    def error_with(norm):
        factor = np.asarray(clip_factor(unit, unit, norm), float)
        return float(factor[0] * np.linalg.norm(rows.astype(float)) - 1)

    settings = settings_of(
        dim=4096,
        example_clip=1.0,
        record_norm_error=bound.traced_norm_error(4096, 1),
    )
    one_after_the_other = np.add.accumulate(rows**2, axis=1)[:, -1]
    assert_needed("record_norm", settings, error_with(np.sqrt(one_after_the_other)))
    arrays = [ArrayGradients(jnp.asarray(rows))]
    by_xla = jax.jit(lambda c: custom._record_norms(arrays, c, unit))(unit)
    assert error_with(by_xla) <= rounding_error(settings).total


def test_device_norm():
    """A device sends up to ℓ, and its rounding counts ℓ/c times."""
    generator = np.random.default_rng(0)
    gradients = generator.standard_normal((100, 40)).astype(np.float32)
    clip = 1e4

    @jax.jit
    def clipped(values):
        scaled = values * np.float32(1e5)
        norms = vector_norms(scaled)
        return clip_factor(1.0, jnp.float32(clip), norms)[:, None] * scaled, scaled

    sent, scaled = (np.asarray(values, float) for values in clipped(gradients))
    exact = clip * scaled / np.linalg.norm(scaled, axis=1, keepdims=True)
    error = float(np.linalg.norm(sent - exact, axis=1).max())
    settings = settings_of(dim=40, clip=clip, example_clip=1.0)
    assert_needed("device_norm", settings, error)


def test_device_lattice():
    """A term half a step from the lattice moves the sum by half a step more."""
    count = 4096
    clip = 2.0**20  # with a power of two the step is known
    step = count**2 * 2.0**-46 * clip
    terms = np.zeros((2, count), np.float32)
    terms[:, 0] = [(1 - ALMOST_HALF) * step, -(1 - ALMOST_HALF) * step]
    total = jax.jit(lambda values: lattice_sum(values, 1, jnp.float32(clip)))(terms)
    change = total.double[0] - total.double[1]
    error = float(change - (terms[0, 0].astype(float) - terms[1, 0])) / 2
    settings = settings_of(size=1025, devices=count, clip=clip, example_clip=1.0)
    assert_needed("device_lattice", settings, error)


def largest_excess(add, count):
    """The largest change of a float32 sum that is not its terms', over 2.

    The first of `count` terms of at most 1 changes its sign. The others bring the sum
    near a power of two, or are random.
    """
    pairs = [np.stack(neighbours(count, 1.0, -1.0, lanes)) for lanes in (1, 8)]
    generator = np.random.default_rng(count)
    for _ in range(30):
        known = generator.uniform(0.5, 1, count)
        pairs.append(np.stack([known, known]))
        pairs[-1][:, 0] = 1, -1
    excess = []
    for pair in pairs:
        first, second = pair.astype(np.float32)
        exact = first.astype(float).sum() - second.astype(float).sum()
        excess.append(add(first) - add(second) - exact)
    return max(excess) / 2


def test_record_sum():
    """A block of records that float32 adds, on either side of a power of two."""

    @jax.jit
    def added(terms):
        def add_block(weights, rows):
            return jnp.einsum("n,nm->m", weights, rows, precision="highest")

        records = Records(terms, 0), Records(jnp.ones((256, 1), jnp.float32), 0)
        return sum_records(add_block, jnp.zeros(1), *records)

    error = largest_excess(lambda terms: float(added(terms).double[0]), 256)
    assert_needed("record_sum", settings_of(size=256, example_clip=1.0), error)


def test_record_pairs():
    """Pairs of unlike sizes, whose low parts are rounded when they are added."""
    generator = np.random.default_rng(1)
    blocks = (256 * generator.uniform(0.5, 1, 400)).astype(np.float32)
    lows = (blocks * generator.uniform(-1, 1, 400) * 2.0**-25).astype(np.float32)

    @jax.jit
    def added(high, low):
        def step(total, block):
            return plus(total, Pair(*block)), None

        return jax.lax.scan(step, as_pair(jnp.zeros(())), (high, low))[0]

    total = added(blocks, lows)
    exact = math.fsum([*blocks.astype(float), *lows.astype(float)])
    error = abs(math.fsum([float(total.high), float(total.low), -exact]))
    settings = settings_of(size=256 * 400, example_clip=1.0)
    assert_covered("record_pairs", settings, error)


def test_underflow():
    """Squares near those that float32 loses, for which norms are raised."""
    dim = 1000
    clip = 1.01e-15
    gradient = np.full((1, dim), 1.05 * clip / dim**0.5, np.float32)
    norm = jax.jit(vector_norms)(gradient)
    factor = np.asarray(clip_factor(1.0, jnp.float32(clip), norm), float)
    sent = float(factor[0]) * np.linalg.norm(gradient.astype(float))
    error = abs(sent / float(np.float32(clip)) - 1)
    settings = settings_of(dim=dim, clip=clip, example_clip=clip)
    assert_needed("underflow", settings, error)


def test_device_sum():
    """Devices that float32 adds, on either side of a power of two."""

    @jax.jit
    def added(terms):
        zero = zero_sum(jnp.zeros(1), 128)
        return add_devices(zero, terms[:, None], 0, jnp.float32(1.0))

    error = largest_excess(lambda terms: float(added(terms).double[0]), 128)
    assert_needed("device_sum", settings_of(devices=128), error)


def test_row_products():
    """The norm of a short device is taken at its largest, and less is sent of it."""
    rows = 8
    clip = 8.0
    X, y = np.full((rows, 2), 9.0), np.zeros(rows, int)
    posterior = wflmc.softmax_regression(
        jax.random.key(0),
        1,
        X=X,
        y=y,
        classes=2,
        prior_std=1e6,
    )
    ready = posterior.on_accelerator(1, 2.0**30, by_example=True)
    ones = np.ones(1, np.float32)
    theta = np.zeros(4, np.float32)
    clips = np.array([clip - 1], np.float32), ones
    unrounded_sum = jax.jit(type(ready).unrounded_sum)
    sums = unrounded_sum(ready, theta, ones, clips[0], None, clips[1])
    error = abs(np.linalg.norm(sums.total.double) - (clip - 1))
    settings = settings_of(
        dim=4,
        size=rows,
        clip=clip - 1,
        example_clip=1.0,
        row_product_error=bound.row_product_error(2, 2),
    )
    assert_covered("row_products", settings, error)


def short_settings(devices):
    return settings_of(devices=devices, row_product_error=bound.row_product_error(1, 2))


def test_row_sum():
    """Rows of many short devices that float32 adds."""
    lattice = softmax_rows.RowLattice(1, jnp.array([512.0], jnp.float32))
    features = jnp.ones((1, 128, 1), jnp.float32)

    @jax.jit
    def added(terms):
        return softmax_rows._add_rows(features, terms[None, None], lattice)

    error = largest_excess(lambda terms: float(added(terms).double.item()), 128)
    assert_covered("row_sum", short_settings(128), error)


def test_row_lattice():
    """A sum of rows half a step from the lattice of 256 such sums."""
    count = 256
    step = 4 * 128 * count**2 * 2.0**-46
    lattice = softmax_rows.RowLattice(count, jnp.array([512.0], jnp.float32))
    features = jnp.ones((count, 128, 1), jnp.float32)
    terms = np.zeros((2, 1, 1, 128 * count), np.float32)
    terms[:, 0, 0, 0] = [(1 - ALMOST_HALF) * step, -(1 - ALMOST_HALF) * step]
    add = jax.jit(lambda rows: softmax_rows._add_rows(features, rows, lattice))
    change = (add(terms[0]).double - add(terms[1]).double).item()
    error = (change - float(terms[0, 0, 0, 0]) + float(terms[1, 0, 0, 0])) / 2
    assert_covered("row_lattice", short_settings(count), error)
