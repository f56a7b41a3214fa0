"""How a cost curves, by products of its Hessian with vectors: smallest and largest eigenvalue, and a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

Array = NDArray[np.float64]

DENSE = 256
"""Up to so many parameters all eigenvalues are worked out."""


def eigenvalues(product: Callable[[Array], Array], dim: int) -> Array:
    """All eigenvalues of a symmetric matrix, ascending; of a large one the smallest and the largest by Lanczos.

    Args:
        product: H v for v[m].

    Returns:
        [m], or [2] for more than `DENSE` parameters; nan where Lanczos does not converge.
    """
    if dim <= DENSE:
        matrix = np.stack([product(row) for row in np.eye(dim)])
        return np.asarray(np.linalg.eigvalsh((matrix + matrix.T) / 2))
    whole = LinearOperator((dim, dim), matvec=lambda v: product(np.ravel(v)), dtype=float)
    begin = np.random.default_rng(0).standard_normal(dim)
    return np.array([_end(whole, which, begin) for which in ("SA", "LA")])


def _end(whole: Any, which: str, begin: Array) -> float:
    try:
        return float(eigsh(whole, k=1, which=which, v0=begin, tol=1e-3, maxiter=100, return_eigenvectors=False)[0])
    except ArpackNoConvergence:
        return np.nan


def find_mode(value_and_gradient: Callable[[Array], tuple[float, Array]], start: Array, steps: int = 500) -> Array:
    """Where a cost is least, from `start`: [m]."""
    found = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": steps, "maxcor": 30})
    return np.asarray(found.x, dtype=float)
