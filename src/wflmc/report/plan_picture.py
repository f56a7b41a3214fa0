"""A plan as the picture an engineer wants: power, noise, privacy, who sends, and what limits each round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from wflmc.errors import InputError
from wflmc.planning import Plan
from wflmc.planning.solvers.single_sample import REGIMES
from wflmc.storage import replacing

COLORS = {"lmc-limited": "#F0E442", "power-limited": "#56B4E9", "dp-limited": "#E69F00"}
HATCHES = {"lmc-limited": "", "power-limited": "//", "dp-limited": "\\\\"}


SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: str) -> None:
    """Refuse a file that could not be drawn, before any work."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError("--plot", path, f"a file name that ends in {', '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise InputError("--plot", path, "in a folder that exists")


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Four panels over the rounds, the limit of each round as a coloured and hatched background; returns the file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    panels = figure.subplots(4, 1, sharex=True)
    rounds = np.arange(1, plan.rounds + 1)
    _gain(panels[0], plan, rounds)
    _noise(panels[1], plan, rounds)
    _privacy(panels[2], plan, rounds)
    _senders(panels[3], plan, rounds)
    for axes in panels:
        _shade(axes, plan, hatched=axes is panels[-1])
        if plan.burn_in:
            axes.axvline(plan.burn_in + 0.5, color="black", linewidth=1)
        axes.grid(alpha=0.3)
    panels[0].text(
        plan.burn_in + 0.5,
        1.0,
        " samples kept from here ",
        transform=panels[0].get_xaxis_transform(),
        va="bottom",
        ha="left" if plan.burn_in < 0.7 * plan.rounds else "right",
        fontsize=8,
    )
    panels[0].set_xlim(0.5, plan.rounds + 0.5)
    panels[-1].set_xlabel("round")
    figure.suptitle(_title(plan))
    _legend(figure, plan)
    target = Path(path)
    with replacing(target) as file:
        figure.savefig(file, format=target.suffix[1:].lower(), dpi=130)
    return target


def _title(plan: Plan) -> str:
    epsilon = plan.epsilon_spent
    privacy = (
        "no privacy statement"
        if epsilon is None
        else f"ε = {epsilon:.4g} ({plan.privacy.adjacency}) for the worst device"
    )
    if plan.objective_name == "exact":
        return f"W2² {plan.objective:.4g} if unclipped (worst after burn-in), {privacy}"
    if plan.bound is None:
        return f"kinetic dynamics, no bound is known, {privacy}"
    return f"bound on W2² {plan.objective:.4g} ({plan.objective_name} after burn-in), {privacy}"


def _gain(axes: Any, plan: Plan, rounds: Any) -> None:
    """α on the left; on the right, the share of its power limit that the weakest sender uses."""
    lines = axes.step(rounds, plan.gain, where="mid", color="black", label="gain α")
    axes.set(ylabel="gain α", yscale="log")
    if plan.power_share.any():
        right = axes.twinx()
        share = 100 * plan.power_share
        lines += right.step(
            rounds, share, where="mid", color="#CC79A7", linestyle="--", label="power used by weakest sender"
        )
        right.set(ylabel="% of its power limit", ylim=(0, 105))
        right.legend(handles=lines, fontsize=8, loc="upper left")


def _noise(axes: Any, plan: Plan, rounds: Any) -> None:
    """σ² of the update: the 2η, or 1 − e² for a velocity, that Langevin sampling uses, and what is too much."""
    useful, kinetic = plan.langevin_noise, plan.friction is not None
    label = f"useful for sampling ({'1 − e²' if kinetic else '2η'})"
    axes.fill_between(rounds, useful, plan.noise_variance, step="mid", color="#D55E00", alpha=0.5, label="excess")
    axes.fill_between(rounds, useful * 1e-1, useful, step="mid", color="#009E73", alpha=0.6, label=label)
    axes.step(rounds, plan.noise_variance, where="mid", color="black", linewidth=1)
    axes.set(ylabel=f"noise variance σ²{' of the velocity' if kinetic else ''}", yscale="log")
    axes.set_ylim(bottom=float(useful.min()) * 0.3)
    axes.legend(fontsize=8, loc="upper right")


def _privacy(axes: Any, plan: Plan, rounds: Any) -> None:
    """Loss spent so far: the worst device, the middle one, and the range over all."""
    if not plan.clips:
        axes.text(0.5, 0.5, "this scheme does not clip: no privacy", transform=axes.transAxes, ha="center")
        axes.set(ylabel="privacy loss spent")
        return
    spent = plan.ledger + np.cumsum(plan.loss, axis=0)
    most = int(np.argmax(spent[-1]))
    axes.fill_between(rounds, spent.min(1), spent.max(1), step="mid", color="#0072B2", alpha=0.25, label="all devices")
    axes.plot(rounds, spent[:, most], color="#0072B2", label="device that spends most")
    axes.plot(rounds, np.median(spent, axis=1), color="#0072B2", linestyle="--", label="median device")
    budget = float(plan.privacy.budget(plan.devices)[most])
    if np.isfinite(budget):
        axes.axhline(budget, color="black", linestyle=":", label="its budget")
    axes.set(ylabel="privacy loss spent")
    axes.legend(fontsize=8, loc="upper left")


def _senders(axes: Any, plan: Plan, rounds: Any) -> None:
    axes.step(rounds, plan.active_devices, where="mid", color="black")
    axes.set(ylabel=f"devices sending (of {plan.devices})")
    axes.set_ylim(0, plan.devices * 1.08)


def _shade(axes: Any, plan: Plan, hatched: bool) -> None:
    """The binding limit of each run of rounds."""
    edges = np.flatnonzero(np.diff(plan.limit)) + 1
    for first, last in zip([0, *edges], [*edges, plan.rounds], strict=True):
        name = REGIMES[plan.limit[first]]
        axes.axvspan(
            first + 0.5,
            last + 0.5,
            facecolor=COLORS[name],
            hatch=HATCHES[name] if hatched else None,
            edgecolor="grey",
            linewidth=0,
            alpha=0.25,
            zorder=0,
        )


def _legend(figure: Any, plan: Plan) -> None:
    from matplotlib.patches import Patch

    names = [name for name in REGIMES if plan.regime_share[name]]
    patches = [
        Patch(
            facecolor=COLORS[n],
            hatch=HATCHES[n],
            edgecolor="grey",
            alpha=0.5,
            label=f"{n} ({plan.regime_share[n]:.0%})",
        )
        for n in names
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9)
