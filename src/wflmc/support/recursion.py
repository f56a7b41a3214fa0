"""First-order linear recursions, all steps at once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_banded
from scipy.linalg.blas import dtbsv
from scipy.linalg.lapack import dtbtrs


def first_order(increments: ArrayLike, factor: float | NDArray[np.float64], start: float = 0.0) -> NDArray[np.float64]:
    """v[s] = factor[s]·v[s−1] + increments[s] along the first axis, with v[−1] = start and |factor| ≤ 1.

    It is a triangular system with two bands, which BLAS solves by the recursion itself (for many columns LAPACK
    does, where nothing is pivoted because no factor exceeds the unit diagonal).
    """
    right = np.array(increments)
    factors = factor if isinstance(factor, np.ndarray) else np.full(right.shape[0], factor)
    right[0] += factors[0] * start
    bands = np.ones((2, right.shape[0]), order="F")
    bands[1, :-1] = -factors[1:]
    if right.ndim == 1 and right.dtype == np.float64:
        return np.asarray(dtbsv(1, bands, right, lower=1, diag=1))
    return np.asarray(solve_banded((1, 0), bands, right, check_finite=False))


def backward(increments: ArrayLike, factor: NDArray[np.float64]) -> NDArray[np.float64]:
    """The transpose: v[s] = factor[s+1]·v[s+1] + increments[s], with nothing after the last."""
    return first_order(np.asarray(increments)[::-1], np.concatenate([factor[:1], factor[:0:-1]]))[::-1]


def block_recursion(
    matrix: NDArray[np.float64],
    increments: NDArray[np.float64],
    start: NDArray[np.float64],
    counts: Sequence[int],
) -> NDArray[np.float64]:
    """x[s+1] = matrix[s] x[s] + increments[s], of many sequences of short vectors.

    It is a triangular system with 2n bands, which BLAS solves by the recursion itself.
    A sequence that overflows ends in inf or nan.

    Args:
        matrix: of every step, one for each group of sequences, [g, S, n, n].
        increments: of every step, [i, S, n].
        start: x[0], [i, n].
        counts: sequences of each group; those of the first group come first.

    Returns:
        x[0..S], [i, S + 1, n].
    """
    groups, steps, size, _ = matrix.shape
    path = np.empty((len(start), steps + 1, size))
    path[:, 0] = start
    path[:, 1:] = increments
    # Row r of a step has −matrix[r, c] in the column of entry c of the step before,
    # which is n + r − c places to the left.
    bands = np.zeros((groups, steps + 1, size, 2 * size))
    for row in range(size):
        for column in range(size):
            below = size + row - column
            np.negative(matrix[..., row, column], out=bands[:, :-1, column, below])
    if max(counts) > 1:
        return _solve_by_group(bands, path, counts)
    together = _solve(bands, path)
    # From one sequence to the next all bands are 0, and 0 · inf is passed on as nan.
    if np.isfinite(together[-1, -1, -1]):
        return together
    return _solve_by_group(bands, path, counts)


def _solve(bands: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve a triangular system with ones on its diagonal.

    Args:
        bands: the columns from the diagonal on, [..., width].
        right: one number for each column.
    """
    width = bands.shape[-1]
    columns = bands.reshape(-1, width).T  # in Fortran's order, as BLAS has it
    solution = dtbsv(width - 1, columns, right.reshape(-1), lower=1, diag=1)
    return np.asarray(solution).reshape(right.shape)


def _solve_by_group(
    bands: NDArray[np.float64],
    right: NDArray[np.float64],
    counts: Sequence[int],
) -> NDArray[np.float64]:
    """Solve one such system for each group of sequences.

    Args:
        bands: of every group, [g, S + 1, n, 2n].
        right: of every sequence, [i, S + 1, n].
        counts: sequences of each group.
    """
    columns = bands.reshape(len(bands), -1, bands.shape[-1])
    sequences = right.reshape(len(right), -1)
    solution = np.empty_like(right)
    rows = solution.reshape(sequences.shape)
    first = 0
    for group, count in enumerate(counts):
        last = first + count
        of_group, _ = dtbtrs(columns[group].T, sequences[first:last].T, uplo="L", diag="U")
        rows[first:last] = of_group.T
        first = last
    return solution
