"""Draw regimes, the three distances, and step sizes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from docs.draw.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    YELLOW,
    new_figure,
    save,
)
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

import wflmc
from wflmc.posterior import GaussianPosterior

Array = NDArray[np.floating]

COLORS = {"lmc-limited": YELLOW, "power-limited": "#56B4E9", "dp-limited": ORANGE}
HATCHES = {"lmc-limited": "", "power-limited": "//", "dp-limited": "\\\\"}

STEP_FACTOR = 0.4
"""Step size times μ + L, as in the paper's figure 6."""
CLIP = 30.0
"""ℓ."""
STATIC_POWER = 1e-4
"""|h|² of examples/static.toml."""
STATIC_ROUNDS = 51
"""Of examples/static.toml: 50 of burn-in and one sample."""


class Point(NamedTuple):
    """A point of the map of regimes, and the line of its plan."""

    letter: str
    snr_db: float
    epsilon: float
    color: str
    linestyle: str


POINTS = (
    Point("A", 30.0, 18.0, GREEN, "-"),
    Point("B", 10.0, 12.0, BLUE, "--"),
    Point("C", 30.0, 8.0, RED, "-."),
)
"""One point in each regime."""


def draw_regimes() -> None:
    """Draw the limit that binds over SNR and ε, and the loss over the rounds."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    figure = new_figure(9.5, 3.9)
    plane, profile = figure.subplots(1, 2)
    _draw_map(plane, posterior)
    _draw_losses(profile, posterior)
    save(figure, "regimes")


def _draw_map(axes: Axes, posterior: GaussianPosterior) -> None:
    """Draw which limit binds at which SNR and ε, and mark the points."""
    snr_db = np.linspace(5, 35, 301)
    epsilon = np.linspace(1, 20, 191)
    binding = _limits(posterior, snr_db, epsilon).argmin(0)
    handles = []
    for index, name in enumerate(COLORS):
        axes.contourf(
            snr_db,
            epsilon,
            binding == index,
            [0.5, 1.5],
            colors=[COLORS[name]],
            hatches=[HATCHES[name]],
            alpha=0.6,
        )
        patch = Patch(
            facecolor=COLORS[name],
            hatch=HATCHES[name],
            edgecolor="grey",
            alpha=0.6,
            label=name,
        )
        handles.append(patch)
    axes.set(xlabel="SNR (dB)", ylabel="ε (δ = 0.01, replace)")
    axes.set_title("which limit binds")
    axes.legend(handles=handles, fontsize=9, loc="lower right")
    for point in POINTS:
        axes.text(
            point.snr_db,
            point.epsilon,
            point.letter,
            ha="center",
            va="center",
            fontsize=12,
            fontweight="bold",
        )


def _limits(posterior: GaussianPosterior, snr_db: Array, epsilon: Array) -> Array:
    """Return the three limits of Theorem 1 on the loss of a round, [limit, ε, SNR]."""
    langevin = CLIP**2 * STEP_FACTOR / (posterior.mu + posterior.L)
    power = 2 * posterior.dim * 10 ** (snr_db / 10) * STATIC_POWER
    budget = wflmc.privacy.budget(epsilon, 0.01)
    budget_of_round = budget / STATIC_ROUNDS
    limits = np.broadcast_arrays(langevin, power[None, :], budget_of_round[:, None])
    return np.stack(limits)


def _draw_losses(axes: Axes, posterior: GaussianPosterior) -> None:
    """Draw the loss of every round at the points."""
    for point in POINTS:
        plan = _static_plan(posterior, point)
        axes.plot(
            range(1, len(plan.rounds) + 1),
            plan.loss.max(-1),
            color=point.color,
            linestyle=point.linestyle,
            linewidth=2,
            label=f"{point.letter}: {plan.regime}",
        )
    axes.set(xlabel="round", ylabel="privacy loss of the round", yscale="log")
    axes.set_title("loss over the rounds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _static_plan(posterior: GaussianPosterior, point: Point) -> wflmc.Plan:
    """Return the plan of examples/static.toml at another SNR and ε."""
    return wflmc.plan(
        posterior,
        wflmc.Link(wflmc.channel.static(power=STATIC_POWER), snr_db=point.snr_db),
        wflmc.Privacy(epsilon=point.epsilon, delta=0.01, clip=CLIP),
        step_size=STEP_FACTOR / (posterior.mu + posterior.L),
        burn_in=STATIC_ROUNDS - 1,
        samples=1,
        policy=wflmc.Policy(schedule="all"),
    )


def draw_distances() -> None:
    """Draw bound, exact law and chains, with little and with much clipping."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    link = wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=30)
    privacy = wflmc.Privacy(epsilon=15, delta=0.01, clip=CLIP)
    figure = new_figure(9.5, 4.0)
    panels = figure.subplots(1, 2)
    for axes, factor in zip(panels, (STEP_FACTOR, 1.0), strict=True):
        step_size = factor / (posterior.mu + posterior.L)
        plan = wflmc.plan(
            posterior, link, privacy, step_size=step_size, burn_in=50, samples=50
        )
        trace = wflmc.sample(
            jax.random.key(1), posterior, plan, chains=100, keep_burn_in=True
        )
        _draw_distances_of(axes, posterior, plan, trace)
        clip_rate = np.concatenate([trace.burn_in_clip_rate, trace.clip_rate.mean(0)])
        clipped = f"{clip_rate[1:].mean():.0%} of gradients clipped"
        axes.set_title(f"η = {factor:g}/(μ+L): {clipped}", fontsize=10)
    panels[0].set_ylabel("W2² to the posterior")
    panels[0].legend(fontsize=9)
    save(figure, "distances")


def _draw_distances_of(
    axes: Axes, posterior: GaussianPosterior, plan: wflmc.Plan, trace: wflmc.Trace
) -> None:
    """Draw bound, exact law, chains and the floor of their estimate over the rounds."""
    rounds = np.arange(1, len(plan.rounds) + 1)
    theta = np.concatenate([trace.warmup, trace.theta], axis=1)
    chains = wflmc.evaluation.estimate_w2_sq(theta, posterior.exact)
    law = wflmc.exact_w2_sq(posterior, plan)
    step_size = float(plan.step_size[-1])
    floor, _ = wflmc.evaluation.floor_w2_sq(
        posterior.exact, step_size, chains=100, draws=1
    )
    axes.plot(
        rounds, plan.bound, color=ORANGE, linestyle="--", linewidth=2, label="bound"
    )
    axes.plot(rounds, law, color=BLACK, linewidth=2, label="exact law (no clipping)")
    axes.plot(rounds, chains.per_round, color=BLUE, linewidth=1.2, label="100 chains")
    axes.axhline(floor, color=GREY, linestyle=":", label="100 perfect chains")
    axes.axvline(plan.burn_in + 0.5, color=GREY, linewidth=1)
    axes.set(yscale="log", xlabel="round")
    axes.grid(alpha=0.3)


SAMPLED_STEP = 3
"""Chains are sampled at every third step size, as they take longer than plans."""


def draw_step_sizes() -> None:
    """Draw bound, exact W2² and effective sample size against the step size."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    factors = np.geomspace(0.05, 1.6, 26)
    plans = [
        _plan_with_step(posterior, factor / (posterior.mu + posterior.L))
        for factor in factors
    ]
    figure = new_figure(9.5, 3.5)
    distance, size = figure.subplots(1, 2)
    _draw_worst_distances(distance, posterior, factors, plans)
    ess = [wflmc.evaluation.exact_ess(posterior, plan).min() for plan in plans]
    size.plot(factors, ess, color=PURPLE, linewidth=2)
    size.set(ylabel="ESS of 50 samples, one chain")
    ticks = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]
    for axes in (distance, size):
        axes.set(xscale="log", xlabel="η (μ+L)")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    save(figure, "step_sizes")


def _plan_with_step(posterior: GaussianPosterior, step_size: float) -> wflmc.Plan:
    """Return the plan of examples/fading.toml with a step size and a noise limit."""
    return wflmc.plan(
        posterior,
        wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=20),
        wflmc.Privacy(epsilon=15, delta=0.01, clip=CLIP),
        step_size=step_size,
        burn_in=50,
        samples=50,
        policy=wflmc.Policy(max_round_noise=2),
    )


def _draw_worst_distances(
    axes: Axes, posterior: GaussianPosterior, factors: Array, plans: list[wflmc.Plan]
) -> None:
    """Draw the worst W2² after burn-in: bound, exact law and chains."""
    bound = [plan.objective for plan in plans]
    law = [wflmc.exact_w2_sq(posterior, plan)[plan.burn_in :].max() for plan in plans]
    chains = []
    for plan in plans[::SAMPLED_STEP]:
        trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=100)
        estimate = wflmc.evaluation.estimate_w2_sq(trace.theta, posterior.exact)
        chains.append(estimate.worst)
    axes.plot(factors, bound, color=ORANGE, linestyle="--", linewidth=2, label="bound")
    axes.plot(factors, law, color=BLACK, linewidth=2, label="exact law (no clipping)")
    axes.plot(factors[::SAMPLED_STEP], chains, "o", color=BLUE, label="100 chains")
    axes.set(yscale="log", ylabel="worst W2² after burn-in")
    axes.legend(fontsize=9)
