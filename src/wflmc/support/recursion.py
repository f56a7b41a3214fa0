"""First-order linear recursions, all steps at once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_banded
from scipy.linalg.blas import dtbsv
from scipy.linalg.lapack import dtbtrs


def first_order(
    increments: ArrayLike, factor: float | NDArray[np.float64], start: float = 0.0
) -> NDArray[np.float64]:
    """Return v[s] = factor[s]·v[s−1] + increments[s] along the first axis.

    It is a triangular system with two bands, which BLAS solves by the recursion itself.
    For several columns LAPACK does, where nothing is pivoted because no factor exceeds
    the unit diagonal.

    Args:
        increments: [S, ...], real or complex, with S of at least 1.
        factor: a number, or one for every step, [S]; its absolute value is at most 1.
        start: v[−1], the value before the first step.

    Returns:
        v[0..S−1], [S, ...].
    """
    right = np.array(increments)
    steps = right.shape[0]
    factors = factor if isinstance(factor, np.ndarray) else np.full(steps, factor)
    right[0] += factors[0] * start
    bands = np.ones((2, steps), order="F")
    bands[1, :-1] = -factors[1:]
    if right.ndim == 1 and right.dtype == np.float64:
        return np.asarray(dtbsv(1, bands, right, lower=1, diag=1))
    return np.asarray(solve_banded((1, 0), bands, right, check_finite=False))


def backward(increments: ArrayLike, factor: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return v[s] = factor[s+1]·v[s+1] + increments[s], with 0 after the last step.

    As a linear map of the increments it is the transpose of `first_order`.

    Args:
        increments: [S, ...].
        factor: of every step, [S]; that of the first step is not used.

    Returns:
        v[0..S−1], [S, ...].
    """
    reversed_increments = np.asarray(increments)[::-1]
    reversed_factors = np.concatenate([factor[:1], factor[:0:-1]])
    return first_order(reversed_increments, reversed_factors)[::-1]


Entries = Sequence[Sequence[NDArray[np.float64]]]
"""The rows of a small matrix that changes with the step s and the group g of sequences:
each entry is [g, S], or [S] where it is the same for all groups."""


class BlockRecursion:
    """x[s+1] = A[s] x[s] + b[s], of many sequences of short vectors, all steps at once.

    It is a triangular system with 2n bands, which BLAS solves by the recursion itself.
    A sequence that overflows ends in inf or nan, and leaves the others alone.

    The sequences i of a group g have A in common. They are numbered group after group:
    first the `counts[0]` sequences of group 0, then those of group 1.

    Args:
        counts: how many sequences each group has, [g], at least 1.
        steps: S.
        size: n, the length of the vectors.
    """

    def __init__(self, counts: Sequence[int], steps: int, size: int) -> None:
        self.counts = counts
        self.has_single_sequences = max(counts) == 1
        self.shape = (sum(counts), steps + 1, size)
        self.bands = np.zeros((len(counts), steps + 1, size, 2 * size))
        """Of every group, the columns of its system from the diagonal on."""

    def solve(
        self,
        matrix: Entries,
        increments: Sequence[NDArray[np.float64]],
        start: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return x[0..S], [i, S + 1, n].

        The object may be used again, with another A.

        Args:
            matrix: A of every group and step, by row and column.
            increments: every entry of b, [i, S] each, or [S] for all sequences.
            start: x[0], [i, n].

        Returns:
            The vectors of every sequence. One that overflows ends in inf or nan.
        """
        path = np.empty(self.shape)
        path[:, 0] = start
        size = self.shape[-1]
        for row in range(size):
            path[:, 1:, row] = increments[row]
            for column in range(size):
                # In the column of the step before, n + r − c places below the diagonal.
                band = self.bands[:, :-1, column, size + row - column]
                np.negative(matrix[row][column], out=band)
        if not self.has_single_sequences:
            return self._solve_by_group(path)
        solution = _solve(self.bands, path)
        # All sequences were solved as one. Bands are 0 from one to the next, but 0 · inf
        # is passed on as nan, up to the very last number.
        if np.isfinite(solution[-1, -1, -1]):
            return solution
        return self._solve_by_group(path)

    def _solve_by_group(self, right: NDArray[np.float64]) -> NDArray[np.float64]:
        """Solve one system for each group, of the right-hand sides of its sequences."""
        groups = len(self.counts)
        columns = self.bands.reshape(groups, -1, self.bands.shape[-1])
        sequences = right.reshape(len(right), -1)
        solution = np.empty_like(sequences)
        first = 0
        for group, count in enumerate(self.counts):
            last = first + count
            # Transposed, as LAPACK has arrays in Fortran's order.
            of_group, _ = dtbtrs(
                columns[group].T, sequences[first:last].T, uplo="L", diag="U"
            )
            solution[first:last] = of_group.T
            first = last
        return solution.reshape(right.shape)


def covariances(
    matrix: NDArray[np.float64],
    noise: NDArray[np.float64],
    start: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return P[s+1] = A[s] P[s] A[s]ᵀ + Q[s], of some sequences, all steps at once.

    They are the covariances of x[s+1] = A[s] x[s] + ξ[s] with independent noise ξ.

    Args:
        matrix: A, [i, S, n, n].
        noise: Q, the covariance of the noise, symmetric, [i, S, n, n] or [S, n, n].
        start: P[0], symmetric, [i, n, n].

    Returns:
        P[1..S], [i, S, n, n]. A sequence that overflows ends in inf or nan.
    """
    sequences, steps, size, _ = matrix.shape
    rows, columns = np.triu_indices(size)
    off_diagonal = rows != columns
    # Entry (i, j) of A P Aᵀ is the sum of A_ik A_jl P_kl over all k and l. A symmetric
    # P has each entry off the diagonal twice.
    straight = matrix[..., rows[:, None], rows] * matrix[..., columns[:, None], columns]
    crossed = matrix[..., rows[:, None], columns] * matrix[..., columns[:, None], rows]
    factors = straight + off_diagonal * crossed
    entries = range(len(rows))
    by_entry = [
        [factors[..., entry, source] for source in entries] for entry in entries
    ]
    increments = list(np.moveaxis(noise[..., rows, columns], -1, 0))
    recursion = BlockRecursion([1] * sequences, steps, len(rows))
    path = recursion.solve(by_entry, increments, start[:, rows, columns])
    solution = np.empty(matrix.shape)
    solution[..., rows, columns] = path[:, 1:]
    solution[..., columns, rows] = path[:, 1:]
    return solution


def _solve(
    bands: NDArray[np.float64], right: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve a triangular system with ones on its diagonal.

    Args:
        bands: its columns from the diagonal on, [..., width].
        right: the right-hand side, one number for each column.
    """
    width = bands.shape[-1]
    columns = bands.reshape(-1, width).T
    solution = dtbsv(width - 1, columns, right.reshape(-1), lower=1, diag=1)
    return np.asarray(solution).reshape(right.shape)
