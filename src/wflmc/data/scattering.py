"""Features of images from a fixed wavelet transform, which no data have formed.

They are public and cost no privacy. With Morlet wavelets ψ_λ, λ = (scale j,
orientation), and a Gaussian low-pass filter φ, the scattering transform (Bruna and
Mallat 2013) of an image x is, at every fourth pixel in both directions,

    S₀ = x ⋆ φ
    S₁(λ₁) = |x ⋆ ψ_λ₁| ⋆ φ
    S₂(λ₁, λ₂) = ||x ⋆ ψ_λ₁| ⋆ ψ_λ₂| ⋆ φ    for j₂ > j₁.

Filters, padding and the order of channels are those of Kymatio (Andreux et al. 2020),
so that results can be compared.
"""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.data.sets import cache_folder
from wflmc.support.errors import InputError
from wflmc.support.keys import digest
from wflmc.support.storage import replacing

Array = NDArray[np.float32]
Pixels = NDArray[np.uint8 | np.floating]
Transform = Callable[[Array], jax.Array]

PIXELS = 28
"""Pixels of an image in each direction."""
MARGIN = 4
"""Pixels that are added at every edge, by reflection."""
SIZE = PIXELS + 2 * MARGIN
"""Pixels of a padded image in each direction, which convolutions take to be
periodic."""
SCALES = (0, 1)
"""j of the wavelets."""
ORIENTATIONS = 8
STRIDE = 4
"""Pixels from one coefficient to the next, in each direction."""
POSITIONS = PIXELS // STRIDE
"""Coefficients of a channel in each direction."""
CHANNELS = 1 + len(SCALES) * ORIENTATIONS + ORIENTATIONS**2
FEATURES = CHANNELS * POSITIONS**2
GROUPS = 27
"""Of 3 channels each, the best number for Fashion-MNIST in Tramèr and Boneh (2021):
enough groups to bring the weak channels of second order to the scale of the others, and
few enough that orientations keep their relative strength."""
FLOOR = 1e-5
"""Added to a group's variance, as is usual: a group without content stays near zero."""
BATCH = 64
"""Images transformed at once; larger batches do not fit into a processor's cache and
take longer."""
VERSION = 1
"""Of the features; raise it when they change, so that files of earlier versions are not
read."""
PI = 3.1415
"""As in the scale of Kymatio's filters; with all digits of π, coefficients would differ
by up to 1e-4 of their size."""
MORLET_SIGMA = 0.8
"""Width of the wavelets' windows along the wave in pixels, at scale 0."""
MORLET_FREQUENCY = 0.75 * np.pi
"""Angular frequency of the wavelets in radians per pixel, at scale 0."""
MORLET_SLANT = 4 / ORIENTATIONS
"""Width of a window along the wave, over that at a right angle to it."""
LOW_PASS_SIGMA = 1.6
"""Width of φ in pixels."""
PERIODS = 5
"""Periods of a filter that are added up to make it periodic; beyond them it
vanishes."""
FILTER_RANGE = (-2 * SIZE, 3 * SIZE)
"""Pixels of these periods."""


def transform(images: ArrayLike) -> Array:
    """Return the scattering transform of second order.

    It has 2 scales and 8 orientations. Channels: S₀; S₁ by scale, then orientation; S₂
    by the orientation of the first wavelet, then of the second.

    Args:
        images: [N, 28, 28] or [N, 784], floats in [0, 1] or bytes, which are divided by
            255.

    Returns:
        [N, 81, 7, 7], in float32.

    Raises:
        InputError: if the images have another shape or type, or if there are none.
    """
    batches = _batches(_transform, _checked(images))
    coefficients = np.concatenate([*batches])
    return coefficients.reshape(-1, CHANNELS, POSITIONS, POSITIONS)


def scattering_features(images: ArrayLike) -> Array:
    """Return the scattering transform of images, normalized by groups of channels.

    Each group of channels of an image is centred and scaled by its own mean and
    standard deviation (Tramèr and Boneh 2021); then the complete vector is scaled to
    unit length. The features of an image depend on no other image, and no data have
    formed the transform: it is public and costs no privacy. The features of a black
    image are zero.

    Args:
        images: as for `transform`.

    Returns:
        Features of unit length, [N, 3969], in float32.

    Raises:
        InputError: as `transform`.
    """
    return np.concatenate([*_batches(_normalized, _checked(images))])


def cached_features(images: ArrayLike, folder: str | Path | None = None) -> Array:
    """Return `scattering_features` from a file, which is written the first time.

    The file has the digest of the images for its name. It is read as needed and written
    batch by batch, so that 60,000 images take little memory; an interrupt leaves no
    part of it.

    It is for public images: other users of the machine may read the file, whose
    features tell much of the images, and compare its name with guesses.

    Args:
        images: as for `transform`.
        folder: of the files; None for the user's cache.

    Returns:
        Features [N, 3969], mapped into memory and read-only.

    Raises:
        InputError: as `transform`.
    """
    pixels = _checked(images)
    folder = Path(folder or cache_folder() / "scattering")
    path = folder / f"{digest(pixels)}-{VERSION}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        header = {
            "descr": np.dtype(np.float32).str,
            "fortran_order": False,
            "shape": (len(pixels), FEATURES),
        }
        # Several processes may compute the same file at once.
        with replacing(path, f".{os.getpid()}.part") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for values in _batches(_normalized, pixels):
                file.write(values.tobytes())
    return np.load(path, mmap_mode="r")


def _checked(images: ArrayLike) -> Pixels:
    """Return images as an array; raise if their shape or type is wrong."""
    pixels = np.asarray(images)
    has_shape = pixels.shape[1:] in ((PIXELS, PIXELS), (PIXELS**2,))
    has_type = pixels.dtype == np.uint8 or np.issubdtype(pixels.dtype, np.floating)
    if not has_shape or len(pixels) == 0 or not has_type:
        raise InputError(
            "images",
            images,
            "at least one image of 28 x 28 pixels: bytes, or floats between 0 and 1",
        )
    return pixels


def _batches(transform: Transform, pixels: Pixels) -> Iterator[Array]:
    """Yield transforms of up to `BATCH` images at a time, [rows, 3969].

    Transforms always get `BATCH` images, so that one shape is compiled: the last ones
    are filled up with black images, whose features are dropped.
    """
    is_bytes = pixels.dtype == np.uint8
    for start in range(0, len(pixels), BATCH):
        rows = pixels[start : start + BATCH].reshape(-1, PIXELS, PIXELS)
        batch = np.zeros((BATCH, PIXELS, PIXELS), np.float32)
        batch[: len(rows)] = rows
        if is_bytes:
            batch = batch / np.float32(255)
        values = np.asarray(transform(batch))
        yield values.reshape(BATCH, FEATURES)[: len(rows)]


@jax.jit
def _transform(images: jax.Array) -> jax.Array:
    """Return the coefficients [n, 81, 7, 7] of images [n, 28, 28]."""
    fine, coarse = _wavelets()
    margins = ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN))
    padded = jnp.pad(images, margins, mode="reflect")[:, None]
    spectrum = jnp.fft.fft2(padded)
    first_fine = jnp.abs(jnp.fft.ifft2(spectrum * fine))
    # The output of coarse wavelets has low frequencies only: every second pixel is
    # enough.
    first_coarse = _halved_modulus(spectrum * coarse)
    second_spectra = jnp.fft.fft2(first_fine)[:, :, None] * coarse
    second = _halved_modulus(second_spectra)
    channels = [
        _low_pass(padded, 1),
        _low_pass(first_fine, 1),
        _low_pass(first_coarse, 2),
        _low_pass(second, 2),
    ]
    shape = (len(images), -1, POSITIONS, POSITIONS)
    return jnp.concatenate([values.reshape(shape) for values in channels], axis=1)


@jax.jit
def _normalized(images: jax.Array) -> jax.Array:
    """Return the features [n, 3969] of images [n, 28, 28]."""
    groups = _transform(images).reshape(len(images), GROUPS, -1)
    centred = groups - groups.mean(2, keepdims=True)
    variance = (centred**2).mean(2, keepdims=True)
    scaled = centred / jnp.sqrt(variance + FLOOR)
    flat = scaled.reshape(len(images), -1)
    length = jnp.linalg.norm(flat, axis=1, keepdims=True)
    return flat / jnp.where(length > 0, length, 1)


def _halved_modulus(spectra: jax.Array) -> jax.Array:
    """Return the modulus of the inverse transform at every second pixel.

    Frequencies that coincide there are averaged.
    """
    half = SIZE // 2
    aliases = spectra.reshape(*spectra.shape[:-2], 2, half, 2, half)
    folded = aliases.mean((-4, -2))
    return jnp.abs(jnp.fft.ifft2(folded))


def _low_pass(values: jax.Array, step: int) -> jax.Array:
    """Return values ⋆ φ at the 7 x 7 positions; φ is a product of its two directions.

    Args:
        values: at every pixel, or at every second one, [..., pixels, pixels].
        step: pixels from one value to the next.
    """
    matrix = _averages(step)
    return jnp.einsum("pu,...uv,qv->...pq", matrix, values, matrix, precision="highest")


@functools.cache
def _wavelets() -> Array:
    """Return the Fourier transforms of the wavelets, which are real.

    Returns:
        [scale, orientation, SIZE, SIZE].
    """
    angles = (3 - np.arange(ORIENTATIONS)) * np.pi / ORIENTATIONS
    spectra = [[_morlet(scale, angle) for angle in angles] for scale in SCALES]
    return np.array(spectra, np.float32)


def _morlet(scale: int, angle: float) -> NDArray[np.float64]:
    """Return the Fourier transform of a Morlet wavelet, which has mean zero."""
    first, last = FILTER_RANGE
    u, v = np.mgrid[first:last, first:last]
    sigma = MORLET_SIGMA * 2**scale
    frequency = MORLET_FREQUENCY / 2**scale
    wave_axis = u * np.cos(angle) + v * np.sin(angle)
    front_axis = v * np.cos(angle) - u * np.sin(angle)
    squared_distance = wave_axis**2 + (MORLET_SLANT * front_axis) ** 2
    gaussian = np.exp(-squared_distance / (2 * sigma**2))
    window = gaussian * MORLET_SLANT / (2 * PI * sigma**2)
    wave = _periodic(window * np.exp(1j * frequency * wave_axis))
    envelope = _periodic(window)
    mean_ratio = wave.sum() / envelope.sum()
    return np.fft.fft2(wave - mean_ratio * envelope).real


def _periodic(values: NDArray[np.inexact]) -> NDArray[np.inexact]:
    """Return the sum of all periods of values, [SIZE, SIZE]."""
    return values.reshape(PERIODS, SIZE, PERIODS, SIZE).sum((0, 2))


@functools.cache
def _averages(step: int) -> Array:
    """Return φ in one direction as a matrix from pixels to positions, [7, pixels].

    Args:
        step: 1 for all pixels, 2 for every second one.
    """
    squares = np.arange(*FILTER_RANGE) ** 2
    gaussian = np.exp(-squares / (2 * LOW_PASS_SIGMA**2))
    periodic = gaussian.reshape(PERIODS, SIZE).sum(0)
    spectrum = np.fft.fft(periodic / np.sqrt(2 * PI * LOW_PASS_SIGMA**2)).real
    pixels = SIZE // step
    half = pixels // 2
    # At every second pixel, frequencies above half of the highest are left out, as they
    # would coincide with lower ones.
    low_frequencies = np.concatenate([spectrum[:half], spectrum[-half:]])
    kernel = np.fft.ifft(low_frequencies).real
    positions = (MARGIN + STRIDE * np.arange(POSITIONS)) // step
    distances = positions[:, None] - np.arange(2 * half)
    return kernel[distances % (2 * half)].astype(np.float32)
