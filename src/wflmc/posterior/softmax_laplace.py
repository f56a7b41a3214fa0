"""The Gaussian approximation of a softmax posterior at its mode."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import logsumexp

Array = NDArray[np.float64]


def laplace(X: Array, labels: NDArray[np.intp], classes: int, precision: Array) -> tuple[Array, Array]:
    """The mode[m], and the covariance[d, d] of what tells one class from the others.

    The Hessian Σ (diag(p) − p pᵀ) ⊗ u uᵀ is taken for (I − 1 1ᵀ/C) ⊗ M of the same trace: what moves all classes
    alike is known from the prior alone, and the classes are otherwise treated alike. Against the full Hessian, W2²
    to the prior was within 1 % in most cases tried, 5 % in the worst.

    Args:
        X: features of all examples, [N, d]; precision: the prior's curvature for one class, [d, d].
    """
    from scipy.optimize import minimize  # takes longer to import than most commands take to run

    linear = np.zeros((X.shape[1], classes))
    np.add.at(linear.T, labels, X)
    # In coordinates in which Böhning's bound on the Hessian is the identity, the mode is found in few steps.
    root = np.linalg.cholesky(0.5 * X.T @ X + precision).T
    shape = linear.shape

    def cost(z: Array) -> tuple[float, Array]:
        theta = solve_triangular(root, z.reshape(shape))
        logits = X @ theta
        total = logsumexp(logits, axis=1)
        pulled = precision @ theta
        value = total.sum() - np.vdot(linear, theta) + 0.5 * np.vdot(theta, pulled)
        gradient = X.T @ np.exp(logits - total[:, None]) - linear + pulled
        return float(value), solve_triangular(root, gradient, trans="T").ravel()

    found = minimize(cost, np.zeros(linear.size), jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-7})
    theta = solve_triangular(root, found.x.reshape(shape))
    logits = X @ theta
    p = np.exp(logits - logsumexp(logits, axis=1)[:, None])
    curvature = (1 - (p**2).sum(1)) / (classes - 1)
    return theta.T.ravel(), np.asarray(np.linalg.inv(X.T @ (curvature[:, None] * X) + precision), dtype=float)
