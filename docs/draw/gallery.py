"""Draw what each policy does on one common scenario, and print the table of results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from docs.draw.style import BLUE, GREY, new_figure, save

import wflmc


class Entry(NamedTuple):
    """What a plan of the gallery is made with, beside the common setting."""

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


def setting() -> tuple[Any, Any]:
    """Return the posterior and the link of examples/fading.toml at 12 dB."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    return posterior, wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=12)


def plan_of(name: str) -> Any:
    """Return the plan of a policy in the common setting."""
    posterior, link = setting()
    entry = POLICIES[name]
    return wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(epsilon=15, delta=0.01, clip=30, accountant=entry.accountant),
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=50,
        samples=50,
        sampler=entry.sampler,
        policy=entry.policy,
    )


def table(names: Iterable[str]) -> str:
    """Return rows of Markdown with bound, exact W2², ESS and ε of each policy, all for the worst case."""
    posterior, _ = setting()
    rows = []
    for name in names:
        made = plan_of(name)
        law = wflmc.exact_w2_sq(posterior, made)[made.burn_in :].max()
        ess = wflmc.evaluation.exact_ess(posterior, made).min()
        bound = np.max(made.bound[made.burn_in :])
        epsilon = "none" if made.epsilon_spent is None else f"{made.epsilon_spent:.3g}"
        senders = f"{made.active_devices.min()} … {made.active_devices.max()}"
        rows.append(
            f"| `{name}` | {bound:.3g} | {law:.3g} | {ess:.3g} | {epsilon} | {senders} |"
        )
    return "\n".join(rows)


def draw_policies() -> None:
    """Draw gain, excess noise, privacy loss and active devices over the rounds, with the default policy in grey."""
    reference = plan_of("optimized")
    for name in POLICIES:
        figure = new_figure(10.5, 2.3)
        panels = figure.subplots(1, 4)
        if name != "optimized":
            _curves(panels, reference, GREY, 1.0)
        _curves(panels, plan_of(name), BLUE, 1.5)
        for axes in panels:
            axes.axvline(50.5, color="black", linewidth=0.8)
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=8)
            axes.set_xlabel("round", fontsize=8)
        save(figure, f"policy_{name}")


def _curves(panels: Any, made: Any, color: str, width: float) -> None:
    rounds = np.arange(1, len(made.rounds) + 1)
    look = {"color": color, "linewidth": width}
    gain, excess, spent, senders = panels
    gain.plot(rounds, made.gain, **look)
    gain.set_yscale("log")
    gain.set_ylim(1e-4, 3e-2)
    gain.set_title("gain α", fontsize=9)
    excess.plot(rounds, made.excess_noise / made.langevin_noise, **look)
    excess.set_yscale("symlog", linthresh=0.1)
    excess.set_ylim(-0.02, 2e3)
    excess.set_title("excess noise, in units of 2η", fontsize=9)
    spent.set_title("largest privacy loss of a device", fontsize=9)
    if made.clips:
        spent.plot(rounds, np.cumsum(made.loss, axis=0).max(-1), **look)
        spent.axhline(
            float(made.privacy.budget(made.devices)[0]),
            color="black",
            linestyle=":",
            linewidth=1,
        )
    else:
        spent.text(
            0.3,
            0.6,
            "no privacy",
            transform=spent.transAxes,
            ha="center",
            fontsize=9,
            color=color,
        )
    senders.plot(rounds, made.active_devices, **look)
    senders.set_ylim(0, 32)
    senders.set_title("active devices, of 30", fontsize=9)
