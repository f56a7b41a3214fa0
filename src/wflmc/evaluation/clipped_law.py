"""A forecast of clipped chains without running them: mean and variance of every round, along the main directions.

The exact law of a chain ignores clipping. Here clipped gradients are replaced by their average effect: in every round
the typical norm of a device's gradient, at the present distance of the chains, gives the factor by which clipping
shortens it. This detects chains that noise drives farther than clipped gradients can bring back, and the bias of
devices that are clipped unequally. All devices are assumed to have the same curvature.
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

MOST = 2**21
"""Numbers in the gradients of all devices; of larger models the plan alone is looked at."""


class ChainForecast(NamedTuple):
    """A forecast of the kept rounds; squares are in units of the posterior's variance."""

    w2_sq: float
    """W2² over the posterior's total variance, worst or average as the plan's objective says."""
    alike: float
    """The same with equal weight for every direction of the posterior: in posterior variances."""
    error: float
    """The variance of one chain's mean over its draws: 1/ESS."""
    clipped: float
    """Share of the devices' gradients that are clipped."""
    shortened: float
    """What clipping leaves of gradients, on average."""
    exact: bool
    """Whether no gradient is clipped in any round: else the forecast knows clipping on average alone, and tells
    better plans from worse ones, not how good they are."""


@without_data
class ForecastModel(NamedTuple):
    """What a forecast takes a posterior for."""

    cost: Quadratic
    share: Array
    """Of the examples that each device holds, [K]."""
    examples: Array | None = None
    """Norm of every example's gradient at the mode, [N]; None where it is not known."""


def model_of(plan: Plan, posterior: Posterior | None) -> ForecastModel:
    """Return the quadratic model of a posterior; without one, a model of the plan's μ, L and distance at the start."""
    if posterior is not None and posterior.devices * posterior.dim <= MOST:
        with suppress(InputError):  # a cost in which no mode was found
            cost = posterior.quadratic(plan.init)
            return ForecastModel(
                cost,
                posterior.sizes / posterior.sizes.sum(),
                posterior.example_norms(cost.mode),
            )
    dim, devices = min(plan.dim, 64), plan.devices
    precision = np.repeat([plan.mu, plan.L], [dim - dim // 2, dim // 2])
    begun = (
        plan.initial_w2_sq if np.isfinite(plan.initial_w2_sq) else 0.0
    )  # of a start that nobody knows
    apart = np.full(dim, (max(begun, 0.0) / plan.dim) ** 0.5)
    # Of data that the model describes well, a device's gradient at the mode varies by its share of the curvature.
    signs = np.where((np.arange(devices)[:, None] + np.arange(dim)) % 2, 1.0, -1.0)
    pull = signs * np.sqrt(precision * plan.dim / (dim * devices))
    return ForecastModel(
        Quadratic(precision, apart, 1 / precision, pull, apart),
        np.full(devices, 1 / devices),
    )


def forecast(
    plan: Plan,
    model: ForecastModel,
    *,
    clipping: bool = True,
    excess: bool = True,
    start: bool = True,
) -> ChainForecast:
    """Forecast the kept rounds of a plan.

    Args:
        clipping, excess, start: whether gradients are clipped, noise is above what Langevin sampling needs, and chains
            start where they do (else at the posterior): without one of them, the difference is what it costs.
    """
    rounds = _rounds(plan, model, clipping=clipping, excess=excess, start=start)
    summary = _Summary(rounds, plan.burn_in)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # a chain that diverges ends in inf, and is reported as such
        for window in rounds.windows():
            summary.add(window)
    return summary.forecast(average=plan.certificate.objective_name == "average")


def _rounds(
    plan: Plan, model: ForecastModel, *, clipping: bool, excess: bool, start: bool
) -> ClippedRounds:
    """Return the rounds of a plan; arguments as of `forecast`."""
    cost = model.cost
    groups = DirectionGroups.of(
        cost.precision, cost.start if start else 1 / cost.precision
    )
    has_velocity = plan.dynamics.has_velocity
    mean = np.zeros((cost.precision.size, 1 + has_velocity))
    if start:
        mean[:, 0] = cost.away[groups.order]
    covariance = np.zeros((groups.start.size, 3 if has_velocity else 1))
    covariance[:, -1] = 1.0  # of the velocity, where there is one
    covariance[:, 0] = groups.start
    noise = plan.noise_variance
    return ClippedRounds(
        groups=groups,
        pull=cost.pull[:, groups.order],
        data_share=model.share,
        start=Law(mean, covariance),
        dynamics=plan.dynamics,
        step_size=plan.step_size,
        weight=plan.weight_received,
        noise=noise if excess else np.minimum(noise, plan.langevin_noise),
        downlink_noise=plan.downlink_noise,
        clip=plan.clip if clipping else np.full(plan.devices, np.inf),
        examples=_example_clipping(plan, model) if clipping else None,
    )


def _example_clipping(plan: Plan, model: ForecastModel) -> ExampleClipping | None:
    """Return how a plan clips examples; None where it does not, or their gradients are not known."""
    norms = model.examples
    if norms is None or not np.isfinite(plan.example_clip).any():
        return None
    counts = np.rint(model.share * norms.size).astype(int)
    return ExampleClipping(norms, np.repeat(plan.example_clip, counts))


class _Summary:
    """What a forecast says of the rounds of a plan, window by window.

    Args:
        rounds: of the plan.
        burn_in: how many of them are not kept.
    """

    def __init__(self, rounds: ClippedRounds, burn_in: int) -> None:
        self.rounds = rounds
        self.burn_in = burn_in
        self.kept: list[Array] = []
        """Of every kept round W2², the same in posterior variances, the fraction of clipped gradients and what is left
        of them; [4, rounds] of every window."""
        self.least_left = 1.0
        """The least that clipping leaves of a gradient."""
        self.lagged = np.zeros((rounds.groups.sizes.size, rounds.start.mean.shape[-1]))
        """Σ over the kept rounds so far of their covariance with the last one, [g, n]."""
        self.sum_variance = 0.0
        """Variance of the sum of a chain's kept draws, over all directions."""

    def add(self, window: Window) -> None:
        """Take the next window into account."""
        of_round = np.fmin.reduce(window.devices_left, axis=0) * window.examples_left
        self.least_left = float(np.fmin(self.least_left, np.fmin.reduce(of_round)))
        first = max(0, self.burn_in - window.rounds.start)
        if first < window.curvature.size:
            self._add_kept(window, first)

    def _add_kept(self, window: Window, first: int) -> None:
        """Take the rounds of a window from `first` on into account."""
        precision = self.rounds.precision
        groups = self.rounds.groups
        law = window.law.between(first + 1, None)
        mean_sq = law.mean[..., 0] ** 2
        std = np.sqrt(np.maximum(law.covariance[..., 0], 0.0))
        off_sq = groups.sizes[:, None] * (std - groups.precision[:, None] ** -0.5) ** 2
        w2_sq = mean_sq.sum(0) + off_sq.sum(0)
        alike = precision @ mean_sq + groups.precision @ off_sq
        clipped = window.is_cut[:, first:].mean(0)
        left = window.examples_left[first:] * window.devices_left[:, first:].mean(0)
        self.kept.append(np.stack([w2_sq, alike, clipped, left]))
        self._add_covariance(window, first)

    def _add_covariance(self, window: Window, first: int) -> None:
        """Add the kept rounds' covariance with those before them."""
        groups = self.rounds.groups
        rounds = slice(window.rounds.start + first, window.rounds.stop)
        covariance = window.law.covariance[:, first + 1 :]
        size = self.lagged.shape[-1]
        recursion = BlockRecursion([1] * len(covariance), covariance.shape[1], size)
        with_position = [covariance[..., entry] for entry in range(size)]
        matrix = self.rounds.matrices(window.curvature[first:], rounds)
        lagged = recursion.solve(matrix, with_position, self.lagged)
        self.lagged = lagged[:, -1]
        with_earlier = 2 * lagged[:, 1:, 0] - covariance[..., 0]
        self.sum_variance += float(groups.sizes @ with_earlier.sum(-1))

    def forecast(self, *, average: bool) -> ChainForecast:
        """Return the forecast: the average of the kept rounds, or the worst of them."""
        kept = np.nan_to_num(
            np.concatenate(self.kept, axis=1), nan=np.inf, posinf=np.inf
        )
        w2_sq, alike, clipped, left = kept
        precision = self.rounds.precision
        variance = float((1 / precision).sum())
        summary = np.mean if average else np.max
        sum_variance = float(
            np.nan_to_num(self.sum_variance, nan=np.inf, posinf=np.inf)
        )
        return ChainForecast(
            w2_sq=float(summary(w2_sq)) / variance,
            alike=float(summary(alike)) / precision.size,
            error=sum_variance / w2_sq.size**2 / variance,
            clipped=float(clipped.mean()),
            shortened=float(left.mean()),
            exact=self.least_left > 0.99,
        )
