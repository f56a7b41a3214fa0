"""W2² of a linear chain's law to the posterior as a convex function of its noise, with its derivatives."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import AnyResponse, DiagonalResponse, Response

Array = NDArray[np.float64]


class Distances:
    """F[s'](v) = shift + tr(C + C* − 2(C*^½ C C*^½)^½) with C affine in v: convex, of known derivatives."""

    def __init__(self, response: AnyResponse) -> None:
        self.shift = response.shift
        if isinstance(response, DiagonalResponse):
            self.form: _Matrices | _Eigenvalues = _Eigenvalues(response)
        else:
            self.form = _Matrices(response)
        self.trace, self.spread = self.form.trace, self.form.spread  # tr effect, [S_u, S], and tr C*

    def __call__(self, v: Array) -> Array:
        """F[S_u] for v[S]; exactly the worst of them is the objective."""
        return self.shift + self.form.value(v)

    def expand(self, v: Array) -> tuple[Array, Array, Array]:
        """F[S_u], its gradient[S_u, S], and J[S_u, S, r] with J Jᵀ its Hessian."""
        value, gradient, root = self.form.expand(v)
        return self.shift + value, gradient, root


class _Matrices:
    def __init__(self, r: Response) -> None:
        values, vectors = np.linalg.eigh(r.target)
        self.root, self.inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
        kept, rounds, self.dim, _ = r.effect.shape
        self.effect = (self.root @ r.effect @ self.root).reshape(kept, rounds, -1)
        self.base = (self.root @ r.covariance @ self.root).reshape(kept, -1)
        self.trace, self.spread = np.trace(r.effect, axis1=-2, axis2=-1), float(values.sum())
        self.least = 1e-30 * float(values[0]) ** 2  # in place of eigenvalues that are not there
        self.rows, self.columns = np.triu_indices(self.dim)

    def _roots(self, v: Array) -> tuple[Array, Array]:
        """Square roots of the eigenvalues of C*^½ C C*^½, and its eigenvectors."""
        inner = (self.base + v @ self.effect).reshape(-1, self.dim, self.dim)
        values, vectors = np.linalg.eigh(0.5 * (inner + np.swapaxes(inner, -1, -2)))
        return np.sqrt(np.maximum(values, self.least)), vectors

    def _value(self, roots: Array, vectors: Array) -> Array:
        """The distance as ‖X C*^−½ − C*^½‖² with X = (C*^½ C C*^½)^½: no large numbers cancel."""
        x = (vectors * roots[:, None, :]) @ np.swapaxes(vectors, -1, -2)
        return np.asarray(((x @ self.inverse - self.root) ** 2).sum((-1, -2)))

    def value(self, v: Array) -> Array:
        return self._value(*self._roots(v))

    def expand(self, v: Array) -> tuple[Array, Array, Array]:
        roots, vectors = self._roots(v)
        inverse = (vectors / roots[:, None, :]) @ np.swapaxes(vectors, -1, -2)
        gradient = self.trace - (self.effect @ inverse.reshape(-1, self.dim**2, 1))[..., 0]
        # Second derivatives of the square root are its divided differences between eigenvalues.
        one, two = roots[:, self.rows], roots[:, self.columns]
        size = np.sqrt((1.0 + (self.rows != self.columns)) / (one * two * (one + two)))
        pairs = vectors[:, :, None, self.rows] * vectors[:, None, :, self.columns]
        turn = pairs.reshape(roots.shape[0], self.dim**2, -1) * size[:, None]
        return self._value(roots, vectors), gradient, self.effect @ turn


class _Eigenvalues:
    def __init__(self, r: DiagonalResponse) -> None:
        self.r, self.std = r, np.sqrt(r.target)
        self.trace, self.spread = r.effect @ r.times, float(r.times @ r.target)
        self.least = 1e-15 * self.std

    def _std(self, v: Array) -> Array:
        return np.maximum(np.sqrt(self.r.covariance + v @ self.r.effect), self.least)

    def value(self, v: Array) -> Array:
        return np.asarray((self._std(v) - self.std) ** 2 @ self.r.times)

    def expand(self, v: Array) -> tuple[Array, Array, Array]:
        std = self._std(v)
        gradient = (self.r.effect @ ((1 - self.std / std) * self.r.times)[..., None])[..., 0]
        root = self.r.effect * np.sqrt(0.5 * self.r.times * self.std / std**3)[:, None]
        return (std - self.std) ** 2 @ self.r.times, gradient, root
