"""What clipping leaves of examples' gradients, on average over the examples.

At a distance from the mode, an example's gradient of norm e there has changed by a
Gaussian δ along its own direction. Both fractions here depend on the variance of δ
alone.
"""

import numpy as np
from scipy.special import ndtr

from wflmc.dynamics import Array

QUANTILES = (np.arange(64) + 0.5) / 64
"""Of the norms of examples that have one threshold: enough of them for a forecast, and
faster than all."""
SMALLEST_VARIANCE = 1e-300
"""In the place of zero, whose logarithm is taken."""
LOG_SPACING = 0.05
"""Of the points at which a fraction is tabulated, in log variance. As the fraction is
made of Φ(a/√v), the polynomials between them are off by some 1e-10 at most."""
STENCIL = np.arange(-2, 4)
"""Points around a variance through which the polynomial goes; it is between 0 and 1."""
LAGRANGE = np.linalg.inv(np.vander(STENCIL, increasing=True).T.astype(float))
"""Weights of these points as polynomials, [point, power]."""
LAGRANGE_SLOPE = np.pad(LAGRANGE[:, 1:] * np.arange(1, STENCIL.size), ((0, 0), (0, 1)))
"""The derivatives of these polynomials."""


class ExampleClipping:
    """Clipping of every example's gradient by itself.

    Args:
        norms: of the examples' gradients at the mode, [N].
        limits: their clipping thresholds, [N].
    """

    def __init__(self, norms: Array, limits: Array) -> None:
        self.count = limits.size
        """N."""
        self.cut_off_sq = float((np.maximum(norms - limits, 0.0) ** 2).sum())
        """Σ ‖what is cut off‖² at the mode."""
        self.norms = norms
        self.limits = limits
        if self.count > QUANTILES.size and np.all(limits == limits[0]):
            self.norms = np.quantile(norms, QUANTILES)
            self.limits = limits[: QUANTILES.size]
        self._first = 0
        self._table = np.empty(0)
        """`changes_left` at e^((first + i) LOG_SPACING), extended as it is needed."""

    def gradients_left(self, variance: Array) -> Array:
        """Return the fraction that is left of an example's gradient, on average.

        The norm of a gradient is taken to be the root of its mean square, √(e² + v).

        Args:
            variance: v of δ, in several rounds, [W].

        Returns:
            The mean over examples of min(1, limit/norm), [W].
        """
        left, _ = self._left_of_longest(variance)
        np.minimum(left, 1.0, out=left)
        # The others have all of their gradient left.
        total = left.sum(0) + self.norms.size - len(left)
        return total / self.norms.size

    def gradients_left_slope(self, variance: Array) -> Array:
        """Return the derivative of log `gradients_left` by log variance.

        An example that is clipped adds −½ limit/norm · v/norm² to that of N times the
        fraction itself; those that are not clipped add nothing.

        Args:
            variance: of δ, [W].

        Returns:
            The derivative, [W]; 0 where no example is clipped, else negative.
        """
        left, norm_sq = self._left_of_longest(variance)
        of_clipped = np.where(left < 1, left / norm_sq, 0.0)
        mean = of_clipped.sum(0) / self.norms.size
        slope = -0.5 * variance * mean
        return slope / self.gradients_left(variance)

    def _left_of_longest(self, variance: Array) -> tuple[Array, Array]:
        """Return limit/norm, and the squared norm, of all examples that may be clipped.

        Args:
            variance: of δ, [W].

        Returns:
            Both for the longest of them, [n, W]; no others exceed their limit.
        """
        norms_sq = self.norms**2
        is_short = norms_sq + variance.max() <= self.limits**2
        norm_sq = np.add.outer(norms_sq[~is_short], variance)
        left = np.sqrt(norm_sq)
        np.divide(self.limits[~is_short, None], left, out=left)
        return left, norm_sq

    def changes_left(self, variance: Array) -> Array:
        """Return the fraction that is left of a change of the gradient.

        It is what remains of the curvature where θ changes. For a number clipped at ±c
        it is the slope of the best linear fit, P(|e + δ| < c). A table is interpolated,
        to 1e-10, which grows as it is needed.

        Args:
            variance: of δ, [W].

        Returns:
            The mean over examples, [W].
        """
        return self._interpolate(variance, LAGRANGE)

    def changes_left_slope(self, variance: Array) -> Array:
        """Return the derivative of `changes_left` by log variance.

        It is that of the polynomials of the table, which suits Newton's method: there,
        a small error costs a sweep and no accuracy.

        Args:
            variance: of δ, [W].

        Returns:
            The derivative of the interpolated table, [W].
        """
        return self._interpolate(variance, LAGRANGE_SLOPE) / LOG_SPACING

    def _interpolate(self, variance: Array, weights: np.ndarray) -> Array:
        """Return a combination of `changes_left` at the points around a variance, [W].

        Args:
            variance: of δ, [W].
            weights: of these points, as polynomials in the fraction of the way from one
                point to the next, [6, 6].
        """
        position = np.log(variance + SMALLEST_VARIANCE) / LOG_SPACING
        index = np.floor(position)
        powers = np.ones((STENCIL.size, variance.size))
        powers[1:] = position - index
        np.multiply.accumulate(powers, axis=0, out=powers)
        return np.einsum("pw,pw->w", weights @ powers, self._around(index))

    def _around(self, index: Array) -> Array:
        """Return `changes_left` at the points around e^(index LOG_SPACING), [6, W]."""
        first = index.min() + STENCIL[0]
        last = index.max() + STENCIL[-1]
        points = index + STENCIL[:, None]
        # A table would take longer than this, or the variances are nan.
        if not last - first < points.size:
            flat = np.exp(LOG_SPACING * points.ravel())
            return self._changes_left(flat).reshape(points.shape)
        self._extend(int(first), int(last))
        return self._table[points.astype(np.intp) - self._first]

    def _extend(self, first: int, last: int) -> None:
        """Make the table reach from one point to another."""
        end = self._first + self._table.size
        if self._table.size == 0:
            self._first = first
            end = first
        before = np.arange(first, self._first)
        after = np.arange(end, last + 1)
        if before.size or after.size:
            points = np.append(before, after)
            values = self._changes_left(np.exp(LOG_SPACING * points))
            parts = (values[: before.size], self._table, values[before.size :])
            self._table = np.concatenate(parts)
            self._first = min(first, self._first)

    def _changes_left(self, variance: Array) -> Array:
        """Return `changes_left`, computed for every variance."""
        std = np.sqrt(variance + SMALLEST_VARIANCE)
        upper_end = (self.limits - self.norms)[:, None]
        lower_end = -(self.limits + self.norms)[:, None]
        inside = ndtr(upper_end / std) - ndtr(lower_end / std)
        return inside.mean(0)
