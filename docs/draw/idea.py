"""Draw the idea: one channel for all devices, its noise, and chains at three gains."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from docs.draw.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, new_figure, save
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from numpy.typing import NDArray

import wflmc
from wflmc.posterior import Gaussian

Array = NDArray[np.floating]


class Rectangle(NamedTuple):
    """A rectangle of the diagram, in its coordinates."""

    x: float
    """Of the centre."""
    y: float
    """Of the centre."""
    width: float
    height: float


def draw_channel() -> None:
    """Draw devices that transmit at once, the noisy sum, and its two purposes."""
    figure = new_figure(9.5, 4.3)
    axes = figure.subplots()
    axes.set(xlim=(0, 19), ylim=(0, 8.6))
    axes.axis("off")
    _draw_devices(axes)
    _draw_sum(axes)
    _draw_purposes(axes)
    _draw_broadcast(axes)
    save(figure, "idea_channel")


def _draw_devices(axes: Axes) -> None:
    for y, number in ((7.3, "1"), (5.2, "2"), (1.6, "K")):
        text = f"device {number}\ndata $D_{number}$, clipped\ngradient $g_{number}$"
        _box(axes, Rectangle(1.9, y, 3.4, 1.5), text, BLUE)
        _arrow(axes, (3.7, y), (7.0, 4.55 + (y - 4.5) * 0.16), BLUE)
    axes.text(1.9, 3.35, "⋮", ha="center", va="center", fontsize=16)
    signal = "all at once,\n$(\\alpha/h_k)\\,g_k$"
    axes.text(5.6, 6.75, signal, ha="center", fontsize=10, color=BLUE)


def _draw_sum(axes: Axes) -> None:
    circle = {"boxstyle": "circle", "fc": "white"}
    axes.text(7.6, 4.5, "+", ha="center", va="center", fontsize=22, bbox=circle)
    axes.text(7.6, 7.6, "channel noise $z$", ha="center", fontsize=11, color=RED)
    _arrow(axes, (7.6, 7.3), (7.6, 5.35), RED)
    text = "server receives\n$y = \\alpha\\,\\Sigma_k\\, g_k + z$"
    _box(axes, Rectangle(12.2, 4.5, 4.8, 1.6), text, BLACK)
    _arrow(axes, (8.4, 4.5), (9.7, 4.5), BLACK)


def _draw_purposes(axes: Axes) -> None:
    sampling = (
        "it is the random term that\nLangevin sampling needs:\nsamples of the posterior"
    )
    privacy = (
        "it protects what each device\nhas sent: $(\\varepsilon, \\delta)$\n"
        "differential privacy"
    )
    _box(axes, Rectangle(16.2, 7.2, 5.2, 1.9), sampling, GREEN)
    _box(axes, Rectangle(16.2, 1.8, 5.2, 1.9), privacy, ORANGE)
    _arrow(axes, (13.6, 5.4), (14.6, 6.2), GREEN)
    _arrow(axes, (13.6, 3.6), (14.6, 2.8), ORANGE)


def _draw_broadcast(axes: Axes) -> None:
    x = [12.2, 12.2, 1.9]
    y = [3.6, 0.3, 0.3]
    axes.plot(x, y, color=GREY, linewidth=1.2, linestyle="--")
    _arrow(axes, (1.9, 0.3), (1.9, 0.8), GREY)
    text = "broadcast of the new θ, every round"
    axes.text(7.2, 0.5, text, ha="center", fontsize=9, color=GREY)


def _box(axes: Axes, rectangle: Rectangle, text: str, color: str) -> None:
    x, y, width, height = rectangle
    box = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0.02,rounding_size=0.25",
        facecolor="white",
        edgecolor=color,
        linewidth=1.6,
    )
    axes.add_patch(box)
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=BLACK)


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str
) -> None:
    properties = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6}
    axes.annotate("", end, start, arrowprops=properties)


def draw_gain() -> None:
    """Draw the noise of the update and the privacy loss of a round against the gain."""
    figure = new_figure(7.6, 3.8)
    axes = figure.subplots()
    gain = np.geomspace(0.3, 3, 200)
    channel_noise = gain**-2.0
    update_noise = np.maximum(channel_noise, 1)
    loss = 0.45 * gain**2
    axes.plot(
        gain, update_noise, color=BLACK, linewidth=2, label="noise of the update, σ²"
    )
    channel_label = "of which from the channel, ∝ 1/α²"
    axes.plot(gain, channel_noise, color=RED, linestyle="--", label=channel_label)
    axes.fill_between(gain, 1, update_noise, color=RED, alpha=0.2)
    axes.fill_between(gain, np.minimum(channel_noise, 1), 1, color=GREEN, alpha=0.2)
    loss_label = "privacy loss of the round, ∝ α²"
    axes.plot(gain, loss, color=ORANGE, linewidth=2, linestyle="-.", label=loss_label)
    axes.axvline(1, color=GREY, linewidth=1)
    excess = "excess: samples\nspread too widely"
    added = "the server adds this:\nit protects nobody"
    axes.text(0.36, 1.25, excess, color=RED, fontsize=10)
    axes.text(1.62, 0.6, added, color=GREEN, fontsize=10)
    axes.text(1.02, 0.105, "Langevin cap", color=BLACK, fontsize=10)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="gain α over the gain at the Langevin cap",
        ylabel="relative size",
        xlim=(0.3, 3),
        ylim=(0.09, 12),
    )
    axes.set_xticks([0.3, 0.5, 1, 2, 3], ["0.3", "0.5", "1", "2", "3"])
    axes.set_yticks([0.1, 1, 10], ["0.1", "1 (Langevin: 2η)", "10"])
    axes.minorticks_off()
    axes.legend(fontsize=9, loc="upper center")
    save(figure, "idea_gain")


GAINS = {
    0.25: "low gain: far more noise than needed",
    1.0: "at the Langevin cap: the right noise",
    4.0: "high gain: the server adds noise",
}
"""Gains over that at the Langevin cap, with their captions."""


def draw_three_gains() -> None:
    """Draw chains on a posterior of two parameters at three gains, with their ε."""
    posterior = wflmc.gaussian_regression(jax.random.key(3), devices=30, dim=2)
    step_size = 0.4 / (posterior.mu + posterior.L)
    plan_at_cap = wflmc.plan(
        posterior,
        wflmc.Link(wflmc.channel.static(), snr_db=100),
        wflmc.Privacy(epsilon=1, delta=0.01, clip=30),
        step_size=step_size,
        burn_in=60,
        samples=40,
        policy=wflmc.Policy("no-dp"),
    )
    figure = new_figure(9.5, 3.5)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for axes, (factor, caption) in zip(panels, GAINS.items(), strict=True):
        gain = factor * plan_at_cap.gain
        server_noise = np.maximum(0.0, 2 * step_size - (step_size / gain) ** 2)
        plan = plan_at_cap.with_rounds(gain=gain, server_noise=server_noise)
        trace = wflmc.sample(jax.random.key(1), posterior, plan, chains=40)
        distance = wflmc.exact_w2_sq(posterior, plan)[plan.burn_in :].max()
        epsilon = f"ε = {plan.epsilon_spent:.0f} (replace)"
        numbers = f"α = {factor:g} × cap, W2² = {distance:.1g}, {epsilon}"
        _draw_samples(axes, posterior.exact, trace.theta.reshape(-1, 2))
        axes.set_title(f"{caption}\n{numbers}", fontsize=9)
    panels[0].set_ylabel("θ₂")
    save(figure, "idea_gains")


def _draw_samples(axes: Axes, exact: Gaussian, theta: Array) -> None:
    """Draw samples, and the ellipses that contain half and 99 % of the posterior."""
    x, y = theta.T
    axes.plot(x, y, ".", color=BLUE, markersize=2.5, alpha=0.5, label="samples")
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    root = np.linalg.cholesky(exact.covariance)
    for probability in (0.5, 0.99):
        radius = np.sqrt(-2 * np.log(1 - probability))
        x, y = exact.mean[:, None] + radius * (root @ circle)
        axes.plot(x, y, color=BLACK, linewidth=1.4)
    axes.set_xlabel("θ₁")
    reach = 10 * np.sqrt(np.diag(exact.covariance).max())
    centre_x, centre_y = exact.mean
    axes.set_xlim(centre_x - reach, centre_x + reach)
    axes.set_ylim(centre_y - reach, centre_y + reach)
