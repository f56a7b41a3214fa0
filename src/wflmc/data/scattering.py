"""Features of images from a fixed wavelet transform, which no data have formed: they are public and cost no privacy.

With Morlet wavelets ψ_λ, λ = (scale j, orientation), and a Gaussian low-pass filter φ, the scattering transform
(Bruna and Mallat 2013) of an image x is, at every fourth pixel in both directions,

    S₀ = x ⋆ φ,    S₁(λ₁) = |x ⋆ ψ_λ₁| ⋆ φ,    S₂(λ₁, λ₂) = ||x ⋆ ψ_λ₁| ⋆ ψ_λ₂| ⋆ φ    for j₂ > j₁.

Filters, padding and the order of channels are those of Kymatio (Andreux et al. 2020), so that results can be compared.
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

PIXELS, MARGIN, ORIENTATIONS = 28, 4, 8
SIZE = PIXELS + 2 * MARGIN
"""Pixels of a padded image in each direction, which convolutions take to be periodic."""
CHANNELS, PLACES = 1 + 2 * ORIENTATIONS + ORIENTATIONS**2, PIXELS // 4
FEATURES = CHANNELS * PLACES**2
GROUPS = 27
"""Of 3 channels each, the best number for Fashion-MNIST in Tramèr and Boneh (2021): enough groups to bring the weak
channels of second order to the scale of the others, and few enough that orientations keep their relative strength."""
FLOOR = 1e-5
"""Added to a group's variance, as is usual: a group without content stays near zero."""
BATCH = 64
"""Images transformed at once; larger batches do not fit into a processor's cache and take longer."""
VERSION = 1
"""Of the features; raise it when they change, so that files of earlier versions are not read."""
PI = 3.1415
"""As in the scale of Kymatio's filters; with all digits of π, coefficients would differ by up to 1e-4 of their size."""


def transform(images: ArrayLike) -> Array:
    """Return the scattering transform of second order, with 2 scales and 8 orientations, [N, 81, 7, 7].

    Channels: S₀; S₁ by scale, then orientation; S₂ by the orientation of the first wavelet, then of the second.

    Args:
        images: [N, 28, 28] or [N, 784], floats in [0, 1] or bytes, which are divided by 255.
    """
    return np.concatenate([*_batches(_transform, _checked(images))]).reshape(
        -1, CHANNELS, PLACES, PLACES
    )


def scattering_features(images: ArrayLike) -> Array:
    """Return features of unit length, [N, 3969]: the scattering transform, normalised by groups of channels.

    Each group of channels of an image is centred and scaled by its own mean and standard deviation (Tramèr and Boneh
    2021); then the whole vector is scaled to unit length. The features of an image depend on no other image, and no
    data have formed the transform: it is public and costs no privacy. The features of a black image are zero.

    Args:
        images: as for `transform`.
    """
    return np.concatenate([*_batches(_normalised, _checked(images))])


def cached_features(images: ArrayLike, folder: str | Path | None = None) -> Array:
    """Return `scattering_features` from a file that is read as needed, and made the first time in little memory.

    Args:
        images: as for `transform`.
        folder: of the files; else the user's cache.
    """
    pixels = _checked(images)
    path = (
        Path(folder or cache_folder() / "scattering")
        / f"{digest(pixels)}-{VERSION}.npy"
    )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "descr": np.dtype(np.float32).str,
            "fortran_order": False,
            "shape": (len(pixels), FEATURES),
        }
        with replacing(path, f".{os.getpid()}.part") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for values in _batches(_normalised, pixels):
                file.write(values.tobytes())
    return np.load(path, mmap_mode="r")


def _checked(images: ArrayLike) -> Pixels:
    pixels = np.asarray(images)
    shaped = pixels.shape[1:] in ((PIXELS, PIXELS), (PIXELS**2,)) and len(pixels) > 0
    if not shaped or not (
        pixels.dtype == np.uint8 or np.issubdtype(pixels.dtype, np.floating)
    ):
        raise InputError(
            "images",
            images,
            "at least one image of 28 x 28 pixels: bytes, or floats between 0 and 1",
        )
    return pixels


def _batches(transform: Transform, pixels: Pixels) -> Iterator[Array]:
    """Yield transforms of some images at a time, [rows, 3969]; the last are padded, so that one shape is compiled."""
    for start in range(0, len(pixels), BATCH):
        rows = pixels[start : start + BATCH].reshape(-1, PIXELS, PIXELS)
        batch = np.zeros((BATCH, PIXELS, PIXELS), np.float32)
        batch[: len(rows)] = rows
        values = transform(
            batch / np.float32(255) if pixels.dtype == np.uint8 else batch
        )
        yield np.asarray(values).reshape(BATCH, FEATURES)[: len(rows)]


@jax.jit
def _transform(images: jax.Array) -> jax.Array:
    """Return the coefficients [n, 81, 7, 7] of images [n, 28, 28]."""
    fine, coarse = _wavelets()
    padded = jnp.pad(
        images, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)), mode="reflect"
    )[:, None]
    spectrum = jnp.fft.fft2(padded)
    first = jnp.abs(jnp.fft.ifft2(spectrum * fine))
    # The output of coarse wavelets has low frequencies only: every second pixel is enough.
    second = _halved_modulus(jnp.fft.fft2(first)[:, :, None] * coarse)
    maps = (padded, 0), (first, 0), (_halved_modulus(spectrum * coarse), 1), (second, 1)
    low = [
        _low_pass(values, j).reshape(len(images), -1, PLACES, PLACES)
        for values, j in maps
    ]
    return jnp.concatenate(low, axis=1)


@jax.jit
def _normalised(images: jax.Array) -> jax.Array:
    """Return the features [n, 3969] of images [n, 28, 28]."""
    groups = _transform(images).reshape(len(images), GROUPS, -1)
    centred = groups - groups.mean(2, keepdims=True)
    flat = (centred / jnp.sqrt((centred**2).mean(2, keepdims=True) + FLOOR)).reshape(
        len(images), -1
    )
    length = jnp.linalg.norm(flat, axis=1, keepdims=True)
    return flat / jnp.where(length > 0, length, 1)


def _halved_modulus(spectra: jax.Array) -> jax.Array:
    """Return the modulus of the inverse transform at every second pixel: aliased frequencies are averaged."""
    folded = spectra.reshape(*spectra.shape[:-2], 2, SIZE // 2, 2, SIZE // 2).mean(
        (-4, -2)
    )
    return jnp.abs(jnp.fft.ifft2(folded))


def _low_pass(values: jax.Array, j: int) -> jax.Array:
    """Return values ⋆ φ at the 7 x 7 places; the Gaussian is a product of its two directions."""
    matrix = _averages()[j]
    return jnp.einsum("pu,...uv,qv->...pq", matrix, values, matrix, precision="highest")


@functools.cache
def _wavelets() -> Array:
    """Return the Fourier transforms of the wavelets, which are real, [scale, orientation, SIZE, SIZE]."""
    u, v = np.mgrid[-2 * SIZE : 3 * SIZE, -2 * SIZE : 3 * SIZE]

    def periodic(values: NDArray[np.complexfloating]) -> NDArray[np.complexfloating]:
        return values.reshape(5, SIZE, 5, SIZE).sum((0, 2))

    def morlet(j: int, angle: float) -> NDArray[np.float64]:
        sigma, frequency, slant = 0.8 * 2**j, 0.75 * np.pi / 2**j, 4 / ORIENTATIONS
        along, across = (
            u * np.cos(angle) + v * np.sin(angle),
            v * np.cos(angle) - u * np.sin(angle),
        )
        window = (
            np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
            * slant
            / (2 * PI * sigma**2)
        )
        wave, envelope = (
            periodic(window * np.exp(1j * frequency * along)),
            periodic(window),
        )
        return np.fft.fft2(
            wave - wave.sum() / envelope.sum() * envelope
        ).real  # of mean zero

    angles = (3 - np.arange(ORIENTATIONS)) * np.pi / ORIENTATIONS
    return np.array(
        [[morlet(j, angle) for angle in angles] for j in (0, 1)], np.float32
    )


@functools.cache
def _averages() -> tuple[Array, Array]:
    """Return φ in one direction as matrices from all pixels, and from every second one, to the places: [7, pixels]."""
    sigma = 1.6
    gauss = (
        np.exp(-(np.arange(-2 * SIZE, 3 * SIZE) ** 2) / (2 * sigma**2))
        .reshape(5, SIZE)
        .sum(0)
    )
    spectrum = np.fft.fft(gauss / np.sqrt(2 * PI * sigma**2)).real

    def matrix(step: int) -> Array:
        half = SIZE // step // 2
        kernel = np.fft.ifft(
            np.r_[spectrum[:half], spectrum[-half:]]
        ).real  # without frequencies that would coincide
        places = (MARGIN + 4 * np.arange(PLACES)) // step
        return kernel[(places[:, None] - np.arange(2 * half)) % (2 * half)].astype(
            np.float32
        )

    return matrix(1), matrix(2)
