"""Public whitening: what it does to moments and lengths, and that no row looks at another."""

from __future__ import annotations

import numpy as np
import pytest

from wflmc.data import images
from wflmc.data.images import CONSTANT, image_features, public_whitening

from ..error_tools import raises_input_error


@pytest.fixture(scope="module")
def public():
    generator = np.random.default_rng(0)
    # Of condition below 100, which float32 can whiten.
    mixing = np.eye(6) + 0.3 * generator.normal(size=(6, 6))
    return generator.normal(size=(500, 6)) @ mixing + generator.normal(size=6)


def test_lengths_are_those_by_the_symmetric_root(public):
    """Any root of (M + λI)⁻¹ gives the same lengths and inner products; here against the symmetric one, in float64."""
    ridge = 0.3
    rows = np.concatenate([public[:30], 1.7 * public[:10]])
    whitened = public_whitening(public, ridge=ridge)(rows)
    values, vectors = np.linalg.eigh(np.cov(public.T, bias=True) + ridge * np.eye(6))
    root = (vectors / np.sqrt(values)) @ vectors.T
    median = np.median(np.linalg.norm((public - public.mean(0)) @ root, axis=1))
    expected = (rows - public.mean(0)) @ root / median
    expected /= np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1)
    np.testing.assert_allclose(whitened @ whitened.T, expected @ expected.T, atol=2e-5)
    lengths = np.linalg.norm(whitened, axis=1)
    assert whitened.dtype == np.float32
    assert lengths.max() == pytest.approx(1, abs=1e-6)
    assert lengths.min() < 0.9


def test_public_rows_have_unit_variance_before_they_are_shortened(public):
    whitening = public_whitening(public, ridge=1e-9)
    moved = (public - whitening.mean) @ whitening.root
    moments = np.cov(public.T, bias=True)
    rounding = 1e-6 * np.linalg.cond(moments)  # float32 sums of products
    np.testing.assert_allclose(np.cov(moved.T, bias=True), np.eye(6), atol=rounding)
    assert rounding < 0.01


@pytest.mark.parametrize("rows", [1, 500, 2 * images.BLOCK_ROWS + 1])
def test_what_becomes_of_a_row_depends_on_no_other(public, rows):
    """One block of rows, or several, of which the last is filled up."""
    whitening = public_whitening(public)
    several = np.resize(public, (rows, public.shape[1]))
    alone = np.concatenate(
        [whitening(row[None], intercept=True) for row in several[: len(public)]]
    )
    np.testing.assert_allclose(
        whitening(several, intercept=True),
        np.resize(alone, (rows, alone.shape[1])),
        atol=1e-6,
    )
    assert np.all(alone[:, -1] == np.float32(CONSTANT))


@pytest.mark.parametrize(
    ("call", "key", "fact"),
    [
        (lambda u: public_whitening(u, ridge=0.0), "whiten_ridge", 0.0),
        (lambda u: public_whitening(u[0]), "whiten_from", "(6,)"),
        (lambda u: public_whitening(np.full((3, 2), np.nan)), "whiten_from", "(3, 2)"),
        (lambda u: public_whitening(u)(u[:, :4]), "whiten_from", "6 features"),
        (lambda u: image_features("mnist", ("mnist",)), "whiten_from", "'mnist'"),
        (lambda u: images.image_whitening("emnist"), "whiten_from", "'emnist'"),
    ],
)
def test_bad_public_data_are_refused(public, call, key, fact):
    with raises_input_error(key, fact):
        call(public)
