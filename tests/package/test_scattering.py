"""The scattering transform: Kymatio's numbers, the symmetries of its definition, and features from the cache."""

from __future__ import annotations

import numpy as np
import pytest

from wflmc.data import scattering as module
from wflmc.data.scattering import BATCH, cached_features, scattering_features, transform

from ..error_tools import raises_input_error


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def images():
    """Smooth random images as bytes, more than one batch."""
    waves = np.random.default_rng(0).normal(size=(BATCH + 5, 28, 28))
    smooth = np.cumsum(np.cumsum(waves, axis=1), axis=2)
    low, high = smooth.min((1, 2), keepdims=True), smooth.max((1, 2), keepdims=True)
    return (
        np.round(255 * (smooth - low) / (high - low)).astype(np.uint8).reshape(-1, 784)
    )


def inside():
    """An image with content in pixels 6 to 18 only, so that its padding is black and pixel 12 is its centre."""
    image = np.zeros((28, 28))
    image[6:19, 6:19] = np.random.default_rng(1).uniform(size=(13, 13))
    return image


def test_the_transform_equals_kymatios(images):
    reason = "Kymatio is not installed: pip install kymatio"
    kymatio = pytest.importorskip(
        "kymatio.scattering2d.frontend.numpy_frontend", reason=reason
    )
    expected = kymatio.ScatteringNumPy2D(J=2, shape=(28, 28), L=8)(
        images[:8].reshape(-1, 28, 28) / 255.0
    )
    np.testing.assert_allclose(transform(images[:8]), expected, atol=1e-6)


def test_the_transform_has_numbers_that_kymatio_gave():
    u, v = np.mgrid[:28, :28]
    channels = transform(0.5 + 0.5 * np.sin(0.9 * u + 0.02 * v * v)[None])[0]
    assert channels.shape == (81, 7, 7)
    kymatio = {
        (0, 0, 6): 0.4971527,
        (3, 2, 5): 0.1047045,
        (9, 6, 0): 0.0111604,
        (16, 1, 3): 0.0119116,
        (17, 3, 3): 0.0018847,
        (44, 4, 2): 0.0009877,
        (80, 5, 1): 0.0006114,
    }
    assert {place: channels[place] for place in kymatio} == pytest.approx(
        kymatio, abs=1e-6
    )


def test_bytes_are_pixels_between_0_and_1(images):
    three = images[:3]
    np.testing.assert_allclose(
        transform(three), transform(three.reshape(-1, 28, 28) / 255.0), atol=1e-6
    )


def test_a_constant_image_has_its_value_in_channel_0_and_nothing_else():
    channels = transform(np.full((1, 28, 28), 0.7))[0]
    np.testing.assert_allclose(channels[0], 0.7, rtol=1e-4)
    np.testing.assert_allclose(channels[1:], 0, atol=1e-6)


def test_the_transform_brings_no_two_images_further_apart(images):
    pixels = images.reshape(-1, 28, 28) / 255.0
    differences = transform(pixels[1:]) - transform(pixels[:-1])
    padded = np.pad(pixels, ((0, 0), (4, 4), (4, 4)), mode="reflect")
    distance = np.sum(np.diff(padded, axis=0) ** 2, axis=(1, 2))
    # One place stands for 4 x 4 pixels.
    assert np.all(16 * np.sum(differences**2, axis=(1, 2, 3)) <= distance)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_shift_by_4_pixels_shifts_all_channels_by_a_place(axis):
    first, second = transform([inside(), np.roll(inside(), 4, axis)])
    unshifted, shifted = (
        np.delete(values, end, axis + 1) for values, end in ((first, -1), (second, 0))
    )
    np.testing.assert_allclose(shifted, unshifted, atol=1e-6)
    assert np.abs(second - first).max() > 0.1


def test_a_rotation_by_90_degrees_turns_places_and_orientations():
    image, turned = inside(), inside()
    turned[:25, :25] = np.rot90(image[:25, :25])
    before, after = transform([image, turned])
    expected = np.rot90(before, axes=(1, 2))
    np.testing.assert_allclose(after[0], expected[0], atol=1e-6)
    orientations = np.roll(expected[1:17].reshape(2, 8, 7, 7), 4, axis=1)
    np.testing.assert_allclose(after[1:17].reshape(2, 8, 7, 7), orientations, atol=1e-6)
    pairs = np.roll(expected[17:].reshape(8, 8, 7, 7), (4, 4), axis=(0, 1))
    np.testing.assert_allclose(after[17:].reshape(8, 8, 7, 7), pairs, atol=1e-6)


def test_stripes_are_strongest_in_the_orientation_across_them():
    stripes = 0.5 + 0.5 * np.sin(0.75 * np.pi * np.mgrid[:28, :28][0])
    strength = transform(stripes[None])[0, 1:9, 3, 3]
    assert strength.argmax() == 3  # angle 0 with the first axis, as Kymatio counts


def test_the_transform_scales_with_the_image(images):
    pixels = images[:3] / 255.0
    np.testing.assert_allclose(
        transform(0.3 * pixels), 0.3 * transform(pixels), atol=1e-6
    )


def test_features_have_unit_length_and_groups_of_mean_zero(images):
    features = scattering_features(images)
    assert features.shape == (len(images), 3969)
    assert features.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(features.reshape(-1, 27, 3 * 49).mean(2), 0, atol=1e-6)


def test_features_are_the_normalised_transform(images):
    groups = transform(images[:2]).astype(float).reshape(2, 27, -1)
    scaled = (groups - groups.mean(2, keepdims=True)) / np.sqrt(
        groups.var(2, keepdims=True) + 1e-5
    )
    expected = scaled.reshape(2, -1) / np.linalg.norm(
        scaled.reshape(2, -1), axis=1, keepdims=True
    )
    np.testing.assert_allclose(scattering_features(images[:2]), expected, atol=1e-5)


def test_features_of_constant_images_are_finite():
    black, grey = scattering_features(
        np.stack([np.zeros((28, 28)), np.full((28, 28), 0.5)])
    )
    assert not black.any()
    assert np.linalg.norm(grey) == pytest.approx(1)


def test_batches_do_not_matter(images):
    features = scattering_features(images)
    np.testing.assert_allclose(
        features[-7:], scattering_features(images[-7:]), atol=1e-7
    )


def test_any_number_of_images_takes_one_compilation(images, monkeypatch):
    scattering_features(images[:1])
    monkeypatch.setattr(
        module, "_wavelets", lambda: pytest.fail("the transform was traced again")
    )
    scattering_features(images[:9])


def test_the_cache_has_the_same_features_and_is_used_the_second_time(
    images, tmp_path, monkeypatch
):
    three = images[:3]
    first = cached_features(three)
    np.testing.assert_array_equal(first, scattering_features(three))
    assert [path.suffix for path in (tmp_path / "wflmc" / "scattering").iterdir()] == [
        ".npy"
    ]
    monkeypatch.setattr(module, "_normalized", lambda _: pytest.fail("computed again"))
    second = cached_features(three)
    assert isinstance(second, np.memmap)
    np.testing.assert_array_equal(first, second)


def test_other_images_and_other_versions_have_files_of_their_own(
    images, tmp_path, monkeypatch
):
    cached_features(images[:1], tmp_path / "own")
    cached_features(images[1:2], tmp_path / "own")
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    cached_features(images[:1], tmp_path / "own")
    assert len(list((tmp_path / "own").iterdir())) == 3


def test_an_interrupted_computation_leaves_no_file(images, tmp_path, monkeypatch):
    computed = module._normalized
    batches = iter([True, False])

    def stop(batch):
        if not next(batches):
            raise KeyboardInterrupt
        return computed(batch)

    monkeypatch.setattr(module, "_normalized", stop)
    with pytest.raises(KeyboardInterrupt):
        cached_features(images, tmp_path / "own")
    assert not list((tmp_path / "own").iterdir())


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((2, 32, 32)), np.zeros((0, 784)), np.zeros((2, 784), int), np.zeros(784)],
)
def test_other_arrays_are_refused(wrong):
    with raises_input_error("images", wrong.shape):
        scattering_features(wrong)
