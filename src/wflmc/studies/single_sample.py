"""Figures 2 to 5 of the paper: one kept sample over a static channel, where everything is in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc import channel
from wflmc.channel import Link
from wflmc.planning import POLICIES, Plan, plan
from wflmc.planning.single_sample import DP, LMC, POWER, regime
from wflmc.privacy import Privacy
from wflmc.studies.rows import Row

Array = NDArray[np.float64]

SCHEMES = tuple(POLICIES)


@dataclass(frozen=True)
class Setting:
    """The paper's single-sample study: |h| = 0.01, ε = 8, δ = 0.01, ℓ = 30, S_b = 50, S_u = 1, everyone sends."""

    posterior: Any
    gain_power: float = 1e-4
    epsilon: float = 8.0
    delta: float = 0.01
    clip: float = 30.0
    burn_in: int = 50

    def step(self, factor: float) -> float:
        """η = factor/(μ + L)."""
        return float(factor / (self.posterior.mu + self.posterior.L))

    def plan(self, scheme: str, snr_db: float, step_size: float, epsilon: float | None = None) -> Plan:
        """The plan of one scheme with the paper's bound and accountant."""
        return plan(
            self.posterior,
            Link(channel.static(self.gain_power), snr_db),
            Privacy(epsilon or self.epsilon, self.delta, self.clip, "paper"),
            step_size=step_size,
            burn_in=self.burn_in,
            samples=1,
            power=scheme,
            schedule="all",
            bound="paper",
        )


class Figure(NamedTuple):
    """A curve per scheme: what to vary, over what, and how to label it."""

    title: str
    x_label: str
    grid: Callable[[Setting], Array]
    plan: Callable[[Setting, str, float], Plan]


def _snr_grid(_: Setting) -> Array:
    return np.arange(5.0, 40.5, 0.5)


def _step_grid(setting: Setting) -> Array:
    return np.linspace(0.1, 2.0, 96) / (setting.posterior.mu + setting.posterior.L)


def _epsilon_grid(_: Setting) -> Array:
    return np.arange(1.0, 20.5, 0.5)


FIGURES: dict[str, Figure] = {
    "fig3a": Figure(
        "Bound against SNR, η = 0.4/(μ+L)", "SNR (dB)", _snr_grid, lambda s, n, x: s.plan(n, x, s.step(0.4))
    ),
    "fig3b": Figure(
        "Bound against SNR, η = 0.13/(μ+L)", "SNR (dB)", _snr_grid, lambda s, n, x: s.plan(n, x, s.step(0.13))
    ),
    "fig4a": Figure("Bound against step size, 18 dB", "step size η", _step_grid, lambda s, n, x: s.plan(n, 18.0, x)),
    "fig4b": Figure("Bound against step size, 30 dB", "step size η", _step_grid, lambda s, n, x: s.plan(n, 30.0, x)),
    "fig5": Figure(
        "Bound against privacy level, 20 dB",
        "ε",
        _epsilon_grid,
        lambda s, n, x: s.plan(n, 20.0, s.step(0.4), x),
    ),
}

NAMES = ("fig2", *FIGURES)


def points(name: str, setting: Setting) -> Array:
    """The x values of a figure."""
    return _snr_grid(setting) if name == "fig2" else FIGURES[name].grid(setting)


def point(name: str, setting: Setting, x: float) -> list[Row]:
    """All rows of a figure at one x."""
    if name == "fig2":
        return _boundaries(setting, x)
    figure = FIGURES[name]
    return [Row(name, scheme, x, figure.plan(setting, scheme, x).objective) for scheme in SCHEMES]


def limits(setting: Setting, snr_db: Array, step_size: Array) -> tuple[Array, Array, float]:
    """Theorem 1's three limits on a = α²/N0: Langevin, power, and the equal share of the privacy budget."""
    privacy = Privacy(setting.epsilon, setting.delta, setting.clip, "paper")
    share = privacy.budget(1)[0] / (2 * setting.clip**2 * (setting.burn_in + 1))
    power = setting.posterior.dim * 10 ** (np.asarray(snr_db) / 10) * setting.gain_power / setting.clip**2
    return np.asarray(step_size) / 2, power, float(share)


def regime_map(setting: Setting, snr_db: Array, step_size: Array) -> NDArray[np.str_]:
    """Theorem 1's regime at every (SNR, η), broadcast."""
    return regime(*limits(setting, snr_db, step_size))


def _boundaries(setting: Setting, snr_db: float) -> list[Row]:
    """The regime map as curves: the largest η that is LMC-limited at this SNR, and where the others begin."""
    _, power, share = limits(setting, np.asarray(snr_db), np.asarray(0.0))
    edge = float(2 * np.minimum(power, share))
    beyond = POWER if power <= share else DP
    return [Row("fig2", name, snr_db, edge if name in (LMC, beyond) else None) for name in (LMC, POWER, DP)]
