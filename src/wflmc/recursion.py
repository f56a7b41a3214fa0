"""First-order linear recursions, all steps at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_banded


def first_order(increments: ArrayLike, factor: float, start: float = 0.0) -> NDArray[Any]:
    """v[s] = factor·v[s−1] + increments[s] along the first axis, with v[−1] = start and |factor| ≤ 1.

    It is a bidiagonal system, which LAPACK solves by the recursion itself (no pivoting happens, as no factor
    exceeds the unit diagonal).
    """
    right = np.array(increments)
    right[0] = right[0] + factor * start
    bands = np.ones((2, right.shape[0]))
    bands[1] = -factor
    return np.asarray(solve_banded((1, 0), bands, right, overwrite_b=True, check_finite=False))
