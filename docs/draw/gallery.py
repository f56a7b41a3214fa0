"""Draw what each policy does on one common scenario, and print the table of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from docs.draw.style import BLUE, GREY, new_figure, save
from matplotlib.axes import Axes

import wflmc
from wflmc.posterior import GaussianPosterior


class Entry(NamedTuple):
    """The settings by which a plan of the gallery differs from the common ones."""

    policy: wflmc.Policy = wflmc.Policy()
    sampler: wflmc.Sampler = wflmc.Sampler()
    accountant: str = "exact"


POLICIES: dict[str, Entry] = {
    "optimized": Entry(),
    "equal": Entry(wflmc.Policy(power="equal")),
    "no-dp": Entry(wflmc.Policy(power="no-dp")),
    "noiseless-dp": Entry(wflmc.Policy(power="noiseless-dp")),
    "noiseless": Entry(wflmc.Policy(power="noiseless")),
    "all": Entry(wflmc.Policy(schedule="all")),
    "unbiased": Entry(wflmc.Policy(schedule="unbiased")),
    "average": Entry(wflmc.Policy(objective="average")),
    "exact": Entry(wflmc.Policy(objective="exact")),
    "causal": Entry(wflmc.Policy(csi="causal")),
    "paper-accountant": Entry(accountant="paper"),
    "max-round-noise": Entry(wflmc.Policy(max_round_noise=1)),
    "planned-steps": Entry(sampler=wflmc.Sampler(step_schedule="planned")),
}


class Setting(NamedTuple):
    """What all plans of the gallery have in common."""

    posterior: GaussianPosterior
    link: wflmc.Link


def common_setting() -> Setting:
    """Return the posterior and the link of examples/fading.toml at 12 dB."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    link = wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=12)
    return Setting(posterior, link)


def plan_of(name: str) -> wflmc.Plan:
    """Return the plan of a policy in the common setting."""
    posterior, link = common_setting()
    entry = POLICIES[name]
    privacy = wflmc.Privacy(
        epsilon=15, delta=0.01, clip=30, accountant=entry.accountant
    )
    return wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=50,
        samples=50,
        sampler=entry.sampler,
        policy=entry.policy,
    )


def table(names: Iterable[str]) -> str:
    """Return a row of Markdown for every policy, with its worst values.

    Columns are bound and exact W2² of the worst kept round, ESS of the worst parameter,
    ε of the worst device, and the fewest and most senders of a round.
    """
    posterior, _ = common_setting()
    rows = []
    for name in names:
        plan = plan_of(name)
        bound = np.max(plan.bound[plan.burn_in :])
        law = wflmc.exact_w2_sq(posterior, plan)[plan.burn_in :].max()
        ess = wflmc.evaluation.exact_ess(posterior, plan).min()
        epsilon = "none" if plan.epsilon_spent is None else f"{plan.epsilon_spent:.3g}"
        senders = f"{plan.active_devices.min()} … {plan.active_devices.max()}"
        cells = [f"`{name}`", f"{bound:.3g}", f"{law:.3g}", f"{ess:.3g}", epsilon]
        rows.append(f"| {' | '.join([*cells, senders])} |")
    return "\n".join(rows)


def draw_policies() -> None:
    """Draw every policy over the rounds, with the default policy in grey."""
    reference = plan_of("optimized")
    for name in POLICIES:
        figure = new_figure(10.5, 2.3)
        panels = figure.subplots(1, 4)
        if name != "optimized":
            _draw_plan(panels, reference, GREY, 1.0)
        _draw_plan(panels, plan_of(name), BLUE, 1.5)
        for axes in panels:
            axes.axvline(50.5, color="black", linewidth=0.8)
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=8)
            axes.set_xlabel("round", fontsize=8)
        save(figure, f"policy_{name}")


def _draw_plan(
    panels: Sequence[Axes], plan: wflmc.Plan, color: str, width: float
) -> None:
    """Draw gain, excess noise, privacy loss and active devices over the rounds."""
    rounds = np.arange(1, len(plan.rounds) + 1)
    gain, excess, loss, senders = panels
    excess_ratio = plan.excess_noise / plan.langevin_noise
    gain.plot(rounds, plan.gain, color=color, linewidth=width)
    gain.set_yscale("log")
    gain.set_ylim(1e-4, 3e-2)
    gain.set_title("gain α", fontsize=9)
    excess.plot(rounds, excess_ratio, color=color, linewidth=width)
    excess.set_yscale("symlog", linthresh=0.1)
    excess.set_ylim(-0.02, 2e3)
    excess.set_title("excess noise, in units of 2η", fontsize=9)
    loss.set_title("largest privacy loss of a device", fontsize=9)
    if plan.clips:
        _draw_loss(loss, plan, color, width)
    else:
        label = loss.text(0.3, 0.6, "no privacy", transform=loss.transAxes)
        label.set(ha="center", fontsize=9, color=color)
    senders.plot(rounds, plan.active_devices, color=color, linewidth=width)
    senders.set_ylim(0, 32)
    senders.set_title("active devices, of 30", fontsize=9)


def _draw_loss(axes: Axes, plan: wflmc.Plan, color: str, width: float) -> None:
    """Draw the loss so far of the device that has lost most, and its budget."""
    rounds = np.arange(1, len(plan.rounds) + 1)
    spent = np.cumsum(plan.loss, axis=0).max(-1)
    budget = float(plan.privacy.budget(plan.devices)[0])
    axes.plot(rounds, spent, color=color, linewidth=width)
    axes.axhline(budget, color="black", linestyle=":", linewidth=1)
