"""Mean and covariance of chains with clipped gradients, for many rounds at once.

Along a direction of precision λ a round takes the state x of a chain, its position and
with kinetic dynamics its velocity, to

    E x' = M(c λ) E x − push,        C' = M(c λ) C M(c λ)ᵀ + noise.

The curvature c and the push depend on the fraction that clipping leaves of every
device's gradient, and this depends on mean and covariance before the round. For given
fractions both recursions are linear, and triangular systems solve them for all rounds
of a window. Fractions and recursions are therefore computed in turns, in sweeps, until
they no longer change.

Where clipping is strong the fractions depend mostly on one number of a round,
q = E‖Λx‖², the mean square of the gradient's change since the mode. From sweep to sweep
q is extrapolated by Newton's method, with one precision for all directions: a few
sweeps do what would else take dozens. After n sweeps the first n rounds are exact in
any case. A window that does not settle is halved, and one of a single round has nothing
to settle.

Shapes: d directions in g groups, n numbers in the state of one direction (1, or 2 with
a velocity), K devices, S rounds of a plan, W rounds of a window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import Array, Dynamics
from wflmc.evaluation.clipped_examples import ExampleClipping
from wflmc.support.recursion import BlockRecursion, Entries

TOLERANCE = 3e-7
"""Relative change of the gradients' moments, from one sweep to the next, after which
one more sweep is the last: it leaves an error of some 1e-9 in a forecast."""
SMALL_CHANGE = 0.1
"""Relative change of the moments up to which Newton's method keeps its derivatives."""
MAX_SWEEPS = 40
"""After these a window is halved; most settle in four to eight."""
NUMBERS_IN_A_WINDOW = 2**15
"""Of the largest array of a sweep, which then stays in the processor's cache."""
MULTIPLICATIONS_IN_A_WINDOW = 2**19
"""Of one product of matrices. OpenBLAS gives larger ones to several threads, which wait
for each other longer than they work."""
SHORTEST_WINDOW = 32
"""Shorter ones would take longer than their rounds one after the other."""
LARGEST_EXTRAPOLATION = 1e4
"""The largest factor by which Newton's method may move q in one sweep."""
SMALLEST_SQUARE = 1e-300
"""In the place of zero, where a norm divides."""


class Law(NamedTuple):
    """Mean and covariance of chains, at one time or at several."""

    mean: Array
    """Of the state of every direction, seen from the mode, [d, ..., n]."""
    covariance: Array
    """Of the state in every group of directions, [g, ..., n (n + 1)/2]: its upper
    triangle, by row."""

    def between(self, first: int, last: int | None) -> "Law":
        """Return the law at successive times.

        Args:
            first: the index of the first time; negative ones count from the end.
            last: the index after the last time; None for all to the end.

        Returns:
            The law with a time axis, a view of this one.
        """
        times = slice(first, last)
        return Law(self.mean[:, times], self.covariance[:, times])

    @property
    def end(self) -> "Law":
        """Return the law at the last of its times, without a time axis.

        After a window, it is that with which the next window starts.
        """
        return Law(self.mean[:, -1], self.covariance[:, -1])


class DirectionGroups(NamedTuple):
    """Directions with equal precision and equal variance at the start.

    They have the same covariance all the time, so that it is computed once for a group;
    their means differ.
    """

    precision: Array
    """λ, [g]."""
    sizes: NDArray[np.intp]
    """Directions of each group, [g]."""
    start: Array
    """Variance of the position at the start, [g]."""
    order: NDArray[np.intp]
    """The numbers of the directions, those of the first group first, [d]."""

    @classmethod
    def of(cls, precision: Array, start: Array) -> "DirectionGroups":
        """Group directions that are equal in both respects.

        Equality is exact: directions that differ by rounding stay apart, which costs
        time and changes nothing. Whatever else is by direction must be put into `order`
        by the caller.

        Args:
            precision: λ of every direction, [d].
            start: variance of the position along it at the start, [d].

        Returns:
            The groups, those of the smallest precision first.
        """
        order = np.lexsort((start, precision))
        precision = precision[order]
        start = start[order]
        has_other_precision = precision[1:] != precision[:-1]
        has_other_start = start[1:] != start[:-1]
        is_first = np.append(True, has_other_precision | has_other_start)
        first_of_group = np.flatnonzero(is_first)
        return cls(
            precision=precision[first_of_group],
            sizes=np.diff(np.append(first_of_group, precision.size)),
            start=start[first_of_group],
            order=order,
        )


class GradientMoments(NamedTuple):
    """Of the gradients before every round of a window: the fractions depend on them."""

    change: Array
    """Λ E x: how the mean of the gradient differs from that at the mode, [d, W]."""
    square: Array
    """q = E‖Λx‖², [W]."""
    example_variance: Array | None
    """Of the change of an example's gradient along its own direction, [W]; None where
    examples are not clipped."""

    def distance(self, previous: "GradientMoments") -> float:
        """Return the largest relative change since the sweep before.

        Args:
            previous: the moments of the same rounds in that sweep.

        Returns:
            The largest change over the window's rounds, of q relative to q and of the
            mean relative to √q; that of the variance of examples follows from these.
        """
        square = np.maximum(self.square, SMALLEST_SQUARE)
        of_square = np.abs(self.square - previous.square) / square
        difference = self.change - previous.change
        difference_sq = np.einsum("dw,dw->w", difference, difference)
        of_mean_sq = difference_sq / square
        of_mean = np.sqrt(of_mean_sq.max())
        return float(np.maximum(of_square.max(), of_mean))


class Feedback:
    """How q = E‖Λx‖² of a window answers to a change of itself.

    Args:
        matrix: of the second moments of the state, without feedback, entries of [1, W].
            The first of these moments is q.
        slopes: derivatives of the second moments after a round by q before it, [W]
            each.
    """

    def __init__(self, matrix: Entries, slopes: Sequence[Array]) -> None:
        self.slopes = slopes
        rows = []
        for row, slope in zip(matrix, slopes, strict=True):
            rows.append([row[0] + slope, *row[1:]])
        self.matrix = rows
        self.recursion = BlockRecursion([1], slopes[0].size, len(slopes))

    def extrapolate(
        self, moments: GradientMoments, previous: GradientMoments
    ) -> GradientMoments:
        """Return moments with q corrected by Newton's method.

        A correction by more than a factor of 1e4 is cut to that, and one that is nan is
        left out: the next sweep starts from q as it is.

        Args:
            moments: that a sweep has led to.
            previous: that the sweep was made with.

        Returns:
            The moments to make the next sweep with. The variance of examples' gradients
            changes by the same factors as q; the mean does not.
        """
        square = moments.square
        change = square - previous.square
        increments = [slope * change for slope in self.slopes]
        start = np.zeros((1, len(increments)))
        response = self.recursion.solve(self.matrix, increments, start)
        factor = 1 + response[0, :-1, 0] / np.maximum(square, SMALLEST_SQUARE)
        factor = np.clip(factor, 1 / LARGEST_EXTRAPOLATION, LARGEST_EXTRAPOLATION)
        factor[np.isnan(factor)] = 1.0
        variance = moments.example_variance
        if variance is not None:
            variance = variance * factor
        return GradientMoments(moments.change, square * factor, variance)


class GradientsLeft(NamedTuple):
    """What clipping leaves of gradients in every round of a window."""

    norm_sq: Array
    """Squared norms of the devices' gradients if these were not clipped, [K, W]."""
    devices: Array
    """The fraction that is left of every device's gradient, [K, W]."""
    is_cut: NDArray[np.bool_]
    """Where that is less than all of it, [K, W]."""
    examples: Array
    """The fraction that clipping leaves of an example's gradient, before devices are
    clipped, on average, [W]."""
    changes: Array
    """The same of a change of an example's gradient, [W]."""
    weight: Array
    """Of devices' gradients in the update, times what is left of them, [K, W]."""
    depends_on_moments: bool
    """Whether anything is cut, so that other moments would leave something else."""

    @classmethod
    def all(cls, weight: Array) -> "GradientsLeft":
        """Return what is left without clipping.

        Args:
            weight: of every device's gradient in the update, [K, W].

        Returns:
            Fractions of 1; squared norms, which nothing depends on, are 1 as well.
        """
        rounds = weight.shape[1]
        return cls(
            norm_sq=np.ones(weight.shape),
            devices=np.ones(weight.shape),
            is_cut=np.zeros(weight.shape, dtype=bool),
            examples=np.ones(rounds),
            changes=np.ones(rounds),
            weight=weight,
            depends_on_moments=False,
        )


class Window(NamedTuple):
    """Some rounds in a row, and what clipping leaves of gradients in each of them."""

    rounds: slice
    """Of the plan."""
    left: GradientsLeft
    """In each of them."""
    curvature: Array
    """c, which gradients still have of the curvature of the cost, [W]."""
    law: Law
    """Before every round and after the last, W + 1 times."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClippedRounds:
    """The rounds of a plan, as they move chains on a quadratic cost.

    All that is by direction is in `groups.order`.
    """

    groups: DirectionGroups
    gradients_at_mode: Array
    """Every device's gradient at the mode, [K, d]."""
    data_share: Array
    """The fraction of all examples that a device has, [K]."""
    start: Law
    """Before the first round."""
    dynamics: Dynamics
    step_size: Array
    """η[S], or h of kinetic dynamics."""
    weight: Array
    """Of every device's gradient in the update, [S, K]."""
    noise: Array
    """Variance of the update's noise, [S]."""
    downlink_noise: float
    """Variance of the noise in every coordinate that a device receives of θ."""
    clip: Array
    """ℓ[K]; infinite where gradients are not clipped."""
    examples: ExampleClipping | None
    """None where examples are not clipped by themselves."""

    def windows(self) -> Iterator[Window]:
        """Yield the law of all rounds, window by window.

        Windows are as long as the processor's cache allows, or of single rounds where
        that is fewer than 32. One that does not settle is halved, and the next may be
        twice as long again. A chain that diverges ends in inf or nan, without an error.

        Yields:
            Windows that follow one another, from the first round to the last.
        """
        count = self.step_size.size
        longest = self._longest_window
        length = longest
        first = 0
        law = self.start
        while first < count:
            rounds = slice(first, min(first + length, count))
            window = _Sweeps(self, rounds, law).settle()
            if window is None:
                length = max(1, (rounds.stop - rounds.start) // 2)
                continue
            yield window
            law = window.law.end
            first = rounds.stop
            length = min(2 * length, longest)

    def matrices(self, curvature: Array, rounds: slice) -> Entries:
        """Return M, which takes a state to the next, for curvatures of the cost.

        Args:
            curvature: c λ of directions in these rounds, [..., W].
            rounds: of the plan, W of them.

        Returns:
            The entries, by row and column, [..., W] each.
        """
        matrix = []
        for drifts, slopes in zip(self.drift, self.slope, strict=True):
            row = []
            for drift, slope in zip(drifts, slopes, strict=True):
                row.append(drift[rounds] + curvature * slope[rounds])
            matrix.append(row)
        return matrix

    def curvature_of_groups(self, curvature: Array) -> Array:
        """Return c λ of every group of directions.

        Args:
            curvature: c of some rounds, [W].

        Returns:
            The curvature that clipped gradients still have along the directions of each
            group, [g, W], as `matrices` takes it.
        """
        return np.multiply.outer(self.groups.precision, curvature)

    @cached_property
    def is_clipped(self) -> bool:
        """Return whether gradients may be clipped, of devices or of examples.

        Where they are not, the law does not feed back on itself, and a single sweep
        solves a window exactly.
        """
        return self.examples is not None or bool(np.isfinite(self.clip).any())

    @cached_property
    def precision(self) -> Array:
        """Return λ of every direction, [d], in the order of the groups.

        Means are those of directions, whereas covariances, which all directions of a
        group have in common, need `groups.precision` alone.
        """
        return np.repeat(self.groups.precision, self.groups.sizes)

    @cached_property
    def drift(self) -> Array:
        """Return M without a gradient, [n, n, S].

        With overdamped dynamics it is 1; with kinetic ones it moves the position by the
        velocity, which friction slows down.
        """
        return self._matrix_at(0.0)

    @cached_property
    def slope(self) -> Array:
        """Return what a curvature of 1 adds to M, which is affine in it, [n, n, S].

        So M = drift + c λ slope for every direction, and clipping changes c alone.
        """
        return self._matrix_at(1.0) - self.drift

    def _matrix_at(self, curvature: float) -> Array:
        """Return M for one curvature, [n, n, S]."""
        matrix, _ = self._linear_round(curvature)
        return np.ascontiguousarray(np.moveaxis(matrix, 0, -1))

    def _linear_round(self, curvature: float) -> tuple[Array, Array]:
        """Return M[S, n, n] and how the update enters the state, for one curvature."""
        hessian = np.full((self.step_size.size, 1, 1), curvature)
        linear = hessian[..., 0]
        matrix, _, enters = self.dynamics.linear_round(self.step_size, hessian, linear)
        return matrix, enters

    @cached_property
    def enters(self) -> Array:
        """Return how the update enters the state, [n, S].

        The update is a gradient times `kick` plus noise. With overdamped dynamics it is
        added to the position; with kinetic ones to the velocity, and through it to the
        position of the same round.
        """
        _, enters = self._linear_round(1.0)
        shape = (self.step_size.size, enters.shape[-2])
        by_round = np.broadcast_to(enters[..., 0], shape)
        return np.ascontiguousarray(by_round.T)

    @cached_property
    def noise_enters(self) -> Sequence[Array]:
        """Return the covariance that noise of variance 1 in the update adds.

        It is a aᵀ of the vector a = `enters` of every round: its upper triangle, by
        row, [S] each. With overdamped dynamics that is a single 1.
        """
        return [self.enters[r] * self.enters[c] for r, c in _triangle(len(self.enters))]

    @cached_property
    def kick(self) -> Array:
        """Return the factor of the gradient in the update, [S].

        It is η of overdamped dynamics, and (h/2)(1 + e) of kinetic ones, whose update
        is that of the velocity.
        """
        return np.asarray(self.dynamics.kick(self.step_size))

    @cached_property
    def weight_of_device(self) -> Array:
        """Return `weight` by device, [K, S].

        So a window's rounds lie side by side in memory, as in all arrays of a sweep,
        which are [..., W].
        """
        return np.ascontiguousarray(self.weight.T)

    @cached_property
    def norm_terms(self) -> Array:
        """Return the factors in the devices' squared norms, [K, 2 + d].

        It is ‖g‖² + share² q + 2 share g·Λx, where g is the device's gradient at the
        mode and share its `data_share`.
        """
        data_share = self.data_share[:, None]
        at_mode = (self.gradients_at_mode**2).sum(-1, keepdims=True)
        with_change = 2 * data_share * self.gradients_at_mode
        return np.concatenate([at_mode, data_share**2, with_change], axis=1)

    @cached_property
    def sums_over_devices(self) -> Array:
        """Return the factors in sums over devices, [2 + d, K].

        The first sum is weighted by data, the second is the mean, and the others are
        the sum of the gradients at the mode along every direction.
        """
        devices = self.data_share.size
        mean = np.full((1, devices), 1 / devices)
        return np.concatenate([self.data_share[None], mean, self.gradients_at_mode.T])

    @cached_property
    def cut_off(self) -> Array:
        """Return what clipping takes from the sum of gradients at the mode, [d].

        Those of examples, clipped one by one, no longer add up to zero there. Which way
        the sum points is not known: what is cut off single examples is taken to be
        independent, and its squares to be spread over directions in proportion to λ. It
        is 0 where examples are not clipped by themselves.
        """
        if self.examples is None:
            return np.zeros_like(self.precision)
        by_direction = self.precision / self.precision.sum()
        return np.sqrt(self.examples.cut_off_sq * by_direction)

    @cached_property
    def example_factor(self) -> float:
        """Return the factor of E x'Λx in the variance of an example's change.

        At a distance x an example adds (u·x) u to its gradient. It has a part tr Λ/N of
        the curvature, E‖u‖², and sees a part 1/N of the energy, E (u·x)². The factor is
        0 where examples are not clipped by themselves.
        """
        if self.examples is None:
            return 0.0
        return float(self.precision.sum()) / self.examples.count**2

    @cached_property
    def covariance_weights(self) -> Array:
        """Return Σ over a group of λ², λ and λ³, [3, g], for moments of the gradient.

        Times the variance of a group they give its part of q = E‖Λx‖², of E x'Λx, and
        of the mean precision by which q feeds back on itself.
        """
        powers = np.array([[2], [1], [3]])
        return self.groups.precision**powers * self.groups.sizes

    @cached_property
    def _longest_window(self) -> int:
        widest = max(self.gradients_at_mode.shape)
        if self.examples is not None:
            widest = max(widest, self.examples.norms.size)
        multiplications = self.norm_terms.size
        length = min(
            NUMBERS_IN_A_WINDOW // widest,
            MULTIPLICATIONS_IN_A_WINDOW // multiplications,
        )
        return length if length >= SHORTEST_WINDOW else 1


class _Solution(NamedTuple):
    """The law of a window for what clipping leaves of gradients."""

    curvature: Array
    """c of every round, [W]."""
    law: Law
    """Before every round and after the last."""


class _Sweeps:
    """The sweeps of one window.

    Args:
        chain: all rounds.
        rounds: those of the window, in a row.
        start: the law before them.
    """

    def __init__(self, chain: ClippedRounds, rounds: slice, start: Law) -> None:
        self.chain = chain
        self.rounds = rounds
        self.start = start
        self.length = rounds.stop - rounds.start
        self.weight = chain.weight_of_device[:, rounds]
        self.kick = chain.kick[rounds]
        self.enters = chain.enters[:, rounds]
        variance = chain.noise[rounds]
        self.noise = [variance * enters[rounds] for enters in chain.noise_enters]
        self.norm_factors = np.ones((2 + chain.precision.size, self.length))
        """1, q and Λ E x of a sweep, multiplied by `norm_terms`, [2 + d, W]."""
        counts = chain.groups.sizes.tolist()
        single = [1] * len(counts)
        self.mean_recursion = BlockRecursion(counts, self.length, len(self.enters))
        self.covariance_recursion = BlockRecursion(single, self.length, len(self.noise))

    def settle(self) -> Window | None:
        """Return the law of the window; None where the sweeps do not settle.

        A sweep computes what is left of gradients of some moments, the law that
        follows, and its moments. The law is that of the last sweep, made with moments
        that hardly change any more. Without clipping, the first sweep is exact, and so
        it is in a window of a single round.
        """
        is_settled = self.length == 1 or not self.chain.is_clipped
        moments = self._moments(self._constant_law())
        left = self._clip(moments)
        feedback: Feedback | None = None
        distance = np.inf
        for _ in range(MAX_SWEEPS):
            solution = self._solve(left)
            if is_settled:
                return self._window(left, solution)
            law = solution.law.between(0, -1)
            next_moments = self._moments(law)
            if left.depends_on_moments:
                if feedback is None or distance > SMALL_CHANGE:
                    feedback = self._feedback(left, solution.curvature, law, moments)
                next_moments = feedback.extrapolate(next_moments, moments)
            next_left = self._clip(next_moments)
            if not (left.depends_on_moments or next_left.depends_on_moments):
                return self._window(next_left, solution)
            distance = next_moments.distance(moments)
            is_settled = distance <= TOLERANCE
            moments = next_moments
            left = next_left
        return None

    def _window(self, left: GradientsLeft, solution: _Solution) -> Window:
        return Window(
            rounds=self.rounds,
            left=left,
            curvature=solution.curvature,
            law=solution.law,
        )

    def _constant_law(self) -> Law:
        """Return the first guess: the law before every round is that of the start."""
        at_start = Law(self.start.mean[:, None], self.start.covariance[:, None])
        mean = np.repeat(at_start.mean, self.length, axis=1)
        covariance = np.repeat(at_start.covariance, self.length, axis=1)
        return Law(mean, covariance)

    def _moments(self, law: Law) -> GradientMoments:
        """Return the moments of gradients, for the law before every round."""
        chain = self.chain
        position = law.mean[..., 0]
        change = position * chain.precision[:, None]
        variance = law.covariance[..., 0]
        square = np.einsum("dw,dw->w", change, change)
        square += _weighted_sum(chain.covariance_weights[0], variance)
        if chain.examples is None:
            return GradientMoments(change, square, None)
        # One example adds (u·x) u to its gradient at a distance x.
        energy = np.einsum("dw,dw->w", position, change)
        energy += _weighted_sum(chain.covariance_weights[1], variance)
        return GradientMoments(change, square, chain.example_factor * energy)

    def _clip(self, moments: GradientMoments) -> GradientsLeft:
        """Return what clipping leaves of gradients of these moments."""
        chain = self.chain
        if not chain.is_clipped:
            return GradientsLeft.all(self.weight)
        self.norm_factors[1] = moments.square
        self.norm_factors[2:] = moments.change
        norm_sq = chain.norm_terms @ self.norm_factors
        np.maximum(norm_sq, SMALLEST_SQUARE, out=norm_sq)
        clip_sq = chain.clip[:, None] ** 2
        examples = np.ones(self.length)
        changes = np.ones(self.length)
        variance = moments.example_variance
        if chain.examples is not None and variance is not None:
            examples = chain.examples.gradients_left(variance)
            changes = chain.examples.changes_left(variance)
            # Devices clip what clipping of their examples has left of the norm.
            clip_sq = clip_sq / examples**2
        left_sq = clip_sq / norm_sq
        is_cut = left_sq < 1.0
        np.minimum(left_sq, 1.0, out=left_sq)
        left = np.sqrt(left_sq, out=left_sq)
        return GradientsLeft(
            norm_sq=norm_sq,
            devices=left,
            is_cut=is_cut,
            examples=examples,
            changes=changes,
            weight=self.weight * left,
            depends_on_moments=chain.examples is not None or bool(is_cut.any()),
        )

    def _solve(self, left: GradientsLeft) -> _Solution:
        """Return the law before every round and after the last, for what is left."""
        chain = self.chain
        sums = chain.sums_over_devices @ left.weight
        curvature = sums[0] * left.changes
        push = sums[2:] * (self.kick * left.examples)
        if chain.examples is not None:
            push += np.multiply.outer(chain.cut_off, self.kick * sums[1])
        matrix = chain.matrices(chain.curvature_of_groups(curvature), self.rounds)
        pushes = [-push * enters for enters in self.enters]
        mean = self.mean_recursion.solve(matrix, pushes, self.start.mean)
        covariance = self.covariance_recursion.solve(
            _of_covariance(matrix),
            self._noise(left),
            self.start.covariance,
        )
        return _Solution(curvature, Law(mean, covariance))

    def _noise(self, left: GradientsLeft) -> Sequence[Array]:
        """Return what a round adds to the covariance, [W] or [g, W] each."""
        chain = self.chain
        if not chain.downlink_noise:
            return self.noise
        of_devices = _weighted_sum(chain.data_share**2, left.weight**2)
        of_devices *= chain.downlink_noise * (self.kick * left.changes) ** 2
        by_group = np.multiply.outer(chain.groups.precision**2, of_devices)
        noise = []
        for of_update, enters in zip(self.noise, chain.noise_enters, strict=True):
            noise.append(of_update + by_group * enters[self.rounds])
        return noise

    def _feedback(
        self,
        left: GradientsLeft,
        curvature: Array,
        law: Law,
        moments: GradientMoments,
    ) -> Feedback:
        """Return how q answers to a change of itself.

        A change of q changes what is left of gradients and so the curvature, which
        changes q of the rounds after it. All directions are taken to have the mean
        precision, weighted by their part of q.

        Args:
            left: what is left of gradients in a sweep.
            curvature: c of the sweep, [W].
            law: before every round, that the sweep has led to.
            moments: that it was made with.
        """
        chain = self.chain
        spread = self._spread(law)
        cubes = _weighted_sum(chain.precision**3, law.mean[..., 0] ** 2)
        cubes += _weighted_sum(chain.covariance_weights[2], law.covariance[..., 0])
        precision = cubes / np.maximum(spread[0], SMALLEST_SQUARE)
        matrix = chain.matrices(curvature * precision, self.rounds)
        motion_slope = [list(row) for row in chain.slope[..., self.rounds]]
        by_curvature = _mixed_products(motion_slope, spread, matrix)
        curvature_slope = self._curvature_slope(left, curvature, moments) * precision
        slopes = [curvature_slope * product for product in by_curvature]
        return Feedback(_of_covariance(matrix), slopes)

    def _curvature_slope(
        self, left: GradientsLeft, curvature: Array, moments: GradientMoments
    ) -> Array:
        """Return the derivative of c by q in every round, [W]; arguments as above."""
        chain = self.chain
        # Where a device is cut, the slope in q of what is left is −½ left share²/‖g‖²;
        # c is the sum of what is left by weight and share.
        slope = left.weight / left.norm_sq
        slope *= left.is_cut
        of_devices = _weighted_sum(-0.5 * chain.data_share**3, slope)
        curvature_slope = of_devices * left.changes
        variance = moments.example_variance
        if chain.examples is None or variance is None:
            return curvature_slope
        # The variance of examples' gradients is taken to change as q does.
        by_log = chain.examples.changes_left_slope(variance)
        slope_by_log = curvature / left.changes * by_log
        # Where a device is cut, less is left to cut.
        cut = _weighted_sum(chain.data_share, left.weight * left.is_cut)
        by_log = chain.examples.gradients_left_slope(variance)
        slope_by_log -= cut * left.changes * by_log
        curvature_slope += slope_by_log / moments.square
        return curvature_slope

    def _spread(self, law: Law) -> Sequence[Array]:
        """Return the upper triangle of Σ_d λ_d² E x xᵀ, [W] each."""
        chain = self.chain
        spread = []
        for index, (row, column) in enumerate(_triangle(law.mean.shape[-1])):
            product = law.mean[..., row] * law.mean[..., column]
            of_mean = _weighted_sum(chain.precision**2, product)
            covariance = law.covariance[..., index]
            spread.append(
                of_mean + _weighted_sum(chain.covariance_weights[0], covariance)
            )
        return spread


def _weighted_sum(weight: Array, values: Array) -> Array:
    """Return Σ_i weight[i] values[i], [W].

    OpenBLAS would give a product of this size to several threads.
    """
    return np.einsum("i,iw->w", weight, values)


def _triangle(size: int) -> Sequence[tuple[int, int]]:
    """Return row and column of the entries on and above the diagonal, by row."""
    return [(row, column) for row in range(size) for column in range(row, size)]


def _of_covariance(matrix: Entries) -> Entries:
    """Return what takes the upper triangle of C to that of M C Mᵀ.

    Args:
        matrix: M, of one or two rows.
    """
    if len(matrix) == 1:
        return [[matrix[0][0] ** 2]]
    (a, b), (c, d) = matrix
    of_position = [a * a, 2 * a * b, b * b]
    of_both = [a * c, a * d + b * c, b * d]
    of_velocity = [c * c, 2 * c * d, d * d]
    return [of_position, of_both, of_velocity]


def _mixed_products(
    first: Entries, moments: Sequence[Array], second: Entries
) -> Sequence[Array]:
    """Return the upper triangle of A Q Bᵀ + B Q Aᵀ.

    Args:
        first: A, of one or two rows.
        moments: the upper triangle of Q.
        second: B.
    """
    size = len(first)
    products = []
    for row, column in _triangle(size):
        total = np.zeros_like(moments[0])
        for i in range(size):
            for j in range(size):
                one_way = first[row][i] * second[column][j]
                other_way = second[row][i] * first[column][j]
                # Of the triangle of one or two rows, Q[i, j] is entry i + j.
                total += (one_way + other_way) * moments[i + j]
        products.append(total)
    return products
