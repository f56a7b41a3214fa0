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

SETTLED, PRECISION = 0.01, 1e-5
"""At a mode one more step lowers the cost by no more: 0.01 is a tenth of a standard deviation away; and rounding."""


def eigenvalues(product: Callable[[Array], Array], dim: int) -> Array:
    """Return all eigenvalues of a symmetric matrix, ascending; of a large one the smallest and the largest by Lanczos.

    Args:
        product: H v for v[m].

    Returns:
        [m], or [2] for more than `DENSE` parameters; nan where Lanczos does not converge.
    """
    if dim <= DENSE:
        matrix = np.stack([product(row) for row in np.eye(dim)])
        return np.asarray(np.linalg.eigvalsh((matrix + matrix.T) / 2))
    whole = LinearOperator((dim, dim), matvec=lambda v: product(np.ravel(v)), dtype=float)
    start = np.random.default_rng(0).standard_normal(dim)
    return np.array([_end(whole, which, start) for which in ("SA", "LA")])


def _end(whole: Any, which: str, start: Array) -> float:
    try:
        return float(eigsh(whole, k=1, which=which, v0=start, tol=1e-3, maxiter=100, return_eigenvectors=False)[0])
    except ArpackNoConvergence:
        return np.nan


def find_mode(
    value_and_gradient: Callable[[Array], tuple[float, Array]],
    product: Callable[[Array, Array], Array],
    start: Array,
    steps: int = 500,
) -> tuple[Array, str]:
    """Return where a cost is least, from `start`: [m]; and, where none was found, why.

    Args:
        product: the Hessian at θ[m] times v[m].
    """
    broken = False

    def watched(theta: Array) -> tuple[float, Array]:
        nonlocal broken
        value, gradient = value_and_gradient(theta)
        broken = broken or not (np.isfinite(value) and np.all(np.isfinite(gradient)))
        return value, gradient

    best = minimize(watched, start, jac=True, method="L-BFGS-B", options={"maxiter": steps, "maxcor": 30})
    mode = np.asarray(best.x, dtype=float)
    value, gradient = value_and_gradient(mode)
    # The optimiser's own word is no measure: it ends "abnormally" where float32 has no lower value to offer.
    if _gain(gradient, product(mode, gradient)) <= SETTLED + PRECISION * abs(value):
        return mode, ""
    if broken:
        return mode, "the search met nan or infinite values"
    return mode, f"the search stopped where the gradient's norm is still {np.linalg.norm(gradient):.3g}"


def _gain(gradient: Array, product: Array) -> float:
    """Return by how much the best step along the gradient would lower a quadratic cost; nan where that has no value."""
    square, curve = float(gradient @ gradient), abs(float(gradient @ product))
    return square**2 / (2 * curve) if curve > 0 else (0.0 if square == 0 else np.nan)
