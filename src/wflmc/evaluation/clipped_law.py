"""A forecast of clipped chains without running them: mean and variance of every round, along the main directions.

The exact law of a chain ignores clipping. Here clipped gradients are replaced by their average effect: in every round
the typical norm of a device's gradient, at the present distance of the chains, gives the factor by which clipping
shortens it. This detects chains that noise drives farther than clipped gradients can bring back, and the bias of
devices that are clipped unequally. All devices are assumed to have the same curvature.
"""

from contextlib import suppress
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from wflmc.dynamics import Array, Quadratic
from wflmc.planning import Plan
from wflmc.posterior.base import Posterior
from wflmc.support.errors import InputError, without_data

MOST = 2**21
"""Numbers in the gradients of all devices; of larger models the plan alone is looked at."""
QUANTILES = (np.arange(64) + 0.5) / 64
"""Of the norms of examples that are all clipped alike: enough of them for a forecast, and sooner done than all."""


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
            return ForecastModel(cost, posterior.sizes / posterior.sizes.sum(), posterior.example_norms(cost.mode))
    dim, devices = min(plan.dim, 64), plan.devices
    precision = np.repeat([plan.mu, plan.L], [dim - dim // 2, dim // 2])
    begun = plan.initial_w2_sq if np.isfinite(plan.initial_w2_sq) else 0.0  # of a start that nobody knows
    apart = np.full(dim, (max(begun, 0.0) / plan.dim) ** 0.5)
    # Of data that the model describes well, a device's gradient at the mode varies by its share of the curvature.
    signs = np.where((np.arange(devices)[:, None] + np.arange(dim)) % 2, 1.0, -1.0)
    pull = signs * np.sqrt(precision * plan.dim / (dim * devices))
    return ForecastModel(Quadratic(precision, apart, 1 / precision, pull, apart), np.full(devices, 1 / devices))


def forecast(
    plan: Plan, model: ForecastModel, *, clipping: bool = True, excess: bool = True, start: bool = True
) -> ChainForecast:
    """Forecast the kept rounds of a plan.

    Args:
        clipping, excess, start: whether gradients are clipped, noise is above what Langevin sampling needs, and chains
            start where they do (else at the posterior): without one of them, the difference is what it costs.
    """
    cost, precision, share = model.cost, model.cost.precision, model.share
    noise = plan.noise_variance if excess else np.minimum(plan.noise_variance, plan.langevin_noise)
    clip = plan.clip if clipping else np.full(plan.devices, np.inf)
    examples, limits = np.zeros(1), np.full(1, np.inf)
    if clipping and model.examples is not None and np.isfinite(plan.example_clip).any():
        examples = model.examples
        limits = np.repeat(plan.example_clip, np.rint(share * examples.size).astype(int))
    parts, size = 1 + plan.dynamics.has_velocity, precision.size
    mean, lagged, total = np.zeros((parts, size)), np.zeros((parts, size)), np.zeros(size)
    covariance = np.zeros((parts, parts, size))
    covariance[-1, -1] = 1.0  # of the velocity, where there is one
    mean[0], covariance[0, 0] = (cost.away, cost.start) if start else (0.0, 1 / precision)
    kept, least, by_example = [], 1.0, np.isfinite(limits).any()
    norms_sq, weights, kick, std = (cost.pull**2).sum(-1), plan.weight_received, plan.kick, precision**-0.5
    # What clipping takes from examples at the mode no longer adds up to zero; it points anywhere.
    lost = np.sqrt((np.maximum(examples - limits, 0.0) ** 2).sum() * precision / precision.sum())
    number = limits.size
    if number > QUANTILES.size and np.all(limits == limits[0]):
        examples, limits = np.quantile(examples, QUANTILES), limits[: QUANTILES.size]
    with np.errstate(over="ignore", invalid="ignore"):  # a chain that diverges ends in inf, and is reported as such
        for s in range(len(plan.rounds)):
            reach = precision * mean[0]
            factor = slope = 1.0
            if by_example:  # one example adds (u·d) u to its gradient at a distance d
                moved = precision.sum() * float(reach @ mean[0] + precision @ covariance[0, 0]) / number**2
                factor = float(np.minimum(1.0, limits / np.sqrt(examples**2 + moved)).mean())
                slope = _slope(examples, limits, moved)
            far_sq = share**2 * (reach @ reach + precision**2 @ covariance[0, 0]) + 2 * share * (cost.pull @ reach)
            norm = factor * np.sqrt(np.maximum(norms_sq + far_sq, 1e-300))
            left = np.minimum(1.0, clip / norm)
            least = min(least, float(left.min()) * factor)
            weight = weights[s] * left * slope
            steps, curvature = plan.step_size[s : s + 1], (precision * (weight @ share))[:, None, None]
            by_direction, _, enters = plan.dynamics.linear_round(steps, curvature, mean[:1].T)
            matrix, enters = by_direction.transpose(1, 2, 0), enters.reshape(-1, parts)[0]
            push = kick[s] * (factor * (weights[s] * left) @ cost.pull + (weights[s] @ left) / left.size * lost)
            fresh = noise[s] + plan.downlink_noise * (kick[s] * precision) ** 2 * ((weight * share) ** 2).sum()
            mean = (matrix * mean).sum(1) - enters[:, None] * push
            covariance = np.einsum("ikd,kjd->ijd", matrix, np.einsum("ikd,jkd->ijd", covariance, matrix))
            covariance += np.multiply.outer(np.outer(enters, enters), fresh)
            if s >= plan.burn_in:
                lagged = (matrix * lagged).sum(1) + covariance[0]  # Σ over the kept rounds before of the covariance
                total += 2 * lagged[0] - covariance[0, 0]
                off = mean[0] ** 2 + (np.sqrt(np.maximum(covariance[0, 0], 0.0)) - std) ** 2
                kept.append((off.sum(), precision @ off, (norm > clip).mean(), factor * left.mean()))
    far, alike, clipped, shortened = np.nan_to_num(np.array(kept), nan=np.inf).T
    variance, draws = float((1 / precision).sum()), len(plan.rounds) - plan.burn_in
    summary = np.mean if plan.certificate.objective_name == "average" else np.max
    error = float(np.nan_to_num(total.sum(), nan=np.inf)) / draws**2 / variance
    means = float(clipped.mean()), float(shortened.mean())
    return ChainForecast(float(summary(far)) / variance, float(summary(alike)) / size, error, *means, least > 0.99)


def _slope(examples: Array, limits: Array, moved: float) -> float:
    """Return the share of a change of its gradient that an example still transmits, on average.

    For a number clipped at ±c this is exact: the slope of the best linear fit to it is P(|e + δ| < c), δ ~ N(0, moved).
    """
    width = np.sqrt(moved + 1e-300)
    return float((ndtr((limits - examples) / width) - ndtr((-limits - examples) / width)).mean())
