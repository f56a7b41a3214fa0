"""The forecast of clipped chains written as a loop over rounds: slow, plain, and what
the fast one has to match.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from wflmc.evaluation.clipped_law import ChainForecast, ForecastModel
from wflmc.planning import Plan

QUANTILES = (np.arange(64) + 0.5) / 64


class Examples(NamedTuple):
    """Norms of the examples' gradients at the mode, their clipping thresholds, and how
    many examples there are.
    """

    norms: np.ndarray
    limits: np.ndarray
    count: int
    cut_off_sq: float


def examples_of(plan: Plan, model: ForecastModel, clipping: bool) -> Examples | None:
    """Return what clipping of examples needs, by 64 quantiles where thresholds are
    equal; None without it.
    """
    if (
        not clipping
        or model.examples is None
        or not np.isfinite(plan.example_clip).any()
    ):
        return None
    norms = model.examples
    limits = np.repeat(
        plan.example_clip, np.rint(model.data_share * norms.size).astype(int)
    )
    cut_off_sq = float((np.maximum(norms - limits, 0.0) ** 2).sum())
    if limits.size > QUANTILES.size and np.all(limits == limits[0]):
        return Examples(
            np.quantile(norms, QUANTILES),
            limits[: QUANTILES.size],
            limits.size,
            cut_off_sq,
        )
    return Examples(norms, limits, limits.size, cut_off_sq)


def forecast_by_rounds(
    plan: Plan,
    model: ForecastModel,
    *,
    clipping: bool = True,
    excess: bool = True,
    cold: bool = True,
    start: bool = True,
) -> ChainForecast:
    """Return what `wflmc.evaluation.clipped_law.forecast` returns, computed one round
    after the other.

    Args:
        plan: of the chain.
        model: of the posterior.
        clipping: whether gradients and examples are clipped.
        excess: whether noise beyond that of the Langevin dynamics counts.
        cold: whether less noise than that counts in burn-in.
        start: whether the chain starts as planned; otherwise at the mode with the
            posterior's variance.
    """
    cost = model.cost
    precision = cost.precision
    data_share = model.data_share
    size = 1 + plan.dynamics.has_velocity
    noise = plan.noise_variance.copy()
    if not excess:
        noise = np.minimum(noise, plan.langevin_noise)
    if not cold:
        burn_in = slice(plan.burn_in)
        noise[burn_in] = np.maximum(noise[burn_in], plan.langevin_noise[burn_in])
    clip = plan.clip * model.direction_fraction**0.5
    if not clipping:
        clip = np.full(plan.devices, np.inf)
    examples = examples_of(plan, model, clipping)
    cut_off = np.zeros_like(precision)
    if examples is not None:
        cut_off = np.sqrt(examples.cut_off_sq * precision / precision.sum())

    mean = np.zeros((size, precision.size))
    covariance = np.zeros((size, size, precision.size))
    covariance[-1, -1] = 1.0
    mean[0] = cost.start_mean if start else 0.0
    covariance[0, 0] = cost.start_variance if start else 1 / precision
    lagged = np.zeros_like(mean)
    total = np.zeros_like(precision)
    draw_variance = 0.0
    least = 1.0
    rounds_kept = []
    with np.errstate(over="ignore", invalid="ignore"):
        for s in range(len(plan.rounds)):
            change = precision * mean[0]
            examples_left = changes_left = 1.0
            if examples is not None:
                moved = (
                    precision.sum()
                    * (change @ mean[0] + precision @ covariance[0, 0])
                    / examples.count**2
                )
                norm = np.sqrt(examples.norms**2 + moved)
                examples_left = np.minimum(1.0, examples.limits / norm).mean()
                std = np.sqrt(moved + 1e-300)
                upper = ndtr((examples.limits - examples.norms) / std)
                lower = ndtr((-examples.limits - examples.norms) / std)
                changes_left = (upper - lower).mean()
            square = change @ change + precision**2 @ covariance[0, 0]
            norm_sq = (
                (cost.gradients_at_mode**2).sum(-1)
                + data_share**2 * square
                + 2 * data_share * (cost.gradients_at_mode @ change)
            )
            norm = examples_left * np.sqrt(np.maximum(norm_sq, 1e-300))
            left = np.minimum(1.0, clip / norm)
            least = min(least, left.min() * examples_left)

            weight = plan.weight_received[s] * left
            curvature = changes_left * (weight @ data_share)
            hessian = (precision * curvature)[:, None, None]
            matrix, _, enters = plan.dynamics.linear_round(
                plan.step_size[s : s + 1], hessian, mean[:1].T
            )
            matrix = matrix.transpose(1, 2, 0)
            enters = enters.reshape(-1, size)[0]
            kick = plan.kick[s]
            push = kick * (
                examples_left * weight @ cost.gradients_at_mode
                + weight.mean() * cut_off
            )
            received = ((weight * changes_left * data_share) ** 2).sum()
            fresh = noise[s] + plan.downlink_noise * (kick * precision) ** 2 * received
            mean = (matrix * mean).sum(1) - enters[:, None] * push
            covariance = np.einsum("ikd,kld,jld->ijd", matrix, covariance, matrix)
            covariance += np.multiply.outer(np.outer(enters, enters), fresh)
            if s >= plan.burn_in:
                lagged = (matrix * lagged).sum(1) + covariance[0]
                total += 2 * lagged[0] - covariance[0, 0]
                variance = np.maximum(covariance[0, 0], 0.0)
                std_error = np.sqrt(variance) - precision**-0.5
                off_sq = mean[0] ** 2 + std_error**2
                draw_variance += variance.sum()
                rounds_kept.append(
                    (
                        off_sq.sum(),
                        precision @ off_sq,
                        precision @ np.fmin(std_error, 0.0) ** 2,
                        precision @ np.maximum(std_error, 0.0) ** 2,
                        (norm > clip).mean(),
                        examples_left * left.mean(),
                    )
                )
    kept = np.nan_to_num(np.array(rounds_kept), nan=np.inf)
    far, alike, narrow, wide, clipped, shortened = kept.T
    draws = len(rounds_kept)
    variance_of_mean = np.nan_to_num(total.sum(), nan=np.inf) / draws**2
    variance = (1 / precision).sum()
    narrower = np.fmin(variance, draw_variance / draws)
    summary = np.mean if plan.certificate.objective_name == "average" else np.max
    return ChainForecast(
        w2_sq=float(summary(far) / variance),
        scaled_w2_sq=float(summary(alike) / precision.size),
        narrow_w2_sq=float(summary(narrow) / precision.size),
        wide_w2_sq=float(summary(wide) / precision.size),
        inverse_ess=float(variance_of_mean / narrower),
        clip_rate=float(clipped.mean()),
        fraction_left=float(shortened.mean()),
        exact=bool(least > 0.99),
    )
