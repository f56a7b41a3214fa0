"""First-order linear recursions, all steps at once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_banded
from scipy.linalg.blas import dtbsv


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
