"""Draw regimes, the three distances, and step sizes."""

from __future__ import annotations

from typing import Any

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

import wflmc

COLORS = {"lmc-limited": YELLOW, "power-limited": "#56B4E9", "dp-limited": ORANGE}
HATCHES = {"lmc-limited": "", "power-limited": "//", "dp-limited": "\\\\"}


def _single_sample(posterior: Any, snr_db: float, epsilon: float) -> Any:
    """Return the setting of examples/static.toml."""
    link = wflmc.Link(wflmc.channel.static(power=1e-4), snr_db=snr_db)
    privacy = wflmc.Privacy(epsilon=epsilon, delta=0.01, clip=30)
    keywords = {
        "step_size": 0.4 / (posterior.mu + posterior.L),
        "burn_in": 50,
        "samples": 1,
    }
    return wflmc.plan(
        posterior, link, privacy, policy=wflmc.Policy(schedule="all"), **keywords
    )


def _limits(posterior: Any, levels: Any, epsilons: Any) -> Any:
    """Return the three limits of Theorem 1 on the loss of a round, [limit, ε, SNR]: the smallest binds."""
    langevin = 30**2 * 0.4 / (posterior.mu + posterior.L)
    power = 2 * posterior.dim * 10 ** (levels / 10) * 1e-4
    budget = (
        np.array(
            [wflmc.Privacy(epsilon, 0.01, 30).budget(1)[0] for epsilon in epsilons]
        )
        / 51
    )
    return np.stack(np.broadcast_arrays(langevin, power[None, :], budget[:, None]))


def draw_regimes() -> None:
    """Draw which limit binds at which SNR and ε, and the loss over the rounds in each regime."""
    from matplotlib.patches import Patch

    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    levels, epsilons = np.linspace(5, 35, 301), np.linspace(1, 20, 191)
    names = list(COLORS)
    deciding = _limits(posterior, levels, epsilons).argmin(0)
    figure = new_figure(9.5, 3.9)
    plane, profile = figure.subplots(1, 2)
    for index, name in enumerate(names):
        look = {"colors": [COLORS[name]], "hatches": [HATCHES[name]], "alpha": 0.6}
        plane.contourf(levels, epsilons, deciding == index, [0.5, 1.5], **look)
    plane.set(
        xlabel="SNR (dB)", ylabel="ε (δ = 0.01, replace)", title="which limit binds"
    )
    handles = [
        Patch(
            facecolor=COLORS[n], hatch=HATCHES[n], edgecolor="grey", alpha=0.6, label=n
        )
        for n in names
    ]
    plane.legend(handles=handles, fontsize=9, loc="lower right")
    points = (
        ("A", 30.0, 18.0, GREEN, "-"),
        ("B", 10.0, 12.0, BLUE, "--"),
        ("C", 30.0, 8.0, RED, "-."),
    )
    for letter, snr, epsilon, color, style in points:
        plane.text(
            snr,
            epsilon,
            letter,
            ha="center",
            va="center",
            fontsize=12,
            fontweight="bold",
        )
        made = _single_sample(posterior, snr, epsilon)
        label = f"{letter}: {made.regime}"
        profile.plot(
            range(1, len(made.rounds) + 1),
            made.loss.max(-1),
            color=color,
            linestyle=style,
            linewidth=2,
            label=label,
        )
    profile.set(
        xlabel="round",
        ylabel="privacy loss of the round",
        yscale="log",
        title="loss over the rounds",
    )
    profile.grid(alpha=0.3)
    profile.legend(fontsize=9)
    save(figure, "regimes")


def draw_distances() -> None:
    """Draw bound, exact law and chains over the rounds, with little and with much clipping."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    link = wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=30)
    privacy = wflmc.Privacy(epsilon=15, delta=0.01, clip=30)
    figure = new_figure(9.5, 4.0)
    panels = figure.subplots(1, 2)
    for axes, factor in zip(panels, (0.4, 1.0), strict=True):
        step = factor / (posterior.mu + posterior.L)
        made = wflmc.plan(
            posterior, link, privacy, step_size=step, burn_in=50, samples=50
        )
        trace = wflmc.sample(
            jax.random.key(1), posterior, made, chains=100, keep_burn_in=True
        )
        _three(axes, posterior, made, trace)
        clipped = np.concatenate([trace.burn_in_clip_rate, trace.clip_rate.mean(0)])[
            1:
        ].mean()
        axes.set_title(
            f"η = {factor:g}/(μ+L): {clipped:.0%} of gradients clipped", fontsize=10
        )
    panels[0].set_ylabel("W2² to the posterior")
    panels[0].legend(fontsize=9)
    save(figure, "distances")


def _three(axes: Any, posterior: Any, made: Any, trace: Any) -> None:
    rounds = np.arange(1, len(made.rounds) + 1)
    theta = np.concatenate([trace.warmup, trace.theta], axis=1)
    chains = wflmc.evaluation.estimate_w2_sq(theta, posterior.exact)
    floor, _ = wflmc.evaluation.floor_w2_sq(
        posterior.exact, float(made.step_size[-1]), chains=100, draws=1
    )
    axes.plot(
        rounds, made.bound, color=ORANGE, linestyle="--", linewidth=2, label="bound"
    )
    axes.plot(
        rounds,
        wflmc.exact_w2_sq(posterior, made),
        color=BLACK,
        linewidth=2,
        label="exact law (no clipping)",
    )
    axes.plot(rounds, chains.per_round, color=BLUE, linewidth=1.2, label="100 chains")
    axes.axhline(floor, color=GREY, linestyle=":", label="100 perfect chains")
    axes.axvline(made.burn_in + 0.5, color=GREY, linewidth=1)
    axes.set(yscale="log", xlabel="round")
    axes.grid(alpha=0.3)


def draw_step_sizes() -> None:
    """Draw bound, exact W2² and effective sample size against the step size."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    link = wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=20)
    privacy = wflmc.Privacy(epsilon=15, delta=0.01, clip=30)
    factors = np.geomspace(0.05, 1.6, 26)
    keywords = {"burn_in": 50, "samples": 50, "policy": wflmc.Policy(max_round_noise=2)}
    made = [
        wflmc.plan(
            posterior,
            link,
            privacy,
            step_size=factor / (posterior.mu + posterior.L),
            **keywords,
        )
        for factor in factors
    ]
    law = [wflmc.exact_w2_sq(posterior, plan)[50:].max() for plan in made]
    ess = [wflmc.evaluation.exact_ess(posterior, plan).min() for plan in made]
    some = made[::3]
    traces = [
        wflmc.sample(jax.random.key(1), posterior, plan, chains=100) for plan in some
    ]
    chains = [
        wflmc.evaluation.estimate_w2_sq(trace.theta, posterior.exact).worst
        for trace in traces
    ]
    figure = new_figure(9.5, 3.5)
    distance, size = figure.subplots(1, 2)
    distance.plot(
        factors,
        [plan.objective for plan in made],
        color=ORANGE,
        linestyle="--",
        linewidth=2,
        label="bound",
    )
    distance.plot(
        factors, law, color=BLACK, linewidth=2, label="exact law (no clipping)"
    )
    distance.plot(factors[::3], chains, "o", color=BLUE, label="100 chains")
    distance.set(yscale="log", ylabel="worst W2² after burn-in")
    size.plot(factors, ess, color=PURPLE, linewidth=2)
    size.set(ylabel="ESS of 50 samples, one chain")
    distance.legend(fontsize=9)
    for axes in (distance, size):
        axes.set(xscale="log", xlabel="η (μ+L)")
        axes.set_xticks(
            [0.05, 0.1, 0.2, 0.4, 0.8, 1.6], ["0.05", "0.1", "0.2", "0.4", "0.8", "1.6"]
        )
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    save(figure, "step_sizes")
