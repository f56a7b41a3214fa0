"""Public features: rows brought to unit scale by the moments of another data set.

Images become such rows by their scattering coefficients. With mean m and covariance M
of a public data set, a row u becomes z = A (u − m) with AᵀA = (M + λI)⁻¹, shortened to
the median length r of public rows where it is longer, and divided by r. All of it
depends on public data alone, and what becomes of a row on no other row: it costs no
privacy. Any root A does: a rotation of z changes neither lengths nor inner products,
and a prior N(0, s² I) and the noise of a channel not at all.
"""

import os
from collections.abc import Iterator, Sequence
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
"""The feature of an intercept, beside rows of length 1 at most: its curvature is then
of the size of the others'."""
BLOCK_ROWS = 4096
"""Rows that are computed at a time."""
MAX_MEASURED_ROWS = 10_000
"""Rows, evenly spaced, whose lengths are measured."""
LARGEST_FEATURE = 1e9
"""Of a public row; squares of larger ones would leave little of float32."""
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
        """Return whitened rows of length 1 at most.

        Args:
            rows: [N, d].
            intercept: whether a constant feature is added, beside that length.

        Returns:
            [N, d] or [N, d + 1], in float32.

        Raises:
            InputError: if rows have another number of features.
        """
        values = np.asarray(rows)
        dim = self.mean.size
        if values.ndim != 2 or values.shape[1] != dim:
            raise InputError(
                "whiten_from",
                f"{dim} features",
                f"as many as in the data, whose shape is {values.shape}",
            )
        whitened = np.full((len(values), dim + intercept), CONSTANT, np.float32)
        for block in _blocks(values):
            centred = block.values - self.mean
            padded = np.asarray(_product(centred, self.root))
            z = padded[: block.row_count]
            lengths = np.linalg.norm(z, axis=1, keepdims=True)
            scale = np.maximum(lengths, self.radius)
            whitened[block.rows, :dim] = z / scale
        return whitened


def public_whitening(*row_sets: ArrayLike, ridge: float = RIDGE) -> Whitening:
    """Return the whitening by the mean and covariance of public rows.

    The root is the inverse of a Cholesky factor. The radius is the median length of up
    to 10,000 whitened rows, so that half of the public rows are shortened.

    Args:
        *row_sets: rows that are not to be protected, [N, d] each; all of them count
            alike, whichever set they come from.
        ridge: λ above 0, added to the covariance: directions of less variance are
            stretched no further.

    Returns:
        The whitening, in float32.

    Raises:
        InputError: if the rows are not finite matrices of as many features, of at least
            two rows in all, or if λ is not positive.
    """
    sets = [np.asarray(rows) for rows in row_sets]
    _check_public_rows(sets)
    if not 0 < ridge < np.inf:
        raise InputError("whiten_ridge", ridge, "finite and above 0")
    count = sum(len(values) for values in sets)
    sums = [np.sum(values, axis=0, dtype=float) for values in sets]
    mean = np.sum(sums, axis=0) / count
    rounded_mean = mean.astype(np.float32)
    identity = np.eye(mean.size)
    scatter = sum(_scatter_matrix(values, rounded_mean) for values in sets)
    covariance = scatter / count
    factor = cholesky(covariance + ridge * identity, lower=True)
    inverse_factor = solve_triangular(factor, identity, lower=True)
    root = inverse_factor.T.astype(np.float32)
    radius = _median_length(sets, rounded_mean, root)
    return Whitening(rounded_mean, root, radius)


def _check_public_rows(sets: Sequence[np.ndarray]) -> None:
    """Refuse what is not finite rows [N, d] of the same features, two in all."""
    requirement = "finite public rows, [N, d], of as many features in every set"
    for values in sets:
        if values.ndim != 2 or not np.all(np.isfinite(values)):
            raise InputError("whiten_from", f"shape {values.shape}", requirement)
        largest = float(np.abs(values).max(initial=0.0))
        if largest > LARGEST_FEATURE:
            raise InputError(
                "whiten_from", f"values up to {largest:.3g}", "scaled to moderate size"
            )
    widths = {values.shape[1] for values in sets}
    count = sum(len(values) for values in sets)
    if len(widths) != 1 or count < 2:
        shapes = ", ".join(str(values.shape) for values in sets)
        raise InputError("whiten_from", f"shape {shapes}", requirement)


def _scatter_matrix(values: NDArray[np.floating], mean: Array) -> NDArray[np.float64]:
    """Return Σ (u − m)(u − m)ᵀ over rows u, [d, d].

    Sums are in float32 within a block, and in float64 over blocks.
    """
    total = np.zeros((mean.size, mean.size))
    for block in _blocks(values):
        # Rows that fill the block up would count as −m.
        is_row = np.arange(len(block.values)) < block.row_count
        centred = (block.values - mean) * is_row[:, None]
        total += np.asarray(_product(centred.T, centred))
    return total


def _median_length(sets: Sequence[np.ndarray], mean: Array, root: Array) -> float:
    """Return the median length of whitened rows, from some that are evenly spaced."""
    count = sum(len(values) for values in sets)
    stride = -(-count // MAX_MEASURED_ROWS)
    measured = np.concatenate([values[::stride] for values in sets])
    lengths = []
    for block in _blocks(measured):
        whitened = np.asarray(_product(block.values - mean, root))
        lengths.append(np.linalg.norm(whitened, axis=1))
    return float(np.median(np.concatenate(lengths)[: len(measured)]))


def image_features(
    name: str,
    whiten_from: Sequence[str] = (),
    ridge: float = RIDGE,
    intercept: bool = False,
    chosen: NDArray[np.intp] | None = None,
) -> Features:
    """Return scattering features of the images of a private data set.

    They are public: neither the transform nor the whitening depends on an image of this
    data set. Coefficients and moments are computed once and then read from the user's
    cache.

    Args:
        name: of a data set.
        whiten_from: the public data sets whose moments whiten them; empty for none.
        ridge: of `public_whitening`.
        intercept: whether to add a constant feature.
        chosen: indices of training images, as `draw_images` returns them; None for all
            of them. As many as there are stand for all in their order.

    Returns:
        Features in float32 and labels, of the chosen training images and of the test
        set.

    Raises:
        InputError: if the data set is to be whitened by itself, or is not here.
    """
    if name in whiten_from:
        raise InputError(
            "whiten_from",
            name,
            f"another data set than {name}, whose moments are private",
        )
    return _features_of(name, whiten_from, ridge, intercept, chosen)


def public_image_features(
    name: str,
    whiten_from: Sequence[str] = (),
    ridge: float = RIDGE,
    intercept: bool = False,
) -> Features:
    """Return scattering features of the images of a public data set.

    They are those of `image_features`, but for a data set that may be among those that
    whiten it: its moments are public.

    Args:
        name: of a data set that is not to be protected.
        whiten_from: the public data sets whose moments whiten the features.
        ridge: of `public_whitening`.
        intercept: whether to add a constant feature.

    Returns:
        Features in float32 and labels, of the training images and of the test set.

    Raises:
        InputError: if a data set is not here.
    """
    return _features_of(name, whiten_from, ridge, intercept)


def _features_of(
    name: str,
    whiten_from: Sequence[str],
    ridge: float,
    intercept: bool,
    chosen: NDArray[np.intp] | None = None,
) -> Features:
    """Return features as `image_features` does, whoever may see the images."""
    images = load(name)
    # A slice does not copy the features of all images from the cache.
    rows: slice | NDArray[np.intp] = slice(None)
    if chosen is not None and len(chosen) != len(images.train_labels):
        rows = chosen
    train = cached_features(images.train_images)[rows]
    test = cached_features(images.test_images)
    if whiten_from:
        whitening = image_whitening(*whiten_from, ridge=ridge)
        train = whitening(train, intercept)
        test = whitening(test, intercept)
    elif intercept:
        train = _with_constant(train)
        test = _with_constant(test)
    return Features(
        X=train,
        y=images.train_labels[rows].astype(np.intp),
        X_test=test,
        y_test=images.test_labels.astype(np.intp),
    )


def _with_constant(rows: Array) -> Array:
    """Return rows with the feature of an intercept."""
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=CONSTANT)


def image_whitening(*names: str, ridge: float = RIDGE) -> Whitening:
    """Return the whitening by the training images of one or more data sets.

    It is `public_whitening` of their scattering features, from the user's cache where
    it is there; otherwise it is computed and stored.

    Args:
        *names: of the public data sets.
        ridge: λ.

    Raises:
        InputError: if there is no such data set, or if it is not here.
    """
    for name in names:
        if name not in DATA_SETS:
            raise InputError("whiten_from", name, f"one of {', '.join(DATA_SETS)}")
    images = [load(name).train_images for name in names]
    file_name = f"{digest(*images, np.float64(ridge))}-whitening-{VERSION}.npz"
    path = cache_folder() / "scattering" / file_name
    if not path.exists():
        features = [cached_features(of_set) for of_set in images]
        whitening = public_whitening(*features, ridge=ridge)
        # Several processes may compute the same file at once.
        with replacing(path, f".{os.getpid()}.part") as file:
            np.savez(file, **whitening._asdict())
    with np.load(path) as file:
        return Whitening(file["mean"], file["root"], float(file["radius"]))


class _Block(NamedTuple):
    """Some successive rows."""

    rows: slice
    """Which they are in the whole matrix."""
    values: Array
    """In float32; rows beyond the last one are zeros, so that one shape is compiled."""

    @property
    def row_count(self) -> int:
        """Return the number of rows, without those that fill the block up."""
        return self.rows.stop - self.rows.start


def _blocks(rows: NDArray[np.floating]) -> Iterator[_Block]:
    """Yield successive rows of a matrix in blocks of the same shape."""
    block_rows = min(BLOCK_ROWS, len(rows))
    for start in range(0, len(rows), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(rows))
        block = slice(start, stop)
        values = np.zeros((block_rows, rows.shape[1]), np.float32)
        values[: stop - start] = rows[block]
        yield _Block(block, values)


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the product of matrices, in full float32."""
    return jnp.matmul(left, right, precision="highest")
