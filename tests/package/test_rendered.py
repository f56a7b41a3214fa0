"""Rendered digits: upright, with the holes that digits have, centred, and the same for equal seeds."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from scipy import ndimage

from wflmc.data import sets as data
from wflmc.data.images import image_features, public_whitening
from wflmc.data.rendered import DIGITS, FONTS, render_digits
from wflmc.data.scattering import scattering_features
from wflmc.scenario.public import load_public_images
from wflmc.scenario.schema import PosteriorSection

from ..cli_tools import strict
from ..error_tools import raises_input_error

HOLES = [1, 0, 0, 0, None, 0, 1, 0, 2, 1]
"""Of every digit; a four may be open."""
NAME = "rendered-digits"


@pytest.fixture(scope="module")
def digits():
    return render_digits(600, seed=1)


@pytest.fixture
def few(monkeypatch):
    """Let the data set have few images, so that it is soon rendered."""
    monkeypatch.setattr(data, "RENDERED_TRAIN_IMAGES", 40)
    monkeypatch.setattr(data, "RENDERED_TEST_IMAGES", 10)
    smaller = data.DATA_SETS[NAME]._replace(train_images=40, test_images=10)
    monkeypatch.setitem(data.DATA_SETS, NAME, smaller)


def test_equal_seeds_give_equal_images(digits):
    again = render_digits(600, seed=1)
    np.testing.assert_array_equal(again.images, digits.images)
    np.testing.assert_array_equal(again.labels, digits.labels)
    other = render_digits(600, seed=2)
    assert not np.array_equal(other.images, digits.images)
    assert np.bincount(digits.labels).tolist() == [60] * DIGITS
    assert (digits.images.shape, digits.images.dtype) == ((600, 784), np.uint8)


def test_digits_have_their_holes(digits):
    """Of images with all colours inverted, the pieces beside the one around the digit."""
    holes = []
    for image in digits.images:
        _, pieces = ndimage.label(image.reshape(28, 28) < 128)
        holes.append(pieces - 1)
    for digit, expected in enumerate(HOLES):
        of_digit = np.array(holes)[digits.labels == digit]
        if expected is not None:
            # Narrow holes of bold fonts close, and bent strokes may touch.
            assert np.mean(of_digit == expected) > 0.75, digit


def test_digits_are_upright_and_centred(digits):
    images = digits.images.reshape(-1, 28, 28).astype(float)
    ink = images.sum((1, 2))
    position = np.arange(28)
    row = np.einsum("nij,i->n", images, position) / ink
    column = np.einsum("nij,j->n", images, position) / ink
    assert np.abs(row - 13.5).max() <= 0.51
    assert np.abs(column - 13.5).max() <= 0.51
    # The ring of a six is at the bottom, that of a nine at the top.
    top = images[:, :14].sum((1, 2)) / ink
    six = top[digits.labels == 6].mean()
    nine = top[digits.labels == 9].mean()
    assert six < 0.5 < nine
    assert digits.images.max() == 255


def test_a_linear_model_of_half_of_them_reads_the_other_half(digits):
    """Fonts are alike enough, and no label is that of another digit."""
    sklearn = pytest.importorskip("sklearn.linear_model")
    learn, read = slice(0, 400), slice(400, 600)
    model = sklearn.LogisticRegression(C=0.01, max_iter=200)
    model.fit(digits.images[learn] / 255, digits.labels[learn])
    accuracy = model.score(digits.images[read] / 255, digits.labels[read])
    assert accuracy > 0.6
    assert len(set(FONTS)) == 21


def test_they_are_a_data_set_like_others(few, call):
    code, out, err = call("data", NAME, "--json")
    assert code == 0, err
    document = strict(out)
    assert (document["train"], document["test"]) == (40, 10)
    assert document["verified"] is False
    images = data.load(NAME)
    expected = render_digits(50, data.RENDERED_SEED)
    np.testing.assert_array_equal(images.train_images, expected.images[:40])
    np.testing.assert_array_equal(images.test_labels, expected.labels[40:])
    # A file of another size is refused, and made again.
    path = data.cache_folder() / NAME / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with raises_input_error("data", NAME):
        data.load(NAME)
    assert call("data", NAME)[0] == 0
    np.testing.assert_array_equal(data.load(NAME).test_labels, images.test_labels)


def test_several_public_sets_whiten_together(few):
    """As if all their rows were one set; whichever comes first."""
    generator = np.random.default_rng(0)
    first = generator.normal(size=(70, 4)) + 1
    second = 3 * generator.normal(size=(30, 4))
    together = public_whitening(np.concatenate([first, second]), ridge=0.1)
    apart = public_whitening(second, first, ridge=0.1)
    np.testing.assert_allclose(apart.mean, together.mean, rtol=1e-6)
    np.testing.assert_allclose(apart.root, together.root, rtol=1e-4, atol=1e-6)
    assert apart.radius == pytest.approx(together.radius, rel=1e-4)
    with raises_input_error("whiten_from", "(5, 3)"):
        public_whitening(first, np.ones((5, 3)))
    data.fetch(NAME)
    with raises_input_error("whiten_from", NAME):
        image_features(NAME, ("fashion-mnist", NAME))


def test_a_public_set_may_whiten_the_private_images_and_have_the_mean_of_the_prior(
    few,
):
    data.fetch(NAME)
    section = PosteriorSection(
        model="softmax",
        data="mnist",
        features="scattering",
        whiten_from=[NAME],
        prior_from=NAME,
    )
    public = load_public_images(section)
    images = data.load(NAME)
    rows = scattering_features(images.train_images)
    whitened = public_whitening(rows, ridge=section.whiten_ridge)(rows)
    np.testing.assert_allclose(public.X, whitened, atol=1e-4)
    np.testing.assert_array_equal(public.y, images.train_labels)
