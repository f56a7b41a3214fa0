"""Draw the idea: one channel for all devices, its noise against the gain, and chains at three gains."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from docs.draw.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, new_figure, save

import wflmc


def draw_channel() -> None:
    """Draw devices that transmit at once, the noisy sum, and the two purposes of the noise."""
    figure = new_figure(9.5, 4.3)
    axes = figure.subplots()
    axes.set(xlim=(0, 19), ylim=(0, 8.6))
    axes.axis("off")
    for place, number in ((7.3, "1"), (5.2, "2"), (1.6, "K")):
        _box(
            axes,
            1.9,
            place,
            3.4,
            1.5,
            f"device {number}\ndata $D_{number}$, clipped\ngradient $g_{number}$",
            BLUE,
        )
        _arrow(axes, (3.7, place), (7.0, 4.55 + (place - 4.5) * 0.16), BLUE)
    axes.text(1.9, 3.35, "⋮", ha="center", va="center", fontsize=16)
    axes.text(
        5.6,
        6.75,
        "all at once,\n$(\\alpha/h_k)\\,g_k$",
        ha="center",
        fontsize=10,
        color=BLUE,
    )
    axes.text(
        7.6,
        4.5,
        "+",
        ha="center",
        va="center",
        fontsize=22,
        bbox={"boxstyle": "circle", "fc": "white"},
    )
    axes.text(7.6, 7.6, "channel noise $z$", ha="center", fontsize=11, color=RED)
    _arrow(axes, (7.6, 7.3), (7.6, 5.35), RED)
    _box(
        axes,
        12.2,
        4.5,
        4.8,
        1.6,
        "server receives\n$y = \\alpha\\,\\Sigma_k\\, g_k + z$",
        BLACK,
    )
    _arrow(axes, (8.4, 4.5), (9.7, 4.5), BLACK)
    _box(
        axes,
        16.2,
        7.2,
        5.2,
        1.9,
        "it is the random term that\nLangevin sampling needs:\nsamples of the posterior",
        GREEN,
    )
    _box(
        axes,
        16.2,
        1.8,
        5.2,
        1.9,
        "it protects what each device\nhas sent: $(\\varepsilon, \\delta)$\ndifferential privacy",
        ORANGE,
    )
    _arrow(axes, (13.6, 5.4), (14.6, 6.2), GREEN)
    _arrow(axes, (13.6, 3.6), (14.6, 2.8), ORANGE)
    axes.plot(
        [12.2, 12.2, 1.9], [3.6, 0.3, 0.3], color=GREY, linewidth=1.2, linestyle="--"
    )
    _arrow(axes, (1.9, 0.3), (1.9, 0.8), GREY)
    axes.text(
        7.2,
        0.5,
        "broadcast of the new θ, every round",
        ha="center",
        fontsize=9,
        color=GREY,
    )
    save(figure, "idea_channel")


def _box(
    axes: Any, x: float, y: float, width: float, height: float, text: str, color: str
) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (x - width / 2, y - height / 2)
    look = {
        "boxstyle": "round,pad=0.02,rounding_size=0.25",
        "facecolor": "white",
        "edgecolor": color,
        "linewidth": 1.6,
    }
    axes.add_patch(FancyBboxPatch(corner, width, height, **look))
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=BLACK)


def _arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], color: str
) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6},
    )


def draw_gain() -> None:
    """Draw the noise of the update and the privacy loss of a round against the gain."""
    figure = new_figure(7.6, 3.8)
    axes = figure.subplots()
    gain = np.geomspace(0.3, 3, 200)
    channel = gain**-2.0
    axes.plot(
        gain,
        np.maximum(channel, 1),
        color=BLACK,
        linewidth=2,
        label="noise of the update, σ²",
    )
    axes.plot(
        gain,
        channel,
        color=RED,
        linestyle="--",
        label="of which from the channel, ∝ 1/α²",
    )
    axes.fill_between(gain, 1, np.maximum(channel, 1), color=RED, alpha=0.2)
    axes.fill_between(gain, np.minimum(channel, 1), 1, color=GREEN, alpha=0.2)
    axes.plot(
        gain,
        0.45 * gain**2,
        color=ORANGE,
        linewidth=2,
        linestyle="-.",
        label="privacy loss of the round, ∝ α²",
    )
    axes.axvline(1, color=GREY, linewidth=1)
    axes.text(0.36, 1.25, "excess: samples\nspread too widely", color=RED, fontsize=10)
    axes.text(
        1.62, 0.6, "the server adds this:\nit protects nobody", color=GREEN, fontsize=10
    )
    axes.text(1.02, 0.105, "Langevin cap", color=BLACK, fontsize=10)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="gain α over the gain at the Langevin cap",
        ylabel="relative size",
    )
    axes.set(xlim=(0.3, 3), ylim=(0.09, 12))
    axes.set_xticks([0.3, 0.5, 1, 2, 3], ["0.3", "0.5", "1", "2", "3"])
    axes.set_yticks([0.1, 1, 10], ["0.1", "1 (Langevin: 2η)", "10"])
    axes.minorticks_off()
    axes.legend(fontsize=9, loc="upper center")
    save(figure, "idea_gain")


def draw_loudness() -> None:
    """Draw chains on a two-dimensional posterior at three gains, with the privacy cost of each."""
    posterior = wflmc.gaussian_regression(jax.random.key(3), devices=30, dim=2)
    step, privacy = (
        0.4 / (posterior.mu + posterior.L),
        wflmc.Privacy(epsilon=1, delta=0.01, clip=30),
    )
    ideal = wflmc.Link(wflmc.channel.static(), snr_db=100)
    keywords = {
        "step_size": step,
        "burn_in": 60,
        "samples": 40,
        "policy": wflmc.Policy("no-dp"),
    }
    at_cap = wflmc.plan(posterior, ideal, privacy, **keywords)
    figure = new_figure(9.5, 3.5)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    words = (
        "low gain: far more noise than needed",
        "at the Langevin cap: the right noise",
        "high gain: the server adds noise",
    )
    for axes, factor, text in zip(panels, (0.25, 1.0, 4.0), words, strict=True):
        gain = factor * at_cap.gain
        made = at_cap.with_rounds(
            gain=gain, server_noise=np.maximum(0.0, 2 * step - (step / gain) ** 2)
        )
        trace = wflmc.sample(jax.random.key(1), posterior, made, chains=40)
        distance = wflmc.exact_w2_sq(posterior, made)[60:].max()
        _cloud(axes, posterior.exact, trace.theta.reshape(-1, 2))
        numbers = f"α = {factor:g} × cap, W2² = {distance:.1g}, ε = {made.epsilon_spent:.0f} (replace)"
        axes.set_title(f"{text}\n{numbers}", fontsize=9)
    panels[0].set_ylabel("θ₂")
    save(figure, "idea_loudness")


def _cloud(axes: Any, exact: Any, theta: Any) -> None:
    """Draw samples, and the ellipses that contain half and 99 % of the posterior."""
    axes.plot(
        theta[:, 0],
        theta[:, 1],
        ".",
        color=BLUE,
        markersize=2.5,
        alpha=0.5,
        label="samples",
    )
    turn = np.linspace(0, 2 * np.pi, 200)
    root = np.linalg.cholesky(exact.covariance)
    for share in (0.5, 0.99):
        ring = (
            exact.mean
            + np.sqrt(-2 * np.log(1 - share)) * (root @ [np.cos(turn), np.sin(turn)]).T
        )
        axes.plot(ring[:, 0], ring[:, 1], color=BLACK, linewidth=1.4)
    axes.set_xlabel("θ₁")
    reach = 10 * np.sqrt(np.diag(exact.covariance).max())
    axes.set(
        xlim=(exact.mean[0] - reach, exact.mean[0] + reach),
        ylim=(exact.mean[1] - reach, exact.mean[1] + reach),
    )
