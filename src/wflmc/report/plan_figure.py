"""A plan over its rounds: gain, power, noise, privacy, active devices, and the limit that each round sits at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from wflmc.errors import InputError
from wflmc.planning import Plan
from wflmc.planning.solvers.single_sample import REGIMES
from wflmc.report.figure import BLUE, GREEN, PURPLE, RED, Axis, Band, Bars, Figure, Line, Panel, Shade
from wflmc.report.matplotlib_pictures import draw_picture
from wflmc.report.study_figures import LIMIT_COLORS, LIMIT_HATCHES
from wflmc.runs.documents import PlanFile

SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: str) -> None:
    """Refuse a file that could not be drawn, before any work."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError("--plot", path, f"a file name that ends in {', '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise InputError("--plot", path, "in a folder that exists")


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Draw a plan as a picture; return the file."""
    return draw_picture(figure_of_plan(plan, plan.devices, plan.burn_in, plan), Path(path))[0]


def figure_of_plan(rounds: Plan | PlanFile, devices: int, burn_in: int, plan: Plan | None) -> Figure:
    """Return stacked panels over the rounds; those that need the data again only with the plan itself."""
    x = np.arange(1, len(rounds.gain) + 1)

    def panel(title: str, name: str, y: Any, axis: Axis) -> Panel:
        return Panel([Line(x, y, name, step=True)], axis, title)

    panels = [panel("gain α: received amplitude per unit of gradient", "gain α", rounds.gain, Axis(log=True))]
    panels += [] if plan is None else _planned(plan, x)
    title = f"active devices, of {devices}"
    panels.append(panel(title, "active devices", rounds.active_devices, Axis(range=(0, 1.08 * devices))))
    if np.nan_to_num(np.array(rounds.threshold, dtype=float)).any():
        title = "threshold: the weakest channel |h| with which a device transmits"
        panels.append(panel(title, "threshold", rounds.threshold, Axis(zero=True)))
    if min(rounds.step_size) < max(rounds.step_size):
        panels.append(panel("step size η", "step size", rounds.step_size, Axis(zero=True)))
    caption = "The plan round by round, computed before anything was transmitted."
    if burn_in:
        caption += f" Draws are kept from the vertical line on, round {burn_in + 1:,}."
    if plan is not None:
        caption += " Background colours show which limit a round sits at."
    return Figure(
        panels,
        Axis("round", range=(0.5, len(x) + 0.5)),
        "" if plan is None else _title(plan),
        caption,
        stacked=True,
        width=9,
        vertical=burn_in + 0.5 if burn_in else None,
        vertical_name="draws are kept from here" if burn_in else "",
        shades=[] if plan is None else _shades(plan),
    )


def _title(plan: Plan) -> str:
    epsilon = plan.epsilon_spent
    privacy = f"ε = {epsilon:.4g} ({plan.privacy.adjacency}), worst device" if epsilon else "no privacy statement"
    if plan.objective_name == "exact":
        return f"W2² {plan.objective:.4g} without clipping (worst after burn-in); {privacy}"
    if plan.bound is None:
        return f"kinetic dynamics, no bound is known; {privacy}"
    return f"bound on W2² {plan.objective:.4g} ({plan.objective_name} after burn-in); {privacy}"


def _planned(plan: Plan, x: Any) -> list[Panel]:
    """Return power, noise and privacy of every round."""
    panels = []
    if plan.power_share.any():
        share = Line(x, 100 * plan.power_share, "power", PURPLE, step=True)
        title = "transmit power of the weakest active device, % of its limit"
        panels.append(Panel([share], Axis(range=(0, 105)), title))
    needed, total = plan.langevin_noise, plan.noise_variance
    noise: Sequence[Line | Band | Bars] = (
        Band(x, 0.1 * needed, needed, "noise that Langevin sampling needs", GREEN, 0.5, step=True),
        Band(x, needed, total, "excess noise", RED, 0.4, step=True),
        Line(x, total, "noise", step=True, width=1),
    )
    moved = "parameters" if plan.bound is not None else "velocity"
    panels.append(Panel(noise, Axis(log=True), f"noise variance σ² of the update of the {moved}"))
    if not plan.clips:
        return panels
    spent = plan.ledger + np.cumsum(plan.loss, axis=0)
    most = int(np.argmax(spent[-1]))
    losses: list[Line | Band | Bars] = [
        Band(x, spent.min(1), spent.max(1), "all devices", BLUE, 0.25, step=True),
        Line(x, spent[:, most], f"device {most}, which spends most", BLUE, step=True),
        Line(x, np.median(spent, axis=1), "median device", BLUE, "--", step=True),
    ]
    budget = float(plan.privacy.budget(plan.devices)[most])
    if np.isfinite(budget):
        losses.append(Line([x[0], x[-1]], [budget] * 2, f"budget of device {most}", dash=":"))
    panels.append(Panel(losses, Axis(zero=True), "privacy loss so far, Σ 2(αℓ)²/N0"))
    return panels


def _shades(plan: Plan) -> list[Shade]:
    """Return the ranges of rounds that sit at each limit."""
    edges = [0, *(np.flatnonzero(np.diff(plan.limit)) + 1).tolist(), len(plan.rounds)]
    shades = []
    for name, share in plan.regime_share.items():
        here = [(a + 0.5, b + 0.5) for a, b in pairwise(edges) if REGIMES[plan.limit[a]] == name]
        if share:
            label = f"round is {name} ({share:.0%})"
            shades.append(Shade(label, LIMIT_COLORS[name], LIMIT_HATCHES[name], here))
    return shades
