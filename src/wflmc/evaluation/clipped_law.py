"""A forecast of clipped chains without running them.

The exact law of a chain ignores clipping. Here clipped gradients are replaced by their
average effect: in every round the typical norm of a device's gradient, at the present
distance of the chains, gives the factor by which clipping shortens it. Mean and
variance then follow round by round along the main directions. This detects chains that
noise drives farther than clipped gradients can bring back, and the bias of devices that
are clipped unequally. All devices are assumed to have the same curvature.
"""

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from wflmc.dynamics import Array, Quadratic
from wflmc.evaluation.clipped_examples import ExampleClipping
from wflmc.evaluation.clipped_rounds import ClippedRounds, DirectionGroups, Law, Window
from wflmc.planning import Plan
from wflmc.posterior.base import Posterior
from wflmc.support.errors import InputError, without_data
from wflmc.support.recursion import BlockRecursion

MAX_GRADIENT_NUMBERS = 2**21
"""Numbers in the gradients of all devices up to which a posterior is looked at; of
larger models only the plan is."""
MAX_MODEL_DIM = 64
"""Directions that stand for those of a posterior that is not looked at."""
UNCLIPPED_FRACTION = 0.99
"""A forecast counts as exact where more than this is left of every typical gradient."""


class ChainForecast(NamedTuple):
    """A forecast of the rounds after burn-in.

    Squares are in units of the posterior's variance.
    """

    w2_sq: float
    """W2² over the posterior's total variance, worst or average as the plan's objective
    says."""
    scaled_w2_sq: float
    """The mean over directions of W2² along them, in the posterior's variance of each:
    all directions have equal weight."""
    narrow_w2_sq: float
    """What is left of `scaled_w2_sq` if only directions count along which draws are
    narrower than the posterior, and means do not."""
    wide_w2_sq: float
    """The same of directions along which draws are wider."""
    inverse_ess: float
    """1/ESS of one chain, all directions together: the variance of the mean of its
    draws, over that of a draw from the posterior, or of one from the chain where that
    is smaller. It is infinite for a chain that never moves."""
    clip_rate: float
    """The fraction of devices and rounds whose typical gradient is clipped."""
    fraction_left: float
    """What clipping leaves of gradients, on average over devices and rounds."""
    exact: bool
    """Whether clipping leaves more than 99 % of every device's typical gradient in all
    rounds, burn-in included. Otherwise the forecast knows clipping on average alone,
    and tells better plans from worse ones, not how good they are."""


@without_data
class ForecastModel(NamedTuple):
    """The quadratic model that a forecast has of a posterior."""

    cost: Quadratic
    """The cost, along its main directions."""
    data_share: Array
    """The fraction of the examples that each device holds, [K]."""
    examples: Array | None = None
    """Norm of every example's gradient at the mode, [N]; None where it is not known."""
    direction_fraction: float = 1.0
    """The fraction of a posterior's directions that `cost` has, where these stand for
    all: squared norms of gradients are as much smaller."""


def model_of(plan: Plan, posterior: Posterior | None) -> ForecastModel:
    """Return the quadratic model of a posterior.

    A posterior that is None, has more than 2²¹ numbers in the gradients of all devices,
    or has no mode is not looked at: the model is then made of the plan's μ, L and
    distance at the start.

    Args:
        plan: whose start and devices the model has.
        posterior: of the data; None where it is not at hand.

    Returns:
        The model, for any plan of the same posterior and start. Norms of examples are
        known only where the posterior was looked at.
    """
    if posterior is not None:
        size = posterior.devices * posterior.dim
        if size <= MAX_GRADIENT_NUMBERS:
            with suppress(InputError):  # a cost in which no mode was found
                cost = posterior.quadratic(plan.init)
                return ForecastModel(
                    cost=cost,
                    data_share=posterior.sizes / posterior.sizes.sum(),
                    examples=posterior.example_norms(cost.mode),
                )
    return _model_of_plan(plan)


def _model_of_plan(plan: Plan) -> ForecastModel:
    """Return a model of a plan's μ, L and distance at the start.

    Half of the directions have precision μ, half of them L.
    """
    dim = min(plan.dim, MAX_MODEL_DIM)
    devices = plan.devices
    precision = np.repeat([plan.mu, plan.L], [dim - dim // 2, dim // 2])
    start_w2_sq = 0.0  # of a start that is not known
    if np.isfinite(plan.initial_w2_sq):
        start_w2_sq = max(plan.initial_w2_sq, 0.0)
    distance = np.full(dim, (start_w2_sq / plan.dim) ** 0.5)
    # Of data that follow the model, the square of a device's gradient at the mode is
    # its part of the curvature, on average.
    is_positive = (np.arange(devices)[:, None] + np.arange(dim)) % 2
    signs = np.where(is_positive, 1.0, -1.0)
    signs -= signs.mean(0)  # at the mode gradients add up to zero
    deviation = np.sqrt(precision / devices)
    cost = Quadratic(
        precision=precision,
        start_mean=distance,
        start_variance=1 / precision,
        gradients_at_mode=signs * deviation,
        mode=distance,
    )
    return ForecastModel(
        cost=cost,
        data_share=np.full(devices, 1 / devices),
        direction_fraction=dim / plan.dim,
    )


def forecast(
    plan: Plan,
    model: ForecastModel,
    *,
    clipping: bool = True,
    excess: bool = True,
    cold: bool = True,
    start: bool = True,
) -> ChainForecast:
    """Forecast the rounds of a plan after burn-in.

    Nothing is sampled: it takes milliseconds. Where something is left out, the
    difference is what it costs.

    Args:
        plan: whose chains are forecast.
        model: of the posterior, by `model_of`.
        clipping: whether gradients are clipped.
        excess: whether noise is above what Langevin sampling needs.
        cold: whether noise of burn-in is below that.
        start: whether chains start where they do; otherwise at the posterior.

    Returns:
        The forecast; squares are infinite for a chain that diverges.
    """
    noise = _noise(plan, excess=excess, cold=cold)
    rounds = _rounds(plan, model, noise=noise, clipping=clipping, start=start)
    summary = _Summary(rounds, plan.burn_in)
    # A chain that diverges ends in inf, and is reported as such.
    with np.errstate(over="ignore", invalid="ignore"):
        for window in rounds.windows():
            summary.add(window)
    return summary.forecast(average=plan.certificate.objective_name == "average")


def _noise(plan: Plan, *, excess: bool, cold: bool) -> Array:
    """Return the variance of the noise of every round, [S]; as of `forecast`."""
    noise = plan.noise_variance
    if not excess:
        noise = np.minimum(noise, plan.langevin_noise)
    if not cold:
        is_burn_in = np.arange(noise.size) < plan.burn_in
        at_least_needed = np.maximum(noise, plan.langevin_noise)
        noise = np.where(is_burn_in, at_least_needed, noise)
    return noise


def _rounds(
    plan: Plan, model: ForecastModel, *, noise: Array, clipping: bool, start: bool
) -> ClippedRounds:
    """Return the rounds of a plan with noise[S]; other arguments as of `forecast`."""
    cost = model.cost
    start_variance = cost.start_variance if start else 1 / cost.precision
    groups = DirectionGroups.of(cost.precision, start_variance)
    # Of the position, and of the velocity where there is one.
    state_size = 2 if plan.dynamics.has_velocity else 1
    triangle_size = state_size * (state_size + 1) // 2
    mean = np.zeros((cost.precision.size, state_size))
    if start:
        mean[:, 0] = cost.start_mean[groups.order]
    covariance = np.zeros((groups.start.size, triangle_size))
    # The velocity starts as N(0, I). Without one, this is the entry of the position,
    # which is set next.
    covariance[:, -1] = 1.0
    covariance[:, 0] = groups.start
    # Of gradients along the directions of the model alone.
    clip = plan.clip * model.direction_fraction**0.5
    examples = _example_clipping(plan, model)
    if not clipping:
        clip = np.full(plan.devices, np.inf)
        examples = None
    return ClippedRounds(
        groups=groups,
        gradients_at_mode=cost.gradients_at_mode[:, groups.order],
        data_share=model.data_share,
        start=Law(mean, covariance),
        dynamics=plan.dynamics,
        step_size=plan.step_size,
        weight=plan.weight_received,
        noise=noise,
        downlink_noise=plan.downlink_noise,
        clip=clip,
        examples=examples,
    )


def _example_clipping(plan: Plan, model: ForecastModel) -> ExampleClipping | None:
    """Return how a plan clips examples.

    None where it does not, or where their gradients are not known.
    """
    norms = model.examples
    if norms is None or not np.isfinite(plan.example_clip).any():
        return None
    counts = np.rint(model.data_share * norms.size).astype(int)
    return ExampleClipping(norms, np.repeat(plan.example_clip, counts))


class _RoundSummaries(NamedTuple):
    """What a forecast says of every round after burn-in, [rounds] each."""

    w2_sq: Array
    """Summed over directions."""
    scaled_w2_sq: Array
    """The same in the posterior's variance of each direction."""
    narrow_w2_sq: Array
    """Of that, what directions add along which draws are too narrow."""
    wide_w2_sq: Array
    """Of that, what directions add along which draws are too wide."""
    clip_rate: Array
    """The fraction of the devices whose gradient is clipped."""
    fraction_left: Array
    """What clipping leaves of gradients, mean over devices."""


class _Summary:
    """What a forecast says of the rounds of a plan, window by window.

    Args:
        rounds: of the plan.
        burn_in: how many of them are discarded.
    """

    def __init__(self, rounds: ClippedRounds, burn_in: int) -> None:
        self.rounds = rounds
        self.burn_in = burn_in
        self.windows: list[_RoundSummaries] = []
        """Of the rounds after burn-in."""
        self.smallest_left = 1.0
        """The least that clipping leaves of a gradient in any round, burn-in included;
        all else here is of the rounds after it."""
        state_size = rounds.start.mean.shape[-1]
        self.covariance_with_sum = np.zeros((rounds.groups.sizes.size, state_size))
        """Cov(state of the last round, Σ positions of the rounds after burn-in so far),
        of one direction of each group, [g, n]: n is 1, or 2 with a velocity. Directions
        of a group are alike; `groups.sizes` counts them."""
        self.sum_variance = 0.0
        """Variance of the sum of a chain's draws, added up over all directions:
        `forecast` makes the ESS of it."""
        self.draw_variance = 0.0
        """Variance of a draw, added up over all directions and draws."""

    def add(self, window: Window) -> None:
        """Take the next window into account.

        Rounds of burn-in count for `smallest_left` only.

        Args:
            window: whose rounds follow those of the window before.
        """
        of_devices = np.fmin.reduce(window.left.devices, axis=0)
        smallest = np.fmin.reduce(of_devices * window.left.examples)
        self.smallest_left = float(np.fmin(self.smallest_left, smallest))
        first = max(0, self.burn_in - window.rounds.start)
        if first < window.curvature.size:
            self._add_rounds(window, first)
            self._add_covariance(window, first)

    def _add_rounds(self, window: Window, first: int) -> None:
        """Take the rounds of a window from `first` on into account."""
        groups = self.rounds.groups
        law = window.law.between(first + 1, None)
        mean_sq = law.mean[..., 0] ** 2
        variance = np.maximum(law.covariance[..., 0], 0.0)
        posterior_std = groups.precision**-0.5
        std_error = np.sqrt(variance) - posterior_std[:, None]
        std_error_sq = groups.sizes[:, None] * std_error**2
        is_narrow = std_error < 0
        narrow_error_sq = np.where(is_narrow, std_error_sq, 0.0)
        # Where a chain diverges, errors may be nan: such a chain is wide.
        wide_error_sq = np.where(is_narrow, 0.0, std_error_sq)
        scaled_mean_sq = self.rounds.precision @ mean_sq
        scaled_std_error_sq = groups.precision @ std_error_sq
        self.draw_variance += float(groups.sizes @ variance.sum(-1))
        is_cut = window.left.is_cut[:, first:]
        devices_left = window.left.devices[:, first:]
        examples_left = window.left.examples[first:]
        summaries = _RoundSummaries(
            w2_sq=mean_sq.sum(0) + std_error_sq.sum(0),
            scaled_w2_sq=scaled_mean_sq + scaled_std_error_sq,
            narrow_w2_sq=groups.precision @ narrow_error_sq,
            wide_w2_sq=groups.precision @ wide_error_sq,
            clip_rate=is_cut.mean(0),
            fraction_left=examples_left * devices_left.mean(0),
        )
        self.windows.append(summaries)

    def _add_covariance(self, window: Window, first: int) -> None:
        """Add the covariance of these rounds with those before them.

        As in `LinearChain.variance_of_mean`. With P[t] for `covariance_with_sum` and
        c[t] for the covariances of the state with its position, P[t] = M[t] P[t−1] +
        c[t], and the round adds the first entry of 2 P[t] − c[t] to the variance of the
        sum.
        """
        sizes = self.rounds.groups.sizes
        rounds = slice(window.rounds.start + first, window.rounds.stop)
        covariance = window.law.covariance[:, first + 1 :]
        group_count, round_count, _ = covariance.shape
        state_size = self.covariance_with_sum.shape[-1]
        recursion = BlockRecursion([1] * group_count, round_count, state_size)
        # The first row of the upper triangle: covariances with the position.
        with_position = [covariance[..., entry] for entry in range(state_size)]
        curvature = self.rounds.curvature_of_groups(window.curvature[first:])
        matrix = self.rounds.matrices(curvature, rounds)
        with_sum = recursion.solve(matrix, with_position, self.covariance_with_sum)
        self.covariance_with_sum = with_sum[:, -1]
        of_rounds = 2 * with_sum[:, 1:, 0] - covariance[..., 0]
        by_group = of_rounds.sum(-1)
        self.sum_variance += float(sizes @ by_group)

    def forecast(self, *, average: bool) -> ChainForecast:
        """Return the forecast of all windows so far.

        Args:
            average: of the rounds after burn-in; otherwise the worst of them.

        Returns:
            The forecast, in which nan counts as infinite.
        """
        fields = [np.concatenate(parts) for parts in zip(*self.windows, strict=True)]
        rounds = _RoundSummaries(*map(_nan_as_infinite, fields))
        precision = self.rounds.precision
        posterior_variance = float((1 / precision).sum())
        draws = rounds.w2_sq.size

        def summary(values: Array) -> float:
            return float(np.mean(values) if average else np.max(values))

        w2_sq = summary(rounds.w2_sq)
        scaled_w2_sq = summary(rounds.scaled_w2_sq)
        narrow_w2_sq = summary(rounds.narrow_w2_sq)
        wide_w2_sq = summary(rounds.wide_w2_sq)
        variance_of_mean = float(_nan_as_infinite(self.sum_variance)) / draws**2
        draw_variance = float(_nan_as_infinite(self.draw_variance)) / draws
        narrower = min(posterior_variance, draw_variance)
        inverse_ess = variance_of_mean / narrower if narrower > 0 else np.inf
        return ChainForecast(
            w2_sq=w2_sq / posterior_variance,
            scaled_w2_sq=scaled_w2_sq / precision.size,
            narrow_w2_sq=narrow_w2_sq / precision.size,
            wide_w2_sq=wide_w2_sq / precision.size,
            inverse_ess=inverse_ess,
            clip_rate=float(rounds.clip_rate.mean()),
            fraction_left=float(rounds.fraction_left.mean()),
            exact=self.smallest_left > UNCLIPPED_FRACTION,
        )


def _nan_as_infinite(values: Array | float) -> Array:
    """Return values with inf in the place of nan."""
    return np.nan_to_num(values, nan=np.inf, posinf=np.inf)
