"""Public features: rows brought to unit scale by the moments of another data set, and images as such rows.

With mean m and covariance M of a public data set, a row u becomes z = A (u − m) with AᵀA = (M + λI)⁻¹, shortened to the
median length r of public rows where it is longer, and divided by r. All of it depends on public data alone, and what
becomes of a row on no other row: it costs no privacy. Any root A does: a rotation of z changes neither lengths nor
inner products, and a prior N(0, s² I) and the noise of a channel not at all.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import cholesky, solve_triangular

from wflmc.data.scattering import VERSION, cached_features
from wflmc.data.sets import DATA_SETS, Features, cache_folder, load
from wflmc.support.errors import InputError
from wflmc.support.keys import digest
from wflmc.support.storage import replacing

Array = NDArray[np.float32]

CONSTANT = 0.3
"""The feature of an intercept, beside rows of length 1 at most: its curvature is then of the size of the others'."""
ROWS = 4096
"""Rows at a time."""
MEASURED = 10_000
"""Rows, evenly spaced, whose lengths are measured."""
RIDGE = 1e-3
"""λ, for rows of unit length."""


class Whitening(NamedTuple):
    """How rows are brought to unit scale."""

    mean: Array
    """m[d]."""
    root: Array
    """Aᵀ[d, d], for rows: z = (u − m) Aᵀ."""
    radius: float
    """r."""

    def __call__(self, rows: ArrayLike, intercept: bool = False) -> Array:
        """Return rows[N, d] of length 1 at most, in float32; with a constant feature for an intercept, [N, d + 1]."""
        given = np.asarray(rows)
        if given.ndim != 2 or given.shape[1] != self.mean.size:
            raise InputError(
                "whiten_from",
                f"{self.mean.size} features",
                f"as many as in the data, {given.shape[-1:]}",
            )
        made = np.full((len(given), self.mean.size + intercept), CONSTANT, np.float32)
        for some, block in _blocks(given):
            z = np.asarray(_times(block - self.mean, self.root))[
                : some.stop - some.start
            ]
            length = np.maximum(np.linalg.norm(z, axis=1, keepdims=True), self.radius)
            made[some, : self.mean.size] = z / length
        return made


def public_whitening(rows: ArrayLike, ridge: float = RIDGE) -> Whitening:
    """Return the whitening by the mean and covariance of public rows[N, d].

    Args:
        rows: of a data set that is not to be protected.
        ridge: λ above 0, added to the covariance: directions of less variance are stretched no further.
    """
    given = np.asarray(rows)
    if given.ndim != 2 or len(given) < 2 or not np.all(np.isfinite(given)):
        raise InputError(
            "whiten_from", f"shape {given.shape}", "finite public rows, [N, d]"
        )
    if not 0 < ridge < np.inf:
        raise InputError("whiten_ridge", ridge, "finite and above 0")
    mean = np.mean(given, axis=0, dtype=float)
    total = np.zeros((mean.size, mean.size))
    for some, block in _blocks(given):
        centred = (block - mean.astype(np.float32)) * (
            np.arange(len(block)) < some.stop - some.start
        )[:, None]
        total += np.asarray(_times(centred.T, centred))
    factor = cholesky(total / len(given) + ridge * np.eye(mean.size), lower=True)
    root = solve_triangular(factor, np.eye(mean.size), lower=True).T.astype(np.float32)
    made = Whitening(mean.astype(np.float32), root, 1.0)
    few = given[:: -(-len(given) // MEASURED)]
    lengths = [
        np.linalg.norm(np.asarray(_times(block - made.mean, root)), axis=1)
        for _, block in _blocks(few)
    ]
    return made._replace(radius=float(np.median(np.concatenate(lengths)[: len(few)])))


def image_features(
    name: str,
    whiten_from: str = "",
    ridge: float = RIDGE,
    intercept: bool = False,
    chosen: NDArray[np.intp] | None = None,
) -> Features:
    """Return scattering features of the images of a data set, float32, and its test set.

    Args:
        name: mnist or fashion-mnist.
        whiten_from: the public data set whose moments whiten them; empty: none does.
        ridge: of `public_whitening`.
        intercept: add a constant feature.
        chosen: places of training images; all of them by default.
    """
    if whiten_from == name:
        raise InputError(
            "whiten_from",
            whiten_from,
            f"another data set than {name}, whose moments are private",
        )
    images = load(name)
    rows = (
        slice(None)
        if chosen is None or len(chosen) == len(images.train_labels)
        else chosen
    )
    train, test = (
        cached_features(pixels) for pixels in (images.train_images, images.test_images)
    )
    parts = [train[rows], test]
    if whiten_from:
        whitening = image_whitening(whiten_from, ridge)
        parts = [whitening(rows, intercept) for rows in parts]
    elif intercept:
        parts = [
            np.pad(rows, ((0, 0), (0, 1)), constant_values=CONSTANT) for rows in parts
        ]
    return Features(
        parts[0],
        images.train_labels[rows].astype(np.intp),
        parts[1],
        images.test_labels.astype(np.intp),
    )


def image_whitening(name: str, ridge: float = RIDGE) -> Whitening:
    """Return `public_whitening` by the training images of a data set, from the user's cache where it is there."""
    if name not in DATA_SETS:
        raise InputError("whiten_from", name, f"one of {', '.join(DATA_SETS)}")
    images = load(name).train_images
    path = (
        cache_folder()
        / "scattering"
        / f"{digest(images, np.float64(ridge))}-whitening-{VERSION}.npz"
    )
    if not path.exists():
        made = public_whitening(cached_features(images), ridge)
        with replacing(path, f".{os.getpid()}.part") as file:
            np.savez(file, **made._asdict())
    with np.load(path) as file:
        return Whitening(file["mean"], file["root"], float(file["radius"]))


def _blocks(rows: NDArray[np.floating]) -> Iterator[tuple[slice, Array]]:
    """Yield places and rows in float32; the last block is filled up, so that one shape is compiled."""
    for start in range(0, len(rows), ROWS):
        some = slice(start, min(start + ROWS, len(rows)))
        block = np.zeros((min(ROWS, len(rows)), rows.shape[1]), np.float32)
        block[: some.stop - start] = rows[some]
        yield some, block


@jax.jit
def _times(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")
